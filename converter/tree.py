"""Read the tree of components of a checkpoint from its config: gptkit.json (gptkit's own format) or config.json.

gptkit.json has the tree as JSON, a schema version, the dtype to compute in, the origin of the checkpoint, and the
changes since then. The origin has the text of the original config.json, so that converting back restores it byte for
byte. A .json file of another name may have the same content. It is a tree without weights (`write_spec`), which every
command that needs no weights accepts. This module does not import numpy.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from ..architectures import architecture_of, named
from ..architectures.config import parse_config_text, quantisation, read_config_file
from ..components import ModelSpec, from_json, to_json
from ..components.ranges import some_of
from ..errors import CheckpointError, ConfigError, InvalidInput, UnknownFamily, UsageError, shown
from ..version import __version__
from .companions import is_weights
from .names import ADAPTER_CONFIG, CONFIG, LOCAL_CONFIG, refuse_pointer

_LOCAL_SCHEMA = 1


@dataclass(frozen=True)
class Origin:
    """The model from which a tree of components was made."""

    family: str | None = None
    """The name of the model family; None if gptkit does not know it."""
    config_text: str | None = None
    """The text of the original config.json."""
    reference: str | None = None
    """The name of the original model, such as org/name."""
    revision: str | None = None
    """The commit on the hub."""
    history: tuple[dict[str, Any], ...] = ()
    """The changes to the original model, such as swaps and healing, oldest first."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The headers of the original's weight files and its index, as texts by file name.

    With them gptkit can write files with the same bytes as the original."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The fields of the original config.json; None if there is none."""
        return None if self.config_text is None else parse_config_text(self.config_text, "the original config.json")


class Quantised(InvalidInput):
    """The weights are quantised in a way that gptkit cannot read."""


class OtherClass(CheckpointError):
    """The model is of a known family but has no language model head.

    Its config.json names another class, such as a classifier.
    """


def read_description(file: Path, path: Path, *, folder: bool) -> tuple[ModelSpec, Origin, list[str]]:
    """Read the config of a folder or weight file.

    Return its tree of components, the origin of the tree, and the unknown config fields.

    Args:
        file: the config: config.json, gptkit.json or another .json file.
        path: the folder or weight file, for messages.
        folder: whether `path` is a folder.

    Raises:
        InvalidInput: there is no config, or it cannot be read.
    """
    if not file.is_file() or file.name == ADAPTER_CONFIG:
        refuse_pointer(path)
        _refuse_adapter(path, path if folder else path.parent)
        hint = "Give a folder with config.json and .safetensors files, or a gptkit folder with gptkit.json."
        if folder and (inside := _with_weights(path)):
            hint = f"There are weights in {some_of(inside, 3, ', …')}: name one of these folders."
        raise UnknownFamily(
            f"{path} is not a checkpoint: there is no {CONFIG} {'in' if folder else 'next to'} it", hint
        )
    config, text = read_config_file(file)
    if file.name == LOCAL_CONFIG or _is_tree(file, config):
        return _local(config, file)
    if file.name == CONFIG and (settings := quantised_beside(config, file.parent)) is not None:
        config |= {"quantization_config": settings}
        text = json.dumps(config, indent=2) + "\n"
    if file.name != CONFIG and "model_type" not in config:
        raise ConfigError(
            f"{file} does not describe a model: it has neither a model_type (config.json) nor a spec (gptkit.json)",
            "Give a config.json, a gptkit.json, or a file that gptkit recommend --out wrote.",
        )
    with _naming(CONFIG if folder else str(file)):
        architecture = architecture_of(config)
        spec, unknown = architecture.spec_and_unknown(config)
    return spec, Origin(family=architecture.name, config_text=text), unknown


_BESIDE = {
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
}
"""The file in which AutoGPTQ or AutoAWQ describes the quantisation -> the method, and how to rename its fields.

The new names are those of the fields in config.json.
"""


def quantised_beside(config: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config for a config.json that has none, from a file of AutoGPTQ or AutoAWQ in the folder.

    Return None if config.json has a quantization_config, or if there is no such file. Raises ConfigError.
    """
    if quantisation(config) is not None:
        return None
    for name, (method, names) in _BESIDE.items():
        try:
            settings, _ = read_config_file(folder / name)
        except ConfigError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        return {"quant_method": method, **{names.get(key, key): value for key, value in settings.items()}}
    return None


def _with_weights(folder: Path) -> list[str]:
    """Return the subfolders, one or two levels below a folder, that have files with the names of weight files."""
    files = chain.from_iterable(islice(folder.glob(pattern), 1000) for pattern in ("*/*", "*/*/*"))
    return sorted({str(file.parent) for file in files if is_weights(file.name)})


def _refuse_adapter(path: Path, folder: Path) -> None:
    """Raise InvalidInput if the folder contains an adapter of peft. The hint is the command that merges the adapter.

    `path` is the path that the user gave, the folder or a file in it.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    config, _ = read_config_file(folder / ADAPTER_CONFIG)
    base, rank = config.get("base_model_name_or_path"), config.get("r")
    if isinstance(settings := config.get("lora_parameters"), dict):  # mlx-lm's
        base, rank = config.get("model"), settings.get("rank")
    given = base if isinstance(base, str) and base.isprintable() and 0 < len(base) <= 200 else None
    method = f"{config.get('peft_type', 'LORA')!s:.20}".upper()
    kind = "an adapter"
    hint = f"Merge it with peft's merge_and_unload(): its type is {method!r}, and gptkit merges only LoRA."
    if method == "LORA":
        kind = "a LoRA adapter" + (f" of rank {rank}" if type(rank) is int else "")
        hint = f"Merge it: gptkit swap {quote(given or 'BASE')} OUT --merge-lora {quote(str(folder))}"
    kind += f" for {given}" if given is not None else ""
    raise InvalidInput(f"{path} is {kind}, not a model", hint)


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Put the name of a file into the messages of ConfigErrors that are raised inside a `with`.

    Messages about config fields begin with "config.json", which is replaced. Messages about the tree of components name
    no file.
    """
    try:
        yield
    except ConfigError as error:
        rest = error.message.removeprefix(CONFIG)
        error.message = f"{file}{rest}" if rest != error.message else f"{file}: {rest}"
        raise


def _is_tree(path: Path, data: Mapping[str, Any]) -> bool:
    """Return whether a .json file with this `data` has gptkit's own format, a tree, and is not a config.json."""
    return path.name != CONFIG and "spec" in data and "model_type" not in data


def _local(data: dict[str, Any], path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    try:  # Python's parser accepts what is not JSON: NaN, numbers beyond fp64, lone surrogates
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} contains values that JSON cannot represent: {error}") from error
    if data.get("schema_version") != _LOCAL_SCHEMA:
        raise ConfigError(
            f"{path} has schema version {shown(data.get('schema_version'), 40)}, but this gptkit reads {_LOCAL_SCHEMA}",
            "Update gptkit, or convert the original checkpoint again with this version.",
        )
    origin, history = data.get("origin"), data.get("history", [])
    if isinstance(origin, dict):
        origin = {**origin, "config_text": origin.get("config"), "history": history}
    try:
        parsed = msgspec.convert(origin, Origin)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: the field origin or history is not valid: {error}") from error
    if parsed.family is not None:
        named(parsed.family)
    try:
        with _naming(str(path)):
            return from_json(data.get("spec")), parsed, []
    except (OverflowError, RecursionError) as error:  # an integer that is too large for a float
        raise ConfigError(f"{path} does not describe a valid model: {error}") from error


def holds_tree(path: Path) -> bool:
    """Return whether a .json file describes a model without weights, as `write_spec` writes it."""
    return path.name != CONFIG and path.is_file() and _is_tree(path, read_config_file(path)[0])


def described_tree(spec: ModelSpec, origin: Origin, dtype: str) -> dict[str, Any]:
    """Return the content of gptkit.json for a tree of components.

    `dtype` is the dtype to compute in, by its name in torch.
    """
    return {
        "gptkit": __version__,
        "schema_version": _LOCAL_SCHEMA,
        "dtype": dtype,
        "spec": to_json(spec),
        "origin": {
            "family": origin.family,
            "reference": origin.reference,
            "revision": origin.revision,
            "config": origin.config_text,
            "files": dict(origin.files),
        },
        "history": list(origin.history),
    }


def write_spec(
    spec: ModelSpec, path: str | Path, *, origin: Origin | None = None, dtype: str = "float32", force: bool = False
) -> Path:
    """Write a tree of components, without weights, to a .json file in one step, and return its path.

    `params`, `compare`, `show` and `load --random` accept this file as a model.

    Args:
        spec: the tree of components.
        path: a .json file that is not called config.json or gptkit.json.
        origin: where the tree came from.
        dtype: the dtype to compute in, by its name in torch.
        force: replace an existing file.

    Raises:
        UsageError: the name is not allowed, or the file exists. GptkitError: writing fails.
    """
    from .files import failed, fsync, write_bytes  # here, because it imports hashlib

    target = Path(path).expanduser()
    if target.suffix != ".json" or target.name in (CONFIG, LOCAL_CONFIG):
        raise UsageError(
            f"{target} is not a possible name for an architecture without weights",
            f"Give a name that ends in .json, other than {CONFIG} and {LOCAL_CONFIG}, such as my-model.json.",
        )
    if not target.parent.is_dir():
        raise UsageError(f"the folder {target.parent} does not exist", "Create it first.")
    if target.is_dir() or (os.path.lexists(target) and not force):
        raise UsageError(f"{target} exists already", "Choose another name, or pass --force to replace it.")
    text = json.dumps(described_tree(spec, origin or Origin(), dtype), indent=2) + "\n"
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        write_bytes(partial, text.encode())
        fsync(partial)
        partial.replace(target)
        fsync(target.parent)
    except OSError as error:
        raise failed("write", target, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return target
