"""What the shell offers for a MODEL: presets, samples, and the paths that could be one. No network, nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["complete_model"]

MODEL_FILES = (".safetensors", ".gguf", ".json", ".bin", ".pt")


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """(what to write, what it is) for each model whose name begins so: a person's own files first."""
    return [*_paths(incomplete), *_named(incomplete)]


def _named(incomplete: str) -> Iterator[tuple[str, str]]:
    from ..architectures.presets import presets
    from ..converter.resolve import SAMPLES

    wanted = incomplete.lower()
    for name in (f"sample:{sample}" for sample in SAMPLES):
        if name.startswith(wanted):
            yield name, "comes with gptkit"
    for preset in presets().values():
        for spelling in preset.known_as:
            if spelling.lower().startswith(wanted):
                yield spelling, preset.repo or "no published weights"
                break  # one spelling a preset: the first that fits


def _paths(incomplete: str) -> Iterator[tuple[str, str]]:
    """Folders and model files that begin so; hidden ones where the name begins with a dot."""
    folder, _, begun = incomplete.rpartition("/")
    shown = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(os.scandir(Path(os.path.expanduser(shown or "."))), key=lambda entry: entry.name)  # noqa: PTH111
    except OSError:
        return  # no such folder: nothing to offer
    for entry in entries:
        if not entry.name.startswith(begun) or (entry.name.startswith(".") and not begun.startswith(".")):
            continue
        if not entry.name.isprintable():
            continue
        if entry.is_dir():
            yield f"{shown}{entry.name}/", "folder"
        elif entry.name.endswith(MODEL_FILES):
            yield f"{shown}{entry.name}", "file"
