"""The width of the stream: exact for any tree and width, undone to the bit where nothing was computed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.covering import examples, exhaustive, few
from helpers.exactness import MODELS, caught, exactly, same_values, saved
from helpers.families import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import hidden as module


@few(1)
@pytest.mark.parametrize("name", [*MODELS, "bloom-post-norm"])
def test_copies_keep_every_bit_and_go_again(name: str, folder: Path, tmp_path: Path) -> None:
    source = saved(name, folder)
    width = gptkit.open_checkpoint(source).spec.hidden_size
    result = exactly(source, tmp_path / "wide", hidden=str(2 * width))
    assert result.spec.hidden_size == 2 * width and not any(map(result.chain.computed, names(result)))
    assert all(dtype == "F32" for dtype in gptkit.open_checkpoint(tmp_path / "wide").shared_dtypes().values())
    exactly(tmp_path / "wide", tmp_path / "back", hidden=str(width))
    assert same_values(source, tmp_path / "back")


def names(result: object) -> list[str]:
    return [parameter.name for parameter in result.spec.parameters()]  # type: ignore[attr-defined]


@settings(max_examples=examples(6), deadline=None)
@given(name=st.sampled_from(MODELS), more=st.integers(1, 47))
def test_any_width_and_back(name: str, more: int, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source, out = saved(name, folder), tmp_path_factory.mktemp("any")
    assert exactly(source, out / "wide", hidden=str(48 + more)).spec.hidden_size == 48 + more
    # The last zeros, or means, go alone too.
    exactly(source, out / "back", Step("hidden", str(48 + more)), Step("hidden", "48"))
    exactly(out / "wide", out / "less", hidden=str(48 + more // 2) if more > 1 else "48")


def test_training_reaches_what_is_new(folder: Path, tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        gptkit.swap(saved(name, folder), tmp_path / name, hidden="50")
        model = gptkit.load(tmp_path / name, dtype=torch.float64)
        model.requires_grad_(True)
        model(torch.arange(20)[None]).square().sum().backward()
        gradient = model.blocks[0].attention.o_proj.weight.grad
        assert gradient is not None and gradient[48:].abs().max() > 0


def test_refusals(folder: Path, tmp_path: Path) -> None:
    def refused(name: str, width: str) -> str:
        with pytest.raises((SwapRefused, UsageError)) as caught:
            gptkit.swap(saved(name, folder), tmp_path / "out", hidden=width)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "the hidden size is already 48" in refused("llama", "48")
    assert "Possible: multiples of 64, such as 128" in refused("bloom-post-norm", "65")
    assert "removing coordinates 40 to 47 of the residual stream is exact only if" in refused("gpt2", "40")
    assert "--norm rmsnorm first" in refused("gpt2", "40")
    assert "needs a text to fit on" in refused("llama", "40")
    assert "a width must be a whole number" in refused("llama", "0")


def test_what_llama_refuses_is_said(folder: Path, tmp_path: Path) -> None:
    notes = gptkit.swap(saved("llama", folder), tmp_path / "out", hidden="50").chain.notes
    assert any("needs a hidden size divisible by its 6 heads" in note for note in notes)


@exhaustive
@pytest.mark.skipif(not (SAMPLES_DIR / "llama").is_dir(), reason="no samples")
def test_the_rotation_beats_the_largest_coordinates(tmp_path: Path) -> None:
    best = gptkit.swap("sample:llama", tmp_path / "best", hidden="88")
    naive = gptkit.swap("sample:llama", tmp_path / "naive", hidden="88", approximate=True)
    assert (best.guarantee, naive.guarantee) == ("approximate", "approximate")
    assert best.measured is not None and naive.measured is not None
    assert best.measured.kl_text is not None and naive.measured.kl_text is not None
    assert best.measured.kl_text < naive.measured.kl_text / 1.5


@pytest.mark.exhaustive
@pytest.mark.skipif(not (SAMPLES_DIR / "llama").is_dir(), reason="no samples")
def test_a_rotation_that_leaves_nothing_out_costs_nothing(tmp_path: Path) -> None:
    steps = [Step("norm", "layernorm"), Step("norm", "rmsnorm"), Step("hidden", "96")]  # 97 wide, in 96 directions
    result = gptkit.swap("sample:llama", tmp_path / "out", steps, dtype="float64", each_step=False)
    assert result.guarantee == "approximate" and result.measured is not None
    assert result.measured.kl < 1e-9


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def forget(*endings: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What ends so is filled up with zeros instead of a mean, or a copy."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = module._append_mean
        patch.setattr(
            module,
            "_append_mean",
            lambda name, new, axis: (
                (lambda model: module.gather(model.wide(name), module.padded(48, new), axis))
                if name.endswith(endings)
                else right(name, new, axis)
            ),
        )

    return apply


def no_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "eps_for", lambda eps, old, new: eps)


def no_ratio(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "length_ratio", lambda old, new: 1.0)


def ratio_upside_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "length_ratio", lambda old, new: (new / old) ** 0.5)


def writers_repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "padded", lambda old, new, repeat=False: np.arange(new) % old)


def readers_repeat(patch: pytest.MonkeyPatch) -> None:
    right = module.padded
    patch.setattr(module, "padded", lambda old, new, repeat=False: right(old, new, True))


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...], str]] = {
    "eps left alone": (no_eps, ("llama", "gpt2"), "60"),
    "γ left alone": (no_ratio, ("llama", "gpt2", "bloom"), "60"),
    "γ the wrong way": (ratio_upside_down, ("llama", "falcon-7b"), "60"),
    "new coordinates written to": (writers_repeat, ("llama",), "60"),
    "every copy read": (readers_repeat, ("llama", "gpt2", "bloom"), "96"),
    "the position table's mean forgotten": (forget("positions.weight"), ("gpt2",), "60"),
    "a bias' mean forgotten": (forget("o_proj.bias"), ("gpt2", "bloom"), "60"),
    "one layer's writer forgotten": (forget("1.feed_forward.down_proj.weight"), ("gpt2", "falcon-40b"), "60"),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate, models, width = MUTATIONS[name]
    sources = [saved(model, folder) for model in models]
    mutate(monkeypatch)
    for source in sources:
        caught(source, tmp_path / "out", hidden=width)


def test_what_still_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = saved("llama", folder)
    gptkit.swap(source, tmp_path / "wide", hidden="96")
    gptkit.convert(tmp_path / "wide", tmp_path / "hf", to="hf:llama")
    ids = torch.arange(CONFIGS["llama"]["vocab_size"])[None]
    with torch.inference_mode():
        one, other = (
            transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(ids).logits
            for each in (source, tmp_path / "hf")
        )
    assert (one - other).abs().max() <= 1e-5 * one.abs().max()
