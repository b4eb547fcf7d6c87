"""What a swap is: a new tree, and for each of its tensors either where it is copied from or how it is computed.

Nothing is computed before the result is written, one tensor at a time, in fp64. A swap declares what it guarantees:

exact        the same function; what is left is rounding, and is measured from the files that were written
approximate  the best closed form there is; the damage is measured and reported
retrained    useless before training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..converter.checkpoint import Checkpoint
from ..converter.dtypes import to_float64
from ..errors import InvalidInput
from ..spec import ModelSpec

__all__ = ["Guarantee", "Reader", "Swapped"]

Guarantee = Literal["exact", "approximate", "retrained"]
Wide = NDArray[np.float64]


class Reader:
    """The tensors of the tree a swap starts from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        """As stored: (array in its carrier dtype, dtype)."""
        return self.checkpoint.tensor(name)

    def wide(self, name: str) -> Wide:
        """In fp64.

        Raises:
            InvalidInput: it holds NaN or infinity, which nothing can be computed from.

        """
        values = to_float64(*self.raw(name))
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise InvalidInput(f"{self.checkpoint.reference}: weights are not finite: {name} ({bad:,} values)")
        return values


@dataclass(frozen=True)
class Swapped:
    """A tree and its tensors, not yet computed.

    computed: shared name -> the function that gives its fp64 values.
    copied: shared name -> the name of the tensor it is, in the old tree. Names in neither are copied under their own.
    summary: what was done, for the record the output carries.
    """

    spec: ModelSpec
    guarantee: Guarantee
    summary: dict[str, Any]
    computed: Mapping[str, Callable[[Reader], Wide]]
    copied: Mapping[str, str] = field(default_factory=dict)
