"""BioGPT (Luo et al. 2210.10341): GPT-2 with ordinary linear layers, a scaled embedding, and a position table that
starts at its third row.

Source: transformers models/biogpt/{configuration,modeling}_biogpt.py, which ignores an eps in the config.
"""

from ...components import FeedForward, LayerNorm
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import BIASED, Field, is_scaled, root_of
from ..usual import fairseq

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 42384),
        "hidden_size": Field("hidden", 1024),
        "num_hidden_layers": Field("layers", 24),
        "num_attention_heads": Field("heads", 16),
        "intermediate_size": Field("intermediate", 4096),
        "hidden_act": Field("activation", "gelu"),
        "max_position_embeddings": Field("context", 1024),
        "scale_embedding": Field("embedding.multiplier", True, root_of("hidden_size", 1024), is_scaled),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={**BIASED, "eps": 1e-5, "attention.softmax": "input", "positions.offset": 2},
    rotary=None,
    learned=True,
)

_BIOGPT = _DECODER.architecture(
    "biogpt",
    "BioGptForCausalLM",
    leaves_of(
        {
            "biogpt.embed_tokens": "embedding",
            "biogpt.embed_positions": "positions",
            **fairseq("biogpt."),
            "biogpt.layer_norm": "final_norm",
            "output_projection": "head",
        }
    ),
    released="2022-10",
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    prefix="biogpt.",
    head="output_projection.weight",
    irrelevant={"layer_norm_eps": "not read by transformers"},
)
