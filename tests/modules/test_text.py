"""generate: text in pieces that join to the decoding of all ids, the same for the same seed, and an end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from helpers.generation import generate_ids

import gptkit
from gptkit.converter.resolve import SAMPLES
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import UsageError
from gptkit.modules import Decoder
from gptkit.modules.generate import Sampling
from gptkit.modules.text import generate

PROMPT = "ROMEO:\n"


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("ids") / "hf"
    save_hf(CONFIGS["llama"], folder)
    return folder


@few(1)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 3}], ids=str)
def test_the_pieces_are_the_text(sample: str, options: dict[str, Any]) -> None:
    model = f"sample:{sample}"
    tokenizer = load_tokenizer(gptkit.open_checkpoint(model).folder)
    assert tokenizer is not None
    prompt = tokenizer.encode(PROMPT)
    ids = generate_ids(gptkit.load(model), prompt, 60, sampling=Sampling(**options), stop=tokenizer.eos_ids)
    pieces = list(generate(model, PROMPT, 60, **options))
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert tokenizer.decode(prompt, skip_special_tokens=True) + "".join(pieces) == whole
    assert len(pieces) >= len(ids)  # as they come, not at the end
    assert "".join(generate(model, prompt, 60, **options)) == "".join(pieces)
    assert len(whole) > len(PROMPT) + 50


def test_a_prompt_that_ends_within_a_character() -> None:
    tokenizer = load_tokenizer(gptkit.open_checkpoint("sample:gpt2").folder)
    assert tokenizer is not None
    prompt = tokenizer.encode("é")[:1]
    ids = generate_ids(gptkit.load("sample:gpt2"), prompt, 20, stop=tokenizer.eos_ids)
    text = "".join(generate("sample:gpt2", prompt, 20))
    assert tokenizer.decode([*prompt, *ids], skip_special_tokens=True).endswith(text)
    assert text


def test_a_seed_repeats_and_another_does_not() -> None:
    def text(seed: int | None) -> str:
        return "".join(generate("sample:llama", PROMPT, 40, temperature=1.0, seed=seed))

    one = text(1)
    assert one == text(1) != text(2)
    assert len({one, text(None), text(None)}) == 3


def test_ids_for_a_checkpoint_without_a_tokenizer(ids_only: Path) -> None:
    text = "".join(generate(ids_only, [5, 1, 9], 7))
    assert [int(part) for part in text.split()] == generate_ids(gptkit.load(ids_only), [5, 1, 9], 7)
    with pytest.raises(UsageError) as caught:
        generate(ids_only, "ROMEO:")
    assert "no tokenizer" in caught.value.message and "--ids" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([97], {}),
        ([-1], {}),
        ([1], {"max_new_tokens": -1}),
        ([1], {"temperature": -1.0}),
        ([1], {"top_k": 5, "temperature": 0.0}),
        ([1], {"dtype": "int8"}),
        ([1], {"attention": "flash"}),
    ],
    ids=str,
)
def test_wrong_calls_fail_at_once(prompt: list[int], options: dict[str, Any], ids_only: Path) -> None:
    with pytest.raises(UsageError):
        generate(ids_only, prompt, **options)  # not when the first piece is asked for


def test_a_text_of_nothing() -> None:
    with pytest.raises(UsageError, match="empty"):
        generate("sample:gpt2", "")
    assert "".join(generate("sample:gpt2", PROMPT, 0)) == ""


def ending_at(folder: Path, model: Path | str, token: int | list[int] | None, file: str) -> Path:
    """A copy of a checkpoint whose text ends at that token."""
    shutil.copytree(gptkit.open_checkpoint(model).folder, folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        data = json.loads(path.read_text()) if path.is_file() else {}
        data.pop("eos_token_id", None)
        if name == file and token is not None:
            data["eos_token_id"] = token
        path.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_it_ends_where_the_checkpoint_says(file: str, tmp_path: Path, ids_only: Path) -> None:
    free = [int(part) for part in "".join(generate(ids_only, [5, 1, 9], 12, stop_at_eos=False)).split()]
    assert len(free) == 12
    last = free[4]
    cut = free[: free.index(last) + 1]
    for number, token in enumerate((last, [96, last])):
        copy = ending_at(tmp_path / f"hf-{number}", ids_only, token, file)
        gptkit.convert(copy, tmp_path / f"local-{number}")
        for model in (copy, tmp_path / f"local-{number}"):
            assert "".join(generate(model, [5, 1, 9], 12)).split() == [str(token) for token in cut]
            assert len("".join(generate(model, [5, 1, 9], 12, stop_at_eos=False)).split()) == 12


def test_the_end_of_a_text_is_not_shown(tmp_path: Path) -> None:
    """An ordinary token that ends the text is part of it; a special one is not."""
    tokenizer = load_tokenizer(gptkit.open_checkpoint("sample:gpt2").folder)
    assert tokenizer is not None
    prompt = tokenizer.encode(PROMPT)
    ids = generate_ids(gptkit.load("sample:gpt2"), prompt, 30)
    copy = ending_at(tmp_path / "hf", "sample:gpt2", ids[9], "generation_config.json")
    shown = "".join(generate(copy, PROMPT, 30))
    assert shown == tokenizer.decode(ids[: ids.index(ids[9]) + 1])
    assert all(tokenizer.token(special) not in shown for special in tokenizer.special_ids)


def test_a_table_of_positions_ends_it() -> None:
    tokenizer = load_tokenizer(gptkit.open_checkpoint("sample:gpt2").folder)
    assert tokenizer is not None
    prompt = (tokenizer.encode(PROMPT) * 60)[:250]
    with pytest.warns(UserWarning, match="256 positions, and all are used") as warned:
        assert 0 < len(list(generate("sample:gpt2", prompt, 100, stop_at_eos=False))) <= 256 - 250 + 2
    assert [Path(each.filename).name for each in warned] == [Path(__file__).name]  # told to who asked for the text


@pytest.mark.parametrize(
    ("sample", "told"), [("gpt2", "256 positions, and all are used"), ("llama", "context of 256 tokens")]
)
def test_the_command_says_that_a_limit_was_met(sample: str, told: str) -> None:
    """In one line on stderr, behind the text; within the limits there is none."""
    ids = " ".join(["7"] * 250)
    for new, lines in ((3, 0), (20, 1)):
        run = call("generate", f"sample:{sample}", "--ids", ids, "-n", str(new))
        assert run.exit_code == 0, run.output
        assert len(run.stderr.splitlines()) == lines
        assert all(told in line for line in run.stderr.splitlines())


@pytest.mark.exhaustive
@few(2)
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_model_in_memory_writes_what_its_checkpoint_does(sample: str, tmp_path: Path) -> None:
    """With the tokenizer and the end of what it was loaded from, and with the weights that it has now."""
    for reference in (f"sample:{sample}", tmp_path / "model.gguf"):
        if reference != f"sample:{sample}":
            gptkit.convert(f"sample:{sample}", tmp_path / "gguf", "gguf")
            next((tmp_path / "gguf").glob("*.gguf")).rename(reference)
        model = gptkit.load(reference)
        text = "".join(generate(model, PROMPT, 20, temperature=0.8, seed=1))
        assert text == "".join(generate(reference, PROMPT, 20, temperature=0.8, seed=1)) != ""
    with torch.no_grad():
        model.embedding.weight[:] = torch.randn(
            model.embedding.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    assert "".join(generate(model, PROMPT, 20)) != "".join(generate(reference, PROMPT, 20))
    for options in ({"dtype": "float32"}, {"attention": "eager"}):
        with pytest.raises(UsageError, match="already loaded"):
            generate(model, PROMPT, 5, **options)


def test_a_model_in_memory_without_a_tokenizer_takes_ids(ids_only: Path) -> None:
    """And ends where the config.json says."""
    model = gptkit.load(ids_only)
    assert "".join(generate(model, [5, 1, 9], 7)) == "".join(generate(ids_only, [5, 1, 9], 7))
    built = Decoder(model.spec)
    built.load_state_dict(model.state_dict())
    assert "".join(generate(built, [5, 1, 9], 7)) == "".join(generate(ids_only, [5, 1, 9], 7))
    for each in (model, built):
        with pytest.raises(UsageError, match="has no tokenizer"):
            generate(each, "ROMEO:")


def test_an_opened_checkpoint_and_another_dtype() -> None:
    checkpoint = gptkit.open_checkpoint("sample:bloom")
    texts = ["".join(generate(model, PROMPT, 20, dtype="float32")) for model in ("sample:bloom", checkpoint)]
    assert texts[0] == texts[1] != ""
    eager = "".join(generate(checkpoint, PROMPT, 20, dtype=torch.float32, attention="eager"))
    assert eager == texts[0]


def test_a_filter_alone_samples():
    """--top-k without a temperature is sampling at 1, not an error or greedy."""
    texts = {"".join(generate("sample:gpt2", "ROMEO:", 20, top_k=40, seed=seed)) for seed in (1, 2, 3)}
    assert len(texts) == 3
    assert "".join(generate("sample:gpt2", "ROMEO:", 20, top_k=40, seed=1)) in texts


def test_a_tokenizer_of_another_model_is_blamed(ids_only: Path, tmp_path: Path) -> None:
    """Whose ids the model has no rows for."""
    shutil.copytree(ids_only, tmp_path / "other")
    for file in gptkit.open_checkpoint("sample:gpt2").folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "other")
    size = CONFIGS["llama"]["vocab_size"]
    with pytest.raises(UsageError, match=f"outside the vocabulary of {size}") as raised:
        list(generate(str(tmp_path / "other"), "the quick brown zebra \u017e"))
    assert "Check that the tokenizer belongs to this model" in str(raised.value)
    with pytest.raises(UsageError, match=f"Give token ids from 0 to {size - 1}"):
        list(generate(str(tmp_path / "other"), [1, size]))
