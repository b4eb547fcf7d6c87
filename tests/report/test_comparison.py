"""Models side by side as they are printed: at any width no word is broken and no number cut; Markdown, CSV, a page."""

import csv
import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from gptkit.analysis.compare import Comparison, compare, comparison
from gptkit.analysis.figures import Scenario
from gptkit.analysis.params import ModelCount, params
from gptkit.report.comparison import comparison_csv, comparison_markdown, comparison_table, shared_out

FOUR = ("gpt2", "llama-2-7b", "bloom-7b1", "falcon-7b")
SIX = (*FOUR, "mixtral-8x7b", "qwen3-8b")
WIDTHS = [30, 40, 60, 80, 120, 200]


def render(found: Comparison, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    Console(file=file, width=width, **options).print(comparison_table(found, found.shown()))
    return file.getvalue()


def lines(text: str) -> list[str]:
    """Blanks folded."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("models", [("gpt2",), FOUR, SIX])
def test_every_width(models: tuple[str, ...], width: int) -> None:
    found = compare(*models)
    text = render(found, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    words = set(text.replace(",", " ").split()) | set(text.split())
    for row in found.shown():
        for cell in row.words:
            assert set(cell.split()) <= words, (row.name, cell)
    for figures in (found.costs()["parameters"], found.costs()["KV per token"][:0]):
        assert {f"{figure:,}" for figure in figures} <= set(text.split())


def test_a_column_a_model() -> None:
    found = lines(render(compare(*FOUR)))
    assert "gpt2 llama-2-7b bloom-7b1 falcon-7b" in found
    assert "* attention MHA 12 MHA 32 MHA 32 MQA 71/1" in found
    assert "window none none none none" in found
    assert "KV per token 36.86 kB 524.3 kB 491.5 kB 8.192 kB" in found
    assert "Weights and cache in bfloat16; forward FLOPs for a token that sees 1,024." in found


def test_where_columns_do_not_fit_models_stand_behind_their_values() -> None:
    found = lines(render(compare(*FOUR), 40))
    place = found.index("* position")
    assert found[place + 1 : place + 4] == [
        "learned 1,024 gpt2",
        "RoPE 10,000 llama-2-7b, falcon-7b",
        "ALiBi bloom-7b1",
    ]
    assert "window: none" in found


def test_marks_are_there_without_colour_and_bold_with_it() -> None:
    found = compare("gpt2", "llama-2-7b")
    assert "\x1b" not in render(found)
    coloured = render(found, force_terminal=True, color_system="standard", no_color=False)
    row = next(line for line in coloured.splitlines() if "attention" in line)
    assert "\x1b[1m* attention" in row and "*" in row
    alone = render(compare("gpt2"), force_terminal=True)
    assert "*" not in alone


def test_models_that_are_alike() -> None:
    text = render(compare("gpt2", "gpt2"))
    assert "*" not in text and "alike in these rows" in text


def test_ascii_only() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    found = compare("gpt2", "llama-3.1-8b", context=4096)
    Console(file=file, width=80).print(comparison_table(found, found.shown(everything=True)))
    file.seek(0)
    text = file.read()
    assert "llama3 x8" in text and "KV at 4,096 - 536.9 MB" in lines(text)


def test_names_from_outside_obey_nobody() -> None:
    (gpt2,) = params("gpt2")
    name = "[bold]a|b\x1b[2J"
    found = comparison([replace(gpt2, name=name), replace(gpt2, name="b")], Scenario())
    text = render(found, 120)
    assert "\x1b" not in text and "[bold]a|b" in text
    table = comparison_markdown(found, found.shown())
    assert "\x1b" not in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_markdown() -> None:
    found = compare("gpt2", "falcon-7b")
    table = comparison_markdown(found, found.shown()).splitlines()
    assert table[:2] == ["|  | gpt2 | falcon-7b |", "| --- | --- | --- |"]
    assert "| **attention** | MHA 12 | MQA 71/1 |" in table
    assert "| window | none | none |" in table
    assert "| parameters | 124,439,808 | 6,921,720,704 |" in table


def test_csv_has_whole_numbers() -> None:
    found = compare("gpt2", "llama-2-7b", context=4096)
    rows = list(csv.reader(io.StringIO(comparison_csv(found, found.shown(only_differences=True)))))
    assert {len(row) for row in rows} == {4}
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["aspect"] == ["differs", "gpt2", "llama-2-7b"]
    assert by_name["attention"] == ["yes", "MHA 12", "MHA 32"]
    assert by_name["parameters"] == ["yes", "124439808", "6738415616"]
    assert by_name["KV at 4096, bytes in bfloat16"] == ["yes", "", str(4096 * 524288)]
    assert "window" not in by_name


def test_room_goes_where_cells_come_onto_one_line() -> None:
    assert shared_out(20, [["aa bb", "cc"], ["dddd"]]) == [5, 4]
    assert shared_out(6, [["aa bb", "cc"], ["dddd"]]) == [2, 4]
    assert shared_out(5, [["aa bb", "cc"], ["dddd"]]) is None
    assert shared_out(12, [["one two three", "x"], ["y z"]]) is not None
    assert shared_out(4, [["a b c d e f g h i j", "x"], ["y z"]]) is None


def test_the_page() -> None:
    pytest.importorskip("plotly")
    from gptkit.report.comparison import comparison_page
    from gptkit.report.pages import Figure, Table, render

    found = compare(*FOUR, context=4096)
    page = comparison_page(found, found.shown())
    blocks = [block for section in page.sections for block in section.blocks]
    table = next(block for block in blocks if isinstance(block, Table))
    assert {table.rows[index][0] for index in table.lit} == {row.name for row in found.shown() if row.differs}
    figures = [block for block in blocks if isinstance(block, Figure)]
    assert len(figures) == 4 + len(FOUR)
    text = render(page)
    assert "fewer than 4,096 tokens" in text and "MQA 71/1" in text


def test_the_page_of_many_models_draws_some() -> None:
    pytest.importorskip("plotly")
    from gptkit.report.comparison import MOST_DRAWN, comparison_page

    found = compare(*["gpt2", "gpt2-medium"] * 8)
    page = comparison_page(found, found.shown())
    assert page.title == "16 models"
    (layers,) = [section.blocks for section in page.sections if section.title == "Layers"]
    assert len(layers) == MOST_DRAWN


def test_the_page_draws_each_kind_of_layer() -> None:
    pytest.importorskip("plotly")
    import msgspec

    from gptkit.report.comparison import comparison_page

    gpt2 = params("gpt2")[0].spec
    replace = msgspec.structs.replace
    other = gpt2.blocks[0].replaced(attention=replace(gpt2.blocks[0].attention, window=64))
    mixed = replace(gpt2, blocks=(*gpt2.blocks[:6], *(other,) * 6))
    found = comparison([ModelCount("mixed", "", mixed)], Scenario(dtype="float64"))
    page = comparison_page(found, found.shown())
    layers = next(section for section in page.sections if section.title == "Layers")
    assert len(layers.blocks) == 2
