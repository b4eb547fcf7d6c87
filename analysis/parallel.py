"""The memory per GPU for a model that is split over several GPUs, computed from shapes alone. No torch, no weights.

Tensor parallelism is that of Megatron-LM (Shoeybi et al. 1909.08053, section 3). Each of `tp` GPUs has a share of every
layer's heads and of its feed-forward's intermediate size: q, k, v, gate and up are split by rows, o and down by
columns. Embedding and head are split by the vocabulary, which is padded. Norms, routers, learned positions, and the
biases of o and down are on all GPUs. Key-value heads are split. If there are fewer of them than GPUs, several GPUs have
the same head.

Pipeline parallelism puts an equal number of layers into each of `pp` stages. The embedding is in the first stage. The
final norm and the head are in the last, with a copy of a tied embedding.

The share of one GPU is a model with fewer heads and narrower feed-forwards. Its memory is counted like that of any
other model.
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
from .memory import cache_and_activations


@dataclass(frozen=True)
class Stage(Record):
    """The memory in bytes on every GPU of one pipeline stage."""

    JSON = "layers weights=weight weights_by_component=weights cache activations total"

    layers: tuple[int, int]  # the indices of the first and the last layer
    weights: Mapping[str, int]  # bytes by component
    cache: int
    activations: int  # the peak during a prefill of all sequences, without buffers for communication

    @property
    def weight(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        return self.weight + self.cache + self.activations


@dataclass(frozen=True)
class Split(Record):
    """A model on tp x pp GPUs, with `batch` sequences of `context` tokens."""

    JSON = "tp pp context batch dtype weights_together=together stages notes"

    tp: int
    pp: int
    context: int
    batch: int
    dtype: str
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]  # sentences about parts that are padded, or copied to several GPUs

    @property
    def together(self) -> int:
        """Return the bytes of the weights on all GPUs together. Copied parts count on every GPU."""
        return self.tp * sum(stage.weight for stage in self.stages)

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)


def shard(spec: ModelSpec, tp: int) -> ModelSpec:
    """Return the share of a model that one of `tp` GPUs computes, as a model with fewer heads.

    Raises:
        UsageError: the number of heads or the intermediate size is not divisible by `tp`.
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
    """Return the memory per GPU for running a model on `batch` sequences of `context` tokens.

    Args:
        spec: the model.
        tp: the number of GPUs that share every layer (tensor parallelism).
        pp: the number of pipeline stages.
        dtype: the dtype of the weights, but no GGUF format.
        computed: the dtype of activations.
        cache_dtype: the dtype of the cache; by default that of activations.
        context: the number of tokens per sequence, all read in one forward pass.
        batch: the number of sequences.

    Raises:
        UsageError: the heads or the intermediate size are not divisible by `tp`, or the layers by `pp`; layers of
            several stages share weights; or the context is below 1 or longer than the position table.
    """
    spec.one_stack("splitting over GPUs")
    layers = len(spec.blocks)
    if layers % pp:
        raise UsageError(
            f"--pp {pp}: {layers:,} layers cannot be split into {pp} pipeline stages of equal length",
            f"Choose a divisor of {layers:,}.",
        )
    if spec.has_shared_blocks and pp > 1:
        raise UsageError(
            f"--pp {pp}: several layers of the model share the weights of one block, so gptkit cannot "
            "divide the model into pipeline stages",
            "Leave out --pp.",
        )
    one, per_stage = shard(spec, tp), layers // pp
    size = sizer(one, dtype)
    weights: list[Counter[str]] = [Counter() for _ in range(pp)]
    for parameter in one.parameters():
        if parameter.layer is not None:
            stage = parameter.layer // per_stage
        else:
            stage = pp - 1 if parameter.name.startswith(("final_norm", "head")) else 0
        weights[stage][parameter.component] += size(parameter)
        if spec.tied and pp > 1 and parameter.name == "embedding.weight":
            weights[-1]["head"] += size(parameter)
    alike: dict[tuple[Any, ...], tuple[int, int]] = {}
    stages = []
    for index, by_component in enumerate(weights):
        first, last = index * per_stage, index == pp - 1
        blocks = one.blocks[first : first + per_stage]
        if (blocks, last) not in alike:
            tree = msgspec.structs.replace(one, blocks=blocks)
            alike[blocks, last] = cache_and_activations(tree, computed, context, batch, cache_dtype, ends=last)
        cache, activations = alike[blocks, last]
        stages.append(Stage((first, first + per_stage - 1), dict(by_component), cache, activations))
    return Split(tp, pp, context, batch, dtype, tuple(stages), tuple(_notes(spec, one, tp, pp)))


def _notes(spec: ModelSpec, one: ModelSpec, tp: int, pp: int) -> list[str]:
    notes = []
    if tp > 1:
        notes.append("Every GPU has all norms, routers and learned positions, and the biases of o and down.")
    if one.vocab_size * tp > spec.vocab_size:
        notes.append(f"The vocabulary is padded to {one.vocab_size * tp:,} rows, {one.vocab_size:,} per GPU.")
    operations = [operation for block in set(spec.blocks) for operation in spec.block_operations(block)]
    kv_heads = {scores.kv_heads for scores in operations if isinstance(scores, ops.Scores)}
    repeated = sorted(number for number in kv_heads if number < tp)
    if repeated:
        notes.append(
            f"A layer has {' or '.join(map(str, repeated))} key-value heads, so several GPUs have the same one."
        )
    if tp > 1 and any(
        isinstance(operation, ops.CacheOperation) and len(operation.shape) == 3 for operation in operations
    ):
        notes.append("Every GPU has the whole latent and its cache.")
    if spec.tied and pp > 1:
        notes.append("The last stage has a copy of the embedding, because the head is tied to it.")
    return notes
