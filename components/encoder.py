"""Components of bidirectional models: token types, the transform before the head, and the pooler. No torch."""

from typing import ClassVar, Self

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Size, Weight, bias
from .norms import Norm
from .operations import Activation as ActivationOperation
from .operations import Add, AnyOperation, Embed, Program, Sizes, Tokens, linear
from .words import Words

__all__ = ["HeadTransform", "Pooler", "TokenTypes"]


class TokenTypes(Component, frozen=True):
    """A table with a row for each of `count` token types, added to the embeddings (BERT, 1810.04805).

    A type says to which segment of a text a token belongs. If no types are given, all tokens have the first type.
    """

    label = "embedding"
    rows = "T"
    given = ("hidden_size",)

    count: Size
    """The number of token types."""
    hidden_size: Size
    """The width of the residual stream."""

    def words(self) -> dict[str, Words]:
        return {"token types": Words(f"{self.count:,}", {"count": self.count})}

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.count, self.hidden_size), "table")}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        order = [*range(1, self.count), 0]
        return {"token types exchanged": {"": order}} if self.count > 1 else {}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the program that adds the rows of the token types to the stream `source`."""
        wide: Sizes = (*shape, self.hidden_size)
        return (
            Tokens(f"{path}.ids", (), shape, "embedding", types=True),
            Embed(path, (f"{path}.ids",), wide, "embedding", tuple(self.shapes().items())),
            Add(f"{path}.added", (source, path), wide, "norms", residual=source),
        )


class HeadTransform(Component, frozen=True):
    """norm(activation(dense(x))), applied to hidden states before the head of a masked language model (BERT)."""

    label = "head"
    forgotten: ClassVar[dict[str, str]] = {"bias": "bias before the head dropped"}
    given = ("hidden_size",)
    tells = ("activation", "norm")

    hidden_size: Size
    """The width of the residual stream."""
    activation: Activation
    """The activation."""
    norm: Norm
    """The norm of the result."""
    bias: bool = False
    """Whether the linear layer has a bias."""

    def __post_init__(self) -> None:
        if self.norm.size != self.hidden_size:
            raise ConfigError(f"the norm has size {self.norm.size}, but its input has hidden size {self.hidden_size}")

    def words(self) -> dict[str, Words]:
        function, norm = function_of(self.activation), self.norm.named()
        told = f"{FACTS[function].words}, {norm.long}"
        return {"transform": Words(told, {"activation": function, "norm": norm.data, "eps": self.norm.eps})}

    def weights(self) -> dict[str, Weight]:
        found = {"dense.weight": Weight((self.hidden_size, self.hidden_size), "reads")}
        return found | ({"dense.bias": bias(self.hidden_size)} if self.bias else {})

    def share(self, devices: int) -> Self:  # noqa: ARG002 - each has all of it
        return self

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        active = f"{path}.activated"
        found: list[AnyOperation] = [linear(self, "dense", path, source, shape, "head")]
        found.append(ActivationOperation(active, (found[-1].id,), shape, "head", function=self.activation))
        return (*found, *self.norm.operations(f"{path}.norm", active, shape))


class Pooler(Component, frozen=True):
    """activation(dense(x)) of the hidden state x of a text's first token, as one vector for the text (BERT).

    It is not part of the model's output per token, and is computed only on request.
    """

    label = "pooler"
    given = ("hidden_size",)

    hidden_size: Size
    """The width of the residual stream."""
    activation: Activation
    """The activation."""

    def words(self) -> dict[str, Words]:
        function = function_of(self.activation)
        told = f"{FACTS[function].words} of the first token"
        return {"pooler": Words(told, {"activation": function})}

    def weights(self) -> dict[str, Weight]:
        return {
            "dense.weight": Weight((self.hidden_size, self.hidden_size), "reads"),
            "dense.bias": bias(self.hidden_size),
        }

    def share(self, devices: int) -> Self:  # noqa: ARG002
        return self

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        return {"outputs of the pooler off by one": {"dense": [*range(1, self.hidden_size), 0]}}
