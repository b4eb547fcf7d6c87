"""Zamba2 (Zyphra 2411.15242): Mamba-2 in every layer. Before it, some layers run a transformer block that reads the
hidden states and the embeddings. Several layers share one such block, but have their own adapters.

Source: transformers models/zamba2/{configuration,modeling}_zamba2.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from ...components import Block, Embedding, Head, Mamba2, ModelSpec, RMSNorm, Rotary, SharedTransformer, SubLayer
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import MAX_LAYERS, ConfigReader
from ..draws import CONTEXTS, EVEN, ODD, Config, Random, among, divisor, kind_by_layer, sometimes
from ..fields import ACTIVATIONS, Field, activation_named, draw_fields, name_of, read_fields, size, write_fields
from ..layout import Layout
from ..obstacles import of_kind
from ..recurrences import LINEAR, least_step, mamba2_leaves, multiple_of_hidden
from ..rope import ORIGINAL, PART, ROTARY, USUAL_ROTARY, draw_rotary, read_rotary, write_rotary
from ..usual import EMBEDDING, B, T
from .bamba import ENDS

_HYBRID = "hybrid"
_USUAL = [LINEAR] * 6 + [_HYBRID] + ([LINEAR] * 5 + [_HYBRID]) * 6 + [LINEAR] * 4 + [_HYBRID]
_USUAL += [LINEAR] * 3 + [_HYBRID] + [LINEAR] * 2


def _types(config: ConfigReader) -> list[str]:
    """Return the kind of each layer."""
    count, types = config.layers("num_hidden_layers", 54), config.kinds_of_layers("layers_block_type")
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


_MAMBA = {
    "n_mamba_heads": Field("heads", 8),
    "mamba_ngroups": Field("groups", 1),
    "mamba_d_state": size("state_size", 64),
    "mamba_d_conv": size("kernel", 4, 1, 2, 4, 5),
    "time_step_min": Field("least", 0.001, least_step, draw=among(0.001, 0.3)),
    "chunk_size": size("chunk", 256, 1, 3, 8, 64),
}


def _mamba(config: ConfigReader, hidden: int, bias: bool) -> Mamba2:
    """Return the Mamba-2 mixer, which is the same in every layer."""
    sizes = read_fields(_MAMBA, config)
    heads, groups, inner = sizes["heads"], sizes["groups"], hidden * config.integer("mamba_expand", 2)
    if inner % heads or inner // heads > 2**31 - 1:
        raise config.fail("n_mamba_heads", heads, f"a divisor of {inner}, the width of all heads together")
    if heads % groups:
        raise config.fail("mamba_ngroups", groups, f"a divisor of n_mamba_heads ({heads})")
    _refuse_others(config, {"mamba_headdim": inner // heads})
    own = {"head_dim": inner // heads, "bias": bias, "output_bias": bias, "activation": "silu"}
    norm = RMSNorm(size=inner, eps=1e-5, groups=groups)
    return Mamba2(hidden_size=hidden, norm=norm, conv_bias=True, **sizes, **own)


def _shared(config: ConfigReader, hidden: int, context: int, eps: float, bias: bool) -> SharedTransformer:
    """Return the shared transformer block, without the fields that differ by layer."""
    heads, width = config.integer("num_attention_heads", 32), 2 * hidden
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if width % heads:
        raise config.fail("num_attention_heads", heads, f"a divisor of twice hidden_size ({width})")
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    dim, rank = width // heads, config.integer("adapter_rank", 128)
    adapted = config.boolean("use_shared_attention_adapter", False)
    if adapted and kv_heads != heads:
        wanted = f"num_attention_heads ({heads}): adapters of keys and values are as wide as those of queries"
        raise config.fail("num_key_value_heads", kv_heads, wanted)
    own = {"attention_hidden_size": width, "attention_head_dim": dim, "head_dim": dim}
    _refuse_others(config, own)
    has_rope = config.boolean("use_mem_rope", False)
    for name in ("rope_theta", "rope_scaling", "rope_parameters", PART, ORIGINAL):
        config.raw(name)  # transformers does not read it without RoPE
    return SharedTransformer(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=(dim / 2) ** -0.5,
        intermediate_size=config.optional_integer("intermediate_size") or 4 * hidden,
        activation=activation_named(config, "hidden_act", "gelu"),
        norm=RMSNorm(size=width, eps=eps),
        inner_norm=RMSNorm(size=hidden, eps=eps),
        position=read_rotary(config, dim, context) if has_rope else None,
        bias=bias,
        rank=rank,
        attention_rank=rank if adapted else None,
        fused=True,
    )


def _read(config: ConfigReader) -> ModelSpec:
    types, hidden, vocab = _types(config), config.integer("hidden_size", 2560), config.integer("vocab_size", 32000)
    if config.kinds_of_layers() not in (None, types):
        wanted = "what layers_block_type says, of which transformers makes hybrid_layer_ids"
        raise config.fail("layer_types", config.raw("layer_types"), wanted)
    _refuse_others(config, {"hybrid_layer_ids": [layer for layer, kind in enumerate(types) if kind == _HYBRID]})
    eps, bias = config.number("rms_norm_eps", 1e-5), config.boolean("add_bias_linear", False)
    context = config.integer("max_position_embeddings", 4096)
    context = 16384 if config.boolean("use_long_context", False) else context
    norm, several = RMSNorm(size=hidden, eps=eps), config.integer("num_mem_blocks", 1)
    mamba = SubLayer(mixer=_mamba(config, hidden, bias), norm=norm)
    shared = _shared(config, hidden, context, eps, bias)
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


def _several(shared: Sequence[Any]) -> int:
    """Return the number of shared blocks. The layers that run one use them in turn."""
    return sum(of_kind(mixer, SharedTransformer).weights_from == "own" for mixer in shared)


def _write(spec: ModelSpec) -> dict[str, Any]:
    norm, mamba = of_kind(spec.final_norm, RMSNorm), of_kind(spec.blocks[0].mixer("recurrence"), Mamba2)
    mixers = [block.mixer("shared") for block in spec.blocks]
    hybrids = [mixer for mixer in mixers if mixer is not None]
    shared = of_kind(hybrids[0] if hybrids else None, SharedTransformer)
    if shared.rank is None:
        raise CannotExpress("zamba2 needs adapters for its shared feed-forwards, but the model has none")
    rotary = shared.position
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.blocks),
        "layers_block_type": [LINEAR if mixer is None else _HYBRID for mixer in mixers],
        **write_fields(_MAMBA, mamba),
        "mamba_expand": multiple_of_hidden(mamba),
        "add_bias_linear": mamba.bias,
        "intermediate_size": shared.intermediate_size,
        "hidden_act": name_of(shared.activation),
        "num_attention_heads": shared.heads,
        "num_key_value_heads": shared.kv_heads,
        "num_mem_blocks": _several(hybrids),
        "use_shared_attention_adapter": shared.attention_rank is not None,
        "adapter_rank": shared.rank,
        "use_mem_rope": rotary is not None,
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": True,
        **({} if spec.context_length is None else {"max_position_embeddings": spec.context_length}),
        **({} if rotary is None else write_rotary(of_kind(rotary, Rotary), shared.head_dim)),
    }


def _draw(chosen: Random) -> Config:
    """Return a random config. The heads divide twice the hidden size, and those of Mamba-2 divide a multiple of it."""
    kinds = kind_by_layer(chosen, chosen.choice((0, 1, 3)), "mamba", _HYBRID)
    kinds.insert(chosen.randrange(len(kinds) + 1), _HYBRID)
    heads, dim, adapted = chosen.choice((1, 2, 3, 6)), chosen.choice(EVEN), chosen.random() < 0.4
    hidden, expand = heads * dim // 2, chosen.choice((1, 2, 3))
    recurring = divisor(chosen, hidden * expand)
    own = {
        "num_key_value_heads": heads if adapted else divisor(chosen, heads),
        "mamba_headdim": hidden * expand // recurring,
        "attention_head_dim": dim,
        "use_long_context": True,
        "add_bias_linear": True,
        "intermediate_size": chosen.choice((1, 7, 33, 64)),
        "hidden_act": chosen.choice([*ACTIVATIONS]),
        "rms_norm_eps": 1e-3,
    }
    return {
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **draw_fields(_MAMBA, chosen, {"heads": recurring, "groups": divisor(chosen, recurring)}),
        "mamba_expand": expand,
        "num_mem_blocks": chosen.choice((1, 2, 3)),
        "adapter_rank": chosen.choice(ODD),
        "use_shared_attention_adapter": adapted,
        "use_mem_rope": chosen.choice((True, False)),
        "max_position_embeddings": chosen.choice(CONTEXTS),
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
    refused={
        "tie_word_embeddings": (
            (True,),
            "without tied embeddings, transformers does not share blocks between layers either",
        )
    },
)
