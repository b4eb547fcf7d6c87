"""Read llama2.c's .bin files of versions 0 (which run.c reads), 1 and 2 (int8 groups), and write versions 0 and 1.

    version 0   a header of seven int32 (sizes; a negative vocabulary size means that the head is not tied); the
                tensors, with two RoPE tables
    version 1   a header of 256 bytes: "ak42", the version, seven int32, a byte that says whether the head is tied; the
                tensors
    version 2   as version 1, with the size of quantisation groups in the header; norms are stored in fp32, matrices as
                int8 values and scales

A file has neither tensor names nor checksums. Only its size can show damage, so the size must be exact.
`architectures.llama2c` declares the order and the layouts of the tensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ...architectures.base import bind
from ...architectures.families.llama import LLAMA
from ...architectures.layout import Shape
from ...architectures.llama2c import BASE, LEAVES, QUANTISED, TABLES, Sizes, config_of, expressed
from ...components import ModelSpec
from ...errors import CheckpointError, UsageError
from ..tree import Origin
from . import Opened, Request

if TYPE_CHECKING:
    import numpy as np

    from ..weights import Weights
    from ..write import FolderPlan

_MAGIC = struct.pack("<I", 0x616B3432)
_HEADER = 256  # bytes of the header from version 1 on
_SIZES = struct.Struct("<7i")
_MAX_GROUP = 2**16
_ROWS = 4096  # positions of the tables to check at a time


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """Return the path of a llama2.c file, recognised by its first bytes: the given file, or the only one in a folder.

    Return None if there is none. Tokenizers (tok*.bin) are not models. `names` are the names of the files in the folder
    `path`, or None if `path` is a file.
    """
    inside = [path] if names is None else [path / x for x in names if x.endswith(".bin") and not x.startswith("tok")]
    try:
        matching = [file for file in inside if _looks_right(file)]
    except OSError:
        return None
    return matching[0] if len(matching) == 1 else None


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Return the tree of components, its origin and an empty list, from the header of a file. Raises InvalidInput."""
    config = config_of(_Llama2cHeader(path).sizes)
    return LLAMA.spec(config), Origin(family="llama", config_text=json.dumps(config, indent=2) + "\n"), []


def read(path: Path, allow_pickle: bool) -> Opened:  # noqa: ARG001, as every format's
    """Open the file, and read its header and RoPE tables. Raises InvalidInput."""
    from ..weights import Stored, Weights
    from .llama2c_tokenizer import texts_beside

    header = _Llama2cHeader(path)
    spec, origin, _ = describe(path)
    decode = partial(_dequantised, group=header.group)
    tensors = {}
    for name, shape, start, nbytes in header.places():
        tensors[name] = Stored(path, "F32", shape, start, nbytes)
        if nbytes != 4 * math.prod(shape):
            kind = f"I8 in groups of {header.group}"
            tensors[name] = replace(tensors[name], decode=decode, kind=kind)
    weights, notes = Weights(tensors), []
    if header.version == 0:
        _check_tables(path, weights, header.sizes)
        notes.append("freqs_cos and freqs_sin are RoPE tables that follow from the sizes: checked and left out")
    if count := len(weights.blocks):
        notes.append(f"{count} of {len(tensors)} tensors are quantised in groups of {header.group}: dequantised to F32")
    texts, more = texts_beside(path, header.sizes)
    for table in TABLES:
        weights.info.pop(table, None)
    return Opened(spec, origin, bind("llama2.c", LEAVES, spec), weights, (path,), texts, notes + more)


def plan(request: Request, version: int = 0) -> FolderPlan:
    """Plan a file of version 0 or 1, and a tokenizer.bin in the same folder."""
    from ..block_file import FileBlock
    from ..dtypes import parse_dtype
    from ..write import FolderPlan, Output, Shard
    from .llama2c_tokenizer import TOKENIZER, tokenizer_bin

    wide = sorted(name for name, dtype in request.source.shared_dtypes().items() if dtype == "F64")
    if request.asked is not None and parse_dtype(request.asked) != "F32":
        raise UsageError(
            f"llama2.c's format stores float32, not {request.asked}", "Leave --dtype out, or use --dtype float32."
        )
    if wide and request.asked is None:
        raise UsageError(
            f"llama2.c's format stores float32, but {wide[0]} is float64", "Pass --dtype float32 to round it."
        )
    sizes, bound = expressed(request.source.spec)
    leaves = {leaf.checkpoint: leaf for leaf in bound}
    vocab = sizes.vocab_size if version or sizes.shared else -sizes.vocab_size
    header = _SIZES.pack(*astuple(sizes)[:5], vocab, sizes.max_seq_len)
    if version:
        header = (_MAGIC + struct.pack("<i", version) + header + bytes([sizes.shared])).ljust(_HEADER, b"\0")
    outputs, constants, end = [], [], len(header)
    for name, _, start, nbytes in _places(sizes, version, len(header)):
        end = start + nbytes
        if name in TABLES:
            constants.append((FileBlock(name, start, end), _table(name, sizes)))
        else:
            outputs.append(Output(leaves[name], "F32", start, nbytes))
    texts: dict[str, bytes] = {}
    if not any(path.name == TOKENIZER for path in request.companions):
        tokenizer, notes = tokenizer_bin(request, sizes)
        texts = {} if tokenizer is None else {TOKENIZER: tokenizer}
        known = request.source.notes
        known += [note for note in notes if note not in known]
    shard = Shard("model.bin", header, tuple(outputs), end, tuple(constants))
    return FolderPlan((shard,), texts, request.companions)


VERSION_1 = SimpleNamespace(finds=None, describe=None, read=None, plan=partial(plan, version=1))
"""The format for writing files of version 1."""


def _places(sizes: Sizes, version: int, start: int, group: int = 1) -> Iterator[tuple[str, Shape, int, int]]:
    """Yield the name, the shape, the offset in bytes and the size in bytes of every tensor, in the order of the file.

    The size includes the scales of quantised values. `start` is the size of the header, `group` that of a quantisation
    group.
    """
    for template, shape, count in sizes.stacked(version):
        nbytes = _nbytes(template, shape, version, group)
        for layer in range(count):
            yield template.format(layer=layer), shape, start, nbytes
            start += nbytes


def _nbytes(template: str, shape: Shape, version: int, group: int) -> int:
    count = math.prod(shape)
    return count + count // group * 4 if version == 2 and template in QUANTISED else 4 * count


class _Llama2cHeader:
    """The header of a file: version, sizes, and the number of values per scale (`group`).

    Raises CheckpointError if the file does not have exactly the size that follows from its header.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.version, self.group = path, 0, 1
        head = _head(path)
        if head[:4] != _MAGIC:
            self.sizes = _legacy(head)
        else:
            if len(head) < _HEADER:
                raise CheckpointError(f"{path} is truncated: {_HEADER} bytes of header expected, {len(head)} found")
            self.version, shared = struct.unpack_from("<i", head, 4)[0], head[36]
            if self.version not in (1, 2):
                raise CheckpointError(f"{path} is a llama2.c file of version {self.version}; gptkit reads 0, 1 and 2")
            self.sizes = replace(Sizes(*_SIZES.unpack_from(head, 8)), shared=bool(shared))
            self.group = struct.unpack_from("<i", head, 37)[0] if self.version == 2 else 1
            if shared > 1 or not self.sizes.plausible or not 1 <= self.group <= _MAX_GROUP:
                raise CheckpointError(f"{path}: the sizes in its header are impossible: {self.sizes}")
        self.start = _HEADER if self.version else _SIZES.size
        # Before anything is made for every layer, because a header may claim any number of layers.
        nbytes = self.start
        for template, shape, count in self.sizes.stacked(self.version):
            if self.version == 2 and template in QUANTISED and math.prod(shape) % self.group:
                raise CheckpointError(
                    f"{path}: {template} has shape {list(shape)}, which cannot be divided into "
                    f"quantisation groups of {self.group} values"
                )
            nbytes += _nbytes(template, shape, self.version, self.group) * count
        size = path.stat().st_size
        if size != nbytes:
            what = "is truncated" if size < nbytes else "has trailing bytes"
            raise CheckpointError(
                f"{path} {what}: {nbytes} bytes expected, {size} found", "Fetch or copy this file again."
            )

    def places(self) -> Iterator[tuple[str, Shape, int, int]]:
        return _places(self.sizes, self.version, self.start, self.group)


def _looks_right(path: Path) -> bool:
    head = _head(path)
    if head[:4] == _MAGIC:
        return True
    return path.suffix == ".bin" and len(head) >= _SIZES.size and _legacy(head).plausible


def _head(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, _HEADER, 0)
    finally:
        os.close(fd)


def _legacy(head: bytes) -> Sizes:
    sizes = Sizes(*_SIZES.unpack_from(head))
    return replace(sizes, vocab_size=abs(sizes.vocab_size), shared=sizes.vocab_size > 0)


def _dequantised(data: np.ndarray, group: int) -> np.ndarray:
    """Dequantise int8 values to fp32, [groups, `group`]. In `data` they are followed by one fp32 scale per group."""
    count = len(data) // (group + 4) * group
    values: np.ndarray = data[:count].view("i1").reshape(-1, group) * data[count:].view("<f4")[:, None]
    return values


def _table(name: str, sizes: Sizes) -> bytes:
    """Return the bytes of a RoPE table, "freqs_cos" or "freqs_sin", with the same bits as llama2.c's export.py.

    export.py uses torch, and numpy would give other bits.
    """
    import torch

    half = torch.arange(0, sizes.head_dim, 2).float() / sizes.head_dim
    angles = torch.outer(torch.arange(sizes.max_seq_len), 1.0 / (BASE**half)).float()
    table: np.ndarray = (torch.cos(angles) if name == "freqs_cos" else torch.sin(angles)).numpy()
    return table.astype("<f4").tobytes()


def _check_tables(path: Path, weights: Weights, sizes: Sizes) -> None:
    """Raise CheckpointError unless the file's RoPE tables have the values that follow from the head dimension.

    The tolerance allows for rounding the angles to fp32.
    """
    import numpy as np

    frequencies = BASE ** -(np.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    for name, function in zip(TABLES, (np.cos, np.sin), strict=True):
        table = weights.read(name)
        for start in range(0, sizes.max_seq_len, _ROWS):
            rows = table[start : start + _ROWS]
            angles = np.outer(np.arange(start, start + len(rows)), frequencies)
            if not np.all(np.abs(rows - function(angles)) <= 1e-6 + 4e-7 * angles):
                raise CheckpointError(
                    f"{path}: the RoPE table {name} does not have the values for base {BASE:,.0f} and head dimension "
                    f"{sizes.head_dim}",
                    "Download the file again. If the error remains, llama2.c itself cannot run this model.",
                )
