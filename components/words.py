"""Words: the description of a component in a table, in a sentence and as data. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NOT_THERE", "Words", "plain_number"]


class Words(NamedTuple):
    """One property of a component in words and as data."""

    short: str
    """The words for a table, such as "GQA 32/8"."""
    data: Any
    """Plain JSON values, such as {"kind": "GQA", "heads": 32, "kv_heads": 8}."""
    whole: str = ""
    """The words for a description, such as "GQA, 32 q, 8 kv, head dim 128"; by default those for a table."""

    @property
    def long(self) -> str:
        return self.whole or self.short

    def also(self, fields: dict[str, tuple[str, Any]]) -> Words:
        """Return the words with fields appended, which are given in words and as data."""
        if not fields:
            return self
        data = self.data if isinstance(self.data, dict) else {"kind": self.data}
        data = data | {name: value for name, (_, value) in fields.items()}
        told = [words for words, _ in fields.values()]
        return Words(", ".join([self.short, *told]), data, ", ".join([self.long, *told]))

    def beside(self, other: Words) -> Words:
        """Return the words for two parts of a block that have the same aspect."""
        return Words(f"{self.short}; {other.short}", [self.data, other.data], f"{self.long}; {other.long}")


NOT_THERE = Words("–", None, "none")


def plain_number(value: float) -> str:
    """Return a number without loss, without an exponent if it is a whole number of usual size: 1,000,000; 8; 1.25."""
    return f"{int(value):,}" if float(value).is_integer() and value < 1e15 else repr(value)
