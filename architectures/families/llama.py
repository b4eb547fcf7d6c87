"""LLaMA (Touvron et al. 2302.13971), the origin of most of today's config fields and tensor names.

Source: transformers models/llama/{configuration,modeling}_llama.py. Checkpoints are pure renames.
"""

from ..base import leaves_of
from ..decoder import USUAL, Decoder, Field

BIAS = Field("attention.qkv_bias attention.output_bias", False)

DECODER = Decoder(
    fields={**USUAL, "attention_bias": BIAS, "mlp_bias": Field("feed_forward.up_bias feed_forward.down_bias", False)},
    whole_heads=True,
)

B, T = "blocks.{layer}.", "model.layers.{layer}."

EMBEDDING = {"model.embed_tokens": "embedding"}
ATTENTION = {
    f"{T}self_attn.{name}": f"{B}attention.{name}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
FEED_FORWARD = {f"{T}mlp.{name}": f"{B}feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
NORMS = {T + "input_layernorm": B + "attention_norm", T + "post_attention_layernorm": B + "feed_forward_norm"}
ENDS = {"model.norm": "final_norm", "lm_head": "head"}

LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **NORMS, **ENDS})
LLAMA_DROPPED = (T + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

LLAMA = DECODER.architecture(
    "llama",
    "LlamaForCausalLM",
    LEAVES,
    released="2023-02",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    dropped=LLAMA_DROPPED,
)
