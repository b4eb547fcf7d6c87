"""A tree as JSON in which every field is written, those as by default too."""

from typing import Any

from gptkit.components import Component, ModelSpec, from_json


def full(spec: ModelSpec) -> Any:
    return {"schema_version": 1, **_complete(spec)}


def filled_in(data: Any) -> Any:
    """The same of a tree's JSON."""
    return full(from_json(data))


def _complete(node: Any) -> Any:
    if isinstance(node, tuple):
        return [_complete(each) for each in node]
    if not isinstance(node, Component):
        return node
    return {"type": type(node).__name__, **{name: _complete(value) for name, value in node.entries().items()}}
