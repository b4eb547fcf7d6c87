"""The page of `params --html`: what a model holds and costs, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.costs import cache_bytes, costs
from ..analysis.figures import Asked, common_context, fits
from ..analysis.formats import weighed
from ..analysis.parameters import describe
from ..analysis.params import ModelCount
from .charts import bars, cache_chart, parameter_bars
from .diagram import block_diagram
from .pages import Figure, Lines, Page, Section, Table, counted, noted
from .plots import held, share, short
from .treemap import treemap

__all__ = ["counts_page"]

MOST_NAMES = 6
"""Models whose names make a title."""
MOST_DIAGRAMS = 4
"""Kinds of layers that are drawn; `show` has all of them."""


def counts_page(counts: Sequence[ModelCount], *, dtype: str = "bfloat16", more: Sequence[Section] = ()) -> Page:
    """The page of some models' counts.

    Args:
        counts: at least one.
        dtype: what keys and values are stored in, for the cache.
        more: sections of figures that were asked for (memory, FLOPs of a prefill), behind those that are always there.

    """
    return (_one if len(counts) == 1 else _several)(counts, dtype, more)


def _one(counts: Sequence[ModelCount], dtype: str, more: Sequence[Section]) -> Page:
    (model,) = counts
    count, spec = model.count, model.spec
    figures = costs(spec)
    facts = [("parameters", f"{count.total:,}"), ("without embedding", f"{count.non_embedding:,}")]
    facts += [("used per token", f"{figures.active:,}")] if figures.active != count.total else []
    facts += [("layers", f"{len(spec.blocks):,}"), ("hidden size", f"{spec.hidden_size:,}")]
    facts += [
        ("context", describe(spec)["context"]),
        (f"KV cache per token, {dtype}", held(cache_bytes(spec, 1, dtype).a_token)),
    ]
    return Page(
        title=model.name,
        subtitle=f"{model.family or 'of no family'}, {short(count.total)} parameters",
        facts=tuple(facts),
        sections=(
            Section("Parameters", (treemap(model.name, spec), _components(counts), *_weights(counts))),
            Section("What it is", (_aspects(counts), *_diagrams(model))),
            Section("Key-value cache", (_cache(counts, dtype), *_memory(counts))),
            Section("FLOPs", (*_flops(counts),)),
            *more,
            *noted(model.notes),
        ),
    )


def _several(counts: Sequence[ModelCount], dtype: str, more: Sequence[Section]) -> Page:
    notes = [f"{each.name}: {note}" for each in counts for note in each.notes]
    parameters = [(each.name, each.count.by_component) for each in counts]
    least, most = (pick(counts, key=lambda each: each.count.total) for pick in (min, max))
    return Page(
        title=", ".join(each.name for each in counts) if len(counts) <= MOST_NAMES else f"{len(counts)} models",
        subtitle=f"{counted(len(counts), 'model')} side by side, from {short(least.count.total)} to "
        f"{short(most.count.total)} parameters",
        sections=(
            Section(
                "Parameters",
                (
                    *parameter_bars(parameters),
                    _components(counts),
                    *_weights(counts),
                ),
            ),
            Section("What they are", (_aspects(counts),)),
            Section("Key-value cache", (_cache(counts, dtype), *_memory(counts))),
            Section("FLOPs", (*_flops(counts),)),
            *more,
            *(Section(each.name, (treemap(each.name, each.spec),)) for each in counts),
            Section("Layers", tuple(figure for each in counts for figure in _diagrams(each, each.name)), beside=True),
            *noted(notes),
        ),
    )


def _asked(counts: Sequence[ModelCount]) -> Asked:
    """What was asked for beside the count, the same of all models."""
    return next((each.figures.asked for each in counts if each.figures is not None), Asked())


def _cache(counts: Sequence[ModelCount], dtype: str) -> Figure:
    """The cache by context, at the contexts and of as many sequences as were asked for."""
    asked = _asked(counts)
    return cache_chart([(each.name, each.spec) for each in counts], dtype, batch=asked.batch, at=asked.kv)


def _weights(counts: Sequence[ModelCount]) -> tuple[Figure, ...]:
    """Bytes by component, in the dtype that was asked for."""
    told = [(each.name, dict(each.figures.weights)) for each in counts if each.figures and each.figures.weights]
    parts = [(name, {label: size for label, size in sizes.items() if label != "total"}) for name, sizes in told]
    return (bars(parts, title=f"Weights by component, {_asked(counts).dtype}", what="bytes"),) if parts else ()


def _memory(counts: Sequence[ModelCount]) -> tuple[Figure, ...]:
    """Weights and cache together, a bar a model and context; with activations where memory was asked for."""
    asked = _asked(counts)
    dtype = asked.dtype or "bfloat16"
    rows: dict[str, dict[str, int]] = {}
    for each in counts:
        if each.figures is None:
            continue
        weights = weighed(each.spec, dtype, each.family).total
        parts = {size.context: {"weights": weights, "KV cache": size.held} for size in each.figures.cache if size}
        if (run := each.figures.inference_memory) is not None:
            parts[run.context] = {"weights": run.weights, "KV cache": run.cache, "activations": run.activations}
        for context, sizes in sorted(parts.items()):
            rows[f"{each.name} {f'{asked.batch:,} × ' if asked.batch > 1 else ''}{context:,} tokens"] = sizes
    title = f"Memory to run, weights in {dtype}, cache in {asked.cached}"
    return (bars(list(rows.items()), title=title, what="bytes"),) if rows else ()


def _components(counts: Sequence[ModelCount]) -> Table:
    """A row a component, a column a model; of one model with its share."""
    labels = list(dict.fromkeys(label for each in counts for label in each.count.by_component))
    alone = len(counts) == 1
    rows: list[tuple[str, ...]] = []

    def row(label: str, numbers: Sequence[int | None]) -> None:
        cells = ["–" if number is None else f"{number:,}" for number in numbers]
        rows.append((label, *cells, *([share(numbers[0] or 0, counts[0].count.total)] if alone else [])))

    for label in labels:
        row(label, [each.count.by_component.get(label) for each in counts])
    row("total", [each.count.total for each in counts])
    row("without embedding, positions and head", [each.count.non_embedding for each in counts])
    names = ["parameters", "share"] if alone else [each.name for each in counts]
    columns = (("component", False), *((name, True) for name in names))
    return Table("Parameters by component", columns, tuple(rows), frozenset([len(labels)]), bold="the total")


def _aspects(counts: Sequence[ModelCount]) -> Table:
    """A row an aspect, a column a model."""
    words = [describe(each.spec) for each in counts]
    rows = [("family", *(each.family or "–" for each in counts))]
    every = dict.fromkeys(aspect for told in words for aspect in told)
    rows += [(aspect, *(told.get(aspect, "none") for told in words)) for aspect in every]
    names = ["what it is"] if len(counts) == 1 else [each.name for each in counts]
    return Table("What they are", (("aspect", False), *((name, False) for name in names)), tuple(rows))


def _diagrams(model: ModelCount, name: str = "") -> tuple[Figure, ...]:
    """One for each kind of layer, of the first that are of it."""
    blocks = model.spec.blocks
    kinds = [blocks.index(block) for block in dict.fromkeys(blocks)]
    return tuple(block_diagram(model.spec, layer, name) for layer in kinds[:MOST_DIAGRAMS])


def _flops(counts: Sequence[ModelCount]) -> tuple[Lines | Figure, ...]:
    """Of one token, at the context that everything on the page is told at: one for all."""
    told = next((each.figures.context for each in counts if each.figures is not None), None)
    context = common_context([each.spec for each in counts]) if told is None else told
    models = [(each.name, costs(each.spec, context).flops) for each in counts if fits(each.spec, context)]
    words = (
        f"These are the FLOPs of the forward pass for one token that sees {context:,} tokens, itself among them. In "
    )
    words += "matrix products a multiplication and its addition count as two."
    short = [each for each in counts if not fits(each.spec, context)]
    lines = Lines((words, *(f"{each.name} has positions for fewer tokens than that." for each in short)))
    return (lines, bars(models, title="FLOPs per token by component", what="FLOPs")) if models else (lines,)
