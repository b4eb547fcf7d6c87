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
    heal = "play.txt"            # last: train the result on a text, or a folder of tokens, to match the original
    settings = { tokens = 400_000, train = "changed" }

A number may depend on the model before the step: "auto:75%" means 75 % of its layers (rounded), and "gqa:1/2" half of
its key-value heads (which must be a whole number). Every output of gptkit swap is a recipe too: its manifest.json
records the steps, the text they were fitted on and the sha256 of the original's files.
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

FOLDER = Path(__file__).parent / "recipes"  # the bundled recipes
_PLAY = "the bundled play"  # the name of the bundled text in records
MOST_BYTES = 10**6  # the largest size of a recipe in bytes
_HEAD_KEYS = ("name", "description", "as", "step")
_REWRITE = "Apply the swap again to write a new manifest.json, or give a recipe in TOML."
_CALIBRATION = {"text": str, "sha256": str, "tokens": int}
_STEP_KEYS: Mapping[str, tuple[type, object]] = {
    "blocks": (str, None),
    "approximate": (bool, False),
    "settings": (dict, {}),
    "tokens": (int, None),
    "comment": (str, ""),
}
"""The keys that a step may have besides its option, with their types and defaults."""
_WORDS = {str: "text", bool: "true or false", dict: "a table", int: "a whole number", float: "a number"}
HEAL = Option(
    "heal", "", 0, "Train what came out to answer as the original.", "FILE",
    settings={
        "tokens": int, "seconds": float, "train": str, "local": float, "hidden": float, "seeds": int, "rate": float,
        "warmup": float, "decay": float, "clip": float, "batch": int, "context": int, "accumulate": int, "every": int,
        "held_out": float | str, "beside": bool, "patience": int, "seed": int, "dtype": str, "compile": bool,
    },
)  # fmt: skip
"""The option of the step `heal`, which may be the last step of a recipe. It is no swap: it trains the result.

Its value is the text file, and its settings are options of `training.heal`."""


@dataclass(frozen=True)
class Recipe:
    """A named list of swaps to run one after the other."""

    name: str
    description: str
    steps: tuple[Step, ...]  # the swaps, without the step `heal`
    where: str  # the name of the file, for messages
    to: str | None = None  # the output format, "as" in the file: "local", "auto", "hf:llama"
    dtype: str | None = None  # the requested dtype, only in a recipe that gptkit wrote
    calibration: Mapping[str, Any] = field(default_factory=dict)  # name, sha256 and number of tokens of the fits' text
    sources: Mapping[str, str] = field(default_factory=dict)  # the sha256 of the original's files, by file name
    heal: Step | None = None  # the last step, which trains the result to match the original

    @property
    def every(self) -> tuple[Step, ...]:
        """Return all steps, including the heal step."""
        return (*self.steps, *([self.heal] if self.heal is not None else []))

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as manifest.json stores it and as `read_recipe` reads it."""
        optional = {"as": self.to, "dtype": self.dtype, "calibration": dict(self.calibration) or None}
        present = {name: value for name, value in optional.items() if value is not None}
        first = {"name": self.name, "description": self.description, "step": list(map(step_json, self.every))}
        return {**first, **present, "sources": dict(self.sources)}

    def text(self) -> Path | None:
        """Return the path of the text that the recipe's steps are fitted on. Raises UsageError if the file is missing.

        Return None if no step is fitted, or if the text is the one that comes with gptkit.
        """
        name = self.calibration.get("text")
        if not isinstance(name, str) or name == _PLAY:
            return None
        if not Path(name).is_file():
            raise self.another_text()
        return Path(name)

    def another_text(self) -> UsageError:
        """Return the error that the text is not the one on which the recipe's steps were fitted."""
        name, digest = self.calibration.get("text"), str(self.calibration.get("sha256"))
        return UsageError(
            f"{self.where}: the recipe was fitted on the text {name}, which is missing or has changed (sha256 was "
            f"{digest[:16]}…)",
            "Give the text with --calibrate FILE. Only the same text gives the same weights.",
        )


def step_json(step: Step) -> dict[str, Any]:
    """Return a step as JSON values, as a recipe in manifest.json stores it."""
    option = option_of(step.option)
    flag = option is not None and option.flag and not step.value
    values = {"approximate": step.approximate, "settings": dict(step.settings), "tokens": step.tokens}
    values["comment"] = step.comment
    blocks = {} if step.blocks is None else {"blocks": step.blocks}
    return {
        step.option: True if flag else step.value,
        **blocks,
        **{name: entry for name, entry in values.items() if entry},
    }


# --- reading recipes --------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """Return the paths of the bundled recipes, by their names."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def _find_recipe(reference: str | Path) -> Path:
    """Return the path of a recipe file. Raises UsageError if there is none.

    `reference` is the name of a bundled recipe, the path of a recipe file, or a folder that gptkit swap wrote. For such
    a folder, return the path of its manifest.json.
    """
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
    """Read a recipe: a bundled one by its name, a file by its path, or the recipe of a folder that gptkit swap wrote.

    Raises UsageError if there is none, and InvalidInput for invalid TOML or an invalid recipe. The message names the
    file and the step.
    """
    path, where = _find_recipe(reference), str(reference)
    return parse(_manifest(path, where) if path.suffix == ".json" else _toml(path, where), where, path.stem)


def _toml(path: Path, where: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:  # a manifest may be longer: it has an entry a tensor
            raise InvalidInput(f"{where} is too large for a recipe: it has more than {MOST_BYTES:,} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise InvalidInput(f"cannot read the recipe {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} is not a UTF-8 text: byte {error.start:,} is invalid") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} is not valid TOML: {error}") from error


def _manifest(path: Path, where: str) -> dict[str, Any]:
    """Return the recipe that gptkit swap recorded in a manifest.json."""
    try:
        data = read_manifest(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: its {MANIFEST} is damaged, so gptkit cannot read the recipe from it") from error
    swap = data.get("swap") if isinstance(data, dict) else None
    recipe = swap.get("recipe") if isinstance(swap, dict) else None
    if not isinstance(recipe, dict):
        raise UsageError(
            f"{where} was not written by gptkit swap", "Give a recipe in TOML, or a folder that gptkit swap made."
        )
    return recipe


def parse(data: Mapping[str, Any], where: str, name: str = "") -> Recipe:
    """Build a recipe from the values of a TOML or JSON file.

    Raises InvalidInput if they are no valid recipe. The message names the invalid step. `where` is the file's name for
    messages, and `name` the default for the recipe's name.
    """
    written = "sources" in data  # by gptkit
    known = (*_HEAD_KEYS, "dtype", "calibration", "sources") if written else _HEAD_KEYS
    for key in data:
        if key not in known:
            raise InvalidInput(
                f"{where}: unknown key {key!r}", f"known: {', '.join(known)}; swap options belong in a [[step]]"
            )
    for key in ("name", "description", "as"):
        if not isinstance(data.get(key, ""), str):
            raise InvalidInput(f"{where}: {key} must be a string")
    tables = data.get("step", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(entry, dict) for entry in tables):
        hint = 'Write each swap as a table [[step]] with OPTION = VALUE, such as norm = "rmsnorm".'
        raise InvalidInput(f"{where}: the recipe has no steps", hint)
    steps = tuple(_step(table, f"{where}, step {number}") for number, table in enumerate(tables, 1))
    heal = steps[-1] if steps[-1].option == HEAL.name else None
    steps = steps[:-1] if heal else steps
    if not steps or any(step.option == HEAL.name for step in steps):
        raise InvalidInput(f"{where}: heal must be the last step of a recipe, after at least one swap")
    written_fields = {}
    if written:
        kinds = {"dtype": str | None, "calibration": dict, "sources": dict}
        wrong = [key for key, kind in kinds.items() if key in data and not isinstance(data[key], kind)]
        if wrong:
            raise InvalidInput(f"{where}: the recipe's field {wrong[0]} has a value of the wrong type", _REWRITE)
        text = data.get("calibration", {})
        if any(type(text[key]) is not kind for key, kind in _CALIBRATION.items() if key in text):
            raise InvalidInput(f"{where}: the recipe's field calibration has a value of the wrong type", _REWRITE)
        written_fields = {key: data[key] for key in kinds if key in data}
    named = data.get("name", "") or ("" if written else name)
    return Recipe(named, data.get("description", ""), steps, where, data.get("as"), heal=heal, **written_fields)


def _step(table: Mapping[str, Any], where: str) -> Step:
    """Parse one table [[step]] of a recipe. `where` names the step in messages."""
    known = {option.name: option for option in (*all_options(), HEAL)}
    names = {key: key.replace("-", "_") for key in table if key not in _STEP_KEYS}
    for key, name in names.items():
        if name not in known:
            raise InvalidInput(f"{where}: unknown option {key!r}", nearest(name, [*sorted(known), *_STEP_KEYS]))
    if len(names) != 1:
        has = f"{len(names)} swap options ({', '.join(names)})" if names else "no swap option"
        raise InvalidInput(
            f"{where} has {has}, but a step needs exactly one",
            "Give every swap its own [[step]]. Steps run one after the other.",
        )
    ((key, name),) = names.items()
    option = known[name]
    for part, (kind, _) in _STEP_KEYS.items():
        if part in table and not isinstance(table[part], kind):
            raise InvalidInput(f"{where}: {part} must be {_WORDS[kind]}, not {shown(table[part], 40)}")
    values = {part: table.get(part, default) for part, (_, default) in _STEP_KEYS.items()}
    _check_settings(values["settings"], option, key, where)
    if option is HEAL and not {"blocks", "approximate", "tokens"}.isdisjoint(table):
        raise InvalidInput(f"{where}: a heal step cannot have the keys blocks, approximate or tokens")
    if type(values["tokens"]) is bool or (values["tokens"] or 1) < 1:
        raise InvalidInput(f"{where}: tokens must be a whole number from 1, not {shown(values['tokens'], 40)}")
    # The registry needs the value as text. In the file, a whole number may be without quotes, and a flag is true.
    value = table[key]
    if type(value) is int and not option.flag:
        value = str(value)
    if (value is not True) if option.flag else not (isinstance(value, str) and value):
        expected = "true" if option.flag else "text or a whole number"
        raise InvalidInput(f"{where}: {key} must be {expected}, not {shown(value, 40)}")
    return Step(name, "" if option.flag else value, **values)


def _check_settings(settings: Mapping[str, Any], option: Option, key: str, where: str) -> None:
    """Raise InvalidInput if a step has a setting that its option does not have, or a setting of the wrong type."""
    for part, setting in settings.items():
        if (wanted := option.settings.get(part)) is None:
            known_settings = f"known: {', '.join(option.settings)}" if option.settings else None
            raise InvalidInput(f"{where}: {key} has no setting {part!r}", known_settings)
        kinds = get_args(wanted) or (wanted,)
        if type(setting) not in kinds and (type(setting) is not int or float not in kinds):
            words = " or ".join(_WORDS[accepted] for accepted in kinds)
            raise InvalidInput(f"{where}: the setting {part} must be {words}, not {shown(setting, 40)}")


# --- numbers that depend on the model ---------------------------------------------------------------------------------


_PART = re.compile(r"([a-z]*[:+]?)(?:(\d{1,6}(?:\.\d{1,6})?)%|(\d{1,6})/([1-9]\d{0,5}))", re.ASCII)


def plain(step: Step, spec: ModelSpec) -> Step:
    """Replace a share in a step's value by the number for this model: "gqa:1/2" becomes "gqa:4" if it has 8 heads.

    Steps without a share are unchanged. Raises SwapRefused if the result is not a whole number, if the model has none
    of what the share is of (such as heads), or if its layers have different numbers of it.
    """
    match = _PART.fullmatch(step.value)
    whole = None if match is None else parts().get((step.option, match[1]))
    if match is None or whole is None:
        return step
    what, counts = whole[0], whole[1](spec)
    if len(counts) > 1:
        numbers = ", ".join(str(count) for count in sorted(x for x in counts if x is not None))
        raise SwapRefused(
            f"{step.value!r} is a share of the {what}, but the layers have different numbers of {what} ({numbers})",
            "Give a number of " + what + " instead of a share.",
        )
    (size,) = counts
    if size is None:
        raise SwapRefused(f"{step.value!r} is a share of the {what}, but this model has no {what}")
    part = Fraction(match[2]) / 100 if match[2] is not None else Fraction(int(match[3]), int(match[4]))
    wanted = part * size
    if match[2] is not None and part > 0:
        wanted = Fraction(max(int(wanted + Fraction(1, 2)), 1))
    if wanted.denominator != 1 or wanted < 1:
        fit = [size // n for n in range(size, 0, -1) if size % n == 0]
        share = f"{match[2]}%" if match[2] else f"{match[3]}/{match[4]}"
        reason = f"{share} of {size} {what} is {float(wanted):g}, not a whole number"
        hint = f"Choose a share that gives one of {', '.join(map(str, fit[-8:]))}, or write the number itself."
        raise SwapRefused(reason, hint)
    return replace(step, value=f"{match[1]}{int(wanted)}")


@contextmanager
def in_messages(where: str | None) -> Iterator[None]:
    """In a with block, add the prefix `where` to error messages, such as the name of the recipe and the step."""
    try:
        yield
    except GptkitError as error:
        if where is not None:
            error.message = f"{where}: {error.message}"
            error.args = (error.message,)
        raise


def called(steps: Sequence[Step], number: int) -> str | None:
    """Return the name of step `number` for error messages, as the user wrote it. Return None if it is the only step."""
    step = steps[number]
    if step.written and all(other.written == step.written for other in steps):
        return f"{step.written} (its step {step})"
    return f"step {number + 1} ({step.written or step})" if len(steps) > 1 else None
