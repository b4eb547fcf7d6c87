"""The tree of a GGUF on the hub, from its header alone: ranges of the file's beginning, a few megabytes for a large
vocabulary, and never its weights.

What a header leaves to two tensors' values (whether the head repeats the embedding) is told from a few kilobytes of
each, which a note says.
"""

from __future__ import annotations

import re

from ..components import ModelSpec
from ..errors import CheckpointError, InvalidInput, Offline
from .formats.gguf import describe, describe_header
from .formats.gguf_header import Header, Incomplete, parse_header
from .hub import WAY_ON, Repository, offline_by_environment
from .names import ADAPTER_CONFIG
from .remote import read_range
from .tree import Origin

FIRST = 2**20
MOST = 2**27
"""Bytes of a header: the largest vocabulary with its merges takes a tenth of it."""

SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def only_gguf(repo: str, revision: str | None, why: InvalidInput) -> str:
    """The one GGUF file of a repository that has no config.json.

    Raises InvalidInput: `why`, where it has none; it has several, and the message says how to name one.
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

    What the cache has is read there.

    Raises InvalidInput: no such repository or file, or no header that can be read. Offline: it is not in the cache, and
    there is no network.
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
    header, read = _header(repository, file, name)
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
        data = read_range(self.repository, self.file, start, end).data
        if len(data) != end - start:
            raise Offline(f"{self.repository}: the connection broke off within {self.file}", "Run the same again.")
        return data


def _header(repository: Repository, file: str, name: str) -> tuple[Header, _Ranges]:
    data, wanted, first = b"", FIRST, None
    read = _Ranges(repository, file)
    while True:
        part = read_range(repository, file, len(data), wanted)
        if first is not None and (part.size, part.etag) != (first.size, first.etag):
            raise Offline(f"{name} changed while it was read", "Run the same again.")
        first = part
        if part.size is None:
            raise InvalidInput(f"the server does not say how long {name} is", "Fetch the file, and name it.")
        data += part.data
        if len(data) < min(wanted, part.size):
            raise Offline(f"{name}: the connection broke off after {len(data)} bytes", "Run the same again.")
        try:
            return parse_header(name, data, part.size, read), read
        except Incomplete as error:
            if error.needed > MOST:
                raise CheckpointError(f"{name} claims a header of more than {MOST:,} bytes") from error
            wanted = min(max(error.needed + FIRST, 2 * len(data)), MOST, part.size)
