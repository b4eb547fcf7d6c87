"""What gptkit does not have: ScaleNorm, and a gated linear recurrence. No torch."""

from __future__ import annotations

from typing import Self

import msgspec

from gptkit.components import Biasing, Component, Mixer, Norm
from gptkit.components.base import Positive, Size, Weight, divided
from gptkit.components.norms import Gain
from gptkit.components.operations import ActivationOperation, Program, Scan, Sizes, linear

__all__ = ["GatedRecurrence", "OneSlope", "ScaleNorm"]


class ScaleNorm(Norm, Component, frozen=True):
    """g · x / max(‖x‖, eps), g one number (Nguyen and Salazar 1910.05895)."""

    label = "norms"
    centred = False
    computed_in = "tidal.modules"

    size: Size
    eps: Positive = 1e-5
    gain: Gain = "weight"

    def weights(self) -> dict[str, Weight]:
        """One gain for all, which starts at √size."""
        return {"weight": Weight((1,), "gain", self.size**0.5)}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        return self.normed(path, source, shape, "x / ‖x‖", kind="ScaleNorm", normalised_in="input")


class GatedRecurrence(Mixer, Component, frozen=True):
    """hₜ = aₜ ⊙ hₜ₋₁ + (1 − aₜ) ⊙ U xₜ with aₜ = σ(W xₜ), and V hₜ leaves: the minGRU of Feng et al. 2410.01201."""

    label = "recurrence"
    slot = "recurrence"
    computed_in = "tidal.modules"

    hidden_size: Size
    width: Size

    def weights(self) -> dict[str, Weight]:
        return {
            "gate_proj.weight": Weight((self.width, self.hidden_size), "reads"),
            "in_proj.weight": Weight((self.width, self.hidden_size), "reads"),
            "out_proj.weight": Weight((self.hidden_size, self.width), "writes"),
        }

    def letters(self, part: str = "") -> dict[str, int]:
        return {"r": self.width}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, width=divided(self.width, devices, "channels of the recurrence"))

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        inner: Sizes = ("B", "T", self.width)
        gate = linear(self, "gate_proj", path, source, inner, "recurrence")
        opened = ActivationOperation(f"{path}.gate", (gate.id,), inner, "recurrence", function="sigmoid")
        value = linear(self, "in_proj", path, source, inner, "recurrence")
        words = {"title": "gated recurrence", "formula": "h ← a ⊙ h + (1 − a) ⊙ u"}
        scan = Scan(f"{path}.state", (opened.id, value.id), inner, "recurrence", state=(self.width,), **words)
        return (gate, opened, value, scan, linear(self, "out_proj", path, scan.id, shape, "recurrence"))


class OneSlope(Biasing, Component, frozen=True):
    """A bias of slope · position of the key, the same slope for every head."""

    title = "one slope"
    formula = "slope · s"
    computed_in = "tidal.modules"

    slope: Positive
    scaled: bool = True
