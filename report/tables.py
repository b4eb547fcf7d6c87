"""Tables for the terminal. They fit the width they are given, and numbers are never wrapped or cut.

rich is imported inside functions alone: `gptkit --help` does not need it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..analysis.parameters import ParameterCount, describe, layer_ranges, range_label
from ..spec import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = ["ParameterTable", "parameter_table", "print_json"]

Model = tuple[str, str, ModelSpec, ParameterCount]
"""A name, its family, its tree, and the tree's count."""

GAP = 3
"""Blank characters between two columns of a table; rich draws one of them itself."""

NARROWEST_WORDS = 20
"""A column of words that would be narrower than this is left out."""

MOST_RUNS = 8
"""So many runs of layers alike are told below the total; more are left to `by_layer`."""

ASCII = str.maketrans({"×": "x", "–": "-", "·": "-"})
"""For terminals that have no other characters."""


def print_json(obj: Any) -> None:
    """One JSON value on stdout, indented and in plain ASCII, for programs rather than people: never coloured."""
    sys.stdout.write(json.dumps(obj, indent=2, allow_nan=False) + "\n")


def parameter_table(models: Sequence[Model], by_layer: bool = False) -> ParameterTable:
    """What rich prints for `params`.

    One model: its components, what each is, and its share. Several: a column a model where they fit, else a row a
    model. `by_layer` adds each model's layers, neighbours alike folded into one row.
    """
    return ParameterTable(tuple(models), by_layer)


@dataclass(frozen=True)
class ParameterTable:
    """A renderable that chooses its columns when it learns how wide the terminal is."""

    models: tuple[Model, ...]
    by_layer: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(options.max_width, options.ascii_only)
        if len(self.models) == 1:
            yield from page.one(self.models[0])
        elif self.models:
            yield page.side_by_side(self.models) or page.one_below_the_other(self.models)
        if self.by_layer:
            for name, _, _, count in self.models:
                yield ""
                yield from page.layers(name if len(self.models) > 1 else "", count)


@dataclass(frozen=True)
class _Page:
    width: int
    ascii_only: bool

    # --- one model ---

    def one(self, model: Model) -> RenderResult:
        from rich.text import Text

        name, family, spec, count = model
        words = describe(spec)
        layers = len(spec.blocks)
        facts = [
            f"{layers:,} layer{'' if layers == 1 else 's'}{' (they differ)' if len(set(spec.blocks)) > 1 else ''}",
            f"hidden size {words['hidden size']}",
            f"positions: {words['positions']}",
            *(() if words["window"] == "none" else (f"window {words['window']}",)),
            *(() if words["block"] == "serial" else (words["block"],)),
            f"context {words['context']}",
        ]
        yield Text.assemble((self.clean(name), "bold"), "  ", (self.clean(family), "dim"))
        yield Text(self.clean(" · ".join(facts)), style="dim")
        yield ""
        rows: list[tuple[str, str, int | None]] = []
        for label, number in count.by_component.items():
            rows.append((label, _what(label, spec, words), number))
        if count.tied and "head" not in count.by_component:
            rows.append(("head", "tied to the embedding, counted once", None))
        yield self.shares(rows, count)

    def shares(self, rows: Sequence[tuple[str, str, int | None]], count: ParameterCount) -> Table:
        """Components with what they are, their parameters and their share of the total."""
        figures = max(len(f"{count.total:,}"), len("parameters"))
        labels = max(len(label) for label, _, _ in rows)
        room = self.width - labels - figures - len("100.0 %") - 3 * GAP
        with_words, with_share = room >= NARROWEST_WORDS, room + GAP >= 0
        table = self.table(["component", *(["what it is"] if with_words else [])], with_share)

        def row(label: str, what: str, number: int | None, style: str | None = None, instead: str = "") -> None:
            shown = instead if number is None else f"{number:,}"
            share = "" if number is None else _share(number, count.total)
            cells = [label, *([what] if with_words else []), shown, *([share] if with_share else [])]
            table.add_row(*map(self.text, cells), style=style)

        for label, what, number in rows:
            row(label, what, number, instead="tied")
        table.add_section()
        row("total", "", count.total, "bold")
        table.add_section()
        row("no embedding", "without embedding, positions and head", count.non_embedding, "dim")
        runs = layer_ranges(count.by_layer)
        if len(runs) > MOST_RUNS:
            sizes = [layer.total for layer in count.by_layer]
            row("each layer", f"from {min(sizes):,} to {max(sizes):,}", None, "dim", "varies")
        else:
            for first, last, layer in runs:
                row(*_layer_label(first, last, len(count.by_layer)), layer.total, "dim")
        return table

    # --- several models ---

    def side_by_side(self, models: Sequence[Model]) -> Table | None:
        """A column a model; None where that is wider than the page."""
        counts = [count for _, _, _, count in models]
        labels = list(dict.fromkeys(label for count in counts for label in count.by_component))
        rows: list[tuple[str, list[str], str | None]] = [("family", [family for _, family, _, _ in models], "dim")]
        rows.append(("layers", [f"{len(spec.blocks):,}" for _, _, spec, _ in models], "dim"))
        rows += [(label, [_cell(label, count) for count in counts], None) for label in labels]
        if "head" not in labels:  # tied in all of them, so that no count has it
            rows.append(("head", [_cell("head", count) for count in counts], None))
        rows.append(("total", [f"{count.total:,}" for count in counts], "bold"))
        rows.append(("no embedding", [f"{count.non_embedding:,}" for count in counts], "dim"))
        names = [name for name, _, _, _ in models]
        widths = [max(map(len, cells)) for cells in zip(names, *(cells for _, cells, _ in rows), strict=True)]
        if max(len(label) for label, _, _ in rows) + sum(widths) + GAP * len(widths) > self.width:
            return None
        table = self.table([""], False, numbers=names)
        for label, cells, style in rows:
            if label == "total":
                table.add_section()
            table.add_row(*map(self.text, [label, *cells]), style=style)
        return table

    def one_below_the_other(self, models: Sequence[Model]) -> Table:
        """A row a model, with as many of its figures as there is room for."""
        columns: list[tuple[str, list[str]]] = [
            ("parameters", [f"{count.total:,}" for _, _, _, count in models]),
            ("no embedding", [f"{count.non_embedding:,}" for _, _, _, count in models]),
            ("layers", [f"{len(spec.blocks):,}" for _, _, spec, _ in models]),
            ("head", ["tied" if count.tied else "own" for _, _, _, count in models]),
        ]
        room = self.width - min(NARROWEST_WORDS, max(len(name) for name, _, _, _ in models))
        shown: list[tuple[str, list[str]]] = []
        for title, cells in columns:
            room -= GAP + max(map(len, [title, *cells]))
            if room < 0 and shown:
                break
            shown.append((title, cells))
        table = self.table(["model"], False, numbers=[title for title, _ in shown])
        for index, (name, _, _, _) in enumerate(models):
            table.add_row(*map(self.text, [name, *(cells[index] for _, cells in shown)]))
        return table

    # --- layers ---

    def layers(self, name: str, count: ParameterCount) -> RenderResult:
        """One row a run of layers alike: a column a component where they fit, else a line a component."""
        runs = layer_ranges(count.by_layer)
        labels = list(dict.fromkeys(label for _, _, layer in runs for label in layer.by_component))
        ranges = [range_label(first, last) for first, last, _ in runs]
        figures = [
            [f"{number:,}" for number in (*(layer.by_component.get(label, 0) for label in labels), layer.total)]
            for _, _, layer in runs
        ]
        titles = [*labels, "each layer"]
        widths = [max(map(len, column)) for column in zip(titles, *figures, strict=True)]
        if name:
            yield self.text(name)
        if max(map(len, ["layer", *ranges])) + sum(widths) + GAP * len(widths) <= self.width:
            table = self.table(["layer"], False, numbers=titles)
            for layer, cells in zip(ranges, figures, strict=True):
                table.add_row(*map(self.text, [layer, *cells]))
        else:
            table = self.table(["layer"], False)
            for layer, cells in zip(ranges, figures, strict=True):
                table.add_row(self.text(layer), self.text(cells[-1]), style="bold")
                for label, cell in zip(labels, cells[:-1], strict=True):
                    table.add_row(self.text(f" {label}"), self.text(cell))
        yield table

    # --- shared ---

    def table(self, words: Sequence[str], share: bool, numbers: Sequence[str] = ("parameters",)) -> Table:
        """An empty table: columns of words that may wrap, then right-aligned columns that do not."""
        from rich import box
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, header_style="bold"
        )
        for title in words:
            table.add_column(self.text(title), overflow="fold")
        for title in (*numbers, *(["share"] if share else [])):
            table.add_column(self.text(title), justify="right", no_wrap=True)
        return table

    def text(self, words: str) -> Any:
        """A cell: its brackets are no markup."""
        from rich.text import Text

        return Text(self.clean(words))

    def clean(self, words: str) -> str:
        """Characters that the terminal has; a name from outside may hold control characters."""
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        return words.translate(ASCII).encode("ascii", "replace").decode() if self.ascii_only else words


def _what(label: str, spec: ModelSpec, words: Mapping[str, str]) -> str:
    """A component in few words, for the table's second column."""
    if label == "embedding":
        return f"{spec.vocab_size:,} × {spec.hidden_size:,}"
    if label == "positions" and spec.positions is not None:
        return f"learned, {spec.positions.length:,} × {spec.positions.size:,}"
    if label == "head":
        return "tied to the embedding, counted once; bias" if spec.head.tied else _head(spec)
    if label == "router":
        return "a row for each expert"
    told = words["norm" if label == "norms" else label]
    return "layers differ" if told.startswith("layers differ") else told


def _head(spec: ModelSpec) -> str:
    return f"{spec.vocab_size:,} × {spec.hidden_size:,}" + (" and bias" if spec.head.bias else "")


def _cell(label: str, count: ParameterCount) -> str:
    if label in count.by_component:
        return f"{count.by_component[label]:,}"
    return "tied" if label == "head" and count.tied else "–"


def _share(number: int, total: int) -> str:
    """Per cent of the total, one digit after the point."""
    share = 100 * number / total
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def _layer_label(first: int, last: int, layers: int) -> tuple[str, str]:
    """What one run of layers alike is called, in short and in words."""
    if first == last:
        return ("layer" if layers == 1 else f"layer {first}"), ""
    if last - first + 1 == layers:
        return "layer", f"each of {layers:,} layers"
    return f"layers {range_label(first, last)}", f"each of {last - first + 1:,} layers"
