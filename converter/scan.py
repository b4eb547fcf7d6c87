"""Read the headers of all weight files of a checkpoint, one by one. If a file is broken, the others are still read.

If the index and the files of a folder disagree, `open_checkpoint` raises an error. An audit uses this module to report
how they disagree. Only headers are read, on the hub by range requests. A separate process reads pickles. Formats such
as DCP and those of training programs are opened by their own readers.
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
    """The metadata in an index of weight files. The list of tensors in the index is not decoded."""

    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class FileScan:
    """What the headers of a checkpoint's weight files say, and which files cannot be read."""

    resolved: Reference
    """The model reference, with its local folder or file."""
    folder: Path
    """The folder with config.json and the tokenizer's files."""
    names: frozenset[str]
    """The names of all files in the folder or repository."""
    headers: Mapping[str, Header]
    """The headers of the weight files that can be read, by file name. For a GGUF, dtypes have their names in ggml."""
    broken: Mapping[str, str]
    """The name of a weight file that cannot be read -> the reason."""
    index: Mapping[str, str] | None = None
    """The name of a tensor -> the name of its file, according to the index. None without an index."""
    index_error: str = ""
    """Why the index cannot be read; empty if it can, or if there is none."""
    stale_index: str = ""
    """What is wrong with an index next to a single weight file, which loaders ignore. Empty if nothing is wrong."""
    total_size: int | None = None
    """The size of all tensors in bytes, according to the index. None if it does not say."""
    config: Mapping[str, Any] | None = None
    """config.json as an object; None without one."""
    config_error: str = ""
    """Why config.json cannot be read; empty if it can, or if there is none."""
    revision: str | None = None
    """The commit on the hub; None for a local checkpoint."""
    fetched: bool = True
    """Whether the weights are on this machine."""
    format: str = "safetensors"
    """ "safetensors", "pickle", or the name of a format of `converter.formats`."""
    stored: Weights | None = None
    """The tensors, if the files are not safetensors files; otherwise None."""
    opened: Opened | None = None
    """The checkpoint as the reader of its format has opened it; None for Hugging Face and GGUF files."""

    @property
    def reference(self) -> str:
        """Return the text with which the user named the model."""
        return self.resolved.text

    @property
    def own(self) -> tuple[str, str]:
        """Return the usual names of the single weight file and of the index in this format (safetensors or pickles)."""
        return (PICKLE_SINGLE, PICKLE_INDEX) if self.format == "pickle" else (SINGLE, INDEX)

    @cached_property
    def holders(self) -> dict[str, list[str]]:
        """Return, for every tensor name, the names of the files that contain the tensor. Usually this is one file."""
        files_of: dict[str, list[str]] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                files_of.setdefault(name, []).append(file)
        return files_of

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return every tensor's dtype, shape and place, by name.

        If several files have the tensor, the file that the index names is used, or else the first one.
        """
        infos = {}
        for name, files in self.holders.items():
            file = (self.index or {}).get(name, files[0])
            infos[name] = self.headers[file if file in files else files[0]].tensors[name]
        return infos

    @cached_property
    def weights(self) -> Weights:
        """Return the tensors for reading their values. Tensors whose dtype gptkit cannot convert are read as bytes."""
        return self.raw.numeric()

    @cached_property
    def raw(self) -> Weights:
        """Return the tensors for reading them with their stored dtypes."""
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
        """Return the headers in the form that `open_checkpoint` uses, so that no header is read twice.

        Raises CheckpointError if the headers and the index disagree.
        """
        if SINGLE in self.headers or self.index is None:
            name = SINGLE if SINGLE in self.headers else next(iter(self.headers))
            return single(self.folder / name, self.headers[name])
        return assembled(self.folder, dict(self.index), dict(self.headers))


def scan(reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False) -> FileScan:
    """Read the headers of all weight files of a model.

    Raises:
        InvalidInput: there is no such checkpoint, or it has no weight file. UntrustedInput: it has only pickles, which
            are not allowed. Offline: it is on the hub, and there is no network.
    """
    resolved = resolve(reference, offline=offline, weights=False, companions=True)
    assert resolved.path is not None
    if resolved.format == "gguf":
        return _of_gguf(resolved)
    if resolved.other is not None and resolved.other.read is not None:
        return _of_format(resolved, allow_pickle)
    if resolved.repository is None:
        files = _of_folder(resolved)
    else:
        from .remote import header_of  # here, because it imports the hub's library

        repository = resolved.repository
        names = frozenset(repository.files or ()) or listing(resolved.path) or frozenset()
        if INDEX in names:
            repository.fetch(INDEX)
        files = _scan(resolved, resolved.path, names, lambda name: header_of(repository, name))
        files = replace(files, revision=repository.commit, fetched=False)
        repository.record()
    if not files.headers and not files.broken and files.fetched:
        files = _with_pickles(files, allow_pickle)
    if not files.headers and not files.broken:
        raise InvalidInput(
            f"{resolved.text} contains no weight file, so there is nothing to audit",
            "Give a folder or a hub repository (org/name) with weight files, or one weight file.",
        )
    return files


def _of_folder(resolved: Reference) -> FileScan:
    assert resolved.path is not None
    folder = resolved.path if resolved.names is not None else resolved.path.parent
    names = resolved.names if resolved.names is not None else frozenset({resolved.path.name})
    return _scan(resolved, folder, names, lambda name: read_header(folder / name))


def _of_format(resolved: Reference, allow_pickle: bool) -> FileScan:
    """Scan a checkpoint of another format with its own reader.

    If the reader finds no model, but the files are pickles with tensors, the result has these tensors.
    """
    assert resolved.path is not None and resolved.source is not None and resolved.other is not None
    assert resolved.other.read is not None and resolved.format is not None
    plain = _of_folder(resolved)
    try:
        opened = resolved.other.read(resolved.source, allow_pickle)
    except UntrustedInput:
        raise
    except InvalidInput as error:
        pickles = _with_pickles(plain, allow_pickle)
        if pickles.headers and not pickles.broken:
            return pickles
        return replace(plain, headers={}, broken={resolved.source.name: error.message}, format=resolved.format)
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
        format=resolved.format,
        stored=weights,
        opened=opened,
    )


def _of_gguf(resolved: Reference) -> FileScan:
    from .formats.gguf import tensors
    from .formats.gguf_header import open_header

    path = resolved.source
    assert path is not None
    try:
        header = open_header(path)
    except CheckpointError as error:
        return FileScan(resolved, path.parent, frozenset({path.name}), {}, {path.name: error.message}, format="gguf")
    infos = {
        name: TensorInfo(name, tensor.type.name, tensor.shape, tensor.start, tensor.end)
        for name, tensor in header.tensors.items()
    }
    headers = {path.name: Header(infos, {})}
    return FileScan(resolved, path.parent, frozenset({path.name}), headers, {}, format="gguf", stored=tensors(path))


def _with_pickles(files: FileScan, allow_pickle: bool) -> FileScan:
    """Return the scan with the tensors in the pickles of the folder, or unchanged if there are no pickles."""
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
        raise untrusted(
            files.folder / names[0],
            "Audit a safetensors version of this model, or pass --allow-pickle if you trust the author of the file.",
        )
    headers, broken, stored = {}, {}, dict[str, Stored]()
    process = Unpickler()
    for name in names:
        path = files.folder / name
        try:
            refuse_pointer(path)
            in_file = dict(named_tensors(path, process.ask(path, str(path), (str(path.absolute()), 0, None))))
            Weights(in_file).check()
        except CheckpointError as failure:
            broken[name] = failure.message
            continue
        headers[name] = Header(
            {
                key: TensorInfo(key, tensor.dtype, tensor.shape, 0, tensor.count * tensor.itemsize)
                for key, tensor in in_file.items()
            },
            {},
        )
        stored |= (
            in_file
            if index is None
            else {key: tensor for key, tensor in in_file.items() if index.get(key, name) == name}
        )
    return replace(
        files, headers=headers, broken=broken, index=index, index_error=error, format="pickle", stored=Weights(stored)
    )


def _scan(resolved: Reference, folder: Path, names: frozenset[str], header: Callable[[str], Header]) -> FileScan:
    index: dict[str, str] | None = None
    error, total, config, config_error = "", None, None, ""
    if INDEX in names:
        try:
            index = read_index(folder / INDEX)
            metadata = msgspec.json.decode((folder / INDEX).read_bytes(), type=_About).metadata or {}
            size = metadata.get("total_size")
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
    if SINGLE in weights:  # loaders read the single file and ignore all others
        weights = [SINGLE]

    def read(name: str) -> Header | str:
        try:
            return header(name)
        except CheckpointError as failure:
            return failure.message

    with ThreadPoolExecutor(8) as pool:
        results = dict(zip(weights, pool.map(read, weights), strict=True))
    stale = ""
    if SINGLE in weights and (index is not None or error):
        in_single = getattr(results[SINGLE], "tensors", {})
        stale = error or (
            "" if index == dict.fromkeys(in_single, SINGLE) else f"{INDEX} lists other tensors or files than {SINGLE}"
        )
        index, error = (None, "") if stale else (index, error)
    return FileScan(
        resolved,
        folder,
        names,
        stale_index=stale,
        headers={name: result for name, result in results.items() if isinstance(result, Header)},
        broken={name: result for name, result in results.items() if isinstance(result, str)},
        index=index,
        index_error=error,
        total_size=total,
        config=config,
        config_error=config_error,
    )
