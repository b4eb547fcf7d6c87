"""Aspects: what differs between trees is told by one of them, what only rounds otherwise by none; layers each."""

import json
from typing import Any

import msgspec
import pytest
from helpers.covering import examples
from helpers.families import CONFIGS, spec_of
from helpers.family_specs import preset_spec as preset
from helpers.random_trees import drawn_spec
from helpers.trees import TREES
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.analysis.aspects import ORDER, Aspect, aspects
from gptkit.components import (
    ALiBi,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    RMSNorm,
    Rotary,
    YarnScaling,
    without_rounding,
)
from gptkit.errors import ConfigError

replace = msgspec.structs.replace


def told(spec: ModelSpec) -> dict[str, Aspect]:
    return {each.name: each for each in aspects(spec)}


def words(spec: ModelSpec, name: str) -> str:
    return told(spec)[name].words


def data(spec: ModelSpec) -> str:
    return json.dumps([(each.name, each.data) for each in aspects(spec)], allow_nan=False)


def in_layers(spec: ModelSpec, change: Any, layers: range) -> ModelSpec:
    """The tree with some of its blocks changed."""
    blocks = (change(block) if layer in layers else block for layer, block in enumerate(spec.blocks))
    return replace(spec, blocks=tuple(blocks))


def windowed(block: Any) -> Any:
    return block.replaced(attention=replace(block.attention, window=512))


# --- laws ---


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_aspects_tell_trees_apart_exactly_where_their_functions_differ(drawn: st.DataObject) -> None:
    def choose(options: Any) -> Any:
        return drawn.draw(st.sampled_from(list(options)))

    a, b = drawn_spec(choose), drawn_spec(choose)
    assert (data(a) == data(b)) == (without_rounding(a) == without_rounding(b))
    usual, other = ([each.name for each in aspects(spec) if each.name in ORDER] for spec in (a, b))
    assert usual == other == list(ORDER)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Any:
    """Every field that is a number, a flag, a choice or a window that is not there: its path."""
    if isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            yield from leaves(getattr(node, name), (*path, name))
    elif isinstance(node, tuple):
        for index, each in enumerate(node):
            yield from leaves(each, (*path, index))
    elif isinstance(node, bool | int | float | str) or (node is None and path[-1] == "window"):
        yield path


CHOICES = {
    "stream": "normed",
    "halves": "adjacent",
    "gelu": "relu",
    "gelu_new": "gelu",
    "gelu_bloom": "gelu",
    "silu": "quick_gelu",
}
"""Words of a tree, and others in their place."""


def changed(node: Any, path: tuple[Any, ...]) -> Any:
    """The tree with one of these changed."""
    if not path:
        if isinstance(node, str):
            return CHOICES.get(node, node)
        return not node if isinstance(node, bool) else 7 if node is None else node * 2
    first, rest = path[0], path[1:]
    if isinstance(node, tuple):
        return (*node[:first], changed(node[first], rest), *node[first + 1 :])
    return replace(node, **{first: changed(getattr(node, first), rest)})


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "falcon-40b", "bloom", "mixtral", "llama-yarn"])
def test_no_number_of_a_tree_changes_untold(name: str) -> None:
    spec = spec_of(CONFIGS[name])
    seen = 0
    for path in leaves(spec):
        try:
            other = changed(spec, path)
        except ConfigError:  # sizes that no longer fit
            continue
        if without_rounding(other) != without_rounding(spec):
            assert data(other) != data(spec), path
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", [*CONFIGS, *TREES])
def test_words_are_short_and_for_every_tree(name: str) -> None:
    spec = TREES[name] if name in TREES else spec_of(CONFIGS[name])
    for each in aspects(spec):
        assert each.words and each.words.isprintable() and each.words == each.words.strip()
        assert len(each.words) < 120
        json.dumps(each.data, allow_nan=False)


# --- words ---


@pytest.mark.parametrize(
    ("heads", "kv_heads", "name"), [(4, 4, "MHA 4"), (4, 2, "GQA 4/2"), (4, 1, "MQA 4/1"), (1, 1, "MHA 1")]
)
def test_how_heads_are_called(heads: int, kv_heads: int, name: str) -> None:
    spec = spec_of({**CONFIGS["llama"], "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    assert words(spec, "attention") == name


def test_what_well_known_models_are_called() -> None:
    assert words(preset("llama-3-8b"), "attention") == "GQA 32/8"
    assert words(preset("falcon-7b"), "attention") == "MQA 71/1"
    assert words(preset("llama-3.1-8b"), "position") == "RoPE 500,000, llama3 ×8"
    assert words(preset("mixtral-8x7b"), "feed-forward") == "SwiGLU 14,336, 2 of 8 experts"
    assert words(preset("mistral-7b"), "window") == "4,096"
    assert words(preset("qwen2-7b"), "bias") == "q, k, v"
    assert words(preset("qwen3-8b"), "q/k norm") == "RMSNorm"
    assert words(preset("falcon-40b"), "block") == "parallel, two norms"
    assert words(preset("falcon-rw-1b"), "position") == "ALiBi, scaled"
    assert words(preset("gpt2"), "final norm") == "as in the layers"


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (LinearScaling(factor=4.0), "RoPE 10,000 on 4 dims, linear ×4"),
        (YarnScaling(factor=2.5, original_context=64, attention_factor=1.1), "RoPE 10,000 on 4 dims, YaRN ×2.5"),
        (
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64),
            "RoPE 10,000 on 4 dims, llama3 ×8",
        ),
        (
            LongRopeScaling(short_factor=(1.0, 1.5), long_factor=(1.0, 9.0), original_context=64, attention_factor=1.0),
            "RoPE 10,000 on 4 dims, LongRoPE",
        ),
    ],
)
def test_rotary_positions_with_their_scaling(scaling: Any, expected: str) -> None:
    position = Rotary(dim=4, base=1e4, scaling=scaling)
    spec = spec_of(CONFIGS["llama"])
    block = spec.blocks[0].replaced(attention=replace(spec.blocks[0].attention, position=position))
    found = told(replace(spec, blocks=(block,)))["position"]
    assert found.words == expected
    assert found.data["in_attention"]["scaling"]["kind"] in expected.lower()


def test_layers_that_differ_are_named() -> None:
    spec = preset("gpt2")
    found = told(in_layers(spec, windowed, range(4, 12)))["window"]
    assert found.words == "none in 0–3; 512 in 4–11"
    assert found.data == {"layers_differ": [{"layers": [[0, 3]], "value": None}, {"layers": [[4, 11]], "value": 512}]}
    assert (
        words(in_layers(spec, windowed, range(1, 12, 2)), "window")
        == "none in every 2nd from 0; 512 in every 2nd from 1"
    )
    assert words(in_layers(spec, windowed, range(5, 6)), "window") == "none in 0–4, 6–11; 512 in 5"
    irregular = in_layers(in_layers(spec, windowed, range(0, 12, 3)), windowed, range(10, 11))
    assert words(irregular, "window") == "512 in 5 layers; none in 7 layers"


def test_of_many_kinds_some_are_told_and_all_are_data() -> None:
    spec = spec_of(CONFIGS["gpt2-by-layer"])
    first = spec.blocks[0]
    scaled = (first.replaced(attention=replace(first.attention, scale=0.1 + layer)) for layer in range(7))
    many = replace(spec, blocks=tuple(scaled))
    found = told(many)["scale"]
    assert found.words.endswith("; 3 more kinds") and found.words.startswith("0.1 in 0; 1.1 in 1; ")
    assert len(found.data["layers_differ"]) == 7


def test_a_norm_at_the_end_of_its_own_is_told() -> None:
    spec = preset("gpt2")
    other = replace(spec, final_norm=RMSNorm(size=768, eps=1e-6))
    assert words(other, "final norm") == "RMSNorm, 1e-06"
    assert words(preset("bloom-7b1"), "embedding norm") == "LayerNorm"


def test_learned_positions_beside_those_in_attention() -> None:
    spec = preset("gpt2")
    both = in_layers(spec, lambda b: b.replaced(attention=replace(b.attention, position=ALiBi())), range(12))
    assert words(both, "position") == "learned 1,024; ALiBi"
