"""Match untrusted regular expressions: a worker of `confinement`, which `patterns` asks.

Python's `re` can take almost forever for an expression of a few characters. So this process is killed after a few
seconds of CPU time.
"""

import re
from typing import Any

from .confinement import MEMORY, allow

_COSTS = (MEMORY, 2**10, 1.0, 1 / 2**17)
"""The limits of memory and CPU time; see `confinement._Costs`."""


def answer(question: dict[str, list[str]]) -> list[int]:
    """Return, for every name in the question, the index of the first expression that matches it, or -1.

    An expression must match at the beginning of the name. The question has the lists "patterns" and "names".
    """
    allow(sum(map(len, (*question["patterns"], *question["names"]))), _COSTS)
    patterns = [re.compile(pattern) for pattern in question["patterns"]]
    indices = []
    for name in question["names"]:
        matching = (index for index, pattern in enumerate(patterns) if pattern.match(name))
        indices.append(next(matching, -1))
    return indices


def reason(error: BaseException) -> Any:
    """Return the text of an error that `re` raised."""
    return f"{error!s:.200}" or type(error).__name__
