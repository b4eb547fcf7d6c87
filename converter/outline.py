"""The tree behind any reference, and where it comes from, without a weight: presets, config.json, trees by themselves,
folders, files of other formats by their headers, repositories by their config.json or the header of their GGUF.
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
    """A tree. path: what it was read from, None for presets and the hub. revision: the hub's commit. texts: small files
    that a weight file holds inside. assumed: notes of sizes that a config.json leaves to transformers.
    """

    spec: ModelSpec
    origin: Origin
    path: Path | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    def __deepcopy__(self, _: object) -> Self:
        """Itself, of the copy of a model: nothing here changes, and mapped files, which texts may be in, have none."""
        return self

    @property
    def family(self) -> str:
        """Its name, "" for a tree that never had one."""
        return self.origin.family or ""


def outline(
    reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False, companions: bool = False
) -> Outline:
    """The tree behind a reference. `allow_pickle`: also nanoGPT's; `companions`: fetch a repository's tokenizer too."""
    found = identify(reference)
    if found.preset is not None:
        config = found.preset.config
        family = architecture_of(config)
        text = json.dumps(config, indent=2) + "\n"
        return Outline(family.spec(config), Origin(family=family.name, config_text=text))
    if found.path is None:
        return _of_hub(found, offline, companions)
    try:
        return _outline(found)
    except UntrustedInput as error:
        if not allow_pickle:
            hint = "--allow-pickle reads it, in a process that can do nothing else."
            raise UntrustedInput(error.message, hint) from None
    assert found.source is not None and found.other is not None and found.other.read is not None
    opened = found.other.read(found.source, True)
    return Outline(opened.spec, opened.origin, found.path, None, (*found.notes, *opened.notes))


def _outline(found: Reference) -> Outline:
    spec, origin, _ = read_spec(found)
    notes = [*found.notes, *(_unfit(found) if found.kind == "path" else ())]
    method = quantised(found, origin)
    if method is not None:
        notes.append(f"its weights are quantised ({method[0]}): this is the model that they stand for")
    about: tuple[str, ...] = ()
    if origin.config is not None and found.format == "hf":
        assumed = architecture_of(origin.config).assumed(origin.config)
        sizes = ", ".join(f"{name} {size:,}" for name, size in assumed.items())
        about = (f"not in config.json, so transformers' defaults: {sizes}",) if sizes else ()
    return Outline(spec, origin, found.path, found.revision, tuple(notes), assumed=about)


def _of_hub(found: Reference, offline: bool, companions: bool) -> Outline:
    """The tree of a repository, by its config.json or by the header of the GGUF in it."""
    from .hub import NoConfig
    from .remote import only_gguf, read_gguf

    repo, revision, file = str(found.repo), found.revision, found.file
    if file is None:
        try:
            return _outline(resolve(found, offline=offline, weights=False, companions=companions))
        except NoConfig as error:
            file = only_gguf(repo, revision, error)
    spec, origin, commit, notes = read_gguf(repo, revision, file, offline=offline)
    return Outline(spec, origin, None, commit, tuple(notes))


def _unfit(found: Reference) -> tuple[str, ...]:
    """Notes where weights are not those of their config.json, and on what lies beside: nothing is refused, they may
    still be to come.
    """
    if not {SINGLE, INDEX} & (found.names or frozenset()):
        return ()
    from .checkpoint import open_checkpoint  # here, because it imports numpy

    try:
        return tuple(open_checkpoint(found, headers_only=True).told)
    except Quantised:
        return ()
    except GptkitError as error:
        why = error.message.removeprefix(f"{found.path}: ").partition(": ")[0]
        return (f"its weights do not match its config.json, and this outline describes the config.json: {why}",)
