"""params: the parameters of a model known by name or by its config, without weights, network (for presets) or torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures import architecture_of
from ..architectures.presets import find, nearest, repo_of
from ..converter.resolve import exists, resolve
from ..converter.tree import read_spec
from ..errors import InvalidInput
from ..spec import ModelSpec
from .parameters import ParameterCount, count, to_json

__all__ = ["ModelCount", "params", "spec_of"]


@dataclass(frozen=True)
class ModelCount:
    """A model's name as it was given, its family, tree and count."""

    name: str
    family: str
    spec: ModelSpec
    count: ParameterCount

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; every figure is an integer."""
        return to_json(self.name, self.family, self.count)


def params(*models: str | Path, offline: bool = False) -> list[ModelCount]:
    """Count the parameters of each model, tied weights once.

    Args:
        models: presets (`qwen3-8b`), samples, folders, config.json files, hub repositories.
        offline: use local files and the hub's cache only.

    Raises:
        InvalidInput: nothing of that name, or a broken config.
        Offline: a repository whose config is not in the cache, and no network.

    """
    counts = []
    for model in models:
        family, spec = spec_of(str(model), offline=offline)
        counts.append(ModelCount(str(model), family, spec, count(spec)))
    return counts


def spec_of(reference: str, *, offline: bool = False) -> tuple[str, ModelSpec]:
    """The family ("" for a tree that never had one) and tree behind a reference; raises as `params`."""
    if not exists(Path(os.path.expanduser(reference))):  # noqa: PTH111 (its own expanduser raises for ~nobody)
        preset = find(reference)
        if preset is not None:
            architecture = architecture_of(preset.config)
            return architecture.name, architecture.spec(preset.config)
        near = nearest(reference)
        plain = not any(sign in reference for sign in "/:@\\")
        if plain and near:
            raise InvalidInput(
                f"no preset, file or folder is called {reference!r}",
                f"did you mean {', '.join(near[:4])}? A hub repository is written org/name.",
            )
    found = resolve(reference, offline=offline, weights=False, repo_of=repo_of)
    spec, origin, _ = read_spec(found.path)
    return origin.family or "", spec
