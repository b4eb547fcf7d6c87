"""The grid of values to which a weight is rounded when it is quantised to few bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Wide


@dataclass(frozen=True)
class Grid:
    """The values that the elements of a weight [out, in] may have: zero + n · step for an integer n.

    Every group of neighbouring inputs in a row has its own step and zero point.
    """

    step: Wide  # the distance of two values, (out, groups)
    zero: Wide  # the zero point, (out, groups)
    low: int  # the smallest n
    high: int  # the largest n

    def column(self, values: Wide, number: int, width: int) -> Wide:
        """Round column `number` of a weight to the grid. `values` is (out,), and the weight has `width` columns."""
        group = number * self.step.shape[1] // width
        step, zero = self.step[:, group], self.zero[:, group]
        return np.asarray(np.clip(np.rint((values - zero) / step), self.low, self.high) * step + zero)

    def nearest(self, weight: Wide) -> Wide:
        """Round a weight [out, in] to the nearest values of the grid."""
        groups = weight.reshape(*self.step.shape, -1)
        step, zero = self.step[..., None], self.zero[..., None]
        rounded = np.clip(np.rint((groups - zero) / step), self.low, self.high) * step + zero
        return np.asarray(rounded.reshape(weight.shape))
