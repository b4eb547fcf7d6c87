"""OLMo 3 (Ai2 2025): OLMo 2 with a window in three of four layers, and RoPE scaling only in the others.

Source: transformers models/olmo3/{configuration,modeling}_olmo3.py.
"""

from ..decoder import DecoderFamily
from ..fields import OUTPUT_NORMS
from ..lenses import rope_by_kind, sliding
from ..rope import RotaryKind
from ..usual import OUTPUT_NORM_LEAVES
from . import olmo2

_KINDS = {
    "full_attention": RotaryKind(5e5, rounding="result", former_base=1e4),
    "sliding_attention": RotaryKind(5e5, theta="", scaled=False, rounding="result"),
}
_DECODER = DecoderFamily(
    olmo2.FIELDS,
    norms=OUTPUT_NORMS,
    head_norms="whole",
    fixed=olmo2.FIXED,
    rotary=None,
    layers=rope_by_kind(sliding(4), _KINDS),
)

_OLMO3 = _DECODER.architecture(
    "olmo3",
    "Olmo3ForCausalLM",
    OUTPUT_NORM_LEAVES,
    released="2025-11",
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
