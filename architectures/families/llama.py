"""LLaMA (Touvron et al. 2302.13971), the origin of most of today's config fields and tensor names.

Checkpoint tensors have the same layouts as gptkit's own tensors, under other names.

Source: transformers models/llama/{configuration,modeling}_llama.py.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, MLP_BIAS, USUAL
from ..usual import LEAVES

DECODER = DecoderFamily(fields={**USUAL, "attention_bias": ATTENTION_BIAS, "mlp_bias": MLP_BIAS}, whole_heads=True)

LLAMA = DECODER.architecture(
    "llama", "LlamaForCausalLM", LEAVES, released="2023-02", token_ids={"bos_token_id": 1, "eos_token_id": 2}
)
