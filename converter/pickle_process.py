"""Read files of torch.save and the `.metadata` of distributed checkpoints, without torch and without running any code.

This is a worker of `confinement`, which `pickles` asks. torch.save has two formats. torch 1.6 and later write a zip
archive, in which the data of every storage is a member. Older versions write a stream, in which the data follow the
pickle. torch.load(weights_only=True, mmap=True) is not used: it takes two seconds to start, does not say where in a
stream a tensor is, and does not check where in an archive it is (tests/converter/test_pickles.py, "what torch's own
reader lacks", and `BAD`).

A pickle names classes and functions. None of them is ever imported: this file has a stand-in for every allowed name,
and refuses all other names.

The answer has the dtype, shape, strides and place of every tensor. It is JSON, in which an object has one key that says
what it is: {"dict": pairs}, {"list": items}, {"tensor": …}, {"shard": …} for a rank's part of a tensor (a DTensor), and
{"other": name}. The answer for an .npz archive of numpy or MLX, which has no pickle, has the same form.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, Any, BinaryIO, NamedTuple, cast

from .confinement import MEMORY, allow

_COSTS = (MEMORY, 24, 3.0, 1 / 2**22)
"""The limits of memory and CPU time for a pickle; see `confinement._Costs`.

24 bytes per byte of the pickle suffice for the smallest objects. A pickle of 100,000 tensors takes 4 seconds.
"""
_MAX_PICKLE = 32 * 2**20
"""The maximum size of a pickle in bytes, without the data of tensors. A pickle of 100,000 tensors has 20 MB."""
_MAX_VALUES = 2**19
_MAX_TEXT = 2**25
_MAX_DEPTH = 32
_MAX_DIMS = 32
_MAX_INTEGER = 2**63

_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "ComplexDouble": "C128", "Untyped": "U8",
}  # fmt: skip
"""The name of a torch storage class without "Storage" -> the name of its dtype in safetensors."""

_ELEMENTS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "complex128": "C128",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""The name of a dtype in torch -> its name in safetensors."""

_NOT_PLAIN = (
    *(f"_rebuild_{name}" for name in ("sparse_tensor", "sparse_csr_tensor", "nested_tensor", "qtensor")),
    *(f"_rebuild_device_tensor_from_{name}" for name in ("numpy", "cpu_tensor")),
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_wrapper_subclass",
)
"""Functions of torch._utils that make tensors which are not dense or have no data in the file."""
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")


class _RefusedError(Exception):
    """This process cannot or must not read the file. The message says why."""


# --- the archive -----------------------------------------------------------------------------------------------------


def _members(file: _ArchivePart, size: int, writer: str = "torch.save") -> dict[str, tuple[int, int]]:
    """Return the place of every member of a zip archive: the offset of its content and its length, both in bytes.

    `writer` is the program that writes such archives, for messages. Raises _RefusedError if a member is compressed or
    encrypted, or if members overlap.
    """
    file.seek(0)
    beginning = file.read(4)
    try:
        with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, EOFError, ValueError, struct.error, NotImplementedError, OSError) as error:
        if beginning == b"PK\3\4":
            raise _RefusedError(f"is truncated: its directory is not at its end, {size:,} bytes found") from error
        raise _RefusedError(f"is not an archive that {writer} writes: {error}") from error
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
        raise _RefusedError(f"is compressed: {writer} never does that, and it hides the real size")
    if any(info.flag_bits & 1 for info in infos):
        raise _RefusedError("is encrypted")
    # Checked before anything is read, because many entries may refer to the same bytes.
    total = sum(info.file_size for info in infos)
    if total > size:
        raise _RefusedError(f"claims {total:,} bytes of content, but has only {size:,}")
    members: dict[str, tuple[int, int]] = {}
    at = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.header_offset < at or info.filename in members:
            raise _RefusedError(f"contains {info.filename!r:.80} twice, or overlapping another entry")
        file.seek(info.header_offset)
        head = file.read(30)
        if len(head) < 30 or head[:4] != b"PK\3\4":
            raise _RefusedError(f"has no entry where its directory says {info.filename!r:.80} is")
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        at = start + info.file_size
        if at > end:
            raise _RefusedError(f"is truncated: {info.filename!r:.80} ends at byte {at:,} of {end:,}")
        members[info.filename] = (start, info.file_size)
    return members


# --- the pickle ------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A stand-in for a class or function that a pickle may name."""

    name: str
    element: str = ""  # the element type, if the name is that of a storage class or dtype

    def __call__(self, *args: Any) -> Any:
        if self.name == "OrderedDict":
            return _Table(*args[:1])
        if self.name in ("Size", "set"):
            return list(args[0]) if args else []
        if self.name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return _tensor(*args[:4])
        if self.name == "_rebuild_tensor_v3":
            return _tensor(args[0], args[1], args[2], args[3], args[6])
        if self.name in _PARAMETERS:
            return args[0]
        if self.name in (*_NOT_PLAIN, "device", "_get_layout"):
            return _UnreadObject(self.name)
        if self.name == "_rebuild_from_type_v2":
            return _of_type(*args[:4])
        raise _RefusedError(f"it calls {self.name!r:.80}, which gptkit does not allow")


class _Table(dict[Any, Any]):
    """A stand-in for OrderedDict. It ignores attributes, such as `_metadata` of a state dict."""

    def __setstate__(self, state: Any) -> None:
        pass


class _UnreadObject(NamedTuple):
    """A stand-in for a tensor or object that this process does not read."""

    name: str  # the function or class that would make it

    def __setstate__(self, state: Any) -> None:
        pass


class _PickledStorage:
    """The place of a torch storage: its data are the `nbytes` bytes of the file from offset `start`."""

    def __init__(self, element: str, start: int, nbytes: int) -> None:
        self.element, self.start, self.nbytes = element, start, nbytes

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError("it stores a tensor's data in a way that gptkit does not support")


class _PickledTensor(NamedTuple):
    """A tensor, which is a view of a storage. Offset, shape and strides count elements."""

    storage: _PickledStorage
    offset: int
    shape: list[int]
    strides: list[int]
    element: str

    def __setstate__(self, state: Any) -> None:
        pass


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, element: Any = None) -> _PickledTensor:
    """Stand in for torch._utils._rebuild_tensor.

    The process that asked checks later that the tensor is inside the file. `element` is the dtype, by default that of
    the storage.
    """
    shape, strides = list(shape), list(strides)
    if not isinstance(storage, _PickledStorage) or len(shape) != len(strides) or len(shape) > _MAX_DIMS:
        raise _RefusedError("it makes a tensor differently from torch")
    if any(type(value) is not int or not 0 <= value < _MAX_INTEGER for value in (offset, *shape, *strides)):
        raise _RefusedError("a tensor has invalid sizes or strides")
    if element is not None and not (isinstance(element, _Known) and element.element):
        raise _RefusedError("a tensor has no element type")
    return _PickledTensor(storage, offset, shape, strides, storage.element if element is None else element.element)


class _Shard(NamedTuple):
    """A rank's part of a tensor (a DTensor)."""

    local: _PickledTensor
    """The part."""
    shape: list[int]
    """The shape of the whole tensor."""
    placements: list[int | None]
    """For every dimension of the device mesh, the dimension of the tensor that is split over it.

    None means that the tensor is replicated over this dimension of the mesh.
    """
    coordinate: list[int] | None
    """The rank's position in the mesh, or None if the file does not have it."""


def _of_type(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Stand in for torch._tensor._rebuild_from_type_v2.

    Return the tensor that torch would make: a plain tensor, or the part of a DTensor. Extra attributes are dropped.
    """
    if isinstance(kind, _Known) and kind.name == "class":
        return make(*args)
    if getattr(kind, "__name__", "") != "DTensor":
        raise _RefusedError(f"a tensor has a class that gptkit cannot read ({getattr(kind, '__name__', ''):.80})")
    local, spec = _attribute(state, "_local_tensor"), _attribute(state, "_spec")
    mesh, placements = _attribute(spec, "mesh"), _attribute(spec, "placements")
    if not isinstance(local, _PickledTensor) or not isinstance(placements, tuple) or len(placements) > _MAX_DIMS:
        raise _RefusedError("it describes a part of a tensor differently from torch")
    splits: list[int | None] = []
    for placement in placements:
        dim = _attribute(placement, "dim")
        if not (_is(placement, "Shard") and type(dim) is int) and not _is(placement, "Replicate"):
            raise _RefusedError(
                f"a tensor is split over ranks in a way that gptkit cannot read ({type(placement).__name__})"
            )
        splits.append(dim if _is(placement, "Shard") else None)
    place = _attribute(mesh, "_coordinate_on_dim")
    return _Shard(local, _sizes(args[2]), splits, None if place is None else _sizes(place))


def _attribute(value: Any, name: str) -> Any:
    """Return the value of an attribute in an object's pickled state, or None if it has no such attribute."""
    state = value.state if isinstance(value, _Stand) else value
    parts = state if isinstance(state, tuple) else (state,)
    return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


_KNOWN: dict[tuple[str, str], _Known] = {
    (module, name): _Known(name)
    for module, names in (
        ("collections", ("OrderedDict",)),
        ("builtins", ("set",)),
        ("__builtin__", ("set",)),
        ("torch", ("Size", "device")),
        ("torch.serialization", ("_get_layout",)),
        ("torch._utils", ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", *_PARAMETERS, *_NOT_PLAIN)),
        ("torch._tensor", ("_rebuild_from_type_v2",)),
    )
    for name in names
}
"""(module, name) of every class and function that a pickle may name -> its stand-in."""
_KNOWN |= {place: _Known("class") for place in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))}
_KNOWN["torch.storage", "UntypedStorage"] = _Known("storage", _STORAGES["Untyped"])
_KNOWN |= {("torch", f"{name}Storage"): _Known("storage", element) for name, element in _STORAGES.items()}
_KNOWN |= {("torch", name): _Known("dtype", element) for name, element in _ELEMENTS.items()}


class _ArchivePart:
    """A file object that contains bytes `start` to `end` (exclusive) of another open file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._end, self._at = file, start, end, start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        if base + offset < self._start:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self.tell()

    def tell(self) -> int:
        return self._at - self._start

    def read(self, count: int = -1) -> bytes:
        remaining = max(0, self._end - self._at)
        self._file.seek(self._at)
        data = self._file.read(remaining if count < 0 else min(count, remaining))
        self._at += len(data)
        return data


class _Reader(pickle.Unpickler):
    """An unpickler for plain data and tensors. It imports nothing.

    This is Python's unpickler in C, which is only safe in confined processes, because one opcode can use any amount of
    memory. In a stream, the place of a storage is not yet known when the pickle is read. The attribute `storages` has
    all storages of a stream, whose places are filled in later.
    """

    def __init__(
        self,
        file: IO[bytes],
        prefix: str = "",
        places: Mapping[str, tuple[int, int]] | None = None,
        names: Mapping[tuple[str, str], Any] | None = None,
    ) -> None:
        """Prepare to read the pickle in `file`.

        Args:
            file: the pickle.
            prefix: the folder of all members inside the archive, such as "archive/".
            places: the offset and length of every member of the archive in bytes, by name; None for a stream.
            names: (module, name) of every class and function that the pickle may name -> its stand-in.
        """
        super().__init__(file)
        self._prefix, self._places, self._names = prefix, places, _KNOWN if names is None else names
        self.storages: dict[str, _PickledStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name == "MCoreMetadata" and module.startswith("megatron.core."):
            module, name = "torch.distributed.checkpoint.metadata", "Metadata"
        if (module, name) not in self._names and self._names is _KNOWN and f"{module}.".startswith(_BESIDE):
            return type(name, (_Stand,), {})
        if (module, name) not in self._names:
            raise _RefusedError(f"it uses {f'{module}.{name}'!r:.120}, which plain weights do not need")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> _PickledStorage:
        rest = (None,) if self._places is None else ()
        known = isinstance(pid, tuple) and len(pid) > 4 and pid[0] == "storage" and pid[5:] == rest
        kind, key, _, count = pid[1:5] if known else (None,) * 4
        # litgpt numbers its storages with integers, torch with strings.
        name = str(key) if type(key) is int and 0 <= key < _MAX_INTEGER and self._places is not None else key
        if not isinstance(kind, _Known) or not kind.element or type(count) is not int:
            raise _RefusedError("it stores a tensor's data in a way that gptkit does not support")
        nbytes = count * _bytes_of(kind.element)
        if self._places is None:
            if not isinstance(name, str) or not 0 <= count < _MAX_INTEGER:
                raise _RefusedError("it stores a tensor's data in a way that gptkit does not support")
            storage = self.storages.setdefault(name, _PickledStorage(kind.element, 0, nbytes))
            if (storage.element, storage.nbytes) != (kind.element, nbytes):
                raise _RefusedError(f"storage {key!r:.40} has two different sizes")
            return storage
        place = self._places.get(f"{self._prefix}data/{name}") if isinstance(name, str) else None
        if place is None:
            raise _RefusedError(f"the data of storage {key!r:.40} is missing")
        if not 0 <= nbytes <= place[1]:
            raise _RefusedError(f"storage {key!r:.40} claims {count:,} elements, but has {place[1]:,} bytes")
        return _PickledStorage(kind.element, place[0], nbytes)

    def get_extension(self, code: int) -> Any:
        raise _RefusedError(f"it uses the pickle extension {code}, which plain weights do not need")


def _bytes_of(element: str) -> int:
    """Return the size in bytes of one element of a dtype. The name of the dtype contains its number of bits."""
    return 1 if element == "BOOL" else int("".join(filter(str.isdigit, element.partition("_")[0]))) // 8


def _load(reader: _Reader) -> Any:
    """Return the value in the reader's pickle. Raises _RefusedError."""
    try:
        return reader.load()
    except (_RefusedError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise any error
        raise _RefusedError(f"its pickle is damaged: {type(error).__name__}: {error!s:.120}") from error


def answer(question: str | tuple[str, int, int | None] | tuple[str]) -> Any:
    """Return the content of a file as JSON, in the form that the module's docstring describes.

    A question with only a path (text) is about `.metadata`, and a list with only a path about an .npz archive. A
    question (path, start, nbytes) is about a part of a file that torch.save wrote; nbytes is None for a whole file.
    """
    if isinstance(question, str):
        return _metadata(question)
    if len(question) == 1:
        return _arrays(*question)
    path, start, nbytes = question
    allow(0, _COSTS)
    with open(path, "rb") as file:  # noqa: PTH123, as few imports as can be
        size = os.fstat(file.fileno()).st_size
        if nbytes is None and file.read(1) == pickle.PROTO:
            return _Plain().of(_stream(file, size), 0)
        size = size if nbytes is None else nbytes
        return _Plain().of(_archived(_ArchivePart(file, start, start + size), size), 0)


def reason(error: BaseException) -> str:
    """Return a text for the user that says why a file could not be read."""
    if isinstance(error, _RefusedError):
        return str(error)
    if isinstance(error, MemoryError):
        return "needs more memory than the names and shapes of tensors can take"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return f"is damaged: {type(error).__name__}: {error!s:.120}"


def _allow(nbytes: int) -> None:
    """Set the limits of memory and CPU time for a pickle of `nbytes` bytes. Raises _RefusedError if it is too large."""
    if nbytes > _MAX_PICKLE:
        raise _RefusedError(f"has a pickle of {nbytes:,} bytes, too many for the names and shapes of tensors")
    allow(nbytes, _COSTS)


def _archived(file: _ArchivePart, size: int) -> Any:
    places = _members(file, size)
    pickles = [name for name in places if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise _RefusedError(f"is not an archive that torch.save writes: it has {len(pickles)} files data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    order = places.get(prefix + "byteorder")
    if order is not None:
        file.seek(order[0])
        if file.read(min(order[1], 16)) != b"little":
            raise _RefusedError("was written on a big-endian machine")
    start, nbytes = places[pickles[0]]
    _allow(nbytes)
    file.seek(start)
    return _load(_Reader(io.BytesIO(file.read(nbytes)), prefix, places))


class _Plain:
    """Converts unpickled values to JSON.

    It refuses more than `_MAX_VALUES` values, because a pickle may refer to one object many times.
    """

    def __init__(self) -> None:
        self._values, self._text = _MAX_VALUES, _MAX_TEXT

    def of(self, value: Any, depth: int) -> Any:
        self._values -= 1
        self._text -= len(value) if isinstance(value, str) else 0
        if self._values < 0 or self._text < 0 or depth > _MAX_DEPTH:
            raise _RefusedError("contains too many values for a checkpoint")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            return value if abs(value) < _MAX_INTEGER else {"other": "int"}
        if isinstance(value, dict):
            return {"dict": [[self.of(k, depth + 1), self.of(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, _Known | _UnreadObject):
            return {"other": value.name}
        if isinstance(value, _Shard):
            return {"shard": [self.of(value.local, depth), value.shape, value.placements, value.coordinate]}
        if isinstance(value, _PickledTensor):
            self._values -= 2 * len(value.shape)
            at = (value.offset, value.storage.start, value.storage.nbytes)
            return {"tensor": [value.element, value.shape, value.strides, *at]}
        if isinstance(value, _Stand) and type(value).__name__ == "Namespace" and isinstance(value.state, dict):
            return self.of(value.state, depth)  # argparse.Namespace, the arguments of a program
        if isinstance(value, list | tuple):
            return {"list": [self.of(item, depth + 1) for item in value]}
        return {"other": type(value).__name__}


# --- numpy's archives of arrays, as MLX writes them -------------------------------------------------------------------

_DTYPES = {"f": "F", "i": "I", "u": "U"}


def _arrays(path: str) -> dict[str, Any]:
    """Return the arrays of an .npz file, as the JSON form of a dictionary of tensors."""
    allow(0, _COSTS)
    with open(path, "rb") as file:  # noqa: PTH123, as few imports as can be
        size = os.fstat(file.fileno()).st_size
        entries = []
        for name, (start, nbytes) in _members(_ArchivePart(file, 0, size), size, "numpy.savez").items():
            file.seek(start)
            key = name.removesuffix(".npy")
            entries.append([key, _array(key, file.read(min(nbytes, 4096)), start, nbytes)])
    if len(entries) > _MAX_VALUES // 16:
        raise _RefusedError("contains too many values for a checkpoint")
    return {"dict": entries}


def _array(name: str, head: bytes, start: int, nbytes: int) -> dict[str, Any]:
    """Return the JSON form of an array from its .npy file inside an .npz file.

    Args:
        name: the name of the array.
        head: the first bytes of the .npy file, with its header.
        start: the offset of the .npy file in the .npz file, in bytes.
        nbytes: the size of the .npy file.
    """
    import re

    length, at = (head[8:10], 10) if head[6:7] == b"\1" else (head[8:12], 12)
    end = at + int.from_bytes(length, "little")
    text = head[at:end].decode("latin-1").strip()
    header = re.fullmatch(
        r"\{'descr': '[<|]([fiub])(\d)', 'fortran_order': (True|False), 'shape': \(((?:\d{1,19},? ?)*)\),? ?\}", text
    )
    if head[:6] != b"\x93NUMPY" or end > len(head) or header is None:
        raise _RefusedError(f"contains {name!r:.80}, which is not a plain array of numbers")
    kind, width, fortran, sizes = header.groups()
    element = "BOOL" if kind == "b" else f"{_DTYPES[kind]}{8 * int(width)}"
    shape = _sizes([int(size) for size in sizes.replace(" ", "").split(",") if size])
    strides = [1] * len(shape)
    order = range(len(shape)) if fortran == "True" else range(len(shape) - 1, -1, -1)
    step = 1
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    return {"tensor": [element, shape, strides, 0, start + end, nbytes - end]}


# --- the stream before torch 1.6 -------------------------------------------------------------------------------------


def _stream(file: BinaryIO, size: int) -> Any:
    """Return the value in a file of the older format of torch.save. Raises _RefusedError.

    The file has five pickles, followed by the number of elements and the data of every storage.
    """
    file.seek(0)
    part = io.BytesIO(file.read(min(size, _MAX_PICKLE)))
    _allow(min(size, _MAX_PICKLE))
    if _load(_Reader(part)) != 0x1950A86A20F9469CFC6C or _load(_Reader(part)) != 1001:
        raise _RefusedError("is a pickle that torch.save did not write")
    machine = _load(_Reader(part))
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise _RefusedError("was written on a big-endian machine")
    reader = _Reader(part)
    value = _load(reader)
    keys = _load(_Reader(part))
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _RefusedError("has no list of its storages (the data of its tensors)")
    if len(keys) != len(reader.storages) or set(keys) != set(reader.storages):
        raise _RefusedError("does not contain the data of all its tensors")
    file.seek(part.tell())
    for key in keys:
        storage = reader.storages[key]
        head = file.read(8)
        storage.start = file.tell()
        if len(head) < 8 or storage.start + storage.nbytes > size:
            raise _RefusedError(f"is truncated: storage {key!r:.40} exceeds the file, {size:,} bytes found")
        if struct.unpack("<q", head)[0] * _bytes_of(storage.element) != storage.nbytes:
            raise _RefusedError(f"storage {key!r:.40} has a size that does not match its tensors")
        file.seek(storage.nbytes, os.SEEK_CUR)
    return value


# --- the metadata of a distributed checkpoint: only names, numbers and places of torch's objects ---

_MAX_METADATA = 2**28  # bytes; a thousand tensors of a thousand chunks take a third of this
_METADATA_COSTS = (MEMORY, 32, 3.0, 1 / 2**20)


_BESIDE = (
    *("torch.distributed.", "torch.optim.", "deepspeed.", "megatron.", "lightning.", "pytorch_lightning."),
    *("lightning_fabric.", "lightning_utilities.", "accelerate.", "transformers.", "omegaconf.", "argparse."),
    *("pathlib.", "numpy.", "_codecs.", "enum.", "datetime.", "functools.", "signal.", "types.", "_io."),
)
"""Packages whose objects training programs pickle together with weights.

Stand-ins replace these objects (`_Stand`). The packages are not imported.
"""


class _Stand:
    """A stand-in for an object of any class."""

    state: Any = None  # the pickled attributes of the object

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *_: Any) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
_NAMES = {**_KNOWN, **{(path, name): type(name, (_Stand,), {}) for path, names in _CLASSES.items() for name in names}}
"""(module, name) of every class and function that `.metadata` may name -> its stand-in."""


def _metadata(path: str) -> list[list[Any]]:
    """Return [tensors, names of other entries] of a distributed checkpoint's `.metadata`.

    Raises _RefusedError, OSError.

    A tensor is [name, dtype, shape, chunks]. A chunk is [its offsets in the tensor, its shape, name of the file, offset
    in the file, number of bytes in the file].
    """
    with open(path, "rb") as file:  # noqa: PTH123, as few imports as can be
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_METADATA:
            raise _RefusedError(f"has more than {_MAX_METADATA:,} bytes")
        allow(size, _METADATA_COSTS)
        content = _load(_Reader(io.BytesIO(file.read(size)), names=_NAMES))
    try:
        return _entries(content)
    except _RefusedError as error:
        raise _RefusedError(f": {error}") from error


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Stand) and type(value).__name__ == name


def _entries(_metadata: Any) -> list[list[Any]]:
    if not _is(_metadata, "Metadata"):
        raise _RefusedError("it contains no metadata of torch.distributed.checkpoint")
    entries, places = _metadata.get("state_dict_metadata"), _metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise _RefusedError("its tensors or their places are missing")
    at: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in places.items():
        if not _is(index, "MetadataIndex") or not _is(place, "_StorageInfo"):
            raise _RefusedError("it describes the position of an entry differently from torch")
        name, offset = index.get("fqn"), index.get("offset")
        if isinstance(name, str) and offset is not None:
            at[name, tuple(_sizes(offset))] = place
    tensors: list[Any] = []
    others: list[Any] = []
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise _RefusedError("the name of an entry is not text")
        if _is(entry, "BytesStorageMetadata"):
            others.append(name)
            continue
        if not _is(entry, "TensorStorageMetadata"):
            raise _RefusedError(f"{name!r:.80} is neither a tensor nor an object")
        properties, boxes = entry.get("properties"), entry.get("chunks")
        state = properties.state if _is(properties, "TensorProperties") else None
        kind = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else 0
        if not isinstance(kind, _Known) or not kind.element or not isinstance(boxes, list):
            raise _RefusedError(f"{name!r:.80} has no dtype or no chunks")
        chunks = [_chunk(name, box, at) for box in boxes]
        tensors.append([name, kind.element, _sizes(entry.get("size")), chunks])
    return [tensors, others]


def _chunk(name: str, box: Any, at: dict[tuple[str, tuple[int, ...]], Any]) -> list[Any]:
    if not _is(box, "ChunkStorageMetadata"):
        raise _RefusedError(f"{name!r:.80} has an invalid chunk")
    offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
    place = at.get((name, tuple(offsets)))
    if place is None:
        raise _RefusedError(f"{name!r:.80}: the position of its chunk at {offsets} in the files is missing")
    if transforms := place.get("transform_descriptors"):
        raise _RefusedError(f"{name!r:.80} was written through an extension ({transforms})")
    file, start, nbytes = place.get("relative_path"), place.get("offset"), place.get("length")
    if not isinstance(file, str) or type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
        raise _RefusedError("a chunk has an invalid file or position")
    return [offsets, sizes, file, start, nbytes]


def _sizes(value: Any) -> list[int]:
    sizes = list(value) if isinstance(value, list | tuple) and len(value) <= _MAX_DIMS else [-1]
    if any(type(number) is not int or not 0 <= number < _MAX_INTEGER for number in sizes):
        raise _RefusedError("it contains invalid sizes")
    return sizes
