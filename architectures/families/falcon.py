"""Falcon (TII 2023): GPT-NeoX with other heads and norms, and without biases in some models. 7b has multi-query
attention and parallel blocks with one norm, 40b grouped heads and two norms, 11b grouped heads and one norm, and rw
ALiBi and serial blocks. Old checkpoints have the model_type RefinedWeb (40b) or RefinedWebModel (7b, rw).

All of these store q, k and v in one tensor with the same layout. Linear layers multiply and then add the bias, which
rounds twice. Scores are divided by sqrt(head_dim). ALiBi is rounded to bfloat16 even in fp32. transformers' eager path
adds ALiBi twice (transformers issues 29067 and 29946), so gptkit compares models with ALiBi only with the sdpa path.

Source: transformers models/falcon/{configuration,modeling}_falcon.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ALiBi, Attention, Biasing, FeedForward, LayerNorm, ModelSpec, Rotary
from ..base import Leaf, leaves_of, qkv
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import EVEN, Config, Random, grouped_heads
from ..fields import PRE, Field, Fields, component, without
from ..lenses import Lens
from ..obstacles import of_kind
from ..rope import USUAL_ROTARY, draw_rotary, read_rotary, write_rotary
from ..usual import GROUPED_BIAS, GROUPED_WEIGHT, other_norms, two_parallel_norms


def _is_grouped(config: ConfigReader, name: str, _: None) -> bool:
    """Return whether the model has Falcon 40B's architecture, in which query heads share key-value heads in groups."""
    return config.boolean(name, config.data.get("model_type") == "RefinedWeb")


def _has_groups(spec: ModelSpec) -> bool:
    """Return whether the config is written for query heads that share key-value heads in groups."""
    attention = of_kind(spec.blocks[0].attention, Attention)
    return attention.kv_expansion == "projection" or attention.kv_heads not in (1, attention.heads)


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the number of key-value heads and the position encoding, which are the same in all layers."""
    heads, head_dim = values["heads"], values["head_dim"]
    if config.optional_integer("head_dim") not in (None, head_dim):
        raise config.fail("head_dim", config.raw("head_dim"), f"{head_dim}, which is hidden_size / num_attention_heads")
    # In the new architecture, transformers ignores multi_query for heads, but reads parallel_attn for norms.
    grouped, parallel, norms = values["own.grouped"], values["block.parallel"], values["own.norms"]
    if grouped and not parallel:
        raise config.fail("parallel_attn", parallel, "true, since new_decoder_architecture is true")
    if norms not in (None, 1, 2):
        raise config.fail("num_ln_in_parallel_attn", norms, "1, 2 or null")
    if norms == 2 and not grouped and parallel:
        raise config.fail("num_ln_in_parallel_attn", norms, "1 or null, since new_decoder_architecture is false")
    multi_query, stated, alibi = values["own.one"], values["kv_heads"], values["own.alibi"]
    if not grouped and not multi_query and stated not in (None, heads):
        raise config.fail(
            "num_kv_heads", stated, f"{heads} (num_attention_heads), since new_decoder_architecture is false"
        )
    # With ALiBi these fields have no effect, and the width of heads may be odd.
    rotary = read_rotary(config, head_dim + head_dim % 2 if alibi else head_dim, values["context"])
    fields = {
        "kv_heads": (stated or heads) if grouped else (1 if multi_query else heads),
        "kv_expansion": "projection" if grouped else "broadcast",
        "position": ALiBi(scaled=True, rounding="bfloat16") if alibi else rotary,
    }
    return [fields] * int(values["layers"])


def _written_rotary(spec: ModelSpec) -> dict[str, Any]:
    """Return the RoPE fields, unless the position encoding is ALiBi."""
    position, head_dim = component(spec, "position"), of_kind(spec.blocks[0].attention, Attention).head_dim
    return write_rotary(position, head_dim) if isinstance(position, Rotary) else {}


def _norms(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the norms of a block. In a parallel block, both sub-layers may read the output of one norm."""
    two = not values["block.parallel"] or (values["own.grouped"] and values["own.norms"] != 1)
    return PRE if two else PRE[:1]


_HEADS: Fields = {
    "num_kv_heads": Field("kv_heads"),
    "multi_query": Field(
        "own.one", True, of=lambda spec: not _has_groups(spec) and component(spec, "attention").kv_heads == 1
    ),
    "new_decoder_architecture": Field("own.grouped", None, _is_grouped, of=_has_groups),
    "parallel_attn": Field("block.parallel", True, of=lambda spec: spec.blocks[0].parallel or _has_groups(spec)),
    "num_ln_in_parallel_attn": Field(
        "own.norms",
        None,
        ConfigReader.raw,
        of=lambda spec: (1 if spec.blocks[0].feed_forward_norm is None else 2) if _has_groups(spec) else None,
    ),
    "alibi": Field("own.alibi", False, of=lambda spec: isinstance(component(spec, "position"), Biasing)),
}
_DECODER = DecoderFamily(
    fields={
        "vocab_size": Field("vocab", 65024),
        "hidden_size": Field("hidden", 4544),
        "num_hidden_layers": Field("layers", 32),
        "num_attention_heads": Field("heads", 71),
        "ffn_hidden_size": Field("intermediate"),
        "activation": Field("activation", "gelu"),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "max_position_embeddings": Field("context", 2048),
        "tie_word_embeddings": Field("tied", True),
        "bias": Field("attention.qkv_bias attention.output_bias feed_forward.up_bias feed_forward.down_bias", False),
        **_HEADS,
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        "attention.arithmetic": "matmul_add",
        "attention.scaling": "divide",
        "attention.fused": True,
        "attention.softmax": "input",
        "feed_forward.arithmetic": "matmul_add",
    },
    rotary=None,
    norms=_norms,
    layers=Lens(_layers, _written_rotary),
)


def _draw(chosen: Random) -> Config:
    """Return a random config of one of the three kinds of heads, with ALiBi or RoPE."""
    alibi, (heads, kv_heads) = chosen.random() < 0.4, grouped_heads(chosen)
    head_dim, form = chosen.choice(EVEN), chosen.choice(("grouped", "one", "all"))
    own: Config = {"multi_query": form == "one", "parallel_attn": chosen.choice((True, False))}
    if form == "grouped":
        norms = chosen.choice((1, 2, None))
        own = {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    rope = {} if alibi else draw_rotary(chosen, head_dim, USUAL_ROTARY)
    sizes = {"heads": heads, "head_dim": head_dim, "hidden": heads * head_dim}
    drawn = without(_DECODER.draw(chosen, {}, **sizes), *_HEADS)
    return {**drawn, **own, "alibi": alibi, **rope}


_B, _T = "blocks.{layer}.", "transformer.h.{layer}."

_FALCON = _DECODER.architecture(
    "falcon",
    "FalconForCausalLM",
    (
        *leaves_of({"transformer.word_embeddings": "embedding"}),
        Leaf(_T + "self_attention.query_key_value.weight", qkv("weight"), GROUPED_WEIGHT),
        Leaf(_T + "self_attention.query_key_value.bias", qkv("bias"), GROUPED_BIAS),
        *leaves_of(
            {
                _T + "self_attention.dense": _B + "attention.o_proj",
                _T + "mlp.dense_h_to_4h": _B + "feed_forward.up_proj",
                _T + "mlp.dense_4h_to_h": _B + "feed_forward.down_proj",
            }
        ),
        # transformers creates the second norm first.
        *leaves_of(
            {_T + "post_attention_layernorm": _B + "feed_forward_norm", _T + "input_layernorm": _B + "attention_norm"},
            other_norms,
        ),
        *leaves_of(
            {_T + "ln_attn": _B + "attention_norm", _T + "ln_mlp": _B + "feed_forward_norm"}, two_parallel_norms
        ),
        *leaves_of({"transformer.ln_f": "final_norm", "lm_head": "head"}),
    ),
    released="2023-05",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    kinds=_DECODER.kinds | {ALiBi},
    token_ids={"bos_token_id": 11, "eos_token_id": 11},
    draw=_draw,
    config_aliases={
        "hidden_size": ("n_embed",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "num_kv_heads": ("n_head_kv",),
    },
    foreign_fields=("n_layer", "n_head", "n_head_kv"),
    prefix="transformer.",
    dropped=(_T + "self_attention.rotary_emb.inv_freq", _T + "self_attention.maybe_rotary.inv_freq"),
    irrelevant={"apply_residual_connection_post_layernorm": "not read by transformers"},
    reference=lambda spec: ("sdpa",) if isinstance(spec.blocks[0].attention.position, Biasing) else ("sdpa", "eager"),
    reference_quirk="transformers' eager falcon adds ALiBi twice (transformers issues 29067 and 29946)",
)
