"""Where the nodes of a path stand in a drawing, and how the lines between them run.

One layout serves the terminal, where a unit is a character, and the pictures, where it is a pixel. All of it is found
from the graph. The *trunk* is the residual stream: from the last node back along residual edges. What is beside it
between two of its nodes is a *stage*. There a fork opens a *lane* for each way, what leads to a fork spans all of them,
and so does what joins them again. Lanes stand in the order of the component's program: where it makes one after the
other what it joins, lines never cross. A node's *rank* is one more than that of the last of its inputs, and all that
leaves the trunk stands below where it left.

A line goes down from its source, sideways in a *track* between two ranks (below a fork, above a join), and down again.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .structure import Edge, Node

SHAPED = ("linear", "embed", "positions", "scores", "concat", "mix")  # operations whose shape stands in their box
_Point = tuple[int, int]
Size = tuple[tuple[str, ...], int, int]  # a box's lines, its width and its height
_Span = tuple[int, int]  # the first and the last lane


@dataclass(frozen=True)
class Metrics:
    """How large things are, in the drawing's unit.

    measure: (node, lanes that it spans or 0 on the trunk, room for a line in a lane) -> its lines, width and height.
    frame: (copies) -> the least width of a frame around so many. stream: the trunk's x; trunk: where its boxes begin;
    left: where branches may begin; beside: between two lanes; gap: between two ranks at least; track: a line's share of
    that; around: what a frame adds on each side, (x, y).
    """

    measure: Callable[[Node, int, int], Size]
    frame: Callable[[int], int]
    stream: int
    trunk: int
    left: int
    beside: int
    gap: int
    track: int
    around: _Point


@dataclass(frozen=True)
class Area:
    """A rectangle."""

    left: int
    top: int
    width: int
    height: int

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
class Box(Area):
    """A node's place. port: the x at which lines enter above and leave below."""

    node: Node
    lines: tuple[str, ...]
    port: int
    trunk: bool


@dataclass(frozen=True)
class _Frame(Area):
    """A border around nodes that belong together: the experts."""

    nodes: tuple[str, ...]
    copies: int


@dataclass(frozen=True)
class Wire(Edge):
    """An edge's line, by its corners. It begins below its source, and ends above its target, or at its side."""

    points: tuple[_Point, ...]


@dataclass(frozen=True)
class Placement:
    """A drawing: boxes in the order of computation."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    frames: tuple[_Frame, ...]
    width: int
    height: int

    def box(self, name: str) -> Box:
        return next(box for box in self.boxes if box.node.id == name)


def place(nodes: Sequence[Node], metrics: Metrics, limit: int, rooms: Sequence[int]) -> Placement:
    """The drawing of a path whose nodes, in an order in which they can be computed, all lead to the last.

    limit: the width that it should have at most; rooms: widths for a line of words, the widest first, of which the
    first is taken with which all of it fits, or the last.
    """
    graph = _Lanes(nodes)
    sizes = {name: metrics.measure(graph.nodes[name], 0, max(rooms)) for name in graph.trunk}
    for stage in graph.lanes:
        beside = {name: 1 + last - first for name, (first, last) in graph.spans.items() if graph.stage[name] == stage}
        for room in rooms:
            tried = {name: metrics.measure(graph.nodes[name], lanes, room) for name, lanes in beside.items()}
            if _Arrangement(graph, metrics, {**sizes, **tried}, (stage,)).width <= limit:
                break
        sizes |= tried
    return _Arrangement(graph, metrics, sizes, tuple(graph.lanes)).placement()


def folded(line: str, room: int) -> list[str]:
    """A line in several of at most `room` letters, broken between words or in a module's name, never in a number."""
    lines: list[str] = []
    for unit in re.sub(r"(^| )([×+·/]) ", "\\1\\2\0", line).split(" "):
        word = unit.replace("\0", " ")
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        elif len(word) > room and re.fullmatch(r"[A-Za-z_.]+,?", word):
            lines.append("")
            for piece in re.findall(r"[^_.]*[_.]|[^_.]+$", word):
                if lines[-1] and len(lines[-1]) + len(piece) > room:
                    lines.append("")
                lines[-1] += piece
        else:
            lines.append(word)
    return lines


def boxed(node: Node) -> bool:
    """Whether it has weights, its own or another's, and so a border."""
    return bool(node.weights) or node.tied is not None


def experts_words(copies: int) -> str:
    """What a frame's words are."""
    return "1 expert" if copies == 1 else f"{copies:,} experts"


def _ways(node: Node) -> list[str]:
    """The inputs that a line is drawn from."""
    return [source for source in node.inputs if source != node.choice]


_ELEMENTWISE = ("activation", "product", "cap", "shift", "scale")
"""What may be computed of numbers one by one between two linears."""


class _Lanes:
    """nodes by name in order; trunk: names, first to last; stage: for what is beside it, the trunk's node that it leads
    to; rank; spans: of what is beside the trunk, in lanes of its stage; lanes: how many a stage has.
    """

    # Complex: still to be split.
    def __init__(self, nodes: Sequence[Node]) -> None:  # noqa: C901
        self.nodes = {node.id: node for node in nodes}
        trunk = [nodes[-1].id]
        while self.nodes[trunk[-1]].inputs:
            node = self.nodes[trunk[-1]]
            trunk.append(node.residual or node.inputs[0])
        self.trunk = trunk[::-1]
        self.stage: dict[str, str] = {}
        for node in reversed(nodes):
            for source in node.inputs:
                if source not in trunk:  # the first where there are several
                    joins = [node.id if node.id in trunk else self.stage[node.id], self.stage.get(source, trunk[0])]
                    self.stage[source] = max(joins, key=trunk.index)
        for node in nodes:  # branches that begin in one box stand side by side, though they join the trunk in turn
            if node.id in self.stage:
                joins = [self.stage[name] for name in (node.id, *node.inputs) if name in self.stage]
                self.stage[node.id] = min(joins, key=self.trunk.index)
        for node in reversed(nodes):  # and so does what joins them
            for source in (name for name in node.inputs if name in self.stage and node.id in self.stage):
                self.stage[source] = min(self.stage[source], self.stage[node.id], key=self.trunk.index)
        self.rank: dict[str, int] = {}
        for node in nodes:
            on = self.trunk.index(self.stage.get(node.id, node.id))
            above = [self.rank[self.trunk[on - 1]]] if on else []
            self.rank[node.id] = 1 + max([*above, *(self.rank[source] for source in node.inputs)], default=-1)
        self.spans: dict[str, _Span] = {}
        self.lanes: dict[str, int] = defaultdict(int)
        beside = {node.id: [way for way in _ways(node) if way in self.stage] for node in nodes if node.id in self.stage}
        children: dict[str, list[str]] = defaultdict(list)
        for name, sources in beside.items():
            if len(sources) == 1:
                children[sources[0]].append(name)

        def span(name: str) -> _Span:
            parts = [span(child) for child in children[name]]
            if not parts:
                lane = self.lanes[self.stage[name]]
                self.lanes[self.stage[name]] += 1
                parts = [(lane, lane)]
            self.spans[name] = (parts[0][0], parts[-1][1])
            return self.spans[name]

        for name, sources in beside.items():
            if not sources:
                span(name)

        def wide(name: str) -> int:
            return sum(map(wide, children[name])) or 1

        def spread(name: str, first: int, last: int) -> None:
            """Share out lanes over a node and the ways that begin in it."""
            self.spans[name] = first, last
            forks = children[name]
            more, left = divmod(last - first + 1 - sum(map(wide, forks)), len(forks) or 1)
            for index, fork in enumerate(forks):
                end = first + wide(fork) + more + (index < left) - 1
                spread(fork, first, end)
                first = end + 1

        for name, sources in beside.items():  # what joins lanes, and what follows it
            if name not in self.spans:
                first, last = self.hull(sources)
                stage, lacking = self.stage[name], wide(name) - (last - first + 1)
                if len(children[name]) > 1 and lacking > 0 and last == self.lanes[stage] - 1:
                    self.lanes[stage] += lacking
                    last += lacking
                if wide(name) <= last - first + 1:
                    spread(name, first, last)
                else:
                    self.spans[name] = first, last

    def hull(self, names: Sequence[str]) -> _Span:
        spans = [self.spans[name] for name in names]
        return min(first for first, _ in spans), max(last for _, last in spans)

    def expert(self, name: str) -> Node:
        """The node itself, or the linear that leads to it: what is computed between an expert's two linears."""
        node = self.nodes[name]
        while not node.weights and _ways(node) and node.op in _ELEMENTWISE:
            node = self.nodes[_ways(node)[0]]
        return node


class _Arrangement:
    """Boxes of known sizes (lines, width, height), of the stages that are named.

    columns: of each stage, where its lanes begin and end. inside: of each stage, what stands in the experts' frame.
    """

    def __init__(self, graph: _Lanes, metrics: Metrics, sizes: Mapping[str, Size], stages: Sequence[str]) -> None:
        self.graph, self.metrics, self.sizes = graph, metrics, sizes
        framed = [name for name in graph.nodes if graph.expert(name).choice]
        self.ranks_framed = {graph.rank[name] for name in framed}
        self.inside: dict[str, list[str]] = {}
        for name in framed:
            self.inside.setdefault(graph.stage[name], []).append(name)
        gaps = {}  # blanks before each lane and behind the last: a frame needs more
        for stage in stages:
            gaps[stage] = [0, *[metrics.beside] * (graph.lanes[stage] - 1), 0]
            if stage in self.inside:
                first, last = graph.hull(self.inside[stage])
                gaps[stage][first] += metrics.around[0]
                gaps[stage][last + 1] += metrics.around[0]
        widths = {stage: self._widths(stage, gaps[stage]) for stage in stages}
        totals = {stage: sum(widths[stage]) + sum(gaps[stage]) for stage in stages}
        trunk = max(self._trunk_left(name) + sizes[name][1] for name in graph.trunk)
        self.width = max(metrics.left + max(totals.values(), default=0), trunk)
        area = self.width - metrics.left
        self.columns: dict[str, list[_Span]] = {stage: [] for stage in stages}
        for stage, lanes in widths.items():
            x = metrics.left + (area - totals[stage]) // 2
            for gap, width in zip(gaps[stage], lanes, strict=False):
                self.columns[stage].append((x + gap, x + gap + width))
                x += gap + width

    def _widths(self, stage: str, gaps: Sequence[int]) -> list[int]:
        graph, metrics, inside = self.graph, self.metrics, self.inside.get(stage)
        lanes = [0] * graph.lanes[stage]
        needs = [(graph.spans[name], self.sizes[name][1]) for name in graph.stage if graph.stage[name] == stage]
        if inside:
            copies = max(graph.nodes[name].copies for name in inside)
            needs.append((graph.hull(inside), metrics.frame(copies) - 2 * metrics.around[0]))
        for (first, last), width in sorted(needs, key=lambda need: need[0][1] - need[0][0]):
            there = sum(lanes[first : last + 1]) + sum(gaps[first + 1 : last + 1])
            missing = max(width - there, 0)
            for index in range(first, last + 1):
                share = -(-missing // (last - index + 1))
                lanes[index] += share
                missing -= share
        return lanes

    def _trunk_left(self, name: str) -> int:
        """Boxes with weights begin left of the stream's line, words right of it; a sum stands on it."""
        node = self.graph.nodes[name]
        if node.op == "add":
            return self.metrics.stream - self.sizes[name][1] // 2
        return self.metrics.trunk if boxed(node) else self.metrics.stream

    def _port(self, name: str) -> int:
        """The stream's x; beside it the middle of the lanes spanned, or of the lane in their middle where all that
        spans them has room around it: a line to it is straight then.
        """
        graph = self.graph
        if name in graph.trunk:
            return self.metrics.stream
        stage, span = graph.stage[name], graph.spans[name]
        lanes = self.columns[stage][span[0] : span[1] + 1]
        left, right = lanes[0][0], lanes[-1][1]
        middle = (left + right) // 2
        if len(lanes) % 2 == 0:
            return middle
        inner = sum(lanes[len(lanes) // 2]) // 2
        alike = [other for other in graph.stage if graph.stage[other] == stage and graph.spans[other] == span]
        widths = [self.sizes[other][1] for other in alike]
        fits = all(left <= inner - width // 2 and inner - width // 2 + width <= right for width in widths)
        return inner if fits else middle

    def placement(self) -> Placement:
        graph = self.graph
        self.ports = {name: self._port(name) for name in graph.nodes}
        # For each line that goes sideways between ranks: the rank below which it does, and with whose others.
        self.turns: dict[tuple[str, str], tuple[int, str]] = {}
        for name, node in graph.nodes.items():
            for source in (sources := _ways(node)):
                joins_trunk = name in graph.trunk and source not in graph.trunk
                if self.ports[source] != self.ports[name] and not joins_trunk:
                    fork = (graph.rank[source], source)
                    self.turns[source, name] = (graph.rank[name] - 1, name) if len(sources) > 1 else fork
        tops, tracks, height = self._rows()
        boxes = {}
        for name, node in graph.nodes.items():
            lines, width, tall = self.sizes[name]
            on = name in graph.trunk
            left = self._trunk_left(name) if on else self.ports[name] - width // 2
            boxes[name] = Box(left, tops[graph.rank[name]], width, tall, node, lines, self.ports[name], on)
        frames = []
        for stage, names in self.inside.items():
            (dx, dy), (first, last) = self.metrics.around, graph.hull(names)
            left, right = self.columns[stage][first][0] - dx, self.columns[stage][last][1] + dx
            top, bottom = min(boxes[name].top for name in names) - dy, max(boxes[name].bottom for name in names) + dy
            copies = max(graph.nodes[name].copies for name in names)
            frames.append(_Frame(left, top, right - left, bottom - top, tuple(names), copies))
        wires = [wire for box in boxes.values() for wire in self._wires(box, boxes, frames, tracks)]
        return Placement(tuple(boxes.values()), tuple(wires), tuple(frames), self.width, height)

    def _rows(self) -> tuple[dict[int, int], dict[tuple[int, str], int], int]:
        """The y of each rank, of each track by (rank above it, whose it is), and of the end."""
        graph, metrics, framed = self.graph, self.metrics, self.ranks_framed
        heights: dict[int, int] = defaultdict(int)
        for name, rank in graph.rank.items():
            heights[rank] = max(heights[rank], self.sizes[name][2])
        tops, tracks, y = {}, {}, 0
        for rank in range(max(heights) + 1):
            tops[rank] = y
            y += heights[rank] + (metrics.around[1] if rank in framed and rank + 1 not in framed else 0)
            rows = self._tracks(rank)
            needed = (1 + max(rows.values(), default=-1)) * metrics.track
            gutter = 0 if rank == max(heights) else max(metrics.gap, needed)
            for owner, row in rows.items():
                tracks[rank, owner] = y + (gutter - needed) // 2 + row * metrics.track + metrics.track // 2
            y += gutter + (metrics.around[1] if rank + 1 in framed and rank not in framed else 0)
        return tops, tracks, y

    def _tracks(self, rank: int) -> dict[str, int]:
        """Which of the tracks below a rank each line takes: forks above joins, as many beside each other as fit."""
        reach: dict[str, list[int]] = defaultdict(list)
        for (source, target), (below, owner) in self.turns.items():
            if below == rank:
                reach[owner] += [self.ports[source], self.ports[target]]
        rows: dict[str, int] = {}
        for owner in sorted(reach, key=lambda name: self.graph.rank[name]):
            low, high = min(reach[owner]), max(reach[owner])
            taken = {row for other, row in rows.items() if min(reach[other]) <= high and low <= max(reach[other])}
            rows[owner] = 1 + max(taken, default=-1)
        return rows

    def _wires(
        self, box: Box, boxes: Mapping[str, Box], frames: Sequence[_Frame], tracks: Mapping[tuple[int, str], int]
    ) -> Iterator[Wire]:
        for edge in box.node.edges():
            source = boxes.get(edge.source)
            if source is None:
                continue
            start, end = (source.port, source.bottom), (box.port, box.top)
            points: tuple[_Point, ...] = (start, end)
            if edge.kind in ("weights", "again"):
                points = ((source.left, source.middle), (0, source.middle), (0, box.middle), (box.left, box.middle))
            elif edge.kind == "choice":
                frame = next(frame for frame in frames if box.node.id in frame.nodes)
                if box.node.id != frame.nodes[0]:
                    continue  # one line for all of a frame's
                points = (start, (source.port, box.middle), (frame.left, box.middle))
            elif box.trunk and not source.trunk:
                points = (start, (source.port, box.middle), (box.right, box.middle))
            elif (edge.source, box.node.id) in self.turns:
                y = tracks[self.turns[edge.source, box.node.id]]
                points = (start, (source.port, y), (box.port, y), end)
            yield Wire(edge.source, edge.target, edge.kind, points)
