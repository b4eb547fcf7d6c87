"""Measure seven changes of the GPT-2 sample before and after healing, with controls, for docs/healing.md.

    python benchmarks/healing.py [--tokens 600000] [--rate R] [--seeds 3] [--only NAME] [--jobs 2] [--out PAGE]

Every row is a swap of the sample, healed on the play that comes with gptkit. Its last twentieth is held out.
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from kv_starts import written

import gptkit
from gptkit.training.heal import Healed, heal

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"
CHANGES: dict[str, dict[str, str]] = {
    "LayerNorm → RMSNorm": {"norm": "rmsnorm"},
    "MHA → MQA": {"attention": "mqa"},
    "learned positions → RoPE": {"position": "rope"},
    "plain → SwiGLU": {"mlp": "swiglu"},
    "one layer of four dropped": {"layers": "0,1,3"},
    "width by a quarter": {"hidden": "84"},
    "attention → linear in two layers": {"attention": "linear", "blocks": "0,2"},
}
"""Name -> the swap of the GPT-2 sample."""
TEACHER = "sample:gpt2"
COLUMNS = (
    *(
        "change",
        "KL before",
        "healed",
        "±",
        "recovered",
        "perplexity before",
        "healed",
        "±",
        "floor's KL",
        "±",
        "seconds",
    ),
)
MARKS = "<!-- seven changes -->", "<!-- end of seven changes -->"
PAGE = """
The table shows seven changes of `sample:gpt2`, a small trained GPT-2 that comes with gptkit ({parameters:,}
parameters), before and after healing. The training text is a theatre play that also comes with gptkit. A run has
{tokens:,} tokens, which is the text several times over, and every row has {seeds} seeds. The learning rate is {rate}.
The last twentieth of the text is not used for training. The figures in the table are measured on it.

KL is the KL divergence of the changed model's predictions from the original's, in nats per token. *Recovered* is the
share of this divergence that healing removes. The changes were made by swaps in their plain form (`--approximate`),
which do more damage than swaps that are fitted on a text.

The *control* is the original, trained on the same tokens to predict the next token. Its perplexity falls from
{original:.2f} to {control:.2f} (± {spread:.2f}), only because it has read the text. The *floor* is the changed model,
trained from random weights in the same way as in healing.

{table}

In the table of seven changes, ± is the largest minus the smallest value over seeds. *Seconds* are processor seconds
of one healing run, on one thread, while another process was running. `make healing` writes this section.
"""


class Clock:
    """The processor's seconds between the steps of healing, not of what runs beside it."""

    def __init__(self) -> None:
        self.spent, self.last = 0.0, 0.0

    def begin(self, *_: object) -> None:
        self.last = time.process_time()

    def tell(self, name: str, _: object) -> None:
        now = time.process_time()
        self.spent += now - self.last if "healed" in name else 0.0
        self.last = now


def change(name: str, tokens: int, seeds: int, rate: float | None) -> tuple[Healed, float]:
    """One change, healed, and the seconds that one healing took of a processor. The control, which is that of all
    changes, runs beside the first.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gptkit.swap(TEACHER, folder / "changed", approximate=True, **CHANGES[name])
        done = heal(
            folder / "changed", TEACHER, [PLAY], folder / "healed", tokens=tokens, context=128, batch=2048,
            seeds=seeds, rate=rate, beside=name == next(iter(CHANGES)) or "floor",
            on_start=clock.begin, tell=clock.tell,
        )  # fmt: skip
    return done, clock.spent / seeds


def row(name: str, done: Healed, seconds: float) -> list[str]:
    """A row of the table."""
    floor, spread = done.floor, done.healed.perplexities
    return [
        name, f"{done.start.kl:.3f}", f"{done.healed.kl:.4f}", f"{done.healed.kl_spread:.4f}",
        f"{100 * (done.recovered or 0):.1f} %", f"{done.start.perplexity:.2f}", f"{sum(spread) / len(spread):.2f}",
        f"{max(spread) - min(spread):.2f}", "–" if floor is None else f"{floor.kl:.3f}",
        "–" if floor is None else f"{floor.kl_spread:.3f}", f"{seconds:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Run them all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=list(CHANGES))
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, first = [], None
    run = partial(change, tokens=options.tokens, seeds=options.seeds, rate=options.rate)
    names = [options.only] if options.only else list(CHANGES)
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, (done, seconds) in zip(names, pool.map(run, names), strict=True):
            first = first or done
            rows.append(row(name, done, seconds))
            print("  ".join(rows[-1]), flush=True)
    if first is None or first.control is None:
        return  # a row by itself
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    control = first.control.perplexities
    page = PAGE.format(
        parameters=gptkit.params(TEACHER)[0].count.total,
        tokens=first.tokens,
        seeds=options.seeds,
        rate=f"{options.rate:g}" if options.rate else "the one that `heal` chooses by itself",
        original=first.original.perplexity,
        control=sum(control) / len(control),
        spread=max(control) - min(control),
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
    )
    print(page)
    if options.out is not None:
        written(options.out, MARKS[0] + page + MARKS[1], *MARKS)


if __name__ == "__main__":
    main()
