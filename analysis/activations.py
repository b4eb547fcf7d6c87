"""The bytes that autograd saves in a forward pass for the backward pass, computed from shapes alone.

Korthikanti et al. (2205.05198, section 4.1) count them for one kind of layer: s·b·h·(34 + 5·a·s/h) bytes of 16-bit
numbers. This file follows a model's operations and counts the tensors that torch's autograd saves for each of them in
gptkit's modules. A matrix product saves its factors, softmax its result, an activation function its input. A tensor
that several operations save is counted once, and so are views of it. Weights are not counted. Tests compare all figures
with torch, byte for byte. With "eager", transformers' own models save the same bytes, except for BLOOM's gelu. With
"sdpa", they save up to a tenth more or less.

There are two attention kernels, as in `modules.attention`. "eager" saves the attention scores. With "sdpa", fused
kernels save queries, keys, values, the output and one number per query instead. torch has no fused kernel if keys are
broadcast to the query heads (Falcon with one key head), or if queries and values differ in width (latent attention).
In these cases "sdpa" stores the scores as well, in fp32 for any dtype of the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..components import Activation, ModelSpec
from ..components import operations as ops

Kernel = Literal["sdpa", "eager"]

FLOAT = 4
"""The size of an fp32 number in bytes. Norms, softmax and the loss are computed in fp32 or wider."""
_LONG = 8
"""The size in bytes of an int64 number, such as a token id or a row index."""


class _ActivationCost(msgspec.Struct, frozen=True):
    """The memory that an activation function needs, as a number of tensors of the size of its input."""

    saved: int = 1  # tensors saved for the backward pass, with the input (if `input`) and without the result
    alive: int = 2  # tensors that exist at once while it is computed: input, result and intermediate tensors
    input: bool = True  # whether autograd saves the input
    result: bool = False  # whether autograd saves the result


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
    """A forward pass over `batch` sequences of `tokens` tokens."""

    tokens: int
    batch: int
    size: int  # the size in bytes of one number of the activations
    kernel: Kernel = "sdpa"

    @property
    def rows(self) -> int:
        return self.tokens * self.batch

    @property
    def wide(self) -> int:
        """Return the size in bytes of one number that is computed in fp32, or in the model's dtype if that is wider."""
        return max(self.size, FLOAT)


def saved_for_backward(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """Return the bytes that autograd saves for the backward pass of a model and its loss, by component.

    "attention" includes the rotary tables, and "scores" the attention masks. "embedding" is the ids with which
    rows of tables were read, and "loss" the fp32 log-probabilities of the whole vocabulary with the target ids.

    Raises:
        MissingComponent: the model has an encoder.
    """
    spec.one_stack("estimating the memory of training")
    programs = {block: spec.block_operations(block) for block in dict.fromkeys(spec.blocks)}
    layers = {block: SavedForBackward(program, run) for block, program in programs.items()}
    first = layers[spec.blocks[0]]
    by_row = Counter(_ends(spec, run, first.saves(first.program[0])))
    for block, number in Counter(spec.blocks).items():
        by_row.update({row: nbytes * number for row, nbytes in layers[block].by_row.items()})
    by_row["attention"] += tables(run, (operation for program in programs.values() for operation in program))
    return _in_order(by_row)


def saved_with_checkpointing(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """Return the bytes that autograd saves with activation checkpointing (Chen et al. 1604.06174), by component.

    "inputs" has the inputs of all layers. The backward pass computes one layer at a time again, so "layer" has the
    bytes that the largest layer saves. Raises the same errors as `saved_for_backward`.
    """
    spec.one_stack("estimating the memory of training")
    wide = sum(block.wide for block in spec.blocks[:-1])  # a block's result is the next block's input
    inputs = run.rows * spec.stream_size * (wide * run.wide + (len(spec.blocks) - wide) * run.size)
    programs = [spec.block_operations(block) for block in set(spec.blocks)]
    largest = max(SavedForBackward(program, run).by_row.total() + tables(run, program) for program in programs)
    return {"inputs": inputs, "layer": largest, **_ends(spec, run, True)}


_COMPONENTS = ("embedding", "norms", "attention", "scores", "feed-forward", "router", "loss")


def _in_order(by_row: Counter[str]) -> dict[str, int]:
    """Return a copy of `by_row` (component -> bytes) in the order of `_COMPONENTS`.

    Components without bytes are left out.
    """
    return {row: by_row[row] for row in dict.fromkeys((*_COMPONENTS, *by_row)) if by_row[row]}


def _ends(spec: ModelSpec, run: Pass, counted: bool) -> dict[str, int]:
    """Return the bytes that autograd saves for the embedding, the final norm, the head and the loss, by component.

    Args:
        spec: the model.
        run: the forward pass.
        counted: whether the caller counts the first layer's input itself, so that the result leaves it out.
    """
    program = spec.before_blocks()
    before = SavedForBackward(program, run)
    by_row = before.by_row + SavedForBackward(spec.after_blocks(), run).by_row
    if counted and before.saves(program[-1]):
        by_row[before.views[program[-1].id].storage.row] -= run.rows * spec.stream_size * run.size
    by_row["loss"] = run.rows * (spec.has_head().vocab_size * FLOAT + _LONG)
    return _in_order(by_row)


def tables(run: Pass, operations: Iterable[ops.AnyOperation]) -> int:
    """Return the size in bytes of the rotary tables of these operations. Layers with equal RoPE share their tables.

    RoPE needs a table of cosines and one of sines, or one table of complex numbers.
    """
    rotaries = {operation.rotary for operation in operations if isinstance(operation, ops.Rotate)}
    sizes = {"input": 2 * run.size, "complex": run.wide}
    return sum(
        run.tokens * rotary.dim * sizes.get(getattr(rotary, "rounding", "input"), 2 * run.wide) for rotary in rotaries
    )


# --- attention -------------------------------------------------------------------------------------------------------


class MixingActivations(msgspec.Struct, frozen=True):
    """The operations of one attention that a kernel can fuse, from q·kᵀ to the weighted sum of values.

    The methods say which of them a kernel fuses, and how much memory they need.
    """

    scores: ops.Scores
    alibi: ops.Alibi | None
    cap: ops.Cap | None
    softmax: ops.Softmax
    mix: ops.Mix

    @property
    def value_dim(self) -> int:
        return int(self.mix.shape[-1])

    def way(self, kernel: Kernel = "sdpa") -> Literal["fused", "unfused", "eager"]:
        """Return the way in which scores are computed: "fused", "unfused" or "eager".

        "fused" is a kernel of torch that stores no scores. "unfused" is torch's fallback, which stores them in fp32 or
        wider. "eager" is gptkit's own code. If `kernel` is "sdpa", the result is nevertheless "eager" for soft-capped
        scores, attention sinks, an ALiBi bias that is added to the scaled scores, and families without fused attention
        in transformers.
        """
        outside = self.alibi is not None and not self.alibi.alibi.fused
        if kernel == "eager" or self.cap is not None or self.softmax.weights or outside or self.scores.written:
            return "eager"
        spread = self.scores.broadcast and self.scores.kv_heads < self.scores.heads
        return "unfused" if spread or self.scores.query_dim != self.value_dim else "fused"

    def sizes(self, run: Pass) -> tuple[int, int, int]:
        """Return the sizes in bytes of one element of three groups of tensors, for attention without a fused kernel.

        The first group has queries, keys and scores. The second has the result of the softmax. The third has the
        attention weights, after their conversion to the dtype of the values, and the values.
        """
        if self.way(run.kernel) == "unfused":
            return run.wide, run.wide, run.wide
        scored = run.wide if self.scores.wide else run.size
        return scored, run.wide if self.softmax.wide else scored, run.size

    def is_masked(self, tokens: int) -> bool:
        """Return whether the kernel needs a mask tensor for `tokens` tokens, because its `is_causal` is not enough."""
        window = self.softmax.window
        return self.alibi is not None or (window is not None and tokens >= window)

    def pairs(self, run: Pass) -> int:
        return run.batch * self.scores.heads * run.tokens**2

    def mask(self, run: Pass) -> int:
        if not self.is_masked(run.tokens):
            return 0
        return (run.tokens**2 if self.alibi is None else self.pairs(run)) * run.size

    def key_heads(self, heads: int, run: Pass) -> int:
        """Return the number of key or value heads that autograd saves.

        This is the number of query heads if keys and values are copied for every query head, and otherwise `heads`.

        Args:
            heads: the number of key-value heads.
            run: the forward pass.
        """
        fused = self.way(run.kernel) == "fused"
        if heads == 1 and (fused or run.batch == 1):
            return 1  # a view repeats it for every query head
        # The fused kernel reads groups of query heads without copies, if a head has at most this many elements.
        grouped = fused and not self.is_masked(run.tokens) and self.scores.query_dim <= 256
        return heads if grouped else self.scores.heads


def mixings(program: Iterable[ops.AnyOperation]) -> list[MixingActivations]:
    """Return one record for every attention that a program computes, with the operations that belong to it."""
    by_id = {operation.id: operation for operation in program}
    mixings = []
    for mix in (operation for operation in by_id.values() if isinstance(operation, ops.Mix)):
        chain = [by_id[mix.inputs[0]]]
        while not isinstance(chain[-1], ops.Scores):
            chain.append(by_id[chain[-1].inputs[0]])
        by_kind = {type(operation): operation for operation in chain}
        parts = (by_kind.get(kind) for kind in (ops.Scores, ops.Alibi, ops.Cap, ops.Softmax))
        mixings.append(MixingActivations(*parts, mix))  # type: ignore[call-arg, arg-type]
    return mixings


def ways(program: Iterable[ops.AnyOperation], kernel: Kernel = "sdpa") -> set[str]:
    """Return the ways in which a program computes attention scores (see `MixingActivations.way`)."""
    return {mixing.way(kernel) for mixing in mixings(program)}


# --- tensors that operations save -------------------------------------------------------------------------------------


class _SavedStorage(msgspec.Struct, eq=False):
    """A block of memory. Several tensors may be views of it."""

    size: int  # in bytes
    row: str  # the component for which it counts
    saved: dict[str, tuple[str, int]] = {}  # component and bytes of the views that autograd saves, by their ids
    counted_elsewhere: bool = False  # whether another layer's total already includes it


class _View(msgspec.Struct, eq=False):
    """A tensor that an operation computes: its size, its layout and the block of memory that it is a view of."""

    id: str
    storage: _SavedStorage
    size: int  # in bytes
    heads: int = 1
    heads_first: bool = False  # whether it is stored head by head (B, H, T, d), and not token by token (B, T, H, d)
    whole: int = 0  # bytes of a convolution's result with padding, for a text shorter than the kernel


class SavedForBackward:
    """The bytes that autograd saves for the backward pass of one program, such as a layer, by component (`by_row`).

    A tensor counts for the component whose operation computes it, except that a norm's input counts for "norms".
    Rotary tables are not included, because all layers share them.

    Raises:
        ConfigError: the program has an operation that gptkit does not know.
    """

    def __init__(self, program: ops.Program, run: Pass) -> None:
        self.program, self.run = program, run
        self.mixings = {mixing.mix.id: mixing for mixing in mixings(program)}
        self.views: dict[str, _View] = {}
        self.storages: list[_SavedStorage] = []  # those with a view that autograd saves
        self.products: dict[str, _SavedStorage] = {}
        self.pair_inputs: dict[str, _View] = {}
        self.looked_up: list[list[str]] = []
        self.by_row: Counter[str] = Counter()
        for operation in program:
            self.views[operation.id] = self._follow(operation)
        for storage in (storage for storage in self.storages if not storage.counted_elsewhere):
            self.by_row[storage.row] += storage.size  # a saved view saves its whole storage
            for row, size in storage.saved.values():
                self.by_row[row] += size
                self.by_row[storage.row] -= size

    def saves(self, operation: ops.AnyOperation) -> bool:
        """Return whether autograd saves the result of this operation for the backward pass."""
        view = self.views[operation.id]
        return view.id in view.storage.saved

    def _numbers(self, operation: ops.AnyOperation) -> int:
        return operation.numbers(B=self.run.batch, T=self.run.tokens, S=self.run.tokens)

    def _bytes(self, operation: ops.AnyOperation) -> int:
        return self._numbers(operation) * (self.run.wide if operation.kept_wide else self.run.size)

    def _input(self, operation: ops.AnyOperation, index: int = 0) -> _View:
        """Return the operation's input number `index`, counted from 0.

        If no operation of the program computes this input, its size is assumed. A linear's input has the linear's input
        width. Other inputs are as large as the operation's result.
        """
        name = operation.inputs[index]
        if name not in self.views:
            size = self._bytes(operation)
            if isinstance(operation, ops.Linear):
                size = self.run.rows * operation.inputs_wide * self.run.size
            elif isinstance(operation, ops.AltUp) and operation.step == "pick":
                size *= operation.count
            self.views[name] = _View(name, _SavedStorage(size, "norms"), size)
        return self.views[name]

    def _save(self, view: _View, row: str = "") -> None:
        if not view.storage.saved:
            self.storages.append(view.storage)
        view.storage.saved.setdefault(view.id, (row or view.storage.row, view.size))

    def _follow(self, operation: ops.AnyOperation) -> _View:
        """Count the tensors that autograd saves for an operation, and return a view of the operation's result."""
        rule = _RULES.get(type(operation))
        if rule is None:
            raise ops.unknown(operation, "the memory of training")  # type: ignore[arg-type]
        size, heads = self._bytes(operation), operation.shape[2] if len(operation.shape) == 4 else 1
        result = _View(operation.id, _SavedStorage(size, operation.row), size, heads if isinstance(heads, int) else 1)
        return rule(self, operation, result) or result

    def _nothing(self, operation: ops.AnyOperation, result: _View) -> None:
        """Count nothing, because autograd saves no tensor for this operation."""

    def _inputs(self, operation: ops.AnyOperation, _: _View) -> None:
        """Count all inputs of the operation as saved."""
        for index in range(len(operation.inputs)):
            self._save(self._input(operation, index))

    def _given(self, operation: ops.Given, result: _View) -> _View | None:
        if operation.inputs and operation.inputs[0] in self.views:
            return self.views[operation.inputs[0]]
        result.storage.counted_elsewhere = result.heads_first = operation.again
        return None

    def _stream(self, operation: ops.Stream, _: _View) -> _View | None:
        return self.views.get(operation.inputs[0]) if operation.inputs else None

    def _scale(self, operation: ops.ScaleOperation, result: _View) -> None:
        # A weight of one number is not trained.
        if len(operation.weights) == 1 and operation.weights[0][1] != (1,):
            self._save(self._input(operation))
        elif operation.together:
            result.storage = self._joint_storage(operation)

    def _joint_storage(self, operation: ops.Linear | ops.ScaleOperation) -> _SavedStorage:
        """Return the memory of a fused matrix product, which also contains the result of `operation`."""
        whole = sum(map(self._bytes, operation.computed_together(self.program)))
        return self.products.setdefault(operation.together, _SavedStorage(whole, operation.row))

    def _pairs(self, operation: ops.Pairs, result: _View) -> None:
        result.size = result.storage.size = result.size // 2  # half of a pair is the token's own
        self.pair_inputs[operation.id] = self._input(operation)

    def _blend(self, operation: ops.Blend, _: _View) -> None:
        self._save(self.pair_inputs[operation.inputs[0]])
        self._save(self._input(operation))
        self.by_row[operation.row] += int(operation.shape[-1]) * self.run.size  # the tensor 1 - weight

    def _sparse(self, operation: ops.Sparse, result: _View) -> None:
        self._save(self._input(operation))
        self._save(result)
        self.by_row[operation.row] += result.size // int(operation.shape[-1])  # the standard deviation of a row

    def _temper(self, operation: ops.Temper, _: _View) -> None:
        size = self.run.size if operation.temperature.counts == "positions" else FLOAT
        self.by_row[operation.row] += self.run.tokens * size

    def _looked_up(self, operation: ops.Embed | ops.Positions, _: _View) -> None:
        """Count the int64 row indices of a table look-up, only once if several tables use the same indices."""
        if isinstance(operation, ops.Positions) and not operation.weights:
            return
        ids = [self.views[name].id for name in operation.inputs]
        if ids not in self.looked_up:
            alike = isinstance(operation, ops.Positions) and operation.padding is None
            self.by_row["embedding"] += (self.run.tokens if alike else self.run.rows) * _LONG
        self.looked_up.append(ids)

    def _norm(self, operation: ops.NormOperation, _: _View) -> None:
        run, numbers = self.run, self._numbers(operation)
        width, fused = int(operation.shape[-1]), operation.normalised_in == "kernel"
        narrowed = operation.narrowed and run.size < run.wide
        if fused or (self._input(operation).size == numbers * run.wide and not narrowed):
            self._save(self._input(operation), "norms")
        else:  # a copy of its input in fp32
            self.by_row["norms"] += numbers * run.wide
        self.by_row["norms"] += numbers // width * operation.statistics * (run.size if fused else run.wide)
        multiplied = run.wide if operation.normalised_in == "float32" else run.size  # by the gain
        if operation.gain != "none" and not fused:
            self.by_row["norms"] += numbers * multiplied
        copied = operation.centred and operation.gain == "weight" and run.size < run.wide
        joined = sum(name.endswith("weight") for name, _ in operation.weights) > 1
        if operation.gain == "1 + weight" or copied or joined:  # the gain is computed, and thus a tensor to save
            self.by_row["norms"] += width * multiplied

    def _convolve(self, operation: ops.Convolve, result: _View) -> None:
        tokens, width = self.run.tokens, operation.width
        padded = operation.pads_short and tokens < width
        result.whole = result.size // tokens * (width if padded else tokens)
        if operation.joined or padded:
            self.by_row[operation.row] += result.whole
        else:
            self._save(self._input(operation))
        kernel = math.prod(dict(operation.weights)["weight"]) if operation.joined else 0
        self.by_row[operation.row] += kernel * self.run.size
        result.storage.size = result.whole + (width - 1) * result.size // tokens

    def _linear(self, operation: ops.Linear, result: _View) -> None:
        run = self.run
        if operation.wide and run.size < run.wide:  # copies in fp32
            self.by_row[operation.row] += run.rows * operation.inputs_wide * run.wide
            self.by_row[operation.row] += operation.parameters * run.wide if operation.wide == "both" else 0
            return
        if operation.by_channel and run.batch > 1 and run.tokens > 1:
            first = operation is operation.computed_together(self.program)[0]
            self.by_row[operation.row] += self._input(operation).size if first else 0
        else:
            self._save(self._input(operation))
        # Rows of q, k and v in one product may be in any order if a head's bytes are aligned; else they are copied.
        unaligned = int(operation.shape[-1]) * run.size % 16 != 0
        if operation.fused and not operation.copied and not (1 < operation.groups < result.heads and unaligned):
            result.storage = self._joint_storage(operation)

    def _rotate(self, operation: ops.Rotate, result: _View) -> None:
        # A partial rotation joins its parts again, head by head.
        whole = operation.shape[-1] == operation.rotary.dim and not getattr(operation.rotary, "joined", False)
        result.heads_first = self._input(operation).heads_first if whole else True

    def _concat(self, _: ops.Concat, result: _View) -> None:
        result.heads_first = True

    def _cap(self, operation: ops.Cap, result: _View) -> None:
        if operation.hard:
            self._save(self._input(operation))
        elif operation.row != "scores":
            self._save(result)  # the result of tanh

    def _scan(self, operation: ops.Scan, result: _View) -> None:
        self._inputs(operation, result)
        self.by_row[operation.row] += operation.saved * result.size

    def _activation(self, operation: ops.ActivationOperation, result: _View) -> None:
        run, numbers, cost = self.run, self._numbers(operation), ACTIVATION_COSTS[operation.function]
        narrow = bool(operation.wide) and run.size < run.wide
        if cost.input and not narrow:
            self._save(self._input(operation))
        if narrow:  # a copy of its input or of its result, which no other operation reads
            self.by_row[operation.row] += numbers * run.wide
        elif cost.result:
            self._save(result)
        size = result.storage.size = max(result.size, self._input(operation).whole)
        if operation.wide == "kept":
            result.storage.size = result.size = numbers * run.wide
        self.by_row[operation.row] += (cost.saved - cost.input) * size
        if operation.weights:  # a mask of the elements above 0, and a number computed from every learnt one
            self.by_row[operation.row] += numbers + 2 * run.size

    def _choose(self, operation: ops.Choose, _: _View) -> None:
        run, numbers, row, top_k = self.run, self._numbers(operation), operation.row, operation.top_k
        # Scores of all or of the chosen experts, the experts' numbers, their weights, and the sums of these weights.
        size = run.wide if operation.wide else run.size
        if operation.biased == "logits":  # the logits of all experts
            self.by_row[row] += run.rows * operation.experts * size
        if operation.jitter is not None:  # scores and a mask for every chosen expert
            self.by_row[row] += run.rows * operation.experts * ((top_k - 1) * size + top_k)
        self.by_row[row] += run.rows * (top_k if operation.of_chosen else operation.experts) * size + numbers * _LONG
        if operation.normalise and not (operation.of_chosen and operation.scores == "softmax"):
            self.by_row[row] += (run.rows if operation.of_chosen else numbers + run.rows) * size
        if "weight" in dict(operation.weights):  # both factors of the product with an expert's own weight
            self.by_row[row] += numbers * (size + run.size)
        if operation.groups > 1:  # the best experts of a group, the best groups, and a mask
            places = (operation.group_best * operation.groups + operation.top_groups) * _LONG + operation.groups
            self.by_row[row] += run.rows * places

    def _gather(self, operation: ops.Gather, result: _View) -> None:
        chosen = self._input(operation, 1)
        self.by_row[chosen.storage.row] += chosen.size // self.run.size * _LONG  # the order by expert
        if operation.weighs:  # the sorted weights, and the rows that they multiply
            self.by_row[operation.row] += result.size

    def _combine(self, operation: ops.Combine, _: _View) -> None:
        chosen, outputs = self._input(operation), self._input(operation, 1)
        weight = self.run.wide if operation.wide else self.run.size
        if operation.weighs:
            self._save(outputs)
        # The order by expert, its inverse, and the weights; or the experts' weighted outputs, one after the other.
        self.by_row[chosen.storage.row] += chosen.size // self.run.size * (2 * _LONG + weight)
        if operation.one_by_one:
            self.by_row[outputs.storage.row] += outputs.size
            self.by_row[chosen.storage.row] -= chosen.size // self.run.size * _LONG

    def _altup(self, operation: ops.AltUp, result: _View) -> _View | None:
        """Count what autograd saves for one step of AltUp, Gemma 3n's update of several residual streams."""
        first = self._input(operation)
        match operation.step:
            case "pick":
                return _View(operation.id, first.storage, result.size)
            case "predict":
                self._save(first)
                self._save(self._input(operation, 1))
            case "correct":  # the second input's error, and the coefficients that multiply it
                coefficients = self._input(operation, 2)
                self.by_row[operation.row] += self._input(operation, 1).size + coefficients.size
            case "split" | "join":  # all streams, the rescaled ones, and three numbers a row for the lengths
                self._inputs(operation, result)
                streams = [self._input(operation, index) for index in range(1, len(operation.inputs))]
                lengths = 2 * self.run.rows * self.run.size
                self.by_row[operation.row] += sum(stream.size + lengths for stream in streams) + lengths
        return None

    def _cache(self, operation: ops.CacheOperation, result: _View) -> _View:
        """Return the keys or values after a KV cache operation, in the memory layout (B, H, T, d).

        gptkit's modules use this layout with and without a KV cache.
        """
        before, repeats = self._input(operation), operation.repeats
        if operation.as_given:
            return before
        if repeats > 1:
            size = repeats * result.size
            storage = _SavedStorage(size, operation.row)
            return _View(operation.id, storage, size, repeats * result.heads, heads_first=True)
        if before.size == before.storage.size and (before.heads_first or result.heads == 1):
            return before
        result.heads_first = True
        return result

    def _mix(self, operation: ops.Mix, result: _View) -> _View:
        """Count what autograd saves for softmax(q·kᵀ)·v, and return the result.

        A result that the kernel stores head by head is copied, so that it is contiguous by token.
        """
        mixing, size = self.mixings[operation.id], result.size
        contiguous = _View(operation.id, _SavedStorage(size, operation.row), size)
        if mixing.way(self.run.kernel) != "fused":
            self._written_out(operation, mixing)
            return contiguous
        run, heads = self.run, mixing.scores.heads
        q, k, v = self._input(mixing.scores), self._input(mixing.scores, 1), self._input(operation, 1)
        self._operand(operation, q, heads, run.size)
        for view in (k, v):
            self._operand(operation, view, mixing.key_heads(view.heads, run), run.size)
        output = _View(operation.id, _SavedStorage(size, operation.row), size, heads, q.heads_first)
        self._save(output)
        self.by_row["scores"] += run.rows * heads * run.wide + mixing.mask(run)  # the logarithm of each row's sum
        return contiguous if q.heads_first and heads > 1 else output

    def _operand(self, operation: ops.Mix, view: _View, heads: int, itemsize: int, copied: bool = False) -> None:
        """Count queries, keys or values as attention saves them.

        Args:
            operation: the operation of the attention. The bytes count for its component.
            view: queries, keys or values before attention.
            heads: the number of heads that attention reads.
            itemsize: the size in bytes of one number that attention reads.
            copied: whether attention reads a copy of `view`. It also reads a copy if `heads` or `itemsize` differs from
                that of `view`.
        """
        if copied or heads != view.heads or itemsize != self.run.size:
            self.by_row[operation.row] += view.size // view.heads * heads // self.run.size * itemsize
        else:
            self._save(view)

    def _written_out(self, operation: ops.Mix, mixing: MixingActivations) -> None:
        """Count what autograd saves for attention that stores its scores, because no fused kernel computes it."""
        run, heads, unfused = self.run, mixing.scores.heads, mixing.way(self.run.kernel) == "unfused"
        scored, softmax, weights = mixing.sizes(run)

        def operand(view: _View, view_heads: int, itemsize: int, copied: bool = False) -> None:
            moved = run.batch > 1 and view.heads > 1 and not view.heads_first
            self._operand(operation, view, view_heads, itemsize, copied or moved)

        q, k, v = self._input(mixing.scores), self._input(mixing.scores, 1), self._input(operation, 1)
        operand(q, heads, scored, unfused)
        operand(k, mixing.key_heads(k.heads, run), scored, unfused)
        operand(v, mixing.key_heads(v.heads, run), weights)
        pairs, queries = mixing.pairs(run), run.rows * heads
        after = mixing.softmax.sunk == "behind it"  # the sink scales the output, after the softmax
        sinks = queries if mixing.softmax.weights and not after else 0
        if after:  # the scores, the logarithm of each row's sum, the sink's share, and the output that it multiplies
            narrowed = 0 if weights == run.wide else queries * weights
            self.by_row["scores"] += (pairs + queries) * scored + queries * run.wide + narrowed + self._bytes(operation)
        self.by_row["scores"] += (pairs + sinks) * softmax + (0 if softmax == weights else pairs * weights)
        self.by_row["scores"] += pairs * scored if mixing.cap is not None else 0
        # The position of each row's largest score, which is subtracted.
        self.by_row["scores"] += sinks * _LONG if mixing.softmax.sunk == "in softmax" else 0


_Rule = Callable[[SavedForBackward, Any, _View], _View | None]
_RULES: dict[type, _Rule] = {
    **dict.fromkeys((ops.Tokens, ops.Add, ops.Shift), SavedForBackward._nothing),
    # Attention is one kernel: its last operation, the mix, counts for all of them.
    **dict.fromkeys((ops.Scores, ops.Alibi, ops.Softmax), SavedForBackward._nothing),
    **dict.fromkeys((ops.Embed, ops.Positions), SavedForBackward._looked_up),
    ops.ActivationOperation: SavedForBackward._activation,
    ops.AltUp: SavedForBackward._altup,
    ops.Blend: SavedForBackward._blend,
    ops.CacheOperation: SavedForBackward._cache,
    ops.Cap: SavedForBackward._cap,
    ops.Choose: SavedForBackward._choose,
    ops.Combine: SavedForBackward._combine,
    ops.Concat: SavedForBackward._concat,
    ops.Convolve: SavedForBackward._convolve,
    ops.Gather: SavedForBackward._gather,
    ops.Given: SavedForBackward._given,
    ops.Linear: SavedForBackward._linear,
    ops.Mix: SavedForBackward._mix,
    ops.NormOperation: SavedForBackward._norm,
    ops.Pairs: SavedForBackward._pairs,
    ops.Product: SavedForBackward._inputs,
    ops.Rotate: SavedForBackward._rotate,
    ops.ScaleOperation: SavedForBackward._scale,
    ops.Scan: SavedForBackward._scan,
    ops.Sparse: SavedForBackward._sparse,
    ops.Stream: SavedForBackward._stream,
    ops.Temper: SavedForBackward._temper,
}
"""For every kind of operation, the method that counts the tensors that autograd saves for it."""
