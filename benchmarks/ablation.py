"""Measure the steps from GPT-2 to LLaMA at a million parameters, one at a time and together, for docs/ablation.md.

    python benchmarks/ablation.py --text tinyshakespeare.txt [--runs build/ablation] [--out FILE.md] [--picture FILE]

Interrupted runs continue where they stopped, and finished runs are not repeated.
"""

import argparse
from pathlib import Path

from gptkit.report.ablation import ablation_page, ablation_sheet, explanation, run_line
from gptkit.report.pictures import write
from gptkit.training.ablate import Ablation, ablate

PAGE = """# What each step to LLaMA gives

This page is for you if you want to know which of the usual steps from GPT-2 to LLaMA improve a small model. The page
applies them to a GPT-2 with {parameters:,} parameters, one at a time and all together.

All variants of the model train on tiny Shakespeare and read the same windows of the text in the same order. A run has
{tokens:,} tokens in windows of {context} tokens, and every variant has {seeds} seeds. The loss is on held-out text, in
nats per token, with a vocabulary of 512. ± is the largest minus the smallest loss over seeds. *Minus base* is the mean
difference from the loss of the unchanged GPT-2 (*base*) with the same seed, followed by its 95 % confidence interval
(Student's t). Rows are bold if their interval is entirely above or below 0.

{table}

![The held-out loss of each variant by tokens trained on](pictures/ablation.svg)

{comments}

Such short runs show which variant learns fast, and not which is best after long training. The table has seven 95 %
confidence intervals. About one in twenty such intervals excludes 0 by chance. Tokens per second are those of the median
training step, on a processor that other programs used as well.

`make ablation` writes this page. `gptkit ablate gpt2-to-llama OUT --data TEXT` makes the same training runs
([how](howto/ablate.md)).
"""


def page(table: Ablation) -> str:
    """The page."""
    sheet = ablation_sheet(table)
    rows = [("", *sheet.columns), ("---", *["---:"] * len(sheet.columns))]
    for each in sheet.rows:
        cells = (each.label, *each.cells)
        rows.append(tuple(f"**{cell}**" if each.style and number < 5 else cell for number, cell in enumerate(cells)))
    base = table.rows[0]
    return PAGE.format(
        parameters=base.costs.parameters,
        tokens=base.tokens,
        context=table.context,
        seeds=table.seeds,
        table="\n".join(f"| {' | '.join(row)} |" for row in rows),
        comments="\n".join(f"- {row.name}: {row.comment}" for row in table.rows if row.comment),
    )


def main() -> None:
    """Run what has not been run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("build/ablation"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, help="an .svg of the curves")
    given = parser.parse_args()
    given.runs.parent.mkdir(exist_ok=True)
    table = ablate(
        "gpt2-to-llama", given.runs, data=[given.text], resume=True,
        ended=lambda *each: print(run_line(*each), flush=True),
    )  # fmt: skip
    text = page(table)
    print(text, *explanation(table), sep="\n")
    if given.out is not None:
        given.out.write_text(text)
    # Last: a picture needs a browser.
    write(ablation_page(table), given.runs.with_suffix(".html"), None, given.picture)


if __name__ == "__main__":
    main()
