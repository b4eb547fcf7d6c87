"""diff: two checkpoints, tensor by tensor."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..terminal import answer, progress_bar
from .base import ROWS, ForWeights, Json, Pictures, Quiet, app, examples, guarded, option, rows_by
from .completion import complete_model, one_of

Side = "A checkpoint: org/name or org/name@revision, a folder, a .safetensors or .gguf file, or sample:gpt2."


@app.command(
    epilog=examples(
        "gptkit diff base tuned   (exit 0: the same values, 3: different)",
        "gptkit diff base tuned --by layer --html changes.html",
        "gptkit diff model.gguf org/name --json",
    )
)
@guarded
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=Side, autocompletion=complete_model)],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The other checkpoint, of any format.", autocompletion=complete_model)
    ],
    by: Annotated[
        str,
        option(
            "--by component | layer | tensor",
            "What each row of the table stands for.",
            complete=one_of(ROWS),
        ),
    ] = "component",
    everything: Annotated[bool, option("--all", "List every tensor that differs.")] = False,
    rank: Annotated[bool, option("--rank/--no-rank", "Tell the rank of each matrix's change.")] = True,
    workers: Annotated[int | None, option("N", "How many threads to use; by default one per core.", min=1)] = None,
    json: Json = False,
    *,
    drawn: Pictures,
    opening: ForWeights,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints tensor by tensor: what is missing, added, changed, and how."""
    for library in ("OPENBLAS", "MKL"):  # read when numpy is imported, which is not yet: the threads are ours
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    what = rows_by(by)
    from ..parity.diff import diff as run
    from ..report.diff import diff_report

    with progress_bar("comparing", quiet or json) as advance:
        found = run(
            a,
            b,
            **opening,
            rank=rank,
            workers=workers,
            progress=advance,
        )
    answer(json, found.as_json, lambda: diff_report(found, what, everything), quiet, crop=False)
    if drawn:
        from ..report.diff_page import diff_page

        drawn.write(lambda: diff_page(found), quiet=quiet or json)
    if not found.same:
        raise typer.Exit(3)
