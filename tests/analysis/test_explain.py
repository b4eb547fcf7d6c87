"""A total as a formula: what it says is evaluated as anybody would, and is the total, for every tree there is."""

import re
from typing import Any

import pytest
from helpers.covering import examples, few
from helpers.family_specs import mixed_specs, preset_spec
from helpers.trees import TREES
from hypothesis import given, settings

from gptkit.analysis.explain import Explained, explain
from gptkit.analysis.parameters import count
from gptkit.architectures.presets import presets
from gptkit.components import ModelSpec
from gptkit.errors import MissingComponent
from gptkit.report.sheets import Terminal


def evaluated(formula: str, symbols: dict[str, int]) -> Any:
    """The value of a formula as it is written."""
    text = formula.replace("²", "**2").replace("³", "**3").replace("·", "*")
    text = re.sub(r"(?<![A-Za-z*\d])(\d+)(?=[A-Za-z])", r"\1*", text)  # 12d -> 12*d
    text = re.sub(r"([A-Z]\d*)\(", r"\1*(", text)
    return eval(text, {"__builtins__": {}}, dict(symbols))


def holds(spec: ModelSpec) -> Explained:
    """The explanation of a tree, each of its formulas worth what was counted."""
    found, counted = explain(spec), count(spec)
    symbols = {each.name: each.value for each in found.symbols}
    assert len(symbols) == len(found.symbols)
    assert found.total == counted.total == evaluated(found.formula, symbols)
    assert {each.label: each.value for each in found.terms} == {k: v for k, v in counted.by_component.items() if v}
    for each in found.terms:
        assert evaluated(each.formula, symbols) == each.value, each
    assert all(symbol.name in found.formula for symbol in found.symbols)
    return found


@few(60)
@pytest.mark.parametrize("name", presets())
def test_every_preset(name: str) -> None:
    spec = preset_spec(name)
    if spec.encoder is not None:
        with pytest.raises(MissingComponent, match="the formula for the parameter total needs a decoder-only model"):
            explain(spec)
        return
    holds(spec)


@settings(max_examples=examples(60), deadline=None)
@given(mixed_specs())
def test_trees_whose_layers_differ(spec: ModelSpec) -> None:
    holds(spec)


@pytest.mark.parametrize("name", TREES)
def test_trees_that_no_family_has(name: str) -> None:
    holds(TREES[name])


def test_a_terminal_without_the_letters() -> None:
    assert Terminal(80, ascii_only=True).clean("L(2d² + 2d·k) · 3d³") == "L(2d^2 + 2d*k) - 3d^3"


def test_what_the_formulas_say() -> None:
    assert holds(preset_spec("gpt2")).formula == "V·d + T·d + L(12d² + 13d) + 2d"
    assert holds(preset_spec("llama-3-8b")).formula == "2V·d + L(2d² + 2d·k + 3d·f + 2d) + d"
    mixtral = holds(preset_spec("mixtral-8x7b"))
    assert mixtral.formula == "2V·d + L(3E·d·f + 2d² + 2d·k + E·d + 2d) + d"
    assert mixtral.as_json()["symbols"]["E"] == {"value": 8, "meaning": "experts of a layer"}
    assert mixtral.as_json()["components"]["router"] == "L·E·d"
