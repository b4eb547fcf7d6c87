"""A checkpoint written again under other names, its tensors' bytes as they are, with an index of its own."""

from collections.abc import Mapping
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
    files: Scan, names: Mapping[str, str], out: str | Path, force: bool = False, config: Mapping[str, Any] | None = None
) -> None:
    """Write tensors, each under its name in `names`, in as many files as they lie in, with what lies beside them.
    `config`: what config.json is to say, by default what it does.

    Raises:
        CheckpointError: a tensor of a packed type, which cannot be moved.
        UsageError: `out` exists, or cannot be made.
    """
    found = {new: old for old, new in reversed(list(names.items()))}  # of two with one name the first
    weights = files.raw
    leaves = own_leaves((new, weights.info[old][1]) for new, old in found.items())
    source = TensorFiles(
        reference=files.reference,
        path=files.folder,
        revision=files.revision,
        format="hf",
        leaves=leaves,
        origin=Origin(reference=files.reference),
        files=tuple(files.folder / name for name in files.headers),
        _weights=weights,
        _found=found,
    )
    own = files.folder / CONFIG
    texts = {CONFIG: own.read_bytes()} if own.is_file() else {}
    texts |= {} if config is None else {CONFIG: json_bytes(config)}
    homes = {new: weights.place(old)[0] for new, old in found.items()}
    dtypes = {new: weights.info[old][0] for new, old in found.items()}
    planned = plan(leaves, dtypes, texts, companions_in(files.folder), DEFAULT_SHARD_BYTES, homes)
    staging = team().staging(Path(out), force)
    about = [(str(path), path.stat()) for path in source.files]
    staging.key = planned.digest(*((path, each.st_size, each.st_mtime_ns, each.st_ino) for path, each in about))
    with staging.reserved(), staging:
        done = team().transfer(planned, source, staging)
        origin = {"reference": source.reference, "revision": source.revision}
        staging.commit({"gptkit": __version__, "format": "hf", "source": origin}, files=done.files)
