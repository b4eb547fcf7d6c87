"""Compare gptkit with transformers on randomised models of every variant, and write docs/parity.md and its details.

    make parity

A case is one call: lengths 1, 7, 64 and 200 (longer than every window and original context of the variants), batches of
1 and 3, no, left and right padding (real tokens are compared), and 48 steps of cached greedy decoding. A case is exact
if all logits have the same bits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.families import VARIANTS, Variant, continued, decoder_from, has_cache, randomised_reference, spec_of  # noqa: E402

from gptkit.architectures import ARCHITECTURES, architecture_of  # noqa: E402
from gptkit.architectures.base import Architecture  # noqa: E402
from gptkit.modules import Cache, Decoder  # noqa: E402
from gptkit.parity.outputs import computed_rightly, outputs_of  # noqa: E402
from gptkit.parity.probe import ProbeBatch, probe  # noqa: E402
from gptkit.parity.score import score, unprobed  # noqa: E402
from gptkit.parity.sides import begin_anew  # noqa: E402

LENGTHS, BATCHES, PADDINGS = (1, 7, 64, 200), (1, 3), ("none", "left", "right")
STEPS = 48
PAGE, DETAILS = ROOT / "docs" / "parity.md", ROOT / "docs" / "parity-details.md"

INTRO = """# Parity with transformers

This page is for you if you want to know how far you can rely on gptkit's code for a model family: it compares gptkit's
logits for every family with those of transformers, bit by bit.

{families} families, {variants} variants: {exact:,} of {cases:,} cases are exact.

A case is one call of gptkit's model and of transformers' model with the same weights and input. *Exact* means that all
logits have the same bits. All parameters are random, including norms and biases. Every variant (one configuration of a
family) has these cases:

- texts of 1, 7, 64 and 200 tokens; 200 tokens is longer than all attention windows, and than all original contexts of
  scaled RoPE,
- batches of 1 and 3 texts, without padding, with left padding and with right padding (the logits of padding tokens are
  not compared),
- {steps} steps of cached greedy decoding, all of them compared.

transformers runs with its default settings and with its cache, in float32 and in bfloat16, with the attention
implementations that the table names (eager or sdpa). [The details](parity-details.md) have a row per family, dtype and
attention path, and say which cases are not compared and why.

The last column of the table says whether `gptkit verify` would notice a mistake in a family. To test itself, `verify`
makes known mistakes on purpose, one at a time, for example swapped q and k. The column counts the mistakes that it
detects, over all variants of the family, and the number of different kinds of mistakes.

"""

OUTRO = """
`make parity` writes this page; these figures are of transformers {transformers} and torch {torch} on a CPU.
"""

DETAILED = """# Parity with transformers: details

This page is for you if you want the [parity figures](parity.md) of one dtype or one attention path, or want to know
which cases are not compared.

## Cases that are not compared

- **bloom with sdpa.** transformers has no sdpa path for BLOOM. gptkit computes eager attention for BLOOM even if sdpa
  is chosen, because a fused kernel rounds the ALiBi bias differently (logits change by up to 2.7 in bf16).
- **falcon-rw with eager attention.** transformers' eager path of Falcon with ALiBi adds the bias twice (transformers
  issues 29067 and 29946), so falcon-rw is compared on sdpa alone.
- **RecurrentGemma and RWKV with padding.** transformers' classes read padding before a text as tokens, so the logits of
  a padded text differ from those of the text alone. In gptkit they are equal.
- **RWKV with several texts of one token.** transformers' class mixes such texts with one another.

## Differences within transformers

The last bits of transformers' own logits depend on the attention path. For GPT-2 with eager attention, they also depend
on whether the cache is used. The place of a tensor in its file matters too: from_pretrained maps the file into memory,
so a parameter may start at any multiple of 8 bytes, and this alignment changes the order of sums in fp32 products.
`verify` therefore first copies the parameters of the transformers model into newly allocated memory.

## All figures

The last column has the largest difference between two logits, and names some of the variants that differ.

"""


@dataclass
class Row:
    """The cases of a family with one dtype and one attention path."""

    exact: int = 0
    cases: int = 0
    worst: float = 0.0
    where: set[str] = field(default_factory=set)

    def add(self, difference: float, where: str) -> None:
        """Count a case with its largest difference; `where` names the variant."""
        self.cases += 1
        self.exact += difference == 0
        if not difference <= self.worst:
            self.worst = difference
        if difference != 0:
            self.where.add(where)


def inputs(vocabulary: int, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Every (ids, mask) of the grid that the position table takes."""
    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        for batch in BATCHES:
            for padding in PADDINGS:
                if length > most or (padding != "none" and (batch == 1 or length == 1)):
                    continue
                ids = torch.randint(vocabulary, (batch, length), generator=generator)
                mask = None
                if padding != "none":
                    mask = torch.ones_like(ids)
                    for row in range(1, batch):
                        width = row * length // 4
                        mask[row, slice(0, width) if padding == "left" else slice(length - width, None)] = 0
                yield ids, mask


def forward_cases(model: Decoder, reference: Any, family: Architecture) -> Iterator[float]:
    """The largest difference of every case of the grid that transformers computes rightly."""
    most = model.spec.positions.length if model.spec.positions is not None else 10**9
    for ids, mask in inputs(model.spec.vocab_size, most):
        batch = ProbeBatch("", ids, mask)
        if not computed_rightly(family, batch):
            continue
        ours, theirs = (outputs_of(each, batch) for each in (model, reference))
        if mask is not None:
            ours, theirs = ours[mask.bool()], theirs[mask.bool()]
        yield (ours.double() - theirs.double()).abs().max().item()


def decode_case(model: Decoder, reference: Any) -> float:
    """The largest difference over all steps of a greedy decode, both fed transformers' tokens."""
    ids = torch.randint(model.spec.vocab_size, (1, 10), generator=torch.Generator().manual_seed(1))
    if model.encoder is not None:
        return _written_case(model, reference, ids)
    ours, theirs, worst = Cache(model.spec), None, 0.0
    for _ in range(STEPS):
        found = continued(reference, ids, theirs)
        logits, theirs = found.logits[:, -1], found.past_key_values
        worst = max(worst, (logits.double() - model(ids, cache=ours)[:, -1].double()).abs().max().item())
        ids = logits.argmax(-1, keepdim=True)
    return worst


def _written_case(model: Decoder, reference: Any, source: torch.Tensor) -> float:
    """The same of a text that is written of a source."""
    encoded, states = model.encode(source), reference.get_encoder()(input_ids=source)
    ids, ours, theirs, worst = torch.zeros_like(source[:, :1]), Cache(model.spec), None, 0.0
    for _ in range(STEPS):
        found = reference(encoder_outputs=states, decoder_input_ids=ids, past_key_values=theirs)
        logits, theirs = found.logits[:, -1], found.past_key_values
        own = model(ids, cache=ours, encoded=None if ours.length else encoded)[:, -1]
        worst = max(worst, (logits.double() - own.double()).abs().max().item())
        ids = logits.argmax(-1, keepdim=True)
    return worst


def rows(variants: list[Variant]) -> dict[tuple[str, str, str], Row]:
    """(family, dtype, attention) -> its row, over all variants."""
    found: dict[tuple[str, str, str], Row] = {}
    for variant in variants:
        for dtype in (torch.float32, torch.bfloat16):
            for attention in architecture_of(variant.config).reference(spec_of(variant.config)):
                reference = randomised_reference(variant.config, dtype, attention)
                model = decoder_from(reference, variant.config, attention)
                begin_anew(reference, architecture_of(variant.config))
                row = found.setdefault((variant.family, str(dtype).removeprefix("torch."), attention), Row())
                with torch.inference_mode():
                    for difference in forward_cases(model, reference, architecture_of(variant.config)):
                        row.add(difference, variant.name)
                    if model.spec.causal and has_cache(reference):
                        row.add(decode_case(model, reference), f"{variant.name} decoding")
    return found


def mistakes(variants: list[Variant]) -> str:
    """Caught of tried, over the variants."""
    caught: list[str] = []
    tried = 0
    for variant in variants:
        model = decoder_from(randomised_reference(variant.config, torch.float64, "eager"), variant.config)
        batches = probe(model.spec)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        marks = score(model.spec, weights, batches, unprobed(model.spec, batches))
        caught += [*marks.caught, *marks.caught_random]
        tried += marks.tried
    return f"{len(caught)} of {tried} ({len(set(caught))} kinds)"


class Measured(NamedTuple):
    """The figures of a family."""

    family: str
    variants: int
    rows: dict[tuple[str, str, str], Row]
    """By (family, dtype, attention path)."""
    caught: str
    """How many planted mistakes the probe detects."""


def measured(name: str) -> Measured:
    """Measure a family."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    variants = [variant for variant in VARIANTS if variant.family == name]
    return Measured(name, len(variants), rows(variants), mistakes(variants))


def summary(families: list[Measured]) -> str:
    """Return the table of docs/parity.md, with a row per family."""
    lines = ["| family | variants | attention | exact of cases | mistakes detected |", "|---|---:|---|---:|---:|"]
    for family in families:
        paths = ", ".join(sorted({attention for _, _, attention in family.rows}))
        exact, cases = totals([family])
        lines.append(f"| {family.family} | {family.variants} | {paths} | {exact} of {cases} | {family.caught} |")
    return "\n".join(lines)


def details(families: list[Measured]) -> str:
    """Return the table of docs/parity-details.md, with a row per family, dtype and attention path."""
    lines = ["| family | dtype | attention | exact of cases | max Δ |", "|---|---|---|---:|---|"]
    for family in families:
        for (_, dtype, attention), row in sorted(family.rows.items()):
            worst = "–" if row.exact == row.cases else f"{row.worst:.1e} ({', '.join(sorted(row.where)[:3])})"
            lines.append(f"| {family.family} | {dtype} | {attention} | {row.exact} of {row.cases} | {worst} |")
    return "\n".join(lines)


def totals(families: list[Measured]) -> tuple[int, int]:
    """Return the number of exact cases and of all cases."""
    listed = [row for family in families for row in family.rows.values()]
    return sum(row.exact for row in listed), sum(row.cases for row in listed)


def write_pages(families: list[Measured], of_transformers: str, of_torch: str) -> None:
    """Write docs/parity.md and docs/parity-details.md from the figures, measured with these versions."""
    exact, cases = totals(families)
    variants = sum(family.variants for family in families)
    intro = INTRO.format(families=len(families), variants=variants, exact=exact, cases=cases, steps=STEPS)
    outro = OUTRO.format(transformers=of_transformers, torch=of_torch)
    PAGE.write_text(f"{intro}{summary(families)}\n{outro}", encoding="utf-8")
    DETAILS.write_text(f"{DETAILED}{details(families)}\n", encoding="utf-8")


def main() -> None:
    """Measure all families and write the pages, or print the figures of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--family", choices=sorted(ARCHITECTURES), help="measure only this family, and print instead of writing"
    )
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    asked = parser.parse_args()
    names = [asked.family] if asked.family else sorted({variant.family for variant in VARIANTS})
    families = []
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        for family in pool.map(measured, names):
            families.append(family)
            print(family.family, flush=True)
    if asked.family:
        print(summary(families), details(families), sep="\n\n")
        return
    write_pages(families, transformers.__version__, torch.__version__.split("+")[0])
    print(PAGE.relative_to(ROOT), DETAILS.relative_to(ROOT))


if __name__ == "__main__":
    main()
