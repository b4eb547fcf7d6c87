"""Definitions from outside: modules of other packages that register families, components, swaps and formats.

A plugin is a module or a file of Python, and importing it registers what it has: a component by its class alone, which
names the module that computes it (`Component.computed_in`), a family by `architectures.register`, swaps by
`surgery.registry.register`, a format by `converter.targets.register`. It is found by an entry point of the group
`gptkit.plugins`, or named by `--plugin MODULE`, `--plugin FILE.py` or in GPTKIT_PLUGINS (several by commas). Each is
imported once, before anything else is done.
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
    """Import the plugins that are named, those of GPTKIT_PLUGINS, and those that are installed.

    One that cannot be imported is told on stderr in a line, and ignored.
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
    """Import a file of Python that lies anywhere, as a module of the file's name; raises whatever it does."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)


@cache
def _installed() -> tuple[str, ...]:
    """The modules of entry points. Who reads these takes 20 ms to import, and waits until one names the group."""
    folders = [folder for folder in map(Path, dict.fromkeys(sys.path)) if folder.is_dir()]
    files = (path for folder in folders for path in folder.glob("*.*-info/entry_points.txt"))
    if not any(GROUP.encode() in path.read_bytes() for path in files):
        return ()
    from importlib.metadata import entry_points

    return tuple(dict.fromkeys(each.value for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)))
