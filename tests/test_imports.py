"""Arrows between modules: no circle, and none that points up in the order that docs/architecture.md tells.

Every import counts, those within functions and those for the type checker alone too, and so does import_module of a
name that is written out.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from helpers.product import ROOT, parsed, product


def modules() -> dict[str, Path]:
    """Every module of the package by its name within it; the package itself is ""."""
    names = {name: name.removesuffix(".py").replace("/", ".") for name in product()}
    return {names[name].removesuffix("__init__").rstrip("."): path for name, path in product().items()}


def imported(package: str, node: ast.AST) -> Iterator[str]:
    """The modules that a statement names, or a name in one of them."""
    if isinstance(node, ast.Import):
        yield from (name.name.removeprefix("gptkit.") for name in node.names if name.name.startswith("gptkit."))
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        if node.level or (node.module or "").partition(".")[0] == "gptkit":
            base = [*filter(None, above), *(node.module or "").removeprefix("gptkit").split(".")]
            yield from (".".join(filter(None, [*base, name.name])) for name in node.names)
    elif isinstance(node, ast.Call) and "import_module" in (
        getattr(node.func, "id", ""),
        getattr(node.func, "attr", ""),
    ):
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith((".", "gptkit")):
            yield first.value.removeprefix("gptkit").lstrip(".")


@cache
def arrows() -> dict[str, set[str]]:
    """For each module those that it imports."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = (each for node in ast.walk(parsed(path)) for each in imported(package, node))
        graph[name] = {each if each in known else each.rpartition(".")[0] for each in named} - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles, one for each pair of modules that has to part until there is none."""
    left, found = {name: set(targets) for name, targets in graph.items()}, []
    while True:
        try:
            list(TopologicalSorter(left).static_order())
        except CycleError as error:
            circle = error.args[1]
            found.append(circle[:-1])
            left[circle[1]].discard(circle[0])
        else:
            return found


def order() -> dict[str, int]:
    """The floor of every folder and top-level module, from the ground up."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    line = re.search(r"This is the whole order.*?:\s(.*?)\.\s", told, re.DOTALL)
    assert line is not None
    floors = [re.findall(r"\w+", floor) for floor in line[1].split("→")]
    return {name: floor for floor, names in enumerate(reversed(floors)) for name in names}


def test_there_is_no_circle() -> None:
    assert list(circles(arrows())) == []


def test_no_arrow_points_up() -> None:
    floors = order()
    graph = arrows()
    assert {name.partition(".")[0] for name in graph if name} == set(floors)
    up = {
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if name and (not target or floors[name.partition(".")[0]] < floors[target.partition(".")[0]])
    }
    assert up == set()


def test_circles_and_arrows_are_seen() -> None:
    code = "def f():\n    from ..report import notebook\nif TYPE_CHECKING:\n    from .. import cli\n"
    code += "import gptkit.surgery.swap\n"
    code += "import_module('.report.notebook', 'gptkit')\nfrom . import parameters\nfrom ..version import __version__\n"
    seen = {each for node in ast.walk(ast.parse(code)) for each in imported("analysis", node)}
    assert seen == {"report.notebook", "cli", "surgery.swap", "analysis.parameters", "version.__version__"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert circles({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}) == []


def test_a_family_is_read_in_two_files_at_most() -> None:
    """A family imports at most families that import none, and the engine imports no family but those of formats."""
    place = "architectures.families."
    between = {name: {each for each in named if each.startswith(place)} for name, named in arrows().items()}
    deep = {
        name: sorted(each for each in named if between[each])
        for name, named in between.items()
        if name.startswith(place)
    }
    assert not {name: each for name, each in deep.items() if each}
    engine = {name for name, named in between.items() if named and not name.startswith(place)}
    assert engine == {"architectures.llama2c", "architectures.nanogpt", "converter.formats.llama2c"}
