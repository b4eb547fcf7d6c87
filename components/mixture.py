"""A mixture of feed-forwards behind a router. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Mixer, Size, Weight
from .feed_forward import FeedForward, GatedFeedForward

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(Mixer, Component, frozen=True):
    """`experts` feed-forwards of one kind, of which a router takes `top_k` for each token (Shazeer 1701.06538).

    p = softmax(router(x)), in fp32 at least; the output is Σ p_e · expert_e(x) over the top_k largest p. With
    `normalise` these are divided by their sum (Mixtral 2401.04088), so that experts which are alike give what one of
    them gives.
    """

    label = "router"
    slot = "feed_forward"

    hidden_size: Size
    experts: Annotated[int, Meta(ge=1, le=1024)]
    top_k: Size
    expert: FeedForward | GatedFeedForward
    normalise: bool = True

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"{self.top_k} experts per token of {self.experts}")
        if self.expert.hidden_size != self.hidden_size:
            raise ConfigError(f"experts are {self.expert.hidden_size} wide, their router {self.hidden_size}")

    @property
    def intermediate_size(self) -> int:
        """Of each expert."""
        return self.expert.intermediate_size

    def children(self) -> Iterator[tuple[str, Component]]:
        return ((f"experts.{number}", self.expert) for number in range(self.experts))

    def weights(self) -> dict[str, Weight]:
        return {"router.weight": Weight((self.experts, self.hidden_size), "router")}
