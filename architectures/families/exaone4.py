"""EXAONE 4 (LG 2025, 2507.11407): llama with norms after each sub-layer and on query and key heads. If some layers have
a sliding window, the layers without one have no position encoding.

Source: transformers models/exaone4/{configuration,modeling}_exaone4.py.
"""

from ..decoder import DecoderFamily
from ..fields import OUTPUT_NORMS, llama_fields
from ..lenses import rope_in_windows, sliding
from ..usual import OUTPUT_NORM_LEAVES

# In a config with layer_types, the pattern may be a string ("LLLG"), which transformers ignores.
EXAONE_WINDOWS = rope_in_windows(sliding(4, pattern="sliding_window_pattern", strings=True), unset=True)

_DECODER = DecoderFamily(
    llama_fields(vocab=102400, intermediate=16384, kv_heads=32, eps=1e-5),
    norms=OUTPUT_NORMS,
    head_norms="same",
    layers=EXAONE_WINDOWS,
)

_EXAONE4 = _DECODER.architecture(
    "exaone4",
    "Exaone4ForCausalLM",
    OUTPUT_NORM_LEAVES,
    released="2025-07",
    token_ids={"bos_token_id": 0, "eos_token_id": 2},
)
