"""Read each weight file of a checkpoint for itself: what is wrong with one is reported, and the others are still read.

`open_checkpoint` refuses a folder whose index and files disagree; an audit wants to know how they do. Only headers
are read, of a repository on the hub by ranges. A process of its own reads pickles. Formats that only their own reader
understands (DCP, what training programs leave) are opened by it.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..architectures.config import read_config_file
from ..errors import CheckpointError, GptkitError, InvalidInput, UntrustedInput
from .formats import Opened
from .index import PICKLE_SUFFIXES, Stored, WeightFiles, assembled, read_index, single
from .names import CONFIG, INDEX, PICKLE_INDEX, PICKLE_SINGLE, SINGLE, listing, refuse_pointer, untrusted
from .pickles import Unpickler, named_tensors
from .resolve import Reference, resolve
from .safetensors import DTYPES, Header, TensorInfo, read_header
from .tree import quantised_beside
from .weights import Weights


class _About(msgspec.Struct):
    """What an index says of all its tensors together."""

    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class Scan:
    """The weight files of a checkpoint as far as they can be read."""

    found: Reference
    """What was asked for, resolved."""
    folder: Path
    """Where its small files are: config.json and the tokenizer's."""
    names: frozenset[str]
    """All files, a repository's included."""
    headers: Mapping[str, Header]
    """The weight files that can be read. The types in a GGUF's header are ggml's."""
    broken: Mapping[str, str]
    """Those that cannot, and why."""
    index: Mapping[str, str] | None = None
    """The file that the index names for each tensor; None without an index."""
    index_error: str = ""
    """Why the index cannot be read."""
    stale_index: str = ""
    """What is wrong with an index beside a single file that holds everything, which loaders read instead."""
    total_size: int | None = None
    """The bytes of all tensors, as the index says."""
    config: Mapping[str, Any] | None = None
    """config.json as an object; None without one."""
    config_error: str = ""
    """Why config.json cannot be read."""
    revision: str | None = None
    """The hub's commit."""
    fetched: bool = True
    """Whether the weights are here."""
    format: str = "safetensors"
    """ "safetensors", "pickle", or the name of a format of `converter.formats`."""
    stored: Weights | None = None
    """The tensors, where they are not plain bytes of a safetensors file."""
    opened: Opened | None = None
    """What the reader of another format made of the files."""

    @property
    def reference(self) -> str:
        """What was asked for."""
        return self.found.text

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
        if self.stored is not None:
            return self.stored
        stored = {}
        for name, info in self.tensors.items():
            files = self.holders[name]
            file = (self.index or {}).get(name, files[0])
            path = self.folder / (file if file in files else files[0])
            stored[name] = Stored(path, info.dtype, info.shape, info.start, info.nbytes)
        return Weights(stored, fetched=self.fetched)

    def weight_files(self) -> WeightFiles:
        """The headers as `open_checkpoint` takes them, so that none is asked of the hub twice. Raises CheckpointError
        where they and the index disagree.
        """
        if SINGLE in self.headers or self.index is None:
            name = SINGLE if SINGLE in self.headers else next(iter(self.headers))
            return single(self.folder / name, self.headers[name])
        return assembled(self.folder, dict(self.index), dict(self.headers))


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
    if found.other is not None and found.other.read is not None:
        return _of_format(found, allow_pickle)
    if found.repository is None:
        made = _of_folder(found)
    else:
        from .remote import header_of  # here, because it imports the hub's library

        repository = found.repository
        names = frozenset(repository.files or ()) or listing(found.path) or frozenset()
        if INDEX in names:
            repository.fetch(INDEX)
        made = _scan(found, found.path, names, lambda name: header_of(repository, name))
        made = replace(made, revision=repository.commit, fetched=False)
        repository.record()
    if not made.headers and not made.broken and made.fetched:
        made = _with_pickles(made, allow_pickle)
    if not made.headers and not made.broken:
        hint = "Give a folder or a hub repository (org/name) with weight files, or one weight file."
        raise InvalidInput(f"{found.text} contains no weight file, so there is nothing to audit", hint)
    return made


def _of_folder(found: Reference) -> Scan:
    assert found.path is not None
    folder = found.path if found.names is not None else found.path.parent
    names = found.names if found.names is not None else frozenset({found.path.name})
    return _scan(found, folder, names, lambda name: read_header(folder / name))


def _of_format(found: Reference, allow_pickle: bool) -> Scan:
    """Open another format by its own reader. Pickles that it does not know as a model are read as they are."""
    assert found.path is not None and found.source is not None and found.other is not None
    assert found.other.read is not None and found.format is not None
    plain = _of_folder(found)
    try:
        opened = found.other.read(found.source, allow_pickle)
    except UntrustedInput:
        raise
    except InvalidInput as error:
        pickles = _with_pickles(plain, allow_pickle)
        if pickles.headers and not pickles.broken:
            return pickles
        return replace(plain, headers={}, broken={found.source.name: error.message}, format=found.format)
    weights = opened.weights
    infos: dict[str, dict[str, TensorInfo]] = {path.name: {} for path in opened.files}
    for name, (dtype, shape) in weights.info.items():
        file = weights.place(name)[0].name or opened.files[0].name
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        infos.setdefault(file, {})[name] = TensorInfo(name, dtype, shape, 0, nbytes)
    return replace(
        plain,
        folder=opened.home or plain.folder,
        headers={file: Header(tensors, {}) for file, tensors in infos.items()},
        broken={},
        index=None,
        index_error="",
        config=opened.origin.config if opened.architecture is not None else None,
        format=found.format,
        stored=weights,
        opened=opened,
    )


def _of_gguf(found: Reference) -> Scan:
    from .formats.gguf import tensors
    from .formats.gguf_header import open_header

    path = found.source
    assert path is not None
    try:
        header = open_header(path)
    except CheckpointError as error:
        return Scan(found, path.parent, frozenset({path.name}), {}, {path.name: error.message}, format="gguf")
    infos = {
        name: TensorInfo(name, each.type.name, each.shape, each.start, each.end)
        for name, each in header.tensors.items()
    }
    headers = {path.name: Header(infos, {})}
    return Scan(found, path.parent, frozenset({path.name}), headers, {}, format="gguf", stored=tensors(path))


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
        hint = "Audit a safetensors version of this model, or pass --allow-pickle if you trust the author of the file."
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
        files, headers=headers, broken=broken, index=index, index_error=error, format="pickle", stored=Weights(stored)
    )


def _scan(found: Reference, folder: Path, names: frozenset[str], header: Callable[[str], Header]) -> Scan:
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
            error = f"{INDEX} is not an index of safetensors files: its weight_map or metadata has a wrong form"
    if CONFIG in names:
        try:
            config = read_config_file(folder / CONFIG)[0]
            if (settings := quantised_beside(config, folder)) is not None:
                config = {**config, "quantization_config": settings}
        except GptkitError as failure:
            config_error = failure.message
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if SINGLE in weights:  # which wins over all others, as everywhere
        weights = [SINGLE]

    def read(name: str) -> Header | str:
        try:
            return header(name)
        except CheckpointError as failure:
            return failure.message

    with ThreadPoolExecutor(8) as pool:
        each = dict(zip(weights, pool.map(read, weights), strict=True))
    stale = ""
    if SINGLE in weights and (index is not None or error):
        held = getattr(each[SINGLE], "tensors", {})
        stale = error or (
            "" if index == dict.fromkeys(held, SINGLE) else f"{INDEX} lists other tensors or files than {SINGLE}"
        )
        index, error = (None, "") if stale else (index, error)
    return Scan(
        found,
        folder,
        names,
        stale_index=stale,
        headers={name: one for name, one in each.items() if isinstance(one, Header)},
        broken={name: one for name, one in each.items() if isinstance(one, str)},
        index=index,
        index_error=error,
        total_size=total,
        config=config,
        config_error=config_error,
    )
