"""Nemotron-H (NVIDIA 2504.03624) and Nemotron 3 Nano: one mixer per layer. It is Mamba-2, attention without a position
encoding, a plain feed-forward with squared ReLU, or a mixture of such feed-forwards.

Conversions keep the tensors of `mtp.`, which draft tokens.

Source: transformers models/nemotron_h/{configuration,modeling}_nemotron_h.py.
"""

from collections import ChainMap
from functools import partial
from typing import Any

from ...components import (
    MOST_EXPERTS,
    Attention,
    Block,
    Embedding,
    ExpertLatent,
    FeedForward,
    Head,
    Mamba2,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    SubLayer,
)
from ..base import Architecture, Leaf, Stacked, by_name, leaves_of
from ..config import MAX_LAYERS, ConfigReader
from ..draws import ROWS, TABLE, VOCAB, Config, Random, among, divisor, grouped_heads, kind_by_layer
from ..fields import Field, Fields, draw_fields, name_of, read_fields, size, without, write_fields
from ..obstacles import of_kind
from ..recurrences import LINEAR, least_step, mamba2_leaves
from ..releases import since
from ..usual import B

_KINDS = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}  # older files have a letter per layer
_TREE = {
    "hidden_size": Field("hidden", 4096, draw=among(*ROWS)),
    "vocab_size": Field("vocab", 131072),
    "layer_norm_epsilon": Field("eps", 1e-5),
    "max_position_embeddings": Field("context", 4096),
}
_MAMBA = {
    "mamba_num_heads": Field("heads", 128),
    "mamba_head_dim": size("head_dim", 64),
    "n_groups": Field("groups", 8),
    "ssm_state_size": size("state_size", 128),
    "conv_kernel": size("kernel", 4, 1, 2, 4, 5),
    "chunk_size": size("chunk", 128, 1, 3, 8, 64),
    "mamba_hidden_act": Field("activation", "silu"),
    "use_bias": Field("bias", False),
    "use_conv_bias": Field("conv_bias", True),
    "time_step_min": Field("least", 0.001, least_step, draw=among(0.001, 0.3)),
}
_ATTENTION = {
    "num_attention_heads": Field("heads", 32),
    "num_key_value_heads": Field("kv_heads", 8),
    "head_dim": size("head_dim", 128),
}
_FEED_FORWARD = {
    "intermediate_size": size("intermediate_size", 21504, 1, 7, 33, 64),
    "mlp_hidden_act": Field("activation", "relu2"),
    "mlp_bias": Field("up_bias", False),
}
_MIXTURE = {
    "n_routed_experts": Field("experts", 8, partial(ConfigReader.integer, most=MOST_EXPERTS)),
    "num_experts_per_tok": Field("top_k", 2),
    "n_group": Field("groups", 1),
    "topk_group": Field("top_groups", 1),
    "moe_intermediate_size": size("intermediate_size", 7688, *ROWS),
    "moe_shared_expert_intermediate_size": size("shared_size", 7688, 8, 40),
    "norm_topk_prob": Field("normalise", True),
    "routed_scaling_factor": Field("multiplier", 1.0),
}


def _types(config: ConfigReader) -> list[str]:
    """Return the layer type of every layer. The length of the list is the number of layers."""
    pattern, types = config.raw("hybrid_override_pattern"), config.kinds_of_layers()
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > MAX_LAYERS or not {*pattern} <= _KINDS.keys():
            wanted = f"at most {MAX_LAYERS:,} letters of {''.join(_KINDS)}, one per layer"
            raise config.fail("hybrid_override_pattern", pattern, wanted)
        types = [_KINDS[letter] for letter in pattern]
    types = [LINEAR, "moe", "full_attention", "mlp"] if types is None else types
    if isinstance(types, list) and len(types) > MAX_LAYERS:
        raise config.fail("layers_block_type", types, f"a list of at most {MAX_LAYERS:,} layers")
    if not isinstance(types, list) or not types or any(kind not in _KINDS.values() for kind in types):
        raise config.fail("layers_block_type", types, f"a list of {', '.join(_KINDS.values())}")
    if "full_attention" not in types:
        raise config.fail(
            "layers_block_type", types, "at least one full_attention layer: without one, transformers' cache fails"
        )
    return types


def _mixture(config: ConfigReader, hidden: int, inner: dict[str, Any]) -> MixtureOfExperts:
    """Return the mixture of experts. `inner` has the fields of the dense feed-forward, except its width."""
    own, width = read_fields(_MIXTURE, config), config.optional_integer("moe_latent_size")
    plain = {**inner, "up_bias": False, "down_bias": False}
    plain |= {} if width is None else {"hidden_size": width, "inside": True}
    expert = FeedForward(intermediate_size=own.pop("intermediate_size"), **plain)
    shared = FeedForward(intermediate_size=own.pop("shared_size"), **inner)
    return MixtureOfExperts(
        hidden_size=hidden,
        expert=expert,
        shared=shared,
        latent=None if width is None else ExpertLatent(hidden_size=hidden, width=width, bias=inner["up_bias"]),
        scores="sigmoid",
        choice_bias=True,
        routed_in="float32",
        in_order=False,
        wide_router=since("5.24"),
        wide_choice=True,
        **own,
    )


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    types, tree, mamba = _types(config), read_fields(_TREE, config), read_fields(_MAMBA, config)
    attention, inner = read_fields(_ATTENTION, config), read_fields(_FEED_FORWARD, config)
    hidden, eps, units = tree["hidden"], tree["eps"], inner.pop("intermediate_size")
    if mamba["heads"] % mamba["groups"]:
        raise config.fail("n_groups", mamba["groups"], f"a divisor of mamba_num_heads ({mamba['heads']})")
    inner |= {"hidden_size": hidden, "down_bias": inner["up_bias"]}
    for name in (*_MIXTURE, "moe_latent_size"):
        config.raw(name)  # transformers also writes these fields if no layer has experts, and then ignores their values
    norm = RMSNorm(size=mamba["heads"] * mamba["head_dim"], eps=eps, groups=mamba["groups"])
    mixers: dict[str, Any] = {
        LINEAR: Mamba2(hidden_size=hidden, norm=norm, output_bias=mamba["bias"], **mamba),
        "full_attention": Attention(
            hidden_size=hidden, scale=attention["head_dim"] ** -0.5, position=None, **attention
        ),
        "mlp": FeedForward(intermediate_size=units, **inner),
        "moe": _mixture(config, hidden, inner) if "moe" in types else None,
    }
    norm = RMSNorm(size=hidden, eps=eps, cast="after_weight")
    blocks = {kind: Block(sublayers=(SubLayer(mixer=mixers[kind], norm=norm),)) for kind in {*types}}
    return ModelSpec(
        embedding=Embedding(vocab_size=tree["vocab"], hidden_size=hidden),
        blocks=tuple(blocks[kind] for kind in types),
        final_norm=norm,
        head=Head(vocab_size=tree["vocab"], hidden_size=hidden),
        context_length=tree["context"],
    )


_PARTS: dict[type, tuple[str, Fields]] = {
    Mamba2: (LINEAR, _MAMBA),
    Attention: ("full_attention", _ATTENTION),
    FeedForward: ("mlp", _FEED_FORWARD),
    MixtureOfExperts: ("moe", _MIXTURE),
}
"""The kinds of mixers -> their name as a layer type in config.json, and the config fields of the mixer."""


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    mixers, fields = [block.sublayers[0].mixer for block in spec.blocks], dict[str, Any]()
    for mixer in mixers:
        fields |= write_fields(_PARTS[type(mixer)][1], mixer)
        if isinstance(mixer, MixtureOfExperts):
            fields |= {} if mixer.latent is None else {"moe_latent_size": mixer.latent.width}
            shared = write_fields(_FEED_FORWARD, of_kind(mixer.shared, FeedForward))
            fields |= {**without(shared, "intermediate_size"), "mlp_hidden_act": name_of(mixer.expert.activation)}
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "layers_block_type": [_PARTS[type(mixer)][0] for mixer in mixers],
        "layer_norm_epsilon": of_kind(spec.final_norm, RMSNorm).eps,
        **({} if spec.context_length is None else {"max_position_embeddings": spec.context_length}),
        **fields,
    }


def _draw(chosen: Random) -> Config:
    """Return a random config with attention in at least one layer."""
    letters = kind_by_layer(chosen, chosen.choice((1, 2, 3)), *_KINDS)
    letters.insert(chosen.randrange(len(letters) + 1), "*")
    (queries, kv_heads), heads = grouped_heads(chosen), chosen.choice((1, 2, 4, 6, 9))
    count = chosen.choice((2, 3, 5))
    drawn = [
        draw_fields(_TREE, chosen, {"vocab": VOCAB, "context": TABLE}),
        draw_fields(_MAMBA, chosen, {"heads": heads, "groups": divisor(chosen, heads)}),
        draw_fields(_ATTENTION, chosen, {"heads": queries, "kv_heads": kv_heads}),
        draw_fields(_FEED_FORWARD, chosen, {}),
        draw_fields(_MIXTURE, chosen, {"experts": count, "top_k": chosen.randint(1, count)}),
    ]
    return {"hybrid_override_pattern": "".join(letters), **dict(ChainMap(*drawn))}


_T = "backbone.layers.{layer}."
_M = _T + "mixer."
_EXPERT = _M + "experts.{expert}."
_STACKED = tuple(Stacked(f"{_M}experts.{name}_proj", (f"{_EXPERT}{name}_proj.weight",)) for name in ("up", "down"))
_UP_DOWN = ("up_proj", "down_proj")
_LATENT = (("fc1", "down_proj"), ("fc2", "up_proj"))

_NEMOTRON_H = Architecture(
    name="nemotron_h",
    model_types=("nemotron_h",),
    hf_class="NemotronHForCausalLM",
    hf_config="NemotronHConfig",
    kinds=frozenset({Mamba2, RMSNorm, Attention, FeedForward, MixtureOfExperts, ExpertLatent}),
    read=_read,
    write=_write,
    draw=_draw,
    leaves=(
        # The head comes first, since transformers' modules call the rest `model`, which follows by name.
        *leaves_of({"lm_head": "head"}),
        *by_name(
            (
                *leaves_of({"backbone.embeddings": "embedding"}),
                *(
                    leaf
                    for slot in ("recurrence", "attention", "feed_forward")
                    for leaf in leaves_of({_T + "norm": f"{B}{slot}_norm"})
                ),
                *mamba2_leaves(_M),
                *leaves_of({f"{_M}{name}_proj": f"{B}attention.{name}_proj" for name in "qkvo"}),
                *leaves_of({_M + name: f"{B}feed_forward.{name}" for name in _UP_DOWN}),
                *leaves_of({_EXPERT + name: f"{B}feed_forward.experts.{{expert}}.{name}" for name in _UP_DOWN}),
                *leaves_of({f"{_M}shared_experts.{name}": f"{B}feed_forward.shared.{name}" for name in _UP_DOWN}),
                *leaves_of({f"{_M}{name}_latent_proj": f"{B}feed_forward.latent.{ours}" for name, ours in _LATENT}),
                *leaves_of({_M + "gate": B + "feed_forward.router"}),
                Leaf(_M + "gate.e_score_correction_bias", B + "feed_forward.choice.bias", buffer=True),
                *leaves_of({"backbone.norm_f": "final_norm"}),
            ),
            _STACKED,
        ),
    ),
    released="2025-03",
    prefix="backbone.",
    renamed=(("model.", "backbone."),),
    modules=("backbone.", "model."),
    stacked=_STACKED,
    carried={"mtp": ("mtp.",)},
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    config_aliases={
        "layer_types": ("layers_block_type",),
        "n_routed_experts": ("num_local_experts",),
        "n_groups": ("mamba_n_groups",),
        "conv_kernel": ("mamba_d_conv",),
        "time_step_min": ("mamba_dt_min",),
        "use_conv_bias": ("mamba_conv_bias",),
        "chunk_size": ("mamba_chunk_size",),
    },
    irrelevant={
        **dict.fromkeys(
            ("time_step_max", "time_step_floor", "rescale_prenorm_residual", "expand", "mamba_expand"),
            "only for the start of training, or derived from other sizes",
        ),
        **dict.fromkeys(("num_hidden_layers",), "the number of layers follows from the list of layers"),
        **dict.fromkeys(
            ("attention_bias", "mamba_proj_bias", "residual_in_fp32", "time_step_limit"),
            "not read by transformers' model",
        ),
        **dict.fromkeys(("use_mamba_kernels", "mamba_ssm_cache_dtype"), "which kernels compute it"),
        **dict.fromkeys(
            ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
            "extra layers after the last one that draft tokens (multi-token prediction)",
        ),
        **dict.fromkeys(("n_shared_experts", "moe_shared_expert_overlap"), "not read by transformers: there is one"),
        "output_router_logits": "training only",
    },
    refused={
        "tie_word_embeddings": ((False, None), "transformers does not tie embeddings for this family"),
        "sliding_window": ((None,), "transformers' KV cache uses this field, but this family's layers ignore it"),
    },
)
