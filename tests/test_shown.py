"""Values of files in messages: `errors.shown` shows the beginning of a repr, and never walks more than it shows."""

import ast
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gptkit
from gptkit.errors import shown

PRODUCT = Path(gptkit.__file__).parent
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


@given(PLAIN, st.integers(1, 200))
def test_what_is_shown_is_the_beginning_of_the_repr(value: Any, most: int) -> None:
    text = shown(value, most)
    assert len(text) <= most
    if len(repr(value)) < most:
        assert text == repr(value)
    else:
        assert text.replace('"', "'")[:-1] == repr(value).replace('"', "'")[: len(text) - 1]


def bomb(levels: int = 60) -> list[Any]:
    value: list[Any] = ["x"]
    for _ in range(levels):
        value = [value] * 10
    return value


def deep(levels: int = 100_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [bomb(), {"a": bomb()}, (bomb(),), {(): bomb()}, deep(), 1 << 10**6, [1 << 10**6], "x" * 10**7, [[]] * 10**6],
    ids=range(9),
)
def test_what_is_hostile_is_shown_at_once(value: Any) -> None:
    start = time.process_time()
    assert 1 < len(shown(value, 40)) <= 40
    assert time.process_time() - start < 0.1


READS = ("architectures", "converter", "drafting", "parity", "components", "training")
"""Folders whose messages quote files. Workers of `confinement` import nothing of the package, and have limits."""
WORKERS = ("pickle_process.py", "tokenizer_process.py", "transformers_process.py", "vllm_process.py")


def test_messages_quote_files_by_shown_alone() -> None:
    """A repr in a message that is cut afterwards is made whole before: `{value!r:.40}` is refused."""
    paths = [path for folder in READS for path in (PRODUCT / folder).rglob("*.py") if path.name not in WORKERS]
    assert len(paths) > 150
    found = [
        f"{path.relative_to(PRODUCT)}:{part.lineno}"
        for path in paths
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(part, ast.FormattedValue) and part.conversion == ord("r") and part.format_spec is not None
    ]
    assert found == []
