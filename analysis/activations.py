"""What autograd keeps of a forward pass for the backward pass, from shapes alone.

Korthikanti et al. (2205.05198, section 4.1) count it for one kind of layer: s·b·h·(34 + 5·a·s/h) bytes of 16-bit
numbers. Here each component tells what its operations keep, as torch's autograd does in gptkit's modules: a product
keeps its factors, softmax its result, an activation its input, and so on; a tensor that several operations keep is
there once, views of one are one. Weights are not counted. Tests hold every figure to what torch keeps, byte for byte;
transformers' own models keep the same with "eager", but for BLOOM's gelu, and within a tenth of it with "sdpa".

Two ways of attention, as in `modules.attention`: "sdpa", whose fused kernels keep queries, keys, values, the output and
one number a row instead of scores, and "eager". torch has no fused kernel where keys are broadcast to the query heads
(Falcon with one key head) or where queries are not as wide as values (latent attention): there sdpa writes the scores
out as well, in fp32 whatever the dtype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..components import (
    Activation,
    ALiBi,
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Rotary,
)

__all__ = [
    "ACTIVATION_COSTS",
    "Kernel",
    "Pass",
    "is_masked",
    "kept",
    "kept_by_checkpointing",
    "key_heads",
    "rotaries",
    "score_sizes",
    "way",
]

Kernel = Literal["sdpa", "eager"]

FLOAT, LONG = 4, 8
"""Bytes of fp32, in which norms, softmax and the loss are computed at least, and of a token's or row's number."""

VECTOR = 16
"""Bytes of which a head's results are a multiple where rows of the q-k-v product may lie in any order."""

WIDEST_GROUPED = 256
"""Elements of a head up to which the fused kernel is handed groups of query heads as they are."""


class ActivationCost(NamedTuple):
    """kept: tensors that an activation keeps for the backward pass beside its result, which the product behind it keeps
    anyway: its input (unless `input` is False), and what it computes in steps. alive: tensors at once while it is
    computed: its input, its result, and what it has in hand.
    """

    kept: int = 1
    alive: int = 2
    input: bool = True


ACTIVATION_COSTS: dict[Activation, ActivationCost] = {
    "gelu": ActivationCost(),
    "gelu_python": ActivationCost(3, 4, input=False),
    "gelu_tanh": ActivationCost(),
    "gelu_new": ActivationCost(4, 4),
    "gelu_bloom": ActivationCost(7, 5),
    "gelu_fast": ActivationCost(7, 5),
    "gelu_10": ActivationCost(2, 3),
    "quick_gelu": ActivationCost(2, 3),
    "silu": ActivationCost(),
    "mish": ActivationCost(),
    "hardswish": ActivationCost(),
    "relu": ActivationCost(0, input=False),
    "relu2": ActivationCost(1, 3, input=False),
    "relu6": ActivationCost(),
    "leaky_relu": ActivationCost(),
    "sigmoid": ActivationCost(0, input=False),
    "tanh": ActivationCost(0, input=False),
    "laplace": ActivationCost(1, 3, input=False),
    "sqrtsoftplus": ActivationCost(1, 3),
    "linear": ActivationCost(0, input=False),
}


@dataclass(frozen=True)
class Pass:
    """A forward pass over `batch` sequences of `tokens` tokens, in numbers of `size` bytes."""

    tokens: int
    batch: int
    size: int
    kernel: Kernel = "sdpa"

    @property
    def rows(self) -> int:
        return self.tokens * self.batch

    @property
    def wide(self) -> int:
        """Bytes of a number where fp32 is the least."""
        return max(self.size, FLOAT)


def kept(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """Bytes kept for the backward pass of a tree and its loss, by component.

    "norms", "attention" (with the tables of rotary positions), "scores" (and masks that kernels are handed),
    "feed-forward", "router", "embedding" (what tells which rows were read), and "loss": the logarithms of all
    probabilities in fp32, and the targets.
    """
    found: Counter[str] = Counter()
    for block, number in Counter(spec.blocks).items():
        found.update({name: value * number for name, value in _block(block, run).items()})
    found.update(_ends(spec, run))
    found["attention"] += sum(2 * run.tokens * rotary.dim * run.size for rotary in rotaries(spec.blocks))
    return {name: found[name] for name in COMPONENTS if found[name]}


COMPONENTS = ("embedding", "norms", "attention", "scores", "feed-forward", "router", "loss")


def kept_by_checkpointing(spec: ModelSpec, run: Pass) -> dict[str, int]:
    """The same where layers keep their input alone, and are run again one at a time (Chen et al. 1604.06174): the
    largest layer's are there once, under "layer".
    """
    inputs = len(spec.blocks) * run.rows * spec.hidden_size * run.size
    tables = {block: sum(2 * run.tokens * r.dim * run.size for r in rotaries([block])) for block in set(spec.blocks)}
    largest = max(sum(_block(block, run).values()) + tables[block] for block in tables)
    ends = _ends(spec, run)
    return {"inputs": inputs, "layer": largest, **{name: ends[name] for name in COMPONENTS if ends[name]}}


def rotaries(blocks: tuple[Block, ...] | list[Block]) -> set[Rotary]:
    """Each has a table of cosines and one of sines, which all layers share."""
    return {block.attention.position for block in blocks if isinstance(block.attention.position, Rotary)}


def _ends(spec: ModelSpec, run: Pass) -> Counter[str]:
    """What lies before the first layer and behind the last."""
    found: Counter[str] = Counter()
    found["embedding"] = run.rows * LONG + (0 if spec.positions is None else run.tokens * LONG)
    for norm in (spec.embedding.norm, spec.final_norm):
        if norm is not None:
            found["norms"] += _norm(norm, run.rows, run)
    found["norms"] += run.rows * spec.hidden_size * run.size  # what the head multiplies
    found["loss"] = run.rows * (spec.vocab_size * FLOAT + LONG)
    return found


def _block(block: Block, run: Pass) -> Counter[str]:
    hidden = run.rows * block.attention.hidden_size * run.size
    found: Counter[str] = Counter()
    norms = [norm for norm in (block.attention_norm, block.feed_forward_norm) if norm is not None]
    found["norms"] = sum(_norm(norm, run.rows, run) + hidden for norm in norms)
    if block.parallel and len(norms) == 2 and all(_keeps_its_input(norm, run) for norm in norms):
        found["norms"] -= hidden  # one input for both
    attention = block.attention
    found.update(_latent(attention, run) if isinstance(attention, LatentAttention) else _attention(attention, run))
    found.update(_feed_forward(block.feed_forward, run))
    return found


# --- norms -----------------------------------------------------------------------------------------------------------


def _keeps_its_input(norm: Norm, run: Pass) -> bool:
    """An RMSNorm keeps fp32 numbers: its input, if that is such already."""
    return isinstance(norm, LayerNorm) or run.size == run.wide


def _norm(norm: Norm, rows: int, run: Pass) -> int:
    """With its input, without its output, which whoever multiplies it keeps."""
    if isinstance(norm, LayerNorm):
        return rows * run.size * (norm.size + 2)  # mean and deviation
    normed = run.size if getattr(norm, "cast", None) == "before_weight" else run.wide
    return rows * (run.wide * (norm.size + 1) + normed * norm.size)


# --- attention -------------------------------------------------------------------------------------------------------


def way(node: Attention | LatentAttention, kernel: Kernel = "sdpa") -> Literal["fused", "unfused", "eager"]:
    """How an attention's scores are made: by a fused kernel, which keeps none; by torch's own other path, in fp32 at
    least; or written out by the modules. Under "sdpa" too the modules write out an ALiBi bias outside the scale.
    """
    if kernel == "eager" or (isinstance(node.position, ALiBi) and not node.position.scaled):
        return "eager"
    if isinstance(node, LatentAttention):
        return "fused" if node.query_dim == node.value_dim else "unfused"
    return "unfused" if node.kv_expansion == "broadcast" and node.group > 1 else "fused"


def _attention(node: Attention, run: Pass) -> Counter[str]:
    found: Counter[str] = Counter()
    views = 0  # numbers per token that are kept of the projections' own results
    gathered = _gathers_queries(node, run)
    for norm, heads, copied in ((node.q_norm, node.heads, gathered), (node.k_norm, node.kv_heads, False)):
        if norm is not None:
            found["norms"] += _norm(norm, run.rows * heads, run)
            views += heads * node.head_dim if _keeps_its_input(norm, run) and not copied else 0
    as_they_are = node.q_norm is None and not isinstance(node.position, Rotary)
    if as_they_are and not gathered and not _copies_queries(node, run):
        views += node.heads * node.head_dim
    if node.fused and views:  # one tensor for all three
        found["attention"] = run.rows * run.size * ((node.heads + 2 * node.kv_heads) * node.head_dim - views)
    found.update(_mixing(node, node.head_dim, node.head_dim, run))
    return found


def _gathers_queries(node: Attention, run: Pass) -> bool:
    """Whether a fused product's queries are put together of those of several key-value heads; see `FusedLinears`."""
    in_groups = node.arithmetic != "conv1d" and node.head_dim * run.size % VECTOR != 0
    return node.fused and in_groups and 1 < node.kv_heads < node.heads


def _copies_queries(node: Attention, run: Pass) -> bool:
    """Whether the product with the keys is made of a copy: in another dtype, scaled, or with heads moved forward."""
    match way(node, run.kernel):
        case "fused":
            return False
        case "unfused":
            return True
        case "eager":
            moved = run.batch > 1 and node.heads > 1
            return moved or (node.scores == "float32" and run.size < run.wide)


def _latent(node: LatentAttention, run: Pass) -> Counter[str]:
    found: Counter[str] = Counter()
    if node.kv_norm is not None:
        found["norms"] = _norm(node.kv_norm, run.rows, run)
    found["attention"] = run.rows * node.kv_rank * run.size
    found.update(_mixing(node, node.query_dim, node.value_dim, run))
    return found


def _mixing(node: Attention | LatentAttention, query_dim: int, value_dim: int, run: Pass) -> Counter[str]:
    """What softmax(q·kᵀ)·v keeps, and the output projection's input."""
    rows, heads, keys = run.rows, node.heads, key_heads(node, run)
    pairs = run.batch * heads * run.tokens**2
    found: Counter[str] = Counter()
    if way(node, run.kernel) == "fused":
        numbers = (heads + keys) * (query_dim + value_dim)
        if isinstance(node.position, Rotary) and query_dim > node.position.dim and heads > 1:
            # Queries were put together of parts, head by head; so lies the output, and is copied, token by token.
            numbers += heads * value_dim
        found["attention"] = rows * run.size * numbers
        found["scores"] = rows * heads * run.wide  # the logarithm of each row's sum
        if is_masked(node, run.tokens):
            found["scores"] += (pairs if isinstance(node.position, ALiBi) else run.tokens**2) * run.size
        return found
    scored, softmax, mixed = score_sizes(node, run)
    found["attention"] = rows * (
        scored * query_dim * (heads + keys) + mixed * value_dim * keys + run.size * value_dim * heads
    )
    found["scores"] = pairs * (softmax if softmax == mixed else softmax + mixed)
    return found


def score_sizes(node: Attention | LatentAttention, run: Pass) -> tuple[int, int, int]:
    """Bytes a number where scores are written out: of queries and keys, of the softmax, of what weighs values."""
    if way(node, run.kernel) == "unfused":
        return run.wide, run.wide, run.wide
    if isinstance(node, LatentAttention):
        return run.size, run.wide, run.size
    scored = run.wide if node.scores == "float32" else run.size
    return scored, scored if node.softmax == "input" else run.wide, run.size


def is_masked(node: Attention | LatentAttention, tokens: int) -> bool:
    """Whether a kernel is handed a mask, and not left to its own causal one."""
    return isinstance(node.position, ALiBi) or (node.window is not None and tokens >= node.window)


def key_heads(node: Attention | LatentAttention, run: Pass) -> int:
    """Heads of the keys and values that are kept: before or after each is repeated for its query heads."""
    if isinstance(node, LatentAttention) or node.kv_expansion == "projection":
        return node.heads
    fused = way(node, run.kernel) == "fused"
    if node.kv_heads == 1 and (fused or run.batch == 1):
        return 1  # a view shows it to every query head
    grouped = fused and not is_masked(node, run.tokens) and node.head_dim <= WIDEST_GROUPED
    return node.kv_heads if grouped else node.heads


# --- feed-forward ----------------------------------------------------------------------------------------------------


def _feed_forward(node: FeedForward | GatedFeedForward | MixtureOfExperts, run: Pass) -> Counter[str]:
    found: Counter[str] = Counter()
    if not isinstance(node, MixtureOfExperts):
        found["feed-forward"] = run.rows * _inner(node) * run.size
        return found
    taken = run.rows * node.top_k  # each token once for each of its experts
    found["feed-forward"] = taken * (_inner(node.expert) + 2 * node.hidden_size) * run.size
    # The softmax; which experts were taken, the order by expert, the tokens in it, and the way back; their weights.
    found["router"] = run.rows * node.experts * run.wide + taken * (4 * LONG + run.wide)
    if node.normalise:
        found["router"] += (taken + run.rows) * run.wide
    return found


def _inner(node: FeedForward | GatedFeedForward) -> int:
    """Numbers a token: what the activation keeps, the factors of the gate, and what is projected down."""
    cost = ACTIVATION_COSTS[node.activation]
    tensors = cost.kept + 1
    if isinstance(node, GatedFeedForward):
        tensors += 2
        if node.fused and not cost.input:
            tensors += 1  # the gate, which lies beside what it is multiplied with
    return tensors * node.intermediate_size
