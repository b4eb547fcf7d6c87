"""Layers picked, added and dropped."""

from pathlib import Path

import pytest
import torch
from helpers.covering import few
from helpers.exactness import Mutation, is_caught, undone
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.inverses import inverse
from hypothesis import given
from hypothesis import strategies as st

import gptkit
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.base import Filled, Stored
from gptkit.surgery.fits.calibration import Calibration, read_text
from gptkit.surgery.registry import Step, layers_in
from gptkit.surgery.shapes import steps_from, swapped
from gptkit.surgery.swaps import layers as module

FAMILIES = ["gpt2", "qwen3", "bloom", "falcon-7b", "falcon-40b", "gpt2-by-layer", "mixtral"]
FAMILIES = [name for name in FAMILIES if name in CONFIGS]


@few(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("more", ["+1", "+2", "+7"])
def test_added_layers_add_nothing_and_go_again(name: str, more: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", torch.bfloat16)
    layers = len(spec_of(CONFIGS[name]).blocks)
    there, back = undone(tmp_path / "hf", Step("layers", more), tmp_path)
    assert len(there.spec.blocks) == layers + int(more)
    assert "write nothing into the residual stream" in back.chain.notes[0]


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
        with pytest.raises(UsageError, match=r"may be the layer \d or a number of layers\n.*keep:.*drop:.*auto:.*\+"):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", **call)
    with pytest.raises(UsageError, match="or a number of layers"):
        swapped(spec_of(CONFIGS["gpt2"]), steps_from([f"layers={value}"]), "gpt2", "a name")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("0-3", SwapRefused, "names layer 3, the model has 3: 0 to 2"),
        ("2-1", UsageError, "runs backwards"),
        ("x", UsageError, "no list of layers"),
        ("", UsageError, "unknown"),
        ("0,,1", UsageError, "no list of layers"),
        ("keep:", UsageError, "no list of layers"),
        ("drop:x", UsageError, "no list of layers"),
        ("drop:3", SwapRefused, "names layer 3, the model has 3: 0 to 2"),
        ("drop:0-", SwapRefused, "drops all 3 layers"),
        ("+0", UsageError, "layers to add as a whole number from 1"),
        ("+99999", UsageError, "too many"),
        ("auto:0", UsageError, "from 1"),
        ("auto:4", SwapRefused, "4 layers cannot be kept of 3"),
        ("auto:2", UsageError, "none was given"),
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


@pytest.mark.exhaustive
def test_influence_and_what_it_drops(tmp_path: Path) -> None:
    source = gptkit.open_checkpoint("sample:falcon")
    scores = module.influences(Stored(source), Calibration(read_text(source, None), source.spec))
    assert len(scores) == len(source.spec.blocks) and all(0 < score < 2 for score in scores)
    # A layer that adds nothing changes no direction, and is the first to go.
    added = gptkit.swap("sample:falcon", tmp_path / "more", layers="+1", measured=False)
    back = f"auto:{len(source.spec.blocks)}"
    dropped = gptkit.swap(tmp_path / "more", tmp_path / "back", layers=back, calibrate_tokens=128)
    assert dropped.guarantee == "exact"
    assert added.chain.swapped[0].summary["added"] == [len(source.spec.blocks)]
    fewer = gptkit.swap("sample:falcon", tmp_path / "fewer", layers=f"auto:{len(scores) - 1}", measured=False)
    (gone,) = set(range(len(scores))) - set(fewer.chain.swapped[0].summary["kept"])
    assert scores[gone] == min(scores)
    assert fewer.chain.swapped[0].summary["calibration"]["tokens"] == 2048


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
