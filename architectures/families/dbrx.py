"""DBRX (Databricks 2024): mixtral with LayerNorms without bias, and with clipped queries, keys and values.

One tensor contains q, k and v. Three more contain the gate, up and down projections of all experts. transformers fails
without `clip_qkv`, and without a `rope_theta` in `attn_config`, although RoPE uses the `rope_theta` outside of it.

Source: transformers models/dbrx/{configuration,modeling}_dbrx.py.
"""

from ...components import LayerNorm
from ..base import Leaf, leaves_of, qkv
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import among
from ..fields import Field, choice, constant
from ..layout import Layout

_B, _T = "blocks.{layer}.", "transformer.blocks.{layer}."
_EXPERT = _B + "feed_forward.experts.{expert}."


_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 32000),
        "d_model": Field("hidden", 2048),
        "n_layers": Field("layers", 24),
        "n_heads": Field("heads", 16),
        "max_seq_len": Field("context", 2048),
        "tie_word_embeddings": constant("tied", False, "transformers refuses true"),
        "attn_config.kv_n_heads": Field("kv_heads", 1),
        "attn_config.clip_qkv": Field("attention.clip", None, ConfigReader.number, draw=among(0.5, 8)),
        "attn_config.rope_theta": Field("position.base", 10_000.0, ConfigReader.raw, draw=among(10_000.0)),
        "ffn_config.ffn_hidden_size": Field("intermediate", 3584),
        "ffn_config.ffn_act_fn.name": Field("activation", "silu"),
        "ffn_config.moe_num_experts": Field("mixture.experts", 4),
        "ffn_config.moe_top_k": Field("mixture.top_k", 1),
        # transformers divides the weights of the chosen experts by their p-norm, and gptkit supports only p = 1.
        "ffn_config.moe_normalize_expert_weights": choice("mixture.normalise", 1.0, {1.0: True, None: False}),
    },
    norm=LayerNorm,
    fixed={
        "eps": 1e-5,
        "norm.bias": False,
        "attention.fused": True,
        "attention.fused_rows": "by part",
        "mixture.scored_in": "input",
        "mixture.summed": "by expert",
        "mixture.total": "norm",
    },
    mixtures=Mixtures(expert={"down_turned": True}),
    # The width of an expert is a multiple of 16, so that every expert's part of a tensor begins at a cache line. The
    # order of additions in a matrix product depends on where the matrix begins in a cache line. With other widths,
    # transformers' own model would compute other logits after saving and loading.
    sized=lambda chosen, _: {"intermediate": chosen.choice((16, 48, 64))},
)


_ROWS = Layout("(rows head_dim) hidden", split="rows", parts=("heads", "kv_heads", "kv_heads"))
_STACKED = Layout("(experts intermediate) hidden", stack="experts")
_LEAVES = (
    *leaves_of({"transformer.wte": "embedding", _T + "norm_attn_norm.norm_1": _B + "attention_norm"}),
    Leaf(_T + "norm_attn_norm.attn.Wqkv.weight", qkv("weight"), _ROWS),
    *leaves_of(
        {
            _T + "norm_attn_norm.attn.out_proj": _B + "attention.o_proj",
            _T + "norm_attn_norm.norm_2": _B + "feed_forward_norm",
            _T + "ffn.router.layer": _B + "feed_forward.router",
        }
    ),
    Leaf(_T + "ffn.experts.mlp.w1", _EXPERT + "gate_proj.weight", _STACKED),
    Leaf(_T + "ffn.experts.mlp.v1", _EXPERT + "up_proj.weight", _STACKED),
    Leaf(
        _T + "ffn.experts.mlp.w2",
        _EXPERT + "down_proj.weight",
        Layout("(experts intermediate) hidden", "hidden intermediate", stack="experts"),
    ),
    *leaves_of({"transformer.norm_f": "final_norm", "lm_head": "head"}),
)

_DBRX = _DECODER.architecture(
    "dbrx",
    "DbrxForCausalLM",
    _LEAVES,
    released="2024-03",
    config_aliases={
        "d_model": ("hidden_size",),
        "n_layers": ("num_hidden_layers",),
        "n_heads": ("num_attention_heads",),
        "max_seq_len": ("max_position_embeddings",),
    },
    foreign_fields=("hidden_size",),
    prefix="transformer.",
    stated={"attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0}},
    irrelevant={
        "moe_jitter_eps": "training only",
        "moe_loss_weight": "training only",
        "num_key_value_heads": "transformers' copy of a field of attn_config",
        "ffn_config.hidden_size": "transformers writes this field, but does not read it",
    },
    refused={"head_dim": ((None,), "transformers supports only hidden_size / number of heads as the head dimension")},
)
