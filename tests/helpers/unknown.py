"""Tiny models of the types that transformers has and no family here is of."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gptkit.architectures import BY_MODEL_TYPE

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
UNKNOWN = sorted(set(CAUSAL) - set(BY_MODEL_TYPE))
LAYERS = 2
SMALL = {"layer": LAYERS, "vocab_size": 97, "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate": 48}
SMALL |= {"ffn": 48, "d_ff": 48, "head_dim": 8, "head": 4, "experts": 4, "positions": 64, "state": 4, "rank": 4}
MOST = 3_000_000
"""Parameters of a model that is still tiny."""


def small(value: Any, key: str = "", layers: int = 0) -> Any:
    """A config's value, sizes cut down; lists with an entry a layer are cut to the layers."""
    if isinstance(value, dict):
        count = next((value[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if value.get(name)), 0)
        return {name: small(each, str(name), count) for name, each in value.items()}
    if isinstance(value, list):
        return [small(each, key) for each in (value[:LAYERS] if len(value) == layers else value)]
    if type(value) is not int:
        return value
    if key.endswith("token_id"):
        return min(value, 5)
    if "key_value_heads" in key or "kv_heads" in key or "per_tok" in key or "top_k" in key:
        return min(value, 2)
    return next((min(value, size) for word, size in SMALL.items() if word in key), value)


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma4": {
        "text_config.per_layer_config": {"1": {"head_dim": 16}},
        "text_config.vocab_size_per_layer_input": 97,
        "vision_config": small(CONFIG_MAPPING["gemma4_vision"]().to_dict()),
    },
    "gemma4_unified": {
        "text_config.per_layer_config": {"1": {"head_dim": 16}},
        "vision_config": small(CONFIG_MAPPING["gemma4_unified_vision"]().to_dict())
        | {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
    },
    "llama4": {"vision_config.vision_output_dim": 32, "vision_config.projector_output_dim": 32},
    "llava": {},
    "mistral3": {},
    "qwen2_vl": {
        "text_config.rope_parameters": _ROPE,
        "vision_config.embed_dim": 32,
        "vision_config.depth": 2,
        "vision_config.num_heads": 4,
    },
    "qwen2_5_vl": {
        "text_config.rope_parameters": _ROPE,
        "vision_config.out_hidden_size": 32,
        "vision_config.depth": 2,
        "vision_config.num_heads": 4,
    },
    "qwen3_vl": {"vision_config.depth": 2},
    "smolvlm": {"scale_factor": 2, "vision_config.image_size": 28, "vision_config.patch_size": 14},
    "idefics3": {"scale_factor": 2, "vision_config.image_size": 28, "vision_config.patch_size": 14},
    **{key: {"text_config.layer_types": ["linear_attention", "full_attention"]} for key in ("qwen3_5", "qwen3_5_moe")},
}
"""Types of models of images and text, with what must be said to cut them down."""


def composite(kind: str, **fields: Any) -> Any:
    """A model of images and text with random weights."""
    found = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    data = small(CONFIG_MAPPING[kind]().to_dict())
    for place, value in {**COMPOSITES.get(kind, {}), **fields}.items():
        part, _, name = place.rpartition(".")
        (data[part] if part else data)[name] = value
    return filled(getattr(transformers, found), transformers.AutoConfig.for_model(**data))


def tiny(kind: str) -> Any:
    """A model of that type with random weights, None where transformers makes none of sizes cut down like this."""
    found = CAUSAL[kind]
    try:
        config = transformers.AutoConfig.for_model(**small(CONFIG_MAPPING[kind]().to_dict()))
        made = getattr(transformers, found if isinstance(found, str) else found[0])
        with torch.device("meta"):
            model = made(config)
        return filled(made, config) if sum(each.numel() for each in model.parameters()) <= MOST else None
    except Exception:  # whatever its own checks say
        return None


def filled(kind: Any, config: Any) -> Any:
    """A model of that class with random weights."""
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(generator=generator) if each.is_floating_point() else None
    return model


def saved(kind: str, folder: Path) -> Any:
    """The same, saved there by transformers; None where it does not save it."""
    model = tiny(kind)
    if model is not None:
        try:
            model.save_pretrained(folder)
        except Exception:
            return None
    return model
