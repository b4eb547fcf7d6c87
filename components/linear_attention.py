"""Linear attention: its weights are a polynomial of the scores, so a fixed-size state replaces the cache."""

from typing import Any, ClassVar, Self

import msgspec

from ..errors import ConfigError
from .base import Component, Misread, Mixer, Scale, Size, Weight, bias, divided
from .norms import Norm, inside
from .operations import AnyOperation, Program, Rotate, Scan, Sizes, linear, out_of
from .positions import ALL_OF_IT, Position, Turning
from .words import Words

__all__ = ["LinearAttention"]

_CHUNK = 128  # the number of tokens that are processed at once


class LinearAttention(Mixer, Component, frozen=True):
    """Attention whose weights are the first terms of the series of eˢ, with s = scale · q·k, instead of eˢ itself
    (Arora et al. 2402.18668). A token's weight decays with every later token, by one gate per head (the gates of Yang
    et al. 2312.06635):

        y = Σ w v / Σ w,  w = (1 + s + s²/2) · exp(Σ g),  g = −softplus(gate_proj(x))

    where the sum of g is over the tokens after the attended token. w is above 0 for any s. It is a dot product of
    features of q and features of k, so a state replaces the KV cache. Every key-value head has a state of shape
    (`key_features`, head_dim + 1), in at least fp32.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".linear_attention"
    axes = ("group",)
    described = ("head_dim", "scale", "position", "q_norm", "k_norm", "qkv_bias", "output_bias")
    forgotten: ClassVar[dict[str, str]] = {
        "position": "no positions in linear attention",
        "q_norm": "norm of queries left out",
        "k_norm": "norm of keys left out",
        "qkv_bias": "QKV bias dropped",
        "output_bias": "output bias of attention dropped",
    }

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of query heads."""
    kv_heads: Size
    """The number of key-value heads, each shared by the same number of query heads."""
    head_dim: Size
    """The number of elements of a query, key or value."""
    scale: Scale
    """The factor by which q·k is multiplied, usually 1/√head_dim."""
    position: Position | None = None
    """The rotary positions of queries and keys, if there are any."""
    q_norm: Norm | None = None
    """The norm of every query head, before the rotation."""
    k_norm: Norm | None = None
    """The norm of every key head, before the rotation."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads are not divisible by {self.kv_heads} key-value heads")
        if self.position is not None and not isinstance(self.position, Turning):
            raise ConfigError(
                f"linear attention supports only rotary positions (RoPE) or none, not {type(self.position).__name__}"
            )
        if isinstance(self.position, Turning) and self.position.dim > self.head_dim:
            raise ConfigError(
                f"the rotary dimension {self.position.dim} is larger than the head dimension {self.head_dim}"
            )
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and norm.size != self.head_dim:
                raise ConfigError(
                    f"the norm of queries or keys (q_norm or k_norm) has size {norm.size}, but the head "
                    f"dimension is {self.head_dim}"
                )

    @property
    def group(self) -> int:
        """The number of query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def key_features(self) -> int:
        """The number of features of a key: 1, its elements, and the products of two elements."""
        return 1 + self.head_dim + self.head_dim * (self.head_dim + 1) // 2

    def weights(self) -> dict[str, Weight]:
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden_size
        rows = {"q": q, "k": kv, "v": kv}
        weights = {f"{name}_proj.weight": Weight((size, hidden), "reads") for name, size in rows.items()}
        weights["gate_proj.weight"] = Weight((self.kv_heads, hidden), "reads", 0.0)
        weights["gate_proj.bias"] = Weight((self.kv_heads,), "bias", -3.0)
        weights["o_proj.weight"] = Weight((hidden, q), "writes")
        if self.qkv_bias:
            weights |= {f"{name}_proj.bias": bias(size) for name, size in rows.items()}
        if self.output_bias:
            weights["o_proj.bias"] = bias(hidden)
        return weights

    def words(self) -> dict[str, Words]:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        state = f"state {self.key_features} × {self.head_dim + 1}"
        position = "no positions" if self.position is None else self.position.aspects_on(ALL_OF_IT)["position"].long
        summary = (
            f"linear attention, {heads} heads, head dim {self.head_dim}, scale {self.scale:.4g}, {state}, {position}"
        )
        sizes = {name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim", "scale")}
        place = None if self.position is None else self.position.aspects_on(ALL_OF_IT)["position"].data
        data = {"kind": "LinearAttention", **sizes, "position": place}
        norms = {"q": self.q_norm, "k": self.k_norm}
        return {
            "recurrence": Words(f"linear {heads}, {state}", data, summary),
            "q/k norm": inside(norms, "", "q and k heads"),
        }

    def biases(self) -> dict[str, Words]:
        return {"qkv": Words("q, k, v", self.qkv_bias), "output": Words("attention out", self.output_bias)}

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"h": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim}

    def share(self, devices: int) -> Self:
        kv_heads = divided(self.kv_heads, devices, "key-value heads")
        return msgspec.structs.replace(self, heads=self.heads // devices, kv_heads=kv_heads)

    def small(self, hidden: int) -> Self:
        kv_heads = min(self.kv_heads, 2)
        return msgspec.structs.replace(self, hidden_size=hidden, kv_heads=kv_heads, heads=kv_heads * min(self.group, 2))

    def slips(self) -> dict[str, Self]:
        return {"scores not scaled": msgspec.structs.replace(self, scale=1.0)} if self.scale != 1 else {}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        if self.kv_heads in (1, self.heads):
            return {}
        order = [head for first in range(self.group) for head in range(first, self.heads, self.group)]
        rows = [head * self.head_dim + at for head in order for at in range(self.head_dim)]
        return {"query heads in other groups": {"q_proj": rows, "o_proj": rows}}

    def misread(self) -> dict[str, Misread]:
        return {
            "bias of decays dropped": lambda own: {"gate_proj.bias": own["gate_proj.bias"] * 0},
            "decays with the other sign": lambda own: {
                f"gate_proj.{name}": -own[f"gate_proj.{name}"] for name in ("weight", "bias")
            },
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, read = "recurrence", f"{path}.state"
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        program: list[AnyOperation] = []
        inputs = []
        for name, count in heads.items():
            inner: Sizes = ("B", "T", count, self.head_dim)
            program.append(linear(self, f"{name}_proj", path, source, inner, row, read))
            norm = {"q": self.q_norm, "k": self.k_norm}.get(name)
            if norm is not None:
                program += out_of(row, norm.operations(f"{path}.{name}_norm", program[-1].id, inner))
            if isinstance(self.position, Turning) and name != "v":
                turned: dict[str, Any] = {"rotary": self.position, "live_until": read}
                program.append(Rotate(f"{path}.{name}_rotated", (program[-1].id,), inner, row, **turned))
            inputs.append(program[-1].id)
        program.append(linear(self, "gate_proj", path, source, ("B", "T", self.kv_heads), row, read))
        values, dim = ("B", "T", self.heads, self.head_dim), self.head_dim
        state = (self.kv_heads, self.key_features, dim + 1)
        # `weighed`: scores, intermediate results and weights. `between`: products of two elements, and the elements.
        weighed, between = _CHUNK * _CHUNK * (3 * self.heads + self.kv_heads), _CHUNK * dim * (dim + 1) // 2
        head_state = self.key_features * (dim + 1)
        scan = Scan(
            read,
            (*inputs, program[-1].id),
            values,
            row,
            state=state,
            title="linear attention",
            formula="S ← eᵍ S + φ(k) [v, 1]ᵀ, Sᵀφ(q)",
            saved=0,
            products=(self.heads + self.kv_heads) * head_state,
            wide=True,
            chunk=_CHUNK,
            # Scores and weighted values, what queries read from the state, and what keys add to it.
            chunk_products=_CHUNK * (self.heads * _CHUNK * (2 * dim + 1) + (self.heads + self.kv_heads) * head_state),
            spared=self.heads * _CHUNK * head_state,
            alive=self.heads * 2 * dim + self.kv_heads * (2 * dim + 1),
            within=(max(weighed, 3 * self.kv_heads * between), max(weighed, 3 * self.heads * between)),
        )
        return (*program, scan, linear(self, "o_proj", path, scan.id, shape, row))
