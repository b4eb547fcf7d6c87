"""Opening a checkpoint: its tree, and where in its files every shared tensor lies. Reads headers, not weights.

An HF folder and gptkit's own format open to the same thing, a `Checkpoint`: a ModelSpec, and a list of bound leaves
whose layouts lead from the files' tensors to the shared ones. Everything after that (loading, converting, swapping)
is a walk over the leaves. What is wrong with the files is found here, all of it at once, before anything is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..architectures import Architecture, BoundLeaf, named
from ..architectures.layout import IDENTITY
from ..architectures.presets import repo_of
from ..components import ModelSpec
from ..display import Shown
from ..errors import CheckpointError, InvalidInput
from .contents import renamed
from .dtypes import FLOATS, HF_NAMES, INTEGERS, widest
from .formats import Opened, format_name
from .index import WeightFiles, weight_files
from .pickles import PickleWeights
from .remote import HeaderWeights, weight_headers
from .resolve import INDEX, Resolved, resolve
from .safetensors import DTYPES, SafetensorsFile
from .tree import LOCAL_CONFIG, Origin, foreign_format, is_local, is_tree, read_spec, require_floats

__all__ = ["Checkpoint", "identity_leaves", "open_checkpoint", "stated_dtype", "weight_headers_of"]


class Weights(Protocol):
    """Tensors by the name they have in the files."""

    info: dict[str, tuple[str, tuple[int, ...]]]

    def read(self, name: str) -> np.ndarray:
        """The tensor in its carrier dtype."""
        ...

    def span(self, name: str) -> tuple[Path, int] | None:
        """The file that holds the tensor's bytes as `info` says they are, and where; None where none does."""
        ...


class SafetensorsWeights:
    """Safetensors files, each opened when first read from."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._open: dict[Path, SafetensorsFile] = {}
        self.info = {name: (info.dtype, info.shape) for name, (_, info) in files.tensors.items()}

    def release(self) -> None:
        for file in list(self._open.values()):  # other threads may open more
            file.release()

    def read(self, name: str) -> np.ndarray:
        path = self._files.tensors[name][0]
        if path not in self._open:
            self._open[path] = SafetensorsFile(path)
        return self._open[path].read(name)

    def span(self, name: str) -> tuple[Path, int] | None:
        path, info = self._files.tensors[name]
        return path, info.start


@dataclass
class Checkpoint(Shown):
    """An opened checkpoint.

    Attributes:
        reference, path, revision: what was asked for, where it lies, and the commit if it came from the hub.
        format: "hf", "local" for gptkit's own, or the name of another (`converter.formats`).
        spec: the tree.
        leaves: the files' tensors, each with the shared tensors it holds.
        dtype: the dtype to compute in unless told otherwise, by safetensors' name.
        dtypes: each leaf's stored dtype, by its checkpoint name.
        notes: what a person should know: buffers dropped, a head stored twice, unknown config fields.
        texts: small files that the weight file holds inside (a tokenizer in a GGUF), by name.
        missing: shared tensors of the tree that the files lack; none unless it was opened as a `partial` one.
        extra: the leaves of `leaves` that have no place in the tree, under their own names; none unless `partial`.

    """

    reference: str
    path: Path
    revision: str | None
    format: str
    spec: ModelSpec
    leaves: list[BoundLeaf]
    dtype: str
    origin: Origin
    notes: list[str] = field(default_factory=list)
    files: tuple[Path, ...] = ()
    texts: Mapping[str, bytes] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    extra: tuple[BoundLeaf, ...] = ()
    _weights: Weights = field(repr=False, default=None)  # type: ignore[assignment]
    _found: dict[str, str] = field(repr=False, default_factory=dict)

    def __repr__(self) -> str:
        layers = f"{len(self.spec.blocks):,} layers"
        return f"<checkpoint {self.reference} ({self.format}): {len(self.leaves):,} tensors, {layers}>"

    @property
    def folder(self) -> Path:
        """Where the files that travel with the weights lie."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def architecture(self) -> Architecture | None:
        """The family it belongs or belonged to."""
        return None if self.origin.family is None else named(self.origin.family)

    @property
    def dtypes(self) -> dict[str, str]:
        """Each leaf's stored dtype, by its checkpoint name."""
        return {leaf.checkpoint: self.dtype_of(leaf) for leaf in self.leaves}

    def dtype_of(self, leaf: BoundLeaf) -> str:
        """The stored dtype of a leaf's tensor."""
        return self._weights.info[self._found[leaf.checkpoint]][0]

    @property
    def fetched(self) -> bool:
        """Whether the weights can be read; with headers alone they cannot."""
        return not isinstance(self._weights, HeaderWeights)

    def nbytes_of(self, leaf: BoundLeaf) -> int:
        """The bytes of a leaf's tensor in its carrier dtype."""
        return math.prod(leaf.shape) * DTYPES[self.dtype_of(leaf)].itemsize

    def stored_of(self, leaf: BoundLeaf) -> tuple[str, int]:
        """A leaf's element type in its file, which for quantised ones is their format's own, and its bytes there."""
        blocks: Mapping[str, tuple[str, int]] = getattr(self._weights, "blocks", {})
        return blocks.get(self._found[leaf.checkpoint]) or (self.dtype_of(leaf), self.nbytes_of(leaf))

    def span(self, leaf: BoundLeaf) -> tuple[Path, int] | None:
        """The file that holds a leaf's tensor byte for byte, and where it begins; None where it is made on reading."""
        return self._weights.span(self._found[leaf.checkpoint])

    def read(self, leaf: BoundLeaf) -> np.ndarray:
        """A leaf's tensor as it lies in its file, in the carrier dtype; a memory-mapped view where it can be."""
        return self._weights.read(self._found[leaf.checkpoint])

    def release(self) -> None:
        """Give pages of the files that were read back to the system, where memory is short."""
        release = getattr(self._weights, "release", None)
        if release is not None:
            release()

    def tensors(self) -> Iterator[tuple[str, np.ndarray, str]]:
        """Every shared tensor in the files' order: (shared name, array in its carrier dtype, dtype)."""
        for leaf in self.leaves:
            dtype = self.dtype_of(leaf)
            for name, array in zip(leaf.shared, leaf.to_shared(self.read(leaf)), strict=True):
                yield name, array, dtype

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """One shared tensor: (array in its carrier dtype, dtype)."""
        leaf = self._holder[name]
        return leaf.to_shared(self.read(leaf))[leaf.shared.index(name)], self.dtype_of(leaf)

    @cached_property
    def _holder(self) -> dict[str, BoundLeaf]:
        """Shared name -> the leaf that holds it."""
        return {name: leaf for leaf in self.leaves for name in leaf.shared}

    def shared_dtypes(self) -> dict[str, str]:
        """Every shared tensor's stored dtype."""
        return {name: self.dtype_of(leaf) for leaf in self.leaves for name in leaf.shared}


def identity_leaves(spec: ModelSpec) -> list[BoundLeaf]:
    """The leaves of gptkit's own format: every shared tensor under its own name."""
    return [
        BoundLeaf(parameter.name, parameter.shape, (parameter.name,), (parameter.shape,), IDENTITY, {})
        for parameter in spec.parameters()
    ]


def open_checkpoint(
    reference: str | Path,
    *,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    headers_only: bool = False,
    integers: bool = False,
    partial: bool = False,
) -> Checkpoint:
    """Open a checkpoint by reference (see `converter.resolve`) and check all of its headers.

    With `headers_only` the weights of a hub repository are not fetched, and nothing can be read from the checkpoint.
    With `integers` weights may be stored as integers too. With `partial` tensors may be missing, and those without a
    place in the model are there under their own names unless `allow_extra` leaves them out: for whoever compares
    files, not for whoever runs a model.

    Raises:
        InvalidInput: files or config broken, family unknown, tensors missing, extra (unless `allow_extra`, or both
            with `partial`), mis-shaped or not floating point; all tensors at fault are listed.
        Offline: it is not here and there is no network.

    """
    found, remote = _find(str(reference), offline, allow_pickle, headers_only, _usable)
    other = foreign_format(found.path)
    if other is not None and other.read is not None:
        return _open_foreign(
            str(reference), found, other.read(found.path, allow_pickle), format_name(other), allow_extra, partial
        )
    if is_tree(found.path):
        raise InvalidInput(
            f"{found.path} is a tree by itself: there are no weights to it",
            f"gptkit load --random {found.path} gives it random ones.",
        )
    spec, origin, unknown = read_spec(found.path)
    require_floats(found.path, origin)
    local = is_local(found.path)
    origin = _with_reference(origin, found)
    files = remote or weight_files(found.path, allow_pickle)
    weights: Weights
    if remote is not None:
        weights = HeaderWeights(remote)
    else:
        weights = SafetensorsWeights(files) if files.format == "safetensors" else PickleWeights(files.files)
    if len(spec.blocks) > len(weights.info):
        raise CheckpointError(
            f"{found.path} has {len(weights.info)} tensors for {len(spec.blocks)} layers: config and weights differ"
        )
    architecture = None if local or origin.family is None else named(origin.family)
    leaves = identity_leaves(spec) if architecture is None else architecture.bind(spec)
    checkpoint = Checkpoint(
        reference=str(reference),
        path=found.path,
        revision=found.revision,
        format="local" if local else "hf",
        spec=spec,
        leaves=leaves,
        dtype="F32",
        origin=origin,
        notes=list(found.notes),
        files=files.files,
        _weights=weights,
    )
    if unknown:
        checkpoint.notes.append(f"config.json fields that neither transformers nor gptkit reads: {', '.join(unknown)}")
    _match(checkpoint, architecture, allow_extra, integers, partial)
    checkpoint.leaves = _in_file_order(checkpoint, files)
    if architecture is not None and files.headers:
        texts = {} if files.index is None else {INDEX: files.index}
        checkpoint.origin = replace(checkpoint.origin, files={**files.headers, **texts})
    checkpoint.dtype = _compute_dtype(checkpoint)
    return checkpoint


def weight_headers_of(reference: str, *, offline: bool = False, allow_pickle: bool = False) -> WeightFiles:
    """The tensors in a reference's weight files by their own names, whatever they hold; raises as `open_checkpoint`."""
    found, remote = _find(reference, offline, allow_pickle, True, read_spec)
    return remote or weight_files(found.path, allow_pickle)


def _usable(path: Path) -> None:
    """Raise InvalidInput for a config that cannot be used: before gigabytes are fetched."""
    require_floats(path, read_spec(path)[1])


def _find(
    reference: str, offline: bool, allow_pickle: bool, headers_only: bool, check: Callable[[Path], object]
) -> tuple[Resolved, WeightFiles | None]:
    """What a reference stands for, and with `headers_only` the headers of weights that were left on the hub."""

    def find(weights: bool) -> Resolved:
        return resolve(
            reference,
            offline=offline,
            weights=weights,
            companions=True,
            allow_pickle=allow_pickle,
            repo_of=repo_of,
            check=check,
        )

    found = find(weights=not headers_only)
    if not headers_only or found.repository is None:
        return found, None
    remote = weight_headers(found.repository, allow_pickle)
    return (find(weights=True) if remote is None else found), remote


def _open_foreign(
    reference: str, found: Resolved, opened: Opened, name: str, allow_extra: bool, partial: bool
) -> Checkpoint:
    """The checkpoint in a file of another format."""
    checkpoint = Checkpoint(
        reference=reference,
        path=found.path,
        revision=found.revision,
        format=name,
        spec=opened.spec,
        leaves=opened.leaves,
        dtype="F32",
        origin=_with_reference(opened.origin, found),
        notes=[*found.notes, *opened.notes],
        files=opened.files,
        texts=opened.texts,
        _weights=opened.weights,
    )
    _match(checkpoint, opened.architecture, allow_extra, partial=partial)
    checkpoint.dtype = _compute_dtype(checkpoint)
    return checkpoint


def _with_reference(origin: Origin, found: Resolved) -> Origin:
    """A converted folder remembers its first source; anything else is its own."""
    if origin.reference is not None:
        return origin
    # A local path says nothing on another machine: only its last part is kept.
    reference = found.path.name if found.kind == "path" else found.ref
    return replace(origin, reference=reference, revision=found.revision)


def _match(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    allow_extra: bool,
    integers: bool = False,
    partial: bool = False,
) -> None:
    """Pair the declared leaves with the tensors in the files, or raise with everything that does not fit."""
    declared = {leaf.checkpoint: leaf for leaf in checkpoint.leaves}
    info = checkpoint._weights.info
    dropped, extra, twice, heads = [], [], [], []
    for name in info:
        known: str | None = name
        if architecture is not None:
            known = architecture.canonical_name(name, declared, len(checkpoint.spec.blocks))
        if known is None:
            dropped.append(name)
        elif known in declared:
            if known in checkpoint._found:
                twice.append(f"{name} and {checkpoint._found[known]}")
            checkpoint._found[known] = name
        elif architecture is not None and known == architecture.head and checkpoint.spec.head.tied:
            heads.append(name)
        else:
            extra.append(name)
    # Only now: the embedding may come after the head, and under an old name.
    heads = _embedding_from_head(checkpoint, heads)
    untied = [name for name in heads if checkpoint.fetched and not _is_tied(checkpoint, name)]
    missing = [name for name in declared if name not in checkpoint._found]
    problems = [] if partial or not missing else [f"{_lacking(missing, declared)}: {_some(missing)}"]
    problems += _problems(checkpoint, declared, FLOATS + INTEGERS if integers else FLOATS)
    hint = "Check that config.json belongs to these weights."
    if architecture is not None and missing == [architecture.head]:
        hint = 'A base model alone has no head. Set "tie_word_embeddings": true in config.json if it is the embedding.'
    if untied:
        problems.append(f"config.json ties the head to the embedding, but {_some(untied)} holds other values")
        if len(problems) == 1:
            hint = 'Set "tie_word_embeddings": false in config.json if the head is meant to be its own.'
    if twice:
        problems.append(f"{len(twice)} tensors are there under two names: {_some(twice)}")
    if extra and not allow_extra and not partial:
        problems.append(f"{len(extra)} tensors have no place in the model: {_some(extra)}")
    elif extra and allow_extra:
        checkpoint.notes.append(f"extra tensors left out: {_some(extra)}")
    if problems:
        if extra and not allow_extra and len(problems) == 1:
            hint = "Pass --allow-extra to leave them out."
        elif extra and missing:
            hint = renamed(extra) or hint
        raise CheckpointError(f"{checkpoint.path}: " + "; ".join(problems), hint)
    how = (
        "is tied to the embedding: not compared, since no weight was fetched"
        if not checkpoint.fetched
        else ("repeats the embedding it is tied to: kept once")
    )
    checkpoint.notes += [f"{name} {how}" for name in heads]
    if dropped:
        checkpoint.notes.append(f"buffers without weights left out: {_some(dropped)}")
    if partial:
        _as_they_are(checkpoint, declared, missing, [] if allow_extra else extra)


def _lacking(missing: list[str], declared: Mapping[str, BoundLeaf]) -> str:
    return f"{len(missing)} of {len(declared)} tensors are missing"


def _as_they_are(checkpoint: Checkpoint, declared: dict[str, BoundLeaf], missing: list[str], extra: list[str]) -> None:
    """Let the leaves be those that the files have: without what is missing, with what has no place."""
    checkpoint.missing = tuple(name for leaf in missing for name in declared[leaf].shared)
    if missing:
        checkpoint.notes.append(f"{_lacking(missing, declared)}: {_some(missing)}")
    info = checkpoint._weights.info
    taken = {name for leaf in declared.values() for name in leaf.shared}
    known = [name for name in extra if info[name][0] in FLOATS + INTEGERS and name not in taken]
    if known:
        checkpoint.notes.append(f"no place in the model, so compared by their own names: {_some(known)}")
    if len(known) < len(extra):
        left = [name for name in extra if name not in known]
        checkpoint.notes.append(f"tensors without a place in the model that cannot be read left out: {_some(left)}")
    checkpoint.extra = tuple(BoundLeaf(x, info[x][1], (x,), (info[x][1],), IDENTITY, {}) for x in known)
    checkpoint._found.update({name: name for name in known})
    checkpoint.leaves = [leaf for leaf in checkpoint.leaves if leaf.checkpoint not in missing] + [*checkpoint.extra]


def _problems(checkpoint: Checkpoint, declared: dict[str, BoundLeaf], allowed: tuple[str, ...]) -> list[str]:
    info, problems = checkpoint._weights.info, []
    shaped, typed = [], []
    for name, own in checkpoint._found.items():
        dtype, shape = info[own]
        if shape != declared[name].shape:
            shaped.append(f"{own} is {list(shape)}, expected {list(declared[name].shape)}")
        if dtype not in allowed:
            typed.append(f"{own} is {dtype}")
    if shaped:
        problems.append(f"{len(shaped)} tensors have another shape: {_some(shaped)}")
    if typed:
        problems.append(f"{len(typed)} weights are not floating point: {_some(typed)}")
    return problems


def _embedding_from_head(checkpoint: Checkpoint, heads: list[str]) -> list[str]:
    """The stored tied heads but for one that stands for the embedding, as safetensors' save_model leaves it."""
    leaf = next(leaf for leaf in checkpoint.leaves if leaf.shared == ("embedding.weight",))
    if not heads or leaf.checkpoint in checkpoint._found:
        return heads
    checkpoint._found[leaf.checkpoint] = heads[0]
    checkpoint.notes.append(f"{heads[0]} is there for the embedding it is tied to")
    return heads[1:]


def _is_tied(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tied head that was stored all the same has the embedding's bytes."""
    leaf = next(leaf for leaf in checkpoint.leaves if leaf.shared == ("embedding.weight",))
    embedding = checkpoint._found[leaf.checkpoint]
    info = checkpoint._weights.info
    if info[embedding] != info[name]:
        return False
    if info[name][1] != leaf.shape or info[name][0] not in FLOATS:  # reported as such
        return True
    a, b = checkpoint._weights.read(embedding), checkpoint._weights.read(name)
    rows = 4096  # a few MB at a time: neither tensor is ever in memory as a whole
    return all(np.array_equal(_bits(a[i : i + rows]), _bits(b[i : i + rows])) for i in range(0, len(a), rows))


def _bits(array: np.ndarray) -> np.ndarray:
    """The array's bytes, so that NaN equals NaN and -0 is not 0."""
    return np.ascontiguousarray(array).view(np.uint8)


def _some(names: list[str]) -> str:
    """At most eight of them."""
    return ", ".join(names[:8]) + (f", … ({len(names) - 8} more)" if len(names) > 8 else "")


def _in_file_order(checkpoint: Checkpoint, files: WeightFiles) -> list[BoundLeaf]:
    """The leaves as their bytes lie, so that a walk over them reads each file from front to back."""
    if files.format != "safetensors":
        return sorted(checkpoint.leaves, key=lambda leaf: checkpoint.span(leaf) or (Path(), 0))
    place = {name: index for index, name in enumerate(files.tensors)}
    return sorted(checkpoint.leaves, key=lambda leaf: place[checkpoint._found[leaf.checkpoint]])


def _compute_dtype(checkpoint: Checkpoint) -> str:
    """What transformers would compute in: config.json's dtype, else the stored one.

    A converted or swapped folder says it itself, since a swap stores some tensors wider than anybody computes in.
    """
    config: dict[str, Any] | None
    if checkpoint.format == "local":
        config = json.loads((checkpoint.folder / LOCAL_CONFIG).read_text(encoding="utf-8"))
    else:
        config = checkpoint.origin.config
    stored = [dtype for dtype in checkpoint.dtypes.values() if dtype in FLOATS]
    return stated_dtype(config) or widest(stored or ["F32"])


def stated_dtype(config: Mapping[str, Any] | None) -> str | None:
    """The dtype that a config.json names, as safetensors has it; None where it names none of ours."""
    stated = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    return next((ours for ours, name in HF_NAMES.items() if stated in (name, f"torch.{name}")), None)
