"""Parts of bidirectional models such as BERT: token types, the transform before the head, the pooler."""

from typing import ClassVar, Self

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Size, Weight, bias
from .norms import Norm
from .operations import ActivationOperation, Add, AnyOperation, Embed, Program, Sizes, Tokens, linear
from .words import Words

__all__ = ["HeadTransform", "Pooler", "TokenTypes"]


class TokenTypes(Component, frozen=True):
    """A table of embeddings of token types, which are added to the token embeddings (BERT, 1810.04805).

    The type says to which segment of a text a token belongs. By default, all tokens have the first type.
    """

    label = "embedding"
    rows = "T"
    given = ("hidden_size",)

    count: Size
    """The number of types."""
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
        """Return the operations that add the embeddings of token types to the stream. `shape` is (B, T)."""
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
    described = ("activation", "norm")

    hidden_size: Size
    """The width of the hidden states."""
    activation: Activation
    """The activation after the linear layer."""
    norm: Norm
    """The norm after the activation."""
    bias: bool = False
    """Whether the linear layer has a bias."""

    def __post_init__(self) -> None:
        if self.norm.size != self.hidden_size:
            raise ConfigError(f"the norm has size {self.norm.size}, but its input has hidden size {self.hidden_size}")

    def words(self) -> dict[str, Words]:
        function, norm = function_of(self.activation), self.norm.named()
        text = f"{FACTS[function].words}, {norm.long}"
        return {"transform": Words(text, {"activation": function, "norm": norm.data, "eps": self.norm.eps})}

    def weights(self) -> dict[str, Weight]:
        weights = {"dense.weight": Weight((self.hidden_size, self.hidden_size), "reads")}
        return weights | ({"dense.bias": bias(self.hidden_size)} if self.bias else {})

    def share(self, devices: int) -> Self:  # noqa: ARG002 - every GPU has all of it
        return self

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        active = f"{path}.activated"
        program: list[AnyOperation] = [linear(self, "dense", path, source, shape, "head")]
        program.append(ActivationOperation(active, (program[-1].id,), shape, "head", function=self.activation))
        return (*program, *self.norm.operations(f"{path}.norm", active, shape))


class Pooler(Component, frozen=True):
    """activation(dense(x)), where x is the hidden state of a text's first token: one vector for the text (BERT).

    It is not part of the model's output per token, and is computed only on request.
    """

    label = "pooler"
    given = ("hidden_size",)

    hidden_size: Size
    """The width of the hidden states, and of the result."""
    activation: Activation
    """The activation after the linear layer."""

    def words(self) -> dict[str, Words]:
        function = function_of(self.activation)
        text = f"{FACTS[function].words} of the first token"
        return {"pooler": Words(text, {"activation": function})}

    def weights(self) -> dict[str, Weight]:
        return {
            "dense.weight": Weight((self.hidden_size, self.hidden_size), "reads"),
            "dense.bias": bias(self.hidden_size),
        }

    def share(self, devices: int) -> Self:  # noqa: ARG002
        return self

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        return {"outputs of the pooler off by one": {"dense": [*range(1, self.hidden_size), 0]}}
