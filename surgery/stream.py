"""Who reads the residual stream, and who writes into it.

A reader is a linear map on a norm's output, its weight [out, hidden]; a writer's output is added to the stream, its
weight [hidden, out of the component]. The tables of tokens and positions write too, by rows [vocabulary, hidden]; the
head reads behind the last norm, and where it is tied the token table does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..components import Attention, Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec, Norm

__all__ = [
    "Linear",
    "experts",
    "head_weight",
    "norms",
    "readers",
    "stream_norms",
    "tables",
    "writers",
]


@dataclass(frozen=True)
class Linear:
    """A linear of a block: its path in the tree, whether it has a bias, whether its record has a field for one, and,
    of a reader, the path of the norm that it reads.
    """

    path: str
    bias: bool
    norm: str = ""
    may_have_bias: bool = True

    @property
    def weight(self) -> str:
        """The shared name of its weight."""
        return f"{self.path}.weight"

    @property
    def bias_name(self) -> str:
        """The shared name of its bias, whether there is one or not."""
        return f"{self.path}.bias"


def readers(block: Block, path: str) -> tuple[Linear, ...]:
    """The linears of a block (at `path`, as "blocks.3") that read the stream, each behind a norm."""
    attention, norm = block.attention, f"{path}.attention_norm"
    names = ["q_proj", "k_proj", "v_proj"]
    if not isinstance(attention, Attention):
        names = ["q_proj", "kv_down_proj", *(["k_rope_proj"] if attention.rope_dim else [])]
    found = [Linear(f"{path}.attention.{name}", attention.qkv_bias, norm) for name in names]
    if block.feed_forward_norm is not None:
        norm = f"{path}.feed_forward_norm"
    if isinstance(block.feed_forward, MixtureOfExperts):
        found.append(Linear(f"{path}.feed_forward.router", False, norm, may_have_bias=False))
    for inner, expert in experts(block, path):
        found += [Linear(f"{inner}.{name}", expert.up_bias, norm) for name in inner_projections(expert)]
    return tuple(found)


def writers(block: Block, path: str) -> tuple[Linear, ...]:
    """The linears of a block whose outputs are added to the stream. (Those of experts are weighted before.)"""
    found = [Linear(f"{path}.attention.o_proj", block.attention.output_bias)]
    return (*found, *(Linear(f"{inner}.down_proj", expert.down_bias) for inner, expert in experts(block, path)))


def experts(block: Block, path: str) -> Iterator[tuple[str, FeedForward | GatedFeedForward]]:
    """The feed-forwards of a block, one or as many as there are experts: (path, record)."""
    inner = block.feed_forward
    if isinstance(inner, MixtureOfExperts):
        for expert in range(inner.experts):
            yield f"{path}.feed_forward.experts.{expert}", inner.expert
    else:
        yield f"{path}.feed_forward", inner


def inner_projections(feed_forward: FeedForward | GatedFeedForward) -> tuple[str, ...]:
    """The linears that read a feed-forward's input."""
    return ("gate_proj", "up_proj") if isinstance(feed_forward, GatedFeedForward) else ("up_proj",)


def tables(spec: ModelSpec) -> tuple[str, ...]:
    """The tables [rows, hidden] whose rows are the stream's beginning."""
    return ("embedding.weight", *(["positions.weight"] if spec.positions is not None else []))


def head_weight(spec: ModelSpec) -> str:
    """The tensor [vocabulary, hidden] that reads the last norm."""
    return "embedding.weight" if spec.head.tied else "head.weight"


def norms(block: Block, path: str) -> Iterator[tuple[str, Norm]]:
    """The norms of a block that look at the stream: (path, record)."""
    yield f"{path}.attention_norm", block.attention_norm
    if block.feed_forward_norm is not None:
        yield f"{path}.feed_forward_norm", block.feed_forward_norm


def stream_norms(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Every norm that looks at the stream, from the first layer to the last norm (not one on the token table)."""
    found = [each for layer, block in enumerate(spec.blocks) for each in norms(block, f"blocks.{layer}")]
    return [*found, ("final_norm", spec.final_norm)]
