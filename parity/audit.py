"""Find faults of a checkpoint: in its files and index, its tensors and config, and its tokenizer.

It can also be compared with the source it was made from, and with the program that is to load it. Most rules only need
headers; values are read if the caller asks for it. A rule is a function from a subject to findings; `RULES` lists all
rules. A checkpoint of a known family must match its declaration exactly. In an unknown family the tensor names are
compared with each other.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..converter.resolve import Reference
from ..converter.rewrite import rewrite
from ..converter.scan import scan
from ..errors import InvalidInput, UsageError, shown
from .audits.companions import compare_companions
from .audits.config import check_config
from .audits.files import check_files
from .audits.function import compare_function
from .audits.names import counted
from .audits.programs import ask_program
from .audits.reader import READ, check_reader
from .audits.source import compare_with_source
from .audits.subject import REWRITABLE, Audit, Finding, Subject
from .audits.tree import check_gguf, check_layers, check_tree
from .audits.values import check_values
from .audits.vocabulary import check_vocabulary

MENDED = frozenset({"no-index", "broken-index", "dangling-index", "unlisted-tensor", "duplicate-tensor", "other-name"})
"""The rules among `READ` whose faults `fix` always repairs. It repairs "missing-tensor" only from a source."""
_LOADERS = ("transformers", "llama.cpp", "vllm")
"""The programs that `loader` may name. gptkit uses their own code to find out what they would do."""


def fix(
    new: str | Path | Reference,
    out: str | Path,
    *,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> Audit:
    """Write a repaired copy of a checkpoint. The repairs lose nothing: names, the index, shards that no index lists,
    tensors that are stored twice, and missing tensors that `source` stores under the same name with the required shape.

    The copy is published as every conversion is. Returns the audit of the copy. The rule "taken-from-source" names the
    tensors that come from the source. If `load` would still refuse the copy, nothing is written, and the audit of `new`
    is returned, with a finding of the rule "not-fixed" first.

    Args:
        new: the checkpoint, as everywhere.
        out: the folder to make.
        force: replace an existing checkpoint folder.
        offline: look in local files and the hub's cache alone.
        allow_pickle: read pickles too; what is written are safetensors.
        options: the others of `audit`.

    Raises:
        InvalidInput: as `audit`; a weight file cannot be read, so that its tensors would be lost; the source has a
            missing tensor but is on the hub.
        UsageError: `out` exists or cannot be made.
    """
    files = scan(new, offline=offline, allow_pickle=allow_pickle)
    if files.format not in REWRITABLE or files.found.is_own:
        own = files.found.is_own
        kind = "a checkpoint in gptkit's own format" if own else f"a checkpoint of the format {files.format}"
        hint = f"Write the model as safetensors instead: gptkit convert {files.reference} {out} --to hf"
        raise InvalidInput(f"--fix cannot repair {files.reference}, because it is {kind}", hint)
    if files.broken or not files.fetched:
        why = next(iter(files.broken.values()), f"{files.reference} is on the hub, and its weights were not downloaded")
        hint = "Download the model again." if files.broken else f"Download it first: hf download {files.reference}"
        raise InvalidInput(f"{why}. Nothing was written.", hint)
    more: dict[str, Any] = {"offline": offline, "allow_pickle": allow_pickle}
    before = audit(new, **more, **{**options, "values": False})
    errors = dict.fromkeys(each.rule for each in before.findings if each.severity == "error" and each.rule in READ)
    missing = [each.tensors for each in before.findings if each.rule == "missing-tensor"]
    in_source = all(names and set(names) <= set(before.in_source) for names in missing)
    repaired = MENDED | ({"missing-tensor"} if in_source else set())
    hopeless, mended = ([rule for rule in errors if (rule in repaired) == whether] for whether in (False, True))
    if hopeless:
        message = f"nothing was written, because --fix cannot repair {' and '.join(hopeless)}"
        message += f" (it could repair {' and '.join(mended)})" if mended else ""
        message += f", so gptkit could still not load {out}"
        return replace(before, findings=(Finding("not-fixed", "error", message), *before.findings))
    other = scan(options["source"], **more) if before.in_source else None
    if other is not None and not other.fetched:
        hint = f"Download it (hf download {other.reference} --local-dir FOLDER), and pass --source FOLDER."
        raise InvalidInput(
            f"{other.reference} has {counted(before.in_source)} that {files.reference} lacks, but it is on the hub, "
            "and its weights are not available locally. Nothing was written.",
            hint,
        )
    names = {name: before.names.get(name, name) for name in files.tensors}
    rewrite(files, names, out, force, other=other, from_other=before.in_source)
    after = audit(out, **more, **options)
    if other is None:
        return after
    was, dtypes = "was" if len(before.in_source) == 1 else "were", {each.dtype for each in files.tensors.values()}
    message = f"{counted(before.in_source)} {was} missing and {was} copied from {other.reference}"
    if odd := sorted({other.tensors[name].dtype for name in before.in_source} - dtypes):
        message += f" in the dtype {' or '.join(odd)}, which no other tensor here has"
    taken = Finding("taken-from-source", "note", message, before.in_source)
    return replace(after, findings=(*after.findings, taken))


def audit(
    new: str | Path | Reference,
    *,
    source: str | Path | Reference | None = None,
    loader: str | None = None,
    values: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Find what is wrong with a checkpoint of safetensors files, a GGUF or pickles, of whatever family.

    Args:
        new: the checkpoint, as everywhere.
        source: another one that it was made from: what it lacks, and what is different in it, is told.
        loader: a program of `_LOADERS` that is to load it: what it would ignore, rename or draw at random.
        values: read the weights: NaN, infinities, zeros, repetitions, and with a source every difference.
        offline: look in local files and the hub's cache alone.
        allow_pickle: read pickles too (weights only).
        progress: called with the bytes that were read just now, and of all.

    Raises:
        InvalidInput: there is nothing to audit: no such files, no tensor in them, none in common with the source.
        UsageError: an unknown loader; values of a repository, which are not here.
        Offline: one is not here and there is no network.
    """
    if loader is not None and loader not in _LOADERS:
        raise UsageError(
            f"--for {shown(loader, 40)}: gptkit has no rules for this program", f"known: {', '.join(_LOADERS)}"
        )
    opening = {"offline": offline, "allow_pickle": allow_pickle}
    found = scan(new, **opening)
    other = None if source is None else scan(source, **opening)
    for each in (found, other):
        if each is not None and values and not each.fetched:
            raise UsageError(
                f"{each.reference} is on the hub, and --values needs weights that are stored locally",
                f"Leave --values out, or download the model: hf download {each.reference}",
            )
        if each is not None and not each.tensors and not each.broken:
            raise InvalidInput(f"{each.reference} has no tensors, so there is nothing to audit")
    subject = Subject(found, other, loader, values, opening, progress or (lambda done, total: None))
    for rule in RULES:
        subject.findings.extend(rule(subject))
    order = {"error": 0, "warning": 1, "note": 2}
    findings = sorted(subject.findings, key=lambda finding: order[finding.severity])
    sizes = sum(info.nbytes for info in found.tensors.values())
    looked = subject.looked()
    return Audit(
        found.reference,
        found.revision,
        len(found.tensors),
        sizes,
        tuple(looked),
        tuple(findings),
        values,
        subject.names,
        tuple(subject.in_source),
    )


RULES: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    check_files,
    check_tree,
    check_gguf,
    check_layers,
    check_config,
    check_vocabulary,
    check_reader,
    check_values,
    compare_with_source,
    compare_companions,
    compare_function,
    ask_program,
)
