"""StarCoder 2 (2402.19173): llama's attention with LayerNorms, biases everywhere and a plain feed-forward.

Source: transformers models/starcoder2/{configuration,modeling}_starcoder2.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..fields import Field
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 49152),
        "hidden_size": Field("hidden", 3072),
        "intermediate_size": Field("intermediate", 12288),
        "num_hidden_layers": Field("layers", 30),
        "num_attention_heads": Field("heads", 24),
        "num_key_value_heads": Field("kv_heads", 2),
        "head_dim": Field("head_dim"),
        "hidden_act": Field("activation", "gelu_pytorch_tanh"),
        "max_position_embeddings": Field("context", 4096),
        "norm_epsilon": Field("eps", 1e-5),
        "sliding_window": Field("attention.window", None, ConfigReader.optional_integer),
        "use_bias": Field("attention.qkv_bias attention.output_bias feed_forward.up_bias feed_forward.down_bias", True),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
)
_FEED_FORWARD = {T + "mlp.c_fc": B + "feed_forward.up_proj", T + "mlp.c_proj": B + "feed_forward.down_proj"}
_LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **_FEED_FORWARD, **NORMS, **ENDS})

_STARCODER2 = _DECODER.architecture(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _LEAVES,
    released="2024-02",
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
)
