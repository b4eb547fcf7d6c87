"""Swaps of models of two stacks: both change, each as if it were alone, and what is exact is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.covering import few
from helpers.families import REPRESENTATIVES, VARIANTS, save_hf, spec_of

import gptkit
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.errors import SwapRefused
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import probe
from gptkit.parity.rows import states
from gptkit.surgery.listing import listing
from gptkit.surgery.swaps.quantise import by_row

CONFIGS = {variant.name: variant.config for variant in VARIANTS if spec_of(variant.config).encoder is not None}


@few(2)
@pytest.mark.parametrize(
    ("name", "asked", "changed"),
    [
        ("bart", {"mlp": "gated"}, "feed_forward.gate_proj.weight"),
        ("bart", {"fold": "value-bias"}, "attention.o_proj.bias"),
        ("bart", {"fold": "scale"}, "attention.q_proj.weight"),
        ("t5-gated", {"mlp": "moe:2x2:split"}, "feed_forward.experts.1.up_proj.weight"),
        ("marian", {"intermediate": "96"}, "feed_forward.up_proj.weight"),
    ],
)
def test_exact_swaps_are_exact_on_both(name: str, asked: dict[str, str], changed: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", **asked)
    assert done.guarantee == "exact" and done.measured is not None
    assert done.measured.relative["float64"] <= 1e-12 and done.measured.relative["float32"] <= 1e-5
    before, after = (open_checkpoint(tmp_path / each) for each in ("hf", "out"))
    for stack in ("", "encoder."):
        tensor = f"{stack}blocks.0.{changed}"
        there = tensor in {parameter.name for parameter in before.spec.parameters()}
        new = after.tensor(tensor)[0]
        assert not there or new.shape != (old := before.tensor(tensor)[0]).shape or not np.array_equal(old, new)


def test_each_stack_has_weights_of_its_own(tmp_path: Path) -> None:
    save_hf(CONFIGS["t5-gated"], tmp_path / "hf")
    done = gptkit.swap(tmp_path / "hf", tmp_path / "out", quantize="int8", to="hf")  # which is verified
    assert done.guarantee == "approximate" and done.family is not None and done.family.name == "t5"
    before, after = (open_checkpoint(tmp_path / each) for each in ("hf", "out"))
    for name in ("blocks.1.cross_attention.k_proj.weight", "encoder.blocks.1.attention.k_proj.weight"):
        old, new = (checkpoint.tensor(name)[0] for checkpoint in (before, after))
        wide = old.astype(np.float64)
        assert np.array_equal(by_row(wide, 8).nearest(wide).astype(np.float32), new)
        assert not np.array_equal(old, new)
    assert done.measured is not None and done.measured.relative["float64"] > 1e-3


def test_one_stack_of_another_kind_is_told(tmp_path: Path) -> None:
    save_hf(CONFIGS["bart"], tmp_path)
    with pytest.raises(SwapRefused, match="the encoder's and the decoder's layers"):
        gptkit.swap(tmp_path, tmp_path / "out", mlp="gated", blocks="0")
    with pytest.raises(SwapRefused, match="sum_norm"):
        gptkit.swap(tmp_path, tmp_path / "out", norm="rmsnorm")
    with pytest.raises(SwapRefused, match="fitting a swap on a text needs a decoder-only model"):
        gptkit.swap(tmp_path, tmp_path / "out", intermediate="20", calibrate=__file__)


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_what_is_fitted_on_a_text_is_not_offered_where_there_is_no_next_token(name: str, tmp_path: Path) -> None:
    save_hf(REPRESENTATIVES[name].config, tmp_path)
    found = listing(open_checkpoint(tmp_path))
    assert found.of("exact") and not found.of("needs a text")
    narrower = next(entry for entry in found.entries if entry.asked.startswith("--intermediate") and not entry.costs)
    assert narrower.verdict == "refused" and "fitting a swap on a text" in narrower.said


@few(1)
@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_states_by_rows_are_the_models(name: str, tmp_path: Path) -> None:
    """As the decoder computes them whole, on tables that are shared, that are two, and on positions with a table."""
    save_hf(CONFIGS[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = gptkit.load(tmp_path)
    batches = probe(checkpoint.spec)
    found = states(checkpoint, batches, torch.float32)
    with torch.inference_mode():
        for batch, state in zip(batches, found, strict=True):
            logits = model.head(state, model.embedding.weight)
            assert torch.allclose(logits, outputs_of(model, batch), atol=1e-4, rtol=1e-4)
