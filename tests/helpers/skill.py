"""The agent skill: instructions for coding agents, generated from the command line's own help.

`python tests/helpers/skill.py` writes .agents/skills/gptkit/SKILL.md again. The wheel has the file too, at the place
where tools look for skills of installed packages: `<package>/.agents/skills/<name>/SKILL.md`.
"""

import re
from pathlib import Path
from typing import Any

import typer

from gptkit.cli import app

ROOT = Path(__file__).parents[2]
SKILL = ROOT / ".agents" / "skills" / "gptkit" / "SKILL.md"
NAME = "gptkit"
DESCRIPTION = (
    "Count, convert, compare, audit, change and verify checkpoints of GPT-style language models (Hugging Face, GGUF, "
    "Megatron, nanoGPT and others) with the command gptkit. Use it to count parameters or memory, to convert between "
    "formats, to find out why a checkpoint does not load, to merge a LoRA, to swap or shrink components, or to prove "
    "that a port or conversion computes the same logits as transformers."
)

_TEXT = """\
---
name: {name}
description: {description}
---

# gptkit

gptkit works on checkpoints of GPT-style language models. A MODEL is a folder, a file, a Hugging Face id, a preset such
as `qwen3-8b`, or a small trained sample: `sample:gpt2`, `sample:llama`, `sample:bloom`, `sample:falcon`.

- Without torch, `uvx hf-gptkit` has the commands that only read headers and configs.
- `gptkit COMMAND -h` lists all options. `--json` prints results for programs, and `-q` prints errors only.
- `--offline` uses only local files. No command runs code from a checkpoint.
- A command writes its output in one step, and does not replace an existing folder without `--force`.

## Commands
{commands}
## Exit codes

{codes}
"""


def codes() -> list[str]:
    """Return a line for every exit code, from the table in the reference."""
    table = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    return [f"- {code}: {meaning}" for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.M)]


def skill() -> str:
    """Return the text of the skill."""
    group: Any = typer.main.get_command(app)
    lines, panel = list[str](), ""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if command.hidden:
            continue
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            lines += ["", f"### {panel}", ""]
        examples = re.findall(r"gptkit .*?(?=   \(|$)", command.epilog or "", re.M)[:2]
        lines.append(f"- `gptkit {name}`: {command.help.splitlines()[0]}")
        lines += [f"  - `{example.strip()}`" for example in examples]
    lines.append("")
    return _TEXT.format(name=NAME, description=DESCRIPTION, commands="\n".join(lines), codes="\n".join(codes()))


if __name__ == "__main__":
    SKILL.parent.mkdir(parents=True, exist_ok=True)
    SKILL.write_text(skill(), encoding="utf-8")
