"""The tensor names and layouts that most families share, as llama introduced them.

Files of families use these tables, and do not import tables from other families. `B` is the prefix of gptkit's
parameter names in a layer, and `T` is the prefix of a layer's tensor names in checkpoints.
"""

from collections.abc import Mapping, Sequence

from ..components import Block
from .base import Leaf, Stacked, by_name, leaves_of
from .layout import IDENTITY, Layout

B, T = "blocks.{layer}.", "model.layers.{layer}."

EMBEDDING = {"model.embed_tokens": "embedding"}

ATTENTION = {
    f"{T}self_attn.{name}": f"{B}attention.{name}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}

FEED_FORWARD = {f"{T}mlp.{name}": f"{B}feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")}

FUSED_FEED_FORWARD = (
    Leaf(
        T + "mlp.gate_up_proj.weight",
        (B + "feed_forward.gate_proj.weight", B + "feed_forward.up_proj.weight"),
        Layout("(part intermediate) hidden", split="part", parts=("1", "1")),
    ),
    *leaves_of({T + "mlp.down_proj": B + "feed_forward.down_proj"}),
)
"""The leaves (entries of the tensor table) of a gated feed-forward whose gate and up projections are one tensor."""

NORMS = {T + "input_layernorm": B + "attention_norm", T + "post_attention_layernorm": B + "feed_forward_norm"}

ENDS = {"model.norm": "final_norm", "lm_head": "head"}

LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **NORMS, **ENDS})

ROTARY_BUFFERS = (T + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

PROJECTIONS = ("down_proj", "gate_proj", "up_proj")

ROUTED: dict[str, str] = {
    T + "mlp.gate": B + "feed_forward.router",
    **{f"{T}mlp.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{name}" for name in PROJECTIONS},
}
"""The modules of a mixture of experts: the names that most families have in checkpoints -> gptkit's names."""

STACKED = (
    Stacked(
        T + "mlp.experts.gate_up_proj", tuple(f"{T}mlp.experts.{{expert}}.{name}.weight" for name in PROJECTIONS[1:])
    ),
    Stacked(T + "mlp.experts.down_proj", (T + "mlp.experts.{expert}.down_proj.weight",)),
)


def shared_expert(name: str) -> dict[str, str]:
    """Return the modules of a shared expert: their names in checkpoints -> gptkit's names.

    `name` is the name of the shared expert in checkpoints.
    """
    return {f"{T}mlp.{name}.{projection}": f"{B}feed_forward.shared.{projection}" for projection in PROJECTIONS}


def mixed_leaves(
    modules: Mapping[str, str],
    leaves: Sequence[Leaf] = LEAVES,
    stacked: Sequence[Stacked] = (),
    *,
    choice: str = "",
    layout: Layout = IDENTITY,
    buffer: bool = True,
) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of a family in which some layers are mixtures of experts.

    Args:
        modules: the modules of mixtures: names in checkpoints -> gptkit's names.
        leaves: the leaves of dense layers and of everything outside of layers.
        stacked: the parameters that have other names in transformers' modules. These names decide the order of tensors.
        choice: the name in checkpoints of the bias for the choice of experts, or "" if there is none.
        layout: the layout of this bias.
        buffer: whether transformers' module stores this bias as a buffer.
    """
    biased = (Leaf(choice, B + "feed_forward.choice.bias", layout, buffer=buffer),) if choice else ()
    return by_name((*leaves, *leaves_of(modules), *biased), stacked)


CORRECTION = T + "mlp.gate.e_score_correction_bias"

OF_DRAFTS = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    "extra layers after the last one that draft tokens (multi-token prediction)",
)

SANDWICH = {
    T + "input_layernorm": B + "attention_norm",
    T + "post_attention_layernorm": B + "attention_output_norm",
    T + "pre_feedforward_layernorm": B + "feed_forward_norm",
    T + "post_feedforward_layernorm": B + "feed_forward_output_norm",
}

SANDWICH_LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **SANDWICH, **ENDS})

GROUPED_WEIGHT = Layout("(kv_heads slot head_dim) hidden", split="slot", parts=("group", "1", "1"))
"""The layout of a tensor that contains the query, key and value projections by key-value head: first the rows of its
queries, then those of its key, then those of its value. With one query head per key-value head, this is BLOOM's [heads,
3, head_dim]. With one key-value head, it is the layout of multi-query attention: all queries, then the key, then the
value."""

GROUPED_BIAS = Layout("(kv_heads slot head_dim)", split="slot", parts=("group", "1", "1"))


_OUTPUT_NORMS = {
    T + "post_attention_layernorm": B + "attention_output_norm",
    T + "post_feedforward_layernorm": B + "feed_forward_output_norm",
}

OUTPUT_NORM_LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_OUTPUT_NORMS, **ENDS})


def fairseq(top: str) -> dict[str, str]:
    """Return the modules of a layer in models from fairseq: their names in checkpoints -> gptkit's names.

    `top` is the prefix of the names in checkpoints.
    """
    b, t = "blocks.{layer}.", top + "layers.{layer}."
    return {
        **{f"{t}self_attn.{name}_proj": f"{b}attention.{name}_proj" for name in ("k", "v", "q")},
        t + "self_attn.out_proj": b + "attention.o_proj",
        t + "self_attn_layer_norm": b + "attention_norm",
        t + "fc1": b + "feed_forward.up_proj",
        t + "fc2": b + "feed_forward.down_proj",
        t + "final_layer_norm": b + "feed_forward_norm",
    }


def two_parallel_norms(block: Block) -> bool:
    """Return whether attention and feed-forward run in parallel and have separate norms (Falcon 40B)."""
    return block.parallel and block.feed_forward_norm is not None


def other_norms(block: Block) -> bool:
    """Return whether attention and feed-forward share a norm or run one after the other.

    This is the opposite of `two_parallel_norms`.
    """
    return not two_parallel_norms(block)
