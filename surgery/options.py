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
    Option("norm", NORMS, "Of every layer, and at the ends.", "rmsnorm|layernorm"),
    Option("block", NORMS, "Attention and feed-forward one after the other, or side by side.", "serial|parallel"),
    Option("layers", NORMS, "Which to keep, how many to add, or how many of the most useful.", "0-5,8-|+4|auto:24"),
    Option("hidden", NORMS, "Width of the stream between layers.", "N"),
    Option("attention", ATTENTION, "Key-value heads, or a latent of so many numbers.", "mha|mqa|gqa:N|mla:N"),
    Option("heads", ATTENTION, "Query heads.", "N"),
    Option("head_dim", ATTENTION, "Width of a head.", "N"),
    Option("position", POSITIONS, "How tokens know where they are.", "rope|alibi|learned|none"),
    Option("rope_scaling", POSITIONS, "Longer contexts, so many times.", "yarn:4|llama3:8|ntk:2|linear:2|dynamic:2"),
    Option("rotary_dim", POSITIONS, "Dimensions of a head that RoPE turns.", "N"),
    Option("rope_pairs", POSITIONS, "Which dimensions turn together.", "halves|adjacent"),
    Option("context", POSITIONS, "Length of the position table, or of the context.", "N"),
    Option(
        "mlp",
        FEED_FORWARD,
        "moe:8x2: 8 experts, 2 of them a token.",
        "gated|plain|moe:ExK|dense",
        settings={"seed": int, "drop_zero_bias": bool},
    ),
    Option("activation", FEED_FORWARD, "Rescaled so that it is as near as can be.", "silu|gelu|relu|…"),
    Option("intermediate", FEED_FORWARD, "Width of the feed-forward.", "N"),
    Option("vocab", VOCABULARY, "How many tokens, or which.", "N|multiple:64|prune:FILE"),
    Option("tie", VOCABULARY, "One table for embedding and head.", flag=True),
    Option("untie", VOCABULARY, "A table for the head alone.", flag=True),
    Option("merge_lora", WEIGHTS, "A PEFT adapter into the weights.", "DIR"),
    Option("drop", WEIGHTS, "Biases that are to go: head.bias, key.bias, …", "BIASES"),
    Option("fold", WEIGHTS, "Constants into weights beside them.", "value-bias|scale|norm"),
    Option("quantize", WEIGHTS, "Round to a grid of so few bits; stored as before.", "int8|int4:64"),
)
