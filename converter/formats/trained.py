"""Read checkpoints of training programs: pickles of torch.save, whole or one file per rank, and .npz archives.

gptkit recognises them by their content. It looks for a dictionary of tensors, at any depth, such as Lightning's
`state_dict` or DeepSpeed's `module`. The tensor names are those of the model family in config.json, or those of another
training program (`architectures.stacks`). They may have the prefix of a wrapper (torch.compile, DDP, FSDP, Lightning,
peft).

Pickles are only read if the user allows them, in a confined process. The tree of components comes from a config file in
the folder, so no pickle is needed for it. `ranks` joins the files of several ranks. If a file contains two models,
gptkit raises an error that names both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...architectures import Architecture, named
from ...architectures.stacks import STACKS, Stack
from ...components import ModelSpec, differences, without_rounding
from ...components.ranges import some_of
from ...errors import CheckpointError, ConfigError, InvalidInput, shown
from ..companions import TRAINING_STATE
from ..names import (
    CONFIG,
    INDEX,
    LOCAL_CONFIG,
    PICKLE_INDEX,
    PICKLE_SINGLE,
    POINTER,
    SINGLE,
    is_folder,
    plain_file,
    refuse_pointer,
    stated_name,
    untrusted,
)
from ..tree import Origin, read_description
from . import Opened
from .stack_weights import ONE, leaves_of, without_buffers

plan = None
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".npz")
_PLAIN = (".npz", ".safetensors")
"""The suffixes of weight files that contain no pickle."""
_HUGGING_FACE = {SINGLE, INDEX, PICKLE_SINGLE, PICKLE_INDEX, LOCAL_CONFIG}
_BEGINNINGS = (b"PK\3\4", b"\x80", POINTER)
"""The first bytes of an archive of torch.save, of a pickle, and of a git-lfs pointer that stands for such a file."""
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
"""The parts that wrappers such as torch.compile insert into tensor names."""
_STEPS = ("global_steps", "global_step", "iteration", "iter_num", "step", "epoch")
_NANOGPT, _LATEST = "ckpt.pt", "latest"
_CONSOLIDATED = "consolidated.safetensors"
"""The name of the weight file in Mistral's own format, whose config is params.json."""
_MAX_CONFIG = 2**15  # bytes of a config


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """Return the path if it is a checkpoint of a training program and not a Hugging Face checkpoint, else None.

    `names` are the names of the files in the folder `path`, or None if `path` is a file.
    """
    if names is None:
        return path if path.name not in _HUGGING_FACE and _looks_right(path) else None
    if names & _HUGGING_FACE or any(name.endswith(".safetensors") for name in names - {_CONSOLIDATED}):
        return None
    from . import megatron

    known = names & {_LATEST, megatron.LATEST} or megatron.files_of(path) or _weights_among(path, names)
    return path if known else None


def _looks_right(path: Path) -> bool:
    """Return whether the suffix of a file is one of weight files.

    A .bin file may be anything, so its first bytes must also be those of a file of torch.save.
    """
    if not path.name.endswith(".bin"):
        return path.name.endswith(_SUFFIXES)
    with suppress(CheckpointError), plain_file(path) as file:
        return file.read(len(POINTER)).startswith(_BEGINNINGS)
    return False


def _weights_among(folder: Path, names: frozenset[str]) -> list[str]:
    """Return those names of files in a folder that are weight files."""
    for name in (_NANOGPT, _CONSOLIDATED):
        if name in names:
            return [name]
    candidates = sorted(name for name in names if not name.startswith(TRAINING_STATE) and _looks_right(folder / name))
    states = [name for name in candidates if name.endswith("_model_states.pt")]
    return states or candidates


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """Return the tree of components, its origin and the unknown config fields, from a config file next to the weights.

    Raises:
        UntrustedInput: there is no config file, and the weights are a pickle. InvalidInput: the config cannot be read.
    """
    folder, files = _files(path)
    refuse_pointer(files[0])
    description = _tree(folder)
    if description is None and files[0].name == _CONSOLIDATED:
        raise _no_config(files[0], "params.json")
    if description is None:
        raise untrusted(files[0], f"If you trust its author, convert it first: gptkit convert {path} --allow-pickle")
    return description


def _files(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder of the weight files, and these files.

    If `path` is the folder of a training run, the folder of its latest step is used.
    """
    from . import megatron

    if path.is_file():
        return path.parent, [path]
    path = megatron.step_in(path) or path
    if ranks := megatron.files_of(path):
        return path, ranks
    names = frozenset(entry.name for entry in path.iterdir() if entry.is_file())
    if not _weights_among(path, names) and _LATEST in names:
        inside = path / stated_name(path / _LATEST)
        if inside.parent != path or inside.name in ("", ".", "..") or not is_folder(inside):
            raise CheckpointError(
                f"{path / _LATEST} names a folder that does not exist", "Download or copy the checkpoint again."
            )
        names = frozenset(entry.name for entry in inside.iterdir() if entry.is_file())
        path = inside
    files = [path / name for name in _weights_among(path, names)]
    if not files:
        raise CheckpointError(f"{path} contains no weights")
    return path, files


def _text(path: Path) -> str:
    with plain_file(path) as file:
        data = file.read(_MAX_CONFIG + 1)
    if len(data) > _MAX_CONFIG:
        raise CheckpointError(f"{path} has more than {_MAX_CONFIG:,} bytes, too many for a config")
    return data.decode("utf-8", "replace")


# --- configs in the same folder ---


def _tree(
    folder: Path,
    stack: Stack | None = None,
    rows: int | None = None,
    tied: bool | None = None,
    inside: Mapping[str, Any] | None = None,
) -> tuple[ModelSpec, Origin, list[str]] | None:
    """Return the tree of components, its origin and the unknown config fields, from a config file next to the weights.

    Return None if there is no config file, or if it does not say enough.

    Args:
        folder: the folder of the weights.
        stack: the training program whose config is looked for; None accepts the config of any program.
        rows: the number of rows of the embedding, for programs whose config does not state it.
        tied: whether the head is tied to the embedding, for programs whose config does not state it.
        inside: a config that is stored in the weight file. It has precedence over config files.
    """
    if inside is not None and stack is not None:
        return _with_head(*_described(stack.config(inside, rows)), bool(tied))
    stacks = {candidate.file: candidate for candidate in (STACKS if stack is None else (stack,))}
    configs = [(candidate, path) for pattern, candidate in stacks.items() for path in sorted(folder.glob(pattern))]
    if len(configs) > 1:
        raise InvalidInput(f"{folder} contains several configs: {some_of([path.name for _, path in configs], 4)}", ONE)
    hf = _theirs(folder)
    if not configs:
        return hf if hf is None or tied is None else _with_head(*hf, tied)
    stated = configs[0][0].config(_parsed(configs[0][1]), rows)
    if stated["vocab_size"] is None:
        return hf  # only the weights say how many rows there are
    spec, origin, _ = _with_head(*_described(stated), bool(tied))
    if hf is None:
        return spec, origin, []
    hf_spec, own_spec = without_rounding(hf[0]), without_rounding(spec)
    other = [path for path, *_ in differences(hf_spec, own_spec) if path not in ("head.tied", "context_length")]
    if other:
        what = some_of(other, 3, ", …")
        raise InvalidInput(f"{folder}: {configs[0][1].name} and {CONFIG} describe different models ({what})", ONE)
    return _with_head(*hf, bool(tied))


def _theirs(folder: Path) -> tuple[ModelSpec, Origin, list[str]] | None:
    """Return what `describe` returns, from a Hugging Face config.json. Return None if there is none."""
    file = next((place / CONFIG for place in _places(folder) if (place / CONFIG).is_file()), None)
    return None if file is None else read_description(file, file.parent, folder=True)


def _places(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which config.json and the tokenizer may be, for weights in `folder`.

    These are the folder itself, its subfolder `huggingface` (as in verl), and its parent if it is the folder of a
    DeepSpeed run.
    """
    return (folder, folder / "huggingface", *((folder.parent,) if (folder.parent / _LATEST).is_file() else ()))


def _home(folder: Path) -> Path | None:
    """Return the folder with the tokenizer's files, for weights in `folder`, or None if there are none."""
    from ..tokenizer import token_files

    return next((place for place in _places(folder) if place.is_dir() and token_files(place)), None)


def _described(config: dict[str, Any]) -> tuple[ModelSpec, Origin, list[str]]:
    family = named(config["model_type"])
    config = {**config, "architectures": [family.hf_class]}
    spec, unknown = family.spec_and_unknown(config)
    return spec, Origin(family=family.name, config_text=json.dumps(config, indent=2) + "\n"), unknown


def _with_head(spec: ModelSpec, origin: Origin, unknown: list[str], tied: bool) -> tuple[ModelSpec, Origin, list[str]]:
    """Return a model in which the head is tied to the embedding if `tied` is true, and untied if it is false.

    A model without a config.json is returned unchanged.

    Args:
        spec: the tree of components.
        origin: the origin of the tree, with its config.json.
        unknown: the names of unknown config fields.
        tied: whether the head is tied.

    Returns:
        The new tree of components, its origin, and the unknown config fields.
    """
    if spec.tied == tied or origin.config is None:
        return spec, origin, unknown
    return _described({**origin.config, "tie_word_embeddings": tied})


def _parsed(path: Path) -> dict[str, Any]:
    """Return the fields of a config file in JSON or YAML."""
    from ..safetensors import parse_json_object

    text = _text(path)
    if path.suffix == ".json":
        return parse_json_object(text.encode(), str(path))
    from ..plain_yaml import read_yaml

    try:
        config = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]:.120}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"{path} is not a config: it must be a mapping of field names to values")
    return config


# --- reading ---


class _TrainedModel(NamedTuple):
    """Where a model is in the files of a training program."""

    where: tuple[str, ...]
    """The keys of nested dictionaries that lead to the model's tensors."""
    prefix: str
    """The prefix that all names of the model's tensors have."""
    stack: Stack | None
    """The training program whose tensor names these are; None if they are those of the model family."""

    def label(self) -> str:
        keys = "".join(f"[{shown(key, 40)}]" for key in self.where)
        whose = "" if self.stack is None else f" under {self.stack.name} names"
        return f"one in {keys or 'it'}{f' with the prefix {shown(self.prefix)}' if self.prefix else ''}{whose}"


def read(path: Path, allow_pickle: bool) -> Opened:
    """Open a checkpoint of a training program. Raises InvalidInput; UntrustedInput for a pickle that is not allowed."""
    from ..chunks import chunked
    from ..pickles import not_as_it_is
    from . import dcp, megatron, nanogpt, ranks

    step = megatron.step_in(path)
    if step is not None and (step / ".metadata").is_file():
        return dcp.read(step, allow_pickle)
    folder, files = _files(path)
    files = sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d{1,18}", file.name)])
    contents = _contents(files, allow_pickle)
    whole: Any = contents[0] if len(files) == 1 and isinstance(contents[0], dict) else {}
    inside = whole["model_args"] if isinstance(whole.get("model_args"), dict) else None
    if inside is not None and "dim" not in inside:
        return nanogpt.opened(files[0], whole)
    _same_step(files, contents)
    described = _theirs(folder)
    if megatron.files_of(folder) == files:
        joined = megatron.opened(folder, files, contents, None if described is None else described[0])
        return replace(joined, home=_home(folder))
    family = None if described is None or described[1].family is None else named(described[1].family)
    tables = [dict(ranks.tables(content)) for content in contents]
    model = _only(files, tables, described, family)
    if model is None:
        raise not_as_it_is(files[0], contents[0])
    own = [_named(table.get(model.where, {}), model.prefix) for table in tables]
    names = list(dict.fromkeys(name for table in own for name in table))
    rows = None if model.stack is None else _rows(own, model.stack.embedding)
    flat = ranks.partitioned(files, contents, own)
    description = _tree(folder, model.stack, rows, None if model.stack is None else False, inside)
    if description is None:
        raise _no_config(files[0], CONFIG if model.stack is None else f"{model.stack.file} or {CONFIG}")
    spec, origin, _ = description
    leaves = family.bind_files(spec, names) if model.stack is None and family else leaves_of(model.stack, spec)
    shapes = {leaf.checkpoint: leaf.shape for leaf in leaves}
    canonical = None if model.stack is not None or family is None else family
    known = {
        name: shapes.get((canonical.canonical_name(name, shapes, len(spec.blocks)) or "") if canonical else name)
        for name in names
    }
    weights = chunked({**ranks.joined(files, own, known), **flat})
    notes = _notes(model, tables, contents)
    if model.stack is not None:
        weights, tied = without_buffers(weights, model.stack, notes)
        if tied:
            spec, origin, _ = _tree(folder, model.stack, rows, True, inside) or description
            leaves = leaves_of(model.stack, spec)
    if len(spec.blocks) > len(weights.info):
        raise CheckpointError(
            f"{path} has only {len(weights.info)} tensors, but its config describes {len(spec.blocks)} layers"
        )
    architecture = family if model.stack is None else None
    name = "trained" if model.stack is None else model.stack.name
    return Opened(spec, origin, leaves, weights, tuple(files), {}, notes, architecture, name, _home(folder))


def _contents(files: Sequence[Path], allow_pickle: bool) -> list[Any]:
    """Return the content of every file. Tensors in it are `Stored`: their places in the file.

    Raises InvalidInput; UntrustedInput for a pickle that is not allowed.
    """
    from ..index import single
    from ..pickles import arrays, unpickled
    from ..safetensors import read_header

    for file in files:
        refuse_pointer(file)
    pickled = [file for file in files if file.suffix not in _PLAIN]
    if pickled and not allow_pickle:
        raise untrusted(pickled[0], "Pass --allow-pickle if you trust its author.")
    pickles = unpickled(pickled)
    contents: list[Any] = []
    for file in files:
        if file.suffix == ".safetensors":
            contents.append(single(file, read_header(file)).tensors)
        else:
            contents.append(arrays(file) if file.suffix == ".npz" else next(pickles))
    return contents


def _no_config(file: Path, config: str) -> InvalidInput:
    return InvalidInput(
        f"{file} does not contain a config, so gptkit does not know the architecture",
        f"Copy the {config} of the model into the same folder.",
    )


def _rows(tables: Sequence[Mapping[str, Any]], embedding: str) -> int | None:
    """Return the number of rows of the embedding, for programs whose config does not state the vocabulary size.

    Return None if the files of the ranks have different numbers of rows, because the embedding is then split by rows.
    `tables` has the tensors of every file, and `embedding` is the name of the embedding.
    """
    rows = {table[embedding].shape[:1] for table in tables if embedding in table}
    return next(iter(rows))[0] if len(rows) == 1 and () not in rows else None


def _only(
    files: Sequence[Path],
    tables: Sequence[Mapping[tuple[str, ...], Mapping[str, Any]]],
    described: tuple[ModelSpec, Origin, list[str]] | None,
    family: Architecture | None,
) -> _TrainedModel | None:
    """Find the model in the files. Return None if there is none; raise CheckpointError if there are several.

    A model is recognised by the name of its embedding.

    Args:
        files: the files, for messages.
        tables: the tensors of every file, by the keys of nested dictionaries that lead to them.
        described: what `describe` returns for a config.json, or None without one.
        family: the family in config.json, or None.
    """
    signs: list[tuple[str, Stack | None]] = [(stack.sign, stack) for stack in STACKS]
    if described is not None and family is not None:
        own = next(leaf.checkpoint for leaf in family.bind(described[0]) if "embedding.weight" in leaf.shared)
        signs += [(sign, None) for sign in dict.fromkeys((own, own.removeprefix(family.prefix)))]
    candidates: dict[_TrainedModel, None] = {}
    for sign, stack in signs:
        if stack is None and any(model.stack is None for model in candidates):
            break  # The full name was there, so the one without the prefix is not needed.
        for table in tables:
            for where, tensors in table.items():
                for name in tensors:
                    plain = _WRAPPED.sub("", name)
                    if plain == sign or plain.endswith("." + sign):
                        candidates[_TrainedModel(where, plain.removesuffix(sign), stack)] = None
    # Some programs have the same name for the embedding as GPT-2. Their own sign has precedence over its config.json.
    models = [model for model in candidates if model.stack is not None] or list(candidates)
    if len(models) > 1:
        labels = some_of([model.label() for model in models], 4, ", …")
        raise CheckpointError(
            f"{files[0]} contains {len(models)} models: {labels}", "Save the model that you need in a file of its own."
        )
    return models[0] if models else None


def _named(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors whose names have the prefix, under names without the prefix and the parts of wrappers."""
    tensors: dict[str, Any] = {}
    for name, tensor in table.items():
        plain = _WRAPPED.sub("", name)
        if plain.startswith(prefix):
            if plain.removeprefix(prefix) in tensors:
                raise CheckpointError(
                    f"the tensor {shown(plain, 80)} exists both with and without the prefix of a wrapper (such as "
                    "module. or _orig_mod.)"
                )
            tensors[plain.removeprefix(prefix)] = tensor
    return tensors


def _same_step(files: Sequence[Path], contents: Sequence[Any]) -> None:
    """Raise CheckpointError if the files are from different training steps, according to their contents."""
    for key in _STEPS:
        stated = {content[key]: file for file, content in zip(files, contents, strict=True) if _says(content, key)}
        if len(stated) > 1:
            (one, first), (two, second) = list(stated.items())[:2]
            raise CheckpointError(
                f"{first} has {key} {one}, but {second.name} has {two}",
                "Keep the files of only one training step in the folder, or give one of the files.",
            )


def _says(content: Any, key: str) -> bool:
    return isinstance(content, dict) and type(content.get(key)) is int


def _notes(model: _TrainedModel, tables: Sequence[Mapping[tuple[str, ...], Any]], contents: Sequence[Any]) -> list[str]:
    """Return notes for the user: on a prefix of the tensor names, and on entries that are not part of the model."""
    notes = []
    if model.prefix:
        notes.append(f"the tensor names have the prefix {shown(model.prefix)}, which gptkit ignores")
    inside: Mapping[str, Any] = next((table[model.where] for table in tables if model.where in table), {})
    others = [name for name in inside if not _WRAPPED.sub("", name).startswith(model.prefix)]
    if model.where and isinstance(contents[0], dict):
        others += [str(key) for key in contents[0] if key != model.where[0]]
    if others:
        notes.append(
            f"{len(others)} entries that are not weights of the model were left out: "
            f"{some_of(sorted(others), 3, ', …')}"
        )
    return notes
