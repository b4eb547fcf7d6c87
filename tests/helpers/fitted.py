"""Tiny models after swaps that are fitted on random tokens, on any device."""

from typing import Any

import torch

from gptkit.components import ModelSpec
from gptkit.surgery.base import Exactly, SwappedModel
from gptkit.surgery.fits.calibration import Calibration
from gptkit.surgery.fits.text import CalibrationText
from gptkit.surgery.registry import Step, apply
from helpers.families import REPRESENTATIVES, spec_of
from helpers.weights import Weights

FITS = {
    ("attention", "gqa:2"): "gpt2",
    ("attention", "mla:24"): "llama",
    ("attention", "linear"): "llama",
    ("heads", "2"): "gpt2",
    ("heads", "2:active"): "gpt2",
    ("intermediate", "32"): "mixtral",
    ("intermediate", "32:active"): "llama",
    ("experts", "2"): "mixtral",
    ("mlp", "plain"): "llama",
    ("mlp", "dense"): "mixtral",
    ("activation", "gelu:fit"): "llama",
    ("position", "none"): "llama",
    ("hidden", "40"): "llama",
    ("layers", "auto:1"): "llama",
    ("quantize", "int4:8"): "llama",
}
"""Swaps that are fitted on a text, with a family whose tiny model they suit. Each runs other code of `surgery/fits`."""


def model_for(option: str, value: str) -> tuple[ModelSpec, Any]:
    """Return the tree of the model that a swap of `FITS` suits, and the model with random weights."""
    spec = spec_of(REPRESENTATIVES[FITS[option, value]].config)
    return spec, Weights(spec)


def fitted(option: str, value: str, model: Any, device: str) -> Exactly:
    """Return a model after a swap of `FITS`. The fit runs on the device when a tensor is first read."""
    ids = torch.randint(model.spec.vocab_size, (320,), generator=torch.Generator().manual_seed(0)).tolist()
    text = CalibrationText(tuple(ids[:256]), tuple(ids[256:]), "random", "", tuple(ids[256:]))
    how: Any = {"calibration": lambda: Calibration(text, model.spec, 64, device), "has_text": lambda: True}
    return Exactly(SwappedModel(model, apply(model, Step(option, value), **how)))
