"""Where a total comes from: a formula in the model's own sizes, V·d + T·d + L(12d² + 13d) + 2d. No torch, no weights.

It is made of the shapes of the tree's parameters and nothing else, so that it holds for any tree: each size of a shape
has a letter, which its component tells (`Component.letters`, `Component.rows`), a shape is a product of letters, and
products are summed. Widths that are a small multiple of d are written as that: 4d and not f. Where layers differ in a
size, each value has a letter of its own (f1, f2), and layers of one formula are counted together (L1, L2).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..components import Block, Component, ModelSpec
from ..components.model import walk
from ..components.ranges import layer_ranges, range_label
from ..display import Record
from .parameters import choice_of

_MEANINGS = {
    "V": "vocabulary",
    "T": "learned positions",
    "E": "experts of a layer",
    "d": "hidden size",
    "L": "layers",
    "h": "width of all query heads",
    "k": "width of all key heads",
    "c": "dimensions of a head",
    "f": "feed-forward width",
    "i": "width of a recurrence",
    "a": "width of the queries' latent",
    "r": "width of the latent",
    "p": "width of the rotary keys",
    "u": "width of the keys that are made of the latent",
    "w": "width of the values that are made of the latent",
    "m": "width of all layers' inputs",
    "e": "width of a layer's input",
    "n": "another width",
}
_MULTIPLES = "hkfiaruwp"  # widths that are written as a multiple of d where they are one, of at most `MOST`
_MOST = 8
_MOST_RANGES = 3  # ranges of layers that a formula is told to be of; more are told by how many there are

_Letter = tuple[str, int]  # what a size is, by its letter, and the size itself
_Sum = Counter[tuple[_Letter, ...]]  # products of letters, and how often each is there


@dataclass(frozen=True)
class _Symbol(Record):
    """A letter of the formula, its value, and what it stands for."""

    JSON = "value meaning"

    name: str
    value: int
    meaning: str


@dataclass(frozen=True)
class _Term:
    """A component's share of the total: its label in a table of parameters, its formula and its parameters."""

    label: str
    formula: str
    value: int


@dataclass(frozen=True)
class Explained(Record):
    """A total as a formula. `terms` are the same by component, in the order of computation; they sum to the total.

    In formulas a product is 2d·k or d², and a sum of terms in brackets is multiplied by what stands before it.
    """

    JSON = "formula symbols=by_letter components=by_component"

    total: int
    formula: str
    symbols: tuple[_Symbol, ...]
    terms: tuple[_Term, ...]

    @property
    def by_letter(self) -> dict[str, _Symbol]:
        return {each.name: each for each in self.symbols}

    @property
    def by_component(self) -> dict[str, str]:
        return {each.label: each.formula for each in self.terms}


def explain(spec: ModelSpec) -> Explained:
    """The formula of a tree's parameters, a tied head not counted again. Raises MissingComponent: a tree with an
    encoder.
    """
    spec.one_stack("the formula for the parameter total")
    before: dict[str, _Sum] = {}  # by component
    behind: dict[str, _Sum] = {}
    seen = {block: _layer(spec, block) for block in dict.fromkeys(spec.blocks)}
    kinds: list[dict[str, _Sum]] = []
    for layer in seen.values():
        kinds += [] if layer in kinds else [layer]
    of_kind = [kinds.index(seen[block]) for block in spec.blocks]
    ends = {path: node for path, node in spec.nodes() if not path.startswith("blocks.")}
    for path, node in ends.items():
        side, above = (
            behind if path.startswith(("joined", "final_norm", "head")) else before,
            ends.get(path.rpartition(".")[0]),
        )
        side.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec, above))
    letters = _letters([before, *kinds, behind])
    names = [f"L{index + 1}" if len(kinds) > 1 else "L" for index in range(len(kinds))]

    def term(label: str | None) -> _Term:
        """The parameters of a component, or of all."""
        first, *layers, last = (
            _merged(part.values()) if label is None else part.get(label, _Sum()) for part in (before, *kinds, behind)
        )
        again = _Sum({product: times for product, times in last.items() if product in first})
        inner = [(name, _written(each, letters, by_degree=True)) for name, each in zip(names, layers, strict=True)]
        parts = [
            _written(_merged([first, again]), letters),
            *(
                f"{name}({text})" if " + " in text or text[0].isdigit() else f"{name}·{text}"
                for name, text in inner
                if text
            ),
            _written(last - again, letters),
        ]
        value = _value(first) + _value(last) + sum(_value(layers[kind]) for kind in of_kind)
        return _Term(label or "total", " + ".join(filter(None, parts)), value)

    labels = dict.fromkeys(label for part in (before, *kinds, behind) for label, each in part.items() if each)
    whole = term(None)
    symbols = [_Symbol(name, size, _MEANINGS[base]) for (base, size), name in letters.items()]
    layers = [_Symbol(name, of_kind.count(kind), _which(kind, of_kind)) for kind, name in enumerate(names)]
    return Explained(whole.value, whole.formula, (*symbols, *layers), tuple(map(term, labels)))


def _layer(spec: ModelSpec, block: Block) -> dict[str, _Sum]:
    """A layer of a tree, by component. Experts are alike: the first stands for all."""
    found: dict[str, _Sum] = {}
    nodes = {path: node for path, node in walk(block, "blocks.0") if node.label is not None}
    choice = choice_of(spec, block)
    for path, node in nodes.items():
        if ".experts." not in path or path.endswith(".experts.0"):
            above = nodes.get(path.rpartition(".")[0])
            experts = choice.experts if choice is not None and ".experts." in path else None
            found.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec, above, experts))
    return found


def _shapes(
    path: str, node: Component, spec: ModelSpec, above: Component | None = None, experts: int | None = None
) -> _Sum:
    """The parameters of a component, which may be a part of the one above it."""
    found = _Sum()
    own = {} if above is None else above.letters(path.rpartition(".")[2])
    widths = own or {"d": spec.hidden_size, **node.letters()}
    letters = {size: base for base, size in reversed(widths.items())}
    for name, shape in node.shapes().items():
        rows = node.rows if name in ("weight", "bias") else ""
        product = [(rows if rows and not index else letters.get(size, "n"), size) for index, size in enumerate(shape)]
        if experts is not None:
            product.append(("E", experts))
        factor = 1
        for index, (base, size) in enumerate(product):
            times, rest = divmod(size, spec.hidden_size)
            if base in _MULTIPLES and not rest and times <= _MOST:
                factor *= times
                product[index] = ("d", spec.hidden_size)
        found[tuple(sorted(product, key=lambda letter: [*_MEANINGS].index(letter[0])))] += factor
    return found


def _letters(parts: Iterable[Mapping[str, _Sum]]) -> dict[_Letter, str]:
    """A name for each letter and size, in a fixed order: with a number where there are several sizes."""
    there = dict.fromkeys(letter for part in parts for each in part.values() for product in each for letter in product)
    sizes: dict[str, list[_Letter]] = {}
    for letter in there:
        sizes.setdefault(letter[0], []).append(letter)
    return {
        letter: base if len(sizes[base]) == 1 else f"{base}{index}"
        for base in _MEANINGS
        for index, letter in enumerate(sizes.get(base, ()), 1)
    }


def _merged(sums: Iterable[_Sum]) -> _Sum:
    return sum(sums, _Sum())


def _value(products: _Sum) -> int:
    return sum(times * math.prod(size for _, size in product) for product, times in products.items())


def _written(products: _Sum, letters: Mapping[_Letter, str], by_degree: bool = False) -> str:
    """12d² + 13d."""
    terms = []
    for product in sorted(products, key=len, reverse=True) if by_degree else products:
        powers = Counter(letters[letter] for letter in product)
        factors = "·".join(name + {1: "", 2: "²", 3: "³"}[power] for name, power in powers.items())
        terms.append(f"{'' if products[product] == 1 else products[product]}{factors}")
    return " + ".join(terms)


def _which(kind: int, of_kind: list[int]) -> str:
    if set(of_kind) == {kind}:
        return _MEANINGS["L"]
    ranges = [range_label(first, last) for first, last, each in layer_ranges(of_kind) if each == kind]
    more = f" and {len(ranges) - _MOST_RANGES} more ranges" if len(ranges) > _MOST_RANGES else ""
    return f"layers {', '.join(ranges[:_MOST_RANGES])}{more}"
