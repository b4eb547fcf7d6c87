"""The options of every function that opens checkpoints."""

from typing import TypedDict

__all__ = ["Opening"]


class Opening(TypedDict, total=False):
    """How the files of a model are found and read. Functions that open models take these keyword arguments."""

    offline: bool
    """Use local files and the hub's cache only. The default is False."""
    allow_pickle: bool
    """Also read files that are pickles, such as PyTorch's .bin files, in a restricted process. The default is False."""
