"""What recurrences have in common: padding that no state sees, convolutions over earlier tokens, steps made again."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from .context import Context


class State:
    """What a recurrence carries from token to token. inputs: the last ones of its convolution, (B, channels, kernel);
    state: its own. None before the first token.
    """

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.state: Tensor | None = None


def real(x: Tensor, context: Context) -> Tensor:
    """The input (B, T, hidden) with zeros where tokens are padding, of which states are not to know.

    Raises:
        UsageError: several documents in a row, which no mask keeps apart here.
    """
    if context.documents is not None:
        raise UsageError(
            "the model has recurrent layers, which carry a state from one document into the next, so it "
            "does not accept documents: leave out this argument"
        )
    if not context.padded or context.attention_mask is None or x.shape[1] == 1:  # what is decoded is no padding
        return x
    return (x * context.attention_mask[:, -x.shape[1] :, None]).to(x.dtype)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: State | None,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The causal convolution of x (B, channels, T), a kernel (channels, kernel) a channel, behind what a cache holds,
    and an activation of it.

    As transformers' fallback of causal_conv1d: an activation is of rows as long as there, in a tensor with room between
    them, since torch rounds the last elements of a row otherwise than others.
    """
    kernel, steps = weight.shape[-1], x.shape[-1]
    kept = None if cache is None else cache.inputs
    whole = x if kept is None else torch.cat((kept, x), dim=-1)
    if whole.shape[-1] < kernel:
        whole = F.pad(whole, (kernel - whole.shape[-1], 0))
    if cache is not None:
        cache.inputs = whole[..., -kernel:].clone()
    if kept is not None and steps == 1:
        out = F.conv1d(whole, weight[:, None], bias, groups=x.shape[1])[..., -1:]
    else:
        out = F.conv1d(whole, weight[:, None], bias, padding=kernel - 1, groups=x.shape[1])[..., : whole.shape[-1]]
    return (out if activation is None else activation(out))[..., -steps:]


def made_again(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of a function of tensors, of whose steps nothing is kept: it is computed again for the gradients."""
    found: tuple[Tensor, Tensor] = _Again.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            None if each is None else each.detach().requires_grad_(want)
            for each, want in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            results = ctx.function(*inputs)
        asked = [each for each, want in zip(inputs, wanted, strict=True) if want and each is not None]
        found = iter(torch.autograd.grad(results, asked, grads, allow_unused=True))
        return (None, *(next(found) if want else None for want in wanted))
