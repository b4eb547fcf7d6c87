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
    swapped: Swapped
    model: Model
    kl: float

    def named(self, asked: Step) -> str:
        """Return the form in the words of a sentence, beside the step that was asked for."""
        if self.step.tokens is not None and self.step.value == asked.value:
            return f"fitted on {self.step.tokens:,} tokens"
        if self.step.value != asked.value:
            return f"{spelled(self.step.option)} {self.step.value}"
        return "its plain form" if self.step.approximate else "as asked"


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


def choose(before: Model, asked: Step, text: Text, make: Callable[[Step], tuple[Swapped, bool]]) -> list[Tried]:
    """Try the forms of a step, and return them, the one to take first.

    Args:
        before: the tree before the step.
        asked: the step.
        text: what to fit and to choose on, in the vocabulary of `before`.
        make: what one form makes of the tree, and whether it drew on the text.

    An exact step is not measured, and neither is one without a second form.
    """
    first, *more = sizes(asked, text, sum(each.count for each in before.spec.parameters()))
    start = replace(asked, tokens=first)
    swapped, drew = make(start)
    if not drew:
        start = replace(asked, tokens=None)
    swap = swap_for(asked.option, asked.value)
    cheaper, own = swap.others(asked), drew and not swap.chooses
    if swapped.guarantee == "exact" or not text.choosing or not (cheaper or (own and more)):
        return [Tried(start, swapped, SwappedModel(before, swapped), math.nan)]
    judge = OnText(Exactly(before), text.choosing)

    def tried(step: Step, swapped: Swapped) -> Tried:
        model = SwappedModel(before, swapped)
        found = judge.compare(model, swapped.promise)
        kl = math.nan if found is None else found["kl_text"]
        return Tried(step, swapped, model, kl if math.isfinite(kl) else math.inf)

    found = [tried(start, swapped)]
    for tokens in more if own else ():
        step = replace(asked, tokens=tokens)
        found.append(tried(step, make(step)[0]))
        if not found[-1].kl < (1 - _GAIN) * found[-2].kl:
            break
    for step in cheaper:
        try:
            form, drew = make(replace(step, tokens=first))
        except SwapRefused:
            continue
        found.append(tried(replace(step, tokens=first if drew else None), form))
    return sorted(found, key=lambda each: each.kl)


def told(tried: Sequence[Tried], asked: Step) -> Iterator[str]:
    """Say what was taken and why, in one line; nothing where there was no choice."""
    best, *others = tried
    if others:
        rest = ", ".join(f"{each.named(asked)} {each.kl:.4f}" for each in others)
        yield f"chosen by KL on a part of the text: {best.named(asked)} {best.kl:.4f} (tried: {rest})"
