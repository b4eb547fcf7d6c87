"""What transformers' own class makes of a config.json, by names and shapes: a worker of `confinement`.

A config.json that we did not write may ask for any number of layers, and a class of any size may be made of it: on the
meta device, where no parameter takes memory, and in this process, whose time and memory are limited.
"""

import os
import sys
import tempfile
from typing import Any

from .confinement import allow

LIBRARIES = (2**34, 0, 120.0, 0.0)  # address space, which torch takes much of and uses little
_BUILDING = (2**33, 0, 12.0, 0.0)  # DeepSeek-V3 with twice its layers takes 2 seconds


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The name of the class, and its parameters in order, each with its shape, a shared one once."""
    allow(0, LIBRARIES)
    sys.path += question["libraries"]
    tempfile.tempdir = os.sep  # which torch asks for, and to look for one is to write a file: this process writes none
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    config = dict(question["config"])
    name = _class_name(modeling_auto, config)
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no {name}")
    allow(0, _BUILDING)
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**config))
    parameters = [[name, list(value.shape)] for name, value in model.named_parameters()]
    return {"class": name, "parameters": parameters}


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
