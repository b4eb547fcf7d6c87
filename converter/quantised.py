"""Weights of few bits with their scales beside them, as the numbers that they stand for.

Which tensors belong together is told by the ends of their names, and which shapes and types fit, and what makes numbers
of them, by the method that config.json names (`dequantise.METHODS`). Numbers are made when a tensor is read, some rows
at a time, so that whatever reads tensors reads these, and holds no more of them than it asks for.
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

_BESIDE = (
    *("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"),
    *("input_zero_point", "output_zero_point", "input_global_scale"),
)
"""What scales a layer's input, its output or its cache where these are of few bits too, which nothing here does."""


def dequantised(weights: Weights, config: Mapping[str, Any], dtype: str, where: Path) -> tuple[Weights, str]:
    """The tensors of a checkpoint as numbers, by what its config.json says of their method (one of `METHODS`), and a
    note that tells it. `dtype` is what they are to be where their method leaves it open: "F32", or "BF16", to which
    they are rounded once.

    Raises:
        Quantised: bits without scales, scales without bits, shapes, types or settings that do not fit; all of them.
    """
    settings, told = config["quantization_config"], quantisation(config)
    assert told is not None
    method, info = METHODS[told[0].partition(",")[0]], weights.info
    if (refused := method.refuses(settings)) is not None:
        raise Quantised(f"{where}: the weights are quantised ({told[0]}), and {refused}")
    made: dict[str, Stored] = {}
    used = {name for name in info if name.rpartition(".")[2] in _BESIDE}
    lacking, twice, misfits = list[str](), list[str](), list[str]()
    for scheme, name in ((scheme, name) for scheme in method.schemes for name in info if _is_bits(name, scheme, info)):
        base = name.removesuffix(scheme.bits)
        parts = (scheme.bits, *scheme.needs, *scheme.may)
        names = {part: own for part in parts if (own := scheme.named(part, base, info)) is not None}
        used |= set(names.values())
        if missing := [base + part for part in scheme.needs if part not in names]:
            lacking.append(f"{name} ({some_of(missing, 2)} is expected)")
            continue
        whole = base + scheme.made
        if whole != name and whole in info:
            twice.append(f"{whole} exists as well as {name}")
            continue
        stored = Parts(weights, names)
        numbers = scheme.fit(settings, stored, dtype)
        if isinstance(numbers, str):
            misfits.append(f"{stored.told()}: {numbers}")
            continue
        path, start = weights.place(name)
        kind, shape = info[name]
        nbytes = prod(shape) * DTYPES[kind].itemsize
        pieces = partial(_pieces, numbers)
        made[whole] = Stored(path, numbers.dtype, numbers.shape, start, nbytes, kind=kind, pieces=pieces)
    ends = tuple(part for scheme in method.schemes for part in (*scheme.needs, *scheme.may, *scheme.other.values()))
    alone = [name for name in info if name.endswith(ends) and name not in used]
    found = [
        f"{len(names)} {what}: {some_of(names, 4, ', … ({} more)')}"
        for what, names in (
            ("quantised weights have no scales", lacking),
            ("scales belong to no quantised weight", alone),
            ("quantised weights are also stored unquantised", twice),
            ("quantised weights do not fit their scales", misfits),
        )
        if names
    ]
    if not made and not found:
        found = [f"config.json says that the weights are quantised ({told[0]}), but no tensor is"]
    if found:
        hint = "Check that config.json belongs to these weights, and that all of their files are there."
        raise Quantised(f"{where}: {'; '.join(found)}", hint)
    read = weights.with_more(made, without=used - made.keys())
    return read, f"{len(made)} of {len(read.info)} tensors are quantised ({told[0]}): dequantised"


def _is_bits(name: str, scheme: Scheme, info: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether a name has bits: by an end that nothing else has, by its type, or by what lies beside it."""
    kind = info[name][0]
    if not name.endswith(scheme.bits) or (scheme.kinds and kind not in scheme.kinds):
        return False
    if scheme.bits not in ("", "weight") or kind in ("I8", *F8):
        return True
    return any(scheme.named(part, name.removesuffix(scheme.bits), info) is not None for part in scheme.needs)


def _pieces(numbers: Numbers, nbytes: int) -> Iterator[Array]:
    """The numbers, some whole rows at a time, of about so many bytes."""
    *matrices, rows, columns = numbers.shape
    per_row = max(1, columns * DTYPES[numbers.dtype].itemsize)
    step = max(1, nbytes // per_row // numbers.step) * numbers.step
    with np.errstate(all="ignore"):  # what is infinite or no number is told where it matters
        make = numbers.decoder()
    for matrix in range(prod(matrices)):
        for start in range(0, rows, step):
            with np.errstate(all="ignore"):
                piece = make(matrix, start, min(rows, start + step))
            yield piece
