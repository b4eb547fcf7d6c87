"""Run swaps on shapes alone, to learn what they do to a model of any size without its weights.

`params --swap attention=gqa:4` uses this. It runs the ordinary swaps of the registry. A swap's questions about weights
are answered for typical trained weights. In a second run, they are answered for weights that are all zero, for which
most swaps are exact (`facts`). If both runs give the same model and guarantee, these are certain. Otherwise they depend
on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from ..analysis.costs import Costs, costs
from ..components import ModelSpec
from ..converter.opening import Opening
from ..converter.resolve import read_spec
from ..converter.tree import Origin
from ..errors import InvalidInput, SwapRefused, UsageError
from .base import Filled, Guarantee, Moved, Swapped, weakest
from .facts import Assumed, TextWanted, Value
from .options import guarantee_in_words, spelled
from .recipe import called, in_messages, plain, read_recipe
from .registry import Step, in_order, options, reshape, steps_named, swap_for

if TYPE_CHECKING:
    from .fits.calibration import Calibration

DEPENDS: Literal["depends on the weights"] = "depends on the weights"


# --- requests ---------------------------------------------------------------------------------------------------------


def steps_from(swaps: Sequence[str] = (), recipe: str | Path | None = None) -> list[Step]:
    """Return the steps of a recipe, and then the steps that `swaps` request, in the order in which they run.

    `swaps` are requests such as "attention=gqa:4", or "tie" for an option without a value.

    Raises UsageError for an unknown option, value or recipe, and InvalidInput for an invalid recipe.
    """
    known, steps = options(), list[Step]()
    for text in swaps:
        name, equals, value = text.strip().removeprefix("--").partition("=")
        option = name.strip().replace("-", "_").lower()
        forms = [swap.form for swap in known.get(option, ()) if swap.form]
        if forms and not value:
            raise UsageError(f"{text!r} needs a value", f"known: {', '.join(f'{name}={form}' for form in forms)}")
        if option in known and equals and not forms:
            raise UsageError(f"{text!r}: this swap takes no value", f"Write it as {name}.")
        steps += steps_named(option, value.strip())
    return [*(read_recipe(recipe).steps if recipe is not None else ()), *in_order(steps)]


# --- without weights --------------------------------------------------------------------------------------------------


class _NoText:
    """A stand-in for the calibration text, if there is none. It raises TextWanted if a swap reads the text.

    `wanted` is True after a swap requested the text, even if it did not read it.
    """

    wanted = False

    def __call__(self) -> Calibration:
        self.wanted = True
        return cast("Calibration", self)

    def __getattr__(self, name: str) -> Any:
        raise TextWanted(name)


def without_text(work: Callable[..., Swapped], step: Step) -> tuple[Swapped, bool, bool]:
    """Run a swap without a calibration text, to learn what its result would be with one.

    `work` is a function that runs a step. Its argument `calibration` returns the text.

    Returns:
        The result of the swap; whether the swap would be fitted on a text; and whether the new components depend on the
        text, for example because it decides which layers are dropped. If they do, the result is that of the swap
        without a fit (--approximate).
    """
    text = _NoText()
    try:
        swapped = work(step, calibration=text)
    except TextWanted:
        return work(replace(step, approximate=True)), True, True
    return swapped, text.wanted, False


@dataclass(frozen=True)
class Reshaped:
    """The result of swaps that ran on shapes alone, without weights."""

    spec: ModelSpec  # the model after the swaps
    guarantee: Guarantee | Literal["depends on the weights"]
    notes: tuple[str, ...]  # messages for the user
    usual: Guarantee  # the guarantee for typical trained weights
    settled: bool  # whether the new model has the same components for all weights
    before: ModelSpec  # the model before the swaps
    steps: tuple[Step, ...]  # the steps that ran, with numbers in place of shares such as "75%"

    def costs(self, context: int | None = None) -> tuple[Costs, Costs]:
        """Return the costs of the model before the swaps, and of the model after them, at a context length in tokens.

        By default, this is the context length of the model before the swaps.
        """
        first = costs(self.before, context)
        return first, costs(self.spec, first.context)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values, without the models."""
        fields = {name: getattr(self, name) for name in ("guarantee", "usual", "settled")}
        return {"steps": [step.as_json() for step in self.steps], **fields, "notes": list(self.notes)}


def _values_after(swapped: Swapped, known: Mapping[str, Value]) -> dict[str, Value]:
    """Return the contents of the new model's tensors, as far as they are known without weights, by name.

    A filled tensor has its known value, and a copied tensor has the content of its source. The content of a computed
    tensor is an object of its own, which equals no other content. `known` has the contents of the old model's tensors.
    """
    contents: dict[str, Value] = {}
    for parameter in swapped.spec.parameters():
        how = swapped.tensors.get(parameter.name, Moved(parameter.name))
        value: Value = object()
        if isinstance(how, Filled) and not callable(how.value):
            value = float(how.value)
        elif isinstance(how, Moved):
            sources = [known[name] for name in how.names]
            # Moved zeros are zeros, even if more zeros are added.
            value = sources[0] if how.move is None else 0.0 if all(source == 0.0 for source in sources) else value
        contents[parameter.name] = value
    return contents


@dataclass
class _Chain:
    """The state of several swaps that run one after the other on shapes alone."""

    spec: ModelSpec  # the model after the last step
    known: Mapping[str, Value]  # the known contents of tensors
    given: dict[str, Any]  # further arguments of `reshape`
    done: list[Step] = field(default_factory=list)  # the steps that ran
    promised: list[tuple[Guarantee, bool]] = field(default_factory=list)
    """The guarantee of each step for typical trained weights, and whether it holds for all weights."""
    settled: bool = True  # whether the model has the same components for all weights
    notes: list[str] = field(default_factory=list)  # messages for the user

    def carry_out(self, asked: Step) -> None:
        """Run a step for typical trained weights. If the result depends on weights, run it for weights of zeros too."""
        step, trained = plain(asked, self.spec), Assumed(self.known)
        try:
            usual, fitted, chosen = without_text(partial(reshape, self.spec, weights=trained, **self.given), step)
        except SwapRefused as error:
            if trained.assumed:
                raise SwapRefused(f"{error.message}{_AS_FAR}", error.hint or _HINT) from error
            if not self.settled:  # it may be possible on the model that the weights give
                raise SwapRefused(f"{error.message}{_AS_FAR}", error.hint) from error
            raise
        zeros: Swapped | SwapRefused = usual
        if trained.assumed:
            of_zeros = partial(reshape, self.spec, weights=Assumed(self.known, zeros=True), **self.given)
            try:
                zeros = without_text(of_zeros, step)[0]
            except SwapRefused as error:
                zeros = error
        # If all layers have the same components, the model does not depend on which of them the text chooses.
        chosen = chosen and len(set(self.spec.blocks)) > 1
        best = zeros.guarantee if isinstance(zeros, Swapped) else usual.guarantee
        another_model = isinstance(zeros, Swapped) and zeros.spec != usual.spec
        swap, name = swap_for(step.option, step.value), spelled(step.option).removeprefix("--")
        name += f"={step.value}" if step.value else ""
        words, text = [], "fitted on a text (--calibrate)" if fitted else ""
        if best != usual.guarantee:
            where = f"only where {swap.exact_where}" if swap.exact_where else f"on some weights. {swap.needs}"
            trained_on = f"on trained weights {guarantee_in_words(usual.guarantee)}{': ' if fitted else ''}{text}"
            words.append(f"{trained_on}; {best} {where}")
        elif fitted:
            words.append(text)
        if chosen:
            words.append("the layers differ, and a text decides which of them stay")
        if isinstance(zeros, SwapRefused):
            words.append(f"impossible for some weights ({zeros.message})")
        if another_model:
            words.append(f"the result depends on the weights; this is the one for trained weights. {swap.needs}")
        self.notes += [note for note in usual.notes if note in getattr(zeros, "notes", ())]
        self.notes += [f"{name}: {word}" for word in words]
        self.settled = self.settled and not chosen and not another_model
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
    **opening: Unpack[Opening],
) -> Reshaped:
    """Run several swaps one after the other on shapes alone, without weights.

    Args:
        spec: The model before the swaps.
        steps: The swaps.
        family: The model's original family, whose tensor names an adapter uses.
        reference: The model's name in messages.
        files: The folder of the model's tokenizer, which some swaps need.
        texts: Tokenizer files that are not in the folder.
        opening: How adapters are opened.

    Raises:
        SwapRefused: A precondition of a swap does not hold, at least for typical trained weights.
        UsageError: A step does not exist, or there are none.
    """
    if not steps:
        raise UsageError("no swap was given", "Name a swap, such as attention=gqa:4 or norm=rmsnorm.")
    origin = Origin()
    if files is not None:  # a config.json names tokens that cannot go
        with suppress(InvalidInput):  # a folder without a model of its own: the spec is known all the same
            origin = read_spec(files)[1]
    origin = replace(origin, family=family, reference=reference)
    given = {"origin": origin, "files": files, "texts": dict(texts or {}), "opening": opening}
    # The weights are unknown, so every tensor gets an object of its own for its contents.
    chain = _Chain(spec, {parameter.name: parameter.name for parameter in spec.parameters()}, given)
    for number, step in enumerate(steps):
        with in_messages(called(steps, number)):
            chain.carry_out(step)
    usual = weakest(guarantee for guarantee, _ in chain.promised)
    # If one step has the weakest guarantee with certainty, it does not matter that those of others are uncertain.
    certain = weakest(guarantee for guarantee, known in chain.promised if known)
    surely = usual == "exact" or certain == usual
    notes = tuple(dict.fromkeys(chain.notes))
    return Reshaped(chain.spec, usual if surely else DEPENDS, notes, usual, chain.settled, spec, tuple(chain.done))


_AS_FAR = " (judged by the shapes of the tensors only)"
_HINT = "gptkit swap MODEL OUT --dry-run decides it from the weights."
