"""The texts of gptkit's errors, as they stand in the source.

`python tests/helpers/messages.py` writes tests/messages.txt again. That file is there to be read: it shows in one place
what users are told, and a change of it in a review.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "messages.txt"
NO_SOURCE = {"tests", "build", "benchmarks", "docs", "examples", "wheels"}


def error_classes() -> set[str]:
    """The names of the classes in errors.py, and of those elsewhere that are derived from them."""
    bases: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    found = {"GptkitError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def sources() -> list[Path]:
    """The package's modules."""
    paths = (path.relative_to(ROOT) for path in ROOT.glob("**/*.py"))
    return [ROOT / path for path in sorted(paths) if path.parts[0] not in NO_SOURCE and path.parts[0][0] != "."]


def text_of(node: ast.expr) -> str | None:
    """A string or an f-string with the expressions in braces; None where the text is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None or right is None else left + right
    return None


def messages(path: Path, classes: set[str]) -> Iterator[str]:
    """Each error that a module makes: its class, its message, and after `->` its hint."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in classes and name != "fail":
            continue
        texts = [text_of(argument) for argument in node.args]
        texts += [text_of(keyword.value) for keyword in node.keywords if keyword.arg == "hint"]
        said = [text for text in texts if text is not None]
        if any(" " in text for text in said):
            yield f"{name}: " + " -> ".join(said)


def listed() -> str:
    """The list, by module."""
    classes, lines = error_classes(), []
    for path in sources():
        counts = Counter(messages(path, classes))
        if counts:
            lines.append(f"\n{path.relative_to(ROOT)}\n")
        for text, count in counts.items():
            times = f" (×{count})" if count > 1 else ""
            lines.append("  " + text.replace("\n", "\n      ") + times + "\n")
    return "".join(lines).lstrip("\n")


if __name__ == "__main__":
    LIST.write_text(listed())
