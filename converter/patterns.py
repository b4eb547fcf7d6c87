"""Match names against untrusted regular expressions.

peft's settings `rank_pattern` and `alpha_pattern` have regular expressions as keys. Nearly all of them are plain module
names, and this process matches them. A separate process (`pattern_process`) matches all others, with limits on time and
memory.
"""

import re
from collections.abc import Sequence

from ..errors import InvalidInput, shown
from .confinement import Confined

_PLAIN = re.compile(r"\^?[\w.-]+")
"""Expressions without repetitions, such as module names, which are always matched fast."""
_SECONDS = 10.0
_LONGEST = 4096  # characters of all expressions together


def first_matches(where: str, patterns: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """Return, for every name, the first pattern that matches the name or the part of it after any dot, or None.

    This is what peft's `get_pattern_key` does. Raises InvalidInput, whose message begins with `where`.
    """
    if sum(map(len, patterns)) > _LONGEST:
        raise InvalidInput(f"{where}: its regular expressions have more than {_LONGEST:,} characters in total")
    whole = [rf"(.*\.)?({pattern})$" for pattern in patterns]
    if all(map(_PLAIN.fullmatch, patterns)):
        compiled = list(map(re.compile, whole))
        return [
            next((key for key, regex in zip(patterns, compiled, strict=True) if regex.match(name)), None)
            for name in names
        ]
    reply = Confined("pattern_process", _SECONDS).ask({"patterns": whole, "names": list(names)})
    expressions = shown(patterns[0] if len(patterns) == 1 else list(patterns))
    if reply is None:
        raise InvalidInput(
            f"{where}: matching the regular expression {expressions} takes more time or memory than gptkit allows",
            "Replace it with plain module names, or with a regular expression without nested repetitions.",
        )
    if "error" in reply:
        raise InvalidInput(
            f"{where}: {expressions} is not a valid regular expression: {shown(reply['error'], 100)[1:-1]}"
        )
    return [patterns[index] if index >= 0 else None for index in reply["answer"]]
