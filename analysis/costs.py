"""What a tree costs to run: parameters, FLOPs and cache, from its shapes alone. No torch, no weights.

FLOPs are those of the matrix products, two for a multiplication with its addition, as Kaplan et al. (2001.08361,
table 1) and PaLM (2204.02311, appendix B) count them: 2 a weight that a token meets, and in attention 2 an element of
a key and 2 an element of a value for every token in sight. Norms, activations, softmax, rotations and biases, which
grow with the width and not with its square, are left out, and so is looking up a row of a table.

Scores are counted twice where many tokens are read at once: as dense kernels make them, every query with every key,
which is what torch's FlopCounterMode counts whatever the kernel skips; and as the causal mask and windows need them.

A layer with a window w keeps w - 1 tokens between two steps, here and in transformers' DynamicSlidingWindowLayer: with
the step's own token they are the w that it looks at. A rolling buffer (Mistral 2310.06825, section 2) is made for w.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..components import ModelSpec
from ..components import operations as ops
from ..display import Record
from .activations import FLOAT
from .parameters import count
from .sizes import check_number, check_sizes, full_dtype, itemsize

CONTEXT = 2048  # tokens in sight where a tree does not say what context it is for


# --- an operation's share --------------------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True):
    """What an operation multiplies in matrix products, and what it carries from one step to the next.

    a_token, a_pair: multiplications of each token, and of each token with each of the last `window` (None: all) that it
    sees, or with `chunked` with those of its chunk, or where it is not `causal` with as many behind it too. left:
    numbers that each token leaves, as far back as the window; state: those that are there once for a sequence however
    long. repeats: how often transformers' cache has them; None where none of its families has such a cache. wide: they
    are in fp32 at least. Tokens that are read at once take `a_chunk` multiplications for each `chunk` of them, begun or
    full, where there is one, `spared` less, and `between` for each of these, and what is before the first, with each;
    and as many more tokens are computed of a sequence as lie `beyond` its end, of which there are more than that. once:
    it is of the source that an encoder has read: no token adds to it. again: the backward pass makes them anew.
    """

    a_token: int = 0
    a_pair: int = 0
    window: int | None = None
    chunked: bool = False
    causal: bool = True
    left: int = 0
    state: int = 0
    repeats: int | None = 1
    wide: bool = False
    chunk: int = 0
    a_chunk: int = 0
    spared: int = 0
    between: int = 0
    beyond: int = 0
    once: bool = False
    again: bool = False

    def held(self, context: int) -> int:
        """Numbers carried after so many tokens: of a window all but one, which the next token takes."""
        return self.left * (context if self.window is None else min(context, self.window - 1)) + self.state

    def bytes_held(self, context: int, size: int) -> int:
        """The same in bytes, of numbers of `size` bytes."""
        return self.held(context) * (max(size, FLOAT) if self.wide else size)

    def of_many(self, tokens: int) -> int:
        """Multiplications of so many tokens of a sequence that are read at once, but for pairs."""
        if self.chunk:
            chunks = -(-tokens // self.chunk)
            return chunks * self.a_chunk - self.spared + (chunks + 1) ** 2 * self.between
        return (max(tokens, self.beyond + 1) + self.beyond) * self.a_token if self.beyond else tokens * self.a_token


def work_of(operation: ops.AnyOperation) -> Work:
    """What an operation costs; raises ConfigError for one that is not in the vocabulary."""
    match operation:
        case ops.Linear():
            once = "U" in operation.shape
            return Work(operation.numbers(B=1, T=1, S=1) * operation.inputs_wide, once=once)
        case ops.Scores(window=window, chunked=chunked, causal=causal):
            return Work(0, operation.heads * operation.query_dim, window, chunked, causal)
        case ops.Mix(window=window, chunked=chunked, causal=causal):
            return Work(0, operation.numbers(B=1, T=1), window, chunked, causal)
        case ops.Cache(window=window, repeats=repeats, ours=ours):
            left = operation.numbers(B=1, S=1)
            return Work(window=window, left=left, repeats=None if ours else repeats, once=operation.once)
        case ops.Scan(state=state, theirs=theirs):
            numbers, chunk = math.prod(state), operation.chunk if operation.chunk > 1 else 0
            there = None if theirs is None else theirs // numbers
            sizes: dict[str, Any] = {"chunk": chunk, "a_chunk": operation.chunk_products, "spared": operation.spared}
            sizes["between"] = operation.between
            again = operation.again or chunk > 0
            return Work(operation.products, state=numbers, repeats=there, wide=operation.wide, again=again, **sizes)
        case ops.Convolve(width=width, carried=carried):
            channels = operation.numbers(B=1, T=1)
            kept = width if carried is None else carried
            return Work(channels * width, state=channels * kept, beyond=width - 1)
        case ops.Pairs():
            return Work(state=operation.numbers(B=1, T=1) // 2)
        case ops.Tokens() | ops.Stream() | ops.Given() | ops.Embed() | ops.Positions() | ops.Concat() | ops.Gather():
            return Work()  # what is moved, not computed
        case ops.AltUp(step="predict", shape=(streams, *_, width)):
            return Work(int(streams) ** 2 * int(width))
        case ops.AltUp() | ops.Sparse() | ops.Blend():
            return Work()
        case ops.Norm() | ops.Rotate() | ops.Alibi() | ops.Cap() | ops.Softmax() | ops.Activation():
            return Work()  # element by element, here and below
        case ops.Product() | ops.Scale() | ops.Shift() | ops.Add() | ops.Choose() | ops.Combine() | ops.Temper():
            return Work()
        case _:
            raise ops.unknown(operation, "the count of FLOPs and caches")


_Works = list[tuple[ops.AnyOperation, Work, int]]  # operations, what each costs, and how often it is there


def works(spec: ModelSpec) -> _Works:
    """A tree's without its encoder's, of which nothing but linears costs anything before its first layer. Layers alike
    are counted once and multiplied: there may be thousands.
    """
    before = tuple(each for each in spec.before_blocks() if isinstance(each, ops.Linear))
    programs = [
        (before, 1),
        *((spec.block_operations(block), number) for block, number in Counter(spec.blocks).items()),
    ]
    return [
        (each, work_of(each), number) for program, number in (*programs, (spec.after_blocks(), 1)) for each in program
    ]


def _works_of_both(spec: ModelSpec) -> _Works:
    """A tree's, and its encoder's, whose rows say so."""
    if spec.encoder is None:
        return works(spec)
    encoder = works(spec.encoder)
    told = [(msgspec.structs.replace(each, row=f"encoder {each.row}"), work, n) for each, work, n in encoder]
    return told + works(spec)


def _products(found: _Works) -> Counter[str]:
    """FLOPs of the products that each token needs, by component, without scores."""
    flops: Counter[str] = Counter()
    for each, work, number in found:
        flops[each.row] += 0 if work.once else 2 * number * work.a_token
    return flops


def _scored_behind(operation: ops.AnyOperation, work: Work, context: int) -> int:
    """Multiplications of one token with the `context` that it sees, itself among them, the others being in the cache.

    Of a latent neither keys nor values are there. They are made again of each cached latent, or the up projection is
    taken into the query or the output, which then meets the latents themselves (DeepSeek-V2 2405.04434, section 2.1.2):
    whichever is less, as an implementation chooses. gptkit's own modules make them again.
    """
    if not isinstance(operation, ops.Linear) or "S" not in operation.shape:
        return work.a_pair * _in_sight(context, work.window, work.chunked, work.causal)
    seen, heads = _in_sight(context, operation.window), int(operation.shape[2])
    made = work.a_token // operation.inputs_wide
    return min((seen - 1) * work.a_token, seen * (heads * operation.inputs_wide - made))


def windows(spec: ModelSpec) -> set[int]:
    """How many tokens layers see that do not see all."""
    return {work.window for _, work, _ in works(spec) if work.window is not None}


def _in_sight(context: int, window: int | None, chunked: bool = False, causal: bool = True) -> int:
    """Of so many tokens those that the last one sees, or the one in the middle where it looks in both directions."""
    if window is not None and not causal:
        return min(context, 2 * window - 1)
    if window is not None and chunked:
        return (context - 1) % window + 1
    return context if window is None else min(context, window)


def _in_order(found: Mapping[str, int]) -> dict[str, int]:
    """What is there, by component in the order of `COMPONENTS`."""
    return {name: found[name] for name in dict.fromkeys((*_COMPONENTS, *found)) if found.get(name)}


# --- a token behind others -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs(Record):
    """What a tree costs.

    parameters: all of them, and `active` those that one token meets (of a mixture of experts, top_k experts a layer);
    `embedding` is the share of tables and, unless tied, the head, which no expert is among. The non_embedding ones are
    the others, the active of which are Kaplan's N of a mixture.
    flops: of the forward pass, for one token that sees `context` tokens, by component: the projections of attention,
    its scores (with the values that they weigh), feed-forward, router, head. cached: numbers that a token leaves in the
    key-value cache, all layers together; held: numbers there after `context` tokens, which windows make fewer, states
    that are there however many tokens were read among them, of which `wide` are in fp32 at least. Of a tree with an
    encoder it is a token of the decoder, which sees as many tokens of the source; their keys and values are held too.
    """

    JSON = (
        "parameters active embedding non_embedding active_non_embedding context flops_a_token=flops"
        " flops_a_token.total=total_flops"
    )

    parameters: int
    active: int
    embedding: int
    context: int
    flops: Mapping[str, int]
    cached: int
    held: int
    wide: int = 0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def non_embedding(self) -> int:
        return self.parameters - self.embedding

    @property
    def active_non_embedding(self) -> int:
        return self.active - self.embedding

    @property
    def figures(self) -> dict[str, int]:
        """The ones that models are compared by, with bytes of a cache in bf16."""
        cache = {"cache_bytes_a_token": self.cache_bytes(), "cache_bytes_at_context": self.held_bytes()}
        return {"parameters": self.parameters, **cache, "flops_a_token": self.total_flops}

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes that a token leaves in the cache, stored in so many bytes per number (2: bf16, fp16)."""
        return self.cached * itemsize

    def held_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the cache after `context` tokens."""
        return (self.held - self.wide) * itemsize + self.wide * max(itemsize, FLOAT)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, all whole numbers."""
        sizes = {"float32": 4, "bfloat16": 2}
        return {
            **super().as_json(),
            "cache_bytes_a_token": {name: self.cache_bytes(size) for name, size in sizes.items()},
            "cache_bytes_at_context": {name: self.held_bytes(size) for name, size in sizes.items()},
        }


_COMPONENTS = ("attention", "scores", "feed-forward", "router", "head")
"""The order of rows; a component of another label is behind them."""


def usual_context(spec: ModelSpec) -> int:
    """The context that a tree is for: what it states, or `CONTEXT`."""
    stated = stated_context(spec)
    return CONTEXT if stated is None else stated


def stated_context(spec: ModelSpec) -> int | None:
    """The context that a tree says it is for, or that its table of positions is long enough for; None: it does not."""
    if spec.context_length is not None:
        return spec.context_length
    return None if spec.positions is None else spec.positions.length


def costs(spec: ModelSpec, context: int | None = None) -> Costs:
    """What a tree costs at a context, by default its own. Trees are compared at one context, which may be more than one
    of them has positions for.

    Raises:
        UsageError: no tokens in sight, or absurdly many.
    """
    length = usual_context(spec) if context is None else context
    check_number("tokens", length)
    found, counted = works(spec), count(spec)
    flops = _products(found)
    flops["scores"] += 2 * sum(_scored_behind(each, work, length) * number for each, work, number in found)
    return Costs(
        parameters=counted.total,
        active=counted.active,
        embedding=counted.embedding,
        context=length,
        flops=_in_order(flops),
        cached=sum(work.left * number for _, work, number in found if not work.once),
        held=sum(work.held(length) * number for _, work, number in found),
        wide=sum(work.held(length) * number for _, work, number in found if work.wide),
    )


# --- many tokens at once ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops(Record):
    """FLOPs of a forward pass over `batch` sequences of `tokens` tokens, none of them in a cache.

    products: by component, what weights are multiplied with: the projections of attention, feed-forward, router, head
    (of every token; `head_of_last` is what a prefill needs instead, which asks for the last token's logits alone).
    scores: queries with keys and weights with values, each of a sequence's tokens with each: what dense kernels
    compute, and what torch's FlopCounterMode counts. needed_scores: those that the causal mask and windows leave.
    dense, causal: all products, with the former or the latter. made_again: those of recurrences, in chunks of tokens,
    which the backward pass makes anew. A triangular system counts as the product with its inverse.
    """

    JSON = (
        "tokens batch components=products scores.dense=scores scores.causal=needed_scores"
        " total.dense=dense total.causal=causal head_of_last_token=head_of_last"
    )

    tokens: int
    batch: int
    products: Mapping[str, int]
    scores: int
    needed_scores: int
    made_again: int = 0

    @property
    def dense(self) -> int:
        return sum(self.products.values()) + self.scores

    @property
    def causal(self) -> int:
        return sum(self.products.values()) + self.needed_scores

    @property
    def head_of_last(self) -> int:
        return self.products["head"] // self.tokens


@dataclass(frozen=True)
class TrainingFlops(Record):
    """FLOPs of a forward and a backward pass, and beside them what the usual estimates say.

    forward: the forward pass. The backward pass makes two products for each of its products, one for the gradient of
    either factor: 2 × forward. six_n: 6·N·D, D = batch · tokens, N all parameters that a token meets (Hoffmann et al.
    2203.15556); six_n_non_embedding: N without tables and head (Kaplan et al. 2001.08361), which leaves scores and
    head out.
    """

    JSON = (
        "tokens=forward.tokens batch=forward.batch total.dense=dense total.causal=causal"
        " extra.fused_attention=flash_extra extra.checkpointing=checkpointing_extra"
        " 6N.active=six_n 6N.active_non_embedding=six_n_non_embedding"
    )

    forward: Flops
    six_n: int
    six_n_non_embedding: int

    @property
    def flash_extra(self) -> int:
        """What fused kernels add, which keep no scores: each is made again, a product more to the four of the backward
        pass, as dense kernels make them. torch's own counter counts so.
        """
        return self.forward.scores // 2

    @property
    def checkpointing_extra(self) -> int:
        """What running every layer again adds (Chen et al. 1604.06174), scores as dense kernels make them."""
        return self.forward.dense - self.forward.products["head"]

    @property
    def dense(self) -> int:
        return 3 * self.forward.dense + self.forward.made_again

    @property
    def causal(self) -> int:
        return 3 * self.forward.causal + self.forward.made_again


def forward_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> Flops:
    """FLOPs of a forward pass over `batch` sequences of `tokens` tokens each (a prefill, or a step of training); of a
    tree with an encoder over as many tokens of the source too, with the encoder's.

    Raises:
        UsageError: no tokens or sequences, or more tokens than the tree has positions for.
    """
    check_sizes(spec, tokens, batch)
    found = _works_of_both(spec)
    every: Counter[str] = Counter()
    dense = needed = again = 0
    for each, work, number in found:
        every[each.row] += 2 * batch * number * work.of_many(tokens)
        again += 2 * batch * number * work.of_many(tokens) if work.again else 0
        dense += 2 * batch * number * work.a_pair * tokens * tokens
        needed += 2 * batch * number * work.a_pair * pairs_in_sight(tokens, work.window, work.chunked, work.causal)
    return Flops(tokens, batch, _in_order(every), dense, needed, again)


def training_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> TrainingFlops:
    """FLOPs of a step of training on `batch` sequences of `tokens` tokens each; raises as `forward_flops`."""
    forward, found = forward_flops(spec, tokens, batch), costs(spec, tokens)
    seen = 6 * tokens * batch
    return TrainingFlops(forward, seen * found.active, seen * found.active_non_embedding)


def pairs_in_sight(tokens: int, window: int | None, chunked: bool = False, causal: bool = True) -> int:
    """Pairs of a query and a key that the causal mask and a window leave: Σ min(t, window) for t = 1 … tokens. In both
    directions each but that of a token with itself is there twice.
    """
    if not causal:
        return 2 * pairs_in_sight(tokens, window) - tokens
    if window is not None and chunked:
        whole, rest = divmod(tokens, window)
        return whole * pairs_in_sight(window, None) + pairs_in_sight(rest, None)
    near = _in_sight(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near


# --- the cache -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheSize(Record):
    """Bytes of the key-value cache of `batch` sequences of `context` tokens.

    a_token: what one more token of one sequence leaves, all layers together, before windows let go of older ones.
    held: what is there once all tokens were read, and until the next. buffer: what a cache made once for so many
    tokens takes, where windows roll: of each window one token more than `held`. in_transformers: what its DynamicCache
    holds: the same, but where it repeats keys and values for their query heads before the cache (Falcon's new decoder
    architecture). None where a layer carries what none of its families here has. states: what of it does not grow with
    the context, which recurrences and convolutions carry; some are in fp32 whatever the dtype. of_source: what of it is
    there once of a source of as many tokens, which an encoder has read.
    in_vllm, in_llama_cpp: what these allocate (`allocators`), the latter in float16; None where it is not known.
    """

    JSON = (
        "context batch dtype bytes_a_token=a_token bytes=held rolling_buffer_bytes=buffer"
        " bytes_in_transformers=in_transformers bytes_in_vllm=in_vllm bytes_in_llama_cpp=in_llama_cpp"
        " bytes_of_states=states bytes_of_source=of_source"
    )

    context: int
    batch: int
    dtype: str
    a_token: int
    held: int
    buffer: int
    in_transformers: int | None
    in_vllm: int | None = None
    in_llama_cpp: int | None = None
    states: int = 0
    of_source: int = 0


def cache_bytes(spec: ModelSpec, context: int, dtype: str = "bfloat16", batch: int = 1) -> CacheSize:
    """Bytes of the key-value cache after `context` tokens; of latent attention, of the latent and the rotated keys.
    What programs allocate is for `allocators.allocated`.

    Raises:
        UsageError: no tokens or sequences, more tokens than the tree has positions for, or an unknown dtype.
    """
    check_sizes(spec, context, batch)
    size, found = itemsize(dtype), [(work, number) for _, work, number in works(spec)]
    states = sum(work.bytes_held(0, size) * number for work, number in found)
    held = sum(work.bytes_held(context, size) * number for work, number in found)
    rolling = states + size * sum(work.left * _in_sight(context, work.window) * number for work, number in found)
    theirs = [work.repeats and work.bytes_held(context, size) * number * work.repeats for work, number in found]
    return CacheSize(
        context=context,
        batch=batch,
        dtype=full_dtype(dtype),
        a_token=size * sum(work.left * number for work, number in found if not work.once),
        held=batch * held,
        buffer=batch * rolling,
        in_transformers=None if None in theirs else batch * sum(filter(None, theirs)),
        states=batch * states,
        of_source=batch * sum(work.bytes_held(context, size) * number for work, number in found if work.once),
    )
