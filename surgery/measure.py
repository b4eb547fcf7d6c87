"""The damage of a swap: both models, read from their files by rows, on the same probe and on text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..components import ModelSpec
from ..converter.weights import Tree
from ..parity.compare import compare_heads, perplexity, require_same_tokens
from ..parity.probe import ProbeBatch, Scope, inputs
from ..parity.rows import states
from .base import Promise

_EVERYTHING = Promise()
_WORK = 2 * 10**12
"""Multiplications a model and a dtype that the probe may take: 40 s in fp64 on one core. A larger model gets fewer
batches."""
_WORK_LIMIT = 5 * _WORK
"""The same for a batch that goes past a window or an original context: what happens there no other batch shows."""


@dataclass(frozen=True)
class Measurement:
    """Logits after against logits before, by the dtype they were computed in.

    maximum: the largest absolute difference; relative: that over the largest logit; kl: mean KL divergence in nats a
    token and top1 the share of positions with the same most likely token, both in the widest dtype.

    Where there was text, computed in fp32: perplexity before and after, kl_text and top1_text, over text_positions.
    notes: what was left out.
    """

    maximum: dict[str, float]
    relative: dict[str, float]
    kl: float
    top1: float
    positions: int
    perplexity: tuple[float, float] | None = None
    kl_text: float | None = None
    top1_text: float | None = None
    text_positions: int = 0
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        found: dict[str, Any] = {
            name: getattr(self, name) for name in ("maximum", "relative", "kl", "top1", "positions")
        }
        if self.perplexity is not None:
            perplexity = dict(zip(("before", "after"), self.perplexity, strict=True))
            rest = {"kl": self.kl_text, "top1": self.top1_text, "positions": self.text_positions}
            found["text"] = {"perplexity": perplexity, **rest}
        return found | ({"notes": list(self.notes)} if self.notes else {})


def measure(
    before: Tree,
    after: Tree,
    *,
    promise: Promise = _EVERYTHING,
    text: Sequence[int] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    progress: Callable[[int], None] | None = None,
) -> Measurement:
    """Run the probe through both in each dtype, and text in fp32.

    Memory is that of the activations and some MiB of weights, whatever the size of the models.

    Args:
        before: the original.
        after: what should compute the same, or nearly.
        promise: what of the logits is compared.
        text: token ids of the old vocabulary, for perplexity; cut where a token is not kept.
        dtypes: what to compute in, the widest last.
        progress: called with the bytes of every weight that was read.

    Raises:
        GptkitError: the vocabularies are of different sizes, and the promise does not say which tokens are the same.
    """
    require_same_tokens(before, after, promise.tokens)
    scope = Scope(before.spec, after.spec, promise.tokens, promise.length)
    batches, notes = affordable(scope.probe(), before.spec, after.spec)

    def both(batches: Sequence[ProbeBatch], dtype: torch.dtype) -> tuple[list[torch.Tensor], ...]:
        """What comes to the heads of both models, of batches of the old vocabulary."""
        sides = ((before, batches), (after, [scope.renamed(batch) for batch in batches]))
        return tuple(states(tree, side, dtype, progress=progress) for tree, side in sides)

    maximum, relative = {}, {}
    for name in dtypes:
        valid = [
            torch.cat([batch.valid(x) for batch, x in zip(batches, side, strict=True)])
            for side in both(batches, getattr(torch, name))
        ]
        found = compare_heads(before, after, (valid[0], valid[1]), tokens=scope.tokens)
        # Not Python's max, which loses a NaN that does not come first.
        worst, largest = found.gap.max().item(), found.largest.max().item()
        maximum[name], relative[name] = worst, worst / largest if largest else worst
    mean, agreed = found.kl.mean().item(), found.agree.double().mean().item()
    measured = Measurement(maximum, relative, mean, agreed, len(found.kl), notes=notes)
    on_text = None if text is None else measure_text(before, after, promise, text, progress)
    if on_text is None:
        note = "not measured on the text: it has no two consecutive tokens that are kept"
        return measured if text is None else replace(measured, notes=(*notes, note))
    return replace(measured, **on_text)


def measure_text(
    before: Tree, after: Tree, promise: Promise, text: Sequence[int], progress: Callable[[int], None] | None = None
) -> dict[str, Any] | None:
    """Return the fields of a `Measurement` that concern the text, computed in fp32; None where no token of it has a
    successor that is kept.
    """
    return OnText(before, text).compare(after, promise, progress)


class OnText:
    """A tree on a text, with which others are compared one after the other; what the tree itself makes of the text is
    computed once.
    """

    def __init__(self, before: Tree, text: Sequence[int]) -> None:
        self.before, self.text = before, text
        self._states: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}

    def compare(
        self, after: Tree, promise: Promise = _EVERYTHING, progress: Callable[[int], None] | None = None
    ) -> dict[str, Any] | None:
        """As `measure_text`."""
        scope = Scope(self.before.spec, after.spec, promise.tokens, promise.length)
        compared = []
        for windows in scope.groups(self.text):
            batches, key = inputs(windows), tuple(map(tuple, windows))
            if key not in self._states:
                self._states[key] = _flat(states(self.before, batches, torch.float32, progress=progress))
            renamed = [scope.renamed(batch) for batch in batches]
            both = self._states[key], _flat(states(after, renamed, torch.float32, progress=progress))
            targets = scope.targets(windows)
            compared.append(compare_heads(self.before, after, both, tokens=scope.tokens, targets=targets))
        if not compared:
            return None
        names = ("kl", "agree", "before", "after")
        kl, agree, *lost = (torch.cat([getattr(each, name) for each in compared]).double() for name in names)
        return {
            "perplexity": (perplexity(lost[0]), perplexity(lost[1])),
            "kl_text": kl.mean().item(),
            "top1_text": agree.mean().item(),
            "text_positions": len(kl),
        }


def _flat(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """States of batches of one sequence each, (T, hidden) together."""
    return torch.cat([each[0] for each in found])


def affordable(
    batches: Sequence[ProbeBatch], before: ModelSpec, after: ModelSpec
) -> tuple[list[ProbeBatch], tuple[str, ...]]:
    """As many of the probe's batches as a model's size allows, and a note on what is left out.

    Those past a limit come first, then one with padding, then the others by what they show for their length.
    """
    size = max(sum(each.count for each in spec.parameters()) for spec in (before, after))
    order = ("past", "left padding", "random tokens", "vocabulary regions", "right padding", "one token", "long")

    def rank(batch: ProbeBatch) -> int:
        return next(i for i, name in enumerate((*order, "")) if batch.name.startswith(name))

    taken: list[ProbeBatch] = []
    work = 0
    for batch in sorted(batches, key=rank):
        cost = batch.input_ids.numel() * size
        beyond = batch.name.startswith("past")
        if cost <= _WORK_LIMIT if beyond else (work + cost <= _WORK or not taken):
            taken.append(batch)
            work += 0 if beyond else cost
    chosen = {id(batch) for batch in taken}
    left = [batch.name for batch in batches if id(batch) not in chosen]
    notes = (
        (f"because the model is large, these parts of the probe were not measured: {', '.join(left)}",) if left else ()
    )
    return [batch for batch in batches if id(batch) in chosen], notes
