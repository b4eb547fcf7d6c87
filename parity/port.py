"""Compare a port with transformers, component by component. A port is a user's own implementation of a model.

The port must take token ids (B, T) and return logits (B, T, V), as a tensor, in a tuple or as `.logits`. For every
component of the reference (transformers' model) gptkit searches the port for a module with the same output. The first
component without such a module is the place of the difference. To find the cause, gptkit makes mistakes in its own copy
of the reference, one at a time, until a mistake gives the port's logits.
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
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..architectures import Architecture
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.threads import as_before, suit
from ..errors import GptkitError, InvalidInput, UsageError
from .bisect import Part, Tap, first_of, relative_gap, taps, valid_rows, watching
from .compare import LogitDifference, compare, largest_gap, mean_gap
from .mutations import Weights
from .outputs import computed_rightly, outputs_of
from .passes import hooked
from .port_causes import Differing, PortMistake, TriedMistakes, causes
from .probe import ProbeBatch, limits, longest, passed, probe
from .score import MistakeScore, assigned, try_mistakes, wide_weights
from .sides import StreamedModel, default_dtype, load_reference, quiet, reference_folder, stream_candidate
from .verify import IMPRECISE, versions

Port: TypeAlias = str | nn.Module | Callable[[], nn.Module]
_NOTHING = "none of your port's submodules can be compared: they return only the logits"


@dataclass(frozen=True)
class PortMatch:
    """One component of the reference, and the module of the user's port whose output is nearest to that component's."""

    place: Part  # the difference between the two outputs
    module: str | None  # its name, with " (input)" if its input is nearest; None if no output has this size


@dataclass(frozen=True)
class PortVerification:
    """The result of comparing a user's port with transformers. `verdict` has the same values as in `verify`."""

    model: str  # the checkpoint
    against: str  # the port, as package.module:callable
    prompts: tuple[LogitDifference, ...]  # the differences of the logits for every input
    functions: float  # the largest difference of logits in fp64
    allowed: float  # twice the reference's rounding to fp32
    rounding: tuple[float, float]  # (reference, port): the mean difference of fp32 and fp64 logits
    matches: tuple[PortMatch, ...]  # for each component of the reference, the nearest module of the port
    causes: tuple[PortMistake, ...] = ()  # mistakes that explain the difference
    left_out: tuple[str, ...] = ()  # inputs that the port did not get, because it takes no mask
    notes: tuple[str, ...] = ()
    reference: str = "transformers"  # "gptkit's own modules" if transformers has no class for the model
    score: MistakeScore | None = None  # deliberate mistakes that these inputs detect; None if none were made
    tried: TriedMistakes = field(default_factory=TriedMistakes)  # mistakes that were made to explain the difference

    @property
    def verdict(self) -> str:
        """Return "identical", "equal" (within rounding) or "different" for the logits."""
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        return "equal" if self.functions <= self.allowed and not self.imprecise else "different"

    @property
    def imprecise(self) -> bool:
        """Return whether the rounding errors of the user's port are larger than the reference's.

        The bound is the same as in `verify`.
        """
        return not self.rounding[1] <= IMPRECISE * self.rounding[0]

    @property
    def passed(self) -> bool:
        """Return whether the user's port computes the same function as the reference, up to rounding."""
        return self.verdict != "different"

    def as_json(self) -> dict[str, Any]:
        verdict = {"verdict": self.verdict, "passed": self.passed, "versions": versions()}
        return {"schema_version": 1, **verdict, **asdict(self)}

    @property
    def first(self) -> PortMatch | None:
        """Return the first component of the reference that no module of the user's port computes; None if there is
        none.
        """
        return next((match for match in self.matches if match.place.parts), None)


def load_port(reference: Port) -> nn.Module:
    """Return the user's torch module in eval mode.

    A name `package.module:callable` is imported from the working directory and called. Another callable is called, and
    a torch module is copied.

    Raises UsageError if that fails.
    """
    if isinstance(reference, nn.Module):
        return copy.deepcopy(reference).eval()
    return _built(reference if callable(reference) else _imported(reference), name_of(reference)).eval()


def name_of(port: Port) -> str:
    """Return the name of a port in messages."""
    if isinstance(port, str):
        return port
    return type(port).__name__ if isinstance(port, nn.Module) else getattr(port, "__qualname__", repr(port))


def _imported(reference: str) -> Any:
    """Import `package.module:callable` from the working directory. Raises UsageError if that fails."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise UsageError(f"{reference!r} does not have the form MODULE:CALLABLE", "Write, for example, my_port:build.")
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
        raise UsageError(f"cannot import {reference}: the module {name} has no attribute {attribute}")
    return build


def _built(build: Any, reference: str) -> nn.Module:
    """Call a function that returns the user's torch module. `reference` is its name in messages.

    Raises UsageError if it cannot be called, or returns something else.
    """
    hint = "Name a function that returns your torch module."
    if not callable(build):
        raise UsageError(f"{reference} is a {type(build).__name__}, not a callable", hint)
    with _blaming(f"{reference} raised", "when it was called"):
        port = build
        if not isinstance(build, nn.Module):
            try:
                with suppress(ValueError):  # a builtin without a signature: call it
                    inspect.signature(build).bind()
            except TypeError as error:
                raise UsageError(f"{reference} cannot be called without arguments: {error}", hint) from error
            port = build()
    if not isinstance(port, nn.Module):
        raise UsageError(f"{reference} returned a {type(port).__name__}, not a torch module")
    return port


@contextmanager
def _blaming(who: str, when: str) -> Iterator[None]:
    """Turn exceptions of the user's code inside a `with` into InvalidInput that names the line of code.

    `who` and `when` are words for the message.
    """
    try:
        yield
    except (GptkitError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        first = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise InvalidInput(
            f"{who} {reason:.300}, {when}{_line_of(error)}", "GPTKIT_DEBUG=1 shows the whole traceback."
        ) from error


def _line_of(error: BaseException) -> str:
    """Return where an exception was raised in the user's code, or where its syntax error is, as ", in FILE:LINE"."""
    foreign = ("<", str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
    frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    lines = [(file, line) for file, line in frames if "site-packages" not in file and not file.startswith(foreign)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines = [(error.filename, error.lineno)]
    if not lines:
        return ""
    path, here = Path(lines[0][0]), Path.cwd()
    return f", in {path.relative_to(here) if path.is_relative_to(here) else path}:{lines[0][1]}"


@as_before()
def verify_port(
    model: str | Path,
    against: Port,
    *,
    long: bool = False,
    offline: bool = False,
    mutations: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> PortVerification:
    """Compare a user's port of a model with transformers in fp32 and fp64.

    If no transformers class computes the model, gptkit's modules are the reference.

    Args:
        model: the checkpoint, which transformers loads.
        against: the port: a torch module with the checkpoint's weights, a function that returns one, or the name of
            such a function, `package.module:callable`.
        long: as for `verify`.
        offline: as for `verify`.
        mutations: as for `verify`.
        progress: as for `verify`.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; also if the port raises, or does not return logits.
        UsageError: the port cannot be imported.
    """
    say = progress or (lambda _: None)
    source = open_checkpoint(model, offline=offline)
    suit(source.spec)
    architecture, spec = source.architecture, source.spec
    say("a port of your own")
    port, against = load_port(against), name_of(against)
    with _blaming("your module raised", "when it was put into float32 and float64"):
        port = port.float()
        port64 = copy.deepcopy(port).double()
        takes_mask = "attention_mask" in inspect.signature(port.forward).parameters
    supported = None if architecture is None else architecture.takes(spec)
    batches, left_out, notes = _inputs(probe(spec, long=long, supported=supported), architecture, takes_mask)
    with _references(source) as (narrow, wide):
        with quiet():
            reference = narrow.run(batches)
            with default_dtype(torch.float64):
                exact = wide.run(batches)
        finite = [bool(torch.isfinite(logits).all()) for logits in reference]
        notes += [
            f"left out, because transformers' own logits are not finite there: {batch.name}"
            for batch, is_finite in zip(batches, finite, strict=True)
            if not is_finite
        ]
        batches = list(compress(batches, finite))
        reference, exact = list(compress(reference, finite)), list(compress(exact, finite))
        # transformers' eager Bloom gives NaN in fp64 for a padded row that attends to no token: use fp32 there.
        exact = [w if bool(torch.isfinite(w).all()) else n for w, n in zip(exact, reference, strict=True)]
        candidate, candidate64 = ([_logits(m, b, takes_mask) for b in batches] for m in (port, port64))
        for batch, theirs, ours in zip(batches, reference, candidate, strict=True):
            if theirs.shape != ours.shape:
                shapes = f"{tuple(ours.shape)}, but transformers {tuple(theirs.shape)}"
                hint = "The expected shape is (number of tokens without padding, vocabulary size)."
                raise InvalidInput(f"{against} gives logits of shape {shapes}, for the input {batch.name}", hint)
        compared = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        functions, allowed = largest_gap(exact, candidate64), 2 * largest_gap(reference, exact)
        rounding = mean_gap(reference, exact), mean_gap(candidate, candidate64)
        differs = not functions <= allowed
        place: _Place | None = None
        if differs and architecture is not None:
            say("where they part")
            bare = [batch for batch in batches if batch.attention_mask is None]
            batch = max(bare, key=lambda batch: batch.input_ids.numel())
            watched = taps(architecture, spec)
            outputs = [_outputs(module, batch, takes_mask) for module in (port64, port)]
            if outputs[0]:
                matches = tuple(_matches(watched, batch, (wide.model, narrow.model), outputs))
                place = _Place(watched, matches, batch, outputs[0])
            else:
                notes.append(_NOTHING)
        elif differs:
            notes.append("not compared component by component, because no transformers class computes this model")
    mistakes, tried = list[PortMistake](), TriedMistakes()
    if differs:
        del narrow, wide
        say("mistakes that explain it")
        ignores = takes_mask and _ignores_masks(port64, batches, candidate64)
        explained = (lambda *_: False) if place is None else place.explained
        measured = (batches, exact, candidate64, allowed, explained, ignores)
        mistakes, tried = causes(Differing(spec, wide_weights(source), *measured), notes)
    score = None
    if not differs and mutations is not False:
        say("mistakes on purpose")
        score = try_mistakes(source, batches, mutations is True, False, notes, None)
    beyond = [limit for limit in limits(spec) if not passed(limit, longest(spec, supported=supported), long)]
    notes += [f"not tested on texts longer than the {limit}; --long tests them" for limit in beyond]
    reference_name = "transformers" if architecture is not None else "gptkit's own modules"
    matched = () if place is None else place.matches
    details = (tuple(mistakes), left_out, tuple(notes), reference_name, score, tried)
    return PortVerification(str(model), against, compared, functions, allowed, rounding, matched, *details)


def _inputs(
    probes: Sequence[ProbeBatch], architecture: Architecture | None, takes_mask: bool
) -> tuple[list[ProbeBatch], tuple[str, ...], list[str]]:
    """Return the inputs for a port, the names of those that it does not get without a mask, and notes for the user.

    Inputs that transformers' class computes wrongly are left out.
    """
    sound = [batch for batch in probes if computed_rightly(architecture, batch)]
    notes = [
        f"not compared, because transformers' class computes it wrongly: the input {b.name}"
        for b in probes
        if b not in sound
    ]
    left_out = tuple(batch.name for batch in sound if not takes_mask and batch.attention_mask is not None)
    if left_out:
        notes.append(
            f"not tested: {', '.join(left_out)}, because forward() of your module has no argument attention_mask"
        )
    return [batch for batch in sound if batch.name not in left_out], left_out, notes


@dataclass(frozen=True)
class _Place:
    """The comparison of a user's module (the port) with the reference, component by component, on one batch."""

    watched: Sequence[Tap]  # the compared places in gptkit's model
    matches: tuple[PortMatch, ...]  # the nearest module of the port for each component
    batch: ProbeBatch  # the input
    outputs: Mapping[str, Tensor]  # the outputs of the port's modules by name, (N, features)

    def explained(self, tree: ModelSpec, weights: Weights) -> bool:
        """Return whether a mistake explains the first difference between the reference and the user's port.

        `tree` and `weights` are the reference with the mistake. It explains the difference if its output at the first
        component that differs equals the output of a module of the port.
        """
        part = next((match.place for match in self.matches if match.place.parts), None)
        if part is None:
            return False
        parting = [tap for tap in self.watched if tap.part(0.0, 0.0).name == part.name]
        seen = _seen(assigned(tree, weights), parting, True, self.batch)
        gaps = [gap for gap, _, _ in _near(seen[0], self.outputs)] if seen else []
        return not replace(part, relative=min(gaps, default=float("inf"))).parts


def _ignores_masks(port: nn.Module, batches: Sequence[ProbeBatch], logits: Sequence[Tensor]) -> bool:
    """Return whether a user's port that takes an attention mask gives exactly the same logits without it."""
    padded = [
        (batch, port_logits)
        for batch, port_logits in zip(batches, logits, strict=True)
        if batch.attention_mask is not None
    ]
    return bool(padded) and all(
        torch.equal(_logits(port, batch, True, masked=False), port_logits) for batch, port_logits in padded
    )


@contextmanager
def _references(source: Checkpoint) -> Iterator[tuple[StreamedModel, StreamedModel]]:
    """Yield the reference in fp32 and in fp64: transformers' model, or gptkit's if transformers has no class for it."""
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
    """Return the logits of a user's port at tokens without padding, (N, V), from any supported kind of return value.

    Args:
        model: the user's torch module (the port).
        batch: the input.
        takes_mask: whether the port's forward method has an argument `attention_mask`.
        masked: whether to give the mask to the port.
    """
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    where = f"for the input {batch.name!r} in {str(dtype).removeprefix('torch.')}"
    with torch.inference_mode(), _blaming("your module raised", where):
        mask = {"attention_mask": batch.attention_mask if masked else None} if takes_mask else {}
        output = model(batch.input_ids, **mask)
    output = getattr(output, "logits", output)
    output = output[0] if isinstance(output, tuple) and output else output
    shape = tuple(batch.input_ids.shape)
    if not isinstance(output, Tensor):
        raise InvalidInput(
            f"your module must return logits of shape (batch, length, vocabulary), but returned a "
            f"{type(output).__name__}, {where}"
        )
    if output.ndim != 3 or tuple(output.shape[:2]) != shape or not output.is_floating_point():
        description = f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
        raise InvalidInput(
            f"your module must return logits of shape (batch, length, vocabulary), but returned {description} for "
            f"token ids of shape {shape}, {where}",
            "Return the logits of every position, with the batch first.",
        )
    return batch.valid(output)


def _outputs(model: nn.Module, batch: ProbeBatch, takes_mask: bool) -> dict[str, Tensor]:
    """Return the output and the first input of every submodule of a user's port, (N, features) in fp64.

    The keys are the submodule's name for the output, and the name with " (input)" for the input. Submodules that only
    return the port's logits are left out.
    """
    seen: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            for side, value in (("", output), (" (input)", inputs[0] if inputs else None)):
                value = first_of(value) if not isinstance(value, tuple | list) or value else value
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    seen[name + side] = value.detach().clone()

        return hook

    within = [(name, module) for name, module in model.named_modules() if name]
    with hooked(module.register_forward_hook(hook_for(name)) for name, module in within):
        logits = _logits(model, batch, takes_mask).double()
    rows = {name: valid_rows(value, batch) for name, value in seen.items()}
    return {name: value for name, value in rows.items() if not torch.equal(value, logits)}


def _matches(
    watched: Sequence[Tap], batch: ProbeBatch, reference: tuple[Any, Any], outputs: Sequence[Mapping[str, Tensor]]
) -> list[PortMatch]:
    """Return, for each component of the reference, the submodule of the user's port with the nearest output.

    Args:
        watched: the compared components.
        batch: the input.
        reference: the reference model in fp64 and in fp32, which measures its rounding.
        outputs: the outputs of the port's submodules in fp64 and in fp32.
    """
    with quiet():
        narrow = _seen(reference[1], watched, False, batch)
        with default_dtype(torch.float64):
            wide = _seen(reference[0], watched, False, batch)
    matches = []
    for index, tap in enumerate(watched):
        if index not in wide:
            continue
        candidates, noise = _near(wide[index], outputs[0]), relative_gap(wide[index], narrow[index])
        if not candidates:
            matches.append(PortMatch(tap.part(float("inf"), noise), None))
            continue
        best, name, columns = min(candidates, key=lambda candidate: candidate[0])
        if name in outputs[1]:
            rounding = relative_gap(*(values[name][:, columns] for values in outputs))
            noise += min(
                rounding, IMPRECISE * max(noise, torch.finfo(torch.float32).eps)
            )  # a port cannot widen its own bound
        matches.append(PortMatch(tap.part(best, noise), name))
    # A port need not have a module for every component. A missing one does not count where a later component of the
    # same layer agrees, because its input must then be correct too.
    relevant = []
    for number, match in enumerate(matches, 1):
        layer, agreeing = match.place.layer, (later.place for later in matches[number:] if not later.place.parts)
        follows = any(layer is None or place.layer is None or place.layer >= layer for place in agreeing)
        if not (match.place.parts and follows):
            relevant.append(match)
    return relevant


def _seen(model: Any, watched: Sequence[Tap], ours: bool, batch: ProbeBatch) -> dict[int, Tensor]:
    """Return a model's values at the compared places, (N, features) in fp64, by the place's index in `watched`."""
    seen: dict[int, Tensor] = {}

    def see(index: int, value: Tensor) -> None:
        seen[index] = valid_rows(value, batch).clone()  # Falcon adds to a module's output in place

    with torch.inference_mode(), watching(model, watched, ours, see):
        outputs_of(model, batch)
    return seen


def _near(wanted: Tensor, outputs: Mapping[str, Tensor]) -> list[tuple[float, str, slice]]:
    """Compare a component's output `wanted` (N, F) with the outputs (N, F') of the submodules of a user's port.

    An output may have more features than `wanted`, because a port may fuse q, k and v. Outputs with fewer are ignored.

    Returns:
        For each output: the relative difference, its name, and the F consecutive features that were compared. They are
        those that are nearest to `wanted` at the first token.
    """
    distances, width = [], wanted.shape[1]
    for name, value in outputs.items():
        if value.shape[0] == wanted.shape[0] and value.shape[1] >= width:
            start = int((value[0].unfold(0, width, 1) - wanted[0]).abs().amax(dim=1).argmin())  # of F' - F + 1
            columns = slice(start, start + width)
            distances.append((relative_gap(wanted, value[:, columns]), name, columns))
    return distances
