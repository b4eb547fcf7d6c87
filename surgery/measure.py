"""Measure the damage of a swap: how much the logits change, on test inputs (`parity.probe`) and on a text.

The weights of both models are read from their files some rows at a time, so models of every size can be measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..components import ModelSpec
from ..converter.weights import Tree
from ..parity.compare import compare_heads, perplexity, require_same_tokens
from ..parity.probe import ProbeBatch, Scope, inputs
from ..parity.rows import states
from .base import Measurement, Promise

_EVERYTHING = Promise()
_WORK = 2 * 10**12  # the maximum number of multiplications per model and dtype: 40 s in fp64 on one core
_WORK_LIMIT = 5 * _WORK
"""The limit of tokens · parameters for a test input that is longer than a window or the original context.

It is larger than for other inputs, because no other input tests this.
"""


def measure(
    before: Tree,
    after: Tree,
    *,
    promise: Promise = _EVERYTHING,
    text: Sequence[int] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Measurement:
    """Compare the logits of two models: on gptkit's test inputs in each dtype, and on a text in fp32.

    The weights are read some MiB at a time, so models of every size can be compared.

    Args:
        before: The original.
        after: The model that should compute the same, or nearly the same.
        promise: The tokens and sequence lengths to compare.
        text: Token ids of the old vocabulary, for the perplexity. The text is cut at tokens that the swap drops.
        dtypes: The dtypes to compute in, the widest last.
        device: The device to compute on.
        progress: A function that is called with the size in bytes of every weight that was read.

    Raises:
        GptkitError: The vocabularies differ in size, and the promise does not say which tokens correspond.
    """
    require_same_tokens(before, after, promise.tokens)
    scope = Scope(before.spec, after.spec, promise.tokens, promise.length)
    batches, notes = affordable(scope.probe(), before.spec, after.spec)
    place = torch.device(device)

    def both(batches: Sequence[ProbeBatch], dtype: torch.dtype) -> tuple[list[torch.Tensor], ...]:
        """Run both models on batches of token ids of the old vocabulary. Return the inputs of their heads."""
        renamed = [scope.renamed(batch) for batch in batches]
        sides = [(tree, [batch.to(place) for batch in side]) for tree, side in ((before, batches), (after, renamed))]
        return tuple(states(tree, side, dtype, progress=progress) for tree, side in sides)

    maximum, relative = {}, {}
    for name in dtypes:
        valid = [
            torch.cat([batch.valid(x) for batch, x in zip(batches, side, strict=True)])
            for side in both(batches, getattr(torch, name))
        ]
        comparison = compare_heads(before, after, (valid[0], valid[1]), tokens=scope.tokens)
        # torch's max returns NaN if there is one. Python's max would lose a NaN that does not come first.
        worst, largest = comparison.gap.max().item(), comparison.largest.max().item()
        maximum[name], relative[name] = worst, worst / largest if largest else worst
    mean, agreed = comparison.kl.mean().item(), comparison.agree.double().mean().item()
    measured = Measurement(maximum, relative, mean, agreed, len(comparison.kl), notes=notes)
    on_text = None if text is None else measure_text(before, after, promise, text, progress, place)
    if on_text is None:
        note = "not measured on the text, because no two consecutive tokens of it are in the new vocabulary"
        return measured if text is None else replace(measured, notes=(*notes, note))
    return replace(measured, **on_text)


def measure_text(
    before: Tree,
    after: Tree,
    promise: Promise,
    text: Sequence[int],
    progress: Callable[[int], None] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any] | None:
    """Compare two models on a text, in fp32. Return the fields of a `Measurement` that are about the text.

    Return None if no two consecutive tokens of the text are in the new vocabulary.
    """
    return OnText(before, text, device).compare(after, promise, progress)


class OnText:
    """A model and a text, with which several other models are compared. The model runs on the text only once.

    All models compute on `device`.
    """

    def __init__(self, before: Tree, text: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.before, self.text, self.device = before, text, torch.device(device)
        self._states: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}

    def compare(
        self, after: Tree, promise: Promise = _EVERYTHING, progress: Callable[[int], None] | None = None
    ) -> dict[str, Any] | None:
        """Compare another model with this one; see `measure_text`."""
        scope = Scope(self.before.spec, after.spec, promise.tokens, promise.length)
        compared = []
        for windows in scope.groups(self.text):
            batches, key = inputs(windows), tuple(map(tuple, windows))
            if key not in self._states:
                there = [batch.to(self.device) for batch in batches]
                self._states[key] = _flat(states(self.before, there, torch.float32, progress=progress))
            renamed = [scope.renamed(batch).to(self.device) for batch in batches]
            both = self._states[key], _flat(states(after, renamed, torch.float32, progress=progress))
            targets = scope.targets(windows)
            compared.append(compare_heads(self.before, after, both, tokens=scope.tokens, targets=targets))
        if not compared:
            return None
        names = ("kl", "agree", "before", "after")
        kl, agree, *lost = (
            torch.cat([getattr(comparison, name) for comparison in compared]).double() for name in names
        )
        return {
            "perplexity": (perplexity(lost[0]), perplexity(lost[1])),
            "kl_text": kl.mean().item(),
            "top1_text": agree.mean().item(),
            "text_positions": len(kl),
        }


def _flat(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the hidden states of several sequences to (tokens, hidden)."""
    return torch.cat([batch[0] for batch in batches])


def affordable(
    batches: Sequence[ProbeBatch], before: ModelSpec, after: ModelSpec
) -> tuple[list[ProbeBatch], tuple[str, ...]]:
    """Choose the test inputs that models of this size can run in some minutes. Return them, and a note on the others.

    Inputs that are longer than a window or the original context come first, then one with padding, then the others.
    """
    size = max(sum(parameter.count for parameter in spec.parameters()) for spec in (before, after))
    order = ("past", "left padding", "random tokens", "vocabulary regions", "right padding", "one token", "long")

    def rank(batch: ProbeBatch) -> int:
        return next(i for i, name in enumerate((*order, "")) if batch.name.startswith(name))

    chosen_batches: list[ProbeBatch] = []
    work = 0
    for batch in sorted(batches, key=rank):
        cost = batch.input_ids.numel() * size
        past = batch.name.startswith("past")
        if cost <= _WORK_LIMIT if past else (work + cost <= _WORK or not chosen_batches):
            chosen_batches.append(batch)
            work += 0 if past else cost
    chosen = {id(batch) for batch in chosen_batches}
    omitted = [batch.name for batch in batches if id(batch) not in chosen]
    notes = (
        (f"because the model is large, these parts of the probe were not measured: {', '.join(omitted)}",)
        if omitted
        else ()
    )
    return [batch for batch in batches if id(batch) in chosen], notes
