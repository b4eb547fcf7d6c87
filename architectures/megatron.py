"""Megatron-LM's tensor names, and the families that compute the same as its GPT model.

Older names, and those of Transformer Engine's fused layers, are mapped to the names of megatron.core's own layers.
gptkit reads the arguments that decide what a model computes. It refuses values that it does not support, and the
message names the argument.

Source: Megatron-LM, tools/checkpoint (schema_core.py, loader_base.py, saver_llama2_hf.py) and
megatron/training/arguments.py; transformers models/megatron_gpt2 (the activation by its arguments).
"""

import re
from collections.abc import Mapping
from typing import Any

from ..components import Block
from ..errors import ConfigError, shown
from .base import Leaf, leaves_of, qkv
from .layout import Layout
from .usual import GROUPED_BIAS, GROUPED_WEIGHT

_B, _L = "blocks.{layer}.", "decoder.layers.{layer}."
_GATE_UP = Layout("(part intermediate) hidden", split="part", parts=("1", "1"))
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def _gated(block: Block) -> bool:
    return "gate_proj.weight" in block.feed_forward.weights()


LEAVES = (
    *leaves_of(
        {
            "embedding.word_embeddings": "embedding",
            "embedding.position_embeddings": "positions",
            _L + "input_layernorm": _B + "attention_norm",
            _L + "self_attention.q_layernorm": _B + "attention.q_norm",
            _L + "self_attention.k_layernorm": _B + "attention.k_norm",
            _L + "self_attention.linear_proj": _B + "attention.o_proj",
            _L + "pre_mlp_layernorm": _B + "feed_forward_norm",
            _L + "mlp.linear_fc2": _B + "feed_forward.down_proj",
            "decoder.final_layernorm": "final_norm",
            "output_layer": "head",
        }
    ),
    Leaf(_L + "self_attention.linear_qkv.weight", qkv("weight"), GROUPED_WEIGHT),
    Leaf(_L + "self_attention.linear_qkv.bias", qkv("bias"), GROUPED_BIAS),
    *leaves_of({_L + "mlp.linear_fc1": _B + "feed_forward.up_proj"}, lambda block: not _gated(block)),
    Leaf(
        _L + "mlp.linear_fc1.weight",
        (_B + "feed_forward.gate_proj.weight", _B + "feed_forward.up_proj.weight"),
        _GATE_UP,
        _gated,
    ),
)

_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^word_embeddings(_for_head)?\.", "output_layer."),
        (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.linear_qkv\.layer_norm_(weight|bias)$", r".linear_qkv.layer_norm.\1"),
        (r"\.self_attention\.linear_qkv\.layer_norm\.", ".input_layernorm."),
        (r"\.linear_fc1\.layer_norm_(weight|bias)$", r".linear_fc1.layer_norm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm\.", ".pre_mlp_layernorm."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.(post_attention_layernorm|post_attention_norm)\.", ".pre_mlp_layernorm."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    )
)
_DROPPED = re.compile(r"(_extra_state\d*|rotary_pos_emb\.inv_freq|attention\.(masked_)?bias)$")
_BY_ROWS = ("embedding.word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
"""The modules whose weights and biases tensor parallelism splits by rows over the ranks."""


def named(name: str) -> str | None:
    """Return the name in `LEAVES` of a Megatron tensor, or None if the tensor is not a weight.

    The layer numbers in a name start at 0 in every pipeline stage.
    """
    if _DROPPED.search(name):
        return None
    for pattern, ours in _RENAMED:
        name = pattern.sub(ours, name)
    return name


def split_dimension(name: str) -> int | None:
    """Return the dimension along which tensor parallelism splits a tensor, or None if it does not split it."""
    module, _, kind = name.rpartition(".")
    if module.endswith(_BY_ROWS):
        return 0
    return 1 if kind == "weight" and module.endswith(("linear_proj", "linear_fc2")) else None


_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_layernorm_1p": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "attention_output_gate": (False, None),
    "expert_model_parallel_size": (1, None),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0, 0.0, None),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False, None),
    "no_rope_freq": (None,),
    "num_experts": (None, 0),
    "quick_geglu": (False, None),
    "rotary_interleaved": (False, None),
    "rotary_scaling_factor": (None, 1, 1.0),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    "squared_relu": (False, None),
    "window_size": (None,),
}
"""Arguments of a training run that change what the model computes -> the values that gptkit supports."""


def _size(given: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    """Return the value of an argument that must be a positive integer. `usual` is its default.

    Raises ConfigError for other values. `given` are all arguments of the checkpoint.
    """
    value = given.get(name)
    value = usual if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise ConfigError(
            f"the Megatron checkpoint has the argument {name}={shown(value, 40)}, expected a positive integer"
        )
    return value


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE fields of a config.json. `given` are the arguments of the checkpoint."""
    fields: dict[str, Any] = {"rope_theta": float(_size(given, "rotary_base", 10000))}
    if given.get("use_rope_scaling"):
        low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        fields["rope_scaling"] = {"rope_type": "llama3", "factor": given.get("rope_scaling_factor", 8.0), **low_high}
    return fields


def config_of(given: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a config.json for a Megatron checkpoint, of a family that computes the same as Megatron's model.

    Args:
        given: the arguments with which the checkpoint was trained.
        rows: the number of rows of the embedding, which may be padded.

    Raises:
        ConfigError: a size is not a positive integer, or no family in gptkit computes what the arguments describe.
    """
    for name, allowed in _FIXED.items():
        if given.get(name) not in allowed:
            raise ConfigError(
                f"the Megatron checkpoint has the argument {name}={shown(given[name], 40)}, which gptkit "
                "does not support"
            )
    hidden, heads = _size(given, "hidden_size"), _size(given, "num_attention_heads")
    width = _size(given, "kv_channels", hidden // heads)
    eps = given.get("norm_epsilon", given.get("layernorm_epsilon", 1e-5))
    groups = _size(given, "num_query_groups", heads) if given.get("group_query_attention") else heads
    rope = given.get("position_embedding_type") == "rope" or given.get("use_rotary_position_embeddings") is True
    gated, biases = bool(given.get("swiglu")), bool(given.get("add_bias_linear", True))
    kind = given.get("normalization", "LayerNorm"), rope, gated, biases
    qkv_bias, qk_norm = bool(given.get("add_qkv_bias")), bool(given.get("qk_layernorm"))
    tied = not given.get("untie_embeddings_and_output_weights")
    config: dict[str, Any] = {"vocab_size": rows, "tie_word_embeddings": tied}
    context = _size(given, "max_position_embeddings", given.get("seq_length"))
    inner, rotary_percent = _size(given, "ffn_hidden_size", 4 * hidden), given.get("rotary_percent", 1.0)
    base = _rope(given)
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": _size(given, "num_layers"), "num_attention_heads": heads,
        "intermediate_size": inner, "max_position_embeddings": context,
    }  # fmt: skip
    if kind == ("RMSNorm", True, True, False) and not (qkv_bias and qk_norm) and rotary_percent == 1:
        family = "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
        if family == "qwen2" and width * heads != hidden:
            raise ConfigError(
                f"the Megatron checkpoint has the argument kv_channels={width}, for which the config of {family} has "
                "no field"
            )
        config |= {**sizes, **base, "num_key_value_heads": groups, "rms_norm_eps": eps}
        return {"model_type": family, **config, **({} if family == "qwen2" else {"head_dim": width})}
    plain = not qk_norm and groups == heads and width * heads == hidden
    if kind == ("LayerNorm", False, False, True) and plain and given.get("position_embedding_type") != "none":
        names = {"n_embd": hidden, "n_layer": sizes["num_hidden_layers"], "n_head": heads, "n_inner": inner}
        config |= {**names, "n_positions": context, "activation_function": _gelu(given), "layer_norm_epsilon": eps}
        return {"model_type": "gpt2", **config}
    if kind == ("LayerNorm", True, False, True) and plain:
        if "rope_scaling" in base:
            raise ConfigError(
                "the Megatron checkpoint has the argument use_rope_scaling, which gptkit does not support for gpt_neox"
            )
        rotary = {"rope_type": "default", "rope_theta": base["rope_theta"], "partial_rotary_factor": rotary_percent}
        config |= {**sizes, "rope_parameters": rotary, "layer_norm_eps": eps}
        return {"model_type": "gpt_neox", **config, "use_parallel_residual": False, "hidden_act": _gelu(given)}
    listed = ("normalization", "position_embedding_type", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm")
    words = ", ".join(f"{name}={shown(given.get(name), 20)}" for name in listed)
    raise ConfigError(f"gptkit does not support the model that the Megatron checkpoint's arguments describe ({words})")


def _gelu(given: Mapping[str, Any]) -> str:
    """Return the activation that Megatron uses for GELU. By default it is the tanh formula of Megatron's fused kernel.

    `given` are the arguments of the checkpoint.
    """
    if given.get("openai_gelu"):
        return "gelu_new"
    return "gelu_fast" if given.get("bias_gelu_fusion", True) else "gelu"
