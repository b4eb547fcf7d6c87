"""Compare the logits and the bytes of a checkpoint with transformers', or with those of another checkpoint.

There are two separate verdicts. Bytes: every tensor must be the same after a conversion to gptkit's tensors and back,
and two checkpoints are compared tensor by tensor. Function: the logits must agree on the test inputs (the probe). A
part that was not compared is reported, and the result is then no pass. Logits that are not equal to the last bit must
meet two conditions, both measured in the same run:

1. In fp64 the logits of the two models differ by no more than the rounding to fp32 in both explains. The bound is
   always fp32's noise, in every dtype, because transformers computes parts of an "fp64" model in fp32.
2. The candidate's rounding errors are no larger than the reference's. Otherwise a candidate could widen its own
   allowance.

Two kinds of change escape this comparison. The first is below fp32's noise on the probe: a tiny eps, or a bias that
softmax cancels. The second is another way to round in bf16 with an error of bf16's size (rounded rotary tables make 1.0
to 1.5 times the noise). The bytes reveal both, where the two models should have the same bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from ..analysis.activations import Kernel
from ..analysis.parameters import SMALL, count
from ..architectures.obstacles import by_layers, short
from ..architectures.releases import faults, untested
from ..components import ModelSpec, differences, without_rounding
from ..components.ranges import some_of
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import not_finite
from ..converter.opening import Opening
from ..converter.threads import as_before, suit
from ..converter.tokenizer import load_tokenizer
from ..display import Shown
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.devices import Device, device_of, hardware, in_float32, reported_memory
from ..modules.load import torch_dtype
from ..signatures import takes
from .bisect import Divergence
from .compare import LogitDifference, compare, gaps, largest_gap, mean_gap
from .damage import Damage, damage
from .outputs import computed_rightly
from .precision import Imprecise, imprecise_component
from .probe import (
    AFFORDABLE,
    LONG,
    ProbeBatch,
    limited_to,
    limits,
    longest,
    one_function,
    passed,
    probe,
    text_batch,
    whole_context,
)
from .repair import diagnose
from .score import MistakeScore, try_mistakes
from .sides import Sides, sides
from .stored import BytesVerdict, Reached, compare_bytes, rows_to_probe

_PROMPTS = (
    "KING RICHARD:\nNow is the winter",
    "Once upon a time, there was a little girl",
    "def main():\n    return 0\n",
)
_some = partial(some_of, most=5, more=", … ({} more)")  # shortens a list of names in a message
IMPRECISE = 4.0
"""The largest allowed ratio of the candidate's mean error to the reference's.

Exact swaps and other orders of summation have a ratio of 0.9 to 1.3, in fp32 and in bf16. Computing in the next
narrower dtype gives hundreds. The run itself cannot measure this bound: the reference's two attention paths differ in
one product alone, have 0.96 to 1.01 times the same error, and as a bound would fail correct swaps.
"""


@dataclass(frozen=True)
class Noise:
    """The rounding noise of both models, and the difference of their functions in fp64. All are
    differences of logits.
    """

    reference: float  # the reference's largest difference between fp32 and fp64
    candidate: float  # the candidate's largest difference between fp32 and fp64
    paths: float | None  # the largest fp32 difference of the reference's two attention paths; None if it has one path
    functions: float  # the largest difference between the reference and the candidate in fp64
    errors: dict[str, tuple[float, float]]  # by dtype, the mean error of (reference, candidate) relative to fp64

    @property
    def allowed(self) -> float:
        """Return the largest difference of logits in fp64 that rounding explains."""
        return max(self.reference, self.paths or 0.0) + self.candidate

    @property
    def imprecise(self) -> tuple[str, ...]:
        """Return the dtypes in which the candidate's rounding errors are larger than the reference's."""
        return tuple(d for d, (ours, theirs) in self.errors.items() if not theirs <= IMPRECISE * ours)

    @property
    def explains(self) -> bool:
        """Return whether the difference is within the rounding noise, and the candidate does not round worse."""
        return self.functions <= self.allowed and not self.imprecise


@dataclass(frozen=True)
class Verification(Shown):
    """The result of `verify`. Its `verdict` is "identical" (every bit of every logit), "equal" (within the rounding
    noise) or "different".
    """

    model: str
    other: str | None
    dtype: str
    attention: str
    prompts: tuple[LogitDifference, ...]
    bytes: BytesVerdict | None
    noise: Noise | None
    score: MistakeScore | None = None  #: the deliberate mistakes that this probe detects; None if none were made
    divergence: Divergence | None = None  #: the comparison by component, with causes if the models are different
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  #: the command-line arguments that repeat this comparison
    damage: Damage | None = None  #: the damage by position, layer and component; None if it was not measured
    up_to: int | None = None  #: the longest sequence, in tokens, that the verdict covers; None for any length
    limited: tuple[str, ...] = ()  #: parts that were not compared although nobody asked to leave them out
    device: str = "cpu"  #: the device that computed, such as "cuda:0"
    hardware: str | None = None  #: the name of the GPU; None on other devices
    imprecise: Imprecise | None = None  #: in bf16 and fp16, a component that gptkit rounds more than transformers does

    def __repr__(self) -> str:
        return f"<{self.model} against {self.other or 'transformers'}: {self.verdict}, {len(self.prompts)} prompts>"

    @property
    def verdict(self) -> Literal["identical", "equal", "different"]:
        """Return "identical", "equal" (within the rounding noise) or "different" for the logits."""
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        explained = self.noise is not None and self.noise.explains and self.imprecise is None
        return "equal" if explained else "different"

    @property
    def place(self) -> str:
        """Return the device that computed, with the name of the GPU: "cuda:0 (NVIDIA H100 80GB HBM3)"."""
        return self.device if self.hardware is None else f"{self.device} ({self.hardware})"

    @property
    def same(self) -> bool:
        """Return whether logits and bytes agree, and everything was compared that the user did not exclude."""
        return self.verdict != "different" and (self.bytes is None or self.bytes.hold) and not self.limited

    @property
    def passed(self) -> bool:
        """Return whether the models are the same, and the test inputs detect every deliberate mistake."""
        return self.same and not (self.score is not None and self.score.missed)

    @property
    def exit_code(self) -> int:
        """Return 0 for a pass, 3 if the models are not the same, and 6 if the test inputs missed
        deliberate mistakes.
        """
        return 0 if self.passed else 6 if self.same else 3

    def as_json(self) -> dict[str, Any]:
        data = json.loads(json.dumps(asdict(replace(self, damage=None))))
        data["damage"] = None if self.damage is None else self.damage.as_json()
        verdict = {"verdict": self.verdict, "passed": self.passed, "versions": versions()}
        return {"schema_version": 1, **verdict, **data}


def versions() -> dict[str, str]:
    """Return the installed versions of transformers and torch."""
    return {name: version(name) for name in ("transformers", "torch")}


@as_before()
@in_float32()
@takes(Opening)
def verify(
    model: str | Path,
    other: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "float32",
    attention: str | None = None,
    prompts: Sequence[str] = (),
    long: bool = False,
    up_to: int | None = None,
    mutations: bool | None = None,
    bisected: bool | None = None,
    damaged: bool | None = None,
    text: Callable[[Checkpoint], Sequence[int] | None] = lambda _: None,
    stream: bool = False,
    device: Device = "auto",
    allow_extra: bool = False,
    progress: Callable[[str], None] | None = None,
    **opening: Unpack[Opening],
) -> Verification:
    """Compare gptkit's logits with transformers'.

    Args:
        model: the reference, which transformers loads. gptkit first converts another format in a temporary folder.
        other: the checkpoint that gptkit loads and that should compute the same; `model` itself by default.
        dtype: the dtype in which both models compute.
        attention: "sdpa" or "eager" for both models; by default the first that transformers computes correctly.
        prompts: texts to compare on, in addition to the test inputs (the probe); needs a tokenizer.
        long: also test sequences that are longer than windows and contexts of more than 1,024 tokens, and the tokens of
            all rows of the embedding table that differ.
        up_to: the longest sequence that matters, in tokens; effects beyond this length are no difference.
        mutations: make deliberate mistakes and count those that the probe detects. By default gptkit makes them in the
            model itself for up to 50 million parameters, else in a small copy of the model with random weights.
        bisected: compare component by component; by default if the models differ and have at most 50M parameters.
        damaged: measure what a change costs by position, by layer and by component. By default gptkit does this if both
            the architectures and the logits differ, for up to 50 million parameters.
        text: returns the token ids on which perplexity is measured, given the opened reference; None without a text.
        stream: run both models one layer at a time from their files.
        device: the device on which both models compute: "cpu", "cuda:1", or "auto" for a GPU if there is one.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: called with the name of each step.

    Raises:
        InvalidInput, Offline: as in `open_checkpoint`; also for different vocabularies and logits that are not finite.
        UsageError: transformers lacks this attention path; there is no tokenizer for the prompts; `damaged` was given
            without a second model; the device is unknown or has no float64.
        GptkitError: the memory of the GPU is full.
        CannotExpress: no transformers class computes the reference.
    """
    say, place = progress or (lambda _: None), device_of(device, "verify")
    source, target = _open_both(model, other, bool(damaged), allow_extra=allow_extra, **opening)
    path = _attention(source, attention)
    dtype_name = str(wanted := torch_dtype(dtype)).removeprefix("torch.")
    batches, notes = _batches(source, target, prompts, long, up_to)
    say("comparing bytes")
    checkpoints = (source,) if target is source else (source, target)
    for checkpoint in checkpoints:
        require_finite_weights(checkpoint)
    required = target is source or one_function(source.spec, target.spec)
    bytes_verdict, rows = compare_bytes(source, target, required)
    reach, limited = limited_to(source.spec, target.spec, max(batch.input_ids.shape[1] for batch in batches), up_to)
    more, unread = rows_to_probe(source, target, rows, batches, required=required, long=long, up_to=up_to)
    limited += unread
    with reported_memory(source.reference), sides(source, target, stream) as both:
        batches = [batch.to(place) for batch in batches + more]
        run, reached = _VerifyRun(both, path, wanted, place, notes, say), Reached()
        batches, reference, candidate = run.logits(batches, reached)
        limited += reached.left_out((*bytes_verdict.different, *bytes_verdict.alone)) if not required else []
        _require_finite(candidate, f"gptkit's logits of {target.reference}", dtype_name)
        compared = _comparisons(batches, reference, candidate)
        same = all(difference.identical for difference in compared)
        noise, position_gaps = (None, None) if same else run.noise(batches, reference, candidate)
        alike = required and bytes_verdict.hold and noise is not None and noise.explains
        imprecise = run.imprecise(batches) if alike else None
        divergence = run.divergence(batches, noise, position_gaps, bisected)
    with reported_memory(source.reference):
        cost = run.damage(noise, damaged, text)
        score = None if mutations is False else run.mistakes(batches, bool(mutations), stream, up_to)
    pickled = opening.get("allow_pickle")
    flags = {"long": long, "stream": stream, "allow-pickle": pickled, "allow-extra": allow_extra, "damage": damaged}
    options = _options(dtype_name, path, prompts, up_to, mutations, place, flags)
    return Verification(
        model=str(model),
        other=None if other is None else str(other),
        dtype=dtype_name,
        attention=path,
        prompts=compared,
        bytes=bytes_verdict,
        noise=noise,
        score=score,
        divergence=divergence,
        damage=cost,
        up_to=reach,
        limited=tuple(limited),
        device=str(place),
        hardware=hardware(place),
        imprecise=imprecise,
        notes=tuple([note for checkpoint in checkpoints for note in checkpoint.notes] + notes),
        arguments=(*map(resolved, checkpoints), *options),
    )


def _comparisons(
    batches: Sequence[ProbeBatch], reference: Sequence[Tensor], candidate: Sequence[Tensor]
) -> tuple[LogitDifference, ...]:
    """Compare the logits of both models on every batch. Raise GptkitError if there is none."""
    compared = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
    if not compared:
        raise GptkitError("nothing was compared, because none of transformers' logits is finite")
    return compared


def _open_both(
    model: str | Path, other: str | Path | None, damaged: bool, **options: bool
) -> tuple[Checkpoint, Checkpoint]:
    """Open the reference and the candidate.

    Raises:
        InvalidInput: their vocabularies differ in size.
        UsageError: the damage of a change is asked for (`damaged`), but there is only one checkpoint.
    """
    if damaged and other is None:
        hint = "Write gptkit verify ORIGINAL CHANGED --damage"
        raise UsageError("--damage compares two checkpoints, but only one was given", hint)
    source = open_checkpoint(model, **options)
    target = source if other is None else open_checkpoint(other, **options)
    suit(source.spec)
    if source.spec.vocab_size != target.spec.vocab_size:
        raise InvalidInput(
            f"the vocabularies differ: {source.spec.vocab_size} tokens in {source.reference}, "
            f"{target.spec.vocab_size} in {target.reference}",
            "gptkit can compare only models with the same vocabulary.",
        )
    return source, target


def _options(
    dtype: str,
    path: str,
    prompts: Sequence[str],
    up_to: int | None,
    mutations: bool | None,
    device: torch.device,
    flags: Mapping[str, bool | None],
) -> list[str]:
    """Return the command-line options that repeat a comparison.

    Args:
        dtype: the value of --dtype.
        path: the value of --attention.
        prompts: the values of --prompt.
        up_to: the value of --up-to.
        mutations: --mutations or --no-mutations; None for neither.
        device: the value of --device, which is left out for the CPU.
        flags: further options without values, by name. They are included if they are true.
    """
    options = ["--dtype", dtype, "--attention", path]
    options += [f"--prompt={prompt}" for prompt in prompts]  # one word, because a prompt may begin with dashes
    options += [] if up_to is None else ["--up-to", str(up_to)]
    options += [] if mutations is None else ["--mutations"] if mutations else ["--no-mutations"]
    options += [f"--{name}" for name, value in flags.items() if value]
    return options + ([] if device.type == "cpu" else ["--device", str(device)])


@dataclass(frozen=True)
class _VerifyRun:
    """One run of `verify`: both models, the attention path, the dtype and the device, and the notes for the user."""

    both: Sides
    path: Kernel
    dtype: torch.dtype
    device: torch.device
    notes: list[str]
    say: Callable[[str], None]

    def logits(
        self, batches: list[ProbeBatch], reached: Reached
    ) -> tuple[list[ProbeBatch], list[Tensor], list[Tensor]]:
        """Run both models. Return the batches on which transformers' logits are finite, and both models' logits on
        them.

        `reached` records which experts of gptkit's model receive tokens.
        """
        dtype_name = str(self.dtype).removeprefix("torch.")
        self.say("transformers")
        with _computable(dtype_name):
            reference = self.both.reference(batches, self.dtype, self.path)
        bare = [logits for batch, logits in zip(batches, reference, strict=True) if batch.attention_mask is None]
        _require_finite(bare, f"transformers' logits of {self.both.source.reference}", dtype_name)
        # transformers' eager Bloom gives NaN in fp64 for a padded row that attends to no token.
        finite = [bool(torch.isfinite(logits).all()) for logits in reference]
        left_out = [batch.name for batch, is_finite in zip(batches, finite, strict=True) if not is_finite]
        self.notes.extend(
            f"left out, because transformers' own logits are not finite there: {name}" for name in left_out
        )
        batches, reference = list(compress(batches, finite)), list(compress(reference, finite))
        self.say("gptkit")
        with _computable(dtype_name):
            return batches, reference, self.both.candidate(batches, self.dtype, self.path, reached.watch)

    def divergence(
        self, batches: list[ProbeBatch], noise: Noise | None, gaps: list[Tensor] | None, bisected: bool | None
    ) -> Divergence | None:
        """Find the first component that differs, if the caller asks for it, or by default if the models differ.

        Args:
            batches: the inputs.
            noise: the rounding noise; None if the logits are identical.
            gaps: the difference of the logits at each position, (N,) per batch.
            bisected: whether the caller asks for this; None for the default.
        """
        different, allowed = noise is not None and not noise.explains, None
        if not (bisected or (different and bisected is None)):
            return None
        self.say("looking for the place and the cause" if different else "laying the components side by side")
        if noise is not None and different:  # a repaired model rounds as the reference does
            allowed = max(noise.allowed, 2 * max(noise.reference, noise.paths or 0.0))
        return diagnose(self.both, batches, self.path, allowed, self.notes, gaps=gaps, asked=bool(bisected))

    def mistakes(self, batches: list[ProbeBatch], asked: bool, stream: bool, up_to: int | None) -> MistakeScore | None:
        """Make deliberate mistakes, and count those that the batches detect; see `try_mistakes`."""
        self.say("making mistakes on purpose")
        return try_mistakes(self.both.source, batches, asked, stream, self.notes, up_to)

    def imprecise(self, batches: list[ProbeBatch]) -> Imprecise | None:
        """Return a component that gptkit computes less precisely than transformers, in a dtype narrower than fp32."""
        if torch.finfo(self.dtype).eps <= torch.finfo(torch.float32).eps:
            return None
        self.say("comparing the rounding of the components")
        return imprecise_component(self.both, batches, self.dtype, self.path)

    def damage(
        self, noise: Noise | None, damaged: bool | None, text: Callable[[Checkpoint], Sequence[int] | None]
    ) -> Damage | None:
        """Measure how much the change costs, if the caller asks for it (`damaged`).

        By default, do so if both the component trees and the logits differ. `text` returns the token ids to measure on.
        """
        source, target = self.both.source, self.both.target
        changed = without_rounding(source.spec) != without_rounding(target.spec)
        if not (damaged or (damaged is None and noise is not None and not noise.explains and changed)):
            return None
        size = max(count(checkpoint.spec).total for checkpoint in (source, target))
        if size <= SMALL or damaged:
            tell = lambda words: self.say(f"the damage: {words}")  # noqa: E731
            return damage(source, target, text=text(source), device=self.device, progress=tell)
        self.notes.append(
            f"the damage by position and layer was not measured, because a model has {size:,} parameters; "
            "--damage measures it"
        )
        return None

    def noise(
        self, batches: Sequence[ProbeBatch], reference: list[Tensor], candidate: list[Tensor]
    ) -> tuple[Noise, list[Tensor]]:
        """Measure the rounding noise of both models.

        Also return, for each batch, the difference of the fp64 logits of both models at each position, (N,).

        Args:
            batches: the inputs.
            reference: transformers' logits in the run's dtype, per batch.
            candidate: gptkit's logits in the run's dtype, per batch.
        """
        self.say("measuring the noise of rounding")
        both, path = self.both, self.path
        computed = {self.dtype: (reference, candidate)}
        if self.dtype != torch.float32:
            reference = both.reference(batches, torch.float32, path)
            candidate = both.candidate(batches, torch.float32, path)
            computed[torch.float32] = (reference, candidate)
        # transformers' eager Bloom gives NaN in fp64 for a padded row that attends to no token: use fp32 there.
        exact = [
            wide if bool(torch.isfinite(wide).all()) else narrow
            for wide, narrow in zip(both.reference(batches, torch.float64, path), reference, strict=True)
        ]
        exact_candidate = both.candidate(batches, torch.float64, path)
        architecture = both.source.architecture
        paths = [p for p in (architecture.reference(both.source.spec) if architecture else ()) if p != path]
        noise = Noise(
            reference=largest_gap(reference, exact),
            candidate=largest_gap(candidate, exact_candidate),
            paths=largest_gap(reference, both.reference(batches, torch.float32, paths[0])) if paths else None,
            functions=largest_gap(exact, exact_candidate),
            errors={
                str(dtype).removeprefix("torch."): (mean_gap(ours, exact), mean_gap(theirs, exact_candidate))
                for dtype, (ours, theirs) in computed.items()
            },
        )
        return noise, [
            torch.cat([gap.amax(dim=-1) for gap in gaps([a], [b])]) for a, b in zip(exact, exact_candidate, strict=True)
        ]


def resolved(checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint as the user gave it. A model from the hub gets "@" and its commit."""
    revision = checkpoint.revision
    return checkpoint.reference if revision is None else f"{checkpoint.reference.partition('@')[0]}@{revision}"


@contextmanager
def _computable(dtype: str) -> Iterator[None]:
    """Raise UsageError if torch cannot compute in this dtype on this machine. Use it in a `with` around the
    computation.
    """
    try:
        yield
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise UsageError(f"this machine cannot compute in {dtype}: {reason}", "use --dtype float32") from error


def _attention(source: Checkpoint, path: str | None) -> Kernel:
    """Return the attention path ("sdpa" or "eager") to compare on; by default the first that transformers computes
    correctly.

    Raise UsageError for a path that transformers computes wrongly.
    """
    architecture = source.architecture
    sound = ("sdpa", "eager") if architecture is None else architecture.reference(source.spec)
    path = sound[0] if path is None else path
    if path not in ("sdpa", "eager"):
        raise UsageError(f"unknown attention {path!r}", "known: sdpa, eager")
    if path not in sound:
        quirk = architecture.reference_quirk if architecture is not None else ""
        raise UsageError(f"cannot verify with --attention {path}: {quirk}", f"use --attention {sound[0]}")
    return "eager" if path == "eager" else "sdpa"


def _batches(
    source: Checkpoint, target: Checkpoint, prompts: Sequence[str], long: bool, up_to: int | None
) -> tuple[list[ProbeBatch], list[str]]:
    """Return the test inputs and the prompts as batches, and notes for the user."""
    specs = (source.spec,) if target is source else (source.spec, target.spec)
    supported = None if source.architecture is None else source.architecture.takes(source.spec)
    table = longest(*specs, supported=supported)
    if up_to is not None and not 1 <= up_to <= (table or up_to):
        raise UsageError(
            f"--up-to {up_to}: {'the models do not' if len(specs) > 1 else 'the model does not'} support this length",
            f"Give a number of tokens from 1 to {table:,}." if table else "Give a number of tokens of at least 1.",
        )
    length_limit = min((size for size in (table, up_to) if size is not None), default=None)
    notes = [*untested(), *faults(() if source.architecture is None else source.architecture.mended)]
    tokenizer = load_tokenizer(source.folder, source.texts)
    if tokenizer is None and prompts:
        raise UsageError(f"{source.reference} has no tokenizer, which --prompt needs", "Leave --prompt out.")
    batches = []
    for batch in probe(*specs, long=long, up_to=up_to, supported=supported):
        if computed_rightly(source.architecture, batch):
            batches.append(batch)
        else:
            notes.append(f"not compared, because transformers' class computes it wrongly: the input {batch.name}")
    length = whole_context(specs[0], specs[-1], supported) if long and up_to is None else None
    if length is not None:
        ids = [token % source.spec.vocab_size for token in range(length)]
        batches.append(text_batch("the whole context", ids, *specs, supported=supported))
    if tokenizer is None:
        notes.append("the model has no tokenizer: the test prompts are arbitrary token ids")
    else:
        for text in prompts or _PROMPTS:
            ids = tokenizer.encode(text)
            if not prompts:  # our own prompts are cut to the model's vocabulary and length
                ids = [token for token in ids if token < source.spec.vocab_size][:length_limit]
            if ids or prompts:
                batches.append(text_batch(text, ids, *specs, supported=supported))
    if up_to is None:
        notes += _untested_lengths(specs, table, supported, long)
    tables = [spec.positions.length for spec in specs if spec.positions is not None]
    if len(set(tables)) > 1:
        notes.append(
            f"the position tables have {tables[0]:,} and {tables[1]:,} rows: compared on up to {length_limit:,} tokens"
        )
    differing = by_layers(differences(specs[0], specs[-1]), len(specs[0].blocks))
    if differing:
        notes.append(
            f"the architectures differ: {_some([f'{path} {short(a)} -> {short(b)}' for path, a, b, _ in differing])}"
        )
    if not batches:
        raise GptkitError("nothing was compared, because no prompt has a token")
    return batches, notes


def _untested_lengths(
    specs: Sequence[ModelSpec], table: int | None, supported: int | None, long: bool
) -> Iterator[str]:
    """Yield notes about sequence lengths that the test inputs do not reach, and at which the models may differ.

    Args:
        specs: the component trees of the models.
        table: the longest sequence that the models can process, in tokens; None for any.
        supported: the longest sequence that transformers' class supports.
        long: whether the test inputs have sequences beyond long windows and contexts.
    """
    for limit in limits(*specs):
        if not passed(limit, table, long):
            possible = table is None or limit.beyond <= table
            why = (
                f"more than {AFFORDABLE:,} tokens; --long tests them"
                if possible
                else f"the model supports {table:,} tokens"
            )
            yield f"not tested on texts longer than the {limit} ({why})"
    if supported is not None and supported < LONG:
        yield f"not tested past {supported:,} tokens, because transformers' class supports no more"


def _require_finite(logits: Sequence[Tensor], whose: str, dtype: str) -> None:
    """Raise InvalidInput if logits are not finite.

    The caller has checked the weights, so an activation overflows. `whose` and `dtype` are words for the message.
    """
    if not all(bool(torch.isfinite(values).all()) for values in logits):
        raise InvalidInput(
            f"{whose} are NaN or infinite, although all weights are finite: an activation overflows in {dtype}",
            None if dtype == "float32" else "Compare in another dtype: --dtype float32.",
        )


def require_finite_weights(checkpoint: Checkpoint) -> None:
    """Raise InvalidInput with the names of the tensors that contain NaN or infinity."""
    problems = []
    for name, array, dtype in checkpoint.tensors():
        if count := not_finite(np.ascontiguousarray(array), dtype):
            problems.append(f"{name} ({count:,} values)")
        checkpoint.release()
    if problems:
        raise InvalidInput(f"{checkpoint.reference} has weights that are NaN or infinite: {_some(problems)}")
