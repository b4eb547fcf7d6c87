"""Attention of a decoder to the output of an encoder. No torch."""

from typing import Any, ClassVar, Literal, Self

import msgspec

from .attention import plain_scale, scale_words
from .base import Component, Mixer, Scale, Size, Weight, bias, divided
from .operations import CacheOperation, Given, Program, Sizes, attend, linear
from .words import Words

__all__ = ["CrossAttention"]


class CrossAttention(Mixer, Component, frozen=True):
    """Attention of every token to the encoder's output (Vaswani et al. 2017).

    Queries are computed from the decoder's stream. Keys and values are computed from the encoder's output, once per
    source text.
    """

    label = "cross-attention"
    slot = "cross_attention"
    rounds = ("scaling", "softmax")
    tells = ("head_dim", "scale", "qkv_bias", "output_bias")
    forgotten: ClassVar[dict[str, str]] = {
        "qkv_bias": "QKV bias of cross-attention dropped",
        "output_bias": "output bias of cross-attention dropped",
    }

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of query heads, and of key-value heads."""
    head_dim: Size
    """The number of elements per head."""
    scale: Scale
    """The factor of q·k."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    scaling: Literal["multiply", "divide", "queries"] = "multiply"
    """Where the scale is applied, as in `Attention`."""
    softmax: Literal["float32", "input"] = "input"
    """The dtype of the softmax, as in `Attention`."""

    def weights(self) -> dict[str, Weight]:
        inner, hidden = self.heads * self.head_dim, self.hidden_size
        found = {
            "q_proj.weight": Weight((inner, hidden), "reads"),
            "k_proj.weight": Weight((inner, hidden), "inner"),  # reads the encoder's output, not this stream
            "v_proj.weight": Weight((inner, hidden), "inner"),
            "o_proj.weight": Weight((hidden, inner), "writes"),
        }
        if self.qkv_bias:
            found |= {f"{part}_proj.bias": bias(inner) for part in "qkv"}
        return found | ({"o_proj.bias": bias(hidden)} if self.output_bias else {})

    def words(self) -> dict[str, Words]:
        scale = scale_words(self.scale, self.head_dim)
        data = {"heads": self.heads, "head_dim": self.head_dim, "scale": scale.data}
        told = f"{self.heads} heads, head dim {self.head_dim}{scale.whole}"
        return {"cross-attention": Words(f"MHA {self.heads}", data, told)}

    def biases(self) -> dict[str, Words]:
        qkv = Words("cross q, k, v", self.qkv_bias, "q, k, v of cross-attention")
        return {"qkv": qkv, "output": Words("cross out", self.output_bias, "cross-attention output")}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), scale=plain_scale(self.scale))

    def letters(self, part: str = "") -> dict[str, int]:
        return {"c": self.head_dim} if part else {"h": self.heads * self.head_dim}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, heads=divided(self.heads, devices, "heads of cross-attention"))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, heads=min(self.heads, 2))

    def slips(self) -> dict[str, Self]:
        return {"scores not scaled": msgspec.structs.replace(self, scale=1.0)}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = self.label, f"{path}.o_proj"
        read = Given(f"{path}.source", (), ("B", "U", self.hidden_size), row, words="the encoder's output", again=True)
        heads: Sizes = ("B", "T", self.heads, self.head_dim)
        seen: Sizes = ("B", "U", self.heads, self.head_dim)
        q = linear(self, "q_proj", path, source, heads, row, end)
        keys = [linear(self, f"{part}_proj", path, read.id, seen, row, end) for part in "kv"]
        kept = [
            CacheOperation(f"{path}.{part}_cached", (each.id,), seen, row, held=end, as_given=True, once=True)
            for part, each in zip("kv", keys, strict=True)
        ]
        scores = {"scale": self.scale, "query_dim": self.head_dim, "kv_heads": self.heads}
        rest: dict[str, Any] = {"causal": False, "keys": "U", "wide": self.softmax == "float32"}
        inputs = (q.id, kept[0].id, kept[1].id)
        mixed = attend(path, inputs, scores, self.heads, self.head_dim, **rest)
        found = (q, read, *keys, *kept, *mixed)
        return (*found, linear(self, "o_proj", path, found[-1].id, shape, row))
