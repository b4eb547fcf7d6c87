"""Several parallel residual streams (AltUp), computed in the order of transformers' modeling_gemma3n.py.

One stream, the *active* one, goes through the attention and feed-forward of a layer. The others are updated by cheap
linear combinations.
"""

import torch
from torch import Tensor, nn

from ..components import AlternatingUpdates, LowRankResidual, Streams
from .layers import LinearModule
from .registry import build_module, computes

_LEAST = 1e-5
"""The smallest mean square by which a stream is divided when it is rescaled to the length (the norm) of another one."""


class Multiplier(nn.Module):
    """A module that multiplies x by a weight, which has one element or one per column of x.

    The weight gets gradients only if it is `trained`.
    """

    def __init__(self, size: int = 1, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@computes(Streams)
class _StreamsModule(nn.ModuleList):
    """The linears that make several residual streams (streams, B, T, hidden) of one (B, T, hidden), or the reverse."""

    def __init__(self, spec: Streams) -> None:
        super().__init__(LinearModule(spec.hidden_size, spec.hidden_size, False) for _ in range(spec.count - 1))

    def split(self, x: Tensor) -> Tensor:
        """Return all streams, which are the input of the first layer, for the embeddings x."""
        return torch.stack(_as_long(x, [linear(x) for linear in self]))

    def join(self, streams: Tensor) -> Tensor:
        """Return the mean of the streams after the last layer, which is the input of the final norm."""
        first, *others = streams
        projected = [linear(stream) for linear, stream in zip(self, others, strict=True)]
        return torch.stack(_as_long(first, projected)).mean(dim=0)


def _as_long(x: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Return x and the vectors in `others`, which are rescaled to the length (the norm) of x."""
    target = torch.mean(x**2, dim=-1, keepdim=True) ** 0.5
    lengths = [torch.sqrt(torch.mean(other**2, dim=-1, keepdim=True).clamp(min=_LEAST)) for other in others]
    return [x, *(other * target / length for other, length in zip(others, lengths, strict=True))]


@computes(AlternatingUpdates)
class _AlternatingUpdatesModule(nn.Module):
    """The update of all streams before and after a layer's sub-layers; see `components.AlternatingUpdates`."""

    def __init__(self, spec: AlternatingUpdates) -> None:
        super().__init__()
        self.spec = spec
        self.norm = build_module(spec.norm)
        self.router = LinearModule(spec.hidden_size, spec.count, False)
        self.prediction = LinearModule(spec.count, spec.count**2, False)
        self.correction = LinearModule(spec.count, spec.count, False)
        self.scale = Multiplier(spec.hidden_size, trained=True)

    def _routed(self, x: Tensor) -> Tensor:
        """Return the router's output in (-1, 1) for every token and stream, (B, T, streams)."""
        normed: Tensor = self.norm(x)
        routed: Tensor = self.router(normed * normed.new_full((), 1 / self.spec.hidden_size))
        return torch.tanh(routed.to(torch.promote_types(routed.dtype, torch.float32))).to(x.dtype)

    def predicted(self, streams: Tensor) -> Tensor:
        """Return a prediction of all streams after the layer: linear combinations of all streams before it."""
        numbers = torch.unflatten(self.prediction(self._routed(streams[self.spec.active])), -1, (self.spec.count, -1))
        change = torch.matmul(streams.permute(1, 2, 3, 0), numbers.transpose(-1, -2))
        return (change.permute(3, 0, 1, 2) + streams).contiguous()

    def corrected(self, streams: Tensor, computed: Tensor) -> Tensor:
        """Return the predicted streams plus a multiple of the active stream's error.

        The error is `computed`, the layer's output for the active stream, minus its prediction.
        """
        numbers: Tensor = self.correction(self._routed(computed)) + 1.0
        error = computed - streams[self.spec.active]
        return (error * numbers.permute(2, 0, 1)[..., None] + streams).contiguous()

    def scaled(self, streams: Tensor) -> Tensor:
        """Return the active stream of the corrected `streams`, times a learned weight per column."""
        return self.scale(streams[self.spec.active])  # type: ignore[no-any-return]

    @staticmethod
    def spread(streams: Tensor, x: Tensor) -> Tensor:
        """Return the streams after adding x to all of them but the first."""
        if torch.is_grad_enabled():
            return torch.cat((streams[:1], streams[1:] + x))
        streams[1:] += x
        return streams


@computes(LowRankResidual)
class _LowRankResidualModule(nn.Module):
    """A low-rank residual: x + norm(right(left(x)))."""

    def __init__(self, spec: LowRankResidual) -> None:
        super().__init__()
        self.left_proj = LinearModule(spec.hidden_size, spec.rank, False)
        self.right_proj = LinearModule(spec.rank, spec.hidden_size, False)
        self.norm = build_module(spec.norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.right_proj(self.left_proj(x)))  # type: ignore[no-any-return]
