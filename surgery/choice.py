"""Choose between variants of a swap step: fits on more or less text, and simpler variants without a fit.

More text improves a fit, and takes longer. So a step is fitted on 2,048 tokens, then on four times as many, and so on.
This stops if more text reduces the KL by less than 2 %, if the KL is below 0.001 nats per token (which changes the
perplexity by 0.1 %), if the text ends, or if the model is too large. The simpler variants that a swap declares
(`Swap.cheaper`) are tried as well. The variant with the least KL divergence from the
model before the step is chosen. The KL is measured on a part of the text that is used for nothing else
(`CalibrationText.choosing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import SwapRefused
from .base import Exactly, Model, Swapped, SwappedModel
from .fits.text import TOKENS, CalibrationText
from .options import spelled
from .registry import Step, swap_for

if TYPE_CHECKING:
    from ..modules.devices import Device

_GAIN = 0.02  # the share of the KL that more text must remove, so that still more text is tried
_ENOUGH = 0.001  # the KL in nats per token below which no more text is tried
_STEP = 4  # the factor from one number of tokens to the next
_WORK = 10**12  # the limit of tokens · parameters for a fit on more than `TOKENS` tokens: some minutes on two cores


@dataclass(frozen=True)
class Tried:
    """A variant of a swap step that was run and measured."""

    step: Step  # the variant; its `tokens` is the number of tokens that it was fitted on, or None without a fit
    kl: float  # the KL divergence of the model after the step from the one before it, in nats per token

    def named(self, asked: Step) -> str:
        """Describe how the variant differs from the requested step, such as "fitted on 8,192 tokens"."""
        if self.step.tokens is not None and self.step.value == asked.value:
            return f"fitted on {self.step.tokens:,} tokens"
        if self.step.value != asked.value:
            return f"{spelled(self.step.option)} {self.step.value}"
        return "without a fit" if self.step.approximate else "as asked"


def sizes(step: Step, text: CalibrationText, parameters: int) -> list[int]:
    """Return the numbers of tokens on which a step should be fitted, in ascending order.

    If the step itself gives a number of tokens, only that one is returned. `parameters` is the model's number of
    parameters; the fit of a large model gets fewer tokens.
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
    """Return whether gptkit can do a swap (a step) in several ways: without its fit, or with a fit on more tokens."""
    swap = swap_for(step.option, step.value)
    return bool(swap.others(step)) or (swap.calibrated and not swap.chooses and not step.approximate)


def choose(
    before: Model,
    asked: Step,
    text: CalibrationText,
    make: Callable[[Step], tuple[Swapped, bool]],
    device: Device = "cpu",
) -> tuple[list[Tried], Swapped, SwappedModel]:
    """Run the variants of a step. Return the measured variants, the best first, and result and model of the best one.

    A step that is exact, or that has only one variant, is run but not measured.

    Args:
        before: The model before the step.
        asked: The requested step.
        text: The calibration text in the vocabulary of `before`.
        make: A function that runs one variant. It returns the result, and whether the variant used the text.
        device: The device to measure on.
    """
    from .measure import OnText  # needs torch, which a dry run does not

    first, *larger = sizes(asked, text, sum(parameter.count for parameter in before.spec.parameters()))
    judge, forms, best = (
        OnText(Exactly(before), text.choosing, device),
        list[Tried](),
        list[tuple[float, Swapped, SwappedModel]](),
    )

    def try_out(step: Step, swapped: Swapped, drew: bool) -> None:
        """Measure a variant, and keep its result if it is the best so far. `drew` says whether it used the text."""
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
        if forms[-1].kl < _ENOUGH:
            break
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
    """Yield one line for the user with the KL of every variant that was tried. Yield nothing if only one was tried."""
    best, *worse = tried
    if worse:
        rest = ", ".join(f"{form.named(asked)} {form.kl:.4f}" for form in worse)
        yield f"chosen by KL on a part of the text: {best.named(asked)} {best.kl:.4f} (tried: {rest})"
