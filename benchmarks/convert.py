"""gptkit convert against copying and hashing, and against transformers, alternating in one run.

    python benchmarks/convert.py [--rounds 5] [--folder DIR] [--only NAME] [--peers mergekit]

Builds a bf16 llama of 1.1 billion parameters in three shards (2.2 GB; pure renames) and a GPT-2 large shape in fp32
(3.1 GB; transposes and splits), and the llama in fp8 and two layers of gpt-oss in mxfp4, which are dequantised to
bf16. Every contender is a process of its own, timed from start to end, with the peak memory that the system counted:

- gptkit: `gptkit convert SOURCE OUT`: the converted folder, synced, with the sha256 of every file and every tensor.
- copy: `cp -r`, then `sync` of the copied files, then `openssl dgst -sha256` of them, one after another.
- transformers: from_pretrained, then save_pretrained.

Figures are medians. Outputs are removed, and the disk is left to settle, outside of the time that is taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import synthetic

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
NARROW: dict[str, tuple[Callable[[Path, dict[str, Any]], int], dict[str, Any]]] = {
    "fp8": (synthetic.build_fp8, LLAMA),
    "mxfp4": (synthetic.build_mxfp4, GPT_OSS),
}
"""What is dequantised to bf16: who builds it, and its config."""
GPT2_LARGE: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 1280,
    "n_layer": 36,
    "n_head": 20,
    "dtype": "float32",
}
TRANSFORMERS = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="1GB")
"""


@dataclass(frozen=True)
class Run:
    """One process: seconds from start to end, seconds of processor time, and the most memory, in bytes."""

    wall: float
    processor: float
    peak: int


def measured(command: Sequence[str]) -> Run:
    """Run a command. The largest of its processes counts for memory, as the system reports it."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed: {errors.decode()[-2000:]}")
    return Run(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def gptkit(source: Path, out: Path) -> list[str]:
    """The conversion to gptkit's own format."""
    return [sys.executable, "-m", "gptkit", "convert", str(source), str(out), "--quiet"]


def copy(source: Path, out: Path) -> list[str]:
    """Copy, sync, hash."""
    script = 'cp -r "$0" "$1" && sync "$1"/* "$1" && openssl dgst -sha256 "$1"/*'
    return ["sh", "-c", script, str(source), str(out)]


def transformers(source: Path, out: Path) -> list[str]:
    """Load and save."""
    return [sys.executable, "-c", TRANSFORMERS, str(source), str(out)]


def compare(
    source: Path, contenders: dict[str, Callable[[Path, Path], list[str]]], rounds: int
) -> dict[str, list[Run]]:
    """Each contender `rounds` times, in turns, after a round that warms up (files in the page cache, code compiled)."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        names = list(contenders) if number % 2 else list(reversed(contenders))
        for name in names:
            out = source.parent / "out"
            os.sync()
            run = measured(contenders[name](source, out))
            shutil.rmtree(out)
            if number:
                runs[name].append(run)
    return runs


def build(folder: Path, config: dict[str, Any], dtype: str, shard_bytes: int) -> int:
    """As synthetic.build, in a process of its own: the system counts a parent's memory among its children's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(synthetic.build, folder, config, dtype, shard_bytes).result()


def median(runs: Sequence[Run], figure: str) -> float:
    """Of one figure."""
    return statistics.median(getattr(run, figure) for run in runs)


def table(title: str, runs: dict[str, list[Run]], against: str) -> None:
    """Print the medians, and gptkit's ratio to each."""
    print(f"\n{title}")
    print(f"  {'':14}{'wall':>9}{'processor':>11}{'peak':>10}{'gptkit takes':>16}")
    ours = median(runs["gptkit"], "wall")
    for name, each in runs.items():
        wall = median(each, "wall")
        ratio = "" if name == "gptkit" else f"{ours / wall:.2f} x"
        mark = " <- wanted" if name == against else ""
        peak = f"{median(each, 'peak') / 1e6:.0f} MB"
        print(f"  {name:14}{wall:7.2f} s{median(each, 'processor'):9.2f} s{peak:>10}{ratio:>16}{mark}", flush=True)


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to build them: a disk with 30 GB free [a temporary folder]")
    parser.add_argument("--only", choices=("llama", "gpt2-large", "four-times", *NARROW))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        peers = {"gptkit": gptkit, "copy": copy, "transformers": transformers}
        for name, config, dtype, shard in (
            ("llama", LLAMA, "BF16", 10**9),
            ("gpt2-large", GPT2_LARGE, "F32", 5 * 10**9),
        ):
            if arguments.only not in (None, name):
                continue
            source = Path(parent) / name
            nbytes = build(source, config, dtype, shard)
            table(f"{name}, {nbytes / 1e9:.2f} GB", compare(source, peers, arguments.rounds), "copy")
            shutil.rmtree(source)
        if arguments.only in (None, "four-times"):
            four_times(Path(parent), arguments.rounds)
        for kind in NARROW:
            if arguments.only in (None, kind):
                dequantised(kind, Path(parent), arguments.rounds)


def dequantised(kind: str, parent: Path, rounds: int) -> None:
    """A model in narrow blocks as bf16 files, beside the copy of these and their own conversion."""
    build_narrow, config = NARROW[kind]
    source, plain = parent / kind, parent / f"{kind}-plain"
    options = ["--to", "hf", "--dtype", "bfloat16"]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        nbytes = pool.submit(build_narrow, source, config).result()
    measured([*gptkit(source, plain), *options])
    runs = compare(
        source,
        {
            "gptkit": lambda at, out: [*gptkit(at, out), *options],
            "copy": lambda _, out: copy(plain, out),
            "from bf16": lambda _, out: [*gptkit(plain, out), *options],
        },
        rounds,
    )
    table(f"{config['model_type']} in {kind} to bf16, {nbytes / 1e9:.2f} GB written", runs, "copy")
    shutil.rmtree(source)
    shutil.rmtree(plain)


def four_times(parent: Path, rounds: int) -> None:
    """The llama with about a quarter of its bytes, as it is, and with four times as many, beside the copy of each."""
    runs: list[dict[str, list[Run]]] = []
    sizes = []
    for layers in (3, 22, 97):
        source = parent / f"llama-{layers}"
        sizes.append(build(source, {**LLAMA, "num_hidden_layers": layers}, "BF16", 10**9))
        runs.append(compare(source, {"gptkit": gptkit, "copy": copy}, rounds))
        shutil.rmtree(source)
    for less, more in ((0, 1), (1, 2)):
        print(f"\nllama of {sizes[less] / 1e9:.2f} and of {sizes[more] / 1e9:.2f} GB:", end=" ")
        print(f"{sizes[more] / sizes[less]:.2f} times the bytes")
        for name in ("gptkit", "copy"):
            wall = [median(runs[which][name], "wall") for which in (less, more)]
            peak = [median(runs[which][name], "peak") / 1e6 for which in (less, more)]
            times = f"{wall[0]:.2f} s and {wall[1]:.2f} s: {wall[1] / wall[0]:.2f} times the time"
            print(f"  {name:8}{times}; {peak[0]:.0f} MB and {peak[1]:.0f} MB of memory", flush=True)


if __name__ == "__main__":
    main()
