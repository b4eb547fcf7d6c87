"""Who reads the residual stream, and who writes into it, by the roles of parameters.

A reader is a linear map on a norm's output, its weight [out, hidden]; a writer's output is added to the stream, its
weight [hidden, out of the component]. The tables of tokens and positions write too, by rows [vocabulary, hidden]; the
head reads behind the last norm, and where it is tied the token table does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..components import (
    Block,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    RMSNorm,
    Role,
)
from ..components.model import walk
from .layerwise import unknown, weighed

__all__ = [
    "Linear",
    "experts",
    "head_weight",
    "inner_projections",
    "linears",
    "norms",
    "readers",
    "require_weights",
    "stream_norms",
    "tables",
    "writers",
]


@dataclass(frozen=True)
class Linear:
    """A linear of a block: its path in the tree, whether it has a bias, whether its record has a field for one, of
    a reader the path of the norm that it reads, and what its mixer is called in the block.
    """

    path: str
    bias: bool
    norm: str = ""
    may_have_bias: bool = True
    slot: str = ""

    @property
    def weight(self) -> str:
        """The shared name of its weight."""
        return f"{self.path}.weight"

    @property
    def bias_name(self) -> str:
        """The shared name of its bias, whether there is one or not."""
        return f"{self.path}.bias"


def linears(block: Block, path: str, *wanted: Role) -> Iterator[Linear]:
    """The linears of a block with these roles, of any mixer, in the order of its sub-layers."""
    first = ""
    for sublayer in block.sublayers:
        slot = sublayer.mixer.slot
        norm = f"{path}.{slot}_norm" if sublayer.norm is not None else first
        first = first or norm
        for inner, node in walk(sublayer.mixer, f"{path}.{slot}"):
            own = node.weights()
            for name, weight in own.items():
                if weight.role in wanted:
                    linear = name.removesuffix(".weight")
                    yield Linear(f"{inner}.{linear}", f"{linear}.bias" in own, norm, weight.role != "router", slot)


def readers(block: Block, path: str) -> tuple[Linear, ...]:
    """The linears of a block (at `path`, as "blocks.3") that read the stream, each behind a norm."""
    return tuple(linears(block, path, "reads", "router"))


def writers(block: Block, path: str) -> tuple[Linear, ...]:
    """The linears of a block whose outputs are added to the stream. (Those of experts are weighted before.)"""
    return tuple(linears(block, path, "writes"))


def experts(block: Block, path: str) -> Iterator[tuple[str, FeedForward | GatedFeedForward]]:
    """The feed-forwards of a block, one or as many as there are experts: (path, record)."""
    match block.feed_forward:
        case MixtureOfExperts() as mixture:
            for expert in range(mixture.experts):
                yield f"{path}.feed_forward.experts.{expert}", mixture.expert
        case FeedForward() | GatedFeedForward() as dense:
            yield f"{path}.feed_forward", dense
        case other:
            raise unknown(path, other, "a feed-forward")


def inner_projections(feed_forward: FeedForward | GatedFeedForward) -> tuple[str, ...]:
    """The linears that read a feed-forward's input."""
    return tuple(name.removesuffix(".weight") for name, each in feed_forward.weights().items() if each.role == "reads")


def tables(spec: ModelSpec) -> tuple[str, ...]:
    """The tables [rows, hidden] whose rows are the stream's beginning."""
    return ("embedding.weight", *(["positions.weight"] if spec.positions is not None else []))


def head_weight(spec: ModelSpec) -> str:
    """The tensor [vocabulary, hidden] that reads the last norm."""
    return "embedding.weight" if spec.head.tied else "head.weight"


def norms(block: Block, path: str) -> Iterator[tuple[str, Norm]]:
    """The norms of a block that look at the stream, each of a kind that swaps know: (path, record)."""
    block.plain()
    for sublayer in block.sublayers:
        name = f"{path}.{sublayer.mixer.slot}_norm"
        match sublayer.norm:
            case None:
                continue
            case LayerNorm() | RMSNorm() as norm:
                yield name, norm
            case other:
                raise unknown(name, other, "LayerNorm or RMSNorm")


def require_weights(spec: ModelSpec) -> None:
    """Raise SwapRefused where a norm that a stream meets does not multiply by its weight as it is."""
    weighed("embedding.norm", spec.embedding.norm)
    for path, norm in stream_norms(spec):
        weighed(path, norm)


def stream_norms(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Every norm that looks at the stream, from the first layer to the last norm (not one on the token table)."""
    found = [each for layer, block in enumerate(spec.blocks) for each in norms(block, f"blocks.{layer}")]
    return [*found, ("final_norm", spec.final_norm)]
