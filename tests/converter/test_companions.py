"""What travels with the weights, and what of a replaced folder is its user's, by rule and through every command."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.command import call
from helpers.covering import covered
from helpers.families import CONFIGS, save_hf
from helpers.unknown import composite
from hypothesis import given
from hypothesis import strategies as st

from gptkit.converter.companions import companions_in, free_name, is_checkpoints, is_weights, travelling
from gptkit.converter.convert import convert
from gptkit.converter.formats import gguf_header
from gptkit.converter.manifest import check_manifest
from gptkit.converter.publish import Staging, users_files

TRAVEL = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"D {{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"T {{ messages }}",
    "additional_chat_templates/rag.jinja": b"R {{ messages }}",
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "vocab.txt": b"a\nb\n",
    "source.spm": b"\x00",
    "target.spm": b"\x01",
    "sentencepiece.bpe.model": b"\x02",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
    "config_sentence_transformers.json": b"{}",
    "LICENSE": b"mine",
    "NOTICE.txt": b"yours",
}
STAY = {
    "README.md": b"# card",
    "notes.json": b"{}",
    "notes.txt": b"n",
    "modeling_own.py": b"x = 1",
    "tokenization_own.py": b"x = 1",
    "optimizer.pt": b"x",
    "training_args.bin": b"x",
    "trainer_state.json": b"{}",
    "all_results.json": b"{}",
    "quantize_config.json.bak": b"{}",
    ".gitattributes": b"x",
    "figures/loss.png": b"x",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"x",
    "original/params.json": b"{}",
    "original/tokenizer.model": b"x",
    "original/consolidated.00.pth": b"x",
    "checkpoint-5/tokenizer.json": b"{}",
    "checkpoint-5/model.safetensors": b"x",
    "code/chat_template.jinja": b"x",
    "code/run.py": b"x",
    "deep/er/chat_template.jinja": b"x",
    "deep/chat_template.jinja": b"x",
    "other/tokenizer.json": b"{}",
    "other/config.json": b"{}",
}


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    save_hf(CONFIGS["llama"], folder)
    put(folder, {**TRAVEL, **STAY})
    return folder


def test_what_travels(model: Path) -> None:
    found = {each.name: each.read_bytes() for each in companions_in(model)}
    assert found == TRAVEL


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "{model}", "{out}"],
        ["convert", "{model}", "{out}", "--to", "hf"],
        ["convert", "{model}", "{out}", "--to", "dcp"],
        ["swap", "{model}", "{out}", "--attention", "mha", "--no-measure"],
        ["audit", "{model}", "--fix", "{out}"],
    ],
    ids=lambda words: " ".join(words),
)
def test_it_travels_through_every_command(command: list[str], model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()  # no tokenizer that could be read
    travel = {name: data for name, data in TRAVEL.items() if name != "tokenizer.json"}
    run = call(*(word.format(model=tmp_path / "model", out=tmp_path / "out") for word in command))
    assert run.exit_code in (0, 3), run.output
    found = contents(tmp_path / "out")
    assert {name: data for name, data in found.items() if name in travel} == travel
    assert not set(STAY) & set(found) - {"README.md"}
    assert check_manifest(tmp_path / "out") == []


def test_audit_compares_by_the_same_rule(tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert("sample:llama", source, "hf")
    put(source, {name: data for name, data in TRAVEL.items() if not (source / name).exists()})
    convert(source, tmp_path / "new", "hf")
    names = [each.name for each in companions_in(source) if not each.name.startswith(("LICENSE", "NOTICE"))]
    assert {*TRAVEL} - {"LICENSE", "NOTICE.txt"} <= {*names}
    assert call("audit", str(tmp_path / "new"), "--source", str(source)).exit_code == 0
    for name in names:
        (tmp_path / "new" / name).rename(tmp_path / "aside")
        run = call("audit", str(tmp_path / "new"), "--source", str(source), "--json")
        assert name in run.stdout, name
        (tmp_path / "aside").rename(tmp_path / "new" / name)


def test_a_gguf_has_every_template_and_gives_them_back(tmp_path: Path) -> None:
    convert("sample:llama", tmp_path / "model", "hf")
    templates = {name: data for name, data in TRAVEL.items() if name.endswith(".jinja")}
    put(tmp_path / "model", templates)
    convert(tmp_path / "model", tmp_path / "model.gguf", "gguf")
    metadata = gguf_header.open_header(tmp_path / "model.gguf").metadata
    assert metadata["tokenizer.chat_template"] == "D {{ messages }}"
    assert metadata["tokenizer.chat_template.tool_use"] == "T {{ messages }}"
    convert(tmp_path / "model.gguf", tmp_path / "back", "hf")
    back = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["chat_template"]
    assert {each["name"]: each["template"] for each in back} == {
        "default": "D {{ messages }}",
        "tool_use": "T {{ messages }}",
        "rag": "R {{ messages }}",
    }


def test_links_out_of_the_folder_do_not_travel(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    shutil.copytree(model, tmp_path / "model")
    for name in ("LICENSE", "vocab.txt", "additional_chat_templates/rag.jinja"):
        (tmp_path / "model" / name).unlink()
        (tmp_path / "model" / name).symlink_to(tmp_path / "secret")
    (tmp_path / "model" / "tokens").symlink_to(tmp_path)
    names = {each.name for each in companions_in(tmp_path / "model")}
    assert names == set(TRAVEL) - {"LICENSE", "vocab.txt", "additional_chat_templates/rag.jinja"}


NAMES = st.text(st.sampled_from("ab._-Tk/"), max_size=12)


@given(st.sets(NAMES | st.sampled_from([*TRAVEL, *STAY, "model.safetensors", "config.json"])))
def test_laws_of_names(names: set[str]) -> None:
    found = travelling(names)
    assert set(found) <= names and found == sorted(found)
    assert not any(map(is_weights, found)) and "config.json" not in found
    assert travelling(found) == found  # what has travelled travels on
    for name in names:
        assert free_name(name, names) not in names
        assert not is_weights(name) or "/" in name or is_checkpoints(name)


# --- what of a replaced folder is the user's --------------------------------------------------------------------------


USERS = {
    "README.md": b"my card",
    "LICENSE": b"my licence",
    "notes.txt": b"n",
    "notes.json": b"{}",
    ".gitignore": b"*",
    "optimizer.pt": b"state",
    "sub/x": b"y",
    "sub/deeper/z": b"z",
    "checkpoint-5/model.safetensors": b"w",
}
BUDGET = ("--tokens", "512", "--context", "32")
COMMANDS = {
    "convert": ["convert", "sample:gpt2", "{out}", "--force"],
    "convert hf": ["convert", "sample:gpt2", "{out}", "--to", "hf", "--force"],
    "convert in place": ["convert", "{out}", "{out}", "--to", "hf", "--force"],
    "swap": ["swap", "sample:gpt2", "{out}", "--norm", "rmsnorm", "--force", "--no-measure"],
    "audit --fix": ["audit", "{out}", "--fix", "{out}", "--force"],
    "tokenize": ["tokenize", "{text}", "{out}", "--tokenizer", "bytes", "--force"],
    "train": ["train", "sample:gpt2", "{out}", "--data", "{text}", *BUDGET, "--force"],
    "heal": ["heal", "{changed}", "{out}", "--teacher", "sample:gpt2", "--data", "{text}", *BUDGET, "--force"],
    "extract": ["extract", "text", "{whole}", "{out}", "--force"],
}


@covered("name", "own")
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("own", [False, True], ids=["downloaded", "written by gptkit"])
def test_force_keeps_what_is_not_the_checkpoints(name: str, own: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if own:
        convert("sample:llama", out, "hf")
    else:
        save_hf(CONFIGS["llama"], out)
    put(out, USERS)
    (out / "empty").mkdir()
    (out / "link").symlink_to("notes.txt")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    places = {"out": out, "text": tmp_path / "text.txt", "changed": tmp_path / "changed", "whole": tmp_path / "whole"}
    if name == "heal":
        drop = call("swap", "sample:gpt2", tmp_path / "changed", "--layers", "drop:1", "--no-measure")
        assert drop.exit_code == 0, drop.output
    if name == "extract":
        composite("llava").save_pretrained(tmp_path / "whole")
    before = {path.name for path in tmp_path.iterdir()}
    run = call(*(word.format(**places) for word in COMMANDS[name]))
    assert run.exit_code in (0, 3), run.output
    found = contents(out)
    for file, data in USERS.items():
        assert data in (found.get(file), found.get(f"{file}.old")), file
    assert (out / "empty").is_dir()
    assert (out / "link").readlink() == Path("notes.txt")
    assert check_manifest(out) == []
    # Once more: nothing is lost, and nothing is kept twice.
    run = call(*(word.format(**places) for word in COMMANDS[name]))
    assert run.exit_code in (0, 3), run.output
    again = contents(out)
    assert all(data in (again.get(file), again.get(f"{file}.old")) for file, data in USERS.items())
    assert not any(file.endswith((".old.old", ".old2")) for file in again)
    runs = {"train": {"out.training"}, "heal": {"out.healing"}}.get(name, set())
    assert {path.name for path in tmp_path.iterdir()} == before | runs


def test_what_the_checkpoint_was_is_gone(tmp_path: Path) -> None:
    """Weights of another format, old shards and an old tokenizer would be taken for the new model's."""
    out = tmp_path / "out"
    convert("sample:llama", out, "hf", max_shard_bytes=300_000)
    put(out, {"ckpt.pt": b"w", "pytorch_model.bin": b"w", "old.gguf": b"w", "spiece.model": b"t", "USERS": b"u"})
    convert("sample:gpt2", out, "local", force=True)
    assert set(contents(out)) == {*contents_of_local(tmp_path), "USERS"}


def contents_of_local(folder: Path) -> set[str]:
    convert("sample:gpt2", folder / "fresh", "local")
    return set(contents(folder / "fresh"))


def test_a_changed_file_of_ours_is_the_users(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model card that was edited is kept beside the new one, and one that was not is replaced."""
    out = tmp_path / "out"

    def publish(card: str) -> None:
        with Staging(out, force=True) as staging:
            put(staging.path, {"config.json": b"{}", "README.md": card.encode()})
            staging.commit({})

    for card in ("first", "second"):
        publish(card)
    assert contents(out).keys() == {"README.md", "config.json", "manifest.json"}
    (out / "README.md").write_text("second, and more")
    assert users_files(out) == ["README.md"]
    publish("third")
    assert (out / "README.md").read_text() == "third"
    assert (out / "README.md.old").read_text() == "second, and more"
    assert "kept README.md as README.md.old" in capfd.readouterr().err
    assert check_manifest(out) == []


def test_a_pipe_is_refused_by_name(tmp_path: Path) -> None:
    convert("sample:llama", tmp_path / "out")
    os.mkfifo(tmp_path / "out" / "pipe")
    before = set((tmp_path / "out").iterdir())
    run = call("convert", "sample:llama", str(tmp_path / "out"), "--force")
    assert run.exit_code == 2 and "pipe is neither a file nor a folder" in run.stderr
    assert set((tmp_path / "out").iterdir()) == before


def test_a_file_system_without_links_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    convert("sample:llama", tmp_path / "out")
    put(tmp_path / "out", USERS)
    convert("sample:llama", tmp_path / "out", force=True)
    assert {name: data for name, data in contents(tmp_path / "out").items() if name in USERS} == USERS
