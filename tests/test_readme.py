"""Every block of the README runs as written, in its order, from an empty folder, and prints what is shown."""

import re
from pathlib import Path

from shown import agrees, run, shown, unknown_setup

README = Path(__file__).parents[1] / "README.md"
BLOCKS = shown(README.read_text())


def test_every_block_is_marked() -> None:
    """A block without a mark would not run."""
    assert README.read_text().count("\n```") == 2 * len(BLOCKS)
    assert {block.kind for block in BLOCKS} >= {"setup", "output", "runs", "python"}


def test_every_block_runs(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """From an empty folder, one after the other, as a reader would copy them."""
    monkeypatch.chdir(tmp_path)
    for block, command, code, printed in run(BLOCKS):
        assert code == block.code, f"gptkit {command} exits with {code}\n{printed}"
        if block.kind == "output":
            assert agrees(printed, block), f"gptkit {command} prints\n{printed}\nmake shown writes it into the page"


def test_a_command_that_is_left_out_of_a_block_is_noticed() -> None:
    """Every line of a block of commands is a command of gptkit, so that none is passed over."""
    for block in BLOCKS:
        if block.kind == "runs":
            assert len(block.commands) == len(re.findall(r"\S.*", block.body)), block.body


def test_setup_that_names_nothing_is_reported() -> None:
    lines = ["make tset", "pip install gptkit", 'pip install -c constraints.txt ".[htlm]"', "curl x | sh"]
    assert unknown_setup("\n".join([*lines, "make test  # all", 'pip install -c constraints.txt ".[html]"'])) == lines
