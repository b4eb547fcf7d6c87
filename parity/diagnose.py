"""What a verification adds to its verdict where it can afford to: what its probe would have caught, where two models
part, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..analysis.parameters import count
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint
from ..modules.attention import Kernel
from ..modules.load import load_checkpoint
from .bisect import Divergence, bisect
from .damage import Damage, damage
from .probe import TABLES, Batch, limits
from .repair import find_causes
from .score import Score, miniature, narrow_batches, random_weights, score
from .sides import Sides

SMALL = 50_000_000
"""Parameters up to which mistakes are made in the model itself, and causes looked for in memory, unasked: each takes a
pass in fp64.
"""

TOKENS = 256
"""Tokens that a model above that is laid side by side on; more only where one batch has more."""
ROOM = 2**30
"""Bytes that one side's outputs of all components may take in the temporary folder."""


def try_mistakes(
    source: Checkpoint, batches: Sequence[Batch], asked: bool, stream: bool, notes: list[str], up_to: int | None
) -> Score:
    """What the probe would have caught: in the model, or, of a large one unasked, in a small copy (a note says so)."""
    if not stream and (asked or count(source.spec).total <= SMALL):
        return score(source.spec, wide_weights(source), batches, unprobed(source.spec, batches), up_to)
    own = "" if stream else "; --mutations makes them in the model itself"
    notes.append(f"mistakes on purpose were made on a small copy of this tree with random weights{own}")
    copy = miniature(source.spec, max(batch.input_ids.shape[1] for batch in batches))
    narrow, beyond = narrow_batches(batches, copy), unprobed(source.spec, batches)
    return replace(score(copy, random_weights(copy), narrow, beyond, up_to), small_copy=True)


def wide_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The parameters in fp64 by shared name."""
    model = load_checkpoint(checkpoint, torch.float64)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unprobed(spec: ModelSpec, batches: Sequence[Batch]) -> list[str]:
    """Mutations that only show beyond a length that the probe does not go to; a note says that it does not."""
    tokens = max(batch.input_ids.shape[1] for batch in batches)
    beyond = {limit.name for limit in limits(spec) if tokens <= limit.tokens}
    shows = {"window": "window ignored", "original context": "rope scaling dropped"}
    return [shows[name] for name in beyond]


def diagnose(
    both: Sides,
    batches: Sequence[Batch],
    path: Kernel,
    allowed: float | None,
    notes: list[str],
    *,
    gaps: Sequence[Tensor] | None = None,
    asked: bool = False,
) -> Divergence | None:
    """Where the two sides part, and what would put it right; None, with a note, where they cannot be laid side by side,
    or are large and nobody asked.

    `allowed` is the difference of logits that rounding explains; None looks for no cause, since the models are one.
    `gaps` says how much the logits of each position differ, (N,) a batch: a large model is looked at where most do.
    """
    source, target = both.source, both.target
    large = max(count(each.spec).total for each in (source, target)) > SMALL
    if large and both.folder is not None and not asked:
        notes.append("not bisected: that takes seven passes, and is done unasked up to 50 million parameters")
        return None
    if len(source.spec.blocks) != len(target.spec.blocks):
        notes.append("not bisected: the models have different numbers of layers")
        return None
    if large:
        # About what one position takes in fp64, of all outputs, and of as many inputs of projections.
        row = 16 * sum(each.shape[0] for each in source.spec.parameters() if each.name not in TABLES)
        batches = where_they_differ(batches, gaps, row)
    places = bisect(both, batches, path)
    if allowed is None or source.spec.hidden_size != target.spec.hidden_size:
        return Divergence(tuple(places))
    return Divergence(tuple(places), tuple(find_causes(both, batches, path, allowed, places, few=large)))


def assess(
    source: Checkpoint,
    target: Checkpoint,
    text: Callable[[Checkpoint], Sequence[int] | None],
    asked: bool | None,
    say: Callable[[str], None],
    notes: list[str],
) -> Damage | None:
    """What the target costs in the source's place; None, and a note, where they are large and nobody asked."""
    size = max(count(each.spec).total for each in (source, target))
    if size > SMALL and not asked:
        notes.append(f"damage by position and layer left out, at {size:,} parameters: --damage")
        return None
    return damage(source, target, text=text(source), progress=lambda words: say(f"the damage: {words}"))


def where_they_differ(batches: Sequence[Batch], gaps: Sequence[Tensor] | None, row: int) -> list[Batch]:
    """The batches where two models differ most, of `TOKENS` tokens together, and of theirs the positions where they do:
    as many as `ROOM` has place for, at `row` bytes of one position. `gaps`: how much the logits of each position
    differ, (N,) a batch; None where they do not.
    """
    if gaps is None:
        gaps = [torch.zeros(len(batch.valid(batch.input_ids[..., None]))) for batch in batches]
    taken, tokens = list[int](), 0
    for index in sorted(range(len(batches)), key=lambda index: -gaps[index].max().item()):
        size = batches[index].input_ids.numel()
        if not taken or tokens + size <= TOKENS:
            taken.append(index)
            tokens += size
    taken.sort()
    all_gaps = torch.cat([gaps[index] for index in taken])
    most = torch.zeros(len(all_gaps), dtype=torch.bool)
    most[all_gaps.topk(min(max(ROOM // row, 1), len(all_gaps))).indices] = True
    kept = torch.split(most, [len(gaps[index]) for index in taken])
    return [
        replace(batches[index], rows=rows.nonzero().flatten())
        for index, rows in zip(taken, kept, strict=True)
        if bool(rows.any())
    ]
