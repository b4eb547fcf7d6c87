"""Nemotron-H (NVIDIA 2504.03624) and Nemotron 3 Nano: one mixer per layer, which is Mamba-2, attention without
positions, a plain feed-forward with squared ReLU, or a mixture of these.

Source: transformers models/nemotron_h/{configuration,modeling}_nemotron_h.py. Tensors of `mtp.`, which draft tokens,
are carried along.
"""

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
from ..draws import ODD, ROWS, Config, Random, divisor, grouped_heads, kind_by_layer, sometimes
from ..fields import ACTIVATIONS, activation_named, name_of
from ..obstacles import of_kind
from ..recurrences import LINEAR, mamba2_leaves
from ..usual import B

_KINDS = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}  # as older files write them, a letter a layer
_SIZES = {
    "mamba_num_heads": ("heads", 128),
    "mamba_head_dim": ("head_dim", 64),
    "n_groups": ("groups", 8),
    "ssm_state_size": ("state_size", 128),
    "conv_kernel": ("kernel", 4),
    "chunk_size": ("chunk", 128),
}
_CHOICE = {"num_experts_per_tok": ("top_k", 2), "n_group": ("groups", 1), "topk_group": ("top_groups", 1)}
_OF_EXPERTS = (
    *_CHOICE,
    "n_routed_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "moe_latent_size",
)


def _types(config: ConfigReader) -> list[str]:
    """Each layer's kind; the number of layers is how many there are."""
    pattern, types = config.raw("hybrid_override_pattern"), config.kinds_of_layers()
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > MAX_LAYERS or not {*pattern} <= _KINDS.keys():
            wanted = f"up to {MAX_LAYERS:,} letters of {''.join(_KINDS)}, one a layer"
            raise config.fail("hybrid_override_pattern", pattern, wanted)
        types = [_KINDS[each] for each in pattern]
    types = [LINEAR, "moe", "full_attention", "mlp"] if types is None else types
    if isinstance(types, list) and len(types) > MAX_LAYERS:
        raise config.fail("layers_block_type", types, f"up to {MAX_LAYERS:,} layers")
    if not isinstance(types, list) or not types or any(each not in _KINDS.values() for each in types):
        raise config.fail("layers_block_type", types, f"a list of {', '.join(_KINDS.values())}")
    if "full_attention" not in types:
        raise config.fail(
            "layers_block_type", types, "at least one full_attention layer: without one, transformers' cache fails"
        )
    return types


def _mixture(config: ConfigReader, hidden: int, inner: dict[str, Any]) -> MixtureOfExperts:
    experts = config.integer("n_routed_experts", 8, most=MOST_EXPERTS)
    sizes: dict[str, Any] = {role: config.integer(name, default) for name, (role, default) in _CHOICE.items()}
    plain = {**inner, "up_bias": False, "down_bias": False}
    width = config.optional_integer("moe_latent_size")
    plain |= {} if width is None else {"hidden_size": width, "inside": True}
    expert = FeedForward(intermediate_size=config.integer("moe_intermediate_size", 7688), **plain)
    shared = FeedForward(intermediate_size=config.integer("moe_shared_expert_intermediate_size", 7688), **inner)
    return MixtureOfExperts(
        hidden_size=hidden,
        experts=experts,
        expert=expert,
        shared=shared,
        latent=None if width is None else ExpertLatent(hidden_size=hidden, width=width, bias=inner["up_bias"]),
        normalise=config.boolean("norm_topk_prob", True),
        multiplier=config.number("routed_scaling_factor", 1.0),
        scores="sigmoid",
        choice_bias=True,
        routed_in="float32",
        in_order=False,
        wide_choice=True,
        **sizes,
    )


def _read(config: ConfigReader) -> ModelSpec:
    types, hidden, vocab = _types(config), config.integer("hidden_size", 4096), config.integer("vocab_size", 131072)
    eps, width = config.number("layer_norm_epsilon", 1e-5), config.integer("head_dim", 128)
    heads, kv_heads = config.integer("num_attention_heads", 32), config.integer("num_key_value_heads", 8)
    sizes: dict[str, Any] = {role: config.integer(name, default) for name, (role, default) in _SIZES.items()}
    if sizes["heads"] % sizes["groups"]:
        raise config.fail("n_groups", sizes["groups"], f"a divisor of mamba_num_heads ({sizes['heads']})")
    bias, size = config.boolean("use_bias", False), sizes["heads"] * sizes["head_dim"]
    up_bias = config.boolean("mlp_bias", False)
    activation = activation_named(config, "mlp_hidden_act", "relu2")
    inner: dict[str, Any] = {"hidden_size": hidden, "activation": activation, "up_bias": up_bias, "down_bias": up_bias}
    scale = width**-0.5
    if (least := config.number("time_step_min", 0.001)) > 1e30:
        raise config.fail("time_step_min", least, "a number up to 1e30")
    for name in _OF_EXPERTS:
        config.raw(name)  # transformers writes them also where no layer has experts, and then nobody reads their values
    made: dict[str, Any] = {
        LINEAR: Mamba2(
            hidden_size=hidden,
            activation=activation_named(config, "mamba_hidden_act", "silu"),
            norm=RMSNorm(size=size, eps=eps, groups=sizes["groups"]),
            bias=bias,
            output_bias=bias,
            conv_bias=config.boolean("use_conv_bias", True),
            least=least,
            **sizes,
        ),
        "full_attention": Attention(
            hidden_size=hidden, heads=heads, kv_heads=kv_heads, head_dim=width, scale=scale, position=None
        ),
        "mlp": FeedForward(intermediate_size=config.integer("intermediate_size", 21504), **inner),
        "moe": _mixture(config, hidden, inner) if "moe" in types else None,
    }
    norm = RMSNorm(size=hidden, eps=eps, cast="after_weight")
    blocks = {kind: Block(sublayers=(SubLayer(mixer=made[kind], norm=norm),)) for kind in {*types}}
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=tuple(blocks[kind] for kind in types),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden),
        context_length=config.integer("max_position_embeddings", 4096),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds: dict[type, str] = {Mamba2: LINEAR, Attention: "full_attention", FeedForward: "mlp", MixtureOfExperts: "moe"}
    mixers = [block.sublayers[0].mixer for block in spec.blocks]
    for mixer in mixers:
        match mixer:
            case Mamba2():
                found |= {name: getattr(mixer, role) for name, (role, _) in _SIZES.items()}
                found |= {"mamba_hidden_act": name_of(mixer.activation), "use_conv_bias": mixer.conv_bias}
                found |= {"use_bias": mixer.bias, "time_step_min": mixer.least}
            case Attention():
                found |= {"num_attention_heads": mixer.heads, "num_key_value_heads": mixer.kv_heads}
                found |= {"head_dim": mixer.head_dim}
            case FeedForward():
                found |= {"intermediate_size": mixer.intermediate_size, "mlp_bias": mixer.up_bias}
                found |= {"mlp_hidden_act": name_of(mixer.activation)}
            case MixtureOfExperts():
                found |= {name: getattr(mixer, role) for name, (role, _) in _CHOICE.items()}
                found |= {"n_routed_experts": mixer.experts, "moe_intermediate_size": mixer.intermediate_size}
                found |= {"moe_shared_expert_intermediate_size": mixer.shared_size}
                found |= {} if mixer.latent is None else {"moe_latent_size": mixer.latent.width}
                found |= {"norm_topk_prob": mixer.normalise, "routed_scaling_factor": mixer.multiplier}
                shared = of_kind(mixer.shared, FeedForward)
                found |= {"mlp_hidden_act": name_of(mixer.expert.activation), "mlp_bias": shared.up_bias}
    norm = of_kind(spec.final_norm, RMSNorm)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "layers_block_type": [kinds[type(mixer)] for mixer in mixers],
        "layer_norm_epsilon": norm.eps,
        **({} if spec.context_length is None else {"max_position_embeddings": spec.context_length}),
        **found,
    }


_T = "backbone.layers.{layer}."
_M = _T + "mixer."
_EXPERT = _M + "experts.{expert}."
_STACKED = tuple(Stacked(f"{_M}experts.{name}_proj", (f"{_EXPERT}{name}_proj.weight",)) for name in ("up", "down"))
_UP_DOWN = ("up_proj", "down_proj")
_LATENT = (("fc1", "down_proj"), ("fc2", "up_proj"))


def _draw(chosen: Random) -> Config:
    """Draw a config with attention in at least one layer."""
    types = kind_by_layer(chosen, chosen.choice((1, 2, 3)), *_KINDS)
    types.insert(chosen.randrange(len(types) + 1), "*")
    attention_heads, kv_heads = grouped_heads(chosen)
    experts, heads = chosen.choice((2, 3, 5)), chosen.choice((1, 2, 4, 6, 9))
    own = {
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "mlp_hidden_act": chosen.choice([*ACTIVATIONS]),
        "mamba_hidden_act": chosen.choice([*ACTIVATIONS]),
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "time_step_min": 0.3,
        "layer_norm_epsilon": 1e-3,
    }
    return {
        "hybrid_override_pattern": "".join(types),
        "hidden_size": chosen.choice(ROWS),
        "num_attention_heads": attention_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chosen.choice(ODD),
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "mamba_num_heads": heads,
        "mamba_head_dim": chosen.choice(ODD),
        "n_groups": divisor(chosen, heads),
        "ssm_state_size": chosen.choice(ODD),
        "conv_kernel": chosen.choice((1, 2, 4, 5)),
        "chunk_size": chosen.choice((1, 3, 8, 64)),
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen.randint(1, experts),
        "moe_intermediate_size": chosen.choice((8, 24, 40)),
        "moe_shared_expert_intermediate_size": chosen.choice((8, 40)),
        **sometimes(chosen, own),
    }


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
        *leaves_of({"lm_head": "head"}),  # first, since transformers' modules call the rest `model`, behind it by name
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
        "num_logits_to_keep": "for which tokens of a prompt logits are computed",
        "hidden_dropout": "training only",
        "output_router_logits": "training only",
    },
    refused={
        "tie_word_embeddings": ((False, None), "transformers does not tie embeddings for this family"),
        "sliding_window": ((None,), "transformers' KV cache uses this field, but this family's layers ignore it"),
    },
)
