"""What of a model fits in a memory: in which formats, and up to which context. From shapes alone, no torch.

Weights, the cache and activations at the worst moment of reading a whole context at once, as `memory` counts them. What
a runtime and its allocator take is not counted: half a gigabyte to two.
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
"""Dtypes of weights that are split over several GPUs; files of GGUF are not laid out for that."""


@dataclass(frozen=True)
class Fit(Record):
    """The longest context and the largest batch that fit with weights of one dtype. They are 0 if nothing fits."""

    JSON = "weights longest_context=context most_sequences=batch bytes_left=left"

    dtype: str
    weights: int
    """The bytes of the weights on the fullest GPU."""
    context: int
    """The longest context for `Fits.batch` sequences, in tokens."""
    batch: int
    """The largest number of sequences of `Fits.context` tokens."""
    left: int | None
    """The bytes that this batch leaves free on the fullest GPU. None if not even one sequence fits."""


@dataclass(frozen=True)
class Fits(Record):
    """What fits in `nbytes`: a row a dtype.

    batch: sequences for which the longest context is told; context: tokens for which the most sequences are. own: the
    context that the tree is for, which no longest context goes beyond; None where it does not say.
    """

    JSON = "bytes=nbytes batch context dtypes"

    nbytes: int
    batch: int
    context: int
    own: int | None
    rows: tuple[Fit, ...]

    @property
    def dtypes(self) -> dict[str, Fit]:
        return {each.dtype: each for each in self.rows}


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
    """What fits in a memory of so many bytes, or on the fullest of tp x pp GPUs of so many.

    Args:
        spec: the tree.
        nbytes: of one GPU.
        family: whose tree it is, for formats of GGUF.
        dtype: of the weights; in each of the formats that people run models in where it is not given.
        computed: the dtype of activations.
        cache_dtype: of keys and values in the cache; that of activations where it is not given.
        context: tokens, for the most sequences.
        batch: sequences, for the longest context.
        tp: GPUs that share every layer; see `parallel`.
        pp: stages of layers.

    Raises:
        UsageError: as `parallel.split`.
    """

    @cache
    def beside(tokens: int, sequences: int) -> tuple[int, ...]:
        """Of each stage what is there beside the weights."""
        found = split(spec, tp, pp, computed=computed, cache_dtype=cache_dtype, context=tokens, batch=sequences)
        return tuple(stage.cache + stage.activations for stage in found.stages)

    own = stated_context(spec)
    longest = own if spec.positions is None else spec.positions.length
    rows = []
    for name in [dtype] if dtype is not None else ["bfloat16", *FORMATS] if tp * pp == 1 else _SPREAD:
        try:
            weights: tuple[int, ...] = (weighed(spec, name, family).total,)  # on a GPU of each stage
        except CannotExpress:
            continue
        if tp * pp > 1:
            weights = tuple(stage.weight for stage in split(spec, tp, pp, dtype=name, context=1).stages)

        def is_room(tokens: int, sequences: int, weights: tuple[int, ...] = weights) -> bool:
            return all(held + more <= nbytes for held, more in zip(weights, beside(tokens, sequences), strict=True))

        tokens = _most(lambda tokens: is_room(tokens, batch), longest or MOST)
        sequences = _most(lambda sequences: is_room(context, sequences), MOST)
        left = None
        if sequences:
            left = nbytes - max(held + more for held, more in zip(weights, beside(context, sequences), strict=True))
        rows.append(Fit(name, max(weights), tokens, sequences, left))
    return Fits(nbytes, batch, context, own, tuple(rows))


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to a limit for which something holds that holds for all smaller ones; 0 for none."""
    return limit if fits(limit) else bisect_left(range(1, limit), True, key=lambda number: not fits(number))
