"""The tables of parameters that `params` prints. They fit the terminal, and never wrap or cut a number."""

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
from ..analysis.parameters import ParameterCount, TensorCount
from ..analysis.params import ModelCount
from ..analysis.tensors import tensor_groups
from ..components import ModelSpec
from ..components.ranges import layer_ranges, range_label
from .costs import cost_sheets, named_cache
from .quantities import binary_bytes, counted, decimal_bytes, difference, dimensions, percent_change, percentage
from .rows import By
from .sheets import GAP, Sheet, SheetRow, Terminal, drawing

_NARROWEST_WORDS = 20  # a narrower column of words is omitted
_NARROWEST_NAMES = 32  # if the names of tensors have less room, their shapes stand below them
_MOST_RUNS = 8  # if more runs of equal layers differ, only the smallest and the largest layer are given


@drawing
def parameter_table(
    terminal: Terminal,
    models: Sequence[ModelCount],
    by: By = "component",
    dtype: str | None = None,
    compared: bool = False,
) -> RenderResult:
    """Yield the tables of parameters.

    The table of one model has a row per component. The table of several models has a column per model. If the columns
    do not fit the terminal, it has a row per model instead.

    Args:
        terminal: the terminal.
        models: the models with their numbers of parameters.
        by: "layer" or "tensor" adds a table per model, in which equal consecutive layers, or their tensors, share a
            row.
        dtype: add the bytes of the weights in this dtype.
        compared: add the difference between two models.
    """
    if len(models) == 1:
        yield from _by_names(terminal, models[0], dtype) if models[0].named else _one(terminal, models[0], dtype)
    elif models:
        sheet = models_sheet(models, dtype, compared)
        yield sheet if compared or sheet.width() <= terminal.width else _one_below_the_other(terminal, models, dtype)
    for model in models if by != "component" else ():
        yield ""
        if len(models) > 1:
            yield terminal.text(model.name)
        yield _layers(terminal, model, dtype) if by == "layer" else _tensors(terminal, model, dtype)


def tables(counts: Sequence[ModelCount], asked: Scenario, by: By, pairs: bool) -> Iterator[RenderableType | list[str]]:
    """Yield everything that `params` prints. A list of strings is printed as plain lines.

    With `pairs`, the models come in pairs: a model, and the same model after a swap of components.
    """
    if any(model.named for model in counts) and len(counts) > 1 and not pairs:
        for index, model in enumerate(counts):  # models of unknown families have components of their own
            yield from ([""] if index else [], *tables([model], asked, by, pairs))
        return
    size = 2 if pairs else len(counts)
    for first in range(0, len(counts), size):
        models = counts[first : first + size]
        if pairs:
            yield [*([""] if first else []), models[1].name, ""]
            models = [replace(model, name=name) for model, name in zip(models, ("now", "swapped"), strict=True)]
        yield parameter_table(models, by, asked.dtype, compared=pairs)
        for sheet in cost_sheets(models, asked, compared=pairs) if asked.more or asked.dtype else ():
            yield from ("", sheet)
        for sheet in [sheet for model in models for sheet in named_cache(model)]:
            yield from ("", sheet)
        for model in models:
            if model.swap is not None:
                notes = (f"guarantee: {promise(model.swap)}", *model.swap["notes"])
                yield from ("", Sheet("", (), (), notes))


def promise(swap: Mapping[str, Any]) -> str:
    """Return the guarantee of a chain of swaps in words, such as "exact".

    If it depends on the weights, which are not known here, it is the guarantee for usual trained weights.
    """
    from ..surgery.options import guarantee_in_words

    usual = guarantee_in_words(swap["usual"])
    if swap["guarantee"] == swap["usual"]:
        return usual
    return f"{usual} on trained weights; gptkit swap MODEL OUT --dry-run shows it for your model"


def model_facts(spec: ModelSpec) -> list[str]:
    """Return a model's sizes and its unusual components as short phrases."""
    words, layers = describe(spec), len(spec.blocks)
    return [
        f"{counted(layers, 'layer')}{' (they differ)' if len(set(spec.blocks)) > 1 else ''}",
        f"hidden size {words['hidden size']}",
        f"positions: {words['positions']}",
        *(() if words["window"] == "none" else (f"window {words['window']}",)),
        *(() if words["block"] == "serial" else (words["block"],)),
        f"context {words['context']}",
    ]


def named_heading(terminal: Terminal, model: ModelCount) -> RenderResult:
    """Yield the name of a model of an unknown family, and where its tensors' names come from."""
    assert model.named is not None
    yield Text.assemble((terminal.clean(model.name), "bold"), "  ", (terminal.clean(model.named.model_type), "dim"))
    yield terminal.note(f"by names; gptkit does not support its family · from {model.named.source}")


def count_sheet(count: TensorCount) -> Sheet:
    """Return a table of the number of parameters by component, and of their shares."""
    parts = count.by_component.items()
    rows = [SheetRow(label, (f"{number:,}", percentage(number, count.total))) for label, number in parts]
    rows.append(SheetRow("total", (f"{count.total:,}", percentage(count.total, count.total)), "bold", ruled=True))
    return Sheet("", ("parameters", "share"), tuple(rows))


def _weights(model: ModelCount, dtype: str | None) -> ParameterCount | None:
    """Return the bytes of a model's weights in a dtype by component and layer, or None without a dtype."""
    return None if dtype is None else weighed(model.spec, dtype, model.family)


def component_sheet(model: ModelCount, dtype: str | None) -> Sheet:
    """Return a table of a model's components: a description, the number of parameters, and their share.

    If there is a `dtype`, it also has the bytes of the parameters in it.
    """
    count, words, layers = model.count, describe(model.spec), len(model.spec.blocks)
    weights = _weights(model, dtype)
    rows: list[SheetRow] = []

    def add(label: str, cells: Sequence[str], style: str | None = None, ruled: bool = False) -> None:
        what, number, nbytes, share = cells
        rows.append(SheetRow(label, (what, number, *([] if dtype is None else [nbytes]), share), style, ruled))

    def figures(what: str, number: int, nbytes: int | None) -> Sequence[str]:
        return what, f"{number:,}", "" if nbytes is None else decimal_bytes(nbytes), percentage(number, count.total)

    for label, number in count.by_component.items():
        nbytes = None if weights is None else weights.by_component.get(label)
        add(label, figures(_component_words(label, model, words), number, nbytes))
    if count.tied and "head" not in count.by_component:
        add("head", ("tied to the embedding, counted once", "tied", "", ""))
    add("total", figures("", count.total, None if weights is None else weights.total), "bold", ruled=True)
    if weights is not None:
        add("", ("", "", binary_bytes(weights.total), ""), "bold")
    without, active = (None, None) if weights is None else (weights.non_embedding, weights.active)
    add("no embedding", figures("without embedding, positions and head", count.non_embedding, without), "dim", True)
    if model.buffers:
        add("buffers", figures("stored too; transformers does not count them", model.buffers, None), "dim")
    if count.active != count.total:
        add("active", figures("used per token", count.active, active), "dim")
    runs = layer_ranges(count.by_layer)
    if len(runs) > _MOST_RUNS:
        totals = [layer.total for layer in count.by_layer]
        add("each layer", (f"from {min(totals):,} to {max(totals):,}", "varies", "", ""), "dim")
    for first, last, layer in runs if len(runs) <= _MOST_RUNS else ():
        # Formats can be wider in some layers, and then there is no one number of bytes.
        sizes = set() if weights is None else {layer_size.total for layer_size in weights.by_layer[first : last + 1]}
        whole = last - first + 1 == layers
        label = "layer" if whole else f"layer{'s' if first < last else ''} {range_label(first, last)}"
        what = f"each of {last - first + 1:,} layers" if first < last else ""
        add(label, figures(what, layer.total, sizes.pop() if len(sizes) == 1 else None), "dim")
    columns = ("what it is", "parameters", *([] if dtype is None else [dtype]), "share")
    return Sheet("", columns, tuple(rows), words=1, heading="component")


def _one(terminal: Terminal, model: ModelCount, dtype: str | None) -> RenderResult:
    """Yield the table of one model, with as many columns as fit."""
    yield Text.assemble((terminal.clean(model.name), "bold"), "  ", (terminal.clean(model.family), "dim"))
    yield Text(terminal.clean(" · ".join(model_facts(model.spec))), style="dim")
    yield ""
    sheet = component_sheet(model, dtype)
    room, shown = terminal.width - max(len(row.label) for row in sheet.rows), list[int]()
    for index in (*range(1, len(sheet.columns)), 0):  # the words only if they fit after the figures
        width = GAP + max(len(text) for text in (sheet.columns[index], *(row.cells[index] for row in sheet.rows)))
        width = width if index else GAP + _NARROWEST_WORDS
        if room >= width or index == 1:
            shown.append(index)
            room -= width
    rows = [replace(row, cells=tuple(row.cells[index] for index in sorted(shown))) for row in sheet.rows]
    titles, words = [sheet.columns[index] for index in sorted(shown)], int(0 in shown)
    filled = (row for row in rows if any(row.cells))
    yield terminal.table([sheet.heading, *titles[:words]], titles[words:], filled)


def _by_names(terminal: Terminal, model: ModelCount, dtype: str | None) -> RenderResult:
    """Yield the table of a model of an unknown family, counted by the names of its tensors."""
    assert model.named is not None
    if dtype is not None:
        raise model.named.refusal(model.name)
    count = model.named.count
    yield from named_heading(terminal, model)
    yield ""
    rows, runs = list(count_sheet(count).rows), layer_ranges(count.by_layer)
    for first, last, layer in runs if len(runs) <= _MOST_RUNS else ():
        label = f"layers {range_label(first, last)}, each" if first < last else f"layer {first}"
        rows.append(SheetRow(label, (f"{layer.total:,}", ""), "dim"))
    yield terminal.table(["by names"], ["parameters", "share"], rows)


def _component_words(label: str, model: ModelCount, words: Mapping[str, str]) -> str:
    """Return a description of the component `label`, such as the shape of its matrix.

    `words` are the result of `aspects.describe` for the model.
    """
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
        more = [name for name, present in parts.items() if present]
        tied = f"tied to the embedding, counted once; {' and '.join(more)}"
        return tied if spec.tied else matrix + " and bias" * spec.head.bias
    if label == "pooler" and spec.pooler is not None:
        return f"{spec.hidden_size:,} × {spec.hidden_size:,} and bias, of the first token"
    if label == "router":
        return "a row for each expert"
    aspect = words.get("norm" if label == "norms" else label, "")
    return "layers differ" if aspect.startswith("layers differ") else aspect


def models_sheet(models: Sequence[ModelCount], dtype: str | None, compared: bool) -> Sheet:
    """Return a table of parameters by component, with one column per model.

    `compared` adds the difference between two models.
    """
    counts = [model.count for model in models]
    labels = list(dict.fromkeys(label for count in counts for label in count.by_component))
    headless = all(model.spec.head is None for model in models)
    labels += [] if "head" in labels or headless else ["head"]  # a head that is tied in all models is in no count
    whole = "{:,}".format
    figures: list[tuple[str, Sequence[int | None], str | None, Any]] = []
    figures.append(("layers", [len(model.spec.blocks) for model in models], "dim", whole))
    figures += [(label, [count.by_component.get(label) for count in counts], None, whole) for label in labels]
    figures.append(("total", [count.total for count in counts], "bold", whole))
    if dtype is not None:
        sizes = [weighed(model.spec, dtype, model.family).total for model in models]
        figures += [(dtype, sizes, None, decimal_bytes), ("", sizes, None, binary_bytes)]
    figures.append(("no embedding", [count.non_embedding for count in counts], "dim", whole))
    if any(count.active != count.total for count in counts):
        figures.append(("active", [count.active for count in counts], "dim", whole))
    rows = [SheetRow("family", (*(model.family or "–" for model in models), *([""] * 2 if compared else [])), "dim")]
    for label, numbers, style, words in figures:
        cells = ["–" if number is None else words(number) for number in numbers]
        if label == "head":
            tied = [number is None and count.tied for number, count in zip(numbers, counts, strict=True)]
            cells = ["tied" if is_tied else cell for is_tied, cell in zip(tied, cells, strict=True)]
        if compared:
            before, after = (number or 0 for number in numbers)
            cells += [difference(before, after, words), percent_change(before, after)]
        rows.append(SheetRow(label, tuple(cells), style, ruled=label == "total"))
    names = [model.name for model in models]
    columns = (*names, *(["difference", "change"] if compared else []))
    return Sheet("", columns, tuple(rows))


def _one_below_the_other(terminal: Terminal, models: Sequence[ModelCount], dtype: str | None) -> Grid:
    """Return a table with one row per model, and as many figures as fit the terminal."""
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
    """Return a table of layers, in which equal consecutive layers share a row.

    It has a column per component. If the columns do not fit, a row has one line of text with all components.
    """
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
    """Return a table of tensors. Equal tensors of several layers share a row.

    If shapes do not fit next to the names, they are printed below them.
    """
    weights, named = _weights(model, dtype), model.named
    size = None if dtype is None else sizer(model.spec, dtype, model.family)
    groups = tensor_groups(model.spec, size) if named is None else named.groups()
    shapes = [dimensions(group.shape) for group in groups]
    names = max(len(group.name) for group in groups)
    total = (model.count if named is None else named.count).total
    figures = [f"{total:,}", *([] if weights is None else [decimal_bytes(weights.total)])]
    room = terminal.width - sum(GAP + max(len(cell), len("parameters")) for cell in figures)
    if dtype and room < _NARROWEST_WORDS:
        return _tensors(terminal, model, None)
    narrower = room - GAP - max(map(len, [*shapes, "shape"]))
    with_shape = narrower >= min(names, _NARROWEST_NAMES)
    with_number = narrower - GAP - len("number") >= names
    with_columns = (with_shape, with_number, True, dtype is not None)
    table = terminal.table(["tensor"], list(compress(("shape", "number", "parameters", dtype or ""), with_columns)))
    for group, shape in zip(groups, shapes, strict=True):
        lines = _broken(group.name, narrower if with_shape else room) + ([] if with_shape else [shape])
        number = f"×{group.number:,}" if group.number > 1 else ""
        cells = compress((shape, number, f"{group.parameters:,}", decimal_bytes(group.nbytes)), with_columns)
        table.add_row(Text("\n ").join(map(terminal.text, lines)), *map(terminal.text, cells))
    table.add_section()
    blank = [""] * (with_shape + with_number)
    table.add_row(*map(terminal.text, ["total", *blank, *figures]), style="bold")
    return table


def _broken(name: str, width: int) -> list[str]:
    """Break a tensor's name after dots into lines of up to `width` characters. A longer part is not broken."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width - (len(lines) > 1):
            lines.append("")
        lines[-1] += part
    return lines
