"""Compare the tensors of a checkpoint with those of the model that it was made from (its source)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ...components import ModelSpec
from ...converter.checkpoint import Checkpoint, open_checkpoint
from ...converter.dtypes import FLOATS
from ...converter.matching import Match
from ...converter.scan import FileScan
from ...errors import InvalidInput
from .names import counted, folded, matched
from .subject import SAVE_AGAIN, Finding, Severity, Subject
from .vocabulary import compare_vocabulary, resized

_PART = 2**20


def compare_with_source(subject: Subject) -> Iterator[Finding]:
    """Report tensors that differ from the source's, and tensors that only one of the two has.

    A tensor that is only stored under another name is reported as renamed.
    """
    if subject.source is None or subject.origin is None:
        return
    formats = {subject.files.format, subject.source.format}
    trees = isinstance(subject.spec, ModelSpec) and isinstance(subject.origin.spec, ModelSpec)
    if (trees and _naming(subject) != _naming(subject.origin)) or ("gguf" in formats and len(formats) > 1):
        yield from _across(subject, subject.source)
        return
    ours, theirs = subject.files.tensors, subject.source.tensors

    def same(name: str, source_name: str) -> bool:
        return not subject.values or _same(subject, name, source_name)

    shapes = [{name: info.shape for name, info in side.items()} for side in (ours, theirs)]
    moved = matched(shapes[0], shapes[1], same)
    source_names = [name for names, _ in moved.values() for name in names]
    missing = [name for name in theirs if name not in ours and name not in source_names]
    extra = [name for name in ours if name not in theirs and name not in moved]
    both = [name for name in theirs if name in ours]
    if not both and not moved:
        raise InvalidInput(
            f"{subject.files.reference} and {subject.source.reference} have no tensor in common",
            "Give --source the model from which this checkpoint was made.",
        )
    reported = {name for finding in subject.findings if finding.rule == "missing-tensor" for name in finding.tensors}
    missing = [name for name in missing if name not in reported]
    if missing:
        message = f"missing: {counted(missing)} of the {len(theirs):,} in the original model"
        yield Finding("lost-tensor", "error", message, tuple(missing), SAVE_AGAIN)
    if extra:
        message = f"{counted(extra)} that the original model does not have"
        yield Finding(
            "added-tensor", "warning", message, tuple(extra), "Remove these tensors, unless they were added on purpose."
        )
    if moved:
        shown = [f"{' + '.join(names)} → {name}{f' ({how})' if how else ''}" for name, (names, how) in moved.items()]
        pairs = "; ".join(folded(shown)[:3])
        yield Finding(
            "renamed-tensor", "note", f"stored under another name than in the original model: {pairs}", tuple(moved)
        )
    yield from _changed_tensors(subject, subject.origin, both)


def _changed_tensors(subject: Subject, source: Subject, both: Sequence[str]) -> Iterator[Finding]:
    """Report tensors whose shape, dtype or values differ from the source's. `both` are the names that both have."""
    ours, theirs = subject.files.tensors, source.files.tensors
    shaped = [name for name in both if ours[name].shape != theirs[name].shape]
    vocabulary = resized(subject, source, shaped)
    if vocabulary:
        yield from compare_vocabulary(subject, source, vocabulary)
    for name in shaped:
        if name in vocabulary:
            continue
        message = f"has the shape {list(ours[name].shape)}, but {list(theirs[name].shape)} in the original model"
        yield Finding("source-shape", "error", message, (name,), SAVE_AGAIN)
    typed = defaultdict(list)
    for name in both:
        if ours[name].dtype != theirs[name].dtype:
            typed[theirs[name].dtype, ours[name].dtype].append(name)
    for (before, after), names in typed.items():
        narrower = FLOATS.index(after) < FLOATS.index(before) if {before, after} <= {*FLOATS} else True
        severity: Severity = "warning" if narrower else "note"
        yield Finding(
            "source-dtype", severity, f"stored as {after}, but as {before} in the original model", tuple(names)
        )
    if subject.values:
        alike = [name for name in both if name not in shaped and ours[name].dtype == theirs[name].dtype]
        changed = [name for name in alike if not _same(subject, name, name)]
        if changed:
            message = f"{counted(changed)} with other values than in the original model"
            remedy = "To see how much they differ: gptkit diff ORIGINAL THIS"
            yield Finding("source-value", "error", message, tuple(changed), remedy)


def _naming(subject: Subject) -> str:
    """Return "family" if the tensors are named as the model family declares, else the file format that names them."""
    files = subject.files
    naming = files.resolved.format if files.opened is None else files.opened.format or files.format
    return str(naming) if subject.family is None else "family"


def _across(subject: Subject, source: FileScan) -> Iterator[Finding]:
    """Compare a checkpoint with a source that names its tensors differently, such as a GGUF with a safetensors folder.

    Both are compared under gptkit's own parameter names.
    """
    shapes, sides = [], []
    for side in (source.reference, subject.files.reference):
        try:
            opened = open_checkpoint(side, headers_only=True, partial=True, **subject.opening)
        except InvalidInput as error:
            if side == source.reference:
                raise
            yield Finding("not-compared", "error", f"not compared with the original model: {error.message}")
            return
        pairs = [pair for leaf in opened.leaves for pair in zip(leaf.shared, leaf.shared_shapes, strict=True)]
        shapes.append(dict(pairs))
        sides.append(opened)
    theirs, ours = shapes
    reported = {name for finding in subject.findings if finding.rule == "missing-tensor" for name in finding.tensors}
    declared = subject.match.declared if isinstance(subject.match, Match) else {}
    required = {shared for name in reported & declared.keys() for shared in declared[name].shared}
    lost = tuple(name for name in theirs if name not in ours and name not in required)
    if lost:
        message = f"missing: {counted(lost)} of the {len(theirs):,} in the original model (compared by name)"
        remedy = "Convert the original model again with the program that made this file."
        yield Finding("lost-tensor", "error", message, lost, remedy)
    for name in theirs.keys() & ours.keys():
        if ours[name] != theirs[name]:
            message = f"has the shape {list(ours[name])}, but {list(theirs[name])} in the original model"
            remedy = "Convert the original model again with the program that made this file."
            yield Finding("source-shape", "error", message, (name,), remedy)
    if subject.values:
        both = [name for name in theirs if ours.get(name) == theirs[name]]
        if changed := tuple(name for name in both if not _equal(sides, name)):
            message = (
                f"{counted(changed)} with other values than in the original model, although both have the same dtype"
            )
            yield Finding(
                "source-value", "error", message, changed, "To see how much they differ: gptkit diff ORIGINAL THIS"
            )


def _equal(sides: Sequence[Checkpoint], name: str) -> bool:
    """Return whether the tensor `name` has the same bytes in two checkpoints (`sides`).

    If it has different dtypes in them, the bytes are not compared, and the result is True.
    """
    (x, dtype), (y, other_dtype) = (side.tensor(name) for side in sides)
    equal = dtype != other_dtype or np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()
    for side in sides:
        side.release()
    return equal


def _same(subject: Subject, name: str, source_name: str) -> bool:
    """Return whether a tensor has the same bytes as a tensor of the source."""
    assert subject.source is not None
    x, y = (side.weights.read(key).reshape(-1) for side, key in ((subject.files, name), (subject.source, source_name)))
    equal = all(
        np.array_equal(x[at : at + _PART].view(np.uint8), y[at : at + _PART].view(np.uint8))
        for at in range(0, x.size, _PART)
    )
    subject.files.weights.release()
    subject.source.weights.release()
    return equal
