"""The vocabulary padded, cut and pruned: kept tokens keep their logits, and the tokenizer goes with the rows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import transformers
from helpers.covering import examples, few
from helpers.families import CONFIGS, save_hf
from helpers.inverses import inverse
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import vocabulary as module

TEXT = "ROMEO:\nI would not well, go mine eye stands. LEONTES: Well, let me have you well;\n"


def arrays(folder: Path) -> dict[str, tuple[np.ndarray, str]]:
    return {name: (array, dtype) for name, array, dtype in gptkit.open_checkpoint(folder).tensors()}


def logits(folder: Path | str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return gptkit.load(folder, torch.float64)(torch.tensor([ids]))[0]  # type: ignore[no-any-return]


# --- padded, cut ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12), deadline=None)
@given(
    name=st.sampled_from(["gpt2", "gpt2-untied", "llama", "bloom", "falcon-11b"]),
    size=st.integers(1, 200).filter(lambda size: size != 97),
    stored=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_moved_and_zeros_added(name: str, size: int, stored: torch.dtype) -> None:
    with TemporaryDirectory() as parent:
        source, out = Path(parent) / "hf", Path(parent) / "out"
        config = {**CONFIGS[name], "bos_token_id": 0, "eos_token_id": 0}
        save_hf(config, source, stored)
        result = gptkit.swap(source, out, vocab=str(size))
        assert result.guarantee == "exact" and result.spec.vocab_size == size
        kept = min(size, 97)
        assert result.chain.promise.tokens == (tuple(range(kept)), tuple(range(kept)))
        before, after = arrays(source), arrays(out)
        assert set(before) == set(after)
        for tensor, (old, dtype) in before.items():
            new, same = after[tensor]
            assert dtype == same
            if tensor in ("embedding.weight", "head.weight"):
                assert new[:kept].tobytes() == old[:kept].tobytes()
                assert not new[kept:].any() and len(new) == size
            else:
                assert new.tobytes() == old.tobytes()
        ids = [i % kept for i in (0, 5, 96, 50)]
        torch.testing.assert_close(logits(source, ids)[:, :kept], logits(out, ids)[:, :kept], rtol=0, atol=1e-13)


def test_padded_and_cut_again_are_the_same_bytes(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf", torch.bfloat16)
    # A head with a bias, which only a swap makes, has a row of it for each token.
    gptkit.swap(tmp_path / "hf", tmp_path / "biased", norm="rmsnorm")
    padded = gptkit.swap(tmp_path / "biased", tmp_path / "padded", vocab="multiple:64")
    assert padded.spec.vocab_size == 128 and padded.spec.head.bias
    step = inverse(Step("vocab", "multiple:64"), gptkit.open_checkpoint(tmp_path / "biased").spec)
    assert step == Step("vocab", "97")
    gptkit.swap(tmp_path / "padded", tmp_path / "back", [step])
    one, two = arrays(tmp_path / "biased"), arrays(tmp_path / "back")
    assert {name: (a.tobytes(), d) for name, (a, d) in one.items()} == {
        name: (a.tobytes(), d) for name, (a, d) in two.items()
    }


def asked_for(value: str) -> module.Asked:
    return module.Asked(value, value.partition(":")[2] or None)


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    for value, error, message in (
        ("97", SwapRefused, "has 97 tokens already"),
        ("multiple:97", SwapRefused, "of 97 tokens is a multiple of 97 already"),
        ("0", UsageError, "a whole number of at least 1"),
        ("many", UsageError, "a whole number of at least 1"),
        ("size:12", UsageError, "known: N, multiple:N, prune:FILE"),
    ):
        with pytest.raises(error, match=message):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", vocab=value)
    note = gptkit.swap(tmp_path / "hf", tmp_path / "out", vocab="90").chain.notes[0]
    assert note.startswith("the model has no tokenizer")


def late_special(folder: Path) -> Path:
    """The sample with another end of text, 400, by the ids of its configs."""
    shutil.copytree(SAMPLES_DIR / "llama", folder)
    for name in ("config.json", "generation_config.json"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**data, "eos_token_id": 400, "pad_token_id": 0}))
    return folder


def test_what_the_tokenizer_needs_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(
        SwapRefused, match=r"the first 200 tokens are not enough.*a character of its own.*and \d+ more"
    ) as few:
        gptkit.swap("sample:gpt2", tmp_path / "out", vocab="200")
    assert "Possible from 257 on. --vocab prune:FILE" in str(few.value.hint)
    folder = late_special(tmp_path / "late")
    with pytest.raises(SwapRefused, match=r"\(400: config.json names it\)") as late:
        gptkit.swap(folder, tmp_path / "out", vocab="300")
    assert "Possible from 401 on" in str(late.value.hint)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_cut_with_its_rows(tmp_path: Path) -> None:
    result = gptkit.swap("sample:gpt2", tmp_path / "out", vocab="300")
    assert result.guarantee == "exact"
    old, new = (load_tokenizer(folder) for folder in (SAMPLES_DIR / "gpt2", tmp_path / "out"))
    assert old is not None and new is not None and new.vocab_size == 300
    assert new.decode(new.encode(TEXT)) == TEXT and max(new.encode(TEXT)) < 300 < max(old.encode(TEXT))


# --- pruned -----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("sample", ["gpt2", "falcon"])
def test_pruned_to_a_text_it_reads_and_writes_that_text(sample: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    result = gptkit.swap(f"sample:{sample}", tmp_path / "out", vocab=f"prune-text:{tmp_path / 'text'}")
    assert result.guarantee == "exact" and result.measured is not None
    summary = result.chain.swapped[0].summary
    assert summary["to"] == summary["asked_for"] + summary["added"] == result.spec.vocab_size < 400
    old, new = (load_tokenizer(folder) for folder in (SAMPLES_DIR / sample, tmp_path / "out"))
    assert old is not None and new is not None
    assert result.chain.promise.tokens is not None
    table = dict(zip(*result.chain.promise.tokens, strict=True))
    before, after = old.encode(TEXT), new.encode(TEXT)
    assert [table[i] for i in before] == after
    wide, narrow = logits(f"sample:{sample}", before), logits(tmp_path / "out", after)
    torch.testing.assert_close(wide[:, list(table)], narrow, rtol=0, atol=1e-12)
    # It speaks, here and in transformers, the same.
    gptkit.convert(tmp_path / "out", tmp_path / "hf", to="hf")
    assert gptkit.verify(tmp_path / "hf", mutations=False).verdict == "identical"
    said = "".join(gptkit.generate(tmp_path / "out", "ROMEO:\n", 12, temperature=0))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = tokenizer("ROMEO:\n", return_tensors="pt").input_ids
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(found) == "ROMEO:\n" + said


@pytest.mark.exhaustive
def test_ids_in_every_config_are_renumbered(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ROMEO")
    folder = late_special(tmp_path / "late")
    gptkit.swap(folder, tmp_path / "out", vocab=f"prune-text:{tmp_path / 'text'}")
    gptkit.convert(tmp_path / "out", tmp_path / "hf", to="hf")
    vocab = {i: token for token, i in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].items()}
    new = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    for name in ("config.json", "generation_config.json"):
        data = json.loads((tmp_path / "hf" / name).read_text())
        assert data["eos_token_id"] == new[vocab[400]] != 400
        assert data["pad_token_id"] == 0
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name == "config.json"]
    # And once more, from there, on top of another swap.
    (tmp_path / "text").write_text("R")
    steps = [Step("untie", "")] if gptkit.open_checkpoint(tmp_path / "out").spec.head.tied else []
    again = [*steps, Step("vocab", "400"), Step("vocab", f"prune-text:{tmp_path / 'text'}")]
    result = gptkit.swap(tmp_path / "out", tmp_path / "two", again)
    gptkit.convert(tmp_path / "two", tmp_path / "hf-two", to="hf")
    last = json.loads((tmp_path / "hf-two" / "tokenizer.json").read_text())["model"]["vocab"]
    config = json.loads((tmp_path / "hf-two" / "config.json").read_text())
    assert config["eos_token_id"] == last[vocab[400]] and config["vocab_size"] == result.spec.vocab_size == len(last)


@pytest.mark.exhaustive
def test_a_list_of_tokens_or_ids(tmp_path: Path) -> None:
    vocab = json.loads((SAMPLES_DIR / "gpt2" / "tokenizer.json").read_text())["model"]["vocab"]
    names = {i: token for token, i in vocab.items()}
    listed = tmp_path / "tokens.txt"
    listed.write_text(f"{names[500]}\r\n\n480\n7\n")
    result = gptkit.swap("sample:gpt2", tmp_path / "out", vocab=f"prune:{listed}")
    new = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert {names[500], names[480], "7"} <= set(new)
    assert result.chain.swapped[0].summary["asked_for"] == 3  # "7" is a token, and no id
    for text, error, message in (
        ("thereisnosuch\nROMEO\n9999\n", InvalidInput, r"neither a token nor an id: 'thereisnosuch' \(line 1\)"),
        ("\n", InvalidInput, "is empty: it must list the tokens to keep"),
        ("\n".join(vocab), SwapRefused, r"nothing to prune: .* are the whole vocabulary \(512\)"),
    ):
        listed.write_text(text)
        with pytest.raises(error, match=message):
            gptkit.swap("sample:gpt2", tmp_path / "no", vocab=f"prune:{listed}")
    listed.write_bytes(b"a\xff")
    with pytest.raises(InvalidInput, match="not a UTF-8 text"):
        gptkit.swap("sample:gpt2", tmp_path / "no", vocab=f"prune:{listed}")
    with pytest.raises(InvalidInput, match=r"cannot read .*nowhere: No such file"):
        gptkit.swap("sample:gpt2", tmp_path / "no", vocab=f"prune-text:{tmp_path / 'nowhere'}")
    save_hf(CONFIGS["llama"], tmp_path / "bare")
    with pytest.raises(SwapRefused, match="the model has no tokenizer"):
        gptkit.swap(tmp_path / "bare", tmp_path / "no", vocab=f"prune:{listed}")
    assert not (tmp_path / "no").exists()


@pytest.mark.exhaustive
def test_a_tokenizer_with_more_tokens_than_rows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SAMPLES_DIR / "gpt2", folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 512, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "text").write_text(TEXT)
    prune = Step("vocab", f"prune-text:{tmp_path / 'text'}")
    with pytest.raises(
        SwapRefused, match=r"token 512 of the tokenizer is '<\|more\|>', but the embedding has only 512 rows"
    ) as caught:
        gptkit.swap(folder, tmp_path / "out", [prune])
    assert "give every token a row: --vocab 513" in str(caught.value.hint)
    result = gptkit.swap(folder, tmp_path / "out", [Step("vocab", "513"), prune])
    assert result.guarantee == "exact"
    # The promise of both steps is about the tokens that the original has.
    assert result.chain.promise.tokens is not None and max(result.chain.promise.tokens[0]) < 512


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def shifted(patch: pytest.MonkeyPatch) -> None:
    right = module._picked
    patch.setattr(module, "_picked", lambda ids: right([*ids[1:], ids[0]]))


def ends_only(patch: pytest.MonkeyPatch) -> None:
    right = module._picked
    patch.setattr(module, "_picked", lambda ids: right([*ids[:-2], ids[-1], ids[-2]]))


def first_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_picked", lambda ids: lambda table: table[: len(ids)])


def head_left_behind(patch: pytest.MonkeyPatch) -> None:
    right = module._moved

    def wrong(spec: module.ModelSpec, move: Callable[[module.Array], module.Array]) -> object:
        size = len(move(np.arange(spec.vocab_size)))
        made = dict(right(spec, move))
        made["head.weight"] = module.Moved("head.weight", lambda table: np.resize(table, (size, table.shape[1])))
        return made

    patch.setattr(module, "_moved", wrong)


def wrong_promise(patch: pytest.MonkeyPatch) -> None:
    right = module.Promise

    def first(tokens: tuple[tuple[int, ...], tuple[int, ...]]) -> module.Promise:
        return right(tokens=(tuple(range(len(tokens[1]))), tokens[1]))

    patch.setattr(module, "Promise", first)


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("mutate", [shifted, ends_only, first_rows, head_left_behind, wrong_promise])
def test_a_wrong_row_is_not_published(
    mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(GptkitError, match="not exact on this checkpoint"):
        gptkit.swap("sample:llama", tmp_path / "out", vocab=f"prune-text:{tmp_path / 'text'}")
    assert not (tmp_path / "out").exists()
