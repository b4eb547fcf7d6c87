"""What `params` tells: tables for the terminal, which fit its width and neither wrap nor cut numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from rich.console import RenderableType, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from ..analysis.aspects import describe
from ..analysis.figures import Scenario
from ..analysis.formats import sizer, weighed
from ..analysis.parameters import ParameterCount
from ..analysis.params import ModelCount
from ..analysis.tensors import tensor_groups
from ..components.ranges import layer_ranges, range_label
from .costs import cost_sheets, named_cache
from .quantities import binary_bytes, counted, decimal_bytes, difference, percent_change, percentage
from .rows import By
from .sheets import GAP, Sheet, SheetRow, Terminal, drawing

_NARROWEST_WORDS = 20  # a column of words that would be narrower than this is left out
_NARROWEST_NAMES = 32  # names of tensors keep so much room, or shapes stand below them
_MOST_RUNS = 8  # so many runs of layers alike are told below the total; more are left to `by` layer


@drawing
def parameter_table(
    terminal: Terminal,
    models: Sequence[ModelCount],
    by: By = "component",
    dtype: str | None = None,
    compared: bool = False,
) -> RenderResult:
    """What rich prints for `params`.

    One model: its components, what each is, and its share. Several: a column a model where they fit, else a row a
    model. `by` "layer" adds each model's layers, neighbours alike folded into one row, "tensor" its tensors. `dtype`
    adds the bytes that the weights take in it; `compared` what the second model has more or less than the first.
    """
    if len(models) == 1:
        yield from _by_names(terminal, models[0], dtype) if models[0].named else _one(terminal, models[0], dtype)
    elif models:
        sheet = _side_by_side(models, dtype, compared)
        yield sheet if compared or sheet.width() <= terminal.width else _one_below_the_other(terminal, models, dtype)
    for model in models if by != "component" else ():
        yield ""
        if len(models) > 1:
            yield terminal.text(model.name)
        yield _layers(terminal, model, dtype) if by == "layer" else _tensors(terminal, model, dtype)


def tables(counts: Sequence[ModelCount], asked: Scenario, by: By, pairs: bool) -> Iterator[RenderableType | list[str]]:
    """All that `params` prints, of all models or of each beside what swaps make of it; lists are plain lines."""
    if any(model.named for model in counts) and len(counts) > 1 and not pairs:
        for number, model in enumerate(counts):  # names of their own stand in no common table
            yield from ([""] if number else [], *tables([model], asked, by, pairs))
        return
    size = 2 if pairs else len(counts)
    for first in range(0, len(counts), size):
        some = counts[first : first + size]
        if pairs:
            yield [*([""] if first else []), some[1].name, ""]
            some = [replace(model, name=name) for model, name in zip(some, ("now", "swapped"), strict=True)]
        yield parameter_table(some, by, asked.dtype, compared=pairs)
        for sheet in cost_sheets(some, asked, compared=pairs) if asked.more or asked.dtype else ():
            yield from ("", sheet)
        for sheet in [each for model in some for each in named_cache(model)]:
            yield from ("", sheet)
        for model in some:
            if model.swap is not None:
                yield from ("", _sentences((f"guarantee: {promise(model.swap)}", *model.swap["notes"])))


@drawing
def _sentences(terminal: Terminal, lines: Sequence[str]) -> RenderResult:
    return map(terminal.note, lines)


def promise(swap: Mapping[str, Any]) -> str:
    """What a chain of swaps promises; where the weights decide it, what trained ones give, and who can tell."""
    from ..surgery.options import guarantee_in_words

    usual = guarantee_in_words(swap["usual"])
    if swap["guarantee"] == swap["usual"]:
        return usual
    return f"{usual} on trained weights; gptkit swap MODEL OUT --dry-run shows it for your model"


def _weights(model: ModelCount, dtype: str | None) -> ParameterCount | None:
    return None if dtype is None else weighed(model.spec, dtype, model.family)


def _one(terminal: Terminal, model: ModelCount, dtype: str | None) -> RenderResult:
    """What a model is, and its components with their parameters, the bytes of these, and their share of the total."""
    count, words, layers = model.count, describe(model.spec), len(model.spec.blocks)
    facts = [
        f"{counted(layers, 'layer')}{' (they differ)' if len(set(model.spec.blocks)) > 1 else ''}",
        f"hidden size {words['hidden size']}",
        f"positions: {words['positions']}",
        *(() if words["window"] == "none" else (f"window {words['window']}",)),
        *(() if words["block"] == "serial" else (words["block"],)),
        f"context {words['context']}",
    ]
    yield Text.assemble((terminal.clean(model.name), "bold"), "  ", (terminal.clean(model.family), "dim"))
    yield Text(terminal.clean(" · ".join(facts)), style="dim")
    yield ""
    weights = _weights(model, dtype)
    tied = count.tied and "head" not in count.by_component
    room = terminal.width - max(map(len, [*count.by_component, *(["head"] if tied else [])]))
    room -= GAP + max(len(f"{count.total:,}"), len("parameters"))
    with_bytes = weights is not None and room >= len(decimal_bytes(weights.total)) + GAP
    room -= GAP + max(len(dtype or ""), len("999.9 GB")) if with_bytes else 0
    with_share = room >= len("100.0 %") + GAP
    with_words = room >= len("100.0 %") + 2 * GAP + _NARROWEST_WORDS
    shown = (with_words, True, with_bytes, with_share)
    rows: list[SheetRow] = []

    def row(label: str, cells: tuple[str, str, str, str], style: str | None = None, ruled: bool = False) -> None:
        rows.append(SheetRow(label, tuple(compress(cells, shown)), style, ruled))

    def figures(what: str, number: int, size: int | None) -> tuple[str, str, str, str]:
        return what, f"{number:,}", "" if size is None else decimal_bytes(size), percentage(number, count.total)

    for label, number in count.by_component.items():
        size = None if weights is None else weights.by_component.get(label)
        row(label, figures(_what(label, model, words), number, size))
    if tied:
        row("head", ("tied to the embedding, counted once", "tied", "", ""))
    row("total", figures("", count.total, None if weights is None else weights.total), "bold", ruled=True)
    if with_bytes and weights is not None:
        row("", ("", "", binary_bytes(weights.total), ""), "bold")
    without, active = (None, None) if weights is None else (weights.non_embedding, weights.active)
    row("no embedding", figures("without embedding, positions and head", count.non_embedding, without), "dim", True)
    if model.buffers:
        row("buffers", figures("stored too; transformers does not count them", model.buffers, None), "dim")
    if count.active != count.total:
        row("active", figures("used per token", count.active, active), "dim")
    runs = layer_ranges(count.by_layer)
    if len(runs) > _MOST_RUNS:
        totals = [layer.total for layer in count.by_layer]
        row("each layer", (f"from {min(totals):,} to {max(totals):,}", "varies", "", ""), "dim")
    for first, last, layer in runs if len(runs) <= _MOST_RUNS else ():
        alike = set() if weights is None else {each.total for each in weights.by_layer[first : last + 1]}
        whole = last - first + 1 == layers
        label = "layer" if whole else f"layer{'s' if first < last else ''} {range_label(first, last)}"
        what = f"each of {last - first + 1:,} layers" if first < last else ""
        # Formats are wider in some layers.
        row(label, figures(what, layer.total, next(iter(alike)) if len(alike) == 1 else None), "dim")
    titles = [*compress(("what it is", "parameters", dtype or "", "share"), shown)]
    yield terminal.table(["component", *titles[:with_words]], titles[with_words:], rows)


def _by_names(terminal: Terminal, model: ModelCount, dtype: str | None) -> RenderResult:
    """What the names of tensors tell of a model whose family is unknown."""
    assert model.named is not None
    if dtype is not None:
        raise model.named.refusal(model.name)
    count = model.named.count
    yield Text.assemble((terminal.clean(model.name), "bold"), "  ", (terminal.clean(model.named.model_type), "dim"))
    yield terminal.note(f"by names; gptkit does not support its family · from {model.named.source}")
    yield ""
    parts = count.by_component.items()
    rows = [SheetRow(label, (f"{number:,}", percentage(number, count.total))) for label, number in parts]
    rows.append(SheetRow("total", (f"{count.total:,}", percentage(count.total, count.total)), "bold", ruled=True))
    runs = layer_ranges(count.by_layer)
    for first, last, layer in runs if len(runs) <= _MOST_RUNS else ():
        label = f"layers {range_label(first, last)}, each" if first < last else f"layer {first}"
        rows.append(SheetRow(label, (f"{layer.total:,}", ""), "dim"))
    yield terminal.table(["by names"], ["parameters", "share"], rows)


def _what(label: str, model: ModelCount, words: Mapping[str, str]) -> str:
    spec = model.spec
    ends = spec.embedding if label == "embedding" else spec.head
    width = None if ends is None else ends.width
    matrix = f"{spec.vocab_size:,} × {width or spec.hidden_size:,}"
    if width is not None:
        matrix += f", projected {'to' if label == 'embedding' else 'from'} {spec.hidden_size:,}"
    if label == "embedding":
        return matrix + (f", {spec.token_types.count:,} types of tokens" if spec.token_types is not None else "")
    if label == "positions" and spec.positions is not None:
        return f"learned, {spec.positions.length:,} × {spec.positions.size:,}"
    if label == "head" and spec.head is not None:
        parts = {"projection": width is not None, "transform": spec.head.transform is not None, "bias": spec.head.bias}
        more = [name for name, there in parts.items() if there]
        tied = f"tied to the embedding, counted once; {' and '.join(more)}"
        return tied if spec.tied else matrix + " and bias" * spec.head.bias
    if label == "pooler" and spec.pooler is not None:
        return f"{spec.hidden_size:,} × {spec.hidden_size:,} and bias, of the first token"
    if label == "router":
        return "a row for each expert"
    aspect = words.get("norm" if label == "norms" else label, "")
    return "layers differ" if aspect.startswith("layers differ") else aspect


def _side_by_side(models: Sequence[ModelCount], dtype: str | None, compared: bool) -> Sheet:
    counts = [model.count for model in models]
    labels = list(dict.fromkeys(label for count in counts for label in count.by_component))
    headless = all(model.spec.head is None for model in models)
    labels += [] if "head" in labels or headless else ["head"]  # tied in all of them, so that no count has it
    whole = "{:,}".format
    listed: list[tuple[str, Sequence[int | None], str | None, Any]] = []
    listed.append(("layers", [len(model.spec.blocks) for model in models], "dim", whole))
    listed += [(label, [count.by_component.get(label) for count in counts], None, whole) for label in labels]
    listed.append(("total", [count.total for count in counts], "bold", whole))
    if dtype is not None:
        sizes = [weighed(model.spec, dtype, model.family).total for model in models]
        listed += [(dtype, sizes, None, decimal_bytes), ("", sizes, None, binary_bytes)]
    listed.append(("no embedding", [count.non_embedding for count in counts], "dim", whole))
    if any(count.active != count.total for count in counts):
        listed.append(("active", [count.active for count in counts], "dim", whole))
    rows = [SheetRow("family", (*(model.family or "–" for model in models), *([""] * 2 if compared else [])), "dim")]
    for label, numbers, style, words in listed:
        cells = ["–" if number is None else words(number) for number in numbers]
        if label == "head":
            tied = [number is None and count.tied for number, count in zip(numbers, counts, strict=True)]
            cells = ["tied" if is_tied else cell for is_tied, cell in zip(tied, cells, strict=True)]
        if compared:
            before, after = (number or 0 for number in numbers)
            cells += [difference(before, after, words), percent_change(before, after)]
        rows.append(SheetRow(label, tuple(cells), style, ruled=label == "total"))
    names = [model.name for model in models]
    return Sheet("", (*names, *(["difference", "change"] if compared else [])), tuple(rows))


def _one_below_the_other(terminal: Terminal, models: Sequence[ModelCount], dtype: str | None) -> Grid:
    """A row a model, with as many of its figures as there is room for."""
    counts = [model.count for model in models]
    columns = [("parameters", [f"{count.total:,}" for count in counts])]
    if dtype is not None:
        columns.append((dtype, [decimal_bytes(weighed(model.spec, dtype, model.family).total) for model in models]))
    if any(count.active != count.total for count in counts):
        columns.append(("active", [f"{count.active:,}" for count in counts]))
    columns.append(("no embedding", [f"{count.non_embedding:,}" for count in counts]))
    columns.append(("layers", [f"{len(model.spec.blocks):,}" for model in models]))
    kinds = ["none" if model.spec.head is None else "tied" if model.spec.tied else "own" for model in models]
    columns.append(("head", kinds))
    room = terminal.width - min(_NARROWEST_WORDS, max(len(model.name) for model in models))
    shown: list[tuple[str, list[str]]] = []
    for title, cells in columns:
        room -= GAP + max(map(len, [title, *cells]))
        if room < 0 and shown:
            break
        shown.append((title, cells))
    rows = (SheetRow(model.name, tuple(cells[index] for _, cells in shown)) for index, model in enumerate(models))
    return terminal.table(["model"], [title for title, _ in shown], rows)


def _layers(terminal: Terminal, model: ModelCount, dtype: str | None) -> Grid:
    """One row a run of layers alike: a column a component where they fit, else a line a component."""
    count = model.count if model.named is None else model.named.count
    weights = _weights(model, dtype) or count
    runs = layer_ranges(zip(count.by_layer, weights.by_layer, strict=True))
    labels = list(dict.fromkeys(label for _, _, (layer, _) in runs for label in layer.by_component))
    in_dtype = [dtype] if dtype else []
    rows, lines = [], []
    for first, last, (layer, sizes) in runs:
        numbers = [layer.by_component.get(label, 0) for label in labels]
        place, total = range_label(first, last), [decimal_bytes(sizes.total) for _ in in_dtype]
        rows.append(SheetRow(place, (*(f"{number:,}" for number in (*numbers, layer.total)), *total)))
        lines.append(SheetRow(place, (f"{layer.total:,}", *total), "bold"))
        for label, number in zip(labels, numbers, strict=True):
            size = [decimal_bytes(sizes.by_component.get(label, 0)) for _ in in_dtype]
            lines.append(SheetRow(f" {label}", (f"{number:,}", *size)))
    titles = [*labels, "each layer", *in_dtype]
    widths = [max(map(len, column)) for column in zip(titles, *(row.cells for row in rows), strict=True)]
    fit = max(map(len, ["layer", *(row.label for row in rows)])) + sum(widths) + GAP * len(widths) <= terminal.width
    return (
        terminal.table(["layer"], titles, rows) if fit else terminal.table(["layer"], ["parameters", *in_dtype], lines)
    )


def _tensors(terminal: Terminal, model: ModelCount, dtype: str | None) -> Grid:
    """A row a tensor, those of layers alike folded; shapes below the names where there is no room beside."""
    weights, named = _weights(model, dtype), model.named
    size = None if dtype is None else sizer(model.spec, dtype, model.family)
    groups = tensor_groups(model.spec, size) if named is None else named.groups()
    shapes = [" × ".join(f"{size:,}" for size in group.shape) for group in groups]
    names = max(len(group.name) for group in groups)
    total = (model.count if named is None else named.count).total
    figures = [f"{total:,}", *([] if weights is None else [decimal_bytes(weights.total)])]
    room = terminal.width - sum(GAP + max(len(cell), len("parameters")) for cell in figures)
    if dtype and room < _NARROWEST_WORDS:
        return _tensors(terminal, model, None)
    beside = room - GAP - max(map(len, [*shapes, "shape"]))
    with_shape = beside >= min(names, _NARROWEST_NAMES)
    with_number = beside - GAP - len("number") >= names
    with_columns = (with_shape, with_number, True, dtype is not None)
    table = terminal.table(["tensor"], list(compress(("shape", "number", "parameters", dtype or ""), with_columns)))
    for group, shape in zip(groups, shapes, strict=True):
        lines = _broken(group.name, beside if with_shape else room) + ([] if with_shape else [shape])
        number = f"×{group.number:,}" if group.number > 1 else ""
        cells = compress((shape, number, f"{group.parameters:,}", decimal_bytes(group.nbytes)), with_columns)
        table.add_row(Text("\n ").join(map(terminal.text, lines)), *map(terminal.text, cells))
    table.add_section()
    blank = [""] * (with_shape + with_number)
    table.add_row(*map(terminal.text, ["total", *blank, *figures]), style="bold")
    return table


def _broken(name: str, width: int) -> list[str]:
    """A dotted name in lines of at most that many characters where its parts allow it, broken behind dots."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width - (len(lines) > 1):
            lines.append("")
        lines[-1] += part
    return lines
