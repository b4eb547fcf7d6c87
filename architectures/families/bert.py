"""BERT (Devlin et al. 1810.04805): an encoder with post-norm and a table of token types. MiniLM (2002.10957) and most
sentence encoders use the same model_type.

Source: transformers models/bert/{configuration,modeling}_bert.py. Of BertForPreTraining the head of masked tokens is
read, and what tells the next sentence is carried along.
"""

from ..base import Leaf, leaves_of
from ..encoder import BERT_FIELDS, DECODING, OF_BERT, TASKS, TIED, Encoder

_ENCODER = Encoder(BERT_FIELDS, masked=("BertForMaskedLM", "BertForPreTraining"), pooled=True)

B, LAYER = "blocks.{layer}.", "bert.encoder.layer.{layer}."


def layers_of(layer: str) -> tuple[Leaf, ...]:
    """The leaves of BERT's layers, whose names begin so."""
    return leaves_of(
        {
            layer + "attention.self.query": B + "attention.q_proj",
            layer + "attention.self.key": B + "attention.k_proj",
            layer + "attention.self.value": B + "attention.v_proj",
            layer + "attention.output.dense": B + "attention.o_proj",
            layer + "attention.output.LayerNorm": B + "attention_sum_norm",
            layer + "intermediate.dense": B + "feed_forward.up_proj",
            layer + "output.dense": B + "feed_forward.down_proj",
            layer + "output.LayerNorm": B + "feed_forward_sum_norm",
        }
    )


def embeddings_of(prefix: str) -> tuple[Leaf, ...]:
    """The leaves of what is before BERT's layers."""
    return leaves_of(
        {
            prefix + "embeddings.word_embeddings": "embedding",
            prefix + "embeddings.position_embeddings": "positions",
            prefix + "embeddings.token_type_embeddings": "token_types",
            prefix + "embeddings.LayerNorm": "first_norm",
        }
    )


def renamed_norms(*names: str) -> tuple[tuple[str, str], ...]:
    """`Architecture.aliases` of norms as TensorFlow calls their parameters."""
    return tuple((f"{n}.{old}", f"{n}.{new}") for n in names for old, new in (("gamma", "weight"), ("beta", "bias")))


_NORMS = (
    "bert.embeddings.LayerNorm",
    LAYER + "attention.output.LayerNorm",
    LAYER + "output.LayerNorm",
    "cls.predictions.transform.LayerNorm",
)

BERT = _ENCODER.architecture(
    "bert",
    "BertForMaskedLM",
    (
        *embeddings_of("bert."),
        *layers_of(LAYER),
        *leaves_of({"bert.pooler.dense": "pooler.dense"}),
        Leaf("cls.predictions.bias", "head.bias"),
        *leaves_of(
            {
                "cls.predictions.transform.dense": "head.transform.dense",
                "cls.predictions.transform.LayerNorm": "head.transform.norm",
            }
        ),
    ),
    released="2018-10",
    hf_config="BertConfig",
    base_class="BertModel",
    head="cls.predictions.decoder.weight",
    optional=("pooler",),
    token_ids={"pad_token_id": 0},
    prefix="bert.",
    aliases=renamed_norms(*_NORMS),
    repeated={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    carried={
        "unused": ("bert.embeddings.position_ids", "cls.predictions.decoder.bias"),
        "tasks": ("bert.pooler.", "cls.seq_relationship.", "cls.predictions.", *TASKS),
    },
    irrelevant=OF_BERT,
    refused={**DECODING, **TIED},
)
