"""Identify a model reference (`identify`), and fetch its files from the hub if necessary (`resolve`).

    sample:gpt2                         a small checkpoint that comes with gptkit
    ./folder   model.safetensors        a local path that exists
    llama-3-8b                          a preset: a config, and the repository that its weights are in
    org/name   org/name@rev   hf://…    a repository, at its main branch or at a branch, tag or commit
    hf://org/name/FILE.gguf             a GGUF in a repository, from whose header the tree is read

The names of the files in a folder show its format: Hugging Face's, gptkit's own, or another one. From a repository,
gptkit fetches only config.json, safetensors weights, the tokenizer's files and similar small files, unless the cache
has them at the current commit of the branch. If the hub cannot be reached, gptkit uses the commit in the cache, and a
note says so. The module `hub` sends all requests to the hub.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from ..architectures.config import quantisation
from ..architectures.presets import Preset, find, nearest, repo_of
from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import InvalidInput, Offline
from .formats import Format, format_named
from .names import CONFIG, LOCAL_CONFIG, listing
from .targets import FORMATS, READ_ONLY
from .tree import Origin, holds_tree, read_description

if TYPE_CHECKING:
    from .hub import Repository

SAMPLES = ("gpt2", "llama", "bloom", "falcon")
SAMPLES_DIR = Path(__file__).parent.parent / "samples"

_FILE_SUFFIXES = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
_HUB_GGUF = re.compile(r"hf://(?P<repo>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>[^/\s]+))?/(?P<file>[^\s\\]+\.gguf)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model reference: how the user named a model, and what is known about it."""

    text: str
    """The text that the user gave."""
    kind: Literal["sample", "preset", "path", "hub", "hub file"]
    """What the text names. A "hub file" is a GGUF in a repository."""
    path: Path | None = None
    """The local folder or file. For a repository it is None until `resolve` has fetched the files."""
    format: str | None = None
    """ "hf" (Hugging Face), "local" (gptkit's own), "tree" (gptkit's own without weights), or a name in `formats`."""
    source: Path | None = field(default=None, compare=False)
    """The file or folder from which the tree of components is read, such as config.json."""
    names: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """The names of the folder's files; None for a single file."""
    preset: Preset | None = field(default=None, compare=False)
    repo: str | None = None  # the name of the repository, org/name
    revision: str | None = None  # the revision in the text; the commit, once `resolve` has asked for it
    file: str | None = None  # the path of a "hub file" in its repository
    notes: tuple[str, ...] = field(default=(), compare=False)
    repository: Repository | None = field(default=None, compare=False, repr=False)

    @property
    def other(self) -> Format | None:
        """Return the module that reads the format, or None for the formats of Hugging Face and gptkit."""
        return format_named(self.format) if self.format in FORMATS else None

    @property
    def is_own(self) -> bool:
        """Return whether this is gptkit's own format: a gptkit.json with the tree, and gptkit's own tensor names."""
        return self.format in ("local", "tree")


def identify(reference: str | Path | Reference) -> Reference:
    """Find out what a model reference names, by its text and local files, without network. Raises InvalidInput."""
    if isinstance(reference, Reference):
        return reference
    text = str(reference)
    if not text.strip() or not text.isprintable():
        raise InvalidInput(
            f"{text!r} is not the name of a model", "Give org/name, a folder, or a sample such as sample:gpt2."
        )
    if text.startswith("sample:"):
        name = text.removeprefix("sample:")
        if name not in SAMPLES:
            known = ", ".join(f"sample:{sample}" for sample in SAMPLES)
            raise InvalidInput(f"no such sample: {name!r}", f"The samples are {known}.")
        try:
            return located(SAMPLES_DIR / name, text, "sample")
        except FileNotFoundError:
            raise InvalidInput(
                f"the sample {name} is not part of this installation ({SAMPLES_DIR / name} is missing)",
                "Reinstall gptkit.",
            ) from None
    if not text.startswith("hf://"):
        local = _here(text)
        if local is not None:
            return local
        preset = find(text)
        if preset is not None:
            return Reference(text, "preset", preset=preset, repo=preset.repo)
    hub_file = _HUB_GGUF.fullmatch(text)
    if hub_file is not None:
        return Reference(text, "hub file", repo=hub_file["repo"], revision=hub_file["revision"], file=hub_file["file"])
    name, revision = _parse(text)
    repo = repo_of(name) or name
    if "/" not in repo and not text.startswith("hf://"):
        # A name that resembles a preset's: the hub has few without an organisation, and none of a family here.
        if find(name) is not None:
            raise _config_alone(name)
        if near := nearest(name):
            raise InvalidInput(
                f"no preset, file or folder is called {name!r}",
                f"Did you mean {', '.join(near[:4])}? A repository on the hub is written org/name.",
            )
    return Reference(text, "hub", repo=repo, revision=revision)


def located(path: Path, text: str | None = None, kind: Literal["sample", "path", "hub"] = "path") -> Reference:
    """Return the model reference for a local file or folder, with the format of its files.

    `text` is the text that the user gave, by default the path. Raises OSError if the path cannot be read, and
    InvalidInput if it is a pipe or device.
    """
    names = listing(path)
    reference = partial(Reference, str(path) if text is None else text, kind, path, names=names)
    if names is None and path.suffix == ".json":
        return reference("local" if path.name == LOCAL_CONFIG else "tree" if holds_tree(path) else "hf", path)
    folder = path if names is not None else path.parent
    has_own_config = LOCAL_CONFIG in names if names is not None else (folder / LOCAL_CONFIG).is_file()
    # Torch's distributed folders, and those of other training programs, may have a config.json too.
    has_config = names is not None and (has_own_config or CONFIG in names)
    format_names = (
        () if names is None and path.suffix == ".safetensors" else ("dcp", READ_ONLY) if has_config else tuple(FORMATS)
    )
    for name in format_names:
        finds = format_named(name).finds
        if finds is not None and (source := finds(path, names)) is not None:
            return reference(name, source)
    return reference("local", folder / LOCAL_CONFIG) if has_own_config else reference("hf", folder / CONFIG)


def read_spec(where: Reference | Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Read the config of a model. Return its tree of components, the origin of the tree, and the unknown config fields.

    `where` is the model: a local path, or a reference whose files are on this machine.

    Raises InvalidInput; UntrustedInput if this needs a pickle.
    """
    resolved = located(where) if isinstance(where, Path) else where
    assert resolved.path is not None and resolved.source is not None
    if resolved.other is not None:
        assert resolved.other.describe is not None
        return resolved.other.describe(resolved.source)
    return read_description(resolved.source, resolved.path, folder=resolved.names is not None)


def quantised(reference: Reference, origin: Origin) -> tuple[str, str | None] | None:
    """Return how the weights are quantised, according to config.json, or None if they are not quantised.

    Returns:
        The method in words ("gptq, 4 bits, groups of 128"), and the command that dequantises the weights, or None if
        gptkit knows no such command.
    """
    return None if reference.is_own else quantisation(origin.config)


def resolve(
    reference: str | Path | Reference,
    *,
    offline: bool = False,
    weights: bool = True,
    companions: bool | None = None,
    allow_pickle: bool = False,
    check: Callable[[Reference], object] | None = None,
) -> Reference:
    """Find the files of a model, and fetch those that are neither local nor in the cache.

    Args:
        reference: the model.
        offline: use local files and the hub's cache only.
        weights: fetch the weights.
        companions: fetch the tokenizer's files; by default if `weights` are fetched.
        allow_pickle: fetch .bin weights if there are no others.
        check: called with the reference of the repository's local folder before any weight is fetched.

    Raises:
        InvalidInput: there is no such model. Offline: the network is needed and fails. GptkitError: the disk of the
            cache is too small.
    """
    identified = identify(reference)
    if identified.path is not None:
        return identified
    if identified.kind == "hub file":
        _refuse_name(identified.text, f"{identified.repo}/{identified.file}")
    if identified.repo is None:
        raise _config_alone(identified.text)
    from .hub import NoModel, Repository, gather, offline_by_environment

    def fetch(repository: Repository) -> Path:
        with_companions = weights if companions is None else companions
        checked = (
            (lambda folder: None) if check is None else (lambda folder: check(located(folder, identified.text, "hub")))
        )
        return gather(repository, checked, weights=weights, companions=with_companions, allow_pickle=allow_pickle)

    try:
        repository = Repository.open(identified.repo, identified.revision, offline=offline or offline_by_environment())
    except (Offline, NoModel) as error:
        name = identified.text.partition("@")[0]
        if "/" not in identified.repo and not name.startswith("hf://"):
            no_model = ", nor a model on the hub" if isinstance(error, NoModel) else ""
            raise InvalidInput(
                f"no preset, file or folder is called {name!r}{no_model}",
                "Run gptkit presets to list all presets. A repository on the hub is written org/name.",
            ) from error
        if isinstance(error, Offline):
            _refuse_path(name.removeprefix("hf://"), error)
        raise
    try:
        folder = fetch(repository)
    except Offline as error:
        try:
            # Only at the same commit: an older one in the cache is a different model.
            repository = repository.as_cached()
            folder = fetch(repository)
        except (Offline, InvalidInput):
            raise error from None
    resolved, notes = located(folder, identified.text, "hub"), tuple(repository.notes)
    return replace(resolved, repo=identified.repo, revision=repository.commit, notes=notes, repository=repository)


def _here(text: str) -> Reference | None:
    """Return the model reference for the local path `text`, or None if there is no such path."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111, because Path's own raises for an unknown user
    try:
        resolved = located(path, text)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    if repo := repo_of(text):
        return replace(resolved, notes=(f"{text} is a local path here; the model of that name is hf://{repo}",))
    return resolved


def _refuse_path(name: str, error: Offline) -> None:
    """Raise InvalidInput if the name was probably meant as a path, because its first part is a local folder."""
    first, slash, _ = name.partition("/")
    if slash and Path(first).is_dir():
        inside = sorted(entry.name for entry in Path(first).iterdir() if entry.name.isprintable())
        some = some_of(inside, 4, ", …") or "nothing"
        raise InvalidInput(
            f"no such file or folder: {name}",
            f"The local folder {first} contains {some}. gptkit also looked on the hub: {error.message}.",
        ) from error


def _config_alone(name: str) -> InvalidInput:
    return InvalidInput(
        f"the preset {name} has only a config: its weights were not published",
        f"Use random weights: gptkit load --random {name}. The commands params, compare and show need no weights.",
    )


def _refuse_name(text: str, within: str | None = None) -> NoReturn:
    """Raise InvalidInput for a path that does not exist. The hint suggests hf://WITHIN if `within` is given."""
    file = "" if within is None else f"; for a GGUF there, hf://{within} (gptkit params can read it)"
    raise InvalidInput(
        f"no such file or folder: {text}", f"A model on the hub is named org/name or org/name@revision{file}."
    )


def _parse(text: str) -> tuple[str, str | None]:
    """Split the text of a reference, org/name@revision, into repository and revision (None for the default branch).

    Raises InvalidInput if the text is not such a name.
    """
    if text.startswith(("http://", "https://")):
        raise InvalidInput(f"{text} is a web address", "Give the repository as org/name, or org/name@revision.")
    name, at, revision = text.removeprefix("hf://").partition("@")
    name = name.rstrip("/") if text.startswith("hf://") else name
    slashes = name.count("/")
    path = name.startswith((".", "/", "~"))
    if slashes > 1 or path or name.endswith((*_FILE_SUFFIXES, "/")) or "\\" in name:
        # A file of a repository is named with its hub, so that no path is ever looked for there.
        _refuse_name(text, name if slashes == 2 and name.endswith(".gguf") and not path else None)
    # The hub library makes file names out of both parts, so they get no chance to lead anywhere else.
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or any(sign in name for sign in " :*?<>|"):
        raise InvalidInput(
            f"{text} is not the name of a model", "Give org/name, a folder, or a sample such as sample:gpt2."
        )
    if at and (not revision or any(part in ("", ".", "..") for part in revision.split("/")) or "\\" in revision):
        raise InvalidInput(
            f"{revision!r} is not the name of a revision", "Give a branch, a tag or a commit, as in org/name@main."
        )
    return name, revision or None
