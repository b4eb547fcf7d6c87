"""RecurrentGemma (Google 2404.07839): Griffin's recurrent units (RG-LRU) in two of three layers and attention with a
window in the third. Norms, scaled embedding and capped logits are Gemma's.

transformers' class stores the states of recurrences in its modules, and does not mask padding in recurrences.

Source: transformers models/recurrent_gemma/{configuration,modeling}_recurrent_gemma.py.
"""

import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...components import RGLRU
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import ODD, WINDOWS, Config, Random, among, kind_by_layer
from ..fields import USUAL, Field, draw_fields, read_fields, size, with_defaults, write_fields
from ..layout import Layout
from ..places import Places
from ..recurrences import LINEAR, MixerFields, without_attention
from ..rope import PART, RotaryKind
from ..usual import EMBEDDING, B, T
from .gemma import GEMMA_IDS

_RECURRENT, _WHOLE = "recurrent", "attention"


def _half(config: ConfigReader, name: str, default: int) -> int:
    """Return the width of the feed-forward.

    The config field is twice this width, for the gate and up projections together.
    """
    both = config.integer(name, default)
    if both < 2:
        raise config.fail(name, both, "at least 2, because gate_proj and up_proj each get half of it")
    return both // 2


def _root(values: Mapping[str, Any]) -> float:
    """Return √hidden, rounded to bf16. transformers' class stores it in bf16 for every dtype of the model."""
    (bits,) = struct.unpack("<I", struct.pack("<f", values["hidden"] ** 0.5))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


def _places(config: ConfigReader, layers: int) -> list[bool]:
    """Return which layers have attention.

    The config field `block_types` is a pattern, which is repeated until there is a type for every layer.
    """
    names = config.raw("block_types", [_RECURRENT, _RECURRENT, _WHOLE])
    known = isinstance(names, list) and all(name in (_RECURRENT, _WHOLE) for name in names)
    types = (names * 100)[:layers] if known else []
    if len(types) < layers or _WHOLE not in types:
        wanted = f"a list of {_RECURRENT!r} and {_WHOLE!r}, which is repeated, with attention in one of the layers"
        raise config.fail("block_types", names, wanted)
    alike = [LINEAR if kind == _RECURRENT else "sliding_attention" for kind in types]
    if config.kinds_of_layers() not in (None, alike):
        raise config.fail("layer_types", config.raw("layer_types"), "the layer types that follow from block_types")
    return [kind == _WHOLE for kind in types]


def _draw_places(chosen: Random, layers: int) -> Config:
    blocks = [*kind_by_layer(chosen, layers - 1, _RECURRENT, _WHOLE), _WHOLE]
    return {"block_types": chosen.sample(blocks, len(blocks))}


_PLACES = Places(
    _places, lambda whole: {"block_types": [_WHOLE if is_whole else _RECURRENT for is_whole in whole]}, _draw_places
)
_FIELDS = {"conv1d_width": size("kernel", 4, 1, 2, 4, 5)}


def _mixer(config: ConfigReader, values: Mapping[str, Any]) -> RGLRU:
    """Return the recurrence of layers without attention."""
    hidden, heads, width = values["hidden"], values["heads"], config.optional_integer("lru_width")
    if width not in (None, hidden):
        raise config.fail("lru_width", width, f"hidden_size ({hidden}): with another width, transformers fails")
    if hidden % heads:
        raise config.fail(
            "hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), which is also the number of gates"
        )
    own = read_fields(_FIELDS, config)
    return RGLRU(hidden_size=hidden, inner=hidden, heads=heads, activation=values["activation"], **own)


_MIXER = MixerFields(
    RGLRU, _mixer, partial(write_fields, _FIELDS), lambda chosen, sizes: draw_fields(_FIELDS, chosen, sizes)
)

_DECODER = DecoderFamily(
    {
        **with_defaults(
            {name: field for name, field in USUAL.items() if name not in ("hidden_act", "max_position_embeddings")},
            vocab=256000,
            hidden=2560,
            layers=26,
            heads=10,
            tied=True,
        ),
        "intermediate_size": Field("intermediate", 7680, _half, lambda units: 2 * units, draw=among(2, 7, 33, 64)),
        "hidden_activation": Field("activation", "gelu_pytorch_tanh"),
        "attention_bias": Field("attention.qkv_bias", False),
        "attention_window_size": Field("attention.window", 2048, draw=among(*WINDOWS)),
        "logits_soft_cap": Field("head.cap", 30.0),
    },
    fixed={
        "norm.gain": "1 + weight",
        "norm.cast": "after_weight",
        "embedding.multiplier": _root,
        "attention.output_bias": True,
        "feed_forward.up_bias": True,
        "feed_forward.down_bias": True,
    },
    rotary=RotaryKind(part=PART, whole=0.5),
    recurrent=without_attention(_PLACES, _MIXER),
    # The number of heads is also the number of a gate's matrices.
    sized=lambda chosen, sizes: {"hidden": sizes["heads"] * chosen.choice(ODD)},
)


_M, _R = T + "temporal_block.", B + "recurrence."


def _gate(theirs: str, ours: str) -> tuple[Leaf, ...]:
    return (
        Leaf(
            f"{_M}rg_lru.{theirs}_weight", f"{_R}{ours}.weight", Layout("heads channels units", "heads units channels")
        ),
        Leaf(f"{_M}rg_lru.{theirs}_bias", f"{_R}{ours}.bias", Layout("heads units", "(heads units)")),
    )


def _prepare(model: Any) -> None:
    """Make recurrences forget their states before a pass that begins a new text."""

    def forget(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not bool(named["position_ids"][:, 0].any()):
            module._setup_cache(len(given[0]), given[0].device, given[0].dtype)

    for layer in model.model.layers:
        if hasattr(layer.temporal_block, "conv1d_state"):
            layer.temporal_block.register_forward_pre_hook(forget, with_kwargs=True)


_RECURRENT_GEMMA = _DECODER.architecture(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    (
        *leaves_of(EMBEDDING),
        *leaves_of({T + "temporal_pre_norm": B + "recurrence_norm"}),
        *leaves_of({T + "temporal_pre_norm": B + "attention_norm"}),
        *leaves_of(
            {_M + "linear_y": _R + "gate_proj", _M + "linear_x": _R + "x_proj", _M + "linear_out": _R + "o_proj"}
        ),
        Leaf(_M + "conv_1d.weight", _R + "x_conv.weight", Layout("inner one kernel", "inner (one kernel)")),
        Leaf(_M + "conv_1d.bias", _R + "x_conv.bias"),
        Leaf(_M + "rg_lru.recurrent_param", _R + "decay"),
        *_gate("input_gate", "input_gate"),
        *_gate("recurrent_gate", "decay_gate"),
        *leaves_of({f"{_M}{name}_proj": f"{B}attention.{name}_proj" for name in "qkvo"}),
        *leaves_of({T + "channel_pre_norm": B + "feed_forward_norm"}),
        *leaves_of({f"{T}mlp_block.{name}_proj": f"{B}feed_forward.{name}_proj" for name in ("gate", "up", "down")}),
        *leaves_of({"model.final_norm": "final_norm", "lm_head": "head"}),
    ),
    released="2024-04",
    token_ids=GEMMA_IDS,
    wrong_batches=("padding",),
    prepare=_prepare,
    config_aliases={"attention_window_size": ("sliding_window",)},
    irrelevant={
        **dict.fromkeys(("w_init_variance_scale", "final_w_init_variance_scale"), "how training starts"),
        "layers_block_type": "computed from block_types",
    },
    refused={
        "embeddings_scale_by_sqrt_dim": (
            (True, None),
            "transformers ignores this field and always scales the embeddings",
        ),
        "_block_types": (([_RECURRENT, _RECURRENT, _WHOLE], None), "transformers reads block_types instead"),
    },
)
