"""What the README shows is what the commands print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"<!-- output: gptkit (?P<command>.*) -->\n```\n\$ gptkit (?P=command)\n(?P<output>.*?)\n```", re.S)
BLOCKS = {match["command"]: match["output"] for match in BLOCK.finditer(README.read_text())}


def comparable(text: str, command: str) -> list[str]:
    """Lines without trailing blanks. What is measured other processors round otherwise: errors, and of a swap whatever
    has a decimal point, stand for themselves alone.
    """
    measured = r"\d\.\de[-+]\d\d|\d[\d,]*\.\d+" if command.startswith("swap") else r"\d\.\de-\d\d"
    return [re.sub(measured, "#", line.rstrip()) for line in text.strip().splitlines()]


def test_the_readme_shows_outputs():
    assert len(BLOCKS) == README.read_text().count("<!-- output:") >= 2


@pytest.mark.parametrize("command", BLOCKS)
def test_output_is_the_real_one(command, tmp_path):
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "gptkit", *command.split()], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert comparable(run.stdout, command) == comparable(BLOCKS[command], command)
