"""Run the forward passes of several batches together, so that each weight is read once for all of them.

A model's own forward method runs unchanged, and hooks or modules in it call `ask` for the weights that they need. Each
pass is a coroutine (a greenlet, because forward methods use plain calls) and stops at `ask`. Once all passes have
stopped, gptkit serves the first place of the model at which a pass waits, and continues the passes that wait there.
Passes may stop at different places: if no token of a batch is routed to an expert, its pass does not wait there.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from .probe import RUNNING, ProbeBatch

_Serve = Callable[[int, list[Any]], Generator[Any]]
"""Takes the number of a place in the order of computation, and the value that each waiting pass sent. It yields the
answer for each of them, and is closed once all of them have stopped again.
"""


class _Pass(greenlet):  # type: ignore[misc]
    """One batch's forward pass: the place where it waits, the value that it sends or receives there, and its result."""

    place = -1
    parcel: Any = None
    result: Tensor | None = None

    def __init__(self, call: Callable[[ProbeBatch], Tensor], batch: ProbeBatch) -> None:
        super().__init__()
        self.call, self.batch = call, batch

    def run(self) -> None:
        """Run the forward pass in a context of its own, so that `RUNNING` ends with it."""
        RUNNING.set(self.batch)  # in a context of its own, which ends with it
        self.result = self.call(self.batch)

    def empty(self) -> Any:
        """Return the value and drop the reference to it, so that its memory is freed after use."""
        parcel, self.parcel = self.parcel, None
        return parcel


def ask(place: int, brought: Any = None) -> Any:
    """Stop this pass at a place of the model, give `brought` to `serve`, and return its answer for this pass."""
    here = getcurrent()
    assert isinstance(here, _Pass) and here.parent is not None, "no pass that others could wait for"
    here.place, here.parcel = place, brought
    del brought
    here.parent.switch()
    return here.empty()


def run_together(
    call: Callable[[ProbeBatch], Tensor], batches: Sequence[ProbeBatch], serve: _Serve | None = None
) -> list[Tensor]:
    """Return the result of each batch's pass, without gradients.

    An exception in one pass or in `serve` ends all passes.
    """
    passes = [_Pass(call, batch) for batch in batches]
    try:
        with torch.inference_mode():
            for pass_ in passes:
                pass_.switch()
            while stopped := [pass_ for pass_ in passes if not pass_.dead]:
                assert serve is not None, "a pass waits for what nobody gives"
                place = min(pass_.place for pass_ in stopped)
                here = [pass_ for pass_ in stopped if pass_.place == place]
                with closing(serve(place, [pass_.empty() for pass_ in here])) as answers:
                    for pass_ in here:
                        pass_.parcel = next(answers)
                        pass_.switch()
    finally:
        for pass_ in passes:
            pass_.throw()
    return [pass_.result for pass_ in passes if pass_.result is not None]


def hooked(hooks: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Return a context that removes these hooks from their modules when it ends."""
    stack = ExitStack()
    for hook in hooks:
        stack.enter_context(hook)
    return stack


def trim_heaps() -> None:
    """Make glibc return freed memory to the system, because its heaps retain much of it. Elsewhere do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
