"""The command draft, which drafts the definition of an unknown family."""

from pathlib import Path

import typer

from ..terminal import print_json, say, status, wrapped
from .base import JSON, MODEL, QUIET, ForTree, command, option


@command(
    "gptkit draft ./exported --out definition.py   (exit 3: a proof failed)",
    "gptkit draft sample:llama --without llama --out own.py",
)
def draft(
    model: str = MODEL,
    out: Path = option("--out FILE", "The Python file to write the definition to, such as definition.py.", default=...),
    *,
    without: list[str] | None = option(
        "--without FAMILY",
        "Ignore gptkit's own definition of this family, such as llama, to try draft on a family that gptkit "
        "supports. Repeatable.",
    ),
    opening: ForTree,
    json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Draft the definition of a model family that gptkit does not know, and test it."""
    from ..drafting.draft import draft as run
    from ..drafting.draft import lines

    with status("drafting", quiet or json) as tell:
        result = run(model, out, without=without or (), progress=tell, **opening)
    if json:
        print_json({"schema_version": 1, **result.as_json()})
    else:
        say([part for line in lines(result) for part in wrapped(line, 80)], quiet)
    if not result.passed:
        raise typer.Exit(3)
