"""Choose which parameters of a changed model are trained: all, the changed ones, the norms', or low-rank updates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..components import Parameter, differences, without_rounding
from ..errors import UsageError, shown
from ..modules import Decoder

CHOICES = ("all", "changed", "norms", "lora:RANK")


def touched(before: Decoder, after: Decoder) -> set[str]:
    """Return the names of the parameters by which the model `after` differs from the model `before`.

    These are parameters that are new, that have another shape or value than in `before`, or that belong to a component
    with other settings.
    """
    old = dict(before.named_parameters())
    names = {
        name for name, parameter in after.named_parameters()
        if name not in old or old[name].shape != parameter.shape or not torch.equal(old[name], parameter)
    }  # fmt: skip
    if len(before.spec.blocks) != len(after.spec.blocks):
        return {name for name, _ in after.named_parameters()}
    for path, _, _ in differences(without_rounding(before.spec), without_rounding(after.spec)):
        parts = path.split(".")
        inside = ".".join(parts[: 3 if parts[0] == "blocks" else 1])
        names |= {name for name, _ in after.named_parameters() if name.startswith(f"{inside}.")}
    return names


def changed_layers(before: Decoder, after: Decoder) -> tuple[int, ...]:
    """Return the indices of the layers by which the model `after` differs from the model `before`.

    The result is empty if the models differ in the number of layers or in the hidden size.
    """
    one, other = before.spec, after.spec
    if len(one.blocks) != len(other.blocks) or one.hidden_size != other.hidden_size:
        return ()
    return tuple(sorted({int(name.split(".")[1]) for name in touched(before, after) if name.startswith("blocks.")}))


def chosen(what: str, declared: Sequence[Parameter], changed: Callable[[], set[str]]) -> set[str]:
    """Return the names of the parameters to train.

    Args:
        what: which parameters: "all", "changed" or "norms".
        declared: all parameters of the model.
        changed: returns the names of the parameters that differ from the teacher's.
    """
    if what == "all":
        return {parameter.name for parameter in declared}
    if what == "changed":
        return changed()
    norms = {parameter.name.rpartition(".")[0] for parameter in declared if parameter.role == "gain"}
    return {parameter.name for parameter in declared if parameter.name.rpartition(".")[0] in norms}


def rank_of(what: str) -> int:
    """Return RANK if `what` is "lora:RANK", and 0 if it is "all", "changed" or "norms". Otherwise raise UsageError."""
    match = re.fullmatch(r"lora:([1-9]\d{0,8})", what, re.ASCII)
    if match is None and what not in CHOICES[:-1]:
        choices = f"{', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
        raise UsageError(
            f"--train must be {choices}, not {shown(what, 40)}",
            "In lora:RANK, RANK is the rank of the updates, a whole number of 1 or more, as in lora:8.",
        )
    return 0 if match is None else int(match[1])


def matrices(declared: Sequence[Parameter]) -> list[str]:
    """Return the names of the weight matrices to which "lora:RANK" adds low-rank updates."""
    roles = "reads", "writes", "inner"
    return [parameter.name for parameter in declared if len(parameter.shape) == 2 and parameter.role in roles]


class _LowRank(nn.Module):
    """A low-rank update of a weight, W + B·A (Hu et al. 2106.09685): A and B are trained, and B starts at 0."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(rank, columns, device=weight.device) / math.sqrt(columns))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@contextmanager
def adapted(model: Decoder, declared: Sequence[Parameter], rank: int) -> Iterator[set[str]]:
    """Add a low-rank update to every matrix of the model, and yield the names of the updates' parameters.

    When the context ends, the updates are merged into the weights.
    """
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in matrices(declared)}
    for name, module in modules.items():
        weight = getattr(module, name.rpartition(".")[2])
        parametrize.register_parametrization(module, name.rpartition(".")[2], _LowRank(weight, rank))
    try:
        yield {name for name, _ in model.named_parameters() if name.endswith((".0.a", ".0.b"))}
    finally:
        for name, module in modules.items():
            parametrize.remove_parametrizations(module, name.rpartition(".")[2], leave_parametrized=True)
