"""The command heal, which trains a changed model to make the same predictions as its original."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..terminal import answer, progress_bar
from .base import CONFIG, JSON, QUIET, ForTree, argument, command, flag, option
from .completion import complete_model, one_of
from .train import BATCH, DATA, DEVICE, HELD_OUT, amounts, reported_once

_HOW = "How to train"


_CHANGED = argument(
    "CHANGED", "The changed checkpoint to train, such as a folder written by gptkit swap.", complete=complete_model
)
_OUT = argument(
    "OUT",
    "The folder to write the trained model to. The folder OUT.healing gets the checkpoints and "
    "measurements of the training runs.",
)
_TEACHER = option(
    "--teacher MODEL",
    "The original model that CHANGED was made from, such as sample:gpt2. CHANGED is trained to make the "
    "same predictions.",
    default=...,
)
_BUDGET = option(
    "--tokens N",
    "The number of tokens that each run trains on, such as 400k or 1M (1k is 1,024, 1M is 1,024k). The default is the "
    "number of tokens in the text, but at least 20,000 and at most 400,000.",
)
_TIME = option("--time TIME", "Train each run for this long instead of a number of tokens: 90s, 10m or 1.5h.")
_TRAINED = option(
    "--train WHAT",
    "The parameters to train: all, changed (only those that the swap changed), norms (only those of the "
    "norms), or lora:RANK (a LoRA of this rank for every matrix, such as lora:8).",
    default="all",
)
_LOCAL = option(
    "SHARE",
    "The share of each run's tokens or time for a first phase, such as 0.25. In this phase, every "
    "changed layer learns to give the same output as the teacher's layer for the same input. Try it if "
    "the swap changed whole layers and the model became much worse. The default is 0, without this "
    "phase.",
    default=0.0,
    min=0,
    max=0.99,
)
_HIDDEN = option(
    "WEIGHT",
    "The weight of an additional loss, such as 1. This loss is the mean squared distance between the "
    "hidden states of CHANGED and of the teacher after every layer. The default is 0, without this loss.",
    default=0.0,
    min=0,
)
_SEEDS = option(
    "N",
    "The number of times that each run is repeated, with a different order of the text every time. With "
    "3, for example, the results show the spread between seeds.",
    default=1,
    min=1,
)
_BESIDE = option(
    "--beside/--alone",
    "Also train two models on the same text for comparison: the control (the original model) and the "
    "floor (CHANGED, started from random weights). --alone trains neither of them.",
    default=True,
)
_CONTEXT = option(
    "N",
    "The number of tokens per window (training sequence), such as 512 or 2k (1k is 1,024). The default is "
    "the models' context, but at most 1,024.",
    _HOW,
)
_LR = option(
    "RATE",
    "The highest learning rate of AdamW for CHANGED, such as 1e-4. By default, gptkit estimates it from "
    "the KL divergence between CHANGED and the teacher, and tests it in short trials.",
    _HOW,
    min=0,
)
_PATIENCE = option(
    "N",
    "End a run early after N evaluations without an improvement. The default, 0, never ends a run early.",
    _HOW,
    default=0,
    min=0,
)
_DTYPE = option(
    "float32 | bfloat16",
    "The dtype in which matrices are multiplied. The default is bfloat16 on a GPU and float32 on a CPU.",
    _HOW,
    complete=one_of(("float32", "bfloat16")),
)
_EVERY = option(
    "STEPS",
    "Evaluate the model and save a checkpoint every STEPS steps. By default, gptkit chooses STEPS so "
    "that evaluations take about 5 % of the time.",
    min=1,
)
_TO = option(
    "--as FORMAT",
    "The format to write: local (gptkit's own), hf (Hugging Face files of the model's own family), "
    "hf:FAMILY (such as hf:llama) or hf:auto (the first family that supports the model). The default is "
    "Hugging Face files if a family supports the model, and otherwise local.",
    _HOW,
)
_RESUME = flag(
    "--resume", "Continue an interrupted command from its last checkpoints. Repeat the command with this option."
)


@command(
    "gptkit heal changed out --teacher sample:gpt2 --data play.txt",
    "gptkit heal changed out --teacher org/name --data tokens --time 5m --seeds 3",
)
def heal(
    changed: str = _CHANGED,
    out: Path = _OUT,
    *,
    teacher: str = _TEACHER,
    data: list[str] = DATA,
    budget: str | None = _BUDGET,
    time: str | None = _TIME,
    trained: str = _TRAINED,
    local: float = _LOCAL,
    hidden: float = _HIDDEN,
    seeds: int = _SEEDS,
    beside: bool = _BESIDE,
    batch: str | None = BATCH,
    context: str | None = _CONTEXT,
    lr: float | None = _LR,
    patience: int = _PATIENCE,
    held_out: str = HELD_OUT,
    seed: int = option(
        "N",
        "The seed of the first run. It determines the order of the text. Further runs (--seeds) use the next seeds.",
        _HOW,
        default=0,
        min=0,
    ),
    dtype: str | None = _DTYPE,
    compiled: bool = flag("--compile", "Compile the models with torch.compile, which makes long runs faster.", _HOW),
    device: str = DEVICE,
    every: int | None = _EVERY,
    to: str | None = _TO,
    config: str | None = CONFIG,
    resume: bool = _RESUME,
    force: bool = flag("--force", "Replace the folder OUT if it exists, and discard an interrupted run."),
    opening: ForTree,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train a changed model to make the same predictions as its original, and a control model for comparison."""
    from ..converter.distributed import leads
    from ..report.healing import Healing, healing_report
    from ..training.heal import heal as run

    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"--dtype must be float32 or bfloat16, not {dtype!r:.40}")
    options = amounts(budget, time, batch, context, held_out)
    how: dict[str, Any] = {
        "trained": trained,
        "local": local,
        "hidden": hidden,
        "seeds": seeds,
        "beside": beside,
        "rate": lr,
        "patience": patience,
        "every": every,
        "dtype": dtype,
        "compiled": compiled,
    }
    where: dict[str, Any] = {"seed": seed, "device": device, "resume": resume, "force": force}
    where |= {"to": to, "config": config}
    silent = quiet or json or not leads()
    watched = Healing(silent)
    with reported_once(), progress_bar("tokenizing", silent) as advance:
        done = run(
            changed, teacher, data, out, **options, **how, **where, **opening,
            on_start=watched.start, tell=watched.step, progress=advance,
        )  # fmt: skip
    if leads():
        answer(json, done.as_json, lambda: healing_report(done), quiet)
