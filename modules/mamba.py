"""Mamba, computed token by token as in transformers' torch code.

The operations have the order and memory layout of transformers' `mamba_selective_scan` and
`mamba_selective_state_update`. There is one difference: several tokens may continue from a cached state, which
transformers forgets.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import Mamba
from .context import Context
from .layers import FusedLinears, LinearModule, activation_of
from .registry import build_module, computes
from .scan import State, convolved, real, recomputed
from .short_convolution import Kernels


@computes(Mamba)
class _MambaModule(nn.Module):
    """The torch module of `components.Mamba`."""

    def __init__(self, spec: Mamba, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.spec = spec
        self.x_proj, self.gate_proj = (LinearModule(spec.hidden_size, spec.inner, spec.bias) for _ in range(2))
        self.x_conv = Kernels(spec.inner, spec.kernel, spec.conv_bias)
        sizes = spec.chosen.values()
        self.dt_in_proj, self.b_proj, self.c_proj = (LinearModule(spec.inner, size, False) for size in sizes)
        norms = (spec.dt_norm, spec.b_norm, spec.c_norm)
        self.dt_norm, self.b_norm, self.c_norm = (None if norm is None else build_module(norm) for norm in norms)
        self.dt_proj = LinearModule(spec.rank, spec.inner, True)
        self.read, self.chosen = FusedLinears(), FusedLinears()
        self.activation = activation_of(spec.activation)
        self.A_log = nn.Parameter(torch.empty(spec.inner, spec.state_size))
        self.D = nn.Parameter(torch.empty(spec.inner))
        self.o_proj = LinearModule(spec.inner, spec.hidden_size, spec.bias)

    @staticmethod
    def cache(spec: Mamba) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        inputs, gate = self.read((self.x_proj, self.gate_proj), real(x, context))
        mixed = convolved(inputs.transpose(1, 2), self.x_conv.weight, self.x_conv.bias, cache, self.activation)
        u = real(mixed.transpose(1, 2), context)  # for one sequence this is a view, for several a copy
        chosen = self.chosen((self.dt_in_proj, self.b_proj, self.c_proj), u.flatten(0, 1))
        parts = [torch.unflatten(part, 0, u.shape[:2]) for part in chosen]
        norms = (self.dt_norm, self.b_norm, self.c_norm)
        dt, b, c = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        steps = self.dt_proj.weight @ dt.transpose(1, 2)  # (B, inner, T)
        before = None if cache is None else cache.state
        read = _token if before is not None and x.shape[1] == 1 else _tokens
        y, state = recomputed(read, u.transpose(1, 2), steps, b, c, self.A_log, self.D, self.dt_proj.bias, before)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj((y * F.silu(gate.transpose(1, 2))).transpose(1, 2).to(x.dtype))
        return out


def _tokens(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output y (B, inner, T) for many tokens, in fp32 or wider, and the new state.

    `inputs` are x, Δ, B, C, the parameters A_log, D and the bias of Δ, and the earlier state or None.
    """
    x, dt, b, c, rates, passed, shift, state = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = F.softplus(dt + shift.to(wide).to(dt.dtype)[..., None])
    decays = torch.exp(-rates.to(wide).exp()[None, :, None, :] * dt[:, :, :, None])
    brought = dt[:, :, :, None] * b[:, None].to(wide) * x[:, :, :, None].to(wide)
    state = brought.new_zeros(*x.shape[:2], b.shape[-1]) if state is None else state
    outputs = []
    for step in range(x.shape[-1]):
        state = decays[:, :, step] * state + brought[:, :, step]
        outputs.append(torch.matmul(state.to(x.dtype), c[:, step, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(outputs, dim=-1) + x * passed.to(wide)[None, :, None], state


def _token(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output y (B, inner, 1) for one token, and the new state. `inputs` are those of `_tokens`."""
    x, dt, b, c, rates, passed, shift, state = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, b, c = x[..., 0], dt[..., 0], b[:, 0], c[:, 0]
    dt = F.softplus(dt + shift.to(wide).to(dt.dtype))
    brought = dt.to(wide)[..., None] * b.to(wide)[:, None, :] * x.to(wide)[..., None]
    state = state * torch.exp(dt.to(wide)[..., None] * -rates.to(wide).exp()) + brought
    y = torch.matmul(state.to(c.dtype), c.unsqueeze(-1)).squeeze(-1)
    return (y + x * passed).to(x.dtype)[..., None], state
