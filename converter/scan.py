"""What lies in a checkpoint's weight files, each read for itself: what is wrong with one is told, and stops nothing.

Everything else here refuses a folder whose index and files disagree; an audit wants to know how they do. Headers alone
are read, of a repository on the hub by ranges. What pickles hold is told by a process of its own.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..architectures.config import read_config_file
from ..errors import CheckpointError, GptkitError, InvalidInput
from .index import PICKLE_SUFFIXES, Stored, read_index
from .names import CONFIG, INDEX, PICKLE_INDEX, PICKLE_SINGLE, SINGLE, listing, refuse_pointer, untrusted
from .pickles import Unpickler, named_tensors
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
    config_error: why it cannot be read. fetched: whether the weights are here. stored: where tensors lie that are no
    plain bytes of a file; the types in a GGUF's header are ggml's.
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
    format: Literal["safetensors", "gguf", "pickle"] = "safetensors"
    stored: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def own(self) -> tuple[str, str]:
        """What a single weight file is called in this format, and an index of several."""
        return (PICKLE_SINGLE, PICKLE_INDEX) if self.format == "pickle" else (SINGLE, INDEX)

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
        if self.stored:
            return Weights(self.stored)
        stored = {}
        for name, info in self.tensors.items():
            files = self.holders[name]
            file = (self.index or {}).get(name, files[0])
            path = self.folder / (file if file in files else files[0])
            stored[name] = Stored(path, info.dtype, info.shape, info.start, info.nbytes)
        return Weights(stored, fetched=self.fetched)


def scan(reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False) -> Scan:
    """Read the headers of every safetensors file behind a reference, or of a GGUF, or what pickles hold.

    Raises:
        InvalidInput: nothing of that name, or no weight file there; UntrustedInput: pickles alone, and not allowed.
        Offline: a repository, and no network.
    """
    found = resolve(reference, offline=offline, weights=False, companions=True)
    assert found.path is not None
    if found.format == "gguf":
        return _of_gguf(found)
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
    if not made.headers and not made.broken and made.fetched:
        made = _with_pickles(made, allow_pickle)
    if not made.headers and not made.broken:
        hint = (
            "Name a folder or a repository that holds safetensors files, one such file, a GGUF, or a folder of pickles."
        )
        raise InvalidInput(f"{found.text} holds no weight file: there is nothing to audit", hint)
    return made


def _of_gguf(found: Reference) -> Scan:
    from .formats.gguf import tensors
    from .formats.gguf_header import open_header

    path = found.source
    assert path is not None
    try:
        header = open_header(path)
    except CheckpointError as error:
        return Scan(found.text, path.parent, frozenset({path.name}), {}, {path.name: error.message}, format="gguf")
    infos = {
        name: TensorInfo(name, each.type.name, each.shape, each.start, each.end)
        for name, each in header.tensors.items()
    }
    headers = {path.name: Header(infos, {})}
    return Scan(
        found.text, path.parent, frozenset({path.name}), headers, {}, format="gguf", stored=tensors(path)._tensors
    )


def _with_pickles(files: Scan, allow_pickle: bool) -> Scan:
    """The same with what pickles hold, where there are any."""
    try:
        index = read_index(files.folder / PICKLE_INDEX) if PICKLE_INDEX in files.names else None
        error = ""
    except InvalidInput as failure:
        index, error = None, failure.message
    single = files.names & {PICKLE_SINGLE}
    names = sorted(single or (name for name in files.names if name.endswith(PICKLE_SUFFIXES)))
    if not names:
        return files
    if not allow_pickle:
        hint = "Audit a safetensors version of this model, or pass --allow-pickle if you trust where it comes from."
        raise untrusted(files.folder / names[0], hint)
    headers, broken, stored = {}, {}, dict[str, Stored]()
    process = Unpickler()
    for name in names:
        path = files.folder / name
        try:
            refuse_pointer(path)
            held = dict(named_tensors(path, process.ask(path, str(path), (str(path.absolute()), 0, None))))
            Weights(held).check()
        except CheckpointError as failure:
            broken[name] = failure.message
            continue
        headers[name] = Header(
            {key: TensorInfo(key, each.dtype, each.shape, 0, each.count * each.itemsize) for key, each in held.items()},
            {},
        )
        stored |= held if index is None else {key: each for key, each in held.items() if index.get(key, name) == name}
    return replace(
        files, headers=headers, broken=broken, index=index, index_error=error, format="pickle", stored=stored
    )


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
