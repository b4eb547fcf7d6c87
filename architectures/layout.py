"""Layouts: bijections between the elements of one checkpoint tensor and of one or several of gptkit's parameters.

A layout consists of two axis patterns, as in einops, and can be inverted:

    Layout("hidden (part heads head_dim)", "(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))

In this example, the checkpoint tensor has two dimensions, and the second contains q, k and v one after the other. The
parameters have the same axes with `hidden` last. Parentheses flatten axes into one dimension. `split` names the
axis that is divided among the parameters, and `parts` gives its extent in every one of them. An extent is the name
of a size of the block (`heads`, `head_dim`, …), a quotient of a size (`heads/4`) or a number.

`stack` names an axis that the parameters do not have: there is a set of parameters for every index of it. For
example,

    Layout("experts hidden (part intermediate)", "(part intermediate) hidden", "part", ("1", "1"), stack="experts")

means: one tensor contains gate and up of all experts. The parameters are gate and up of the first expert, then of
the second, and so on.

The steps are reshape, permute, split, reshape. The inverse is reshape, concatenate, permute, reshape. Both work on
numpy arrays and on torch tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Shape = tuple[int, ...]
_Sizes = Mapping[str, int]


def parse(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Parse a pattern: '(heads head_dim) hidden' -> (('heads', 'head_dim'), ('hidden',))."""
    dimensions: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in pattern.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            dimensions.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dimensions.append((token,))
    return tuple(dimensions)


def _extent(axis: str, sizes: _Sizes) -> int:
    """Return the extent of an axis, given as the name of a size ("heads"), a quotient ("heads/4") or a number ("2")."""
    name, _, divisor = axis.partition("/")
    return int(name) if name.isdigit() else sizes[name] // int(divisor or 1)


def _permute(array: Any, axes: Sequence[int]) -> Any:
    """Permute the axes of a torch tensor or a numpy array."""
    return array.permute(tuple(axes)) if hasattr(array, "permute") else array.transpose(axes)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """Concatenate torch tensors or numpy arrays along `axis`."""
    if hasattr(arrays[0], "permute"):
        import torch

        return torch.cat(list(arrays), dim=axis)
    import numpy

    return numpy.concatenate(list(arrays), axis=axis)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint tensor is split into one or several of gptkit's parameters, and joined from them.

    A layout consists of two patterns of axes, which the module's docstring explains. If `checkpoint` is empty, the
    tensor and its only parameter are equal.
    """

    checkpoint: str = ""
    """The pattern of the checkpoint tensor's axes."""
    shared: str = ""
    """The pattern of the axes of every parameter. If it is empty, it is the pattern `checkpoint` without the axis
    `stack`."""
    split: str | None = None
    """The axis of the checkpoint tensor that is divided among the parameters."""
    parts: tuple[str, ...] = ("1",)
    """The extents that the axis `split` has in the parameters, one for each."""
    stack: str | None = None
    """The axis of the checkpoint tensor that has a set of parameters for every index, such as the axis of
    experts."""

    @property
    def is_identity(self) -> bool:
        """Whether the checkpoint tensor is itself one of gptkit's parameters, and nothing is split or permuted."""
        return not self.checkpoint

    @cached_property
    def _checkpoint(self) -> tuple[tuple[str, ...], ...]:
        return parse(self.checkpoint)

    @cached_property
    def _shared(self) -> tuple[tuple[str, ...], ...]:
        if self.shared:
            return parse(self.shared)
        dimensions = [tuple(axis for axis in dimension if axis != self.stack) for dimension in self._checkpoint]
        return tuple(dimension for dimension in dimensions if dimension)

    def of_one(self) -> "Layout":
        """Return the layout of one slice of the checkpoint tensor along the axis `stack`.

        This axis must be the first dimension.
        """
        if self._checkpoint[0] != (self.stack,):
            raise ValueError(f"{self.stack} is not the first dimension of {self.checkpoint!r}")
        _, _, rest = self.checkpoint.strip().partition(" ")
        return replace(self, checkpoint=rest, stack=None)

    def repeats(self, sizes: _Sizes) -> int:
        """Return how many sets of parameters the tensor contains: one per expert if it has an axis of experts
        (`stack`), or 1.
        """
        return 1 if self.stack is None else sizes[self.stack]

    def _extents(self, sizes: _Sizes) -> list[int]:
        """Return the extent of the axis `split` in every parameter of a set."""
        return [_extent(part, sizes) for part in self.parts]

    def _axes(self, sizes: _Sizes, part: int | None = None) -> dict[str, int]:
        """Return the extent of every axis in the checkpoint tensor, or in one of the parameters.

        `part` is the index of this tensor in a set of parameters.
        """
        names = [axis for dimension in self._checkpoint for axis in dimension]
        extents = self._extents(sizes)
        of_split = sum(extents) if part is None else extents[part]
        return {axis: of_split if axis == self.split else _extent(axis, sizes) for axis in names}

    def checkpoint_shape(self, sizes: _Sizes, shared: Sequence[Shape]) -> Shape:
        """Return the shape of the checkpoint tensor.

        Args:
            sizes: the extents of the axes by name.
            shared: the shapes of the parameters. They are only used if the layout is the identity.
        """
        if self.is_identity:
            (shape,) = shared
            return shape
        axes = self._axes(sizes)
        return tuple(math.prod(axes[a] for a in dimension) for dimension in self._checkpoint)

    def shared_shapes(self, sizes: _Sizes) -> list[Shape]:
        """Return the shapes of the parameters. The layout must not be the identity."""
        shapes = []
        for part in range(len(self.parts)):
            axes = self._axes(sizes, part)
            shapes.append(tuple(math.prod(axes[a] for a in dimension) for dimension in self._shared))
        return shapes * self.repeats(sizes)

    @cached_property
    def _runs(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Return the axes of both patterns.

        Axes that are adjacent and in the same order in both patterns are merged into one.

        `split` and `stack` are not merged. With fewer axes, longer stretches of memory are moved, and more of the
        reshapes are views.
        """
        source = [axis for dimension in self._checkpoint for axis in dimension]
        target = [axis for dimension in self._shared for axis in dimension]
        target = target if self.stack is None else [self.stack, *target]
        runs: list[tuple[str, ...]] = []
        for axis in source:
            last = runs[-1][-1] if runs else None
            follows = last is not None and target.index(axis) == target.index(last) + 1
            if follows and not {axis, last} & {self.split, self.stack}:
                runs[-1] = (*runs[-1], axis)
            else:
                runs.append((axis,))
        return runs, sorted(runs, key=lambda run: target.index(run[0]))

    def forward(self, tensor: Any, sizes: _Sizes) -> list[Any]:
        """Split a checkpoint tensor into parameters, which are views of it if possible.

        `sizes` are the extents of the named axes.
        """
        if self.is_identity:
            return [tensor]
        source, target = self._runs
        axes = self._axes(sizes)
        extents = [math.prod(axes[a] for a in run) for run in source]
        whole = _permute(tensor.reshape(extents), [source.index(run) for run in target])
        wholes = [whole] if self.stack is None else [whole[index] for index in range(self.repeats(sizes))]
        if self.split is None:
            pieces = wholes
        else:
            at, pieces = target.index((self.split,)) - (self.stack is not None), []
            for one in wholes:
                start = 0
                for extent in self._extents(sizes):
                    pieces.append(one[(slice(None),) * at + (slice(start, start + extent),)])
                    start += extent
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shared_shapes(sizes), strict=True)]

    def inverse(self, tensors: Sequence[Any], sizes: _Sizes) -> Any:
        """Join parameters into the checkpoint tensor. `sizes` are the extents of the named axes."""
        if self.is_identity:
            (tensor,) = tensors
            return tensor
        source, target = self._runs
        pieces = []
        for number, tensor in enumerate(tensors):
            axes = {**self._axes(sizes, number % len(self.parts)), **({} if self.stack is None else {self.stack: 1})}
            pieces.append(tensor.reshape([math.prod(axes[a] for a in run) for run in target]))
        if self.split is not None:
            at, width = target.index((self.split,)), len(self.parts)
            pieces = [concatenate(pieces[start : start + width], at) for start in range(0, len(pieces), width)]
        whole = pieces[0] if self.stack is None else concatenate(pieces, 0)
        whole = _permute(whole, [target.index(run) for run in source])
        return whole.reshape(self.checkpoint_shape(sizes, ()))


IDENTITY = Layout()
NUMBER = Layout(" ", "()")
"""The layout of a checkpoint tensor without dimensions. Its parameter has the shape (1,)."""
