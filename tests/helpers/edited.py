"""Local checkpoints with their tensors or their tree changed, and what `gptkit verify` says of them."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import gptkit
from helpers.command import call
from helpers.families import save_hf
from helpers.full_spec import filled_in

Tensors = dict[str, torch.Tensor]


def pairs(configs: Mapping[str, dict[str, Any]], factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """What gives a randomised checkpoint by its config's name, as HF files and in gptkit's own format; made once."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        folder = factory.mktemp(name)
        save_hf(configs[name], folder / "hf")
        gptkit.convert(folder / "hf", folder / "local")
        return folder / "hf", folder / "local"

    return make


def damaged(local: Path, out: Path, damage: Callable[[Tensors], None]) -> Path:
    """A copy of a local checkpoint with its tensors changed."""
    shutil.copytree(local, out)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    damage(tensors)
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    return out


def with_spec(local: Path, out: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a local checkpoint with its tree changed: `change` gets every JSON object in it."""
    shutil.copytree(local, out)
    config = json.loads((out / "gptkit.json").read_text())

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            change(node)
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(child)

    config["spec"] = filled_in(config["spec"])
    walk(config["spec"])
    (out / "gptkit.json").write_text(json.dumps(config))
    return out


def setting(**values: Any) -> Callable[[Any], None]:
    """Every field of that name gets that value, or what a function makes of its old one."""

    def change(node: Any) -> None:
        for name, value in values.items():
            if name in node:
                node[name] = value(node[name]) if callable(value) else value

    return change


def exchange(a: str, b: str) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()

    return damage


def scale(name: str, factor: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name] * factor})


def exit_code(*arguments: object) -> int:
    return call("verify", *arguments).exit_code
