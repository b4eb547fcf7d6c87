"""A mixture of feed-forwards behind a router. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Mixer, Size, Weight, divided
from .feed_forward import FeedForward, GatedFeedForward
from .operations import AnyOperation, Choose, Combine, Gather, Linear, Program, Sizes, linear
from .words import Words

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(Mixer, Component, frozen=True):
    """`experts` feed-forwards of one kind, of which a router takes `top_k` for each token (Shazeer 1701.06538).

    p = softmax(router(x)), in fp32 at least; the output is Σ p_e · expert_e(x) over the top_k largest p. With
    `normalise` these are divided by their sum (Mixtral 2401.04088), so that experts which are alike give what one of
    them gives.
    """

    label = "router"
    forgotten: ClassVar[dict[str, str]] = {"normalise": "weights of experts normalised or not"}
    rows = "E"
    slot = "feed_forward"
    tells = ("expert",)

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

    def words(self) -> dict[str, Words]:
        one, few = self.expert.aspects(), f"{self.top_k} of {self.experts} experts"
        name, (short, data, whole) = next(iter(one.items()))
        data = data | {"experts": self.experts, "top_k": self.top_k, "normalise": self.normalise}
        routed, given = ("", "") if self.normalise else (", weights as routed", ", weights as the router gives them")
        return one | {name: Words(f"{short}, {few}{routed}", data, f"{few}{given}, each {whole}")}

    def biases(self) -> dict[str, Words]:
        return self.expert.biases()

    def share(self, devices: int) -> Self:
        units = divided(self.intermediate_size, devices, "units of an expert")
        expert = msgspec.structs.replace(self.expert, intermediate_size=units)
        return msgspec.structs.replace(self, expert=expert)

    def small(self, hidden: int) -> Self:
        """All experts are taken where all were, and one more is there where there are more."""
        top_k = min(self.top_k, 3)
        experts = top_k if self.top_k == self.experts else min(self.experts, 4)
        expert = msgspec.structs.replace(self.expert, hidden_size=hidden, intermediate_size=3 * hidden // 2)
        return msgspec.structs.replace(self, hidden_size=hidden, experts=experts, top_k=top_k, expert=expert)

    def slips(self) -> dict[str, Self]:
        more = "an expert a token too many"
        counts = {more: self.top_k + 1, f"{more}, the other way round": self.top_k - 1}
        found = {name: msgspec.structs.replace(self, top_k=k) for name, k in counts.items() if 1 <= k <= self.experts}
        if self.top_k < self.experts:  # the weights of all of them sum to one anyway
            found["weights of experts normalised or not"] = msgspec.structs.replace(self, normalise=not self.normalise)
        return found

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        return {"experts in other places": {"router": [*range(1, self.experts), 0]}}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        taken: Sizes = (*shape[:-1], self.top_k, self.hidden_size)
        chosen, gathered, combined = f"{path}.chosen", f"{path}.gathered", f"{path}.combined"
        *inside, last = self.expert.operations(f"{path}.experts", gathered, taken)
        apart = 1 if any(isinstance(each, Linear) and each.fused for each in inside) else self.experts

        def copied(each: AnyOperation, **changes: object) -> AnyOperation:
            """One of many; each token is led to those that were chosen."""
            changes["copies"] = self.experts if each.weights else 1
            if isinstance(each, Linear):
                changes |= {"inputs": (*each.inputs, chosen), "choice": chosen}
            return msgspec.structs.replace(each, **changes)

        choice: dict[str, Any] = {"top_k": self.top_k, "experts": self.experts, "normalise": self.normalise}
        return (
            linear(self, "router", path, source, (*shape[:-1], self.experts), "router"),
            Choose(chosen, (f"{path}.router",), (*shape[:-1], self.top_k), "router", **choice),
            Gather(gathered, (source, chosen), taken, "feed-forward", held=combined),
            *(copied(each, apart=apart) for each in inside),
            copied(last),
            Combine(combined, (chosen, last.id), shape, "feed-forward"),
        )
