"""Match untrusted regular expressions: a worker of `confinement`, which `patterns` asks.

An expression of a few characters can take Python's `re` longer than the age of the universe. This process is killed
after a few seconds of processor time.
"""

import re
from typing import Any

from .confinement import MEMORY, allow

_COSTS = (MEMORY, 2**10, 1.0, 1 / 2**17)
"""Memory and seconds; see `confinement`."""


def answer(question: dict[str, list[str]]) -> list[int]:
    """Return, for every name, the index of the first expression that matches the whole name, or -1.

    The question has the expressions and the names.
    """
    allow(sum(map(len, (*question["patterns"], *question["names"]))), _COSTS)
    patterns = [re.compile(pattern) for pattern in question["patterns"]]
    indices = []
    for name in question["names"]:
        matching = (index for index, pattern in enumerate(patterns) if pattern.match(name))
        indices.append(next(matching, -1))
    return indices


def reason(error: BaseException) -> Any:
    """Return the error of `re` as text."""
    return f"{error!s:.200}" or type(error).__name__
