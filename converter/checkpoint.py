"""Open a checkpoint: read its tree of components, and find where its files store every tensor. Only headers are read.

The result is a `Checkpoint`, whatever the file format. One error reports all faults of the files together.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..architectures import Architecture, BoundLeaf, named
from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import CheckpointError, InvalidInput, UnknownFamily
from ..signatures import takes
from .dtypes import FLOATS, HF_NAMES, INTEGERS, widest
from .files import sha256_file
from .formats import Opened
from .index import WeightFiles, weight_files
from .matching import Match, match
from .names import CONFIG, INDEX, LOCAL_CONFIG
from .opening import Opening
from .pickles import pickle_weights, renamed
from .quantised import METHODS, dequantised
from .resolve import Reference, quantised, read_spec, resolve
from .scan import FileScan
from .tree import Origin, OtherClass, Quantised
from .weights import Checkpoint as Checkpoint
from .weights import TensorFiles as TensorFiles
from .weights import Weights, own_leaves
from .weights import identity_leaves as identity_leaves

_some = functools.partial(some_of, most=8, more=", … ({} more)")
_first = functools.partial(some_of, most=3)  # in errors, whose hint follows


@takes(Opening)
def open_checkpoint(
    reference: str | Path | Reference,
    *,
    allow_extra: bool = False,
    headers_only: bool = False,
    integers: bool = False,
    partial: bool = False,
    stored: bool = False,
    dequantise: bool = True,
    narrow: bool = False,
    **opening: Unpack[Opening],
) -> Checkpoint:
    """Open a checkpoint and check its config and the headers of its weight files, without reading weights.

    Args:
        reference: a folder, a file, a sample, or a repository on the hub.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        headers_only: download only the headers of the weight files.
        integers: allow weights that are stored as integers.
        partial: allow missing tensors, and report extra ones unless `allow_extra` is given.
        stored: leave quantised weights as they are stored.
        dequantise: read quantised weights as fp32 instead of refusing them.
        narrow: read quantised weights as bf16 instead of fp32.

    Raises:
        InvalidInput: the config or the tensors do not fit; the message lists everything that is wrong.
        Offline: there is no network, and the checkpoint is not in the cache.
    """
    allow_pickle = opening.get("allow_pickle", False)
    methods = ("fp8",) if stored else tuple(METHODS) if dequantise else ()
    check = functools.partial(_usable, methods=methods)
    resolved, remote = _find(reference, opening, headers_only, check)
    assert resolved.path is not None and resolved.source is not None
    read = None if resolved.other is None else resolved.other.read
    numbers = None if stored else "BF16" if narrow else "F32"
    opened = (
        _read(resolved, remote, allow_pickle, check, numbers) if read is None else read(resolved.source, allow_pickle)
    )
    return _checked(resolved, opened, allow_extra=allow_extra, integers=integers, partial=partial, stored=stored)


def open_scanned(files: FileScan, *, allow_pickle: bool = False) -> Checkpoint:
    """Open the checkpoint whose headers `scan` has read, with the checks of `open_checkpoint`.

    No header is read again.
    """
    resolved, opened = files.resolved, files.opened
    assert resolved.source is not None
    read = None if resolved.other is None else resolved.other.read
    if opened is None and read is not None:
        opened = read(resolved.source, allow_pickle)
    elif opened is None:
        check = functools.partial(_usable, methods=tuple(METHODS))
        opened = _read(resolved, None if files.fetched else files.weight_files(), allow_pickle, check, "F32")
    return _checked(resolved, opened)


def _checked(
    resolved: Reference,
    opened: Opened,
    *,
    allow_extra: bool = False,
    integers: bool = False,
    partial: bool = False,
    stored: bool = False,
) -> Checkpoint:
    """Return the checkpoint in files whose headers were read, after checking the tensors against the model.

    The options are those of `open_checkpoint`. Raises CheckpointError that lists every tensor that does not fit.
    """
    assert resolved.path is not None and resolved.source is not None
    origin = opened.origin
    if origin.reference is None:  # else a converted folder, which remembers its first source
        # A local path says nothing on another machine: only its last part is recorded.
        name = resolved.path.name if resolved.kind == "path" else resolved.text
        origin = replace(origin, reference=name, revision=resolved.revision)
    checkpoint = Checkpoint(
        reference=resolved.text,
        path=resolved.path,
        revision=resolved.revision,
        format=opened.format or str(resolved.format),
        spec=opened.spec,
        leaves=opened.leaves,
        dtype="F32",
        origin=origin,
        notes=[*resolved.notes, *opened.notes],
        files=opened.files,
        texts=opened.texts,
        home=opened.home,
        _weights=opened.weights,
    )
    _match(checkpoint, opened.architecture, allow_extra, integers and resolved.other is None, partial, stored)
    # In the order of their bytes, so that reading all leaves reads every file from front to back.
    place = opened.weights.place
    checkpoint.leaves = sorted(checkpoint.leaves, key=lambda leaf: place(checkpoint._names[leaf.checkpoint]))
    # A converted or swapped folder says it itself, since a swap stores some tensors wider than anybody computes in.
    config = json.loads(resolved.source.read_bytes()) if resolved.is_own else checkpoint.origin.config
    # What transformers would compute in: config.json's dtype, else the stored one.
    float_dtypes = [dtype for dtype in checkpoint.dtypes.values() if dtype in FLOATS]
    checkpoint.dtype = stated_dtype(config) or widest(float_dtypes or ["F32"])
    return checkpoint


def weight_headers_of(reference: str | Reference, **opening: Unpack[Opening]) -> WeightFiles:
    """Return the headers of a model's weight files, also if gptkit does not know its family.

    Raises the errors of `open_checkpoint`.
    """
    resolved, remote = _find(reference, opening, True, None)
    assert resolved.path is not None
    return remote or weight_files(resolved.path, opening.get("allow_pickle", False), resolved.names)


def open_files(
    reference: str | Path | Reference,
    *,
    allow_extra: bool = False,
    headers_only: bool = False,
    partial: bool = False,
    **opening: Unpack[Opening],
) -> TensorFiles:
    """Open a checkpoint. If its family is unknown or gptkit cannot load it, return its tensors by name instead.

    The keyword arguments are those of `open_checkpoint`. If the tensors are listed by name, `allow_extra` and `partial`
    have no effect.
    """
    try:
        return open_checkpoint(
            reference, allow_extra=allow_extra, headers_only=headers_only, partial=partial, **opening
        )
    except (UnknownFamily, Quantised, OtherClass) as error:
        opened = open_tensors(reference, headers_only=headers_only, **opening)
        opened.notes.append(
            f"tensors are listed by their names in the files, because gptkit cannot load the model: {error.message}"
        )
        return opened


def open_tensors(
    reference: str | Path | Reference, *, headers_only: bool = False, **opening: Unpack[Opening]
) -> TensorFiles:
    """Return a model's tensors by their names in its files, also if gptkit does not know its family.

    Raises the errors of `open_checkpoint`.
    """
    resolved, remote = _find(reference, opening, headers_only, None)
    assert resolved.path is not None and resolved.source is not None
    config: str | None = None
    files: tuple[Path, ...] = (resolved.source,)
    by_name = getattr(resolved.other, "tensors", None)
    if by_name is not None:
        weights = by_name(resolved.source)
    else:
        stored = remote or weight_files(resolved.path, opening.get("allow_pickle", False), resolved.names)
        files, pickled = stored.files, stored.format == "pickle"
        weights = pickle_weights(files) if pickled else Weights(stored.tensors, fetched=remote is None)
        config = resolved.source.read_text("utf-8") if resolved.source.is_file() and resolved.other is None else None
    name = resolved.path.name if resolved.kind == "path" else resolved.text
    return TensorFiles(
        reference=resolved.text,
        path=resolved.path,
        revision=resolved.revision,
        format=str(resolved.format),
        leaves=own_leaves((name, shape) for name, (_, shape) in weights.info.items()),
        origin=Origin(reference=name, revision=resolved.revision, config_text=config),
        notes=list(resolved.notes),
        files=files,
        _weights=weights,
        _names={name: name for name in weights.info},
    )


_FIRST_ONE = "Use the unquantised model from which these weights were made."


def _usable(resolved: Reference, methods: tuple[str, ...] = ()) -> tuple[ModelSpec, Origin, list[str]]:
    """Return what `read_spec` returns: the tree of components, its origin, and the unknown fields of config.json.

    Raises Quantised if config.json says that the weights are quantised by a method that is not in `methods`.
    """
    spec, origin, unknown = read_spec(resolved)
    method = quantised(resolved, origin)
    if method is not None and method[0].partition(",")[0] not in methods:
        description, way = method
        hint = _FIRST_ONE.rstrip(".") + (f", or dequantise it with {way}" if way is not None else "")
        raise Quantised(
            f"{resolved.path}: the weights are quantised ({description}), but this command needs floating-point "
            "weights",
            f"{hint}. The commands gptkit params, compare and show need no weights.",
        )
    return spec, origin, unknown


def _find(
    reference: str | Path | Reference, opening: Opening, headers_only: bool, check: Callable[[Reference], object] | None
) -> tuple[Reference, WeightFiles | None]:
    """Resolve a reference and fetch its files.

    `check` is called with the resolved reference before any weight is fetched. With `headers_only`, weights on the hub
    are not fetched, only their headers.

    Returns:
        The resolved reference, and the headers of weights that were not fetched (None if the weights are local).
    """
    find = functools.partial(resolve, reference, companions=True, check=check, **opening)
    resolved = find(weights=not headers_only)
    if not headers_only or resolved.repository is None:
        return resolved, None
    from .remote import weight_headers  # here, because it imports the hub's library

    remote = weight_headers(resolved.repository, opening.get("allow_pickle", False))
    return (find(weights=True) if remote is None else resolved), remote


def _read(
    resolved: Reference,
    remote: WeightFiles | None,
    allow_pickle: bool,
    check: Callable[[Reference], tuple[ModelSpec, Origin, list[str]]],
    dequantise: str | None,
) -> Opened:
    """Read the headers of a Hugging Face checkpoint, or of one in gptkit's own format.

    Args:
        resolved: the folder or weight file.
        remote: the headers of weights that are still on the hub; None for local weights.
        allow_pickle: also read .bin files.
        check: returns the tree of components, its origin and the unknown fields of config.json, or raises.
        dequantise: the dtype in which quantised weights are read; None leaves them as stored.
    """
    assert resolved.path is not None
    if resolved.format == "tree":
        raise InvalidInput(
            f"{resolved.path} describes only an architecture and has no weights",
            f"To run the model with random weights: gptkit load --random {resolved.path}",
        )
    spec, origin, unknown = check(resolved)
    files = remote or weight_files(resolved.path, allow_pickle, resolved.names)
    pickled = files.format == "pickle"
    weights = pickle_weights(files.files) if pickled else Weights(files.tensors, fetched=remote is None)
    notes = [f"config.json fields that neither transformers nor gptkit reads: {', '.join(unknown)}"] if unknown else []
    if dequantise is not None and quantised(resolved, origin) is not None:
        assert origin.config is not None
        weights, note = dequantised(weights, origin.config, dequantise, resolved.path)
        notes.append(note)
    if len(spec.blocks) > len(weights.info):
        raise CheckpointError(
            f"{resolved.path} has only {len(weights.info)} tensors, but its config describes {len(spec.blocks)} layers",
            "Put the config and the weight files of the same model into the folder.",
        )
    architecture = None if resolved.is_own or origin.family is None else named(origin.family)
    spec = spec if architecture is None else architecture.in_files(spec, weights.info)
    leaves = identity_leaves(spec) if architecture is None else architecture.bind_files(spec, weights.info)
    if architecture is not None and files.headers:
        origin = replace(origin, files={**files.headers, **({} if files.index is None else {INDEX: files.index})})
    return Opened(spec, origin, leaves, weights, files.files, notes=notes, architecture=architecture)


def _match(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    allow_extra: bool,
    integers: bool,
    partial: bool,
    stored: bool,
) -> None:
    """Pair the tensors that the model needs (its leaves) with the tensors in the files, and record the pairs.

    `architecture` is the family whose tensor names the files have. The other options are those of `open_checkpoint`.
    Raises CheckpointError that lists every tensor that does not fit.
    """
    weights, family = checkpoint._weights, architecture or checkpoint.architecture
    pairs = match(checkpoint.spec, checkpoint.leaves, weights, architecture, family, integers=integers)
    if "scales" in pairs.carried and not stored:
        raise Quantised(
            f"{checkpoint.path}: the weights are quantised, but this command needs floating-point weights",
            _FIRST_ONE
            if architecture is not None
            else "Convert the model with --to hf first. Then convert the new folder with --dtype bfloat16.",
        )
    _refuse(checkpoint, pairs, architecture, allow_extra, partial)
    info, notes = weights.info, checkpoint.notes
    checkpoint._names = pairs.matched
    notes += (
        [f"the files have no embedding; {pairs.stands_in} is used instead, because config.json ties the two"]
        if pairs.stands_in
        else []
    )
    notes += (
        [f"left out, because they are not part of the model: {_some(pairs.extra)}"]
        if pairs.extra and allow_extra
        else []
    )
    how = "is a copy of the embedding, to which it is tied: stored only once"
    if not checkpoint.fetched:
        how = "is tied to the embedding; their values were not compared, because no weights were downloaded"
    notes += [f"{name} {how}" for name in pairs.heads]
    notes += (
        [f"{len(pairs.copies)} tensors are copies of weights that layers share: stored only once"]
        if pairs.copies
        else []
    )
    checkpoint.carried = {
        group: tuple(own_leaves((known, info[name][1]) for known, name in names.items()))
        for group, names in pairs.carried.items()
    }
    missing = pairs.missing
    checkpoint._names.update(pair for group in pairs.carried.values() for pair in group.items())
    notes += checkpoint.carried_notes
    notes += [f"buffers that are not weights were left out: {_some(pairs.dropped)}"] if pairs.dropped else []
    if partial:
        notes += [_lacking(pairs)] if missing else []
        _as_they_are(checkpoint, pairs.declared, missing, [] if allow_extra else pairs.extra)


def _refuse_other_class(path: Path, pairs: Match, architecture: Architecture | None, name: str) -> None:
    """Raise OtherClass if only the head is different, as in a classifier, or missing, as in a base model.

    `name` is the class that config.json names.
    """
    head, head_tensors = getattr(architecture, "head", ""), pairs.own_head(architecture)
    if pairs.missing not in ([], [head]) or head_tensors != pairs.extra or not (pairs.missing or head_tensors):
        return
    difference = (
        f"with {_some(head_tensors)} in the place of a language model's head"
        if head_tensors
        else f"without a head ({head})"
    )
    hint = "gptkit params, show, compare, diff and audit can read it. To run the model, use transformers."
    if not head_tensors:
        hint = (
            'Set "tie_word_embeddings": true in config.json if the head is tied to the embedding. A base '
            "model has no head."
        )
    elif not pairs.missing:
        hint = f"Pass --allow-extra to read the language model and leave out {_some(head_tensors)}."
    raise OtherClass(
        f"{path} is a {name}, {difference}, but this command supports only models with a language model head", hint
    )


def _lacking(pairs: Match) -> str:
    return f"{len(pairs.missing)} of {len(pairs.declared)} tensors are missing: {_first(_absent_first(pairs))}"


def _absent_first(pairs: Match) -> list[str]:
    """Return the names of the missing tensors, with those last that are probably only renamed.

    A missing tensor is probably renamed if an extra tensor has the same name with a longer or shorter prefix.
    """

    def suffixes(name: str) -> set[str]:
        parts = name.split(".")
        return {".".join(parts[at:]) for at in range(len(parts))}

    extra = set(pairs.extra)
    ends = {suffix for name in extra for suffix in suffixes(name)}
    return sorted(pairs.missing, key=lambda name: name in ends or not extra.isdisjoint(suffixes(name)))


def _refuse(
    checkpoint: Checkpoint, pairs: Match, architecture: Architecture | None, allow_extra: bool, partial: bool
) -> None:
    """Raise CheckpointError if tensors do not fit the model. It lists all of them, and says what to do."""
    info, missing, extra = checkpoint._weights.info, pairs.missing, pairs.extra
    other = None if architecture is None or partial else architecture.other_class(checkpoint.origin.config)
    if other is not None and pairs.sound and (missing or not allow_extra):
        _refuse_other_class(checkpoint.path, pairs, architecture, other)
    problems = [] if partial or not missing else [_lacking(pairs)]
    shaped = [
        f"{tensor} is {list(info[tensor][1])}, expected {list(pairs.declared[name].shape)}"
        for name in pairs.shaped
        for tensor in [pairs.matched[name]]
    ]
    typed = [f"{name} is {info[name][0]}" for name in pairs.typed]
    for names, problem in (
        (shaped, ("tensors do not have the shape that config.json requires")),
        (typed, "weights are not floating-point numbers"),
    ):
        problems += [f"{len(names)} {problem}: {_first(names)}"] if names else []
    hint = "Check that config.json belongs to these weights."
    if architecture is not None and missing == [architecture.head]:
        hint = (
            'Set "tie_word_embeddings": true in config.json if the head is tied to the embedding. A base '
            "model has no head."
        )
    if pairs.untied:
        problems.append(f"config.json ties the head to the embedding, but {_first(pairs.untied)} has different values")
        if len(problems) == 1:
            hint = 'Set "tie_word_embeddings": false in config.json if the head has its own weights.'
    if pairs.altered:
        examples = _first(pairs.altered)
        problems.append(
            f"transformers would load stored values that differ from those that follow from config.json: {examples}"
        )
        if len(problems) == 1:
            hint = "Remove these tensors from the files if they were left over from another model."
    if pairs.parted:
        problems.append(
            f"some layers share weights, but the files have different values for them: {_first(pairs.parted)}"
        )
    if pairs.twice:
        names = [f"{name} and {other}" for name, other in pairs.twice]
        problems.append(f"{len(names)} tensors are stored under two names: {_first(names)}")
    if extra and not allow_extra and not partial:
        problems.append(f"{len(extra)} tensors have no place in the model: {_first(extra)}")
    if not problems:
        return
    if extra and not allow_extra and len(problems) == 1:
        hint = "Pass --allow-extra to leave these tensors out."
    elif extra and missing:
        hint = renamed(extra) or hint
    raise CheckpointError(f"{checkpoint.path}: " + "; ".join(problems), hint)


def _as_they_are(checkpoint: Checkpoint, declared: dict[str, BoundLeaf], missing: list[str], extra: list[str]) -> None:
    """For `partial`: make the checkpoint list the tensors in its files, even if they are not those of the model.

    Args:
        checkpoint: the checkpoint, which lists the tensors that the model needs.
        declared: these tensors, by name.
        missing: the names of tensors that are not in the files. They are removed from the list.
        extra: the names of tensors in the files that the model does not need. They are added.
    """
    checkpoint.missing = tuple(name for leaf in missing for name in declared[leaf].shared)
    info = checkpoint._weights.info
    declared_names = {name for leaf in declared.values() for name in leaf.shared}
    known = [name for name in extra if info[name][0] in FLOATS + INTEGERS and name not in declared_names]
    if known:
        checkpoint.notes.append(f"not part of the model, so compared by name: {_some(known)}")
    if len(known) < len(extra):
        unreadable = [name for name in extra if name not in known]
        checkpoint.notes.append(
            f"left out, because they are not part of the model and gptkit cannot read their dtype: {_some(unreadable)}"
        )
    checkpoint.extra = tuple(own_leaves((name, info[name][1]) for name in known))
    checkpoint._names.update({name: name for name in known})
    checkpoint.leaves = [leaf for leaf in checkpoint.leaves if leaf.checkpoint not in missing] + [*checkpoint.extra]


def stated_dtype(config: Mapping[str, Any] | None) -> str | None:
    """Return the dtype in a config.json by its name in safetensors, or None if gptkit does not support it."""
    stated = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    return next((dtype for dtype, name in HF_NAMES.items() if stated in (name, f"torch.{name}")), None)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the sha256 of the weight files and of the config that a checkpoint was read from, by file name."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    configs = [folder / name for name in (LOCAL_CONFIG, CONFIG) if (folder / name).is_file()][:1]
    return {path.name: sha256_file(path) for path in (*checkpoint.files, *configs)}
