"""What `audit` prints: what was looked at, then of each finding what it is, the tensors it is of, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderResult
from rich.text import Text

from ..components.ranges import number_ranges
from .diff import some
from .quantities import counted, rounded_bytes
from .sheets import Terminal, drawing

if TYPE_CHECKING:
    from ..parity.audits.subject import Audit

_MOST = 6  # lines of tensors that a finding has, unless all are asked for
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@drawing
def audit_report(terminal: Terminal, audit: Audit, everything: bool = False) -> RenderResult:
    """What rich prints. `everything` lists every tensor of every finding."""
    size = f"{counted(audit.tensors, 'tensor')}, {rounded_bytes(audit.nbytes)}"
    yield Text(terminal.clean(audit.reference), style="bold")
    yield from terminal.wrapped(f"{size}; compared with {some(audit.looked, 8)}", 0, "dim")
    counts = [(each, [x for x in audit.findings if x.severity == each]) for each in _STYLES]
    told = ", ".join(counted(len(found), kind) for kind, found in counts if found)
    yield from terminal.wrapped(told or "Nothing found", 0, "bold")
    if not audit.values:
        yield from terminal.wrapped("Values were not read: NaN, infinities and zeros need --values", 0, "dim")
    for each in audit.findings:
        yield ""
        yield Text(f"{each.severity} {each.rule}", style=_STYLES[each.severity])
        yield from terminal.wrapped(each.message, 2)
        lines = _folded(each.tensors)
        for line in lines if everything else lines[:_MOST]:
            yield from terminal.wrapped(line, 4, "dim")
        if len(lines) > _MOST and not everything:
            yield from terminal.wrapped(f"{len(lines) - _MOST} more lines: --all", 4, "dim")
        if each.remedy:
            yield from terminal.wrapped(f"→ {each.remedy}", 2)


def _folded(names: tuple[str, ...]) -> list[str]:
    """Names that one number alone tells apart in a line: model.layers.{0–3, 7}.mlp.up_proj.weight."""
    found: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        key = tuple(parts) if at is None else (*parts[:at], "", *parts[at + 1 :])
        found.setdefault(key, []).extend([] if at is None else [int(parts[at])])
    lines = []
    for key, numbers in found.items():
        ranges = number_ranges(sorted(set(numbers)))
        words = ranges if len(set(numbers)) == 1 else f"{{{ranges}}}"
        lines.append(".".join(words if not part and numbers else part for part in key))
    return lines
