"""The rule about weight files and their index."""

from collections import defaultdict
from collections.abc import Iterator

from ...converter.names import CONFIG
from .subject import Finding, Subject


def check_files(subject: Subject) -> Iterator[Finding]:
    """Compare the weight files with one another and with their index."""
    files, (single, index) = subject.files, subject.files.own
    for name, why in files.broken.items():
        yield Finding("broken-file", "error", why, (), f"Download or write {name} again.")
    if files.index_error:
        yield Finding("broken-index", "error", files.index_error, (), "Write the index again.")
    if files.stale_index:
        message = f"{files.stale_index}; loaders read only {single}"
        yield Finding("stale-index", "warning", message, (), "Remove the older of the two.")
    if files.config_error:
        yield Finding("broken-config", "error", files.config_error, (), f"Write {CONFIG} again.")
    twice = [name for name, holders in files.holders.items() if len(holders) > 1]
    if twice:
        where = ", ".join(sorted({file for name in twice for file in files.holders[name]}))
        yield Finding("duplicate-tensor", "error", f"in more than one file: {where}", tuple(twice), "Keep one of each.")
    weights = [*files.headers, *files.broken]
    if files.index is None:
        if files.opened is None and len(weights) > 1 and single not in weights:
            yield Finding("no-index", "error", f"{len(weights)} weight files, but no {index}", (), "Write the index.")
        return
    lost: dict[str, list[str]] = defaultdict(list)
    for name, file in files.index.items():
        if file not in files.broken and name not in getattr(files.headers.get(file), "tensors", ()):
            lost[file].append(name)
    for file, names in lost.items():
        what = "does not hold" if file in files.headers else "is not there to hold"
        message = f"{file} {what} what the index says lies in it"
        yield Finding("dangling-index", "error", message, tuple(names), f"Download or write {file} again.")
    listed = set(files.index.values())
    for file, header in files.headers.items():
        unlisted = tuple(name for name in header.tensors if name not in files.index)
        if file not in listed and file != single:
            message = f"the index lists no tensor of {file}, so no loader reads this file"
            yield Finding("unlisted-file", "warning", message, unlisted, "Add it to the index, or remove it.")
        elif unlisted:
            message = f"in {file}, but not in the index, so no loader reads them"
            yield Finding("unlisted-tensor", "error", message, unlisted, "Add them to the index.")
    held = sum(info.nbytes for header in files.headers.values() for info in header.tensors.values())
    if files.total_size is not None and files.total_size != held and not files.broken and not lost:
        message = f"the index gives a total size of {files.total_size:,} bytes, but the tensors have {held:,}"
        yield Finding("index-size", "warning", message, (), "Write the index again.")
