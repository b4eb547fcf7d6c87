"""AdamW's groups and the schedule of its rate.

Decoupled weight decay (Loshchilov and Hutter 1711.05101) pulls on matrices alone: parameters of two dimensions or more
that read the stream, write it, stand between the two or route. Tables of tokens and positions, gains and biases do not
decay: a row of a table would shrink in every step in which its token is not met, and a gain would leave 1.
"""

import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from ..components import Parameter, Role

_DECAYING: tuple[Role, ...] = ("reads", "writes", "inner", "router")
_BETAS = (0.9, 0.95)  # GPT-3's (Brown et al. 2005.14165, appendix B)
FLOOR = 0.1
"""What is left of the rate at the end (Hoffmann et al. 2203.15556, section 3)."""


def decays(parameter: Parameter) -> bool:
    """Whether weight decay pulls on a parameter: by its role and its dimensions."""
    return len(parameter.shape) > 1 and parameter.role in _DECAYING


def adamw(
    model: nn.Module, declared: Iterable[Parameter], rate: float, decay: float, trained: Container[str] | None = None
) -> torch.optim.AdamW:
    """AdamW of a tree's `declared` parameters, or of those whose names are `trained`, in two groups; the others are
    frozen. What is not declared (an adapter) does not decay.
    """
    about = {each.name: each for each in declared}
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
        if parameter.requires_grad:
            groups[name not in about or not decays(about[name])]["params"].append(parameter)
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=rate, betas=_BETAS, fused=True)


def rate_at(done: float, rate: float, warmup: float) -> float:
    """The rate where that share of the budget is done, up to and with this step: a line up to `rate` within the share
    `warmup`, then a cosine down to `FLOOR` of it (Loshchilov and Hutter 1608.03983).
    """
    if done < warmup:
        return rate * done / warmup
    way = min(1.0, (done - warmup) / (1 - warmup))
    return rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * way)) / 2)


def usual_rate(parameters: int) -> float:
    """The highest rate for a model of so many parameters (Kaplan et al. 2001.08361, appendix D.6), 3e-5 at least."""
    return max(3e-5, 0.003239 - 0.0001395 * math.log(max(1, parameters)))
