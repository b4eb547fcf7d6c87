"""Mistral (Jiang et al. 2310.06825): llama with one sliding window in all layers.

If `sliding_window` is absent, it is 4096. If it is null, there is no window.

Source: transformers models/mistral/{configuration,modeling}_mistral.py.
"""

from ..decoder import DecoderFamily
from ..fields import WINDOW, llama_fields
from ..usual import LEAVES

FIELDS = {**llama_fields(intermediate=14336, kv_heads=8, context=131072), "sliding_window": WINDOW}
_DECODER = DecoderFamily(FIELDS)

_MISTRAL = _DECODER.architecture(
    "mistral",
    "MistralForCausalLM",
    LEAVES,
    released="2023-09",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    refused={"layer_types": ((None,), "transformers reads a mistral with layer_types as a ministral")},
)
