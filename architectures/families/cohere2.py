"""Command R7B and Command A (Cohere 2024, 2504.00698): Command R with a sliding window in three of four layers, and no
position encoding in the fourth.

Source: transformers models/cohere2/{configuration,modeling}_cohere2.py.
"""

from ...components import LayerNorm
from ..base import leaves_of
from ..decoder import DecoderFamily
from ..fields import PRE
from ..lenses import rope_in_windows, sliding
from ..usual import EMBEDDING, ENDS, FEED_FORWARD, B, T
from . import cohere

DECODER = DecoderFamily(
    {name: field for name, field in cohere.DECODER.fields.items() if name != "use_qk_norm"},
    norm=LayerNorm,
    norms=PRE[:1],
    fixed=cohere.FIXED,
    rotary=cohere.ROTARY._replace(base=1e4),
    layers=rope_in_windows(sliding(4, pattern="sliding_window_pattern")),
)
LEAVES = leaves_of(
    {**EMBEDDING, **cohere.ATTENTION, **FEED_FORWARD, T + "input_layernorm": B + "attention_norm", **ENDS}
)

_COHERE2 = DECODER.architecture(
    "cohere2",
    "Cohere2ForCausalLM",
    LEAVES,
    restated=lambda _: {"rotary_pct": 1.0},  # llama.cpp, conversion/command_r.py
    irrelevant={"rotary_pct": "not read by transformers"},
    released="2024-12",
    token_ids={"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
)
