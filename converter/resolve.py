"""What a model reference means: a sample of the package, a local folder or file, a repository on the Hugging Face hub.

    sample:gpt2                         a small checkpoint that comes with gptkit
    ./folder   model.safetensors        a local path that exists
    llama-3-8b                          a preset's alias, for the repository it stands for
    org/name   org/name@rev   hf://…    a repository, at its main branch or at a branch, tag or commit

Of a repository only config.json, safetensors weights and the tokenizer's files are fetched, and only what the local
cache lacks of them at the commit that the branch is at now. Where the hub cannot be asked, the cache's commit is taken,
and a note says so. What it takes to talk to the hub is in `hub`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import CheckpointError, InvalidInput, Offline

if TYPE_CHECKING:
    from .hub import Repository

__all__ = [
    "POINTER",
    "NoConfig",
    "NoModel",
    "Resolved",
    "exists",
    "is_pointer",
    "offline_by_environment",
    "pointer",
    "refuse_pointer",
    "resolve",
]

# The names of a checkpoint's files; index.py reads what lies in them.
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

SAMPLES = ("gpt2", "llama", "bloom", "falcon")
SAMPLES_DIR = Path(__file__).parent.parent / "samples"

_FILE_SUFFIXES = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")


POINTER = b"version https://git-lfs"
"""How the small text begins that git leaves in a file's place where git-lfs did not fetch it."""


def pointer(where: Path | str) -> CheckpointError:
    """The error for such a text in a weight file's place, to be raised by the caller."""
    return CheckpointError(f"{where} is a git-lfs pointer, not the file itself", "Fetch the file with `git lfs pull`.")


def is_pointer(path: Path) -> bool:
    """Whether a file is such a text; False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except (OSError, ValueError):
        return False


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError where a weight file is a git-lfs pointer: before anybody is asked to trust it."""
    if path.is_file() and is_pointer(path):
        raise pointer(path)


class NoConfig(InvalidInput):
    """A repository without config.json, which may hold another kind of file."""

    def __init__(self, where: str, repo: str, revision: str | None) -> None:
        super().__init__(
            f"{where} has no config.json",
            "It may hold a GGUF, of which gptkit params tells the tree, or an adapter: gptkit swap BASE OUT"
            f" --merge-lora {repo}",
        )
        self.repo, self.revision = repo, revision


class NoModel(InvalidInput):
    """The hub knows no model of that name, or does not show it."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference stands for: the local folder or file, and for a hub repository the commit it was taken from.

    `notes` are for a person; `repository` is what was resolved on the hub, to ask more of.
    """

    ref: str
    path: Path
    revision: str | None
    kind: Literal["sample", "path", "hub"]
    notes: tuple[str, ...] = field(default=(), compare=False)
    repository: Repository | None = field(default=None, compare=False, repr=False)


def resolve(
    ref: str,
    *,
    offline: bool = False,
    weights: bool = True,
    companions: bool | None = None,
    allow_pickle: bool = False,
    cache: Path | None = None,
    repo_of: Callable[[str], str | None] | None = None,
    check: Callable[[Path], object] | None = None,
) -> Resolved:
    """Resolve a reference, fetching what the cache lacks.

    `weights=False` is content with config.json, and with `companions` the tokenizer's files beside it. `allow_pickle`
    also fetches .bin weights, from a repository without safetensors. `cache` is the hub cache's folder (None: the hub
    library's own). `repo_of` gives the repository of a preset's alias, or None. `check` gets a repository's folder when
    config.json is in it and no weight yet: what it raises costs no download.

    Raises InvalidInput for a reference that means nothing, or a repository, revision or file that is not there or not
    for this user; Offline where the network is needed and missing or forbidden (`offline`, HF_HUB_OFFLINE=1), or breaks
    off; GptkitError where the cache's disk is too small.
    """
    if not ref.strip() or not ref.isprintable():
        raise InvalidInput(f"not a model reference: {ref!r}", "Give org/name, a folder, or sample:gpt2.")
    if ref.startswith("sample:"):
        return Resolved(ref, _sample(ref.removeprefix("sample:")), None, "sample")
    if not ref.startswith("hf://"):
        path = Path(os.path.expanduser(ref))  # noqa: PTH111, because Path's own raises for an unknown user
        if exists(path):
            shadowed = repo_of(ref) if repo_of is not None else None
            notes = (
                () if shadowed is None else (f"{ref} is a local path here; the model of that name is hf://{shadowed}",)
            )
            return Resolved(ref, path, None, "path", notes)
    name, revision = _parse(ref)
    repo = (repo_of(name) if repo_of is not None else None) or name
    plain = "/" not in repo and not ref.startswith("hf://")
    if plain and repo_of is not None:
        _refuse_typo(name)
    from .hub import Repository, gather

    def have(repository: Repository) -> Path:
        beside = weights if companions is None else companions
        return gather(repository, weights=weights, companions=beside, allow_pickle=allow_pickle, check=check)

    try:
        repository = Repository.open(repo, revision, offline=offline or offline_by_environment(), cache=cache)
    except (Offline, NoModel) as error:
        if plain:
            raise _called_nothing(name, error) from error
        if isinstance(error, Offline):
            _refuse_path(name, error)
        raise
    try:
        folder = have(repository)
    except Offline as error:
        try:
            # At the same commit: an older one in the cache is something else than what was asked for.
            repository = repository.as_cached()
            folder = have(repository)
        except (Offline, InvalidInput):
            raise error from None
    return Resolved(ref, folder, repository.commit, "hub", tuple(repository.notes), repository)


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


def _refuse_path(name: str, error: Offline) -> None:
    """Raise InvalidInput where the name was probably meant for a path: its first part is a folder here."""
    first, slash, _ = name.partition("/")
    if slash and Path(first).is_dir():
        inside = sorted(entry.name for entry in Path(first).iterdir() if entry.name.isprintable())
        some = ", ".join(inside[:4]) + (", …" if len(inside) > 4 else "") if inside else "nothing"
        raise InvalidInput(
            f"no such file or folder: {name}",
            f"The folder {first} is here, and in it {some}. As a repository of the hub: {error.message}.",
        ) from error


def _refuse_typo(name: str) -> None:
    """Raise InvalidInput where a name without an organisation resembles a preset's, or is that of one without weights.

    The hub is not asked: the few models that it has without an organisation are presets, or of no family here.
    """
    from ..architectures.presets import find, nearest

    if find(name) is not None:
        raise InvalidInput(
            f"the preset {name} is a config alone: its weights were not published",
            f"gptkit load --random {name} draws some; params, compare and show need none.",
        )
    near = nearest(name)
    if near:
        raise InvalidInput(
            f"no preset, file or folder is called {name!r}",
            f"did you mean {', '.join(near[:4])}? A hub repository is written org/name.",
        )


def _called_nothing(name: str, error: Offline | NoModel) -> InvalidInput:
    """The error for a name without an organisation that the hub does not know, or could not be asked for."""
    also = "" if isinstance(error, Offline) else ", nor a model on the hub"
    return InvalidInput(
        f"no preset, file or folder is called {name!r}{also}",
        "gptkit presets lists the presets; a hub repository is written org/name.",
    )


def _parse(ref: str) -> tuple[str, str | None]:
    """Split a reference that is no local path into repository and revision (None: the default branch)."""
    if ref.startswith(("http://", "https://")):
        raise InvalidInput(f"{ref} is a web address", "Give the repository as org/name, or org/name@revision.")
    name, at, revision = ref.removeprefix("hf://").partition("@")
    name = name.rstrip("/") if ref.startswith("hf://") else name
    slashes = name.count("/")
    if slashes > 1 or name.startswith((".", "/", "~")) or name.endswith((*_FILE_SUFFIXES, "/")) or "\\" in name:
        # A file of a repository is named with its hub, so that no path is ever looked for there.
        within = slashes == 2 and name.endswith(".gguf") and not name.startswith((".", "/", "~"))
        file = f"; a GGUF there hf://{name}, of which params tells the tree" if within else ""
        raise InvalidInput(
            f"no such file or folder: {ref}", f"A model on the hub is named org/name or org/name@revision{file}."
        )
    # The hub library makes file names out of both parts, so they get no chance to lead anywhere else.
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or any(sign in name for sign in " :*?<>|"):
        raise InvalidInput(f"not a model reference: {ref}", "Give org/name, a folder, or sample:gpt2.")
    if at and (not revision or any(part in ("", ".", "..") for part in revision.split("/")) or "\\" in revision):
        raise InvalidInput(f"not a revision: {revision!r}", "Give a branch, a tag or a commit, as in org/name@main.")
    return name, revision or None


def offline_by_environment() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbid the network."""
    # Read on each call, unlike the hub library, which reads it once on import.
    values = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return any(value is not None and value.upper() in ("1", "ON", "YES", "TRUE") for value in values)
