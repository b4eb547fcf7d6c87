"""GGUF, llama.cpp's one file of everything: weights (quantised ones are dequantised), metadata, tokenizer.

The header is checked here (`gguf_header`), names and metadata are declared as data (`architectures.gguf`), blocks of
quantised values are unpacked by the gguf package. Tensors of plain floats are read and copied as they lie.
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

READABLE = frozenset(each.name for each in TYPES.values() if each.block > 1) - {"Q8_1", "Q8_K"}
"""What the gguf package dequantises, by ggml's names."""

_MAX_FLOATS = 2**17  # of a tensor that stands for numbers of the tree

_COMPARED = 2**20  # bytes of two tensors that are compared at a time

_SAMPLED = 2**14  # bytes of two tensors of a file elsewhere that are compared at each of a few places

_ALIKE = {"eos": ("eos", "eot", "eom"), "bos": ("bos",), "pad": ("padding",)}
"""transformers' special ids -> the tokenizer.ggml.*_token_id that may hold one; the first is the one of config.json."""


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """A GGUF file, by its name or by how it begins, or the only one of a folder."""
    if names is not None:
        inside = [name for name in names if name.endswith(".gguf")]
        return path / inside[0] if len(inside) == 1 else None
    try:
        return path if path.suffix == ".gguf" or begins(path) else None
    except OSError:
        return None


def begins(path: Path) -> bool:
    """Whether a file begins as a GGUF file does. Raises OSError."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree and where it comes from, read from the header. Raises InvalidInput."""
    return describe_header(path, open_header(path))


def describe_header(where: Path | str, header: GgufHeader) -> tuple[ModelSpec, Origin, list[str]]:
    """The same of a header that was read, here or elsewhere. Raises InvalidInput."""
    found = _Model(where, header)
    return found.spec, found.origin, []


def read(path: Path, allow_pickle: bool) -> Opened:  # noqa: ARG001, as every format's
    """Open the file, reading its header alone. Raises InvalidInput; UsageError: the gguf package is needed."""
    from ..weights import Weights
    from .gguf_tokenizer import Texts, without_tokenizer

    found = _Model(path, open_header(path))
    tensors = found.header.tensors
    try:
        bound = found.kind.bind(found.spec)
    except CannotExpress as error:  # biases on some projections and not on others
        raise CheckpointError(f"{path}: its tensors do not form a complete model: {error.message}") from error
    kept = {name: tensor for name, tensor in tensors.items() if name not in found.dropped}
    for key in found.kind.numbers:
        kept |= {each.name: each for each in found.header.numbers(key, len(found.spec.blocks))}
    quantised = Counter(tensor.type.name for tensor in kept.values() if tensor.type.block > 1)
    unread = sorted(set(quantised) - READABLE)
    if unread:
        raise CheckpointError(
            f"{path}: gptkit cannot dequantise tensors of type {', '.join(unread)}",
            "Use a GGUF of the same model with another type, such as Q8_0 or F16.",
        )
    notes = list(found.notes)
    if quantised:
        if importlib.util.find_spec("gguf") is None:
            message = f"{path} is quantised ({', '.join(quantised)}), and the gguf package is not installed"
            raise UsageError(message, 'pip install gguf # gptkit\'s extra "gguf"')
        told = ", ".join(f"{count} in {name}" for name, count in quantised.most_common())
        notes.append(f"{sum(quantised.values())} of {len(kept)} tensors are quantised ({told}): dequantised to F32")
    notes += without_tokenizer(found.header)
    texts = Texts(found.header, found.spec.vocab_size, found.spec.context_length, special_ids(found.header))
    if isinstance(found.header.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        found.header.buffer.madvise(mmap.MADV_DONTNEED)  # two tables may have been compared in it
    factors = shifted(found.spec)
    ones = {leaf.checkpoint for leaf in bound if leaf.shared[0] in factors}
    shapes = {leaf.checkpoint: leaf.shape for leaf in bound}
    stored = {}
    for name, tensor in kept.items():
        # To ggml a dimension of one more or less is the same tensor.
        wanted = shapes.get(name, tensor.shape)
        shape = wanted if without_ones(wanted) == without_ones(tensor.shape) else tensor.shape
        stored[name] = _stored(path, tensor, shape)
        if name in ones:
            stored[name] = replace(stored[name], dtype="F32", decode=partial(_one_less, kind=tensor.type), kind="")
    return Opened(found.spec, found.origin, bound, Weights(stored), (path,), texts, notes)


def declared(path: Path) -> tuple[ModelSpec, dict[str, Shape], frozenset[str]]:
    """The tree that a file's metadata say, the tensors of such a tree with their shapes, and those that hold nothing it
    needs. Raises InvalidInput, CannotExpress.
    """
    found = _Model(path, open_header(path))
    shapes = {leaf.checkpoint: leaf.shape for leaf in found.kind.bind(found.spec)}
    for key in found.kind.numbers:  # which are no tensors there
        for each in found.header.numbers(key, len(found.spec.blocks)):
            shapes.pop(each.name, None)
    return found.spec, shapes, frozenset(found.dropped)


def tensors(path: Path) -> Weights:
    """What a file holds by the names that it has, of any architecture. Raises CheckpointError."""
    from ..weights import Weights

    return Weights({name: _stored(path, each, each.shape) for name, each in open_header(path).tensors.items()})


def _stored(path: Path, tensor: GgufTensor, shape: Shape) -> Stored:
    from ..weights import Stored

    kind, at = tensor.type, (shape, tensor.start, tensor.end - tensor.start)
    if kind.block == 1:
        return Stored(path, kind.name, *at)
    return Stored(path, "F32", *at, decode=partial(dequantised, kind=kind), kind=kind.name)


def without_ones(shape: Shape) -> Shape:
    """A shape without the outermost dimensions that are one."""
    return tuple(dropwhile(lambda size: size == 1, shape))


def _one_less(data: np.ndarray, kind: Quant) -> np.ndarray:
    """The weight of a norm that adds 1 to it, of what it multiplies by."""
    import numpy as np

    from ..dtypes import cast
    from ..safetensors import DTYPES

    carrier = DTYPES[kind.name].carrier if kind.block == 1 else None
    values = dequantised(data, kind) if carrier is None else cast(data.view(carrier), kind.name, "F32")
    found: np.ndarray = values - np.float32(1)
    return found


def plan(request: Request) -> FolderPlan:
    """The files of a GGUF output; see `gguf_write`."""
    from .gguf_write import plan as planned

    return planned(request)


class _Model:
    """What a header says: the tree, a config.json, and the tensors that hold no weights."""

    def __init__(self, path: Path | str, header: GgufHeader) -> None:
        self.header = header
        name = _name(path, header)
        self.notes: list[str] = []
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        facts = GgufFacts(name, header.metadata, shapes, partial(_floats, header))
        self.kind = gguf_architecture(facts)
        self.dropped = {each for each in header.tensors if self._is_dropped(each, facts)}
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
            config.setdefault(name, None)  # or transformers' class would take its own default for a token of this model
        self.origin = Origin(family=self.kind.reads, config_text=json.dumps(config, indent=2) + "\n")

    def _is_dropped(self, name: str, facts: GgufFacts) -> bool:
        """Whether a tensor holds nothing the tree needs, or is of a layer that drafts tokens."""
        found = re.match(r"blk\.(\d{1,9})\.", name)
        if found is not None and facts.drafts and int(found[1]) >= facts.layers:
            return True
        return re.sub(r"^blk\.\d+\.", "blk.{layer}.", name) in self.kind.dropped


def _name(path: Path | str, header: GgufHeader) -> str:
    """The architecture's name of a file that holds a whole model."""
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
        hint = "Join the parts first: llama-gguf-split --merge PART_1.gguf OUT.gguf (a program of llama.cpp)."
        raise InvalidInput(f"{path} is only one of the {shown(parts, 20)} files of a split model", hint)
    try:
        return gguf_rows(header.metadata.get("general.architecture"))[0].name
    except InvalidInput as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from error


def special_ids(header: GgufHeader) -> dict[str, list[int]]:
    """The ids of special tokens by transformers' names, each once; eos may be several."""
    found: dict[str, list[int]] = {}
    for name, keys in _ALIKE.items():
        values = (header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
        if ids := dict.fromkeys(value for value in values if type(value) is int and 0 <= value < 2**31):
            found[name] = list(ids)
    return found


def _floats(header: GgufHeader, name: str) -> tuple[float, ...]:
    """A small fp32 tensor's values. Raises CheckpointError."""
    tensor = header.tensors[name]
    count = (tensor.end - tensor.start) // 4
    if tensor.type.name != "F32" or count > _MAX_FLOATS:
        raise CheckpointError(f"{header.where}: {name} must be a small tensor of type F32")
    values: tuple[Any, ...] = struct.unpack(f"<{count}f", header.read(tensor.start, tensor.start + 4 * count))
    return values


def _repeats(header: GgufHeader, name: str, other: str) -> bool:
    """Whether two tensors hold the same values in the same way; where they do not, that shows in their first bytes."""
    a, b = header.tensors.get(name), header.tensors.get(other)
    if a is None or b is None or (a.type, a.shape) != (b.type, b.shape):
        return False
    nbytes, length = a.end - a.start, _COMPARED
    some: Sequence[int] = range(0, nbytes, length)
    if header.elsewhere is not None:  # a few places are enough: no two matrices trained apart agree in all of them
        some, length = (0, nbytes // 2, max(nbytes - _SAMPLED, 0)), _SAMPLED
    return all(
        header.read(a.start + at, min(a.start + at + length, a.end))
        == header.read(b.start + at, min(b.start + at + length, b.end))
        for at in some
    )
