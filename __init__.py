"""gptkit: take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.

The commands of the command line are also functions of this package:

    params(model)                Count the parameters of a model by component, from its config, without weights.
    compare(model, other)        Compare the components and costs of several models, from their configs.
    recommend(goal, params)      Propose an architecture for a goal and a number of parameters.
    load(model)                  Load a checkpoint as a torch module: input_ids (B, T) -> logits (B, T, vocabulary).
    generate(model, text)        Generate text with a checkpoint or a loaded model. Yields pieces of text.
    save(model, folder, as_)     Save a model in memory, for example after training or editing, as a checkpoint.
    open_checkpoint(model)       Open a checkpoint without reading weights: its components, and where its tensors are.
    convert(model, out, to)      Convert a checkpoint to gptkit's own format ("local"), Hugging Face files ("hf"), GGUF.
    swap(model, out, norm)       Replace components of a model, and measure how much its logits change.
    diff(a, b)                   Compare two checkpoints tensor by tensor.
    audit(new, source)           Report what is wrong with a checkpoint of any family.
    verify(model, other)         Compare the logits of a checkpoint with those of transformers.
    tokenize(files, out)         Convert texts to a folder of tokens for training.
    train(model, data, out)      Train a model from random weights, or continue from a checkpoint.
    heal(changed, teacher, data, out)   Train a changed model to make the same predictions as its original.
    ablate(plan, out)            Train several variants of a model with the same budget, and compare them.
    fit_scaling(runs)            Fit a scaling law to runs of several sizes, and predict the best size for a budget.
    evaluate(model, data)        Measure perplexity, bits per byte and accuracy on texts.
    progress(what)               Return a progress line for one of these functions, for a terminal or a notebook.

A function imports its libraries when it is first used, so counting parameters does not wait for torch. All errors that
gptkit raises are subclasses of `gptkit.errors.GptkitError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .display import Shown
from .version import __version__

if TYPE_CHECKING:
    from .analysis.compare import compare as compare
    from .analysis.params import params as params
    from .analysis.recommend import recommend as recommend
    from .converter.checkpoint import open_checkpoint as open_checkpoint
    from .converter.convert import convert as convert
    from .modules.load import load as load
    from .modules.save import save as save
    from .modules.text import generate as generate
    from .parity.audit import audit as audit
    from .parity.diff import diff as diff
    from .parity.verify import verify as verify
    from .report.notebook import progress as progress
    from .training.ablate import ablate as ablate
    from .training.data import tokenize as tokenize
    from .training.evaluate import evaluate as evaluate
    from .training.heal import heal as heal
    from .training.healed import swap as swap
    from .training.scaling import fit_scaling as fit_scaling
    from .training.train import train as train

_HOMES = {
    "ablate": ".training.ablate",
    "audit": ".parity.audit",
    "compare": ".analysis.compare",
    "convert": ".converter.convert",
    "diff": ".parity.diff",
    "evaluate": ".training.evaluate",
    "fit_scaling": ".training.scaling",
    "generate": ".modules.text",
    "heal": ".training.heal",
    "load": ".modules.load",
    "open_checkpoint": ".converter.checkpoint",
    "params": ".analysis.params",
    "progress": ".report.notebook",
    "recommend": ".analysis.recommend",
    "save": ".modules.save",
    "swap": ".training.healed",
    "tokenize": ".training.data",
    "train": ".training.train",
    "verify": ".parity.verify",
}

__all__ = ["__version__", *_HOMES]


def _table(value: Shown) -> str:
    """Return a value as HTML for a notebook. The module that draws it is imported when a notebook asks for it."""
    from .report.notebook import html

    return html(value)


Shown._repr_html_ = _table


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # Here, because reporting a broken plugin needs a library, and signals must be handled before any is imported.
        from .plugins import load as load_plugins

        load_plugins()
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
