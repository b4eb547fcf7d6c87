"""Heads, units and experts that go by what they do on a text: the criteria are their papers', what contributes nothing
goes first, and where nothing at all comes out of it, or nobody ever chooses it, exactly.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.covering import exhaustive
from helpers.edited import damaged
from helpers.exactness import exactly
from helpers.families import CONFIGS, save_hf, spec_of

import gptkit
from gptkit.components import MixtureOfExperts
from gptkit.converter.manifest import manifest_of
from gptkit.errors import SwapRefused
from gptkit.surgery.base import StoredModel
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.pruning import expert_saliency, head_activity, unit_activity
from gptkit.surgery.fits.text import read_text
from gptkit.surgery.layerwise import experts


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, with one head and two units of each layer that all but nothing comes out of."""
    folder = tmp_path_factory.mktemp("pruned")
    gptkit.convert("sample:gpt2", folder / "local")

    def quiet(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            at = f"blocks.{layer}"
            head = slice(28 * (layer % 4), 28 * (layer % 4) + 28)
            for part in ("weight", "bias"):
                tensors[f"{at}.attention.v_proj.{part}"][head] *= 2**-8
                tensors[f"{at}.feed_forward.up_proj.{part}"][[3, 10 + layer]] *= 2**-8

    return damaged(folder / "local", folder / "quiet", quiet)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LLaMA sample with 4 experts that differ, of which the third answers nothing."""
    folder = tmp_path_factory.mktemp("mixture")
    gptkit.swap("sample:llama", folder / "moe", mlp="moe:4x2", measured=False)

    def parted(tensors: dict[str, torch.Tensor]) -> None:
        for name, each in tensors.items():
            if ".experts." in name and "down_proj" in name:
                each *= (1, 0.5, 0, 0.75)[int(name.split(".experts.")[1][0])]

    return damaged(folder / "moe", folder / "parted", parted)


def calibration(source: str | Path) -> tuple[StoredModel, Calibration]:
    opened = gptkit.open_checkpoint(source)
    return StoredModel(opened), Calibration(read_text(opened, None, 1024), opened.spec)


@exhaustive
def test_what_is_all_but_silent_goes(gpt2: Path, tmp_path: Path) -> None:
    heads = gptkit.swap(gpt2, tmp_path / "heads", heads="3:active")
    record = heads.chain.swapped[0].summary
    assert heads.guarantee == "approximate" and record["by"] == "activity"
    assert record["kept"] == {str(i): [head for head in range(4) if head != i % 4] for i in range(4)}
    assert heads.measured is not None and heads.measured.kl is not None and heads.measured.kl < 1e-4
    units = gptkit.swap(gpt2, tmp_path / "units", intermediate="446:active")
    kept = units.chain.swapped[0].summary["kept"]
    assert kept["blocks.1.feed_forward"] == "0-2,4-10,12-447"
    assert units.measured is not None and units.measured.kl is not None and units.measured.kl < 1e-4
    # The choice is in the manifest, and what stays, stays as it was.
    assert manifest_of(tmp_path / "units")["swap"]["steps"][0]["kept"] == kept
    before, after = (gptkit.open_checkpoint(each) for each in (gpt2, tmp_path / "units"))
    name, stay = "blocks.0.feed_forward.up_proj.weight", [i for i in range(448) if i not in (3, 10)]
    assert np.array_equal(before.tensor(name)[0][stay], after.tensor(name)[0])


def test_what_is_silent_goes_exactly(gpt2: Path, tmp_path: Path) -> None:
    gptkit.swap(gpt2, tmp_path / "more", heads="5", intermediate="460", measured=False)
    exactly(tmp_path / "more", tmp_path / "heads", heads="4:active")
    exactly(tmp_path / "more", tmp_path / "units", intermediate="448:active")


@torch.no_grad()
def test_activity_is_a_norm_a_sequence() -> None:
    """Of all heads and units of a layer, by whole modules on the same windows (Muralidharan et al. 2407.14679)."""
    model, text = calibration("sample:gpt2")
    module, seen = gptkit.load("sample:gpt2", torch.float32), {}
    for name in ("attention.o_proj", "feed_forward.down_proj"):
        inner = module.blocks[2].get_submodule(name)
        inner.register_forward_hook(lambda _, args, __, name=name: seen.__setitem__(name, args[0]))
    module(text.ids)
    heads = seen["attention.o_proj"].unflatten(-1, (4, 28)).double().norm(dim=(1, 3)).mean(dim=0)
    np.testing.assert_allclose(head_activity(model, text, {2: 4})[2], heads, rtol=1e-5)
    units = seen["feed_forward.down_proj"].double().norm(dim=1).mean(dim=0)
    inner = list(experts(model.spec.blocks[2], 2))
    np.testing.assert_allclose(unit_activity(model, text, inner)["blocks.2.feed_forward"], units, rtol=1e-5)


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_expert_that_answers_nothing_goes(mixture: Path, tmp_path: Path) -> None:
    done = gptkit.swap(mixture, tmp_path / "out", experts="3")
    record = done.chain.swapped[0].summary
    assert done.guarantee == "approximate" and record["by"] == "REAP"
    assert set(map(tuple, record["kept"].values())) == {(0, 1, 3)}
    assert done.measured is not None and done.measured.kl is not None and done.measured.kl > 1e-6
    after = gptkit.open_checkpoint(tmp_path / "out")
    assert after.spec.blocks[0].feed_forward == msgspec.structs.replace(
        gptkit.open_checkpoint(mixture).spec.blocks[0].feed_forward, experts=3
    )
    for new, old in enumerate((0, 1, 3)):
        names = (f"blocks.1.feed_forward.experts.{each}.gate_proj.weight" for each in (new, old))
        mine, theirs = (
            gptkit.open_checkpoint(f).tensor(n)[0] for f, n in zip((tmp_path / "out", mixture), names, strict=True)
        )
        assert np.array_equal(mine, theirs)


@torch.no_grad()
def test_saliency_is_the_mean_of_weight_times_norm(mixture: Path) -> None:
    model, text = calibration(mixture)
    found = expert_saliency(model, text, {0, 3})
    module, seen = gptkit.load(mixture, torch.float32), {}
    module.blocks[3].feed_forward.register_forward_hook(lambda _, args, __: seen.update(x=args[0].flatten(0, 1)))
    module(text.ids)
    inner: Any = module.blocks[3].feed_forward
    best, chosen = torch.softmax(inner.router(seen["x"]), dim=-1).topk(2, dim=-1)
    weights = best / best.sum(dim=-1, keepdim=True)
    for number, expert in enumerate(inner.experts):
        given = [(float(w[c == number]), x) for w, c, x in zip(weights, chosen, seen["x"], strict=True) if number in c]
        assert given
        mean = sum(weight * float(expert(x[None]).norm()) for weight, x in given) / len(given)
        assert found[3][number] == pytest.approx(mean, rel=1e-4, abs=1e-9)
    assert found[0][2] == found[3][2] == 0


def test_copies_go_exactly(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-3"], tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "moe", mlp="moe:6x2", measured=False)
    spec = exactly(tmp_path / "moe", tmp_path / "out", experts="4").spec
    assert {block.feed_forward.experts for block in spec.blocks} == {4}


def biased(config: dict[str, Any]) -> bool:
    found = [block.feed_forward for block in spec_of(config).blocks]
    return any(isinstance(each, MixtureOfExperts) and each.choice_bias and each.groups == 1 for each in found)


BIASED = sorted(name for name, config in CONFIGS.items() if config.get("model_type") == "glm4_moe" and biased(config))


def test_an_expert_that_is_never_chosen_goes_exactly(tmp_path: Path) -> None:
    """The bias of the choice keeps it out, whatever the token."""
    save_hf(CONFIGS[BIASED[0]], tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    count = max(getattr(b.feed_forward, "experts", 0) for b in spec_of(CONFIGS[BIASED[0]]).blocks)

    def starve(by: float) -> Path:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name, each in tensors.items():
                if name.endswith("choice.bias"):
                    each[:] = 0
                    each[1] = -by

        return damaged(tmp_path / "local", tmp_path / f"by-{by}", change)

    done = exactly(starve(1.0), tmp_path / "out", experts=str(count - 1))
    for kept in done.chain.swapped[0].summary["kept"].values():
        assert 1 not in kept and len(kept) == count - 1
    with pytest.raises(Exception, match="text"):  # by less than a score may differ it is not certain
        gptkit.swap(starve(0.9), tmp_path / "no", experts=str(count - 1))


def test_what_cannot_be_fewer(mixture: Path, tmp_path: Path) -> None:
    for count, why in (
        ("1", "4 experts, 2 per token, so it cannot keep 1"),
        ("4", "it cannot keep 4"),
        ("9", "cannot keep 9"),
    ):
        with pytest.raises(SwapRefused, match=why) as caught:
            gptkit.swap(mixture, tmp_path / "out", experts=count)
        assert caught.value.hint == "Possible: 2, 3."
    with pytest.raises(SwapRefused, match="none of these layers has experts"):
        gptkit.swap("sample:llama", tmp_path / "out", experts="2")
    save_hf(CONFIGS["deepseek_v3"], tmp_path / "grouped")
    mixed = spec_of(CONFIGS["deepseek_v3"]).blocks[-1].feed_forward
    assert isinstance(mixed, MixtureOfExperts) and mixed.groups == 4
    with pytest.raises(SwapRefused, match="and 4 groups"):
        gptkit.swap(tmp_path / "grouped", tmp_path / "out", experts=str(mixed.experts - 1))
