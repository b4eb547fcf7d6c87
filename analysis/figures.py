"""The figures of `params` that a user can ask for: bytes, the KV cache, FLOPs and memory. No torch."""

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
"""The longest sequence, in tokens, for which `--gpu` reports the largest batch by default."""


@dataclass(frozen=True)
class Scenario:
    """The figures that a user wants besides the number of parameters, and the sizes that they depend on."""

    dtype: str | None = None
    """The dtype of the weights, also "int4" and GGUF's formats."""
    kv: tuple[int, ...] = ()
    """The contexts, in tokens, for which to count the cache."""
    kv_dtype: str | None = None
    """The dtype of the cache; by default that of activations."""
    flops: bool = False
    memory: bool = False
    context: int | None = None
    """Tokens per sequence; by default the shortest context that one of the models has."""
    batch: int = 1
    """The number of sequences."""
    explain: bool = False
    """Whether to explain the number of parameters by a formula."""
    gpu: int | None = None
    """The memory of a GPU in bytes, for the contexts and batches that fit. None: do not compute them."""
    tp: int = 1
    """The number of GPUs that share every layer (tensor parallelism)."""
    pp: int = 1
    """The number of pipeline stages. Every stage has some of the layers, on GPUs of its own."""
    fsdp: int = 1
    """The number of processes that shard weights, gradients and moments in training. Every process has `batch`
    sequences."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", weight_dtype(self.dtype))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", full_dtype(NAMES.get(self.kv_dtype.lower(), self.kv_dtype)))
        numbers = [("--kv", length) for length in self.kv] + [("--context", self.context), ("--batch", self.batch)]
        for option, number in [*numbers, ("--tp", self.tp), ("--pp", self.pp), ("--fsdp", self.fsdp)]:
            if number is not None and not 1 <= number <= MOST:
                raise UsageError(f"{option} must be a whole number from 1 to {MOST:,}, not {number}")
        if self.spread and self.dtype in GGUF:
            raise UsageError(
                f"--tp and --pp: GGUF weights, such as {self.dtype}, are not split over several GPUs",
                "Choose --dtype int8, int4 or bfloat16.",
            )

    @property
    def computed(self) -> str:
        """Return the dtype of activations: that of the weights, or bf16 if the weights are narrower."""
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
        """Return whether the user wants a figure that depends on `context`."""
        return self.flops or self.memory or self.gpu is not None or self.spread

    @property
    def more(self) -> bool:
        """Return whether the user wants a figure that is printed outside of the table of components."""
        return bool(self.kv) or self.at_context or self.explain


@dataclass(frozen=True)
class CostFigures:
    """The figures of one model at `context` tokens.

    A figure is None if the user did not ask for it, or if the model's position table is shorter than the context.
    """

    asked: Scenario
    context: int
    weights: Mapping[str, int] | None = None
    """The bytes of the weights by component. A sum of 4-bit weights is rounded up to whole bytes."""
    cache: tuple[CacheSize | None, ...] = ()
    """The cache at every context of `Scenario.kv`, or at `context` if the user only asked for memory."""
    bytes_per_token: int | None = None
    """The bytes that one token adds to the cache, also if the position table is too short for the context."""
    token: Costs | None = None
    """The FLOPs of one token that attends to `context` tokens."""
    prefill: Flops | None = None
    """The FLOPs of the whole context in one forward pass."""
    training: TrainingFlops | None = None
    """The FLOPs of a training step on the context."""
    inference_memory: Memory | None = None
    training_memory: TrainingMemory | None = None
    formats: Mapping[str, int | None] | None = None
    """The bytes of the weights in bf16 and quantised formats; None for a format that cannot store the model."""
    explained: Explained | None = None
    """The number of parameters as a formula."""
    fits: Fits | None = None
    """The contexts and batches that fit on a GPU."""
    split: Split | None = None
    """The memory per GPU, if the model is split over several GPUs."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures that the user wants as plain JSON values, by name. Numbers are integers."""
        asked, context = self.asked, self.context
        figures: dict[str, Any] = {}
        if self.weights is not None:
            figures["weights"] = {"dtype": asked.dtype, "bytes": dict(self.weights)}
        if asked.kv or asked.memory:
            contexts = asked.kv or (context,)
            figures["kv_cache"] = [_json_of(size, length) for length, size in zip(contexts, self.cache, strict=True)]
        if asked.flops:
            figures["flops"] = token = _json_of(self.token, context)
            if self.token is not None:
                more = {"prefill": plain(self.prefill), "training_step": plain(self.training)}
                figures["flops"] = {"next_token": {"context": context, **token["flops_a_token"]}, **more}
        if asked.memory:
            figures["memory"] = running = _json_of(self.inference_memory, context)
            if self.inference_memory is not None:
                formats = dict(self.formats or {})
                figures["memory"] = {"inference": running, "training": plain(self.training_memory), "formats": formats}
        if self.explained is not None:
            figures["explained"] = self.explained.as_json()
        if asked.gpu is not None:
            figures["gpu"] = _json_of(self.fits, context)
        if asked.spread:
            figures["parallel"] = _json_of(self.split, context)
        return figures


def _json_of(figure: Record | None, context: int) -> Any:
    """Return a figure as JSON values. None means that the position table is too short, and the result says so."""
    impossible = {"context": context, "impossible": "the context is longer than the model's table of positions"}
    return impossible if figure is None else figure.as_json()


def common_context(specs: Sequence[ModelSpec]) -> int:
    """Return the context at which models are compared: the shortest of their own contexts."""
    return min(map(counting.usual_context, specs), default=counting.CONTEXT)


def fits(spec: ModelSpec, tokens: int) -> bool:
    """Return whether a model can read `tokens` tokens. Only a position table sets a limit."""
    return spec.positions is None or tokens <= spec.positions.length


def figures_of(spec: ModelSpec, asked: Scenario, context: int, family: str = "") -> CostFigures:
    """Return the figures of a model that `asked` wants, with FLOPs and memory at `context` tokens.

    Raises the errors of `weighed`.
    """
    batch, dtype, cached = asked.batch, asked.dtype or "bfloat16", asked.cached
    figures: dict[str, Any] = {}
    if asked.dtype is not None:
        weights = weighed(spec, asked.dtype, family)
        figures["weights"] = {**weights.by_component, "total": weights.total}
    if asked.kv or asked.memory:
        from .allocators import allocated

        contexts = asked.kv or (context,)
        sizes = [
            counting.cache_bytes(spec, length, cached, batch) if fits(spec, length) else None for length in contexts
        ]
        figures["cache"] = tuple(size and allocated(spec, size, family) for size in sizes)
        figures["bytes_per_token"] = counting.cache_bytes(spec, 1, cached).bytes_per_token
    if asked.explain:
        from .explain import explain

        figures["explained"] = explain(spec)
    if not fits(spec, context):
        return CostFigures(asked, context, **figures)
    if asked.flops:
        figures["token"] = counting.costs(spec, context)
        figures["prefill"] = counting.forward_flops(spec, context, batch)
        figures["training"] = counting.training_flops(spec, context, batch)
    if asked.memory:
        from .memory import memory, training_memory

        running = memory(spec, dtype if dtype in DTYPES else "int8", context, batch, cache_dtype=cached)
        figures["inference_memory"] = replace(running, dtype=dtype, weights=weighed(spec, dtype, family).total)
        figures["training_memory"] = training_memory(spec, asked.computed, context, batch, ranks=asked.fsdp)
        figures["formats"] = in_formats(spec, family)
    options: dict[str, Any] = {"computed": asked.computed, "cache_dtype": cached, "batch": batch}
    options |= {"tp": asked.tp, "pp": asked.pp}
    if asked.gpu is not None:
        from .fit import fit

        most = asked.context or min(context, _SERVED)
        figures["fits"] = fit(spec, asked.gpu, family=family, dtype=asked.dtype, context=most, **options)
    if asked.spread:
        from .parallel import split

        figures["split"] = split(spec, dtype=dtype, context=context, **options)
    return CostFigures(asked, context, **figures)
