"""What the shell offers: models, and the values of options."""

from pathlib import Path

import pytest
from helpers.covering import few
from helpers.processes import python
from typer.testing import CliRunner

from gptkit.architectures.presets import presets
from gptkit.cli import app
from gptkit.commands.completion import complete_model, forms
from gptkit.converter.dtypes import parse_dtype
from gptkit.converter.targets import target as parsed
from gptkit.surgery.registry import all_options, steps_named


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(incomplete: str) -> list[str]:
    return [name for name, _ in complete_model(incomplete)]


def test_every_preset_is_offered_by_every_name() -> None:
    assert len(names("")) == len(presets()) + 4
    for preset in presets().values():
        for spelling in preset.known_as:
            assert any(name.lower().startswith(spelling.lower()) for name in names(spelling)), spelling


def test_a_preset_is_offered_once_and_in_its_own_spelling() -> None:
    assert names("QWEN3-8") == ["qwen3-8b"]
    assert names("Qwen/Qwen3-8") == ["Qwen/Qwen3-8B"]
    assert names("sample:g") == ["sample:gpt2"]
    assert names("nothing-of-the-kind") == []


def test_own_files_come_first_and_only_models(tmp_path: Path) -> None:
    (tmp_path / "gpt2-local").mkdir()
    for name in ("gpt2.gguf", "gpt2.txt", ".gpt2.json", "gpt2\x1b[31m.json"):
        (tmp_path / name).touch()
    assert names("gpt2")[:3] == ["gpt2-local/", "gpt2.gguf", "gpt2"]
    assert names(".g") == [".gpt2.json"]
    (tmp_path / "gpt2-local" / "config.json").touch()
    assert names("gpt2-local/") == ["gpt2-local/config.json"]
    assert names("no/such/folder/") == []


@few(2)
@pytest.mark.parametrize("call", ["params qwen3-32", "params gpt2 qwen3-32", "load qwen3-32", "convert qwen3-32"])
def test_bash_gets_them(call: str) -> None:
    words = call.split()
    asked = {"COMP_WORDS": f"gptkit {call}", "COMP_CWORD": str(len(words)), "_GPTKIT_COMPLETE": "complete_bash"}
    code = "import sys\nfrom gptkit.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = python("-c", code, env=asked)
    assert done.stdout.split() == ["qwen3-32b"], done.stderr


# --- values of options ------------------------------------------------------------------------------------------------


def offered(*words: str) -> list[str]:
    """What bash gets, of words as it takes them apart; the last is the one before the cursor."""
    asked = {
        "COMP_WORDS": "\n".join(["gptkit", *words]),
        "COMP_CWORD": str(len(words)),
        "_GPTKIT_COMPLETE": "complete_bash",
    }
    done = CliRunner().invoke(app, [], prog_name="gptkit", env=asked)
    assert done.exit_code == 0, done.output
    return done.stdout.split()


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("recommend --goal ", ["quality", "speed", "memory", "context", "simplicity", "balance"]),
        ("swap --norm ", ["rmsnorm", "layernorm"]),
        ("swap --attention m", ["mha", "mqa"]),
        ("swap --heads ", []),
        ("convert --to gg", ["gguf"]),
        ("convert --dtype q", ["q8_0"]),
        ("load --dtype b", ["bfloat16"]),
        ("params --by ", ["component", "layer", "tensor"]),
        ("params --dtype int", ["int8", "int4"]),
        ("diff --by t", ["tensor"]),
        ("generate --attention e", ["eager"]),
    ],
)
def test_an_option_offers_its_values(call: str, values: list[str]) -> None:
    assert offered(*call.split(" ")) == values


def test_what_is_offered_is_taken() -> None:
    """The lists here are those of what reads them."""
    for option in all_options():
        for value in forms(option.metavar):
            steps_named(option.name, value)
    targets = offered("convert", "--to", "")
    assert {"local", "hf", "hf:auto", "hf:llama", "gguf"} <= set(targets)
    for target in targets:
        parsed(target)
    for name in offered("params", "--dtype", ""):
        assert CliRunner().invoke(app, ["params", "gpt2", "--dtype", name]).exit_code == 0
    for name in offered("generate", "--dtype", ""):
        parse_dtype(name)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["params", "sample", ":", "g"], ["gpt2"]),
        (["params", "gpt2", "sample", ":", "g"], ["gpt2"]),
        (["params", "sample", ":"], ["gpt2", "llama", "bloom", "falcon"]),
        (["params", "sample:g"], ["sample:gpt2"]),  # where a colon breaks no word
        (["generate", "sample", ":", "gpt2", "--attention", "="], ["sdpa", "eager"]),
        (["params", "--by", "=", "l"], ["layer"]),
        (["convert", "--to", "hf", ":", "mixt"], ["mixtral"]),
        (["convert", "--to", "=", "hf", ":", "mixt"], ["mixtral"]),
        (["convert", "--to=hf:mixt"], ["hf:mixtral"]),
        (["swap", "sample", ":", "gpt2", "out", "--norm", ""], ["rmsnorm", "layernorm"]),
        ([":"], []),
    ],
)
def test_words_that_bash_took_apart(words: list[str], answer: list[str]) -> None:
    assert offered(*words) == answer
