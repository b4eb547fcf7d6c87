"""Presets: well-known models, whose config.json gptkit contains as data, so that it can describe them without a
download.

The data are in presets.json in the same folder, with the source of every config.
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
    """A well-known model, whose config.json gptkit contains."""

    name: str
    """The name, in lower case."""
    aliases: tuple[str, ...]
    """Other names, in lower case."""
    repo: str | None
    """The repository on the hub, or None if no weights were published (GPT-3)."""
    source: str
    """The source of `config`, and the choices that gptkit made where the source states nothing."""
    config: dict[str, Any]
    """The config.json. All callers share it and must not change it."""

    @property
    def known_as(self) -> tuple[str, ...]:
        """All names by which users can refer to the preset: its name, its aliases and its repository."""
        return (self.name, *self.aliases, *(() if self.repo is None else (self.repo,)))


@dataclass(frozen=True)
class _File:
    schema: int
    presets: list[Preset]


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name, grouped by family. The result is read once and shared: do not change it."""
    contents = msgspec.json.decode(PATH.read_bytes(), type=_File)
    return {preset.name: preset for preset in contents.presets}


@cache
def _index() -> dict[str, Preset]:
    return {name.lower(): preset for preset in presets().values() for name in preset.known_as}


def find(name: str) -> Preset | None:
    """Return the preset with this name, alias or repository, or None. Case does not matter."""
    return _index().get(name.lower())


def nearest(name: str) -> list[str]:
    """Return up to five names of presets that a user may have meant by `name`, the most likely first.

    Names that begin with `name` (for example without its size) come before names that are merely similar.
    """
    if not name or len(name) > 100:  # it is not a typo of any preset, and the time to compare grows with the length
        return []
    wanted, index = name.lower(), _index()
    begun = [spelling for spelling in index if spelling.startswith(wanted)]
    # Several spellings of one preset may be similar, so gptkit asks for more than it returns.
    near = difflib.get_close_matches(wanted, index, n=12)
    # difflib returns equally similar names in reverse alphabetical order. Here they are in the order of the list.
    likeness, order = difflib.SequenceMatcher(b=wanted), {spelling: place for place, spelling in enumerate(index)}
    near.sort(key=lambda spelling: (-_ratio(likeness, spelling), order[spelling]))
    return list(dict.fromkeys(index[spelling].name for spelling in (*begun, *near)))[:5]


def _ratio(likeness: difflib.SequenceMatcher[str], spelling: str) -> float:
    likeness.set_seq1(spelling)
    return likeness.ratio()


def repo_of(name: str) -> str | None:
    """Return the hub repository of a preset, or None if there is no such preset or its weights were not published."""
    preset = find(name)
    return None if preset is None else preset.repo
