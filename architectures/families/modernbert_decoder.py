"""The decoders of Ettin (Weller et al. 2507.11412): ModernBERT with causal attention, and with separate tensors for
queries, keys and values.

Source: transformers models/modernbert_decoder/{configuration,modeling}_modernbert_decoder.py.
"""

from ...components import LayerNorm
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..lenses import halved, rope_by_kind
from ..usual import B, T
from . import modernbert

_DECODER = DecoderFamily(
    modernbert.FIELDS,
    norm=LayerNorm,
    fixed={"feed_forward.fused": True},
    rotary=None,
    embedding_norm=True,
    first_bare=True,
    layers=rope_by_kind(halved(causal=True), modernbert.KINDS),
    square=True,
)

MODERNBERT_DECODER = _DECODER.architecture(
    "modernbert-decoder",
    "ModernBertDecoderForCausalLM",
    (
        *leaves_of(
            {
                **modernbert.EMBEDDING,
                **{f"{T}attn.{name}_proj": f"{B}attention.{name}_proj" for name in ("q", "k", "v")},
                T + "attn.Wo": B + "attention.o_proj",
            }
        ),
        *modernbert.FEED_FORWARD,
        *leaves_of({"lm_head.dense": "head.transform.dense", "lm_head.norm": "head.transform.norm", "decoder": "head"}),
    ),
    released="2025-07",
    head="decoder.weight",
    token_ids={"bos_token_id": 50281, "eos_token_id": 50282, "pad_token_id": 50283},
    carried={"tasks": ("head.", "classifier.")},
    irrelevant=modernbert.IRRELEVANT,
)
