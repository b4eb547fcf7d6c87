"""What a model reference means: a sample of the package, a local folder or file, a repository on the Hugging Face hub.

    sample:gpt2                         a small checkpoint that comes with gptkit
    ./folder   model.safetensors        a local path that exists
    llama-3-8b                          a preset's alias, for the repository it stands for
    org/name   org/name@rev   hf://…    a repository, at its main branch or at a branch, tag or commit

Of a repository only config.json, safetensors weights and the tokenizer's files are fetched: from the local cache where
it holds them all, else from the hub.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ..errors import CheckpointError, GptkitError, InvalidInput, Offline

__all__ = ["Resolved", "exists", "resolve"]

_log = logging.getLogger(__name__)

# The names of a checkpoint's files; index.py reads what lies in them.
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

SAMPLES = ("gpt2", "llama", "bloom", "falcon")
SAMPLES_DIR = Path(__file__).parent.parent / "samples"

# Fetched beside the weights where the repository has them, so that a converted folder can tokenize and generate.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "spiece.model",
    "tekken.json",
    "LICENSE",
)
_FILE_SUFFIXES = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
_WAY_ON = "Go online, name a local folder, or try one that needs no network: sample:gpt2, sample:llama."


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference stands for: the local folder or file, and for a hub repository the commit it was taken from."""

    ref: str
    path: Path
    revision: str | None
    kind: Literal["sample", "path", "hub"]


def resolve(
    ref: str,
    *,
    offline: bool = False,
    weights: bool = True,
    allow_pickle: bool = False,
    cache: Path | None = None,
    repo_of: Callable[[str], str | None] | None = None,
) -> Resolved:
    """Resolve a reference, fetching what the cache lacks.

    `weights=False` is content with config.json. `allow_pickle` also fetches .bin weights, from a repository without
    safetensors. `cache` is the hub cache's folder (None: the hub library's own). `repo_of` gives the repository of a
    preset's alias, or None.

    Raises InvalidInput for a reference that means nothing, or a repository, revision or file that is not there or not
    for this user; Offline where the network is needed and missing or forbidden (`offline`, HF_HUB_OFFLINE=1).
    """
    if not ref.strip() or not ref.isprintable():
        raise InvalidInput(f"not a model reference: {ref!r}", "Give org/name, a folder, or sample:gpt2.")
    if ref.startswith("sample:"):
        return Resolved(ref, _sample(ref.removeprefix("sample:")), None, "sample")
    if not ref.startswith("hf://"):
        path = Path(os.path.expanduser(ref))  # noqa: PTH111, because Path's own raises for an unknown user
        if exists(path):
            return Resolved(ref, path, None, "path")
    repo, revision = _parse(ref)
    repo = (repo_of(repo) if repo_of is not None else None) or repo
    hub = _Hub(repo, revision, weights, allow_pickle, cache)
    config = hub.fetch_offline() if offline or _offline_by_environment() else hub.fetch()
    return Resolved(ref, config.parent, config.parent.name, "hub")  # the cache names a snapshot's folder by its commit


def _sample(name: str) -> Path:
    if name not in SAMPLES:
        raise InvalidInput(
            f"no such sample: {name!r}", f"There are {', '.join(f'sample:{known}' for known in SAMPLES)}."
        )
    path = SAMPLES_DIR / name
    if not path.is_dir():
        raise InvalidInput(
            f"the sample {name} is not part of this installation ({path} is missing)", "Reinstall gptkit."
        )
    return path


def exists(path: Path) -> bool:
    """Whether a local file or folder is there; raises InvalidInput where that cannot be told, or it is neither."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise InvalidInput(f"{path} is neither a file nor a folder")
    return True


def _parse(ref: str) -> tuple[str, str | None]:
    """Split a reference that is no local path into repository and revision (None: the default branch)."""
    if ref.startswith(("http://", "https://")):
        raise InvalidInput(f"{ref} is a web address", "Give the repository as org/name, or org/name@revision.")
    name, at, revision = ref.removeprefix("hf://").partition("@")
    name = name.rstrip("/") if ref.startswith("hf://") else name
    slashes = name.count("/")
    if slashes > 1 or name.startswith((".", "/", "~")) or name.endswith((*_FILE_SUFFIXES, "/")) or "\\" in name:
        raise InvalidInput(
            f"no such file or folder: {ref}", "A model on the hub is named org/name or org/name@revision."
        )
    # The hub library makes file names out of both parts, so they get no chance to lead anywhere else.
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or any(sign in name for sign in " :*?<>|"):
        raise InvalidInput(f"not a model reference: {ref}", "Give org/name, a folder, or sample:gpt2.")
    if at and (not revision or any(part in ("", ".", "..") for part in revision.split("/")) or "\\" in revision):
        raise InvalidInput(f"not a revision: {revision!r}", "Give a branch, a tag or a commit, as in org/name@main.")
    return name, revision or None


def _offline_by_environment() -> bool:
    # Read on each call, unlike the hub library, which reads it once on import.
    values = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return any(value is not None and value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


class _NotCachedError(Exception):
    """The cache cannot tell whether the repository has a file."""


# Gives a file of the repository by its name, or None where the repository has no such file.
_Get = Callable[[str], Path | None]


@dataclass(frozen=True, slots=True)
class _Hub:
    """What to have of one repository at one revision (None: its default branch)."""

    repo: str
    revision: str | None
    weights: bool
    allow_pickle: bool
    cache: Path | None

    def fetch(self) -> Path:
        """The local config.json, with everything wanted beside it: from the cache if it has all, else from the hub."""
        try:
            return self._gather(self._cached)
        except (_NotCachedError, InvalidInput) as reason:
            # InvalidInput too: what the cache remembers as missing or bad may have been added or mended since.
            _log.debug("not all of %s is cached: %r", self, reason)
        try:
            return self._gather(self._downloader())
        except Offline as error:
            try:
                return self._gather(self._cached_or_absent)
            except (_NotCachedError, InvalidInput):
                raise error from None

    def fetch_offline(self) -> Path:
        """The same, from the cache alone."""
        try:
            return self._gather(self._cached_or_absent)
        except _NotCachedError as missing:
            what = f"{self} is" if str(missing) == CONFIG else f"the weights of {self} are"
            raise Offline(f"{what} not in the local cache, and the network is off limits", _WAY_ON) from None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    def _gather(self, get: _Get) -> Path:
        config = get(CONFIG)
        if config is None:
            raise InvalidInput(f"{self} has no config.json", "It may hold another kind of file (GGUF, an adapter).")
        if self.weights:
            self._gather_weights(get)
            for name in _COMPANIONS:
                get(name)
        return config

    def _gather_weights(self, get: _Get) -> None:
        from .index import read_index  # here, because it imports numpy

        # In transformers' order, which weight_files follows as well: one file, then shards, and pickles after both.
        kinds = [(SINGLE, INDEX), (PICKLE_SINGLE, PICKLE_INDEX)]
        for single, index in kinds if self.allow_pickle else kinds[:1]:
            if get(single) is not None:
                return
            listing = get(index)
            if listing is not None:
                missing = [name for name in sorted(set(read_index(listing).values())) if get(name) is None]
                if missing:
                    raise CheckpointError(f"{self} lacks {missing[0]}, which its {index} names")
                return
        hint = "gptkit reads safetensors; look for a converted copy" + (
            "." if self.allow_pickle else ", or pass --allow-pickle for .bin files that you trust."
        )
        raise CheckpointError(f"{self} has no safetensors weights", hint)

    def _cached(self, name: str, revision: str | None = None) -> Path | None:
        """Raises _NotCachedError where the cache cannot tell."""
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(self.repo, name, self.cache, revision or self.revision)
        except (OSError, ValueError) as error:  # a name the library refuses, a cache that cannot be read
            raise InvalidInput(f"{self}: {error}") from error
        if found is None:
            raise _NotCachedError(name)
        return Path(found) if isinstance(found, str) else None

    def _cached_or_absent(self, name: str) -> Path | None:
        """As _cached, but of what may be absent, what the cache does not hold counts as absent."""
        optional = (*_COMPANIONS, SINGLE, INDEX, PICKLE_SINGLE) if self.allow_pickle else (*_COMPANIONS, SINGLE)
        try:
            return self._cached(name)
        except _NotCachedError:
            if name in optional:
                return None
            raise

    def _downloader(self) -> _Get:
        """Gets files from the hub, all at the commit that the first one was found at."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        commit: str | None = None

        def get(name: str) -> Path | None:
            nonlocal commit
            try:
                if commit is not None:
                    return self._cached(name, commit)
            except _NotCachedError:
                _log.debug("fetching %s of %s", name, self)
            with _typed_errors(self):
                try:
                    if commit is None:
                        # Asked first: a download of what is not cached tries an unreachable hub for half a minute.
                        get_hf_file_metadata(hf_hub_url(self.repo, name, revision=self.revision))
                    path = Path(
                        hf_hub_download(self.repo, name, revision=commit or self.revision, cache_dir=self.cache)
                    )
                except EntryNotFoundError as error:
                    if isinstance(error, LocalEntryNotFoundError):  # "no connection", in spite of its name
                        raise
                    return None
            commit = path.parent.name
            return path

        return get


@contextmanager
def _typed_errors(hub: _Hub) -> Iterator[None]:
    """Turn what the hub library and the network raise into gptkit's errors."""
    from huggingface_hub import errors

    # The base of the HTTP library's errors, connection failures included; the hub has changed that library twice.
    transport = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
    try:
        yield
    except errors.GatedRepoError as error:
        raise InvalidInput(
            f"{hub.repo} is gated: its authors grant access on request",
            f"Ask at https://huggingface.co/{hub.repo}, then log in with `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(
            f"{hub.repo} has no revision {hub.revision}", "Give a branch, a tag or a full commit, as in org/name@main."
        ) from error
    except errors.HFValidationError as error:
        raise InvalidInput(f"not a model reference: {hub}", "Give org/name, a folder, or sample:gpt2.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status in (408, 429):
            raise Offline(f"{hub}: the hub answered {status}, try again later", _WAY_ON) from error
        # The hub answers 401 where a repository may be absent or private; only a bad token is told apart.
        unknown = status == 401 and "invalid credentials" not in str(error).lower()
        if unknown or status == 404:
            raise InvalidInput(
                f"there is no model {hub.repo} on the hub, or it is private",
                "Check the name; for a private model log in with `hf auth login`.",
            ) from error
        raise InvalidInput(
            f"{hub}: the hub refused ({status} {error.server_message or ''})".replace(" )", ")"),
            "Check the name and your token (`hf auth whoami`).",
        ) from error
    except (transport, OSError, RuntimeError, errors.XetDownloadError) as error:
        if isinstance(error, OSError) and (error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)):
            raise GptkitError(
                f"could not write {hub} to the cache: {error.strerror}", "Set HF_HOME to another disk."
            ) from error
        raise Offline(f"{hub} is not in the local cache, and the hub could not be reached", _WAY_ON) from error
