"""What can be swapped in a model: every swap tried on its tree, with what it would guarantee and cost.

A swap decides from a model's components, and sometimes from its weights (whether a bias is zero), what it can promise.
No tensor is computed for that, so the list is there in a second or two. What has no exact form on these weights and is
fitted on a text promises nothing before there is one.
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
    from .base import Promise, Stored, Swapped
    from .fits.calibration import Calibration

_Verdict = Literal["exact", "approximate", "retrained", "needs a text", "refused"]
_FITTED_ON = 256  # tokens of text for swaps that look at one before they say what they do: enough for a list


@dataclass(frozen=True)
class Listed:
    """A swap as it would be on a model.

    said: why it is refused, with what would be possible in `hint`; or what a person should know of it. limits: what of
    the logits it promises something about, where that is not all. costs: of the tree after it, at the context of the
    tree before; None where it is refused, or where only a text could tell.
    """

    swap: Swap
    value: str
    verdict: _Verdict
    said: str = ""
    hint: str = ""
    limits: str = ""
    costs: Costs | None = None

    @property
    def asked(self) -> str:
        """As on the command line."""
        return " ".join([spelled(self.swap.option), *([self.value] if self.value else [])])

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("option", "value", "takes", "gives", "verdict", "said", "hint", "limits", "by_layer", "calibrated")
        found = {name: vars(self).get(name, getattr(self.swap, name, None)) for name in (*names, "needs", "source")}
        return found | {"costs": None if self.costs is None else self.costs.as_json()}


@dataclass(frozen=True)
class Listing:
    """All that can be tried on a model, in the order of the registry, and what the model costs as it is."""

    reference: str
    before: Costs
    entries: tuple[Listed, ...]

    def of(self, verdict: _Verdict) -> list[Listed]:
        """Those with this verdict."""
        return [entry for entry in self.entries if entry.verdict == verdict]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema_version": 1,
            "model": self.reference,
            "costs": self.before.as_json(),
            "swaps": [entry.as_json() for entry in self.entries],
        }


def values_of(swap: Swap, spec: ModelSpec) -> Iterator[str]:
    """What to try: a swap's examples for a tree; where it has none, its form if that is a value by itself, and no
    variant of another ("silu:2"), so that it can say why not. One that knows none of the tree's components has none.
    """
    try:
        found = list(dict.fromkeys(swap.examples(spec)))
    except (MissingComponent, SwapRefused):
        found = []
    fixed = not any(letter.isupper() or letter == ":" for letter in swap.form)
    yield from found or ([swap.form] if fixed else [])


def listing(source: Checkpoint) -> Listing:
    """Try every swap on an opened checkpoint. Raises InvalidInput where weights are not finite."""
    from .base import Stored
    from .fits.calibration import Calibration, read_text

    model, before, entries = Stored(source), costs(source.spec), []
    text: Calibration | None = None
    unfit: GptkitError | None = None  # why no text could be fitted on
    try:  # the text that comes along with a sample; elsewhere a person has to give one
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
    model: Stored, swap: Swap, value: str, text: Calibration | None, before: Costs, unfit: GptkitError | None
) -> Listed:
    """What a swap says of the model; without a text that it would be fitted on, its costs alone, as far as known.
    Raises `unfit` where it would be fitted.
    """
    from .shapes import without_text

    source, step = model.checkpoint, Step(swap.option, value)
    given: dict[str, Any] = {"files": source.folder, "texts": source.texts, "offline": True}
    found: Swapped
    if text is not None:
        found, fitted, chosen = apply(model, step, calibration=lambda: text, **given), False, False
    else:
        found, fitted, chosen = without_text(partial(apply, model, **given), step)
        if fitted and unfit is not None:
            raise unfit
    after = None if chosen and len(set(source.spec.blocks)) > 1 else costs(found.spec, before.context)
    said: tuple[_Verdict, str] = (found.guarantee, " ".join(found.notes))
    said = ("needs a text", "fitted on a text: --calibrate FILE") if fitted else said
    return Listed(swap, value, *said, limits=limits_of(found.promise, source.spec), costs=after)


def limits_of(promise: Promise, before: ModelSpec) -> str:
    """A promise in words, "" where it is about all of the logits."""
    words = []
    if promise.length is not None and promise.length < usual_context(before):
        words.append(f"up to {promise.length:,} tokens")
    if promise.tokens is not None and len(promise.tokens[0]) < before.vocab_size:
        words.append(f"for the {len(promise.tokens[0]):,} tokens kept")
    return ", ".join(words)
