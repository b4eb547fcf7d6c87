"""The RG-LRU, computed token by token as in transformers' RecurrentGemma.

The operations have the order and memory layout of `RecurrentGemmaRecurrentBlock` and `RecurrentGemmaRglru`. There are
two differences. Padding does not change the state here, but it does in transformers. If several tokens at once continue
from a cache, the convolution here reads the cached inputs, which transformers ignores.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import RGLRU
from .context import Context
from .layers import LinearModule, activation_of
from .registry import computes
from .scan import State, real, recomputed
from .short_convolution import Kernels

_STEEPEST = 1000.0
"""The largest gradient of the square root, which is infinite at 0."""


class _Gate(nn.Module):
    """A linear with a block-diagonal matrix: one block per head, [heads, out, in], in memory as [heads, in, out]."""

    def __init__(self, spec: RGLRU) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.heads, spec.channels, spec.units).transpose(1, 2))
        self.bias = nn.Parameter(torch.empty(spec.inner))

    def forward(self, x: Tensor) -> Tensor:  # (heads, N, in) -> (N, inner)
        shift = self.bias.view(x.shape[0], 1, -1)
        return torch.baddbmm(shift, x, self.weight.transpose(1, 2)).transpose(0, 1).flatten(1)


@computes(RGLRU)
class _RGLRUModule(nn.Module):
    """The torch module of `components.RGLRU`."""

    def __init__(self, spec: RGLRU, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.spec = spec
        self.x_proj, self.gate_proj = (LinearModule(spec.hidden_size, spec.inner, True) for _ in range(2))
        self.x_conv = Kernels(spec.inner, spec.kernel, True)
        self.input_gate, self.decay_gate = _Gate(spec), _Gate(spec)
        self.activation = activation_of(spec.activation)
        self.decay = nn.Parameter(torch.empty(spec.inner))
        self.o_proj = LinearModule(spec.inner, spec.hidden_size, True)

    @staticmethod
    def cache(spec: RGLRU) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        gate = self.activation(self.gate_proj(x))
        u = self._convolved(real(self.x_proj(x), context).transpose(1, 2), cache).transpose(1, 2)
        by_head = u.reshape(-1, self.spec.heads, self.spec.channels).permute(1, 0, 2)
        inputs, decays = (gate_linear(by_head).view(u.shape) for gate_linear in (self.input_gate, self.decay_gate))
        before = None if cache is None else cache.state
        scan = partial(_scan, begins=_begins(context), mask=_mask(context))
        y, state = recomputed(scan, u, inputs, decays, self.decay, before)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj(y * gate)
        return out

    def _convolved(self, x: Tensor, cache: State | None) -> Tensor:  # (B, inner, T)
        kernel, steps = self.spec.kernel, x.shape[-1]
        weight, shift = self.x_conv.weight, self.x_conv.bias
        assert shift is not None
        earlier = None if cache is None else cache.inputs
        if steps == 1:  # transformers computes a single token as a sum of products
            whole = torch.cat((x.new_zeros(*x.shape[:2], kernel - 1) if earlier is None else earlier, x), dim=-1)
            if cache is not None:
                cache.inputs = whole[..., 1:]
            return (torch.sum(whole * weight, dim=-1) + shift)[..., None]
        whole = x if earlier is None else torch.cat((earlier, x), dim=-1)
        if cache is not None:
            cache.inputs = F.pad(whole, (kernel - 1 - whole.shape[-1], 0))
        out = F.conv1d(whole, weight[:, None], shift, padding=kernel - 1, groups=x.shape[1])
        return out[..., whole.shape[-1] - steps : whole.shape[-1]]


def _begins(context: Context) -> Tensor:
    """Return a mask (1 or B, T, 1) that is True at the first token of a text.

    Such a token is at position 0, or is the first one after padding.
    """
    begins = context.position_ids == 0
    mask = context.attention_mask
    if context.padded and mask is not None:
        first = (mask.cumsum(dim=1) == 1) & mask.bool()
        begins = begins | first[:, -context.steps :]
    return begins[:, :, None]


def _mask(context: Context) -> Tensor | None:
    """Return a mask (B, T, 1) that is 1 for tokens and 0 for padding, or None if there is no padding."""
    mask = context.attention_mask
    return None if mask is None or not context.padded else mask[:, -context.steps :, None]


def _scan(*inputs: Any, begins: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Return its output (B, T, inner), and the new state in fp32 or wider.

    Args:
        inputs: x, the logits of both gates, the decay parameter, and the earlier state or None.
        begins: a mask of the tokens that begin a text, at which the state is reset.
        mask: a mask of the tokens that are not padding; None if there is no padding.
    """
    x, input_gate, decay_gate, decay, state = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    logs = -8.0 * torch.sigmoid(decay_gate) * F.softplus(decay)
    decays, weights = torch.exp(logs), torch.exp(2 * logs)
    del logs  # as large as the result; freed early to save memory, as are the weights below
    weights = _Root.apply(1 - weights)  # type: ignore[no-untyped-call]
    weights = begins + ~begins * weights
    weights = weights if mask is None else weights * mask
    gated = x * torch.sigmoid(input_gate) * weights.type(x.dtype)
    del weights
    decays = decays * ~begins
    if x.shape[1] == 1:
        if state is None:
            return gated, gated[:, 0].type(wide)
        updated = decays.type(wide) * state[:, None] + gated.type(wide)
        return updated.type(x.dtype), updated[:, -1]
    state = gated.new_zeros(gated[:, 0].shape, dtype=wide) if state is None else state
    outputs = torch.zeros_like(gated)
    for step in range(x.shape[1]):
        state = decays[:, step].type(wide) * state + gated[:, step].type(wide)
        outputs[:, step] = state.type(x.dtype)
    return outputs, state


class _Root(torch.autograd.Function):
    """The square root, with its gradient limited to `_STEEPEST`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=1 / _STEEPEST**2))
