"""A plugin of gptkit: the family "tidal", whose norms are ScaleNorm, and every second of whose layers is recurrent."""

from gptkit.architectures import register
from gptkit.converter import targets
from gptkit.surgery import registry

from .family import TIDAL

register(TIDAL)
registry.register("tidal.swaps")
registry.register("tidal.width")
targets.register("tide", "tidal.tide")
