"""verify --stream on a synthetic llama larger than the memory it is given: peak memory and time of the whole process.

    python benchmarks/stream.py [--gigabytes 8.2] [--folder DIR]

Random bf16 weights are written tensor by tensor in shards of 1 GB (never held whole), then `gptkit verify --stream`
runs on them in a process of its own, and what the system counted for it is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gptkit.analysis.parameters import count
from gptkit.architectures import named
from gptkit.converter.publish import Staging
from gptkit.converter.write import execute, plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHARD = 10**9


def build(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint; returns its parameters."""
    llama = named("llama")
    per_layer, ends = (count(llama.spec({**CONFIG, "num_hidden_layers": n})).total for n in (1, 2))
    layer = ends - per_layer
    layers = max(1, round((gigabytes * 1e9 / 2 - (per_layer - layer)) / layer))
    config = {**CONFIG, "num_hidden_layers": layers}
    spec = llama.spec(config)
    generator = np.random.default_rng(0)
    dtypes = {parameter.name: "BF16" for parameter in spec.parameters()}

    def tensors():  # noqa: ANN202 (an iterator of shared name, array, dtype)
        for parameter in spec.parameters():
            scale = 1.0 if len(parameter.shape) == 1 else parameter.shape[1] ** -0.5
            values = generator.standard_normal(parameter.shape, dtype=np.float32) * (0.1 if scale == 1.0 else scale)
            values += 1.0 if scale == 1.0 else 0.0
            yield parameter.name, (values.view(np.uint32) >> 16).astype(np.uint16), "BF16"

    texts = {"config.json": json.dumps(config, indent=2).encode()}
    with Staging(folder) as staging:
        files = execute(plan(llama.bind(spec), dtypes, texts, [], SHARD), tensors(), staging)
        staging.commit({}, files=files)
    return count(spec).total


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=8.2)
    parser.add_argument("--folder", type=Path, help="where to build it [a temporary folder]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        folder = Path(parent) / "llama"
        parameters = build(folder, arguments.gigabytes)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"llama of {parameters:,} parameters, {size / 1e9:.1f} GB on disk", flush=True)
        start = time.perf_counter()
        command = [sys.executable, "-m", "gptkit", "verify", str(folder), "--stream"]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"exit {code}, {seconds:.0f} s, peak memory {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
