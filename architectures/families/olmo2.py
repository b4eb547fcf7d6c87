"""OLMo 2 (2501.00656): llama with norms after each sub-layer instead of before, one norm over all query heads, and one
over all key heads.

Source: transformers models/olmo2/{configuration,modeling}_olmo2.py.
"""

from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, OUTPUT_NORMS, llama_fields
from ..rope import RotaryKind
from ..usual import OUTPUT_NORM_LEAVES

FIELDS = {**llama_fields(vocab=50304, eps=1e-5), "attention_bias": ATTENTION_BIAS}
FIXED = {"norm.cast": "after_weight"}

_DECODER = DecoderFamily(
    FIELDS, norms=OUTPUT_NORMS, head_norms="whole", fixed=FIXED, rotary=RotaryKind(rounding="result")
)

_OLMO2 = _DECODER.architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    OUTPUT_NORM_LEAVES,
    released="2024-11",
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
