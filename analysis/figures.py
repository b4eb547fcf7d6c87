"""What `params` tells beside the count, where it is asked for: bytes, the key-value cache, FLOPs, memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..components import ModelSpec
from ..errors import UsageError
from .costs import (
    CONTEXT,
    CacheSize,
    Costs,
    Flops,
    TrainingFlops,
    cache_bytes,
    costs,
    forward_flops,
    training_flops,
    usual_context,
)
from .formats import GGUF, NAMES, in_formats, weighed, weight_dtype
from .sizes import DTYPES, MOST, full_dtype, itemsize

if TYPE_CHECKING:
    from .explain import Explained
    from .fit import Fits
    from .memory import Memory, TrainingMemory
    from .parallel import Split

SERVED = 8192
"""Tokens of the sequences of which the most are told, where nobody asked for others and the models are for as many."""


@dataclass(frozen=True)
class Asked:
    """What is asked for.

    dtype: of the weights ("int4" too). kv: contexts to tell the cache at, in tokens. kv_dtype: of the cache; that which
    activations are in where it is not given. flops, memory: whether to tell these. context, batch: for how many tokens
    a sequence, and sequences; where no context is given, the shortest that one of the models is for. explain: whether
    to derive the total. gpu: bytes of a GPU, to tell what fits there. tp, pp: GPUs that share every layer, and stages.
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

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", weight_dtype(self.dtype))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", full_dtype(NAMES.get(self.kv_dtype.lower(), self.kv_dtype)))
        for what, number in (
            *(("--kv", each) for each in self.kv),
            ("--context", self.context),
            ("--batch", self.batch),
            ("--tp", self.tp),
            ("--pp", self.pp),
        ):
            if number is not None and not 1 <= number <= MOST:
                raise UsageError(f"{what} is a whole number from 1 to {MOST:,}, not {number}")
        if self.spread and self.dtype in GGUF:
            raise UsageError(
                f"files of {self.dtype} are not laid out for several GPUs", "--dtype int8, int4 or bfloat16"
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
        """Whether the model is to be on several GPUs."""
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
class Figures:
    """What was asked for of one tree, at `context` tokens. None, in `cache` too: its table of positions is too short.

    weights: bytes, by component; a sum of 4-bit ones is rounded up. cache: one for each context of `Asked.kv`, and
    a_token: bytes that one leaves there, which no table of positions limits. token: the next token's FLOPs behind a
    cache, prefill: those of reading the context at once, training: of a step on it. formats: bytes of the weights in
    bf16 and in formats that models are run in, None in one that has no place for the tree. explained: the total as a
    formula. fits: what fits on a GPU. split: what each of several GPUs holds.
    """

    asked: Asked
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
        asked = self.asked
        found: dict[str, Any] = {}
        if self.weights is not None:
            found["weights"] = {"dtype": asked.dtype, "bytes": dict(self.weights)}
        if asked.kv:
            found["kv_cache"] = [_told(each, at) for at, each in zip(asked.kv, self.cache, strict=True)]
        if asked.flops:
            found["flops"] = _told(self.token, self.context)
        if self.token is not None:
            found["flops"] = {
                "next_token": {"context": self.context, **self.token.as_json()["flops_a_token"]},
                "prefill": _told(self.prefill),
                "training_step": _told(self.training),
            }
        if asked.memory:
            found["memory"] = _told(self.inference_memory, self.context)
        if self.inference_memory is not None:
            found["memory"] = {
                "inference": _told(self.inference_memory),
                "training": _told(self.training_memory),
                "formats": dict(self.formats or {}),
            }
        if self.explained is not None:
            found["explained"] = self.explained.as_json()
        if asked.gpu is not None:
            found["gpu"] = _told(self.fits, self.context)
        if asked.spread:
            found["parallel"] = _told(self.split, self.context)
        return found


def _told(figure: Any, context: int = 0) -> Any:
    """A figure's JSON values, or why there is none at a context."""
    if figure is None:
        return {"context": context, "impossible": "more tokens than the table of positions has"}
    return figure.as_json()


def common_context(specs: Sequence[ModelSpec]) -> int:
    """The shortest context that one of the trees is for: trees are compared at one."""
    return min(map(usual_context, specs), default=CONTEXT)


def fits(spec: ModelSpec, tokens: int) -> bool:
    """Whether the tree has positions for so many tokens: without a table of them it has, for any."""
    return spec.positions is None or tokens <= spec.positions.length


def figures_of(spec: ModelSpec, asked: Asked, context: int, family: str = "") -> Figures:
    """What was asked for of a tree, FLOPs and memory at a context; raises as `weighed`."""
    batch = asked.batch
    found: dict[str, Any] = {}
    if asked.dtype is not None:
        weights = weighed(spec, asked.dtype, family)
        found["weights"] = {**weights.by_component, "total": weights.total}
    if asked.kv:
        cache = (cache_bytes(spec, each, asked.cached, batch) if fits(spec, each) else None for each in asked.kv)
        found |= {"cache": tuple(cache), "a_token": cache_bytes(spec, 1, asked.cached).a_token}
    if asked.explain:
        from .explain import explain

        found["explained"] = explain(spec)
    if fits(spec, context):
        found |= _at_context(spec, asked, context, family)
    return Figures(asked, context, **found)


def _at_context(spec: ModelSpec, asked: Asked, context: int, family: str) -> dict[str, Any]:
    """What depends on the context."""
    batch = asked.batch
    found: dict[str, Any] = {}
    if asked.flops:
        prefill, training = forward_flops(spec, context, batch), training_flops(spec, context, batch)
        found = {"token": costs(spec, context), "prefill": prefill, "training": training}
    if asked.memory:
        from .memory import memory, training_memory

        dtype = asked.dtype or "bfloat16"
        of_bytes = dtype if dtype in DTYPES else "int8"
        running = memory(spec, of_bytes, context, batch, cache_dtype=asked.cached)
        found["inference_memory"] = replace(running, dtype=dtype, weights=weighed(spec, dtype, family).total)
        found["training_memory"] = training_memory(spec, asked.computed, context, batch)
        found["formats"] = in_formats(spec, family)
    given: dict[str, Any] = {"computed": asked.computed, "cache_dtype": asked.cached, "batch": batch}
    given |= {"tp": asked.tp, "pp": asked.pp}
    if asked.gpu is not None:
        from .fit import fit

        most = asked.context or min(context, SERVED)
        found["fits"] = fit(spec, asked.gpu, family=family, dtype=asked.dtype, context=most, **given)
    if asked.spread:
        from .parallel import split

        found["split"] = split(spec, dtype=asked.dtype or "bfloat16", context=context, **given)
    return found
