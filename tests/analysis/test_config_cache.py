"""What layers keep, told from a config.json alone: the bytes of transformers' caches, or refused by a field's name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.command import call
from helpers.covering import few
from helpers.unknown import UNKNOWN, tiny
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gptkit.analysis.allocators import CachedLayer, cached_numbers
from gptkit.analysis.config_cache import layers_of_config
from gptkit.errors import UnknownFamily

TOLD = {
    *("beam", "cohere_compass_text", "diffllama", "doge", "emu3", "granitemoehybrid", "jetmoe", "kimi_linear"),
    "olmo_hybrid",
}
"""Types that must be told; of others it may be that a field is not understood."""


FULL, NEAR = "full_attention", "sliding_attention"


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def bytes_kept(layer: Any) -> int:
    """Of keys, values and states; what else a layer of a cache holds are numbers of tokens."""
    return sum(each.nbytes for each in tensors(vars(layer)) if each.is_floating_point())


@few(6)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_layers_keep_is_what_transformers_caches(kind: str) -> None:
    model = tiny(kind)
    if model is None:
        pytest.skip("transformers makes none of sizes cut down like this")
    if {*(getattr(model.config, "layer_types", None) or ["none"])} == {"linear_attention"}:
        try:  # transformers counts tokens by layers that see them
            model.config.layer_types = ["linear_attention", FULL]
            model = type(model)(model.config)
        except (AttributeError, TypeError):
            pytest.skip("it has no such layers")
    config, shapes = model.config.to_dict(), [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    if kind not in TOLD:
        try:
            layers_of_config(config, shapes)
        except UnknownFamily:
            return
    layers = layers_of_config(config, shapes)
    ids = torch.arange(5, 25)[None]
    try:
        with torch.no_grad():
            cache = getattr(model.eval()(ids, use_cache=True), "past_key_values", None)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"its sizes do not go together when they are cut down: {error}")
    if not hasattr(cache, "layers"):
        pytest.skip("transformers has no cache of layers for it")
    assert sum(map(bytes_kept, cache.layers)) == cached_numbers(layers, ids.shape[1]) * 4


HYBRID = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", FULL],
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", FULL],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    },
}
"""Sizes that go together, of types with states."""


@pytest.mark.parametrize("kind", STATES)
def test_states_are_those_that_transformers_keeps(kind: str) -> None:
    made = getattr(transformers, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    model = made(CONFIG_MAPPING[kind](**HYBRID, **STATES[kind])).eval()
    with torch.no_grad():
        cache = model(torch.arange(5, 25)[None], use_cache=True).past_key_values
    layers = layers_of_config(model.config.to_dict())
    assert any(each.state for each in layers) and any(each.per_token for each in layers)
    assert sum(map(bytes_kept, cache.layers)) == cached_numbers(layers, 20) * 4


CONFIG: dict[str, Any] = {"model_type": "nobody", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, {CachedLayer(128): 4}),
        ({"num_key_value_heads": 2, "head_dim": 16}, {CachedLayer(64): 4}),
        ({"num_key_value_heads": 2, "v_head_dim": 4}, {CachedLayer(24): 4}),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, {CachedLayer(40): 4}),
        ({"sliding_window": 7}, {CachedLayer(128, 7): 4}),
        ({"sliding_window": 7, "use_sliding_window": False}, {CachedLayer(128): 4}),
        (
            {"sliding_window": 7, "layer_types": [FULL, NEAR, NEAR, "moe"]},
            {CachedLayer(128): 1, CachedLayer(128, 7): 2},
        ),
        ({"attention_chunk_size": 5, "layer_types": ["chunked_attention"] * 4}, {CachedLayer(128, 5, chunked=True): 4}),
    ],
)
def test_fields_mean_what_they_do_in_transformers(fields: dict[str, Any], layers: dict[CachedLayer, int]) -> None:
    assert layers_of_config({**CONFIG, **fields}) == layers
    assert layers_of_config({"text_config": {**CONFIG, **fields}}) == layers


def test_tensors_that_are_wider_than_the_config_says_are_told() -> None:
    """As in MiMo V2, whose class gives layers with a window twice the heads."""
    name = "model.layers.3.self_attn.k_proj.weight"
    assert layers_of_config(CONFIG, [(name, (64, 64)), ("vision." + name, (3, 3))]) == {CachedLayer(128): 4}
    with pytest.raises(UnknownFamily, match=re.escape(name)):
        layers_of_config(CONFIG, [(name, (128, 64))])


def test_the_interval_of_full_attention_says_the_kinds_of_layers() -> None:
    """As config.json of Qwen3-Next does, whose class makes layer_types of it."""
    whole = CONFIG_MAPPING["qwen3_next"]().to_dict()
    layers = layers_of_config(whole)
    assert layers_of_config({**whole, "layer_types": None, "full_attention_interval": 4}) == layers
    assert sorted(layers.values()) == [12, 36]


def test_params_tells_the_cache_of_an_unknown_type(tmp_path: Path) -> None:
    config = {**CONFIG, "sliding_window": 100, "layer_types": [FULL, NEAR, NEAR, NEAR], "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"layers.{layer}.w": torch.zeros(3) for layer in range(4)}, tmp_path / "model.safetensors")
    (told,) = json.loads(call("params", tmp_path, "--kv", "50,1000", "--json").stdout)["models"]
    each = 128 * 2
    assert [size["bytes"] for size in told["kv_cache"]] == [4 * each * 50, each * (1000 + 3 * 99)]
    assert [size["rolling_buffer_bytes"] for size in told["kv_cache"]] == [4 * each * 50, each * (1000 + 3 * 100)]
    assert [size["bytes_in_vllm"] for size in told["kv_cache"]] == [4 * each * 64, each * 16 * (63 + 3 * 7)]
    assert "1,000 tokens" in call("params", tmp_path, "--kv", "1000").stdout
    assert call("params", tmp_path, "--kv", "1000", "--flops").exit_code == 2
    config["num_kv_shared_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = call("params", tmp_path, "--kv", "1000")
    assert refused.exit_code != 0 and "num_kv_shared_layers" in refused.stderr


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": "x"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"layer_types": ["opera"] * 4}, "'opera'"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [FULL, 1, FULL, FULL]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "linear attention"),
        ({"layer_types": [NEAR] * 4}, "sliding_window"),
        ({"global_head_dim": 3}, "global_head_dim"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"ssm_state": 2}, "ssm_state"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownFamily, match=named):
        layers_of_config({**CONFIG, **fields})
