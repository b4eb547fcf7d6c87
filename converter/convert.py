"""convert: a checkpoint from one format to another, bytes unchanged wherever the format allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..architectures import Architecture, named
from ..errors import UsageError
from ..spec import ModelSpec, to_json
from .checkpoint import Checkpoint, identity_leaves, open_checkpoint
from .dtypes import HF_NAMES, widest
from .publish import Staging
from .resolve import CONFIG
from .tokenizer import token_files
from .tree import LOCAL_CONFIG, LOCAL_SCHEMA, Origin
from .write import DEFAULT_SHARD_BYTES, Plan, execute, json_bytes, plan

__all__ = ["Conversion", "convert", "default_output", "plan_conversion", "plan_output"]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, or would do: `published` is False for a dry run."""

    source: Checkpoint
    target: Path
    to: str
    plan: Plan
    published: bool


def default_output(reference: str, to: str) -> Path:
    """gpt2, org/gpt2@main, sample:gpt2, ./gpt2/ -> gpt2-local in the working directory."""
    name = reference.rstrip("/").split("/")[-1].split(":")[-1].split("@")[0]
    if name in (".", "..", "~"):  # a folder that does not say its name
        name = os.path.basename(os.path.abspath(os.path.expanduser(reference)))  # noqa: PTH100, PTH111, PTH119
    for suffix in ("-local", "-hf", ".safetensors", ".json"):
        name = name.removesuffix(suffix)
    return Path(f"{name or 'model'}-{to.replace(':', '-')}")


def plan_output(
    spec: ModelSpec,
    origin: Origin,
    to: str,
    dtypes: Mapping[str, str],
    compute_dtype: str,
    folder: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Plan:
    """The plan for a tree in the format `to` ("local", "hf" or "hf:FAMILY").

    `dtypes` by shared name, `compute_dtype` what it is to be run in, `folder` where tokenizer files lie.

    Raises:
        CannotExpress: the family has no place for some components.
        UsageError: `to` is no known format, or "hf" for a tree that never had a family.

    """
    companions = token_files(folder)
    if to == "local":
        data = {
            "gptkit": __version__,
            "schema_version": LOCAL_SCHEMA,
            "dtype": HF_NAMES[compute_dtype],
            "spec": to_json(spec),
            "origin": {
                "family": origin.family,
                "reference": origin.reference,
                "revision": origin.revision,
                "config": origin.config_text,
            },
            "history": list(origin.history),
        }
        return plan(identity_leaves(spec), dtypes, {LOCAL_CONFIG: json_bytes(data)}, companions, max_shard_bytes)
    architecture = _target_family(origin, to)
    text = _hf_config(architecture, spec, origin, widest(list(dtypes.values())))
    return plan(architecture.bind(spec), dtypes, {CONFIG: text}, companions, max_shard_bytes)


def _check_format(to: str) -> str | None:
    """The FAMILY of "hf:FAMILY", None where `to` has none. Raises UsageError, UnknownFamily."""
    kind, colon, family = to.partition(":")
    if to != "local" and (kind != "hf" or (colon and not family)):
        raise UsageError(f"unknown format {to!r}", "known: local, hf, hf:FAMILY")
    return named(family).name if family else None


def _target_family(origin: Origin, to: str) -> Architecture:
    family = _check_format(to)
    if family is not None:
        return named(family)
    if origin.family is None:
        raise UsageError("this tree never had a family", "say which: --to hf:llama")
    return named(origin.family)


def _hf_config(architecture: Architecture, spec: ModelSpec, origin: Origin, stored: str) -> bytes:
    """The original config.json byte for byte where it still describes the tree, else a new one."""
    original = origin.config
    config: dict[str, Any] | None = architecture.export_config(spec, original)
    if config is None and origin.config_text is not None:
        return origin.config_text.encode()
    assert config is not None
    config.pop("torch_dtype", None)
    return json_bytes({**config, "dtype": HF_NAMES[stored]})


def plan_conversion(source: Checkpoint, to: str, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> Plan:
    """The plan for an opened checkpoint in the format `to`; raises as `plan_output`."""
    return plan_output(
        source.spec, source.origin, to, source.shared_dtypes(), source.dtype, source.folder, max_shard_bytes
    )


def convert(
    model: str | Path,
    out: str | Path | None = None,
    to: str = "local",
    *,
    force: bool = False,
    dry_run: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
    on_plan: Callable[[Conversion], None] | None = None,
) -> Conversion:
    """Convert a checkpoint to gptkit's own format, or back to Hugging Face files of the same or another family.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make; by default the model's name with the format behind it, in the working directory.
        to: "local", "hf", or "hf:FAMILY" for another family that can hold the tree.
        force: replace an existing checkpoint folder, in one step.
        dry_run: plan only.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        max_shard_bytes: start another weight file beyond it.
        progress: called with the bytes of every tensor written.
        on_plan: called once, before the first tensor is read.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`.
        CannotExpress: the family cannot hold the tree; nothing was written.
        UsageError: `out` exists, or its parent does not.

    """
    target = Path(out) if out is not None else default_output(str(model), to)
    _check_format(to)
    if not dry_run:
        Staging(target, force).check()  # what cannot be written is refused here, before gigabytes are fetched
    source = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    conversion = Conversion(source, target, to, plan_conversion(source, to, max_shard_bytes), published=not dry_run)
    if dry_run:
        return conversion
    with Staging(target, force) as staging:
        if on_plan is not None:
            on_plan(conversion)
        files = execute(conversion.plan, source.tensors(), staging, progress)
        manifest = {
            "gptkit": __version__,
            "format": to,
            "source": {"reference": source.origin.reference, "revision": source.revision},
        }
        staging.commit(manifest, files=files)
    return conversion
