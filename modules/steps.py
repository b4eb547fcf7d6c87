"""Decoding one text token by token, with a cache that grows or with a static one.

With a static cache, all steps run the same operations on the same memory. On a CUDA device, the step is recorded once
as a CUDA graph, which then launches all its kernels at once. Whether a model's step can be recorded is not declared
anywhere: the first step with a static cache runs under `HostFree`, which stops it if an operation needs the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .cache import Cache, NotStatic, StaticCache
from .decoder import Decoder
from .layers import fused_norms

Caching = Literal["auto", "static", "dynamic"]
"""The cache to decode with. "auto" uses a static cache on a CUDA device if the model's step can be recorded."""

_WORTH = 8
"""The least number of tokens for which "auto" uses a static cache. To record a step takes as long as some steps."""
_AHEAD = 256
"""The number of tokens for which a static cache has room at first, at least, unless fewer are needed."""
_ALIGNED = 64
"""The number of keys is a multiple of it, so that attention kernels need no copy of the mask."""

_RECORDABLE: WeakKeyDictionary[Decoder, tuple[int, ...]] = WeakKeyDictionary()
"""The addresses of the parameters of models whose step ran to its end under `HostFree`; () if it was stopped.

A model that still has these addresses needs no step before its step is recorded: all products are fused, and the
workspaces of libraries are allocated.
"""


class HostFree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that raises NotStatic where an operation makes the host wait for the device, or copies from the host.

    These are operations whose result is a number on the host or has a shape that depends on values, tensors made from
    Python numbers (`torch.tensor`), and copies between devices. A CUDA graph can record none of them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise NotStatic(
                f"the decoding step cannot be recorded as a CUDA graph, because {func} needs the host",
                "Generate with cache='dynamic'.",
            )
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and args[0].device != (args[1] if func is _COPIES[0] else result).device:
            raise NotStatic(
                "the decoding step cannot be recorded as a CUDA graph, because it copies between devices",
                "Generate with cache='dynamic'.",
            )
        return result


_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def _waits(operation: Any, args: Any) -> bool:
    """Return whether an operation reads values on the host, has a result of unknown shape, or copies host numbers."""
    if operation is torch.ops.aten.index.Tensor:  # with numbers the shape is known, with a mask it is not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if operation in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    tags = operation.tags
    unknown = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return unknown or operation is torch.ops.aten.lift_fresh.default


@dataclass(frozen=True)
class Options:
    """How one text is decoded."""

    choose: Callable[[Tensor], Tensor]
    """Returns the next token (1, 1) for logits (1, vocabulary), or -1 if the logits are NaN."""
    graphed: bool
    """Whether `choose` can be part of a recorded graph. It then uses no random numbers."""
    caching: Caching
    most: int
    """The largest number of tokens that the model reads, with the prompt."""
    tell: Callable[[str], None]
    """Gets a message when a step could not be recorded."""


class Steps:
    """The decoding of one text, from an empty cache and the prompt's ids (1, T)."""

    def __init__(self, model: Decoder, cache: Cache, ids: Tensor, options: Options) -> None:
        self.model, self.ids, self.options = model, ids, options
        self.cache: Cache | None = cache
        self.dynamic = options.caching == "dynamic" or (options.caching == "auto" and not self._suits())
        self.static: StaticSteps | None = None

    def _suits(self) -> bool:
        """Return whether a static cache is worth it: on a GPU, for enough tokens, in a model without hooks.

        Hooks in Python would not run in a recorded step.
        """
        device = self.ids.device
        return (
            _records(device)
            and self.options.most - self.ids.shape[1] >= _WORTH
            and all(parameter.device == device for parameter in self.model.parameters())
            and not any(part._forward_hooks or part._forward_pre_hooks for part in self.model.modules())
            and _RECORDABLE.get(self.model) != ()
        )

    @torch.inference_mode()
    def next(self, more: bool) -> int:
        """Return the next token, or -1 if the logits are NaN. `more` says that the step after it may begin."""
        if self.cache is not None and self.cache.length and not self.dynamic:
            self._fix(self.cache)
        if self.static is not None:
            return self.static.next(more)
        logits = self.model(self.ids, cache=self.cache, last_only=True)[:, -1].float()
        self.ids = self.options.choose(logits)
        return int(self.ids)

    def _fix(self, cache: Cache) -> None:
        """Go on with a static cache, if the model's step allows it.

        Raises NotStatic if the caller asked for a static cache, and a layer's cache has no fixed size.
        """
        try:
            static = StaticSteps(self.model, cache, self.ids, self.options)
            static.first(cache)
        except (NotStatic, torch.cuda.OutOfMemoryError) as error:
            if isinstance(error, NotStatic):
                _RECORDABLE[self.model] = ()
            if self.options.caching == "static":
                raise
            self.dynamic = True
            return
        self.static, self.cache = static, None  # so that the memory of the first cache is freed

    def close(self) -> None:
        """Wait for a step that began and whose token nobody asked for, so that its memory can be freed."""
        if self.static is not None:
            self.static.wait()


class StaticSteps:
    """Decoding steps with a static cache. On a CUDA device, they are replays of a recorded graph.

    The chosen token stays on the device as the next step's input. A step can thus begin before the host has read the
    token of the step before.
    """

    def __init__(self, model: Decoder, cache: Cache, ids: Tensor, options: Options) -> None:
        self.model, self.options, self.device = model, options, ids.device
        self.cache = StaticCache(cache, self._room(cache.length))
        self.ids, self.token = ids.clone(), ids.clone()
        self.logits: Tensor | None = None
        self.records = _records(self.device) and _RECORDABLE.get(model) != ()
        self.graph: Any = None
        self.pending: Callable[[], int] | None = None
        pinned = self.device.type == "cuda"
        self.host = torch.empty(2, 1, 1, dtype=torch.long, pin_memory=pinned)  # two, since a step begins ahead
        self.turn = 0

    def _room(self, length: int) -> int:
        """Return a capacity for a text of `length` tokens: powers of two, up to what the whole text needs."""
        most = -(-max(self.options.most, length + 1) // _ALIGNED) * _ALIGNED
        return min(1 << (length + _AHEAD).bit_length(), most)

    def first(self, cache: Cache) -> None:
        """Begin the first step. If it is not known whether it can be recorded, run it under `HostFree` to see.

        `cache` is the one of which the static cache is a copy.
        """
        if not self.records or _RECORDABLE.get(self.model) == _addresses(self.model):
            self._begin()
            return
        try:
            with HostFree():  # type: ignore[no-untyped-call]
                self._aside(self._step)
            _RECORDABLE[self.model] = _addresses(self.model)
        except NotStatic:
            if self.options.caching != "static":
                raise
            # The caller wants a static cache in any case. The step that stopped may have changed states.
            _RECORDABLE[self.model] = ()
            self.records, self.cache = False, StaticCache(cache, self._room(cache.length))
            self._step()
        self._choose()

    def next(self, more: bool) -> int:
        """Return the next token, or -1. If there are `more` steps and they are recorded, begin the next one."""
        if self.pending is None:
            self._begin()
        assert self.pending is not None
        read, self.pending = self.pending, None
        if more and self.graph is not None:
            self._begin()
        return read()

    def wait(self) -> None:
        """Wait for the step that began, if there is one."""
        if self.pending is not None:
            self.pending()

    def _begin(self) -> None:
        """Begin a step on the device."""
        if self.cache.length == self.cache.capacity:
            if self.device.type == "cuda":  # the graph may still run
                torch.cuda.current_stream(self.device).synchronize()
            self.graph, self.cache = None, StaticCache(self.cache, self._room(self.cache.length))
        if self.records and self.graph is None:
            self._record()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
            self.cache.length += 1
        self._choose()

    def _choose(self) -> None:
        """Choose the token, unless the step has done it, and begin to copy it to the host."""
        if not self.options.graphed:
            assert self.logits is not None
            self._take(self.options.choose(self.logits))
        self.turn = 1 - self.turn
        host = self.host[self.turn]
        host.copy_(self.token, non_blocking=True)
        if self.device.type != "cuda":
            self.pending = lambda: int(host)
            return
        copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        self.pending = lambda: _after(copied, host)

    def _step(self) -> None:
        """Compute the logits of the next token, and choose it if that needs no random numbers."""
        with fused_norms():
            self.logits = self.model(self.ids, cache=self.cache, last_only=True)[:, -1].float()
        if self.options.graphed:
            self._take(self.options.choose(self.logits))

    def _take(self, token: Tensor) -> None:
        """Make the token (1, 1) the input of the next step. A step after -1 reads token 0, and nobody reads it."""
        self.token.copy_(token)
        self.ids.copy_(token.clamp(min=0))

    def _aside(self, work: Callable[[], None]) -> None:
        """Run `work` on the stream on which graphs are recorded, so that libraries have their workspaces there."""
        here, aside = torch.cuda.current_stream(self.device), _stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            work()
        here.wait_stream(aside)

    def _record(self) -> None:
        """Record the step as a graph. If CUDA refuses, say so, and go on without one."""
        graph: Any = torch.cuda.CUDAGraph()
        length = self.cache.length

        def record() -> None:
            torch.cuda.empty_cache()  # otherwise the memory of earlier graphs would not be used again
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the GPU
            try:
                self._step()
            finally:
                graph.capture_end()

        try:
            self._aside(record)
            self.graph = graph
        except (RuntimeError, NotStatic) as error:
            self.records = False
            line = next(iter(str(error).splitlines()), type(error).__name__)
            self.options.tell(f"the decoding step could not be recorded as a CUDA graph, so it is slower: {line}")
        self.cache.restore(length)  # nothing has run yet


def _addresses(model: Decoder) -> tuple[int, ...]:
    """Return where the parameters are in memory."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _records(device: torch.device) -> bool:
    """Return whether steps can be recorded on a device. Autocast prevents it, since it frees its copies of weights."""
    return device.type == "cuda" and not torch.is_autocast_enabled("cuda")


def _after(copied: Any, host: Tensor) -> int:
    """Return the token in `host` after the event at which it was copied."""
    copied.synchronize()
    return int(host)


@lru_cache
def _stream(device: torch.device) -> Any:
    """Return the stream on which steps are recorded. There is one per device, since each has workspaces of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
