"""Where tokens come in and logits go out. No torch."""

from __future__ import annotations

from .base import Component, Shape, Size
from .norms import Norm

__all__ = ["Embedding", "Head"]


class Embedding(Component, frozen=True):
    """The token table; `norm` is applied to its rows before the first block (BLOOM)."""

    vocab_size: Size
    hidden_size: Size
    norm: Norm | None = None

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.hidden_size)}


class Head(Component, frozen=True):
    """Logits from hidden states. `tied`: its weight is the embedding's, and is stored once."""

    vocab_size: Size
    hidden_size: Size
    tied: bool = False
    bias: bool = False

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {} if self.tied else {"weight": (self.vocab_size, self.hidden_size)}
        return shapes | ({"bias": (self.vocab_size,)} if self.bias else {})
