"""Checkpoints of any size with random weights, written tensor by tensor and never held whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptkit.architectures import architecture_of
from gptkit.converter.dtypes import from_float64
from gptkit.converter.publish import Staging
from gptkit.converter.write import execute, plan

__all__ = ["build"]

POOL = 1 << 22


def build(folder: Path, config: Mapping[str, Any], dtype: str, shard_bytes: int) -> int:
    """Write a Hugging Face checkpoint of this config; returns the bytes of its weights.

    dtype: safetensors' name. Weights are drawn with the spread that training starts from (one over the square root of
    their fan-in), norms around 1: so that activations stay finite. They repeat a pool of 4 million draws, rotated from
    tensor to tensor, since drawing billions takes longer than everything that is measured.
    """
    architecture = architecture_of(config)
    spec = architecture.spec(config)
    draws = np.random.default_rng(0).standard_normal(POOL)
    pools: dict[tuple[float, float], np.ndarray] = {}

    def tensors() -> Iterator[tuple[str, np.ndarray, str]]:
        for number, parameter in enumerate(spec.parameters()):
            matrix = len(parameter.shape) > 1
            about = (
                (0.0, parameter.shape[1] ** -0.5) if matrix else (1.0 if "norm.weight" in parameter.name else 0.0, 0.1)
            )
            if about not in pools:
                pools[about] = from_float64(about[0] + about[1] * draws, dtype)
            yield parameter.name, np.resize(np.roll(pools[about], 7919 * number), parameter.shape), dtype

    dtypes = {parameter.name: dtype for parameter in spec.parameters()}
    texts = {"config.json": (json.dumps(dict(config), indent=2) + "\n").encode()}
    with Staging(folder) as staging:
        planned = plan(architecture.bind(spec), dtypes, texts, [], shard_bytes)
        staging.commit({}, files=execute(planned, tensors(), staging))
    return sum(shard.nbytes for shard in planned.shards)
