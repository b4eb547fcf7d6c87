"""Average a model's parameters over the last part of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..modules import Decoder
from .parallel import Group

_DECAY = 3
"""The exponent of the decay, so that an average reaches over about the last quarter of the steps so far."""


class Average:
    """A running average of the trained parameters, with polynomial decay (Shamir and Zhang 1212.1824, section 4).

    The parameters after step t enter the average with the weight (η + 1) / (t + η), where η is `_DECAY`. The average
    does not depend on the budget or on interruptions of the run. `tensors` has the averaged parameters by name, so that
    checkpoints can store them.
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
        """Exchange the values of the model's parameters and of the average."""
        for mean, parameter in zip(
            self._local(self.tensors.values()), self._local(self.parameters.values()), strict=True
        ):
            last = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(last)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Give the model the average as its parameters inside the context."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def _local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.group.local(tensor.detach()) for tensor in tensors]
