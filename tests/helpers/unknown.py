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
        return {name: small(each, name, count) for name, each in value.items()}
    if isinstance(value, list):
        return [small(each, key) for each in (value[:LAYERS] if len(value) == layers else value)]
    if type(value) is not int:
        return value
    if key.endswith("token_id"):
        return min(value, 5)
    if "key_value_heads" in key or "kv_heads" in key or "per_tok" in key or "top_k" in key:
        return min(value, 2)
    return next((min(value, size) for word, size in SMALL.items() if word in key), value)


def tiny(kind: str) -> Any:
    """A model of that type with random weights, None where transformers makes none of sizes cut down like this."""
    found = CAUSAL[kind]
    try:
        config = transformers.AutoConfig.for_model(**small(CONFIG_MAPPING[kind]().to_dict()))
        made = getattr(transformers, found if isinstance(found, str) else found[0])
        with torch.device("meta"):
            model = made(config)
        if sum(each.numel() for each in model.parameters()) > MOST:
            return None
        model = made(config)
    except Exception:  # whatever its own checks say
        return None
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
