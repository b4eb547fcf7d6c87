"""Aria's language model (Rhymes AI, 2410.05993): llama with a mixture and shared experts in every layer.

One tensor contains all experts, stored as [in, out]. Conversions keep the tensors of a vision tower.

Source: transformers models/aria/{configuration,modeling}_aria.py.
"""

from ..base import Leaf, Stacked, by_name, leaves_of
from ..decoder import DecoderFamily, Mixtures
from ..fields import ATTENTION_BIAS, Field, choice, llama_fields
from ..layout import Layout
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T, shared_expert
from .gpt_oss import BOTH, EXPERT, MLP

_SILU = {"silu": "silu", "swish": "silu"}
"""The activations that gptkit supports. transformers always uses SiLU in routed experts, and reads the config's
activation only for shared experts."""

_DECODER = DecoderFamily(
    {
        **llama_fields(intermediate=4096),
        "hidden_act": choice("activation", "silu", _SILU),
        "attention_bias": ATTENTION_BIAS,
        "moe_num_experts": Field("mixture.experts", 8),
        "moe_topk": Field("mixture.top_k", 2),
        "moe_num_shared_experts": Field("shared_experts", 2),
    },
    fixed={"mixture.chosen_by": "logits", "mixture.scored_in": "input"},
    mixtures=Mixtures(expert={"fused": True, "arithmetic": "conv1d"}),
    whole_heads=True,
)

_HELD = (Stacked(MLP + "gate_up_proj", (MLP + "fc1.weight",)), Stacked(MLP + "down_proj", (MLP + "fc2.weight",)))
_LEAVES = by_name(
    (
        *leaves_of({**EMBEDDING, **ATTENTION, T + "mlp.router": B + "feed_forward.router"}),
        Leaf(
            MLP + "fc1.weight",
            BOTH["weight"],
            Layout(
                "experts hidden (part intermediate)",
                "(part intermediate) hidden",
                split="part",
                parts=("1", "1"),
                stack="experts",
            ),
        ),
        Leaf(
            MLP + "fc2.weight",
            EXPERT + "down_proj.weight",
            Layout("experts intermediate hidden", "hidden intermediate", stack="experts"),
        ),
        *leaves_of({**shared_expert("shared_experts"), **NORMS, **ENDS}),
    ),
    _HELD,
)

ARIA_TEXT = _DECODER.architecture(
    "aria_text",
    "AriaTextForCausalLM",
    _LEAVES,
    released="2024-10",
    model_types=("aria_text", "aria"),
    token_ids={"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    part="text_config",
    renamed=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    carried={
        "vision": ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    },
    stacked=_HELD,
    irrelevant=dict.fromkeys(
        (
            *("vision_config", "projector_patch_to_query_dict", "max_value_projector_patch_to_query_dict"),
            *("patch_size", "image_token_id", "image_token_index"),
        ),
        "about images, which the language model does not read",
    ),
    refused={"mlp_bias": ((False,), "gptkit does not support biases that only the shared experts have")},
)
