"""Choose, reorder, add or drop layers.

- "keep:0-11,14-29", or the list alone, keeps the listed layers in that order; "drop:12,13" keeps all others. Dropping a
  layer that adds nothing to the residual stream is exact. A number alone is refused as ambiguous.
- "+N" adds N copies of layers, spread over the depth (LLaMA Pro 2401.02415, section 3.2). The projections of a copy
  that write into the residual stream are zero, so the copy adds nothing to it until it is trained. This is exact if
  blocks add their output to the stream without a norm after the addition.
- "auto:N" keeps N layers. A greedy search drops the layer without which the KL on a text is least, and repeats
  (`fits.dropping`). Two other choices are compared with its result, and the one with the least KL wins: the layers with
  the largest block influence (ShortGPT 2403.03853), and all layers except the last ones before the final layer.
  --approximate uses the latter.
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
    """Return the model that consists of the old layers `order`, in this order, and its tensors."""
    new = replace(spec, blocks=tuple(spec.blocks[old] for old in order))
    tensors: dict[str, Tensor] = {}
    for parameter in new.parameters():
        if parameter.layer is not None:
            suffix = parameter.name.split(".", 2)[2]
            tensors[parameter.name] = Moved(f"blocks.{order[parameter.layer]}.{suffix}")
    return new, tensors


def _silent(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Return whether a layer adds nothing to the residual stream, because all weights that write into it are zero."""
    block = spec.blocks[layer]
    if block.residual == "normed" or any(sublayer.sum_norm is not None for sublayer in block.sublayers):
        return False
    linears = writers(spec.blocks[layer], f"blocks.{layer}")
    names = [name for linear in linears for name in (linear.weight, linear.bias_name)]
    return asked.weights.zero(*names, *written_biases(block, f"blocks.{layer}"))


def _named(layers: Sequence[int]) -> str:
    """Name layers in a sentence: "layer 3", "layers 0-2, 5"."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers).replace(',', ', ')}"


def _with_layers(spec: ModelSpec, asked: Asked, order: Sequence[int], summary: dict[str, object]) -> Swapped:
    """Return the result of keeping the old layers `order`, in this order. `summary` is added to the output's record."""
    layers = len(spec.blocks)
    new, tensors = _arranged(spec, order)
    dropped = [layer for layer in range(layers) if layer not in order]
    in_order = list(order) == sorted(set(order))
    record = {**summary, "from": layers, "to": len(order), "kept": list(order)}
    stay = f"the new model has {_named(order)} of the {layers}" + (f"; {_named(dropped)} dropped" if dropped else "")
    if in_order and all(_silent(spec, asked, layer) for layer in dropped):
        note = f"{stay}; the dropped layers add nothing to the residual stream" if dropped else stay
        return Swapped(new, "exact", tensors, record, (note,))
    note = stay if dropped else f"{stay}: no layer is dropped; they are repeated or change places"
    # A model tolerates the loss of some layers, but not of most, and not another order.
    guarantee: Guarantee = "approximate" if in_order and len(dropped) * 2 <= layers else "retrained"
    return Swapped(new, guarantee, tensors, record, (note,))


def _listed(spec: ModelSpec, asked: Asked) -> Swapped:
    """Keep the layers in the list that the value gives. After "drop:", keep all other layers."""
    layers, (word, colon, rest) = len(spec.blocks), asked.value.partition(":")
    if not colon and asked.value.strip().isdecimal():
        number = int(asked.value)
        raise UsageError(
            f"--layers {asked.value} is ambiguous: it may mean layer {number}, or {number} layers",
            f"keep:{number} keeps only layer {number}, and drop:{number} drops it. auto:{number} keeps the"
            f" {number} most useful layers, 0-{max(number - 1, 0)} keeps the first {number}, and +{number} adds"
            f" {number} layers.",
        )
    named = layers_in(rest if colon else asked.value, layers)
    if word != "drop":
        return _with_layers(spec, asked, named, {})
    order = [layer for layer in range(layers) if layer not in named]
    if not order:
        raise SwapRefused(f"{asked.value!r} drops all {layers} layers", "Leave at least one of them.")
    return _with_layers(spec, asked, order, {})


# --- more layers ------------------------------------------------------------------------------------------------------


def expansion(layers: int, copies_to_add: int) -> list[tuple[int, bool]]:
    """Return for each layer of a deeper model the number of its old layer, and whether it is an added copy of that.

    `copies_to_add` copies are spread evenly over `layers` layers. A copy comes after its original.
    """
    copies = [0] * layers
    for number in range(copies_to_add):
        copies[(number + 1) * layers // copies_to_add - 1 if copies_to_add <= layers else number % layers] += 1
    return [entry for layer in range(layers) for entry in [(layer, False)] + [(layer, True)] * copies[layer]]


def _add(spec: ModelSpec, asked: Asked) -> Swapped:
    """Add copies of layers, whose output is zero until they are trained."""
    number = Asked(asked.value.removeprefix("+")).number("layers to add")
    if number > 10_000:
        raise UsageError(f"--layers {asked.value} adds {number:,} layers, but at most 10,000 can be added")
    order = expansion(len(spec.blocks), number)
    normed = [old for old, copy in order if copy and spec.blocks[old].residual == "normed"]
    if normed:
        raise SwapRefused(
            f"layer {normed[0]} takes its residual from a norm's output, so even a new block that adds"
            " nothing changes the residual stream",
            "Repeat layers instead, for example --layers keep:0-1,1-, and train the model.",
        )
    summed = [old for old, copy in order if copy and any(sublayer.sum_norm for sublayer in spec.blocks[old].sublayers)]
    if summed:
        raise SwapRefused(
            f"layer {summed[0]} has a norm after the residual addition (sum_norm), so even a new block that adds"
            " nothing changes the residual stream",
            "Repeat layers instead, for example --layers keep:0-1,1-, and train the model.",
        )
    new, tensors = _arranged(spec, [old for old, _ in order])
    added = [index for index, (_, copy) in enumerate(order) if copy]
    tensors.update(_silenced(new, added, order))
    single = f"layer {added[0]} is a copy that adds nothing yet"
    note = f"layers {ranges(added).replace(',', ', ')} are copies that add nothing yet" if len(added) > 1 else single
    return Swapped(new, "exact", tensors, {"from": len(spec.blocks), "to": len(order), "added": added}, (note,))


def _silenced(new: ModelSpec, layers: Sequence[int], order: Sequence[tuple[int, bool]]) -> dict[str, Tensor]:
    """Return zeros for the tensors of some layers that write into the residual stream.

    `layers` are numbers in the new model `new`, and `order` is the result of `expansion`.
    """
    shapes = {parameter.name: parameter.shape for parameter in new.parameters()}
    zeros: dict[str, Tensor] = {}
    for layer in layers:
        path, old = f"blocks.{layer}", f"blocks.{order[layer][0]}"
        names = [name for writer in writers(new.blocks[layer], path) for name in writer.names]
        names += written_biases(new.blocks[layer], path)
        zeros |= {name: Filled(shapes[name], 0.0, old + name.removeprefix(path)) for name in names}
    return zeros


# --- fewer layers -----------------------------------------------------------------------------------------------------


def _dropping(calibration: Calibration, plain: tuple[int, ...], model: Model) -> Dropping:
    """Search for the layers of a model to keep, as many as `plain` has (`fits.dropping.drop`)."""
    from ..fits.dropping import drop

    return drop(model, calibration, plain)


def _drop(spec: ModelSpec, asked: Asked) -> Swapped:
    """Keep N layers, and drop those that the model can best do without ("auto:N")."""
    layers = len(spec.blocks)
    wanted = asked.number("layers to keep")
    if wanted > layers:
        missing = wanted - layers
        raise SwapRefused(
            f"{wanted} layers cannot be kept, because the model has only {layers}",
            f"--layers +{missing} adds the missing layers.",
        )
    plain = (*range(wanted - 1), layers - 1) if wanted > 1 else (0,)
    if asked.approximate:
        return _with_layers(spec, asked, plain, {"by": "the last but one"})
    calibration = asked.text("choosing the layers to remove")
    search = asked.weights.run(partial(_dropping, calibration, plain))
    record: dict[str, object] = {"by": search.by, "influence": [round(score, 6) for score in search.influence]}
    swapped = _with_layers(spec, asked, search.layers, record)
    return dataclasses.replace(swapped, notes=(*swapped.notes, *_notes_on(layers, search)))


def _notes_on(layers: int, best: Dropping) -> Iterator[str]:
    """Yield lines for the user: how the layers were chosen, and the KL of all choices that were tried.

    `layers` is the old number of layers, and `best` the result of the search.
    """
    yield (
        f"chosen by {best.by}, by KL on {best.tokens:,} tokens of the text; sets of removed layers that were tried, "
        "each with the KL in nats per token, best first:"
    )
    by_size: dict[int, list[tuple[float, str]]] = {}
    for stay, kl in best.tried.items():
        dropped = [layer for layer in range(layers) if layer not in stay]
        by_size.setdefault(len(dropped), []).append((kl, ranges(dropped)))
    for size, tried in sorted(by_size.items()):
        if size:
            yield "; ".join(f"{dropped}: {kl:.4f}" for kl, dropped in sorted(tried))


def _examples(spec: ModelSpec) -> list[str]:
    """Return the value that `gptkit swaps` tries on a model: a list of all layers except the last but one."""
    last = len(spec.blocks) - 1
    return [f"0-{last - 2},{last}"] if last > 2 else []


_entry = partial(Swap, option="layers", takes="the layers")
_NO_EFFECT = "the dropped layers add nothing to the residual stream"

ORDER = 40
OPTIONS = (
    Option(
        "layers",
        NORMS,
        3,
        "The layers to keep, drop or add. keep:0-5 and drop:6,7 name layers (the first is 0), +4 adds four "
        "layers that change nothing, and auto:24 keeps the 24 most important layers.",
        "keep:0-5,8- | drop:6,7 | +4 | auto:24",
        words="auto; keep; drop",
        parts={before: ("layers", lambda spec: {len(spec.blocks)}) for before in ("auto:", "+")},
    ),
)
SWAPS = (
    _entry(
        form="+N",
        gives="N more layers, copies whose output is zero until they are trained",
        needs="Needs blocks that add their output to the residual stream without a norm after the addition",
        source="LLaMA Pro 2401.02415",
        reshape=_add,
        examples=lambda spec: ("+1", f"+{len(spec.blocks)}"),
    ),
    _entry(
        form="auto:N",
        gives="the N layers that a greedy search by KL divergence keeps",
        guarantee="approximate",
        needs="Needs a calibration text",
        source="greedy search by KL divergence; block influence: ShortGPT 2403.03853",
        reshape=_drop,
        examples=lambda spec: (f"auto:{len(spec.blocks) - 1}",) if len(spec.blocks) > 1 else (),
        calibrated=True,
        cheaper=lambda _: (),
        chooses=True,
    ),
    _entry(
        form="drop:LAYERS",
        gives="all layers except LAYERS",
        needs=f"Exact only if {_NO_EFFECT}",
        exact_where=_NO_EFFECT,
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
    ),
    _entry(
        form="keep:LAYERS",
        gives="only the layers LAYERS, in this order",
        needs=f"Exact only if {_NO_EFFECT}",
        exact_where=_NO_EFFECT,
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
    ),
    _entry(
        form="LAYERS",
        gives="only the layers LAYERS, in this order",
        needs=f"The list must contain a range or a comma, such as 0-5,8-. Exact only if {_NO_EFFECT}",
        exact_where=_NO_EFFECT,
        source="mergekit's passthrough; ShortGPT 2403.03853",
        reshape=_listed,
        examples=_examples,
    ),
)
