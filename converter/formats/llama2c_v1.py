"""llama2.c's .bin files with a proper header (version 1), as a format to write; `llama2c` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .llama2c import plan_version

if TYPE_CHECKING:
    from ..write import Plan
    from . import Request

__all__ = ["describe", "finds", "plan", "read"]

finds = describe = read = None


def plan(request: Request) -> Plan:
    """A file of version 1, and a tokenizer.bin beside it. Raises as `llama2c.plan_version`."""
    return plan_version(request, 1)
