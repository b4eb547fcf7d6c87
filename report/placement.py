"""The layout of a diagram of a model's operations: the positions of the boxes, and the lines between them.

Drawings in the terminal and pictures share this layout. Lengths are in characters or in pixels. The diagram is drawn
from top to bottom, from the tokens to the logits. Every operation is a *node*:

- The *trunk* is the residual stream, a vertical line on the left. Its nodes are found from the last node back along
  residual edges.
- A *stage* is all nodes that lead from one node of the trunk to a later one, such as the operations of an attention.
- A stage is divided into *lanes*, which are columns. If a result has several readers, every reader begins a lane. A
  node spans the lanes of all its readers, and a node with several inputs spans their lanes. Lanes are in the order of
  the program, which avoids most crossings of lines.
- The *rank* of a node is its row: one more than the largest rank of its inputs. Nodes of a stage are below the node of
  the trunk at which the stage begins.
- A line goes down from its source, sideways in a *track* between two ranks, and down again to its target.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .structure import Edge, Node

SHAPED = ("linear", "embed", "positions", "scores", "concat", "mix")  # operations that show their shape
_Point = tuple[int, int]
Size = tuple[tuple[str, ...], int, int]  # a box's lines, its width and its height
_Span = tuple[int, int]  # the first and the last lane


@dataclass(frozen=True)
class Metrics:
    """The sizes of the parts of a diagram, in characters or pixels."""

    measure: Callable[[Node, int, int], Size]
    """A function that returns the lines of text, the width and the height of a node's box. Its arguments are the node,
    the number of lanes that it spans (0 on the trunk), and the width of a line of text per lane.
    """
    frame: Callable[[int], int]
    """A function that returns the least width of the frame around this number of experts."""
    stream: int  # the x of the line of the residual stream (the trunk)
    trunk: int  # the left edge of boxes on the trunk
    left: int  # the left edge of the lanes
    lane_gap: int
    gap: int  # the least gap between two ranks
    track: int  # the height of a track between two ranks
    around: _Point  # the horizontal and vertical margin of the frame around experts


@dataclass(frozen=True)
class Area:
    """A rectangle in a drawing."""

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
    """The box of a node, at its place in the drawing."""

    node: Node
    lines: tuple[str, ...]  # the lines of text in it
    port: int  # the x at which lines enter at the top and leave at the bottom
    trunk: bool  # whether the node is on the residual stream


@dataclass(frozen=True)
class _Frame(Area):
    """A frame around the operations of a mixture's experts, which are drawn once for all experts."""

    nodes: tuple[str, ...]
    copies: int  # the number of experts


@dataclass(frozen=True)
class Wire(Edge):
    """The line between two operations (an edge of the graph), with its corners.

    It begins below its source, and ends above its target or at the target's side.
    """

    points: tuple[_Point, ...]  # its corners


@dataclass(frozen=True)
class Placement:
    """The complete layout of a diagram: the coordinates of all boxes, lines and frames."""

    boxes: tuple[Box, ...]  # in the order of computation
    wires: tuple[Wire, ...]
    frames: tuple[_Frame, ...]
    width: int
    height: int

    def box(self, name: str) -> Box:
        return next(box for box in self.boxes if box.node.id == name)


def place(nodes: Sequence[Node], metrics: Metrics, limit: int, rooms: Sequence[int]) -> Placement:
    """Return the layout of a diagram.

    Args:
        nodes: the operations in an order of computation, with one layer of the model. All of them lead to the last one.
        metrics: the sizes of the parts of the drawing.
        limit: the width that the drawing should not exceed.
        rooms: possible widths of a line of text, the widest first. A group of operations (such as an attention) uses
            the first width with which it fits into the limit, or else the last width.
    """
    graph = _Lanes(nodes)
    sizes = {name: metrics.measure(graph.nodes[name], 0, max(rooms)) for name in graph.trunk}
    for stage in graph.lanes:
        lanes = {name: 1 + last - first for name, (first, last) in graph.spans.items() if graph.stage[name] == stage}
        for room in rooms:
            in_stage = {name: metrics.measure(graph.nodes[name], number, room) for name, number in lanes.items()}
            if _Arrangement(graph, metrics, {**sizes, **in_stage}, (stage,)).width <= limit:
                break
        sizes |= in_stage
    return _Arrangement(graph, metrics, sizes, tuple(graph.lanes)).placement()


def folded(line: str, room: int) -> list[str]:
    """Break a line of text into lines of up to `room` characters.

    It is broken between words, or in the name of a module, but never in a number.
    """
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
    """Return whether an operation is drawn with a border: whether it uses weights, its own or tied ones."""
    return bool(node.weights) or node.tied is not None


def experts_words(copies: int) -> str:
    """Return the text on the frame around this number of experts."""
    return "1 expert" if copies == 1 else f"{copies:,} experts"


def _ways(node: Node) -> list[str]:
    """Return the inputs of an operation that are drawn as ordinary lines: all but the router's choice of experts."""
    return [source for source in node.inputs if source != node.choice]


_ELEMENTWISE = ("activation", "product", "cap", "shift", "scale")
"""Operations on single numbers, which may stand between the two linears of an expert."""


class _Lanes:
    """The relative positions of a diagram's operations (nodes), before their coordinates are known.

    It says which nodes are on the residual stream (the trunk), and gives the row (rank) and the columns (lanes) of the
    others. A stage is the group of nodes between two nodes of the trunk, such as an attention, and has its own lanes.
    """

    nodes: dict[str, Node]  # by name, in the order of computation
    trunk: list[str]  # the names of the nodes on the trunk, first to last
    stage: dict[str, str]  # the stage of every node outside of the trunk, named by the node of the trunk it leads to
    rank: dict[str, int]  # the rank of every node
    spans: dict[str, _Span]  # the first and the last lane of every node outside of the trunk
    lanes: dict[str, int]  # the number of lanes, by stage

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.trunk = self._trunk(nodes[-1])
        self.stage = self._stages(nodes)
        self.rank = {}
        for node in nodes:
            on = self.trunk.index(self.stage.get(node.id, node.id))
            above = [self.rank[self.trunk[on - 1]]] if on else []
            self.rank[node.id] = 1 + max([*above, *(self.rank[source] for source in node.inputs)], default=-1)
        self.spans, self.lanes = {}, defaultdict(int)
        sources_of = {
            name: [source for source in _ways(node) if source in self.stage]
            for name, node in self.nodes.items()
            if name in self.stage
        }
        self._forks: dict[str, list[str]] = defaultdict(list)  # the nodes that have only this input
        for name, sources in sources_of.items():
            if len(sources) == 1:
                self._forks[sources[0]].append(name)
        for name, sources in sources_of.items():
            if not sources:
                self._open(name)
        for name, sources in sources_of.items():
            if name not in self.spans:
                self._join(name, sources)

    def _trunk(self, last: Node) -> list[str]:
        """Return the names of the nodes on the residual stream, found from the last node back along residual edges."""
        trunk, node = [last.id], last
        while node.inputs:
            node = self.nodes[node.residual or node.inputs[0]]
            trunk.append(node.id)
        return trunk[::-1]

    def _stages(self, nodes: Sequence[Node]) -> dict[str, str]:
        """Return the group (stage) of every node outside of the residual stream.

        A group is named by the node on the residual stream to which its nodes lead.
        """
        at, stage = {name: index for index, name in enumerate(self.trunk)}, dict[str, str]()
        for node in reversed(nodes):
            for source in node.inputs:
                if source not in at:  # if it leads to several nodes of the trunk, to the first
                    joins = [node.id if node.id in at else stage[node.id], stage.get(source, self.trunk[-1])]
                    stage[source] = min(joins, key=at.__getitem__)
        # Branches that begin in one box stand side by side, though they join the trunk one after the other.
        for node in nodes:
            if node.id in stage:
                joins = [stage[name] for name in (node.id, *node.inputs) if name in stage]
                stage[node.id] = min(joins, key=at.__getitem__)
        # So do the nodes that lead to them.
        for node in reversed(nodes):
            for source in node.inputs:
                if source in stage and node.id in stage:
                    stage[source] = min(stage[source], stage[node.id], key=at.__getitem__)
        return stage

    def _open(self, name: str) -> _Span:
        """Add a column (lane) for every branch that begins at a node, and return the first and last of them.

        The node itself spans these columns.
        """
        parts = [self._open(fork) for fork in self._forks[name]]
        if not parts:
            lane = self.lanes[self.stage[name]]
            self.lanes[self.stage[name]] += 1
            parts = [(lane, lane)]
        self.spans[name] = (parts[0][0], parts[-1][1])
        return self.spans[name]

    def _join(self, name: str, sources: Sequence[str]) -> None:
        """Give a node with several inputs the columns of these inputs, and divide them among the branches that follow.

        `sources` are the names of the inputs.
        """
        first, last = self.hull(sources)
        stage, width = self.stage[name], self._width(name)
        missing = width - (last - first + 1)
        if len(self._forks[name]) > 1 and missing > 0 and last == self.lanes[stage] - 1:
            self.lanes[stage] += missing
            last += missing
        if width <= last - first + 1:
            self._spread(name, first, last)
        else:
            self.spans[name] = first, last

    def _width(self, name: str) -> int:
        """Return the number of columns that a node needs for the branches that begin at it."""
        return sum(map(self._width, self._forks[name])) or 1

    def _spread(self, name: str, first: int, last: int) -> None:
        self.spans[name] = first, last
        forks = self._forks[name]
        more, rest = divmod(last - first + 1 - sum(map(self._width, forks)), len(forks) or 1)
        for index, fork in enumerate(forks):
            end = first + self._width(fork) + more + (index < rest) - 1
            self._spread(fork, first, end)
            first = end + 1

    def hull(self, names: Sequence[str]) -> _Span:
        """Return the first and the last column that these nodes span together. They belong to one group (stage)."""
        spans = [self.spans[name] for name in names]
        return min(first for first, _ in spans), max(last for _, last in spans)

    def expert(self, name: str) -> Node:
        """Return the linear layer whose output a node processes by element-wise operations, or the node itself.

        The result shows whether the node belongs to the experts of a mixture.
        """
        node = self.nodes[name]
        while not node.weights and _ways(node) and node.op in _ELEMENTWISE:
            node = self.nodes[_ways(node)[0]]
        return node


class _Arrangement:
    """Computes the coordinates of a diagram, given the relative positions of its operations and the sizes of their
    boxes.

    Attributes:
        columns: the left and right edges of the columns (lanes), by group of operations (stage).
        inside: the names of the operations in the frame around experts, by group.
        width: the width of the drawing.
    """

    def __init__(self, graph: _Lanes, metrics: Metrics, sizes: Mapping[str, Size], stages: Sequence[str]) -> None:
        self.graph, self.metrics, self.sizes = graph, metrics, sizes
        framed = [name for name in graph.nodes if graph.expert(name).choice]
        self.ranks_framed = {graph.rank[name] for name in framed}
        self.inside: dict[str, list[str]] = {}
        for name in framed:
            self.inside.setdefault(graph.stage[name], []).append(name)
        gaps = {}  # the gaps before all lanes and after the last: a frame needs larger ones
        for stage in stages:
            gaps[stage] = [0, *[metrics.lane_gap] * (graph.lanes[stage] - 1), 0]
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
        """Return the widths of a group's columns. They are wide enough for every box in the columns that it spans.

        `gaps` are the widths of the gaps before, between and after the columns.
        """
        graph, metrics, inside = self.graph, self.metrics, self.inside.get(stage)
        lanes = [0] * graph.lanes[stage]
        needs = [(graph.spans[name], self.sizes[name][1]) for name in graph.stage if graph.stage[name] == stage]
        if inside:
            copies = max(graph.nodes[name].copies for name in inside)
            needs.append((graph.hull(inside), metrics.frame(copies) - 2 * metrics.around[0]))
        for (first, last), width in sorted(needs, key=lambda need: need[0][1] - need[0][0]):
            missing = max(width - sum(lanes[first : last + 1]) - sum(gaps[first + 1 : last + 1]), 0)
            for index in range(first, last + 1):
                share = -(-missing // (last - index + 1))
                lanes[index] += share
                missing -= share
        return lanes

    def _trunk_left(self, name: str) -> int:
        """Return the left edge of an operation on the residual stream.

        A box with a border extends over the line of the residual stream, and text without a border starts at it.
        """
        node = self.graph.nodes[name]
        if node.op == "add":
            return self.metrics.stream - self.sizes[name][1] // 2
        return self.metrics.trunk if boxed(node) else self.metrics.stream

    def _port(self, name: str) -> int:
        """Return the x at which lines enter and leave the box of an operation.

        For an operation on the residual stream, this is the x of the stream's line. For another one, it is the middle
        of the columns that the box spans together. With an odd number of columns, it is the middle of the middle one,
        so that a line to this column is straight, unless a box with the same columns would then not fit.
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
        """Return the layout with all boxes, frames and lines."""
        graph = self.graph
        self.ports = {name: self._port(name) for name in graph.nodes}
        # For each line that goes sideways: the rank above its track, and the node whose lines share the track.
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
        """Return the y of every row (rank), the y of every horizontal line (track) between rows, and the drawing's
        height.

        The key of a track is the row above it, and the operation whose lines use it.
        """
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
        """Assign horizontal tracks to the lines between a row and the next one.

        Lines that do not overlap share a track.

        Returns:
            The index of the track, by the name of the operation whose lines use it.
        """
        reach: dict[str, list[int]] = defaultdict(list)
        for (source, target), (below, owner) in self.turns.items():
            if below == rank:
                reach[owner] += [self.ports[source], self.ports[target]]
        rows: dict[str, int] = {}
        for owner in sorted(reach, key=lambda name: self.graph.rank[name]):
            low, high = min(reach[owner]), max(reach[owner])
            occupied = [row for other, row in rows.items() if min(reach[other]) <= high and low <= max(reach[other])]
            rows[owner] = 1 + max(occupied, default=-1)
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
                    continue  # a frame has one such line
                points = (start, (source.port, box.middle), (frame.left, box.middle))
            elif box.trunk and not source.trunk:
                points = (start, (source.port, box.middle), (box.right, box.middle))
            elif (edge.source, box.node.id) in self.turns:
                y = tracks[self.turns[edge.source, box.node.id]]
                points = (start, (source.port, y), (box.port, y), end)
            yield Wire(edge.source, edge.target, edge.kind, points)
