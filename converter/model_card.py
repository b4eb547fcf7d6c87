"""README.md of a healed model: what was done to it, what it cost, and what training gave back, beside its control."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def model_card(origin: Origin) -> bytes | None:
    """The card of what was healed, from its history; None of anything else."""
    healed = [each["healed"] for each in origin.history if "healed" in each]
    if not healed:
        return None
    name, revision = origin.reference or "the model", origin.revision
    base = [f"base_model: {name}"] if name.count("/") == 1 and not name.startswith((".", "/", "~")) else []
    steps = [_step(each) for each in origin.history]
    lines = ["---", *base, "tags:", "- gptkit", "---", "", f"# {name}, changed and healed", ""]
    lines += [f"Made of `{name}`{f' at `{revision}`' if revision else ''}, in these steps:", ""]
    lines += [f"{number}. {step}" for number, step in enumerate(filter(None, steps), 1)]
    for each in healed:
        lines += ["", "## Healing", "", *_healing(each)]
    return ("\n".join(lines) + "\n").encode()


def _step(record: Mapping[str, Any]) -> str:
    """A step of a history, in a line."""
    if "swap" in record:
        name = str(record["swap"])
        value = str(record.get(name, ""))
        return f"`{f'{name} = {value}' if value else name}`: {record.get('guarantee')}"
    if "healed" in record:
        own = record["healed"]
        return f"healed on {own['tokens']:,} tokens; trained: {own['train']} ({own['trained']:,} parameters)"
    return "trained" if "trained" in record else ""


def _healing(found: Mapping[str, Any]) -> list[str]:
    """What came of a healing, in a table."""
    share = found.get("recovered")
    words = "there was no gap to close" if share is None else f"{100 * share:.1f} % of the KL divergence is gone"
    words = words if share is None or share >= 0 else "the KL divergence is larger than it was"
    seeds = f"{found['seeds']} seed{'' if found['seeds'] == 1 else 's'}"
    lines = [f"Trained to answer as the original does: {words}. {found['tokens']:,} tokens a run, {seeds}.", ""]
    rows: list[Sequence[str]] = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for key, label in _ROWS.items():
        if (each := found.get(key)) is not None:
            runs = each.get("runs", [])
            spread = f"{each['kl_spread']:.4f}" if len(runs) > 1 else ""
            rows.append((label, f"{each['kl']:.4f}", spread, f"{each['loss']:.4f}", _perplexity(each["loss"])))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    told = "KL from the original and loss are in nats per token; ± is the largest less the smallest over seeds."
    return [*lines, "", told]


def _perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.2f}"
