"""Where tokens come in and logits go out. No torch."""

from __future__ import annotations

from .base import Component, Size, Weight, bias
from .norms import Norm

__all__ = ["Embedding", "Head"]


class Embedding(Component, frozen=True):
    """The token table; `norm` is applied to its rows before the first block (BLOOM)."""

    label = "embedding"

    vocab_size: Size
    hidden_size: Size
    norm: Norm | None = None

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.vocab_size, self.hidden_size), "table")}


class Head(Component, frozen=True):
    """Logits from hidden states. `tied`: its weight is the embedding's, and is stored once."""

    label = "head"

    vocab_size: Size
    hidden_size: Size
    tied: bool = False
    bias: bool = False

    def weights(self) -> dict[str, Weight]:
        found = {} if self.tied else {"weight": Weight((self.vocab_size, self.hidden_size), "reads")}
        return found | ({"bias": bias(self.vocab_size)} if self.bias else {})
