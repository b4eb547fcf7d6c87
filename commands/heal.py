"""heal: a changed model trained to answer as its original."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..terminal import answer, progress_bar
from .base import JSON, QUIET, argument, command, flag, option
from .completion import complete_model, one_of
from .train import amounts, told_once

_HOW = "How to train"


@command(
    "gptkit heal changed out --teacher sample:gpt2 --data play.txt",
    "gptkit heal changed out --teacher org/name --data tokens --time 5m --seeds 3",
)
def heal(
    changed: str = argument(
        "CHANGED", "The changed checkpoint, such as one that gptkit swap wrote.", complete=complete_model
    ),
    out: Path = argument("OUT", "The folder to write. OUT.healing gets the checkpoints and measurements of the runs."),
    *,
    teacher: str = option("--teacher MODEL", "The original checkpoint that CHANGED was made from.", default=...),
    data: list[str] = option(
        "--data FILE", "A text file, or a folder written by gptkit tokenize. Repeatable.", default=...
    ),
    budget: str | None = option(
        "--tokens N",
        "Train each run on this many tokens: 400k, 1M. The default is the text once, at least 20k and at most 400k.",
    ),
    time: str | None = option("--time TIME", "Train each run for this long instead: 90s, 10m or 1.5h."),
    trained: str = option("--train WHAT", "What to train: all, changed, norms or lora:RANK.", default="all"),
    local: float = option(
        "SHARE",
        "Train the changed layers by themselves first, for this share of the budget, such as 0.25. The default is 0.",
        default=0.0,
        min=0,
        max=0.99,
    ),
    hidden: float = option(
        "WEIGHT",
        "Weight of the hidden-state loss: the mean squared distance to the teacher. The default is 0.",
        default=0.0,
        min=0,
    ),
    seeds: int = option(
        "N", "The number of seeds: each run is repeated with a different order of the text.", default=1, min=1
    ),
    beside: bool = option(
        "--beside/--alone",
        "Also train the control (the original) and the floor (CHANGED from random weights), for comparison.",
        default=True,
    ),
    batch: str | None = option(
        "N", "Tokens per step. The default is 16 windows, or fewer if the budget is small.", _HOW
    ),
    context: str | None = option("N", "Tokens per window. The default is the models' context, at most 1,024.", _HOW),
    lr: float | None = option(
        "RATE",
        "AdamW's highest rate for the changed model. The default is chosen from the KL divergence and by trials.",
        _HOW,
        min=0,
    ),
    patience: int = option(
        "N", "End a run after N evaluations without a better one. 0 never does.", _HOW, default=0, min=0
    ),
    held_out: str = option(
        "SHARE | FILE",
        "What to evaluate on: a share of the text, such as 0.05, or another text file.",
        _HOW,
        default="0.05",
    ),
    seed: int = option("N", "The seed of the first run.", _HOW, default=0, min=0),
    dtype: str | None = option(
        "float32 | bfloat16",
        "The dtype of matrix products. The default is bfloat16 on a GPU and float32 on a CPU.",
        _HOW,
        complete=one_of(("float32", "bfloat16")),
    ),
    compiled: bool = flag("--compile", "Compile the models with torch.compile.", _HOW),
    device: str | None = option("NAME", "The device: cpu, cuda or cuda:1. The default is a GPU if there is one.", _HOW),
    every: int | None = option(
        "STEPS",
        "Evaluate and save a checkpoint every STEPS steps. By default, gptkit chooses STEPS so that evaluations take "
        "5 % of the time.",
        min=1,
    ),
    to: str | None = option(
        "--as FORMAT", "The format to write: local (gptkit's own), hf, hf:FAMILY or hf:auto.", _HOW
    ),
    resume: bool = flag(
        "--resume", "Continue an interrupted call from its last checkpoints. Repeat the call with this option."
    ),
    force: bool = flag("--force", "Replace OUT, and discard an interrupted run."),
    offline: bool = flag("--offline", "Use local files and the hub's cache only."),
    allow_pickle: bool = flag(
        "--allow-pickle", "Also read pickles, such as .bin files. gptkit reads only weights from them."
    ),
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train a changed model to predict what its original predicts, and a control for comparison."""
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
    where: dict[str, Any] = {"seed": seed, "device": device, "resume": resume, "force": force, "to": to}
    opening: dict[str, Any] = {"offline": offline, "allow_pickle": allow_pickle}
    silent = quiet or json or not leads()
    watched = Healing(silent)
    with told_once(), progress_bar("tokenizing", silent) as advance:
        done = run(
            changed, teacher, data, out, **options, **how, **where, **opening,
            on_start=watched.start, tell=watched.step, progress=advance,
        )  # fmt: skip
    if leads():
        answer(json, done.as_json, lambda: healing_report(done), quiet)
