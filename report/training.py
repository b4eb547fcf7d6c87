"""The report of `train`: the settings, a line per evaluation, a progress bar, and the result."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..converter.files import failed
from ..errors import UsageError
from ..terminal import printable, say
from ..training.loop import TrainingStep
from ..training.train import Prepared, Trained
from .quantities import counted, duration, nats


class Watched:
    """A reporter of a training run.

    It prints lines on standard output, and a progress bar on standard error if that is a terminal.

    Args:
        quiet: print nothing.
        metrics: a file to which a line of JSON is written per step.
        board: a folder for TensorBoard's files.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, quiet: bool, metrics: Path | None = None, board: Path | None = None) -> None:
        self.quiet, self._path, self._bar, self._board = quiet, metrics, None, None
        if board is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UsageError(
                    "--tensorboard needs TensorBoard, which is not installed",
                    "Install it: pip install 'gptkit[tensorboard]'",
                ) from error
            self._board = SummaryWriter(str(board))  # type: ignore[no-untyped-call, unused-ignore]
        self._steps, self._took = 0, 0.0  # the number of steps, and the smoothed seconds per step

    _file: IO[str] | None = None
    _bar: Any
    _board: Any

    def __enter__(self) -> Watched:
        if self._path is not None:
            try:  # fails now, not after the first step; a pipe stays open, so that its reader does not stop
                self._file = self._path.open("a")
            except OSError as error:
                raise failed("write", self._path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            with suppress(OSError):  # a line that could not be flushed was reported, and close tries it again
                self._file.close()

    def start(self, prepared: Prepared) -> None:
        """Print which model is trained and with which settings, and start the progress bar."""
        self.about = prepared
        settings = prepared.settings
        step = settings["windows"] * settings["context"]
        budget = counted(settings["steps"], "step") if settings["steps"] else duration(settings["seconds"])
        weights = "from random weights" if prepared.from_scratch else "from its checkpoint"
        lines = [
            f"{prepared.model}: {prepared.parameters:,} parameters, {weights}",
            f"{budget} of {step:,} tokens, {settings['context']:,} per window; AdamW, rate {settings['rate']:.3g}",
            f"{prepared.tokens:,} tokens to train on, {prepared.held_out:,} held out",
            f"{prepared.flops:.3g} FLOPs per step; at most {prepared.peak:.3g} per second, by {prepared.peak_by}",
        ]
        lines += [f"continues after step {prepared.first:,}"] if prepared.first else []
        head = f"{'step':>8}{'tokens':>14}{'loss':>9}{'held out':>10}{'rate':>11}{'tokens/s':>10}{'of peak':>9}"
        say([*lines, "", head], self.quiet)
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(None), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()

    def step(self, step: TrainingStep) -> None:
        """Record a training step, and print a line if the model was evaluated after it."""
        if self._path is not None and self._file is not None:
            try:
                self._file.write(json.dumps(step.as_json()) + "\n")
                self._file.flush()
            except OSError as error:
                raise failed("write", self._path, error) from error
        for name, value in step.as_json().items() if self._board is not None else ():
            if isinstance(value, float):
                self._board.add_scalar(name, value, step.step)
        self._steps += 1  # the first step compiles and allocates, and does not count
        self._took = step.took if self._steps <= 2 else 0.9 * self._took + 0.1 * step.took
        settings = self.about.settings
        pace = settings["windows"] * settings["context"] / self._took
        share = f"{100 * self.about.flops / self._took / self.about.peak:.1f} %"
        if self._bar is not None:
            done = step.step / settings["steps"] if settings["steps"] else step.seconds / settings["seconds"]
            words = f"step {step.step:,}  loss {step.loss:.3f}  {pace:,.0f} tokens/s  {share} of peak"
            self._bar.update(self._task, completed=done, description=words)
        if step.held_out is not None:
            losses = f"{nats(step.loss):>9}{nats(step.held_out):>10}"
            row = f"{step.step:>8,}{step.tokens:>14,}{losses}{step.rate:>11.2e}"
            self._say([f"{row}{pace:>10,.0f}{share:>9}"])
            if step.sample is not None:
                self._say([f"    {printable(' '.join(step.sample.split())):.76}"])

    def _say(self, lines: list[str]) -> None:
        if self._bar is not None:
            self._bar.stop()
        say(lines, self.quiet)
        if self._bar is not None:
            self._bar.start()


def result_lines(done: Trained) -> list[str]:
    """Return the lines that report the result of a training run."""
    first, form = done.curve[0], "gptkit's own format" if done.to == "local" else f"Hugging Face files ({done.to[3:]})"
    before = f" ({nats(first['held_out'])} after step {first['step']:,})" if len(done.curve) > 1 else ""
    return [
        "",
        f"held-out loss {nats(done.held_out)} nats per token{before}",
        f"{printable(str(done.folder))}: {form}, float32, {counted(done.steps, 'step')} in {duration(done.seconds)}",
    ]
