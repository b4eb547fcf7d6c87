"""Well-known models by name: their config.json as data, so that a question about them needs no download.

The data lie in presets.json beside this file, each with the page that it was taken from.
"""

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).with_name("presets.json")


@dataclass(frozen=True)
class Preset:
    """A model known by name.

    name, aliases: what it is called here, in lower case.
    repo: its repository on the hub; None where no weights were published (GPT-3).
    source: where `config` was taken from, and what in it had to be decided.
    config: its config.json; shared by all callers, to be read only.
    """

    name: str
    aliases: tuple[str, ...]
    repo: str | None
    source: str
    config: dict[str, Any]

    @property
    def known_as(self) -> tuple[str, ...]:
        """Every name that finds it: its own, its aliases, its repository."""
        return (self.name, *self.aliases, *(() if self.repo is None else (self.repo,)))


@dataclass(frozen=True)
class _File:
    schema: int
    presets: list[Preset]


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name, families together; read from disk once and shared, so not to be changed."""
    found = msgspec.json.decode(PATH.read_bytes(), type=_File)
    return {preset.name: preset for preset in found.presets}


@cache
def _index() -> dict[str, Preset]:
    return {name.lower(): preset for preset in presets().values() for name in preset.known_as}


def find(name: str) -> Preset | None:
    """The preset of that name, alias or repository, in upper or lower case; None where there is none."""
    return _index().get(name.lower())


def nearest(name: str) -> list[str]:
    """Up to five names of presets that `name` may have been meant for, the likeliest first.

    Those that `name` begins (its size left out, say) come before those that it resembles.
    """
    if not name or len(name) > 100:  # no typo of anything here, and comparing takes time in proportion to the length
        return []
    wanted, index = name.lower(), _index()
    begun = [spelling for spelling in index if spelling.startswith(wanted)]
    # Several spellings of one preset may be near, so more are asked for than are told.
    near = difflib.get_close_matches(wanted, index, n=12)
    # What is as near by this measure comes in the order of the list, not of the alphabet from its end.
    likeness, order = difflib.SequenceMatcher(b=wanted), {spelling: place for place, spelling in enumerate(index)}
    near.sort(key=lambda spelling: (-_ratio(likeness, spelling), order[spelling]))
    return list(dict.fromkeys(index[spelling].name for spelling in (*begun, *near)))[:5]


def _ratio(likeness: difflib.SequenceMatcher[str], spelling: str) -> float:
    likeness.set_seq1(spelling)
    return likeness.ratio()


def repo_of(name: str) -> str | None:
    """The hub repository of the preset `name`; None where there is no such preset, or nothing was published."""
    preset = find(name)
    return None if preset is None else preset.repo
