"""The tree behind any reference, and where it comes from, without a weight: presets, config.json, trees by themselves,
folders, files of other formats by their headers, repositories by their config.json or the header of their GGUF.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..architectures import architecture_of
from ..architectures.config import quantisation
from ..architectures.presets import find, repo_of
from ..components import ModelSpec
from ..errors import GptkitError, UntrustedInput
from .resolve import INDEX, SINGLE, NoConfig, exists, resolve
from .tree import Origin, Quantised, foreign_format, is_local, read_spec

__all__ = ["Outline", "outline"]

_HUB_GGUF = re.compile(r"hf://(?P<repo>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>[^/\s]+))?/(?P<file>[^\s\\]+\.gguf)")


@dataclass(frozen=True)
class Outline:
    """A tree.

    origin: its family, with the text of a config.json that says it, where there is one. path: the local file or folder
    that it was read from, None for presets and for what was read on the hub. revision: the hub's commit.
    notes: for a person. texts: small files that a weight file holds inside, by name.
    """

    spec: ModelSpec
    origin: Origin
    path: Path | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)


def outline(reference: str, *, offline: bool = False, allow_pickle: bool = False, companions: bool = False) -> Outline:
    """The tree behind a reference.

    Args:
        reference: a preset's name, or what `resolve` takes; also hf://org/name/FILE.gguf.
        offline: use local files and the hub's cache only.
        allow_pickle: read a pickle that has no description beside it (nanoGPT's ckpt.pt).
        companions: of a repository have the tokenizer's files too.

    Raises:
        InvalidInput: nothing of that name, or what is there is broken; UntrustedInput: a pickle that is not allowed.
        Offline: the network is needed, and there is none.

    """
    here = exists(Path(os.path.expanduser(reference)))  # noqa: PTH111 (its own expanduser raises for ~nobody)
    if not here:
        preset = find(reference)
        if preset is not None:
            family = architecture_of(preset.config)
            text = json.dumps(preset.config, indent=2) + "\n"
            return Outline(family.spec(preset.config), Origin(family=family.name, config_text=text))
        named = _HUB_GGUF.fullmatch(reference)
        if named is not None:
            from .remote_gguf import read_gguf

            return _remote(*read_gguf(named["repo"], named["revision"], named["file"], offline=offline))
    try:
        found = resolve(reference, offline=offline, weights=False, companions=companions, repo_of=repo_of)
    except NoConfig as error:
        from .remote_gguf import only_gguf, read_gguf

        file = only_gguf(error.repo, error.revision, error)
        return _remote(*read_gguf(error.repo, error.revision, file, offline=offline))
    try:
        spec, origin, _ = read_spec(found.path)
    except UntrustedInput as error:
        if not allow_pickle:
            raise UntrustedInput(
                error.message, "--allow-pickle reads it, in a process that can do nothing else."
            ) from None
        other = foreign_format(found.path)
        assert other is not None
        assert other.read is not None
        opened = other.read(found.path, True)
        return Outline(opened.spec, opened.origin, found.path, None, (*found.notes, *opened.notes))
    unfit = _unfit(found.path) if found.kind == "path" else ()
    return Outline(spec, origin, found.path, found.revision, (*found.notes, *unfit, *_quantised(found.path, origin)))


def _quantised(path: Path, origin: Origin) -> tuple[str, ...]:
    """That the weights are not the numbers of the tree that is told, but stand for them."""
    found = None if is_local(path) else quantisation(origin.config)
    return () if found is None else (f"its weights are quantised ({found[0]}): this is the model that they stand for",)


def _unfit(path: Path) -> tuple[str, ...]:
    """That a folder's weights are not those of its config.json, told by their headers: what is counted is the config's.

    Somebody may well ask for a tree before the weights are there, so nothing is refused.
    """
    if not any((path / name).is_file() for name in (SINGLE, INDEX)):
        return ()
    from .checkpoint import open_checkpoint  # here, because it imports numpy

    try:
        open_checkpoint(str(path), headers_only=True)
    except Quantised:
        return ()
    except GptkitError as error:
        why = error.message.removeprefix(f"{path}: ").partition(": ")[0]
        return (f"the weights in it are not those of its config.json, which is what is told here: {why}",)
    return ()


def _remote(spec: ModelSpec, origin: Origin, commit: str, notes: list[str]) -> Outline:
    return Outline(spec, origin, None, commit, tuple(notes))
