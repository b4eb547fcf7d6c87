"""Swaps on shapes alone: what a tree would become, for a model of any size, without its weights.

`params --swap attention=gqa:4` asks this. The swaps are those of the registry, as they are: they meet a `Shapes`, whose
tensors have a shape and a dtype and no values (`unknown`). Where a swap asks for values it is answered as trained
weights would, and once more as zeros would, which is what allows most. Where both lead to the same tree and guarantee
that is what the weights will give too; otherwise it is told that it depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from ..analysis.costs import Costs, costs
from ..components import ModelSpec
from ..converter.resolve import read_spec
from ..converter.tree import Origin
from ..errors import GptkitError, InvalidInput, SwapRefused, UsageError
from .base import Array, Filled, Guarantee, Model, Moved, Stored, Swapped, SwappedModel, Wide, weakest
from .calibration import Calibration
from .recipe import plain, read_recipe, told_as
from .registry import Step, apply, options, steps_named, swap_for
from .synonyms import guarantee_in_words
from .unknown import Assumptions, NeedsWeights, Unknown

__all__ = ["DEPENDS", "Reshaped", "Shapes", "applied", "steps_from", "swapped"]

DEPENDS: Literal["depends on the weights"] = "depends on the weights"


# --- what is asked ----------------------------------------------------------------------------------------------------


def steps_from(swaps: Sequence[str] = (), recipe: str | Path | None = None) -> list[Step]:
    """The steps of a recipe, and after them those asked for as OPTION=VALUE ("attention=gqa:4", "tie"), in the order in
    which `gptkit swap` carries them out.

    Raises:
        UsageError: an option or a value is unknown; there is no such recipe.
        InvalidInput: it is none.

    """
    order = {option: place for place, option in enumerate(options())}
    found: list[Step] = []
    for text in swaps:
        name, equals, value = text.strip().removeprefix("--").partition("=")
        option = name.strip().replace("-", "_").lower()
        forms = [swap.form for swap in options().get(option, ()) if swap.form]
        if forms and not value:
            raise UsageError(f"{text!r}: to what?", f"known: {', '.join(f'{name}={form}' for form in forms)}")
        if option in order and equals and not forms:
            raise UsageError(f"{text!r}: this swap takes no value", f"Write it as {name}.")
        found += steps_named(option, value.strip())
    told = read_recipe(recipe).steps if recipe is not None else ()
    return [*told, *sorted(found, key=lambda step: order[step.option])]


# --- trees without weights --------------------------------------------------------------------------------------------


class Shapes(Stored):
    """A tree whose tensors have shapes and no values.

    constant: what every value is, for a look at what weights might allow; None for values such as training leaves.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str = "F32",
        origin: Origin | None = None,
        constant: float | None = None,
        own_files: bool = False,
    ) -> None:
        where = origin or Origin()
        # Of a checkpoint swaps see where it came from, and whether the files beside it are its own.
        seen = SimpleNamespace(origin=where, format="local" if own_files else "shapes", spec=spec)
        self.checkpoint, self.spec = cast("Any", seen), spec
        self.assumptions = Assumptions()
        self._dtype = dtype
        shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
        self._tensors = {name: Unknown(shape, self.assumptions, constant, name) for name, shape in shapes.items()}

    @property
    def reference(self) -> str:
        return self.checkpoint.origin.reference or "the tree"

    def dtype(self, _name: str) -> str:
        return self._dtype

    def raw(self, name: str) -> tuple[Array, str]:
        return cast("Array", self._tensors[name]), self._dtype

    def wide(self, name: str) -> Wide:
        return cast("Wide", self._tensors[name])

    def read(self, name: str) -> torch.Tensor:
        raise NeedsWeights(f"{self.reference}: {name} is to be read, and there are no weights here")

    def release(self) -> None:
        """Nothing is held."""


class Reformed(SwappedModel):
    """The tree after a swap of shapes: what was moved or filled is known as far as it was; what was computed is not."""

    def __init__(self, before: Model, swapped: Swapped, assumptions: Assumptions) -> None:
        super().__init__(before, swapped)
        self.assumptions = assumptions
        self._known: dict[str, Any] = {}

    def raw(self, name: str) -> tuple[Array, str]:
        return self.wide(name), self.dtype(name)

    def wide(self, name: str) -> Wide:
        if name not in self._known:
            self._known[name] = self._found(name)
        return cast("Wide", self._known[name])

    def _found(self, name: str) -> Any:
        how, shape = self._how(name), self._shapes[name]
        if isinstance(how, Moved) and how.move is None:
            return self.before.wide(how.names[0])
        if isinstance(how, Filled) and not callable(how.value):
            return Unknown(shape, self.assumptions, float(how.value), ("constant", float(how.value)))
        if isinstance(how, Moved):
            sources = [cast("Any", self.before.wide(each)) for each in how.names]
            if all(getattr(each, "constant", None) == 0 for each in sources):  # zeros are moved, and padded with zeros
                return Unknown(shape, self.assumptions, 0.0, ("constant", 0.0))
        return Unknown(shape, self.assumptions)

    def read(self, name: str) -> torch.Tensor:
        raise NeedsWeights(f"{self.reference}: {name} is to be read, and there are no weights here")


class _TextWanted(GptkitError):
    """A swap ran the model on a text to see what it does."""


class _NoText:
    """In place of a text that swaps are fitted on: there is one, and nothing is asked of it before it is needed."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self) -> Calibration:
        self.wanted = True
        return cast("Calibration", _Untouched())


class _Untouched:
    def __getattr__(self, name: str) -> Any:
        raise _TextWanted(name)


# --- the answer -------------------------------------------------------------------------------------------------------


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
        return {
            "steps": [step.as_json() for step in self.steps],
            "guarantee": self.guarantee,
            "usual": self.usual,
            "settled": self.settled,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Answer:
    """What a swap says of a tree: with weights such as training leaves, and with zeros (None: the same, for no value
    was asked for); whether a text would decide which layers stay.
    """

    usual: Swapped
    zeros: Swapped | SwapRefused | None
    fitted: bool
    chosen: bool


@dataclass
class _Chain:
    """A chain as far as it has come."""

    model: Model
    assumptions: Assumptions
    given: dict[str, Any]
    done: list[Step] = field(default_factory=list)
    usual: list[Guarantee] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    settled: bool = True
    notes: list[str] = field(default_factory=list)

    def carry_out(self, asked: Step) -> None:
        step = plain(asked, self.model.spec)
        try:
            answer = _ask(self.model, self.assumptions, step, self.given)
        except SwapRefused as error:
            if not self.settled and AS_FAR not in error.message:  # of the tree that the weights give it may be possible
                raise SwapRefused(f"{error.message}{AS_FAR}", error.hint) from error
            raise
        self._tell(step, answer)
        self.done.append(step)
        self.usual.append(answer.usual.guarantee)
        changed = {name: text for name, text in answer.usual.texts.items() if text is not None}
        self.given = {**self.given, "texts": {**self.given["texts"], **changed}}
        self.model = Reformed(self.model, answer.usual, self.assumptions)

    def _tell(self, step: Step, answer: _Answer) -> None:
        usual, zeros, name = answer.usual, answer.zeros, _named(step)
        shared = usual.notes if zeros is None else [n for n in usual.notes if n in getattr(zeros, "notes", ())]
        self.notes += shared
        best = zeros.guarantee if isinstance(zeros, Swapped) else usual.guarantee
        self.known.append(best == usual.guarantee)
        swap = swap_for(step.option, step.value)
        fitted = "fitted on a text (--calibrate)" if answer.fitted else ""
        if best != usual.guarantee:
            where = f"only where {swap.exact_where}" if swap.exact_where else f"on some (needs {swap.needs})"
            trained = guarantee_in_words(usual.guarantee)
            self.notes.append(f"{name}: on trained weights {trained}{': ' if fitted else ''}{fitted}; {best} {where}")
        elif fitted:
            self.notes.append(f"{name}: {fitted}")
        if answer.chosen and len(set(self.model.spec.blocks)) > 1:
            self.settled = False
            self.notes.append(f"{name}: a text decides which layers stay, and they differ")
        if isinstance(zeros, SwapRefused):
            self.notes.append(f"{name}: refused on some weights ({zeros.message})")
        if isinstance(zeros, Swapped) and zeros.spec != usual.spec:
            self.settled = False
            self.notes.append(
                f"{name}: the weights decide the tree, and this is that of trained weights (needs {swap.needs})"
            )


def swapped(
    spec: ModelSpec,
    steps: Sequence[Step],
    family: str | None = None,
    reference: str | None = None,
    *,
    dtype: str = "F32",
    files: Path | None = None,
    texts: Mapping[str, bytes] | None = None,
    offline: bool = False,
) -> Reshaped:
    """The tree after some swaps, from its shapes.

    Args:
        spec: the tree.
        steps: what to do, one after the other; see `steps_from`.
        family: the family that it came from, which an adapter's names go by.
        reference: what messages call it.
        dtype: what its tensors are stored in, by safetensors' name.
        files: the folder of its tokenizer, where there is one; without it tokens cannot be told apart.
        texts: the tokenizer's files that do not lie there.
        offline: whether an adapter may be fetched from the hub.

    Raises:
        SwapRefused: a precondition does not hold, whatever the weights or with weights such as training leaves;
            `NeedsWeights` where only the weights could tell what comes out.
        UsageError: no step, or one that there is not.

    """
    if not steps:
        raise UsageError("nothing to swap", "say what: attention=gqa:4, norm=rmsnorm, …")
    origin = replace(_origin_of(files), family=family, reference=reference)
    start = Shapes(spec, dtype, origin, own_files=files is not None)
    given = {"files": files, "texts": dict(texts or {}), "offline": offline}
    chain = _Chain(start, start.assumptions, given)
    for number, step in enumerate(steps, 1):
        with told_as(f"step {number} ({step})" if len(steps) > 1 else None):
            chain.carry_out(step)
    usual = weakest(chain.usual)
    # What is not known is at best exact: it decides nothing where another step is as weak for certain.
    certain = weakest(g for g, known in zip(chain.usual, chain.known, strict=True) if known)
    surely = usual == "exact" or certain == usual
    notes = tuple(dict.fromkeys(chain.notes))
    return Reshaped(
        chain.model.spec, usual if surely else DEPENDS, notes, usual, chain.settled, spec, tuple(chain.done)
    )


def _origin_of(files: Path | None) -> Origin:
    """Where the files say that they come from: a config.json names tokens that cannot go."""
    if files is None:
        return Origin()
    try:
        return read_spec(files)[1]
    except InvalidInput:  # a folder that says nothing by itself: the tree is known all the same
        return Origin()


def _ask(model: Model, assumptions: Assumptions, step: Step, given: Mapping[str, Any]) -> _Answer:
    assumptions.made = False
    try:
        usual, fitted, chosen = applied(model, step, given)
    except NeedsWeights as error:
        raise NeedsWeights(error.message, HINT) from error
    except SwapRefused as error:
        if assumptions.made:
            raise SwapRefused(f"{error.message}{AS_FAR}", error.hint or HINT) from error
        raise
    if not assumptions.made:
        return _Answer(usual, None, fitted, chosen)
    zeros = Shapes(model.spec, model.dtype("embedding.weight"), _origin(model), 0.0, given["files"] is not None)
    try:
        return _Answer(usual, applied(zeros, step, given)[0], fitted, chosen)
    except SwapRefused as error:
        return _Answer(usual, error, fitted, chosen)


AS_FAR = ", as far as shapes tell"
HINT = "gptkit swap MODEL OUT --dry-run looks at the weights."


def applied(model: Model, step: Step, given: Mapping[str, Any]) -> tuple[Swapped, bool, bool]:
    """The swap, whether it is fitted on a text, and whether it asked the text before it said what comes out. Then its
    plain form, which needs none, tells the tree.
    """
    text = _NoText()
    try:
        found = apply(model, step, calibration=text, **given)
    except _TextWanted:
        return apply(model, replace(step, approximate=True), **given), True, True
    return found, text.wanted, False


def _origin(model: Model) -> Origin:
    while isinstance(model, SwappedModel):
        model = model.before
    assert isinstance(model, Shapes)
    origin: Origin = model.checkpoint.origin
    return origin


def _named(step: Step) -> str:
    """As it is asked for."""
    option = step.option.replace("_", "-")
    return f"{option}={step.value}" if step.value else option
