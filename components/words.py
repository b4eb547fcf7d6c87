"""How a component is described in a table, in a sentence, and as data."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NOT_THERE", "Words", "plain_number"]


class Words(NamedTuple):
    """The description of one aspect of a component, such as its norm or its position encoding."""

    short: str
    """The words for a table: "GQA 32/8"."""
    data: Any
    """The same description as plain JSON values: {"kind": "GQA", "heads": 32, "kv_heads": 8}."""
    whole: str = ""
    """The words for a longer description: "GQA, 32 q, 8 kv, head dim 128". If empty, `short` is used."""

    @property
    def long(self) -> str:
        return self.whole or self.short

    def also(self, fields: dict[str, tuple[str, Any]]) -> Words:
        """Return the description with fields appended.

        `fields` has, by the name of a field, its description in words and its value as JSON.
        """
        if not fields:
            return self
        data = self.data if isinstance(self.data, dict) else {"kind": self.data}
        data = data | {name: value for name, (_, value) in fields.items()}
        more = [words for words, _ in fields.values()]
        return Words(", ".join([self.short, *more]), data, ", ".join([self.long, *more]))

    def joined(self, other: Words) -> Words:
        """Return one description that combines this one and `other`, for two parts of a block."""
        return Words(f"{self.short}; {other.short}", [self.data, other.data], f"{self.long}; {other.long}")


NOT_THERE = Words("–", None, "none")


def plain_number(value: float) -> str:
    """Return a float with all digits. A whole number below 1e15 has no exponent and no decimals: 1,000,000; 8; 1.25."""
    return f"{int(value):,}" if float(value).is_integer() and value < 1e15 else repr(value)
