"""The peak memory of a prefill, which reads a whole context in one forward pass, computed from shapes alone.

This file follows a model's operations in the order in which gptkit's modules run them, without gradients. A tensor
exists as long as a Python name refers to it: a layer's input until the layer ends, the projections until the attention
ends. Memory inside of kernels and unused memory of the allocator are not included. In tests, the result is within 6 %
of a real run. For mixtures of experts it is within 10 %, because an expert's share of the tokens is random.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from ..components import ModelSpec
from ..components import operations as ops
from .activations import ACTIVATION_COSTS, Pass, mixings, tables

Logits = Literal["last", "all"]


def peak(spec: ModelSpec, run: Pass, logits: Logits = "last", ends: bool = True) -> int:
    """Return the peak memory of a forward pass in bytes, without the weights but with the KV cache that it fills.

    All keys and values of a layer exist until the next step, also those outside of its window, because the cache
    returns views of them. If `ends` is false, the final norm and the logits do not count, because another GPU computes
    them.

    Raises:
        MissingComponent: the model has an encoder.
    """
    spec.one_stack("estimating the memory of a prefill")
    programs = {block: spec.block_operations(block) for block in dict.fromkeys(spec.blocks)}
    layers = {block: PrefillMemory(program, run) for block, program in programs.items()}
    most, alive = 0, run.size * sum(_given(programs[block], run) for block in spec.blocks)
    if spec.has_shared_blocks:
        alive += run.rows * spec.hidden_size * run.size  # later layers read the first layer's input
    for block in spec.blocks:
        most = max(most, alive + layers[block].most)
        alive += layers[block].cached
    last = hidden = run.rows * spec.stream_size * (run.wide if spec.blocks[-1].wide else run.size)
    if ends:  # the final norm of all tokens, and then the logits of the last token or of all
        program = spec.after_blocks()
        first = next(index for index, operation in enumerate(program) if operation.row == "head")
        needed = replace(run, tokens=1) if logits == "last" and spec.causal else run
        norms, head = PrefillMemory(program[:first], run, hidden), PrefillMemory(program[first:], needed)
        last = max(norms.most, hidden + head.most)
    return _shared(list(programs.values()), run) + max(most, alive + last)


def _given(program: ops.Program, run: Pass) -> int:
    """Return the number of elements in the inputs that a layer gets in addition to the hidden states.

    The layer inputs of Gemma 3n are an example. They are computed before the first layer runs, and exist until the last
    one ends.
    """
    inputs = (operation for operation in program if isinstance(operation, ops.Given) and not operation.again)
    return sum(operation.numbers(B=run.batch, T=run.tokens, S=run.tokens) for operation in inputs)


def _shared(programs: Collection[ops.Program], run: Pass) -> int:
    """Return the bytes of the tensors that all layers share: rotary tables, ALiBi biases and attention masks."""
    attentions = [mixing for program in programs for mixing in mixings(program)]
    biases = {(mixing.alibi.alibi, mixing.scores.heads) for mixing in attentions if mixing.alibi is not None}
    causal = (mixing for mixing in attentions if mixing.softmax.causal)
    written = {mixing.softmax.window for mixing in causal if mixing.way(run.kernel) == "eager"}
    masks = {mixing.softmax.window for mixing in attentions if mixing.is_masked(run.tokens)} | written
    numbers = run.rows * sum(heads for _, heads in biases) + run.tokens**2 * len(written)
    rotary = tables(run, (operation for program in programs for operation in program))
    return rotary + run.tokens**2 * len(masks) + numbers * run.size


class _Step(msgspec.Struct, frozen=True):
    """The memory of one operation, in bytes."""

    result: int = 0
    temporary: int = 0  # the most that the operation needs at once besides its inputs and its result
    cached: int = 0  # stored in the cache for later tokens
    onto: str = ""  # the id of the input that the result overwrites, if the operation is in place


class PrefillMemory:
    """The memory of one program, such as a layer.

    Args:
        program: its operations.
        run: the forward pass.
        inputs: the size of its inputs in bytes.
    """

    def __init__(self, program: ops.Program, run: Pass, inputs: int = 0) -> None:
        self.program, self.run = _in_order_of_making(program), run
        self.mixings = {mixing.mix.id: mixing for mixing in mixings(program)}
        self.operations = {operation.id: operation for operation in program}
        self.tensors = {"": inputs}  # the size in bytes of all tensors that exist, by id
        self.most = 0  # the peak memory in bytes, including the cache so far
        self.cached = 0  # the bytes in the cache
        until = {"": 0, **_lifetimes(self.program)}
        for index, operation in enumerate(self.program):
            step = self._step(operation)
            self.cached += step.cached
            self.most = max(self.most, self.cached + sum(self.tensors.values()) + step.result + step.temporary)
            name = step.onto or operation.id
            self.tensors.setdefault(name, step.result)
            until[name] = max(until[name], until[operation.id])
            self.tensors = {name: size for name, size in self.tensors.items() if until[name] > index}

    def _numbers(self, operation: ops.AnyOperation) -> int:
        return operation.numbers(B=self.run.batch, T=self.run.tokens, S=self.run.tokens)

    def _bytes(self, operation: ops.AnyOperation) -> int:
        """Return the size in bytes of an operation's result.

        If experts run one after the other, this is the size of one expert's result, for its share of the tokens.
        """
        size = self.run.wide if operation.kept_wide else self.run.size
        return -(-self._numbers(operation) // operation.apart) * size

    def _step(self, operation: ops.AnyOperation) -> _Step:
        """Return the memory of one operation. Raises ConfigError for a kind that gptkit does not know."""
        rule = _RULES.get(type(operation))
        if rule is None:
            raise ops.unknown(operation, "the memory of a prefill")  # type: ignore[arg-type]
        return rule(self, operation, self._bytes(operation))

    def _nothing(self, *_: Any) -> _Step:
        return _Step()

    def _result(self, _: ops.AnyOperation, size: int) -> _Step:
        return _Step(size)

    def _stream(self, operation: ops.Stream, size: int) -> _Step:
        return _Step() if operation.inputs[0] != operation.id else _Step(size)  # another name needs no memory

    def _gather(self, operation: ops.Gather, size: int) -> _Step:
        return _Step(size, size if operation.weighs else 0)

    def _scale(self, operation: ops.ScaleOperation, size: int) -> _Step:
        if not operation.together:
            return _Step(size)
        scales = operation.computed_together(self.program)
        if operation is not scales[0]:
            return _Step()
        whole = sum(map(self._bytes, scales))
        return _Step(whole, whole)  # all results, before they are concatenated

    def _pairs(self, _: ops.Pairs, size: int) -> _Step:
        return _Step(size // 2, cached=size // 2 // self.run.tokens)  # half of a pair is the token's own

    def _blend(self, _: ops.Blend, size: int) -> _Step:
        return _Step(size, 2 * size)  # and both products

    def _altup(self, operation: ops.AltUp, size: int) -> _Step:
        match operation.step:
            case "pick":
                return _Step()
            case "spread":
                return _Step(onto=operation.inputs[0])
            case "join":  # all streams, before they are joined
                return _Step(size, size * len(operation.inputs))
        return _Step(size, size)  # the factor of a product, or the streams before they are concatenated

    def _norm(self, operation: ops.NormOperation, size: int) -> _Step:
        run, numbers = self.run, self._numbers(operation)
        if operation.normalised_in == "kernel":
            return _Step(size, numbers // int(operation.shape[-1]) * operation.statistics * run.size)
        # Rows without their mean, normalised, and multiplied by a gain; or normalised rows and a wider copy.
        tensors = 3 if operation.centred else 1 if run.size == run.wide else 2
        return _Step(size, numbers * run.wide * tensors - size)

    def _linear(self, operation: ops.Linear, size: int) -> _Step:
        together = operation.computed_together(self.program)
        if operation.fused and operation is not together[0]:
            return _Step(size if operation.copied else 0)  # a part of the first linear's product
        whole = sum(map(self._bytes, together)) if operation.fused else size
        rounded = operation.bias and operation.arithmetic in ("matmul_add", "conv1d_add")  # before and after the bias
        return _Step(whole, whole * (operation.joined + (rounded and (operation.fused or len(together) == 1))))

    def _rotate(self, operation: ops.Rotate, size: int) -> _Step:
        run = self.run
        temporary = part = size * operation.turned // int(operation.shape[-1])
        if run.size < run.wide and getattr(operation.rotary, "rounding", "input") != "input":
            # The tables and both products are in fp32, and one factor is in its own dtype.
            temporary = max(part, 2 * part * run.wide // run.size + part - size)
        named = operation.start or operation.parts > 1  # a Python name refers to a part until the end
        return _Step(size + part if named else size, temporary)

    def _cache(self, operation: ops.CacheOperation, size: int) -> _Step:
        return _Step(operation.repeats * size if operation.repeats > 1 else 0, cached=size)

    def _cap(self, operation: ops.Cap, _: int) -> _Step:
        return _Step() if operation.row == "scores" else _Step(onto=operation.inputs[0])

    def _scan(self, operation: ops.Scan, size: int) -> _Step:
        run, chunk = self.run, operation.chunk
        itemsize = run.wide if operation.wide else run.size
        padded = run.batch * chunk * -(-run.tokens // chunk)
        alive = padded * operation.alive + run.batch * operation.within[run.tokens > chunk]
        chunks = max(alive * (run.size if operation.narrow else itemsize) - size, 0)
        return _Step(size, operation.saved * size + chunks, run.batch * math.prod(operation.state) * itemsize)

    def _convolve(self, operation: ops.Convolve, size: int) -> _Step:
        channels, width = operation.numbers(B=self.run.batch, T=1), operation.width
        cached = channels * (width if operation.carried is None else operation.carried) * self.run.size
        return _Step(size + channels * (width - 1) * self.run.size, size, cached)

    def _activation(self, operation: ops.ActivationOperation, size: int) -> _Step:
        return _Step(size, (ACTIVATION_COSTS[operation.function].alive - 2) * size)

    def _product(self, operation: ops.Product, size: int) -> _Step:
        return _Step(onto=operation.inputs[0]) if operation.in_place else _Step(size)

    def _choose(self, operation: ops.Choose, _: int) -> _Step:
        return _Step(0, self.run.rows * operation.experts * 2 * self.run.wide)

    def _combine(self, operation: ops.Combine, size: int) -> _Step:
        run = self.run
        outputs = self.tensors[operation.inputs[1]] // run.size
        weighted = run.wide if operation.wide else run.size
        if operation.one_by_one:  # one expert's weighted output, and the sum without it
            return _Step(size, outputs * weighted + size)
        # The weighted outputs, in the order of the tokens, and their sum.
        moved = outputs * weighted * (2 if operation.weighs else 1)
        return _Step(size, moved + size // run.size * weighted - size)

    def _mix(self, operation: ops.Mix, size: int) -> _Step:
        """Return the memory of attention scores and of the output. Queries, keys and values are counted elsewhere."""
        mixing = self.mixings[operation.id]
        run, heads, query_dim, pairs = self.run, mixing.scores.heads, mixing.scores.query_dim, mixing.pairs(self.run)
        q = run.rows * heads * query_dim * run.size
        # Keys and values are copied for all query heads, unless a view or the kernel repeats them.
        key = self.operations[mixing.scores.inputs[1]]
        kv_heads = int(key.shape[2]) * (key.repeats if isinstance(key, ops.CacheOperation) else 1)
        kv_heads = heads if mixing.scores.broadcast else kv_heads
        repeated = 2 * q if 1 < kv_heads < heads == mixing.key_heads(kv_heads, run) else 0
        match mixing.way(run.kernel):
            case "fused":
                # If queries were joined of parts, head by head, the output has their layout and is copied.
                rotate = self.operations[mixing.scores.inputs[0]]
                joined = isinstance(rotate, ops.Rotate) and query_dim > rotate.rotary.dim and heads > 1
                copied = size if joined else 0
                return _Step(size, max(repeated + mixing.mask(run) + run.rows * heads * run.wide, copied))
            case "unfused":
                keys = mixing.scores.kv_heads
                numbers = query_dim * (heads + keys) + (mixing.value_dim * keys if run.size < run.wide else 0)
                mask = run.tokens**2 * run.wide if mixing.alibi is None else pairs * run.size
                moments = [repeated + run.rows * run.wide * numbers + mask + 2 * pairs * run.wide]
            case "eager":
                scored, softmax, weights = (pairs * itemsize for itemsize in mixing.sizes(run))
                moments = [
                    repeated + q + scored,
                    repeated + 2 * scored,
                    repeated + scored + softmax * (1 if softmax == scored else 2),
                    repeated + scored + softmax + (0 if softmax == weights else weights),
                    repeated + scored + weights + 2 * size,
                ]
        return _Step(size, max(*moments, 2 * size) - size)


_Rule = Callable[[PrefillMemory, Any, int], _Step]
_RULES: dict[type, _Rule] = {
    ops.Given: PrefillMemory._nothing,  # it exists before the layer runs
    # Attention is one kernel: its last operation, the mix, counts for all of them.
    **dict.fromkeys((ops.Scores, ops.Alibi, ops.Softmax), PrefillMemory._nothing),
    **dict.fromkeys((ops.Tokens, ops.Embed, ops.Positions, ops.Concat), PrefillMemory._result),
    **dict.fromkeys((ops.Shift, ops.Add, ops.Temper, ops.Sparse), PrefillMemory._result),
    ops.ActivationOperation: PrefillMemory._activation,
    ops.AltUp: PrefillMemory._altup,
    ops.Blend: PrefillMemory._blend,
    ops.CacheOperation: PrefillMemory._cache,
    ops.Cap: PrefillMemory._cap,
    ops.Choose: PrefillMemory._choose,
    ops.Combine: PrefillMemory._combine,
    ops.Convolve: PrefillMemory._convolve,
    ops.Gather: PrefillMemory._gather,
    ops.Linear: PrefillMemory._linear,
    ops.Mix: PrefillMemory._mix,
    ops.NormOperation: PrefillMemory._norm,
    ops.Pairs: PrefillMemory._pairs,
    ops.Product: PrefillMemory._product,
    ops.Rotate: PrefillMemory._rotate,
    ops.ScaleOperation: PrefillMemory._scale,
    ops.Scan: PrefillMemory._scan,
    ops.Stream: PrefillMemory._stream,
}
"""For every kind of operation, the method that computes its memory."""


def _in_order_of_making(program: ops.Program) -> list[ops.AnyOperation]:
    """Return the operations in the order in which they run.

    Linears that are fused into one matrix product all run together with the first of them.
    """
    ordered: dict[str, ops.AnyOperation] = {}
    for operation in program:
        together = operation.computed_together(program) if isinstance(operation, ops.Linear) else [operation]
        ordered |= {part.id: part for part in together if part.id not in ordered}
    return list(ordered.values())


def _lifetimes(program: Sequence[ops.AnyOperation]) -> dict[str, int]:
    """Map the id of every operation to the index of the last operation during which its result exists.

    This is the last operation that reads the result, or a later one if a Python variable of the module still refers to
    it. The first result of a fused product exists as long as any other result of that product.
    """
    places = {operation.id: index for index, operation in enumerate(program)}
    until = dict(places)
    for index, operation in enumerate(program):
        until |= dict.fromkeys(operation.inputs, index)
    until = {operation.id: max(until[operation.id], places.get(operation.live_until, 0)) for operation in program}
    for operation in program:
        if (isinstance(operation, ops.Linear) and operation.fused) or (
            isinstance(operation, ops.ScaleOperation) and operation.together
        ):
            first, *others = operation.computed_together(program)
            until[first.id] = max(until[first.id], *(until[part.id] for part in others))
    return until
