"""The list of swaps: their options, preconditions, guarantees and sources.

A swap is requested as OPTION = VALUE: `--attention gqa:4` on the command line, `attention = "gqa:4"` in a recipe,
`attention="gqa:4"` in Python. Each file of swaps/ lists its swaps in `SWAPS`, and declares its options in `OPTIONS`;
one file declares an option that several have swaps for. Its `ORDER` says when its swaps run if several are requested at
once. `all_swaps` returns all swaps in that order.
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
from .facts import Assumed, WeightFacts
from .options import GROUPS, Option, declared, spelled, squashed

if TYPE_CHECKING:
    from ..architectures.obstacles import Obstacle
    from ..converter.tree import Origin
    from .base import Guarantee, Model, Swapped
    from .fits.calibration import Calibration

PLUGINS: list[str] = []  # the full names of modules with swaps that plugins registered
_LARGEST = 1_000_000  # the largest number in a value; the largest models have a fifth of that of anything


def register(module: str) -> None:
    """Register the swaps of a plugin's module by its full name. The module has the form of gptkit's own."""
    PLUGINS.append(module)
    for cached in (_modules, all_swaps, all_options):
        cached.cache_clear()


@dataclass(frozen=True)
class Step:
    """One requested swap."""

    option: str
    value: str
    """The value in gptkit's words; synonyms are replaced."""
    blocks: str | None = None
    """The layers to change ("0-5,8"); None for all."""
    approximate: bool = False
    """Whether to use the plain replacement, for comparison, instead of the best known form."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional settings of this swap."""
    tokens: int | None = None
    """The number of tokens of the text to fit on; None chooses it."""
    written: str = field(default="", compare=False)
    """The option as the user wrote it if it stands for several steps."""
    comment: str = field(default="", compare=False)
    """The comment of a recipe."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _understood(self.option, self.value))

    def __str__(self) -> str:
        words = [spelled(self.option), *([self.value] if self.value else [])]
        words += [f"--blocks {self.blocks}"] if self.blocks is not None else []
        return " ".join([*words, *(["--approximate"] if self.approximate else [])])

    def as_json(self) -> dict[str, Any]:
        """Return the step as a history stores it."""
        blocks = {} if self.blocks is None else {"blocks": self.blocks}
        approximate = {"approximate": True} if self.approximate else {}
        return {self.option: self.value, **self.settings, **blocks, **approximate}


@dataclass(frozen=True)
class Asked:
    """A step as its swap sees it."""

    value: str
    argument: str | None = None  # the part of the value after the colon
    layers: tuple[int, ...] | None = None  # the layers to change; None for all
    approximate: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightFacts = field(default_factory=Assumed)
    calibration: Callable[[], Calibration] | None = None  # returns the text; raises UsageError without one
    has_text: Callable[[], bool] = lambda: False  # whether there is a text, for swaps that can do without
    origin: Origin | None = None
    files: Path | None = None  # the folder with the model's own tokenizer
    texts: Mapping[str, bytes] = field(default_factory=dict)  # tokenizer files that are not in the folder
    offline: bool = False  # whether adapters may not be fetched
    allow_pickle: bool = False  # whether adapters in pickles are read

    def number(self, quantity: str, least: int = 1, most: int = _LARGEST) -> int:
        """Return the argument (or the value, without a colon) as a whole number.

        Raises UsageError for other text, and for more than any model has, since such a model would fill the memory.
        """
        text = self.value if self.argument is None else self.argument
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise UsageError(f"{self.value!r}: {quantity} must be a whole number of at least {least}")
        if int(text) > most:
            raise UsageError(f"{self.value!r}: {quantity} must be at most {most:,}")
        return int(text)

    def before_colon(self) -> Asked:
        """Return the step with only the part of its value before the colon."""
        return replace(self, value=self.value.partition(":")[0], argument=None)

    def text(self, purpose: str) -> Calibration:
        """Return the text to fit on. Raises UsageError without one; `purpose` is the start of the message."""
        if self.calibration is None:
            raise UsageError(f"{purpose} needs a text", "Give one with --calibrate FILE.")
        return self.calibration()

    def chosen(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the layers to change."""
        return tuple(range(len(spec.blocks))) if self.layers is None else self.layers

    def those(
        self, spec: ModelSpec, wanted: Callable[[Block], bool], none: str = "", hint: str | None = None
    ) -> list[int]:
        """Return the layers to change whose blocks satisfy `wanted`, in order; raise SwapRefused(`none`) if none do."""
        layers = [layer for layer in sorted(set(self.chosen(spec))) if wanted(spec.blocks[layer])]
        if none and not layers:
            raise SwapRefused(none, hint)
        return layers


_ANY = object()


class Clears:
    """A difference between a model and a family that a swap may clear; see `architectures.obstacles`.

    `path` is the field, in which `*` stands for anything. `ours` and `theirs` are the component class or value of the
    model and of the family. `steps` are the requests that clear it together, each "option=value" with `{theirs}` for
    the family's value. By default it is the swap with its form as the value.
    """

    def __init__(self, path: str, *steps: str, ours: Any = _ANY, theirs: Any = _ANY) -> None:
        self.path, self.steps, self.ours, self.theirs = path, steps, ours, theirs

    def remedy(self, swap: Swap, obstacle: Obstacle) -> tuple[Step, ...]:
        """Return the steps that may clear an obstacle, or none if the obstacle is another one."""

        def alike(value: Any, wanted: Any) -> bool:
            return wanted is _ANY or (isinstance(value, wanted) if isinstance(wanted, type) else bool(value == wanted))

        same_field = fnmatchcase(obstacle.path, self.path) and alike(obstacle.ours, self.ours)
        if not same_field or not alike(obstacle.theirs, self.theirs):
            return ()
        steps = self.steps or (f"{swap.option}={swap.form}",)
        pairs = [step.format(theirs=obstacle.theirs).partition("=") for step in steps]
        return tuple(Step(option, value) for option, _, value in pairs)


@dataclass(frozen=True)
class Swap:
    """A registered swap."""

    option: str
    form: str
    """The form of VALUE ("rmsnorm", "gqa:N", "+N"); an upper-case word stands for anything."""
    takes: str
    """The old component in words."""
    gives: str
    """The new component in words."""
    needs: str
    """The preconditions, and when the result is exact: sentences without the last full stop."""
    source: str
    """The paper or code."""
    reshape: Callable[[ModelSpec, Asked], Swapped]
    """Returns the new model and the recipes of its tensors, without weights except for questions to `Asked.weights`."""
    guarantee: Guarantee = "exact"
    """The best guarantee if the preconditions hold."""
    examples: Callable[[ModelSpec], Iterable[str]] = lambda spec: ()
    """Returns values to try on a model."""
    by_layer: bool = False
    """Whether it can change some of the layers only."""
    calibrated: bool = False
    """Whether it uses a text."""
    exact_where: str = ""
    """The end of a sentence "exact only where …" if it is exact on some weights only."""
    apart: bool = False
    """Whether it changes only feed-forwards, the head or the storage, so that layers may share keys or inputs."""
    each_stack: bool = False
    """Whether it can run on the encoder and the decoder of a model separately."""
    clears: tuple[Clears, ...] = ()
    """The differences from families that it can clear."""
    cheaper: Callable[[Step], Iterable[Step]] | None = None
    """Returns forms to use instead if they are better on a text; by default the plain one if it uses a text."""
    chooses: bool = False
    """Whether it measures its own choice, so that several numbers of tokens need not be tried."""

    def gives_for(self, value: str) -> str:
        """Return the result in words, with the numbers of a value in place of the words for them."""
        match, words = self.matches(value), re.findall("[A-Z]+", self.form)
        if match is None or not words:
            return self.gives
        known = dict(zip(words, (group.rpartition(":")[2] for group in match.groups()), strict=True))
        return re.sub(r"\b[A-Z]+\b", lambda word: known.get(word[0], word[0]), self.gives)

    def matches(self, value: str) -> re.Match[str] | None:
        """Match a value with this form. The match has a group for each upper-case word."""
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
    """Return cheaper forms of a step: the plain replacement, and the most active parts unchanged."""
    return [*plainly(step), replace(step, value=f"{step.value}:active")]


# --- the list ---------------------------------------------------------------------------------------------------------


@cache
def _modules() -> list[ModuleType]:
    """Import the files of swaps, gptkit's own and those of plugins, in the order of execution."""
    names = [f"{swaps.__name__}.{module.name}" for module in iter_modules(swaps.__path__)]
    modules = [module for module in map(import_module, [*names, *PLUGINS]) if hasattr(module, "SWAPS")]
    return sorted(modules, key=lambda module: module.ORDER)


@cache
def all_swaps() -> tuple[Swap, ...]:
    """Return every swap in the order of execution. A later swap gets the result of the earlier ones."""
    return tuple(swap for module in _modules() for swap in module.SWAPS)


@cache
def all_options() -> tuple[Option, ...]:
    """Return every option that asks for swaps, in the order of the help. gptkit's own are read without an import."""
    files = (file for folder in swaps.__path__ for file in sorted(Path(folder).glob("*.py")))
    known = [option for file in files for option in declared(file)]
    for module in map(import_module, PLUGINS):
        known += getattr(module, "OPTIONS", ())
        names = {option.name for option in known}
        bare = (swap for swap in module.SWAPS if swap.option not in names)
        known += [Option(s.option, "Other swaps", 0, f"{s.takes} -> {s.gives}.", s.form) for s in bare]
    groups = list(dict.fromkeys((*GROUPS, *(option.group for option in known))))
    return tuple(sorted(known, key=lambda option: (groups.index(option.group), option.place)))


def parts() -> dict[tuple[str, str], tuple[str, Callable[[ModelSpec], set[int | None]]]]:
    """Return the quantities of which a part may be requested ("auto:75%"), by option and text before the number."""
    declared_options = (option for module in _modules() for option in getattr(module, "OPTIONS", ()))
    return {(option.name, before): part for option in declared_options for before, part in option.parts.items()}


def options() -> dict[str, tuple[Swap, ...]]:
    """Return the swaps by option, in the order of execution."""
    names = dict.fromkeys(swap.option for swap in all_swaps())
    return {option: tuple(swap for swap in all_swaps() if swap.option == option) for option in names}


def option_of(name: str) -> Option | None:
    """Return the option with this name, if there is one."""
    return next((option for option in all_options() if option.name == name), None)


def _understood(option: str, value: str) -> str:
    """Return the value with gptkit's word for a synonym, and small letters after the colon, except in a file name."""
    declaration = option_of(option)
    word, colon, rest = value.partition(":")
    replacement = None if declaration is None else declaration.known().get(squashed(word))
    return (
        value
        if replacement is None
        else f"{replacement}{colon}{rest if replacement.startswith('prune') else rest.strip().lower()}"
    )


def nearest(option: str, value: str, forms: Iterable[str] = ()) -> str | None:
    """Return a suggestion for an unknown value: one of these forms, or an understood word."""
    declaration = option_of(option)
    known = {form.partition(":")[0]: form for form in forms if not form.isupper()}
    words = (
        {}
        if declaration is None
        else {word: known.get(replacement, replacement) for word, replacement in declaration.known().items()}
    )
    near = meant(squashed(value.partition(":")[0]), words)
    return None if near is None else words[near]


def swap_for(option: str, value: str) -> Swap:
    """Return the swap for OPTION = VALUE: an exact form, or the first that matches. Raises UsageError without one."""
    known, declaration = options(), option_of(option)
    if declaration is None:
        raise UsageError(f"unknown swap {option!r}", f"known: {', '.join(known)}")
    for swap in (*(exact for exact in known[option] if exact.form == value), *known[option]):
        if swap.matches(value):
            return swap
    hint, forms = None, list(dict.fromkeys(swap.form for swap in known[option] if swap.form))
    if value in declaration.two:
        hint = "Request it as two steps: " + ", then ".join(f"{name} = {to}" for name, to in declaration.two[value])
    elif forms:
        near = nearest(option, value, forms)
        hint = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(forms)}"
    raise UsageError(f"{spelled(option)} {value!r} is unknown", hint)


# --- requests ---------------------------------------------------------------------------------------------------------


def steps_named(option: str, value: str, blocks: str | None = None, approximate: bool = False) -> list[Step]:
    """Return the step for OPTION = VALUE, or two steps (SwiGLU). Raises UsageError if one is unknown."""
    declaration = option_of(option)
    several = declaration and declaration.two.get(_understood(option, value))
    written = f"{spelled(option)} {value}" if several else ""
    steps = [Step(name, to, blocks, approximate, written=written) for name, to in several or ((option, value),)]
    for step in steps:
        swap_for(step.option, step.value)
    return steps


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Return the steps in the order of execution."""
    return sorted(steps, key=lambda step: list(options()).index(step.option))


def steps_of(
    asked: Mapping[str, str | Sequence[str] | None], blocks: str | None = None, approximate: bool = False
) -> list[Step]:
    """Return the steps for several options, in the order of execution.

    An option with several values gives a step for each, in the order of the values. Raises UsageError for an unknown
    option, and for two options that change the same thing.
    """
    steps: list[Step] = []
    asks: dict[str, tuple[str, Step]] = {}  # by the changed option: the requested option, and its first step
    for option, values in asked.items():
        for value in [values] if isinstance(values, str) else values or ():
            for step in steps_named(option, value, blocks, approximate):
                by, first = asks.setdefault(step.option, (option, step))
                if by != option:
                    raise UsageError(f"{first} and {step} cannot be combined", "Leave one of them out.")
                steps.append(step)
    return in_order(steps)


def layers_in(text: str, layers: int) -> tuple[int, ...]:
    """Return the layers of a list such as "0-11,14,20-", in its order.

    Raises UsageError for other text, and SwapRefused for a layer that the model does not have.
    """
    named: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(-\s*(\d{1,9})?)?\s*", part)
        if match is None:
            raise UsageError(f"{text!r} is not a list of layers", "Write it like 0-11,14-29.")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else layers - 1
        for layer in (first, last):
            if layer >= layers:
                hint = f"Possible here: 0-{layers - 1}, or a part of it."
                raise SwapRefused(
                    f"{text!r} names layer {layer}, but the model has only layers 0 to {layers - 1}", hint
                )
        if last < first:
            raise UsageError(f"{text!r}: the range {first}-{last} ends before it begins", f"Write {last}-{first}.")
        named += range(first, last + 1)
    return tuple(named)


# --- execution --------------------------------------------------------------------------------------------------------


def _refuse_shared(spec: ModelSpec) -> None:
    """Raise SwapRefused for layers that read other layers' inputs or values, or that scale their output."""
    for name, words in (("layer_inputs", "an embedding per layer"), ("streams", "several residual streams")):
        if getattr(spec, name) is not None:
            raise SwapRefused(f"the model has {words} ({name}), which this swap does not support")
    for layer, block in enumerate(spec.blocks):
        for mixer in (sublayer.mixer for sublayer in block.sublayers):
            if mixer.borrows_weights:
                raise SwapRefused(f"layer {layer} has a {type(mixer).__name__}, which this swap does not support")
        if block.scale is not None:
            raise SwapRefused(
                f"layer {layer} multiplies its output by a factor (scale), which this swap does not support"
            )
        attention: Any = block.mixer("attention")
        if getattr(attention, "kv_from", "input") != "input":
            raise SwapRefused(
                f"layer {layer} does not compute its values from its input (kv_from), which this swap does not support"
            )
        if getattr(attention, "v_norm", None) is not None:
            raise SwapRefused(f"layer {layer} normalises its values (v_norm), which this swap does not support")


def _of_both(spec: ModelSpec, asked: Asked, swap: Swap) -> Swapped:
    """Run a swap on both stacks of a model with an encoder and a decoder."""
    from .stacks import of_both

    if asked.layers is not None:
        raise SwapRefused(
            "--blocks is ambiguous: the encoder's and the decoder's layers have the same numbers", "Leave --blocks out."
        )
    return of_both(spec, asked.weights, lambda tree, weights: swap.reshape(tree, replace(asked, weights=weights)))


def apply(model: Model, step: Step, *, files: Path | None = None, **given: Any) -> Swapped:
    """Return the model after one step; its tensors are not computed yet. See `reshape`."""
    from .base import Read, origin_of

    origin, belongs = origin_of(model)
    return reshape(model.spec, step, Read(model), origin=origin, files=files if belongs else None, **given)


def reshape(spec: ModelSpec, step: Step, weights: WeightFacts, **given: Any) -> Swapped:
    """Return the result of one step, with recipes for the new tensors. `given` are fields of `Asked`.

    Raises SwapRefused if a precondition does not hold, with the reason and an alternative. Raises UsageError for an
    unknown swap, value or layer.
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
        swapped = swap.reshape(spec, asked) if spec.encoder is None else _of_both(spec, asked, swap)
    except (ConfigError, MissingComponent) as error:  # an impossible model, or one that the swap does not support
        raise SwapRefused(error.message, error.hint) from error
    assert step.option not in swapped.summary, f"{step.option}: what was asked for and what was done have one name"
    record = {"swap": step.option, **step.as_json(), "guarantee": swapped.guarantee, **swapped.summary}
    return replace(swapped, summary=record)
