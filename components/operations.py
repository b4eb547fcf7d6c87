"""What components do: the closed vocabulary of operations, of which each component's `operations` is a short program.

An operation names its inputs and the weights that it reads, says the shape of its result, and has the fields of its
component that it needs. Who asks what a model costs, keeps or looks like walks over operations, with one entry for
each, and never asks which component they come from. So a new component that does known things is known to every walk,
and an operation that a walk does not know is refused by its name (`unknown`). No torch.

Sizes of a shape are numbers or B (sequences), T (tokens of each), S (tokens in sight, those in the cache included) and
U (tokens of the source that an encoder has read).
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
    """One operation.

    id: a module's name within its block, or a name for what has no weights; unique in a program. inputs: ids, in the
    order of the operation's arguments. shape: of the result. row: under which row of a table of costs its products and
    its result are counted. weights: the module's own, by name. copies: so many modules alike, of which a token takes
    some. apart: so many are run one after the other, each on its share of the tokens. held: the id of the operation
    until which the module has a name for the result; without one it is gone after its last use. tied: the operation
    whose weights it uses. kept_wide: its result stays in fp32 at least.
    """

    id: str
    inputs: tuple[str, ...]
    shape: Sizes
    row: str
    weights: tuple[tuple[str, Shape], ...] = ()
    copies: int = 1
    apart: int = 1
    held: str = ""
    tied: str | None = None
    kept_wide: bool = False

    @property
    def parameters(self) -> int:
        """Stored under this operation, all copies together."""
        return self.copies * sum(math.prod(shape) for _, shape in self.weights)

    def numbers(self, **symbols: int) -> int:
        """Elements of the result for given B, T and S; of a source there are as many tokens where nobody says U."""
        symbols = {"U": symbols.get("T", symbols.get("S", 1)), **symbols}
        return math.prod(size if isinstance(size, int) else symbols[size] for size in self.shape)


class Tokens(Operation, frozen=True, kw_only=True):
    """The ids of tokens, or with `types` of which segment each is, (B, T)."""

    types: bool = False


class Stream(Operation, frozen=True, kw_only=True):
    """What goes on as it is: a block's input, which the block before it gave, or what passes by a branch."""


class Given(Operation, frozen=True, kw_only=True):
    """What another part of the model made for this one, in `words`; its input is that part's result, where that has a
    name of its own in the whole model. again: it is kept there, as keys of a layer are.
    """

    words: str
    again: bool = False


class Embed(Operation, frozen=True, kw_only=True):
    """The rows of a table that ids name."""


class Positions(Operation, frozen=True, kw_only=True):
    """A row of a table for each token's position and `offset`. Tokens of the id `padding` are not counted, so that each
    text of a batch has positions of its own: (B, T, hidden), and not (T, hidden).
    """

    offset: int = 0
    padding: int | None = None


class NormOperation(Operation, frozen=True, kw_only=True):
    """Rows divided by a statistic of theirs, and multiplied by a gain.

    kind, formula: what its component says it is. lies: where rows are before the gain: inside a "kernel", or, as steps
    in fp32 at least, in tensors of the "input"'s dtype or of "float32". statistics: numbers a row that are kept for the
    backward pass. gain: what is multiplied by. centred: rows without their mean are a tensor of their own, and the gain
    is taken in fp32 at least. narrowed: of a stream in fp32, which it reads as narrow as the model is.
    """

    kind: str
    formula: str
    lies: Literal["kernel", "input", "float32"]
    statistics: int = 1
    gain: Literal["weight", "1 + weight", "none"] = "weight"
    centred: bool = False
    narrowed: bool = False


class Linear(Operation, frozen=True, kw_only=True):
    """x·Wᵀ, and b where there is one; the last dimension is cut into heads as the shape says.

    together: a name that projections of one input share which are made at once, with `fused` in one matrix product, in
    whose result the rows lie in `groups`, and out of which this one's are `copied`. joined: their results are put side
    by side in a tensor of their own. choice: the input that tells which of the copies a token takes. window: of the
    cached tokens that it reads, how many are seen. wide: its input is taken in fp32 at least, and with "both" its
    weight too, of which it makes a copy. by_channel: so its input lies, which of several sequences is copied.
    """

    inputs_wide: int
    wide: Literal["", "input", "both"] = ""
    arithmetic: Arithmetic = "linear"
    together: str = ""
    fused: bool = False
    groups: int = 1
    copied: bool = False
    joined: bool = False
    choice: str | None = None
    window: int | None = None
    by_channel: bool = False

    @property
    def bias(self) -> bool:
        return any(name == "bias" for name, _ in self.weights)

    def made_together(self, program: Iterable[Operation]) -> list[Linear]:
        """The linears of its program that are made at once with this one, which is among them."""
        return _made_together(self, program)


def _made_together(one: _Joined, program: Iterable[Operation]) -> list[_Joined]:
    alike = (each for each in program if isinstance(each, type(one)))
    return [each for each in alike if each is one or (one.together and each.together == one.together)]


class Rotate(Operation, frozen=True, kw_only=True):
    """Rotary positions on `parts` parts of a head, one behind the other, the first from its element `start` on."""

    rotary: Turning
    start: int = 0
    parts: int = 1

    @property
    def turned(self) -> int:
        """Elements of a head that turn."""
        return self.parts * self.rotary.dim


class Temper(Operation, frozen=True, kw_only=True):
    """Each token's elements times a number that grows with its position."""

    temperature: Temperature


class CacheOperation(Operation, frozen=True, kw_only=True):
    """x of the earlier tokens, then x of these: T becomes S. Of a window all but one token are kept for the next step.

    repeats: how often a head is there behind the cache, and in the cache of transformers. ours: no family of
    transformers has such a cache. as_given: without one they are as they were, not copied head by head. once: they are
    the source's, are all there after the first step, and do not grow.
    """

    window: int | None = None
    repeats: int = 1
    ours: bool = False
    as_given: bool = False
    once: bool = False


class Concat(Operation, frozen=True, kw_only=True):
    """Parts of a token's numbers side by side, or of a key; what has fewer heads than the result is shared by all."""


class Scores(Operation, frozen=True, kw_only=True):
    """q·kᵀ · scale, (B, heads, T, S); query heads in groups where there are fewer key heads.

    wide: the product is made in fp32 at least. broadcast: key heads become query heads inside the matrix product, which
    no fused kernel does. written: they are written out under every kernel. causal: see `Softmax`.
    """

    scale: float
    query_dim: int
    kv_heads: int
    window: int | None = None
    chunked: bool = False
    causal: bool = True
    wide: bool = False
    broadcast: bool = False
    written: bool = False

    @property
    def heads(self) -> int:
        return self.shape[1]  # type: ignore[return-value]


class Alibi(Operation, frozen=True, kw_only=True):
    """Scores + slope(head) · position of the key, times the scores' scale where the bias is `scaled`."""

    alibi: Biasing
    scale: float


class Cap(Operation, frozen=True, kw_only=True):
    """limit · tanh(x / limit), or with `hard` x itself up to the limit on either side of 0, and no further."""

    limit: float
    hard: bool = False


class Softmax(Operation, frozen=True, kw_only=True):
    """Over the keys that a query may see: itself and what is before it, `window` of them at most, or with
    `chunked` those of its own chunk of so many. Where it is not `causal` what comes behind it too, as far.

    wide: in fp32 at least, or else in the dtype of the scores. Its weight, where it has one, is a score a head of a key
    without a value, beside those of the keys (a sink), which are first made less by the largest; with `sunk` "in
    float32" they are not, and "behind it" it is not among these, and their sum is multiplied by what is left to them.
    """

    window: int | None = None
    chunked: bool = False
    causal: bool = True
    wide: bool = True
    sunk: Literal["in softmax", "in float32", "behind it"] = "in softmax"


class Mix(Operation, frozen=True, kw_only=True):
    """The values' sum, each with its weight; heads in groups as for the scores. (B, T, heads, value dim)."""

    window: int | None = None
    chunked: bool = False
    causal: bool = True


class Scan(Operation, frozen=True, kw_only=True):
    """A recurrence over tokens: each reads a state that the one before it left.

    state: its shape for one sequence, all that is carried from token to token. title, formula: what its component says
    it is. saved: how many tensors of the result's size the steps keep for the backward pass beside the inputs.
    products: how many multiplications a token are matrix products (of keys with values, say), not element by element.
    wide: it is computed, and its state kept, in fp32 at least. theirs: numbers that transformers' cache holds of it;
    None where none of its families has such a state.

    chunk: tokens that are read at once are taken in chunks of so many, the last of them filled up with zeros; each
    takes `chunk_products` multiplications, of which the first is `spared` those with a state; at the worst moment there
    are `alive` numbers a token of all chunks beside inputs and result, and `within` of the chunk that is taken, the
    first or one behind it. States of chunks may be sums over all of them, the one before the first among them, which
    takes `between` multiplications for each with each. Chunks are made again for the backward pass, which keeps none of
    their steps; so are steps of single tokens with `again`. narrow: what is `alive` is in the model's dtype.
    """

    state: Shape
    title: str
    formula: str
    saved: int = 1
    products: int = 0
    wide: bool = False
    theirs: int | None = None
    narrow: bool = False
    chunk: int = 1
    chunk_products: int = 0
    spared: int = 0
    between: int = 0
    alive: int = 0
    again: bool = False
    within: tuple[int, int] = (0, 0)


class Convolve(Operation, frozen=True, kw_only=True):
    """A causal convolution over `width` tokens, a kernel a channel; the last `width` of them are carried. It is made of
    a tensor with tokens and channels exchanged, of `width` tokens at least, with zeros before and behind them. joined:
    its kernels are put together with others in a tensor of their own. carried: of how many tokens behind it something
    is left, where not of `width`; one token is then a sum of products, and no convolution.
    """

    width: int
    joined: bool = False
    carried: int | None = None


class Pairs(Operation, frozen=True, kw_only=True):
    """Each token's input beside that of the token before, (B, T, 2, hidden), which is zeros for the first. The last one
    is carried.
    """


class Blend(Operation, frozen=True, kw_only=True):
    """w · x + (1 − w) · y of pairs of x and y, w its weight, a number a column."""


class Activation(Operation, frozen=True, kw_only=True):
    """A function of each element. wide: in fp32 at least, and "rounded" behind it, or "kept" so."""

    function: Function
    wide: Literal["", "rounded", "kept"] = ""


class Sparse(Operation, frozen=True, kw_only=True):
    """What of each element is above the number below which `share` of a row lie where it is normal, and 0 of others."""

    share: float


class Product(Operation, frozen=True, kw_only=True):
    """Element by element; `in_place` writes over the first factor where no gradient is wanted."""

    in_place: bool = False


class Scale(Operation, frozen=True, kw_only=True):
    """The input times a number, and times its weight, where it has one: a number too, and one that is not trained, or
    one a column. together: a name that those share whose results lie side by side in one tensor.
    """

    factor: float
    together: str = ""

    def made_together(self, program: Iterable[Operation]) -> list[Scale]:
        """Those of its program whose results lie beside this one's, which is among them."""
        return _made_together(self, program)


class Shift(Operation, frozen=True, kw_only=True):
    """The input and a number."""

    number: float


class Add(Operation, frozen=True, kw_only=True):
    """The sum. residual: which input came past a branch."""

    residual: str | None = None


class Choose(Operation, frozen=True, kw_only=True):
    """The `top_k` largest of a router's scores, a softmax over all or a sigmoid of each, divided by their sum
    and `added` with `normalise` and times `multiplier`. With `groups` of experts they are chosen from the `top_groups`
    best of these, by the sum of the `group_best` largest in each. Its bias, where it has one, is added for the
    choice alone, to scores or to logits (`biased`); its weight is a factor of each expert, by which what it is
    weighed by is multiplied in the end. of_chosen: scores are made of the chosen experts' logits alone. wide: in
    fp32 at least. jitter: each is weighed by a softmax of its own, see `MixtureOfExperts`.
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
    wide: bool = True
    jitter: float | None = None
    biased: Literal["scores", "logits"] = "scores"


class Gather(Operation, frozen=True, kw_only=True):
    """Tokens in the order of the experts that were chosen for them, each once for each of its experts, and
    with `weighs` times the weight of that.
    """

    weighs: bool = False


class Combine(Operation, frozen=True, kw_only=True):
    """Outputs of the experts that were chosen, and their weights -> the weighted sum of each token.

    wide: weights are in fp32 at least. one_by_one: one expert after the other is added. Without `weighs` it is a sum of
    what has been weighed before.
    """

    wide: bool = True
    one_by_one: bool = False
    weighs: bool = True


class AltUp(Operation, frozen=True, kw_only=True):
    """A step with several streams of a token, (streams, B, T, hidden).

    - split: the first input, and each other as long as it, become streams
    - pick: the stream `index` of `count`
    - predict: each stream and the sum of all times a token's numbers, one for each pair of streams
    - correct: the predicted streams, each with a number times what the second input is off the one with `index`
    - spread: the streams with the second input added to all but the first
    - join: the mean of the first input and each other, as long as it
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
"""The vocabulary, which is closed: a `match` over it ends with `raise unknown(…)`."""

Program = tuple[AnyOperation, ...]
"""Operations in an order in which they can be evaluated; the last one's result is the program's."""


def unknown(operation: Never, walk: str) -> ConfigError:
    """What the last entry of every `match` over operations raises: it names the operation and the walk."""
    return ConfigError(f"{walk} has no entry for the operation {type(operation).__name__} ({operation.id})")


# --- parts of programs that several components have ------------------------------------------------------------------


def linear(
    node: Component, name: str, path: str, source: str, shape: Sizes, row: str, held: str = "", **fields: Any
) -> Linear:
    """The linear `name` of a component at `path`, with that component's parameters of the name."""
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
    """softmax(cap(q·kᵀ · scale + bias))·v of q (B, T, heads, query dim), k and v (B, S, kv heads, …).

    scores: the fields of `Scores`. wide: of `Softmax`. sinks: whether it has a weight, and where. keys: whose they are.
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
    """The same with their results counted under another row: a norm within attention is attention's."""
    return (msgspec.structs.replace(each, row=row) for each in operations)
