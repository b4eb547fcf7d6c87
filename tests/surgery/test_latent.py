"""Latent attention: all of it exactly, some of it fitted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.covering import few
from helpers.exactness import Mutation, exactly, is_caught
from helpers.families import CONFIGS, save_hf, spec_of

import gptkit
from gptkit.components import Attention, LatentAttention, RMSNorm
from gptkit.errors import SwapRefused, UsageError
from gptkit.modules.registry import build_module
from gptkit.surgery.base import Filled
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import kv_heads as module
from gptkit.surgery.swaps import latent as deepseek

ALL = ["gpt2", "llama", "mistral", "qwen2", "bloom", "falcon-7b", "falcon-40b", "falcon-rw"]


@few(1)
@pytest.mark.parametrize("name", ALL)
def test_the_whole_latent_is_exact(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf", torch.bfloat16)
    done = exactly(tmp_path / "hf", tmp_path / "out", attention="mla:full")
    for old, new in zip(spec_of(CONFIGS[name]).blocks, done.spec.blocks, strict=True):
        assert isinstance(old.attention, Attention) and isinstance(new.attention, LatentAttention)
        assert new.attention.kv_rank == module.whole(old.attention)
    # Nothing was computed: every weight is as it was stored.
    assert set(gptkit.open_checkpoint(tmp_path / "out").shared_dtypes().values()) == {"BF16"}
    some = exactly(tmp_path / "hf", tmp_path / "some", attention="mla:full", blocks="1")
    assert [isinstance(block.attention, LatentAttention) for block in some.spec.blocks[:2]] == [False, True]


@few(1)
@pytest.mark.parametrize("name", ["falcon-7b", "gpt2", "bloom"])
def test_the_whole_rank_is_the_whole_where_no_rotary_heads_become_one(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    attention = spec_of(CONFIGS[name]).blocks[0].attention
    assert isinstance(attention, Attention)
    exactly(tmp_path / "hf", tmp_path / "out", attention=f"mla:{module.whole(attention)}")


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize(
    ("sample", "rank", "times"),
    [
        ("llama", 48, 4),
        pytest.param("gpt2", 112, 1, marks=pytest.mark.slow),
        pytest.param("bloom", 54, 1.2, marks=pytest.mark.slow),
    ],
)
def test_the_fit_beats_the_weights_alone(sample: str, rank: int, times: float, tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {"fitted": {"calibrate_tokens": 2048}, "plain": {"approximate": True}}
    fitted, plain = (
        gptkit.swap(f"sample:{sample}", tmp_path / name, attention=f"mla:{rank}", **options).measured
        for name, options in given.items()
    )
    assert fitted is not None and fitted.kl_text is not None
    assert plain is not None and plain.kl_text is not None
    assert fitted.kl_text * times < plain.kl_text


def test_more_than_there_is_to_hold_is_all_of_it(tmp_path: Path) -> None:
    save_hf(CONFIGS["mistral"], tmp_path / "hf")
    done = exactly(tmp_path / "hf", tmp_path / "out", attention="mla:512")
    assert done.chain.notes == (
        "keys and values have 32 numbers per token, and the latent with the rotary keys stores all of them",
    )


def test_refusals(tmp_path: Path) -> None:
    save_hf(CONFIGS["qwen3"], tmp_path / "qwen3")
    with pytest.raises(SwapRefused, match="normalises queries and keys"):
        gptkit.swap(tmp_path / "qwen3", tmp_path / "out", attention="mla:full")
    with pytest.raises(SwapRefused, match="a latent of layer 0 stores at most 16 numbers per token, not 28") as caught:
        gptkit.swap("sample:falcon", tmp_path / "out", attention="mla:28")
    assert "mla:16" in str(caught.value.hint)
    with pytest.raises(UsageError, match="at least 1"):
        gptkit.swap("sample:llama", tmp_path / "out", attention="mla:0")
    save_hf(CONFIGS["llama"], tmp_path / "llama")
    with pytest.raises(UsageError, match="needs a text to fit on"):
        gptkit.swap(tmp_path / "llama", tmp_path / "out", attention="mla:8")
    gptkit.swap(tmp_path / "llama", tmp_path / "full", attention="mla:full", measured=False)
    with pytest.raises(SwapRefused, match="has latent attention already"):
        gptkit.swap(tmp_path / "full", tmp_path / "out", attention="mla:full")
    assert not (tmp_path / "out").exists()


def other_head(patch: pytest.MonkeyPatch) -> None:
    right = module._spread_queries

    def wrong(tensor: np.ndarray, attention: Attention) -> np.ndarray:
        found = right(tensor, attention).reshape(attention.heads, -1)
        return np.roll(found, 1, axis=0).reshape(-1, *tensor.shape[1:])

    patch.setattr(module, "_spread_queries", wrong)


def no_rest(patch: pytest.MonkeyPatch) -> None:
    right = module._key_rows
    patch.setattr(
        module, "_key_rows", lambda t, a, rotary: right(t, a, rotary) if rotary else right(t, a, rotary)[::-1]
    )


def values_first(patch: pytest.MonkeyPatch) -> None:
    right = module._picking
    patch.setattr(module, "_picking", lambda a, width, start, rank: np.roll(right(a, width, start, rank), 1, axis=1))


def halved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "Filled", lambda shape, value, like: Filled(shape, lambda: value() / 2, like))


MUTATIONS: dict[str, Mutation] = {
    "another head's queries": (other_head, ("llama", "falcon-40b", "gpt2")),
    "rows without positions in another order": (no_rest, ("gpt2", "bloom")),
    "out of the wrong place": (values_first, ("mistral", "gpt2")),
    "half of it": (halved, ("mistral", "falcon-7b")),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_movement_is_not_published(name: str, tmp_path: Path) -> None:
    is_caught(name, MUTATIONS, {"attention": "mla:full"}, tmp_path)


@few(1)
@pytest.mark.parametrize("name", ["llama-2", "llama-3", "llama-v5", "llama-longrope", "mistral-no-window"])
def test_a_latent_leaves_as_an_unmodified_deepseek(name: str, tmp_path: Path) -> None:
    """Several rotary keys as one, whose frequencies repeat, and a norm that leaves a latent as it is."""
    model = save_hf(CONFIGS[name], tmp_path / "hf")
    steps = [Step("attention", value) for value in ("mla:full", "mla:deepseek")]
    done = exactly(tmp_path / "hf", tmp_path / "out", *steps)
    assert {block.attention.rope_heads for block in done.spec.blocks} == {1}  # type: ignore[union-attr]
    gptkit.convert(tmp_path / "out", tmp_path / "deepseek", "hf:deepseek_v3")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deepseek")
    assert type(found) is transformers.DeepseekV3ForCausalLM
    ids = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids).logits
        assert (found(ids).logits - expected).abs().max() < 2e-6 * expected.abs().max()


def test_a_norm_beside_constants_changes_no_bit() -> None:
    rank = deepseek.SHARE * 3
    norm = build_module(RMSNorm(size=rank, eps=deepseek.EPS))
    constants = torch.full((3,), deepseek.CONSTANT)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        norm.weight.data = torch.full((rank,), deepseek.CONSTANT / deepseek.SHARE**0.5, dtype=dtype)
        latent = torch.randn(50, rank - 3, generator=torch.Generator().manual_seed(0)).to(dtype) * 30
        with torch.inference_mode():
            normed = norm(torch.cat((latent, constants.to(dtype).expand(50, 3)), dim=-1))
        assert torch.equal(normed[:, : rank - 3], latent)


def test_what_has_no_deepseek_form(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "llama")
    steps = [Step("attention", value) for value in ("mla:full", "mla:deepseek")]
    with pytest.raises(SwapRefused, match="queries of layer 0 have a bias"):
        gptkit.swap(tmp_path / "llama", tmp_path / "out", steps)
    with pytest.raises(SwapRefused, match="does not have latent attention"):
        gptkit.swap(tmp_path / "llama", tmp_path / "out", attention="mla:deepseek")
    save_hf(CONFIGS["llama-dynamic"], tmp_path / "dynamic")
    with pytest.raises(SwapRefused, match="RoPE base of layer 0 depends"):
        gptkit.swap(tmp_path / "dynamic", tmp_path / "out", steps)
    save_hf(CONFIGS["deepseek_v3"], tmp_path / "deepseek")
    with pytest.raises(SwapRefused, match="has the form of DeepSeek-V3 already"):
        gptkit.swap(tmp_path / "deepseek", tmp_path / "out", attention="mla:deepseek")
