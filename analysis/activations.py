"""What autograd keeps of a forward pass for the backward pass, from shapes alone.

Korthikanti et al. (2205.05198, section 4.1) count it for one kind of layer: s·b·h·(34 + 5·a·s/h) bytes of 16-bit
numbers. Here a tree's operations are followed, and each tells what torch's autograd keeps of it in gptkit's modules: a
product keeps its factors, softmax its result, an activation its input, and so on; a tensor that several operations keep
is there once, views of one are one. Weights are not counted. Tests hold all figures to what torch keeps, byte for byte;
transformers' own models keep the same with "eager", but for BLOOM's gelu, and within a tenth of it with "sdpa".

Two ways of attention, as in `modules.attention`: "sdpa", whose fused kernels keep queries, keys, values, the output and
one number a row instead of scores, and "eager". torch has no fused kernel where keys are broadcast to the query heads
(Falcon with one key head) or where queries are not as wide as values (latent attention): there sdpa writes the scores
out as well, in fp32 whatever the dtype.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..components import Activation, ModelSpec
from ..components import operations as ops

Kernel = Literal["sdpa", "eager"]

FLOAT, _LONG = 4, 8
"""Bytes of fp32, in which norms, softmax and the loss are computed at least, and of a token's or row's number."""


class _ActivationCost(msgspec.Struct, frozen=True):
    """kept: tensors that an activation keeps for the backward pass beside its result, which the product behind it keeps
    anyway: its input (unless `input` is False), and what it computes in steps. alive: tensors at once while it is
    computed: its input, its result, and what it has in hand. result: whether it keeps its result.
    """

    kept: int = 1
    alive: int = 2
    input: bool = True
    result: bool = False


_USUAL: tuple[Activation, ...] = ("gelu", "gelu_tanh", "silu", "mish", "hardswish", "relu6", "leaky_relu")
ACTIVATION_COSTS: dict[Activation, _ActivationCost] = {
    **dict.fromkeys(_USUAL, _ActivationCost()),
    "gelu_python": _ActivationCost(3, 4, input=False),
    "gelu_new": _ActivationCost(4, 4),
    "gelu_bloom": _ActivationCost(7, 5),
    "gelu_fast": _ActivationCost(7, 5),
    "gelu_10": _ActivationCost(2, 3),
    "quick_gelu": _ActivationCost(2, 3),
    "relu": _ActivationCost(0, input=False, result=True),
    "sigmoid": _ActivationCost(0, input=False, result=True),
    "tanh": _ActivationCost(0, input=False, result=True),
    "relu2": _ActivationCost(1, 3, input=False),
    "laplace": _ActivationCost(1, 3, input=False),
    "sqrtsoftplus": _ActivationCost(1, 3),
    "linear": _ActivationCost(0, input=False),
    "xielu": _ActivationCost(4, 5),
}


@dataclass(frozen=True)
class Pass:
    """A forward pass over `batch` sequences of `tokens` tokens, in numbers of `size` bytes."""

    tokens: int
    batch: int
    size: int
    kernel: Kernel = "sdpa"

    @property
    def rows(self) -> int:
        return self.tokens * self.batch

    @property
    def wide(self) -> int:
        """Bytes of a number where fp32 is the least."""
        return max(self.size, FLOAT)


def kept(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """Bytes kept for the backward pass of a tree and its loss, by component.

    "norms", "attention" (with the tables of rotary positions), "scores" (and masks that kernels are handed),
    "feed-forward", "router", "embedding" (what tells which rows were read), and "loss": the logarithms of all
    probabilities in fp32, and the targets.

    Raises:
        MissingComponent: a tree with an encoder.
    """
    spec.one_stack("estimating the memory of training")
    programs = {block: spec.block_operations(block) for block in dict.fromkeys(spec.blocks)}
    layers = {block: Keeping(program, run) for block, program in programs.items()}
    first = layers[spec.blocks[0]]
    found = Counter(_ends(spec, run, first.keeps(first.program[0])))
    for block, number in Counter(spec.blocks).items():
        found.update({name: value * number for name, value in layers[block].found.items()})
    found["attention"] += tables(run, (each for program in programs.values() for each in program))
    return {name: found[name] for name in dict.fromkeys((*_COMPONENTS, *found)) if found[name]}


def kept_by_checkpointing(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """The same where layers keep their input alone, and are run again one at a time (Chen et al. 1604.06174): the
    largest layer's are there once, under "layer". Raises as `kept`.
    """
    spec.one_stack("estimating the memory of training")
    wide = sum(block.wide for block in spec.blocks[:-1])  # whose result is the next one's input
    inputs = run.rows * spec.stream_size * (wide * run.wide + (len(spec.blocks) - wide) * run.size)
    programs = [spec.block_operations(block) for block in set(spec.blocks)]
    largest = max(Keeping(program, run).found.total() + tables(run, program) for program in programs)
    return {"inputs": inputs, "layer": largest, **_ends(spec, run, True)}


_COMPONENTS = ("embedding", "norms", "attention", "scores", "feed-forward", "router", "loss")


def _ends(spec: ModelSpec, run: Pass, stream: bool) -> dict[str, int]:
    """What is kept outside of the layers; `stream` says that what the first one reads is kept with the layers."""
    program = spec.before_blocks()
    before = Keeping(program, run)
    found = before.found + Keeping(spec.after_blocks(), run).found
    if stream and before.keeps(program[-1]):
        found[before.views[program[-1].id].storage.row] -= run.rows * spec.stream_size * run.size
    found["loss"] = run.rows * (spec.has_head().vocab_size * FLOAT + _LONG)
    return {name: found[name] for name in dict.fromkeys((*_COMPONENTS, *found)) if found[name]}


def tables(run: Pass, operations: Iterable[ops.AnyOperation]) -> int:
    """Bytes of the tables of rotary positions, one of cosines and one of sines each, which all layers share; of complex
    numbers there is one, of a number a pair.
    """
    rotaries = {each.rotary for each in operations if isinstance(each, ops.Rotate)}
    sizes = {"input": 2 * run.size, "complex": run.wide}
    return sum(
        run.tokens * rotary.dim * sizes.get(getattr(rotary, "rounding", "input"), 2 * run.wide) for rotary in rotaries
    )


# --- attention -------------------------------------------------------------------------------------------------------


class Mixing(msgspec.Struct, frozen=True):
    """Operations that kernels compute together: from queries and keys to the sum of values."""

    scores: ops.Scores
    alibi: ops.Alibi | None
    cap: ops.Cap | None
    softmax: ops.Softmax
    mix: ops.Mix

    @property
    def value_dim(self) -> int:
        return int(self.mix.shape[-1])

    def way(self, kernel: Kernel = "sdpa") -> Literal["fused", "unfused", "eager"]:
        """How scores are made: by a fused kernel, which keeps none; by torch's own other path, in fp32 at least; or
        written out by the modules. Under "sdpa" too the modules write out a cap, sinks, a bias outside the scale, and
        what says so.
        """
        outside = self.alibi is not None and not self.alibi.alibi.fused
        if kernel == "eager" or self.cap is not None or self.softmax.weights or outside or self.scores.written:
            return "eager"
        spread = self.scores.broadcast and self.scores.kv_heads < self.scores.heads
        return "unfused" if spread or self.scores.query_dim != self.value_dim else "fused"

    def sizes(self, run: Pass) -> tuple[int, int, int]:
        """Bytes a number where scores are written out: of queries and keys, of the softmax, of what weighs values."""
        if self.way(run.kernel) == "unfused":
            return run.wide, run.wide, run.wide
        scored = run.wide if self.scores.wide else run.size
        return scored, run.wide if self.softmax.wide else scored, run.size

    def is_masked(self, tokens: int) -> bool:
        """Whether a kernel is handed a mask, and not left to its own causal one."""
        window = self.softmax.window
        return self.alibi is not None or (window is not None and tokens >= window)

    def pairs(self, run: Pass) -> int:
        return run.batch * self.scores.heads * run.tokens**2

    def mask(self, run: Pass) -> int:
        if not self.is_masked(run.tokens):
            return 0
        return (run.tokens**2 if self.alibi is None else self.pairs(run)) * run.size

    def key_heads(self, heads: int, run: Pass) -> int:
        """Heads that are kept of so many keys and values: before or after each is repeated for its query heads."""
        fused = self.way(run.kernel) == "fused"
        if heads == 1 and (fused or run.batch == 1):
            return 1  # a view shows it to every query head
        # The fused kernel is handed groups of query heads as they are, if a head has no more elements than this.
        grouped = fused and not self.is_masked(run.tokens) and self.scores.query_dim <= 256
        return heads if grouped else self.scores.heads


def mixings(program: Iterable[ops.AnyOperation]) -> list[Mixing]:
    """The attentions of a program."""
    by_name = {each.id: each for each in program}
    found = []
    for mix in (each for each in by_name.values() if isinstance(each, ops.Mix)):
        chain = [by_name[mix.inputs[0]]]
        while not isinstance(chain[-1], ops.Scores):
            chain.append(by_name[chain[-1].inputs[0]])
        by_kind = {type(each): each for each in chain}
        parts = (by_kind.get(kind) for kind in (ops.Scores, ops.Alibi, ops.Cap, ops.Softmax))
        found.append(Mixing(*parts, mix))  # type: ignore[call-arg, arg-type]
    return found


def ways(program: Iterable[ops.AnyOperation], kernel: Kernel = "sdpa") -> set[str]:
    """How the scores of a program are made; empty where it has none."""
    return {each.way(kernel) for each in mixings(program)}


# --- what operations keep --------------------------------------------------------------------------------------------


class _Storage(msgspec.Struct, eq=False):
    """Memory that tensors are views of. kept: by the id of the one that is kept, its bytes and their row.
    kept_elsewhere: that it is counted with another block.
    """

    size: int
    row: str
    kept: dict[str, tuple[str, int]] = {}
    kept_elsewhere: bool = False


class _View(msgspec.Struct, eq=False):
    """A result. heads_first: whether a head's rows lie together, and not a token's heads. whole: bytes of the tensor of
    which it is the end, where a convolution is over more tokens than there are.
    """

    id: str
    storage: _Storage
    size: int
    heads: int = 1
    heads_first: bool = False
    whole: int = 0


class Keeping:
    """Follows a program. found: what autograd keeps of it, by row, without the tables that all layers share. A tensor
    is counted under the row of what made it, but a norm's input under "norms".

    Raises:
        ConfigError: an operation that is not in the vocabulary.
    """

    def __init__(self, program: ops.Program, run: Pass) -> None:
        self.program, self.run = program, run
        self.mixings = {each.mix.id: each for each in mixings(program)}
        self.views: dict[str, _View] = {}
        self.storages: list[_Storage] = []  # of which a view is kept
        self.products: dict[str, _Storage] = {}
        self.firsts: dict[str, _View] = {}  # of pairs
        self.looked_up: list[list[str]] = []
        self.found: Counter[str] = Counter()
        for each in program:
            self.views[each.id] = self._follow(each)
        for storage in (each for each in self.storages if not each.kept_elsewhere):
            self.found[storage.row] += storage.size  # a view keeps all that it is a view of
            for row, size in storage.kept.values():
                self.found[row] += size
                self.found[storage.row] -= size

    def keeps(self, operation: ops.AnyOperation) -> bool:
        """Whether autograd keeps an operation's result."""
        view = self.views[operation.id]
        return view.id in view.storage.kept

    def _bytes(self, operation: ops.AnyOperation) -> int:
        run = self.run
        itemsize = run.wide if operation.kept_wide else run.size
        return operation.numbers(B=run.batch, T=run.tokens, S=run.tokens) * itemsize

    def _given(self, operation: ops.AnyOperation, index: int = 0) -> _View:
        """An input; what a program is given from outside is as large as what reads it, or as a linear's rows."""
        name = operation.inputs[index]
        if name not in self.views:
            size = self._bytes(operation)
            if isinstance(operation, ops.Linear):
                size = self.run.rows * operation.inputs_wide * self.run.size
            elif isinstance(operation, ops.AltUp) and operation.step == "pick":
                size *= operation.count
            self.views[name] = _View(name, _Storage(size, "norms"), size)
        return self.views[name]

    def _keep(self, view: _View, row: str = "") -> None:
        if not view.storage.kept:
            self.storages.append(view.storage)
        view.storage.kept.setdefault(view.id, (row or view.storage.row, view.size))

    def _follow(self, operation: ops.AnyOperation) -> _View:
        """What an operation keeps, and where its result lies."""
        run, found, size = self.run, self.found, self._bytes(operation)
        numbers = operation.numbers(B=run.batch, T=run.tokens, S=run.tokens)
        heads = operation.shape[2] if len(operation.shape) == 4 else 1
        result = _View(operation.id, _Storage(size, operation.row), size, heads if isinstance(heads, int) else 1)
        match operation:
            case ops.Given() | ops.Stream() if operation.inputs and operation.inputs[0] in self.views:
                return self.views[operation.inputs[0]]
            case ops.Given():
                result.storage.kept_elsewhere = operation.again
                result.heads_first = operation.again
            case ops.Scale(weights=((_, shape),)) if shape != (1,):  # one of a number is not trained
                self._keep(self._given(operation))
            case ops.Scale(together=name) if name:
                whole = sum(map(self._bytes, operation.made_together(self.program)))
                result.storage = self.products.setdefault(name, _Storage(whole, operation.row))
            case ops.Tokens() | ops.Stream() | ops.Add() | ops.Scale() | ops.Shift():
                pass
            case ops.Pairs():  # of which each token's own is there
                result.size = result.storage.size = size // 2
                self.firsts[operation.id] = self._given(operation)
            case ops.Blend():
                self._keep(self.firsts[operation.inputs[0]])
                self._keep(self._given(operation))
                found[operation.row] += int(operation.shape[-1]) * run.size  # 1 less its weight
            case ops.AltUp():
                result = self._in_streams(operation, result)
            case ops.Sparse():
                self._keep(self._given(operation))
                self._keep(result)
                found[operation.row] += size // int(operation.shape[-1])  # the deviation of each row
            case ops.Temper():
                found[operation.row] += run.tokens * (
                    run.size if operation.temperature.counts == "positions" else FLOAT
                )
            case ops.Linear(wide=wide) if wide and run.size < run.wide:  # copies in fp32
                found[operation.row] += run.rows * operation.inputs_wide * run.wide
                found[operation.row] += operation.parameters * run.wide if wide == "both" else 0
            case ops.Positions(weights=()):
                pass
            case ops.Scores() | ops.Alibi() | ops.Softmax():
                pass  # with the mix, which kernels compute together with them
            case ops.Embed() | ops.Positions():  # which rows were read
                ids = [self.views[name].id for name in operation.inputs]
                if ids not in self.looked_up:
                    alike = isinstance(operation, ops.Positions) and operation.padding is None
                    found["embedding"] += (run.tokens if alike else run.rows) * _LONG
                self.looked_up.append(ids)
            case ops.Norm():
                width, inside = int(operation.shape[-1]), operation.lies == "kernel"
                narrowed = operation.narrowed and run.size < run.wide
                if inside or (self._given(operation).size == numbers * run.wide and not narrowed):
                    self._keep(self._given(operation), "norms")
                else:  # a copy of its input in fp32
                    found["norms"] += numbers * run.wide
                found["norms"] += numbers // width * operation.statistics * (run.size if inside else run.wide)
                multiplied = run.wide if operation.lies == "float32" else run.size  # by the gain
                if operation.gain != "none" and not inside:
                    found["norms"] += numbers * multiplied
                copied = operation.centred and operation.gain == "weight" and run.size < run.wide
                joined = sum(name.endswith("weight") for name, _ in operation.weights) > 1
                if operation.gain == "1 + weight" or copied or joined:  # which is a tensor of its own
                    found["norms"] += width * multiplied
            case ops.Convolve(width=width):
                result.whole = size // run.tokens * max(run.tokens, width)
                if operation.joined or run.tokens < width:
                    found[operation.row] += result.whole
                else:
                    self._keep(self._given(operation))
                found[operation.row] += (
                    math.prod(dict(operation.weights)["weight"]) * run.size if operation.joined else 0
                )
                result.storage.size = result.whole + (width - 1) * size // run.tokens
            case ops.Linear():
                if operation.by_channel and run.batch > 1 and run.tokens > 1:
                    first = operation is operation.made_together(self.program)[0]
                    found[operation.row] += self._given(operation).size if first else 0
                else:
                    self._keep(self._given(operation))
                # Rows of q, k and v in one product may lie in any order where heads are so wide; else they are copied.
                unaligned = int(operation.shape[-1]) * run.size % 16 != 0
                if operation.fused and not operation.copied and not (1 < operation.groups < result.heads and unaligned):
                    whole = sum(map(self._bytes, operation.made_together(self.program)))
                    result.storage = self.products.setdefault(operation.together, _Storage(whole, operation.row))
            case ops.Rotate():
                whole = operation.shape[-1] == operation.rotary.dim and not getattr(operation.rotary, "joined", False)
                # If not, it is put together of parts, head by head.
                result.heads_first = self._given(operation).heads_first if whole else True
            case ops.Cache():
                result = self._cached(operation, result)
            case ops.Concat():
                result.heads_first = True

            case ops.Cap():
                if operation.hard:
                    self._keep(self._given(operation))
                elif operation.row != "scores":
                    self._keep(result)  # the hyperbolic tangent's
            case ops.Mix():
                result = self._mixed(operation, self.mixings[operation.id])
            case ops.Scan():
                for index in range(len(operation.inputs)):
                    self._keep(self._given(operation, index))
                found[operation.row] += operation.saved * size
            case ops.Activation():
                cost = ACTIVATION_COSTS[operation.function]
                narrow = bool(operation.wide) and run.size < run.wide
                if cost.input and not narrow:
                    self._keep(self._given(operation))
                if narrow:  # a copy of its input or of its result, which no other operation reads
                    found[operation.row] += numbers * run.wide
                elif cost.result:
                    self._keep(result)
                size = result.storage.size = max(size, self._given(operation).whole)
                if operation.wide == "kept":
                    result.storage.size = result.size = numbers * run.wide
                found[operation.row] += (cost.kept - cost.input) * size
                if operation.weights:  # which elements are above 0, and what is made of each number learnt for a side
                    found[operation.row] += numbers + 2 * run.size
            case ops.Product():
                self._keep(self._given(operation))
                self._keep(self._given(operation, 1))
            case ops.Choose(top_k=top_k):
                # Scores of all or of the chosen; which experts were taken; their weights and these weights' sums.
                size = run.wide if operation.wide else run.size
                each = top_k if operation.of_chosen else operation.experts
                if operation.biased == "logits":  # those of all, of which some are taken
                    found[operation.row] += run.rows * operation.experts * size
                if operation.jitter is not None:  # scores for each of the chosen, and what is left out of them
                    found[operation.row] += run.rows * operation.experts * ((top_k - 1) * size + top_k)
                found[operation.row] += run.rows * each * size + numbers * _LONG
                if operation.normalise and not (operation.of_chosen and operation.scores == "softmax"):
                    found[operation.row] += (run.rows if operation.of_chosen else numbers + run.rows) * size
                if "weight" in dict(operation.weights):  # what is multiplied by each expert's factor, and that
                    found[operation.row] += numbers * (size + run.size)
                if operation.groups > 1:  # the best of each, the best of these, and what is left out
                    places = (operation.group_best * operation.groups + operation.top_groups) * _LONG + operation.groups
                    found[operation.row] += run.rows * places
            case ops.Gather():
                chosen = self._given(operation, 1)
                found[chosen.storage.row] += chosen.size // run.size * _LONG  # the order by expert
                if operation.weighs:  # weights in that order, what they multiply, and how it comes about
                    found[operation.row] += size
            case ops.Combine():
                chosen, outputs = self._given(operation), self._given(operation, 1)
                weight = run.wide if operation.wide else run.size
                if operation.weighs:
                    self._keep(outputs)
                # That order, the way back, and the weights; or one after the other, weighted.
                found[chosen.storage.row] += chosen.size // run.size * (2 * _LONG + weight)
                if operation.one_by_one:
                    found[outputs.storage.row] += outputs.size
                    found[chosen.storage.row] -= chosen.size // run.size * _LONG
            case _:
                raise ops.unknown(operation, "the memory of training")
        return result

    def _in_streams(self, operation: ops.AltUp, result: _View) -> _View:
        """What a step with several streams keeps, and its result: a view of a stream is one of all."""
        run, first = self.run, self._given(operation)
        match operation.step:
            case "pick":
                return _View(operation.id, first.storage, result.size)
            case "predict":
                self._keep(first)
                self._keep(self._given(operation, 1))
            case "correct":  # what the second input is off, and the numbers that it is multiplied by
                coefficients = self._given(operation, 2)
                self.found[operation.row] += self._given(operation, 1).size + coefficients.size
            case "split" | "join":  # of the others: themselves, times the length wanted, and three numbers of length
                self._keep(first)
                others = [self._given(operation, index) for index in range(1, len(operation.inputs))]
                for other in others:
                    self._keep(other)
                lengths = 2 * run.rows * run.size
                self.found[operation.row] += sum(other.size + lengths for other in others) + lengths
        return result

    def _cached(self, operation: ops.Cache, result: _View) -> _View:
        """Keys and values lie as behind a cache, head by head, whether or not there is one."""
        given, repeats = self._given(operation), operation.repeats
        if operation.as_given:
            return given
        if repeats > 1:
            size = repeats * result.size
            return _View(operation.id, _Storage(size, operation.row), size, repeats * result.heads, heads_first=True)
        if given.size == given.storage.size and (given.heads_first or result.heads == 1):
            return given
        result.heads_first = True
        return result

    def _mixed(self, operation: ops.Mix, mixing: Mixing) -> _View:
        """What softmax(q·kᵀ)·v keeps, and its result, which is copied where it does not lie token by token."""
        run, found, row = self.run, self.found, operation.row
        q, k, v = self._given(mixing.scores), self._given(mixing.scores, 1), self._given(operation, 1)
        heads, size = mixing.scores.heads, self._bytes(operation)
        way, (scored, softmax, weights) = mixing.way(run.kernel), mixing.sizes(run)

        def operand(view: _View, heads: int, itemsize: int, copied: bool = False) -> None:
            if copied or heads != view.heads or itemsize != run.size:
                found[row] += view.size // view.heads * heads // run.size * itemsize
            else:
                self._keep(view)

        if way == "fused":
            operand(q, heads, run.size)
            for each in (k, v):
                operand(each, mixing.key_heads(each.heads, run), run.size)
            result = _View(operation.id, _Storage(size, row), size, heads, q.heads_first)
            self._keep(result)
            found["scores"] += run.rows * heads * run.wide + mixing.mask(run)  # the logarithm of each row's sum
            return _View(operation.id, _Storage(size, row), size) if q.heads_first and heads > 1 else result

        def moved(view: _View) -> bool:
            return run.batch > 1 and view.heads > 1 and not view.heads_first

        operand(q, heads, scored, copied=way == "unfused" or moved(q))
        operand(k, mixing.key_heads(k.heads, run), scored, copied=way == "unfused" or moved(k))
        operand(v, mixing.key_heads(v.heads, run), weights, copied=moved(v))
        pairs, queries = mixing.pairs(run), run.rows * heads
        behind = mixing.softmax.sunk == "behind it"
        sinks = queries if mixing.softmax.weights and not behind else 0
        if behind:  # the scores, the logarithm of each row's sum, its share, and what is multiplied by it
            narrowed = 0 if weights == run.wide else queries * weights
            found["scores"] += (pairs + queries) * scored + queries * run.wide + narrowed + size
        found["scores"] += (pairs + sinks) * softmax + (0 if softmax == weights else pairs * weights)
        found["scores"] += pairs * scored if mixing.cap is not None else 0
        found["scores"] += (
            sinks * _LONG if mixing.softmax.sunk == "in softmax" else 0
        )  # where the largest is, which is taken away beside sinks
        return _View(operation.id, _Storage(size, row), size)
