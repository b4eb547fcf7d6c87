"""OLMo 2 (2501.00656): llama with norms after each sub-layer instead of before, one norm over all query heads, and one
over all key heads.

Source: transformers models/olmo2/{configuration,modeling}_olmo2.py.
"""

from ..base import leaves_of
from ..decoder import Decoder
from ..fields import OUTPUT_NORMS, with_defaults
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, B, T
from . import olmo

FIELDS = {**with_defaults(olmo.FIELDS, rms_norm_eps=1e-5)}
_NORMS = {
    T + "post_attention_layernorm": B + "attention_output_norm",
    T + "post_feedforward_layernorm": B + "feed_forward_output_norm",
}
LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_NORMS, **ENDS})
FIXED = {"norm.cast": "after_weight"}

_DECODER = Decoder(FIELDS, norms=OUTPUT_NORMS, head_norms="whole", fixed=FIXED, rotary=RotaryKind(rounding="result"))

_OLMO2 = _DECODER.architecture(
    "olmo2", "Olmo2ForCausalLM", LEAVES, released="2024-11", token_ids={"eos_token_id": 50279, "pad_token_id": 1}
)
