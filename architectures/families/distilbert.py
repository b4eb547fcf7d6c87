"""DistilBERT (Sanh et al. 1910.01108): BERT with half of its layers, without token types and without a pooler.

Source: transformers models/distilbert/{configuration,modeling}_distilbert.py.
"""

from ..base import leaves_of
from ..encoder import BOTH_WAYS, OF_BERT, TASKS, Encoder, renamed_norms
from ..fields import BIASED, Field

_ENCODER = Encoder(
    {
        "vocab_size": Field("vocab", 30522),
        "dim": Field("hidden", 768),
        "n_layers": Field("layers", 6),
        "n_heads": Field("heads", 12),
        "hidden_dim": Field("intermediate", 3072),
        "activation": Field("activation", "gelu"),
        "max_position_embeddings": Field("context", 512),
        "tie_word_embeddings": Field("tied", True),
    },
    masked=("DistilBertForMaskedLM",),
    fixed={**BOTH_WAYS, **BIASED, "eps": 1e-12},
    types=None,
)

_B, _T = "blocks.{layer}.", "distilbert.transformer.layer.{layer}."
_EMBEDDINGS = "distilbert.embeddings."

DISTILBERT = _ENCODER.architecture(
    "distilbert",
    "DistilBertForMaskedLM",
    leaves_of(
        {
            _EMBEDDINGS + "word_embeddings": "embedding",
            _EMBEDDINGS + "position_embeddings": "positions",
            _EMBEDDINGS + "LayerNorm": "first_norm",
            _T + "attention.q_lin": _B + "attention.q_proj",
            _T + "attention.k_lin": _B + "attention.k_proj",
            _T + "attention.v_lin": _B + "attention.v_proj",
            _T + "attention.out_lin": _B + "attention.o_proj",
            _T + "sa_layer_norm": _B + "attention_sum_norm",
            _T + "ffn.lin1": _B + "feed_forward.up_proj",
            _T + "ffn.lin2": _B + "feed_forward.down_proj",
            _T + "output_layer_norm": _B + "feed_forward_sum_norm",
            "vocab_transform": "head.transform.dense",
            "vocab_layer_norm": "head.transform.norm",
            "vocab_projector": "head",
        }
    ),
    released="2019-08",
    head="vocab_projector.weight",
    config_aliases={"dim": ("hidden_size",), "n_layers": ("num_hidden_layers",), "n_heads": ("num_attention_heads",)},
    token_ids={"pad_token_id": 0},
    prefix="distilbert.",
    aliases=renamed_norms(_EMBEDDINGS + "LayerNorm"),
    carried={"tasks": ("pre_classifier.", "vocab_", *TASKS), "unused": (_EMBEDDINGS + "position_ids",)},
    irrelevant={
        **OF_BERT,
        **dict.fromkeys(("qa_dropout", "seq_classif_dropout"), "training only"),
        "sinusoidal_pos_embds": "how training begins: the table is stored",
        "output_past": "generation",
        "tie_weights_": "a note of its authors' code",
    },
)
