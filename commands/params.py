"""params and presets: what a model's config alone tells."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal import console, say
from .base import Json, Models, Offline, app, examples, guarded


@app.command(epilog=examples("gptkit params qwen3-8b", "gptkit params gpt2 llama-3-8b bloom-7b1 falcon-7b"))
@guarded
def params(
    models: Models,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Add each layer.")] = False,
    stored: Annotated[
        bool, typer.Option("--stored", help="Add dtypes and bytes, from the headers of the weight files.")
    ] = False,
    json: Json = False,
    offline: Offline = False,
) -> None:
    """Count parameters per component, from a config alone."""
    from ..analysis.params import params as count_params
    from ..report.tables import parameter_table, print_json

    counts = count_params(*models, offline=offline, stored=stored)
    if json:
        print_json({"schema_version": 1, "models": [each.as_json() for each in counts]})
    else:
        console().print(parameter_table([(c.name, c.family, c.spec, c.count) for c in counts], by_layer))
        if any(each.revision or each.notes or each.stored for each in counts):
            from ..report.summaries import source_lines

            say(["", *source_lines(counts)], quiet=False)


@app.command(epilog=examples("gptkit presets"))
@guarded
def presets(json: Json = False) -> None:
    """List the models that params knows by name."""
    from ..architectures.presets import presets as known
    from ..report.summaries import preset_table
    from ..report.tables import print_json

    if json:
        print_json(
            [{"name": p.name, "aliases": list(p.aliases), "repo": p.repo, "source": p.source} for p in known().values()]
        )
    else:
        console().print(preset_table(list(known().values())))
