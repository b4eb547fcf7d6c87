"""What a swap guarantees, held against the files that were written."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..analysis.parameters import count
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import HF_NAMES
from ..errors import GptkitError, InvalidInput, SwapRefused
from ..parity.probe import SMALL
from ..parity.verify import require_finite_weights, verify
from .base import Exactly, Stored
from .chain import Chain, chain
from .fits.calibration import Text
from .measure import Measurement, measure

EXACT_FP64, EXACT_FP32 = 1e-12, 1e-5  # the largest relative error of logits that "exact" allows
_REPORT = "Please report this. With --as local, gptkit writes the model in its own format instead."


def hold_to_transformers(folder: Path) -> None:
    """Raise GptkitError where transformers does not compute from the files what gptkit does."""
    checkpoint = open_checkpoint(folder)
    large = count(checkpoint.spec).total > SMALL
    found = verify(folder, mutations=False, bisected=False, stream=large, dtype=HF_NAMES[checkpoint.dtype])
    if not found.passed:
        worst = max(prompt.maximum for prompt in found.prompts)
        raise GptkitError(
            f"transformers computes different logits from these files than gptkit ({found.verdict}), by "
            f"up to {worst:.1e}. Nothing was"
            " written.",
            _REPORT,
        )


def measured_from_files(
    source: Checkpoint, done: Chain, stored: str, folder: Path, text: Sequence[int] | None
) -> Measurement:
    """The logits of the written files against the original's, on the probe and on a text, where there is one. Raises
    GptkitError where the chain is called exact and is not, and InvalidInput where there are logits that are no numbers.
    """
    written = Stored(open_checkpoint(folder))
    found = measure(done.against, written, promise=done.promise, text=text)
    if not all(math.isfinite(value) for value in (*found.maximum.values(), found.kl)):
        require_finite_weights(source)  # which blames the weights, if the source has such
        raise InvalidInput(f"{source.reference}: logits before or after the swap are not finite. Nothing was written.")
    if done.guarantee == "exact":
        names = [parameter.name for parameter in done.spec.parameters()]
        rounds = any(done.computed(name) or written.dtype(name) != done.models[-1].dtype(name) for name in names)
        _hold_to_exact(done, stored, found, rounds)
    elif done.steps and done.steps[-1].option == "as":  # into a family's own form, of what approximate ones made
        before, after = (Exactly(model) for model in done.models[-2:])
        error = measure(before, after, dtypes=("float32",)).relative["float32"]
        if not error <= EXACT_FP32:
            told = f"{done.steps[-1]} changes logits by {error:.1e}, at most {EXACT_FP32:.0e} allowed."
            raise GptkitError(f"{told} Nothing was written.", _REPORT)
    return found


def each_alone(done: Chain, text: Text | None) -> tuple[Measurement, ...]:
    """What every step costs by itself, in fp64 and before any rounding: the tree after it against the tree before."""
    found = []
    for before, swapped, after in zip(done.models, done.swapped, done.models[1:], strict=False):
        against = Exactly(before if swapped.against is None else swapped.against(before))
        ids = None if text is None else text.held_out
        found.append(measure(against, Exactly(after), promise=swapped.promise, text=ids, dtypes=("float64",)))
        text = None if text is None else text.renamed(swapped.promise)
    return tuple(found)


def _hold_to_exact(done: Chain, stored: str, found: Measurement, rounds: bool) -> None:
    """Raise GptkitError where an exact swap is not.

    The files say so themselves where they hold all that was computed. Where storing rounds, exactness in fp64 is that
    of the tensors before, and fp32 files must still be right to fp32.

    A model whose stream has a large mean, or whose layers amplify, may itself round by more than the fp32 bound. The
    bound stays: what is called exact is exact to it, and the message says that fp32 is what failed.
    """
    errors = dict(found.relative)
    if stored != "F64" and rounds:
        exactly = measure(done.against, Exactly(done.models[-1]), promise=done.promise, dtypes=("float64",))
        errors["float64"] = exactly.relative["float64"]
        if stored != "F32":
            del errors["float32"]
    for name, bound in (("float64", EXACT_FP64), ("float32", EXACT_FP32)):
        error = errors.get(name, 0.0)
        if not error <= bound:
            raise GptkitError(
                f"the swap is not exact on this checkpoint: relative error {error:.1e} in {name}, at most {bound:.0e}"
                " allowed. Nothing was written.",
                "Please report this checkpoint. --approximate applies the swap without this guarantee.",
            )


def plain_form(source: Checkpoint, done: Chain, text: Text | None) -> Measurement | None:
    """What the same steps cost in fp32 with the plain form of those that were fitted; None where there is no such."""
    if text is None or not done.calibration:
        return None
    steps = [
        replace(step, approximate=True) if "calibration" in swapped.summary else step
        for step, swapped in zip(done.steps, done.swapped, strict=True)
        if step.option != "as"
    ]
    try:
        naive = chain(source, steps, stored=done.stored, text=lambda: text)
    except SwapRefused:
        return None
    return measure(naive.against, naive.models[-1], promise=naive.promise, text=text.held_out, dtypes=("float32",))
