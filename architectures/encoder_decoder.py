"""Encoder-decoders: an encoder and a decoder in one config.json. A `DecoderFamily` reads and writes each of them."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from ..components import Attention, Block, CrossAttention, ModelSpec
from ..errors import CannotExpress
from .base import Architecture, Leaf
from .config import ConfigReader
from .decoder import DecoderFamily
from .draws import Config
from .obstacles import Kinds, of_kind

OF_BOTH: dict[str, Any] = {
    "is_encoder_decoder": ((True, None), "gptkit supports only the encoder and decoder together for this family"),
    "is_decoder": ((False, None), "gptkit supports only the encoder and decoder together for this family"),
}
"""Config fields that encoder-decoders refuse, with harmless values and the reason. They are a part of
`Architecture.refused`."""

GENERATION = dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id", "task_specific_params"), "generation")
"""Config fields that encoder-decoders ignore -> the reason. They are a part of `Architecture.irrelevant`."""


@dataclass(frozen=True)
class EncoderDecoder:
    """The common properties of an encoder-decoder family's models.

    Cross-attention has the sizes, biases and norms of the decoder's self-attention.
    """

    encoder: DecoderFamily
    """How the encoder is read from config.json and written."""
    decoder: DecoderFamily
    """How the decoder is read from config.json and written."""
    first_norm: bool = False
    """Whether the encoder and the decoder have a norm after the sum of token and position embeddings."""
    headless: str = ""
    """The transformers class without a head, if the class with a head adds a bias to the logits. Files of the former
    lack this bias."""
    kinds: Kinds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", self.encoder.kinds | self.decoder.kinds | {CrossAttention})

    def architecture(self, name: str, hf_class: str, leaves: tuple[Leaf, ...], **more: Any) -> Architecture:
        """Return the `Architecture` of this family. `more` are further fields of `Architecture`."""
        usual = {
            "model_types": (name,),
            "hf_config": hf_class.replace("ForConditionalGeneration", "Config"),
            "kinds": self.kinds,
            "read": self.read,
            "write": self.write,
            "draw": self.draw,
        }
        return Architecture(name=name, hf_class=hf_class, leaves=leaves, **{**usual, **more})

    def draw(self, chosen: Random) -> Config:
        """Return a random legal config for tests. The encoder and the decoder may differ in heads and layers."""
        hidden, stacks = chosen.choice((12, 24, 36)), (self.encoder, self.decoder)
        drawn = [stack.draw(chosen, {}, hidden=hidden, heads=chosen.choice((1, 2, 3, 4))) for stack in stacks]
        return {**drawn[0], **drawn[1]}

    def read(self, config: ConfigReader) -> ModelSpec:
        """Return the ModelSpec of a config.json.

        Raises ConfigError if a field has the wrong type or is out of range.
        """
        encoder, decoder = self.encoder.read(config), self.decoder.read(config)
        blocks = {block: _across(block) for block in dict.fromkeys(decoder.blocks)}
        first = [
            next(iter(stack.blocks[0].norms().values())) if self.first_norm else None for stack in (encoder, decoder)
        ]
        table = replace(encoder.embedding, shared=True)
        head = decoder.has_head()
        if self.headless:
            bias = config.raw("architectures") != [self.headless]
            head = replace(head, bias=bias, added="behind it" if bias else "in the product")
        return replace(
            decoder,
            head=head,
            encoder=replace(encoder, head=None, embedding=table, first_norm=first[0]),
            first_norm=first[1],
            blocks=tuple(blocks[block] for block in decoder.blocks),
        )

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the config fields that describe a model.

        Raises CannotExpress if it has no encoder, or other kinds of components.
        """
        encoder = spec.encoder
        if encoder is None:
            raise CannotExpress("the model has no encoder, but this architecture needs one")
        table = replace(encoder.embedding, shared=False)
        head = None if spec.head is None else replace(spec.head, vocab_size=encoder.vocab_size)
        alone = tuple(
            replace(
                block,
                sublayers=tuple(sublayer for sublayer in block.sublayers if sublayer.mixer.slot != CrossAttention.slot),
            )
            for block in spec.blocks
        )
        first = self.encoder.write(replace(encoder, head=head, embedding=table))
        named = {"architectures": [self.headless]} if self.headless and not spec.has_head().bias else {}
        return {**first, **self.decoder.write(replace(spec, encoder=None, blocks=alone)), **named}


def _across(block: Block) -> Block:
    """Return the decoder layer with cross-attention after its self-attention."""
    first, *others = block.sublayers
    own = of_kind(first.mixer, Attention)
    fields = ("hidden_size", "heads", "head_dim", "scale", "qkv_bias", "output_bias", "scaling", "softmax")
    across = CrossAttention(**{name: getattr(own, name) for name in fields})
    return replace(block, sublayers=(first, replace(first, mixer=across), *others))
