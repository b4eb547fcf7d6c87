"""What `show` says of a model: its tree and the data's path through a layer, for a terminal, for a page, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from rich.console import RenderResult
from rich.text import Text

from ..analysis.parameters import describe
from ..analysis.params import ModelCount
from ..components import differences
from .drawing import path_lines, plain_words
from .graph import SYMBOLS, Kind, Structure, layers_label
from .pages import Figure, Lines, Page, Section, Table, noted
from .placement import folded
from .sheets import Drawing, Layout
from .tree import tree_json, tree_lines, tree_table

__all__ = ["kinds_differ", "model_drawing", "show_json", "show_page"]

MOST_KINDS = 8
"""Kinds of layers that a page draws, and that a terminal tells apart in words."""


def model_drawing(model: ModelCount, graph: Structure, kind: Kind, layer: int | None) -> Drawing:
    """The model's name, its tree, the path through a kind of layer, and how other kinds differ."""
    return Drawing(partial(_drawing, model, graph, kind, layer))


def _drawing(model: ModelCount, graph: Structure, kind: Kind, layer: int | None, page: Layout) -> RenderResult:
    width, ascii_only = page.width, page.ascii_only

    def line(words: str, style: str = "dim") -> list[Text]:
        cleaned = plain_words("".join(c if c.isprintable() else "?" for c in words), ascii_only)
        return [Text(each, style=style, no_wrap=True, overflow="ignore") for each in folded(cleaned, width)]

    yield from line(model.name, "bold")
    yield from line(" · ".join(filter(None, [model.family, *_facts(model)])))
    yield ""
    if layer is None:
        yield from tree_lines(graph, width, ascii_only)
        yield ""
    yield from path_lines(graph, kind, width, ascii_only)
    yield ""
    yield from line(f"{SYMBOLS}; weights are [out × in]")
    others = kinds_differ(graph) if layer is None else ()
    for kind, words in others[1:]:
        yield from line(f"{layers_label(graph, kind)}: {words} (--layer {kind.layers[0]})", "")
    if others and len(graph.kinds) > len(others):
        yield from line(f"{len(graph.kinds) - len(others):,} more kinds of layers: --layer N draws any", "")


def _facts(model: ModelCount) -> list[str]:
    words = describe(model.spec)
    number, *differ = words["layers"].split(" ", 1)
    layers = " ".join([number, "layer" if number == "1" else "layers", *differ])
    facts = [layers, f"hidden size {words['hidden size']}", f"positions {words['positions']}"]
    facts += [] if words["window"] == "none" else [f"window {words['window']}"]
    return [*facts, words["block"], f"context {words['context']}"]


def kinds_differ(graph: Structure) -> list[tuple[Kind, str]]:
    """Each kind of layer with the aspects in which kinds differ, in words; more than `MOST_KINDS` are not told."""
    kinds = graph.kinds[:MOST_KINDS]
    each = [describe(msgspec.structs.replace(graph.spec, blocks=(kind.block,))) for kind in kinds]
    every = dict.fromkeys(aspect for words in each for aspect in words)
    differ = [aspect for aspect in every if len({words.get(aspect, "none") for words in each}) > 1]
    told = ["; ".join(f"{aspect} {words.get(aspect, 'none')}" for aspect in differ) for words in each]
    return [(kind, words or _fields(kinds, kind)) for kind, words in zip(kinds, told, strict=True)]


def _fields(kinds: Sequence[Kind], kind: Kind) -> str:
    """The records' fields in which a kind differs from the first, where words do not tell it."""
    found = [path for path, _, _ in differences(kinds[0].block, kind.block)]
    return f"another {', '.join(found)}" if found else "the first kind"


def show_json(model: ModelCount, graph: Structure, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Plain JSON values: the tree, and the path through each kind of layer as nodes and edges."""
    return {
        "schema_version": 1,
        "model": model.name,
        "family": model.family,
        "revision": model.revision,
        "notes": list(model.notes),
        "total": model.count.total,
        "tree": tree_json(graph),
        "paths": [
            {
                "layers": list(kind.layers),
                "nodes": [
                    {**node.as_json(), "in_block": any(node.id == each.id for each in kind.nodes)} for node in path
                ],
                "edges": [
                    {"from": edge.source, "to": edge.target, "kind": edge.kind}
                    for node in path
                    for edge in node.edges()
                ],
            }
            for kind in kinds
            for path in [graph.path(kind)]
        ],
    }


def show_page(model: ModelCount, graph: Structure, kinds: Sequence[Kind]) -> Page:
    """The page: a diagram a kind of layer, the tree, and what it is in words."""
    from .diagram import block_diagram

    words = describe(model.spec)
    differ = dict(kinds_differ(graph)) if len(graph.kinds) > 1 else {}
    sections = []
    for kind in kinds[:MOST_KINDS]:
        lead = (Lines((differ[kind],)),) if kind in differ else ()
        figure: Figure = block_diagram(model.spec, kind.layers[0])
        sections.append(Section(f"The data's path through {layers_label(graph, kind)}", (*lead, figure)))
    if len(kinds) > MOST_KINDS:
        more = f"{len(kinds) - MOST_KINDS:,} more kinds of layers are not drawn here: --layer N draws any."
        sections.append(Section("More layers", (Lines((more,)),)))
    aspects = Table("What it is", (("aspect", False), ("of this model", False)), tuple(words.items()))
    sections += [Section("The tree", (tree_table(graph),)), Section("What it is", (aspects,)), *noted(model.notes)]
    facts = [("parameters", f"{model.count.total:,}")]
    facts += [(name, words[name]) for name in ("layers", "hidden size", "attention", "context")]
    return Page(
        title=model.name,
        subtitle=f"{model.family or 'of no family'}: how it is built",
        facts=tuple(facts),
        sections=tuple(sections),
    )
