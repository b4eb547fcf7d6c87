"""README.md of a healed model: what was done to it, what it cost, and what training gave back, beside its control."""

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
"""A name on the hub, which YAML takes as it is."""
_MOST = 200
"""Characters of one value in the card."""


class _Held(msgspec.Struct):
    """A model on the held-out text: the mean over its runs, and the largest KL less the smallest."""

    kl: float
    loss: float
    kl_spread: float = 0.0
    runs: list[Any] = []


class _Healing(msgspec.Struct):
    """A healing in a history, as far as the card shows it."""

    tokens: int
    train: str
    trained: int
    seeds: int
    recovered: float | None = None
    kept: bool = False
    original: _Held | None = None
    start: _Held | None = None
    healed: _Held | None = None
    control: _Held | None = None
    floor: _Held | None = None


def _code(value: object) -> str:
    """Return a value of gptkit.json as a span of code, which nothing in it can leave: gptkit.json may be anyone's."""
    text = "".join(c if c.isprintable() and c not in "`<>|" else " " for c in str(value)[:_MOST])
    return f"`{' '.join(text.split()) or ' '}`"


def _healing_of(record: Any) -> _Healing:
    try:
        return msgspec.convert(record, _Healing)
    except (msgspec.ValidationError, OverflowError) as error:
        message = f"{LOCAL_CONFIG}: a healing in its history does not have the form that gptkit writes: {error!s:.200}"
        raise ConfigError(message, "Remove the record from its history.") from error


def model_card(origin: Origin) -> bytes | None:
    """Return the card of what was healed, from its history; None of anything else. Raises ConfigError."""
    healed = [_healing_of(each["healed"]) for each in origin.history if "healed" in each]
    if not healed:
        return None
    name, revision = origin.reference or "", origin.revision
    known = _HUB_NAME.fullmatch(name) is not None
    base, title = ([f"base_model: {name}"], name) if known else ([], _code(name) if name else "the model")
    steps = [_step(each) for each in origin.history]
    lines = ["---", *base, "tags:", "- gptkit", "---", "", f"# {title}, changed and healed", ""]
    made = _code(name or "the model")
    lines += [f"Made of {made}{f' at {_code(revision)}' if revision else ''}, in these steps:", ""]
    lines += [f"{number}. {step}" for number, step in enumerate(filter(None, steps), 1)]
    for each in healed:
        lines += ["", "## Healing", "", *_healing(each)]
    return ("\n".join(lines) + "\n").encode()


def _step(record: Mapping[str, Any]) -> str:
    """A step of a history, in a line."""
    if "swap" in record:
        name = str(record["swap"])
        value = str(record.get(name, ""))
        guarantee = str(record.get("guarantee"))
        words = guarantee if guarantee.isidentifier() and len(guarantee) < 40 else _code(guarantee)
        return f"{_code(f'{name} = {value}' if value else name)}: {words}"
    if "healed" in record:
        own = _healing_of(record["healed"])
        words = own.train if re.fullmatch(r"[\w:]{1,40}", own.train, re.ASCII) else _code(own.train)
        return f"healed on {own.tokens:,} tokens; trained: {words} ({own.trained:,} parameters)"
    return "trained" if "trained" in record else ""


def _healing(found: _Healing) -> list[str]:
    """Return the lines on what came of a healing, a table among them."""
    share = found.recovered
    words = "there was no gap to close" if share is None else f"{100 * share:.1f} % of the KL divergence is gone"
    words = "no training brought it closer, and it is as it was" if found.kept and share is not None else words
    words = words if share is None or share >= 0 else "the KL divergence is larger than it was"
    seeds = f"{found.seeds} seed{'' if found.seeds == 1 else 's'}"
    lines = [f"Trained to answer as the original does: {words}. {found.tokens:,} tokens a run, {seeds}.", ""]
    rows: list[Sequence[str]] = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for key, label in _ROWS.items():
        if (each := getattr(found, key)) is not None:
            spread = f"{each.kl_spread:.4f}" if len(each.runs) > 1 else ""
            rows.append((label, f"{each.kl:.4f}", spread, f"{each.loss:.4f}", _perplexity(each.loss)))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    told = "KL from the original and loss are in nats per token; ± is the largest less the smallest over seeds."
    return [*lines, "", told]


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.2f}"
