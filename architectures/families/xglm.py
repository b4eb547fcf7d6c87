"""XGLM (Lin et al. 2112.10668): GPT-2 with ordinary linear layers, a scaled embedding, and sinusoidal positions that
start at the third row.

transformers has no sdpa path for this family. Queries are scaled before they are multiplied by keys.

Source: transformers models/xglm/{configuration,modeling}_xglm.py.
"""

from ...components import FeedForward, LayerNorm, SinusoidalPositions
from ..base import leaves_of, only_eager
from ..decoder import DecoderFamily
from ..fields import BIASED, Field, is_scaled, root_of
from ..usual import fairseq

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 256008),
        "max_position_embeddings": Field("context", 2048),
        "d_model": Field("hidden", 1024),
        "ffn_dim": Field("intermediate", 4096),
        "num_layers": Field("layers", 24),
        "attention_heads": Field("heads", 16),
        "activation_function": Field("activation", "gelu"),
        "scale_embedding": Field("embedding.multiplier", True, root_of("d_model", 1024), is_scaled),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        **BIASED,
        "eps": 1e-5,
        "attention.scaling": "queries",
        "attention.kernel": "eager",
        "attention.softmax": "input",
        "positions.offset": 2,
        "positions.ends": "both",
    },
    rotary=None,
    learned=True,
    table=SinusoidalPositions,
)

_XGLM = _DECODER.architecture(
    "xglm",
    "XGLMForCausalLM",
    leaves_of(
        {"model.embed_tokens": "embedding", **fairseq("model."), "model.layer_norm": "final_norm", "lm_head": "head"}
    ),
    released="2021-12",
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    config_aliases={
        "attention_heads": ("num_attention_heads",),
        "d_model": ("hidden_size",),
        "num_layers": ("num_hidden_layers",),
    },
    dropped=("model.embed_positions.weights",),
    irrelevant={"decoder_start_token_id": "generation", "pad_token_id": None},
    refused={"pad_token_id": ((1, 0, None), "gptkit supports only 0 and 1 as the padding token of this model_type")},
    **only_eager(),
)
