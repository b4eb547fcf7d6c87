"""The pytest plugin in a small project outside of the repository."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.covering import exhaustive

import gptkit
from gptkit.errors import UnknownFamily
from gptkit.testing import assert_same_function, tiny_checkpoint

PORT = """
import gptkit

def right():
    return gptkit.load("sample:llama", dtype="float32")

def wrong():
    model = right()
    for layer in model.blocks:
        layer.feed_forward.activation = lambda x: x * (1.702 * x).sigmoid()
    return model
"""
TESTS = """
import pytest
from port import right, wrong

@pytest.mark.parametrize("build", [right, wrong])
def test_a_port(assert_same_function, build):
    assert_same_function(build, "sample:llama")

def test_a_tiny_checkpoint(tiny_checkpoint):
    folder = tiny_checkpoint("qwen3", seed=2)
    assert (folder / "config.json").is_file() and tiny_checkpoint("qwen3", seed=2) == folder
"""


@exhaustive
def test_a_planted_bug_fails_the_test_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    (tmp_path / "test_port.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "FAILED test_port.py::test_a_port[wrong]" in done.stdout
    assert "function  DIFFERENT: wrong against transformers" in done.stdout
    assert "place     layer 0 feed-forward activation" in done.stdout
    assert "cause     the activation quick_gelu" in done.stdout
    assert "in verify_port" not in done.stdout


def test_pytest_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys, gptkit.pytest_plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_is_not_changed() -> None:
    model = gptkit.load("sample:gpt2", dtype="float64").train()
    assert_same_function(model, "sample:gpt2")
    assert model.training and {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_tiny_checkpoints_are_random_and_repeatable(tmp_path: Path) -> None:
    folders = [tiny_checkpoint("llama", tmp_path / str(turn), seed) for turn, seed in enumerate((1, 1, 2))]
    first, again, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == again != other
    model = gptkit.load(folders[0])
    assert all(parameter.std() > 0.01 for parameter in model.parameters() if parameter.numel() > 1)
    with pytest.raises(UnknownFamily):
        tiny_checkpoint("lama", tmp_path / "lama")
