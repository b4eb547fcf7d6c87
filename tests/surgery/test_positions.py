"""Positions exchanged: exact where nothing tells them apart, else a start for training; tables cut and lengthened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.covering import covered, few, rest_slow
from helpers.exactness import bytes_of, exactly, gap
from helpers.families import CONFIGS, DECODERS, Variant, edited, save_hf, spec_of
from helpers.inverses import inverse
from helpers.noisy import Noisy
from helpers.trees import LATENT, ROPE, with_blocks
from helpers.weights import Weights, after, error
from transformers import AutoModelForCausalLM

import gptkit
from gptkit.components import ALiBi, LayerNorm, LearnedPositions, ModelSpec, RMSNorm, Rotary
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import GptkitError, SwapRefused, UsageError
from gptkit.surgery.base import Exactly, Measurement, Model, Read, StoredModel, SwappedModel
from gptkit.surgery.chain import chain
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText, read_text
from gptkit.surgery.measure import measure
from gptkit.surgery.registry import Step, apply, reshape
from gptkit.surgery.swaps import positions as context_length
from gptkit.surgery.swaps import positions as module
from gptkit.surgery.swaps import rotation
from gptkit.surgery.swaps.positions import kind

replace = msgspec.structs.replace
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "bloom", "falcon-7b", "falcon-40b", "falcon-rw"]


def without_positions(name: str, folder: Path) -> Path:
    """A checkpoint of a family, its positions taken off."""
    save_hf(CONFIGS[name], folder / "hf")
    gptkit.swap(folder / "hf", folder / "none", position="none", measured=False)
    assert kind(gptkit.open_checkpoint(folder / "none").spec) == "none"
    return folder / "none"


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bloom", "falcon-7b"])
def test_from_none_and_back(name: str, tmp_path: Path) -> None:
    source = without_positions(name, tmp_path)
    spec = gptkit.open_checkpoint(source).spec
    length = "" if spec.context_length is not None else ":80"
    for value in (f"learned{length}", "rope:neutral"):
        out, back = tmp_path / value.replace(":", "-"), tmp_path / f"{value.replace(':', '-')}-back"
        exactly(source, out, position=value)
        undo = inverse(Step("position", value), spec)
        assert undo == (None if length and value != "rope:neutral" else Step("position", "none"))
        exactly(out, back, Step("position", "none"))
        assert bytes_of(back) == bytes_of(source)
        assert length or gptkit.open_checkpoint(back).spec == spec
    there = gptkit.open_checkpoint(tmp_path / "rope-neutral").spec
    undo = inverse(Step("position", "none"), there)
    assert undo == Step("position", "rope:neutral")
    # A table of zeros goes as it came: a tied head stays tied.
    both = exactly(tmp_path / "rope-neutral", tmp_path / "both", position=f"learned{length or ':80'}")
    assert isinstance(both.spec.positions, LearnedPositions)
    assert kind(both.spec) == "learned"
    assert both.spec.head == spec.head


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied"])
@pytest.mark.parametrize("value", ["none", "rope:neutral"])
def test_a_table_of_equal_rows_goes_exactly(name: str, value: str, tmp_path: Path) -> None:
    """What the weights say decides, not the config."""
    save_hf(CONFIGS[name], tmp_path / "hf")
    assert gptkit.swap(tmp_path / "hf", tmp_path / "any", position=value).guarantee == "retrained"
    alike(tmp_path / "hf")
    done = exactly(tmp_path / "hf", tmp_path / "out", position=value)
    assert not done.spec.head.tied
    assert bool(done.chain.notes) == (name == "gpt2")
    naive = gptkit.swap(tmp_path / "hf", tmp_path / "naive", position=value, approximate=True)
    assert naive.guarantee == "retrained"
    assert naive.spec.head == spec_of(CONFIGS[name]).head
    assert gap(tmp_path / "hf", tmp_path / "naive") > 1e-2


def alike(folder: Path) -> None:
    """Make all rows of a gpt2's table the same."""
    edited(
        folder, lambda weights: weights["transformer.wpe.weight"].copy_(weights["transformer.wpe.weight"][3].clone())
    )


@pytest.mark.parametrize("bias", [True, False])
def test_behind_a_norm_the_mean_joins_its_bias(bias: bool) -> None:
    spec = spec_of(CONFIGS["bloom"])
    norm = LayerNorm(size=48, eps=1e-5, bias=bias)
    spec = with_blocks(spec, attention=replace(spec.blocks[0].attention, position=None))
    spec = replace(spec, embedding=replace(spec.embedding, norm=norm), positions=LearnedPositions(length=90, size=48))
    table = np.tile(np.random.default_rng(1).normal(size=48), (90, 1))
    model = Weights(spec, {"positions.weight": table})
    (swapped,), result = after(model, Step("position", "none"))
    assert swapped.guarantee == "exact"
    assert swapped.spec.embedding.norm == LayerNorm(size=48, eps=1e-5)
    assert error(model, result, swapped) <= 1e-12
    rms = replace(spec, embedding=replace(spec.embedding, norm=RMSNorm(size=48, eps=1e-5)))
    with pytest.raises(SwapRefused, match="RMSNorm after the embedding, which has no bias") as refused:
        apply(Weights(rms), Step("position", "none"))
    assert "--approximate" in str(refused.value.hint)
    assert apply(Weights(rms), Step("position", "none", approximate=True)).guarantee == "retrained"


@few(2)
@pytest.mark.parametrize("value", ["none", "rope", "alibi", "rope:neutral"])
def test_it_commutes_with_the_norm(value: str) -> None:
    """LayerNorm -> RMSNorm centres the table and the embedding that its mean joins, before or after."""
    model = Weights(spec_of(CONFIGS["gpt2"]))
    norm, position = Step("norm", "rmsnorm"), Step("position", value)
    (_, one), (_, other) = after(model, norm, position), after(model, position, norm)
    assert one.spec == other.spec
    assert measure(Exactly(one), Exactly(other), dtypes=("float64",)).relative["float64"] <= 1e-12
    (longer,) = {step.promise.length for step in after(model, norm, Step("context", "300"))[0] if step.promise.length}
    assert longer == 256
    (_, one), (_, other) = (after(model, norm, Step("context", "300")), after(model, Step("context", "300"), norm))
    assert measure(Exactly(one), Exactly(other), dtypes=("float64",)).relative["float64"] <= 1e-12


# --- what changes -----------------------------------------------------------------------------------------------------


def test_kinds() -> None:
    found = {name: kind(spec_of(CONFIGS[name])) for name in FAMILIES}
    assert {found[name] for name in ("llama", "qwen3", "mixtral", "falcon-7b", "falcon-40b")} == {"rope"}
    assert (found["gpt2"], found["bloom"], found["falcon-rw"]) == ("learned", "alibi", "alibi")
    spec = spec_of(CONFIGS["llama"])
    _, some = after(Weights(spec), Step("position", "none", blocks="1"))
    assert kind(some.spec) == "mixed"
    assert kind(replace(spec, positions=LearnedPositions(length=9, size=48))) == "mixed"


@few(6)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", ["rope", "rope:300", "alibi", "none", "learned:64"])
def test_from_any_to_any(name: str, value: str, tmp_path: Path) -> None:
    spec = spec_of(CONFIGS[name])
    model = Weights(spec)
    wanted = value.partition(":")[0]
    if kind(spec) == wanted and value != "rope:300":
        with pytest.raises(SwapRefused, match="already"):
            apply(model, Step("position", value))
        return
    (swapped,), result = after(model, Step("position", value))
    assert swapped.guarantee == ("approximate" if kind(spec) == wanted == "rope" else "retrained")
    assert kind(result.spec) == wanted
    found = measure(model, Exactly(result), promise=swapped.promise, dtypes=("float32",))
    assert 1e-3 < found.relative["float32"] < 10
    if wanted == "rope":
        position = result.spec.blocks[0].attention.position
        assert isinstance(position, Rotary)
        assert position.base == (300 if value == "rope:300" else 10_000)


def test_in_some_layers_alone() -> None:
    spec = spec_of(CONFIGS["mistral"])
    (swapped,), result = after(Weights(spec), Step("position", "none", blocks="0,2"))
    assert [block.attention.position is None for block in result.spec.blocks] == [True, False, True]
    assert {name.split(".")[1] for name in swapped.tensors} == {"0", "2"}
    _, back = after(result, Step("position", "rope", blocks="0,2"))
    assert back.spec == spec
    (_,), alibi = after(Weights(spec_of(CONFIGS["falcon-rw"])), Step("position", "none", blocks="1"))
    _, again = after(alibi, Step("position", "alibi"))
    assert again.spec.blocks[1].attention.position == ALiBi(scaled=True, rounding="bfloat16")  # as the others have it


def test_the_mean_rotation_is_what_is_folded() -> None:
    """The mean over distances of one pair's product, and no more."""
    rotary = Rotary(dim=6, base=50.0)
    factors = rotation.mean_rotation(rotary, 40, near=0.0)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=8), rng.normal(size=8)
    turned = rotation.turn_rows(q[:, None], factors, rotary, 8)[:, 0] @ k
    total = count = 0.0
    for m in range(40):
        for n in range(m + 1):
            total += rotated(q, m, rotary) @ rotated(k, n, rotary)
            count += 1
    assert turned == pytest.approx(total / count, rel=1e-12)
    assert np.abs(rotation.mean_rotation(rotary, 4000, window=3)).min() > np.abs(factors).min()


def rotated(x: np.ndarray, position: int, rotary: Rotary) -> np.ndarray:
    half = rotary.dim // 2
    angles = position * 1.0 / rotary.base ** (np.arange(half) / half)
    z = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate((z.real, z.imag, x[rotary.dim :]))


def on_text(sample: str, step: Step) -> Measurement:
    """In memory, on 400 tokens that no sample was trained on."""
    source = gptkit.open_checkpoint(f"sample:{sample}")
    done = chain(source, [step])
    text = read_text(source, None).held_out[:401]
    return measure(StoredModel(source), done.models[-1], promise=done.promise, text=text, dtypes=("float32",))


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize(
    ("sample", "value", "ratio"),
    [
        ("gpt2", "rope", 0.9),
        ("llama", "none", 0.85),
        ("llama", "alibi", 0.8),
        ("falcon", "none", 0.9),
        ("falcon", "alibi", 0.95),
    ],
)
def test_the_means_are_worth_their_place(sample: str, value: str, ratio: float) -> None:
    """KL on text against the plain exchange, on the trained samples."""
    if not (SAMPLES_DIR / sample).is_dir():
        pytest.skip(f"there is no {SAMPLES_DIR / sample}")
    good, naive = (on_text(sample, Step("position", value, approximate=each)).kl_text for each in (False, True))
    assert good is not None
    assert naive is not None
    assert good < ratio * naive


# --- tables and contexts ----------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_longer_table_and_back(stored: torch.dtype, tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf", stored)
    old = gptkit.load(tmp_path / "hf").positions.weight
    long = exactly(tmp_path / "hf", tmp_path / "long", context="600")
    assert long.chain.promise.length == 256
    assert (long.spec.context_length, long.spec.positions) == (600, LearnedPositions(length=600, size=48))
    table = gptkit.load(tmp_path / "long").positions.weight
    assert table.dtype == old.dtype == stored
    assert torch.equal(table, torch.cat((old, old.flip(0), old[:88])))
    gptkit.swap(tmp_path / "hf", tmp_path / "naive", context="600", approximate=True)
    naive = gptkit.load(tmp_path / "naive").positions.weight
    assert torch.equal(naive, torch.cat((old, old[-1:].expand(344, -1))))
    undo = inverse(Step("context", "600"), gptkit.open_checkpoint(tmp_path / "hf").spec)
    assert undo == Step("context", "256")
    back = exactly(tmp_path / "long", tmp_path / "back", undo)
    assert back.spec == gptkit.open_checkpoint(tmp_path / "hf").spec
    gptkit.convert(tmp_path / "hf", tmp_path / "local", to="local")
    assert bytes_of(tmp_path / "back") == bytes_of(tmp_path / "local")


def test_a_shorter_table(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    short = exactly(tmp_path / "hf", tmp_path / "short", context="20")
    assert short.chain.promise.length == 20
    assert inverse(Step("context", "20"), spec_of(CONFIGS["gpt2"])) is None
    with pytest.raises(UsageError, match="the model's position table has only 20 rows"):
        gptkit.load(tmp_path / "short")(torch.zeros(1, 21, dtype=torch.long))


def test_without_a_table_the_number_alone_changes(tmp_path: Path) -> None:
    for name in ("llama", "bloom"):
        save_hf(CONFIGS[name], tmp_path / name)
        done = exactly(tmp_path / name, tmp_path / f"{name}-long", context="512")
        assert done.spec == replace(gptkit.open_checkpoint(tmp_path / name).spec, context_length=512)
        assert any("--rope-scaling" in note for note in done.chain.notes) == (name == "llama")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step", "reason", "hint"),
    [
        ("llama", Step("position", "rope"), "this position encoding: rope", "rope:BASE"),
        ("bloom", Step("position", "alibi"), "this position encoding: alibi", None),
        ("llama", Step("position", "rope", blocks="1"), "already have this position encoding", "rope:BASE"),
        ("gpt2", Step("position", "learned"), "already has a table of 256 positions", "--context N"),
        ("gpt2", Step("position", "rope", blocks="0"), "affects every layer", "--position none first"),
        ("bloom", Step("position", "learned"), "no context length for the position table", "learned:LENGTH"),
        ("gpt2", Step("context", "256"), "context is already 256 tokens", None),
        ("llama", Step("context", "256"), "context is already 256 tokens", None),
    ],
)
def test_refusals(name: str, step: Step, reason: str, hint: str | None) -> None:
    with pytest.raises(SwapRefused, match=reason) as refused:
        apply(Weights(spec_of(CONFIGS[name])), step)
    assert (hint is None) == (refused.value.hint is None)
    assert hint is None or hint in str(refused.value.hint)


def test_refusals_of_heads_without_room() -> None:
    odd = spec_of({**CONFIGS["gpt2"], "n_embd": 20})
    with pytest.raises(SwapRefused, match="the head dimension of layer 0 is 5") as refused:
        apply(Weights(odd), Step("position", "rope"))
    assert refused.value.hint == "First use --head-dim 6."
    llama = spec_of(CONFIGS["llama-2"])
    latent = with_blocks(llama, attention=LATENT)
    with pytest.raises(SwapRefused, match="come from a latent, so they cannot take RoPE") as refused:
        apply(Weights(latent), Step("position", "rope"))
    assert "before --attention mla" in str(refused.value.hint)
    rope = with_blocks(llama, attention=replace(LATENT, **ROPE))
    with pytest.raises(SwapRefused, match="separate keys for RoPE") as refused:
        apply(Weights(rope), Step("position", "none"))
    assert "rope:neutral" in str(refused.value.hint)
    (_,), neutral = after(Weights(rope), Step("position", "rope:neutral"))
    assert kind(neutral.spec) == "none"
    (_,), alibi = after(Weights(latent), Step("position", "alibi"))
    assert kind(alibi.spec) == "alibi"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("position", "rope:1", "a base above 1"),
        ("position", "rope:x", "a base above 1"),
        ("position", "rope:inf", "a base above 1"),
        ("position", "rope:nan", "a base above 1"),
        ("position", "learned:0", "whole number of at least 1"),
        ("position", "sinusoidal", "is unknown"),
        ("context", "1k", "whole number of at least 1"),
        ("context", "0", "whole number of at least 1"),
    ],
)
def test_values_that_are_none(option: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply(Weights(with_blocks(spec_of(CONFIGS["llama"]))), Step(option, value))
    with pytest.raises(UsageError, match="changes the whole model"):
        apply(Weights(spec_of(CONFIGS["gpt2"])), Step("context", "9", blocks="0"))


# --- other programs ---------------------------------------------------------------------------------------------------


def test_neutral_rotary_positions_in_transformers(tmp_path: Path) -> None:
    """A llama whose positions went loads there, and computes the same."""
    source = without_positions("llama", tmp_path)
    gptkit.swap(source, tmp_path / "neutral", position="rope:neutral")
    gptkit.convert(tmp_path / "neutral", tmp_path / "hf-again", to="hf:llama")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf-again", dtype=torch.float32)
    ours = gptkit.load(source, torch.float32)
    ids = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def a_mean_that_is_not(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_mean_row", lambda rows: rows.sum(axis=0) / (len(rows) - 1))


def no_mean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_mean_row", lambda rows: 0 * rows[0])


def the_head_follows(patch: pytest.MonkeyPatch) -> None:
    right = module._without_table

    def tied(spec: ModelSpec, asked: Any, tensors: dict[str, Any], notes: list[str]) -> ModelSpec:
        new = right(spec, asked, tensors, notes)
        tensors.pop("head.weight")
        return replace(new, head=replace(new.head, tied=True))

    patch.setattr(module, "_without_table", tied)


def a_table_that_is_not_zero(patch: pytest.MonkeyPatch) -> None:
    right = module.Filled
    patch.setattr(module, "Filled", lambda shape, value, like: right(shape, 1.0, like))


def rope_that_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "NEUTRAL", replace(rotation.NEUTRAL, factor=1e6))
    patch.setattr(module, "is_neutral", lambda rotary: rotary.scaling is not None)


def rows_of_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context_length, "_first_rows", lambda table, length: table[-length:])


def rows_in_front(patch: pytest.MonkeyPatch) -> None:
    right: Callable[..., np.ndarray] = context_length._longer_table
    patch.setattr(context_length, "_longer_table", lambda table, length: right(table, length)[::-1])


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, str]]] = {
    "a mean that is not one": (a_mean_that_is_not, {"position": "none"}),
    "no mean": (no_mean, {"position": "rope:neutral"}),
    "the head kept tied": (the_head_follows, {"position": "none"}),
    "a table of ones": (a_table_that_is_not_zero, {"position": "learned:90"}),
    "rotary positions that turn a little": (rope_that_turns, {"position": "rope:neutral"}),
    "the table cut in front": (rows_of_the_end, {"context": "40"}),
    "rows put in front": (rows_in_front, {"context": "400"}),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(name: str, tmp_path: Path) -> None:
    mutate, asked = MUTATIONS[name]
    save_hf(CONFIGS["gpt2"], tmp_path / "gpt2")
    source = tmp_path / "gpt2"
    if "position" in asked:
        alike(source)
    if asked.get("position") == "learned:90":  # with LayerNorms a table of ones is as good as one of zeros
        source = without_positions("llama", tmp_path)
    exactly(source, tmp_path / "right", **asked)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
            gptkit.swap(source, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


# --- on a text --------------------------------------------------------------------------------------------------------


@covered()
@pytest.mark.parametrize("variant", rest_slow(DECODERS))
@pytest.mark.parametrize("asked", [("position", "alibi"), ("position", "none"), ("rotary_dim", "2")], ids="-".join)
def test_what_is_behind_attention_is_fitted_on_a_text(asked: tuple[str, str], variant: Variant) -> None:
    """In every family that has the swap. The stream comes nearer to the original's than without it, or stays where it
    was: random weights leave little to fit, and experts and projections before a norm are not fitted.
    """
    spec, step = spec_of(variant.config), Step(*asked)
    model = Noisy(spec)
    ids = torch.randint(0, spec.vocab_size, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    text = Calibration(CalibrationText(tuple(ids), (), "random tokens", ""), spec)
    try:
        plain = reshape(spec, step, Read(model))
        done = reshape(spec, step, Read(model), calibration=lambda: text, has_text=lambda: True)
    except SwapRefused:
        return
    if plain.guarantee == "exact":
        assert "refitted" not in done.summary
        return
    assert done.summary["refitted"] and done.spec == plain.spec
    gained = done.tensors.keys() - plain.tensors.keys()
    assert gained and all(name.endswith(("attention.o_proj.weight", "down_proj.weight")) for name in gained)

    def last(tree: Model) -> torch.Tensor:
        return [layer.output for layer in text.walk(tree)][-1]

    before = last(model)
    off = [(last(SwappedModel(model, each)) - before).square().mean().item() for each in (done, plain)]
    assert off[0] < 1.5 * off[1]
