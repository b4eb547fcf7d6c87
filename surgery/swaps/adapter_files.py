"""Find an adapter's files: its config, and its weights as peft or mlx-lm saves them."""

from collections.abc import Callable
from pathlib import Path

from ...converter.files import sha256_file
from ...converter.index import single
from ...converter.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, refuse_pointer, untrusted
from ...converter.pickles import arrays, pickle_weights
from ...converter.safetensors import read_header
from ...converter.weights import Weights
from ...errors import InvalidInput, Offline

_PICKLE = "adapter_model.bin"
_MLX = "adapters.safetensors"
_MLX_OLD = "adapters.npz"


def _safetensors(path: Path) -> Weights:
    return Weights(single(path, read_header(path)).tensors)


def _npz(path: Path) -> Weights:
    weights = Weights(arrays(path))
    weights.check()
    return weights


_READERS: dict[str, Callable[[Path], Weights]] = {
    ADAPTER_WEIGHTS: _safetensors,
    _MLX: _safetensors,
    _MLX_OLD: _npz,
    _PICKLE: lambda path: pickle_weights([path]),
}
"""The readers for files with an adapter's weights, by file name. The preferred file comes first."""


def open_files(reference: str, *, offline: bool = False, allow_pickle: bool = False) -> tuple[Path, Weights, str]:
    """Return the path of an adapter's config, its opened tensors, and the sha256 of the file with the tensors.

    `reference` is a folder, or a repository on the hub (org/name, org/name@revision). Raises InvalidInput if there is
    no adapter or a file is damaged, UntrustedInput if the adapter is a pickle and `allow_pickle` is False, and Offline
    if the adapter is on the hub and there is no network.
    """
    path_of = _finder(reference, offline)
    config = path_of(ADAPTER_CONFIG)
    if config is None:
        raise InvalidInput(f"{reference} is not an adapter: it has no {ADAPTER_CONFIG}")
    for name, read in _READERS.items():
        path = path_of(name)
        if path is None:
            continue
        if name == _PICKLE:
            refuse_pointer(path)
            if not allow_pickle:
                raise untrusted(path, "Pass --allow-pickle if you trust where it comes from.")
        return config, read(path), sha256_file(path)
    raise InvalidInput(
        f"{reference} has no {ADAPTER_WEIGHTS}",
        f"Give a folder with the adapter's weights: {ADAPTER_WEIGHTS} of PEFT, or {_MLX} of mlx-lm.",
    )


def _finder(reference: str, offline: bool) -> Callable[[str], Path | None]:
    """Return a function that finds a file of the adapter by its file name. It returns the path, or None without one."""
    from huggingface_hub import constants

    from ...converter.hub import Repository

    folder = Path(reference).expanduser()
    if folder.is_dir():
        return lambda name: folder / name if (folder / name).is_file() else None
    repo, _, revision = reference.removeprefix("hf://").partition("@")
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        raise InvalidInput(f"no such folder: {reference}", "For an adapter on the hub, write org/name.")
    cached = Repository(repo, revision or None, "", online=False)  # whichever commit the cache has
    hub = cached if offline or constants.HF_HUB_OFFLINE else Repository.open(repo, revision or None)
    if not hub.commit and hub.cached(ADAPTER_CONFIG, hub.revision) is None:
        raise Offline(f"{repo} is not in the local cache, and --offline is set", "Leave --offline out.")
    return lambda name: hub.fetch(name) if hub.commit else hub.cached(name, hub.revision)
