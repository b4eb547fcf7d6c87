"""The parity table of docs/parity.md: gptkit against transformers on randomised models of every variant.

    make parity

A case is one call: lengths 1, 7, 64 and 200 (past every window and original context of the variants), batches of 1 and
3, no, left and right padding (real tokens compared), and 48 steps of cached greedy decoding. It is exact where not one
bit of a logit differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.families import VARIANTS, Variant, continued, decoder_from, has_cache, randomised_reference, spec_of  # noqa: E402

from gptkit.architectures import ARCHITECTURES, architecture_of  # noqa: E402
from gptkit.architectures.base import Architecture  # noqa: E402
from gptkit.modules import Cache, Decoder  # noqa: E402
from gptkit.parity.outputs import computed_rightly, outputs_of  # noqa: E402
from gptkit.parity.probe import Batch, probe  # noqa: E402
from gptkit.parity.score import score, unprobed  # noqa: E402
from gptkit.parity.sides import begin_anew  # noqa: E402

LENGTHS, BATCHES, PADDINGS = (1, 7, 64, 200), (1, 3), ("none", "left", "right")
STEPS = 48
PAGE = ROOT / "docs" / "parity.md"

INTRO = """# Parity with transformers

Made by `make parity` with transformers {transformers} and torch {torch} on a CPU; every parameter random, norms and
biases included. Cases are calls: lengths 1, 7, 64 and 200 (past the windows and original contexts of the variants),
batches of 1 and 3, no, left and right padding (real tokens compared), and {steps} steps of cached greedy decoding, each
compared. *Exact* means that not one bit of a logit differs. transformers is called as it is by default, with its cache.

The last column is the probe's worth: mistakes made on purpose in the weight map or the tree, and how many of them
`gptkit verify` sees, summed over the family's variants, with the number of kinds among them.
"""

OUTRO = """
Not in the table, and why: transformers has no sdpa path for bloom; gptkit uses its eager arithmetic under either name,
since a float bias through a fused kernel rounds otherwise (2.7 logits in bf16). transformers' eager path of falcon with
ALiBi adds the bias twice (transformers issues 29067 and 29946), so that falcon-rw is compared on sdpa alone.
transformers' RecurrentGemma and RWKV read padding before a text as tokens, so that their padded rows are not those of
the text alone, and RWKV mixes texts with one another where it reads one token of each; these cases are left out. In
gptkit a row of a batch is the text alone.

transformers itself differs in the last bits between its attention paths, with and without its cache (eager gpt2), and
with the place of a tensor in its file: from_pretrained leaves parameters in the mapped file at multiples of 8 bytes,
and fp32 products sum in another order there. `verify` gives the reference its own memory first.
"""


@dataclass
class Row:
    """One line of the table."""

    exact: int = 0
    cases: int = 0
    worst: float = 0.0
    where: set[str] = field(default_factory=set)

    def add(self, difference: float, where: str) -> None:
        """One case."""
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
        batch = Batch("", ids, mask)
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


def told(family: str) -> tuple[str, int, dict[tuple[str, str, str], Row], str]:
    """Of a family: its name, how many variants it has, its rows, and the probe's worth."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    variants = [variant for variant in VARIANTS if variant.family == family]
    return family, len(variants), rows(variants), mistakes(variants)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=sorted(ARCHITECTURES), help="only this one, and print instead of writing")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    asked = parser.parse_args()
    lines = [
        "| family | variants | dtype | attention | exact of cases | max Δ where not | mistakes caught |",
        "|---|---:|---|---|---:|---|---:|",
    ]
    families = [asked.family] if asked.family else sorted({variant.family for variant in VARIANTS})
    found = []
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        for each in pool.map(told, families):
            found.append(each)
            print(each[0], flush=True)
    for family, variants, table, caught in found:
        for (_, dtype, attention), row in sorted(table.items()):
            worst = "–" if row.exact == row.cases else f"{row.worst:.1e} ({', '.join(sorted(row.where)[:3])})"
            cases = f"{row.exact} of {row.cases}"
            lines.append(f"| {family} | {variants} | {dtype} | {attention} | {cases} | {worst} | {caught} |")
    text = "\n".join(lines)
    if asked.family:
        print(text)
        return
    listed = [row for _, _, table, _ in found for row in table.values()]
    total = (
        f"{len(found)} families, {sum(variants for _, variants, _, _ in found)} variants:"
        f" {sum(row.exact for row in listed):,} of {sum(row.cases for row in listed):,} cases are exact.\n\n"
    )
    intro = INTRO.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], steps=STEPS)
    PAGE.write_text(f"{intro}\n{total}{text}\n{OUTRO}", encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
