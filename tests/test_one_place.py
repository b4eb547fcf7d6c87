"""A component is one place: nothing elsewhere asks for its kind, and adding one is as many files as the table says."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from helpers.product import ROOT, parsed, product

from gptkit.architectures import ARCHITECTURES
from gptkit.components import KINDS, Component, Mixer, Norm, Position
from gptkit.converter.targets import FORMATS
from gptkit.surgery.registry import all_options, all_swaps

EVERYWHERE = {"ModelSpec", "Block", "SubLayer", "Embedding", "Head"}
"""What every tree has: who asks for one asks for a place."""
OURS = {name: kind for name, kind in KINDS.items() if kind.__module__.startswith("gptkit.components.")}
FREE = ("components", "modules", "surgery/swaps", "architectures/families")
"""Where kinds are asked for: their own places, what exchanges one for another, and the families that have them."""


def trees() -> dict[str, ast.Module]:
    """The product's files by their paths, parsed."""
    return {name: parsed(path) for name, path in product().items()}


@cache
def imports() -> list[tuple[str, ast.ImportFrom]]:
    """Every import of names from a module, beside its file."""
    return [
        (path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]


def names(node: ast.AST) -> set[str]:
    """Every name and attribute in a piece of code."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def questions(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Where code asks for the kind of a value, and for which."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = names(node.args[1])
        elif isinstance(node, ast.match_case):
            asked = set().union(
                *(names(each.cls) for each in ast.walk(node.pattern) if isinstance(each, ast.MatchClass))
            )
        elif isinstance(node, ast.Compare) and "type" in names(node.left):
            asked = names(node)
        else:
            continue
        yield getattr(node, "lineno", 0), asked & (OURS.keys() - EVERYWHERE)


def test_nothing_elsewhere_asks_for_a_kind() -> None:
    asked = [
        f"{name}:{line} asks for {', '.join(sorted(kinds))}"
        for name, tree in trees().items()
        if not name.startswith(tuple(f"{folder}/" for folder in FREE))
        for line, kinds in questions(tree)
        if kinds
    ]
    assert asked == []


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(node, (int, Rotary))",
        "issubclass(kind, components.Rotary | str)",
        "match node:\n case [components.Rotary(dim=dim), *_]: pass",
        "type(node) is Rotary",
    ],
)
def test_a_question_is_seen(code: str) -> None:
    assert [kinds for _, kinds in questions(ast.parse(code)) if kinds] == [{"Rotary"}]


# --- the table of ways to extend --------------------------------------------------------------------------------------


def table() -> dict[str, int]:
    """How many files each way to extend takes, as CONTRIBUTING.md says it."""
    rows = re.findall(r"^\| (.+?) \| (\d) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {what: int(number) for what, number in rows}


@cache
def decorations() -> list[tuple[str, set[str]]]:
    """What each class and function of the product is decorated with, beside its file."""
    return [
        (path, names(decorator))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for decorator in node.decorator_list
    ]


def files_of(kind: type[Component]) -> set[str]:
    """The files that have to know a kind: its record's, its module's, and one that lists its record's file."""
    home = f"{kind.__module__.removeprefix('gptkit.').replace('.', '/')}.py"
    return {home} | {path for path, called in decorations() if {"computes", kind.__name__} <= called}


@pytest.mark.parametrize("kind", OURS.values(), ids=OURS)
def test_a_kind_is_as_many_files_as_the_table_says(kind: type[Component]) -> None:
    assert table().keys() >= {"a norm", "positions", "a mixer (attention or recurrence)"}
    if issubclass(kind, Mixer):
        assert len(files_of(kind) | {"components/__init__.py"}) == table()["a mixer (attention or recurrence)"]
    elif issubclass(kind, Norm | Position):
        assert len(files_of(kind)) == table()["a norm" if issubclass(kind, Norm) else "positions"]


def listed(folder: str) -> set[str]:
    """Files outside of a folder that import one of its files by name, and so would have to be edited for a new one."""
    last = folder.rpartition("/")[2]
    return {path for path, node in imports() if last in (node.module or "").split(".") and not path.startswith(folder)}


def test_swaps_and_families_are_found_by_looking() -> None:
    assert listed("surgery/swaps") == set() and table()["a swap"] == 1
    assert {swap.option for swap in all_swaps()} == {option.name for option in all_options()}
    files = {path.stem for path in (ROOT / "architectures/families").glob("*.py")} - {"__init__"}
    assert len(files) == len(ARCHITECTURES) and table()["a family"] == 1
    assert "architectures/__init__.py" not in listed("architectures/families")


def test_a_format_is_named_in_one_file_beside_its_own() -> None:
    modules = {module.partition(":")[0].rpartition(".")[2] for module in FORMATS.values()}
    assert all((ROOT / "converter" / "formats" / f"{module}.py").is_file() for module in modules)
    imported = {
        f".{node.module}".rpartition(".formats.")[2]
        for path, node in imports()
        if not path.startswith("converter/formats/")
        if ".formats." in f".{node.module}"
    }
    assert imported & modules == {"gguf"}  # of which the beginning is read over a network, before it is a file
    assert table()["a format"] == 2
