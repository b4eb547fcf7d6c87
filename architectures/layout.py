"""Layouts: how one checkpoint tensor holds one or several shared tensors, as a bijection on their elements.

A layout is written as two axis patterns, in the manner of einops, and knows its own inverse:

    Layout("hidden (part heads head_dim)", "(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))

reads: the checkpoint tensor has two dimensions, the second holds q, k and v one after the other; each shared tensor
has the same axes with `hidden` last. Parentheses flatten axes into one dimension. `split` names the axis that is
shared out over the shared tensors, `parts` its extent in each. Axis extents are names looked up in the sizes of the
block (`heads`, `head_dim`, …), quotients of one (`heads/4`) or plain digits. `each` names an axis of which every index
has shared tensors of its own, which are without it:

    Layout("experts hidden (part intermediate)", "(part intermediate) hidden", "part", ("1", "1"), each="experts")

reads: one tensor holds gate and up of all experts; shared are gate and up of the first, then of the second, and so on.

The steps are reshape, permute, split, reshape, and backwards reshape, concatenate, permute, reshape; they run on
numpy arrays and torch tensors alike, and on shapes alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Shape = tuple[int, ...]
_Sizes = Mapping[str, int]


def parse(pattern: str) -> tuple[tuple[str, ...], ...]:
    """'(heads head_dim) hidden' -> (('heads', 'head_dim'), ('hidden',))."""
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
    """What an axis of a pattern says: a size by its name, a quotient of one, or a number."""
    name, _, divisor = axis.partition("/")
    return int(name) if name.isdigit() else sizes[name] // int(divisor or 1)


def _permute(array: Any, axes: Sequence[int]) -> Any:
    """The axes in another order: torch calls it permute, numpy transpose."""
    return array.permute(tuple(axes)) if hasattr(array, "permute") else array.transpose(axes)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """Along `axis`, in the library the arrays come from."""
    if hasattr(arrays[0], "permute"):
        import torch

        return torch.cat(list(arrays), dim=axis)
    import numpy

    return numpy.concatenate(list(arrays), axis=axis)


@dataclass(frozen=True)
class Layout:
    """See the module's docstring. An empty `checkpoint` pattern is the identity on one tensor of any shape."""

    checkpoint: str = ""
    shared: str = ""
    split: str | None = None
    parts: tuple[str, ...] = ("1",)
    each: str | None = None

    @property
    def is_identity(self) -> bool:
        """Whether the one shared tensor is the checkpoint's, byte for byte."""
        return not self.checkpoint

    @cached_property
    def _checkpoint(self) -> tuple[tuple[str, ...], ...]:
        return parse(self.checkpoint)

    @cached_property
    def _shared(self) -> tuple[tuple[str, ...], ...]:
        if self.shared:
            return parse(self.shared)
        dimensions = [tuple(axis for axis in dimension if axis != self.each) for dimension in self._checkpoint]
        return tuple(dimension for dimension in dimensions if dimension)

    def of_one(self) -> "Layout":
        """Return the layout of a single index of `each`, whose axis is the tensor's first dimension."""
        if self._checkpoint[0] != (self.each,):
            raise ValueError(f"{self.each} is not the first dimension of {self.checkpoint!r}")
        _, _, rest = self.checkpoint.strip().partition(" ")
        return replace(self, checkpoint=rest, each=None)

    def repeats(self, sizes: _Sizes) -> int:
        """How many sets of shared tensors there are: the extent of `each`."""
        return 1 if self.each is None else sizes[self.each]

    def _extents(self, sizes: _Sizes) -> list[int]:
        """The split axis' extent in each part."""
        return [_extent(part, sizes) for part in self.parts]

    def _axes(self, sizes: _Sizes, part: int | None = None) -> dict[str, int]:
        """Every axis' extent: of the whole, or of one part."""
        names = [axis for dimension in self._checkpoint for axis in dimension]
        extents = self._extents(sizes)
        of_split = sum(extents) if part is None else extents[part]
        return {axis: of_split if axis == self.split else _extent(axis, sizes) for axis in names}

    def checkpoint_shape(self, sizes: _Sizes, shared: Sequence[Shape]) -> Shape:
        """The checkpoint tensor's shape; `shared` are the shared tensors' shapes, used where this is the identity."""
        if self.is_identity:
            (shape,) = shared
            return shape
        axes = self._axes(sizes)
        return tuple(math.prod(axes[a] for a in dimension) for dimension in self._checkpoint)

    def shared_shapes(self, sizes: _Sizes) -> list[Shape]:
        """The shared tensors' shapes, for a layout that is not the identity."""
        shapes = []
        for part in range(len(self.parts)):
            axes = self._axes(sizes, part)
            shapes.append(tuple(math.prod(axes[a] for a in dimension) for dimension in self._shared))
        return shapes * self.repeats(sizes)

    @cached_property
    def _runs(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """The axes of both sides, each run of them that both have in this order taken as one (`split` and `each` stay
        alone).

        Fewer axes move the same elements in longer stretches, and more of the reshapes are views.
        """
        source = [axis for dimension in self._checkpoint for axis in dimension]
        target = [axis for dimension in self._shared for axis in dimension]
        target = target if self.each is None else [self.each, *target]
        runs: list[tuple[str, ...]] = []
        for axis in source:
            last = runs[-1][-1] if runs else None
            follows = last is not None and target.index(axis) == target.index(last) + 1
            if follows and not {axis, last} & {self.split, self.each}:
                runs[-1] = (*runs[-1], axis)
            else:
                runs.append((axis,))
        return runs, sorted(runs, key=lambda run: target.index(run[0]))

    def forward(self, tensor: Any, sizes: _Sizes) -> list[Any]:
        """The checkpoint's tensor -> the shared tensors (views where the library can)."""
        if self.is_identity:
            return [tensor]
        source, target = self._runs
        axes = self._axes(sizes)
        extents = [math.prod(axes[a] for a in run) for run in source]
        whole = _permute(tensor.reshape(extents), [source.index(run) for run in target])
        wholes = [whole] if self.each is None else [whole[index] for index in range(self.repeats(sizes))]
        if self.split is None:
            pieces = wholes
        else:
            at, pieces = target.index((self.split,)) - (self.each is not None), []
            for one in wholes:
                start = 0
                for extent in self._extents(sizes):
                    pieces.append(one[(slice(None),) * at + (slice(start, start + extent),)])
                    start += extent
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shared_shapes(sizes), strict=True)]

    def inverse(self, tensors: Sequence[Any], sizes: _Sizes) -> Any:
        """The shared tensors -> the checkpoint's tensor."""
        if self.is_identity:
            (tensor,) = tensors
            return tensor
        source, target = self._runs
        pieces = []
        for number, tensor in enumerate(tensors):
            axes = {**self._axes(sizes, number % len(self.parts)), **({} if self.each is None else {self.each: 1})}
            pieces.append(tensor.reshape([math.prod(axes[a] for a in run) for run in target]))
        if self.split is not None:
            at, width = target.index((self.split,)), len(self.parts)
            pieces = [concatenate(pieces[start : start + width], at) for start in range(0, len(pieces), width)]
        whole = pieces[0] if self.each is None else concatenate(pieces, 0)
        whole = _permute(whole, [target.index(run) for run in source])
        return whole.reshape(self.checkpoint_shape(sizes, ()))


IDENTITY = Layout()
NUMBER = Layout(" ", "()")
"""A tensor without dimensions, whose shared one has a dimension of 1."""
