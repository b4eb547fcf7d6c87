"""The HTML page of `params`: its tables, with charts, a treemap of the parameters and diagrams of layers."""

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.aspects import describe
from ..analysis.costs import cache_bytes, costs
from ..analysis.figures import Scenario, common_context, fits
from ..analysis.formats import weighed
from ..analysis.params import ModelCount
from ..components import ModelSpec
from .charts import bars, cache_chart, parameter_bars
from .costs import cost_sheets
from .counts import component_sheet, models_sheet, promise
from .diagram import block_diagram
from .pages import Figure, Lines, Page, Section, Table, noted
from .quantities import abbreviated, abbreviated_bytes, counted
from .treemap import treemap

MOST_NAMES = 6  # if a page has more models, their names are not in its title
_MOST_DIAGRAMS = 4  # the kinds of layers that are drawn; `gptkit show` draws all


def counts_page(counts: Sequence[ModelCount], asked: Scenario | None = None) -> Page:
    """Return the HTML page of one or more models: their parameters, costs, and the figures that the user asked for."""
    asked = asked or next((model.figures.asked for model in counts if model.figures is not None), Scenario())
    blocks, aspects, costly = _component_blocks(counts, asked), _aspect_table(counts), _cost_sections(counts, asked)
    if len(counts) == 1:
        (model,) = counts
        count, spec, active = model.count, model.spec, costs(model.spec).active
        facts = [("parameters", f"{count.total:,}"), ("without embedding", f"{count.non_embedding:,}")]
        facts += [("used per token", f"{active:,}")] if active != count.total else []
        facts += [("layers", f"{len(spec.blocks):,}"), ("hidden size", f"{spec.hidden_size:,}")]
        facts += [("context", describe(spec)["context"])]
        cached = abbreviated_bytes(cache_bytes(spec, 1, asked.cached).bytes_per_token)
        facts += [(f"KV cache per token, {asked.cached}", cached)]
        subtitle = f"{model.family or 'unknown family'}, {abbreviated(count.total)} parameters"
        sections = [
            Section("Parameters", (treemap(model.name, spec), *blocks)),
            Section("What it is", (aspects, *layer_diagrams(spec))),
            *costly,
            *noted(model.notes),
        ]
        return Page(model.name, subtitle, facts=tuple(facts), sections=tuple(sections))
    totals, many = [model.count.total for model in counts], counted(len(counts), "model")
    layers = [figure for model in counts for figure in layer_diagrams(model.spec, model.name)]
    charts = parameter_bars([(model.name, model.count.by_component) for model in counts])
    sections = [
        Section("Parameters", (*charts, *blocks)),
        Section("What they are", (aspects,)),
        *costly,
        *(Section(model.name, (treemap(model.name, model.spec),)) for model in counts),
        Section("Layers", tuple(layers), side_by_side=True),
        *noted([f"{model.name}: {note}" for model in counts for note in model.notes]),
    ]
    return Page(
        title=", ".join(model.name for model in counts) if len(counts) <= MOST_NAMES else many,
        subtitle=f"{many} side by side, from {abbreviated(min(totals))} to {abbreviated(max(totals))} parameters",
        sections=tuple(sections),
    )


def _compared(counts: Sequence[ModelCount]) -> bool:
    """Return whether these are two models, of which the second is the first one after a swap."""
    return len(counts) == 2 and counts[1].swap is not None


def _component_blocks(counts: Sequence[ModelCount], asked: Scenario) -> list[Table | Figure]:
    """Return the table of components, as in the terminal, and with a dtype also a chart of the weights' bytes."""
    sheet = models_sheet(counts, asked.dtype, _compared(counts))
    if len(counts) == 1:
        sheet = component_sheet(counts[0], asked.dtype)
    weights = [(model.name, model.figures.weights) for model in counts if model.figures and model.figures.weights]
    parts = [(name, {part: size for part, size in sizes.items() if part != "total"}) for name, sizes in weights]
    blocks: list[Table | Figure] = [replace(sheet, title="Parameters by component").as_table()]
    return blocks + ([bars(parts, title=f"Weights by component, {asked.dtype}", what="bytes")] if parts else [])


def _aspect_table(counts: Sequence[ModelCount]) -> Table:
    words = [describe(model.spec) for model in counts]
    rows = [("family", *(model.family or "–" for model in counts))]
    for aspect in dict.fromkeys(aspect for of_model in words for aspect in of_model):
        rows.append((aspect, *(of_model.get(aspect, "none") for of_model in words)))
    names = ["what it is"] if len(counts) == 1 else [model.name for model in counts]
    return Table("What they are", (("aspect", False), *((name, False) for name in names)), tuple(rows))


def _cost_sections(counts: Sequence[ModelCount], asked: Scenario) -> list[Section]:
    """Return the sections on the cache, on FLOPs, on figures that the user asked for, and on guarantees of swaps."""
    named = [(model.name, model.spec) for model in counts]
    cache = cache_chart(named, asked.cached, batch=asked.batch, at=asked.kv)
    sections = [Section("Key-value cache", (cache, *_memory(counts, asked))), Section("FLOPs", _flops(counts))]
    for sheet in cost_sheets(counts, asked, compared=_compared(counts)):
        if sheet.rows:
            notes = [Lines(sheet.notes)] if sheet.notes else []
            sections.append(Section(sheet.title, (sheet.as_table(), *notes)))
    for model in counts:
        if model.swap is not None:
            lines = (f"Guarantee: {promise(model.swap)}", *model.swap["notes"])
            sections.append(Section(f"{model.name}: guarantee", (Lines(lines, listed=True),)))
    return sections


def _memory(counts: Sequence[ModelCount], asked: Scenario) -> list[Figure]:
    """Return a chart of the memory for weights and cache, by model and context.

    It includes activations if the user asked for memory.
    """
    dtype = asked.dtype or "bfloat16"
    rows: dict[str, dict[str, int]] = {}
    for model in counts:
        if model.figures is None:
            continue
        weights = weighed(model.spec, dtype, model.family).total
        parts = {size.context: {"weights": weights, "KV cache": size.nbytes} for size in model.figures.cache if size}
        if (run := model.figures.inference_memory) is not None:
            parts[run.context] = {"weights": run.weights, "KV cache": run.cache, "activations": run.activations}
        for context, sizes in sorted(parts.items()):
            rows[f"{model.name} {f'{asked.batch:,} × ' if asked.batch > 1 else ''}{context:,} tokens"] = sizes
    title = f"Memory to run, weights in {dtype}, cache in {asked.cached}"
    return [bars(list(rows.items()), title=title, what="bytes")] if rows else []


def layer_diagrams(spec: ModelSpec, name: str = "") -> list[Figure]:
    """Return a diagram of one layer of every kind that the model has, up to `_MOST_DIAGRAMS` diagrams."""
    layers = [spec.blocks.index(block) for block in dict.fromkeys(spec.blocks)]
    return [block_diagram(spec, layer, name) for layer in layers[:_MOST_DIAGRAMS]]


def _flops(counts: Sequence[ModelCount]) -> tuple[Lines | Figure, ...]:
    """Return an explanation and a chart of the FLOPs of one token, for all models at the same context."""
    context = next((model.figures.context for model in counts if model.figures is not None), None)
    context = common_context([model.spec for model in counts]) if context is None else context
    able = [(model.name, costs(model.spec, context).flops) for model in counts if fits(model.spec, context)]
    lines = [
        f"These are the FLOPs of the forward pass for one token that sees {context:,} tokens, itself included. In"
        " matrix products a multiplication and its addition count as two."
    ]
    lines += [f"{model.name} has fewer positions than that." for model in counts if not fits(model.spec, context)]
    return Lines(tuple(lines)), *([bars(able, title="FLOPs per token by component", what="FLOPs")] if able else [])
