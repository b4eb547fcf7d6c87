"""Sheets of costs as they are printed: units, numbers whole at any width, and what more there is after a swap."""

import io
from collections import Counter
from typing import Any

import pytest
from helpers.covering import examples, few
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gptkit.analysis.figures import Scenario, figures_of
from gptkit.analysis.params import ModelCount, params
from gptkit.report.costs import cost_sheets
from gptkit.report.quantities import binary_bytes, decimal, difference, percent_change, whole_bytes
from gptkit.report.sheets import Sheet, SheetRow


def printed(things: list[Any], width: int = 80, **options: Any) -> str:
    file = io.StringIO()
    for thing in things:
        Console(file=file, width=width, **options).print(thing)
    return file.getvalue()


def sheets(*models: str, compared: bool = False, **asked: Any) -> list[Sheet]:
    wanted = Scenario(**asked)
    counts = params(*models, asked=wanted)
    return cost_sheets(counts, wanted, compared)


def line(text: str, label: str, place: int = 0) -> list[str]:
    """The cells of the line with that label."""
    found = [each for each in text.splitlines() if each.startswith(f"{label}  ")]
    return [cell.strip() for cell in found[place].removeprefix(label).split("   ") if cell.strip()]


# --- units


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.000 kB"),
        (9999, "9.999 kB"),
        (99_990, "99.99 kB"),
        (99_996, "100.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.000 MB"),
        (16_381_470_720, "16.38 GB"),
        (10**12, "1.000 TB"),
        (8 * 10**24, "8.000 YB"),
    ],
)
def test_decimal_bytes(number: int, told: str) -> None:
    assert decimal(number, "B") == told


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (1023, "1,023 bytes"),
        (1024, "1.000 KiB"),
        (2**30, "1.000 GiB"),
        (2**30 - 1, "1.000 GiB"),
        (2**20 * 3, "3.000 MiB"),
    ],
)
def test_binary_bytes(number: int, told: str) -> None:
    assert binary_bytes(number) == told


def test_units_are_within_half_a_digit() -> None:
    powers = {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
    for number in (1234, 56_789, 999_949, 7_654_321, 10**11 + 1, 123_456_789_012_345):
        value, unit = decimal(number, "FLOP").split()
        assert abs(float(value) * 10 ** powers[unit[0]] - number) <= number / 1900
    assert whole_bytes(147_456) == "147,456 bytes"


def test_differences() -> None:
    assert (difference(5, 3, str), difference(3, 5, str), difference(3, 3, str)) == ("−2", "+2", "0")
    assert (percent_change(200, 100), percent_change(100, 333), percent_change(0, 3), percent_change(7, 7)) == (
        "−50.0 %",
        "+233.0 %",
        "",
        "",
    )
    assert percent_change(1_000_000, 999_900) == "−0.01 %"


# --- one model


def test_the_cache_of_one_model() -> None:
    text = printed(sheets("qwen3-8b", kv=(2048, 131_072)))
    assert text.startswith("KV cache, bfloat16\n")
    assert line(text, "per token") == ["147,456 bytes", "144.0 KiB"]
    assert line(text, "2,048 tokens") == ["302.0 MB", "288.0 MiB"]
    assert line(text, "131,072 tokens") == ["19.33 GB", "18.00 GiB"]
    assert line(printed(sheets("qwen3-8b", kv=(2048,), batch=4)), "4 × 2,048 tokens")[0] == "1.208 GB"
    assert line(printed(sheets("qwen3-8b", kv=(2048,), kv_dtype="fp8")), "2,048 tokens")[0] == "151.0 MB"
    assert line(printed(sheets("qwen3-8b", kv=(2048,), dtype="fp32")), "2,048 tokens")[0] == "604.0 MB"


def test_windows_and_repeated_heads_are_explained() -> None:
    assert "A layer with a window of w tokens" in printed(sheets("mistral-7b", kv=(9000,)))
    assert "window" not in printed(sheets("qwen3-8b", kv=(9000,)))
    assert "transformers repeats the keys and values of falcon-40b" in printed(sheets("falcon-40b", kv=(100,)))
    assert "repeats" not in printed(sheets("falcon-7b", kv=(100,)))


def test_flops_of_one_model() -> None:
    (model,) = params("gpt2", asked=Scenario(flops=True, context=100))
    found = model.figures
    assert found is not None and found.token and found.prefill and found.training
    text = printed(sheets("gpt2", flops=True, context=100))
    assert line(text, "total") == [
        decimal(number, "FLOP") for number in (found.token.total_flops, found.prefill.causal, found.training.causal)
    ]
    assert line(text, "total, dense") == [decimal(found.prefill.dense, "FLOP"), decimal(found.training.dense, "FLOP")]
    needed, dense = found.prefill.needed_scores, found.prefill.scores
    assert needed * 200 == dense * 101  # Σ t of 100 × 100
    told = [decimal(number, "FLOP") for number in (found.token.flops["scores"], needed, 3 * needed)]
    assert line(text, "scores") == told
    assert line(text, "scores, dense") == [decimal(dense, "FLOP"), decimal(3 * dense, "FLOP")]
    assert line(text, "6N") == [decimal(6 * 124_439_808 * 100, "FLOP")]
    assert line(text, "6N, no embedding") == [decimal(6 * 85_056_000 * 100, "FLOP")]


def test_memory_of_one_model() -> None:
    text = printed(sheets("qwen3-8b", memory=True, context=2048))
    assert line(text, "weights") == ["16.38 GB", "16.38 GB"]
    assert line(text, "Adam's moments") == ["65.53 GB"]
    assert line(text, "fp32 weights") == ["32.76 GB"]
    assert "fp32 weights" not in printed(sheets("qwen3-8b", memory=True, context=2048, dtype="fp32"))
    assert "Adam's moments in float32" in " ".join(text.split())


def test_scales_are_said_to_be_missing() -> None:
    for dtype in ("int8", "int4"):
        assert f"{dtype}: {dtype[3:]} bits per parameter, without quantisation scales" in printed(
            sheets("gpt2", dtype=dtype)
        )
    assert sheets("gpt2", dtype="fp8") == []


# --- several


def test_models_side_by_side_at_one_context() -> None:
    text = printed(sheets("gpt2", "llama-3-8b", "mistral-7b", kv=(1024, 8192), flops=True))
    assert "FLOPs of the next token" in text and "1,024 tokens, itself included" in " ".join(text.split())
    assert line(text, "1,024 tokens") == ["37.75 MB", "134.2 MB", "134.2 MB"]
    assert line(text, "8,192 tokens") == ["–", "1.074 GB", "536.7 MB"]
    assert "– gpt2 has only 1,024 positions." in text
    assert line(text, "per token")[0] == "36.86 kB"  # which no table limits


def test_why_at_this_context_and_what_is_beyond_a_models_own() -> None:
    def told(*models: str, **asked: Any) -> str:
        return " ".join(printed(sheets(*models, **asked)).split())

    why = "1,024 tokens: the context of gpt2, the shortest of these; --context sets another."
    assert why in told("llama-3-8b", "gpt2", "mistral-7b", flops=True, memory=True)
    assert "the context of gpt2, the shorter of the two" in told("llama-3-8b", "gpt2", memory=True)
    assert "2,048 tokens: bloom-7b1 states no context" in told("bloom-7b1", memory=True)
    for models, asked in (
        (("llama-3-8b",), {"flops": True}),
        (("gpt2", "gpt2-xl"), {"flops": True}),
        (("gpt2", "llama-3-8b"), {"flops": True, "context": 512}),
        (("gpt2", "llama-3-8b"), {"kv": (512,)}),
    ):
        assert "--context" not in told(*models, **asked) and "beyond" not in told(*models, **asked)
    assert "204,800 tokens: beyond llama-3-8b's context of 8,192." in told("llama-3-8b", kv=(8192, 204_800))
    assert "9,000 tokens: beyond llama-3-8b's context of 8,192." in told("llama-3-8b", flops=True, context=9000)
    swapped = told("llama-3-8b", "llama-3-8b", compared=True, kv=(9000,))
    assert swapped.count("9,000 tokens: beyond the model's context of 8,192.") == 1


def test_what_a_swap_changes() -> None:
    text = printed(sheets("llama-2-7b", "mistral-7b", compared=True, kv=(100,), flops=True, context=64))
    assert line(text, "per token") == ["524.3 kB", "131.1 kB", "−393.2 kB", "−75.0 %"]
    assert line(text, "head") == ["262.1 MFLOP", "262.1 MFLOP", "0"]
    more = printed(sheets("llama-2-7b", "mixtral-8x7b", compared=True, flops=True, context=64))
    assert line(more, "router") == ["–", "2.097 MFLOP", "+2.097 MFLOP"]  # none of it is a known number
    short = printed(sheets("gpt2", "mixtral-8x7b", compared=True, kv=(100, 5000), flops=True, context=5000))
    assert line(short, "5,000 tokens") == ["–", "655.4 MB"]  # and a cache that cannot be is not
    assert line(short, "total")[:2] == ["–", line(short, "total")[1]] and len(line(short, "total")) == 2


def test_where_no_model_has_positions_what_a_token_leaves_is_told_and_that() -> None:
    asked = Scenario(kv=(4096,), flops=True, memory=True, context=4096)
    specs = [each.spec for each in params("gpt2", "distilgpt2")]
    (told,) = cost_sheets([ModelCount("m", "", spec, figures=figures_of(spec, asked, 4096)) for spec in specs], asked)
    text = printed([told])
    assert line(text, "per token") == ["36.86 kB", "18.43 kB"]
    assert "4,096 tokens" not in text and text.endswith("– m has only 1,024 positions.\n" * 2)


# --- widths


@few(5)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize(
    "names", [("qwen3-8b",), ("gpt2", "mixtral-8x7b"), ("gpt2", "gpt2-xl", "llama-3-8b", "bloom-176b")]
)
def test_nothing_is_cut_at_any_width(names: tuple[str, ...], width: int) -> None:
    found = sheets(*names, kv=(512,), flops=True, memory=True, dtype="bf16", batch=3)
    for compared in {False, len(names) == 2}:
        found = sheets(*names, compared=compared, kv=(512,), flops=True, memory=True, dtype="bf16", batch=3)
        for sheet in found:
            text = printed([sheet], width)
            assert all(cell_len(each) <= width for each in text.splitlines())
            for row in sheet.rows:
                assert all(cell in text for cell in row.cells)
            assert all(name in text for name in sheet.columns)


@st.composite
def drawn_sheets(draw: st.DrawFn) -> Sheet:
    """Columns with names of any length, rows that may have no figure in some of them."""
    columns, rows = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    names = [f"{index}-{'n' * draw(st.integers(0, 60))}" for index in range(columns)]
    figures = st.just("") | st.integers(0, 10**20).map("{:,}".format)
    labels = [f"row {index} {'l' * draw(st.integers(0, 30))}" for index in range(rows)]
    return Sheet("t", tuple(names), tuple(SheetRow(each, tuple(draw(figures) for _ in names)) for each in labels))


@given(drawn_sheets(), st.integers(56, 220))
@settings(max_examples=examples(60))
def test_any_sheet_fits_where_one_column_does(sheet: Sheet, width: int) -> None:
    text = printed([sheet], width)
    assert max(map(cell_len, text.splitlines())) <= width
    there = Counter(text.replace("\n", " ").split())
    assert not Counter(cell for row in sheet.rows for cell in row.cells if cell) - there


@pytest.mark.parametrize("width", [1, 5, 10])
def test_absurd_widths_do_not_crash(width: int) -> None:
    printed(sheets("gpt2", "qwen3-8b", kv=(512,), flops=True, memory=True), width)


def test_a_part_has_no_rows_of_nothing() -> None:
    (sheet,) = [each for each in sheets("gpt2", memory=True) if each.title.startswith("Memory")]
    first, second = printed([sheet], 40).split("training")[:2]
    assert "KV cache" in first and "gradients" not in first
    assert "gradients" in second and "KV cache" not in second


def test_a_sheet_without_figures_is_its_notes() -> None:
    assert printed([Sheet("title", ("a", "b"), (), ("why",))]) == "title\nwhy\n"


def test_many_models_have_a_row_each() -> None:
    sheet = Sheet(
        "t", tuple(f"model-{n}" for n in range(30)), (SheetRow("a", ("1",) * 30), SheetRow("b", ("22",) * 30))
    )
    lines = [each.split() for each in printed([sheet]).splitlines()]
    assert ["a", "b"] in lines and ["model-7", "1", "22"] in lines


def test_plain_ascii_terminals_and_foreign_names() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    for sheet in sheets("gpt2", "mistral-7b", kv=(2048,), flops=True, memory=True, compared=True, batch=2):
        Console(file=file, width=80).print(sheet)
    Console(file=file, width=80).print(Sheet("[red]x\x1b[31m", ("[/b]\n",), (SheetRow("\x07", ("1",)),)))
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "2 x 2,048 tokens" in text and "\x1b" not in text and "\x07" not in text and "[red]x" in text
