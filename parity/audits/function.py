"""Report the changed fields of config.json that make the model compute another function than its source."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ...analysis.aspects import aspects
from ...architectures.config import COMMON_IRRELEVANT, QUANTISED
from ...components import ModelSpec, without_rounding
from ...converter.checkpoint import Checkpoint
from ...converter.names import CONFIG
from ...errors import CannotExpress, GptkitError, InvalidInput
from ..surroundings import changed_tree
from .fields import ABSENT, changed_fields, value_words, with_field
from .subject import Finding, Subject

_MEASURED = 2 * 10**9
"""The largest size of weights, in bytes, for which the effect on logits is measured without --values."""
_SHOWN = 4


def compare_function(subject: Subject) -> Iterator[Finding]:
    """Report each field of config.json that changes the model's function, in words, and how much the logits change."""
    source = subject.origin
    if source is None:
        return
    ours, theirs = subject.spec, source.spec
    changed = changed_fields(source.files.config, subject.files.config)
    if not isinstance(ours, ModelSpec) or not isinstance(theirs, ModelSpec):
        yield from _by_name(changed)
        return
    named, measured = set[str](), 0
    resized = any(finding.rule == "vocabulary" for finding in subject.findings)
    for path, (old, new) in changed.items():
        edited = _edited(source, path, new)
        if edited == theirs:
            yield from _other_effect(source, path, old, new)
            continue
        statement = f"{CONFIG}: {path} is {value_words(new)}, but {value_words(old)} in the original model"
        words = {} if edited is None else _words(theirs, edited)
        if edited is not None and not words:
            yield Finding("rounding", "note", f"{statement}. This changes only rounding, not the function of the model")
            continue
        named |= words.keys()
        if words.keys() == {"vocabulary"} and resized:  # another rule has reported it
            continue
        effect = "" if edited is None else _effect_of_field(subject, source, edited)
        measured += 1 if effect else 0
        effects = "; ".join([*words.values()][:_SHOWN]) or "it changes the meaning of other fields"
        effect = f". With only this field changed, {effect}" if effect else ""
        remedy = "Restore the old value, unless the change is intended."
        yield Finding("function", "warning", f"{statement}: {effects}{effect}", (), remedy)
    words = _words(theirs, ours)
    remaining = [text for name, text in words.items() if name not in named]
    if remaining:
        message = f"the model computes another function than the original model: {'; '.join(remaining[: 2 * _SHOWN])}"
        yield Finding("function", "warning", message, (), "To compare the architectures: gptkit compare THIS ORIGINAL")
    explained = measured == 1 and len(changed) == 1 and not remaining
    if words.keys() - ({"vocabulary"} if resized else set()) and not explained:
        yield from _effect_of_all(subject, source)


def _edited(source: Subject, path: str, value: Any) -> ModelSpec | None:
    """Return the source's component tree with one field of its config changed; None if gptkit refuses this config."""
    if source.family is None:
        return None
    try:
        return source.family.spec(with_field(source.files.config or {}, path, value))
    except (CannotExpress, InvalidInput):
        return None


def _words(a: ModelSpec, b: ModelSpec) -> dict[str, str]:
    """Return the differences of two models as text. The keys are the aspects that differ ("attention", "norm", …).

    The result is empty if the models differ only in rounding. If no aspect shows a difference, its key is "tree".
    """
    if without_rounding(a) == without_rounding(b):
        return {}
    changed: dict[str, str] = {}
    theirs = {aspect.name: aspect for aspect in aspects(b)}
    for aspect in aspects(a):
        counterpart = theirs.pop(aspect.name, None)
        if counterpart is None or counterpart.data != aspect.data:
            same = counterpart is not None and counterpart.words == aspect.words
            changed[aspect.name] = (
                "" if same else f"{aspect.name} {aspect.words} → {counterpart.words if counterpart else 'none'}"
            )
    changed |= {name: f"{name} none → {aspect.words}" for name, aspect in theirs.items()}
    changes = [f"{change.path} {change.a} → {change.b}" for change in changed_tree(a, b) if not change.rounding]
    if not changed or not all(changed.values()):  # the short words are the same
        details = "; ".join(changes[:_SHOWN])
        changed = {name: words or f"{name} ({details})" for name, words in changed.items()} or {"tree": details}
    return changed


def _by_name(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[Finding]:
    """Report the fields that differ between two configs of a model type that gptkit does not know.

    Any of them may change the function.
    """
    for path, (old, new) in changed.items():
        if path.rpartition(".")[2] in COMMON_IRRELEVANT or path.partition(".")[0] in COMMON_IRRELEVANT:
            continue
        values = f"{path} is {value_words(new)}, but {value_words(old)} in the original model"
        message = f"{CONFIG}: {values}: it may change the function"
        yield Finding("function", "warning", message, (), "Restore the old value, unless the change is intended.")


def _other_effect(source: Subject, path: str, old: Any, new: Any) -> Iterator[Finding]:
    """Report a changed config field that does not affect the logits of the language model but something else.

    Examples are the model class, the dtype, special tokens, quantisation, or an image encoder.
    """
    statement = f"{CONFIG}: {path} is {value_words(new)}, but {value_words(old)} in the original model"
    top, key = path.partition(".")[0], path.rpartition(".")[2]
    part = source.family.part if source.family is not None else ""
    if top in QUANTISED:
        if ABSENT not in (old, new):
            yield Finding("function", "warning", f"{statement}: the stored integers represent other weights")
    elif top.endswith("_config") and top not in (part, "generation_config"):
        yield Finding(
            "function", "warning", f"{statement}: it belongs to a part of the model that gptkit does not compute"
        )
    elif key == "architectures" and new and new is not ABSENT:
        yield Finding("class", "warning", f"{statement}: programs create the model from another class")
    elif key in ("dtype", "torch_dtype"):
        yield Finding("rounding", "note", f"{statement}: programs may load the model in this dtype")
    elif key.endswith(("_token_id", "_token_ids")):
        yield Finding(
            "generation", "note", f"{statement}: it affects where generated text begins and ends, not the logits"
        )


# --- the effect on logits ---------------------------------------------------------------------------------------------


def _opened(subject: Subject, source: Subject) -> tuple[Checkpoint, Checkpoint] | None:
    """Return both checkpoints; None if one does not load or is too large to run."""
    if find_spec("torch") is None or not subject.files.fetched or not source.files.fetched:
        return None
    if not subject.values and max(_bytes(subject), _bytes(source)) > _MEASURED:
        return None
    ours, theirs = subject.checkpoint, source.checkpoint
    return (ours, theirs) if isinstance(ours, Checkpoint) and isinstance(theirs, Checkpoint) else None


def _bytes(subject: Subject) -> int:
    """Return the size of the weights in bytes."""
    return sum(info.nbytes for info in subject.files.tensors.values())


def _effect_of_field(subject: Subject, source: Subject, edited: ModelSpec) -> str:
    """Return, in words, how much the logits change if only one field of the source's config is changed.

    `edited` is the component tree for the changed config. Return "" if the models cannot be run, or if the changed
    config needs tensors with other names or shapes.
    """
    opened = _opened(subject, source)
    if opened is None:
        return ""
    theirs = opened[1]
    needed = [{(parameter.name, parameter.shape) for parameter in spec.parameters()} for spec in (edited, theirs.spec)]
    if needed[0] != needed[1]:
        return ""
    from .effect import Reweighed, effect  # here, because it imports torch

    try:
        return effect(theirs, Reweighed(edited, theirs), subject.device)
    except GptkitError:
        return ""


def _effect_of_all(subject: Subject, source: Subject) -> Iterator[Finding]:
    """Report how much the logits of the checkpoint differ from those of its source, with all changes together."""
    opened = _opened(subject, source)
    if opened is None:
        message = "the effect on logits was not measured"
        remedy = "To measure it, run this command with --values; both checkpoints must be local."
        if subject.values and subject.files.fetched and source.files.fetched:
            message += ", because one of the checkpoints cannot be loaded"
            remedy = "Repair the errors above first."
        yield Finding("function-effect", "note", message, (), remedy)
        return
    from .effect import effect  # here, because it imports torch

    try:
        yield Finding(
            "function-effect", "note", f"with all changes together, {effect(opened[1], opened[0], subject.device)}"
        )
    except GptkitError as error:
        yield Finding("function-effect", "note", f"the effect on logits was not measured: {error.message}")
