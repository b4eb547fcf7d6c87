"""The command train, which trains random weights or continues from a checkpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import Elsewhere, GptkitError, UsageError
from ..terminal import progress_bar, say
from .base import CONFIG, MODEL, QUIET, ForTree, argument, command, device_option, flag, option, tokens
from .completion import one_of

_HOW = "How to train"
_UNITS = {"s": 1, "": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(name: str, text: str) -> float:
    """Return the number of seconds that "90", "90s", "10m" or "1.5h" means. Raises UsageError for other text.

    `name` is the option's name in the message.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([smhd]?)\s*", text, re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{name} {text!r:.40} is not a time", f"For example: {name} 90s, {name} 10m or {name} 1.5h")
    return seconds


def amounts(
    budget: str | None, time: str | None, batch: str | None, context: str | None, held_out: str
) -> dict[str, Any]:
    """Parse options of `train` and `heal`. Raises UsageError if one is malformed.

    Returns:
        By name: "tokens" (the budget), "batch" and "context" in tokens, "seconds" (`time`), and "held_out". The last is
        a share of the text, or the unchanged argument if it is not a number. An option that is not given is None.
    """
    counts = {"tokens": budget, "batch": batch, "context": context}
    values: dict[str, Any] = {
        name: None if text is None else tokens(f"--{name}", text) for name, text in counts.items()
    }
    values["seconds"] = None if time is None else _seconds("--time", time)
    share = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", held_out, re.ASCII | re.IGNORECASE)
    return {**values, "held_out": float(held_out) if share else held_out}


@contextmanager
def reported_once() -> Iterator[None]:
    """Let only the first process report an error that all processes of a distributed run raise."""
    from ..converter.distributed import leads

    try:
        yield
    except GptkitError as error:
        if leads() or isinstance(error, Elsewhere):
            raise
        raise Elsewhere(error.message, error.exit_code) from error


_OUT = argument(
    "OUT",
    "The folder to write the trained model to. The folder OUT.training gets the checkpoints and "
    "measurements of the run.",
)
DATA = option(
    "--data FILE", "The training text: a text file (repeatable), or one folder written by gptkit tokenize.", default=...
)
_BUDGET = option(
    "--tokens N",
    "The number of tokens to train on, such as 500k, 1M or 2e9 (1k is 1,024, 1M is 1,024k). Give either --tokens or "
    "--time.",
)
BATCH = option(
    "N",
    "The number of tokens per training step, such as 16k (1k is 1,024). The default is 16 windows (see "
    "--context), or fewer if the training is short.",
    _HOW,
)
_CONTEXT = option(
    "N",
    "The number of tokens per window (training sequence), such as 512 or 2k (1k is 1,024). The default is "
    "the model's context, but at most 1,024.",
    _HOW,
)
_LR = option(
    "RATE", "The highest learning rate of AdamW, such as 3e-4. The default depends on the model's size.", _HOW, min=0
)
_WARMUP = option(
    "SHARE",
    "The share of the training (its tokens or time) during which the learning rate rises to its highest value.",
    _HOW,
    default=0.05,
    min=0,
)
_DECAY = option(
    "NUMBER",
    "The weight decay of AdamW. It applies only to matrices, not to norms and biases.",
    _HOW,
    default=0.1,
    min=0,
)
_ACCUMULATE = option(
    "N",
    "Compute the gradient of each step in N parts, one after another (gradient accumulation). This needs less memory.",
    _HOW,
    default=1,
    min=1,
)
HELD_OUT = option(
    "SHARE | FILE",
    "The text for evaluation, on which gptkit does not train: a share of the training text, such as "
    "0.05, or another text file.",
    _HOW,
    default="0.05",
)
_TOKENIZER = option(
    "MODEL",
    "The tokenizer for text files: a model such as sample:gpt2, a tokenizer.json file, or bytes (one "
    "token per byte). The default is the model's own.",
    _HOW,
)
_NO_DOCUMENT_MASK = flag(
    "--no-document-mask",
    "Let tokens attend to tokens of other documents in the same window. By default, a mask prevents this.",
    _HOW,
)
_SEED = option("N", "The seed of the random weights and of the order of the training windows.", _HOW, default=0, min=0)
_DTYPE = option(
    "float32 | bfloat16",
    "The dtype in which matrices are multiplied. The default is bfloat16 on a GPU and float32 on a CPU.",
    _HOW,
    complete=one_of(("float32", "bfloat16")),
)
DEVICE = device_option(panel=_HOW, what="train")
_EVERY = option(
    "STEPS",
    "Evaluate the model and save a checkpoint every STEPS steps, such as 100. By default, gptkit does "
    "this ten times per run, but at least every 500 steps.",
    min=1,
)
_METRICS = option(
    "FILE", "Also write the measurements to this file, such as metrics.jsonl, with one JSON object per line."
)
_TENSORBOARD = option(
    "--tensorboard FOLDER", "Also write the measurements to this folder, in the format of TensorBoard."
)
_RESUME = flag(
    "--resume",
    "Continue an interrupted run from its last checkpoint. Repeat the command with this option. If the "
    "run stopped because its loss became NaN or infinite, you may change --lr and --clip.",
)


@command(
    "gptkit train tiny.json tiny --data play.txt --tokens 1M",
    "gptkit train sample:gpt2 tuned --data play-tokens --tokens 200k --lr 3e-4",
    "gptkit train gpt2 out --data tokens --time 1h --resume",
)
def train(
    model: str = MODEL,
    out: Path = _OUT,
    *,
    data: list[str] = DATA,
    budget: str | None = _BUDGET,
    time: str | None = option("--time TIME", "Train for this long instead of a number of tokens: 90s, 10m or 1.5h."),
    batch: str | None = BATCH,
    context: str | None = _CONTEXT,
    lr: float | None = _LR,
    warmup: float = _WARMUP,
    decay: float = _DECAY,
    clip: float = option("NORM", "Clip the gradient to this norm. 0 means no clipping.", _HOW, default=1.0, min=0),
    accumulate: int = _ACCUMULATE,
    held_out: str = HELD_OUT,
    tokenizer: str | None = _TOKENIZER,
    no_document_mask: bool = _NO_DOCUMENT_MASK,
    random: bool = flag("--random", "Start from random weights, even if MODEL has weights.", _HOW),
    seed: int = _SEED,
    dtype: str | None = _DTYPE,
    compiled: bool = flag("--compile", "Compile the model with torch.compile, which makes long runs faster.", _HOW),
    device: str = DEVICE,
    every: int | None = _EVERY,
    sample: str | None = option("PROMPT", "Generate text from this prompt at every evaluation, such as 'ROMEO:'."),
    metrics: Path | None = _METRICS,
    tensorboard: Path | None = _TENSORBOARD,
    config: str | None = CONFIG,
    resume: bool = _RESUME,
    force: bool = flag("--force", "Replace the folder OUT if it exists, and discard an interrupted run."),
    opening: ForTree,
    quiet: bool = QUIET,
) -> None:
    """Train a model on texts, from random weights or from a checkpoint."""
    from ..converter.distributed import leads
    from ..report.training import Watched, result_lines
    from ..training.train import train as run

    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"--dtype must be float32 or bfloat16, not {dtype!r:.40}")
    options = {**amounts(budget, time, batch, context, held_out), "documents_apart": not no_document_mask}
    options |= {"rate": lr, "warmup": warmup, "decay": decay, "clip": clip, "accumulate": accumulate, "every": every}
    options |= {"tokenizer": tokenizer, "random": random, "seed": seed, "dtype": dtype, "compiled": compiled}
    options |= {"device": device, "sample": sample, "config": config, "resume": resume, "force": force}
    options |= opening
    quiet = quiet or not leads()
    watching = Watched(quiet, metrics if leads() else None, tensorboard if leads() else None)
    with reported_once(), progress_bar("tokenizing", quiet) as advance, watching as watched:
        done = run(model, data, out, **options, on_start=watched.start, tell=watched.step, progress=advance)
    say(result_lines(done), quiet)
