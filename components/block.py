"""One layer. No torch."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigError
from .attention import Attention
from .base import Component
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .norms import Norm

__all__ = ["Block"]


class Block(Component, frozen=True):
    """One layer, norms before attention and feed-forward ("pre-norm").

    serial:   x = r + attention(attention_norm(x)), then x = r + feed_forward(feed_forward_norm(x))
    parallel: x = r + (feed_forward(feed_forward_norm(x)) + attention(attention_norm(x)))

    where r is x itself, or the norm's output with `residual` "normed" (BLOOM's
    apply_residual_connection_post_layernorm). A parallel block without `feed_forward_norm` feeds both branches
    from `attention_norm`.
    """

    attention_norm: Norm
    attention: Attention | LatentAttention
    feed_forward: FeedForward | GatedFeedForward | MixtureOfExperts
    feed_forward_norm: Norm | None = None
    parallel: bool = False
    residual: Literal["stream", "normed"] = "stream"

    def __post_init__(self) -> None:
        if self.feed_forward_norm is None and not self.parallel:
            raise ConfigError("a serial block needs a norm before its feed-forward")
        if self.parallel and self.residual == "normed":
            raise ConfigError("a parallel block adds to the stream itself, not to a norm's output")
