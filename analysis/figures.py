"""What `params` tells beside the count, where it is asked for: bytes, the key-value cache, FLOPs, memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..components import ModelSpec
from ..display import Record, plain
from ..errors import UsageError
from . import costs as counting
from .costs import CacheSize, Costs, Flops, TrainingFlops
from .formats import GGUF, NAMES, in_formats, weighed, weight_dtype
from .sizes import DTYPES, MOST, full_dtype, itemsize

if TYPE_CHECKING:
    from .explain import Explained
    from .fit import Fits
    from .memory import Memory, TrainingMemory
    from .parallel import Split

_SERVED = 8192
"""Tokens of the sequences of which the most are told, where nobody asked for others and the models are for as many."""


@dataclass(frozen=True)
class Scenario:
    """What is asked for.

    dtype: of the weights ("int4" too). kv: contexts to tell the cache at, in tokens. kv_dtype: of the cache; that which
    activations are in where it is not given. flops, memory: whether to tell these. context, batch: for how many tokens
    a sequence, and sequences; where no context is given, the shortest that one of the models is for. explain: whether
    to derive the total. gpu: bytes of a GPU, to tell what fits there. tp, pp: GPUs that share every layer, and stages.
    fsdp: processes that share out weights, gradients and moments in training, each of which has `batch` sequences.
    """

    dtype: str | None = None
    kv: tuple[int, ...] = ()
    kv_dtype: str | None = None
    flops: bool = False
    memory: bool = False
    context: int | None = None
    batch: int = 1
    explain: bool = False
    gpu: int | None = None
    tp: int = 1
    pp: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", weight_dtype(self.dtype))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", full_dtype(NAMES.get(self.kv_dtype.lower(), self.kv_dtype)))
        numbers = [("--kv", each) for each in self.kv] + [("--context", self.context), ("--batch", self.batch)]
        for what, number in [*numbers, ("--tp", self.tp), ("--pp", self.pp), ("--fsdp", self.fsdp)]:
            if number is not None and not 1 <= number <= MOST:
                raise UsageError(f"{what} must be a whole number from 1 to {MOST:,}, not {number}")
        if self.spread and self.dtype in GGUF:
            raise UsageError(
                f"--tp and --pp: GGUF weights, such as {self.dtype}, are not split over several GPUs",
                "Choose --dtype int8, int4 or bfloat16.",
            )

    @property
    def computed(self) -> str:
        """What activations are in, and the cache where nothing else is asked for: bf16 where weights are narrower."""
        if self.dtype not in DTYPES or itemsize(self.dtype) == 1:
            return "bfloat16"
        return self.dtype

    @property
    def cached(self) -> str:
        return self.kv_dtype or self.computed

    @property
    def spread(self) -> bool:
        return self.tp * self.pp > 1

    @property
    def at_context(self) -> bool:
        """Whether anything is asked for that depends on one context."""
        return self.flops or self.memory or self.gpu is not None or self.spread

    @property
    def more(self) -> bool:
        """Whether there is anything to tell that is not in the table of components."""
        return bool(self.kv) or self.at_context or self.explain


@dataclass(frozen=True)
class CostFigures:
    """What was asked for of one tree, at `context` tokens. None, in `cache` too: its table of positions is too short.

    weights: bytes, by component; a sum of 4-bit ones is rounded up. cache: one for each context of `Scenario.kv`, or with
    memory for this one, and a_token: bytes that one leaves there, which no table of positions limits. token: the next
    token's FLOPs behind a cache, prefill: those of reading the context at once, training: of a step on it. formats:
    bytes of the weights in bf16 and in formats that models are run in, None in one that has no place for the tree.
    explained: the total as a formula. fits: what fits on a GPU. split: what each of several GPUs holds.
    """

    asked: Scenario
    context: int
    weights: Mapping[str, int] | None = None
    cache: tuple[CacheSize | None, ...] = ()
    a_token: int | None = None
    token: Costs | None = None
    prefill: Flops | None = None
    training: TrainingFlops | None = None
    inference_memory: Memory | None = None
    training_memory: TrainingMemory | None = None
    formats: Mapping[str, int | None] | None = None
    explained: Explained | None = None
    fits: Fits | None = None
    split: Split | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values under the names of what was asked for; figures are integers."""
        asked, context = self.asked, self.context
        found: dict[str, Any] = {}
        if self.weights is not None:
            found["weights"] = {"dtype": asked.dtype, "bytes": dict(self.weights)}
        if asked.kv or asked.memory:
            contexts = asked.kv or (context,)
            found["kv_cache"] = [_told(each, at) for at, each in zip(contexts, self.cache, strict=True)]
        if asked.flops:
            found["flops"] = token = _told(self.token, context)
            if self.token is not None:
                more = {"prefill": plain(self.prefill), "training_step": plain(self.training)}
                found["flops"] = {"next_token": {"context": context, **token["flops_a_token"]}, **more}
        if asked.memory:
            found["memory"] = running = _told(self.inference_memory, context)
            if self.inference_memory is not None:
                formats = dict(self.formats or {})
                found["memory"] = {"inference": running, "training": plain(self.training_memory), "formats": formats}
        if self.explained is not None:
            found["explained"] = self.explained.as_json()
        if asked.gpu is not None:
            found["gpu"] = _told(self.fits, context)
        if asked.spread:
            found["parallel"] = _told(self.split, context)
        return found


def _told(figure: Record | None, context: int) -> Any:
    """A figure's JSON values, or why there is none at a context."""
    impossible = {"context": context, "impossible": "the context is longer than the model's table of positions"}
    return impossible if figure is None else figure.as_json()


def common_context(specs: Sequence[ModelSpec]) -> int:
    """The shortest context that one of the trees is for: trees are compared at one."""
    return min(map(counting.usual_context, specs), default=counting.CONTEXT)


def fits(spec: ModelSpec, tokens: int) -> bool:
    """Whether the tree has positions for so many tokens: without a table of them it has, for any."""
    return spec.positions is None or tokens <= spec.positions.length


def figures_of(spec: ModelSpec, asked: Scenario, context: int, family: str = "") -> CostFigures:
    """What was asked for of a tree, FLOPs and memory at a context; raises as `weighed`."""
    batch, dtype, cached = asked.batch, asked.dtype or "bfloat16", asked.cached
    found: dict[str, Any] = {}
    if asked.dtype is not None:
        weights = weighed(spec, asked.dtype, family)
        found["weights"] = {**weights.by_component, "total": weights.total}
    if asked.kv or asked.memory:
        from .allocators import allocated

        contexts = asked.kv or (context,)
        sizes = [counting.cache_bytes(spec, each, cached, batch) if fits(spec, each) else None for each in contexts]
        found["cache"] = tuple(each and allocated(spec, each, family) for each in sizes)
        found["a_token"] = counting.cache_bytes(spec, 1, cached).a_token
    if asked.explain:
        from .explain import explain

        found["explained"] = explain(spec)
    if not fits(spec, context):
        return CostFigures(asked, context, **found)
    if asked.flops:
        found["token"] = counting.costs(spec, context)
        found["prefill"] = counting.forward_flops(spec, context, batch)
        found["training"] = counting.training_flops(spec, context, batch)
    if asked.memory:
        from .memory import memory, training_memory

        running = memory(spec, dtype if dtype in DTYPES else "int8", context, batch, cache_dtype=cached)
        found["inference_memory"] = replace(running, dtype=dtype, weights=weighed(spec, dtype, family).total)
        found["training_memory"] = training_memory(spec, asked.computed, context, batch, ranks=asked.fsdp)
        found["formats"] = in_formats(spec, family)
    given: dict[str, Any] = {"computed": asked.computed, "cache_dtype": cached, "batch": batch}
    given |= {"tp": asked.tp, "pp": asked.pp}
    if asked.gpu is not None:
        from .fit import fit

        most = asked.context or min(context, _SERVED)
        found["fits"] = fit(spec, asked.gpu, family=family, dtype=asked.dtype, context=most, **given)
    if asked.spread:
        from .parallel import split

        found["split"] = split(spec, dtype=dtype, context=context, **given)
    return CostFigures(asked, context, **found)
