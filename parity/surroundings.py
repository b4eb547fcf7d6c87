"""Compare everything but the weights of two checkpoints: the component trees, config.json and the tokenizer's files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..components import ModelSpec, differences, without_rounding
from ..components.ranges import number_ranges
from ..converter.checkpoint import Checkpoint, TensorFiles
from ..converter.companions import companions_in, is_licence
from ..converter.dtypes import to_float64
from ..converter.vocabulary import Vocabulary
from ..errors import InvalidInput

MOST_BYTES = 64 * 2**20  # a larger tokenizer.json is compared by bytes, not by tokens
_TOLD = 4  # the number of names in a line


@dataclass(frozen=True)
class TreeChange:
    """A field of a component that has different values in models A and B."""

    path: str  # the field's path, "blocks.*.…" inside layers
    layers: str | None  # the numbers of the layers that differ, such as "0-3"; None outside of layers
    a: str  # A's value in words
    b: str  # B's value in words
    rounding: bool = False  # whether the field only affects rounding


@dataclass(frozen=True)
class FileChange:
    """A small file, such as config.json, that differs between two checkpoints or that only one of them has."""

    name: str
    only: str | None  # the side ("a", "b") that has the file
    told: tuple[str, ...] = ()  # the differences in words


def changed_tree(a: ModelSpec, b: ModelSpec) -> list[TreeChange]:
    """Return the fields that differ between two component trees. Layers are paired by number.

    The same difference in several layers is one item of the list.
    """
    grouped: dict[tuple[str, str, str], list[int]] = {}
    layers = min(len(a.blocks), len(b.blocks))
    tree_a, tree_b = (msgspec.structs.replace(tree, blocks=tree.blocks[:layers]) for tree in (a, b))
    changed = [("layers", len(a.blocks), len(b.blocks))] if len(a.blocks) != len(b.blocks) else []
    function = {"layers", *(path for path, _, _ in differences(without_rounding(tree_a), without_rounding(tree_b)))}
    for path, x, y in [*changed, *differences(tree_a, tree_b)]:
        parts = path.split(".")
        layer = int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 else None
        key = path if layer is None else ".".join(["blocks", "*", *parts[2:]])
        grouped.setdefault((key, _words(x), _words(y)), []).extend([] if layer is None else [layer])
    changes = []
    for (path, x, y), where in grouped.items():
        rounding = path.replace("*", f"{min(where, default='*')}") not in function
        changes.append(TreeChange(path, number_ranges(where) or None, x, y, rounding))
    return changes


def same_layers(a: Checkpoint, b: Checkpoint) -> list[int | None] | None:
    """Find layers that moved, for models with different numbers of layers.

    Two layers are the same if one row of their first output projections is equal.

    Returns:
        For each layer of B, the layer of A with the same weights, or None for a new layer. The result is None if no
        layer moved, or if the layers of a model are too similar to each other to decide.
    """
    if len(a.spec.blocks) == len(b.spec.blocks):
        return None
    ours, theirs = _rows_of(a), _rows_of(b)
    places = {row: layer for layer, row in enumerate(ours)}
    if not ours or not theirs or len(places) < len(ours) or len(set(theirs)) < len(theirs) // 2:
        return None
    layers = [places.get(row) for row in theirs]
    moved = any(layer not in (None, index) for index, layer in enumerate(layers))
    return layers if moved else None


def _rows_of(checkpoint: Checkpoint) -> list[bytes]:
    """Return one row of each layer's first output projection, as the bytes of fp64 values.

    Return an empty list if a layer has no output projection.
    """
    names: dict[int, str] = {}
    for parameter in checkpoint.spec.parameters():
        if parameter.layer is not None and parameter.role == "writes":
            names.setdefault(parameter.layer, parameter.name)
    if len(names) < len(checkpoint.spec.blocks) or any(name in checkpoint.missing for name in names.values()):
        return []
    rows = []
    for name in names.values():
        array, dtype = checkpoint.tensor(name)
        rows.append(to_float64(array[0], dtype).tobytes())
        checkpoint.release()
    return rows


def _words(value: Any) -> str:
    """Return a field's value in words. For a component, this is the name of its class."""
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def changed_files(a: TensorFiles, b: TensorFiles) -> list[FileChange]:
    """Return the differences of config.json and the tokenizer's files.

    The list is empty if one checkpoint has no such files. If one of them is a GGUF, only the tokens are compared.
    """
    stored = all(side.format in ("hf", "local") for side in (a, b))
    try:
        ours, theirs = _texts(a), _texts(b)
    except InvalidInput as error:  # a broken tokenizer must not stop the comparison
        return [FileChange("tokenizer.json", None, (f"cannot be read: {error.message}",))]
    changes = []
    for name in sorted({*ours, *theirs} if stored else {"tokenizer.json"} & {*ours} & {*theirs}):
        if name not in ours or name not in theirs:
            if ours and theirs:
                changes.append(FileChange(name, "b" if name not in ours else "a"))
            continue
        x, y = ours[name], theirs[name]
        words = what_differs(name, x, y)
        if words or (words is not None and stored):
            changes.append(FileChange(name, None, words))
    return changes


def _texts(checkpoint: TensorFiles) -> Mapping[str, bytes]:
    """Return the contents of a checkpoint's small files by name, without licences. A GGUF stores
    them in its metadata.
    """
    paths = {file.name: file.path for file in companions_in(checkpoint.folder) if not is_licence(file.name)}
    stored = checkpoint.format in ("hf", "local")
    texts = {name: bytes_of(path) for name, path in paths.items()} if stored else dict(checkpoint.texts)
    config = checkpoint.origin.config_text
    return texts if config is None else {**texts, "config.json": config.encode()}


def bytes_of(path: Path) -> bytes:
    """Return the content of a file. Of a file above `MOST_BYTES`, return the first bytes and then the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return file.read() if size <= MOST_BYTES else file.read(MOST_BYTES) + str(size).encode()


def what_differs(name: str, x: bytes, y: bytes) -> tuple[str, ...] | None:
    """Return, in words, how two versions of a file differ; None if only the formatting of the JSON differs.

    The result is empty if the file is not a JSON object. `x` and `y` are the contents.
    """
    if x == y:
        return None
    try:
        data_x, data_y = json.loads(x), json.loads(y)
    except (ValueError, RecursionError):
        return ()
    if data_x == data_y:
        return None
    if not isinstance(data_x, dict) or not isinstance(data_y, dict):
        return ()
    return (_vocabularies if name == "tokenizer.json" else _keys)(data_x, data_y)


def _keys(data_a: dict[str, Any], data_b: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys that differ between two JSON objects, each with both values in short form.

    Some fields have other names in transformers 5 than in transformers 4. If only the name differs, the text says so.
    """

    def short(data: dict[str, Any], key: str) -> str:
        text = json.dumps(data[key], ensure_ascii=False) if key in data else "absent"
        return text if len(text) <= 40 else text[:37] + "…"

    keys = [key for key in {**data_a, **data_b} if key not in data_a or key not in data_b or data_a[key] != data_b[key]]
    spellings = []
    for names, meaning in _SPELLINGS:
        if meaning(data_a) == meaning(data_b) and any(key in names for key in keys):
            ours, theirs = (" and ".join(key for key in names if key in side) or "nothing" for side in (data_a, data_b))
            spellings.append(f"{ours} → {theirs}: another spelling of the same values")
            keys = [key for key in keys if key not in names]
    return (*(f"{key}: {short(data_a, key)} → {short(data_b, key)}" for key in keys), *spellings)


def _rope(config: dict[str, Any]) -> Any:
    """Return the RoPE fields of a config.json as `rope_parameters`, which transformers 5 uses."""
    parts = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        return [config.get(name) for name in _ROPE]
    # The base may be in both places, and a scaling may have both the old and the new key of its type.
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_theta" in config:
        rope["rope_theta"] = config["rope_theta"]
    for part in parts:
        rope |= {"rope_type" if key == "type" else key: value for key, value in part.items()}
    return rope


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_SPELLINGS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]], ...] = (
    (_ROPE, _rope),
    (("torch_dtype", "dtype"), lambda config: config.get("dtype") or config.get("torch_dtype")),
)
"""Keys of a config.json that transformers 4 and 5 spell differently, with a function for their common meaning."""


def _vocabularies(data_a: dict[str, Any], data_b: dict[str, Any]) -> tuple[str, ...]:
    """Return, in words, how two tokenizers differ.

    This covers the tokens that were added, removed or have another id, the merges, and other parts.
    """
    x, y = _tokens(data_a), _tokens(data_b)
    if x is None or y is None:
        return ()
    merges = _merges(data_a) == _merges(data_b)
    parts = _other_parts(data_a, data_b, x == y)
    other_parts = [f"other parts that differ: {', '.join(parts)}"] if parts else []
    if x == y:
        agree = "token ids agree: the vocabulary and the merges are equal"
        return (
            agree if merges else "the vocabulary is equal, but merges differ: a text may get different token ids",
            *other_parts,
        )
    added, removed = [token for token in y if token not in x], [token for token in x if token not in y]
    moved = [token for token in x if token in y and x[token] != y[token]]
    lines = []
    for words, tokens in (("added", added), ("gone", removed), ("with another id", moved)):
        shown = ", ".join(json.dumps(token, ensure_ascii=False) for token in tokens[:_TOLD])
        count = f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'} {words}"
        lines += [f"{count}: {shown}{', …' if len(tokens) > _TOLD else ''}"] if tokens else []
    return (*lines, "the merges are equal" if merges else "the merges differ", *other_parts)


def _other_parts(data_a: dict[str, Any], data_b: dict[str, Any], same_ids: bool) -> list[str]:
    """Return the names of the parts of two tokenizer.json that differ, besides token ids and merges.

    `same_ids` says whether the token ids are the same.
    """
    known = {"model", "version"} if same_ids else {"model", "version", "added_tokens"}  # version: of the file's format
    parts = [key for key in {**data_a, **data_b} if key not in known and data_a.get(key) != data_b.get(key)]
    models = [data["model"] if isinstance(data.get("model"), dict) else {} for data in (data_a, data_b)]
    scored = same_ids and isinstance(models[0].get("vocab"), list)  # a list has a score for every token
    known = {"merges"} if scored else {"merges", "vocab"}
    keys = [key for key in {**models[0], **models[1]} if key not in known]
    return parts + [f"model.{key}" for key in keys if models[0].get(key) != models[1].get(key)]


def _merges(data: dict[str, Any]) -> Any:
    """Return the merges of a tokenizer.json as pairs of tokens.

    Files that were written before tokenizers 0.20 store a pair as one string.
    """
    model = data.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        return merges
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _tokens(data: dict[str, Any]) -> dict[str, int] | None:
    """Return the ids of all tokens of a tokenizer.json; None if gptkit does not know the file's structure."""
    try:
        return Vocabulary({**data, "added_tokens": data.get("added_tokens") or ()}, {}).tokens
    except (LookupError, TypeError, ValueError):
        return None
