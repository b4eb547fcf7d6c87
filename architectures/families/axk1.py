"""A.X K1 (SK Telecom 2026): DeepSeek-V3 with a norm after every mixture of experts.

In files, this norm is stored next to the mixture. In transformers' modules, it is inside the mixture. Released files
also have such a norm in dense layers, which transformers does not use.

Source: transformers models/axk1/{configuration,modeling}_axk1.py, and conversion_mapping.py.
"""

from dataclasses import replace

from ..base import Stacked
from ..config import ConfigReader
from ..decoder import Mixtures
from ..draws import ODD, among
from ..fields import with_defaults
from ..latent import COMPUTED, LATENT_LEAVES
from ..places import by_type
from ..usual import CORRECTION, ROTARY_BUFFERS, ROUTED, STACKED, B, T, mixed_leaves, shared_expert
from . import deepseek_v3

_NORM = T + "post_mlp_layernorm"
_FIELDS = with_defaults(deepseek_v3.DECODER.fields, vocab=163840, heads=64, n_routed_experts=192, context=32768)

_DECODER = replace(
    deepseek_v3.DECODER,
    fields={**_FIELDS, "q_lora_rank": _FIELDS["q_lora_rank"]._replace(read=ConfigReader.integer, draw=among(*ODD))},
    kv_heads=64,
    mixtures=Mixtures(by_type(1, "first_k_dense_replace"), normed=True),
)
_MODULES = {**ROUTED, **shared_expert("shared_experts"), _NORM: B + "feed_forward_output_norm"}
_HELD = (*STACKED, Stacked(T + "mlp.post_mlp_layernorm.weight", (_NORM + ".weight",)))

_AXK1 = _DECODER.architecture(
    "axk1",
    "AXK1ForCausalLM",
    mixed_leaves(_MODULES, LATENT_LEAVES, _HELD, choice=CORRECTION),
    released="2026-01",
    token_ids={"bos_token_id": 163691, "eos_token_id": 163691},
    config_aliases={"n_routed_experts": ("num_local_experts",)},
    dropped=(*ROTARY_BUFFERS, _NORM + ".weight"),
    stacked=_HELD,
    irrelevant={**COMPUTED, **deepseek_v3.TRAINING},
    refused=deepseek_v3.DEEPSEEK_V3.refused,
)
