"""Tensors folded where layers and experts are alike: every one is in a group once, and the sums are the tree's."""

import re
from collections import Counter

import msgspec
import pytest
from helpers.family_specs import family_specs, mixed_specs
from helpers.family_specs import preset_spec as spec_of
from hypothesis import given

from gptkit.analysis.parameters import count
from gptkit.analysis.tensors import TensorGroup, tensor_groups
from gptkit.components import ModelSpec


def unfolded(group: TensorGroup) -> list[str]:
    """The names that a folded one stands for, where it lists all of its ranges."""
    names = [""]
    for part in re.split(r"(\{[^}]*\})", group.name):
        choices = [part]
        if part.startswith("{"):
            ends = [each.split("–") for each in part[1:-1].split(",")]
            choices = [str(index) for each in ends for index in range(int(each[0]), int(each[-1]) + 1)]
        names = [name + choice for name in names for choice in choices]
    return names


@given(family_specs() | mixed_specs())
def test_groups_hold_every_tensor_once(spec: ModelSpec) -> None:
    groups, found = tensor_groups(spec), count(spec)
    assert sum(group.parameters for group in groups) == found.total
    assert sum(group.number for group in groups) == len(list(spec.parameters()))
    sums: Counter[str] = Counter()
    for group in groups:
        sums[group.component] += group.parameters
    assert sums == found.by_component
    told = [group for group in groups if "…" not in group.name]
    shapes = {each.name: each.shape for each in spec.parameters()}
    for group in told:
        names = unfolded(group)
        assert len(names) == group.number
        assert {shapes.pop(name) for name in names} == {group.shape}
    if told == groups:
        assert not shapes


def test_layers_and_experts_are_folded() -> None:
    groups = {group.name: group for group in tensor_groups(spec_of("mixtral-8x7b"))}
    gate = groups["blocks.{0–31}.feed_forward.experts.{0–7}.gate_proj.weight"]
    assert (gate.number, gate.shape, gate.parameters) == (256, (14336, 4096), 256 * 14336 * 4096)
    assert groups["blocks.{0–31}.feed_forward.router.weight"].number == 32
    assert groups["head.weight"].number == 1
    assert len(groups) == 13


@pytest.mark.parametrize(
    ("wide", "name"),
    [
        ([3], "blocks.3."),
        ([0, 1, 2, 3], "blocks.{0–3}."),
        ([0, 1, 5], "blocks.{0–1,5}."),
        ([0, 2, 4, 6], "blocks.{0,2,4,6}."),
        ([0, 2, 4, 6, 8], "blocks.{0,2,…,8}."),
    ],
)
def test_layers_that_differ_are_told_apart(wide: list[int], name: str) -> None:
    spec = spec_of("gpt2")
    other = spec.blocks[0].replaced(
        feed_forward=msgspec.structs.replace(spec.blocks[0].feed_forward, intermediate_size=4096)
    )
    blocks = tuple(other if index in wide else block for index, block in enumerate(spec.blocks))
    groups = tensor_groups(msgspec.structs.replace(spec, blocks=blocks))
    (found,) = [group for group in groups if group.shape == (4096, 768)]
    assert found.name == f"{name}feed_forward.up_proj.weight"
    assert found.number == len(wide)
    assert any(group.name == "blocks.{0–11}.attention.q_proj.weight" for group in groups)  # what is alike stays folded
