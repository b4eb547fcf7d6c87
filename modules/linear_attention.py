"""Linear attention: in chunks what is read at once, else token by token."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import LinearAttention, Turning
from .attention import turned
from .context import Context
from .layers import LinearModule
from .registry import build_module, computes
from .scan import State, made_again, real

_CHUNK = 128


@computes(LinearAttention)
class LinearAttentionModule(nn.Module):
    """See `components.LinearAttention`."""

    def __init__(self, spec: LinearAttention, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.spec = spec
        hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj, self.k_proj, self.v_proj = (LinearModule(hidden, size, spec.qkv_bias) for size in (q, kv, kv))
        self.gate_proj = LinearModule(hidden, spec.kv_heads, True)
        self.o_proj = LinearModule(q, hidden, spec.output_bias)
        self.q_norm = build_module(spec.q_norm) if spec.q_norm else None
        self.k_norm = build_module(spec.k_norm) if spec.k_norm else None

    @staticmethod
    def cache(spec: LinearAttention) -> State:  # noqa: ARG004
        """What a decode keeps of earlier tokens."""
        return State()

    def projected(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (B, H, T, d), keys and values (B, KV, T, d), gates (B, T, KV), and (B, 1, T) which tokens are no
        padding, 1 where they are none; None where none is padding.
        """
        spec = self.spec
        q, k, v = (
            torch.unflatten(each(x), -1, (-1, spec.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (each if norm is None else norm(each) for each, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if isinstance(spec.position, Turning):
            q, k = turned(spec.position, q, k, context.tables(spec.position))
        mask = context.attention_mask if context.padded else None
        return q, k, v, self.gate_proj(x), None if mask is None else mask[:, None, -x.shape[1] :]

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        before = None if cache is None else cache.state
        read = _token if before is not None and x.shape[1] == 1 else _chunks
        y, state = made_again(partial(read, self.spec.scale), *self.projected(real(x, context), context), before)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj(y.flatten(2))
        return out


def widened(
    scale: float, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, there: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of what is projected, in fp32 at least: queries times the scale, keys, values with a 1 behind them (B, KV, T, d +
    1), and g (B, KV, T). Of padding values and g are 0, so that it leaves a state as it is.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    v, g = F.pad(v.to(wide), (0, 1), value=1.0), -F.softplus(gate.to(wide)).transpose(1, 2)
    if there is not None:
        v, g = v * there[..., None], g * there
    return q.to(wide) * scale, k.to(wide), v, g


def mean(y: Tensor) -> Tensor:
    """Sums of weighted values over those of the weights, which are last: 0 where there is none, as before all text."""
    return y[..., :-1] / y[..., -1:].clamp_min(torch.finfo(y.dtype).tiny)


def pairs(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The weights (B, H, T, T) of tokens with one another."""
    q = torch.unflatten(q, 1, (k.shape[1], -1))  # (B, KV, group, T, d)
    s = q @ k[:, :, None].transpose(-1, -2)
    g = g.cumsum(dim=-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    decayed = (g[..., :, None] - g[..., None, :]).masked_fill(later, float("-inf")).exp()
    return (torch.addcmul(1 + s, s, s, value=0.5) * decayed[:, :, None]).flatten(1, 2)


def _features(x: Tensor) -> Tensor:
    """1, x and the products of two of its elements: φ(q)·φ(k) = 1 + q·k + (q·k)²/2."""
    one, other = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    # Each product of two elements stands for two in the square, and that of one with itself for one.
    factor = torch.where(one == other, x.new_tensor(0.5).sqrt(), x.new_ones(()))
    return torch.cat((torch.ones_like(x[..., :1]), x, x[..., one] * x[..., other] * factor), dim=-1)


def _said(q: Tensor, state: Tensor) -> Tensor:
    """What a state (B, KV, features, d + 1) says to queries (B, H, T, d): (B, H, T, d + 1)."""
    asked = torch.unflatten(_features(q), 1, (state.shape[1], -1))
    return (asked @ state[:, :, None]).flatten(1, 2)


def _token(scale: float, *given: Tensor) -> tuple[Tensor, Tensor]:
    """What heads give for one token, (B, 1, H, d), and the state that it leaves."""
    *projected, state = given
    q, k, v, g = widened(scale, *projected)
    state = state * g.exp()[..., None] + _features(k).transpose(-1, -2) @ v
    return mean(_said(q, state)).transpose(1, 2).to(given[2].dtype), state


def _chunks(scale: float, *given: Any) -> tuple[Tensor, Tensor]:
    """What heads give for many tokens, (B, T, H, d), and the state that they leave: in chunks, within which the weights
    of tokens are written out.
    """
    *projected, state = given
    q, k, v, g = widened(scale, *projected)
    steps, group = q.shape[2], q.shape[1] // k.shape[1]
    padding = -steps % _CHUNK
    q, k, v = (F.pad(each, (0, 0, 0, padding)) for each in (q, k, v))
    g, found = F.pad(g, (0, padding)), []
    for start in range(0, steps, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        asked, key, value, own = q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], g[:, :, chunk]
        weights = torch.unflatten(pairs(asked, key, own), 1, (-1, group))
        y = (weights @ value[:, :, None]).flatten(1, 2)
        del weights
        gone = own.cumsum(dim=-1)
        if state is not None:
            y = y + _said(asked, state) * gone.exp().repeat_interleave(group, dim=1)[..., None]
        brought = (_features(key) * (gone[..., -1:] - gone).exp()[..., None]).transpose(-1, -2) @ value
        state = brought if state is None else state * gone[..., -1:, None].exp() + brought
        found.append(mean(y))
    y = torch.cat(found, dim=2)[:, :, :steps].transpose(1, 2)
    return y.to(given[2].dtype, memory_format=torch.contiguous_format), state
