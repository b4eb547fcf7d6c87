"""Layers picked, repeated, added and dropped.

- "keep:0-11,14-29", or the list alone, keeps those layers in that order; "drop:12,13" keeps all others. Dropping one
  that writes nothing into the stream is exact. A number alone is refused: it may be a layer or a number of layers.
- "+N" adds copies whose last projections are zero, spread over the depth (LLaMA Pro 2401.02415, section 3.2): a copy
  adds nothing to the stream until it is trained. Exact where blocks add to the stream itself.
- "auto:N" keeps the N layers that a greedy search by KL on a text finds: the layer without which the KL is least goes,
  and again (`fits.dropping`). Those of the largest block influence (ShortGPT 2403.03853) stay instead where they have
  less KL, or all but the last ones before the last, which is also what --approximate keeps, without a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...architectures.obstacles import ranges
from ...components import ModelSpec
from ...errors import SwapRefused, UsageError
from ..base import Filled, Guarantee, Model, Moved, Swapped, Tensor
from ..layerwise import writers, written_biases
from ..options import NORMS, Option
from ..registry import Asked, Swap, layers_in

if TYPE_CHECKING:
    from ..fits.calibration import Calibration
    from ..fits.dropping import Dropping


def _arranged(spec: ModelSpec, order: Sequence[int]) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The tree with these of its layers, in this order, and where their tensors are copied from."""
    new = replace(spec, blocks=tuple(spec.blocks[old] for old in order))
    tensors: dict[str, Tensor] = {}
    for parameter in new.parameters():
        if parameter.layer is not None:
            suffix = parameter.name.split(".", 2)[2]
            tensors[parameter.name] = Moved(f"blocks.{order[parameter.layer]}.{suffix}")
    return new, tensors


def _silent(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether a layer adds nothing to the stream: every weight and bias that writes into it is zero."""
    block = spec.blocks[layer]
    if block.residual == "normed" or any(each.sum_norm is not None for each in block.sublayers):
        return False
    found = writers(spec.blocks[layer], f"blocks.{layer}")
    names = [name for each in found for name in (each.weight, each.bias_name)]
    return asked.weights.zero(*names, *written_biases(block, f"blocks.{layer}"))


def _named(layers: Sequence[int]) -> str:
    """Name layers in a sentence: "layer 3", "layers 0-2, 5"."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers).replace(',', ', ')}"


def _kept(spec: ModelSpec, asked: Asked, order: Sequence[int], summary: dict[str, object]) -> Swapped:
    """These layers, in this order."""
    layers = len(spec.blocks)
    new, tensors = _arranged(spec, order)
    gone = [layer for layer in range(layers) if layer not in order]
    in_order = list(order) == sorted(set(order))
    record = {**summary, "from": layers, "to": len(order), "kept": list(order)}
    stay = f"the new model has {_named(order)} of the {layers}" + (f"; {_named(gone)} dropped" if gone else "")
    if in_order and all(_silent(spec, asked, layer) for layer in gone):
        note = f"{stay}; the dropped layers add nothing to the residual stream" if gone else stay
        return Swapped(new, "exact", tensors, record, (note,))
    note = stay if gone else f"{stay}: no layer is dropped; they are repeated or change places"
    # A model survives the loss of some layers, not of most of them, nor their change of places.
    guarantee: Guarantee = "approximate" if in_order and len(gone) * 2 <= layers else "retrained"
    return Swapped(new, guarantee, tensors, record, (note,))


def _listed(spec: ModelSpec, asked: Asked) -> Swapped:
    """Keep the layers of a list, or those that "drop:" does not name."""
    layers, (word, colon, rest) = len(spec.blocks), asked.value.partition(":")
    if not colon and asked.value.strip().isdecimal():
        number = int(asked.value)
        raise UsageError(
            f"--layers {asked.value} is ambiguous: it may mean layer {number}, or {number} layers",
            f"keep:{number} keeps that layer alone, drop:{number} drops it; auto:{number} keeps the {number} most"
            f" useful layers, 0-{max(number - 1, 0)} the first {number}; +{number} adds {number}.",
        )
    named = layers_in(rest if colon else asked.value, layers)
    if word != "drop":
        return _kept(spec, asked, named, {})
    order = [layer for layer in range(layers) if layer not in named]
    if not order:
        raise SwapRefused(f"{asked.value!r} drops all {layers} layers", "Leave at least one of them.")
    return _kept(spec, asked, order, {})


# --- more of them -----------------------------------------------------------------------------------------------------


def expansion(layers: int, more: int) -> list[tuple[int, bool]]:
    """(old layer, whether it is a copy that adds nothing): copies follow their originals, evenly spread."""
    copies = [0] * layers
    for number in range(more):
        copies[(number + 1) * layers // more - 1 if more <= layers else number % layers] += 1
    return [each for layer in range(layers) for each in [(layer, False)] + [(layer, True)] * copies[layer]]


def _add(spec: ModelSpec, asked: Asked) -> Swapped:
    """Copies that add nothing."""
    more = Asked(asked.value.removeprefix("+")).number("layers to add")
    if more > 10_000:
        raise UsageError(f"{asked.value!r}: {more:,} more layers are too many")
    order = expansion(len(spec.blocks), more)
    normed = [old for old, copy in order if copy and spec.blocks[old].residual == "normed"]
    if normed:
        raise SwapRefused(
            f"layer {normed[0]} takes its residual from a norm's output, so a block that adds nothing still"
            " changes the residual stream",
            "Repeat layers instead, for example --layers keep:0-1,1-, and train the model.",
        )
    summed = [old for old, copy in order if copy and any(each.sum_norm for each in spec.blocks[old].sublayers)]
    if summed:
        raise SwapRefused(
            f"layer {summed[0]} has a sum_norm, which changes the residual stream even if nothing is added to it",
            "Repeat layers instead, for example --layers keep:0-1,1-, and train the model.",
        )
    new, tensors = _arranged(spec, [old for old, _ in order])
    added = [index for index, (_, copy) in enumerate(order) if copy]
    tensors.update(_silenced(new, added, order))
    one = f"layer {added[0]} is a copy that adds nothing yet"
    note = f"layers {ranges(added).replace(',', ', ')} are copies that add nothing yet" if len(added) > 1 else one
    return Swapped(new, "exact", tensors, {"from": len(spec.blocks), "to": len(order), "added": added}, (note,))


def _silenced(new: ModelSpec, layers: Sequence[int], order: Sequence[tuple[int, bool]]) -> dict[str, Tensor]:
    """Zeros for what writes into the stream in these layers of the new tree."""
    shapes = {parameter.name: parameter.shape for parameter in new.parameters()}
    found: dict[str, Tensor] = {}
    for layer in layers:
        path, old = f"blocks.{layer}", f"blocks.{order[layer][0]}"
        names = [name for each in writers(new.blocks[layer], path) for name in each.names]
        names += written_biases(new.blocks[layer], path)
        found |= {name: Filled(shapes[name], 0.0, old + name.removeprefix(path)) for name in names}
    return found


# --- fewer of them ----------------------------------------------------------------------------------------------------


def _dropping(calibration: Calibration, plain: tuple[int, ...], model: Model) -> Dropping:
    """Which layers of a model stay, as many as plainly do."""
    from ..fits.dropping import drop

    return drop(model, calibration, plain)


def _drop(spec: ModelSpec, asked: Asked) -> Swapped:
    """The layers go that the model can best do without."""
    layers = len(spec.blocks)
    wanted = asked.number("layers to keep")
    if wanted > layers:
        more = wanted - layers
        raise SwapRefused(
            f"{wanted} layers cannot be kept, because the model has {layers}", f"--layers +{more} adds {more}."
        )
    plain = (*range(wanted - 1), layers - 1) if wanted > 1 else (0,)
    if asked.approximate:
        return _kept(spec, asked, plain, {"by": "the last but one"})
    calibration = asked.text("which layers a model can do without is measured")
    found = asked.weights.run(partial(_dropping, calibration, plain))
    record: dict[str, object] = {"by": found.by, "influence": [round(score, 6) for score in found.influence]}
    swapped = _kept(spec, asked, found.kept, record)
    return dataclasses.replace(swapped, notes=(*swapped.notes, *_told(layers, found)))


def _told(layers: int, found: Dropping) -> Iterator[str]:
    """Say which layers were left out for a try, and the KL without them."""
    yield f"chosen by {found.by}, by KL on {found.tokens:,} tokens of the text; tried without these layers, best first:"
    by_size: dict[int, list[tuple[float, str]]] = {}
    for kept, kl in found.tried.items():
        gone = [layer for layer in range(layers) if layer not in kept]
        by_size.setdefault(len(gone), []).append((kl, ranges(gone)))
    for size, tried in sorted(by_size.items()):
        if size:
            yield "; ".join(f"{gone}: {kl:.4f}" for kl, gone in sorted(tried))


def _examples(spec: ModelSpec) -> list[str]:
    """All layers but the last but one."""
    last = len(spec.blocks) - 1
    return [f"0-{last - 2},{last}"] if last > 2 else []


_entry = partial(Swap, option="layers", takes="N layers")

ORDER = 40
OPTIONS = (
    Option(
        "layers",
        NORMS,
        3,
        "The layers to keep or add. keep:LIST and drop:LIST name layers (the first is 0), +4 adds four "
        "layers that change nothing, and auto:24 keeps the 24 most important layers.",
        "keep:0-5,8- | drop:6,7 | +4 | auto:24",
        words="auto; keep; drop",
        parts={before: ("layers", lambda spec: {len(spec.blocks)}) for before in ("auto:", "+")},
    ),
)
SWAPS = (
    _entry(
        form="+N",
        gives="more layers, copies that add nothing yet",
        needs="blocks that add to the residual stream itself (pre-norm)",
        source="LLaMA Pro 2401.02415",
        reshape=_add,
        examples=lambda spec: ("+1", f"+{len(spec.blocks)}"),
    ),
    _entry(
        form="auto:N",
        gives="the N that a greedy search by KL finds",
        guarantee="approximate",
        needs="a calibration text",
        source="greedy search by KL; block influence: ShortGPT 2403.03853",
        reshape=_drop,
        examples=lambda spec: (f"auto:{len(spec.blocks) - 1}",) if len(spec.blocks) > 1 else (),
        calibrated=True,
        cheaper=lambda _: (),
        chooses=True,
    ),
    _entry(
        form="drop:LAYERS",
        gives="all but those of a list",
        needs="nothing; exact where the layers dropped write nothing",
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
    ),
    _entry(
        form="keep:LAYERS",
        gives="those of a list, in its order",
        needs="nothing; exact where the layers dropped write nothing",
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
    ),
    _entry(
        form="LAYERS",
        gives="those of a list like 0-5,8-, in its order",
        needs="a range or a comma in the list; exact where the layers dropped write nothing",
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
        examples=_examples,
    ),
)
