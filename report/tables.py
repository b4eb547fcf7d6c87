"""Tables for the terminal. They fit the width they are given, and numbers are never wrapped or cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderResult
from rich.table import Table
from rich.text import Text

from ..analysis.formats import sizer, weighed
from ..analysis.parameters import ParameterCount, describe, layer_ranges, range_label
from ..analysis.tensors import tensor_groups
from ..components import ModelSpec
from .rows import By
from .sheets import GAP, Drawing, Layout, Row, Sheet, binary, change, difference, percentage
from .sheets import nbytes as in_bytes

__all__ = ["Model", "parameter_table"]

Model = tuple[str, str, ModelSpec, ParameterCount]
"""A name, its family, its tree, and the tree's count."""

NARROWEST_WORDS = 20
"""A column of words that would be narrower than this is left out."""

NARROWEST_NAMES = 32
"""Names of tensors keep so much room, or shapes stand below them."""

MOST_RUNS = 8
"""So many runs of layers alike are told below the total; more are left to `by` layer."""


def parameter_table(
    models: Sequence[Model], by: By = "component", dtype: str | None = None, compared: bool = False
) -> Drawing:
    """What rich prints for `params`.

    One model: its components, what each is, and its share. Several: a column a model where they fit, else a row a
    model. `by` "layer" adds each model's layers, neighbours alike folded into one row, "tensor" its tensors. `dtype`
    adds the bytes that the weights take in it; `compared` what the second model has more or less than the first.
    """

    def draw(layout: Layout) -> RenderResult:
        page = _Page(layout.width, layout.ascii_only, dtype)
        if len(models) == 1:
            yield from page.one(models[0])
        elif models:
            sheet = _side_by_side(models, dtype, compared)
            beside = compared or sheet.width() <= page.width
            yield sheet if beside else page.one_below_the_other(models)
        for model in models if by != "component" else ():
            name, _, _, count = model
            yield ""
            if len(models) > 1:
                yield page.text(name)
            weights = page.weights(model)
            yield page.layers(count, weights) if by == "layer" else page.tensors(model, weights)

    return Drawing(draw)


@dataclass(frozen=True)
class _Page(Layout):
    """The tables of one call."""

    dtype: str | None = None

    # --- one model ---

    def one(self, model: Model) -> RenderResult:
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
        weights = self.weights(model)
        rows: list[tuple[str, str, int | None]] = []
        for label, number in count.by_component.items():
            rows.append((label, _what(label, spec, words), number))
        if count.tied and "head" not in count.by_component:
            rows.append(("head", "tied to the embedding, counted once", None))
        yield self.shares(rows, count, weights)

    def weights(self, model: Model) -> ParameterCount | None:
        """A model's bytes, where these are asked for."""
        _, family, spec, _ = model
        return None if self.dtype is None else weighed(spec, self.dtype, family)

    def shares(
        self, rows: Sequence[tuple[str, str, int | None]], count: ParameterCount, weights: ParameterCount | None
    ) -> Table:
        """Components with what they are, their parameters, the bytes of these, and their share of the total."""
        figures = max(len(f"{count.total:,}"), len("parameters"))
        labels = max(len(label) for label, _, _ in rows)
        room = self.width - labels - GAP - figures
        whole, without, active = (
            (None,) * 3 if weights is None else (weights.total, weights.non_embedding, weights.active)
        )
        sizes = self.sizes(whole)
        with_bytes = bool(sizes) and room >= len(sizes[0]) + GAP
        room -= GAP + max(len(self.dtype or ""), len("999.9 GB")) if with_bytes else 0
        with_share = room >= len("100.0 %") + GAP
        with_words = room >= len("100.0 %") + 2 * GAP + NARROWEST_WORDS
        numbers = ["parameters", *([self.dtype or ""] if with_bytes else []), *(["share"] if with_share else [])]
        table = self.table(["component", *(["what it is"] if with_words else [])], numbers)

        def row(
            label: str, what: str, number: int | None, size: int | None, style: str | None = None, instead: str = ""
        ) -> None:
            shown = instead if number is None else f"{number:,}"
            nbytes = self.sizes(size) if with_bytes else []
            share = "" if number is None else percentage(number, count.total)
            cells = [label, *([what] if with_words else []), shown, *nbytes, *([share] if with_share else [])]
            table.add_row(*map(self.text, cells), style=style)

        for label, what, number in rows:
            size = weights.by_component.get(label) if weights is not None and number is not None else None
            row(label, what, number, size, instead="tied")
        table.add_section()
        row("total", "", count.total, whole, "bold")
        if with_bytes and weights is not None:
            cells = ["", *([""] if with_words else []), "", binary(weights.total)]
            table.add_row(*cells, *([""] if with_share else []), style="bold")
        table.add_section()
        row("no embedding", "without embedding, positions and head", count.non_embedding, without, "dim")
        if count.active != count.total:
            row("active", "used per token", count.active, active, "dim")
        runs = layer_ranges(count.by_layer)
        if len(runs) > MOST_RUNS:
            totals = [layer.total for layer in count.by_layer]
            row("each layer", f"from {min(totals):,} to {max(totals):,}", None, None, "dim", "varies")
        else:
            for first, last, layer in runs:
                there = {} if weights is None else {each.total: None for each in weights.by_layer[first : last + 1]}
                size = next(iter(there)) if len(there) == 1 else None  # formats are wider in some layers
                row(*_layer_label(first, last, len(count.by_layer)), layer.total, size, "dim")
        return table

    def sizes(self, nbytes: int | None) -> list[str]:
        """The cell for so many bytes, where these are asked for."""
        if self.dtype is None:
            return []
        return [""] if nbytes is None else [in_bytes(nbytes)]

    # --- several models ---

    def one_below_the_other(self, models: Sequence[Model]) -> Table:
        """A row a model, with as many of its figures as there is room for."""
        counts = [count for _, _, _, count in models]
        columns: list[tuple[str, list[str]]] = [("parameters", [f"{count.total:,}" for count in counts])]
        if self.dtype is not None:
            columns.append(
                (self.dtype, [in_bytes(weighed(spec, self.dtype, family).total) for _, family, spec, _ in models])
            )
        if any(count.active != count.total for count in counts):
            columns.append(("active", [f"{count.active:,}" for count in counts]))
        columns += [
            ("no embedding", [f"{count.non_embedding:,}" for count in counts]),
            ("layers", [f"{len(spec.blocks):,}" for _, _, spec, _ in models]),
            ("head", ["tied" if count.tied else "own" for count in counts]),
        ]
        room = self.width - min(NARROWEST_WORDS, max(len(name) for name, _, _, _ in models))
        shown: list[tuple[str, list[str]]] = []
        for title, cells in columns:
            room -= GAP + max(map(len, [title, *cells]))
            if room < 0 and shown:
                break
            shown.append((title, cells))
        table = self.table(["model"], [title for title, _ in shown])
        for index, (name, _, _, _) in enumerate(models):
            table.add_row(*map(self.text, [name, *(cells[index] for _, cells in shown)]))
        return table

    # --- layers and tensors ---

    def layers(self, count: ParameterCount, weights: ParameterCount | None) -> Table:
        """One row a run of layers alike: a column a component where they fit, else a line a component."""
        runs = layer_ranges(zip(count.by_layer, (weights or count).by_layer, strict=True))
        labels = list(dict.fromkeys(label for _, _, (layer, _) in runs for label in layer.by_component))
        ranges = [range_label(first, last) for first, last, _ in runs]
        figures = [
            [
                *(f"{number:,}" for number in (*(layer.by_component.get(label, 0) for label in labels), layer.total)),
                *self.sizes(nbytes.total),
            ]
            for _, _, (layer, nbytes) in runs
        ]
        titles = [*labels, "each layer", *([self.dtype] if self.dtype else [])]
        widths = [max(map(len, column)) for column in zip(titles, *figures, strict=True)]
        if max(map(len, ["layer", *ranges])) + sum(widths) + GAP * len(widths) <= self.width:
            table = self.table(["layer"], titles)
            for told, cells in zip(ranges, figures, strict=True):
                table.add_row(*map(self.text, [told, *cells]))
            return table
        table = self.table(["layer"], ["parameters", *([self.dtype] if self.dtype else [])])
        for (_, _, (layer, nbytes)), told in zip(runs, ranges, strict=True):
            table.add_row(*map(self.text, [told, f"{layer.total:,}", *self.sizes(nbytes.total)]), style="bold")
            for label in labels:
                number, size = (each.by_component.get(label, 0) for each in (layer, nbytes))
                table.add_row(*map(self.text, [f" {label}", f"{number:,}", *self.sizes(size)]))
        return table

    def tensors(self, model: Model, weights: ParameterCount | None) -> Table:
        """A row a tensor, those of layers alike folded; shapes below the names where there is no room beside."""
        _, family, spec, count = model
        groups = tensor_groups(spec, None if self.dtype is None else sizer(spec, self.dtype, family))
        shapes = [_shape(group.shape) for group in groups]
        names = max(len(group.name) for group in groups)
        figures = [f"{count.total:,}", *self.sizes(None if weights is None else weights.total)]
        room = self.width - sum(GAP + max(len(cell), len("parameters")) for cell in figures)
        if self.dtype and room < NARROWEST_WORDS:
            return _Page(self.width, self.ascii_only).tensors(model, None)
        beside = room - GAP - max(map(len, [*shapes, "shape"]))
        with_shape = beside >= min(names, NARROWEST_NAMES)
        with_number = beside - GAP - len("number") >= names
        titles = [*(["shape"] if with_shape else []), *(["number"] if with_number else [])]
        table = self.table(["tensor"], [*titles, "parameters", *([self.dtype] if self.dtype else [])])
        for group, shape in zip(groups, shapes, strict=True):
            lines = _broken(group.name, beside if with_shape else room) + ([] if with_shape else [shape])
            cells = [shape] if with_shape else []
            cells += [f"×{group.number:,}" if group.number > 1 else ""] if with_number else []
            cells += [f"{group.parameters:,}", *self.sizes(group.nbytes)]
            table.add_row(Text("\n ").join(map(self.text, lines)), *map(self.text, cells))
        table.add_section()
        table.add_row(*map(self.text, ["total", *([""] * len(titles)), *figures]), style="bold")
        return table


def _side_by_side(models: Sequence[Model], dtype: str | None, compared: bool) -> Sheet:
    """A column a model."""
    counts = [count for _, _, _, count in models]
    labels = list(dict.fromkeys(label for count in counts for label in count.by_component))
    labels += [] if "head" in labels else ["head"]  # tied in all of them, so that no count has it
    rows: list[Row] = []

    def row(
        label: str,
        numbers: Sequence[int | None],
        style: str | None = None,
        told: Callable[[int], str] = "{:,}".format,
    ) -> None:
        cells = ["–" if number is None else told(number) for number in numbers]
        if compared:
            before, after = (number or 0 for number in numbers)
            cells += [difference(before, after, told), change(before, after)]
        rows.append(Row(label, tuple(cells), style, ruled=label == "total"))

    families = [family or "–" for _, family, _, _ in models]
    rows.append(Row("family", (*families, *([""] * 2 if compared else [])), "dim"))
    row("layers", [len(spec.blocks) for _, _, spec, _ in models], "dim")
    for label in labels:
        tied = label == "head" and any(count.tied for count in counts)
        numbers = [count.by_component.get(label) for count in counts]
        row(label, numbers)
        if tied:
            cells = [_cell(label, count) for count in counts]
            rows[-1] = Row(label, (*cells, *rows[-1].cells[len(cells) :]))
    row("total", [count.total for count in counts], "bold")
    if dtype is not None:
        nbytes = [weighed(spec, dtype, family).total for _, family, spec, _ in models]
        row(dtype, nbytes, told=in_bytes)
        row("", nbytes, told=binary)
    row("no embedding", [count.non_embedding for count in counts], "dim")
    if any(count.active != count.total for count in counts):
        row("active", [count.active for count in counts], "dim")
    names = [name for name, _, _, _ in models]
    return Sheet("", (*names, *(["difference", "change"] if compared else [])), tuple(rows))


def _broken(name: str, width: int) -> list[str]:
    """A dotted name in lines of at most that many characters where its parts allow it, broken behind dots."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width - (len(lines) > 1):
            lines.append("")
        lines[-1] += part
    return lines


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


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
    told = words.get("norm" if label == "norms" else label, "")
    return "layers differ" if told.startswith("layers differ") else told


def _head(spec: ModelSpec) -> str:
    return f"{spec.vocab_size:,} × {spec.hidden_size:,}" + (" and bias" if spec.head.bias else "")


def _cell(label: str, count: ParameterCount) -> str:
    if label in count.by_component:
        return f"{count.by_component[label]:,}"
    return "tied" if label == "head" and count.tied else "–"


def _layer_label(first: int, last: int, layers: int) -> tuple[str, str]:
    """What one run of layers alike is called, in short and in words."""
    if first == last:
        return ("layer" if layers == 1 else f"layer {first}"), ""
    if last - first + 1 == layers:
        return "layer", f"each of {layers:,} layers"
    return f"layers {range_label(first, last)}", f"each of {last - first + 1:,} layers"
