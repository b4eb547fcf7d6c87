"""A checkpoint written again under other names, its tensors' bytes as they are, with an index of its own."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..version import __version__
from .companions import companions_in
from .distributed import team
from .names import CONFIG, json_bytes
from .scan import Scan
from .tree import Origin
from .weights import TensorFiles, own_leaves
from .write import DEFAULT_SHARD_BYTES, plan


def rewrite(
    files: Scan,
    names: Mapping[str, str],
    out: str | Path,
    force: bool = False,
    config: Mapping[str, Any] | None = None,
    other: Scan | None = None,
    from_other: Collection[str] = (),
) -> None:
    """Write tensors, each under its name in `names`, in as many files as they lie in, with what lies beside them.
    `config`: what config.json is to say, by default what it does.

    from_other: the tensors that are copied from the checkpoint `other`, under the names that they have there. They join
        the weight file of `files` if there is only one. Otherwise they are written to files of their own.

    Raises:
        CheckpointError: a tensor of a packed type, which cannot be moved.
        UsageError: `out` exists, or cannot be made.
    """
    found = {new: old for old, new in reversed(list(names.items()))}  # of two with one name the first
    weights = files.raw
    taken = {} if other is None else other.raw.some(from_other)
    if taken:
        weights = weights.with_more(taken)
        found |= {name: name for name in taken}
    leaves = own_leaves((new, weights.info[old][1]) for new, old in found.items())
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
                    *(each.path for each in taken.values() if each.path is not None),
                )
            )
        ),
        _weights=weights,
        _found=found,
    )
    own = files.folder / CONFIG
    texts = {CONFIG: own.read_bytes()} if own.is_file() else {}
    texts |= {} if config is None else {CONFIG: json_bytes(config)}
    homes = {new: weights.place(old)[0] for new, old in found.items()}
    own_files = {homes[name] for name in homes if name not in taken}
    if len(own_files) == 1:
        homes |= dict.fromkeys(taken, own_files.pop())
    dtypes = {new: weights.info[old][0] for new, old in found.items()}
    planned = plan(leaves, dtypes, texts, companions_in(files.folder), DEFAULT_SHARD_BYTES, homes)
    staging = team().staging(Path(out), force)
    about = [(str(path), path.stat()) for path in source.files]
    staging.key = planned.digest(*((path, each.st_size, each.st_mtime_ns, each.st_ino) for path, each in about))
    with staging.reserved(), staging:
        done = team().transfer(planned, source, staging)
        origin = {"reference": source.reference, "revision": source.revision}
        staging.commit({"gptkit": __version__, "format": "hf", "source": origin}, files=done.files)
