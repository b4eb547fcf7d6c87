"""RMSNorm -> LayerNorm; the other way is in `norm`.

Exact with one more dimension: an isometry takes the stream to where its mean is zero (`basis`), and there the two norms
are one function. A stream that is centred already needs no more than the exchange. For the same reason both ways hold
for some layers alone: in a centred stream either kind of norm may stand anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import LayerNorm, ModelSpec, Norm
from ...errors import SwapRefused
from ..base import Model, Swapped, Wide
from ..basis import CENTRED, chosen_norms, eps_for, exchanged, in_basis
from ..registry import Asked, Step
from ..stream import every_norm, stream_norms, tables, writers


def has_rms_norm(spec: ModelSpec) -> bool:
    """Whether a tree has such a norm on its stream."""
    return any(not norm.centred for _, norm in stream_norms(spec))


def in_layers(path: str, layers: tuple[int, ...]) -> bool:
    """Whether a path is in one of these layers."""
    return path.startswith("blocks.") and int(path.split(".")[1]) in layers


def why_not_layernorm(spec: ModelSpec) -> str | None:
    """The reason why RMSNorm -> LayerNorm cannot be exact for this tree, or None."""
    if not has_rms_norm(spec):
        raise SwapRefused("this model has no RMSNorm on its stream: its norms are LayerNorm already")
    if any(block.residual == "normed" for block in spec.blocks):
        return "its residual is taken from the norm's output, where the norm's weight does not commute with a rotation"
    kept = [path for path, norm in (*stream_norms(spec), *every_norm(spec)) if norm.centred]
    if kept:
        return f"{kept[0]} is a LayerNorm already and removes a mean that the others see"
    return None


def to_layer_norm(norm: Norm) -> Norm:
    """The LayerNorm in an RMSNorm's place; one that is there stays."""
    return norm if norm.centred else LayerNorm(size=norm.size, eps=norm.eps, bias=False, gain=norm.gain)


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
        other = replace(norm, eps=eps_for(norm.eps, old, size))
        return to_layer_norm(other) if layers is None or in_layers(path, layers) else other

    new, tensors = in_basis(spec, size, lambda _, rows: off_the_mean(rows), norm_of)
    notes = [f"the residual stream is {size} wide instead of {old}: with one more dimension its mean can be zero"]
    if spec.head.tied:
        notes.append("the head was untied from the embedding: it reads behind the last norm's weight")
    return Swapped(new, "exact", tensors, summary(spec, size), tuple(notes))


def replace_rmsnorm(spec: ModelSpec, layers: tuple[int, ...] | None = None) -> Swapped:
    """The plain replacement: γ and eps kept, the mean dropped. Exact where the stream has none."""
    why_not_layernorm(spec)
    new = exchanged(spec, {path: to_layer_norm(norm) for path, norm in chosen_norms(spec, layers).items()})
    return Swapped(new, "approximate", {}, summary(spec, spec.hidden_size))


def summary(spec: ModelSpec, size: int) -> dict[str, Any]:
    """What the output's record says of it."""
    number = sum(not norm.centred for _, norm in stream_norms(spec))
    return {"from": "rmsnorm", "to": "layernorm", "norms": number, "hidden_size": [spec.hidden_size, size]}


def stream_is_centred(model: Model) -> bool:
    """Whether nothing that writes into the stream has a mean."""
    spec, written = model.spec, [(name, 1) for name in tables(model.spec)]
    for layer, block in enumerate(spec.blocks):
        written += [(name, 0) for each in writers(block, f"blocks.{layer}") for name in each.names]

    def has_none(name: str, axis: int) -> bool:
        values = model.wide(name)
        return bool(np.abs(values.mean(axis=axis)).max() <= CENTRED * np.abs(values).max())

    return spec.embedding.norm is None and all(has_none(name, axis) for name, axis in written)


def to_layernorm(spec: ModelSpec, asked: Asked) -> Swapped:
    """RMSNorm -> LayerNorm, as exactly as is asked."""
    if asked.approximate:
        return replace_rmsnorm(spec, asked.layers)
    normed = why_not_layernorm(spec) is not None and any(block.residual == "normed" for block in spec.blocks)
    if not normed and spec.embedding.norm is None and asked.weights.ask(stream_is_centred, False, True):
        notes = (
            "nothing that writes into the residual stream has a mean, so the norms were exchanged where they stand",
        )
        return dataclasses.replace(replace_rmsnorm(spec, asked.layers), guarantee="exact", notes=notes)
    return rmsnorm_to_layernorm(spec, asked.layers)


def rmsnorm_again(_: ModelSpec, asked: Asked) -> Step | None:
    """The way back from LayerNorms, where all of the stream's norms are: an RMSNorm beside them would have to be shown
    a stream without a mean, which a tree does not tell.
    """
    return None if asked.approximate or asked.layers is not None else Step("norm", "rmsnorm")
