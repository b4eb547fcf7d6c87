"""What the commands say about what they did, as rich renderables or plain lines; 80 columns are enough for all."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.parameters import count, describe
from ..components import ModelSpec

if TYPE_CHECKING:
    from ..analysis.params import ModelCount
    from ..converter.checkpoint import Checkpoint
    from ..converter.convert import Conversion
    from ..converter.transfer import Transferred
    from ..parity.bisect import Divergence
    from ..parity.compare import Difference
    from ..parity.damage import Damage
    from ..parity.port import PortVerification
    from ..parity.verify import Verification
    from ..surgery.swap import SwapResult

__all__ = [
    "conversion_lines",
    "damage_lines",
    "damage_or_change",
    "human_bytes",
    "load_json",
    "load_summary",
    "port_causes",
    "port_report",
    "source_lines",
    "swap_lines",
    "verification_report",
]


def human_bytes(nbytes: float) -> str:
    """1,234 bytes, 1.2 MB, 16.4 GB: decimal units, as disks are sold and the hub counts."""
    if nbytes < 10_000:
        return f"{nbytes:,.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:,.1f} {unit}"
    raise AssertionError


def plain_table(*columns: tuple[str, bool]) -> Table:
    """A table of (heading, whether it holds figures) columns without frames, as all of ours; of no heading, none."""
    header = any(heading for heading, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold", show_header=header)
    for heading, figures in columns:
        table.add_column(heading, justify="right" if figures else "left", no_wrap=figures)
    return table


def facts_report(title: str, facts: Iterable[tuple[str, str]], notes: Iterable[str]) -> RenderableType:
    """What is known of a model, a row a fact, and notes below."""
    table = plain_table(("", False), ("", False))
    for fact in facts:
        table.add_row(*fact)
    return Group(Text(title, style="bold"), table, *(Text(f"note: {note}") for note in notes))


def component_facts(spec: ModelSpec) -> list[tuple[str, str]]:
    """What a tree is in words, without what it has not."""
    return [(aspect, words) for aspect, words in describe(spec).items() if words not in ("none", "")]


def load_summary(checkpoint: Checkpoint) -> RenderableType:
    """Family, components, dtypes, files, and anything unexpected."""
    spec, files, history = checkpoint.spec, checkpoint.files, checkpoint.origin.history
    stored = sorted({checkpoint.stored_of(leaf)[0] for leaf in checkpoint.leaves})
    total = sum(path.stat().st_size for path in files)
    where = f"{len(files)} file{'s' if len(files) > 1 else ''}, {human_bytes(total)}"
    facts = [
        ("family", f"{checkpoint.origin.family or 'none'} ({checkpoint.format} format)"),
        *([("revision", checkpoint.revision)] if checkpoint.revision else []),
        ("parameters", f"{count(spec).total:,}"),
        ("stored as", f"{', '.join(stored)}, {len(checkpoint.leaves)} tensors in {where}"),
        *component_facts(spec),
        *(("history", ", ".join(f"{key} {value}" for key, value in each.items())) for each in history),
    ]
    return facts_report(str(checkpoint.reference), facts, checkpoint.notes)


def load_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `load_summary` says, for programs."""
    return {
        "schema_version": 1,
        "model": checkpoint.reference,
        "family": checkpoint.origin.family,
        "format": checkpoint.format,
        "revision": checkpoint.revision,
        "parameters": count(checkpoint.spec).total,
        "dtype": checkpoint.dtype,
        "tensors": len(checkpoint.leaves),
        "files": [path.name for path in checkpoint.files],
        "components": describe(checkpoint.spec),
        "history": list(checkpoint.origin.history),
        "notes": checkpoint.notes,
    }


def conversion_lines(conversion: Conversion) -> list[str]:
    """What was written, or would be."""
    source, plan, done_with = conversion.source, conversion.plan, conversion.transferred
    done = "wrote" if conversion.published else "would write"
    lines = [
        f"{done} {conversion.target}: {source.origin.family or 'a tree'} as {conversion.to}, {plan.tensors} tensors in "
        f"{len(plan.shards)} file{'s' if len(plan.shards) > 1 else ''}, {human_bytes(plan.nbytes)}"
    ]
    if source.revision is not None:
        lines.append(f"  from {source.reference} at commit {source.revision}")
    if done_with is None:
        sizes = [(shard.name, shard.size, f", {len(shard.outputs)} tensors") for shard in plan.shards]
        sizes += [(name, len(text), "") for name, text in plan.texts.items()]
        sizes += [(path.name, path.stat().st_size, "") for path in plan.companions]
        lines += [f"  {name}  {human_bytes(nbytes)}{more}" for name, nbytes, more in sizes]
        alone = [shard.name for shard in plan.shards] == [conversion.target.name]
        lines.append(f"  disk: {human_bytes(plan.nbytes)}{'' if alone else ', and a manifest'}")
        lines.append(
            f"  memory: {human_bytes(conversion.memory)} of tensors; the largest has {human_bytes(plan.largest)}"
        )
    else:
        quantised = Counter(o.dtype for shard in plan.shards for o in shard.outputs if o.encode is not None)
        for dtype, number_of in quantised.items():
            lines.append(f"{number_of} of {plan.tensors} tensors are quantised to {dtype}")
        lines += quantisation_lines(done_with)
        lines += transfer_lines(done_with)
    return lines + [f"note: {note}" for note in source.notes]


def quantisation_lines(done: Transferred) -> list[str]:
    """What quantising cost, as far as this run did it."""
    from ..converter.dtypes import Quantisation  # here, because it imports numpy

    if not done.quantised:
        return []
    loss = sum(done.quantised.values(), Quantisation())
    return [f"  off by {number(loss.largest)} at most, with a relative RMS error of {number(loss.relative)}"]


def source_lines(counts: Sequence[ModelCount]) -> list[str]:
    """Where counted models came from, what their files hold, and what else there is to know."""
    lines = []
    for each in counts:
        name = f"{each.name}: " if len(counts) > 1 else ""
        if each.revision is not None:
            lines.append(f"{name}at commit {each.revision}")
        if each.stored is not None:
            files = f"{len(each.stored.files)} file{'s' if len(each.stored.files) > 1 else ''}"
            kinds = ", ".join(
                f"{dtype} {human_bytes(nbytes)} in {tensors} tensor{'s' if tensors > 1 else ''}"
                for dtype, (tensors, _, nbytes) in each.stored.by_dtype().items()
            )
            lines.append(f"{name}stored as {kinds}, {files}")
        lines += [f"note: {name}{note}" for note in each.notes]
    return lines


def transfer_lines(done: Transferred) -> list[str]:
    """What a person should know of how the tensors went over."""
    from ..converter.dtypes import Rounding  # here, because it imports numpy

    lines = []
    if done.resumed:
        lines.append(f"resumed: {human_bytes(done.resumed)} were there from an earlier run, and are unchanged")
    if done.rounded:
        cost = sum(done.rounded.values(), Rounding())
        tensors = f"{len(done.rounded)} {'other ' if done.quantised else ''}tensors"
        zeroed = f", {cost.zeroed:,} of them to zero" if cost.zeroed else ""
        lines.append(
            f"rounded {cost.changed:,} values of {tensors}{zeroed}, by {cost.relative:.1e} of their size at most"
        )
    for name, count_of in list(done.not_finite.items())[:SHOWN]:
        lines.append(f"warning: {name} holds {count_of:,} values that are NaN or infinite, copied as they are")
    if len(done.not_finite) > SHOWN:
        lines.append(f"warning: … and {len(done.not_finite) - SHOWN} more tensors")
    return lines


SHOWN = 5
"""Tensors named, of however many."""


def some(names: Sequence[str]) -> str:
    """Tensors by name, at most so many, those of all layers together."""
    names = list(dict.fromkeys(re.sub(r"\bblocks\.\d+\.", "blocks.*.", name) for name in names))
    return ", ".join(names[:SHOWN]) + (f", … ({len(names) - SHOWN} more)" if len(names) > SHOWN else "")


def number(value: float) -> str:
    """An error: 0 where it is 0 to the last bit, else two digits."""
    return "0" if value == 0 else f"{value:.1e}"


def verification_report(result: Verification) -> RenderableType:
    """A row a prompt, then the two verdicts."""
    parts: list[RenderableType] = [
        prompt_table(result.prompts),
        Text(),
        *(Text(part) for line in verdict_lines(result) for part in under_its_label(line)),
    ]
    if result.divergence is not None and result.divergence.first is not None:
        parts += [Text(), divergence_table(result.divergence)]
    if result.damage is not None:
        parts += [Text(), *(Text(line) for line in damage_lines(result.damage))]
    return Group(*parts)


def under_its_label(line: str) -> list[str]:
    """A line of `verdict_lines` in as many as 80 columns need, set in below its words."""
    kept = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, 80, subsequent_indent=" " * 10, **kept) or [line]  # type: ignore[arg-type]


PROBE = (("probe", False), ("tokens", True), ("max Δ", True), ("mean Δ", True), ("KL", True), ("top-1", True))
"""Columns of a row a prompt: how far the logits are apart."""


def prompt_cells(prompt: Difference) -> tuple[str, ...]:
    """The cells below `PROBE`."""
    errors = (prompt.maximum, prompt.mean, prompt.kl)
    return (prompt.name, f"{prompt.positions:,}", *map(number, errors), f"{prompt.top1:.1%}")


def prompt_table(prompts: Sequence[Difference]) -> Table:
    """A row a prompt, of long names the beginning."""
    table = plain_table(*PROBE)
    for name, *figures in map(prompt_cells, prompts):
        name = name if name.isprintable() else repr(name)
        table.add_row(Text(name if len(name) <= 30 else name[:29] + "…"), *figures)
    return table


def port_report(result: PortVerification) -> RenderableType:
    """A port's verdict: a row a prompt, then where it leaves the reference."""
    words = {"identical": "identical to the last bit", "equal": "the same", "different": "DIFFERENT"}
    lines = [
        f"function  {words[result.verdict]}: {result.against} against transformers",
        f"          in float64 they differ by {number(result.functions)}; rounding explains up to"
        f" {number(result.allowed)}",
    ]
    if result.imprecise:
        theirs, ours = result.rounding
        lines.append(f"          float32 rounds worse: mean error {number(ours)}, transformers' own {number(theirs)}")
    if result.first is not None:
        near = result.first.module or "no module has an output of its size"
        lines.append(f"place     {result.first.place.name}")
        lines.append("          the first component that no module of yours computes")
        lines.append(f"          nearest: {near}, off by {number(result.first.place.relative)}")
    for made in port_causes(result):
        told = wrap(made, indent=10, width=80)
        lines += [f"cause     {told[0].strip()}", *told[1:]]
    lines += [f"note: {note}" for note in result.notes]
    table = plain_table(("component", False), ("relative Δ", True), ("your module", False))
    start = max(next((i for i, m in enumerate(result.matches) if m.place.parts), 0) - 4, 0)
    for match in result.matches[start : start + 9]:
        table.add_row(match.place.name, number(match.place.relative), Text(match.module or "-"))
    tail: list[RenderableType] = [Text(), table] if result.matches else []
    return Group(prompt_table(result.prompts), Text(), *(Text(line) for line in lines), *tail)


def port_causes(result: PortVerification) -> list[str]:
    """The mistakes that explain what a port computes, in words."""
    if result.functions <= result.allowed:
        return []
    told = [
        f"{made.mistake}: the reference with this mistake computes what yours does"
        if made.explains
        else f"{made.mistake}: it explains this place, and logits still differ by {number(made.left)}: more is wrong"
        for made in result.causes
    ]
    return told or ["not found among the mistakes tried"]


def divergence_table(divergence: Divergence) -> Table:
    """The components around the first that parts, in the order of computation."""
    table = plain_table(("component", False), ("relative Δ", True), ("rounding there", True), ("", False))
    first = next(index for index, place in enumerate(divergence.places) if place.parts)
    for place in divergence.places[max(first - 3, 0) : first + 6]:
        mark = "<- parts here" if place is divergence.first else "differs" if place.parts else "equal"
        table.add_row(place.name, number(place.relative), number(place.noise), mark)
    return table


def verdict_lines(result: Verification) -> list[str]:
    """The verdicts in words."""
    lines = []
    if result.bytes is not None:
        bad, compared, cast = result.bytes.different, result.bytes.compared, len(result.bytes.cast)
        lines.append(f"bytes     {compared - len(bad)} of {compared} tensors equal {result.bytes.against}")
        lines += [f"          {cast} of them in value, stored in another dtype"] if cast else []
        if bad and not result.bytes.required:
            lines.append(f"          the trees differ, and so may the other {len(bad)}")
        else:
            lines += [f"          differs: {name}" for name in bad[:SHOWN]]
            lines += [f"          … ({len(bad) - SHOWN} more)"] if len(bad) > SHOWN else []
        if result.bytes.alone:
            told = f"{len(result.bytes.alone)} on one side alone: {some(result.bytes.alone)}"
            lines += wrap(told, indent=10, width=80)
    reach = "" if result.up_to is None else f" up to {result.up_to:,} tokens"
    where = f"transformers, {result.dtype}, {result.attention} attention"
    if result.verdict == "identical":
        lines.append(f"function  identical to the last bit{reach}: {where}")
    else:
        verb = "the same" if result.verdict == "equal" else "DIFFERENT"
        worst = max(prompt.maximum for prompt in result.prompts)
        lines.append(f"function  {verb}{reach if verb == 'the same' else ''}: {where}, max Δ {number(worst)}")
    if result.noise is not None:
        noise = result.noise
        lines.append(
            f"          in float64 they differ by {number(noise.functions)}; rounding explains up to"
            f" {number(noise.allowed)}:"
        )
        sides = f"transformers {number(noise.reference)}, gptkit {number(noise.candidate)}"
        lines.append(f"          float32 against float64: {sides}")
        if noise.paths is not None:
            lines.append(f"          sdpa against eager in float32: transformers {number(noise.paths)}")
        for dtype in noise.imprecise:
            theirs, ours = noise.errors[dtype]
            lines.append(
                f"          {dtype} rounds worse: mean error {number(ours)}, transformers' own {number(theirs)}"
            )
    if result.verdict != "different":
        for each in result.limited:
            lines += textwrap.wrap(f"LIMITED   not looked at: {each}", 80, subsequent_indent=" " * 10)
    marks = result.score
    if marks is not None:
        seen = marks.tried - len(marks.missed)
        lines.append(f"probe     {seen} of {marks.tried} mistakes made on purpose were caught")
        for how, names in (("only with", marks.caught_random), ("nor with", marks.invisible)):
            if names:
                told = f"not visible on this checkpoint, {how} random weights: {', '.join(names)}"
                lines += wrap(told, indent=10, width=80)
        lines += [f"          MISSED: {name}" for name in marks.missed]
        if marks.missed and result.same:
            lines.append("          the models are the same as far as the probe tells: it should tell more")
    if result.divergence is not None:
        first = result.divergence.first
        if first is not None:
            lines.append(f"place     {first.name}: the first component that differs")
        causes = result.divergence.causes
        for number_of, cause in enumerate(causes):
            verb = "restores parity" if cause.restores else f"leaves {number(cause.left)}"
            lines.append(f"{'cause     ' if number_of == 0 else '          '}{cause.repair} {verb}")
        if not causes and result.verdict == "different":
            lines.append("cause     not found among the repairs tried")
    return lines + [f"note: {note}" for note in result.notes]


def swap_in_words(guarantee: str) -> str:
    return "a swap that needs training" if guarantee == "retrained" else f"{guarantee} swap"


def swap_lines(result: SwapResult) -> list[str]:
    """What was exchanged, at what price, and how well the guarantee held."""
    before, after = result.parameters
    done = "wrote" if result.published else "would write"
    lines = [
        f"{done} {result.target}: {swap_in_words(result.guarantee)}{rounding_in_words(result)}",
        *stored_lines(result),
        f"parameters  {before:,} -> {after:,}" + (f" ({after - before:+,})" if after != before else ""),
    ]
    if result.recipe is not None and result.recipe.name:
        lines.insert(1, f"recipe      {result.recipe.name}")
    if result.family is not None:
        lines.insert(1, f"format      Hugging Face files, {result.family.name}: {result.family.hf_class}")
    notes = list(result.chain.notes)
    if result.same_source is False:
        notes.append("the recipe was made of other files than these: the result has other bytes")
    for note in notes:
        lines += wrap(note, indent=12, width=80)
    found = result.measured
    if found is None:
        return [*lines, "not measured"] if result.published else lines
    for dtype in found.maximum:
        lines.append(
            f"{dtype:<12}logits before against after: max Δ {number(found.maximum[dtype])}, relative"
            f" {number(found.relative[dtype])}"
        )
    lines.append(
        f"            KL {number(found.kl)} nats per token, top-1 {found.top1:.1%}, {found.positions:,} positions"
    )
    if found.perplexity is not None and found.kl_text is not None and found.top1_text is not None:
        lines.append(
            f"text        perplexity {short(found.perplexity[0])} -> {short(found.perplexity[1])}, KL"
            f" {number(found.kl_text)}, top-1 {found.top1_text:.1%}, {found.text_positions:,} tokens"
        )
    naive = result.naive
    if naive is not None and naive.perplexity is not None and naive.kl_text is not None:
        lines.append(
            f"plain form  perplexity {short(naive.perplexity[1])}, KL {number(naive.kl_text)}: the same, not fitted"
        )
    for note in found.notes:
        lines += wrap(note, indent=12, width=80)
    return lines


def rounding_in_words(result: SwapResult) -> str:
    """What storing does to an exact swap: nothing, or it rounds the tensors that were computed."""
    computed = any(result.chain.computed(parameter.name) for parameter in result.spec.parameters())
    rounds = result.guarantee == "exact" and computed and result.dtype not in ("float64", "float32")
    return f", up to the rounding to {result.dtype}" if rounds else ""


def stored_lines(result: SwapResult) -> list[str]:
    """What computed tensors are stored as, and why."""
    asked = None if result.recipe is None else result.recipe.dtype
    exact, whole = result.guarantee == "exact", asked is not None and result.family is not None
    computed = any(result.chain.computed(parameter.name) for parameter in result.spec.parameters())
    if not whole and not computed:
        return []
    if asked is None and exact and result.dtype == "float64":
        return ["stored as   float64 where computed, so that the file itself proves exactness"]
    before = "; exact before rounding" if computed and exact and result.dtype != "float64" else ""
    why = "as the source is" if asked is None else "as asked"
    return [f"stored as   {result.dtype}{'' if whole else ' where computed'}, {why}{before}"]


def short(perplexity: float) -> str:
    """Two decimals of what has few digits before them."""
    if perplexity >= 1e7:
        return number(perplexity)
    return f"{perplexity:,.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def wrap(text: str, indent: int, width: int) -> list[str]:
    """A sentence in lines of up to `width` characters, each behind `indent` spaces."""
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def damage_or_change(found: Damage) -> str:
    """What a difference is called: damage where the perplexity of a text became worse, else a change."""
    before, after = found.total.before, found.total.after
    worse = before is not None and after is not None and not after <= before * (1 + ALIKE)
    return "damage" if worse else "change"


ALIKE = 1e-6
"""Relative difference of perplexities up to which neither is the worse one."""


def damage_lines(found: Damage) -> list[str]:
    """The difference in words: all of it, the worst positions and layers, and where it is born."""
    total = found.total
    lines = [
        f"{damage_or_change(found):<10}KL {number(total.kl)} nats per token, top-1 {total.top1:.1%}",
        f"          on {found.on}, in {found.dtype}",
    ]
    if total.before is not None and total.after is not None:
        lines.append(f"          perplexity {_perplexity(total.before)} -> {_perplexity(total.after)}")
    if len(found.bins) > 1:
        worst, best = (order(found.bins, key=lambda each: each.kl) for order in (max, min))
        lines.append(f"position  KL {number(worst.kl)} at {worst.name}, the worst")
        lines.append(f"          KL {number(best.kl)} at {best.name}, the best")
    if found.layers:
        lines.append("layer     KL if both models ended there, and how far residual streams differ:")
        worst_layers = sorted(found.layers, key=lambda each: -each.kl)[:LAYERS]
        for layer in sorted(worst_layers, key=lambda each: each.after):
            apart = "" if layer.stream is None else f", streams by {number(layer.stream)}"
            lines.append(f"          layer {layer.after}: KL {number(layer.kl)}{apart}")
        if len(found.layers) > LAYERS:
            lines.append(f"          (the worst {LAYERS} of {len(found.layers)})")
    first, most = found.first, found.born
    if first is not None:
        lines.append(f"begins    {first.name}: the first that differs by itself, by {number(first.relative)}")
        if most is not None and most is not first:
            lines.append(f"          {most.name}: differs most by itself, by {number(most.relative)}")
    elif found.places:
        lines.append("begins    nowhere: no component differs by itself by more than rounding")
    return lines + [line for note in found.notes for line in wrap(f"note: {note}", indent=0, width=80)]


LAYERS = 3
"""Layers named, of however many."""


def _perplexity(value: float) -> str:
    return f"{value:,.4g}" if value < 1e6 else f"{value:.1e}"
