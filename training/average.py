"""Average a model's parameters over the last part of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..modules import Decoder
from .parallel import Group

_DECAY = 3
"""The exponent η of the decay. With this value, the average is mostly over the last quarter of the steps so far."""


class Average:
    """A running average of the trained parameters, with polynomial decay (Shamir and Zhang 1212.1824, section 4).

    After step t, average ← average + w · (parameters − average), with w = (η + 1) / (t + η) and η = `_DECAY`. The
    average does not depend on the budget or on interruptions of the run.

    Attributes:
        tensors: the averaged parameters by name, which are stored in checkpoints.
    """

    def __init__(self, model: Decoder, group: Group) -> None:
        self.group = group
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.tensors = {f"average {name}": value.detach().clone() for name, value in self.parameters.items()}

    def add(self, step: int) -> None:
        """Add the parameters after a step to the average. Steps are counted from 1."""
        weight = (_DECAY + 1) / (step + _DECAY)
        torch._foreach_lerp_(self._local(self.tensors.values()), self._local(self.parameters.values()), weight)

    def exchange(self) -> None:
        """Swap the values of the model's parameters with those of the average."""
        for mean, parameter in zip(
            self._local(self.tensors.values()), self._local(self.parameters.values()), strict=True
        ):
            last = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(last)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the context, replace the values of the model's parameters by those of the average."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def _local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.group.local(tensor.detach()) for tensor in tensors]
