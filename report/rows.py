"""Counts as rows for a spreadsheet: one header, then a row a component, layer or tensor, or a row a model.

RFC 4180 by Python's csv module, numbers without separators. A cell that begins with = + - @, which a spreadsheet would
take for a formula, has a ' before it; only models have such names.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TextIO

from ..analysis.formats import sizer, weighed
from ..analysis.parameters import ParameterCount
from ..analysis.params import ModelCount
from ..terminal import printable

_FORMULA = ("=", "+", "-", "@")

By = Literal["component", "layer", "tensor"]

CsvRow = dict[str, str | int]  # a cell for each heading; a heading that it lacks is an empty cell


def write_csv(rows: Sequence[CsvRow], file: TextIO | None = None) -> None:
    """The rows under the headings of all of them, on standard output unless another file is given."""
    headings: list[str] = []
    for row in rows:
        place = 0
        for heading in row:  # one that is new stands where it does in its row
            if heading not in headings:
                headings.insert(place, heading)
            place = headings.index(heading) + 1
    writer = csv.DictWriter(file or sys.stdout, headings, restval="")
    writer.writeheader()
    writer.writerows({heading: _cell(value) for heading, value in row.items()} for row in rows)


def _cell(value: str | int) -> str | int:
    if isinstance(value, int):
        return value
    value = printable(value)
    return f"'{value}" if value.startswith(_FORMULA) else value


def count_rows(counts: Sequence[ModelCount], by: By, dtype: str | None = None) -> list[CsvRow]:
    """A row a component and model, of each layer, or a tensor; the parameters of a model's rows sum to its total."""
    rows = []
    for model in counts:
        weights = None if dtype is None else weighed(model.spec, dtype, model.family)
        for cells, parameters, nbytes in _parts(model, by, dtype, weights):
            row: CsvRow = {"model": model.name, "family": model.family, **cells, "parameters": parameters}
            rows.append(row if dtype is None else row | {"dtype": dtype, "bytes": nbytes})
    return rows


def _parts(
    model: ModelCount, by: By, dtype: str | None, weights: ParameterCount | None
) -> Iterator[tuple[CsvRow, int, int]]:
    """Cells, parameters and bytes; 0 of these where no dtype is asked for."""
    count = model.count if model.named is None else model.named.count
    sizes = weights or count
    if by == "tensor":
        size = (lambda each: 0) if dtype is None else sizer(model.spec, dtype, model.family)
        for each in model.parameters:
            place: CsvRow = {"tensor": each.name, "layer": "" if each.layer is None else each.layer}
            shape = "x".join(map(str, each.shape))
            yield {**place, "component": each.component, "shape": shape}, each.count, size(each)
    elif by == "layer":
        for label, number in count.outside.items():
            yield {"layer": "", "component": label}, number, sizes.outside[label]
        for index, (layer, size_of) in enumerate(zip(count.by_layer, sizes.by_layer, strict=True)):
            for label, number in layer.by_component.items():
                yield {"layer": index, "component": label}, number, size_of.by_component[label]
    else:
        for label, number in count.by_component.items():
            yield {"component": label}, number, sizes.by_component[label]


def model_rows(counts: Sequence[ModelCount]) -> list[CsvRow]:
    """A row a model: its figures as `as_json` has them, a column for each path to a number, kv_cache.8192.bytes."""
    rows = []
    for model in counts:  # what of the JSON is one figure a model
        data = {name: value for name, value in model.as_json().items() if name not in ("by_layer", "notes", "stored")}
        if "kv_cache" in data:
            data["kv_cache"] = {str(each.pop("context")): each for each in data["kv_cache"]}
        if "stages" in data.get("parallel", {}):
            parallel = data["parallel"]
            data["parallel"] = {**parallel, "notes": None, "stages": dict(enumerate(parallel["stages"]))}
            for stage in parallel["stages"]:
                stage.pop("layers")
        for each in data.get("memory", {}).values():
            if isinstance(each, dict):
                each.pop("assumed", None)
        rows.append(dict(_flat(data)))
    return rows


def _flat(data: dict[Any, Any], path: str = "") -> Iterator[tuple[str, str | int]]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        elif isinstance(value, list):
            yield f"{path}{name}", "; ".join(map(_words, value))
        elif value is not None:
            yield f"{path}{name}", ("yes" if value else "no") if isinstance(value, bool) else value


def _words(value: Any) -> str:
    """An entry of a list in a cell: a step as attention=mqa, a note as it is."""
    return " ".join(f"{name}={what}" for name, what in value.items()) if isinstance(value, dict) else str(value)
