"""The helper that compares a page's blocks with what commands print."""

import pytest
from shown import agrees, as_shown, shown

PRINTED = "one\ntwo 1.25\nthree\nfour\n"


def block(output: str) -> str:
    return f"<!-- output: gptkit verify x -->\n```\n$ gptkit verify x\n{output}```\n"


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("one\ntwo 1.5\nthree\nfour\n", True),  # a figure that is measured
        ("one\ntwo 1.25\n…\n", True),
        ("…\nfour\n", True),
        ("one\n…\nthree\n…\n", True),
        ("…\ntwo 1.25\n…\nfour\n", True),
        ("one\ntwo 1.25\nthree\n", False),
        ("two 1.25\n…\n", False),
        ("…\nthree\n", False),
        ("…\nfour\n…\none\n", False),
        ("…\nfive\n…\n", False),
        ("one\nthree\n…\n", False),
    ],
)
def test_lines_may_be_left_out_where_the_block_says_so(output: str, right: bool) -> None:
    (shown_block,) = shown(block(output))
    assert agrees(PRINTED, shown_block) == right


@pytest.mark.parametrize("output", ["one\n…\nthree\n…\n", "…\nthree\nfour\n", "one\ntwo 1.25\n…\n", PRINTED])
def test_what_is_written_again_leaves_out_the_same(output: str) -> None:
    (shown_block,) = shown(block(output.replace("1.25", "7.5")))
    assert as_shown(PRINTED, shown_block) == output.rstrip("\n")


def test_a_passage_that_is_printed_no_more_is_reported() -> None:
    (shown_block,) = shown(block("…\nfive\n…\n"))
    with pytest.raises(ValueError, match="five"):
        as_shown(PRINTED, shown_block)
