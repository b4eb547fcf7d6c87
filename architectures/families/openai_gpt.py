"""GPT (Radford et al. 2018): GPT-2 with post-norm (norms after the residual sums), and no final norm.

transformers has no sdpa path and no KV cache for this family. Its "gelu" is the tanh approximation.

Source: transformers models/openai/{configuration,modeling}_openai.py.
"""

from collections.abc import Mapping

from ...components import Activation, FeedForward, LayerNorm
from ..base import leaves_of, only_eager
from ..config import GPT2_ALIASES, OF_GPT2
from ..decoder import DecoderFamily
from ..fields import BIASED, SUM_NORMS, Field, choice
from .gpt2 import ATTENTION, FEED_FORWARD

_ACT_FNS: Mapping[str, Activation] = {"relu": "relu", "silu": "silu", "gelu": "gelu_new", "swish": "silu"}

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 40478),
        "n_positions": Field("context", 512),
        "n_embd": Field("hidden", 768),
        "n_layer": Field("layers", 12),
        "n_head": Field("heads", 12),
        "afn": choice("activation", "gelu", _ACT_FNS),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    norms=SUM_NORMS,
    fixed={
        **BIASED,
        "final_norm": False,
        "attention.arithmetic": "conv1d",
        "attention.fused": True,
        "attention.kernel": "eager",
        "attention.lie": "as projected",
        "attention.scaling": "divide",
        "attention.softmax": "input",
        "feed_forward.arithmetic": "conv1d",
    },
    rotary=None,
    learned=True,
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."

_OPENAI_GPT = _DECODER.architecture(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    (
        *leaves_of({"transformer.tokens_embed": "embedding", "transformer.positions_embed": "positions"}),
        *ATTENTION,
        *leaves_of({_T + "ln_1": _B + "attention_sum_norm"}),
        *FEED_FORWARD,
        *leaves_of({_T + "ln_2": _B + "feed_forward_sum_norm", "lm_head": "head"}),
    ),
    released="2018-06",
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=(_T + "attn.bias",),
    irrelevant={
        **OF_GPT2,
        "n_special": "vocab_size already includes these tokens",
        "predict_special_tokens": "not read by transformers",
    },
    **only_eager(),
)
