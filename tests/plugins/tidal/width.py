"""More channels for the recurrence: an option of the plugin's own, in one file."""

from __future__ import annotations

from msgspec.structs import replace

from gptkit.components import ModelSpec
from gptkit.surgery.base import Swapped, padded, taken
from gptkit.surgery.options import Option
from gptkit.surgery.registry import Asked, Swap

from .components import GatedRecurrence

__all__ = ["OPTIONS", "ORDER", "SWAPS"]


def widen(spec: ModelSpec, asked: Asked) -> Swapped:
    """New channels are copies that nothing leaves: exact."""
    width = asked.number("a width")

    def narrow(block: object) -> bool:
        found = block.mixer("recurrence")  # type: ignore[attr-defined]
        return isinstance(found, GatedRecurrence) and found.width < width

    made, blocks = {}, list(spec.blocks)
    for layer in asked.those(spec, narrow, f"no recurrence here has less than {width} channels"):
        old = spec.blocks[layer].mixer("recurrence")
        assert isinstance(old, GatedRecurrence)
        path = f"blocks.{layer}.recurrence"
        blocks[layer] = spec.blocks[layer].replaced(recurrence=replace(old, width=width))
        for name in ("gate_proj.weight", "in_proj.weight"):
            made[f"{path}.{name}"] = taken(f"{path}.{name}", padded(old.width, width, repeat=True))
        made[f"{path}.out_proj.weight"] = taken(f"{path}.out_proj.weight", padded(old.width, width), 1)
    return Swapped(replace(spec, blocks=tuple(blocks)), "exact", made, {"to": width})


ORDER = 155
OPTIONS = (Option("recurrence_width", "Recurrence", 1, "How many channels a recurrence has.", "N"),)
SWAPS = (
    Swap(
        option="recurrence_width",
        form="N",
        takes="a recurrence of n channels",
        gives="a recurrence of N channels",
        needs="N must be larger than the number of channels",
        source="zeros after Net2Net 1511.05641",
        reshape=widen,
        by_layer=True,
    ),
)
