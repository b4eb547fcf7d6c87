"""The operations of components: a closed vocabulary, of which every component's `operations` is a short program.

An operation names its inputs and the weights that it reads, gives the shape of its result, and has the fields of its
component that it needs. A function that counts FLOPs, caches or memory, or that draws a model, walks over operations
and has one case for every operation. It never asks from which component an operation comes. A new component that
consists of known operations therefore works in all of these functions. A function that does not know an operation
raises the error of `unknown`, which names it. No torch.

The sizes in a shape are numbers or letters: B (sequences), T (tokens per sequence), S (visible tokens, including those
in the cache) and U (tokens of the source that an encoder reads).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

import msgspec

from ..errors import ConfigError
from .activations import Activation as Function
from .base import Arithmetic, Shape, Sizes
from .positions import Biasing, Temperature, Turning

if TYPE_CHECKING:
    from .base import Component

# fmt: off
__all__ = [
    "Activation", "Add", "Alibi", "AltUp", "AnyOperation", "Blend", "CacheOperation", "Cap", "Choose", "Combine",
    "Concat", "Convolve", "Embed", "Gather", "Given", "Linear", "Mix", "NormOperation", "Operation", "Pairs",
    "Positions", "Product", "Program", "Rotate", "Scale", "Scan", "Scores", "Shift", "Sizes", "Softmax", "Sparse",
    "Stream", "Temper", "Tokens", "attend", "linear", "out_of", "unknown",
]
# fmt: on


_Joined = TypeVar("_Joined", "Linear", "Scale")


class Operation(msgspec.Struct, frozen=True):
    """One operation."""

    id: str
    """The name of a module within its block, or another name if the operation has no weights; unique in a program."""
    inputs: tuple[str, ...]
    """The ids of the inputs, in the order of the operation's arguments."""
    shape: Sizes
    """The shape of the result."""
    row: str
    """The row of a cost table under which the products and the result are counted."""
    weights: tuple[tuple[str, Shape], ...] = ()
    """The names and shapes of the module's own weights."""
    copies: int = 1
    """The number of equal modules, of which a token uses some (experts)."""
    apart: int = 1
    """The number of modules that run one after the other, each on its share of the tokens."""
    held: str = ""
    """The id of the operation up to which the module's code has a variable for the result. Without one, the result is
    freed after its last use."""
    tied: str | None = None
    """The operation whose weights this one uses."""
    kept_wide: bool = False
    """Whether the result stays in at least fp32."""

    @property
    def parameters(self) -> int:
        """Return the number of stored parameters, over all copies."""
        return self.copies * sum(math.prod(shape) for _, shape in self.weights)

    def numbers(self, **symbols: int) -> int:
        """Return the number of elements of the result for given B, T and S. By default the source has the same number
        of tokens, U.
        """
        symbols = {"U": symbols.get("T", symbols.get("S", 1)), **symbols}
        return math.prod(size if isinstance(size, int) else symbols[size] for size in self.shape)


class Tokens(Operation, frozen=True, kw_only=True):
    """The ids of tokens (B, T), or with `types` their token types."""

    types: bool = False


class Stream(Operation, frozen=True, kw_only=True):
    """The residual stream, passed on unchanged: the input of a block, or the stream past a branch."""


class Given(Operation, frozen=True, kw_only=True):
    """A result that another part of the model passes to this one. The input is the id of that result, if it has a name
    in the whole model.
    """

    words: str
    """The result in words."""
    again: bool = False
    """Whether the result is stored elsewhere already, such as the keys of an earlier layer."""


class Embed(Operation, frozen=True, kw_only=True):
    """The rows of a table, selected by ids."""


class Positions(Operation, frozen=True, kw_only=True):
    """The rows of a position table: the row of a token is its position plus `offset`."""

    offset: int = 0
    padding: int | None = None
    """The id of padding tokens, which are not counted. Every text of a batch then has positions of its own, so the
    shape is (B, T, hidden) and not (T, hidden)."""


class NormOperation(Operation, frozen=True, kw_only=True):
    """A norm: rows are divided by a statistic of theirs and multiplied by a gain."""

    kind: str
    """The name of the norm."""
    formula: str
    """The formula of the norm."""
    lies: Literal["kernel", "input", "float32"]
    """Where rows are stored before the gain: inside a fused "kernel", or in tensors of the dtype of the "input" or of
    "float32", which steps in at least fp32 compute."""
    statistics: int = 1
    """The numbers per row that are saved for the backward pass."""
    gain: Literal["weight", "1 + weight", "none"] = "weight"
    """The factor of the rows."""
    centred: bool = False
    """Whether the centred rows are a separate tensor. The gain is then applied in at least fp32."""
    narrowed: bool = False
    """Whether the input is an fp32 stream that is read in the model's dtype."""


class Linear(Operation, frozen=True, kw_only=True):
    """A linear layer, x·Wᵀ + b. The last dimension of the result is split into heads according to the shape."""

    inputs_wide: int
    """The width of the input."""
    wide: Literal["", "input", "both"] = ""
    """"input": the input is converted to at least fp32. "both": the weight is too, which needs a copy."""
    arithmetic: Arithmetic = "linear"
    together: str = ""
    """A name shared by the projections of one input that are computed together."""
    fused: bool = False
    """Whether the projections with the same `together` are one matrix product."""
    groups: int = 1
    """The number of groups of rows in the product's result, if it is fused."""
    copied: bool = False
    """Whether this projection's rows are copied out of the fused result."""
    joined: bool = False
    """Whether the results of the projections are concatenated in a separate tensor."""
    choice: str | None = None
    """The input that says which of the copies a token uses."""
    window: int | None = None
    """The number of visible tokens among the cached tokens that the layer reads."""
    by_channel: bool = False
    """Whether the input is stored by channel, so that it is copied if there are several sequences."""

    @property
    def bias(self) -> bool:
        return any(name == "bias" for name, _ in self.weights)

    def made_together(self, program: Iterable[Operation]) -> list[Linear]:
        """Return the linear layers of a program that are computed together with this one, including this one."""
        return _made_together(self, program)


def _made_together(one: _Joined, program: Iterable[Operation]) -> list[_Joined]:
    alike = (each for each in program if isinstance(each, type(one)))
    return [each for each in alike if each is one or (one.together and each.together == one.together)]


class Rotate(Operation, frozen=True, kw_only=True):
    """Rotary positions on `parts` consecutive parts of a head, the first of which begins at element `start`."""

    rotary: Turning
    start: int = 0
    parts: int = 1

    @property
    def turned(self) -> int:
        """Return the number of rotated elements per head."""
        return self.parts * self.rotary.dim


class Temper(Operation, frozen=True, kw_only=True):
    """The product of every token with a factor that grows with its position."""

    temperature: Temperature


class CacheOperation(Operation, frozen=True, kw_only=True):
    """The KV cache: x of the earlier tokens, then x of these, so that T becomes S. With a window, all tokens but one
    stay for the next step.
    """

    window: int | None = None
    repeats: int = 1
    """The number of copies of a head after the cache, which transformers' cache stores too."""
    ours: bool = False
    """Whether no family of transformers has such a cache."""
    as_given: bool = False
    """Whether the tensors are used as they are if there is no cache. Otherwise they are copied head by head."""
    once: bool = False
    """Whether the keys and values are those of the source, which are complete after the first step and do not grow."""


class Concat(Operation, frozen=True, kw_only=True):
    """The concatenation of parts of a token or of a key. All heads use a part that has fewer heads than the result."""


class Scores(Operation, frozen=True, kw_only=True):
    """Attention scores, q·kᵀ · scale, of shape (B, heads, T, S). With fewer key heads, query heads are grouped."""

    scale: float
    query_dim: int
    kv_heads: int
    window: int | None = None
    chunked: bool = False
    causal: bool = True
    """See `Softmax`."""
    wide: bool = False
    """Whether the product is computed in at least fp32."""
    broadcast: bool = False
    """Whether a key head is repeated inside the matrix product, which no fused kernel does."""
    written: bool = False
    """Whether the scores are computed explicitly, whichever kernel is requested."""

    @property
    def heads(self) -> int:
        return self.shape[1]  # type: ignore[return-value]


class Alibi(Operation, frozen=True, kw_only=True):
    """Scores plus slope(head) · position of the key, multiplied by the scale of the scores if the bias is `scaled`."""

    alibi: Biasing
    scale: float


class Cap(Operation, frozen=True, kw_only=True):
    """limit · tanh(x / limit), or with `hard` the limitation of x to -limit … limit."""

    limit: float
    hard: bool = False


class Softmax(Operation, frozen=True, kw_only=True):
    """The softmax over the keys that a query sees.

    A query sees itself and earlier tokens: at most `window` tokens, or with `chunked` those of its own chunk of
    `window` tokens. If it is not `causal`, it also sees later tokens, up to the same distance.

    The weight, if there is one, is a score per head for a key without a value (a sink).
    """

    window: int | None = None
    chunked: bool = False
    causal: bool = True
    wide: bool = True
    """Whether it is computed in at least fp32, instead of the dtype of the scores."""
    sunk: Literal["in softmax", "in float32", "behind it"] = "in softmax"
    """How the sink acts. "in softmax": it is one of the scores, and the largest score is subtracted from all. "in
    float32": the largest score is not subtracted. "behind it": it is not one of the scores, and the output is
    multiplied by the share that it leaves to them."""


class Mix(Operation, frozen=True, kw_only=True):
    """The weighted sum of the values, (B, T, heads, value dim). Heads are grouped as for the scores."""

    window: int | None = None
    chunked: bool = False
    causal: bool = True


class Scan(Operation, frozen=True, kw_only=True):
    """A recurrence over tokens: every token reads and changes the state that the previous token left.

    Tokens that are read at once are processed in chunks. The last chunk is padded with zeros. The backward pass
    computes the chunks again and saves none of their steps.
    """

    state: Shape
    """The shape of the state for one sequence."""
    title: str
    """The name of the recurrence."""
    formula: str
    """The formula of the recurrence."""
    saved: int = 1
    """The number of tensors of the result's size that are saved for the backward pass, in addition to the inputs."""
    products: int = 0
    """The number of multiplications per token in matrix products, such as keys with values, and not element by element.
    """
    wide: bool = False
    """Whether the computation and the state are in at least fp32."""
    theirs: int | None = None
    """The number of elements that transformers' cache stores for it; None if none of its families has such a state."""
    narrow: bool = False
    """Whether the elements counted in `alive` are in the model's dtype."""
    chunk: int = 1
    """The number of tokens in a chunk."""
    chunk_products: int = 0
    """The number of multiplications per chunk."""
    spared: int = 0
    """The multiplications that the first chunk does not need, because it has no earlier state."""
    between: int = 0
    """The multiplications for every pair of chunks, if the state of a chunk is a sum over all chunks, including the
    initial state."""
    alive: int = 0
    """The largest number of elements per token of all chunks that exist at once, in addition to inputs and result."""
    again: bool = False
    """Whether the backward pass also computes single tokens again."""
    within: tuple[int, int] = (0, 0)
    """The number of additional elements for the current chunk: for the first chunk, and for a later one."""


class Convolve(Operation, frozen=True, kw_only=True):
    """A causal convolution over `width` tokens, with a kernel per channel. The last `width` tokens stay for the next
    step. The convolution reads a transposed copy of at least `width` tokens, padded with zeros on both sides.
    """

    width: int
    joined: bool = False
    """Whether its kernels are concatenated with others in a separate tensor."""
    carried: int | None = None
    """The number of earlier tokens of which something stays, if it is not `width`. A single token is then computed as a
    sum of products, without a convolution."""


class Pairs(Operation, frozen=True, kw_only=True):
    """The input of every token together with that of the previous token, (B, T, 2, hidden). It is zeros for the first
    token. The last input stays for the next step.
    """


class Blend(Operation, frozen=True, kw_only=True):
    """w · x + (1 − w) · y for pairs of x and y. The weight w has a number per column."""


class Activation(Operation, frozen=True, kw_only=True):
    """A function of every element."""

    function: Function
    wide: Literal["", "rounded", "kept"] = ""
    """Whether it is computed in at least fp32, and its result then "rounded" or "kept" in fp32."""


class Sparse(Operation, frozen=True, kw_only=True):
    """The part of every element above a threshold, and 0 below it. A share of `share` of a normally distributed row is
    below the threshold.
    """

    share: float


class Product(Operation, frozen=True, kw_only=True):
    """The product of two inputs, element by element. With `in_place`, it overwrites the first input if no gradient is
    needed.
    """

    in_place: bool = False


class Scale(Operation, frozen=True, kw_only=True):
    """The input times a number, and times the weight if there is one: an untrained number, or a number per column."""

    factor: float
    together: str = ""
    """A name shared by operations whose results are parts of one tensor."""

    def made_together(self, program: Iterable[Operation]) -> list[Scale]:
        """Return the operations of a program whose results are in the same tensor as this one's, including this one."""
        return _made_together(self, program)


class Shift(Operation, frozen=True, kw_only=True):
    """The sum of the input and a number."""

    number: float


class Add(Operation, frozen=True, kw_only=True):
    """The sum of two inputs."""

    residual: str | None = None
    """The input that bypasses the branch."""


class Choose(Operation, frozen=True, kw_only=True):
    """The choice of experts: the `top_k` largest of a router's scores, as weights. See `MixtureOfExperts` for the
    fields.

    The operation's bias, if there is one, is added only for the choice. Its weight is a factor per expert, which the
    final weights are multiplied by.
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
    """Whether they are computed in at least fp32."""
    jitter: float | None = None
    biased: Literal["scores", "logits"] = "scores"


class Gather(Operation, frozen=True, kw_only=True):
    """The tokens in the order of the experts that were chosen for them, once per expert. With `weighs`, they are
    multiplied by the weight of the expert.
    """

    weighs: bool = False


class Combine(Operation, frozen=True, kw_only=True):
    """The weighted sum of the outputs of a token's experts."""

    wide: bool = True
    """Whether the weights are in at least fp32."""
    one_by_one: bool = False
    """Whether the experts are added one after the other."""
    weighs: bool = True
    """Whether the outputs are multiplied by the weights. Otherwise the inputs were."""


class AltUp(Operation, frozen=True, kw_only=True):
    """A step with several streams per token, (streams, B, T, hidden).

    - split: the first input, and the other inputs scaled to its length, become streams
    - pick: the stream `index` of `count`
    - predict: every stream plus the sum of all streams, weighted by a number per pair of streams
    - correct: the predicted streams, each plus a factor times the difference between the second input and the stream
      `index`
    - spread: the streams, with the second input added to all except the first
    - join: the mean of the first input and of the others, scaled to its length
    """

    step: Literal["split", "pick", "predict", "correct", "spread", "join"]
    index: int = 0
    count: int = 1


# fmt: off
AnyOperation = (
    Tokens | Stream | Given | Embed | Positions | NormOperation | Linear | Rotate | CacheOperation | Concat | Scores
    | Alibi | Cap | Softmax | Mix | Scan | Convolve | Activation | Product | Scale | Shift | Add | Choose | Gather
    | Combine | Temper | Sparse | AltUp | Pairs | Blend
)
# fmt: on
"""The closed vocabulary of operations. A `match` over it ends with `raise unknown(…)`."""

Program = tuple[AnyOperation, ...]
"""Operations in an order in which they can be evaluated. The result of the last one is the program's result."""


def unknown(operation: Never, walk: str) -> ConfigError:
    """Return the error for an operation that a `match` in the function `walk` has no case for."""
    return ConfigError(f"{walk} has no entry for the operation {type(operation).__name__} ({operation.id})")


# --- parts of programs that several components have ------------------------------------------------------------------


def linear(
    node: Component, name: str, path: str, source: str, shape: Sizes, row: str, held: str = "", **fields: Any
) -> Linear:
    """Return the linear operation `name` of a component at `path`, with the parameters of that name."""
    own = {key.partition(".")[2]: value for key, value in node.shapes().items() if key.partition(".")[0] == name}
    weights, arithmetic = tuple(own.items()), getattr(node, "arithmetic", "linear")
    fields = {"arithmetic": arithmetic, "inputs_wide": own["weight"][1], **fields}
    return Linear(f"{path}.{name}", (source,), shape, row, weights, held=held, **fields)


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
    """Yield the operations of attention, softmax(cap(q·kᵀ · scale + bias))·v.

    The inputs are q (B, T, heads, query dim), k and v (B, S, kv heads, …). `scores` has fields of `Scores`, and `wide`
    is the field of `Softmax`. `sinks` says how a sink acts, if there is one. `keys` is "U" if the keys are those of the
    source.
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
    """Yield the operations, counted under another row: a norm within attention counts as attention."""
    return (msgspec.structs.replace(each, row=row) for each in operations)
