"""The agent skill that comes with the wheel."""

import re
import tomllib
from pathlib import Path

import typer
import yaml
from helpers import skill

from gptkit.cli import app

ROOT = Path(__file__).parents[1]


def test_it_is_current() -> None:
    assert skill.SKILL.read_text() == skill.skill(), "python tests/helpers/skill.py writes it again"


def test_every_command_in_it_exists() -> None:
    commands = typer.main.get_command(app).list_commands(None)
    named = re.findall(r"`gptkit ([a-z-]+)", skill.SKILL.read_text())
    assert len(named) > 2 * len(commands)
    assert set(named) <= set(commands)


def test_its_front_matter_is_within_limits() -> None:
    """64 and 1,024 characters are the limits of the format."""
    front = yaml.safe_load(skill.SKILL.read_text().split("---")[1])
    assert front.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", front["name"]) and front["name"] == skill.SKILL.parent.name
    assert len(front["description"]) <= 1024


def test_it_is_in_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gptkit"]
    assert skill.SKILL in {path for pattern in data for path in ROOT.glob(pattern)}
