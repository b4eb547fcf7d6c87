"""The width of a feed-forward: exact where units are added, or say nothing; fitted on a text otherwise."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import covering
from helpers.covering import exhaustive, few
from helpers.exactness import MODELS, caught, exactly, same_values, saved
from helpers.inverses import inverse
from hypothesis import given
from hypothesis import strategies as st

import gptkit
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.fits import pruning
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import width as module

RIDGE = 1e-6


@few(1)
@pytest.mark.parametrize("name", MODELS)
def test_wider_keeps_every_bit_and_back(name: str, folder: Path, tmp_path: Path) -> None:
    source = saved(name, folder)
    old = gptkit.open_checkpoint(source).spec.blocks[0].feed_forward.intermediate_size
    result = exactly(source, tmp_path / "wide", intermediate=str(2 * old + 7))
    assert result.spec.blocks[0].feed_forward.intermediate_size == 2 * old + 7
    exactly(tmp_path / "wide", tmp_path / "back", intermediate=str(old))
    assert same_values(source, tmp_path / "back")


def test_some_layers_alone(folder: Path, tmp_path: Path) -> None:
    spec = exactly(saved("llama", folder), tmp_path / "out", intermediate="80", blocks="1-").spec
    assert [block.feed_forward.intermediate_size for block in spec.blocks] == [72, 80, 80]


@pytest.mark.exhaustive
def test_units_that_say_nothing_go_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(80)
    with pytest.MonkeyPatch.context() as patch:
        right = module.padded
        patch.setattr(module, "padded", lambda old, new, repeat=False: right(old, new, repeat)[order])
        exactly(saved("llama", folder), tmp_path / "mixed", intermediate="80")
    exactly(tmp_path / "mixed", tmp_path / "out", intermediate="72")
    exactly(tmp_path / "mixed", tmp_path / "some", intermediate="75")


@given(seed=st.integers(0, 1000), kept=st.integers(1, 7), bias=st.booleans())
def test_the_refit_is_the_least_squares(seed: int, kept: int, bias: bool) -> None:
    rng = np.random.default_rng(seed)
    a, old = rng.normal(size=(60, 8)) @ rng.normal(size=(8, 8)), rng.normal(size=(3, 8))
    if bias:
        a[:, -1] = 1
    moments, index = a.T @ a / len(a), np.sort(rng.permutation(8)[:kept])
    found = pruning.refit(old, moments, index, RIDGE)
    best = np.linalg.lstsq(a[:, index], a @ old.T, rcond=None)[0].T
    error = [((a[:, index] @ each.T - a @ old.T) ** 2).sum() for each in (found, best, old[:, index])]
    # With a ridge of λ that draws to W, the error is above the least by n·Σ λ² g / (g + λ)² · d², in the directions of
    # the Gram matrix, g its eigenvalues and d how far W is from the best: by less than n·|d|²·min(λ / 4, λ² / g).
    gram = moments[np.ix_(index, index)]
    ridge = (pruning.with_ridge(moments, index, RIDGE) - gram)[0, 0]
    above = len(a) * ((best - old[:, index]) ** 2).sum() * min(ridge / 4, ridge**2 / np.linalg.eigvalsh(gram)[0])
    assert error[0] <= error[1] + above * (1 + 1e-6) + 1e-9 and error[0] <= error[2] + 1e-9


def test_units_that_others_make_up_for_go_first() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200, 6))
    a = np.concatenate([a, a[:, :2] + a[:, 2:4]], axis=1)  # two that the others can be added up to
    old = rng.normal(size=(5, 8)) * 10
    moments = a.T @ a / len(a)
    index = pruning.least_needed(old, moments, 8, 6, RIDGE)
    error = a[:, index] @ pruning.refit(old, moments, index, RIDGE).T - a @ old.T
    assert np.abs(error).max() < 1e-3


@exhaustive
@pytest.mark.skipif(not (SAMPLES_DIR / "gpt2").is_dir(), reason="no samples")
@pytest.mark.parametrize("sample", ["gpt2", "llama"])
def test_fitted_on_a_text_it_costs_less(sample: str, tmp_path: Path) -> None:
    found = {}
    for naive in (False, True):
        out = tmp_path / str(naive)
        done = gptkit.swap(f"sample:{sample}", out, intermediate="224", approximate=naive, calibrate_tokens=2048)
        assert done.guarantee == "approximate" and done.measured is not None and done.measured.kl_text is not None
        found[naive] = done.measured.kl_text
    assert found[False] < found[True] / 3


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SwapRefused, match="the width of these feed-forwards is 72 already"):
        gptkit.swap(saved("llama", folder), tmp_path / "out", intermediate="72")
    with pytest.raises((SwapRefused, UsageError), match="text"):
        gptkit.swap(saved("mixtral", folder), tmp_path / "out", intermediate="40")
    done = gptkit.swap(saved("mixtral", folder), tmp_path / "out", intermediate="40", approximate=True)
    assert done.guarantee == "approximate"


def columns_repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "padded", lambda old, new, repeat=False: np.arange(new) % old)


def wrong_axis(patch: pytest.MonkeyPatch) -> None:
    right = module.taken

    def turned(name: str, index: np.ndarray, axis: int = 0) -> object:
        return right(name, index[np.r_[1, 0, 2 : len(index)]] if axis else index, axis)

    patch.setattr(module, "taken", turned)


def all_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_dead", lambda model, inner: np.ones(inner.record.intermediate_size, dtype=bool))


@pytest.mark.parametrize("mutate", [columns_repeat, wrong_axis, all_dead])
def test_a_wrong_formula_is_not_published(
    mutate: Callable[[pytest.MonkeyPatch], None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("gpt2", "llama", "mixtral")
    sources = [saved(name, folder) for name in (models[:1] if covering.quick else models)]
    mutate(monkeypatch)
    for source in sources:
        caught(source, tmp_path / "out", intermediate="60" if mutate is all_dead else "300")


def test_a_step_undoes_it(folder: Path) -> None:
    spec = gptkit.open_checkpoint(saved("llama", folder)).spec
    assert inverse(Step("intermediate", "90"), spec) == Step("intermediate", "72")
    assert inverse(Step("intermediate", "60"), spec) is None
