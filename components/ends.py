"""The embedding and the head. No torch."""

from typing import Annotated, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Positive, Size, Weight, bias
from .encoder import HeadTransform
from .feed_forward import FEW, MADE
from .norms import Norm
from .operations import Add, AnyOperation, Cap, Embed, Given, Linear, Program, Scale, Sizes, Tokens, linear
from .words import Words

__all__ = ["Embedding", "Head", "LayerEmbedding"]


class Embedding(Component, frozen=True):
    """The token embedding: a table with a row per token."""

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

    tells = ("vocab_size", "hidden_size", "norm")

    vocab_size: Size
    """The number of rows."""
    hidden_size: Size
    """The width of the residual stream."""
    norm: Norm | None = None
    """The norm of the rows before the first block (BLOOM)."""
    multiplier: Positive = 1.0
    """The factor of the rows (√hidden in Gemma)."""
    width: Size | None = None
    """The width of the rows, if a matrix projects them to the stream (OPT 350m)."""
    shared: bool = False
    """Whether an encoder uses the table of the model that it belongs to, which is stored once."""
    scaling: Literal["exact", "rounded"] = "exact"
    """With "rounded", the multiplier is rounded to the dtype of the rows first."""
    blank: Annotated[int, Meta(ge=0)] | None = None
    """The id of a token whose row counts as zeros, whatever it contains, also in a tied head (Youtu's padding
    token)."""

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
        found: list[AnyOperation] = [Embed(path, (source,), rows, "embedding", own)]
        if self.multiplier != 1:
            found.append(Scale(f"{path}.scaled", (path,), rows, "embedding", factor=self.multiplier))
        if self.width is not None:
            found.append(linear(self, "projection", path, found[-1].id, wide, "embedding"))
        if self.norm is not None:
            found += self.norm.operations(f"{path}.norm", found[-1].id, wide)
        return tuple(found)


class LayerEmbedding(Component, frozen=True):
    """An additional input per layer for every token, from a table whose rows have `width` numbers per layer (Gemma 3n).

    The inputs are summed · (row + norm(projected · projection(x))), where x is the token's embedding. The `LayerInput`
    of a layer reads its part. A token outside the table has the first row.
    """

    label = "embedding"
    rounds = ("scaling",)
    tells = ("table", "norm")
    given = ("hidden_size", "layers")

    table: Embedding
    """The table of rows."""
    hidden_size: Size
    """The width of the residual stream."""
    layers: Size
    """The number of layers."""
    width: Size
    """The number of elements per layer."""
    norm: Norm
    """The norm of every layer's part of the projection."""
    projected: Positive
    """A factor of the projection."""
    summed: Positive
    """A factor of the sum."""
    scaling: Literal["exact", "rounded"] = "exact"
    """With "rounded", both factors are rounded to the dtype of the rows before they multiply."""

    def __post_init__(self) -> None:
        if self.norm.size != self.width:
            raise ConfigError(f"the norm has size {self.norm.size}, but the input of each layer has width {self.width}")
        if self.table.shared:
            raise ConfigError(
                "the embedding table of layer_inputs cannot have shared: true, which is only for the "
                "embedding of an encoder"
            )
        if self.table.hidden_size != self.every:
            raise ConfigError(
                f"the table has hidden_size {self.table.hidden_size}, but {self.layers} layers with inputs "
                f"of width {self.width} need {self.layers * self.width}"
            )

    @property
    def every(self) -> int:
        """The number of elements per token, over all layers."""
        return self.layers * self.width

    def words(self) -> dict[str, Words]:
        norm = self.norm.named()
        data = {name: getattr(self, name) for name in ("width", "projected", "summed")} | {"norm": norm.data}
        data["table"] = {name: value for name, (_, value) in self.table.untold().items()}
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
        """Return the component with other sizes."""
        table = msgspec.structs.replace(self.table, hidden_size=layers * width, vocab_size=tokens)
        sizes = {"hidden_size": hidden, "width": width, "layers": layers}
        return msgspec.structs.replace(self, table=table, norm=self.norm.small(width), **sizes)

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the program that computes all inputs from the embeddings `source` of the tokens."""
        row, every, wide = "embedding", (*shape, self.layers, self.width), (*shape, self.hidden_size)
        ids, x = f"{path}.tokens", f"{path}.embedded"
        found: list[AnyOperation] = [Tokens(ids, (), shape, row)]
        found += self.table.operations(f"{path}.table", ids, shape)
        rows = found[-1].id
        found.append(Given(x, (source,), wide, row, words="the token's embedding"))
        found.append(linear(self, "projection", path, x, every, row))
        found.append(Scale(f"{path}.projected", (found[-1].id,), every, row, factor=self.projected))
        found += self.norm.operations(f"{path}.norm", found[-1].id, every)
        found.append(Add(f"{path}.sum", (found[-1].id, rows), every, row))
        found.append(Scale(MADE, (found[-1].id,), every, row, factor=self.summed))
        return tuple(found)


class Head(Component, frozen=True):
    """The output layer, which computes logits from hidden states."""

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
    """The number of logits."""
    hidden_size: Size
    """The width of the hidden states."""
    tied: bool = False
    """Whether the weight is the embedding's, which is stored once."""
    bias: bool = False
    """Whether the head has a bias."""
    cap: Positive | None = None
    """With c, every logit x is replaced by c · tanh(x / c) (Gemma 2). It is the last step."""
    multiplier: Positive = 1.0
    """A factor of the logits (Cohere), or of the hidden states; see `scaling`."""
    width: Size | None = None
    """With a width, a matrix projects hidden states to it first (OPT 350m)."""
    transform: HeadTransform | None = None
    """The transform of the hidden states before the product (BERT)."""
    scaling: Literal["multiply", "divide", "divide states", "multiply states"] = "multiply"
    """How the multiplier is applied. "multiply": to the logits. "divide": the logits are divided by its inverse
    (Granite). "divide states": the hidden states are divided before the product (MiniCPM). "multiply states": they are
    multiplied (T5)."""
    added: Literal["in the product", "behind it"] = "in the product"
    """Whether a bias is added inside the matrix product or after it ("behind it", BART)."""

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
        """Whether the hidden states are multiplied before the product, and not the logits after it."""
        return self.scaling.endswith(" states")

    def words(self) -> dict[str, Words]:
        short = ("tied" if self.tied else "own weight") + (", bias" if self.bias else "")
        long = "tied to the embedding" if self.tied else "its own weight"
        return {"head": Words(short, {"tied": self.tied, "bias": self.bias}, long)}

    def weights(self) -> dict[str, Weight]:
        found = {}
        if self.width is not None:
            found["projection.weight"] = Weight((self.width, self.hidden_size), "reads")
        if not self.tied:
            rows = (self.vocab_size, self.width or self.hidden_size)
            found["weight"] = Weight(rows, "reads" if self.width is None else "inner")
        return found | ({"bias": bias(self.vocab_size)} if self.bias else {})

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        wide: Sizes = (*shape[:-1], self.vocab_size)
        tied = "embedding" if self.tied else None
        weights = tuple((name, size) for name, size in self.shapes().items() if "." not in name)
        before = self.early and self.multiplier != 1
        found: list[AnyOperation] = []
        if self.transform is not None:
            found += self.transform.operations(f"{path}.transform", source, shape)
            source = found[-1].id
        if before:
            found.append(Scale(f"{path}.scaled", (source,), shape, "head", factor=self.multiplier))
            source = found[-1].id
        if self.width is not None:
            found.append(linear(self, "projection", path, source, (*shape[:-1], self.width), "head"))
            source = found[-1].id
        inputs = self.width or self.hidden_size
        found.append(Linear(path, (source,), wide, "head", weights, inputs_wide=inputs, tied=tied))
        if self.multiplier != 1 and not before:
            found.append(Scale(f"{path}.scaled", (path,), wide, "head", factor=self.multiplier))
        if self.cap is not None:
            found.append(Cap(f"{path}.capped", (found[-1].id,), wide, "head", limit=self.cap))
        return tuple(found)
