"""Find faults of a checkpoint: in its files and index, its tensors and config, and its tokenizer.

An audit can also compare the checkpoint with the model that it was made from (the source), and check how another
program would load it. The checks are called rules: functions that return findings, listed in `RULES`. Most rules read
only the headers of weight files. They read the weights only if the caller asks for it.

If gptkit knows the model family, the checkpoint must have exactly the tensors that the family declares. Otherwise
gptkit compares the tensor names of the layers with each other.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..architectures import Architecture, architecture_of
from ..converter.compatibility import compatible_config
from ..converter.names import CONFIG
from ..converter.opening import Opening
from ..converter.resolve import Reference
from ..converter.rewrite import rewrite
from ..converter.scan import scan
from ..errors import CannotExpress, ConfigError, InvalidInput, UnknownFamily, UsageError, shown
from ..signatures import takes
from .audits.companions import compare_companions
from .audits.config import check_config
from .audits.fields import value_at, value_words, with_field
from .audits.files import check_files
from .audits.function import compare_function
from .audits.loaders import check_settings
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
_OF_CONFIG = frozenset(
    {
        *("config", "config-layers", "config-vocabulary", "config-head", "tied-head", "shape"),
        *("missing-tensor", "extra-tensor"),
    }
)
"""The rules among `READ` whose faults `fix` repairs if all tensors fit with one field of the source's config.json."""
LOADERS = ("transformers4", "transformers", "vllm", "sglang", "llama.cpp", "mlx")
"""The programs that `loader` may name. gptkit reads their code if they are installed, and has tables of rules."""


def fix(new: str | Path | Reference, out: str | Path, *, force: bool = False, **options: Any) -> Audit:
    """Write a repaired copy of a checkpoint, and return the audit of the copy.

    The repairs lose nothing. They correct tensor names and the index, include shards that no index lists, and store
    every tensor once. A missing tensor is copied from the source model if that stores it under the same name with the
    required shape; a finding of the rule "taken-from-source" then names it. A field of config.json gets the source's
    value if all tensors then fit; a finding of the rule "restored-field" names it. If `loader` is a program other than
    "transformers", config.json and tokenizer_config.json get the fields of transformers 4 too, as with `convert
    --config transformers4`. If `load` would still refuse the
    copy, nothing is written, and the audit of `new` is returned, with a finding of the rule "not-fixed" first. The copy
    appears only when it is complete.

    Args:
        new: the checkpoint: a folder, a file, or a repository on the hub.
        out: the folder to create.
        force: replace an existing checkpoint folder.
        options: further arguments of `audit`: `source`, `loader`, `values`, `device`, `progress`, `offline` and
            `allow_pickle`. The copy has safetensors, also if `new` has pickles.

    Raises:
        InvalidInput: as `audit`; also if a weight file cannot be read, or a missing tensor is only on the hub.
        UsageError: `out` exists or cannot be created.
    """
    opening: Any = {name: options[name] for name in Opening.__annotations__ if name in options}
    files = scan(new, **opening)
    if files.format not in REWRITABLE or files.resolved.is_own:
        is_own = files.resolved.is_own
        kind = "a checkpoint in gptkit's own format" if is_own else f"a checkpoint of the format {files.format}"
        hint = f"Write the model as safetensors instead: gptkit convert {files.reference} {out} --to hf"
        raise InvalidInput(f"--fix cannot repair {files.reference}, because it is {kind}", hint)
    if files.broken or not files.fetched:
        why = next(iter(files.broken.values()), f"{files.reference} is on the hub, and its weights were not downloaded")
        hint = "Download the model again." if files.broken else f"Download it first: hf download {files.reference}"
        raise InvalidInput(f"{why}. Nothing was written.", hint)
    before = audit(new, **{**options, "values": False})
    errors = dict.fromkeys(
        finding.rule for finding in before.findings if finding.severity == "error" and finding.rule in READ
    )
    missing = [finding.tensors for finding in before.findings if finding.rule == "missing-tensor"]
    in_source = all(names and set(names) <= set(before.in_source) for names in missing)
    repaired, taken = MENDED | ({"missing-tensor"} if in_source else set()), before.in_source
    restored = None if repaired.issuperset(errors) else before.restored
    if restored is not None:
        repaired, taken = MENDED | _OF_CONFIG, ()
    unrepairable, repairable = ([rule for rule in errors if (rule in repaired) == whether] for whether in (False, True))
    if unrepairable:
        message = f"nothing was written, because --fix cannot repair {' and '.join(unrepairable)}"
        message += f" (it could repair {' and '.join(repairable)})" if repairable else ""
        message += f", so gptkit could still not load {out}"
        return replace(before, findings=(Finding("not-fixed", "error", message), *before.findings))
    source = scan(options["source"], **opening) if taken else None
    if source is not None and not source.fetched:
        hint = f"Download it (hf download {source.reference} --local-dir FOLDER), and pass --source FOLDER."
        raise InvalidInput(
            f"{files.reference} lacks {counted(taken)} of {source.reference}, whose weights are on the hub "
            "and not available locally. Nothing was written.",
            hint,
        )
    names = {name: before.names.get(name, name) for name in files.tensors}
    config = None if restored is None or files.config is None else with_field(files.config, *restored)
    stated = files.config if config is None else config
    older = options.get("loader") not in (None, "transformers") and stated is not None
    family, older = _readable(stated) if older and stated is not None else (None, False)
    rewrite(files, names, out, force, config=config, other=source, from_other=taken, family=family, older=older)
    after, notes = audit(out, **options), list[Finding]()
    if restored is not None:
        path, value = restored
        words = f"{value_words(value_at(files.config, path))} → {value_words(value)}, as in {options['source']}"
        notes.append(Finding("restored-field", "note", f"{CONFIG}: {path} {words}"))
    if source is not None:
        verb, dtypes = "was" if len(taken) == 1 else "were", {info.dtype for info in files.tensors.values()}
        message = f"{counted(taken)} {verb} missing and {verb} copied from {source.reference}"
        if new_dtypes := sorted({source.tensors[name].dtype for name in taken} - dtypes):
            message += f" in the dtype {' or '.join(new_dtypes)}, which no other tensor here has"
        notes.append(Finding("taken-from-source", "note", message, taken))
    return replace(after, findings=(*after.findings, *notes))


def _readable(config: Mapping[str, Any]) -> tuple[Architecture | None, bool]:
    """Return the family of a config, if gptkit knows it, and whether the config can have the fields of transformers 4.

    If it cannot, a finding of the audit says why.
    """
    try:
        family = architecture_of(config)
    except (ConfigError, UnknownFamily):
        return None, True
    try:
        compatible_config(config, family)
    except (CannotExpress, ConfigError):
        return family, False
    return family, True


@takes(Opening)
def audit(
    new: str | Path | Reference,
    *,
    source: str | Path | Reference | None = None,
    loader: str | None = None,
    values: bool = False,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    **opening: Unpack[Opening],
) -> Audit:
    """Find the faults of a checkpoint of any family, in safetensors files, a GGUF or pickles.

    Args:
        new: the checkpoint: a folder, a file, or a repository on the hub.
        source: the checkpoint it was made from, to report missing and different tensors.
        loader: also report what this program would refuse, ignore or misread: "transformers4" (transformers 4.57),
            "transformers", "vllm", "sglang", "llama.cpp" or "mlx".
        values: read the weights, to find NaN, infinities, zeros, repetitions, and differences from the source.
        device: where to compute the logits that are compared with the source's: "cpu", "cuda" or "cuda:1"; by default
            ("auto") on a GPU if there is one.
        offline, allow_pickle: see `Opening`.
        progress: called with the number of bytes read since the last call, and the total.

    Raises:
        InvalidInput: there are no files, no tensors, or none in common with the source.
        UsageError: the loader or the device is unknown, or the values of a model that is only on the hub are requested.
        Offline: a checkpoint is not local, and there is no network.
    """
    if loader is not None and loader not in LOADERS:
        raise UsageError(
            f"--for {shown(loader, 40)}: gptkit has no rules for this program", f"known: {', '.join(LOADERS)}"
        )
    if device not in ("auto", "cpu"):  # these two always exist, and most audits need no torch
        from ..modules.devices import device_of

        device_of(device, "audit")
    files = scan(new, **opening)
    source_files = None if source is None else scan(source, **opening)
    for side in (files, source_files):
        if side is not None and values and not side.fetched:
            raise UsageError(
                f"{side.reference} is on the hub, and --values needs weights that are stored locally",
                f"Leave --values out, or download the model: hf download {side.reference}",
            )
        if side is not None and not side.tensors and not side.broken:
            raise InvalidInput(f"{side.reference} has no tensors, so there is nothing to audit")
    subject = Subject(files, source_files, loader, values, opening, progress or (lambda done, total: None), device)
    for rule in RULES:
        subject.findings.extend(rule(subject))
    order = {"error": 0, "warning": 1, "note": 2}
    findings = sorted(subject.findings, key=lambda finding: order[finding.severity])
    sizes = sum(info.nbytes for info in files.tensors.values())
    looked = subject.looked()
    return Audit(
        files.reference,
        files.revision,
        len(files.tensors),
        sizes,
        tuple(looked),
        tuple(findings),
        values,
        subject.names,
        tuple(subject.in_source),
        subject.restored,
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
    check_settings,
)
