"""The values that a weight of few bits may have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Wide


@dataclass(frozen=True)
class Grid:
    """The values that the elements of a weight [out, in] may have: integer steps from a zero point."""

    step: Wide  # (out, groups), for every group of neighbouring inputs in a row
    zero: Wide  # (out, groups)
    low: int  # the least number of steps
    high: int  # the largest number of steps

    def column(self, values: Wide, number: int, width: int) -> Wide:
        """Return the nearest values of the grid to those of input `number` (out,), of a weight of `width` inputs."""
        group = number * self.step.shape[1] // width
        step, zero = self.step[:, group], self.zero[:, group]
        return np.asarray(np.clip(np.rint((values - zero) / step), self.low, self.high) * step + zero)

    def nearest(self, weight: Wide) -> Wide:
        """Return the nearest weight [out, in] on the grid."""
        groups = weight.reshape(*self.step.shape, -1)
        step, zero = self.step[..., None], self.zero[..., None]
        rounded = np.clip(np.rint((groups - zero) / step), self.low, self.high) * step + zero
        return np.asarray(rounded.reshape(weight.shape))
