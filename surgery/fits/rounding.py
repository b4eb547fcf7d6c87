"""Linear weights rounded to few bits by a text: GPTQ (Frantar et al. 2210.17323).

Layer after layer, in the order in which the linears of a layer run, each is rounded on what comes to it once all before
it are rounded. A weight is rounded input by input, the input of the most activation first; what one is off by, the
inputs that are not rounded yet make up for, as far as they can on the text. The grid of a row or a group is the one
that rounding to nearest has, so that what is stored is of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ..base import Model, Wide
from ..grids import Grid
from .calibration import Calibration, run_block
from .regression import Moment

_DAMPING = 0.01  # of the second moments' mean diagonal, added to the diagonal (GPTQ's)
_BLOCK = 128  # inputs whose errors are passed on together to those behind them


def rounded_layers(
    model: Model, stages: Mapping[int, Sequence[Sequence[str]]], grid: Callable[[Wide], Grid], calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """The rounded weights of one layer after the other, of these: stages [layer] has the names of its weights by when
    they run, those that may be rounded at once in one list. `grid` makes the grid of a weight. A weight whose linear
    gets no token, as an expert may, is rounded to nearest.
    """
    for layer in calibration.walk(model, stages):
        found: dict[str, Wide] = {}
        for stage in stages[layer.index]:
            modules = {name: name.split(".", 2)[2].removesuffix(".weight") for name in stage}
            _, seen = run_block(layer.module, layer.x, layer.context, *modules.values())
            for name, path in modules.items():
                weight = model.wide(name)
                inputs = seen[path][0] if path in seen else torch.zeros(0, weight.shape[1])
                found[name] = gptq(weight, Moment.of(inputs).gram.numpy(), grid(weight))
                with torch.no_grad():
                    layer.module.get_parameter(f"{path}.weight").copy_(torch.from_numpy(found[name]))
        yield found


def gptq(weight: Wide, gram: Wide, grid: Grid) -> Wide:
    """W [out, in] on its grid, such that W x changes as little as can be: Σ|(W - W') x|² over the text, whose sum of x
    xᵀ is `gram` [in, in]. A row that is nearer when it is rounded to nearest, because what it had to make up for went
    beyond the ends of its grid, is rounded so.
    """
    diagonal, width, plain = gram.diagonal(), len(gram), grid.nearest(weight)
    if not diagonal.any():
        return plain
    order = np.argsort(-diagonal, kind="stable")
    damped = gram[np.ix_(order, order)] + _DAMPING * diagonal.mean() * np.eye(width)
    # The upper Cholesky factor of the inverse: row j has what an error of input j does to those behind it.
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, made = weight[:, order].copy(), np.empty_like(weight)
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        errors = np.empty((len(weight), stop - start))
        for j in range(start, stop):
            made[:, order[j]] = grid.column(rest[:, j], int(order[j]), width)
            errors[:, j - start] = (rest[:, j] - made[:, order[j]]) / factor[j, j]
            rest[:, j:stop] -= errors[:, j - start, None] * factor[j, j:stop]
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    errors_of = [((each - weight) @ gram * (each - weight)).sum(axis=1) for each in (made, plain)]
    return np.where((errors_of[0] <= errors_of[1])[:, None], made, plain)
