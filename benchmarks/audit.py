"""`gptkit audit org/name` of a repository of 30 shards on a server of our own, as a whole process: its time beside
that of fetching the same ranges, and its memory.

    python benchmarks/audit.py [--rounds 7] [--preset llama-3-70b] [--shards 30]

The server is on 127.0.0.1 and has the preset's config.json, the index, and every shard's whole header; of the weights
it has zeros, which nobody asks for. Figures are medians; every round begins with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.hubserver import Hub, of_preset
from params import measured

REPO = "org/name"
MOST_SECONDS, MOST_BYTES = 2.0, 100e6
"""Beside the transfer; and of memory. More fails."""


def transfer(hub: Hub) -> float:
    """Seconds that fetching the small files and every header takes, one after the other."""
    start = time.perf_counter()
    for name in hub.repos[REPO].files:
        request = urllib.request.Request(f"{hub.url}/{REPO}/resolve/main/{name}")
        if name.endswith(".safetensors"):
            request.add_header("Range", "bytes=0-99999")
        with urllib.request.urlopen(request) as response:
            data = response.read()
        if name.endswith(".safetensors") and struct.unpack("<Q", data[:8])[0] > len(data) - 8:
            raise SystemExit(f"the header of {name} has more than the first range")
    return time.perf_counter() - start


def main() -> None:
    """Serve, run, print; fail beyond the bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--preset", default="llama-3-70b")
    parser.add_argument("--shards", type=int, default=30)
    arguments = parser.parse_args()
    hub = Hub()
    hub.repos[REPO] = of_preset(arguments.preset, arguments.shards)
    hub.start()
    command = [str(Path(sys.executable).parent / "gptkit"), "audit", REPO, "--json"]
    runs, fetching = [], []
    try:
        for number in range(arguments.rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": folder, "HF_HUB_OFFLINE": "0"}
                env["PYTHONDONTWRITEBYTECODE"] = ""
                hub.sent.clear()
                run = measured(command, env)
                sent = sum(hub.sent.values())
            if number:  # the first compiles what is imported
                runs.append(run)
                fetching.append(transfer(hub))
    finally:
        hub.stop()
    told = json.loads(run.said)
    size = sum(len(body) for body in hub.repos[REPO].files.values())
    wall = statistics.median(run.wall for run in runs)
    processor = statistics.median(run.processor for run in runs)
    peak, fetched = max(run.peak for run in runs), statistics.median(fetching)
    print(f"{arguments.preset}: {told['tensors']:,} tensors in {arguments.shards} files of {size / 1e9:,.1f} GB")
    print(f"findings        {len(told['findings'])}")
    print(f"fetched         {sent / 1e6:.2f} MB")
    print(f"gptkit audit    {wall:.2f} s, {processor:.2f} s of a processor, {peak / 1e6:.0f} MB")
    print(f"the transfer    {fetched:.2f} s; beside it {wall - fetched:.2f} s")
    if told["findings"] or wall - fetched > MOST_SECONDS or peak > MOST_BYTES:
        raise SystemExit("beyond the bounds")


if __name__ == "__main__":
    main()
