"""The commands ablate, which trains variants of a model with one budget, and fit-scaling, which fits a scaling law."""

from pathlib import Path
from typing import Any

from ..terminal import answer, progress_bar, say, status
from .base import JSON, QUIET, ForTree, Pictures, argument, command, device_option, flag, option


@command(
    "gptkit ablate gpt2-to-llama ablation --data play.txt",
    "gptkit ablate plan.toml ablation --html ablation.html --resume",
)
def ablate(
    plan: str = argument(
        "PLAN",
        "The list of variants to train: a TOML file, or a plan that comes with gptkit, such as "
        "gpt2-to-llama, positions or norms.",
    ),
    out: Path = argument("OUT", "The folder for all runs. gptkit writes the table of results to OUT/ablation.json."),
    *,
    data: list[str] | None = option(
        "--data FILE",
        "The training text, instead of the one in the plan: a text file (repeatable), or one folder written "
        "by gptkit tokenize.",
    ),
    device: str = device_option(what="train"),
    resume: bool = flag(
        "--resume",
        "Continue an interrupted ablation. Repeat the command with this option. Finished runs are not repeated.",
    ),
    force: bool = flag("--force", "Discard all runs in OUT, and start again."),
    opening: ForTree,
    drawn: Pictures,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train or heal several variants of a model with the same budget, and compare them."""
    from ..report.ablation import ablation_page, ablation_report, run_line
    from ..training.ablate import RunResult
    from ..training.ablate import ablate as run
    from ..training.loop import TrainingStep

    silent = quiet or json
    with progress_bar("tokenizing", silent) as advance, status("preparing", silent) as show:

        def tell(name: str, seed: int, step: TrainingStep) -> None:
            show(f"{name}, seed {seed}: step {step.step:,}, loss {step.loss:.3f}")

        def ended(name: str, tokens: int, result: RunResult) -> None:
            say([run_line(name, tokens, result)], silent)

        where: dict[str, Any] = {"device": device, **opening}
        hooks: dict[str, Any] = {"tell": tell, "ended": ended, "progress": advance}
        table = run(plan, out, data=data or (), resume=resume, force=force, **where, **hooks)
    answer(json, table.as_json, lambda: ablation_report(table), quiet)
    drawn.write(lambda: ablation_page(table), silent)


@command(
    "gptkit fit-scaling ablation --flops 5e11",
    "gptkit fit-scaling small large --flops 1e18 --html law.html",
    name="fit-scaling",
)
def fit_scaling(
    runs: list[Path] = argument(
        "RUNS…",
        "One or more folders written by gptkit ablate. Together, they must have runs with several model "
        "sizes and several numbers of training tokens.",
    ),
    *,
    flops: list[float] | None = option(
        "--flops C",
        "Predict the best number of parameters and of training tokens for this budget of FLOPs, such as "
        "1e18. Repeatable.",
    ),
    draws: int = option(
        "N",
        "The number of bootstrap samples for the confidence intervals of the fit. 0 means no intervals.",
        default=100,
        min=0,
    ),
    seed: int = option("N", "The seed of the bootstrap samples.", default=0, min=0),
    drawn: Pictures,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Fit a scaling law to runs of several model sizes, and predict the best size for a budget of FLOPs."""
    from ..report.scaling import scaling_page, scaling_report
    from ..training.scaling import fit_scaling as run

    law = run(runs, flops=flops or (), drawn=draws, seed=seed)
    answer(json, law.as_json, lambda: scaling_report(law), quiet)
    drawn.write(lambda: scaling_page(law), quiet or json)
