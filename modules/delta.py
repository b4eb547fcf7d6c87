"""Gated DeltaNet, as in transformers' torch code: a prompt is computed in chunks, decoded tokens one by one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import GatedDeltaNet
from .context import Context
from .layers import VECTOR, FusedLinears, LinearModule, activation_of
from .registry import build_module, computes
from .scan import State, convolved, real, recomputed
from .short_convolution import Kernels

_CHUNK = 64
_EPS = 1e-6  # added to the squared lengths of queries and keys
_ANY = 2**40  # bytes, more than any row has, so that the fused matrix is always ordered by head


@computes(GatedDeltaNet)
class _GatedDeltaNetModule(nn.Module):
    """The torch module of `components.GatedDeltaNet`."""

    def __init__(self, spec: GatedDeltaNet, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.spec = spec
        rows = {"q": spec.keys, "k": spec.keys, "v": spec.values}
        for name, size in rows.items():
            self.add_module(f"{name}_proj", LinearModule(spec.hidden_size, size, False))
            self.add_module(f"{name}_conv", Kernels(size, spec.kernel))
        self.gate_proj = LinearModule(spec.hidden_size, spec.values, False)
        self.beta_proj = LinearModule(spec.hidden_size, spec.heads, False)
        self.decay_proj = LinearModule(spec.hidden_size, spec.heads, False)
        by_head = spec.fused == "by head"
        line = _ANY if spec.group == 1 else VECTOR
        self.fused = FusedLinears(spec.key_heads, line) if by_head else FusedLinears()
        self.numbers = FusedLinears(spec.key_heads, line) if by_head else None
        self.activation = activation_of(spec.activation)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(2))
        self.norm = build_module(spec.norm)
        self.o_proj = LinearModule(spec.values, spec.hidden_size, False)

    @staticmethod
    def cache(spec: GatedDeltaNet) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Return the projections of the input: queries, keys, values, gates, β and decays.

        They are (B, T, size). Gates may be (B, T, key heads, size / key heads).
        """
        qkv = [getattr(self, f"{name}_proj") for name in "qkv"]
        if self.numbers is not None:
            parts = [*self.fused((*qkv, self.gate_proj), x), *self.numbers((self.beta_proj, self.decay_proj), x)]
            parts[3:] = map(self._as_reshaped, parts[3:])
        else:
            parts = [*self.fused(qkv, x), *(linear(x) for linear in (self.gate_proj, self.beta_proj, self.decay_proj))]
        q, k, v, gate, *numbers = parts
        return [*(part.flatten(2) for part in (q, k, v)), gate, *(part.flatten(2) for part in numbers)]

    def _as_reshaped(self, part: Tensor) -> Tensor:
        """Return a part of the fused product with the memory layout that transformers' reshape gives it.

        This is a strided view if there is one value head per key head, and otherwise a copy. The layout matters
        because torch rounds the last elements of strided rows differently.
        """
        heads = self.spec.key_heads
        if heads == 1 or self.spec.group == 1:
            return part
        return (part if part.dim() == 4 else torch.unflatten(part, -1, (heads, -1))).contiguous()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        spec = self.spec
        q, k, v, gate, beta, decay = self._projected(real(x, context))
        kernels = torch.cat([getattr(self, f"{name}_conv").weight for name in "qkv"])
        mixed = convolved(torch.cat((q, k, v), dim=-1).transpose(1, 2), kernels, None, cache, self.activation)
        q, k, v = torch.split(mixed.transpose(1, 2), [spec.keys, spec.keys, spec.values], dim=-1)
        q, k = (torch.unflatten(part, -1, (-1, spec.key_dim)) for part in (q, k))
        v = torch.unflatten(v, -1, (-1, spec.value_dim))
        before = None if cache is None else cache.state
        read = _token if before is not None and x.shape[1] == 1 else _chunks
        y, state = recomputed(read, q, k, v, beta, decay, self.A_log, self.dt_bias, before)
        if cache is not None:
            cache.state = state
        y = self.norm(y.reshape(-1, spec.value_dim))
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = (y * F.silu(gate.reshape(y.shape).to(wide))).to(y.dtype)
        out: Tensor = self.o_proj(gated.reshape(*x.shape[:2], -1))
        return out


def _wide(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, rates: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the recurrence in fp32 or wider: q, k, v, β and g; see `components.GatedDeltaNet`.

    Queries and keys have length 1, and values are unchanged; all are (B, H, T, d). β and g are (B, H, T).

    Args:
        q: queries, (B, T, key heads, key_dim).
        k: keys, in the same shape.
        v: values, (B, T, H, value_dim).
        beta: the logits of β, (B, T, H).
        decay: the output of decay_proj, (B, T, H).
        rates: the parameter A_log, (H,).
        shift: the parameter dt_bias, (H,).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    g = -rates.to(wide).exp() * F.softplus(decay.to(wide) + shift)
    group = v.shape[2] // k.shape[2]
    if group > 1:
        q, k = (tensor.repeat_interleave(group, dim=2) for tensor in (q, k))
    q, k, v, beta, g = (
        tensor.transpose(1, 2).to(wide, memory_format=torch.contiguous_format)
        for tensor in (q, k, v, beta.sigmoid(), g)
    )
    q, k = (vector * torch.rsqrt((vector * vector).sum(dim=-1, keepdim=True) + _EPS) for vector in (q, k))
    return q, k, v, beta, g


def _token(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output y (B, 1, H, value_dim) for one token, and the new state of the recurrence.

    `inputs` are the arguments of `_wide`, followed by the state before the token.
    """
    *given, state = inputs
    q, k, v, beta, g = (tensor[:, :, 0] for tensor in _wide(*given))
    q = q / q.shape[-1] ** 0.5
    state = state * g.exp()[..., None, None]
    lacking = (v - (state * k[..., None]).sum(dim=-2)) * beta[..., None]
    state = state + k[..., None] * lacking[..., None, :]
    y = (state * q[..., None]).sum(dim=-2)
    return y[:, None].to(given[0].dtype), state


def _chunks(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output y (B, T, H, value_dim) for many tokens, and the new state of the recurrence.

    A token's update of the state depends on the updates before it. Within a chunk of tokens, all updates are the
    solution of one triangular system (Yang et al. 2406.06484). `inputs` are the arguments of `_wide`, followed by the
    state before the first token, or None at the beginning of a text.
    """
    *given, state = inputs
    q, k, v, beta, g = _wide(*given)
    q = q * q.shape[-1] ** -0.5
    batch, heads, steps, _ = v.shape
    padding = -steps % _CHUNK
    q, k, v = (F.pad(tensor, (0, 0, 0, padding)) for tensor in (q, k, v))
    beta, g = (F.pad(tensor, (0, padding)) for tensor in (beta, g))
    v, corrected = v * beta[..., None], k * beta[..., None]
    q, k, v, corrected = (torch.unflatten(tensor, 2, (-1, _CHUNK)) for tensor in (q, k, v, corrected))
    g = torch.unflatten(g, 2, (-1, _CHUNK)).cumsum(dim=3)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decayed = (g[..., :, None] - g[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = (corrected @ k.transpose(-1, -2)) * decayed
    within = (q @ k.transpose(-1, -2)) * decayed
    del decayed, later
    solved: Any = torch.linalg.solve_triangular
    values = solved(system, v, upper=False, unitriangular=True)
    if state is None and v.shape[-1] == 1:  # the strides of values - keys @ state then equal transformers'
        state = v.new_zeros(batch, heads, k.shape[-1], 1)
    first = 1 if state is None else 0  # the first chunk that has a state before it
    keys = corrected[:, :, first:] * g[:, :, first:].exp()[..., None]
    # contiguous: a strided batch of systems would be solved in another order than in transformers.
    keys = solved(system[:, :, first:].contiguous(), keys, upper=False, unitriangular=True)
    del system, corrected, v
    q = q * g.exp()[..., None]
    k = k * (g[..., -1:] - g).exp()[..., None]
    remaining = g[..., -1].exp()[..., None, None]
    y = torch.zeros_like(values)  # with the strides of the solution, which decide the order of sums in norms
    for chunk in range(values.shape[2]):
        new = values[:, :, chunk]
        if state is None:  # a state of zeros would change nothing
            y[:, :, chunk] = within[:, :, chunk] @ new
            state = k[:, :, chunk].transpose(-1, -2) @ new
            continue
        new = new - keys[:, :, chunk - first] @ state
        y[:, :, chunk] = q[:, :, chunk] @ state + within[:, :, chunk] @ new
        state = state * remaining[:, :, chunk] + k[:, :, chunk].transpose(-1, -2) @ new
    y = y.reshape(batch, heads, -1, y.shape[-1])[:, :, :steps].transpose(1, 2)
    if y.dtype == given[0].dtype and y.is_contiguous():  # one text and one head: a view, which would keep the padding
        # The strides of dimensions of size 1 also decide the order of sums in norms.
        return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device).copy_(y), state
    return y.to(given[0].dtype, memory_format=torch.contiguous_format), state
