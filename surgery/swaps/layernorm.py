"""RMSNorm -> LayerNorm; the other way is in `norm`.

Exact with one more dimension: an isometry takes the stream to where its mean is zero (`basis`), and there the two norms
are one function. A stream that is centred already needs no more than the exchange. For the same reason both ways hold
for some layers alone: in a centred stream either kind of norm may stand anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np

from ...components import LayerNorm, ModelSpec, Norm, RMSNorm
from ...errors import SwapRefused
from ..base import Model, Swapped, Wide
from ..basis import CENTRED, chosen_norms, eps_for, exchanged, in_basis
from ..layerwise import unknown
from ..registry import Asked, Step
from ..stream import stream_norms, tables, writers

__all__ = [
    "has_rms_norm",
    "off_the_mean",
    "replace_rmsnorm",
    "rmsnorm_again",
    "rmsnorm_to_layernorm",
    "to_layernorm",
    "why_not_layernorm",
]

replace = msgspec.structs.replace


def why_not_layernorm(spec: ModelSpec) -> str | None:
    """The reason why RMSNorm -> LayerNorm cannot be exact for this tree, or None."""
    found = dict(stream_norms(spec))
    if not any(isinstance(norm, RMSNorm) for norm in found.values()):
        raise SwapRefused("this model has no RMSNorm on its stream: its norms are LayerNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return "its residual is taken from the norm's output, where the norm's weight does not commute with a rotation"
    kept = [path for path, norm in found.items() if isinstance(norm, LayerNorm)]
    kept += ["embedding.norm"] if isinstance(spec.embedding.norm, LayerNorm) else []
    if kept:
        return f"{kept[0]} is a LayerNorm already and removes a mean that the others see"
    return None


def to_layer_norm(norm: Norm) -> LayerNorm:
    """The LayerNorm in an RMSNorm's place; one that is there stays."""
    match norm:
        case RMSNorm():
            return LayerNorm(size=norm.size, eps=norm.eps, bias=False, gain=norm.gain)
        case LayerNorm():
            return norm
        case _:
            raise unknown("the tree", norm, "LayerNorm or RMSNorm")


def off_the_mean(rows: Wide) -> Wide:
    """Rows [n, d] in the space of the vectors of d + 1 elements whose mean is zero, lengths and angles kept.

    A zero is appended and the Householder reflection applied that takes the last unit vector to (1, …, 1)/√(d + 1):
    what was at right angles to the one is then to the other.
    """
    size = rows.shape[1] + 1
    v = np.full(size, -1 / math.sqrt(size))
    v[-1] += 1
    wide = np.concatenate([rows, np.zeros((len(rows), 1))], axis=1)
    found: Wide = wide - np.outer(wide @ v, v * (2 / (v @ v)))
    return found


def rmsnorm_to_layernorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The exact swap, for all norms or those of some layers: one dimension wider, the head untied."""
    reason = why_not_layernorm(spec)
    if reason is not None:
        raise SwapRefused(
            f"RMSNorm -> LayerNorm cannot be exact here: {reason}",
            "--approximate replaces the norms all the same and measures the damage.",
        )
    old, size = spec.hidden_size, spec.hidden_size + 1

    def norm_of(path: str, norm: Norm) -> Norm:
        chosen = layers is None or (path.startswith("blocks.") and int(path.split(".")[1]) in layers)
        other = replace(norm, eps=eps_for(norm.eps, old, size))
        return to_layer_norm(other) if chosen else other

    new, tensors = in_basis(spec, size, lambda _, rows: off_the_mean(rows), norm_of)
    notes = [f"the residual stream is {size} wide instead of {old}: with one more dimension its mean can be zero"]
    if spec.head.tied:
        notes.append("the head was untied from the embedding: it reads behind the last norm's weight")
    return Swapped(new, "exact", tensors, other_summary(spec, size), tuple(notes))


def replace_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, the mean dropped. Exact where the stream has none."""
    why_not_layernorm(spec)
    new = exchanged(spec, {path: to_layer_norm(norm) for path, norm in chosen_norms(spec, layers).items()})
    return Swapped(new, "approximate", {}, other_summary(spec, spec.hidden_size))


def other_summary(spec: ModelSpec, size: int) -> dict[str, Any]:
    """What the output's record says of it."""
    found = [norm for _, norm in stream_norms(spec) if isinstance(norm, RMSNorm)]
    return {"from": "rmsnorm", "to": "layernorm", "norms": len(found), "hidden_size": [spec.hidden_size, size]}


def stream_is_centred(model: Model) -> bool:
    """Whether nothing that writes into the stream has a mean."""

    def has_none(values: Wide, axis: int) -> bool:
        mean = np.abs(values.mean(axis=axis)).max()
        return bool(mean <= CENTRED * np.abs(values).max())

    spec = model.spec
    if spec.embedding.norm is not None or not all(has_none(model.wide(name), 1) for name in tables(spec)):
        return False
    for layer, block in enumerate(spec.blocks):
        for each in writers(block, f"blocks.{layer}"):
            names = [each.weight, *([each.bias_name] if each.bias else [])]
            if not all(has_none(model.wide(name), 0) for name in names):
                return False
    return True


def to_layernorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """RMSNorm -> LayerNorm, as exactly as is asked."""
    if asked.approximate:
        return replace_rmsnorm(spec, asked.layers)
    reason = why_not_layernorm(spec)
    normed = any(block.residual == "normed" for block in spec.blocks)
    may_be_centred = (reason is None or not normed) and spec.embedding.norm is None
    if may_be_centred and asked.weights.ask(stream_is_centred, False, True):
        notes = (
            "nothing that writes into the residual stream has a mean, so the norms were exchanged where they stand",
        )
        return dataclasses.replace(replace_rmsnorm(spec, asked.layers), guarantee="exact", notes=notes)
    return rmsnorm_to_layernorm(spec, asked.layers)


def has_rms_norm(spec: ModelSpec) -> bool:
    """Whether a tree has such a norm on its stream."""
    return any(isinstance(norm, RMSNorm) for _, norm in stream_norms(spec))


def rmsnorm_again(_: ModelSpec, asked: Asked) -> Step | None:
    """The way back from LayerNorms, where all of the stream's norms are: an RMSNorm beside them would have to be shown
    a stream without a mean, which a tree does not tell.
    """
    return None if asked.approximate or asked.layers is not None else Step("norm", "rmsnorm")
