"""GPT-BigCode (SantaCoder 2301.03988, StarCoder 2305.06161): GPT-2 with ordinary linear layers and multi-query
attention.

Source: transformers models/gpt_bigcode/{configuration,modeling}_gpt_bigcode.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import Leaf, leaves_of, qkv
from ..config import GPT2_ALIASES, OF_GPT2
from ..decoder import DecoderFamily
from ..fields import BIASED, Field, flag
from ..usual import GROUPED_BIAS, GROUPED_WEIGHT
from .gpt2 import FIELDS

_DECODER = DecoderFamily(
    {
        **{name: field for name, field in FIELDS.items() if name != "reorder_and_upcast_attn"},
        "activation_function": Field("activation", "gelu_pytorch_tanh"),
        "multi_query": flag("kv_heads", True, 1, None),
        "scale_attn_weights": flag("attention.scale", True, None, 1.0),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={**BIASED, "attention.fused": True},
    rotary=None,
    learned=True,
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."

_GPT_BIGCODE = _DECODER.architecture(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    (
        *leaves_of(
            {"transformer.wte": "embedding", "transformer.wpe": "positions", _T + "ln_1": _B + "attention_norm"}
        ),
        Leaf(_T + "attn.c_attn.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(_T + "attn.c_attn.bias", qkv("bias"), GROUPED_BIAS),
        *leaves_of(
            {
                _T + "attn.c_proj": _B + "attention.o_proj",
                _T + "ln_2": _B + "feed_forward_norm",
                _T + "mlp.c_fc": _B + "feed_forward.up_proj",
                _T + "mlp.c_proj": _B + "feed_forward.down_proj",
                "transformer.ln_f": "final_norm",
                "lm_head": "head",
            }
        ),
    ),
    released="2022-12",
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=(_T + "attn.bias", _T + "attn.masked_bias", "transformer.bias"),
    irrelevant={
        **OF_GPT2,
        "attention_softmax_in_fp32": "transformers ignores this field and always does it",
        "inference_runner": "not read by transformers",
        "max_batch_size": "not read by transformers",
        "max_sequence_length": "not read by transformers",
        "pad_key_length": "not read by transformers",
        "pre_allocate_kv_cache": "not read by transformers",
        "scale_attention_softmax_in_fp32": "transformers ignores this field and always does it",
        "num_key_value_heads": "transformers makes this field from multi_query",
        "validate_runner_input": "not read by transformers",
    },
)
