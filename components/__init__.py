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
from .base import KINDS, Arithmetic, Component, Mixer, Parameter, Role, Shape, Weight, recast
from .block import Block, SubLayer
from .ends import Embedding, Head
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .model import ModelSpec, differences, without_rounding
from .norms import Gain, LayerNorm, Norm, RMSNorm
from .positions import (
    ALiBi,
    Biasing,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Position,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    Turning,
    YarnScaling,
)
from .serialise import SCHEMA_VERSION, from_json, to_json

__all__ = [
    "FACTS",
    "KINDS",
    "SCHEMA_VERSION",
    "ALiBi",
    "Activation",
    "Arithmetic",
    "Attention",
    "Biasing",
    "Block",
    "Component",
    "DynamicScaling",
    "Embedding",
    "Facts",
    "FeedForward",
    "Gain",
    "GatedFeedForward",
    "Head",
    "LatentAttention",
    "LayerNorm",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mixer",
    "MixtureOfExperts",
    "ModelSpec",
    "Norm",
    "Parameter",
    "Position",
    "ProportionalScaling",
    "RMSNorm",
    "Role",
    "RopeScaling",
    "Rotary",
    "Shape",
    "SubLayer",
    "Turning",
    "Weight",
    "YarnScaling",
    "differences",
    "from_json",
    "function_of",
    "recast",
    "to_json",
    "without_rounding",
]
