"""Several residual streams per token, and low-rank residual connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from ..errors import ConfigError
from .base import Component, Size, Weight
from .norms import Norm
from .operations import (
    ActivationOperation,
    Add,
    AltUp,
    AnyOperation,
    Program,
    ScaleOperation,
    Sizes,
    Stream,
    linear,
    out_of,
)
from .words import Words

__all__ = ["MOST_STREAMS", "AlternatingUpdates", "LowRankResidual", "Streams"]

MOST_STREAMS = 8
_Count = Annotated[int, Meta(ge=2, le=MOST_STREAMS)]


class Streams(Component, frozen=True):
    """Several residual streams per token (Gemma 3n).

    Before the first layer, the first stream is the embedding itself, and matrices compute the others from it. These are
    scaled to its length (its norm as a vector). After the last layer, all streams but the first pass through matrices
    and are scaled to the length of the first. The result is the mean of all streams.
    """

    label = "streams"
    given = ("hidden_size",)

    hidden_size: Size
    """The width of a stream."""
    count: _Count
    """The number of streams."""

    def weights(self) -> dict[str, Weight]:
        square = Weight((self.hidden_size, self.hidden_size), "inner")
        return {f"{i}.weight": square for i in range(self.count - 1)}

    def words(self) -> dict[str, Words]:
        return {"streams": Words(f"{self.count}", {"count": self.count}, f"{self.count} a token")}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        turned = [*range(1, self.hidden_size), 0]
        return {"rows of streams shifted by one": {f"{i}": turned for i in range(self.count - 1)}}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the operations that split one stream into several, or that join several streams into one.

        Streams are split if `shape`, the shape of the input, is (B, T, hidden). They are joined if it is (streams, B,
        T, hidden).
        """
        split = len(shape) == 3
        one = shape if split else shape[1:]
        program: list[AnyOperation] = []
        if not split:
            program += (_pick(self, f"{path}.stream.{i}", source, one, i) for i in range(self.count))
        read = [source if split else f"{path}.stream.{i}" for i in range(self.count)]
        linears = [linear(self, f"{i}", path, read[i + 1], one, "streams") for i in range(self.count - 1)]
        inputs = (read[0], *(projection.id for projection in linears))
        if split:
            return (*linears, AltUp(f"{path}.split", inputs, (self.count, *shape), "streams", step="split"))
        return (*program, *linears, AltUp(f"{path}.join", inputs, one, "streams", step="join"))


class AlternatingUpdates(Component, frozen=True):
    """The update of several residual streams in a layer whose sub-layers compute only one of them (AltUp, 2301.13310).

    1. Every stream is predicted as a linear combination of all streams. A router computes the coefficients from the
       active stream.
    2. The sub-layers read the prediction of the active stream, and compute its new value.
    3. The difference between the new value and the prediction, times one coefficient per stream, is added to the
       predictions of all streams. The same router computes these coefficients from the new value.
    4. A sub-layer with `onto: others` reads the active stream as it is after step 3, times a weight. Its output is
       added to all streams except the first.
    """

    label = "streams"
    given = ("hidden_size",)
    described = ("count", "norm")
    forgotten: ClassVar[dict[str, str]] = {"active": "the first stream computed, not the active one"}

    hidden_size: Size
    """The width of a stream."""
    count: _Count
    """The number of streams."""
    norm: Norm
    """The norm of the router's input. The result of the norm is divided by its width."""
    active: Annotated[int, Meta(ge=0, lt=MOST_STREAMS)] = 0
    """The index of the stream that the sub-layers read and compute."""

    def __post_init__(self) -> None:
        if self.active >= self.count:
            raise ConfigError(
                f"active is {self.active}, but the {self.count} residual streams are numbered from 0 to "
                f"{self.count - 1}"
            )
        if self.norm.size != self.hidden_size:
            raise ConfigError(f"the norm has size {self.norm.size}, but the hidden size is {self.hidden_size}")

    def weights(self) -> dict[str, Weight]:
        count = self.count
        return {
            "router.weight": Weight((count, self.hidden_size), "router"),
            "prediction.weight": Weight((count**2, count), "inner"),
            "correction.weight": Weight((count, count), "inner"),
            "scale.weight": Weight((self.hidden_size,), "gain", 0.0),
        }

    def words(self) -> dict[str, Words]:
        data, norm = {"count": self.count, "norm": self.norm.named().data}, self.norm.named().long
        return {"altup": Words(f"of {self.count}", data, f"of {self.count}, {norm}")}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        count = self.count
        turned = [row * count + column for column in range(count) for row in range(count)]
        return {
            "predictions of streams transposed": {"prediction": turned},
            "corrections those of the next stream": {"correction": [*range(1, count), 0]},
        }

    def share(self, devices: int) -> Self:  # noqa: ARG002 - every GPU has all of it
        return self

    def small(self, hidden: int) -> Self:
        return replace(self, hidden_size=hidden, norm=self.norm.small(hidden))

    def _routed(self, path: str, source: str, shape: Sizes, step: str, rows: int) -> Iterator[AnyOperation]:
        """Yield the operations that compute the coefficients of a step. Both steps use the same norm and router.

        Args:
            path: The name of this component in the block.
            source: The id of the router's input.
            shape: The shape of this input.
            step: The step: "prediction" or "correction".
            rows: The number of coefficients per token.
        """
        own: dict[str, Any] = {} if step == "prediction" else {"weights": ()}
        at = path if step == "prediction" else f"{path}.{step}"

        def shared(operation: Any, name: str) -> Any:
            """Return the operation with its id in this step.

            In the correction, it uses the weights of the same operation in the prediction.
            """
            return replace(operation, id=f"{at}.{name}", **own, **({"tied": f"{path}.{name}"} if own else {}))

        (norm,) = out_of("streams", self.norm.operations(f"{path}.norm", source, shape))
        yield shared(norm, "norm")
        yield ScaleOperation(f"{at}.routed", (f"{at}.norm",), shape, "streams", factor=1 / self.hidden_size)
        few: Sizes = (*shape[:-1], self.count)
        yield shared(linear(self, "router", path, f"{at}.routed", few, "streams"), "router")
        yield ActivationOperation(f"{at}.numbers", (f"{at}.router",), few, "streams", function="tanh", wide="rounded")
        yield linear(self, step, path, f"{at}.numbers", (*shape[:-1], rows), "streams")

    def predicted(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the operations that predict all streams, and pick the active stream from the predictions.

        The predicted streams have the id `path`.predicted, and the active one has the id `path`.active.
        """
        wide = (self.count, *shape)
        return (
            _pick(self, f"{path}.first", source, shape, self.active),
            *self._routed(path, f"{path}.first", shape, "prediction", self.count**2),
            AltUp(f"{path}.predicted", (source, f"{path}.prediction"), wide, "streams", step="predict"),
            _pick(self, f"{path}.active", f"{path}.predicted", shape, self.active),
        )

    def corrected(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the operations that correct all streams. `source` is the id of the sub-layers' result."""
        inputs = (f"{path}.predicted", source, f"{path}.correction")
        return (
            *self._routed(path, source, shape, "correction", self.count),
            AltUp(f"{path}.corrected", inputs, (self.count, *shape), "streams", step="correct", index=self.active),
        )

    def scaled(self, path: str, shape: Sizes) -> Program:
        """Return the operations that pick the active stream from the corrected ones and multiply it by a weight."""
        own = (("weight", (self.hidden_size,)),)
        return (
            _pick(self, f"{path}.computed", f"{path}.corrected", shape, self.active),
            ScaleOperation(f"{path}.scale", (f"{path}.computed",), shape, "streams", own, factor=1.0),
        )


class LowRankResidual(Component, frozen=True):
    """x + norm(right(left(x))), a residual connection through two small matrices (LAuReL, 2411.07501)."""

    label = "low rank"
    given = ("hidden_size",)
    described = ("rank", "norm")

    hidden_size: Size
    """The width of the residual stream."""
    rank: Size
    """The width between the two matrices."""
    norm: Norm
    """The norm of the second matrix's output."""

    def __post_init__(self) -> None:
        if self.norm.size != self.hidden_size:
            raise ConfigError(f"the norm has size {self.norm.size}, but the hidden size is {self.hidden_size}")

    def weights(self) -> dict[str, Weight]:
        return {
            "left_proj.weight": Weight((self.rank, self.hidden_size), "reads"),
            "right_proj.weight": Weight((self.hidden_size, self.rank), "writes"),
        }

    def words(self) -> dict[str, Words]:
        norm = self.norm.named()
        return {"low rank": Words(f"{self.rank}", {"rank": self.rank, "norm": norm.data}, f"{self.rank}, {norm.long}")}

    def small(self, hidden: int) -> Self:
        return replace(self, hidden_size=hidden, rank=min(self.rank, 8), norm=self.norm.small(hidden))

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"r": self.rank}

    def share(self, devices: int) -> Self:  # noqa: ARG002 - every GPU has all of it
        return self

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        left = linear(self, "left_proj", path, source, (*shape[:-1], self.rank), self.label)
        right = linear(self, "right_proj", path, left.id, shape, self.label)
        norm = tuple(out_of(self.label, self.norm.operations(f"{path}.norm", right.id, shape)))
        past = Stream(f"{path}.past", (source,), shape, self.label)
        return (past, left, right, *norm, Add(f"{path}.sum", (past.id, norm[-1].id), shape, self.label))


def _pick(node: Streams | AlternatingUpdates, name: str, source: str, shape: Sizes, index: int) -> AltUp:
    """Return the operation that picks one of several streams."""
    return AltUp(name, (source,), shape, "streams", step="pick", index=index, count=node.count)
