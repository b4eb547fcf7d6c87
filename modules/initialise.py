"""Random initial weights for a model without a checkpoint.

Matrices and tables are drawn from a normal distribution with standard deviation 0.02. For matrices that write into the
residual stream (o_proj, down_proj), the deviation is multiplied by 1/√(2 · layers), so that the variance of the stream
does not grow with depth. The weights of norms are 1, and biases are 0. This is the initialisation of GPT-2 (Radford et
al. 2019, section 2.3; transformers' modeling_gpt2._init_weights). Other families are similar (initializer_range is 0.02
in their configs).

The values of a tensor depend only on the seed, its name and its shape. They are drawn in fp32 and rounded to the dtype.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..analysis.parameters import count
from ..components import Logs, ModelSpec, Parameter
from ..converter.convert import plan_output
from ..converter.dtypes import HF_NAMES, Array, cast, parse_dtype
from ..converter.outline import Outline
from ..converter.publish import Staging
from ..converter.safetensors import DTYPES
from ..converter.tokenizer import token_files
from ..converter.write import execute
from ..errors import GptkitError, UsageError
from ..version import __version__
from .decoder import Decoder

DEVIATION = 0.02
INITIALISATION = "N(0, 0.02), o_proj and down_proj over sqrt(2 * layers); norms 1, biases 0 (GPT-2)"
"""The initialisation in words."""

_PROBED = 16  # the number of tokens in the forward pass that checks for finite logits


def initialised(spec: ModelSpec, seed: int = 0, dtype: str = "F32") -> Iterator[tuple[str, Array, str]]:
    """Yield random tensors for a model, one at a time, as (name, array, dtype).

    The name is gptkit's name of the parameter. bf16 tensors are uint16 arrays with the same bits, because numpy has no
    bf16.

    Args:
        spec: the model's architecture.
        seed: a whole number from 0.
        dtype: a dtype name of safetensors, such as F32.

    Raises:
        UsageError: the seed is negative.
    """
    if seed < 0:
        raise UsageError(f"the seed must be a whole number of at least 0, not {seed}")
    for parameter in spec.parameters():
        yield parameter.name, cast(_drawn(parameter, len(spec.blocks), seed), "F32", dtype), dtype


def _drawn(parameter: Parameter, layers: int, seed: int) -> Array:
    name, shape = parameter.name, parameter.shape
    if isinstance(parameter.initial, Logs):
        return np.broadcast_to(np.log(np.linspace(*parameter.initial, shape[-1], dtype=np.float32)), shape).copy()
    if parameter.initial is not None:
        return np.full(shape, parameter.initial, np.float32)
    generator = np.random.default_rng([seed, *name.encode()])
    values: Array = generator.standard_normal(shape, np.float32)
    values *= np.float32(DEVIATION / math.sqrt(2 * layers) if parameter.role == "writes" else DEVIATION)
    return values


def _available_memory() -> int | None:
    """Return how many bytes of memory this process can still use, or None if unknown.

    The kernel and the control group (cgroup) set limits.
    """
    limits = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        lines = [line for path in (limit, used) for line in _lines(Path(path))[:1]]
        if len(lines) == 2 and all(line.isdecimal() for line in lines):
            limits.append(max(int(lines[0]) - int(lines[1]), 0))
    return min(limits, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def require_memory(spec: ModelSpec, dtype: str, name: str = "the model") -> None:
    """Check that a model's weights fit into the available memory.

    `dtype` is a dtype name of safetensors, such as F32. `name` is the model's name in the message.

    Raises:
        GptkitError: they do not fit. The message gives their size and the available memory.
    """
    parameters = count(spec).total
    needed, free = parameters * DTYPES[dtype].itemsize, _available_memory()
    if free is not None and needed > free:
        narrow = 2 * parameters < min(needed, free)  # else bfloat16 would not help
        half = f"--dtype bfloat16 takes {_size(2 * parameters)}; " if narrow else ""
        raise GptkitError(
            f"{name}: {parameters:,} parameters take {_size(needed)} as {HF_NAMES[dtype]}, but only {_size(free)} of"
            " memory is available",
            f"{half}With --out FOLDER, gptkit writes one tensor at a time.",
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def finite_logits(model: Decoder) -> bool:
    """Return whether the model gives finite logits for a short sequence of token ids from the whole vocabulary."""
    spec = model.spec
    length = min(_PROBED, spec.context_length or _PROBED, spec.positions.length if spec.positions else _PROBED)
    ids = torch.linspace(0, spec.vocab_size - 1, length).long()[None]
    device = next(model.parameters()).device
    with torch.inference_mode():
        return bool(model(ids.to(device)).isfinite().all())


@dataclass(frozen=True)
class _Written:
    """A folder that `write_random` has written."""

    folder: Path
    nbytes: int
    """The size of the weight files in bytes."""


def drawn_from(tree: Outline, seed: int, dtype: str) -> Outline:
    """Return a copy of an outline whose history says that its weights were drawn at random with this seed and dtype.

    An outline is a checkpoint without weights: architecture, history and tokenizer. `dtype` is a dtype name of
    safetensors.
    """
    record = {"random": INITIALISATION, "seed": seed, "dtype": HF_NAMES[dtype], "gptkit": __version__}
    # The weights are not those of the original model, so only its family and config are recorded.
    origin = replace(tree.origin, reference=None, revision=None, files={}, history=(*tree.origin.history, record))
    folder = tree.path if tree.path is not None and tree.path.is_dir() and token_files(tree.path) else None
    return replace(tree, origin=origin, path=folder, revision=None)


def write_random(
    tree: Outline,
    out: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> _Written:
    """Write a checkpoint of a model with random weights, in gptkit's own format.

    Tensors are written one at a time, so a model of any size fits in memory.

    Args:
        tree: the outline of the model: its architecture, history and tokenizer.
        out: the folder to make.
        seed: the seed of the random weights.
        dtype: the dtype of all tensors.
        force: replace an existing checkpoint folder.
        progress: called with the number of bytes of every tensor.

    Raises:
        UsageError: `out` exists, its parent does not, the dtype is unknown, or the seed is negative.
        GptkitError: the disk is too small or a write fails. Nothing is published.
    """
    stored = parse_dtype(dtype)
    drawn = drawn_from(tree, seed, stored)
    spec, record = drawn.spec, drawn.origin.history[-1]
    dtypes = dict.fromkeys((parameter.name for parameter in spec.parameters()), stored)
    plan = plan_output(spec, drawn.origin, "local", dtypes, stored, drawn.path)
    with Staging(Path(out), force) as staging:
        files = execute(plan, initialised(spec, seed, stored), staging, progress)
        staging.commit({"gptkit": __version__, "format": "local", "random": record}, files=files)
    return _Written(Path(out), sum(output.nbytes for shard in plan.shards for output in shard.outputs))
