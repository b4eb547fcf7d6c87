"""Multi-head latent attention. No torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..errors import ConfigError
from .base import Arithmetic, Component, Scale, Shape, Size
from .norms import RMSNorm
from .positions import ALiBi, Rotary

__all__ = ["LatentAttention"]


class LatentAttention(Component, frozen=True):
    """Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1; TransMLA 2502.07864).

    Of each token a latent c = kv_down(x), `kv_rank` wide, with `kv_norm` where there is one, is what keys and values
    are made of: k_up(c) gives `nope_dim` elements of a key a head, v_up(c) `value_dim` elements of a value a head.
    Positions are on keys of their own, `rope_heads` of them, `position.dim` wide, k_rope(x), which all heads share. A
    query head has nope_dim elements and then one rotated part for each of these keys:

        score = (q_nope · k_nope + Σ_r q_rope[r] · k_rope[r]) · scale

    With `rope_heads` key-value heads, and queries that are zero but for their own, it is grouped attention (GQA) as it
    was. The cache holds c and the rotated k_rope. `qkv_bias` is on q, the latent and k_rope; one on k_up would add the
    same to all of a query's scores, and one on v_up is an output bias.
    """

    hidden_size: Size
    heads: Size
    kv_rank: Size
    nope_dim: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    value_dim: Size
    scale: Scale
    rope_heads: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    position: Rotary | ALiBi | None = None
    window: Size | None = None
    kv_norm: RMSNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    arithmetic: Arithmetic = "linear"

    def __post_init__(self) -> None:
        if isinstance(self.position, Rotary) != (self.rope_heads > 0):
            raise ConfigError(f"{self.rope_heads} rotary keys with positions {type(self.position).__name__}")
        if not self.query_dim:
            raise ConfigError("a query of latent attention needs elements: nope_dim is 0 and there is no rotary key")
        if self.kv_norm is not None and self.kv_norm.size != self.kv_rank:
            raise ConfigError(f"a norm of size {self.kv_norm.size} does not fit a latent of {self.kv_rank}")

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a query head, or of the shared keys together: rope_heads · position.dim."""
        return self.rope_heads * self.position.dim if isinstance(self.position, Rotary) else 0

    @property
    def query_dim(self) -> int:
        """Elements of a query head: those without a position, and then the rotated ones."""
        return self.nope_dim + self.rope_dim

    def shapes(self) -> dict[str, Shape]:
        q, hidden = self.heads * self.query_dim, self.hidden_size
        shapes: dict[str, Shape] = {"q_proj.weight": (q, hidden), "kv_down_proj.weight": (self.kv_rank, hidden)}
        if self.rope_dim:
            shapes["k_rope_proj.weight"] = (self.rope_dim, hidden)
        if self.nope_dim:
            shapes["k_up_proj.weight"] = (self.heads * self.nope_dim, self.kv_rank)
        shapes["v_up_proj.weight"] = (self.heads * self.value_dim, self.kv_rank)
        shapes["o_proj.weight"] = (hidden, self.heads * self.value_dim)
        if self.qkv_bias:
            shapes |= {"q_proj.bias": (q,), "kv_down_proj.bias": (self.kv_rank,)}
            if self.rope_dim:
                shapes["k_rope_proj.bias"] = (self.rope_dim,)
        if self.output_bias:
            shapes["o_proj.bias"] = (hidden,)
        return shapes
