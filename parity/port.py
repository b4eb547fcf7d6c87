"""A port of somebody's own: a user's torch module held against transformers, component by component.

Nothing is asked of the port but that it takes token ids (B, T) and gives logits (B, T, V), as a tensor, in a tuple or
as `.logits`. For every component of the reference the port's module is looked for whose output is the same, and the
first component that no module of the port computes is where they part. Its cause is found by making mistakes in
gptkit's tree of the reference, one at a time: the one that then computes what the port computes is the port's.
"""

import copy
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.threads import as_before, suit
from ..errors import GptkitError, InvalidInput, UsageError
from .bisect import Part, Tap, first_of, relative_gap, taps, valid_rows, watching
from .compare import LogitDifference, compare, largest_gap, mean_gap
from .mutations import Weights
from .outputs import computed_rightly, outputs_of
from .passes import hooked
from .port_causes import Differing, Made, causes
from .probe import ProbeBatch, limits, longest, passed, probe
from .score import MistakeScore, assigned, try_mistakes, wide_weights
from .sides import StreamedModel, default_dtype, load_reference, quiet, reference_folder, stream_candidate
from .verify import IMPRECISE, versions

_NOTHING = "none of your port's submodules can be compared: they return only the logits"


@dataclass(frozen=True)
class PortMatch:
    """One component of the reference and the port's module that comes closest to it. module: the port's module name and
    side, None where none has an output of that size; place: the difference.
    """

    place: Part
    module: str | None


@dataclass(frozen=True)
class PortVerification:
    """The result for a port; `verdict` as in `verify`. functions: the largest difference of logits in fp64; allowed:
    twice what rounding to fp32 makes in the reference. rounding: the mean error in fp32 of (the reference, the port)
    against their own fp64. causes: mistakes that explain the difference, empty where none of those tried does.
    left_out: probes that the port was not given, since it takes no mask. notes: what a person should know. reference:
    what the port was held against; of a tree that no transformers class computes, gptkit's own modules, whose outputs
    are not laid beside the port's one by one.
    """

    model: str
    against: str
    prompts: tuple[LogitDifference, ...]
    functions: float
    allowed: float
    rounding: tuple[float, float]
    matches: tuple[PortMatch, ...]
    causes: tuple[Made, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str = "transformers"
    score: MistakeScore | None = None
    """The mistakes on purpose that these inputs detect; None for a port that differs, and if they were not made."""

    @property
    def verdict(self) -> str:
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        return "equal" if self.functions <= self.allowed and not self.imprecise else "different"

    @property
    def imprecise(self) -> bool:
        """Whether the port rounds worse than the reference does, by the measure of `verify`."""
        return not self.rounding[1] <= IMPRECISE * self.rounding[0]

    @property
    def passed(self) -> bool:
        return self.verdict != "different"

    def as_json(self) -> dict[str, Any]:
        verdict = {"verdict": self.verdict, "passed": self.passed, "versions": versions()}
        return {"schema_version": 1, **verdict, **asdict(self)}

    @property
    def first(self) -> PortMatch | None:
        """The first component that no module of the port computes."""
        return next((match for match in self.matches if match.place.parts), None)


def load_port(reference: str) -> nn.Module:
    """The module that `package.module:callable` returns, from the working directory; UsageError where it does not."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise UsageError(f"{reference!r} is not MODULE:CALLABLE", "Write, for example, my_port:build.")
    here = os.getcwd()  # noqa: PTH109 (what Python itself puts on its path)
    sys.path.insert(0, here)
    try:
        with _blaming(f"{name} raised", "while it was imported"):
            try:
                build = getattr(importlib.import_module(name), attribute, None)
            except ImportError as error:
                hint = "gptkit looks for it in the working directory."
                raise UsageError(f"cannot import {name}: {error}", hint) from error
    finally:
        sys.path.remove(here)
    if build is None:
        raise UsageError(f"cannot import {reference}: {name} has no {attribute}")
    hint = "Name a function that returns your torch module."
    if not callable(build):
        raise UsageError(f"{reference} is a {type(build).__name__}, not a callable", hint)
    with _blaming(f"{reference} raised", "when it was called"):
        port = build
        if not isinstance(build, nn.Module):
            try:
                with suppress(ValueError):  # of a builtin that does not say what it takes: calling it tells
                    inspect.signature(build).bind()
            except TypeError as error:
                raise UsageError(f"{reference} cannot be called without arguments: {error}", hint) from error
            port = build()
    if not isinstance(port, nn.Module):
        raise UsageError(f"{reference} returned a {type(port).__name__}, not a torch module")
    return port.eval()


@contextmanager
def _blaming(who: str, when: str) -> Iterator[None]:
    """While open, whatever the user's own code raises is InvalidInput, with the line of theirs that raised it."""
    try:
        yield
    except (GptkitError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        first = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise InvalidInput(
            f"{who} {told:.300}, {when}{_line_of(error)}", "GPTKIT_DEBUG=1 shows the whole traceback."
        ) from error


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback (or the line that is no syntax), as ", in FILE:LINE"."""
    others = ("<", str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
    frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    lines = [(file, line) for file, line in frames if "site-packages" not in file and not file.startswith(others)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines = [(error.filename, error.lineno)]
    if not lines:
        return ""
    path, here = Path(lines[0][0]), Path.cwd()
    return f", in {path.relative_to(here) if path.is_relative_to(here) else path}:{lines[0][1]}"


@as_before()
def verify_port(
    model: str | Path,
    against: str,
    *,
    long: bool = False,
    offline: bool = False,
    mutations: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> PortVerification:
    """Hold a port of a checkpoint, which `package.module:callable` returns with its weights, against transformers, or
    where no class of its computes the tree against gptkit's own modules, in fp32 and in fp64; the options are those of
    `verify`.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; the port raises, or gives something else than logits.
        UsageError: the port cannot be imported.
    """
    say = progress or (lambda _: None)
    source = open_checkpoint(model, offline=offline)
    suit(source.spec)
    architecture, spec = source.architecture, source.spec
    say("a port of your own")
    port = load_port(against)
    with _blaming("your module raised", "when it was put into float32 and float64"):
        port = port.float()
        ours64 = copy.deepcopy(port).double()
        takes_mask = "attention_mask" in inspect.signature(port.forward).parameters
    taken = None if architecture is None else architecture.takes(spec)
    every = probe(spec, long=long, taken=taken)
    known = [batch for batch in every if computed_rightly(architecture, batch)]
    notes = [f"left out, because transformers' class computes it wrongly: {b.name}" for b in every if b not in known]
    left_out = tuple(batch.name for batch in known if not takes_mask and batch.attention_mask is not None)
    notes += (
        [f"not tested: {', '.join(left_out)}, because forward() of your module has no argument attention_mask"]
        if left_out
        else []
    )
    batches = [batch for batch in known if batch.name not in left_out]
    with _references(source) as (narrow, wide):
        with quiet():
            reference = narrow.run(batches)
            with default_dtype(torch.float64):
                exact = wide.run(batches)
        finite = [bool(torch.isfinite(logits).all()) for logits in reference]
        notes += [
            f"left out, because transformers' own logits are not finite there: {batch.name}"
            for batch, good in zip(batches, finite, strict=True)
            if not good
        ]
        batches = list(compress(batches, finite))
        reference, exact = list(compress(reference, finite)), list(compress(exact, finite))
        # transformers' eager bloom has NaN in fp64 where a padded row may look at nothing: there its fp32 stands in.
        exact = [w if bool(torch.isfinite(w).all()) else n for w, n in zip(exact, reference, strict=True)]
        candidate, candidate64 = ([_logits(m, b, takes_mask) for b in batches] for m in (port, ours64))
        for batch, theirs, ours in zip(batches, reference, candidate, strict=True):
            if theirs.shape != ours.shape:
                shapes = f"{tuple(ours.shape)}, transformers {tuple(theirs.shape)}"
                raise InvalidInput(
                    f"{against} gives logits of shape {shapes} for {batch.name}", "Expected (real tokens, vocabulary)."
                )
        found = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        functions, allowed = largest_gap(exact, candidate64), 2 * largest_gap(reference, exact)
        rounding = mean_gap(reference, exact), mean_gap(candidate, candidate64)
        differs = not functions <= allowed
        place: _Place | None = None
        if differs and architecture is not None:
            say("where they part")
            bare = [batch for batch in batches if batch.attention_mask is None]
            batch = max(bare, key=lambda each: each.input_ids.numel())
            watched, outputs = taps(architecture, spec), [_outputs(each, batch, takes_mask) for each in (ours64, port)]
            if outputs[0]:
                matches = tuple(_matches(watched, batch, (wide.model, narrow.model), outputs))
                place = _Place(watched, matches, batch, outputs[0])
            else:
                notes.append(_NOTHING)
        elif differs:
            notes.append("not compared component by component, because no transformers class computes this model")
    made: list[Made] = []
    if differs:
        del narrow, wide
        say("mistakes that explain it")
        ignores = takes_mask and _ignores_masks(ours64, batches, candidate64)
        explained = (lambda *_: False) if place is None else place.explained
        given = (batches, exact, candidate64, allowed, explained, ignores)
        made = causes(Differing(spec, wide_weights(source), *given), notes)
    score = None
    if not differs and mutations is not False:
        say("mistakes on purpose")
        score = try_mistakes(source, batches, mutations is True, False, notes, None)
    beyond = [limit for limit in limits(spec) if not passed(limit, longest(spec, taken=taken), long)]
    notes += [f"not tested on texts longer than the {limit}; --long does this" for limit in beyond]
    held_to = "transformers" if architecture is not None else "gptkit's own modules"
    matched = () if place is None else place.matches
    rest = (tuple(made), left_out, tuple(notes), held_to, score)
    return PortVerification(str(model), against, found, functions, allowed, rounding, matched, *rest)


@dataclass(frozen=True)
class _Place:
    """Where a port parts from the reference: what was compared, on which input, and what the port's modules gave."""

    watched: Sequence[Tap]
    matches: tuple[PortMatch, ...]
    batch: ProbeBatch
    outputs: Mapping[str, Tensor]

    def explained(self, tree: ModelSpec, weights: Weights) -> bool:
        """Whether some module of the port computes what this tree does at the first place where they part."""
        part = next((match.place for match in self.matches if match.place.parts), None)
        if part is None:
            return False
        parting = [tap for tap in self.watched if tap.part(0.0, 0.0).name == part.name]
        seen = _seen(assigned(tree, weights), parting, True, self.batch)
        gaps = [gap for gap, _, _ in _near(seen[0], self.outputs)] if seen else []
        return not replace(part, relative=min(gaps, default=float("inf"))).parts


def _ignores_masks(port: nn.Module, batches: Sequence[ProbeBatch], logits: Sequence[Tensor]) -> bool:
    """Whether a port that takes masks gives the very same logits without one."""
    padded = [(batch, given) for batch, given in zip(batches, logits, strict=True) if batch.attention_mask is not None]
    return bool(padded) and all(torch.equal(_logits(port, batch, True, masked=False), given) for batch, given in padded)


@contextmanager
def _references(source: Checkpoint) -> Iterator[tuple[StreamedModel, StreamedModel]]:
    """transformers' model in fp32 and in fp64; where it has none of the tree, gptkit's."""
    if source.architecture is None:
        yield stream_candidate(source, torch.float32, "sdpa"), stream_candidate(source, torch.float64, "sdpa")
        return
    path = source.architecture.reference(source.spec)[0]
    with reference_folder(source) as folder:
        yield (
            StreamedModel(load_reference(folder, torch.float32, path)),
            StreamedModel(load_reference(folder, torch.float64, path)),
        )


def _logits(model: nn.Module, batch: ProbeBatch, takes_mask: bool, masked: bool = True) -> Tensor:
    """The logits of real tokens, (N, V), from whatever the port returns; without `masked` it is given no mask."""
    dtype = next((each.dtype for each in model.parameters()), torch.float32)
    where = f"on the probe {batch.name!r} in {str(dtype).removeprefix('torch.')}"
    with torch.inference_mode(), _blaming("your module raised", where):
        mask = {"attention_mask": batch.attention_mask if masked else None} if takes_mask else {}
        out = model(batch.input_ids, **mask)
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) and out else out
    given = tuple(batch.input_ids.shape)
    if not isinstance(out, Tensor):
        raise InvalidInput(f"the port must return logits (B, T, V), but returned {type(out).__name__}, {where}")
    if out.ndim != 3 or tuple(out.shape[:2]) != given or not out.is_floating_point():
        told = f"{str(out.dtype).removeprefix('torch.')} {tuple(out.shape)}"
        raise InvalidInput(
            f"the port must return logits (B, T, V), but returned {told} for token ids {given}, {where}",
            "Return the logits of every position, with the batch first.",
        )
    return batch.valid(out)


def _outputs(model: nn.Module, batch: ProbeBatch, takes_mask: bool) -> dict[str, Tensor]:
    """What every module within the port gives and is given first, (N, features) in fp64 by name and side. What only
    gives the port's logits is left out: a wrapper's one module says no more than the port itself.
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            for side, value in (("", output), (" (input)", inputs[0] if inputs else None)):
                value = first_of(value) if not isinstance(value, tuple | list) or value else value
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    seen[name + side] = value.detach().clone()

        return hook

    within = [(name, module) for name, module in model.named_modules() if name]
    with hooked(module.register_forward_hook(keep(name)) for name, module in within):
        logits = _logits(model, batch, takes_mask).double()
    found = {name: valid_rows(value, batch) for name, value in seen.items()}
    return {name: value for name, value in found.items() if not torch.equal(value, logits)}


def _matches(
    watched: Sequence[Tap], batch: ProbeBatch, reference: tuple[Any, Any], outputs: Sequence[Mapping[str, Tensor]]
) -> list[PortMatch]:
    """For each component of the reference the module of the port with the nearest output; both in fp64 and in fp32."""
    with quiet():
        narrow = _seen(reference[1], watched, False, batch)
        with default_dtype(torch.float64):
            wide = _seen(reference[0], watched, False, batch)
    matches = []
    for index, tap in enumerate(watched):
        if index not in wide:
            continue
        near, noise = _near(wide[index], outputs[0]), relative_gap(wide[index], narrow[index])
        if not near:
            matches.append(PortMatch(tap.part(float("inf"), noise), None))
            continue
        best, name, columns = min(near, key=lambda each: each[0])
        if name in outputs[1]:
            own = relative_gap(*(each[name][:, columns] for each in outputs))
            noise += min(own, IMPRECISE * max(noise, torch.finfo(torch.float32).eps))  # nobody widens his own bound
        matches.append(PortMatch(tap.part(best, noise), name))
    # What a port need not have as a module of its own is left out where something behind it agrees: a later component
    # of the same layer that is computed rightly shows that what it is computed from was right too.
    kept = []
    for number, match in enumerate(matches, 1):
        layer, right = match.place.layer, (each.place for each in matches[number:] if not each.place.parts)
        follows = any(layer is None or each.layer is None or each.layer >= layer for each in right)
        if not (match.place.parts and follows):
            kept.append(match)
    return kept


def _seen(model: Any, watched: Sequence[Tap], ours: bool, batch: ProbeBatch) -> dict[int, Tensor]:
    """What taps see of a model, (N, features) in fp64 by their index."""
    seen: dict[int, Tensor] = {}

    def see(index: int, value: Tensor) -> None:
        seen[index] = valid_rows(value, batch).clone()  # Falcon adds to a module's output in place

    with torch.inference_mode(), watching(model, watched, ours, see):
        outputs_of(model, batch)
    return seen


def _near(wanted: Tensor, outputs: Mapping[str, Tensor]) -> list[tuple[float, str, slice]]:
    """How far each output (N, F') of the port is from what is wanted, (N, F): the relative difference, module and side,
    and the run of columns that is nearest, since a port may fuse q, k and v.
    """
    found, width = [], wanted.shape[1]
    for name, value in outputs.items():
        if value.shape[0] == wanted.shape[0] and value.shape[1] >= width:
            start = int((value[0].unfold(0, width, 1) - wanted[0]).abs().amax(dim=1).argmin())  # of F' - F + 1
            columns = slice(start, start + width)
            found.append((relative_gap(wanted, value[:, columns]), name, columns))
    return found
