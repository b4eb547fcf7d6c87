"""Rotary positions: scalings as transformers has them, part of a head, how pairs lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.covering import examples, few
from helpers.exactness import bytes_of, exactly
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.inverses import inverse
from helpers.trees import ATTENTIONS, with_blocks
from helpers.weights import Weights, after, error
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import gptkit
from gptkit.components import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    RMSNorm,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import GptkitError, SwapRefused, UsageError
from gptkit.surgery.base import Computed, Exactly, StoredModel
from gptkit.surgery.chain import chain
from gptkit.surgery.fits.text import read_text
from gptkit.surgery.measure import measure
from gptkit.surgery.registry import Step, apply
from gptkit.surgery.swaps import rope as module
from gptkit.surgery.swaps import rope as rotary_dim
from gptkit.surgery.swaps import rotation

replace = msgspec.structs.replace
ROPE = ["llama", "llama-yarn", "mistral", "qwen2", "qwen3", "mixtral", "falcon-7b", "falcon-40b"]
LONGROPE = LongRopeScaling(
    short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 3.0, 4.0), original_context=40, attention_factor=1.2
)


def rotary_of(spec: ModelSpec, layer: int = 0) -> Rotary:
    position = spec.blocks[layer].attention.position
    assert isinstance(position, Rotary)
    return position


def with_rotary(spec: ModelSpec, rotary: Rotary) -> ModelSpec:
    return with_blocks(spec, attention=replace(spec.blocks[0].attention, position=rotary))


# --- scaling ----------------------------------------------------------------------------------------------------------

CONFIGURED: dict[str, tuple[dict[str, Any], int]] = {
    "yarn:4": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    "llama3:8": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        2048,
    ),
    "linear:2": ({"rope_type": "linear", "factor": 2.0}, 512),
    "dynamic:2": ({"rope_type": "dynamic", "factor": 2.0}, 256),
}
"""What a config of transformers says for the same, and its max_position_embeddings."""


@few(3)
@pytest.mark.parametrize("value", [*CONFIGURED, "ntk:2", "yarn:1.5"])
def test_scalings_are_those_of_transformers(value: str, tmp_path: Path) -> None:
    """The written tree as a llama: what its config reads back as, and logits past the old context."""
    save_hf(CONFIGS["llama-2"], tmp_path / "hf")
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", rope_scaling=value)
    assert done.guarantee == ("exact" if value == "dynamic:2" else "approximate")
    gptkit.convert(tmp_path / "out", tmp_path / "again", to="hf:llama")
    assert gptkit.open_checkpoint(tmp_path / "again").spec == done.spec
    if value in CONFIGURED:
        scaling, context = CONFIGURED[value]
        config = {**CONFIGS["llama-2"], "rope_scaling": scaling, "max_position_embeddings": context}
        assert spec_of(config) == done.spec
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    ours = gptkit.load(tmp_path / "out", torch.float32)
    ids = torch.randint(97, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)


def test_the_formulas() -> None:
    rotary = Rotary(dim=24, base=1e4)
    assert module.scaled(rotary, "ntk", 4, 256).base == pytest.approx(1e4 * 4 ** (24 / 22))
    plain, larger = (rotation.frequencies(each) for each in (rotary, module.scaled(rotary, "ntk", 4, 256)))
    assert larger[0] == plain[0]
    assert larger[-1] == pytest.approx(plain[-1] / 4)
    yarn = module.scaled(rotary, "yarn", 4, 256).scaling
    assert yarn == YarnScaling(factor=4, original_context=256, attention_factor=0.1 * np.log(4) + 1)


def test_dynamic_scaling_is_exact_up_to_the_context_and_back(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-2"], tmp_path / "hf")
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", rope_scaling="dynamic:2")
    assert (done.guarantee, done.chain.promise.length) == ("exact", 256)
    assert done.measured is not None
    assert done.measured.maximum["float64"] == 0
    before, changed = (gptkit.load(tmp_path / name, torch.float64) for name in ("hf", "out"))
    ids = torch.randint(97, (1, 257), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(before(ids[:, :256]), changed(ids[:, :256]))
        assert not torch.allclose(before(ids), changed(ids), atol=1e-3)
    spec = gptkit.open_checkpoint(tmp_path / "hf").spec
    undo = inverse(Step("rope_scaling", "dynamic:2"), spec)
    assert undo is not None
    back = gptkit.swap(tmp_path / "out", tmp_path / "back", [undo])
    assert back.guarantee == "exact"
    assert back.spec == spec
    assert bytes_of(tmp_path / "back") == bytes_of(tmp_path / "out")


def test_divided_twice_is_divided_by_both() -> None:
    model = Weights(spec_of(CONFIGS["llama-linear"]))  # by 4
    (swapped,), _ = after(model, Step("rope_scaling", "linear:2"))
    assert rotary_of(swapped.spec).scaling == LinearScaling(factor=8.0)
    assert swapped.spec.context_length == 512
    (swapped,), _ = after(model, Step("rope_scaling", "none"))
    assert rotary_of(swapped.spec).scaling is None
    assert (swapped.spec.context_length, swapped.guarantee) == (64, "approximate")
    for name, context in (("llama-yarn", 40), ("llama-3", 64), ("llama-longrope", 40)):
        swapped = apply(Weights(spec_of(CONFIGS[name])), Step("rope_scaling", "none"))
        assert swapped.spec.context_length == context


def test_exact_where_the_angles_stay() -> None:
    """A scaling that touches no pair of this model: all of them turn faster than it looks for."""
    spec = spec_of(CONFIGS["llama-2"])
    fast = with_rotary(replace(spec, context_length=4096), Rotary(dim=8, base=2.0))
    (swapped,), model = after(Weights(fast), Step("rope_scaling", "llama3:8"))
    assert swapped.guarantee == "exact"
    assert error(Weights(fast), model, swapped) <= 1e-12
    assert apply(Weights(fast), Step("rope_scaling", "yarn:8")).guarantee == "approximate"  # its temperature


def test_scaling_some_layers_keeps_the_context() -> None:
    (swapped,), _ = after(Weights(spec_of(CONFIGS["mistral"])), Step("rope_scaling", "yarn:4", blocks="1"))
    assert [rotary_of(swapped.spec, layer).scaling is None for layer in range(3)] == [True, False, True]
    assert swapped.spec.context_length == 256
    assert "the context length stays 256" in swapped.notes[0]


def test_scaling_a_latent() -> None:
    spec = with_blocks(replace(spec_of(CONFIGS["llama-2"]), context_length=256), attention=ATTENTIONS["two-keys"])
    (swapped,), _ = after(Weights(spec), Step("rope_scaling", "ntk:2"))
    assert rotary_of(swapped.spec).base == pytest.approx(1e4 * 2 ** (8 / 6))


# --- part of the head -------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("name", ROPE)
@pytest.mark.parametrize("drop", ["", ":fastest"])
def test_what_stays_turns_as_it_did(name: str, drop: str) -> None:
    """Against the tree as it is, the pairs that go made too slow to turn, which a divisor of each pair can say."""
    spec = spec_of(CONFIGS[name])
    dim = rotary_of(spec).dim
    size = dim // 4 * 2
    model = Weights(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_dim, "mean_rotation", lambda rotary, *_, **__: np.full(rotary.dim // 2, factor(rotary)))
        (swapped,), partial = after(model, Step("rotary_dim", f"{size}{drop}"))
    assert swapped.guarantee == "approximate"
    assert {rotary_of(partial.spec, layer).dim for layer in range(len(spec.blocks))} == {size}
    slowed = Weights(stopped(spec, size, bool(drop)))
    assert error(slowed, partial, swapped) <= 1e-12
    assert error(model, partial, swapped) > 1e-3


def factor(rotary: Rotary) -> float:
    return float(getattr(rotary.scaling, "attention_factor", 1.0)) ** 2


def stopped(spec: ModelSpec, size: int, fastest: bool) -> ModelSpec:
    """The tree with all but some of each layer's pairs at rest."""
    blocks = []
    for block in spec.blocks:
        rotary = block.attention.position
        assert isinstance(rotary, Rotary)
        kept = (
            np.arange(rotary.dim // 2) >= (rotary.dim - size) // 2
            if fastest
            else np.arange(rotary.dim // 2) < size // 2
        )
        divisors = 1.0 / rotation.frequencies(rotary) / rotary.base ** (np.arange(rotary.dim // 2) * 2 / rotary.dim)
        each = tuple(float(d) if keep else 1e30 for d, keep in zip(divisors, kept, strict=True))
        scaling = LongRopeScaling(
            short_factor=each,
            long_factor=each,
            original_context=256,
            attention_factor=float(getattr(rotary.scaling, "attention_factor", 1.0)),
        )
        blocks.append(block.replaced(attention=replace(block.attention, position=replace(rotary, scaling=scaling))))
    return replace(spec, blocks=tuple(blocks))


SCALINGS: dict[str, RopeScaling | None] = {
    "none": None,
    "linear": LinearScaling(factor=3.0),
    "dynamic": DynamicScaling(factor=2.0, original_context=64),
    "llama3": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64),
    "yarn": YarnScaling(factor=4.0, original_context=64, attention_factor=1.1),
    "yarn-short": YarnScaling(factor=4.0, original_context=9, attention_factor=1.1, truncate=False),
    "yarn-long": YarnScaling(factor=4.0, original_context=10**7, attention_factor=1.1),
}


@settings(max_examples=examples(200), deadline=None)
@given(
    pairs=st.integers(2, 40),
    data=st.data(),
    base=st.floats(1.5, 1e7),
    name=st.sampled_from([*SCALINGS, "longrope"]),
    drop=st.sampled_from(["slowest", "fastest"]),
)
def test_frequencies_stay_whatever_scales_them(
    pairs: int, data: st.DataObject, base: float, name: str, drop: str
) -> None:
    size = 2 * data.draw(st.integers(1, pairs - 1))
    if name == "longrope":
        each = data.draw(st.lists(st.floats(0.5, 30), min_size=pairs, max_size=pairs))
        scaling: RopeScaling | None = replace(LONGROPE, short_factor=tuple(each), long_factor=tuple(each[::-1]))
    else:
        scaling = SCALINGS[name]
    rotary = Rotary(dim=2 * pairs, base=base, scaling=scaling)
    if name == "dynamic" and (drop == "fastest" or size == 2):
        return
    part = rotary_dim.kept_rotary(rotary, size, drop)
    kept = rotary_dim.kept_pairs(rotary.dim, size, drop)
    for length in (1, 41):
        np.testing.assert_allclose(
            rotation.frequencies(part, length), rotation.frequencies(rotary, length)[kept], rtol=1e-12
        )
    assert getattr(part.scaling, "attention_factor", 1.0) == getattr(scaling, "attention_factor", 1.0)


def test_a_config_without_need_says_no_divisors() -> None:
    rotary = Rotary(dim=24, base=1e4)
    assert rotary_dim.kept_rotary(rotary, 12, "slowest") == Rotary(dim=12, base=pytest.approx(100.0))
    assert isinstance(rotary_dim.kept_rotary(rotary, 12, "fastest").scaling, LinearScaling)


@few(1)
@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "qwen3", "falcon-7b"])
@pytest.mark.parametrize("side", ["q", "k"])
def test_pairs_that_are_zero_go_exactly(name: str, side: str) -> None:
    spec = spec_of(CONFIGS[name])
    attention = spec.blocks[0].attention
    dim, head = rotary_of(spec).dim, getattr(attention, "head_dim", 0)

    def clear(tensor: str, value: np.ndarray) -> None:
        if f".{side}_proj." in tensor:
            heads = value.reshape(-1, head, *value.shape[1:])
            heads[:, [dim // 2 - 1, dim - 1]] = 0

    model = Weights(spec, change=clear)
    (swapped,), part = after(model, Step("rotary_dim", str(dim - 2)))
    assert swapped.guarantee == "exact"
    assert swapped.promise.length == (40 if name == "llama-dynamic" else None)
    assert error(model, part, swapped) <= 1e-12
    assert apply(Weights(spec), Step("rotary_dim", str(dim - 2))).guarantee == "approximate"
    assert apply(model, Step("rotary_dim", str(dim - 2), approximate=True)).guarantee == "approximate"
    if dim > 4:
        assert apply(model, Step("rotary_dim", str(dim - 4))).guarantee == "approximate"


def test_neutral_positions_go_exactly() -> None:
    spec = spec_of(CONFIGS["llama"])
    neutral = with_rotary(spec, replace(rotary_of(spec), scaling=rotation.NEUTRAL))
    model = Weights(neutral)
    (swapped,), part = after(model, Step("rotary_dim", "6"))
    assert swapped.guarantee == "exact"
    assert not [how for how in swapped.tensors.values() if isinstance(how, Computed)]
    assert error(model, part, swapped) <= 1e-12


def test_part_of_a_part_and_pairs_of_neighbours() -> None:
    spec = spec_of(CONFIGS["llama"])
    model = Weights(spec)
    _, once = after(model, Step("rotary_dim", "8"))
    _, twice = after(once, Step("rotary_dim", "4"))
    assert rotary_of(twice.spec).base == pytest.approx(1e4 ** (4 / 20))
    _, adjacent = after(model, Step("rope_pairs", "adjacent"))
    (swapped,), _ = after(adjacent, Step("rotary_dim", "8"))
    _, other = after(adjacent, Step("rotary_dim", "8"))
    _, back = after(other, Step("rope_pairs", "halves"))
    assert back.spec == once.spec
    assert measure(Exactly(once), Exactly(back), dtypes=("float64",)).relative["float64"] <= 1e-12
    assert not any(".k_proj" in name for name in swapped.tensors)  # the fastest pairs come first already


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize(("sample", "value"), [("llama", "12"), ("llama", "20"), ("falcon", "8")])
def test_the_slowest_pairs_are_the_least(sample: str, value: str) -> None:
    """KL on text: against the plain form, and against the fastest."""
    kl = [on_text(sample, Step("rotary_dim", value)), on_text(sample, Step("rotary_dim", value, approximate=True))]
    assert kl[0] < 0.5 * kl[1]
    assert kl[0] < 0.7 * on_text(sample, Step("rotary_dim", f"{value}:fastest"))


@few(1)
@pytest.mark.parametrize("value", ["ntk:2", "yarn:2", "llama3:4"])
def test_better_than_positions_divided(value: str) -> None:
    assert on_text("llama", Step("rope_scaling", value)) < 0.3 * on_text("llama", Step("rope_scaling", "linear:2"))


def on_text(sample: str, step: Step) -> float:
    """KL on 400 tokens that no sample was trained on."""
    if not (SAMPLES_DIR / sample).is_dir():
        pytest.skip(f"there is no {SAMPLES_DIR / sample}")
    source = gptkit.open_checkpoint(f"sample:{sample}")
    done = chain(source, [step])
    text = read_text(source, None).held_out[:401]
    found = measure(StoredModel(source), done.models[-1], promise=done.promise, text=text, dtypes=("float32",)).kl_text
    assert found is not None
    return found


# --- how pairs lie ----------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("name", [*ROPE, "llama-longrope"])
def test_pairs_lie_otherwise_and_back(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", torch.bfloat16)
    done = exactly(tmp_path / "hf", tmp_path / "out", rope_pairs="adjacent")
    assert {rotary_of(done.spec, layer).pairs for layer in range(len(done.spec.blocks))} == {"adjacent"}
    spec = gptkit.open_checkpoint(tmp_path / "hf").spec
    undo = inverse(Step("rope_pairs", "adjacent"), spec)
    assert undo == Step("rope_pairs", "halves")
    back = exactly(tmp_path / "out", tmp_path / "back", undo)
    assert back.spec == spec
    gptkit.convert(tmp_path / "hf", tmp_path / "local", to="local")
    assert bytes_of(tmp_path / "back") == bytes_of(tmp_path / "local") != bytes_of(tmp_path / "out")


@settings(max_examples=examples(30), deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    half=st.integers(1, 6),
    still=st.integers(0, 5),
    bias=st.booleans(),
    norms=st.sampled_from([(), ("q_norm",), ("k_norm",), ("q_norm", "k_norm")]),
)
def test_pairs_of_heads_of_any_size(
    kv_heads: int, group: int, half: int, still: int, bias: bool, norms: tuple[str, ...]
) -> None:
    spec = spec_of(CONFIGS["llama"])
    head_dim = 2 * half + still
    attention = replace(
        spec.blocks[0].attention,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        position=Rotary(dim=2 * half, base=30.0),
        **{name: RMSNorm(size=head_dim, eps=1e-6) for name in norms},
    )
    model = Weights(with_blocks(replace(spec, blocks=spec.blocks[:1]), attention=attention))
    (swapped,), other = after(model, Step("rope_pairs", "adjacent"))
    assert error(model, other, swapped) <= 1e-12
    _, back = after(other, Step("rope_pairs", "halves"))
    assert back.spec == model.spec
    assert all(np.array_equal(back.wide(name), value) for name, value in model.values.items())


@pytest.mark.parametrize("name", ["deepseek", "biases-rope", "two-keys", "positions-alone"])
def test_pairs_of_a_latent(name: str) -> None:
    spec = with_blocks(replace(spec_of(CONFIGS["llama-2"]), context_length=256), attention=ATTENTIONS[name])
    model = Weights(spec)
    wanted = "halves" if rotary_of(spec).pairs == "adjacent" else "adjacent"
    (swapped,), other = after(model, Step("rope_pairs", wanted))
    assert error(model, other, swapped) <= 1e-12


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step", "reason", "hint"),
    [
        ("gpt2", Step("rope_scaling", "yarn:4"), "this model has no rotary positions", "--position rope"),
        ("bloom", Step("rotary_dim", "4"), "this model has no rotary positions", "--position rope"),
        ("bloom", Step("rope_pairs", "adjacent", blocks="0"), "these layers have no rotary positions", "--position"),
        ("llama-yarn", Step("rope_scaling", "ntk:2"), "already scaled (YarnScaling)", "--rope-scaling none"),
        ("llama-linear", Step("rope_scaling", "yarn:2"), "already scaled (LinearScaling)", "Only linear scalings"),
        ("llama", Step("rope_scaling", "none"), "is not scaled", "rope:BASE"),
        ("llama", Step("rotary_dim", "7"), "an even number from 2, not 7", "the even numbers from 2 to 18"),
        ("llama", Step("rotary_dim", "0"), "an even number from 2, not 0", "the even numbers from 2 to 18"),
        ("llama", Step("rotary_dim", "20"), "rotates 20 dimensions of each head in layer 0 already", "from 2 to 18"),
        (
            "llama",
            Step("rotary_dim", "22"),
            "rotates 20 dimensions of each head in layer 0, which is less",
            "from 2 to 18",
        ),
        ("llama-dynamic", Step("rotary_dim", "2"), "divides by the rotary dimension minus 2", "from 4"),
        ("llama-dynamic", Step("rotary_dim", "4:fastest"), "computes each frequency from all pairs", "slowest"),
        ("llama", Step("rope_pairs", "halves"), "already halves", None),
    ],
)
def test_refusals(name: str, step: Step, reason: str, hint: str | None) -> None:
    with pytest.raises(SwapRefused) as refused:
        apply(Weights(spec_of(CONFIGS[name])), step)
    assert reason in str(refused.value)
    assert (hint is None) == (refused.value.hint is None)
    assert hint is None or hint in str(refused.value.hint)


def test_refusals_of_other_trees() -> None:
    spec = spec_of(CONFIGS["llama-2"])
    two = with_rotary(spec, Rotary(dim=2, base=1e4))
    for value in ("ntk:2", "dynamic:2"):
        with pytest.raises(SwapRefused, match="the rotary dimension minus 2") as refused:
            apply(Weights(two), Step("rope_scaling", value))
        assert refused.value.hint == "Possible here: linear, yarn, llama3."
    with pytest.raises(SwapRefused, match=r"an even number|already") as refused:
        apply(Weights(two), Step("rotary_dim", "2"))
    assert refused.value.hint == "No smaller number is possible."
    with pytest.raises(SwapRefused, match="context length of a model, but this model states none") as refused:
        apply(Weights(replace(spec, context_length=None)), Step("rope_scaling", "ntk:2"))
    assert "--context N" in str(refused.value.hint)
    neutral = with_rotary(spec, Rotary(dim=8, base=1e4, scaling=rotation.NEUTRAL))
    for value in ("ntk:2", "linear:2", "none"):
        with pytest.raises(SwapRefused, match="only frequencies of 0"):
            apply(Weights(neutral), Step("rope_scaling", value))
    latent = with_blocks(spec, attention=ATTENTIONS["two-keys"])
    with pytest.raises(SwapRefused, match="has latent attention") as refused:
        apply(Weights(latent), Step("rotary_dim", "4"))
    assert "before --attention mla" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rope_scaling", "yarn:1"),
        ("rope_scaling", "yarn:x"),
        ("rope_scaling", "linear:-2"),
        ("rope_scaling", "ntk:nan"),
        ("rope_scaling", "cubic:2"),
        ("rotary_dim", "-4"),
        ("rotary_dim", "4:middle"),
        ("rope_pairs", "quarters"),
    ],
)
def test_values_that_are_none(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=r"expected|is unknown"):
        apply(Weights(spec_of(CONFIGS["llama"])), Step(option, value))


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def only(*kept: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave the other tensors with rows that turn as they are."""
    right = module.row_tensors

    def some(path: str, attention: Any, side: Any) -> list[str]:
        return [name for name in right(path, attention, side) if name.endswith(kept)]

    return lambda patch: patch.setattr(module, "row_tensors", some)


def the_other_order(patch: pytest.MonkeyPatch) -> None:
    right = module._pair_order
    patch.setattr(module, "_pair_order", lambda dim, pairs: np.argsort(right(dim, pairs)))


def across_heads(patch: pytest.MonkeyPatch) -> None:
    def rows(array: np.ndarray, order: np.ndarray) -> np.ndarray:
        return array.reshape(len(order), -1, *array.shape[1:])[order].reshape(array.shape)

    patch.setattr(module, "reordered", rows)


def nothing_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "reordered", lambda array, order: array)


def angles_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "turns_alike", lambda a, b, length=1: True)


def dynamic_without_its_limit(patch: pytest.MonkeyPatch) -> None:
    right = module._guarantee_of_angles
    patch.setattr(module, "_guarantee_of_angles", lambda *args: (right(*args)[0], module.Promise()))


PAIRS = {"rope_pairs": "adjacent"}
MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, dict[str, str]]] = {
    "biases forgotten": (only("weight"), "qwen2", PAIRS),
    "norms forgotten": (only("proj.weight"), "qwen3", PAIRS),
    "only queries": (only("q_proj.weight", "q_proj.bias"), "llama-2", PAIRS),
    "the other way round": (the_other_order, "llama", PAIRS),
    "across heads": (across_heads, "llama-2", PAIRS),
    "nothing moved": (nothing_moves, "falcon-7b", PAIRS),
    "called exact whatever turns": (angles_are_not_looked_at, "llama-2", {"rope_scaling": "ntk:2"}),
    "exact past the context": (dynamic_without_its_limit, "llama-2", {"rope_scaling": "dynamic:2"}),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(name: str, tmp_path: Path) -> None:
    mutate, model, asked = MUTATIONS[name]
    save_hf(CONFIGS[model], tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "right", **asked)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def same_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rotary_dim, "kept_rotary", lambda rotary, size, _drop: replace(rotary, dim=size))


def same_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rotary_dim, "_part_order", lambda rotary, kept, head_dim: np.arange(head_dim))


def only_queries_go(patch: pytest.MonkeyPatch) -> None:
    right = rotary_dim._part_tensors
    patch.setattr(rotary_dim, "_part_tensors", lambda *args: {k: v for k, v in right(*args).items() if ".k_" not in k})


def no_amplitude(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rotary_dim, "mean_rotation", lambda rotary, *_, **__: np.ones(rotary.dim // 2))


PARTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the base left": same_base,
    "the places left": same_places,
    "queries alone": only_queries_go,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_wrong_part_shows(name: str) -> None:
    """On pairs that are zero, where the part is exact."""
    spec = spec_of(CONFIGS["llama"])

    def clear(tensor: str, value: np.ndarray) -> None:
        if ".q_proj." in tensor:
            value.reshape(-1, 20, *value.shape[1:])[:, [3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 18, 19]] = 0

    model = Weights(spec, change=clear)
    (swapped,), part = after(model, Step("rotary_dim", "6"))
    assert swapped.guarantee == "exact"
    assert error(model, part, swapped) <= 1e-12
    with pytest.MonkeyPatch.context() as patch:
        PARTS[name](patch)
        (swapped,), part = after(model, Step("rotary_dim", "6"))
        assert error(model, part, swapped) > 1e-6
    assert model.spec == spec


def test_the_amplitude_is_on_what_no_longer_turns() -> None:
    """YaRN scales the scores of all pairs; those that go keep it."""
    spec = spec_of(CONFIGS["llama-yarn"])
    slowed = Weights(stopped(spec, 4, False))
    with pytest.MonkeyPatch.context() as patch:
        no_amplitude(patch)
        (swapped,), part = after(Weights(spec), Step("rotary_dim", "4"))
    assert error(slowed, part, swapped) > 1e-3
