"""What swaps ask of a tree and its layers, and a tree with some of them changed.

Who reads the residual stream, and who writes into it, is told by the roles of parameters. A reader is a linear map on a
norm's output, its weight [out, hidden]; a writer's output is added to the stream, its weight [hidden, out of the
component]. The tables of tokens and positions write too, by rows [vocabulary, hidden]; the head reads behind the last
norm, and where it is tied the token table does both.
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
"""Layers that a lossy change may be made in, as a share of all: one in so many, or one. A changed layer costs some
hundredths of a nat, and its neighbours make up for little of it: beyond this the model is to be trained."""


def in_words(layers: Sequence[int]) -> str:
    """Layers in a message: "layer 3", "layers 0, 1, 2, 3, 4 and 8 others"."""
    few = layers[:5] if len(layers) > 6 else layers
    more = f" and {len(layers) - len(few)} others" if len(few) < len(layers) else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, few))}{more}"


def one_or_all(numbers: Iterable[int]) -> int | list[int]:
    """What layers have, for a record: one number, or where they differ all of them in order."""
    found = sorted(set(numbers))
    return found[0] if len(found) == 1 else found


def guarantee_of(changed: int, layers: int) -> Guarantee:
    """What a lossy change of so many layers, each for itself harmless, leaves of a model."""
    return "exact" if not changed else "approximate" if changed <= max(1, layers // _FEW) else "retrained"


# --- what stands in a layer -------------------------------------------------------------------------------------------


def tensors_of(path: str, record: Component, *parts: str) -> list[str]:
    """The tensors of a component's parts ("q_proj"), weight and bias; of all its parts, where none is named."""
    own = list(record.shapes())
    return [f"{path}.{name}" for part in parts or [""] for name in own if not part or name.startswith(f"{part}.")]


def unknown(where: str, component: object, expected: str) -> SwapRefused:
    """The refusal of a component that a swap does not know, by its class."""
    found = "nothing" if component is None else type(component).__name__
    return SwapRefused(f"{where} has {found}, but this swap needs {expected}")


def unnormed(path: str, mixer: Component) -> None:
    """Raise SwapRefused where a mixer norms all that its output projection reads, for a swap that changes that."""
    for name in ("mixed_norm", "inner_norm", "sparsity"):
        if getattr(mixer, name, None) is not None:
            raise SwapRefused(f"{path} has {name} before its output projection, which this swap does not support")
    if getattr(mixer, "gated", False):
        raise SwapRefused(f"{path} has a gate before its output projection, which this swap does not support")


def unclipped(path: str, attention: Attention) -> None:
    """Raise SwapRefused where an attention clips queries, keys and values, for a swap that makes them larger, or moves
    what is added to them.
    """
    if attention.clip is not None:
        raise SwapRefused(
            f"{path} clips queries, keys and values at {attention.clip:g}, which this swap does not support"
        )


def weighed(path: str, norm: Norm | None, *more: str) -> None:
    """Raise SwapRefused where a norm does not multiply by its weight as it is, for a swap that changes that weight;
    `more` are other gains that the swap knows.
    """
    if norm is not None and norm.gain not in ("weight", *more):
        raise SwapRefused(
            f"{path} multiplies by {norm.gain}, but this swap supports only norms that multiply by their weight"
        )


def regained(norm: Norm, name: str, change: Callable[[Wide], Wide]) -> Callable[[Model], Wide]:
    """A norm's tensor after a change of what it multiplies by, or of its bias."""
    if name.endswith(".bias"):
        return lambda model: change(model.wide(name))
    return lambda model: np.asarray(norm.weight_of(change(norm.factor(model.wide(name)))))


def attentions(spec: ModelSpec, layers: Iterable[int], latent: str, hint: str | None = None) -> dict[int, Attention]:
    """The attentions of these layers, each of which has key-value heads. Raises SwapRefused where one is latent:
    "layer 3 has latent attention", and what `latent` says of it; `hint` says what would be possible there.
    """
    found = {}
    for layer in layers:
        attention: Any = spec.blocks[layer].attention
        if not hasattr(attention, "kv_heads"):
            raise SwapRefused(f"layer {layer} has latent attention{latent}", hint)
        unnormed(f"blocks.{layer}.attention", attention)
        found[layer] = attention
    return found


# --- a tree with some layers changed ----------------------------------------------------------------------------------


def with_blocks(spec: ModelSpec, changed: Mapping[int, Block], **fields: Any) -> ModelSpec:
    """The tree with some of its blocks exchanged, and other fields of its own."""
    blocks = tuple(changed.get(layer, block) for layer, block in enumerate(spec.blocks))
    return replace(spec, blocks=blocks, **fields)


def with_mixers(spec: ModelSpec, changed: Mapping[int, Any], **fields: Any) -> ModelSpec:
    """The tree with the attention, or the feed-forward, of some layers exchanged, and other fields of its own."""
    return with_blocks(spec, {i: spec.blocks[i].replaced(**{new.slot: new}) for i, new in changed.items()}, **fields)


class _Linear(NamedTuple):
    """A linear of a block: its path in the tree, the shared names of its weight and of its bias, whether it has one or
    not, whether its record has a field for one, of a reader the path of the norm that it reads, and what its mixer is
    called in the block.
    """

    path: str
    weight: str
    bias_name: str
    bias: bool
    may_have_bias: bool
    norm: str
    slot: str

    @property
    def names(self) -> list[str]:
        """The shared names of its tensors."""
        return [self.weight, *([self.bias_name] if self.bias else [])]


def linears(block: Block, path: str, *wanted: Role) -> Iterator[_Linear]:
    """The linears of a block with these roles, of any mixer, in the order of its sub-layers."""
    first = ""
    for sublayer in block.sublayers:
        slot = sublayer.mixer.slot
        norm = f"{path}.{slot}_norm" if sublayer.norm is not None else first
        first = first or norm
        for inner, node in walk(sublayer.mixer, f"{path}.{slot}"):
            own = node.weights()
            for name, weight in own.items():
                if weight.role in wanted and len(weight.shape) > 1:  # a sink of a head is inside too, and no linear
                    at, bias = f"{inner}.{name.removesuffix('.weight')}", name.replace(".weight", ".bias")
                    flags = bias in own, weight.role != "router"
                    yield _Linear(at, f"{inner}.{name}", f"{inner}.{bias}", *flags, norm, slot)


def _known_by_linears(block: Block, path: str) -> None:
    """Refuse mixers that multiply the stream's columns themselves, of which whoever asks for linears knows nothing."""
    for sublayer in block.sublayers:
        for name, weight in sublayer.mixer.weights().items():
            if weight.role == "columns":
                where = f"{path}.{sublayer.mixer.slot} ({type(sublayer.mixer).__name__})"
                raise SwapRefused(f"{where} uses a {name}, but this swap supports only linear layers")


def readers(block: Block, path: str) -> tuple[_Linear, ...]:
    """The linears of a block (at `path`, as "blocks.3") that read the stream, each behind a norm."""
    _known_by_linears(block, path)
    return tuple(linears(block, path, "reads", "router"))


def writers(block: Block, path: str) -> tuple[_Linear, ...]:
    """The linears of a block whose outputs are added to the stream. (Those of experts are weighted before.)"""
    return tuple(linears(block, path, "writes"))


def written_biases(block: Block, path: str) -> list[str]:
    """The biases of the norms on what a block's mixers give: added to the stream where the mixers give nothing."""
    named = ((f"{path}.{each.mixer.slot}_output_norm.bias", each.output_norm) for each in block.sublayers)
    return [name for name, norm in named if norm is not None and "bias" in norm.shapes()]


class Inner(NamedTuple):
    """A feed-forward or an expert: its path, record and layer; the linears that read its input, of which the first is
    what is activated; the tensors with a row a unit (up) and with a column a unit (down), the name of the bias behind
    it, whether there is one or not, and how many units there are.
    """

    path: str
    record: FeedForward | GatedFeedForward
    layer: int
    inputs: list[str]
    up: list[str]
    down: str
    down_bias: str
    units: int


def experts(block: Block, layer: int) -> Iterator[Inner]:
    """The feed-forwards of a block, one or as many as there are experts.

    Raises:
        SwapRefused: a shared expert stands beside them, or a gate has limits, of which swaps of units know nothing.
    """
    mixer, whole = block.feed_forward, f"blocks.{layer}.feed_forward"
    if getattr(mixer, "shared", None) is not None:
        raise SwapRefused(
            f"{whole} has a shared expert; this swap supports only mixtures of experts without shared experts"
        )
    inner = getattr(mixer, "expert", mixer)
    for field in ("limit", "up_shift"):
        if getattr(inner, field, None):
            raise SwapRefused(f"{whole} has {field}, which this swap does not support")
    found = mixer.children() if hasattr(mixer, "expert") else ()  # others have norms inside
    inside: list[Any] = [(f"{whole}.{name}", expert) for name, expert in found]
    for path, record in inside or [(whole, mixer)]:
        unnormed(path, record)
        inputs = [name.removesuffix(".weight") for name, each in record.weights().items() if each.role == "reads"]
        names = tensors_of(path, record, *inputs), f"{path}.down_proj.weight", f"{path}.down_proj.bias"
        yield Inner(path, record, layer, inputs, *names, record.intermediate_size)


def largest(score: Wide, size: int) -> Index:
    """The units of the largest scores, in order."""
    return np.sort(np.argsort(-score, kind="stable")[:size])


def by_weights(model: Model, inner: Inner) -> Wide:
    """For each unit the product of the norms of its rows and its column."""
    score: Wide = np.linalg.norm(model.wide(inner.down), axis=0)
    for name in inner.inputs:
        score = score * np.linalg.norm(model.wide(f"{inner.path}.{name}.weight"), axis=1)
    return score


def tables(spec: ModelSpec) -> tuple[str, ...]:
    """The tables [rows, hidden] whose rows are the stream's beginning.

    Raises:
        SwapRefused: they are not as wide as the stream, or positions are no table.
    """
    if spec.embedding.width is not None:
        raise SwapRefused(
            f"the embedding is {spec.embedding.width} wide, but this swap needs an embedding as wide as the hidden size"
        )
    if spec.positions is not None and not spec.positions.weights():
        raise unknown("the model", spec.positions, "a table of positions")
    return ("embedding.weight", *(["positions.weight"] if spec.positions is not None else []))


def head_weight(spec: ModelSpec) -> str:
    """The tensor [vocabulary, hidden] that reads the last norm; raises SwapRefused where it reads a projection."""
    head = spec.has_head()
    if head.width is not None or head.transform is not None:
        there = "a transform before it" if head.width is None else f"width {head.width}"
        raise SwapRefused(f"the head has {there}, but this swap needs a head that reads the residual stream directly")
    return "embedding.weight" if spec.tied else "head.weight"


def written(spec: ModelSpec) -> list[tuple[str, int]]:
    """What writes into the stream: (tensor, the axis that is the stream's)."""
    found = [(name, 1) for name in tables(spec)]
    for layer, block in enumerate(spec.blocks):
        _known_by_linears(block, f"blocks.{layer}")
        found += [(name, 0) for each in writers(block, f"blocks.{layer}") for name in each.names]
    return found


def read_weights(spec: ModelSpec) -> list[str]:
    """What reads it, [out, hidden]; not a tied head, whose matrix is a table."""
    found = [each.weight for layer, block in enumerate(spec.blocks) for each in readers(block, f"blocks.{layer}")]
    return found + ([] if spec.tied else ["head.weight"])


# --- heads ------------------------------------------------------------------------------------------------------------


Grouped = Attention | LatentAttention


@dataclass(frozen=True)
class _Part:
    """A tensor that holds heads side by side along an axis: query heads, or key-value heads."""

    name: str
    size: int
    keys: bool = False
    axis: int = 0


@dataclass(frozen=True)
class Choice:
    """The old query head and the old key-value head that each new one is, and which query heads are to be silent."""

    heads: Index
    keys: Index
    silent: np.ndarray


def key_heads(attention: Grouped) -> int:
    """Key-value heads; a latent is made into one for every query head."""
    found: int = getattr(attention, "kv_heads", attention.heads)
    return found


def parts(path: str, attention: Grouped) -> tuple[_Part, ...]:
    """The tensors of an attention (at `path`) that have heads; o_proj's weight is the last."""
    shared = {"k_proj", "v_proj"}
    found = []
    for name, shape in attention.shapes().items():
        linear = name.partition(".")[0]
        if linear in {"q_proj", "q_up_proj", "k_up_proj", "v_up_proj", *shared}:
            heads = key_heads(attention) if linear in shared else attention.heads
            found.append(_Part(f"{path}.{name}", shape[0] // heads, linear in shared))
        elif name == "sinks":
            found.append(_Part(f"{path}.{name}", 1))
    width = attention.shapes()["o_proj.weight"][1] // attention.heads
    return (*found, _Part(f"{path}.o_proj.weight", width, axis=1))


def slopes(attention: Grouped, heads: int) -> list[float] | None:
    """The slope of each of so many heads, as it enters the scores, or None without ALiBi."""
    position: Any = attention.position
    if position is None or not position.biases:
        return None
    import torch

    from ..modules.registry import module_of

    bias = module_of(position).bias(position, heads, torch.ones(1, 2, dtype=torch.long), torch.float64)
    return [float(each) for each in bias[0, :, 0, 1] - bias[0, :, 0, 0]]  # which may count back from the last key


def kept(attention: Grouped, heads: Sequence[int]) -> Choice:
    """The choice of some old heads, in the order that their slopes want."""
    old, keys = attention.heads, key_heads(attention)
    before, after = slopes(attention, old), slopes(attention, len(heads))
    if before is not None and after is not None:
        heads = [before.index(slope) for slope in after]
    index, group = np.array(heads), old // keys
    key_index = index if keys == old else np.array(sorted({head // group for head in heads}))
    return Choice(index, key_index, np.zeros(len(index), dtype=bool))


def remaining(
    attention: Grouped,
    units: Sequence[Index],
    new: int,
    new_keys: int,
    costs: Callable[[list[int]], Callable[[Index], float]] | Wide,
) -> list[int]:
    """The heads that stay when the unit of the least cost goes, until there are `new`: of each group as many as leave
    it as large as it is to be.

    `costs` gets the heads that are left, and gives what it costs to take off a unit of them; or it is each head's.
    """
    old, keys, gone = attention.heads, key_heads(attention), set[int]()
    group = old // keys
    while old - len(gone) > new:
        left = [head for head in range(old) if head not in gone]
        cost = costs(left) if callable(costs) else lambda unit: float(costs[unit].sum())
        allowed = [unit for unit in units if not gone & set(unit.tolist())]
        if keys not in (old, 1) and new_keys == keys:
            lost = [sum(head // group == key for head in gone) for key in range(keys)]
            allowed = [unit for unit in allowed if lost[unit[0] // group] < group - new // keys]
        gone |= set(min(allowed, key=cost).tolist())
    return [head for head in range(old) if head not in gone]
