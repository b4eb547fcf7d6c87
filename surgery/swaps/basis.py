"""The residual stream in other coordinates.

An RMSNorm sees of its input the direction and the length. So the stream may be turned by any isometry U, into a space
as wide or wider (SliceGPT 2401.15024, section 3.2; Ashkboos et al. call it computational invariance): what writes into
the stream is followed by U, what reads it preceded by Uᵀ. Of γ, which does not commute with U, every reader takes its
part, and the norms keep a weight of 1. The length is a mean of squares over d' coordinates instead of d, so that eps
becomes eps·d/d' and readers are multiplied by √(d/d').
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import Block, LayerNorm, ModelSpec, Norm, RMSNorm
from ...errors import SwapRefused
from ..base import Computed, Filled, Model, Tensor, Wide
from ..layerwise import head_weight, readers, unknown, weighed, with_blocks, written

Compute = Callable[[Model], Wide]
_Into = Callable[[Model, Wide], Wide]
"""Rows [n, d] of the old coordinates in the new ones, [n, d']; the model is there for what is fitted to it."""
CENTRED = 1e-15
"""A mean this small beside the largest value of its tensor is what fp64 leaves of one that was subtracted."""


def length_ratio(old: int, new: int) -> float:
    """√(d/d'): what a vector's root mean square over d' coordinates is of that over d of them."""
    return math.sqrt(old / new)


def eps_for(eps: float, old: int, new: int) -> float:
    """The eps that is to d' coordinates what `eps` is to d."""
    return eps * old / new


def _reader(weight: str, gamma: str, ratio: float, into: _Into) -> Compute:
    """ratio · R γ Uᵀ."""
    return lambda model: into(model, model.wide(weight) * model.wide(gamma)) * ratio


def _written_in(name: str, axis: int, into: _Into) -> Compute:
    """What writes into the stream, along an axis, in new coordinates: U W, U b, or the rows of a table."""

    def compute(model: Model) -> Wide:
        values = model.wide(name)
        if axis == 1:
            return into(model, values)
        columns = into(model, np.atleast_2d(values.T))
        return np.ascontiguousarray(columns.T if values.ndim == 2 else columns[0])

    return compute


def table_rows(model: Model, norm: Norm) -> Wide:
    """The rows of the token table, behind the norm that sits on it."""
    rows = model.wide("embedding.weight")
    rows = normed_row(rows - rows.mean(axis=1, keepdims=True) if norm.centred else rows, norm.eps)
    rows = rows * model.wide("embedding.norm.weight")
    return rows + model.wide("embedding.norm.bias") if "bias" in norm.shapes() else rows


def normed_row(rows: Wide, eps: float) -> Wide:
    """Each row over its root mean square."""
    return np.asarray(rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps))


def in_basis(
    spec: ModelSpec, size: int, into: _Into, norm_of: Callable[[str, Norm], Norm]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A tree whose norms are RMSNorms, `size` wide and with the stream in other coordinates.

    `norm_of` gives the new record of the norm at a path; it gets a weight of 1. The head is untied: what it reads is
    multiplied by γ, which is not what the table writes. A norm on the token table is worked into its rows.
    """
    require_weights(spec)
    ratio, on_table = length_ratio(spec.hidden_size, size), spec.embedding.norm
    assert on_table is None or not on_table.centred
    tensors: dict[str, Tensor] = {}
    for path, _ in stream_norms(spec):
        tensors[f"{path}.weight"] = Filled((size,), 1.0, like=f"{path}.weight")
    made: dict[str, Compute] = {"head.weight": _reader(head_weight(spec), "final_norm.weight", ratio, into)}
    for layer, block in enumerate(spec.blocks):
        for each in readers(block, f"blocks.{layer}"):
            made[each.weight] = _reader(each.weight, f"{each.norm}.weight", ratio, into)
    made |= {name: _written_in(name, axis, into) for name, axis in written(spec)}
    if on_table is not None:
        made["embedding.weight"] = lambda model: into(model, table_rows(model, on_table))
    new = exchanged(spec, {path: norm_of(path, norm) for path, norm in stream_norms(spec)})
    new = replace(new, embedding=replace(spec.embedding, norm=None), head=replace(spec.has_head(), tied=False))
    return resized(new, size), tensors | {name: Computed(make) for name, make in made.items()}


def with_norms(block: Block, path: str, found: Mapping[str, Norm]) -> Block:
    """A block with other norms, by path; those not named stay."""
    return block.replaced(**{name.rpartition(".")[2]: found.get(name, norm) for name, norm in norms(block, path)})


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

    def part(node: Any) -> Any:
        """A component that meets the stream, and the experts inside of it."""
        if node is None:
            return None
        width = "hidden_size" if hasattr(node, "hidden_size") else "size"
        inner = {name: part(getattr(node, name)) for name in ("expert", "shared") if hasattr(node, name)}
        return replace(node, **inner, **{width: size})

    def block(record: Block) -> Block:
        found = {path.rpartition(".")[2]: part(each) for path, each in norms(record, "")}
        return record.replaced(**found, **{each.mixer.slot: part(each.mixer) for each in record.sublayers})

    return replace(
        spec,
        embedding=replace(spec.embedding, hidden_size=size, norm=part(spec.embedding.norm)),
        blocks=tuple(map(block, spec.blocks)),
        final_norm=part(spec.final_norm),
        head=part(spec.head),
        positions=part(spec.positions),
    )


# --- the norms that meet it -------------------------------------------------------------------------------------------


def norms(block: Block, path: str) -> Iterator[tuple[str, Norm]]:
    """The norms of a block that look at the stream, each of a kind that swaps know: (path, record)."""
    block.plain()
    return (known(f"{path}.{name}_norm", norm) for name, norm in block.norms().items())


def known(path: str, norm: Norm | None) -> tuple[str, Norm]:
    """A norm and its path; raises SwapRefused where it is of a kind that swaps do not know, or there is none."""
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise unknown(path, norm, "LayerNorm or RMSNorm")
    if isinstance(norm, LayerNorm) and norm.groups > 1:
        raise SwapRefused(
            f"{path} normalises in {norm.groups} groups, but this swap supports only norms over the whole hidden size"
        )
    return path, norm


def stream_norms(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Every norm that looks at the stream, from the first layer to the last norm (not one on the token table)."""
    found = [each for layer, block in enumerate(spec.blocks) for each in norms(block, f"blocks.{layer}")]
    return [*found, known("final_norm", spec.final_norm)]


def every_norm(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """The norms on the stream, and the one on the token table."""
    table = spec.embedding.norm
    if table is not None and spec.embedding.multiplier != 1:
        raise SwapRefused("the embedding has a multiplier before its norm, which this swap does not support")
    return [*([known("embedding.norm", table)] if table is not None else []), *stream_norms(spec)]


def require_weights(spec: ModelSpec) -> None:
    """Raise SwapRefused where a norm that a stream meets does not multiply by its weight as it is."""
    for path, norm in every_norm(spec):
        weighed(path, norm)
