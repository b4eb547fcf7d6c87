"""The damage report as a page: by position, by layer, and where it is born; and the same figures as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..surgery.options import guarantee_in_words
from ..version import __version__
from .heatmap import Cell, heatmap
from .pages import Figure, Lines, Page, Section, Table, counted, noted, ready, write_page
from .summaries import damage_or_change, number
from .surgery import steps_cells, steps_words

if TYPE_CHECKING:
    from ..parity.damage import Bin, Damage, Layer, Place
    from ..surgery.swap import SwapResult

__all__ = ["damage_sections", "report_paths", "swap_page", "write_report"]

ROUNDING = 1e-9
"""KL in nats up to which rounding in fp32 explains it."""


def damage_sections(found: Damage) -> tuple[Section, ...]:
    """What a page says of it, under three headings."""
    words = [
        f"Both models on {found.on}, in {found.dtype}. KL is the divergence of the result's next token from the"
        " original's, in nats."
    ]
    what = damage_or_change(found).capitalize()
    sections = [Section(f"{what} by position", (Lines(tuple(words)), _position_table(found)))]
    if found.layers:
        lens = "What each model would say if it ended after a layer: its last norm and head on its residual stream."
        sections.append(Section(f"{what} by layer", (Lines((lens,)), _lens_figure(found), _layer_table(found.layers))))
    if found.places:
        sections.append(Section("Where it begins", (Lines((_born_words(found),)), _places_figure(found.places))))
    return (*sections, *noted(found.notes, "What was not measured"))


def swap_page(result: SwapResult, found: Damage) -> Page:
    """The page of a swap."""
    total, measured = found.total, result.measured
    facts = [
        ("guarantee", guarantee_in_words(result.guarantee)),
        ("KL, nats per token", number(total.kl)),
        ("top-1", f"{total.top1:.1%}"),
    ]
    facts += [("perplexity", _from_to(total))] if total.before is not None else []
    if measured is not None:
        facts += [(f"relative error in {dtype}", number(error)) for dtype, error in measured.relative.items()]
    before, after = result.parameters
    facts.append(("parameters", f"{before:,}" if before == after else f"{before:,} → {after:,}"))
    exact = result.guarantee == "exact"
    return Page(
        title=str(result.target),
        subtitle=f"swapped from {result.source.reference}",
        verdict="The same function" if exact else f"Changed: KL {number(total.kl)} nats per token",
        good=True if exact else None,  # what is not exact is what was asked for, and no failure
        facts=(*facts, ("gptkit", __version__)),
        sections=(*_steps(result), *damage_sections(found)),
    )


def _steps(result: SwapResult) -> tuple[Section, ...]:
    """What each step of several costs by itself, as the command prints it."""
    if len(result.chain.steps) < 2:
        return ()
    columns, rows = steps_cells(result)
    table = Table("Steps", columns, tuple(rows))
    words = (Lines((f"{steps_words(result)[0].upper()}{steps_words(result)[1:]}.",)),) if result.each else ()
    return (Section("Step by step", (*words, table)),)


def report_paths(path: Path) -> tuple[Path, Path]:
    """The page and the figures beside it, whatever ending `path` has. Raises UsageError where one cannot be written."""
    paths = path.with_suffix(".html"), path.with_suffix(".json")
    for each in paths:
        ready(each)
    return paths


def write_report(result: SwapResult, found: Damage, path: Path) -> tuple[Path, Path]:
    """Write the page of a swap and its figures as JSON; returns both paths.

    Raises:
        UsageError: they cannot be written, or a package is missing.

    """
    page, figures = report_paths(path)
    write_page(swap_page(result, found), page)
    data = {
        "schema_version": 1,
        "source": result.source.reference,
        "target": str(result.target),
        "guarantee": result.guarantee,
        "damage": found.as_json(),
    }
    try:
        figures.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {figures}: {error.strerror}") from error
    return page, figures


# --- by position ------------------------------------------------------------------------------------------------------


def _position_table(found: Damage) -> Table:
    rows = [_bin_row(each.name, each) for each in found.bins]
    columns = [("position", False), ("tokens", True), ("KL", True), ("top-1", True)]
    if found.total.before is not None:
        columns += [("perplexity before", True), ("and after", True)]
    worst = max(range(len(rows)), key=lambda index: _or_infinite(found.bins[index].kl))
    lit = frozenset([worst] if found.bins[worst].kl > ROUNDING else [])
    return Table("By position", tuple(columns), (*rows, _bin_row("all", found.total)), lit, bold="the largest KL")


def _bin_row(name: str, each: Bin) -> tuple[str, ...]:
    row = (name, f"{each.positions:,}", number(each.kl), f"{each.top1:.1%}")
    return row if each.before is None or each.after is None else (*row, _plain(each.before), _plain(each.after))


def _from_to(each: Bin) -> str:
    assert each.before is not None and each.after is not None
    return f"{_plain(each.before)} → {_plain(each.after)}"


def _plain(perplexity: float) -> str:
    return f"{perplexity:#,.4g}".rstrip(".") if perplexity < 1e6 else f"{perplexity:.1e}"


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


# --- by layer ---------------------------------------------------------------------------------------------------------


def _lens_figure(found: Damage) -> Figure:
    """A row a bin of positions, a column a layer."""
    cells = []
    for layer in found.layers:
        for each, value in zip(found.bins, layer.by_bin, strict=True):
            told = (f"KL: {number(value)} nats per token", f"at position {each.name}", _pair(layer))
            cells.append(Cell(f"at {each.name}", layer.after, _or_infinite(value), told, not value <= ROUNDING))
    worst = max(found.layers, key=lambda layer: _or_infinite(layer.kl))
    columns = (("layer", False), *((f"at {each.name}", True) for each in found.bins))
    rows = tuple((str(layer.after), *map(number, layer.by_bin)) for layer in found.layers)
    return heatmap(
        cells,
        down="position",
        title="KL by layer and position",
        summary=f"KL if both models ended after a layer; largest after layer {worst.after}, {number(worst.kl)} nats"
        " per token over all positions. The last layer's is that of the models.",
        measure="KL, nats per token",
        table=Table(f"{counted(len(rows), 'layer')} as a table", columns, rows, folded=True),
    )


def _pair(layer: Layer) -> str:
    same = layer.before == layer.after
    return f"after layer {layer.after} of both" if same else f"after layers {layer.before} and {layer.after}"


def _layer_table(layers: tuple[Layer, ...]) -> Table:
    columns = [("layer", False), ("residual streams differ by", True), ("KL", True), ("top-1", True)]
    text = layers[0].perplexity_before is not None
    columns += [("perplexity before", True), ("and after", True)] if text else []
    rows = []
    for each in layers:
        name = str(each.after) if each.before == each.after else f"{each.before} → {each.after}"
        stream = "-" if each.stream is None else f"{each.stream:.1%}" if each.stream > 1e-3 else number(each.stream)
        row = (name, stream, number(each.kl), f"{each.top1:.1%}")
        perplexities = (each.perplexity_before, each.perplexity_after)
        rows.append((*row, *(_plain(value) for value in perplexities if value is not None)))
    worst = max(range(len(layers)), key=lambda index: _or_infinite(layers[index].kl))
    lit = frozenset([worst] if not layers[worst].kl <= ROUNDING else [])
    return Table("If the models ended after a layer", tuple(columns), tuple(rows), lit, bold="the largest KL")


# --- where it is born -------------------------------------------------------------------------------------------------


def _born_words(found: Damage) -> str:
    how = "Each component was given the original's own stream, so that what came from below does not count."
    first, most = found.first, found.born
    if first is None:
        return f"{how} None differs by more than rounding."
    words = f"{how} First to differ: {first.name}, by {number(first.relative)}."
    return words if most is None else f"{words} Largest: {most.name}, by {number(most.relative)}."


def _places_figure(places: tuple[Place, ...]) -> Figure:
    cells = [_place_cell(place) for place in places]
    first = next((index for index, place in enumerate(places) if place.differs), None)
    rows = tuple((place.name, number(place.relative), "differs" if place.differs else "") for place in places)
    table = Table(
        f"{counted(len(rows), 'place')} as a table",
        (("component", False), ("relative Δ", True), ("", False)),
        rows,
        frozenset() if first is None else frozenset([first]),
        folded=True,
        bold="the first that differs",
    )
    return heatmap(
        cells,
        title="Difference each component makes by itself",
        summary="Root mean square of the difference over that of what the original makes of the same input. A"
        " feed-forward after an attention in series gets what that one made.",
        measure="relative difference",
        table=table,
        marked=None if first is None else cells[first],
    )


def _place_cell(place: Place) -> Cell:
    kind = "more than rounding explains" if place.differs else "within rounding" if place.relative else "equal"
    told = (f"relative difference: {number(place.relative)}", kind)
    return Cell(place.label, place.layer, _or_infinite(place.relative), told, place.differs)
