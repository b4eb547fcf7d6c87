"""Match names against the regular expressions of a file that somebody else wrote.

peft's `rank_pattern` and `alpha_pattern` have regular expressions as keys. Nearly all are plain module names, which are
matched here. The others are matched by a process of their own (`pattern_process`) with a limit on time and memory.
"""

import re
from collections.abc import Sequence

from ..errors import InvalidInput, shown
from .confinement import Confined

_PLAIN = re.compile(r"\^?[\w.-]+")
"""Names, in which a dot stands for any character: nothing in them repeats, so nothing is tried twice."""
_SECONDS = 10.0
_LONGEST = 4096  # characters of all expressions together


def first_matches(where: str, patterns: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """Return for each name the first pattern that matches the end of it from a dot on, as peft's `get_pattern_key`
    does, and None where none does. Raises InvalidInput, which begins with `where`.
    """
    if sum(map(len, patterns)) > _LONGEST:
        raise InvalidInput(f"{where}: the patterns have more than {_LONGEST:,} characters in total")
    whole = [rf"(.*\.)?({pattern})$" for pattern in patterns]
    if all(map(_PLAIN.fullmatch, patterns)):
        compiled = list(map(re.compile, whole))
        return [
            next((key for key, each in zip(patterns, compiled, strict=True) if each.match(name)), None)
            for name in names
        ]
    reply = Confined("pattern_process", _SECONDS).ask({"patterns": whole, "names": list(names)})
    told = shown(patterns[0] if len(patterns) == 1 else list(patterns))
    if reply is None:
        hint = "Write module names without nested repetitions in their place."
        raise InvalidInput(f"{where}: matching {told} takes more time or memory than gptkit allows", hint)
    if "error" in reply:
        raise InvalidInput(f"{where}: {told} is not a valid regular expression: {shown(reply['error'], 100)[1:-1]}")
    return [patterns[index] if index >= 0 else None for index in reply["answer"]]
