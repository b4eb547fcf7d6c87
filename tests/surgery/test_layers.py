"""Layers picked, added and dropped."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.covering import exhaustive, few
from helpers.exactness import Mutation, is_caught, undone
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.inverses import inverse
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import log_softmax

import gptkit
from gptkit.converter.checkpoint import Checkpoint
from gptkit.errors import SwapRefused, UsageError
from gptkit.modules.decoder import Decoder
from gptkit.modules.load import filled, tensor_of
from gptkit.surgery.base import Filled, Model, StoredModel
from gptkit.surgery.chain import chain
from gptkit.surgery.fits import dropping
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText, read_text
from gptkit.surgery.registry import Step, layers_in
from gptkit.surgery.shapes import steps_from, swapped
from gptkit.surgery.swaps import layers as module

FAMILIES = ["gpt2", "qwen3", "bloom", "falcon-7b", "falcon-40b", "gpt2-by-layer", "mixtral"]
FAMILIES = [name for name in FAMILIES if name in CONFIGS]


@few(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("more", ["+1", pytest.param("+2", marks=pytest.mark.slow), "+7"])
def test_added_layers_add_nothing_and_go_again(name: str, more: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", torch.bfloat16)
    layers = len(spec_of(CONFIGS[name]).blocks)
    there, back = undone(tmp_path / "hf", Step("layers", more), tmp_path)
    assert len(there.spec.blocks) == layers + int(more)
    assert "add nothing to the residual stream" in back.chain.notes[0]


@given(st.integers(1, 40), st.integers(1, 90))
def test_copies_are_spread_and_follow_their_originals(layers: int, more: int) -> None:
    order = module.expansion(layers, more)
    assert [old for old, copy in order if not copy] == list(range(layers))
    assert sum(copy for _, copy in order) == more
    assert all(old == order[index - 1][0] for index, (old, copy) in enumerate(order) if copy)
    counts = [sum(copy and old == layer for old, copy in order) for layer in range(layers)]
    assert max(counts) - min(counts) <= 1


def test_a_list_keeps_and_repeats(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    source = gptkit.load(tmp_path / "hf", torch.float64)
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", layers="0,2")
    assert done.guarantee == "approximate" and done.chain.notes == (
        "the new model has layers 0, 2 of the 3; layer 1 dropped",
    )
    kept = gptkit.load(tmp_path / "out", torch.float64)
    assert torch.equal(kept.blocks[1].attention.q_proj.weight, source.blocks[2].attention.q_proj.weight)
    repeated = gptkit.swap(tmp_path / "hf", tmp_path / "repeated", layers="0-1,1-")
    assert repeated.guarantee == "retrained" and len(repeated.spec.blocks) == 4
    assert gptkit.swap(tmp_path / "hf", tmp_path / "all", layers="0-").guarantee == "exact"


def test_the_words_for_which_layers_stay(tmp_path: Path) -> None:
    """A list, keep: and drop: give the same bytes where they mean the same, and the output says which layers stay."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    values = ["0,2", "keep:0,2", "drop:1", "Keep: 0, 2", "drop:1-1"]
    done = [gptkit.swap(tmp_path / "hf", tmp_path / str(n), layers=value) for n, value in enumerate(values)]
    assert len({(each.target / "model.safetensors").read_bytes() for each in done}) == 1
    assert {each.chain.notes[0] for each in done} == {"the new model has layers 0, 2 of the 3; layer 1 dropped"}
    alone = gptkit.swap(tmp_path / "hf", tmp_path / "alone", layers="keep:2")
    assert len(alone.spec.blocks) == 1 and alone.chain.notes == (
        "the new model has layer 2 of the 3; layers 0-1 dropped",
    )


@pytest.mark.parametrize("value", ["0", "1", "2", "3", " 2 ", "002"])
def test_a_number_alone_is_neither_a_count_nor_a_layer(value: str, tmp_path: Path) -> None:
    """On the command line, with --swap of params, and in a recipe, where it may stand without quotes."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    (tmp_path / "recipe.toml").write_text(f"[[step]]\nlayers = {int(value)}\n")
    for call in ({"layers": value}, {"recipe": tmp_path / "recipe.toml"}):
        with pytest.raises(
            UsageError, match=r"is ambiguous: it may mean layer \d, or \d layers\n.*keep:.*drop:.*auto:.*\+"
        ):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", **call)
    with pytest.raises(UsageError, match="is ambiguous"):
        swapped(spec_of(CONFIGS["gpt2"]), steps_from([f"layers={value}"]), "gpt2", "a name")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("0-3", SwapRefused, "names layer 3, but the model has only layers 0 to 2"),
        ("2-1", UsageError, "the range 2-1 ends before it begins"),
        ("x", UsageError, "not a list of layers"),
        ("", UsageError, "unknown"),
        ("0,,1", UsageError, "not a list of layers"),
        ("keep:", UsageError, "not a list of layers"),
        ("drop:x", UsageError, "not a list of layers"),
        ("drop:3", SwapRefused, "names layer 3, but the model has only layers 0 to 2"),
        ("drop:0-", SwapRefused, "drops all 3 layers"),
        ("+0", UsageError, "layers to add must be a whole number of at least 1"),
        ("+99999", UsageError, "at most 10,000 can be added"),
        ("auto:0", UsageError, "at least 1"),
        ("auto:4", SwapRefused, "4 layers cannot be kept, because the model has only 3"),
        ("auto:2", UsageError, "needs a text to fit on"),
    ],
)
def test_refusals(value: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    with pytest.raises(error, match=words):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", layers=value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_normed_residuals_take_no_added_layer(tmp_path: Path) -> None:
    save_hf(CONFIGS["bloom-post-norm"], tmp_path / "hf")
    with pytest.raises(SwapRefused, match="takes its residual from a norm's output"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", layers="+1")


def test_some_layers_of_a_list_as_a_person_writes_it() -> None:
    assert layers_in("0-2, 5,7-", 10) == (0, 1, 2, 5, 7, 8, 9)


# --- which layers a model can do without ------------------------------------------------------------------------------


def whole_decoder(tree: Model) -> Decoder:
    return filled(partial(Decoder, tree.spec), partial(tensor_of, tree), torch.float32)


def measured(source: Checkpoint, text: CalibrationText, kept: Sequence[int]) -> float:
    """KL in nats per token without some layers, by whole decoders on the rows of a calibration's text."""
    ids = Calibration(text, source.spec).ids
    listed = ",".join(map(str, kept))
    trees = (chain(source, [Step("layers", f"keep:{listed}")]).models[-1], StoredModel(source))
    with torch.no_grad():
        after, before = (log_softmax(whole_decoder(tree)(ids).double(), -1) for tree in trees)
    return float((before.exp() * (before - after)).sum(-1).mean())


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [("gpt2", 2), *(pytest.param(name, 3, marks=pytest.mark.exhaustive) for name in ("llama", "bloom", "falcon"))],
)
def test_auto_finds_what_greedy_search_by_brute_force_finds(sample: str, wanted: int) -> None:
    source = gptkit.open_checkpoint(f"sample:{sample}")
    text = replace(read_text(source, None, 256), choosing=())
    layers, greedy = len(source.spec.blocks), tuple(range(len(source.spec.blocks)))
    plain = (*range(wanted - 1), layers - 1)
    brute: dict[tuple[int, ...], float] = {}
    while len(greedy) > wanted:
        smaller = [tuple(each for each in greedy if each != gone) for gone in greedy]
        brute |= {kept: measured(source, text, kept) for kept in smaller}
        greedy = min(smaller, key=lambda kept: brute[kept])
    brute[plain] = measured(source, text, plain)
    found = dropping.drop(StoredModel(source), Calibration(text, source.spec), plain)
    assert found.tokens == 256
    assert {kept: found.tried[kept] for kept in brute} == pytest.approx(brute, rel=1e-3, abs=1e-5)
    assert found.tried[found.layers] == min(found.tried[kept] for kept in found.tried if len(kept) == wanted)
    assert found.tried[found.layers] <= found.tried[greedy]
    assert found.by != "greedy search" or found.layers == greedy


@exhaustive
def test_auto_drops_a_layer_that_adds_nothing_and_says_what_it_tried(tmp_path: Path) -> None:
    layers = len(gptkit.open_checkpoint("sample:gpt2").spec.blocks)
    gptkit.swap("sample:gpt2", tmp_path / "more", layers="+1", measured=False)
    dropped = gptkit.swap(tmp_path / "more", tmp_path / "back", layers=f"auto:{layers}")
    assert dropped.guarantee == "exact"
    notes = "\n".join(dropped.chain.notes)
    assert "by KL on 4,096 tokens" in notes and "removed layers that were tried, each with the KL in nats" in notes
    assert all(f"{layer}: " in notes for layer in range(layers + 1))
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    with pytest.raises(UsageError, match="needs a text to fit on") as caught:
        gptkit.swap(tmp_path / "hf", tmp_path / "out", layers="auto:1")
    assert "--approximate" in str(caught.value.hint)


def test_in_a_deep_model_the_least_influential_layers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropping, "_CANDIDATES", 2)
    source = gptkit.open_checkpoint("sample:falcon")
    calibration = Calibration(read_text(source, None, 128), source.spec)
    found = dropping.drop(StoredModel(source), calibration, (0, 1, 4))
    least = sorted(range(5), key=lambda layer: found.influence[layer])[:2]
    first = {layer for kept in found.tried if len(kept) == 4 for layer in range(5) if layer not in kept}
    assert first == set(least)


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def forget(ending: str) -> Mutation:
    """Leave a projection of the copies as it is."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        right = module._silenced

        def silenced(*args: object) -> dict[str, object]:
            return {name: how for name, how in right(*args).items() if not name.endswith(ending)}  # type: ignore[arg-type]

        patch.setattr(module, "_silenced", silenced)

    return mutate, ("gpt2", "falcon-40b") if ending.endswith("bias") else ("gpt2", "qwen3", "falcon-7b")


def ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "Filled", lambda shape, value, like: Filled(shape, 1.0, like))


def never_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_silent", lambda spec, asked, layer: True)


MUTATIONS: dict[str, Mutation] = {
    "o_proj's weight kept": forget("o_proj.weight"),
    "o_proj's bias kept": forget("o_proj.bias"),
    "down_proj's weight kept": forget("down_proj.weight"),
    "down_proj's bias kept": forget("down_proj.bias"),
    # Not gpt2: LayerNorm does not see what is the same in every element of the stream.
    "ones for zeros": (ones, ("qwen3",)),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(name: str, tmp_path: Path) -> None:
    is_caught(name, MUTATIONS, {"layers": "+2"}, tmp_path)


def test_a_layer_that_is_not_silent_is_not_dropped_as_exact(tmp_path: Path) -> None:
    is_caught("silent", {"silent": (never_silent, ("gpt2", "qwen3", "falcon-7b"))}, {"layers": "1-"}, tmp_path)


def test_the_step_that_takes_them_out() -> None:
    assert inverse(Step("layers", "+1"), spec_of(CONFIGS["gpt2"])) == Step("layers", "keep:0,1,2")
