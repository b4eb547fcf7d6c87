"""Write a copy of a checkpoint with other tensor names. The bytes of the tensors stay the same."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..architectures import Architecture
from ..version import __version__
from .companions import companions_in
from .compatibility import compatible_files
from .distributed import team
from .names import CONFIG, json_bytes
from .scan import FileScan
from .tree import Origin
from .weights import TensorFiles, own_leaves
from .write import DEFAULT_SHARD_BYTES, plan


def rewrite(
    files: FileScan,
    names: Mapping[str, str],
    out: str | Path,
    force: bool = False,
    config: Mapping[str, Any] | None = None,
    other: FileScan | None = None,
    from_other: Collection[str] = (),
    family: Architecture | None = None,
    older: bool = False,
) -> None:
    """Write tensors under new names, in the same number of files, and copy the other files.

    Args:
        files: the headers and files of the checkpoint.
        names: the new name of every tensor that is written, by its old name.
        out: the folder to make.
        force: replace an existing checkpoint folder.
        config: the new config.json; by default the old one is copied.
        other: another checkpoint, from which tensors are added.
        from_other: the names of the tensors to add, which keep their names. They are written into the weight file of
            `files` if there is only one. Otherwise they are written into files of their own.
        family: the family of the config.json, if it is known.
        older: whether programs for transformers 4 have to read config.json and tokenizer_config.json too.

    Raises:
        CheckpointError: a tensor has a packed dtype (4 or 6 bits), which gptkit cannot copy.
        UsageError: `out` exists, or cannot be made.
    """
    old_names = {new: old for old, new in reversed(list(names.items()))}  # the first of two tensors with the same name
    weights = files.raw
    added = {} if other is None else other.raw.some(from_other)
    if added:
        weights = weights.with_more(added)
        old_names |= {name: name for name in added}
    leaves = own_leaves((new, weights.info[old][1]) for new, old in old_names.items())
    source = TensorFiles(
        reference=files.reference,
        path=files.folder,
        revision=files.revision,
        format="hf",
        leaves=leaves,
        origin=Origin(reference=files.reference),
        files=tuple(
            dict.fromkeys(
                (
                    *(files.folder / name for name in files.headers),
                    *(tensor.path for tensor in added.values() if tensor.path is not None),
                )
            )
        ),
        _weights=weights,
        _names=old_names,
    )
    config_path = files.folder / CONFIG
    texts = {CONFIG: config_path.read_bytes()} if config_path.is_file() else {}
    texts |= {} if config is None else {CONFIG: json_bytes(config)}
    file_of = {new: weights.place(old)[0] for new, old in old_names.items()}
    weight_files = {file_of[name] for name in file_of if name not in added}
    if len(weight_files) == 1:
        file_of |= dict.fromkeys(added, weight_files.pop())
    dtypes = {new: weights.info[old][0] for new, old in old_names.items()}
    beside = companions_in(files.folder)
    if older:
        texts, beside = compatible_files(texts, beside, family)
    planned = plan(leaves, dtypes, texts, beside, DEFAULT_SHARD_BYTES, file_of)
    staging = team().staging(Path(out), force)
    stats = [(str(path), path.stat()) for path in source.files]
    staging.key = planned.digest(*((path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats))
    with staging.reserved(), staging:
        transferred = team().transfer(planned, source, staging)
        origin = {"reference": source.reference, "revision": source.revision}
        staging.commit({"gptkit": __version__, "format": "hf", "source": origin}, files=transferred.files)
