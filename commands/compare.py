"""compare: what differs between models, from their configs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..terminal import console
from .base import AllowPickle, FigureName, Html, Json, Models, Offline, Png, Svg, app, examples, guarded, tokens
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
        str | None,
        typer.Option(
            metavar="TOKENS", help="The context that costs are for; by default one that all of the models are made for."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The dtype of weights and KV cache: float32, bfloat16, …")
    ] = "bfloat16",
    only_differences: Annotated[
        bool, typer.Option("--only-differences", help="Leave out the rows in which all models are alike.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Add the details in which all models are alike.")] = False,
    swap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE", help="Also compare what a swap would make of each model: attention=gqa:8."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also compare what a recipe of swaps would make of each model.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, for a README or a paper.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    json: Json = False,
    html: Html = None,
    png: Png = None,
    svg: Svg = None,
    figure: FigureName = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Compare components and costs of models, side by side."""
    from ..analysis.compare import comparison, describe_named
    from ..analysis.figures import Asked

    if sum((markdown, csv, json)) > 1:
        raise UsageError("--markdown, --csv and --json are three outputs", "Give one of them.")
    if only_differences and everything:
        raise UsageError("--only-differences and --all are opposites", "Give one of them.")
    drawn = Drawn(html, png, svg, figure)
    asked = Asked(dtype=dtype, context=None if context is None else tokens("--context", context))
    named = [(model, describe_named(model, offline, allow_pickle)) for model in models]
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
    from ..analysis.params import Described
    from ..architectures import expressed
    from ..surgery.shapes import steps_from, swapped
    from ..surgery.synonyms import guarantee_in_words

    folder = Path(name)
    found = swapped(
        model.spec,
        steps_from(swap, recipe),
        model.family or None,
        name,
        files=folder if folder.is_dir() else None,
        offline=offline,
    )
    notes = (f"{', '.join(map(str, found.steps))}: {guarantee_in_words(found.guarantee)}", *found.notes)
    return f"{name} swapped", Described(expressed(found.spec)[0] or "", found.spec, notes=notes)
