"""The damage report of a swap that was made: what `parity.damage` says of its files against what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..converter.checkpoint import open_checkpoint
from ..converter.threads import as_before, suit
from ..parity.damage import Damage, damage
from .base import Moved, Stored
from .chain import Chain
from .fits.calibration import TOKENS, read_text
from .swap import SwapResult


@as_before()
def assess(result: SwapResult, text: Sequence[int] | None, progress: Callable[[str], None] | None = None) -> Damage:
    """The damage of a published swap, from its files, on token ids of the old vocabulary or on none."""
    done = result.chain
    suit(done.spec)
    return damage(
        done.against,
        Stored(open_checkpoint(result.target)),
        text=text,
        tokens=done.promise.tokens,
        most=done.promise.length,
        layers=_layers_of(done),
        progress=progress,
    )


def held_out(result: SwapResult, calibrate: str | Path | None, tokens: int | None) -> tuple[int, ...] | None:
    """The text that a swap is measured on: the end of the one it was or could be fitted on, where there is one."""
    recipe, source = result.recipe, result.source
    file = calibrate or (None if recipe is None else recipe.text())
    if file is None and not (source.origin.reference or "").startswith("sample:"):
        return None
    known = None if recipe is None else recipe.calibration.get("tokens")
    return read_text(source, file, tokens or known or TOKENS).held_out


def _layers_of(done: Chain) -> list[tuple[int, int]]:
    """The layers that stand for one another before and after: (before, after), each at most once. A layer stands for
    the one that its tensors were moved from.
    """
    pairs = [(layer, layer) for layer in range(len(done.models[0].spec.blocks))]
    for swapped in done.swapped:
        origins: dict[int, set[int]] = {layer: set() for layer in range(len(swapped.spec.blocks))}
        for parameter in swapped.spec.parameters():
            made = swapped.tensors.get(parameter.name, Moved(parameter.name))
            if parameter.layer is not None and isinstance(made, Moved):
                names = (name for name in made.names if name.startswith("blocks."))
                origins[parameter.layer] |= {int(name.split(".")[1]) for name in names}
        step = {layer: min(own, default=layer) for layer, own in origins.items() if len(own) <= 1}
        renamed = {before: after for after, before in reversed(step.items())}  # of copies the first
        pairs = [(first, renamed[before]) for first, before in pairs if before in renamed]
    return pairs
