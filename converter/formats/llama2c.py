"""llama2.c's .bin files: version 0 (what run.c reads) and 1 in both directions, version 2 (int8 groups) dequantised.

    version 0   seven int32, the vocabulary's size negative where the head is a matrix of its own; tensors and tables
    version 1   "ak42", the version, seven int32, a byte that says whether the head is tied; 256 bytes in all; tensors
    version 2   as 1, with the size of the groups behind that byte; norms in fp32, matrices as bytes and scales

There are no names in a file, and no checksums: its size is all that shows a damage, and it has to fit to the byte.
Order, names and layouts are declared in `architectures.llama2c`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from ...architectures.base import bind
from ...architectures.families.llama import LLAMA
from ...architectures.layout import Shape
from ...architectures.llama2c import BASE, LEAVES, QUANTISED, TABLES, Place, Sizes, config_of, expressed, places
from ...components import ModelSpec
from ...errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from ..tree import Origin
    from ..write import Plan
    from . import Opened, Request

__all__ = ["describe", "finds", "plan", "plan_version", "read"]

MAGIC = struct.pack("<I", 0x616B3432)
HEADER = 256
"""Bytes of the header from version 1 on."""
_SIZES = struct.Struct("<7i")
MAX_GROUP = 2**16
OUTPUT = "model.bin"
"""What llama2.c's train.py calls it."""


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """Such a file, told by its first bytes, or the only one of a folder, where tokenizers end in .bin too."""
    inside = [path] if names is None else [path / x for x in names if x.endswith(".bin") and not x.startswith("tok")]
    try:
        found = [file for file in inside if _looks_right(file)]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree and where it comes from, read from the header. Raises InvalidInput."""
    found = _Model(path)
    return found.spec, found.origin, []


def read(path: Path, allow_pickle: bool) -> Opened:  # noqa: ARG001, as every format's
    """Open the file, reading its header and its rotary tables. Raises InvalidInput."""
    from . import Opened
    from .llama2c_tokenizer import texts_beside
    from .llama2c_weights import Llama2cWeights, check_tables

    found = _Model(path)
    weights = Llama2cWeights(found.path, found.places)
    notes = []
    if found.version == 0:
        check_tables(found.path, weights, found.sizes)
        notes.append("freqs_cos and freqs_sin are tables that follow from the sizes: checked and left out")
    if found.version == 2:
        count = sum(place.scales is not None for place in found.places.values())
        notes.append(
            f"{count} of {len(found.places)} tensors are quantised in groups of {found.group}: dequantised to F32"
        )
    leaves = sorted(bind("llama2.c", LEAVES, found.spec), key=lambda leaf: found.places[leaf.checkpoint].start)
    texts, told = texts_beside(found.path, found.sizes)
    for table in TABLES:
        weights.info.pop(table, None)
    return Opened(found.spec, found.origin, leaves, weights, (found.path,), texts, notes + told)


def plan(request: Request) -> Plan:
    """A file of version 0, the one that run.c reads, and a tokenizer.bin beside it."""
    return plan_version(request, 0)


def plan_version(request: Request, version: int) -> Plan:
    """A file of version 0 or 1, and a tokenizer.bin beside it.

    Raises:
        CannotExpress: llama2.c computes no such tree; the components in the way are listed.
        UsageError: a dtype other than float32, or one to be narrowed unasked.

    """
    from ..dtypes import parse_dtype
    from ..write import Constant, Output, Plan, Shard
    from .llama2c_tokenizer import TOKENIZER, tokenizer_bin

    wide = sorted(name for name, dtype in request.dtypes.items() if dtype == "F64")
    if request.asked is not None and parse_dtype(request.asked) != "F32":
        raise UsageError(f"llama2.c's files hold float32, not {request.asked}", "Leave --dtype out.")
    if wide and request.asked is None:
        raise UsageError(
            f"llama2.c's files hold float32, and {wide[0]} is float64", "Pass --dtype float32 to round it."
        )
    sizes, bound = expressed(request.spec)
    leaves = {leaf.checkpoint: leaf for leaf in bound}
    header = _header(sizes, version)
    outputs, constants, end = [], [], len(header)
    for name, shape, start in places(sizes, version, len(header)):
        end = start + 4 * math.prod(shape)
        if name in TABLES:
            constants.append(Constant(name, start, _table(name, sizes)))
        else:
            outputs.append(Output(leaves[name], "F32", start, end - start))
    texts: dict[str, bytes] = {}
    if not any(path.name == TOKENIZER for path in request.companions):
        made, notes = tokenizer_bin(request, sizes)
        texts = {} if made is None else {TOKENIZER: made}
        known = request.source.notes
        known += [note for note in notes if note not in known]
    shard = Shard(OUTPUT, header, tuple(outputs), end, tuple(constants))
    return Plan((shard,), texts, request.companions)


# --- the header ------------------------------------------------------------------------------------------------------


class _Model:
    """What a header says: the sizes, the tree, and every tensor's place, the file being as long as that takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.sizes, self.group = self._read_header()
        self.places = self._places()
        config = config_of(self.sizes)
        self.spec = LLAMA.spec(config)
        self._config_text = json.dumps(config, indent=2) + "\n"

    @property
    def origin(self) -> Origin:
        from ..tree import Origin

        return Origin(family="llama", config_text=self._config_text)

    def _read_header(self) -> tuple[int, Sizes, int]:
        head = _head(self.path)
        if head[:4] != MAGIC:
            return 0, _legacy(head), 1
        if len(head) < HEADER:
            raise CheckpointError(f"{self.path} is truncated: {HEADER} bytes of header expected, {len(head)} found")
        version, shared = struct.unpack_from("<i", head, 4)[0], head[36]
        if version not in (1, 2):
            raise CheckpointError(f"{self.path} is a llama2.c file of version {version}; gptkit reads 0, 1 and 2")
        sizes = Sizes(*_seven(head, 8), bool(shared))
        group = struct.unpack_from("<i", head, 37)[0] if version == 2 else 1
        if shared > 1 or not sizes.plausible or not 1 <= group <= MAX_GROUP:
            raise CheckpointError(f"{self.path}: its header's sizes are no model's: {sizes}")
        return version, sizes, group

    def _places(self) -> dict[str, Place]:
        start = _SIZES.size if self.version == 0 else HEADER
        ends = [(template, shape, count) for template, shape, count in self.sizes.stacked(self.version)]
        if self.version == 2:
            for template, shape, _ in ends:
                if template in QUANTISED and math.prod(shape) % self.group:
                    raise CheckpointError(f"{self.path}: {template} of {list(shape)} is no multiple of {self.group}")
        # Before anything is made for every layer: a header alone may claim any number of them.
        nbytes = start + sum(self._nbytes(template, shape) * count for template, shape, count in ends)
        size = self.path.stat().st_size
        if size != nbytes:
            what = "is truncated" if size < nbytes else "has trailing bytes"
            raise CheckpointError(
                f"{self.path} {what}: {nbytes} bytes expected, {size} found", "Fetch or copy this file again."
            )
        found = {}
        for template, shape, count in ends:
            for layer in range(count):
                quantised = self.version == 2 and template in QUANTISED
                scales = start + math.prod(shape) if quantised else None
                found[template.format(layer=layer)] = Place(shape, start, scales, self.group)
                start += self._nbytes(template, shape)
        return found

    def _nbytes(self, template: str, shape: Shape) -> int:
        count = math.prod(shape)
        return count + count // self.group * 4 if self.version == 2 and template in QUANTISED else 4 * count


def _looks_right(path: Path) -> bool:
    head = _head(path)
    if head[:4] == MAGIC:
        return True
    return path.suffix == ".bin" and len(head) >= _SIZES.size and _legacy(head).plausible


def _head(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, HEADER, 0)
    finally:
        os.close(fd)


def _legacy(head: bytes) -> Sizes:
    """A header of version 0."""
    dim, inner, layers, heads, kv_heads, vocab, context = _seven(head, 0)
    return Sizes(dim, inner, layers, heads, kv_heads, abs(vocab), context, vocab > 0)


def _seven(head: bytes, at: int) -> tuple[int, int, int, int, int, int, int]:
    dim, inner, layers, heads, kv_heads, vocab, context = _SIZES.unpack_from(head, at)
    return dim, inner, layers, heads, kv_heads, vocab, context


def _header(sizes: Sizes, version: int) -> bytes:
    vocab = sizes.vocab_size if version or sizes.shared else -sizes.vocab_size
    packed = _SIZES.pack(
        sizes.dim, sizes.hidden_dim, sizes.n_layers, sizes.n_heads, sizes.n_kv_heads, vocab, sizes.max_seq_len
    )
    if version == 0:
        return packed
    return (MAGIC + struct.pack("<i", version) + packed + bytes([sizes.shared])).ljust(HEADER, b"\0")


def _table(name: str, sizes: Sizes) -> bytes:
    """A rotary table as llama2.c's export.py makes it: by torch, whose last bits no other library has."""
    import torch

    half = torch.arange(0, sizes.head_dim, 2).float() / sizes.head_dim
    angles = torch.outer(torch.arange(sizes.max_seq_len), 1.0 / (BASE**half)).float()
    table = torch.cos(angles) if name == "freqs_cos" else torch.sin(angles)
    data: np.ndarray = table.numpy()
    return data.astype("<f4").tobytes()
