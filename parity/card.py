"""Write the verification card: the result of `verify` with its checks, files, versions, figures and command.

The card is written as JSON for programs, and as Markdown for a model's page.
"""

import json
import platform
import shlex
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch

from ..converter.checkpoint import digests, open_checkpoint
from ..converter.opening import Opening
from ..errors import UsageError
from ..version import __version__
from .verify import Verification


def card(result: Verification, *, allow_extra: bool = False, **opening: Unpack[Opening]) -> dict[str, Any]:
    """Return the verification card as plain JSON values. This hashes the weight files of both models.

    `result` comes from `verify`, and the other arguments are those that `verify` was called with. Raises the errors of
    `open_checkpoint`.
    """
    references = {"model": result.model} | ({} if result.other is None else {"other": result.other})
    sides = {
        role: open_checkpoint(reference, allow_extra=allow_extra, **opening) for role, reference in references.items()
    }
    bytes_ = result.bytes
    different = "different" if bytes_ is None or bytes_.required else "different as the trees are"
    alike = "equal in value" if bytes_ is not None and bytes_.cast else "equal"
    bytes_word = None if bytes_ is None else different if bytes_.different else alike
    return {
        "schema_version": 1,
        "checkpoints": {
            role: {
                "reference": checkpoint.reference,
                "revision": checkpoint.revision,
                "family": checkpoint.origin.family,
                "format": checkpoint.format,
                "parameters": sum(parameter.count for parameter in checkpoint.spec.parameters()),
                "sha256": digests(checkpoint),
                "history": list(checkpoint.origin.history),
            }
            for role, checkpoint in sides.items()
        },
        "verdict": {"function": result.verdict, "bytes": bytes_word, "passed": result.passed},
        "up_to": result.up_to,
        "limited": list(result.limited),
        "versions": {"gptkit": __version__, "transformers": version("transformers"), "torch": torch.__version__}
        | {"python": platform.python_version()},
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": result.device}
        | ({} if result.hardware is None else {"name": result.hardware}),
        "dtype": result.dtype,
        "attention": result.attention,
        "prompts": [asdict(prompt) for prompt in result.prompts],
        "bytes": None if bytes_ is None else {**asdict(bytes_), "different": list(bytes_.different)},
        "noise": None if result.noise is None else {**asdict(result.noise), "allowed": result.noise.allowed},
        "mutations": None if result.score is None else {**asdict(result.score), "tried": result.score.tried},
        "divergence": None if result.divergence is None else asdict(result.divergence),
        "notes": list(result.notes),
        "command": command(result),
    }


def command(result: Verification) -> str:
    """Return the shell command that repeats this verification."""
    return shlex.join(["gptkit", "verify", *result.arguments])


def markdown(data: dict[str, Any]) -> str:
    """Return a verification card (the result of `card`) as Markdown for a model's page."""
    verdicts = {
        "identical": "identical to transformers to the last bit",
        "equal": "the same function as transformers; what differs is rounding",
        "different": "**different from transformers**",
    }
    bytes_words = {
        None: "not compared",
        "different as the trees are": "some are others, as the trees are: the function holds them",
        "equal": "equal",
        "equal in value": "equal in value, some stored in another dtype",
        "different": "**different**",
    }
    reach = data["up_to"]
    words = verdicts[data["verdict"]["function"]] + ("" if reach is None else f", up to {reach:,} tokens")
    lines = ["## Verification", "", f"- function: {words}"]
    lines += [f"- **not looked at**: {words_}" for words_ in data["limited"]]
    lines.append(f"- bytes: {bytes_words[data['verdict']['bytes']]}")
    marks = data["mutations"]
    if marks is not None:
        where = " (on a small copy of this tree with random weights)" if marks["small_copy"] else ""
        caught = marks["tried"] - len(marks["missed"])
        lines.append(f"- probe: {caught} of {marks['tried']} deliberate mistakes caught{where}")
        if marks["invisible"]:
            lines.append(f"- not visible on this checkpoint: {', '.join(marks['invisible'])}")
    machine = data["hardware"]["machine"]
    where = machine if "name" not in data["hardware"] else f"{data['hardware']['name']} ({machine})"
    lines.append(f"- computed in {data['dtype']} with {data['attention']} attention, on {where}")
    lines.append("- versions: " + ", ".join(f"{name} {number}" for name, number in data["versions"].items()))
    if data["noise"] is not None:
        noise = data["noise"]
        lines.append(f"- in float64 they differ by {noise['functions']:.1e}; rounding explains {noise['allowed']:.1e}")
    lines += ["", "| probe | tokens | max Δ | mean Δ | KL | top-1 |", "|---|---:|---:|---:|---:|---:|"]
    for prompt in data["prompts"]:
        name = prompt["name"].replace("|", "\\|").replace("\n", "\\n")
        figures = (f"{prompt[key]:.1e}" if prompt[key] else "0" for key in ("maximum", "mean", "kl"))
        lines.append(f"| {name} | {prompt['positions']} | {' | '.join(figures)} | {prompt['top1']:.1%} |")
    lines += ["", "| file | sha256 |", "|---|---|"]
    for role, described in data["checkpoints"].items():
        where = described["reference"] + (f"@{described['revision']}" if described["revision"] else "")
        lines += [f"| {role}: {where}/{name} | `{digest}` |" for name, digest in described["sha256"].items()]
    lines += [f"\n{note}" for note in data["notes"]]
    return "\n".join([*lines, "", "```", data["command"], "```", ""])


def write_card(result: Verification, path: Path, **options: bool) -> tuple[Path, Path]:
    """Write the card as two files: `path` with the suffixes .json and .md. Raise UsageError if they
    cannot be written.
    """
    data = card(result, **options)
    targets = path.with_suffix(".json"), path.with_suffix(".md")
    try:
        targets[0].write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        targets[1].write_text(markdown(data), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    return targets
