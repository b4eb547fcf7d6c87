"""The `compare` command: the differences between models, as a table of aspects and costs. No weights, no torch.

A row is an aspect (see `aspects`) or a cost (see `costs`), with one cell per model. All costs are at the same context
and dtype, so that they differ only because the models differ.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from ..components import ModelSpec
from ..converter.opening import Opening
from ..display import Shown
from ..errors import UsageError
from ..signatures import takes
from .aspects import Aspect, aspects
from .costs import Costs, costs
from .figures import Scenario, common_context
from .formats import weighed
from .params import ModelCount, params
from .sizes import itemsize


@dataclass(frozen=True)
class ComparedModel:
    """One of the models of a comparison."""

    name: str  # as the user gave it
    family: str  # the model family, such as "llama", or "" if it is unknown
    spec: ModelSpec
    costs: Costs
    weights: int  # bytes
    revision: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def sees(self) -> bool:
        """Return whether the model can read the whole context, because its position table is long enough."""
        return self.spec.positions is None or self.costs.context <= self.spec.positions.length


@dataclass(frozen=True)
class AspectRow:
    """An aspect with one cell per model, in words and as plain JSON values."""

    name: str
    words: tuple[str, ...]
    data: tuple[Any, ...]
    detail: bool = False

    @property
    def differs(self) -> bool:
        return len({json.dumps(cell, sort_keys=True) for cell in self.data}) > 1


@dataclass(frozen=True)
class Comparison(Shown):
    """A comparison of models: all their aspects, and their costs at one context and dtype."""

    models: tuple[ComparedModel, ...]
    rows: tuple[AspectRow, ...]
    context: int
    """The number of tokens for FLOPs and the cache."""
    dtype: str
    """The dtype of the weights."""
    cached: str
    """The dtype of the cache."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        differ = sum(row.differs for row in self.rows)
        names = ", ".join(model.name for model in self.models)
        return f"<comparison of {names}: {differ} of {len(self.rows)} aspects differ>"

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the notes on the comparison, and then the notes on every model."""
        return (*self.notes, *(f"{model.name}: {note}" for model in self.models for note in model.notes))

    def shown(self, *, everything: bool = False, only_differences: bool = False) -> tuple[AspectRow, ...]:
        """Return the rows to print.

        By default, these are all rows except details in which the models are equal. `everything` also returns these
        details, and `only_differences` returns only the rows in which models differ.
        """
        if only_differences:
            return tuple(row for row in self.rows if row.differs)
        return tuple(row for row in self.rows if everything or row.differs or not row.detail)

    def costs(self) -> dict[str, tuple[int | None, ...]]:
        """Return the costs by name, with one figure per model.

        A figure is None if the model's position table is shorter than the context. Active parameters are those that
        one token uses. They are left out if this is all parameters in every model. Weights and cache are in bytes.
        FLOPs are those of the forward pass of one token that attends to `context` tokens.
        """
        names = {
            "parameters": "parameters",
            "active": "active",
            "weight_bytes": "weights",
            "cache_bytes_a_token": "KV per token",
            "cache_bytes_at_context": f"KV at {self.context:,}",
            "flops_a_token": "FLOPs per token",
        }
        figures = [self._costs(model) for model in self.models]
        costs = {title: tuple(of_model[name] for of_model in figures) for name, title in names.items()}
        if costs["active"] == costs["parameters"]:
            del costs["active"]
        return costs

    def _costs(self, model: ComparedModel) -> dict[str, int | None]:
        size, figures = itemsize(self.cached), model.costs
        return {
            "parameters": figures.parameters,
            "active": figures.active,
            "weight_bytes": model.weights,
            "cache_bytes_a_token": figures.cache_bytes(size),
            "cache_bytes_at_context": figures.cache_bytes_at_context(size) if model.sees else None,
            "flops_a_token": figures.total_flops if model.sees else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values: every aspect as words and as data, and costs as integers."""
        models = [
            {
                "model": model.name,
                "family": model.family,
                "revision": model.revision,
                "aspects": {row.name: {"words": row.words[index], "value": row.data[index]} for row in self.rows},
                "costs": self._costs(model),
                "notes": list(model.notes),
            }
            for index, model in enumerate(self.models)
        ]
        head = {"schema_version": 1, "context": self.context, "dtype": self.dtype, "cache_dtype": self.cached}
        differ = [row.name for row in self.rows if row.differs]
        return {**head, "models": models, "differs": differ, "notes": list(self.notes)}


@takes(Opening)
def compare(
    *models: str | Path, context: int | None = None, dtype: str = "bfloat16", **opening: Unpack[Opening]
) -> Comparison:
    """Compare the components and the costs of models.

    Args:
        models: as in `params`: presets (`qwen3-8b`), samples, folders, config.json files, hub repositories.
        context: the number of tokens that FLOPs and the cache are computed for; by default the longest context that all
            of the models have.
        dtype: the dtype of weights and cache, by any name that `params --dtype` accepts. If the weights are narrower
            than bfloat16, the cache is in bfloat16.
        offline, allow_pickle: see `Opening`.

    Raises:
        UsageError: there is no model, the dtype is unknown, or no model has this context.
        InvalidInput: no model has this name, or its config is broken; the message names it.
        Offline: there is no network, and a repository's config is not in the cache.
    """
    if not models:
        raise UsageError("compare needs at least one model", "For example: gptkit compare gpt2 llama-2-7b")
    asked = Scenario(dtype=dtype, context=context)
    return comparison(params(*models, **opening), asked)


def comparison(models: Sequence[ModelCount], asked: Scenario) -> Comparison:
    """Compare models whose parameters are counted already.

    `asked` has the context of the comparison, and the dtypes of the weights and the cache. Other fields are ignored.
    """
    length = common_context([model.spec for model in models]) if asked.context is None else asked.context
    dtype = asked.dtype or "bfloat16"
    compared = []
    for counted in models:
        name, family, spec = counted.name, counted.family, counted.spec
        figures, weights = costs(spec, length), weighed(spec, dtype, family).total
        compared.append(ComparedModel(name, family, spec, figures, weights, counted.revision, counted.notes))
    by_model = [{aspect.name: aspect for aspect in aspects(model.spec)} for model in compared]
    names = dict.fromkeys(name for described in by_model for name in described)
    families = AspectRow("family", tuple(m.family or "–" for m in compared), tuple(m.family for m in compared))
    rows = (families, *(_row([cells.get(name, Aspect(name, "–", None)) for cells in by_model]) for name in names))
    notes = []
    for model in compared:
        stated = model.spec.context_length
        if not model.sees and model.spec.positions is not None:
            notes.append(f"{model.name} has {model.spec.positions.length:,} positions, fewer than {length:,} tokens.")
        elif stated is not None and length > stated:
            notes.append(f"{model.name} has a context of {stated:,} tokens, less than {length:,}.")
    return Comparison(tuple(compared), rows, length, dtype, asked.cached, tuple(dict.fromkeys(notes)))


def _row(cells: Sequence[Aspect]) -> AspectRow:
    """Return the row for one aspect, from the cells of all models.

    If two models have equal words but different data, the words get numbers, so that the row shows the difference.
    """
    data = [json.dumps(cell.data, sort_keys=True) for cell in cells]
    words = []
    for cell, value in zip(cells, data, strict=True):
        same = list(dict.fromkeys(d for d, other in zip(data, cells, strict=True) if other.words == cell.words))
        words.append(cell.words if len(same) == 1 else f"{cell.words} #{same.index(value) + 1}")
    return AspectRow(cells[0].name, tuple(words), tuple(cell.data for cell in cells), cells[0].detail)
