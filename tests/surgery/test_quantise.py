"""Weights rounded to few bits."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import covered, exhaustive, rest_slow
from helpers.families import CONFIGS, DECODERS, Variant, save_hf, spec_of
from helpers.noisy import Noisy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gptkit
from gptkit.converter.dtypes import to_float64
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.base import Computed, Read
from gptkit.surgery.facts import Assumed
from gptkit.surgery.fits import rounding
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText
from gptkit.surgery.registry import Step, reshape
from gptkit.surgery.swaps import quantise as module
from gptkit.surgery.swaps.mlp import is_mixture

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


# --- on a text --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(2, 6), st.sampled_from([None, 4, 12]), st.booleans())
def test_a_weight_rounded_on_a_text_is_on_its_grid_and_nearer_there(
    seed: int, bits: int, size: int | None, dead: bool
) -> None:
    rng = np.random.default_rng(seed)
    weight, x = rng.normal(size=(40, 12)), rng.normal(size=(200, 12)) @ rng.normal(size=(12, 12))
    x[:, 3] *= not dead  # an input that is always 0
    grid = module.by_row(weight, bits) if size is None else module.by_group(weight, bits, size)
    found, nearest = rounding.gptq(weight, x.T @ x, grid), grid.nearest(weight)
    np.testing.assert_allclose(grid.nearest(found), found, atol=1e-9)
    error = [((x @ (each - weight).T) ** 2).sum() for each in (found, nearest)]
    assert error[0] < error[1] or np.array_equal(found, nearest)
    assert np.array_equal(found, rounding.gptq(weight.copy(), x.T @ x, grid))
    np.testing.assert_array_equal(rounding.gptq(weight, np.zeros((12, 12)), grid), nearest)
    if dead:
        np.testing.assert_allclose(found[:, 3], nearest[:, 3])


def test_errors_are_passed_on_across_blocks_as_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(6, 30)), rng.normal(size=(100, 30)) @ rng.normal(size=(30, 30))
    grid, found = module.by_group(weight, 3, 10), []
    for block in (1, 7, 30, 128):
        monkeypatch.setattr(rounding, "_BLOCK", block)
        found.append(rounding.gptq(weight, x.T @ x, grid))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-9)


@exhaustive
@pytest.mark.parametrize(
    ("sample", "value"),
    [
        ("gpt2", "int4:4"),
        ("gpt2", "int3"),
        ("llama", "int4"),
        ("llama", "int4:4"),
        ("bloom", "int3"),
        ("falcon", "int4"),
    ],
)
def test_rounding_on_a_text_is_better_than_to_nearest(sample: str, value: str, tmp_path: Path) -> None:
    """On text that it has not seen, and the same every time."""
    asked: dict[str, Any] = {"quantize": value, "calibrate_tokens": 2048}
    done = gptkit.swap(f"sample:{sample}", tmp_path / "out", **asked)
    assert done.measured is not None and done.naive is not None
    assert done.measured.kl_text is not None and done.naive.kl_text is not None
    assert done.measured.kl_text < 0.9 * done.naive.kl_text
    assert done.chain.swapped[0].summary["by"] == "GPTQ" and "with GPTQ" in "\n".join(done.chain.notes)
    gptkit.swap(f"sample:{sample}", tmp_path / "again", **asked, measured=False)
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert same[0] == same[1]


def test_without_a_text_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "model")
    done = gptkit.swap(tmp_path / "model", tmp_path / "out", quantize="int4:24", dtype="float64", measured=False)
    assert done.chain.notes == ("weights are rounded to nearest; with --calibrate FILE, they are rounded with GPTQ",)
    before, after = (gptkit.open_checkpoint(tmp_path / name) for name in ("model", "out"))
    name = "blocks.0.feed_forward.down_proj.weight"
    weight = to_float64(*before.tensor(name))
    np.testing.assert_array_equal(module.by_group(weight, 4, 24).nearest(weight), to_float64(*after.tensor(name)))


@covered()
@pytest.mark.parametrize("variant", rest_slow(DECODERS))
def test_every_linear_of_every_family_is_rounded_on_a_text(variant: Variant) -> None:
    """Each after those that run before it, on its own grid; what the text does not reach is rounded to nearest."""
    spec = spec_of(variant.config)
    model = Noisy(spec)
    ids = torch.randint(0, spec.vocab_size, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    text = Calibration(CalibrationText(tuple(ids), (), "random tokens", ""), spec)
    done = reshape(spec, Step("quantize", "int3"), Read(model), calibration=lambda: text, has_text=lambda: True)
    assert done.summary["by"] == "GPTQ" and done.summary["tensors"] == len(done.tensors)
    differs = 0
    for name, how in done.tensors.items():
        assert isinstance(how, Computed)
        if len(model.wide(name).shape) != 2:
            continue  # weights beside one another, which are rounded to nearest
        found, grid = how.make(model), module.by_row(model.wide(name), 3)
        np.testing.assert_allclose(grid.nearest(found), found, atol=1e-9)
        differs += not np.allclose(found, grid.nearest(model.wide(name)))
    assert differs > len(done.tensors) / 2 or any(is_mixture(block) for block in spec.blocks)


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
    with pytest.raises(SwapRefused, match="at most 16 bits"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="int17")
    with pytest.raises(UsageError, match="at least 2"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="int1")
    with pytest.raises(UsageError, match="unknown"):
        gptkit.swap("sample:llama", tmp_path / "out", quantize="fp8")
