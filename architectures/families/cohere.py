"""Command R (Cohere 2024): llama with parallel blocks with one LayerNorm without bias, RoPE on adjacent pairs, and
scaled logits.

Source: transformers models/cohere/{configuration,modeling}_cohere.py.
"""

from ...components import LayerNorm
from ..base import Leaf, leaves_of
from ..decoder import DecoderFamily
from ..fields import ATTENTION_BIAS, PRE, Field, llama_fields
from ..layout import Layout
from ..rope import RotaryKind
from ..usual import EMBEDDING, ENDS, FEED_FORWARD, B, T

_FIELDS = llama_fields(vocab=256000, hidden=8192, intermediate=22528, layers=40, heads=64, context=8192, tied=True)
FIXED = {"norm.bias": False, "norm.cast": "float32", "block.parallel": True, "block.sums": "stream first"}
ROTARY = RotaryKind(500_000.0, pairs="adjacent", rounding="tables", former_base=10_000.0)

DECODER = DecoderFamily(
    {
        **{name: field for name, field in _FIELDS.items() if name != "rms_norm_eps"},
        "layer_norm_eps": Field("eps", 1e-5),
        "attention_bias": ATTENTION_BIAS,
        "logit_scale": Field("head.multiplier", 0.0625),
        "use_qk_norm": Field("head_norms", False),
    },
    norm=LayerNorm,
    norms=PRE[:1],
    head_norms="own",
    fixed=FIXED,
    rotary=ROTARY,
)

ATTENTION = {f"{T}self_attn.{name}_proj": f"{B}attention.{name}_proj" for name in ("q", "k", "v", "o")}
_LEAVES = (
    *leaves_of({**EMBEDDING, **ATTENTION}),
    Leaf(T + "self_attn.q_norm.weight", B + "attention.q_norm.weight", Layout("heads head_dim", "(heads head_dim)")),
    Leaf(
        T + "self_attn.k_norm.weight", B + "attention.k_norm.weight", Layout("kv_heads head_dim", "(kv_heads head_dim)")
    ),
    *leaves_of({**FEED_FORWARD, T + "input_layernorm": B + "attention_norm", **ENDS}),
)

_COHERE = DECODER.architecture(
    "cohere",
    "CohereForCausalLM",
    _LEAVES,
    released="2024-03",
    token_ids={"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
)
