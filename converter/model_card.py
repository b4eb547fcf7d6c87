"""Write the model card (README.md) of a healed model, one that was changed and then trained to match the original."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import ConfigError
from .names import LOCAL_CONFIG
from .tree import Origin

CARD = "README.md"
_COLUMNS = ("held-out text", "KL", "±", "loss", "perplexity")
_ROWS = {
    "original": "original",
    "start": "changed",
    "healed": "changed, healed",
    "control": "control: original, trained",
    "floor": "floor: changed, from random weights",
}


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""The name of a repository on the hub, org/name. It can be written in YAML without quotes."""
_MOST = 200
"""The maximum number of characters of one value in the card."""


class _Measured(msgspec.Struct):
    """The KL divergence from the original model, and the loss, of one model on the held-out text."""

    kl: float  # in nats per token, the mean over the runs
    loss: float  # in nats per token, the mean over the runs
    kl_spread: float = 0.0  # the largest KL divergence of a run minus the smallest
    runs: list[Any] = []  # the measurements of every run


class _Healing(msgspec.Struct):
    """The result of a `heal`, as the history in gptkit.json records it."""

    tokens: int  # the number of tokens of each run
    train: str  # the parameters that were trained, such as "all" or "lora:8"
    trained: int  # the number of trained parameters
    seeds: int  # the number of runs, which differ in their seeds
    recovered: float | None = None  # the share of the KL divergence that training removed; None if there was none
    kept: bool = False  # whether no run reduced the KL divergence, so that the weights before training were kept
    original: _Measured | None = None  # the original model
    start: _Measured | None = None  # the changed model before training
    healed: _Measured | None = None  # the changed model after training
    control: _Measured | None = None  # the original model after the same training
    floor: _Measured | None = None  # the changed model, trained from random weights


def _code(value: object) -> str:
    """Return a value of gptkit.json as a Markdown code span. Characters that could end the span are replaced."""
    text = "".join(c if c.isprintable() and c not in "`<>|" else " " for c in str(value)[:_MOST])
    return f"`{' '.join(text.split()) or ' '}`"


def _healing_of(record: Any) -> _Healing:
    try:
        return msgspec.convert(record, _Healing)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ConfigError(
            f"{LOCAL_CONFIG}: an entry of history with the key healed is not valid: {error!s:.200}",
            f"Remove this entry from the list history in {LOCAL_CONFIG}.",
        ) from error


def model_card(origin: Origin) -> bytes | None:
    """Return the model card of a healed model, or None for other models.

    The history in `origin` has the data. Raises ConfigError if it is invalid.
    """
    healed = [_healing_of(record["healed"]) for record in origin.history if "healed" in record]
    if not healed:
        return None
    name, revision = origin.reference or "", origin.revision
    known = _HUB_NAME.fullmatch(name) is not None
    base, title = [], _code(name) if name else "the model"
    if known:
        base, title = [f"base_model: {name}", "base_model_relation: finetune"], name
    steps = [_step(record) for record in origin.history]
    lines = [
        "---",
        "library_name: transformers",
        *base,
        "tags:",
        "- gptkit",
        "---",
        "",
        f"# {title}, changed and healed",
        "",
    ]
    source = _code(name or "the model")
    lines += [f"Made of {source}{f' at {_code(revision)}' if revision else ''}, in these steps:", ""]
    lines += [f"{number}. {step}" for number, step in enumerate(filter(None, steps), 1)]
    for healing in healed:
        lines += ["", "## Healing", "", *_healing(healing)]
    return ("\n".join(lines) + "\n").encode()


def _step(record: Mapping[str, Any]) -> str:
    """Describe an entry of the history, such as a swap or a healing, in one line."""
    if "swap" in record:
        name = str(record["swap"])
        value = str(record.get(name, ""))
        guarantee = str(record.get("guarantee"))
        words = guarantee if guarantee.isidentifier() and len(guarantee) < 40 else _code(guarantee)
        return f"{_code(f'{name} = {value}' if value else name)}: {words}"
    if "healed" in record:
        healing = _healing_of(record["healed"])
        words = healing.train if re.fullmatch(r"[\w:]{1,40}", healing.train, re.ASCII) else _code(healing.train)
        return f"healed on {healing.tokens:,} tokens; trained: {words} ({healing.trained:,} parameters)"
    return "trained" if "trained" in record else ""


def _healing(healing: _Healing) -> list[str]:
    """Return the lines of the card that describe the result of a healing, with a table of the measurements."""
    share = healing.recovered
    words = "there was no gap to close" if share is None else f"{100 * share:.1f} % of the KL divergence is gone"
    words = "no training brought it closer, and it is as it was" if healing.kept and share is not None else words
    words = words if share is None or share >= 0 else "the KL divergence is larger than it was"
    seeds = f"{healing.seeds} seed{'' if healing.seeds == 1 else 's'}"
    lines = [f"Trained to answer as the original does: {words}. {healing.tokens:,} tokens a run, {seeds}.", ""]
    rows: list[Sequence[str]] = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for key, label in _ROWS.items():
        if (measured := getattr(healing, key)) is not None:
            spread = f"{measured.kl_spread:.4f}" if len(measured.runs) > 1 else ""
            rows.append((label, f"{measured.kl:.4f}", spread, f"{measured.loss:.4f}", _perplexity(measured.loss)))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    legend = "KL from the original and loss are in nats per token; ± is the largest less the smallest over seeds."
    return [*lines, "", legend]


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.2f}"
