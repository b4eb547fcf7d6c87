"""What a page shows is what happens: commands, files and code of a Markdown page, run in their order in one folder.

A mark in front of a fenced block says what it is:

    <!-- output: gptkit params gpt2 -->     the command, and what it prints; a line with … alone stands for lines that
                                            are left out; "output 3:" where it exits with 3
    <!-- runs -->                           commands that succeed, without what they print; "runs 3" likewise
    <!-- file: my_port.py -->               a file that the commands after it find
    <!-- python -->                         code that runs, and whose asserts hold
    <!-- setup -->                          lines that install gptkit or run a target of make, which no test repeats;
                                            `unknown_setup` says which of them name nothing that there is

Figures that another processor rounds otherwise are not compared (`comparable`). What a command prints anew:
`python tests/shown.py README.md docs/tutorial.md …` writes it into the pages.
"""

import io
import os
import re
import shlex
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

MARK = re.compile(
    r"^<!-- (?P<kind>output|runs|file|python|setup)(?: (?P<code>\d+))?(?:: (?P<what>[^\n]*))? -->\n"
    r"(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)(?P=fence)$",
    re.M | re.S,
)
ROOT = Path(__file__).parents[1]
MORE = "…"
"""A line of an output that stands for lines left out."""

DECIMAL = r"\d\.\de[-+]\d\d|\d[\d,]*\.\d+(?:\.\d+)*(?:\+\w+)?"  # of versions too
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d\d)?"
MEASURED = {"eval": DECIMAL, "swap": DECIMAL, "verify": DECIMAL, "diff": NUMBER, "train": NUMBER}
"""Of these commands what is measured: whatever has a decimal point; of `diff` ranks too, of `train` everything."""


@dataclass(frozen=True)
class Shown:
    """One marked block: its kind, what the mark names, the exit code that is told, the block's text, its place."""

    kind: str
    what: str
    code: int
    body: str
    span: tuple[int, int]

    @property
    def commands(self) -> list[str]:
        """The commands in it, without `gptkit` and without what stands behind a #."""
        lines = [self.what] if self.kind == "output" else self.body.splitlines()
        found = [shlex.join(shlex.split(line.removeprefix("$ "), comments=True)) for line in lines]
        return [line.removeprefix("gptkit ") for line in found if line.startswith("gptkit ")]

    @property
    def output(self) -> str:
        """What is shown below the command."""
        return self.body.partition("\n")[2]


def shown(text: str) -> list[Shown]:
    """The marked blocks of a page, in order."""
    found = [
        Shown(m["kind"], m["what"] or "", int(m["code"] or 0), m["body"], m.span("body")) for m in MARK.finditer(text)
    ]
    marks = len(re.findall(r"^<!-- (?:output|runs|file|python|setup)\b", text, re.M))
    assert len(found) == marks, f"{marks} marks, {len(found)} of them before a block"
    for each in found:
        if each.kind == "output":
            assert each.body.startswith(f"$ {each.what}\n"), f"another command than the mark's: {each.what}"
    return found


def gptkit(words: Sequence[str]) -> tuple[int, str]:
    """Run the command line here: its exit code, and what it prints; on standard error too, where it fails."""
    from gptkit.cli import app

    out, err, code = io.StringIO(), io.StringIO(), 0
    with ExitStack() as around:
        around.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONUTF8": "1"}))
        around.enter_context(redirect_stdout(out))
        around.enter_context(redirect_stderr(err))
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of other packages, which go to standard error
        try:
            app(list(words), prog_name="gptkit")
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue() + (err.getvalue() if code else "")


def comparable(text: str, command: str) -> list[str]:
    """Lines without trailing blanks. What is measured other processors round otherwise: errors, and what `MEASURED`
    says of a command, stand for themselves alone.
    """
    measured = MEASURED.get(command.split()[0])
    if measured is None:
        return [re.sub(r"\d\.\de-\d\d", "#", line.rstrip()) for line in text.strip().splitlines()]
    lines = [re.sub(measured, "#", line) for line in text.strip().splitlines()]
    return [" ".join(line.split()) for line in lines]  # a figure more or less moves the column behind it


def unknown_setup(text: str) -> list[str]:
    """Return the lines that are neither a target of the Makefile, nor an installation of this project with known
    extras, nor a call of it by uvx.
    """
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"] and len(words) == 2 and words[1] in targets:
            continue
        installed = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", words[-1]) if words else None
        known = installed and set((installed[1] or "").split(",")) <= {"", *extras}
        once = words[:6] == ["uvx", "--constraints", "constraints.txt", "--from", ".", "gptkit"]
        if words and not once and not (words[:-1] == ["pip", "install", "-c", "constraints.txt"] and known):
            unknown.append(line)
    return unknown


def passages(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines of an output between those that stand for lines left out (`MORE`)."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == MORE:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def agrees(printed: str, block: Shown) -> bool:
    """Return whether a block shows what its command printed, except for the lines that `MORE` stands for."""
    command = block.what.removeprefix("gptkit ")
    real, parts = comparable(printed, command), passages(comparable(block.output, command))
    wanted = [re.escape("".join(f"{line}\n" for line in part)) for part in parts]
    return re.fullmatch(r"(?:.*\n)*".join(wanted), "".join(f"{line}\n" for line in real)) is not None


def as_shown(printed: str, block: Shown) -> str:
    """Return what a command printed as the block is to show it: no blanks at the ends, and no more of it than before.

    A passage behind a `MORE` is looked up by its first line. Raises ValueError if the command prints that no more.
    """
    command = block.what.removeprefix("gptkit ")
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    real, (first, *others) = comparable(printed, command), passages(comparable(block.output, command))
    if not others:
        return "\n".join(lines)
    kept, end = lines[: len(first)], len(first)
    for number, passage in enumerate(others):
        kept.append(MORE)
        if passage:
            begin = real.index(passage[0], end)
            end = begin + len(passage) if number + 1 < len(others) else len(lines)
            kept += lines[begin:end]
    return "\n".join(kept)


def run(page: Sequence[Shown]) -> Iterator[tuple[Shown, str, int, str]]:
    """Each block carried out in the working directory: (block, command, exit code, what it printed). Code of a page
    goes on where its code before ended.
    """
    names: dict[str, object] = {"__name__": "page"}
    for each in page:
        if each.kind == "setup":
            assert not (wrong := unknown_setup(each.body)), wrong
        elif each.kind == "file":
            Path(each.what).write_text(each.body)
        elif each.kind == "python":
            printed = io.StringIO()
            with redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(each.body, "a page", "exec"), names)
            yield each, "python", 0, printed.getvalue()
        else:
            for command in each.commands:
                yield each, command, *gptkit(shlex.split(command))


def write(path: Path) -> None:
    """What the page's commands print, into the page, where it shows something else."""
    text = path.read_text()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        done = list(run(shown(text)))
    for each, command, code, printed in reversed(done):
        assert code == each.code, f"{path}: gptkit {command} exits with {code}\n{printed}"
        if each.kind == "output" and not agrees(printed, each):
            start, end = each.span
            text = f"{text[:start]}$ {each.what}\n{as_shown(printed, each)}\n{text[end:]}"
    path.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
