"""Opening a checkpoint: its tree, and where in its files every shared tensor lies. Reads headers, not weights.

Whatever a reference is opens to the same thing, a `Checkpoint`. What is wrong with the files is found here, all of it
at once, before anything is written.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..architectures import Architecture, BoundLeaf, named
from ..components import ModelSpec
from ..components.ranges import some_of
from ..errors import CheckpointError, InvalidInput, UnknownFamily
from .dtypes import FLOATS, HF_NAMES, INTEGERS, widest
from .formats import Opened
from .index import WeightFiles, weight_files
from .matching import Match, match
from .names import INDEX
from .pickles import pickle_weights, renamed
from .quantised import METHODS, dequantised
from .resolve import Reference, quantised, read_spec, resolve
from .scan import Scan
from .tree import Origin, OtherClass, Quantised
from .weights import Checkpoint as Checkpoint
from .weights import TensorFiles as TensorFiles
from .weights import Weights, own_leaves
from .weights import identity_leaves as identity_leaves

_some = functools.partial(some_of, most=8, more=", … ({} more)")
_first = functools.partial(some_of, most=3)  # in errors, whose hint follows


def open_checkpoint(
    reference: str | Path | Reference,
    *,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    headers_only: bool = False,
    integers: bool = False,
    partial: bool = False,
    stored: bool = False,
    dequantise: bool = True,
    narrow: bool = False,
) -> Checkpoint:
    """Open a checkpoint by reference (see `converter.resolve`) and check all of its headers. `headers_only` fetches no
    weights; `integers` allows weights stored so; `partial` allows missing tensors and keeps those without a place,
    unless `allow_extra`. Quantised weights become fp32, `narrow` bf16, or are refused unless `dequantise`; `stored`
    takes them as they lie, which nothing computes. Raises InvalidInput, with all that does not fit; Offline.
    """
    methods = ("fp8",) if stored else tuple(METHODS) if dequantise else ()
    check = functools.partial(_usable, methods=methods)
    found, remote = _find(reference, offline, allow_pickle, headers_only, check)
    assert found.path is not None and found.source is not None
    read = None if found.other is None else found.other.read
    numbers = None if stored else "BF16" if narrow else "F32"
    opened = _read(found, remote, allow_pickle, check, numbers) if read is None else read(found.source, allow_pickle)
    return _checked(found, opened, allow_extra=allow_extra, integers=integers, partial=partial, stored=stored)


def open_scanned(files: Scan, *, allow_pickle: bool = False) -> Checkpoint:
    """Open what was scanned, as `open_checkpoint` opens it and with the same refusals, without asking for any header
    again.
    """
    found, opened = files.found, files.opened
    assert found.source is not None
    read = None if found.other is None else found.other.read
    if opened is None and read is not None:
        opened = read(found.source, allow_pickle)
    elif opened is None:
        check = functools.partial(_usable, methods=tuple(METHODS))
        opened = _read(found, None if files.fetched else files.weight_files(), allow_pickle, check, "F32")
    return _checked(found, opened)


def _checked(
    found: Reference,
    opened: Opened,
    *,
    allow_extra: bool = False,
    integers: bool = False,
    partial: bool = False,
    stored: bool = False,
) -> Checkpoint:
    """Make a checkpoint of what a reader found, or raise with everything that does not fit."""
    assert found.path is not None and found.source is not None
    origin = opened.origin
    if origin.reference is None:  # else a converted folder, which remembers its first source
        # A local path says nothing on another machine: only its last part is kept.
        name = found.path.name if found.kind == "path" else found.text
        origin = replace(origin, reference=name, revision=found.revision)
    checkpoint = Checkpoint(
        reference=found.text,
        path=found.path,
        revision=found.revision,
        format=opened.format or str(found.format),
        spec=opened.spec,
        leaves=opened.leaves,
        dtype="F32",
        origin=origin,
        notes=[*found.notes, *opened.notes],
        files=opened.files,
        texts=opened.texts,
        home=opened.home,
        _weights=opened.weights,
    )
    _match(checkpoint, opened.architecture, allow_extra, integers and found.other is None, partial, stored)
    # As their bytes lie, so that a walk over them reads each file from front to back.
    place = opened.weights.place
    checkpoint.leaves = sorted(checkpoint.leaves, key=lambda leaf: place(checkpoint._found[leaf.checkpoint]))
    # A converted or swapped folder says it itself, since a swap stores some tensors wider than anybody computes in.
    config = json.loads(found.source.read_bytes()) if found.is_own else checkpoint.origin.config
    # What transformers would compute in: config.json's dtype, else the stored one.
    floats = [dtype for dtype in checkpoint.dtypes.values() if dtype in FLOATS]
    checkpoint.dtype = stated_dtype(config) or widest(floats or ["F32"])
    return checkpoint


def weight_headers_of(reference: str | Reference, *, offline: bool = False, allow_pickle: bool = False) -> WeightFiles:
    """The tensors in a reference's weight files by their own names, whatever they hold; raises as `open_checkpoint`."""
    found, remote = _find(reference, offline, allow_pickle, True, None)
    assert found.path is not None
    return remote or weight_files(found.path, allow_pickle, found.names)


def open_files(
    reference: str | Path | Reference,
    *,
    offline: bool = False,
    allow_pickle: bool = False,
    headers_only: bool = False,
    **options: bool,
) -> TensorFiles:
    """A checkpoint as `open_checkpoint` opens it; of a family that is not known, or quantised, its tensors by name."""
    how = {"offline": offline, "allow_pickle": allow_pickle, "headers_only": headers_only}
    try:
        return open_checkpoint(reference, **how, **options)
    except (UnknownFamily, Quantised, OtherClass) as error:
        opened = open_tensors(reference, **how)
        opened.notes.append(
            f"tensors are listed by their names in the files, because gptkit cannot load the model: {error.message}"
        )
        return opened


def open_tensors(
    reference: str | Path | Reference, *, offline: bool = False, allow_pickle: bool = False, headers_only: bool = False
) -> TensorFiles:
    """The tensors in a reference's weight files by their own names, of whatever family; raises as `open_checkpoint`."""
    found, remote = _find(reference, offline, allow_pickle, headers_only, None)
    assert found.path is not None and found.source is not None
    config: str | None = None
    files: tuple[Path, ...] = (found.source,)
    by_name = getattr(found.other, "tensors", None)
    if by_name is not None:
        weights = by_name(found.source)
    else:
        stored = remote or weight_files(found.path, allow_pickle, found.names)
        files, pickled = stored.files, stored.format == "pickle"
        weights = pickle_weights(files) if pickled else Weights(stored.tensors, fetched=remote is None)
        config = found.source.read_text("utf-8") if found.source.is_file() and found.other is None else None
    name = found.path.name if found.kind == "path" else found.text
    return TensorFiles(
        reference=found.text,
        path=found.path,
        revision=found.revision,
        format=str(found.format),
        leaves=own_leaves((name, shape) for name, (_, shape) in weights.info.items()),
        origin=Origin(reference=name, revision=found.revision, config_text=config),
        notes=list(found.notes),
        files=files,
        _weights=weights,
        _found={name: name for name in weights.info},
    )


_FIRST_ONE = "Use the model from which the quantised weights were made."


def _usable(found: Reference, methods: tuple[str, ...] = ()) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree, as `read_spec` tells it; weights that are quantised are refused before gigabytes are fetched, but for
    those by `methods`.
    """
    spec, origin, unknown = read_spec(found)
    method = quantised(found, origin)
    if method is not None and method[0].partition(",")[0] not in methods:
        words, way = method
        what = _FIRST_ONE.rstrip(".") + (f", or dequantise it with {way}" if way is not None else "")
        message = f"{found.path}: the weights are quantised ({words}), and gptkit needs floating-point weights here"
        raise Quantised(message, f"{what}. gptkit params, compare and show need no weights.")
    return spec, origin, unknown


def _find(
    reference: str | Path | Reference,
    offline: bool,
    allow_pickle: bool,
    headers_only: bool,
    check: Callable[[Reference], object] | None,
) -> tuple[Reference, WeightFiles | None]:
    """What a reference is, with its files here, and with `headers_only` the headers of weights left on the hub."""
    find = functools.partial(
        resolve, reference, offline=offline, companions=True, allow_pickle=allow_pickle, check=check
    )
    found = find(weights=not headers_only)
    if not headers_only or found.repository is None:
        return found, None
    from .remote import weight_headers  # here, because it imports the hub's library

    remote = weight_headers(found.repository, allow_pickle)
    return (find(weights=True) if remote is None else found), remote


def _read(
    found: Reference,
    remote: WeightFiles | None,
    allow_pickle: bool,
    check: Callable[[Reference], tuple[ModelSpec, Origin, list[str]]],
    dequantise: str | None,
) -> Opened:
    """What lies in a folder or weight file of a family, or in gptkit's own format."""
    assert found.path is not None
    if found.format == "tree":
        hint = f"To run the model with random weights: gptkit load --random {found.path}"
        raise InvalidInput(f"{found.path} describes only an architecture and has no weights", hint)
    spec, origin, unknown = check(found)
    files = remote or weight_files(found.path, allow_pickle, found.names)
    pickled = files.format == "pickle"
    weights = pickle_weights(files.files) if pickled else Weights(files.tensors, fetched=remote is None)
    notes = [f"config.json fields that neither transformers nor gptkit reads: {', '.join(unknown)}"] if unknown else []
    if dequantise is not None and quantised(found, origin) is not None:
        assert origin.config is not None
        weights, note = dequantised(weights, origin.config, dequantise, found.path)
        notes.append(note)
    if len(spec.blocks) > len(weights.info):
        raise CheckpointError(
            f"{found.path} has only {len(weights.info)} tensors, but its config describes {len(spec.blocks)} layers",
            "Put the config and the weight files of the same model into the folder.",
        )
    architecture = None if found.is_own or origin.family is None else named(origin.family)
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
    """Pair the declared leaves with the tensors in the files, or raise with everything that does not fit."""
    weights, family = checkpoint._weights, architecture or checkpoint.architecture
    made = match(checkpoint.spec, checkpoint.leaves, weights, architecture, family, integers=integers)
    if "scales" in made.carried and not stored:
        raise Quantised(
            f"{checkpoint.path}: the weights are quantised, and gptkit needs floating-point weights here",
            _FIRST_ONE
            if architecture is not None
            else "Convert the model with --to hf first. Then convert the new folder with --dtype bfloat16.",
        )
    _refuse(checkpoint, made, architecture, allow_extra, partial)
    info, notes = weights.info, checkpoint.notes
    checkpoint._found = made.found
    notes += (
        [f"the files have no embedding; {made.stands_in} is used instead, because config.json ties the two"]
        if made.stands_in
        else []
    )
    notes += (
        [f"left out, because they are not part of the model: {_some(made.extra)}"] if made.extra and allow_extra else []
    )
    how = "is a copy of the embedding, to which it is tied: stored only once"
    if not checkpoint.fetched:
        how = "is tied to the embedding; their values were not compared, because no weights were downloaded"
    notes += [f"{name} {how}" for name in made.heads]
    notes += (
        [f"{len(made.copies)} tensors are copies of weights that layers share: stored only once"] if made.copies else []
    )
    checkpoint.carried = {
        group: tuple(own_leaves((known, info[name][1]) for known, name in names.items()))
        for group, names in made.carried.items()
    }
    missing = made.missing
    checkpoint._found.update(pair for group in made.carried.values() for pair in group.items())
    notes += checkpoint.told
    notes += [f"buffers that are not weights were left out: {_some(made.dropped)}"] if made.dropped else []
    if partial:
        notes += [_lacking(made)] if missing else []
        _as_they_are(checkpoint, made.declared, missing, [] if allow_extra else made.extra)


def _refuse_other_class(path: Path, made: Match, architecture: Architecture | None, name: str) -> None:
    """Raise OtherClass where all that stands in the way of a language model is the head of the class `name`."""
    head, own = getattr(architecture, "head", ""), made.own_head(architecture)
    if made.missing not in ([], [head]) or own != made.extra or not (made.missing or own):
        return
    what = f"with {_some(own)} in the place of a language model's head" if own else f"without a head ({head})"
    hint = "gptkit params, show, compare, diff and audit can read it. To run the model, use transformers."
    if not own:
        hint = (
            'Set "tie_word_embeddings": true in config.json if the head is tied to the embedding. A base '
            "model has no head."
        )
    elif not made.missing:
        hint = f"Pass --allow-extra to read the language model and leave out {_some(own)}."
    raise OtherClass(f"{path} is a {name}, {what}, but gptkit supports only language models", hint)


def _lacking(made: Match) -> str:
    return f"{len(made.missing)} of {len(made.declared)} tensors are missing: {_first(_absent_first(made))}"


def _absent_first(made: Match) -> list[str]:
    """Return the missing leaves, with those last that the files may have under a name with another prefix."""

    def suffixes(name: str) -> set[str]:
        parts = name.split(".")
        return {".".join(parts[at:]) for at in range(len(parts))}

    extra = set(made.extra)
    ends = {suffix for name in extra for suffix in suffixes(name)}
    return sorted(made.missing, key=lambda name: name in ends or not extra.isdisjoint(suffixes(name)))


def _refuse(
    checkpoint: Checkpoint, made: Match, architecture: Architecture | None, allow_extra: bool, partial: bool
) -> None:
    """Raise CheckpointError with everything that does not fit, and what to do."""
    info, missing, extra = checkpoint._weights.info, made.missing, made.extra
    other = None if architecture is None or partial else architecture.other_class(checkpoint.origin.config)
    if other is not None and made.sound and (missing or not allow_extra):
        _refuse_other_class(checkpoint.path, made, architecture, other)
    problems = [] if partial or not missing else [_lacking(made)]
    shaped = [
        f"{own} is {list(info[own][1])}, expected {list(made.declared[name].shape)}"
        for name in made.shaped
        for own in [made.found[name]]
    ]
    typed = [f"{name} is {info[name][0]}" for name in made.typed]
    for names, what in (
        (shaped, ("tensors do not have the shape that config.json requires")),
        (typed, "weights are not floating-point numbers"),
    ):
        problems += [f"{len(names)} {what}: {_first(names)}"] if names else []
    hint = "Check that config.json belongs to these weights."
    if architecture is not None and missing == [architecture.head]:
        hint = (
            'Set "tie_word_embeddings": true in config.json if the head is tied to the embedding. A base '
            "model has no head."
        )
    if made.untied:
        problems.append(f"config.json ties the head to the embedding, but {_first(made.untied)} has different values")
        if len(problems) == 1:
            hint = 'Set "tie_word_embeddings": false in config.json if the head has its own weights.'
    if made.altered:
        told = _first(made.altered)
        problems.append(
            f"transformers would load stored values that differ from those that follow from config.json: {told}"
        )
        if len(problems) == 1:
            hint = "Remove these tensors from the files if they were left over from another model."
    if made.parted:
        problems.append(
            f"some layers share weights, but the files have different values for them: {_first(made.parted)}"
        )
    if made.twice:
        names = [f"{name} and {other}" for name, other in made.twice]
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
    """Let the leaves be those that the files have: without what is missing, with what has no place."""
    checkpoint.missing = tuple(name for leaf in missing for name in declared[leaf].shared)
    info = checkpoint._weights.info
    taken = {name for leaf in declared.values() for name in leaf.shared}
    known = [name for name in extra if info[name][0] in FLOATS + INTEGERS and name not in taken]
    if known:
        checkpoint.notes.append(f"not part of the model, so compared by name: {_some(known)}")
    if len(known) < len(extra):
        left = [name for name in extra if name not in known]
        checkpoint.notes.append(
            f"left out, because they are not part of the model and gptkit cannot read their dtype: {_some(left)}"
        )
    checkpoint.extra = tuple(own_leaves((name, info[name][1]) for name in known))
    checkpoint._found.update({name: name for name in known})
    checkpoint.leaves = [leaf for leaf in checkpoint.leaves if leaf.checkpoint not in missing] + [*checkpoint.extra]


def stated_dtype(config: Mapping[str, Any] | None) -> str | None:
    """The dtype that a config.json names, as safetensors has it; None where it names none of ours."""
    stated = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    return next((ours for ours, name in HF_NAMES.items() if stated in (name, f"torch.{name}")), None)
