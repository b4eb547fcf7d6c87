"""Words: what a component is called in a table, in a description, and as data. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NOT_THERE", "Words", "plain_number"]


class Words(NamedTuple):
    """One thing about a component in the `short` words of a table ("GQA 32/8"), as plain JSON values ({"kind": "GQA",
    "heads": 32, "kv_heads": 8}), and in the whole words of a description ("GQA, 32 q, 8 kv, head dim 128"), which are
    the short ones where they are not given.
    """

    short: str
    data: Any
    whole: str = ""

    @property
    def long(self) -> str:
        return self.whole or self.short

    def also(self, fields: dict[str, tuple[str, Any]]) -> Words:
        """These with fields appended, each of which comes in words and as data."""
        if not fields:
            return self
        data = self.data if isinstance(self.data, dict) else {"kind": self.data}
        data = data | {name: value for name, (_, value) in fields.items()}
        told = [words for words, _ in fields.values()]
        return Words(", ".join([self.short, *told]), data, ", ".join([self.long, *told]))

    def beside(self, other: Words) -> Words:
        """What two parts of a block say of one aspect."""
        return Words(f"{self.short}; {other.short}", [self.data, other.data], f"{self.long}; {other.long}")


NOT_THERE = Words("–", None, "none")


def plain_number(value: float) -> str:
    """A float without loss, and without an exponent where it is whole and of usual size: 1,000,000; 8; 1.25."""
    return f"{int(value):,}" if float(value).is_integer() and value < 1e15 else repr(value)
