"""verify: does a checkpoint, as gptkit reads and computes it, give transformers' logits?

Two verdicts, kept apart. Bytes: every tensor goes into the shared layout and back to the same bytes (or, with two
checkpoints of one tree, they hold the same bytes). Function: logits on the probe. Equal to the last bit is the normal
result; where it is not (after a swap, or across kernels) the difference of the two functions in fp64 is judged against
the noise that rounding makes in either of them, measured in the same run, never against a number picked by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.tokenizer import load_tokenizer
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.attention import Kernel
from ..modules.load import load_checkpoint, torch_dtype
from .compare import Difference, compare, largest_gap
from .probe import AFFORDABLE, Batch, limits, probe, text_batch
from .reference import load_reference, reference_folder

__all__ = ["BytesVerdict", "Noise", "Verification", "verify"]

PROMPTS = (
    "KING RICHARD:\nNow is the winter",
    "Once upon a time, there was a little girl",
    "def main():\n    return 0\n",
)


@dataclass(frozen=True)
class BytesVerdict:
    """How many tensors were compared byte by byte, against what, and the names of those that differ."""

    compared: int
    against: str
    different: tuple[str, ...]


@dataclass(frozen=True)
class Noise:
    """Largest logit differences that rounding alone makes: each side's dtype against its own fp64, the reference's two
    attention paths against each other (None where it has one), and the two functions against each other in fp64.
    """

    reference: float
    candidate: float
    paths: float | None
    functions: float

    @property
    def allowed(self) -> float:
        """What the two functions may differ by in fp64."""
        return max(self.reference, self.paths or 0.0) + self.candidate


@dataclass(frozen=True)
class Verification:
    """The result; `verdict` is "identical" (every logit to the last bit), "equal" (within the rounding noise) or
    "different".
    """

    model: str
    other: str | None
    dtype: str
    attention: str
    prompts: tuple[Difference, ...]
    bytes: BytesVerdict | None
    noise: Noise | None
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Literal["identical", "equal", "different"]:
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        near = self.noise is not None and self.noise.functions <= self.noise.allowed
        return "equal" if near else "different"

    @property
    def passed(self) -> bool:
        """Function and, where they were compared, bytes."""
        return self.verdict != "different" and not (self.bytes is not None and self.bytes.different)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the verdicts."""
        data = asdict(self)
        return {"schema_version": 1, "verdict": self.verdict, "passed": self.passed, **json.loads(json.dumps(data))}


def verify(
    model: str | Path,
    other: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "float32",
    attention: str | None = None,
    prompts: Sequence[str] = (),
    long: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare gptkit's logits with transformers'.

    Args:
        model: the reference; transformers loads it (converted to HF files in a temporary folder where it is not HF).
        other: the checkpoint that gptkit loads and that should compute the same; `model` itself by default.
        dtype: what both compute in.
        attention: "sdpa" or "eager" on both sides; by default the first that transformers computes rightly.
        prompts: texts to compare on, beside the probe; needs a tokenizer.
        long: probe past windows and contexts of more than 1,024 tokens too.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        progress: told what is being done.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; vocabularies that differ; logits that are not finite.
        UsageError: a path of attention that transformers has not, a prompt without a tokenizer.
        CannotExpress: no transformers class computes the reference's tree.

    """
    say = progress or (lambda text: None)
    source = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle)
    target = source if other is None else open_checkpoint(other, offline=offline, allow_pickle=allow_pickle)
    if source.spec.vocab_size != target.spec.vocab_size:
        raise InvalidInput(
            f"vocabularies differ: {source.spec.vocab_size} tokens in {source.reference}, {target.spec.vocab_size} in"
            f" {target.reference}",
            "Only models over the same tokens can be compared.",
        )
    path = _attention(source, attention)
    wanted = torch_dtype(dtype)
    batches, notes = _batches(source, prompts, long)
    say("comparing bytes")
    bytes_verdict = _bytes(source, target)
    with reference_folder(source) as folder:
        say("transformers")
        reference = _run(load_reference(folder, wanted, path), batches, transformers=True)
        _require_finite(reference, source)
        say("gptkit")
        candidate = _run(load_checkpoint(target, wanted, path), batches)
        found = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        if sum(difference.positions for difference in found) == 0:
            raise GptkitError("nothing was compared: the probe has no positions")
        noise = None
        if not all(difference.identical for difference in found):
            say("measuring the noise of rounding")
            noise = _noise(source, target, folder, batches, path, wanted, reference, candidate)
    return Verification(
        model=str(model),
        other=None if other is None else str(other),
        dtype=str(wanted).removeprefix("torch."),
        attention=path,
        prompts=found,
        bytes=bytes_verdict,
        noise=noise,
        notes=tuple(source.notes + notes),
    )


def _attention(source: Checkpoint, asked: str | None) -> Kernel:
    """The path to compare on."""
    architecture = source.architecture
    sound = ("sdpa", "eager") if architecture is None else architecture.reference(source.spec)
    if asked is None:
        return "eager" if sound[0] == "eager" else "sdpa"
    if asked not in ("sdpa", "eager"):
        raise UsageError(f"unknown attention {asked!r}", "known: sdpa, eager")
    if asked not in sound:
        quirk = architecture.reference_quirk if architecture is not None else ""
        raise UsageError(f"cannot verify with --attention {asked}: {quirk}", f"use --attention {sound[0]}")
    return "eager" if asked == "eager" else "sdpa"


def _batches(source: Checkpoint, prompts: Sequence[str], long: bool) -> tuple[list[Batch], list[str]]:
    """The probe and the prompts, and what they leave out."""
    notes = []
    tokenizer = load_tokenizer(source.folder)
    if tokenizer is None and prompts:
        raise UsageError(f"{source.reference} has no tokenizer to read a prompt with", "leave --prompt out")
    batches = probe(source.spec, long=long)
    if tokenizer is None:
        notes.append("no tokenizer: the probe's token ids are made up from the vocabulary")
    else:
        for text in prompts or PROMPTS:
            ids = tokenizer.encode(text)
            if prompts or (ids and max(ids) < source.spec.vocab_size):
                batches.append(text_batch(text, ids, source.spec))
    for name, limit in limits(source.spec).items():
        if not any(str(limit) in batch.name for batch in batches):
            notes.append(f"not probed past the {name} of {limit:,} (more than {AFFORDABLE:,} tokens: --long does)")
    return batches, notes


def _run(model: Any, batches: Sequence[Batch], transformers: bool = False) -> list[Tensor]:
    """The logits of real tokens, (N, V) a batch."""
    results = []
    with torch.inference_mode():
        for batch in batches:
            if transformers:
                logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            else:
                logits = model(batch.input_ids, batch.attention_mask)
            results.append(batch.valid(logits))
    return results


def _require_finite(logits: Sequence[Tensor], source: Checkpoint) -> None:
    if all(bool(torch.isfinite(each).all()) for each in logits):
        return
    bad = []
    for name, array, dtype in source.tensors():
        finite = np.isfinite(array) if dtype != "BF16" else (array & 0x7F80) != 0x7F80
        if not finite.all():
            bad.append(f"{name} ({int((~finite).sum()):,} values)")
    where = f"weights are not finite: {', '.join(bad[:5])}" if bad else "its activations overflow in this dtype"
    raise InvalidInput(f"{source.reference}: transformers' own logits are not finite; {where}")


def _bytes(source: Checkpoint, target: Checkpoint) -> BytesVerdict | None:
    """Source and target tensor by tensor where they are one tree, else None; a source alone, forth and back."""
    if source is target:
        different = [
            leaf.checkpoint
            for leaf in source.leaves
            if not _same(leaf.to_checkpoint(leaf.to_shared(source.read(leaf))), source.read(leaf))
        ]
        return BytesVerdict(len(source.leaves), "the source, after its layout forth and back", tuple(different))
    if source.spec != target.spec:
        return None
    names = [parameter.name for parameter in source.spec.parameters()]
    different = []
    for name in names:
        (a, a_dtype), (b, b_dtype) = source.tensor(name), target.tensor(name)
        if a_dtype != b_dtype or not _same(a, b):
            different.append(name)
    return BytesVerdict(len(names), str(source.reference), tuple(different))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit, NaN and signed zero included."""
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return a.shape == b.shape and np.array_equal(first, second)


def _noise(
    source: Checkpoint,
    target: Checkpoint,
    folder: Path,
    batches: Sequence[Batch],
    path: Kernel,
    dtype: torch.dtype,
    reference: list[Tensor],
    candidate: list[Tensor],
) -> Noise:
    """See `Noise`. One model in memory at a time."""
    exact = _run(load_reference(folder, torch.float64, path), batches, transformers=True)
    exact_candidate = _run(load_checkpoint(target, torch.float64, path), batches)
    architecture = source.architecture
    others = [p for p in (architecture.reference(source.spec) if architecture else ()) if p != path]
    paths = None
    if others:
        paths = largest_gap(reference, _run(load_reference(folder, dtype, others[0]), batches, transformers=True))
    return Noise(
        reference=largest_gap(reference, exact),
        candidate=largest_gap(candidate, exact_candidate),
        paths=paths,
        functions=largest_gap(exact, exact_candidate),
    )
