"""Run the forward passes of several batches together, so that each weight is read once for all of them.

A model's own forward method runs unchanged. Hooks or modules in it call `ask` for the weights that they need. Each
forward pass is a coroutine that pauses at `ask` (a greenlet, because forward methods are ordinary calls). When all
passes have paused, gptkit provides the weights at the earliest place of the model at which a pass waits, and continues
the passes that wait there. Passes may wait at different places: if no token of a batch is routed to an expert, its pass
does not wait at this expert.
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
    """The forward pass of one batch, as a coroutine.

    Attributes:
        place: the number of the place in the model at which the pass waits.
        parcel: the value that the pass sends when it pauses, or receives when it continues.
        result: the output, once the pass has ended.
    """

    place = -1
    parcel: Any = None
    result: Tensor | None = None

    def __init__(self, call: Callable[[ProbeBatch], Tensor], batch: ProbeBatch) -> None:
        super().__init__()
        self.call, self.batch = call, batch

    def run(self) -> None:
        """Run the forward pass. Its greenlet has its own context, so the value of `RUNNING` ends with it."""
        RUNNING.set(self.batch)  # in a context of its own, which ends with it
        self.result = self.call(self.batch)

    def empty(self) -> Any:
        """Return the value in `parcel` and drop the reference to it, so that its memory can be freed."""
        parcel, self.parcel = self.parcel, None
        return parcel


def ask(place: int, brought: Any = None) -> Any:
    """Pause the running pass at a place of the model until the weights of this place are there.

    Args:
        place: the number of the place, in the order of computation.
        brought: a value that is passed to the `serve` function of `run_together`.

    Returns:
        The answer of `serve` for this pass.
    """
    here = getcurrent()
    assert isinstance(here, _Pass) and here.parent is not None, "no pass that others could wait for"
    here.place, here.parcel = place, brought
    del brought
    here.parent.switch()
    return here.empty()


def run_together(
    call: Callable[[ProbeBatch], Tensor], batches: Sequence[ProbeBatch], serve: _Serve | None = None
) -> list[Tensor]:
    """Run `call` for every batch, without gradients, and return the results.

    An exception in one forward pass or in `serve` ends all of them.

    Args:
        call: a forward pass, which may pause by calling `ask`.
        batches: the inputs.
        serve: called with the number of a place, and the list of values that the passes waiting there sent. It yields
            an answer for each of them, in this order. Not needed if `call` never pauses.
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
    """Return a context that removes the given torch hooks when it ends."""
    stack = ExitStack()
    for hook in hooks:
        stack.enter_context(hook)
    return stack


def trim_heaps() -> None:
    """Make glibc return freed memory to the operating system. Without glibc, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
