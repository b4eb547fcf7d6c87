"""Ranks and lanes: in which order a graph's nodes stand below one another, and which stand side by side.

The *trunk* is the residual stream: from the last node back along residual edges. What is beside it between two of its
nodes is a *stage*. There a fork opens a *lane* for each way, what leads to a fork spans all of them, and so does what
joins them again, so that lines never cross. A node's *rank* is one more than that of the last of its inputs, and all
that leaves the trunk stands below where it left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graph import Node

__all__ = ["Lanes", "Span", "ways"]

Span = tuple[int, int]
"""The first and the last lane."""


@dataclass(frozen=True)
class Lanes:
    """nodes by name in order; trunk: names, first to last; stage: for what is beside it, the trunk's node that it leads
    to; rank; spans: of what is beside the trunk, in lanes of its stage; lanes: how many a stage has.
    """

    nodes: Mapping[str, Node]
    trunk: tuple[str, ...]
    stage: Mapping[str, str]
    rank: Mapping[str, int]
    spans: Mapping[str, Span]
    lanes: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Lanes:
        by_name = {node.id: node for node in nodes}
        trunk = [nodes[-1].id]
        while by_name[trunk[-1]].inputs:
            node = by_name[trunk[-1]]
            trunk.append(node.residual or node.inputs[0])
        trunk.reverse()
        stage: dict[str, str] = {}
        for node in reversed(nodes):
            for source in node.inputs:
                if source not in trunk:
                    stage[source] = node.id if node.id in trunk else stage[node.id]
        rank: dict[str, int] = {}
        for node in nodes:
            on = trunk.index(stage.get(node.id, node.id))
            above = [rank[trunk[on - 1]]] if on else []
            rank[node.id] = 1 + max([*above, *(rank[source] for source in node.inputs)], default=-1)
        spans, lanes = _lanes(nodes, stage)
        return cls(by_name, tuple(trunk), stage, rank, spans, lanes)


def ways(node: Node) -> list[str]:
    """The inputs that a line is drawn from."""
    return [source for source in node.inputs if source != node.choice]


def _lanes(nodes: Sequence[Node], stage: Mapping[str, str]) -> tuple[dict[str, Span], dict[str, int]]:
    """The lanes that nodes beside the trunk span, and how many lanes each stage has."""
    beside = [node for node in nodes if node.id in stage]
    children: dict[str, list[str]] = defaultdict(list)
    roots = []
    for node in beside:
        sources = [source for source in ways(node) if source in stage]
        if not sources:
            roots.append(node.id)
        elif len(sources) == 1:
            children[sources[0]].append(node.id)
    spans: dict[str, Span] = {}
    lanes: dict[str, int] = defaultdict(int)

    def open_lanes(name: str) -> Span:
        parts = [open_lanes(child) for child in children[name]]
        if parts:
            spans[name] = (parts[0][0], parts[-1][1])
        else:
            spans[name] = (lanes[stage[name]], lanes[stage[name]])
            lanes[stage[name]] += 1
        return spans[name]

    for root in roots:
        open_lanes(root)
    for node in beside:  # what joins lanes, and what follows it
        if node.id not in spans:
            parts = [spans[source] for source in ways(node) if source in stage]
            spans[node.id] = (min(part[0] for part in parts), max(part[1] for part in parts))
    return spans, dict(lanes)
