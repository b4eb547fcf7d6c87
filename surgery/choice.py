"""The choice between forms of a step: the number of tokens to fit on, and simpler forms that may be better.

More text improves a fit, and takes longer. So a step is fitted on 2,048 tokens, then on four times as many, and so on.
This stops if more text reduces the KL by less than 2 %, if the text ends, or if the model is too large. The simpler
forms of a swap (`Swap.cheaper`) are tried as well. All are compared by the KL divergence from the model before the
step, on a part of the text that is used for nothing else (`CalibrationText.choosing`).
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
    kl: float  # the KL divergence of the model after the step from the one before it, in nats per token

    def named(self, asked: Step) -> str:
        """Name the form in a sentence, by what differs from the requested step `asked`."""
        if self.step.tokens is not None and self.step.value == asked.value:
            return f"fitted on {self.step.tokens:,} tokens"
        if self.step.value != asked.value:
            return f"{spelled(self.step.option)} {self.step.value}"
        return "without a fit" if self.step.approximate else "as asked"


def sizes(step: Step, text: CalibrationText, parameters: int) -> list[int]:
    """Return the numbers of tokens to fit a step on, the smallest first.

    If the step itself gives a number of tokens, only that is returned. `parameters` is the size of the model.
    """
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

    A step that is exact, or that has only one form, is run but not measured.

    Args:
        before: The model before the step.
        asked: The requested step.
        text: The text to fit and to choose on, in the vocabulary of `before`.
        make: A function that runs one form. It returns the result, and whether it used the text.
    """
    first, *larger = sizes(asked, text, sum(parameter.count for parameter in before.spec.parameters()))
    judge, forms, best = (
        OnText(Exactly(before), text.choosing),
        list[Tried](),
        list[tuple[float, Swapped, SwappedModel]](),
    )

    def try_out(step: Step, swapped: Swapped, drew: bool) -> None:
        """Measure a form, and remember its result if it is the best so far. `drew`: whether it used the text."""
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
    """Yield one line about which form was chosen and why, or nothing if only one was tried."""
    best, *worse = tried
    if worse:
        rest = ", ".join(f"{form.named(asked)} {form.kl:.4f}" for form in worse)
        yield f"chosen by KL on a part of the text: {best.named(asked)} {best.kl:.4f} (tried: {rest})"
