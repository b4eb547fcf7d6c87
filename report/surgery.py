"""The reports of `swap` and `swaps`: which swaps are possible, what was done, and how each step changes the model.

They are at most 80 columns wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.costs import Costs, costs
from ..analysis.parameters import count
from ..analysis.params import ModelCount
from ..surgery.options import guarantee_in_words
from .counts import parameter_table
from .quantities import cost_change, perplexity_words, rounded_bytes, rounded_flops, scientific
from .sheets import indented, plain_table

if TYPE_CHECKING:
    from ..surgery.listing import Listed, Listing
    from ..surgery.recipe import Recipe
    from ..surgery.registry import Swap
    from ..surgery.swap import SwapResult

_HEADINGS = {
    "exact": "Possible and exact here",
    "approximate": "Possible, approximate",
    "retrained": "Possible, but needs training",
    "needs a text": "Possible, needs a text to be fitted on (--calibrate FILE)",
    "refused": "Not possible here",
}
"""The headings of a listing, by verdict."""


_TWO, _THREE = (("", False),) * 2, (("", False),) * 3  # columns of words without headings


def listing_report(listing: Listing) -> RenderableType:
    """Return the report on the swaps that are possible on a model.

    It groups them by guarantee, and gives the costs of the changed models, and papers and code as sources.
    """
    before = listing.before
    costly = f"a token that sees {before.context:,}: {rounded_flops(before.total_flops)}FLOP"
    size = f"{before.parameters:,} parameters; {costly}, {rounded_bytes(before.cache_bytes())} of cache in bf16"
    parts: list[RenderableType] = [Text(listing.reference, style="bold"), Text(size)]
    for verdict, heading in _HEADINGS.items():
        entries = [entry for entry in listing.entries if entry.verdict == verdict]
        if entries:
            parts += [Text(), Text(f"{heading} ({len(entries)})", style="bold")]
            parts.append(_refusals(entries) if verdict == "refused" else _possible(entries, before))
    sources: dict[str, dict[str, None]] = {}
    for entry in listing.entries:
        if entry.verdict != "refused":
            sources.setdefault(entry.swap.option, {}).update(dict.fromkeys(entry.swap.source.split("; ")))
    rows = [(Text(f"--{n.replace('_', '-')}"), Text("; ".join(papers), style="dim")) for n, papers in sources.items()]
    return Group(*parts, Text(), Text("Where they come from", style="bold"), plain_table(*_TWO, rows=rows))


def _possible(entries: Sequence[Listed], before: Costs) -> Table:
    """Return a table with one row per possible swap: its result, and how it changes the costs.

    `before` are the costs of the model.
    """
    rows = []
    for entry in entries:
        cells: list[str | Text] = ["?"] * 3
        if entry.costs is not None:
            figures = ("parameters", "total_flops", "cached")
            cells = [cost_change(getattr(before, name), getattr(entry.costs, name)) for name in figures]
        limits = f"; {entry.limits}" if entry.limits else ""
        rows.append([Text(entry.asked), Text.assemble(entry.swap.gives_for(entry.value), (limits, "dim")), *cells])
    return plain_table(*_TWO, ("params", True), ("FLOPs", True), ("KV", True), rows=rows)


def _refusals(entries: Sequence[Listed]) -> Table:
    """Return a table of the swaps that are not possible, with one row per reason, and alternatives."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        reasons.setdefault((entry.said, f"\n{entry.hint}" if entry.hint else ""), []).append(entry.asked)
    rows = [(Text("\n".join(asked)), Text.assemble(said, (hint, "dim"))) for (said, hint), asked in reasons.items()]
    return plain_table(*_TWO, rows=rows)


def registry_report(swaps: Sequence[Swap], groups: Mapping[str, str]) -> RenderableType:
    """Return the report on all swaps that gptkit knows, with their guarantees, requirements and sources.

    `groups` has the heading under which a swap is listed, by the name of the swap's command-line option.
    """
    parts: list[RenderableType] = []
    for heading in dict.fromkeys(groups.values()):
        rows = []
        for swap in swaps:
            if groups.get(swap.option) == heading:
                asked = f"--{swap.option.replace('_', '-')} {swap.form}".strip()
                more = f"\n{swap.needs}.\nSource: {swap.source}."
                guarantee = Text(guarantee_in_words(swap.guarantee))
                rows.append((Text(asked), Text.assemble(f"{swap.takes} -> {swap.gives}", (more, "dim")), guarantee))
        if rows:
            parts += [*([Text()] if parts else []), Text(heading, style="bold"), plain_table(*_THREE, rows=rows)]
    notes = (
        "The guarantee is the best possible one; gptkit swaps MODEL shows which one your model gets. Numbers such as"
        " 2401.15024 are papers on arXiv."
    )
    return Group(*parts, Text(), Text(notes))


def recipes_report(recipes: Sequence[Recipe]) -> RenderableType:
    """Return a table with one row per recipe (a named list of swaps), and its steps."""
    rows = []
    for recipe in recipes:
        steps = "".join(f"\n{index}. {step}" for index, step in enumerate(recipe.every, 1))
        rows.append((Text(recipe.name), Text.assemble(recipe.description.strip(), (steps, "dim"))))
    return plain_table(("recipe", False), ("what it does", False), rows=rows)


def registry_json(swaps: Sequence[Swap]) -> dict[str, Any]:
    """Return the content of `registry_report` as plain JSON values."""
    fields = ("option", "form", "takes", "gives", "guarantee", "needs", "source", "by_layer", "calibrated")
    return {"schema_version": 1, "swaps": [{name: getattr(swap, name) for name in fields} for swap in swaps]}


def recipes_json(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Return the content of `recipes_report` as plain JSON values."""
    fields = ("name", "description", "step")
    return {"schema_version": 1, "recipes": [{name: recipe.as_json()[name] for name in fields} for recipe in recipes]}


def swap_lines(result: SwapResult) -> list[str]:
    """Return the lines that report a swap: the result, its costs, and the measured differences."""
    before, after = result.parameters
    done = "wrote" if result.published else "would write"
    what = "a swap that needs training" if result.guarantee == "retrained" else f"{result.guarantee} swap"
    computed = any(result.chain.computed(parameter.name) for parameter in result.spec.parameters())
    rounds = result.guarantee == "exact" and computed and result.dtype not in ("float64", "float32")
    lines = [f"{done} {result.target}: {what}{f', up to the rounding to {result.dtype}' if rounds else ''}"]
    if result.family is not None:
        lines.append(f"format      Hugging Face files, {result.family.name}: {result.family.hf_class}")
    if result.recipe is not None and result.recipe.name:
        lines.append(f"recipe      {result.recipe.name}")
    if result.recipe is not None and result.recipe.heal is not None:
        lines.append(f"healing     then, on {result.recipe.heal.value}")
    lines += _stored_lines(result, computed)
    lines.append(f"parameters  {before:,} -> {after:,}" + (f" ({after - before:+,})" if after != before else ""))
    other = "the recipe was recorded with other files, so the result has other bytes"
    notes = [*result.chain.notes, *([other] if result.same_source is False else [])]
    notes += [f"left out: {note}" for note in result.source.carried_notes]
    lines += [line for note in notes for line in indented(note, 12)]
    measured, naive = result.measured, result.naive
    if measured is None:
        return [*lines, "not measured"] if result.published else lines
    if measured.perplexity is not None and measured.kl_text is not None and measured.top1_text is not None:
        perplexity = " -> ".join(map(perplexity_words, measured.perplexity))
        same = f"top-1 {measured.top1_text:.1%}, {measured.text_positions:,} tokens"
        lines.append(f"text        perplexity {perplexity}, KL {scientific(measured.kl_text)}, {same}")
    if naive is not None and naive.perplexity is not None and naive.kl_text is not None:
        perplexity, kl = perplexity_words(naive.perplexity[1]), scientific(naive.kl_text)
        lines.append(f"plain form  perplexity {perplexity}, KL {kl} (without a fit: --approximate)")
    for dtype, error in measured.maximum.items():
        apart = f"max Δ {scientific(error)}, relative {scientific(measured.relative[dtype])}"
        sides = "base+adapter against merged" if result.chain.merges else "before against after"
        lines.append(f"{dtype:<12}logits {sides}: {apart}")
    same = f"top-1 {measured.top1:.1%}, {measured.positions:,} positions"
    lines.append(f"random ids  KL {scientific(measured.kl)} nats per token, {same}")
    return lines + [line for note in measured.notes for line in indented(note, 12)]


def _stored_lines(result: SwapResult, computed: bool) -> list[str]:
    """Return a line on the dtype in which computed tensors are stored, and why.

    There is no line if no tensor was computed.
    """
    asked = None if result.recipe is None else result.recipe.dtype
    exact, whole = result.guarantee == "exact", asked is not None and result.family is not None
    if not whole and not computed:
        return []
    if asked is None and exact and result.dtype == "float64":
        return ["stored as   float64 where computed, so that the file itself proves exactness"]
    before = "; exact before rounding" if computed and exact and result.dtype != "float64" else ""
    why = "as the source is" if asked is None else "as asked"
    return [f"stored as   {result.dtype}{'' if whole else ' where computed'}, {why}{before}"]


def costs_table(before: Costs, after: Costs) -> Table:
    """Return a table of a model's costs before and after a swap."""
    rows: list[tuple[str, float, float, Any]] = [("parameters", before.parameters, after.parameters, "{:,}".format)]
    if (before.active, after.active) != (before.parameters, after.parameters):
        rows.append(("active per token", before.active, after.active, "{:,}".format))
    rows.append((f"FLOPs per token at {before.context:,}", before.total_flops, after.total_flops, rounded_flops))
    for name in dict.fromkeys([*before.flops, *after.flops]):
        rows.append((f"  {name}", before.flops.get(name, 0), after.flops.get(name, 0), rounded_flops))
    if before.cache_bytes() or after.cache_bytes():
        rows.append(("KV cache per token, bf16", before.cache_bytes(), after.cache_bytes(), rounded_bytes))
        rows.append(
            (
                f"cache at {before.context:,} tokens",
                before.cache_bytes_at_context(),
                after.cache_bytes_at_context(),
                rounded_bytes,
            )
        )
    cells = [(label, shown(old), shown(new), cost_change(old, new)) for label, old, new, shown in rows]
    return plain_table(("", False), ("before", True), ("after", True), ("", True), rows=cells)


def steps_cells(result: SwapResult) -> tuple[tuple[tuple[str, bool], ...], list[tuple[str, ...]], str]:
    """Return the columns and the rows of a table of a swap's steps, and a sentence that explains its figures.

    A row has the guarantee of a step. If the steps were measured one by one, it also has the divergence that this step
    alone causes. Otherwise the sentence is "".
    """
    measured = result.each
    text = [one.perplexity for one in measured if one.perplexity is not None]
    columns = [("step", False), ("", False), ("guarantee", False), ("params", True)]
    columns += [("KL", True), ("top-1", True)] if measured else []
    columns += [("perplexity", True)] if text else []
    models, rows = result.chain.models, []
    for index, (step, swapped) in enumerate(zip(result.chain.steps, result.chain.swapped, strict=True)):
        before, after = count(models[index].spec).total, count(models[index + 1].spec).total
        cells = [str(index + 1), str(step), guarantee_in_words(swapped.guarantee), cost_change(before, after)]
        if measured:
            one = measured[index]
            kl, top1 = one.kl, one.top1
            if one.kl_text is not None and one.top1_text is not None:
                kl, top1 = one.kl_text, one.top1_text
            cells += [scientific(kl), f"{top1:.1%}"]
            if text:
                cells.append("" if one.perplexity is None else f"{one.perplexity[1]:,.2f}")
        rows.append(tuple(cells))
    on_text = any(one.kl_text is not None for one in measured)
    where = "KL and top-1 on the text, perplexity after it" if on_text else "KL and top-1 on the probe"
    return tuple(columns), rows, f"each step compared with the one before, {where}" if measured else ""


def steps_report(result: SwapResult) -> RenderableType:
    """Return the table of a swap's steps, and an explanation of its figures."""
    columns, rows, words = steps_cells(result)
    table = plain_table(*columns, rows=[[*map(Text, row)] for row in rows])
    return Group(Text(f"{words}:", style="dim"), table) if words else table


def dry_run_report(result: SwapResult) -> RenderableType:
    """Return the report of a dry run, without the notes on the steps, which `swap_lines` returns.

    It has tables of the resulting model's components, its costs, and the guarantees of the steps.
    """
    before, spec = costs(result.source.spec), result.spec
    return Group(
        parameter_table([ModelCount(str(result.target), "as it would be", spec)]),
        Text(),
        costs_table(before, costs(spec, before.context)),
        Text(),
        steps_report(result),
    )
