"""What the README shows is what the commands print."""

from pathlib import Path

import pytest
from helpers.covering import exhaustive
from shown import agrees, run, shown

README = Path(__file__).parents[1] / "README.md"
BLOCKS = [each for each in shown(README.read_text()) if each.kind == "output"]


def test_the_readme_shows_outputs():
    assert len(BLOCKS) == README.read_text().count("<!-- output") >= 2


def cost(block):
    """A fit on a text takes seconds, and is left to `make test-all`."""
    return pytest.param(block, id=block.what, marks=exhaustive if "--attention" in block.what else ())


@pytest.mark.parametrize("block", [cost(each) for each in BLOCKS])
def test_output_is_the_real_one(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, _, code, printed),) = run([block])
    assert code == block.code, printed
    assert agrees(printed, block), printed
