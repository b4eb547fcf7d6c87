"""Match regular expressions that somebody else wrote: a worker of `confinement`, which `patterns` asks.

An expression of a few characters can take Python's `re` longer than the age of the universe. This process is killed
after a few seconds of processor time.
"""

import re
from typing import Any

from .confinement import MEMORY, allow

_COSTS = (MEMORY, 2**10, 1.0, 1 / 2**17)
"""Memory and seconds for any question, and more for each of its bytes."""


def answer(question: dict[str, list[str]]) -> list[int]:
    """Return for each name the index of the first expression that matches all of it, and -1 where none does."""
    allow(sum(map(len, (*question["patterns"], *question["names"]))), _COSTS)
    patterns = [re.compile(each) for each in question["patterns"]]
    found = []
    for name in question["names"]:
        matching = (index for index, pattern in enumerate(patterns) if pattern.match(name))
        found.append(next(matching, -1))
    return found


def reason(error: BaseException) -> Any:
    """Return what `re` says of an expression that it cannot compile."""
    return f"{error!s:.200}" or type(error).__name__
