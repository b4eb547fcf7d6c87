"""The list of swaps: how each is asked for, what it needs, what it guarantees, where it comes from.

A swap is asked for as OPTION = VALUE: `--attention gqa:4` on the command line, `attention = "gqa:4"` in a recipe,
`attention="gqa:4"` in Python. Each file of swaps/ lists its own in its `SWAPS`, and says by its `ORDER` when they are
carried out where several are asked for at once; `all_swaps` has them in that order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..components import ModelSpec
from ..errors import MissingComponent, SwapRefused, UsageError
from . import swaps
from .facts import Assumed, Weights
from .synonyms import TWO_STEPS, nearest, understood

if TYPE_CHECKING:
    from ..architectures.obstacles import Obstacle
    from ..converter.tree import Origin
    from .base import Guarantee, Model, Swapped
    from .fits.calibration import Calibration

__all__ = [
    "Asked",
    "Clears",
    "Step",
    "Swap",
    "all_swaps",
    "apply",
    "layers_in",
    "options",
    "register",
    "reshape",
    "steps_named",
    "steps_of",
    "swap_for",
]

PLUGINS: list[str] = []
"""The modules with swaps that plugins have registered, by their full names."""


def register(module: str) -> None:
    """Make the swaps of a plugin's module known, by its full name; it has `SWAPS` and `ORDER` as our own do."""
    PLUGINS.append(module)
    all_swaps.cache_clear()


LARGEST = 1_000_000
"""Units, heads, layers or tokens that a value may ask for; the largest models have a fifth of it of anything."""


@dataclass(frozen=True)
class Step:
    """One swap that is asked for.

    option and value: see the module's text; other words for a value become ours. blocks: the layers it is for, None
    for all. approximate: the plain replacement, for comparison, where a better form is known. settings: those of
    this swap alone. written: the option as a person wrote it, where one that they wrote is several steps.
    """

    option: str
    value: str
    blocks: str | None = None
    approximate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    written: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", understood(self.option, self.value))

    def __str__(self) -> str:
        words = [f"--{self.option.replace('_', '-')}", *([self.value] if self.value else [])]
        words += [f"--blocks {self.blocks}"] if self.blocks is not None else []
        return " ".join([*words, *(["--approximate"] if self.approximate else [])])

    def as_json(self) -> dict[str, Any]:
        """As a recipe has it."""
        found: dict[str, Any] = {self.option: self.value, **self.settings}
        if self.blocks is not None:
            found["blocks"] = self.blocks
        if self.approximate:
            found["approximate"] = True
        return found


@dataclass(frozen=True)
class Asked:
    """A step as a swap sees it: the value, its part behind the colon, the layers, and what it may draw on.

    weights: what it may ask of the weights. calibration gives token ids of a text when asked, or raises UsageError,
    saying what to give. origin: where the tree came from. files: the folder of the model's companions (its tokenizer),
    where they are its own. texts: companions that do not lie there. offline: whether adapters may be fetched.
    """

    value: str
    argument: str | None = None
    layers: tuple[int, ...] | None = None
    approximate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=Assumed)
    calibration: Callable[[], Calibration] | None = None
    origin: Origin | None = None
    files: Path | None = None
    texts: Mapping[str, bytes] = field(default_factory=dict)
    offline: bool = False

    def number(self, what: str, least: int = 1, most: int = LARGEST) -> int:
        """The argument as a whole number (the value, where there is no colon).

        Raises:
            UsageError: it is none, or beyond what any model has: such a tree would fill the memory.

        """
        text = self.value if self.argument is None else self.argument
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise UsageError(f"{self.value!r}: expected {what} as a whole number from {least}")
        if int(text) > most:
            raise UsageError(f"{self.value!r}: expected {what} of {most:,} at most")
        return int(text)

    def text(self, what: str) -> Calibration:
        """The text that something is fitted or measured on.

        Raises:
            UsageError: there is none; `what` says what it is for.

        """
        if self.calibration is None:
            raise UsageError(f"{what} on a text, and none was given", "--calibrate FILE")
        return self.calibration()

    def chosen(self, spec: ModelSpec) -> tuple[int, ...]:
        """The layers it is for."""
        return tuple(range(len(spec.blocks))) if self.layers is None else self.layers


ANY = object()


@dataclass(frozen=True, init=False)
class Clears:
    """What a swap may clear of what stands in the way of a tree into a family: see `architectures.obstacles`.

    path: the field in which they differ, `*` for anything. ours, theirs: the kind of component, or the value, that the
    tree has there, and the family. steps: what is asked for, all of it together, each "option=value" with `{theirs}`
    for what the family has; by default the swap by its form alone.
    """

    path: str
    steps: tuple[str, ...]
    ours: Any
    theirs: Any

    def __init__(self, path: str, *steps: str, ours: Any = ANY, theirs: Any = ANY) -> None:
        for name, value in (("path", path), ("steps", steps), ("ours", ours), ("theirs", theirs)):
            object.__setattr__(self, name, value)

    def remedy(self, swap: Swap, obstacle: Obstacle) -> tuple[Step, ...]:
        """The steps that may clear an obstacle; none where it is another."""
        sides = ((self.ours, obstacle.ours), (self.theirs, obstacle.theirs))
        if not fnmatchcase(obstacle.path, self.path) or not all(_is(value, wanted) for wanted, value in sides):
            return ()
        told = self.steps or (f"{swap.option}={swap.form}",)
        pairs = [each.format(theirs=obstacle.theirs).partition("=") for each in told]
        return tuple(Step(option, value) for option, _, value in pairs)


def _is(value: Any, wanted: Any) -> bool:
    return wanted is ANY or (isinstance(value, wanted) if isinstance(wanted, type) else bool(value == wanted))


@dataclass(frozen=True)
class Swap:
    """A registered swap.

    option, form: how it is asked for; form is how VALUE looks ("rmsnorm", "gqa:N", "+N"), an upper-case word standing
    for anything. takes, gives: the components. guarantee: the best it gives, where its preconditions hold. needs: them,
    in words. source: the paper or code. reshape: the tree after it, and of what each tensor is to be made, without
    weights (but for what it asks of `Asked.weights`); or SwapRefused with the reason. examples: values worth trying on
    a tree. by_layer: whether it may be asked for some layers alone. calibrated: whether it draws on a text. inverse:
    the step that undoes it. exact_where: the weights that it is exact on, where only some are so, in words that end
    "exact only where …". clears: what it is a remedy of, where a family has something else.
    """

    option: str
    form: str
    takes: str
    gives: str
    guarantee: Guarantee
    needs: str
    source: str
    reshape: Callable[[ModelSpec, Asked], Swapped]
    examples: Callable[[ModelSpec], Iterable[str]] = lambda spec: ()
    by_layer: bool = False
    calibrated: bool = False
    inverse: Callable[[ModelSpec, Asked], Step | None] = lambda before, asked: None
    exact_where: str = ""
    clears: tuple[Clears, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.takes} -> {self.gives}"

    def gives_for(self, value: str) -> str:
        """What it gives, with the numbers of a value in place of the words that stand for them."""
        match = self._pattern.fullmatch(value)
        words = re.findall("[A-Z]+", self.form)
        if match is None or not words:
            return self.gives
        known = dict(zip(words, (each.rpartition(":")[2] for each in match.groups()), strict=True))
        return re.sub(r"\b[A-Z]+\b", lambda word: known.get(word[0], word[0]), self.gives)

    def matches(self, value: str) -> bool:
        """Whether the value has this form."""
        return self._pattern.fullmatch(value) is not None

    @property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern(self.form)


@cache
def _pattern(form: str) -> re.Pattern[str]:
    parts = re.split(r"([A-Z]+)", form)
    return re.compile("".join("(.+)" if part.isupper() else re.escape(part) for part in parts), re.DOTALL)


@cache
def all_swaps() -> tuple[Swap, ...]:
    """Every swap, in the order of execution: what an earlier one leaves is what a later one finds."""
    own = [f"{swaps.__name__}.{module.name}" for module in iter_modules(swaps.__path__)]
    found = [module for module in map(import_module, [*own, *PLUGINS]) if hasattr(module, "SWAPS")]
    return tuple(swap for module in sorted(found, key=lambda module: module.ORDER) for swap in module.SWAPS)


def options() -> dict[str, tuple[Swap, ...]]:
    """The swaps by the option that asks for them, in the order of execution."""
    found: dict[str, list[Swap]] = {}
    for swap in all_swaps():
        found.setdefault(swap.option, []).append(swap)
    return {option: tuple(swaps) for option, swaps in found.items()}


def swap_for(option: str, value: str) -> Swap:
    """The swap that OPTION = VALUE asks for: the first whose form fits.

    Raises:
        UsageError: there is no such option, or it takes no such value.

    """
    known = options()
    if option not in known:
        raise UsageError(f"unknown swap {option!r}", f"known: {', '.join(known)}")
    for swap in known[option]:
        if swap.matches(value):
            return swap
    raise UsageError(f"--{option.replace('_', '-')} {value!r} is unknown", _meant(option, value))


def _meant(option: str, value: str) -> str | None:
    """What may have been meant by a value that no swap takes."""
    if (option, value) in TWO_STEPS:
        return "It is two steps here: " + ", then ".join(f"{name} = {to}" for name, to in TWO_STEPS[option, value])
    forms = list(dict.fromkeys(swap.form for swap in options()[option] if swap.form))
    near = nearest(option, value, forms)
    return f"{f'did you mean {near}? ' if near else ''}known: {', '.join(forms)}" if forms else None


def steps_named(option: str, value: str, blocks: str | None = None, approximate: bool = False) -> list[Step]:
    """What one OPTION = VALUE asks for: a step, or two where a word such as SwiGLU means two.

    Raises:
        UsageError: the option or the value is unknown.

    """
    several = TWO_STEPS.get((option, understood(option, value)))
    written = f"--{option.replace('_', '-')} {value}" if several else ""
    found = [Step(name, to, blocks, approximate, written=written) for name, to in several or ((option, value),)]
    for step in found:
        swap_for(step.option, step.value)
    return found


def steps_of(asked: Mapping[str, str | None], blocks: str | None = None, approximate: bool = False) -> list[Step]:
    """The steps for several options given at once, in the order of execution.

    Raises:
        UsageError: an option or a value is unknown, or two of them ask for one thing.

    """
    order = {option: index for index, option in enumerate(options())}
    given = [(option, value) for option, value in asked.items() if value is not None]
    found = [step for option, value in given for step in steps_named(option, value, blocks, approximate)]
    twice = [step for step in found if [each.option for each in found].count(step.option) > 1]
    if twice:
        raise UsageError(f"{twice[0]} and {twice[1]} are asked for at once", "Leave one of them out.")
    return sorted(found, key=lambda step: order[step.option])


def apply(
    model: Model,
    step: Step,
    *,
    calibration: Callable[[], Calibration] | None = None,
    files: Path | None = None,
    texts: Mapping[str, bytes] | None = None,
    offline: bool = False,
) -> Swapped:
    """The tree after one step; its tensors are not computed yet. See `reshape`."""
    from .base import Read, origin_of

    origin, own = origin_of(model)
    return reshape(model.spec, step, Read(model), origin, calibration, files if own else None, texts, offline)


def reshape(
    spec: ModelSpec,
    step: Step,
    weights: Weights,
    origin: Origin | None = None,
    calibration: Callable[[], Calibration] | None = None,
    files: Path | None = None,
    texts: Mapping[str, bytes] | None = None,
    offline: bool = False,
) -> Swapped:
    """What one step makes of a tree, and how each new tensor is to be made.

    Raises:
        SwapRefused: a precondition does not hold; the message says why and what would be possible.
        UsageError: no such swap, value or layer.

    """
    swap = swap_for(step.option, step.value)
    if step.blocks is not None and not swap.by_layer:
        raise UsageError(f"{step}: this swap is for the whole model", "leave --blocks out")
    argument = step.value.partition(":")[2] if ":" in step.value else None
    layers = None if step.blocks is None else layers_in(step.blocks, len(spec.blocks))
    asked = Asked(
        step.value,
        argument,
        layers,
        step.approximate,
        step.settings,
        weights,
        calibration,
        origin,
        files,
        dict(texts or {}),
        offline,
    )
    try:
        found = swap.reshape(spec, asked)
    except MissingComponent as error:
        raise SwapRefused(error.message, error.hint) from error
    assert step.option not in found.summary, f"{step.option}: what was asked for and what was done have one name"
    record = {"swap": step.option, **step.as_json(), "guarantee": found.guarantee, **found.summary}
    return replace(found, summary=record)


def layers_in(text: str, layers: int) -> tuple[int, ...]:
    """The layers that "0-11,14,20-" names, in the order named, of a model of so many.

    Raises:
        UsageError: it is no such list, or names a layer beyond the last.

    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(-\s*(\d{1,9})?)?\s*", part)
        if match is None:
            raise UsageError(f"{text!r} is no list of layers", "expected something like 0-11,14-29")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else layers - 1
        for each in (first, last):
            if each >= layers:
                raise SwapRefused(
                    f"{text!r} names layer {each}, the model has {layers}: 0 to {layers - 1}",
                    f"Possible here: 0-{layers - 1}, or a part of it.",
                )
        if last < first:
            raise UsageError(f"{text!r}: {first}-{last} runs backwards")
        found += range(first, last + 1)
    return tuple(found)
