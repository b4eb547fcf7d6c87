"""Positions: a learned table, rotary positions with their scalings, and ALiBi. No torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Open, Positive, Size, Turns, Weight

__all__ = [
    "ALiBi",
    "DynamicScaling",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Position",
    "ProportionalScaling",
    "RopeScaling",
    "Rotary",
    "YarnScaling",
]


class LearnedPositions(Component, frozen=True):
    """A table added to the token embeddings."""

    label = "positions"
    rows = "T"

    length: Size
    size: Size

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.length, self.size), "table")}


class LinearScaling(Component, frozen=True):
    """Positions divided by `factor` (kaiokendev 2023)."""

    factor: Positive


class DynamicScaling(Component, frozen=True):
    """NTK-aware base that grows once the sequence is longer than `original_context` (bloc97, emozilla 2023)."""

    factor: Positive
    original_context: Size


class YarnScaling(Component, frozen=True):
    """YaRN (Peng et al. 2309.00071): interpolate slow pairs, keep fast ones, a ramp between; cos and sin scaled."""

    forgotten: ClassVar[dict[str, str]] = {
        "beta_fast": "YaRN's beta_fast forgotten",
        "beta_slow": "YaRN's beta_slow forgotten",
        "truncate": "YaRN's ramp truncated",
    }

    factor: Positive
    original_context: Size
    attention_factor: Positive
    beta_fast: Turns = 32.0
    beta_slow: Turns = 1.0
    truncate: bool = True


class LongRopeScaling(Component, frozen=True):
    """LongRoPE (2402.13753): one divisor a pair, another set beyond `original_context`; cos and sin scaled."""

    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    original_context: Size
    attention_factor: Positive


class Llama3Scaling(Component, frozen=True):
    """Llama 3.1: slow pairs divided by `factor`, fast ones kept, a ramp in wavelength between."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_context: Size


class ProportionalScaling(Component, frozen=True):
    """p-RoPE (Barbero et al. 2410.06205): the `turning` fastest pairs turn, at frequencies divided by `factor`, and the
    slower ones never do.
    """

    factor: Turns
    turning: Annotated[int, Meta(ge=0, le=2**31 - 1)]


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling | ProportionalScaling


class Position(Open, frozen=True):
    """What stands in an attention as its positions. A record of a kind inherits it beside `Component`."""

    __slots__ = ()


class Rotary(Position, Component, frozen=True):
    """Rotary positions (Su et al. 2104.09864) on the first `dim` elements of a head.

    `pairs`: which elements turn together, i and i + dim/2 (GPT-NeoX, llama) or 2i and 2i + 1 (the paper, GPT-J). The
    frequencies are the same.
    """

    forgotten: ClassVar[dict[str, str]] = {
        "scaling": "rope scaling dropped",
        "pairs": "RoPE in the other pairs",
    }

    dim: Size
    base: Positive
    scaling: RopeScaling | None = None
    pairs: Literal["halves", "adjacent"] = "halves"

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ConfigError(f"rotary positions need an even number of dimensions, not {self.dim}")
        if isinstance(self.scaling, DynamicScaling) and self.dim == 2:
            raise ConfigError("dynamic scaling takes the base to the power of dim / (dim - 2): dim is 2")
        if isinstance(self.scaling, YarnScaling) and self.base == 1:
            raise ConfigError("YaRN's ramp is over the logarithm of the base: base is 1")
        if isinstance(self.scaling, ProportionalScaling) and self.scaling.turning > self.dim // 2:
            raise ConfigError(f"{self.scaling.turning} pairs turn of {self.dim // 2}")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                length = len(getattr(self.scaling, name))
                if length != self.dim // 2:
                    raise ConfigError(f"longrope {name} has {length} values, the rotary needs {self.dim // 2}")


class ALiBi(Position, Component, frozen=True):
    """A bias of slope(head) · position of the key (Press et al. 2108.12409).

    `scaled`: the bias is multiplied by the attention scale together with q·k (Falcon), or stands outside it (BLOOM).
    `rounding`: the dtype in which slopes and products are rounded before they join the scores.
    """

    rounds = ("rounding",)
    forgotten: ClassVar[dict[str, str]] = {"scaled": "ALiBi's bias not scaled"}

    scaled: bool = False
    rounding: Literal["float32", "bfloat16"] = "float32"
