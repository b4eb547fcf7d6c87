"""Linear weights rounded to few bits on a text: GPTQ (Frantar et al. 2210.17323).

The layers are rounded in order, and the linears of a layer in the order in which they run. The inputs of a linear come
from the model in which all earlier linears are rounded already. A weight is rounded one column (input) at a time. The
column whose input has the largest activations comes first, and the columns that are not rounded yet are changed to
compensate for its error on the text. The grid of a row or group is the same as for rounding to nearest, so the rounded
weights can be stored in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ..base import Model, Wide
from ..grids import Grid
from .calibration import Calibration, run_block
from .regression import Moment

_DAMPING = 0.01  # this share of the mean diagonal of the second moment is added to the diagonal, as in GPTQ
_BLOCK = 128  # the number of columns whose errors are passed on to later columns together


def rounded_layers(
    model: Model, stages: Mapping[int, Sequence[Sequence[str]]], grid: Callable[[Wide], Grid], calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """Round the weights of some layers by GPTQ. Yield the rounded weights of each layer.

    A weight that gets no tokens, as in an expert that the router never chooses, is rounded to nearest.

    Args:
        model: The model.
        stages: For each layer, lists of weight names in the order in which the linears run. The weights in one list are
            rounded on inputs from the same pass.
        grid: A function that returns the grid of a weight.
        calibration: The text.
    """
    for layer in calibration.walk(model, stages):
        rounded: dict[str, Wide] = {}
        for stage in stages[layer.index]:
            modules = {name: name.split(".", 2)[2].removesuffix(".weight") for name in stage}
            _, seen = run_block(layer.module, layer.x, layer.context, *modules.values())
            for name, path in modules.items():
                weight = model.wide(name)
                inputs = seen[path][0] if path in seen else torch.zeros(0, weight.shape[1])
                rounded[name] = gptq(weight, Moment.of(inputs).gram.cpu().numpy(), grid(weight))
                with torch.no_grad():
                    layer.module.get_parameter(f"{path}.weight").copy_(torch.from_numpy(rounded[name]))
        yield rounded


def gptq(weight: Wide, gram: Wide, grid: Grid) -> Wide:
    """Round a weight W [out, in] to values W' on its grid, so that Σ|(W - W') x|² over its inputs x is small.

    `gram` [in, in] is the sum of x xᵀ over the text. A row is rounded to nearest instead if its error is then smaller.
    This happens if the compensated weights leave the range of the grid.
    """
    diagonal, width, plain = gram.diagonal(), len(gram), grid.nearest(weight)
    if not diagonal.any():
        return plain
    order = np.argsort(-diagonal, kind="stable")
    damped = gram[np.ix_(order, order)] + _DAMPING * diagonal.mean() * np.eye(width)
    # Row j of the inverse's upper Cholesky factor says how the later columns compensate for an error of column j.
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    remaining, rounded = weight[:, order].copy(), np.empty_like(weight)
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        errors = np.empty((len(weight), stop - start))
        for j in range(start, stop):
            rounded[:, order[j]] = grid.column(remaining[:, j], int(order[j]), width)
            errors[:, j - start] = (remaining[:, j] - rounded[:, order[j]]) / factor[j, j]
            remaining[:, j:stop] -= errors[:, j - start, None] * factor[j, j:stop]
        remaining[:, stop:] -= errors @ factor[start:stop, stop:]
    errors_of = [((candidate - weight) @ gram * (candidate - weight)).sum(axis=1) for candidate in (rounded, plain)]
    return np.where((errors_of[0] <= errors_of[1])[:, None], rounded, plain)
