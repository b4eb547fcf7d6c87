"""What a tree needs in memory, to run and to be trained, from its shapes alone. No torch, no weights.

Bytes of tensors: what kernels need inside, what an allocator leaves between tensors and what a runtime has loaded
(hundreds of megabytes of CUDA's) come on top. The tests hold activations to what torch keeps, and the worst moment to
what is alive in a run of gptkit's modules, whose operations are transformers' own but for a gated product. gptkit makes
that in place of the gate where no gradient is asked for; transformers holds one tensor of the feed-forward's width more
at that moment, a tenth to a fifth of activations and cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..components import ModelSpec
from ..display import Record
from ..errors import UsageError
from .activations import FLOAT, Kernel, Pass, kept, kept_by_checkpointing, ways
from .costs import cache_bytes, costs, usual_context, windows
from .parameters import count
from .prefill import Logits, peak
from .sizes import MOST, check_sizes, full_dtype, itemsize

_WINDOWED = (
    "a sliding window needs a mask of context x context numbers",
    "keys and values beyond a window stay until the next step",
)


@dataclass(frozen=True)
class Memory(Record):
    """Bytes to run a model on `batch` sequences of `context` tokens.

    weights: all of them, a tied head once. cache: keys and values after `context` tokens. activations: what is alive
    beside both at the worst moment of reading the context at once, logits among it, and what lies beyond windows, which
    goes with the next step. assumed: what was, a sentence each.
    """

    JSON = "context batch dtype weights cache activations total assumed"

    context: int
    batch: int
    dtype: str
    weights: int
    cache: int
    activations: int
    assumed: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class TrainingMemory(Record):
    """Bytes to train a model with Adam on `batch` sequences of `context` tokens a step.

    weights, gradients: in the dtype that is computed in. moments: Adam's two, in fp32. master: the weights in fp32 that
    the optimiser adds to, where computing is in a narrower dtype; 0 otherwise. activations: what is alive of the
    forward pass as the backward pass begins: by component what autograd keeps (`analysis.activations`), and under
    "logits" these themselves and their gradient, twice in fp32. checkpointed: the same where layers keep their inputs
    alone and are run again one at a time, at its worst moment. assumed: what was, a sentence each.

    Of `ranks` processes that share out weights, gradients and moments (FSDP2, ZeRO-3), this is one: the states are its
    share, `batch` is what it computes itself, and gathered is what it holds whole beside its share at the worst moment.

    The total is that of a step which finds gradients there: every step but the first where they are accumulated.
    """

    JSON = (
        "context batch dtype weights gradients moments master activations activations_by_component=by_component"
        " checkpointed_activations=checkpointed checkpointed_by_component total total_checkpointed ranks gathered"
        " assumed"
    )

    context: int
    batch: int
    dtype: str
    weights: int
    gradients: int
    moments: int
    master: int
    by_component: Mapping[str, int]
    checkpointed_by_component: Mapping[str, int]
    assumed: tuple[str, ...]
    ranks: int = 1
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.states + self.activations

    @property
    def total_checkpointed(self) -> int:
        return self.states + self.checkpointed

    @property
    def states(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.moments + self.master + self.gathered

    @property
    def activations(self) -> int:
        return sum(self.by_component.values())

    @property
    def checkpointed(self) -> int:
        return sum(self.checkpointed_by_component.values())


def memory(
    spec: ModelSpec,
    dtype: str = "bfloat16",
    context: int | None = None,
    batch: int = 1,
    *,
    cache_dtype: str | None = None,
    logits: Logits = "last",
) -> Memory:
    """Bytes to run a tree, by default at its own context.

    Args:
        spec: the tree.
        dtype: of the weights. Activations are in it too, or in bf16 where it is a type of one byte.
        context: tokens of each sequence, all read at once.
        batch: sequences.
        cache_dtype: of keys and values in the cache; that of activations where it is not given.
        logits: of the last token alone, as generating needs, or of all.

    Raises:
        UsageError: no tokens or sequences, more tokens than the tree has positions for, or an unknown dtype.
    """
    length = usual_context(spec) if context is None else context
    check_sizes(spec, length, batch)
    name = full_dtype(dtype)
    computed = name if itemsize(name) > 1 else "bfloat16"
    weights = costs(spec, length).parameters * itemsize(name)
    assumed = (
        f"activations in {computed}, {_attention(spec, 'sdpa')}",
        f"the whole context in one forward pass, logits of {'the last token' if logits == 'last' else 'every token'}",
        *(_WINDOWED if min(windows(spec), default=MOST + 1) <= length else ()),
    )
    beside = beside_weights(spec, computed, length, batch, cache_dtype, logits)
    return Memory(length, batch, name, weights, *beside, assumed)


def beside_weights(
    spec: ModelSpec,
    computed: str,
    context: int,
    batch: int,
    cache_dtype: str | None = None,
    logits: Logits = "last",
    ends: bool = True,
) -> tuple[int, int]:
    """Bytes of the cache, and of activations at the worst moment; see `memory` and, of `ends`, `prefill.peak`."""
    there = cache_bytes(spec, context, computed, batch).held  # in the dtype in which it is made
    worst = peak(spec, Pass(context, batch, itemsize(computed)), logits, ends)
    return cache_bytes(spec, context, cache_dtype or computed, batch).held, worst - there


def training_memory(
    spec: ModelSpec,
    dtype: str = "bfloat16",
    context: int | None = None,
    batch: int = 1,
    *,
    attention: Kernel = "sdpa",
    ranks: int = 1,
) -> TrainingMemory:
    """Bytes to train a tree with Adam, by default at its own context.

    Args:
        spec: the tree.
        dtype: computed in: weights, gradients and activations. Below fp32 the optimiser keeps fp32 weights (mixed
            precision, Micikevicius et al. 1710.03740; 16 bytes a parameter in ZeRO, 1910.02054, section 3.1).
        context: tokens of each sequence.
        batch: sequences a step; of several processes those of each.
        attention: "sdpa", fused kernels that keep no scores (2205.14135), or "eager", which keep them.
        ranks: processes that share out weights, gradients and moments.

    Raises:
        UsageError: as `memory`; a dtype of one byte.
    """
    length = usual_context(spec) if context is None else context
    check_sizes(spec, length, batch)
    if not 1 <= ranks <= MOST:
        raise UsageError(f"the number of processes (--fsdp) must be from 1 to {MOST:,}, not {ranks:,}")
    name = full_dtype(dtype)
    size, parameters = itemsize(name), costs(spec, length).parameters
    if size == 1:
        raise UsageError(f"training cannot compute in {name}", "Choose bfloat16, float16 or float32.")
    wide, run = max(size, FLOAT), Pass(length, batch, size, attention)
    logits = run.rows * spec.vocab_size * (size + 2 * FLOAT)
    # The loss and the logits are gone when the first layer is run again: whichever is more.
    checkpointed = {**kept_by_checkpointing(spec, run), "logits": logits}
    gone = ("layer",) if checkpointed["loss"] + logits >= checkpointed["layer"] else ("loss", "logits")
    share = -(-parameters // ranks)
    return TrainingMemory(
        context=length,
        batch=batch,
        dtype=name,
        weights=share * size,
        gradients=share * size,
        moments=2 * share * wide,
        master=share * wide if size < wide else 0,
        by_component={**kept(spec, run), "logits": logits},
        checkpointed_by_component={name: size for name, size in checkpointed.items() if name not in gone},
        assumed=(
            f"weights, gradients and activations in {name}, Adam's moments in float{8 * wide}"
            + (f", a second copy of the weights in float{8 * wide}" if size < wide else ""),
            f"no dropout, {_attention(spec, attention)}, logits of every token",
            *(_WINDOWED[:1] if min(windows(spec), default=MOST + 1) <= length else ()),
            *([f"one of {ranks:,} processes that shard weights, gradients and moments"] if ranks > 1 else []),
        ),
        ranks=ranks,
        gathered=_gathered(spec) * size if ranks > 1 else 0,
    )


def _gathered(spec: ModelSpec) -> int:
    """Parameters and gradients that a process has whole as it goes back: of two layers, the one that computes and the
    one that is fetched, weights and of one its gradients; of what stands around the layers both.
    """
    counted = count(spec)
    layers = [layer.total for layer in counted.by_layer]
    return 2 * (counted.total - sum(layers)) + 3 * max(layers, default=0)


def _attention(spec: ModelSpec, kernel: Kernel) -> str:
    """In words, which attention keeps its scores: where they are told, memory grows with the context's square."""
    by_block = {block: ways(spec.block_operations(block), kernel) for block in set(spec.blocks)}
    found = [by_block[block] for block in spec.blocks]
    unfused = sum(bool(each - {"fused"}) for each in found)
    if not any(found):
        return "no attention"
    if kernel == "eager":
        return "attention that stores its scores"
    where = "" if unfused == len(found) else f" in {unfused} of {len(found)} layers"
    return (
        f"attention that stores its scores{where}, because no fused kernel supports it"
        if unfused
        else "fused attention"
    )
