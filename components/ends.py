"""The two ends of a model: embeddings and the head."""

from typing import Annotated, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Positive, Size, Weight, bias
from .encoder import HeadTransform
from .feed_forward import FEW, LAYER_INPUTS
from .norms import Norm
from .operations import Add, AnyOperation, Cap, Embed, Given, Linear, Program, ScaleOperation, Sizes, Tokens, linear
from .words import Words

__all__ = ["Embedding", "Head", "LayerEmbedding"]


class Embedding(Component, frozen=True):
    """The table of token embeddings, and what happens to its rows before the first block."""

    label = "embedding"
    rows = "V"
    rounds = ("scaling",)
    forgotten: ClassVar[dict[str, str]] = {
        "norm": "norm of the embedding left out",
        "multiplier": "embedding not scaled",
        "width": "embedding as wide as the stream",
        "shared": "table of the encoder not shared",
        "blank": "row of the padding token not zero",
    }

    described = ("vocab_size", "hidden_size", "norm")

    vocab_size: Size
    """The number of tokens, which is the number of rows."""
    hidden_size: Size
    """The width of the residual stream."""
    norm: Norm | None = None
    """The norm of the embeddings before the first block (BLOOM)."""
    multiplier: Positive = 1.0
    """The factor by which embeddings are multiplied (√hidden in Gemma)."""
    width: Size | None = None
    """The width of the table's rows, if a matrix projects them to the residual stream (OPT 350m). None means that they
    are as wide as the stream."""
    shared: bool = False
    """Whether this is the embedding of an encoder that uses the decoder's table, so that the table is stored only
    once."""
    scaling: Literal["exact", "rounded"] = "exact"
    """With "rounded", the multiplier is first rounded to the dtype of the rows."""
    blank: Annotated[int, Meta(ge=0)] | None = None
    """The id of a token whose row of the table is treated as zeros, also by a tied head (Youtu's padding token)."""

    def __post_init__(self) -> None:
        if self.blank is not None and self.blank >= self.vocab_size:
            raise ConfigError(
                f"the padding token (blank) has the id {self.blank}, but the embedding table has only "
                f"{self.vocab_size} rows"
            )
        if self.shared and self.width is not None:
            raise ConfigError(
                "a shared embedding table (shared: true) always has the hidden size as its width: leave out width"
            )

    def words(self) -> dict[str, Words]:
        return {"embedding": Words("of tokens", {})}

    def weights(self) -> dict[str, Weight]:
        if self.shared:
            return {}
        if self.width is None:
            return {"weight": Weight((self.vocab_size, self.hidden_size), "table")}
        return {
            "weight": Weight((self.vocab_size, self.width), "inner"),
            "projection.weight": Weight((self.hidden_size, self.width), "writes"),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        wide: Sizes = (*shape, self.hidden_size)
        rows: Sizes = wide if self.width is None else (*shape, self.width)
        own = () if self.shared else (("weight", self.shapes()["weight"]),)
        program: list[AnyOperation] = [Embed(path, (source,), rows, "embedding", own)]
        if self.multiplier != 1:
            program.append(ScaleOperation(f"{path}.scaled", (path,), rows, "embedding", factor=self.multiplier))
        if self.width is not None:
            program.append(linear(self, "projection", path, program[-1].id, wide, "embedding"))
        if self.norm is not None:
            program += self.norm.operations(f"{path}.norm", program[-1].id, wide)
        return tuple(program)


class LayerEmbedding(Component, frozen=True):
    """An additional input of every layer for every token (Gemma 3n), which the layer's `LayerInput` reads.

    The inputs of all layers are `summed` · (row + norm(`projected` · projection(x))). x is the token's embedding, and
    row is the token's row in `table`. The norm is applied separately to every layer's input. A token whose id is
    outside the table has the first row.
    """

    label = "embedding"
    rounds = ("scaling",)
    described = ("table", "norm")
    given = ("hidden_size", "layers")

    table: Embedding
    """The table of additional inputs. A token's row contains the inputs of all layers."""
    hidden_size: Size
    """The width of the residual stream."""
    layers: Size
    """The number of layers."""
    width: Size
    """The number of elements of one layer's input."""
    norm: Norm
    """The norm of the projected embedding. It is as wide as one layer's input."""
    projected: Positive
    """The factor by which the projected embedding is multiplied."""
    summed: Positive
    """The factor by which the sum of the row and the projected embedding is multiplied."""
    scaling: Literal["exact", "rounded"] = "exact"
    """With "rounded", both factors are first rounded to the dtype of the rows."""

    def __post_init__(self) -> None:
        if self.norm.size != self.width:
            raise ConfigError(
                f"the norm of layer_inputs has size {self.norm.size}, but the input of a layer has width {self.width}"
            )
        if self.table.shared:
            raise ConfigError(
                "the embedding table of layer_inputs cannot have shared: true, which is only for the "
                "embedding of an encoder"
            )
        if self.table.hidden_size != self.every:
            raise ConfigError(
                f"the table of layer_inputs has hidden_size {self.table.hidden_size}, but {self.layers} layers with "
                f"inputs of width {self.width} need {self.layers * self.width}"
            )

    @property
    def every(self) -> int:
        """The number of elements in a row of the table, which has `width` elements for every layer."""
        return self.layers * self.width

    def words(self) -> dict[str, Words]:
        norm = self.norm.named()
        data = {name: getattr(self, name) for name in ("width", "projected", "summed")} | {"norm": norm.data}
        data["table"] = {name: value for name, (_, value) in self.table.undescribed().items()}
        return {"layer inputs": Words(f"{self.width:,} a layer", data, f"{self.width:,} a layer, {norm.long}")}

    def weights(self) -> dict[str, Weight]:
        return {"projection.weight": Weight((self.every, self.hidden_size), "reads")}

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"m": self.every, "e": self.width}

    def slips(self) -> dict[str, Self]:
        return {"sum of a layer's inputs not scaled": msgspec.structs.replace(self, summed=1.0)}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        order = [*range(self.width, self.every), *range(self.width)]
        return {"projected inputs those of the next layer": {"projection": order}}

    def small(self, hidden: int) -> Self:
        return self.sized(hidden, min(self.width, FEW), self.layers, self.table.vocab_size)

    def sized(self, hidden: int, width: int, layers: int, tokens: int) -> Self:
        """Return the same component with other sizes. `tokens` is the number of rows of the table."""
        table = msgspec.structs.replace(self.table, hidden_size=layers * width, vocab_size=tokens)
        sizes = {"hidden_size": hidden, "width": width, "layers": layers}
        return msgspec.structs.replace(self, table=table, norm=self.norm.small(width), **sizes)

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the operations that compute the additional inputs of all layers. `shape` is (B, T).

        `source` is the id of the operation that computes the token embeddings.
        """
        row, every, wide = "embedding", (*shape, self.layers, self.width), (*shape, self.hidden_size)
        ids, x = f"{path}.tokens", f"{path}.embedded"
        program: list[AnyOperation] = [Tokens(ids, (), shape, row)]
        program += self.table.operations(f"{path}.table", ids, shape)
        rows = program[-1].id
        program.append(Given(x, (source,), wide, row, words="the token's embedding"))
        program.append(linear(self, "projection", path, x, every, row))
        program.append(ScaleOperation(f"{path}.projected", (program[-1].id,), every, row, factor=self.projected))
        program += self.norm.operations(f"{path}.norm", program[-1].id, every)
        program.append(Add(f"{path}.sum", (program[-1].id, rows), every, row))
        program.append(ScaleOperation(LAYER_INPUTS, (program[-1].id,), every, row, factor=self.summed))
        return tuple(program)


class Head(Component, frozen=True):
    """The last step of a model, which computes logits from hidden states."""

    label = "head"
    forgotten: ClassVar[dict[str, str]] = {
        "tied": "tied head ignored",
        "bias": "head bias dropped",
        "cap": "cap on logits dropped",
        "multiplier": "logits not scaled",
        "width": "hidden states not projected before the head",
        "transform": "transform before the head left out",
    }
    rounds = ("scaling", "added")
    rows = "V"

    given = ("vocab_size", "hidden_size")

    vocab_size: Size
    """The number of logits per token."""
    hidden_size: Size
    """The width of the hidden states."""
    tied: bool = False
    """Whether the head's weight is the table of the embedding, which is then stored once."""
    bias: bool = False
    """Whether a bias is added to the logits."""
    cap: Positive | None = None
    """With c, every logit x becomes c · tanh(x / c) at the end (Gemma 2)."""
    multiplier: Positive = 1.0
    """The factor by which logits are multiplied; see `scaling`."""
    width: Size | None = None
    """The width to which a matrix first projects the hidden states (OPT 350m). None means that there is no such
    matrix."""
    transform: HeadTransform | None = None
    """A transform of the hidden states before they are multiplied by the head's weight (BERT)."""
    scaling: Literal["multiply", "divide", "divide states", "multiply states"] = "multiply"
    """How the multiplier is applied. "multiply": logits are multiplied by it (Cohere). "divide": logits are divided by
    its inverse (Granite). "divide states": hidden states are divided by its inverse before the product (MiniCPM).
    "multiply states": hidden states are multiplied by it before the product (T5)."""
    added: Literal["in the product", "behind it"] = "in the product"
    """Whether the bias is added inside the matrix product, or after it ("behind it", BART)."""

    def __post_init__(self) -> None:
        if self.transform is not None and self.transform.hidden_size != self.hidden_size:
            raise ConfigError(
                f"the transform before the head has hidden_size {self.transform.hidden_size}, but the head "
                f"has hidden_size {self.hidden_size}"
            )
        if self.early and self.bias:
            raise ConfigError(
                "a head that scales the hidden states instead of the logits cannot have a bias, because the "
                "bias would not be scaled"
            )

    @property
    def early(self) -> bool:
        """Whether the multiplier scales the hidden states, before the head's matrix, instead of the logits."""
        return self.scaling.endswith(" states")

    def words(self) -> dict[str, Words]:
        short = ("tied" if self.tied else "own weight") + (", bias" if self.bias else "")
        long = "tied to the embedding" if self.tied else "its own weight"
        return {"head": Words(short, {"tied": self.tied, "bias": self.bias}, long)}

    def weights(self) -> dict[str, Weight]:
        weights = {}
        if self.width is not None:
            weights["projection.weight"] = Weight((self.width, self.hidden_size), "reads")
        if not self.tied:
            rows = (self.vocab_size, self.width or self.hidden_size)
            weights["weight"] = Weight(rows, "reads" if self.width is None else "inner")
        return weights | ({"bias": bias(self.vocab_size)} if self.bias else {})

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        wide: Sizes = (*shape[:-1], self.vocab_size)
        tied = "embedding" if self.tied else None
        weights = tuple((name, size) for name, size in self.shapes().items() if "." not in name)
        before = self.early and self.multiplier != 1
        program: list[AnyOperation] = []
        if self.transform is not None:
            program += self.transform.operations(f"{path}.transform", source, shape)
            source = program[-1].id
        if before:
            program.append(ScaleOperation(f"{path}.scaled", (source,), shape, "head", factor=self.multiplier))
            source = program[-1].id
        if self.width is not None:
            program.append(linear(self, "projection", path, source, (*shape[:-1], self.width), "head"))
            source = program[-1].id
        inputs = self.width or self.hidden_size
        program.append(Linear(path, (source,), wide, "head", weights, inputs_wide=inputs, tied=tied))
        if self.multiplier != 1 and not before:
            program.append(ScaleOperation(f"{path}.scaled", (path,), wide, "head", factor=self.multiplier))
        if self.cap is not None:
            program.append(Cap(f"{path}.capped", (program[-1].id,), wide, "head", limit=self.cap))
        return tuple(program)
