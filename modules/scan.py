"""Functions that recurrences share: masking of padding, causal convolutions with a cache, and recomputation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from .context import Context


class State:
    """The cache of one recurrent layer. Both attributes are None before the first token."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None  # the last inputs of its convolution, (B, channels, kernel)
        self.state: Tensor | None = None  # the recurrent state


def real(x: Tensor, context: Context) -> Tensor:
    """Return the input (B, T, hidden) with zeros at padding tokens, so that they do not change the state.

    Raises:
        UsageError: a row contains several documents, which a recurrence cannot separate by a mask.
    """
    if context.documents is not None:
        raise UsageError(
            "the model has recurrent layers, which carry a state from one document into the next, so it "
            "does not accept the argument documents",
            "Leave out documents, and run every document in a call of its own.",
        )
    if not context.padded or context.attention_mask is None or x.shape[1] == 1:  # a decoded token is never padding
        return x
    return (x * context.attention_mask[:, -x.shape[1] :, None]).to(x.dtype)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: State | None,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return activation(convolution(x)) for x (B, channels, T). The convolution is causal and depthwise.

    The weight is (channels, kernel). The inputs in the cache precede x, and the cache is updated. The activation is
    computed on rows of the same length and stride as in transformers' fallback for causal_conv1d, because torch rounds
    the last elements of a row differently.
    """
    kernel, steps = weight.shape[-1], x.shape[-1]
    earlier = None if cache is None else cache.inputs
    whole = x if earlier is None else torch.cat((earlier, x), dim=-1)
    if whole.shape[-1] < kernel:
        whole = F.pad(whole, (kernel - whole.shape[-1], 0))
    if cache is not None:
        cache.inputs = whole[..., -kernel:].clone()
    if earlier is not None and steps == 1:
        out = F.conv1d(whole, weight[:, None], bias, groups=x.shape[1])[..., -1:]
    else:
        out = F.conv1d(whole, weight[:, None], bias, padding=kernel - 1, groups=x.shape[1])[..., : whole.shape[-1]]
    return (out if activation is None else activation(out))[..., -steps:]


def recomputed(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the results of a function, without saving its intermediate tensors for the backward pass.

    The backward pass computes them again.
    """
    results: tuple[Tensor, Tensor] = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return results


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            None if saved is None else saved.detach().requires_grad_(want)
            for saved, want in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            results = ctx.function(*inputs)
        variables = [x for x, want in zip(inputs, wanted, strict=True) if want and x is not None]
        gradients = iter(torch.autograd.grad(results, variables, grads, allow_unused=True))
        return (None, *(next(gradients) if want else None for want in wanted))
