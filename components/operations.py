"""The operations of which components consist. The method `operations` of a component returns a short program of them.

The set of kinds of operation is fixed. An operation has the ids of its inputs, the shape of its result, its weights,
and the fields of its component that it needs. Code that computes FLOPs, memory or drawings of a model is a *walk*: it
visits operations, with one rule per kind of operation, and does not know the components. So every walk supports a new
component that consists of known operations. For an operation without a rule, a walk raises `unknown`.

A size in a shape is a number or a letter. B is the number of sequences, and T the number of new tokens per sequence. S
is the number of tokens that a token may attend to, including cached ones. U is the number of tokens that an encoder has
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

import msgspec

from ..errors import ConfigError
from .activations import Activation
from .base import Arithmetic, Shape, Sizes
from .positions import Biasing, Temperature, Turning

if TYPE_CHECKING:
    from .base import Component

# fmt: off
__all__ = [
    "ActivationOperation", "Add", "Alibi", "AltUp", "AnyOperation", "Blend", "CacheOperation", "Cap", "Choose",
    "Combine", "Concat", "Convolve", "Embed", "Gather", "Given", "Linear", "Mix", "NormOperation", "Operation", "Pairs",
    "Positions", "Product", "Program", "Rotate", "ScaleOperation", "Scan", "Scores", "Shift", "Sizes", "Softmax",
    "Sparse", "Stream", "Temper", "Tokens", "attend", "linear", "out_of", "unknown",
]
# fmt: on


_Joined = TypeVar("_Joined", "Linear", "ScaleOperation")


class Operation(msgspec.Struct, frozen=True):
    """One step in the computation of a component, such as a linear layer. The base class of all kinds of operation."""

    id: str
    """The name, which is unique in the program. If the operation has weights, it is the module's name in the block."""
    inputs: tuple[str, ...]
    """The ids of the inputs, in the order of the operation's arguments."""
    shape: Sizes
    """The shape of the result."""
    row: str
    """The row of a table of costs in which its FLOPs and its result are counted."""
    weights: tuple[tuple[str, Shape], ...] = ()
    """The names and shapes of the module's parameters."""
    copies: int = 1
    """The number of equal modules with their own weights, such as experts. A token uses only some of them."""
    apart: int = 1
    """The number of modules that run one after the other, each on some of the tokens (experts)."""
    live_until: str = ""
    """The id of the last operation during which the module's code still refers to the result, so that its memory is not
    released. If empty, the result is released after the last operation that reads it."""
    tied: str | None = None
    """The id of the operation whose weights this one uses, or None if it has its own."""
    kept_wide: bool = False
    """Whether the result is in at least fp32, whatever the model's dtype is."""

    @property
    def parameters(self) -> int:
        """The number of parameters of all `copies` together, such as those of all experts."""
        return self.copies * sum(math.prod(shape) for _, shape in self.weights)

    def numbers(self, **symbols: int) -> int:
        """Return the number of elements of the result for given B, T, S and U.

        If U is not given, it is T, or else S.
        """
        symbols = {"U": symbols.get("T", symbols.get("S", 1)), **symbols}
        return math.prod(size if isinstance(size, int) else symbols[size] for size in self.shape)


class Tokens(Operation, frozen=True, kw_only=True):
    """The token ids of a batch, or its token types, (B, T)."""

    types: bool = False
    """Whether these are token types, which say to which segment a token belongs (BERT)."""


class Stream(Operation, frozen=True, kw_only=True):
    """A value under another name, such as the input of a block, or a value that a residual connection passes on."""


class Given(Operation, frozen=True, kw_only=True):
    """A value that another part of the model has computed, such as the encoder's output or an earlier layer's keys.

    `inputs` has the id of the operation that computes the value, if this id is unique in the model.
    """

    words: str
    """What the value is, in words for drawings."""
    again: bool = False
    """Whether the memory of the value is already counted in the other part, as for the keys of an earlier layer."""


class Embed(Operation, frozen=True, kw_only=True):
    """The lookup of token ids or types in a table of embeddings."""


class Positions(Operation, frozen=True, kw_only=True):
    """The rows of a table of position embeddings: (T, hidden), or (B, T, hidden) with `padding`."""

    offset: int = 0
    """The number that is added to a position to get its row."""
    padding: int | None = None
    """The id of padding tokens, which are not counted as positions. Then the positions differ between the texts of a
    batch."""


class NormOperation(Operation, frozen=True, kw_only=True):
    """A norm: every row is divided by a statistic of the row, and multiplied by a gain."""

    kind: str
    """The name of the norm for drawings."""
    formula: str
    """The formula of the norm for drawings."""
    normalised_in: Literal["kernel", "input", "float32"]
    """The form of the normalised rows before they are multiplied by the gain. "kernel": one torch kernel computes the
    whole norm. "input" and "float32": they are a tensor, in the input's dtype or in at least fp32."""
    statistics: int = 1
    """The number of statistics per row that autograd saves for the backward pass."""
    gain: Literal["weight", "1 + weight", "none"] = "weight"
    """What the normalised rows are multiplied by, as in `components.norms`."""
    centred: bool = False
    """Whether separate torch operations compute a LayerNorm: the rows minus their means are then a tensor in memory,
    and the gain is applied in at least fp32."""
    narrowed: bool = False
    """Whether the norm first casts an fp32 stream to the model's dtype."""


class Linear(Operation, frozen=True, kw_only=True):
    """A linear layer, x·Wᵀ or x·Wᵀ + b. The shape may split the last dimension into heads."""

    inputs_wide: int
    """The number of input features."""
    wide: Literal["", "input", "both"] = ""
    """What is cast to at least fp32 first: nothing, the input, or the input and the weight."""
    arithmetic: Arithmetic = "linear"
    together: str = ""
    """A label that is equal for all linear layers that read the same input and are computed together, such as q, k
    and v. Empty if the layer is computed alone."""
    fused: bool = False
    """Whether the layers with the same `together` are computed in one matrix product."""
    groups: int = 1
    """The number of groups in the rows of the fused product, such as one per key-value head."""
    copied: bool = False
    """Whether the layer's part of the fused product's result is copied to a new tensor."""
    joined: bool = False
    """Whether the results of the layers in the fused product are concatenated to a new tensor."""
    choice: str | None = None
    """The id of the operation that chooses, for every token, which of the `copies` (experts) it uses."""
    window: int | None = None
    """The number of cached tokens that the layer reads, if it reads cached tokens, as in latent attention. None means
    all of them."""
    by_channel: bool = False
    """Whether the input is stored channel by channel, so that it is copied if there are several sequences."""

    @property
    def bias(self) -> bool:
        return any(name == "bias" for name, _ in self.weights)

    def computed_together(self, program: Iterable[Operation]) -> list[Linear]:
        """Return all linear layers of the program with the same `together`, including this one."""
        return _computed_together(self, program)


def _computed_together(one: _Joined, program: Iterable[Operation]) -> list[_Joined]:
    alike = (operation for operation in program if isinstance(operation, type(one)))
    return [other for other in alike if other is one or (one.together and other.together == one.together)]


class Rotate(Operation, frozen=True, kw_only=True):
    """Rotary positions, applied to consecutive parts of every head."""

    rotary: Turning
    start: int = 0
    """The index of the first rotated element of a head."""
    parts: int = 1
    """The number of rotated parts of a head. Each has `rotary.dim` elements and is rotated separately."""

    @property
    def turned(self) -> int:
        """The number of rotated elements of a head."""
        return self.parts * self.rotary.dim


class Temper(Operation, frozen=True, kw_only=True):
    """The product of a token's queries and a factor that grows with the token's position."""

    temperature: Temperature


class CacheOperation(Operation, frozen=True, kw_only=True):
    """A KV cache.

    Its result is the cached x of the earlier tokens followed by the new x, so its shape has S instead of T.
    """

    window: int | None = None
    """The number of tokens to which a query attends, including its own; None for all. The cache stores this number
    minus 1 between two steps."""
    repeats: int = 1
    """How many times every head is repeated after the cache. transformers stores the repeated heads in its cache."""
    ours: bool = False
    """Whether only gptkit's models have this cache. Then there is no cache of transformers to compare it with."""
    as_given: bool = False
    """Whether, in a pass without a cache, x keeps its memory layout. Otherwise x is copied to the layout of a cache,
    head by head."""
    once: bool = False
    """Whether x is computed from an encoder's output. The cache then does not grow after the first step."""


class Concat(Operation, frozen=True, kw_only=True):
    """The concatenation of its inputs along the last dimension, such as the parts of a key.

    Inputs with one head are shared by all heads.
    """


class Scores(Operation, frozen=True, kw_only=True):
    """Attention scores, q·kᵀ · scale, (B, heads, T, S). For `window`, `chunked` and `causal`, see `Softmax`."""

    scale: float
    query_dim: int
    """The number of elements of a query or key."""
    kv_heads: int
    """The number of key heads. Every key head is shared by the same number of query heads."""
    window: int | None = None
    chunked: bool = False
    causal: bool = True
    wide: bool = False
    """Whether the product is computed in at least fp32."""
    broadcast: bool = False
    """Whether key heads are expanded to query heads inside the matrix product, which no fused kernel does."""
    written: bool = False
    """Whether scores are always stored as a tensor, because the family has no fused attention in transformers."""

    @property
    def heads(self) -> int:
        return self.shape[1]  # type: ignore[return-value]


class Alibi(Operation, frozen=True, kw_only=True):
    """The addition of a position bias to the scores, such as slope(head) · position of the key."""

    alibi: Biasing
    scale: float
    """The scale of the scores. The bias is multiplied by it, too, if `Biasing.scaled` is true."""


class Cap(Operation, frozen=True, kw_only=True):
    """limit · tanh(x / limit), or x clipped to -limit … limit."""

    limit: float
    hard: bool = False
    """Whether x is clipped. Otherwise the tanh formula is used."""


class Softmax(Operation, frozen=True, kw_only=True):
    """The softmax over the keys that a query may attend to.

    If it has a weight, this is one more score per head, for a key without a value (an attention sink).
    """

    window: int | None = None
    """The number of keys that a query may attend to, including the key of its own token. None means all."""
    chunked: bool = False
    """Whether a query may attend only to the keys of its own chunk of `window` tokens."""
    causal: bool = True
    """Whether a query may attend only to the key of its own token and to earlier keys. Otherwise a window extends to
    both sides of the query."""
    wide: bool = True
    """Whether the softmax is computed in at least fp32. Otherwise it is computed in the dtype of the scores."""
    sunk: Literal["in softmax", "in float32", "behind it"] = "in softmax"
    """How the attention sink acts. "in softmax": as one more score, and the largest score of a row is subtracted from
    all scores first. "in float32": as one more score, without this subtraction. "behind it": the output is multiplied
    by 1 minus the weight that the sink would have in the softmax."""


class Mix(Operation, frozen=True, kw_only=True):
    """The weighted sum of the values, (B, T, heads, value dim). Query heads share value heads as in `Scores`."""

    window: int | None = None
    chunked: bool = False
    causal: bool = True


class Scan(Operation, frozen=True, kw_only=True):
    """A recurrence over tokens: every token reads and updates a state.

    A long text may be processed in chunks of tokens. The intermediate results of chunks are not saved for the backward
    pass, which computes the chunks again.
    """

    state: Shape
    """The shape of the state of one sequence."""
    title: str
    """The name of the recurrence for drawings."""
    formula: str
    """The formula of the recurrence for drawings."""
    saved: int = 1
    """The number of tensors that autograd saves besides the inputs, each of the result's size."""
    products: int = 0
    """The number of multiplications per token that belong to matrix products, such as keys with values."""
    wide: bool = False
    """Whether the recurrence is computed, and the state stored, in at least fp32."""
    theirs: int | None = None
    """The number of elements of the state that transformers stores in its cache. None means that transformers does not
    have this recurrence."""
    narrow: bool = False
    """Whether the temporary elements (`alive`, `within`) are in the model's dtype. Otherwise they are in at least
    fp32."""
    chunk: int = 1
    """The number of tokens in a chunk. The last chunk is padded with zeros."""
    chunk_products: int = 0
    """The number of multiplications per chunk."""
    spared: int = 0
    """The number of multiplications that the first chunk does not need, because there is no state before it."""
    between: int = 0
    """The number of multiplications per pair of chunks, for recurrences that compute a chunk's state from those of all
    earlier chunks."""
    alive: int = 0
    """The number of elements of temporary tensors per token of the text, when memory use is highest. Inputs and result
    are not counted."""
    again: bool = False
    """Whether the backward pass computes the recurrence again, even if tokens are processed one by one. With chunks, it
    always does."""
    within: tuple[int, int] = (0, 0)
    """The number of elements of temporary tensors that belong to the current chunk, as a pair: for the first chunk of a
    text, and for every later chunk."""


class Convolve(Operation, frozen=True, kw_only=True):
    """A causal convolution with one kernel per channel.

    The code transposes the input to (B, channels, T), and pads it with zeros before the first and after the last token.
    Results for the zeros after the last token are not used.
    """

    width: int
    """The length of the kernel, in tokens."""
    joined: bool = False
    """Whether several kernels are concatenated to one tensor first."""
    pads_short: bool = True
    """Whether a text that is shorter than the kernel is first padded to `width` tokens."""
    carried: int | None = None
    """The number of tokens whose inputs stay in the cache. None means `width`. If the field is set, a single new token
    is computed as a sum of products instead of a convolution."""


class Pairs(Operation, frozen=True, kw_only=True):
    """Every token's input, paired with that of the previous token, (B, T, 2, hidden).

    Before the first token, the input counts as zeros. The last token's input stays in the cache.
    """


class Blend(Operation, frozen=True, kw_only=True):
    """w · x + (1 − w) · y for pairs (x, y). The weight w has one element per column."""


class ActivationOperation(Operation, frozen=True, kw_only=True):
    """An activation function, applied to every element."""

    function: Activation
    wide: Literal["", "rounded", "kept"] = ""
    """If not empty, the activation is computed in at least fp32. Then the result is "rounded" to the model's dtype, or
    "kept"."""


class Sparse(Operation, frozen=True, kw_only=True):
    """max(x − threshold, 0). The threshold of a row is its mean + Φ⁻¹(share) · its standard deviation."""

    share: float
    """The fraction of a row's elements that become 0, if the elements are normally distributed."""


class Product(Operation, frozen=True, kw_only=True):
    """The elementwise product of two inputs."""

    in_place: bool = False
    """Whether the result replaces the first factor in memory if no gradient is needed."""


class ScaleOperation(Operation, frozen=True, kw_only=True):
    """The product of the input and a number, and of the weight if there is one.

    The weight is a single number that is not trained, or has one element per column.
    """

    factor: float
    together: str = ""
    """A label that is equal for all operations whose results are concatenated to one tensor. Empty if there are no
    others."""

    def computed_together(self, program: Iterable[Operation]) -> list[ScaleOperation]:
        """Return all `ScaleOperation`s of the program with the same `together`, including this one."""
        return _computed_together(self, program)


class Shift(Operation, frozen=True, kw_only=True):
    """The sum of the input and a number."""

    number: float


class Add(Operation, frozen=True, kw_only=True):
    """The sum of the inputs."""

    residual: str | None = None
    """The id of the input that comes from a residual connection, or None if there is no such input."""


class Choose(Operation, frozen=True, kw_only=True):
    """The step of a router that chooses `top_k` experts per token by logits, and computes the weights of these experts.

    If the step has a parameter named bias, this bias changes only the choice. If it has one named weight, the weights
    of the chosen experts are multiplied by it. Fields without a description are those of `MixtureOfExperts`.
    """

    top_k: int
    experts: int
    normalise: bool
    added: float = 0.0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    multiplier: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    of_chosen: bool = False
    """Whether scores are computed only from the logits of the chosen experts."""
    wide: bool = True
    """Whether scores are computed in at least fp32."""
    jitter: float | None = None
    biased: Literal["scores", "logits"] = "scores"


class Gather(Operation, frozen=True, kw_only=True):
    """The inputs of experts: the tokens, sorted by expert. A token appears once for each of its experts."""

    weighs: bool = False
    """Whether tokens are multiplied by the router's weights before the experts, instead of after them (Llama 4)."""


class Combine(Operation, frozen=True, kw_only=True):
    """The sum of the outputs of a token's experts."""

    wide: bool = True
    """Whether the weights of the experts are in at least fp32."""
    one_by_one: bool = False
    """Whether one expert after the other is added to the sum. Otherwise the sum is computed at once."""
    weighs: bool = True
    """Whether outputs are multiplied by the weights of their experts. Otherwise the inputs were multiplied by them."""


class AltUp(Operation, frozen=True, kw_only=True):
    """A step of a model with several residual streams, (streams, B, T, hidden).

    - split: stack the inputs to streams, after scaling them to the length (the norm as a vector) of the first one
    - pick: return one of `count` streams, number `index`
    - predict: return x_i + Σ_j c_ij · x_j for the streams x, with coefficients c that differ by token
    - correct: return x_i + c_i · (y − x_index) for the streams x, where y is the second input
    - spread: add the second input to all streams except the first
    - join: return the mean of the inputs, after scaling them to the length of the first one
    """

    step: Literal["split", "pick", "predict", "correct", "spread", "join"]
    index: int = 0
    count: int = 1


# fmt: off
AnyOperation = (
    Tokens | Stream | Given | Embed | Positions | NormOperation | Linear | Rotate | CacheOperation | Concat | Scores
    | Alibi | Cap | Softmax | Mix | Scan | Convolve | ActivationOperation | Product | ScaleOperation | Shift | Add
    | Choose | Gather | Combine | Temper | Sparse | AltUp | Pairs | Blend
)
# fmt: on
"""All kinds of operation. Code that handles them with a `match` statement ends it with `raise unknown(…)`."""

Program = tuple[AnyOperation, ...]
"""Operations in an order in which they can be computed. The result of the last one is the result of the program."""


def unknown(operation: Never, walk: str) -> ConfigError:
    """Return the error for a kind of operation that some code has no rule for. The caller raises it.

    `walk` names this code in the message.
    """
    return ConfigError(f"{walk} has no entry for the operation {type(operation).__name__} ({operation.id})")


# --- parts of programs that several components share ------------------------------------------------------------------


def linear(
    node: Component, name: str, path: str, source: str, shape: Sizes, row: str, live_until: str = "", **fields: Any
) -> Linear:
    """Return the operation of the linear layer `name` of a component, with the shapes of its weight and bias.

    Args:
        node: The component.
        name: The name of the linear layer in the component, such as "q_proj".
        path: The name of the component's module in the block.
        source: The id of the layer's input.
        shape: The shape of the result.
        row: See `Operation`.
        live_until: See `Operation`.
        fields: Further fields of `Linear`.
    """
    own = {key.partition(".")[2]: value for key, value in node.shapes().items() if key.partition(".")[0] == name}
    weights, arithmetic = tuple(own.items()), getattr(node, "arithmetic", "linear")
    fields = {"arithmetic": arithmetic, "inputs_wide": own["weight"][1], **fields}
    return Linear(f"{path}.{name}", (source,), shape, row, weights, live_until=live_until, **fields)


def attend(
    path: str,
    inputs: tuple[str, str, str],
    scores: Mapping[str, Any],
    heads: int,
    value_dim: int,
    *,
    position: object = None,
    cap: float | None = None,
    window: int | None = None,
    chunked: bool = False,
    causal: bool = True,
    wide: bool = True,
    sinks: Literal["", "in softmax", "in float32", "behind it"] = "",
    keys: Literal["S", "U"] = "S",
) -> Iterator[AnyOperation]:
    """Yield the operations of attention: softmax(cap(q·kᵀ · scale + bias))·v.

    Args:
        path: The name of the attention module. The ids of the operations begin with it.
        inputs: The ids of q (B, T, heads, query dim), k and v (B, S, kv heads, …).
        scores: Fields of `Scores`.
        heads: The number of query heads.
        value_dim: The number of elements of a value.
        position: The position encoding. Only a `Biasing` adds an operation.
        cap: The limit of the scores.
        window: See `Softmax`.
        chunked: See `Softmax`.
        causal: See `Softmax`.
        wide: See `Softmax`.
        sinks: How sinks act (`Softmax.sunk`). Empty if there are none.
        keys: Whose tokens the keys are: S for the text itself, U for the text of an encoder.
    """
    q, k, v = inputs
    seen: Sizes = ("B", heads, "T", keys)
    last = f"{path}.scores"
    sight: dict[str, Any] = {"window": window, "chunked": chunked, "causal": causal}
    yield Scores(last, (q, k), seen, "scores", **sight, **scores)
    if isinstance(position, Biasing):
        yield Alibi(f"{path}.alibi", (last,), seen, "scores", alibi=position, scale=scores["scale"])
        last = f"{path}.alibi"
    if cap is not None:
        yield Cap(f"{path}.capped", (last,), seen, "scores", limit=cap)
        last = f"{path}.capped"
    weights = (("sinks", (heads,)),) if sinks else ()
    yield Softmax(f"{path}.weights", (last,), seen, "scores", weights, wide=wide, sunk=sinks or "in softmax", **sight)
    yield Mix(f"{path}.mixed", (f"{path}.weights", v), ("B", "T", heads, value_dim), "attention", **sight)


def out_of(row: str, operations: Iterable[AnyOperation]) -> Iterator[AnyOperation]:
    """Return the operations with `row` changed, so that tables of costs count them in that row.

    For example, a norm inside attention is counted as attention and not as a norm.
    """
    return (msgspec.structs.replace(operation, row=row) for operation in operations)
