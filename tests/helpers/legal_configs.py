"""Random configs that transformers' classes take, family by family: odd widths and counts, and every option there is.

What is drawn may be small, odd or useless; nothing of it is wrong, so gptkit computes it all.
"""

import math
import random
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.decoder import Decoder
from gptkit.architectures.fields import ACTIVATIONS
from helpers.families import VOCAB, hf_config

Config = dict[str, Any]

ODD = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 32, 33)
EVEN = (2, 4, 6, 8, 10, 12, 16, 18, 22, 32, 34)
SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 32)
"""transformers refuses odd heads above 4 wherever a config may have rotary positions."""
CONTEXT = (16, 40, 256)
PARTS = (0, 0.25, 0.4, 0.75, 1.0)


def sometimes(chosen: random.Random, fields: Config) -> Config:
    """Each of the fields or not."""
    return {name: value for name, value in fields.items() if chosen.random() < 0.5}


def scaling(chosen: random.Random, head_dim: int) -> Config:
    """Rotary positions of any type."""
    pick = chosen.choice
    pairs = head_dim // 2
    kinds: dict[str, Config] = {
        "default": sometimes(chosen, {"partial_rotary_factor": pick(PARTS)}),
        "linear": {"factor": pick((1.0, 2, 4.5))},
        "dynamic": {"factor": pick((1.0, 2.0, 3.5))},
        "yarn": {"factor": pick((1.0, 4.0)), "original_max_position_embeddings": pick((8, 32))}
        | sometimes(chosen, {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": pick((True, False))})
        | pick(({}, {"mscale": 0.7, "mscale_all_dim": 1.3})),
        "longrope": {
            "short_factor": [chosen.uniform(0.5, 2) for _ in range(pairs)],
            "long_factor": [chosen.uniform(1, 9) for _ in range(pairs)],
            "original_max_position_embeddings": pick((8, 32)),
        }
        | sometimes(chosen, {"factor": pick((1.0, 4.0)), "attention_factor": 1.2}),
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": pick((2.0, 4.0))}
        | {"original_max_position_embeddings": pick((16, 64))},
        "proportional": {"partial_rotary_factor": pick(PARTS)} | sometimes(chosen, {"factor": 2.0}),
    }
    kind = pick([each for each in kinds if each != "dynamic" or head_dim > 2])
    return {"rope_type": kind, **kinds[kind]}


def rope(chosen: random.Random, head_dim: int) -> Config:
    """Rotary fields in the form of transformers 4 or 5, of any type."""
    fields, theta = scaling(chosen, head_dim), chosen.choice((1e4, 5e5, 37.5))
    if chosen.random() < 0.5:
        return {"rope_parameters": {**fields, "rope_theta": theta}}
    plain = fields["rope_type"] == "default" and chosen.random() < 0.5
    return {"rope_theta": theta, "rope_scaling": None if plain else fields}


def activation(chosen: random.Random) -> str:
    return chosen.choice(list(ACTIVATIONS))


def gpt2(chosen: random.Random) -> Config:
    heads = chosen.choice((1, 2, 3, 5, 9))
    found = {
        "n_positions": 256,
        "n_embd": heads * chosen.choice(ODD),
        "n_layer": chosen.choice((1, 2)),
        "n_head": heads,
    }
    return found | sometimes(
        chosen,
        {
            "n_inner": chosen.choice((1, 7, 33, 64)),
            "activation_function": activation(chosen),
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
    )


def llama_like(chosen: random.Random, own_dim: bool = True) -> Config:
    """What all of them have. `own_dim`: heads need not share out the width."""
    kv_heads, group = chosen.choice((1, 2, 3, 5)), chosen.choice((1, 1, 2, 3))
    head_dim, context = chosen.choice(EVEN), chosen.choice(CONTEXT)
    stated = own_dim and chosen.random() < 0.5
    heads = kv_heads * group
    found = {
        "hidden_size": chosen.choice(ODD) * 3 if stated else heads * head_dim,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        **rope(chosen, head_dim),
    }
    return {
        **found,
        **({"head_dim": head_dim} if stated else {}),
        **sometimes(chosen, {"hidden_act": activation(chosen), "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    }


def llama(chosen: random.Random) -> Config:
    found = llama_like(chosen, own_dim=False)
    head_dim = found["hidden_size"] // found["num_attention_heads"]
    more = sometimes(chosen, {"attention_bias": True, "mlp_bias": True, "head_dim": head_dim})
    return {**found, **more}


def window(chosen: random.Random) -> int | None:
    return chosen.choice((None, 1, 2, 3, 8, 17, 300))


def mistral(chosen: random.Random) -> Config:
    return llama_like(chosen) | {"sliding_window": window(chosen)}


def mixtral(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes, and scales no head_dim of None."""
    found, experts = llama_like(chosen), chosen.choice((1, 2, 3, 5))
    width = window(chosen)
    types = ["full_attention" if width is None else "sliding_attention"] * found["num_hidden_layers"]
    return {
        "head_dim": found["hidden_size"] // found["num_attention_heads"],
        **found,
        **sometimes(chosen, {"layer_types": types}),
        "hidden_size": chosen.choice((8, 24, 40, 64)),
        "intermediate_size": chosen.choice((8, 24, 40)),
        "sliding_window": width,
        "num_local_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
    }


def qwen2(chosen: random.Random) -> Config:
    found = llama_like(chosen)
    layers = found["num_hidden_layers"]
    if chosen.random() < 0.5:
        kinds = ("full_attention", "sliding_attention")
        where = {"layer_types": [chosen.choice(kinds) for _ in range(layers)]}
    else:
        where = {"max_window_layers": chosen.randint(0, layers)}
    if chosen.random() < 0.3:
        return found | {"use_sliding_window": False, "sliding_window": 4}
    return found | {"use_sliding_window": True, "sliding_window": chosen.choice((1, 2, 3, 8, 17, 300))} | where


def qwen3(chosen: random.Random) -> Config:
    found = qwen2(chosen)
    if "head_dim" not in found:  # whose default is 128
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return found | sometimes(chosen, {"attention_bias": True})


def bloom(chosen: random.Random) -> Config:
    heads = chosen.choice((1, 2, 3, 5, 8, 9))
    found = {"hidden_size": heads * chosen.choice(ODD), "n_layer": chosen.choice((1, 2)), "n_head": heads}
    return found | sometimes(
        chosen,
        {
            "apply_residual_connection_post_layernorm": True,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
            "seq_length": 64,
        },
    )


def falcon(chosen: random.Random) -> Config:
    kv_heads, group = chosen.choice((1, 2, 3, 5)), chosen.choice((1, 2, 3))
    alibi = chosen.random() < 0.4
    head_dim, context = chosen.choice(SMALL if alibi else EVEN), chosen.choice(CONTEXT)
    heads = kv_heads * group
    found: Config = {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": chosen.choice((1, 2)),
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "alibi": alibi,
    }
    form = chosen.choice(("grouped", "one", "all"))
    if form == "grouped":
        norms = chosen.choice((1, 2, None))
        found |= {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    else:
        found |= {"multi_query": form == "one", "parallel_attn": chosen.choice((True, False))}
    if not alibi:
        found |= rope(chosen, head_dim)
    return found | sometimes(
        chosen,
        {
            "bias": True,
            "ffn_hidden_size": chosen.choice((1, 7, 33, 64)),
            "activation": activation(chosen),
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
    )


def gemma(chosen: random.Random) -> Config:
    """A width that the heads share out, as transformers wants it, and heads of another."""
    found = llama_like(chosen, own_dim=False)
    heads = found["num_attention_heads"]
    found |= {"head_dim": found["hidden_size"] // heads, "hidden_size": heads * chosen.choice(ODD)}
    return found | sometimes(chosen, {"attention_bias": True, "tie_word_embeddings": False})


def gemma2(chosen: random.Random) -> Config:
    found = gemma(chosen)
    if "hidden_act" in found:
        found["hidden_activation"] = found.pop("hidden_act")
    kinds = ("full_attention", "sliding_attention")
    return found | sometimes(
        chosen,
        {
            "layer_types": [chosen.choice(kinds) for _ in range(found["num_hidden_layers"])],
            "sliding_window": chosen.choice((1, 2, 3, 8, 17, 300)),
            "query_pre_attn_scalar": chosen.choice((1, 16, 24, 144)),
            "attn_logit_softcapping": chosen.choice((None, 0.7, 5.0, 50.0)),
            "final_logit_softcapping": chosen.choice((None, 0.5, 3.0, 30.0)),
        },
    )


def gemma3(chosen: random.Random) -> Config:
    """Rotary positions by kind of layer, or those of all layers and the base of local ones."""
    found = gemma2(chosen)
    for name in ("rope_parameters", "rope_scaling", "rope_theta", "attn_logit_softcapping"):
        found.pop(name, None)
    head_dim = found["head_dim"]
    if chosen.random() < 0.5:
        bases = {"full_attention": 5e4, "sliding_attention": 37.5}
        by_kind = {kind: {**scaling(chosen, head_dim), "rope_theta": base} for kind, base in bases.items()}
        for fields in by_kind.values():
            fields.pop("truncate", None)  # where it is false gptkit refuses it, and transformers does not see it
        found["rope_parameters"] = by_kind
    else:
        fields = scaling(chosen, head_dim)
        fields.pop("truncate", None)
        found |= {"rope_scaling": fields}
        found |= sometimes(chosen, {"rope_theta": 5e4, "rope_local_base_freq": 37.5})
    return found | ({} if "layer_types" in found else sometimes(chosen, {"sliding_window_pattern": 2}))


def gemma3n(chosen: random.Random) -> Config:
    """Streams, residuals of low rank, sparse units, inputs of layers, and keys of earlier ones."""
    found = gemma3(chosen)
    for name in ("sliding_window_pattern", "query_pre_attn_scalar"):
        found.pop(name, None)
    layers, streams = found["num_hidden_layers"], chosen.choice((2, 3, 5))
    kinds = [chosen.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    found |= {
        "layer_types": kinds,
        "final_logit_softcapping": chosen.choice((0.5, 3.0, 30.0)),
        "hidden_size_per_layer_input": chosen.choice((1, 3, 8)),
        "vocab_size_per_layer_input": chosen.choice((VOCAB - 5, VOCAB, VOCAB + 3)),
        "laurel_rank": chosen.choice((1, 3, 8)),
        "altup_num_inputs": streams,
        "altup_active_idx": chosen.randrange(streams),
        "num_kv_shared_layers": int(layers > 1 and {*kinds[:-1]} == {*kinds}),
    }
    shares = {"activation_sparsity_pattern": [chosen.choice((0.0, 0.25, 0.95)) for _ in range(layers)]}
    units = {"intermediate_size": [chosen.choice((16, 33)) for _ in range(layers)]}
    return found | sometimes(chosen, {**shares, **units})


def gemma4(chosen: random.Random) -> Config:
    """Heads and rotary positions by kind of layer, keys of earlier layers, and inputs of layers."""
    found = gemma(chosen)
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        found.pop(name, None)
    if "hidden_act" in found:
        found["hidden_activation"] = found.pop("hidden_act")
    width, kinds = chosen.choice((0, 1, 3, 8)), ("full_attention", "sliding_attention")
    types = [chosen.choice(kinds) for _ in range(chosen.choice((1, 2, 3, 4)) - 1)]
    full = chosen.choice(EVEN)
    found |= {
        "num_hidden_layers": len(types) + 1,
        "layer_types": [*types, "full_attention"],
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": chosen.choice((VOCAB, VOCAB + 3)),
        "global_head_dim": full,
        "attention_k_eq_v": chosen.random() < 0.3,
        "sliding_window": chosen.choice((2, 3, 8, 17, 300)),
        **sometimes(chosen, {"final_logit_softcapping": chosen.choice((None, 0.5, 30.0)), "use_double_wide_mlp": True}),
    }
    if found["attention_k_eq_v"]:
        found |= sometimes(chosen, {"num_global_key_value_heads": 1})
    if not width and chosen.random() < 0.5:
        found |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": chosen.choice((1, 3, 5))}
        # transformers' product of all experts takes rows of whole vectors alone.
        found |= {"moe_intermediate_size": chosen.choice((16, 48)), "hidden_size": 8 * found["num_attention_heads"]}
    if width and {*types} == {*types, "full_attention"}:
        found["num_kv_shared_layers"] = 1
    if chosen.random() < 0.5:
        dims = {"full_attention": (5e4, full), "sliding_attention": (37.5, found["head_dim"])}
        found["rope_parameters"] = {k: {**scaling(chosen, dim), "rope_theta": base} for k, (base, dim) in dims.items()}
        for fields in found["rope_parameters"].values():
            fields.pop("truncate", None)
            if fields["rope_type"] == "longrope":  # transformers' config class fails where heads differ in width
                fields.clear()
                fields |= {"rope_type": "linear", "factor": 4.5, "rope_theta": 5e4}
    return found


def gemma4_unified(chosen: random.Random) -> Config:
    """Gemma 4 without experts and inputs of layers."""
    found = gemma4(chosen)
    names = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
    return {name: each for name, each in found.items() if name not in names and "per_layer_input" not in name}


def latent(chosen: random.Random) -> Config:
    """What families with latent attention have; the rotary key's width is for a whole "head" of them."""
    heads, rope_dim = chosen.choice((1, 2, 3, 5)), chosen.choice(EVEN)
    fields = rope(chosen, rope_dim)
    for scaled in (fields.get("rope_scaling"), fields.get("rope_parameters")):
        if scaled and scaled["rope_type"] not in ("default", "llama3") and chosen.random() < 0.5:
            scaled |= {"mscale_all_dim": 1.3, "factor": scaled.get("factor", 2.0)}
        if scaled and scaled["rope_type"] != "proportional":
            scaled.pop("partial_rotary_factor", None)
    return {
        "hidden_size": chosen.choice(ODD) * 3,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": chosen.choice(CONTEXT),
        "kv_lora_rank": chosen.choice(ODD),
        "q_lora_rank": chosen.choice((None, *ODD)),
        "qk_nope_head_dim": chosen.choice((0, *ODD)),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": chosen.choice(ODD),
        **fields,
        **sometimes(
            chosen,
            {
                "attention_bias": True,
                "hidden_act": activation(chosen),
                "rms_norm_eps": 1e-3,
                "tie_word_embeddings": chosen.random() < 0.5,
            },
        ),
    }


def youtu(chosen: random.Random) -> Config:
    return latent(chosen) | sometimes(chosen, {"rope_interleave": False})


def minicpm3(chosen: random.Random) -> Config:
    found = latent(chosen)
    more = {
        "v_head_dim": None,
        "mlp_bias": True,
        "scale_emb": chosen.choice((1, 12, 3.3)),
        "scale_depth": chosen.choice((None, 1.4, 2)),
        "dim_model_base": chosen.choice((None, 7, 256)),
    }
    return found | sometimes(chosen, more) | {"hidden_size": found["num_attention_heads"] * chosen.choice(ODD)}


def deepseek(chosen: random.Random) -> Config:
    """Mixtures by groups behind dense layers; torch's grouped product wants rows of whole 16 bytes."""
    groups, each = chosen.choice((1, 2, 4)), chosen.choice((2, 3))
    best = chosen.randint(1, groups)
    found = latent(chosen)
    return {
        **found,
        "hidden_size": chosen.choice((8, 24, 40, 64)),
        "moe_intermediate_size": chosen.choice((8, 24, 40)),
        "n_routed_experts": groups * each,
        "num_experts_per_tok": chosen.randint(1, best * each),
        "n_shared_experts": chosen.choice((1, 2)),
        "n_group": groups,
        "topk_group": best,
        **sometimes(chosen, {"routed_scaling_factor": chosen.choice((0.5, 2.5))}),
    }


def deepseek_v2(chosen: random.Random) -> Config:
    """transformers asks for widths that heads share out, and for neighbours that begin at even places."""
    found = deepseek(chosen) | sometimes(chosen, {"mlp_bias": True})
    found["hidden_size"] *= found["num_attention_heads"]
    even = {name: found[name] // 2 * 2 for name in ("kv_lora_rank", "qk_nope_head_dim")}
    method = chosen.choice(("greedy", "group_limited_greedy"))
    if method == "greedy":
        found |= {"n_group": None, "topk_group": None}
    first = {"first_k_dense_replace": chosen.randint(0, found["num_hidden_layers"])}
    return found | even | {"kv_lora_rank": max(even["kv_lora_rank"], 2), "topk_method": method} | first


def deepseek_v3(chosen: random.Random) -> Config:
    found = deepseek(chosen)
    found["first_k_dense_replace"] = chosen.randint(0, found["num_hidden_layers"])
    return found | sometimes(chosen, {"rope_interleave": False, "norm_topk_prob": False})


def glm4_moe_lite(chosen: random.Random) -> Config:
    found = deepseek(chosen)
    types = [chosen.choice(("dense", "sparse")) for _ in range(found["num_hidden_layers"])]
    return found | sometimes(chosen, {"rope_interleave": False, "norm_topk_prob": False, "mlp_layer_types": types})


def axk1(chosen: random.Random) -> Config:
    return glm4_moe_lite(chosen) | {"q_lora_rank": chosen.choice(ODD)}


def ministral3(chosen: random.Random) -> Config:
    """Rotary parameters of any type say what queries grow by, or none are said."""
    found = mistral(chosen)
    head_dim = found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    grows = {"original_max_position_embeddings": chosen.choice((8, 32)), "llama_4_scaling_beta": 0.3}
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        found.pop(name, None)
    said = {**scaling(chosen, head_dim), **grows, "rope_theta": chosen.choice((1e4, 37.5))}
    return {**found, **sometimes(chosen, {"rope_parameters": said})}


def apertus(chosen: random.Random) -> Config:
    found = llama_like(chosen, own_dim=False)
    if "rope_theta" in found:  # which says nothing without the parameters
        found.pop("rope_scaling", None), found.pop("rope_theta")
    return {**found, **sometimes(chosen, {"attention_bias": True, "hidden_act": "xielu"})}


def phimoe(chosen: random.Random) -> Config:
    """LongRoPE whose factors are the same behind the original context, where transformers takes the short ones."""
    found = mixtral(chosen)
    for name in ("rope_parameters", "rope_scaling", "rope_theta", "layer_types", "head_dim"):
        found.pop(name, None)
    heads = found["num_attention_heads"]
    found["hidden_size"] = heads * chosen.choice((8, 16, 24))
    pairs = found["hidden_size"] // heads // 2
    factors, scale = [chosen.uniform(0.5, 2) for _ in range(pairs)], chosen.choice((1.0, 1.2))
    long = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 4.0}
    long |= {"original_max_position_embeddings": 8, "short_mscale": scale, "long_mscale": scale}
    more = {"rope_parameters": long, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}
    experts = {"num_local_experts": chosen.choice((2, 3, 5)), "num_experts_per_tok": 2}
    return {**found, **experts, **sometimes(chosen, more)}


def llama4_text(chosen: random.Random) -> Config:
    found, experts = llama_like(chosen), chosen.choice((1, 2, 3, 5))
    layers, kinds = found["num_hidden_layers"], ("full_attention", "chunked_attention")
    more = {
        "layer_types": [chosen.choice(kinds) for _ in range(layers)],
        "no_rope_layers": [chosen.choice((0, 1)) for _ in range(layers)],
        "moe_layers": [layer for layer in range(layers) if chosen.random() < 0.5],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attn_scale": 0.4,
        "attention_bias": True,
    }
    return {
        "head_dim": found["hidden_size"] // found["num_attention_heads"],
        **found,
        "intermediate_size": chosen.choice((16, 48, 64)),
        "intermediate_size_mlp": chosen.choice((1, 7, 33)),
        "hidden_size": chosen.choice((16, 32, 48)),
        "num_local_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "attention_chunk_size": chosen.choice((2, 3, 8, 17, 300)),
        "floor_scale": chosen.choice((1, 5, 16)),
        **sometimes(chosen, more),
    }


def mixture(chosen: random.Random) -> Config:
    """Sizes of mixtures of experts, by role: torch's grouped product wants rows of whole 16 bytes."""
    groups, width = chosen.choice((1, 1, 2)), chosen.choice((8, 24, 40))
    experts = groups * chosen.choice((2, 3))
    top_groups = chosen.randint(1, groups)
    return {
        "hidden": chosen.choice((8, 24, 40, 64)),
        "intermediate": width,
        "expert_size": width,
        "shared_size": chosen.choice((8, 24)),
        "shared_experts": chosen.choice((1, 2)),
        "mixture.experts": experts,
        "mixture.top_k": chosen.randint(1, experts // groups * top_groups),
        "mixture.groups": groups,
        "mixture.top_groups": top_groups,
    }


def by_role(chosen: random.Random, family: str) -> Config:
    """A config drawn from the fields that a family reads, by what each of them says; not all of it need be legal."""
    file = import_module(f"gptkit.architectures.families.{family}")
    decoder = next(each for each in vars(file).values() if isinstance(each, Decoder))
    fields = decoder.fields
    kv_heads, group, head_dim = chosen.choice((1, 2, 3, 5)), chosen.choice((1, 1, 2, 3)), chosen.choice(EVEN)
    heads = kv_heads * group
    shared_out = decoder.square or decoder.whole_heads or chosen.random() < 0.5
    sizes: Config = {
        "vocab": VOCAB,
        "hidden": heads * head_dim if shared_out else 3 * chosen.choice(ODD),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": chosen.choice((1, 2, 3)),
        "intermediate": chosen.choice((1, 7, 33, 64)),
        "context": chosen.choice(CONTEXT),
        "activation": activation(chosen),
        "eps": chosen.choice((1e-3, 1e-6)),
    }
    if decoder.mixtures is not None:
        sizes |= mixture(chosen)
        if decoder.square or all(field.role.split()[0] != "head_dim" for field in fields.values()):
            sizes["head_dim"] = head_dim = chosen.choice((8, 16, 24))
            sizes["hidden"] = heads * head_dim
    found: Config = dict(ARCHITECTURES[family].stated)
    for name, field in fields.items():
        role, default = field.role.split()[0], field.default
        if role == "activation" and isinstance(default, str):
            found[name] = chosen.choice((default, sizes[role]))  # some families compute with no other
        elif role in sizes:
            found[name] = sizes[role]
        elif isinstance(default, bool):
            found[name] = chosen.choice((True, False))
        elif isinstance(default, float):
            found[name] = chosen.choice((default, 0.3, 2.5))
        elif role.endswith((".cap", ".clip")):
            found[name] = chosen.choice((None, 0.7, 5.0))
        elif role.endswith(".window"):
            found[name] = window(chosen)
    if decoder.layers is not None:
        kinds = ("full_attention", "sliding_attention")
        found["layer_types"] = [chosen.choice(kinds) for _ in range(sizes["layers"])]
        found["sliding_window"] = chosen.choice((1, 2, 3, 8, 17, 300))
    if decoder.rotary is not None:
        found |= (
            rope(chosen, head_dim) if not decoder.rotary.part else {decoder.rotary.part: chosen.choice((0.5, 0.7, 1.0))}
        )
    needed = {name for name, field in fields.items() if field.role.split()[0] in sizes}
    needed = {name for name in needed if fields[name].role not in ("activation", "eps")} | {
        *ARCHITECTURES[family].stated
    }
    kept: Config = {}
    for name, value in found.items():
        if name in needed or chosen.random() < 0.7:
            outer, _, inner = name.rpartition(".")
            kept |= {outer: {**kept.get(outer, {}), inner: value}} if outer else {name: value}
    return kept


def legal(config: Config) -> bool:
    """Whether transformers' config class takes it."""
    try:
        hf_config(config)
    except Exception:  # each class refuses in a way of its own
        return False
    return True


def learned(chosen: random.Random) -> tuple[Config, int]:
    """The sizes that GPT-2's fields say, and the width of a head."""
    heads, head_dim = chosen.choice((1, 2, 3, 5, 9)), chosen.choice(ODD)
    sizes = {"n_positions": 256, "n_embd": heads * head_dim, "n_layer": chosen.choice((1, 2)), "n_head": heads}
    return sizes, head_dim


def gptj(chosen: random.Random) -> Config:
    heads, head_dim = chosen.choice((1, 2, 3, 5)), chosen.choice(EVEN)
    sizes = {"n_positions": 256, "n_embd": heads * head_dim, "n_layer": chosen.choice((1, 2)), "n_head": heads}
    more = {
        "n_inner": chosen.choice((1, 7, 33)),
        "activation_function": activation(chosen),
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": True,
    }
    return {**sizes, "rotary_dim": chosen.choice(range(2, head_dim + 1, 2)), **sometimes(chosen, more)}


def codegen(chosen: random.Random) -> Config:
    found = gptj(chosen)
    return {**found, "n_embd": 4 * found["n_embd"], "n_head": 4 * found["n_head"]}


def gpt_neo(chosen: random.Random) -> Config:
    sizes, _ = learned(chosen)
    layers = [chosen.choice(("global", "local")) for _ in range(sizes["n_layer"])]
    more = {
        "intermediate_size": chosen.choice((1, 7, 33)),
        "activation_function": activation(chosen),
        "window_size": chosen.choice((1, 2, 3, 8, 17, 300)),
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    }
    return {
        "max_position_embeddings": 256,
        "hidden_size": sizes["n_embd"],
        "num_layers": sizes["n_layer"],
        "num_heads": sizes["n_head"],
        "attention_types": [[layers, 1]],
        **sometimes(chosen, more),
    }


def gpt_bigcode(chosen: random.Random) -> Config:
    sizes, _ = learned(chosen)
    more = {
        "n_inner": chosen.choice((1, 7, 33)),
        "activation_function": activation(chosen),
        "multi_query": False,
        "scale_attn_weights": False,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    }
    return {**sizes, **sometimes(chosen, more)}


def partial(chosen: random.Random, head_dim: int) -> Config:
    """A part of each head that turns."""
    parts = [each for each in (0.25, 0.5, 0.75, 1.0) if int(head_dim * each) and int(head_dim * each) % 2 == 0]
    return {"partial_rotary_factor": chosen.choice(parts)}


def persimmon(chosen: random.Random) -> Config:
    heads, head_dim = chosen.choice((1, 2, 3, 5)), chosen.choice(EVEN)
    more = {"hidden_act": activation(chosen), "qk_layernorm": False, "layer_norm_eps": 1e-3}
    return {
        "hidden_size": heads * head_dim,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "num_hidden_layers": chosen.choice((1, 2)),
        "num_attention_heads": heads,
        "max_position_embeddings": 256,
        **partial(chosen, head_dim),
        **sometimes(chosen, {**more, "tie_word_embeddings": True, "rope_theta": 37.5}),
    }


def nemotron(chosen: random.Random) -> Config:
    found = llama_like(chosen)
    for name in ("rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps"):
        found.pop(name, None)
    head_dim = found.get("head_dim", found["hidden_size"] // found["num_attention_heads"])
    more = {"norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True, "rope_theta": 37.5}
    return {**found, **partial(chosen, head_dim), **sometimes(chosen, more)}


def phi3(chosen: random.Random) -> Config:
    found = llama_like(chosen, own_dim=False)
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        found.pop(name, None)
    head_dim, original = found["hidden_size"] // found["num_attention_heads"], chosen.choice((8, 32))
    part = partial(chosen, head_dim)
    pairs = int(head_dim * part["partial_rotary_factor"]) // 2
    long: Config = {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "type": chosen.choice(("longrope", "yarn")),
            "short_factor": [chosen.uniform(0.5, 2) for _ in range(pairs)],
            "long_factor": [chosen.uniform(1, 9) for _ in range(pairs)],
        },
    }
    more = {"sliding_window": window(chosen), "rope_theta": 37.5}
    return {**found, "pad_token_id": 0, **part, **chosen.choice(({}, long)), **sometimes(chosen, more)}


def opt(chosen: random.Random) -> Config:
    sizes, _ = learned(chosen)
    more = {
        "word_embed_proj_dim": chosen.choice((1, 3, 16, 33)),
        "activation_function": activation(chosen),
        "do_layer_norm_before": False,
        "_remove_final_layer_norm": True,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    }
    return {
        "hidden_size": sizes["n_embd"],
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "ffn_dim": chosen.choice((1, 7, 33)),
        "max_position_embeddings": 256,
        **sometimes(chosen, more),
    }


def biogpt(chosen: random.Random) -> Config:
    sizes, _ = learned(chosen)
    more = {"hidden_act": activation(chosen), "scale_embedding": False, "tie_word_embeddings": False}
    return {
        "hidden_size": sizes["n_embd"],
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "intermediate_size": chosen.choice((1, 7, 33)),
        "max_position_embeddings": 256,
        **sometimes(chosen, more),
    }


def xglm(chosen: random.Random) -> Config:
    heads = chosen.choice((1, 2, 3, 5))
    more = {"activation_function": activation(chosen), "scale_embedding": False, "tie_word_embeddings": False}
    return {
        "d_model": heads * chosen.choice(EVEN[1:]),
        "num_layers": chosen.choice((1, 2)),
        "attention_heads": heads,
        "ffn_dim": chosen.choice((1, 7, 33)),
        "max_position_embeddings": 256,
        **sometimes(chosen, more),
    }


def ctrl(chosen: random.Random) -> Config:
    heads = chosen.choice((1, 2, 3, 5))
    return {
        "n_embd": heads * chosen.choice(EVEN),
        "n_layer": chosen.choice((1, 2)),
        "n_head": heads,
        "dff": chosen.choice((1, 7, 33)),
        "n_positions": 256,
        **sometimes(chosen, {"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
    }


def openai_gpt(chosen: random.Random) -> Config:
    more = {"afn": chosen.choice(("relu", "silu", "swish")), "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}
    return {**learned(chosen)[0], **sometimes(chosen, more)}


def gpt_neox_japanese(chosen: random.Random) -> Config:
    heads, head_dim = chosen.choice((1, 2, 3, 5)), chosen.choice(EVEN)
    more = {"hidden_act": activation(chosen), "intermediate_multiple_size": 2, "rotary_emb_base": 37.5}
    return {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": chosen.choice((1, 2)),
        "num_attention_heads": heads,
        "max_position_embeddings": 256,
        "rotary_pct": partial(chosen, head_dim)["partial_rotary_factor"],
        **sometimes(chosen, {**more, "layer_norm_eps": 1e-3, "tie_word_embeddings": False}),
    }


def mpt(chosen: random.Random) -> Config:
    heads = chosen.choice((1, 2, 3, 5, 8, 9))
    inner = sometimes(chosen, {"clip_qkv": 0.5, "softmax_scale": 0.3})
    more = {"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "attn_config": inner}
    return {
        "d_model": heads * chosen.choice(ODD),
        "n_layers": chosen.choice((1, 2)),
        "n_heads": heads,
        "max_seq_len": 256,
        **sometimes(chosen, more),
    }


def dbrx(chosen: random.Random) -> Config:
    """Its fields stand in objects, in which transformers wants a limit and a base. Every expert's part of a tensor has
    whole cache lines: a product sums as its matrix begins in one, and transformers' own model computes other logits
    when it is loaded from the files that it saved, since these are mapped elsewhere.
    """
    found, experts = llama_like(chosen, own_dim=False), chosen.choice((1, 2, 5))
    inner = {"ffn_act_fn": {"name": activation(chosen)}, "moe_normalize_expert_weights": None}
    return {
        **{name: value for name, value in found.items() if name.startswith("rope")},
        "d_model": found["hidden_size"],
        "n_layers": found["num_hidden_layers"],
        "n_heads": found["num_attention_heads"],
        "max_seq_len": found["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": found["num_key_value_heads"],
            "clip_qkv": chosen.choice((0.5, 8)),
            "rope_theta": 10_000.0,
        },
        "ffn_config": {
            "ffn_hidden_size": chosen.choice((16, 48, 64)),
            "moe_num_experts": experts,
            "moe_top_k": chosen.randint(1, experts),
            **sometimes(chosen, inner),
        },
    }


def bitnet(chosen: random.Random) -> Config:
    return {**llama_like(chosen, own_dim=False), **sometimes(chosen, {"attention_bias": True})}


def lfm2(chosen: random.Random) -> Config:
    found = llama_like(chosen, own_dim=False)
    for name in ("hidden_act", "rms_norm_eps"):
        found.pop(name, None)
    return {
        **found,
        "intermediate_size": chosen.choice((7, 33, 64)),
        "layer_types": layer_types(chosen, found, "conv"),
        **sometimes(
            chosen,
            {
                "conv_bias": True,
                "conv_L_cache": chosen.choice((1, 2, 4, 7)),
                "norm_eps": 1e-3,
                "block_auto_adjust_ff_dim": False,
                "block_ffn_dim_multiplier": chosen.choice((0.5, 1.3)),
            },
        ),
        "block_multiple_of": chosen.choice((1, 8, 24)),
    }


def lfm2_moe(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes."""
    found, hidden, experts = lfm2(chosen), chosen.choice((8, 24, 40, 64)), chosen.choice((2, 3, 8))
    return {
        **{name: value for name, value in found.items() if not name.startswith(("block_", "rope_"))},
        **rope(chosen, hidden // 2),
        "hidden_size": hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": chosen.choice((1, 2)),
        "moe_intermediate_size": chosen.choice((8, 24)),
        "num_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "num_dense_layers": chosen.randint(0, found["num_hidden_layers"]),
        **sometimes(chosen, {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "use_expert_bias": False}),
    }


def layer_types(chosen: random.Random, config: Config, other: str) -> list[str]:
    """At least one with attention, without which transformers' cache fails."""
    types = [chosen.choice(("full_attention", other)) for _ in range(config["num_hidden_layers"])]
    types[chosen.randrange(len(types))] = "full_attention"
    return types


def qwen3_5(chosen: random.Random) -> Config:
    """Heads wide enough that a quarter of each may turn."""
    found, key_heads = llama_like(chosen), chosen.choice((1, 2, 3))
    found = {name: value for name, value in found.items() if not name.startswith("rope_")}
    return {
        **found,
        "head_dim": chosen.choice((8, 16, 24)),
        "partial_rotary_factor": chosen.choice((0.25, 0.5, 1.0)),
        "rope_theta": chosen.choice((1e4, 37.5)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * chosen.choice((1, 2, 3)),
        "linear_key_head_dim": chosen.choice(ODD),
        "linear_value_head_dim": chosen.choice(ODD),
        "linear_conv_kernel_dim": chosen.choice((1, 2, 4, 5)),
        "layer_types": layer_types(chosen, found, "linear_attention"),
        **sometimes(chosen, {"attention_bias": True}),
    }


def qwen3_5_moe(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes."""
    found, experts = qwen3_5(chosen), chosen.choice((1, 2, 3, 5))
    del found["intermediate_size"]
    return {
        **found,
        "hidden_size": chosen.choice((8, 24, 40, 64)),
        "num_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "moe_intermediate_size": chosen.choice((8, 24, 40)),
        "shared_expert_intermediate_size": chosen.choice((8, 40)),
    }


def qwen3_next(chosen: random.Random) -> Config:
    dense = [layer for layer in range(3) if chosen.random() < 0.3]
    found = qwen3_5_moe(chosen) | {"intermediate_size": chosen.choice((1, 7, 33))}
    return found | sometimes(chosen, {"norm_topk_prob": False, "mlp_only_layers": dense, "decoder_sparse_step": 2})


def bert(chosen: random.Random, hf_name: str = "Bert") -> Config:
    heads = chosen.choice((1, 2, 3, 5))
    found = {
        "hidden_size": heads * chosen.choice(ODD),
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "max_position_embeddings": 256,
        "architectures": [chosen.choice((f"{hf_name}ForMaskedLM", f"{hf_name}Model"))],
    }
    more = {"hidden_act": activation(chosen), "layer_norm_eps": 1e-3, "type_vocab_size": chosen.choice((1, 3))}
    return found | sometimes(chosen, more)


def roberta(chosen: random.Random, hf_name: str = "Roberta") -> Config:
    return bert(chosen, hf_name) | sometimes(chosen, {"pad_token_id": chosen.choice((0, 3, 40))})


def distilbert(chosen: random.Random) -> Config:
    found = bert(chosen, "DistilBert")
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
    names |= {"num_attention_heads": "n_heads", "hidden_act": "activation"}
    found = {names.get(name, name): value for name, value in found.items() if name not in ("type_vocab_size",)}
    found.pop("layer_norm_eps", None)
    return found | sometimes(chosen, {"tie_word_embeddings": False})


def t5(chosen: random.Random) -> Config:
    found = {
        "d_model": chosen.choice((1, 6, 20, 33)),
        "d_kv": chosen.choice((1, 5, 8)),
        "d_ff": chosen.choice((1, 7, 33, 64)),
        "num_heads": chosen.choice((1, 2, 3)),
        "num_layers": chosen.choice((1, 2, 3)),
        "feed_forward_proj": chosen.choice(("relu", "gated-gelu", "gated-silu", "gelu")),
    }
    more = {"num_decoder_layers": chosen.choice((1, 2, 3)), "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}
    buckets = chosen.choice((4, 7, 13, 32))
    more |= {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": chosen.choice((20, 50))}
    return found | sometimes(chosen, more)


def bart(chosen: random.Random) -> Config:
    found: Config = {"d_model": chosen.choice((12, 24, 36)), "max_position_embeddings": 256, "pad_token_id": 0}
    for stack in ("encoder", "decoder"):
        found |= {
            f"{stack}_layers": chosen.choice((1, 2, 3)),
            f"{stack}_attention_heads": chosen.choice((1, 2, 3, 4)),
            f"{stack}_ffn_dim": chosen.choice((1, 7, 33, 64)),
        }
    return found | sometimes(chosen, {"activation_function": activation(chosen), "scale_embedding": True})


def modernbert(chosen: random.Random) -> Config:
    heads, head_dim = chosen.choice((1, 2, 3, 5)), chosen.choice(EVEN)
    found = {
        "hidden_size": heads * head_dim,
        "pad_token_id": 0,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "num_hidden_layers": chosen.choice((1, 2, 3, 4)),
        "num_attention_heads": heads,
        "architectures": [chosen.choice(("ModernBertForMaskedLM", "ModernBertModel"))],
    }
    kinds = {
        kind: {**scaling(chosen, head_dim), "rope_theta": 37.5} for kind in ("full_attention", "sliding_attention")
    }
    kinds = {kind: each if each["rope_type"] == "linear" else {"rope_theta": 1e4} for kind, each in kinds.items()}
    flags = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    more = {
        **dict.fromkeys(flags, True),
        "decoder_bias": False,
        "tie_word_embeddings": False,
        "hidden_activation": activation(chosen),
        "classifier_activation": activation(chosen),
        "norm_eps": 1e-3,
        "local_attention": chosen.choice((2, 5, 17, 32)),
        "global_attn_every_n_layers": chosen.choice((1, 2)),
        "rope_parameters": kinds,
    }
    return found | sometimes(chosen, more)


def mamba2_mixer(chosen: random.Random, hidden: int) -> Config:
    """Fields of `mamba_`; heads divide what the width is `expand` times."""
    expand = chosen.choice((1, 2, 3))
    heads = chosen.choice([each for each in range(1, 13) if hidden * expand % each == 0])
    own = {
        "mamba_d_head": hidden * expand // heads,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": chosen.choice(([0.0, 2.0], [0.1, 2.5], [0.02, math.inf])),
    }
    return {
        "mamba_n_heads": heads,
        "mamba_expand": expand,
        "mamba_n_groups": chosen.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "mamba_d_state": chosen.choice(ODD),
        "mamba_d_conv": chosen.choice((1, 2, 4, 5)),
        "mamba_chunk_size": chosen.choice((1, 3, 8, 64)),
        **sometimes(chosen, own),
    }


def bamba(chosen: random.Random) -> Config:
    found = llama_like(chosen)
    found = {name: value for name, value in found.items() if not name.startswith("rope_")}
    whole = [n for n, kind in enumerate(layer_types(chosen, found, "")) if kind]
    part = chosen.choice((0.5, 1.0))
    return {
        **found,
        **mamba2_mixer(chosen, found["hidden_size"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 37.5, "partial_rotary_factor": part},
        "head_dim": chosen.choice((4, 8, 16)),
        "attn_layer_indices": whole,
        **sometimes(chosen, {"attention_bias": True, "mlp_bias": True}),
    }


def granitemoehybrid(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes."""
    found, experts = llama_like(chosen), chosen.choice((0, 1, 2, 3, 5))
    width = chosen.choice((8, 24, 40, 64)) if experts else found["hidden_size"]
    head = found.get("head_dim", found["hidden_size"] // found["num_attention_heads"])
    return {
        **found,
        "hidden_size": width,
        "head_dim": head,
        **mamba2_mixer(chosen, width),
        "layer_types": layer_types(chosen, found, "linear_attention"),
        "intermediate_size": chosen.choice((8, 24, 40)),
        "shared_intermediate_size": chosen.choice((8, 40)),
        "num_local_experts": experts,
        "num_experts_per_tok": chosen.randint(min(1, experts), experts),
        **sometimes(
            chosen,
            {
                "position_embedding_type": "rope",
                "attention_bias": True,
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.3,
                "residual_multiplier": 0.22,
                "logits_scaling": 6.0,
            },
        ),
    }


def falcon_h1(chosen: random.Random) -> Config:
    found, width = llama_like(chosen), chosen.choice((8, 12, 30, 40))
    heads = chosen.choice([each for each in range(1, 13) if width % each == 0])
    more = {
        "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.04,
        "key_multiplier": 0.3,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.4,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.2,
        "ssm_multipliers": [chosen.uniform(0.1, 2) for _ in range(5)],
        "mlp_multipliers": [chosen.uniform(0.1, 2) for _ in range(2)],
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    }
    return {
        **found,
        **mamba2_mixer(chosen, found["hidden_size"]),
        "mamba_d_ssm": width,
        "mamba_d_head": width // heads,
        "mamba_n_heads": heads,
        "mamba_n_groups": chosen.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        **sometimes(chosen, more),
    }


def mamba(chosen: random.Random) -> Config:
    found = {
        "hidden_size": chosen.choice(ODD),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "state_size": chosen.choice(ODD),
        "expand": chosen.choice((1, 2, 3)),
    }
    more = {
        "intermediate_size": chosen.choice(ODD),
        "time_step_rank": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 5)),
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "hidden_act": activation(chosen),
        "layer_norm_epsilon": 1e-3,
    }
    return found | sometimes(chosen, more)


def falcon_mamba(chosen: random.Random) -> Config:
    return mamba(chosen) | sometimes(chosen, {"mixer_rms_eps": 1e-2})


def jamba(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes."""
    found, experts = llama_like(chosen), chosen.choice((1, 2, 3, 5))
    found = {name: value for name, value in found.items() if not name.startswith("rope_")}
    every = chosen.randint(1, 3)
    offset = chosen.randrange(min(every, found["num_hidden_layers"]))
    own = {
        "mamba_dt_rank": chosen.choice(ODD),
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "mamba_expand": chosen.choice((1, 3)),
    }
    return {
        **found,
        "hidden_size": chosen.choice((8, 24, 40, 64)) if experts > 1 else found["hidden_size"],
        "head_dim": chosen.choice((4, 8, 16)),
        "intermediate_size": chosen.choice((8, 24, 40)),
        "attn_layer_period": every,
        "attn_layer_offset": offset,
        "expert_layer_period": 2,
        "expert_layer_offset": chosen.choice((0, 1)),
        "num_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "mamba_d_state": chosen.choice(ODD),
        "mamba_d_conv": chosen.choice((1, 2, 4, 5)),
        **sometimes(chosen, own),
    }


def recurrent_gemma(chosen: random.Random) -> Config:
    found = {
        name: value
        for name, value in llama_like(chosen).items()
        if not name.startswith(("rope_", "max_", "hidden_act"))
    }
    heads = found["num_attention_heads"]
    blocks = [chosen.choice(("recurrent", "attention")) for _ in range(found["num_hidden_layers"] - 1)]
    own = {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_activation": activation(chosen),
        "logits_soft_cap": chosen.choice((1.0, 5.5)),
        "rope_theta": chosen.choice((30.0, 5e5)),
    }
    return {
        **found,
        "hidden_size": heads * chosen.choice(ODD),
        "head_dim": chosen.choice((4, 8, 12, 16, 32)),
        "intermediate_size": chosen.choice((2, 7, 33, 64)),
        "block_types": chosen.sample([*blocks, "attention"], found["num_hidden_layers"]),
        "attention_window_size": chosen.choice((1, 2, 3, 8, 17, 300)),
        "conv1d_width": chosen.choice((1, 2, 4, 5)),
        **sometimes(chosen, own),
    }


def rwkv(chosen: random.Random) -> Config:
    more = {
        "intermediate_size": chosen.choice(ODD),
        "layer_norm_epsilon": 1e-3,
        "rescale_every": chosen.choice((-1, 0, 1, 2, 3)),
        "tie_word_embeddings": True,
        "context_length": chosen.choice(CONTEXT),
    }
    sizes = {"hidden_size": chosen.choice(ODD[1:]), "num_hidden_layers": chosen.choice((2, 3, 4))}
    return sizes | sometimes(chosen, more)


def mamba2(chosen: random.Random) -> Config:
    expand, width, heads = chosen.choice((1, 2, 3)), chosen.choice(ODD), chosen.choice((1, 2, 4, 6, 9))
    while heads * width % expand:
        expand -= 1
    return {
        "hidden_size": heads * width // expand,
        "expand": expand,
        "num_heads": heads,
        "head_dim": width,
        "n_groups": chosen.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "num_hidden_layers": chosen.choice((1, 2, 3)),
        "state_size": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 4, 5)),
        "chunk_size": chosen.choice((1, 3, 8, 64)),
        **sometimes(
            chosen,
            {
                "use_bias": True,
                "use_conv_bias": False,
                "residual_in_fp32": False,
                "tie_word_embeddings": True,
                "hidden_act": activation(chosen),
                "layer_norm_epsilon": 1e-3,
                "time_step_limit": chosen.choice(([0.0, 2.0], [0.1, 2.5], [0.02, math.inf])),
            },
        ),
    }


def nemotron_h(chosen: random.Random) -> Config:
    """transformers multiplies all experts at once, in rows of whole 16 bytes."""
    types = [chosen.choice("M-*E") for _ in range(chosen.choice((1, 2, 3)))]
    types.insert(chosen.randrange(len(types) + 1), "*")
    experts, kv_heads, heads = chosen.choice((2, 3, 5)), chosen.choice((1, 2, 3)), chosen.choice((1, 2, 4, 6, 9))
    return {
        "hybrid_override_pattern": "".join(types),
        "hidden_size": chosen.choice((8, 24, 40, 64)),
        "num_attention_heads": kv_heads * chosen.choice((1, 2, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": chosen.choice(ODD),
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "mamba_num_heads": heads,
        "mamba_head_dim": chosen.choice(ODD),
        "n_groups": chosen.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "ssm_state_size": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 4, 5)),
        "chunk_size": chosen.choice((1, 3, 8, 64)),
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "moe_intermediate_size": chosen.choice((8, 24, 40)),
        "moe_shared_expert_intermediate_size": chosen.choice((8, 40)),
        **sometimes(
            chosen,
            {
                "use_bias": True,
                "use_conv_bias": False,
                "mlp_bias": True,
                "mlp_hidden_act": activation(chosen),
                "mamba_hidden_act": activation(chosen),
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
                "time_step_min": 0.3,
                "layer_norm_epsilon": 1e-3,
            },
        ),
    }


def zamba2(chosen: random.Random) -> Config:
    """Twice the stream's width is shared out over heads, and some times the width over those of Mamba-2."""
    kinds = [chosen.choice(("mamba", "hybrid")) for _ in range(chosen.choice((0, 1, 3)))]
    kinds.insert(chosen.randrange(len(kinds) + 1), "hybrid")
    heads, turned = chosen.choice((1, 2, 3, 6)), chosen.random() < 0.5
    dim = chosen.choice(EVEN if turned else SMALL)
    dim += dim * heads % 2
    hidden, expand = heads * dim // 2, chosen.choice((1, 2, 3))
    recurring = chosen.choice([each for each in range(1, 13) if hidden * expand % each == 0])
    kv_heads = chosen.choice([each for each in range(1, heads + 1) if heads % each == 0])
    adapted = chosen.random() < 0.4
    own = {
        "num_key_value_heads": heads if adapted else kv_heads,
        "mamba_headdim": hidden * expand // recurring,
        "attention_head_dim": dim,
        "use_long_context": True,
        "add_bias_linear": True,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "hidden_act": activation(chosen),
        "time_step_min": 0.3,
        "rms_norm_eps": 1e-3,
    }
    return {
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "n_mamba_heads": recurring,
        "mamba_expand": expand,
        "mamba_ngroups": chosen.choice([each for each in range(1, recurring + 1) if recurring % each == 0]),
        "mamba_d_state": chosen.choice(ODD),
        "mamba_d_conv": chosen.choice((1, 2, 4, 5)),
        "chunk_size": chosen.choice((1, 3, 8, 64)),
        "num_mem_blocks": chosen.choice((1, 2, 3)),
        "adapter_rank": chosen.choice(ODD),
        "use_shared_attention_adapter": adapted,
        "use_mem_rope": turned,
        "max_position_embeddings": chosen.choice(CONTEXT),
        **rope(chosen, dim),
        **sometimes(chosen, own),
    }


DRAWN: dict[str, Callable[[random.Random], Config]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": lambda chosen: roberta(chosen, "XLMRoberta"),
    "camembert": lambda chosen: roberta(chosen, "Camembert"),
    "distilbert": distilbert,
    "modernbert": modernbert,
    "t5": t5,
    "bart": bart,
    "marian": lambda chosen: {**bart(chosen), "decoder_start_token_id": 0},
    "mbart": bart,
    "bamba": bamba,
    "granitemoehybrid": granitemoehybrid,
    "falcon_h1": falcon_h1,
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
    "recurrent_gemma": recurrent_gemma,
    "rwkv": rwkv,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "zamba2": zamba2,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "gptj": gptj,
    "codegen": codegen,
    "gpt_neo": gpt_neo,
    "gpt_bigcode": gpt_bigcode,
    "persimmon": persimmon,
    "nemotron": nemotron,
    "phi3": phi3,
    "opt": opt,
    "biogpt": biogpt,
    "xglm": xglm,
    "ctrl": ctrl,
    "openai-gpt": openai_gpt,
    "gpt_neox_japanese": gpt_neox_japanese,
    "mpt": mpt,
    "bitnet": bitnet,
    "dbrx": dbrx,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "bloom": bloom,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4_unified,
    "youtu": youtu,
    "minicpm3": minicpm3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "axk1": axk1,
    "ministral3": ministral3,
    "apertus": apertus,
    "phimoe": phimoe,
    "llama4_text": llama4_text,
}


def legal_config(family: str, seed: int) -> Config:
    """The config of that number, always the same."""
    chosen = random.Random(f"{family} {seed}")
    if family in DRAWN:
        return {"model_type": family, "vocab_size": VOCAB, **DRAWN[family](chosen)}
    ids = {
        name: 0
        for name, value in ARCHITECTURES[family].token_ids.items()
        if max([value] if type(value) is int else value) >= VOCAB
    }
    drawn = ({"model_type": family, **ids, **by_role(chosen, family)} for _ in range(100))
    return next(config for config in drawn if legal(config))
