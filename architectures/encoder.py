"""Encoders such as BERT: a `DecoderFamily` with bidirectional attention, and with the embeddings and heads of encoders.

A family has two kinds of models: with the head of a masked language model, or without a head, as in sentence encoders
and classifiers (`Architecture.base_class`). The class that config.json names decides which.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from ..components import FeedForward, Head, LayerNorm, ModelSpec, Pooler, TokenTypes
from .base import Architecture, Leaf, leaves_of
from .config import ConfigReader
from .decoder import DecoderFamily
from .draws import Config, sometimes
from .fields import BIASED, SUM_NORMS, Field, Fields
from .obstacles import Kinds

BERT_FIELDS: Fields = {
    "vocab_size": Field("vocab", 30522),
    "hidden_size": Field("hidden", 768),
    "num_hidden_layers": Field("layers", 12),
    "num_attention_heads": Field("heads", 12),
    "intermediate_size": Field("intermediate", 3072),
    "hidden_act": Field("activation", "gelu"),
    "max_position_embeddings": Field("context", 512),
    "layer_norm_eps": Field("eps", 1e-12),
}
"""The fields of BertConfig, which most config classes of encoders have."""

OF_BERT: dict[str, str | None] = {
    **dict.fromkeys(
        (
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        ),
        "a note of TensorFlow's checkpoints",
    ),
    "architectures": None,
}
"""Config fields that families like BERT ignore -> the reason, for `Architecture.irrelevant`. None as the reason: these
families read `architectures`, which other families ignore."""

DECODING: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False, None), "gptkit supports this family only as an encoder, and a decoder has causal attention"),
    "embedding_size": (
        (None,),
        "gptkit does not yet support an embedding narrower or wider than the hidden size (ELECTRA)",
    ),
    "position_embedding_type": (
        ("absolute", None),
        "gptkit does not support relative position embeddings for this family",
    ),
}
"""Config fields that families like BERT refuse, with harmless values and reasons, in addition to `COMMON_REFUSED`."""

ALWAYS_TIED = {"tied": True}
"""Values of roles for families whose head is always tied. They are a part of `DecoderFamily.fixed`."""

TIED = {
    "tie_word_embeddings": ((True, None), "an untied head has two biases in this family, only one of which is used")
}

TASKS = ("classifier.", "qa_outputs.")
"""The prefixes of the names of tensors that belong to heads for other tasks than masked language modelling."""


BOTH_WAYS: dict[str, Any] = {
    "attention.causal": False,
    "attention.lie": "as projected",
    "attention.softmax": "input",
    "final_norm": False,
    "head.bias": True,
    "transform.activation": lambda values: values["activation"],
    "transform.bias": True,
}
"""Values of roles for encoders, whose attention is bidirectional. They are a part of `DecoderFamily.fixed`."""


@dataclass(frozen=True)
class Encoder(DecoderFamily):
    """The common properties of an encoder family's models."""

    inner: type[Any] = FeedForward
    norm: type[Any] = LayerNorm
    norms: Any = SUM_NORMS
    fixed: Mapping[str, Any] = field(default_factory=lambda: {**BOTH_WAYS, **BIASED, **ALWAYS_TIED})
    rotary: Any = None
    learned: bool = True
    masked: tuple[str, ...] = ()
    """The transformers classes with a masked language model's head. If config.json names another class, the model has
    no head."""
    first_norm: bool = True
    """Whether there is a norm after the sum of token, position and token type embeddings."""
    types: tuple[str, int] | None = ("type_vocab_size", 2)
    """The config field with the number of token types, and its default. None: the family has no token type
    embeddings."""
    pooled: bool = False
    """Whether models without a head have a pooler, unless the files have no tensors for it."""

    @property
    def kinds(self) -> Kinds:
        ends = {*(() if self.types is None else (TokenTypes,)), *((Pooler,) if self.pooled else ())}
        return super().kinds | ends

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        classes = config.raw("architectures")
        headless = isinstance(classes, list) and classes and {*map(str, classes)}.isdisjoint(self.masked)
        read = {name: entry for name, entry in self.fields.items() if not entry.role.startswith("transform.")}
        family = dataclasses.replace(self, fields=read) if headless else self
        spec = super(Encoder, family).read(config, **more)
        hidden, norm = spec.hidden_size, next(iter(spec.blocks[-1].norms().values()))
        types = None if self.types is None else config.integer(*self.types)
        ends: dict[str, Any] = {"head": None} if headless else {}
        if headless and self.pooled:
            ends["pooler"] = Pooler(hidden_size=hidden, activation="tanh")
        return replace(
            spec,
            token_types=None if types is None else TokenTypes(count=types, hidden_size=hidden),
            first_norm=norm if self.first_norm else None,
            **ends,
        )

    def architecture(self, name: str, hf_class: str, leaves: tuple[Leaf, ...], **more: Any) -> Architecture:
        """Return the `Architecture` of this family.

        Args:
            name: the name of the family.
            hf_class: the transformers class.
            leaves: the table of the tensors in checkpoints.
            more: fields of `Architecture` that differ from those of most encoders.
        """
        return super().architecture(
            name, hf_class, leaves, **{"base_class": hf_class.replace("ForMaskedLM", "Model"), **more}
        )

    def draw(self, chosen: Random, stated: Mapping[str, Any], **own: Any) -> Config:
        """Return a random legal config for tests. The arguments are those of `DecoderFamily.draw`."""
        headless = self.masked[0].replace("ForMaskedLM", "Model")
        types = {} if self.types is None else sometimes(chosen, {self.types[0]: chosen.choice((1, 3))})
        config = {**super().draw(chosen, stated, **own), **types}
        return {**config, "architectures": [chosen.choice((self.masked[0], headless))]}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        types = {} if self.types is None or spec.token_types is None else {self.types[0]: spec.token_types.count}
        if spec.head is not None:
            return {**super().write(spec), **types}
        usual = Head(vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, tied=True)
        fields = super().write(replace(spec, head=usual, pooler=None))
        of_head = {name for name, declared in self.fields.items() if declared.role.startswith("head.")}
        return {**{name: value for name, value in fields.items() if name not in of_head}, **types}


_B, LAYER = "blocks.{layer}.", "bert.encoder.layer.{layer}."


def layers_of(layer: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of BERT's layers.

    `layer` is the prefix of their names in checkpoints.
    """
    return leaves_of(
        {
            layer + "attention.self.query": _B + "attention.q_proj",
            layer + "attention.self.key": _B + "attention.k_proj",
            layer + "attention.self.value": _B + "attention.v_proj",
            layer + "attention.output.dense": _B + "attention.o_proj",
            layer + "attention.output.LayerNorm": _B + "attention_sum_norm",
            layer + "intermediate.dense": _B + "feed_forward.up_proj",
            layer + "output.dense": _B + "feed_forward.down_proj",
            layer + "output.LayerNorm": _B + "feed_forward_sum_norm",
        }
    )


def embeddings_of(prefix: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of BERT's embeddings.

    `prefix` is that of their names in checkpoints.
    """
    return leaves_of(
        {
            prefix + "embeddings.word_embeddings": "embedding",
            prefix + "embeddings.position_embeddings": "positions",
            prefix + "embeddings.token_type_embeddings": "token_types",
            prefix + "embeddings.LayerNorm": "first_norm",
        }
    )


def renamed_norms(*names: str) -> tuple[tuple[str, str], ...]:
    """Return `Architecture.aliases` for norms whose weights and biases are called gamma and beta in older checkpoints.

    `names` are the names of the norms in checkpoints.
    """
    return tuple((f"{n}.{old}", f"{n}.{new}") for n in names for old, new in (("gamma", "weight"), ("beta", "bias")))
