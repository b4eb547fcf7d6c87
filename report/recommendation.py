"""The report of `recommend`: components with papers, their costs, and whether the costs support the advice."""

from typing import Any

from rich.console import RenderResult
from rich.text import Text

from ..analysis.recommend import ComponentChoice, Recommendation
from .quantities import counted, decimal, decimal_bytes, signed
from .sheets import Sheet, SheetRow, Terminal, drawing, plain_table

_NARROWEST = 72  # in a narrower terminal, a choice takes several lines
_GAP = 2


@drawing
def recommendation_table(terminal: Terminal, advice: Recommendation) -> RenderResult:
    """Yield the report on recommended components for the terminal."""
    spec, shape = advice.spec, advice.shape
    excess = 100 * (advice.parameters / advice.budget - 1)
    contrary = any(finding.against for finding in advice.findings)
    size = f"{advice.parameters:,} parameters, {excess:+.1f}% compared with the budget"
    heads = f"{shape.heads} heads of {shape.head_dim}" if shape.heads > 1 else f"one head of {shape.head_dim}"
    yield Text.assemble((terminal.clean(advice.goal), "bold"), terminal.clean(f"  {size}"))
    yield terminal.note(
        f"{counted(len(spec.blocks), 'layer')} · {spec.hidden_size:,} wide · {heads}"
        f" · vocabulary {spec.vocab_size:,} · context {advice.context:,}"
    )
    yield ""
    yield Text("Components, in the order of their effect", style="bold")
    disagree = " The costs disagree: see below." if contrary else ""
    yield terminal.note(f"As usually advised for {advice.goal}: {advice.way}.{disagree}")
    if terminal.width >= _NARROWEST:
        rows = [(choice.words, choice.why, str(choice.paper or "")) for choice in advice.choices]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = plain_table(gap=_GAP)
        table.add_column(no_wrap=True, width=widths[0], style="bold")
        table.add_column(overflow="fold")
        table.add_column(no_wrap=True, width=widths[2], style="dim")
        for row in rows:
            table.add_row(*map(terminal.text, row))
        yield table
    for choice in advice.choices if terminal.width < _NARROWEST else ():
        yield terminal.text(choice.words)
        yield from terminal.wrapped(choice.why, 2, further=0)
        if choice.paper is not None:
            yield from terminal.wrapped(str(choice.paper), 2, further=0)
    yield from ("", _costs_sheet(advice), "")
    for title, against in (("Where the costs disagree with the advice", True), ("What the costs say", False)):
        findings = [finding.words for finding in advice.findings if finding.against == against]
        if findings:
            yield Text(title, style="bold")
            for words in findings:
                yield from terminal.wrapped(f"- {words}", 0)
            yield ""
    yield from map(terminal.note, advice.notes)


def _costs_sheet(advice: Recommendation) -> Sheet:
    """Return a table of costs.

    Its first row is the baseline (GPT-2's design). Then there is one row per recommended component, with the change of
    the costs if only this component is exchanged in the baseline. The last row is the recommended model.
    """

    def whole(label: str, costs: Any, ruled: bool) -> SheetRow:
        cells = (f"{costs.parameters:,}", decimal_bytes(costs.cache_bytes_at_context()), decimal(costs.total_flops))
        return SheetRow(label, cells, "bold", ruled)

    def exchange(choice: ComponentChoice) -> tuple[str, ...]:
        parameters = f"{choice.cost.parameters:+,}" if choice.cost.parameters else "0"
        return (parameters, signed(choice.cost.cache, decimal_bytes), signed(choice.cost.flops, decimal))

    rows = [whole("GPT-2's design", advice.baseline_costs, False)]
    rows += [SheetRow(choice.alone, exchange(choice)) for choice in advice.choices if not choice.usual]
    for index, choice in enumerate(advice.considered):
        rows.append(SheetRow(f"({choice.alone})", exchange(choice), "dim", ruled=index == 0))
    rows.append(whole("recommended", advice.costs, True))
    layers, wide, context = len(advice.baseline.blocks), f"{advice.baseline.hidden_size:,} wide", f"{advice.context:,}"
    way = f"GPT-2's design: {counted(layers, 'layer')}, {wide}, and a table of {context} positions."
    notes = [f"{way} Cache in bf16; a token sees {context}."]
    notes += ["The choices in brackets were not made."] if advice.considered else []
    columns = ("parameters", f"KV at {context}", "FLOPs per token")
    return Sheet("The cost of each component alone", columns, tuple(rows), tuple(notes))
