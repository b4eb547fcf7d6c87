"""InternLM 3 (Shanghai AI Laboratory 2025): llama with other field names, and one config field for all biases.

Source: transformers models/internlm3/configuration_internlm3.py. The model is LlamaForCausalLM.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, llama_fields
from ..usual import LEAVES

_DECODER = DecoderFamily(
    {
        **llama_fields(vocab=128512, intermediate=10240, layers=48, kv_heads=2, head_dim=128, context=32768, eps=1e-5),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
    },
    whole_heads=True,
    together=("attention_bias", "mlp_bias"),
)

_INTERNLM3 = _DECODER.architecture(
    "internlm3",
    "LlamaForCausalLM",
    LEAVES,
    released="2025-01",
    hf_config="InternLM3Config",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    config_aliases={"attention_bias": ("qkv_bias",), "mlp_bias": ("bias",)},
)
