"""Read the tree of any reference, and where it comes from, without reading weights. A reference may be a preset, a
config.json, a tree file, a folder, a file of another format, or a repository on the hub.
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
    """A model's tree without its weights."""

    spec: ModelSpec
    origin: Origin
    path: Path | None = None  # the file or folder that it was read from; None for presets and the hub
    revision: str | None = None  # the hub's commit
    notes: tuple[str, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)  # small files that are stored inside a weight file
    assumed: tuple[str, ...] = ()  # notes of sizes that config.json leaves to transformers' defaults

    def __deepcopy__(self, _: object) -> Self:
        """Return this outline itself. It never changes, and `texts` may be in mapped files, which cannot be copied."""
        return self

    @property
    def family(self) -> str:
        """Return the name of the family that the model came from, or "" if it has none."""
        return self.origin.family or ""


def outline(
    reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False, companions: bool = False
) -> Outline:
    """Return the tree of a reference. `allow_pickle` allows nanoGPT's pickles; `companions` fetches the tokenizer."""
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
    """Return the tree of a repository, from its config.json or from the header of its GGUF."""
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
    """Return notes on weights next to a config.json that do not match it, and on tensors that gptkit does not compute.

    Nothing is refused, because the weights may be incomplete yet.
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
