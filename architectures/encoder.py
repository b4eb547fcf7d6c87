"""What encoders have in common beside `decoder`'s table: attention in both directions, and what stands at either end.

One family has trees of two kinds, by the class that config.json names: with the head of a masked language model, or
without any, as sentence encoders and classifiers have them (`Architecture.base_class`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ..components import FeedForward, HeadTransform, LayerNorm, ModelSpec, Pooler, TokenTypes
from .config import ConfigReader
from .decoder import BIASED, Decoder, Field, Fields
from .families.opt import POST
from .obstacles import Kinds, of_kind

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

TRAINED = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), "training only")

DECODING = {"is_decoder": ((False, None), "as a decoder this family's attention is causal, and gptkit reads encoders")}
"""Fields that BERT's kin refuse beside the common ones."""

TIED = {"tie_word_embeddings": ((True, None), "a head of its own has two biases in this family, of which one is read")}

TASKS = ("classifier.", "qa_outputs.")
"""How names begin of what stands on hidden states for another task than to fill in masked tokens."""


BOTH_WAYS: dict[str, Any] = {
    "attention.causal": False,
    "attention.lie": "as projected",
    "attention.softmax": "input",
    "final_norm": False,
    "tied": True,
}
"""`Decoder.fixed` of encoders."""


@dataclass(frozen=True)
class Encoder(Decoder):
    """What is the same in all trees of a family of encoders.

    masked: the classes whose trees have a head. first_norm: whether a norm stands behind all that is embedded. types:
    the field that says how many types of tokens there are, and what is assumed, where there is a table of them.
    pooled: whether trees without a head have a pooler, unless files lack it. transform: fields of what is before the
    head, of the values of its config, beside the norm and the activation, which are the layers'.
    """

    inner: type[Any] = FeedForward
    norm: type[Any] = LayerNorm
    norms: Any = POST
    fixed: Mapping[str, Any] = field(default_factory=lambda: {**BOTH_WAYS, **BIASED})
    rotary: Any = None
    learned: bool = True
    masked: tuple[str, ...] = ()
    first_norm: bool = True
    types: tuple[str, int] | None = ("type_vocab_size", 2)
    pooled: bool = False
    transform: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> Kinds:
        ends = {HeadTransform, *(() if self.types is None else (TokenTypes,)), *((Pooler,) if self.pooled else ())}
        return super().kinds | ends

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        spec = super().read(config, **more)
        hidden, norm = spec.hidden_size, next(iter(spec.blocks[-1].norms().values()))
        types = None if self.types is None else config.integer(*self.types)
        classes = config.data.get("architectures")
        ends: dict[str, Any] = {"head": None}
        if not isinstance(classes, list) or not classes or not {*map(str, classes)}.isdisjoint(self.masked):
            transform = {"activation": of_kind(spec.blocks[0].feed_forward, self.inner).activation, **self.transform}
            made = HeadTransform(hidden_size=hidden, norm=norm, **transform)
            ends = {"head": replace(spec.has_head(), bias=True, transform=made)}
        elif self.pooled:
            ends["pooler"] = Pooler(hidden_size=hidden, activation="tanh")
        return replace(
            spec,
            token_types=None if types is None else TokenTypes(count=types, hidden_size=hidden),
            first_norm=norm if self.first_norm else None,
            **ends,
        )

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        types = {} if self.types is None or spec.token_types is None else {self.types[0]: spec.token_types.count}
        return {**super().write(spec), **types}
