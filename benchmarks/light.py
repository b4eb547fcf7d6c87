"""The first number of `uvx hf-gptkit params qwen3-8b`, from an empty cache, next to hf-mem and the full package.

    python benchmarks/light.py [--rounds 3]

Every contender runs as `uv tool run` in a process of its own. "Cold" starts with an empty cache of uv, and so includes
the download and installation of all dependencies. "Warm" is the next call. Contenders take turns, and figures are
medians.

- hf-gptkit: `hf-gptkit params qwen3-8b`, from the wheel that `wheels/light.py` builds.
- hf-mem: `hf-mem --help`. Its estimates need the hub, which this benchmark does not: its real calls take longer.
- gptkit: not run, because torch and transformers alone are larger than everything else together; only its size is
  listed, from the environment that runs this benchmark.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIB = 2**20


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder. Files with several names count once."""
    stats = {(stat.st_dev, stat.st_ino): stat.st_size for path in folder.rglob("*") if (stat := path.lstat()).st_size}
    return sum(stats.values())


def uv_in(folder: Path) -> str:
    """Return the path of uv. If it is not installed, install it into a new environment in `folder`."""
    if found := shutil.which("uv"):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", "uv"], check=True)
    return str(folder / "bin" / "uv")


def timed(command: list[str], cache: Path) -> float:
    """Run a command with a cache of uv, and return its seconds from start to end."""
    env = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_CONSTRAINT": str(ROOT / "constraints.txt")}
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every contender starts with an empty cache")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        uv = uv_in(folder / "uv")
        subprocess.run([sys.executable, ROOT / "wheels" / "light.py", folder / "dist"], check=True)
        (wheel,) = (folder / "dist").glob("*.whl")
        contenders = {
            "hf-gptkit params qwen3-8b": [uv, "tool", "run", "--from", str(wheel), "hf-gptkit", "params", "qwen3-8b"],
            "hf-mem --help": [uv, "tool", "run", "hf-mem", "--help"],
        }
        cold: dict[str, list[float]] = {name: [] for name in contenders}
        warm: dict[str, list[float]] = {name: [] for name in contenders}
        sizes: dict[str, int] = {}
        for turn in range(rounds):
            for place, (name, command) in enumerate(contenders.items()):
                cache = folder / f"cache-{turn}-{place}"
                cold[name].append(timed(command, cache))
                warm[name].append(timed(command, cache))
                sizes[name] = size(cache)
        print(f"{'':28}{'cold, s':>10}{'warm, s':>10}{'cache, MiB':>12}")
        for name in contenders:
            first, next_ = statistics.median(cold[name]), statistics.median(warm[name])
            print(f"{name:28}{first:10.2f}{next_:10.2f}{sizes[name] / MIB:12.1f}")
        installed = size(Path(sys.prefix) / "lib")
        print(f"the environment of this benchmark, with torch and transformers: {installed / MIB:,.0f} MiB")


if __name__ == "__main__":
    main()
