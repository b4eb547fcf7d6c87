"""What is asked for beside the count: sizes in any dtype, one context for all, and nothing invented where it ends."""

import json
from typing import Any

import pytest
from helpers.family_specs import preset_spec as spec_of
from hypothesis import given
from hypothesis import strategies as st

from gptkit.analysis.allocators import allocated
from gptkit.analysis.costs import cache_bytes, forward_flops, training_flops
from gptkit.analysis.figures import Scenario, common_context, figures_of
from gptkit.analysis.formats import weight_bytes, weight_dtype
from gptkit.analysis.memory import memory, training_memory
from gptkit.analysis.params import params
from gptkit.errors import UsageError


@given(st.integers(0, 10**13))
def test_bytes_of_every_dtype(parameters: int) -> None:
    bits = {"float32": 32, "bf16": 16, "F16": 16, "float8": 8, "int8": 8, "int4": 4}
    for name, each in bits.items():
        assert weight_bytes(parameters, weight_dtype(name)) == -(-parameters * each // 8)


def test_dtypes_that_are_none() -> None:
    for name in ("int3", "", "bfloat17"):
        with pytest.raises(UsageError, match="unknown dtype"):
            weight_dtype(name)
    with pytest.raises(UsageError):
        Scenario(kv_dtype="int4")  # a cache of four bits is nothing that gptkit knows the bytes of


@pytest.mark.parametrize(
    "wrong", [{"kv": (0,)}, {"kv": (4, -1)}, {"context": 0}, {"batch": 0}, {"batch": 2**31}, {"context": 10**12}]
)
def test_sizes_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="whole number from 1"):
        Scenario(**wrong)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(None, "bfloat16"), ("int4", "bfloat16"), ("float8", "bfloat16"), ("fp32", "float32"), ("float16", "float16")],
)
def test_narrow_weights_are_computed_with_in_bf16(dtype: str | None, computed: str) -> None:
    assert Scenario(dtype).computed == computed
    assert Scenario(dtype).cached == computed
    assert Scenario(dtype, kv_dtype="fp8").cached == "float8_e4m3fn"


def test_figures_are_those_of_the_analyses() -> None:
    spec = spec_of("mistral-7b")
    asked = Scenario("bf16", kv=(100, 9000), flops=True, memory=True, batch=3)
    found = figures_of(spec, asked, 5000)
    assert found.cache == tuple(allocated(spec, cache_bytes(spec, tokens, batch=3)) for tokens in (100, 9000))
    assert figures_of(spec, Scenario(memory=True), 5000).cache == (allocated(spec, cache_bytes(spec, 5000)),)
    assert found.prefill == forward_flops(spec, 5000, 3)
    assert found.training == training_flops(spec, 5000, 3)
    assert found.inference_memory == memory(spec, "bfloat16", 5000, 3)
    assert found.training_memory == training_memory(spec, "bfloat16", 5000, 3)
    assert found.weights is not None and found.weights["total"] == 2 * 7_241_732_096
    assert sum(found.weights.values()) == 2 * found.weights["total"]


def test_four_bits_halve_the_weights_and_nothing_else() -> None:
    spec = spec_of("qwen3-8b")
    eight, four = (figures_of(spec, Scenario(dtype, memory=True), 512).inference_memory for dtype in ("int8", "int4"))
    assert eight is not None and four is not None
    assert (four.weights, four.dtype) == (8_190_735_360 // 2, "int4")
    assert eight.weights == 8_190_735_360
    assert (four.cache, four.activations) == (eight.cache, eight.activations)


def test_models_are_told_at_one_context() -> None:
    names = ("gpt2", "qwen3-8b", "bloom-560m")
    assert common_context([spec_of(name) for name in names]) == 1024
    for each in params(*names, asked=Scenario(flops=True)):
        assert each.figures is not None and each.figures.context == 1024
    for each in params(*names, asked=Scenario(flops=True, context=77)):
        assert each.figures is not None and each.figures.token is not None and each.figures.token.context == 77


def test_no_figure_beyond_a_table_of_positions() -> None:
    asked = Scenario(kv=(1024, 1025), flops=True, memory=True, context=1025)
    gpt2, qwen = params("gpt2", "qwen3-8b", asked=asked)
    assert gpt2.figures is not None and qwen.figures is not None
    assert gpt2.figures.cache[0] is not None and gpt2.figures.cache[1] is None
    assert gpt2.figures.prefill is gpt2.figures.token is gpt2.figures.inference_memory is None
    assert qwen.figures.prefill is not None and None not in qwen.figures.cache
    data = gpt2.as_json()
    assert data["flops"] == data["memory"] == data["kv_cache"][1]
    assert data["flops"] == {"context": 1025, "impossible": "the context is longer than the model's table of positions"}
    with pytest.raises(UsageError, match="1,025 tokens do not fit the model's table of 1,024 positions"):
        params("gpt2", asked=Scenario(flops=True, context=1025))
    with pytest.raises(UsageError, match="1,025 tokens"):
        params("gpt2", "distilgpt2", asked=Scenario(kv=(1025,)))


def test_json_has_integers() -> None:
    asked = Scenario("int4", (64,), flops=True, memory=True, batch=2)
    (found,) = params("mixtral-8x7b", asked=asked)
    data = found.as_json(tensors=True)
    assert json.loads(json.dumps(data, allow_nan=False)) == data

    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [n for each in value.values() for n in numbers(each)]
        if isinstance(value, list):
            return [n for each in value for n in numbers(each)]
        return [value] if isinstance(value, int | float) else []

    told = numbers(data)
    assert all(isinstance(each, int) for each in told) and len(told) > 1000
    assert sum(each["parameters"] for each in data["tensors"]) == data["total"] == 46_702_792_704
    assert data["active"] == 12_879_925_248
    assert data["weights"]["bytes"]["total"] == 46_702_792_704 // 2
