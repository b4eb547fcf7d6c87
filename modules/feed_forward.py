"""Feed-forwards: plain, gated, and a mixture of several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..components import FeedForward, GatedFeedForward, MixtureOfExperts
from .layers import ACTIVATIONS, FusedLinears, Linear
from .registry import build_module, computes


@computes(FeedForward)
class FeedForwardModule(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, spec: FeedForward, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, spec.down_bias, spec.arithmetic)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out


@computes(GatedFeedForward)
class GatedFeedForwardModule(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, spec: GatedFeedForward, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, spec.down_bias, spec.arithmetic)
        self.inner_norm = build_module(spec.inner_norm) if spec.inner_norm else None
        self.fused = FusedLinears() if spec.fused else None
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        if self.fused is None:
            gate = self.activation(self.gate_proj(x))
            inner = gate * self.up_proj(x) if torch.is_grad_enabled() else gate.mul_(self.up_proj(x))
        else:
            inner = self.gated(self.raised(x))
        return self.lowered(inner)

    def lowered(self, inner: Tensor) -> Tensor:
        """What comes of the product."""
        out: Tensor = self.down_proj(inner if self.inner_norm is None else self.inner_norm(inner))
        return out

    def raised(self, x: Tensor) -> Tensor:
        """Gate and up side by side, (…, 2·intermediate), of one product."""
        assert self.fused is not None
        return torch.cat(self.fused((self.gate_proj, self.up_proj), x), dim=-1)

    def gated(self, raised: Tensor) -> Tensor:
        """activation(gate) · up of what `raised` gives."""
        gate, up = raised.chunk(2, dim=-1)
        return self.activation(gate) * up


@computes(MixtureOfExperts)
class MixtureOfExpertsModule(nn.Module):
    """For each token the weighted sum of the experts that its router takes; see `components.MixtureOfExperts`.

    Tokens are sorted by expert, each expert computes its own at once, and a token's results are summed in the order of
    their weights, in the routers' dtype: as transformers' default (integrations/moe.py, grouped_mm) rounds.
    """

    def __init__(self, spec: MixtureOfExperts, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.spec = spec
        self.router = Linear(spec.hidden_size, spec.experts, False)
        self.experts = nn.ModuleList(build_module(spec.expert) for _ in range(spec.experts))

    def forward(self, x: Tensor, *_: Any) -> Tensor:  # (B, T, hidden)
        weights, chosen = self.route(x.reshape(-1, x.shape[-1]))  # each (N, top_k), N = B·T
        return self.mix(x.reshape(-1, x.shape[-1]), weights, chosen).reshape(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, in fp32 at least, and the numbers of the experts of tokens (N, hidden): both (N, top_k)."""
        logits: Tensor = self.router(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, chosen = torch.softmax(logits.to(wide), dim=-1).topk(self.spec.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self.spec.normalise else weights), chosen

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The experts' outputs for tokens (N, hidden), weighted and summed."""
        top_k = chosen.shape[-1]
        numbers, order = chosen.reshape(-1).sort()
        taken = x[order // top_k]  # (N·top_k, hidden), by expert
        counts = numbers.bincount(minlength=len(self.experts)).tolist()
        done = self._each(taken, counts)
        weighted = done * weights.reshape(-1)[order, None]
        in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[in_place].view(-1, top_k, x.shape[-1]).sum(dim=1).to(x.dtype)

    def _each(self, taken: Tensor, counts: list[int]) -> Tensor:
        """Every expert's output for its own of the tokens `taken`, `counts` of them, one expert's behind another's."""
        used: list[Any] = [expert for expert, count in zip(self.experts, counts, strict=True) if count]
        sizes = [count for count in counts if count]
        pairs = zip(used, torch.split(taken, sizes), strict=True)
        first = used[0]
        if not isinstance(first, GatedFeedForwardModule) or first.fused is None:
            return torch.cat([expert(tokens) for expert, tokens in pairs])
        # All tokens' activations at once: of one expert's single row they are contiguous, and gelu rounds otherwise.
        inner = first.gated(torch.cat([expert.raised(tokens) for expert, tokens in pairs]))
        return torch.cat([expert.lowered(part) for expert, part in zip(used, torch.split(inner, sizes), strict=True)])
