"""Llama 4's text model (Meta 2025): llama with mixtures of experts, and with attention within chunks of the text in
three of four layers. These layers have RoPE, and after it norms without weights on query and key heads. The fourth
layer attends to all tokens, without positions, and scales queries by their position. All layers or every second layer
have a mixture with a shared expert. The input of an expert is multiplied by the expert's weight.

One tensor contains all experts, stored as [in, out]. gptkit reads the language model of checkpoints with a vision
tower, and drops the tower.

Source: transformers models/llama4/{configuration,modeling}_llama4.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...components import ModelSpec, RMSNorm, Temperature
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import WINDOWS, Config, Random, Sizes, kind_by_layer, sometimes
from ..fields import ATTENTION_BIAS, Field, component, llama_fields, of_part, size
from ..layout import Layout
from ..lenses import Lens, attentions, write_windows
from ..places import flagged, listed, nth, others
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T

_CHUNK, _CHUNKED = "attention_chunk_size", "chunked_attention"
_SPARSE = listed("moe_layers", nth("interleave_moe_layer_step", 1))
_TURNING = flagged("no_rope_layers", others(nth("no_rope_layer_interval", 4)), "layers without RoPE", empty=True)


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the fields of attention that differ by layer.

    Layers have RoPE and norms of queries and keys, or neither of them but a `temperature`. Some attend within chunks.
    """
    turning, chunk = _TURNING.get(config, values["layers"]), config.optional_integer(_CHUNK, 8192)
    types = config.layer_types([_CHUNKED if has_rope else "full_attention" for has_rope in turning], _CHUNKED)
    if chunk is None:
        raise config.fail(_CHUNK, chunk, "a number: transformers builds a chunk mask for every model of this family")
    norm = RMSNorm(size=values["head_dim"], eps=values["eps"], gain="none")
    temperature = Temperature(**of_part(values, "temperature"), offset=1, counts="tokens")
    norms = {"q_norm": norm, "k_norm": norm, "norm_order": "after"} if values["own.normed"] else {}
    bare = {"position": None, "temperature": temperature if values["own.tempered"] else None}
    sight = {_CHUNKED: {"window": chunk, "chunked": True}, "full_attention": {}}
    return [{**sight[kind], **(norms if has_rope else bare)} for has_rope, kind in zip(turning, types, strict=True)]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    mixers, fields = attentions(spec), write_windows(spec, _CHUNKED, 8192)
    turning = _TURNING.put([mixer.position is not None for mixer in mixers])
    return {_CHUNK: fields.pop("sliding_window"), **fields, **turning}


def _draw(chosen: Random, sizes: Sizes) -> Config:
    types = kind_by_layer(chosen, sizes["layers"], "full_attention", _CHUNKED)
    own = {**_TURNING.draw(chosen, sizes["layers"]), _CHUNK: chosen.choice(WINDOWS[1:])}
    return {**own, **sometimes(chosen, {"layer_types": types})}


_DECODER = DecoderFamily(
    {
        **llama_fields(
            vocab=202048, hidden=5120, layers=48, heads=40, kv_heads=8, head_dim=128, context=131072, eps=1e-5
        ),
        "intermediate_size": Field("expert_size shared_size", 8192),
        "intermediate_size_mlp": Field("intermediate", 16384),
        "attention_bias": ATTENTION_BIAS,
        "num_local_experts": Field("mixture.experts", 16),
        "num_experts_per_tok": Field("mixture.top_k", 1),
        "use_qk_norm": Field("own.normed", True, of=lambda spec: component(spec, "q_norm") is not None),
        "attn_temperature_tuning": Field(
            "own.tempered", True, of=lambda spec: component(spec, "temperature") is not None
        ),
        "attn_scale": Field("temperature.growth", 0.1),
        "floor_scale": size("temperature.original_context", 8192, 1, 5, 16),
    },
    fixed={
        "attention.softmax": "input",
        "mixture.scores": "sigmoid",
        "mixture.normalise": False,
        "mixture.chosen_by": "logits of all",
        "mixture.rounded": True,
        "mixture.weighs": "inputs",
        "mixture.summed": "over all",
    },
    rotary=RotaryKind(500_000.0, pairs="adjacent", rounding="complex"),
    layers=Lens(_layers, _written, _draw, frozenset({Temperature})),
    mixtures=Mixtures(_SPARSE, expert={"fused": True, "arithmetic": "conv1d"}),
)

_FF, _OURS = T + "feed_forward.", B + "feed_forward."
_EXPERT, _NAMES = _OURS + "experts.{expert}.", ("gate_proj", "up_proj", "down_proj")
_LEAVES = (
    *leaves_of({**EMBEDDING, **{name: ours for name, ours in ATTENTION.items() if "_norm" not in name}}),
    *leaves_of({_FF + name: _OURS + name for name in _NAMES}),
    Leaf(
        _FF + "experts.gate_up_proj",
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        Layout(
            "experts hidden (part intermediate)",
            "(part intermediate) hidden",
            split="part",
            parts=("1", "1"),
            stack="experts",
        ),
    ),
    Leaf(
        _FF + "experts.down_proj",
        _EXPERT + "down_proj.weight",
        Layout("experts intermediate hidden", "hidden intermediate", stack="experts"),
    ),
    Leaf(_FF + "router.weight", _OURS + "router.weight", value=1),  # the module returns the scores first
    *leaves_of({f"{_FF}shared_expert.{name}": f"{_OURS}shared.{name}" for name in _NAMES}),
    *leaves_of({**NORMS, **ENDS}),
)

_LLAMA4_TEXT = _DECODER.architecture(
    "llama4_text",
    "Llama4ForCausalLM",
    _LEAVES,
    model_types=("llama4_text", "llama4"),
    hf_config="Llama4TextConfig",
    released="2025-04",
    token_ids={"bos_token_id": 1, "eos_token_id": 2},
    part="text_config",
    renamed=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
    carried={"vision": ("vision_model.", "multi_modal_projector.")},
    irrelevant={
        "router_jitter_noise": "training only",
        "for_llm_compressor": "how a quantised file is made",
        **dict.fromkeys(
            (
                *("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id"),
                *("image_size", "num_channels", "patch_size", "pixel_shuffle_ratio"),
                *("projector_dropout", "projector_input_dim", "projector_output_dim"),
            ),
            "about images, which the language model does not read",
        ),
    },
)
