"""Hostile config.json, family by family: a tree whose counts are finite, or a typed error, at once, in little memory.

Some hundreds a family in each run, and half a million (CONFIGS=…) in `make soak`. test_config.py has the single cases.
"""

import contextlib
import json
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import examples, few
from helpers.families import REPRESENTATIVES, Variant, variants_of
from helpers.processes import measured
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED, MAX_CONFIG_BYTES, MAX_CONFIG_VALUES
from gptkit.components import from_json, to_json
from gptkit.errors import CannotExpress, ConfigError, UnknownFamily

EXAMPLES = 40
ROPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "mrope",
    "su",
    "ntk",
    "",
    "LINEAR",
)
ROPE_NUMBERS = (
    *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "partial_rotary_factor"),
)
WORDS = (
    "silu",
    "gelu",
    "gelu_new",
    "relu",
    "full_attention",
    "sliding_attention",
    "gpt2",
    "1e-5",
    "8",
    "true",
    "\ud800",
)
NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 40, 48, 64, 255, 256, 4096, 9_999, 10_000, 10_001, 10**7, -1, -(2**31)),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 2.0, 8.0, 1e-5, -1e-5, 1e-320, 1e-45, 1e30, 1.7e308, math.nan, math.inf, -math.inf),
)
PLAIN = (*NUMBERS, *WORDS, None, True, False)


@st.composite
def ropes(draw: st.DrawFn) -> Any:
    """A rope dictionary, mostly nearly right, so that the formulas behind the checks are reached."""
    rope: dict[str, Any] = {draw(st.sampled_from(["rope_type", "rope_type", "type"])): draw(st.sampled_from(ROPES))}
    for name in draw(st.lists(st.sampled_from(ROPE_NUMBERS), max_size=6)):
        rope[name] = draw(st.sampled_from(PLAIN if draw(st.integers(0, 3)) == 0 else NUMBERS))
    if "longrope" in rope.values():
        length = draw(st.sampled_from([0, 3, 4, 4, 4, 6, 8]))
        rope |= {name: [draw(st.sampled_from(NUMBERS))] * length for name in ("short_factor", "long_factor")}
    return {"full_attention": rope} if draw(st.integers(0, 15)) == 0 else rope


VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(PLAIN),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    ropes(),
    st.lists(st.sampled_from(PLAIN), max_size=4),
    st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), st.sampled_from(PLAIN), max_size=3),
    st.recursive(
        st.sampled_from(PLAIN), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    st.sampled_from([[[[[]]]], {"a": {"a": {"a": []}}}, ["full_attention"] * 10_000]),
)


def fields_of(family: str) -> list[str]:
    """Every field that a family's files may hold; those that are read thrice, to be chosen more often."""
    architecture = ARCHITECTURES[family]
    read: set[str] = set()
    for variant in variants_of(family):
        reader = architecture.reader(variant.config)
        architecture.read(reader)
        read |= reader.used
    ignored = COMMON_REFUSED.keys() | architecture.refused.keys() | architecture.irrelevant.keys()
    return sorted(read) * 3 + sorted(ignored | COMMON_IRRELEVANT.keys() | {"softcap"})


def outcome(config: dict[str, Any]) -> str:
    """What becomes of it: another exception than gptkit's own passes through."""
    began = time.thread_time()
    try:
        architecture = architecture_of(config)
        spec, _ = architecture.spec_and_unknown(config)
        said = "a tree" if len(spec.blocks) < 100 else "a deep tree"
    except (ConfigError, UnknownFamily) as error:
        said = "refused" if 0 < len(str(error)) < 500 else "refused at length"
    if said == "a tree":
        # What was let through is finite, fits its description, and can be written and read again.
        assert 0 < sum(parameter.count for parameter in spec.parameters()) < 2**80
        with contextlib.suppress(CannotExpress):  # transformers refuses some of what it computes without a word
            json.dumps(architecture.config_for(spec), allow_nan=False)
        assert from_json(to_json(spec)) == spec  # NaN and infinity would come back as null
    return said if time.thread_time() - began < 5 else "slow"


def fuzz(family: str, count: int) -> Counter[str]:
    """Up to four fields of a variant replaced, all of them and each by itself: five configs of one draw at most."""
    variants, fields = variants_of(family), fields_of(family)
    counts: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        st.sampled_from(variants),
        st.lists(st.tuples(st.sampled_from(fields), VALUES), min_size=1, max_size=4),
        st.integers(0, len(variants) - 1),
    )
    def one(variant: Variant, changes: list[tuple[str, Any]], other: int) -> None:
        configs = [{**variant.config, **dict(changes)}]
        for field, value in changes if len(changes) > 1 else ():
            configs += [{**variant.config, field: value}, {**variants[other].config, field: value}]
        for config in configs:
            counts[outcome(config)] += 1
            counts["all"] += 1

    one()
    return counts


def check(family: str, count: int) -> Counter[str]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts: Counter[str] = Counter()
    while counts["all"] < count:
        counts += fuzz(family, max(100, min(20_000, (count - counts["all"]) // 6)))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert not counts["slow"] and not counts["refused at length"] and grown < 512, (counts, grown)
    # What the test is worth: much of what it makes is let through, and more is not.
    assert counts["a tree"] > count / 20 and counts["refused"] > count / 5, counts
    return counts


@few(1)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_any_values_give_a_finite_tree_or_an_error(family: str) -> None:
    assert check(family, examples(EXAMPLES))["all"] >= examples(EXAMPLES)


EXTREMES = (1e-320, 1e38)
"""Numbers whose inverse, and whose square in float32, is infinite."""


@few(12)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_extreme_numbers_in_any_one_field_give_a_finite_tree_or_an_error(family: str) -> None:
    """As granite's logits_scaling of 1e-320, whose inverse was infinite in the tree."""
    config = REPRESENTATIVES[family].config
    for field in sorted(set(fields_of(family))):
        path = field.split(".")
        for value in EXTREMES:
            changed = json.loads(json.dumps(config))
            within = changed
            for name in path[:-1]:
                within = within.setdefault(name, {})
                if not isinstance(within, dict):
                    break
            else:
                within[path[-1]] = value
                assert outcome(changed) in ("a tree", "refused"), (field, value)


@pytest.mark.soak
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_half_a_million_configs(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = check(family, int(os.environ.get("CONFIGS", "500000")))
    with capsys.disabled():
        print(f"\n{family}: {dict(counts)}")


# --- as large as it gets ---


def filled(begin: str, piece: str, end: str, size: int = MAX_CONFIG_BYTES) -> str:
    """The piece as often as it goes between the two."""
    return begin + piece * ((size - len(begin) - len(end)) // len(piece)) + end


LLAMA = '{"model_type":"llama","num_hidden_layers":2,'
QWEN2 = '{"model_type":"qwen2","num_hidden_layers":2,'
LARGE: dict[str, tuple[Callable[[], str], str]] = {
    "500 MB": (lambda: filled("{", " ", "}", 500_000_000), "500,000,000 bytes"),
    "spaces": (lambda: filled("{", " ", "}"), "model_type"),
    "lists": (lambda: filled(LLAMA + '"a":[', "[],", "0]}"), "values"),
    "some lists": (lambda: filled(LLAMA + '"a":[', "[],", "0]}", 3 * MAX_CONFIG_VALUES), "2 blocks"),
    "objects": (lambda: filled(LLAMA + '"a":[', "{},", "0]}"), "values"),
    "keys": (lambda: LLAMA + ",".join(f'"{i:x}":0' for i in range(MAX_CONFIG_VALUES - 2)) + "}", "2 blocks"),
    "more keys": (lambda: LLAMA + ",".join(f'"{i:x}":0' for i in range(MAX_CONFIG_VALUES)) + "}", "values"),
    "numbers": (lambda: filled(LLAMA + '"a":[', "1234567,", "0]}"), "2 blocks"),
    "layer types": (lambda: filled(QWEN2 + '"layer_types":[', '"full_attention",', "0]}"), "layer_types"),
    "digits": (lambda: filled('{"model_type":"llama","num_hidden_layers":', "9", "}"), "not valid JSON"),
    "deep": (lambda: filled(LLAMA + '"a":', "[", "", MAX_CONFIG_VALUES), "not valid JSON"),
    "layers": (lambda: '{"model_type":"llama","num_hidden_layers":10000000}', "num_hidden_layers"),
    "a model type": (lambda: filled('{"model_type":"', "llama", '"}'), "does not support the model_type"),
}  # fmt: skip


def tree_read(path: Path) -> str:
    """What `read_spec` makes of it, within bounds of time and memory."""
    return measured(path, "from gptkit.converter.resolve import read_spec", "len(read_spec(path)[0].blocks), 'blocks'")


proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of memory")


@few(3)
@proc
@pytest.mark.parametrize("case", LARGE)
def test_a_config_as_large_as_it_gets(case: str, memory_path: Path) -> None:
    make, message = LARGE[case]
    (memory_path / "config.json").write_text(make())
    assert message in tree_read(memory_path)


@proc
@pytest.mark.parametrize(
    ("layers", "message"), [(1, "1 blocks"), (10_000, "10000 blocks"), (30_000, "values"), (200_000, "bytes")]
)
def test_a_gptkit_json_as_large_as_it_gets(layers: int, message: str, memory_path: Path) -> None:
    spec = to_json(ARCHITECTURES["llama"].spec({"model_type": "llama", "num_hidden_layers": 1}))
    block, spec["blocks"] = json.dumps(spec["blocks"][0], separators=(",", ":")), "BLOCKS"
    text = json.dumps({"schema_version": 1, "spec": spec, "origin": {}, "history": []})
    (memory_path / "gptkit.json").write_text(text.replace('"BLOCKS"', "[" + ",".join([block] * layers) + "]"))
    assert message in tree_read(memory_path)
