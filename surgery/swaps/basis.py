"""Transform the residual stream into other coordinates.

RMSNorm divides its input by its length, and keeps its direction. So the residual stream may be transformed by any
isometry U, into a space that is as wide or wider (SliceGPT 2401.15024, section 3.2, calls this computational
invariance). U is folded into every linear that writes into the stream, and Uᵀ into every linear that reads it. The
norms' weight γ does not commute with U, so γ is folded into the linears that read the norm, and the norms get a weight
of 1. The mean of squares is over d' coordinates instead of d, so eps becomes eps·d/d', and the linears that read a norm
are multiplied by √(d/d').
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
"""A function that converts rows [n, d] from the old coordinates of the residual stream to the new ones, [n, d'].

It also gets the model, because some conversions are fitted to it.
"""
CENTRED = 1e-15
"""A mean below this, relative to the largest value, counts as zero. Rounding in fp64 may leave a mean of this size."""


def length_ratio(old: int, new: int) -> float:
    """Return √(d/d'), where d is the old number of coordinates and d' the new one.

    If zeros are appended to a vector, its root mean square shrinks by this factor.
    """
    return math.sqrt(old / new)


def eps_for(eps: float, old: int, new: int) -> float:
    """Return the eps for a norm over `new` coordinates that corresponds to `eps` for one over `old`: eps·d/d'."""
    return eps * old / new


def _reader(weight: str, gamma: str, ratio: float, into: _Into) -> Compute:
    """Return a function that computes a linear that reads the residual stream, in the new coordinates: ratio · R γ Uᵀ.

    Args:
        weight: The name of the old weight R.
        gamma: The name of the weight γ of the norm before it. The new norm has the weight 1.
        ratio: The factor √(d/d').
        into: The function that converts rows to the new coordinates. It multiplies them by Uᵀ from the right.
    """
    return lambda model: into(model, model.wide(weight) * model.wide(gamma)) * ratio


def _written_in(name: str, axis: int, into: _Into) -> Compute:
    """Return a function that computes a tensor that writes into the residual stream, in the new coordinates.

    It is U W for a weight, U b for a bias, and the converted rows for an embedding.

    Args:
        name: The name of the old tensor.
        axis: The axis of the tensor that has the size of the residual stream.
        into: The function that converts rows to the new coordinates. It multiplies them by Uᵀ from the right.
    """

    def compute(model: Model) -> Wide:
        values = model.wide(name)
        if axis == 1:
            return into(model, values)
        columns = into(model, np.atleast_2d(values.T))
        return np.ascontiguousarray(columns.T if values.ndim == 2 else columns[0])

    return compute


def table_rows(model: Model, norm: Norm) -> Wide:
    """Return the rows of the token embedding, normalised by the norm that follows the embedding."""
    rows = model.wide("embedding.weight")
    rows = normed_row(rows - rows.mean(axis=1, keepdims=True) if norm.centred else rows, norm.eps)
    rows = rows * model.wide("embedding.norm.weight")
    return rows + model.wide("embedding.norm.bias") if "bias" in norm.shapes() else rows


def normed_row(rows: Wide, eps: float) -> Wide:
    """Return each row divided by √(its mean square + eps)."""
    return np.asarray(rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps))


def in_basis(
    spec: ModelSpec, size: int, into: _Into, norm_of: Callable[[str, Norm], Norm]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Convert the residual stream of a model to other coordinates. Return the new model and its tensors.

    All norms on the residual stream must be RMSNorm. The head is untied, because γ of the last norm is folded into the
    head but not into the embedding. A norm on the token embedding is folded into the rows of the embedding.

    Args:
        spec: The old model.
        size: The new hidden size.
        into: A function that converts rows to the new coordinates.
        norm_of: A function of a norm's path and component that returns the new norm. Its weight becomes 1.
    """
    require_weights(spec)
    ratio, on_table = length_ratio(spec.hidden_size, size), spec.embedding.norm
    assert on_table is None or not on_table.centred
    tensors: dict[str, Tensor] = {}
    for path, _ in stream_norms(spec):
        tensors[f"{path}.weight"] = Filled((size,), 1.0, like=f"{path}.weight")
    computed: dict[str, Compute] = {"head.weight": _reader(head_weight(spec), "final_norm.weight", ratio, into)}
    for layer, block in enumerate(spec.blocks):
        for reader in readers(block, f"blocks.{layer}"):
            computed[reader.weight] = _reader(reader.weight, f"{reader.norm}.weight", ratio, into)
    computed |= {name: _written_in(name, axis, into) for name, axis in written(spec)}
    if on_table is not None:
        computed["embedding.weight"] = lambda model: into(model, table_rows(model, on_table))
    new = exchanged(spec, {path: norm_of(path, norm) for path, norm in stream_norms(spec)})
    new = replace(new, embedding=replace(spec.embedding, norm=None), head=replace(spec.has_head(), tied=False))
    return resized(new, size), tensors | {name: Computed(make) for name, make in computed.items()}


def with_norms(block: Block, path: str, new_norms: Mapping[str, Norm]) -> Block:
    """Return a block with other norms before its attention and feed-forward. `new_norms` has the new norms by path.

    Norms that are not in `new_norms` stay.
    """
    return block.replaced(**{name.rpartition(".")[2]: new_norms.get(name, norm) for name, norm in norms(block, path)})


def exchanged(spec: ModelSpec, new_norms: Mapping[str, Norm]) -> ModelSpec:
    """Return a model with other norms on its residual stream. `new_norms` has the new norms by path.

    Norms that are not in `new_norms` stay.
    """
    blocks = {layer: with_norms(block, f"blocks.{layer}", new_norms) for layer, block in enumerate(spec.blocks)}
    embedding = replace(spec.embedding, norm=new_norms.get("embedding.norm", spec.embedding.norm))
    return with_blocks(spec, blocks, embedding=embedding, final_norm=new_norms.get("final_norm", spec.final_norm))


def chosen_norms(spec: ModelSpec, layers: tuple[int, ...] | None) -> dict[str, Norm]:
    """Return the norms of some layers that read the residual stream, by path. With None, return those of all layers.

    With None, the last norm is included too.
    """
    if layers is None:
        return dict(stream_norms(spec))
    return {path: norm for layer in layers for path, norm in norms(spec.blocks[layer], f"blocks.{layer}")}


def resized(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the model with another hidden size in all components. The eps of norms is unchanged."""

    def part(node: Any) -> Any:
        """Give a component that reads or writes the residual stream the new hidden size, and also the experts in it."""
        if node is None:
            return None
        width = "hidden_size" if hasattr(node, "hidden_size") else "size"
        inner = {name: part(getattr(node, name)) for name in ("expert", "shared") if hasattr(node, name)}
        return replace(node, **inner, **{width: size})

    def block(record: Block) -> Block:
        resized_norms = {path.rpartition(".")[2]: part(norm) for path, norm in norms(record, "")}
        return record.replaced(**resized_norms, **{norm.mixer.slot: part(norm.mixer) for norm in record.sublayers})

    return replace(
        spec,
        embedding=replace(spec.embedding, hidden_size=size, norm=part(spec.embedding.norm)),
        blocks=tuple(map(block, spec.blocks)),
        final_norm=part(spec.final_norm),
        head=part(spec.head),
        positions=part(spec.positions),
    )


# --- the norms on the residual stream ---------------------------------------------------------------------------------


def norms(block: Block, path: str) -> Iterator[tuple[str, Norm]]:
    """Yield the path and the component of every norm of a block that reads the residual stream.

    Raises SwapRefused if one of them is not LayerNorm or RMSNorm.
    """
    block.plain()
    return (known(f"{path}.{name}_norm", norm) for name, norm in block.norms().items())


def known(path: str, norm: Norm | None) -> tuple[str, Norm]:
    """Return path and norm. Raises SwapRefused if it is not a LayerNorm or RMSNorm over the whole hidden size."""
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise unknown(path, norm, "LayerNorm or RMSNorm")
    if isinstance(norm, LayerNorm) and norm.groups > 1:
        raise SwapRefused(
            f"{path} normalises in {norm.groups} groups, but this swap supports only norms over the whole hidden size"
        )
    return path, norm


def stream_norms(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Return the path and the component of every norm that reads the residual stream, including the last norm.

    A norm on the token embedding is not included.
    """
    block_norms = [
        named_norm for layer, block in enumerate(spec.blocks) for named_norm in norms(block, f"blocks.{layer}")
    ]
    return [*block_norms, known("final_norm", spec.final_norm)]


def every_norm(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """Return path and component of every norm that reads the residual stream, and of a norm on the embedding."""
    table = spec.embedding.norm
    if table is not None and spec.embedding.multiplier != 1:
        raise SwapRefused("the embedding has a multiplier before its norm, which this swap does not support")
    return [*([known("embedding.norm", table)] if table is not None else []), *stream_norms(spec)]


def require_weights(spec: ModelSpec) -> None:
    """Raise SwapRefused if a norm on the residual stream multiplies by something else than its weight."""
    for path, norm in every_norm(spec):
        weighed(path, norm)
