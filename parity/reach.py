"""What two trees say of each other before anything is computed: whether their weights have to be the same, and up to
which length they can be one function at all.

Windows, rotary scaling, the base and the length of a table change nothing that weights could make up for: what differs
in these alone calls for the same bytes. Their effect begins behind a length, or grows with it, so that a probe of 200
tokens says nothing of 4,096.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..components import Component, ModelSpec, without_rounding
from ..modules.registry import module_of
from .probe import Limit, longest

NEAR = 1e-9
"""Relative difference of frequencies that come of one base by another way to compute them."""


def one_function(a: ModelSpec, b: ModelSpec) -> bool:
    """Whether the trees leave weights no reason to differ: they are one but for how they round, for what acts by the
    length of a sequence alone, and for the last digits of numbers, to which no weights answer.
    """

    def bare(node: Component, _: str) -> Any:
        fields = {name: getattr(node, name) for name in node.__struct_fields__}
        fields |= {name: float(f"{value:.6g}") for name, value in fields.items() if isinstance(value, float)}
        return type(node)(**{**fields, **node.by_length})

    return bool(without_rounding(a).mapped(bare) == without_rounding(b).mapped(bare))


def _parts_behind(a: ModelSpec, b: ModelSpec) -> list[Limit]:
    """The lengths behind which the trees differ, the shortest first; 0 where they do from the first token on."""
    tables = [None if tree.positions is None else tree.positions.length for tree in (a, b)]
    sizes: set[tuple[str, int | None, int | None]] = {("position tables", tables[0], tables[1])}
    found: set[Limit] = set()
    for pair in _counterparts(a, b):
        x, y = (getattr(each, "window", None) for each in pair)
        sizes.add(("windows", x, y))
        length = _alike_up_to(*(getattr(each, "position", None) for each in pair))
        if length is not None:
            found.add(Limit(length, "positions counted otherwise"))
    for name, x, y in sizes:
        if x != y:
            words = " and ".join("none" if size is None else f"{size:,}" for size in (x, y))
            found.add(Limit(min(size for size in (x, y) if size is not None), f"{name} of {words} tokens"))
    return sorted(found)


def whole_context(a: ModelSpec, b: ModelSpec) -> int | None:
    """The longest sequence made for, where the trees count positions otherwise; None where they do not, or unknown."""
    known = [tree.context_length for tree in (a, b) if tree.context_length is not None]
    if len(known) < 2 or all(limit.tokens for limit in _parts_behind(a, b)):
        return None
    return min(max(known), longest(a, b) or max(known))


def limited_to(a: ModelSpec, b: ModelSpec, probed: int, up_to: int | None) -> tuple[int | None, list[str]]:
    """The most tokens that a verdict on the two can speak of, None for any, and in words why it is not more.

    `probed` are the tokens of the longest batch; `up_to` is the length that was asked for, which then is among them.
    """
    if up_to is not None:
        return up_to, []
    whole = whole_context(a, b) or probed + 1
    tables = [tree.positions.length for tree in (a, b) if tree.positions is not None]
    most = max(tables) if len(tables) == 2 else math.inf
    parts = [limit for limit in _parts_behind(a, b) if probed < (limit.beyond if limit.tokens else whole)]
    parts = [limit for limit in parts if limit.tokens < most]
    if not parts:
        return None, []
    reach = min(limit.tokens or probed for limit in parts)
    past = "--long goes past that, " if (longest(a, b) or reach + 1) > reach else ""
    names = ", ".join(dict.fromkeys(limit.name for limit in parts))
    return reach, [f"sequences of more than {reach:,} tokens ({names}): {past}--up-to {reach} asks for no more"]


def _counterparts(a: ModelSpec, b: ModelSpec) -> list[tuple[Any, Any]]:
    """The first mixer of one tree and of the other in the same layer; where there are not as many layers, every kind
    that one alone has with every kind of the other.
    """
    first, second = ([block.sublayers[0].mixer for block in tree.blocks] for tree in (a, b))
    if len(first) == len(second):
        return list(dict.fromkeys(zip(first, second, strict=True)))
    if set(first) == set(second):
        return []
    kinds = [dict.fromkeys(each) for each in (first, second)]
    own = [[each for each in mine if each not in others] or list(mine) for mine, others in (kinds, kinds[::-1])]
    return [(x, y) for x in own[0] for y in own[1]]


def _alike_up_to(a: Any, b: Any) -> int | None:
    """Tokens up to which positions of attention are the same; None where they are at any length."""
    turns: list[Any] = [None if each is None else getattr(module_of(each), "frequencies", None) for each in (a, b)]
    if None in turns:
        return None if without_rounding(a) == without_rounding(b) else 0
    contexts = {getattr(each.scaling, "original_context", 0) for each in (a, b)} - {0}
    alike = 0
    for length in sorted({1, *contexts, *(context + 1 for context in contexts), 4 * max(contexts, default=1)}):
        # One may have more pairs, which then meet weights that the other has not.
        turned = [turn(each, length, torch.float64) for turn, each in zip(turns, (a, b), strict=True)]
        few, many = sorted(turned, key=len)
        if not bool(((few[:, None] - many).abs().amin(dim=1) <= NEAR * few).all()):
            return alike
        alike = length
    return None
