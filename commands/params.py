"""params and presets: what a model's config alone tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..terminal import answer, console, print_json, say
from .base import ROWS, By, ForTree, Json, Models, Pictures, app, examples, guarded, memory_of, option, rows_by, tokens
from .completion import FLOATS, one_of

if TYPE_CHECKING:
    from ..analysis.figures import Asked
    from ..analysis.params import ModelCount
    from ..report.pages import Page

WEIGHTS, COSTS, SWAPS = "Parameters", "Costs", "What if"


@app.command(
    epilog=examples(
        "gptkit params qwen3-8b",
        "gptkit params gpt2 llama-3-8b bloom-7b1 falcon-7b",
        "gptkit params mixtral-8x7b --by tensor --dtype int4",
        "gptkit params llama-3-8b --kv 8192,131072 --flops --memory --context 8192",
        "gptkit params llama-3-8b --gpu 24GB",
        "gptkit params gpt2 --explain",
        "gptkit params llama-2-7b --swap attention=gqa:4 --kv 4096",
    )
)
@guarded
def params(
    models: Models,
    by: Annotated[
        str,
        option(
            "--by component | layer | tensor",
            "What each row of the table stands for.",
            WEIGHTS,
            complete=one_of(ROWS),
        ),
    ] = "component",
    by_layer: Annotated[bool, option("--by-layer", "", hidden=True)] = False,
    dtype: Annotated[
        str | None,
        option(
            "DTYPE",
            "Add the bytes of the weights as float32, bfloat16, float8, int8, int4, q8_0, q4_k_m, q4_0, nf4, …",
            WEIGHTS,
            complete=one_of((*FLOATS, "float8", "int8", "int4", "q8_0", "q4_k_m", "q4_0", "nf4")),
        ),
    ] = None,
    explain: Annotated[
        bool, option("--explain", "Derive the total as a formula, with the model's numbers.", WEIGHTS)
    ] = False,
    stored: Annotated[
        bool, option("--stored", "Add the dtypes and bytes that the headers of the weight files tell.", WEIGHTS)
    ] = False,
    kv: Annotated[
        list[str] | None, option("--kv TOKENS", "Add the KV cache at these contexts: 8192, or 2k,128k.", COSTS)
    ] = None,
    kv_dtype: Annotated[
        str | None, option("DTYPE", "The dtype of the KV cache; by default that of the activations.", COSTS)
    ] = None,
    flops: Annotated[
        bool, option("--flops", "Add the FLOPs per token, of a prefill, and of a training step.", COSTS)
    ] = False,
    memory: Annotated[
        bool, option("--memory", "Add the memory to run the model, and to train it with Adam.", COSTS)
    ] = False,
    context: Annotated[
        str | None,
        option(
            "TOKENS", "The context of --flops and --memory; by default the one that the models are made for.", COSTS
        ),
    ] = None,
    batch: Annotated[int, option("N", "How many sequences --kv, --flops and --memory are for.", COSTS)] = 1,
    gpu: Annotated[
        str | None,
        option("--gpu SIZE", "Say what fits in a GPU's memory, 24GB or 80GiB: which dtype, context and batch.", COSTS),
    ] = None,
    tp: Annotated[
        int, option("--tp N", "Tell what each of N GPUs holds that share every layer.", COSTS, show_default=False)
    ] = 1,
    pp: Annotated[
        int, option("--pp N", "Tell what each GPU holds with the layers in N stages.", COSTS, show_default=False)
    ] = 1,
    swap: Annotated[
        list[str] | None,
        option("OPTION=VALUE", "Also count what a swap would make of each model: attention=gqa:4.", SWAPS),
    ] = None,
    recipe: Annotated[
        str | None, option("NAME | FILE", "Also count what a recipe of swaps would make of each model.", SWAPS)
    ] = None,
    json: Json = False,
    csv: Annotated[
        bool, option("--csv", "Print CSV: a row per component, layer or tensor; of costs a row per model.")
    ] = False,
    *,
    drawn: Pictures,
    opening: ForTree,
) -> None:
    """Count parameters, and what they cost, from a config alone."""
    from ..analysis.figures import Asked
    from ..analysis.params import ModelCount, with_figures
    from ..analysis.params import params as count_params

    asked = Asked(
        dtype,
        tuple(dict.fromkeys(tokens("--kv", each) for text in kv or () for each in text.split(","))),
        kv_dtype,
        flops,
        memory,
        None if context is None else tokens("--context", context),
        batch,
        explain,
        memory_of("--gpu", gpu),
        tp,
        pp,
    )
    what = rows_by("layer" if by_layer else by)
    _sensible(models, asked, what, batch, context, json, csv, stored)
    counts: list[ModelCount] = count_params(*models, stored=stored, **opening)
    if swap or recipe:
        from .reshaped import reshaped

        swapped = []
        for model, found, family in reshaped(counts, swap, recipe, opening["offline"]):
            name = f"{model.name} {' '.join(map(str, found.steps))}"
            summary = {"of": model.name, **found.as_json()}
            swapped += [model, ModelCount(name, family, found.spec, swap=summary)]
        counts = swapped
    counts = with_figures(counts, asked)
    pairs = bool(swap or recipe)
    if json:
        print_json({"schema_version": 1, "models": [each.as_json(tensors=what == "tensor") for each in counts]})
    elif csv:
        from ..report.rows import count_rows, model_rows, write_csv

        write_csv(model_rows(counts) if asked.more else count_rows(counts, what, asked.dtype))
    else:
        _print(counts, asked, what, pairs)
    drawn.write(lambda: _page(counts, asked), quiet=json or csv)


def _sensible(
    models: list[str], asked: Asked, by: By, batch: int, context: str | None, json: bool, csv: bool, stored: bool
) -> None:
    """Refuse options that would do nothing, before any work."""
    number = next((each for each in models if re.fullmatch("[0-9]+k?", each) and not Path(each).exists()), None)
    if number is not None and (asked.flops or asked.memory):
        raise UsageError(f"{number} is no model, and --flops and --memory take no number", f"--context {number}")
    if json and csv:
        raise UsageError("--json and --csv are two formats of the same", "Leave one of them out.")
    if csv and stored:
        raise UsageError("--csv has no columns for what is --stored", "--json tells it, tensor by tensor.")
    if csv and by != "component" and asked.more:
        raise UsageError(f"--csv has one table: --by {by}, or costs, a row a model", "Call it twice.")
    if context is not None and not asked.at_context:
        raise UsageError(
            "--context is for --flops and --memory, --gpu, --tp and --pp", "--kv names contexts of its own."
        )
    if batch != 1 and not (asked.kv or asked.at_context):
        raise UsageError(
            "--batch is for --kv, --flops, --memory, --gpu, --tp and --pp", "Parameters are the same for any."
        )
    if asked.kv_dtype is not None and not (asked.kv or asked.memory or asked.gpu or asked.spread):
        raise UsageError("--kv-dtype is for --kv and --memory, --gpu, --tp and --pp", "--dtype is that of the weights.")


def _promise(swap: Mapping[str, Any]) -> str:
    """What a chain of swaps promises; where the weights decide it, what trained ones give, and who can tell."""
    from ..surgery.options import guarantee_in_words

    usual = guarantee_in_words(swap["usual"])
    if swap["guarantee"] == swap["usual"]:
        return usual
    return f"{usual} on trained weights; gptkit swap MODEL OUT --dry-run tells it of yours"


def _print(counts: list[ModelCount], asked: Asked, by: By, pairs: bool) -> None:
    """Tables: of all models side by side, or of each beside what it becomes."""
    from ..report.sheets import sentences
    from ..report.tables import parameter_table

    out, size = console(), 2 if pairs else len(counts)
    for first in range(0, len(counts), size):
        some = counts[first : first + size]
        names = [each.name for each in some]
        if pairs:
            say([*([""] if first else []), names[1], ""], quiet=False)
            names = ["now", "swapped"]
        table = [(name, each.family, each.spec, each.count) for name, each in zip(names, some, strict=True)]
        out.print(parameter_table(table, by, asked.dtype, compared=pairs))
        if asked.more or asked.dtype:
            from ..report.costs import cost_sheets

            told = [(name, each.spec, each.figures) for name, each in zip(names, some, strict=True) if each.figures]
            for sheet in cost_sheets(told, asked, compared=pairs):
                out.print()
                out.print(sheet)
        for each in some:
            if each.swap is not None:
                out.print()
                out.print(sentences((f"guarantee: {_promise(each.swap)}", *each.swap["notes"])))
    if any(each.revision or each.notes or each.stored for each in counts):
        from ..report.summaries import source_lines

        say(["", *source_lines(counts)], quiet=False)


def _page(counts: list[ModelCount], asked: Asked) -> Page:
    from ..report.costs import cost_sheets
    from ..report.counts_page import counts_page
    from ..report.pages import Lines, Section

    told = [(each.name, each.spec, each.figures) for each in counts if each.figures]
    more = tuple(
        Section(sheet.title, (sheet.as_table(), *([Lines(sheet.notes)] if sheet.notes else [])))
        for sheet in cost_sheets(told, asked, compared=len(counts) == 2 and counts[1].swap is not None)
        if sheet.rows
    )
    for each in counts:
        if each.swap is not None:
            lines = (f"Guarantee: {_promise(each.swap)}", *each.swap["notes"])
            more += (Section(f"{each.name}: what it promises", (Lines(lines, listed=True),)),)
    return counts_page(counts, dtype=asked.cached, more=more)


@app.command(
    epilog=examples(
        "gptkit presets", "gptkit presets qwen", "gptkit presets llama-2 --names   (for gptkit params $(…))"
    )
)
@guarded
def presets(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="List only presets that have all of these words in their names."),
    ] = None,
    names: Annotated[bool, option("-n --names", "Print names alone, one per line.")] = False,
    json: Json = False,
) -> None:
    """List the models that params knows by name."""
    from ..architectures.presets import nearest
    from ..architectures.presets import presets as known
    from ..report.presets import preset_json, preset_table

    wanted = [word.lower() for word in words or ()]
    found = [
        each
        for each in known().values()
        if all(any(word in name.lower() for name in (*each.known_as, each.config["model_type"])) for word in wanted)
    ]
    if not found:
        near = nearest(" ".join(wanted))
        raise UsageError(
            f"no preset has {' and '.join(map(repr, wanted)):.80} in its name",
            f"did you mean {', '.join(near[:4])}?" if near else "gptkit presets lists all of them",
        )
    if names and not json:
        say([each.name for each in found], quiet=False)
    else:
        data = {"schema_version": 1, "presets": [preset_json(each) for each in found]}
        answer(json, lambda: data, lambda: preset_table(found))
