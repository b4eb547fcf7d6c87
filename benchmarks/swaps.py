"""Measure every swap on every trained sample that it applies to, from the written files, for docs/swaps.md.

    make swaps

Fails if a swap that is called exact is above its bound, or if anything but a refusal goes wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import gptkit
from gptkit.analysis.parameters import count
from gptkit.errors import GptkitError, SwapRefused, UsageError
from gptkit.report.quantities import cost_change
from gptkit.surgery.base import Measurement
from gptkit.surgery.chain import chain
from gptkit.surgery.fits.text import read_text
from gptkit.surgery.guarantee import EXACT_FP32, EXACT_FP64
from gptkit.surgery.listing import limits_of, values_of
from gptkit.surgery.measure import measure
from gptkit.surgery.options import guarantee_in_words, spelled
from gptkit.surgery.recipe import read_recipe, shipped
from gptkit.surgery.registry import Step, all_options, all_swaps
from gptkit.surgery.swap import SwapResult

PAGE = Path(__file__).parents[1] / "docs" / "swaps.md"
SAMPLES = ("gpt2", "llama", "bloom", "falcon")

INTRO = """# Swaps, measured

This page is for you if you want to know how much a swap changes a model before you try it: it has measurements of every
swap on four small trained models that come with gptkit.

`make swaps` writes this page; these figures are of torch {torch} on a CPU, with one thread. Every swap was tried on
four small trained models, `sample:gpt2`, `sample:llama`, `sample:bloom` and `sample:falcon`. They have more than half a
million parameters and a vocabulary of 512 tokens, and were trained on plays. `gptkit swap` wrote the changed model,
which was then opened again and compared with the original.

- *guarantee*: the guarantee of the swap on this sample: exact, approximate or needs training. A row with "exact" has a
  relative logit error of at most {fp64:.0e} in fp64 and {fp32:.0e} in fp32; otherwise this page is not written. "Up to
  128 tokens" means that the guarantee covers only sequences of at most 128 tokens.
- *fp32*, *fp64*: the largest difference of a logit between the original and the changed model on test tokens, relative
  to the largest logit, with both models in that dtype.
- *KL*, *top-1*, *perplexity*: figures on {positions:,} tokens of a play. The samples were not trained on these tokens,
  and no swap was fitted or chosen on them. KL is the KL divergence of the changed model from the original, in nats per
  token. *Top-1* is the share of tokens for which both models have the same most likely token. The perplexity of the
  originals is {before}.
- *plain*: KL and perplexity of the plain form of a swap that is fitted on a text, that is, of the same change without
  the fit (`--approximate`). If no fit is better than the plain form, the result of the swap is the plain form.

`gptkit swaps` lists the requirements and sources of every swap, and `gptkit swaps MODEL` tries all swaps on your model.
Models as small as these samples show which form of a swap is better. They do not show how much a large model loses.
`gptkit swap` measures the loss for your model.
"""

OUTRO = """
## Not in the table

Three swaps are not in the tables: `--vocab prune:FILE` and `--vocab prune-text:FILE` need a file, and `--merge-lora`
needs an adapter. They are covered by gptkit's tests. For swaps with a number, the tables have only the values that
gptkit suggests for the sample. Other values are possible.
"""


@dataclass(frozen=True)
class Job:
    """One swap on one sample; `order` is its place on the page."""

    order: tuple[int, int]
    sample: str
    option: str
    value: str


@dataclass(frozen=True)
class Row:
    """What came of it: figures, or why it is refused, or what went wrong."""

    job: Job
    guarantee: str = ""
    limits: str = ""
    parameters: tuple[int, int] = (0, 0)
    measured: Measurement | None = None
    plain: Measurement | None = None
    refused: str = ""
    failed: str = ""


def jobs(samples: Sequence[str]) -> list[Job]:
    """Every swap with the values worth trying, on every sample."""
    found = []
    for sample in samples:
        spec = gptkit.open_checkpoint(f"sample:{sample}").spec
        for place, swap in enumerate(all_swaps()):
            for number, value in enumerate(values_of(swap, spec)):
                found.append(Job((place, number), sample, swap.option, value))
    return found


def run(job: Job) -> Row:
    """One row."""
    torch.set_num_threads(1)
    model, step = f"sample:{job.sample}", Step(job.option, job.value)
    with tempfile.TemporaryDirectory(prefix="gptkit-swaps-") as folder:
        try:
            done = gptkit.swap(model, Path(folder) / "out", [step])
        except (SwapRefused, UsageError) as error:
            return Row(job, refused=error.message)
        except GptkitError as error:
            return Row(job, failed=str(error))
    naive = plain(done, Step(job.option, job.value, approximate=True))
    assert done.measured is not None
    if naive is not None and naive.kl_text == done.measured.kl_text:
        naive = None
    limits = limits_of(done.chain.promise, done.source.spec)
    totals = (count(done.source.spec).total, count(done.spec).total)
    return Row(job, done.guarantee, limits, totals, done.measured, naive, failed=above(done.guarantee, done.measured))


def plain(done: SwapResult, step: Step) -> Measurement | None:
    """The plain replacement on the text, as it would be written; None where there is none."""
    try:
        naive = chain(done.source, [step])
    except GptkitError:
        return None
    text = read_text(done.source, None).held_out
    return measure(naive.against, naive.models[-1], promise=naive.promise, text=text, dtypes=("float32",))


def above(guarantee: str, measured: Measurement) -> str:
    """What is wrong with a row that says exact; "" where nothing is."""
    if guarantee != "exact":
        return ""
    bounds = {"float64": EXACT_FP64, "float32": EXACT_FP32}
    broken = [name for name, bound in bounds.items() if not measured.relative[name] <= bound]
    return f"called exact, above its bound in {' and '.join(broken)}" if broken else ""


# --- the page ---------------------------------------------------------------------------------------------------------


def error(value: float) -> str:
    """A relative error in one digit."""
    return "0" if value == 0 else f"{value:.0e}"


def kl(value: float | None) -> str:
    """In nats per token; what is less than rounding is 0."""
    if value is None:
        return "–"
    return "0" if abs(value) < 1e-9 else f"{value:.4f}" if value >= 5e-4 else f"{value:.0e}"


def perplexity(value: float) -> str:
    """With as many digits as can matter."""
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


def line(row: Row) -> str:
    """A row in markdown."""
    found = row.measured
    assert found is not None and found.perplexity is not None and found.top1_text is not None
    plain = "–"
    if row.plain is not None and row.plain.perplexity is not None:
        plain = f"{kl(row.plain.kl_text)}, {perplexity(row.plain.perplexity[1])}"
    cells = [
        f"`{spelled(row.job.option)}{' ' + row.job.value if row.job.value else ''}`",
        row.job.sample,
        f"{guarantee_in_words(row.guarantee)}{' ' + row.limits if row.limits else ''}",
        error(found.relative["float32"]),
        error(found.relative["float64"]),
        kl(found.kl_text),
        f"{found.top1_text:.1%}",
        perplexity(found.perplexity[1]),
        cost_change(*row.parameters),
        plain,
    ]
    return f"| {' | '.join(cells)} |"


HEAD = "| swap | sample | guarantee | fp32 | fp64 | KL | top-1 | perplexity | parameters | plain |\n|" + "---|" * 10


def page(rows: Sequence[Row], chains: Sequence[str]) -> str:
    """The whole page."""
    good = sorted((row for row in rows if row.measured is not None), key=place)
    before = {row.job.sample: row.measured.perplexity[0] for row in good if row.measured and row.measured.perplexity}
    told = ", ".join(f"{sample} {before[sample]:.2f}" for sample in SAMPLES if sample in before)
    positions = next(row.measured.text_positions for row in good if row.measured)
    intro = INTRO.format(torch=torch.__version__, fp64=EXACT_FP64, fp32=EXACT_FP32, positions=positions, before=told)
    parts = [intro]
    groups = {option.name: option.group for option in all_options()}
    for group in dict.fromkeys(groups.values()):
        chosen = [row for row in good if groups[row.job.option] == group]
        if chosen:
            parts.append(f"## {group}\n\n{HEAD}\n" + "\n".join(map(line, chosen)) + "\n")
    parts.append("## Recipes, step by step\n\n" + "\n".join(chains))
    parts.append("## Refused, and why\n\n" + "\n".join(refusals(rows)) + "\n" + OUTRO)
    return "\n".join(parts)


def place(row: Row) -> tuple[tuple[int, int], int]:
    """Where a row stands: swaps in their order, samples side by side."""
    return row.job.order, SAMPLES.index(row.job.sample)


def refusals(rows: Sequence[Row]) -> list[str]:
    """A line a reason, with the swaps and samples it is for."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in sorted((row for row in rows if row.refused), key=place):
        asked = f"`{spelled(row.job.option)}{' ' + row.job.value if row.job.value else ''}`"
        found.setdefault(row.refused, {}).setdefault(asked, []).append(row.job.sample)
    lines = []
    for reason, swaps in found.items():
        samples = list(dict.fromkeys(sample for names in swaps.values() for sample in names))
        lines.append(f"- {', '.join(swaps)} on {', '.join(samples)}: {reason}")
    return lines


def recipe(name_and_sample: tuple[str, str]) -> str:
    """A recipe on a sample as a small table, or "" where it does not apply."""
    torch.set_num_threads(1)
    name, sample = name_and_sample
    with tempfile.TemporaryDirectory(prefix="gptkit-swaps-") as folder:
        try:
            done = gptkit.swap(f"sample:{sample}", Path(folder) / "out", recipe=name, each_step=True)
        except SwapRefused as error:
            return f"### `{name}` on {sample}\n\nRefused: {error.message}.\n"
    lines = [
        f"### `{name}` on {sample}\n",
        "| step | guarantee | parameters | KL | top-1 | perplexity after it |\n|---|---|---|---|---|---|",
    ]
    totals = [count(model.spec).total for model in done.chain.models]
    for index, (step, swapped, one) in enumerate(zip(done.chain.steps, done.chain.swapped, done.each, strict=True)):
        assert one.perplexity is not None
        figures = [cost_change(*totals[index : index + 2]), kl(one.kl_text), f"{one.top1_text:.1%}"]
        promised = guarantee_in_words(swapped.guarantee)
        lines.append(f"| `{step}` | {promised} | {' | '.join(figures)} | {perplexity(one.perplexity[1])} |")
    assert done.measured is not None and done.measured.perplexity is not None
    all_of_it = [cost_change(totals[0], totals[-1]), kl(done.measured.kl_text), f"{done.measured.top1_text:.1%}"]
    after = perplexity(done.measured.perplexity[1])
    lines.append(
        f"| all of it, from the files | {guarantee_in_words(done.guarantee)} | {' | '.join(all_of_it)} | {after} |\n"
    )
    return "\n".join(lines)


def suited(name: str) -> str:
    """The sample that a recipe is shown on."""
    return "gpt2" if name.startswith("gpt2") else "llama"


def main() -> int:
    """Make the page; 1 where something is not as it claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--samples", nargs="+", choices=SAMPLES, default=SAMPLES)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    start = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        rows = []
        asked = jobs(options.samples)
        for row in pool.map(run, asked):
            rows.append(row)
            what = row.failed or row.refused or row.guarantee
            print(
                f"{len(rows)}/{len(asked)} {row.job.sample} {row.job.option} {row.job.value}: {what}", file=sys.stderr
            )
        chains = list(pool.map(recipe, [(name, suited(name)) for name in shipped() if read_recipe(name).steps]))
    failed = [row for row in rows if row.failed]
    for row in failed:
        print(f"{row.job.sample} {spelled(row.job.option)} {row.job.value}: {row.failed}", file=sys.stderr)
    if failed:
        return 1
    options.out.write_text(page(rows, chains))
    exact = sum(row.guarantee == "exact" for row in rows)
    measured = sum(row.measured is not None for row in rows)
    print(f"{options.out}: {measured} swaps measured, {exact} of them exact, in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
