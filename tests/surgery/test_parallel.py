"""Serial <-> parallel blocks: exact where a branch writes nothing, measured where both do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.covering import few
from helpers.exactness import exactly, undone
from helpers.families import CONFIGS, edited, save_hf, spec_of, zeroed
from helpers.inverses import inverse

import gptkit
from gptkit.components import Block, ModelSpec
from gptkit.errors import GptkitError, SwapRefused
from gptkit.surgery.base import Read
from gptkit.surgery.registry import Asked, Step
from gptkit.surgery.swaps import parallel as module

ATTENTION = ("attn.c_proj.weight", "attn.c_proj.bias", "o_proj.weight", "o_proj.bias", "dense.weight", "dense.bias")
FEED_FORWARD = (
    *("mlp.c_proj.weight", "mlp.c_proj.bias", "down_proj.weight", "down_proj.bias", ".w2.weight"),
    *("dense_4h_to_h.weight", "dense_4h_to_h.bias"),
)


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "qwen3", "mixtral", "falcon-rw", "falcon-serial"])
@pytest.mark.parametrize("silent", [ATTENTION, FEED_FORWARD], ids=["attention", "feed-forward"])
def test_serial_to_parallel_where_a_branch_writes_nothing(name: str, silent: tuple[str, ...], tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    zeroed(tmp_path / "hf", *silent)
    there, _ = undone(tmp_path / "hf", Step("block", "parallel"), tmp_path)
    assert all(block.parallel is True for block in there.spec.blocks)


@few(1)
@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b", "falcon-11b", "falcon-alibi-parallel"])
@pytest.mark.parametrize("silent", [ATTENTION, FEED_FORWARD], ids=["attention", "feed-forward"])
def test_parallel_to_serial_where_a_branch_writes_nothing(name: str, silent: tuple[str, ...], tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    zeroed(tmp_path / "hf", *silent)
    there, _ = undone(tmp_path / "hf", Step("block", "serial"), tmp_path)
    assert all(block.parallel is False for block in there.spec.blocks)


def test_a_norm_is_shared_where_both_are_alike(tmp_path: Path) -> None:
    save_hf(CONFIGS["falcon-40b"], tmp_path / "hf")
    with pytest.raises(SwapRefused, match=r"differ in layers 0, 1, 2: they cannot be shared") as caught:
        gptkit.swap(tmp_path / "hf", tmp_path / "out", block="parallel:shared")
    assert caught.value.hint == "--block parallel keeps both norms."

    def alike(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if "ln_mlp" in name:
                weights[name] = weights[name.replace("ln_mlp", "ln_attn")].clone()

    edited(tmp_path / "hf", alike)
    result = exactly(tmp_path / "hf", tmp_path / "out", block="parallel:shared")
    assert all(block.feed_forward_norm is None for block in result.spec.blocks)
    with pytest.raises(SwapRefused, match="parallel already"):
        gptkit.swap(tmp_path / "out", tmp_path / "again", block="parallel:shared")
    # Serial from shared norms, then parallel: both norms are there, and it is said that they are the same.
    gptkit.swap(tmp_path / "out", tmp_path / "serial", block="serial", blocks="1")
    noted = gptkit.swap(tmp_path / "serial", tmp_path / "both", block="parallel", blocks="1", measured=False)
    assert "layer 1: both norms are the same; --block parallel:shared" in noted.chain.notes[-1]


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "falcon-7b", "falcon-40b", "mixtral"])
def test_where_both_branches_write(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    to = "serial" if name.startswith("falcon") else "parallel"
    one = gptkit.swap(tmp_path / "hf", tmp_path / "one", block=to, blocks="1")
    every = gptkit.swap(tmp_path / "hf", tmp_path / "all", block=to)
    assert (one.guarantee, every.guarantee) == ("approximate", "retrained")
    assert one.measured is not None and every.measured is not None
    assert every.measured.kl > one.measured.kl > 1e-4
    assert one.chain.notes[0] == "layer 1: the feed-forward reads a different input, because both branches write"
    assert [block.parallel for block in one.spec.blocks] == [(i == 1) == (to == "parallel") for i in range(3)]
    assert one.chain.swapped[0].summary["exact_layers"] == []


def test_layers_are_looked_at_one_by_one(tmp_path: Path) -> None:
    """A bias alone is enough to write, and one silent layer is exact among others."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    zeroed(tmp_path / "hf", "h.0.attn.c_proj.weight", "h.2.attn.c_proj.weight", "h.2.attn.c_proj.bias")
    exactly(tmp_path / "hf", tmp_path / "exact", block="parallel", blocks="2")
    found = gptkit.swap(tmp_path / "hf", tmp_path / "out", block="parallel", blocks="0,2")
    assert found.guarantee == "approximate"
    assert found.chain.swapped[0].summary["exact_layers"] == [2]


def test_refusals(tmp_path: Path) -> None:
    for name, value, words in (
        ("bloom-post-norm", "parallel", "residual of layers 0, 1, 2 comes from the norm's output"),
        ("falcon-7b", "parallel", "these layers are parallel already"),
        ("gpt2", "serial", "these layers are serial already"),
        ("gpt2", "parallel:shared", "differ in layers 0, 1, 2"),
    ):
        save_hf(CONFIGS[name], tmp_path / name)
        with pytest.raises(SwapRefused, match=words) as caught:
            gptkit.swap(tmp_path / name, tmp_path / "out", block=value)
        assert caught.value.hint
        assert not (tmp_path / "out").exists()


def test_inverses() -> None:
    parallel, serial = Step("block", "parallel"), Step("block", "serial")
    assert inverse(serial, spec_of(CONFIGS["falcon-7b"])) == Step("block", "parallel:shared")
    assert inverse(Step("block", "serial", "1"), spec_of(CONFIGS["falcon-40b"])) == Step("block", "parallel", "1")
    assert inverse(parallel, spec_of(CONFIGS["falcon-7b"])) is None
    assert inverse(serial, spec_of(CONFIGS["gpt2"])) is None


# --- mistakes ---------------------------------------------------------------------------------------------------------


def attention_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_same_either_way", lambda spec, asked, layer: True)


def weights_alone(patch: pytest.MonkeyPatch) -> None:
    right = Read.zero
    patch.setattr(Read, "zero", lambda self, *names: right(self, *(n for n in names if n.endswith("weight"))))


def norm_not_copied(patch: pytest.MonkeyPatch) -> None:
    right = module._copied_norm

    def other(block: object, path: str) -> object:
        found = right(block, path)  # type: ignore[arg-type]
        return {name: module.Moved(how.sources, lambda array: array[::-1]) for name, how in found.items()}

    patch.setattr(module, "_copied_norm", other)


def norm_of_another_eps(patch: pytest.MonkeyPatch) -> None:
    right = module._rearranged

    def other(spec: ModelSpec, asked: Asked, changed: Any, blocks: dict[int, Block], *others: Any) -> object:
        changed_eps = {
            layer: b.replaced(feed_forward_norm=msgspec.structs.replace(b.feed_forward_norm, eps=1e-2))
            for layer, b in blocks.items()
        }
        return right(spec, asked, changed, changed_eps, *others)

    patch.setattr(module, "_rearranged", other)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, tuple[str, ...]]] = {
    "attention taken for silent": (attention_unseen, "gpt2", "parallel", ()),
    "its bias not looked at": (weights_alone, "gpt2", "parallel", ("attn.c_proj.weight",)),
    "the norm copied wrongly": (norm_not_copied, "falcon-7b", "serial", ATTENTION),
    "another eps": (norm_of_another_eps, "falcon-7b", "serial", ATTENTION),
}


@few(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_not_published(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, model, value, silent = MISTAKES[name]
    save_hf(CONFIGS[model], tmp_path / "hf", torch.float32)
    if silent:
        zeroed(tmp_path / "hf", *silent)
    mutate(monkeypatch)
    with pytest.raises(GptkitError, match="the swap is not exact on this checkpoint"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", block=value)
    assert not (tmp_path / "out").exists()
