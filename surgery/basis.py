"""The residual stream in other coordinates.

An RMSNorm sees of its input the direction and the length. So the stream may be turned by any isometry U, into a space
as wide or wider (SliceGPT 2401.15024, section 3.2; Ashkboos et al. call it computational invariance): what writes into
the stream is followed by U, what reads it preceded by Uᵀ. Of γ, which does not commute with U, every reader takes its
part, and the norms keep a weight of 1. The length is a mean of squares over d' coordinates instead of d, so that eps
becomes eps·d/d' and readers are multiplied by √(d/d').
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ..components import Block, MixtureOfExperts, ModelSpec, Norm, RMSNorm
from .base import Computed, Filled, Model, Tensor, Wide
from .layerwise import replaced, with_blocks
from .stream import head_weight, norms, readers, require_weights, stream_norms, writers

__all__ = [
    "CENTRED",
    "Compute",
    "Into",
    "chosen_norms",
    "eps_for",
    "exchanged",
    "in_basis",
    "length_ratio",
    "normed_row",
    "reader",
    "resized",
    "rows_in",
    "with_norms",
    "writer",
]

replace = msgspec.structs.replace
Compute = Callable[[Model], Wide]
Into = Callable[[Model, Wide], Wide]
"""Rows [n, d] of the old coordinates in the new ones, [n, d']; the model is there for what is fitted to it."""

CENTRED = 1e-15
"""A mean this small beside the largest value of its tensor is what fp64 leaves of one that was subtracted."""


def length_ratio(old: int, new: int) -> float:
    """√(d/d'): what a vector's root mean square over d' coordinates is of that over d of them."""
    return math.sqrt(old / new)


def eps_for(eps: float, old: int, new: int) -> float:
    """The eps that is to d' coordinates what `eps` is to d."""
    return eps * old / new


def reader(weight: str, gamma: str, ratio: float, into: Into) -> Compute:
    """ratio · R γ Uᵀ."""
    return lambda model: into(model, model.wide(weight) * model.wide(gamma)) * ratio


def writer(weight: str, into: Into) -> Compute:
    """U W, the columns of a writer in new coordinates."""
    return lambda model: np.ascontiguousarray(into(model, model.wide(weight).T).T)


def shift(bias: str, into: Into) -> Compute:
    """U b."""
    return lambda model: into(model, model.wide(bias)[None])[0]


def rows_in(table: str, into: Into, norm: RMSNorm | None = None) -> Compute:
    """A table's rows in new coordinates, behind its norm where it has one."""

    def compute(model: Model) -> Wide:
        rows = model.wide(table)
        if norm is not None:
            rows = normed_row(rows, norm.eps) * model.wide("embedding.norm.weight")
        return into(model, rows)

    return compute


def normed_row(rows: Wide, eps: float) -> Wide:
    """Each row over its root mean square."""
    found: Wide = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)
    return found


def in_basis(
    spec: ModelSpec, size: int, into: Into, norm_of: Callable[[str, Norm], Norm]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tree whose norms are RMSNorms, `size` wide and with the stream in other coordinates.

    `norm_of` gives the new record of the norm at a path; it gets a weight of 1. The head is untied: what it reads is
    multiplied by γ, which is not what the table writes. A norm on the token table is worked into its rows.
    """
    require_weights(spec)
    ratio = length_ratio(spec.hidden_size, size)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Norm] = {}
    for path, norm in stream_norms(spec):
        found[path] = norm_of(path, norm)
        tensors[f"{path}.weight"] = Filled((size,), 1.0, like=f"{path}.weight")
    for layer, block in enumerate(spec.blocks):
        path = f"blocks.{layer}"
        for each in readers(block, path):
            tensors[each.weight] = Computed(reader(each.weight, f"{each.norm}.weight", ratio, into))
        for each in writers(block, path):
            tensors[each.weight] = Computed(writer(each.weight, into))
            if each.bias:
                tensors[each.bias_name] = Computed(shift(each.bias_name, into))
    tensors["head.weight"] = Computed(reader(head_weight(spec), "final_norm.weight", ratio, into))
    on_table = spec.embedding.norm
    assert on_table is None or isinstance(on_table, RMSNorm)
    tensors["embedding.weight"] = Computed(rows_in("embedding.weight", into, on_table))
    if spec.positions is not None:
        tensors["positions.weight"] = Computed(rows_in("positions.weight", into))
    new = exchanged(spec, found)
    new = replace(new, embedding=replace(spec.embedding, norm=None), head=replace(spec.head, tied=False))
    return resized(new, size), tensors


def with_norms(block: Block, path: str, found: Mapping[str, Norm]) -> Block:
    """A block with other norms, by path; those not named stay."""
    own = {name.rpartition(".")[2]: found.get(name, norm) for name, norm in norms(block, path)}
    return replaced(block, **own)


def exchanged(spec: ModelSpec, found: Mapping[str, Norm]) -> ModelSpec:
    """The tree with other records for its norms, by path; those not named stay."""
    blocks = {layer: with_norms(block, f"blocks.{layer}", found) for layer, block in enumerate(spec.blocks)}
    embedding = replace(spec.embedding, norm=found.get("embedding.norm", spec.embedding.norm))
    return with_blocks(spec, blocks, embedding=embedding, final_norm=found.get("final_norm", spec.final_norm))


def chosen_norms(spec: ModelSpec, layers: tuple[int, ...] | None) -> dict[str, Norm]:
    """The norms on the stream, or those of some layers, by path."""
    if layers is None:
        return dict(stream_norms(spec))
    return {path: norm for layer in layers for path, norm in norms(spec.blocks[layer], f"blocks.{layer}")}


def resized(spec: ModelSpec, size: int) -> ModelSpec:
    """The tree with a stream of `size`; eps stays as it is."""

    def norm(record: Norm) -> Norm:
        return replace(record, size=size)

    def block(record: Block) -> Block:
        found: dict[str, Any] = {path.rpartition(".")[2]: norm(each) for path, each in norms(record, "")}
        for sublayer in record.sublayers:
            mixer: Any = sublayer.mixer
            expert = {"expert": replace(mixer.expert, hidden_size=size)} if isinstance(mixer, MixtureOfExperts) else {}
            found[mixer.slot] = replace(mixer, hidden_size=size, **expert)
        return replaced(record, **found)

    table = spec.embedding.norm
    return replace(
        spec,
        embedding=replace(spec.embedding, hidden_size=size, norm=None if table is None else norm(table)),
        blocks=tuple(block(each) for each in spec.blocks),
        final_norm=norm(spec.final_norm),
        head=replace(spec.head, hidden_size=size),
        positions=None if spec.positions is None else replace(spec.positions, size=size),
    )
