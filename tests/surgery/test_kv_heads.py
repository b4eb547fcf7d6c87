"""Key-value heads: more of them exactly, equal ones merged exactly, others fitted better than averaged."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.covering import exhaustive, few
from helpers.exactness import Mutation, is_caught, undone
from helpers.families import CONFIGS, LLAMA, save_hf
from hypothesis import given
from hypothesis import strategies as st

import gptkit
from gptkit.components import Attention
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.base import Measurement, StoredModel
from gptkit.surgery.fits import kv_fit, regression
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText
from gptkit.surgery.registry import Step, apply
from gptkit.surgery.swaps import kv_heads as module

GROUPED = ["mistral", "qwen2", "qwen3", "falcon-7b", "falcon-40b"]


def kv_heads(folder: Path) -> list[int]:
    attentions = [block.attention for block in gptkit.open_checkpoint(folder).spec.blocks]
    return [each.kv_heads for each in attentions if isinstance(each, Attention)]


@few(1)
@pytest.mark.parametrize("name", GROUPED)
def test_more_heads_and_back_are_the_same_bytes(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", torch.bfloat16)
    undone(tmp_path / "hf", Step("attention", "mha"), tmp_path)
    assert set(kv_heads(tmp_path / "there")) == {6}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_repeating_and_picking(own: int, times: int, head_dim: int, width: int) -> None:
    tensor = np.random.default_rng(0).normal(size=(own * head_dim, width))
    repeated = module._repeated_heads(tensor, times, head_dim)
    np.testing.assert_array_equal(module.first_of_groups(repeated, times, head_dim), tensor)
    mean = module.mean_of_groups(repeated, own * times, own, own * times, head_dim)
    np.testing.assert_allclose(mean, tensor, rtol=1e-12)


def test_groups_that_cut_through_readers_take_the_mean_over_readers() -> None:
    """Six query heads on two key-value heads, three wanted: the middle one stands for one reader of each."""
    tensor = np.array([[1.0], [3.0]])
    np.testing.assert_allclose(module.mean_of_groups(tensor, 2, 3, 6, 1)[:, 0], [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        ("gqa:5", "5 key-value heads cannot be shared evenly by 12 query heads", "Possible here: 1, 2, 3, 4, 6, 12."),
        ("gqa:4", "already have 4 key-value heads", None),
        ("gqa:24", "24 key-value heads cannot be shared evenly by 12 query heads", "Possible here: 1, 2, 3, 4, 6, 12."),
    ],
)
def test_refusals(value: str, words: str, hint: str | None, tmp_path: Path) -> None:
    save_hf({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4}, tmp_path / "hf")
    for approximate in (False, True):
        with pytest.raises(SwapRefused, match=words) as caught:
            gptkit.swap(tmp_path / "hf", tmp_path / "out", attention=value, approximate=approximate)
        assert caught.value.hint == hint
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_values_that_are_no_swap(tmp_path: Path) -> None:
    for value in ("gqa:x", "gqa:0", "gqa"):
        with pytest.raises(UsageError):
            gptkit.swap("sample:llama", tmp_path / "out", attention=value)
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    with pytest.raises(UsageError, match="needs a text to fit on"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", attention="mqa")
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Now is the winter of our discontent")
    with pytest.raises(UsageError, match="is too short") as caught:
        gptkit.swap("sample:gpt2", tmp_path / "out", attention="mqa", calibrate=tmp_path / "short.txt")
    assert "--calibrate-tokens" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@few(1)
@pytest.mark.parametrize(
    ("sample", "value", "times"),
    [
        ("llama", "mqa", 5),
        ("gpt2", "mqa", 10),
        pytest.param("llama", "gqa:3", 4, marks=pytest.mark.slow),
        pytest.param("gpt2", "gqa:2", 20, marks=pytest.mark.slow),
        pytest.param("bloom", "mqa", 4, marks=pytest.mark.slow),
    ],
)
@exhaustive
def test_the_fit_is_many_times_nearer_than_the_mean(sample: str, value: str, times: float, tmp_path: Path) -> None:
    fitted = gptkit.swap(f"sample:{sample}", tmp_path / "fitted", attention=value, calibrate_tokens=2048)
    mean = gptkit.swap(f"sample:{sample}", tmp_path / "mean", attention=value, approximate=True)
    assert fitted.guarantee == mean.guarantee == "approximate"
    assert fitted.measured is not None and mean.measured is not None
    assert fitted.measured.kl_text is not None and mean.measured.kl_text is not None
    assert fitted.measured.kl_text * times < mean.measured.kl_text
    assert fitted.chain.calibration["tokens"] == 2048
    again = gptkit.swap(f"sample:{sample}", tmp_path / "again", recipe=tmp_path / "fitted", measured=False)
    assert again.spec == fitted.spec
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("fitted", "again")]
    assert same[0] == same[1]


@pytest.mark.exhaustive
def test_some_layers_alone(tmp_path: Path) -> None:
    gptkit.swap("sample:gpt2", tmp_path / "out", attention="mqa", blocks="1,3", calibrate_tokens=2048, measured=False)
    assert kv_heads(tmp_path / "out") == [4, 1, 4, 1]
    before, after = gptkit.load("sample:gpt2"), gptkit.load(tmp_path / "out")
    for name, tensor in before.state_dict().items():
        fitted = name.endswith("feed_forward.down_proj.weight") or (".attention." in name and "o_proj.bias" not in name)
        touched = name.startswith(("blocks.1.", "blocks.3.")) and fitted
        assert touched or torch.equal(tensor, after.state_dict()[name])


# --- fitting on any tree ----------------------------------------------------------------------------------------------


def random_calibration(spec: Any, tokens: int = 256) -> Calibration:
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, 2 * tokens).tolist()
    return Calibration(CalibrationText(tuple(ids[:tokens]), tuple(ids[tokens:]), "random", ""), spec)


@few(1)
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt2-by-layer",
        "mistral",
        "qwen2",
        "qwen3",
        "falcon-40b",
        "falcon-rw",
        "bloom",
        "llama-yarn",
        "gpt_oss-b",
    ],
)
def test_heads_that_are_alike_but_for_rounding_are_found(name: str, tmp_path: Path) -> None:
    """Old heads that one new head can stand for: the fit gives the original's function, whatever the family."""
    config = dict(CONFIGS.get(name, CONFIGS["llama"]))
    save_hf(config, tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "mha", attention="mha", measured=False) if name in GROUPED else None
    source = gptkit.open_checkpoint(tmp_path / ("mha" if name in GROUPED else "hf"))
    spec = source.spec
    if name not in GROUPED:
        return _alike(tmp_path, spec, name)
    changed = {0: dataclass_of(spec, 2)}
    _near(source, changed, spec)
    return None


def dataclass_of(spec: Any, count: int) -> Attention:
    attention = spec.blocks[0].attention
    assert isinstance(attention, Attention)
    return module.with_heads(attention, count)


def _alike(folder: Path, spec: Any, name: str) -> None:
    """Make the heads of layer 0 equal in pairs in the local files, so that half as many can stand for them."""
    gptkit.convert(folder / "hf", folder / "local")
    weights = safetensors.torch.load_file(folder / "local" / "model.safetensors")
    attention = spec.blocks[0].attention
    group, dim = 2, attention.head_dim
    for which in ("k_proj", "v_proj"):
        for part in ("weight", "bias"):
            key = f"blocks.0.attention.{which}.{part}"
            if key in weights:
                heads = weights[key].unflatten(0, (-1, group, dim))
                weights[key] = heads[:, :1].expand_as(heads).flatten(0, 2).contiguous()
    safetensors.torch.save_file(weights, folder / "local" / "model.safetensors", {"format": "pt"})
    source = gptkit.open_checkpoint(folder / "local")
    _near(source, {0: dataclass_of(spec, attention.kv_heads // group)}, spec)


def _near(source: Any, changed: dict[int, Attention], spec: Any) -> None:
    model = StoredModel(source)
    calibration = random_calibration(spec)
    (found,) = kv_fit.fitted_layers(model, changed, calibration)
    layer = next(calibration.walk(model))
    old, context, x = layer.module, layer.context, layer.x
    tensors = {name.removeprefix("blocks.0.attention."): torch.tensor(value) for name, value in found.items()}
    new = kv_fit.block_with(old, spec.blocks[0].replaced(attention=changed[0]), tensors)
    with torch.no_grad():
        normed = old.attention_norm(x)
        a, b = old.attention(normed, context), new.attention(normed, context)
    assert (a - b).norm() / a.norm() < 2e-3


# --- the exact side cannot be fooled ----------------------------------------------------------------------------------


def tiled(patch: pytest.MonkeyPatch) -> None:
    def wrong(tensor: np.ndarray, times: int, head_dim: int) -> np.ndarray:
        return np.concatenate([tensor] * times)

    patch.setattr(module, "_repeated_heads", wrong)


def values_alone(patch: pytest.MonkeyPatch) -> None:
    right = module._repeated_heads
    turn = iter(range(10**6))

    def wrong(tensor: np.ndarray, times: int, head_dim: int) -> np.ndarray:
        found = right(tensor, times, head_dim)
        return np.roll(found, head_dim, axis=0) if next(turn) % 2 else found

    patch.setattr(module, "_repeated_heads", wrong)


def always_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_equal_in_groups", lambda model, path, attention, wanted: attention.kv_heads % wanted == 0)


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "heads tiled, not repeated": ("mha", (tiled, ("mistral", "falcon-40b"))),
    "one tensor's heads shifted": ("mha", (values_alone, ("qwen2", "qwen3"))),
    "unequal heads taken for equal": ("mqa", (always_equal, ("gpt2", "mistral", "bloom", "falcon-40b"))),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_movement_is_not_published(name: str, tmp_path: Path) -> None:
    value, mutation = MUTATIONS[name]
    is_caught(name, {name: mutation}, {"attention": value}, tmp_path)


@pytest.mark.slow
def test_a_wrong_fit_costs_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fit gains comes of its parts: each left out shows in the KL that is reported."""

    def fit(out: Path) -> Measurement | None:
        return gptkit.swap("sample:llama", out, attention="mqa", calibrate_tokens=2048).measured

    right = fit(tmp_path / "right")
    assert right is not None and right.kl_text is not None

    def conjugate_forgotten(*args: Any) -> Any:
        queries, keys = args[0], args[1]
        return queries, regression.pool_mean(keys)

    for name, wrong in {"fit_keys": conjugate_forgotten}.items():
        with monkeypatch.context() as patch:
            patch.setattr(kv_fit, name, wrong)
            found = fit(tmp_path / name)
        assert found is not None and found.kl_text is not None and found.kl_text > right.kl_text
    with monkeypatch.context() as patch:
        patch.setattr(kv_fit, "ridge_by_held_out", lambda start, *given: start.flip(0))
        found = fit(tmp_path / "flipped")
    assert found is not None and found.kl_text is not None and found.kl_text > 3 * right.kl_text
    assert dataclasses.is_dataclass(right)


def test_heads_are_compared_a_layer_at_a_time(tmp_path: Path) -> None:
    """The pages of a layer that was looked at are let go: of a large model they are most of its memory."""
    save_hf(CONFIGS["mistral"], tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "mha", attention="mha", measured=False)

    class Counting(StoredModel):
        released = 0

        def release(self) -> None:
            self.released += 1
            super().release()

    model = Counting(gptkit.open_checkpoint(tmp_path / "mha"))
    assert apply(model, Step("attention", "gqa:2")).guarantee == "exact"
    assert model.released >= len(model.spec.blocks)


@exhaustive
def test_scores_are_refitted_on_some_of_a_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sequences from all of it, and what comes out is still better than plain."""
    tokens: list[int] = []
    refit = kv_fit.refit_scores

    def watched(queries: torch.Tensor, key: torch.Tensor, inputs: torch.Tensor, *rest: Any, **options: Any) -> Any:
        tokens.append(inputs.shape[0] * inputs.shape[1])
        return refit(queries, key, inputs, *rest, **options)

    monkeypatch.setattr(kv_fit, "refit_scores", watched)
    monkeypatch.setattr(kv_fit, "SCORED", 1024)
    done = gptkit.swap("sample:llama", tmp_path / "out", attention="mqa", calibrate_tokens=3000)
    assert tokens and all(0 < each <= 1024 for each in tokens)
    assert done.measured is not None and done.naive is not None
    assert done.measured.kl_text < 0.2 * done.naive.kl_text
