"""StableLM (Stability AI 2023): llama with LayerNorms, RoPE on a quarter of each head, and parallel blocks in some
models.

In StableLM 2 12B, every query and key head has its own norm, whose weight is a separate tensor.

Source: transformers models/stablelm/{configuration,modeling}_stablelm.py.
"""

from ...components import LayerNorm
from ..base import Leaf, leaves_of
from ..decoder import DecoderFamily
from ..fields import LAYER_NORM_EPS, PRE, Field, llama_fields
from ..rope import PART, RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T

_DECODER = DecoderFamily(
    {
        **llama_fields(
            LAYER_NORM_EPS, vocab=50304, hidden=2560, intermediate=6912, kv_heads=32, context=4096, eps=1e-5
        ),
        "use_qkv_bias": Field("attention.qkv_bias", False),
        "qk_layernorm": Field("head_norms", False),
        "use_parallel_residual": Field("block.parallel", False),
    },
    norm=LayerNorm,
    norms=lambda values: PRE[:1] if values["block.parallel"] else PRE,
    fixed={"block.sums": lambda values: "stream first" if values["block.parallel"] else "branches first"},
    rotary=RotaryKind(part=PART, whole=0.25, even=True),
    head_norms="apart",
    square=True,
)

_HEAD_NORMS = tuple(
    Leaf(f"{T}self_attn.{x}_layernorm.norms.{{head}}.weight", f"{B}attention.{x}_norm.{{head}}.weight") for x in "qk"
)
_LEAVES = (*leaves_of({**EMBEDDING, **ATTENTION}), *_HEAD_NORMS, *leaves_of({**FEED_FORWARD, **NORMS, **ENDS}))

_STABLELM = _DECODER.architecture(
    "stablelm", "StableLmForCausalLM", _LEAVES, released="2023-04", token_ids={"bos_token_id": 0, "eos_token_id": 0}
)
