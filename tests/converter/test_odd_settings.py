"""Quantisation settings with odd JSON values in any field: weights are read, or a typed error says what is wrong."""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.quantised import METHODS, compressed, four_bits, numbers

from gptkit.architectures.config import quantisation
from gptkit.converter.dequantise import METHODS as READ
from gptkit.errors import GptkitError

DEEP = json.loads("[" * 400 + "]" * 400)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 4.0, 64.0, 0.5, float("inf"), float("nan")),
    *("", "4", "nf4", "\x1b[2J", "x" * 10**5, [], [64], [4, 4], [[]], [0, 0], [1.5, 2], {}, {"a": 1}, {"0": []}, DEEP),
)
GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value within a JSON value."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    found = deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return found


def survives(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    known = quantisation({"quantization_config": settings})
    if known is None or known[0].partition(",")[0] not in READ:
        return  # the checkpoint is refused before
    message = ""
    try:
        numbers(tensors, settings)
    except GptkitError as error:
        message = str(error)
    assert len(message) < 2000


OPTIONAL = {
    "gptq": {"checkpoint_format": "gptq", "pack_dtype": "int32", "sym": True, "dynamic": {"+:x": {"bits": 4}}},
    "awq": {"format": "gemm", "modules_to_not_convert": ["lm_head"]},
    "int4 groups": {"sparsity_config": {"format": "dense"}, "transform_config": {}, "kv_cache_scheme": {}},
}
"""Fields that a method's settings may have besides, each of which is read."""


@pytest.mark.parametrize("method", METHODS)
def test_odd_settings_of_config_json(method: str) -> None:
    make, settings = METHODS[method]
    tensors = make(64, 64, 0)[0]
    settings = {**settings, **OPTIONAL.get(method, {}), "modules_to_not_convert": ["lm_head"]}
    survives(tensors, settings)
    for path in places(settings):
        for odd in ODD:
            survives(tensors, changed(settings, path, odd))


@pytest.mark.parametrize(
    "name", ["group_size", "num_bits", "strategy", "block_structure", "symmetric", "type", "actorder"]
)
def test_odd_settings_of_compressed_tensors(name: str) -> None:
    make = partial(compressed, args=GROUPED)
    tensors = make(64, 64, 0)[0]
    for odd in ODD:
        weights = {**GROUPED, name: odd}
        groups = {"g": {"targets": ["Linear"], "weights": weights}}
        survives(tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups})
        groups = {"g": {"targets": ["Linear"], "weights": {**BLOCKS, name: odd}}}
        plain = {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(2, 2)}
        survives(plain, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_odd_block_sizes_of_fp8(odd: Any) -> None:
    tensors = {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)}
    survives(tensors, {"quant_method": "fp8", "weight_block_size": odd})
    survives(tensors, {"quant_method": odd, "weight_block_size": [32, 32]})
    survives(tensors, {"quant_method": "fp8", "weight_block_size": [odd, 32], "modules_to_not_convert": odd})


@pytest.mark.parametrize(
    "name", ["shape", "blocksize", "dtype", "quant_type", "nested_blocksize", "nested_offset", "nested_dtype"]
)
def test_odd_values_of_a_quant_state(name: str) -> None:
    """bitsandbytes keeps settings of its own beside each weight."""
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors = four_bits(64, 64, 0)[0]
    state = json.loads(bytes(tensors[key].tolist()))
    assert name in state
    for odd in ODD:
        data = json.dumps({**state, name: odd}).encode()
        spoilt = {**tensors, key: torch.tensor(list(data), dtype=torch.uint8)}
        survives(spoilt, {"quant_method": "bitsandbytes", "load_in_4bit": True})
