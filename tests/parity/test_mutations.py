"""Every mistake, made by hand in a converted checkpoint: verify fails, names the component, and finds the repair."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from families import CONFIGS, REPRESENTATIVES, decoder_from, randomised_reference
from torch import Tensor

from gptkit.cli import app
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import plan_output
from gptkit.converter.publish import Staging
from gptkit.converter.resolve import SAMPLES
from gptkit.converter.write import execute
from gptkit.modules.load import load
from gptkit.parity.bisect import LABELS, MIXED, taps
from gptkit.parity.mutations import MUTATIONS, Mutant, applicable
from gptkit.parity.probe import probe
from gptkit.parity.score import score
from gptkit.parity.verify import verify

CAUSELESS = {"QKV bias dropped", "another layer's tensor", "positions off by one", "head bias dropped"}
"""Mistakes whose repair is to put the reference's own values back."""

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


def parameters_of(sample: str) -> tuple[object, dict[str, Tensor]]:
    model = load(f"sample:{sample}", torch.float64)
    return model.spec, {name: parameter.detach() for name, parameter in model.named_parameters()}


def mutants() -> Iterator[tuple[str, str]]:
    for sample in SAMPLES:
        spec, weights = parameters_of(sample)
        for mutation, _ in applicable(spec, weights):  # type: ignore[arg-type]
            yield sample, mutation.name


def write_local(sample: str, mutant: Mutant, target: Path) -> None:
    """The mutated tree as a converted checkpoint, in the sample's own dtype where it holds the values."""
    source = open_checkpoint(f"sample:{sample}")
    spec, weights = mutant
    dtypes = dict.fromkeys((parameter.name for parameter in spec.parameters()), "F64")
    plan = plan_output(spec, source.origin, "local", dtypes, "F32", source.folder)

    def tensors() -> Iterator[tuple[str, np.ndarray, str]]:
        for name in dtypes:
            yield name, weights[name].contiguous().numpy(), "F64"

    with Staging(target) as staging:
        files = execute(plan, tensors(), staging)
        staging.commit({}, files=files)


@pytest.mark.parametrize(("sample", "name"), list(mutants()))
def test_a_mistake_is_seen_placed_and_repaired(sample, name, tmp_path):
    spec, weights = parameters_of(sample)
    mutation = BY_NAME[name]
    mutant = mutation.apply(spec, weights)  # type: ignore[arg-type]
    assert mutant is not None
    write_local(sample, mutant, tmp_path / "wrong")
    result = verify(f"sample:{sample}", tmp_path / "wrong", mutations=False)
    assert result.verdict == "different"
    assert not result.passed
    assert result.divergence is not None
    first = result.divergence.first
    assert first is not None
    if mutation.component == "norm":
        assert first.label.endswith("norm")
    else:
        assert first.label.startswith(mutation.component)
    assert first.layer in (0, None)
    best = result.divergence.causes[0]
    assert best.restores
    repairs = [cause.repair for cause in result.divergence.causes if cause.restores]
    if name not in CAUSELESS:
        assert any(mutation.repair in repair or repair.startswith("the reference's") for repair in repairs)


def test_the_command_says_so_and_exits_with_3(tmp_path):
    from typer.testing import CliRunner

    spec, weights = parameters_of("llama")
    mutant = BY_NAME["rope permute missing"].apply(spec, weights)  # type: ignore[arg-type]
    write_local("llama", mutant, tmp_path / "wrong")  # type: ignore[arg-type]
    run = CliRunner().invoke(app, ["verify", "sample:llama", str(tmp_path / "wrong")])
    assert run.exit_code == 3
    assert "place     layer 0 attention q: the first component that differs" in run.stdout
    assert "undoing a half-split RoPE layout restores parity" in run.stdout
    data = CliRunner().invoke(app, ["verify", "sample:llama", str(tmp_path / "wrong"), "--json"])
    assert json.loads(data.stdout)["divergence"]["causes"][0]["restores"] is True


@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_the_probe_catches_every_mistake_on_random_weights(variant):
    decoder = decoder_from(randomised_reference(variant.config, torch.float64, "eager"), variant.config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    marks = score(decoder.spec, weights, probe(decoder.spec))
    assert marks.missed == ()
    assert marks.tried >= 8


def test_a_probe_that_is_too_kind_is_told_so():
    """Eight tokens see neither a window of 16 nor, in a verdict, that anybody ignored it."""
    config = CONFIGS["mistral"]
    decoder = decoder_from(randomised_reference(config, torch.float64, "eager"), config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    kind = [batch for batch in probe(decoder.spec) if batch.name == "one token"]
    assert "window ignored" in score(decoder.spec, weights, kind).missed


def test_what_is_unprobed_is_not_counted():
    config = CONFIGS["mistral"]
    decoder = decoder_from(randomised_reference(config, torch.float64, "eager"), config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    short = [batch for batch in probe(decoder.spec) if batch.input_ids.shape[1] <= 64]
    marks = score(decoder.spec, weights, short, ["window ignored"])
    assert "window ignored" not in (*marks.caught, *marks.caught_random, *marks.missed)


@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_every_component_with_a_weight_is_looked_at(variant):
    from gptkit.architectures import architecture_of

    architecture = architecture_of(variant.config)
    spec = architecture.spec(variant.config)
    watched = {tap.label for tap in taps(architecture, spec)}
    assert watched <= {*LABELS.values(), *MIXED.values()}
    assert {"embedding", "attention q", "attention k", "attention v", *MIXED.values(), "final norm"} <= watched
    reference = randomised_reference(variant.config, torch.float32, architecture.reference(spec)[0])
    modules = dict(reference.named_modules())
    assert all(tap.theirs[0] in modules for tap in taps(architecture, spec))
