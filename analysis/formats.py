"""The size of a model's weights in a dtype or a quantised format. No torch.

The size of a quantised tensor includes the scales of its blocks, and a format does not quantise every tensor. GGUF's
types are those of llama-quantize (`architectures.gguf_types`). nf4 is the format that transformers loads with
bitsandbytes and double quantisation (QLoRA 2305.14314, section 3). Linear modules except the head have 4 bits per
weight, a scale of 8 bits for 64 weights, and one of 32 bits for 256 of these scales, together 4.127 bits per weight.
All other tensors are in bf16.
"""

import math
from collections.abc import Callable, Mapping

from ..components import ModelSpec, Parameter
from ..errors import CannotExpress, UsageError
from .parameters import LayerCount, ParameterCount, count
from .sizes import DTYPES, full_dtype, itemsize

SCALES = ("int8", "int4")
"""Dtypes that need scales. The scales are not counted, because every quantisation scheme has other ones."""

NAMES = {"float8": "float8_e4m3fn", "int4": "int4", "i4": "int4", "4bit": "int4", "8bit": "int8"}
"""Other names of dtypes, in addition to those of `full_dtype`. There is no `torch.int4`."""

_NF4 = "nf4"
GGUF = ("q8_0", "q4_k_m", "q4_0")
FORMATS = ("q8_0", _NF4, "q4_k_m", "q4_0")
"""Quantised formats whose size includes the scales, the largest first. The GGUF formats are those that `gguf_types`
knows."""

_BLOCK, _OUTER = 64, 256  # nf4 has one scale for 64 weights, and one outer scale for 256 scales


def weighed(spec: ModelSpec, dtype: str, family: str = "") -> ParameterCount:
    """Return the size of a model's weights in bytes, by component and layer. A tied head is not counted again.

    The arguments and errors are those of `sizer`.
    """
    if dtype in FORMATS:
        return count(spec, sizer(spec, dtype, family))
    counted = count(spec)

    def scaled(numbers: Mapping[str, int]) -> dict[str, int]:
        return {label: weight_bytes(number, dtype) for label, number in numbers.items()}

    layers = {id(layer): LayerCount(scaled(layer.by_component)) for layer in counted.by_layer}  # equal layers share one
    by_layer = [layers[id(layer)] for layer in counted.by_layer]
    total, active = weight_bytes(counted.total, dtype), weight_bytes(counted.active, dtype)
    outside = scaled(counted.outside)
    return ParameterCount(total, scaled(counted.by_component), by_layer, outside, counted.tied, active)


def sizer(spec: ModelSpec, dtype: str, family: str = "") -> Callable[[Parameter], int]:
    """Return a function that returns the size in bytes of one of the model's tensors in a dtype or format.

    Args:
        spec: the model.
        dtype: a name that `weight_dtype` returned.
        family: the model's family, such as "llama", on which GGUF formats depend.

    Raises:
        CannotExpress: the dtype is a GGUF format, and llama.cpp has no type for one of the tensors.
    """
    if dtype == _NF4:
        return _nf4_bytes
    if dtype not in GGUF:
        return lambda parameter: weight_bytes(parameter.count, dtype)
    from ..architectures.gguf_types import BLOCKS, gguf_types  # imported here for a faster start

    blocks = {parameter.name: BLOCKS[kind] for parameter, kind in gguf_types(spec, family, dtype)}
    return lambda parameter: parameter.count // blocks[parameter.name][0] * blocks[parameter.name][1]


def in_formats(spec: ModelSpec, family: str = "") -> dict[str, int | None]:
    """Return the size of a model's weights in bytes, in bf16 and every format of `FORMATS`.

    The size is None for a format that has no type for one of the tensors.
    """
    totals: dict[str, int | None] = {}
    for name in ("bfloat16", *FORMATS):
        try:
            totals[name] = weighed(spec, name, family).total
        except CannotExpress:
            totals[name] = None
    return totals


def _nf4_bytes(parameter: Parameter) -> int:
    """Return the size of a tensor in bytes, in nf4 if it is quantised and otherwise in bf16.

    Experts are not quantised, because transformers 5 stores them in tensors of three dimensions, not in linear modules.
    """
    linear = len(parameter.shape) == 2 and parameter.component in ("attention", "feed-forward", "shared block")
    if not linear or ".experts." in parameter.name:
        return parameter.count * itemsize("bfloat16")
    scales = math.ceil(parameter.count / _BLOCK)
    return math.ceil(parameter.count / 2) + scales + 4 * math.ceil(scales / _OUTER)


def weight_dtype(name: str) -> str:
    """Return the standard name of a weight dtype: torch's name, or "int4" or one of `FORMATS`, which torch lacks.

    Raises:
        UsageError: the name is unknown.
    """
    name = NAMES.get(name.lower(), name)
    if name.lower() in ("int4", *FORMATS):
        return name.lower()
    try:
        return full_dtype(name)
    except UsageError as error:
        raise UsageError(error.message, f"Choose one of {', '.join([*DTYPES, 'int4', *FORMATS])}.") from None


def weight_bytes(parameters: int, dtype: str) -> int:
    """Return the bytes of this number of parameters in a dtype, without the scales that quantised weights need."""
    return (parameters + 1) // 2 if dtype == "int4" else parameters * itemsize(dtype)
