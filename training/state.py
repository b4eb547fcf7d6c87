"""Store a run's settings, measurements and last checkpoint in a folder next to its result.

    OUT.training/run.json             the model, the texts and the settings, which must be the same on resuming
    OUT.training/metrics.jsonl        one line per step
    OUT.training/step-00000100/       parameters and AdamW's moments after that step, and state.json

A checkpoint is written to a folder with a temporary name, synced to the disk and renamed. Only then is the checkpoint
before it removed, so there is always a good one. One process writes a safetensors file. Several processes write with
torch.distributed.checkpoint, every process its own share.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..converter.files import failed, fsync, locked, read_own
from ..converter.names import json_bytes
from ..converter.publish import Staging
from ..errors import InvalidInput, UsageError, shown
from .data import is_tokens
from .parallel import Group
from .resumed import kept_lines, require_changes

RUN, METRICS, _STATE, _TENSORS = "run.json", "metrics.jsonl", "state.json", "state.safetensors"
_STEP = re.compile(r"step-(\d{8,})")
_HASHED = {
    "texts": "the training texts are different",
    "tokenizer": "the tokenizer is different",
    "tokens": "the training tokens are different",
    "tree": "the architecture is different",
    "weights": "the initial weights are different",
    "held_out": "the held-out text is different",
    "teacher": "the teacher is different",
    "changed": "the changed model is different",
}
"""The hashes that identify a run, with the message if one differs. A difference comes before those that it causes."""
_DERIVED = {"rate", "every"}
"""The settings that `heal` derives from the others by default. If one differs, another setting is the cause."""
_FREE = {"rate", "clip"}
"""The settings that may change when a run is resumed after its loss became NaN or infinite."""
_MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW names them


class Store:
    """The folder of a run."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group

    def goes_on(self, resume: bool, force: bool) -> bool:
        """Return whether to resume a run. Raise UsageError if a run is unfinished and neither option was given."""
        last = self.last()
        if last is not None and not resume and not force:
            raise UsageError(
                f"{self.folder} already contains an unfinished run, at step {self.step_of(last):,}",
                "Continue it with --resume, or start again with --force.",
            )
        return last is not None and resume

    def begin(self, run: Mapping[str, Any], resume: bool, force: bool) -> list[dict[str, Any]]:
        """Write the settings of a new run to run.json, or check that they are those of the run to resume.

        A run that `broke` may have another rate and clip after its last checkpoint. Return all such changes, with the
        step after which they hold.

        Raises:
            UsageError: as `goes_on`; or the run in the folder has other settings.
            InvalidInput: run.json cannot be read.
        """
        path, kept = self.folder / RUN, json.loads(json.dumps(run))
        if self.goes_on(resume, force):
            try:
                before = json.loads(read_own(path, 2**26))
                changes, broke = before.pop("changes", []), before.pop("broke", False)
                other = {name for name in {*before, *kept} if before.get(name) != kept.get(name)}
                require_changes(changes, before, self.step_of(self.last()))
            except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise InvalidInput(f"{path} cannot be read: {error!s:.200}", "Start again with --force.") from error
            # With `force` as well, a program resumes any run in the folder, and no user has chosen another rate.
            free = other & _FREE if broke is True and not force else set()
            if other := other - free:
                raise another(self.folder, before, kept, other)
            if free:
                changes.append({"behind": self.step_of(self.last()), **{name: kept[name] for name in sorted(free)}})
                put(path, json_bytes({**kept, "changes": changes}))
            return list(changes)
        self.forget()
        put(path, json_bytes(kept))
        return []

    def broke(self) -> None:
        """Record in run.json that the loss became NaN or infinite."""
        path = self.folder / RUN
        put(path, json_bytes({**json.loads(read_own(path, 2**26)), "broke": True}))

    def last(self) -> Path | None:
        """Return the folder of the last checkpoint, or None."""
        found = [each for each in self._ours() if _STEP.fullmatch(each.name) and (each / _STATE).is_file()]
        return max(found, key=self.step_of, default=None)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _ours(self) -> list[Path]:
        return [each for each in self.folder.glob("step-*") if each.is_dir()] if self.folder.is_dir() else []

    def step_of(self, path: Path | None) -> int:
        """Return the step of a checkpoint, and -1 if it is none."""
        match = None if path is None else _STEP.fullmatch(path.name)
        return -1 if match is None else int(match[1])

    def write(
        self,
        step: int,
        about: Mapping[str, Any],
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        best: int | None = None,
        beside: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint of the model, the optimizer and the tensors `beside` them after a step.

        Remove the earlier checkpoints, except that of the step `best`. Raise GptkitError if writing fails; the last
        checkpoint then stays.
        """
        path = self._of(step)
        partial = path.with_suffix(".partial")
        tensors = {**_tensors(model, optimiser), **beside}

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

        def publish() -> None:
            _write(partial / _STATE, json_bytes(dict(about)))
            fsync(partial)
            before = [each for each in self._ours() if each != partial and self.step_of(each) != best]
            partial.rename(path)
            fsync(self.folder)
            for each in before:
                shutil.rmtree(each)

        try:
            self.group.lead(begin)
            if self.group.alone:
                self._write_alone(partial / _TENSORS, tensors)
            else:
                self._write_together(partial, tensors)
            self.group.lead(publish)
        except OSError as error:
            if self.group.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise failed("write the checkpoint", path, error) from error

    def _write_together(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        try:
            save(dict(tensors), checkpoint_id=path)
        except CheckpointException as error:  # in every process, with the causes of all
            causes = [cause for cause, _ in error.failures.values() if isinstance(cause, OSError)]
            raise (causes or [OSError(errno.EIO, str(error)[:200])])[0] from error

    def _write_alone(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        try:
            save_file({name: each.detach().cpu().contiguous().numpy() for name, each in tensors.items()}, path)
        except SafetensorError as error:  # which has no errno
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)[:200]) from error
        fsync(path)

    def read(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        step: int | None = None,
        beside: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Any] | None:
        """Read a step's checkpoint, by default the last, into the parameters, moments and tensors `beside` them.

        Return the content of its state.json, or None if there is no checkpoint. Raise InvalidInput if it is damaged.
        """
        path = self.last() if step is None else self._of(step)
        if path is None:
            return None
        try:
            about: dict[str, Any] = json.loads(read_own(path / _STATE, 2**26))
            tensors = {**_tensors(model, optimiser), **beside}
            if self.group.alone:
                _fill(tensors, path / _TENSORS)
            else:
                from torch.distributed.checkpoint.state_dict_loader import load

                load(tensors, checkpoint_id=path)
            if not isinstance(about, dict) or about.get("step") != self.step_of(path):
                raise ValueError(f"its {_STATE} belongs to another step")
            held = {name: self.group.local(each) for name, each in tensors.items()}
            if any(self.group.total(*(float(wrong) for wrong in _wrong(held, self.step_of(path))))):
                raise ValueError("its parameters and optimizer moments do not belong to this step")
        except Exception as error:  # safetensors and torch have exception classes of their own
            raise InvalidInput(
                f"the checkpoint {path} cannot be read: {error!s:.200}",
                "Remove the folder of this checkpoint, and resume from an earlier one with --resume.",
            ) from error
        return about

    def done(self) -> None:
        """Remove the checkpoints of a finished run. Its measurements stay."""
        for each in self._ours():
            shutil.rmtree(each)
        (self.folder / RUN).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the whole run, with its measurements."""
        self.done()
        (self.folder / METRICS).unlink(missing_ok=True)


def another(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], other: Container[str]) -> UsageError:
    """Return the error for a run that cannot be resumed because the settings named in `other` differ."""
    plain = [name for name in sorted({*before, *now}) if name in other and name not in _HASHED]
    cause = min((name for name in plain if name not in _DERIVED), default=None)
    told = None if cause is None else f"{cause} was {shown(before.get(cause))}, and is now {shown(now.get(cause))}"
    told = told or next((words for name, words in _HASHED.items() if name in other), None)
    told = told or f"{plain[0]} was {shown(before.get(plain[0]))}, and is now {shown(now.get(plain[0]))}"
    message = f"the run in {folder} differs from this command: {told}"
    return UsageError(message, "Resume the run with its original options, or start again with --force.")


def beside(out: Path, name: str) -> Path:
    """Return the folder of a run, OUT.name, next to its result OUT. Raise UsageError if OUT is the root folder."""
    out = out.expanduser()
    whole = out if out.name not in ("", "..") else out.resolve()
    if not whole.name:
        raise UsageError(f"gptkit cannot create the folder {whole}", "Choose another name.")
    return whole.with_name(f"{whole.name}.{name}")


def require_free(target: Path, resume: bool, force: bool, runs: Iterable[Store]) -> None:
    """Raise UsageError if the result may not be written to `target`.

    With `resume`, the message does not suggest --force alone, which would discard the run that should be resumed.
    """
    if resume and not force and os.path.lexists(target):
        last = next((run for run in runs if run.last() is not None), None)
        if last is None:
            raise UsageError(
                f"--resume: there is no unfinished run, and {target} already exists",
                f"To train the finished model further, give {target} as the MODEL of a new command. For a "
                "new run, choose another OUT.",
            )
        raise UsageError(
            f"{target} already exists, but the run in {last.folder} is not finished",
            f"Give --resume and --force to continue the run; gptkit then replaces {target} at the end of the run.",
        )
    Staging(target, force).check()


def claim(
    stack: ExitStack, target: Path, folder: Path, runs: Callable[[], list[Store]], resume: bool, force: bool
) -> None:
    """Lock the folder of some runs until the stack closes, which also removes what no run has begun.

    Without a run to resume, the runs that are there are removed now, because new tokens may take the place of theirs.

    Raises:
        UsageError: the result may not be written to `target`; a run is unfinished and neither option was given.
    """
    require_free(target, resume, force, runs())
    stack.enter_context(locked(folder))  # first, so that a call without the lock removes nothing
    make(folder)
    stack.callback(remove_empty, folder)
    stack.callback(remove_unbegun, folder)
    if not any(run.goes_on(resume, force) for run in runs()):
        for run in runs():
            run.forget()


def make(folder: Path) -> None:
    """Make a folder, which may exist already. Raise GptkitError if that fails."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise failed("make", folder, error) from error


def remove_unbegun(folder: Path) -> None:
    """Remove the tokens and the run.json of a run that has neither a checkpoint nor measurements."""
    if any((*folder.rglob("step-*"), *folder.rglob(METRICS))):
        return
    for each in (folder / "data", folder / "held-out"):
        if is_tokens(each):
            shutil.rmtree(each)
    for path in folder.rglob(RUN):
        path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove a folder that has no file at any depth, which is the folder of a run that never began."""
    inside = list(folder.rglob("*")) if folder.is_dir() else []
    if all(each.is_dir() for each in inside):
        shutil.rmtree(folder, ignore_errors=True)


def put(path: Path, data: bytes) -> None:
    """Write or replace a file, completely or not at all. Raise GptkitError if that fails."""
    try:
        _write(path.with_suffix(".new"), data)
        path.with_suffix(".new").replace(path)
    except OSError as error:
        raise failed("write", path, error) from error


def append(path: Path, line: str) -> None:
    """Append a line to a file. Raise GptkitError if that fails."""
    try:
        with path.open("a") as file:
            file.write(line)
    except OSError as error:
        raise failed("write", path, error) from error


def cut(metrics: Path, step: int) -> None:
    """Remove the measurements after `step` from metrics.jsonl if it exists. Raise GptkitError if that fails."""
    if metrics.is_symlink() or metrics.is_file():
        put(metrics, b"".join(line + b"\n" for line in kept_lines(metrics, step)))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fill(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill tensors with those of the same names in a file. Raise ValueError or SafetensorError if they do not fit."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for name, each in tensors.items():
            stored = file.get_tensor(name)
            if stored.shape != each.shape or stored.dtype != each.dtype:  # copy_ would broadcast it, or round it
                raise ValueError(f"{name} has an unexpected shape or dtype")
            each.copy_(stored)


def _wrong(tensors: Mapping[str, Tensor], step: int) -> Iterator[bool]:
    """Yield, for three conditions on the tensors of a checkpoint, whether the tensors violate it.

    All values are finite. AdamW's second moment is not negative. AdamW counted every step for at least one parameter.
    """
    yield not all(bool(each.isfinite().all()) for each in tensors.values())
    yield any(bool((each < 0).any()) for name, each in tensors.items() if name.startswith(_MOMENTS[1]))
    counts = [float(each) for name, each in tensors.items() if name.startswith("step ")]
    most = min(step, 2**24)  # the largest count that fp32 can increment to
    yield max(counts, default=0) != most or any(not 0 <= each <= most or each % 1 for each in counts)


def _tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the trained parameters and AdamW's state of them by name. They share memory with the model's.

    A parameter that has had no gradient yet, such as an expert that no token chose, gets a state of zeros, as AdamW
    itself gives it at its first gradient.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"parameter {name}"] = parameter.detach()
        state = optimiser.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in _MOMENTS}
        found |= {f"{kept} {name}": state[kept].detach() for kept in ("step", *_MOMENTS)}
    return found
