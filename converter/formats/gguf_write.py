"""Plan a GGUF file with everything that llama.cpp needs, from a checkpoint, its tokenizer and a dtype.

A GGUF file has metadata and a list of tensors, followed by the tensors, each at a multiple of 32 bytes. Everything
except the weights is known in advance, including tensors that follow from the model's config, such as
`rope_freqs.weight`. The plan has all of this as the file's header.

Two conventions are those of llama.cpp (conversion/base.py): some tensors are always fp32, and a tensor is stored as F16
instead of Q8_0 if the length of its rows is not a multiple of Q8_0's blocks of 32 values.
"""

import importlib.util
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ...architectures import BoundLeaf
from ...architectures.config import parse_config_text
from ...architectures.ggml import TYPES, Quant
from ...architectures.gguf import expressed
from ...architectures.gguf_architecture import ALWAYS_FP32, shifted
from ...architectures.gguf_rope import LONG
from ...architectures.layout import Shape
from ...errors import CheckpointError, InvalidInput, UsageError, shown
from ..dtypes import HF_NAMES, cast, not_finite, parse_dtype, widest
from ..tokenizer import load_tokenizer
from ..write import Encode, FolderPlan, Output, Shard
from . import Request
from .gguf_header import dequantised
from .gguf_vocab import Value, vocabulary

ALIGNMENT = 32
_CODES = {quant.name: code for code, quant in TYPES.items()}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""The types that gptkit writes -> llama.cpp's number for a file whose tensors are mostly of this type."""
_BLOCK = TYPES[_CODES["Q8_0"]].block


def plan(request: Request) -> FolderPlan:
    """Plan one GGUF file, with the other files of the source in the same folder. Adds notes to those of the source."""
    asked = _parse(request.asked)
    tree = expressed(request.source.spec, request.source.origin.family)
    dtypes = request.source.shared_dtypes()
    tensors = [(leaf, _type_of(leaf, dtypes, asked)) for leaf in tree.leaves]
    stored = _most(tensors)
    notes = [*tree.notes]
    narrow = sum(asked == "Q8_0" and kind == "F16" for _, kind in tensors)
    if narrow:
        notes.append(
            f"{narrow} tensors are stored as F16 instead of Q8_0, because their rows are not a multiple of "
            f"{_BLOCK} values"
        )
    widened = {
        kind: [leaf for leaf, written in tensors if written == "F32" and _source_type(leaf, dtypes) == kind]
        for kind in ("BF16", "F16")
        if asked != "F32"
    }
    for kind, leaves in widened.items():
        if leaves:
            what = "norms and other small tensors" if len(leaves) > 1 else "norm or other small tensor"
            notes.append(f"llama.cpp requires F32 for {len(leaves)} {what}, which the source stores as {kind}")
    factors = shifted(request.source.spec)
    if factors:
        notes.append(
            f"the weights of {len(factors)} norms are stored as 1 + weight, because llama.cpp multiplies "
            "by the stored weight"
        )
    if LONG in tree.extras:
        notes.append(
            "llama.cpp chooses the short or long LongRoPE factors by its context size, not by the length of the text"
        )
    vocab = vocabulary(_token_files(request), request.source.spec.vocab_size, _numbered(request))
    name = _name(request.source.origin.reference or request.source.path.name)
    metadata: dict[str, Value] = {
        "general.architecture": tree.architecture.name,
        "general.type": "model",
        "general.name": name,
        **tree.metadata,
        f"{tree.architecture.name}.vocab_size": request.source.spec.vocab_size,
        "general.file_type": _FILE_TYPES[stored],
        "general.quantization_version": 2,  # ggml's version of the block formats
        **vocab.metadata,
    }
    known = request.source.notes
    known += [note for note in (*notes, *vocab.notes) if note not in known]
    metadata |= dict.fromkeys(tree.architecture.numbers, [0.0] * len(request.source.spec.blocks))
    return FolderPlan(
        (_lay_out(f"{name}-{stored}.gguf", metadata, tree.extras, tensors, factors),), {}, request.companions
    )


def _parse(asked: str | None) -> str | None:
    """Return the GGUF tensor type for a value of --dtype. Raises UsageError."""
    if asked is None:
        return None
    if asked.lower() in ("q8_0", "q8"):
        if importlib.util.find_spec("gguf") is None:
            raise UsageError(
                "gptkit writes Q8_0 with the Python package gguf, which is not installed",
                "Install it: pip install gguf",
            )
        return "Q8_0"
    try:
        kind = parse_dtype(asked)
    except UsageError as error:
        raise UsageError(
            error.message, f"Choose one of {', '.join(HF_NAMES[t] for t in _FILE_TYPES if t in HF_NAMES)}, q8_0."
        ) from error
    if kind not in _FILE_TYPES:
        raise UsageError(
            f"llama.cpp does not support tensors of the dtype {HF_NAMES[kind]}", "Choose another dtype: --dtype float32"
        )
    return kind


def _type_of(leaf: BoundLeaf, dtypes: Mapping[str, str], asked: str | None) -> str:
    """Return the type in which the GGUF stores a tensor: `asked`, or by default the type in the source.

    It is another type if llama.cpp requires one for this tensor.
    """
    if len(leaf.shape) < 2 or leaf.checkpoint.endswith(ALWAYS_FP32):
        return "F32"
    if asked == "Q8_0":
        return "Q8_0" if leaf.shape[-1] % _BLOCK == 0 else "F16"
    if asked is not None:
        return asked
    kind = _source_type(leaf, dtypes)
    return "F32" if kind == "F64" else kind


def _source_type(leaf: BoundLeaf, dtypes: Mapping[str, str]) -> str:
    """Return the dtype of a tensor in the source.

    If several source tensors form it, return the widest of their dtypes.
    """
    return widest([dtypes[name] for name in leaf.shared])


def _most(types: Sequence[tuple[BoundLeaf, str]]) -> str:
    """Return the type that most elements of matrices have. It becomes a part of the file's name."""
    values: dict[str, int] = {}
    for leaf, kind in types:
        if len(leaf.shape) > 1 and not leaf.checkpoint.endswith(ALWAYS_FP32):
            values[kind] = values.get(kind, 0) + math.prod(leaf.shape)
    return max(values, key=lambda kind: (values[kind], -_CODES[kind]))


def q8_0(name: str) -> Encode:
    """Return a function that quantises rows to Q8_0, with the same bits as ggml's quantize_row_q8_0_ref.

    `name` is the tensor's name for errors.
    """

    def encode(rows: np.ndarray, dtype: str) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        values = np.ascontiguousarray(cast(rows, dtype, "F32"))
        if bad := not_finite(values, "F32"):
            raise CheckpointError(f"{name}: {bad} values are NaN or infinite, which Q8_0 cannot store")
        blocks = values.reshape(-1, _BLOCK)
        # The scale of a block is its largest absolute value / 127, as fp16.
        scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(127)
        if (scales >= 65520).any():
            raise CheckpointError(
                f"{name}: some values are too large for Q8_0",
                "Choose a dtype with a larger range: bfloat16 or float32.",
            )
        # For smaller scales 1 / scale is infinite, and the result in C is undefined. x86 gives zeros, and so does this.
        tiny = (scales > 0) & (scales < 1 / np.finfo(np.float32).max)
        if tiny.any():
            values = np.where(tiny[:, None], np.float32(0), blocks).reshape(values.shape)
        quantised: np.ndarray = quantize(values, GGMLQuantizationType.Q8_0)
        return quantised

    return encode


def _one_more(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return the weight of a norm plus 1, in fp32. GGUF stores this sum for norms that multiply by 1 + weight."""
    scale: np.ndarray = cast(rows, dtype, "F32") + np.float32(1)
    return scale


def _lay_out(
    name: str,
    metadata: Mapping[str, Value],
    extras: Mapping[str, tuple[float, ...]],
    tensors: Sequence[tuple[BoundLeaf, str]],
    factors: Collection[str],
) -> Shard:
    """Return the layout of a GGUF file: its header, and the place of every tensor.

    Args:
        name: the name of the file.
        metadata: the metadata by key.
        extras: additional tensors whose values are known, by name.
        tensors: the tensors of the model, with their GGUF types. A tensor with the name "KEY.N" is not written as a
            tensor, but as value N of the list that the metadata have at KEY.
        factors: gptkit's names of the norm weights to which 1 is added.
    """
    inside = [leaf for leaf, _ in tensors if leaf.checkpoint.rpartition(".")[0] in metadata]
    tensors = [(leaf, kind) for leaf, kind in tensors if leaf not in inside]
    data = {extra: struct.pack(f"<{len(values)}f", *values) for extra, values in extras.items()}
    sizes = [len(values) for values in data.values()]
    for leaf, kind in tensors:
        block = TYPES[_CODES[kind]]
        sizes.append(math.prod(leaf.shape) // block.block * block.nbytes)
    places = [0, *accumulate(map(_padded, sizes))]
    entries: list[tuple[str, Shape, str]] = [(extra, (len(values),), "F32") for extra, values in extras.items()]
    entries += [(leaf.checkpoint, leaf.shape, kind) for leaf, kind in tensors]
    parts = [b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    ends = dict(zip(metadata, [*accumulate(map(len, parts))][1:], strict=True))
    for (tensor, shape, kind), place in zip(entries, places, strict=False):
        # GGUF lists the innermost dimension first.
        sized = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_string(tensor) + sized + struct.pack("<IQ", _CODES[kind], place))
    header = b"".join(parts)
    start = _padded(len(header))
    header = b"".join(part.ljust(_padded(len(part)), b"\0") for part in (header, *data.values()))
    outputs = []
    for (leaf, kind), place, nbytes in zip(tensors, places[len(data) :], sizes[len(data) :], strict=False):
        coders: tuple[Any, ...] = (_one_more,) if leaf.shared[0] in factors else ()
        if kind == "Q8_0":
            coders = (q8_0(leaf.checkpoint), partial(_values, TYPES[_CODES[kind]]))
        outputs.append(Output(leaf, kind, start + place, nbytes, *coders))
    for leaf in inside:
        key, _, number = leaf.checkpoint.rpartition(".")
        values: Any = metadata[key]
        outputs.append(Output(leaf, "F32", ends[key] - 4 * (len(values) - int(number)), 4))
    return Shard(name, header, tuple(outputs), start + places[-1])


def _values(kind: Quant, blocks: np.ndarray, _: np.ndarray, __: str) -> np.ndarray:
    return dequantised(blocks, kind)


def _padded(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of the alignment of tensors."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the tokenizer contains {shown(text, 40)}, which is not valid Unicode") from error
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    """Return the bytes of a metadata value, with the number of its type before it."""
    if isinstance(value, int | float):
        letter, code = ("B", 7) if isinstance(value, bool) else ("I", 4) if isinstance(value, int) else ("f", 6)
        return struct.pack(f"<I{letter}", code, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bytes):
        return struct.pack("<IIQ", 9, 0, len(value)) + value
    for kind, letter, code in ((bool, "?", 7), (int, "i", 5), (float, "f", 6)):
        if value and isinstance(value[0], kind):
            return struct.pack(f"<IIQ{len(value)}{letter}", 9, code, len(value), *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(str(text)) for text in value)


def _name(reference: str) -> str:
    """Return the model's name from a model reference: org/name@rev, sample:name, folder/name-F16.gguf -> name."""
    name = reference.rstrip("/").split("/")[-1].split(":")[-1].split("@")[0]
    for suffix in (".gguf", ".safetensors", "-local", "-hf", "-gguf"):
        name = name.removesuffix(suffix)
    name = re.sub(r"[-.](BF16|F16|F32|Q\d\w*|IQ\d\w*)$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "model"


def _token_files(request: Request) -> dict[str, bytes]:
    """Return the content of the tokenizer's files by name.

    Files that are stored inside the source's weight file have precedence over those in its folder.
    """
    plain = r"(tokenizer|tokenizer_config|special_tokens_map|chat_template|spiece)\.(json|model|jinja)"
    wanted = re.compile(rf"{plain}|additional_chat_templates/[^/]+\.jinja")
    files = {path.name: path.read_bytes() for path in request.companions if wanted.fullmatch(path.name)}
    files |= {name: text for name, text in request.source.texts.items() if wanted.fullmatch(name)}
    if not any(name in files for name in ("tokenizer.json", "tokenizer.model", "spiece.model")) and request.companions:
        # vocab.json and merges.txt do not say how text is split. Only transformers' tokenizer class knows this.
        tokenizer = load_tokenizer(request.companions[0].path.parent)
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.to_json().encode()
    return files


def _numbered(request: Request) -> dict[str, Any]:
    """Return the fields of config.json, updated with those of generation_config.json.

    Some have ids of special tokens.
    """
    name = "generation_config.json"
    beside = (path.read_bytes() for path in request.companions if path.name == name)
    text = request.source.texts.get(name) or next(beside, None)
    generation = {} if text is None else parse_config_text(text, name)
    return (request.source.origin.config or {}) | {key: value for key, value in generation.items() if value is not None}
