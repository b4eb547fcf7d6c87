"""Dense <-> mixture of experts: copies and parts are exact, and so is the way back until training parts them."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from helpers.covering import examples, few
from helpers.exactness import Mutation, exactly, is_caught, undone
from helpers.families import CONFIGS, GPT2, LLAMA, edited, save_hf, spec_of
from helpers.inverses import inverse
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.components import MixtureOfExperts
from gptkit.errors import GptkitError, SwapRefused, UsageError
from gptkit.surgery.fits.text import PLAY
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import mlp as module


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "llama-3", "qwen3", "falcon-7b", "falcon-40b"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_copies_there_and_back(name: str, stored: torch.dtype, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", stored)
    result, back = undone(tmp_path / "hf", Step("mlp", "moe:4x2"), tmp_path)
    assert back.chain.steps == (Step("mlp", "dense"),)
    assert all(isinstance(block.feed_forward, MixtureOfExperts) for block in result.spec.blocks)
    after = tensors_of(tmp_path / "there")
    router = after["blocks.0.feed_forward.router.weight"]
    assert {tensor.dtype for tensor in after.values()} == {stored}
    assert router.shape == (4, result.spec.hidden_size) and len(router.unique()) > 40
    assert not torch.equal(router, after["blocks.1.feed_forward.router.weight"])


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "falcon-7b", "apertus"])
@pytest.mark.parametrize("value", ["moe:4x4:split", "moe:3x3:split"])
def test_parts_there_and_back(name: str, value: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    spec = gptkit.open_checkpoint(tmp_path / "hf").spec
    result = exactly(tmp_path / "hf", tmp_path / "there", mlp=value)
    count = int(value[4])
    assert result.spec.blocks[0].feed_forward.intermediate_size * count == spec.blocks[0].feed_forward.intermediate_size
    step = inverse(Step("mlp", value), spec)
    assert step is not None
    assert exactly(tmp_path / "there", tmp_path / "back", step).spec == spec
    before, after = (gptkit.load(tmp_path / folder, torch.float64).state_dict() for folder in ("hf", "back"))
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-15, atol=0)


@settings(max_examples=examples(8), deadline=None)
@given(
    gated=st.booleans(),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    top=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_any_numbers(gated: bool, sizes: tuple[int, int], top: int, seed: int) -> None:
    """E experts of any width, any number of them taken, any router."""
    count, width = sizes
    base: dict[str, Any] = (
        {**LLAMA, "hidden_size": 24, "num_hidden_layers": 1, "mlp_bias": True, "intermediate_size": count * width}
        if gated
        else {**GPT2, "n_embd": 24, "n_layer": 1, "n_inner": count * width, "n_positions": 32}
    )
    with TemporaryDirectory() as parent:
        source = Path(parent) / "hf"
        save_hf(base, source, seed=seed)
        copies = Step("mlp", f"moe:{count}x{min(top, count)}", settings={"seed": seed})
        exactly(source, Path(parent) / "copies", copies)
        exactly(source, Path(parent) / "parts", mlp=f"moe:{count}x{count}:split")


def test_the_seed_is_recorded_and_draws_the_same(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-3"], tmp_path / "hf")
    routers = []
    for index, seed in enumerate((0, 0, 5)):
        step = Step("mlp", "moe:8x2", settings={"seed": seed})
        result = gptkit.swap(tmp_path / "hf", tmp_path / f"{index}", [step], measured=False)
        assert result.chain.swapped[0].summary["seed"] == seed
        routers.append(tensors_of(tmp_path / f"{index}")["blocks.1.feed_forward.router.weight"])
    assert torch.equal(routers[0], routers[1]) and not torch.equal(routers[0], routers[2])
    source = tensors_of(tmp_path / "hf")["model.layers.1.mlp.gate_proj.weight"]
    assert bool(torch.isin(routers[0], source).all())
    assert 0.8 < (routers[0].std() / source.std()).item() < 1.2
    for wrong in (-1, "0", True):
        with pytest.raises(UsageError, match="the router's seed is"):
            gptkit.swap(tmp_path / "hf", tmp_path / "out", [Step("mlp", "moe:8x2", settings={"seed": wrong})])


def test_a_llama_of_experts_is_a_mixtral(tmp_path: Path) -> None:
    save_hf({**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 2}, tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "moe", mlp="moe:4x2")
    gptkit.convert(tmp_path / "moe", tmp_path / "mixtral", "hf:mixtral")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("hf", "mixtral")
    )
    assert type(after).__name__ == "MixtralForCausalLM" and after.config.num_local_experts == 4
    ids = torch.arange(90)[None]
    with torch.inference_mode():
        a, b = before(ids).logits, after(ids).logits
    assert ((a - b).abs().max() / a.abs().max()).item() < 1e-5


def test_some_layers(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    exactly(tmp_path / "hf", tmp_path / "one", mlp="moe:2x1", blocks="1")
    spec = gptkit.open_checkpoint(tmp_path / "one").spec
    assert [module.is_mixture(block) for block in spec.blocks] == [False, True, False]
    result = exactly(tmp_path / "one", tmp_path / "all", mlp="moe:3x3")
    assert result.chain.swapped[0].summary["layers"] == [0, 2]
    with pytest.raises(SwapRefused, match="mixtures of experts already"):
        gptkit.swap(tmp_path / "all", tmp_path / "again", mlp="moe:3x3")
    assert inverse(Step("mlp", "moe:3x3"), spec) is None


def test_experts_that_differ(tmp_path: Path) -> None:
    """Their mean, by how much the router gives them: known on the bundled play, else a text is asked for."""
    save_hf(CONFIGS["mixtral"], tmp_path / "hf")
    with pytest.raises(UsageError, match="needs a text to fit on"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", mlp="dense")
    mean = gptkit.swap(tmp_path / "hf", tmp_path / "mean", mlp="dense", approximate=True)
    assert mean.guarantee == "retrained" and "the experts differ" in mean.chain.notes[0]
    one = gptkit.swap(tmp_path / "hf", tmp_path / "one", mlp="dense", approximate=True, blocks="0")
    assert one.guarantee == "approximate"
    before, after = (gptkit.load(tmp_path / name, torch.float64) for name in ("hf", "mean"))
    experts = before.blocks[0].feed_forward.experts
    wanted = torch.stack([each.up_proj.weight for each in experts]).mean(dim=0)
    torch.testing.assert_close(after.blocks[0].feed_forward.up_proj.weight, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive
def test_the_router_says_how_much_each_counts(tmp_path: Path) -> None:
    """An expert that the router never takes counts for nothing; in the plain mean it does."""
    gptkit.swap("sample:llama", tmp_path / "moe", mlp="moe:4x1", blocks="2", dtype="float32", measured=False)
    rare = "blocks.2.feed_forward.experts.{}.down_proj.weight"

    def alter(weights: dict[str, torch.Tensor]) -> None:
        # The mean of three logits is never the largest one. So the router never takes expert 3, which is broken here.
        router = weights["blocks.2.feed_forward.router.weight"]
        router[3] = router[:3].mean(dim=0)
        weights[rare.format(3)] *= -3

    edited(tmp_path / "moe", alter)
    fitting = {"calibrate": PLAY, "calibrate_tokens": 512}
    shared, plain = (
        gptkit.swap(tmp_path / "moe", tmp_path / f"{naive}", mlp="dense", approximate=naive, **fitting)
        for naive in (False, True)
    )
    assert shared.guarantee == plain.guarantee == "approximate"
    assert shared.measured is not None and plain.measured is not None
    assert shared.measured.kl < plain.measured.kl


def test_weights_that_do_not_sum_to_one() -> None:
    """Experts that are alike are one only if their weights sum to 1."""
    mixture = spec_of(CONFIGS["mixtral"]).blocks[0].feed_forward
    assert isinstance(mixture, MixtureOfExperts) and module.weights_sum_to_one(mixture)
    loose = module.replace(mixture, normalise=False)
    assert not module.weights_sum_to_one(loose)
    assert module.weights_sum_to_one(module.replace(loose, top_k=loose.experts))


REFUSALS = [
    ("gpt2", "dense", "these feed-forwards are dense already"),
    ("mixtral", "moe:4x2", "mixtures of experts already"),
    ("gpt2", "moe:2x3", "3 of 2 experts per token"),
    ("gpt2", "moe:2x0", "0 of 2 experts per token"),
    ("gpt2", "moe:1025x1", "1 of 1025 experts per token is not possible: give 1 to 1024"),
    ("gpt2", "moe:5x5:split", "the width 192 is not divisible into 5 equal parts"),
    ("gpt2", "moe:4x2:split", "into 4 experts and uses only 2 of them for a token"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSALS)
def test_refusals(name: str, value: str, words: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    with pytest.raises(SwapRefused, match=words) as caught:
        gptkit.swap(tmp_path / "hf", tmp_path / "out", mlp=value)
    assert caught.value.hint
    if "equal parts" in words:
        assert caught.value.hint.startswith("Possible: 2, 3, 4, 6, 8, 12")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["moe:ax2", "moe:8x", "moe:8", "moe:8x2:cut", "moe:-1x1"])
def test_values_that_are_none(value: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    with pytest.raises(UsageError, match=r"expected moe:ExK|is unknown"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", mlp=value)


def test_examples() -> None:
    def tried(name: str) -> list[str]:
        return [value for swap in module.SWAPS for value in swap.examples(spec_of(CONFIGS[name]))]

    assert tried("gpt2") == ["moe:2x2:split", "moe:4x2"]
    assert tried("mixtral") == []


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def one_altered(patch: pytest.MonkeyPatch) -> None:
    right = module._copies

    def other(path: str, dense: Any, count: int) -> Any:
        turned = module.Moved(f"{path}.up_proj.weight", lambda array: array[::-1])
        return right(path, dense, count) | {f"{path}.experts.{count - 1}.up_proj.weight": turned}

    patch.setattr(module, "_copies", other)


def not_normalised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_NORMALISED", False)


COPIES: dict[str, Mutation] = {
    "one expert is another": (one_altered, ("gpt2", "llama")),
    "weights that do not sum to 1": (not_normalised, ("gpt2", "llama", "falcon-7b")),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COPIES)
def test_wrong_copies_are_not_published(name: str, tmp_path: Path) -> None:
    is_caught(name, COPIES, {"mlp": "moe:4x2"}, tmp_path)


def no_factor(patch: pytest.MonkeyPatch) -> None:
    right = module._weighed
    patch.setattr(module, "_weighed", lambda name, cut, factor: right(name, cut, 1))


def other_columns(patch: pytest.MonkeyPatch) -> None:
    right = module._weighed
    patch.setattr(module, "_weighed", lambda name, cut, factor: right(name, slice(0, cut.stop - cut.start), factor))


def bias_too(patch: pytest.MonkeyPatch) -> None:
    right = module._part

    def other(path: str, expert: Any, index: int, count: int) -> Any:
        found, name = right(path, expert, index, count), "down_proj.bias"
        scaled = module.Computed(lambda model: model.wide(f"{path}.{name}") * count)
        return found | {f"{path}.experts.{index}.{name}": scaled}

    patch.setattr(module, "_part", other)


def router_of_ones_and_zeros(patch: pytest.MonkeyPatch) -> None:
    """A router that prefers one part."""
    right = module.Filled

    def other(shape: tuple[int, ...], value: float, like: str) -> Any:
        return module.Computed(lambda model: np.eye(*shape)) if value == 0 else right(shape, value, like)

    patch.setattr(module, "Filled", other)


PARTS: dict[str, Mutation] = {
    "not E times as large": (no_factor, ("gpt2", "llama")),
    "the columns of the first part": (other_columns, ("gpt2", "llama")),
    "the bias E times as large": (bias_too, ("gpt2", "llama")),
    "a router that prefers one": (router_of_ones_and_zeros, ("gpt2", "llama")),
}


@few(1)
@pytest.mark.parametrize("name", PARTS)
def test_wrong_parts_are_not_published(name: str, tmp_path: Path) -> None:
    is_caught(name, PARTS, {"mlp": "moe:4x4:split"}, tmp_path)


def taken_for_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "experts_alike", lambda spec, asked, layer: True)


def taken_for_even(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_all_weighed_alike", lambda spec, asked, layer: True)


def not_divided(patch: pytest.MonkeyPatch) -> None:
    right = module._joined
    patch.setattr(module, "_joined", lambda names, divisor: right(names, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutate", [taken_for_alike, taken_for_even, not_divided])
def test_a_wrong_way_back_is_not_published(mutate: Callable[..., None], tmp_path: Path) -> None:
    source = tmp_path / "hf"
    save_hf(CONFIGS["gpt2" if mutate is not_divided else "mixtral"], source)
    if mutate is not_divided:
        gptkit.swap(source, tmp_path / "parts", mlp="moe:4x4:split", measured=False)
        source = tmp_path / "parts"
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
            gptkit.swap(source, tmp_path / "out", mlp="dense")
    assert not (tmp_path / "out").exists()
