"""IQuest-Coder V1 (IQuest 2026): llama under a model_type of its own.

Source: transformers models/iquestcoder/configuration_iquestcoder.py. The model is LlamaForCausalLM.
"""

from ..decoder import DecoderFamily
from ..fields import with_defaults
from ..usual import LEAVES
from . import llama

_DECODER = DecoderFamily(
    with_defaults(
        llama.DECODER.fields,
        vocab=76800,
        hidden=5120,
        intermediate=27648,
        layers=80,
        heads=40,
        kv_heads=8,
        head_dim=128,
        context=131072,
        eps=1e-5,
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
        "clip_qkv": ((None,), "transformers refuses this value"),
        "use_sliding_window": ((None, False), "transformers refuses this value"),
    },
)
