"""Right conversions of random models pass, whatever their weights hide; a probe that sees too little does not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.edited import Tensors, exit_code
from helpers.families import CONFIGS, edited, save_hf
from helpers.random_trees import drawn_config

import gptkit
from gptkit.parity import probe as probes
from gptkit.parity import verify as module
from gptkit.parity.verify import verify


def louder(part: str, factor: float) -> Callable[[Tensors], None]:
    """Weights of a kind, some times as large."""

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if part in name and tensor.ndim > 1:
                tensor.mul_(factor)

    return change


EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings")
QUERIES = ("q_proj", "c_attn", "query_key_value")


def drawn(seed: int, folder: Path) -> Path:
    """A random legal model: any variant, sizes, and how large its embeddings and its queries are."""
    choose = random.Random(seed).choice
    config = drawn_config(choose(sorted(CONFIGS)), choose)
    save_hf(config, folder, choose((torch.float32, torch.bfloat16)), seed=seed)
    stream, queries = choose((1.0, 1.0, 0.02, 100.0)), choose((1.0, 1.0, 20.0))
    for parts, factor in ((EMBEDDINGS, stream), (QUERIES, queries)):
        for part in parts:
            edited(folder, louder(part, factor))
    return folder


def passes(seed: int, folder: Path) -> None:
    hf = drawn(seed, folder / "hf")
    gptkit.convert(hf, folder / "local")
    found = verify(hf, folder / "local")
    assert found.score is not None and found.score.missed == ()
    assert (found.exit_code, found.limited, found.up_to) == (0, (), None), (seed, found.verdict, found.noise)


@few(1)
@pytest.mark.parametrize("seed", range(8))
def test_right_conversions_of_random_models_pass(seed: int, tmp_path: Path) -> None:
    passes(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_right_conversions_of_many_random_models_pass(seed: int, tmp_path: Path) -> None:
    passes(seed, tmp_path)


def test_eps_behind_large_activations_is_no_failure(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-2"], tmp_path / "hf")
    edited(tmp_path / "hf", louder("embed_tokens", 1000.0))
    found = verify(tmp_path / "hf")
    assert found.score is not None and found.passed
    assert "eps ten times as small" in found.score.caught_random
    run = call("verify", str(tmp_path / "hf"))
    assert run.exit_code == 0
    said = " ".join(run.stdout.split())
    assert "not visible on this checkpoint, only with random weights: eps ten times as large" in said


ONE = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "original_max_position_embeddings": 40}
NEUTRAL: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 1.0},
    "longrope": {"rope_type": "longrope", "attention_factor": 1.0, **ONE},
}


@few(1)
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_scaling_that_scales_nothing_cannot_be_missed(name: str, tmp_path: Path) -> None:
    save_hf({**CONFIGS["llama-2"], "rope_scaling": NEUTRAL[name]}, tmp_path / "hf")
    found = verify(tmp_path / "hf")
    assert found.score is not None and found.passed
    assert (found.score.invisible, found.score.missed) == (("rope scaling dropped",), ())
    run = call("verify", str(tmp_path / "hf"))
    assert "not visible on this checkpoint, nor with random weights: rope scaling dropped" in " ".join(
        run.stdout.split()
    )
    assert f"{found.score.tried} of {found.score.tried} mistakes made on purpose were caught" in run.stdout


def test_attention_that_adds_nothing_hides_what_is_inside(tmp_path: Path) -> None:
    save_hf(CONFIGS["qwen3"], tmp_path / "hf")
    edited(tmp_path / "hf", louder("o_proj", 0.0))
    found = verify(tmp_path / "hf")
    assert found.score is not None and found.passed
    assert {"q and k swapped", "wrong rope base", "rope permute missing"} <= set(found.score.caught_random)


@pytest.mark.exhaustive
def test_a_probe_that_should_see_more_has_a_code_and_words_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token shows nothing of where it stands."""
    save_hf(CONFIGS["llama-2"], tmp_path / "hf")
    short = [batch for batch in probes.probe(gptkit.open_checkpoint(tmp_path / "hf").spec) if batch.name == "one token"]
    monkeypatch.setattr(module, "probe", lambda *specs, **options: short)
    found = verify(tmp_path / "hf")
    assert found.score is not None and found.same and not found.passed
    assert {"q and k swapped", "wrong rope base"} <= set(found.score.missed)
    run = call("verify", str(tmp_path / "hf"))
    assert run.exit_code == 6
    assert "MISSED: wrong rope base" in run.stdout
    assert "the models agree, but the probe should have caught more mistakes" in run.stdout
    assert exit_code(tmp_path / "hf", "--no-mutations") == 0
    monkeypatch.undo()
    assert exit_code(tmp_path / "hf", "--up-to", 1) == 0  # of one token that is all there is to see


def test_every_exit_code_of_a_verification_is_in_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text()
    assert all(f"\n| {code} | " in text for code in (0, 3, 6))
