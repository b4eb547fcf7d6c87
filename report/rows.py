"""Counts of parameters as CSV for a spreadsheet: a row per component, layer, tensor or model.

Python's csv module writes it as in RFC 4180. Numbers have no thousands separators. A spreadsheet would read a cell that
begins with = + - or @ as a formula, so such a cell gets a ' in front. Only names of models begin like that.
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

CsvRow = dict[str, str | int]  # the cells by heading; a missing heading is an empty cell


def write_csv(rows: Sequence[CsvRow], file: TextIO | None = None) -> None:
    """Write rows as CSV to `file`, by default to standard output. It has a column for every key of any row."""
    headings: list[str] = []
    for row in rows:
        index = 0
        for heading in row:  # a new heading follows the one before it in its row
            if heading not in headings:
                headings.insert(index, heading)
            index = headings.index(heading) + 1
    writer = csv.DictWriter(file or sys.stdout, headings, restval="")
    writer.writeheader()
    writer.writerows({heading: _cell(value) for heading, value in row.items()} for row in rows)


def _cell(value: str | int) -> str | int:
    if isinstance(value, int):
        return value
    value = printable(value)
    return f"'{value}" if value.startswith(_FORMULA) else value


def count_rows(counts: Sequence[ModelCount], by: By, dtype: str | None = None) -> list[CsvRow]:
    """Return the rows of all models, one per component, layer or tensor.

    The numbers of parameters of a model's rows sum to its total.
    """
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
    """Yield the rows of one model, one per component, layer or tensor.

    Args:
        model: the model.
        by: "component", "layer" or "tensor".
        dtype: the dtype for the sizes. Without it the sizes in the result have no meaning.
        weights: the bytes of the weights in this dtype by component and layer; None without a dtype.

    Returns:
        For each row: the cells that name the component, layer or tensor; its number of parameters; its size in bytes.
    """
    count = model.count if model.named is None else model.named.count
    sizes = weights or count
    if by == "tensor":
        size = (lambda tensor: 0) if dtype is None else sizer(model.spec, dtype, model.family)
        for tensor in model.parameters:
            cells: CsvRow = {"tensor": tensor.name, "layer": "" if tensor.layer is None else tensor.layer}
            shape = "x".join(map(str, tensor.shape))
            yield {**cells, "component": tensor.component, "shape": shape}, tensor.count, size(tensor)
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
    """Return one row per model, with the same numbers as in the JSON output.

    A column's name is the path of the number in the JSON, such as kv_cache.8192.bytes.
    """
    rows = []
    for model in counts:
        data = {name: value for name, value in model.as_json().items() if name not in ("by_layer", "notes", "stored")}
        if "kv_cache" in data:
            data["kv_cache"] = {str(size.pop("context")): size for size in data["kv_cache"]}
        if "stages" in data.get("parallel", {}):
            parallel = data["parallel"]
            data["parallel"] = {**parallel, "notes": None, "stages": dict(enumerate(parallel["stages"]))}
            for stage in parallel["stages"]:
                stage.pop("layers")
        for memory in data.get("memory", {}).values():
            if isinstance(memory, dict):
                memory.pop("assumed", None)
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
    """Return an entry of a list in the JSON output as text, for a cell.

    A step of a swap becomes "attention=mqa". A note stays unchanged.
    """
    return " ".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else str(value)
