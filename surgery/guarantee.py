"""Check from the written files whether a swap keeps its guarantee."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..analysis.parameters import SMALL, count
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import HF_NAMES
from ..errors import GptkitError, InvalidInput, SwapRefused
from ..modules.devices import Device
from ..parity.verify import require_finite_weights, verify
from .base import Exactly, Measurement, StoredModel
from .chain import Chain, chain
from .fits.text import CalibrationText
from .measure import measure

EXACT_FP64, EXACT_FP32 = 1e-12, 1e-5  # the largest relative error of logits that "exact" allows
_REPORT = "Please report this. With --as local, gptkit writes the model in its own format instead."


def require_transformers(folder: Path, device: Device = "cpu") -> None:
    """Raise GptkitError if transformers and gptkit compute different logits from the files in a folder.

    Both compute on `device`.
    """
    checkpoint = open_checkpoint(folder)
    large = count(checkpoint.spec).total > SMALL
    how: Any = {"mutations": False, "bisected": False, "stream": large, "device": device}
    verification = verify(folder, dtype=HF_NAMES[checkpoint.dtype], **how)
    if not verification.passed:
        worst = max(prompt.maximum for prompt in verification.prompts)
        raise GptkitError(
            f"transformers and gptkit compute different logits for the new model ({verification.verdict}). The largest "
            f"difference is {worst:.1e}. Nothing was written.",
            _REPORT,
        )


def measured_from_files(
    source: Checkpoint, done: Chain, stored: str, folder: Path, text: Sequence[int] | None, device: Device = "cpu"
) -> Measurement:
    """Compare the logits of the written files with the original's, on gptkit's test inputs and on the text, if any.

    Args:
        source: The original checkpoint.
        done: The swap steps that ran.
        stored: The dtype in which computed tensors are stored, such as "F64".
        folder: The folder with the written files.
        text: Token ids in the vocabulary of the original.
        device: The device to compute on.

    Raises:
        GptkitError: The swaps are declared exact but are not.
        InvalidInput: Logits are not finite.
    """
    written = StoredModel(open_checkpoint(folder))
    measurement = measure(done.against, written, promise=done.promise, text=text, device=device)
    if not all(math.isfinite(value) for value in (*measurement.maximum.values(), measurement.kl)):
        require_finite_weights(source)  # raises an error about the weights, if they are not finite
        raise InvalidInput(
            f"{source.reference}: logits before or after the swap are NaN or infinite. Nothing was written."
        )
    if done.guarantee == "exact":
        names = [parameter.name for parameter in done.spec.parameters()]
        rounds = any(done.computed(name) or written.dtype(name) != done.models[-1].dtype(name) for name in names)
        _require_exact(done, stored, measurement, rounds, device)
    elif done.steps and done.steps[-1].option == "as":  # approximate steps, then a family's form
        before, after = (Exactly(model) for model in done.models[-2:])
        error = measure(before, after, dtypes=("float32",), device=device).relative["float32"]
        if not error <= EXACT_FP32:
            reason = (
                f"{done.steps[-1]} changes logits by {error:.1e} (relative), and at most {EXACT_FP32:.0e} is allowed."
            )
            raise GptkitError(f"{reason} Nothing was written.", _REPORT)
    return measurement


def steps_alone(done: Chain, text: CalibrationText | None, device: Device = "cpu") -> tuple[Measurement, ...]:
    """Measure each step of a chain alone: compare the model after the step with the model before it, in fp64.

    The models are also compared on the last part of `text`, on which no step was fitted. Tensors are not rounded to the
    dtype in which they are stored.
    """
    measurements = []
    for before, swapped, after in zip(done.models, done.swapped, done.models[1:], strict=False):
        against = Exactly(before if swapped.against is None else swapped.against(before))
        ids = None if text is None else text.held_out
        how: Any = {"promise": swapped.promise, "text": ids, "dtypes": ("float64",), "device": device}
        measurements.append(measure(against, Exactly(after), **how))
        text = None if text is None else text.renamed(swapped.promise)
    return tuple(measurements)


def _require_exact(done: Chain, stored: str, measurement: Measurement, rounds: bool, device: Device) -> None:
    """Raise GptkitError if swaps that are declared exact are not.

    Usually this is decided by the measurement of the written files, in fp64 and fp32. If the files store tensors in a
    narrower dtype than fp64, the fp64 error is measured again, from the tensors before rounding. The fp32 error then
    counts only if the files are in fp32.

    In a model with a large mean in its residual stream, or with layers that amplify errors, rounding alone may exceed
    the fp32 bound. This is an error too, and the message names fp32.

    Args:
        done: The swap steps that ran.
        stored: The dtype in which computed tensors are stored, such as "F64".
        measurement: The comparison of the written files with the original.
        rounds: Whether some tensor is computed by the swaps, or converted to another dtype when it is written.
        device: The device to compute on.
    """
    errors = dict(measurement.relative)
    if stored != "F64" and rounds:
        how: Any = {"promise": done.promise, "dtypes": ("float64",), "device": device}
        exactly = measure(done.against, Exactly(done.models[-1]), **how)
        errors["float64"] = exactly.relative["float64"]
        if stored != "F32":
            del errors["float32"]
    for name, bound in (("float64", EXACT_FP64), ("float32", EXACT_FP32)):
        error = errors.get(name, 0.0)
        if not error <= bound:
            raise GptkitError(
                f"the swap is not exact on this checkpoint: in {name}, the relative error of logits is {error:.1e}, "
                f"and at most {bound:.0e} is allowed. Nothing was written.",
                "Please report this checkpoint. --approximate applies the swap without this guarantee.",
            )


def plain_form(
    source: Checkpoint, done: Chain, text: CalibrationText | None, device: Device = "cpu"
) -> Measurement | None:
    """Measure how much the logits would change if the same steps ran without fits on a text (`--approximate`), in fp32.

    Return None if no step was fitted, or if a step cannot run without a fit.
    """
    if text is None or not done.calibration:
        return None
    steps = [
        replace(step, approximate=True) if "calibration" in swapped.summary else step
        for step, swapped in zip(done.steps, done.swapped, strict=True)
        if step.option != "as"
    ]
    try:
        naive = chain(source, steps, stored=done.stored, text=lambda: text, device=device)
    except SwapRefused:
        return None
    how: Any = {"promise": naive.promise, "text": text.held_out, "dtypes": ("float32",), "device": device}
    return measure(naive.against, naive.models[-1], **how)
