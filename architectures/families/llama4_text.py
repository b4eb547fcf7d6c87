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

from ...components import Attention, ModelSpec, RMSNorm, Temperature
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily, Mixtures
from ..draws import WINDOWS, Config, Random, Sizes, kind_by_layer, some_of, sometimes
from ..fields import ATTENTION_BIAS, Field, llama_fields
from ..layout import Layout
from ..lenses import Lens, sparse_layers
from ..obstacles import of_kind
from ..rope import RotaryKind
from ..usual import ATTENTION, EMBEDDING, ENDS, NORMS, B, T

_CHUNK, _GROWTH, _LENGTH = "attention_chunk_size", "attn_scale", "floor_scale"


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the fields of attention that differ by layer.

    Layers have RoPE and norms of queries and keys, or neither of them but a `temperature`. Some attend within chunks.
    """
    count, head_dim = values["layers"], values["head_dim"]
    every, rope_flags = config.integer("no_rope_layer_interval", 4), config.raw("no_rope_layers")
    rope_flags = rope_flags or [int((layer + 1) % every != 0) for layer in range(count)]
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) != count
        or any(type(switch) is not int for switch in rope_flags)
    ):
        raise config.fail("no_rope_layers", rope_flags, f"a list of {count} integers, with 0 for layers without RoPE")
    types = config.layer_types(
        ["chunked_attention" if has_rope else "full_attention" for has_rope in rope_flags], "chunked_attention"
    )
    chunk = config.optional_integer(_CHUNK, 8192)
    if chunk is None:
        raise config.fail(_CHUNK, chunk, "a number: transformers builds a chunk mask for every model of this family")
    norm = RMSNorm(size=head_dim, eps=config.number("rms_norm_eps", 1e-5), gain="none")
    normed = config.boolean("use_qk_norm", True)
    growth, length = config.number(_GROWTH, 0.1), config.integer(_LENGTH, 8192)
    temperature = Temperature(growth=growth, original_context=length, offset=1, counts="tokens")
    norms = {"q_norm": norm, "k_norm": norm, "norm_order": "after"} if normed else {}
    bare = {
        "position": None,
        **({"temperature": temperature} if config.boolean("attn_temperature_tuning", True) else {}),
    }
    sight = {"chunked_attention": {"window": chunk, "chunked": True}, "full_attention": {}}
    return [{**sight[kind], **(norms if has_rope else bare)} for has_rope, kind in zip(rope_flags, types, strict=True)]


def _written(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_layers` reads."""
    mixers = [of_kind(block.attention, Attention) for block in spec.blocks]
    warm = next((mixer.temperature for mixer in mixers if mixer.temperature is not None), None)
    growth = {} if warm is None else {_GROWTH: warm.growth, _LENGTH: warm.original_context}
    return {
        **growth,
        _CHUNK: next((mixer.window for mixer in mixers if mixer.window is not None), 8192),
        "layer_types": ["full_attention" if mixer.window is None else "chunked_attention" for mixer in mixers],
        "no_rope_layers": [int(mixer.position is not None) for mixer in mixers],
        "use_qk_norm": any(mixer.q_norm is not None for mixer in mixers),
        "attn_temperature_tuning": warm is not None,
    }


def _sparse(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[bool]:
    """Return which layers are mixtures: those in `moe_layers`, or else every `interleave_moe_layer_step`-th one."""
    count = values["layers"]
    step, listed = config.integer("interleave_moe_layer_step", 1), config.raw("moe_layers")
    listed = list(range(step - 1, count, step)) if listed is None else listed
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise config.fail("moe_layers", listed, "a list of layer numbers")
    return [layer in listed for layer in range(count)]


def _draw(chosen: Random, sizes: Sizes) -> Config:
    layers = sizes["layers"]
    own = {
        "no_rope_layers": kind_by_layer(chosen, layers, 0, 1),
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        _GROWTH: 0.4,
    }
    types = kind_by_layer(chosen, layers, "full_attention", "chunked_attention")
    sight = {_CHUNK: chosen.choice(WINDOWS[1:]), _LENGTH: chosen.choice((1, 5, 16))}
    return {**sight, **sometimes(chosen, {**own, "layer_types": types})}


def _draw_sparse(chosen: Random, sizes: Sizes) -> Config:
    return sometimes(chosen, {"moe_layers": some_of(chosen, range(sizes["layers"]))})


def _written_sparse(spec: ModelSpec) -> dict[str, Any]:
    return {"moe_layers": [layer for layer, sparse in enumerate(sparse_layers(spec)) if sparse]}


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
    mixtures=Mixtures(Lens(_sparse, _written_sparse, _draw_sparse), expert={"fused": True, "arithmetic": "conv1d"}),
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
