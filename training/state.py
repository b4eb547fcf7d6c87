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
from .resumed import lines_until, require_changes

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
"""The settings of a run that are hashes, with the error message if one differs on resuming. If several differ, the
first one in this order is the cause, and the others follow from it."""
_DERIVED = {"rate", "every"}
"""The settings that `heal` derives from other settings by default. If such a setting differs on resuming, another
setting is usually the cause, and the error message names that one."""
_FREE = {"rate", "clip"}
"""The settings that may change when a run is resumed after its loss became NaN or infinite."""
_MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW names them


class Store:
    """The folder of a training run, with its settings, measurements and last checkpoint."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group

    def resumes(self, resume: bool, force: bool) -> bool:
        """Return whether the folder has an unfinished run that is to be resumed.

        Raise UsageError if the folder has an unfinished run and neither `resume` nor `force` is true.
        """
        last = self.last()
        if last is not None and not resume and not force:
            raise UsageError(
                f"{self.folder} already contains an unfinished run, at step {self.step_of(last):,}",
                "Continue it with --resume, or start again with --force.",
            )
        return last is not None and resume

    def begin(self, run: Mapping[str, Any], resume: bool, force: bool) -> list[dict[str, Any]]:
        """Write the settings of a new run to run.json. If a run is resumed, check that its settings are the same.

        Only a run that stopped at a NaN or infinite loss may continue with another learning rate and gradient clipping.
        Return all such changes so far, with the step after which they apply.

        Raises:
            UsageError: as in `resumes`; also if the run in the folder has other settings.
            InvalidInput: run.json cannot be read.
        """
        path, settings = self.folder / RUN, json.loads(json.dumps(run))
        if self.resumes(resume, force):
            try:
                before = json.loads(read_own(path, 2**26))
                changes, was_broken = before.pop("changes", []), before.pop("broke", False)
                changed = {name for name in {*before, *settings} if before.get(name) != settings.get(name)}
                require_changes(changes, before, self.step_of(self.last()))
            except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise InvalidInput(f"{path} cannot be read: {error!s:.200}", "Start again with --force.") from error
            # With `force` as well, the caller is a program that resumes any run, and no user has chosen another rate.
            allowed = changed & _FREE if was_broken is True and not force else set()
            if changed := changed - allowed:
                raise settings_error(self.folder, before, settings, changed)
            if allowed:
                changes.append(
                    {"behind": self.step_of(self.last()), **{name: settings[name] for name in sorted(allowed)}}
                )
                put(path, json_bytes({**settings, "changes": changes}))
            return list(changes)
        self.forget()
        put(path, json_bytes(settings))
        return []

    def mark_broken(self) -> None:
        """Record in run.json that the loss became NaN or infinite."""
        path = self.folder / RUN
        put(path, json_bytes({**json.loads(read_own(path, 2**26)), "broke": True}))

    def last(self) -> Path | None:
        """Return the folder of the last checkpoint, or None if there is none."""
        checkpoints = [
            path for path in self._checkpoint_folders() if _STEP.fullmatch(path.name) and (path / _STATE).is_file()
        ]
        return max(checkpoints, key=self.step_of, default=None)

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _checkpoint_folders(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if path.is_dir()] if self.folder.is_dir() else []

    def step_of(self, path: Path | None) -> int:
        """Return the step of a checkpoint, or -1 if the path is not a checkpoint."""
        match = None if path is None else _STEP.fullmatch(path.name)
        return -1 if match is None else int(match[1])

    def write(
        self,
        step: int,
        about: Mapping[str, Any],
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        best: int | None = None,
        extra: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint after a step, and remove the earlier ones.

        Args:
            step: the number of the step.
            about: the content of state.json: the progress of the run.
            model: the model.
            optimiser: the optimiser.
            best: the step of an earlier checkpoint that is not removed.
            extra: more tensors to store, such as averaged parameters.

        Raises:
            GptkitError: writing failed. The last checkpoint stays.
        """
        path = self._folder_of(step)
        partial = path.with_suffix(".partial")
        tensors = {**_tensors(model, optimiser), **extra}

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

        def publish() -> None:
            _write(partial / _STATE, json_bytes(dict(about)))
            fsync(partial)
            earlier = [
                folder for folder in self._checkpoint_folders() if folder != partial and self.step_of(folder) != best
            ]
            partial.rename(path)
            fsync(self.folder)
            for folder in earlier:
                shutil.rmtree(folder)

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
            save_file({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}, path)
        except SafetensorError as error:  # which has no errno
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)[:200]) from error
        fsync(path)

    def read(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        step: int | None = None,
        extra: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Any] | None:
        """Read the checkpoint of a step, by default the last one.

        Its values are copied into the model's parameters, the optimiser's moments and the tensors in `extra`. Return
        the content of its state.json, or None if there is no checkpoint. Raise InvalidInput if it is damaged.
        """
        path = self.last() if step is None else self._folder_of(step)
        if path is None:
            return None
        try:
            about: dict[str, Any] = json.loads(read_own(path / _STATE, 2**26))
            tensors = {**_tensors(model, optimiser), **extra}
            if self.group.alone:
                _fill(tensors, path / _TENSORS)
            else:
                from torch.distributed.checkpoint.state_dict_loader import load

                load(tensors, checkpoint_id=path)
            if not isinstance(about, dict) or about.get("step") != self.step_of(path):
                raise ValueError(f"its {_STATE} belongs to another step")
            own = {name: self.group.local(tensor) for name, tensor in tensors.items()}
            if any(self.group.total(*(float(violated) for violated in _violations(own, self.step_of(path))))):
                raise ValueError("its parameters and optimizer moments do not belong to this step")
        except Exception as error:  # safetensors and torch have exception classes of their own
            raise InvalidInput(
                f"the checkpoint {path} cannot be read: {error!s:.200}",
                "Remove the folder of this checkpoint, and resume from an earlier one with --resume.",
            ) from error
        return about

    def done(self) -> None:
        """Remove the checkpoints of a finished run. Its measurements stay."""
        for folder in self._checkpoint_folders():
            shutil.rmtree(folder)
        (self.folder / RUN).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the whole run, with its measurements."""
        self.done()
        (self.folder / METRICS).unlink(missing_ok=True)


def settings_error(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], changed: Container[str]
) -> UsageError:
    """Return the error for a run that cannot be resumed because its settings differ.

    Args:
        folder: the folder of the run.
        before: the settings of the run.
        now: the settings of this command.
        changed: the names of the settings that differ.
    """
    plain = [name for name in sorted({*before, *now}) if name in changed and name not in _HASHED]
    cause = min((name for name in plain if name not in _DERIVED), default=None)
    difference = (
        None if cause is None else f"{cause} was {shown(before.get(cause))}, and is now {shown(now.get(cause))}"
    )
    difference = difference or next((phrase for name, phrase in _HASHED.items() if name in changed), None)
    difference = difference or f"{plain[0]} was {shown(before.get(plain[0]))}, and is now {shown(now.get(plain[0]))}"
    message = f"the run in {folder} differs from this command: {difference}"
    return UsageError(message, "Resume the run with its original options, or start again with --force.")


def run_folder(out: Path, name: str) -> Path:
    """Return the folder for the files of a run: `out` with ".`name`" appended, such as OUT.training.

    Raise UsageError if `out` is the root folder.
    """
    out = out.expanduser()
    whole = out if out.name not in ("", "..") else out.resolve()
    if not whole.name:
        raise UsageError(f"gptkit cannot create the folder {whole}", "Choose another name.")
    return whole.with_name(f"{whole.name}.{name}")


def require_free(target: Path, resume: bool, force: bool, runs: Iterable[Store]) -> None:
    """Raise UsageError if the result may not be written to `target`, for example because the folder exists.

    With `resume`, the message does not suggest --force alone, because that would discard the unfinished run.

    Args:
        target: the folder of the result.
        resume: whether the user gave --resume.
        force: whether the user gave --force.
        runs: the runs whose unfinished checkpoints may be resumed.
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
    """Lock a folder of runs until `stack` is closed, so that no other call uses it.

    If no run is to be resumed, all runs in the folder are removed, because this call may replace the tokens on which
    they were trained. When `stack` is closed, the files of runs that never started are removed.

    Args:
        stack: the stack whose end releases the lock.
        target: the folder of the result.
        folder: the folder of the runs.
        runs: a function that returns the runs in `folder`.
        resume: whether the user gave --resume.
        force: whether the user gave --force.

    Raises:
        UsageError: the result may not be written to `target`; or a run is unfinished and neither option was given.
    """
    require_free(target, resume, force, runs())
    stack.enter_context(locked(folder))  # lock first, so that a call without the lock removes nothing
    make_folder(folder)
    stack.callback(remove_empty, folder)
    stack.callback(remove_unstarted, folder)
    if not any(run.resumes(resume, force) for run in runs()):
        for run in runs():
            run.forget()


def make_folder(folder: Path) -> None:
    """Make a folder, which may exist already. Raise GptkitError if that fails."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise failed("make", folder, error) from error


def remove_unstarted(folder: Path) -> None:
    """Remove the tokens and the run.json of a run that has neither a checkpoint nor measurements."""
    if any((*folder.rglob("step-*"), *folder.rglob(METRICS))):
        return
    for tokens in (folder / "data", folder / "held-out"):
        if is_tokens(tokens):
            shutil.rmtree(tokens)
    for path in folder.rglob(RUN):
        path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove a folder that has no file at any depth, such as the folder of a run that never started."""
    contents = list(folder.rglob("*")) if folder.is_dir() else []
    if all(path.is_dir() for path in contents):
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


def truncate(metrics: Path, step: int) -> None:
    """Remove the measurements after `step` from metrics.jsonl if it exists. Raise GptkitError if that fails."""
    if metrics.is_symlink() or metrics.is_file():
        put(metrics, b"".join(line + b"\n" for line in lines_until(metrics, step)))


def _write(path: Path, data: bytes) -> None:
    """Write a file and sync it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fill(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of a safetensors file into the given tensors with the same names.

    Raise ValueError or SafetensorError if names, shapes or dtypes differ.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file, torch.no_grad():
        for name, tensor in tensors.items():
            stored = file.get_tensor(name)
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:  # copy_ would broadcast it, or round it
                raise ValueError(f"{name} has an unexpected shape or dtype")
            tensor.copy_(stored)


def _violations(tensors: Mapping[str, Tensor], step: int) -> Iterator[bool]:
    """Yield three booleans, which are true if the tensors of a checkpoint violate a condition.

    The conditions are: all values are finite; AdamW's second moments are not negative; and AdamW's step counters are
    whole numbers up to `step`, and equal to `step` for at least one parameter.
    """
    yield not all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    yield any(bool((tensor < 0).any()) for name, tensor in tensors.items() if name.startswith(_MOMENTS[1]))
    counts = [float(tensor) for name, tensor in tensors.items() if name.startswith("step ")]
    most = min(step, 2**24)  # the largest count that fp32 can increment to
    yield max(counts, default=0) != most or any(not 0 <= count <= most or count % 1 for count in counts)


def _tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the trained parameters and their AdamW states by name. They share memory with the model and the optimiser.

    A parameter that has had no gradient yet, such as that of an expert that no token chose, gets a state of zeros.
    AdamW itself would create this state at the first gradient.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"parameter {name}"] = parameter.detach()
        state = optimiser.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in _MOMENTS}
        tensors |= {f"{key} {name}": state[key].detach() for key in ("step", *_MOMENTS)}
    return tensors
