"""The options of `train` and `heal` as records, which the commands, the Python functions and recipes share."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..converter.opening import Opening
from ..errors import UsageError, shown
from .loop import Settings
from .parallel import Group
from .trainable import rank_of

HELD_OUT = 0.05
"""The default share of the text that is held out for evaluations."""
WINDOWS = 16
"""The default number of windows per step, if that leaves enough steps."""
STEPS, FURTHER = 1000, 250
"""With a small budget in tokens, the default batch is so small that a run has about this number of steps: `STEPS` from
random weights, and `FURTHER` from a checkpoint. With few tokens, a model learns far more from many small steps than
from a few large ones.
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that `train` and `heal` have in common."""

    tokens: int | None = None
    """The number of training tokens, rounded up to whole steps."""
    seconds: float | None = None
    """The training time in seconds, instead of `tokens`. Two such runs do not give the same weights."""
    batch: int | None = None
    """Tokens per step, over all processes; by default 16 windows, or fewer so that a small budget has enough steps."""
    context: int | None = None
    """Tokens per window; by default the model's context, and at most 1,024."""
    rate: float | None = None
    """AdamW's highest learning rate. The default depends on the number of parameters. For a checkpoint it is a tenth of
    that for random weights.
    """
    warmup: float = 0.05
    """The share of the budget in which the learning rate rises to `rate`."""
    decay: float = 0.1
    """The decoupled weight decay of matrices."""
    clip: float = 1.0
    """The largest norm of a step's gradient; 0 clips nothing."""
    accumulate: int = 1
    """The number of parts into which a step is divided to save memory. They are computed one after the other."""
    every: int | None = None
    """Steps between two evaluations and checkpoints; by default a tenth of the run, and at most 500."""
    held_out: float | str | Path = HELD_OUT
    """The share of the text that is held out for evaluations, from its end; or another text or folder of tokens."""
    seed: int = 0
    """The seed of the random weights and of the order of the windows."""
    dtype: str | None = None
    """The dtype of matrix products; by default bfloat16 on a GPU and float32 elsewhere."""
    compiled: bool = False
    """Whether to use torch.compile."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1 or mps; by default (auto) on a GPU if there is one."""
    resume: bool = False
    """Continue from the last checkpoint, with the same bits as a run without a pause."""
    force: bool = False
    """Replace the result's folder, and discard an unfinished run."""
    config: str | None = None
    """"transformers4" for a config.json and tokenizer files that programs for transformers 4 read too."""
    offline: bool = False
    """Use local files and the hub's cache only."""
    allow_pickle: bool = False
    """Also read .bin files (weights only)."""

    @property
    def opening(self) -> Opening:
        """The options for opening checkpoints."""
        return {"offline": self.offline, "allow_pickle": self.allow_pickle}

    def settings(
        self, windows: int, length: int, tokens: int | None, usual_rate: float, group: Group, **more: Any
    ) -> Settings:
        """Return the settings of a run. Raise UsageError if an option is out of range.

        Args:
            windows: windows per step.
            length: tokens per window.
            tokens: the budget in tokens; None if the option `seconds` gives it.
            usual_rate: the highest learning rate if the option `rate` is None.
            group: the processes that train. On GPUs, the default dtype is bfloat16, and otherwise float32.
            more: further fields of `Settings`.
        """
        return settings_of(
            windows, length, tokens, self.seconds, every=self.every, accumulate=self.accumulate, warmup=self.warmup,
            decay=self.decay, clip=self.clip, seed=self.seed, compiled=self.compiled,
            rate=usual_rate if self.rate is None else self.rate,
            dtype=self.dtype or ("bfloat16" if group.device.type == "cuda" else "float32"), **more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The options of `train`."""

    tokenizer: str | Path | None = None
    """The tokenizer for texts, as in `tokenize`. The default is the checkpoint's own, or for random weights a new one
    with at most as many tokens as the model's vocabulary."""
    documents_apart: bool = True
    """Whether a token neither attends to another document's tokens nor is predicted from them."""
    random: bool = False
    """Also replace the weights of a checkpoint by random ones."""
    sample: str | None = None
    """A prompt that the model continues at every evaluation."""


@dataclass(frozen=True, kw_only=True)
class HealOptions(RunOptions):
    """The options of `heal`.

    By default, a run trains on as many tokens as the text has, but at least 20,000 and at most 400,000.
    """

    rate: float | None = None
    """AdamW's highest learning rate for the healed model; by default, short trials choose it. The control's rate is
    chosen in the same way, and the floor has the rate of `train` for random weights.
    """
    decay: float = 0.0
    every: int | None = None
    """Steps between two evaluations and checkpoints; by default evaluations take about a twentieth of the time."""
    seed: int = 0
    """The seed of the first run's order of windows. The other runs have the seeds that follow."""
    trained: str = "all"
    """The parameters to train: "all", "changed" (new parameters and changed components), "norms", or "lora:RANK" (an
    update of this rank for every matrix).
    """
    local: float = 0.0
    """The share of the budget in which every changed layer is first trained alone, to imitate the same layer of the
    teacher. It needs models with the same number of layers and the same hidden size.
    """
    hidden: float = 0.0
    """The weight of the hidden-state loss, the distance to the teacher's hidden states after every layer. It needs
    models with the same number of layers and the same hidden size.
    """
    seeds: int = 1
    """The number of runs of each kind, which differ in the order of the windows."""
    beside: bool | str = True
    """Whether to also train the control (the teacher, on the same tokens) and the floor (the changed architecture from
    random weights), or "control" or "floor" for only one of them.
    """
    patience: int = 0
    """End a run after this number of evaluations without a better one; 0 never ends it early."""
    to: str | None = None
    """The format of the result, as in `save`; by default the files of the family that has this architecture, or
    "local" if there is no such family.
    """

    def __post_init__(self) -> None:
        rank_of(self.trained)
        if self.seeds < 1:
            raise UsageError(f"--seeds must be 1 or more, not {self.seeds}")
        if not 0 <= self.local < 1:
            raise UsageError(f"--local must be at least 0 and less than 1, not {self.local:g}")
        if self.beside not in (True, False, "control", "floor"):
            raise UsageError(f"beside must be True, False, 'control' or 'floor', not {shown(self.beside, 40)}")
        if not 0 <= self.hidden < math.inf:
            raise UsageError(f"--hidden, the weight of the hidden-state loss, must be 0 or more, not {self.hidden:g}")


def windows_of(batch: int | None, length: int, tokens: int | None, parts: int, steps: int) -> int:
    """Return the number of windows of `length` tokens per step.

    Args:
        batch: tokens per step. None gives the default: `WINDOWS` windows, or fewer if the budget would otherwise be
            used up in fewer than about `steps` steps.
        length: tokens per window.
        tokens: the budget in tokens; None if it is in seconds.
        parts: the number of parts in which a step is computed. By default, every part has at least one window.
        steps: the number of steps that a small budget should have.

    Raises:
        UsageError: `length` is below 1.
    """
    if length < 1:
        raise UsageError(f"--context must be 1 or more, not {length:,}")
    if batch is not None:
        return batch // length
    return max(1, parts, WINDOWS if tokens is None else min(WINDOWS, -(-tokens // (steps * length))))


def settings_of(
    windows: int, length: int, tokens: int | None, seconds: float | None, *, every: int | None, **others: Any
) -> Settings:
    """Return the settings of a run with a budget in tokens or in seconds.

    Args:
        windows: windows per step.
        length: tokens per window.
        tokens: the budget in tokens, or None.
        seconds: the budget in seconds, or None.
        every: steps between two evaluations. The default is a tenth of all steps, but at most 500; for a budget in
            seconds it is 100.
        others: the other fields of `Settings`.

    Raises:
        UsageError: there are two budgets or none, or a number is out of its range.
    """
    if (tokens is None) == (seconds is None):
        raise UsageError("training needs exactly one of --tokens and --time", "For example: --tokens 1M, or --time 10m")
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--time must be more than 0 seconds, not {seconds:g}", "For example: --time 10m")
    if windows < 1:
        raise UsageError(
            f"--batch is smaller than one window (--context) of {length:,} tokens",
            "Choose a larger --batch, or a smaller --context.",
        )
    if not 0 < others["rate"] <= 10:
        raise UsageError(f"--lr, the learning rate, must be more than 0 and at most 10, not {others['rate']:g}")
    if (dtype := others.get("dtype", "float32")) not in ("float32", "bfloat16"):
        raise UsageError(f"dtype must be float32 or bfloat16, not {shown(dtype, 40)}")
    ranges = {"warmup": (0, 0.99), "decay": (0, 10), "clip": (0, math.inf)}
    for name, (least, most) in ranges.items():
        if not least <= others[name] <= most:
            raise UsageError(f"{name} must be from {least:g} to {most:g}, not {others[name]:g}")
    if others["seed"] < 0 or others["accumulate"] < 1 or (every is not None and every < 1) or (tokens or 1) < 1:
        raise UsageError("--seed must be 0 or more, and --tokens, --accumulate and --every must be 1 or more")
    steps = None if tokens is None else -(-tokens // (windows * length))
    often = every or (100 if steps is None else min(500, max(1, steps // 10)))
    return Settings(windows, length, steps, seconds, every=often, **others)
