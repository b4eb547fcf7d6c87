"""A model as a tree of components, and the walks over any tree: its parameters, differences, JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..display import Shown
from ..errors import ConfigError
from .activations import function_of
from .attention import Attention
from .base import Component, Parameter, Size
from .block import Block
from .ends import Embedding, Head
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .norms import LayerNorm, Norm, RMSNorm
from .positions import ALiBi, LearnedPositions

__all__ = [
    "HEAD_NORMS",
    "LABELS",
    "MOST_RUNS",
    "ROUNDING",
    "SCHEMA_VERSION",
    "ModelSpec",
    "component_label",
    "differences",
    "from_json",
    "to_json",
    "without_rounding",
]

HEAD_NORMS = ("q_norm", "k_norm", "kv_norm")
"""An attention's own norms, which are not as wide as the stream."""


class ModelSpec(Component, Shown, frozen=True):
    """A decoder-only language model. `context_length` is the longest sequence it was trained for, where known."""

    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Head
    positions: LearnedPositions | None = None
    context_length: Size | None = None

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("a model needs at least one layer")
        for name, node in self.nodes():
            size = getattr(node, "hidden_size", None)
            if isinstance(node, LayerNorm | RMSNorm | LearnedPositions) and not name.endswith(HEAD_NORMS):
                size = node.size
            if size is not None and size != self.embedding.hidden_size:
                raise ConfigError(f"{name} is {size} wide, the embedding {self.embedding.hidden_size}")
        if self.head.vocab_size != self.embedding.vocab_size:
            raise ConfigError(f"head of {self.head.vocab_size} tokens on a vocabulary of {self.embedding.vocab_size}")

    def __repr__(self) -> str:
        """The tree in a few lines; `to_json` has all of it."""
        runs: list[list[Any]] = []  # the first and the last layer of each
        for index, block in enumerate(self.blocks):
            if runs and runs[-1][2] == block:
                runs[-1][1] = index
            else:
                runs.append([index, index, block])
        total = sum(parameter.count for parameter in self.parameters())
        sizes = f"{len(self.blocks):,} layers, hidden size {self.hidden_size:,}, {total:,} parameters"
        lines = [f"ModelSpec of {sizes}", f"  {_told(self.embedding)}"]
        lines += [f"  {_told(self.positions)}"] if self.positions is not None else []
        for first, last, block in runs[:MOST_RUNS]:
            nodes = (block.attention_norm, block.attention, block.feed_forward_norm, block.feed_forward)
            where = f"{first}" if first == last else f"{first}–{last}"
            lines.append(f"  blocks.{where}: {', '.join(_told(node) for node in nodes if node is not None)}")
        lines += [f"  … {len(runs) - MOST_RUNS:,} more runs of layers"] if len(runs) > MOST_RUNS else []
        return "\n".join([*lines, f"  {_told(self.final_norm)}", f"  {_told(self.head)}"])

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    def nodes(self) -> Iterator[tuple[str, Component]]:
        """Every component that may hold parameters, depth first in the order of computation: (path, node)."""
        yield "embedding", self.embedding
        if self.embedding.norm is not None:
            yield "embedding.norm", self.embedding.norm
        if self.positions is not None:
            yield "positions", self.positions
        for index, block in enumerate(self.blocks):
            path = f"blocks.{index}"
            yield f"{path}.attention_norm", block.attention_norm
            yield f"{path}.attention", block.attention
            for name in HEAD_NORMS:
                norm = getattr(block.attention, name, None)
                if norm is not None:
                    yield f"{path}.attention.{name}", norm
            if block.feed_forward_norm is not None:
                yield f"{path}.feed_forward_norm", block.feed_forward_norm
            yield f"{path}.feed_forward", block.feed_forward
            if isinstance(block.feed_forward, MixtureOfExperts):
                for expert in range(block.feed_forward.experts):
                    yield f"{path}.feed_forward.experts.{expert}", block.feed_forward.expert
        yield "final_norm", self.final_norm
        yield "head", self.head

    def parameters(self) -> Iterator[Parameter]:
        """Every stored tensor once, in the order of `nodes`."""
        for path, node in self.nodes():
            layer = int(path.split(".")[1]) if path.startswith("blocks.") else None
            for name, shape in node.shapes().items():
                yield Parameter(f"{path}.{name}", shape, component_label(node), layer)


MOST_RUNS = 8
"""Runs of layers alike that a tree's repr lists."""


def _told(node: Component) -> str:
    """A component with its sizes: Attention(heads 12, kv_heads 12, head_dim 64)."""
    plain = {name: getattr(node, name) for name in node.__struct_fields__ if name not in ("hidden_size", "scale")}
    sizes = [f"{name} {value:,}" for name, value in plain.items() if type(value) is int]
    sizes += [name for name, value in plain.items() if value is True]
    inside = [_told(value) for value in plain.values() if isinstance(value, FeedForward | GatedFeedForward)]
    return f"{type(node).__name__}({', '.join([*sizes, *inside])})"


LABELS: dict[type[Component], str] = {
    Embedding: "embedding",
    LearnedPositions: "positions",
    Attention: "attention",
    LatentAttention: "attention",
    FeedForward: "feed-forward",
    GatedFeedForward: "feed-forward",
    MixtureOfExperts: "router",
    LayerNorm: "norms",
    RMSNorm: "norms",
    Head: "head",
}


def component_label(node: Component) -> str:
    """The row of a parameter table under which this node is counted."""
    return LABELS[type(node)]


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Where two trees differ: (path, in a, in b), a subtree of another type reported as a whole."""
    if type(a) is not type(b):
        return [(path or "model", a, b)]
    if isinstance(a, Component):
        found = []
        for field in a.__struct_fields__:
            found += differences(getattr(a, field), getattr(b, field), f"{path}.{field}" if path else field)
        return found
    if isinstance(a, tuple):
        if len(a) != len(b):
            return [(path, f"{len(a)} entries", f"{len(b)} entries")]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}.{i}")]
    return [] if a == b else [(path, a, b)]


ROUNDING: dict[type[Component], tuple[str, ...]] = {
    RMSNorm: ("cast",),
    ALiBi: ("rounding",),
    Attention: ("arithmetic", "scaling", "kv_expansion", "fused", "softmax", "scores"),
    LatentAttention: ("arithmetic",),
    FeedForward: ("arithmetic",),
    GatedFeedForward: ("arithmetic", "fused"),
}
"""The fields that say how a component rounds, and nothing of what function it is."""


def without_rounding(node: Any) -> Any:
    """A tree that stands for all that compute one function in exact arithmetic: what decides the last bits, and how
    an activation is evaluated, is set alike.
    """
    if isinstance(node, tuple):
        return tuple(without_rounding(each) for each in node)
    if not isinstance(node, Component):
        return node
    plain = type(node).__struct_fields__
    fields = {name: without_rounding(getattr(node, name)) for name in plain}
    defaults = dict(zip(reversed(plain), reversed(type(node).__struct_defaults__), strict=False))
    fields.update({name: defaults[name] for name in ROUNDING.get(type(node), ())})
    if "activation" in fields:
        fields["activation"] = function_of(fields["activation"])
    if isinstance(node, Attention | LatentAttention):  # 1/√d, as one family divides and another takes a power
        fields["scale"] = float(f"{node.scale:.14g}")
    return type(node)(**fields)


SCHEMA_VERSION = 1


def to_json(spec: ModelSpec) -> Any:
    """The tree as plain JSON values, with the schema's version."""
    return {"schema_version": SCHEMA_VERSION, **msgspec.json.decode(msgspec.json.encode(spec))}


def from_json(data: Any) -> ModelSpec:
    """The tree from plain JSON values.

    Raises:
        ConfigError: another schema version; a field that is missing, unknown, or of the wrong type or range.

    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"not a model spec of schema version {SCHEMA_VERSION}, which this gptkit reads: {version!r:.40}",
            "Update gptkit, or convert the original again.",
        )
    try:
        return msgspec.convert({key: value for key, value in data.items() if key != "schema_version"}, ModelSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a gptkit model spec: {error}") from error
