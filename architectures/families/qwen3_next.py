"""Qwen3-Next (Qwen 2025): gated DeltaNet in three of four layers and gated attention in the others, norms that multiply
by 1 + weight, RoPE on a part of each head, and mixtures of small experts with a gated shared one.

Source: transformers models/qwen3_next/{configuration,modeling}_qwen3_next.py. Tensors of `mtp.`, which draft tokens,
are carried along.
"""

from collections.abc import Mapping
from typing import Any

from ...components import GatedDeltaNet, ModelSpec, RMSNorm
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import Decoder, Mixtures
from ..fields import ATTENTION_BIAS, ROUNDED_ROUTER, Field, with_defaults
from ..layout import Layout
from ..lenses import one_of, sparse_by_step, write_by_step
from ..obstacles import of_kind
from ..rope import PART, RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, ROUTED, B, T, mixed_leaves, shared_expert
from . import qwen2_moe

LINEAR = "linear_attention"
_SIZES = {
    "linear_num_value_heads": ("heads", 32),
    "linear_num_key_heads": ("key_heads", 16),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("kernel", 4),
}


def recurrences(fused: str) -> Any:
    """What reads the layers without attention; `fused`: of the component."""

    def read(config: ConfigReader, values: Mapping[str, Any]) -> list[GatedDeltaNet | None]:
        count, every = values["layers"], config.integer("full_attention_interval", 4)
        types = one_of(config, count, [LINEAR if (n + 1) % every else "full_attention" for n in range(count)], LINEAR)
        sizes: dict[str, Any] = {role: config.integer(name, default) for name, (role, default) in _SIZES.items()}
        if sizes["heads"] % sizes["key_heads"]:
            wanted = f"a multiple of linear_num_key_heads ({sizes['key_heads']})"
            raise config.fail("linear_num_value_heads", sizes["heads"], wanted)
        norm = RMSNorm(size=sizes["value_dim"], eps=values["eps"])
        options: Any = {"activation": values["activation"], "norm": norm, "fused": fused}
        mixer = GatedDeltaNet(hidden_size=values["hidden"], **sizes, **options)
        return [mixer if kind == LINEAR else None for kind in types]

    return read


def write_recurrences(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that `recurrences` reads."""
    mixers = [block.mixer("recurrence") for block in spec.blocks]
    first = next((of_kind(each, GatedDeltaNet) for each in mixers if each is not None), None)
    sizes = {} if first is None else {name: getattr(first, role) for name, (role, _) in _SIZES.items()}
    return {**sizes, "layer_types": ["full_attention" if each is None else LINEAR for each in mixers]}


GATED: dict[str, Any] = {
    "norm.cast": "after_weight",
    "norm.gain": "1 + weight",
    "attention.gated": True,
    "attention.gate": "with queries",
}
BIASES = ATTENTION_BIAS._replace(role=f"{ATTENTION_BIAS.role} attention.gate_bias")
PARTLY = RotaryKind(part=PART, whole=0.25)

_DECODER = Decoder(
    {
        **with_defaults(qwen2_moe.FIELDS, num_hidden_layers=48, num_key_value_heads=2, head_dim=256),
        "attention_bias": BIASES,
        "moe_intermediate_size": Field("expert_size", 512),
        "shared_expert_intermediate_size": Field("shared_size", 512),
        "num_experts": Field("mixture.experts", 512),
        "num_experts_per_tok": Field("mixture.top_k", 10),
        "norm_topk_prob": Field("mixture.normalise", True),
    },
    head_norms="same",
    fixed={**GATED, **ROUNDED_ROUTER, "mixture.shared_gate": True},
    rotary=PARTLY,
    recurrent=recurrences("by head"),
    mixtures=Mixtures(sparse_by_step, write_by_step),
    written=write_recurrences,
)

R, _THEIRS = B + "recurrence.", T + "linear_attn."
_Q, _GATE = B + "attention.q_proj.", B + "attention.gate_proj."
_PARTS = tuple(f"{R}{name}" for name in "qkv")


def _parts(layout: str, *parts: str) -> Layout:
    return Layout(layout, split="part", parts=parts)


DELTA = (
    *(Leaf(_THEIRS + name, R + name) for name in ("dt_bias", "A_log")),
    Leaf(
        _THEIRS + "conv1d.weight",
        tuple(f"{each}_conv.weight" for each in _PARTS),
        Layout("part one kernel", "part (one kernel)", "part", ("keys", "keys", "values")),
    ),
    *leaves_of({f"{_THEIRS}{name}": f"{R}{ours}" for name, ours in (("norm", "norm"), ("out_proj", "o_proj"))}),
)
"""A recurrence, without what its projections are held in."""

QUERIES_AND_GATE = (
    *(
        Leaf(f"{T}self_attn.q_proj.{each}", (_Q + each, _GATE + each), _parts(f"(heads part head_dim){of}", "1", "1"))
        for each, of in (("weight", " hidden"), ("bias", ""))
    ),
    *leaves_of({name: ours for name, ours in ATTENTION.items() if not name.endswith("q_proj")}),
)
"""Attention, whose gate lies behind its queries, head by head."""

_PROJECTIONS = (
    Leaf(
        _THEIRS + "in_proj_qkvz.weight",
        (*(f"{each}_proj.weight" for each in _PARTS), R + "gate_proj.weight"),
        _parts("(key_heads part) hidden", "key_dim", "key_dim", "group_values", "group_values"),
    ),
    Leaf(
        _THEIRS + "in_proj_ba.weight",
        (R + "beta_proj.weight", R + "decay_proj.weight"),
        _parts("(key_heads part) hidden", "group", "group"),
    ),
)
SPLIT_PROJECTIONS = (
    Leaf(
        _THEIRS + "in_proj_qkv.weight",
        tuple(f"{each}_proj.weight" for each in _PARTS),
        _parts("part hidden", "keys", "keys", "values"),
    ),
    *leaves_of(
        {f"{_THEIRS}in_proj_{name}": f"{R}{ours}_proj" for name, ours in (("z", "gate"), ("b", "beta"), ("a", "decay"))}
    ),
)
"""Those of Qwen3.5."""

REST = (*leaves_of({**FEED_FORWARD, T + "input_layernorm": B + "recurrence_norm"}), *leaves_of({**NORMS, **ENDS}))
"""What stands behind the mixers."""
MIXTURE = {**ROUTED, **shared_expert("shared_expert"), T + "mlp.shared_expert_gate": B + "feed_forward.shared_gate"}

_QWEN3_NEXT = _DECODER.architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    mixed_leaves(MIXTURE, (*leaves_of(EMBEDDING), *REST, *DELTA, *QUERIES_AND_GATE, *_PROJECTIONS)),
    released="2025-09",
    kinds=_DECODER.kinds | {GatedDeltaNet},
    carried={"mtp": ("mtp.",)},
)
