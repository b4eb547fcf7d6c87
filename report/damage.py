"""The damage report of a swap: how much the logits change by position and layer, and which component differs first."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..surgery.options import guarantee_in_words
from ..version import __version__
from .heatmap import Cell, heatmap
from .pages import Figure, Lines, Page, Section, Table, noted, put, ready, write_page
from .quantities import counted, perplexity_words, scientific
from .sheets import indented
from .surgery import steps_cells

if TYPE_CHECKING:
    from ..parity.damage import Damage, LayerDamage, Place
    from ..surgery.swap import SwapResult

_ROUNDING = 1e-9  # KL in nats that rounding in fp32 can explain
_ALIKE = 1e-6  # perplexities that differ by a smaller share than this are equal
_LAYERS = 3  # the number of layers that the terminal names
_LARGEST = "the largest KL"


def _damage_or_change(damage: Damage) -> str:
    """Return the word for a swap's effect: "damage" if the perplexity of a text became worse, otherwise "change"."""
    before, after = damage.total.before, damage.total.after
    worse = before is not None and after is not None and not after <= before * (1 + _ALIKE)
    return "damage" if worse else "change"


def damage_lines(damage: Damage) -> list[str]:
    """Return the damage report for the terminal.

    It gives the total change, the positions and layers that change most, and the first components that differ.
    """
    total = damage.total
    lines = [
        f"{_damage_or_change(damage):<10}KL {scientific(total.kl)} nats per token, top-1 {total.top1:.1%}",
        f"          on {damage.on}, in {damage.dtype}",
    ]
    if total.before is not None and total.after is not None:
        lines.append(f"          perplexity {perplexity_words(total.before)} -> {perplexity_words(total.after)}")
    if len(damage.bins) > 1:
        for pick, label, which in ((max, "position", "worst"), (min, "", "best")):
            extreme = pick(damage.bins, key=lambda span: span.kl)
            lines.append(f"{label:<10}KL {scientific(extreme.kl)} at {extreme.name}, the {which}")
    if damage.layers:
        lines.append("layer     KL if both models ended there, and how far residual streams differ:")
        worst_layers = sorted(damage.layers, key=lambda layer: -layer.kl)[:_LAYERS]
        for layer in sorted(worst_layers, key=lambda layer: layer.after):
            stream = "" if layer.stream is None else f", streams by {scientific(layer.stream)}"
            lines.append(f"          layer {layer.after}: KL {scientific(layer.kl)}{stream}")
        if len(damage.layers) > _LAYERS:
            lines.append(f"          (the worst {_LAYERS} of {len(damage.layers)})")
    first, most = damage.first, damage.born
    if first is not None:
        lines.append(f"begins    {first.name}: the first that differs by itself, by {scientific(first.relative)}")
        if most is not None and most is not first:
            lines.append(f"          {most.name}: differs most by itself, by {scientific(most.relative)}")
    elif damage.places:
        lines.append("begins    nowhere: no component differs by itself by more than rounding")
    return lines + [line for note in damage.notes for line in indented(f"note: {note}", 0)]


def damage_sections(damage: Damage) -> tuple[Section, ...]:
    """Return the sections of the HTML page that describe the damage."""
    words = (
        f"Both models ran on {damage.on}, in {damage.dtype}. KL is the divergence of the predictions of the changed"
        " model from those of the original, in nats."
    )
    what = _damage_or_change(damage).capitalize()
    sections = [Section(f"{what} by position", (Lines((words,)), _position_table(damage)))]
    if damage.layers:
        lens = "These are the predictions of each model if it ended after a layer: its last norm and head, applied to"
        blocks = (Lines((f"{lens} the residual stream.",)), _lens_figure(damage), _layer_table(damage.layers))
        sections.append(Section(f"{what} by layer", blocks))
    if damage.places:
        how = "Each block was given the original's hidden states, so that differences of earlier layers do not count."
        first, most = damage.first, damage.born
        begins = "None differs by more than rounding."
        if first is not None:
            begins = f"First to differ: {first.name}, by {scientific(first.relative)}."
            begins += "" if most is None else f" Largest: {most.name}, by {scientific(most.relative)}."
        sections.append(Section("Where it begins", (Lines((f"{how} {begins}",)), _places_figure(damage.places))))
    return (*sections, *noted(damage.notes, "What was not measured"))


def swap_page(result: SwapResult, damage: Damage) -> Page:
    """Return the HTML page of a swap."""
    total, measured = damage.total, result.measured
    facts = [("guarantee", guarantee_in_words(result.guarantee))]
    facts += [("KL, nats per token", scientific(total.kl)), ("top-1", f"{total.top1:.1%}")]
    if total.before is not None and total.after is not None:
        facts.append(("perplexity", f"{perplexity_words(total.before)} → {perplexity_words(total.after)}"))
    if measured is not None:
        facts += [(f"relative error in {dtype}", scientific(error)) for dtype, error in measured.relative.items()]
    before, after = result.parameters
    facts.append(("parameters", f"{before:,}" if before == after else f"{before:,} → {after:,}"))
    exact = result.guarantee == "exact"
    steps = []
    if len(result.chain.steps) > 1:
        columns, rows, words = steps_cells(result)
        lines = [Lines((f"{words[0].upper()}{words[1:]}.",))] if words else []
        steps = [Section("Step by step", (*lines, Table("Steps", columns, tuple(rows))))]
    return Page(
        title=str(result.target),
        subtitle=f"swapped from {result.source.reference}",
        verdict="The same function" if exact else f"Changed: KL {scientific(total.kl)} nats per token",
        good=True if exact else None,  # a change that was asked for is no failure
        facts=(*facts, ("gptkit", __version__)),
        sections=(*steps, *damage_sections(damage)),
    )


def report_paths(path: Path) -> tuple[Path, Path]:
    """Return the paths of the page (.html) and of its data (.json). Raise UsageError if one cannot be written."""
    paths = path.with_suffix(".html"), path.with_suffix(".json")
    for report_path in paths:
        ready(report_path)
    return paths


def write_report(result: SwapResult, damage: Damage, path: Path) -> tuple[Path, Path]:
    """Write the page of a swap, and its data as JSON. Return both paths. Raise UsageError if that fails."""
    page, figures = report_paths(path)
    write_page(swap_page(result, damage), page)
    which = {"source": result.source.reference, "target": str(result.target), "guarantee": result.guarantee}
    data = {"schema_version": 1, **which, "damage": damage.as_json()}
    put(f"{json.dumps(data, indent=2, allow_nan=False)}\n".encode(), figures)
    return page, figures


def _position_table(damage: Damage) -> Table:
    columns = [("position", False), ("tokens", True), ("KL", True), ("top-1", True)]
    if damage.total.before is not None:
        columns += [("perplexity before", True), ("perplexity after", True)]
    rows = []
    for name, span in (*((span.name, span) for span in damage.bins), ("all", damage.total)):
        perplexities = () if span.before is None or span.after is None else (span.before, span.after)
        figures = (f"{span.positions:,}", scientific(span.kl), f"{span.top1:.1%}", *map(perplexity_words, perplexities))
        rows.append((name, *figures))
    return Table("By position", tuple(columns), tuple(rows), _largest([span.kl for span in damage.bins]), bold=_LARGEST)


def _largest(divergences: Sequence[float]) -> frozenset[int]:
    """Return a set with the index of the largest KL divergence. It is empty if rounding can explain the divergence."""
    largest, index = max((_or_infinite(kl), -index) for index, kl in enumerate(divergences))
    return frozenset([-index] if largest > _ROUNDING else [])


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _lens_figure(damage: Damage) -> Figure:
    cells = []
    for layer in damage.layers:
        same = layer.before == layer.after
        pair = f"after layer {layer.after} of both" if same else f"after layers {layer.before} and {layer.after}"
        for span, value in zip(damage.bins, layer.by_bin, strict=True):
            lines = (f"KL: {scientific(value)} nats per token", f"at position {span.name}", pair)
            cells.append(Cell(f"at {span.name}", layer.after, _or_infinite(value), lines, not value <= _ROUNDING))
    worst = max(damage.layers, key=lambda layer: _or_infinite(layer.kl))
    columns = (("layer", False), *((f"at {span.name}", True) for span in damage.bins))
    rows = tuple((str(layer.after), *map(scientific, layer.by_bin)) for layer in damage.layers)
    return heatmap(
        cells,
        down="position",
        title="KL by layer and position",
        summary=f"The KL if both models ended after a layer. It is largest after layer {worst.after}:"
        f" {scientific(worst.kl)} nats per token over all positions. After the last layer, it is the KL of the models.",
        measure="KL, nats per token",
        table=Table(f"{counted(len(rows), 'layer')} as a table", columns, rows, folded=True),
    )


def _layer_table(layers: Sequence[LayerDamage]) -> Table:
    columns = [("layer", False), ("residual streams differ by", True), ("KL", True), ("top-1", True)]
    if layers[0].perplexity_before is not None:
        columns += [("perplexity before", True), ("perplexity after", True)]
    rows = []
    for layer in layers:
        name = str(layer.after) if layer.before == layer.after else f"{layer.before} → {layer.after}"
        stream = "-"
        if layer.stream is not None:
            stream = f"{layer.stream:.1%}" if layer.stream > 1e-3 else scientific(layer.stream)
        perplexities = [perplexity_words(n) for n in (layer.perplexity_before, layer.perplexity_after) if n is not None]
        rows.append((name, stream, scientific(layer.kl), f"{layer.top1:.1%}", *perplexities))
    caption = "If the models ended after a layer"
    return Table(caption, tuple(columns), tuple(rows), _largest([layer.kl for layer in layers]), bold=_LARGEST)


def _places_figure(places: Sequence[Place]) -> Figure:
    """Draw how much the output of every component differs if its layer gets the same input (the original's) in both
    models.
    """
    cells, first = [], next((index for index, place in enumerate(places) if place.differs), None)
    for place in places:
        kind = "more than rounding explains" if place.differs else "within rounding" if place.relative else "equal"
        lines = (f"relative difference: {scientific(place.relative)}", kind)
        cells.append(Cell(place.label, place.layer, _or_infinite(place.relative), lines, place.differs))
    columns = (("component", False), ("relative Δ", True), ("", False))
    rows = tuple((place.name, scientific(place.relative), "differs" if place.differs else "") for place in places)
    lit = frozenset() if first is None else frozenset([first])
    caption = f"{counted(len(rows), 'place')} as a table"
    return heatmap(
        cells,
        title="Difference each component makes by itself",
        summary="The root mean square of the difference, relative to the output of the original. Each block was given"
        " the original's hidden states. A feed-forward that follows an attention sees the changed attention's output.",
        measure="relative difference",
        table=Table(caption, columns, rows, lit, folded=True, bold="the first that differs"),
        marked=None if first is None else cells[first],
    )
