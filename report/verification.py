"""The report of `verify`, which compares a checkpoint or a port of a model with transformers.

It has the differences of the logits, the verdicts, and the first component that differs.
"""

from __future__ import annotations

import math
import platform
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ..components.ranges import some_of
from .damage import damage_lines, damage_sections
from .heatmap import Cell, heatmap
from .pages import Code, Figure, Lines, Page, Section, Table, noted
from .quantities import counted, scientific
from .sheets import indented, plain_table, whole_words

if TYPE_CHECKING:
    from ..parity.bisect import Divergence, Part
    from ..parity.compare import LogitDifference
    from ..parity.port import PortVerification
    from ..parity.precision import Imprecise
    from ..parity.score import MistakeScore
    from ..parity.verify import Verification

_SHOWN = 5  # the most tensors that are named
_PROBE = (("probe", False), ("tokens", True), ("max Δ", True), ("mean Δ", True), ("KL", True), ("top-1", True))
"""The columns of the table of prompts: how much the logits differ."""
_PLACES = (("component", False), ("relative Δ", True), ("rounding there", True), ("", False))
_VERDICTS = {
    "identical": "Identical to the last bit",
    "equal": "The same function: what differs is rounding",
    "different": "Different",
}
_WORDS = {"identical": "identical to the last bit", "equal": "the same", "different": "DIFFERENT"}
_NOT_COMPARED = "The components were not compared; the notes say why."
_PACKAGES = ("transformers", "torch")
"""The packages whose versions matter."""
_RELATIVE = "Relative: the largest difference, divided by the reference's largest value at this place, in float64."


def _packages() -> list[tuple[str, str]]:
    return [(name, version(name)) for name in _PACKAGES]


def _versions() -> list[str]:
    return [f"versions  {', '.join(' '.join(package) for package in _packages())}"]


def _device(result: Verification) -> list[str]:
    """Return the line on the device that computed, or an empty list if it is the CPU."""
    return [] if result.device == "cpu" else [f"device    {result.place}"]


def _some(names: Sequence[str]) -> str:
    """Return the first names of some tensors, and the number of the others. Tensors of all layers share one name."""
    names = list(dict.fromkeys(re.sub(r"\bblocks\.\d+\.", "blocks.*.", name) for name in names))
    return some_of(names, _SHOWN, ", … ({} more)")


# --- in the terminal -------------------------------------------------------------------------------------------------


def verification_report(result: Verification) -> RenderableType:
    """Return the report of a verified checkpoint for the terminal.

    It has a table of prompts, the verdicts, and the components before and after the first one that differs.
    """
    lines = [*verdict_lines(result), *_device(result), *_versions()]
    lines = [part for line in lines for part in whole_words(line, 80, 0, 10) or [line]]
    parts: list[RenderableType] = [_prompt_table(result.prompts), Text(), *map(Text, lines)]
    divergence = result.divergence
    if divergence is not None and divergence.first is not None:
        first = next(index for index, place in enumerate(divergence.places) if place.parts)
        rows = []
        for place in divergence.places[max(first - 3, 0) : first + 6]:
            mark = "<- first difference" if place is divergence.first else "differs" if place.parts else "equal"
            rows.append((place.name, scientific(place.relative), scientific(place.noise), mark))
        parts += [Text(), plain_table(*_PLACES, rows=rows)]
    if result.damage is not None:
        parts += [Text(), *map(Text, damage_lines(result.damage))]
    return Group(*parts)


def _prompt_cells(prompt: LogitDifference) -> tuple[str, ...]:
    errors = (prompt.maximum, prompt.mean, prompt.kl)
    return (prompt.name, f"{prompt.positions:,}", *map(scientific, errors), f"{prompt.top1:.1%}")


def _prompt_table(prompts: Sequence[LogitDifference]) -> Grid:
    """Return a table with one row per prompt. Long names of prompts are cut."""
    rows: list[list[str | Text]] = []
    for name, *figures in map(_prompt_cells, prompts):
        name = name if name.isprintable() else repr(name)
        rows.append([Text(name if len(name) <= 30 else name[:29] + "…"), *figures])
    return plain_table(*_PROBE, rows=rows)


def verdict_lines(result: Verification) -> list[str]:
    """Return lines with the verdicts on bytes, logits and mistakes, and with their reasons."""
    lines = [*_bytes_lines(result), *_function_lines(result)]
    score, divergence = result.score, result.divergence
    if result.verdict != "different":
        for limit in result.limited:
            lines += textwrap.wrap(f"LIMITED   not looked at: {limit}", 80, subsequent_indent=" " * 10)
    if score is not None:
        lines += _score_lines(score)
        if score.missed and result.same:
            lines.append("          the models agree, but the probe should have caught more mistakes")
    if result.imprecise is not None:
        lines.append(f"place     {result.imprecise.name}: gptkit computes it less precisely than transformers")
        lines += indented(_same_input(result.imprecise))
    if divergence is not None:
        if divergence.first is not None:
            lines.append(f"place     {divergence.first.name}: the first component that differs")
        for index, cause in enumerate(_cause_words(divergence)):
            lines.append(f"{'' if index else 'cause':<10}{cause}")
        if not divergence.causes and result.verdict == "different":
            lines += textwrap.wrap(f"cause     {_no_cause(divergence)}", 80, subsequent_indent=" " * 10)
    return lines + [f"note: {note}" for note in result.notes]


def _bytes_lines(result: Verification) -> list[str]:
    """Return the lines on the comparison of tensors byte by byte, or an empty list if there was none."""
    if result.bytes is None:
        return []
    different, compared, cast = result.bytes.different, result.bytes.compared, len(result.bytes.cast)
    lines = [f"bytes     {compared - len(different)} of {compared} tensors equal {result.bytes.against}"]
    lines += [f"          {cast} of them in value, stored in another dtype"] if cast else []
    if different and not result.bytes.required:
        lines.append(f"          the architectures differ, so the other {len(different)} may differ too")
    else:
        lines += [f"          differs: {name}" for name in different[:_SHOWN]]
        lines += [f"          … ({len(different) - _SHOWN} more)"] if len(different) > _SHOWN else []
    if result.bytes.alone:
        lines += indented(f"{len(result.bytes.alone)} only on one side: {_some(result.bytes.alone)}")
    return lines


def _function_lines(result: Verification) -> list[str]:
    """Return the lines on the comparison of logits, and on rounding noise if it was measured."""
    reach = "" if result.up_to is None else f" up to {result.up_to:,} tokens"
    where = f"transformers, {result.dtype}, {result.attention} attention"
    where += "" if result.device == "cpu" else f", {result.device}"
    worst = f", max Δ {scientific(max(prompt.maximum for prompt in result.prompts))}"
    reach, worst = {"identical": (reach, ""), "equal": (reach, worst), "different": ("", worst)}[result.verdict]
    lines, noise = [f"function  {_WORDS[result.verdict]}{reach}: {where}{worst}"], result.noise
    if noise is None:
        return lines
    lines.append(f"          {_apart(noise.functions, noise.allowed)}:")
    sides = f"transformers {scientific(noise.reference)}, gptkit {scientific(noise.candidate)}"
    lines.append(f"          float32 against float64: {sides}")
    if noise.paths is not None:
        lines.append(f"          sdpa against eager in float32: transformers {scientific(noise.paths)}")
    return lines + [f"          {_rounds_worse(dtype, noise.errors[dtype])}" for dtype in noise.imprecise]


def _score_lines(score: MistakeScore) -> list[str]:
    """Return the lines on the self-test of `verify`, which makes mistakes in the model on purpose.

    They give the number of mistakes that the prompts reveal, and the names of those that they do not.
    """
    caught = score.tried - len(score.missed)
    lines = [f"probe     {caught} of {score.tried} mistakes made on purpose were caught"]
    for how, names in (("only with", score.caught_random), ("nor with", score.invisible)):
        if names:
            lines += indented(f"not visible on this checkpoint, {how} random weights: {', '.join(names)}")
    return lines + [f"          MISSED: {name}" for name in score.missed]


def _apart(functions: float, allowed: float) -> str:
    return f"in float64 they differ by {scientific(functions)}; rounding explains up to {scientific(allowed)}"


def _rounds_worse(dtype: str, errors: tuple[float, float]) -> str:
    theirs, ours = errors
    return f"{dtype} rounds worse: mean error {scientific(ours)}, transformers' own {scientific(theirs)}"


def _same_input(component: Imprecise) -> str:
    return (
        f"on the same input, its outputs differ by {scientific(component.relative)} of the largest; rounding in "
        f"transformers explains up to {scientific(component.allowed)}"
    )


def _cause_words(divergence: Divergence) -> list[str]:
    return [
        f"{cause.repair} {'restores parity' if cause.restores else f'leaves {scientific(cause.left)}'}"
        for cause in divergence.causes
    ]


def _no_cause(divergence: Divergence) -> str:
    """Say why no cause was found: what was tried, and where to see the list."""
    if divergence.first is None:
        return "not searched for: no component differs by more than rounding"
    if not divergence.undone and not divergence.copied:
        return "not found: none of the known repairs applies"
    undone = counted(len(divergence.undone), "repair of a known mistake", "repairs of known mistakes")
    copied = f" and {counted(len(divergence.copied), 'part')} copied from the reference" if divergence.copied else ""
    return f"not found: gptkit tried {undone}{copied}, one at a time; --json lists them (undone, copied)"


def port_report(result: PortVerification) -> RenderableType:
    """Return the report on a port (a user's own implementation of a model) for the terminal.

    It has a table of prompts, the verdict, and the first component that differs.
    """
    lines = [
        f"function  {_WORDS[result.verdict]}: {result.against} against {result.reference}",
        f"          {_apart(result.functions, result.allowed)}",
    ]
    if result.imprecise:
        lines.append(f"          {_rounds_worse('float32', result.rounding)}")
    if result.score is not None:
        lines += _score_lines(result.score)
    else:
        tokens = sum(prompt.positions for prompt in result.prompts)
        lines.append(f"probe     {counted(len(result.prompts), 'input')} with {tokens:,} tokens")
    if result.first is not None:
        near = result.first.module or "no module has an output of its size"
        lines.append(f"place     {result.first.place.name}")
        lines.append("          the first component that no module of yours computes")
        lines.append(f"          nearest: {near}, off by {scientific(result.first.place.relative)}")
    for cause in port_causes(result):
        first, *rest = indented(cause)
        lines += [f"cause     {first.strip()}", *rest]
    lines += [*(f"note: {note}" for note in result.notes), *_versions()]
    parts: list[RenderableType] = [_prompt_table(result.prompts), Text(), *map(Text, lines)]
    if result.matches:
        start = max(next((i for i, match in enumerate(result.matches) if match.place.parts), 0) - 4, 0)
        shown = result.matches[start : start + 9]
        rows = [(match.place.name, scientific(match.place.relative), Text(match.module or "-")) for match in shown]
        parts += [Text(), plain_table(*_PLACES[:2], ("your module", False), rows=rows)]
    return Group(*parts)


def port_causes(result: PortVerification) -> list[str]:
    """Return lines on the mistakes in a port that would explain its results."""
    if result.functions <= result.allowed:
        return []
    causes = []
    for cause in result.causes:
        which = f"{cause.mistake}, together with {cause.also}" if cause.also else cause.mistake
        mistakes = "these mistakes" if cause.also else "this mistake"
        whole = f"with {mistakes}, the reference gives the same results as your port"
        partly = f"it explains {cause.part}, but the logits still differ by {scientific(cause.left)}: more is wrong"
        causes.append(f"{which}: {whole if cause.explains else partly}")
    pairs = f", and {counted(result.tried.pairs, 'pair')} of them" if result.tried.pairs else ""
    tried = counted(len(result.tried.mistakes), "known mistake")
    return causes or [f"not found: gptkit tried {tried} one at a time{pairs}; --json lists them (tried)"]


# --- pages -----------------------------------------------------------------------------------------------------------


def verification_page(result: Verification) -> Page:
    """Return the HTML page of a verification."""
    from ..parity.card import command

    verdict = _VERDICTS[result.verdict]
    if result.verdict != "different":
        verdict += "" if result.up_to is None else f", up to {result.up_to:,} tokens"
        if result.bytes is not None and not result.bytes.hold:
            verdict += ", but the bytes differ"
        elif not result.passed:
            verdict += ", but not everything was examined" if result.limited else ", but the probe missed mistakes"
    facts = [("computed in", result.dtype), ("attention", result.attention)]
    facts += [] if result.device == "cpu" else [("device", result.place)]
    sections = [
        *([] if result.damage is None else damage_sections(result.damage)),
        *_bytes(result),
        *_rounding(result),
        *_mistakes(result),
        *noted(result.limited, "Not looked at"),
        *noted(result.notes),
    ]
    title = result.other or result.model
    subtitle = f"verified against {result.model if result.other is not None else 'itself'} in transformers"
    return _page(result, title, subtitle, verdict, facts, _place_blocks(result), sections, command(result))


def _page(
    result: Verification | PortVerification,
    title: str,
    subtitle: str,
    verdict: str,
    facts: Sequence[tuple[str, str]],
    places: Sequence[Lines | Figure],
    sections: Sequence[Section],
    command: str,
) -> Page:
    """Return the HTML page of a verified checkpoint or port.

    Args:
        result: the result of the verification.
        title: the page's title.
        subtitle: the line below it.
        verdict: the verdict in one line.
        facts: (name, value) pairs below the verdict.
        places: what the section on components and layers shows.
        sections: further sections.
        command: the command that repeats the verification.
    """
    worst = max(
        (prompt.maximum for prompt in result.prompts), key=lambda value: math.inf if math.isnan(value) else value
    )
    packages = _packages()
    machine = (("Python", platform.python_version()), ("machine", platform.machine()))
    probe = Table("Logits by input", _PROBE, tuple(map(_prompt_cells, result.prompts)))
    words = "Largest and mean absolute difference of logits, KL divergence in nats per token, same likeliest token."
    first = [Section("By component and layer", tuple(places)), Section("Probe", (Lines((words,)), probe))]
    return Page(
        title,
        subtitle,
        verdict,
        result.passed,
        facts=(("largest difference of logits", scientific(worst)), *facts, *packages, *machine),
        sections=(*first, *sections, Section("Repeat it", (Code(command),))),
    )


def port_page(result: PortVerification) -> Page:
    """Return the HTML page of the verification of a port."""
    same = "The functions are the same. Components are compared where they differ."
    blocks: list[Lines | Figure] = [Lines((same if result.functions <= result.allowed else _NOT_COMPARED,))]
    if result.matches:
        words = "The table has the nearest output of your modules for each component of the reference."
        first = result.first
        if first is not None:
            words = f"{first.place.name}: the first component that no module of yours computes. {words}"
        places, modules = [match.place for match in result.matches], [match.module for match in result.matches]
        blocks = [_places_figure(places, None if first is None else first.place, words, modules)]
    causes = port_causes(result)
    if causes:
        words = "Likely causes, from mistakes made on purpose in the reference:"
        blocks = [Lines((words,)), Lines(tuple(causes), listed=True), *blocks]
    facts = [
        ("between the functions, in float64", scientific(result.functions)),
        ("rounding explains up to", scientific(result.allowed)),
        ("mean error in float32: transformers, the port", " and ".join(map(scientific, result.rounding))),
    ]
    subtitle = f"a port, verified against {result.model} in {result.reference}"
    notes = noted([f"{note}." for note in result.notes])
    command = shlex.join(["gptkit", "verify", result.model, "--against", result.against])
    return _page(result, result.against, subtitle, _VERDICTS[result.verdict], facts, blocks, notes, command)


def _place_blocks(result: Verification) -> tuple[Lines | Figure, ...]:
    divergence = result.divergence
    if divergence is None or not divergence.places:
        return (Lines((_NOT_COMPARED,)),)
    places, first = divergence.places, divergence.first
    worst = max(places, key=lambda place: place.relative)
    zero, many = sum(place.relative == 0 for place in places), counted(len(places), "place")
    summary = f"The difference is exactly 0 at all {many}."
    if worst.relative != 0:
        largest = f"The largest difference is {_figure(worst.relative)}, at {worst.name}"
        summary = f"{largest}; at {zero} of {many} it is exactly 0. {_RELATIVE}"
    if first is not None:
        where = f"{first.name}: the first component that differs by more than rounding."
    elif zero == len(places):
        where = "Every component gives the same numbers to the last bit, in float64 too."
    elif result.verdict == "identical":
        where = "Every logit has the same bits. Components are compared in float64: what differs there is rounding."
    else:
        where = "No component differs by more than rounding."
    causes = tuple(_cause_words(divergence))
    missing = result.verdict == "different" and not causes and first is not None
    none = [f"The cause was {_no_cause(divergence)}."] if missing else []
    listed = (Lines(("Likely causes, from trying repairs:",)), Lines(causes, listed=True)) if causes else ()
    return (Lines((where, *none)), *listed, _places_figure(places, first, summary))


def _places_figure(
    places: Sequence[Part], first: Part | None, summary: str, modules: Sequence[str | None] | None = None
) -> Figure:
    """Draw a heatmap of the differences by component and layer.

    Args:
        places: the components, with their differences.
        first: the first component that differs by more than rounding, if there is one.
        summary: a description of the figure.
        modules: for a port, the user's module that is nearest to every component. Hover texts and the table name it.
    """
    cells, rows = [], []
    first_index = next((index for index, place in enumerate(places) if place.parts), None)
    for index, place in enumerate(places):
        mark = "more than rounding explains" if place.parts else "equal" if place.relative == 0 else "within rounding"
        lines = [f"relative difference: {_figure(place.relative)}", f"rounding there: {_figure(place.noise)}", mark]
        mark = "first difference" if index == first_index else "differs" if place.parts else mark
        row = [place.name, _figure(place.relative), _figure(place.noise), mark]
        if modules is not None:
            lines.append(f"your module: {modules[index] or 'none has an output of its size'}")
            row.append(modules[index] or "-")
        cells.append(Cell(place.label, place.layer, place.relative, tuple(lines), place.parts))
        rows.append(tuple(row))
    columns = (*_PLACES, *([] if modules is None else [("your module", False)]))
    lit = frozenset() if first_index is None else frozenset([first_index])
    caption = f"{counted(len(rows), 'place')} as a table"
    return heatmap(
        cells,
        title="Difference by component and layer",
        summary=summary,
        measure="relative difference",
        table=Table(caption, columns, tuple(rows), lit, folded=True, bold="the first that differs"),
        marked=next((cell for cell, place in zip(cells, places, strict=True) if place is first), None),
    )


def _figure(value: float) -> str:
    return scientific(value) if math.isfinite(value) else "not a number"


def _bytes(result: Verification) -> Iterator[Section]:
    verdict = result.bytes
    if verdict is None:
        return
    different = verdict.different
    line = f"{verdict.compared - len(different):,} of {counted(verdict.compared, 'tensor')} equal {verdict.against}."
    if verdict.cast:
        line += f" {len(verdict.cast):,} of them in value: they are stored in another dtype."
    if verdict.alone:
        line += f" {counted(len(verdict.alone), 'tensor')} only on one side: {_some(verdict.alone)}."
    if different and not verdict.required:
        line += " The architectures differ, so tensors may differ too. The function was compared."
    caption = f"{counted(len(different), 'tensor')} that differ{'s' if len(different) == 1 else ''}"
    rows = tuple((name,) for name in different)
    names = [Table(caption, ((caption, False),), rows, folded=True)] if different else []
    yield Section("Bytes", (Lines((line,)), *names))


def _rounding(result: Verification) -> Iterator[Section]:
    noise = result.noise
    if noise is None:
        return
    errors = {
        "the two functions against each other, in float64": noise.functions,
        "rounding explains up to": noise.allowed,
        "transformers: float32 against float64": noise.reference,
        "gptkit: float32 against float64": noise.candidate,
        **({} if noise.paths is None else {"transformers: sdpa against eager, in float32": noise.paths}),
    }
    for dtype, (theirs, ours) in noise.errors.items():
        worse = " (rounds worse)" if dtype in noise.imprecise else ""
        errors |= {f"mean error in {dtype}: transformers": theirs, f"mean error in {dtype}: gptkit{worse}": ours}
    rows = tuple((what, scientific(error)) for what, error in errors.items())
    columns = (("of logits", False), ("max Δ", True))
    table = Table("Differences of logits that rounding makes", columns, rows)
    if result.imprecise is None:
        yield Section("Rounding", (table,))
        return
    name = result.imprecise.name
    words = f"gptkit computes the component {name} less precisely than transformers: {_same_input(result.imprecise)}."
    yield Section("Rounding", (Lines((words,)), table))


def _mistakes(result: Verification) -> Iterator[Section]:
    score = result.score
    if score is None:
        return
    caught = score.tried - len(score.missed)
    words = f"{caught} of {score.tried} mistakes made on purpose were caught by this probe."
    kinds = {
        "caught": score.caught,
        "not visible on this checkpoint, caught with random weights": score.caught_random,
        "not visible on this checkpoint, nor with random weights": score.invisible,
        "MISSED": score.missed,
    }
    rows = tuple((name, what) for what, names in kinds.items() for name in names)
    lit = frozenset(range(len(rows) - len(score.missed), len(rows)))
    table = Table("The mistakes", (("mistake", False), ("", False)), rows, lit, folded=not lit, bold="not caught")
    yield Section("Mistakes made on purpose", (Lines((words,)), table))
