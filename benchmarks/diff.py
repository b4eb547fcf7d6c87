"""`gptkit diff` on checkpoints of gigabytes: time and peak memory beside what reads the same bytes and tells less.

    python benchmarks/diff.py [--gigabytes 2] [--folder DIR]

Four pairs with one llama of random bfloat16 weights: a copy; a copy with a rank-16 update merged into q_proj and
v_proj; one of which every weight changed a little; its cast to float32. Beside them `cmp` and `sha256sum` of both
weight files. The files are in the page cache for all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from synthetic import build

import gptkit
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.dtypes import from_float64, to_float64
from gptkit.converter.publish import Staging
from gptkit.converter.write import execute, plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER = 2 * (2048 * (2048 * 2 + 512 * 2 + 5632 * 3) + 2 * 2048)
ENDS = 2 * (2 * 32000 * 2048 + 2048)
RANK = 16
NAMES = ("base", "copy", "adapter", "trained", "wide")

Change = Callable[[str, np.ndarray, np.random.Generator], np.ndarray | None]


def adapter(name: str, wide: np.ndarray, random: np.random.Generator) -> np.ndarray | None:
    """The weight with an update of low rank, where adapters usually have one."""
    if not name.endswith(("q_proj.weight", "v_proj.weight")):
        return None
    update = random.standard_normal((len(wide), RANK)) @ random.standard_normal((RANK, wide.shape[1]))
    return wide + update * (0.02 * np.linalg.norm(wide) / np.linalg.norm(update))


def training(name: str, wide: np.ndarray, random: np.random.Generator) -> np.ndarray | None:  # noqa: ARG001
    """The weight a little away from where it was, in every direction."""
    return wide + 0.02 * wide.std() * random.standard_normal(wide.shape)


def rewrite(source: Path, folder: Path, change: Change) -> None:
    """The checkpoint with tensors changed, rounded to bfloat16; one tensor in memory at a time."""
    checkpoint = open_checkpoint(source)
    random = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, np.ndarray, str]]:
        for name, array, dtype in checkpoint.tensors():
            changed = change(name, to_float64(array, dtype), random)
            yield name, array if changed is None else from_float64(changed, dtype), dtype
            checkpoint.release()

    texts = {"config.json": (json.dumps(checkpoint.origin.config, indent=2) + "\n").encode()}
    with Staging(folder) as staging:
        planned = plan(checkpoint.leaves, checkpoint.shared_dtypes(), texts, [], 1 << 62)
        staging.commit({}, files=execute(planned, tensors(), staging))


def build_all(parent: Path, layers: int) -> None:
    """The checkpoints that are compared."""
    base, *others = (parent / name for name in NAMES)
    build(base, {**CONFIG, "num_hidden_layers": layers}, "BF16", 1 << 62)
    for folder, change in zip(others, (lambda *_: None, adapter, training), strict=False):
        rewrite(base, folder, change)
    gptkit.convert(base, others[3], to="hf", dtype="float32")


def measured(*command: str, code: int | None = None) -> tuple[float, int, str]:
    """Seconds, peak memory in bytes and standard output of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if code is not None and process.returncode != code:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}, {code} expected")
    return time.perf_counter() - start, usage.ru_maxrss * 1024, text


def row(what: str, seconds: float, peak: int, nbytes: int, more: str = "") -> None:
    """A line of the table."""
    print(f"{what:<34} {seconds:7.1f} s {nbytes / 1e9 / seconds:7.2f} GB/s {peak / 1e6:8.0f} MB  {more}", flush=True)


def compared(what: str, a: Path, b: Path, *options: str, code: int = 3) -> None:
    """Time one comparison."""
    nbytes = sum(path.stat().st_size for folder in (a, b) for path in folder.glob("*.safetensors"))
    command = (sys.executable, "-m", "gptkit", "diff", str(a), str(b), "--json", *options)
    seconds, peak, text = measured(*command, code=code)
    found = json.loads(text)
    low = found["low_rank"]
    told = f"{found['counts']['changed'] + found['counts']['rounded']} changed"
    row(what, seconds, peak, nbytes, told + ("" if low is None else f", rank {low['rank']}"))


def main() -> None:
    """Build, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where to build the checkpoints [a temporary folder]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        base, *others = (Path(parent) / name for name in NAMES)
        layers = max(1, round((arguments.gigabytes * 1e9 - ENDS) / LAYER))
        # In a process of its own: a child's peak memory counts that of the parent at its start.
        builder = multiprocessing.get_context("spawn").Process(target=build_all, args=(Path(parent), layers))
        builder.start()
        builder.join()
        if builder.exitcode:
            raise SystemExit("the checkpoints could not be built")
        weights = [str(next(folder.glob("*.safetensors"))) for folder in (base, others[0])]
        nbytes = sum(Path(path).stat().st_size for path in weights)
        print(f"two llamas of {layers} layers, {nbytes / 2e9:.2f} GB each")
        for _ in range(2):  # the first one reads the files into the page cache
            seconds, peak, _ = measured("cmp", *weights, code=0)
        row("cmp", seconds, peak, nbytes)
        row("sha256sum of both", *measured("sha256sum", *weights, code=0)[:2], nbytes)
        compared("diff, a copy", base, others[0], code=0)
        compared("diff, an adapter merged", base, others[1])
        compared("diff, all weights changed", base, others[2])
        compared("the same, --no-rank", base, others[2], "--no-rank")
        compared("diff, cast to float32", base, others[3], code=0)


if __name__ == "__main__":
    main()
