"""What --help prints: whole phrases, and at 80 columns no name or value that is broken."""

import re

import pytest
import typer
from helpers.covering import few
from typer.testing import CliRunner

from gptkit.cli import app

GROUP = typer.main.get_command(app)
COMMANDS: list[str] = GROUP.list_commands(None)  # type: ignore[attr-defined]


def words(text: str) -> set[str]:
    return set(re.sub("[╭╮╰╯│─]", " ", text).split())


def shown(columns: int, *call: str) -> str:
    done = CliRunner().invoke(app, [*call, "--help"], prog_name="gptkit", env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.output


@few(10)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_nothing_is_broken_at_80_columns(command: str) -> None:
    """Each word is one of those of a terminal that is wide enough for all of them."""
    call = [command] if command else []
    narrow = shown(80, *call)
    assert max(map(len, narrow.splitlines())) <= 80
    assert words(narrow) <= words(shown(400, *call))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_told_in_a_phrase(command: str) -> None:
    """That says what it does or is: none that only makes sense behind the option's name."""
    told = GROUP.commands[command]  # type: ignore[attr-defined]
    assert told.help.endswith("."), command
    for parameter in told.params:
        text = getattr(parameter, "help", None)
        if getattr(parameter, "hidden", False):
            continue
        assert text and text[0].isupper() and text.endswith((".", "…")) and len(text.split()) > 2, parameter.name
        assert not re.match(r"(Of|For|In|To|As|At|Beside|By|Only|The same)\b", text), f"{parameter.name}: {text}"
        assert not re.search(r"(one|row|rows|threads|FLOPs) an? \w+", text), f"{parameter.name}: per, not a: {text}"


def test_the_list_of_commands_is_grouped() -> None:
    """Every command but a second name is in one group; of four that compare, each says when to use which."""
    page = shown(80)
    panels = re.findall(r"^╭─ (.+?) ─", page, re.M)
    assert panels == ["Options", "Look", "Convert", "Change", "Prove", "Train and use", "More"]
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", page, re.M)
    assert sorted(listed) == sorted(set(COMMANDS) - {"inspect"})
    for command in ("check", "audit", "verify", "diff"):
        told = GROUP.commands[command].help  # type: ignore[attr-defined]
        assert f"Use {command} " in told and len({"check", "audit", "verify", "diff"} & set(told.split())) >= 3


# --- other names ------------------------------------------------------------------------------------------------------


def test_inspect_is_load() -> None:
    load, inspect = (CliRunner().invoke(app, [name, "sample:gpt2"]) for name in ("load", "inspect"))
    assert (inspect.exit_code, inspect.output) == (load.exit_code, load.output) == (0, load.output)
    assert "inspect" in COMMANDS and " inspect " not in shown(80)


def test_the_report_of_a_swap_is_a_page_too() -> None:
    assert "--report,--html" in shown(80, "swap")
    options = next(each for each in GROUP.commands["swap"].params if each.name == "report")  # type: ignore[attr-defined]
    assert options.opts == ["--report", "--html"]


def test_the_shell_offers_other_names() -> None:
    def offered(*words: str) -> list[str]:
        asked = {"COMP_WORDS": "\n".join(["gptkit", *words]), "COMP_CWORD": str(len(words))}
        env = {**asked, "_GPTKIT_COMPLETE": "complete_bash"}
        return CliRunner().invoke(app, [], prog_name="gptkit", env=env).stdout.split()

    assert offered("ins") == [] and offered("loa") == ["load"]
    assert "--html" in offered("swap", "sample:gpt2", "out", "--h")
