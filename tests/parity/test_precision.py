"""A component that the candidate computes less precisely than the reference, which the errors of bf16 logits hide."""

from pathlib import Path

import pytest
import torch
from helpers.command import call
from helpers.edited import setting, with_spec
from helpers.families import CONFIGS, save_hf

import gptkit
from gptkit.parity.verify import IMPRECISE, verify


def converted(name: str, folder: Path, **fields: bool) -> tuple[Path, Path]:
    """Save a random model, and convert it to gptkit's own format with other rounding fields. Return both folders."""
    save_hf(CONFIGS[name], folder / "hf", torch.float32)
    gptkit.convert(folder / "hf", folder / "local")
    return folder / "hf", with_spec(folder / "local", folder / "changed", setting(**fields))


def test_a_router_with_rounded_weights_is_named(tmp_path: Path) -> None:
    """transformers keeps this router's weights in fp32. With rounded ones, some tokens go to other experts."""
    original, rounded = converted("ernie4_5_moe", tmp_path, wide_router=False)
    result = verify(original, rounded, dtype="bfloat16", mutations=False)
    assert result.noise is not None
    assert result.noise.explains  # the logits alone do not show it
    theirs, ours = result.noise.errors["bfloat16"]
    assert ours < IMPRECISE / 2 * theirs
    assert result.imprecise is not None
    assert result.imprecise.name == "layer 1 feed-forward router"
    assert result.imprecise.relative > 10 * result.imprecise.allowed
    assert (result.verdict, result.passed, result.exit_code) == ("different", False, 3)

    options = ("--dtype", "bfloat16", "--no-mutations", "--html", str(tmp_path / "page.html"))
    run = call("verify", str(original), str(rounded), *options)
    assert run.exit_code == 3
    said = " ".join(run.stdout.split())
    assert "place layer 1 feed-forward router: gptkit computes it less precisely than transformers" in said
    assert "layer 1 feed-forward router less precisely" in (tmp_path / "page.html").read_text()


def test_in_float32_both_are_the_same(tmp_path: Path) -> None:
    original, rounded = converted("ernie4_5_moe", tmp_path, wide_router=False)
    result = verify(original, rounded, mutations=False)
    assert (result.verdict, result.imprecise) == ("identical", None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("mixtral", {"wide_router": True}, id="a router that is more precise"),
        pytest.param("mixtral", {"rounded": True}, id="weights of experts rounded elsewhere"),
        pytest.param("qwen2", {"fused": True}, id="one product for q, k and v"),
    ],
)
def test_other_rounding_of_the_same_precision_is_equal(name: str, fields: dict[str, bool], tmp_path: Path) -> None:
    original, other = converted(name, tmp_path, **fields)
    result = verify(original, other, dtype="bfloat16", mutations=False)
    assert result.verdict != "different"
    assert result.imprecise is None
