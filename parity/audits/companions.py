"""Compare the small files in a checkpoint's folder with the source's: tokenizer, chat template, licence and so on."""

from collections.abc import Iterator

from ...converter.companions import companions_in, is_licence
from ...converter.scan import FileScan
from ...errors import InvalidInput
from ..surroundings import bytes_of, what_differs
from .subject import Finding, Subject


def compare_companions(subject: Subject) -> Iterator[Finding]:
    """Report small files that the source (the original model) has and this checkpoint lacks, or that differ."""
    if subject.source is None or "gguf" in (subject.files.format, subject.source.format):
        return
    ours, theirs = _companions(subject.files), _companions(subject.source)
    missing = [name for name in theirs if name not in ours]
    for names, severity in (
        ([name for name in missing if not is_licence(name)], "warning"),
        ([name for name in missing if is_licence(name)], "note"),
    ):
        if names:
            message = f"{', '.join(names)}: missing here, but in the folder of the original model"
            yield Finding("lost-file", severity, message, (), "Copy these files from the folder of the original model.")  # type: ignore[arg-type]
    for name in theirs:
        differences = what_differs(name, theirs[name], ours[name]) if name in ours else None
        if differences is not None:
            message = (
                f"{name} differs from the original model's{': ' if differences else ''}{'; '.join(differences[:3])}"
            )
            yield Finding("changed-file", "note", message)


def _companions(files: FileScan) -> dict[str, bytes]:
    """Return the contents of the small files in the folder (tokenizer, chat template, licence, …) by file name."""
    try:
        return {companion.name: bytes_of(companion.path) for companion in companions_in(files.folder)}
    except InvalidInput:
        return {}
