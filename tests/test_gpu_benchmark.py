"""benchmarks/gpu.py, small and on a CPU: every section, the file that it writes, and what a failure does."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.covering import exhaustive

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        del sys.modules[spec.name]


def bench(gpu, **given):
    result = {"parity": [], "rows": [], "same_tokens": {}, "launched": {}, "whole_size": {}}
    result |= {"errors": {}, "left_out": [], "seconds": {}}
    about = {"device": gpu.torch.device("cpu"), "small": True, "end": time.monotonic() + 600, "out": None, **given}
    return gpu.Bench(**about, result=result)


@exhaustive
def test_a_small_run_measures_everything_that_is_not_compiled(tmp_path, gpu):
    out = tmp_path / "gpu.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--small", "--out", out], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    result = json.loads(out.read_text())
    assert not result["errors"] and not result["left_out"]
    assert set(result["seconds"]) == set(gpu.SECTIONS) - set(gpu.COMPILED)
    assert {row["name"].split()[0] for row in result["parity"]} == set(gpu.FAMILIES)
    assert all(row["passed"] and row["cases"] == 4 for row in result["parity"])
    assert {name: row["passed"] for name, row in result["whole_size"].items()} == {"gpt2": True, "llama": True}
    assert {row["section"] for row in result["rows"]} == {"decode", "prefill", "forward", "train", "heal"}
    assert all(
        row["ratio"] == pytest.approx(row["gptkit"] / row["peer"]) and row["share"] > 0 for row in result["rows"]
    )


def test_decoding_compares_both_caches_with_both_of_transformers(gpu):
    measured = bench(gpu, copied=1e9)
    gpu.decoding(measured, "llama")
    names = [row["name"] for row in measured.result["rows"]]
    assert names == [f"llama decode: {caches}" for caches in ("dynamic, dynamic", "static, dynamic", "static, static")]
    assert set(measured.result["rows"][-1]["first_call_seconds"]) == {"gptkit", "peer"}
    assert measured.result["same_tokens"]["llama"]["dynamic and peer"] == 1


def test_parity_fails_where_weights_differ(gpu, monkeypatch):
    def damaged(*given):
        model = gpu_decoder(*given)
        with gpu.torch.no_grad():
            model.blocks[0].attention.q_proj.weight.mul_(1.05)
        return model

    gpu_decoder = gpu.decoder_from
    monkeypatch.setattr(gpu, "decoder_from", damaged)
    monkeypatch.setattr(gpu, "FAMILIES", {"llama": gpu.FAMILIES["llama"]})
    measured = bench(gpu)
    assert not gpu.run(measured, ["parity"])
    assert not any(row["passed"] for row in measured.result["parity"] if "float32" in row["name"])
    assert "parity failed" in measured.result["errors"]["parity"][-1]


def test_a_section_that_fails_or_takes_too_long_lets_the_next_one_run(gpu, monkeypatch, capsys):
    ran = []
    sections = {
        "fails": (5.0, lambda bench: 1 // 0),
        "waits": (0.2, lambda bench: time.sleep(5)),
        "works": (5.0, ran.append),
    }
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    measured = bench(gpu)
    assert not gpu.run(measured, list(sections))
    assert len(ran) == 1 and set(measured.result["errors"]) == {"fails", "waits"}
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed and "more than 0 s" in printed


def test_what_there_is_no_time_for_is_left_out(gpu):
    measured = bench(gpu, end=time.monotonic() + 1)
    assert gpu.run(measured, ["parity"]) and measured.result["left_out"] == ["parity"]


def test_a_step_of_decoding_reads_each_weight_once(gpu):
    config = bench(gpu).config("gpt2")
    spec = gpu.architecture_of(config).spec(config)
    weights = sum(parameter.count for parameter in spec.parameters()) - config["n_positions"] * config["n_embd"]
    kept = 2 * config["n_layer"] * config["n_embd"] * 10
    assert math.isclose(gpu._decoded_bytes(spec, 10), 2 * (weights + kept))
