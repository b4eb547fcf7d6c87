"""The number of heads: exact where heads are added, or say nothing; groups and ALiBi's slopes as they must be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import covering
from helpers.covering import exhaustive, few
from helpers.exactness import MODELS, caught, exactly, same_values, saved
from helpers.families import CONFIGS, spec_of

import gptkit
from gptkit.components import Attention, ModelSpec
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.swaps import attention_heads as module


def numbers(spec: ModelSpec) -> tuple[int, int]:
    attention = spec.blocks[0].attention
    assert isinstance(attention, Attention)
    return attention.heads, attention.kv_heads


@few(1)
@pytest.mark.parametrize("name", [*MODELS, "falcon-rw", "falcon-alibi-parallel"])
def test_more_keeps_every_bit_and_back(name: str, folder: Path, tmp_path: Path) -> None:
    source = saved(name, folder)
    heads, keys = numbers(spec_of(CONFIGS[name]))
    for new in (heads + 2,) if covering.quick else (heads + 2, 2 * heads):
        result = exactly(source, tmp_path / f"{new}", heads=str(new))
        grown = new if keys == heads else keys
        assert numbers(result.spec) == (new, grown)
        exactly(tmp_path / f"{new}", tmp_path / f"back-{new}", heads=str(heads))
        assert same_values(source, tmp_path / f"back-{new}")


def test_whole_groups(folder: Path, tmp_path: Path) -> None:
    result = exactly(saved("llama", folder), tmp_path / "out", heads="9")
    assert numbers(result.spec) == (9, 3)
    exactly(tmp_path / "out", tmp_path / "back", heads="6")
    assert same_values(saved("llama", folder), tmp_path / "back")


@pytest.mark.exhaustive
def test_latent_attention(folder: Path, tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        gptkit.swap(saved(name, folder), tmp_path / name, attention="mla:full")
        exactly(tmp_path / name, tmp_path / f"{name}-8", heads="8")
        exactly(tmp_path / f"{name}-8", tmp_path / f"{name}-back", heads=str(numbers(spec_of(CONFIGS[name]))[0]))
        assert same_values(tmp_path / name, tmp_path / f"{name}-back")


def test_alibi_slopes_stay_with_their_heads(folder: Path, tmp_path: Path) -> None:
    attention = exactly(saved("bloom", folder), tmp_path / "out", heads="8").spec.blocks[0].attention
    old, new = module.slopes(attention, 6), module.slopes(attention, 8)
    assert old is not None and new is not None and set(old) < set(new) and old != new[:6]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    def refused(name: str, heads: str) -> str:
        with pytest.raises((SwapRefused, UsageError)) as caught:
            gptkit.swap(saved(name, folder), tmp_path / "out", heads=heads)
        return str(caught.value)

    assert "these layers have 6 heads already" in refused("llama", "6")
    message = refused("llama", "7")
    assert "7 query heads cannot share 2 key-value heads evenly, nor be in groups of 3" in message
    assert "Possible: 2, 3, 4, 6, 8, 9" in message
    assert "with 40 heads, ALiBi lacks some slopes" in refused("bloom", "40")
    assert "text" in refused("llama", "4")


@exhaustive
@pytest.mark.skipif(not (SAMPLES_DIR / "falcon").is_dir(), reason="no samples")
@pytest.mark.parametrize(("sample", "heads"), [("gpt2", 3), ("llama", 4), ("falcon", 5)])
def test_fitted_on_a_text_it_costs_less(sample: str, heads: int, tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {"fitted": {"calibrate_tokens": 2048}, "plain": {"approximate": True}}
    kl = {}
    for name, options in given.items():
        done = gptkit.swap(f"sample:{sample}", tmp_path / name, heads=str(heads), **options)
        assert done.guarantee == "approximate" and done.measured is not None and done.measured.kl_text is not None
        kl[name] = done.measured.kl_text
    assert kl["fitted"] < kl["plain"] / 1.5


def not_silent(patch: pytest.MonkeyPatch) -> None:
    right = module.HeadChoice
    patch.setattr(module, "HeadChoice", lambda heads, keys, silent: right(heads, keys, np.zeros_like(silent)))


def out_of_their_groups(patch: pytest.MonkeyPatch) -> None:
    right = module.HeadChoice

    def moved(heads: np.ndarray, keys: np.ndarray, silent: np.ndarray) -> object:
        order = np.argsort(silent, kind="stable")
        return right(heads[order], keys, silent[order])

    patch.setattr(module, "HeadChoice", moved)


def slopes_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "slopes", lambda attention, heads: None)


def always_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_dead", lambda model, path, attention: np.ones(attention.heads, dtype=bool))


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...], str]] = {
    "new heads heard": (not_silent, ("gpt2", "llama", "bloom"), "8"),
    "heads in another's group": (out_of_their_groups, ("llama", "falcon-40b"), "8"),
    "ALiBi's slopes forgotten": (slopes_forgotten, ("bloom", "falcon-rw"), "8"),
    "heads in use called dead": (always_dead, ("gpt2", "llama"), "2"),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate, models, heads = MUTATIONS[name]
    sources = [saved(model, folder) for model in models]
    mutate(monkeypatch)
    for source in sources:
        caught(source, tmp_path / "out", heads=heads)
