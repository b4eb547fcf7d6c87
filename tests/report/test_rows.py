"""Counts as CSV: what a spreadsheet reads back sums to the model, and no name is a formula."""

import csv
import io
from collections import defaultdict
from pathlib import Path

import pytest

from gptkit.analysis.figures import Scenario
from gptkit.analysis.params import ModelCount, params
from gptkit.report.rows import By, CsvRow, count_rows, model_rows, write_csv


def read(rows: list[CsvRow]) -> list[dict[str, str]]:
    file = io.StringIO()
    write_csv(rows, file)
    text = file.getvalue()
    assert text.endswith("\r\n") and text.count("\r\n") == text.count("\n") == len(rows) + 1  # RFC 4180
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


@pytest.fixture(scope="module")
def counts() -> list[ModelCount]:
    return params("gpt2", "mixtral-8x7b", "bloom-560m")


@pytest.mark.parametrize("by", ["component", "layer", "tensor"])
def test_the_rows_sum_to_the_model(by: By, counts: list[ModelCount]) -> None:
    rows = read(count_rows(counts, by, "int8"))
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        assert row["bytes"] == row["parameters"] and row["dtype"] == "int8"
        sums[row["model"], row["component"]] += int(row["parameters"])
    for each in counts:
        assert {name: sums[each.name, name] for name in each.count.by_component} == each.count.by_component
    assert sum(sums.values()) == sum(each.count.total for each in counts)


def test_every_tensor_has_a_row(counts: list[ModelCount]) -> None:
    rows = read(count_rows(counts[:1], "tensor"))
    assert list(rows[0]) == ["model", "family", "tensor", "layer", "component", "shape", "parameters"]
    assert [row["tensor"] for row in rows] == [each.name for each in counts[0].spec.parameters()]
    last = next(row for row in rows if row["tensor"] == "blocks.11.attention.q_proj.weight")
    assert (last["layer"], last["shape"], last["parameters"]) == ("11", "768x768", "589824")


def test_costs_have_a_row_a_model() -> None:
    asked = Scenario("bf16", kv=(64, 2000), flops=True, memory=True, context=64)
    gpt2, mixtral = read(model_rows(params("gpt2", "mixtral-8x7b", asked=asked)))
    assert gpt2["kv_cache.2000.bytes"] == "" and gpt2["kv_cache.2000.impossible"]
    assert mixtral["kv_cache.2000.bytes"] == str(2000 * 131_072)
    assert (gpt2["total"], gpt2["tied"], mixtral["tied"]) == ("124439808", "yes", "no")
    assert gpt2["components.router"] == "" and mixtral["components.router"] == "1048576"
    assert int(mixtral["memory.inference.weights"]) == 2 * 46_702_792_704
    assert int(mixtral["flops.next_token.total"]) > int(gpt2["flops.next_token.total"])
    headings = list(gpt2)
    assert headings.index("components.router") == headings.index("components.feed-forward") - 1  # where it belongs


def test_columns_keep_the_order_of_the_rows() -> None:
    file = io.StringIO()
    write_csv([{"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}], file)
    assert file.getvalue().splitlines() == ["a,b,c,d", "1,,3,", "1,2,3,4"]


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@SUM(A1)", 'a"b,c', "a\nb", "a\x1b[31mb", "=\x1b"])
def test_names_are_text(name: str) -> None:
    (row,) = read([{"model": name, "parameters": 1}])
    assert row["model"][0] not in "=+-@"
    assert row["model"].isprintable()
    assert row["model"].lstrip("'")[0] == name[0]


def test_a_file_named_like_a_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("=x.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    assert {row["model"] for row in read(count_rows(params("=x.json"), "component"))} == {"'=x.json"}
