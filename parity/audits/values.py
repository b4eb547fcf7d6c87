"""Look for unusual values in the weights."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from ...analysis.named import LAYER
from ...converter.dtypes import FLOATS, to_float64
from .subject import SAVE_AGAIN, Finding, Severity, Subject

_FP16 = 65504.0
_PART = 2**20
"""The number of elements that are read at a time."""


def check_values(subject: Subject) -> Iterator[Finding]:
    """Report NaN, infinite, zero, constant and repeated weights, and values too large for fp16.

    Weights are only read if the caller asked for it.
    """
    if not subject.values:
        return
    files = subject.files
    kinds_of = {name: dtype for name, (dtype, _) in files.weights.info.items()}  # of a GGUF's blocks, as they are read
    readable = {name: info for name, info in files.tensors.items() if kinds_of[name] in FLOATS}
    total = sum(info.nbytes for info in readable.values())
    odd: dict[str, list[str]] = defaultdict(list)
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, info in readable.items():
        kinds, digest = _look(files.weights.read(name), kinds_of[name])
        for kind in kinds:
            odd[kind].append(name)
        if not kinds and len(info.shape) > 1:
            alike[digest, info.nbytes].append(name)
        files.weights.release()
        subject.progress(info.nbytes, total)
    messages: dict[str, tuple[Severity, str, str]] = {
        "not-finite": ("error", "the weights have NaN or infinite values", SAVE_AGAIN),
        "zero-tensor": (
            "warning",
            "all values of this matrix are zero",
            "Check that the tensor was initialised before it was saved.",
        ),
        "constant-tensor": (
            "warning",
            "all values of this matrix are the same number",
            "Check that the tensor was initialised before it was saved.",
        ),
        "fp16-range": ("note", "values too large for float16", "Load the model in bfloat16 or float32."),
    }
    for kind, (severity, message, remedy) in messages.items():
        if odd[kind]:
            yield Finding(kind, severity, message, tuple(odd[kind]), remedy)
    for names in alike.values():
        layers = {match["index"] for name in names if (match := LAYER.fullmatch(name))}
        if len(names) > 1 and layers:
            message = "these tensors have exactly the same values"
            remedy = "Check whether one of these tensors was written in place of another by mistake."
            yield Finding("repeated-tensor", "warning", message, tuple(names), remedy)


def _look(array: np.ndarray[Any, Any], dtype: str) -> tuple[list[str], str]:
    """Return the kinds of unusual values in a tensor, and a hash of its bytes."""
    flat, digest = array.reshape(-1), xxhash.xxh3_128()
    low, high, finite = np.inf, -np.inf, True
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        digest.update(np.ascontiguousarray(part).tobytes())
        wide = to_float64(part, dtype)
        finite = finite and bool(np.isfinite(wide).all())
        low, high = min(low, float(np.fmin.reduce(wide))), max(high, float(np.fmax.reduce(wide)))
    kinds = [] if finite else ["not-finite"]
    if array.ndim > 1 and flat.size > 1 and low == high:
        kinds.append("constant-tensor" if high else "zero-tensor")
    if finite and dtype != "F16" and max(abs(low), abs(high)) > _FP16 and flat.size:
        kinds.append("fp16-range")
    return kinds, digest.hexdigest()
