"""Self-attention: a module for MHA, GQA and MQA, and one for latent attention (MLA). Both support rotary positions,
ALiBi or no positions, and windows.

`kernel` selects how outputs are computed from scores: "eager" writes the formula out, "sdpa" calls torch's fused
scaled_dot_product_attention (flash attention if the hardware supports it). The two differ in the last bits. Each gives
the same bits as the implementation of this name in transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..components import Attention, Biasing, LatentAttention, Turning
from .cache import CACHE_LINE, LayerCache
from .context import Context
from .layers import FusedLinears, LinearModule, at_least_float32, capped, clipped
from .registry import build_module, computes, module_of


class Mixing:
    """Attention without its projections: softmax(q·kᵀ · scale + mask)·v."""

    def __init__(self, spec: Attention, kernel: Kernel) -> None:
        self.spec = spec
        # An ALiBi bias outside the scale has no fused kernel that rounds like BLOOM's baddbmm (2.7 logits in bf16).
        outside = isinstance(spec.position, Biasing) and not spec.position.fused
        self.viewed = isinstance(spec.position, Biasing) and not spec.position.apart
        # The fused kernel supports neither capped scores nor sinks.
        written = outside or spec.cap is not None or spec.sinks or spec.kernel == "eager"
        self.kernel: Kernel = "eager" if written else kernel
        # With a position bias, `spec.position.scaled` decides where the scale is applied.
        self.scale = spec.scale
        self.early = spec.scaling == "queries" and not isinstance(spec.position, Biasing)
        if self.early:
            self.scale = 1.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context, sinks: Tensor | None = None) -> Tensor:
        """Return the output of attention (B, T, H·e) for q (B, H, T, d), k (B, KV, S, d) and v (B, KV, S, e).

        `sinks` (H,) are the logits of attention sinks, which take weight in the softmax but have no values.
        """
        if self.kernel == "sdpa" or self.spec.scores == "input":
            q = q.to(k.dtype)  # the rotation may have returned q in a wider dtype
        if self.early:
            q = q * self.spec.scale
        mixed = self._sdpa(q, k, v, context) if self.kernel == "sdpa" else self._eager(q, k, v, context, sinks)
        mixed = mixed.transpose(1, 2)
        # With heads of one element the result may be a view, over which a product sums in another order. BLOOM and
        # Falcon use such views in transformers, too.
        return (mixed if self.viewed else mixed.contiguous()).flatten(2)

    def _scaled(self, scores: Tensor) -> Tensor:
        return scores / (1 / self.scale) if self.spec.scaling == "divide" else scores * self.scale

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, context: Context, sinks: Tensor | None) -> Tensor:
        spec, group = self.spec, q.shape[1] // k.shape[1]
        if spec.kv_expansion == "repeat" and group > 1:
            k, v = _repeat_heads(k, group), _repeat_heads(v, group)
        scores = capped(self._scores(q, k, context), spec.cap)
        mask = context.additive_mask(spec.window, spec.cache_window, spec.chunked, spec.causal)  # (B or 1, 1, T, S)
        if mask is not None:
            scores = scores + mask
        wide = scores.dtype if spec.softmax == "input" else torch.promote_types(scores.dtype, torch.float32)
        if sinks is not None and spec.sunk == "behind it":
            share = torch.logsumexp(scores, dim=-1) - sinks[:, None]  # (B, H, T)
            share = share.to(torch.promote_types(share.dtype, torch.float32)).sigmoid()[..., None]
            mixed = F.softmax(scores, dim=-1, dtype=wide).to(v.dtype) @ v
            return mixed * share.to(mixed.dtype)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
            if spec.sunk == "in float32":
                return F.softmax(scores, dim=-1)[..., :-1].to(v.dtype) @ v
            # As in transformers' gpt-oss. Autograd stores one number per row for `max`, and all scores for `amax`.
            scores = scores - scores.max(dim=-1, keepdim=True).values
            return F.softmax(scores, dim=-1, dtype=wide)[..., :-1].to(v.dtype) @ v
        return F.softmax(scores, dim=-1, dtype=wide).to(v.dtype) @ v

    def _scores(self, q: Tensor, k: Tensor, context: Context) -> Tensor:
        """Return the scores q·kᵀ · scale (B, H, T, S), with the position bias if there is one.

        The bias is added before or after scaling (`Biasing.scaled`).
        """
        spec = self.spec
        if isinstance(spec.position, Biasing):
            bias = context.bias(spec.position, spec.heads, spec.cache_window)  # (B, H, 1, S)
            if spec.position.scaled:
                return self._scaled(q @ k.transpose(-1, -2) + bias)
            apart = spec.position.apart
            return self._scaled(q @ k.transpose(-1, -2)) + bias if apart else self._product(q, k, bias)
        if spec.scores.startswith("float32"):
            wide = torch.promote_types(q.dtype, torch.float32)
            q, k = q.to(wide), k.to(wide)
        inside = spec.scores in ("float32", "product")
        return self._product(q, k) if inside else self._scaled(q @ k.transpose(-1, -2))

    def _product(self, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute q·kᵀ · scale + bias in one matrix product, which rounds once."""
        batch, heads, steps, head_dim = q.shape
        keys = k.shape[-2]
        start = q.new_empty(batch * heads, steps, keys) if bias is None else bias.flatten(0, 1)
        return start.baddbmm(
            q.reshape(-1, steps, head_dim),
            k.reshape(-1, keys, head_dim).transpose(-1, -2),
            beta=0 if bias is None else 1,  # with 0, baddbmm does not read the uninitialised tensor
            alpha=self.scale,
        ).view(batch, heads, steps, keys)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        spec, (batch, heads, steps, _) = self.spec, q.shape
        group = heads // k.shape[1]
        mask: Tensor | None
        if isinstance(spec.position, Biasing):
            bias = context.bias(spec.position, heads, spec.cache_window)
            bias = self._scaled(bias) if spec.position.scaled else bias
            allowed = context.allowed(spec.window, spec.cache_window, spec.chunked, spec.causal)
            mask = bias if allowed is None else bias.masked_fill(~allowed, torch.finfo(q.dtype).min)
        else:
            # The kernel's `is_causal` replaces a mask, unless the family's code in transformers always passes one.
            mask = context.sdpa_mask(spec.window, spec.cache_window, spec.chunked, spec.causal)
            if mask is not None and mask.is_floating_point():
                mask = mask.to(q.dtype)
        grouped = False
        if spec.kv_expansion == "repeat" and group > 1:
            if mask is None and q.shape[-1] <= 256:
                grouped = True
            elif steps == 1 and (mask is None or mask.shape[1] == 1):
                # With one query, the heads of a group are rows of one product, and keys need not be copied.
                q = q.reshape(batch, -1, group, q.shape[-1])
            else:
                k, v = _repeat_heads(k, group), _repeat_heads(v, group)
        causal = spec.causal and mask is None and steps > 1
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )
        return out.reshape(batch, heads, steps, v.shape[-1])


@computes(Attention)
class AttentionModule(nn.Module):
    """Multi-head attention: the projections of q, k and v, their mixing, and the output projection."""

    q_proj: LinearModule
    k_proj: LinearModule
    v_proj: LinearModule

    def __init__(self, spec: Attention, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        self.mix = Mixing(spec, kernel)
        self.kernel = self.mix.kernel
        hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        for part in spec.projected:
            width = q if part == "q" else kv
            self.add_module(f"{part}_proj", LinearModule(hidden, width, spec.qkv_bias, spec.arithmetic))
        self.o_proj = LinearModule(q, hidden, spec.output_bias, spec.arithmetic)
        self.fused = FusedLinears(spec.groups) if spec.fused else None
        self.q_norm = build_module(spec.q_norm) if spec.q_norm else None
        self.k_norm = build_module(spec.k_norm) if spec.k_norm else None
        self.v_norm = build_module(spec.v_norm) if spec.v_norm else None
        self.mixed_norm = build_module(spec.mixed_norm) if spec.mixed_norm else None
        self.gate_proj = LinearModule(hidden, q, spec.gate_bias, spec.arithmetic) if spec.gated else None
        self.gate_fused = FusedLinears(spec.heads) if spec.gated and spec.gate == "with queries" else None
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AttentionModule":
        sinks = None if self.sinks is None else self.sinks.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if sinks is not None and self.sinks is not None and self.spec.sunk == "in float32":
            self.sinks = nn.Parameter(at_least_float32(fn)(sinks), self.sinks.requires_grad)
        return self

    @staticmethod
    def cache(spec: Attention) -> LayerCache | None:
        """Return an empty KV cache for one layer, or None if the layer needs none."""
        return LayerCache(spec.cache_window) if spec.causal and spec.kv_from != "earlier" else None

    def _normed(self, parts: dict[str, Tensor], names: str) -> dict[str, Tensor]:
        """Return `parts` with the norms applied to those in `names`. The parts are queries, keys and values.

        A norm applies to every head separately, or to all heads together.

        Args:
            parts: The queries, keys and values under the names "q", "k" and "v".
            names: The names of the parts to normalise, such as "qk".
        """
        normed = dict(parts)
        for name, x in parts.items():
            norm = getattr(self, f"{name}_norm")
            if norm is not None and name in names:
                whole = norm.spec.size != self.spec.head_dim
                normed[name] = norm(x.flatten(-2) if whole else x).reshape(x.shape)
        return normed

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:  # (B, T, hidden)
        spec = self.spec
        heads = (*x.shape[:2], -1, spec.head_dim)
        linears = [getattr(self, f"{part}_proj") for part in spec.projected]
        clip, gate = None if spec.clip_normed else spec.clip, None
        projected: Sequence[Tensor]
        if self.gate_fused is not None and self.gate_proj is not None:
            q, gate = self.gate_fused((linears[0], self.gate_proj), x)
            projected = (q, *(linear(x) for linear in linears[1:]))
            del q
        else:
            projected = self.fused(linears, x, clip) if self.fused else [clipped(linear(x), clip) for linear in linears]
        parts = {name: part.reshape(heads) for name, part in zip(spec.projected, projected, strict=True)}
        if spec.kv_from == "keys":
            parts["v"] = parts["k"]
        if spec.key_multiplier != 1:
            parts["k"] = parts["k"] * spec.key_multiplier
        parts = self._normed(parts, "qkv" if spec.norm_order == "before" else "v")  # (B, T, H, hd)
        if spec.clip_normed:
            parts = {name: clipped(part, spec.clip) for name, part in parts.items()}
        if spec.kv_expansion == "projection" and cache is None:
            parts |= {name: parts[name].repeat_interleave(spec.group, dim=2) for name in "kv"}
        parts = {name: part.transpose(1, 2) for name, part in parts.items()}  # (B, H, T, hd)
        if isinstance(spec.position, Turning):
            tables, own = context.tables(spec.position), "k" in parts
            q, k = parts.pop("q"), parts.pop("k", None)
            q, k = turned(spec.position, q, q[:, :0] if k is None else k, tables)
            parts |= {"q": q, "k": k} if own else {"q": q}
            del q, k  # else these names would keep the memory alive
        if spec.norm_order == "after":
            parts = self._normed(parts, "qk")
        if spec.temperature is not None:
            parts["q"] = context.tempered(spec.temperature, parts["q"])
        own = spec.kv_from != "earlier"
        k, v = self._with_cached(parts.pop("k"), parts.pop("v"), cache) if own else context.earlier(spec)
        if own and spec.kv_signature in context.shared:
            context.shared[spec.kv_signature] = k, v
        mixed = self.mix(parts["q"], k, v, context, self.sinks)
        mixed = mixed if self.mixed_norm is None else self.mixed_norm(mixed)
        if self.gate_proj is not None:
            gate = self.gate_proj(x) if gate is None else gate.reshape(mixed.shape)
            # Torch rounds the last elements of strided rows differently. With one head, transformers' rows are strided.
            gate = torch.sigmoid(gate if spec.heads == 1 else gate.contiguous())
            mixed = mixed * gate
        out: Tensor = self.o_proj(mixed)
        return out

    def _with_cached(self, k: Tensor, v: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Append keys and values to the cache. Return those of all tokens in the cache, (B, KV, S, hd)."""
        spec = self.spec
        if cache is None:
            # The order of sums follows memory order, and by default transformers multiplies tensors from its cache,
            # which are contiguous. In training there is no copy, since it would take 3 % of a small model's step.
            return (k.contiguous(), v.contiguous()) if spec.lie == "as cached" and not self.training else (k, v)
        k, v = cache.append(k, v)
        if spec.kv_expansion == "projection":
            # Repeating a single key head gives views, but transformers' cache stores all repeated heads.
            k, v = _repeat_heads(k, spec.group).contiguous(), _repeat_heads(v, spec.group).contiguous()
        return k, v


@computes(LatentAttention)
class _LatentAttentionModule(nn.Module):
    """Attention whose keys and values are computed from a latent shared by all heads; see `LatentAttention`."""

    def __init__(self, spec: LatentAttention, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        hidden, rank, arithmetic = spec.hidden_size, spec.kv_rank, spec.arithmetic
        if spec.q_rank is None:
            self.q_proj = LinearModule(hidden, spec.heads * spec.query_dim, spec.qkv_bias, arithmetic)
        else:
            self.q_down_proj = LinearModule(hidden, spec.q_rank, spec.qkv_bias, arithmetic)
            self.q_norm = build_module(spec.q_norm) if spec.q_norm else None
            self.q_up_proj = LinearModule(spec.q_rank, spec.heads * spec.query_dim, False, arithmetic)
        bias = spec.qkv_bias or spec.kv_bias
        self.kv_down_proj = LinearModule(hidden, rank, bias, arithmetic)
        self.kv_norm = build_module(spec.kv_norm) if spec.kv_norm else None
        self.k_rope_proj = LinearModule(hidden, spec.rope_dim, bias, arithmetic) if spec.rope_dim else None
        self.k_up_proj = LinearModule(rank, spec.heads * spec.nope_dim, False, arithmetic) if spec.nope_dim else None
        self.v_up_proj = LinearModule(rank, spec.heads * spec.value_dim, False, arithmetic)
        self.o_proj = LinearModule(spec.heads * spec.value_dim, hidden, spec.output_bias, arithmetic)
        fused = spec.fused and arithmetic != "conv1d"  # Conv1D memory has no groups of rows
        self.down = FusedLinears() if fused and self.k_rope_proj is not None else None
        # Values keep the strides of the fused product, in which products sum by whole cache lines.
        self.up = FusedLinears(spec.heads, CACHE_LINE) if fused and self.k_up_proj is not None else None
        # `mix` is called when every head has its own key and value, with positions applied.
        position = spec.position if isinstance(spec.position, Biasing) else None
        sizes = {"heads": spec.heads, "kv_heads": spec.heads, "head_dim": spec.query_dim, "scale": spec.scale}
        mixed: Any = {"hidden_size": hidden, **sizes, "position": position, "window": spec.window}
        self.mix = Mixing(Attention(**mixed), kernel)
        self.kernel = self.mix.kernel

    @staticmethod
    def cache(spec: LatentAttention) -> LayerCache:
        """Return an empty cache for one layer, which stores rotated keys and latents."""
        return LayerCache(spec.window)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:  # (B, T, hidden)
        spec, heads = self.spec, self.spec.heads
        batch, steps = x.shape[:2]
        latent, rope = self._down(x)  # (B, T, rank), (B, T, R·dim)
        if self.kv_norm is not None:
            latent = self.kv_norm(latent)
        if rope is None:
            rope = x.new_empty(batch, 1, steps, 0)  # a head without elements, so that the cache has both
        else:
            rope = _heads(rope, spec.rope_heads)  # (B, R, T, dim)
        q = _heads(self._queries(x), heads)  # (B, H, T, nope + R·dim)
        if isinstance(spec.position, Turning):
            tables, turn = context.tables(spec.position), module_of(spec.position).turn
            rope = self._gathered(turn(rope, tables))
            turned = q[..., spec.nope_dim :]
            if spec.rope_heads > 1:
                turned = torch.unflatten(turned, -1, (spec.rope_heads, -1)).transpose(2, 3).flatten(1, 2)
            turned = self._gathered(turn(turned, tables))  # (B, H·R, T, dim)
            if spec.rope_heads > 1:
                turned = torch.unflatten(turned, 1, (heads, -1)).transpose(2, 3).flatten(-2)
            q = torch.cat((q[..., : spec.nope_dim], turned), dim=-1)
        if cache is not None:
            rope, latents = cache.append(rope, latent[:, None])
            # (B, S, rank), with the strides of transformers' cache, also for a single row.
            latent = torch.unflatten(latents.reshape(-1), 0, (batch, -1, spec.kv_rank))
        shared = rope.transpose(1, 2).flatten(2)[:, None].expand(-1, heads, -1, -1)  # (B, H, S, R·dim)
        *own, v = self._up(latent)  # all (B, H, S, …)
        k = torch.cat((*own, shared), dim=-1)
        out: Tensor = self.o_proj(self.mix(q, k, v, context))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        """Project the input (B, T, hidden) to queries (B, T, H·query_dim)."""
        if self.spec.q_rank is None:
            return self.q_proj(x)  # type: ignore[no-any-return]
        latent = self.q_down_proj(x)
        return self.q_up_proj(latent if self.q_norm is None else self.q_norm(latent))  # type: ignore[no-any-return]

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project the input to the latent (B, T, rank) and to the part of the keys that RoPE rotates (B, T, R·dim).

        The second result is None if no part of the keys is rotated.
        """
        if self.k_rope_proj is None:
            return self.kv_down_proj(x), None
        linears = (self.kv_down_proj, self.k_rope_proj)
        latent, rope = self.down(linears, x) if self.down else [linear(x) for linear in linears]
        return latent, rope

    def _up(self, latent: Tensor) -> list[Tensor]:
        """Project latents (B, S, rank) up to the unrotated part of the keys, if keys have one, and to the values.

        The results are (B, H, S, …).
        """
        linears = [linear for linear in (self.k_up_proj, self.v_up_proj) if linear is not None]
        parts = self.up(linears, latent) if self.up else [linear(latent) for linear in linears]
        return [part.transpose(1, 2) if part.dim() == 4 else _heads(part, self.spec.heads) for part in parts]

    def _gathered(self, x: Tensor) -> Tensor:
        """Reorder the elements of rotated vectors (…, dim) as the family's code in transformers does.

        With `LatentAttention.gathered`, the first elements of all pairs come before the second ones.
        """
        position = self.spec.position
        if not self.spec.gathered or getattr(position, "pairs", "") != "adjacent":
            return x
        return torch.unflatten(x, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


def turned(position: Any, q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
    """Rotate q (B, H, T, hd) and k (B, KV, T, hd) by their positions.

    Args:
        position: the record of the encoding. If its module has a function `both`, this rotates q and k differently.
        q: the queries.
        k: the keys.
        tables: the result of `Context.tables`, such as cos and sin.
    """
    module = module_of(position)
    if hasattr(module, "both"):
        return module.both(position, q, k, tables)  # type: ignore[no-any-return]
    if getattr(position, "rounding", "") == "keys":
        q = q.to(tables.cos.dtype)
    return module.turn(q, tables), module.turn(k, tables)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Split heads: (B, T, H·d) -> (B, H, T, d)."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat every head `times` times in a row: (B, KV, S, hd) -> (B, KV·times, S, hd)."""
    batch, kv_heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, kv_heads, times, length, head_dim).reshape(batch, -1, length, head_dim)
