"""List the swaps that are possible for a model. Every swap is tried, and listed with its guarantee and costs.

A swap decides its guarantee from the model's components, and sometimes from its weights (whether a bias is zero). No
tensor is computed, so the list is ready in a second or two. Some swaps are fitted on a text unless they are exact on
the model's weights. Without a text, the list says for these swaps that they need one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..analysis.costs import Costs, costs, usual_context
from ..components import ModelSpec
from ..errors import GptkitError, InvalidInput, MissingComponent, SwapRefused, UsageError
from .options import spelled
from .registry import Step, Swap, all_swaps, apply

if TYPE_CHECKING:
    from ..converter.checkpoint import Checkpoint
    from .base import Promise, StoredModel, Swapped
    from .fits.calibration import Calibration

_Verdict = Literal["exact", "approximate", "retrained", "needs a text", "refused"]
_FITTED_ON = 256  # the number of tokens of text, for swaps that need a text to decide; enough for a list


@dataclass(frozen=True)
class Listed:
    """The result of trying a swap with one value of its option on a model."""

    swap: Swap
    value: str  # the value of the option, such as "gqa:4"
    verdict: _Verdict
    said: str = ""  # the reason why the swap is not possible, or notes for the user
    hint: str = ""  # an alternative, if the swap is not possible
    limits: str = ""  # where the guarantee holds, such as "up to 1,024 tokens"; "" if it holds everywhere
    costs: Costs | None = None  # the costs of the new model, at the old model's context length; None if unknown

    @property
    def asked(self) -> str:
        """Return the swap as options of the command line, such as "--attention gqa:4"."""
        return " ".join([spelled(self.swap.option), *([self.value] if self.value else [])])

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        names = ("option", "value", "takes", "gives", "verdict", "said", "hint", "limits", "by_layer", "calibrated")
        values = {name: vars(self).get(name, getattr(self.swap, name, None)) for name in (*names, "needs", "source")}
        return values | {"costs": None if self.costs is None else self.costs.as_json()}


@dataclass(frozen=True)
class Listing:
    """The results of trying all swaps on a model, in the order in which swaps run."""

    reference: str  # the model's name
    before: Costs  # the costs of the model before a swap
    entries: tuple[Listed, ...]

    def of(self, verdict: _Verdict) -> list[Listed]:
        """Return the entries with this verdict."""
        return [entry for entry in self.entries if entry.verdict == verdict]

    def as_json(self) -> dict[str, Any]:
        """Return the list as JSON values."""
        return {
            "schema_version": 1,
            "model": self.reference,
            "costs": self.before.as_json(),
            "swaps": [entry.as_json() for entry in self.entries],
        }


def values_of(swap: Swap, spec: ModelSpec) -> Iterator[str]:
    """Yield the values of a swap's option that `gptkit swaps` tries on a model.

    These are the examples that the swap gives for the model. If it gives none, but has a fixed value, such as
    "rmsnorm", this value is tried, to show the reason why the swap is impossible. For other values, such as "gqa:N" or
    "silu:fit", nothing is then tried.
    """
    try:
        examples = list(dict.fromkeys(swap.examples(spec)))
    except (MissingComponent, SwapRefused):
        examples = []
    fixed = not any(letter.isupper() or letter == ":" for letter in swap.form)
    yield from examples or ([swap.form] if fixed else [])


def listing(source: Checkpoint) -> Listing:
    """Try every swap on an opened checkpoint, and return the results. Raises InvalidInput if weights are not finite."""
    from .base import StoredModel
    from .fits.calibration import Calibration
    from .fits.text import read_text

    model, before, entries = StoredModel(source), costs(source.spec), []
    text: Calibration | None = None
    unfit: GptkitError | None = None  # the reason why fits are impossible
    try:  # a sample has a text of its own; other models need one from the user
        text = Calibration(read_text(source, None, _FITTED_ON), source.spec)
    except UsageError:
        pass
    except MissingComponent as error:
        unfit = error
    for swap in all_swaps():
        for value in values_of(swap, source.spec):
            try:
                entries.append(_tried(model, swap, value, text, before, unfit))
            except InvalidInput:
                raise
            except GptkitError as error:
                entries.append(Listed(swap, value, "refused", error.message, error.hint or ""))
            source.release()
    return Listing(source.reference, before, tuple(entries))


def _tried(
    model: StoredModel, swap: Swap, value: str, text: Calibration | None, before: Costs, unfit: GptkitError | None
) -> Listed:
    """Try a swap with one value of its option on a model, and return the result. Raises an error if it is not possible.

    Args:
        model: The model before the swap.
        swap: The swap to try.
        value: The value of the swap's option.
        text: The text to fit on, or None. Without a text, a swap that is fitted gets the verdict "needs a text".
        before: The costs of the model before the swap.
        unfit: The error to raise if the swap needs a fit, because the model does not allow fits.
    """
    from .shapes import without_text

    source, step = model.checkpoint, Step(swap.option, value)
    companions: dict[str, Any] = {"files": source.folder, "texts": source.texts, "opening": {"offline": True}}
    swapped: Swapped
    if text is not None:
        swapped, fitted, chosen = apply(model, step, calibration=lambda: text, **companions), False, False
    else:
        swapped, fitted, chosen = without_text(partial(apply, model, **companions), step)
        if fitted and unfit is not None:
            raise unfit
    after = None if chosen and len(set(source.spec.blocks)) > 1 else costs(swapped.spec, before.context)
    statement: tuple[_Verdict, str] = (swapped.guarantee, " ".join(swapped.notes))
    statement = ("needs a text", "fitted on a text: --calibrate FILE") if fitted else statement
    return Listed(swap, value, *statement, limits=limits_of(swapped.promise, source.spec), costs=after)


def limits_of(promise: Promise, before: ModelSpec) -> str:
    """Describe the tokens and lengths for which a guarantee holds, such as "up to 1,024 tokens".

    Return "" if it holds for all tokens and the whole context length of the model before the swap (`before`).
    """
    words = []
    if promise.length is not None and promise.length < usual_context(before):
        words.append(f"up to {promise.length:,} tokens")
    if promise.tokens is not None and len(promise.tokens[0]) < before.vocab_size:
        words.append(f"for the {len(promise.tokens[0]):,} tokens kept")
    return ", ".join(words)
