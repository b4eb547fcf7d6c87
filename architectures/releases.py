"""The installed release of transformers, read without an import of it.

From a release on, transformers may round a family differently. The rounding field of such a family depends on the
installed release, because gptkit computes the same bits as the installed transformers.
"""

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["TESTED", "faults", "installed", "since", "untested"]

TESTED = ((5, 23), (5, 24))
"""The oldest and the newest release with which all families were compared."""

_VERSION = re.compile(r'^__version__ = "(\d+)\.(\d+)', re.M)


@cache
def installed() -> tuple[int, int] | None:
    """Return the major and minor version of the installed transformers, or None without it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    match = _VERSION.search(Path(spec.origin).read_text("utf-8"))
    return None if match is None else (int(match[1]), int(match[2]))


def since(release: str) -> bool:
    """Return whether the installed transformers is this release ("5.24") or a newer one; True without transformers."""
    major, minor = release.split(".")
    return (installed() or TESTED[1]) >= (int(major), int(minor))


def untested() -> list[str]:
    """Return a note if the installed release was not compared with gptkit, or an empty list."""
    release = installed()
    if release is None or TESTED[0] <= release <= TESTED[1]:
        return []
    oldest, newest = (".".join(map(str, tested)) for tested in TESTED)
    return [
        f"gptkit was compared with transformers {oldest} to {newest}; {'.'.join(map(str, release))} is installed, and "
        "may round differently"
    ]


def faults(mended: Iterable[tuple[str, str]]) -> list[str]:
    """Return a note for every fault of transformers' class in the installed release; see `Architecture.mended`."""
    return [
        f"the class of the installed transformers {what}; release {release} corrects this"
        for release, what in mended
        if not since(release)
    ]
