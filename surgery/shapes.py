"""Swaps on shapes alone: what a tree would become, for a model of any size, without its weights.

`params --swap attention=gqa:4` asks this. The swaps are those of the registry, as they are. Where a swap asks what the
weights are it is answered as trained weights would, and once more as zeros would, which is what allows most (`facts`).
Where both lead to the same tree and guarantee that is what the weights will give too; otherwise it is told that it
depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..analysis.costs import Costs, costs
from ..components import ModelSpec
from ..converter.resolve import read_spec
from ..converter.tree import Origin
from ..errors import InvalidInput, SwapRefused, UsageError
from .base import Filled, Guarantee, Moved, Swapped, weakest
from .facts import Assumed, TextWanted, Value
from .options import guarantee_in_words, spelled
from .recipe import called, plain, read_recipe, told_as
from .registry import Step, in_order, options, reshape, steps_named, swap_for

if TYPE_CHECKING:
    from .fits.calibration import Calibration

DEPENDS: Literal["depends on the weights"] = "depends on the weights"


# --- what is asked ----------------------------------------------------------------------------------------------------


def steps_from(swaps: Sequence[str] = (), recipe: str | Path | None = None) -> list[Step]:
    """The steps of a recipe, and after them those asked for as OPTION=VALUE ("attention=gqa:4", "tie"), in the order in
    which `gptkit swap` carries them out. Raises UsageError where an option or a value is unknown, or there
    is no such recipe, and InvalidInput where it is none.
    """
    known, found = options(), list[Step]()
    for text in swaps:
        name, equals, value = text.strip().removeprefix("--").partition("=")
        option = name.strip().replace("-", "_").lower()
        forms = [swap.form for swap in known.get(option, ()) if swap.form]
        if forms and not value:
            raise UsageError(f"{text!r} needs a value", f"known: {', '.join(f'{name}={form}' for form in forms)}")
        if option in known and equals and not forms:
            raise UsageError(f"{text!r}: this swap takes no value", f"Write it as {name}.")
        found += steps_named(option, value.strip())
    return [*(read_recipe(recipe).steps if recipe is not None else ()), *in_order(found)]


# --- without weights --------------------------------------------------------------------------------------------------


class _NoText:
    """In place of a text, and of what it gives: nothing is asked of it before it is needed."""

    wanted = False

    def __call__(self) -> Calibration:
        self.wanted = True
        return cast("Calibration", self)

    def __getattr__(self, name: str) -> Any:
        raise TextWanted(name)


def without_text(work: Callable[..., Swapped], step: Step) -> tuple[Swapped, bool, bool]:
    """What a swap says where no text is given: it, whether it is fitted on a text, and whether it asked the text before
    it said what comes out. Then its plain form, which needs none, tells the tree. `work` gives what a step makes of a
    tree, of the step and a keyword argument `calibration`.
    """
    text = _NoText()
    try:
        found = work(step, calibration=text)
    except TextWanted:
        return work(replace(step, approximate=True)), True, True
    return found, text.wanted, False


@dataclass(frozen=True)
class Reshaped:
    """What a tree becomes.

    spec: the new tree. guarantee: what the chain of swaps promises, or that the weights decide it. notes: for a person.
    usual: what it promises with weights such as training leaves. settled: whether the tree is this one whatever the
    weights are. before, steps: what it was made of, and how; numbers that depended on the model are filled in.
    """

    spec: ModelSpec
    guarantee: Guarantee | Literal["depends on the weights"]
    notes: tuple[str, ...]
    usual: Guarantee
    settled: bool
    before: ModelSpec
    steps: tuple[Step, ...]

    def costs(self, context: int | None = None) -> tuple[Costs, Costs]:
        """What the trees before and after cost, both at one context: by default that of the tree before."""
        first = costs(self.before, context)
        return first, costs(self.spec, first.context)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, without the trees."""
        own = {name: getattr(self, name) for name in ("guarantee", "usual", "settled")}
        return {"steps": [step.as_json() for step in self.steps], **own, "notes": list(self.notes)}


def _values_after(swapped: Swapped, known: Mapping[str, Value]) -> dict[str, Value]:
    """What is known after a swap: what was copied or filled is known as far as it was, what was computed is not."""
    found: dict[str, Value] = {}
    for parameter in swapped.spec.parameters():
        how = swapped.tensors.get(parameter.name, Moved(parameter.name))
        value: Value = object()
        if isinstance(how, Filled) and not callable(how.value):
            value = float(how.value)
        elif isinstance(how, Moved):
            sources = [known[name] for name in how.names]
            # Zeros that are moved are zeros, padded with zeros too.
            value = sources[0] if how.move is None else 0.0 if all(each == 0.0 for each in sources) else value
        found[parameter.name] = value
    return found


@dataclass
class _Chain:
    """A chain as far as it has come. known: what is known of the tensors; given: what `reshape` takes beside; promised:
    what each step guarantees on trained weights, and whether on all.
    """

    spec: ModelSpec
    known: Mapping[str, Value]
    given: dict[str, Any]
    done: list[Step] = field(default_factory=list)
    promised: list[tuple[Guarantee, bool]] = field(default_factory=list)
    settled: bool = True
    notes: list[str] = field(default_factory=list)

    def carry_out(self, asked: Step) -> None:
        """Ask as trained weights would answer, and where that hangs on them once more as zeros would."""
        step, trained = plain(asked, self.spec), Assumed(self.known)
        try:
            usual, fitted, chosen = without_text(partial(reshape, self.spec, weights=trained, **self.given), step)
        except SwapRefused as error:
            if trained.made:
                raise SwapRefused(f"{error.message}{_AS_FAR}", error.hint or _HINT) from error
            if not self.settled:  # of the tree that the weights give it may be possible
                raise SwapRefused(f"{error.message}{_AS_FAR}", error.hint) from error
            raise
        zeros: Swapped | SwapRefused = usual
        if trained.made:
            of_zeros = partial(reshape, self.spec, weights=Assumed(self.known, zeros=True), **self.given)
            try:
                zeros = without_text(of_zeros, step)[0]
            except SwapRefused as error:
                zeros = error
        # A text would decide which of several kinds of layers stay.
        chosen = chosen and len(set(self.spec.blocks)) > 1
        best = zeros.guarantee if isinstance(zeros, Swapped) else usual.guarantee
        other = isinstance(zeros, Swapped) and zeros.spec != usual.spec
        swap, name = swap_for(step.option, step.value), spelled(step.option).removeprefix("--")
        name += f"={step.value}" if step.value else ""
        words, text = [], "fitted on a text (--calibrate)" if fitted else ""
        if best != usual.guarantee:
            where = f"only where {swap.exact_where}" if swap.exact_where else f"on some (needs {swap.needs})"
            trained_on = f"on trained weights {guarantee_in_words(usual.guarantee)}{': ' if fitted else ''}{text}"
            words.append(f"{trained_on}; {best} {where}")
        elif fitted:
            words.append(text)
        if chosen:
            words.append("the layers differ, and a text decides which of them stay")
        if isinstance(zeros, SwapRefused):
            words.append(f"impossible for some weights ({zeros.message})")
        if other:
            words.append(f"the model depends on the weights; this is the one for trained weights (needs {swap.needs})")
        self.notes += [note for note in usual.notes if note in getattr(zeros, "notes", ())]
        self.notes += [f"{name}: {each}" for each in words]
        self.settled = self.settled and not chosen and not other
        self.done.append(step)
        self.promised.append((usual.guarantee, best == usual.guarantee))
        changed = {name: text for name, text in usual.texts.items() if text is not None}
        self.given = {**self.given, "texts": {**self.given["texts"], **changed}}
        self.spec, self.known = usual.spec, _values_after(usual, self.known)


def swapped(
    spec: ModelSpec,
    steps: Sequence[Step],
    family: str | None = None,
    reference: str | None = None,
    *,
    files: Path | None = None,
    texts: Mapping[str, bytes] | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
) -> Reshaped:
    """The tree after some swaps, one after the other, from its shapes.

    `family` is the one that it came from, which an adapter's names go by, and `reference` what messages call it.
    `files` is the folder of its tokenizer, without which tokens cannot be told apart, and `texts` are those files that
    do not lie there; `offline`: no adapter may be fetched from the hub; `allow_pickle`: one in a pickle is read.
    Raises SwapRefused where a precondition does
    not hold, whatever the weights or with weights such as training leaves, and UsageError where there is no such step.
    """
    if not steps:
        raise UsageError("nothing to swap", "Name a swap, such as attention=gqa:4 or norm=rmsnorm.")
    origin = Origin()
    if files is not None:  # a config.json names tokens that cannot go
        with suppress(InvalidInput):  # a folder that says nothing by itself: the tree is known all the same
            origin = read_spec(files)[1]
    origin = replace(origin, family=family, reference=reference)
    given = {"origin": origin, "files": files, "texts": dict(texts or {}), "offline": offline}
    given["allow_pickle"] = allow_pickle
    # Of weights that nobody has looked at each tensor is itself.
    chain = _Chain(spec, {parameter.name: parameter.name for parameter in spec.parameters()}, given)
    for number, step in enumerate(steps):
        with told_as(called(steps, number)):
            chain.carry_out(step)
    usual = weakest(guarantee for guarantee, _ in chain.promised)
    # What is not known is at best exact: it decides nothing where another step is as weak for certain.
    certain = weakest(guarantee for guarantee, known in chain.promised if known)
    surely = usual == "exact" or certain == usual
    notes = tuple(dict.fromkeys(chain.notes))
    return Reshaped(chain.spec, usual if surely else DEPENDS, notes, usual, chain.settled, spec, tuple(chain.done))


_AS_FAR = ", as far as shapes tell"
_HINT = "gptkit swap MODEL OUT --dry-run checks the weights."
