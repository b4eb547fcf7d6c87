"""The light distribution `hf-gptkit`: the same code as another package, without torch, transformers and greenlet."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import exhaustive

ROOT = Path(__file__).parents[1]
RUN = """
import sys
for name in ("torch", "transformers", "greenlet", "gptkit"):
    sys.modules[name] = None
from hf_gptkit.__main__ import main
main()
"""


def light() -> Any:
    spec = importlib.util.spec_from_file_location("light", ROOT / "wheels" / "light.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which gptkit's code is the package hf_gptkit."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "hf_gptkit").symlink_to(ROOT)
    return folder


def run(path: Path, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", RUN, *words], cwd=cwd, env=env, capture_output=True, text=True)


@exhaustive
@pytest.mark.parametrize(
    "command",
    [
        "params qwen3-8b --memory",
        "compare gpt2 qwen3-8b",
        "show sample:llama",
        "families",
        "presets",
        "recommend --goal quality --params 100M",
        "audit sample:llama --values",
        "convert sample:llama local",
        "convert sample:llama model.gguf --to gguf",
        "swaps",
        "swap sample:llama out --attention mqa --norm layernorm --dry-run",
    ],
)
def test_commands_need_no_torch(command: str, path: Path, tmp_path: Path) -> None:
    done = run(path, command.split(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_model_is_counted_as_by_the_full_package(path: Path, tmp_path: Path) -> None:
    full = subprocess.run(
        [sys.executable, "-m", "gptkit", "params", "qwen3-8b", "--json"], capture_output=True, text=True, check=True
    )
    assert run(path, ["params", "qwen3-8b", "--json"], tmp_path).stdout == full.stdout


def test_what_needs_torch_names_the_full_package(path: Path, tmp_path: Path) -> None:
    done = run(path, ["verify", "sample:llama"], tmp_path)
    assert done.returncode == 1
    assert "needs the Python package torch, which is not installed" in done.stderr
    assert "pip install gptkit" in done.stderr


def test_its_pyproject_lists_the_same_packages() -> None:
    original = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made = tomllib.loads(light().pyproject(original, "1.2.3"))
    packages = [f"gptkit{name.removeprefix('hf_gptkit')}" for name in made["tool"]["setuptools"]["packages"]]
    assert packages == original["tool"]["setuptools"]["packages"]
    missing = set(original["project"]["dependencies"]) - set(made["project"]["dependencies"])
    assert sorted(name.split(">")[0] for name in missing) == ["greenlet", "torch", "transformers"]
    assert made["project"]["scripts"] == {"hf-gptkit": "hf_gptkit.__main__:main"}


@pytest.mark.slow
def test_the_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    light().build(tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 10 * 2**20
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "download", "-q", "-c", ROOT / "constraints.txt", "-d", tmp_path / "files", wheel], check=True
    )
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "files").iterdir()}
    assert sum(sizes.values()) < 60 * 2**20, sizes
    subprocess.run([*pip, "install", "-q", "--no-index", "-f", tmp_path / "files", wheel], check=True)
    counted = subprocess.run(
        [tmp_path / "env" / "bin" / "hf-gptkit", "params", "qwen3-8b"], capture_output=True, text=True, check=True
    )
    assert "8,190,735,360" in counted.stdout
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout.lower()
    assert "torch" not in listed and "transformers" not in listed


@exhaustive
@pytest.mark.parametrize(("script", "words"), [("count_on_the_hub.py", "gpt2"), ("audit_folders.py", "samples")])
def test_one_file_scripts(script: str, words: str, path: Path) -> None:
    """As `uv run` starts them: with the light package alone."""
    blocked = (
        "import sys, runpy\nfor name in ('torch', 'transformers', 'greenlet', 'gptkit'): sys.modules[name] = None\n"
    )
    code = f"{blocked}sys.argv[0] = sys.argv[1]; del sys.argv[1]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(ROOT / "examples" / script), words]
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "124,439,808" in done.stdout or "samples/llama: right" in done.stdout
    header = tomllib.loads("\n".join(line[2:] for line in (ROOT / "examples" / script).read_text().splitlines()[1:3]))
    assert header["dependencies"] == ["hf-gptkit"]
