"""Linear attention: a prompt is computed in chunks, and decoded tokens one by one."""

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
from .scan import State, real, recomputed

_CHUNK = 128


@computes(LinearAttention)
class LinearAttentionModule(nn.Module):
    """The torch module of `components.LinearAttention`."""

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
        """Return an empty cache for one layer."""
        return State()

    def projected(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries (B, H, T, d), keys and values (B, KV, T, d), gates (B, T, KV), and a mask (B, 1, T).

        The mask is 1 at real tokens and 0 at padding, or None if there is no padding.
        """
        spec = self.spec
        q, k, v = (
            torch.unflatten(linear(x), -1, (-1, spec.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (vectors if norm is None else norm(vectors) for vectors, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k, v = (vectors.transpose(1, 2) for vectors in (q, k, v))
        if isinstance(spec.position, Turning):
            q, k = turned(spec.position, q, k, context.tables(spec.position))
        mask = context.attention_mask if context.padded else None
        return q, k, v, self.gate_proj(x), None if mask is None else mask[:, None, -x.shape[1] :]

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        before = None if cache is None else cache.state
        read = _token if before is not None and x.shape[1] == 1 else _chunks
        y, state = recomputed(partial(read, self.spec.scale), *self.projected(real(x, context), context), before)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj(y.flatten(2))
        return out


def widened(
    scale: float, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scaled queries, keys, values with a 1 appended (B, KV, T, d + 1), and log decays g (B, KV, T).

    The appended 1 makes the last element of a weighted sum the sum of the weights; see `mean`. All results are in fp32
    or wider. Values and g are 0 at padding tokens, so that these do not change the state.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    v, g = F.pad(v.to(wide), (0, 1), value=1.0), -F.softplus(gate.to(wide)).transpose(1, 2)
    if mask is not None:
        v, g = v * mask[..., None], g * mask
    return q.to(wide) * scale, k.to(wide), v, g


def mean(y: Tensor) -> Tensor:
    """Return weighted means of values from weighted sums (…, d + 1), whose last element is the sum of the weights.

    If a sum includes no token, the mean is 0.
    """
    return y[..., :-1] / y[..., -1:].clamp_min(torch.finfo(y.dtype).tiny)


def pairs(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return the attention weights (B, H, T, T) of all keys for every query, with decay. They are 0 for later keys."""
    q = torch.unflatten(q, 1, (k.shape[1], -1))  # (B, KV, group, T, d)
    s = q @ k[:, :, None].transpose(-1, -2)
    g = g.cumsum(dim=-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    decayed = (g[..., :, None] - g[..., None, :]).masked_fill(later, float("-inf")).exp()
    return (torch.addcmul(1 + s, s, s, value=0.5) * decayed[:, :, None]).flatten(1, 2)


def _features(x: Tensor) -> Tensor:
    """Return the features φ(x): 1, x, and the products of any two elements of x.

    They are scaled so that φ(q)·φ(k) = 1 + q·k + (q·k)²/2.
    """
    one, other = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    # The square has the product of two different elements twice, and the square of an element once.
    factor = torch.where(one == other, x.new_full((), 0.5).sqrt(), x.new_ones(()))
    return torch.cat((torch.ones_like(x[..., :1]), x, x[..., one] * x[..., other] * factor), dim=-1)


def _read_state(q: Tensor, state: Tensor) -> Tensor:
    """Return φ(q) times the state, (B, H, T, d + 1), for queries (B, H, T, d) and a state (B, KV, features, d + 1)."""
    asked = torch.unflatten(_features(q), 1, (state.shape[1], -1))
    return (asked @ state[:, :, None]).flatten(1, 2)


def _token(scale: float, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the heads for one token, (B, 1, H, d), and the new state of the recurrence.

    `given` are the results of `projected`, followed by the state before the token.
    """
    *projected, state = given
    q, k, v, g = widened(scale, *projected)
    state = state * g.exp()[..., None] + _features(k).transpose(-1, -2) @ v
    return mean(_read_state(q, state)).transpose(1, 2).to(given[2].dtype), state


def _chunks(scale: float, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of the heads for many tokens, (B, T, H, d), and the new state.

    Within a chunk, the attention weights of all pairs of tokens are computed. The state replaces all earlier chunks.
    `given` are the results of `projected`, followed by the state before the first token, or None.
    """
    *projected, state = given
    q, k, v, g = widened(scale, *projected)
    steps, group = q.shape[2], q.shape[1] // k.shape[1]
    padding = -steps % _CHUNK
    q, k, v = (F.pad(tensor, (0, 0, 0, padding)) for tensor in (q, k, v))
    g, outputs = F.pad(g, (0, padding)), []
    for start in range(0, steps, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        query, key, value, own = q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], g[:, :, chunk]
        weights = torch.unflatten(pairs(query, key, own), 1, (-1, group))
        y = (weights @ value[:, :, None]).flatten(1, 2)
        del weights
        so_far = own.cumsum(dim=-1)
        if state is not None:
            y = y + _read_state(query, state) * so_far.exp().repeat_interleave(group, dim=1)[..., None]
        added = (_features(key) * (so_far[..., -1:] - so_far).exp()[..., None]).transpose(-1, -2) @ value
        state = added if state is None else state * so_far[..., -1:, None].exp() + added
        outputs.append(mean(y))
    y = torch.cat(outputs, dim=2)[:, :, :steps].transpose(1, 2)
    return y.to(given[2].dtype, memory_format=torch.contiguous_format), state
