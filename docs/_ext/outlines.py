"""The output of `--json`, shortened: the first entry of a list, and the first two of a long table of names."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from gptkit.cli import app

NAMES = re.compile(r"[a-z][a-z0-9_]*")
"""The form of the keys of a format. Other keys are names of tensors, files or models."""


def printed(words: Sequence[str]) -> Any:
    """Return the JSON that a command prints. The exit code 3 is not an error."""
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            app(list(words), prog_name="gptkit")
        except SystemExit as error:
            if error.code not in (0, 3):
                raise RuntimeError(f"gptkit {' '.join(words)} exits with {error.code}") from error
    return json.loads(out.getvalue())


def shortened(data: Any) -> Any:
    """Return the data with one entry of every list, and two entries of every long table of names."""
    if isinstance(data, list):
        if all(isinstance(each, int | float) for each in data):
            return data
        return [shortened(data[0]), *([f"… {len(data) - 1} more"] if len(data) > 1 else [])] if data else []
    if isinstance(data, dict) and data.get("type") == "ModelSpec":
        return {"type": "ModelSpec", "…": "the tree, as in gptkit.json"}
    if isinstance(data, dict):
        many = len(data) > 9 and not all(NAMES.fullmatch(key) for key in data)
        kept = dict(list(data.items())[:2]) if many else data
        found = {key: shortened(value) for key, value in kept.items()}
        return {**found, "…": f"{len(data) - 2} more"} if many else found
    return data


def outline(*words: str) -> str:
    """Return the shortened JSON output of a command, as a code block."""
    text = json.dumps(shortened(printed(words)), indent=2, ensure_ascii=False)
    text = re.sub(r"\[\s+((?:-?[\d.]+(?:,\s+)?)+)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    return f"```json\n{text}\n```"


def paths(data: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every key: `models[].total`, with `[]` for the entries of a list."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (here := f"{path}.{key}" if path else key)
            yield from paths(value, here)
    elif isinstance(data, list):
        for each in data:
            yield from paths(each, f"{path}[]")
