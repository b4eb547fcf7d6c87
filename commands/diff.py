"""The command diff, which compares two checkpoints tensor by tensor."""

import os

import typer

from ..terminal import answer, progress_bar
from . import base
from .base import JSON, QUIET, ForWeights, Pictures, argument, command, flag, option
from .completion import complete_model


@command(
    "gptkit diff base tuned   (exit 0: the same values, 3: different)",
    "gptkit diff base tuned --by layer --html changes.html",
    "gptkit diff model.gguf org/name --json",
)
def diff(
    a: str = argument(
        "A",
        "The first checkpoint: org/name or org/name@revision on the Hugging Face hub, a folder, a "
        ".safetensors or .gguf file, or a sample such as sample:gpt2.",
        complete=complete_model,
    ),
    b: str = argument(
        "B",
        "The second checkpoint, given in the same ways as A. The formats of A and B may differ.",
        complete=complete_model,
    ),
    by: str = base.by_option(),
    everything: bool = flag(
        "--all", "List all tensors that differ. By default, gptkit lists only those that changed most."
    ),
    rank: bool = option(
        "--rank/--no-rank",
        "Report the rank of the difference B - A of each matrix. A low rank is a sign of a merged LoRA. "
        "--no-rank skips the ranks, which saves time.",
        default=True,
    ),
    workers: int | None = base.WORKERS,
    device: str = base.device_option(what="compute ranks"),
    json: bool = JSON,
    *,
    drawn: Pictures,
    opening: ForWeights,
    quiet: bool = QUIET,
) -> None:
    """Compare two checkpoints tensor by tensor: what is missing, added or changed.

    Use diff to see where and by how much two checkpoints differ; verify to see whether they compute the same logits;
    audit to find errors in one checkpoint.
    """
    for library in ("OPENBLAS", "MKL"):  # numpy, imported later, reads these; gptkit has its own threads
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    rows = base.rows_by(by)
    from ..parity.diff import diff as run
    from ..report.diff import diff_page, diff_report

    with progress_bar("comparing", quiet or json) as advance:
        result = run(a, b, **opening, rank=rank, workers=workers, device=device, progress=advance)
    answer(json, result.as_json, lambda: diff_report(result, rows, everything), quiet, crop=False)
    drawn.write(lambda: diff_page(result), quiet=quiet or json)
    if not result.same:
        raise typer.Exit(3)
