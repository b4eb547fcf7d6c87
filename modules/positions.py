"""Positions: rotary tables and rotation, sinusoids, ALiBi biases, and biases by distance.

In fp32, rotary frequencies have the same bits as in transformers' modeling_rope_utils.py, and operations have the same
order. In an fp64 model, frequencies are computed in fp64.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..components import (
    ALiBi,
    Buckets,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rotary,
    SinusoidalPositions,
    YarnScaling,
)
from .registry import computes


class RotaryTables(NamedTuple):
    """The tables by which RoPE rotates queries and keys.

    `adjacent` is true if `components.Rotary.pairs` is "adjacent". `joined` and `lie` are fields of `Rotary`.
    """

    cos: Tensor
    """(1 or B, 1, T, dim), in the model's dtype, or wider if `components.Rotary.rounding` says so."""
    sin: Tensor
    """Like cos. It is negative for the first element of a pair, where rotation subtracts."""
    adjacent: bool
    joined: bool
    lie: Literal["by head", "by token"] = "by head"
    complex: Tensor | None = None
    """cos + i·sin, (1 or B, 1, T, dim / 2), if adjacent elements are rotated as complex numbers."""


def rotary_tables(rotary: Rotary, position_ids: Tensor, dtype: torch.dtype) -> RotaryTables:
    """Return RoPE's tables for position ids (1 or B, T) in a model of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    by_length = isinstance(rotary.scaling, DynamicScaling | LongRopeScaling)
    length = position_ids.max() + 1 if by_length else None
    inv_freq = _frequencies_on(position_ids.device, rotary, length, wide)
    angles = position_ids[..., None].to(wide) * inv_freq  # (B, T, dim/2)
    angles = -angles if rotary.direction == "backward" else angles
    factor = getattr(rotary.scaling, "attention_factor", 1.0)
    cos, sin = ((table * factor)[:, None] for table in (angles.cos(), angles.sin()))
    turns = None
    if rotary.rounding == "complex" and rotary.pairs == "adjacent":
        turns = (torch.polar(torch.ones_like(angles), angles) * factor)[:, None]
    elif rotary.rounding in ("input", "tables"):
        cos, sin = cos.to(dtype), sin.to(dtype)
    if rotary.rounding == "tables":
        cos, sin = cos.to(wide), sin.to(wide)
    if rotary.pairs == "adjacent":
        turning = torch.stack((-sin, sin), dim=-1).flatten(-2)
        return RotaryTables(cos.repeat_interleave(2, dim=-1), turning, True, rotary.joined, rotary.lie, turns)
    both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return RotaryTables(*both, False, rotary.joined, rotary.lie)


def inverse_frequencies(rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return RoPE's frequencies, (dim/2,): the angle per position for every pair of elements.

    `length` is the number of tokens of the text, on which some scalings depend.
    """
    dim, base, scaling, divisor = rotary.dim, rotary.base, rotary.scaling, rotary.exponent
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / divisor
    match scaling:
        case None:
            return 1.0 / (base**exponents)
        case LinearScaling():
            return 1.0 / (base**exponents) / scaling.factor
        case DynamicScaling():
            original = scaling.original_context
            if length <= original:
                return 1.0 / (base**exponents)
            return _dynamic(scaling, torch.tensor(length, device=device), base, exponents, divisor)
        case Llama3Scaling():
            return _llama3(scaling, 1.0 / (base**exponents))
        case YarnScaling():
            return _yarn(scaling, dim, base, base**exponents)
        case ProportionalScaling():
            standing = exponents.new_zeros(dim // 2 - scaling.turning)
            return torch.cat((1.0 / (base ** exponents[: scaling.turning]), standing)) / scaling.factor
        case LongRopeScaling():
            factors = scaling.long_factor if length > scaling.original_context else scaling.short_factor
            return 1.0 / (torch.tensor(factors, dtype=dtype, device=device) * base**exponents)


def _frequencies_on(device: torch.device, rotary: Rotary, length: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the frequencies on a device.

    As in transformers, they are computed on the CPU and copied once, because a GPU rounds some powers differently, and
    this difference is multiplied by the position. In two cases they are computed on the device instead:

    - if the length of the text changes the frequencies (some RoPE scalings), because transformers does so;
    - in a compiled graph, which can neither use the stored copy nor copy from the CPU.

    `length` is the number of tokens of the text, a tensor () on the device, for scalings that depend on it. The host
    does not read it: it would wait for the device, and a CUDA graph could not be recorded.
    """
    scaling, compiles = rotary.scaling, torch.compiler.is_compiling()
    stored = not compiles and (device.type != "cpu" or isinstance(scaling, LongRopeScaling))
    within = _copied_frequencies(device, rotary, dtype) if stored else inverse_frequencies(rotary, 1, dtype, device)
    if length is None or not isinstance(scaling, DynamicScaling | LongRopeScaling):
        return within
    if isinstance(scaling, DynamicScaling):
        exponents = torch.arange(0, rotary.dim, 2, dtype=torch.int64, device=device).to(dtype) / rotary.exponent
        beyond = _dynamic(scaling, length, rotary.base, exponents, rotary.exponent)
    elif compiles:
        beyond = inverse_frequencies(rotary, scaling.original_context + 1, dtype, device)
    else:
        beyond = _long_frequencies(device, rotary, scaling.original_context + 1, dtype)
    return torch.where(length > scaling.original_context, beyond, within)


@lru_cache(maxsize=256)
def _copied_frequencies(device: torch.device, rotary: Rotary, dtype: torch.dtype) -> Tensor:
    # Not an inference tensor, even if the first pass generates: a later pass may need gradients.
    with torch.inference_mode(False), torch.no_grad():
        return inverse_frequencies(rotary, 1, dtype).to(device)


@lru_cache(maxsize=256)
def _long_frequencies(device: torch.device, rotary: Rotary, length: int, dtype: torch.dtype) -> Tensor:
    """Return LongRoPE's frequencies for texts of `length` tokens, longer than its original context."""
    with torch.inference_mode(False), torch.no_grad():
        return inverse_frequencies(rotary, length, dtype, device)


def _dynamic(scaling: DynamicScaling, tokens: Tensor, base: float, exponents: Tensor, divisor: float) -> Tensor:
    """Return the frequencies of a text with `tokens` tokens, a tensor (), which are more than the original context."""
    growth = (scaling.factor * tokens / scaling.original_context) - (scaling.factor - 1)
    grown = base * growth.to(exponents.dtype) ** (divisor / (divisor - 2))
    return torch.as_tensor(1.0 / (grown**exponents))


def _llama3(scaling: Llama3Scaling, inv_freq: Tensor) -> Tensor:
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    wavelength = 2 * math.pi / inv_freq
    slow, fast = wavelength > context / low, wavelength < context / high
    scaled = torch.where(slow, inv_freq / scaling.factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return torch.where(~slow & ~fast, between, scaled)


def _yarn(scaling: YarnScaling, dim: int, base: float, pair_periods: Tensor) -> Tensor:
    def pair_of(rotations: float) -> float:
        """Return the index of the pair that makes `rotations` full turns within the original context, as a float."""
        return (dim * math.log(scaling.original_context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=pair_periods.dtype, device=pair_periods.device)
    keep = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    return 1.0 / (scaling.factor * pair_periods) * (1 - keep) + 1.0 / pair_periods * keep


def apply_rotary(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the first dim elements of every head of x (B, H, T, head_dim)."""
    cos, sin, adjacent, joined, lie, turns = tables
    dim, head_dim = cos.shape[-1], x.shape[-1]
    turned = x if dim == head_dim else x[..., :dim]
    if turns is not None:
        pairs = torch.unflatten(turned.to(cos.dtype), -1, (-1, 2))
        # A view of complex numbers needs even strides and an even offset.
        if any(step % 2 for step in (pairs.storage_offset(), *pairs.stride()[:-1])):
            pairs = pairs.clone(memory_format=torch.contiguous_format)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2).to(x.dtype)
        return turned if dim == head_dim else torch.cat((turned, x[..., dim:]), dim=-1)
    # The other element of every element's pair.
    other = torch.unflatten(turned, -1, (-1, 2)).flip(-1).flatten(-2) if adjacent else turned.roll(dim // 2, dims=-1)
    if cos.dtype == x.dtype:  # in place on the copies from above: the same rounding, but two tensors fewer
        turned = (turned * cos).add_(other.mul_(sin))
    else:
        turned = (turned * cos).add_(other * sin).to(x.dtype)
    if dim == head_dim and not joined:
        return turned
    parts = turned, x[..., dim:]
    if lie == "by head":
        return torch.cat(parts, dim=-1)
    return torch.cat([part.transpose(1, 2) for part in parts], dim=-1).transpose(1, 2)


@computes(Rotary)
class RotaryTurn:
    """The functions that compute RoPE (`components.Rotary`): its cos and sin tables, and the rotation by them.

    All layers of a forward pass share the tables.
    """

    tables = staticmethod(rotary_tables)
    turn = staticmethod(apply_rotary)
    frequencies = staticmethod(inverse_frequencies)


def sinusoids(spec: SinusoidalPositions, positions: Tensor) -> Tensor:
    """Return the sinusoidal embedding (…, size) of positions (…), in fp32 like transformers' tables."""
    half, device = spec.size // 2, positions.device
    if spec.ends == "both":  # as in XGLM
        steps = torch.arange(half, dtype=torch.int64, device=device).float()
        angles = positions.float()[..., None] * torch.exp(steps * -(math.log(10000) / (half - 1)))
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
    if spec.made == "float64":  # as in Marian, whose table is computed by numpy
        rates = torch.pow(10000.0, torch.arange(0, spec.size, 2, dtype=torch.float64, device=device) / spec.size)
        angles = positions.double()[..., None] / rates
        return torch.cat((angles.sin(), angles.cos()), dim=-1).float()
    # As in CTRL, with every rate twice: torch rounds a number differently at another place of a vector.
    steps = torch.arange(spec.size, dtype=torch.int64, device=device).float()
    angles = positions.float()[..., None] * (1 / torch.pow(10000, (2 * (steps // 2)) / spec.size))
    return torch.cat((angles[..., 0::2].sin(), angles[..., 1::2].cos()), dim=-1)


def alibi_slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Return one slope per head (heads,) in fp32.

    For n heads, with n a power of two, slope i is 2^(-8i/n). For other numbers of heads, n is the next smaller power of
    two, and the remaining heads have every second slope of 2n heads. The order is that of the paper and of
    transformers' `_get_alibi_slopes`. MPT has another order.
    """

    def powers(base_heads: int, exponents: range) -> Tensor:
        base = torch.full((), 2 ** (-(2 ** -(math.log2(base_heads) - 3))), device=device, dtype=torch.float32)
        # Not torch.tensor, which copies from the host. A CUDA graph cannot record that.
        steps = torch.arange(exponents.start, exponents.stop, exponents.step, device=device, dtype=torch.int32)
        return torch.pow(base, steps)

    whole = 2 ** math.floor(math.log2(heads))
    slopes = powers(whole, range(1, 1 + whole))
    if whole != heads:
        slopes = torch.cat([slopes, powers(2 * whole, range(1, 1 + 2 * (heads - whole), 2))])
    return slopes


def alibi_bias(alibi: ALiBi, heads: int, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias (B, heads, 1, S) that is added to the scores of keys. `key_mask` (B, S) is 1 at real tokens.

    The bias is the slope times the key's position, counted without padding. This has the same effect as a bias by
    distance, because the two differ by a constant per query, which does not change the softmax.
    """
    slopes = alibi_slopes(heads, key_mask.device)
    if alibi.apart:  # as transformers' build_mpt_alibi_tensor
        keys = key_mask.shape[-1]
        whole = 2 ** math.ceil(math.log2(heads))
        powers = torch.arange(1, whole + 1, device=key_mask.device).float() * (8 / whole)
        slopes = 1.0 / torch.pow(2, powers)
        slopes = slopes if whole == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]
        back = torch.arange(1 - keys, 1, dtype=torch.int32, device=key_mask.device)
        bias = (back * slopes[:, None])[None, :, None, :].expand(len(key_mask), -1, -1, -1)
        return bias.to(torch.promote_types(dtype, torch.float32))
    if alibi.rounding == "bfloat16":
        slopes = slopes.bfloat16()
    positions = ((key_mask.cumsum(dim=-1) - 1) * key_mask)[:, None, :]  # (B, 1, S)
    return (slopes[..., None] * positions)[:, :, None, :].to(dtype)


@computes(Buckets)
class _BucketBias:
    """The function that computes T5's bias of attention scores (`components.Buckets`).

    The bias is looked up by distance in a table (buckets, heads).
    """

    @staticmethod
    def looked_up(spec: Buckets, table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias (1, heads, T, S) of queries and keys at the positions (T,) and (S,), as T5 computes it."""
        off = keys[None, :] - queries[:, None]
        count, first = spec.buckets, torch.zeros_like(off)
        if spec.both:
            count //= 2
            first = (off > 0).long() * count
        off = off.abs() if spec.both else -torch.min(off, torch.zeros_like(off))
        exact = count // 2
        far = torch.log(off.float() / exact) / math.log(spec.furthest / exact) * (count - exact)
        far = torch.min(exact + far.to(torch.long), torch.full_like(off, count - 1))
        rows = first + torch.where(off < exact, off, far)
        return F.embedding(rows, table).permute(2, 0, 1)[None].contiguous()


@computes(ALiBi)
class _AlibiBias:
    """The function that computes ALiBi's bias of attention scores (`components.ALiBi`)."""

    bias = staticmethod(alibi_bias)
