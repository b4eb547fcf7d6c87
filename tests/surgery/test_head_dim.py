"""The width of a head: rotary positions move along, or stay on part of the head; undone where nothing was put in."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.covering import examples, few
from helpers.exactness import MODELS, caught, exactly, same_values, saved
from helpers.families import CONFIGS, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.components import ModelSpec, Rotary
from gptkit.errors import SwapRefused
from gptkit.modules.positions import inverse_frequencies
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import head_dim as module

SCALED = ("llama-3", "llama-linear", "llama-dynamic", "llama-yarn", "llama-yarn-mscale", "llama-longrope")


def width_of(spec: ModelSpec) -> int:
    return spec.blocks[0].attention.head_dim  # type: ignore[union-attr]


@settings(max_examples=examples(9), deadline=None)
@given(
    name=st.sampled_from([*MODELS, *SCALED, "falcon-rw", "gpt2-by-layer"]),
    more=st.integers(1, 20),
    how=st.sampled_from(["", "partial:"]),
)
def test_any_width_and_back(
    name: str, more: int, how: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, out = saved(name, folder), tmp_path_factory.mktemp("any")
    old = width_of(spec_of(CONFIGS[name]))
    result = exactly(source, out / "wide", head_dim=f"{how}{old + more}")
    assert width_of(result.spec) == old + more
    exactly(source, out / "back", Step("head_dim", f"{how}{old + more}"), Step("head_dim", str(old)))
    assert width_of(gptkit.open_checkpoint(out / "back").spec) == old


def test_rotary_over_whole_heads_is_what_families_export(folder: Path, tmp_path: Path) -> None:
    result = exactly(saved("llama-2", folder), tmp_path / "wide", head_dim="12")
    attention = result.spec.blocks[0].attention
    assert isinstance(attention.position, Rotary) and attention.position.dim == 12
    assert math.isclose(attention.position.base, 1e4**1.5) and attention.scale == 12**-0.5
    gptkit.convert(tmp_path / "wide", tmp_path / "hf", to="hf:llama")
    # Back again to the same bits but for the queries, which were multiplied and divided.
    exactly(tmp_path / "wide", tmp_path / "back", head_dim="8")


def test_part_of_the_head_keeps_every_bit(folder: Path, tmp_path: Path) -> None:
    result = exactly(saved("falcon-rw", folder), tmp_path / "wide", head_dim="11")
    assert any("the attention scale stays" in note for note in result.chain.notes)
    exactly(tmp_path / "wide", tmp_path / "back", head_dim="8")
    assert same_values(saved("falcon-rw", folder), tmp_path / "back")


def test_pairs_side_by_side(folder: Path, tmp_path: Path) -> None:
    exactly(saved("llama-2", folder), tmp_path / "adjacent", rope_pairs="adjacent")
    exactly(tmp_path / "adjacent", tmp_path / "wide", head_dim="14")


def test_some_layers_alone(folder: Path, tmp_path: Path) -> None:
    spec = exactly(saved("qwen3", folder), tmp_path / "out", head_dim="20", blocks="1").spec
    assert [block.attention.head_dim for block in spec.blocks] == [16, 20, 16]  # type: ignore[union-attr]


@given(dim=st.integers(1, 64), more=st.integers(1, 64), base=st.floats(2, 1e7))
def test_frequencies_stay(dim: int, more: int, base: float) -> None:
    old = Rotary(dim=2 * dim, base=base)
    new = module._refit_base(old, 2 * (dim + more))
    if new is None:
        assert math.log(base) * (dim + more) / dim > 700
        return
    first, second = (inverse_frequencies(each, 1, torch.float64)[:dim] for each in (old, new))
    assert ((first - second).abs() <= 1e-13 * first).all()


def test_scalings_that_look_at_the_width_turn_part_of_the_head(folder: Path, tmp_path: Path) -> None:
    result = gptkit.swap(saved("llama-dynamic", folder), tmp_path / "out", head_dim="12")
    assert any("only the first 8 dimensions" in note for note in result.chain.notes)
    with pytest.raises(SwapRefused, match="DynamicScaling depends on the head dimension"):
        gptkit.swap(saved("llama-dynamic", folder), tmp_path / "no", head_dim="theta:12")


def test_where_fp32_would_round_otherwise(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANGLE", 1e-9)
    result = exactly(saved("llama-2", folder), tmp_path / "out", head_dim="10")
    assert any("in fp32 (theta:10)" in note for note in result.chain.notes)
    assert result.spec.blocks[0].attention.position.dim == 8  # type: ignore[union-attr]
    whole = exactly(saved("llama-2", folder), tmp_path / "theta", head_dim="theta:10")
    assert whole.spec.blocks[0].attention.position.dim == 10  # type: ignore[union-attr]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    def refused(name: str, width: str) -> str:
        with pytest.raises(SwapRefused) as caught:
            gptkit.swap(saved(name, folder), tmp_path / "out", head_dim=width)
        return str(caught.value)

    assert "the head dimension is already 20" in refused("llama", "20")
    assert "cannot change from 20 to 16: the dimensions to be removed are not zero in blocks.0.attention" in refused(
        "llama", "16"
    )
    assert "23 is odd" in refused("llama", "theta:23")
    assert "RoPE does not rotate whole heads" in refused("gpt2", "theta:16")


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def base_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_refit_base", lambda rotary, size: msgspec.structs.replace(rotary, dim=size))
    patch.setattr(module, "_why_not_same", lambda *args, **kwargs: "")


def padded_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_spread", lambda rotary, size: module.padded(rotary.dim, size))


def scale_not_made_up_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_query_factor", lambda old, new: 1.0)


def norms_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_norm_factors", lambda old, new: [("q_norm", 1.0), ("k_norm", 1.0)])


def eps_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "eps_for", lambda eps, old, new: eps)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "the base left alone": (base_left_alone, ("llama", "falcon-7b")),
    "halves filled up at the end": (padded_at_the_end, ("llama", "qwen3")),
    "the scale not made up for": (scale_not_made_up_for, ("llama", "gpt2", "bloom")),
    "norms on heads left alone": (norms_left_alone, ("qwen3",)),
    "their eps left alone": (eps_left_alone, ("qwen3",)),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate, models = MUTATIONS[name]
    sources = [saved(model, folder) for model in models]
    mutate(monkeypatch)
    for source in sources:
        caught(source, tmp_path / "out", head_dim="32")
