"""GGUF files of transformers models, written by the gguf package and llama.cpp's conventions, spelt out by hand.

Nothing here comes from gptkit: names and transforms are those of llama.cpp's conversion/*.py.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

LLAMA_LIKE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
BLOOM = {
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
FALCON = {**BLOOM, "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"}
NAMES = {"llama": LLAMA_LIKE, "qwen2": LLAMA_LIKE, "qwen3": LLAMA_LIKE, "gpt2": GPT2, "bloom": BLOOM, "falcon": FALCON}


def gguf_name(arch: str, name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, suffix = name.rsplit(".", 1)
    for start in ("model.layers.", "transformer.h."):
        if stem.startswith(start):
            layer, rest = stem.removeprefix(start).split(".", 1)
            return f"blk.{layer}.{NAMES[arch][rest]}.{suffix}"
    return f"{NAMES[arch][stem]}.{suffix}"


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """conversion/llama.py: rotary pairs side by side."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def kv_heads(config: Any) -> int:
    """What the converter finds: of old Falcon configs, one a model."""
    if config.model_type == "falcon":
        shared = config.new_decoder_architecture
        return config.num_kv_heads if shared else (1 if config.multi_query else config.num_attention_heads)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def gguf_tensor(arch: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """A transformers tensor as the converter writes it."""
    heads, groups = config.num_attention_heads, kv_heads(config)
    if arch == "llama" and ".q_proj." in name:
        return permute(tensor, heads)
    if arch == "llama" and ".k_proj." in name:
        return permute(tensor, groups)
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if "query_key_value" in name:
        head_dim = config.hidden_size // heads
        each = tensor.view(groups, heads // groups + 2, head_dim, *tensor.shape[1:])
        q, k, v = each[:, :-2], each[:, [-2]], each[:, [-1]]
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)])
    return tensor


def tensors_of(arch: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """All tensors of a file."""
    config = model.config
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found[gguf_name(arch, name)] = gguf_tensor(arch, name, tensor, config).contiguous().numpy()
    if (freqs := rope_freqs(config)) is not None:
        found["rope_freqs.weight"] = freqs
    return found


def rope_freqs(config: Any) -> np.ndarray | None:
    """conversion/llama.py, generate_extra_tensors."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    freqs = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    found = []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < context / high:
            found.append(1)
        elif wavelength > context / low:
            found.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def write_gguf(
    path: Path,
    arch: str,
    model: transformers.PreTrainedModel,
    quants: dict[str, gguf.GGMLQuantizationType] | None = None,
    change: Any = None,
) -> dict[str, np.ndarray]:
    """Write the model; `quants` by the end of a tensor's name; `change` edits tensors and writer just before."""
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, arch, model.config)
    tensors = tensors_of(arch, model)
    if change is not None:
        change(tensors, writer)
    for name, array in tensors.items():
        kind = next((kind for end, kind in (quants or {}).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """What set_gguf_parameters writes for the family."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads(config))
    if arch in ("gpt2", "bloom", "falcon"):
        writer.add_context_length({"gpt2": getattr(config, "n_positions", 0), "bloom": hidden, "falcon": 2048}[arch])
        writer.add_feed_forward_length(4 * hidden)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        if arch == "falcon":
            writer.add_tensor_data_layout("jploski")
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if head_dim != hidden // heads or arch == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
