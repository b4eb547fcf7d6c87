"""Lines for a terminal: wrapped between words where a person reads them, and left alone for programs."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptkit.terminal import complain, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.lists(st.text("abc-/.", min_size=1, max_size=60), min_size=1, max_size=30), st.integers(20, 120))
def test_wrapping_loses_no_word(words: list[str], width: int) -> None:
    lines = wrapped("  " + " ".join(words), width)
    assert " ".join(" ".join(lines).split()) == " ".join(words)
    for line in lines:
        assert len(line) <= width or len(line.split()) == 1, "only a word that is too long stands out"


def test_errors_are_wrapped_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "first " + "word " * 30 + "\nhint " + "word " * 30
    monkeypatch.setenv("COLUMNS", "60")
    for stream, lines in ((Terminal(), 6), (io.StringIO(), 2)):
        monkeypatch.setattr(sys, "stderr", stream)
        complain(message)
        told = stream.getvalue().splitlines()
        assert len(told) == lines
        assert told[0].startswith("gptkit: first ")
        assert all(line.startswith("  ") for line in told[1:])


def test_a_narrow_terminal_and_what_it_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    complain("a name \x1b[31m and more of it\n")
    assert "\x1b" not in stream.getvalue() and "\\x1b[31m" in stream.getvalue()
