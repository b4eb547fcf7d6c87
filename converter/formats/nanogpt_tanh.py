"""nanoGPT's ckpt.pt for a model.py with GPT-2's own GELU, the tanh formula, as it was before torch.nn.GELU.

A format to write; the file says so, and `nanogpt` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .nanogpt import plan_for

if TYPE_CHECKING:
    from ..write import Plan
    from . import Request

__all__ = ["describe", "finds", "plan", "read"]

finds = describe = read = None


def plan(request: Request) -> Plan:
    """A checkpoint for such a model.py. Raises as `nanogpt.plan_for`."""
    return plan_for(request, "gelu_new")
