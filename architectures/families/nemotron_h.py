"""Nemotron-H (NVIDIA 2504.03624) and Nemotron 3 Nano: one mixer per layer. It is Mamba-2, attention without a position
encoding, a plain feed-forward with squared ReLU, or a mixture of such feed-forwards.

Conversions keep the tensors of `mtp.`, which draft tokens.

Source: transformers models/nemotron_h/{configuration,modeling}_nemotron_h.py.
"""

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
from ..fields import Field, draw_fields, of_part, read_fields, size, write_tree
from ..recurrences import LINEAR, least_step, mamba2_leaves
from ..releases import since
from ..usual import B

_KINDS = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}  # older files have a letter per layer
_NAMES = {Mamba2: LINEAR, Attention: "full_attention", FeedForward: "mlp", MixtureOfExperts: "moe"}
_FIELDS = {
    "layers_block_type": Field(
        "own.types",
        None,
        ConfigReader.raw,
        of=lambda spec: [_NAMES[type(block.sublayers[0].mixer)] for block in spec.blocks],
    ),
    "hidden_size": Field("hidden", 4096, draw=among(*ROWS)),
    "vocab_size": Field("vocab", 131072),
    "layer_norm_epsilon": Field("final_norm.eps", 1e-5),
    "max_position_embeddings": Field("context", 4096),
    "mamba_num_heads": Field("recurrence.heads", 128),
    "mamba_head_dim": size("recurrence.head_dim", 64),
    "n_groups": Field("recurrence.groups", 8),
    "ssm_state_size": size("recurrence.state_size", 128),
    "conv_kernel": size("recurrence.kernel", 4, 1, 2, 4, 5),
    "chunk_size": size("recurrence.chunk", 128, 1, 3, 8, 64),
    "mamba_hidden_act": Field("recurrence.activation", "silu"),
    "use_bias": Field("recurrence.bias recurrence.output_bias", False),
    "use_conv_bias": Field("recurrence.conv_bias", True),
    "time_step_min": Field("recurrence.least", 0.001, least_step, draw=among(0.001, 0.3)),
    "num_attention_heads": Field("attention.heads", 32),
    "num_key_value_heads": Field("attention.kv_heads", 8),
    "head_dim": size("attention.head_dim", 128),
    "intermediate_size": size("dense.intermediate_size", 21504, 1, 7, 33, 64),
    "mlp_hidden_act": Field("feed_forward.activation", "relu2"),
    "mlp_bias": Field("feed_forward.up_bias feed_forward.down_bias", False),
}
_MIXTURE = {
    "n_routed_experts": Field("mixture.experts", 8, partial(ConfigReader.integer, most=MOST_EXPERTS)),
    "num_experts_per_tok": Field("mixture.top_k", 2, ConfigReader.integer),
    "n_group": Field("mixture.groups", 1),
    "topk_group": Field("mixture.top_groups", 1),
    "moe_intermediate_size": size("mixture.intermediate_size", 7688, *ROWS),
    "moe_shared_expert_intermediate_size": size("mixture.shared_size", 7688, 8, 40),
    "norm_topk_prob": Field("mixture.normalise", True),
    "routed_scaling_factor": Field("mixture.multiplier", 1.0),
    "moe_latent_size": Field("latent.width", None, ConfigReader.optional_integer, draw=among(None)),
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
    values = read_fields(_MIXTURE, config)
    own, width = of_part(values, "mixture"), values["latent.width"]
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
    types, values = _types(config), read_fields(_FIELDS, config)
    mamba, attention, inner = (of_part(values, part) for part in ("recurrence", "attention", "feed_forward"))
    hidden, eps = values["hidden"], values["final_norm.eps"]
    if mamba["heads"] % mamba["groups"]:
        raise config.fail("n_groups", mamba["groups"], f"a divisor of mamba_num_heads ({mamba['heads']})")
    inner["hidden_size"] = hidden
    for name in _MIXTURE:
        config.raw(name)  # transformers also writes these fields if no layer has experts, and then ignores their values
    norm = RMSNorm(size=mamba["heads"] * mamba["head_dim"], eps=eps, groups=mamba["groups"])
    mixers: dict[str, Any] = {
        LINEAR: Mamba2(hidden_size=hidden, norm=norm, **mamba),
        "full_attention": Attention(
            hidden_size=hidden, scale=attention["head_dim"] ** -0.5, position=None, **attention
        ),
        "mlp": FeedForward(intermediate_size=values["dense.intermediate_size"], **inner),
        "moe": _mixture(config, hidden, inner) if "moe" in types else None,
    }
    norm = RMSNorm(size=hidden, eps=eps, cast="after_weight")
    blocks = {kind: Block(sublayers=(SubLayer(mixer=mixers[kind], norm=norm),)) for kind in {*types}}
    return ModelSpec(
        embedding=Embedding(vocab_size=values["vocab"], hidden_size=hidden),
        blocks=tuple(blocks[kind] for kind in types),
        final_norm=norm,
        head=Head(vocab_size=values["vocab"], hidden_size=hidden),
        context_length=values["context"],
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    mixers = {type(block.sublayers[0].mixer): block.sublayers[0].mixer for block in spec.blocks}
    dense, mixture = mixers.get(FeedForward), mixers.get(MixtureOfExperts)
    parts = {"dense": dense, "feed_forward": dense or getattr(mixture, "shared", None), "mixture": mixture}
    return write_tree({**_FIELDS, **_MIXTURE}, spec, parts)


def _draw(chosen: Random) -> Config:
    """Return a random config with attention in at least one layer."""
    letters = kind_by_layer(chosen, chosen.choice((1, 2, 3)), *_KINDS)
    letters.insert(chosen.randrange(len(letters) + 1), "*")
    (queries, kv_heads), heads = grouped_heads(chosen), chosen.choice((1, 2, 4, 6, 9))
    count = chosen.choice((2, 3, 5))
    sizes = {
        "vocab": VOCAB,
        "context": TABLE,
        "recurrence.heads": heads,
        "recurrence.groups": divisor(chosen, heads),
        "attention.heads": queries,
        "attention.kv_heads": kv_heads,
        "mixture.experts": count,
        "mixture.top_k": chosen.randint(1, count),
    }
    return {"hybrid_override_pattern": "".join(letters), **draw_fields({**_FIELDS, **_MIXTURE}, chosen, sizes)}


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
