"""The pictures of README.md and docs/: each is drawn by the command that stands above it.

    <!-- picture: gptkit compare gpt2 llama-2-7b --figure cache -->
    ![what is to be seen](pictures/cache.svg)

What goes before the last `&&` is run first. `python tests/pictured.py README.md docs/howto/pictures.md …` draws them
anew, for which it needs a Chromium; a file that two pages show is drawn once.
"""

import re
import shlex
import sys
import tempfile
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from shown import gptkit

MARK = re.compile(r"^<!-- picture: (?P<commands>[^\n]+) -->\n!\[(?P<words>[^\]\n]+)\]\((?P<path>[^)\n]+\.svg)\)$", re.M)


@dataclass(frozen=True)
class Pictured:
    """A picture on a page. commands: without `gptkit`, the last one draws; words: for those who cannot see it."""

    commands: tuple[str, ...]
    words: str
    file: Path


def pictured(page: Path) -> list[Pictured]:
    """The pictures of a page, in order."""
    text = page.read_text()
    found = []
    for match in MARK.finditer(text):
        commands = [command.strip() for command in match["commands"].split("&&")]
        assert all(command.startswith("gptkit ") for command in commands), match["commands"]
        names = tuple(command.removeprefix("gptkit ") for command in commands)
        found.append(Pictured(names, match["words"], (page.parent / match["path"]).resolve()))
    marks = text.count("<!-- picture:")
    assert len(found) == marks, f"{page}: {marks} marks, {len(found)} of them before a picture"
    return found


def draw(picture: Pictured, file: Path) -> None:
    """Run the commands in a folder of their own; the last one draws into the file."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for command in picture.commands[:-1]:
            code, printed = gptkit(shlex.split(command))
            assert code == 0, f"gptkit {command} exits with {code}\n{printed}"
        code, printed = gptkit([*shlex.split(picture.commands[-1]), "--svg", str(file)])
        assert code in (0, 3), f"gptkit {picture.commands[-1]} exits with {code}\n{printed}"


if __name__ == "__main__":
    wanted = {each.file: each for page in map(Path, sys.argv[1:]) for each in pictured(page)}
    for path, each in wanted.items():
        draw(each, path)
        sys.stdout.write(f"{path.name}: gptkit {each.commands[-1]}\n")
