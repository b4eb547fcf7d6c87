"""compare: what differs between models, from their configs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..terminal import console
from .base import Html, Json, Models, Offline, Png, Svg, app, examples, guarded, tokens
from .drawn import Drawn

if TYPE_CHECKING:
    from ..analysis.params import Described


@app.command(
    epilog=examples(
        "gptkit compare gpt2 llama-2-7b bloom-7b1 falcon-7b",
        "gptkit compare llama-2-7b llama-3.1-8b --only-differences --context 4k",
        "gptkit compare gpt2 qwen3-8b --markdown",
        "gptkit compare llama-2-7b --swap attention=gqa:8",
    )
)
@guarded
def compare(
    models: Models,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="In sight, for costs; else what all of them are for.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16, …")] = "bfloat16",
    only_differences: Annotated[bool, typer.Option("--only-differences", help="Leave out what is alike.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Add details that are alike.")] = False,
    swap: Annotated[
        list[str] | None, typer.Option(metavar="OPTION=VALUE", help="Beside each model, what this makes of it.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="The same, of a recipe of swaps.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a README or a paper.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json: Json = False,
    html: Html = None,
    png: Png = None,
    svg: Svg = None,
    offline: Offline = False,
) -> None:
    """Compare components and costs of models, side by side."""
    from ..analysis.compare import comparison, describe_named
    from ..analysis.figures import Asked

    if sum((markdown, csv, json)) > 1:
        raise UsageError("--markdown, --csv and --json are three outputs", "Give one of them.")
    if only_differences and everything:
        raise UsageError("--only-differences and --all are opposites", "Give one of them.")
    drawn = Drawn(html, png, svg)
    asked = Asked(dtype=dtype, context=None if context is None else tokens("--context", context))
    named = [(model, describe_named(model, offline)) for model in models]
    if swap or recipe is not None:
        named = [each for one in named for each in (one, after_swaps(*one, swap or [], recipe, offline))]
    found = comparison(named, asked)
    rows = found.shown(everything=everything, only_differences=only_differences)
    from ..report import comparison as report

    if json:
        from ..report.tables import print_json

        print_json(found.as_json())
    elif csv or markdown:
        sys.stdout.write(report.comparison_csv(found, rows) if csv else report.comparison_markdown(found, rows))
    else:
        console().print(report.comparison_table(found, rows))
    if drawn:
        from ..report.comparison_page import comparison_page

        drawn.write(lambda: comparison_page(found, rows), quiet=json or csv or markdown)


def after_swaps(
    name: str, model: Described, swap: list[str], recipe: str | None, offline: bool
) -> tuple[str, Described]:
    """What swaps make of a model, from its shapes. Raises SwapRefused, and UsageError for an unknown swap."""
    from ..analysis.expressed import expressed
    from ..analysis.params import Described
    from ..surgery.shapes import steps_from, swapped

    folder = Path(name)
    found = swapped(
        model.spec,
        steps_from(swap, recipe),
        model.family or None,
        name,
        files=folder if folder.is_dir() else None,
        offline=offline,
    )
    notes = (f"{', '.join(map(str, found.steps))}: {found.guarantee}", *found.notes)
    return f"{name} swapped", Described(expressed(found.spec)[0] or "", found.spec, notes=notes)
