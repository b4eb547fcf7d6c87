"""Read only the headers of weight files on the hub, by range requests of a few kilobytes.

huggingface_hub has a function for this. But it accepts any number of bytes from the server, hardly checks the header,
and does not check the file's size. gptkit uses the session, the addresses and the tokens of huggingface_hub, and adds
checks: it checks the length of a header before reading it, and closes the connection if the server sends more than the
requested bytes.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from huggingface_hub import hf_hub_url

from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import CheckpointError, InvalidInput, Offline
from .formats.gguf import describe, describe_header
from .formats.gguf_header import Incomplete
from .formats.gguf_header import parse_header as parse_gguf_header
from .hub import NO_HUB, WAY_ON, Repository, offline_by_environment, stated_length, streamed, typed_errors
from .index import WeightFiles, assembled, index_of, read_index, single
from .names import ADAPTER_CONFIG, INDEX, SINGLE
from .safetensors import Header, header_length, parse_header, read_header
from .tree import Origin

_FIRST = 100_000  # bytes; one request of this size gets nearly every header
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def weight_headers(repository: Repository, allow_pickle: bool = False) -> WeightFiles | None:
    """Return the headers of a repository's weight files, from the cache or by range requests.

    Return None if the weights are pickles, which have no such headers.
    """
    folder = repository.folder()
    repository.list_files()
    names = repository.weight_names(allow_pickle)
    if names[-1].endswith(".bin"):
        return None
    shards = [name for name in names if name != INDEX]
    with ThreadPoolExecutor(8) as pool:
        headers = dict(zip(shards, pool.map(lambda name: header_of(repository, name), shards), strict=True))
    repository.record()
    if INDEX not in names:
        files = single(folder / shards[0], headers[shards[0]])
        return replace(files, index=index_of(folder, files)) if shards == [SINGLE] else files
    return assembled(folder, read_index(folder / INDEX), headers)


class _Remote:
    """A file of a repository that is fetched in parts.

    Attributes:
        where: the address of the file, for messages.
        data: the beginning of the file that was fetched so far.
        size: the size of the whole file in bytes; 0 before the first request.
        sampled: whether `sample` was called.
    """

    def __init__(self, repository: Repository, name: str, otherwise: str) -> None:
        """Remember the name of the file. `otherwise` is the hint of errors, if the file cannot be read in parts."""
        self._repository, self._name, self._otherwise = repository, name, otherwise
        self.where = f"hf://{repository}/{name}"
        self.data, self.size, self.sampled = b"", 0, False
        self._etag: str | None = None

    def upto(self, end: int) -> None:
        """Fetch the file up to byte `end` into `data`, or the whole file if it is shorter.

        Raises InvalidInput, Offline.
        """
        begin = len(self.data)
        if begin and begin >= min(end, self.size):
            return
        data, size, etag = self._read(begin, end)
        listed = self._repository.size(self._name)
        size = listed if size is None else size
        if size is None:
            raise InvalidInput(f"the server does not report the size of {self.where}", self._otherwise)
        if listed is not None and listed != size:
            raise CheckpointError(
                f"{self.where} has {size} bytes, but {listed} bytes in the hub's list of files", "Try again later."
            )
        if begin and (size, etag) != (self.size, self._etag):
            raise Offline(f"{self.where} changed while it was read", "Run the same command again.")
        self.data, self.size, self._etag = self.data + data, size, etag
        if len(self.data) < min(end, size):
            raise Offline(
                f"{self.where}: the connection was interrupted after {len(self.data)} bytes",
                "Run the same command again.",
            )

    def sample(self, start: int, end: int) -> bytes:
        """Fetch and return bytes `start` to `end` (exclusive) of the file. Raises InvalidInput, Offline."""
        self.sampled = True
        data, _, _ = self._read(start, end)
        if len(data) != end - start:
            raise Offline(
                f"{self._repository}: the connection was interrupted while {self._name} was read",
                "Run the same command again.",
            )
        return data

    def _read(self, begin: int, end: int) -> tuple[bytes, int | None, str | None]:
        """Request bytes `begin` to `end` (exclusive) of the file.

        Returns:
            The bytes, fewer if the file is shorter; the size of the whole file, or None if the server does not say; the
            ETag of the file, or None.
        """
        repository, name = self._repository, self._name
        range_header = {"Range": f"bytes={begin}-{end - 1}"}
        url = hf_hub_url(repository.repo, name, revision=repository.commit)
        with typed_errors(repository, name), streamed(repository, url, range_header) as response:
            headers = response.headers
            if response.status_code == 416:  # nothing at `begin`
                total = headers.get("Content-Range", "").rpartition("/")[2]
                return b"", int(total) if total.isdecimal() else None, headers.get("ETag")
            for commit in [answer.headers.get("X-Repo-Commit") for answer in (*response.history, response)]:
                if commit is not None:
                    repository.require_commit(name, commit)
            if headers.get("Content-Encoding", "identity").lower() != "identity":
                raise InvalidInput(
                    f"{repository}: the server sends {name} compressed, so gptkit cannot read a part of it", NO_HUB
                )
            size, skip, wanted = stated_length(response), begin, end
            if response.status_code == 206:
                given = _RANGE.fullmatch(headers.get("Content-Range", ""))
                if given is None or int(given[1]) != begin or not begin <= int(given[2]) < end:
                    raise InvalidInput(
                        f"{repository}: the server does not send the requested bytes {begin} to {end - 1} of {name}",
                        NO_HUB,
                    )
                size, skip, wanted = int(given[3]) if given[3] != "*" else None, 0, int(given[2]) + 1 - begin
            data = bytearray()
            for chunk in response.iter_raw():
                data += chunk
                if len(data) >= wanted:
                    break
        return bytes(data[skip:wanted]), size, headers.get("ETag")


def header_of(repository: Repository, name: str) -> Header:
    """Return the header of a safetensors file in a repository. The rest of the file is not fetched.

    Raises InvalidInput, Offline.
    """
    path = repository.cached(name)
    if path is not None:
        return read_header(path)
    if not repository.online:
        raise Offline(f"{name} of {repository} is not in the local cache, and {repository.why_offline}", WAY_ON)
    file = _Remote(repository, name, "Fetch the whole file: leave --dry-run out.")
    file.upto(_FIRST)
    end = 8 + header_length(file.where, file.data[:8], file.size)
    file.upto(end)
    return parse_header(file.where, file.data[8:end], file.size)


_GGUF_FIRST = 2**20
_GGUF_MOST = 2**27  # bytes of a header; the largest vocabulary with its merges takes a tenth of this


def only_gguf(repo: str, revision: str | None, why: InvalidInput) -> str:
    """Return the name of the only GGUF file in a repository without config.json.

    Raises the error `why` if there is none, and InvalidInput if there are several, or if the repository is an adapter.
    """
    names = [sibling.rfilename for sibling in Repository(repo, revision, "", True).siblings()]
    files = sorted(name for name in names if name.endswith(".gguf") and name.isprintable())
    if not files and ADAPTER_CONFIG in names:
        raise InvalidInput(
            f"{repo} is an adapter, not a model by itself",
            f"Merge the adapter into its base model: gptkit swap BASE OUT --merge-lora {repo}",
        )
    if not files:
        raise why
    if len(files) > 1:
        at = f"@{revision}" if revision is not None else ""
        some = some_of(files, 6, ", … ({} more)")
        raise InvalidInput(
            f"{repo} has no config.json, but {len(files)} GGUF files: {some}",
            f"Give one of these files, such as hf://{repo}{at}/{files[0]}",
        )
    return files[0]


def read_gguf(
    repo: str, revision: str | None, file: str, *, offline: bool = False
) -> tuple[ModelSpec, Origin, str, list[str]]:
    """Return the tree of components, its origin, the commit and notes for a GGUF file in a repository.

    Only the header is fetched. Raises InvalidInput, Offline.

    A file may store both an embedding and a head. gptkit then compares a few kilobytes of the two to decide whether the
    head is tied, and a note says so.
    """
    name = f"hf://{repo}{f'@{revision}' if revision is not None else ''}/{file}"
    if any(part in ("", ".", "..") for part in file.split("/")) or not file.isprintable():
        raise InvalidInput(f"{name} is not the name of a file in a repository")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file):
        raise InvalidInput(
            f"{name} is only one of the files of a split model",
            "Join the files first: llama-gguf-split --merge PART_1.gguf OUT.gguf (a program of llama.cpp).",
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
    remote, wanted = _Remote(repository, file, "Download the file, and give its path."), _GGUF_FIRST
    while True:
        remote.upto(wanted)
        try:
            header = parse_gguf_header(name, remote.data, remote.size, remote.sample)
            break
        except Incomplete as error:
            if error.needed > _GGUF_MOST:
                raise CheckpointError(
                    f"{name} claims to have a header of more than {_GGUF_MOST:,} bytes, too many for a GGUF file"
                ) from error
            wanted = min(max(error.needed + _GGUF_FIRST, 2 * len(remote.data)), _GGUF_MOST)
    spec, origin, notes = describe_header(name, header)
    if remote.sampled:
        notes.append(
            f"{file}: the head and the embedding were compared in part, because gptkit fetches only headers here"
        )
    return spec, origin, repository.commit, notes
