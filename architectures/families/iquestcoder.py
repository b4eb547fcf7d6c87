"""IQuest-Coder V1 (IQuest 2026): llama under a model_type of its own.

Source: transformers models/iquestcoder/configuration_iquestcoder.py; the model is its LlamaForCausalLM.
"""

from ..decoder import Decoder
from ..fields import with_defaults
from ..usual import LEAVES
from . import llama

_DECODER = Decoder(
    with_defaults(
        llama.DECODER.fields,
        vocab_size=76800,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=80,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    whole_heads=True,
)

_IQUESTCODER = _DECODER.architecture(
    "iquestcoder",
    "LlamaForCausalLM",
    LEAVES,
    released="2026-01",
    hf_config="IQuestCoderConfig",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    refused={
        "clip_qkv": ((None,), "transformers refuses it"),
        "use_sliding_window": ((None, False), "transformers refuses it"),
    },
)
