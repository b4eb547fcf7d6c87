"""Checkpoints as training programs leave them: pickles of torch.save, whole or in a file a rank, and .npz archives.

What they are is told by what is in them: a dictionary of tensors, however deep (Lightning's state_dict, DeepSpeed's
module), behind whatever a wrapper puts before its names (torch.compile, DDP, FSDP, Lightning, peft), under the names of
the family in config.json or those of another program (`architectures.stacks`). Pickles are read by the confined process
and only where they are allowed; a tree is told without them where a config lies beside. Files of ranks are joined by
`ranks`. Where two models would be read, both are named and neither is.
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
from .stack_weights import leaves_of, without_buffers

plan = None
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".npz")
_PLAIN = (".npz", ".safetensors")
"""How files end that hold no pickle."""
_HUGGING_FACE = {SINGLE, INDEX, PICKLE_SINGLE, PICKLE_INDEX, LOCAL_CONFIG}
_BEGINNINGS = (b"PK\3\4", b"\x80", POINTER)
"""How an archive of torch.save begins, a pickle of its protocol, and what git-lfs leaves in the place of either."""
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
"""What wrappers put between the parts of a name, which no family does."""
_STEPS = ("global_steps", "global_step", "iteration", "iter_num", "step", "epoch")
_NANOGPT, _LATEST = "ckpt.pt", "latest"
_CONSOLIDATED = "consolidated.safetensors"
"""What Mistral calls the weights beside its params.json."""
_MAX_CONFIG = 2**15  # bytes of a config


def finds(path: Path, names: frozenset[str] | None) -> Path | None:
    """A file, or a folder that is no Hugging Face one besides: by name, and what ends in .bin by its first bytes."""
    if names is None:
        return path if path.name not in _HUGGING_FACE and _looks_right(path) else None
    if names & _HUGGING_FACE or any(name.endswith(".safetensors") for name in names - {_CONSOLIDATED}):
        return None
    from . import megatron

    known = names & {_LATEST, megatron.LATEST} or megatron.files_of(path) or _weights_among(path, names)
    return path if known else None


def _looks_right(path: Path) -> bool:
    """Whether a file may hold weights: what ends in .bin may be anything."""
    if not path.name.endswith(".bin"):
        return path.name.endswith(_SUFFIXES)
    with suppress(CheckpointError), plain_file(path) as file:
        return file.read(len(POINTER)).startswith(_BEGINNINGS)
    return False


def _weights_among(folder: Path, names: frozenset[str]) -> list[str]:
    """The files with weights in a folder."""
    for name in (_NANOGPT, _CONSOLIDATED):
        if name in names:
            return [name]
    found = sorted(name for name in names if not name.startswith(TRAINING_STATE) and _looks_right(folder / name))
    states = [name for name in found if name.endswith("_model_states.pt")]
    return states or found


def describe(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree that a config beside says. Raises UntrustedInput where none does, InvalidInput."""
    folder, files = _files(path)
    refuse_pointer(files[0])
    said = _tree(folder)
    if said is None and files[0].name == _CONSOLIDATED:
        raise InvalidInput(
            f"{files[0]} does not contain a config, so gptkit does not know the architecture",
            "Copy the params.json of the model into the same folder.",
        )
    if said is None:
        raise untrusted(files[0], f"If you trust its author, convert it first: gptkit convert {path} --allow-pickle")
    return said


def _files(path: Path) -> tuple[Path, list[Path]]:
    """The folder that files with weights are in, and these."""
    from . import megatron

    if path.is_file():
        return path.parent, [path]
    path = megatron.step_in(path) or path
    if ranks := megatron.files_of(path):
        return path, ranks
    names = frozenset(each.name for each in path.iterdir() if each.is_file())
    if not _weights_among(path, names) and _LATEST in names:
        inside = path / stated_name(path / _LATEST)
        if inside.parent != path or inside.name in ("", ".", "..") or not is_folder(inside):
            raise CheckpointError(
                f"{path / _LATEST} names a folder that does not exist", "Download or copy the checkpoint again."
            )
        names = frozenset(each.name for each in inside.iterdir() if each.is_file())
        path = inside
    found = [path / name for name in _weights_among(path, names)]
    if not found:
        raise CheckpointError(f"{path} contains no weights")
    return path, found


def _text(path: Path) -> str:
    with plain_file(path) as file:
        data = file.read(_MAX_CONFIG + 1)
    if len(data) > _MAX_CONFIG:
        raise CheckpointError(f"{path} has more than {_MAX_CONFIG:,} bytes, too many for a config")
    return data.decode("utf-8", "replace")


# --- what a config beside says ---


def _tree(
    folder: Path,
    stack: Stack | None = None,
    rows: int | None = None,
    tied: bool | None = None,
    inside: Mapping[str, Any] | None = None,
) -> tuple[ModelSpec, Origin, list[str]] | None:
    """The tree that configs beside the weights say, of a stack or of any; None where there is none. `tied` is what the
    weights say of the head, which another program's config does not, and `inside` the config that lies in their file.
    """
    if inside is not None and stack is not None:
        return _with_head(*_described(stack.config(inside, rows)), bool(tied))
    stacks = {each.file: each for each in (STACKS if stack is None else (stack,))}
    own = [(each, path) for pattern, each in stacks.items() for path in sorted(folder.glob(pattern))]
    if len(own) > 1:
        raise InvalidInput(f"{folder} contains several configs: {some_of([path.name for _, path in own], 4)}", _ONE)
    found = _theirs(folder)
    if not own:
        return found if found is None or tied is None else _with_head(*found, tied)
    stated = own[0][0].config(_parsed(own[0][1]), rows)
    if stated["vocab_size"] is None:
        return found  # which the weights alone say
    spec, origin, _ = _with_head(*_described(stated), bool(tied))
    if found is None:
        return spec, origin, []
    theirs_too, ours = without_rounding(found[0]), without_rounding(spec)
    other = [path for path, *_ in differences(theirs_too, ours) if path not in ("head.tied", "context_length")]
    if other:
        what = some_of(other, 3, ", …")
        raise InvalidInput(f"{folder}: {own[0][1].name} and {CONFIG} describe different models ({what})", _ONE)
    return _with_head(*found, bool(tied))


def _theirs(folder: Path) -> tuple[ModelSpec, Origin, list[str]] | None:
    """What a family's config.json says, in one of the `_places`."""
    file = next((each / CONFIG for each in _places(folder) if (each / CONFIG).is_file()), None)
    return None if file is None else read_description(file, file.parent, folder=True)


def _places(folder: Path) -> tuple[Path, ...]:
    """Where config.json and the tokenizer's files may lie: beside the weights, where verl puts them, or beside
    DeepSpeed's `latest`.
    """
    return (folder, folder / "huggingface", *((folder.parent,) if (folder.parent / _LATEST).is_file() else ()))


def _home(folder: Path) -> Path | None:
    """The folder of the tokenizer's files, None where there are none."""
    from ..tokenizer import token_files

    return next((each for each in _places(folder) if each.is_dir() and token_files(each)), None)


_ONE = "Keep only the config that belongs to these weights in the folder."


def _described(config: dict[str, Any]) -> tuple[ModelSpec, Origin, list[str]]:
    family = named(config["model_type"])
    config = {**config, "architectures": [family.hf_class]}
    spec, unknown = family.spec_and_unknown(config)
    return spec, Origin(family=family.name, config_text=json.dumps(config, indent=2) + "\n"), unknown


def _with_head(spec: ModelSpec, origin: Origin, unknown: list[str], tied: bool) -> tuple[ModelSpec, Origin, list[str]]:
    """The same with a head that is the embedding, or of its own."""
    if spec.tied == tied or origin.config is None:
        return spec, origin, unknown
    return _described({**origin.config, "tie_word_embeddings": tied})


def _parsed(path: Path) -> dict[str, Any]:
    """A config in JSON or YAML."""
    from ..safetensors import parse_json_object

    text = _text(path)
    if path.suffix == ".json":
        return parse_json_object(text.encode(), str(path))
    from ..plain_yaml import read_yaml

    try:
        found = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]:.120}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} is not a config: it must be a mapping of field names to values")
    return found


# --- reading ---


class _TrainedModel(NamedTuple):
    """A model within files: the keys that lead to its tensors, what stands before their names, whose names they are."""

    where: tuple[str, ...]
    prefix: str
    stack: Stack | None

    def told(self) -> str:
        keys = "".join(f"[{shown(key, 40)}]" for key in self.where)
        whose = "" if self.stack is None else f" under {self.stack.name} names"
        return f"one in {keys or 'it'}{f' with the prefix {shown(self.prefix)}' if self.prefix else ''}{whose}"


def read(path: Path, allow_pickle: bool) -> Opened:
    """Open the files. Raises UntrustedInput unless pickles are allowed, InvalidInput."""
    from ..chunks import chunked
    from ..index import single
    from ..pickles import arrays, not_as_it_is, unpickled
    from ..safetensors import read_header
    from . import dcp, megatron, nanogpt, ranks

    step = megatron.step_in(path)
    if step is not None and (step / ".metadata").is_file():
        return dcp.read(step, allow_pickle)
    folder, files = _files(path)
    for file in files:
        refuse_pointer(file)
    files = sorted(files, key=lambda file: [int(each) for each in re.findall(r"\d{1,18}", file.name)])
    pickled = [file for file in files if file.suffix not in _PLAIN]
    if pickled and not allow_pickle:
        raise untrusted(pickled[0], "Pass --allow-pickle if you trust its author.")
    others = unpickled(pickled)
    contents: list[Any] = []
    for file in files:
        if file.suffix == ".safetensors":
            contents.append(single(file, read_header(file)).tensors)
        else:
            contents.append(arrays(file) if file.suffix == ".npz" else next(others))
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
    found = _tree(folder, model.stack, rows, None if model.stack is None else False, inside)
    if found is None:
        wanted = CONFIG if model.stack is None else f"{model.stack.file} or {CONFIG}"
        raise InvalidInput(
            f"{files[0]} does not contain a config, so gptkit does not know the architecture",
            f"Copy the {wanted} of the model into the same folder.",
        )
    spec, origin, _ = found
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
            spec, origin, _ = _tree(folder, model.stack, rows, True, inside) or found
            leaves = leaves_of(model.stack, spec)
    if len(spec.blocks) > len(weights.info):
        raise CheckpointError(
            f"{path} has only {len(weights.info)} tensors, but its config describes {len(spec.blocks)} layers"
        )
    architecture = family if model.stack is None else None
    name = "trained" if model.stack is None else model.stack.name
    return Opened(spec, origin, leaves, weights, tuple(files), {}, notes, architecture, name, _home(folder))


def _rows(tables: Sequence[Mapping[str, Any]], embedding: str) -> int | None:
    """The rows of an embedding that is not shared out by rows, as old vocabularies that no config states are not."""
    found = {table[embedding].shape[:1] for table in tables if embedding in table}
    return next(iter(found))[0] if len(found) == 1 and () not in found else None


def _only(
    files: Sequence[Path],
    tables: Sequence[Mapping[tuple[str, ...], Mapping[str, Any]]],
    described: tuple[ModelSpec, Origin, list[str]] | None,
    family: Architecture | None,
) -> _TrainedModel | None:
    """The one model in the files, None where there is none. Raises CheckpointError where there are several."""
    signs: list[tuple[str, Stack | None]] = [(each.sign, each) for each in STACKS]
    if described is not None and family is not None:
        own = next(leaf.checkpoint for leaf in family.bind(described[0]) if "embedding.weight" in leaf.shared)
        signs += [(each, None) for each in dict.fromkeys((own, own.removeprefix(family.prefix)))]
    found: dict[_TrainedModel, None] = {}
    for sign, stack in signs:
        if stack is None and any(model.stack is None for model in found):
            break  # the whole name was there
        for table in tables:
            for where, tensors in table.items():
                for name in tensors:
                    plain = _WRAPPED.sub("", name)
                    if plain == sign or plain.endswith("." + sign):
                        found[_TrainedModel(where, plain.removesuffix(sign), stack)] = None
    # Where GPT-2's config lies beside, names of other programs that share its embedding's are told by their own sign.
    models = [each for each in found if each.stack is not None] or list(found)
    if len(models) > 1:
        told = some_of([each.told() for each in models], 4, ", …")
        raise CheckpointError(
            f"{files[0]} contains {len(models)} models: {told}", "Save the model that you need in a file of its own."
        )
    return models[0] if models else None


def _named(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors behind a prefix, without it and without what wrappers put into names."""
    found: dict[str, Any] = {}
    for name, tensor in table.items():
        plain = _WRAPPED.sub("", name)
        if plain.startswith(prefix):
            if plain.removeprefix(prefix) in found:
                raise CheckpointError(
                    f"{shown(plain, 80)} exists both with and without the prefix of a wrapper (such as "
                    "module. or _orig_mod.)"
                )
            found[plain.removeprefix(prefix)] = tensor
    return found


def _same_step(files: Sequence[Path], contents: Sequence[Any]) -> None:
    """Raise CheckpointError where files say that they are of different steps."""
    for key in _STEPS:
        said = {content[key]: file for file, content in zip(files, contents, strict=True) if _says(content, key)}
        if len(said) > 1:
            (one, first), (two, second) = list(said.items())[:2]
            told = f"{first} has {key} {one}, but {second.name} has {two}"
            raise CheckpointError(
                told, "Keep the files of only one training step in the folder, or give one of the files."
            )


def _says(content: Any, key: str) -> bool:
    return isinstance(content, dict) and type(content.get(key)) is int


def _notes(model: _TrainedModel, tables: Sequence[Mapping[tuple[str, ...], Any]], contents: Sequence[Any]) -> list[str]:
    """What the files hold beside the model."""
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
