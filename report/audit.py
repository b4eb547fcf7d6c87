"""The report of `audit`: what was examined, and what was found in which tensors, with advice on what to do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import RenderResult
from rich.text import Text

from ..components.ranges import number_ranges
from .diff import some
from .quantities import counted, rounded_bytes
from .sheets import Terminal, drawing

if TYPE_CHECKING:
    from ..parity.audits.subject import Audit

_MOST = 6  # lines of tensors of a finding without --all
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@drawing
def audit_report(terminal: Terminal, audit: Audit, everything: bool = False) -> RenderResult:
    """Yield the report of an audit for the terminal. With `everything`, it lists every tensor of every finding."""
    size = f"{counted(audit.tensors, 'tensor')}, {rounded_bytes(audit.nbytes)}"
    yield Text(terminal.clean(audit.reference), style="bold")
    yield from terminal.wrapped(f"{size}; compared with {some(audit.looked, 8)}", 0, "dim")
    counts = Counter[str](finding.severity for finding in audit.findings)
    totals = ", ".join(counted(counts[severity], severity) for severity in _STYLES if counts[severity])
    yield from terminal.wrapped(totals or "Nothing found", 0, "bold")
    if not audit.values:
        yield from terminal.wrapped("Values were not read: NaN, infinities and zeros need --values", 0, "dim")
    for finding in audit.findings:
        yield ""
        yield Text(f"{finding.severity} {finding.rule}", style=_STYLES[finding.severity])
        yield from terminal.wrapped(finding.message, 2)
        lines = _folded(finding.tensors)
        for line in lines if everything else lines[:_MOST]:
            yield from terminal.wrapped(line, 4, "dim")
        if len(lines) > _MOST and not everything:
            yield from terminal.wrapped(f"{len(lines) - _MOST} more lines: --all", 4, "dim")
        if finding.remedy:
            yield from terminal.wrapped(f"→ {finding.remedy}", 2)


def _folded(names: tuple[str, ...]) -> list[str]:
    """Return tensor names, with one line for names that differ only in the layer.

    For example: model.layers.{0–3, 7}.mlp.up_proj.weight.
    """
    numbers_by_name: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        key = tuple(parts) if at is None else (*parts[:at], "", *parts[at + 1 :])
        numbers_by_name.setdefault(key, []).extend([] if at is None else [int(parts[at])])
    lines = []
    for key, numbers in numbers_by_name.items():
        ranges = number_ranges(sorted(set(numbers)))
        words = ranges if len(set(numbers)) == 1 else f"{{{ranges}}}"
        lines.append(".".join(words if not part and numbers else part for part in key))
    return lines
