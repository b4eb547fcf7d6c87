"""GPT-NeoX (2204.06745) and Pythia (2304.01373): GPT-2 with ordinary linear layers, and parallel blocks with two
LayerNorms. RoPE on a quarter of each head replaces learned positions, and q, k and v are fused head by head.

Source: transformers models/gpt_neox/{configuration,modeling}_gpt_neox.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import Leaf, by_name, leaves_of, qkv
from ..decoder import DecoderFamily
from ..fields import Field
from ..rope import RotaryKind
from ..usual import GROUPED_BIAS, GROUPED_WEIGHT

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 50432),
        "hidden_size": Field("hidden", 6144),
        "intermediate_size": Field("intermediate", 24576),
        "num_hidden_layers": Field("layers", 44),
        "num_attention_heads": Field("heads", 64),
        "head_dim": Field("head_dim"),
        "hidden_act": Field("activation", "gelu"),
        "max_position_embeddings": Field("context", 2048),
        "layer_norm_eps": Field("eps", 1e-5),
        "use_parallel_residual": Field("block.parallel", True),
        "attention_bias": Field("attention.qkv_bias attention.output_bias", True),
        "tie_word_embeddings": Field("tied", False),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={"attention.fused": True, "feed_forward.up_bias": True, "feed_forward.down_bias": True},
    rotary=RotaryKind(theta="rotary_emb_base", part="rotary_pct", whole=0.25),
    square=True,
)

_B, _T = "blocks.{layer}.", "gpt_neox.layers.{layer}."
_HEAD = "embed_out.weight"
_LEAVES = (
    *by_name(
        (
            *leaves_of(
                {
                    "gpt_neox.embed_in": "embedding",
                    _T + "input_layernorm": _B + "attention_norm",
                    _T + "post_attention_layernorm": _B + "feed_forward_norm",
                    _T + "attention.dense": _B + "attention.o_proj",
                    _T + "mlp.dense_h_to_4h": _B + "feed_forward.up_proj",
                    _T + "mlp.dense_4h_to_h": _B + "feed_forward.down_proj",
                    "gpt_neox.final_layer_norm": "final_norm",
                }
            ),
            Leaf(_T + "attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
            Leaf(_T + "attention.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        )
    ),
    Leaf(_HEAD, "head.weight"),
)

_GPT_NEOX = _DECODER.architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _LEAVES,
    released="2022-04",
    token_ids={"bos_token_id": 0, "eos_token_id": 2},
    prefix="gpt_neox.",
    dropped=tuple(_T + "attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    aliases=(("lm_head.weight", _HEAD),),
    head=_HEAD,
    irrelevant={"classifier_dropout": "heads other than the language model's", "is_decoder": "it is always true"},
)
