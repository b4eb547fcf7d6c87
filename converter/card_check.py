"""Compare a folder with the files that a verification card (`gptkit verify --card`) describes."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..errors import CheckpointError, InvalidInput, shown
from .files import at_once, read_small, sha256_file

_MAX_BYTES = 2**24  # the largest card: one file of a checkpoint needs a hundred bytes
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _CardFiles(msgspec.Struct, frozen=True):
    reference: str
    sha256: dict[str, _Sha256]


class _CardVerdict(msgspec.Struct, frozen=True):
    function: Literal["identical", "equal", "different"]
    passed: bool


class Card(msgspec.Struct, frozen=True):
    """The part of a verification card that a check needs."""

    schema_version: Literal[1]
    checkpoints: dict[Literal["model", "other"], _CardFiles]
    """The compared checkpoints: `model`, and in a comparison of two checkpoints also `other`."""
    verdict: _CardVerdict
    versions: dict[str, str]
    dtype: str
    command: str
    """The command that repeats the verification."""


def read_card(path: Path) -> Card:
    """Read a card.

    Raises:
        InvalidInput: the file cannot be read, or is not a card that this version of gptkit supports.
    """
    try:
        return msgspec.json.decode(read_small(path, _MAX_BYTES), type=Card)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of which msgspec's errors are subclasses
        raise InvalidInput(
            f"{path} is not a verification card: {shown(str(error), 200)}",
            "Give the JSON file that gptkit verify --card writes.",
        ) from error


def check_card(card: Path, folder: Path) -> tuple[str, Card]:
    """Check that a folder has exactly the files of one of the checkpoints in a card.

    Every file that the card lists must be in the folder, with the same sha256. Other files in the folder, such as those
    of the tokenizer, are not checked.

    Returns:
        The checkpoint's reference in the card, and the card.

    Raises:
        CheckpointError: a file is missing or has other content, for both checkpoints of the card.
        InvalidInput: as `read_card`; also if there is no such folder.
    """
    read = read_card(card)
    if not folder.is_dir():
        raise InvalidInput(f"no such folder: {folder}", "Give the folder of a checkpoint.")
    wrong: dict[str, list[str]] = {}
    for files in read.checkpoints.values():
        names = sorted(files.sha256)
        states = at_once(partial(_state, folder, files.sha256), names)
        problems = [f"{name} {state}" for name, state in zip(names, states, strict=True) if state]
        if not names:
            continue
        if not problems:
            return files.reference, read
        wrong[files.reference] = problems
    if not wrong:
        raise InvalidInput(f"{card} lists no files", "Make the card again with gptkit verify --card.")
    nearest = min(wrong, key=lambda reference: len(wrong[reference]))
    lines = "\n".join(f"  {shown(problem, 200)}" for problem in wrong[nearest][:10])
    raise CheckpointError(f"{folder} is not what {card} describes ({shown(nearest, 100)})", lines)


def _state(folder: Path, sha256: Mapping[str, str], name: str) -> str:
    """Return what is wrong with a file, or "" if its content has the hash in `sha256`."""
    if Path(name).name != name:
        return "is outside of the folder"
    path = folder / name
    if not path.is_file():
        return "is missing"
    return "" if sha256_file(path) == sha256[name] else "has other content"
