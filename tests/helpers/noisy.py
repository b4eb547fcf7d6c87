"""A tree whose weights are in memory: those that training starts with, and some noise on each."""

import numpy as np

from gptkit.components import ModelSpec
from gptkit.modules.initialise import initialised


class Noisy:
    """The tree as a swap takes it."""

    reference = "noisy"

    def __init__(self, spec: ModelSpec) -> None:
        rng, started = np.random.default_rng(0), initialised(spec, 0, "F64")
        self.spec = spec
        self.arrays = {name: np.array(array) + 0.02 * rng.normal(size=array.shape) for name, array, _ in started}

    def dtype(self, name: str) -> str:
        return "F64"

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        return self.wide(name), "F64"

    def wide(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def release(self) -> None:
        pass
