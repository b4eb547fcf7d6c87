"""gptkit swap with a recipe that ends with heal: gone on with, and refused before anything is done."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call
from helpers.covering import exhaustive

import gptkit
from gptkit.errors import CannotExpress, UsageError
from gptkit.parity.diff import diff
from gptkit.training.heal import heal

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"


def recipe(folder: Path, settings: str = "tokens = 1024") -> Path:
    """One that heals."""
    (folder / "play.txt").write_bytes(PLAY.read_bytes()[:20_000])
    more = "context = 64, batch = 128, beside = false"
    text = "[[step]]\nattention = 'mqa'\napproximate = true\n[[step]]\nheal = '{}'\nsettings = {{ {}, {} }}\n"
    (folder / "mqa.toml").write_text(text.format(folder / "play.txt", settings, more))
    return folder / "mqa.toml"


def test_a_recipe_that_was_stopped_while_it_healed_goes_on(tmp_path: Path, monkeypatch) -> None:
    asked: Any = {"recipe": recipe(tmp_path, "tokens = 1024, every = 1"), "measured": False}
    gptkit.swap("sample:llama", tmp_path / "whole", **asked)

    def stop(name: str, step: Any) -> None:
        if (name, step.step) == ("healed-0", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptkit.swap("sample:llama", tmp_path / "out", **asked, watched=partial(heal, tell=stop))
    words = ["swap", "sample:llama", tmp_path / "out", "--recipe", asked["recipe"], "--no-measure"]
    with monkeypatch.context() as patched:
        patched.setattr("gptkit.training.healed.exchange", lambda *_, **__: pytest.fail("it was swapped first"))
        told = call(*words)
    assert told.exit_code == 2 and "Continue it with --resume" in told.stderr
    told = call(*words, "--resume")
    assert told.exit_code == 0, told.output
    assert re.findall(r"^healed-\S+ +(\d+)", told.stdout, re.MULTILINE) == ["3", "4", "5", "6", "7", "8"]
    assert diff(tmp_path / "whole", tmp_path / "out", rank=False).same_bytes
    assert not (tmp_path / "out.healing/changed").exists()


@exhaustive
def test_what_no_family_has_is_refused_before_anything_is_healed(tmp_path: Path) -> None:
    path, steps = recipe(tmp_path), list[Any]()
    path.write_text(f"as = 'auto'\n[[step]]\nposition = 'alibi'\n{path.read_text()}")
    with pytest.raises(CannotExpress):
        gptkit.swap(
            "sample:gpt2", tmp_path / "out", recipe=path, measured=False,
            watched=partial(heal, tell=lambda *each: steps.append(each)),
        )  # fmt: skip
    assert not steps and {each.name for each in tmp_path.iterdir()} == {"mqa.toml", "play.txt"}


def test_what_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text("[[step]]\nattention = 'mqa'\napproximate = true\n")
    for words in (["--recipe", tmp_path / "plain.toml"], ["--norm", "rmsnorm"]):
        told = call("swap", "sample:llama", tmp_path / "out", "--resume", *words)
        assert told.exit_code == 2 and "--resume needs a recipe that ends with heal" in told.stderr
    with pytest.raises(UsageError, match=r"mqa\.toml: the heal step sets both tokens and seconds"):
        gptkit.swap("sample:llama", tmp_path / "out", recipe=recipe(tmp_path, "tokens = 1024, seconds = 1.0"))
    assert {each.name for each in tmp_path.iterdir()} == {"mqa.toml", "plain.toml", "play.txt"}
