"""The memory that a model needs for inference and training, computed from shapes alone. No torch, no weights.

Only tensors are counted. Memory inside of kernels, gaps of the allocator, and the runtime (hundreds of megabytes for
CUDA) come on top. Tests compare the saved activations with torch, and the peak with a run of gptkit's modules. These
have the same operations as transformers, with one exception: without gradients, gptkit multiplies gate and up in place.
transformers therefore needs one more tensor of the feed-forward width, a tenth to a fifth of activations and cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..components import ModelSpec
from ..display import Record
from ..errors import UsageError
from .activations import FLOAT, Kernel, Pass, saved_for_backward, saved_with_checkpointing, ways
from .costs import cache_bytes, costs, usual_context, windows
from .parameters import count
from .prefill import Logits, peak
from .sizes import MOST, check_sizes, full_dtype, itemsize

_WINDOWED = (
    "a sliding window needs a mask of context x context numbers",
    "keys and values beyond a window stay until the next step",
)


@dataclass(frozen=True)
class Memory(Record):
    """The memory in bytes for running a model on `batch` sequences of `context` tokens."""

    JSON = "context batch dtype weights cache activations total assumed"

    context: int
    batch: int
    dtype: str
    weights: int
    """The weights, with a tied head counted once."""
    cache: int
    """The keys and values after `context` tokens."""
    activations: int
    """The peak of all other tensors during a prefill, including logits, and keys and values outside of windows."""
    assumed: tuple[str, ...]
    """The assumptions of these figures, in sentences."""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class TrainingMemory(Record):
    """The memory in bytes for training a model with Adam on `batch` sequences of `context` tokens per step.

    With several `ranks` (FSDP2, ZeRO-3), it is the memory of one process: its share of weights, gradients and moments,
    and the activations for its own `batch`. All gradients are assumed to exist during the forward pass, as they do with
    gradient accumulation.
    """

    JSON = (
        "context batch dtype weights gradients moments master activations activations_by_component=by_component"
        " checkpointed_activations=checkpointed checkpointed_by_component total total_checkpointed ranks gathered"
        " assumed"
    )

    context: int
    batch: int
    dtype: str
    weights: int
    gradients: int
    moments: int
    """Adam's two moments, in fp32."""
    master: int
    """The optimiser's fp32 weights, if `dtype` is narrower; otherwise 0."""
    by_component: Mapping[str, int]
    """The activations that autograd saves (see `analysis.activations`). "logits" also includes their gradient, of which
    two fp32 copies exist."""
    checkpointed_by_component: Mapping[str, int]
    """The peak of activations with activation checkpointing. Layers save only their inputs, and are computed again one
    at a time."""
    assumed: tuple[str, ...]
    """The assumptions, in sentences."""
    ranks: int = 1
    """The number of processes that shard weights, gradients and moments."""
    gathered: int = 0
    """The peak of unsharded weights and gradients in a process, in addition to its share."""

    @property
    def total(self) -> int:
        return self.states + self.activations

    @property
    def total_checkpointed(self) -> int:
        return self.states + self.checkpointed

    @property
    def states(self) -> int:
        """Return the bytes of weights, gradients and optimiser, which do not depend on the batch."""
        return self.weights + self.gradients + self.moments + self.master + self.gathered

    @property
    def activations(self) -> int:
        return sum(self.by_component.values())

    @property
    def checkpointed(self) -> int:
        return sum(self.checkpointed_by_component.values())


def memory(
    spec: ModelSpec,
    dtype: str = "bfloat16",
    context: int | None = None,
    batch: int = 1,
    *,
    cache_dtype: str | None = None,
    logits: Logits = "last",
) -> Memory:
    """Return the memory for running a model.

    Args:
        spec: the model.
        dtype: the dtype of the weights and activations. If it has only one byte, activations are in bf16.
        context: the number of tokens per sequence, all read in one forward pass; by default the model's context.
        batch: the number of sequences.
        cache_dtype: the dtype of the cache; by default that of activations.
        logits: "last" for the last token's logits, as generation needs, or "all".

    Raises:
        UsageError: there are no tokens or sequences, there are more tokens than positions, or the dtype is unknown.
    """
    length = usual_context(spec) if context is None else context
    check_sizes(spec, length, batch)
    name = full_dtype(dtype)
    computed = name if itemsize(name) > 1 else "bfloat16"
    weights = costs(spec, length).parameters * itemsize(name)
    assumed = (
        f"activations in {computed}, {_attention(spec, 'sdpa')}",
        f"the whole context in one forward pass, logits of {'the last token' if logits == 'last' else 'every token'}",
        *(_WINDOWED if min(windows(spec), default=MOST + 1) <= length else ()),
    )
    others = cache_and_activations(spec, computed, length, batch, cache_dtype, logits)
    return Memory(length, batch, name, weights, *others, assumed)


def cache_and_activations(
    spec: ModelSpec,
    computed: str,
    context: int,
    batch: int,
    cache_dtype: str | None = None,
    logits: Logits = "last",
    ends: bool = True,
) -> tuple[int, int]:
    """Return the bytes of the cache, and the peak bytes of activations during a prefill.

    The arguments are those of `memory`, except `computed`, the dtype of activations, and `ends` (see `prefill.peak`).
    """
    computed_cache = cache_bytes(spec, context, computed, batch).nbytes  # before the conversion to the cache's dtype
    most = peak(spec, Pass(context, batch, itemsize(computed)), logits, ends)
    return cache_bytes(spec, context, cache_dtype or computed, batch).nbytes, most - computed_cache


def training_memory(
    spec: ModelSpec,
    dtype: str = "bfloat16",
    context: int | None = None,
    batch: int = 1,
    *,
    attention: Kernel = "sdpa",
    ranks: int = 1,
) -> TrainingMemory:
    """Return the memory for training a model with Adam.

    Args:
        spec: the model.
        dtype: the dtype of weights, gradients and activations. If it is narrower than fp32, the optimiser has fp32
            weights too (mixed precision, Micikevicius et al. 1710.03740; 16 bytes per parameter in ZeRO, 1910.02054,
            section 3.1).
        context: the number of tokens per sequence; by default the model's context.
        batch: the number of sequences per step and process.
        attention: "sdpa" for fused kernels, which save no scores (2205.14135), or "eager".
        ranks: the number of processes that shard weights, gradients and moments.

    Raises:
        UsageError: as in `memory`, or the dtype has only one byte.
    """
    length = usual_context(spec) if context is None else context
    check_sizes(spec, length, batch)
    if not 1 <= ranks <= MOST:
        raise UsageError(f"the number of processes (--fsdp) must be from 1 to {MOST:,}, not {ranks:,}")
    name = full_dtype(dtype)
    size, parameters = itemsize(name), costs(spec, length).parameters
    if size == 1:
        raise UsageError(f"training cannot compute in {name}", "Choose bfloat16, float16 or float32.")
    wide, run = max(size, FLOAT), Pass(length, batch, size, attention)
    logits = run.rows * spec.vocab_size * (size + 2 * FLOAT)
    # The loss and logits are freed before the first layer is computed again, so only the larger of both counts.
    checkpointed = {**saved_with_checkpointing(spec, run), "logits": logits}
    freed = ("layer",) if checkpointed["loss"] + logits >= checkpointed["layer"] else ("loss", "logits")
    share = -(-parameters // ranks)
    return TrainingMemory(
        context=length,
        batch=batch,
        dtype=name,
        weights=share * size,
        gradients=share * size,
        moments=2 * share * wide,
        master=share * wide if size < wide else 0,
        by_component={**saved_for_backward(spec, run), "logits": logits},
        checkpointed_by_component={name: size for name, size in checkpointed.items() if name not in freed},
        assumed=(
            f"weights, gradients and activations in {name}, Adam's moments in float{8 * wide}"
            + (f", a second copy of the weights in float{8 * wide}" if size < wide else ""),
            f"no dropout, {_attention(spec, attention)}, logits of every token",
            *(_WINDOWED[:1] if min(windows(spec), default=MOST + 1) <= length else ()),
            *([f"one of {ranks:,} processes that shard weights, gradients and moments"] if ranks > 1 else []),
        ),
        ranks=ranks,
        gathered=_gathered(spec) * size if ranks > 1 else 0,
    )


def _gathered(spec: ModelSpec) -> int:
    """Return the number of unsharded weights and gradients that a process has at once in the backward pass.

    These are the weights of the current and the next layer, the gradients of one layer, and the weights and gradients
    of all parameters outside of layers.
    """
    counted = count(spec)
    layers = [layer.total for layer in counted.by_layer]
    return 2 * (counted.total - sum(layers)) + 3 * max(layers, default=0)


def _attention(spec: ModelSpec, kernel: Kernel) -> str:
    """Return words that say which layers store attention scores, whose memory grows with the square of the context."""
    by_block = {block: ways(spec.block_operations(block), kernel) for block in set(spec.blocks)}
    by_layer = [by_block[block] for block in spec.blocks]
    unfused = sum(bool(kinds - {"fused"}) for kinds in by_layer)
    if not any(by_layer):
        return "no attention"
    if kernel == "eager":
        return "attention that stores its scores"
    where = "" if unfused == len(by_layer) else f" in {unfused} of {len(by_layer)} layers"
    return (
        f"attention that stores its scores{where}, because no fused kernel supports it"
        if unfused
        else "fused attention"
    )
