"""Qwen3.5 (Qwen 2026), its text model: Qwen3-Next with dense feed-forwards, and with the recurrence's projections in
separate tensors.

Conversions keep the tensors of a vision tower, and those of `mtp.`, which draft tokens. If all tokens are text, the
three kinds of positions in `mrope_section` are equal.

Source: transformers models/qwen3_5/{configuration,modeling}_qwen3_5.py.
"""

from typing import Any

from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import llama_fields
from ..recurrences import DELTA, DELTA_REST, GATED, GATED_BIAS, PARTLY, QUERIES_AND_GATE, SPLIT_PROJECTIONS, delta_nets
from ..usual import EMBEDDING, ROTARY_BUFFERS

FIELDS = {
    **llama_fields(vocab=248320, intermediate=12288, heads=16, kv_heads=4, head_dim=256, context=32768),
    "attention_bias": GATED_BIAS,
}
_DECODER = DecoderFamily(FIELDS, head_norms="same", fixed=GATED, rotary=PARTLY, recurrent=delta_nets("by part"))

COMPOSITE: dict[str, Any] = {
    "part": "text_config",
    "renamed": (("model.language_model.", "model."),),
    "carried": {"mtp": ("mtp.",), "vision": ("model.visual.", "visual.")},
    "dropped": ROTARY_BUFFERS,
}
UNREAD = {
    **dict.fromkeys(
        ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        "about images, which the language model does not read",
    ),
    **dict.fromkeys(("mrope_section", "mrope_interleaved"), "numbers position axes, which are all equal in text"),
    **dict.fromkeys(
        ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        "extra layers after the last one that draft tokens (multi-token prediction)",
    ),
    "attn_output_gate": "not read by transformers: there always is one",
    "mamba_ssm_dtype": "not read by transformers: states are in fp32",
}

_QWEN3_5 = _DECODER.architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (*leaves_of(EMBEDDING), *DELTA, *SPLIT_PROJECTIONS, *QUERIES_AND_GATE, *DELTA_REST),
    released="2026-02",
    model_types=("qwen3_5_text", "qwen3_5"),
    hf_config="Qwen3_5TextConfig",
    irrelevant=UNREAD,
    **COMPOSITE,
)
