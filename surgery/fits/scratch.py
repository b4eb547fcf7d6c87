"""Fitted arrays that are computed on first use, and are stored on disk until they are written."""

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
    """The results of a fit to a model, by name.

    `fit` yields groups of arrays by name, in any order. It runs once, on the model whose tensor is requested first. The
    folder is deleted with the object.
    """

    def __init__(self, fit: Callable[[Model], Iterator[Mapping[str, Wide]]]) -> None:
        self._fit = fit
        self._folder: Path | None = None
        self._files: dict[str, Path] = {}

    @classmethod
    def by(cls, name: str, *given: Any) -> Scratch:
        """Return the results of a function of this folder ("feed_forward.downs"), which is imported on first use."""
        module, _, function = name.partition(".")
        return cls(lambda model: getattr(import_module(f".{module}", __package__), function)(model, *given))

    def waiting(self, names: Iterable[str]) -> dict[str, Computed]:
        """Return recipes for tensors that are fitted when one of them is requested."""
        return {name: Computed(lambda model, name=name: self.of(model, name)) for name in names}  # type: ignore[misc]

    def of(self, model: Model, name: str) -> Wide:
        """Return one array of the fit to a model."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gptkit-fit-"))
            weakref.finalize(self, shutil.rmtree, self._folder)
            import torch

            # The first read may be in inference mode, whose tensors a fit cannot use.
            with torch.inference_mode(False), torch.no_grad():
                for group in self._fit(model):
                    for key, array in group.items():
                        path = self._folder / f"{len(self._files)}.npy"
                        np.save(path, array)
                        self._files[key] = path
        stored: Wide = np.load(self._files[name])
        return stored
