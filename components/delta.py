"""Gated DeltaNet: linear attention in which a token corrects what the state returns for its key."""

from typing import Any, Literal, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .base import Component, Logs, Misread, Mixer, Size, Weight, divided
from .norms import RMSNorm, inside
from .operations import ActivationOperation, AnyOperation, Product, Program, Scan, Sizes, linear, out_of
from .short_convolution import convolve, misread_kernels
from .words import Words

__all__ = ["GatedDeltaNet"]

_CHUNK = 64  # the number of tokens that are processed at once


class GatedDeltaNet(Mixer, Component, frozen=True):
    """A recurrence in which every head has a state S of shape (key_dim, value_dim) (Yang et al. 2412.06464). At every
    token, the state decays. Then the difference between the token's value and the state's value for the token's key
    is added to it. The token's query reads the result:

        S ← eᵍ S,  S ← S + k (β (v − Sᵀk))ᵀ,  y = Sᵀq

    with g = −exp(A_log) · softplus(decay_proj(x) + dt_bias) and β = σ(beta_proj(x)). Queries and keys have length
    1, and queries are divided by √key_dim. All of this is in at least fp32. Before that, queries, keys and values pass
    through a causal convolution and the activation. The y of every head is normalised and multiplied by
    silu(gate_proj(x)).
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".delta"
    axes = ("group", "group_values", "keys", "values")
    rounds = ("fused",)
    described = ("key_dim", "value_dim", "norm")

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of heads, each with its own state and values."""
    key_heads: Size
    """The number of queries and of keys per token. heads / key_heads consecutive heads share one."""
    key_dim: Size
    """The number of elements of a query or key."""
    value_dim: Size
    """The number of elements of a value."""
    kernel: Size
    """The length of the causal convolution's kernel, in tokens. Every channel has its own kernel."""
    activation: Activation
    """The activation after the convolution."""
    norm: RMSNorm
    """The norm of every head's output y."""
    fused: Literal["by part", "by head"] = "by part"
    """What one matrix product computes. "by part": all queries, then all keys, then all values (Qwen3.5). "by head":
    for one key head after the other, its query, key, values and gates, with β and the decays in a second product
    (Qwen3-Next). The field changes only the rounding."""

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ConfigError(f"the number of heads, {self.heads}, is not divisible by key_heads, {self.key_heads}")
        if self.norm.size != self.value_dim:
            raise ConfigError(
                f"the norm has size {self.norm.size}, but must have the size of a head's values, value_dim: "
                f"{self.value_dim}"
            )

    @property
    def group(self) -> int:
        """The number of heads per key head."""
        return self.heads // self.key_heads

    @property
    def group_values(self) -> int:
        """The width of the values of all heads that share a key head."""
        return self.group * self.value_dim

    @property
    def keys(self) -> int:
        """The width of all keys together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values together."""
        return self.heads * self.value_dim

    def weights(self) -> dict[str, Weight]:
        rows = {"q": self.keys, "k": self.keys, "v": self.values}
        hidden = self.hidden_size
        return {
            **{f"{name}_proj.weight": Weight((size, hidden), "reads") for name, size in rows.items()},
            "gate_proj.weight": Weight((self.values, hidden), "reads"),
            "beta_proj.weight": Weight((self.heads, hidden), "reads"),
            "decay_proj.weight": Weight((self.heads, hidden), "reads"),
            **{f"{name}_conv.weight": Weight((size, self.kernel), "kernel") for name, size in rows.items()},
            "A_log": Weight((self.heads,), "inner", Logs(0.01, 16.0)),
            "dt_bias": Weight((self.heads,), "inner", 1.0),
            "o_proj.weight": Weight((hidden, self.values), "writes"),
        }

    def words(self) -> dict[str, Words]:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}/{self.key_heads}"
        sizes = {name: getattr(self, name) for name in ("heads", "key_heads", "key_dim", "value_dim", "kernel")}
        state = f"state {self.key_dim} × {self.value_dim}"
        summary = f"Gated DeltaNet, {heads} heads, {state}, convolution of {self.kernel} tokens"
        activation = function_of(self.activation)
        data = {"kind": "GatedDeltaNet", **sizes, "activation": activation}
        return {
            "recurrence": Words(f"DeltaNet {heads}, {state}", data, f"{summary}, {FACTS[activation].words}"),
            "norm of recurrence": inside({"y": self.norm}, "", "heads of the recurrence"),
        }

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), activation=function_of(self.activation))

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"k": self.keys}

    def share(self, devices: int) -> Self:
        key_heads = divided(self.key_heads, devices, "key heads of the recurrence")
        return msgspec.structs.replace(self, heads=self.heads // devices, key_heads=key_heads)

    def small(self, hidden: int) -> Self:
        key_heads = min(self.key_heads, 2)
        return msgspec.structs.replace(
            self, hidden_size=hidden, key_heads=key_heads, heads=key_heads * min(self.group, 2)
        )

    def slips(self) -> dict[str, Self]:
        other: Activation = "gelu" if function_of(self.activation) == "silu" else "silu"
        return {"another activation": msgspec.structs.replace(self, activation=other)}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        orders: dict[str, dict[str, list[int]]] = {}
        if self.group > 1 and self.key_heads > 1:
            order = [head for first in range(self.group) for head in range(first, self.heads, self.group)]
            rows = [head * self.value_dim + at for head in order for at in range(self.value_dim)]
            orders["heads of the recurrence in other groups"] = {
                **dict.fromkeys(("v_proj", "v_conv", "gate_proj", "o_proj"), rows),
                **dict.fromkeys(("beta_proj", "decay_proj"), order),
            }
        return orders

    def misread(self) -> dict[str, Misread]:
        return {
            "bias of decays dropped": lambda own: {"dt_bias": own["dt_bias"] * 0},
            "logarithms of decays taken for decays": lambda own: {"A_log": own["A_log"].exp()},
            "gate of the recurrence with the other sign": lambda own: {"gate_proj.weight": -own["gate_proj.weight"]},
            "decays and corrections swapped": lambda own: {
                "decay_proj.weight": own["beta_proj.weight"],
                "beta_proj.weight": own["decay_proj.weight"],
            },
            **misread_kernels("q_conv", "k_conv", "v_conv"),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "recurrence", f"{path}.o_proj"
        heads, keys = ("B", "T", self.heads), ("B", "T", self.key_heads, self.key_dim)
        values: Sizes = (*heads, self.value_dim)
        by_head = self.fused == "by head"
        parts: dict[str, Any] = {"together": f"{path}.qkv", "fused": True, "groups": self.key_heads if by_head else 1}
        read = f"{path}.v_activated"
        numbers: dict[str, Any] = {**parts, "together": f"{path}.numbers"} if by_head else {}
        gate: dict[str, Any] = {**parts, "copied": self.group > 1} if by_head else {}
        sizes: dict[str, Sizes] = {"q": keys, "k": keys, "v": values}
        program: list[AnyOperation] = [
            *(linear(self, f"{name}_proj", path, source, size, row, read, **parts) for name, size in sizes.items()),
            linear(self, "beta_proj", path, source, heads, row, end, **numbers),
            linear(self, "decay_proj", path, source, heads, row, end, **numbers),
            linear(self, "gate_proj", path, source, values, row, end, **gate),
        ]
        for name, size in sizes.items():
            program.append(convolve(self, f"{name}_conv", path, f"{path}.{name}_proj", size, row, joined=True))
            active = f"{path}.{name}_activated"
            program.append(
                ActivationOperation(active, (program[-1].id,), size, row, function=self.activation, live_until=end)
            )
        state = (self.heads, self.key_dim, self.value_dim)
        inputs = (*(f"{path}.{name}_activated" for name in sizes), f"{path}.beta_proj", f"{path}.decay_proj")
        own = tuple((name, (self.heads,)) for name in ("A_log", "dt_bias"))
        # In a chunk: keys times keys and queries, the triangular system for values and keys, what keys and queries read
        # from the state, what keys add to it, and the weighted values.
        dk, dv = self.key_dim, self.value_dim
        within = _CHUNK * _CHUNK * (3 * dk + 2 * dv) + 3 * _CHUNK * dk * dv
        scan = Scan(
            f"{path}.state",
            inputs,
            values,
            row,
            own,
            state=state,
            title="gated delta rule",
            formula="S ← eᵍ S + k (β (v − eᵍ Sᵀk))ᵀ, Sᵀq",
            saved=0,
            products=3 * self.heads * dk * dv,
            wide=True,
            theirs=self.heads * dk * dv,
            chunk=_CHUNK,
            chunk_products=self.heads * within,
            spared=self.heads * (_CHUNK * _CHUNK * dk + 2 * _CHUNK * dk * dv),
            alive=self.heads * max(3 * dk + dv + 4 * _CHUNK, 5 * dk + 2 * dv + 2 * _CHUNK),
        )
        program += (scan, *out_of(row, self.norm.operations(f"{path}.norm", scan.id, values)))
        normed = program[-1].id
        opened = ActivationOperation(f"{path}.gate", (f"{path}.gate_proj",), values, row, function="silu", wide="kept")
        gated = Product(f"{path}.gated", (normed, opened.id), values, row)
        return (*program, opened, gated, linear(self, "o_proj", path, gated.id, shape, row))
