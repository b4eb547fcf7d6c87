"""GPT-BigCode (SantaCoder 2301.03988, StarCoder 2305.06161): GPT-2 with ordinary linear layers and multi-query
attention.

Source: transformers models/gpt_bigcode/{configuration,modeling}_gpt_bigcode.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import Attention, FeedForward, LayerNorm, ModelSpec
from ..base import Leaf, leaves_of, qkv
from ..config import GPT2_ALIASES, OF_GPT2, ConfigReader
from ..decoder import Decoder
from ..draws import Config, Random, Sizes, sometimes
from ..fields import BIASED, Field
from ..lenses import Lens
from ..obstacles import of_kind
from ..usual import GROUPED_BIAS, GROUPED_WEIGHT
from .gpt2 import FIELDS


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The heads of keys and values, and the factor of scores."""
    count, head_dim = values["layers"], values["head_dim"]
    heads = config.integer("n_head", 12)
    kv_heads = 1 if config.boolean("multi_query", True) else heads
    if config.raw("num_key_value_heads", kv_heads) != kv_heads:
        raise config.fail(
            "num_key_value_heads", config.raw("num_key_value_heads"), (f"{kv_heads}, which follows from multi_query")
        )
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0
    return [{"kv_heads": kv_heads, "scale": scale}] * count


def _written(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of what `layers` reads."""
    first = of_kind(spec.blocks[0].attention, Attention)
    return {"multi_query": first.kv_heads == 1, "scale_attn_weights": first.scale != 1.0 or first.head_dim == 1}


def _draw(chosen: Random, _: Sizes) -> Config:
    return sometimes(chosen, {"multi_query": False, "scale_attn_weights": False})


_DECODER = Decoder(
    {
        **{name: each for name, each in FIELDS.items() if name != "reorder_and_upcast_attn"},
        "activation_function": Field("activation", "gelu_pytorch_tanh"),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={**BIASED, "attention.fused": True},
    rotary=None,
    learned=True,
    layers=Lens(_layers, _written, _draw),
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
        "task_specific_params": "generation",
        "validate_runner_input": "not read by transformers",
    },
)
