"""ScaleNorm in place of RMSNorm, and back."""

from __future__ import annotations

from gptkit.components import Component, ModelSpec, RMSNorm
from gptkit.errors import SwapRefused
from gptkit.surgery.base import Computed, Swapped
from gptkit.surgery.registry import Asked, Swap

from .components import ScaleNorm

__all__ = ["ORDER", "SWAPS"]

ORDER = 55


def to_rms(spec: ModelSpec, asked: Asked) -> Swapped:
    """Every ScaleNorm as the RMSNorm of equal weights g / √n."""
    if not isinstance(spec.final_norm, ScaleNorm):
        raise SwapRefused(f"the norms are {type(spec.final_norm).__name__}, not ScaleNorm")
    paths = []

    def change(node: Component, path: str) -> Component:
        if not isinstance(node, ScaleNorm):
            return node
        paths.append((f"{path}.weight", node.size))
        return RMSNorm(size=node.size, eps=1e-12)

    new = spec.mapped(change)
    made = {name: Computed(lambda model, n=name, s=size: model.wide(n).repeat(s) / s**0.5) for name, size in paths}
    return Swapped(new, "approximate", made, {"from": "ScaleNorm", "to": "RMSNorm"}, ("eps differs",))


SWAPS = (
    Swap(
        option="norm",
        form="equal-rmsnorm",
        takes="ScaleNorm",
        gives="RMSNorm of equal weights",
        guarantee="approximate",
        needs="All norms must be ScaleNorm",
        source="Nguyen and Salazar 1910.05895",
        reshape=to_rms,
        examples=lambda spec: ("equal-rmsnorm",) if isinstance(spec.final_norm, ScaleNorm) else (),
    ),
)
