"""Drawings of a model: that nothing overlaps, every line ends where its edge does, and all of it fits."""

import io
import itertools
import re
from collections.abc import Iterator

import pytest
from helpers import covering
from helpers.covering import covered, examples, few, functions
from helpers.drawn_specs import specs
from helpers.families import CONFIGS, DISTINCT, spec_of
from helpers.family_specs import preset_spec as preset
from helpers.trees import TREES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gptkit.analysis.parameters import count
from gptkit.architectures.presets import presets
from gptkit.components import ModelSpec
from gptkit.report import diagram, drawing
from gptkit.report.diagram import block_diagram, text_width, title_lines
from gptkit.report.drawing import path_lines
from gptkit.report.placement import Box, Metrics, Placement, Wire, _Lanes, folded, place
from gptkit.report.sheets import Drawing
from gptkit.report.structure import Structure, structure
from gptkit.report.tree import tree_drawing, tree_lines, tree_rows

ALL: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}
SOME = (
    *DISTINCT,
    "bloom-post-norm",
    "latent-deepseek",
    "latent-positions-alone",
    "experts-plain",
    "experts-one",
    "both",
)


def placements(spec: ModelSpec) -> Iterator[tuple[Structure, Placement, Metrics]]:
    """In pixels, and in characters for terminals of two widths."""
    graph = structure(spec)
    for kind in graph.kinds:
        nodes = graph.path(kind)
        yield graph, place(nodes, diagram.METRICS, diagram.PHONE - 2 * diagram.EDGE, diagram.ROOMS), diagram.METRICS
        for width, ascii_only in ((78, False), (48, True)):
            metrics = drawing.metrics(ascii_only)
            yield graph, place(nodes, metrics, width, drawing.ROOMS), metrics


Part = tuple[int, int, int, int]


def parts_of(wire: Wire) -> list[Part]:
    """The straight parts of a line, (x0, y0, x1, y1) with both ends, without the end that touches its target."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
        found.append([min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)])
    (x0, y0), (x1, y1) = wire.points[-2:]
    if x0 == x1 and y0 < y1:
        found[-1][3] -= 1
    elif x0 < x1:
        found[-1][2] -= 1
    elif x0 > x1:
        found[-1][0] += 0 if wire.kind == "choice" else 1
    return [(x0, y0, x1, y1) for x0, y0, x1, y1 in found if x0 <= x1 and y0 <= y1]


def meet(one: Part, other: Part) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


def cells(box: Box) -> Part:
    return box.left, box.top, box.right - 1, box.bottom - 1


def check(placed: Placement, metrics: Metrics) -> None:
    for one, other in itertools.combinations(placed.boxes, 2):
        apart_across = one.right <= other.left or other.right <= one.left
        assert apart_across or one.bottom <= other.top or other.bottom <= one.top, (one.node.id, other.node.id)
    for box in placed.boxes:
        assert box.left >= 0 and box.right <= placed.width and box.top >= 0 and box.bottom <= placed.height
        assert box.left <= box.port <= box.right
    for frame in placed.frames:
        for box in placed.boxes:
            within = frame.left < box.left and box.right < frame.left + frame.width
            within = within and frame.top < box.top and box.bottom < frame.top + frame.height
            beside = box.right <= frame.left or box.left >= frame.left + frame.width
            beside = beside or box.bottom <= frame.top or box.top >= frame.top + frame.height
            assert within if box.node.id in frame.nodes else beside, box.node.id
        assert frame.width >= metrics.frame(frame.copies)
    check_wires(placed, metrics)


def check_wires(placed: Placement, metrics: Metrics) -> None:
    drawn = {(wire.source, wire.target) for wire in placed.wires}
    edges = {(e.source, e.target, e.kind) for box in placed.boxes for e in box.node.edges()}
    missing = {(source, target) for source, target, kind in edges if kind != "choice"} - drawn
    assert not missing and drawn <= {(source, target) for source, target, _ in edges}
    chosen = {source for source, _, kind in edges if kind == "choice"}
    assert {wire.source for wire in placed.wires if wire.kind == "choice"} == chosen
    for wire in placed.wires:
        source, target = placed.box(wire.source), placed.box(wire.target)
        for (x0, y0), (x1, y1) in itertools.pairwise(wire.points):
            assert (x0 == x1) != (y0 == y1) or (x0, y0) == (x1, y1), "lines go down or sideways"
        if wire.kind in ("weights", "again"):
            assert wire.points[0][0] == source.left and wire.points[-1][0] == target.left
            continue
        assert wire.points[0] == (source.port, source.bottom)
        x, y = wire.points[-1]
        if wire.kind == "choice":
            (frame,) = [frame for frame in placed.frames if wire.target in frame.nodes]
            assert x == frame.left and frame.top <= y <= frame.top + frame.height
        elif wire.points[-2][0] != x:
            assert (x, y) == (target.right, target.middle)
        else:
            assert (x, y) == (target.port, target.top)
        for box in placed.boxes:
            if box.node.id not in (wire.source, wire.target):
                crossed = any(meet(part, cells(box)) for part in parts_of(wire))
                assert not crossed, (wire.source, wire.target, box.node.id)
    lines = [(wire, parts_of(wire)) for wire in placed.wires if wire.kind not in ("weights", "again")]
    for (one, here), (other, there) in itertools.combinations(lines, 2):
        if one.source != other.source and one.target != other.target:
            touch = any(meet(a, b) for a in here for b in there)
            assert not touch, (one.source, one.target, other.source, other.target)


# --- where things stand -----------------------------------------------------------------------------------------------


@covered("name", by=lambda name: functions(ALL[name]))
@pytest.mark.parametrize("name", ALL)
def test_nothing_overlaps_and_lines_end_where_edges_do(name: str) -> None:
    for _, placed, metrics in placements(ALL[name]):
        check(placed, metrics)


@settings(deadline=None, max_examples=examples(25))
@given(specs())
def test_nor_in_trees_that_no_family_has(spec: ModelSpec) -> None:
    for _, placed, metrics in placements(spec):
        check(placed, metrics)


def test_the_stream_runs_down_on_one_line_and_branches_stand_right_of_it() -> None:
    for name in ("gpt2", "falcon-7b", "bloom-post-norm"):
        for _, placed, metrics in placements(ALL[name]):
            ports = {box.node.id: box.port for box in placed.boxes if box.trunk}
            assert set(ports.values()) == {metrics.stream}
            assert {"x", "attention_output", "block_output"} - ports.keys() <= {"attention_output"}
            assert ("attention_norm" in ports) == (name == "bloom-post-norm")
            assert all(box.left >= metrics.left for box in placed.boxes if not box.trunk)


def test_parallel_branches_are_side_by_side_and_serial_ones_below_each_other() -> None:
    for name, parallel in (("falcon-7b", True), ("falcon-40b", True), ("gpt2", False), ("falcon-serial", False)):
        for _, placed, _ in placements(ALL[name]):
            mixed, up = placed.box("attention.o_proj"), placed.box("feed_forward.up_proj")
            assert (up.top < mixed.top) == parallel
            assert not parallel or up.left > placed.box("attention.v_proj").right


def test_a_mistake_in_the_layout_would_be_seen() -> None:
    """The checks above fail on a box moved, a line moved, an edge left out."""
    from dataclasses import replace

    _, placed, metrics = next(placements(ALL["qwen3"]))
    check(placed, metrics)
    q, k = placed.box("attention.q_proj"), placed.box("attention.k_proj")
    moved = tuple(replace(box, left=box.left + 20) if box is q else box for box in placed.boxes)
    wires = placed.wires
    wrong = [
        replace(placed, boxes=moved),
        replace(placed, wires=wires[1:]),
        replace(placed, width=placed.width - 10),
        replace(placed, boxes=tuple(replace(box, top=box.top + 5) if box is k else box for box in placed.boxes)),
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            check(each, metrics)


def test_words_are_folded_between_words_and_never_in_numbers() -> None:
    assert folded("4,096 × 4,096 + bias", 9) == ["4,096", "× 4,096", "+ bias"]
    assert folded("feed_forward_norm", 12) == ["feed_", "forward_norm"]
    assert folded("(B, T, 32, 128)", 8) == ["(B, T,", "32, 128)"]
    assert folded("q·kᵀ / √128", 6) == ["q·kᵀ", "/ √128"]
    assert folded("131,072", 2) == ["131,072"]


@given(st.text("ab_ ×+1,", max_size=30), st.integers(1, 20))
def test_folding_loses_nothing(text: str, room: int) -> None:
    lines = folded(text, room)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line) <= room or " " not in line.strip("×+ ") for line in lines)


# --- in a terminal ----------------------------------------------------------------------------------------------------


def shown(renderable: object, width: int, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(file=file, width=width, highlight=False).print(renderable)
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@few(12)
@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-70b", "mixtral-8x7b", "falcon-40b", "bloom-176b", "qwen3-8b"])
def test_drawings_fit_the_terminal_with_every_part_and_number(name: str, width: int) -> None:
    spec = preset(name)
    graph = structure(spec)
    for encoding in ("utf-8", "ascii"):
        text = shown(
            Drawing(lambda page: path_lines(graph, graph.kinds[0], page.width, page.ascii_only)), width, encoding
        )
        assert max(map(cell_len, text.splitlines())) <= width
        together = text.replace("\n", " ")
        for node in graph.path(graph.kinds[0]):
            for _, shape in node.weights:
                for size in shape:
                    assert f"{size:,}" in together, node.id
        for part in ("attention_norm", "q_proj", "k_proj", "v_proj", "o_proj", "softmax", "final_norm", "head"):
            assert all(piece in together for piece in re.findall("[^_]*_|[^_]+$", part)), part
        tree = shown(tree_drawing(graph), width, encoding)
        figures = [row.number for row in tree_rows(graph)] + [count(spec).total]
        assert max(map(cell_len, tree.splitlines())) <= max(width, 24)
        for number in figures:
            assert f"{number:,}" in tree or number == 0
        assert encoding == "utf-8" or tree.isascii()


@settings(deadline=None, max_examples=examples(40))
@given(specs(), st.integers(24, 130), st.booleans())
@example(ALL["latent-two-keys"], 80, False)
def test_lines_are_never_wider_than_asked(spec: ModelSpec, width: int, ascii_only: bool) -> None:
    graph = structure(spec)
    for kind in graph.kinds:
        lines = [line.plain for line in path_lines(graph, kind, width, ascii_only)]
        assert max(map(cell_len, lines)) <= width
        assert not ascii_only or "".join(lines).isascii()
    lines = [line.plain for line in tree_lines(graph, width, ascii_only)]
    assert max(map(cell_len, lines)) <= width


def joined(lines: list[str]) -> None:
    """Every character of a line goes on in its neighbours: no line ends in nothing, or beside a box."""
    ways = {
        "│": "UD", "─": "LR", "┌": "DR", "┐": "DL", "└": "UR", "┘": "UL", "├": "UDR", "┤": "UDL", "┬": "DLR",
        "┴": "ULR", "┼": "UDLR", "┃": "UD", "┠": "UDR", "┰": "DLR", "┸": "ULR", "⊕": "UDR",
    }  # fmt: skip
    grid = {(x, y): letter for y, line in enumerate(lines) for x, letter in enumerate(line)}
    steps = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}
    back = {"U": "D", "D": "U", "L": "R", "R": "L"}
    for (x, y), letter in grid.items():
        for way in ways.get(letter, ""):
            dx, dy = steps[way]
            beside = grid.get((x + dx, y + dy), " ")
            if beside in ways:
                assert back[way] in ways[beside] or letter == "⊕" or beside == "⊕", (x, y, letter, beside)
            elif way in "LR":
                assert beside != " " or letter == "⊕" or x >= max(map(len, lines)) - 2, (x, y, letter, beside)


@pytest.mark.parametrize("name", SOME)
def test_every_line_in_the_drawing_leads_somewhere(name: str) -> None:
    graph = structure(ALL[name])
    for kind in graph.kinds[:2]:
        joined([line.plain for line in path_lines(graph, kind, 100)])


@pytest.mark.parametrize("wrong", ["│\n─", "┌ ─   .", "┃\n┬──   ."])
def test_a_line_that_ends_in_nothing_would_be_seen(wrong: str) -> None:
    with pytest.raises(AssertionError):
        joined(wrong.splitlines())


def test_golden_drawings() -> None:
    graph = structure(ALL["llama-3"])
    assert [line.plain for line in path_lines(graph, graph.kinds[0], 80)] == GOLDEN.strip("\n").splitlines()
    rows = [line.plain for line in tree_lines(graph, 80)]
    assert rows == GOLDEN_TREE.strip("\n").splitlines()


GOLDEN = """
  ┃ token ids (B, T)
┌─┸──────────┐
│ embedding  │
│  97 × 48   │
│ (B, T, 48) │
└─┰──────────┘
  ┃ x (B, T, 48)                          each of 2 layers ┐
  ┠─────────────────────────────┐                          │
  ┃                    ┌────────┴───────┐                  │
  ┃                    │ attention_norm │                  │
  ┃                    │    RMSNorm     │                  │
  ┃                    └────────┬───────┘                  │
  ┃           ┌─────────────────┼─────────────────┐        │
  ┃   ┌───────┴──────┐  ┌───────┴──────┐  ┌───────┴──────┐ │
  ┃   │    q_proj    │  │    k_proj    │  │    v_proj    │ │
  ┃   │   48 × 48    │  │   24 × 48    │  │   24 × 48    │ │
  ┃   │ (B, T, 6, 8) │  │ (B, T, 3, 8) │  │ (B, T, 3, 8) │ │
  ┃   └───────┬──────┘  └───────┬──────┘  └───────┬──────┘ │
  ┃         RoPE              RoPE              cache      │
  ┃           │               cache               │        │
  ┃           └────────┬────────┘                 │        │
  ┃                q·kᵀ / √8                      │        │
  ┃      6 q heads, 2 to each kv head             │        │
  ┃              (B, 6, T, S)                     │        │
  ┃                qq qq qq                       │        │
  ┃                k  k  k                        │        │
  ┃                    │                          │        │
  ┃             softmax, causal                   │        │
  ┃                    └────────┬─────────────────┘        │
  ┃                        weights · v                     │
  ┃                       (B, T, 6, 8)                     │
  ┃                      ┌──────┴─────┐                    │
  ┃                      │   o_proj   │                    │
  ┃                      │  48 × 48   │                    │
  ┃                      │ (B, T, 48) │                    │
  ┃                      └──────┬─────┘                    │
  ⊕─────────────────────────────┘                          │
  ┠─────────────────────────────┐                          │
  ┃                   ┌─────────┴─────────┐                │
  ┃                   │ feed_forward_norm │                │
  ┃                   │      RMSNorm      │                │
  ┃                   └─────────┬─────────┘                │
  ┃                     ┌───────┴───────┐                  │
  ┃              ┌──────┴─────┐  ┌──────┴─────┐            │
  ┃              │ gate_proj  │  │  up_proj   │            │
  ┃              │  72 × 48   │  │  72 × 48   │            │
  ┃              │ (B, T, 72) │  │ (B, T, 72) │            │
  ┃              └──────┬─────┘  └──────┬─────┘            │
  ┃                   silu              │                  │
  ┃                     └───────┬───────┘                  │
  ┃                         gate · up                      │
  ┃                      ┌──────┴─────┐                    │
  ┃                      │ down_proj  │                    │
  ┃                      │  48 × 72   │                    │
  ┃                      │ (B, T, 48) │                    │
  ┃                      └──────┬─────┘                    │
  ⊕─────────────────────────────┘                         ─┘
┌─┸──────────┐
│ final_norm │
│  RMSNorm   │
└─┰──────────┘
┌─┸──────────┐
│    head    │
│  97 × 48   │
│ (B, T, 97) │
└────────────┘
"""

GOLDEN_TREE = """
embedding             [97 × 48]                        4,656
blocks.0–1            2 alike, each               2 × 17,376
├─ attention_norm     RMSNorm [48]                        48
├─ attention          GQA, 6 q, 3 kv, head dim 8       6,912
│  ├─ q_proj          [48 × 48]                        2,304
│  ├─ k_proj          [24 × 48]                        1,152
│  ├─ v_proj          [24 × 48]                        1,152
│  └─ o_proj          [48 × 48]                        2,304
├─ feed_forward_norm  RMSNorm [48]                        48
└─ feed_forward       gated, silu, 72                 10,368
   ├─ gate_proj       [72 × 48]                        3,456
   ├─ up_proj         [72 × 48]                        3,456
   └─ down_proj       [48 × 72]                        3,456
final_norm            RMSNorm [48]                        48
head                  [97 × 48]                        4,656
total                                                 44,112
"""


def test_heads_are_drawn_in_their_groups() -> None:
    def groups(name: str, width: int = 80) -> list[str]:
        graph = structure(preset(name))
        lines = [line.plain for line in path_lines(graph, graph.kinds[0], width)]
        found = [line for line in lines if re.search(r"qq|q q", line) or re.search(r" k +k | k +│", line)]
        return [" ".join(re.findall(r"[qk…]+", line)) for line in found if not re.search("[a-jl-pr-z]", line)]

    assert groups("qwen3-8b") == [" ".join(["qqqq"] * 8), " ".join("k" * 8)]
    assert groups("llama-2-7b")[0].endswith("…")  # 32 of each
    assert groups("gpt2") == [" ".join("q" * 12), " ".join("k" * 12)]


# --- as a figure ------------------------------------------------------------------------------------------------------


@few(5)
@pytest.mark.parametrize("name", SOME)
def test_words_fit_their_boxes(name: str) -> None:
    pytest.importorskip("plotly", reason='figures need pip install "gptkit[html]"')
    for graph, placed, metrics in placements(ALL[name]):
        for box in placed.boxes:
            if metrics is diagram.METRICS and box.node.op != "add":
                first = 0 if box.node.op in ("tokens", "stream") else title_lines(box.node, box.lines)
                assert max(text_width(line, index < first) for index, line in enumerate(box.lines)) <= box.width
            elif box.node.op != "add":
                assert max(map(len, box.lines)) <= box.width
        kind = graph.kinds[0]
        figure = block_diagram(ALL[name], kind.layers[0])
        layout = figure.spec["layout"]
        assert figure.height == layout["height"]
        hovers = figure.spec["data"][0]["hovertext"]
        nodes = graph.path(kind)
        assert len(hovers) == len(nodes) == len(figure.table.rows)
        for node, hover in zip(nodes, hovers, strict=True):
            assert node.id in hover and (not node.parameters or f"{node.parameters:,}" in hover)
        bars = [shape for shape in layout["shapes"] if shape["type"] == "rect"]
        assert len(bars) >= 2 and all(bar["x1"] - bar["x0"] > 0.5 for bar in bars)
        said = " ".join(note["text"] for note in layout["annotations"])
        assert "attention_norm" in said and "softmax" in said
        colours = re.findall(r'"(?:color|fillcolor|bgcolor)": ?"([^"]+)"', str(layout).replace("'", '"'))
        assert colours and all(colour.startswith(("var(--", "rgba(0,0,0,0)")) for colour in colours)


@pytest.mark.parametrize(
    ("name", "keys", "queries"),
    [("qwen3-8b", 8, 32), ("llama-2-7b", 32, 32), ("falcon-7b", 1, 71), ("gpt2", 12, 12), ("falcon-40b", 3, 48)],
)
def test_heads_are_bars_in_their_groups(name: str, keys: int, queries: int) -> None:
    pytest.importorskip("plotly", reason='figures need pip install "gptkit[html]"')
    bars = [shape for shape in block_diagram(preset(name)).spec["layout"]["shapes"] if shape["type"] == "rect"]
    below = [bar for bar in bars if bar["fillcolor"] == "var(--mark)"]
    above = [bar for bar in bars if bar["fillcolor"] == "var(--quiet)"]
    assert (len(below), len(above)) == (keys, queries)  # falcon-40b has 8 and 128: the rest are dots
    for bar in below:
        mine = [each for each in above if bar["x0"] - 0.1 <= each["x0"] and each["x1"] <= bar["x1"] + 0.1]
        assert len(mine) == queries // keys


def widest(spec: ModelSpec) -> int:
    """How many lanes the widest part of a tree's first kind of layer has beside the stream."""
    graph = structure(spec)
    return max(_Lanes(graph.path(graph.kinds[0])).lanes.values())


def test_most_diagrams_fit_a_phone() -> None:
    some = [*ALL][:: 4 if covering.quick else 1]
    widths = {name: next(placements(ALL[name]))[1].width + 2 * diagram.EDGE for name in some}
    lanes = {name: widest(spec) for name, spec in ALL.items()}  # side by side: queries, keys and values are three
    # Five are what a Mamba-2 mixer's projection and its convolution give, and eight those beside attention.
    bounds = {4: 370, 5: 480, 6: 560, 7: 655, 8: 670}
    wide = {name: (lanes[name], width) for name, width in widths.items() if width > bounds.get(lanes[name], 343)}
    assert wide == {}
    assert max(lanes.values()) == max(bounds)


@few(15)
@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_drawn(name: str) -> None:
    spec = preset(name)
    graph = structure(spec)
    for kind in graph.kinds[:2]:
        check(place(graph.path(kind), diagram.METRICS, diagram.PHONE, diagram.ROOMS), diagram.METRICS)
        assert list(path_lines(graph, kind, 80))
    assert sum(row.number * row.copies for row in tree_rows(graph) if row.depth == 0) == count(spec).total
