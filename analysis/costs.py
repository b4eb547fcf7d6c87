"""The costs of running a model: parameters, FLOPs and cache, computed from shapes alone, without torch or weights.

FLOPs are those of matrix products, two for a multiplication with its addition, as Kaplan et al. (2001.08361, table 1)
and PaLM (2204.02311, appendix B) count them. A token needs 2 FLOPs for every weight that it uses. In attention, it
needs 2 FLOPs for every element of the keys and values of the tokens that it attends to. Norms, activations, softmax,
rotations and biases grow with the width and not with its square, so they are not counted. Table look-ups are not
counted either.

If many tokens are read at once, there are two counts for attention scores. The dense count includes every pair of a
query and a key, like torch's FlopCounterMode, even if the kernel skips some. The causal count includes only the pairs
that the causal mask and the windows need.

A layer with a sliding window of w tokens stores w - 1 tokens between two steps, like transformers'
DynamicSlidingWindowLayer, because the token of the next step is the last of the window. A rolling buffer (Mistral
2310.06825, section 2) has room for w.
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

CONTEXT = 2048  # the number of tokens for a model whose config states no context


# --- an operation's share --------------------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True):
    """The multiplications of one operation in matrix products, and the elements that it stores in the cache."""

    per_token: int = 0  # multiplications per token
    per_pair: int = 0  # multiplications per pair of a token and a token that it attends to
    window: int | None = None  # the number of tokens that a token attends to; None for all
    chunked: bool = False  # whether a token attends to its chunk of `window` tokens instead of a sliding window
    causal: bool = True  # whether a token attends to no later tokens
    cached_per_token: int = 0  # cached elements per token within the window
    state: int = 0  # cached elements per sequence, for any number of tokens
    repeats: int | None = 1  # the number of copies in transformers' cache; None if transformers cannot cache it
    wide: bool = False  # whether the cache is in fp32 for narrower dtypes of the model
    chunk: int = 0  # tokens per chunk, if a prefill computes in chunks
    per_chunk: int = 0  # multiplications per chunk, in place of `per_token`; a partial chunk counts as a whole one
    spared: int = 0  # multiplications that the first chunk does not need
    between: int = 0  # multiplications per pair of two chunks' states, including the initial state
    beyond: int = 0  # outputs of a convolution after the end of the text, which is padded to more tokens than this
    once: bool = False  # whether it depends only on an encoder's source, so that further tokens cost nothing
    again: bool = False  # whether the backward pass computes it again

    def numbers_after(self, context: int) -> int:
        """Return the number of cached elements after `context` tokens.

        A layer with a window w keeps w - 1 tokens at most.
        """
        return self.cached_per_token * (context if self.window is None else min(context, self.window - 1)) + self.state

    def bytes_after(self, context: int, size: int) -> int:
        """Return the bytes in the cache after `context` tokens, in a model with `size` bytes per number."""
        return self.numbers_after(context) * (max(size, FLOAT) if self.wide else size)

    def of_many(self, tokens: int) -> int:
        """Return the multiplications for `tokens` tokens that are read at once.

        The multiplications between pairs of tokens (`per_pair`) are not included.
        """
        if self.chunk:
            chunks = -(-tokens // self.chunk)
            return chunks * self.per_chunk - self.spared + (chunks + 1) ** 2 * self.between
        return (max(tokens, self.beyond + 1) + self.beyond) * self.per_token if self.beyond else tokens * self.per_token


def work_of(operation: ops.AnyOperation) -> Work:
    """Return the multiplications and the cache of an operation. Raises ConfigError for an unknown kind of operation."""
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
    """Return all operations of a model without its encoder, as (operation, its work, number of equal operations).

    The operations of equal layers are listed once, since there may be thousands of layers. Of the operations before the
    first layer, only linears are listed.
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
    """Return the same list as `works`, and the encoder's operations. Their component names start with "encoder"."""
    if spec.encoder is None:
        return works(spec)
    encoder = works(spec.encoder)
    rows = [(msgspec.structs.replace(part, row=f"encoder {part.row}"), work, number) for part, work, number in encoder]
    return rows + works(spec)


def _products(all_works: _Works) -> Counter[str]:
    """Return the FLOPs of one token in matrix products with weights, by component."""
    flops: Counter[str] = Counter()
    for operation, work, number in all_works:
        flops[operation.row] += 0 if work.once else 2 * number * work.per_token
    return flops


def _score_products(operation: ops.AnyOperation, work: Work, context: int) -> int:
    """Return the multiplications in the attention of one token to `context` tokens, including itself.

    The keys and values of the other tokens are cached. Latent attention can use its cached latents in two ways, and
    the cheaper one is counted. Either it computes keys and values again, as gptkit's modules do. Or it applies the up
    projection to the query and the output, and multiplies these by latents (DeepSeek-V2 2405.04434, section 2.1.2).
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
    """Return the number of tokens to which a query at the last of `context` positions attends.

    Args:
        context: the number of tokens.
        window: the window, or None.
        chunked: whether the tokens are divided into chunks of `window` tokens instead of a sliding window.
        causal: whether there is a causal mask. Without one, the result is for a query in the middle of the text.
    """
    if window is not None and not causal:
        return min(context, 2 * window - 1)
    if window is not None and chunked:
        return (context - 1) % window + 1
    return context if window is None else min(context, window)


def _in_order(flops: Mapping[str, int]) -> dict[str, int]:
    """Return a copy of `flops` in the order of `_COMPONENTS`, without components that need no FLOPs."""
    return {name: flops[name] for name in dict.fromkeys((*_COMPONENTS, *flops)) if flops.get(name)}


# --- the next token --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs(Record):
    """The size of a model, and the costs of computing one token that attends to `context` tokens.

    In an encoder-decoder model, it is a token of the decoder, and the encoder's source has `context` tokens too.
    """

    JSON = (
        "parameters active embedding non_embedding active_non_embedding context flops_a_token=flops"
        " flops_a_token.total=total_flops"
    )

    parameters: int
    active: int
    """The parameters that one token uses. In a mixture of experts, only the top_k chosen experts count."""
    embedding: int
    """The parameters of token and position embeddings and, unless tied, of the head."""
    context: int
    """The number of tokens that the token attends to, including itself."""
    flops: Mapping[str, int]
    """The FLOPs of the token's forward pass, by component. "scores" includes the weighted sum of values."""
    cached: int
    """The number of elements that one token adds to the KV cache, over all layers."""
    cached_at_context: int
    """The number of elements in the cache after `context` tokens, without tokens outside of windows. Recurrent states
    are included."""
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
        """Return the figures that reports compare: parameters, FLOPs, and the bytes of a bf16 cache."""
        cache = {"cache_bytes_a_token": self.cache_bytes(), "cache_bytes_at_context": self.cache_bytes_at_context()}
        return {"parameters": self.parameters, **cache, "flops_a_token": self.total_flops}

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes that one token adds to the cache, with `itemsize` bytes per number (2 for bf16 and fp16)."""
        return self.cached * itemsize

    def cache_bytes_at_context(self, itemsize: int = 2) -> int:
        """Return the bytes of the cache after `context` tokens, with `itemsize` bytes per number."""
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
"""The components in the order in which tables list them. Other components follow."""


def usual_context(spec: ModelSpec) -> int:
    """Return the context length of a model, or `CONTEXT` if its config states none."""
    stated = stated_context(spec)
    return CONTEXT if stated is None else stated


def stated_context(spec: ModelSpec) -> int | None:
    """Return the context length that a model's config states, or else the length of its position table, or None."""
    if spec.context_length is not None:
        return spec.context_length
    return None if spec.positions is None else spec.positions.length


def costs(spec: ModelSpec, context: int | None = None) -> Costs:
    """Return the costs of a model for one token that attends to `context` tokens; by default the model's context.

    The context may be longer than the model's position table, so that models can be compared at one context.

    Raises:
        UsageError: the context is below 1 or above `sizes.MOST`.
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

    Solving a triangular system, as in Gated DeltaNet, counts as a product with the inverse matrix.
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
    """The FLOPs of attention for all pairs of tokens. As in torch's FlopCounterMode, pairs that are masked count
    too."""
    needed_scores: int
    """The FLOPs of attention for the pairs that the causal mask and windows need."""
    recomputed: int = 0
    """The FLOPs that the backward pass computes a second time. These are the FLOPs of recurrences that run in chunks of
    tokens, and of recurrences that are recomputed to save memory."""

    @property
    def dense(self) -> int:
        """Return all FLOPs, with attention between all pairs of tokens."""
        return sum(self.products.values()) + self.scores

    @property
    def causal(self) -> int:
        """Return all FLOPs, with attention only between the pairs of tokens that are not masked."""
        return sum(self.products.values()) + self.needed_scores

    @property
    def head_of_last(self) -> int:
        """Return the FLOPs of the head for the last token. A prefill needs only the logits of this token."""
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
        """Return the extra FLOPs of fused attention kernels, which compute all scores again in the backward pass.

        The usual backward pass of attention has four matrix products. The fifth one recomputes q·kᵀ. torch's
        FlopCounterMode counts it in the same way.
        """
        return self.forward.scores // 2

    @property
    def checkpointing_extra(self) -> int:
        """Return the extra FLOPs of activation checkpointing (Chen et al. 1604.06174), which computes layers twice."""
        return self.forward.dense - self.forward.products["head"]

    @property
    def dense(self) -> int:
        return 3 * self.forward.dense + self.forward.recomputed

    @property
    def causal(self) -> int:
        return 3 * self.forward.causal + self.forward.recomputed


def forward_flops(spec: ModelSpec, tokens: int, batch: int = 1) -> Flops:
    """Return the FLOPs of a forward pass over `batch` sequences of `tokens` tokens, as in a prefill or in training.

    For an encoder-decoder model, they include the encoder's FLOPs for a source of `tokens` tokens.

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
    """Return the number of pairs of a query and a key that the causal mask and the window allow, of `tokens` tokens.

    With a sliding window, this is Σ min(t, window) for t = 1 … tokens. Without a causal mask, the pairs (query i, key
    j) and (query j, key i) both count.
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
    """The bytes that one more token of one sequence adds, over all layers, while no window is full."""
    nbytes: int
    """The size of the cache between two steps, when a full window w has w - 1 tokens."""
    buffer: int
    """The size of a preallocated cache with rolling buffers, in which a full window w has w tokens."""
    in_transformers: int | None
    """The bytes of transformers' DynamicCache; None if transformers has no cache for a layer.

    They differ from `nbytes` in models that repeat keys and values for all query heads before they cache them (Falcon's
    new decoder architecture).
    """
    in_vllm: int | None = None
    """The bytes that vLLM allocates (see `allocators`); None if unknown."""
    in_llama_cpp: int | None = None
    """The bytes that llama.cpp allocates in float16 (see `allocators`); None if unknown."""
    states: int = 0
    """The bytes of recurrences and convolutions, which do not grow with the context. Some are always in fp32."""
    of_source: int = 0
    """The bytes of cross-attention's keys and values, for an encoder's source of `context` tokens."""


def cache_bytes(spec: ModelSpec, context: int, dtype: str = "bfloat16", batch: int = 1) -> CacheSize:
    """Return the size of the KV cache after `context` tokens. Latent attention caches latents and rotated keys.

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
