"""The texts of errors stand in tests/messages.txt, so that a review shows what users are told."""

from functools import cache

import pytest
from helpers.messages import LIST
from helpers.messages import listed as list_messages

PUZZLING = (
    "is to be",
    "known of",
    "unknown to this swap",
    "in the way",
    "never had",
    "goes by",
    "of one stack",
    "which this swap does not know",
    "where one should be",
)
"""Words of older messages that readers did not understand."""


@cache
def listed() -> str:
    return list_messages()


def test_the_list_is_current() -> None:
    assert listed() == LIST.read_text(), "python tests/helpers/messages.py writes the list again"


@pytest.mark.parametrize("words", PUZZLING)
def test_no_message_has_words_that_puzzled_readers(words: str) -> None:
    assert [line for line in listed().splitlines() if words in line] == []
