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

from collections.abc import Callable
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

__all__ = ["ALWAYS_FP32", "GGUF", "Expressed", "GgufArchitecture", "expressed", "gguf_architecture", "spec_of"]

FUSED_WEIGHT = Layout("(slot head_dim) hidden", split="slot", parts=("heads", "kv_heads", "kv_heads"))
"""All queries, then all keys, then all values, whatever the family's own order."""
FUSED_BIAS = Layout("(slot head_dim)", split="slot", parts=("heads", "kv_heads", "kv_heads"))

# llama.cpp rotates neighbouring rows of a "llama" model, transformers row i with row i + half.
Q_WEIGHT = Layout("(heads half two) hidden", "(heads two half) hidden")
K_WEIGHT = Layout("(kv_heads half two) hidden", "(kv_heads two half) hidden")
Q_BIAS = Layout("(heads half two)", "(heads two half)")
K_BIAS = Layout("(kv_heads half two)", "(kv_heads two half)")

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


def pairs(*names: tuple[str, str], suffixes: tuple[str, ...] = ("weight", "bias")) -> tuple[Leaf, ...]:
    """Leaves of one block that are pure renames: (GGUF name, shared name), each with these suffixes."""
    return tuple(Leaf(f"{T}{there}.{suffix}", f"{B}{here}.{suffix}") for there, here in names for suffix in suffixes)


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
# llama.cpp loads these of a "qwen2" or "qwen3" file, and refuses a file with others.
QWEN = (
    *ENDS,
    *(
        leaf
        for leaf in GATED
        if not leaf.checkpoint.endswith(("attn_output.bias", "gate.bias", "up.bias", "down.bias"))
    ),
    *pairs(("attn_q", "attention.q_proj"), ("attn_k", "attention.k_proj")),
)
PERMUTED = (
    Leaf(T + "attn_q.weight", B + "attention.q_proj.weight", Q_WEIGHT),
    Leaf(T + "attn_q.bias", B + "attention.q_proj.bias", Q_BIAS),
    Leaf(T + "attn_k.weight", B + "attention.k_proj.weight", K_WEIGHT),
    Leaf(T + "attn_k.bias", B + "attention.k_proj.bias", K_BIAS),
)
FUSED = (
    Leaf(T + "attn_qkv.weight", qkv("weight"), FUSED_WEIGHT),
    Leaf(T + "attn_qkv.bias", qkv("bias"), FUSED_BIAS),
)
PLAIN = pairs(
    ("attn_output", "attention.o_proj"),
    ("ffn_up", "feed_forward.up_proj"),
    ("ffn_down", "feed_forward.down_proj"),
)
NORMS = pairs(("attn_norm", "attention_norm"), ("ffn_norm", "feed_forward_norm"))
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

    name: general.architecture, and the prefix of its metadata keys.
    family: the family it is read as; written: the families whose models it is written for.
    read: the file's facts -> the fields of a config.json of `family`.
    write: a tree -> metadata, keys without prefix. It may assume that the tree fits: `expressed` reads the result back.
    square: llama.cpp wants its queries as wide as the model.
    dropped: tensors that hold nothing the tree needs.
    """

    name: str
    family: str
    written: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    read: Callable[[Facts], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Value]]
    square: bool = True
    dropped: tuple[str, ...] = ()

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.family]

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
        extras = extras_of(spec)
        shapes: dict[str, Shape] = {leaf.checkpoint: leaf.shape for leaf in self.bind(spec)}
        shapes |= {name: (len(values),) for name, values in extras.items()}
        stored = {key: fp32(value) if isinstance(value, float) else value for key, value in self.metadata(spec).items()}
        found, _ = spec_of(Facts(self.name, stored, shapes, lambda name: tuple(map(fp32, extras[name]))))
        back: ModelSpec = _as_before(spec, _as_stored(spec), found)
        return back

    def config(self, facts: Facts) -> dict[str, Any]:
        """A config.json of the family from what the file says. Raises ConfigError."""
        family = self.architecture
        return {"model_type": family.name, "architectures": [family.hf_class], **self.read(facts)}

    def is_dropped(self, name: str, layers: int) -> bool:
        """Whether a tensor of that name holds nothing the tree needs."""
        parts = name.split(".")
        layer = parts[1] if len(parts) > 1 and parts[1].isascii() and parts[1].isdigit() else ""
        known = bool(layer) and len(layer) < 10 and int(layer) < layers
        return any(
            template == name or (known and template.format(layer=int(layer)) == name) for template in self.dropped
        )


# --- metadata -> config.json, and a tree -> metadata ---


def read_llama(facts: Facts) -> dict[str, Any]:
    return {
        **_gated(facts),
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.shapes,
    }


def read_qwen2(facts: Facts) -> dict[str, Any]:
    return {**_gated(facts), "use_sliding_window": False}


def read_qwen3(facts: Facts) -> dict[str, Any]:
    return {
        **_gated(facts),
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
    }


def _gated(facts: Facts) -> dict[str, Any]:
    """What llama-like families share."""
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.head_dim(hidden, heads)
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
    }


def write_gated(spec: ModelSpec) -> dict[str, Value]:
    return {
        **_sizes(spec),
        "attention.layer_norm_rms_epsilon": spec.blocks[0].attention_norm.eps,
        **_head_sizes(spec),
        "vocab_size": spec.vocab_size,
        **_rotary(spec),
    }


def read_gpt2(facts: Facts) -> dict[str, Any]:
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    facts.head_dim(hidden, heads, only=True)
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


def read_bloom(facts: Facts) -> dict[str, Any]:
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    facts.head_dim(hidden, heads, only=True)
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


def read_falcon(facts: Facts) -> dict[str, Any]:
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.head_dim(hidden, heads, only=True)
    layout = facts.string("tensor_data_layout", "jploski")
    facts.require("tensor_data_layout", layout, "jploski")
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


def write_normed(spec: ModelSpec) -> dict[str, Value]:
    return {**_sizes(spec), "attention.layer_norm_epsilon": spec.blocks[0].attention_norm.eps}


def write_falcon(spec: ModelSpec) -> dict[str, Value]:
    return {**write_normed(spec), "tensor_data_layout": "jploski", **_rotary(spec)}


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


def _head_sizes(spec: ModelSpec) -> dict[str, Value]:
    _, attention, _ = usual_layer(spec)
    head_dim = attention.head_dim
    return {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}


def _rotary(spec: ModelSpec) -> dict[str, Value]:
    return write_rope(of_kind(spec.blocks[0].attention.position, Rotary))


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
            name="llama",
            family="llama",
            written=("llama", "mistral"),
            leaves=(*ENDS, *GATED, *PERMUTED),
            read=read_llama,
            write=write_gated,
            square=False,
            dropped=ROPE_BUFFERS,
        ),
        GgufArchitecture(
            name="qwen2",
            family="qwen2",
            written=("qwen2",),
            leaves=QWEN,
            read=read_qwen2,
            write=write_gated,
            dropped=ROPE_BUFFERS,
        ),
        GgufArchitecture(
            name="qwen3",
            family="qwen3",
            written=("qwen3",),
            leaves=QWEN,
            read=read_qwen3,
            write=write_gated,
            square=False,
            dropped=ROPE_BUFFERS,
        ),
        GgufArchitecture(
            name="gpt2",
            family="gpt2",
            written=("gpt2",),
            leaves=(*ENDS, Leaf(POSITIONS, "positions.weight"), *NORMS, *FUSED, *PLAIN),
            read=read_gpt2,
            write=write_normed,
        ),
        GgufArchitecture(
            name="bloom",
            family="bloom",
            written=("bloom",),
            leaves=(
                *ENDS,
                Leaf("token_embd_norm.weight", "embedding.norm.weight"),
                Leaf("token_embd_norm.bias", "embedding.norm.bias"),
                *NORMS,
                *FUSED,
                *PLAIN,
            ),
            read=read_bloom,
            write=write_normed,
        ),
        GgufArchitecture(
            name="falcon",
            family="falcon",
            written=("falcon",),
            # llama.cpp reads no biases of Falcon's linears, and knows neither its ALiBi nor its serial blocks.
            leaves=(
                *ENDS,
                *FALCON_NORMS,
                FUSED[0],
                *(leaf for leaf in PLAIN if leaf.checkpoint.endswith("weight")),
            ),
            read=read_falcon,
            write=write_falcon,
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
    config = kind.config(facts)
    try:
        return kind.architecture.spec(config), config
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
    """A tree as llama.cpp reads it, `family`'s architecture tried before the others.

    Raises:
        CannotExpress: none of llama.cpp's architectures here computes this tree; says what is in the way.

    """
    kinds = sorted(GGUF.values(), key=lambda kind: family not in kind.written)
    found, refused = first_of(kinds, spec, clear=("rounding",))
    if found is None:
        raise (refused[0] if family in kinds[0].written else min(refused, key=lambda each: each.weight)).refusal()
    kind = cast("GgufArchitecture", found.target)
    return Expressed(kind, kind.metadata(spec), kind.bind(spec), extras_of(spec))


def extras_of(spec: ModelSpec) -> dict[str, tuple[float, ...]]:
    """The tensors that stand for numbers of a tree."""
    position = spec.blocks[0].attention.position
    return rope_tensors(position) if isinstance(position, Rotary) else {}


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
        position = attention.position
        if isinstance(position, Rotary):
            position = refitted(position)
        attention = msgspec.structs.replace(attention, window=window, position=position)
        blocks.append(block.replaced(attention=attention))
    return msgspec.structs.replace(spec, blocks=tuple(blocks), context_length=context)
