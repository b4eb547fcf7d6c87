"""Read GGUF, the format of llama.cpp: weights, metadata and tokenizer in one file.

`gguf_header` reads and checks the header. `architectures.gguf` has tables of GGUF's tensor names and metadata keys. The
gguf package dequantises blocks of quantised values. Tensors of unquantised dtypes are read as they are.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures.ggml import TYPES, Quant
from ...architectures.gguf import gguf_architecture, gguf_rows
from ...architectures.gguf_architecture import shifted
from ...architectures.gguf_facts import GgufFacts
from ...architectures.layout import Shape
from ...components import ModelSpec
from ...errors import CannotExpress, CheckpointError, InvalidInput, UsageError, shown
from ..tree import Origin
from . import Opened, Request
from .gguf_header import Array, GgufHeader, GgufTensor, dequantised, open_header

if TYPE_CHECKING:
    import numpy as np

    from ..weights import Stored, Weights
    from ..write import FolderPlan

READABLE = frozenset(quant.name for quant in TYPES.values() if quant.block > 1) - {"Q8_1", "Q8_K"}
"""The names in ggml of the quantised types that the gguf package can dequantise."""

_MAX_FLOATS = 2**17  # elements of a tensor whose values are fields of the tree

_COMPARED = 2**20  # bytes of two tensors to compare at a time

_SAMPLED = 2**14  # bytes to compare at each of a few places, if the file is on a server

_TOKEN_ID_KEYS = {"eos": ("eos", "eot", "eom"), "bos": ("bos",), "pad": ("padding",)}
"""A special token in transformers -> the GGUF keys, tokenizer.ggml.NAME_token_id, that may have its ids."""


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """Return the path if it is a GGUF file, or the only .gguf file in it if it is a folder; else None.

    `names` are the names of the files in the folder, or None if `path` is a file.
    """
    if names is not None:
        inside = [name for name in names if name.endswith(".gguf")]
        return path / inside[0] if len(inside) == 1 else None
    try:
        return path if path.suffix == ".gguf" or begins(path) else None
    except OSError:
        return None


def begins(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic bytes. Raises OSError."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Return the tree of components, its origin and an empty list, from the header of a file. Raises InvalidInput."""
    return describe_header(path, open_header(path))


def describe_header(where: Path | str, header: GgufHeader) -> tuple[ModelSpec, Origin, list[str]]:
    """Return what `describe` returns, for a header that was already read. `where` is the file's name for messages."""
    model = _GgufModel(where, header)
    return model.spec, model.origin, []


def read(path: Path, allow_pickle: bool) -> Opened:  # noqa: ARG001, as every format's
    """Open the file and read only its header.

    Raises:
        InvalidInput: the file cannot be read. UsageError: the gguf package is needed and not installed.
    """
    from ..weights import Weights
    from .gguf_tokenizer import Texts, without_tokenizer

    model = _GgufModel(path, open_header(path))
    tensors = model.header.tensors
    try:
        bound = model.kind.bind(model.spec)
    except CannotExpress as error:  # for example, only some projections have a bias
        raise CheckpointError(f"{path}: its tensors do not form a complete model: {error.message}") from error
    needed = {name: tensor for name, tensor in tensors.items() if name not in model.dropped}
    for key in model.kind.numbers:
        needed |= {number.name: number for number in model.header.numbers(key, len(model.spec.blocks))}
    quantised = Counter(tensor.type.name for tensor in needed.values() if tensor.type.block > 1)
    unread = sorted(set(quantised) - READABLE)
    if unread:
        raise CheckpointError(
            f"{path}: gptkit cannot dequantise tensors of type {', '.join(unread)}",
            "Use a GGUF of the same model with another type, such as Q8_0 or F16.",
        )
    notes = list(model.notes)
    if quantised:
        if importlib.util.find_spec("gguf") is None:
            raise UsageError(
                f"gptkit reads quantised GGUF files ({', '.join(quantised)} in {path}) with the Python package gguf, "
                "which is not installed",
                "Install it: pip install gguf",
            )
        types = ", ".join(f"{count} in {name}" for name, count in quantised.most_common())
        notes.append(f"{sum(quantised.values())} of {len(needed)} tensors are quantised ({types}): dequantised to F32")
    notes += without_tokenizer(model.header)
    texts = Texts(model.header, model.spec.vocab_size, model.spec.context_length, special_ids(model.header))
    if isinstance(model.header.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        model.header.buffer.madvise(mmap.MADV_DONTNEED)  # comparing the head with the embedding read pages
    factors = shifted(model.spec)
    ones = {leaf.checkpoint for leaf in bound if leaf.shared[0] in factors}
    shapes = {leaf.checkpoint: leaf.shape for leaf in bound}
    stored = {}
    for name, tensor in needed.items():
        # For ggml, a tensor with more or fewer dimensions of size 1 is the same tensor.
        wanted = shapes.get(name, tensor.shape)
        shape = wanted if without_ones(wanted) == without_ones(tensor.shape) else tensor.shape
        stored[name] = _stored(path, tensor, shape)
        if name in ones:
            stored[name] = replace(stored[name], dtype="F32", decode=partial(_one_less, kind=tensor.type), kind="")
    return Opened(model.spec, model.origin, bound, Weights(stored), (path,), texts, notes)


def declared(path: Path) -> tuple[ModelSpec, dict[str, Shape], frozenset[str]]:
    """Return the model that a file's metadata declares, for comparing it with the file's tensors.

    Returns:
        The tree of components; the shapes of the tensors that it needs, by name; the names of the tensors in the file
        that gptkit ignores.

    Raises:
        InvalidInput: the header cannot be read. CannotExpress: GGUF has no tensors for such a model.
    """
    model = _GgufModel(path, open_header(path))
    shapes = {leaf.checkpoint: leaf.shape for leaf in model.kind.bind(model.spec)}
    for key in model.kind.numbers:  # they are metadata in the file, not tensors
        for number in model.header.numbers(key, len(model.spec.blocks)):
            shapes.pop(number.name, None)
    return model.spec, shapes, frozenset(model.dropped)


def tensors(path: Path) -> Weights:
    """Return all tensors of a file by their names, also if gptkit does not know its architecture.

    Raises CheckpointError.
    """
    from ..weights import Weights

    return Weights({name: _stored(path, tensor, tensor.shape) for name, tensor in open_header(path).tensors.items()})


def _stored(path: Path, tensor: GgufTensor, shape: Shape) -> Stored:
    from ..weights import Stored

    kind, at = tensor.type, (shape, tensor.start, tensor.end - tensor.start)
    if kind.block == 1:
        return Stored(path, kind.name, *at)
    return Stored(path, "F32", *at, decode=partial(dequantised, kind=kind), kind=kind.name)


def without_ones(shape: Shape) -> Shape:
    """Return a shape without its outermost dimensions of size 1."""
    return tuple(dropwhile(lambda size: size == 1, shape))


def _one_less(data: np.ndarray, kind: Quant) -> np.ndarray:
    """Return the weight of a norm that multiplies by 1 + weight. GGUF stores the sum, so subtract 1."""
    import numpy as np

    from ..dtypes import cast
    from ..safetensors import DTYPES

    carrier = DTYPES[kind.name].carrier if kind.block == 1 else None
    values = dequantised(data, kind) if carrier is None else cast(data.view(carrier), kind.name, "F32")
    weight: np.ndarray = values - np.float32(1)
    return weight


def plan(request: Request) -> FolderPlan:
    """Plan the files of a GGUF output; see `gguf_write`."""
    from .gguf_write import plan as planned

    return planned(request)


class _GgufModel:
    """The model that a header describes.

    Attributes:
        spec: the tree of components.
        origin: the model family, with a config.json made from the metadata.
        kind: the GGUF architecture.
        dropped: the names of tensors that gptkit ignores.
        notes: notes for the user.
    """

    def __init__(self, path: Path | str, header: GgufHeader) -> None:
        self.header = header
        name = _name(path, header)
        self.notes: list[str] = []
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        facts = GgufFacts(name, header.metadata, shapes, partial(_floats, header))
        self.kind = gguf_architecture(facts)
        self.dropped = {name for name in header.tensors if self._is_dropped(name, facts)}
        if _repeats(header, "output.weight", "token_embd.weight"):
            self.notes.append(
                "output.weight has the same values as token_embd.weight: the head is tied to the "
                "embedding and stored only once"
            )
            self.dropped.add("output.weight")
            del shapes["output.weight"]
        try:
            self.spec, config = self.kind.spec_of(facts)
        except InvalidInput as error:
            raise type(error)(f"{path}: {error.message}", error.hint) from error
        for name, ids in special_ids(header).items():
            config[f"{name}_token_id"] = ids[0] if len(ids) == 1 else ids
        for name in self.kind.architecture.token_ids:
            config.setdefault(name, None)  # else transformers uses its default, another token
        self.origin = Origin(family=self.kind.reads, config_text=json.dumps(config, indent=2) + "\n")

    def _is_dropped(self, name: str, facts: GgufFacts) -> bool:
        """Return whether gptkit ignores a tensor.

        It ignores the tensors of extra layers that draft tokens (multi-token prediction), and buffers such as RoPE
        tables.
        """
        layer = re.match(r"blk\.(\d{1,9})\.", name)
        if layer is not None and facts.drafts and int(layer[1]) >= facts.layers:
            return True
        return re.sub(r"^blk\.\d+\.", "blk.{layer}.", name) in self.kind.dropped


def _name(path: Path | str, header: GgufHeader) -> str:
    """Return the name of the GGUF architecture. Raises InvalidInput unless the file has a complete model."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise InvalidInput(
            f"{path} is a GGUF of type {shown(kind, 40)}, not a model",
            "Give the GGUF file that contains the model's weights.",
        )
    if not header.tensors:
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, list) else tokens.count if isinstance(tokens, Array) else 0
        what = f"only a vocabulary of {count:,} tokens and no weights" if count else "no tensors"
        raise InvalidInput(f"{path} contains {what}", "Give the GGUF file that contains the model's weights.")
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise InvalidInput(
            f"{path} is only one of the {shown(parts, 20)} files of a split model",
            "Join the parts first: llama-gguf-split --merge PART_1.gguf OUT.gguf (a program of llama.cpp).",
        )
    try:
        return gguf_rows(header.metadata.get("general.architecture"))[0].name
    except InvalidInput as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from error


def special_ids(header: GgufHeader) -> dict[str, list[int]]:
    """Return the ids of special tokens by their names in transformers ("eos", …).

    A model may have several eos tokens.
    """
    special: dict[str, list[int]] = {}
    for name, keys in _TOKEN_ID_KEYS.items():
        values = (header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
        if ids := dict.fromkeys(value for value in values if type(value) is int and 0 <= value < 2**31):
            special[name] = list(ids)
    return special


def _floats(header: GgufHeader, name: str) -> tuple[float, ...]:
    """Return the values of a small fp32 tensor. Raises CheckpointError."""
    tensor = header.tensors[name]
    count = (tensor.end - tensor.start) // 4
    if tensor.type.name != "F32" or count > _MAX_FLOATS:
        raise CheckpointError(
            f"{header.where}: {name} must be a tensor of type F32 with at most {_MAX_FLOATS:,} elements"
        )
    values: tuple[Any, ...] = struct.unpack(f"<{count}f", header.read(tensor.start, tensor.start + 4 * count))
    return values


def _repeats(header: GgufHeader, name: str, other: str) -> bool:
    """Return whether two tensors have the same type, shape and bytes.

    For a file on a server, only a few places of the two tensors are compared.
    """
    a, b = header.tensors.get(name), header.tensors.get(other)
    if a is None or b is None or (a.type, a.shape) != (b.type, b.shape):
        return False
    nbytes, length = a.end - a.start, _COMPARED
    offsets: Sequence[int] = range(0, nbytes, length)
    if header.elsewhere is not None:  # A few places suffice: matrices that were trained apart do not agree in all.
        offsets, length = (0, nbytes // 2, max(nbytes - _SAMPLED, 0)), _SAMPLED
    return all(
        header.read(a.start + at, min(a.start + at + length, a.end))
        == header.read(b.start + at, min(b.start + at + length, b.end))
        for at in offsets
    )
