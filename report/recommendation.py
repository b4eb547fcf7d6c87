"""What `recommend` prints: choices with their papers, what each costs, and what the costs say to the advice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .comparison import flops
from .pages import counted
from .sheets import Drawing, Layout, Row, Sheet, nbytes

if TYPE_CHECKING:
    from ..analysis.recommend import Choice, Recommendation

__all__ = ["recommendation_table"]

NARROWEST = 72
"""Characters below which a choice is told in lines one below the other."""
BETWEEN = 2


def recommendation_table(found: Recommendation) -> Drawing:
    """What rich prints."""
    return Drawing(partial(_table, found))


def _table(found: Recommendation, layout: Layout) -> RenderResult:
    page = _Page(layout.width, layout.ascii_only)
    off = 100 * (found.parameters / found.budget - 1)
    contrary = any(finding.against for finding in found.findings)
    size = f"{found.parameters:,} parameters, {off:+.1f}% of what was asked for"
    yield Text.assemble((page.clean(found.goal), "bold"), page.clean(f"  {size}"))
    yield page.note(shape_words(found))
    yield ""
    yield Text("Components, in the order of their effect", style="bold")
    told = " The costs disagree: see below." if contrary else ""
    yield page.note(f"As usually advised for {found.goal}: {found.way}.{told}")
    yield from page.choices(found.choices)
    yield ""
    yield costs_sheet(found)
    yield ""
    for title, against in (("Where the costs disagree with the advice", True), ("What the costs say", False)):
        said = [finding.words for finding in found.findings if finding.against == against]
        if said:
            yield Text(title, style="bold")
            yield from (page.item(words) for words in said)
            yield ""
    yield from (page.note(note) for note in found.notes)


def shape_words(found: Recommendation) -> str:
    """The shape in a line."""
    spec, shape = found.spec, found.shape
    heads = f"{shape.heads} heads of {shape.head_dim}" if shape.heads > 1 else f"one head of {shape.head_dim}"
    return (
        f"{counted(len(spec.blocks), 'layer')} · {spec.hidden_size:,} wide · {heads}"
        f" · vocabulary {spec.vocab_size:,} · context {found.context:,}"
    )


def costs_sheet(found: Recommendation) -> Sheet:
    """Each choice exchanged alone in the baseline, what else there is, and both models as they are."""
    layers, hidden = len(found.baseline.blocks), found.baseline.hidden_size
    rows = [_whole_row("GPT-2's way", found.baseline_costs)]
    rows += [_exchange(choice) for choice in found.choices if not choice.usual]
    if found.considered:
        first, *rest = (_exchange(choice, "dim") for choice in found.considered)
        rows += [Row(f"({first.label})", first.cells, first.style, ruled=True)]
        rows += [Row(f"({row.label})", row.cells, row.style) for row in rest]
    own = _whole_row("recommended", found.costs)
    rows.append(Row(own.label, own.cells, "bold", ruled=True))
    return Sheet(
        title="exchanged alone",
        columns=("parameters", f"KV at {found.context:,}", "FLOPs per token"),
        rows=tuple(rows),
        notes=(
            f"GPT-2's way: {counted(layers, 'layer')}, {hidden:,} wide, and a table of {found.context:,} positions."
            f" Cache in bf16; a token sees {found.context:,}.",
            *(("What is in brackets was not chosen.",) if found.considered else ()),
        ),
    )


def _whole_row(label: str, costs: Any) -> Row:
    return Row(label, (f"{costs.parameters:,}", nbytes(costs.held_bytes()), flops(costs.total_flops)), "bold")


def _exchange(choice: Choice, style: str | None = None) -> Row:
    cost = choice.cost
    cells = (f"{cost.parameters:+,}" if cost.parameters else "0", signed(cost.cache, nbytes), signed(cost.flops, flops))
    return Row(choice.alone, cells, style)


def signed(number: int, words: Any) -> str:
    """A difference in words that have no sign."""
    return "0" if number == 0 else f"{'+' if number > 0 else '-'}{words(abs(number))}"


@dataclass(frozen=True)
class _Page(Layout):
    """Choices on a terminal this wide."""

    def choices(self, choices: tuple[Choice, ...]) -> RenderResult:
        if self.width >= NARROWEST:
            yield self.beside(choices)
            return
        for choice in choices:
            yield self.text(choice.words)
            yield self.item(choice.why, "  ")
            if choice.paper is not None:
                yield self.item(str(choice.paper), "  ")

    def beside(self, choices: tuple[Choice, ...]) -> Table:
        """What, why, and where it is written."""
        table = Table(box=None, show_edge=False, show_header=False, padding=(0, BETWEEN, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, width=max(len(choice.words) for choice in choices), style="bold")
        table.add_column(overflow="fold")
        table.add_column(no_wrap=True, width=max(len(str(choice.paper or "")) for choice in choices), style="dim")
        for choice in choices:
            table.add_row(*map(self.text, (choice.words, choice.why, str(choice.paper or ""))))
        return table

    def item(self, words: str, before: str = "- ") -> Any:
        """A line that is set in where it goes on."""
        table = Table(box=None, show_edge=False, show_header=False, padding=0, pad_edge=False)
        table.add_column(no_wrap=True, width=len(before))
        table.add_column(overflow="fold")
        table.add_row(self.text(before), self.text(words))
        return Padding(table, 0)
