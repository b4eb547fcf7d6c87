"""The training loop. The model, the windows of text and the loss are arguments of `fit`.

The windows of a step are divided over the processes, and in every process into `accumulate` parts. The loss of a part
is the sum over its targets, divided by the number of targets of the whole step. The gradients of the parts therefore
add up to that of one large batch.
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
from .state import METRICS, Store, append, truncate

Logits = Callable[..., Tensor]
Loss = Callable[[Logits, "Batch"], Tensor]
"""A function that returns the loss of a batch, summed over its targets, as a scalar with a gradient. The model takes
the arguments of `Decoder.forward`.
"""


@dataclass(frozen=True)
class Batch:
    """The fields of `data.Windows` as tensors on a device, all of shape (B, T)."""

    ids: Tensor
    targets: Tensor
    documents: Tensor | None

    @classmethod
    def of(cls, windows: Windows, device: torch.device) -> Batch:
        """Return the windows on a device."""
        return cls(*(None if array is None else torch.from_numpy(array).to(device) for array in windows))  # type: ignore[arg-type]


def next_token(model: Logits, batch: Batch) -> Tensor:
    """Return the cross entropy of the next tokens in nats, summed over the tokens of a batch."""
    return cross_entropy(model(batch.ids, documents=batch.documents), batch.targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in nats, summed over targets.

    Args:
        logits: (B, T, vocabulary).
        targets: (B, T); targets that are `NOWHERE` do not count.
    """
    flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(flat, targets.flatten(), ignore_index=NOWHERE, reduction="sum")


class Settings(msgspec.Struct, frozen=True):
    """The settings of a training run. The budget is either `steps` or `seconds`; the other one is None."""

    windows: int
    """Windows per step."""
    context: int
    """Tokens per window."""
    steps: int | None = None
    seconds: float | None = None
    accumulate: int = 1
    """The number of parts into which each process divides its windows of a step, for gradient accumulation."""
    rate: float = 1e-3
    """The highest learning rate."""
    warmup: float = 0.05
    """The share of the budget in which the learning rate rises to `rate`."""
    averaged: bool = False
    """Keep the learning rate constant after the warm-up, and end with the average of the parameters (`Average`) if that
    is better than the last parameters. If false, the learning rate falls until the end.
    """
    decay: float = 0.1
    """AdamW's weight decay."""
    clip: float = 1.0
    """The largest norm of a step's gradient; 0 clips nothing."""
    seed: int = 0
    every: int = 100
    """Steps between two evaluations and checkpoints. 0 is only for a budget in seconds: gptkit then evaluates at most
    ten times, and spends at most a tenth of the time on it.
    """
    dtype: str = "float32"
    """The dtype of matrix products. Parameters are in float32."""
    compiled: bool = False
    patience: int = 0
    """End the run after this number of evaluations without a better one, with the parameters of the best evaluation.
    That may be the evaluation before the first step. 0 never ends a run early.
    """


@dataclass(frozen=True)
class TrainingStep(Record):
    """The measurements of a training step."""

    step: int  # from 1
    tokens: int  # training tokens up to this step, including its own
    seconds: float  # since the start of the run
    took: float  # seconds for this step
    loss: float  # in nats per target
    rate: float  # the learning rate
    norm: float  # the norm of the gradient before clipping
    held_out: float | None = None  # the loss on the held-out text, if it was evaluated after this step
    averaged: float | None = None  # the held-out loss of the averaged parameters, after the last step
    sample: str | None = None  # a text that the model generated, if it was evaluated after this step


@dataclass
class Run:
    """The progress of a training run."""

    step: int = 0  # the number of finished steps
    seconds: float = 0.0  # the time that the finished steps took
    curve: list[dict[str, Any]] = field(default_factory=list)  # the evaluations; see `resumed.EvaluationRecord`

    def done(self, settings: Settings, ahead: int = 0) -> float:
        """Return the share of the budget that will be used after `ahead` more steps, or 1 if the run ends early.

        A run ends early if the last `patience` evaluations were not better than an earlier one.
        """
        losses = [entry["held_out"] for entry in self.curve]
        if settings.patience and min(losses[-settings.patience :], default=0.0) > min(losses, default=0.0):
            return 1.0
        if settings.steps is not None:
            return (self.step + ahead) / settings.steps
        assert settings.seconds is not None
        # A step probably takes as long as the average step so far, and the first one a thousandth of the budget.
        per_step = self.seconds / self.step if self.step else settings.seconds / 1000
        return (self.seconds + ahead * per_step) / settings.seconds

    def add(self, step: TrainingStep) -> None:
        """Add the evaluation after a step to the curve, if there was one."""
        if step.held_out is not None:
            names = ("step", "tokens", "loss", "held_out", "averaged")
            self.curve.append({name: getattr(step, name) for name in names})

    def best(self) -> int:
        """Return the step after which the held-out loss was lowest."""
        return int(min(self.curve, key=lambda entry: entry["held_out"])["step"])

    @property
    def ends_averaged(self) -> bool:
        """Whether the average of the parameters ends with a lower held-out loss than the parameters ever had."""
        averaged = self.curve[-1]["averaged"]
        return averaged is not None and bool(averaged < min(entry["held_out"] for entry in self.curve))


class Abandoned(Exception):
    """Raised by `fit` if its argument `continues` returns false, which ends a run before its budget is used."""


class _Interrupt:
    """A context in which SIGINT and SIGTERM are only recorded, so that the current step can finish.

    A second signal ends the process as usual.
    """

    def __init__(self) -> None:
        self.number = 0

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._before[number])

    def error(self, step: int, store: Store) -> BaseException:
        """Return the exception to raise after a signal (SIGTERM or Ctrl-C), when the step `step` has been saved."""
        error = Terminated() if self.number == signal.SIGTERM else KeyboardInterrupt()
        error.add_note(f"step {step:,} is saved in {store.folder}: repeat the command with --resume to continue")
        return error

    def __enter__(self) -> _Interrupt:
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
        self._before: dict[int, Any] = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
    start_loss: float | None = None,
    sample: Callable[[Decoder], str] | None = None,
    tell: Callable[[TrainingStep], None] = lambda step: None,
    continues: Callable[[Run], bool] = lambda run: True,
) -> Run:
    """Train a model in place, from the last checkpoint in `store` if there is one.

    Args:
        model: the model, on the group's device and in float32.
        batches: returns the windows of a step by its number. The windows must be the same in every process.
        held_out: the windows that every evaluation reads. None evaluates nothing.
        settings: the budget and all other settings.
        group: the processes that train.
        store: the folder for checkpoints and measurements.
        loss: the loss for training and for evaluations; see `Loss`.
        trained: the names of the parameters to train; by default all.
        keep_best: end with the parameters of the best evaluation, which may be that before the first step or, with
            `settings.averaged`, that of the averaged parameters. `patience` implies this.
        start_loss: the loss on the held-out windows before the first step, if it is known.
        sample: generates a text with the model. It is called at every evaluation.
        tell: called after every step.
        continues: called before every step, returns whether to make it. It must return the same in every process, and
            the same after a restart.

    Raises:
        Abandoned: `continues` ended the run.
        UsageError: there are fewer windows than parts of a step, in all processes together.
        NoNumber: the loss or a gradient is NaN or infinite. The step does not change the parameters.
        GptkitError: writing failed.
        KeyboardInterrupt: after a checkpoint is written.
    """
    _require_windows(settings, held_out, group)
    group.share_out(model)
    model.train()
    keep_best = held_out is not None and (keep_best or settings.patience > 0)
    course = _Course(model, held_out, settings, group, store, loss, trained, keep_best, sample, tell)
    run = course.run
    with _Interrupt() as interrupt:
        course.begin(start_loss)
        while run.done(settings) < 1:
            if not continues(run):
                if any(group.total(float(interrupt.number))):
                    course.save()
                    raise interrupt.error(run.step, store)
                raise Abandoned
            if course.step(batches, interrupt):
                raise interrupt.error(run.step, store)
        # A signal may have come while the last step was evaluated and saved.
        if any(group.total(float(interrupt.number))):
            raise interrupt.error(run.step, store)
    course.end()
    return run


class _Course:
    """A training run in progress: the model, its optimiser and averaged parameters, measurements and checkpoints."""

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
        progress = store.read(model, self.optimiser, extra=self.averages)
        self.run, self.threads = _run_so_far(progress, self.metrics, settings, keep_best)
        self.engine = _Engine(model, loss, self.optimiser, settings, group)
        group.lead(lambda: truncate(self.metrics, self.run.step))
        self.seconds_before, self.began = self.run.seconds, time.monotonic()
        self.rhythm = _Rhythm(settings)

    def begin(self, loss: float | None) -> None:
        """Evaluate and save the model before the first step, if the run may end with these parameters (`keep_best`).

        `loss` is the model's loss on the held-out windows. If it is None, this function measures it.
        """
        if self.keep_best and not self.run.curve:
            first_loss = self.evaluate() if loss is None else loss
            self.run.curve.append({"step": 0, "tokens": 0, "loss": None, "held_out": first_loss, "averaged": None})
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the run."""
        metrics, run = self.metrics, self.run
        self.group.lead(lambda: fsync(metrics) if metrics.is_file() else None)  # a saved step must have its line
        best = run.best() if self.keep_best else None
        self.store.write(
            run.step, {**vars(run), "threads": self.threads}, self.model, self.optimiser, best, self.averages
        )

    def evaluate(self) -> float | None:
        """Return the loss on the held-out windows, or None if there are no such windows."""
        start = time.monotonic()
        loss = None if self.held_out is None else self.engine.evaluate(self.run.step, self.held_out)
        self.rhythm.evaluated(time.monotonic() - start)
        return loss

    def step(self, batches: Callable[[int], Windows], interrupt: _Interrupt) -> bool:
        """Make a step, and evaluate and save the model if that is due. Return whether a signal asks the run to stop.

        Args:
            batches: returns the windows of a step by its number.
            interrupt: records signals that arrive during the step.
        """
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
            self.save()
        return bool(stopped)

    def _note(self, step: TrainingStep) -> None:
        """Record the measurements of a step, also in metrics.jsonl, and call `tell` in every process."""
        self.run.add(step)

        def write() -> None:  # `tell` may write files too, which may fail in the first process alone
            append(self.metrics, json.dumps(step.as_json()) + "\n")
            self.tell(step)

        self.group.lead(write)
        if self.group.rank:
            self.tell(step)

    def end(self) -> None:
        """Set the model's final parameters: the average, those of the best evaluation, or those of the last step."""
        if self.average is not None and self.run.ends_averaged:
            self.average.exchange()
        elif self.keep_best and (best := self.run.best()) != self.run.step:
            self.store.read(self.model, self.optimiser, best)


def _require_windows(settings: Settings, held_out: Windows | None, group: Group) -> None:
    """Raise UsageError if a step has fewer windows than parts, or an evaluation has fewer windows than processes.

    The number of parts is that of the processes times `accumulate`.
    """
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
    """Return the progress of a run that is resumed or new, and the number of threads with which it computes.

    A resumed run must use the same number of threads as before, because torch would otherwise sum products in another
    order. This function sets torch's number of threads accordingly.

    Args:
        about: the content of the last checkpoint's state.json, or None for a new run.
        metrics: the path of the run's metrics.jsonl.
        settings: the settings of the run.
        keep_best: whether the run was evaluated before its first step.
    """
    threads = torch.get_num_threads()
    if about is None:
        return Run(), threads
    progress = progress_of(about, metrics, settings.steps, settings.windows * settings.context, keep_best)
    if threads != progress.threads:
        torch.set_num_threads(progress.threads)
    return Run(progress.step, progress.seconds, msgspec.to_builtins(progress.curve)), progress.threads


class _Rhythm:
    """The schedule of evaluations: after every `Settings.every` steps, or by the clock if `every` is 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.took, self.last = settings, 0.0, time.monotonic()

    def evaluated(self, took: float) -> None:
        """Record that an evaluation has just ended, and that it took `took` seconds."""
        self.took, self.last = took, time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether the model is to be evaluated after this step."""
        if self.settings.every:
            return step % self.settings.every == 0
        return time.monotonic() - self.last >= max(9 * self.took, (self.settings.seconds or 0.0) / 10)


class _Engine:
    """The computation of training steps and evaluations of one model."""

    def __init__(
        self, model: Decoder, loss: Loss, optimiser: torch.optim.AdamW, settings: Settings, group: Group
    ) -> None:
        self.model, self.loss, self.optimiser, self.settings, self.group = model, loss, optimiser, settings, group
        self.forward: Logits = torch.compile(model) if settings.compiled else model
        # Reading a number from a GPU waits for all kernels before it. A step on a GPU is therefore launched as a whole,
        # and AdamW's kernel itself skips the update if the loss is not finite. The numbers are read after that.
        fused = all(parameters.get("fused") for parameters in optimiser.param_groups)
        self.reads_last = fused and group.alone and group.device.type == "cuda"

    @contextmanager
    def _computing(self) -> Iterator[None]:
        device, dtype = self.group.device.type, getattr(torch, self.settings.dtype)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            yield

    def _loss_of(self, windows: Windows) -> Tensor:
        with self._computing():
            return self.loss(self.forward, Batch.of(windows, self.group.device))

    def step(self, number: int, windows: Windows, rate: float) -> tuple[float, float]:
        """Make a training step. Return the mean loss per target, and the norm of the gradient.

        Args:
            number: the number of the step, from 0.
            windows: the windows of the step, for all processes.
            rate: the learning rate.

        Raises:
            NoNumber: the loss or a gradient is NaN or infinite.
        """
        group, share = self.group, windows.part(self.group.rank, self.group.size)
        counted = max(1, windows.counted)
        loss_sum = torch.zeros((), device=group.device)
        for part in range(self.settings.accumulate):
            loss = self._loss_of(share.part(part, self.settings.accumulate))
            # Gradients are averaged over the processes.
            (loss * (group.size / counted)).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        total = math.nan if self.reads_last else self._checked_loss(number, loss_sum, share)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        whole = group.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])).detach()
        norm = math.nan if self.reads_last else self._checked_norm(number, whole)
        clipped_by = whole
        if self.reads_last:
            finite = whole.isfinite() & loss_sum.isfinite()
            self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]
            clipped_by = whole.where(finite, 0.0)  # a norm of 0 leaves the gradients as they are, for the message
        if self.settings.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, clipped_by)
        for parameter_group in self.optimiser.param_groups:
            parameter_group["lr"] = rate
        self.optimiser.step()
        if self.reads_last:
            total, norm = self._checked_loss(number, loss_sum, share), self._checked_norm(number, whole)
        self.optimiser.zero_grad(set_to_none=True)
        return total / counted, norm

    def _checked_loss(self, number: int, loss_sum: Tensor, share: Windows) -> float:
        """Return the loss of a step, summed over all processes. Raise NoNumber if it is NaN or infinite.

        Args:
            number: the number of the step, for the message.
            loss_sum: the loss of this process.
            share: the windows of this process, in which the cause is searched.
        """
        (total,) = self.group.total(float(loss_sum))
        if not math.isfinite(total):
            raise self._not_finite(number, self._first_bad_output(share))
        return total

    def _checked_norm(self, number: int, whole: Tensor) -> float:
        """Return the norm of the gradient, `whole`, as a float. Raise NoNumber if it is NaN or infinite.

        `number` is the number of the step, for the message.
        """
        norm = float(whole)
        if not math.isfinite(norm):
            raise self._not_finite(number, self._first_bad("gradient of {}", lambda p: p.grad) or "gradient's norm")
        return norm

    def evaluate(self, number: int, windows: Windows) -> float:
        """Return the mean loss per target in `windows`, after `number` training steps.

        Raise NoNumber if it is NaN or infinite. The last step is then not saved.
        """
        per_part = math.ceil(self.settings.windows / self.settings.accumulate)
        parts = max(1, len(windows.ids) // max(per_part, self.group.size))
        loss_sum = 0.0
        with torch.no_grad():
            for part in range(parts):
                loss_sum += float(self._loss_of(windows.part(part, parts).part(self.group.rank, self.group.size)))
        (total,) = self.group.total(loss_sum)
        if not math.isfinite(total):
            raise self._not_finite(
                number - 1, self._first_bad("parameter {}", lambda p: p) or "loss on the held-out text"
            )
        return total / max(1, windows.counted)

    def _not_finite(self, number: int, where: str) -> NoNumber:
        message = f"training stopped at step {number + 1:,}: the {where} is NaN or infinite"
        return NoNumber(message, "Try a smaller --lr, and start again with --force.")

    def _first_bad(self, what: str, get: Callable[[Tensor], Tensor | None]) -> str | None:
        for name, parameter in self.model.named_parameters():
            tensor = get(parameter)
            bad = tensor is not None and not bool(self.group.local(tensor).isfinite().all())
            if any(self.group.total(float(bad))):  # in any share: all processes go the same way from here
                return what.format(name)
        return None

    def _first_bad_output(self, share: Windows) -> str:
        """Return the name of the first parameter that contains NaN or infinity.

        If there is no such parameter, return the name of the first module whose output for the windows `share` does.
        """
        if name := self._first_bad("parameter {}", lambda parameter: parameter):
            return name
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
            for hook_handle in hooks:
                hook_handle.remove()
        return outputs[0] if outputs else "loss"


# --- AdamW's groups, and the schedule of the learning rate ------------------------------------------------------------


_DECAYING: tuple[Role, ...] = ("reads", "writes", "inner", "kernel", "router")
"""The roles of the parameters that have weight decay (decoupled: Loshchilov and Hutter 1711.05101), if they are
matrices. Embeddings, gains and biases have none. The row of an embedding would shrink in every step without its token,
and a gain would move away from 1.
"""
_BETAS = (0.9, 0.95)  # GPT-3's (Brown et al. 2005.14165, appendix B)
FLOOR = 0.1
"""The learning rate at the end, as a share of the highest (Hoffmann et al. 2203.15556, section 3)."""


def decays(parameter: Parameter) -> bool:
    """Return whether weight decay applies to a parameter.

    It applies to the matrices of linear layers and to kernels, but not to embeddings, gains and biases.
    """
    return len(parameter.shape) > 1 and parameter.role in _DECAYING


def adamw(
    model: nn.Module, declared: Iterable[Parameter], rate: float, decay: float, trained: Container[str] | None = None
) -> torch.optim.AdamW:
    """Return an AdamW optimiser for a model's parameters, in two groups: with and without weight decay.

    Args:
        model: the model. Parameters that are not trained are frozen.
        declared: the parameters that the architecture declares. Others, such as an adapter's, have no weight decay.
        rate: the learning rate.
        decay: the weight decay.
        trained: the names of the parameters to train; by default all.
    """
    by_name = {parameter.name: parameter for parameter in declared}
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
        if parameter.requires_grad:
            groups[name not in by_name or not decays(by_name[name])]["params"].append(parameter)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=_BETAS, fused=True)


def rate_at(share: float, rate: float, warmup: float, constant: bool = False) -> float:
    """Return the learning rate of a step.

    It rises linearly to `rate` (warm-up). Then it falls as a cosine to `FLOOR` times `rate` (Loshchilov and Hutter
    1608.03983).

    Args:
        share: the share of the budget that is used after this step.
        rate: the highest learning rate.
        warmup: the share of the budget in which the rate rises.
        constant: after the warm-up, keep the rate constant.
    """
    if share < warmup:
        return rate * share / warmup
    if constant:
        return rate
    progress = min(1.0, (share - warmup) / (1 - warmup))
    return rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


def usual_rate(parameters: int) -> float:
    """Return the default of the highest learning rate for a model with `parameters` parameters. It is at least 3e-5.

    The formula is from Kaplan et al. (2001.08361, appendix D.6).
    """
    return max(3e-5, 0.003239 - 0.0001395 * math.log(max(1, parameters)))
