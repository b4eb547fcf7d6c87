"""What swaps that are asked for by layer share: which layers, how messages name them, a tree with some changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..components import Attention, LatentAttention, ModelSpec
from .base import Guarantee
from .registry import Asked

__all__ = ["blocks_text", "chosen_layers", "guarantee_of", "in_words", "with_attention"]

replace = msgspec.structs.replace

FEW = 4
"""Layers that a lossy change may be made in, as a share of all: one in so many, or one. A changed layer costs some
hundredths of a nat, and its neighbours make up for little of it: beyond this the model is to be trained."""


def chosen_layers(spec: ModelSpec, asked: Asked) -> list[int]:
    """The layers that are asked for, each once, in order."""
    return sorted(set(asked.chosen(spec)))


def blocks_text(asked: Asked) -> str | None:
    """The layers that are asked for, as --blocks has them."""
    return None if asked.layers is None else ",".join(map(str, asked.layers))


def in_words(layers: Sequence[int]) -> str:
    """Layers in a message: "layer 3", "layers 0, 1, 2, 3, 4 and 8 others"."""
    few = layers[:5] if len(layers) > 6 else layers
    more = f" and {len(layers) - len(few)} others" if len(few) < len(layers) else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, few))}{more}"


def guarantee_of(changed: int, layers: int) -> Guarantee:
    """What a lossy change of so many layers, each for itself harmless, leaves of a model."""
    return "exact" if not changed else "approximate" if changed <= max(1, layers // FEW) else "retrained"


def with_attention(spec: ModelSpec, changed: Mapping[int, Attention | LatentAttention], **fields: Any) -> ModelSpec:
    """The tree with the attention of some layers exchanged, and other fields of its own."""
    blocks = tuple(
        block.replaced(attention=changed[layer]) if layer in changed else block
        for layer, block in enumerate(spec.blocks)
    )
    return replace(spec, blocks=blocks, **fields)
