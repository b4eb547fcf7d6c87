"""What swaps share: how messages name layers, what stands in them, and a tree with some of them changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..components import Attention, Block, Component, LatentAttention, ModelSpec, Norm
from ..errors import SwapRefused
from .base import Guarantee

FEW = 4
"""Layers that a lossy change may be made in, as a share of all: one in so many, or one. A changed layer costs some
hundredths of a nat, and its neighbours make up for little of it: beyond this the model is to be trained."""


def in_words(layers: Sequence[int]) -> str:
    """Layers in a message: "layer 3", "layers 0, 1, 2, 3, 4 and 8 others"."""
    few = layers[:5] if len(layers) > 6 else layers
    more = f" and {len(layers) - len(few)} others" if len(few) < len(layers) else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, few))}{more}"


def one_or_all(numbers: Iterable[int]) -> int | list[int]:
    """What layers have, for a record: one number, or where they differ all of them in order."""
    found = sorted(set(numbers))
    return found[0] if len(found) == 1 else found


def guarantee_of(changed: int, layers: int) -> Guarantee:
    """What a lossy change of so many layers, each for itself harmless, leaves of a model."""
    return "exact" if not changed else "approximate" if changed <= max(1, layers // FEW) else "retrained"


# --- what stands in a layer -------------------------------------------------------------------------------------------


def tensors_of(path: str, record: Component, *parts: str) -> list[str]:
    """The tensors of a component's parts ("q_proj"), weight and bias; of all its parts, where none is named."""
    own = list(record.shapes())
    return [f"{path}.{name}" for part in parts or [""] for name in own if not part or name.startswith(f"{part}.")]


def unknown(where: str, component: object, expected: str) -> SwapRefused:
    """The refusal of a component that a swap does not know, by its class."""
    return SwapRefused(f"{where} has {type(component).__name__}, where this swap expects {expected}")


def unnormed(path: str, mixer: Component) -> None:
    """Raise SwapRefused where a mixer norms all that its output projection reads, for a swap that changes that."""
    for name in ("mixed_norm", "inner_norm"):
        if getattr(mixer, name, None) is not None:
            raise SwapRefused(f"{path} has {name}, of all that its output projection reads, unknown to this swap")


def unclipped(path: str, attention: Attention) -> None:
    """Raise SwapRefused where an attention clips queries, keys and values, for a swap that makes them larger, or moves
    what is added to them.
    """
    if attention.clip is not None:
        raise SwapRefused(f"{path} has a clip of queries, keys and values at {attention.clip:g}, unknown to this swap")


def weighed(path: str, norm: Norm | None) -> None:
    """Raise SwapRefused where a norm does not multiply by its weight as it is, for a swap that changes that weight."""
    if norm is not None and norm.gain != "weight":
        raise SwapRefused(f"{path} multiplies by {norm.gain}, and this swap knows norms that multiply by their weight")


def attentions(spec: ModelSpec, layers: Iterable[int], latent: str, hint: str | None = None) -> dict[int, Attention]:
    """The attentions of these layers, each of which has key-value heads. Raises SwapRefused where one is latent:
    "layer 3 has latent attention", and what `latent` says of it; `hint` says what would be possible there.
    """
    found = {}
    for layer in layers:
        attention = spec.blocks[layer].attention
        if isinstance(attention, LatentAttention):
            raise SwapRefused(f"layer {layer} has latent attention{latent}", hint)
        unnormed(f"blocks.{layer}.attention", attention)
        found[layer] = attention
    return found


# --- a tree with some layers changed ----------------------------------------------------------------------------------


def with_blocks(spec: ModelSpec, changed: Mapping[int, Block], **fields: Any) -> ModelSpec:
    """The tree with some of its blocks exchanged, and other fields of its own."""
    blocks = tuple(changed.get(layer, block) for layer, block in enumerate(spec.blocks))
    return replace(spec, blocks=blocks, **fields)


def with_mixers(spec: ModelSpec, changed: Mapping[int, Any], **fields: Any) -> ModelSpec:
    """The tree with the attention, or the feed-forward, of some layers exchanged, and other fields of its own."""
    return with_blocks(spec, {i: spec.blocks[i].replaced(**{new.slot: new}) for i, new in changed.items()}, **fields)
