"""Round the linear weights of blocks to few bits, and store the rounded numbers in the usual dtype.

With a text, weights are rounded by GPTQ (`fits.rounding`). Without a text, or with --approximate, they are rounded to
nearest, on the same grids.

int8 is symmetric: every output row has one scale, and its largest weight is at 127 (torchao's Int8WeightOnly). intB:G
is asymmetric: every G inputs of a row have a scale and a zero point, so that the grid goes from their least to their
largest weight (torchao's Int4WeightOnly). Norms, biases, embeddings and the head are not rounded. The swap shows the
damage of quantisation; the files are as large as before.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from ...components import Block, ModelSpec, Role
from ...errors import SwapRefused
from ..base import Computed, Model, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..grids import Grid
from ..layerwise import linears
from ..options import WEIGHTS, Option
from ..registry import Asked, Swap

_ROLES: tuple[Role, ...] = (
    "reads",
    "inner",
    "writes",
)  # the roles of the weights that are rounded, in the order in which they run


def by_row(weight: Wide, bits: int) -> Grid:
    """Return the symmetric grid of a weight [out, in]. Every row has its own scale, and 2^bits - 1 values."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=1, keepdims=True) / top
    scale[scale == 0] = 1.0
    return Grid(scale, np.zeros_like(scale), -top, top)


def by_group(weight: Wide, bits: int, size: int) -> Grid:
    """Return the asymmetric grid of a weight [out, in].

    Every group of `size` neighbouring inputs in a row has 2^bits values, from its least to its largest weight.
    """
    groups = weight.reshape(weight.shape[0], -1, size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale = (high - low) / (2**bits - 1)
    scale[scale == 0] = 1.0
    return Grid(scale, low, 0, 2**bits - 1)


def _quantise(spec: ModelSpec, asked: Asked) -> Swapped:
    """Round the weights of all linears in the chosen layers, except routers and convolutions."""
    name, _, group = asked.value.partition(":")
    bits = Asked(name.removeprefix("int")).number("a number of bits", 2)
    if bits > 16:
        raise SwapRefused(
            f"--quantize int{bits} is not possible: gptkit rounds weights to at most 16 bits",
            "Possible: int2 to int16.",
        )
    size = asked.number("inputs a group") if group else None
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    layers = asked.those(spec, lambda _: True)
    linears_by_layer = [linears(spec.blocks[layer], f"blocks.{layer}", *_ROLES) for layer in layers]
    names = [
        linear.weight for layer_linears in linears_by_layer for linear in layer_linears if _is_weight(linear.weight)
    ]
    if size is not None:
        _require_whole_groups(bits, size, {name: shapes[name][1] for name in names})
    grid = partial(by_row, bits=bits) if size is None else partial(by_group, bits=bits, size=size)
    summary = {"bits": bits, "group": size, "tensors": len(names)}
    if not asked.approximate and asked.calibration is not None and asked.has_text():
        on_text = {name for name in names if len(shapes[name]) == 2}
        stages = {layer: _stages(spec.blocks[layer], layer, on_text) for layer in layers}
        scratch = Scratch.by("rounding.rounded_layers", stages, grid, asked.calibration())
        note = "weights are rounded with GPTQ on the text"
        rest = {name: Computed(partial(_nearest, name, grid)) for name in names if name not in on_text}
        tensors: dict[str, Tensor] = {**scratch.waiting(sorted(on_text)), **rest}
        return Swapped(spec, "approximate", tensors, {**summary, "by": "GPTQ"}, (note,))
    tensors = {name: Computed(partial(_nearest, name, grid)) for name in names}
    note = "weights are rounded to nearest" + (
        "" if asked.approximate else "; with --calibrate FILE, they are rounded with GPTQ"
    )
    return Swapped(spec, "approximate", tensors, {**summary, "by": "nearest"}, (note,))


def _is_weight(name: str) -> bool:
    """Return whether a tensor is the weight of a linear. Mamba's A_log, which is used elementwise, is not."""
    return name.endswith(".weight")


def _nearest(name: str, grid: Callable[[Wide], Grid], model: Model) -> Wide:
    """Round a weight [out, in], or a stack of weights [n, in, out], to the nearest values on its grid."""
    weight = model.wide(name)
    if weight.ndim == 2:
        return grid(weight).nearest(weight)
    rows = np.moveaxis(weight, 1, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    return np.moveaxis(grid(flat).nearest(flat).reshape(rows.shape), -1, 1)


def _stages(block: Block, layer: int, names: Collection[str]) -> list[list[str]]:
    """Group the weights of a layer into lists, in the order in which they run. GPTQ rounds a list at a time.

    In each sub-layer, these are first the linears that read its input, then inner ones, then those that write its
    output. Only weights in `names` are returned.
    """
    slots = [sublayer.mixer.slot for sublayer in block.sublayers]
    by_role = [[(linear.slot, linear.weight) for linear in linears(block, f"blocks.{layer}", role)] for role in _ROLES]
    stages = [
        [name for owner, name in entries if owner == slot and name in names] for slot in slots for entries in by_role
    ]
    return [stage for stage in stages if stage]


def _require_whole_groups(bits: int, size: int, widths: Mapping[str, int]) -> None:
    """Raise SwapRefused if the inputs of a weight cannot be divided into groups of `size`.

    `widths` has the number of inputs of each weight. The hint names group sizes that are possible for all weights.
    """
    refused = next((name for name, inputs in widths.items() if inputs % size), None)
    if refused is None:
        return
    common = math.gcd(*widths.values())
    accepted = [n for n in (16, 32, 64, 128, 256) if common % n == 0] or [common]
    forms = [f"int{bits}:{n}" for n in accepted if n > 1] or [f"int{bits} (one group per row)"]
    reason = f"{refused} has {widths[refused]} inputs, which cannot be divided into groups of {size}"
    raise SwapRefused(reason, f"Possible here: {', '.join(forms)}.")


_entry = partial(
    Swap,
    option="quantize",
    takes="weights of linear layers",
    guarantee="approximate",
    reshape=_quantise,
    calibrated=True,
    by_layer=True,
    apart=True,
    each_stack=True,
)

ORDER = 200
OPTIONS = (
    Option(
        "quantize",
        WEIGHTS,
        4,
        "Round the weights to the values of int8 or int4, with GPTQ if there is a calibration text. int4:64 "
        "has one scale for 64 weights, and int8 has one scale for each row. The files keep the old dtype, so "
        "they do not become smaller.",
        "int8 | int4:64",
        words="int8 = 8 bit, i8; int4 = 4 bit, i4; int2; int3; int5; int6; int7",
    ),
)
SWAPS = (
    _entry(
        form="intBITS:GROUP",
        gives="weights of BITS bits, with a scale and a zero point per GROUP inputs",
        needs="The group size must divide the number of inputs. With a calibration text, weights are rounded by GPTQ",
        source="torchao Int4WeightOnly; GPTQ 2210.17323",
        examples=lambda spec: (f"int4:{4 if spec.hidden_size % 16 else 16}",),
    ),
    _entry(
        form="intBITS",
        gives="weights of BITS bits, with a scale per row",
        needs="With a calibration text, weights are rounded by GPTQ",
        source="torchao Int8WeightOnly; GPTQ 2210.17323",
        examples=lambda spec: ("int8", "int4"),
    ),
)
