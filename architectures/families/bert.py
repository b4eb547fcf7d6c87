"""BERT (Devlin et al. 1810.04805): an encoder with post-norm and a table of token types. MiniLM (2002.10957) and most
sentence encoders use the same model_type.

Source: transformers models/bert/{configuration,modeling}_bert.py. In BertForPreTraining checkpoints, gptkit reads the
head for masked tokens. Conversions keep the head that predicts the next sentence.
"""

from ..base import Leaf, leaves_of
from ..encoder import BERT_FIELDS, DECODING, OF_BERT, TASKS, TIED, Encoder, embeddings_of, layers_of, renamed_norms

_ENCODER = Encoder(BERT_FIELDS, masked=("BertForMaskedLM", "BertForPreTraining"), pooled=True)

_LAYER = "bert.encoder.layer.{layer}."
_NORMS = (
    "bert.embeddings.LayerNorm",
    _LAYER + "attention.output.LayerNorm",
    _LAYER + "output.LayerNorm",
    "cls.predictions.transform.LayerNorm",
)

BERT = _ENCODER.architecture(
    "bert",
    "BertForMaskedLM",
    (
        *embeddings_of("bert."),
        *layers_of(_LAYER),
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
