"""Constants that move into weights: exact on every family, and a wrong fold is not published."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.covering import few
from helpers.exactness import Mutation, exactly, is_caught
from helpers.families import CONFIGS, save_hf, spec_of
from helpers.inverses import inverse

import gptkit
from gptkit.components import Attention, without_rounding
from gptkit.errors import SwapRefused
from gptkit.surgery.base import Filled
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import folds as module
from gptkit.surgery.swaps import norm as norm_swaps
from gptkit.surgery.swaps.basis import Compute

ALL = ["gpt2", "gpt2-by-layer", "llama", "qwen2", "qwen3", "bloom", "falcon-7b", "falcon-40b", "falcon-rw"]


@few(1)
@pytest.mark.parametrize("name", ALL)
def test_norms(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    done = exactly(tmp_path / "hf", tmp_path / "out", fold="norm")
    assert not done.spec.head.tied
    model = gptkit.load(tmp_path / "out", torch.float64)
    for norm in (model.final_norm, model.blocks[0].attention_norm, model.blocks[-1].attention_norm):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert getattr(norm, "bias", None) is None
    some = exactly(tmp_path / "hf", tmp_path / "some", fold="norm", blocks="1")
    assert some.spec.head == spec_of(CONFIGS[name]).head


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bloom", "falcon-rw"])
def test_the_bias_of_values(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    exactly(tmp_path / "hf", tmp_path / "out", fold="value-bias")
    model = gptkit.load(tmp_path / "out", torch.float64)
    assert all(not block.attention.v_proj.bias.any() and block.attention.o_proj.bias.any() for block in model.blocks)
    with pytest.raises(SwapRefused, match="no layer has a value bias"):
        gptkit.swap(tmp_path / "out", tmp_path / "again", fold="value-bias")


@few(1)
@pytest.mark.parametrize("name", [*ALL, "gpt2-unscaled"])
def test_the_scale_and_back(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    spec = spec_of(CONFIGS[name])
    attentions = [block.attention for block in spec.blocks if isinstance(block.attention, Attention)]
    if name == "falcon-rw":  # its ALiBi bias is scaled with the scores
        with pytest.raises(SwapRefused, match="multiplies its ALiBi bias by the scale too"):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", fold="scale")
        return
    if all(each.scale == 1 for each in attentions):
        with pytest.raises(SwapRefused, match="already has the attention scale"):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", fold="scale")
    else:
        done = exactly(tmp_path / "hf", tmp_path / "out", fold="scale")
        assert all(isinstance(b.attention, Attention) and b.attention.scale == 1 for b in done.spec.blocks)
    back = inverse(Step("fold", "scale"), spec)
    assert (back is None) == (name in ("gpt2-by-layer", "gpt2-unscaled"))
    if back is not None:
        exactly(tmp_path / "out", tmp_path / "back", back)
        assert without_rounding(gptkit.open_checkpoint(tmp_path / "back").spec) == without_rounding(spec)
    if name in ("gpt2-by-layer", "gpt2-unscaled"):  # what other families then have
        exactly(tmp_path / "hf", tmp_path / "head", fold="scale:head")


def test_a_bias_of_values_is_one_of_outputs() -> None:
    """Two key-value heads of two elements, each for two query heads: attention weights sum to one."""
    rng = np.random.default_rng(0)
    output, bias = rng.normal(size=(5, 8)), rng.normal(size=4)
    mixed = np.concatenate([bias[:2], bias[:2], bias[2:], bias[2:]])
    np.testing.assert_allclose(module._output_of_value_bias(output, bias, 2, 2), output @ mixed)


def not_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        module,
        "_output_of_value_bias",
        lambda o, b, group, dim: o @ np.tile(b.reshape(-1, dim), (group, 1)).reshape(-1),
    )


def no_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_output_of_value_bias", lambda output, bias, group, dim: 0 * output[:, 0])


def once_too_often(patch: pytest.MonkeyPatch) -> None:
    right = module._rescaled
    patch.setattr(module, "_rescaled", lambda name, factor, norm: right(name, factor**2, norm))


def the_bias_left(patch: pytest.MonkeyPatch) -> None:
    right = module._rescaled
    patch.setattr(
        module, "_rescaled", lambda name, factor, norm: right(name, 1.0 if name.endswith("bias") else factor, norm)
    )


def gamma_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_clear", lambda norm, path, tensors: None)


def rows_for_columns(patch: pytest.MonkeyPatch) -> None:
    def wrong(weight: str, gamma: str) -> Compute:
        return lambda model: model.wide(weight) * model.wide(gamma)[::-1]

    patch.setattr(module, "_scaled_inputs", wrong)


def beta_lost(patch: pytest.MonkeyPatch) -> None:
    def wrong(weight: str, bias: str | None, beta: str) -> object:
        return lambda model: model.wide(bias) if bias else 0 * model.wide(weight)[:, 0]

    patch.setattr(norm_swaps, "_shifted", wrong)


def ones_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "Filled", lambda shape, value, like: Filled(shape, 0.5, like))


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "heads tiled, not repeated": ("value-bias", (not_repeated, ("qwen2",))),
    "the output's bias forgotten": ("value-bias", (no_output, ("gpt2", "bloom"))),
    "the scale twice": ("scale", (once_too_often, ("gpt2", "qwen3"))),
    "the query's bias not scaled": ("scale", (the_bias_left, ("gpt2", "qwen2"))),
    "γ left in the norm": ("norm", (gamma_twice, ("gpt2", "llama"))),
    "γ in another order": ("norm", (rows_for_columns, ("falcon-7b", "qwen3"))),
    "β lost": ("norm", (beta_lost, ("gpt2", "falcon-40b"))),
    "a norm's weight of a half": ("norm", (ones_forgotten, ("gpt2", "llama"))),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(name: str, tmp_path: Path) -> None:
    value, mutation = MUTATIONS[name]
    is_caught(name, {name: mutation}, {"fold": value}, tmp_path)
