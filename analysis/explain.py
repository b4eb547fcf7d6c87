"""Where a total comes from: a formula in the model's own sizes, V·d + T·d + L(12d² + 13d) + 2d. No torch, no weights.

It is made of the shapes of the tree's parameters and nothing else, so that it holds for any tree: each size of a shape
has a letter, which its component tells (`Component.letters`, `Component.rows`), a shape is a product of letters, and
products are summed. Widths that are a small multiple of d are written as that: 4d and not f. Where layers differ in a
size, each value has a letter of its own (f1, f2), and layers of one formula are counted together (L1, L2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..components import Component, ModelSpec
from ..components.ranges import layer_ranges, range_label
from .parameters import choice_of

MEANINGS = {
    "V": "vocabulary",
    "T": "learned positions",
    "E": "experts of a layer",
    "d": "hidden size",
    "L": "layers",
    "h": "width of all query heads",
    "k": "width of all key heads",
    "c": "dimensions of a head",
    "f": "feed-forward width",
    "a": "width of the queries' latent",
    "r": "width of the latent",
    "p": "width of the rotary keys",
    "u": "width of the keys that are made of the latent",
    "w": "width of the values that are made of the latent",
    "n": "another width",
}
MULTIPLES = "hkfaruwp"
"""Widths that are written as a multiple of d where they are one, of at most `MOST`."""
MOST = 8
MOST_RANGES = 3
"""Ranges of layers that a formula is told to be of; more are told by how many there are."""

Letter = tuple[str, int]
"""What a size is, by its letter, and the size itself."""
Sum = Counter[tuple[Letter, ...]]
"""Products of letters, and how often each is there."""


@dataclass(frozen=True)
class Symbol:
    """A letter of the formula, its value, and what it stands for."""

    name: str
    value: int
    meaning: str


@dataclass(frozen=True)
class Term:
    """A component's share of the total: its label in a table of parameters, its formula and its parameters."""

    label: str
    formula: str
    value: int


@dataclass(frozen=True)
class Explained:
    """A total as a formula. `terms` are the same by component, in the order of computation; they sum to the total.

    In formulas a product is 2d·k or d², and a sum of terms in brackets is multiplied by what stands before it.
    """

    total: int
    formula: str
    symbols: tuple[Symbol, ...]
    terms: tuple[Term, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "formula": self.formula,
            "symbols": {each.name: {"value": each.value, "meaning": each.meaning} for each in self.symbols},
            "components": {each.label: each.formula for each in self.terms},
        }


def explain(spec: ModelSpec) -> Explained:
    """The formula of a tree's parameters, a tied head not counted again."""
    before: dict[str, Sum] = {}  # by component
    behind: dict[str, Sum] = {}
    seen = {block: _layer(msgspec.structs.replace(spec, blocks=(block,))) for block in dict.fromkeys(spec.blocks)}
    kinds: list[dict[str, Sum]] = []
    for layer in seen.values():
        kinds += [] if layer in kinds else [layer]
    of_kind = [kinds.index(seen[block]) for block in spec.blocks]
    for path, node in spec.nodes():
        if not path.startswith("blocks."):
            side = behind if path.startswith(("final_norm", "head")) else before
            side.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec))
    letters = _letters([before, *kinds, behind])
    names = [f"L{index + 1}" if len(kinds) > 1 else "L" for index in range(len(kinds))]

    def term(label: str | None) -> Term:
        """The parameters of a component, or of all."""
        first, *layers, last = (
            _merged(part.values()) if label is None else part.get(label, Sum()) for part in (before, *kinds, behind)
        )
        again = Sum({product: times for product, times in last.items() if product in first})
        inner = [(name, _written(each, letters, by_degree=True)) for name, each in zip(names, layers, strict=True)]
        parts = [
            _written(_merged([first, again]), letters),
            *(f"{name}{_bracketed(text)}" for name, text in inner if text),
            _written(last - again, letters),
        ]
        value = _value(first) + _value(last) + sum(_value(layers[kind]) for kind in of_kind)
        return Term(label or "total", " + ".join(filter(None, parts)), value)

    labels = dict.fromkeys(label for part in (before, *kinds, behind) for label, each in part.items() if each)
    whole = term(None)
    symbols = [Symbol(name, size, MEANINGS[base]) for (base, size), name in letters.items()]
    layers = [Symbol(name, of_kind.count(kind), _which(kind, of_kind)) for kind, name in enumerate(names)]
    return Explained(whole.value, whole.formula, (*symbols, *layers), tuple(map(term, labels)))


# --- a component's sizes ---------------------------------------------------------------------------------------------


def _layer(spec: ModelSpec) -> dict[str, Sum]:
    """A tree's only layer, by component. Experts are alike: the first stands for all."""
    found: dict[str, Sum] = {}
    nodes = dict(spec.nodes())
    for path, node in nodes.items():
        if path.startswith("blocks.") and (".experts." not in path or path.endswith(".experts.0")):
            above = nodes.get(path.rpartition(".")[0])
            found.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec, above))
    return found


def _shapes(path: str, node: Component, spec: ModelSpec, above: Component | None = None) -> Sum:
    """The parameters of a component, which may be a part of the one above it."""
    found = Sum()
    own = {} if above is None else above.letters(path.rpartition(".")[2])
    widths = own or {"d": spec.hidden_size, **node.letters()}
    letters = {size: base for base, size in reversed(widths.items())}
    choice = choice_of(spec, spec.blocks[0]) if ".experts." in path else None
    for shape in node.shapes().values():
        product = [
            (node.rows if node.rows and not index else letters.get(size, "n"), size) for index, size in enumerate(shape)
        ]
        if choice is not None:
            product.append(("E", choice.experts))
        factor = 1
        for index, (base, size) in enumerate(product):
            times, rest = divmod(size, spec.hidden_size)
            if base in MULTIPLES and not rest and times <= MOST:
                factor *= times
                product[index] = ("d", spec.hidden_size)
        found[tuple(sorted(product, key=lambda letter: [*MEANINGS].index(letter[0])))] += factor
    return found


# --- sums in words ---------------------------------------------------------------------------------------------------


def _letters(parts: Iterable[Mapping[str, Sum]]) -> dict[Letter, str]:
    """A name for each letter and size, in a fixed order: with a number where there are several sizes."""
    there = dict.fromkeys(letter for part in parts for each in part.values() for product in each for letter in product)
    found = sorted(there, key=lambda letter: [*MEANINGS].index(letter[0]))
    several = Counter(base for base, _ in found)
    number: Counter[str] = Counter()
    names = {}
    for base, size in found:
        number[base] += 1
        names[base, size] = base if several[base] == 1 else f"{base}{number[base]}"
    return names


def _merged(sums: Iterable[Sum]) -> Sum:
    found = Sum()
    for each in sums:
        found.update(each)
    return found


def _value(products: Sum) -> int:
    found = 0
    for product, times in products.items():
        for _, size in product:
            times *= size
        found += times
    return found


def _written(products: Sum, letters: Mapping[Letter, str], by_degree: bool = False) -> str:
    """12d² + 13d."""
    items = sorted(products.items(), key=lambda item: -len(item[0])) if by_degree else products.items()
    return " + ".join(f"{'' if times == 1 else times}{_product(product, letters)}" for product, times in items)


def _product(product: tuple[Letter, ...], letters: Mapping[Letter, str]) -> str:
    powers = Counter(letters[letter] for letter in product)
    return "·".join(name + {1: "", 2: "²", 3: "³"}[power] for name, power in powers.items())


def _bracketed(text: str) -> str:
    return f"({text})" if " + " in text or text[0].isdigit() else f"·{text}"


def _which(kind: int, of_kind: list[int]) -> str:
    """The layers of a kind, in words."""
    if set(of_kind) == {kind}:
        return MEANINGS["L"]
    ranges = [range_label(first, last) for first, last, each in layer_ranges(of_kind) if each == kind]
    more = f" and {len(ranges) - MOST_RANGES} more ranges" if len(ranges) > MOST_RANGES else ""
    return f"layers {', '.join(ranges[:MOST_RANGES])}{more}"
