"""What a verification adds to its verdict where it can afford to: what its probe would have caught, where two models
part, and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..converter.checkpoint import Checkpoint
from ..modules.attention import Kernel
from ..modules.load import load_checkpoint
from .bisect import Divergence, bisect, find_causes
from .probe import Batch, limits
from .reference import load_reference
from .sides import Sides, reference_run

__all__ = ["diagnose", "unprobed", "wide_weights", "worth_trying"]

SMALL = 50_000_000
"""Parameters up to which mistakes are made on purpose, and causes looked for, unasked: each takes a pass in fp64."""


def worth_trying(source: Checkpoint, asked: bool | None, stream: bool, notes: list[str]) -> bool:
    """Whether to make mistakes on purpose; a note where the model is too large to do so unasked."""
    if stream:
        notes.append("mistakes on purpose were not tried: they need the whole model in memory")
        return False
    if asked is None and _count(source) > SMALL:
        notes.append("mistakes on purpose were not tried: more than 50 million parameters (--mutations does)")
        return False
    return asked is not False


def _count(checkpoint: Checkpoint) -> int:
    return sum(parameter.count for parameter in checkpoint.spec.parameters())


def wide_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The parameters in fp64 by shared name."""
    model = load_checkpoint(checkpoint, torch.float64)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unprobed(source: Checkpoint, batches: Sequence[Batch]) -> list[str]:
    """Mutations that only show beyond a length that the probe does not go to; a note says that it does not."""
    tokens = max(batch.input_ids.shape[1] for batch in batches)
    beyond = {limit.name for limit in limits(source.spec) if tokens <= limit.tokens}
    shows = {"window": "window ignored", "original context": "rope scaling dropped"}
    return [shows[name] for name in beyond]


def diagnose(
    both: Sides, batches: Sequence[Batch], path: Kernel, allowed: float | None, notes: list[str], *, asked: bool = False
) -> Divergence | None:
    """Where the two sides part, and what would put it right; None, with a note, where they cannot be laid side by side.

    Args:
        both: the sides.
        batches: the probe.
        path: the attention they computed with.
        allowed: the difference of logits that rounding explains; None looks for no cause, since the models are one.
        notes: gets the reason why not.
        asked: whatever the size.

    """
    source, target, architecture = both.source, both.target, both.source.architecture
    assert architecture is not None
    if both.folder is None or (not asked and max(_count(source), _count(target)) > SMALL):
        notes.append("not bisected: that needs both models in memory, and is done up to 50 million parameters")
        return None
    if len(source.spec.blocks) != len(target.spec.blocks):
        notes.append("not bisected: the models have different numbers of layers")
        return None
    exact, rounded = (load_reference(both.folder, dtype, path) for dtype in (torch.float64, torch.float32))
    candidate = load_checkpoint(target, torch.float64, path)
    places = bisect(architecture, source.spec, batches, exact, rounded, candidate)
    if allowed is None:
        return Divergence(tuple(places), ())
    first = next((place for place in places if place.parts), None)
    pairs = zip(batches, reference_run(exact, batches), strict=True)
    finite = [(batch, logits) for batch, logits in pairs if bool(torch.isfinite(logits).all())]
    causes = find_causes(
        [logits for _, logits in finite],
        allowed,
        [batch for batch, _ in finite],
        source.spec,
        candidate,
        None if first is None else first.layer,
        wide_weights(source),
    )
    return Divergence(tuple(places), tuple(causes))
