"""Where the nodes of a path stand in a drawing, and how the lines between them run.

One layout serves the terminal, where a unit is a character, and the pictures, where it is a pixel. All of it is found
from the graph: `lanes` says what stands below and beside what.

A line goes down from its source, sideways in a *track* between two ranks (below a fork, above a join), and down again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .graph import EdgeKind, Node
from .lanes import Lanes, Span, ways

__all__ = ["Box", "Frame", "Metrics", "Placement", "Wire", "boxed", "experts_words", "folded", "place"]

Point = tuple[int, int]


@dataclass(frozen=True)
class Metrics:
    """How large things are, in the drawing's unit.

    measure: (node, lanes that it spans or 0 on the trunk, room for a line in a lane) -> its lines, width and height.
    frame: (copies) -> the least width of a frame around so many. stream: the trunk's x; trunk: where its boxes begin;
    left: where branches may begin; beside: between two lanes; gap: between two ranks at least; track: a line's share of
    that; around: what a frame adds on each side, (x, y).
    """

    measure: Callable[[Node, int, int], tuple[tuple[str, ...], int, int]]
    frame: Callable[[int], int]
    stream: int
    trunk: int
    left: int
    beside: int
    gap: int
    track: int
    around: Point


@dataclass(frozen=True)
class Box:
    """A node's place. port: the x at which lines enter above and leave below."""

    node: Node
    lines: tuple[str, ...]
    left: int
    top: int
    width: int
    height: int
    port: int
    trunk: bool

    @property
    def right(self) -> int:
        return self.left + self.width

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def middle(self) -> int:
        return self.top + self.height // 2


@dataclass(frozen=True)
class Wire:
    """An edge's line, by its corners. It begins below its source, and ends above its target, or at its side."""

    source: str
    target: str
    kind: EdgeKind
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Frame:
    """A border around nodes that belong together: the experts."""

    nodes: tuple[str, ...]
    copies: int
    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Placement:
    """A drawing: boxes in the order of computation."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    frames: tuple[Frame, ...]
    width: int
    height: int

    def box(self, name: str) -> Box:
        """The box of a node."""
        return next(box for box in self.boxes if box.node.id == name)


def place(nodes: Sequence[Node], metrics: Metrics, limit: int, rooms: Sequence[int]) -> Placement:
    """The drawing of a path from its first node to its last, all of which lead to the last.

    Args:
        nodes: in an order in which they can be computed.
        metrics: how large things are.
        limit: the width that it should have at most.
        rooms: widths for a line of words, the widest first: the first is taken with which all of it fits, or the last.

    """
    graph = Lanes.of(nodes)
    spans = graph.spans
    sizes = {name: metrics.measure(graph.nodes[name], 0, max(rooms)) for name in graph.trunk}
    for stage in graph.lanes:
        mine = [name for name in graph.stage if graph.stage[name] == stage]
        for room in rooms:
            tried = {
                name: metrics.measure(graph.nodes[name], 1 + spans[name][1] - spans[name][0], room) for name in mine
            }
            needed = _Placing(graph, metrics, {**sizes, **tried}, (stage,)).width
            if needed <= limit:
                break
        sizes |= tried
    return _Placing(graph, metrics, sizes, tuple(graph.lanes)).placement()


def folded(line: str, room: int) -> list[str]:
    """A line in several of at most `room` letters where its words allow it: between words, but not behind a sign, and
    in a module's name. Numbers are never cut.
    """
    found: list[str] = []
    for unit in re.sub(r"(^| )([×+·/]) ", "\\1\\2\0", line).split(" "):
        word = unit.replace("\0", " ")
        if found and len(found[-1]) + 1 + len(word) <= room:
            found[-1] += f" {word}"
        elif len(word) > room and re.fullmatch(r"[A-Za-z_.]+,?", word):
            found += _name(word, room)
        else:
            found.append(word)
    return found


def _name(name: str, room: int) -> list[str]:
    """A module's name in pieces; each but the last ends with its underscore or dot."""
    found: list[str] = []
    for piece in re.findall(r"[^_.]*[_.]|[^_.]+$", name):
        if found and len(found[-1]) + len(piece) <= room:
            found[-1] += piece
        else:
            found.append(piece)
    return found


# --- sizes and places ------------------------------------------------------------------------------------------------


@dataclass
class _Placing:
    """Boxes of known sizes (lines, width, height), of the stages that are named."""

    graph: Lanes
    metrics: Metrics
    sizes: Mapping[str, tuple[tuple[str, ...], int, int]]
    stages: Sequence[str]
    columns: dict[str, list[Span]] = field(default_factory=dict)
    """Of each stage, where its lanes begin and end."""

    def __post_init__(self) -> None:
        graph = self.graph
        self.framed = [name for name, node in graph.nodes.items() if graph.nodes[_expert(graph, node)].choice]
        widths = {stage: self._widths(stage) for stage in self.stages}
        gaps = {stage: self._gaps(stage) for stage in self.stages}
        totals = {stage: sum(widths[stage]) + sum(gaps[stage]) for stage in self.stages}
        area = max(totals.values(), default=0)
        trunk = max(self._trunk_left(name) + self.sizes[name][1] for name in graph.trunk)
        self.width = max(self.metrics.left + area, trunk)
        area = max(area, self.width - self.metrics.left)
        for stage, lanes in widths.items():
            x = self.metrics.left + (area - totals[stage]) // 2
            self.columns[stage] = []
            for gap, width in zip(gaps[stage], lanes, strict=False):
                self.columns[stage].append((x + gap, x + gap + width))
                x += gap + width

    def _widths(self, stage: str) -> list[int]:
        """Of a stage's lanes, as what stands in them needs."""
        graph, metrics = self.graph, self.metrics
        lanes = [0] * graph.lanes[stage]
        gaps = self._gaps(stage)
        needs = [(graph.spans[name], self.sizes[name][1]) for name in graph.stage if graph.stage[name] == stage]
        inside = [name for name in self.framed if graph.stage[name] == stage]
        if inside:
            copies = max(graph.nodes[name].copies for name in inside)
            needs.append((self._hull(inside), metrics.frame(copies) - 2 * metrics.around[0]))
        for (first, last), width in sorted(needs, key=lambda need: need[0][1] - need[0][0]):
            there = sum(lanes[first : last + 1]) + sum(gaps[first + 1 : last + 1])
            missing = max(width - there, 0)
            for index in range(first, last + 1):
                share = -(-missing // (last - index + 1))
                lanes[index] += share
                missing -= share
        return lanes

    def _hull(self, names: Sequence[str]) -> Span:
        spans = [self.graph.spans[name] for name in names]
        return min(span[0] for span in spans), max(span[1] for span in spans)

    def _gaps(self, stage: str) -> list[int]:
        """Blanks before each lane and behind the last: a frame needs more."""
        graph = self.graph
        gaps = [0, *[self.metrics.beside] * (graph.lanes[stage] - 1), 0]
        inside = [name for name in self.framed if graph.stage[name] == stage]
        if inside:
            first, last = self._hull(inside)
            gaps[first] += self.metrics.around[0]
            gaps[last + 1] += self.metrics.around[0]
        return gaps

    def _trunk_left(self, name: str) -> int:
        """Boxes with weights begin left of the stream's line, words right of it; a sum stands on it."""
        node = self.graph.nodes[name]
        if node.op == "add":
            return self.metrics.stream - self.sizes[name][1] // 2
        return self.metrics.trunk if boxed(node) else self.metrics.stream

    def _port(self, name: str) -> int:
        if name in self.graph.trunk:
            return self.metrics.stream
        stage, span = self.graph.stage[name], self.graph.spans[name]
        return self._middle(stage, span)

    def _middle(self, stage: str, span: Span) -> int:
        """The middle of the lanes spanned, or of the lane in their middle where all that spans them has room
        around it: a line to it is straight then.
        """
        lanes = self.columns[stage][span[0] : span[1] + 1]
        left, right = lanes[0][0], lanes[-1][1]
        middle = (left + right) // 2
        if len(lanes) % 2 == 0:
            return middle
        inner = sum(lanes[len(lanes) // 2]) // 2
        graph = self.graph
        alike = [name for name in graph.stage if graph.stage[name] == stage and graph.spans[name] == span]
        widths = [self.sizes[name][1] for name in alike]
        fits = all(left <= inner - width // 2 and inner - width // 2 + width <= right for width in widths)
        return inner if fits else middle

    def placement(self) -> Placement:
        graph = self.graph
        ports = {name: self._port(name) for name in graph.nodes}
        turns = self._turns(ports)
        tops, tracks, height = self._rows(turns)
        boxes = []
        for name, node in graph.nodes.items():
            lines, width, tall = self.sizes[name]
            on = name in graph.trunk
            left = self._trunk_left(name) if on else ports[name] - width // 2
            boxes.append(Box(node, lines, left, tops[graph.rank[name]], width, tall, ports[name], on))
        by_name = {box.node.id: box for box in boxes}
        frames = self._frames(by_name)
        wires = [wire for box in boxes for wire in self._wires(box, by_name, frames, turns, tracks)]
        return Placement(tuple(boxes), tuple(wires), tuple(frames), self.width, height)

    def _turns(self, ports: Mapping[str, int]) -> dict[tuple[str, str], tuple[int, str]]:
        """For each line that goes sideways between ranks: the rank below which it does, and with whose others."""
        graph = self.graph
        found = {}
        for name, node in graph.nodes.items():
            sources = ways(node)
            for source in sources:
                if ports[source] == ports[name] or (name in graph.trunk and source not in graph.trunk):
                    continue
                joins = len(sources) > 1
                found[source, name] = (graph.rank[name] - 1, name) if joins else (graph.rank[source], source)
        return found

    def _rows(
        self, turns: Mapping[tuple[str, str], tuple[int, str]]
    ) -> tuple[dict[int, int], dict[tuple[int, str], int], int]:
        """The y of each rank, of each track by (rank above it, whose it is), and of the end."""
        graph, metrics = self.graph, self.metrics
        framed = {graph.rank[name] for name in self.framed}
        heights: dict[int, int] = defaultdict(int)
        for name, rank in graph.rank.items():
            heights[rank] = max(heights[rank], self.sizes[name][2])
        tops, tracks, y = {}, {}, 0
        for rank in range(max(heights) + 1):
            tops[rank] = y
            y += heights[rank] + (metrics.around[1] if rank in framed and rank + 1 not in framed else 0)
            rows = self._tracks(rank, turns)
            number = 1 + max(rows.values(), default=-1)
            last = rank == max(heights)
            gutter = 0 if last else max(metrics.gap, number * metrics.track)
            spare = (gutter - number * metrics.track) // 2
            for owner, row in rows.items():
                tracks[rank, owner] = y + spare + row * metrics.track + metrics.track // 2
            y += gutter + (metrics.around[1] if rank + 1 in framed and rank not in framed else 0)
        return tops, tracks, y

    def _tracks(self, rank: int, turns: Mapping[tuple[str, str], tuple[int, str]]) -> dict[str, int]:
        """Which of the tracks below a rank each line takes: forks above joins, as many beside each other as fit."""
        reach: dict[str, list[int]] = defaultdict(list)
        for (source, target), (below, owner) in turns.items():
            if below == rank:
                reach[owner] += [self._port(source), self._port(target)]
        rows: dict[str, int] = {}
        for owner in sorted(reach, key=lambda name: self.graph.rank[name]):
            low, high = min(reach[owner]), max(reach[owner])
            taken = {row for other, row in rows.items() if min(reach[other]) <= high and low <= max(reach[other])}
            rows[owner] = 1 + max(taken, default=-1)
        return rows

    def _frames(self, boxes: Mapping[str, Box]) -> list[Frame]:
        inside: dict[str, list[str]] = defaultdict(list)
        for name in self.framed:
            inside[self.graph.stage[name]].append(name)
        dx, dy = self.metrics.around
        found = []
        for stage, names in inside.items():
            first, last = self._hull(names)
            left = self.columns[stage][first][0] - dx
            right = self.columns[stage][last][1] + dx
            top = min(boxes[name].top for name in names) - dy
            bottom = max(boxes[name].bottom for name in names) + dy
            copies = max(self.graph.nodes[name].copies for name in names)
            found.append(Frame(tuple(names), copies, left, top, right - left, bottom - top))
        return found

    def _wires(
        self,
        box: Box,
        boxes: Mapping[str, Box],
        frames: Sequence[Frame],
        turns: Mapping[tuple[str, str], tuple[int, str]],
        tracks: Mapping[tuple[int, str], int],
    ) -> list[Wire]:
        """The lines to a box."""
        found = []
        for edge in box.node.edges():
            source = boxes.get(edge.source)
            if source is None:
                continue
            start, end = (source.port, source.bottom), (box.port, box.top)
            points: tuple[Point, ...]
            if edge.kind == "weights":
                points = ((source.left, source.middle), (0, source.middle), (0, box.middle), (box.left, box.middle))
            elif edge.kind == "choice":
                frame = next(frame for frame in frames if box.node.id in frame.nodes)
                if box.node.id != frame.nodes[0]:
                    continue  # one line for all of a frame's
                points = (start, (source.port, box.middle), (frame.left, box.middle))
            elif box.trunk and not source.trunk:
                points = (start, (source.port, box.middle), (box.right, box.middle))
            elif (edge.source, box.node.id) in turns:
                y = tracks[turns[edge.source, box.node.id]]
                points = (start, (source.port, y), (box.port, y), end)
            else:
                points = (start, end)
            found.append(Wire(edge.source, edge.target, edge.kind, points))
        return found


def boxed(node: Node) -> bool:
    """Whether it has weights, its own or another's, and so a border."""
    return bool(node.weights) or node.tied is not None


def experts_words(copies: int) -> str:
    """What a frame's words are."""
    return "1 expert" if copies == 1 else f"{copies:,} experts"


def _expert(graph: Lanes, node: Node) -> str:
    """The node itself, or the linear that leads to it: what is computed between an expert's two linears."""
    while not node.weights and len(ways(node)) and node.op in ("activation", "product"):
        node = graph.nodes[ways(node)[0]]
    return node.id
