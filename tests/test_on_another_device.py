"""Commands on a device that is not the CPU: nothing stays behind on the CPU, and the results are those of the CPU.

`helpers.pretend` is this device. `test_on_gpu.py` has the tests for a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.edited import damaged, pairs, scale, setting, with_spec
from helpers.families import CONFIGS
from helpers.fitted import FITS, fitted, model_for
from helpers.pretend import pretended

import gptkit
from gptkit.errors import UsageError
from gptkit.parity import low_rank
from gptkit.parity.card import card, markdown
from gptkit.parity.damage import damage
from gptkit.parity.tensor_diff import compare_tensors
from gptkit.parity.verify import verify
from gptkit.report.verification import verdict_lines, verification_page
from gptkit.surgery.base import StoredModel
from gptkit.surgery.measure import OnText, measure

TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n"
FAMILIES = {"gpt2": CONFIGS["gpt2"], "llama": CONFIGS["llama"], "mixtral": CONFIGS["mixtral"]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A randomised checkpoint as HF files, and converted to gptkit's format; made once."""
    return pairs(FAMILIES, tmp_path_factory)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_verify(name: str, stream: bool, pair: Callable[[str], tuple[Path, Path]]) -> None:
    hf, _ = pair(name)
    on_cpu = verify(hf, stream=stream, mutations=False)
    with pretended() as device:
        result = verify(hf, stream=stream, device=device, mutations=not stream)
    assert (on_cpu.verdict, result.verdict) == ("identical", "identical")
    assert result.passed
    assert (result.device, result.hardware) == ("pretend:0", None)
    assert result.arguments[-2:] == ("--device", "pretend:0")
    assert result.score is None or (result.score.tried > 10 and not result.score.missed)


def test_a_wrong_field_is_found_and_named(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    wrong = with_spec(local, tmp_path / "wrong", setting(activation="gelu"))
    on_cpu = verify(hf, wrong, mutations=False)
    with pretended() as device:
        result = verify(hf, wrong, mutations=False, device=device)
    assert result.exit_code == on_cpu.exit_code == 3
    assert result.divergence is not None
    assert on_cpu.divergence is not None
    assert result.divergence.first is not None
    assert "feed-forward activation" in result.divergence.first.name
    assert [(cause.repair, cause.restores) for cause in result.divergence.causes] == [
        (cause.repair, cause.restores) for cause in on_cpu.divergence.causes
    ]
    assert result.damage is not None
    assert on_cpu.damage is not None
    assert np.allclose(result.damage.total.kl, on_cpu.damage.total.kl, rtol=1e-6)


def test_wrong_values_are_found_and_named(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mixtral")
    wrong = damaged(local, tmp_path / "wrong", scale("final_norm.weight", 1.25))
    with pretended() as device:
        result = verify(hf, wrong, mutations=False, device=device)
    assert result.exit_code == 3
    assert result.divergence is not None
    assert any("final_norm" in cause.repair for cause in result.divergence.causes)


def test_bf16_is_compared_by_component(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    other = with_spec(local, tmp_path / "other", setting(cast="after_weight"))
    verify(hf, other, dtype="bfloat16", mutations=False)
    with pretended() as device:
        result = verify(hf, other, dtype="bfloat16", mutations=False, device=device)
    assert result.verdict == "equal"
    assert set(result.noise.errors) == {"float32", "bfloat16"} if result.noise else False


def test_the_verdict_the_card_and_json_name_the_gpu(
    pair: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, _ = pair("gpt2")
    named = lambda device: "NVIDIA H100 80GB HBM3" if device.type == "pretend" else None  # noqa: E731
    monkeypatch.setattr("gptkit.parity.verify.hardware", named)
    with pretended() as device:
        result = verify(hf, device=device, mutations=False)
    assert result.place == "pretend:0 (NVIDIA H100 80GB HBM3)"
    assert any(line.endswith("sdpa attention, pretend:0") for line in verdict_lines(result))
    assert (result.as_json()["device"], result.as_json()["hardware"]) == ("pretend:0", "NVIDIA H100 80GB HBM3")
    data = card(result)
    assert data["hardware"]["device"] == "pretend:0"
    assert data["hardware"]["name"] == "NVIDIA H100 80GB HBM3"
    assert data["command"].endswith("--device pretend:0")
    assert "on NVIDIA H100 80GB HBM3 (" in markdown(data)
    assert "pretend:0 (NVIDIA H100 80GB HBM3)" in str(verification_page(result))
    plain = verify(hf, mutations=False)
    assert (plain.device, plain.hardware, "--device" in plain.arguments) == ("cpu", None, False)
    assert card(plain)["hardware"].keys() == {"machine", "threads", "device"}


# --- generate and eval ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["gpt2", "llama", "bloom"])
def test_generate(sample: str) -> None:
    texts = ["".join(gptkit.generate(f"sample:{sample}", "ROMEO:", 12, device="cpu"))]
    with pretended() as device:
        texts.append("".join(gptkit.generate(f"sample:{sample}", "ROMEO:", 12, device=device)))
        texts.append("".join(gptkit.generate(gptkit.load(f"sample:{sample}", device=device), "ROMEO:", 12)))
    assert len(set(texts)) == 1
    with pytest.raises(UsageError, match="only with the name of a model"):
        gptkit.generate(gptkit.load(f"sample:{sample}"), "ROMEO:", device="cpu")


@pytest.mark.parametrize("several", [False, True])
def test_eval(several: bool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    options: Any = {"past": 2, "rope": "yarn:2", "against": "sample:llama"}
    on_cpu = gptkit.evaluate("sample:llama", tmp_path / "text.txt", device="cpu", **options)
    with pretended() as device:
        where = [device, "pretend:1"] if several else device
        result = gptkit.evaluate("sample:llama", tmp_path / "text.txt", device=where, **options)
    assert np.allclose(_numbers(result.as_json()), _numbers(on_cpu.as_json()), rtol=1e-4, atol=1e-4)


def _numbers(node: Any) -> list[float]:
    """Return all numbers of a JSON value, in order."""
    if isinstance(node, dict | list):
        return [number for part in (node.values() if isinstance(node, dict) else node) for number in _numbers(part)]
    return [float(node)] if isinstance(node, int | float) else []


# --- swap -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), FITS)
def test_fits(option: str, value: str) -> None:
    _, model = model_for(option, value)
    on_cpu = fitted(option, value, model, "cpu")
    before = {parameter.name: on_cpu.tensor(parameter.name)[0] for parameter in on_cpu.spec.parameters()}
    with pretended() as device:
        there = fitted(option, value, model, device)
        for name, values in before.items():
            gap = np.linalg.norm(there.tensor(name)[0] - values) / max(float(np.linalg.norm(values)), 1e-9)
            assert gap < 1e-3, (name, gap)
    assert there.spec == on_cpu.spec


def test_measure_and_damage(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mixtral")
    changed = damaged(local, tmp_path / "changed", scale("blocks.1.attention.o_proj.weight", 1.5))
    before, after = (StoredModel(gptkit.open_checkpoint(folder)) for folder in (hf, changed))
    text = list(range(60))
    results = []
    with pretended() as device:
        for where in ("cpu", device):
            results.append(
                [
                    measure(before, after, text=text, device=where).as_json(),
                    damage(before, after, text=text, device=where).as_json(),
                    OnText(before, text, where).compare(after),
                ]
            )
    assert np.allclose(*map(_numbers, results), rtol=1e-4, atol=1e-6)
    assert results[0][0]["maximum"]["float64"] > 0.01


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The outputs of one swap with a fit, written on the CPU and on the other device."""
    folder = tmp_path_factory.mktemp("swapped")
    options: Any = {"attention": "mqa", "calibrate_tokens": 256, "blocks": "1"}
    gptkit.swap("sample:gpt2", folder / "cpu", **options, device="cpu")
    with pretended() as device:
        gptkit.swap("sample:gpt2", folder / "there", **options, device=device)
    return folder / "cpu", folder / "there"


def test_swap(swapped: tuple[Path, Path]) -> None:
    tensors = [safetensors.torch.load_file(folder / "model.safetensors") for folder in swapped]
    manifests = [json.loads((folder / "manifest.json").read_text())["swap"] for folder in swapped]
    for name, values in tensors[0].items():
        assert torch.allclose(values.double(), tensors[1][name].double(), rtol=1e-3, atol=1e-4), name
    assert np.allclose(*(_numbers(manifest["measured"]) for manifest in manifests), rtol=1e-2, atol=1e-4)
    assert "device" not in manifests[0]
    assert manifests[1]["device"] == "pretend:0"


# --- diff and audit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 300])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_ranks(columns: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((320, columns))
    b = a + random.standard_normal((320, 5)) @ random.standard_normal((5, columns))
    a, b = (matrix.astype({"F32": "float32", "F64": "float64"}[dtype]) for matrix in (a, b))
    on_cpu = compare_tensors(a, dtype, b, dtype)
    with pretended() as device:
        there = compare_tensors(a, dtype, b, dtype, device=torch.device(device))
    assert on_cpu.rank is not None
    assert there.rank is not None
    assert (on_cpu.rank.rank, there.rank.rank) == (5, 5)
    assert on_cpu.rank.share == pytest.approx(there.rank.share)


def test_diff_multiplies_on_the_device(swapped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of `diff` do not know the device of `pretended`, so a number takes its place."""
    devices, multiplied = set(), low_rank.product

    def product(a: Any, b: Any, device: Any) -> Any:
        devices.add(device)
        return multiplied(a, b)

    monkeypatch.setattr(low_rank, "product", product)
    monkeypatch.setattr("gptkit.modules.devices.device_of", lambda *_: torch.device("cuda:1"))
    gptkit.diff("sample:gpt2", swapped[0], device="cuda:1")
    assert devices == {torch.device("cuda:1")}
    devices.clear()
    gptkit.diff("sample:gpt2", swapped[0], device="cpu")
    assert devices == {None}


def test_audit(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, _ = pair("llama")
    new = tmp_path / "new"
    gptkit.convert(hf, new, "hf")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.05}))
    on_cpu = gptkit.audit(new, source=hf, values=True, device="cpu")
    with pretended() as device:
        there = gptkit.audit(new, source=hf, values=True, device=device)
    assert [finding.message for finding in on_cpu.findings] == [finding.message for finding in there.findings]
    assert any("logits differ by" in finding.message for finding in there.findings)
