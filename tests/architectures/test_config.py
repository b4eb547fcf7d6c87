"""config.json is untrusted: whatever it holds, the answer is a tree or a GptkitError, at once and in little memory."""

import contextlib
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.covering import examples, few
from helpers.families import REPRESENTATIVES, VARIANTS, spec_of
from helpers.processes import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.architectures import ARCHITECTURES, BY_MODEL_TYPE, architecture_of, named
from gptkit.architectures.base import TOKEN_IDS
from gptkit.architectures.config import ConfigReader, parse_config_text, quantisation, read_config_file
from gptkit.architectures.draws import placed
from gptkit.components import ModelSpec, Rotary
from gptkit.errors import CannotExpress, ConfigError, GptkitError, UnknownFamily
from gptkit.modules.positions import inverse_frequencies

families = pytest.mark.parametrize("family", ARCHITECTURES)

ROPE_FIELDS = (
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
)

NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**30, 10**400, -(10**400), 0, 1, -1, 10_000, 10_001]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-320, 1e-300, 1e300, math.inf, -math.inf, math.nan, 0.5, 1.0, 2.0]),
)
STRINGS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["silu", "gelu", "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "8"]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS)


@st.composite
def rope_values(draw: st.DrawFn) -> dict[str, Any]:
    """A rope dictionary that is nearly right, so that the formulas behind the checks are reached."""
    rope: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {
                "rope_type": st.sampled_from(
                    ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
                )
            },
            optional={name: st.one_of(NUMBERS, st.sampled_from([1, 4.0, 40])) for name in ROPE_FIELDS[2:12]},
        )
    )
    if rope["rope_type"] == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = draw(st.lists(st.one_of(st.just(1.5), NUMBERS), min_size=4, max_size=4))
    return rope


VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=4),
    st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=4),
    st.dictionaries(st.one_of(st.sampled_from(ROPE_FIELDS), st.text(max_size=4)), SCALARS, max_size=6),
    rope_values(),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)),
)


def tree_or_error(config: dict[str, Any]) -> ModelSpec | None:
    """The tree, or None where the config is refused as it should be: another exception passes through."""
    started = time.process_time()
    try:
        architecture = architecture_of(config)
        spec, _ = architecture.spec_and_unknown(config)
    except (ConfigError, UnknownFamily) as error:
        assert 0 < len(str(error)) < 500  # noqa: PT017
        spec = None
    else:
        # What was let through is finite and can be written and read again.
        with contextlib.suppress(CannotExpress):  # transformers' llama refuses heads that do not share out the width
            json.dumps(architecture.config_for(spec), allow_nan=False)
        assert sum(p.count for p in spec.parameters()) > 0
    layers = 0 if spec is None else len(spec.blocks)
    assert time.process_time() - started < 2 + layers / 500  # what thousands of layers take grows with their number
    return spec


# --- hostile values --------------------------------------------------------------------------------------------------

QUICK = settings(max_examples=examples(500), deadline=None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "falcon"])
@settings(QUICK, max_examples=examples(400))
@given(
    rope=rope_values(),
    context=st.sampled_from([1, 2, 40, 256, 2**31 - 1]),
    theta=st.one_of(st.just(1e4), NUMBERS),
    head_dim=st.sampled_from([2, 8, 8, 8]),
    key=st.sampled_from(["rope_scaling", "rope_parameters"]),
)
def test_any_rope_gives_frequencies_or_an_error(family, rope, context, theta, head_dim, key):
    config = {**REPRESENTATIVES[family].config, "max_position_embeddings": context, "head_dim": head_dim}
    spec = tree_or_error({**config, "rope_theta": theta, key: rope})
    if spec is not None:
        rotary = spec.blocks[0].attention.position
        assert isinstance(rotary, Rotary)
        for length in (1, 41, 300):
            assert inverse_frequencies(rotary, length, torch.float32).shape == (rotary.dim // 2,)


@QUICK
@given(st.dictionaries(st.one_of(st.just("model_type"), st.text(max_size=6)), VALUES, max_size=4))
def test_any_object_gives_an_error(config):
    assert tree_or_error(config) is None or config["model_type"] in ARCHITECTURES


BAD = {
    "true": True,
    "a string": "8",
    "zero": 0,
    "negative": -1,
    "a fraction": 8.5,
    "infinity": math.inf,
    "nan": math.nan,
    "a list": [8],
    "an object": {"value": 8},
    "huge": 10**400,
    "very huge": 10**5000,
}


MAY_BE_ZERO = ("qk_nope_head_dim", "first_k_dense_replace", "hidden_size_per_layer_input", "num_kv_shared_layers")
MAY_BE_ZERO_OF = (("granitemoehybrid", "num_local_experts"), ("lfm2_moe", "num_dense_layers"))


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_every_size_refuses_what_is_no_size(variant, value):
    others = (
        "max_window_layers",
        "first_k_dense_replace",
        "shared_intermediate_size",
        "num_shared_experts",
        *TOKEN_IDS,
        "rotary_emb_base",
        "attn_layer_offset",
        "rescale_every",
    )
    sizes = [key for key, good in variant.config.items() if type(good) is int and key not in others]
    assert len(sizes) >= 4
    for key in sizes:
        may_be_zero = key in MAY_BE_ZERO or (variant.family, key) in MAY_BE_ZERO_OF
        if may_be_zero and value == 0 and type(value) is int:
            continue  # all of a head may turn, no layer be dense or have experts, and none have inputs of its own
        with pytest.raises(ConfigError, match=key):
            spec_of({**variant.config, key: value})


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "a fraction"])
@pytest.mark.parametrize(
    ("family", "key"), [("gpt2", "layer_norm_epsilon"), ("llama", "rms_norm_eps"), ("llama", "rope_theta")]
)
def test_every_number_refuses_what_is_no_number_above_zero(family, key, kind):
    value = BAD[kind]
    with pytest.raises(ConfigError, match=key):
        spec_of({**REPRESENTATIVES[family].config, key: value})


@pytest.mark.parametrize("value", [0, 1, "true", "", [], 1.0])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt2", "tie_word_embeddings"),
        ("gpt2", "scale_attn_weights"),
        ("llama", "attention_bias"),
        ("qwen2", "use_sliding_window"),
        ("falcon", "alibi"),
        ("falcon", "multi_query"),
    ],
)
def test_every_switch_refuses_what_is_neither_true_nor_false(family, key, value):
    with pytest.raises(ConfigError, match=key):
        spec_of({**REPRESENTATIVES[family].config, key: value})


@pytest.mark.parametrize("layers", [10**5, 10**7, 2**31 - 1, 2**31, 10**18, 10**400])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_too_many_layers_are_refused_at_once(variant, layers):
    inner = variant.config.get("text_config", variant.config)
    keys = inner.keys() & {"n_layer", "n_layers", "num_layers", "num_hidden_layers", "encoder_layers"}
    of = "layers_block_type" if "layers_block_type" in inner else "hybrid_override_pattern"
    listed = {of: ["full_attention"] * 10**5 if of == "layers_block_type" else "*" * min(layers, 10**6)}
    many = {**inner, **(dict.fromkeys(keys, layers) or listed)}
    tracemalloc.start()
    try:
        with at_most(0.5), pytest.raises(ConfigError, match="layer"):
            spec_of(many if inner is variant.config else {**variant.config, "text_config": many})
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@few(4)
@families
def test_the_most_layers_allowed_take_seconds_at_most(family):
    config = {key: value for key, value in REPRESENTATIVES[family].config.items() if key != "attention_types"}
    keys = config.keys() & {"n_layer", "n_layers", "num_layers", "num_hidden_layers"}
    keys |= config.keys() & {"encoder_layers", "decoder_layers", "num_decoder_layers"}
    if family == "gpt_neo":
        config["attention_types"] = [[["global", "local"], 5_000]]
    lists = config.keys() & {"layer_types", "layers_block_type", "block_types"}
    assert keys | lists
    for key in lists:
        config[key] = (10_000 * config[key])[:10_000]
    with at_most(5):
        spec = spec_of({**config, **dict.fromkeys(keys, 10_000)})
    assert len(spec.blocks) == 10_000
    assert spec.encoder is None or len(spec.encoder.blocks) == 10_000


def test_the_largest_sizes_are_only_counted():
    spec = spec_of({**REPRESENTATIVES["llama"].config, "vocab_size": 2**31 - 1, "intermediate_size": 2**31 - 1})
    assert max(p.count for p in spec.parameters()) == 48 * (2**31 - 1)


@families
def test_what_is_refused_says_why(family):
    architecture = ARCHITECTURES[family]
    for name, (harmless, reason) in architecture.refusals.items():
        for value in harmless:
            spec_of({**REPRESENTATIVES[family].config, **placed({name: value})})
        for value in (each for each in (True, {"bits": 4}, "yes", [1]) if each not in harmless):
            with pytest.raises(ConfigError) as caught:
                spec_of({**REPRESENTATIVES[family].config, **placed({name: value})})
            assert name in str(caught.value)
            assert reason in str(caught.value)


@families
def test_what_is_irrelevant_changes_nothing(family):
    architecture, config = ARCHITECTURES[family], REPRESENTATIVES[family].config
    extra = {name: ["anything", math.nan] for name in architecture.ignored if name != "model_type"}
    assert architecture.spec_and_unknown({**config, **extra}) == (architecture.spec(config), [])


@families
def test_a_field_that_nobody_knows_is_reported(family):
    config = {**REPRESENTATIVES[family].config, "softcap_everything": 3, "zz": None}
    _, unknown = ARCHITECTURES[family].spec_and_unknown(config)
    assert unknown == ["softcap_everything", "zz"]


# --- contradictions and combinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_head": 5}, "multiple of n_head"),
        ("llama", {"num_key_value_heads": 4}, "not divisible by"),
        ("llama", {"head_dim": 7}, "7 dimensions of each head: transformers fails"),
        ("llama", {"head_dim": None, "num_attention_heads": 7}, "multiple of num_attention_heads"),
        ("llama", {"hidden_act": "gelu_of_tomorrow"}, "one of"),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
            "the whole head",
        ),
        *((family, {"partial_rotary_factor": 0.5}, "the whole head") for family in ("solar_open", "glm4_moe_lite")),
        ("olmoe", {"head_dim": 16}, "no other value for this family"),
        ("cohere2_moe", {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "only rope_parameters"),
        ("dots1", {"num_experts_per_tok": None}, "a positive integer"),
        ("hy_v3", {"num_shared_experts": 2**31 - 1}, "fewer than 2\\^31 hidden units"),
        ("minicpm3", {"v_head_dim": None, "hidden_size": 3}, "at least num_attention_heads"),
        ("persimmon", {"head_dim": 8}, "a different width"),
        *(
            (
                "hunyuan_v1_dense",
                {"rope_scaling": {"type": "dynamic", "alpha": alpha}},
                "alpha is .* in the range of float32",
            )
            for alpha in (1e39, 1e308)
        ),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 2.0}, "head_dim": 2}, "head_dim 2"),
        ("dots1", {"n_routed_experts": None, "num_experts_per_tok": None}, "a positive integer"),
        ("llama", {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}, "from 0 to 1"),
        ("llama", {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": None}}, "from 0 to 1"),
        ("llama", {"rope_scaling": {"rope_type": "mrope"}}, "expected default, linear"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": {"rope_type": 3}}, "rope_type"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ("llama", {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "YaRN"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e300}}, "beta_fast"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e9, "mscale": 1.7e308, "mscale_all_dim": 1}},
            "mscale",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 1,
                "head_dim": 2,
                "rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
            },
            "original_max_position_embeddings",
        ),
        ("qwen2", {"sliding_window": 0, "use_sliding_window": False}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": [[]] * 3}, "layer_types"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen2", {"max_window_layers": True}, "max_window_layers"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mixtral", {"sliding_window": 4, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mixtral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("lfm2_moe", {"layer_types": None, "full_attn_idxs": [1]}, "layer_types is None"),
        ("nemotron_h", {"time_step_min": 2e30}, "up to 1e30"),
        ("zamba2", {"time_step_min": 2e30}, "up to 1e30"),
        ("zamba2", {"layers_block_type": ["mamba"] * 5}, "at least one hybrid layer"),
        ("zamba2", {"layers_block_type": ["hybrid"] * 4}, "num_hidden_layers is 5, expected 4"),
        ("zamba2", {"layers_block_type": None}, "num_hidden_layers is 5, expected 54"),
        ("zamba2", {"layers_block_type": ["hybrid", "full_attention"]}, "a list of linear_attention and hybrid"),
        ("zamba2", {"layer_types": ["hybrid"] * 5}, "what layers_block_type says"),
        ("zamba2", {"hybrid_layer_ids": [1, 2]}, "hybrid_layer_ids"),
        ("zamba2", {"num_attention_heads": 5}, "twice hidden_size"),
        ("zamba2", {"num_key_value_heads": 4}, "a divisor of num_attention_heads"),
        ("zamba2", {"num_key_value_heads": 3, "use_shared_attention_adapter": True}, "adapters of keys and values"),
        ("zamba2", {"attention_head_dim": 8}, "attention_head_dim"),
        ("zamba2", {"head_dim": 8}, "head_dim"),
        ("zamba2", {"mamba_headdim": 24}, "mamba_headdim"),
        ("zamba2", {"n_mamba_heads": 7}, "a divisor of .*, the width of all heads together"),
        ("zamba2", {"mamba_ngroups": 3}, "a divisor of n_mamba_heads"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("granite", {"logits_scaling": 1e-45}, "a number whose inverse is in the range of float32"),
        ("granite_swa", {"logits_scaling": 1e-320}, "a number whose inverse is in the range of float32"),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact"),
        ("falcon", {"head_dim": 12}, "head_dim"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of({**REPRESENTATIVES[family].config, **changes})


SPELLINGS = [
    (family, name, other)
    for family, architecture in ARCHITECTURES.items()
    for name, others in architecture.config_aliases.items()
    for other in others
]


@pytest.mark.parametrize(("family", "name", "other"), SPELLINGS)
def test_two_spellings_of_one_field_must_agree(family, name, other):
    """transformers takes now the one, now the other: nobody can know which was meant."""
    config = dict(REPRESENTATIVES[family].config)
    usual, twice = (False, True) if name.endswith(("bias", "embeddings")) else (6, 12)
    value = config.pop(name, config.get(other, usual))
    different = twice if value == usual else 2 * value
    expected = spec_of({**config, name: value})
    assert spec_of({**config, other: value}) == expected
    assert spec_of({**config, name: value, other: value}) == expected
    assert spec_of({**config, name: value, other: None}) == expected
    assert spec_of({**config, name: None, other: value}) == expected
    with pytest.raises(ConfigError, match=f"{name}.*{other}"):
        spec_of({**config, name: value, other: different})


# --- which family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, 3, True, [], {}, ["gpt2"], math.nan])
def test_a_model_type_that_is_no_name(kind):
    with pytest.raises(ConfigError, match="model_type"):
        architecture_of({"model_type": kind})


def test_no_model_type():
    with pytest.raises(ConfigError, match="model_type"):
        architecture_of({"architectures": ["GPT2LMHeadModel"]})


def test_an_unknown_family_gets_a_guess_and_the_list():
    with pytest.raises(UnknownFamily) as caught:
        architecture_of({"model_type": "lama"})
    assert "did you mean llama?" in str(caught.value)
    assert f"gptkit families lists all {len(ARCHITECTURES)}." in str(caught.value)
    with pytest.raises(UnknownFamily, match="'nothing-near'"):
        architecture_of({"model_type": "nothing-near"})


def test_an_architecture_of_its_own_is_no_typo():
    from transformers import CONFIG_MAPPING

    told = 0
    for kind in [kind for kind in CONFIG_MAPPING if kind not in BY_MODEL_TYPE]:
        with pytest.raises(UnknownFamily) as caught:
            architecture_of({"model_type": kind})
        assert "did you mean" not in str(caught.value), kind
        told += kind == "xlstm"
    assert told == 1


@pytest.mark.parametrize("kind", ["reformer", "umt5", "xlstm", "zamba"])
def test_another_family_is_no_typo_of_ours(kind):
    with pytest.raises(UnknownFamily) as caught:
        architecture_of({"model_type": kind})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("kind", ["g" * 10**6, "llama" * 10**5, "\0", "GPT2", "gpt2 ", "../gpt2", "ł" * 10**6])
def test_an_odd_model_type_is_refused_quickly_and_briefly(kind):
    with at_most(1), pytest.raises(UnknownFamily) as caught:
        architecture_of({"model_type": kind})
    assert len(str(caught.value)) < 300


def test_named():
    assert all(named(name) is architecture for name, architecture in ARCHITECTURES.items())
    with pytest.raises(UnknownFamily, match="gpt5"):
        named("gpt5")


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        "{'a': 1}",
        '{"a": 1}}',
        '{"a": }',
        "[]",
        '["model_type"]',
        "3",
        '"gpt2"',
        "null",
        "\ufeff{}",
        "\0",
        "[" * 10**5,
        '{"a":' * 10**5,
        '{"a": ' + "9" * 10**5 + "}",
        '{"a": "\\ud800',
    ],
    ids=range(17),
)
def test_broken_json_is_a_config_error(text):
    with pytest.raises(ConfigError, match="where it came from"):
        parse_config_text(text, "where it came from")


@settings(max_examples=examples(500), deadline=None)
@given(st.one_of(st.text(max_size=30), st.binary(max_size=30)))
def test_any_text_is_an_object_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config_text(text, "there"), dict)


def test_a_huge_text_is_refused_before_it_is_parsed():
    with pytest.raises(ConfigError, match="too large for a config"):
        parse_config_text(" " * (16 * 2**20 + 1), "there")


def depths() -> Iterator[int]:
    yield from (1, 50, 300)
    yield from range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() + 10, 5)


@pytest.mark.parametrize("shape", [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize(
    "key", ["n_embd", "n_layer", "activation_function", "tie_word_embeddings", "is_encoder_decoder"]
)
def test_deep_nesting_is_a_config_error(shape, key):
    """Parsing may just succeed where showing the value would not."""
    opening, closing = shape
    for depth in depths():
        text = f'{{"model_type": "gpt2", "{key}": {opening * depth}1{closing * depth}}}'
        with pytest.raises(ConfigError):
            spec_of(parse_config_text(text, "there"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "gptq, 4 bits, groups of 128",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": -1}}, "gptq, 3 bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes, 4 bits"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}, "fp8, blocks of 128 × 64"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}},
                }
            },
            "compressed-tensors, 8 bits",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx, 4 bits, groups of 64"),
        ({"quantization_config": {}}, "some method"),
        ({"quantization_config": {"quant_method": "\x1b[1m", "bits": True, "group_size": 2**99}}, "some method"),
        ({"quantization_config": [4]}, "in a way that config.json does not tell"),
        ({"quantization_config": None}, None),
        ({}, None),
    ],
)
def test_how_weights_are_quantised(fields, words):
    found = quantisation(fields)
    assert (None if found is None else found[0]) == words


def test_numbers_that_json_allows():
    """1e999 is JSON, and infinity to Python; NaN is not JSON, and Python reads it."""
    for text in ("1e999", "-1e999", "NaN", "Infinity"):
        config = parse_config_text(f'{{"model_type": "gpt2", "layer_norm_epsilon": {text}}}', "there")
        with pytest.raises(ConfigError, match="layer_norm_epsilon"):
            spec_of(config)


def test_reading_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2"}')
    assert read_config_file(path) == ({"model_type": "gpt2"}, '{"model_type": "gpt2"}')
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config_file(path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_file(path)
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_file(path)


# --- the reader ------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[ConfigReader], Any]] = {
    "integer": lambda reader: reader.integer("x"),
    "layers": lambda reader: reader.layers("x"),
    "optional_integer": lambda reader: reader.optional_integer("x"),
    "number": lambda reader: reader.number("x"),
    "boolean": lambda reader: reader.boolean("x", True),
    "string": lambda reader: reader.string("x", ""),
    "choice": lambda reader: reader.choice("x", "a", {"a": 1}),
    "refuse": lambda reader: reader.refuse({"x": ((None, False), "it is so")}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@settings(max_examples=examples(100), deadline=None)
@given(value=VALUES)
def test_every_way_to_read_answers_or_refuses(read, value):
    reader = ConfigReader({"x": value})
    try:
        read(reader)
    except ConfigError as error:
        assert "x" in str(error)  # noqa: PT017
        assert len(str(error)) < 300  # noqa: PT017
    assert reader.used == {"x"}


def test_all_refusals_are_gptkits_own():
    assert issubclass(ConfigError, GptkitError)
    assert issubclass(UnknownFamily, GptkitError)
    assert ConfigError("x").exit_code == UnknownFamily("x").exit_code == 4
