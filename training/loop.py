"""The loop: what is trained, on which sequences and by which loss are its arguments; what it does is the same for all.

A step's sequences are computed in parts (`accumulate`, and a share for each process). Each part's loss is a sum over
its targets, divided by the targets of the whole step, so that their gradients add up to that of one large batch.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import Parameter, Role
from ..converter.files import fsync
from ..display import Record
from ..errors import NoNumber, UsageError
from ..modules import Decoder
from ..process import Terminated
from .average import Average
from .data import NOWHERE, Windows
from .parallel import Group
from .resumed import progress_of
from .state import METRICS, Store, append, cut

Logits = Callable[..., Tensor]
Loss = Callable[[Logits, "Batch"], Tensor]
"""The loss of a batch, summed over its targets: a number with a gradient. The model is called as `Decoder`s are."""


@dataclass(frozen=True)
class Batch:
    """Windows on the device: ids, targets and documents, each (B, T); see `data.Windows`."""

    ids: Tensor
    targets: Tensor
    documents: Tensor | None

    @classmethod
    def of(cls, windows: Windows, device: torch.device) -> Batch:
        """The batch of some windows."""
        return cls(*(None if each is None else torch.from_numpy(each).to(device) for each in windows))  # type: ignore[arg-type]


def next_token(model: Logits, batch: Batch) -> Tensor:
    """The cross entropy of each next token, in nats."""
    return lost(model(batch.ids, documents=batch.documents), batch.targets)


def lost(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of targets (B, T) by logits (B, T, vocabulary), in nats, summed."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=NOWHERE, reduction="sum")


class Settings(msgspec.Struct, frozen=True):
    """How a model is trained. The budget is a number of steps or of seconds, and one of the two is given."""

    windows: int
    """Sequences per step."""
    context: int
    """Tokens per sequence."""
    steps: int | None = None
    seconds: float | None = None
    accumulate: int = 1
    """The number of parts in which each process computes its share of a step."""
    rate: float = 1e-3
    """The highest learning rate."""
    warmup: float = 0.05
    """The share of the budget within which the rate rises to its highest."""
    averaged: bool = False
    """Keep the rate constant after the warm-up, and end with the `Average` of the last steps if that is better. If
    false, the rate falls until the end.
    """
    decay: float = 0.1
    """AdamW's weight decay."""
    clip: float = 1.0
    """The largest norm of a gradient; 0 clips nothing."""
    seed: int = 0
    every: int = 100
    """Steps between two evaluations and checkpoints. With a budget in seconds, 0 evaluates at most ten times, for at
    most a tenth of the time.
    """
    dtype: str = "float32"
    """The dtype of matrix products. Parameters are in float32."""
    compiled: bool = False
    patience: int = 0
    """A run ends after this many evaluations without a better one, as it was at the best evaluation, which may be the
    beginning. 0 never ends it.
    """


@dataclass(frozen=True)
class TrainingStep(Record):
    """A step: loss in nats a target, the gradient's norm before it was cut, seconds since the run began, and what the
    step itself took of them; where it was evaluated, the loss on the held-out text too, and a sample; of the last step
    of a run that is averaged, the loss of the average.
    """

    step: int
    tokens: int
    seconds: float
    took: float
    loss: float
    rate: float
    norm: float
    held_out: float | None = None
    averaged: float | None = None
    sample: str | None = None


@dataclass
class Run:
    """Where a run is: steps behind it, seconds that they took, what was evaluated on the way."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)

    def done(self, settings: Settings, ahead: int = 0) -> float:
        """The share of the budget that is behind it, `ahead` steps counted too; all where nothing gets better."""
        losses = [each["held_out"] for each in self.curve]
        if settings.patience and min(losses[-settings.patience :], default=0.0) > min(losses, default=0.0):
            return 1.0
        if settings.steps is not None:
            return (self.step + ahead) / settings.steps
        assert settings.seconds is not None
        # A step takes what those before it took; the first one, which nobody knows, a thousandth.
        each = self.seconds / self.step if self.step else settings.seconds / 1000
        return (self.seconds + ahead * each) / settings.seconds

    def add(self, told: TrainingStep) -> None:
        """Add a step to the curve, if it was evaluated."""
        if told.held_out is not None:
            names = ("step", "tokens", "loss", "held_out", "averaged")
            self.curve.append({name: getattr(told, name) for name in names})

    def best(self) -> int:
        """Return the step of the best evaluation."""
        return int(min(self.curve, key=lambda each: each["held_out"])["step"])

    @property
    def ends_averaged(self) -> bool:
        """Whether the average of the last steps is better than the model at every evaluation."""
        averaged = self.curve[-1]["averaged"]
        return averaged is not None and bool(averaged < min(each["held_out"] for each in self.curve))


class Abandoned(Exception):
    """A run was ended by the `goes_on` of its `fit`, before its budget."""


class _Interrupt:
    """SIGINT and SIGTERM are remembered until a step has ended; the second one ends the process as it always does."""

    def __init__(self) -> None:
        self.number = 0

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._before[number])

    def error(self, step: int, store: Store) -> BaseException:
        """What ends a run whose step is kept: SIGTERM's where this process got that, else that of Ctrl-C."""
        found = Terminated() if self.number == signal.SIGTERM else KeyboardInterrupt()
        found.add_note(f"step {step:,} is saved in {store.folder}: repeat the command with --resume to continue")
        return found

    def __enter__(self) -> _Interrupt:
        main = threading.current_thread() is threading.main_thread()
        known = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} if main else {}
        self._before: dict[int, Any] = {n: was for n, was in known.items() if callable(was)}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, was in self._before.items():
            signal.signal(number, was)


def fit(
    model: Decoder,
    batches: Callable[[int], Windows],
    held_out: Windows | None,
    settings: Settings,
    *,
    group: Group,
    store: Store,
    loss: Loss = next_token,
    trained: Container[str] | None = None,
    keep_best: bool = False,
    begun: float | None = None,
    sample: Callable[[Decoder], str] | None = None,
    tell: Callable[[TrainingStep], None] = lambda step: None,
    goes_on: Callable[[Run], bool] = lambda run: True,
) -> Run:
    """Train a model in place, from the last checkpoint in `store` where there is one.

    Args:
        model: on the group's device, in float32.
        batches: the windows of a step, by its number; the same ones to every process.
        held_out: the windows that are evaluated, each time all of them; None evaluates nothing.
        settings: the budget and the rest.
        group: who trains.
        store: where checkpoints and measurements go.
        loss: see `Loss`; it is what is evaluated too.
        trained: the names of the parameters that are; by default all.
        keep_best: leave the model as it was at the best evaluation, which may be the beginning or, with
            `settings.averaged`, that of the average; `patience` does too.
        begun: the loss on the held-out windows at the beginning, where it is known.
        sample: what makes a text of the model as it is, at every evaluation.
        tell: given each step.
        goes_on: asked before each step whether the run goes on. An answer must be the same in every process, and the
            same again after a restart.

    Raises:
        Abandoned: `goes_on` ended the run.
        UsageError: fewer windows than processes and parts.
        NoNumber: a loss or a gradient that is none, before it reaches a parameter.
        GptkitError: a write that failed.
        KeyboardInterrupt: once a checkpoint is written.
    """
    _require_windows(settings, held_out, group)
    group.share_out(model)
    model.train()
    keep_best = held_out is not None and (keep_best or settings.patience > 0)
    course = _Course(model, held_out, settings, group, store, loss, trained, keep_best, sample, tell)
    run = course.run
    with _Interrupt() as interrupt:
        course.begin(begun)
        while run.done(settings) < 1:
            if not goes_on(run):
                if any(group.total(float(interrupt.number))):
                    course.keep()
                    raise interrupt.error(run.step, store)
                raise Abandoned
            if course.step(batches, interrupt):
                raise interrupt.error(run.step, store)
        # A signal that came while the last step was evaluated and kept.
        if any(group.total(float(interrupt.number))):
            raise interrupt.error(run.step, store)
    course.end()
    return run


class _Course:
    """A run in progress: the model, its optimiser and average, and the measurements and checkpoints so far."""

    def __init__(
        self,
        model: Decoder,
        held_out: Windows | None,
        settings: Settings,
        group: Group,
        store: Store,
        loss: Loss,
        trained: Container[str] | None,
        keep_best: bool,
        sample: Callable[[Decoder], str] | None,
        tell: Callable[[TrainingStep], None],
    ) -> None:
        """Start a run, or continue from the last checkpoint in `store`. The arguments are those of `fit`."""
        self.model, self.held_out, self.settings, self.group, self.store = model, held_out, settings, group, store
        self.keep_best, self.sample, self.tell = keep_best, sample, tell
        self.optimiser = adamw(model, model.spec.parameters(), settings.rate, settings.decay, trained)
        self.average = Average(model, group) if settings.averaged and keep_best else None
        self.averages = {} if self.average is None else self.average.tensors
        self.metrics = store.folder / METRICS
        progress = store.read(model, self.optimiser, beside=self.averages)
        self.run, self.threads = _run_so_far(progress, self.metrics, settings, keep_best)
        self.engine = _Engine(model, loss, self.optimiser, settings, group)
        group.lead(lambda: cut(self.metrics, self.run.step))
        self.seconds_before, self.began = self.run.seconds, time.monotonic()
        self.rhythm = _Rhythm(settings)

    def begin(self, loss: float | None) -> None:
        """Keep the beginning, if the best evaluation counts and may be that one. Its `loss` is measured if None."""
        if self.keep_best and not self.run.curve:
            first_loss = self.evaluate() if loss is None else loss
            self.run.curve.append({"step": 0, "tokens": 0, "loss": None, "held_out": first_loss, "averaged": None})
            self.keep()

    def keep(self) -> None:
        """Write a checkpoint."""
        metrics, run = self.metrics, self.run
        self.group.lead(lambda: fsync(metrics) if metrics.is_file() else None)  # a kept step has its line
        best = run.best() if self.keep_best else None
        self.store.write(
            run.step, {**vars(run), "threads": self.threads}, self.model, self.optimiser, best, self.averages
        )

    def evaluate(self) -> float | None:
        """Return the loss on the held-out windows, or None without any."""
        start = time.monotonic()
        loss = None if self.held_out is None else self.engine.evaluate(self.run.step, self.held_out)
        self.rhythm.evaluated(time.monotonic() - start)
        return loss

    def step(self, batches: Callable[[int], Windows], interrupt: _Interrupt) -> bool:
        """Make a step, and evaluate and keep the model if that is due. Return whether to stop."""
        run, settings, group = self.run, self.settings, self.group
        rate = rate_at(run.done(settings, ahead=1), settings.rate, settings.warmup, settings.averaged)
        start = time.monotonic()
        value, norm = self.engine.step(run.step, batches(run.step), rate)
        run.step, took = run.step + 1, time.monotonic() - start
        first = group.rank == 0
        run.seconds, stopped, due = group.total(
            (self.seconds_before + time.monotonic() - self.began) if first else 0.0,
            float(interrupt.number),
            float(first and self.rhythm.due(run.step)),
        )
        over = run.done(settings) >= 1
        # A step after which the run is stopped is evaluated by the same rule, so that measurements do not depend on
        # where a run was interrupted.
        evaluated = over or due > 0
        if self.average is not None:
            self.average.add(run.step)
        loss, averaged = self.evaluate() if evaluated else None, None
        if self.average is not None and over:
            with self.average.used():
                averaged = self.evaluate()
        text = self.sample(self.model) if self.sample is not None and evaluated else None
        tokens = run.step * settings.windows * settings.context
        self._note(TrainingStep(run.step, tokens, run.seconds, took, value, rate, norm, loss, averaged, text))
        if stopped or evaluated:
            self.keep()
        return bool(stopped)

    def _note(self, step: TrainingStep) -> None:
        """Add a step to the measurements, and tell every process of it."""
        self.run.add(step)

        def write() -> None:  # `tell` may write files too, which may fail in the first process alone
            append(self.metrics, json.dumps(step.as_json()) + "\n")
            self.tell(step)

        self.group.lead(write)
        if self.group.rank:
            self.tell(step)

    def end(self) -> None:
        """Leave the model as `fit` promises: the average, the best evaluation, or the last step."""
        if self.average is not None and self.run.ends_averaged:
            self.average.exchange()
        elif self.keep_best and (best := self.run.best()) != self.run.step:
            self.store.read(self.model, self.optimiser, best)


def _require_windows(settings: Settings, held_out: Windows | None, group: Group) -> None:
    """Raise UsageError if there are fewer windows than processes and parts of a step."""
    parts = group.size * settings.accumulate
    if settings.windows < parts:
        raise UsageError(
            f"a step has only {settings.windows} windows, but is divided into {parts} parts (number of "
            "processes times --accumulate)",
            "Choose a larger --batch, or a smaller --accumulate or --context.",
        )
    if held_out is not None and len(held_out.ids) < group.size:
        raise UsageError(
            f"the held-out text has only {len(held_out.ids)} windows, but each of the {group.size} processes needs one",
            "Hold out more text (such as --held-out 0.1), or choose a smaller --context.",
        )


def _run_so_far(about: Any, metrics: Path, settings: Settings, keep_best: bool) -> tuple[Run, int]:
    """Return the run that a checkpoint's record `about` tells of, or a new one, and its number of threads.

    Another number of threads would sum products in another order, so this function sets the number of the checkpoint.
    """
    threads = torch.get_num_threads()
    if about is None:
        return Run(), threads
    progress = progress_of(about, metrics, settings.steps, settings.windows * settings.context, keep_best)
    if threads != progress.threads:
        torch.set_num_threads(progress.threads)
    return Run(progress.step, progress.seconds, msgspec.to_builtins(progress.curve)), progress.threads


class _Rhythm:
    """When a run is evaluated: every so many steps, or as `Settings.every` says of 0 by the clock."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.took, self.last = settings, 0.0, time.monotonic()

    def evaluated(self, took: float) -> None:
        """Note that an evaluation has just ended, and the seconds that it took."""
        self.took, self.last = took, time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether the run is evaluated after this step."""
        if self.settings.every:
            return step % self.settings.every == 0
        return time.monotonic() - self.last >= max(9 * self.took, (self.settings.seconds or 0.0) / 10)


class _Engine:
    """Steps and evaluations of a model."""

    def __init__(
        self, model: Decoder, loss: Loss, optimiser: torch.optim.AdamW, settings: Settings, group: Group
    ) -> None:
        self.model, self.loss, self.optimiser, self.settings, self.group = model, loss, optimiser, settings, group
        self.forward: Logits = torch.compile(model) if settings.compiled else model
        # To read a number of a GPU is to wait for it. There a step is launched as a whole, and AdamW's kernel looks
        # whether it may change parameters; then its numbers are read.
        fused = all(each.get("fused") for each in optimiser.param_groups)
        self.reads_last = fused and group.alone and group.device.type == "cuda"

    @contextmanager
    def _computing(self) -> Iterator[None]:
        device, dtype = self.group.device.type, getattr(torch, self.settings.dtype)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            yield

    def _lost(self, windows: Windows) -> Tensor:
        with self._computing():
            return self.loss(self.forward, Batch.of(windows, self.group.device))

    def step(self, number: int, windows: Windows, rate: float) -> tuple[float, float]:
        """Loss a target and the gradient's norm. Raises GptkitError where either is no number."""
        group, share = self.group, windows.part(self.group.rank, self.group.size)
        counted = max(1, windows.counted)
        found = torch.zeros((), device=group.device)
        for part in range(self.settings.accumulate):
            lost = self._lost(share.part(part, self.settings.accumulate))
            # Gradients are averaged over the processes.
            (lost * (group.size / counted)).backward()  # type: ignore[no-untyped-call]
            found += lost.detach()
        total = math.nan if self.reads_last else self._read_loss(number, found, share)
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        whole = group.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])).detach()
        norm = math.nan if self.reads_last else self._read_norm(number, whole)
        clipped_by = whole
        if self.reads_last:
            good = whole.isfinite() & found.isfinite()
            self.optimiser.found_inf = (~good).float()  # type: ignore[attr-defined]
            clipped_by = whole.where(good, 0.0)  # which leaves gradients as they are, for the message
        if self.settings.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, clipped_by)
        for each in self.optimiser.param_groups:
            each["lr"] = rate
        self.optimiser.step()
        if self.reads_last:
            total, norm = self._read_loss(number, found, share), self._read_norm(number, whole)
        self.optimiser.zero_grad(set_to_none=True)
        return total / counted, norm

    def _read_loss(self, number: int, found: Tensor, share: Windows) -> float:
        """Return the loss of all processes together. Raises NoNumber."""
        (total,) = self.group.total(float(found))
        if not math.isfinite(total):
            raise self._no_number(number, self._first_output(share))
        return total

    def _read_norm(self, number: int, whole: Tensor) -> float:
        """Return the norm of the gradient. Raises NoNumber."""
        norm = float(whole)
        if not math.isfinite(norm):
            raise self._no_number(number, self._first("gradient of {}", lambda p: p.grad) or "gradient's norm")
        return norm

    def evaluate(self, number: int, windows: Windows) -> float:
        """Loss a target behind so many steps. Raises NoNumber, before what the last of them made is kept."""
        each = math.ceil(self.settings.windows / self.settings.accumulate)
        parts = max(1, len(windows.ids) // max(each, self.group.size))
        found = 0.0
        with torch.no_grad():
            for part in range(parts):
                found += float(self._lost(windows.part(part, parts).part(self.group.rank, self.group.size)))
        (total,) = self.group.total(found)
        if not math.isfinite(total):
            raise self._no_number(number - 1, self._first("parameter {}", lambda p: p) or "loss on the held-out text")
        return total / max(1, windows.counted)

    def _no_number(self, number: int, where: str) -> NoNumber:
        message = f"training stopped at step {number + 1:,}: the {where} is NaN or infinite"
        return NoNumber(message, "Try a smaller --lr, and start again with --force.")

    def _first(self, what: str, get: Callable[[Tensor], Tensor | None]) -> str | None:
        for name, parameter in self.model.named_parameters():
            found = get(parameter)
            broken = found is not None and not bool(self.group.local(found).isfinite().all())
            if any(self.group.total(float(broken))):  # in any share: all processes go the same way from here
                return what.format(name)
        return None

    def _first_output(self, share: Windows) -> str:
        """Which parameter, or else which module's output, is the first that is no number."""
        if found := self._first("parameter {}", lambda parameter: parameter):
            return found
        outputs: list[str] = []

        def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not outputs and not bool(output.isfinite().all()):
                    outputs.append(f"output of {name or 'the model'}")

            return hook

        hooks = [module.register_forward_hook(look(name)) for name, module in self.model.named_modules()]
        try:
            with torch.no_grad(), self._computing():
                self.loss(self.model, Batch.of(share, self.group.device))
        finally:
            for each in hooks:
                each.remove()
        return outputs[0] if outputs else "loss"


# --- AdamW's groups, and the schedule of its rate ---------------------------------------------------------------------


_DECAYING: tuple[Role, ...] = ("reads", "writes", "inner", "kernel", "router")
"""The roles of parameters that decoupled weight decay (Loshchilov and Hutter 1711.05101) pulls on, where they are
matrices. Tables, gains and biases do not decay: a row of a table would shrink in every step in which its token is not
met, and a gain would leave 1.
"""
_BETAS = (0.9, 0.95)  # GPT-3's (Brown et al. 2005.14165, appendix B)
FLOOR = 0.1
"""What is left of the rate at the end (Hoffmann et al. 2203.15556, section 3)."""


def decays(parameter: Parameter) -> bool:
    """Whether weight decay pulls on a parameter: by its role and its dimensions."""
    return len(parameter.shape) > 1 and parameter.role in _DECAYING


def adamw(
    model: nn.Module, declared: Iterable[Parameter], rate: float, decay: float, trained: Container[str] | None = None
) -> torch.optim.AdamW:
    """AdamW of a tree's `declared` parameters, or of those whose names are `trained`, in two groups; the others are
    frozen. What is not declared (an adapter) does not decay.
    """
    about = {each.name: each for each in declared}
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
        if parameter.requires_grad:
            groups[name not in about or not decays(about[name])]["params"].append(parameter)
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=rate, betas=_BETAS, fused=True)


def rate_at(done: float, rate: float, warmup: float, constant: bool = False) -> float:
    """Return the rate where that share of the budget is done, up to and with this step: a line up to `rate` within the
    share `warmup`, then a cosine down to `FLOOR` of it (Loshchilov and Hutter 1608.03983), or the `constant` rate.
    """
    if done < warmup:
        return rate * done / warmup
    if constant:
        return rate
    way = min(1.0, (done - warmup) / (1 - warmup))
    return rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * way)) / 2)


def usual_rate(parameters: int) -> float:
    """The highest rate for a model of so many parameters (Kaplan et al. 2001.08361, appendix D.6), 3e-5 at least."""
    return max(3e-5, 0.003239 - 0.0001395 * math.log(max(1, parameters)))
