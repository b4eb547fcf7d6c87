"""Swaps refuse by name the fields of components that they do not know, and compute nothing wrong."""

from pathlib import Path
from typing import Any

import pytest
from helpers.covering import few
from helpers.exactness import exactly, saved
from helpers.families import CONFIGS, spec_of
from helpers.weights import Weights, error
from msgspec.structs import replace

import gptkit
from gptkit.components import LayerNorm, ModelSpec, RMSNorm
from gptkit.errors import SwapRefused
from gptkit.surgery.base import Swapped, SwappedModel
from gptkit.surgery.registry import Step, apply

REFUSED = [
    ("afmoe-mup", "fold", "value-bias", "gate"),
    ("afmoe", "head_dim", "32", "gate"),
    ("afmoe", "heads", "8", "gate"),
    ("apertus", "activation", "relu", "xielu"),
    ("llama4_text-dense", "attention", "mla:full", "chunked"),
    ("llama4_text", "mlp", "dense", "weighs"),
    ("ministral3", "attention", "mla:full", "temperature"),
    ("phimoe", "mlp", "dense", "jitter"),
    ("bitnet", "heads", "8", "mixed_norm"),
    ("bitnet", "head_dim", "16", "mixed_norm"),
    ("bitnet", "intermediate", "88", "inner_norm"),
    ("bitnet", "mlp", "moe:4x2", "inner_norm"),
    ("cohere-normed", "head_dim", "16", "all heads at once"),
    ("ctrl", "hidden", "56", "SinusoidalPositions"),
    ("ctrl", "context", "128", "SinusoidalPositions"),
    ("ctrl", "norm", "rmsnorm", "SinusoidalPositions"),
    ("dbrx", "fold", "scale", "clip"),
    ("deepseek_v3", "activation", "relu", "shared"),
    ("deepseek_v3", "intermediate", "200", "shared"),
    ("deepseek_v3", "mlp", "dense", "shared, .*choice_bias"),
    ("gemma3n_text", "hidden", "56", "layer_inputs"),
    ("gemma3n_text-shared", "activation", "silu:2", "sparsity"),
    ("gemma3n_text-shared", "intermediate", "200", "sparsity"),
    ("gemma3n_text-shared", "mlp", "moe:4x2", "sparsity"),
    ("gemma3n_text-shared", "mlp", "plain", "sparsity"),
    ("gemma4_text", "vocab", "120", "layer_inputs"),
    ("gemma4_text-experts", "activation", "relu", "DenseBesideExperts"),
    ("gemma4_text-experts", "intermediate", "200", "DenseBesideExperts"),
    ("gemma4_text-keys", "layers", "+1", "scale"),
    ("gpt_oss", "attention", "mla:full", "sinks"),
    ("gpt_oss", "fold", "value-bias", "sinks"),
    ("gpt_oss", "intermediate", "200", "limit"),
    ("gpt_oss", "mlp", "plain", "limit"),
    ("hunyuan_v1_dense", "position", "none", "norm_order"),
    ("hunyuan_v1_dense", "rotary_dim", "4", "norm_order"),
    ("mpt-clipped", "fold", "scale", "clip"),
    ("mpt-clipped", "head_dim", "16", "clip"),
    ("nanochat", "rotary_dim", "4", "q_norm multiplies by none"),
    ("olmo", "rotary_dim", "4", "clip"),
    ("olmo2", "attention", "mha", "has size 16"),
    ("olmo2", "head_dim", "16", "all heads at once"),
    ("olmo2", "heads", "12", "has size 48"),
    ("openai-gpt", "layers", "+1", "sum_norm"),
    ("openai-gpt", "hidden", "56", "sum_norm"),
    ("opt-350m", "position", "none", "width"),
    ("opt-bare", "fold", "norm", "final_norm is missing"),
    ("opt-bare", "norm", "rmsnorm", "width"),
    ("persimmon", "head_dim", "24", "q_norm is of the kind LayerNorm"),
    ("vaultgemma", "attention", "mla:full", "cap"),
]


@few(16)
@pytest.mark.parametrize(("name", "option", "value", "field"), REFUSED)
def test_a_field_that_a_swap_does_not_know_is_refused_by_name(
    name: str, option: str, value: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(SwapRefused, match=field):
        gptkit.swap(saved(name, tmp_path), tmp_path / "out", [Step(option, value)])
    assert not (tmp_path / "out").exists()


@few(3)
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("opt-350m", "intermediate", "88"),
        ("opt-350m", "untie", ""),
        ("opt", "context", "512"),
        ("opt", "hidden", "56"),
        ("deepseek_v2", "heads", "8"),
        ("deepseek_v2", "hidden", "64"),
        ("gemma3n_text", "intermediate", "96"),
        ("gemma3n_text-shared", "untie", ""),
        ("gemma4_text-shared", "untie", ""),
        ("gemma4_text-keys", "intermediate", "88"),
        ("gpt_neo", "norm", "rmsnorm"),
        ("gpt_oss", "heads", "8"),
        ("gpt_oss", "heads", "9"),
        ("granite", "hidden", "56"),
        ("granite", "norm", "layernorm"),
        ("granite", "fold", "norm"),
        ("mpt", "heads", "8"),
        ("persimmon", "fold", "scale"),
        ("persimmon", "rope_pairs", "adjacent"),
        ("ctrl", "head_dim", "20"),
        ("bitnet", "layers", "+1"),
    ],
)
def test_what_does_not_touch_a_field_is_exact(name: str, option: str, value: str, tmp_path: Path) -> None:
    exactly(saved(name, tmp_path), tmp_path / "out", Step(option, value))


# --- trees that no family has -----------------------------------------------------------------------------------------


def with_attention(name: str, **fields: Any) -> Weights:
    """Random weights of a family's tree whose attentions have these fields."""
    spec = spec_of(CONFIGS[name])
    blocks = tuple(block.replaced(attention=replace(block.attention, **fields)) for block in spec.blocks)
    return Weights(replace(spec, blocks=blocks))


def done(model: Weights, step: Step) -> tuple[Swapped, float]:
    """A swap, and how far the logits are from those before."""
    swapped = apply(model, step)
    return swapped, error(model, SwappedModel(model, swapped), swapped)


@pytest.mark.parametrize(
    "fields", [{"clip": 0.5}, {"cap": 1.0}, {"sinks": True}], ids=lambda fields: next(iter(fields))
)
def test_the_bias_of_keys_shifts_scores_where_nothing_else_sees_them(fields: dict[str, Any]) -> None:
    """Without any of these it adds the same to all scores of a query, which softmax does not see."""
    plain, gap = done(with_attention("gpt2"), Step("drop", "key.bias"))
    assert plain.guarantee == "exact" and gap <= 1e-12
    seen, gap = done(with_attention("gpt2", **fields), Step("drop", "key.bias"))
    assert seen.guarantee == "approximate" and gap > 1e-6


@pytest.mark.parametrize(
    "fields", [{"v_norm": RMSNorm(size=20, eps=1e-6)}, {"kv_from": "keys"}], ids=lambda fields: next(iter(fields))
)
def test_values_that_are_normed_or_made_of_keys_are_refused(fields: dict[str, Any]) -> None:
    model = with_attention("llama", **fields)
    for step in (Step("heads", "12"), Step("head_dim", "16"), Step("attention", "mha"), Step("position", "none")):
        with pytest.raises(SwapRefused, match=next(iter(fields))):
            apply(model, step)


def olmo2_with(norm: LayerNorm, silent: bool) -> Weights:
    """OLMo 2 with a norm behind its feed-forwards, where these may give nothing in the last layer."""
    spec = spec_of(CONFIGS["olmo2"])
    new: ModelSpec = replace(spec, blocks=tuple(block.replaced(feed_forward_output_norm=norm) for block in spec.blocks))
    last = f"blocks.{len(spec.blocks) - 1}."
    zero = [last + each for each in ("attention.o_proj.weight", "feed_forward.down_proj.weight")] if silent else []
    return Weights(new, change=lambda name, value: value.fill(0) if name in zero else None)


def test_the_bias_of_a_norm_behind_a_mixer_writes_too() -> None:
    """A copy of a layer is silent only without it, and a layer whose mixers give nothing adds it all the same."""
    size = spec_of(CONFIGS["olmo2"]).hidden_size
    for biased in (True, False):
        norm = LayerNorm(size=size, eps=1e-5, bias=biased)
        more, gap = done(olmo2_with(norm, False), Step("layers", "+1"))
        assert more.guarantee == "exact" and gap <= 1e-12
        model = olmo2_with(norm, True)
        fewer, gap = done(model, Step("layers", f"0-{len(model.spec.blocks) - 2}"))
        assert (fewer.guarantee == "exact") != biased
        assert (gap <= 1e-12) != biased


def test_a_mean_position_joins_a_table_that_is_multiplied() -> None:
    """The table of positions has one row over and over, and goes exactly."""
    spec = spec_of(CONFIGS["gpt2"])
    spec = replace(spec, embedding=replace(spec.embedding, multiplier=3.0))
    model = Weights(spec, change=lambda name, value: value.__setitem__(..., value[0]) if "positions" in name else None)
    swapped, gap = done(model, Step("position", "none"))
    assert swapped.guarantee == "exact" and gap <= 1e-12


def test_a_multiplier_before_the_norm_of_a_table_is_refused() -> None:
    spec = spec_of(CONFIGS["bloom"])
    model = Weights(replace(spec, embedding=replace(spec.embedding, multiplier=3.0)))
    for step in (Step("norm", "rmsnorm"), Step("hidden", str(spec.hidden_size + 8))):
        with pytest.raises(SwapRefused, match="multiplier"):
            apply(model, step)


def test_a_feed_forward_without_a_norm_is_not_read_behind_the_attentions() -> None:
    spec = spec_of(CONFIGS["llama"])
    blocks = tuple(block.replaced(feed_forward_norm=None) for block in spec.blocks)
    model = Weights(replace(spec, blocks=blocks))
    for step in (Step("block", "parallel"), Step("fold", "norm"), Step("hidden", str(2 * spec.hidden_size))):
        with pytest.raises(SwapRefused, match="norm"):
            apply(model, step)
