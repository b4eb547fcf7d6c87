"""A port of somebody's own: a user's torch module held against transformers, component by component.

Nothing is asked of the port but that it takes token ids (B, T) and gives logits (B, T, V), as a tensor, in a tuple or
as `.logits`. Its modules need no particular names: for every component of the reference the port's module is looked for
whose output is the same, and the first component that no module of the port computes is where they part.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..converter.checkpoint import open_checkpoint
from ..errors import CannotExpress, InvalidInput, UsageError
from .bisect import Part, Tap, relative_gap, taps, valid_rows, watching
from .compare import Difference, compare, largest_gap
from .probe import Batch, probe
from .reference import load_reference, reference_folder, reference_logits

__all__ = ["Match", "PortVerification", "load_port", "verify_port"]


@dataclass(frozen=True)
class Match:
    """One component of the reference and the port's module that comes closest to it.

    module: the port's module name and side, None where none has an output of that size; place: the difference.
    """

    place: Part
    module: str | None


@dataclass(frozen=True)
class PortVerification:
    """The result for a port; `verdict` as in `verify`, with the reference's fp32 noise alone as the measure."""

    model: str
    against: str
    prompts: tuple[Difference, ...]
    functions: float
    allowed: float
    matches: tuple[Match, ...]

    @property
    def verdict(self) -> str:
        if all(prompt.identical for prompt in self.prompts):
            return "identical"
        return "equal" if self.functions <= self.allowed else "different"

    @property
    def passed(self) -> bool:
        return self.verdict != "different"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the verdict."""
        return {"schema_version": 1, "verdict": self.verdict, "passed": self.passed, **asdict(self)}

    @property
    def first(self) -> Match | None:
        """The first component that no module of the port computes."""
        return next((match for match in self.matches if match.place.parts), None)


def load_port(reference: str) -> nn.Module:
    """The module that `package.module:callable` returns, imported as from the working directory.

    Raises:
        UsageError: no such module or callable, or it returns something else.

    """
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise UsageError(f"{reference!r} is not MODULE:CALLABLE", "for instance my_port:build")
    here = os.getcwd()  # noqa: PTH109 (what Python itself puts on its path)
    sys.path.insert(0, here)
    try:
        build: Callable[[], Any] = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"cannot import {reference}: {error}", "It is looked for from the working directory."
        ) from error
    finally:
        sys.path.remove(here)
    port = build()
    if not isinstance(port, nn.Module):
        raise UsageError(f"{reference} returned a {type(port).__name__}, not a torch module")
    return port.eval()


def verify_port(model: str | Path, against: str, *, offline: bool = False) -> PortVerification:
    """Hold a port against transformers, in fp32 and in fp64.

    Args:
        model: the checkpoint that the port implements.
        against: `package.module:callable`, which returns the port with its weights.
        offline: use local files and the hub's cache only.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`; logits of another shape.
        UsageError: the port cannot be imported.
        CannotExpress: no transformers class computes the checkpoint.

    """
    source = open_checkpoint(model, offline=offline)
    architecture = source.architecture
    if architecture is None:
        raise CannotExpress("this tree never had a transformers class to compare with")
    port = load_port(against).float()
    path = architecture.reference(source.spec)[0]
    takes_mask = "attention_mask" in inspect.signature(port.forward).parameters
    batches = [batch for batch in probe(source.spec) if takes_mask or batch.attention_mask is None]
    with reference_folder(source) as folder:
        narrow, wide = (load_reference(folder, dtype, path) for dtype in (torch.float32, torch.float64))
        ours64 = copy.deepcopy(port).double()
        reference = [b.valid(reference_logits(narrow, b.input_ids, b.attention_mask)) for b in batches]
        exact = [b.valid(reference_logits(wide, b.input_ids, b.attention_mask)) for b in batches]
        candidate, candidate64 = ([_logits(m, b, takes_mask) for b in batches] for m in (port, ours64))
        for batch, theirs, ours in zip(batches, reference, candidate, strict=True):
            if theirs.shape != ours.shape:
                shapes = f"{tuple(ours.shape)}, transformers {tuple(theirs.shape)}"
                raise InvalidInput(f"{against} gives logits of {shapes} for {batch.name}", "(real tokens, vocabulary)")
        found = tuple(compare(b.name, r, c) for b, r, c in zip(batches, reference, candidate, strict=True))
        matches: tuple[Match, ...] = ()
        functions = largest_gap(exact, candidate64)
        allowed = largest_gap(reference, exact) + largest_gap(candidate, candidate64)
        if not functions <= allowed:
            bare = [batch for batch in batches if batch.attention_mask is None]
            batch = max(bare, key=lambda each: each.input_ids.numel())
            matches = tuple(_matches(taps(architecture, source.spec), batch, (wide, narrow), (ours64, port)))
    return PortVerification(str(model), against, found, functions, allowed, matches)


def _logits(model: nn.Module, batch: Batch, takes_mask: bool) -> Tensor:
    """The logits of real tokens, (N, V), from whatever the port returns."""
    with torch.inference_mode():
        out = model(batch.input_ids, attention_mask=batch.attention_mask) if takes_mask else model(batch.input_ids)
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, Tensor) or out.ndim != 3:
        raise InvalidInput(f"the port gives no logits (B, T, V) but {type(out).__name__}")
    return batch.valid(out)


def _matches(
    watched: Sequence[Tap], batch: Batch, reference: tuple[Any, Any], port: tuple[nn.Module, nn.Module]
) -> list[Match]:
    """For each component of the reference the module of the port with the nearest output; both in fp64 and in fp32."""
    seen: list[dict[int, Tensor]] = []
    for model in reference:
        found: dict[int, Tensor] = {}

        def see(index: int, value: Tensor, found: dict[int, Tensor] = found) -> None:
            found[index] = value.clone()  # Falcon adds to a module's output in place

        with torch.inference_mode(), watching(model, watched, False, see):
            reference_logits(model, batch.input_ids, batch.attention_mask)
        seen.append(found)
    outputs: list[dict[str, Tensor]] = []
    for model in port:
        with torch.inference_mode(), _watching_all(model) as values:
            model(batch.input_ids)
        outputs.append({name: _flat(value, batch) for name, value in values.items()})
    matches = []
    for index, tap in enumerate(watched):
        if index not in seen[0]:
            continue
        exact, rounded = (valid_rows(each[index], batch) for each in seen)
        near = [
            (relative_gap(exact, value[:, columns]), name, columns)
            for name, value in outputs[0].items()
            if (columns := _columns(value, exact)) is not None
        ]
        noise = relative_gap(exact, rounded)
        if not near:
            matches.append(Match(Part(tap.name, tap.label, tap.layer, float("inf"), noise), None))
            continue
        best, name, columns = min(near, key=lambda each: each[0])
        if name in outputs[1]:
            noise += relative_gap(outputs[0][name][:, columns], outputs[1][name][:, columns])
        matches.append(Match(Part(tap.name, tap.label, tap.layer, best, noise), name))
    return _without_fused(matches)


def _columns(value: Tensor, wanted: Tensor) -> slice | None:
    """The run of columns of `value` (N, F') that is nearest to `wanted` (N, F): a port may fuse q, k and v."""
    if value.shape[0] != wanted.shape[0] or value.shape[1] < wanted.shape[1]:
        return None
    width = wanted.shape[1]
    starts = (value[0].unfold(0, width, 1) - wanted[0]).abs().amax(dim=1)  # (F' - F + 1,)
    start = int(starts.argmin())
    return slice(start, start + width)


def _without_fused(matches: list[Match]) -> list[Match]:
    """Leave out what a port need not have as a module of its own, where something behind it agrees: a later component
    of the same layer that is computed rightly shows that what it is computed from was right too.
    """
    kept = []
    for position, match in enumerate(matches):
        later = matches[position + 1 :]
        if match.place.parts and any(not other.place.parts for other in later if _follows(match, other)):
            continue
        kept.append(match)
    return kept


def _follows(match: Match, other: Match) -> bool:
    return other.place.layer is None or match.place.layer is None or other.place.layer >= match.place.layer


@contextmanager
def _watching_all(model: nn.Module) -> Any:
    """While open, a forward pass leaves every module's output and first input, by name and side."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            for side, value in (("", output), (" (input)", inputs[0] if inputs else None)):
                value = value[0] if isinstance(value, tuple) and value else value
                if isinstance(value, Tensor) and value.is_floating_point():
                    seen[name + side] = value.detach().clone()

        return hook

    hooks = [module.register_forward_hook(keep(name or "the model")) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _flat(value: Tensor, batch: Batch) -> Tensor:
    shape = batch.input_ids.shape
    if value.shape[:2] == shape or value.shape[0] == shape[0] * shape[1]:
        return batch.valid(value.reshape(*shape, -1)).double()
    return value.reshape(-1, value.shape[-1]).double() if value.ndim else value.reshape(1, 1).double()
