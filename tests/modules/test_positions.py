"""Rotary frequencies and ALiBi slopes are transformers' own to the bit; rotation itself against complex numbers."""

import copy
from typing import Any

import pytest
import torch
from helpers.covering import examples
from helpers.families import CONFIGS, VARIANTS, hf_config, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from gptkit.architectures import ARCHITECTURES
from gptkit.components import ALiBi, DynamicScaling, LongRopeScaling, Rotary
from gptkit.modules import positions
from gptkit.modules.positions import alibi_bias, alibi_slopes, apply_rotary, inverse_frequencies, rotary_tables

LENGTHS = (1, 39, 40, 41, 200, 5000)


def rotary_of(config: dict[str, Any]) -> Rotary:
    position = spec_of(config).blocks[0].attention.position
    assert isinstance(position, Rotary)
    return position


def llama(head_dim: int = 64, theta: float = 1e4, context: int = 160, **scaling: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "vocab_size": 97,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": scaling or None,
    }


# Parameters of published models, and the corners of each formula.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": llama(),
    "default-theta": llama(theta=500_042.0, head_dim=128),
    "linear": llama(rope_type="linear", factor=8.0),
    "linear-old": llama(type="linear", factor=2.5),
    "dynamic": llama(rope_type="dynamic", factor=2.0, context=40),
    "dynamic-theta": llama(rope_type="dynamic", factor=3.7, context=40, theta=1e6, head_dim=128),
    "yarn-qwen2.5": llama(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, context=131072, theta=1e6, head_dim=128
    ),
    "yarn-short": llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=40),
    "yarn-inferred-factor": llama(rope_type="yarn", factor=None, original_max_position_embeddings=40),
    "yarn-not-truncated": llama(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=40,
    ),
    "yarn-deepseek": llama(
        rope_type="yarn",
        factor=40,
        mscale=1.0,
        mscale_all_dim=0.707,
        beta_fast=32,
        beta_slow=1,
        original_max_position_embeddings=4096,
        context=163840,
    ),
    "yarn-attention-factor": llama(
        rope_type="yarn", factor=4.0, attention_factor=1.25, original_max_position_embeddings=40
    ),
    "yarn-one": llama(rope_type="yarn", factor=1.0, original_max_position_embeddings=160),
    "longrope": llama(
        rope_type="longrope",
        factor=4.0,
        short_factor=[1 + i / 32 for i in range(32)],
        long_factor=[1.0 + i for i in range(32)],
        original_max_position_embeddings=40,
    ),
    "longrope-inferred-factor": llama(
        rope_type="longrope",
        short_factor=[1.05] * 32,
        long_factor=[1.3**i for i in range(32)],
        original_max_position_embeddings=40,
    ),
    "longrope-attention-factor": llama(
        rope_type="longrope",
        factor=32.0,
        attention_factor=1.19,
        short_factor=[1.0] * 32,
        long_factor=[2.0] * 32,
        original_max_position_embeddings=40,
    ),
    "llama3": llama(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        context=131072,
        theta=5e5,
        head_dim=128,
    ),
    "proportional": llama(rope_type="proportional", partial_rotary_factor=0.3, theta=1e6),
    "proportional-factor": llama(rope_type="proportional", partial_rotary_factor=0.55, factor=2.5),
    "proportional-all": llama(rope_type="proportional"),
    "proportional-none": llama(rope_type="proportional", partial_rotary_factor=0),
    "default-part": llama(rope_type="default", partial_rotary_factor=0.5),
    "llama3-short": llama(
        rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=40
    ),
}


def test_every_scaling_of_transformers_is_here():
    tried = {name.split("-")[0] for name in SCALINGS} - {"default"}
    assert set(ROPE_INIT_FUNCTIONS) == tried


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers_to_the_bit(name, length):
    """And so is the factor on cos and sin."""
    config, rotary = SCALINGS[name], rotary_of(SCALINGS[name])
    theirs = hf_config(config)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        module = LlamaRotaryEmbedding(theirs)
        expected, factor = module.inv_freq, module.attention_scaling
    else:
        # As transformers' forward calls it: with a tensor.
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=torch.tensor(length))
    ours = inverse_frequencies(rotary, length, torch.float32)
    assert ours.dtype == expected.dtype == torch.float32
    assert torch.equal(ours, expected)
    assert getattr(rotary.scaling, "attention_factor", 1.0) == factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_transformers_to_the_bit(name, dtype):
    rotary = rotary_of(SCALINGS[name])
    for length in (7, 200):
        module = LlamaRotaryEmbedding(hf_config(SCALINGS[name]))
        positions = torch.arange(length)[None]
        cos, sin = module(torch.zeros(1, dtype=dtype), positions)
        tables = rotary_tables(rotary, positions, dtype)
        assert torch.equal(tables.cos[:, 0], cos)
        subtracted, added = tables.sin[:, 0].chunk(2, dim=-1)
        assert torch.equal(torch.cat((-subtracted, added), dim=-1), sin)


class _Powers(TorchDispatchMode):
    """Notes on which devices powers are computed."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.pow:
            self.devices.add(found.device.type)
        return found


@pytest.mark.parametrize("name", SCALINGS)
def test_a_device_has_the_frequencies_of_the_cpu(name):
    """As in transformers, which computes them where it builds the model, and again where a scaling replaces them."""
    rotary = rotary_of(SCALINGS[name])
    by_length = isinstance(rotary.scaling, DynamicScaling | LongRopeScaling)
    positions._copied_frequencies.cache_clear()
    positions._long_frequencies.cache_clear()
    for both in ({"cpu", "meta"}, {"meta"} if isinstance(rotary.scaling, DynamicScaling) else set()):
        with _Powers() as powers:
            tables = rotary_tables(rotary, torch.arange(7, device="meta")[None], torch.float32)
        assert tables.cos.device.type == "meta"
        assert powers.devices == (both if by_length else both & {"cpu"})  # the second time, the copies are there


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCALINGS)
def test_the_device_chooses_the_frequencies_of_a_length(name, length):
    """The host does not read the length, which would wait for the device."""
    rotary = rotary_of(SCALINGS[name])
    chosen = positions._frequencies_on(torch.device("cpu"), rotary, torch.tensor(length), torch.float32)
    assert torch.equal(chosen, inverse_frequencies(rotary, length, torch.float32))


def test_frequencies_of_a_device_can_be_trained_through():
    for name in SCALINGS:
        rotary = rotary_of(SCALINGS[name])
        positions._copied_frequencies.cache_clear()
        positions._long_frequencies.cache_clear()
        with torch.inference_mode():
            rotary_tables(rotary, torch.arange(7, device="meta")[None], torch.float32)
        stored = positions._copied_frequencies(torch.device("meta"), rotary, torch.float32)
        assert not stored.is_inference()


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_in_fp64_are_the_same_function(name):
    rotary = rotary_of(SCALINGS[name])
    for length in LENGTHS:
        narrow, wide = (inverse_frequencies(rotary, length, dtype) for dtype in (torch.float32, torch.float64))
        assert wide.dtype == torch.float64
        torch.testing.assert_close(narrow.double(), wide, rtol=3e-5, atol=0)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "rope_scaling" in v.config], ids=str)
def test_the_written_rotary_has_the_same_frequencies(variant):
    """config_for infers nothing anew."""
    spec = spec_of(variant.config)
    written = ARCHITECTURES[variant.family].config_for(spec)
    assert spec_of(copy.deepcopy(written)).blocks[0].attention.position == spec.blocks[0].attention.position


@settings(max_examples=examples(100), deadline=None)
@given(
    half=st.integers(1, 64),
    base=st.floats(100.0, 1e8),
    factor=st.floats(1.0, 64.0),
    original=st.integers(8, 100_000),
    low=st.floats(0.5, 2.0),
    ratio=st.floats(1.5, 16.0),
)
def test_llama3_for_any_numbers(half, base, factor, original, low, ratio):
    config = llama(
        head_dim=2 * half,
        theta=base,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=low * ratio,
        original_max_position_embeddings=original,
        context=original,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config(config), "cpu")
    assert torch.equal(inverse_frequencies(rotary_of(config), 1, torch.float32), expected)


@settings(max_examples=examples(100), deadline=None)
@given(
    half=st.integers(1, 64),
    base=st.floats(100.0, 1e8),
    factor=st.floats(1.0, 64.0),
    original=st.integers(8, 100_000),
    fast=st.floats(2.0, 64.0),
    slow=st.floats(0.25, 2.0),
    truncate=st.booleans(),
)
def test_yarn_for_any_numbers(half, base, factor, original, fast, slow, truncate):
    config = llama(
        head_dim=2 * half,
        theta=base,
        rope_type="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        original_max_position_embeddings=original,
        context=original,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](hf_config(config), "cpu")
    rotary = rotary_of(config)
    assert torch.equal(inverse_frequencies(rotary, 1, torch.float32), expected)
    assert rotary.scaling.attention_factor == attention_factor


# --- applying them ---------------------------------------------------------------------------------------------------


def test_rotation_is_multiplication_by_complex_numbers():
    rotary = Rotary(dim=8, base=1e4)
    positions = torch.arange(5)[None]
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x, rotary_tables(rotary, positions, torch.float64))
    angles = positions[0, :, None].double() * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], dim=-1))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_transformers_to_the_bit(dtype):
    config = CONFIGS["llama-3"]
    positions = torch.arange(50)[None]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 50, 8, generator=generator).to(dtype) for heads in (6, 3))
    expected = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(hf_config(config))(q, positions))
    tables = rotary_tables(rotary_of(config), positions, dtype)
    assert all(torch.equal(apply_rotary(x, tables), y) for x, y in zip((q, k), expected, strict=True))


@settings(max_examples=examples(50), deadline=None)
@given(dim=st.integers(1, 8).map(lambda half: 2 * half), tail=st.integers(0, 9), steps=st.integers(1, 6))
def test_partial_rotation_leaves_the_tail_alone(dim, tail, steps):
    rotary = Rotary(dim=dim, base=1e4)
    x = torch.randn(1, 2, steps, dim + tail)
    tables = rotary_tables(rotary, torch.arange(3, 3 + steps)[None], torch.float32)
    turned = apply_rotary(x, tables)
    assert turned.shape == x.shape
    assert torch.equal(turned[..., dim:], x[..., dim:])
    assert torch.equal(turned[..., :dim], apply_rotary(x[..., :dim], tables))
    assert not torch.equal(turned[..., :dim], x[..., :dim])


def test_position_zero_turns_nothing():
    x = torch.randn(1, 2, 1, 8)
    assert torch.equal(apply_rotary(x, rotary_tables(Rotary(dim=8, base=1e4), torch.zeros(1, 1).long(), x.dtype)), x)


def test_scores_depend_on_distance_alone():
    rotary = Rotary(dim=16, base=1e4)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, back: int) -> torch.Tensor:
        turned = (
            apply_rotary(x, rotary_tables(rotary, torch.tensor([[p]]), x.dtype)) for x, p in ((q, at), (k, at - back))
        )
        query, key = turned
        return (query * key).sum()

    torch.testing.assert_close(score(40, 7), score(1234, 7))
    assert abs(score(40, 7) - score(40, 8)) > 1e-6


# --- ALiBi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", range(1, 34))
def test_slopes_are_transformers_to_the_bit(heads):
    mask = torch.ones(1, 2, dtype=torch.long)
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert torch.equal(slopes, bloom_alibi(mask, heads, torch.float32)[:, 0, 1])
    assert torch.equal(slopes.bfloat16(), falcon_alibi(mask, heads, torch.float32)[:, 0, 1].bfloat16())
    assert bool((slopes > 0).all())
    assert bool((slopes <= 1).all())
    assert len(set(slopes.tolist())) == heads


def test_slopes_of_the_paper():
    """Eight heads: 1/2, 1/4, … 1/256."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8, 12])
@pytest.mark.parametrize(
    ("alibi", "theirs"),
    [(ALiBi(), bloom_alibi), (ALiBi(scaled=True, rounding="bfloat16"), falcon_alibi)],
    ids=["bloom", "falcon"],
)
def test_biases_are_transformers_to_the_bit(alibi, theirs, heads, dtype):
    bias = alibi_bias(alibi, heads, PADDED, dtype)
    assert bias.shape == (3, heads, 1, 6)
    assert bias.dtype == dtype
    assert torch.equal(bias.reshape(3 * heads, 1, 6), theirs(PADDED, heads, dtype))


def test_left_padding_shifts_no_bias():
    bias = alibi_bias(ALiBi(), 4, PADDED, torch.float32)
    assert torch.equal(bias[1, ..., 2:], bias[0, ..., :4])
