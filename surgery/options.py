"""What `gptkit swap` offers, for its help: no torch, which the swaps themselves need.

A test holds this list to the registry: every option that is registered is here, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OPTIONS", "Option", "spelled"]


@dataclass(frozen=True)
class Option:
    """An option of the registry as the command line has it.

    name: as in Python and recipes. group: the heading that it stands under. flag: it takes no value. settings: what a
    recipe's step may set beside it, and the type of each.
    """

    name: str
    group: str
    help: str
    metavar: str = ""
    flag: bool = False
    settings: Mapping[str, type] = field(default_factory=dict)

    @property
    def spelled(self) -> str:
        """On the command line."""
        return spelled(self.name)


def spelled(name: str) -> str:
    """merge_lora -> --merge-lora."""
    return f"--{name.replace('_', '-')}"


NORMS, ATTENTION, POSITIONS = "Norms and layers", "Attention", "Positions"
FEED_FORWARD, VOCABULARY, WEIGHTS = "Feed-forward", "Vocabulary and head", "Weights"

OPTIONS: tuple[Option, ...] = (
    Option("norm", NORMS, "Which norm the layers and both ends have.", "rmsnorm | layernorm"),
    Option("block", NORMS, "Run attention and feed-forward one after the other, or side by side.", "serial | parallel"),
    Option("layers", NORMS, "Keep these layers, add so many, or keep the most useful.", "0-5,8- | +4 | auto:24"),
    Option("hidden", NORMS, "The width of the residual stream.", "N"),
    Option("attention", ATTENTION, "How many key-value heads, or how wide a latent.", "mha | mqa | gqa:N | mla:N"),
    Option("heads", ATTENTION, "The number of query heads.", "N"),
    Option("head_dim", ATTENTION, "The width of a head.", "N"),
    Option("position", POSITIONS, "How tokens know where they are.", "rope | alibi | learned | none"),
    Option(
        "rope_scaling",
        POSITIONS,
        "Stretch RoPE to a context so many times as long.",
        "yarn:4 | llama3:8 | ntk:2 | linear:2 | dynamic:2",
    ),
    Option("rotary_dim", POSITIONS, "How many dimensions of a head RoPE turns.", "N"),
    Option("rope_pairs", POSITIONS, "Which dimensions of a head RoPE turns together.", "halves | adjacent"),
    Option("context", POSITIONS, "The length of the position table, or of the context.", "N"),
    Option(
        "mlp",
        FEED_FORWARD,
        "The kind of feed-forward; moe:8x2 has 8 experts, 2 of them per token.",
        "gated | swiglu | plain | moe:ExK | dense",
        settings={"seed": int, "drop_zero_bias": bool},
    ),
    Option(
        "activation", FEED_FORWARD, "Another activation, rescaled to be as near as can be.", "silu | gelu | relu | …"
    ),
    Option("intermediate", FEED_FORWARD, "The width of the feed-forward.", "N"),
    Option("vocab", VOCABULARY, "How many tokens to have, or which.", "N | multiple:64 | prune:FILE"),
    Option("tie", VOCABULARY, "Share one table between embedding and head.", flag=True),
    Option("untie", VOCABULARY, "Give the head a table of its own.", flag=True),
    Option("merge_lora", WEIGHTS, "Merge a PEFT adapter into the weights.", "DIR"),
    Option("drop", WEIGHTS, "Leave out biases: head.bias, key.bias, …", "BIASES"),
    Option("fold", WEIGHTS, "Fold constants into the weights beside them.", "value-bias | scale | norm"),
    Option("quantize", WEIGHTS, "Round weights to so few bits; they are stored as before.", "int8 | int4:64"),
)
