"""Functions for models and their layers: the linears that read from and write to the residual stream, heads, experts.

The roles of parameters tell which linears read the residual stream and which write into it. A *reader* is a linear
whose input is a norm's output; its weight is [out, hidden]. A *writer* is a linear whose output is added to the stream;
its weight is [hidden, inputs]. The token and position embeddings [rows, hidden] also write into the stream. The head
reads the output of the last norm. A token embedding that is tied to the head both writes and reads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from ..components import (
    Attention,
    Block,
    Component,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    ModelSpec,
    Norm,
    Role,
)
from ..components.model import walk
from ..errors import SwapRefused
from .base import Guarantee, Index, Model, Wide

Dense = FeedForward | GatedFeedForward
_FEW = 4
"""A lossy change is called approximate if it changes at most one in 4 layers. A changed layer costs some hundredths of
a nat of KL divergence, and other layers compensate for little of it. With more changed layers, the model has to be
trained."""


def in_words(layers: Sequence[int]) -> str:
    """Name layers in a message: "layer 3", "layers 0, 1, 2, 3, 4 and 8 others"."""
    few = layers[:5] if len(layers) > 6 else layers
    rest = f" and {len(layers) - len(few)} others" if len(few) < len(layers) else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, few))}{rest}"


def one_or_all(numbers: Iterable[int]) -> int | list[int]:
    """Return the numbers of several layers for a JSON record: one number if they are equal, else a list.

    The list is sorted, and has each number once.
    """
    different = sorted(set(numbers))
    return different[0] if len(different) == 1 else different


def guarantee_of(changed: int, layers: int) -> Guarantee:
    """Return the guarantee of a change that is not exact, by the share of layers that it changes.

    `changed` is the number of changed layers, and `layers` that of all layers. The change must be of a kind that does
    little damage in one layer, such as parallel instead of serial blocks.
    """
    return "exact" if not changed else "approximate" if changed <= max(1, layers // _FEW) else "retrained"


# --- the parts of a layer ---------------------------------------------------------------------------------------------


def tensors_of(path: str, record: Component, *parts: str) -> list[str]:
    """Return the names of a component's tensors in the model.

    Args:
        path: The path of the component in the model, such as "blocks.3.attention".
        record: The component.
        parts: The modules whose tensors to return, such as "q_proj". By default, all tensors are returned.
    """
    shapes = list(record.shapes())
    return [f"{path}.{name}" for part in parts or [""] for name in shapes if not part or name.startswith(f"{part}.")]


def unknown(where: str, component: object, expected: str) -> SwapRefused:
    """Return the error that a swap does not support the kind of a component, or that the component is missing.

    Args:
        where: The place of the component, for the message.
        component: The component, or None.
        expected: What the swap needs instead, for the message.
    """
    problem = "is missing" if component is None else f"is of the kind {type(component).__name__}"
    return SwapRefused(f"{where} {problem}, but this swap needs {expected}")


def unnormed(path: str, mixer: Component) -> None:
    """Raise SwapRefused if a norm, gate or threshold comes right before the output projection of a mixer.

    `mixer` is an attention or feed-forward, and `path` its path in the model.
    """
    for name, words in (("mixed_norm", "a norm"), ("inner_norm", "a norm"), ("sparsity", "a threshold")):
        if getattr(mixer, name, None) is not None:
            raise SwapRefused(
                f"{path} has {words} ({name}) before its output projection, which this swap does not support"
            )
    if getattr(mixer, "gated", False):
        raise SwapRefused(f"{path} has a gate before its output projection, which this swap does not support")


def unclipped(path: str, attention: Attention) -> None:
    """Raise SwapRefused if an attention clips queries, keys and values, because clipping depends on their size."""
    if attention.clip is not None:
        raise SwapRefused(
            f"{path} clips queries, keys and values at {attention.clip:g}, which this swap does not support"
        )


def weighed(path: str, norm: Norm | None, *supported: str) -> None:
    """Raise SwapRefused if a norm does not multiply by its weight, but for example by 1 + weight.

    `supported` names other values of `Norm.gain` that are allowed.
    """
    if norm is not None and norm.gain not in ("weight", *supported):
        raise SwapRefused(
            f"the norm {path} multiplies by {norm.gain}, but this swap supports only norms that multiply by "
            "their weight"
        )


def regained(norm: Norm, name: str, change: Callable[[Wide], Wide]) -> Callable[[Model], Wide]:
    """Return a function that computes a norm's new weight or bias `name` by applying `change` to the old one.

    For a weight, `change` gets and returns the factor by which the norm multiplies, which may be 1 + weight.
    """
    if name.endswith(".bias"):
        return lambda model: change(model.wide(name))
    return lambda model: np.asarray(norm.weight_of(change(norm.factor(model.wide(name)))))


def attentions(spec: ModelSpec, layers: Iterable[int], latent: str, hint: str | None = None) -> dict[int, Attention]:
    """Return the attentions of some layers. Raises SwapRefused if one is latent attention.

    `latent` is the text that follows "layer 3 has latent attention" in the message, and `hint` an alternative.
    """
    attentions_by_layer = {}
    for layer in layers:
        attention: Any = spec.blocks[layer].attention
        if not hasattr(attention, "kv_heads"):
            raise SwapRefused(f"layer {layer} has latent attention{latent}", hint)
        unnormed(f"blocks.{layer}.attention", attention)
        attentions_by_layer[layer] = attention
    return attentions_by_layer


# --- a model with some layers changed ---------------------------------------------------------------------------------


def with_blocks(spec: ModelSpec, changed: Mapping[int, Block], **fields: Any) -> ModelSpec:
    """Return the model with other blocks in some layers. `changed` has the new blocks by layer.

    `fields` has new values of other fields of the model, such as `context_length`.
    """
    blocks = tuple(changed.get(layer, block) for layer, block in enumerate(spec.blocks))
    return replace(spec, blocks=blocks, **fields)


def with_mixers(spec: ModelSpec, changed: Mapping[int, Any], **fields: Any) -> ModelSpec:
    """Return the model with another attention or feed-forward in some layers. `changed` has them by layer.

    `fields` has new values of other fields of the model, such as `context_length`.
    """
    return with_blocks(spec, {i: spec.blocks[i].replaced(**{new.slot: new}) for i, new in changed.items()}, **fields)


class _Linear(NamedTuple):
    """A linear layer in a block."""

    path: str
    weight: str  # the name of the weight
    bias_name: str  # the name of the bias, even if there is none
    bias: bool  # whether it has a bias
    may_have_bias: bool  # whether it could have a bias, which the linear of a router cannot
    norm: str  # the path of the norm before its sub-layer
    slot: str  # "attention" or "feed_forward"

    @property
    def names(self) -> list[str]:
        """Return the names of its weight and, if it has one, its bias."""
        return [self.weight, *([self.bias_name] if self.bias else [])]


def linears(block: Block, path: str, *wanted: Role) -> Iterator[_Linear]:
    """Yield the linear layers of a block whose weights have one of the roles `wanted`, in the order of its sub-layers.

    A role is for example "reads" or "writes" (see `components.base.Role`). `path` is the path of the block, such as
    "blocks.3".
    """
    first = ""
    for sublayer in block.sublayers:
        slot = sublayer.mixer.slot
        norm = f"{path}.{slot}_norm" if sublayer.norm is not None else first
        first = first or norm
        for inner, node in walk(sublayer.mixer, f"{path}.{slot}"):
            weights = node.weights()
            for name, weight in weights.items():
                if weight.role in wanted and len(weight.shape) > 1:  # a head's sink is no linear
                    linear, bias = f"{inner}.{name.removesuffix('.weight')}", name.replace(".weight", ".bias")
                    flags = bias in weights, weight.role != "router"
                    yield _Linear(linear, f"{inner}.{name}", f"{inner}.{bias}", *flags, norm, slot)


def _known_by_linears(block: Block, path: str) -> None:
    """Raise SwapRefused if a sub-layer multiplies the residual stream elementwise by a vector.

    `readers` would not list such a vector, because it is no linear.
    """
    for sublayer in block.sublayers:
        for name, weight in sublayer.mixer.weights().items():
            if weight.role == "columns":
                where = f"{path}.{sublayer.mixer.slot} ({type(sublayer.mixer).__name__})"
                raise SwapRefused(
                    f"{where} multiplies the residual stream itself by its {name}, which this swap does not support"
                )


def readers(block: Block, path: str) -> tuple[_Linear, ...]:
    """Return the linears of a block at `path` ("blocks.3") that read the residual stream, most of them after a norm."""
    _known_by_linears(block, path)
    return tuple(linears(block, path, "reads", "router"))


def writers(block: Block, path: str) -> tuple[_Linear, ...]:
    """Return the linears of a block whose outputs are added to the residual stream, including those of experts."""
    return tuple(linears(block, path, "writes"))


def written_biases(block: Block, path: str) -> list[str]:
    """Return the biases of the norms that follow attention and feed-forward in a block.

    These biases are added to the residual stream even if attention and feed-forward output zeros.
    """
    output_norms = (
        (f"{path}.{sublayer.mixer.slot}_output_norm.bias", sublayer.output_norm) for sublayer in block.sublayers
    )
    return [name for name, norm in output_norms if norm is not None and "bias" in norm.shapes()]


class Inner(NamedTuple):
    """A feed-forward, or one expert of a mixture. A unit is one element of its intermediate dimension."""

    path: str
    record: FeedForward | GatedFeedForward
    layer: int
    inputs: list[str]  # the linears that read its input; the activation is applied to the output of the first
    up: list[str]  # the tensors with one row (or element) per unit
    down: str  # the weight of the output projection, with one column per unit
    down_bias: str  # the name of the output bias, even if there is none
    units: int  # the intermediate size


def experts(block: Block, layer: int) -> Iterator[Inner]:
    """Yield the feed-forward of a block, or if it is a mixture, each of its experts.

    Raises:
        SwapRefused: There is a shared expert, the feed-forward clamps its activations, or it adds a constant to
            up_proj's output. Swaps that change the number of intermediate elements do not support these.
    """
    mixer, whole = block.feed_forward, f"blocks.{layer}.feed_forward"
    if getattr(mixer, "shared", None) is not None:
        raise SwapRefused(
            f"{whole} has a shared expert; this swap supports only mixtures of experts without shared experts"
        )
    inner = getattr(mixer, "expert", mixer)
    for field, words in (("limit", "clamps its activations"), ("up_shift", "adds a constant to up_proj's output")):
        if getattr(inner, field, None):
            raise SwapRefused(f"{whole} {words} ({field}), which this swap does not support")
    named_experts = mixer.children() if hasattr(mixer, "expert") else ()  # other mixtures have norms inside
    nested: list[Any] = [(f"{whole}.{name}", expert) for name, expert in named_experts]
    for path, record in nested or [(whole, mixer)]:
        unnormed(path, record)
        inputs = [name.removesuffix(".weight") for name, weight in record.weights().items() if weight.role == "reads"]
        names = tensors_of(path, record, *inputs), f"{path}.down_proj.weight", f"{path}.down_proj.bias"
        yield Inner(path, record, layer, inputs, *names, record.intermediate_size)


def largest(score: Wide, size: int) -> Index:
    """Return the indices of the `size` largest scores, in ascending order."""
    return np.sort(np.argsort(-score, kind="stable")[:size])


def by_weights(model: Model, inner: Inner) -> Wide:
    """Return the importance of each intermediate element of a feed-forward, as far as the weights show it.

    It is the product of the norms of the element's row in every input projection and of its column in down_proj.
    """
    score: Wide = np.linalg.norm(model.wide(inner.down), axis=0)
    for name in inner.inputs:
        score = score * np.linalg.norm(model.wide(f"{inner.path}.{name}.weight"), axis=1)
    return score


def tables(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the token and position embeddings [rows, hidden], which write into the residual stream.

    Raises:
        SwapRefused: The token embedding has another width than the residual stream, or the position encoding that is
            added to it has no weights.
    """
    if spec.embedding.width is not None:
        raise SwapRefused(
            f"the embedding has width {spec.embedding.width}, but this swap needs the hidden size, {spec.hidden_size}"
        )
    if spec.positions is not None and not spec.positions.weights():
        raise unknown("the model's position encoding", spec.positions, "a position embedding")
    return ("embedding.weight", *(["positions.weight"] if spec.positions is not None else []))


def head_weight(spec: ModelSpec) -> str:
    """Return the name of the head's matrix [vocabulary, hidden].

    Raises SwapRefused if there is a projection between the last norm and the head.
    """
    head = spec.has_head()
    if head.width is not None or head.transform is not None:
        problem = "a hidden layer before it" if head.width is None else f"width {head.width}"
        raise SwapRefused(f"the head has {problem}, but this swap needs a head that reads the residual stream directly")
    return "embedding.weight" if spec.tied else "head.weight"


def written(spec: ModelSpec) -> list[tuple[str, int]]:
    """Return the names of the tensors that write into the residual stream, each with its axis of size `hidden_size`."""
    tensors = [(name, 1) for name in tables(spec)]
    for layer, block in enumerate(spec.blocks):
        _known_by_linears(block, f"blocks.{layer}")
        tensors += [(name, 0) for writer in writers(block, f"blocks.{layer}") for name in writer.names]
    return tensors


def read_weights(spec: ModelSpec) -> list[str]:
    """Return the names of the weights [out, hidden] that read the residual stream, including an untied head."""
    weights = [reader.weight for layer, block in enumerate(spec.blocks) for reader in readers(block, f"blocks.{layer}")]
    return weights + ([] if spec.tied else ["head.weight"])


# --- heads ------------------------------------------------------------------------------------------------------------


Grouped = Attention | LatentAttention


@dataclass(frozen=True)
class _HeadTensor:
    """A tensor that stores heads next to each other along an axis."""

    name: str
    size: int  # the number of elements of a head
    keys: bool = False  # whether these are key-value heads, not query heads
    axis: int = 0  # the axis along which the heads are stored


@dataclass(frozen=True)
class HeadChoice:
    """The old heads whose weights the heads of a new attention get."""

    heads: Index  # the old query heads, in the order of the new ones
    keys: Index  # the old key-value heads, in the order of the new ones
    silent: np.ndarray  # for each new query head, whether its output is zero


def key_heads(attention: Grouped) -> int:
    """Return the number of key-value heads. Latent attention has one for every query head."""
    count: int = getattr(attention, "kv_heads", attention.heads)
    return count


def parts(path: str, attention: Grouped) -> tuple[_HeadTensor, ...]:
    """Return the tensors of an attention that store heads next to each other. The last one is the weight of o_proj."""
    shared = {"k_proj", "v_proj"}
    tensors = []
    for name, shape in attention.shapes().items():
        linear = name.partition(".")[0]
        if linear in {"q_proj", "q_up_proj", "k_up_proj", "v_up_proj", *shared}:
            heads = key_heads(attention) if linear in shared else attention.heads
            tensors.append(_HeadTensor(f"{path}.{name}", shape[0] // heads, linear in shared))
        elif name == "sinks":
            tensors.append(_HeadTensor(f"{path}.{name}", 1))
    width = attention.shapes()["o_proj.weight"][1] // attention.heads
    return (*tensors, _HeadTensor(f"{path}.o_proj.weight", width, axis=1))


def slopes(attention: Grouped, heads: int) -> list[float] | None:
    """Return the ALiBi slopes that an attention would have with `heads` heads, or None if it has no ALiBi."""
    position: Any = attention.position
    if position is None or not position.biases:
        return None
    import torch

    from ..modules.registry import module_of

    bias = module_of(position).bias(position, heads, torch.ones(1, 2, dtype=torch.long), torch.float64)
    return [float(slope) for slope in bias[0, :, 0, 1] - bias[0, :, 0, 0]]  # slopes may count back from the last key


def choice_of(attention: Grouped, heads: Sequence[int]) -> HeadChoice:
    """Return the choice of some old query heads, in this order, and of the key-value heads that they read.

    With ALiBi, only the number of `heads` counts: every new head is the old head with the same slope.
    """
    old, keys = attention.heads, key_heads(attention)
    before, after = slopes(attention, old), slopes(attention, len(heads))
    if before is not None and after is not None:
        heads = [before.index(slope) for slope in after]
    index, group = np.array(heads), old // keys
    key_index = index if keys == old else np.array(sorted({head // group for head in heads}))
    return HeadChoice(index, key_index, np.zeros(len(index), dtype=bool))


def remaining(
    attention: Grouped,
    units: Sequence[Index],
    new: int,
    new_keys: int,
    costs: Callable[[list[int]], Callable[[Index], float]] | Wide,
) -> list[int]:
    """Choose the query heads that stay. The cheapest removal is made first, until `new` heads are left.

    All groups of query heads that share a key-value head stay equally large.

    Args:
        attention: The attention with all heads.
        units: The sets of query heads that can be removed together: single heads, or whole groups.
        new: The number of query heads that stay.
        new_keys: The number of key-value heads that stay.
        costs: The cost of removing each head, (heads,). If the cost depends on the heads that are left, this is a
            function instead. It is called with these heads, and returns a second function: from a set of heads to the
            cost of removing it.

    Returns:
        The numbers of the heads that stay.
    """
    old, keys, dropped = attention.heads, key_heads(attention), set[int]()
    group = old // keys
    while old - len(dropped) > new:
        stay = [head for head in range(old) if head not in dropped]
        cost = costs(stay) if callable(costs) else lambda unit: float(costs[unit].sum())
        allowed = [unit for unit in units if not dropped & set(unit.tolist())]
        if keys not in (old, 1) and new_keys == keys:
            dropped_by_group = [sum(head // group == key for head in dropped) for key in range(keys)]
            allowed = [unit for unit in allowed if dropped_by_group[unit[0] // group] < group - new // keys]
        dropped |= set(min(allowed, key=cost).tolist())
    return [head for head in range(old) if head not in dropped]
