"""Several streams of a token from layer to layer, in transformers' own order of roundings (modeling_gemma3n.py)."""

import torch
from torch import Tensor, nn

from ..components import AlternatingUpdates, LowRankResidual, Streams
from .layers import LinearModule
from .registry import build_module, computes

_LEAST = 1e-5
"""A stream's mean square counts as no less where it is made as long as another."""


class Multiplier(nn.Module):
    """x times a weight: of one number, which training leaves as it is, or of one a column."""

    def __init__(self, size: int = 1, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@computes(Streams)
class _StreamsModule(nn.ModuleList):
    """One stream (B, T, hidden) -> all, (streams, B, T, hidden), or back."""

    def __init__(self, spec: Streams) -> None:
        super().__init__(LinearModule(spec.hidden_size, spec.hidden_size, False) for _ in range(spec.count - 1))

    def split(self, x: Tensor) -> Tensor:
        """What the first layer reads."""
        return torch.stack(_as_long(x, [each(x) for each in self]))

    def join(self, streams: Tensor) -> Tensor:
        """What the norm of the last output reads."""
        first, *others = streams
        made = [each(stream) for each, stream in zip(self, others, strict=True)]
        return torch.stack(_as_long(first, made)).mean(dim=0)


def _as_long(x: Tensor, others: list[Tensor]) -> list[Tensor]:
    """x and the others, each as long as x."""
    target = torch.mean(x**2, dim=-1, keepdim=True) ** 0.5
    lengths = [torch.sqrt(torch.mean(each**2, dim=-1, keepdim=True).clamp(min=_LEAST)) for each in others]
    return [x, *(each * target / length for each, length in zip(others, lengths, strict=True))]


@computes(AlternatingUpdates)
class _AlternatingUpdatesModule(nn.Module):
    """What a layer does with all streams before and behind its sub-layers; see `components.AlternatingUpdates`."""

    def __init__(self, spec: AlternatingUpdates) -> None:
        super().__init__()
        self.spec = spec
        self.norm = build_module(spec.norm)
        self.router = LinearModule(spec.hidden_size, spec.count, False)
        self.prediction = LinearModule(spec.count, spec.count**2, False)
        self.correction = LinearModule(spec.count, spec.count, False)
        self.scale = Multiplier(spec.hidden_size, trained=True)

    def _routed(self, x: Tensor) -> Tensor:
        """A token's numbers (B, T, streams)."""
        normed: Tensor = self.norm(x)
        routed: Tensor = self.router(normed * normed.new_tensor(1 / self.spec.hidden_size))
        return torch.tanh(routed.to(torch.promote_types(routed.dtype, torch.float32))).to(x.dtype)

    def predicted(self, streams: Tensor) -> Tensor:
        """All streams, of all of them."""
        numbers = torch.unflatten(self.prediction(self._routed(streams[self.spec.active])), -1, (self.spec.count, -1))
        found = torch.matmul(streams.permute(1, 2, 3, 0), numbers.transpose(-1, -2))
        return (found.permute(3, 0, 1, 2) + streams).contiguous()

    def corrected(self, streams: Tensor, computed: Tensor) -> Tensor:
        """The predicted streams, by what the active one of them was off."""
        numbers: Tensor = self.correction(self._routed(computed)) + 1.0
        off = computed - streams[self.spec.active]
        return (off * numbers.permute(2, 0, 1)[..., None] + streams).contiguous()

    def scaled(self, streams: Tensor) -> Tensor:
        """The active one of the corrected streams, times a weight."""
        return self.scale(streams[self.spec.active])  # type: ignore[no-any-return]

    @staticmethod
    def spread(streams: Tensor, x: Tensor) -> Tensor:
        """The streams with x added to all but the first."""
        if torch.is_grad_enabled():
            return torch.cat((streams[:1], streams[1:] + x))
        streams[1:] += x
        return streams


@computes(LowRankResidual)
class _LowRankResidualModule(nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, spec: LowRankResidual) -> None:
        super().__init__()
        self.left_proj = LinearModule(spec.hidden_size, spec.rank, False)
        self.right_proj = LinearModule(spec.rank, spec.hidden_size, False)
        self.norm = build_module(spec.norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.right_proj(self.left_proj(x)))  # type: ignore[no-any-return]
