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

from .activations import FACTS, Activation, Facts, function_of
from .attention import Attention
from .base import Arithmetic, Component, Parameter, Positive, Scale, Shape, Size, Turns
from .block import Block
from .ends import Embedding, Head
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .model import (
    HEAD_NORMS,
    LABELS,
    MOST_RUNS,
    ROUNDING,
    SCHEMA_VERSION,
    ModelSpec,
    component_label,
    differences,
    from_json,
    to_json,
    without_rounding,
)
from .norms import LayerNorm, Norm, RMSNorm
from .positions import (
    ALiBi,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)

__all__ = [
    "FACTS",
    "HEAD_NORMS",
    "LABELS",
    "MOST_RUNS",
    "ROUNDING",
    "SCHEMA_VERSION",
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
    "Positive",
    "ProportionalScaling",
    "RMSNorm",
    "RopeScaling",
    "Rotary",
    "Scale",
    "Shape",
    "Size",
    "Turns",
    "YarnScaling",
    "component_label",
    "differences",
    "from_json",
    "function_of",
    "to_json",
    "without_rounding",
]
