"""Build transformers' own class from a config.json, and return the names and shapes of its parameters.

This is a worker of `confinement`. A config.json is untrusted and may describe a model of any size. So the model is
built on torch's meta device, where parameters need no memory, and in this process, whose time and memory are limited.
"""

import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from typing import Any

from .confinement import allow

LIBRARIES = (2**34, 0, 120.0, 0.0)  # address space, of which torch reserves much and uses little
DATA = 2**30  # bytes that are written to: torch, transformers and a tiny model use a third of it
_BUILDING = (2**33, 0, 12.0, 0.0)  # DeepSeek-V3 with twice its layers takes 2 seconds


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Build the model for the config in the question. Return its class, and the names and shapes of its parameters.

    Shared parameters are returned once. If the question has the names and shapes of tensors, the answer also has
    "loading" (`_loading`). If the question asks for "fields", no model is built, and the answer has only the fields of
    the config (`_fields`).
    """
    allow(0, LIBRARIES, DATA)
    sys.path += question["libraries"]
    tempfile.tempdir = os.sep  # which torch asks for, and to look for one is to write a file: this process writes none
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    decoded = getattr(transformers.PreTrainedConfig, "_decode_special_floats", dict)  # infinity, as its files have it
    config = decoded(question["config"])
    if question.get("fields"):
        return {"fields": _fields(transformers.AutoConfig.for_model(**config))}
    name = _class_name(modeling_auto, config)
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no {name}")
    allow(0, _BUILDING)
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**config))
    parameters = [[name, list(value.shape)] for name, value in model.named_parameters()]
    tensors = question.get("tensors")
    loading = {} if tensors is None else {"loading": _loading(model, {name: tuple(shape) for name, shape in tensors})}
    return {"class": name, "parameters": parameters, **loading}


def _fields(config: Any, whole: bool = True) -> dict[str, Any]:
    """Return the attributes of transformers' config object as JSON, including defaults, aliases and computed values.

    With `whole`, the attributes of nested configs, such as text_config, are included.
    """
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for name in {*vars(config), *dir(config), *config.attribute_map}:
        with suppress(Exception):  # a config's own code may raise anything
            value: Any = None if name.startswith("_") else getattr(config, name)
            if isinstance(value, (bool, int, float, str)):
                fields.setdefault(name, value)
            elif whole and hasattr(value, "attribute_map"):
                fields[name] = _fields(value)
            elif whole and all(hasattr(nested, "attribute_map") for nested in (value or [None])):
                fields[name] = [_fields(nested, False) for nested in value]
    return fields | {"class of config": type(config).__name__}


def _loading(model: Any, tensors: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return what `from_pretrained` would do with the tensors of a checkpoint, which are given by name and shape.

    This repeats the steps of transformers' `core_model_loading.convert_and_load_state_dict_in_model` and
    `_adjust_missing_and_unexpected_keys`, without loading anything. The result has lists of names:

    - of tensors: "ignored" (without a warning), "unexpected" (there is no such parameter), "mismatched" (other shape)
    - of parameters without a tensor: "missing", or "unneeded" if the model needs no tensor for them
    - "renamed": the name of a tensor -> the name of its parameter
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    owners = {pattern: transform for transform in converters for pattern in transform.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    unexpected, mismatched, renamed = [], [], {}
    filled: set[str] = set()
    for name, shape in tensors.items():
        key, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if key not in state and name in state:
            key, pattern = rename_source_key(name, [], [], prefix, state)
        if key not in state:
            unexpected.append(name)
            continue
        targets = owners[pattern].target_patterns if pattern is not None else [""]
        filled.update(key.replace(targets[0], target) if pattern is not None else key for target in targets)
        if pattern is None and tuple(state[key].shape) != shape:
            mismatched.append(name)
        if key != name:
            renamed[name] = key
    tied = dict((model.all_tied_weights_keys or {}).items())
    filled |= {x for x, y in tied.items() if y in filled} | {y for x, y in tied.items() if x in filled}
    missing = [name for name in state if name not in filled]
    buffers = [name for name, _ in model.named_buffers()]
    ignored_patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    ignored_patterns |= (
        {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else set()
    )
    ignored_patterns |= {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in buffers) else set()
    unneeded_patterns = set(model._keys_to_ignore_on_load_missing or ())
    ignored = [name for name in unexpected if any(re.search(regex, name) for regex in ignored_patterns)]
    unneeded = [name for name in missing if any(re.search(regex, name) for regex in unneeded_patterns)]
    return {
        "ignored": ignored,
        "unexpected": [name for name in unexpected if name not in ignored],
        "missing": [name for name in missing if name not in unneeded],
        "unneeded": unneeded,
        "mismatched": mismatched,
        "renamed": renamed,
    }


def _class_name(auto: Any, config: dict[str, Any]) -> str:
    """Return the name of the class in config.json, or else of transformers' causal language model for its model_type.

    `auto` is the module transformers.models.auto.modeling_auto.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    mapped = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if mapped is None:
        raise ValueError(f"transformers has no causal language model of the type {config['model_type']!r:.60}")
    return mapped if isinstance(mapped, str) else str(mapped[0])


def reason(error: BaseException) -> str:
    """Return the text of an error that torch or transformers raised."""
    return f"{type(error).__name__}: {error!s:.400}"
