"""Checkpoints of any size with random weights, written tensor by tensor and never held whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptkit.architectures import architecture_of
from gptkit.converter.dtypes import from_float64
from gptkit.converter.publish import Staging
from gptkit.converter.safetensors import build_header
from gptkit.converter.write import execute, plan

__all__ = ["build", "build_fp8", "build_mxfp4"]

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


def build_fp8(folder: Path, config: Mapping[str, Any]) -> int:
    """Write one file of a Hugging Face checkpoint whose blocks' matrices are random fp8 with a scale for 128 x 128, as
    DeepSeek-V3 and Qwen3 have them, the rest bf16; returns the bytes of its tensors in bf16.
    """
    spec = architecture_of(config).spec(config)
    narrow = {each.name for each in spec.parameters() if each.layer is not None and len(each.shape) > 1}
    tensors: list[_Stored] = []
    leaves = architecture_of(config).bind(spec)
    for leaf in leaves:
        quantised = leaf.shared[0] in narrow
        tensors.append((leaf.checkpoint, "F8_E4M3" if quantised else "BF16", leaf.shape))
        if quantised:
            tensors.append((f"{leaf.checkpoint}_scale_inv", "F32", tuple(-(-side // 128) for side in leaf.shape)))
    _stored(
        folder, {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, tensors
    )
    return sum(2 * math.prod(leaf.shape) for leaf in leaves)


def build_mxfp4(folder: Path, config: Mapping[str, Any]) -> int:
    """Write one file of a gpt-oss checkpoint whose experts are random values of 4 bits with an exponent for 32, the
    rest bf16; returns the bytes of its tensors in bf16.
    """
    leaves = architecture_of(config).bind(architecture_of(config).spec(config))
    tensors: list[_Stored] = []
    for leaf in leaves:
        if not leaf.checkpoint.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors.append((leaf.checkpoint, "BF16", leaf.shape))
            continue
        experts, inputs, outputs = leaf.shape
        tensors.append((f"{leaf.checkpoint}_blocks", "U8", (experts, outputs, inputs // 32, 16)))
        tensors.append((f"{leaf.checkpoint}_scales", "U8", (experts, outputs, inputs // 32)))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    _stored(folder, {**config, "quantization_config": settings}, tensors)
    return sum(2 * math.prod(leaf.shape) for leaf in leaves)


_Stored = tuple[str, str, tuple[int, ...]]  # a tensor's name, type and shape in a file


def _stored(folder: Path, config: Mapping[str, Any], tensors: list[_Stored]) -> None:
    """A folder with one file of random tensors."""
    generator = np.random.default_rng(0)
    header, infos = build_header(tensors, {"format": "pt"})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for info in infos:
            assert file.tell() == info.start
            if info.dtype == "F8_E4M3":
                exponents, rest = generator.integers(4, 14, (2, info.nbytes), dtype=np.uint8)
                file.write(exponents << 3 | rest & 7 | rest << 6 & 128)
            elif info.dtype == "U8":
                exponents = info.name.endswith("_scales")
                file.write(generator.integers(*((110, 124) if exponents else (0, 256)), info.nbytes, dtype=np.uint8))
            elif info.dtype == "F32":
                file.write(generator.uniform(1e-4, 1e-3, info.nbytes // 4).astype(np.float32))
            else:
                file.write(from_float64(generator.standard_normal(info.nbytes // 2) * 0.02 + 1, "BF16"))
