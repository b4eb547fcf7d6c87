"""List and fetch the files of a repository of the Hugging Face hub at one commit.

A HEAD request first asks for the commit. Every file is then fetched at this commit, so the files are of one revision
even if somebody changes the branch in the meantime. Files in the cache are not fetched again. huggingface_hub manages
the cache, the tokens, the progress bars and the continuation of downloads.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
from huggingface_hub import constants, errors, hf_hub_url, try_to_load_from_cache, utils
from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_download

from ..architectures.config import MAX_CONFIG_BYTES
from ..errors import CheckpointError, GptkitError, InvalidInput, Offline
from .companions import MOST_BYTES, UNLISTED, travelling
from .names import CONFIG, INDEX, PICKLE_INDEX, PICKLE_SINGLE, SINGLE, is_plain
from .tokenizer_process import MAX_BYTES

_library: Any = utils  # its stubs do not have all of its documented names

_log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40,64}")  # checked because it becomes a file name
_MAX_ANSWER = 2**24  # bytes of a listing; one of 10,000 files has a fifth of this
_MAX_REFUSAL = 2**16
_MOST = {INDEX: 2**27, PICKLE_INDEX: 2**27, CONFIG: MAX_CONFIG_BYTES, ".safetensors": None, ".bin": None, "": MAX_BYTES}
"""The ending of a file's name -> the largest allowed size in bytes.

None is for weights, whose sizes are in the hub's list of files.
"""
NO_HUB = "Check HF_ENDPOINT: this address is not a Hugging Face hub."
_NO_NETWORK = "give a local folder, or a sample that needs no network, such as sample:gpt2."
WAY_ON = f"Go online, or {_NO_NETWORK}"


class NoConfig(InvalidInput):
    """The repository has no config.json. It may have files of another format."""

    def __init__(self, repository: Repository) -> None:
        hint = "It may contain a GGUF, which gptkit params can read, or an adapter: gptkit swap BASE OUT"
        super().__init__(f"{repository} has no config.json", f"{hint} --merge-lora {repository.repo}")


class NoModel(InvalidInput):
    """The hub has no model of this name, or the model is private."""


class _RemoteFile(msgspec.Struct):
    """A file in the hub's list of a repository, with the names that the hub gives to the fields."""

    rfilename: str = ""  # its path in the repository
    size: int | None = None
    blobId: str | None = None  # noqa: N815, its name there
    lfs: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    siblings: list[_RemoteFile] = []


@dataclass(slots=True)
class Repository:
    """A repository on the hub, at one commit."""

    repo: str
    """The name, such as org/name."""
    revision: str | None
    """The branch, tag or commit that the user gave; None for the default branch."""
    commit: str
    """The commit; "" until it is known."""
    online: bool
    """Whether gptkit may fetch files from the hub."""
    files: Mapping[str, _RemoteFile] | None = None
    """The files at the top level, by name. None until they are listed, or if the hub does not list them.

    Offline, these are the files in the cache.
    """
    notes: list[str] = field(default_factory=list)
    why_offline: str = "network access is off"
    """Why files may not be fetched, for error messages."""
    nested: Mapping[str, _RemoteFile] = field(default_factory=dict)
    """The files in subfolders, by their paths in the repository."""

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @classmethod
    def open(cls, repo: str, revision: str | None, *, offline: bool = False) -> Repository:
        """Open a repository at the commit that the hub reports for a revision.

        If the hub cannot be reached, open it at the commit in the cache, with a note.
        """
        asked = cls(repo, revision, "", online=not offline)
        if offline:
            return asked.as_cached()
        try:
            asked.settle()
        except Offline as error:
            try:
                return asked.as_cached()
            except (Offline, InvalidInput):
                raise error from None
        except InvalidInput as error:
            if asked._cached(CONFIG, revision) is None:
                raise
            hint = f"{error.hint or ''} The copy in the cache still works with --offline.".strip()
            raise InvalidInput(error.message, hint) from error
        return asked

    def as_cached(self) -> Repository:
        """Return the repository as it is in the cache. Raises Offline if it is not there.

        The commit is the repository's own, or if that is unknown, the one that the cache has for the revision. A note
        says so if the hub could not be reached.
        """
        config = self._cached(CONFIG) if self.commit else self._cached(CONFIG, self.revision)
        why = "the hub could not be reached" if self.online else self.why_offline
        if config is None:
            raise Offline(f"{self} is not in the local cache, and {why}", WAY_ON)
        # The cache names the folder of a snapshot after its commit.
        commit, files = config.parent.name, {path.name: _RemoteFile() for path in config.parent.iterdir()}
        nested = {path.relative_to(config.parent).as_posix(): _RemoteFile() for path in config.parent.glob("*/*")}
        notes = [f"{why}: {self} is read from the cache, at commit {commit}"] if self.online else self.notes
        return Repository(self.repo, self.revision, commit, False, files, [*notes], why, nested)

    def list_files(self) -> None:
        """Fetch the list of all files (`files` and `nested`), unless it was already fetched.

        Some mirrors do not list files. `files` then stays None, and gptkit asks for every file separately.
        """
        if not self.online or self.files is not None:
            return
        try:
            # Names are untrusted and become file names, so only plain names are used.
            every = {x.rfilename: x for x in self.siblings()}
            files = {name: file for name, file in every.items() if is_plain(name)}
            self.files = files if CONFIG in files else None
            self.nested = {name: file for name, file in every.items() if "/" in name and _is_nested(name)}
        except Offline:
            raise
        except Exception as error:  # a mirror may answer anything at an unknown address
            _log.debug("%s cannot be listed: %r", self, error)

    def siblings(self) -> list[_RemoteFile]:
        """Ask the hub's API for the files of the repository, and return them.

        Raises InvalidInput if the answer is too long, because a server might never end it.
        """
        revision = self.commit or self.revision or "main"
        url = f"{constants.ENDPOINT}/api/models/{self.repo}/revision/{quote(revision, safe='')}?blobs=true"
        answer = bytearray()
        with typed_errors(self), streamed(self, url, {}) as response:
            for chunk in response.iter_raw():
                answer += chunk
                if len(answer) > _MAX_ANSWER:
                    raise InvalidInput(
                        f"{self}: the server's list of files has more than {_MAX_ANSWER:,} bytes", NO_HUB
                    )
        try:
            return msgspec.json.decode(answer, type=_Answer).siblings
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"{self}: the server at HF_ENDPOINT does not list the files of the repository: {error!s:.80}"
            ) from error

    def _has(self, name: str) -> bool:
        if self.files is not None:
            return name in self.files
        return self._cached(name) is not None or self._head(name, self.commit) is not None

    def _head(self, name: str, revision: str | None) -> Any:
        """Ask the hub for the metadata of a file by a HEAD request. Return None if there is no such file."""
        with typed_errors(self):
            try:
                return get_hf_file_metadata(hf_hub_url(self.repo, name, revision=revision))
            except errors.EntryNotFoundError:
                return None

    def cached(self, name: str, revision: str | None = "") -> Path | None:
        """Return the path of a file in the cache, or None if it is not there or incomplete.

        By default it is the file at the repository's commit. `revision` asks for another commit, branch or tag; None
        stands for the default branch.
        """
        path, size = self._cached(name, revision), self.size(name)
        return None if path is None or (size is not None and path.stat().st_size != size) else path

    def _file(self, name: str) -> _RemoteFile:
        return (self.files or {}).get(name) or self.nested.get(name) or _RemoteFile()

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if the hub's list of files does not have it."""
        size = self._file(name).size
        return size if size is not None and size >= 0 else None

    def fetch(self, name: str) -> Path | None:
        """Fetch a file unless it is in the cache, and return its path there.

        Return None if the repository has no such file.
        """
        path = self.cached(name)
        if path is not None or not self.online:
            return path
        # The library assumes that a file in the cache is complete, but here it may be too short.
        broken = self._cached(name) is not None
        with typed_errors(self, name), _short_refusals(self), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it only warns of a full disk; see `require_space`
            try:
                options: dict[str, Any] = {"force_download": broken, "tqdm_class": _counting(self, name)}
                path = Path(hf_hub_download(self.repo, name, revision=self.commit, **options))
            except errors.EntryNotFoundError as error:
                if isinstance(error, errors.LocalEntryNotFoundError):  # this means "no connection"
                    raise
                return None
        self.require_commit(name, path.parents[name.count("/")].name)
        return path

    def require_commit(self, name: str, commit: str) -> None:
        """Raise InvalidInput if the hub returned the file `name` at another `commit` than the requested one."""
        if commit != self.commit:
            raise InvalidInput(
                f"{self}: the hub was asked for {name} at commit {self.commit} but returned it at {commit}",
                "Try again. If the error remains, the server at HF_ENDPOINT is at fault.",
            )

    def folder(self) -> Path:
        """Fetch config.json and return its folder in the cache. Raises NoConfig if there is no config.json."""
        if (path := self.fetch(CONFIG)) is None:
            raise NoConfig(self)
        return path.parent

    def weight_names(self, allow_pickle: bool = False) -> list[str]:
        """Return the names of the weight files that transformers would load. An index comes before its shards.

        `index.weight_files` chooses the same files in a local folder.
        """
        from .index import read_index  # here, because it imports numpy

        not_cached = Offline(f"the weights of {self} are not in the local cache, and {self.why_offline}", WAY_ON)
        # A single file has precedence over shards, and safetensors over pickles.
        kinds = [(SINGLE, INDEX), (PICKLE_SINGLE, PICKLE_INDEX)]
        for single, index in kinds if allow_pickle else kinds[:1]:
            if self._has(single):
                return [single]
            if self._has(index):
                listing = self.fetch(index)
                assert listing is not None
                shards = sorted(set(read_index(listing).values()))
                missing = [name for name in shards if self.files is not None and name not in self.files]
                if missing and self.online:
                    raise CheckpointError(f"{self} does not have {missing[0]}, which its {index} lists")
                if missing:
                    raise not_cached
                return [index, *shards]
        others = [name for name in self.files or () if name.endswith(".safetensors")]
        if len(others) == 1:
            return others
        if not self.online:
            raise not_cached
        hint = "gptkit reads safetensors; look for a converted copy" + (
            "." if allow_pickle else ", or pass --allow-pickle for .bin files that you trust."
        )
        raise CheckpointError(f"{self} has no safetensors weights", hint)

    def require_space(self, names: Collection[str]) -> None:
        """Raise GptkitError unless the disk has space for the files in `names` that are not yet in the cache."""
        if not self.online or self.files is None:
            return
        config = self._cached(CONFIG)
        blobs = None if config is None else config.parent.parent.parent / "blobs"
        needed = 0
        for name in names:
            size, file = self.size(name), self._file(name)
            # If a new commit changed other files only, the cache has these bytes under the blob's name.
            blob = str(file.blobId if file.lfs is None else file.lfs.get("sha256"))
            shared = blobs is not None and _BLOB.fullmatch(blob) is not None and (blobs / blob).exists()
            if size is not None and not shared and self.cached(name) is None:
                needed += size
        folder = Path(constants.HF_HUB_CACHE)
        where = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), folder)
        try:
            free = shutil.disk_usage(where).free
        except OSError:
            return
        if needed > free:
            raise GptkitError(
                f"{self} needs {needed:,} bytes in the Hugging Face cache, but {folder} has only {free:,} bytes free",
                "Make room, or set HF_HOME to a folder on another disk.",
            )

    def record(self) -> None:
        """Record in the cache which commit the branch points to, so that the branch can be used offline."""
        if not self.online or self.revision == self.commit:
            return
        config = self._cached(CONFIG, self.revision)
        if config is not None and config.parent.name == self.commit:
            return
        with suppress(GptkitError), typed_errors(self):
            hf_hub_download(self.repo, CONFIG, revision=self.revision)

    def settle(self, name: str = CONFIG) -> None:
        """Ask the hub for the commit by a HEAD request for the file `name`, and remember the commit.

        Raises InvalidInput if there is no such file.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            self.commit = self.revision
            return
        about = self._head(name, self.revision)
        if about is None:
            raise (
                NoConfig(self)
                if name == CONFIG
                else InvalidInput(f"{self} has no file {name}", "Check the name of the file.")
            )
        commit = about.commit_hash
        if commit is None or not _COMMIT.fullmatch(commit):
            raise Offline(
                f"{self}: the server at HF_ENDPOINT does not say which commit of the repository it has",
                f"Check HF_ENDPOINT, or {_NO_NETWORK}",
            )
        self.commit = commit

    def _cached(self, name: str, revision: str | None = "") -> Path | None:
        """Return the path of a file in the cache, or None. The file may be incomplete. For `revision` see `cached`."""
        try:
            path = try_to_load_from_cache(self.repo, name, revision=self.commit if revision == "" else revision)
        except (OSError, ValueError) as error:  # the library refuses the name, or cannot read the cache
            raise InvalidInput(f"{self}: {error}") from error
        return Path(path) if isinstance(path, str) else None


def _counting(repository: Repository, name: str) -> Any:
    """Return a class of progress bars that raises InvalidInput if the download of the file `name` is too long.

    The hub library updates the progress bar before it writes every piece of the file.
    """
    limit = next((most for ending, most in _MOST.items() if name.endswith(ending)), None)
    most = min((size for size in (repository.size(name), limit) if size is not None), default=None)

    class Counting(_library.tqdm):  # type: ignore[misc]
        taken = 0

        def update(self, n: float | None = 1) -> Any:
            self.taken += int(n or 0)
            if most is not None and self.taken > most:
                raise InvalidInput(
                    f"{repository}: {name} has more than {most:,} bytes, too many for a file of a model",
                    "Check that HF_ENDPOINT is the address of a Hugging Face hub, and that the repository is a model.",
                )
            return super().update(n)

    return Counting


@contextmanager
def _short_refusals(repository: Repository) -> Iterator[None]:
    """Raise an error inside a `with` if the server answers with an HTTP error and a long text.

    Otherwise the hub library would read the text into memory.
    """

    def refuse(response: Any) -> None:
        long = (stated_length(response) or 0) >= _MAX_REFUSAL
        if response.status_code >= 400 and long and response.request.method != "HEAD":
            raise _refused(repository, response.status_code)

    hooks = _library.get_session().event_hooks["response"]
    hooks.append(refuse)
    try:
        yield
    finally:
        hooks.remove(refuse)


@contextmanager
def streamed(repository: Repository, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Send a GET request inside a `with`. Yield the uncompressed response, whose body is not yet read.

    Raises the errors of `typed_errors`.
    """
    with _library.http_stream_backoff(
        "GET",
        url,
        # Without compression, Content-Length is the size of the body.
        headers={**_library.build_hf_headers(), "Accept-Encoding": "identity", **headers},
        timeout=10.0,
        max_retries=2,
        base_wait_time=0.5,
        # Retried by status only, because an exception inside the block would look like one of the request.
        retry_on_exceptions=(),
    ) as response:
        if response.status_code != 416:
            length = stated_length(response)
            if response.status_code >= 400 and (length is None or length >= _MAX_REFUSAL):
                raise _refused(repository, response.status_code)  # the library would read the whole body
            _library.hf_raise_for_status(response)
        yield response


def stated_length(response: Any) -> int | None:
    """Return the Content-Length of a response, or None."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _is_nested(name: str) -> bool:
    """Return whether every part of a path is the plain name of a file or folder."""
    return all(map(is_plain, name.split("/")))


def gather(
    repository: Repository, check: Callable[[Path], object], *, weights: bool, companions: bool, allow_pickle: bool
) -> Path:
    """Fetch the files of a repository, and return their folder in the cache.

    Args:
        repository: the repository.
        check: called with the folder when config.json is there, before any weight is fetched.
        weights: fetch the weights.
        companions: fetch the tokenizer's files and the other files that are copied with the weights.
        allow_pickle: fetch .bin weights if there are no others.
    """
    folder = repository.folder()
    check(folder)
    if weights or companions:
        repository.list_files()
    # If the hub lists nothing, they are requested one by one.
    small: list[str] = []
    if companions:
        listed = None if repository.files is None else travelling([*repository.files, *repository.nested])
        small = [*UNLISTED] if listed is None else [n for n in listed if (repository.size(n) or 0) <= MOST_BYTES]
    if {SINGLE, INDEX} <= (repository.files or {}).keys() and (weights or companions):
        small.append(INDEX)  # some programs write an index for a single file, and a round trip must keep it
    large = repository.weight_names(allow_pickle) if weights else []
    repository.require_space([*small, *large])
    for name in small:
        repository.fetch(name)
    for name in large:
        if repository.fetch(name) is None:
            raise CheckpointError(f"{repository} does not have {name}, which its index lists")
    repository.record()
    return folder


def offline_by_environment() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbid the network."""
    # Read on every call. The hub library reads it only on import.
    values = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return any(value is not None and value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


@contextmanager
def typed_errors(repository: Repository, fetching: str | None = None) -> Iterator[None]:
    """Convert errors of the hub library and the network inside a `with` to gptkit's errors.

    `fetching` is the name of the file that is fetched, for messages, or None.
    """
    # The base class of the HTTP library's errors. The hub library has changed its HTTP library twice.
    transport = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
    repo = repository.repo
    try:
        yield
    except GptkitError:
        raise
    except errors.GatedRepoError as error:
        raise InvalidInput(
            f"{repo} is gated: its authors grant access on request",
            f"Ask for access at https://huggingface.co/{repo}, then log in: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(
            f"{repo} has no revision {repository.revision}",
            "Give a branch, a tag or a full commit, as in org/name@main.",
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise CheckpointError(f"{repository} has no {fetching or CONFIG}") from error
    except errors.HFValidationError as error:
        raise InvalidInput(
            f"{repository} is not the name of a model", "Give org/name, a folder, or a sample such as sample:gpt2."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(repository, error.response.status_code, str(error), error.server_message) from error
    except (transport, OSError, RuntimeError, errors.XetDownloadError) as error:
        if isinstance(error, OSError) and (error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)):
            raise GptkitError(
                f"could not write {repository} to the Hugging Face cache: {error.strerror}",
                "Set HF_HOME to a folder on another disk.",
            ) from error
        answer = error.__cause__
        if isinstance(answer, errors.HfHubHTTPError):  # all retries failed
            raise _refused(repository, answer.response.status_code, str(answer), answer.server_message) from error
        if fetching is not None and not isinstance(error, errors.LocalEntryNotFoundError):
            raise Offline(
                f"the download of {fetching} from {repository} was interrupted: {_reason(error)}",
                "Complete files are kept, and the same command continues from there.",
            ) from error
        raise Offline(f"{repository} is not in the local cache, and the hub could not be reached", WAY_ON) from error
    except ValueError as error:  # a file of more than 50 GB, for which the library needs another package
        raise InvalidInput(f"{repository}: cannot download {fetching or 'it'}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{next(iter(str(error).strip().splitlines()), '') or type(error).__name__:.200}"


def _refused(repository: Repository, status: int, text: str = "", reason: str | None = None) -> GptkitError:
    """Return the error for an HTTP error `status` of the hub. `text` and `reason` are the hub's explanations."""
    if status >= 500 or status in (408, 429):
        return Offline(
            f"{repository}: the hub answered with the HTTP status {status}", f"Try again later, or {_NO_NETWORK}"
        )
    # The hub answers 401 for absent and for private repositories; only a bad token is different.
    unknown = status == 401 and "invalid credentials" not in text.lower()
    if unknown or status == 404:
        return NoModel(
            f"there is no model {repository.repo} on the hub, or it is private",
            "Check the name. For a private model, log in first: hf auth login",
        )
    why = f"{status} {' '.join((reason or '').split()):.200}".strip()
    return InvalidInput(
        f"{repository}: the hub refused the request ({why})", "Check the name and your token (`hf auth whoami`)."
    )
