"""Change the width of the residual stream from d to d' coordinates.

There are three exact ways to make it wider:

- k times as wide, with any norms: the stream is repeated k times, (x, x, …). Mean and variance are unchanged, and the
  linears that read the stream use only the first copy. Values are only moved.
- any width, with RMSNorm: coordinates are appended that are always zero, because nothing writes to them. The mean of
  squares is over more coordinates, so γ becomes γ·√(d/d'), and eps becomes eps·d/d'.
- any width, with LayerNorm: coordinates are appended that are always the mean of x. So the mean is unchanged, and the
  variance shrinks by d/d'; γ and eps change as for RMSNorm. Linears that write into the stream get the mean of their
  rows as new rows. β is 0 for the new coordinates, so they are 0 after a norm.

Making it narrower is exact if it removes coordinates that these swaps added, and that have not changed since. Otherwise
it needs RMSNorm: a rotation puts as much as possible of the norms' inputs into the first coordinates, and the others
are dropped (SliceGPT 2401.15024, section 3, but with one rotation for all layers, so that no rotation is needed between
them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from ...components import ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Index, Model, Swapped, Tensor, Wide, gather, padded, scaled, taken
from ..fits.scratch import Scratch
from ..layerwise import read_weights, written
from ..options import NORMS, Option, Parts
from ..registry import Asked, Swap
from .basis import (
    Compute,
    eps_for,
    every_norm,
    exchanged,
    in_basis,
    length_ratio,
    normed_row,
    norms,
    require_weights,
    resized,
    stream_norms,
    table_rows,
)

if TYPE_CHECKING:
    from ..fits.calibration import Calibration

_SAME = 1e-15  # the largest error of fp64 computations, relative to the largest value


def _resize_hidden(spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the width of the residual stream."""
    old, new = spec.hidden_size, asked.number("a width")
    if new == old:
        raise SwapRefused(f"the hidden size is already {old}", "Give a larger or a smaller size.")
    require_weights(spec)
    done = _wider(spec, new) if new > old else _narrower(spec, new, asked)
    heads, notes = max((getattr(block.mixer("attention"), "heads", 1) for block in spec.blocks), default=1), done.notes
    if new % heads and spec.final_norm is not None and not spec.final_norm.centred:
        notes += (
            f"transformers' Llama class needs a hidden size divisible by its {heads} heads, even if head_dim is set",
        )
    return Swapped(done.spec, done.guarantee, done.tensors, {"hidden_size": [old, new], **done.summary}, notes)


def _vectors(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the weights and biases of all norms on the residual stream, as pairs of norm path and tensor name."""
    return [(path, f"{path}.{name}") for path, norm in every_norm(spec) for name in norm.shapes()]


def _mapped(spec: ModelSpec, write: Index, read: Index) -> dict[str, Tensor]:
    """Return all tensors that write into or read the residual stream, after its coordinates were rearranged.

    Args:
        spec: The old model.
        write: For every new coordinate, the old one that it copies in tensors that write, or -1 for zeros.
        read: The same for tensors that read.
    """
    tensors: dict[str, Tensor] = {name: taken(name, write, axis) for name, axis in written(spec)}
    return tensors | {name: taken(name, read, 1) for name in read_weights(spec)}


def _rescaled(spec: ModelSpec, new: int) -> ModelSpec:
    """Return the components with the hidden size `new`. The eps of norms changes in proportion to 1 / hidden size."""
    old = spec.hidden_size
    norms_by_path = {path: replace(norm, eps=eps_for(norm.eps, old, new)) for path, norm in every_norm(spec)}
    return resized(exchanged(spec, norms_by_path), new)


# --- a wider stream ---------------------------------------------------------------------------------------------------


def _wider(spec: ModelSpec, new: int) -> Swapped:
    """Widen the residual stream in one of the three exact ways in the module's docstring."""
    old = spec.hidden_size
    appended, again = padded(old, new), padded(old, new, repeat=True)
    if new % old == 0:  # copies side by side
        tensors = _mapped(spec, again, appended)
        for path, name in _vectors(spec):
            # A tied head has all copies of the table, so the last norm must zero all but the first.
            tensors[name] = taken(name, appended if path == "final_norm" and spec.tied else again)
        return Swapped(resized(spec, new), "exact", tensors, {"method": "copies"})
    centred = {norm.centred for _, norm in every_norm(spec)}
    multiples = f"Possible: multiples of {old}, such as {2 * old}"
    if len(centred) > 1:
        raise SwapRefused(
            f"the hidden size cannot change from {old} to {new}, because the model has both LayerNorms and RMSNorms:"
            " new coordinates must be the mean for a LayerNorm, and zero for an RMSNorm",
            f"{multiples}. After --norm rmsnorm, if that is possible, any width is possible.",
        )
    if centred == {False}:
        # Linears may read the new coordinates, which are zero, with any weights. They are copies of old ones, so that
        # training changes what is written there.
        gains = {name: _gamma(name, old, new) for _, name in _vectors(spec)}
        return Swapped(_rescaled(spec, new), "exact", _mapped(spec, appended, again) | gains, {"method": "zeros"})
    if any(block.residual == "normed" for block in spec.blocks):
        raise SwapRefused(
            f"the hidden size cannot become {new}: the residual stream is a LayerNorm's output, whose mean is"
            " not constant",
            f"{multiples}.",
        )
    return _with_means(spec, new)


def _gamma(name: str, old: int, new: int) -> Tensor:
    """Return the weight of a norm for a larger hidden size: √(d/d') times the old weight, extended by ones."""
    ratio = length_ratio(old, new)
    return Computed(lambda model: np.append(model.wide(name), np.ones(new - old)) * ratio)


def _with_mean(array: Wide, new: int, axis: int) -> Wide:
    """Append copies of an array's mean along an axis, until the axis has the length `new`."""
    mean = array.mean(axis=axis, keepdims=True)
    return np.concatenate([array, np.repeat(mean, new - array.shape[axis], axis=axis)], axis=axis)


def _append_mean(name: str, new: int, axis: int) -> Compute:
    """Return a function that computes the tensor `name` and extends it by `_with_mean`."""
    return lambda model: _with_mean(model.wide(name), new, axis)


def _with_means(spec: ModelSpec, new: int) -> Swapped:
    """Widen the residual stream of a model with LayerNorms. The new coordinates are always the mean of the old ones."""
    old, norm, changed = spec.hidden_size, spec.embedding.norm, _rescaled(spec, new)
    tensors: dict[str, Tensor] = {name: Computed(_append_mean(name, new, axis)) for name, axis in written(spec)}
    tensors |= {name: taken(name, padded(old, new, repeat=True), 1) for name in read_weights(spec)}
    for path, stream_norm in stream_norms(spec):
        tensors[f"{path}.weight"] = _gamma(f"{path}.weight", old, new)
        if "bias" in stream_norm.shapes():
            tensors[f"{path}.bias"] = taken(f"{path}.bias", padded(old, new))
    notes: tuple[str, ...] = ()
    if norm is not None:
        # The norm's output has a mean, so the norm is folded into the table, which a tied head cannot share any more.
        tensors["embedding.weight"] = Computed(lambda model: _with_mean(table_rows(model, norm), new, 1))
        if spec.tied:
            tensors["head.weight"] = taken("embedding.weight", padded(old, new, repeat=True), 1)
            notes = ("the head was untied from the embedding, because the embedding's norm was folded into its table",)
        ends = {"embedding": replace(changed.embedding, norm=None), "head": replace(changed.has_head(), tied=False)}
        changed = replace(changed, **ends)
    return Swapped(changed, "exact", tensors, {"method": "means"}, notes)


# --- a narrower stream ------------------------------------------------------------------------------------------------


def _narrower(spec: ModelSpec, new: int, asked: Asked) -> Swapped:
    """Narrow the residual stream to `new` coordinates.

    This is exact if the last coordinates are redundant. Otherwise the principal directions on a text stay, or with
    --approximate the coordinates with the largest weights.
    """
    old = spec.hidden_size
    if asked.approximate:
        equal = np.ones(old)
        energy = asked.weights.ask(_energies, equal, equal)
        index = np.sort(np.argsort(-energy, kind="stable")[:new])
        narrower = _cut(spec, index)
        summary = {"method": "largest", "energy_kept": float(energy[index].sum() / energy.sum())}
        return Swapped(narrower.spec, "approximate", narrower.tensors, summary)

    def is_true(question: Callable[[Model, int], bool]) -> bool:
        return asked.weights.ask(lambda model: question(model, new), False, True)

    centred = {norm.centred for _, norm in every_norm(spec)}
    if old % new == 0 and is_true(_are_copies):
        return Swapped(resized(spec, new), "exact", _chosen_tensors(spec, np.arange(new)), {"method": "copies"})
    if centred == {False} and is_true(_are_zero):
        return _cut(spec, np.arange(new))
    if centred == {True} and spec.embedding.norm is None and is_true(_are_means):
        return _cut(spec, np.arange(new))
    if centred != {False} or any(block.residual == "normed" for block in spec.blocks):
        raise SwapRefused(
            f"removing coordinates {new} to {old - 1} of the residual stream is exact only if they are always zero. "
            "To lose little otherwise, gptkit first rotates the residual stream, which is possible only if all norms "
            "are RMSNorm and no residual is taken after a norm",
            "Run gptkit swap with --norm rmsnorm first if that is exact for the model, or pass --approximate, which "
            "keeps the coordinates with the largest weights.",
        )
    if asked.calibration is None:
        raise SwapRefused(
            f"removing coordinates {new} to {old - 1} of the residual stream is exact only if they are always zero. "
            "Otherwise, a text must show which coordinates matter least",
            "Give a text with --calibrate FILE, or use --approximate to keep the largest coordinates.",
        )
    return _sliced(spec, new, asked.calibration())


def _are_copies(model: Model, new: int) -> bool:
    """Return whether the coordinates from `new` on only repeat the first `new` ones, and no linear reads them."""
    spec, old = model.spec, model.spec.hidden_size
    write, read = padded(new, old, repeat=True), padded(new, old)

    def is_its(name: str, index: Index, axis: int = 0) -> bool:
        values = model.wide(name)
        return np.array_equal(values, gather(values, index, axis))

    if not all(is_its(name, write, axis) for name, axis in written(spec)):
        return False
    if any(model.wide(name)[:, new:].any() for name in read_weights(spec)):
        return False
    first = {"final_norm"} if spec.tied else set()
    return all(is_its(name, read if path in first else write) for path, name in _vectors(spec))


def _are_zero(model: Model, new: int) -> bool:
    """Return whether the coordinates of the residual stream from `new` on are always zero."""
    return not any(np.moveaxis(model.wide(name), axis, 0)[new:].any() for name, axis in written(model.spec))


def _are_means(model: Model, new: int) -> bool:
    """Return whether the coordinates from `new` on are always the mean of the first `new` ones.

    LayerNorms must not add a bias to them.
    """
    for name, axis in written(model.spec):
        values = model.wide(name)
        first = np.take(values, np.arange(new), axis)
        gap = np.abs(values - _with_mean(first, values.shape[axis], axis)).max()
        if gap > _SAME * np.abs(values).max():
            return False
    return not any(model.wide(name)[new:].any() for _, name in _vectors(model.spec) if name.endswith("bias"))


def _chosen_tensors(spec: ModelSpec, index: Index) -> dict[str, Tensor]:
    """Return all tensors that read or write the residual stream, with only the coordinates in `index`."""
    return _mapped(spec, index, index) | {name: taken(name, index) for _, name in _vectors(spec)}


def _cut(spec: ModelSpec, index: Index) -> Swapped:
    """Remove redundant coordinates of the residual stream. Only the coordinates in `index` stay.

    The weights and eps of norms are adapted to the smaller size.
    """
    ratio = length_ratio(spec.hidden_size, len(index))
    gains = (f"{path}.weight" for path, _ in every_norm(spec))
    tensors = _chosen_tensors(spec, index) | {name: scaled(name, index, ratio) for name in gains}
    return Swapped(_rescaled(spec, len(index)), "exact", tensors, {"method": "cut"})


def _energies(model: Model) -> Wide:
    """Return for each coordinate of the residual stream the sum of squares of all weights that write into it."""
    energy = np.zeros(model.spec.hidden_size)
    for name, axis in written(model.spec):
        values = model.wide(name)
        energy += (values**2).sum(axis=1 - axis) if values.ndim == 2 else values**2
        model.release()
    return energy


def _directions(model: Model, calibration: Calibration) -> Wide:
    """Return the principal directions of the norms' inputs on a text, as columns [d, d], the most important first.

    They are eigenvectors of the second moment. Every input is first scaled to the length √d, as the norm does.
    """
    spec = model.spec
    total = np.zeros((spec.hidden_size, spec.hidden_size))
    for layer in calibration.walk(model):
        output, seen = layer.run(*(path.rpartition(".")[2] for path, _ in norms(spec.blocks[layer.index], "")))
        last = [output] * (layer.index == len(spec.blocks) - 1)
        for inputs in (*(before for before, _ in seen.values()), *last):
            normed = normed_row(inputs.reshape(-1, spec.hidden_size).double().cpu().numpy(), 1e-30)
            total += normed.T @ normed
    return np.ascontiguousarray(np.linalg.eigh(total)[1][:, ::-1])


def _sliced(spec: ModelSpec, new: int, calibration: Calibration) -> Swapped:
    """Reduce the residual stream to its `new` most important principal directions on a text."""
    fitted, old = Scratch(lambda model: iter([{"directions": _directions(model, calibration)}])), spec.hidden_size

    def into(model: Model, rows: Wide) -> Wide:
        return np.asarray(rows @ fitted.of(model, "directions")[:, :new])

    new_spec, tensors = in_basis(spec, new, into, lambda _, norm: replace(norm, eps=eps_for(norm.eps, old, new)))
    notes = ("the head was untied from the embedding, because it takes up the last norm's weight",)
    return Swapped(new_spec, "approximate", tensors, {"method": "principal directions"}, notes if spec.tied else ())


ORDER = 170
_PARTS: Parts = {"": ("dimensions", lambda spec: {spec.hidden_size})}
OPTIONS = (
    Option(
        "hidden",
        NORMS,
        4,
        "The hidden size of the model (the width of its residual stream), such as 768.",
        "N",
        parts=_PARTS,
    ),
)
SWAPS = (
    Swap(
        option="hidden",
        form="N",
        takes="a hidden size of d",
        gives="a hidden size of N",
        needs="A larger N must be a multiple of d, or all norms must be of one kind. A smaller N is exact only if the"
        " dropped coordinates are redundant; otherwise it needs RMSNorm and a calibration text",
        source="Net2Net 1511.05641 (larger); SliceGPT 2401.15024 (smaller)",
        reshape=_resize_hidden,
        examples=lambda spec: (str(spec.hidden_size + 8), str(2 * spec.hidden_size)),
        calibrated=True,
    ),
)
