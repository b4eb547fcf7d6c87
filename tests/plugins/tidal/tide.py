"""A file format: one JSON object that is a tidal config.json, in a file that ends in .tide."""

from __future__ import annotations

import json
from pathlib import Path

from gptkit.components import ModelSpec
from gptkit.converter.tree import Origin

from .family import TIDAL

__all__ = ["describe", "finds", "plan", "read"]

read = plan = None


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """The file itself."""
    return path if names is None and path.suffix == ".tide" else None


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Its tree, where it comes from, and the fields that nobody knows."""
    config = json.loads(path.read_text())
    spec, unknown = TIDAL.spec_and_unknown(config)
    return spec, Origin("tidal", json.dumps({"model_type": "tidal", **config})), unknown
