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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.threads import as_before, suit
from ..errors import GptkitError, InvalidInput, UsageError
from .bisect import Part, Tap, relative_gap, taps, valid_rows, watching
from .compare import Difference, compare, largest_gap, mean_gap
from .mutations import Weights, of_ports
from .outputs import outputs_of
from .passes import hooked
from .probe import Batch, limits, longest, passed, probe
from .score import assigned, run_tree, wide_weights
from .sides import Stream, default_dtype, load_reference, quiet, reference_folder, stream_candidate
from .verify import IMPRECISE

_SHOWN = 3  # mistakes that explain the place and not all of the rest
_REST = 1e-5  # of the difference, what a mistake that explains it may leave


@dataclass(frozen=True)
class Match:
    """One component of the reference and the port's module that comes closest to it. module: the port's module name and
    side, None where none has an output of that size; place: the difference.
    """

    place: Part
    module: str | None


@dataclass(frozen=True)
class Made:
    """A mistake that was made in the reference and explains what the port computes. mistake: in words. explains: the
    reference with it gives the port's logits; otherwise it gives what the port computes at the place where they part,
    and more is wrong behind it. left: the difference of logits that remains.
    """

    mistake: str
    explains: bool
    left: float


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
    prompts: tuple[Difference, ...]
    functions: float
    allowed: float
    rounding: tuple[float, float]
    matches: tuple[Match, ...]
    causes: tuple[Made, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str = "transformers"

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
        return {"schema_version": 1, "verdict": self.verdict, "passed": self.passed, **asdict(self)}

    @property
    def first(self) -> Match | None:
        """The first component that no module of the port computes."""
        return next((match for match in self.matches if match.place.parts), None)


def load_port(reference: str) -> nn.Module:
    """The module that `package.module:callable` returns, from the working directory; UsageError where it does not."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise UsageError(f"{reference!r} is not MODULE:CALLABLE", "for instance my_port:build")
    here = os.getcwd()  # noqa: PTH109 (what Python itself puts on its path)
    sys.path.insert(0, here)
    try:
        with _blaming(f"{name} raised", "while it was imported"):
            try:
                build = getattr(importlib.import_module(name), attribute, None)
            except ImportError as error:
                hint = "It is looked for from the working directory."
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
    every = probe(spec, long=long)
    batches = [batch for batch in every if takes_mask or batch.attention_mask is None]
    left_out = tuple(batch.name for batch in every if not takes_mask and batch.attention_mask is not None)
    candidate, candidate64 = ([_logits(m, b, takes_mask) for b in batches] for m in (port, ours64))
    with _references(source) as (narrow, wide):
        with quiet():
            reference = narrow.run(batches)
            with default_dtype(torch.float64):
                exact = wide.run(batches)
        for batch, theirs, ours in zip(batches, reference, candidate, strict=True):
            if theirs.shape != ours.shape:
                shapes = f"{tuple(ours.shape)}, transformers {tuple(theirs.shape)}"
                raise InvalidInput(f"{against} gives logits of {shapes} for {batch.name}", "(real tokens, vocabulary)")
        found = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        matches: tuple[Match, ...] = ()
        causes: tuple[Made, ...] = ()
        functions = largest_gap(exact, candidate64)
        allowed = 2 * largest_gap(reference, exact)
        rounding = mean_gap(reference, exact), mean_gap(candidate, candidate64)
        differs = not functions <= allowed
        watched: list[Tap] = []
        if differs and architecture is not None:
            say("where they part")
            bare = [batch for batch in batches if batch.attention_mask is None]
            batch = max(bare, key=lambda each: each.input_ids.numel())
            watched = taps(architecture, spec)
            outputs = [_outputs(model, batch, takes_mask) for model in (ours64, port)]
            matches = tuple(_matches(watched, batch, (wide.model, narrow.model), outputs))
    if differs:
        del narrow, wide
        say("mistakes that explain it")
        part = next((match.place for match in matches if match.place.parts), None)
        parting = [tap for tap in watched if part is not None and tap.part(0.0, 0.0).name == part.name]

        def explained(tree: ModelSpec, weights: Weights) -> bool:
            """Whether some module of the port computes what this tree does where they part."""
            seen = _seen(assigned(tree, weights), parting, True, batch) if parting else {}
            gaps = [gap for gap, _, _ in _near(seen[0], outputs[0])] if seen else []
            return part is not None and not replace(part, relative=min(gaps, default=float("inf"))).parts

        causes = tuple(_causes(spec, wide_weights(source), batches, exact, candidate64, allowed, explained))
    notes = [f"not probed: {', '.join(left_out)}, since forward takes no attention_mask"] if left_out else []
    beyond = [limit for limit in limits(spec) if not passed(limit, longest(spec), long)]
    notes += [f"not probed past the {limit}: --long does" for limit in beyond]
    held_to = "transformers" if architecture is not None else "gptkit's own modules"
    return PortVerification(
        str(model), against, found, functions, allowed, rounding, matches, causes, left_out, tuple(notes), held_to
    )


@contextmanager
def _references(source: Checkpoint) -> Iterator[tuple[Stream, Stream]]:
    """transformers' model in fp32 and in fp64; where it has none of the tree, gptkit's."""
    if source.architecture is None:
        yield stream_candidate(source, torch.float32, "sdpa"), stream_candidate(source, torch.float64, "sdpa")
        return
    path = source.architecture.reference(source.spec)[0]
    with reference_folder(source) as folder:
        yield Stream(load_reference(folder, torch.float32, path)), Stream(load_reference(folder, torch.float64, path))


def _logits(model: nn.Module, batch: Batch, takes_mask: bool) -> Tensor:
    """The logits of real tokens, (N, V), from whatever the port returns."""
    dtype = next((each.dtype for each in model.parameters()), torch.float32)
    where = f"on the probe {batch.name!r} in {str(dtype).removeprefix('torch.')}"
    with torch.inference_mode(), _blaming("your module raised", where):
        out = model(batch.input_ids, attention_mask=batch.attention_mask) if takes_mask else model(batch.input_ids)
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) and out else out
    given = tuple(batch.input_ids.shape)
    if not isinstance(out, Tensor):
        raise InvalidInput(f"the port gives no logits (B, T, V) but {type(out).__name__}, {where}")
    if out.ndim != 3 or tuple(out.shape[:2]) != given or not out.is_floating_point():
        told = f"{str(out.dtype).removeprefix('torch.')} {tuple(out.shape)}"
        raise InvalidInput(
            f"the port gives no logits (B, T, V) but {told} for token ids {given}, {where}",
            "verify compares every position: not the last one alone, and batch first.",
        )
    return batch.valid(out)


def _outputs(model: nn.Module, batch: Batch, takes_mask: bool) -> dict[str, Tensor]:
    """What every module of the port gives and is given first, (N, features) in fp64 by name and side."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            for side, value in (("", output), (" (input)", inputs[0] if inputs else None)):
                value = value[0] if isinstance(value, tuple) and value else value
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    seen[name + side] = value.detach().clone()

        return hook

    named = model.named_modules()
    with hooked(module.register_forward_hook(keep(name or "the model")) for name, module in named):
        _logits(model, batch, takes_mask)
    return {name: valid_rows(value, batch) for name, value in seen.items()}


def _matches(
    watched: Sequence[Tap], batch: Batch, reference: tuple[Any, Any], outputs: Sequence[Mapping[str, Tensor]]
) -> list[Match]:
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
            matches.append(Match(tap.part(float("inf"), noise), None))
            continue
        best, name, columns = min(near, key=lambda each: each[0])
        if name in outputs[1]:
            own = relative_gap(*(each[name][:, columns] for each in outputs))
            noise += min(own, IMPRECISE * max(noise, torch.finfo(torch.float32).eps))  # nobody widens his own bound
        matches.append(Match(tap.part(best, noise), name))
    # What a port need not have as a module of its own is left out where something behind it agrees: a later component
    # of the same layer that is computed rightly shows that what it is computed from was right too.
    kept = []
    for number, match in enumerate(matches, 1):
        layer, right = match.place.layer, (each.place for each in matches[number:] if not each.place.parts)
        follows = any(layer is None or each.layer is None or each.layer >= layer for each in right)
        if not (match.place.parts and follows):
            kept.append(match)
    return kept


def _seen(model: Any, watched: Sequence[Tap], ours: bool, batch: Batch) -> dict[int, Tensor]:
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


def _causes(
    spec: ModelSpec,
    weights: Weights,
    batches: Sequence[Batch],
    exact: Sequence[Tensor],
    port: Sequence[Tensor],
    allowed: float,
    explained: Callable[[ModelSpec, Weights], bool],
) -> Iterator[Made]:
    """The mistake that makes gptkit's tree of the reference compute what the port does; where no single one does, those
    that explain the place where they part. `exact` and `port`: the logits of either in fp64, (N, V) a batch.
    """
    differ = [not largest_gap([a], [b]) <= allowed for a, b in zip(exact, port, strict=True)]
    # First the shortest of those that differ: most mistakes are not the port's, and show it there.
    order = sorted(range(len(batches)), key=lambda i: (not differ[i], batches[i].input_ids.numel()))
    inputs, wanted = [batches[i] for i in order], [port[i] for i in order]
    # Rotary tables that a port keeps in fp32 turn with a mistake otherwise than without it.
    enough = max(allowed, _REST * largest_gap(exact, port))
    at_place: list[Made] = []
    for mistake, (tree, changed) in of_ports(spec, weights):
        gap = largest_gap(wanted, run_tree(tree, changed, inputs), enough)
        if gap <= enough:
            yield Made(mistake, True, gap)
            return
        if len(at_place) < _SHOWN and explained(tree, changed):
            at_place.append(Made(mistake, False, largest_gap(wanted, run_tree(tree, changed, inputs))))
    yield from sorted(at_place, key=lambda made: made.left)
