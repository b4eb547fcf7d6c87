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
    changed: str = argument("CHANGED", "The changed checkpoint, as gptkit swap wrote it.", complete=complete_model),
    out: Path = argument("OUT", "The folder to write; OUT.healing has the runs' checkpoints and measurements."),
    *,
    teacher: str = option("--teacher MODEL", "The original that it was made from.", default=...),
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
    beside: bool = option("--beside/--alone", "Run the control and the floor too.", default=True),
    batch: str | None = option("N", "Tokens per step; by default 16 windows, fewer of a small budget.", _HOW),
    context: str | None = option("N", "Tokens per window; by default the models' context, 1,024 at most.", _HOW),
    lr: float | None = option(
        "RATE",
        "AdamW's highest rate for the changed model. The default is chosen from the KL divergence and by trials.",
        _HOW,
        min=0,
    ),
    patience: int = option(
        "N", "End a run after N evaluations without a better one, and keep the best; 0 never.", _HOW, default=0, min=0
    ),
    held_out: str = option("SHARE | FILE", "Hold out this share of the text, or another text.", _HOW, default="0.05"),
    seed: int = option("N", "The seed of the first run.", _HOW, default=0, min=0),
    dtype: str | None = option(
        "float32 | bfloat16",
        "Multiply in this; by default bfloat16 on GPUs.",
        _HOW,
        complete=one_of(("float32", "bfloat16")),
    ),
    compiled: bool = flag("--compile", "Compile the models with torch.compile.", _HOW),
    device: str | None = option("NAME", "Compute on cpu, cuda or cuda:1; by default on a GPU.", _HOW),
    every: int | None = option(
        "STEPS",
        "Evaluate and save a checkpoint every STEPS steps. By default, evaluations take a twentieth of the time.",
        min=1,
    ),
    to: str | None = option(
        "--as FORMAT", "The format to write: local (gptkit's own), hf, hf:FAMILY or hf:auto.", _HOW
    ),
    resume: bool = flag("--resume", "Go on from the last checkpoints of the same call."),
    force: bool = flag("--force", "Replace OUT, and begin anew."),
    offline: bool = flag("--offline", "Use local files and the hub's cache only."),
    allow_pickle: bool = flag("--allow-pickle", "Read .bin files too (weights only)."),
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train a changed model to answer as its original, beside a control."""
    from ..converter.distributed import leads
    from ..report.healing import Healing, healing_report
    from ..training.heal import heal as run

    if dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"unknown dtype {dtype!r:.40}", "known: float32, bfloat16")
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
