"""ModelSpec: a model as a tree of components, each a small frozen record. No torch.

A component names its parameters by *shared name* and shape; a checkpoint family's own names and layouts live in
`architectures/`. Each component holds only what it needs itself: a field that another family would ignore belongs
in a component of its own. Two kinds of field:

- what function it is: sizes, heads, scale, activation, eps;
- how it rounds, where the families' code differs in the last bit (`arithmetic`, `cast`, `fused`, …): the
  function in exact arithmetic is the same for every value of these, bf16 logits are not.

Linear weights are [out, in] everywhere. Everything serialises to JSON with `to_json` and back with `from_json`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .display import Shown
from .errors import ConfigError

__all__ = [
    "FACTS",
    "ALiBi",
    "Activation",
    "Arithmetic",
    "Attention",
    "Block",
    "Component",
    "DynamicScaling",
    "Embedding",
    "Facts",
    "FeedForward",
    "GatedFeedForward",
    "Head",
    "LatentAttention",
    "LayerNorm",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MixtureOfExperts",
    "ModelSpec",
    "Norm",
    "Parameter",
    "ProportionalScaling",
    "RMSNorm",
    "Rotary",
    "YarnScaling",
    "differences",
    "from_json",
    "function_of",
    "to_json",
    "without_rounding",
]

SCHEMA_VERSION = 1

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Turns = Annotated[float, Meta(ge=1e-30, le=1e30)]
Scale = Annotated[float, Meta(gt=0, le=3.4028234663852886e38)]
"""A factor of scores, which are multiplied in fp32: no larger than fp32 holds."""
Shape = tuple[int, ...]

Activation = Literal[
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_tanh",
    "gelu_bloom",
    "gelu_fast",
    "gelu_10",
    "quick_gelu",
    "silu",
    "mish",
    "hardswish",
    "relu",
    "relu2",
    "relu6",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "laplace",
    "sqrtsoftplus",
    "linear",
]
"""The formulas are in `modules.layers`, what is to be known of each in `FACTS`."""


class Facts(NamedTuple):
    """What is to be known of an activation.

    words: for tables. gated: what a gated feed-forward with it is called (Shazeer 2002.05202). function: the activation
    that stands for all which evaluate one function in ways of their own, None where it is the only one. zero: whether
    it is 0 at 0.
    """

    words: str
    gated: str = "gated"
    function: Activation | None = None
    zero: bool = True


FACTS: dict[Activation, Facts] = {
    "gelu": Facts("GELU", "GEGLU"),
    "gelu_python": Facts("GELU", "GEGLU", "gelu"),
    "gelu_tanh": Facts("GELU (tanh)", "GEGLU"),
    "gelu_new": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_bloom": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_fast": Facts("GELU (tanh)", "GEGLU", "gelu_tanh"),
    "gelu_10": Facts("GELU (clipped)"),
    "quick_gelu": Facts("GELU (sigmoid)"),
    "silu": Facts("SiLU", "SwiGLU"),
    "mish": Facts("Mish"),
    "hardswish": Facts("hard swish"),
    "relu": Facts("ReLU", "ReGLU"),
    "relu2": Facts("ReLU²"),
    "relu6": Facts("ReLU6"),
    "leaky_relu": Facts("leaky ReLU"),
    "sigmoid": Facts("sigmoid", "GLU", zero=False),
    "tanh": Facts("tanh"),
    "laplace": Facts("Laplace", zero=False),
    "sqrtsoftplus": Facts("√softplus", zero=False),
    "linear": Facts("linear", "bilinear"),
}


def function_of(activation: Activation) -> Activation:
    """The activation that stands for this one's function, however each of them evaluates it."""
    return FACTS[activation].function or activation


Arithmetic = Literal["linear", "conv1d", "matmul_add"]
"""How x·Wᵀ + b is computed: one fused linear; GPT-2's addmm on a weight that lies [in, out] in memory; Falcon's
matmul and then, rounded once more, the bias."""


class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A node of the tree."""

    def shapes(self) -> dict[str, Shape]:
        """This node's own parameters (not its children's): name within the node -> shape."""
        return {}


# --- norms -----------------------------------------------------------------------------------------------------------


class LayerNorm(Component, frozen=True):
    """(x - mean) / sqrt(var + eps) · weight + bias (Ba et al. 2016)."""

    size: Size
    eps: Positive
    bias: bool = True

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.size,), **({"bias": (self.size,)} if self.bias else {})}


class RMSNorm(Component, frozen=True):
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), computed in fp32 at least.

    `cast` says where the result returns to the model's dtype: llama multiplies by the weight after it.
    """

    size: Size
    eps: Positive
    cast: Literal["before_weight", "after_weight"] = "before_weight"

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.size,)}


Norm = LayerNorm | RMSNorm


# --- positions -------------------------------------------------------------------------------------------------------


class LearnedPositions(Component, frozen=True):
    """A table added to the token embeddings."""

    length: Size
    size: Size

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.length, self.size)}


class LinearScaling(Component, frozen=True):
    """Positions divided by `factor` (kaiokendev 2023)."""

    factor: Positive


class DynamicScaling(Component, frozen=True):
    """NTK-aware base that grows once the sequence is longer than `original_context` (bloc97, emozilla 2023)."""

    factor: Positive
    original_context: Size


class YarnScaling(Component, frozen=True):
    """YaRN (Peng et al. 2309.00071): interpolate slow pairs, keep fast ones, a ramp between; cos and sin scaled."""

    factor: Positive
    original_context: Size
    attention_factor: Positive
    beta_fast: Turns = 32.0
    beta_slow: Turns = 1.0
    truncate: bool = True


class LongRopeScaling(Component, frozen=True):
    """LongRoPE (2402.13753): one divisor a pair, another set beyond `original_context`; cos and sin scaled."""

    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    original_context: Size
    attention_factor: Positive


class Llama3Scaling(Component, frozen=True):
    """Llama 3.1: slow pairs divided by `factor`, fast ones kept, a ramp in wavelength between."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_context: Size


class ProportionalScaling(Component, frozen=True):
    """p-RoPE (Barbero et al. 2410.06205): the `turning` fastest pairs turn, at frequencies divided by `factor`, and the
    slower ones never do.
    """

    factor: Turns
    turning: Annotated[int, Meta(ge=0, le=2**31 - 1)]


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling | ProportionalScaling


class Rotary(Component, frozen=True):
    """Rotary positions (Su et al. 2104.09864) on the first `dim` elements of a head.

    `pairs`: which elements turn together, i and i + dim/2 (GPT-NeoX, llama) or 2i and 2i + 1 (the paper, GPT-J). The
    frequencies are the same.
    """

    dim: Size
    base: Positive
    scaling: RopeScaling | None = None
    pairs: Literal["halves", "adjacent"] = "halves"

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ConfigError(f"rotary positions need an even number of dimensions, not {self.dim}")
        if isinstance(self.scaling, DynamicScaling) and self.dim == 2:
            raise ConfigError("dynamic scaling takes the base to the power of dim / (dim - 2): dim is 2")
        if isinstance(self.scaling, YarnScaling) and self.base == 1:
            raise ConfigError("YaRN's ramp is over the logarithm of the base: base is 1")
        if isinstance(self.scaling, ProportionalScaling) and self.scaling.turning > self.dim // 2:
            raise ConfigError(f"{self.scaling.turning} pairs turn of {self.dim // 2}")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                length = len(getattr(self.scaling, name))
                if length != self.dim // 2:
                    raise ConfigError(f"longrope {name} has {length} values, the rotary needs {self.dim // 2}")


class ALiBi(Component, frozen=True):
    """A bias of slope(head) · position of the key (Press et al. 2108.12409).

    `scaled`: the bias is multiplied by the attention scale together with q·k (Falcon), or stands outside it (BLOOM).
    `rounding`: the dtype in which slopes and products are rounded before they join the scores.
    """

    scaled: bool = False
    rounding: Literal["float32", "bfloat16"] = "float32"


# --- block -----------------------------------------------------------------------------------------------------------


class Attention(Component, frozen=True):
    """Causal self-attention with `heads` query heads and `kv_heads` key and value heads (MHA, GQA, MQA).

    `scale` multiplies q·k; with `scaling` "divide" the scores are divided by its inverse instead. `window` w lets
    position t see t-w+1 … t. `kv_expansion` says when a key head becomes one a query head: "repeat" after the cache,
    "broadcast" inside the matrix product, "projection" before positions are applied. `fused` computes q, k and v in
    one matrix product, a key-value head's queries, its key and its value together (with "conv1d" all queries, all keys,
    all values); `softmax` runs in fp32 at least, or in the dtype of its input. Where the scores are written out
    (not in a fused kernel), `scores` "float32" makes them of q and k in fp32 at least, the scale inside their product.
    """

    hidden_size: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    scale: Scale
    position: Rotary | ALiBi | None = None
    window: Size | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    arithmetic: Arithmetic = "linear"
    scaling: Literal["multiply", "divide"] = "multiply"
    kv_expansion: Literal["repeat", "broadcast", "projection"] = "repeat"
    fused: bool = False
    softmax: Literal["float32", "input"] = "float32"
    scores: Literal["input", "float32"] = "input"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads cannot be shared out over {self.kv_heads} key-value heads")
        if isinstance(self.position, Rotary) and self.position.dim > self.head_dim:
            raise ConfigError(f"rotary dimension {self.position.dim} exceeds the head dimension {self.head_dim}")
        if isinstance(self.position, ALiBi) and self.scores == "float32":
            raise ConfigError("scores with an ALiBi bias are computed in the dtype of their input, not in float32")
        if self.kv_expansion == "broadcast" and self.group > 1:
            if self.kv_heads > 1:
                raise ConfigError(f"kv_expansion broadcast is of one key-value head, not of {self.kv_heads}")
            if self.scores == "float32" or (isinstance(self.position, ALiBi) and not self.position.scaled):
                raise ConfigError("kv_expansion broadcast has no product with the scale, or a bias, inside it")
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and norm.size != self.head_dim:
                raise ConfigError(f"q/k norm of size {norm.size} does not fit heads of {self.head_dim}")

    @property
    def group(self) -> int:
        """Query heads a key-value head."""
        return self.heads // self.kv_heads

    def shapes(self) -> dict[str, Shape]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, Shape] = {
            "q_proj.weight": (q, self.hidden_size),
            "k_proj.weight": (kv, self.hidden_size),
            "v_proj.weight": (kv, self.hidden_size),
            "o_proj.weight": (self.hidden_size, q),
        }
        if self.qkv_bias:
            shapes |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
        if self.output_bias:
            shapes["o_proj.bias"] = (self.hidden_size,)
        return shapes


class LatentAttention(Component, frozen=True):
    """Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1; TransMLA 2502.07864).

    Of each token a latent c = kv_down(x), `kv_rank` wide, with `kv_norm` where there is one, is what keys and values
    are made of: k_up(c) gives `nope_dim` elements of a key a head, v_up(c) `value_dim` elements of a value a head.
    Positions are on keys of their own, `rope_heads` of them, `position.dim` wide, k_rope(x), which all heads share. A
    query head has nope_dim elements and then one rotated part for each of these keys:

        score = (q_nope · k_nope + Σ_r q_rope[r] · k_rope[r]) · scale

    With `rope_heads` key-value heads, and queries that are zero but for their own, it is grouped attention (GQA) as it
    was. The cache holds c and the rotated k_rope. `qkv_bias` is on q, the latent and k_rope; one on k_up would add the
    same to all of a query's scores, and one on v_up is an output bias.
    """

    hidden_size: Size
    heads: Size
    kv_rank: Size
    nope_dim: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    value_dim: Size
    scale: Scale
    rope_heads: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    position: Rotary | ALiBi | None = None
    window: Size | None = None
    kv_norm: RMSNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    arithmetic: Arithmetic = "linear"

    def __post_init__(self) -> None:
        if isinstance(self.position, Rotary) != (self.rope_heads > 0):
            raise ConfigError(f"{self.rope_heads} rotary keys with positions {type(self.position).__name__}")
        if not self.query_dim:
            raise ConfigError("a query of latent attention needs elements: nope_dim is 0 and there is no rotary key")
        if self.kv_norm is not None and self.kv_norm.size != self.kv_rank:
            raise ConfigError(f"a norm of size {self.kv_norm.size} does not fit a latent of {self.kv_rank}")

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a query head, or of the shared keys together: rope_heads · position.dim."""
        return self.rope_heads * self.position.dim if isinstance(self.position, Rotary) else 0

    @property
    def query_dim(self) -> int:
        """Elements of a query head: those without a position, and then the rotated ones."""
        return self.nope_dim + self.rope_dim

    def shapes(self) -> dict[str, Shape]:
        q, hidden = self.heads * self.query_dim, self.hidden_size
        shapes: dict[str, Shape] = {"q_proj.weight": (q, hidden), "kv_down_proj.weight": (self.kv_rank, hidden)}
        if self.rope_dim:
            shapes["k_rope_proj.weight"] = (self.rope_dim, hidden)
        if self.nope_dim:
            shapes["k_up_proj.weight"] = (self.heads * self.nope_dim, self.kv_rank)
        shapes["v_up_proj.weight"] = (self.heads * self.value_dim, self.kv_rank)
        shapes["o_proj.weight"] = (hidden, self.heads * self.value_dim)
        if self.qkv_bias:
            shapes |= {"q_proj.bias": (q,), "kv_down_proj.bias": (self.kv_rank,)}
            if self.rope_dim:
                shapes["k_rope_proj.bias"] = (self.rope_dim,)
        if self.output_bias:
            shapes["o_proj.bias"] = (hidden,)
        return shapes


class FeedForward(Component, frozen=True):
    """down(activation(up(x)))."""

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {
            "up_proj.weight": (self.intermediate_size, self.hidden_size),
            "down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.up_bias:
            shapes["up_proj.bias"] = (self.intermediate_size,)
        if self.down_bias:
            shapes["down_proj.bias"] = (self.hidden_size,)
        return shapes


class GatedFeedForward(Component, frozen=True):
    """down(activation(gate(x)) · up(x)) (Shazeer 2002.05202); SwiGLU where the activation is silu.

    `fused` computes gate and up in one matrix product.
    """

    hidden_size: Size
    intermediate_size: Size
    activation: Activation
    up_bias: bool = False
    down_bias: bool = False
    arithmetic: Arithmetic = "linear"
    fused: bool = False

    def shapes(self) -> dict[str, Shape]:
        inner = (self.intermediate_size, self.hidden_size)
        shapes: dict[str, Shape] = {
            "gate_proj.weight": inner,
            "up_proj.weight": inner,
            "down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.up_bias:
            shapes |= {"gate_proj.bias": (self.intermediate_size,), "up_proj.bias": (self.intermediate_size,)}
        if self.down_bias:
            shapes["down_proj.bias"] = (self.hidden_size,)
        return shapes


class MixtureOfExperts(Component, frozen=True):
    """`experts` feed-forwards of one kind, of which a router takes `top_k` for each token (Shazeer 1701.06538).

    p = softmax(router(x)), in fp32 at least; the output is Σ p_e · expert_e(x) over the top_k largest p. With
    `normalise` these are divided by their sum (Mixtral 2401.04088), so that experts which are alike give what one of
    them gives.
    """

    hidden_size: Size
    experts: Annotated[int, Meta(ge=1, le=1024)]
    top_k: Size
    expert: FeedForward | GatedFeedForward
    normalise: bool = True

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"{self.top_k} experts per token of {self.experts}")
        if self.expert.hidden_size != self.hidden_size:
            raise ConfigError(f"experts are {self.expert.hidden_size} wide, their router {self.hidden_size}")

    @property
    def intermediate_size(self) -> int:
        """Of each expert."""
        return self.expert.intermediate_size

    def shapes(self) -> dict[str, Shape]:
        return {"router.weight": (self.experts, self.hidden_size)}


class Block(Component, frozen=True):
    """One layer, norms before attention and feed-forward ("pre-norm").

    serial:   x = r + attention(attention_norm(x)), then x = r + feed_forward(feed_forward_norm(x))
    parallel: x = r + (feed_forward(feed_forward_norm(x)) + attention(attention_norm(x)))

    where r is x itself, or the norm's output with `residual` "normed" (BLOOM's
    apply_residual_connection_post_layernorm). A parallel block without `feed_forward_norm` feeds both branches
    from `attention_norm`.
    """

    attention_norm: Norm
    attention: Attention | LatentAttention
    feed_forward: FeedForward | GatedFeedForward | MixtureOfExperts
    feed_forward_norm: Norm | None = None
    parallel: bool = False
    residual: Literal["stream", "normed"] = "stream"

    def __post_init__(self) -> None:
        if self.feed_forward_norm is None and not self.parallel:
            raise ConfigError("a serial block needs a norm before its feed-forward")
        if self.parallel and self.residual == "normed":
            raise ConfigError("a parallel block adds to the stream itself, not to a norm's output")


# --- ends ------------------------------------------------------------------------------------------------------------


class Embedding(Component, frozen=True):
    """The token table; `norm` is applied to its rows before the first block (BLOOM)."""

    vocab_size: Size
    hidden_size: Size
    norm: Norm | None = None

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.hidden_size)}


class Head(Component, frozen=True):
    """Logits from hidden states. `tied`: its weight is the embedding's, and is stored once."""

    vocab_size: Size
    hidden_size: Size
    tied: bool = False
    bias: bool = False

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {} if self.tied else {"weight": (self.vocab_size, self.hidden_size)}
        return shapes | ({"bias": (self.vocab_size,)} if self.bias else {})


class Parameter(msgspec.Struct, frozen=True):
    """One stored tensor: its shared name, shape, the component it is counted under, and its layer if in a block."""

    name: str
    shape: Shape
    component: str
    layer: int | None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


HEAD_NORMS = ("q_norm", "k_norm", "kv_norm")
"""An attention's own norms, which are not as wide as the stream."""


class ModelSpec(Component, Shown, frozen=True):
    """A decoder-only language model. `context_length` is the longest sequence it was trained for, where known."""

    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Head
    positions: LearnedPositions | None = None
    context_length: Size | None = None

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("a model needs at least one layer")
        for name, node in self.nodes():
            size = getattr(node, "hidden_size", None)
            if isinstance(node, LayerNorm | RMSNorm | LearnedPositions) and not name.endswith(HEAD_NORMS):
                size = node.size
            if size is not None and size != self.embedding.hidden_size:
                raise ConfigError(f"{name} is {size} wide, the embedding {self.embedding.hidden_size}")
        if self.head.vocab_size != self.embedding.vocab_size:
            raise ConfigError(f"head of {self.head.vocab_size} tokens on a vocabulary of {self.embedding.vocab_size}")

    def __repr__(self) -> str:
        """The tree in a few lines; `to_json` has all of it."""
        runs: list[list[Any]] = []  # the first and the last layer of each
        for index, block in enumerate(self.blocks):
            if runs and runs[-1][2] == block:
                runs[-1][1] = index
            else:
                runs.append([index, index, block])
        total = sum(parameter.count for parameter in self.parameters())
        sizes = f"{len(self.blocks):,} layers, hidden size {self.hidden_size:,}, {total:,} parameters"
        lines = [f"ModelSpec of {sizes}", f"  {_told(self.embedding)}"]
        lines += [f"  {_told(self.positions)}"] if self.positions is not None else []
        for first, last, block in runs[:MOST_RUNS]:
            nodes = (block.attention_norm, block.attention, block.feed_forward_norm, block.feed_forward)
            where = f"{first}" if first == last else f"{first}–{last}"
            lines.append(f"  blocks.{where}: {', '.join(_told(node) for node in nodes if node is not None)}")
        lines += [f"  … {len(runs) - MOST_RUNS:,} more runs of layers"] if len(runs) > MOST_RUNS else []
        return "\n".join([*lines, f"  {_told(self.final_norm)}", f"  {_told(self.head)}"])

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    def nodes(self) -> Iterator[tuple[str, Component]]:
        """Every component that may hold parameters, depth first in the order of computation: (path, node)."""
        yield "embedding", self.embedding
        if self.embedding.norm is not None:
            yield "embedding.norm", self.embedding.norm
        if self.positions is not None:
            yield "positions", self.positions
        for index, block in enumerate(self.blocks):
            path = f"blocks.{index}"
            yield f"{path}.attention_norm", block.attention_norm
            yield f"{path}.attention", block.attention
            for name in HEAD_NORMS:
                norm = getattr(block.attention, name, None)
                if norm is not None:
                    yield f"{path}.attention.{name}", norm
            if block.feed_forward_norm is not None:
                yield f"{path}.feed_forward_norm", block.feed_forward_norm
            yield f"{path}.feed_forward", block.feed_forward
            if isinstance(block.feed_forward, MixtureOfExperts):
                for expert in range(block.feed_forward.experts):
                    yield f"{path}.feed_forward.experts.{expert}", block.feed_forward.expert
        yield "final_norm", self.final_norm
        yield "head", self.head

    def parameters(self) -> Iterator[Parameter]:
        """Every stored tensor once, in the order of `nodes`."""
        for path, node in self.nodes():
            layer = int(path.split(".")[1]) if path.startswith("blocks.") else None
            for name, shape in node.shapes().items():
                yield Parameter(f"{path}.{name}", shape, component_label(node), layer)


MOST_RUNS = 8
"""Runs of layers alike that a tree's repr lists."""


def _told(node: Component) -> str:
    """A component with its sizes: Attention(heads 12, kv_heads 12, head_dim 64)."""
    plain = {name: getattr(node, name) for name in node.__struct_fields__ if name not in ("hidden_size", "scale")}
    sizes = [f"{name} {value:,}" for name, value in plain.items() if type(value) is int]
    sizes += [name for name, value in plain.items() if value is True]
    inside = [_told(value) for value in plain.values() if isinstance(value, FeedForward | GatedFeedForward)]
    return f"{type(node).__name__}({', '.join([*sizes, *inside])})"


LABELS: dict[type[Component], str] = {
    Embedding: "embedding",
    LearnedPositions: "positions",
    Attention: "attention",
    LatentAttention: "attention",
    FeedForward: "feed-forward",
    GatedFeedForward: "feed-forward",
    MixtureOfExperts: "router",
    LayerNorm: "norms",
    RMSNorm: "norms",
    Head: "head",
}


def component_label(node: Component) -> str:
    """The row of a parameter table under which this node is counted."""
    return LABELS[type(node)]


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Where two trees differ: (path, in a, in b), a subtree of another type reported as a whole."""
    if type(a) is not type(b):
        return [(path or "model", a, b)]
    if isinstance(a, Component):
        found = []
        for field in a.__struct_fields__:
            found += differences(getattr(a, field), getattr(b, field), f"{path}.{field}" if path else field)
        return found
    if isinstance(a, tuple):
        if len(a) != len(b):
            return [(path, f"{len(a)} entries", f"{len(b)} entries")]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}.{i}")]
    return [] if a == b else [(path, a, b)]


ROUNDING: dict[type[Component], tuple[str, ...]] = {
    RMSNorm: ("cast",),
    ALiBi: ("rounding",),
    Attention: ("arithmetic", "scaling", "kv_expansion", "fused", "softmax", "scores"),
    LatentAttention: ("arithmetic",),
    FeedForward: ("arithmetic",),
    GatedFeedForward: ("arithmetic", "fused"),
}
"""The fields that say how a component rounds, and nothing of what function it is."""


def without_rounding(node: Any) -> Any:
    """A tree that stands for all that compute one function in exact arithmetic: what decides the last bits, and how
    an activation is evaluated, is set alike.
    """
    if isinstance(node, tuple):
        return tuple(without_rounding(each) for each in node)
    if not isinstance(node, Component):
        return node
    plain = type(node).__struct_fields__
    fields = {name: without_rounding(getattr(node, name)) for name in plain}
    defaults = dict(zip(reversed(plain), reversed(type(node).__struct_defaults__), strict=False))
    fields.update({name: defaults[name] for name in ROUNDING.get(type(node), ())})
    if "activation" in fields:
        fields["activation"] = function_of(fields["activation"])
    if isinstance(node, Attention | LatentAttention):  # 1/√d, as one family divides and another takes a power
        fields["scale"] = float(f"{node.scale:.14g}")
    return type(node)(**fields)


def to_json(spec: ModelSpec) -> Any:
    """The tree as plain JSON values, with the schema's version."""
    return {"schema_version": SCHEMA_VERSION, **msgspec.json.decode(msgspec.json.encode(spec))}


def from_json(data: Any) -> ModelSpec:
    """The tree from plain JSON values.

    Raises:
        ConfigError: another schema version; a field that is missing, unknown, or of the wrong type or range.

    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"not a model spec of schema version {SCHEMA_VERSION}, which this gptkit reads: {version!r:.40}",
            "Update gptkit, or convert the original again.",
        )
    try:
        return msgspec.convert({key: value for key, value in data.items() if key != "schema_version"}, ModelSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a gptkit model spec: {error}") from error
