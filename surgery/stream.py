"""Who reads the residual stream, and who writes into it, by the roles of parameters.

A reader is a linear map on a norm's output, its weight [out, hidden]; a writer's output is added to the stream, its
weight [hidden, out of the component]. The tables of tokens and positions write too, by rows [vocabulary, hidden]; the
head reads behind the last norm, and where it is tied the token table does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..components import (
    Block,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    LearnedPositions,
    ModelSpec,
    Norm,
    RMSNorm,
    Role,
)
from ..components.model import walk
from ..errors import SwapRefused
from .base import Model, Wide
from .gather import Index
from .layerwise import tensors_of, unknown, unnormed, weighed


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

    @property
    def names(self) -> list[str]:
        """The shared names of its tensors."""
        return [self.weight, *([self.bias_name] if self.bias else [])]


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


def experts(block: Block, path: str) -> list[tuple[str, FeedForward | GatedFeedForward]]:
    """The feed-forwards of a block, one or as many as there are experts: (path, record). Raises SwapRefused where one
    norms its units.
    """
    mixer = block.feed_forward
    inside: list[Any] = [(f"{path}.feed_forward.{name}", expert) for name, expert in mixer.children()]
    found = inside or [(f"{path}.feed_forward", mixer)]
    for each in found:
        unnormed(*each)
    return found


@dataclass(frozen=True)
class Inner:
    """A feed-forward or an expert: its path, record and layer."""

    path: str
    record: FeedForward | GatedFeedForward
    layer: int

    @property
    def inputs(self) -> list[str]:
        """The linears that read its input; what the first of them gives is activated."""
        return [name.removesuffix(".weight") for name, each in self.record.weights().items() if each.role == "reads"]

    @property
    def up(self) -> list[str]:
        """The tensors with a row a unit."""
        return tensors_of(self.path, self.record, *self.inputs)

    @property
    def down(self) -> str:
        """The tensor with a column a unit."""
        return f"{self.path}.down_proj.weight"

    @property
    def down_bias(self) -> str:
        """The name of the bias behind it, whether there is one or not."""
        return f"{self.path}.down_proj.bias"

    @property
    def units(self) -> int:
        """How many units there are."""
        return self.record.intermediate_size


def largest(score: Wide, size: int) -> Index:
    """The units of the largest scores, in order."""
    return np.sort(np.argsort(-score, kind="stable")[:size])


def by_weights(model: Model, inner: Inner) -> Wide:
    """For each unit the product of the norms of its rows and its column."""
    score: Wide = np.linalg.norm(model.wide(inner.down), axis=0)
    for name in inner.inputs:
        score = score * np.linalg.norm(model.wide(f"{inner.path}.{name}.weight"), axis=1)
    return score


def tables(spec: ModelSpec) -> tuple[str, ...]:
    """The tables [rows, hidden] whose rows are the stream's beginning.

    Raises:
        SwapRefused: they are not as wide as the stream, or positions are no table.
    """
    if spec.embedding.width is not None:
        raise SwapRefused(f"embedding has width {spec.embedding.width}, where this swap expects that of the stream")
    if spec.positions is not None and not isinstance(spec.positions, LearnedPositions):
        raise unknown("the model", spec.positions, "a table of positions")
    return ("embedding.weight", *(["positions.weight"] if spec.positions is not None else []))


def head_weight(spec: ModelSpec) -> str:
    """The tensor [vocabulary, hidden] that reads the last norm; raises SwapRefused where it reads a projection."""
    if spec.head.width is not None:
        raise SwapRefused(f"head has width {spec.head.width}, where this swap expects that of the stream")
    return "embedding.weight" if spec.head.tied else "head.weight"


def written(spec: ModelSpec) -> list[tuple[str, int]]:
    """What writes into the stream: (tensor, the axis that is the stream's)."""
    found = [(name, 1) for name in tables(spec)]
    for layer, block in enumerate(spec.blocks):
        found += [(name, 0) for each in writers(block, f"blocks.{layer}") for name in each.names]
    return found


def read_weights(spec: ModelSpec) -> list[str]:
    """What reads it, [out, hidden]; not a tied head, whose matrix is a table."""
    found = [each.weight for layer, block in enumerate(spec.blocks) for each in readers(block, f"blocks.{layer}")]
    return found + ([] if spec.head.tied else ["head.weight"])


def norms(block: Block, path: str) -> Iterator[tuple[str, Norm]]:
    """The norms of a block that look at the stream, each of a kind that swaps know: (path, record)."""
    block.plain()
    return (known(f"{path}.{name}_norm", norm) for name, norm in block.norms().items())


def known(path: str, norm: Norm) -> tuple[str, Norm]:
    """A norm and its path; raises SwapRefused where it is of a kind that swaps do not know."""
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise unknown(path, norm, "LayerNorm or RMSNorm")
    return path, norm


def stream_norms(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Every norm that looks at the stream, from the first layer to the last norm (not one on the token table)."""
    found = [each for layer, block in enumerate(spec.blocks) for each in norms(block, f"blocks.{layer}")]
    return [*found, known("final_norm", last_norm(spec))]


def last_norm(spec: ModelSpec) -> Norm:
    """The norm before the head; raises SwapRefused where there is none."""
    if spec.final_norm is None:
        raise SwapRefused("the model has no final_norm, which this swap expects before the head")
    return spec.final_norm


def every_norm(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """The norms on the stream, and the one on the token table."""
    table = spec.embedding.norm
    return [*([known("embedding.norm", table)] if table is not None else []), *stream_norms(spec)]


def require_weights(spec: ModelSpec) -> None:
    """Raise SwapRefused where a norm that a stream meets does not multiply by its weight as it is."""
    for path, norm in every_norm(spec):
        weighed(path, norm)
