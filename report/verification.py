"""The pages of `verify --html`: what was compared, what came of it, and where in the tree it lies."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from .damage import damage_sections
from .heatmap import Cell, heatmap
from .pages import Code, Figure, Lines, Page, Section, Table, counted, listing, noted
from .summaries import PROBE, number, port_causes, prompt_cells, some

if TYPE_CHECKING:
    from ..parity.bisect import Divergence, Part
    from ..parity.compare import Difference
    from ..parity.port import PortVerification
    from ..parity.score import Score
    from ..parity.stored import BytesVerdict
    from ..parity.verify import Noise, Verification

__all__ = ["port_page", "verification_page"]

VERDICTS = {
    "identical": "Identical to the last bit",
    "equal": "The same function: what differs is rounding",
    "different": "Different",
}
MEASURE = "relative difference"
RELATIVE = "Relative: the largest difference over the reference's largest value there, in float64 on the whole probe."


def verification_page(result: Verification) -> Page:
    """The page of a verification."""
    from ..parity.card import command

    verdict = VERDICTS[result.verdict]
    if result.verdict != "different":
        verdict += "" if result.up_to is None else f", up to {result.up_to:,} tokens"
        if result.bytes is not None and not result.bytes.hold:
            verdict += ", but the bytes differ"
        elif not result.passed:
            verdict += ", but not all was looked at" if result.limited else ", but the probe missed mistakes"
    sections = [Section("By component and layer", _place_blocks(result)), _probe(result.prompts)]
    if result.damage is not None:
        sections += damage_sections(result.damage)
    if result.bytes is not None:
        sections.append(_bytes(result.bytes))
    if result.noise is not None:
        sections.append(_rounding(result.noise))
    if result.score is not None:
        sections.append(_mistakes(result.score))
    sections += [*noted(result.limited, "Not looked at"), *noted(result.notes)]
    return Page(
        title=result.other or result.model,
        subtitle=f"verified against {result.model if result.other is not None else 'itself'} in transformers",
        verdict=verdict,
        good=result.passed,
        facts=(
            ("largest difference of logits", number(_worst(result.prompts))),
            ("computed in", result.dtype),
            ("attention", result.attention),
            *_versions(),
        ),
        sections=(*sections, Section("Repeat it", (Code(command(result)),))),
    )


def port_page(result: PortVerification) -> Page:
    """The page of a port's verification."""
    blocks: tuple[Lines | Figure, ...] = (
        Lines(("The functions are the same. Components are laid side by side where they differ.",)),
    )
    if result.matches:
        cells = [
            _cell(match.place, f"your module: {match.module or 'none has an output of its size'}")
            for match in result.matches
        ]
        first = result.first
        words = "Each component of the reference beside the nearest output of your modules."
        if first is not None:
            words = f"{first.place.name}: the first component that no module of yours computes. {words}"
        blocks = (
            heatmap(
                cells,
                title="Difference by component and layer",
                summary=words,
                measure=MEASURE,
                table=_places_table(
                    [match.place for match in result.matches], [match.module or "-" for match in result.matches]
                ),
                marked=None if first is None else cells[result.matches.index(first)],
            ),
        )
    causes = port_causes(result)
    if causes:
        blocks = (
            Lines(("Causes, found by making mistakes in the reference:",)),
            Lines(tuple(causes), listed=True),
            *blocks,
        )
    return Page(
        title=result.against,
        subtitle=f"a port, verified against {result.model} in transformers",
        verdict=VERDICTS[result.verdict],
        good=result.passed,
        facts=(
            ("largest difference of logits", number(_worst(result.prompts))),
            ("between the functions, in float64", number(result.functions)),
            ("rounding explains up to", number(result.allowed)),
            ("mean error in float32: transformers, the port", " and ".join(map(number, result.rounding))),
            *_versions(),
        ),
        sections=(
            Section("By component and layer", blocks),
            _probe(result.prompts),
            *noted([f"{note}." for note in result.notes]),
            Section("Repeat it", (Code(shlex.join(["gptkit", "verify", result.model, "--against", result.against])),)),
        ),
    )


def _worst(prompts: Sequence[Difference]) -> float:
    return max((prompt.maximum for prompt in prompts), key=lambda value: math.inf if math.isnan(value) else value)


def _versions() -> tuple[tuple[str, str], ...]:
    packages = [(name, version(name)) for name in ("transformers", "torch")]
    return (*packages, ("Python", platform.python_version()), ("machine", platform.machine()))


def _place_blocks(result: Verification) -> tuple[Lines | Figure, ...]:
    """The place, the causes, and the figure."""
    divergence = result.divergence
    if divergence is None or not divergence.places:
        return (Lines(("The components were not laid side by side; the notes say why.",)),)
    lines = [_place_words(result, divergence)]
    if result.verdict == "different" and not divergence.causes:
        lines.append("No cause was found among the repairs tried.")
    causes = [
        f"{cause.repair} {'restores parity' if cause.restores else f'leaves {number(cause.left)}'}"
        for cause in divergence.causes
    ]
    listed = (Lines(("Likely causes, found by trying repairs:",)), Lines(tuple(causes), listed=True)) if causes else ()
    return (Lines(tuple(lines)), *listed, _divergence_figure(divergence))


def _place_words(result: Verification, divergence: Divergence) -> str:
    if divergence.first is not None:
        return f"{divergence.first.name}: the first component that differs by more than rounding."
    if all(place.relative == 0 for place in divergence.places):
        return "Every component gives the same numbers to the last bit, in float64 too."
    if result.verdict == "identical":
        return "Every logit has the same bits. Components are compared in float64: what differs there is rounding."
    return "No component differs by more than rounding."


def _divergence_figure(divergence: Divergence) -> Figure:
    cells = [_cell(place) for place in divergence.places]
    worst = max(divergence.places, key=lambda place: place.relative)
    zero = sum(place.relative == 0 for place in divergence.places)
    if worst.relative == 0:
        summary = f"The difference is exactly 0 at all {counted(len(cells), 'place')}."
    else:
        largest = f"The largest difference is {_figure(worst.relative)}, at {worst.name}"
        summary = f"{largest}; at {zero} of {counted(len(cells), 'place')} it is exactly 0. {RELATIVE}"
    return heatmap(
        cells,
        title="Difference by component and layer",
        summary=summary,
        measure=MEASURE,
        table=_places_table(divergence.places),
        marked=next((cells[i] for i, place in enumerate(divergence.places) if place is divergence.first), None),
    )


def _figure(value: float) -> str:
    return number(value) if math.isfinite(value) else "not a number"


def _cell(place: Part, *more: str) -> Cell:
    told = (
        f"relative difference: {_figure(place.relative)}",
        f"rounding there: {_figure(place.noise)}",
        "more than rounding explains" if place.parts else "equal" if place.relative == 0 else "within rounding",
        *more,
    )
    return Cell(place.label, place.layer, place.relative, told, place.parts)


def _places_table(places: Sequence[Part], modules: Sequence[str] | None = None) -> Table:
    first = next((index for index, place in enumerate(places) if place.parts), None)
    rows = []
    for index, place in enumerate(places):
        mark = "parts here" if index == first else "differs" if place.parts else "equal" if not place.relative else ""
        row = (place.name, _figure(place.relative), _figure(place.noise), mark or "within rounding")
        rows.append(row if modules is None else (*row, modules[index]))
    columns = [("component", False), ("relative Δ", True), ("rounding there", True), ("", False)]
    columns += [] if modules is None else [("your module", False)]
    lit = frozenset() if first is None else frozenset([first])
    return Table(
        f"{counted(len(rows), 'place')} as a table",
        tuple(columns),
        tuple(rows),
        lit,
        folded=True,
        bold="the first that parts",
    )


def _probe(prompts: Sequence[Difference]) -> Section:
    table = Table("Logits by input", PROBE, tuple(map(prompt_cells, prompts)))
    words = "Largest and mean absolute difference of logits, KL divergence in nats per token, same likeliest token."
    return Section("Probe", (Lines((words,)), table))


def _bytes(verdict: BytesVerdict) -> Section:
    bad = verdict.different
    line = f"{verdict.compared - len(bad):,} of {counted(verdict.compared, 'tensor')} equal {verdict.against}."
    if verdict.cast:
        line += f" {len(verdict.cast):,} of them in value: they are stored in another dtype."
    if verdict.alone:
        line += f" {counted(len(verdict.alone), 'tensor')} on one side alone: {some(verdict.alone)}."
    if bad and not verdict.required:
        line += " The trees differ, and so may tensors: the function holds them."
    names = (listing(bad, f"{counted(len(bad), 'tensor')} that differ{'s' if len(bad) == 1 else ''}"),) if bad else ()
    return Section("Bytes", (Lines((line,)), *names))


def _rounding(noise: Noise) -> Section:
    rows = [
        ("the two functions against each other, in float64", number(noise.functions)),
        ("rounding explains up to", number(noise.allowed)),
        ("transformers: float32 against float64", number(noise.reference)),
        ("gptkit: float32 against float64", number(noise.candidate)),
    ]
    if noise.paths is not None:
        rows.append(("transformers: sdpa against eager, in float32", number(noise.paths)))
    for dtype, (theirs, ours) in noise.errors.items():
        worse = " (rounds worse)" if dtype in noise.imprecise else ""
        rows.append((f"mean error in {dtype}: transformers", number(theirs)))
        rows.append((f"mean error in {dtype}: gptkit{worse}", number(ours)))
    table = Table("Differences of logits that rounding makes", (("of logits", False), ("max Δ", True)), tuple(rows))
    return Section("Rounding", (table,))


def _mistakes(score: Score) -> Section:
    seen = score.tried - len(score.missed)
    words = f"{seen} of {score.tried} mistakes made on purpose were caught by this probe."
    rows = [(name, "caught") for name in score.caught]
    rows += [(name, "not visible on this checkpoint, caught with random weights") for name in score.caught_random]
    rows += [(name, "not visible on this checkpoint, nor with random weights") for name in score.invisible]
    rows += [(name, "MISSED") for name in score.missed]
    lit = frozenset(index for index, (_, what) in enumerate(rows) if what == "MISSED")
    table = Table(
        "The mistakes", (("mistake", False), ("", False)), tuple(rows), lit, folded=not lit, bold="not caught"
    )
    return Section("Mistakes made on purpose", (Lines((words,)), table))
