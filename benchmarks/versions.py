"""Compare gptkit with several releases of its dependencies, and write docs/versions.md.

    make versions

Every set of versions gets a virtual environment of its own in build/versions, in which this script runs with --measure:
every family's model with random weights is compared with that release of transformers, in fp32 and in bf16. The
commands' help and the demo must run too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"
SHOWN = ("transformers", "torch", "huggingface_hub", "tokenizers", "safetensors", "typer", "rich", "numpy", "msgspec")
HELPERS = ("hypothesis", "pytest")
"""Packages that the models of the tests need."""

INTRO = """# Versions of libraries

This page is for you if you want to use gptkit with other versions of transformers, torch or typer than the ones that it
is developed with.

gptkit computes what transformers computes, to the last bit, and transformers changes from release to release. So
gptkit is compared with several releases. If a release rounds a family differently, gptkit reads the installed release
and rounds in the same way. With a release outside of this range, gptkit works as with the nearest tested release, and
`gptkit verify` adds a note to its report.

Folders for transformers 4, and for other programs: [](loaders.md).

"""

KINDS = """
Every family is compared with random weights, on texts of 7 and 64 tokens, without padding and with left padding.

- **exact**: all logits have the same bits.
- **equal**: in fp32, logits differ by at most 1e-4 of the largest one; in bf16, by at most 2 %.
- **different**: they differ by more.
- **not there**: this release of transformers does not have the family.

"""


def floors() -> dict[str, str]:
    """Return the lowest version that pyproject.toml allows of every dependency."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    matches = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in listed)
    return {match[1]: match[2] for match in matches if match is not None}


def pins() -> dict[str, str]:
    """Return the versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def wanted(name: str) -> dict[str, str]:
    """Return the versions of an environment: "floor", "pin", "newest", or a release of transformers, such as 5.20.0.

    torch is always the pinned one, because other releases come with several gigabytes of CUDA libraries. With a release
    of transformers, pip chooses the newest versions of the other packages that this release allows.
    """
    torch = {"torch": pins()["torch"]}
    if name == "floor":
        return floors() | torch
    if name == "pin":
        return pins()
    return torch if name == "newest" else torch | {"transformers": name}


def environment(name: str) -> Path:
    """Make the virtual environment, if it does not exist yet, and return its python."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if (folder / "done").exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    versions = wanted(name)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{package}=={version}\n" for package, version in versions.items()))
    install = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "-c", str(constraints)]
    subprocess.run([*install, "-e", str(ROOT), *HELPERS], check=True)
    (folder / "done").touch()
    return python


# --- in an environment ------------------------------------------------------------------------------------------------


def outcome(variant: Any, dtype: Any) -> dict[str, Any]:
    """Compare a family's model in a dtype. Return {"kind": "exact" | "equal" | "different" | …, "gap": relative}."""
    import torch
    import transformers
    from helpers.families import decoder_from, randomised_reference, spec_of

    from gptkit.architectures import architecture_of
    from gptkit.parity.outputs import computed_rightly, outputs_of
    from gptkit.parity.probe import ProbeBatch
    from gptkit.parity.sides import begin_anew

    family = architecture_of(variant.config)
    kind = variant.config.get("text_config", variant.config)["model_type"]
    if not family.model and kind not in transformers.CONFIG_MAPPING:
        return {"kind": "not there"}
    path = family.reference(spec_of(variant.config))[0]
    reference = randomised_reference(variant.config, dtype, path)
    model = decoder_from(reference, variant.config, path)
    begin_anew(reference, family)
    worst = 0.0
    for length, padded in ((7, False), (64, False), (64, True)):
        ids = torch.randint(model.spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids) if padded else None
        if mask is not None:
            mask[0, : length // 4] = 0
        batch = ProbeBatch("", ids, mask)
        if not computed_rightly(family, batch):
            continue
        with torch.inference_mode():
            ours, theirs = outputs_of(model, batch).double(), outputs_of(reference, batch).double()
        if mask is not None:
            ours, theirs = ours[mask.bool()], theirs[mask.bool()]
        worst = max(worst, ((ours - theirs).abs().max() / theirs.abs().max()).item())
    allowed = 1e-4 if dtype == torch.float32 else 0.02
    return {"kind": "exact" if worst == 0 else "equal" if worst <= allowed else "different", "gap": worst}


def measure() -> None:
    """Print what this environment gives, as JSON."""
    sys.path.insert(0, str(ROOT / "tests"))
    import warnings
    from importlib.metadata import version

    import torch
    import transformers
    from helpers.families import REPRESENTATIVES

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    families: dict[str, dict[str, Any]] = {}
    for name, variant in REPRESENTATIVES.items():
        families[name] = {}
        for dtype in (torch.float32, torch.bfloat16):
            try:
                result = outcome(variant, dtype)
            except Exception as error:  # whatever a release makes of a family is a figure of this table
                result = {"kind": "fails", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            families[name][str(dtype).removeprefix("torch.")] = result
        print(name, families[name], file=sys.stderr, flush=True)
    print(json.dumps({"versions": {name: version(name) for name in SHOWN}, "families": families}))


# --- in this process --------------------------------------------------------------------------------------------------


def commands_run(python: Path) -> str:
    """Return "yes" if the help of every command and the demo run, and otherwise what fails."""
    gptkit = python.with_name("gptkit")
    helped = subprocess.run([gptkit, "--help"], capture_output=True, text=True, check=False)
    if helped.returncode:
        return "gptkit --help fails: " + (helped.stderr.strip().splitlines() or [""])[-1]
    names = re.findall(r"^ ?│? ([a-z][a-z-]+)  ", helped.stdout, re.M)
    for arguments in [[name, "--help"] for name in names] + [["params", "gpt2"], ["demo"]]:
        done = subprocess.run([gptkit, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"gptkit {' '.join(arguments)} fails: " + (done.stderr.strip().splitlines() or [""])[-1]
    return "yes"


def measured(name: str) -> dict[str, Any]:
    """Return the figures of an environment, which are measured once."""
    kept = FOLDER / f"{name}.json"
    if not kept.exists():
        python = environment(name)
        done = subprocess.run([python, __file__, "--measure"], stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        figures["commands"] = commands_run(python)
        kept.write_text(json.dumps(figures, indent=1))
    return dict(json.loads(kept.read_text("utf-8")))


def words(result: dict[str, Any]) -> str:
    """Return the cell of a family and a dtype."""
    gap = "" if result["kind"] in ("exact", "not there", "fails") else f" ({result['gap']:.0e})"
    return f"{result['kind']}{gap}"


def page(sets: dict[str, dict[str, Any]]) -> str:
    """Return docs/versions.md."""
    lines = [INTRO + "| library | " + " | ".join(sets) + " |", "|---|" + "---|" * len(sets)]
    lines += [
        f"| {name} | " + " | ".join(figures["versions"][name] for figures in sets.values()) + " |" for name in SHOWN
    ]
    counts = {
        f"families exact in {dtype}": lambda families, dtype=dtype: sum(f[dtype]["kind"] == "exact" for f in families)
        for dtype in ("float32", "bfloat16")
    }
    for title, count in counts.items():
        lines.append(
            f"| {title} | " + " | ".join(str(count(figures["families"].values())) for figures in sets.values()) + " |"
        )
    lines.append("| all commands run | " + " | ".join(figures["commands"] for figures in sets.values()) + " |")
    heads = [f"{name}, {short}" for name in sets for short in ("fp32", "bf16")]
    lines += [KINDS + "| family | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for family in next(iter(sets.values()))["families"]:
        cells = [
            words(figures["families"][family][dtype]) for figures in sets.values() for dtype in ("float32", "bfloat16")
        ]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "`make versions` writes this page.", ""])


def main() -> None:
    """Measure this environment, or all environments, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true", help="measure this environment, and print JSON")
    parser.add_argument("names", nargs="*", default=["pin", "newest"], help="the sets of versions")
    asked = parser.parse_args()
    if asked.measure:
        measure()
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    sets = {name: measured(name) for name in asked.names}
    PAGE.write_text(page(sets), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
