"""InternLM 3 (Shanghai AI Laboratory 2025): llama with other field names, and one switch for all biases.

Source: transformers models/internlm3/configuration_internlm3.py; its model is LlamaForCausalLM.
"""

from ...components import Attention, ModelSpec
from ...errors import CannotExpress
from ..decoder import DecoderFamily
from ..draws import Config, Random
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..obstacles import of_kind
from ..usual import LEAVES


def _written(spec: ModelSpec) -> dict[str, bool]:
    """Nothing more, of a tree that transformers reads.

    Raises:
        CannotExpress: there are biases in attention alone, or in the feed-forward alone.
    """
    if of_kind(spec.blocks[0].attention, Attention).qkv_bias != getattr(spec.blocks[0].feed_forward, "up_bias", False):
        raise CannotExpress("transformers needs biases in both attention and feed-forward, or in neither")
    return {}


_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128512, intermediate=10240, layers=48, kv_heads=2, head_dim=128, context=32768, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    whole_heads=True,
    written=_written,
)


def _draw(chosen: Random) -> Config:
    return {**_DECODER.draw(chosen, {}), **dict.fromkeys(("attention_bias", "mlp_bias"), chosen.choice((True, False)))}


_INTERNLM3 = _DECODER.architecture(
    "internlm3",
    "LlamaForCausalLM",
    LEAVES,
    released="2025-01",
    hf_config="InternLM3Config",
    draw=_draw,
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    config_aliases={"attention_bias": ("qkv_bias",), "mlp_bias": ("bias",)},
)
