"""Mamba-2: a state space model in which every head has one decay rate. No torch."""

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Logs, Misread, Mixer, Positive, Size, Weight, bias, divided
from .norms import RMSNorm, inside
from .operations import Activation as ActivationOperation
from .operations import AnyOperation, Product, Program, Scale, Scan, Sizes, linear, out_of
from .short_convolution import convolve, misread_kernels
from .words import Words

__all__ = ["Mamba2"]

_READ = ("gate", "x", "b", "c", "dt")  # the projections, in the order of their rows
_MIXED = ("x", "b", "c")  # the projections that pass through the convolution


class Mamba2(Mixer, Component, frozen=True):
    """A recurrence in which every head has a state S of shape (head_dim, state_size) (Dao & Gu 2405.21060).

    At every token, the state decays, adds the token's input times its b, and is read by its c:

        S ← e^(−Δ · exp(A_log)) S + Δ x bᵀ,  y = S c + D x

    with Δ = softplus(dt_proj(stream) + dt_bias). x, b and c are projections of the stream that pass through a causal
    convolution and the activation. y is multiplied by silu(gate_proj(stream)). States are computed in at least fp32.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = "gptkit.modules.mamba2"
    axes = ("inner", "states")
    rounds = ("chunk",)
    tells = ("state_size", "norm", "bias", "output_bias", "conv_bias")
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
    """The number of heads."""
    head_dim: Size
    """The number of channels per head."""
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
    """The lower limit of Δ. Both limits apply only when several tokens are read at once."""
    most: Positive | None = None
    """The upper limit of Δ."""
    multipliers: tuple[Positive, Positive, Positive, Positive, Positive] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """The factors of the projections gate, x, b, c and dt, applied in the model's dtype (Falcon-H1)."""
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
        """The width of all heads together."""
        return self.heads * self.head_dim

    @property
    def states(self) -> int:
        """The width of b, or of c, in all groups together."""
        return self.groups * self.state_size

    @property
    def scaled(self) -> bool:
        """Whether any projection is multiplied by a factor other than 1."""
        return any(each != 1 for each in self.multipliers)

    @property
    def widths(self) -> dict[str, int]:
        """The number of rows of every projection."""
        return dict(zip(_READ, (self.inner, self.inner, self.states, self.states, self.heads), strict=True))

    def weights(self) -> dict[str, Weight]:
        found = {f"{name}_proj.weight": Weight((size, self.hidden_size), "reads") for name, size in self.widths.items()}
        found |= {f"{name}_conv.weight": Weight((self.widths[name], self.kernel), "kernel") for name in _MIXED}
        if self.bias:
            found |= {f"{name}_proj.bias": bias(size) for name, size in self.widths.items()}
        if self.conv_bias:
            found |= {f"{name}_conv.bias": bias(self.widths[name]) for name in _MIXED}
        found |= {
            "A_log": Weight((self.heads,), "inner", Logs(1.0, float(self.heads))),
            "D": Weight((self.heads,), "inner", 1.0),
            "dt_bias": Weight((self.heads,), "inner", 1.0),
            "o_proj.weight": Weight((self.hidden_size, self.inner), "writes"),
        }
        return found | ({"o_proj.bias": bias(self.hidden_size)} if self.output_bias else {})

    def words(self) -> dict[str, Words]:
        heads = f"{self.heads}" if self.groups == 1 else f"{self.heads}/{self.groups}"
        sizes = {name: getattr(self, name) for name in ("heads", "head_dim", "groups", "state_size", "kernel")}
        state = f"state {self.head_dim} × {self.state_size}"
        activation = function_of(self.activation)
        told = f"Mamba-2, {heads} heads, {state}, convolution of {self.kernel} tokens, {FACTS[activation].words}"
        data = {"kind": "Mamba2", **sizes, "activation": activation}
        return {
            "recurrence": Words(f"Mamba-2 {heads}, {state}", data, told),
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
        found = {"another activation": msgspec.structs.replace(self, activation=other)}
        if self.norm is not None and self.gated == "before norm":
            behind = msgspec.structs.replace(self, gated="behind norm")
            found["gate behind the recurrence's norm, not before"] = behind
        return found

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        found: dict[str, dict[str, list[int]]] = {}
        if 1 < self.groups < self.heads:
            group = self.heads // self.groups
            order = [head for each in range(group) for head in range(each, self.heads, group)]
            rows = [head * self.head_dim + at for head in order for at in range(self.head_dim)]
            found["heads of the recurrence in other groups"] = {
                **dict.fromkeys(("x_proj", "x_conv", "gate_proj", "o_proj"), rows),
                "dt_proj": order,
            }
        return found

    def misread(self) -> dict[str, Misread]:
        def exchanged(one: str, other: str) -> Misread:
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
        parts: dict[str, Any] = {"together": f"{path}.read", "fused": True}
        found: list[AnyOperation] = [
            linear(self, f"{name}_proj", path, source, size, row, end, **parts) for name, size in sizes.items()
        ]
        made = {name: f"{path}.{name}_proj" for name in sizes}
        if self.scaled:
            made = {name: f"{path}.{name}_scaled" for name in sizes}
            for (name, size), factor in zip(sizes.items(), self.multipliers, strict=True):
                read, beside = (f"{path}.{name}_proj",), f"{path}.scaled"
                found.append(Scale(made[name], read, size, row, held=end, factor=factor, together=beside))
        for name in _MIXED:
            size = sizes[name]
            found.append(convolve(self, f"{name}_conv", path, made[name], size, row, joined=True))
            active = f"{path}.{name}_activated"
            found.append(ActivationOperation(active, (found[-1].id,), size, row, function=self.activation, held=end))
        inputs = (*(f"{path}.{name}_activated" for name in _MIXED), made["dt"])
        own = tuple((name, (self.heads,)) for name in ("A_log", "D", "dt_bias"))
        wide, long, chunk = self.head_dim, self.state_size, self.chunk
        kept = -(-wide * long // chunk)  # the size of a state, divided over the tokens of a chunk
        scan = Scan(
            f"{path}.state",
            inputs,
            inner,
            row,
            own,
            state=(self.heads, wide, long),
            title="state space",
            formula="S ← e^(−ΔA) S + Δ x bᵀ, S c + D x",
            saved=0,
            products=self.heads * wide * long,
            wide=True,
            kept_wide=True,
            theirs=self.heads * wide * long,
            chunk=chunk,
            # The products of a chunk: c with b, the result with x, the update of the state, and the state read by c.
            chunk_products=self.heads * chunk * (chunk * (wide + long) + 2 * wide * long),
            between=self.heads * wide * long,
            # The largest of three steps: weights of pairs, results of states, and their sum with the result of a chunk.
            alive=self.heads
            * (5 + max(3 * chunk + 2 * (wide + long), 4 * wide + 3 * long + 3 * kept, 6 * wide + 2 * long + 2 * kept)),
        )
        found.append(scan)
        narrow = self.norm is None
        opened = ActivationOperation(
            f"{path}.gate", (made["gate"],), inner, row, function="silu", wide="" if narrow else "kept"
        )
        last = scan.id
        if self.norm is not None and self.gated == "behind norm":
            found += self._normed(self.norm, path, last, inner, kept_wide=True)
            last = found[-1].id
        before = self.norm is not None and self.gated == "before norm"
        found += (opened, Product(f"{path}.gated", (last, opened.id), inner, row, kept_wide=before))
        last = found[-1].id
        if self.norm is not None and before:
            found += self._normed(self.norm, path, last, inner)
        return (*found, linear(self, "o_proj", path, found[-1].id, shape, row))

    def _normed(self, norm: RMSNorm, path: str, source: str, shape: Sizes, **fields: Any) -> list[AnyOperation]:
        """Return the operations of the norm, whose input is in at least fp32."""
        own = out_of("recurrence", norm.operations(f"{path}.norm", source, shape))
        return [msgspec.structs.replace(each, lies="float32", **fields) for each in own]
