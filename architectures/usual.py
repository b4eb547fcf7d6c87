"""The tensor names and layouts that most families share, as llama introduced them.

A family's file names its tensors with the tables here and imports none of them from another family. `B` begins the
shared names of a layer, and `T` begins the names of a layer in files.
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
"""A gated feed-forward whose gate and up projections are one tensor."""

NORMS = {T + "input_layernorm": B + "attention_norm", T + "post_attention_layernorm": B + "feed_forward_norm"}

ENDS = {"model.norm": "final_norm", "lm_head": "head"}

LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **NORMS, **ENDS})

ROTARY_BUFFERS = (T + "self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

PROJECTIONS = ("down_proj", "gate_proj", "up_proj")

ROUTED: dict[str, str] = {
    T + "mlp.gate": B + "feed_forward.router",
    **{f"{T}mlp.experts.{{expert}}.{name}": f"{B}feed_forward.experts.{{expert}}.{name}" for name in PROJECTIONS},
}
"""The modules of a mixture, by the names that most families have."""

STACKED = (
    Stacked(
        T + "mlp.experts.gate_up_proj", tuple(f"{T}mlp.experts.{{expert}}.{name}.weight" for name in PROJECTIONS[1:])
    ),
    Stacked(T + "mlp.experts.down_proj", (T + "mlp.experts.{expert}.down_proj.weight",)),
)


def shared_expert(name: str) -> dict[str, str]:
    """Return the modules of a shared expert that checkpoints call `name`."""
    return {f"{T}mlp.{name}.{each}": f"{B}feed_forward.shared.{each}" for each in PROJECTIONS}


def mixed_leaves(
    modules: Mapping[str, str],
    leaves: Sequence[Leaf] = LEAVES,
    stacked: Sequence[Stacked] = (),
    *,
    choice: str = "",
    layout: Layout = IDENTITY,
    buffer: bool = True,
) -> tuple[Leaf, ...]:
    """The leaves of a family that has those of dense layers, and such modules in the others; `choice` is the name of
    what the choice of experts is biased with, `layout` how it lies, and `buffer` whether transformers' module has it as
    a buffer. Where transformers' modules have other names than the files, `stacked` has them, since they decide the
    order.
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
"""Every key-value head's queries, then its key, then its value. With a group of one this is BLOOM's [heads, 3,
head_dim]; with one key-value head it is MQA's q … q, k, v."""

GROUPED_BIAS = Layout("(kv_heads slot head_dim)", split="slot", parts=("group", "1", "1"))


_OUTPUT_NORMS = {
    T + "post_attention_layernorm": B + "attention_output_norm",
    T + "post_feedforward_layernorm": B + "feed_forward_output_norm",
}

OUTPUT_NORM_LEAVES = leaves_of({**EMBEDDING, **ATTENTION, **FEED_FORWARD, **_OUTPUT_NORMS, **ENDS})


def fairseq(top: str) -> dict[str, str]:
    """Return the modules of a layer in models from fairseq; names in checkpoints begin with `top`."""
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
    """Return whether attention and feed-forward run in parallel, each with its own norm (Falcon 40B)."""
    return block.parallel and block.feed_forward_norm is not None


def other_norms(block: Block) -> bool:
    """Return whether a block has another arrangement of norms: one that both share, or two in a row."""
    return not two_parallel_norms(block)
