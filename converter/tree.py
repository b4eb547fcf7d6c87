"""The tree of a checkpoint, from its config alone: gptkit.json of our own format, or config.json. No numpy.

gptkit.json holds the tree as JSON with a schema version, the dtype to compute in, where the checkpoint came from
(family, reference, commit, the text of its config.json, so that converting back restores it byte for byte) and what
was done to it since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..architectures import architecture_of, named
from ..architectures.config import ConfigReader, parse_config_text, read_config_file
from ..errors import ConfigError, InvalidInput
from ..spec import ModelSpec, from_json
from .formats import Format, format_named, format_of
from .resolve import CONFIG

__all__ = ["LOCAL_CONFIG", "LOCAL_SCHEMA", "Origin", "foreign_format", "is_local", "read_spec"]

LOCAL_CONFIG = "gptkit.json"
LOCAL_SCHEMA = 1


@dataclass(frozen=True)
class Origin:
    """Where a tree came from: the family and config.json it had, the reference and commit, what was done to it."""

    family: str | None = None
    config_text: str | None = None
    reference: str | None = None
    revision: str | None = None
    history: tuple[dict[str, Any], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """The original's weight files by name, each with its header's text, and the text of its index: what is needed to
    write the very same files again."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The original config.json as an object."""
        return None if self.config_text is None else parse_config_text(self.config_text, "the original config.json")


def read_spec(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    """The tree of a folder (gptkit.json or config.json) or of a config file: (spec, origin, unknown config fields).

    Raises:
        InvalidInput: it holds neither, or what it holds is broken; UnknownFamily for a family that has no file.

    """
    other = foreign_format(path)
    if other is not None and other.describe is not None:
        return other.describe(path)
    described = _description(path)
    if not described.is_file():
        where = "in" if path.is_dir() else "beside"
        raise InvalidInput(
            f"{path} is not a checkpoint: there is no {CONFIG} {where} it",
            "Name a folder with config.json and .safetensors files, or a gptkit folder with gptkit.json.",
        )
    if described.name == LOCAL_CONFIG:
        return _read_local(described)
    config, text = read_config_file(described)
    architecture = architecture_of(config)
    spec, unknown = architecture.spec_and_unknown(config)
    return spec, Origin(family=architecture.name, config_text=text), unknown


def foreign_format(path: Path) -> Format | None:
    """The format of what is neither a Hugging Face folder nor gptkit's own: a .gguf file, a llama2.c model, …"""
    if path.suffix in (".json", ".safetensors"):
        return None
    if path.is_dir() and _description(path).is_file():
        distributed = format_named("dcp")  # the one kind of folder that has a config.json beside
        return distributed if distributed.matches is not None and distributed.matches(path) else None
    return format_of(path)


def _description(path: Path) -> Path:
    """The file that describes a folder or a weight file: gptkit.json where there is one, else config.json.

    A .json file describes itself.
    """
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".json" and folder != path:
        return path
    local = folder / LOCAL_CONFIG
    return local if local.is_file() else folder / CONFIG


def _read_local(path: Path) -> tuple[ModelSpec, Origin, list[str]]:
    data, _ = read_config_file(path)
    _require_plain(data, path)
    if data.get("schema_version") != LOCAL_SCHEMA:
        raise ConfigError(
            f"{path} has schema version {data.get('schema_version')!r:.40}, this gptkit reads {LOCAL_SCHEMA}",
            "Update gptkit, or convert the original again.",
        )
    origin = data.get("origin")
    reader = ConfigReader(origin if isinstance(origin, dict) else {})
    family, text = reader.raw("family"), reader.raw("config")
    history = data.get("history", [])
    reference, revision = reader.raw("reference"), reader.raw("revision")
    strings = all(value is None or isinstance(value, str) for value in (family, text, reference, revision))
    records = isinstance(history, list) and all(isinstance(record, dict) for record in history)
    if not isinstance(origin, dict) or not strings or not records:
        raise ConfigError(f"{path}: its origin or history is not what gptkit writes")
    if family is not None:
        named(family)
    try:
        spec = from_json(data.get("spec"))
    except (OverflowError, RecursionError) as error:  # an integer that no float holds
        raise ConfigError(f"{path} is not a gptkit model spec: {error}") from error
    files = origin.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise ConfigError(f"{path}: the files of its origin are not what gptkit writes")
    return spec, Origin(family, text, reference, revision, tuple(history), files), []


def _require_plain(data: dict[str, Any], path: Path) -> None:
    """Refuse what Python's parser takes and JSON has not: NaN, numbers beyond fp64, half a surrogate pair."""
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds what JSON cannot: {error}") from error


def is_local(path: Path) -> bool:
    """Whether `read_spec` reads gptkit's own format there, and the weights have shared names."""
    return _description(path).name == LOCAL_CONFIG
