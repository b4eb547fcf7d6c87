"""The report of `show`: a model's modules and the operations of its layers, also as a page and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderResult
from rich.text import Text

from ..analysis.aspects import describe
from ..analysis.params import ModelCount
from ..components import differences
from .counts import model_facts, named_heading
from .diagram import block_diagram
from .drawing import path_lines, plain_words
from .pages import Lines, Page, Section, Table, noted
from .placement import folded
from .sheets import Terminal, drawing
from .structure import SYMBOLS, Kind, Structure, layers_label
from .tree import tree_json, tree_lines, tree_table

_MOST_KINDS = 8  # the most kinds of layers that a page draws and that the terminal describes


@drawing
def model_drawing(
    terminal: Terminal, model: ModelCount, graph: Structure, kind: Kind, layer: int | None
) -> RenderResult:
    """Yield the report on a model for the terminal.

    It has the model's name and facts, the tree of its modules, a drawing of the operations of one kind of layer, and
    how other kinds of layers differ from it.
    """
    width, ascii_only = terminal.width, terminal.ascii_only

    def line(words: str, style: str = "dim") -> list[Text]:
        cleaned = plain_words("".join(c if c.isprintable() else "?" for c in words), ascii_only)
        return [Text(part, style=style, no_wrap=True, overflow="ignore") for part in folded(cleaned, width)]

    yield from line(model.name, "bold")
    yield from line(" · ".join(filter(None, [model.family, *model_facts(model.spec)])))
    yield ""
    if layer is None:
        yield from tree_lines(graph, width, ascii_only)
        yield ""
    yield from path_lines(graph, kind, width, ascii_only)
    yield ""
    if graph.encoder is not None and layer is None:
        yield from line("The encoder, which reads the source:", "")
        yield from path_lines(graph.encoder, graph.encoder.kinds[0], width, ascii_only)
        yield ""
    source = "" if graph.encoder is None else ", U tokens of the source"
    yield from line(f"{SYMBOLS}{source}; weights are [out × in]")
    others = kinds_differ(graph) if layer is None else ()
    for kind, difference in others[1:]:
        yield from line(f"{layers_label(graph, kind)}: {difference} (--layer {kind.layers[0]})", "")
    if others and len(graph.kinds) > len(others):
        yield from line(f"{len(graph.kinds) - len(others):,} more kinds of layers: --layer N draws any", "")


@drawing
def named_drawing(terminal: Terminal, model: ModelCount) -> RenderResult:
    """Yield the report of a model of an unknown family: its name, and a tree that follows from its tensors' names."""
    assert model.named is not None
    yield from named_heading(terminal, model)
    yield ""
    yield from tree_lines(model.named, terminal.width, terminal.ascii_only)


def kinds_differ(graph: Structure) -> list[tuple[Kind, str]]:
    """Return the kinds of layers of a model, each with words that say how it differs from the others.

    There are at most `_MOST_KINDS`.
    """
    kinds = graph.kinds[:_MOST_KINDS]
    described = [describe(graph.spec, (kind.block,)) for kind in kinds]
    aspects = dict.fromkeys(aspect for words in described for aspect in words)
    differ = [aspect for aspect in aspects if len({words.get(aspect, "none") for words in described}) > 1]
    pairs = []
    for kind, words in zip(kinds, described, strict=True):
        line = "; ".join(f"{aspect} {words.get(aspect, 'none')}" for aspect in differ)
        if not line:  # the words are the same, so it names the fields that differ from the first kind
            fields = [path for path, _, _ in differences(kinds[0].block, kind.block)]
            line = f"another {', '.join(fields)}" if fields else "the first kind"
        pairs.append((kind, line))
    return pairs


def show_json(model: ModelCount, graph: Structure, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the report as plain JSON values: the tree of modules, and the operations of these kinds of layers.

    The layers of an encoder are included.
    """
    data = {**_head(model), "total": model.count.total, "tree": tree_json(graph), "paths": _paths(graph, kinds)}
    return data | ({} if graph.encoder is None else {"encoder": _paths(graph.encoder, graph.encoder.kinds)})


def _paths(graph: Structure, kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    paths = []
    for kind in kinds:
        path, inside = graph.path(kind), {node.id for node in kind.nodes}
        nodes = [{**node.as_json(), "in_block": node.id in inside} for node in path]
        edges = [edge.as_json() for node in path for edge in node.edges()]
        paths.append({"layers": list(kind.layers), "nodes": nodes, "edges": edges})
    return paths


def named_json(model: ModelCount) -> dict[str, Any]:
    """Return the tree of a model of an unknown family as plain JSON values.

    It has no operations, because these do not follow from the names of tensors.
    """
    assert model.named is not None
    tree = tree_json(model.named)
    return {**_head(model), "by_names": model.named.source, "total": model.named.count.total, "tree": tree}


def _head(model: ModelCount) -> dict[str, Any]:
    data = {"schema_version": 1, "model": model.name, "family": model.family, "revision": model.revision}
    return {**data, "notes": list(model.notes)}


def named_page(model: ModelCount) -> Page:
    """Return the HTML page of a model of an unknown family."""
    assert model.named is not None
    return Page(
        title=model.name,
        subtitle=f"by names; gptkit does not support its family, from {model.named.source}",
        facts=(("parameters", f"{model.named.count.total:,}"),),
        sections=(Section("The tree", (tree_table(model.named),)), *noted(model.notes)),
    )


def show_page(model: ModelCount, graph: Structure, kinds: Sequence[Kind]) -> Page:
    """Return the HTML page: a diagram per kind of layer, the tree of modules, and a description in words."""
    words = describe(model.spec)
    differ = dict(kinds_differ(graph)) if len(graph.kinds) > 1 else {}
    sections = []
    for kind in kinds[:_MOST_KINDS]:
        lead = (Lines((differ[kind],)),) if kind in differ else ()
        title = f"The data's path through {layers_label(graph, kind)}"
        sections.append(Section(title, (*lead, block_diagram(model.spec, kind.layers[0]))))
    if graph.encoder is not None:
        title = f"The source's path through {layers_label(graph.encoder, graph.encoder.kinds[0])} of the encoder"
        sections.append(Section(title, (block_diagram(graph.encoder.spec, 0),)))
    if len(kinds) > _MOST_KINDS:
        more = f"{len(kinds) - _MOST_KINDS:,} more kinds of layers are not drawn here: --layer N draws any."
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
