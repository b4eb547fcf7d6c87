"""A package that is not installed is named, and how to install it: no command calls that a bug of gptkit's."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Lacking(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

PACKAGE, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Lacking())
from gptkit.cli import main
main()
"""
CALLS = [
    ("torch", "verify sample:llama"),
    ("torch", "generate sample:llama hello"),
    ("torch", "swap sample:gpt2 OUT --norm rmsnorm"),
    ("transformers", "verify sample:llama"),
    ("safetensors", "swap sample:gpt2 OUT --norm rmsnorm"),
]


@pytest.mark.parametrize(("package", "call"), CALLS)
def test_a_package_that_is_not_installed_is_named(package: str, call: str, tmp_path: object) -> None:
    words = call.replace("OUT", f"{tmp_path}/out").split()
    run = subprocess.run([sys.executable, "-c", PROGRAM, package, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    said = f"gptkit: this command needs the Python package {package}, which is not installed\n"
    assert run.stderr == f"{said}  Install it: pip install {package}\n"
