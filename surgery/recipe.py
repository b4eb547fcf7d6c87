"""Recipes: swaps one after the other, in a TOML file. No torch.

    name = "llama-to-mqa"
    description = "One key-value head for all query heads."

    as = "auto"                  # the format of the result, as --as

    [[step]]
    attention = "gqa:1/2"        # OPTION = VALUE; a flag is true
    comment = "half of them first"
    blocks = "3-"                # also: approximate = true, tokens = 8192, settings = { … }

    [[step]]
    attention = "mqa"

    [[step]]
    heal = "play.txt"            # at the end: trained on a text, or a folder of tokens, to answer as the original
    settings = { tokens = 400_000, train = "changed" }

A number may depend on the model that a step finds: "auto:75%" of its layers (rounded), "gqa:1/2" of its key-value heads
(which must come out whole). What gptkit wrote is a recipe too: its manifest.json has the steps, the text they were
fitted on and the sha256 of what they were made of.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from ..components import ModelSpec
from ..components.serialise import nearest
from ..converter.manifest import MANIFEST, read_manifest
from ..converter.names import LOCAL_CONFIG
from ..errors import GptkitError, InvalidInput, SwapRefused, UsageError, meant, shown
from .options import Option
from .registry import Step, all_options, option_of, parts

FOLDER = Path(__file__).parent / "recipes"  # the recipes that come along
_PLAY = "the bundled play"  # what records call the text that comes along
MOST_BYTES = 10**6  # a larger file is no recipe
_HEAD_KEYS = ("name", "description", "as", "step")
_CALIBRATION = {"text": str, "sha256": str, "tokens": int}
_STEP_KEYS: Mapping[str, tuple[type, object]] = {
    "blocks": (str, None),
    "approximate": (bool, False),
    "settings": (dict, {}),
    "tokens": (int, None),
    "comment": (str, ""),
}
"""What a step may say beside its option: the type, and what it is by default."""
_WORDS = {str: "text", bool: "true or false", dict: "a table", int: "a whole number", float: "a number"}
HEAL = Option(
    "heal", "", 0, "Train what came out to answer as the original.", "FILE",
    settings={
        "tokens": int, "seconds": float, "train": str, "local": float, "hidden": float, "seeds": int, "rate": float,
        "warmup": float, "decay": float, "clip": float, "batch": int, "context": int, "accumulate": int, "every": int,
        "held_out": float | str, "beside": bool, "patience": int, "seed": int, "dtype": str, "compile": bool,
    },
)  # fmt: skip
"""The step that is no swap: its value is the text, its settings are what `training.heal` is given."""


@dataclass(frozen=True)
class Recipe:
    """Steps with a name.

    heal: the last step, where what comes out is trained to answer as the original; swaps know nothing of it.
    where: the file, for messages. to: the format of the result, "as" in the file: "local", "auto", "hf:llama". dtype,
    calibration, sources: only of what gptkit wrote: the dtype that was asked for, the text that steps were fitted on
    (its name, sha256, tokens), and the sha256 of the source's files.
    """

    name: str
    description: str
    steps: tuple[Step, ...]
    where: str
    to: str | None = None
    dtype: str | None = None
    calibration: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    heal: Step | None = None

    @property
    def every(self) -> tuple[Step, ...]:
        """All steps, the healing too."""
        return (*self.steps, *([self.heal] if self.heal is not None else []))

    def as_json(self) -> dict[str, Any]:
        """As manifest.json has it, and as `read_recipe` reads it."""
        there = {"as": self.to, "dtype": self.dtype, "calibration": dict(self.calibration) or None}
        given = {name: value for name, value in there.items() if value is not None}
        first = {"name": self.name, "description": self.description, "step": list(map(step_json, self.every))}
        return {**first, **given, "sources": dict(self.sources)}

    def text(self) -> Path | None:
        """The file that steps were fitted on, None for the bundled play or none; UsageError where it is not there."""
        name = self.calibration.get("text")
        if not isinstance(name, str) or name == _PLAY:
            return None
        if not Path(name).is_file():
            raise self.another_text()
        return Path(name)

    def another_text(self) -> UsageError:
        """What to say where the text is not the one that steps were fitted on."""
        name, digest = self.calibration.get("text"), str(self.calibration.get("sha256"))
        return UsageError(
            f"{self.where}: the recipe was fitted on {name}, which is missing or has changed (sha256 was "
            f"{digest[:16]}…)",
            "Give a text with --calibrate FILE. The same text gives the same weights.",
        )


def step_json(step: Step) -> dict[str, Any]:
    """A step as a recipe has it."""
    option = option_of(step.option)
    flag = option is not None and option.flag and not step.value
    there = {"approximate": step.approximate, "settings": dict(step.settings), "tokens": step.tokens}
    there["comment"] = step.comment
    blocks = {} if step.blocks is None else {"blocks": step.blocks}
    return {step.option: True if flag else step.value, **blocks, **{name: each for name, each in there.items() if each}}


# --- reading ----------------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """The recipes that come along, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def _find_recipe(reference: str | Path) -> Path:
    """The file behind a name of ours, a path, or a folder that gptkit wrote; UsageError where there is none."""
    path = Path(reference).expanduser()
    if path.is_dir() or path.name == LOCAL_CONFIG:
        folder = path if path.is_dir() else path.parent
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"{folder} has no {MANIFEST}: gptkit swap did not write it", "Give a recipe in TOML.")
        return folder / MANIFEST
    if path.is_file():
        return path
    name, known = str(reference), shipped()
    if name in known:
        return known[name]
    near = meant(name, known)
    hint = f"Did you mean {near}?" if near else f"Name a file, or one of {', '.join(known)}."
    raise UsageError(f"gptkit has no recipe {name!r}", hint)


def read_recipe(reference: str | Path) -> Recipe:
    """A recipe by its name among ours, its file, or a folder that gptkit wrote. Raises UsageError where there is none,
    and InvalidInput where it is no TOML, or not what a recipe is; file and step are named.
    """
    path, where = _find_recipe(reference), str(reference)
    return parse(_manifest(path, where) if path.suffix == ".json" else _toml(path, where), where, path.stem)


def _toml(path: Path, where: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:  # a manifest may be longer: it has an entry a tensor
            raise InvalidInput(f"{where}: more than {MOST_BYTES:,} bytes are too many for a recipe")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise InvalidInput(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} is not a UTF-8 text: byte {error.start:,} is invalid") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} is not valid TOML: {error}") from error


def _manifest(path: Path, where: str) -> dict[str, Any]:
    """The recipe in a manifest.json."""
    try:
        data = read_manifest(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: its {MANIFEST} is damaged, so gptkit cannot read the recipe from it") from error
    swap = data.get("swap") if isinstance(data, dict) else None
    found = swap.get("recipe") if isinstance(swap, dict) else None
    if not isinstance(found, dict):
        raise UsageError(
            f"{where} was not written by gptkit swap", "Give a recipe in TOML, or a folder that gptkit swap made."
        )
    return found


def parse(data: Mapping[str, Any], where: str, name: str = "") -> Recipe:
    """A recipe from TOML's or JSON's values. Raises InvalidInput, with the place, for what is none."""
    written = "sources" in data  # by gptkit
    known = (*_HEAD_KEYS, "dtype", "calibration", "sources") if written else _HEAD_KEYS
    for key in data:
        if key not in known:
            raise InvalidInput(
                f"{where}: unknown key {key!r}", f"known: {', '.join(known)}; options belong in a [[step]]"
            )
    for key in ("name", "description", "as"):
        if not isinstance(data.get(key, ""), str):
            raise InvalidInput(f"{where}: {key} must be a string")
    tables = data.get("step", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise InvalidInput(f"{where}: a recipe needs steps, each of them a table [[step]] with OPTION = VALUE")
    steps = tuple(_step(table, f"{where}, step {number}") for number, table in enumerate(tables, 1))
    heal = steps[-1] if steps[-1].option == HEAL.name else None
    steps = steps[:-1] if heal else steps
    if not steps or any(step.option == HEAL.name for step in steps):
        raise InvalidInput(f"{where}: heal must be the last step of a recipe")
    more = {}
    if written:
        kinds = {"dtype": str | None, "calibration": dict, "sources": dict}
        wrong = [key for key, kind in kinds.items() if key in data and not isinstance(data[key], kind)]
        if wrong:
            raise InvalidInput(f"{where}: the field {wrong[0]} does not have the form that gptkit writes")
        drawn = data.get("calibration", {})
        if any(type(drawn[key]) is not kind for key, kind in _CALIBRATION.items() if key in drawn):
            raise InvalidInput(f"{where}: the field calibration does not have the form that gptkit writes")
        more = {key: data[key] for key in kinds if key in data}
    named = data.get("name", "") or ("" if written else name)
    return Recipe(named, data.get("description", ""), steps, where, data.get("as"), heal=heal, **more)


def _step(table: Mapping[str, Any], where: str) -> Step:
    """One [[step]]."""
    known = {option.name: option for option in (*all_options(), HEAL)}
    names = {key: key.replace("-", "_") for key in table if key not in _STEP_KEYS}
    for key, name in names.items():
        if name not in known:
            raise InvalidInput(f"{where}: unknown option {key!r}", nearest(name, [*sorted(known), *_STEP_KEYS]))
    if len(names) != 1:
        has = f"{len(names)} options ({', '.join(names)})" if names else "no option"
        raise InvalidInput(
            f"{where}: {has}; a step may have only one",
            "Steps run one after the other: give every swap its own [[step]].",
        )
    ((key, name),) = names.items()
    option = known[name]
    for part, (kind, _) in _STEP_KEYS.items():
        if part in table and not isinstance(table[part], kind):
            raise InvalidInput(f"{where}: {part} must be {_WORDS[kind]}, not {shown(table[part], 40)}")
    given = {part: table.get(part, default) for part, (_, default) in _STEP_KEYS.items()}
    for part, setting in given["settings"].items():
        if (wanted := option.settings.get(part)) is None:
            known_settings = f"known: {', '.join(option.settings)}" if option.settings else None
            raise InvalidInput(f"{where}: {key} has no setting {part!r}", known_settings)
        kinds = get_args(wanted) or (wanted,)
        if type(setting) not in kinds and (type(setting) is not int or float not in kinds):
            words = " or ".join(_WORDS[each] for each in kinds)
            raise InvalidInput(f"{where}: the setting {part} must be {words}, not {shown(setting, 40)}")
    if option is HEAL and not {"blocks", "approximate", "tokens"}.isdisjoint(table):
        raise InvalidInput(f"{where}: a heal step cannot have blocks, approximate or tokens")
    if type(given["tokens"]) is bool or (given["tokens"] or 1) < 1:
        raise InvalidInput(f"{where}: tokens must be a whole number from 1, not {shown(given['tokens'], 40)}")
    # VALUE as the registry wants it: text; whole numbers may stand without quotes, a flag is true.
    value = table[key]
    if type(value) is int and not option.flag:
        value = str(value)
    if (value is not True) if option.flag else not (isinstance(value, str) and value):
        expected = "true" if option.flag else "text or a whole number"
        raise InvalidInput(f"{where}: {key} must be {expected}, not {shown(value, 40)}")
    return Step(name, "" if option.flag else value, **given)


# --- numbers that depend on the model ---------------------------------------------------------------------------------


_PART = re.compile(r"([a-z]*[:+]?)(?:(\d{1,6}(?:\.\d{1,6})?)%|(\d{1,6})/([1-9]\d{0,5}))", re.ASCII)


def plain(step: Step, spec: ModelSpec) -> Step:
    """The step with a number where it has a part of what the model has ("auto:75%", "gqa:1/2"). Raises SwapRefused
    where the part is no whole number, or layers differ, or the model has no such thing.
    """
    match = _PART.fullmatch(step.value)
    whole = None if match is None else parts().get((step.option, match[1]))
    if match is None or whole is None:
        return step
    what, found = whole[0], whole[1](spec)
    if len(found) > 1:
        numbers = ", ".join(str(each) for each in sorted(x for x in found if x is not None))
        raise SwapRefused(
            f"{step.value!r}: layers differ in their {what} ({numbers})",
            "Give a number of " + what + " instead of a share.",
        )
    (size,) = found
    if size is None:
        raise SwapRefused(f"{step.value!r}: this model has no {what}")
    part = Fraction(match[2]) / 100 if match[2] is not None else Fraction(int(match[3]), int(match[4]))
    wanted = part * size
    if match[2] is not None and part > 0:
        wanted = Fraction(max(int(wanted + Fraction(1, 2)), 1))
    if wanted.denominator != 1 or wanted < 1:
        fit = [size // n for n in range(size, 0, -1) if size % n == 0]
        reason = f"{f'{match[2]}%' if match[2] else f'{match[3]}/{match[4]}'} of {size} {what} is {float(wanted):g}"
        hint = f"Choose a fraction that gives a whole number, such as one of {', '.join(map(str, fit[-8:]))} divide it."
        raise SwapRefused(reason, hint)
    return replace(step, value=f"{match[1]}{int(wanted)}")


@contextmanager
def told_as(where: str | None) -> Iterator[None]:
    """Errors from inside say where they come from: the file and the step."""
    try:
        yield
    except GptkitError as error:
        if where is not None:
            error.message = f"{where}: {error.message}"
            error.args = (error.message,)
        raise


def called(steps: Sequence[Step], number: int) -> str | None:
    """What messages call a step of several, by the words of who asked for it; None where it is the only one."""
    step = steps[number]
    if step.written and all(each.written == step.written for each in steps):
        return f"{step.written} (its step {step})"
    return f"step {number + 1} ({step.written or step})" if len(steps) > 1 else None
