"""`gptkit params qwen3-8b` as a whole process, beside `accelerate estimate-memory` of the same model, and beside what
an estimate on torch has to import first.

    python benchmarks/params.py [--rounds 11] [--preset qwen3-8b]

Every contender is a process of its own, timed from start to end, with the peak memory that the system counted for it;
they take turns, after a round that warms up (files in the page cache, code compiled). Figures are medians, ratios are
of medians.

- gptkit: `gptkit params PRESET`; and with `--kv`, `--flops` and `--memory`, everything it can tell of a config.
- accelerate: `accelerate estimate-memory REPO --library_name transformers`. It asks the hub, which here is a server on
  127.0.0.1 that has the preset's config.json: what a network takes comes on top. It builds the model without its
  head, and so tells less of it.
- transformers: `python -c "import transformers"` and, since that alone is lazy, the model on the meta device, counted.
- python: an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.hubserver import NEW, Hub, Repo

from gptkit.architectures.presets import presets

ON_META = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    print(AutoModelForCausalLM.from_config(config).num_parameters())
"""


LAUNCH = """
import os, sys, time
start = time.perf_counter()
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print(time.perf_counter() - start, usage.ru_maxrss, usage.ru_utime + usage.ru_stime, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Started by an interpreter that has imported next to nothing, since the system counts a parent's memory among its
children's."""


@dataclass(frozen=True)
class Run:
    """One process: seconds from start to end, the most memory in bytes, what it printed, seconds of a processor."""

    wall: float
    peak: int
    said: str
    processor: float


def measured(command: Sequence[str], env: Mapping[str, str]) -> Run:
    """Run a command, its program by its whole path, to its end."""
    launched = [sys.executable, "-I", "-S", "-c", LAUNCH, *command]
    done = subprocess.run(launched, capture_output=True, text=True, env=dict(env), check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    wall, peak, processor = done.stderr.splitlines()[-1].split()
    return Run(float(wall), int(peak) * 1024, done.stdout, float(processor))


def hub_with(repo: str, config: Mapping[str, object]) -> Hub:
    """A running hub that has one model's config.json, and tells of it what accelerate asks for."""
    told = {"id": repo, "sha": NEW, "siblings": [{"rfilename": "config.json"}], "library_name": "transformers"}
    listing = json.dumps({**told, "config": {"model_type": config["model_type"]}, "tags": [], "downloads": 0})
    hub = Hub()
    hub.repos[repo] = Repo({"config.json": json.dumps(config).encode()}, refs={"": NEW}, listing=listing.encode())
    hub.start()
    return hub


def contenders(preset: str, repo: str, folder: Path) -> dict[str, list[str]]:
    """The commands, by what they are called in the table."""
    python, beside = sys.executable, Path(sys.executable).parent
    more = ["--kv", "8192", "--flops", "--memory"]
    return {
        "gptkit params": [str(beside / "gptkit"), "params", preset],
        "gptkit params, all": [str(beside / "gptkit"), "params", preset, *more],
        "accelerate": [str(beside / "accelerate"), "estimate-memory", repo, "--library_name", "transformers"],
        "import transformers": [python, "-c", "import transformers"],
        "model on meta": [python, "-c", ON_META, str(folder)],
        "python": [python, "-c", "pass"],
    }


def compare(commands: Mapping[str, Sequence[str]], env: Mapping[str, str], rounds: int) -> dict[str, list[Run]]:
    """Each command `rounds` times, in turns, every other round backwards."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in list(commands) if number % 2 else list(reversed(commands)):
            run = measured(commands[name], env)
            if number:
                runs[name].append(run)
    return runs


def table(runs: Mapping[str, Sequence[Run]]) -> None:
    """Medians, and how many times gptkit's each takes."""
    first = next(iter(runs))
    wall = {name: statistics.median(run.wall for run in each) for name, each in runs.items()}
    peak = {name: statistics.median(run.peak for run in each) for name, each in runs.items()}
    print(f"{'':<20} {'wall':>10} {'slowest':>10} {'peak':>10} {'time x':>8} {'memory x':>9}")
    for name, each in runs.items():
        slowest = max(run.wall for run in each)
        ratios = f"{wall[name] / wall[first]:>8.2f} {peak[name] / peak[first]:>9.2f}"
        print(f"{name:<20} {wall[name]:>8.3f} s {slowest:>8.3f} s {peak[name] / 1e6:>7.0f} MB {ratios}")


def main() -> None:
    """Serve, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--preset", default="qwen3-8b", choices=[p.name for p in presets().values() if p.repo])
    arguments = parser.parse_args()
    found = presets()[arguments.preset]
    assert found.repo is not None
    hub = hub_with(found.repo, found.config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(found.config))
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(Path(folder) / "hub"), "HF_HUB_OFFLINE": "0"}
        env = {**env, "PYTHONDONTWRITEBYTECODE": "", "NO_COLOR": "1"}
        try:
            runs = compare(contenders(arguments.preset, found.repo, Path(folder)), env, arguments.rounds)
        finally:
            hub.stop()
    table(runs)
    for name in ("gptkit params", "accelerate", "model on meta"):
        print(f"\n{name}:\n{runs[name][-1].said.rstrip()}")


if __name__ == "__main__":
    main()
