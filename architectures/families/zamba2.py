"""Zamba2 (Zyphra 2411.15242): Mamba-2 in every layer. Before it, some layers run a transformer block that reads the
hidden states and the embeddings. Several layers share one such block, but have their own adapters.

Source: transformers models/zamba2/{configuration,modeling}_zamba2.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from ...components import Block, Embedding, Head, Mamba2, ModelSpec, RMSNorm, Rotary, SharedTransformer, SubLayer
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import MAX_LAYERS, ConfigReader
from ..draws import CONTEXTS, EVEN, VOCAB, Config, Random, among, divisor, kind_by_layer, sometimes
from ..fields import Field, component, constant, draw_fields, of_part, read_fields, size, times_hidden, write_tree
from ..layout import Layout
from ..obstacles import of_kind
from ..recurrences import LINEAR, least_step, mamba2_leaves
from ..rope import ORIGINAL, PART, ROTARY, USUAL_ROTARY, draw_rotary, read_rotary, write_rotary
from ..usual import EMBEDDING, B, T
from .bamba import ENDS

_HYBRID = "hybrid"
_USUAL = [LINEAR] * 6 + [_HYBRID] + ([LINEAR] * 5 + [_HYBRID]) * 6 + [LINEAR] * 4 + [_HYBRID]
_USUAL += [LINEAR] * 3 + [_HYBRID] + [LINEAR] * 2


def _types(config: ConfigReader, count: int) -> list[str]:
    """Return the kind of each of the `count` layers."""
    types = config.kinds_of_layers("layers_block_type")
    types = _USUAL if types is None else types
    if isinstance(types, list) and len(types) > MAX_LAYERS:
        raise config.fail("layers_block_type", types, f"a list of at most {MAX_LAYERS:,} layers")
    if not isinstance(types, list) or any(kind not in (LINEAR, _HYBRID) for kind in types):
        raise config.fail("layers_block_type", types, f"a list of {LINEAR} and {_HYBRID}")
    if len(types) != count:
        raise config.fail("num_hidden_layers", count, f"{len(types)}, the length of layers_block_type")
    if _HYBRID not in types:
        raise config.fail(
            "layers_block_type", types, f"at least one {_HYBRID} layer: without one, transformers' cache fails"
        )
    return types


def _refuse_others(config: ConfigReader, computed: dict[str, Any]) -> None:
    """Refuse config fields that do not have the values in `computed`, with which transformers overwrites them."""
    config.refuse({name: ((None, value), f"of the other fields it is {value}") for name, value in computed.items()})


_FIELDS = {
    "vocab_size": Field("vocab", 32000),
    "hidden_size": Field("hidden", 2560),
    "num_hidden_layers": Field("layers", 54),
    "layers_block_type": Field(
        "own.types",
        None,
        ConfigReader.raw,
        of=lambda spec: [LINEAR if block.mixer("shared") is None else _HYBRID for block in spec.blocks],
    ),
    "n_mamba_heads": Field("recurrence.heads", 8),
    "mamba_ngroups": Field("recurrence.groups", 1),
    "mamba_d_state": size("recurrence.state_size", 64),
    "mamba_d_conv": size("recurrence.kernel", 4, 1, 2, 4, 5),
    "time_step_min": Field("recurrence.least", 0.001, least_step, draw=among(0.001, 0.3)),
    "chunk_size": size("recurrence.chunk", 256, 1, 3, 8, 64),
    "mamba_expand": times_hidden("own.inner", 2, "recurrence.inner", "hidden_size", 2560),
    "add_bias_linear": Field("recurrence.bias recurrence.output_bias shared.bias", False),
    "intermediate_size": Field(
        "shared.intermediate_size", None, ConfigReader.optional_integer, draw=among(1, 7, 33, 64)
    ),
    "hidden_act": Field("shared.activation", "gelu"),
    "num_attention_heads": Field("shared.heads", 32),
    "num_key_value_heads": Field("shared.kv_heads", None, ConfigReader.optional_integer),
    "num_mem_blocks": Field(
        "own.blocks", 1, of=lambda spec: len({*spec.shared_block_sources.values()}), draw=among(1, 2, 3)
    ),
    "use_shared_attention_adapter": Field("shared.attention_rank", False, write=lambda rank: rank is not None),
    "adapter_rank": size("shared.rank", 128),
    "use_mem_rope": Field("own.rope", False, of=lambda spec: component(spec, "position") is not None),
    "rms_norm_eps": Field("final_norm.eps", 1e-5),
    "max_position_embeddings": Field("context", 4096),
    "tie_word_embeddings": constant(
        "head.tied", True, "without tied embeddings, transformers does not share blocks between layers either"
    ),
}


def _mamba(config: ConfigReader, values: Mapping[str, Any]) -> Mamba2:
    """Return the Mamba-2 mixer, which is the same in every layer."""
    sizes, inner = of_part(values, "recurrence"), values["own.inner"]
    heads, groups = sizes["heads"], sizes["groups"]
    if inner % heads or inner // heads > 2**31 - 1:
        raise config.fail("n_mamba_heads", heads, f"a divisor of {inner}, the width of all heads together")
    if heads % groups:
        raise config.fail("mamba_ngroups", groups, f"a divisor of n_mamba_heads ({heads})")
    _refuse_others(config, {"mamba_headdim": inner // heads})
    norm = RMSNorm(size=inner, eps=1e-5, groups=groups)
    own: dict[str, Any] = {"head_dim": inner // heads, "activation": "silu", "conv_bias": True}
    return Mamba2(hidden_size=values["hidden"], norm=norm, **sizes, **own)


def _shared(config: ConfigReader, values: Mapping[str, Any], context: int) -> SharedTransformer:
    """Return the shared transformer block, without the fields that differ by layer."""
    hidden, own = values["hidden"], of_part(values, "shared")
    heads, width = own["heads"], 2 * hidden
    kv_heads = own["kv_heads"] or heads
    if width % heads:
        raise config.fail("num_attention_heads", heads, f"a divisor of twice hidden_size ({width})")
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    dim, adapted = width // heads, own["attention_rank"]
    if adapted and kv_heads != heads:
        wanted = f"num_attention_heads ({heads}): adapters of keys and values are as wide as those of queries"
        raise config.fail("num_key_value_heads", kv_heads, wanted)
    _refuse_others(config, {"attention_hidden_size": width, "attention_head_dim": dim, "head_dim": dim})
    for name in ("rope_theta", "rope_scaling", "rope_parameters", PART, ORIGINAL):
        config.raw(name)  # transformers does not read it without RoPE
    own |= {
        "kv_heads": kv_heads,
        "intermediate_size": own["intermediate_size"] or 4 * hidden,
        "attention_rank": own["rank"] if adapted else None,
    }
    return SharedTransformer(
        hidden_size=hidden,
        head_dim=dim,
        scale=(dim / 2) ** -0.5,
        norm=RMSNorm(size=width, eps=values["final_norm.eps"]),
        inner_norm=RMSNorm(size=hidden, eps=values["final_norm.eps"]),
        position=read_rotary(config, dim, context) if values["own.rope"] else None,
        fused=True,
        **own,
    )


def _read(config: ConfigReader) -> ModelSpec:
    """Read the tree of a config.json."""
    values = read_fields(_FIELDS, config)
    types, hidden, vocab = _types(config, values["layers"]), values["hidden"], values["vocab"]
    if config.kinds_of_layers() not in (None, types):
        wanted = "what layers_block_type says, of which transformers makes hybrid_layer_ids"
        raise config.fail("layer_types", config.raw("layer_types"), wanted)
    _refuse_others(config, {"hybrid_layer_ids": [layer for layer, kind in enumerate(types) if kind == _HYBRID]})
    context = 16384 if config.boolean("use_long_context", False) else values["context"]
    norm, several = RMSNorm(size=hidden, eps=values["final_norm.eps"]), values["own.blocks"]
    mamba, shared = SubLayer(mixer=_mamba(config, values), norm=norm), _shared(config, values, context)
    plain, blocks = Block(sublayers=(mamba,)), list[Block]()
    uses = 0
    for kind in types:
        if kind == LINEAR:
            blocks.append(plain)
            continue
        own = {"number": uses % several, "weights_from": "own" if uses < several else "earlier"}
        shared_layer = SubLayer(mixer=structs.replace(shared, **own), onto="next")
        blocks.append(Block(sublayers=(shared_layer, mamba)))
        uses += 1
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=tuple(blocks),
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=True),
        context_length=context,
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields of a tree."""
    shared = of_kind(component(spec, "shared"), SharedTransformer)
    if shared.rank is None:
        raise CannotExpress("zamba2 needs adapters for its shared feed-forwards, but the model has none")
    rotary = {} if shared.position is None else write_rotary(of_kind(shared.position, Rotary), shared.head_dim)
    return {**write_tree(_FIELDS, spec), **rotary}


def _draw(chosen: Random) -> Config:
    """Return a random config. The heads divide twice the hidden size, and those of Mamba-2 divide a multiple of it."""
    kinds = kind_by_layer(chosen, chosen.choice((0, 1, 3)), "mamba", _HYBRID)
    kinds.insert(chosen.randrange(len(kinds) + 1), _HYBRID)
    heads, dim, adapted = chosen.choice((1, 2, 3, 6)), chosen.choice(EVEN), chosen.random() < 0.4
    hidden, expand = heads * dim // 2, chosen.choice((1, 2, 3))
    recurring = divisor(chosen, hidden * expand)
    sizes = {
        "vocab": VOCAB,
        "hidden": hidden,
        "layers": len(kinds),
        "context": chosen.choice(CONTEXTS),
        "recurrence.heads": recurring,
        "recurrence.groups": divisor(chosen, recurring),
        "shared.heads": heads,
        "shared.kv_heads": heads if adapted else divisor(chosen, heads),
    }
    own = {"mamba_headdim": hidden * expand // recurring, "attention_head_dim": dim, "use_long_context": True}
    return {
        **draw_fields(_FIELDS, chosen, sizes),
        "layers_block_type": kinds,
        "mamba_expand": expand,
        "use_shared_attention_adapter": adapted,
        **draw_rotary(chosen, dim, USUAL_ROTARY),
        **sometimes(chosen, own),
    }


_S, _BLOCK = B + "shared.", T + "shared_transformer."
_ATTENTION, _INNER = _BLOCK + "self_attn.", _BLOCK + "feed_forward."


def _gate_up(*columns: str) -> Layout:
    """Return the layout of a tensor with the rows of gate above those of up. `columns` are its other axes."""
    return Layout(" ".join(("(part intermediate)", *columns)), split="part", parts=("1", "1"))


def _both(suffix: str, last: str) -> tuple[str, str]:
    """Return gptkit's names of two parameters of the shared block: gate_SUFFIX.LAST and up_SUFFIX.LAST."""
    return f"{_S}gate_{suffix}.{last}", f"{_S}up_{suffix}.{last}"


def _is_plain(block: Block) -> bool:
    return block.mixer(SharedTransformer.slot) is None


def _is_hybrid(block: Block) -> bool:
    return not _is_plain(block)


def _recurrent(theirs: str, when: Any) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of Mamba-2 and its norm.

    Args:
        theirs: the prefix of their names in checkpoints.
        when: returns whether a block has tensors with this prefix.
    """
    norm = leaves_of({theirs + "input_layernorm": B + "recurrence_norm"})
    return tuple(replace(leaf, when=when) for leaf in (*mamba2_leaves(theirs + "mamba."), *norm))


_ADAPTERS = tuple(
    Leaf(f"{_ATTENTION}linear_{name}_adapter_list.{{use}}.{at}.weight", f"{_S}{name}_adapter_{part}.weight")
    for name in "qkv"
    for at, part in enumerate(("down", "up"))
)

_ZAMBA2 = Architecture(
    name="zamba2",
    model_types=("zamba2",),
    hf_class="Zamba2ForCausalLM",
    hf_config="Zamba2Config",
    kinds=frozenset({Mamba2, RMSNorm, SharedTransformer, *ROTARY}),
    former_values={"layers_block_type": {"linear_attention": "mamba"}},
    read=_read,
    write=_write,
    draw=_draw,
    leaves=(
        *leaves_of(EMBEDDING),
        *_recurrent(T, _is_plain),
        *leaves_of({T + "linear": _S + "stream_proj"}),
        *_recurrent(T + "mamba_decoder.", _is_hybrid),
        *leaves_of({f"{_ATTENTION}{name}_proj": f"{_S}{name}_proj" for name in "qkvo"}),
        *_ADAPTERS,
        Leaf(_INNER + "gate_up_proj.weight", _both("proj", "weight"), _gate_up("hidden")),
        Leaf(_INNER + "gate_up_proj.bias", _both("proj", "bias"), _gate_up()),
        *leaves_of({_INNER + "down_proj": _S + "down_proj"}),
        Leaf(_INNER + "gate_up_proj_adapter_list.{use}.0.weight", _S + "adapter_down.weight"),
        Leaf(_INNER + "gate_up_proj_adapter_list.{use}.1.weight", _both("adapter_up", "weight"), _gate_up("rank")),
        *leaves_of({_BLOCK + "input_layernorm": _S + "norm", _BLOCK + "pre_ff_layernorm": _S + "inner_norm"}),
        *leaves_of(ENDS),
    ),
    lent=_BLOCK,
    released="2024-07",
    prefix="model.",
    token_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    irrelevant={
        **dict.fromkeys(("time_step_max", "time_step_floor"), "how training starts"),
        **dict.fromkeys(("use_mamba_kernels", "use_mem_eff_path"), "which kernels compute it"),
        **dict.fromkeys(("kv_channels", "num_query_groups"), "not read by transformers' model"),
        "use_conv_bias": "not read by transformers' model: convolutions have one",
    },
)
