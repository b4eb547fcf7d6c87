"""MiniCPM 3 (OpenBMB 2024, 2404.06395): a dense model with DeepSeek-V2's latent attention, and with multipliers on the
embedding, the branches and the final hidden states. RoPE pairs the two halves of a head.

Source: transformers models/minicpm3/{configuration,modeling}_minicpm3.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from ...components import ModelSpec
from ..config import ConfigReader
from ..draws import ODD, Config, Random, sometimes
from ..fields import MLP_BIAS, Field, with_defaults
from ..latent import KNOWN, LATENT_FIELDS, LATENT_LEAVES, LatentDecoder


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes. If a field is null, it is computed from other sizes."""
    layers, hidden = config.layers("num_hidden_layers", 62), config.integer("hidden_size", 2560)
    value_dim = config.optional_integer("v_head_dim")
    if value_dim is None:
        value_dim = hidden // config.integer("num_attention_heads", 40)
    if not value_dim:
        raise config.fail("hidden_size", hidden, "at least num_attention_heads, since v_head_dim is null")
    depth, base = config.raw("scale_depth", 1.4), config.optional_integer("dim_model_base", 256)
    depth = math.sqrt(layers) if depth is None else config.number("scale_depth", 1.4)
    return _DECODER.read(
        config,
        attention__value_dim=value_dim,
        branch__multiplier=depth / math.sqrt(layers),
        head__multiplier=1 / (hidden / (hidden if base is None else base)),
    )


def _written(spec: ModelSpec) -> Mapping[str, Any]:
    """Return the config fields of the multipliers and of the width of a value head."""
    root, multiplier = math.sqrt(len(spec.blocks)), spec.blocks[0].sublayers[0].multiplier
    tried = (float(f"{multiplier * root:.{digits}g}") for digits in range(1, 18))
    return {
        "v_head_dim": spec.blocks[0].attention.value_dim,  # type: ignore[union-attr]
        "scale_depth": next((scale for scale in tried if scale / root == multiplier), multiplier * root),
        "dim_model_base": max(round(spec.has_head().multiplier * spec.hidden_size), 1),
    }


_DECODER = LatentDecoder(
    {
        **with_defaults(
            {name: field for name, field in LATENT_FIELDS.items() if name != "v_head_dim"},
            vocab=73448,
            hidden=2560,
            intermediate=6400,
            layers=62,
            heads=40,
            context=32768,
            eps=1e-5,
            tied=True,
            kv_lora_rank=256,
            q_lora_rank=768,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
        ),
        "scale_emb": Field("embedding.multiplier", 12.0),
        "mlp_bias": MLP_BIAS,
    },
    fixed={"embedding.scaling": "rounded", "head.scaling": "divide states"},
    kv_heads=40,
    whole_heads=True,
    interleaved=False,
    written=_written,
)


def _draw(chosen: Random) -> Config:
    scales = {"scale_depth": chosen.choice((None, 1.4, 2)), "dim_model_base": chosen.choice((None, 7, 256))}
    return {**_DECODER.draw(chosen, {}), **sometimes(chosen, scales), "v_head_dim": chosen.choice((None, *ODD))}


_MINICPM3 = _DECODER.architecture(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    LATENT_LEAVES,
    released="2024-09",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    read=_read,
    draw=_draw,
    irrelevant={**KNOWN, "logits_scaling": "computed from hidden_size and dim_model_base"},
)
