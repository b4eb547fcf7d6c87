"""mBART (Liu et al. 2001.08210): BART for many languages, with pre-norm and a final norm.

Source: transformers models/mbart/{configuration,modeling}_mbart.py.
"""

from ..encoder_decoder import OF_BOTH, EncoderDecoder
from ..fields import PRE
from .bart import OF_BART, leaves, stack

_STACKS = EncoderDecoder(
    stack("encoder", norms=PRE), stack("decoder", norms=PRE), first_norm=True, headless="MBartModel"
)

MBART = _STACKS.architecture(
    "mbart",
    "MBartForConditionalGeneration",
    leaves("norm", {"layernorm_embedding": "first_norm", "layer_norm": "final_norm"}),
    released="2020-01",
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    refused=OF_BOTH,
    **OF_BART,
)
