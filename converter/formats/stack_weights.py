"""Read checkpoints with the tensor names of another training program.

Such a program is called a *stack*; `architectures.stacks` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...architectures import BoundLeaf
from ...architectures.base import bind
from ...architectures.stacks import Stack
from ...components import ModelSpec
from ...errors import CannotExpress, CheckpointError

if TYPE_CHECKING:
    from ..weights import Weights

ONE = "Keep only the config that belongs to these weights in the folder."


def leaves_of(stack: Stack | None, spec: ModelSpec) -> list[BoundLeaf]:
    """Return the tensors that a model needs, under the names that a training program (`stack`) gives them.

    Raises CheckpointError if the program does not support such a model. `stack` must not be None.
    """
    assert stack is not None
    try:
        return bind(stack.name, stack.leaves, spec)
    except CannotExpress as error:
        raise CheckpointError(
            f"the tensor names are those of {stack.name}, but the config in the folder describes a model with other "
            f"tensors: {error.message}",
            ONE,
        ) from error


def without_buffers(weights: Weights, stack: Stack, notes: list[str]) -> tuple[Weights, bool]:
    """Remove buffers, and the head if it is a copy of the embedding, from `weights`.

    This changes `weights`, and adds a note for the user to `notes` if the head is removed.

    Args:
        weights: the tensors, under the names of a training program.
        stack: the program.
        notes: notes for the user.

    Returns:
        `weights`, and whether the head is tied: it is a copy of the embedding, or not stored at all.
    """
    info = weights.info
    dropped = [name for name in info if name.endswith(stack.dropped)] if stack.dropped else []
    tied = stack.head not in info
    if not tied and info[stack.head] == info.get(stack.embedding):  # the embedding may be missing
        tied = weights.same(stack.head, stack.embedding)
        if tied:
            notes.append(f"{stack.head} is a copy of the embedding, to which it is tied: stored only once")
            dropped.append(stack.head)
    for name in dropped:
        del info[name]
    return weights, tied
