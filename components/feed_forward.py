"""Plain and gated feed-forwards."""

from typing import Annotated, Any, ClassVar, Self, get_args

import msgspec

from ..errors import ConfigError
from .activations import FACTS, LEARNT, Activation, function_of
from .base import Arithmetic, Component, Mixer, Positive, Size, Weight, bias, divided
from .norms import Norm
from .operations import (
    ActivationOperation,
    AnyOperation,
    Cap,
    Given,
    Product,
    Program,
    ScaleOperation,
    Shift,
    Sizes,
    Sparse,
    linear,
    out_of,
)
from .words import Words, plain_number

__all__ = ["ExpertLatent", "FeedForward", "GatedFeedForward", "LayerInput"]

_USUAL = {"activation": ("the activation {}", tuple(name for name in get_args(Activation) if name not in LEARNT))}


class FeedForward(Mixer, Component, frozen=True):
    """A plain feed-forward, down(activation(up(x))). Some activations have learnt parameters (`activations.LEARNT`)."""

    label = "feed-forward"
    slot = "feed_forward"
    rounds = ("arithmetic",)
    notes = ("inside",)
    described = ("intermediate_size", "activation", "up_bias", "down_bias")
    usual: ClassVar[dict[str, Any]] = _USUAL
    forgotten: ClassVar[dict[str, str]] = {
        "up_bias": "biases into the feed-forward dropped",
        "down_bias": "bias out of the feed-forward dropped",
    }

    hidden_size: Size
    """The width of the residual stream."""
    intermediate_size: Size
    """The number of hidden units."""
    activation: Activation
    """The activation of the hidden units."""
    up_bias: bool = False
    """Whether the up projection has a bias."""
    down_bias: bool = False
    """Whether the down projection has a bias."""
    arithmetic: Arithmetic = "linear"
    """How the projections multiply and add their bias."""
    inside: bool = False
    """Whether the feed-forward reads and writes a latent of the component that contains it, instead of the residual
    stream."""

    def weights(self) -> dict[str, Weight]:
        weights = {
            "up_proj.weight": Weight((self.intermediate_size, self.hidden_size), "inner" if self.inside else "reads"),
            "down_proj.weight": Weight(
                (self.hidden_size, self.intermediate_size), "inner" if self.inside else "writes"
            ),
        }
        if self.up_bias:
            weights["up_proj.bias"] = bias(self.intermediate_size)
        if self.down_bias:
            weights["down_proj.bias"] = bias(self.hidden_size)
        learnt = LEARNT.get(self.activation, {})
        return weights | {f"activation.{name}": Weight((1,), "inner", start) for name, start in learnt.items()}

    def words(self) -> dict[str, Words]:
        return _words(self, "plain", "plain")

    def biases(self) -> dict[str, Words]:
        return {"up": Words("up", self.up_bias), "down": Words("down", self.down_bias)}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, intermediate_size=min(2 * hidden, UNITS))

    def slips(self) -> dict[str, Self]:
        return {"another activation": msgspec.structs.replace(self, activation=_another(self.activation))}

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"f": self.intermediate_size}

    def share(self, devices: int) -> Self:
        units = divided(self.intermediate_size, devices, "units of the feed-forward")
        return msgspec.structs.replace(self, intermediate_size=units)

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        inner: Sizes = (*shape[:-1], self.intermediate_size)
        row, learnt = "feed-forward", LEARNT.get(self.activation, {})
        active = f"{path}.activation" if learnt else f"{path}.activated"
        numbers = tuple((name, (1,)) for name in learnt)
        up = linear(self, "up_proj", path, source, inner, row)
        return (
            up,
            ActivationOperation(active, (up.id,), inner, row, numbers, function=self.activation),
            linear(self, "down_proj", path, active, shape, row),
        )


class ExpertLatent(Component, frozen=True):
    """The projections between the residual stream and a narrower latent, which experts read and write (Nemotron 3
    Super).
    """

    label = FeedForward.label
    forgotten: ClassVar[dict[str, str]] = {"bias": "biases around the experts' latent dropped"}

    hidden_size: Size
    """The width of the residual stream."""
    width: Size
    """The width of the latent."""
    bias: bool = False
    """Whether both projections have a bias."""

    def weights(self) -> dict[str, Weight]:
        weights = {
            "down_proj.weight": Weight((self.width, self.hidden_size), "reads"),
            "up_proj.weight": Weight((self.hidden_size, self.width), "writes"),
        }
        more = {"down_proj.bias": bias(self.width), "up_proj.bias": bias(self.hidden_size)} if self.bias else {}
        return weights | more

    def words(self) -> dict[str, Words]:
        biases = ", biases" if self.bias else ""
        return {"experts' latent": Words(f"{self.width:,}{biases}", {"width": self.width, "bias": self.bias})}


class GatedFeedForward(Mixer, Component, frozen=True):
    """A gated feed-forward, down(activation(gate(x)) · up(x)) (Shazeer 2002.05202), called SwiGLU with silu."""

    label = "feed-forward"
    slot = "feed_forward"
    rounds = ("arithmetic", "fused", "down_turned")
    described = ("intermediate_size", "activation", "up_bias", "down_bias")
    usual: ClassVar[dict[str, Any]] = _USUAL
    forgotten: ClassVar[dict[str, str]] = {
        "up_bias": "biases into the feed-forward dropped",
        "down_bias": "bias out of the feed-forward dropped",
        "limit": "gate and up not limited",
        "up_shift": "up taken as it is, not one more",
        "inner_norm": "norm before the feed-forward's output left out",
        "sparsity": "all units of the feed-forward active",
        "gate_multiplier": "gate of the feed-forward not scaled",
    }

    hidden_size: Size
    """The width of the residual stream."""
    intermediate_size: Size
    """The number of hidden units."""
    activation: Activation
    """The activation of the gate."""
    up_bias: bool = False
    """Whether the gate and up projections have a bias."""
    down_bias: bool = False
    """Whether the down projection has a bias."""
    limit: Positive | None = None
    """With l, gate(x) is limited to at most l, and up(x) to -l … l (gpt-oss 2508.10925)."""
    up_shift: float = 0.0
    """A number that is added to up(x) after the limit (gpt-oss)."""
    inner_norm: Norm | None = None
    """The norm of the product of gate and up, before the down projection (BitNet)."""
    sparsity: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    """With s, about the fraction s of a token's hidden units is 0: gate(x) becomes max(gate(x) − threshold, 0). The
    threshold is mean + Φ⁻¹(s) · standard deviation of the token's gate(x) (Gemma 3n)."""
    gate_multiplier: Positive = 1.0
    """The factor by which gate(x) is multiplied, before `limit` (Falcon-H1)."""
    arithmetic: Arithmetic = "linear"
    """How the projections multiply and add their bias."""
    fused: bool = False
    """Whether gate(x) and up(x) are computed in one matrix product."""
    down_turned: bool = False
    """Whether the down projection's weight, and no other, is stored as [in, out] (DBRX)."""

    def __post_init__(self) -> None:
        if self.activation in LEARNT:
            raise ConfigError(
                f"the activation {self.activation} has parameters, which a gated feed-forward does not support"
            )
        if self.inner_norm is not None and self.inner_norm.size != self.intermediate_size:
            raise ConfigError(
                f"inner_norm has size {self.inner_norm.size}, but intermediate_size is {self.intermediate_size}"
            )

    def _norm_of(self, units: int) -> Norm | None:
        """Return the inner norm of a copy with another number of hidden units, or None if there is no such norm."""
        return None if self.inner_norm is None else self.inner_norm.small(units)

    def weights(self) -> dict[str, Weight]:
        inner = Weight((self.intermediate_size, self.hidden_size), "reads")
        weights = {
            "gate_proj.weight": inner,
            "up_proj.weight": inner,
            "down_proj.weight": Weight((self.hidden_size, self.intermediate_size), "writes"),
        }
        if self.up_bias:
            weights |= {"gate_proj.bias": bias(self.intermediate_size), "up_proj.bias": bias(self.intermediate_size)}
        if self.down_bias:
            weights["down_proj.bias"] = bias(self.hidden_size)
        return weights

    def words(self) -> dict[str, Words]:
        return _words(self, "gated", FACTS[self.activation].gated)

    def biases(self) -> dict[str, Words]:
        return {"up": Words("gate, up", self.up_bias, "gate and up"), "down": Words("down", self.down_bias)}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def small(self, hidden: int) -> Self:
        units = min(2 * hidden, UNITS)
        norm = self._norm_of(units)
        return msgspec.structs.replace(self, hidden_size=hidden, intermediate_size=units, inner_norm=norm)

    def slips(self) -> dict[str, Self]:
        return {"another activation": msgspec.structs.replace(self, activation=_another(self.activation))}

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"f": self.intermediate_size}

    def share(self, devices: int) -> Self:
        units = divided(self.intermediate_size, devices, "units of the feed-forward")
        return msgspec.structs.replace(self, intermediate_size=units, inner_norm=self._norm_of(units))

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        inner: Sizes = (*shape[:-1], self.intermediate_size)
        row, active, gated = "feed-forward", f"{path}.activated", f"{path}.gated"
        together: dict[str, Any] = {
            "together": f"{path}.both" if self.fused else "",
            "fused": self.fused,
            "joined": self.fused,
        }
        gate = linear(self, "gate_proj", path, source, inner, row, **together)
        up = linear(self, "up_proj", path, source, inner, row, **together)
        program: list[AnyOperation] = [gate]
        if self.gate_multiplier != 1:
            program.append(ScaleOperation(f"{path}.gate_scaled", (gate.id,), inner, row, factor=self.gate_multiplier))
        if self.sparsity is not None:
            program.append(Sparse(f"{path}.gate_sparse", (gate.id,), inner, row, share=self.sparsity))
        if self.limit is not None:
            program.append(Cap(f"{path}.gate_limited", (program[-1].id,), inner, row, limit=self.limit, hard=True))
        program += [ActivationOperation(active, (program[-1].id,), inner, row, function=self.activation), up]
        if self.limit is not None:
            program.append(Cap(f"{path}.up_limited", (up.id,), inner, row, limit=self.limit, hard=True))
        if self.up_shift:
            program.append(Shift(f"{path}.up_shifted", (program[-1].id,), inner, row, number=self.up_shift))
        program.append(Product(gated, (active, program[-1].id), inner, row, in_place=not self.fused))
        if self.inner_norm is not None:
            program += out_of(row, self.inner_norm.operations(f"{path}.inner_norm", gated, inner))
        return (*program, linear(self, "down_proj", path, program[-1].id, shape, row))


class LayerInput(Mixer, Component, frozen=True):
    """down(activation(gate(x)) · e), where e is the token's input for this layer, from the model's `LayerEmbedding`
    (Gemma 3n).
    """

    label = "layer inputs"
    slot = "layer_input"
    described = ("width", "activation")
    usual: ClassVar[dict[str, Any]] = _USUAL

    hidden_size: Size
    """The width of the residual stream."""
    width: Size
    """The number of elements of the layer's input, e."""
    activation: Activation
    """The activation of the gate."""

    def weights(self) -> dict[str, Weight]:
        return {
            "gate_proj.weight": Weight((self.width, self.hidden_size), "reads"),
            "down_proj.weight": Weight((self.hidden_size, self.width), "writes"),
        }

    def words(self) -> dict[str, Words]:
        function = function_of(self.activation)
        data = {"width": self.width, "activation": function}
        text = f"{plain_number(self.width)} of the layer's own"
        return {"layer input": Words(text, data, f"{text}, gated by {FACTS[function].words}")}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, width=min(self.width, FEW))

    def slips(self) -> dict[str, Self]:
        return {"another activation": msgspec.structs.replace(self, activation=_another(self.activation))}

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"e": self.width}

    def share(self, devices: int) -> Self:  # noqa: ARG002 - every GPU has all of it
        return self

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        inner: Sizes = (*shape[:-1], self.width)
        row, given, active = "layer inputs", f"{path}.given", f"{path}.activated"
        gate = linear(self, "gate_proj", path, source, inner, row)
        return (
            gate,
            ActivationOperation(active, (gate.id,), inner, row, function=self.activation),
            Given(given, (LAYER_INPUTS,), inner, row, words="the layer's own input"),
            Product(f"{path}.gated", (active, given), inner, row, in_place=True),
            linear(self, "down_proj", path, f"{path}.gated", shape, row),
        )


FEW = 8  # the width of a layer's input in a small copy
UNITS = 640
"""The largest number of hidden units in a small copy. The stream of a small copy may be wide, because some families
have heads of width 256."""

LAYER_INPUTS = "layer_inputs.summed"
"""The id of the operation that computes the additional inputs of all layers (`LayerEmbedding`)."""


def _another(activation: Activation) -> Activation:
    """Return a wrong activation, as a faulty implementation may use it.

    This is gelu_tanh if the right activation is GELU, and otherwise GELU.
    gelu_10 is treated like GELU, because it equals GELU below 10.
    """
    return "gelu_tanh" if function_of(activation) in ("gelu", "gelu_10") else "gelu"


def _words(node: FeedForward | GatedFeedForward, kind: str, short: str) -> dict[str, Words]:
    function, width = function_of(node.activation), node.intermediate_size
    whole = f"{kind}, {node.activation}, {width:,}"
    return {
        "feed-forward": Words(f"{short} {width:,}", {"kind": kind, "width": width}, whole),
        "activation": Words(FACTS[function].words, function),
    }
