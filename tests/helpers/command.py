"""gptkit's command line in this process."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from gptkit.cli import app


def call(*words: str | Path, **options: Any) -> Result:
    """What `gptkit WORDS` says and how it ends; options as typer's runner has them (env, input, prog_name)."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)
