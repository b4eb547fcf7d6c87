"""Tiny configs of every family and every variant of it, and transformers models of them with all parameters random.

A family's first variant is the one that gets the full grid of probes. `config` is what a config.json says, old forms
included; `modern` is the same in words that transformers understands.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from gptkit.architectures import architecture_of
from gptkit.components import ModelSpec
from gptkit.modules import Decoder

VOCAB = 97

GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 4}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
GROUPED = {"num_hidden_layers": 3, "num_key_value_heads": 2}
MISTRAL = {**LLAMA, **GROUPED, "model_type": "mistral"}
MIXTRAL = {**LLAMA, **GROUPED, "model_type": "mixtral", "intermediate_size": 80, "num_local_experts": 4}
QWEN2 = {**LLAMA, **GROUPED, "model_type": "qwen2"}
QWEN3 = {**LLAMA, **GROUPED, "model_type": "qwen3", "head_dim": 16}
WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
BLOOM = {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6}
FALCON = {
    "model_type": "falcon",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
FALCON_7B = {**FALCON, "multi_query": True, "parallel_attn": True, "bias": False}
FALCON_40B = {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}
FALCON_RW = {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}
REFINED_WEB = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6, "hidden_dropout": 0.0}

GEMMA = {**LLAMA, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 16}
GEMMA2 = {**GEMMA, "model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 16}
GEMMA2 |= {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 16}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 40,
    "factor": 4.0,
}

GPTJ = {**GPT2, "model_type": "gptj", "rotary_dim": 6}
GPT_NEO = {
    "model_type": "gpt_neo",
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "hidden_size": 48,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 16,
}
GPT_BIGCODE = {**GPT2, "model_type": "gpt_bigcode", "n_layer": 2, "n_head": 6}
PERSIMMON = {**LLAMA, "model_type": "persimmon", "num_attention_heads": 3}
NEMOTRON = {**LLAMA, **GROUPED, "model_type": "nemotron"}
OPT = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "ffn_dim": 72,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
}
BIOGPT = {**LLAMA, "model_type": "biogpt", "num_hidden_layers": 3, "num_attention_heads": 4}
XGLM = {
    "model_type": "xglm",
    "vocab_size": VOCAB,
    "d_model": 48,
    "num_layers": 3,
    "ffn_dim": 72,
    "max_position_embeddings": 256,
    "attention_heads": 4,
}
CTRL = {**GPT2, "model_type": "ctrl", "dff": 72}
OPENAI_GPT = {**GPT2, "model_type": "openai-gpt"}
GPT_NEOX_JAPANESE = {
    "model_type": "gpt_neox_japanese",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
BITNET = {**LLAMA, **GROUPED, "model_type": "bitnet"}
MPT = {"model_type": "mpt", "vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "max_seq_len": 256, "n_heads": 4}
PHI3 = {**LLAMA, **GROUPED, "model_type": "phi3", "max_position_embeddings": 160, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-sw3": {**GPT2, "model_type": "gpt-sw3", "n_layer": 2},
    "gptj": GPTJ,
    "gptj-tied": {
        **GPTJ,
        "n_head": 3,
        "rotary_dim": 16,
        "tie_word_embeddings": True,
        "n_inner": 100,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-4,
    },
    "codegen": {**GPTJ, "model_type": "codegen"},
    "codegen-narrow": {**GPTJ, "model_type": "codegen", "n_head": 8, "rotary_dim": 4, "n_inner": 100},
    "gpt_neo": GPT_NEO,
    "gpt_neo-local-first": {
        **GPT_NEO,
        "num_layers": 3,
        "attention_types": [[["local"], 1], [["global"], 2]],
        "attention_layers": ["local", "global", "global"],
        "intermediate_size": 100,
        "num_heads": 3,
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
    "gpt_bigcode": GPT_BIGCODE,
    "gpt_bigcode-mha": {
        **GPT_BIGCODE,
        "multi_query": False,
        "n_inner": 100,
        "scale_attn_weights": False,
        "n_head": 3,
        "activation_function": "gelu",
    },
    "gpt_bigcode-untied": {**GPT_BIGCODE, "n_head": 8, "tie_word_embeddings": False},
    "persimmon": PERSIMMON,
    "persimmon-no-head-norms": {
        **PERSIMMON,
        "qk_layernorm": False,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "nemotron": NEMOTRON,
    "nemotron-biased": {
        **NEMOTRON,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    },
    "opt": OPT,
    "opt-350m": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20},
    "opt-bare": {
        **OPT,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
        "num_attention_heads": 3,
        "word_embed_proj_dim": 60,
    },
    "biogpt": BIOGPT,
    "biogpt-unscaled": {
        **BIOGPT,
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "hidden_act": "relu",
        "num_attention_heads": 3,
    },
    "xglm": XGLM,
    "xglm-unscaled": {
        **XGLM,
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "activation_function": "relu",
        "attention_heads": 3,
    },
    "ctrl": CTRL,
    "ctrl-untied": {**CTRL, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "n_head": 3, "n_layer": 2},
    "openai-gpt": OPENAI_GPT,
    "openai-gpt-untied": {
        **OPENAI_GPT,
        "afn": "relu",
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-3,
        "n_head": 3,
        "n_layer": 2,
    },
    "gpt_neox_japanese": {**GPT_NEOX_JAPANESE, "pad_token_id": 0},
    "gpt_neox_japanese-partial": {
        **GPT_NEOX_JAPANESE,
        "rotary_pct": 0.5,
        "rotary_emb_base": 5000,
        "intermediate_multiple_size": 2,
        "hidden_act": "relu",
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
    },
    "bitnet": BITNET,
    "bitnet-biased": {
        **BITNET,
        "attention_bias": True,
        "num_key_value_heads": None,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 2e5},
    },
    "mpt": MPT,
    "mpt-clipped": {
        **MPT,
        "n_heads": 6,
        "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-3,
    },
    "phi3": {**PHI3, "sliding_window": 16},
    "phi3-mha": {**PHI3, "num_attention_heads": 4, "num_key_value_heads": None, "tie_word_embeddings": True},
    "phi3-long": {
        **PHI3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 20,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "yarn",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "factor": 2.0,
        },
    },
    "phi3-v5": {
        **PHI3,
        "tie_word_embeddings": True,
        "rope_parameters": {**LONG_ROPE, "rope_theta": 5e4, "factor": 3.0, "attention_factor": 1.3},
        "original_max_position_embeddings": 40,
    },
    "gpt2-by-layer": {
        **GPT2,
        "n_embd": 40,
        "scale_attn_by_inverse_layer_idx": True,
        "n_inner": 100,
        "activation_function": "relu",
    },
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-4},
    "gpt2-upcast": {**GPT2, "reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "gpt2-upcast-unscaled": {**GPT2, "reorder_and_upcast_attn": True, "scale_attn_weights": False, "n_layer": 2},
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu_pytorch_tanh"},
    "gpt2-other-names": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "n_inner": None,
        "activation_function": "quick_gelu",
    },
    "llama": {**LLAMA, **GROUPED, "head_dim": 20, "attention_bias": True, "mlp_bias": True},
    "llama-2": {**LLAMA, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "rms_norm_eps": 1e-5},
    "llama-3": {**LLAMA, "num_key_value_heads": 3, "rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
    "llama-v5": {
        **LLAMA,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 2e5},
    },
    "llama-linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}, "hidden_act": "gelu"},
    "llama-dynamic": {**LLAMA, "max_position_embeddings": 40, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama-yarn": {**LLAMA, "max_position_embeddings": 160, "rope_scaling": YARN_ROPE},
    "llama-yarn-mscale": {
        **LLAMA,
        "max_position_embeddings": 160,
        "rope_scaling": {
            **YARN_ROPE,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
        },
    },
    "llama-longrope": {**LLAMA, "max_position_embeddings": 160, "rope_scaling": LONG_ROPE},
    "llama-proportional": {
        **LLAMA,
        "head_dim": 12,
        "hidden_act": "relu2",
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.4},
    },
    "mistral": {**MISTRAL, "sliding_window": 16},
    "mistral-no-window": {**MISTRAL, "sliding_window": None, "head_dim": 12},
    "mistral-default-window": {**MISTRAL, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "mixtral-windowed": {**MIXTRAL, "sliding_window": 16, "num_experts_per_tok": 3, "head_dim": 16},
    "mixtral-one": {**MIXTRAL, "num_experts_per_tok": 1, "num_key_value_heads": 6, "tie_word_embeddings": True},
    "mixtral-other-names": {
        **{key: value for key, value in MIXTRAL.items() if key != "num_local_experts"},
        "num_experts": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 5e5,
    },
    "qwen2": {**QWEN2, **WINDOWED, "tie_word_embeddings": True},
    "qwen2-no-window": {**QWEN2, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
    "qwen2-layer-types": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2-yarn": {**QWEN2, "max_position_embeddings": 160, "rope_scaling": {**YARN_ROPE, "type": "yarn"}},
    "qwen3": QWEN3,
    "qwen3-windowed": {**QWEN3, **WINDOWED, "attention_bias": True, "tie_word_embeddings": True},
    "bloom": BLOOM,
    "bloom-post-norm": {
        **BLOOM,
        "hidden_size": 64,
        "n_head": 8,
        "apply_residual_connection_post_layernorm": True,
        "seq_length": 128,
    },
    "bloom-old-names": {
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "n_embed": 48,
        "n_layer": 2,
        "num_attention_heads": 3,
        "tie_word_embeddings": False,
    },
    "falcon-7b": FALCON_7B,
    "falcon-40b": FALCON_40B,
    "falcon-11b": {**FALCON_40B, "bias": False, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    "falcon-rw": FALCON_RW,
    "falcon-mha": {**FALCON, "multi_query": False, "bias": True, "ffn_hidden_size": 100, "activation": "relu"},
    "falcon-alibi-parallel": {**FALCON_7B, "alibi": True, "bias": True},
    "falcon-serial": {**FALCON_7B, "parallel_attn": False, "rope_theta": 5e4},
    "falcon-RefinedWeb": {
        **REFINED_WEB,
        "model_type": "RefinedWeb",
        "n_head_kv": 2,
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
    },
    "falcon-RefinedWebModel": {
        **REFINED_WEB,
        "model_type": "RefinedWebModel",
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
    },
    "gemma": GEMMA,
    "gemma-legacy": {
        **GEMMA,
        "hidden_act": "gelu",
        "attention_bias": True,
        "num_key_value_heads": 6,
        "rope_theta": 5e4,
    },
    "gemma2": GEMMA2,
    "gemma2-no-caps": {
        **GEMMA2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 16,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_activation": "gelu",
    },
    "gemma2-layer-types": {
        **GEMMA2,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "rope_scaling": LLAMA3_ROPE,
    },
    "gemma3_text": {**GEMMA3, "sliding_window_pattern": 2, "rope_local_base_freq": 5e3, "rope_theta": 2e5},
    "gemma3_text-v5": {
        **GEMMA3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
    },
    "gemma3_text-scaled": {
        **GEMMA3,
        "num_hidden_layers": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": False,
    },
    "gemma3_text-composite": {
        "model_type": "gemma3",
        "text_config": {**GEMMA3, "sliding_window_pattern": 2},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 24},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "falcon-RefinedWebModel-rw": {
        **{key: value for key, value in REFINED_WEB.items() if key != "hidden_size"},
        "n_embed": 48,
        "model_type": "RefinedWebModel",
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
    },
}


@dataclass(frozen=True)
class Variant:
    """A config, the family it belongs to by its name here, and whether it stands for that family in long tests."""

    name: str
    family: str
    config: dict[str, Any]
    representative: bool

    def __str__(self) -> str:
        return self.name


def _variants() -> list[Variant]:
    seen: set[str] = set()
    variants = []
    for name, config in CONFIGS.items():
        family = "openai-gpt" if name.startswith("openai-gpt") else name.split("-")[0]
        variants.append(Variant(name, family, config, family not in seen))
        seen.add(family)
    return variants


VARIANTS = _variants()
REPRESENTATIVES = {variant.family: variant for variant in VARIANTS if variant.representative}

DISTINCT = (
    "gpt2",
    "gpt2-by-layer",
    "llama",
    "llama-3",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "llama-longrope",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "bloom",
    "falcon-7b",
    "falcon-40b",
    "falcon-11b",
    "falcon-rw",
    "gemma",
    "gemma2",
    "gemma3_text",
)
"""The variants that differ in which mistakes can be made in them, and in what code of transformers sees them."""


def shallow(config: Mapping[str, Any], layers: int = 2) -> dict[str, Any]:
    """A config with fewer layers: two are enough for what is in one layer, or goes wrong between two."""
    name = next(key for key in ("n_layer", "num_hidden_layers") if key in config)
    return {**config, name: layers}


def variants_of(family: str) -> list[Variant]:
    """The variants of a registered family; a family without any is an error that says what to do."""
    found = [variant for variant in VARIANTS if variant.family == family]
    if not found:
        raise AssertionError(
            f"the family {family!r} has no variants: add tiny configs '{family}…' to tests/helpers/families.py"
        )
    return found


def modern(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` in words that transformers understands; its own copy, since transformers writes into nested ones."""
    config = copy.deepcopy(dict(config))
    config = config.get("text_config", config)  # of a composite model the language model alone
    if config["model_type"] in ("RefinedWeb", "RefinedWebModel"):
        config["new_decoder_architecture"] = config["model_type"] == "RefinedWeb"
        config["model_type"] = "falcon"
        renamed = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
        config = {renamed.get(key, key): value for key, value in config.items()}
    return config


def hf_config(config: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """transformers' config of a config.json."""
    return transformers.AutoConfig.for_model(**modern(config))


def randomised_reference(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0
) -> transformers.PreTrainedModel:
    """transformers' model of a config with every parameter random, at scales such as training leaves behind.

    Norms' factors vary around one and biases around zero, so that a tensor that is dropped or put elsewhere shows.
    """
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(config), dtype=dtype, attn_implementation=attention
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():  # GPT-J's tables are made in fp32 where a checkpoint is read, here in its dtype
            if module._non_persistent_buffers_set:
                model._init_weights(module)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)  # from where transformers starts it: Gemma adds 1 to a norm's weight itself
            elif any(part in name for part in ("wte", "wpe", "embed")):
                parameter.copy_(0.8 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def checkpoint_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's tensors as save_pretrained names and shapes them: its modules may hold several of them in one."""
    return revert_weight_conversion(model, model.state_dict())


def shared_weights(reference: transformers.PreTrainedModel, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The reference's weights under shared names."""
    architecture = architecture_of(config)
    weights = checkpoint_tensors(reference)
    shared: dict[str, torch.Tensor] = {}
    for leaf in architecture.bind(architecture.spec(config)):
        tensors = leaf.to_shared(weights[leaf.checkpoint])
        shared.update(zip(leaf.shared, tensors, strict=True))
    return shared


def decoder_from(
    reference: transformers.PreTrainedModel, config: Mapping[str, Any], attention: str = "sdpa"
) -> Decoder:
    """gptkit's decoder of a config, with the reference's weights and dtype."""
    decoder = Decoder(spec_of(config), attention=attention)  # type: ignore[arg-type]
    decoder = decoder.to(next(reference.parameters()).dtype).eval()
    decoder.load_state_dict(shared_weights(reference, config))
    return decoder


def save_hf(
    config: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
) -> transformers.PreTrainedModel:
    """Write a randomised checkpoint of `config` as transformers saves it, and give the model back.

    Where `config` is in an old form, config.json is put back into it.
    """
    attention = architecture_of(config).reference(spec_of(config))[0]
    model = randomised_reference(config, dtype, attention, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if modern(config) != config:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return model


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Alter the tensors of a checkpoint in place."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def zeroed(folder: Path, *endings: str) -> None:
    """Set the tensors of a checkpoint whose names end so to zero."""
    edited(folder, lambda weights: [tensor.zero_() for name, tensor in weights.items() if name.endswith(endings)])


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """gptkit's tree of a config."""
    return architecture_of(config).spec(config)
