"""Comparing: the table that tutorials print, held to papers and configs; costs at one context; who fails is named."""

import json

import msgspec
import pytest
from helpers.processes import imported

import gptkit
from gptkit.analysis.compare import Comparison, compare, comparison
from gptkit.analysis.figures import Scenario
from gptkit.analysis.params import ModelCount, params
from gptkit.components import Llama3Scaling, Rotary
from gptkit.errors import InvalidInput, Offline, UsageError

MODELS = ("gpt2", "llama-2-7b", "bloom-7b1", "falcon-7b")

# Written by hand from papers and config.json files. GPT-2: Radford et al. 2019 (layer normalization "moved to the input
# of each sub-block", 50,257 tokens, a context of 1024). LLaMA 2: 2307.09288 and, of its components, 2302.13971.
# BLOOM: 2211.05100 (ALiBi, a norm behind the embedding; serial). Falcon: 2311.16867 (rotary positions, multi-query,
# attention and feed-forward in parallel, no biases).
TUTORIAL = {
    "family": ("gpt2", "llama", "bloom", "falcon"),
    "position": ("learned 1,024", "RoPE 10,000", "ALiBi", "RoPE 10,000"),
    "norm": ("LayerNorm, pre", "RMSNorm, pre", "LayerNorm, pre", "LayerNorm, pre"),
    "embedding norm": ("none", "none", "LayerNorm", "none"),
    "activation": ("GELU (tanh)", "SiLU", "GELU (tanh)", "GELU"),
    "feed-forward": ("plain 3,072", "SwiGLU 11,008", "plain 16,384", "plain 18,176"),
    "attention": ("MHA 12", "MHA 32", "MHA 32", "MQA 71/1"),
    "head dim": ("64", "128", "128", "64"),
    "q/k norm": ("none", "none", "none", "none"),
    "bias": ("all linears", "none", "all linears", "none"),
    "block": ("serial", "serial", "serial", "parallel, one norm"),
    "head": ("tied", "own weight", "tied", "tied"),
    "layers": ("12", "32", "30", "32"),
    "hidden size": ("768", "4,096", "4,096", "4,544"),
    "vocabulary": ("50,257", "32,000", "250,880", "65,024"),
    "context": ("1,024", "4,096", "not stated", "2,048"),
    "window": ("none", "none", "none", "none"),
}

# Parameters as published; the cache 2 (keys and values) · layers · key-value heads · head dim · 2 bytes.
PARAMETERS = (124_439_808, 6_738_415_616, 7_069_016_064, 6_921_720_704)
CACHE = (2 * 12 * 12 * 64 * 2, 2 * 32 * 32 * 128 * 2, 2 * 30 * 32 * 128 * 2, 2 * 32 * 1 * 64 * 2)


@pytest.fixture(scope="module")
def table() -> Comparison:
    return compare(*MODELS, offline=True)


def test_the_table_of_every_tutorial(table: Comparison) -> None:
    assert {row.name: row.words for row in table.shown()} == TUTORIAL


def test_what_differs_is_told_from_the_data(table: Comparison) -> None:
    alike = [row.name for row in table.shown() if not row.differs]
    assert alike == ["q/k norm", "window"]
    assert [row.name for row in table.shown(only_differences=True)] == [n for n in TUTORIAL if n not in alike]
    everything = [row.name for row in table.shown(everything=True)]
    assert set(TUTORIAL) < set(everything) and "norm eps" in everything


def test_costs_are_at_one_context(table: Comparison) -> None:
    assert table.context == 1024  # of gpt2, which sees no further
    found = table.costs()
    assert found["parameters"] == PARAMETERS
    assert found["weights"] == tuple(2 * number for number in PARAMETERS)
    assert found["KV per token"] == CACHE
    assert found["KV at 1,024"] == tuple(1024 * number for number in CACHE)
    assert "active" not in found
    # gpt2: 2 a weight of its matrices and of the head, and 4 · hidden a layer for each token in sight.
    assert found["FLOPs per token"][0] == 2 * (12 * 12 * 768**2 + 50257 * 768) + 4 * 12 * 768 * 1024


def test_a_mixture_has_active_parameters() -> None:
    found = compare("mixtral-8x7b", "gpt2").costs()
    assert found["active"] == (12_879_925_248, 124_439_808)
    assert found["weights"] == (2 * 46_702_792_704, 2 * 124_439_808)  # all of them are kept


def test_dtype_and_context() -> None:
    found = compare("llama-2-7b", dtype="fp32", context=2048)
    assert found.costs()["KV at 2,048"] == (2048 * 2 * CACHE[1],)
    narrow = compare("llama-2-7b", dtype="int4", context=2048)
    assert narrow.costs()["weights"] == (PARAMETERS[1] // 2,)
    assert narrow.cached == "bfloat16" and narrow.costs()["KV per token"] == (CACHE[1],)


def test_no_figure_where_a_table_of_positions_ends() -> None:
    found = compare("gpt2", "llama-2-7b", context=8192)
    assert found.costs()["KV at 8,192"][0] is None and found.costs()["FLOPs per token"][0] is None
    assert found.costs()["KV per token"][0] == CACHE[0]
    assert found.notes == (
        "gpt2 has 1,024 positions, fewer than 8,192 tokens.",
        "llama-2-7b has a context of 4,096 tokens, less than 8,192.",
    )
    json.dumps(found.as_json(), allow_nan=False)
    assert compare("llama-2-7b", context=4096).notes == ()


def test_json_has_words_data_and_integers(table: Comparison) -> None:
    found = json.loads(json.dumps(table.as_json(), allow_nan=False))
    assert (found["schema_version"], found["context"], found["dtype"]) == (1, 1024, "bfloat16")
    falcon = found["models"][3]
    assert falcon["aspects"]["attention"] == {"words": "MQA 71/1", "value": {"kind": "MQA", "heads": 71, "kv_heads": 1}}
    assert all(type(value) is int for model in found["models"] for value in model["costs"].values())
    assert found["differs"] == [row.name for row in table.rows if row.differs]


def test_values_that_differ_never_look_alike() -> None:
    (first,) = params("llama-3.1-8b")
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=2.0, high_freq_factor=4.0, original_context=8192)
    position = Rotary(dim=128, base=5e5, scaling=scaling)
    replace = msgspec.structs.replace
    block = first.spec.blocks[0].replaced(attention=replace(first.spec.blocks[0].attention, position=position))
    second = ModelCount("b", "llama", replace(first.spec, blocks=(block,) * 32))
    third = ModelCount("c", "llama", first.spec)
    found = comparison([first, second, third], Scenario())
    row = next(row for row in found.rows if row.name == "position")
    assert row.differs
    assert row.words == tuple(f"RoPE 500,000, llama3 ×8 #{n}" for n in (1, 2, 1))
    assert not comparison([first, third], Scenario()).shown(only_differences=True)


def test_details_are_shown_where_they_differ() -> None:
    found = compare("llama-2-7b", "llama-7b")  # eps 1e-5 and 1e-6: the details of their configs
    assert "norm eps" in [row.name for row in found.shown()]
    assert "norm eps" not in [row.name for row in compare("llama-2-7b", "llama-2-13b").shown()]


def test_the_one_that_fails_is_named() -> None:
    with pytest.raises(InvalidInput, match="gpt2-medum"):
        compare("gpt2", "gpt2-medum")
    with pytest.raises(Offline, match="nobody/nothing"):
        compare("gpt2", "nobody/nothing", offline=True)


def test_a_broken_config_is_named(tmp_path: object) -> None:
    path = f"{tmp_path}/config.json"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump({"model_type": "gpt2", "n_head": -3}, file)
    with pytest.raises(InvalidInput) as caught:
        compare("gpt2", path)
    assert path in str(caught.value)


@pytest.mark.parametrize("wrong", [{"context": 0}, {"context": -5}, {"context": 2**40}, {"dtype": "bf17"}])
def test_what_cannot_be_asked(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        compare("gpt2", **wrong)  # type: ignore[arg-type]


def test_of_nothing() -> None:
    with pytest.raises(UsageError, match="at least one"):
        compare()


def test_it_imports_neither_torch_nor_numpy() -> None:
    assert not imported("import gptkit; gptkit.compare('gpt2', 'qwen3-8b')")
    assert gptkit.compare is compare
