"""Mamba: a state space model per channel, whose step size, b and c depend on the token."""

import math
from typing import Any, ClassVar, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Logs, Misread, Mixer, Size, Weight, bias, divided
from .norms import RMSNorm, inside
from .operations import ActivationOperation, AnyOperation, Product, Program, Scan, Sizes, Stream, linear, out_of
from .short_convolution import convolve, misread_kernels
from .words import Words

__all__ = ["Mamba"]

_CHOSEN = ("dt", "b", "c")  # the vectors that differ by token, in the order of the rows of the fused projection
_STEP = math.log(math.expm1(0.01))  # the initial bias of dt_proj, so that the step size is softplus(_STEP) = 0.01


class Mamba(Mixer, Component, frozen=True):
    """A recurrence with a state S of shape (inner, state_size) (Gu & Dao 2312.00752). At each token, the state decays,
    adds each channel's input times the token's b, and is read by its c:

        S ← e^(−Δ · exp(A_log)) ⊙ S + (Δ ⊙ x) bᵀ,  y = S c + D ⊙ x

    with Δ = softplus(dt_proj(dt) + its bias). x has passed through a causal convolution and the activation. dt, b and
    c are projections of x. y is multiplied by silu(gate_proj(stream)). Tokens are processed one after the other, in
    at least fp32, like the state.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".mamba"
    described = ("state_size", "rank", "bias", "conv_bias", "dt_norm", "b_norm", "c_norm")
    forgotten: ClassVar[dict[str, str]] = {
        "bias": "biases of the recurrence dropped",
        "conv_bias": "biases of convolutions dropped",
        "dt_norm": "norm of the state's steps left out",
        "b_norm": "norm of the state's writers left out",
        "c_norm": "norm of the state's readers left out",
    }

    hidden_size: Size
    """The width of the residual stream."""
    inner: Size
    """The number of channels of the recurrence."""
    state_size: Size
    """The size of the state per channel, which is also the size of b and of c."""
    rank: Size
    """The size of dt, from which dt_proj computes the step size of every channel."""
    kernel: Size
    """The length of the causal convolution's kernel, in tokens."""
    activation: Activation
    """The activation after the convolution."""
    dt_norm: RMSNorm | None = None
    """The norm of dt, before dt_proj (Jamba, Falcon Mamba)."""
    b_norm: RMSNorm | None = None
    """The norm of b."""
    c_norm: RMSNorm | None = None
    """The norm of c."""
    bias: bool = False
    """Whether the input projections (x and gate) and the output projection have a bias."""
    conv_bias: bool = False
    """Whether the convolution has a bias."""

    def __post_init__(self) -> None:
        for name, size in self.chosen.items():
            norm: RMSNorm | None = getattr(self, f"{name}_norm")
            if norm is not None and norm.size != size:
                raise ConfigError(f"{name}_norm has size {norm.size}, but {name} has dimension {size}")

    @property
    def chosen(self) -> dict[str, int]:
        """The sizes of dt, b and c, by name."""
        return dict(zip(_CHOSEN, (self.rank, self.state_size, self.state_size), strict=True))

    def weights(self) -> dict[str, Weight]:
        weights = {f"{name}_proj.weight": Weight((self.inner, self.hidden_size), "reads") for name in ("x", "gate")}
        if self.bias:
            weights |= {f"{name}_proj.bias": bias(self.inner) for name in ("x", "gate")}
        weights["x_conv.weight"] = Weight((self.inner, self.kernel), "kernel")
        if self.conv_bias:
            weights["x_conv.bias"] = bias(self.inner)
        weights |= {
            f"{_projection_of(name)}.weight": Weight((size, self.inner), "inner") for name, size in self.chosen.items()
        }
        weights |= {
            "dt_proj.weight": Weight((self.inner, self.rank), "inner"),
            "dt_proj.bias": Weight((self.inner,), "bias", _STEP),
            "A_log": Weight((self.inner, self.state_size), "inner", Logs(1.0, float(self.state_size))),
            "D": Weight((self.inner,), "inner", 1.0),
            "o_proj.weight": Weight((self.hidden_size, self.inner), "writes"),
        }
        return weights | ({"o_proj.bias": bias(self.hidden_size)} if self.bias else {})

    def words(self) -> dict[str, Words]:
        sizes = {name: getattr(self, name) for name in ("inner", "state_size", "rank", "kernel")}
        state, activation = f"state {self.inner:,} × {self.state_size}", function_of(self.activation)
        whole = f"Mamba, {state}, steps of rank {self.rank}, convolution of {self.kernel} tokens"
        norms = {name: getattr(self, f"{name}_norm") for name in _CHOSEN}
        return {
            "recurrence": Words(
                f"Mamba, {state}",
                {"kind": "Mamba", **sizes, "activation": activation},
                f"{whole}, {FACTS[activation].words}",
            ),
            "norm of recurrence": inside(norms, " on dt, b, c", "dt, b and c"),
        }

    def biases(self) -> dict[str, Words]:
        return {
            "recurrence": Words("recurrence", self.bias),
            "recurrence convolution": Words("convolution of the recurrence", self.conv_bias),
        }

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"i": self.inner, "n": self.state_size, "r": self.rank}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, inner=divided(self.inner, devices, "channels of the recurrence"))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, inner=min(self.inner, 2 * hidden))

    def slips(self) -> dict[str, Self]:
        other: Activation = "gelu" if function_of(self.activation) == "silu" else "silu"
        return {"another activation": msgspec.structs.replace(self, activation=other)}

    def misread(self) -> dict[str, Misread]:
        def exchanged(one: str, other: str) -> Misread:
            """Return a function that exchanges the parameters of two linear layers, as a faulty conversion may do."""
            names = {one: other, other: one}
            return lambda own: {
                f"{n}.{w}": own[f"{names[n]}.{w}"] for n in names for w in ("weight", "bias") if f"{n}.{w}" in own
            }

        return {
            "bias of steps dropped": lambda own: {"dt_proj.bias": own["dt_proj.bias"] * 0},
            "logarithms of decays taken for decays": lambda own: {"A_log": own["A_log"].exp()},
            "inputs not passed by the state": lambda own: {"D": own["D"] * 0},
            "inputs of the recurrence and their gate swapped": exchanged("x_proj", "gate_proj"),
            "b and c of the recurrence swapped": exchanged("b_proj", "c_proj"),
            **misread_kernels("x_conv"),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "recurrence", f"{path}.o_proj"
        tokens: Sizes = ("B", "T")
        inner: Sizes = (*tokens, self.inner)
        read: dict[str, Any] = {"together": f"{path}.read", "fused": True}
        chosen: dict[str, Any] = {"together": f"{path}.chosen", "fused": True, "by_channel": True}
        program: list[AnyOperation] = [
            linear(self, f"{name}_proj", path, source, inner, row, end, **read) for name in ("x", "gate")
        ]
        program.append(convolve(self, "x_conv", path, f"{path}.x_proj", inner, row))
        active = f"{path}.x_activated"
        program.append(
            ActivationOperation(active, (program[-1].id,), inner, row, function=self.activation, live_until=end)
        )
        program.append(Stream(f"{path}.x", (active,), inner, row))
        inputs = {name: f"{path}.{_projection_of(name)}" for name in _CHOSEN}
        widths: dict[str, Sizes] = {name: (*tokens, size) for name, size in self.chosen.items()}
        program += [
            linear(self, _projection_of(name), path, active, widths[name], row, end, **chosen) for name in _CHOSEN
        ]
        for name, size in widths.items():
            norm: RMSNorm | None = getattr(self, f"{name}_norm")
            if norm is not None:
                normed = out_of(row, norm.operations(f"{path}.{name}_norm", inputs[name], size))
                program += (msgspec.structs.replace(operation, live_until=end) for operation in normed)
                inputs[name] = program[-1].id
        program.append(linear(self, "dt_proj", path, inputs["dt"], inner, row, end))
        scan = Scan(
            f"{path}.state",
            (f"{path}.x", program[-1].id, inputs["b"], inputs["c"]),
            inner,
            row,
            tuple((name, self.shapes()[name]) for name in ("A_log", "D")),
            state=(self.inner, self.state_size),
            title="selective state space",
            formula="S ← e^(−ΔA) ⊙ S + (Δ ⊙ x) bᵀ, S c + D ⊙ x",
            saved=0,
            products=self.inner * self.state_size,
            wide=True,
            kept_wide=True,
            theirs=self.inner * self.state_size,
            again=True,
            alive=self.inner * (3 * self.state_size + 1),  # the decays, the update of the state, and its factors
        )
        opened = ActivationOperation(f"{path}.gate", (f"{path}.gate_proj",), inner, row, function="silu")
        program += (scan, opened, Product(f"{path}.gated", (scan.id, opened.id), inner, row))
        return (*program, linear(self, "o_proj", path, program[-1].id, shape, row))


def _projection_of(name: str) -> str:
    """Return the name of the linear layer that computes dt, b or c from x."""
    return "dt_in_proj" if name == "dt" else f"{name}_proj"
