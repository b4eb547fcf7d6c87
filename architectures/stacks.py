"""Checkpoints of other training programs: the tensor names and config files of litgpt, Meta, torchtitan and nanochat.

A *stack* is such a program. It has a tensor table of its own, with gptkit's parameter names. gptkit recognises the
checkpoints of a program by a tensor name that no other program uses. From the program's config file, gptkit makes the
config.json of a family. It refuses a field that it does not read unless the field has its default, and the message
names the field.

Sources: litgpt 0.5.13 (config.py, model.py, scripts/convert_lit_checkpoint.py); llama2.c (train.py, model.py);
mistral-inference (args.py, transformer.py); torchtitan (models/llama3/state_dict_adapter.py). Meta's names are those of
`llama2c`. Its params.json, and nanochat's names and meta file, are taken from descriptions by others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..components import Block
from ..errors import ConfigError, shown
from . import llama2c
from .base import Leaf, leaves_of, qkv
from .fields import meta_width
from .layout import Layout
from .usual import GROUPED_BIAS, GROUPED_WEIGHT

_Contents = Mapping[str, Any]


@dataclass(frozen=True)
class Stack:
    """A training program ("stack"), whose checkpoints gptkit reads: its tensor names and its config file."""

    name: str
    sign: str
    """The end of a tensor name by which gptkit recognises the program. All checkpoints of the program have such a
    tensor, and other checkpoints have none."""
    leaves: tuple[Leaf, ...]
    embedding: str
    """The name of the embedding in checkpoints."""
    head: str
    """The name of the head in checkpoints."""
    file: str
    """The name of the program's config file. It may have the wildcard "*"."""
    config: Callable[[_Contents, int | None], dict[str, Any]]
    """`config(contents, rows)` returns a family's config.json for the contents of the program's config file. `rows` is
    the number of rows of the embedding, or None if it is not known."""
    dropped: tuple[str, ...] = ()
    """The ends of the names of buffers. gptkit ignores tensors with such names."""


class _Fields(dict[str, Any]):
    """The fields of a program's config file, including defaults. The object remembers which fields were read."""

    def __init__(self, file: str, contents: _Contents, defaults: _Contents, irrelevant: tuple[str, ...] = ()) -> None:
        super().__init__({**defaults, **contents})
        self._file, self._defaults, self._read = file, defaults, set(irrelevant)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self:
            raise ConfigError(f"{self._file} has no {name}")
        return super().__getitem__(name)

    def size(self, name: str) -> int:
        """Return the value of a field that must be a positive integer below 2^31."""
        value = self[name]
        if type(value) is not int or not 0 < value < 2**31:
            raise self.fail(name)
        return value

    def fail(self, name: str) -> ConfigError:
        """Return the error for an unsupported value of a field. The caller raises it."""
        return ConfigError(f"{self._file}: {name}={shown(self.get(name))} is not supported")

    def matches(self, asked: _Contents) -> bool:
        """Return whether the config file has the values in `asked`. If so, these fields count as read."""
        fits = all(self.get(name) == value for name, value in asked.items())
        self._read.update(asked if fits else ())
        return fits

    def refuse_others(self) -> None:
        """Raise ConfigError if a field that was not read has another value than its default."""
        for name in sorted(set(self) - self._read):
            if name not in self._defaults or self.get(name) != self._defaults[name]:
                raise self.fail(name)


# --- litgpt ---

_B, _L = "blocks.{layer}.", "transformer.h.{layer}."


def _gated(block: Block) -> bool:
    return "gate_proj.weight" in block.feed_forward.weights()


_PARTS = ("heads", "kv_heads", "kv_heads")
_SPLIT_WEIGHT = Layout("(part head_dim) hidden", split="part", parts=_PARTS)
_SPLIT_BIAS = Layout("(part head_dim)", split="part", parts=_PARTS)

_LITGPT_MODULES = leaves_of(
    {
        "transformer.wte": "embedding",
        _L + "norm_1": _B + "attention_norm",
        _L + "norm_2": _B + "feed_forward_norm",
        _L + "post_attention_norm": _B + "attention_output_norm",
        _L + "post_mlp_norm": _B + "feed_forward_output_norm",
        _L + "attn.proj": _B + "attention.o_proj",
        _L + "attn.norm_q": _B + "attention.q_norm",
        _L + "attn.norm_k": _B + "attention.k_norm",
        _L + "mlp.fc_1": _B + "feed_forward.gate_proj",
        _L + "mlp.proj": _B + "feed_forward.down_proj",
        _L + "mlp.gate": _B + "feed_forward.router",
        _L + "mlp.experts.{expert}.fc_1": _B + "feed_forward.experts.{expert}.gate_proj",
        _L + "mlp.experts.{expert}.fc_2": _B + "feed_forward.experts.{expert}.up_proj",
        _L + "mlp.experts.{expert}.proj": _B + "feed_forward.experts.{expert}.down_proj",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    }
)
_UP = (
    *leaves_of({_L + "mlp.fc_2": _B + "feed_forward.up_proj"}, _gated),
    *leaves_of({_L + "mlp.fc": _B + "feed_forward.up_proj"}, lambda block: not _gated(block)),
)


def _litgpt_leaves(name: str, weight: Layout, bias: Layout) -> tuple[Leaf, ...]:
    fused = (Leaf(f"{_L}attn.{name}.weight", qkv("weight"), weight), Leaf(f"{_L}attn.{name}.bias", qkv("bias"), bias))
    return (*_LITGPT_MODULES[:2], *fused, *_UP, *_LITGPT_MODULES[2:])


_OFFSET = "offset"
_LITGPT_DEFAULTS: dict[str, Any] = {
    "name": "", "block_size": 4096, "n_layer": 16, "n_embd": 4096, "n_head": 32, "norm_class_name": "LayerNorm",
    "norm_eps": 1e-5, "norm_qk": False, "norm_qk_type": "default", "norm_1": True, "norm_2": True, "bias": True,
    "parallel_residual": True, "shared_attention_norm": False, "attn_bias": False, "attention_scores_scalar": None,
    "head_size": None, "n_query_groups": None, "intermediate_size": None, "padded_vocab_size": None,
    "sliding_window_size": None, "sliding_window_indices": None, "attention_logit_softcapping": None,
    "rope_base": 10000, "rotary_percentage": 0.25, "rope_condense_ratio": 1, "rope_adjustments": None,
    "rope_interleave": False, "rope_local_base_freq": None, "rope_indices": None, "gelu_approximate": "none",
    "mlp_class_name": "GptNeoxMLP", "n_expert": 0, "n_expert_per_token": 0, "moe_intermediate_size": None,
    "n_shared_expert": None, "n_expert_groups": None, "n_topk_groups": None, "n_topk_scores_per_group": None,
    "first_k_dense_replace": None, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "latent_attention": None,
    "scale_embeddings": False, "lm_head_bias": False, "final_logit_softcapping": None,
    "post_attention_norm": False, "post_mlp_norm": False, "offset": False,
}  # fmt: skip
"""The fields of litgpt's Config -> their defaults."""

_NEOX = {"mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm", _OFFSET: False}
_SERIAL = {"parallel_residual": False, "rotary_percentage": 1.0, "norm_class_name": "RMSNorm", "lm_head_bias": False}
_PLAIN = {**_SERIAL, "mlp_class_name": "LLaMAMLP", _OFFSET: False}
_GEMMA = {**_SERIAL, "mlp_class_name": "GemmaMLP", "scale_embeddings": True, "bias": False, "gelu_approximate": "tanh"}
_GEMMA |= {_OFFSET: True}
_SANDWICH = {**_GEMMA, "post_attention_norm": True, "post_mlp_norm": True}


def _gelu(c: _Fields) -> str:
    if c["gelu_approximate"] not in ("none", "tanh"):
        raise c.fail("gelu_approximate")
    return "gelu" if c["gelu_approximate"] == "none" else "gelu_pytorch_tanh"


def _scaling(c: _Fields) -> dict[str, Any]:
    """Return the RoPE scaling of a litgpt config as fields of config.json: linear scaling, or that of Llama 3.1."""
    given, condensed = c["rope_adjustments"], c["rope_condense_ratio"]
    if given is None:
        return {} if condensed == 1 else {"rope_scaling": {"rope_type": "linear", "factor": condensed}}
    llama3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if not isinstance(given, dict) or set(given) not in ({"factor"}, llama3) or condensed != 1:
        raise c.fail("rope_adjustments")
    if len(given) == 1:
        return {"rope_scaling": {"rope_type": "linear", **given}}
    same = {name: value for name, value in given.items() if name != "original_max_seq_len"}
    original = {"original_max_position_embeddings": given["original_max_seq_len"]}
    return {"rope_scaling": {"rope_type": "llama3", **same, **original}}


def _rms(c: _Fields) -> dict[str, Any]:
    shape = {"num_key_value_heads": c["n_query_groups"], "head_dim": c["head_size"]}
    return {**shape, "rms_norm_eps": c["norm_eps"], "rope_theta": c["rope_base"], **_scaling(c)}


def _square(c: _Fields) -> None:
    """Raise ConfigError unless all heads together are as wide as the hidden states.

    Some families have no config field for the width of a head.
    """
    if c["head_size"] != c["n_embd"] // c["n_head"]:
        raise c.fail("head_size")


def _neox(c: _Fields) -> dict[str, Any]:
    sizes = {"layer_norm_eps": c["norm_eps"], "rotary_emb_base": c["rope_base"], "rotary_pct": c["rotary_percentage"]}
    if c["n_query_groups"] != c["n_head"]:
        raise c.fail("n_query_groups")
    return {
        **sizes,
        "head_dim": c["head_size"],
        "hidden_act": _gelu(c),
        "use_parallel_residual": c["parallel_residual"],
    }


def _phi(c: _Fields) -> dict[str, Any]:
    rope = {"rope_theta": c["rope_base"], "partial_rotary_factor": c["rotary_percentage"]}
    _square(c)
    heads = {"num_key_value_heads": c["n_query_groups"]}
    return {**rope, **heads, "layer_norm_eps": c["norm_eps"], "hidden_act": _gelu(c)}


def _falcon(c: _Fields) -> dict[str, Any]:
    groups, shared = c["n_query_groups"], c["shared_attention_norm"]
    fixed = {"bias": False, "alibi": False, "parallel_attn": True, "multi_query": groups == 1}
    grouped = {"new_decoder_architecture": not shared or groups not in (1, c["n_head"])}
    norms = {"num_ln_in_parallel_attn": (1 if shared else 2) if grouped["new_decoder_architecture"] else None}
    sizes = {"num_kv_heads": groups, "ffn_hidden_size": c["intermediate_size"]}
    _square(c)
    rest = {"layer_norm_epsilon": c["norm_eps"], "rope_theta": c["rope_base"], "activation": _gelu(c)}
    return {**fixed, **grouped, **norms, **sizes, **rest}


def _gemma2(c: _Fields) -> dict[str, Any]:
    kinds = [
        "sliding_attention" if has_window else "full_attention" for has_window in _flags(c, "sliding_window_indices")
    ]
    windows = {"sliding_window": c["sliding_window_size"], "layer_types": kinds, "hidden_activation": _GEMMA_GELU}
    scores = {"query_pre_attn_scalar": c["attention_scores_scalar"] or c["head_size"]}
    caps = {"final_logit_softcapping": c["final_logit_softcapping"]}
    if not c["norm_qk"]:
        caps["attn_logit_softcapping"] = c["attention_logit_softcapping"]
    elif _flags(c, "rope_indices") != _flags(c, "sliding_window_indices"):
        raise c.fail("rope_indices")
    else:
        windows["rope_local_base_freq"] = c["rope_local_base_freq"]
    return {**_rms(c), **windows, **scores, **caps}


_GEMMA_GELU = "gelu_pytorch_tanh"


def _flags(c: _Fields, name: str) -> list[bool]:
    """Return for every layer whether it has a window, from the list in the field `name` of a litgpt config.

    If the field is null, all layers have a window if the config states the width of windows. Otherwise no layer has
    one.
    """
    given, count = c[name], c.size("n_layer")
    if given is None:
        return [c["sliding_window_size"] is not None] * min(count, _MOST_LAYERS)
    if not isinstance(given, list) or len(given) < count or any(flag not in (0, 1) for flag in given):
        raise c.fail(name)
    return [bool(flag) for flag in given[:count]]


_MOST_LAYERS = 2**14


def _windowed(c: _Fields) -> dict[str, Any]:
    """Return fields of config.json for a litgpt config in which all layers have a window, or no layer has one."""
    flags = set(_flags(c, "sliding_window_indices")) if c["sliding_window_size"] is not None else {False}
    if len(flags) > 1:
        raise c.fail("sliding_window_indices")
    return {**_rms(c), "sliding_window": c["sliding_window_size"] if True in flags else None}


def _mixtral(c: _Fields) -> dict[str, Any]:
    experts = {"num_local_experts": c["n_expert"], "num_experts_per_tok": c["n_expert_per_token"]}
    return {**_windowed(c), **experts, "intermediate_size": c["moe_intermediate_size"] or c["intermediate_size"]}


def _llama(c: _Fields) -> dict[str, Any]:
    return {**_rms(c), "attention_bias": c["bias"], "mlp_bias": c["bias"]}


_LITGPT_FAMILIES: tuple[tuple[str, _Contents, Callable[[_Fields], dict[str, Any]]], ...] = (
    ("gpt_neox", {**_NEOX, "bias": True, "shared_attention_norm": False, "lm_head_bias": False}, _neox),
    (
        "phi",
        {**_NEOX, "bias": True, "shared_attention_norm": True, "parallel_residual": True, "lm_head_bias": True},
        _phi,
    ),
    (
        "falcon",
        {**_NEOX, "bias": False, "parallel_residual": True, "rotary_percentage": 1.0, "lm_head_bias": False},
        _falcon,
    ),
    ("gemma3_text", {**_SANDWICH, "norm_qk": True}, _gemma2),
    ("gemma2", {**_SANDWICH, "norm_qk": False}, _gemma2),
    ("gemma", _GEMMA, lambda c: {**_rms(c), "hidden_act": _GEMMA_GELU}),
    ("mixtral", {**_SERIAL, "mlp_class_name": "LLaMAMoE", "bias": False, _OFFSET: False}, _mixtral),
    ("qwen3", {**_PLAIN, "norm_qk": True, "bias": False, "attn_bias": False}, _rms),
    ("qwen2", {**_PLAIN, "attn_bias": True, "bias": False, "norm_qk": False}, _rms),
    ("llama", {**_PLAIN, "attn_bias": False, "norm_qk": False, "sliding_window_size": None}, _llama),
    ("mistral", {**_PLAIN, "attn_bias": False, "norm_qk": False, "bias": False}, _windowed),
)
"""How litgpt's configs are assigned to families. An entry has the name of a family, values of litgpt's fields by which
a config of the family is recognised, and a function that returns fields of config.json. The first entry that matches is
used."""


def _litgpt(contents: _Contents, rows: int | None) -> dict[str, Any]:
    """Return config.json for the contents of litgpt's model_config.yaml.

    `rows` is the number of rows of the embedding.
    """
    ignored = ("hf_config", "vocab_size", "padding_multiple", "name")
    c = _Fields("model_config.yaml", contents, _LITGPT_DEFAULTS, ignored)
    heads, width = c.size("n_head"), c.size("n_embd")
    # litgpt adds one to the weights of norms if the name of the model contains Gemma (Config.norm_class).
    c[_OFFSET] = "Gemma" in str(c["name"])
    filled: dict[str, int | None] = {
        "n_query_groups": heads,
        "head_size": width // heads,
        "intermediate_size": 4 * width,
    }
    filled["padded_vocab_size"] = rows
    c.update({name: value for name, value in filled.items() if c[name] is None})
    row = next((row for row in _LITGPT_FAMILIES if c.matches(row[1])), None)
    if row is None:
        words = ", ".join(f"{name}={shown(c[name], 40)}" for name in ("mlp_class_name", "norm_class_name", "bias"))
        raise ConfigError(f"gptkit does not support the model that model_config.yaml describes ({words}, …)")
    family, _, fill = row
    usual = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
    usual |= {"vocab_size": "padded_vocab_size", "max_position_embeddings": "block_size"}
    usual |= {"intermediate_size": "intermediate_size"} if family != "falcon" else {}
    config = {"model_type": family, **{ours: c[theirs] for ours, theirs in usual.items()}, **fill(c)}
    c.refuse_others()
    return config


# --- Meta's own ---


def _meta(contents: _Contents, rows: int | None) -> dict[str, Any]:
    """Return config.json for Meta's or Mistral's params.json, or for the model_args that llama2.c's train.py writes.

    Mistral's params.json has no multiple_of. If it states a window, the family is mistral, and otherwise llama. `rows`
    is the number of rows of the embedding.
    """
    c = _Fields("params.json", contents, _META_DEFAULTS, ("max_batch_size", "dropout"))
    width, heads = c.size("dim"), c.size("n_heads")
    inner = _meta_inner(c, width)
    scaled = {
        "rope_type": "llama3", "factor": c["rope_scaling_factor"], "low_freq_factor": 1.0,
        "high_freq_factor": c["rope_high_freq_factor"], "original_max_position_embeddings": 8192,
    }  # fmt: skip
    if c["use_scaled_rope"] and c["rope_scaling_factor"] is None:
        hint = 'Add "rope_scaling_factor" to it: 8 for Llama 3.1, 32 for Llama 3.2.'
        raise ConfigError("params.json: use_scaled_rope is true, but rope_scaling_factor is missing", hint)
    window = c["sliding_window"] or c["_sliding_window"]
    mistral = {*contents} & {"multiple_of", "hidden_dim"} == {"hidden_dim"}
    if mistral and window is None and "rope_theta" not in contents:
        hint = 'Add "rope_theta" to it: 1000000.0 for the models of Mistral that have no window.'
        raise ConfigError("params.json has no rope_theta", hint)
    if window is not None and not (type(window) is int and 0 < window < 2**31):
        raise c.fail("sliding_window")
    context = c["max_seq_len"] or (131072 if c["use_scaled_rope"] else 32768 if mistral else 2048)
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        **({} if window is None else {"model_type": "mistral", "sliding_window": window}),
        "num_hidden_layers": c["n_layers"], "num_key_value_heads": c["n_kv_heads"] or heads,
        "vocab_size": rows if c["vocab_size"] == -1 else c["vocab_size"], "rms_norm_eps": c["norm_eps"],
        "head_dim": c["head_dim"] or width // heads, "rope_theta": c["rope_theta"],
        "max_position_embeddings": context, **({"rope_scaling": scaled} if c["use_scaled_rope"] else {}),
    }  # fmt: skip
    c.refuse_others()
    return config


def _meta_inner(c: _Fields, width: int) -> int:
    """Return the intermediate size of the feed-forward.

    If params.json does not state it, it is computed as in Meta's FeedForward. It is two thirds of four times the hidden
    size, multiplied by `ffn_dim_multiplier`, and rounded up to a multiple of `multiple_of`. `width` is the hidden size.
    """
    stated: int | None = c["hidden_dim"]
    factor, multiple = c["ffn_dim_multiplier"], c.size("multiple_of")
    if stated is not None:
        return stated
    if factor is not None and not (isinstance(factor, int | float) and 0 < factor < 2**10):
        raise c.fail("ffn_dim_multiplier")
    return meta_width(4 * width, factor, multiple)


_META_DEFAULTS: dict[str, Any] = {
    "n_kv_heads": None, "vocab_size": -1, "multiple_of": 256, "ffn_dim_multiplier": None, "hidden_dim": None,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "max_seq_len": None, "head_dim": None, "use_scaled_rope": False,
    "rope_scaling_factor": None, "rope_high_freq_factor": 4, "sliding_window": None,
    "_sliding_window": None, "moe": None, "lora": None, "vision_encoder": None, "model_type": "transformer",
}  # fmt: skip
"""The fields of Meta's and Mistral's ModelArgs -> their defaults."""
_META_BUFFERS = ("rope.freqs", "freqs_cis", "freqs_cos", "freqs_sin", ".mask")
_TITAN = {
    **{f".attention.{name}.": f".attention.qkv_linear.{name}." for name in ("wq", "wk", "wv")},
    "output.weight": "lm_head.weight",
}
"""Parts of Meta's tensor names -> the names that torchtitan has used since 2026."""


def _titan(leaf: Leaf) -> Leaf:
    name = leaf.checkpoint
    for theirs, now in _TITAN.items():
        name = name.replace(theirs, now)
    return replace(leaf, checkpoint=name)


# --- nanochat ---


def _nanochat(contents: _Contents, rows: int | None) -> dict[str, Any]:
    """Return config.json for nanochat's meta_STEP.json. The eps is the default of transformers' config class.

    `rows` is the number of rows of the embedding.
    """
    inner = contents.get("model_config")
    if not isinstance(inner, dict):
        raise ConfigError("nanochat's meta_*.json has no field model_config")
    c = _Fields("model_config", inner, {"n_kv_head": None})
    width = c.size("n_embd")
    config = {
        "model_type": "nanochat", "vocab_size": rows or c["vocab_size"], "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": c["n_layer"], "num_attention_heads": c["n_head"],
        "num_key_value_heads": c["n_kv_head"] or c["n_head"], "max_position_embeddings": c["sequence_len"],
        "head_dim": width // c.size("n_head"), "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    c["vocab_size"]
    c.refuse_others()
    return config


_NANOCHAT_LEAVES = leaves_of(
    {
        "transformer.wte": "embedding",
        **{f"{_L}attn.c_{name}": f"{_B}attention.{name}_proj" for name in ("q", "k", "v")},
        _L + "attn.c_proj": _B + "attention.o_proj",
        _L + "mlp.c_fc": _B + "feed_forward.up_proj",
        _L + "mlp.c_proj": _B + "feed_forward.down_proj",
        "lm_head": "head",
    }
)

_WTE, _HEAD = "transformer.wte.weight", "lm_head.weight"


def _of_litgpt(fused: str, weight: Layout, bias: Layout) -> Stack:
    leaves = _litgpt_leaves(fused, weight, bias)
    return Stack("litgpt", f"transformer.h.0.attn.{fused}.weight", leaves, _WTE, _HEAD, "model_config.yaml", _litgpt)


STACKS = (
    _of_litgpt("qkv", _SPLIT_WEIGHT, _SPLIT_BIAS),
    _of_litgpt("attn", GROUPED_WEIGHT, GROUPED_BIAS),  # until the end of 2024: q, k and v of each group together
    Stack(
        "Meta's",
        "layers.0.attention.wq.weight",
        llama2c.LEAVES,
        "tok_embeddings.weight",
        "output.weight",
        "params.json",
        _meta,
        _META_BUFFERS,
    ),
    Stack(
        "torchtitan's",
        "layers.0.attention.qkv_linear.wq.weight",
        tuple(_titan(leaf) for leaf in llama2c.LEAVES),
        "tok_embeddings.weight",
        _HEAD,
        "params.json",
        _meta,
        _META_BUFFERS,
    ),
    Stack(
        "nanochat",
        "transformer.h.0.attn.c_q.weight",
        _NANOCHAT_LEAVES,
        _WTE,
        _HEAD,
        "meta_*.json",
        _nanochat,
        ("cos", "sin"),
    ),
)
"""All training programs whose checkpoints gptkit reads."""
