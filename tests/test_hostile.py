"""Hostile files and situations (`hostile`): some of each kind here, all of them in `make test-slow`."""

from pathlib import Path

import pytest
from helpers.covering import few
from hostile import CASES, MEMORY, SECONDS, Case, Outcome, complaints, run

QUICK = (
    "gguf llama: a token of a million characters",
    "gguf t5: u8 token types x 2e8",
    "tokenizer: normalizers that double 22 times",
    "tokenizer: a broken charsmap",
    "pickle: a million names of one tensor",
    "--force over a manifest: a fifo",
    "hub: a listing of 4 GB",
    "hub: a config.json of an exabyte",
)
"""A case of each kind; every one is a process, of a second or three."""


@few(1)
@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_case_of_each_kind(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert run(case, tmp_path).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.name not in QUICK])
def test_every_hostile_case(case: Case, tmp_path: Path) -> None:
    assert run(case, tmp_path).problems == []


def test_what_does_not_hold_is_told() -> None:
    case = Case("", lambda folder: [])
    assert complaints(case, Outcome(4, 1.0, 10**8, b"", "gptkit: no\n  do that\n")) == []
    assert complaints(Case("", lambda folder: [], codes=(0,)), Outcome(0, 1.0, 10**8, b"", "")) == []
    for outcome in (
        Outcome(1, 1.0, 10**8, b"", "gptkit: no\n"),
        Outcome(4, SECONDS + 1, 10**8, b"", "gptkit: no\n"),
        Outcome(4, 1.0, MEMORY + 1, b"", "gptkit: no\n"),
        Outcome(4, 1.0, 10**8, b"", "gptkit: no\n  a\n  b\n"),
        Outcome(4, 1.0, 10**8, b"", ""),
        Outcome(4, 1.0, 10**8, b"", "Traceback (most recent call last):\n"),
    ):
        assert complaints(case, outcome)


def test_names_are_told_apart() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
