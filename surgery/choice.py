"""Which form of a step is taken where a text can tell: on how many tokens it is fitted, and whether a cheaper form of
it is better after all.

More text makes a better fit and takes longer. So a step is fitted on 2,048 tokens, then on four times as many, and
again, until that gains less than 2 %, the text ends, or the model is too large. The cheaper forms that a swap names
(`Swap.cheaper`) are tried as well. All are measured by KL on a part of the text that is kept for it (`Text.choosing`),
never on the part that the result is reported on.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import SwapRefused
from .base import Exactly, Model, Swapped, SwappedModel
from .fits.calibration import TOKENS, Text
from .measure import OnText
from .options import spelled
from .registry import Step, swap_for

_GAIN = 0.02  # of the KL: with less, more text is not tried
_STEP = 4  # times as many tokens
_WORK = 10**12  # tokens · parameters that a fit may take beyond `TOKENS` tokens: some minutes on two cores


@dataclass(frozen=True)
class Tried:
    """A form of a step that was made and measured.

    step: the form, with the number of tokens that it was fitted on, if it was. kl: in nats per token, from the tree
    before the step to the tree after it, on the part of the text that is kept for choosing.
    """

    step: Step
    kl: float

    def named(self, asked: Step) -> str:
        """Return the form in the words of a sentence, beside the step that was asked for."""
        if self.step.tokens is not None and self.step.value == asked.value:
            return f"fitted on {self.step.tokens:,} tokens"
        if self.step.value != asked.value:
            return f"{spelled(self.step.option)} {self.step.value}"
        return "without a fit" if self.step.approximate else "as asked"


def sizes(step: Step, text: Text, parameters: int) -> list[int]:
    """Return the numbers of tokens to fit on, the smallest first: that of the step alone where it has one."""
    most = len(text.fitted)
    if step.tokens is not None:
        return [min(step.tokens, most)]
    most = max(min(most, _WORK // max(parameters, 1)), min(most, TOKENS))
    found, tokens = list[int](), TOKENS
    while tokens * 2 <= most:
        found.append(tokens)
        tokens *= _STEP
    return [*found, most]


def may_choose(step: Step) -> bool:
    """Whether a step has other forms, or numbers of tokens, to choose from."""
    swap = swap_for(step.option, step.value)
    return bool(swap.others(step)) or (swap.calibrated and not swap.chooses and not step.approximate)


def choose(
    before: Model, asked: Step, text: Text, make: Callable[[Step], tuple[Swapped, bool]]
) -> tuple[list[Tried], Swapped, SwappedModel]:
    """Try the forms of a step, and return them, the best first, with what that one makes of the tree. What the others
    have made is let go.

    Args:
        before: the tree before the step.
        asked: the step.
        text: what to fit and to choose on, in the vocabulary of `before`.
        make: what one form makes of the tree, and whether it drew on the text.

    An exact step is not measured, and neither is one without a second form.
    """
    first, *more = sizes(asked, text, sum(each.count for each in before.spec.parameters()))
    judge, found, best = (
        OnText(Exactly(before), text.choosing),
        list[Tried](),
        list[tuple[float, Swapped, SwappedModel]](),
    )

    def try_out(step: Step, swapped: Swapped, drew: bool) -> None:
        """Measure a form, and keep what it makes if it is the best so far."""
        model = SwappedModel(before, swapped)
        measured = judge.compare(model, swapped.promise) if choice else None
        kl = math.inf if measured is None or not math.isfinite(measured["kl_text"]) else measured["kl_text"]
        found.append(Tried(step if drew else replace(step, tokens=None), kl))
        if not best or kl < best[0][0]:
            best[:] = [(kl, swapped, model)]

    swapped, drew = make(replace(asked, tokens=first))
    swap = swap_for(asked.option, asked.value)
    cheaper, own = swap.others(asked), drew and not swap.chooses
    choice = swapped.guarantee != "exact" and bool(text.choosing) and bool(cheaper or (own and more))
    try_out(replace(asked, tokens=first), swapped, drew)
    for tokens in more if own and choice else ():
        step = replace(asked, tokens=tokens)
        try_out(step, *make(step))
        if not found[-1].kl < (1 - _GAIN) * found[-2].kl:
            break
    for other in cheaper if choice else ():
        step = replace(other, tokens=first)
        try:
            form = make(step)
        except SwapRefused:
            continue
        try_out(step, *form)
    return sorted(found, key=lambda each: each.kl), *best[0][1:]


def told(tried: Sequence[Tried], asked: Step) -> Iterator[str]:
    """Say what was taken and why, in one line; nothing where there was no choice."""
    best, *others = tried
    if others:
        rest = ", ".join(f"{each.named(asked)} {each.kl:.4f}" for each in others)
        yield f"chosen by KL on a part of the text: {best.named(asked)} {best.kl:.4f} (tried: {rest})"
