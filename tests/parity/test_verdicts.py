"""verify gives a verdict on every changed copy of every variant of every family, whatever its layers are made of.

A copy has another value of a field in config.json, another tensor, or both. Each result is also written for the
terminal, as a page and as JSON.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import covered, few, rest_slow
from helpers.families import VARIANTS, Variant, edited, save_hf, spec_of

from gptkit.architectures import architecture_of
from gptkit.components import ModelSpec
from gptkit.errors import ConfigError
from gptkit.parity import probe, sides
from gptkit.parity import verify as module
from gptkit.parity.probe import ProbeBatch, one_function
from gptkit.parity.verify import Verification, verify
from gptkit.report.verification import verification_page, verification_report

VALUES = (0.5, 0.05, 2.5, 2, 1, "relu", "gelu", True, False)
"""Values that a field may have instead."""
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""How families call the longest sequence that a model was made for."""
SHORT = 43
"""A context that is shorter than the shortest input of the probe but for one token."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a reference once for all copies that are compared with it."""
    monkeypatch.setattr(sides, "load_reference", cache(sides.load_reference))


WHOLE_PROBE = probe.probe


def one_input(*specs: ModelSpec, **options: Any) -> list[ProbeBatch]:
    """The random tokens of the probe."""
    return [batch for batch in WHOLE_PROBE(*specs, **options) if batch.name == "random tokens"]


def inner(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part of a config."""
    found: dict[str, Any] = config.get("text_config", config)
    return found


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for each in spec.parameters()}


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields, each with a value that gives another function of the same tensors, those of an eps first."""
    own, architecture = spec_of(config), architecture_of(config)
    reader = architecture.reader(inner(config))
    architecture.read(reader)
    names = [name for name in sorted(reader.used) if name not in ("model_type", "text_config")]
    for name in sorted(names, key=lambda name: "eps" not in name):
        for value in VALUES:
            changed = with_field(config, name, value)
            try:
                other = spec_of(changed)
            except ConfigError:
                continue
            if not one_function(own, other) and shapes(other) == shapes(own):
                yield name, value
                break


def with_field(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of a config.json with another value of a field, which may be of an object within it: `a.b`."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    *path, last = name.split(".")
    within = inner(changed)
    for part in path:
        if not isinstance(within.get(part), dict):
            within[part] = {}
        within = within[part]
    within[last] = value
    return changed


def set_in_config(folder: Path, name: str, value: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(with_field(json.loads(file.read_text()), name, value)))


def change_a_tensor(folder: Path, which: int) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        names = sorted(name for name, tensor in weights.items() if tensor.numel() > 1)
        name = names[which % len(names)]
        weights[name] = weights[name] * 1.5 + 0.1

    edited(folder, change)


def written(result: Verification) -> str:
    """What a user sees of a result, whichever way it is asked for; raises where one of them cannot be made."""
    verification_report(result)
    verification_page(result)
    return json.dumps(result.as_json())


@few(12)
@pytest.mark.parametrize("variant", rest_slow(VARIANTS))
def test_every_changed_copy_gets_a_verdict(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, probe):
        monkeypatch.setattr(each, "probe", one_input)
    save_hf(variant.config, tmp_path / "model")
    field = next(changes(variant.config))
    which = sum(map(ord, variant.name))  # another tensor in every variant

    def both(folder: Path) -> None:
        set_in_config(folder, *field)
        change_a_tensor(folder, which)

    made: dict[str, Callable[[Path], None]] = {
        "field": lambda folder: set_in_config(folder, *field),
        "tensor": lambda folder: change_a_tensor(folder, which),
        "both": both,
    }
    for name, change in made.items():
        copy = tmp_path / name
        shutil.copytree(tmp_path / "model", copy)
        change(copy)
        result = verify(tmp_path / "model", copy, mutations=False)
        assert result.exit_code == 3, (name, field)
        # Some tensors change the bytes and not the function: biases of keys, and of the choice of all experts alike.
        if name == "tensor" and result.verdict != "different":
            continue
        assert result.verdict == "different", (name, field)
        assert result.divergence is not None
        assert result.divergence.first is not None, (name, field)
        assert (result.damage is not None) == (name != "tensor")
        assert json.loads(written(result))["passed"] is False


@covered()
@pytest.mark.parametrize("variant", rest_slow(VARIANTS))
def test_a_context_shorter_than_the_probe_is_no_error(variant: Variant, tmp_path: Path) -> None:
    """Some classes of transformers have tables that end there, of positions that a tree computes without any."""
    config = json.loads(json.dumps(variant.config))
    stated = [name for name in LENGTHS if name in inner(config)]
    inner(config).update(dict.fromkeys(stated, SHORT))
    try:
        spec = spec_of(config)
    except ConfigError:
        pytest.skip("rotary scaling that needs a longer context")
    if spec.context_length != SHORT:
        pytest.skip("a family without a context of its own")
    save_hf(config, tmp_path / "model")
    result = verify(tmp_path / "model", mutations=False)
    assert (result.verdict, result.exit_code) == ("identical", 0)
    assert len(result.prompts) >= 4
