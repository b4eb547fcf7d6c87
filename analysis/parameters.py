"""How many parameters a tree has, by component and layer. Reads shapes alone: no weights, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..components import Block, ModelSpec, Parameter
from ..components import operations as ops
from ..display import Shown

VOCABULARY_SIDE = ("embedding", "positions", "head")
"""Components that grow with the vocabulary or the context, not with what is computed between them."""


@dataclass(frozen=True)
class LayerCount:
    """One layer's parameters by component, in order of appearance. Layers alike share one record."""

    by_component: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_component.values())


@dataclass(frozen=True)
class ParameterCount(Shown):
    """A tree's parameters, in numbers (not bytes). A tied head is the embedding's weight, and not counted again.

    by_component: the whole tree's, in order of appearance; sums to `total`.
    by_layer: one a layer.
    outside: what lies in no layer, by component. With the layers it sums to `total`.
    tied: the head shares the embedding's weight.
    active: what one token meets: of a mixture's experts, those that its router takes. Otherwise all.
    """

    total: int
    by_component: Mapping[str, int]
    by_layer: Sequence[LayerCount]
    outside: Mapping[str, int]
    tied: bool
    active: int

    def __repr__(self) -> str:
        parts = ", ".join(f"{label} {number:,}" for label, number in self.by_component.items())
        return f"<{self.total:,} parameters: {parts}>"

    @property
    def embedding(self) -> int:
        """Token table, learned positions and, unless tied, the head."""
        return sum(self.outside.get(component, 0) for component in VOCABULARY_SIDE)

    @property
    def non_embedding(self) -> int:
        """All but `embedding`: layers and norms, as Kaplan et al. (2001.08361) and Qwen's model cards count."""
        return self.total - self.embedding


def count(spec: ModelSpec) -> ParameterCount:
    """Count the parameters of a tree. Layers alike are counted once and multiplied."""
    kinds = {block: kind for kind, block in enumerate(dict.fromkeys(spec.blocks))}
    outside: Counter[str] = Counter()
    layers: list[Counter[str]] = [Counter() for _ in kinds]
    by_component: Counter[str] = Counter()
    repeats = Counter(kinds[block] for block in spec.blocks)
    for parameter in msgspec.structs.replace(spec, blocks=tuple(kinds)).parameters():
        kind = parameter.layer
        (outside if kind is None else layers[kind])[parameter.component] += parameter.count
        by_component[parameter.component] += parameter.count * (1 if kind is None else repeats[kind])
    records = [LayerCount(dict(layer)) for layer in layers]
    return ParameterCount(
        total=by_component.total(),
        by_component=dict(by_component),
        by_layer=[records[kinds[block]] for block in spec.blocks],
        outside=dict(outside),
        tied=spec.head.tied,
        active=by_component.total() - sum(_idle(spec, block) * repeats[kind] for block, kind in kinds.items()),
    )


def count_of(spec: ModelSpec, size: Callable[[Parameter], int]) -> ParameterCount:
    """The same of another number than that of parameters, of bytes say, which layers alike may differ in."""
    outside: Counter[str] = Counter()
    layers: list[Counter[str]] = [Counter() for _ in spec.blocks]
    idle = 0
    choices = {block: choice_of(spec, block) for block in set(spec.blocks)}
    for each in spec.parameters():
        number = size(each)
        (outside if each.layer is None else layers[each.layer])[each.component] += number
        choice = None if each.layer is None else choices[spec.blocks[each.layer]]
        if choice is not None and ".experts." in each.name:
            idle += number * (choice.experts - choice.top_k) // choice.experts
    whole: Counter[str] = Counter()
    for part in (outside, *layers):
        whole.update(part)
    order = count(spec).by_component
    return ParameterCount(
        total=whole.total(),
        by_component={label: whole[label] for label in order},
        by_layer=[LayerCount(dict(layer)) for layer in layers],
        outside=dict(outside),
        tied=spec.head.tied,
        active=whole.total() - idle,
    )


def _idle(spec: ModelSpec, block: Block) -> int:
    """Parameters of the experts that a token does not meet."""
    choice = choice_of(spec, block)
    if choice is None:
        return 0
    stored = sum(each.parameters // each.copies for each in spec.block_operations(block) if each.copies > 1)
    return (choice.experts - choice.top_k) * stored


def choice_of(spec: ModelSpec, block: Block) -> ops.Choose | None:
    """How a block chooses its experts, where it has any."""
    return next((each for each in spec.block_operations(block) if isinstance(each, ops.Choose)), None)


def to_json(name: str, family: str, count: ParameterCount) -> dict[str, Any]:
    """The count as plain JSON values; every figure is an integer number of parameters but `layers`."""
    return {
        "model": name,
        "family": family,
        "total": count.total,
        "active": count.active,
        "embedding_positions_head": count.embedding,
        "non_embedding": count.non_embedding,
        "tied": count.tied,
        "layers": len(count.by_layer),
        "components": dict(count.by_component),
        "by_layer": [
            {"layer": index, "total": layer.total, "components": dict(layer.by_component)}
            for index, layer in enumerate(count.by_layer)
        ],
    }
