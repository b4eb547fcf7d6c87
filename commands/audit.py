"""The command audit, which reports what is wrong with a checkpoint."""

from pathlib import Path
from typing import Any

import typer

from ..terminal import answer, print_json, progress_bar
from .base import FORCE, JSON, QUIET, ForTree, argument, command, device_option, flag, option
from .completion import complete_model, one_of


@command(
    "gptkit audit ./exported",
    "gptkit audit ./exported --source org/name --values   (exit 0: right, 3: not)",
    "gptkit audit ./exported --for transformers --json",
)
def audit(
    model: str = argument(
        "NEW",
        "The checkpoint to check, of any model family: a folder, a weight file, or org/name on the Hugging Face hub.",
        complete=complete_model,
    ),
    *,
    source: str | None = option(
        "--source OLD",
        "The checkpoint that NEW was made from, such as org/name. gptkit compares the tensors, the "
        "tokenizer and the logits of both.",
    ),
    loader: str | None = option(
        "--for PROGRAM",
        "Report what this program would refuse, ignore or misread in the checkpoint: transformers4 (version 4.57), "
        "transformers, vllm, sglang, llama.cpp or mlx.",
        complete=one_of(("transformers4", "transformers", "vllm", "sglang", "llama.cpp", "mlx")),
    ),
    values: bool = flag(
        "--values",
        "Also read the weights, and report tensors with NaN, with infinities, of zeros only, or identical "
        "to others. With --source, also report values that differ from OLD.",
    ),
    device: str = device_option(what="compare logits"),
    everything: bool = flag("--all", "List all tensors of every finding, instead of only the first ones."),
    fix: Path | None = option(
        "--fix OUT",
        "Write a repaired copy of NEW to this folder. gptkit makes only repairs in which no information is lost. With "
        "--source, gptkit copies missing tensors from OLD, and restores a field of config.json if all tensors fit with "
        "the value in OLD. With --for, gptkit adds the config fields and tokenizer settings of transformers 4.",
    ),
    force: bool = FORCE,
    sarif: bool = flag("--sarif", "Print the findings as SARIF, for code scanning in CI."),
    opening: ForTree,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Find what is wrong with a checkpoint: lost tensors, a stale index, a wrong config, odd values.

    Use audit if a checkpoint does not load or its outputs look wrong; diff to see what changed between two checkpoints;
    verify to prove that logits equal those of transformers; check to find damaged files.
    """
    from ..parity import audit as audits
    from ..report.audit import audit_report

    with progress_bar("reading", quiet or json or sarif or not values) as advance:
        how: Any = {"source": source, "loader": loader, "values": values, "device": device}
        how |= {"progress": advance, **opening}
        report = audits.audit(model, **how) if fix is None else audits.fix(model, fix, force=force, **how)
    if sarif:
        print_json(report.as_sarif())
    else:
        answer(json, report.as_json, lambda: audit_report(report, everything), quiet, crop=False)
    if not report.clean:
        raise typer.Exit(3)
