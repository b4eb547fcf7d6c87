"""What weights take in a dtype, or in a format that people run models in: each tensor by what it is for. No torch.

A format is more than bits a weight: its blocks have scales, and not every tensor is quantised. GGUF's types are those
of llama-quantize (`architectures.gguf_types`). nf4 is what transformers loads with bitsandbytes, double quantisation on
(QLoRA 2305.14314, section 3): linear modules but the head at 4 bits a weight, with a scale of 8 bits for 64 weights and
one of 32 bits for 256 of these scales, 4.127 bits a weight; everything else in bf16.
"""

import math
from collections.abc import Callable, Mapping

from ..components import ModelSpec, Parameter
from ..errors import CannotExpress, UsageError
from .parameters import LayerCount, ParameterCount, count
from .sizes import DTYPES, full_dtype, itemsize

SCALES = ("int8", "int4")
"""Types that are no numbers without scales beside them, of which every scheme has others: these are not counted."""

NAMES = {"float8": "float8_e4m3fn", "int4": "int4", "i4": "int4", "4bit": "int4", "8bit": "int8"}
"""What people call dtypes beside the names that `full_dtype` knows; there is no `torch.int4`."""

_NF4 = "nf4"
GGUF = ("q8_0", "q4_k_m", "q4_0")
FORMATS = ("q8_0", _NF4, "q4_k_m", "q4_0")
"""Formats whose scales are counted, the widest first; of GGUF those that `gguf_types` knows."""

_BLOCK, _OUTER = 64, 256  # nf4's: weights of a scale, and scales of a scale of scales


def weighed(spec: ModelSpec, dtype: str, family: str = "") -> ParameterCount:
    """A tree's parameters in bytes: a count in which every number is of bytes, a tied head's once; see `sizer`."""
    if dtype in FORMATS:
        return count(spec, sizer(spec, dtype, family))
    found = count(spec)

    def scaled(numbers: Mapping[str, int]) -> dict[str, int]:
        return {label: weight_bytes(number, dtype) for label, number in numbers.items()}

    layers = {id(layer): LayerCount(scaled(layer.by_component)) for layer in found.by_layer}  # one record of many
    by_layer = [layers[id(layer)] for layer in found.by_layer]
    total, active = weight_bytes(found.total, dtype), weight_bytes(found.active, dtype)
    return ParameterCount(total, scaled(found.by_component), by_layer, scaled(found.outside), found.tied, active)


def sizer(spec: ModelSpec, dtype: str, family: str = "") -> Callable[[Parameter], int]:
    """The bytes of each of a tree's parameters.

    Args:
        spec: the tree.
        dtype: what `weight_dtype` gives.
        family: whose tree it is, for formats of GGUF.

    Raises:
        CannotExpress: a format of GGUF, and llama.cpp has no type for one of the tensors.
    """
    if dtype == _NF4:
        return _nf4_bytes
    if dtype not in GGUF:
        return lambda each: weight_bytes(each.count, dtype)
    from ..architectures.gguf_types import BLOCKS, gguf_types  # here, for a start without it

    types = {each.name: BLOCKS[of] for each, of in gguf_types(spec, family, dtype)}
    return lambda each: each.count // types[each.name][0] * types[each.name][1]


def in_formats(spec: ModelSpec, family: str = "") -> dict[str, int | None]:
    """Bytes of a tree's weights in bf16 and in each of `FORMATS`; None where a format has no place for the tree."""
    found: dict[str, int | None] = {}
    for name in ("bfloat16", *FORMATS):
        try:
            found[name] = weighed(spec, name, family).total
        except CannotExpress:
            found[name] = None
    return found


def _nf4_bytes(parameter: Parameter) -> int:
    """Bytes of a tensor. transformers 5 has a mixture's experts in tensors of three dimensions, which are no linear
    modules and stay as they are.
    """
    linear = len(parameter.shape) == 2 and parameter.component in ("attention", "feed-forward", "shared block")
    if not linear or ".experts." in parameter.name:
        return parameter.count * itemsize("bfloat16")
    scales = math.ceil(parameter.count / _BLOCK)
    return math.ceil(parameter.count / 2) + scales + 4 * math.ceil(scales / _OUTER)


def weight_dtype(name: str) -> str:
    """A dtype of weights as torch spells it, "int4", which torch has no type for, or one of `FORMATS`.

    Raises:
        UsageError: it is none of these.
    """
    name = NAMES.get(name.lower(), name)
    if name.lower() in ("int4", *FORMATS):
        return name.lower()
    try:
        return full_dtype(name)
    except UsageError as error:
        raise UsageError(error.message, f"Choose one of {', '.join([*DTYPES, 'int4', *FORMATS])}.") from None


def weight_bytes(parameters: int, dtype: str) -> int:
    """Bytes of so many parameters in a dtype that is no format, without the scales that quantised ones need."""
    return (parameters + 1) // 2 if dtype == "int4" else parameters * itemsize(dtype)
