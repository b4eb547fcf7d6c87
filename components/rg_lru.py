"""The real-gated linear recurrent unit (RG-LRU) of Griffin, with its convolution and output gate."""

from typing import Any, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Logs, Misread, Mixer, Size, Weight, bias, divided
from .operations import ActivationOperation, Linear, Product, Program, Scan, Sizes, linear
from .short_convolution import convolve, misread_kernels
from .words import Words

__all__ = ["RGLRU"]

_GATES = ("input_gate", "decay_gate")


class RGLRU(Mixer, Component, frozen=True):
    """A recurrence whose state h has one number per channel (De et al. 2402.19427). One gate controls how fast a
    channel decays, and another how much of its input is added:

        a = e^(−8 · softplus(decay) ⊙ σ(decay_gate(x))),  h ← a ⊙ h + √(1 − a²) ⊙ σ(input_gate(x)) ⊙ x

    x is a projection that has passed through a causal convolution. For the first token of a text, a is 0. h is
    multiplied by activation(gate_proj(stream)). The state is in at least fp32. All linear layers and the convolution
    have biases.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".rg_lru"
    described = ("inner", "heads", "kernel", "activation")
    axes = ("units", "channels")

    hidden_size: Size
    """The width of the residual stream."""
    inner: Size
    """The number of channels of the recurrence."""
    heads: Size
    """The number of equal parts of the channels. In both gates, every part has its own matrix."""
    kernel: Size
    """The length of the causal convolution's kernel, in tokens. Every channel has its own kernel."""
    activation: Activation
    """The activation of gate_proj."""

    def __post_init__(self) -> None:
        if self.inner % self.heads:
            raise ConfigError(
                f"the number of channels, {self.inner}, is not divisible by the number of heads, {self.heads}"
            )

    @property
    def units(self) -> int:
        """The number of rows of one head's matrix in a gate, inner / heads."""
        return self.inner // self.heads

    @property
    def channels(self) -> int:
        """The number of columns of one head's matrix in a gate, which equals the number of rows."""
        return self.units

    def weights(self) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        for name in ("x_proj", "gate_proj"):
            weights |= {f"{name}.weight": Weight((self.inner, self.hidden_size), "reads")}
            weights |= {f"{name}.bias": bias(self.inner)}
        weights["x_conv.weight"] = Weight((self.inner, self.kernel), "kernel")
        weights["x_conv.bias"] = bias(self.inner)
        for name in _GATES:
            weights[f"{name}.weight"] = Weight((self.heads, self.units, self.channels), "inner")
            weights[f"{name}.bias"] = bias(self.inner)
        # With an open gate, 0.5 to 0.99 of h remain at the start of training.
        weights["decay"] = Weight((self.inner,), "inner", Logs(0.001, 0.1))
        weights["o_proj.weight"] = Weight((self.hidden_size, self.inner), "writes")
        weights["o_proj.bias"] = bias(self.hidden_size)
        return weights

    def words(self) -> dict[str, Words]:
        sizes = {name: getattr(self, name) for name in ("inner", "heads", "kernel")}
        data = {"kind": "RG-LRU", **sizes, "activation": function_of(self.activation)}
        summary = f"RG-LRU, {self.inner:,} channels, gates of {self.heads} heads, convolution of {self.kernel} tokens"
        return {
            "recurrence": Words(
                f"RG-LRU, state {self.inner:,}", data, f"{summary}, {FACTS[function_of(self.activation)].words}"
            )
        }

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"i": self.inner, "u": self.units}

    def share(self, devices: int) -> Self:
        heads = divided(self.heads, devices, "heads of the recurrence")
        return msgspec.structs.replace(self, heads=heads, inner=heads * self.units)

    def small(self, hidden: int) -> Self:
        heads = min(self.heads, 2)
        return msgspec.structs.replace(self, hidden_size=hidden, heads=heads, inner=heads * max(hidden // heads, 1))

    def slips(self) -> dict[str, Self]:
        other: Activation = "silu" if function_of(self.activation) == "gelu" else "gelu"
        return {"another activation": msgspec.structs.replace(self, activation=other)}

    def misread(self) -> dict[str, Misread]:
        def exchanged(one: str, other: str) -> Misread:
            """Return a function that exchanges the parameters of two linear layers, as a faulty conversion may do."""
            names = {one: other, other: one}
            return lambda own: {f"{n}.{w}": own[f"{names[n]}.{w}"] for n in names for w in ("weight", "bias")}

        return {
            "logarithms of decays taken for decays": lambda own: {"decay": own["decay"].exp()},
            "sign of the decays' gate turned": lambda own: {
                f"decay_gate.{w}": -own[f"decay_gate.{w}"] for w in ("weight", "bias")
            },
            "gates of inputs and of decays swapped": exchanged(*_GATES),
            "matrices of the recurrence's gates the other way round": lambda own: {
                f"{n}.weight": own[f"{n}.weight"].transpose(1, 2) for n in _GATES
            },
            "inputs of the recurrence and their gate swapped": exchanged("x_proj", "gate_proj"),
            **misread_kernels("x_conv"),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "recurrence", f"{path}.o_proj"
        inner: Sizes = ("B", "T", self.inner)
        gate = linear(self, "gate_proj", path, source, inner, row, end)
        opened = ActivationOperation(f"{path}.gate", (gate.id,), inner, row, function=self.activation, live_until=end)
        x = linear(self, "x_proj", path, source, inner, row)
        mixed = convolve(
            self, "x_conv", path, x.id, inner, row, carried=self.kernel - 1, pads_short=False, live_until=end
        )
        fields: dict[str, Any] = {"inputs_wide": self.channels, "together": f"{path}.gates", "by_channel": True}
        gates = [
            Linear(
                f"{path}.{name}",
                (mixed.id,),
                inner,
                row,
                (("weight", (self.heads, self.units, self.channels)), ("bias", (self.inner,))),
                live_until=end,
                **fields,
            )
            for name in _GATES
        ]
        scan = Scan(
            f"{path}.state",
            (mixed.id, *(gate.id for gate in gates)),
            inner,
            row,
            (("decay", (self.inner,)),),
            state=(self.inner,),
            title="real-gated linear recurrence",
            formula="h ← a ⊙ h + √(1 − a²) ⊙ σ(i) ⊙ x, a = e^(−8 softplus(decay) σ(r))",
            saved=0,
            wide=True,
            theirs=self.inner,
            again=True,
            narrow=True,
            alive=4 * self.inner,
        )
        product = Product(f"{path}.gated", (scan.id, opened.id), inner, row)
        return (gate, opened, x, mixed, *gates, scan, product, linear(self, "o_proj", path, product.id, shape, row))
