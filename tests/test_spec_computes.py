"""Any value anywhere in a tree's JSON is refused by name, or the tree computes: forward, padded, and from a cache."""

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from helpers.command import call
from helpers.covering import examples, few
from helpers.edited import setting, with_spec
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.full_spec import full
from helpers.trees import TREES, filled, random_weights
from test_spec import at, paths

import gptkit
from gptkit.analysis.activations import Kernel
from gptkit.components import KINDS, ModelSpec, from_json
from gptkit.errors import ConfigError
from gptkit.modules import Cache, Decoder
from gptkit.modules.context import Encoded

Place = tuple[Any, ...]

LARGEST = 200_000
"""Parameters of a tree that is run."""
TOKENS = 48
"""More than the original contexts of the scaled ones."""


def trees() -> dict[str, str]:
    """One layer of every tree as JSON text."""
    specs = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}
    return {
        name: json.dumps(full(msgspec.structs.replace(spec, blocks=spec.blocks[:1]))) for name, spec in specs.items()
    }


TEXTS = trees()


def literals(schema: Any) -> set[str]:
    """Every string that some field allows."""
    items = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own = schema.get("enum", []) if isinstance(schema, dict) else []
    return {each for each in own if isinstance(each, str)} | {each for item in items for each in literals(item)}


def records() -> list[Any]:
    """Two records of each kind, to be put in each other's places."""
    found: dict[str, dict[str, Any]] = {}
    for text in TEXTS.values():
        tree = json.loads(text)
        for place in paths(tree):
            node = at(tree, ".".join(map(str, place)))
            if isinstance(node, dict):
                found.setdefault(node["type"], {})[json.dumps(node)] = node
    return [record for kind in found.values() for record in list(kind.values())[:2]]


NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    16,
    2**31 - 1,
    5e-324,
    1e-30,
    1e-9,
    0.5,
    1.0,
    1.5,
    1e9,
    3e38,
    1e39,
    1.7976931348623157e308,
)
OURS = [kind for kind in KINDS.values() if kind.__module__.startswith("gptkit.")]  # and not those of other tests
SCHEMAS = msgspec.json.schema_components(OURS, schema_hook=lambda kind: {"type": "object"})
VALUES = [*sorted(literals(list(SCHEMAS))), True, False, None, *NUMBERS, *records()]


def edited(text: str, place: Place, value: Any) -> Any:
    data = json.loads(text)
    node = data
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = value
    return data


def encoded_by(model: Decoder, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Encoded | None:
    """The source that a model with an encoder reads: the same tokens."""
    if model.encoder is None:
        return None
    source = model.encoder.spec
    most = ids.shape[1] if source.positions is None else source.positions.length
    return model.encode(ids[:, :most] % source.vocab_size, None if mask is None else mask[:, :most])


def run(spec: ModelSpec) -> None:
    """A forward pass over more than the original context, one with padding, and of what predicts the next token one
    token from a cache.
    """
    length = min(TOKENS, spec.positions.length if spec.positions is not None else TOKENS)
    ids = torch.arange(2 * length).reshape(2, length) % spec.vocab_size
    mask = torch.ones_like(ids)
    mask[0, : length // 2] = 0
    weights = {name: tensor.float() for name, tensor in random_weights(spec).items()}
    for kernel in get_args(Kernel):
        model = filled(spec, weights, torch.float32, kernel)
        with torch.inference_mode():
            width = spec.hidden_size if spec.head is None else spec.vocab_size
            read = functools.partial(model, encoded=encoded_by(model, ids))
            assert read(ids).shape == (2, length, width)
            model(ids, mask, encoded=encoded_by(model, ids, mask))
            if length > 1 and spec.causal and spec.head is not None:
                cache = Cache(spec)
                read(ids[:, :-1], cache=cache)
                read(ids[:, -1:], cache=cache)


def outcome(name: str, place: Place, value: Any) -> bool:
    """Whether a tree with this value is one; it then has run."""
    try:
        spec = from_json(edited(TEXTS[name], place, value))
    except ConfigError:
        return False
    if sum(parameter.count for parameter in spec.parameters()) <= LARGEST:
        run(spec)
    return True


def cases() -> Iterator[tuple[str, Place, Any]]:
    for name, text in TEXTS.items():
        for place in paths(json.loads(text)):
            for value in VALUES:
                yield name, place, value


def test_values_of_all_kinds_in_all_places_of_all_trees() -> None:
    drawn = random.Random(0).sample(list(cases()), examples(3000))
    taken = sum(outcome(*case) for case in drawn)
    assert len(drawn) / 100 < taken < len(drawn) / 3


@pytest.mark.slow
def test_every_value_in_every_place_of_every_tree() -> None:
    seen: set[ModelSpec] = set()
    for name, place, value in cases():
        try:
            spec = from_json(edited(TEXTS[name], place, value))
        except ConfigError:
            continue
        if spec not in seen and sum(parameter.count for parameter in spec.parameters()) <= LARGEST:
            run(spec)
        seen.add(spec)
    assert len(seen) > 5000


ATTENTION = ("blocks", 0, "attention")
ROTARY = (*ATTENTION, "position")
REFUSED = [
    (
        "llama",
        (*ATTENTION, "kv_expansion"),
        "broadcast",
        "kv_expansion: broadcast needs kv_heads: 1, but kv_heads is 2",
    ),
    ("falcon-7b", (*ATTENTION, "kv_heads"), 3, "kv_expansion: broadcast needs kv_heads: 1, but kv_heads is 3"),
    ("falcon-7b", (*ATTENTION, "scores"), "float32", "kv_expansion: broadcast supports neither"),
    ("falcon-7b", ROTARY, {"type": "ALiBi"}, "kv_expansion: broadcast supports neither"),
    ("gpt2-upcast", (*ATTENTION, "scale"), 1e39, "scale"),
    ("llama-yarn", (*ROTARY, "base"), 1.0, "RoPE base other than 1"),
    ("llama-yarn", (*ROTARY, "scaling", "beta_fast"), 1e308, "beta_fast"),
    ("llama-yarn", (*ROTARY, "scaling", "beta_slow"), 5e-324, "beta_slow"),
    ("llama-dynamic", (*ROTARY, "dim"), 2, "more than 2 rotary dimensions"),
    ("gpt2", ("embedding", "shared"), True, "shared: true, which is only for the embedding of an encoder"),
    ("bert", ("embedding", "shared"), True, "shared: true, which is only for the embedding of an encoder"),
    (
        "gemma3n_text",
        ("layer_inputs", "table", "shared"),
        True,
        "shared: true, which is only for the embedding of an encoder",
    ),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), REFUSED, ids=str)
def test_what_cannot_be_computed_is_refused_by_name(name: str, place: Place, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(edited(TEXTS[name], place, value))


def test_the_command_says_so(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    bad = with_spec(tmp_path / "local", tmp_path / "bad", setting(kv_expansion="broadcast"))
    for arguments in (["verify", str(tmp_path / "hf"), str(bad)], ["load", str(bad)], ["params", str(bad)]):
        run = call(*arguments)
        assert run.exit_code == 4
        assert "gptkit.json: kv_expansion: broadcast needs kv_heads: 1, but kv_heads is 2" in run.stderr


@few(12)
@pytest.mark.parametrize("value", [None, 0, True, [], {}, "int8", "float128", "F32", 1e308])
@pytest.mark.parametrize("field", ["dtype", "origin", "history", "schema_version", "gptkit"])
def test_what_else_gptkit_json_holds(field: str, value: Any, tmp_path: Path) -> None:
    gptkit.convert("sample:llama", tmp_path / "local")
    path = tmp_path / "local" / "gptkit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    run = call("load", str(tmp_path / "local"))
    assert run.exit_code in (0, 4)
    assert "bug" not in run.stderr and len(run.stderr.strip().splitlines()) <= 2
