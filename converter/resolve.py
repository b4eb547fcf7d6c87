"""What a model reference is, found once (`identify`) and handed on; and its files, had from the hub (`resolve`).

    sample:gpt2                         a small checkpoint that comes with gptkit
    ./folder   model.safetensors        a local path that exists
    llama-3-8b                          a preset: a config, and the repository that its weights are in
    org/name   org/name@rev   hf://…    a repository, at its main branch or at a branch, tag or commit
    hf://org/name/FILE.gguf             a file in one, of which the tree is told

What lies at a local path (a Hugging Face folder, gptkit's own, a tree by itself, a file of another format) is told from
one listing of the folder. Of a repository only config.json, safetensors weights and the tokenizer's files are fetched,
and only what the local cache lacks of them at the commit that the branch is at now. Where the hub cannot be asked, the
cache's commit is taken, and a note says so. What it takes to talk to the hub is in `hub`.
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
    """What a reference is: the text as it was given, and its kind.

    path: the local folder or file, once `resolve` has fetched it. format: what lies there, Hugging Face's ("hf"),
    gptkit's own ("local"), a tree by itself ("tree"), or a name of `formats`. source: the file or folder that says the
    tree. names: of a folder's files. repo, revision, file: where it is on the hub; the revision is the commit once it
    is resolved. notes: for a person. repository: what was resolved on the hub, to ask more of.
    """

    text: str
    kind: Literal["sample", "preset", "path", "hub", "hub file"]
    path: Path | None = None
    format: str | None = None
    source: Path | None = field(default=None, compare=False)
    names: frozenset[str] | None = field(default=None, compare=False, repr=False)
    preset: Preset | None = field(default=None, compare=False)
    repo: str | None = None
    revision: str | None = None
    file: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    repository: Repository | None = field(default=None, compare=False, repr=False)

    @property
    def other(self) -> Format | None:
        """The module of a format that is neither Hugging Face's nor gptkit's own."""
        return format_named(self.format) if self.format in FORMATS else None

    @property
    def is_own(self) -> bool:
        """Whether the tree is in gptkit's own format, and the weights have shared names."""
        return self.format in ("local", "tree")


def identify(reference: str | Path | Reference) -> Reference:
    """What a reference is, from its text and the local files alone. Raises InvalidInput for one that means nothing."""
    if isinstance(reference, Reference):
        return reference
    text = str(reference)
    if not text.strip() or not text.isprintable():
        raise InvalidInput(f"not a model reference: {text!r}", "Give org/name, a folder, or sample:gpt2.")
    if text.startswith("sample:"):
        name = text.removeprefix("sample:")
        if name not in SAMPLES:
            known = ", ".join(f"sample:{sample}" for sample in SAMPLES)
            raise InvalidInput(f"no such sample: {name!r}", f"There are {known}.")
        try:
            return located(SAMPLES_DIR / name, text, "sample")
        except FileNotFoundError:
            lacking = f"the sample {name} is not part of this installation ({SAMPLES_DIR / name} is missing)"
            raise InvalidInput(lacking, "Reinstall gptkit.") from None
    if not text.startswith("hf://"):
        here = _here(text)
        if here is not None:
            return here
        preset = find(text)
        if preset is not None:
            return Reference(text, "preset", preset=preset, repo=preset.repo)
    inside = _HUB_GGUF.fullmatch(text)
    if inside is not None:
        return Reference(text, "hub file", repo=inside["repo"], revision=inside["revision"], file=inside["file"])
    name, revision = _parse(text)
    repo = repo_of(name) or name
    if "/" not in repo and not text.startswith("hf://"):
        # A name that resembles a preset's: the hub has few without an organisation, and none of a family here.
        if find(name) is not None:
            raise _config_alone(name)
        if near := nearest(name):
            hint = f"did you mean {', '.join(near[:4])}? A hub repository is written org/name."
            raise InvalidInput(f"no preset, file or folder is called {name!r}", hint)
    return Reference(text, "hub", repo=repo, revision=revision)


def located(path: Path, text: str | None = None, kind: Literal["sample", "path", "hub"] = "path") -> Reference:
    """What lies at a local path. Raises OSError where it cannot be read, InvalidInput as `identify`."""
    names = listing(path)
    found = partial(Reference, str(path) if text is None else text, kind, path, names=names)
    if names is None and path.suffix == ".json":
        return found("local" if path.name == LOCAL_CONFIG else "tree" if holds_tree(path) else "hf", path)
    folder = path if names is not None else path.parent
    own = LOCAL_CONFIG in names if names is not None else (folder / LOCAL_CONFIG).is_file()
    # Folders that have a config.json beside: torch's distributed ones, and those of other training programs.
    described = names is not None and (own or CONFIG in names)
    others = (
        () if names is None and path.suffix == ".safetensors" else ("dcp", READ_ONLY) if described else tuple(FORMATS)
    )
    for name in others:
        finds = format_named(name).finds
        if finds is not None and (source := finds(path, names)) is not None:
            return found(name, source)
    return found("local", folder / LOCAL_CONFIG) if own else found("hf", folder / CONFIG)


def read_spec(where: Reference | Path) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree of a reference or path: (spec, origin, unknown config fields). Raises InvalidInput, UntrustedInput."""
    found = located(where) if isinstance(where, Path) else where
    assert found.path is not None and found.source is not None
    if found.other is not None:
        assert found.other.describe is not None
        return found.other.describe(found.source)
    return read_description(found.source, found.path, folder=found.names is not None)


def quantised(found: Reference, origin: Origin) -> tuple[str, str | None] | None:
    """How the weights stand for numbers (`architectures.config.quantisation`), None where they are the numbers."""
    return None if found.is_own else quantisation(origin.config)


def resolve(
    reference: str | Path | Reference,
    *,
    offline: bool = False,
    weights: bool = True,
    companions: bool | None = None,
    allow_pickle: bool = False,
    check: Callable[[Reference], object] | None = None,
) -> Reference:
    """A reference with its files here, of which those that the cache lacks are fetched.

    `weights=False` is content with config.json, and with `companions` the tokenizer's files. `allow_pickle` also
    fetches .bin weights, where there are no others. `check` gets the repository's folder before any weight is fetched:
    what it raises costs no download. Raises InvalidInput; Offline where the network is needed and missing, forbidden or
    breaks off; GptkitError where the cache's disk is too small.
    """
    found = identify(reference)
    if found.path is not None:
        return found
    if found.kind == "hub file":
        _refuse_name(found.text, f"{found.repo}/{found.file}")
    if found.repo is None:
        raise _config_alone(found.text)
    from .hub import NoModel, Repository, gather, offline_by_environment

    def have(repository: Repository) -> Path:
        beside = weights if companions is None else companions
        looked = (lambda folder: None) if check is None else (lambda folder: check(located(folder, found.text, "hub")))
        return gather(repository, looked, weights=weights, companions=beside, allow_pickle=allow_pickle)

    try:
        repository = Repository.open(found.repo, found.revision, offline=offline or offline_by_environment())
    except (Offline, NoModel) as error:
        name = found.text.partition("@")[0]
        if "/" not in found.repo and not name.startswith("hf://"):
            asked = ", nor a model on the hub" if isinstance(error, NoModel) else ""
            hint = "gptkit presets lists the presets; a hub repository is written org/name."
            raise InvalidInput(f"no preset, file or folder is called {name!r}{asked}", hint) from error
        if isinstance(error, Offline):
            _refuse_path(name.removeprefix("hf://"), error)
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
    here, notes = located(folder, found.text, "hub"), tuple(repository.notes)
    return replace(here, repo=found.repo, revision=repository.commit, notes=notes, repository=repository)


def _here(text: str) -> Reference | None:
    """What lies at the local path of that name, None where nothing does."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111, because Path's own raises for an unknown user
    try:
        found = located(path, text)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    if repo := repo_of(text):
        return replace(found, notes=(f"{text} is a local path here; the model of that name is hf://{repo}",))
    return found


def _refuse_path(name: str, error: Offline) -> None:
    """Raise InvalidInput where the name was probably meant for a path: its first part is a folder here."""
    first, slash, _ = name.partition("/")
    if slash and Path(first).is_dir():
        inside = sorted(entry.name for entry in Path(first).iterdir() if entry.name.isprintable())
        some = some_of(inside, 4, ", …") or "nothing"
        hint = f"The folder {first} is here, and in it {some}. As a repository of the hub: {error.message}."
        raise InvalidInput(f"no such file or folder: {name}", hint) from error


def _config_alone(name: str) -> InvalidInput:
    hint = f"gptkit load --random {name} draws some; params, compare and show need none."
    return InvalidInput(f"the preset {name} has only a config: its weights were not published", hint)


def _refuse_name(text: str, within: str | None = None) -> NoReturn:
    """Raise InvalidInput for what looks like a path and is none; `within`: what a file of a repository is called."""
    file = "" if within is None else f"; for a GGUF there, hf://{within} (gptkit params can read it)"
    hint = f"A model on the hub is named org/name or org/name@revision{file}."
    raise InvalidInput(f"no such file or folder: {text}", hint)


def _parse(text: str) -> tuple[str, str | None]:
    """Split a reference that is no local path into repository and revision (None: the default branch)."""
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
        raise InvalidInput(f"not a model reference: {text}", "Give org/name, a folder, or sample:gpt2.")
    if at and (not revision or any(part in ("", ".", "..") for part in revision.split("/")) or "\\" in revision):
        raise InvalidInput(f"not a revision: {revision!r}", "Give a branch, a tag or a commit, as in org/name@main.")
    return name, revision or None
