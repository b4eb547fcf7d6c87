"""Import plugins: modules of other packages that register families, components, swaps and formats.

A plugin is a Python module or file that registers its definitions when it is imported. The definition of a component's
class registers the component, and names the module that computes it (`Component.computed_in`). Families are registered
by `architectures.register`, swaps by `surgery.registry.register`, formats by `converter.targets.register`. gptkit finds
a plugin by an entry point of the group `gptkit.plugins`, by `--plugin MODULE` or `--plugin FILE.py`, or in the
environment variable GPTKIT_PLUGINS (separated by commas). Every plugin is imported once, before the command starts.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from .terminal import complain

GROUP = "gptkit.plugins"


def load(named: Iterable[str] = ()) -> None:
    """Import the installed plugins, the plugins in the environment variable GPTKIT_PLUGINS, and the `named` ones.

    `named` has names of modules and paths of .py files. GPTKIT_PLUGINS has the same, separated by commas. If an import
    fails, a line on stderr reports it and the plugin is ignored.
    """
    for name in (*_installed(), *os.environ.get("GPTKIT_PLUGINS", "").split(","), *named):
        if name.strip():
            _import(name.strip())


@cache
def _import(name: str) -> None:
    try:
        import_file(Path(name)) if name.endswith(".py") else import_module(name)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        complain(f"the plugin {name} is ignored: {type(error).__name__}: {reason}".rstrip(": "))


def import_file(path: Path) -> None:
    """Import a Python file as a module of the file's name. Errors of the file itself are raised unchanged."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@cache
def _installed() -> tuple[str, ...]:
    """Return the modules that installed packages declare as entry points of the group `gptkit.plugins`.

    Importing `importlib.metadata` takes 20 ms, so it is only imported if some package mentions the group.
    """
    folders = [folder for folder in map(Path, dict.fromkeys(sys.path)) if folder.is_dir()]
    files = (path for folder in folders for path in folder.glob("*.*-info/entry_points.txt"))
    if not any(GROUP.encode() in path.read_bytes() for path in files):
        return ()
    from importlib.metadata import entry_points

    return tuple(
        dict.fromkeys(entry.value for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name))
    )
