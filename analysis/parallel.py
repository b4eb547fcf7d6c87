"""What each GPU holds of a model that is spread over several, from shapes alone. No torch, no weights.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 1909.08053, section 3): of every layer each of `tp` GPUs has a
share of the heads and of the feed-forward's units, so that q, k, v, gate and up are split by rows and o and down by
columns; tables and head by the vocabulary, which is padded until it divides; norms, routers, learned positions and the
biases behind o and down are on all of them. Key-value heads are split while there are as many, and else each is on
several GPUs. Pipeline parallelism: as many layers in each of `pp` stages, tables in the first and the final norm and
the head in the last, which has a copy of a tied table.

The share of one GPU is a tree itself, with fewer heads and units: its memory is counted as that of any other.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..components import ModelSpec
from ..components import operations as ops
from ..display import Record
from ..errors import UsageError
from .formats import sizer
from .memory import beside_weights


@dataclass(frozen=True)
class Stage(Record):
    """One of the stages: on each of its GPUs so many bytes.

    layers: the first and the last. weights: by component. activations: at the worst moment of reading all sequences at
    once; what is sent to other GPUs is not counted.
    """

    JSON = "layers weights=weight weights_by_component=weights cache activations total"

    layers: tuple[int, int]
    weights: Mapping[str, int]
    cache: int
    activations: int

    @property
    def weight(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        return self.weight + self.cache + self.activations


@dataclass(frozen=True)
class Split(Record):
    """A model on tp x pp GPUs, with `batch` sequences of `context` tokens.

    stages: in their order. together: bytes of the weights on all GPUs, where some are there more than once. notes: what
    was padded or repeated, a sentence each.
    """

    JSON = "tp pp context batch dtype weights_together=together stages notes"

    tp: int
    pp: int
    context: int
    batch: int
    dtype: str
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]

    @property
    def together(self) -> int:
        return self.tp * sum(stage.weight for stage in self.stages)

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)


def shard(spec: ModelSpec, tp: int) -> ModelSpec:
    """The tree that one of `tp` GPUs computes.

    Raises:
        UsageError: heads or units that do not divide.
    """
    vocabulary = -(-spec.vocab_size // tp)
    blocks = {block: block.share(tp) for block in dict.fromkeys(spec.blocks)}
    return msgspec.structs.replace(
        spec,
        embedding=msgspec.structs.replace(spec.embedding, vocab_size=vocabulary),
        blocks=tuple(blocks[block] for block in spec.blocks),
        head=None if spec.head is None else msgspec.structs.replace(spec.head, vocab_size=vocabulary),
    )


def split(
    spec: ModelSpec,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype: str = "bfloat16",
    computed: str = "bfloat16",
    cache_dtype: str | None = None,
    context: int,
    batch: int = 1,
) -> Split:
    """What each GPU holds, to run a tree on `batch` sequences of `context` tokens.

    Args:
        spec: the tree.
        tp: GPUs that share every layer.
        pp: stages of layers.
        dtype: of the weights, one that `formats.sizer` knows for any tree.
        computed: the dtype of activations.
        cache_dtype: of keys and values in the cache; that of activations where it is not given.
        context: tokens of each sequence, all read at once.
        batch: sequences.

    Raises:
        UsageError: heads, units or layers that do not divide, or layers of several stages that share a block; no
            tokens, or more than there are positions for.
    """
    spec.one_stack("splitting over GPUs")
    layers = len(spec.blocks)
    if layers % pp:
        raise UsageError(
            f"--pp {pp}: {layers:,} layers cannot be split into {pp} pipeline stages of equal length",
            f"Choose a divisor of {layers:,}.",
        )
    if spec.shares and pp > 1:
        raise UsageError(
            f"--pp {pp}: several layers of the model share the weights of one block, so gptkit cannot "
            "divide it into pipeline stages",
            "Leave out --pp.",
        )
    one, each = shard(spec, tp), layers // pp
    size = sizer(one, dtype)
    weights: list[Counter[str]] = [Counter() for _ in range(pp)]
    for parameter in one.parameters():
        if parameter.layer is not None:
            stage = parameter.layer // each
        else:
            stage = pp - 1 if parameter.name.startswith(("final_norm", "head")) else 0
        weights[stage][parameter.component] += size(parameter)
        if spec.tied and pp > 1 and parameter.name == "embedding.weight":
            weights[-1]["head"] += size(parameter)
    alike: dict[tuple[Any, ...], tuple[int, int]] = {}
    stages = []
    for index, held in enumerate(weights):
        blocks, last = one.blocks[index * each : (index + 1) * each], index == pp - 1
        if (blocks, last) not in alike:
            tree = msgspec.structs.replace(one, blocks=blocks)
            alike[blocks, last] = beside_weights(tree, computed, context, batch, cache_dtype, ends=last)
        cache, activations = alike[blocks, last]
        stages.append(Stage((index * each, (index + 1) * each - 1), dict(held), cache, activations))
    return Split(tp, pp, context, batch, dtype, tuple(stages), tuple(_notes(spec, one, tp, pp)))


def _notes(spec: ModelSpec, one: ModelSpec, tp: int, pp: int) -> list[str]:
    notes = []
    if tp > 1:
        notes.append("Every GPU has all norms, routers and learned positions, and the biases of o and down.")
    if one.vocab_size * tp > spec.vocab_size:
        notes.append(f"The vocabulary is padded to {one.vocab_size * tp:,} rows, {one.vocab_size:,} per GPU.")
    operations = [each for block in set(spec.blocks) for each in spec.block_operations(block)]
    kv_heads = {each.kv_heads for each in operations if isinstance(each, ops.Scores)}
    repeated = sorted(number for number in kv_heads if number < tp)
    if repeated:
        notes.append(
            f"A layer has {' or '.join(map(str, repeated))} key-value heads, so several GPUs have the same one."
        )
    if tp > 1 and any(isinstance(each, ops.Cache) and len(each.shape) == 3 for each in operations):
        notes.append("Every GPU has the whole latent and its cache.")
    if spec.tied and pp > 1:
        notes.append("The last stage has a copy of the embedding, because the head is tied to it.")
    return notes
