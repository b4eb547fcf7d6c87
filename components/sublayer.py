"""A sub-layer: a mixer with its norms and multipliers."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Literal

from ..errors import ConfigError
from .base import Component, Mixer, Positive
from .norms import Norm
from .streams import LowRankResidual
from .words import Words

__all__ = ["SubLayer"]

_PLACES = {"norm": "pre", "output_norm": "output", "sum_norm": "post"}
"""For every norm of a sub-layer, the word for its place in tables."""


_FIRST = ("norm", "low_rank", "mixer")
"""The fields of a sub-layer that are computed first, in the order of computation."""


@cache
def _part_names(slot: str) -> tuple[tuple[str, str], ...]:
    """Return (name in a block, field) of a sub-layer's fields, such as ("attention_norm", "norm")."""
    fields = dict.fromkeys((*_FIRST, *SubLayer.__struct_fields__))
    return tuple((slot if field == "mixer" else f"{slot}_{field}", field) for field in fields)


class SubLayer(Component, frozen=True):
    """A mixer and its norms: y = mixer(norm(x)), x = sum_norm(x + multiplier · output_norm(y)).

    A norm that is None is left out. Pre-norm has only `norm`, a sandwich (Gemma 2) has `norm` and `output_norm`,
    OLMo 2 has `output_norm`, and post-norm (Vaswani et al. 2017) has `sum_norm`.
    """

    described = ("mixer", *_PLACES, "input_multiplier")
    forgotten: ClassVar[dict[str, str]] = {
        "norm": "norms before sub-layers left out",
        "output_norm": "norms of sub-layers' outputs left out",
        "sum_norm": "norms of sums left out",
        "multiplier": "branches not scaled",
        "low_rank": "residual of low rank left out",
        "onto": "what goes elsewhere added to the stream",
        "input_multiplier": "inputs of branches not scaled",
        "beside": "mixers side by side run in series",
    }

    mixer: Mixer
    """The mixer, which is what the sub-layer computes."""
    norm: Norm | None = None
    """The norm of the mixer's input."""
    low_rank: LowRankResidual | None = None
    """A low-rank residual r: the new x is (x + output_norm(y) + r(norm(x))) / √2 (Gemma 3n)."""
    output_norm: Norm | None = None
    """The norm of the mixer's output, before it is added to the stream."""
    sum_norm: Norm | None = None
    """The norm of the stream after the addition."""
    multiplier: Positive = 1.0
    """The factor by which the mixer's output is multiplied before it is added to the stream (Granite)."""
    onto: Literal["stream", "others", "next"] = "stream"
    """Where the output is added. "others", in a layer with `altup`: to all residual streams except the first. The
    sub-layer then reads the active one of the corrected streams (Gemma 3n). "next": only to the input of the next
    sub-layer's norm, and the stream stays unchanged (Zamba)."""
    input_multiplier: Positive = 1.0
    """The factor by which the mixer's input is multiplied, after the norm."""
    beside: bool = False
    """Whether the sub-layer reads the same input as the previous one, and their outputs are added to the stream
    together (Falcon-H1)."""

    def __post_init__(self) -> None:
        if self.low_rank is not None and (self.norm is None or self.sum_norm is not None):
            raise ConfigError(
                "a sub-layer with a low-rank residual (low_rank) needs a norm before it, and cannot have a "
                "norm after the residual sum (sum_norm)"
            )
        if self.beside and (self.norm is not None or self.sum_norm is not None):
            raise ConfigError(
                "a sub-layer that runs in parallel with the previous one (beside: true) uses the previous "
                "one's norm and residual sum, so it cannot have norm or sum_norm"
            )

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        """Return a copy in which every component x is replaced by `change(x, path of x)`, inner components first.

        `path` is the path of the block that contains the sub-layer.
        """
        names = _part_names(self.mixer.slot)
        paths = {field: f"{path}.{name}" if path else name for name, field in names}
        return change(self._mapped(change, paths), path)

    def parts(self) -> dict[str, Any]:
        """Return the field values by the names that they have in a block, such as "attention_norm" and "attention"."""
        return {name: getattr(self, field) for name, field in _part_names(self.mixer.slot)}

    def words(self) -> dict[str, Words]:
        return {"block": Words("", {})}

    @property
    def pre_norm(self) -> bool:
        """Whether the sub-layer has a norm of its input, and neither a norm of the sum nor a low-rank residual."""
        return self.norm is not None and self.low_rank is None and self.sum_norm is None

    def places(self) -> list[str]:
        """Return the places at which the sub-layer has norms: "pre", "output" and "post", as far as they exist."""
        return [place for name, place in _PLACES.items() if getattr(self, name) is not None]
