"""Build the architecture of a model from a choice of components and a number of parameters. No torch.

The hidden size divided by the number of layers follows a rule: it is 64 up to 125M parameters, 128 from 6.7B on, and
interpolated logarithmically in between. GPT-3's models (Brown et al. 2005.14165, table 2.1) and LLaMA's have such
shapes. Quality depends on the shape only weakly (Kaplan et al. 2001.08361). The head dimension is 64 below a hidden
size of 2,048, and 128 from there on, since multiples of these are fast on tensor cores. From 24 heads on, the number of
heads is a multiple of eight, so that it is divisible by eight key-value heads or eight devices. Below 10M parameters,
hidden sizes between multiples of 64 are tried too, with head dimensions of 32 or 16.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from .. import components as parts
from ..components import ModelSpec
from ..errors import UsageError
from .costs import Costs, costs
from .parameters import count

_Positions = Literal["learned", "rope", "yarn", "alibi"]
_AttentionKind = Literal["mha", "gqa", "mqa", "mla"]

_EPS = 1e-5
TRAINED = 8_192  # training context of a model for long contexts, before YaRN extends it
_LOW_BASE, _HIGH_BASE, LOW_UP_TO = 10_000.0, 500_000.0, 4_096
"""`_LOW_BASE` is the rotary base of LLaMA-2, used up to `LOW_UP_TO` tokens. `_HIGH_BASE` is that of Llama 3, and the
smallest base for longer contexts."""
_BOUND = (0.0424, 1.628)
"""The factor a and the exponent b of the smallest rotary base for T tokens, a·T^b (Men et al. 2405.14591, figure 1)."""
_KV_HEADS = 8  # the key-value heads of GQA in LLaMA-2 70B and all Llama 3 models
TOLERANCE, _WORST = 0.03, 0.10  # the preferred and the largest distance from the budget
_CLOSENESS = 4.0  # the weight of the distance from the budget, relative to the aspect ratio
_WIDEST_SMALL = 2_048
SMALL = 10**7  # models with fewer parameters are for experiments, and may have narrower heads


@dataclass(frozen=True)
class Design:
    """The choice of components for a decoder, which has its norms before attention and feed-forward (pre-norm)."""

    positions: _Positions = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    feed_forward: Literal["gelu", "swiglu", "geglu"] = "gelu"
    attention: _AttentionKind = "mha"
    block: Literal["serial", "parallel"] = "serial"
    bias: bool = True
    tied: bool = True  # the head shares the embedding's weight
    window: int | None = None  # the number of tokens that a token attends to; None for all


BASELINE = Design()
"""GPT-2 (Radford et al. 2019), except that GELU is exact, which costs the same."""


@dataclass(frozen=True)
class Shape:
    """The hidden size and the number of layers of a model. The other sizes follow from them."""

    hidden: int
    layers: int

    @property
    def head_dim(self) -> int:
        if self.hidden % 64:
            return 16 if self.hidden % 32 or self.hidden == 32 else 32
        return 64 if self.hidden < _WIDEST_SMALL else 128

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Return the number of key-value heads for GQA.

        It is the largest divisor of the number of query heads that is at most eight and leaves three or more query
        heads per key-value head, or else 1.
        """
        return next(n for n in range(_KV_HEADS, 0, -1) if self.heads % n == 0 and (n == 1 or self.heads // n >= 3))

    @property
    def gated_width(self) -> int:
        """Return the intermediate size of a gated feed-forward: 8/3 of the hidden size, rounded up as in LLaMA.

        Its three matrices then have as many parameters as the two of a plain feed-forward with four times the hidden
        size (Shazeer 2002.05202, section 2).
        """
        multiple = 16 if self.hidden % 64 else 64 if self.hidden < 1_024 else 256
        return math.ceil(8 * self.hidden / (3 * multiple)) * multiple


def build(design: Design, shape: Shape, vocab: int, context: int) -> ModelSpec:
    """Return a model with the components of a design and the sizes of a shape.

    `vocab` is the size of its vocabulary, and `context` its context length.

    Raises:
        ConfigError: the sizes are invalid.
    """
    norm = (parts.LayerNorm if design.norm == "layernorm" else parts.RMSNorm)(size=shape.hidden, eps=_EPS)
    parallel = design.block == "parallel"
    attention = parts.SubLayer(mixer=_attention(design, shape, context), norm=norm)
    feed_forward = parts.SubLayer(mixer=_feed_forward(design, shape), norm=None if parallel else norm)
    block = parts.Block(sublayers=(attention, feed_forward), parallel=parallel)
    learned = design.positions == "learned"
    return ModelSpec(
        embedding=parts.Embedding(vocab_size=vocab, hidden_size=shape.hidden),
        positions=parts.LearnedPositions(length=context, size=shape.hidden) if learned else None,
        blocks=(block,) * shape.layers,
        final_norm=norm,
        head=parts.Head(vocab_size=vocab, hidden_size=shape.hidden, tied=design.tied),
        context_length=context,
    )


@dataclass(frozen=True)
class Baseline:
    """A model with GPT-2's components, for comparisons. The methods can exchange some: `costs(norm="rmsnorm")`."""

    shape: Shape
    vocab: int
    context: int

    def tree(self, **changes: Any) -> ModelSpec:
        return build(replace(BASELINE, **changes), self.shape, self.vocab, self.context)

    def costs(self, **changes: Any) -> Costs:
        return costs(self.tree(**changes), self.context)


def _attention(design: Design, shape: Shape, context: int) -> parts.Attention | parts.LatentAttention:
    size = shape.head_dim
    common: dict[str, Any] = {"hidden_size": shape.hidden, "heads": shape.heads, "window": design.window}
    common |= {"qkv_bias": design.bias, "output_bias": design.bias}
    if design.attention == "mla":  # DeepSeek-V2 2405.04434, section 3.1.2: a latent of 4 heads, half a head rotated
        rotated = 0 if design.positions in ("learned", "alibi") else size // 2
        return parts.LatentAttention(
            **common,
            kv_rank=4 * size,
            nope_dim=size,
            value_dim=size,
            scale=(size + rotated) ** -0.5,
            rope_heads=1 if rotated else 0,
            position=_position(design, size // 2, context),
            kv_norm=parts.RMSNorm(size=4 * size, eps=_EPS),
        )
    kv_heads = {"mha": shape.heads, "gqa": shape.kv_heads, "mqa": 1}[design.attention]
    position = _position(design, size, context)
    return parts.Attention(**common, kv_heads=kv_heads, head_dim=size, scale=size**-0.5, position=position)


def _position(design: Design, dim: int, context: int) -> parts.Rotary | parts.ALiBi | None:
    """Return RoPE or ALiBi for the attention of a design, or None for learned positions.

    The ALiBi bias is multiplied by the same scale as the scores, as in Falcon. This way, a transformers family has the
    design.
    """
    if design.positions == "learned":
        return None
    if design.positions == "alibi":
        return parts.ALiBi(scaled=True)
    if design.positions == "yarn" and context > TRAINED:
        factor = context / TRAINED
        warmer = 0.1 * math.log(factor) + 1.0  # YaRN, equation 22
        scaling = parts.YarnScaling(factor=factor, original_context=TRAINED, attention_factor=warmer)
        return parts.Rotary(dim=dim, base=rotary_base(TRAINED), scaling=scaling)
    return parts.Rotary(dim=dim, base=rotary_base(context))


def rotary_base(context: int) -> float:
    """Return the rotary base for a model that is trained on `context` tokens.

    It is the base of LLaMA-2 up to `LOW_UP_TO` tokens. For longer contexts it is the base of Llama 3, or the lower
    bound for this context (`_BOUND`) if that is larger, rounded up to two digits.
    """
    if context <= LOW_UP_TO:
        return _LOW_BASE
    least: float = _BOUND[0] * float(context) ** _BOUND[1]
    unit = 10.0 ** (math.floor(math.log10(least)) - 1)
    return max(_HIGH_BASE, math.ceil(least / unit) * unit)


def _feed_forward(design: Design, shape: Shape) -> parts.FeedForward | parts.GatedFeedForward:
    common: dict[str, Any] = {"hidden_size": shape.hidden, "up_bias": design.bias, "down_bias": design.bias}
    if design.feed_forward == "gelu":
        return parts.FeedForward(**common, intermediate_size=4 * shape.hidden, activation="gelu")
    activation: Any = "silu" if design.feed_forward == "swiglu" else "gelu"
    return parts.GatedFeedForward(**common, intermediate_size=shape.gated_width, activation=activation)


def aspect_ratio(budget: int) -> float:
    """Return the usual hidden size divided by the number of layers, for a model of `budget` parameters.

    It is 64 up to 125M parameters, 128 from 6.7B on, and interpolated logarithmically in between.
    """
    small, large = 125e6, 6.7e9
    along = math.log(budget / small) / math.log(large / small)
    return float(64 * 2 ** min(max(along, 0.0), 1.0))


def usual_vocabulary(budget: int) -> int:
    """Return the default vocabulary size for a model of `budget` parameters: 32,000 as in LLaMA from 10M parameters on.

    For smaller models, it is the largest power of two up to `budget` / 1024, so that most parameters are in the layers.
    It is at least 320, a multiple of 64 with room for 256 bytes and an end-of-text token.
    """
    return 32_000 if budget >= SMALL else max(2 ** int(math.log2(budget / 1_024)), 320)


def _widths(budget: int) -> Iterator[int]:
    """Yield the hidden sizes to try for a model of `budget` parameters. Their numbers of heads have many divisors."""
    if budget < SMALL:
        yield from (32, 48, 96, 160)
    yield from (64 * heads for heads in (1, 2, 3, 4, 6, 8, 9, 12, 16, 20, 24))
    yield from (128 * heads for heads in (16, 20, *range(24, 512, 8)))


def fit(design: Design, budget: int, vocab: int, context: int) -> Shape:
    """Return the hidden size and the number of layers of a model with about `budget` parameters.

    Among shapes within 3 % of the budget, `fit` prefers the one whose ratio of hidden size to layers is nearest to
    `aspect_ratio`. If there is none, it returns the shape nearest to the budget.

    Raises:
        UsageError: no shape is within 10 % of the budget, because the vocabulary is too large.
    """
    scores: list[tuple[float, Shape]] = []
    smallest, wanted = [], aspect_ratio(budget)
    for hidden in _widths(budget):
        one, two = (count(build(design, Shape(hidden, layers), vocab, context)).total for layers in (1, 2))
        smallest.append(one)
        layer = two - one
        for layers in {max(1, math.floor((budget - one) / layer) + 1), max(1, math.ceil((budget - one) / layer) + 1)}:
            off = abs(math.log((one + (layers - 1) * layer) / budget))
            badness = off if off > math.log1p(TOLERANCE) else 0.0
            score = abs(math.log(hidden / layers / wanted)) + _CLOSENESS * off + 1_000 * badness
            if off <= math.log1p(_WORST):
                scores.append((score, Shape(hidden, layers)))
    if not scores:
        raise UsageError(
            f"a model of {budget:,} parameters is too small for a vocabulary of {vocab:,} tokens: the "
            f"smallest such model has {min(smallest):,} parameters",
            f"Choose a smaller vocabulary, such as --vocab {min(usual_vocabulary(budget), 8_192)}, or more parameters.",
        )
    return min(scores, key=lambda score: score[0])[1]
