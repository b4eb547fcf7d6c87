"""GPT-J (EleutherAI 2021): GPT-2 with ordinary linear layers, parallel blocks with one LayerNorm, and a bias in the
head. RoPE on adjacent pairs in the first elements of each head replaces learned positions. The projections of attention
have no biases.

transformers computes scores in fp32, and then divides them by √head_dim. From 5.24 on, it multiplies them by the
inverse instead, and has an sdpa path too.

Source: transformers models/gptj/{configuration,modeling}_gptj.py.
"""

from ...components import Attention, FeedForward, LayerNorm, Rotary
from ..base import leaves_of, only_eager
from ..config import GPT2_ALIASES, OF_GPT2
from ..decoder import DecoderFamily
from ..fields import PRE, Field
from ..lenses import rotary_dims
from ..obstacles import Kinds
from ..releases import since

_FIELDS = {
    "vocab_size": Field("vocab", 50400),
    "n_positions": Field("context", 2048),
    "n_embd": Field("hidden", 4096),
    "n_layer": Field("layers", 28),
    "n_head": Field("heads", 16),
    "n_inner": Field("intermediate"),
    "activation_function": Field("activation", "gelu_new"),
    "layer_norm_epsilon": Field("eps", 1e-5),
    "tie_word_embeddings": Field("tied", False),
}
REWRITTEN = since("5.24")
"""Whether transformers has the newer code of GPT-J and CodeGen."""

_FIXED = {
    "block.parallel": True,
    "attention.scaling": "multiply" if REWRITTEN else "divide",
    "attention.kernel": "any" if REWRITTEN else "eager",
    "attention.scores": "float32, then scaled",
    "feed_forward.up_bias": True,
    "feed_forward.down_bias": True,
    "head.bias": True,
}
KINDS: Kinds = frozenset({LayerNorm, Attention, FeedForward, Rotary})
DECODER = DecoderFamily(
    _FIELDS, norm=LayerNorm, inner=FeedForward, norms=PRE[:1], fixed=_FIXED, rotary=None, layers=rotary_dims("input")
)

B, T = "blocks.{layer}.", "transformer.h.{layer}."

EMBEDDING = {"transformer.wte": "embedding", T + "ln_1": B + "attention_norm"}
REST = {
    T + "attn.out_proj": B + "attention.o_proj",
    T + "mlp.fc_in": B + "feed_forward.up_proj",
    T + "mlp.fc_out": B + "feed_forward.down_proj",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
}
_QKV = {f"{T}attn.{name}_proj": f"{B}attention.{name}_proj" for name in ("k", "v", "q")}

GPTJ_DROPPED = tuple(T + "attn." + name for name in ("bias", "masked_bias", "embed_positions", "causal_mask"))
GPTJ_IRRELEVANT = {
    **OF_GPT2,
    "rotary": "not read by transformers",
    "scale_attn_weights": "transformers ignores this field and always does it",
}

_GPTJ = DECODER.architecture(
    "gptj",
    "GPTJForCausalLM",
    leaves_of({**EMBEDDING, **_QKV, **REST}),
    released="2021-06",
    kinds=KINDS,
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=GPTJ_DROPPED,
    irrelevant=GPTJ_IRRELEVANT,
    bounded=True,
    **({} if REWRITTEN else only_eager()),
)
