"""What lies in a checkpoint's weight files, each read for itself: what is wrong with one is told, and stops nothing.

Everything else here refuses a folder whose index and files disagree; an audit wants to know how they do. Headers alone
are read, of a repository on the hub by ranges.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..architectures.config import read_config_file
from ..errors import CheckpointError, GptkitError, InvalidInput
from .index import Stored, read_index
from .names import CONFIG, INDEX, SINGLE, listing
from .resolve import Reference, resolve
from .safetensors import Header, TensorInfo, read_header
from .weights import Weights


class _About(msgspec.Struct):
    """What an index says of all its tensors together."""

    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class Scan:
    """The weight files of a checkpoint as far as they can be read.

    reference, revision: what was asked for, and the hub's commit. folder: where its small files lie. names: of all
    files, a repository's included. headers: of the weight files that can be read; broken: of the others, why not.
    index: the file that each tensor is said to lie in, None without an index; index_error: why there is none, though
    the file is there; total_size: the bytes that it says. config: config.json as an object, None without one;
    config_error: why it cannot be read. fetched: whether the weights are here.
    """

    reference: str
    folder: Path
    names: frozenset[str]
    headers: Mapping[str, Header]
    broken: Mapping[str, str]
    index: Mapping[str, str] | None = None
    index_error: str = ""
    total_size: int | None = None
    config: Mapping[str, Any] | None = None
    config_error: str = ""
    revision: str | None = None
    fetched: bool = True

    @cached_property
    def holders(self) -> dict[str, list[str]]:
        """Every tensor's name, with the files that hold one of that name."""
        found: dict[str, list[str]] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                found.setdefault(name, []).append(file)
        return found

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor, one that is in several files as the index has it, or the first."""
        found = {}
        for name, files in self.holders.items():
            file = (self.index or {}).get(name, files[0])
            found[name] = self.headers[file if file in files else files[0]].tensors[name]
        return found

    @cached_property
    def weights(self) -> Weights:
        """The tensors as they can be read, each as numbers."""
        return self.raw.numeric()

    @cached_property
    def raw(self) -> Weights:
        """The tensors as they are stored."""
        stored = {}
        for name, info in self.tensors.items():
            files = self.holders[name]
            file = (self.index or {}).get(name, files[0])
            path = self.folder / (file if file in files else files[0])
            stored[name] = Stored(path, info.dtype, info.shape, info.start, info.nbytes)
        return Weights(stored, fetched=self.fetched)


def scan(reference: str | Path | Reference, *, offline: bool = False) -> Scan:
    """Read the headers of every safetensors file behind a reference.

    Raises:
        InvalidInput: nothing of that name, or no safetensors file there.
        Offline: a repository, and no network.
    """
    found = resolve(reference, offline=offline, weights=False, companions=True)
    assert found.path is not None
    if found.repository is None:
        folder = found.path if found.names is not None else found.path.parent
        names = found.names if found.names is not None else frozenset({found.path.name})
        made = _scan(found.text, folder, names, lambda name: read_header(folder / name))
    else:
        from .remote import header_of  # here, because it imports the hub's library

        repository = found.repository
        names = frozenset(repository.files or ()) or listing(found.path) or frozenset()
        if INDEX in names:
            repository.fetch(INDEX)
        made = _scan(found.text, found.path, names, lambda name: header_of(repository, name))
        made = replace(made, revision=repository.commit, fetched=False)
        repository.record()
    if not made.headers and not made.broken:
        hint = "Name a folder or a repository that holds safetensors files, or one such file."
        raise InvalidInput(f"{found.text} holds no safetensors file: there is nothing to audit", hint)
    return made


def _scan(reference: str, folder: Path, names: frozenset[str], header: Callable[[str], Header]) -> Scan:
    index: dict[str, str] | None = None
    error, total, config, config_error = "", None, None, ""
    if INDEX in names:
        try:
            index = read_index(folder / INDEX)
            about = msgspec.json.decode((folder / INDEX).read_bytes(), type=_About).metadata or {}
            size = about.get("total_size")
            total = size if type(size) is int else None
        except InvalidInput as failure:
            error = failure.message
        except (msgspec.DecodeError, OSError, ValueError):
            error = f"{INDEX} says something that no index does"
    if CONFIG in names:
        try:
            config = read_config_file(folder / CONFIG)[0]
        except GptkitError as failure:
            config_error = failure.message
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if SINGLE in weights:  # which wins over all others, as everywhere
        weights = [SINGLE, *(name for name in weights if name in set((index or {}).values()) - {SINGLE})]

    def read(name: str) -> Header | str:
        try:
            return header(name)
        except CheckpointError as failure:
            return failure.message

    with ThreadPoolExecutor(8) as pool:
        each = dict(zip(weights, pool.map(read, weights), strict=True))
    return Scan(
        reference,
        folder,
        names,
        headers={name: found for name, found in each.items() if isinstance(found, Header)},
        broken={name: found for name, found in each.items() if isinstance(found, str)},
        index=index,
        index_error=error,
        total_size=total,
        config=config,
        config_error=config_error,
    )
