"""The window of attention: the same function up to the shorter window, another beyond, and a family's own in files."""

import json
from pathlib import Path

import pytest
import torch
from helpers.covering import few
from helpers.exactness import Mutation, bytes_of, is_caught, saved
from helpers.families import CONFIGS, spec_of

import gptkit
from gptkit.components import Attention, ModelSpec
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.swaps import window as module

FULL = ("gpt2", "llama-2", "falcon-40b", "qwen3", "mixtral")
"""Trees without windows, with a context of 256 tokens."""


def windows(spec: ModelSpec) -> list[int | None]:
    return [getattr(block.mixer("attention"), "window", None) for block in spec.blocks]


def gaps(one: Path, other: Path, lengths: tuple[int, ...]) -> list[float]:
    """The largest difference of logits on texts of these lengths, relative to the largest logit, in fp64."""
    models, found = [gptkit.load(each, dtype=torch.float64) for each in (one, other)], []
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        ids = torch.randint(0, models[0].spec.vocab_size, (2, length), generator=generator)
        with torch.inference_mode():
            before, after = (model(ids) for model in models)
        found.append(((before - after).abs().max() / before.abs().max()).item())
    return found


@few(3)
@pytest.mark.parametrize("name", ["gpt2", "llama-2", "bloom", "falcon-40b", "qwen3", "mixtral"])
def test_texts_as_long_as_the_window_are_the_same_and_longer_ones_are_not(
    name: str, folder: Path, tmp_path: Path
) -> None:
    source = saved(name, folder)
    result = gptkit.swap(source, tmp_path / "out", window="11")
    assert (result.guarantee, result.chain.notes) == (
        "approximate",
        ("the model computes the same function up to 11 tokens",),
    )
    assert set(windows(result.spec)) == {11}
    # A token beyond the window is seen through the layers in between.
    same, longer = gaps(source, tmp_path / "out", (11, 40))
    assert same <= 1e-12 and longer > 1e-3
    gptkit.convert(source, tmp_path / "converted")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "converted")


@few(3)
@pytest.mark.parametrize("name", FULL)
def test_a_window_of_the_context_is_exact_and_undone(name: str, folder: Path, tmp_path: Path) -> None:
    spec = spec_of(CONFIGS[name])
    assert spec.context_length is not None
    done = gptkit.swap(saved(name, folder), tmp_path / "there", window=str(spec.context_length))
    assert done.guarantee == "exact" and done.measured is not None and done.measured.relative["float64"] <= 1e-12
    back = gptkit.swap(tmp_path / "there", tmp_path / "back", window="none")
    assert back.guarantee == "exact" and back.spec == spec
    assert bytes_of(tmp_path / "back") == bytes_of(tmp_path / "there")


def test_what_is_written_is_mistral_and_llama(folder: Path, tmp_path: Path) -> None:
    """transformers computes the same from the files of the family that has a window, and of the one that has none."""
    for name, window, family in (("llama-2", "16", "mistral"), ("mistral", "none", "llama")):
        gptkit.swap(saved(name, folder), tmp_path / name, window=window, to=f"hf:{family}")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["model_type"], config.get("sliding_window")) == (family, 16 if family == "mistral" else None)
        assert gptkit.verify(tmp_path / name).verdict == "identical"


def test_some_layers_alone(folder: Path, tmp_path: Path) -> None:
    result = gptkit.swap(saved("mistral", folder), tmp_path / "out", window="none", blocks="1")
    assert windows(result.spec) == [16, None, 16]
    assert result.chain.swapped[0].summary["layers"] == [1]


def test_chunks_are_windows_that_go_too(folder: Path, tmp_path: Path) -> None:
    result = gptkit.swap(saved("llama4_text", folder), tmp_path / "out", window="none")
    attentions = [block.attention for block in result.spec.blocks]
    assert all(isinstance(each, Attention) and not each.chunked and each.window is None for each in attentions)


def test_a_part_of_the_window(folder: Path, tmp_path: Path) -> None:
    assert set(windows(gptkit.swap(saved("mistral", folder), tmp_path / "out", window="50%").spec)) == {8}


REFUSED = (
    ("llama-2", "none", SwapRefused, "every layer has full attention already"),
    ("mistral", "16", SwapRefused, "every layer has a window of 16 tokens already"),
    ("mamba", "16", SwapRefused, "no layer has attention that can have a window"),
    ("gemma3n_text", "8", SwapRefused, "which this swap does not support"),
    ("llama-2", "0", UsageError, "a window must be a whole number of at least 1"),
    ("llama-2", "4k", UsageError, "a window must be a whole number of at least 1"),
)


@pytest.mark.parametrize(("name", "value", "kind", "reason"), REFUSED)
def test_refusals(name: str, value: str, kind: type[Exception], reason: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(kind, match=reason):
        gptkit.swap(saved(name, folder), tmp_path / "out", window=value)
    assert not (tmp_path / "out").exists()


def the_longer_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_same_up_to", lambda windows: max(window or 256 for window in windows))


MUTATIONS: dict[str, Mutation] = {"none": (the_longer_window, ("mistral",)), "16": (the_longer_window, ("llama-2",))}
"""By the window that is asked for."""


@pytest.mark.parametrize("window", MUTATIONS)
def test_a_wrong_formula_is_not_published(window: str, folder: Path) -> None:
    is_caught(window, MUTATIONS, {"window": window}, folder)
