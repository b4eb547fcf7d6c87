"""The norms: LayerNorm and RMSNorm."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec

from ..errors import ConfigError
from .base import Component, Open, Positive, Size, Weight, bias
from .operations import NormOperation, Program, Sizes
from .words import Words

__all__ = ["Gain", "LayerNorm", "Norm", "RMSNorm", "inside"]

Gain = Literal["weight", "1 + weight", "none"]
"""What a norm multiplies by: its weight, its weight plus 1 (Gemma), or nothing, if the norm has no weight."""


class Norm(Open, frozen=True):
    """The base class of all norms. A class such as `RMSNorm` inherits from both `Norm` and `Component`."""

    __slots__ = ()
    given = ("size",)
    usual: ClassVar[dict[str, Any]] = {"eps": ("norms with an eps of {:.0e}", (1e-5, 1e-6, 1e-8, 1e-12))}
    centred: ClassVar[bool]
    """Whether the norm first subtracts the mean of a row from the row, as LayerNorm does."""
    size: int
    """The number of elements of a row."""
    eps: float
    gain: Gain

    @property
    def aspect(self) -> str:
        return "norm"

    def factor(self, weight: Any) -> Any:
        """Return the numbers by which normalised rows are multiplied: `weight` itself, or 1 + weight (see `gain`).

        `weight` is the stored parameter. It may be an array of any library.
        """
        return 1.0 + weight if self.gain == "1 + weight" else weight

    def weight_of(self, factor: Any) -> Any:
        """Return the weight to store so that the norm multiplies by `factor`. This is the inverse of `factor()`."""
        return factor - 1.0 if self.gain == "1 + weight" else factor

    def slips(self) -> dict[str, Any]:
        large, small = (msgspec.structs.replace(self, eps=self.eps * factor) for factor in (10.0, 0.1))
        return {"eps ten times as large": large, "eps ten times as small": small}

    def gains(self) -> dict[str, Weight]:
        """Return the norm's weight by name, as in `weights`. The result is empty if the norm has no weight.

        The initial value is such that the norm multiplies by 1.
        """
        return {} if self.gain == "none" else {"weight": Weight((self.size,), "gain", self.weight_of(1.0))}

    def normed(self, path: str, source: str, shape: Sizes, formula: str, shift: str = "", **fields: Any) -> Program:
        """Return the operations of a norm, of which there is only one.

        Args:
            path: The name of the norm's module in the block.
            source: The id of the norm's input.
            shape: The shape of the input.
            formula: The formula without gain and bias, for drawings.
            shift: What is added after the gain, for drawings.
            fields: Further fields of `NormOperation`.
        """
        factor = {"weight": " · w", "1 + weight": " · (1 + w)", "none": ""}[self.gain]
        fields |= {"formula": formula + factor + shift, "gain": self.gain}
        return (NormOperation(path, (source,), shape, "norms", tuple(self.shapes().items()), **fields),)


class LayerNorm(Norm, Component, frozen=True):
    """(x - mean) / sqrt(var + eps) · weight + bias (Ba et al. 2016)."""

    label = "norms"
    centred = True
    rounds = ("cast",)
    notes = ("apart",)
    described = ("eps", "bias")
    forgotten: ClassVar[dict[str, str]] = {
        "bias": "bias of norms dropped",
        "gain": "weight of norms taken for their factor",
        "groups": "heads normed all at once",
    }

    size: Size
    """The number of elements of a row, in all groups together."""
    eps: Positive
    """The number added to the variance."""
    bias: bool = True
    """Whether a bias is added after the gain."""
    gain: Gain = "weight"
    """What the normalised row is multiplied by."""
    groups: Size = 1
    """The number of equal parts of a row. Every part is normalised separately, with its own part of the weight, as in
    StableLM's and Cohere's norms of every head."""
    cast: Literal["kernel", "float32 kernel", "float32"] = "kernel"
    """How the norm is computed. "kernel": by torch's kernel, in the dtype of the input. "float32 kernel": by torch's
    kernel, in at least fp32 (OLMo). "float32": by separate operations, in at least fp32 (Cohere)."""
    apart: bool = False
    """Whether the weights of the groups are separate tensors (StableLM)."""

    def __post_init__(self) -> None:
        _check_groups(self)
        if self.apart and (self.bias or self.gain == "none"):
            raise ConfigError("a norm that stores one tensor per group (apart: true) must have a weight and no bias")

    def small(self, size: int) -> Self:
        groups = _groups(self, size)
        return msgspec.structs.replace(self, size=size, groups=groups)

    def weights(self) -> dict[str, Weight]:
        if self.apart:
            own = Weight((self.size // self.groups,), "gain", self.weight_of(1.0))
            return {f"{group}.weight": own for group in range(self.groups)}
        return self.gains() | ({"bias": bias(self.size)} if self.bias else {})

    def words(self) -> dict[str, Words]:
        kind = "LayerNorm" if self.bias else "LayerNorm without bias"
        return {"norm": Words(kind, kind, f"{kind}, eps {self.eps:g}")}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        kind = "LayerNorm" if self.bias else "LayerNorm, no bias"
        formula = f"(x − mean) / √(var + {self.eps:g})"
        shift = " + b" if self.bias else ""
        # Without a kernel, the centred rows are a tensor, and autograd saves one statistic per group instead of two.
        written = self.cast == "float32"
        statistics = (1 if written else 2) * self.groups
        fields: dict[str, Any] = {"kind": kind, "statistics": statistics, "shift": shift, "centred": written}
        normalised_in = "kernel" if self.cast == "kernel" else "float32"
        return self.normed(path, source, shape, formula, normalised_in=normalised_in, **fields)


class RMSNorm(Norm, Component, frozen=True):
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), computed in at least fp32."""

    label = "norms"
    centred = False
    rounds = ("cast",)
    described = ("eps",)
    forgotten: ClassVar[dict[str, str]] = {
        "gain": "weight of norms taken for their factor",
        "groups": "groups of a row normed all at once",
    }

    size: Size
    """The number of elements of a row, in all groups together."""
    eps: Positive
    """The number added to the mean square."""
    cast: Literal["before_weight", "after_weight"] = "before_weight"
    """When the normalised row is cast back to the model's dtype: before (Llama) or after it is multiplied by the
    weight."""
    gain: Gain = "weight"
    """What the normalised row is multiplied by."""
    groups: Size = 1
    """The number of equal parts of a row. Every part is normalised separately, with its own part of the weight
    (Mamba-2)."""

    def __post_init__(self) -> None:
        _check_groups(self)

    def small(self, size: int) -> Self:
        groups = _groups(self, size)
        return msgspec.structs.replace(self, size=size, groups=groups)

    def weights(self) -> dict[str, Weight]:
        return self.gains()

    def words(self) -> dict[str, Words]:
        return {"norm": Words("RMSNorm", "RMSNorm", f"RMSNorm, eps {self.eps:g}")}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        fields: dict[str, Any] = {"kind": "RMSNorm", "statistics": self.groups}
        fields["normalised_in"] = "input" if self.cast == "before_weight" else "float32"
        return self.normed(path, source, shape, f"x / √(mean(x²) + {self.eps:g})", **fields)


def _check_groups(norm: Any) -> None:
    if norm.size % norm.groups:
        raise ConfigError(f"the norm's size {norm.size} is not divisible by its {norm.groups} groups")


def _groups(norm: Any, size: int) -> int:
    """Return the number of groups of a copy of the norm for rows of `size` elements, with groups of the same width."""
    return 1 if norm.groups == 1 else size * norm.groups // norm.size


def inside(norms: Mapping[str, Norm | None], short: str, whole: str) -> Words:
    """Describe the norms inside a mixer, such as those of queries and keys, for a table and for a sentence.

    Args:
        norms: The norms, by name.
        short: Text that is appended to the description for tables, such as " on dt, b, c".
        whole: What the norms normalise, for the description in a sentence, such as "dt, b and c".
    """
    present = {name: norm for name, norm in norms.items() if norm is not None}
    if not present:
        return Words("none", [])
    described = {name: norm.named() for name, norm in present.items()}
    kinds = " and ".join(dict.fromkeys(words.short for words in described.values()))
    usual = all(words.data == "RMSNorm" for words in described.values())
    eps = " and ".join(dict.fromkeys(f"{norm.eps:g}" for norm in present.values()))
    data: Any = list(present) if usual else {name: words.data for name, words in described.items()}
    return Words(f"{kinds}{short}", data, f"{kinds} on {whole}, eps {eps}")
