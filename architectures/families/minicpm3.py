"""MiniCPM 3 (OpenBMB 2024, 2404.06395): a dense model with DeepSeek-V2's latent attention, and with multipliers on the
embedding, the branches and the final hidden states. RoPE pairs the two halves of a head.

Source: transformers models/minicpm3/{configuration,modeling}_minicpm3.py.
"""

import math

from ...components import ModelSpec
from ..config import ConfigReader
from ..draws import ODD, among
from ..fields import MLP_BIAS, Field, with_defaults
from ..latent import KNOWN, LATENT_FIELDS, LATENT_LEAVES, LatentDecoder


def _value_dim(config: ConfigReader, name: str, _: None) -> int:
    """Read the width of a value head. If it is null, the heads together are as wide as the hidden states."""
    hidden, heads = config.integer("hidden_size", 2560), config.integer("num_attention_heads", 40)
    width = config.optional_integer(name) or hidden // heads
    if not width:
        raise config.fail("hidden_size", hidden, "at least num_attention_heads, since v_head_dim is null")
    return width


def _branches(config: ConfigReader, name: str, default: float) -> float:
    """Read the factor of branches. In config.json, it is multiplied by the root of the number of layers."""
    root = math.sqrt(config.layers("num_hidden_layers", 62))
    return (root if config.raw(name, default) is None else config.number(name, default)) / root


def _scale_depth(spec: ModelSpec) -> float:
    """Return the shortest number for which `_branches` gives the factor of the tree."""
    root, multiplier = math.sqrt(len(spec.blocks)), spec.blocks[0].sublayers[0].multiplier
    tried = (float(f"{multiplier * root:.{digits}g}") for digits in range(1, 18))
    return next((scale for scale in tried if scale / root == multiplier), multiplier * root)


def _logits(config: ConfigReader, name: str, default: int) -> float:
    """Read the factor of the logits. In config.json, it is multiplied by the hidden size."""
    hidden, base = config.integer("hidden_size", 2560), config.optional_integer(name, default)
    return 1 / (hidden / (hidden if base is None else base))


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
        "v_head_dim": Field("attention.value_dim", None, _value_dim, draw=among(None, *ODD)),
        "scale_emb": Field("embedding.multiplier", 12.0),
        "scale_depth": Field("branch.multiplier", 1.4, _branches, of=_scale_depth, draw=among(None, 1.4, 2)),
        "dim_model_base": Field(
            "head.multiplier",
            256,
            _logits,
            of=lambda spec: max(round(spec.has_head().multiplier * spec.hidden_size), 1),
            draw=among(None, 7, 256),
        ),
        "mlp_bias": MLP_BIAS,
    },
    fixed={"embedding.scaling": "rounded", "head.scaling": "divide states"},
    kv_heads=40,
    whole_heads=True,
    interleaved=False,
)


_MINICPM3 = _DECODER.architecture(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    LATENT_LEAVES,
    released="2024-09",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    irrelevant={**KNOWN, "logits_scaling": "computed from hidden_size and dim_model_base"},
)
