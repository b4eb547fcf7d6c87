"""llama.cpp's model architectures in GGUF files: their tensors as leaves, their metadata as each family's config.json.

A GGUF file names an architecture ("llama", "gpt2", …), says its sizes under that prefix (`llama.block_count`) and
holds tensors under llama.cpp's own names (`blk.0.attn_q.weight`). `read` makes a config.json of the metadata, and the
family itself makes the tree of that; `write` gives the metadata of a tree, which `expressed` reads back: where the two
trees differ, GGUF has no place for the difference. Tensors that stand for numbers of the tree (`rope_freqs.weight`)
are `extras`.

Source: llama.cpp, convert_hf_to_gguf.py with conversion/*.py (what is written), src/models/*.cpp and
llama-model.cpp (what is read, and what is assumed where nothing is said).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ..components import Component, ModelSpec, Rotary
from ..errors import CannotExpress, ConfigError, UnknownFamily
from . import ARCHITECTURES, Architecture
from .base import BoundLeaf, Leaf, bind, qkv, usual_layer
from .families.falcon import other_norms, two_parallel_norms
from .gguf_facts import Facts, Value, fp32, is_close
from .gguf_rope import read_rope, refitted, rope_tensors, write_rope
from .layout import Layout, Shape
from .obstacles import Kinds, first_of, of_kind

B, T = "blocks.{layer}.", "blk.{layer}."

POSITIONS = "position_embd.weight"
ALWAYS_FP32 = (POSITIONS,)
"""Matrices that llama.cpp's converter writes as fp32 whatever was asked for, as everything of one dimension."""

ENDS = (
    Leaf("token_embd.weight", "embedding.weight"),
    Leaf("output_norm.weight", "final_norm.weight"),
    Leaf("output_norm.bias", "final_norm.bias"),
    Leaf("output.weight", "head.weight"),
)


def pairs(*names: tuple[str, str]) -> tuple[Leaf, ...]:
    """Leaves of one block that are pure renames: (GGUF name, shared name), each for weight and bias."""
    return tuple(Leaf(f"{T}{there}.{x}", f"{B}{here}.{x}") for there, here in names for x in ("weight", "bias"))


NORMS = pairs(("attn_norm", "attention_norm"), ("ffn_norm", "feed_forward_norm"))
PLAIN = pairs(
    ("attn_output", "attention.o_proj"), ("ffn_up", "feed_forward.up_proj"), ("ffn_down", "feed_forward.down_proj")
)
GATED = pairs(
    ("attn_norm", "attention_norm"),
    ("attn_v", "attention.v_proj"),
    ("attn_output", "attention.o_proj"),
    ("attn_q_norm", "attention.q_norm"),
    ("attn_k_norm", "attention.k_norm"),
    ("ffn_norm", "feed_forward_norm"),
    ("ffn_gate", "feed_forward.gate_proj"),
    ("ffn_up", "feed_forward.up_proj"),
    ("ffn_down", "feed_forward.down_proj"),
)
UNREAD = ("attn_output.bias", "gate.bias", "up.bias", "down.bias")
"""What llama.cpp does not load of a "qwen2" or "qwen3" file: it refuses one that has them."""
QWEN = (
    *ENDS,
    *(leaf for leaf in GATED if not leaf.checkpoint.endswith(UNREAD)),
    *pairs(("attn_q", "attention.q_proj"), ("attn_k", "attention.k_proj")),
)
# llama.cpp rotates neighbouring rows of a "llama" model, transformers row i with row i + half.
PERMUTED = tuple(
    Leaf(
        f"{T}attn_{x}.{suffix}",
        f"{B}attention.{x}_proj.{suffix}",
        Layout(f"({heads} half two){rest}", f"({heads} two half){rest}"),
    )
    for x, heads in (("q", "heads"), ("k", "kv_heads"))
    for suffix, rest in (("weight", " hidden"), ("bias", ""))
)
# All queries, then all keys, then all values, whatever the family's own order.
FUSED = tuple(
    Leaf(f"{T}attn_qkv.{suffix}", qkv(suffix), Layout(pattern, split="slot", parts=("heads", "kv_heads", "kv_heads")))
    for suffix, pattern in (("weight", "(slot head_dim) hidden"), ("bias", "(slot head_dim)"))
)
FALCON_NORMS = tuple(
    Leaf(f"{T}{there}.{suffix}", f"{B}{here}.{suffix}", when=when)
    for there, here, when in (
        ("attn_norm", "attention_norm", other_norms),
        ("attn_norm", "feed_forward_norm", two_parallel_norms),
        ("attn_norm_2", "attention_norm", two_parallel_norms),
    )
    for suffix in ("weight", "bias")
)


@dataclass(frozen=True)
class GgufArchitecture:
    """One of llama.cpp's architectures, as what may hold a tree: see `obstacles.Target`.

    name: general.architecture, the prefix of its metadata keys, and the family that it is read as.
    read: the file's facts -> the fields of a config.json of the family.
    write: a tree -> metadata, keys without prefix. It may assume that the tree fits: `expressed` reads the result back.
    square: llama.cpp wants its queries as wide as the model.
    dropped: tensors that hold nothing the tree needs.
    also: further families whose models it is written for.
    """

    name: str
    leaves: tuple[Leaf, ...]
    read: Callable[[Facts], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Value]]
    square: bool = True
    dropped: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The families whose models it is written for."""
        return (self.name, *self.also)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.name]

    @property
    def owner(self) -> str:
        return f"GGUF's {self.name}"

    @property
    def kinds(self) -> Kinds:
        return self.architecture.kinds

    @property
    def usual(self) -> ModelSpec:
        return self.architecture.usual

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The file's tensors for a tree. Raises CannotExpress: a shared tensor has no name here."""
        return bind(self.owner, self.leaves, spec)

    def metadata(self, spec: ModelSpec) -> dict[str, Value]:
        """The metadata of a tree, keys with the architecture's prefix. Raises CannotExpress."""
        _, attention, _ = usual_layer(spec)
        if self.square and attention.heads * attention.head_dim != spec.hidden_size:
            raise CannotExpress(f"it wants heads times head_dim to be the width, {spec.hidden_size}")
        return {f"{self.name}.{key}": value for key, value in self.write(spec).items()}

    def back(self, spec: ModelSpec) -> ModelSpec:
        """The tree of a file that this one was written to; what GGUF says in another way, or rounds to fp32, to the
        same effect is as it was. Raises CannotExpress, ConfigError.
        """
        extras = _extras_of(spec)
        shapes: dict[str, Shape] = {leaf.checkpoint: leaf.shape for leaf in self.bind(spec)}
        shapes |= {name: (len(values),) for name, values in extras.items()}
        stored = {key: fp32(value) if isinstance(value, float) else value for key, value in self.metadata(spec).items()}
        found, _ = spec_of(Facts(self.name, stored, shapes, lambda name: tuple(map(fp32, extras[name]))))
        back: ModelSpec = _as_before(spec, _as_stored(spec), found)
        return back


# --- metadata -> config.json, and a tree -> metadata ---


def gated(fixed: Mapping[str, Any] = {}, **biases: str) -> Callable[[Facts], dict[str, Any]]:
    """What reads a llama-like family: `fixed` fields, and flags that are on where the first layer has such a bias."""

    def read(facts: Facts) -> dict[str, Any]:
        hidden, heads, head_dim = facts.widths()
        context = facts.integer("context_length")
        return {
            "vocab_size": facts.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": facts.integer("feed_forward_length"),
            "num_hidden_layers": facts.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": facts.tied,
            **read_rope(facts, head_dim, context),
            **fixed,
            **{flag: f"blk.0.{name}.bias" in facts.shapes for flag, name in biases.items()},
        }

    return read


def _write_gated(spec: ModelSpec) -> dict[str, Value]:
    """A llama-like family's metadata."""
    _, attention, _ = usual_layer(spec)
    width = attention.head_dim
    return {
        **_sizes(spec),
        "attention.layer_norm_rms_epsilon": spec.blocks[0].attention_norm.eps,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "vocab_size": spec.vocab_size,
        **write_rope(of_kind(attention.position, Rotary)),
    }


def _read_gpt2(facts: Facts) -> dict[str, Any]:
    hidden, heads, _ = facts.widths(only=True)
    return {
        "vocab_size": facts.vocab_size,
        "n_positions": facts.integer("context_length"),
        "n_embd": hidden,
        "n_layer": facts.layers,
        "n_head": heads,
        "n_inner": facts.integer("feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": facts.tied,
    }


def _read_bloom(facts: Facts) -> dict[str, Any]:
    hidden, heads, _ = facts.widths(only=True)
    facts.require("feed_forward_length", facts.integer("feed_forward_length", 4 * hidden), 4 * hidden)
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": hidden,
        "n_layer": facts.layers,
        "n_head": heads,
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "seq_length": facts.integer("context_length"),
        "tie_word_embeddings": facts.tied,
    }


def _read_falcon(facts: Facts) -> dict[str, Any]:
    hidden, heads, head_dim = facts.widths(only=True)
    facts.require("tensor_data_layout", facts.string("tensor_data_layout", "jploski"), "jploski")
    kv_heads = facts.integer("attention.head_count_kv", heads)
    context = facts.integer("context_length")
    two_norms = "blk.0.attn_norm_2.weight" in facts.shapes
    # 40b and 11b share keys out over groups; 7b has one for all, and models of the old kind may have one a head.
    grouped = two_norms or kv_heads not in (1, heads)
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads if grouped else None,
        "new_decoder_architecture": grouped,
        "multi_query": not grouped and kv_heads == 1,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if grouped else None,
        "alibi": False,
        "bias": False,
        "ffn_hidden_size": facts.integer("feed_forward_length"),
        "activation": "gelu",
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": facts.tied,
        **read_rope(facts, head_dim, context),
    }


def _write_normed(spec: ModelSpec) -> dict[str, Value]:
    """The metadata of a family with layer norms."""
    return {**_sizes(spec), "attention.layer_norm_epsilon": spec.blocks[0].attention_norm.eps}


def _write_falcon(spec: ModelSpec) -> dict[str, Value]:
    rotary = of_kind(spec.blocks[0].attention.position, Rotary)
    return {**_write_normed(spec), "tensor_data_layout": "jploski", **write_rope(rotary)}


def _sizes(spec: ModelSpec) -> dict[str, Value]:
    _, attention, feed_forward = usual_layer(spec)
    return {
        "context_length": _context(spec),
        "embedding_length": spec.hidden_size,
        "feed_forward_length": feed_forward.intermediate_size,
        "block_count": len(spec.blocks),
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
    }


def _context(spec: ModelSpec) -> int:
    """The context to state: BLOOM may know none, and llama.cpp's converter then takes its width."""
    return spec.context_length or spec.hidden_size


ROPE_BUFFERS = (
    T + "attn_rot_embd.weight",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

GGUF: dict[str, GgufArchitecture] = {
    architecture.name: architecture
    for architecture in (
        GgufArchitecture(
            "llama",
            (*ENDS, *GATED, *PERMUTED),
            gated(attention_bias="attn_q", mlp_bias="ffn_up"),
            _write_gated,
            square=False,
            dropped=ROPE_BUFFERS,
            also=("mistral",),
        ),
        GgufArchitecture("qwen2", QWEN, gated({"use_sliding_window": False}), _write_gated, dropped=ROPE_BUFFERS),
        GgufArchitecture(
            "qwen3",
            QWEN,
            gated({"use_sliding_window": False}, attention_bias="attn_q"),
            _write_gated,
            square=False,
            dropped=ROPE_BUFFERS,
        ),
        GgufArchitecture(
            "gpt2", (*ENDS, Leaf(POSITIONS, "positions.weight"), *NORMS, *FUSED, *PLAIN), _read_gpt2, _write_normed
        ),
        GgufArchitecture(
            "bloom",
            (
                *ENDS,
                Leaf("token_embd_norm.weight", "embedding.norm.weight"),
                Leaf("token_embd_norm.bias", "embedding.norm.bias"),
                *NORMS,
                *FUSED,
                *PLAIN,
            ),
            _read_bloom,
            _write_normed,
        ),
        GgufArchitecture(
            "falcon",
            # llama.cpp reads no biases of Falcon's linears, and knows neither its ALiBi nor its serial blocks.
            (*ENDS, *FALCON_NORMS, FUSED[0], *(leaf for leaf in PLAIN if leaf.checkpoint.endswith("weight"))),
            _read_falcon,
            _write_falcon,
        ),
    )
}


def gguf_architecture(name: object) -> GgufArchitecture:
    """llama.cpp's architecture of that name. Raises UnknownFamily."""
    if not isinstance(name, str) or name not in GGUF:
        raise UnknownFamily(f"the GGUF architecture {name!r:.60} is not one gptkit knows", f"known: {', '.join(GGUF)}")
    return GGUF[name]


def spec_of(facts: Facts) -> tuple[ModelSpec, dict[str, Any]]:
    """The tree of a GGUF file, and the config.json it was made from. Raises ConfigError, UnknownFamily."""
    kind = gguf_architecture(facts.name)
    family = kind.architecture
    config = {"model_type": family.name, "architectures": [family.hf_class], **kind.read(facts)}
    try:
        return family.spec(config), config
    except ConfigError as error:
        # The message speaks of a config.json, which lies nowhere.
        raise ConfigError(f"its metadata, written as {error.message}", error.hint) from error


@dataclass(frozen=True)
class Expressed:
    """A tree in GGUF's terms.

    metadata: its keys with the architecture's prefix (integers are uint32, floats float32); `general.architecture` is
        left to the writer.
    leaves: the tensors; extras: further fp32 tensors by name, [n] each, that stand for numbers of the tree.
    """

    architecture: GgufArchitecture
    metadata: dict[str, Value]
    leaves: list[BoundLeaf]
    extras: dict[str, tuple[float, ...]] = field(default_factory=dict)


def expressed(spec: ModelSpec, family: str | None = None) -> Expressed:
    """A tree as llama.cpp reads it, `family`'s architecture tried before the others. Raises CannotExpress: none of
    llama.cpp's architectures here computes this tree; says what is in the way.
    """
    kinds = sorted(GGUF.values(), key=lambda kind: family not in kind.written)
    found, refused = first_of(kinds, spec, clear=("rounding",))
    if found is None:
        raise (refused[0] if family in kinds[0].written else min(refused, key=lambda each: each.weight)).refusal()
    kind = cast("GgufArchitecture", found.target)
    return Expressed(kind, kind.metadata(spec), kind.bind(spec), _extras_of(spec))


def _extras_of(spec: ModelSpec) -> dict[str, tuple[float, ...]]:
    """The tensors that stand for numbers of a tree."""
    return rope_tensors(spec.blocks[0].attention.position)


def _as_before(spec: Any, stored: Any, found: Any) -> Any:
    """A tree that was read, with the original's values where it says what `stored` does, but for rounding to fp32."""
    if isinstance(found, Component) and type(spec) is type(stored) is type(found):
        names = found.__struct_fields__
        fields = {name: _as_before(*(getattr(each, name) for each in (spec, stored, found))) for name in names}
        return type(found)(**fields)
    if isinstance(found, tuple) and isinstance(stored, tuple) and len(stored) == len(found):
        return tuple(_as_before(*each) for each in zip(spec, stored, found, strict=True))
    return spec if stored == found or is_close(stored, found) else found


def _as_stored(spec: ModelSpec) -> ModelSpec:
    """The tree with what GGUF says in another way, to the same effect, put as it comes back."""
    context = _context(spec)
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        # A window that reaches over the whole context hides nothing.
        window = None if attention.window is not None and attention.window >= context else attention.window
        attention = msgspec.structs.replace(attention, window=window, position=refitted(attention.position))
        blocks.append(block.replaced(attention=attention))
    return msgspec.structs.replace(spec, blocks=tuple(blocks), context_length=context)
