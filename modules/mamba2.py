"""Mamba-2, as in transformers' torch code: a prompt is computed in chunks, decoded tokens one by one.

The operations have the order of transformers' `mamba2_chunk_scan` and `mamba2_selective_state_update`, because the
order of sums decides how einsums round.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import Mamba2
from .context import Context
from .layers import FusedLinears, LinearModule, activation_of
from .registry import build_module, computes
from .scan import State, convolved, real, recomputed
from .short_convolution import Kernels

_MIXED = ("x", "b", "c")


@computes(Mamba2)
class _Mamba2Module(nn.Module):
    """The torch module of `components.Mamba2`."""

    def __init__(self, spec: Mamba2, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.spec = spec
        for name, size in spec.widths.items():
            self.add_module(f"{name}_proj", LinearModule(spec.hidden_size, size, spec.bias))
        for name in _MIXED:
            self.add_module(f"{name}_conv", Kernels(spec.widths[name], spec.kernel, spec.conv_bias))
        self.fused = FusedLinears()
        self.activation = activation_of(spec.activation)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(3))
        self.norm = None if spec.norm is None else build_module(spec.norm)
        self.o_proj = LinearModule(spec.inner, spec.hidden_size, spec.output_bias)

    @staticmethod
    def cache(spec: Mamba2) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        spec = self.spec
        projected = self.fused([getattr(self, f"{name}_proj") for name in spec.widths], real(x, context))
        if spec.scaled:  # concatenated again, since torch rounds the last elements of a row differently
            factors = zip(projected, spec.multipliers, strict=True)
            whole = torch.cat([part * part.new_full((), factor) for part, factor in factors], dim=-1)
            projected = torch.split(whole, [*spec.widths.values()], dim=-1)
            del whole
        gate, *parts, dt = projected
        convolutions = [getattr(self, f"{name}_conv") for name in _MIXED]
        kernels = torch.cat([convolution.weight for convolution in convolutions])
        biases = torch.cat([convolution.bias for convolution in convolutions]) if spec.conv_bias else None
        mixed = convolved(torch.cat(parts, dim=-1).transpose(1, 2), kernels, biases, cache, self.activation)
        u, b, c = torch.split(real(mixed.transpose(1, 2), context), [spec.inner, spec.states, spec.states], dim=-1)
        u = torch.unflatten(u, -1, (spec.heads, -1))
        b, c = (torch.unflatten(part, -1, (spec.groups, -1)) for part in (b, c))
        before = None if cache is None else cache.state
        read = _token if before is not None and x.shape[1] == 1 else self._chunks
        y, state = recomputed(read, u, b, c, dt, self.A_log, self.D, self.dt_bias, before)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj(self._gated(y.flatten(2), gate).to(x.dtype))
        return out

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return y · silu(gate). The norm, if there is one, is applied before or after this product."""
        if self.norm is None:
            return y * F.silu(gate)
        wide = torch.promote_types(y.dtype, torch.float32)
        opened = F.silu(gate.to(wide))
        if self.spec.gated == "behind norm":
            return torch.mul(self.norm(y.to(wide)), opened).to(y.dtype)
        normed: Tensor = self.norm(y.to(wide) * opened, y.dtype)
        return normed

    def _chunks(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the output y (B, T, heads, head_dim) for many tokens, in fp32 or wider, and the new state.

        `inputs` are x, B, C, Δ, the parameters A_log, D and the bias of Δ, and the earlier state or None.
        """
        spec = self.spec
        x, b, c, dt, rates, skip, shift, state = inputs
        batch, steps, heads, _ = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = torch.clamp(F.softplus(dt + shift.to(dt.dtype)), min=spec.least, max=spec.most)
        x = x.to(wide)
        b, c = (tensor.to(wide).repeat_interleave(heads // b.shape[2], dim=2) for tensor in (b, c))
        padding = -steps % spec.chunk

        def chunks(tensor: Tensor) -> Tensor:
            padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, padding))
            return torch.unflatten(padded, 1, (-1, spec.chunk))

        skipped = skip[..., None] * F.pad(x, (0, 0, 0, 0, 0, padding))
        decay = -rates.to(wide).exp() * dt.to(wide)
        x, decay, b, c = (chunks(tensor) for tensor in (x * dt[..., None].to(wide), decay, b, c))
        decay = decay.permute(0, 3, 1, 2)
        so_far = decay.cumsum(dim=-1)
        scores = torch.einsum("bclhn,bcshn->bclsh", c, b) * _sums(decay).exp().permute(0, 2, 3, 4, 1)
        within = torch.einsum("bclsh,bcshp->bclhp", scores, x)
        del scores
        remaining = (so_far[:, :, :, -1:] - so_far).exp()
        added = torch.einsum("bclhn,bclhp->bchpn", b * remaining.permute(0, 2, 3, 1)[..., None], x)
        first = torch.zeros_like(added[:, :1]) if state is None else state[:, None].to(wide)
        states = torch.cat([first, added], dim=1)
        decays = _sums(F.pad(so_far[:, :, :, -1], (1, 0))).exp().transpose(1, 3)
        states = torch.einsum("bzch,bzhpn->bchpn", decays, states)
        states, state = states[:, :-1], states[:, -1]
        earlier = torch.einsum("bclhn,bchpn->bclhp", c, states) * so_far.exp().permute(0, 2, 3, 1)[..., None]
        y = (within + earlier).contiguous().reshape(batch, -1, heads, x.shape[-1]) + skipped
        y = y[:, :steps].clone() if padding else y  # a copy, so that the padded tensor can be freed
        return y, state.clone()


def _sums(x: Tensor) -> Tensor:
    """Return the sums of all consecutive elements of x: the result at […, l, s] is x[…, s + 1] + … + x[…, l].

    For l = s it is 0, and for l < s it is −∞.
    """
    size = x.shape[-1]
    before = torch.ones(size, size, device=x.device, dtype=torch.bool).tril(-1)
    sums = x[..., None].expand(*x.shape, size).masked_fill(~before, 0).cumsum(dim=-2)
    return sums.masked_fill(~before.logical_or(torch.eye(size, device=x.device, dtype=torch.bool)), -torch.inf)


def _token(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output y (B, 1, heads, head_dim) for one token, and the new state. `inputs` are those of `_chunks`."""
    x, b, c, dt, rates, skip, shift, state = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x[:, 0]
    batch, heads, width = x.shape
    group = heads // b.shape[2]
    dt = dt.transpose(1, 2).expand(-1, -1, width)
    dt = F.softplus(dt + shift[:, None].expand(-1, width).to(dt.dtype))[..., None]
    decay = -rates.to(wide).exp()[:, None, None].expand(-1, width, b.shape[-1])
    b, c = (tensor[:, 0, :, None].expand(-1, -1, group, -1).reshape(batch, heads, -1) for tensor in (b, c))
    state = state * (dt.to(wide) * decay).exp() + dt * b[:, :, None] * x[..., None]
    y = torch.bmm(state.to(c.dtype).flatten(0, 1), c.flatten(0, 1)[..., None]).view(batch, heads, width)
    return (y + x * skip[:, None].expand(-1, width)).to(y.dtype)[:, None], state
