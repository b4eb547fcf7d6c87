"""The weight formats, contexts and batches with which a model fits in a given memory, from shapes alone. No torch.

Weights, the KV cache and the peak of activations in a prefill are counted as in `memory`. The memory of a runtime and
its allocator, half a gigabyte to two, is not included.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..components import ModelSpec
from ..display import Record
from ..errors import CannotExpress
from .costs import stated_context
from .formats import FORMATS, weighed
from .parallel import split
from .sizes import MOST

_SPREAD = ("bfloat16", "int8", "int4")
"""The dtypes of weights for models on several GPUs. GGUF formats are not among them, since GGUF files cannot be
split."""


@dataclass(frozen=True)
class Fit(Record):
    """The longest context and the largest batch that fit with weights in one dtype. They are 0 if none fits."""

    JSON = "weights longest_context=context most_sequences=batch bytes_left=free"

    dtype: str
    weights: int
    """The bytes of the weights on the GPU that has most of them."""
    context: int
    """The longest context for `Fits.batch` sequences, in tokens."""
    batch: int
    """The largest number of sequences of `Fits.context` tokens."""
    free: int | None
    """The bytes that this batch leaves free on the fullest GPU. None if not even one sequence fits."""


@dataclass(frozen=True)
class Fits(Record):
    """The contexts and batches that fit in a given memory, by dtype of the weights."""

    JSON = "bytes=nbytes batch context dtypes"

    nbytes: int  # the memory of one GPU in bytes
    batch: int  # the number of sequences for which `Fit.context` is computed
    context: int  # the number of tokens for which `Fit.batch` is computed
    own: int | None  # the context length that the model's config states; `Fit.context` is never longer
    rows: tuple[Fit, ...]  # one per dtype

    @property
    def dtypes(self) -> dict[str, Fit]:
        return {row.dtype: row for row in self.rows}


def fit(
    spec: ModelSpec,
    nbytes: int,
    *,
    family: str = "",
    dtype: str | None = None,
    computed: str = "bfloat16",
    cache_dtype: str | None = None,
    context: int,
    batch: int = 1,
    tp: int = 1,
    pp: int = 1,
) -> Fits:
    """Return the contexts and batches with which a model fits on tp x pp GPUs that have `nbytes` of memory each.

    Args:
        spec: the model.
        nbytes: the memory of one GPU in bytes.
        family: the model's family, such as "llama", on which GGUF formats depend.
        dtype: the dtype of the weights; by default bfloat16 and all usual quantised formats.
        computed: the dtype of activations.
        cache_dtype: the dtype of the cache; by default that of activations.
        context: the number of tokens per sequence for which to report the largest batch.
        batch: the number of sequences for which to report the longest context.
        tp: the number of GPUs that share every layer (tensor parallelism); see `parallel`.
        pp: the number of pipeline stages.

    Raises:
        UsageError: the same as in `parallel.split`.
    """

    @cache
    def besides_weights(tokens: int, sequences: int) -> tuple[int, ...]:
        """Return the bytes of cache and activations on a GPU, for every pipeline stage."""
        stages = split(spec, tp, pp, computed=computed, cache_dtype=cache_dtype, context=tokens, batch=sequences).stages
        return tuple(stage.cache + stage.activations for stage in stages)

    stated = stated_context(spec)
    longest = stated if spec.positions is None else spec.positions.length
    rows = []
    for name in [dtype] if dtype is not None else ["bfloat16", *FORMATS] if tp * pp == 1 else _SPREAD:
        try:
            weights: tuple[int, ...] = (weighed(spec, name, family).total,)  # on one GPU per stage
        except CannotExpress:
            continue
        if tp * pp > 1:
            weights = tuple(stage.weight for stage in split(spec, tp, pp, dtype=name, context=1).stages)

        def is_room(tokens: int, sequences: int, weights: tuple[int, ...] = weights) -> bool:
            return _most_bytes(weights, besides_weights(tokens, sequences)) <= nbytes

        tokens = _most(lambda tokens: is_room(tokens, batch), longest or MOST)
        sequences = _most(lambda sequences: is_room(context, sequences), MOST)
        free = nbytes - _most_bytes(weights, besides_weights(context, sequences)) if sequences else None
        rows.append(Fit(name, max(weights), tokens, sequences, free))
    return Fits(nbytes, batch, context, stated, tuple(rows))


def _most_bytes(weights: tuple[int, ...], others: tuple[int, ...]) -> int:
    return max(weight + other for weight, other in zip(weights, others, strict=True))


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` for which `fits` is true, or 0. It must be true for all smaller ones."""
    return limit if fits(limit) else bisect_left(range(1, limit), True, key=lambda number: not fits(number))
