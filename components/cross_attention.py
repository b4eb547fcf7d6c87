"""Attention of a decoder to the output of an encoder."""

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
    described = ("head_dim", "scale", "qkv_bias", "output_bias")
    forgotten: ClassVar[dict[str, str]] = {
        "qkv_bias": "QKV bias of cross-attention dropped",
        "output_bias": "output bias of cross-attention dropped",
    }

    hidden_size: Size
    """The width of the decoder's stream, and of the encoder's output."""
    heads: Size
    """The number of heads of queries, keys and values."""
    head_dim: Size
    """The number of elements of a query, key or value."""
    scale: Scale
    """The factor by which q·k is multiplied, usually 1/√head_dim."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    scaling: Literal["multiply", "divide", "queries"] = "multiply"
    """How the scale is applied. "multiply": scores are multiplied by it. "divide": scores are divided by its inverse.
    "queries": queries are multiplied by it before the product."""
    softmax: Literal["float32", "input"] = "input"
    """The dtype of the softmax: at least fp32, or that of its input."""

    def weights(self) -> dict[str, Weight]:
        inner, hidden = self.heads * self.head_dim, self.hidden_size
        weights = {
            "q_proj.weight": Weight((inner, hidden), "reads"),
            "k_proj.weight": Weight((inner, hidden), "inner"),  # reads the encoder's output, not this stream
            "v_proj.weight": Weight((inner, hidden), "inner"),
            "o_proj.weight": Weight((hidden, inner), "writes"),
        }
        if self.qkv_bias:
            weights |= {f"{part}_proj.bias": bias(inner) for part in "qkv"}
        return weights | ({"o_proj.bias": bias(hidden)} if self.output_bias else {})

    def words(self) -> dict[str, Words]:
        scale = scale_words(self.scale, self.head_dim)
        data = {"heads": self.heads, "head_dim": self.head_dim, "scale": scale.data}
        whole = f"{self.heads} heads, head dim {self.head_dim}{scale.whole}"
        return {"cross-attention": Words(f"MHA {self.heads}", data, whole)}

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
        fields: dict[str, Any] = {"live_until": end, "as_given": True, "once": True}
        cached = [
            CacheOperation(f"{path}.{part}_cached", (projection.id,), seen, row, **fields)
            for part, projection in zip("kv", keys, strict=True)
        ]
        scores = {"scale": self.scale, "query_dim": self.head_dim, "kv_heads": self.heads}
        rest: dict[str, Any] = {"causal": False, "keys": "U", "wide": self.softmax == "float32"}
        inputs = (q.id, cached[0].id, cached[1].id)
        mixed = attend(path, inputs, scores, self.heads, self.head_dim, **rest)
        program = (q, read, *keys, *cached, *mixed)
        return (*program, linear(self, "o_proj", path, program[-1].id, shape, row))
