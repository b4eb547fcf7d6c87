"""What is stored on the hub, from headers alone: ranges of a few kilobytes of every weight file, never a weight.

huggingface_hub has a function for this, which takes whatever a server sends for a range, gigabytes included, checks
little of a header and not the file's size. Here its session, addresses and tokens are used, and our own checks: a
header's length is judged before it is read, and a server that ignores ranges is hung up on.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from huggingface_hub import hf_hub_url

from ..components import ModelSpec
from ..errors import CheckpointError, InvalidInput, Offline
from .formats.gguf import describe, describe_header
from .formats.gguf_header import Header as GgufHeader
from .formats.gguf_header import Incomplete
from .formats.gguf_header import parse_header as parse_gguf_header
from .hub import WAY_ON, Repository, offline_by_environment, streamed, typed_errors
from .index import WeightFiles, assembled, index_of, read_index, single
from .names import ADAPTER_CONFIG, INDEX, SINGLE
from .safetensors import Header, header_length, parse_header, read_header
from .tree import Origin

_FIRST = 100_000  # bytes: the whole of nearly every header, in one question
_AT_ONCE = 8
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def weight_headers(repository: Repository, allow_pickle: bool = False) -> WeightFiles | None:
    """Every tensor of a repository whose commit is settled: its dtype, shape, file and place, by range requests where
    the cache has no file; the files are named as if it had them.

    None where there are only pickles, which are allowed, and have no headers. Raises InvalidInput: no safetensors
    weights, headers that are broken or do not agree. Offline: a file is not in the cache, and there is no network.
    """
    folder = repository.config().parent
    repository.list_files()
    names = repository.weight_names(allow_pickle)
    if names[-1].endswith(".bin"):
        return None
    shards = [name for name in names if name != INDEX]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = dict(zip(shards, pool.map(lambda name: _header(repository, name), shards), strict=True))
    repository.record()
    if INDEX not in names:
        found = single(folder / shards[0], read[shards[0]])
        return replace(found, index=index_of(folder, found)) if shards == [SINGLE] else found
    return assembled(folder, read_index(folder / INDEX), read)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a remote file, and what the answer says of the whole."""

    data: bytes
    size: int | None
    etag: str | None


def _header(repository: Repository, name: str) -> Header:
    path, where = repository.cached(name), f"hf://{repository}/{name}"
    if path is not None:
        return read_header(path)
    if not repository.online:
        raise Offline(f"{name} of {repository} is not in the local cache, and {repository.why_offline}", WAY_ON)
    first = _read_range(repository, name, 0, _FIRST)
    listed = repository.size(name)
    size = first.size if first.size is not None else listed
    if size is None:
        raise InvalidInput(f"the server does not say how long {where} is", "Fetch it: try without --dry-run.")
    if listed is not None and listed != size:
        raise CheckpointError(f"{where} has {size} bytes, and the hub lists {listed}", "Try again later.")
    if len(first.data) < min(_FIRST, size):
        raise Offline(f"{where}: the connection broke off after {len(first.data)} bytes", "Run the same again.")
    length = header_length(where, first.data[:8], size)
    raw = first.data[8 : 8 + length]
    if len(raw) < length:
        rest = _read_range(repository, name, 8 + len(raw), 8 + length)
        if (rest.size, rest.etag) != (first.size, first.etag):
            raise Offline(f"{where} changed while it was read", "Run the same again.")
        raw += rest.data
    if len(raw) < length:
        raise Offline(f"{where}: the connection broke off within its header", "Run the same again.")
    return parse_header(where, raw, size)


def _read_range(repository: Repository, name: str, begin: int, end: int) -> Part:
    """Bytes `begin` to `end` (exclusive) of a file, fewer where it is shorter; never many more than `end` are fetched.

    Only the standard part of HTTP is relied on: an answer of 200 is the file from its beginning, and is left when
    enough of it has come.
    """
    asked = {"Range": f"bytes={begin}-{end - 1}"}
    url = hf_hub_url(repository.repo, name, revision=repository.commit)
    with typed_errors(repository, name), streamed(repository, url, asked) as response:
        told = response.headers
        if response.status_code == 416:  # nothing at `begin`
            total = told.get("Content-Range", "").rpartition("/")[2]
            return Part(b"", int(total) if total.isdecimal() else None, told.get("ETag"))
        for commit in [answer.headers.get("X-Repo-Commit") for answer in (*response.history, response)]:
            if commit is not None:
                repository.require_commit(name, commit)
        if told.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidInput(f"{repository}: the server compresses {name}", "The address in HF_ENDPOINT is no hub.")
        length = told.get("Content-Length", "")
        size, skip, wanted = int(length) if length.isdecimal() else None, begin, end
        if response.status_code == 206:
            given = _RANGE.fullmatch(told.get("Content-Range", ""))
            if given is None or int(given[1]) != begin or not begin <= int(given[2]) < end:
                raise InvalidInput(
                    f"{repository}: the server was asked for bytes {begin} to {end - 1} of {name} and sends others",
                    "The address in HF_ENDPOINT is no hub.",
                )
            size, skip, wanted = int(given[3]) if given[3] != "*" else None, 0, int(given[2]) + 1 - begin
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= wanted:
                break
    return Part(bytes(data[skip:wanted]), size, told.get("ETag"))


# What a GGUF's header leaves to two tensors' values (whether the head repeats the embedding) is told from a few
# kilobytes of each, which a note says.

GGUF_FIRST = 2**20
GGUF_MOST = 2**27
"""Bytes of a header: the largest vocabulary with its merges takes a tenth of it."""

SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def only_gguf(repo: str, revision: str | None, why: InvalidInput) -> str:
    """The one GGUF file of a repository that has no config.json. Raises InvalidInput: `why`, where it has none; it has
    several, and the message says how to name one.
    """
    names = [each.rfilename for each in Repository(repo, revision, "", True).siblings()]
    found = sorted(name for name in names if name.endswith(".gguf") and name.isprintable())
    if not found and ADAPTER_CONFIG in names:
        raise InvalidInput(f"{repo} is an adapter, not a model by itself", f"gptkit swap BASE OUT --merge-lora {repo}")
    if not found:
        raise why
    if len(found) > 1:
        at = f"@{revision}" if revision is not None else ""
        some = ", ".join(found[:6]) + (f", … ({len(found) - 6} more)" if len(found) > 6 else "")
        raise InvalidInput(
            f"{repo} has no config.json and {len(found)} GGUF files: {some}", f"Name one: hf://{repo}{at}/{found[0]}"
        )
    return found[0]


def read_gguf(
    repo: str, revision: str | None, file: str, *, offline: bool = False
) -> tuple[ModelSpec, Origin, str, list[str]]:
    """The tree of a GGUF file in a repository: (spec, origin, commit, notes).

    What the cache has is read there. Raises InvalidInput: no such repository or file, or no header that can be read.
    Offline: it is not in the cache, and there is no network.
    """
    name = f"hf://{repo}{f'@{revision}' if revision is not None else ''}/{file}"
    if any(part in ("", ".", "..") for part in file.split("/")) or not file.isprintable():
        raise InvalidInput(f"not a file of a repository: {name}")
    if SPLIT.search(file):
        raise InvalidInput(
            f"{name} is one of several parts of a model", "Join them with llama.cpp's llama-gguf-split --merge."
        )
    alone = offline or offline_by_environment()
    repository = Repository(repo, revision, "", not alone)
    if not alone:
        repository.settle(file)
    path = repository.cached(file, revision if alone else None)
    if path is not None:
        spec, origin, notes = describe(path)
        return spec, origin, path.parents[file.count("/")].name, notes
    if alone:
        raise Offline(f"{name} is not in the local cache, and {repository.why_offline}", WAY_ON)
    header, read = _gguf_header(repository, file, name)
    spec, origin, notes = describe_header(name, header)
    if read.used:
        notes.append(f"{file}: some of its tensors were compared in part, since no weight is fetched")
    return spec, origin, repository.commit, notes


class _Ranges:
    """Reads parts of a file's tensors."""

    def __init__(self, repository: Repository, file: str) -> None:
        self.repository, self.file, self.used = repository, file, False

    def __call__(self, start: int, end: int) -> bytes:
        self.used = True
        data = _read_range(self.repository, self.file, start, end).data
        if len(data) != end - start:
            raise Offline(f"{self.repository}: the connection broke off within {self.file}", "Run the same again.")
        return data


def _gguf_header(repository: Repository, file: str, name: str) -> tuple[GgufHeader, _Ranges]:
    data, wanted, first = b"", GGUF_FIRST, None
    read = _Ranges(repository, file)
    while True:
        part = _read_range(repository, file, len(data), wanted)
        if first is not None and (part.size, part.etag) != (first.size, first.etag):
            raise Offline(f"{name} changed while it was read", "Run the same again.")
        first = part
        if part.size is None:
            raise InvalidInput(f"the server does not say how long {name} is", "Fetch the file, and name it.")
        data += part.data
        if len(data) < min(wanted, part.size):
            raise Offline(f"{name}: the connection broke off after {len(data)} bytes", "Run the same again.")
        try:
            return parse_gguf_header(name, data, part.size, read), read
        except Incomplete as error:
            if error.needed > GGUF_MOST:
                raise CheckpointError(f"{name} claims a header of more than {GGUF_MOST:,} bytes") from error
            wanted = min(max(error.needed + GGUF_FIRST, 2 * len(data)), GGUF_MOST, part.size)
