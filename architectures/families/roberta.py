"""RoBERTa (Liu et al. 1907.11692): BERT's layers, and positions that do not count padding tokens. XLM-RoBERTa and
CamemBERT have the same layers.

Padding tokens have a separate row in the table of positions, whatever the attention mask contains.

Source: transformers models/roberta/{configuration,modeling}_roberta.py.
"""

from typing import Any

from ..base import Leaf, leaves_of
from ..encoder import (
    ALWAYS_TIED,
    BERT_FIELDS,
    BOTH_WAYS,
    DECODING,
    OF_BERT,
    TASKS,
    TIED,
    Encoder,
    embeddings_of,
    layers_of,
    renamed_norms,
)
from ..fields import BIASED, Field, below, with_defaults

_PADDING, _ROWS, _PREFIX = "pad_token_id", "max_position_embeddings", "roberta."
_COUNTED = "the position ids of this architecture skip padding tokens, but the model counts them"
_NORMS = (
    "embeddings.LayerNorm",
    "encoder.layer.{layer}.attention.output.LayerNorm",
    "encoder.layer.{layer}.output.LayerNorm",
)
HEAD = (
    Leaf("lm_head.bias", "head.bias"),
    *leaves_of({"lm_head.dense": "head.transform.dense", "lm_head.layer_norm": "head.transform.norm"}),
)
_POSITIONS = _PREFIX + "embeddings.position_embeddings."
BASE = (
    # transformers' class creates the table of positions last.
    *sorted(embeddings_of(_PREFIX), key=lambda leaf: leaf.checkpoint.startswith(_POSITIONS)),
    *layers_of(_PREFIX + "encoder.layer.{layer}."),
    *leaves_of({_PREFIX + "pooler.dense": "pooler.dense"}),
)
ENCODER = Encoder(
    {
        **with_defaults(BERT_FIELDS, vocab=50265),
        # Position ids start after the id of the padding token.
        _ROWS: Field("context", 512, of=lambda spec: getattr(spec.positions, "table_rows", None)),
        _PADDING: below("positions.padding", 1, _ROWS, 512, 0, 1, 3, 40, least=2, why=_COUNTED),
    },
    masked=("RobertaForMaskedLM",),
    pooled=True,
    fixed={
        **BOTH_WAYS,
        **BIASED,
        **ALWAYS_TIED,
        "context": lambda values: values["context"] - values["positions.padding"] - 1,
        "positions.offset": lambda values: values["positions.padding"] + 1,
        "transform.activation": "gelu",
    },
)
FAMILY: dict[str, Any] = {
    "head": "lm_head.decoder.weight",
    "optional": ("pooler",),
    "token_ids": {"bos_token_id": 0, "eos_token_id": 2},
    "prefix": _PREFIX,
    "aliases": renamed_norms(*(_PREFIX + norm for norm in _NORMS)),
    "repeated": {"lm_head.decoder.bias": "lm_head.bias"},
    "carried": {
        "unused": (f"{_PREFIX}embeddings.position_ids", "lm_head.decoder.bias"),
        "tasks": (f"{_PREFIX}pooler.", "lm_head.", *TASKS),
    },
    "irrelevant": {**OF_BERT, _PADDING: None},
    "refused": {**DECODING, **TIED},
}
"""Fields of `Architecture` that families like RoBERTa share."""

ROBERTA = ENCODER.architecture("roberta", "RobertaForMaskedLM", (*BASE, *HEAD), released="2019-07", **FAMILY)
