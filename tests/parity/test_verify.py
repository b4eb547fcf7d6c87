"""verify: right models pass to the last bit, other ways to round pass as equal, and damage of every kind is caught."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.command import call
from helpers.covering import few, rest_slow, slow_unless_new
from helpers.edited import Tensors, damaged, exchange, exit_code, pairs, scale, setting, with_spec
from helpers.families import CONFIGS, REPRESENTATIVES, VARIANTS, Variant, save_hf

import gptkit
from gptkit.architectures import ARCHITECTURES
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.resolve import SAMPLES
from gptkit.errors import CannotExpress, CheckpointError, GptkitError, InvalidInput, UsageError
from gptkit.modules import layers
from gptkit.parity import stored
from gptkit.parity import verify as module
from gptkit.parity.card import card
from gptkit.parity.compare import compare, kl_divergence, largest_gap, mean_gap
from gptkit.parity.verify import IMPRECISE, Noise, Verification, verify

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"

# Shapes that let damage be told: as many key-value heads as heads, gate and up alike, two layers at least.
EQUAL_HEADS = {**CONFIGS["llama-2"], "num_hidden_layers": 2}
TINY: dict[str, dict[str, Any]] = {**CONFIGS, "equal-heads": EQUAL_HEADS}


unscored: Callable[..., Verification] = partial(verify, mutations=False)
"""For what is no question to mistakes made on purpose, which take longer than all the rest."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A randomised checkpoint of a tiny config as HF files, and converted to gptkit's format; made once."""
    return pairs(TINY, tmp_path_factory)


# --- what is right passes ---------------------------------------------------------------------------------------------


@few(2)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_are_identical(sample: str, dtype: str) -> None:
    result = verify(f"sample:{sample}", dtype=dtype)
    assert (result.verdict, result.passed, result.noise) == ("identical", True, None)
    assert result.bytes is not None and result.bytes.compared > 20 and not result.bytes.different
    assert sum(prompt.positions for prompt in result.prompts) > 500
    assert not any("no tokenizer" in note for note in result.notes)
    assert any(prompt.name.startswith("KING") for prompt in result.prompts)


IN_BOTH = [
    pytest.param(*(variant, dtype), id=f"{variant}-{dtype}", marks=slow_unless_new(variant.name))
    for variant in VARIANTS
    for dtype in ("float32", "bfloat16")
]


@few(4)
@pytest.mark.parametrize(("variant", "dtype"), IN_BOTH)
def test_every_variant_is_identical(variant: Variant, dtype: str, tmp_path: Path) -> None:
    save_hf(variant.config, tmp_path / "hf")
    # Mistakes are tried in fp64, whatever the dtype.
    check = verify if variant.representative and dtype == "float32" else unscored
    result = check(tmp_path / "hf", dtype=dtype)
    assert (result.verdict, result.passed, result.dtype) == ("identical", True, dtype)
    assert any("no tokenizer" in note for note in result.notes)
    assert len(result.prompts) >= 6


@few(1)
@pytest.mark.parametrize("family", rest_slow(ARCHITECTURES))
def test_every_family_stored_in_bf16_and_converted(family: str, tmp_path: Path) -> None:
    save_hf(REPRESENTATIVES[family].config, tmp_path / "hf", torch.bfloat16)
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    for attention in ARCHITECTURES[family].reference(gptkit.open_checkpoint(tmp_path / "hf").spec):
        result = unscored(tmp_path / "hf", tmp_path / "local", dtype="bfloat16", attention=attention)
        assert (result.verdict, result.passed, result.attention) == ("identical", True, attention)
        assert result.bytes is not None and result.bytes.compared > 10 and not result.bytes.different
    alone = unscored(tmp_path / "local")  # transformers gets it converted back
    assert (alone.verdict, alone.passed) == ("identical", True)


@few(1)
@pytest.mark.parametrize("family", rest_slow(ARCHITECTURES))
def test_fp64_is_equal_though_transformers_keeps_parts_of_it_in_fp32(
    family: str, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    hf, _ = pair(REPRESENTATIVES[family].name)
    result = unscored(hf, dtype="float64")
    assert result.verdict in ("identical", "equal")
    assert result.passed


@few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_number_of_fp64_that_transformers_makes_without_a_dtype(
    stream: bool, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """XGLM's mask, wherever fp64 is asked for or is what a difference is measured in."""
    hf, local = pair("xglm")
    assert unscored(hf, dtype="float64", stream=stream).passed
    bad = with_spec(local, tmp_path / "bad", setting(activation="relu"))
    assert unscored(hf, bad, stream=stream).verdict == "different"
    assert torch.get_default_dtype() == torch.float32


WAYS_TO_ROUND = [
    ("gpt2", {"arithmetic": "linear"}),
    ("gpt2", {"arithmetic": "matmul_add"}),
    ("gpt2", {"fused": False}),
    ("gpt2", {"softmax": "float32"}),
    ("gpt2", {"activation": "gelu_tanh"}),
    ("bloom", {"activation": "gelu_new"}),
    ("falcon-rw", {"arithmetic": "linear"}),
    ("falcon-40b", {"kv_expansion": "repeat"}),
    ("llama", {"cast": "after_weight"}),
    ("qwen3", {"fused": True}),
]


@few(2)
@pytest.mark.parametrize(("name", "fields"), WAYS_TO_ROUND, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_way_to_round_is_equal(
    name: str, fields: dict[str, Any], dtype: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    hf, local = pair(name)
    result = verify(hf, with_spec(local, tmp_path / "other", setting(**fields)), dtype=dtype)
    assert result.verdict in ("identical", "equal"), result.noise
    assert result.passed
    assert result.bytes is not None and result.bytes.required and not result.bytes.different
    assert any(note.startswith("the architectures differ") and str(next(iter(fields))) in note for note in result.notes)


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_exact_swaps_are_equal_in_every_dtype(name: str, stored: torch.dtype, tmp_path: Path) -> None:
    save_hf(TINY[name], tmp_path / "hf", stored)
    gptkit.swap(tmp_path / "hf", tmp_path / "rms", norm="rmsnorm", measured=False)
    gptkit.swap(tmp_path / "hf", tmp_path / "naive", norm="rmsnorm", approximate=True, measured=False)
    for dtype in ("float32", "bfloat16", "float64"):
        result = unscored(tmp_path / "hf", tmp_path / "rms", dtype=dtype)
        assert (result.verdict, result.passed) == ("equal", True), result.noise
        assert result.noise is not None
        for theirs, ours in result.noise.errors.values():
            assert ours <= IMPRECISE / 2 * theirs
    result = unscored(tmp_path / "hf", tmp_path / "naive", dtype="bfloat16")
    assert (result.verdict, result.passed) == ("different", False)


@few(1)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_alignment_in_the_file_does_not_count(stored: torch.dtype, tmp_path: Path) -> None:
    """transformers computes where the tensors lie in the mapped file, and fp32 products round by that."""
    save_hf(CONFIGS["gpt2-by-layer"], tmp_path / "hf", stored)
    tensors = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    for padding in range(0, 64, 8):
        metadata = {"format": "pt", "padding": "x" * padding}
        safetensors.torch.save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata)
        assert unscored(tmp_path / "hf").verdict == "identical"


# --- what is wrong does not -------------------------------------------------------------------------------------------

B0, B1 = "blocks.0.", "blocks.1."
DAMAGE: dict[str, tuple[str, Callable[[Tensors], None], set[str]]] = {
    "q and k exchanged": (
        "equal-heads",
        exchange(B0 + "attention.q_proj.weight", B0 + "attention.k_proj.weight"),
        {B0 + "attention.q_proj.weight", B0 + "attention.k_proj.weight"},
    ),
    "gate and up exchanged": (
        "equal-heads",
        exchange(B1 + "feed_forward.gate_proj.weight", B1 + "feed_forward.up_proj.weight"),
        {B1 + "feed_forward.gate_proj.weight", B1 + "feed_forward.up_proj.weight"},
    ),
    "a tensor of another layer": (
        "mistral",
        lambda t: t.update({B1 + "feed_forward.down_proj.weight": t[B0 + "feed_forward.down_proj.weight"].clone()}),
        {B1 + "feed_forward.down_proj.weight"},
    ),
    "a norm's weight scaled": (
        "gpt2",
        scale(B1 + "feed_forward_norm.weight", 1.001),
        {B1 + "feed_forward_norm.weight"},
    ),
    "a bias scaled": ("qwen2", scale(B0 + "attention.q_proj.bias", 1.001), {B0 + "attention.q_proj.bias"}),
    "a projection scaled": ("bloom", scale(B0 + "attention.o_proj.weight", 1.001), {B0 + "attention.o_proj.weight"}),
    "a q norm scaled": ("qwen3", scale(B0 + "attention.q_norm.weight", 1.02), {B0 + "attention.q_norm.weight"}),
    "the position table shifted": (
        "gpt2",
        lambda t: t.update({"positions.weight": t["positions.weight"].roll(1, 0)}),
        {"positions.weight"},
    ),
    "a square matrix transposed": (
        "falcon-7b",
        lambda t: t.update({B0 + "attention.o_proj.weight": t[B0 + "attention.o_proj.weight"].t().clone()}),
        {B0 + "attention.o_proj.weight"},
    ),
    "the sign of one weight": (
        "llama",
        lambda t: t[B0 + "attention.v_proj.weight"][3, 5].neg_(),
        {B0 + "attention.v_proj.weight"},
    ),
    "rope rows interleaved": (
        "llama",
        lambda t: t.update(
            {
                B0 + "attention.k_proj.weight": t[B0 + "attention.k_proj.weight"]
                .reshape(-1, 2, 10, 48)
                .mT.reshape(40, 48)
            }
        ),
        {B0 + "attention.k_proj.weight"},
    ),
}


@few(1)
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damaged_tensors_are_different_and_named(
    name: str, dtype: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    config, damage, tensors = DAMAGE[name]
    hf, local = pair(config)
    bad = damaged(local, tmp_path / "bad", damage)
    result = unscored(hf, bad, dtype=dtype)
    assert (result.verdict, result.passed, result.exit_code) == ("different", False, 3)
    assert result.bytes is not None and set(result.bytes.different) == tensors
    assert result.noise is not None and result.noise.functions > 5 * result.noise.allowed


CHANGED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "eps ten times, LayerNorm": ("gpt2", setting(eps=1e-4)),
    "eps ten times, RMSNorm": ("llama", setting(eps=1e-5)),
    "the window removed": ("mistral", setting(window=None)),
    "the window one longer": ("mistral", setting(window=17)),
    "the window added": ("mistral-no-window", setting(window=230)),
    "rope base doubled": ("llama-2", setting(base=2e4)),
    "rope base by a hundredth": ("llama-2", setting(base=1.01e4)),
    "rope scaling removed": ("llama-3", lambda node: node.update(scaling=None) if "base" in node else None),
    "gelu_new to gelu": ("gpt2", setting(activation="gelu")),
    "gelu to gelu_new": ("falcon-7b", setting(activation="gelu_new")),
    "gelu_bloom to gelu": ("bloom", setting(activation="gelu")),
    "relu to silu": ("gpt2-by-layer", setting(activation="silu")),
    "scale": ("qwen2", setting(scale=lambda scale: scale and scale * 1.001)),
    "parallel to serial": ("falcon-40b", setting(parallel=False)),
    "residual": ("bloom", setting(residual="normed")),
}


@few(1)
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_changed_tree_is_different(
    name: str, dtype: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """In bf16 too, though a gelu variant is a thousandth of bf16's noise."""
    config, change = CHANGED[name]
    hf, local = pair(config)
    bad = with_spec(local, tmp_path / "bad", change)
    result = unscored(hf, bad, dtype=dtype)
    assert (result.verdict, result.passed, result.exit_code) == ("different", False, 3)
    assert result.bytes is not None and result.bytes.compared > 10 and not result.bytes.different
    assert result.noise is not None and result.noise.functions > 2 * result.noise.allowed
    assert any(note.startswith("the architectures differ: ") for note in result.notes)


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize(("eps", "activation"), [(1e-4, None), (None, "gelu")])
def test_a_trained_model_does_not_hide_them(eps: float | None, activation: str | None, tmp_path: Path) -> None:
    gptkit.convert("sample:gpt2", tmp_path / "local")
    change = setting(eps=eps) if eps else setting(activation=activation)
    result = unscored("sample:gpt2", with_spec(tmp_path / "local", tmp_path / "bad", change), dtype="bfloat16")
    assert (result.verdict, result.passed) == ("different", False)


def test_the_sign_of_a_zero_is_a_byte(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    weights = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.bias"][7] = 0.0
    safetensors.torch.save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    bad = damaged(tmp_path / "local", tmp_path / "bad", lambda t: t["blocks.0.attention.o_proj.bias"][7].neg_())
    result = unscored(tmp_path / "hf", bad)
    assert (result.verdict, result.passed) == ("identical", False)
    assert result.bytes is not None and result.bytes.different == ("blocks.0.attention.o_proj.bias",)
    assert exit_code(tmp_path / "hf", bad, "--no-mutations") == 3


def test_a_tensor_the_probe_never_meets_is_a_byte(tmp_path: Path) -> None:
    """The key bias cancels in the softmax without rotary positions; the bytes still say so."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    bad = damaged(tmp_path / "local", tmp_path / "bad", scale("blocks.0.attention.k_proj.bias", 2.0))
    result = unscored(tmp_path / "hf", bad)
    assert result.verdict == "equal"
    assert not result.passed
    assert result.bytes is not None and result.bytes.different == ("blocks.0.attention.k_proj.bias",)


@pytest.mark.exhaustive
def test_what_bf16_rounds_away_is_a_byte(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("qwen3")
    bad = damaged(local, tmp_path / "bad", scale("blocks.0.attention.q_norm.weight", 1.0001))
    result = unscored(hf, bad, dtype="bfloat16")
    assert (result.verdict, result.passed) == ("identical", False)
    assert result.bytes is not None and result.bytes.different == ("blocks.0.attention.q_norm.weight",)
    assert unscored(hf, bad).verdict == "different"


def test_a_dtype_that_was_changed_is_told(tmp_path: Path) -> None:
    """And no more, while every value is the same."""
    save_hf(CONFIGS["llama"], tmp_path / "hf", torch.bfloat16)
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    wide = damaged(tmp_path / "local", tmp_path / "wide", lambda t: t.update({k: v.float() for k, v in t.items()}))
    result = unscored(tmp_path / "hf", wide)
    assert (result.verdict, result.passed) == ("identical", True)
    assert result.bytes is not None and len(result.bytes.cast) == result.bytes.compared
    assert card(result)["verdict"]["bytes"] == "equal in value"
    close = damaged(wide, tmp_path / "close", lambda t: t["final_norm.weight"].__setitem__(0, 1.0 + 1e-6))
    assert unscored(tmp_path / "hf", close).bytes.different == ("final_norm.weight",)


def test_imprecision_does_not_widen_its_own_allowance(
    pair: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that is right in fp64 and rounds to bf16 on the way in fp32."""
    hf, _ = pair("llama")
    monkeypatch.setitem(
        layers.ACTIVATIONS,
        "silu",
        lambda x: torch.nn.functional.silu(x if x.dtype == torch.float64 else x.bfloat16()).to(x),
    )
    result = unscored(hf)
    assert result.noise is not None
    assert result.noise.functions <= result.noise.allowed
    assert (result.verdict, result.noise.imprecise) == ("different", ("float32",))


def test_one_layout_that_loses_something_shows_in_bytes(
    pair: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, _ = pair("gpt2")
    monkeypatch.setattr(stored, "same_bytes", lambda a, b: a.shape != (48, 144))
    result = unscored(hf)
    assert result.bytes is not None
    assert result.bytes.different == tuple(f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(3))
    assert (result.verdict, result.passed) == ("identical", False)


# --- component by component -------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_right_models_are_laid_side_by_side_when_asked(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    hf, local = pair("gpt2")
    assert unscored(hf).divergence is None
    same = unscored(hf, local, bisected=True)
    other = with_spec(local, tmp_path / "other", setting(arithmetic="linear"))
    near = unscored(hf, other, bisected=True)
    for result, verdict in ((same, "identical"), (near, "equal")):
        assert result.verdict == verdict
        assert result.divergence is not None
        assert (result.divergence.first, result.divergence.causes) == (None, ())
        layers = {place.layer for place in result.divergence.places}
        assert layers == {None, *range(len(open_checkpoint(hf).spec.blocks))}
        assert any(place.noise for place in result.divergence.places)


@pytest.mark.exhaustive
def test_sides_are_laid_beside_each_other_never_always_or_up_to_a_size(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, local = pair("llama")
    bad = with_spec(local, tmp_path / "bad", setting(eps=1e-3))
    assert unscored(hf, bad, bisected=False).divergence is None
    monkeypatch.setattr("gptkit.parity.repair.SMALL", 10)
    unasked = unscored(hf, bad)
    assert unasked.divergence is None
    assert any("was not searched for" in note for note in unasked.notes)
    asked = unscored(hf, bad, bisected=True).divergence
    assert asked is not None and asked.first is not None
    assert asked.first.name == "layer 0 attention norm"
    assert asked.causes[0].restores


# --- what cannot be compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_no_numbers_are_named(value: float, stored: torch.dtype, tmp_path: Path) -> None:
    """Also in a row of the embedding or of the position table that no probe reads."""
    save_hf(CONFIGS["gpt2-untied"], tmp_path / "hf", stored)
    gptkit.convert(tmp_path / "hf", tmp_path / "local")

    def damage(tensors: Tensors) -> None:
        tensors["positions.weight"][255, 3] = value
        tensors["blocks.2.attention.k_proj.weight"][:2, 0] = value

    bad = damaged(tmp_path / "local", tmp_path / "bad", damage)
    for arguments in ((bad,), (tmp_path / "hf", bad), (bad, tmp_path / "hf")):
        with pytest.raises(InvalidInput) as caught:
            verify(*arguments)
        assert "positions.weight (1 values)" in str(caught.value)
        assert "blocks.2.attention.k_proj.weight (2 values)" in str(caught.value)
    assert exit_code(tmp_path / "hf", bad) == 4


def test_activations_that_overflow_are_no_verdict(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    bad = damaged(tmp_path / "local", tmp_path / "bad", scale("head.weight", 1e38))
    with pytest.raises(InvalidInput, match=r"gptkit's logits of .*bad are NaN or infinite"):
        verify(tmp_path / "hf", bad)
    loud = damaged(tmp_path / "local", tmp_path / "loud", scale("head.weight", 1e5))
    (loud / "manifest.json").unlink()
    with pytest.raises(InvalidInput, match="overflows in float16"):
        verify(loud, dtype="float16")


@few(2)
@pytest.mark.parametrize("family", rest_slow(ARCHITECTURES))
def test_the_same_values_in_a_wider_dtype_are_the_same(family: str, tmp_path: Path) -> None:
    """And in a narrower one they are not, where that rounds."""
    save_hf(REPRESENTATIVES[family].config, tmp_path / "hf", torch.bfloat16)
    gptkit.convert(tmp_path / "hf", tmp_path / "wide", dtype="float32")
    result = unscored(tmp_path / "hf", tmp_path / "wide")
    assert (result.verdict, result.passed) == ("identical", True)
    narrower = {name for name, _, dtype in open_checkpoint(tmp_path / "hf").tensors() if dtype != "F32"}
    assert narrower and result.bytes is not None and not result.bytes.different
    assert set(result.bytes.cast) == narrower  # all but what transformers keeps in fp32, such as a router's biases
    gptkit.convert(tmp_path / "hf", tmp_path / "narrow", dtype="float16")
    wide = safetensors.torch.load_file(tmp_path / "wide" / "model.safetensors")
    rounds = {name for name, tensor in wide.items() if not torch.equal(tensor.half().float(), tensor)}
    narrow = unscored(tmp_path / "hf", tmp_path / "narrow")
    assert narrow.bytes is not None and set(narrow.bytes.different) == rounds
    assert narrow.passed == (not rounds and narrow.verdict != "different")


@pytest.mark.exhaustive
def test_a_folder_that_was_tampered_with_is_no_reference(tmp_path: Path) -> None:
    """Alone it would be compared with itself: only the manifest knows what was written."""
    gptkit.convert("sample:llama", tmp_path / "local")
    bad = damaged(tmp_path / "local", tmp_path / "bad", scale("head.weight", 1.5))
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        verify(bad)
    assert unscored("sample:llama", bad).verdict == "different"


def test_other_vocabularies(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    save_hf({**CONFIGS["llama"], "vocab_size": 98}, tmp_path / "hf")
    with pytest.raises(InvalidInput, match=r"vocabularies differ: 97 .* 98"):
        verify(pair("llama")[0], tmp_path / "hf")


@pytest.mark.exhaustive
def test_other_families_over_one_vocabulary_are_different(pair: Callable[[str], tuple[Path, Path]]) -> None:
    result = unscored(pair("llama")[0], pair("gpt2")[1])
    assert (result.verdict, result.passed) == ("different", False)
    assert result.bytes is not None and not result.bytes.required
    assert "final_norm.weight" in result.bytes.different and "positions.weight" in result.bytes.alone


def test_position_tables_of_two_lengths(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("gpt2")
    short = damaged(
        local, tmp_path / "damaged", lambda t: t.update({"positions.weight": t["positions.weight"][:100].clone()})
    )
    short = with_spec(short, tmp_path / "short", lambda node: node.update(length=100) if "length" in node else None)
    result = unscored(hf, short)
    assert (result.verdict, result.passed, result.up_to) == ("identical", False, 100)
    assert result.limited == (
        "sequences of more than 100 tokens (position tables of 256 and 100 tokens): --up-to 100 asks for no more",
    )
    assert exit_code(hf, short, "--up-to", 100) == 0
    assert exit_code(hf, short, "--up-to", 101) == 2
    assert "the position tables have 256 and 100 rows: compared on up to 100 tokens" in result.notes


def test_attention_paths_that_transformers_has_not(pair: Callable[[str], tuple[Path, Path]]) -> None:
    with pytest.raises(UsageError, match="eager falcon adds ALiBi twice"):
        verify(pair("falcon-rw")[0], attention="eager")
    with pytest.raises(UsageError, match="no sdpa path for this family"):
        verify(pair("bloom")[0], attention="sdpa")
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        verify(pair("llama")[0], attention="flash")
    assert exit_code(pair("bloom")[0], "--attention", "sdpa") == 2


def test_prompts(pair: Callable[[str], tuple[Path, Path]]) -> None:
    result = unscored("sample:gpt2", prompts=["ROMEO:", "\n"])
    assert [prompt.name for prompt in result.prompts][-2:] == ["ROMEO:", "\n"]
    assert not any(prompt.name.startswith("KING") for prompt in result.prompts)
    with pytest.raises(UsageError, match="no tokens"):
        verify("sample:gpt2", prompts=[""])
    with pytest.raises(UsageError, match="at most 256"):
        verify("sample:gpt2", prompts=["ROMEO " * 200])
    with pytest.raises(UsageError, match="no tokenizer"):
        verify(pair("llama")[0], prompts=["ROMEO:"])


def test_own_prompts_are_cut_to_a_short_table(tmp_path: Path) -> None:
    save_hf({**CONFIGS["gpt2"], "n_positions": 3}, tmp_path / "hf")
    for path in gptkit.open_checkpoint("sample:gpt2").folder.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "hf")
    result = unscored(tmp_path / "hf")
    assert result.verdict == "identical"
    assert all(prompt.positions > 0 for prompt in result.prompts)


def test_windows_out_of_reach_are_noted(pair: Callable[[str], tuple[Path, Path]]) -> None:
    result = unscored(pair("mistral-default-window")[0])
    assert (
        "not tested on texts longer than the window of 4,096 (more than 1,024 tokens; --long tests them)"
        in result.notes
    )
    assert max(prompt.positions for prompt in result.prompts) == 200


def test_a_swapped_model_alone_has_no_reference(tmp_path: Path) -> None:
    gptkit.swap("sample:gpt2", tmp_path / "rms", norm="rmsnorm", measured=False)
    with pytest.raises(CannotExpress) as caught:
        verify(tmp_path / "rms")
    assert "RMSNorm" in caught.value.message
    assert caught.value.hint == "Compare the checkpoint with its original instead: gptkit verify ORIGINAL CHECKPOINT"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("empty", [[], ["one"]])
def test_nothing_compared_is_no_pass(
    empty: list[str], stream: bool, pair: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [module.ProbeBatch(name, torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1)) for name in empty]
    monkeypatch.setattr(module, "probe", lambda *specs, **options: batches)
    with pytest.raises(GptkitError, match=r"nothing was compared|no logits to compare"):
        verify(pair("llama")[0], stream=stream)


@pytest.mark.parametrize("dtype", ["int8", "half", "float8_e4m3fn", torch.float8_e5m2, torch.int64, ""])
def test_dtypes_that_nothing_computes_in(dtype: Any, pair: Callable[[str], tuple[Path, Path]]) -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        verify(pair("llama")[0], dtype=dtype)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dtype_that_this_machine_lacks_is_told(
    stream: bool, pair: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\"silu_cpu\" not implemented for 'Half'")

    monkeypatch.setitem(layers.ACTIVATIONS, "silu", lacking)
    with pytest.raises(UsageError, match=r"cannot compute in float16: .*silu_cpu") as caught:
        verify(pair("llama")[0], dtype="float16", stream=stream)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "use --dtype float32"


STREAMED = [[], ["--stream"]]


@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_bad_input_has_its_exit_code(
    options: list[str], pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    hf, local = pair("llama")
    save_hf({**CONFIGS["llama"], "vocab_size": 98}, tmp_path / "other")
    nan = damaged(local, tmp_path / "nan", lambda t: t["final_norm.weight"].fill_(float("nan")))
    narrow = tmp_path / "narrow"
    shutil.copytree(hf, narrow)
    tensors = safetensors.torch.load_file(narrow / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, narrow / "model.safetensors", {"format": "pt"})
    for code, message, arguments in (
        (4, "has weights that are NaN or infinite: final_norm.weight", [hf, nan]),
        (4, "vocabularies differ: 97 tokens", [hf, tmp_path / "other"]),
        (4, "weights are not floating-point numbers: model.norm.weight is F8_E4M3", [narrow]),
        (2, "unknown dtype 'float8_e4m3fn'", [hf, "--dtype", "float8_e4m3fn"]),
        (2, "has no tokenizer, which --prompt needs", [hf, "--prompt", "x"]),
    ):
        run = call("verify", *arguments, *options)
        assert (run.exit_code, message in run.stderr) == (code, True), run.stderr
        assert len(run.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_a_missing_tokenizer_is_said(options: list[str], pair: Callable[[str], tuple[Path, Path]]) -> None:
    run = call("verify", str(pair("llama")[0]), "--no-mutations", *options)
    assert run.exit_code == 0
    assert "the model has no tokenizer: the test prompts are arbitrary token ids" in " ".join(run.stdout.split())


# --- the parts --------------------------------------------------------------------------------------------------------


def test_json_holds_everything(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    result = unscored(hf, with_spec(local, tmp_path / "bad", setting(eps=1e-3)))
    data = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert (data["schema_version"], data["verdict"], data["passed"]) == (1, "different", False)
    assert (data["model"], data["other"], data["dtype"]) == (str(hf), str(tmp_path / "bad"), "float32")
    assert data["noise"]["functions"] > data["noise"]["reference"] + data["noise"]["candidate"]
    assert set(data["noise"]["errors"]) == {"float32"}
    assert {"name", "positions", "maximum", "mean", "kl", "top1"} == set(data["prompts"][0])


def test_progress_is_told(pair: Callable[[str], tuple[Path, Path]]) -> None:
    told: list[str] = []
    verify(pair("llama")[0], progress=told.append)
    assert told == ["comparing bytes", "transformers", "gptkit", "making mistakes on purpose"]


def noise(functions: float, errors: tuple[float, float] = (1.0, 1.0)) -> Noise:
    return Noise(reference=1.0, candidate=0.5, paths=2.0, functions=functions, errors={"float32": errors})


def test_the_rule() -> None:
    assert noise(2.5).explains
    assert not noise(2.6).explains
    assert not noise(float("nan")).explains
    assert noise(0, (1.0, IMPRECISE)).explains
    assert not noise(0, (1.0, IMPRECISE + 0.1)).explains
    assert not noise(0, (1.0, float("nan"))).explains
    assert noise(0, (0.0, 0.0)).explains
    without = Verification(
        "a", None, "float32", "sdpa", (compare("x", torch.ones(1, 1), torch.zeros(1, 1)),), None, None
    )
    assert without.verdict == "different"


def test_differences() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    b = torch.tensor([[1.0, 2.5, 3.0], [0.0, 0.0, 1.0]])
    found = compare("x", a, b)
    assert (found.maximum, found.positions, found.top1, found.identical) == (1.0, 2, 0.5, False)
    assert found.mean == pytest.approx(0.25)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert compare("x", a, a) == compare("x", a, a.clone())
    assert compare("x", a, a).identical and compare("x", a, a).kl == 0


def test_differences_of_many_rows_are_those_of_all() -> None:
    a, b = torch.randn(1000, 7), torch.randn(1000, 7)
    assert largest_gap([a, a], [a, b]) == (a.double() - b.double()).abs().max().item()
    assert mean_gap([a, a], [a, b]) == pytest.approx((a.double() - b.double()).abs().mean().item() / 2)
    assert kl_divergence(a, b).shape == (1000,)


def test_nan_is_never_lost() -> None:
    good, bad = torch.zeros(200, 2), torch.zeros(200, 2)
    bad[150, 1] = float("nan")
    for first, second in (([good, bad], [good, good]), ([bad, good], [good, good]), ([good], [bad])):
        assert np.isnan(largest_gap(first, second))
        assert np.isnan(mean_gap(first, second))
    assert not compare("x", good, bad).identical


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(GptkitError, match="shapes"):
        compare("x", torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(GptkitError, match="no logits to compare"):
        compare("x", torch.zeros(0, 3), torch.zeros(0, 3))


# --- checkpoints that others trained ----------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("name", ["stories260K-llama", "capp-gpt2"])
def test_trained_checkpoints_go_through_and_back(name: str, tmp_path: Path) -> None:
    source = SHARED / name
    if not source.is_dir():
        pytest.skip(f"there is no {source}")
    import transformers

    gptkit.convert(source, tmp_path / "local")
    for dtype in ("float32", "bfloat16"):
        result = unscored(source, tmp_path / "local", dtype=dtype)
        assert (result.verdict, result.passed) == ("identical", True)
        assert result.bytes is not None and result.bytes.compared > 10
    gptkit.convert(tmp_path / "local", tmp_path / "back", "hf")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (source, tmp_path / "back")
    )
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        logits = before(ids).logits
        assert torch.equal(logits, after(ids).logits)
        assert torch.equal(logits, verify_logits(tmp_path / "local", ids))


def verify_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return gptkit.load(folder, dtype=torch.float32)(ids)
