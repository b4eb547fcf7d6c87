"""Biases dropped: exact where they are zero or where softmax does not see them, measured where not."""

from pathlib import Path

import pytest
import torch
from helpers.covering import few
from helpers.exactness import exactly, is_caught
from helpers.families import CONFIGS, save_hf, zeroed

import gptkit
from gptkit.components import Attention
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.swaps import folds as module


@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-rw"])
def test_the_keys_bias_is_not_seen_without_rotary(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    done = exactly(tmp_path / "hf", tmp_path / "out", drop="key.bias")
    assert not done.chain.notes
    model = gptkit.load(tmp_path / "out", torch.float64)
    assert all(not block.attention.k_proj.bias.any() for block in model.blocks)
    assert all(block.attention.q_proj.bias.any() for block in model.blocks)


@pytest.mark.parametrize("name", ["qwen2", "falcon-11b-bias"])
def test_with_rotary_it_is(name: str, tmp_path: Path) -> None:
    config = CONFIGS.get(name, {**CONFIGS["falcon-40b"]})
    save_hf(config, tmp_path / "hf")
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", drop="key.bias")
    assert done.guarantee == "approximate" and done.measured is not None and done.measured.kl > 1e-6
    assert "not zero, for example blocks.0.attention.k_proj.bias" in done.chain.notes[0]


@few(1)
@pytest.mark.parametrize(
    ("name", "what", "endings"),
    [
        ("qwen2", "biases", ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        ("gpt2", "down.bias", ("mlp.c_proj.bias",)),
        ("gpt2", "output.bias", ("attn.c_proj.bias",)),
        ("gpt2", "norm.bias", ("ln_1.bias", "ln_2.bias", "ln_f.bias")),
        ("bloom", "norm.bias", ("layernorm.bias", "ln_f.bias")),
    ],
)
def test_zero_biases_leave_without_a_trace(name: str, what: str, endings: tuple[str, ...], tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    zeroed(tmp_path / "hf", *endings)
    exactly(tmp_path / "hf", tmp_path / "out", drop=what)
    with pytest.raises(SwapRefused, match="has no such bias"):
        gptkit.swap(tmp_path / "out", tmp_path / "again", drop=what)


def test_one_flag_for_three_biases(tmp_path: Path) -> None:
    """Only once all of q, k and v have none does the flag go."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    zeroed(tmp_path / "hf", "attn.c_attn.bias")
    gptkit.swap(tmp_path / "hf", tmp_path / "out", drop="key.bias")
    attention = gptkit.open_checkpoint(tmp_path / "out").spec.blocks[0].attention
    assert isinstance(attention, Attention) and not attention.qkv_bias and attention.output_bias
    save_hf(CONFIGS["gpt2"], tmp_path / "random")
    gptkit.swap(tmp_path / "random", tmp_path / "out2", drop="value.bias", blocks="1")
    attention = gptkit.open_checkpoint(tmp_path / "out2").spec.blocks[1].attention
    assert isinstance(attention, Attention) and attention.qkv_bias
    model = gptkit.load(tmp_path / "out2")
    assert [bool(block.attention.v_proj.bias.any()) for block in model.blocks] == [True, False, True]


def test_refusals(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    with pytest.raises(SwapRefused) as caught:
        gptkit.swap(tmp_path / "hf", tmp_path / "out", drop="head.bias")
    assert caught.value.hint == (
        "Possible here: norm.bias, query.bias, key.bias, value.bias, output.bias, up.bias, down.bias, biases."
    )
    with pytest.raises(UsageError, match="--drop 'all' is unknown"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", drop="all")
    with pytest.raises(SwapRefused, match="has no such bias"):
        gptkit.swap("sample:llama", tmp_path / "out", drop="biases")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def any_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_shift_of_scores", lambda spec, name: True)


def test_what_is_not_zero_is_not_called_exact(tmp_path: Path) -> None:
    for what, name in (
        ("value.bias", "gpt2"),
        ("key.bias", "qwen2"),
        ("norm.bias", "falcon-7b"),
        ("down.bias", "bloom"),
    ):
        is_caught("any", {"any": (any_bias, (name,))}, {"drop": what}, tmp_path / what)
