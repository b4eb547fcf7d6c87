"""The page of `params`: what its tables tell, with charts, a map of the parameters and diagrams of layers."""

from collections.abc import Sequence

from ..analysis.aspects import describe
from ..analysis.costs import cache_bytes, costs
from ..analysis.figures import Scenario, common_context, fits
from ..analysis.formats import weighed
from ..analysis.params import ModelCount
from ..components import ModelSpec
from .charts import bars, cache_chart, parameter_bars
from .costs import cost_sheets
from .counts import promise
from .diagram import block_diagram
from .pages import Figure, Lines, Page, Section, Table, noted
from .quantities import abbreviated, abbreviated_bytes, counted, unbroken_percentage
from .treemap import treemap

MOST_NAMES = 6  # models whose names make a page's title
_MOST_DIAGRAMS = 4  # kinds of layers that are drawn; `show` has all of them


def counts_page(counts: Sequence[ModelCount], asked: Scenario | None = None) -> Page:
    """The page of some models' counts, at least one: what each holds and costs, and figures that were asked for."""
    asked = asked or next((model.figures.asked for model in counts if model.figures is not None), Scenario())

    more = [
        Section(sheet.title, (sheet.as_table(), *([Lines(sheet.notes)] if sheet.notes else [])))
        for sheet in cost_sheets(counts, asked, compared=len(counts) == 2 and counts[1].swap is not None)
        if sheet.rows
    ]
    for model in counts:
        if model.swap is not None:
            lines = (f"Guarantee: {promise(model.swap)}", *model.swap["notes"])
            more.append(Section(f"{model.name}: what it promises", (Lines(lines, listed=True),)))
    weights = [(each.name, each.figures.weights) for each in counts if each.figures and each.figures.weights]
    parts = [(name, {part: size for part, size in sizes.items() if part != "total"}) for name, sizes in weights]
    components: list[Table | Figure] = [_components(counts)]
    components += [bars(parts, title=f"Weights by component, {asked.dtype}", what="bytes")] if parts else []
    words = [describe(model.spec) for model in counts]
    rows = [("family", *(model.family or "–" for model in counts))]
    for aspect in dict.fromkeys(aspect for of_model in words for aspect in of_model):
        rows.append((aspect, *(of_model.get(aspect, "none") for of_model in words)))
    names = ["what it is"] if len(counts) == 1 else [model.name for model in counts]
    aspects = Table("What they are", (("aspect", False), *((name, False) for name in names)), tuple(rows))
    cache = cache_chart([(each.name, each.spec) for each in counts], asked.cached, batch=asked.batch, at=asked.kv)
    costly = (Section("Key-value cache", (cache, *_memory(counts, asked))), Section("FLOPs", _flops(counts)), *more)
    if len(counts) == 1:
        (model,) = counts
        count, spec, active = model.count, model.spec, costs(model.spec).active
        facts = [("parameters", f"{count.total:,}"), ("without embedding", f"{count.non_embedding:,}")]
        facts += [("used per token", f"{active:,}")] if active != count.total else []
        facts += [("layers", f"{len(spec.blocks):,}"), ("hidden size", f"{spec.hidden_size:,}")]
        facts += [("context", words[0]["context"])]
        facts += [
            (f"KV cache per token, {asked.cached}", abbreviated_bytes(cache_bytes(spec, 1, asked.cached).a_token))
        ]
        subtitle = f"{model.family or 'of no family'}, {abbreviated(count.total)} parameters"
        sections = [
            Section("Parameters", (treemap(model.name, spec), *components)),
            Section("What it is", (aspects, *layer_diagrams(spec))),
            *costly,
            *noted(model.notes),
        ]
        return Page(model.name, subtitle, facts=tuple(facts), sections=tuple(sections))
    totals = [model.count.total for model in counts]
    many = counted(len(counts), "model")
    layers = [figure for model in counts for figure in layer_diagrams(model.spec, model.name)]
    charts = parameter_bars([(each.name, each.count.by_component) for each in counts])
    sections = [
        Section("Parameters", (*charts, *components)),
        Section("What they are", (aspects,)),
        *costly,
        *(Section(model.name, (treemap(model.name, model.spec),)) for model in counts),
        Section("Layers", tuple(layers), beside=True),
        *noted([f"{model.name}: {note}" for model in counts for note in model.notes]),
    ]
    return Page(
        title=", ".join(model.name for model in counts) if len(counts) <= MOST_NAMES else f"{len(counts)} models",
        subtitle=f"{many} side by side, from {abbreviated(min(totals))} to {abbreviated(max(totals))} parameters",
        sections=tuple(sections),
    )


def _memory(counts: Sequence[ModelCount], asked: Scenario) -> list[Figure]:
    """Weights and cache together, a bar a model and context; with activations where memory was asked for."""
    dtype = asked.dtype or "bfloat16"
    rows: dict[str, dict[str, int]] = {}
    for model in counts:
        if model.figures is None:
            continue
        weights = weighed(model.spec, dtype, model.family).total
        parts = {size.context: {"weights": weights, "KV cache": size.held} for size in model.figures.cache if size}
        if (run := model.figures.inference_memory) is not None:
            parts[run.context] = {"weights": run.weights, "KV cache": run.cache, "activations": run.activations}
        for context, sizes in sorted(parts.items()):
            rows[f"{model.name} {f'{asked.batch:,} × ' if asked.batch > 1 else ''}{context:,} tokens"] = sizes
    title = f"Memory to run, weights in {dtype}, cache in {asked.cached}"
    return [bars(list(rows.items()), title=title, what="bytes")] if rows else []


def _components(counts: Sequence[ModelCount]) -> Table:
    """A row a component, a column a model; of one model with its share."""
    labels = list(dict.fromkeys(label for model in counts for label in model.count.by_component))
    alone = len(counts) == 1
    listed = [(label, [model.count.by_component.get(label) for model in counts]) for label in labels]
    listed.append(("total", [model.count.total for model in counts]))
    listed.append(("without embedding, positions and head", [model.count.non_embedding for model in counts]))
    rows = []
    for label, numbers in listed:
        cells = ["–" if number is None else f"{number:,}" for number in numbers]
        rows.append((label, *cells, *([unbroken_percentage(numbers[0] or 0, counts[0].count.total)] if alone else [])))
    names = ["parameters", "share"] if alone else [model.name for model in counts]
    columns = (("component", False), *((name, True) for name in names))
    return Table("Parameters by component", columns, tuple(rows), frozenset([len(labels)]), bold="the total")


def layer_diagrams(spec: ModelSpec, name: str = "") -> list[Figure]:
    """One for each kind of layer, of the first that is of it; of many kinds the first ones."""
    kinds = [spec.blocks.index(block) for block in dict.fromkeys(spec.blocks)]
    return [block_diagram(spec, layer, name) for layer in kinds[:_MOST_DIAGRAMS]]


def _flops(counts: Sequence[ModelCount]) -> tuple[Lines | Figure, ...]:
    """Of one token, at the context that everything on the page is told at: one for all."""
    context = next((model.figures.context for model in counts if model.figures is not None), None)
    context = common_context([model.spec for model in counts]) if context is None else context
    able = [(model.name, costs(model.spec, context).flops) for model in counts if fits(model.spec, context)]
    lines = [
        f"These are the FLOPs of the forward pass for one token that sees {context:,} tokens, itself included. In"
        " matrix products a multiplication and its addition count as two."
    ]
    unable = [model.name for model in counts if not fits(model.spec, context)]
    lines += [f"{name} has fewer positions than that." for name in unable]
    return Lines(tuple(lines)), *([bars(able, title="FLOPs per token by component", what="FLOPs")] if able else [])
