"""The list of swaps: their options, preconditions, guarantees and sources.

A swap is requested as OPTION = VALUE: `--attention gqa:4` on the command line, `attention = "gqa:4"` in a recipe,
`attention="gqa:4"` in Python. Each file of swaps/ lists its swaps in `SWAPS`, and declares its options in `OPTIONS`. If
several files have swaps for an option, only one of them declares it. If several swaps are requested at once, they run
in the order of the number `ORDER` of their files. `all_swaps` returns all swaps in that order.
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
from ..converter.opening import Opening
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
_LARGEST = 1_000_000  # the largest number in a value, five times as large as any size in the largest models


def register(module: str) -> None:
    """Register the swaps of a plugin. `module` is the full name of the module that defines SWAPS and OPTIONS."""
    PLUGINS.append(module)
    for cached in (_modules, all_swaps, all_options):
        cached.cache_clear()


@dataclass(frozen=True)
class Step:
    """One requested swap."""

    option: str
    value: str
    """The value of the option, in which gptkit's word replaces a synonym."""
    blocks: str | None = None
    """The layers to change ("0-5,8"); None for all."""
    approximate: bool = False
    """Whether to use the simplest variant of the swap instead of the best known one (--approximate)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional settings of the swap, by name; see `Option.settings`."""
    tokens: int | None = None
    """The number of tokens of the text to fit on. With None, gptkit chooses the number."""
    written: str = field(default="", compare=False)
    """What the user wrote, such as "--mlp swiglu", if it stands for several steps. Otherwise empty."""
    comment: str = field(default="", compare=False)
    """The comment on the step in a recipe."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _understood(self.option, self.value))

    def __str__(self) -> str:
        words = [spelled(self.option), *([self.value] if self.value else [])]
        words += [f"--blocks {self.blocks}"] if self.blocks is not None else []
        return " ".join([*words, *(["--approximate"] if self.approximate else [])])

    def as_json(self) -> dict[str, Any]:
        """Return the step as JSON values, as the history of an output stores it."""
        blocks = {} if self.blocks is None else {"blocks": self.blocks}
        approximate = {"approximate": True} if self.approximate else {}
        return {self.option: self.value, **self.settings, **blocks, **approximate}


@dataclass(frozen=True)
class Asked:
    """A requested step, with everything that the swap may need besides the model's components."""

    value: str
    argument: str | None = None  # the part of the value after the colon
    layers: tuple[int, ...] | None = None  # the layers to change; None for all
    approximate: bool = False  # whether to use the simplest variant of the swap instead of the best known one
    settings: Mapping[str, Any] = field(default_factory=dict)  # additional settings from a recipe
    weights: WeightFacts = field(default_factory=Assumed)  # answers questions about the weights
    calibration: Callable[[], Calibration] | None = None  # returns the text to fit on; raises UsageError without one
    has_text: Callable[[], bool] = lambda: False  # whether there is a text to fit on
    origin: Origin | None = None  # the checkpoint and family that the model comes from
    files: Path | None = None  # the folder with the model's own tokenizer
    texts: Mapping[str, bytes] = field(default_factory=dict)  # tokenizer files that are not in the folder, by file name
    opening: Opening = field(default_factory=Opening)  # how adapters are opened

    def number(self, quantity: str, least: int = 1, most: int = _LARGEST) -> int:
        """Return the number in the value: the part after the colon, or the whole value if it has no colon.

        Raises UsageError if this is no whole number from `least` to `most`. `quantity` names the number in the message.
        The default of `most` is more than any model has, because such a model would fill the memory.
        """
        text = self.value if self.argument is None else self.argument
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise UsageError(f"{self.value!r}: {quantity} must be a whole number of at least {least}")
        if int(text) > most:
            raise UsageError(f"{self.value!r}: {quantity} must be at most {most:,}")
        return int(text)

    def before_colon(self) -> Asked:
        """Return the request with only the part of the value before the colon."""
        return replace(self, value=self.value.partition(":")[0], argument=None)

    def text(self, purpose: str) -> Calibration:
        """Return the text to fit on. Raises UsageError if there is none; `purpose` is the start of the message."""
        if self.calibration is None:
            raise UsageError(f"{purpose} needs a text", "Give one with --calibrate FILE.")
        return self.calibration()

    def chosen(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the numbers of the layers to change. Without --blocks, these are all layers."""
        return tuple(range(len(spec.blocks))) if self.layers is None else self.layers

    def those(
        self, spec: ModelSpec, wanted: Callable[[Block], bool], none: str = "", hint: str | None = None
    ) -> list[int]:
        """Return those of the layers to change whose block satisfies `wanted`, in ascending order.

        If there are none, raise SwapRefused with the message `none`. With the default message "", return an empty list.
        """
        layers = [layer for layer in sorted(set(self.chosen(spec))) if wanted(spec.blocks[layer])]
        if none and not layers:
            raise SwapRefused(none, hint)
        return layers


_ANY = object()


class Clears:
    """A kind of difference between a model and a Hugging Face family that a swap removes.

    See `architectures.obstacles`.

    Args:
        path: The path of the component field that differs, in which `*` stands for any text.
        steps: The swaps that together remove the difference, each as "option=value". `{theirs}` stands for the family's
            value of the field. The default is the swap that declares this difference.
        ours: The field's value in the model, or its class. By default, any value matches.
        theirs: The field's value in the family, or its class. By default, any value matches.
    """

    def __init__(self, path: str, *steps: str, ours: Any = _ANY, theirs: Any = _ANY) -> None:
        self.path, self.steps, self.ours, self.theirs = path, steps, ours, theirs

    def remedy(self, swap: Swap, obstacle: Obstacle) -> tuple[Step, ...]:
        """Return the steps that remove a difference `obstacle` between a model and a family.

        Return () if the difference is not of this kind. `swap` is the swap that declares this kind.
        """

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
    """A swap that users can request: one value, or one pattern of values, of an option."""

    option: str
    form: str
    """The values of the option that request this swap ("rmsnorm", "gqa:N", "+N"). An upper-case word stands for any
    text."""
    takes: str
    """A description of the component that the swap replaces, for tables."""
    gives: str
    """A description of the new component, for tables."""
    needs: str
    """The preconditions, and when the result is exact. These are sentences; the last one has no full stop."""
    source: str
    """The paper or code."""
    reshape: Callable[[ModelSpec, Asked], Swapped]
    """A function that returns the new model's components, and instructions for computing its tensors.

    It reads no weights. It learns about them only by questions to `Asked.weights`."""
    guarantee: Guarantee = "exact"
    """The strongest guarantee that the swap can give."""
    examples: Callable[[ModelSpec], Iterable[str]] = lambda spec: ()
    """A function that returns values of the option that are worth trying on a model, for `gptkit swaps MODEL`."""
    by_layer: bool = False
    """Whether the user can choose the layers that the swap changes (--blocks)."""
    calibrated: bool = False
    """Whether the swap is fitted on a text."""
    exact_where: str = ""
    """If the swap is exact only on some weights, the end of the sentence "exact only where …" for users."""
    apart: bool = False
    """Whether the swap also supports models whose layers share keys and values or have additional inputs.

    Such swaps change only feed-forwards, the head or the dtype of weights."""
    each_stack: bool = False
    """Whether the swap supports models with an encoder and a decoder. It then runs on each of them separately."""
    clears: tuple[Clears, ...] = ()
    """The differences between a model and a Hugging Face family that the swap can clear."""
    cheaper: Callable[[Step], Iterable[Step]] | None = None
    """A function that returns simpler variants of a step. gptkit uses the variant that is best on a text.

    By default, a swap that is fitted on a text has one simpler variant, without a fit."""
    chooses: bool = False
    """Whether the swap itself tries several results on the text. gptkit then does not try several numbers of tokens."""

    def gives_for(self, value: str) -> str:
        """Return the description of the new component, with numbers from `value` in place of placeholders like N."""
        match, words = self.matches(value), re.findall("[A-Z]+", self.form)
        if match is None or not words:
            return self.gives
        known = dict(zip(words, (group.rpartition(":")[2] for group in match.groups()), strict=True))
        return re.sub(r"\b[A-Z]+\b", lambda word: known.get(word[0], word[0]), self.gives)

    def matches(self, value: str) -> re.Match[str] | None:
        """Return a match if `value` requests this swap, or None.

        The match has a group for every placeholder of the swap's value, such as N in "gqa:N".
        """
        parts = re.split(r"([A-Z]+)", self.form)
        pattern = "".join("(.+)" if part.isupper() else re.escape(part) for part in parts)
        return re.fullmatch(pattern, value, re.DOTALL)

    def others(self, step: Step) -> list[Step]:
        """Return simpler ways to do the swap, as `cheaper` lists them. One may give a lower loss than the fit."""
        if step.approximate or (self.cheaper is None and not self.calibrated):
            return []
        return list((self.cheaper or plainly)(step))


def plainly(step: Step) -> list[Step]:
    """Return the simpler variant of a step: the same swap without a fit, as with --approximate."""
    return [replace(step, approximate=True)]


def active(step: Step) -> list[Step]:
    """Return two simpler variants of a step that removes heads or feed-forward units.

    One fits nothing. The other keeps the heads or units that are most active on the text, with unchanged weights.
    """
    return [*plainly(step), replace(step, value=f"{step.value}:active")]


# --- the list of swaps ------------------------------------------------------------------------------------------------


@cache
def _modules() -> list[ModuleType]:
    """Import the files of swaps, those of gptkit and of plugins. Return them in the order in which their swaps run."""
    names = [f"{swaps.__name__}.{module.name}" for module in iter_modules(swaps.__path__)]
    modules = [module for module in map(import_module, [*names, *PLUGINS]) if hasattr(module, "SWAPS")]
    return sorted(modules, key=lambda module: module.ORDER)


@cache
def all_swaps() -> tuple[Swap, ...]:
    """Return every swap, in the order in which swaps run if several are requested."""
    return tuple(swap for module in _modules() for swap in module.SWAPS)


@cache
def all_options() -> tuple[Option, ...]:
    """Return every option that requests swaps, in the order of the help.

    gptkit's own options are read without importing the files of swaps. Plugins are imported.
    """
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
    """Return the quantities of which an option's value may be a share, as in "layers = auto:75%".

    The keys are pairs of an option and the text before the number, such as ("layers", "auto:"). A value has the name of
    the quantity, and a function that returns the numbers of it that occur in a model (see `Option.parts`).
    """
    declared_options = (option for module in _modules() for option in getattr(module, "OPTIONS", ()))
    return {(option.name, before): part for option in declared_options for before, part in option.parts.items()}


def options() -> dict[str, tuple[Swap, ...]]:
    """Return the swaps of each option, by its name, in the order in which swaps run."""
    names = dict.fromkeys(swap.option for swap in all_swaps())
    return {option: tuple(swap for swap in all_swaps() if swap.option == option) for option in names}


def option_of(name: str) -> Option | None:
    """Return the option with this name, or None."""
    return next((option for option in all_options() if option.name == name), None)


def _understood(option: str, value: str) -> str:
    """Return an option's value in gptkit's spelling: no synonyms, and lower case after a colon.

    A file name after the colon is unchanged.
    """
    declaration = option_of(option)
    word, colon, rest = value.partition(":")
    replacement = None if declaration is None else declaration.known().get(squashed(word))
    return (
        value
        if replacement is None
        else f"{replacement}{colon}{rest if replacement.startswith('prune') else rest.strip().lower()}"
    )


def nearest(option: str, value: str, forms: Iterable[str] = ()) -> str | None:
    """Return the value that the user probably meant by a mistyped value of an option, or None if none is similar.

    This is a word with which the option's values may begin. If one of `forms`, such as "gqa:N", begins with that word,
    the form is returned instead.
    """
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
    """Return the swap that OPTION = VALUE requests. Raises UsageError if there is none.

    If the patterns of several swaps match the value, a swap whose pattern equals the value wins, else the first one.
    """
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
    """Return the steps that OPTION = VALUE requests. These are several steps for a name from a paper, such as SwiGLU.

    Raises UsageError if the option or value is unknown.
    """
    declaration = option_of(option)
    several = declaration and declaration.two.get(_understood(option, value))
    written = f"{spelled(option)} {value}" if several else ""
    steps = [Step(name, to, blocks, approximate, written=written) for name, to in several or ((option, value),)]
    for step in steps:
        swap_for(step.option, step.value)
    return steps


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Sort steps into the order in which swaps run."""
    return sorted(steps, key=lambda step: list(options()).index(step.option))


def steps_of(
    asked: Mapping[str, str | Sequence[str] | None], blocks: str | None = None, approximate: bool = False
) -> list[Step]:
    """Return the steps that several options request, in the order in which swaps run.

    `asked` has the options with one value, or a list of values; each value of a list gives a step. Raises UsageError
    for an unknown option, and for two options that change the same thing.
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
    """Return the layer numbers in a list such as "0-11,14,20-", in the order of the list.

    `layers` is the model's number of layers. Raises UsageError for text that is no such list, and SwapRefused for a
    layer that the model does not have.
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
    """Raise SwapRefused if the model has features that most swaps do not support.

    These are layers that share weights, compute values in another way than from their input, have additional inputs or
    several residual streams, normalise values, or scale their output.
    """
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
    """Run a swap on the encoder and on the decoder of a model that has both."""
    from .stacks import of_both

    if asked.layers is not None:
        raise SwapRefused(
            "--blocks is ambiguous: the encoder's and the decoder's layers have the same numbers", "Leave --blocks out."
        )
    return of_both(spec, asked.weights, lambda tree, weights: swap.reshape(tree, replace(asked, weights=weights)))


def apply(model: Model, step: Step, *, files: Path | None = None, **given: Any) -> Swapped:
    """Run one step on a model with weights. Return its result, in which no tensor is computed yet.

    The swap's questions about weights are answered from the model. Errors are those of `reshape`.

    Args:
        model: The model before the step.
        step: The requested step.
        files: The folder with the tokenizer. It is not used if its files may belong to another model (see `origin_of`).
        given: Further fields of `Asked`, such as `calibration`.
    """
    from .base import Read, origin_of

    origin, belongs = origin_of(model)
    return reshape(model.spec, step, Read(model), origin=origin, files=files if belongs else None, **given)


def reshape(spec: ModelSpec, step: Step, weights: WeightFacts, **given: Any) -> Swapped:
    """Run one step on a model's components. Return the new components, and instructions for computing the new tensors.

    Args:
        spec: The model before the step.
        step: The requested step.
        weights: The answers to the swap's questions about the model's weights.
        given: Further fields of `Asked`, such as `calibration`.

    Raises:
        SwapRefused: A precondition does not hold. The error has the reason and an alternative.
        UsageError: The swap, the value or a layer is unknown.
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
