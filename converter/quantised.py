"""Read quantised weights as floating-point numbers.

Every quantised weight is stored in several tensors: the quantised values, their scales and so on. The endings of tensor
names show which tensors belong together. The entry in `dequantise.METHODS` for the quantisation method in config.json
checks their shapes and dtypes, and computes the values. This happens when the weight is read, some rows at a time, so
it needs memory only for these rows.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures.config import quantisation
from ..components.ranges import some_of
from .dequantise import METHODS as METHODS
from .dequantise import Numbers, Parts, Scheme
from .dtypes import F8, Array
from .index import Stored
from .safetensors import DTYPES
from .tree import Quantised
from .weights import Weights

_ACTIVATION_SCALES = (
    *("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"),
    *("input_zero_point", "output_zero_point", "input_global_scale"),
)
"""The names of tensors with scales of activations: inputs, outputs and KV caches. gptkit does not use them."""


def dequantised(weights: Weights, config: Mapping[str, Any], dtype: str, where: Path) -> tuple[Weights, str]:
    """Return the tensors of a quantised checkpoint, now dequantised when they are read, and a note for the user.

    Args:
        weights: the tensors as stored.
        config: config.json, whose quantisation method must be in `METHODS`.
        dtype: the dtype of dequantised weights if the method does not determine it: "F32" or "BF16".
        where: the path of the checkpoint, for messages.

    Raises:
        Quantised: values without scales, scales without values, or shapes, dtypes or settings that do not fit. The
            message lists all of them.
    """
    settings, description = config["quantization_config"], quantisation(config)
    assert description is not None
    method, info = METHODS[description[0].partition(",")[0]], weights.info
    if (refused := method.refuses(settings)) is not None:
        raise Quantised(f"{where}: the weights are quantised ({description[0]}), and {refused}")
    numeric: dict[str, Stored] = {}
    used = {name for name in info if name.rpartition(".")[2] in _ACTIVATION_SCALES}
    without_scales, twice, misfits = list[str](), list[str](), list[str]()
    for scheme, name in ((scheme, name) for scheme in method.schemes for name in info if _is_bits(name, scheme, info)):
        base = name.removesuffix(scheme.bits)
        parts = (scheme.bits, *scheme.needs, *scheme.may)
        names = {part: tensor for part in parts if (tensor := scheme.named(part, base, info)) is not None}
        used |= set(names.values())
        if missing := [base + part for part in scheme.needs if part not in names]:
            without_scales.append(f"{name} ({some_of(missing, 2)} is expected)")
            continue
        result_name = base + scheme.result
        if result_name != name and result_name in info:
            twice.append(f"{result_name} exists as well as {name}")
            continue
        stored = Parts(weights, names)
        numbers = scheme.fit(settings, stored, dtype)
        if isinstance(numbers, str):
            misfits.append(f"{stored.described()}: {numbers}")
            continue
        path, start = weights.place(name)
        kind, shape = info[name]
        nbytes = prod(shape) * DTYPES[kind].itemsize
        pieces = partial(_pieces, numbers)
        numeric[result_name] = Stored(path, numbers.dtype, numbers.shape, start, nbytes, kind=kind, pieces=pieces)
    ends = tuple(part for scheme in method.schemes for part in (*scheme.needs, *scheme.may, *scheme.other.values()))
    unused_scales = [name for name in info if name.endswith(ends) and name not in used]
    problems = [
        f"{len(names)} {problem}: {some_of(names, 4, ', … ({} more)')}"
        for problem, names in (
            ("quantised weights have no scales", without_scales),
            ("scales belong to no quantised weight", unused_scales),
            ("quantised weights are also stored unquantised", twice),
            ("quantised weights do not fit their scales", misfits),
        )
        if names
    ]
    if not numeric and not problems:
        problems = [f"config.json says that the weights are quantised ({description[0]}), but no tensor is"]
    if problems:
        raise Quantised(
            f"{where}: {'; '.join(problems)}",
            "Check that config.json belongs to these weights, and that all of their files are there.",
        )
    readable = weights.with_more(numeric, without=used - numeric.keys())
    return readable, f"{len(numeric)} of {len(readable.info)} tensors are quantised ({description[0]}): dequantised"


def _is_bits(name: str, scheme: Scheme, info: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Return whether a tensor contains the quantised values of a weight, in the given scheme.

    Its name must end with `scheme.bits`. Unquantised weights may have the same ending. Then the tensor must also have
    the dtype of quantised values, or there must be scales for it.

    Args:
        name: the name of the tensor.
        scheme: the scheme.
        info: the dtype and shape of every tensor in the checkpoint.
    """
    kind = info[name][0]
    if not name.endswith(scheme.bits) or (scheme.kinds and kind not in scheme.kinds):
        return False
    if scheme.bits not in ("", "weight") or kind in ("I8", *F8):
        return True
    return any(scheme.named(part, name.removesuffix(scheme.bits), info) is not None for part in scheme.needs)


def _pieces(numbers: Numbers, nbytes: int) -> Iterator[Array]:
    """Yield the dequantised weight in pieces of whole rows, of about `nbytes` bytes each."""
    *matrices, rows, columns = numbers.shape
    per_row = max(1, columns * DTYPES[numbers.dtype].itemsize)
    step = max(1, nbytes // per_row // numbers.step) * numbers.step
    with np.errstate(all="ignore"):  # infinite numbers and NaN are reported where they matter
        make = numbers.decoder()
    for matrix in range(prod(matrices)):
        for start in range(0, rows, step):
            with np.errstate(all="ignore"):
                piece = make(matrix, start, min(rows, start + step))
            yield piece
