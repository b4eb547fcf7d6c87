"""Ministral 8B (Mistral 2024): mistral with a window in some layers.

Source: transformers models/ministral/{configuration,modeling}_ministral.py.
"""

from ..decoder import DecoderFamily
from ..fields import without
from ..lenses import sliding
from ..usual import LEAVES
from . import mistral

_DECODER = DecoderFamily(without(mistral.FIELDS, "sliding_window"), layers=sliding(0))

_MINISTRAL = _DECODER.architecture(
    "ministral", "MinistralForCausalLM", LEAVES, released="2024-10", token_ids={"bos_token_id": 1, "eos_token_id": 2}
)
