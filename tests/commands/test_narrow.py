"""Outputs at 80 columns: no word of them is broken, and no option or value."""

import re
from pathlib import Path

import pytest
from helpers.covering import few
from typer.testing import CliRunner

from gptkit.cli import app

CALLS = [
    "params llama-3-8b --kv 8192,131072 --flops --memory --dtype bf16",
    "params gpt2 llama-3-8b mixtral-8x7b bloom-7b1 --memory --kv 2k",
    "params llama-2-7b --swap attention=gqa:4 --kv 4096",
    "compare gpt2 llama-2-7b bloom-7b1 falcon-7b --all",
    "compare gpt2 llama-2-7b bloom-7b1 falcon-7b qwen3-8b mixtral-8x7b",
    "show mixtral-8x7b",
    "presets llama",
    "recommend --goal memory --params 124M",
    "load sample:falcon",
    "swaps",
    "swaps sample:llama",
    "swaps --recipes",
    "diff sample:gpt2 sample:gpt2",
]


BOXES = re.compile("[─-╿⊕▸╎]")


def words(text: str) -> set[str]:
    """Those of sentences and tables, without what drawings are made of."""
    return {word.strip(",:;.") for word in BOXES.sub(" ", text).split()}


@few(3)
@pytest.mark.parametrize("call", CALLS)
def test_no_word_is_broken(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one that a terminal shows that is wide enough for all of them."""
    monkeypatch.chdir(tmp_path)

    def shown(columns: int) -> str:
        done = CliRunner().invoke(app, call.split(), prog_name="gptkit", env={"COLUMNS": str(columns)})
        assert done.exit_code == 0, done.output
        return done.stdout

    narrow = shown(80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert words(narrow) <= words(shown(500))
