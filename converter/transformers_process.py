"""What transformers' own class makes of a config.json, by names and shapes: a worker of `confinement`.

A config.json that we did not write may ask for any number of layers, and a class of any size may be made of it: on the
meta device, where no parameter takes memory, and in this process, whose time and memory are limited.
"""

import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from typing import Any

from .confinement import allow

LIBRARIES = (2**34, 0, 120.0, 0.0)  # address space, which torch takes much of and uses little
DATA = 2**30  # bytes that are written to: torch, transformers and a tiny model take a third of it
_BUILDING = (2**33, 0, 12.0, 0.0)  # DeepSeek-V3 with twice its layers takes 2 seconds


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The name of the class, and its parameters in order, each with its shape, a shared one once; or all `fields`."""
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
    """A config's attributes as JSON has them: defaults, other names, what is computed; and in a `whole` one configs."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for name in {*vars(config), *dir(config), *config.attribute_map}:
        with suppress(Exception):  # whatever a config's own code says
            value: Any = None if name.startswith("_") else getattr(config, name)
            if isinstance(value, (bool, int, float, str)):
                fields.setdefault(name, value)
            elif whole and hasattr(value, "attribute_map"):
                fields[name] = _fields(value)
            elif whole and all(hasattr(each, "attribute_map") for each in (value or [None])):
                fields[name] = [_fields(each, False) for each in value]
    return fields | {"class of config": type(config).__name__}


def _loading(model: Any, tensors: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What `from_pretrained` would make of a checkpoint's tensors, by the steps of its
    `core_model_loading.convert_and_load_state_dict_in_model` and `_adjust_missing_and_unexpected_keys`: the names that
    it leaves out without a word ("ignored"), for want of a place ("unexpected"), expects in another shape, renames; and
    its own that nothing fills ("missing"), or that it makes itself ("unneeded").
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    owners = {pattern: each for each in converters for pattern in each.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    unexpected, mismatched, renamed = [], [], {}
    filled: set[str] = set()
    for name, shape in tensors.items():
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], prefix, own)
        if key not in own:
            unexpected.append(name)
            continue
        first = owners[pattern].target_patterns if pattern is not None else [""]
        filled.update(key.replace(first[0], each) if pattern is not None else key for each in first)
        if pattern is None and tuple(own[key].shape) != shape:
            mismatched.append(name)
        if key != name:
            renamed[name] = key
    tied = dict((model.all_tied_weights_keys or {}).items())
    filled |= {x for x, y in tied.items() if y in filled} | {y for x, y in tied.items() if x in filled}
    missing = [name for name in own if name not in filled]
    buffers = [name for name, _ in model.named_buffers()]
    left = set(model._keys_to_ignore_on_load_unexpected or ())
    left |= {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else set()
    left |= {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in buffers) else set()
    made = set(model._keys_to_ignore_on_load_missing or ())
    ignored = [name for name in unexpected if any(re.search(each, name) for each in left)]
    unneeded = [name for name in missing if any(re.search(each, name) for each in made)]
    return {
        "ignored": ignored,
        "unexpected": [name for name in unexpected if name not in ignored],
        "missing": [name for name in missing if name not in unneeded],
        "unneeded": unneeded,
        "mismatched": mismatched,
        "renamed": renamed,
    }


def _class_name(auto: Any, config: dict[str, Any]) -> str:
    """The class that a config.json names, else the causal language model of its model_type."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    found = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if found is None:
        raise ValueError(f"transformers has no causal language model of the type {config['model_type']!r:.60}")
    return found if isinstance(found, str) else str(found[0])


def reason(error: BaseException) -> str:
    """The library's own words."""
    return f"{type(error).__name__}: {error!s:.400}"
