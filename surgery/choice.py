"""The choice between forms of a step: the number of tokens to fit on, and cheaper forms that may be better.

More text improves a fit, and takes longer. So a step is fitted on 2,048 tokens, then on four times as many, and so on.
This stops if the gain is below 2 %, the text ends, or the model is too large. The cheaper forms of a swap
(`Swap.cheaper`) are tried as well. All are compared by KL on a separate part of the text (`CalibrationText.choosing`),
never on the part that measures the result.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import SwapRefused
from .base import Exactly, Model, Swapped, SwappedModel
from .fits.calibration import TOKENS, CalibrationText
from .measure import OnText
from .options import spelled
from .registry import Step, swap_for

_GAIN = 0.02  # of the KL: with less, more text is not tried
_STEP = 4  # times as many tokens
_WORK = 10**12  # tokens · parameters that a fit may take beyond `TOKENS` tokens: some minutes on two cores


@dataclass(frozen=True)
class Tried:
    """A form of a step that was run and measured."""

    step: Step  # the form, with the number of tokens that it was fitted on, if any
    kl: float  # in nats per token, from the model before the step to the model after it, on the choosing part

    def named(self, asked: Step) -> str:
        """Name the form in a sentence, in contrast to the requested step."""
        if self.step.tokens is not None and self.step.value == asked.value:
            return f"fitted on {self.step.tokens:,} tokens"
        if self.step.value != asked.value:
            return f"{spelled(self.step.option)} {self.step.value}"
        return "without a fit" if self.step.approximate else "as asked"


def sizes(step: Step, text: CalibrationText, parameters: int) -> list[int]:
    """Return the numbers of tokens to fit on, the smallest first. A step with a number of its own has only that."""
    most = len(text.fitted)
    if step.tokens is not None:
        return [min(step.tokens, most)]
    most = max(min(most, _WORK // max(parameters, 1)), min(most, TOKENS))
    numbers, tokens = list[int](), TOKENS
    while tokens * 2 <= most:
        numbers.append(tokens)
        tokens *= _STEP
    return [*numbers, most]


def may_choose(step: Step) -> bool:
    """Return whether a step has other forms, or numbers of tokens, to choose from."""
    swap = swap_for(step.option, step.value)
    return bool(swap.others(step)) or (swap.calibrated and not swap.chooses and not step.approximate)


def choose(
    before: Model, asked: Step, text: CalibrationText, make: Callable[[Step], tuple[Swapped, bool]]
) -> tuple[list[Tried], Swapped, SwappedModel]:
    """Try the forms of a step. Return the forms, the best first, and the result and model of the best.

    Args:
        before: The model before the step.
        asked: The step.
        text: The text to fit and to choose on, in the vocabulary of `before`.
        make: A function that returns the result of one form, and whether it used the text.

    An exact step is not measured, and neither is a step without a second form.
    """
    first, *larger = sizes(asked, text, sum(parameter.count for parameter in before.spec.parameters()))
    judge, forms, best = (
        OnText(Exactly(before), text.choosing),
        list[Tried](),
        list[tuple[float, Swapped, SwappedModel]](),
    )

    def try_out(step: Step, swapped: Swapped, drew: bool) -> None:
        """Measure a form, and remember its result if it is the best so far."""
        model = SwappedModel(before, swapped)
        measured = judge.compare(model, swapped.promise) if choice else None
        kl = math.inf if measured is None or not math.isfinite(measured["kl_text"]) else measured["kl_text"]
        forms.append(Tried(step if drew else replace(step, tokens=None), kl))
        if not best or kl < best[0][0]:
            best[:] = [(kl, swapped, model)]

    swapped, drew = make(replace(asked, tokens=first))
    swap = swap_for(asked.option, asked.value)
    cheaper, fits = swap.others(asked), drew and not swap.chooses
    choice = swapped.guarantee != "exact" and bool(text.choosing) and bool(cheaper or (fits and larger))
    try_out(replace(asked, tokens=first), swapped, drew)
    for tokens in larger if fits and choice else ():
        step = replace(asked, tokens=tokens)
        try_out(step, *make(step))
        if not forms[-1].kl < (1 - _GAIN) * forms[-2].kl:
            break
    for cheaper_form in cheaper if choice else ():
        step = replace(cheaper_form, tokens=first)
        try:
            form = make(step)
        except SwapRefused:
            continue
        try_out(step, *form)
    return sorted(forms, key=lambda form: form.kl), *best[0][1:]


def reasons(tried: Sequence[Tried], asked: Step) -> Iterator[str]:
    """Yield one line about the choice and its reason, or nothing if there was no choice."""
    best, *worse = tried
    if worse:
        rest = ", ".join(f"{form.named(asked)} {form.kl:.4f}" for form in worse)
        yield f"chosen by KL on a part of the text: {best.named(asked)} {best.kl:.4f} (tried: {rest})"
