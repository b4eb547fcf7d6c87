"""Tables as they are printed: whole numbers at any width, columns that fit, and no markup from outside."""

import io
import json

import msgspec
import pytest
from helpers.covering import few
from rich.cells import cell_len
from rich.console import Console

from gptkit.analysis.params import ModelCount, params
from gptkit.components import ModelSpec
from gptkit.report.counts import parameter_table
from gptkit.report.rows import By
from gptkit.terminal import print_json

WIDTHS = [20, 40, 60, 80, 200]


def model(name: str) -> ModelCount:
    (found,) = params(name)
    return found


def mixed() -> ModelCount:
    """GPT-2 with the norm of its upper layers' feed-forward removed."""
    spec = model("gpt2").spec
    upper = [block.replaced(parallel=True, feed_forward_norm=None) for block in spec.blocks[4:]]
    return named("mixed", msgspec.structs.replace(spec, blocks=(*spec.blocks[:4], *upper)))


def named(name: str, spec: ModelSpec) -> ModelCount:
    return ModelCount(name, "local", spec)


def render(
    models: list[ModelCount], width: int = 80, *, by: By = "component", dtype: str | None = None, **options: object
) -> str:
    file = io.StringIO()
    Console(file=file, width=width, **options).print(parameter_table(models, by, dtype))
    return file.getvalue()


def row(text: str, label: str) -> str:
    """The one line that starts with `label`, its blanks folded."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith(label)]
    assert len(lines) == 1, (label, lines)
    return lines[0]


def test_one_model_at_80_columns() -> None:
    text = render([model("qwen3-8b")])
    assert row(text, "qwen3-8b") == "qwen3-8b qwen3"
    assert row(text, "36 layers") == "36 layers · hidden size 4,096 · positions: rotary, base 1,000,000 · context"
    assert row(text, "embedding") == "embedding 151,936 × 4,096 622,329,856 7.6 %"
    assert row(text, "norms") == "norms RMSNorm, eps 1e-06, pre-norm 308,224 <0.1 %"
    assert row(text, "attention") == "attention GQA, 32 q, 8 kv, head dim 128 1,509,949,440 18.4 %"
    assert row(text, "feed-forward") == "feed-forward gated, silu, 12,288 5,435,817,984 66.4 %"
    assert row(text, "head") == "head 151,936 × 4,096 622,329,856 7.6 %"
    assert row(text, "total") == "total 8,190,735,360 100.0 %"
    assert row(text, "layer ") == "layer each of 36 layers 192,946,432 2.4 %"
    assert "6,946,075,648" in row(text, "no embedding")


def test_a_tied_head_is_noted() -> None:
    text = render([model("gpt2")])
    assert row(text, "head") == "head tied to the embedding, counted once tied"
    assert row(text, "total") == "total 124,439,808 100.0 %"


def test_a_tied_head_with_a_bias_has_a_row_of_its_own() -> None:
    spec = model("gpt2").spec
    spec = msgspec.structs.replace(spec, head=msgspec.structs.replace(spec.head, bias=True))
    assert row(render([named("m", spec)], 100), "head") == (
        "head tied to the embedding, counted once; bias 50,257 <0.1 %"
    )


def test_numbers_are_right_aligned() -> None:
    lines = render([model("qwen3-8b")]).splitlines()
    ends = {
        line.index(number) + len(number)
        for number in ("622,329,856 ", "308,224 ", "8,190,735,360 ")
        for line in lines
        if number in line
    }
    assert len(ends) == 1


def test_the_total_is_bold() -> None:
    text = render([model("gpt2")], force_terminal=True, color_system="truecolor")
    line = next(line for line in text.splitlines() if "total" in line)
    assert "\x1b[1m" in line


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = render([model("gpt2")], force_terminal=True, color_system="truecolor")
    assert "\x1b[3" not in text


@few(16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("by", ["component", "layer", "tensor"])
@pytest.mark.parametrize(
    "names", [["qwen3-8b"], ["gpt2", "qwen3-8b"], ["gpt2", "gpt3-175b", "bloom-176b", "falcon-7b", "mistral-7b"]]
)
def test_totals_are_whole_at_any_width(names: list[str], by: By, width: int) -> None:
    models = [*map(model, names), *([mixed()] if by != "component" else [])]
    text = render(models, width, by=by)
    for found in (each.count for each in models):
        assert any(f"{found.total:,}" in line for line in text.splitlines())
        if by == "layer":
            assert all(f"{layer.total:,}" in text for layer in found.by_layer)
    assert "…" not in text
    assert all(cell_len(line) <= width for line in text.splitlines())


def test_widths_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    Console(file=file).print(parameter_table([model("qwen3-8b")]))
    assert row(file.getvalue(), "total") == "total 8,190,735,360 100.0 %"
    assert "GQA" not in file.getvalue()  # what it is has no room


@pytest.mark.parametrize("width", [1, 2, 5, 10])
def test_absurd_widths_do_not_crash(width: int) -> None:
    render([model("qwen3-8b")], width, by="layer")
    render([model("gpt2"), mixed()], width, by="layer")


def test_layers_that_differ_are_told_by_range() -> None:
    text = render([mixed()])
    assert row(text, "layers 0–3") == "layers 0–3 each of 4 layers 7,087,872 5.7 %"
    assert row(text, "layers 4–11") == "layers 4–11 each of 8 layers 7,086,336 5.7 %"
    assert "12 layers (they differ)" in text


def test_what_differs_from_layer_to_layer_is_said_to() -> None:
    spec = model("gpt2").spec
    wider = spec.blocks[1].replaced(
        feed_forward=msgspec.structs.replace(spec.blocks[1].feed_forward, intermediate_size=4096)
    )
    spec = msgspec.structs.replace(spec, blocks=(spec.blocks[0], wider, *spec.blocks[2:]))
    text = render([named("m", spec)])
    assert row(text, "feed-forward").startswith("feed-forward layers differ ")
    assert row(text, "layer 1") == "layer 1 8,661,760 6.9 %"

    alternating = msgspec.structs.replace(spec, blocks=(spec.blocks[0], wider) * 6)
    assert row(render([named("m", alternating)]), "each layer") == "each layer from 7,087,872 to 8,661,760 varies"


def test_one_layer_alone() -> None:
    spec = model("gpt2").spec
    text = render([named("m", msgspec.structs.replace(spec, blocks=spec.blocks[:1]))])
    assert row(text, "1 layer ·").startswith("1 layer · hidden")
    assert row(text, "layer ").startswith("layer 7,087,872")


def test_by_layer_folds_neighbours_alike() -> None:
    text = render([mixed()], by="layer")
    breakdown = text[text.rindex("layer ", 0, text.index("each layer")) :]
    assert row(breakdown, "layer") == "layer norms attention feed-forward each layer"
    assert row(breakdown, "0–3") == "0–3 3,072 2,362,368 4,722,432 7,087,872"
    assert row(breakdown, "4–11") == "4–11 1,536 2,362,368 4,722,432 7,086,336"


def test_by_layer_at_40_columns_has_a_line_a_component() -> None:
    text = render([mixed()], 40, by="layer")
    assert row(text, "4–11") == "4–11 7,086,336"
    assert " norms" in text


def test_several_models_have_a_column_each_where_they_fit() -> None:
    text = render([model("gpt2"), model("qwen3-8b")])
    assert " ".join(text.splitlines()[0].split()) == "gpt2 qwen3-8b"
    assert row(text, "family") == "family gpt2 qwen3"
    assert row(text, "layers") == "layers 12 36"
    assert row(text, "positions") == "positions 786,432 –"
    assert row(text, "head") == "head tied 622,329,856"
    assert row(text, "total") == "total 124,439,808 8,190,735,360"


def test_models_that_are_all_tied_say_so() -> None:
    assert row(render([model("gpt2"), model("gpt2-medium")]), "head") == "head tied tied"


def test_more_models_have_a_row_each() -> None:
    names = ["gpt2", "gpt2-xl", "llama-2-7b", "bloom-176b", "falcon-7b"]
    text = render([model(name) for name in names])
    assert row(text, "model") == "model parameters no embedding layers head"
    assert row(text, "llama-2-7b") == "llama-2-7b 6,738,415,616 6,476,271,616 32 own"
    assert row(text, "gpt2 ") == "gpt2 124,439,808 85,056,000 12 tied"


def test_the_layers_of_several_models_follow_under_their_names() -> None:
    text = render([model("gpt2"), model("qwen3-8b")], by="layer")
    lines = [line.strip() for line in text.splitlines()]
    assert lines.index("gpt2") < lines.index("qwen3-8b")
    assert "192,946,432" in row(text, "0–35")


def test_names_are_neither_markup_nor_control_characters() -> None:
    name = "[red]x[/red]\x1b[31m\n[/nonsense]"
    found = ModelCount(name, "gpt2", model("gpt2").spec)
    for models in ([found], [found] * 2):
        for width in (80, 40):
            text = render(models, width, by="layer")
            assert "\x1b" not in text
            assert "[red]" in text


def test_plain_ascii_terminals() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    table = parameter_table([ModelCount("qwen3-ß", "qwen3", model("qwen3-8b").spec)], by="layer")
    Console(file=file, width=80).print(table)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "151,936 x 4,096" in text
    assert "0-35" in text
    assert "qwen3-?" in text


def test_no_models_print_nothing() -> None:
    assert render([]).strip() == ""


def test_json_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    found = model("qwen3-8b").count
    data = found.as_json()
    print_json(data)
    out = capsys.readouterr().out
    assert json.loads(out) == data
    assert "8190735360" in out
    assert "\x1b" not in out
    with pytest.raises(ValueError):
        print_json({"not a number": float("nan")})
