"""gptkit: take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.

Every command is a function here; each imports what it needs when it is first asked for, so that counting parameters
never waits for torch.

    load(model)                  a torch module: input_ids (B, T) -> logits (B, T, vocabulary)
    open_checkpoint(model)       the tree and where its tensors lie, without reading weights
    convert(model, out, to)      to gptkit's own format ("local") or back to Hugging Face files ("hf")
    swap(model, out, norm)       exchange a component, with a guarantee that is measured
    params(model)                parameters per component, from a config alone
    compare(model, other)        what differs between models, with costs
    diff(a, b)                   what differs between two checkpoints, tensor by tensor
    audit(new, source)           what is wrong with a checkpoint of any family
    recommend(goal, params)      components for a goal and a size, with costs and papers
    verify(model, other)         logits against transformers
    generate(model, text)        text from a checkpoint or a model in memory, as an iterator of pieces
    tokenize(files, out)         texts as a folder of tokens, for training
    train(model, data, out)      a tree from random weights, or a checkpoint further
    heal(changed, teacher, data, out)  a changed model trained to answer as its original, beside a control
    ablate(plan, out)            variants of a model, each trained or healed under the same budget
    fit_scaling(runs)            the law that losses follow over sizes and tokens, and the best run of a budget
    evaluate(model, data)        perplexity, bits a byte and accuracy on texts, by position, beside another model
    save(model, folder, as_)     a model in memory (trained, edited) as a checkpoint folder
    progress(what)               a line that tells how far one of these is, in a notebook too

What they raise is in `gptkit.errors`, all of it a `gptkit.errors.GptkitError`.
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
    """A value as a notebook shows it; what draws it is imported once a notebook asks."""
    from .report.notebook import html

    return html(value)


Shown._repr_html_ = _table


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from .plugins import load as load_plugins  # what it complains with is a library, and signals come first

        load_plugins()
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
