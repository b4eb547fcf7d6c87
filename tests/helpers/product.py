"""The product's own code, as it lies in the repository."""

import ast
from functools import cache
from pathlib import Path

import gptkit

ROOT = Path(gptkit.__file__).parent
_APART = ("tests", "docs", "benchmarks", "examples", "wheels", "build", "dist")


@cache
def product() -> dict[str, Path]:
    """The product's files by their paths in it. Environments, of many thousand files, are not looked into."""
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name not in _APART]
    folders = [each for each in folders if not each.name.startswith((".", "_"))]
    found = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(found)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
