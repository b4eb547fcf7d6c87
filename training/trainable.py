"""What is trained of a changed model: all of it, what changed, its norms, or updates of a low rank."""

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
    """The parameters of the changed model that are new, of another shape or value, or of a component that changed."""
    old = dict(before.named_parameters())
    found = {
        name for name, each in after.named_parameters()
        if name not in old or old[name].shape != each.shape or not torch.equal(old[name], each)
    }  # fmt: skip
    if len(before.spec.blocks) != len(after.spec.blocks):
        return {name for name, _ in after.named_parameters()}
    for path, _, _ in differences(without_rounding(before.spec), without_rounding(after.spec)):
        parts = path.split(".")
        inside = ".".join(parts[: 3 if parts[0] == "blocks" else 1])
        found |= {name for name, _ in after.named_parameters() if name.startswith(f"{inside}.")}
    return found


def changed_layers(before: Decoder, after: Decoder) -> tuple[int, ...]:
    """The layers in which something changed, of trees whose layers and streams are each other's; else none."""
    one, other = before.spec, after.spec
    if len(one.blocks) != len(other.blocks) or one.hidden_size != other.hidden_size:
        return ()
    return tuple(sorted({int(name.split(".")[1]) for name in touched(before, after) if name.startswith("blocks.")}))


def chosen(what: str, declared: Sequence[Parameter], changed: Callable[[], set[str]]) -> set[str]:
    """The names of the parameters that "all", "changed" or "norms" trains."""
    if what == "all":
        return {each.name for each in declared}
    if what == "changed":
        return changed()
    gains = {each.name.rpartition(".")[0] for each in declared if each.role == "gain"}
    return {each.name for each in declared if each.name.rpartition(".")[0] in gains}


def rank_of(what: str) -> int:
    """The rank in "lora:RANK", 0 of the others of `CHOICES`. Raises UsageError for none of them."""
    match = re.fullmatch(r"lora:([1-9]\d{0,8})", what, re.ASCII)
    if match is None and what not in CHOICES[:-1]:
        choices = f"{', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
        raise UsageError(f"--train must be {choices}, not {shown(what, 40)}", "RANK must be 1 or more.")
    return 0 if match is None else int(match[1])


def matrices(declared: Sequence[Parameter]) -> list[str]:
    """What updates of a low rank are added to."""
    return [each.name for each in declared if len(each.shape) == 2 and each.role in ("reads", "writes", "inner")]


class _LowRank(nn.Module):
    """W + B·A, of which A and B are trained (Hu et al. 2106.09685); B begins at 0."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(rank, columns, device=weight.device) / math.sqrt(columns))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@contextmanager
def adapted(model: Decoder, declared: Sequence[Parameter], rank: int) -> Iterator[set[str]]:
    """The model with such an update to each of its matrices, which is added up in the end; their names."""
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in matrices(declared)}
    for name, module in modules.items():
        weight = getattr(module, name.rpartition(".")[2])
        parametrize.register_parametrization(module, name.rpartition(".")[2], _LowRank(weight, rank))
    try:
        yield {name for name, _ in model.named_parameters() if name.endswith((".0.a", ".0.b"))}
    finally:
        for name, module in modules.items():
            parametrize.remove_parametrizations(module, name.rpartition(".")[2], leave_parametrized=True)
