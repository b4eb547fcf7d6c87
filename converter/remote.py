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

from ..errors import CheckpointError, InvalidInput, Offline
from .hub import WAY_ON, Repository, streamed, typed_errors
from .index import WeightFiles, assembled, index_of, read_index, single
from .names import INDEX, SINGLE
from .safetensors import Header, header_length, parse_header, read_header

_FIRST = 100_000  # bytes: the whole of nearly every header, in one question
_AT_ONCE = 8
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def weight_headers(repository: Repository, allow_pickle: bool = False) -> WeightFiles | None:
    """Every tensor of a repository whose commit is settled: its dtype, shape, file and place, by range requests where
    the cache has no file; the files are named as if it had them.

    None where there are only pickles, which are allowed, and have no headers.

    Raises InvalidInput: no safetensors weights, headers that are broken or do not agree. Offline: a file is not in the
    cache, and there is no network.
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
    first = read_range(repository, name, 0, _FIRST)
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
        rest = read_range(repository, name, 8 + len(raw), 8 + length)
        if (rest.size, rest.etag) != (first.size, first.etag):
            raise Offline(f"{where} changed while it was read", "Run the same again.")
        raw += rest.data
    if len(raw) < length:
        raise Offline(f"{where}: the connection broke off within its header", "Run the same again.")
    return parse_header(where, raw, size)


def read_range(repository: Repository, name: str, begin: int, end: int) -> Part:
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
