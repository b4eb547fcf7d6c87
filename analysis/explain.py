"""The formula for a model's number of parameters, such as V·d + T·d + L(12d² + 13d) + 2d. No torch, no weights.

The formula is derived from the shapes of the parameters, so that it exists for any model. Components assign a letter to
every dimension of a shape (`Component.letters`, `Component.rows`). A parameter's size is a product of letters, and the
formula is the sum of all products. A width that is a small multiple of d is written as 4d, not f. If layers differ in a
size, every value has its own letter (f1, f2). Layers with the same formula are counted together (L1, L2).
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
_MULTIPLES = "hkfiaruwp"  # widths that are written as a multiple of d, if it is at most `_MOST`
_MOST = 8
_MOST_RANGES = 3  # the largest number of ranges of layers in the meaning of a letter such as L1

_Letter = tuple[str, int]  # a letter, such as d for the hidden size, and its value
_Sum = Counter[tuple[_Letter, ...]]  # products of letters, with their coefficients


@dataclass(frozen=True)
class _Symbol(Record):
    """A letter of the formula, with its value and meaning."""

    JSON = "value meaning"

    name: str
    value: int
    meaning: str


@dataclass(frozen=True)
class _Term:
    """The part of the formula that belongs to one component."""

    label: str  # the component's name in a table of parameters
    formula: str
    value: int  # the number of parameters


@dataclass(frozen=True)
class Explained(Record):
    """A model's number of parameters as a formula, and the terms of its components in the order of computation.

    Formulas are text. A product is written as 2d·k or d², and a factor of a sum stands before brackets: L(12d² + 13d).
    """

    JSON = "formula symbols=by_letter components=by_component"

    total: int
    formula: str
    symbols: tuple[_Symbol, ...]
    terms: tuple[_Term, ...]

    @property
    def by_letter(self) -> dict[str, _Symbol]:
        return {symbol.name: symbol for symbol in self.symbols}

    @property
    def by_component(self) -> dict[str, str]:
        return {term.label: term.formula for term in self.terms}


def explain(spec: ModelSpec) -> Explained:
    """Return the formula for a model's number of parameters. A tied head is not counted again.

    Raises:
        MissingComponent: the model has an encoder.
    """
    spec.one_stack("the formula for the parameter total")
    before: dict[str, _Sum] = {}  # by component
    after: dict[str, _Sum] = {}
    by_block = {block: _layer(spec, block) for block in dict.fromkeys(spec.blocks)}
    kinds: list[dict[str, _Sum]] = []
    for layer in by_block.values():
        kinds += [] if layer in kinds else [layer]
    of_kind = [kinds.index(by_block[block]) for block in spec.blocks]
    ends = {path: node for path, node in spec.nodes() if not path.startswith("blocks.")}
    for path, node in ends.items():
        side, above = (
            after if path.startswith(("joined", "final_norm", "head")) else before,
            ends.get(path.rpartition(".")[0]),
        )
        side.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec, above))
    letters = _letters([before, *kinds, after])
    names = [f"L{index + 1}" if len(kinds) > 1 else "L" for index in range(len(kinds))]

    def term(label: str | None) -> _Term:
        """Return the term of the component with this label, or of all components if it is None."""
        first, *layers, last = (
            _merged(part.values()) if label is None else part.get(label, _Sum()) for part in (before, *kinds, after)
        )
        again = _Sum({product: times for product, times in last.items() if product in first})
        inner = [(name, _written(layer, letters, by_degree=True)) for name, layer in zip(names, layers, strict=True)]
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

    labels = dict.fromkeys(label for part in (before, *kinds, after) for label, products in part.items() if products)
    whole = term(None)
    symbols = [_Symbol(name, size, _MEANINGS[base]) for (base, size), name in letters.items()]
    layers = [_Symbol(name, of_kind.count(kind), _which(kind, of_kind)) for kind, name in enumerate(names)]
    return Explained(whole.value, whole.formula, (*symbols, *layers), tuple(map(term, labels)))


def _layer(spec: ModelSpec, block: Block) -> dict[str, _Sum]:
    """Return the sizes of one layer's parameters as products of letters, such as d·f, by component.

    All experts have equal sizes, so only the parameters of the first one are read. Their products have the factor E,
    the number of experts.
    """
    by_component: dict[str, _Sum] = {}
    nodes = {path: node for path, node in walk(block, "blocks.0") if node.label is not None}
    choice = choice_of(spec, block)
    for path, node in nodes.items():
        if ".experts." not in path or path.endswith(".experts.0"):
            above = nodes.get(path.rpartition(".")[0])
            experts = choice.experts if choice is not None and ".experts." in path else None
            by_component.setdefault(str(node.label), Counter()).update(_shapes(path, node, spec, above, experts))
    return by_component


def _shapes(
    path: str, node: Component, spec: ModelSpec, above: Component | None = None, experts: int | None = None
) -> _Sum:
    """Return the sizes of a component's parameters as products of letters, such as d·f.

    Args:
        path: the component's name in the model.
        node: the component.
        spec: the model.
        above: the component that contains `node`, if any. If it assigns letters to the sizes of `node`, these are used.
        experts: the number of equal experts, if the component is part of one.
    """
    products = _Sum()
    from_above = {} if above is None else above.letters(path.rpartition(".")[2])
    widths = from_above or {"d": spec.hidden_size, **node.letters()}
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
        products[tuple(sorted(product, key=lambda letter: [*_MEANINGS].index(letter[0])))] += factor
    return products


def _letters(parts: Iterable[Mapping[str, _Sum]]) -> dict[_Letter, str]:
    """Return how every letter is written in the formula. A letter with several values is numbered: f1, f2.

    `parts` are the products by component: before the layers, in every kind of layer, and after the layers.
    """
    used = dict.fromkeys(letter for part in parts for sums in part.values() for product in sums for letter in product)
    sizes: dict[str, list[_Letter]] = {}
    for letter in used:
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
    """Return a sum of products as text: 12d² + 13d. If `by_degree`, products with the most factors come first."""
    terms = []
    for product in sorted(products, key=len, reverse=True) if by_degree else products:
        powers = Counter(letters[letter] for letter in product)
        factors = "·".join(name + {1: "", 2: "²", 3: "³"}[power] for name, power in powers.items())
        terms.append(f"{'' if products[product] == 1 else products[product]}{factors}")
    return " + ".join(terms)


def _which(kind: int, of_kind: list[int]) -> str:
    if set(of_kind) == {kind}:
        return _MEANINGS["L"]
    ranges = [range_label(first, last) for first, last, other in layer_ranges(of_kind) if other == kind]
    more = f" and {len(ranges) - _MOST_RANGES} more ranges" if len(ranges) > _MOST_RANGES else ""
    return f"layers {', '.join(ranges[:_MOST_RANGES])}{more}"
