"""Build the wheel of `hf-gptkit`: gptkit's code for commands that need neither torch nor transformers.

    python wheels/light.py FOLDER

The distribution `hf-gptkit` has the same modules as `gptkit`, in a package named `hf_gptkit`, so that both can be
installed side by side. It depends on neither torch nor transformers, and its command is `hf-gptkit`, the name that
extensions of `hf` need (`hf extensions install`). All imports inside gptkit are relative, so only pyproject.toml
differs. The wheel is written to FOLDER.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "hf-gptkit"
PACKAGE = "hf_gptkit"
HEAVY = ("torch", "transformers", "greenlet")
"""The dependencies of gptkit that `hf-gptkit` lacks. gptkit.parity uses greenlet only to run models."""
DESCRIPTION = "Count, compare, audit, diff and convert GPT-style checkpoints, without torch and transformers."

_PROJECT = """\
[build-system]
requires = {requires}
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "{description}"
readme = "README.md"
requires-python = "{python}"
license = "{license}"
license-files = ["LICENSE"]
keywords = {keywords}
dependencies = {dependencies}

[project.optional-dependencies]
gguf = {gguf}
html = {html}

[project.scripts]
{name} = "{package}.__main__:main"

[tool.setuptools]
package-dir = {{ "{package}" = "." }}
packages = {packages}
include-package-data = false

[tool.setuptools.package-data]
{data}
"""


def needed(dependencies: list[str]) -> list[str]:
    """Return the dependencies without those in `HEAVY`."""
    return [each for each in dependencies if re.split(r"[<>=\[ ]", each)[0] not in HEAVY]


def pyproject(original: dict[str, Any], version: str) -> str:
    """Return the pyproject.toml of `hf-gptkit`, given that of gptkit (parsed) and the version."""
    project, built = original["project"], original["tool"]["setuptools"]

    def renamed(package: str) -> str:
        return re.sub(r"^gptkit", PACKAGE, package)

    data = {renamed(package): patterns for package, patterns in built["package-data"].items()}
    return _PROJECT.format(
        name=NAME,
        package=PACKAGE,
        version=version,
        description=DESCRIPTION,
        python=project["requires-python"],
        license=project["license"],
        requires=json.dumps(original["build-system"]["requires"]),
        keywords=json.dumps(project["keywords"]),
        dependencies=json.dumps(needed(project["dependencies"]), indent=4),
        gguf=json.dumps(project["optional-dependencies"]["gguf"]),
        html=json.dumps(project["optional-dependencies"]["html"]),
        packages=json.dumps([renamed(package) for package in built["packages"]], indent=4),
        data="\n".join(f"{json.dumps(package)} = {json.dumps(patterns)}" for package, patterns in data.items()),
    )


def copy_sources(original: dict[str, Any], target: Path) -> None:
    """Copy the packages of gptkit, their data and the licence to `target`, in the same folders."""
    built = original["tool"]["setuptools"]
    for package in built["packages"]:
        folder = package.replace(".", "/").removeprefix("gptkit").lstrip("/")
        patterns = ("*.py", *built["package-data"].get(package, ()))
        for path in (path for pattern in patterns for path in (ROOT / folder).glob(pattern)):
            place = target / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    shutil.copyfile(ROOT / "LICENSE", target / "LICENSE")


def build(folder: Path) -> None:
    """Build the wheel of `hf-gptkit` into a folder.

    Raises:
        subprocess.CalledProcessError: The build fails; stdout has its messages.
    """
    original = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "version.py").read_text(encoding="utf-8"), re.M)
    assert version is not None, "version.py has no __version__"
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        copy_sources(original, source)
        (source / "pyproject.toml").write_text(pyproject(original, version[1]), encoding="utf-8")
        shutil.copyfile(ROOT / "wheels" / "README.md", source / "README.md")
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder.resolve()), str(source)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stdout)
