"""Mamba-2: a state space model in which each head has one decay rate."""

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Logs, Misread, Mixer, Positive, Size, Weight, bias, divided
from .norms import RMSNorm, inside
from .operations import ActivationOperation, AnyOperation, Product, Program, ScaleOperation, Scan, Sizes, linear, out_of
from .short_convolution import convolve, misread_kernels
from .words import Words

__all__ = ["Mamba2"]

_READ = ("gate", "x", "b", "c", "dt")  # the projections, in the order of their rows
_MIXED = ("x", "b", "c")  # the projections that pass through the convolution


class Mamba2(Mixer, Component, frozen=True):
    """A recurrence in which every head has a state S of shape (head_dim, state_size) (Dao & Gu 2405.21060). At each
    token, the state decays, adds the token's input times its b, and is read by its c:

        S ← e^(−Δ · exp(A_log)) S + Δ x bᵀ,  y = S c + D x

    with Δ = softplus(dt_proj(stream) + dt_bias). x, b and c are projections of the stream that pass through a causal
    convolution and the activation. y is multiplied by silu(gate_proj(stream)). States are computed in at least fp32.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".mamba2"
    axes = ("inner", "states")
    rounds = ("chunk",)
    described = ("state_size", "norm", "bias", "output_bias", "conv_bias")
    forgotten: ClassVar[dict[str, str]] = {
        "bias": "biases into the recurrence dropped",
        "output_bias": "bias out of the recurrence dropped",
        "conv_bias": "biases of convolutions dropped",
        "norm": "norm of the recurrence left out",
        "gated": "gate before the recurrence's norm, not behind",
        "least": "steps of the recurrence with no least",
        "most": "steps of the recurrence with no most",
        "multipliers": "projections of the recurrence not scaled",
    }

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of heads, each with its own state and decay rate."""
    head_dim: Size
    """The number of channels of a head."""
    groups: Size
    """The number of b vectors and of c vectors per token. heads / groups consecutive heads share one."""
    state_size: Size
    """The size of the state per channel of a head, which is also the size of one b or c."""
    kernel: Size
    """The length of the causal convolution's kernel, in tokens."""
    activation: Activation
    """The activation after the convolution."""
    norm: RMSNorm | None = None
    """The norm of y, over all heads together."""
    gated: Literal["before norm", "behind norm"] = "before norm"
    """Whether y is multiplied by the gate before or after its norm."""
    bias: bool = False
    """Whether the projections gate, x, b, c and dt have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    conv_bias: bool = False
    """Whether the convolutions have a bias."""
    least: Annotated[float, msgspec.Meta(ge=0, le=1e30)] = 0.0
    """The lower limit of Δ. Both limits apply only when several tokens are processed at once."""
    most: Positive | None = None
    """The upper limit of Δ."""
    multipliers: tuple[Positive, Positive, Positive, Positive, Positive] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """The factors by which the outputs of the projections gate, x, b, c and dt are multiplied, in the model's dtype
    (Falcon-H1)."""
    chunk: Size = 256
    """The number of tokens that are processed at once. It changes only the rounding."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigError(
                f"the number of heads, {self.heads}, is not divisible by the number of groups, {self.groups}"
            )
        if self.norm is not None and self.norm.size != self.inner:
            raise ConfigError(f"the norm has size {self.norm.size}, but all heads together have dimension {self.inner}")

    @property
    def inner(self) -> int:
        """The width of all heads together, in channels."""
        return self.heads * self.head_dim

    @property
    def states(self) -> int:
        """The number of elements of b (or of c) in all groups together."""
        return self.groups * self.state_size

    @property
    def scaled(self) -> bool:
        """Whether any projection is multiplied by a factor other than 1."""
        return any(factor != 1 for factor in self.multipliers)

    @property
    def widths(self) -> dict[str, int]:
        """The number of rows of every projection, by name."""
        return dict(zip(_READ, (self.inner, self.inner, self.states, self.states, self.heads), strict=True))

    def weights(self) -> dict[str, Weight]:
        weights = {
            f"{name}_proj.weight": Weight((size, self.hidden_size), "reads") for name, size in self.widths.items()
        }
        weights |= {f"{name}_conv.weight": Weight((self.widths[name], self.kernel), "kernel") for name in _MIXED}
        if self.bias:
            weights |= {f"{name}_proj.bias": bias(size) for name, size in self.widths.items()}
        if self.conv_bias:
            weights |= {f"{name}_conv.bias": bias(self.widths[name]) for name in _MIXED}
        weights |= {
            "A_log": Weight((self.heads,), "inner", Logs(1.0, float(self.heads))),
            "D": Weight((self.heads,), "inner", 1.0),
            "dt_bias": Weight((self.heads,), "inner", 1.0),
            "o_proj.weight": Weight((self.hidden_size, self.inner), "writes"),
        }
        return weights | ({"o_proj.bias": bias(self.hidden_size)} if self.output_bias else {})

    def words(self) -> dict[str, Words]:
        heads = f"{self.heads}" if self.groups == 1 else f"{self.heads}/{self.groups}"
        sizes = {name: getattr(self, name) for name in ("heads", "head_dim", "groups", "state_size", "kernel")}
        state = f"state {self.head_dim} × {self.state_size}"
        activation = function_of(self.activation)
        whole = f"Mamba-2, {heads} heads, {state}, convolution of {self.kernel} tokens, {FACTS[activation].words}"
        data = {"kind": "Mamba2", **sizes, "activation": activation}
        return {
            "recurrence": Words(f"Mamba-2 {heads}, {state}", data, whole),
            "norm of recurrence": inside({"y": self.norm}, "", "heads of the recurrence"),
        }

    def biases(self) -> dict[str, Words]:
        return {
            "recurrence": Words("recurrence", self.bias),
            "recurrence output": Words("output of the recurrence", self.output_bias),
            "recurrence convolution": Words("convolution of the recurrence", self.conv_bias),
        }

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"i": self.inner, "n": self.states}

    def share(self, devices: int) -> Self:
        groups = divided(self.groups, devices, "groups of the recurrence")
        norm = self.norm
        if norm is not None:
            in_groups = divided(norm.groups, devices, "groups of the recurrence's norm")
            norm = msgspec.structs.replace(norm, size=norm.size // devices, groups=in_groups)
        return msgspec.structs.replace(self, heads=self.heads // devices, groups=groups, norm=norm)

    def small(self, hidden: int) -> Self:
        groups = min(self.groups, 2)
        heads = groups * min(self.heads // self.groups, 2)
        norm = self.norm
        if norm is not None:
            norm = msgspec.structs.replace(norm, size=heads * self.head_dim, groups=min(norm.groups, groups))
        return msgspec.structs.replace(self, hidden_size=hidden, groups=groups, heads=heads, norm=norm)

    def slips(self) -> dict[str, Self]:
        other: Activation = "gelu" if function_of(self.activation) == "silu" else "silu"
        slips = {"another activation": msgspec.structs.replace(self, activation=other)}
        if self.norm is not None and self.gated == "before norm":
            slips["gate behind the recurrence's norm, not before"] = msgspec.structs.replace(self, gated="behind norm")
        return slips

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        orders: dict[str, dict[str, list[int]]] = {}
        if 1 < self.groups < self.heads:
            group = self.heads // self.groups
            order = [head for first in range(group) for head in range(first, self.heads, group)]
            rows = [head * self.head_dim + at for head in order for at in range(self.head_dim)]
            orders["heads of the recurrence in other groups"] = {
                **dict.fromkeys(("x_proj", "x_conv", "gate_proj", "o_proj"), rows),
                "dt_proj": order,
            }
        return orders

    def misread(self) -> dict[str, Misread]:
        def exchanged(one: str, other: str) -> Misread:
            """Return a function that exchanges the parameters of two projections and of their convolutions.

            A faulty conversion of a checkpoint may make this mistake.
            """
            names = {f"{one}_proj": f"{other}_proj", f"{other}_proj": f"{one}_proj"}
            names |= {f"{one}_conv": f"{other}_conv", f"{other}_conv": f"{one}_conv"} if one in _MIXED else {}
            return lambda own: {
                f"{n}.{w}": own[f"{names[n]}.{w}"] for n in names for w in ("weight", "bias") if f"{n}.{w}" in own
            }

        return {
            "bias of steps dropped": lambda own: {"dt_bias": own["dt_bias"] * 0},
            "logarithms of decays taken for decays": lambda own: {"A_log": own["A_log"].exp()},
            "inputs not passed by the state": lambda own: {"D": own["D"] * 0},
            "gate of the recurrence with the other sign": lambda own: {"gate_proj.weight": -own["gate_proj.weight"]},
            "b and c of the recurrence swapped": exchanged("b", "c"),
            **misread_kernels(*(f"{name}_conv" for name in _MIXED)),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "recurrence", f"{path}.o_proj"
        tokens: Sizes = ("B", "T")
        heads: Sizes = (*tokens, self.heads, self.head_dim)
        inner: Sizes = (*tokens, self.inner)
        group: Sizes = (*tokens, self.groups, self.state_size)
        sizes: dict[str, Sizes] = {"gate": inner, "x": heads, "b": group, "c": group, "dt": (*tokens, self.heads)}
        fused: dict[str, Any] = {"together": f"{path}.read", "fused": True}
        program: list[AnyOperation] = [
            linear(self, f"{name}_proj", path, source, size, row, end, **fused) for name, size in sizes.items()
        ]
        inputs = {name: f"{path}.{name}_proj" for name in sizes}
        if self.scaled:
            for (name, size), factor in zip(sizes.items(), self.multipliers, strict=True):
                fields: dict[str, Any] = {"live_until": end, "factor": factor, "together": f"{path}.scaled"}
                program.append(ScaleOperation(f"{path}.{name}_scaled", (inputs[name],), size, row, **fields))
                inputs[name] = program[-1].id
        for name in _MIXED:
            size, active = sizes[name], f"{path}.{name}_activated"
            program.append(convolve(self, f"{name}_conv", path, inputs[name], size, row, joined=True))
            fields = {"function": self.activation, "live_until": end}
            program.append(ActivationOperation(active, (program[-1].id,), size, row, **fields))
        program.append(self._scan(path, inputs["dt"]))
        last = program[-1].id
        wide: Literal["", "kept"] = "" if self.norm is None else "kept"
        gate = ActivationOperation(f"{path}.gate", (inputs["gate"],), inner, row, function="silu", wide=wide)
        if self.norm is not None and self.gated == "behind norm":
            program += self._normed(self.norm, path, last, inner, kept_wide=True)
            last = program[-1].id
        before = self.norm is not None and self.gated == "before norm"
        program += (gate, Product(f"{path}.gated", (last, gate.id), inner, row, kept_wide=before))
        if self.norm is not None and before:
            program += self._normed(self.norm, path, program[-1].id, inner)
        return (*program, linear(self, "o_proj", path, program[-1].id, shape, row))

    def _scan(self, path: str, dt: str) -> Scan:
        """Return the operation of the recurrence, which computes y. Its inputs are x, b and c after their activations.

        `dt` is the id of the operation that computes dt.
        """
        inputs = (*(f"{path}.{name}_activated" for name in _MIXED), dt)
        own = tuple((name, (self.heads,)) for name in ("A_log", "D", "dt_bias"))
        dim, size, chunk = self.head_dim, self.state_size, self.chunk
        state = dim * size  # the number of elements of a head's state
        per_token = -(-state // chunk)  # the elements of a head's state, divided by the tokens of a chunk
        # The largest of: the weights of pairs of tokens, what the states give to outputs, and its sum with what the
        # chunk gives. Some numbers per head are added to each.
        alive = 5 + max(
            3 * chunk + 2 * (dim + size), 4 * dim + 3 * size + 3 * per_token, 6 * dim + 2 * size + 2 * per_token
        )
        return Scan(
            f"{path}.state",
            inputs,
            ("B", "T", self.inner),
            "recurrence",
            own,
            state=(self.heads, dim, size),
            title="state space",
            formula="S ← e^(−ΔA) S + Δ x bᵀ, S c + D x",
            saved=0,
            products=self.heads * state,
            wide=True,
            kept_wide=True,
            theirs=self.heads * state,
            chunk=chunk,
            # In a chunk: c times b, the result times x, what b adds to the state, and what c reads from it.
            chunk_products=self.heads * chunk * (chunk * (dim + size) + 2 * state),
            between=self.heads * state,
            alive=self.heads * alive,
        )

    def _normed(self, norm: RMSNorm, path: str, source: str, shape: Sizes, **fields: Any) -> list[AnyOperation]:
        """Return the operations of the norm of y, whose input is in at least fp32."""
        program = out_of("recurrence", norm.operations(f"{path}.norm", source, shape))
        return [msgspec.structs.replace(operation, normalised_in="float32", **fields) for operation in program]
