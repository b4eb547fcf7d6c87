"""GPT-NeoX Japanese (ABEJA 2022): GPT-NeoX with serial blocks and without biases, except one after the attention of the
last layer.

transformers has no sdpa path for this family.

Source: transformers models/gpt_neox_japanese/{configuration,modeling}_gpt_neox_japanese.py.
"""

from ...components import FeedForward, LayerNorm
from ..base import Leaf, leaves_of, only_eager, qkv
from ..decoder import DecoderFamily
from ..fields import Field, times_hidden
from ..lenses import Lens
from ..rope import RotaryKind
from ..usual import GROUPED_WEIGHT

_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 32000),
        "hidden_size": Field("hidden", 2560),
        "num_hidden_layers": Field("layers", 32),
        "num_attention_heads": Field("heads", 32),
        "head_dim": Field("head_dim"),
        "intermediate_multiple_size": times_hidden(
            "intermediate", 4, "feed_forward.intermediate_size", "hidden_size", 2560, most=4096
        ),
        "hidden_act": Field("activation", "gelu"),
        "max_position_embeddings": Field("context", 2048),
        "layer_norm_eps": Field("eps", 1e-5),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        "attention.arithmetic": "matmul_add",
        "attention.fused": True,
        "attention.kernel": "eager",
        "attention.scores": "product",
        "attention.softmax": "input",
    },
    rotary=RotaryKind(theta="rotary_emb_base", part="rotary_pct", even=True),
    square=True,
    # Attention has an output bias in the last layer only.
    layers=Lens(lambda _, values: [{"output_bias": n == values["layers"] - 1} for n in range(values["layers"])]),
)

_B, _T = "blocks.{layer}.", "gpt_neox_japanese.layers.{layer}."

_GPT_NEOX_JAPANESE = _DECODER.architecture(
    "gpt_neox_japanese",
    "GPTNeoXJapaneseForCausalLM",
    (
        *leaves_of(
            {
                "gpt_neox_japanese.embed_in": "embedding",
                _T + "input_layernorm": _B + "attention_norm",
                _T + "post_attention_layernorm": _B + "feed_forward_norm",
            }
        ),
        Leaf(_T + "attention.dense_bias", _B + "attention.o_proj.bias"),
        Leaf(_T + "attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(_T + "attention.dense.weight", _B + "attention.o_proj.weight"),
        *leaves_of(
            {
                _T + "mlp.dense_h_to_4h": _B + "feed_forward.up_proj",
                _T + "mlp.dense_4h_to_h": _B + "feed_forward.down_proj",
                "gpt_neox_japanese.final_layer_norm": "final_norm",
                "embed_out": "head",
            }
        ),
    ),
    released="2022-09",
    token_ids={"bos_token_id": 31996, "eos_token_id": 31999},
    prefix="gpt_neox_japanese.",
    head="embed_out.weight",
    dropped=tuple(_T + "attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    irrelevant={"is_decoder": "it is always true", "use_parallel_residual": "not read by transformers"},
    **only_eager(),
)
