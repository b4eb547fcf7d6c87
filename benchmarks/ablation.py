"""docs/ablation.md: what each step from GPT-2 to LLaMA gives at a million parameters, each alone and all together.

    python benchmarks/ablation.py --text tinyshakespeare.txt [--runs build/ablation] [--out FILE.md] [--picture FILE]

The runs are resumed where they stopped, and none that has ended is run again.
"""

import argparse
from pathlib import Path

from gptkit.report.ablation import ablation_page, run_line, sheet, told
from gptkit.report.pictures import write
from gptkit.training.ablate import Ablation, ablate

PAGE = """# What each step to LLaMA gives

A GPT-2 of {parameters:,} parameters, and what each of the steps that tutorials take towards LLaMA makes of it, each
alone and all together, on tiny Shakespeare: {tokens:,} tokens a run, {context} a window, {seeds} seeds, the same
windows in the same order for all. Loss is held out, in nats a token of a vocabulary of 512; ± is the largest less the
smallest over seeds. *less base* is the mean of the differences from the base of the same seed, with the interval in
which it lies in 95 of 100 (Student's). Bold are those whose interval is on one side of 0.

{table}

![The held-out loss of each variant by tokens trained on](pictures/ablation.svg)

{comments}

So few tokens tell what is learnt fast, not what is best in the end, and seven variants were looked at: one in twenty
intervals leaves 0 out by chance. Tokens a second are those of the median step, on a processor that others used as well.

`make ablation` writes this page; `gptkit ablate gpt2-to-llama OUT --data TEXT` makes the same runs
([how](howto/ablate.md)).
"""


def page(table: Ablation) -> str:
    """The page."""
    found = sheet(table)
    rows = [("", *found.columns), ("---", *["---:"] * len(found.columns))]
    for each in found.rows:
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
    print(text, *told(table), sep="\n")
    if given.out is not None:
        given.out.write_text(text)
    # Last: a picture needs a browser.
    write(ablation_page(table), given.runs.with_suffix(".html"), None, given.picture)


if __name__ == "__main__":
    main()
