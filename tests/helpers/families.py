"""Tiny configs of every family and every variant of it, and transformers models of them with all parameters random.

A family's first variant is the one that gets the full grid of probes. `config` is what a config.json says, old forms
included; `modern` is the same in words that transformers understands. A family without configs here has drawn ones.
"""

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.releases import since
from gptkit.components import ModelSpec
from gptkit.modules import Decoder
from gptkit.parity.sides import auto_class

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
GROUPED_LLAMA = {**LLAMA, **GROUPED}
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
GEMMA3N = {**GEMMA, "model_type": "gemma3n_text", "num_hidden_layers": 3, "sliding_window": 16}
GEMMA3N |= {"vocab_size_per_layer_input": 90, "hidden_size_per_layer_input": 12, "laurel_rank": 10}
GEMMA3N |= {"num_kv_shared_layers": 0, "altup_num_inputs": 3, "final_logit_softcapping": 3.0}
GEMMA4 = {**GEMMA, "model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 16, "global_head_dim": 24}
GEMMA4_UNIFIED = {**GEMMA4, "model_type": "gemma4_unified_text"}
GEMMA4 |= {"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 12}
GEMMA4_SHORT = {**GEMMA4, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}

LATENT = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
YOUTU = {**LATENT, "model_type": "youtu", "q_lora_rank": 28, "v_head_dim": 10}
MINICPM3 = {**YOUTU, "model_type": "minicpm3", "dim_model_base": 16}

DEEPSEEK = {
    **YOUTU,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
DEEPSEEK_V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "first_k_dense_replace": 1}
DEEPSEEK_V3 = {**DEEPSEEK_V2, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
GLM4_MOE_LITE = {**DEEPSEEK, "model_type": "glm4_moe_lite"}

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

EXPERTS = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}
FLINT = {"model_type": "flint", "head_dim": 16, "num_hidden_layers": 5, "sliding_window": 16}
FLINT |= {"shared_expert_intermediate_size": 56}
ARIA = {"model_type": "aria_text", "intermediate_size": 40, "moe_num_experts": 4}
KOLIBRI1 = {
    **{name: value for name, value in GROUPED_LLAMA.items() if name != "intermediate_size"},
    **EXPERTS,
    "model_type": "kolibri1",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "shared_expert_intermediate_size": 56,
    "sliding_window": 16,
}
LFM2 = {**GROUPED_LLAMA, "model_type": "lfm2", "num_hidden_layers": 4, "intermediate_size": 90, "block_multiple_of": 8}
QWEN3_5 = {
    **GROUPED_LLAMA,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
QWEN3_NEXT = {**QWEN3_5, **EXPERTS, "model_type": "qwen3_next", "shared_expert_intermediate_size": 56}
QWEN3_5_MOE = {name: value for name, value in QWEN3_NEXT.items() if name != "intermediate_size"}
QWEN3_5_MOE |= {"model_type": "qwen3_5_moe_text"}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16}
BAMBA = {**GROUPED_LLAMA, **MAMBA2, "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}
GRANITEMOEHYBRID = {
    **GROUPED_LLAMA,
    **MAMBA2,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 40,
    "shared_intermediate_size": 56,
    "num_local_experts": 4,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.3,
}
FALCON_H1 = {
    **GROUPED_LLAMA,
    **MAMBA2,
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "mamba_d_ssm": 40,
    "mamba_rms_norm": True,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.7, 1.1, 1.3, 0.6, 0.9],
    "mlp_multipliers": [1.4, 0.75],
}
MAMBA = {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 12}
JAMBA = {
    **GROUPED_LLAMA,
    "model_type": "jamba",
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "mamba_d_state": 12,
}
RECURRENT_GEMMA = {
    **GROUPED_LLAMA,
    "model_type": "recurrent_gemma",
    "block_types": ["recurrent", "recurrent", "attention"],
    "num_attention_heads": 4,
    "attention_window_size": 16,
    "logits_soft_cap": 3.0,
}
del RECURRENT_GEMMA["max_position_embeddings"]
RWKV = {"model_type": "rwkv", "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "rescale_every": 0}
RWKV |= {"intermediate_size": 160, "context_length": 256}
MAMBA2_ALONE = {
    "model_type": "mamba2",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 12,
    "chunk_size": 16,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 72,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}
ZAMBA2 = {
    "model_type": "zamba2",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
    "num_attention_heads": 6,
    "intermediate_size": 72,
    "mamba_d_state": 12,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "chunk_size": 16,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
    "max_position_embeddings": 128,
}
LLAMA4 = {
    **GROUPED_LLAMA,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 10,
}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
MODERNBERT = {**BERT, "model_type": "modernbert", "local_attention": 20, "pad_token_id": 0}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": VOCAB,
    "dim": 48,
    "hidden_dim": 72,
    "n_layers": 2,
    "n_heads": 6,
    "max_position_embeddings": 256,
}
PHIMOE_ROPE = {**LONG_ROPE, "short_mscale": 1.243, "long_mscale": 1.243}
GRANITE_SWA = {
    **GROUPED_LLAMA,
    "model_type": "granite_swa",
    "num_hidden_layers": 5,
    "sliding_window": 16,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 1.5,
}

T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 72,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 30,
}
BART = {
    "model_type": "bart",
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 60,
    "max_position_embeddings": 256,
    "scale_embedding": True,
}
NEOX = {**LLAMA, "model_type": "gpt_neox", "num_attention_heads": 3}
SMOLLM3 = {**LLAMA, **GROUPED, "model_type": "smollm3", "pad_token_id": 0}
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
    "gemma3n_text": {**GEMMA3N, "num_hidden_layers": 7, "num_kv_shared_layers": 2},
    "gemma3n_text-shared": {
        **GEMMA3N,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
        "intermediate_size": [88, 80, 72, 96, 88, 88],
    },
    "gemma3n_text-active": {
        **GEMMA3N,
        "altup_num_inputs": 8,
        "altup_active_idx": 2,
        "num_hidden_layers": 11,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_activation": "silu",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma3n_text-composite": {
        "model_type": "gemma3n",
        "text_config": {**GEMMA3N, "altup_num_inputs": 2, "num_hidden_layers": 5, "vocab_size_per_layer_input": 101},
        "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 24},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {**GEMMA4, "num_hidden_layers": 7},
    "gemma4_text-shared": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text-keys": {
        **GEMMA4_SHORT,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": False,
    },
    "gemma4_text-layers": {
        **GEMMA4_SHORT,
        "hidden_activation": "silu",
        "per_layer_config": {str(layer): {"head_dim": 32, "num_key_value_heads": 3} for layer in (1, 2)},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "gemma4_text-experts": {
        **GEMMA4_SHORT,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
    },
    "gemma4_text-composite": {
        "model_type": "gemma4",
        "text_config": GEMMA4_SHORT,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 24},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    },
    "gemma4_unified_text": {**GEMMA4_UNIFIED, "num_hidden_layers": 7},
    "gemma4_unified_text-shared": {
        **GEMMA4_UNIFIED,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4_unified_text-layers": {
        **GEMMA4_UNIFIED,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "per_layer_config": {str(layer): {"head_dim": 32, "num_key_value_heads": 3} for layer in (1, 2)},
    },
    "gemma4_unified_text-composite": {
        "model_type": "gemma4_unified",
        "text_config": {
            **GEMMA4_UNIFIED,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {
        **GROUPED_LLAMA,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "shared_expert_intermediate_size": 56,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe-n": {
        **GROUPED_LLAMA,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen2_moe-s": {
        **GROUPED_LLAMA,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **GROUPED_LLAMA,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe-n": {
        **GROUPED_LLAMA,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "head_dim": 16,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "mlp_only_layers": [0],
    },
    "qwen3_moe-s": {
        **GROUPED_LLAMA,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 3,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "olmoe": {
        **GROUPED_LLAMA,
        "model_type": "olmoe",
        "intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmoe-c": {
        **GROUPED_LLAMA,
        "model_type": "olmoe",
        "intermediate_size": 40,
        "num_key_value_heads": 3,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "clip_qkv": 0.5,
        "attention_bias": True,
    },
    "flint": {**GROUPED_LLAMA, **EXPERTS, **FLINT},
    "flint-sparse": {
        **GROUPED_LLAMA,
        **EXPERTS,
        **FLINT,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **GROUPED_LLAMA,
        "model_type": "gpt_oss",
        "intermediate_size": 40,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "gpt_oss-b": {
        **GROUPED_LLAMA,
        "model_type": "gpt_oss",
        "intermediate_size": 40,
        "num_key_value_heads": 6,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "sliding_window": 16,
        "swiglu_limit": 0.8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_bias": False,
        "rope_scaling": {"rope_type": "default"},
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        **GROUPED_LLAMA,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "head_dim": 16,
    },
    "glm4_moe-b": {
        **GROUPED_LLAMA,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.25,
        "head_dim": 16,
    },
    "ernie4_5_moe": {
        **GROUPED_LLAMA,
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 40,
        "moe_num_experts": 6,
        "moe_k": 2,
    },
    "granitemoe": {
        **GROUPED_LLAMA,
        "model_type": "granitemoe",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 13.0,
    },
    "minimax_m2": {
        **GROUPED_LLAMA,
        "model_type": "minimax_m2",
        "intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "rotary_dim": 4,
    },
    "dots1": {
        **GROUPED_LLAMA,
        "model_type": "dots1",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots1-w": {
        **GROUPED_LLAMA,
        "model_type": "dots1",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "attention_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 16,
        "max_window_layers": 1,
        "head_dim": 16,
    },
    "solar_open": {
        **{key: value for key, value in GROUPED_LLAMA.items() if key != "intermediate_size"},
        "model_type": "solar_open",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 16,
    },
    "solar_open-b": {
        **{key: value for key, value in GROUPED_LLAMA.items() if key != "intermediate_size"},
        "model_type": "solar_open",
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "attention_bias": True,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.5,
        "head_dim": 8,
    },
    "hy_v3": {
        **GROUPED_LLAMA,
        "model_type": "hy_v3",
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "hy_v3-b": {
        **GROUPED_LLAMA,
        "model_type": "hy_v3",
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "attention_bias": True,
        "mlp_bias": True,
        "num_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "enable_moe_fp32_combine": False,
    },
    "ernie4_5_moe-b": {
        **GROUPED_LLAMA,
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 40,
        "moe_num_experts": 6,
        "moe_k": 2,
        "use_bias": True,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 2,
        "tie_word_embeddings": False,
        "head_dim": 16,
    },
    "minimax_m2-w": {
        **GROUPED_LLAMA,
        "model_type": "minimax_m2",
        "intermediate_size": 40,
        "num_key_value_heads": 1,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "flex_olmo": {
        **GROUPED_LLAMA,
        "model_type": "flex_olmo",
        "intermediate_size": 40,
        "pad_token_id": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "flex_olmo-b": {
        **GROUPED_LLAMA,
        "model_type": "flex_olmo",
        "intermediate_size": 40,
        "pad_token_id": 1,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "norm_topk_prob": True,
    },
    "granitemoe-b": {
        **GROUPED_LLAMA,
        "model_type": "granitemoe",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granitemoeshared": {
        **GROUPED_LLAMA,
        "model_type": "granitemoeshared",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "shared_intermediate_size": 56,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 13.0,
    },
    "granitemoeshared-n": {
        **GROUPED_LLAMA,
        "model_type": "granitemoeshared",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "tie_word_embeddings": True,
    },
    "exaone_moe": {
        **GROUPED_LLAMA,
        "model_type": "exaone_moe",
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "exaone_moe-n": {
        **GROUPED_LLAMA,
        "model_type": "exaone_moe",
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "num_shared_experts": 2,
        "norm_topk_prob": False,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe": {
        **GROUPED_LLAMA,
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": 40,
        "num_experts": 4,
        "moe_topk": 2,
        "head_dim": 8,
    },
    "hunyuan_v1_moe-l": {
        **GROUPED_LLAMA,
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": 40,
        "num_experts": 4,
        "moe_topk": [3, 3, 3],
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "cohere2_moe": {
        **GROUPED_LLAMA,
        "model_type": "cohere2_moe",
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "head_dim": 8,
        "num_shared_experts": 1,
        "sliding_window": 16,
        "first_k_dense_replace": 1,
        "sliding_window_pattern": 2,
    },
    "cohere2_moe-s": {
        **GROUPED_LLAMA,
        "model_type": "cohere2_moe",
        "intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "sigmoid",
        "sliding_window": 16,
        "prefix_dense_sliding_window_pattern": 2,
        "prefix_dense_intermediate_size": 56,
        "first_k_dense_replace": 2,
        "rms_norm_eps": 1e-06,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "cohere2_moe-n": {
        **GROUPED_LLAMA,
        "model_type": "cohere2_moe",
        "intermediate_size": 40,
        "num_experts": 4,
        "head_dim": 8,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "logit_scale": 0.5,
    },
    "youtu": YOUTU,
    "youtu-plain": {
        **YOUTU,
        "q_lora_rank": None,
        "kv_lora_rank": 17,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "youtu-yarn": {
        **YOUTU,
        "max_position_embeddings": 160,
        "rope_scaling": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.707},
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "minicpm3": MINICPM3,
    "minicpm3-nulls": {
        **MINICPM3,
        "num_key_value_heads": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 6,
        "v_head_dim": None,
        "dim_model_base": None,
        "scale_depth": None,
        "scale_emb": 3.3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "minicpm3-longrope": {
        **MINICPM3,
        "max_position_embeddings": 128,
        "rope_scaling": {**LONG_ROPE, "short_factor": [1.0, 1.3], "long_factor": [1.5, 4.0]},
    },
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2-grouped": {
        **DEEPSEEK_V2,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "max_position_embeddings": 160,
        "rope_scaling": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v2-one": {
        **DEEPSEEK_V2,
        "num_key_value_heads": None,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3-plain": {
        "head_dim": 3,
        **DEEPSEEK_V3,
        "num_key_value_heads": None,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "rope_interleave": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v3-yarn": {
        **DEEPSEEK_V3,
        "max_position_embeddings": 160,
        "rope_scaling": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 0.5,
    },
    "deepseek_v3-dense": {**YOUTU, "model_type": "deepseek_v3", "first_k_dense_replace": 2},
    "deepseek_v3-kimi_k2": {**DEEPSEEK_V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4_moe_lite-types": {
        **GLM4_MOE_LITE,
        "n_group": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": VOCAB,
        "d_model": 48,
        "n_layers": 3,
        "n_heads": 6,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dbrx-plain": {
        "model_type": "dbrx",
        "vocab_size": VOCAB,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": 256,
        "rope_theta": 5e5,
        "attn_config": {"kv_n_heads": 6, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {
            "ffn_hidden_size": 40,
            "moe_num_experts": 4,
            "moe_top_k": 3,
            "moe_normalize_expert_weights": None,
            "ffn_act_fn": {"name": "gelu"},
        },
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
    "arcee": {**LLAMA, **GROUPED, "model_type": "arcee", "hidden_act": "relu2"},
    "arcee-biased": {
        **LLAMA,
        "model_type": "arcee",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "rope_scaling": YARN_ROPE,
        "tie_word_embeddings": True,
    },
    "cohere": {**LLAMA, **GROUPED, "model_type": "cohere", "logit_scale": 0.3},
    "cohere-normed": {
        **LLAMA,
        **GROUPED,
        "model_type": "cohere",
        "use_qk_norm": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "cohere2": {**LLAMA, **GROUPED, "model_type": "cohere2", "sliding_window": 16, "num_hidden_layers": 4},
    "cohere2-biased": {
        **LLAMA,
        "model_type": "cohere2",
        "head_dim": 12,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 12,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "logit_scale": 0.3,
    },
    "cwm": {**LLAMA, **GROUPED, "model_type": "cwm", "head_dim": 8, "sliding_window": 16},
    "cwm-scaled": {
        **LLAMA,
        **GROUPED,
        "model_type": "cwm",
        "head_dim": 16,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 5e4,
    },
    "ernie4_5": {**LLAMA, **GROUPED, "model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5-biased": {**LLAMA, **GROUPED, "model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": False},
    "exaone4": {**LLAMA, **GROUPED, "model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 2},
    "exaone4-full": {
        **LLAMA,
        **GROUPED,
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3_ROPE,
    },
    "glm": {**LLAMA, **GROUPED, "model_type": "glm", "pad_token_id": 0, "head_dim": 8},
    "glm-biasless": {
        **LLAMA,
        **GROUPED,
        "model_type": "glm",
        "pad_token_id": 0,
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
    },
    "glm4": {**LLAMA, **GROUPED, "model_type": "glm4", "pad_token_id": 0, "head_dim": 16},
    "glm4-biasless": {
        **LLAMA,
        "model_type": "glm4",
        "pad_token_id": 0,
        "head_dim": 8,
        "attention_bias": False,
        "num_key_value_heads": 1,
    },
    "gpt_neox": {**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 5000},
    "gpt_neox-odd": {
        **NEOX,
        "num_attention_heads": 4,
        "rotary_pct": 0.25,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 40,
    },
    "gpt_neox-serial": {
        **NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_fast",
    },
    "granite": {
        **LLAMA,
        **GROUPED,
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 13.0,
    },
    "granite-biased": {
        **LLAMA,
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "logits_scaling": 8.0,
    },
    "helium": {**LLAMA, "model_type": "helium", "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "helium-biased": {
        **LLAMA,
        "model_type": "helium",
        "num_key_value_heads": 6,
        "head_dim": 8,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_dense": {**LLAMA, **GROUPED, "model_type": "hunyuan_v1_dense", "head_dim": 16},
    "hunyuan_v1_dense-alpha": {
        **LLAMA,
        **GROUPED,
        "model_type": "hunyuan_v1_dense",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    },
    "hyperclovax": {
        **LLAMA,
        **GROUPED,
        "model_type": "hyperclovax",
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.3,
        "embedding_multiplier": 10.0,
    },
    "hyperclovax-pre": {
        **LLAMA,
        "model_type": "hyperclovax",
        "use_post_norm": False,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "residual_multiplier": 0.5,
    },
    "internlm3": {**LLAMA, **GROUPED, "model_type": "internlm3", "head_dim": 16},
    "internlm3-biased": {
        **LLAMA,
        **GROUPED,
        "model_type": "internlm3",
        "head_dim": 8,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "iquestcoder": {**LLAMA, **GROUPED, "model_type": "iquestcoder", "head_dim": 8},
    "iquestcoder-biased": {
        **LLAMA,
        "model_type": "iquestcoder",
        "head_dim": 16,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "jais2": {**LLAMA, **GROUPED, "model_type": "jais2", "head_dim": 16},
    "jais2-tied": {
        **LLAMA,
        **GROUPED,
        "model_type": "jais2",
        "head_dim": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-4,
    },
    "ministral": {**LLAMA, **GROUPED, "model_type": "ministral", "head_dim": 16, "sliding_window": 12},
    "ministral-some": {
        **LLAMA,
        **GROUPED,
        "model_type": "ministral",
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "nanochat": {**LLAMA, **GROUPED, "model_type": "nanochat", "hidden_act": "relu2"},
    "nanochat-uncapped": {
        **LLAMA,
        "model_type": "nanochat",
        "attention_bias": True,
        "final_logit_softcapping": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "olmo": {**LLAMA, **GROUPED, "model_type": "olmo", "clip_qkv": 0.5},
    "olmo-biased": {**LLAMA, "model_type": "olmo", "attention_bias": True, "tie_word_embeddings": True},
    "olmo2": {**LLAMA, **GROUPED, "model_type": "olmo2"},
    "olmo2-biased": {**LLAMA, "model_type": "olmo2", "attention_bias": True, "num_key_value_heads": 3},
    "olmo3": {
        **LLAMA,
        **GROUPED,
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "rope_scaling": YARN_ROPE,
    },
    "olmo3-biased": {
        **LLAMA,
        "model_type": "olmo3",
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 12,
        "tie_word_embeddings": True,
        "rope_theta": 5e4,
    },
    "phi": {**LLAMA, **GROUPED, "model_type": "phi", "qk_layernorm": True},
    "phi-2": {**LLAMA, "model_type": "phi", "num_key_value_heads": 6, "partial_rotary_factor": 0.25},
    "seed_oss": {**LLAMA, **GROUPED, "model_type": "seed_oss", "head_dim": 16},
    "seed_oss-plain": {
        **LLAMA,
        **GROUPED,
        "model_type": "seed_oss",
        "head_dim": 8,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mellum": {**GROUPED_LLAMA, **EXPERTS, "model_type": "mellum", "head_dim": 16},
    "mellum-windowed": {
        **GROUPED_LLAMA,
        **EXPERTS,
        "model_type": "mellum",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
    "mellum-by-kind": {
        **GROUPED_LLAMA,
        **EXPERTS,
        "model_type": "mellum",
        "head_dim": 8,
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "kolibri1": KOLIBRI1,
    "kolibri1-types": {
        **KOLIBRI1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "axk1": {**DEEPSEEK, "model_type": "axk1", "n_group": 4, "topk_group": 2},
    "axk1-legacy": {
        **DEEPSEEK,
        "model_type": "axk1",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_interleave": False,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
    },
    "phimoe": {**GROUPED_LLAMA, "model_type": "phimoe", "intermediate_size": 40, "num_local_experts": 4},
    "phimoe-near": {
        **GROUPED_LLAMA,
        "model_type": "phimoe",
        "intermediate_size": 40,
        "num_local_experts": 5,
        "router_jitter_noise": 0.3,
        "sliding_window": 16,
        "max_position_embeddings": 160,
        "rope_scaling": PHIMOE_ROPE,
        "tie_word_embeddings": True,
    },
    "phimoe-long": {
        **GROUPED_LLAMA,
        "model_type": "phimoe",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "attention_bias": True,
        "lm_head_bias": True,
        "max_position_embeddings": 160,
        "rope_parameters": {**PHIMOE_ROPE, "rope_theta": 5e4},
    },
    "lfm2": {**LFM2, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {
        **{name: value for name, value in LFM2.items() if name != "block_multiple_of"},
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7,
    },
    "lfm2_moe-biased": {  # by whose biases alone the two factors of what is convolved can be told apart
        **{name: value for name, value in LFM2.items() if name != "block_multiple_of"},
        "model_type": "lfm2_moe",
        "layer_types": ["full_attention", "conv", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 0,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "conv_bias": True,
        "conv_L_cache": 4,
        "norm_topk_prob": False,
        "use_expert_bias": False,
        "tie_word_embeddings": False,
    },
    "lfm2-biased": {
        **{name: value for name, value in LFM2.items() if name != "intermediate_size"},
        "block_ff_dim": 72,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "conv_bias": True,
        "conv_L_cache": 4,
        "norm_eps": 1e-3,
        "tie_embedding": False,
    },
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next-biased": {
        **QWEN3_NEXT,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 2,
        "attention_bias": True,
        "norm_topk_prob": False,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_text-composite": {
        "model_type": "qwen3_5",
        "text_config": {
            **QWEN3_5,
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "linear_num_key_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {"model_type": "qwen3_5_vision", "hidden_size": 24},
        "image_token_id": 5,
    },
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_moe_text-composite": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **QWEN3_5_MOE,
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "linear_num_value_heads": 1,
            "linear_num_key_heads": 1,
            "attention_bias": True,
        },
        "vision_config": {"model_type": "qwen3_5_moe_vision", "hidden_size": 24},
    },
    "bamba": BAMBA,
    "bamba-biased": {
        **BAMBA,
        "mamba_n_groups": 1,
        "mamba_d_conv": 2,
        "mamba_expand": 1,
        "mamba_d_head": GROUPED_LLAMA["hidden_size"] // 8,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": [0.2, 1.5],
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": GRANITEMOEHYBRID,
    "granitemoehybrid-dense": {
        **GRANITEMOEHYBRID,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
        "mamba_d_conv": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 2e5,
    },
    "falcon_h1": FALCON_H1,
    "falcon_h1-unnormed": {
        **FALCON_H1,
        "mamba_d_ssm": None,
        "mamba_rms_norm": False,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_conv_bias": False,
        "attention_bias": True,
        "mlp_bias": True,
        "mlp_multipliers": None,
        "ssm_multipliers": None,
        "time_step_limit": [0.2, 1.5],
        "tie_word_embeddings": True,
        "rope_theta": 2e5,
    },
    "mamba": MAMBA,
    "mamba-biased": {
        **MAMBA,
        "conv_kernel": 3,
        "expand": 16,  # of which nothing is made beside an intermediate_size
        "intermediate_size": 40,
        "time_step_rank": 12,  # as many as states: what lies in another order is seen by its values alone
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-3,
        "hidden_act": "gelu",
    },
    "falcon_mamba": {**MAMBA, "model_type": "falcon_mamba", "mixer_rms_eps": 1e-4},
    "falcon_mamba-7b": {**MAMBA, "model_type": "falcon_mamba", "expand": 16, "intermediate_size": 96},
    "jamba": JAMBA,
    "jamba-biased": {
        **JAMBA,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "mamba_dt_rank": 5,
        "mamba_d_conv": 3,
        "mamba_expand": 1,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "recurrent_gemma": RECURRENT_GEMMA,
    "recurrent_gemma-biased": {
        **RECURRENT_GEMMA,
        "block_types": ["attention", "recurrent"],
        "conv1d_width": 2,
        "attention_bias": True,
        "hidden_activation": "silu",
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.75},
        "tie_word_embeddings": False,
    },
    "rwkv": RWKV,
    "rwkv-rescaled": {
        **RWKV,
        "num_hidden_layers": 4,
        "rescale_every": 2,
        "intermediate_size": 70,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": True,
    },
    "mamba2": MAMBA2_ALONE,
    "mamba2-narrow": {
        **MAMBA2_ALONE,
        "n_groups": 8,
        "state_size": 10,  # all groups' states are not as many as the channels: another order has other shapes
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-3,
        "hidden_act": "gelu",
    },
    "nemotron_h": NEMOTRON_H,
    "nemotron_h-latent": {**NEMOTRON_H, "moe_latent_size": 24, "mlp_bias": True, "num_experts_per_tok": 3},
    "nemotron_h-dense": {
        **{name: value for name, value in NEMOTRON_H.items() if name != "layers_block_type"},
        "hybrid_override_pattern": "*-M",
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "time_step_min": 0.3,
        "mlp_hidden_act": "gelu",
    },
    "zamba2": ZAMBA2,
    "zamba2-adapted": {
        **ZAMBA2,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "rope_theta": 2e5,
        "add_bias_linear": True,
        "time_step_min": 0.3,
        "mamba_ngroups": 1,
        "mamba_d_conv": 3,
        "mamba_expand": 1,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "llama4_text": LLAMA4,
    "llama4_text-dense": {
        **LLAMA4,
        "moe_layers": [1],
        "use_qk_norm": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_experts_per_tok": 2,
        "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention", "full_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1, 0],
    },
    "llama4_text-three": {
        **LLAMA4,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 3,
        "attn_scale": 0.4,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 2e5,
    },
    "llama4_text-composite": {
        "model_type": "llama4",
        "text_config": LLAMA4,
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 24},
    },
    "apertus": {**GROUPED_LLAMA, "model_type": "apertus"},
    "apertus-plain": {
        **GROUPED_LLAMA,
        "model_type": "apertus",
        "hidden_act": "relu2",
        "attention_bias": True,
        "num_key_value_heads": None,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 2e5,
    },
    "ministral3": {
        **GROUPED_LLAMA,
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            **YARN_ROPE,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e5,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "ministral3-windowed": {
        **GROUPED_LLAMA,
        "model_type": "ministral3",
        "head_dim": 8,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "proportional",
            "original_max_position_embeddings": 24,
            "llama_4_scaling_beta": 0.7,
        },
    },
    "aria_text": {**GROUPED_LLAMA, **ARIA},
    "aria_text-composite": {
        "model_type": "aria",
        "text_config": {
            **GROUPED_LLAMA,
            **ARIA,
            "moe_num_experts": 5,
            "moe_topk": 3,
            "moe_num_shared_experts": 1,
            "attention_bias": True,
            "head_dim": 16,
        },
        "vision_config": {"model_type": "idefics3_vision", "hidden_size": 24},
        "image_token_id": 5,
    },
    "afmoe": {
        **GROUPED_LLAMA,
        **EXPERTS,
        "model_type": "afmoe",
        "head_dim": 16,
        "num_shared_experts": 1,
        "sliding_window": 16,
        "num_hidden_layers": 4,
    },
    "afmoe-mup": {
        **GROUPED_LLAMA,
        **EXPERTS,
        "model_type": "afmoe",
        "head_dim": 8,
        "num_shared_experts": 2,
        "num_experts_per_tok": 3,
        "sliding_window": 16,
        "global_attn_every_n_layers": 2,
        "mup_enabled": True,
        "attention_bias": True,
        "route_scale": 2.5,
        "num_dense_layers": 0,
    },
    "granite_swa": {**GRANITE_SWA, "num_hidden_layers": 3},
    "granite_swa-bases": {
        **GRANITE_SWA,
        "layer_rope_theta": [0, 1e4, 5e3, 0, 1e5],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 6,
    },
    "granitemoe_swa": {
        **GRANITE_SWA,
        "model_type": "granitemoe_swa",
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "num_local_experts": 4,
        "shared_intermediate_size": 56,
    },
    "granitemoe_swa-bases": {
        **GRANITE_SWA,
        "model_type": "granitemoe_swa",
        "intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "layer_rope_theta": [0, 1e4, 5e3, 0, 1e5],
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    },
    "smollm3": {**SMOLLM3, "num_hidden_layers": 5},
    "smollm3-windowed": {
        **SMOLLM3,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 16,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "stablelm": {**LLAMA, "model_type": "stablelm", "num_attention_heads": 3, "num_key_value_heads": 3},
    "stablelm-parallel": {
        **LLAMA,
        "model_type": "stablelm",
        "qk_layernorm": True,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "starcoder2": {**LLAMA, **GROUPED, "model_type": "starcoder2", "sliding_window": 16},
    "starcoder2-plain": {
        **LLAMA,
        "model_type": "starcoder2",
        "num_key_value_heads": 6,
        "use_bias": False,
        "tie_word_embeddings": False,
        "norm_epsilon": 1e-4,
    },
    "bert": BERT,
    "bert-model": {**BERT, "architectures": ["BertModel"], "hidden_act": "relu", "type_vocab_size": 3},
    "roberta": {**BERT, "model_type": "roberta", "type_vocab_size": 1},
    "roberta-model": {
        **BERT,
        "model_type": "roberta",
        "architectures": ["RobertaModel"],
        "pad_token_id": 5,
        "hidden_act": "gelu_new",
    },
    "xlm-roberta": {**BERT, "model_type": "xlm-roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "camembert": {**BERT, "model_type": "camembert", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "distilbert": {**DISTILBERT, "tie_word_embeddings": False},
    "distilbert-model": {**DISTILBERT, "architectures": ["DistilBertModel"], "activation": "relu"},
    "t5": T5,
    "t5-gated": {
        **T5,
        "num_decoder_layers": None,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "n_positions": 256,
    },
    "bart": BART,
    "marian": {**BART, "model_type": "marian", "pad_token_id": 0, "activation_function": "swish", "decoder_layers": 3},
    "marian-two-vocabularies": {
        **BART,
        "model_type": "marian",
        "pad_token_id": 0,
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 83,
    },
    "mbart": {**BART, "model_type": "mbart", "encoder_layers": 2, "pad_token_id": 0},
    "modernbert": {**MODERNBERT, "num_hidden_layers": 4},
    "modernbert-biases": {
        **MODERNBERT,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "local_attention": 33,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        },
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        "decoder_bias": False,
        "classifier_activation": "relu",
        "tie_word_embeddings": False,
    },
    "modernbert-model": {
        **MODERNBERT,
        "architectures": ["ModernBertModel"],
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 8e4,
        "local_rope_theta": 2e4,
    },
    "modernbert-decoder": {**MODERNBERT, "model_type": "modernbert-decoder", "num_hidden_layers": 4},
    "modernbert-decoder-biases": {
        **MODERNBERT,
        "model_type": "modernbert-decoder",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 5,
        "global_attn_every_n_layers": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        },
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        "decoder_bias": False,
        "classifier_activation": "relu",
        "tie_word_embeddings": False,
    },
    "vaultgemma": {**GEMMA2, "model_type": "vaultgemma"},
    "vaultgemma-uncapped": {
        **GEMMA2,
        "model_type": "vaultgemma",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
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


DESCRIBED = {architecture_of(config).name for config in CONFIGS.values()}
"""The families that have configs above. `_variants` adds drawn ones of the others."""


def _is_telling(config: Mapping[str, Any]) -> bool:
    """Return whether mistakes show on a drawn config: it has several layers, several heads of more than one pair, a few
    shards, a context as long as the tests' texts, and no field that is not read.

    With a window of one token, transformers' cache keeps all tokens.
    """
    spec, unread = architecture_of(config).spec_and_unknown(config)
    mixers = [block.mixer("attention") for block in spec.blocks]
    sizes = {getattr(mixer, name, None) for mixer in mixers for name in ("window", "head_dim", "kv_heads")}
    large = sum(parameter.count for parameter in spec.parameters()) > 30_000
    long = spec.context_length is None or spec.context_length >= 256
    return len(mixers) > 1 and large and long and not unread and not {1, 2} & sizes


def _variants() -> list[Variant]:
    for family in [name for name in ARCHITECTURES if name not in DESCRIBED]:
        drawn = filter(_is_telling, (ARCHITECTURES[family].drawn(number) for number in itertools.count()))
        names = (family, f"{family}-1", f"{family}-2")
        CONFIGS.update(zip(names, drawn, strict=False))
    seen: set[str] = set()
    variants = []
    for name, config in CONFIGS.items():
        family = architecture_of(config).name
        variants.append(Variant(name, family, config, family not in seen))
        seen.add(family)
    return variants


VARIANTS = _variants()


_SPECS: dict[str, ModelSpec] = {}


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """gptkit's tree of a config, which is read once."""
    try:
        key = json.dumps(config)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists in lists in lists
        return architecture_of(config).spec(config)
    if key not in _SPECS:
        _SPECS[key] = architecture_of(config).spec(config)
    return _SPECS[key]


ONE_STACK = [variant for variant in VARIANTS if spec_of(variant.config).encoder is None]
"""Those of one stack of layers, which alone can be trained on texts."""
TWO_STACKS = [variant for variant in VARIANTS if variant not in ONE_STACK]
DECODERS = [variant for variant in ONE_STACK if spec_of(variant.config).causal]
"""Those that continue a text."""
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
    name = next(key for key in ("n_layer", "n_layers", "num_hidden_layers") if key in config)
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
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what is added to below is drawn by some classes
        model = auto_class(config).from_config(hf_config(config), dtype=dtype, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():  # GPT-J's tables are made in fp32 where a checkpoint is read, here in its dtype
            if module._non_persistent_buffers_set:
                (module if isinstance(module, transformers.PreTrainedModel) else model)._init_weights(module)
        for name, parameter in model.named_parameters():
            # A table of sines and cosines, and not what moves the choice of experts, which takes no gradient either.
            if not parameter.requires_grad and not name.endswith("bias"):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("correction_bias", "expert_bias")):  # little beside scores: every expert gets tokens
                parameter.copy_(0.1 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * noise)  # from where transformers starts it: Gemma adds 1 to a norm's weight itself
            elif any(part in name for part in ("wte", "wpe", "embed")):
                parameter.copy_(0.8 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        stored = model.state_dict()
        for name, buffer in model.named_buffers():  # of those that are stored: the choice of experts is moved by some
            if name in stored:
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def has_cache(reference: transformers.PreTrainedModel) -> bool:
    """Whether transformers' class keeps keys and values of earlier tokens: OpenAI's GPT computes all of them again."""
    return not {"past_key_values", "cache_params", "cache", "state"}.isdisjoint(
        inspect.signature(reference.forward).parameters
    )


def continued(reference: Any, ids: torch.Tensor, past: Any, mask: torch.Tensor | None = None) -> Any:
    """What transformers' class makes of tokens behind a cache, where it has one. Bamba's counts positions from 0 there,
    unless it is told them, as `generate` does.
    """
    told = {} if mask is None else {"attention_mask": mask}
    if reference.config.model_type in ("mamba", "mamba2", "falcon_mamba"):
        told = told if past is None else {}  # as `generate` does: Mamba's layers take masks of the tokens at hand
        name = "cache" if since("5.24") else "cache_params"
        found = reference(input_ids=ids, use_cache=True, **{name: past}, **told)
        found.past_key_values = getattr(found, name)
        return found
    if "state" in inspect.signature(reference.forward).parameters:  # RWKV's, which knows no mask
        found = reference(input_ids=ids, state=past, use_cache=True)
        found.past_key_values = found.state
        return found
    if hasattr(reference, "_setup_cache"):  # RecurrentGemma's, which keeps states itself and gives no cache back
        if past is None:
            reference._setup_cache(reference.config, len(ids), ids.device, reference.dtype)
            past = transformers.DynamicCache(config=reference.config)
        found = reference(input_ids=ids, past_key_values=past, use_cache=True, **told)
        found.past_key_values = past
        return found
    if past is not None and reference.config.model_type == "bamba":
        seen = past.get_seq_length()
        told["position_ids"] = torch.arange(seen, seen + ids.shape[1])[None]
    return reference(input_ids=ids, past_key_values=past, use_cache=True, **told)


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
