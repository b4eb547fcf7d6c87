"""Tables about swaps: what is possible, what a recipe does, what each step of it costs; 80 columns are enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.costs import Costs, costs
from ..analysis.parameters import count
from ..surgery.options import guarantee_in_words
from .summaries import human_bytes, number, plain_table, wrap
from .tables import parameter_table

if TYPE_CHECKING:
    from ..surgery.listing import Listed, Listing
    from ..surgery.recipe import Recipe
    from ..surgery.registry import Swap
    from ..surgery.swap import SwapResult

__all__ = [
    "change",
    "costs_table",
    "dry_run_report",
    "listing_report",
    "recipes_json",
    "recipes_report",
    "registry_json",
    "registry_report",
    "steps_cells",
    "steps_report",
    "steps_table",
    "steps_words",
]

HEADINGS = {
    "exact": "Possible and exact here",
    "approximate": "Possible, approximate",
    "retrained": "Possible, but needs training",
    "needs a text": "Possible, needs a text to be fitted on (--calibrate FILE)",
    "refused": "Not possible here",
}
"""The groups of a listing."""


def change(before: float, after: float) -> str:
    """A cost after against before: "=", +12.5 %, -75.0 %, ×16 from ten times on."""
    if after == before:
        return "="
    if not before:
        return "new"
    if after >= 10 * before:
        return f"×{after / before:,.0f}"
    return f"{100 * (after / before - 1):+.1f} %"


def flops(value: float) -> str:
    """1,234, 1.24 M, 16.1 G, with a space before the unit."""
    for unit in ("", " k", " M", " G", " T"):
        if value < 1000 or unit == " T":
            return f"{value:,.0f}" if not unit else f"{value:,.2f}{unit}"
        value /= 1000
    raise AssertionError


# --- what can be swapped ----------------------------------------------------------------------------------------------


def listing_report(found: Listing) -> RenderableType:
    """Every swap on a model, by what it would guarantee, with its costs."""
    before = found.before
    parts: list[RenderableType] = [
        Text(found.reference, style="bold"),
        Text(
            f"{before.parameters:,} parameters; a token that sees {before.context:,}: {flops(before.total_flops)}FLOP,"
            f" {human_bytes(before.cache_bytes())} of cache in bf16"
        ),
    ]
    for verdict, heading in HEADINGS.items():
        entries = [entry for entry in found.entries if entry.verdict == verdict]
        if entries:
            parts += [Text(), Text(f"{heading} ({len(entries)})", style="bold")]
            parts.append(refusals(entries) if verdict == "refused" else possible(entries, before))
    return Group(*parts, Text(), Text("Where they come from", style="bold"), sources(found.entries))


def possible(entries: Sequence[Listed], before: Costs) -> Table:
    """A row a swap: what it gives, and how its costs change."""
    table = plain_table(("", False), ("", False), ("params", True), ("FLOPs", True), ("KV", True))
    for entry in entries:
        cells = ["?"] * 3
        if entry.costs is not None:
            now = entry.costs
            cells = [
                change(before.parameters, now.parameters),
                change(before.total_flops, now.total_flops),
                change(before.cached, now.cached),
            ]
        what = Text(entry.swap.gives_for(entry.value))
        if entry.limits:
            what.append(f"; {entry.limits}", style="dim")
        table.add_row(Text(entry.asked), what, *cells)
    return table


def refusals(entries: Sequence[Listed]) -> Table:
    """A row a reason: which swaps it stops, and what would be possible."""
    table = plain_table(("", False), ("", False))
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        reasons.setdefault((entry.said, entry.hint), []).append(entry.asked)
    for (said, hint), asked in reasons.items():
        why = Text(said)
        if hint:
            why.append(f"\n{hint}", style="dim")
        table.add_row(Text("\n".join(asked)), why)
    return table


def sources(entries: Sequence[Listed]) -> Table:
    """Papers and code, by option."""
    table = plain_table(("", False), ("", False))
    known: dict[str, dict[str, None]] = {}
    for entry in entries:
        if entry.verdict != "refused":
            known.setdefault(entry.swap.option, {}).update(dict.fromkeys(entry.swap.source.split("; ")))
    for option, found in known.items():
        table.add_row(Text(f"--{option.replace('_', '-')}"), Text("; ".join(found), style="dim"))
    return table


def registry_report(swaps: Sequence[Swap], groups: Mapping[str, str]) -> RenderableType:
    """What there is at all: each swap, its guarantee, what it needs and where it comes from.

    `groups` has the heading of each option.
    """
    parts: list[RenderableType] = []
    for heading in dict.fromkeys(groups.values()):
        chosen = [swap for swap in swaps if groups.get(swap.option) == heading]
        if not chosen:
            continue
        table = plain_table(("", False), ("", False), ("", False))
        for swap in chosen:
            asked = f"--{swap.option.replace('_', '-')} {swap.form}".strip()
            what = Text(swap.title)
            what.append(f"\n{needed(swap)}", style="dim")
            what.append(f"\nSource: {swap.source}.", style="dim")
            table.add_row(Text(asked), what, Text(guarantee_in_words(swap.guarantee)))
        parts += [*([Text()] if parts else []), Text(heading, style="bold"), table]
    notes = "The guarantee is the best there is; gptkit swaps MODEL tells what holds on a model."
    return Group(*parts, Text(), Text(notes))


def needed(swap: Swap) -> str:
    """What a swap needs, in a sentence."""
    text = ", and a text" if swap.calibrated and "text" not in swap.needs else ""
    return f"It {'is' if swap.needs.startswith('exact') else 'needs'} {swap.needs}{text}."


def recipes_report(recipes: Sequence[Recipe]) -> RenderableType:
    """A row a recipe, with its steps."""
    table = plain_table(("recipe", False), ("what it does", False))
    for recipe in recipes:
        what = Text(recipe.description.strip())
        for index, step in enumerate(recipe.steps, 1):
            what.append(f"\n{index}. {step}", style="dim")
        table.add_row(Text(recipe.name), what)
    return table


def registry_json(swaps: Sequence[Swap]) -> dict[str, Any]:
    """What `registry_report` says, for programs."""
    fields = ("option", "form", "takes", "gives", "guarantee", "needs", "source", "by_layer", "calibrated")
    return {"schema_version": 1, "swaps": [{name: getattr(swap, name) for name in fields} for swap in swaps]}


def recipes_json(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """What `recipes_report` says, for programs."""
    fields = ("name", "description", "step")
    return {"schema_version": 1, "recipes": [{name: each.as_json()[name] for name in fields} for each in recipes]}


# --- what a swap does -------------------------------------------------------------------------------------------------


def costs_table(before: Costs, after: Costs) -> Table:
    """Costs before and after."""
    table = plain_table(("", False), ("before", True), ("after", True), ("", True))
    size = before.cache_bytes() or after.cache_bytes()
    rows: list[tuple[str, float, float, Any]] = [("parameters", before.parameters, after.parameters, "{:,}".format)]
    if (before.active, after.active) != (before.parameters, after.parameters):
        rows.append(("active per token", before.active, after.active, "{:,}".format))
    rows.append((f"FLOPs per token at {before.context:,}", before.total_flops, after.total_flops, flops))
    for name in dict.fromkeys([*before.flops, *after.flops]):
        rows.append((f"  {name}", before.flops.get(name, 0), after.flops.get(name, 0), flops))
    if size:
        rows.append(("KV cache per token, bf16", before.cache_bytes(), after.cache_bytes(), human_bytes))
        rows.append((f"cache at {before.context:,} tokens", before.held_bytes(), after.held_bytes(), human_bytes))
    for label, old, new, shown in rows:
        table.add_row(label, shown(old), shown(new), change(old, new))
    return table


def steps_cells(result: SwapResult) -> tuple[tuple[tuple[str, bool], ...], list[tuple[str, ...]]]:
    """A row a step: what it guarantees and what it costs by itself, where that was measured; behind the columns'
    headings, and whether they hold figures.
    """
    measured = result.each
    text = [each.perplexity for each in measured if each.perplexity is not None]
    columns = [("step", False), ("", False), ("guarantee", False), ("params", True)]
    columns += [("KL", True), ("top-1", True)] if measured else []
    columns += [("perplexity", True)] if text else []
    models, rows = result.chain.models, []
    for index, (step, swapped) in enumerate(zip(result.chain.steps, result.chain.swapped, strict=True)):
        before, after = count(models[index].spec).total, count(models[index + 1].spec).total
        cells = [str(index + 1), str(step), guarantee_in_words(swapped.guarantee), change(before, after)]
        if measured:
            one = measured[index]
            kl, top1 = (
                (one.kl, one.top1) if one.kl_text is None or one.top1_text is None else (one.kl_text, one.top1_text)
            )
            cells += [number(kl), f"{top1:.1%}"]
            if text:
                cells.append("" if one.perplexity is None else f"{one.perplexity[1]:,.2f}")
        rows.append(tuple(cells))
    return tuple(columns), rows


def steps_table(result: SwapResult) -> Table:
    """`steps_cells` for the terminal."""
    columns, rows = steps_cells(result)
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def steps_words(result: SwapResult) -> str:
    """What the figures of the steps mean."""
    on_text = any(one.kl_text is not None for one in result.each)
    where = "KL and top-1 on the text, perplexity after it" if on_text else "KL and top-1 on the probe"
    return f"each step against the one before, {where}"


def steps_report(result: SwapResult) -> RenderableType:
    """The steps of a chain, and what their figures mean."""
    if not result.each:
        return steps_table(result)
    return Group(Text(f"{steps_words(result)}:", style="dim"), steps_table(result))


def dry_run_report(result: SwapResult) -> RenderableType:
    """The tree that would come out, its costs, and what each step guarantees."""
    before, spec = costs(result.source.spec), result.spec
    family = "as it would be"
    parts: list[RenderableType] = [
        parameter_table([(str(result.target), family, spec, count(spec))]),
        Text(),
        costs_table(before, costs(spec, before.context)),
        Text(),
        steps_table(result),
    ]
    notes = [line for note in result.chain.notes for line in wrap(f"note: {note}", indent=0, width=80)]
    return Group(*parts, *([Text()] if notes else []), *(Text(line) for line in notes))
