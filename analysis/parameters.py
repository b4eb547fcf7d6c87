"""How many parameters a tree has, by component and layer. Reads shapes alone: no weights, no torch."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..components import Block, ModelSpec, Parameter
from ..components import operations as ops
from ..display import Record, Shown

if TYPE_CHECKING:
    from ..architectures import Architecture

_VOCABULARY_SIDE = ("embedding", "positions", "head")
"""Components that grow with the vocabulary or the context, not with what is computed between them."""


@dataclass(frozen=True)
class LayerCount(Record):
    """One layer's parameters by component, in order of appearance. Layers alike share one record."""

    JSON = "total components=by_component"

    by_component: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_component.values())


@dataclass(frozen=True)
class TensorCount(Record):
    """Parameters in numbers (not bytes), by where they are.

    by_component: the whole model's, in order of appearance; sums to `total`.
    by_layer: one a layer.
    outside: what lies in no layer, by component. With the layers it sums to `total`.
    """

    total: int
    by_component: Mapping[str, int]
    by_layer: Sequence[LayerCount]
    outside: Mapping[str, int]

    def __repr__(self) -> str:
        parts = ", ".join(f"{label} {number:,}" for label, number in self.by_component.items())
        return f"<{self.total:,} parameters: {parts}>"

    @property
    def number_of_layers(self) -> int:
        return len(self.by_layer)

    @property
    def numbered_layers(self) -> list[dict[str, Any]]:
        return [{"layer": index, **layer.as_json()} for index, layer in enumerate(self.by_layer)]


@dataclass(frozen=True, repr=False)
class ParameterCount(TensorCount, Shown):
    """A tree's parameters. A tied head is the embedding's weight, and not counted again.

    tied: the head shares the embedding's weight.
    active: what one token meets: of a mixture's experts, those that its router takes. Otherwise all.
    """

    JSON = (
        "total active embedding_positions_head=embedding non_embedding tied layers=number_of_layers"
        " components=by_component by_layer=numbered_layers"
    )

    tied: bool
    active: int

    @property
    def embedding(self) -> int:
        """Token table, learned positions and, unless tied, the head."""
        return sum(self.outside.get(component, 0) for component in _VOCABULARY_SIDE)

    @property
    def non_embedding(self) -> int:
        """All but `embedding`: layers and norms, as Kaplan et al. (2001.08361) and Qwen's model cards count."""
        return self.total - self.embedding


def count(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> ParameterCount:
    """Count the parameters of a tree, or with `size` another number of each, of bytes say, in which layers alike may
    differ. Without it layers alike are counted once and multiplied.
    """
    kinds = {block: kind for kind, block in enumerate(dict.fromkeys(spec.blocks))}
    layers = range(len(spec.blocks)) if size is not None else [kinds[block] for block in spec.blocks]
    blocks, repeats = spec.blocks if size is not None else tuple(kinds), Counter(layers)
    outside: Counter[str] = Counter()
    by_component: Counter[str] = Counter()
    by_layer: list[Counter[str]] = [Counter() for _ in blocks]
    experts: Counter[int] = Counter()
    for parameter in msgspec.structs.replace(spec, blocks=blocks).parameters():
        layer, label = parameter.layer, parameter.component
        number = parameter.count if size is None else size(parameter)
        (outside if layer is None else by_layer[layer])[label] += number
        by_component[label] += number if layer is None else number * repeats[layer]
        if layer is not None and ".experts." in parameter.name:
            experts[layer] += number
    choices = {block: choice_of(spec, block) for block in kinds}
    idle = 0  # of experts that a token does not meet
    for layer, number in experts.items():
        choice = choices[blocks[layer]]
        if choice is not None:
            idle += number * (choice.experts - choice.top_k) // choice.experts * repeats[layer]
    records = [LayerCount(dict(layer)) for layer in by_layer]
    return ParameterCount(
        total=by_component.total(),
        by_component=dict(by_component),
        by_layer=[records[layer] for layer in layers],
        outside=dict(outside),
        tied=spec.tied,
        active=by_component.total() - idle,
    )


def buffers(spec: ModelSpec, architecture: "Architecture | None") -> int:
    """Return how many of a tree's numbers transformers stores as buffers, which it does not count as parameters.

    0 where no architecture is given, since only a family's tensors say what transformers' modules are.
    """
    names = {name for leaf in (architecture.leaves if architecture else ()) if leaf.buffer for name in leaf.names}
    if not names:
        return 0
    blocks = Counter(spec.blocks)  # those alike are counted once
    repeats = [*blocks.values()]
    return sum(
        parameter.count * (1 if parameter.layer is None else repeats[parameter.layer])
        for parameter in msgspec.structs.replace(spec, blocks=tuple(blocks)).parameters()
        if re.sub(r"^blocks\.\d+\.", "blocks.{layer}.", parameter.name) in names
    )


def choice_of(spec: ModelSpec, block: Block) -> ops.Choose | None:
    """How a block chooses its experts, where it has any."""
    return next((each for each in spec.block_operations(block) if isinstance(each, ops.Choose)), None)
