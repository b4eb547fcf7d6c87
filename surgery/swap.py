"""swap: exchange components of a checkpoint, write the result, and measure its guarantee from the written files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..analysis.parameters import count
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.convert import plan_output
from ..converter.dtypes import HF_NAMES, from_float64, parse_dtype, widest
from ..converter.publish import Staging
from ..converter.write import execute
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.load import build, load_checkpoint
from ..parity.verify import require_finite_weights
from ..spec import ModelSpec
from .base import Reader, Swapped
from .measure import Measurement, measure, relative_error
from .norm import layernorm_to_rmsnorm, replace_layernorm

__all__ = ["SwapResult", "swap"]

EXACT_FP64 = 1e-12
EXACT_FP32 = 1e-5
"""The largest relative error of logits that "exact" allows, in fp64 and in fp32."""


@dataclass(frozen=True)
class SwapResult:
    """What a swap did.

    `measured` is None where it was asked not to measure; `parameters` are the totals before and after.
    """

    source: Checkpoint
    target: Path
    spec: ModelSpec
    guarantee: str
    dtype: str
    measured: Measurement | None
    parameters: tuple[int, int]


def swap(
    model: str | Path,
    out: str | Path,
    *,
    norm: str | None = None,
    approximate: bool = False,
    dtype: str = "float64",
    force: bool = False,
    measured: bool = True,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SwapResult:
    """Exchange a component and write the result in gptkit's own format.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make.
        norm: "rmsnorm" turns every LayerNorm into an RMSNorm.
        approximate: replace plainly instead of exactly, and report what it costs.
        dtype: how the tensors that the swap computes are stored; the others keep their dtype. Anything narrower than
            float64 rounds them once, and an exact swap is then exact up to that rounding: what the rounding costs is
            measured from the files, exactness from the same tensors before it.
        force: replace an existing checkpoint folder, in one step.
        measured: compare logits before and after, in fp32 and fp64, from the files that were written.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: called with the bytes of every tensor written.

    Raises:
        SwapRefused: a precondition does not hold; nothing was written.
        GptkitError: an exact swap came out above its bound; nothing was published.
        InvalidInput, Offline, UsageError: as `convert`; weights or logits that are not finite.

    """
    if norm is None:
        raise UsageError("nothing to swap", "say what: --norm rmsnorm")
    if norm != "rmsnorm":
        raise UsageError(f"unknown norm {norm!r}", "known: rmsnorm")
    stored = parse_dtype(dtype)
    Staging(Path(out), force).check()  # what cannot be written is refused here, before anything is fetched or computed
    source = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    swapped = (replace_layernorm if approximate else layernorm_to_rmsnorm)(source.spec)
    dtypes = _dtypes(source, swapped, stored)
    record = {**swapped.summary, "dtype": HF_NAMES[stored], "gptkit": __version__}
    origin = replace(source.origin, history=(*source.origin.history, record))
    # What is stored wide is computed in fp32 at least: a bf16 model would round the exactness away.
    compute = widest([source.dtype, "F32"]) if swapped.computed else source.dtype
    plan = plan_output(swapped.spec, origin, "local", dtypes, compute, source.folder)
    with Staging(Path(out), force) as staging:
        files = execute(plan, _tensors(source, swapped, dtypes), staging, progress)
        found = measure(source, open_checkpoint(staging.path)) if measured else None
        if found is not None:
            _require_numbers(source, found)
            if swapped.guarantee == "exact":
                _hold_to_exact(source, swapped, stored, found)
        manifest: dict[str, Any] = {
            "gptkit": __version__,
            "format": "local",
            "source": {"reference": source.origin.reference, "revision": source.revision},
            "swap": {**record, "measured": None if found is None else found.as_json()},
        }
        staging.commit(manifest, files=files)
    totals = (count(source.spec).total, count(swapped.spec).total)
    return SwapResult(source, Path(out), swapped.spec, swapped.guarantee, HF_NAMES[stored], found, totals)


def _dtypes(source: Checkpoint, swapped: Swapped, stored: str) -> Mapping[str, str]:
    """Every output tensor's dtype: computed ones as asked, copied ones as they were."""
    before = source.shared_dtypes()
    return {
        p.name: stored if p.name in swapped.computed else before[swapped.copied.get(p.name, p.name)]
        for p in swapped.spec.parameters()
    }


def _tensors(source: Checkpoint, swapped: Swapped, dtypes: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray, str]]:
    """The output's tensors, computed one at a time."""
    reader = Reader(source)
    for parameter in swapped.spec.parameters():
        name = parameter.name
        if name in swapped.computed:
            dtype = dtypes[name]
            yield name, from_float64(swapped.computed[name](reader), dtype), dtype
        else:
            array, dtype = reader.raw(swapped.copied.get(name, name))
            yield name, array, dtype


def _require_numbers(source: Checkpoint, found: Measurement) -> None:
    """Raise InvalidInput where the logits are not numbers, with the weights to blame if the source has such."""
    if not all(math.isfinite(value) for value in (*found.maximum.values(), found.kl)):
        require_finite_weights(source)
        raise InvalidInput(f"{source.reference}: logits before or after the swap are not finite. Nothing was written.")


def _hold_to_exact(source: Checkpoint, swapped: Swapped, stored: str, found: Measurement) -> None:
    """Raise GptkitError where an exact swap is not.

    The files say so themselves where they hold all that was computed. Where storing rounds, exactness in fp64 is that
    of the tensors before, and fp32 files must still be right to fp32.

    A model whose stream has a large mean, or whose layers amplify, may itself round by more than the fp32 bound. The
    bound stays: what is called exact is exact to it, and the message says that fp32 is what failed.
    """
    errors = dict(found.relative)
    if stored != "F64":
        wide = dict.fromkeys(swapped.computed, "F64")
        tensors = _tensors(source, swapped, wide)
        exact = build(swapped.spec, tensors, torch.float64)
        errors["float64"] = relative_error(load_checkpoint(source, "float64"), exact)
    if stored not in ("F32", "F64"):
        del errors["float32"]
    for name, bound in (("float64", EXACT_FP64), ("float32", EXACT_FP32)):
        error = errors.get(name, 0.0)
        if not error <= bound:
            raise GptkitError(
                f"the swap is not exact on this checkpoint: relative error {error:.1e} in {name}, at most {bound:.0e}"
                " allowed. Nothing was written.",
                "Please report this checkpoint; --approximate gives the plain replacement.",
            )
