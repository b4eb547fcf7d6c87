"""gptkit: take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.

Every command is also a function. A function imports its dependencies when it is first used, so that counting parameters
never waits for torch.

    load(model)                  return a torch module: input_ids (B, T) -> logits (B, T, vocabulary)
    open_checkpoint(model)       return the tree and the places of its tensors, without reading weights
    convert(model, out, to)      convert to gptkit's own format ("local") or to Hugging Face files ("hf")
    swap(model, out, norm)       exchange a component, and measure the guarantee
    params(model)                count the parameters per component, from a config alone
    compare(model, other)        compare the components and costs of models
    diff(a, b)                   compare two checkpoints, tensor by tensor
    audit(new, source)           find the faults of a checkpoint of any family
    recommend(goal, params)      recommend components for a goal and a size, with costs and papers
    verify(model, other)         compare logits with transformers
    generate(model, text)        generate text with a checkpoint or a model in memory, piece by piece
    tokenize(files, out)         write texts as a folder of tokens, for training
    train(model, data, out)      train from random weights, or continue a checkpoint
    heal(changed, teacher, data, out)  train a changed model to predict what its original predicts
    ablate(plan, out)            train or heal variants of a model, all with the same budget
    fit_scaling(runs)            fit a scaling law to runs, and predict the best run for a budget
    evaluate(model, data)        measure perplexity, bits per byte and accuracy on texts, by position
    save(model, folder, as_)     write a model in memory as a checkpoint folder
    progress(what)               show the progress of another function, also in a notebook

All errors are subclasses of `gptkit.errors.GptkitError`.
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
