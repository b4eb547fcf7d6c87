"""The number of a model's parameters by component and layer, from shapes alone. No weights, no torch."""

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

SMALL = 50_000_000
"""The largest model, in parameters, that gptkit runs in fp64 and once more per step, cause or mistake by default."""
_VOCABULARY_SIDE = ("embedding", "positions", "head")
"""Components whose size depends on the vocabulary or the context."""


@dataclass(frozen=True)
class LayerCount(Record):
    """The parameters of one layer by component, in order of appearance. Equal layers share one record."""

    JSON = "total components=by_component"

    by_component: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_component.values())


@dataclass(frozen=True)
class TensorCount(Record):
    """The number of a model's parameters, in total, by component and by layer."""

    total: int
    by_component: Mapping[str, int]
    """The parameters of the whole model by component, in order of appearance."""
    by_layer: Sequence[LayerCount]
    outside: Mapping[str, int]
    """The parameters outside of layers, by component."""

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
    """The number of a model's parameters. A tied head is not counted again."""

    JSON = (
        "total active embedding_positions_head=embedding non_embedding tied layers=number_of_layers"
        " components=by_component by_layer=numbered_layers"
    )

    tied: bool
    """Whether the head shares the embedding's weight."""
    active: int
    """The number of parameters that one token uses: all except those of experts that the router does not choose."""

    @property
    def embedding(self) -> int:
        """Return the number of parameters in the token embedding, learned positions and, unless tied, the head."""
        return sum(self.outside.get(component, 0) for component in _VOCABULARY_SIDE)

    @property
    def non_embedding(self) -> int:
        """Return the number of parameters without embeddings and head.

        Kaplan et al. (2001.08361) and Qwen's model cards count in this way.
        """
        return self.total - self.embedding


def count(spec: ModelSpec, size: Callable[[Parameter], int] | None = None) -> ParameterCount:
    """Count the parameters of a model, by component and layer.

    If `size` is given, the result has sums of `size(parameter)` instead of numbers of parameters, for example bytes.
    `size` may return other values for equal layers.
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
    idle = 0  # parameters of experts that a token does not use
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
    """Return the number of a model's parameters that transformers stores as buffers and does not count.

    The router biases of DeepSeek-V3 are an example. The result is 0 if `architecture` is None, because the definition
    of a model family says which tensors are buffers.
    """
    names = {name for leaf in (architecture.leaves if architecture else ()) if leaf.buffer for name in leaf.names}
    if not names:
        return 0
    blocks = Counter(spec.blocks)  # equal blocks are counted once
    repeats = [*blocks.values()]
    return sum(
        parameter.count * (1 if parameter.layer is None else repeats[parameter.layer])
        for parameter in msgspec.structs.replace(spec, blocks=tuple(blocks)).parameters()
        if re.sub(r"^blocks\.\d+\.", "blocks.{layer}.", parameter.name) in names
    )


def choice_of(spec: ModelSpec, block: Block) -> ops.Choose | None:
    """Return the router's operation that chooses a block's experts, or None if the block has no experts."""
    operations = spec.block_operations(block)
    return next((operation for operation in operations if isinstance(operation, ops.Choose)), None)
