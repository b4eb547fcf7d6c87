"""RWKV's mixers, computed token by token as in transformers' torch code.

The operations have the order of transformers' `rwkv_linear_attention_cpu`. There are two differences: padding does not
change the state, and decoding one token of several texts at once does not mix the texts, as it does in transformers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import ChannelMixing, TimeMixing
from .context import Context
from .layers import ACTIVATIONS, LinearModule
from .registry import computes
from .scan import State, real, recomputed

_NEVER = -1e38
"""An exponent whose exponential is 0: the key of padding tokens, and the largest key before the first token."""


def _mix(hidden: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(hidden))


def _before(x: Tensor, cache: State | None) -> Tensor:
    """Return x shifted by one token: for every token the input of the token before it, or zeros for the first.

    With a cache, the first token's predecessor is read from it, and the last token's input is stored in it.
    """
    before = F.pad(x, (0, 0, 1, -1))
    if cache is not None:
        if cache.inputs is not None:
            before[:, 0] = cache.inputs
        cache.inputs = x[:, -1].clone()
    return before


def _blend(x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
    return x * mix + before * (1 - mix)


@computes(TimeMixing)
class _TimeMixingModule(nn.Module):
    """The torch module of `components.TimeMixing`."""

    def __init__(self, spec: TimeMixing, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.decay, self.bonus = (nn.Parameter(torch.empty(spec.inner)) for _ in range(2))
        self.k_mix, self.v_mix, self.r_mix = (_mix(spec.hidden_size) for _ in range(3))
        self.k_proj, self.v_proj, self.r_proj = (LinearModule(spec.hidden_size, spec.inner, False) for _ in range(3))
        self.o_proj = LinearModule(spec.inner, spec.hidden_size, False)

    @staticmethod
    def cache(spec: TimeMixing) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        x = real(x, context)
        before = _before(x, cache)
        k, v, r = (_blend(x, before, mix) for mix in (self.k_mix, self.v_mix, self.r_mix))
        del before
        k, v, r = self.k_proj(k), self.v_proj(v), torch.sigmoid(self.r_proj(r))
        if context.padded and context.attention_mask is not None:
            k = k.masked_fill(context.attention_mask[:, -x.shape[1] :, None] == 0, _NEVER)
        earlier = None if cache is None else cache.state
        mean, state = recomputed(_mean, k, v, self.decay, self.bonus, earlier)
        if cache is not None:
            cache.state = state
        out: Tensor = self.o_proj(r * mean)
        return out


def _mean(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Return the weighted mean of all values so far for every token, (B, T, inner).

    The second result is the new state (B, inner, 3), in fp32 or wider. `inputs` are keys, values, the parameters decay
    and bonus, and the earlier state or None.
    """
    keys, values, decay, bonus, state = inputs
    wide = torch.promote_types(keys.dtype, torch.float32)
    if state is None:
        above = below = torch.zeros_like(keys[:, 0], dtype=wide)
        most = above + _NEVER
    else:
        above, below, most = state.unbind(-1)
    means, decay = torch.zeros_like(keys), -torch.exp(decay)
    for step in range(keys.shape[1]):
        k, v = keys[:, step].to(wide), values[:, step]
        largest = torch.maximum(most, k + bonus)
        old, new = torch.exp(most - largest), torch.exp(k + bonus - largest)
        means[:, step] = ((old * above + new * v) / (old * below + new)).to(keys.dtype)
        largest = torch.maximum(most + decay, k)
        old, new = torch.exp(most + decay - largest), torch.exp(k - largest)
        above, below, most = old * above + new * v, old * below + new, largest
    return means, torch.stack((above, below, most), dim=-1)


@computes(ChannelMixing)
class _ChannelMixingModule(nn.Module):
    """The torch module of `components.ChannelMixing`."""

    def __init__(self, spec: ChannelMixing, kernel: Any = "sdpa") -> None:  # noqa: ARG002 - there is one
        super().__init__()
        self.up_mix, self.gate_mix = (_mix(spec.hidden_size) for _ in range(2))
        self.up_proj = LinearModule(spec.hidden_size, spec.intermediate_size, False)
        self.gate_proj = LinearModule(spec.hidden_size, spec.hidden_size, False)
        self.down_proj = LinearModule(spec.intermediate_size, spec.hidden_size, False)
        self.activation = ACTIVATIONS["relu2"]

    @staticmethod
    def cache(spec: ChannelMixing) -> State:  # noqa: ARG004
        """Return an empty cache for one layer."""
        return State()

    def forward(self, x: Tensor, context: Context, cache: State | None = None) -> Tensor:  # (B, T, hidden)
        x = real(x, context)
        before = _before(x, cache)
        up, gate = (_blend(x, before, mix) for mix in (self.up_mix, self.gate_mix))
        del before
        down = self.down_proj(self.activation(self.up_proj(up)))
        out: Tensor = torch.sigmoid(self.gate_proj(gate)) * down
        return out
