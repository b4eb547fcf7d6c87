"""Read a model's tree of components, and where it comes from, without reading weights.

A model may be given as a preset, a config.json, a .json file with a tree, a folder, a file of another format, or a
repository on the hub.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ..architectures import architecture_of
from ..components import ModelSpec
from ..errors import GptkitError, UntrustedInput
from .names import INDEX, SINGLE
from .resolve import Reference, identify, quantised, read_spec, resolve
from .tree import Origin, Quantised


@dataclass(frozen=True)
class Outline:
    """A model's tree of components, without its weights."""

    spec: ModelSpec  # the tree
    origin: Origin
    path: Path | None = None  # the file or folder from which the tree was read; None for presets and the hub
    revision: str | None = None  # the commit on the hub
    notes: tuple[str, ...] = ()  # for the user
    texts: Mapping[str, bytes] = field(default_factory=dict)  # small files that are stored inside a weight file
    assumed: tuple[str, ...] = ()  # notes on sizes that are not in config.json, so that transformers' defaults apply

    def __deepcopy__(self, _: object) -> Self:
        """Return this outline itself. It never changes, and memory-mapped files in `texts` cannot be copied."""
        return self

    @property
    def family(self) -> str:
        """Return the name of the family that the model came from, or "" if it has none."""
        return self.origin.family or ""


def outline(
    reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False, companions: bool = False
) -> Outline:
    """Return a model's tree of components without reading its weights.

    Args:
        reference: the model.
        offline: use local files and the hub's cache only.
        allow_pickle: also read pickles of training programs, such as nanoGPT's.
        companions: also fetch the tokenizer's files from the hub.
    """
    resolved = identify(reference)
    if resolved.preset is not None:
        config = resolved.preset.config
        family = architecture_of(config)
        text = json.dumps(config, indent=2) + "\n"
        return Outline(family.spec(config), Origin(family=family.name, config_text=text))
    if resolved.path is None:
        return _of_hub(resolved, offline, companions)
    try:
        return _outline(resolved)
    except UntrustedInput as error:
        if not allow_pickle:
            raise UntrustedInput(
                error.message, "Pass --allow-pickle to read the file in a restricted process."
            ) from None
    assert resolved.source is not None and resolved.other is not None and resolved.other.read is not None
    opened = resolved.other.read(resolved.source, True)
    return Outline(opened.spec, opened.origin, resolved.path, None, (*resolved.notes, *opened.notes))


def _outline(resolved: Reference) -> Outline:
    spec, origin, _ = read_spec(resolved)
    notes = [*resolved.notes, *(_unfit(resolved) if resolved.kind == "path" else ())]
    method = quantised(resolved, origin)
    if method is not None:
        notes.append(f"its weights are quantised ({method[0]}): gptkit shows the model with dequantised weights")
    assumed_sizes: tuple[str, ...] = ()
    if origin.config is not None and resolved.format == "hf":
        assumed = architecture_of(origin.config).assumed(origin.config)
        sizes = ", ".join(f"{name} {size:,}" for name, size in assumed.items())
        assumed_sizes = (f"not in config.json, so transformers' defaults: {sizes}",) if sizes else ()
    return Outline(spec, origin, resolved.path, resolved.revision, tuple(notes), assumed=assumed_sizes)


def _of_hub(resolved: Reference, offline: bool, companions: bool) -> Outline:
    """Return the outline of a repository on the hub, from its config.json or from the header of its GGUF."""
    from .hub import NoConfig
    from .remote import only_gguf, read_gguf

    repo, revision, file = str(resolved.repo), resolved.revision, resolved.file
    if file is None:
        try:
            return _outline(resolve(resolved, offline=offline, weights=False, companions=companions))
        except NoConfig as error:
            file = only_gguf(repo, revision, error)
    spec, origin, commit, notes = read_gguf(repo, revision, file, offline=offline)
    return Outline(spec, origin, None, commit, tuple(notes))


def _unfit(resolved: Reference) -> tuple[str, ...]:
    """Compare a folder's weights with its config.json. Return notes for the user.

    The notes say whether the weights do not match the config.json, and which tensors gptkit only copies. A mismatch is
    no error, because the folder may still be incomplete.
    """
    if not {SINGLE, INDEX} & (resolved.names or frozenset()):
        return ()
    from .checkpoint import open_checkpoint  # here, because it imports numpy

    try:
        return tuple(open_checkpoint(resolved, headers_only=True).carried_notes)
    except Quantised:
        return ()
    except GptkitError as error:
        why = error.message.removeprefix(f"{resolved.path}: ").partition(": ")[0]
        return (f"its weights do not match its config.json, and this outline describes the config.json: {why}",)
