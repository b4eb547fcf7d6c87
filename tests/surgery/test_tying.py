"""Tying and untying: the same bytes where the head is the table, else the mean, which is said and measured."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS, save_hf

import gptkit
from gptkit.errors import GptkitError, SwapRefused
from gptkit.surgery import registry
from gptkit.surgery.base import Filled, Read, Swapped
from gptkit.surgery.swaps import vocabulary as tying

TIED = ("gpt2", "bloom", "qwen2")


def weights(folder: Path) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array).tobytes() for name, array, _ in gptkit.open_checkpoint(folder).tensors()}


@few(1)
@pytest.mark.parametrize("name", TIED)
def test_untied_and_tied_again_are_the_same_bytes(name: str, tmp_path: Path) -> None:
    config = {**CONFIGS[name], "tie_word_embeddings": True}
    save_hf(config, tmp_path / "hf", torch.bfloat16)
    untied = gptkit.swap(tmp_path / "hf", tmp_path / "untied", untie="")
    assert untied.guarantee == "exact" and untied.dtype == "float64"
    assert untied.measured is not None and untied.measured.relative["float64"] < 1e-14
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "untied")
    assert after.pop("head.weight") == before["embedding.weight"]
    assert after == before
    again = gptkit.swap(tmp_path / "untied", tmp_path / "tied", tie="")
    assert again.guarantee == "exact"
    assert weights(tmp_path / "tied") == before
    assert again.spec == gptkit.open_checkpoint(tmp_path / "hf").spec
    gptkit.convert(tmp_path / "tied", tmp_path / "back", to="hf")
    one, two = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("hf", "back"))
    assert one == two


def test_an_untied_model_loads_in_transformers(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "untied", untie="")
    gptkit.convert(tmp_path / "untied", tmp_path / "back", to="hf")
    assert gptkit.verify(tmp_path / "back").verdict == "identical"


def test_a_head_of_its_own_is_tied_as_the_mean(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    result = gptkit.swap(tmp_path / "hf", tmp_path / "tied", tie="")
    assert result.guarantee == "approximate"
    assert result.chain.notes == (
        "the head and the embedding differ in 97 of 97 rows, so tying them cannot be exact: both use their mean",
    )
    tensors = {name: array for name, array, _ in gptkit.open_checkpoint(tmp_path / "hf").tensors()}
    tied = {name: array for name, array, _ in gptkit.open_checkpoint(tmp_path / "tied").tensors()}
    assert "head.weight" not in tied
    mean = (tensors["embedding.weight"].astype(float) + tensors["head.weight"]) / 2
    np.testing.assert_allclose(tied["embedding.weight"], mean, rtol=1e-6, atol=1e-7)


def test_one_row_apart_is_not_equal_and_another_dtype_is(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_hf({**CONFIGS["llama"], "tie_word_embeddings": False}, tmp_path / "hf", torch.bfloat16)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
    save_file(tensors, path, {"format": "pt"})
    result = gptkit.swap(tmp_path / "hf", tmp_path / "tied", tie="")
    assert result.guarantee == "exact"
    assert gptkit.open_checkpoint(tmp_path / "tied").shared_dtypes()["embedding.weight"] == "F32"
    tensors["lm_head.weight"][5, 7] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    result = gptkit.swap(tmp_path / "hf", tmp_path / "other", tie="")
    assert result.guarantee == "approximate" and "1 of 97 rows" in result.chain.notes[0]


@pytest.mark.exhaustive
def test_the_mean_beats_one_of_both_on_a_trained_model(tmp_path: Path) -> None:
    found = {}
    for name, approximate in (("mean", False), ("embedding", True)):
        result = gptkit.swap("sample:llama", tmp_path / name, tie="", approximate=approximate)
        assert result.measured is not None
        assert result.chain.swapped[0].summary["matrix"] == name
        found[name] = result.measured.kl
    assert found["mean"] < found["embedding"] / 2


def test_refusals(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "tied")
    save_hf(CONFIGS["llama"], tmp_path / "own")
    with pytest.raises(SwapRefused, match="the head is tied to the embedding already") as tied:
        gptkit.swap(tmp_path / "tied", tmp_path / "out", tie="")
    assert "--untie" in str(tied.value.hint)
    with pytest.raises(SwapRefused, match="the head is not tied: it already has a matrix of its own") as own:
        gptkit.swap(tmp_path / "own", tmp_path / "out", untie="")
    assert "--tie" in str(own.value.hint)
    assert not (tmp_path / "out").exists()


def test_a_wrong_copy_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    right = tying._untie

    def zeros(spec: Any, asked: Any) -> Swapped:
        found = right(spec, asked)
        made = {"head.weight": Filled((97, 48), 0.0, "embedding.weight")}
        return Swapped(found.spec, "exact", made)

    swaps = tuple(dataclasses.replace(each, reshape=zeros) for each in tying.SWAPS if each.option == "untie")
    monkeypatch.setattr(registry, "all_swaps", lambda: swaps)
    with pytest.raises(GptkitError, match="not exact on this checkpoint"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", untie="")
    # Equality that is claimed where there is none is measured, too.
    save_hf(CONFIGS["llama"], tmp_path / "own")
    monkeypatch.undo()
    monkeypatch.setattr(Read, "same", lambda self, one, other: True)
    with pytest.raises(GptkitError, match="not exact on this checkpoint"):
        gptkit.swap(tmp_path / "own", tmp_path / "out", tie="")
    assert not (tmp_path / "out").exists()
