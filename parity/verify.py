"""verify: does a checkpoint, as gptkit reads and computes it, give transformers' logits?

Two verdicts, kept apart: bytes (every tensor forth and back, or of two checkpoints all that both have) and function
(logits on the probe). What was not looked at is told, and is no pass. Where logits are not equal to the last bit, two
things must hold, both measured in the same run: in fp64 the functions differ by no more than rounding to fp32 makes in
either of them (always fp32, whatever dtype is asked for, and not fp64's noise, since transformers keeps parts of an
"fp64" model in fp32), and the candidate rounds no worse than the reference, so that it cannot widen its own allowance.

What no such comparison sees: a change below fp32's noise on the probe (an eps far below the stream's variance, a bias
that softmax cancels), and another way to round in bf16 whose error is of bf16's own size (rope tables rounded, which is
1.0 to 1.5 times the noise). Bytes see both where trees call for the same ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..analysis.activations import Kernel
from ..analysis.parameters import count
from ..architectures.obstacles import by_layers, short
from ..components import differences, without_rounding
from ..components.ranges import some_of
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import not_finite
from ..converter.threads import as_before, suit
from ..converter.tokenizer import load_tokenizer
from ..display import Shown
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.load import torch_dtype
from .bisect import Divergence
from .compare import LogitDifference, compare, gaps, largest_gap, mean_gap
from .damage import Damage, damage
from .outputs import computed_rightly
from .probe import (
    AFFORDABLE,
    LONG,
    SMALL,
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
_some = partial(some_of, most=5, more=", … ({} more)")  # of the names in a message
IMPRECISE = 4.0
"""Times the reference's mean error that a candidate's may be. Exact swaps and other orders of summing have 0.9 to 1.3,
on the tiny models of the tests and on the samples, in fp32 and in bf16; computing in the next narrower dtype has
hundreds. Nothing in the run measures this bound: the reference's own two paths of attention have 0.96 to 1.01 of each
other's error, since they differ in one product alone, and a bound made of them would fail right swaps.
"""


@dataclass(frozen=True)
class Noise:
    """Largest logit differences that rounding alone makes: each side's fp32 against its own fp64, the reference's two
    attention paths in fp32 against each other (None where it has one); the two functions against each other in fp64;
    and `errors`, the mean error of (reference, candidate) against their own fp64 in each dtype.
    """

    reference: float
    candidate: float
    paths: float | None
    functions: float
    errors: dict[str, tuple[float, float]]

    @property
    def allowed(self) -> float:
        """What the two functions may differ by in fp64."""
        return max(self.reference, self.paths or 0.0) + self.candidate

    @property
    def imprecise(self) -> tuple[str, ...]:
        """The dtypes in which the candidate rounds worse than the reference."""
        return tuple(d for d, (ours, theirs) in self.errors.items() if not theirs <= IMPRECISE * ours)

    @property
    def explains(self) -> bool:
        return self.functions <= self.allowed and not self.imprecise


@dataclass(frozen=True)
class Verification(Shown):
    """The result; `verdict` is "identical" (every logit to the last bit), "equal" (within the rounding noise) or
    "different".

    score: the mistakes that this probe would have caught, None where they were not tried. divergence: the models
    component by component, None where they were not laid side by side; with causes where they are different. arguments:
    what was asked, as the words of a command line that asks it again. damage: of a changed tree, None where there is
    none, or nobody looked. up_to: the most tokens of a sequence that the verdict speaks of, None for any. limited: what
    nobody asked to leave out, and was not looked at.
    """

    model: str
    other: str | None
    dtype: str
    attention: str
    prompts: tuple[LogitDifference, ...]
    bytes: BytesVerdict | None
    noise: Noise | None
    score: MistakeScore | None = None
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    damage: Damage | None = None
    up_to: int | None = None
    limited: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.model} against {self.other or 'transformers'}: {self.verdict}, {len(self.prompts)} prompts>"

    @property
    def verdict(self) -> Literal["identical", "equal", "different"]:
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        return "equal" if self.noise is not None and self.noise.explains else "different"

    @property
    def same(self) -> bool:
        """Function and bytes, with nothing left out that should have been looked at."""
        return self.verdict != "different" and (self.bytes is None or self.bytes.hold) and not self.limited

    @property
    def passed(self) -> bool:
        """The same, on a probe that would have caught every mistake tried."""
        return self.same and not (self.score is not None and self.score.missed)

    @property
    def exit_code(self) -> int:
        """0, 3 where the two are not the same as far as was looked, 6 where they are and the probe missed mistakes."""
        return 0 if self.passed else 6 if self.same else 3

    def as_json(self) -> dict[str, Any]:
        data = json.loads(json.dumps(asdict(replace(self, damage=None))))
        data["damage"] = None if self.damage is None else self.damage.as_json()
        verdict = {"verdict": self.verdict, "passed": self.passed, "versions": versions()}
        return {"schema_version": 1, **verdict, **data}


def versions() -> dict[str, str]:
    """Return the installed versions of the packages whose numbers are compared."""
    return {name: version(name) for name in ("transformers", "torch")}


@as_before()
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
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare gptkit's logits with transformers'.

    Args:
        model: the reference; transformers loads it (converted to HF files in a temporary folder where it is not HF).
        other: the checkpoint that gptkit loads and that should compute the same; `model` itself by default.
        dtype: what both compute in.
        attention: "sdpa" or "eager" on both sides; by default the first that transformers computes rightly.
        prompts: texts to compare on, beside the probe; needs a tokenizer.
        long: probe past windows and contexts of more than 1,024 tokens too, and every row of a table that differs.
        up_to: tokens of the longest sequence that matters; it is probed, and what only acts beyond is no difference.
        mutations: make mistakes on purpose and count those that the probe catches; never, where False. By default in
            the model itself for up to 50 million parameters, else in a small copy of its tree with random weights.
        bisected: lay the two component by component, whatever the verdict and the size; never, where False. By default
            where they are different, for up to 50 million parameters.
        damaged: say what a change costs by position, by layer and by component; never, where False. By default where
            the two are different trees and compute different things, for up to 50 million parameters.
        text: gives the token ids that perplexity is measured on, of the opened reference; None where there is no text.
        stream: run both sides a layer at a time from their files, in the memory of about two layers.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: told what is being done.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; vocabularies that differ; logits that are not finite.
        UsageError: a path of attention that transformers has not, a prompt without a tokenizer, damage of nothing.
        CannotExpress: no transformers class computes the reference's tree.
    """
    if damaged and other is None:
        raise UsageError("--damage needs two checkpoints", "gptkit verify ORIGINAL CHANGED --damage")
    say = progress or (lambda _: None)
    options = {"offline": offline, "allow_pickle": allow_pickle, "allow_extra": allow_extra}
    source = open_checkpoint(model, **options)
    target = source if other is None else open_checkpoint(other, **options)
    suit(source.spec)
    if source.spec.vocab_size != target.spec.vocab_size:
        raise InvalidInput(
            f"vocabularies differ: {source.spec.vocab_size} tokens in {source.reference}, {target.spec.vocab_size} in"
            f" {target.reference}",
            "gptkit can compare only models with the same vocabulary.",
        )
    path = _attention(source, attention)
    wanted = torch_dtype(dtype)
    dtype_name = str(wanted).removeprefix("torch.")
    batches, notes = _batches(source, target, prompts, long, up_to)
    if not batches:
        raise GptkitError("nothing was compared, because no prompt has a token")
    say("comparing bytes")
    both_sides = (source,) if target is source else (source, target)
    for checkpoint in both_sides:
        require_finite_weights(checkpoint)
    required = target is source or one_function(source.spec, target.spec)
    bytes_verdict, rows = compare_bytes(source, target, required)
    reach, limited = limited_to(source.spec, target.spec, max(batch.input_ids.shape[1] for batch in batches), up_to)
    more, unread = rows_to_probe(source, target, rows, batches, required=required, long=long, up_to=up_to)
    batches, limited = batches + more, limited + unread
    with sides(source, target, stream) as both:
        say("transformers")
        with _computable(dtype_name):
            reference = both.reference(batches, wanted, path)
        bare = [logits for batch, logits in zip(batches, reference, strict=True) if batch.attention_mask is None]
        _require_finite(bare, f"transformers' logits of {source.reference}", dtype_name)
        # Its eager bloom has NaN in fp64 where a padded row may look at nothing.
        finite = [bool(torch.isfinite(logits).all()) for logits in reference]
        left_out = [batch.name for batch, good in zip(batches, finite, strict=True) if not good]
        notes += [f"left out, because transformers' own logits are not finite there: {name}" for name in left_out]
        batches, reference = list(compress(batches, finite)), list(compress(reference, finite))
        say("gptkit")
        reached = Reached()
        with _computable(dtype_name):
            candidate = both.candidate(batches, wanted, path, reached.watch)
        limited += reached.left_out((*bytes_verdict.different, *bytes_verdict.alone)) if not required else []
        _require_finite(candidate, f"gptkit's logits of {target.reference}", dtype_name)
        found = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        if not found:
            raise GptkitError("nothing was compared, because none of transformers' logits is finite")
        noise, apart, divergence = None, None, None
        if not all(difference.identical for difference in found):
            say("measuring the noise of rounding")
            noise, apart = _noise(both, batches, path, wanted, reference, candidate)
        different = noise is not None and not noise.explains
        if bisected or (different and bisected is None):
            say("looking for the place and the cause" if different else "laying the components side by side")
            allowed = None
            if noise is not None and different:  # what was put right rounds as the reference does
                allowed = max(noise.allowed, 2 * max(noise.reference, noise.paths or 0.0))
            divergence = diagnose(both, batches, path, allowed, notes, gaps=apart, asked=bool(bisected))
    cost, marks = None, None
    changed = without_rounding(source.spec) != without_rounding(target.spec)
    if damaged or (damaged is None and different and changed):
        size = max(count(checkpoint.spec).total for checkpoint in both_sides)
        if size <= SMALL or damaged:
            cost = damage(source, target, text=text(source), progress=lambda words: say(f"the damage: {words}"))
        else:
            notes.append(f"damage by position and layer left out, at {size:,} parameters: --damage")
    if mutations is not False:
        say("making mistakes on purpose")
        marks = try_mistakes(source, batches, bool(mutations), stream, notes, up_to)
    flags = {"long": long, "stream": stream, "allow-pickle": allow_pickle, "allow-extra": allow_extra}
    return Verification(
        model=str(model),
        other=None if other is None else str(other),
        dtype=dtype_name,
        attention=path,
        prompts=found,
        bytes=bytes_verdict,
        noise=noise,
        score=marks,
        divergence=divergence,
        damage=cost,
        up_to=reach,
        limited=tuple(limited),
        notes=tuple([note for each in both_sides for note in each.notes] + notes),
        arguments=(
            *map(resolved, both_sides),
            *("--dtype", dtype_name, "--attention", path),
            *(f"--prompt={text}" for text in prompts),  # a text may begin with dashes
            *(() if up_to is None else ("--up-to", str(up_to))),
            *(() if mutations is None else ("--mutations",) if mutations else ("--no-mutations",)),
            *(f"--{name}" for name, value in (flags | {"damage": damaged}).items() if value),
        ),
    )


def resolved(checkpoint: Checkpoint) -> str:
    """The checkpoint's reference, at the commit that it was taken from where it came from the hub."""
    revision = checkpoint.revision
    return checkpoint.reference if revision is None else f"{checkpoint.reference.partition('@')[0]}@{revision}"


@contextmanager
def _computable(dtype: str) -> Iterator[None]:
    """Raise UsageError for a dtype that torch knows and this machine's kernels do not."""
    try:
        yield
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise UsageError(f"this machine cannot compute in {dtype}: {reason}", "use --dtype float32") from error


def _attention(source: Checkpoint, asked: str | None) -> Kernel:
    architecture = source.architecture
    sound = ("sdpa", "eager") if architecture is None else architecture.reference(source.spec)
    asked = sound[0] if asked is None else asked
    if asked not in ("sdpa", "eager"):
        raise UsageError(f"unknown attention {asked!r}", "known: sdpa, eager")
    if asked not in sound:
        quirk = architecture.reference_quirk if architecture is not None else ""
        raise UsageError(f"cannot verify with --attention {asked}: {quirk}", f"use --attention {sound[0]}")
    return "eager" if asked == "eager" else "sdpa"


def _batches(
    source: Checkpoint, target: Checkpoint, prompts: Sequence[str], long: bool, up_to: int | None
) -> tuple[list[ProbeBatch], list[str]]:
    """The probe and the prompts, and what a person should know about them."""
    specs = (source.spec,) if target is source else (source.spec, target.spec)
    taken = None if source.architecture is None else source.architecture.takes(source.spec)
    table = longest(*specs, taken=taken)
    if up_to is not None and not 1 <= up_to <= (table or up_to):
        raise UsageError(
            f"--up-to {up_to}: {'the models do not' if len(specs) > 1 else 'the model does not'} support this length",
            "a number of tokens from 1 on" + (f", up to {table:,}" if table else ""),
        )
    most, notes = min((size for size in (table, up_to) if size is not None), default=None), list[str]()
    tokenizer = load_tokenizer(source.folder, source.texts)
    if tokenizer is None and prompts:
        raise UsageError(f"{source.reference} has no tokenizer, which --prompt needs", "Leave --prompt out.")
    batches = []
    for each in probe(*specs, long=long, up_to=up_to, taken=taken):
        if computed_rightly(source.architecture, each):
            batches.append(each)
        else:
            notes.append(f"left out, because transformers' class computes it wrongly: {each.name}")
    length = whole_context(specs[0], specs[-1], taken) if long and up_to is None else None
    if length is not None:
        ids = [token % source.spec.vocab_size for token in range(length)]
        batches.append(text_batch("the whole context", ids, *specs, taken=taken))
    if tokenizer is None:
        notes.append("the model has no tokenizer: the test prompts are arbitrary token ids")
    else:
        for text in prompts or _PROMPTS:
            ids = tokenizer.encode(text)
            if not prompts:  # ours, so cut to what the model takes
                ids = [token for token in ids if token < source.spec.vocab_size][:most]
            if ids or prompts:
                batches.append(text_batch(text, ids, *specs, taken=taken))
    for limit in limits(*specs):
        if up_to is None and not passed(limit, table, long):
            possible = table is None or limit.beyond <= table
            why = (
                f"more than {AFFORDABLE:,} tokens: --long does" if possible else f"the model supports {table:,} tokens"
            )
            notes.append(f"not tested on texts longer than the {limit} ({why})")
    if taken is not None and taken < LONG and up_to is None:
        notes.append(f"not tested past {taken:,} tokens, because transformers' class supports no more")
    tables = [spec.positions.length for spec in specs if spec.positions is not None]
    if len(set(tables)) > 1:
        notes.append(
            f"the position tables have {tables[0]:,} and {tables[1]:,} rows: compared on up to {most:,} tokens"
        )
    apart = by_layers(differences(specs[0], specs[-1]), len(specs[0].blocks))
    if apart:
        notes.append(f"the trees differ: {_some([f'{path} {short(a)} -> {short(b)}' for path, a, b, _ in apart])}")
    return batches, notes


def _require_finite(logits: Sequence[Tensor], whose: str, dtype: str) -> None:
    """Raise InvalidInput where there is nothing to compare, though the weights were finite."""
    if not all(bool(torch.isfinite(each).all()) for each in logits):
        raise InvalidInput(
            f"{whose} are not finite, although all weights are: an activation overflows in {dtype}",
            None if dtype == "float32" else "Compare in another dtype: --dtype float32.",
        )


def require_finite_weights(checkpoint: Checkpoint) -> None:
    """Raise InvalidInput with the tensors that hold NaN or infinity, whether or not the probe would meet them."""
    bad = []
    for name, array, dtype in checkpoint.tensors():
        if count := not_finite(np.ascontiguousarray(array), dtype):
            bad.append(f"{name} ({count:,} values)")
        checkpoint.release()
    if bad:
        raise InvalidInput(f"{checkpoint.reference}: weights are not finite: {_some(bad)}")


def _noise(
    both: Sides,
    batches: Sequence[ProbeBatch],
    path: Kernel,
    dtype: torch.dtype,
    reference: list[Tensor],
    candidate: list[Tensor],
) -> tuple[Noise, list[Tensor]]:
    """`Noise`, and how much the two functions differ at each position, (N,) a batch; one model at a time."""
    computed = {dtype: (reference, candidate)}
    if dtype != torch.float32:
        reference = both.reference(batches, torch.float32, path)
        candidate = both.candidate(batches, torch.float32, path)
        computed[torch.float32] = (reference, candidate)
    # transformers' eager bloom has NaN in fp64 where a padded row may look at nothing: there its fp32 stands in.
    exact = [
        wide if bool(torch.isfinite(wide).all()) else narrow
        for wide, narrow in zip(both.reference(batches, torch.float64, path), reference, strict=True)
    ]
    exact_candidate = both.candidate(batches, torch.float64, path)
    architecture = both.source.architecture
    others = [p for p in (architecture.reference(both.source.spec) if architecture else ()) if p != path]
    noise = Noise(
        reference=largest_gap(reference, exact),
        candidate=largest_gap(candidate, exact_candidate),
        paths=largest_gap(reference, both.reference(batches, torch.float32, others[0])) if others else None,
        functions=largest_gap(exact, exact_candidate),
        errors={
            str(each).removeprefix("torch."): (mean_gap(ours, exact), mean_gap(theirs, exact_candidate))
            for each, (ours, theirs) in computed.items()
        },
    )
    return noise, [
        torch.cat([gap.amax(dim=-1) for gap in gaps([a], [b])]) for a, b in zip(exact, exact_candidate, strict=True)
    ]
