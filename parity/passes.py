"""Forward passes that go through a model together, so that each weight is read once for all of them.

A model's own forward runs unchanged, and hooks or modules in it `ask` for what they lack. A pass is a coroutine that
stops there (a greenlet, since a forward is made of plain calls): once all passes have stopped, the first of the places
that they stopped at is served, and those that stopped there go on. Passes need not come to the same places: a token
that no router sends to an expert does not wait for it.
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
"""Of a place, by its number in the order of computation, and what each pass brought there, what each of them gets. It
is closed once all have gone on to their next stop.
"""


class _Pass(greenlet):  # type: ignore[misc]
    """One batch's forward pass: where it has stopped, what it brought there and then gets (nothing else refers to that,
    so it goes when it is used), and what it gives.
    """

    place = -1
    parcel: Any = None
    result: Tensor | None = None

    def __init__(self, call: Callable[[ProbeBatch], Tensor], batch: ProbeBatch) -> None:
        super().__init__()
        self.call, self.batch = call, batch

    def run(self) -> None:
        RUNNING.set(self.batch)  # in a context of its own, which ends with it
        self.result = self.call(self.batch)

    def empty(self) -> Any:
        parcel, self.parcel = self.parcel, None
        return parcel


def ask(place: int, brought: Any = None) -> Any:
    """In a pass: wait at a place, and get what it gives."""
    here = getcurrent()
    assert isinstance(here, _Pass) and here.parent is not None, "no pass that others could wait for"
    here.place, here.parcel = place, brought
    del brought
    here.parent.switch()
    return here.empty()


def run_together(
    call: Callable[[ProbeBatch], Tensor], batches: Sequence[ProbeBatch], serve: _Serve | None = None
) -> list[Tensor]:
    """What each batch's pass gives, without gradients; what a pass or `serve` fails with ends all of them."""
    passes = [_Pass(call, batch) for batch in batches]
    try:
        with torch.inference_mode():
            for each in passes:
                each.switch()
            while stopped := [each for each in passes if not each.dead]:
                assert serve is not None, "a pass waits for what nobody gives"
                place = min(each.place for each in stopped)
                here = [each for each in stopped if each.place == place]
                with closing(serve(place, [each.empty() for each in here])) as answers:
                    for each in here:
                        each.parcel = next(answers)
                        each.switch()
    finally:
        for each in passes:
            each.throw()
    return [each.result for each in passes if each.result is not None]


def hooked(hooks: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Hooks on modules that are taken off again where a `with` ends."""
    stack = ExitStack()
    for hook in hooks:
        stack.enter_context(hook)
    return stack


def trim_heaps() -> None:
    """Let glibc give freed memory back to the system, of which its heaps keep much. Elsewhere this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
