"""New ids all at once, where a test compares them."""

from typing import Any

from gptkit.modules.generate import generate


def generate_ids(*args: Any, **options: Any) -> list[int]:
    """All of `generate`'s new ids; the same arguments, the same errors."""
    return list(generate(*args, **options))
