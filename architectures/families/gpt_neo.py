"""GPT-Neo (EleutherAI 2021): GPT-2 with ordinary linear layers, a window in every second layer, and unscaled scores.

transformers has no sdpa path for this family. It computes scores in fp32.

Source: transformers models/gpt_neo/{configuration,modeling}_gpt_neo.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import FeedForward, LayerNorm, ModelSpec
from ..base import leaves_of, only_eager
from ..config import SUMMARIES, ConfigReader
from ..decoder import DecoderFamily
from ..draws import WINDOWS, Config, Random, Sizes, kind_by_layer, sometimes
from ..fields import Field
from ..lenses import Lens

_GLOBAL, _LOCAL = "global", "local"


def _windows(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of each layer. It is None for layers of type "global"."""
    count = values["layers"]
    groups = config.raw("attention_types")
    kinds: list[Any] = []
    for group in [[[_GLOBAL, _LOCAL], 12]] if groups is None else groups if isinstance(groups, list) else [groups]:
        if (
            not isinstance(group, list)
            or len(group) != 2
            or not isinstance(group[0], list)
            or type(group[1]) is not int
        ):
            raise config.fail("attention_types", groups, 'a list of pairs, as [[["global", "local"], 12]]')
        kinds += group[0] * min(group[1], count)
    if len(kinds) != count or any(kind not in (_GLOBAL, _LOCAL) for kind in kinds):
        raise config.fail("attention_types", groups, f"{count} layers (num_layers), each {_GLOBAL} or {_LOCAL}")
    if config.raw("attention_layers", kinds) != kinds:
        raise config.fail(
            "attention_layers", config.raw("attention_layers"), "the same layer types as in attention_types"
        )
    width = config.integer("window_size", 256)
    return [{"window": width if kind == _LOCAL else None} for kind in kinds]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields of the windows."""
    windows, both = [block.attention.window for block in spec.blocks], [_GLOBAL, _LOCAL]
    kinds, pairs = [_GLOBAL if window is None else _LOCAL for window in windows], len(windows) // 2
    return {
        "attention_types": [[both, pairs] if kinds == both * pairs else [kinds, 1]],
        "window_size": next((window for window in windows if window is not None), 256),
    }


def _draw(chosen: Random, sizes: Sizes) -> Config:
    kinds = kind_by_layer(chosen, sizes["layers"], _GLOBAL, _LOCAL)
    return {"attention_types": [[kinds, 1]], **sometimes(chosen, {"window_size": chosen.choice(WINDOWS)})}


_DECODER = DecoderFamily(
    {
        "vocab_size": Field("vocab", 50257),
        "max_position_embeddings": Field("context", 2048),
        "hidden_size": Field("hidden", 2048),
        "num_layers": Field("layers", 24),
        "num_heads": Field("heads", 16),
        "intermediate_size": Field("intermediate"),
        "activation_function": Field("activation", "gelu_new"),
        "layer_norm_epsilon": Field("eps", 1e-5),
        "tie_word_embeddings": Field("tied", True),
    },
    norm=LayerNorm,
    inner=FeedForward,
    fixed={
        "attention.scale": 1.0,
        "attention.kernel": "eager",
        "attention.kept": "all",
        "attention.scores": "float32, then scaled",
        "attention.output_bias": True,
        "feed_forward.up_bias": True,
        "feed_forward.down_bias": True,
    },
    rotary=None,
    learned=True,
    layers=Lens(_windows, _written, _draw),
)

_B, _T = "blocks.{layer}.", "transformer.h.{layer}."
_MODULES = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    _T + "ln_1": _B + "attention_norm",
    **{f"{_T}attn.attention.{name}_proj": f"{_B}attention.{name}_proj" for name in ("k", "v", "q")},
    _T + "attn.attention.out_proj": _B + "attention.o_proj",
    _T + "ln_2": _B + "feed_forward_norm",
    _T + "mlp.c_fc": _B + "feed_forward.up_proj",
    _T + "mlp.c_proj": _B + "feed_forward.down_proj",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
}

_GPT_NEO = _DECODER.architecture(
    "gpt_neo",
    "GPTNeoForCausalLM",
    leaves_of(_MODULES),
    released="2021-03",
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    config_aliases={"num_layers": ("num_hidden_layers",), "num_heads": ("num_attention_heads",)},
    prefix="transformer.",
    dropped=tuple(_T + "attn.attention." + name for name in ("bias", "masked_bias")),
    irrelevant={**SUMMARIES, "tokenizer_class": "tokenizer"},
    **only_eager(),
)
