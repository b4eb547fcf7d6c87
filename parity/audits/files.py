"""Check the weight files and their index (model.safetensors.index.json)."""

from collections import defaultdict
from collections.abc import Iterator

from ...converter.names import CONFIG
from .subject import Finding, Subject


def check_files(subject: Subject) -> Iterator[Finding]:
    """Report damaged weight files, tensors that are in several files, and faults of the index."""
    files, (single, index) = subject.files, subject.files.own
    for name, why in files.broken.items():
        remedy = f"Download {name} again, or save the model again with the program that wrote it."
        yield Finding("broken-file", "error", why, (), remedy)
    if files.index_error:
        yield Finding(
            "broken-index", "error", files.index_error, (), "Write a repaired copy: run this command with --fix OUT."
        )
    if files.stale_index:
        message = f"{files.stale_index}; programs read only {single}"
        remedy = f"Remove {index} if {single} is the current model, or {single} if it is not."
        yield Finding("stale-index", "warning", message, (), remedy)
    if files.config_error:
        message = files.config_error
        yield Finding(
            "broken-config", "error", message, (), f"Correct {CONFIG}, or copy it again from the original model."
        )
    twice = [name for name, holders in files.holders.items() if len(holders) > 1]
    if twice:
        where = ", ".join(sorted({file for name in twice for file in files.holders[name]}))
        message = f"the same tensors are in more than one file: {where}"
        remedy = "Write a repaired copy: run this command with --fix OUT."
        yield Finding("duplicate-tensor", "error", message, tuple(twice), remedy)
    weights = [*files.headers, *files.broken]
    if files.index is None:
        if files.opened is None and len(weights) > 1 and single not in weights:
            message = f"{len(weights)} weight files, but no {index}"
            yield Finding("no-index", "error", message, (), "Write a repaired copy: run this command with --fix OUT.")
        return
    lost: dict[str, list[str]] = defaultdict(list)
    for name, file in files.index.items():
        if file not in files.broken and name not in getattr(files.headers.get(file), "tensors", ()):
            lost[file].append(name)
    for file, names in lost.items():
        problem = "does not contain" if file in files.headers else "is missing, and should contain"
        message = f"{file} {problem} the tensors that {index} lists for it"
        remedy = f"Download {file} again, or save the model again with the program that wrote it."
        yield Finding("dangling-index", "error", message, tuple(names), remedy)
    listed = set(files.index.values())
    for file, header in files.headers.items():
        unlisted = tuple(name for name in header.tensors if name not in files.index)
        if file not in listed and file != single:
            message = f"{index} lists no tensor of {file}, so programs do not read this file"
            yield Finding(
                "unlisted-file", "warning", message, unlisted, f"Add its tensors to {index}, or remove {file}."
            )
        elif unlisted:
            message = f"these tensors are in {file}, but not in {index}, so programs do not read them"
            yield Finding(
                "unlisted-tensor", "error", message, unlisted, "Write a repaired copy: run this command with --fix OUT."
            )
    total = sum(info.nbytes for header in files.headers.values() for info in header.tensors.values())
    if files.total_size is not None and files.total_size != total and not files.broken and not lost:
        message = f"{index} states a total_size of {files.total_size:,} bytes, but the tensors have {total:,}"
        yield Finding(
            "index-size", "warning", message, (), f"Correct metadata.total_size in {index}: it should be {total}."
        )
