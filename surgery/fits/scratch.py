"""The results of fits. A fit runs when one of its results is first needed, and stores all results on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..base import Computed, Model, Wide


class Scratch:
    """The arrays that a fit computes, by name. They are stored in a temporary folder.

    `fit` is a function of the model that yields groups of arrays by name, in any order. It runs once, when an array is
    first requested. The folder is deleted together with this object.
    """

    def __init__(self, fit: Callable[[Model], Iterator[Mapping[str, Wide]]]) -> None:
        self._fit = fit
        self._folder: Path | None = None
        self._files: dict[str, Path] = {}

    @classmethod
    def by(cls, name: str, *given: Any) -> Scratch:
        """Prepare a fit that runs when a result is first requested.

        Args:
            name: A function in `surgery/fits`, such as "feed_forward.downs". It is imported only when it runs.
            given: The arguments of the function after the model.
        """
        module, _, function = name.partition(".")
        return cls(lambda model: getattr(import_module(f".{module}", __package__), function)(model, *given))

    def waiting(self, names: Iterable[str]) -> dict[str, Computed]:
        """Return some of the fit's arrays as tensors of a swap. The fit runs when one of them is first computed."""
        return {name: Computed(lambda model, name=name: self.of(model, name)) for name in names}  # type: ignore[misc]

    def of(self, model: Model, name: str) -> Wide:
        """Return one array by its name. If the fit has not run yet, it runs on `model`."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gptkit-fit-"))
            weakref.finalize(self, shutil.rmtree, self._folder)
            import torch

            # The first request may come in inference mode. A fit cannot use tensors made in that mode.
            with torch.inference_mode(False), torch.no_grad():
                for group in self._fit(model):
                    for key, array in group.items():
                        path = self._folder / f"{len(self._files)}.npy"
                        np.save(path, array)
                        self._files[key] = path
        stored: Wide = np.load(self._files[name])
        return stored
