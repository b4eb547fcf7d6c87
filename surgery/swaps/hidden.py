"""The width of the residual stream.

Wider, exact:

- k times as wide, any norms: the stream is its coordinates k times over, (x, x, …). Mean and variance stay, readers
  take the first copy alone. Every value is only moved.
- any width, RMSNorm: zeros are appended, which nothing writes to; the mean of squares is over more of them, so
  γ·√(d/d') and eps·d/d'.
- any width, LayerNorm: the mean of x is appended, so that the mean stays and the variance shrinks by d/d'; γ and eps as
  above. Writers have the mean of their rows as new ones, and β is 0 there, so that readers see nothing of it.

Narrower, exact: what these have added is taken away again, where it still is as they made it. Narrower otherwise, with
RMSNorm: a rotation puts most of what the norms see into the first coordinates, and the rest is left out (SliceGPT
2401.15024, section 3, but one rotation for all layers, so that nothing has to turn between them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...components import LayerNorm, ModelSpec, Norm, RMSNorm
from ...errors import SwapRefused
from ..base import Computed, Model, Swapped, Tensor, Wide
from ..basis import Compute, eps_for, exchanged, in_basis, length_ratio, normed_row, resized
from ..fits.scratch import Scratch
from ..gather import gather, padded, scaled, taken
from ..layerwise import smaller_again
from ..registry import Asked, Step, Swap
from ..stream import norms, readers, require_weights, stream_norms, tables, writers

if TYPE_CHECKING:
    from ..fits.calibration import Calibration

__all__ = ["SWAPS"]

replace = msgspec.structs.replace

SAME = 1e-15
"""How near, beside the largest value, what is computed in fp64 comes to what it should be."""


def resize_hidden(spec: ModelSpec, asked: Asked) -> Swapped:
    """The tree with a stream of another width."""
    old, new = spec.hidden_size, asked.number("a width")
    if new == old:
        raise SwapRefused(f"the residual stream is {old} wide already", f"Possible: more than {old}, or less.")
    require_weights(spec)
    done = wider(spec, new) if new > old else narrower(spec, new, asked)
    notes = (*done.notes, *divisibility(done.spec))
    return Swapped(done.spec, done.guarantee, done.tensors, {"hidden_size": [old, new], **done.summary}, notes)


def divisibility(spec: ModelSpec) -> tuple[str, ...]:
    """What transformers' config of llama makes of a width that its heads do not divide."""
    heads = max((getattr(block.mixer("attention"), "heads", 1) for block in spec.blocks), default=1)
    if spec.hidden_size % heads == 0 or not isinstance(spec.final_norm, RMSNorm):
        return ()
    return (f"transformers' llama takes no width that its {heads} heads do not divide, even beside a head_dim",)


def every_norm(spec: ModelSpec) -> list[tuple[str, Norm]]:
    """The norms on the stream, and the one on the token table."""
    table = spec.embedding.norm
    return [*([("embedding.norm", table)] if table is not None else []), *stream_norms(spec)]


# --- wider ------------------------------------------------------------------------------------------------------------


def wider(spec: ModelSpec, new: int) -> Swapped:
    """Exact; see the module's text."""
    old = spec.hidden_size
    if new % old == 0:
        return repeated(spec, new)
    kinds = {type(norm) for _, norm in every_norm(spec)}
    multiples = f"Possible: multiples of {old}, as {2 * old}"
    if len(kinds) > 1:
        raise SwapRefused(
            f"with LayerNorms beside RMSNorms a stream of {old} cannot become {new} wide: the one needs the mean in the"
            " new coordinates, the other zeros",
            f"{multiples}; or any width after --norm rmsnorm, where that is possible.",
        )
    if kinds == {RMSNorm}:
        return with_zeros(spec, new)
    if any(block.residual == "normed" for block in spec.blocks):
        raise SwapRefused(
            f"a stream that is a LayerNorm's output cannot become {new} wide: the norm's bias and weight are in it, and"
            " their mean is no constant",
            f"{multiples}.",
        )
    return with_means(spec, new)


def repeated(spec: ModelSpec, new: int) -> Swapped:
    """k copies of the stream side by side."""
    tensors: dict[str, Tensor] = {}
    write, read = padded(spec.hidden_size, new, repeat=True), padded(spec.hidden_size, new)
    for name, axis in written(spec):
        tensors[name] = taken(name, write, axis)
    for name in read_weights(spec):
        tensors[name] = taken(name, read, 1)
    for path, norm in every_norm(spec):
        # A tied head multiplies by every copy of the table.
        index = read if path == "final_norm" and spec.head.tied else write
        for name in vectors(path, norm):
            tensors[name] = taken(name, index)
    return Swapped(resized(spec, new), "exact", tensors, {"method": "copies"})


def written(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """What writes into the stream: (tensor, the axis that is the stream's)."""
    for name in tables(spec):
        yield name, 1
    for layer, block in enumerate(spec.blocks):
        for each in writers(block, f"blocks.{layer}"):
            yield each.weight, 0
            if each.bias:
                yield each.bias_name, 0


def read_weights(spec: ModelSpec) -> Iterator[str]:
    """What reads it, [out, hidden]; not a tied head, whose matrix is a table."""
    for layer, block in enumerate(spec.blocks):
        for each in readers(block, f"blocks.{layer}"):
            yield each.weight
    if not spec.head.tied:
        yield "head.weight"


def vectors(path: str, norm: Norm) -> tuple[str, ...]:
    """A norm's tensors."""
    return tuple(f"{path}.{name}" for name in norm.shapes())


def rescaled(spec: ModelSpec, new: int, paths: set[str] | None = None) -> ModelSpec:
    """The tree with eps as another width needs it, of the norms named or of all; not resized yet."""
    old = spec.hidden_size
    found = {
        path: replace(norm, eps=eps_for(norm.eps, old, new))
        for path, norm in every_norm(spec)
        if paths is None or path in paths
    }
    return exchanged(spec, found)


def gamma(name: str, old: int, new: int) -> Tensor:
    """A norm's weight for another width: γ·√(d/d'), and the same for a weight of 1 in coordinates that are new."""
    ratio = length_ratio(old, new)
    return Computed(lambda model: np.append(model.wide(name), np.ones(new - old)) * ratio)


def with_zeros(spec: ModelSpec, new: int) -> Swapped:
    """RMSNorm: new coordinates that are always zero."""
    old = spec.hidden_size
    tensors: dict[str, Tensor] = {name: taken(name, padded(old, new), axis) for name, axis in written(spec)}
    # What new coordinates would be read as is free; as the old ones, so that training reaches what is to write them.
    tensors |= {name: taken(name, padded(old, new, repeat=True), 1) for name in read_weights(spec)}
    tensors |= {f"{path}.weight": gamma(f"{path}.weight", old, new) for path, _ in every_norm(spec)}
    return Swapped(resized(rescaled(spec, new), new), "exact", tensors, {"method": "zeros"})


def with_mean(array: Wide, new: int, axis: int) -> Wide:
    """An array with its mean along an axis appended until it is `new` long."""
    mean = array.mean(axis=axis, keepdims=True)
    found: Wide = np.concatenate([array, np.repeat(mean, new - array.shape[axis], axis=axis)], axis=axis)
    return found


def append_mean(name: str, new: int, axis: int) -> Compute:
    """A tensor with the mean of what it writes in new coordinates."""
    return lambda model: with_mean(model.wide(name), new, axis)


def normed_with_mean(spec: ModelSpec, new: int) -> Compute:
    """The rows of a normed table: LayerNorm(row), with the mean appended."""
    norm = spec.embedding.norm
    assert isinstance(norm, LayerNorm)

    def compute(model: Model) -> Wide:
        rows = model.wide("embedding.weight")
        rows = normed_row(rows - rows.mean(axis=1, keepdims=True), norm.eps) * model.wide("embedding.norm.weight")
        return with_mean(rows + model.wide("embedding.norm.bias") if norm.bias else rows, new, 1)

    return compute


def with_means(spec: ModelSpec, new: int) -> Swapped:
    """LayerNorm: new coordinates that are always the mean of the old ones."""
    old, head = spec.hidden_size, spec.head
    tensors: dict[str, Tensor] = {name: Computed(append_mean(name, new, axis)) for name, axis in written(spec)}
    tensors |= {name: taken(name, padded(old, new, repeat=True), 1) for name in read_weights(spec)}
    for path, norm in stream_norms(spec):
        tensors[f"{path}.weight"] = gamma(f"{path}.weight", old, new)
        if norm.shapes().get("bias"):
            tensors[f"{path}.bias"] = taken(f"{path}.bias", padded(old, new))
    scaled_spec = rescaled(spec, new)
    notes: tuple[str, ...] = ()
    if spec.embedding.norm is not None:
        # Its output has a mean of its own, so it is worked into the table, which a tied head cannot then share.
        tensors["embedding.weight"] = Computed(normed_with_mean(spec, new))
        if head.tied:
            tensors["head.weight"] = taken("embedding.weight", padded(old, new, repeat=True), 1)
            notes = ("the head was untied from the embedding, which took in its norm",)
        embedding = replace(scaled_spec.embedding, norm=None)
        scaled_spec = replace(scaled_spec, embedding=embedding, head=replace(head, tied=False))
    return Swapped(resized(scaled_spec, new), "exact", tensors, {"method": "means"}, notes)


# --- narrower, where nothing is lost ----------------------------------------------------------------------------------


def narrower(spec: ModelSpec, new: int, asked: Asked) -> Swapped:
    """Exact where the last coordinates say nothing new, else a rotation, or the largest coordinates."""
    old = spec.hidden_size
    if asked.approximate:
        return largest(spec, asked, new)

    def holds(question: Callable[[Model, int], bool]) -> bool:
        return asked.weights.ask(lambda model: question(model, new), False, True)

    kinds = {type(norm) for _, norm in every_norm(spec)}
    if old % new == 0 and holds(are_copies):
        tensors = chosen_tensors(spec, np.arange(new))
        return Swapped(resized(spec, new), "exact", tensors, {"method": "copies"})
    if kinds == {RMSNorm} and holds(are_zero):
        return cut(spec, new)
    if kinds == {LayerNorm} and spec.embedding.norm is None and holds(are_means):
        return cut(spec, new)
    if kinds != {RMSNorm} or any(block.residual == "normed" for block in spec.blocks):
        raise SwapRefused(
            f"coordinates {new} to {old - 1} of the residual stream are in use, and a LayerNorm does not allow the"
            " rotation that would leave out the least of it",
            "Possible: --norm rmsnorm first, where that is exact; --approximate keeps the largest coordinates.",
        )
    if asked.calibration is None:
        raise SwapRefused(
            f"coordinates {new} to {old - 1} of the residual stream are in use, and what may be left out shows on a"
            " text alone",
            "--calibrate FILE, or --approximate, which keeps the largest coordinates.",
        )
    return sliced(spec, new, asked.calibration())


def are_copies(model: Model, new: int) -> bool:
    """Whether the stream is its first `new` coordinates over and over, and readers take only the first."""
    spec, old = model.spec, model.spec.hidden_size
    write = padded(new, old, repeat=True)
    for name, axis in written(spec):
        values = model.wide(name)
        if not np.array_equal(values, gather(values, write, axis)):
            return False
    if any(model.wide(name)[:, new:].any() for name in read_weights(spec)):
        return False
    for path, norm in every_norm(spec):
        first = path == "final_norm" and spec.head.tied
        index = padded(new, old, repeat=not first)
        for name in vectors(path, norm):
            values = model.wide(name)
            if not np.array_equal(values, gather(values, index, 0)):
                return False
    return True


def are_zero(model: Model, new: int) -> bool:
    """Whether nothing writes into the coordinates from `new` on."""
    return not any(np.moveaxis(model.wide(name), axis, 0)[new:].any() for name, axis in written(model.spec))


def are_means(model: Model, new: int) -> bool:
    """Whether the coordinates from `new` on hold the mean of those before, and LayerNorms add nothing to them."""
    for name, axis in written(model.spec):
        values = model.wide(name)
        kept = np.take(values, np.arange(new), axis)
        gap = np.abs(values - with_mean(kept, values.shape[axis], axis)).max()
        if gap > SAME * np.abs(values).max():
            return False
    biased = [f"{path}.bias" for path, norm in stream_norms(model.spec) if norm.shapes().get("bias")]
    return not any(model.wide(name)[new:].any() for name in biased)


def chosen_tensors(spec: ModelSpec, index: Any) -> dict[str, Tensor]:
    """Every tensor with some coordinates of the stream alone."""
    tensors: dict[str, Tensor] = {name: taken(name, index, axis) for name, axis in written(spec)}
    tensors |= {name: taken(name, index, 1) for name in read_weights(spec)}
    tensors |= {name: taken(name, index) for path, norm in every_norm(spec) for name in vectors(path, norm)}
    return tensors


def cut(spec: ModelSpec, new: int, index: Any = None) -> Swapped:
    """Without the last coordinates, or with those of `index` alone, which hold all of the stream's length."""
    old = spec.hidden_size
    index = np.arange(new) if index is None else index
    tensors = chosen_tensors(spec, index)
    ratio = length_ratio(old, new)
    tensors |= {f"{path}.weight": scaled(f"{path}.weight", index, ratio) for path, _ in every_norm(spec)}
    return Swapped(resized(rescaled(spec, new), new), "exact", tensors, {"method": "cut"})


# --- narrower, where something is lost --------------------------------------------------------------------------------


def energies(model: Model) -> Wide:
    """The squares of all that is written into each coordinate."""
    energy = np.zeros(model.spec.hidden_size)
    for name, axis in written(model.spec):
        values = model.wide(name)
        energy += (values**2).sum(axis=1 - axis) if values.ndim == 2 else values**2
        model.release()
    return energy


def largest(spec: ModelSpec, asked: Asked, new: int) -> Swapped:
    """The coordinates that most is written to, as they are."""
    alike = np.ones(spec.hidden_size)
    energy = asked.weights.ask(energies, alike, alike)
    index = np.sort(np.argsort(-energy, kind="stable")[:new])
    found = cut(spec, new, index)
    share = float(energy[index].sum() / energy.sum())
    return Swapped(found.spec, "approximate", found.tensors, {"method": "largest", "energy_kept": share})


def directions(model: Model, calibration: Calibration) -> Wide:
    """The eigenvectors [d, d] of what the norms see on a text, as columns, the largest eigenvalue first.

    Each norm counts alike: its inputs are taken at length √d, as its readers see them.
    """
    spec = model.spec
    total = np.zeros((spec.hidden_size, spec.hidden_size))

    def add(rows: Any) -> None:
        normed = normed_row(rows.reshape(-1, spec.hidden_size).double().numpy(), 1e-30)
        np.add(total, normed.T @ normed, out=total)

    for layer in calibration.walk(model):
        names = [path.rpartition(".")[2] for path, _ in norms(spec.blocks[layer.index], "")]
        output, seen = layer.run(names)
        for inputs, _ in seen.values():
            add(inputs)
        if layer.index == len(spec.blocks) - 1:
            add(output)
    return np.ascontiguousarray(np.linalg.eigh(total)[1][:, ::-1])


def sliced(spec: ModelSpec, new: int, calibration: Calibration) -> Swapped:
    """The stream in its `new` largest principal directions."""
    fitted = Scratch(lambda model: iter([{"directions": directions(model, calibration)}]))

    def into(model: Model, rows: Wide) -> Wide:
        found: Wide = rows @ fitted.of(model, "directions")[:, :new]
        return found

    def norm_of(_: str, norm: Norm) -> Norm:
        return replace(norm, eps=eps_for(norm.eps, spec.hidden_size, new))

    found, tensors = in_basis(spec, new, into, norm_of)
    notes = ("the head was untied from the embedding: it reads behind the last norm's weight",)
    return Swapped(found, "approximate", tensors, {"method": "principal directions"}, notes if spec.head.tied else ())


def undone(before: ModelSpec, asked: Asked) -> Step | None:
    """The width as it was: what was added can be taken away again."""
    return smaller_again("hidden", asked, [before.hidden_size])


ORDER = 170
SWAPS: tuple[Swap, ...] = (
    Swap(
        option="hidden",
        form="N",
        takes="a residual stream of d",
        gives="a residual stream of N",
        guarantee="exact",
        needs="for wider ones, k·d or norms of one kind; for narrower ones, coordinates that say nothing new,"
        " else RMSNorms and a text",
        source="zeros and copies after Net2Net 1511.05641; narrower: SliceGPT 2401.15024",
        reshape=resize_hidden,
        examples=lambda spec: (str(spec.hidden_size + 8), str(2 * spec.hidden_size)),
        calibrated=True,
        inverse=undone,
    ),
)
"""The width of the residual stream."""
