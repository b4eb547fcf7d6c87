"""A llama of 1.1 billion parameters through GQA -> MHA and back: memory, time beside a copy, and every byte.

    python benchmarks/surgery.py [--folder DIR] [--limit MB]

Builds a bf16 llama in three shards (2.2 GB, 32 query and 4 key-value heads) and runs, each as a process of its own,

    gptkit swap SOURCE MHA --attention mha
    gptkit swap MHA BACK --attention gqa:4

with the guarantee measured from the written files (logits in fp32 and fp64, by rows), and once more with --no-measure.
Beside them a copy of what was written, which is also synced and hashed. Peak memory is what the system counted for the
process, pages of mapped files with it. Fails where a swap takes more than the limit, or where a tensor that came back
is not the source's, byte for byte. It needs 8 GB of disk, and minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import convert
import numpy as np

from gptkit.converter.checkpoint import open_checkpoint

LIMIT = 600
"""MB that a swap may take."""


def swap(source: Path, out: Path, attention: str, *options: str) -> list[str]:
    """The command of one swap."""
    command = [sys.executable, "-m", "gptkit", "swap", str(source), str(out), "--attention", attention, "--quiet"]
    return [*command, "--offline", *options]


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every tensor's dtype, shape and bytes, by shared name."""
    checkpoint = open_checkpoint(folder)
    found = {}
    for name, array, dtype in checkpoint.tensors():
        digest = hashlib.sha256(f"{dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
        found[name] = digest.hexdigest()
        checkpoint.release()
    return found


def different(first: Path, second: Path) -> list[str]:
    """Tensors that are not the same in both, or are in one alone. In a process of its own: see `convert.build`."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        one, other = pool.map(digests, (first, second))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def line(what: str, run: convert.Run, copied: float) -> None:
    """One row of the table."""
    memory = f"{run.peak / 1e6:.0f} MB"
    print(f"  {what:32}{run.wall:8.2f} s{run.processor:10.2f} s{memory:>10}{run.wall / copied:14.2f} x", flush=True)


def leg(source: Path, out: Path, attention: str) -> int:
    """One way, measured and unmeasured, and the copy; leaves the measured result. Returns the most memory it took."""
    bare = convert.measured(swap(source, out, attention, "--no-measure"))
    shutil.rmtree(out)
    whole = convert.measured(swap(source, out, attention))
    duplicate = out.with_name("copy")
    copied = convert.measured(convert.copy(out, duplicate))
    shutil.rmtree(duplicate)
    line(f"--attention {attention}", whole, copied.wall)
    line(f"--attention {attention} --no-measure", bare, copied.wall)
    line("copy, sync, hash of the result", copied, copied.wall)
    return max(bare.peak, whole.peak)


def main() -> int:
    """Build, run, print; 1 where it took too much or bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to build it: a disk with 8 GB free [a temporary folder]")
    parser.add_argument("--limit", type=int, default=LIMIT, help="MB that a swap may take [%(default)s]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        source, mha, back = (Path(parent) / name for name in ("source", "mha", "back"))
        nbytes = convert.build(source, convert.LLAMA, "BF16", 10**9)
        print(f"llama of {nbytes / 1e9:.2f} GB")
        print(f"  {'':32}{'wall':>10}{'processor':>12}{'peak':>10}{'of the copy':>16}")
        peak = leg(source, mha, "mha")
        peak = max(peak, leg(mha, back, "gqa:4"))
        wrong = different(source, back)
        changed = len(different(source, mha))
    if wrong:
        print(f"{len(wrong)} tensors came back different: {', '.join(wrong[:4])}")
    else:
        print(f"{changed} tensors went and came back as they were, every byte; the others never changed")
    over = peak > arguments.limit * 1e6
    print(f"peak {peak / 1e6:.0f} MB, {'ABOVE' if over else 'within'} {arguments.limit} MB")
    return 1 if wrong or over else 0


if __name__ == "__main__":
    sys.exit(main())
