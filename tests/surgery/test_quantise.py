"""Weights rounded to few bits."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.families import CONFIGS, save_hf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gptkit
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.facts import Assumed
from gptkit.surgery.registry import Step, reshape
from gptkit.surgery.swaps import quantise as module

weights = hnp.arrays(np.float64, (3, 8), elements=st.floats(-100, 100, width=32))


@given(weights, st.integers(2, 8))
def test_a_row_keeps_its_largest_and_errs_by_half_a_step(weight: np.ndarray, bits: int) -> None:
    rounded = module.by_row(weight, bits).nearest(weight)
    step = np.abs(weight).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(rounded - weight) <= step / 2 * (1 + 1e-9)).all()
    assert all(len(np.unique(row)) <= 2**bits - 1 for row in rounded)
    np.testing.assert_allclose(np.abs(rounded).max(axis=1), np.abs(weight).max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(module.by_row(rounded, bits).nearest(rounded), rounded, atol=1e-9)


@given(weights, st.integers(2, 8), st.sampled_from([2, 4, 8]))
def test_a_group_keeps_its_ends(weight: np.ndarray, bits: int, size: int) -> None:
    rounded = module.by_group(weight, bits, size).nearest(weight)
    groups, found = (each.reshape(3, -1, size) for each in (weight, rounded))
    step = (groups.max(axis=2, keepdims=True) - groups.min(axis=2, keepdims=True)) / (2**bits - 1)
    assert (np.abs(found - groups) <= step / 2 * (1 + 1e-9) + 1e-12).all()
    np.testing.assert_allclose(found.min(axis=2), groups.min(axis=2), atol=1e-12)
    np.testing.assert_allclose(found.max(axis=2), groups.max(axis=2), rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
def test_fewer_bits_cost_more_and_the_rest_stays(tmp_path: Path) -> None:
    found = {}
    for value in ("int8", "int4:16", "int3"):
        out = tmp_path / value.replace(":", "-")
        done = gptkit.swap("sample:llama", out, quantize=value, calibrate_tokens=2048)
        assert done.guarantee == "approximate" and done.measured is not None
        found[value] = done.measured.kl_text
    assert found["int8"] < 0.01 < found["int3"] and found["int8"] < found["int4:16"] < found["int3"]
    before, after = gptkit.load("sample:llama"), gptkit.load(tmp_path / "int8")
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]) != name.endswith("_proj.weight")
    some = gptkit.swap("sample:llama", tmp_path / "some", quantize="int8", blocks="1", measured=False)
    assert some.chain.swapped[0].summary["tensors"] == 7


def test_kernels_of_convolutions_stay(tmp_path: Path) -> None:
    """A row of four numbers a channel is no linear map, and has no groups."""
    save_hf(CONFIGS["lfm2"], tmp_path / "model")
    gptkit.swap(tmp_path / "model", tmp_path / "out", quantize="int4:16", measured=False)
    before, after = gptkit.load(tmp_path / "model").state_dict(), gptkit.load(tmp_path / "out").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("blocks.") and name.endswith("_proj.weight")}


def test_every_group_size_that_a_refusal_names_is_accepted(tmp_path: Path) -> None:
    """Also where weights have inputs of different sizes: 96 and 256 of llama, 64 and 172 of a model like it."""
    spec = gptkit.open_checkpoint("sample:llama").spec
    narrow = gptkit.swap("sample:llama", tmp_path / "narrow", intermediate="172", approximate=True, measured=False).spec
    for tree in (spec, narrow):
        with pytest.raises(SwapRefused) as caught:
            reshape(tree, Step("quantize", "int4:36"), Assumed())
        named = re.findall(r"int4:\d+", str(caught.value.hint))
        assert named
        for value in named:
            reshape(tree, Step("quantize", value), Assumed())


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(SwapRefused, match="which cannot be divided into groups of 36") as caught:
        gptkit.swap("sample:llama", tmp_path / "out", quantize="int4:36")
    assert "int4:16" in str(caught.value.hint)
    with pytest.raises(SwapRefused, match="17 bits"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="int17")
    with pytest.raises(UsageError, match="from 2"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="int1")
    with pytest.raises(UsageError, match="unknown"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="fp8")
