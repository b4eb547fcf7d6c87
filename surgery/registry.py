"""The list of swaps: how each is asked for, what it needs, what it guarantees, where it comes from.

A swap is asked for as OPTION = VALUE: `--attention gqa:4` on the command line, `attention = "gqa:4"` in a recipe,
`attention="gqa:4"` in Python. Each file of swaps/ lists its own in its `SWAPS`, declares options in `OPTIONS` (one of
the files that have swaps of an option), and says by its `ORDER` when they are carried out where several are asked
for at once; `all_swaps` has them in that order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..components import Block, ModelSpec
from ..errors import ConfigError, MissingComponent, SwapRefused, UsageError, meant
from . import swaps
from .facts import Assumed, Weights
from .options import GROUPS, Option, declared, spelled, squashed

if TYPE_CHECKING:
    from ..architectures.obstacles import Obstacle
    from ..converter.tree import Origin
    from .base import Guarantee, Model, Swapped
    from .fits.calibration import Calibration

PLUGINS: list[str] = []  # the modules with swaps that plugins have registered, by their full names
_LARGEST = 1_000_000
"""Units, heads, layers or tokens that a value may ask for; the largest models have a fifth of it of anything."""


def register(module: str) -> None:
    """Make the swaps of a plugin's module known, by its full name; it is made as our own are."""
    PLUGINS.append(module)
    for each in (_modules, all_swaps, all_options):
        each.cache_clear()


@dataclass(frozen=True)
class Step:
    """One swap that is asked for.

    option and value: see the module's text; other words for a value become ours. blocks: the layers it is for, None
    for all. approximate: the plain replacement, for comparison, where a better form is known. settings: those of
    this swap alone. tokens: how many tokens of the text it is fitted on; None leaves that to be chosen. written: the
    option as a person wrote it, where one that they wrote is several steps. comment: a recipe's.
    """

    option: str
    value: str
    blocks: str | None = None
    approximate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    written: str = field(default="", compare=False)
    comment: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _understood(self.option, self.value))

    def __str__(self) -> str:
        words = [spelled(self.option), *([self.value] if self.value else [])]
        words += [f"--blocks {self.blocks}"] if self.blocks is not None else []
        return " ".join([*words, *(["--approximate"] if self.approximate else [])])

    def as_json(self) -> dict[str, Any]:
        """As a history has it."""
        blocks = {} if self.blocks is None else {"blocks": self.blocks}
        approximate = {"approximate": True} if self.approximate else {}
        return {self.option: self.value, **self.settings, **blocks, **approximate}


@dataclass(frozen=True)
class Asked:
    """A step as a swap sees it: the value, its part behind the colon, the layers, and what it may draw on.

    weights: what it may ask of the weights. calibration gives token ids of a text when asked, or raises UsageError,
    saying what to give; has_text says whether there is one, for swaps that need none. origin: where the tree came from.
    files: the folder of the model's companions (its tokenizer),
    where they are its own. texts: companions that do not lie there. offline: whether adapters may be fetched.
    allow_pickle: whether adapters in pickles are read.
    """

    value: str
    argument: str | None = None
    layers: tuple[int, ...] | None = None
    approximate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=Assumed)
    calibration: Callable[[], Calibration] | None = None
    has_text: Callable[[], bool] = lambda: False
    origin: Origin | None = None
    files: Path | None = None
    texts: Mapping[str, bytes] = field(default_factory=dict)
    offline: bool = False
    allow_pickle: bool = False

    def number(self, what: str, least: int = 1, most: int = _LARGEST) -> int:
        """The argument as a whole number (the value, where there is no colon). Raises UsageError where it is none, or
        beyond what any model has: such a tree would fill the memory.
        """
        text = self.value if self.argument is None else self.argument
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise UsageError(f"{self.value!r}: {what} must be a whole number of at least {least}")
        if int(text) > most:
            raise UsageError(f"{self.value!r}: {what} must be at most {most:,}")
        return int(text)

    def before_colon(self) -> Asked:
        """The step by what stands before the colon alone."""
        return replace(self, value=self.value.partition(":")[0], argument=None)

    def text(self, what: str) -> Calibration:
        """The text that something is fitted on; raises UsageError where there is none, for `what`."""
        if self.calibration is None:
            raise UsageError(f"{what} needs a text: pass", "--calibrate FILE")
        return self.calibration()

    def chosen(self, spec: ModelSpec) -> tuple[int, ...]:
        """The layers it is for."""
        return tuple(range(len(spec.blocks))) if self.layers is None else self.layers

    def those(
        self, spec: ModelSpec, wanted: Callable[[Block], bool], none: str = "", hint: str | None = None
    ) -> list[int]:
        """The layers it is for whose blocks are such, once, in order; refused by `none` where there are none."""
        found = [layer for layer in sorted(set(self.chosen(spec))) if wanted(spec.blocks[layer])]
        if none and not found:
            raise SwapRefused(none, hint)
        return found


_ANY = object()


class Clears:
    """What a swap may clear of what stands in the way of a tree into a family: see `architectures.obstacles`.

    path: the field in which they differ, `*` for anything. ours, theirs: the kind of component, or the value, that the
    tree has there, and the family. steps: what is asked for, all of it together, each "option=value" with `{theirs}`
    for what the family has; by default the swap by its form alone.
    """

    def __init__(self, path: str, *steps: str, ours: Any = _ANY, theirs: Any = _ANY) -> None:
        self.path, self.steps, self.ours, self.theirs = path, steps, ours, theirs

    def remedy(self, swap: Swap, obstacle: Obstacle) -> tuple[Step, ...]:
        """The steps that may clear an obstacle; none where it is another."""

        def alike(value: Any, wanted: Any) -> bool:
            return wanted is _ANY or (isinstance(value, wanted) if isinstance(wanted, type) else bool(value == wanted))

        here = fnmatchcase(obstacle.path, self.path) and alike(obstacle.ours, self.ours)
        if not here or not alike(obstacle.theirs, self.theirs):
            return ()
        steps = self.steps or (f"{swap.option}={swap.form}",)
        pairs = [each.format(theirs=obstacle.theirs).partition("=") for each in steps]
        return tuple(Step(option, value) for option, _, value in pairs)


@dataclass(frozen=True)
class Swap:
    """A registered swap.

    option, form: how it is asked for; form is how VALUE looks ("rmsnorm", "gqa:N", "+N"), an upper-case word standing
    for anything. takes, gives: the components. guarantee: the best it gives, where its preconditions hold. needs: them,
    in words. source: the paper or code. reshape: the tree after it, and of what each tensor is to be made, without
    weights (but for what it asks of `Asked.weights`); or SwapRefused with the reason. examples: values worth trying on
    a tree. by_layer: whether it may be asked for some layers alone. calibrated: whether it draws on a text. apart:
    whether it changes nothing but feed-forwards, the head, or how weights are stored, and so may meet layers that share
    keys or have inputs of their own. each_stack: whether the encoder and the decoder of a model may have it, each by
    itself. exact_where: the weights that it is exact on, where only some are so, in words
    that end "exact only where …". clears: what it is a remedy of, where a family has something else. cheaper: other
    forms of a step that are taken instead where they are better on a text; by default, where it draws on one, the plain
    replacement. chooses: whether it measures what it chooses
    from by itself, so that it is not tried on several numbers of tokens.
    """

    option: str
    form: str
    takes: str
    gives: str
    needs: str
    source: str
    reshape: Callable[[ModelSpec, Asked], Swapped]
    guarantee: Guarantee = "exact"
    examples: Callable[[ModelSpec], Iterable[str]] = lambda spec: ()
    by_layer: bool = False
    calibrated: bool = False
    exact_where: str = ""
    apart: bool = False
    each_stack: bool = False
    clears: tuple[Clears, ...] = ()
    cheaper: Callable[[Step], Iterable[Step]] | None = None
    chooses: bool = False

    def gives_for(self, value: str) -> str:
        """What it gives, with the numbers of a value in place of the words that stand for them."""
        match, words = self.matches(value), re.findall("[A-Z]+", self.form)
        if match is None or not words:
            return self.gives
        known = dict(zip(words, (each.rpartition(":")[2] for each in match.groups()), strict=True))
        return re.sub(r"\b[A-Z]+\b", lambda word: known.get(word[0], word[0]), self.gives)

    def matches(self, value: str) -> re.Match[str] | None:
        """The value, where it has this form, with a group for each word that stands for anything."""
        parts = re.split(r"([A-Z]+)", self.form)
        pattern = "".join("(.+)" if part.isupper() else re.escape(part) for part in parts)
        return re.fullmatch(pattern, value, re.DOTALL)

    def others(self, step: Step) -> list[Step]:
        """Return the cheaper forms of a step."""
        if step.approximate or (self.cheaper is None and not self.calibrated):
            return []
        return list((self.cheaper or plainly)(step))


def plainly(step: Step) -> list[Step]:
    """Return the plain replacement, as a cheaper form of a step."""
    return [replace(step, approximate=True)]


def active(step: Step) -> list[Step]:
    """Return the plain replacement, and what keeps the most active parts as they are, as cheaper forms of a step."""
    return [*plainly(step), replace(step, value=f"{step.value}:active")]


# --- what there is ----------------------------------------------------------------------------------------------------


@cache
def _modules() -> list[ModuleType]:
    """The files of swaps, our own and those of plugins, in the order of execution."""
    own = [f"{swaps.__name__}.{module.name}" for module in iter_modules(swaps.__path__)]
    found = [module for module in map(import_module, [*own, *PLUGINS]) if hasattr(module, "SWAPS")]
    return sorted(found, key=lambda module: module.ORDER)


@cache
def all_swaps() -> tuple[Swap, ...]:
    """Every swap, in the order of execution: what an earlier one leaves is what a later one finds."""
    return tuple(swap for module in _modules() for swap in module.SWAPS)


@cache
def all_options() -> tuple[Option, ...]:
    """Every option that asks for swaps, in the order of the help. Our own are read without an import."""
    files = (file for folder in swaps.__path__ for file in sorted(Path(folder).glob("*.py")))
    found = [option for file in files for option in declared(file)]
    for module in map(import_module, PLUGINS):
        found += getattr(module, "OPTIONS", ())
        names = {option.name for option in found}
        bare = (swap for swap in module.SWAPS if swap.option not in names)
        found += [Option(s.option, "Other swaps", 0, f"{s.takes} -> {s.gives}.", s.form) for s in bare]
    groups = list(dict.fromkeys((*GROUPS, *(option.group for option in found))))
    return tuple(sorted(found, key=lambda option: (groups.index(option.group), option.place)))


def parts() -> dict[tuple[str, str], tuple[str, Callable[[ModelSpec], set[int | None]]]]:
    """What a part ("auto:75%") is a part of, by option and what stands before the number."""
    every = (option for module in _modules() for option in getattr(module, "OPTIONS", ()))
    return {(option.name, before): part for option in every for before, part in option.parts.items()}


def options() -> dict[str, tuple[Swap, ...]]:
    """The swaps by the option that asks for them, in the order of execution."""
    names = dict.fromkeys(swap.option for swap in all_swaps())
    return {option: tuple(swap for swap in all_swaps() if swap.option == option) for option in names}


def option_of(name: str) -> Option | None:
    """The option of that name, where there is one."""
    return next((option for option in all_options() if option.name == name), None)


def _understood(option: str, value: str) -> str:
    """The value in gptkit's words, where it has one; small letters behind a colon, but in a file's name."""
    own = option_of(option)
    word, colon, rest = value.partition(":")
    ours = None if own is None else own.known().get(squashed(word))
    return value if ours is None else f"{ours}{colon}{rest if ours.startswith('prune') else rest.strip().lower()}"


def nearest(option: str, value: str, forms: Iterable[str] = ()) -> str | None:
    """What may have been meant by a value that is unknown: one of these forms, or a word that is understood."""
    own = option_of(option)
    known = {form.partition(":")[0]: form for form in forms if not form.isupper()}
    words = {} if own is None else {word: known.get(ours, ours) for word, ours in own.known().items()}
    near = meant(squashed(value.partition(":")[0]), words)
    return None if near is None else words[near]


def swap_for(option: str, value: str) -> Swap:
    """The swap that OPTION = VALUE asks for: that of the very form, or the first whose form fits; else UsageError."""
    known, own = options(), option_of(option)
    if own is None:
        raise UsageError(f"unknown swap {option!r}", f"known: {', '.join(known)}")
    for swap in (*(each for each in known[option] if each.form == value), *known[option]):
        if swap.matches(value):
            return swap
    hint, forms = None, list(dict.fromkeys(swap.form for swap in known[option] if swap.form))
    if value in own.two:
        hint = "It is two steps here: " + ", then ".join(f"{name} = {to}" for name, to in own.two[value])
    elif forms:
        near = nearest(option, value, forms)
        hint = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(forms)}"
    raise UsageError(f"{spelled(option)} {value!r} is unknown", hint)


# --- what is asked for ------------------------------------------------------------------------------------------------


def steps_named(option: str, value: str, blocks: str | None = None, approximate: bool = False) -> list[Step]:
    """What one OPTION = VALUE asks for: a step, or two (SwiGLU). Raises UsageError where either is unknown."""
    own = option_of(option)
    several = own and own.two.get(_understood(option, value))
    written = f"{spelled(option)} {value}" if several else ""
    found = [Step(name, to, blocks, approximate, written=written) for name, to in several or ((option, value),)]
    for step in found:
        swap_for(step.option, step.value)
    return found


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Steps in the order of execution."""
    return sorted(steps, key=lambda step: list(options()).index(step.option))


def steps_of(
    asked: Mapping[str, str | Sequence[str] | None], blocks: str | None = None, approximate: bool = False
) -> list[Step]:
    """Return the steps for several options, in the order of execution. An option with several values is as many steps,
    in the order of the values. Raises UsageError where an option is unknown, or two of them ask for one thing.
    """
    found: list[Step] = []
    asks: dict[str, tuple[str, Step]] = {}  # by what a step changes: the option that asks for it, and the first step
    for option, given in asked.items():
        for value in [given] if isinstance(given, str) else given or ():
            for step in steps_named(option, value, blocks, approximate):
                by, first = asks.setdefault(step.option, (option, step))
                if by != option:
                    raise UsageError(f"{first} and {step} cannot be combined", "Leave one of them out.")
                found.append(step)
    return in_order(found)


def layers_in(text: str, layers: int) -> tuple[int, ...]:
    """The layers that "0-11,14,20-" names, in the order named; UsageError for no such list, or a layer too many."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(-\s*(\d{1,9})?)?\s*", part)
        if match is None:
            raise UsageError(f"{text!r} is not a list of layers", "Write it like 0-11,14-29.")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else layers - 1
        for each in (first, last):
            if each >= layers:
                hint = f"Possible here: 0-{layers - 1}, or a part of it."
                raise SwapRefused(f"{text!r} names layer {each}, but the model has only layers 0 to {layers - 1}", hint)
        if last < first:
            raise UsageError(f"{text!r}: {first}-{last} has its first layer after its last")
        found += range(first, last + 1)
    return tuple(found)


# --- carried out ------------------------------------------------------------------------------------------------------


def _refuse_shared(spec: ModelSpec) -> None:
    """Raise SwapRefused where layers read beside the stream what others made, or are scaled with all that enters them,
    or where values are no projections of their own, by the field that says so.
    """
    for name in ("layer_inputs", "streams"):
        if getattr(spec, name) is not None:
            raise SwapRefused(f"the model has {name}, which this swap does not support")
    for layer, block in enumerate(spec.blocks):
        for mixer in (each.mixer for each in block.sublayers):
            if mixer.lends:
                raise SwapRefused(f"layer {layer} has a {type(mixer).__name__}, which this swap does not support")
        if block.scale is not None:
            raise SwapRefused(f"layer {layer} scales its output, which this swap does not support")
        for name, plain in (("kv_from", "input"), ("v_norm", None)):
            if getattr(block.mixer("attention"), name, plain) != plain:
                raise SwapRefused(f"the attention of layer {layer} has {name}, which this swap does not support")


def _of_both(spec: ModelSpec, asked: Asked, swap: Swap) -> Swapped:
    """What a swap makes of a model of two stacks."""
    from .stacks import of_both

    if asked.layers is not None:
        raise SwapRefused(
            "--blocks is ambiguous: the encoder's and the decoder's layers have the same numbers", "Leave --blocks out."
        )
    return of_both(spec, asked.weights, lambda tree, weights: swap.reshape(tree, replace(asked, weights=weights)))


def apply(model: Model, step: Step, *, files: Path | None = None, **given: Any) -> Swapped:
    """The tree after one step; its tensors are not computed yet. See `reshape`."""
    from .base import Read, origin_of

    origin, own = origin_of(model)
    return reshape(model.spec, step, Read(model), origin=origin, files=files if own else None, **given)


def reshape(spec: ModelSpec, step: Step, weights: Weights, **given: Any) -> Swapped:
    """What one step makes of a tree, and how each new tensor is to be made; `given` are fields of `Asked`.

    Raises SwapRefused where a precondition does not hold, with the reason and what would be possible, and UsageError
    where there is no such swap, value or layer.
    """
    swap = swap_for(step.option, step.value)
    if step.blocks is not None and not swap.by_layer:
        raise UsageError(f"{step}: this swap changes the whole model", "Leave --blocks out.")
    argument = step.value.partition(":")[2] if ":" in step.value else None
    layers = None if step.blocks is None else layers_in(step.blocks, len(spec.blocks))
    try:
        if not swap.each_stack:
            spec.one_stack(f"--{step.option.replace('_', '-')}")
        if not swap.apart:
            _refuse_shared(spec)
        asked = Asked(step.value, argument, layers, step.approximate, step.settings, weights, **given)
        found = swap.reshape(spec, asked) if spec.encoder is None else _of_both(spec, asked, swap)
    except (ConfigError, MissingComponent) as error:  # there is no such tree, or the swap does not know this one
        raise SwapRefused(error.message, error.hint) from error
    assert step.option not in found.summary, f"{step.option}: what was asked for and what was done have one name"
    record = {"swap": step.option, **step.as_json(), "guarantee": found.guarantee, **found.summary}
    return replace(found, summary=record)
