"""Commands on a real GPU. Without one, pytest skips all of these tests. They take a minute and need no network.

    mkdir -p /tmp/path && ln -sfn "$PWD" /tmp/path/gptkit
    PYTHONPATH=/tmp/path python3 -m pytest tests/test_on_gpu.py -W ignore --durations=0

GPTKIT_TEST_DEVICE=cpu runs those that need no GPU on the CPU, to test the tests themselves.
"""

import gc
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command import call
from helpers.edited import damaged, pairs, scale, setting, with_spec
from helpers.families import CONFIGS
from helpers.fitted import FITS, fitted, model_for

import gptkit
from gptkit.errors import GptkitError, UsageError
from gptkit.modules.devices import device_of, in_float32, in_words
from gptkit.parity.sides import load_reference, quiet
from gptkit.parity.verify import verify
from gptkit.surgery.measure import OnText

DEVICE = os.environ.get("GPTKIT_TEST_DEVICE", "cuda")
GPU = torch.cuda.is_available() and DEVICE.startswith("cuda")
pytestmark = pytest.mark.skipif(DEVICE.startswith("cuda") and not GPU, reason="this machine has no GPU")
only_gpu = pytest.mark.skipif(not GPU, reason="this test needs a GPU")
TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n"
FAMILIES = {"gpt2": CONFIGS["gpt2"], "llama": CONFIGS["llama"], "mixtral": CONFIGS["mixtral"]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A randomised checkpoint as HF files, and converted to gptkit's format; made once."""
    return pairs(FAMILIES, tmp_path_factory)


# --- devices ----------------------------------------------------------------------------------------------------------


@only_gpu
def test_names() -> None:
    count = torch.cuda.device_count()
    assert device_of("auto") == device_of(None) == device_of("cuda") == torch.device("cuda", 0)
    assert torch.cuda.get_device_name(0) in in_words(device_of("auto"))
    with pytest.raises(UsageError, match=f"there is no device cuda:{count}"):
        device_of(f"cuda:{count}")
    done = call("generate", "sample:llama", "ROMEO:", "-n", "4", "--device", f"cuda:{count}")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 2)


def test_load() -> None:
    done = call("load", "sample:llama", "--device", DEVICE)
    assert done.exit_code == 0, done.stderr
    assert in_words(device_of(DEVICE)) in done.stdout or DEVICE == "cpu"
    model = gptkit.load("sample:llama", device=DEVICE)
    assert {parameter.device for parameter in model.parameters()} == {device_of(DEVICE)}
    assert gptkit.load("sample:llama").embedding.weight.device.type == "cpu"


@only_gpu
def test_tf32_is_off_in_comparisons() -> None:
    if torch.cuda.get_device_capability() < (8, 0) or torch.version.hip:
        pytest.skip("this GPU has no TF32")
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = a.double() @ b.double()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with in_float32():
            inside = (a @ b - exact).abs().max().item()
        outside = (a @ b - exact).abs().max().item()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert inside < 1e-3 < outside


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verified(pair: Callable[[str], tuple[Path, Path]]) -> Callable[[str, str], dict[str, Any]]:
    """Return what `gptkit verify --json` prints for a family and an attention implementation. Each runs once."""

    @cache
    def run(name: str, attention: str) -> dict[str, Any]:
        words = ["--attention", attention, "--no-mutations", "--json", "--device", DEVICE]
        done = call("verify", pair(name)[0], *words)
        data: dict[str, Any] = json.loads(done.stdout)
        return {**data, "exit_code": done.exit_code}

    return run


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_verify(name: str, attention: str, verified: Callable[[str, str], dict[str, Any]]) -> None:
    data = verified(name, attention)
    assert (data["exit_code"], data["passed"]) == (0, True)
    assert data["verdict"] in ("identical", "equal")
    assert max(prompt["maximum"] for prompt in data["prompts"]) < 1e-3
    assert data["device"] == str(device_of(DEVICE))
    assert data["hardware"] == (torch.cuda.get_device_name(0) if GPU else None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_verify_is_exact(name: str, attention: str, verified: Callable[[str, str], dict[str, Any]]) -> None:
    """A GPU may sum in another order in a product of other sizes, so that a failure need not be a mistake of gptkit."""
    apart = {prompt["name"]: prompt["maximum"] for prompt in verified(name, attention)["prompts"] if prompt["maximum"]}
    assert apart == {}


def test_verify_with_mistakes_made_on_purpose(pair: Callable[[str], tuple[Path, Path]]) -> None:
    result = verify(pair("llama")[0], device=DEVICE)
    assert result.score is not None
    assert (result.exit_code, result.score.missed) == (0, ())
    assert result.score.tried > 10


def test_verify_one_layer_at_a_time_and_in_bf16(pair: Callable[[str], tuple[Path, Path]]) -> None:
    for name in FAMILIES:
        assert verify(pair(name)[0], stream=True, mutations=False, device=DEVICE).exit_code == 0
        assert verify(pair(name)[0], dtype="bfloat16", mutations=False, device=DEVICE).exit_code == 0


def test_another_way_to_round_is_equal(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    other = with_spec(local, tmp_path / "other", setting(cast="after_weight"))
    result = verify(hf, other, dtype="bfloat16", mutations=False, device=DEVICE)
    assert (result.verdict, result.exit_code) == ("equal", 0)
    assert result.noise is not None
    assert 0 < result.noise.reference < 1e-3  # in float32, which TF32 would make larger


def test_a_wrong_field_is_found_and_named(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("llama")
    wrong = with_spec(local, tmp_path / "wrong", setting(activation="gelu"))
    card = tmp_path / "card"
    done = call("verify", hf, wrong, "--no-mutations", "--card", card, "--device", DEVICE)
    assert done.exit_code == 3, done.stderr
    assert "feed-forward activation: the first component that differs" in done.stdout
    assert "the reference's activation" in " ".join(done.stdout.split())
    if GPU:
        name = torch.cuda.get_device_name(0)
        assert f"device    cuda:0 ({name})" in done.stdout
        written = json.loads(card.with_suffix(".json").read_text())
        assert (written["hardware"]["device"], written["hardware"]["name"]) == ("cuda:0", name)
        assert name in card.with_suffix(".md").read_text()


def test_wrong_values_are_found_and_named(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, local = pair("mixtral")
    wrong = damaged(local, tmp_path / "wrong", scale("final_norm.weight", 1.25))
    result = verify(hf, wrong, mutations=False, device=DEVICE)
    assert result.exit_code == 3
    assert result.divergence is not None
    assert any("final_norm" in cause.repair for cause in result.divergence.causes)


# --- generate and eval ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_generate(name: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    hf, _ = pair(name)
    prompt = [5, 1, 9, 17, 3]
    text = "".join(gptkit.generate(hf, prompt, 24, stop_at_eos=False, device=DEVICE))
    reference = load_reference(hf, torch.float32, "sdpa").to(DEVICE)
    with quiet(), torch.inference_mode():
        ids = torch.tensor([prompt], device=DEVICE)
        options: Any = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    assert [int(token) for token in text.split()] == theirs


def test_the_command_generate() -> None:
    texts = [call("generate", "sample:llama", "ROMEO:", "-n", "20", "-q", "--device", name) for name in ("cpu", DEVICE)]
    assert [done.exit_code for done in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout


def test_a_model_on_two_devices() -> None:
    ids = torch.arange(1, 40)[None]
    for sample in ("gpt2", "llama"):
        whole, parts = (gptkit.load(f"sample:{sample}", device=device) for device in ("cpu", [DEVICE, "cpu"]))
        assert {parameter.device.type for parameter in parts.parameters()} == {"cpu", device_of(DEVICE).type}
        with torch.inference_mode():
            assert torch.allclose(whole(ids), parts(ids).cpu(), rtol=1e-3, atol=1e-3)
        text = "".join(gptkit.generate(parts, "ROMEO:", 12))
        assert text == "".join(gptkit.generate(whole, "ROMEO:", 12))


def test_eval(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    options: Any = {"past": 2, "rope": "yarn:2", "against": "sample:llama"}
    on_cpu, there = (
        gptkit.evaluate("sample:llama", tmp_path / "text.txt", device=device, **options) for device in ("cpu", DEVICE)
    )
    assert on_cpu.score.perplexity == pytest.approx(there.score.perplexity, rel=1e-4)
    losses = [[part.nats.value for curve in result.extrapolation for part in curve.bins] for result in (on_cpu, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-3)


# --- swap -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), FITS)
def test_fits(option: str, value: str) -> None:
    """The weights may differ, because the signs of eigenvectors do. The result must be as near to the original."""
    _, model = model_for(option, value)
    text = torch.randint(model.spec.vocab_size, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    near = []
    for device in ("cpu", DEVICE):
        compared = OnText(model, text, device).compare(fitted(option, value, model, device))
        assert compared is not None
        near.append(compared["kl_text"])
    assert near[0] == pytest.approx(near[1], rel=0.05, abs=1e-4)


def test_swap(tmp_path: Path) -> None:
    measured, words = [], ["--attention", "mqa", "--blocks", "1", "--calibrate-tokens", "512", "-q"]
    for name, device in (("first", "cpu"), ("second", DEVICE)):
        done = call("swap", "sample:gpt2", tmp_path / name, *words, "--device", device)
        assert done.exit_code == 0, done.stderr
        measured.append(json.loads((tmp_path / name / "manifest.json").read_text())["swap"])
    assert measured[0]["measured"]["text"]["kl"] == pytest.approx(measured[1]["measured"]["text"]["kl"], rel=0.05)
    assert measured[1].get("device") == (in_words(device_of(DEVICE)) if GPU else None)


def test_an_exact_swap_writes_the_same_bytes(tmp_path: Path) -> None:
    results = [
        gptkit.swap("sample:gpt2", tmp_path / name, norm="rmsnorm", to="local", device=device)
        for name, device in (("first", "cpu"), ("second", DEVICE))
    ]
    assert [result.guarantee for result in results] == ["exact", "exact"]
    assert results[1].measured is not None
    assert results[1].measured.relative["float64"] < 1e-12
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


# --- diff and audit ---------------------------------------------------------------------------------------------------


def test_diff(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, local = pair("llama")

    def add_low_rank(tensors: dict[str, torch.Tensor]) -> None:
        for name, values in tensors.items():
            if values.ndim == 2 and "mlp" not in name:
                rows, columns = values.shape
                random = np.random.default_rng(0)
                values += torch.tensor(random.standard_normal((rows, 3)) @ random.standard_normal((3, columns))).float()

    changed = damaged(local, tmp_path / "changed", add_low_rank)
    assert call("diff", local, changed, "--device", DEVICE).exit_code == 3
    results = [gptkit.diff(local, changed, device=device) for device in ("cpu", DEVICE)]
    figures = [{tensor.name: tensor.figures for tensor in result.tensors} for result in results]
    ranks = [
        {name: figure.rank.rank for name, figure in each.items() if figure is not None and figure.rank is not None}
        for each in figures
    ]
    assert ranks[0] == ranks[1]
    assert 3 in ranks[0].values()


def test_audit(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    hf, _ = pair("llama")
    new = tmp_path / "new"
    gptkit.convert(hf, new, "hf")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.05}))
    done = [call("audit", new, "--source", hf, "--values", "--json", "--device", name) for name in ("cpu", DEVICE)]
    findings = [json.loads(each.stdout)["findings"] for each in done]
    assert [each.exit_code for each in done] == [3, 3]
    assert [finding["rule"] for finding in findings[0]] == [finding["rule"] for finding in findings[1]]
    assert any("logits differ by" in finding["message"] for finding in findings[1])


# --- memory -----------------------------------------------------------------------------------------------------------


@only_gpu
def test_a_full_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    total, taken = torch.cuda.get_device_properties(0).total_memory, list[torch.Tensor]()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total)
        for size in (2**24, 2**20, 2**16, 2**12, 2**9):  # take what is free in memory that PyTorch has already
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(GptkitError, match=r"the memory of cuda:0 .* is full: PyTorch needs") as caught:
            gptkit.load("sample:llama", dtype="float64", device="cuda")
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        for words in (["generate", "--ids", "1"], ["verify"], ["eval", "--data", __file__]):
            done = call(words[0], "sample:llama", *words[1:], "--device", "cuda")
            lines = done.stderr.splitlines()
            assert (done.exit_code, len(lines)) == (1, 2), done.stderr
            assert torch.cuda.get_device_name(0) in lines[0]
            assert lines[1].startswith(f"To see what fits: gptkit params sample:llama --gpu {round(total / 2**30)}GB")
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert call("generate", "sample:llama", "ROMEO:", "-n", "2", "--device", "cuda").exit_code == 0
