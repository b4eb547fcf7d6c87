"""Where tokens come in and logits go out. No torch."""

from __future__ import annotations

from .base import Component, Size, Weight, bias
from .norms import Norm
from .operations import Embed, Linear, Program, Sizes
from .words import Words

__all__ = ["Embedding", "Head"]


class Embedding(Component, frozen=True):
    """The token table; `norm` is applied to its rows before the first block (BLOOM)."""

    label = "embedding"
    rows = "V"

    tells = ("vocab_size", "hidden_size", "norm")

    vocab_size: Size
    hidden_size: Size
    norm: Norm | None = None

    def words(self) -> dict[str, Words]:
        return {"embedding": Words("of tokens", {})}

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.vocab_size, self.hidden_size), "table")}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        wide: Sizes = (*shape, self.hidden_size)
        rows = Embed(path, (source,), wide, "embedding", tuple(self.shapes().items()))
        return (rows, *(() if self.norm is None else self.norm.operations(f"{path}.norm", path, wide)))


class Head(Component, frozen=True):
    """Logits from hidden states. `tied`: its weight is the embedding's, and is stored once."""

    label = "head"
    rows = "V"

    given = ("vocab_size", "hidden_size")

    vocab_size: Size
    hidden_size: Size
    tied: bool = False
    bias: bool = False

    def words(self) -> dict[str, Words]:
        short = ("tied" if self.tied else "own weight") + (", bias" if self.bias else "")
        long = "tied to the embedding" if self.tied else "its own weight"
        return {"head": Words(short, {"tied": self.tied, "bias": self.bias}, long)}

    def weights(self) -> dict[str, Weight]:
        found = {} if self.tied else {"weight": Weight((self.vocab_size, self.hidden_size), "reads")}
        return found | ({"bias": bias(self.vocab_size)} if self.bias else {})

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        wide: Sizes = (*shape[:-1], self.vocab_size)
        tied, weights = "embedding" if self.tied else None, tuple(self.shapes().items())
        return (Linear(path, (source,), wide, "head", weights, inputs_wide=self.hidden_size, tied=tied),)
