"""The KV cache of a model of an unknown family, computed from its config.json alone.

Fields mean the same as in transformers' config classes: `layer_types`, heads, ranks of latents, sizes of states.
Without `layer_types` there is one kind of layer, which follows from the window, as in transformers'
`cache_utils.get_layer_types_and_kwargs`. A kind of layer or a field that gptkit does not understand is refused by name.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..architectures.config import MAX_LAYERS
from ..components import Shape
from ..errors import UnknownFamily, shown
from .allocators import CachedLayer, Layers, cached_numbers, in_vllm
from .costs import CacheSize
from .sizes import check_number, full_dtype, itemsize

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
}
_STRANGE = re.compile(
    r"(global|swa|sliding|local|full|shared|compress|index|cross|cycle|loop|recurr|attn_layer|block_type|layers_block"
    r"|rwkv|xlstm|mamba|ssm|state_size|conv|linear_|kv_shared|lsh|per_layer|encoder|expand|depth|prompt)"
)
"""Parts of field names that may mean that a layer caches something other than the keys and values of its heads."""
_HARMLESS = re.compile(
    r"(is_encoder_decoder|encoder_no_repeat\w*|add_cross_attention|cross_attention_hidden_size|tie_encoder_decoder"
    r"|use_sliding_window|max_window_layers|_?sliding_window\w*|\w*shared_(expert|intermediate)\w*|num_local_experts"
    r"|mtp_\w+|full_attention_interval|layer_types|layers_block_type|keys_to_ignore\w*|\w*token_(id|index)|add_encoder\w*|tie_encoder\w*)"
)


_PROJECTION = re.compile(r"(?!.*(?:vision|visual|audio)).*layers\.(?P<layer>\d{1,6})\..*\b(?P<of>[kv])_proj\.weight")
"""The names of the key and value projections in nearly every model type."""


def layers_of_config(config: Mapping[str, Any], shapes: Iterable[tuple[str, Shape]] = ()) -> Layers:
    """Return the number of layers for every kind of cache, according to a config.json.

    Args:
        config: the content of config.json.
        shapes: the names and shapes of the model's tensors, if known. They are used to check that all key and value
            projections have the width that the config states. In some model classes, this width differs between layers
            although no config field says so.

    Raises:
        UnknownFamily: gptkit does not understand a field, or a projection has another width.
    """
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    types = text.get("layer_types") or text.get("layers_block_type")
    count = _integer(text, *_NAMES["layers"], default=len(types) if isinstance(types, list) else None)
    every = text.get("full_attention_interval")  # of Qwen3NextConfig
    if types is None and type(every) is int and every > 0:
        types = [
            "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(min(count, MAX_LAYERS))
        ]
    if types is None:
        window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
        types = ["full_attention" if window is None else "sliding_attention"] * min(count, MAX_LAYERS)
    if not isinstance(types, list) or len(types) != count or not all(isinstance(kind, str) for kind in types):
        raise _refusal("layer_types", "must be a list with one kind for every layer")
    patterns = [_FIELDS[kind] for kind in dict.fromkeys(types) if kind in _FIELDS]
    for name, value in text.items():
        known = _HARMLESS.fullmatch(name) or any(pattern.match(name) for pattern in patterns)
        if value not in (None, False, 0, [], {}) and _STRANGE.search(name) and not known:
            raise _refusal(name, "may mean that some layers cache something else than keys and values")
    unknown = next((kind for kind in types if kind not in _KINDS), None)
    if unknown is not None:
        raise _refusal("layer_types", f"has layers of the kind {shown(unknown, 40)}, whose cache gptkit cannot count")
    if "kv_lora_rank" not in text:
        for name, shape in shapes:
            part = _PROJECTION.fullmatch(name)
            kind = types[int(part["layer"])] if part and int(part["layer"]) < count else ""
            is_attention = kind.endswith("attention") and kind != "linear_attention"
            if part and is_attention and shape[0] != _widths(text)[part["of"] == "v"]:
                raise _refusal(
                    "num_key_value_heads", f"does not agree with the shape of {name}, which is {list(shape)}"
                )
    layers = Counter(_KINDS[kind](text) for kind in types)
    return {layer: number for layer, number in layers.items() if layer.per_token or layer.state}


def cache_of_layers(layers: Layers, context: int, dtype: str = "bfloat16", batch: int = 1) -> CacheSize:
    """Return the size of the KV cache after `context` tokens. Recurrent states are counted in `dtype`, too.

    For models of known families, `costs.cache_bytes` computes the size from the architecture instead.
    """
    check_number("tokens", context)
    size = itemsize(dtype)
    needed = size * batch * cached_numbers(layers, context)
    rolling = sum(
        number * layer.per_token
        for layer, number in layers.items()
        if layer.window is not None and context >= layer.window
    )
    return CacheSize(
        context=context,
        batch=batch,
        dtype=full_dtype(dtype),
        bytes_per_token=size * sum(number * layer.per_token for layer, number in layers.items()),
        nbytes=needed,
        buffer=needed + size * batch * rolling,
        in_transformers=needed,
        in_vllm=in_vllm(layers, context, size, batch),
    )


def _refusal(name: str, why: str) -> UnknownFamily:
    return UnknownFamily(
        f"config.json: {name} {why}",
        "gptkit does not support this model family. It can still count the KV cache, but only if it understands "
        "every field that determines the cache.",
    )


def _integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the value of the first of these fields that the config has, or `default` if it has none.

    Raises UnknownFamily unless the value is a whole number above zero.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or not 0 < value < 2**31:
        raise _refusal(names[0], "must be a whole number above zero")
    return value


def _widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sizes of a token's key and of its value, over all key-value heads."""
    heads = _integer(config, *_NAMES["heads"])
    usual = _integer(config, *_NAMES["hidden"]) // heads if type(config.get("head_dim")) is not int else 0
    head_dim = _integer(config, "head_dim", "kv_channels", default=usual)
    groups = _integer(config, *_NAMES["kv_heads"], default=heads)
    return groups * head_dim, groups * _integer(config, "v_head_dim", default=head_dim)


def _attention(config: Mapping[str, Any], window: int | None = None, chunked: bool = False) -> CachedLayer:
    if config.get("kv_lora_rank") is not None and config.get("qk_rope_head_dim") is not None:
        return CachedLayer(_integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim"), window, chunked)
    return CachedLayer(sum(_widths(config)), window, chunked)


def _linear(config: Mapping[str, Any]) -> CachedLayer:
    """Return the cache of a linear-attention layer: a matrix per head, and the last inputs of its convolutions."""
    names = next((names for names in _LINEAR if all(config.get(name) is not None for name in names)), None)
    if names is None:
        raise _refusal(
            "layer_types",
            "has layers of linear attention, but gptkit knows none of the fields that give the size of their states",
        )
    return CachedLayer(0, state=_LINEAR[names](*(_integer(config, name) for name in names)))


_GATED = tuple(f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
_LINEAR: Mapping[tuple[str, ...], Callable[..., int]] = {
    (*_GATED, "linear_conv_kernel_dim"): lambda keys, values, key, value, kernel: (
        values * value * key + (2 * keys * key + values * value) * kernel
    ),
    ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"): lambda heads, dim, kernel: (
        heads * dim * dim + 3 * heads * dim * kernel
    ),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"): (
        mamba := lambda heads, dim, state, groups, kernel: (
            heads * dim * state + (heads * dim + 2 * groups * state) * kernel
        )
    ),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"): mamba,
}
"""The config fields that determine the size of a recurrent state -> the function that computes the number of elements.

The entries are for Qwen3-Next's gated delta rule, Kimi's linear attention, and Mamba-2 under two sets of names."""

_KINDS: Mapping[str, Callable[[Mapping[str, Any]], CachedLayer]] = {
    "full_attention": _attention,
    "sliding_attention": lambda config: _attention(config, _integer(config, "sliding_window")),
    "chunked_attention": lambda config: _attention(config, _integer(config, "attention_chunk_size"), chunked=True),
    "linear_attention": _linear,
    "attention": _attention,
    "mamba": _linear,
    "mlp": lambda config: CachedLayer(0),
    "moe": lambda config: CachedLayer(0),
}
_OF_STATES = re.compile(r"(linear|mamba|ssm)_|conv_kernel|expand$|use_conv_bias|use_mamba_kernels")
_FIELDS = {"linear_attention": _OF_STATES, "mamba": _OF_STATES, "chunked_attention": re.compile("attention_chunk_size")}
"""For some kinds of layers, the pattern of their own config fields. A model with such layers may have these fields,
although they look unusual (`_STRANGE`)."""
