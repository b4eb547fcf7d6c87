"""What is alive at the worst moment of reading a context at once, without gradients: from shapes alone.

A tree's operations are followed as gptkit's modules run them, which hold what Python's names hold: a layer's input
until the layer is done, the projections until its attention is. What kernels need inside and what an allocator leaves
unused is not told. In tests this is within 6 % of what is alive in a run, and a tenth with experts, whose share of the
tokens is chance.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from ..components import ModelSpec
from ..components import operations as ops
from .activations import ACTIVATION_COSTS, Mixing, Pass, mixings, tables

Logits = Literal["last", "all"]


def peak(spec: ModelSpec, run: Pass, logits: Logits = "last", ends: bool = True) -> int:
    """Bytes beside the weights at the worst moment of a forward pass that fills a cache, the cache among them.

    A layer's keys and values are all there until the next step, whatever its window: what the cache gives on is a view.
    Without `ends` the layers alone, of which others make logits.

    Raises:
        MissingComponent: a tree with an encoder.
    """
    spec.one_stack("estimating the memory of a prefill")
    programs = {block: spec.block_operations(block) for block in dict.fromkeys(spec.blocks)}
    layers = {block: Following(program, run) for block, program in programs.items()}
    worst, held = 0, run.size * sum(_given(programs[block], run) for block in spec.blocks)
    held += run.rows * spec.hidden_size * run.size if spec.shares else 0  # what the first layer reads, kept for others
    for block in spec.blocks:
        worst = max(worst, held + layers[block].most)
        held += layers[block].left
    last = stream = run.rows * spec.stream_size * (run.wide if spec.blocks[-1].wide else run.size)
    if ends:  # norms of all tokens, and then logits of those that are asked for
        program = spec.after_blocks()
        first = next(index for index, each in enumerate(program) if each.row == "head")
        asked = replace(run, tokens=1) if logits == "last" and spec.causal else run
        last = max(Following(program[:first], run, stream).most, stream + Following(program[first:], asked).most)
    return _shared(list(programs.values()), run) + max(worst, held + last)


def _given(program: ops.Program, run: Pass) -> int:
    """Numbers that were made for a layer before the first one ran, and are there until the pass ends."""
    made = (each for each in program if isinstance(each, ops.Given) and not each.again)
    return sum(each.numbers(B=run.batch, T=run.tokens, S=run.tokens) for each in made)


def _shared(programs: Collection[ops.Program], run: Pass) -> int:
    """What all layers of a pass share: rotary tables, ALiBi biases, and masks where a kernel's own will not do."""
    mixed = [each for program in programs for each in mixings(program)]
    biases = {(each.alibi.alibi, each.scores.heads) for each in mixed if each.alibi is not None}
    causal = (each for each in mixed if each.softmax.causal)
    written = {each.softmax.window for each in causal if each.way(run.kernel) == "eager"}
    masks = {each.softmax.window for each in mixed if each.is_masked(run.tokens)} | written
    numbers = run.rows * sum(heads for _, heads in biases) + run.tokens**2 * len(written)
    turned = tables(run, (each for program in programs for each in program))
    return turned + run.tokens**2 * len(masks) + numbers * run.size


class _Step(msgspec.Struct, frozen=True):
    """Bytes of an operation's result, what there is beside it at the operation's worst moment, and what it leaves for
    later tokens. onto: the input that the result is written over.
    """

    result: int = 0
    beside: int = 0
    left: int = 0
    onto: str = ""


class Following:
    """Follows a program that reads `given` bytes.

    most: bytes alive at the worst moment, what is left for later tokens among them. left: that alone.
    """

    def __init__(self, program: ops.Program, run: Pass, given: int = 0) -> None:
        self.program, self.run = _in_order_of_making(program), run
        self.mixings = {each.mix.id: each for each in mixings(program)}
        self.operations = {each.id: each for each in program}
        self.memories = {"": given}  # bytes that are there
        self.most = self.left = 0
        until = {"": 0, **_lifetimes(self.program)}
        for index, each in enumerate(self.program):
            step = self._step(each)
            self.left += step.left
            self.most = max(self.most, self.left + sum(self.memories.values()) + step.result + step.beside)
            name = step.onto or each.id
            self.memories.setdefault(name, step.result)
            until[name] = max(until[name], until[each.id])
            self.memories = {name: size for name, size in self.memories.items() if until[name] > index}

    def _bytes(self, operation: ops.AnyOperation) -> int:
        """Of a result; of copies that run one after the other, of one."""
        run = self.run
        numbers = operation.numbers(B=run.batch, T=run.tokens, S=run.tokens)
        return -(-numbers // operation.apart) * (run.wide if operation.kept_wide else run.size)

    def _step(self, operation: ops.AnyOperation) -> _Step:
        """What an operation makes; raises ConfigError for one that is not in the vocabulary."""
        run, size = self.run, self._bytes(operation)
        match operation:
            case ops.Given():
                return _Step()  # it was there before
            case ops.Stream() if operation.inputs[0] != operation.id:
                return _Step()  # under another name
            case ops.Tokens() | ops.Stream() | ops.Embed() | ops.Positions() | ops.Concat():
                return _Step(size)  # here and below no more than the result
            case ops.Gather(weighs=weighs):
                return _Step(size, size if weighs else 0)
            case ops.Scale(together=name) if name:
                scales = operation.made_together(self.program)
                if operation is not scales[0]:
                    return _Step()
                whole = sum(map(self._bytes, scales))
                return _Step(whole, whole)  # before they are put side by side
            case ops.Scale() | ops.Shift() | ops.Add() | ops.Temper():
                return _Step(size)
            case ops.Pairs():  # of which each token's own is there
                return _Step(size // 2, left=size // 2 // run.tokens)
            case ops.Blend():  # beside it both products
                return _Step(size, 2 * size)
            case ops.Sparse():
                return _Step(size)
            case ops.AltUp(step="pick"):
                return _Step()
            case ops.AltUp(step="spread"):
                return _Step(onto=operation.inputs[0])
            case ops.AltUp(step="join"):  # beside it the streams, before they are one
                return _Step(size, size * len(operation.inputs))
            case ops.AltUp():  # what is multiplied, or put together
                return _Step(size, size)
            case ops.Norm():
                numbers = operation.numbers(B=run.batch, T=run.tokens, S=run.tokens)
                if operation.lies == "kernel":
                    return _Step(size, numbers // int(operation.shape[-1]) * operation.statistics * run.size)
                # Without its mean, divided, and multiplied by a gain; or divided, beside a copy of narrow rows.
                tensors = 3 if operation.centred else 1 if run.size == run.wide else 2
                return _Step(size, numbers * run.wide * tensors - size)
            case ops.Linear():
                together = operation.made_together(self.program)
                if operation.fused and operation is not together[0]:
                    return _Step(size if operation.copied else 0)  # in the first one's product
                whole = sum(map(self._bytes, together)) if operation.fused else size
                rounded = operation.bias and operation.arithmetic in (
                    "matmul_add",
                    "conv1d_add",
                )  # before the bias, and behind it
                return _Step(whole, whole * (operation.joined + (rounded and (operation.fused or len(together) == 1))))
            case ops.Rotate(turned=turned):
                part = size * turned // int(operation.shape[-1])
                beside = part
                if run.size < run.wide and getattr(operation.rotary, "rounding", "input") != "input":
                    # Its tables, and what is multiplied by them, are in fp32: both products, and one factor as it was.
                    beside = max(part, 2 * part * run.wide // run.size + part - size)
                named = operation.start or operation.parts > 1  # parts that are taken out have a name of their own
                return _Step(size + part if named else size, beside)
            case ops.Cache(repeats=repeats):
                return _Step(repeats * size if repeats > 1 else 0, left=size)
            case ops.Scores() | ops.Alibi() | ops.Softmax():
                return _Step()  # with the mix, which kernels compute together with them
            case ops.Cap():
                return _Step() if operation.row == "scores" else _Step(onto=operation.inputs[0])
            case ops.Mix():
                return self._mixed(operation, self.mixings[operation.id])
            case ops.Scan(state=state, chunk=chunk):
                itemsize = run.wide if operation.wide else run.size
                padded = run.batch * chunk * -(-run.tokens // chunk)
                alive = padded * operation.alive + run.batch * operation.within[run.tokens > chunk]
                chunks = max(alive * (run.size if operation.narrow else itemsize) - size, 0)
                return _Step(size, operation.saved * size + chunks, left=run.batch * math.prod(state) * itemsize)
            case ops.Convolve(width=width, carried=carried):
                channels, kept = operation.numbers(B=run.batch, T=1), width if carried is None else carried
                return _Step(size + channels * (width - 1) * run.size, size, left=channels * kept * run.size)
            case ops.Activation(function=function):
                return _Step(size, (ACTIVATION_COSTS[function].alive - 2) * size)
            case ops.Product():
                return _Step(onto=operation.inputs[0]) if operation.in_place else _Step(size)
            case ops.Choose():
                return _Step(0, run.rows * operation.experts * 2 * run.wide)
            case ops.Combine():
                taken = self.memories[operation.inputs[1]] // run.size
                weighted = run.wide if operation.wide else run.size
                if operation.one_by_one:  # an expert's, weighted, and the sum without it
                    return _Step(size, taken * weighted + size)
                # Weighted, put back in order, and summed.
                moved = taken * weighted * (2 if operation.weighs else 1)
                return _Step(size, moved + size // run.size * weighted - size)
            case _:
                raise ops.unknown(operation, "the memory of a prefill")

    def _mixed(self, operation: ops.Mix, mixing: Mixing) -> _Step:
        """From queries, keys and values on, beside these."""
        run, heads, query_dim = self.run, mixing.scores.heads, mixing.scores.query_dim
        pairs, size = mixing.pairs(run), self._bytes(operation)
        q = run.rows * heads * query_dim * run.size
        # Keys and values are repeated for their query heads, where neither a view nor the kernel does it.
        key = self.operations[mixing.scores.inputs[1]]
        kv_heads = int(key.shape[2]) * (key.repeats if isinstance(key, ops.Cache) else 1)
        kv_heads = heads if mixing.scores.broadcast else kv_heads
        repeated = 2 * q if 1 < kv_heads < heads == mixing.key_heads(kv_heads, run) else 0
        match mixing.way(run.kernel):
            case "fused":
                # Where queries were put together of parts, head by head, so lies the output, and is copied.
                rotate = self.operations[mixing.scores.inputs[0]]
                parted = isinstance(rotate, ops.Rotate) and query_dim > rotate.rotary.dim and heads > 1
                copied = size if parted else 0
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


def _in_order_of_making(program: ops.Program) -> list[ops.AnyOperation]:
    """The program with linears that are made at once where the first of them is."""
    found: dict[str, ops.AnyOperation] = {}
    for each in program:
        together = each.made_together(program) if isinstance(each, ops.Linear) else [each]
        found |= {other.id: other for other in together if other.id not in found}
    return list(found.values())


def _lifetimes(program: Sequence[ops.AnyOperation]) -> dict[str, int]:
    """By the index of an operation, until where each result is there: the last that reads it, or until which a module
    has a name for it. The first of several in one product is there as long as any.
    """
    places = {each.id: index for index, each in enumerate(program)}
    until = dict(places)
    for index, each in enumerate(program):
        until |= dict.fromkeys(each.inputs, index)
    until = {each.id: max(until[each.id], places.get(each.held, 0)) for each in program}
    for each in program:
        if (isinstance(each, ops.Linear) and each.fused) or (isinstance(each, ops.Scale) and each.together):
            first, *others = each.made_together(program)
            until[first.id] = max(until[first.id], *(until[other.id] for other in others))
    return until
