"""ModelSpec: JSON there and back, what is refused, how trees differ, and parameters by name."""

import copy
import json
import math
from typing import Any

import msgspec
import pytest
from helpers.covering import examples
from helpers.families import CONFIGS, VARIANTS, spec_of
from helpers.full_spec import full
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.components import (
    ALiBi,
    Attention,
    Block,
    DynamicScaling,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    LinearScaling,
    LongRopeScaling,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
    differences,
    from_json,
    to_json,
)
from gptkit.errors import ConfigError

variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def example() -> dict[str, Any]:
    """A tree as JSON, to be damaged."""
    return json.loads(json.dumps(full(spec_of(CONFIGS["llama-longrope"]))))


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return tree


# --- JSON ------------------------------------------------------------------------------------------------------------


@variants
def test_json_there_and_back(variant):
    spec = spec_of(variant.config)
    text = json.dumps(to_json(spec), allow_nan=False)
    back = from_json(json.loads(text))
    assert back == spec
    assert differences(spec, back) == []
    assert hash(back) == hash(spec)
    assert json.dumps(to_json(back)) == text


def test_only_what_is_not_as_by_default_is_written():
    """A gptkit that is older than a field reads every file that does without it."""
    spec = spec_of(CONFIGS["qwen3-windowed"])
    attention = msgspec.structs.replace(spec.blocks[0].attention, softmax="".join(("float", "32")))  # an equal object
    written = to_json(msgspec.structs.replace(spec, blocks=(spec.blocks[0].replaced(attention=attention),)))
    assert written["blocks"][0]["attention"].keys() >= {"type", "heads", "q_norm", "position"}
    assert "softmax" not in written["blocks"][0]["attention"]
    assert "parallel" not in written["blocks"][0]
    assert list(written["blocks"][0]) == ["type", "attention", "attention_norm", "feed_forward", "feed_forward_norm"]


def test_a_tree_in_which_every_default_is_written_reads_as_the_same():
    """As older versions of gptkit wrote them."""

    for variant in VARIANTS:
        spec = spec_of(variant.config)
        assert from_json(full(spec)) == spec


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("embedding.vocab_size", 0),
        ("embedding.vocab_size", -1),
        ("embedding.vocab_size", 2**31),
        ("embedding.vocab_size", 10**30),
        ("embedding.vocab_size", 9.5),
        ("embedding.vocab_size", "97"),
        ("embedding.vocab_size", None),
        ("embedding.vocab_size", True),
        ("embedding.hidden_size", 49),
        ("embedding", None),
        ("embedding.type", "Embeddings"),
        ("embedding.type", None),
        ("blocks", []),
        ("blocks", {}),
        ("blocks.0", None),
        ("blocks.0.parallel", "yes"),
        ("blocks.0.residual", "both"),
        ("blocks.0.attention_norm.eps", 0.0),
        ("blocks.0.attention_norm.eps", -1e-5),
        ("blocks.0.attention_norm.eps", math.nan),
        ("blocks.0.attention_norm.eps", math.inf),
        ("blocks.0.attention_norm.size", 40),
        ("blocks.0.attention_norm.type", "ALiBi"),
        ("blocks.0.attention.kv_heads", 5),
        ("blocks.0.attention.kv_heads", 12),
        ("blocks.0.attention.hidden_size", 96),
        ("blocks.0.attention.window", 0),
        ("blocks.0.attention.scale", math.nan),
        ("blocks.0.attention.scale", math.inf),
        ("blocks.0.attention.arithmetic", "exact"),
        ("blocks.0.attention.position.dim", 7),
        ("blocks.0.attention.position.dim", 10),
        ("blocks.0.attention.position.base", math.inf),
        ("blocks.0.attention.position.type", "LayerNorm"),
        ("blocks.0.attention.position.scaling.short_factor", [1.0]),
        ("blocks.0.attention.position.scaling.short_factor", [1.0, 1.0, 1.0, -1.0]),
        ("blocks.0.attention.position.scaling.short_factor", [1.0, 1.0, 1.0, math.nan]),
        ("blocks.0.attention.q_norm", {"type": "RMSNorm", "size": 9, "eps": 1e-6}),
        ("blocks.0.feed_forward.activation", "swoosh"),
        ("head.vocab_size", 98),
        ("head.hidden_size", 47),
        ("context_length", 0),
        ("type", "Block"),
    ],
)
def test_a_wrong_value_is_refused(path, value):
    data = example()
    parent, _, leaf = path.rpartition(".")
    node = at(data, parent) if parent else data
    node[int(leaf) if leaf.isdigit() else leaf] = value
    with pytest.raises(ConfigError):
        from_json(data)


@pytest.mark.parametrize("path", ["embedding", "blocks.0.attention", "blocks.0.attention.position", "head"])
def test_an_unknown_field_is_refused(path):
    data = example()
    at(data, path)["softcap"] = 30.0
    with pytest.raises(ConfigError, match="softcap"):
        from_json(data)


@pytest.mark.parametrize(
    "path", ["embedding.vocab_size", "blocks", "head", "blocks.0.attention.scale", "final_norm.eps"]
)
def test_a_missing_field_is_refused(path):
    data = example()
    parent, _, leaf = path.rpartition(".")
    del (at(data, parent) if parent else data)[leaf]
    with pytest.raises(ConfigError, match=leaf):
        from_json(data)


@pytest.mark.parametrize("data", [None, [], {}, "", 7, [[]], {"type": "ModelSpec"}, {"type": []}])
def test_what_is_no_tree_at_all_is_refused(data):
    with pytest.raises(ConfigError):
        from_json(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [(*prefix, key) for key, _ in items] + [p for key, value in items for p in paths(value, (*prefix, key))]


PLACES = paths(example())


@settings(max_examples=examples(500), deadline=None)
@given(place=st.sampled_from(PLACES), value=json_values)
def test_any_value_anywhere_is_a_tree_or_a_config_error(place, value):
    data = example()
    node = data
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = value
    try:
        spec = from_json(data)
    except ConfigError:
        return
    assert from_json(json.loads(json.dumps(to_json(spec), allow_nan=False))) == spec


# --- what a component refuses when it is made ------------------------------------------------------------------------

NORM = LayerNorm(size=8, eps=1e-5)
ATTENTION = Attention(hidden_size=8, heads=2, kv_heads=1, head_dim=4, scale=0.5)
FEED_FORWARD = FeedForward(hidden_size=8, intermediate_size=16, activation="gelu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(dim=7, base=1e4), "even"),
        (
            lambda: Rotary(
                dim=8,
                base=1e4,
                scaling=LongRopeScaling(
                    short_factor=(1.0,), long_factor=(1.0,) * 4, original_context=8, attention_factor=1.0
                ),
            ),
            "short_factor has 1",
        ),
        (lambda: msgspec.structs.replace(ATTENTION, kv_heads=3), "not divisible by"),
        (lambda: msgspec.structs.replace(ATTENTION, position=Rotary(dim=8, base=1e4)), "is larger than"),
        (lambda: msgspec.structs.replace(ATTENTION, q_norm=RMSNorm(size=6, eps=1e-6)), "norm of queries or keys"),
        (lambda: Block(sublayers=()), "at least one sub-layer"),
        (lambda: Block(sublayers=(SubLayer(mixer=ATTENTION), SubLayer(mixer=ATTENTION))), "at most one of each kind"),
        (
            lambda: Block(
                sublayers=(SubLayer(mixer=ATTENTION, norm=NORM), SubLayer(mixer=FEED_FORWARD)),
                parallel=True,
                residual="normed",
            ),
            "parallel",
        ),
        (lambda: msgspec.structs.replace(spec_of(CONFIGS["gpt2"]), blocks=()), "at least one layer"),
        (lambda: msgspec.structs.replace(spec_of(CONFIGS["gpt2"]), final_norm=NORM), "final_norm has hidden size 8"),
    ],
)
def test_a_component_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_trees_are_frozen():
    spec = spec_of(CONFIGS["gpt2"])
    with pytest.raises(AttributeError):
        spec.context_length = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        spec.blocks[0].attention.heads = 5  # type: ignore[misc]


# --- differences -----------------------------------------------------------------------------------------------------


@variants
def test_a_tree_does_not_differ_from_itself(variant):
    assert differences(spec_of(variant.config), spec_of(copy.deepcopy(variant.config))) == []


def test_differences_name_the_path_and_both_sides():
    a = spec_of(CONFIGS["mistral"])
    blocks = list(a.blocks)
    attention = msgspec.structs.replace(blocks[1].attention, window=None, scale=0.5)
    blocks[1] = blocks[1].replaced(attention=attention)
    b = msgspec.structs.replace(a, blocks=tuple(blocks), context_length=7)
    assert differences(a, b) == [
        ("blocks.1.attention.scale", a.blocks[1].attention.scale, 0.5),
        ("blocks.1.attention.window", 16, None),
        ("context_length", 256, 7),
    ]
    assert [(path, y, x) for path, x, y in differences(a, b)] == differences(b, a)


def test_a_node_of_another_type_differs_as_a_whole():
    found = differences(spec_of(CONFIGS["llama-2"]), spec_of(CONFIGS["gpt2"]))
    by_path = {path: (type(a), type(b)) for path, a, b in found}
    assert by_path["final_norm"] == (RMSNorm, LayerNorm)
    assert by_path["blocks"] == (str, str)  # 2 entries, 3 entries
    one, other = (spec_of(CONFIGS[name]).blocks[0] for name in ("llama-2", "bloom"))
    by_path = {path: (type(a), type(b)) for path, a, b in differences(one, other)}
    assert by_path["attention.position"] == (Rotary, ALiBi)
    assert by_path["feed_forward"] == (GatedFeedForward, FeedForward)
    assert not any(path.startswith("feed_forward.") for path in by_path)


def test_scalings_of_the_same_numbers_differ():
    linear = Rotary(dim=8, base=1e4, scaling=LinearScaling(factor=2.0))
    dynamic = Rotary(dim=8, base=1e4, scaling=DynamicScaling(factor=2.0, original_context=8))
    ((path, _, _),) = differences(linear, dynamic)
    assert path == "scaling"


# --- parameters ------------------------------------------------------------------------------------------------------


@variants
def test_parameter_names_are_unique_and_in_the_nodes_order(variant):
    spec = spec_of(variant.config)
    parameters = list(spec.parameters())
    names = [parameter.name for parameter in parameters]
    assert len(set(names)) == len(names)
    nodes = [path for path, _ in spec.nodes()]
    assert len(set(nodes)) == len(nodes)
    owners = [max((p for p in nodes if name.startswith(f"{p}.")), key=len) for name in names]
    assert owners == sorted(owners, key=nodes.index)


@variants
def test_parameters_know_their_layer(variant):
    spec = spec_of(variant.config)
    for parameter in spec.parameters():
        parts = parameter.name.split(".")
        assert parameter.layer == (int(parts[1]) if parts[0] == "blocks" else None)
        assert parameter.count == math.prod(parameter.shape) > 0
    assert {p.layer for p in spec.parameters()} == {None, *range(len(spec.blocks))}


def test_a_tied_head_is_counted_once():
    tied, untied = (spec_of({**CONFIGS["llama-2"], "tie_word_embeddings": tie}) for tie in (True, False))
    extra = {p.name for p in untied.parameters()} - {p.name for p in tied.parameters()}
    assert extra == {"head.weight"}


def test_component_labels_cover_every_parameter():
    labels = {p.component for v in VARIANTS for p in spec_of(v.config).parameters()}
    others = {"embedding", "positions", "attention", "router", "feed-forward", "layer inputs", "norms", "head"}
    others |= {"pooler", "streams", "low rank", "recurrence", "convolution", "cross-attention", "shared block"}
    others |= {"encoder embedding", "encoder attention", "encoder feed-forward", "encoder norms", "encoder positions"}
    assert labels == others


def test_gpt2_has_its_known_size():
    """124,439,808 parameters, as published."""
    from gptkit.architectures import ARCHITECTURES

    spec: ModelSpec = ARCHITECTURES["gpt2"].spec({"model_type": "gpt2"})
    assert sum(parameter.count for parameter in spec.parameters()) == 124_439_808
