"""The costs of running a tree: parameters, FLOPs and cache, computed from its shapes alone. No torch, no weights.

FLOPs are those of matrix products, two for a multiplication with its addition, as Kaplan et al. (2001.08361, table 1)
and PaLM (2204.02311, appendix B) count them. A token needs 2 for every weight that it uses. In attention, it needs 2
for every element of the keys and values of the tokens that it attends to. Norms, activations, softmax, rotations and
biases grow with the width and not with its square, so they are not counted. Table look-ups are not counted either.

If many tokens are read at once, scores have two counts. The dense count has every query with every key, like torch's
FlopCounterMode, whatever the kernel skips. The causal count has only the pairs that the mask and windows need.

A layer with a window w stores w - 1 tokens between two steps, like transformers' DynamicSlidingWindowLayer: with the
step's own token they are w. A rolling buffer (Mistral 2310.06825, section 2) has room for w.
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

CONTEXT = 2048  # the number of tokens for a tree that states no context


# --- an operation's share --------------------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True):
    """The multiplications of one operation in matrix products, and the numbers that it caches."""

    per_token: int = 0  # multiplications per token
    per_pair: int = 0  # multiplications per pair of a token and one that it attends to
    window: int | None = None  # the number of tokens that a token attends to; None for all
    chunked: bool = False  # a token attends to its chunk of `window` tokens instead
    causal: bool = True  # a token does not attend to later ones
    cached_per_token: int = 0  # cached numbers per token within the window
    state: int = 0  # cached numbers for a sequence of any length
    repeats: int | None = 1  # how many times transformers caches them; None if it has no such cache
    wide: bool = False  # the cache is in fp32 or wider
    chunk: int = 0  # tokens per chunk, if a prefill computes in chunks
    per_chunk: int = 0  # multiplications per chunk, in place of `per_token`; a partial chunk counts as one
    spared: int = 0  # multiplications that the first chunk saves
    between: int = 0  # multiplications per pair of chunk states, the initial one included
    beyond: int = 0  # tokens computed after the end of a sequence, which is padded to be longer than this
    once: bool = False  # it depends only on an encoder's source, so that further tokens cost nothing
    again: bool = False  # the backward pass computes it again

    def numbers_after(self, context: int) -> int:
        """Return the cached numbers after `context` tokens. A window has one token less, for the next token."""
        return self.cached_per_token * (context if self.window is None else min(context, self.window - 1)) + self.state

    def bytes_after(self, context: int, size: int) -> int:
        """Return the cached bytes after `context` tokens, with `size` bytes per number."""
        return self.numbers_after(context) * (max(size, FLOAT) if self.wide else size)

    def of_many(self, tokens: int) -> int:
        """Return the multiplications for `tokens` tokens that are read at once, without pairs."""
        if self.chunk:
            chunks = -(-tokens // self.chunk)
            return chunks * self.per_chunk - self.spared + (chunks + 1) ** 2 * self.between
        return (max(tokens, self.beyond + 1) + self.beyond) * self.per_token if self.beyond else tokens * self.per_token


def work_of(operation: ops.AnyOperation) -> Work:
    """Return the work of an operation. Raises ConfigError for a kind that gptkit does not know."""
    match operation:
        case ops.Linear():
            once = "U" in operation.shape
            return Work(operation.numbers(B=1, T=1, S=1) * operation.inputs_wide, once=once)
        case ops.Scores(window=window, chunked=chunked, causal=causal):
            return Work(0, operation.heads * operation.query_dim, window, chunked, causal)
        case ops.Mix(window=window, chunked=chunked, causal=causal):
            return Work(0, operation.numbers(B=1, T=1), window, chunked, causal)
        case ops.CacheOperation(window=window, repeats=repeats, ours=ours):
            cached = operation.numbers(B=1, S=1)
            return Work(window=window, cached_per_token=cached, repeats=None if ours else repeats, once=operation.once)
        case ops.Scan(state=state, theirs=theirs):
            numbers, chunk = math.prod(state), operation.chunk if operation.chunk > 1 else 0
            copies = None if theirs is None else theirs // numbers
            sizes: dict[str, Any] = {"chunk": chunk, "per_chunk": operation.chunk_products, "spared": operation.spared}
            sizes["between"] = operation.between
            again = operation.again or chunk > 0
            return Work(operation.products, state=numbers, repeats=copies, wide=operation.wide, again=again, **sizes)
        case ops.Convolve(width=width, carried=carried):
            channels = operation.numbers(B=1, T=1)
            cached = width if carried is None else carried
            return Work(channels * width, state=channels * cached, beyond=width - 1)
        case ops.Pairs():
            return Work(state=operation.numbers(B=1, T=1) // 2)
        case ops.Tokens() | ops.Stream() | ops.Given() | ops.Embed() | ops.Positions() | ops.Concat() | ops.Gather():
            return Work()  # these operations move numbers and multiply none
        case ops.AltUp(step="predict", shape=(streams, *_, width)):
            return Work(int(streams) ** 2 * int(width))
        case ops.AltUp() | ops.Sparse() | ops.Blend():
            return Work()
        case ops.NormOperation() | ops.Rotate() | ops.Alibi() | ops.Cap() | ops.Softmax() | ops.ActivationOperation():
            return Work()  # element by element, here and below
        case (
            ops.Product() | ops.ScaleOperation() | ops.Shift() | ops.Add() | ops.Choose() | ops.Combine() | ops.Temper()
        ):
            return Work()
        case _:
            raise ops.unknown(operation, "the count of FLOPs and caches")


_Works = list[tuple[ops.AnyOperation, Work, int]]  # operations, with their work and the number of equal ones


def works(spec: ModelSpec) -> _Works:
    """Return the work of a tree without its encoder.

    Equal layers are computed once, because there may be thousands. Before the first layer, only linears have a cost.
    """
    before = tuple(operation for operation in spec.before_blocks() if isinstance(operation, ops.Linear))
    programs = [
        (before, 1),
        *((spec.block_operations(block), number) for block, number in Counter(spec.blocks).items()),
    ]
    return [
        (operation, work_of(operation), number)
        for program, number in (*programs, (spec.after_blocks(), 1))
        for operation in program
    ]


def _works_of_both(spec: ModelSpec) -> _Works:
    """Return the work of a tree and its encoder, whose rows start with "encoder"."""
    if spec.encoder is None:
        return works(spec)
    encoder = works(spec.encoder)
    rows = [(msgspec.structs.replace(part, row=f"encoder {part.row}"), work, number) for part, work, number in encoder]
    return rows + works(spec)


def _products(all_works: _Works) -> Counter[str]:
    """Return the FLOPs of one token's products by component, without scores."""
    flops: Counter[str] = Counter()
    for operation, work, number in all_works:
        flops[operation.row] += 0 if work.once else 2 * number * work.per_token
    return flops


def _score_products(operation: ops.AnyOperation, work: Work, context: int) -> int:
    """Return the multiplications of one token with the `context` tokens that it attends to, including itself.

    The other tokens are cached. Latent attention can get keys and values in two ways, and this counts the cheaper one:
    either it computes them again from the cached latents, as gptkit's modules do, or it applies the up projection to
    the query or the output, and multiplies this by latents (DeepSeek-V2 2405.04434, section 2.1.2).
    """
    if not isinstance(operation, ops.Linear) or "S" not in operation.shape:
        return work.per_pair * _in_sight(context, work.window, work.chunked, work.causal)
    seen, heads = _in_sight(context, operation.window), int(operation.shape[2])
    outputs = work.per_token // operation.inputs_wide
    return min((seen - 1) * work.per_token, seen * (heads * operation.inputs_wide - outputs))


def windows(spec: ModelSpec) -> set[int]:
    """Return the window sizes of all layers that have a window."""
    return {work.window for _, work, _ in works(spec) if work.window is not None}


def _in_sight(context: int, window: int | None, chunked: bool = False, causal: bool = True) -> int:
    """Return the number of tokens, of `context`, that the last token attends to (without a causal mask, the middle)."""
    if window is not None and not causal:
        return min(context, 2 * window - 1)
    if window is not None and chunked:
        return (context - 1) % window + 1
    return context if window is None else min(context, window)


def _in_order(flops: Mapping[str, int]) -> dict[str, int]:
    """Return the components that are not zero, in the order of `_COMPONENTS`."""
    return {name: flops[name] for name in dict.fromkeys((*_COMPONENTS, *flops)) if flops.get(name)}


# --- the next token --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs(Record):
    """The costs of a tree for one token after a context.

    For a tree with an encoder, it is a token of the decoder, and the source has `context` tokens too.
    """

    JSON = (
        "parameters active embedding non_embedding active_non_embedding context flops_a_token=flops"
        " flops_a_token.total=total_flops"
    )

    parameters: int
    active: int
    """The parameters that one token uses: only top_k experts of a mixture."""
    embedding: int
    """The parameters of token and position embeddings and, unless tied, of the head."""
    context: int
    """The number of tokens that the token attends to."""
    flops: Mapping[str, int]
    """The FLOPs of the token's forward pass, by component. "scores" includes the weighted sum of values."""
    cached: int
    """The numbers that one token adds to the KV cache, over all layers."""
    cached_at_context: int
    """The numbers in the cache after `context` tokens, within windows, including recurrent states."""
    wide: int = 0
    """The part of `cached_at_context` that is in fp32 or wider."""

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
        """Return the figures for comparisons, with the bytes of a bf16 cache."""
        cache = {"cache_bytes_a_token": self.cache_bytes(), "cache_bytes_at_context": self.cache_bytes_at_context()}
        return {"parameters": self.parameters, **cache, "flops_a_token": self.total_flops}

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes that one token adds to the cache, with `itemsize` bytes per number (2 for bf16 and fp16)."""
        return self.cached * itemsize

    def cache_bytes_at_context(self, itemsize: int = 2) -> int:
        """Return the bytes of the cache after `context` tokens."""
        return (self.cached_at_context - self.wide) * itemsize + self.wide * max(itemsize, FLOAT)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, all whole numbers."""
        sizes = {"float32": 4, "bfloat16": 2}
        return {
            **super().as_json(),
            "cache_bytes_a_token": {name: self.cache_bytes(size) for name, size in sizes.items()},
            "cache_bytes_at_context": {name: self.cache_bytes_at_context(size) for name, size in sizes.items()},
        }


_COMPONENTS = ("attention", "scores", "feed-forward", "router", "head")
"""The order of rows. Components with other labels follow."""


def usual_context(spec: ModelSpec) -> int:
    """Return the context that a tree states, or `CONTEXT`."""
    stated = stated_context(spec)
    return CONTEXT if stated is None else stated


def stated_context(spec: ModelSpec) -> int | None:
    """Return the context that a tree states, or the length of its table of positions, or None."""
    if spec.context_length is not None:
        return spec.context_length
    return None if spec.positions is None else spec.positions.length


def costs(spec: ModelSpec, context: int | None = None) -> Costs:
    """Return the costs of a tree at a context, by default its own.

    The context may be longer than the table of positions, because trees are compared at one context.

    Raises:
        UsageError: the context is below 1, or absurdly long.
    """
    length = usual_context(spec) if context is None else context
    check_number("tokens", length)
    all_works, counted = works(spec), count(spec)
    flops = _products(all_works)
    flops["scores"] += 2 * sum(
        _score_products(operation, work, length) * number for operation, work, number in all_works
    )
    return Costs(
        parameters=counted.total,
        active=counted.active,
        embedding=counted.embedding,
        context=length,
        flops=_in_order(flops),
        cached=sum(work.cached_per_token * number for _, work, number in all_works if not work.once),
        cached_at_context=sum(work.numbers_after(length) * number for _, work, number in all_works),
        wide=sum(work.numbers_after(length) * number for _, work, number in all_works if work.wide),
    )


# --- many tokens at once ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops(Record):
    """The FLOPs of a forward pass over `batch` sequences of `tokens` tokens, without a cache.

    A triangular system counts as the product with its inverse.
    """

    JSON = (
        "tokens batch components=products scores.dense=scores scores.causal=needed_scores"
        " total.dense=dense total.causal=causal head_of_last_token=head_of_last"
    )

    tokens: int
    batch: int
    products: Mapping[str, int]
    """The FLOPs of products with weights, by component. "head" computes the logits of all tokens."""
    scores: int
    """The FLOPs of dense attention kernels for all pairs of tokens, as torch's FlopCounterMode counts them."""
    needed_scores: int
    """The FLOPs of attention for the pairs that the causal mask and windows need."""
    recomputed: int = 0
    """The FLOPs of recurrences that the backward pass computes again, in chunks of tokens."""

    @property
    def dense(self) -> int:
        """Return all FLOPs, with the scores of dense kernels."""
        return sum(self.products.values()) + self.scores

    @property
    def causal(self) -> int:
        """Return all FLOPs, with only the needed scores."""
        return sum(self.products.values()) + self.needed_scores

    @property
    def head_of_last(self) -> int:
        """Return the FLOPs of the head for the last token, which is all that a prefill needs."""
        return self.products["head"] // self.tokens


@dataclass(frozen=True)
class TrainingFlops(Record):
    """The FLOPs of a forward and a backward pass, and the usual estimates of them.

    For every product of the forward pass, the backward pass has two products, one for the gradient of either factor.
    """

    JSON = (
        "tokens=forward.tokens batch=forward.batch total.dense=dense total.causal=causal"
        " extra.fused_attention=flash_extra extra.checkpointing=checkpointing_extra"
        " 6N.active=six_n 6N.active_non_embedding=six_n_non_embedding"
    )

    forward: Flops
    six_n: int
    """6·N·D, with D = batch · tokens, and N the active parameters (Hoffmann et al. 2203.15556)."""
    six_n_non_embedding: int
    """6·N·D, with N without embeddings and head (Kaplan et al. 2001.08361)."""

    @property
    def flash_extra(self) -> int:
        """Return the extra FLOPs of fused kernels, which compute all scores again in the backward pass.

        This is one dense product more than the four of the backward pass, as torch's FlopCounterMode counts it.
        """
        return self.forward.scores // 2

    @property
    def checkpointing_extra(self) -> int:
        """Return the extra FLOPs of computing every layer again (Chen et al. 1604.06174), with dense scores."""
        return self.forward.dense - self.forward.products["head"]

    @property
    def dense(self) -> int:
        return 3 * self.forward.dense + self.forward.recomputed

    @property
    def causal(self) -> int:
        return 3 * self.forward.causal + self.forward.recomputed


def forward_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> Flops:
    """Return the FLOPs of a forward pass over `batch` sequences of `tokens` tokens, as in a prefill or in training.

    For a tree with an encoder, they include the encoder's, for a source of as many tokens.

    Raises:
        UsageError: there are no tokens or sequences, or more tokens than positions.
    """
    check_sizes(spec, tokens, batch)
    products: Counter[str] = Counter()
    dense = needed = again = 0
    for operation, work, number in _works_of_both(spec):
        products[operation.row] += 2 * batch * number * work.of_many(tokens)
        again += 2 * batch * number * work.of_many(tokens) if work.again else 0
        dense += 2 * batch * number * work.per_pair * tokens * tokens
        needed += 2 * batch * number * work.per_pair * pairs_in_sight(tokens, work.window, work.chunked, work.causal)
    return Flops(tokens, batch, _in_order(products), dense, needed, again)


def training_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> TrainingFlops:
    """Return the FLOPs of a training step on `batch` sequences of `tokens` tokens; see `forward_flops`."""
    forward, of_token = forward_flops(spec, tokens, batch), costs(spec, tokens)
    factor = 6 * tokens * batch
    return TrainingFlops(forward, factor * of_token.active, factor * of_token.active_non_embedding)


def pairs_in_sight(tokens: int, window: int | None, chunked: bool = False, causal: bool = True) -> int:
    """Return the number of pairs of a query and a key within the causal mask and a window.

    It is Σ min(t, window) for t = 1 … tokens. Without a causal mask, pairs of different tokens count twice.
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
    """The bytes of the KV cache for `batch` sequences of `context` tokens."""

    JSON = (
        "context batch dtype bytes_a_token=bytes_per_token bytes=nbytes rolling_buffer_bytes=buffer"
        " bytes_in_transformers=in_transformers bytes_in_vllm=in_vllm bytes_in_llama_cpp=in_llama_cpp"
        " bytes_of_states=states bytes_of_source=of_source"
    )

    context: int
    batch: int
    dtype: str
    bytes_per_token: int
    """The bytes that one more token of one sequence adds, over all layers and without windows."""
    nbytes: int
    """The bytes between the last token and the next."""
    buffer: int
    """The bytes of a preallocated cache with rolling windows, which have one token more than in `nbytes`."""
    in_transformers: int | None
    """The bytes of transformers' DynamicCache; None if transformers has no cache for a layer.

    They differ from `nbytes` if keys and values are first repeated for query heads (Falcon's new decoder architecture).
    """
    in_vllm: int | None = None
    """The bytes that vLLM allocates (`allocators`), if known."""
    in_llama_cpp: int | None = None
    """The bytes that llama.cpp allocates in float16 (`allocators`), if known."""
    states: int = 0
    """The bytes of recurrences and convolutions, which do not grow with the context. Some are always in fp32."""
    of_source: int = 0
    """The bytes for an encoder's source of `context` tokens."""


def cache_bytes(spec: ModelSpec, context: int, dtype: str = "bfloat16", batch: int = 1) -> CacheSize:
    """Return the bytes of the KV cache after `context` tokens. Latent attention caches latents and rotated keys.

    `allocators.allocated` adds the bytes that vLLM and llama.cpp allocate.

    Raises:
        UsageError: there are no tokens or sequences, there are more tokens than positions, or the dtype is unknown.
    """
    check_sizes(spec, context, batch)
    size, pairs = itemsize(dtype), [(work, number) for _, work, number in works(spec)]
    states = sum(work.bytes_after(0, size) * number for work, number in pairs)
    nbytes = sum(work.bytes_after(context, size) * number for work, number in pairs)
    rolling = states + size * sum(
        work.cached_per_token * _in_sight(context, work.window) * number for work, number in pairs
    )
    repeated = [work.repeats and work.bytes_after(context, size) * number * work.repeats for work, number in pairs]
    return CacheSize(
        context=context,
        batch=batch,
        dtype=full_dtype(dtype),
        bytes_per_token=size * sum(work.cached_per_token * number for work, number in pairs if not work.once),
        nbytes=batch * nbytes,
        buffer=batch * rolling,
        in_transformers=None if None in repeated else batch * sum(filter(None, repeated)),
        states=batch * states,
        of_source=batch * sum(work.bytes_after(context, size) * number for work, number in pairs if work.once),
    )
