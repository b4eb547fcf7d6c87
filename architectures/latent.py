"""Latent attention in config.json and checkpoints, for DeepSeek-V2 (2405.04434) and the families that follow it.

All heads share one rotary key. The norms of the latents have a separate eps.

Source: transformers models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2Attention, which the others inherit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..components import LatentAttention, ModelSpec, RMSNorm, Rotary
from .base import Leaf, leaves_of
from .config import ConfigReader
from .decoder import DecoderFamily
from .draws import EVEN, ODD, ROWS, Config, sometimes
from .fields import USUAL, Field
from .layout import Layout
from .obstacles import of_kind
from .rope import PART, USUAL_ROTARY, RotaryKind, draw_rotary, read_mscale, read_rotary, write_mscale, write_rotary
from .usual import EMBEDDING, ENDS, FEED_FORWARD, NORMS, B, T

_EPS = 1e-6  # the eps of the norms of latents. The config only has that of the other norms.


def _from_zero(config: ConfigReader, name: str, default: int) -> int:
    """Return the value of a config field with a size that may be 0."""
    size = config.raw(name, default)
    return 0 if type(size) is int and size == 0 else config.integer(name, default)


LATENT: Mapping[str, Field] = {
    "kv_lora_rank": Field("attention.kv_rank", 512),
    "q_lora_rank": Field("attention.q_rank", 1536, ConfigReader.optional_integer),
    "qk_nope_head_dim": Field("attention.nope_dim", 128, _from_zero),
    "qk_rope_head_dim": Field("attention.rope_dim", 64),
    "v_head_dim": Field("attention.value_dim", 128),
    "attention_bias": Field("attention.output_bias", False),
}
"""The config fields of latent attention."""
_HEADS = ("num_key_value_heads", "head_dim")  # fields of key-value heads, which latent attention does not have
LATENT_FIELDS = {**{name: field for name, field in USUAL.items() if name not in _HEADS}, **LATENT}
"""The config fields of a dense model with latent attention."""


@dataclass(frozen=True)
class LatentDecoder(DecoderFamily):
    """The common properties of a decoder family with latent attention."""

    mixer: type[Any] = LatentAttention
    rotary: RotaryKind | None = None
    key_rotary: RotaryKind = USUAL_ROTARY
    """How transformers' config class states the RoPE of the rotary key."""
    kv_heads: int | None = None
    """The default of the config field `num_key_value_heads`, which must be the number of heads. None: the default is
    the number of heads."""
    interleaved: bool | None = None
    """Whether RoPE rotates pairs of adjacent dimensions. None: the config field `rope_interleave` decides."""
    gathered: bool = True
    """The value of `LatentAttention.gathered` if RoPE rotates pairs of adjacent dimensions."""
    tables: bool = False
    """Whether the config field `head_dim` is the width of RoPE's tables of cos and sin. Otherwise they are as wide as
    the rotary key."""

    @property
    def rotaries(self) -> Mapping[str, RotaryKind]:
        """How the config class states RoPE, for `Architecture.rotaries`."""
        return {"": self.key_rotary}

    def complete(self, config: ConfigReader, values: dict[str, Any], names: Mapping[str, str]) -> None:
        """Add no values. The config states all widths of heads, so none of them has to be computed."""

    def attentions(
        self, config: ConfigReader, values: Mapping[str, Any], own: Mapping[str, Any], _: Mapping[str, Any]
    ) -> Sequence[LatentAttention]:
        """Return the latent attention of every layer. All layers have the same one."""
        heads, fields = values["heads"], dict(own)
        kv_heads = config.optional_integer("num_key_value_heads", self.kv_heads)
        if kv_heads not in (None, heads):
            raise config.fail("num_key_value_heads", kv_heads, f"{heads}, which is num_attention_heads")
        rope_dim, bias, q_rank = fields.pop("rope_dim"), fields["output_bias"], fields["q_rank"]
        together = config.boolean("rope_interleave", True) if self.interleaved is None else self.interleaved
        rotary_kind = self.key_rotary._replace(pairs="adjacent" if together else "halves")
        scale, mscale = (fields["nope_dim"] + rope_dim) ** -0.5, read_mscale(config)
        width = config.optional_integer("head_dim", rope_dim) if self.tables else rope_dim
        width = values["hidden"] // heads if width is None else width  # transformers' class does the same
        position = read_rotary(config, rope_dim, values["context"], rotary_kind, width)
        attention = LatentAttention(
            hidden_size=values["hidden"],
            heads=heads,
            rope_heads=1,
            scale=scale * mscale * mscale,
            position=position,
            q_norm=None if q_rank is None else RMSNorm(size=q_rank, eps=_EPS),
            kv_norm=RMSNorm(size=fields["kv_rank"], eps=_EPS),
            qkv_bias=bias and q_rank is not None,  # queries without a latent have no bias
            kv_bias=bias and q_rank is None,
            fused=True,
            gathered=together and self.gathered,
            **fields,
        )
        return [attention] * values["layers"]

    def draw_sizes(self, chosen: Random) -> Config:
        """Return random sizes of a model that are legal together, as role -> size."""
        sizes = super().draw_sizes(chosen)
        heads, widths = chosen.choice((1, 2, 3, 5)), ODD if self.mixtures is None else ROWS
        return {
            **sizes,
            "heads": heads,
            "hidden": (heads if self.whole_heads else 1) * chosen.choice(widths),
            "attention.kv_rank": chosen.choice(ODD),
            "attention.q_rank": chosen.choice((None, *ODD)),
            "attention.nope_dim": chosen.choice((0, *ODD)),
            "attention.rope_dim": chosen.choice(EVEN),
            "attention.value_dim": chosen.choice(ODD),
        }

    def draw(self, chosen: Random, stated: Mapping[str, Any], **own: Any) -> Config:
        """Return a random legal config for tests. The arguments are those of `DecoderFamily.draw`."""
        config = super().draw(chosen, stated, **own)
        rope = draw_rotary(chosen, config["qk_rope_head_dim"], self.key_rotary)
        for parameters in (rope.get("rope_scaling"), rope.get("rope_parameters")):
            if parameters and parameters["rope_type"] not in ("default", "llama3") and chosen.random() < 0.5:
                parameters |= {"mscale_all_dim": 1.3, "factor": parameters.get("factor", 2.0)}
            if parameters and parameters["rope_type"] != "proportional":
                parameters.pop(PART, None)  # RoPE always rotates the whole rotary key
        pairs = sometimes(chosen, {"rope_interleave": False}) if self.interleaved is None else {}
        return {**config, "num_key_value_heads": config["num_attention_heads"], **rope, **pairs}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the config fields that describe a model. Raises the errors of `DecoderFamily.write`."""
        attention = of_kind(spec.blocks[0].attention, LatentAttention)
        rotary = of_kind(attention.position, Rotary)
        rope = write_rotary(rotary, rotary.dim, self.key_rotary)
        scaling = write_mscale(rope["rope_scaling"], attention.scale, attention.query_dim**-0.5)
        pairs = {"rope_interleave": rotary.pairs == "adjacent"} if self.interleaved is None else {}
        tables = {} if rotary.spread is None else {"head_dim": rotary.spread}
        fields = {"num_key_value_heads": attention.heads, **rope, "rope_scaling": scaling, **pairs, **tables}
        return {**fields, **super().write(spec)}


def latent_leaves(block: str, layer: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of latent attention.

    gptkit's names of the parameters begin with `block`, and the names in checkpoints begin with `layer`.
    """
    ours, theirs = f"{block}attention.", f"{layer}self_attn."
    down = tuple(
        Leaf(
            f"{theirs}kv_a_proj_with_mqa.{suffix}",
            (f"{ours}kv_down_proj.{suffix}", f"{ours}k_rope_proj.{suffix}"),
            layout,
        )
        for suffix, layout in (("weight", DOWN), ("bias", _DOWN_BIAS))
    )
    key, value = f"{ours}k_up_proj.weight", f"{ours}v_up_proj.weight"
    return (
        *leaves_of(
            {
                f"{theirs}q_proj": f"{ours}q_proj",
                f"{theirs}q_a_proj": f"{ours}q_down_proj",
                f"{theirs}q_a_layernorm": f"{ours}q_norm",
                f"{theirs}q_b_proj": f"{ours}q_up_proj",
            }
        ),
        *down,
        *leaves_of({f"{theirs}kv_a_layernorm": f"{ours}kv_norm"}),
        Leaf(f"{theirs}kv_b_proj.weight", (key, value), UP),
        Leaf(
            f"{theirs}kv_b_proj.weight", value, when=lambda block: not getattr(block.mixer("attention"), "nope_dim", 1)
        ),
        *leaves_of({f"{theirs}o_proj": f"{ours}o_proj"}),
    )


DOWN = Layout("part hidden", split="part", parts=("kv_rank", "rope_dim"))
_DOWN_BIAS = Layout("part", split="part", parts=("kv_rank", "rope_dim"))
UP = Layout("(heads part) kv_rank", split="part", parts=("nope_dim", "value_dim"))

COMPUTED = {"qk_head_dim": "computed from qk_nope_head_dim and qk_rope_head_dim"}
"""A config field that transformers writes but does not read, for `Architecture.irrelevant`."""
KNOWN = {"head_dim": "computed from qk_rope_head_dim", **COMPUTED}
"""Config fields that transformers writes but does not read, for families whose config classes overwrite `head_dim`."""

LATENT_LEAVES = (*leaves_of(EMBEDDING), *latent_leaves(B, T), *leaves_of({**FEED_FORWARD, **NORMS, **ENDS}))
