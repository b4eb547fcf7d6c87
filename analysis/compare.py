"""compare: what differs between models, as a table of components with the costs below. No weights, no torch.

A row is an aspect (see `aspects`) or a cost (see `costs`), with a cell a model. Costs are told at one context and in
one dtype, or they would say more about these than about the models.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..components import ModelSpec
from ..display import Shown
from ..errors import UsageError
from .aspects import Aspect, aspects
from .costs import Costs, costs
from .figures import Scenario, common_context
from .formats import weighed
from .params import ModelCount, params
from .sizes import itemsize


@dataclass(frozen=True)
class ComparedModel:
    """A model by the name it was given, its family ("" for a tree that never had one), its tree and its costs, and the
    bytes of its weights.
    """

    name: str
    family: str
    spec: ModelSpec
    costs: Costs
    weights: int
    revision: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def sees(self) -> bool:
        """Whether its table of positions is long enough for the context of its costs."""
        return self.spec.positions is None or self.costs.context <= self.spec.positions.length


@dataclass(frozen=True)
class AspectRow:
    """An aspect with a cell a model: in words, and as plain JSON values. `differs` is told from the data."""

    name: str
    words: tuple[str, ...]
    data: tuple[Any, ...]
    detail: bool = False

    @property
    def differs(self) -> bool:
        return len({json.dumps(each, sort_keys=True) for each in self.data}) > 1


@dataclass(frozen=True)
class Comparison(Shown):
    """Models side by side: their aspects, always all of them, and at what their costs were counted.

    context: tokens in sight, for FLOPs and the cache; dtype: of weights; cached: of the cache.
    """

    models: tuple[ComparedModel, ...]
    rows: tuple[AspectRow, ...]
    context: int
    dtype: str
    cached: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        differ = sum(row.differs for row in self.rows)
        names = ", ".join(model.name for model in self.models)
        return f"<comparison of {names}: {differ} of {len(self.rows)} aspects differ>"

    @property
    def told(self) -> tuple[str, ...]:
        """Notes for a person: on the table, and on each model."""
        return (*self.notes, *(f"{model.name}: {note}" for model in self.models for note in model.notes))

    def shown(self, *, everything: bool = False, only_differences: bool = False) -> tuple[AspectRow, ...]:
        """The rows for a person: those of interest and those that differ, or all of them, or only those that differ."""
        if only_differences:
            return tuple(row for row in self.rows if row.differs)
        return tuple(row for row in self.rows if everything or row.differs or not row.detail)

    def costs(self) -> dict[str, tuple[int | None, ...]]:
        """Each cost by its name, a figure a model, None where its table of positions is shorter than the context.

        parameters: all of them; active: those that a token meets, where that is not all of them in every model;
        weights: bytes; KV per token: bytes that one leaves in the cache; KV at the context: bytes, which windows make
        fewer; FLOPs: of the forward pass, a token that sees the context.
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
        found = {title: tuple(each[name] for each in figures) for name, title in names.items()}
        return found if found["active"] != found["parameters"] else {k: v for k, v in found.items() if k != "active"}

    def _costs(self, model: ComparedModel) -> dict[str, int | None]:
        size, figures = itemsize(self.cached), model.costs
        return {
            "parameters": figures.parameters,
            "active": figures.active,
            "weight_bytes": model.weights,
            "cache_bytes_a_token": figures.cache_bytes(size),
            "cache_bytes_at_context": figures.held_bytes(size) if model.sees else None,
            "flops_a_token": figures.total_flops if model.sees else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: every aspect as words and as data, costs as integers."""
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
        told = {"schema_version": 1, "context": self.context, "dtype": self.dtype, "cache_dtype": self.cached}
        differ = [row.name for row in self.rows if row.differs]
        return {**told, "models": models, "differs": differ, "notes": list(self.notes)}


def compare(
    *models: str | Path,
    context: int | None = None,
    dtype: str = "bfloat16",
    offline: bool = False,
    allow_pickle: bool = False,
) -> Comparison:
    """What differs between models, and what each costs.

    Args:
        models: whatever `params` takes: presets (`qwen3-8b`), samples, folders, config.json files, hub repositories.
        context: tokens in sight, for FLOPs and the cache; by default what all of the models have.
        dtype: of weights and cache, by any name that `params --dtype` takes; a cache is bfloat16 where weights are
            narrower.
        offline: use local files and the hub's cache only.
        allow_pickle: read a pickle that nothing describes but itself (nanoGPT's ckpt.pt).

    Raises:
        UsageError: no model, an unknown dtype, a context that no model has.
        InvalidInput: nothing of that name, or a broken config; the message names it.
        Offline: a repository whose config is not in the cache, and no network.
    """
    if not models:
        raise UsageError("compare needs at least one model", "For example: gptkit compare gpt2 llama-2-7b")
    asked = Scenario(dtype=dtype, context=context)
    return comparison(params(*models, offline=offline, allow_pickle=allow_pickle), asked)


def comparison(models: Sequence[ModelCount], asked: Scenario) -> Comparison:
    """Models that are known already, in the dtype and at the context of `asked`."""
    length = common_context([each.spec for each in models]) if asked.context is None else asked.context
    dtype = asked.dtype or "bfloat16"
    compared = []
    for each in models:
        figures, weights = costs(each.spec, length), weighed(each.spec, dtype, each.family).total
        compared.append(ComparedModel(each.name, each.family, each.spec, figures, weights, each.revision, each.notes))
    by_model = [{each.name: each for each in aspects(model.spec)} for model in compared]
    names = dict.fromkeys(name for each in by_model for name in each)
    family = AspectRow("family", tuple(m.family or "–" for m in compared), tuple(m.family for m in compared))
    rows = (family, *(_row([each.get(name, Aspect(name, "–", None)) for each in by_model]) for name in names))
    notes = []  # what the figures do not say by themselves
    for model in compared:
        own = model.spec.context_length
        if not model.sees and model.spec.positions is not None:
            notes.append(f"{model.name} has {model.spec.positions.length:,} positions, fewer than {length:,} tokens.")
        elif own is not None and length > own:
            notes.append(f"{model.name} has a context of {own:,} tokens, less than {length:,}.")
    return Comparison(tuple(compared), rows, length, dtype, asked.cached, tuple(dict.fromkeys(notes)))


def _row(cells: Sequence[Aspect]) -> AspectRow:
    """One aspect of all models. Where values that differ have the same words, they are numbered."""
    data = [json.dumps(cell.data, sort_keys=True) for cell in cells]
    words = []
    for cell, own in zip(cells, data, strict=True):
        same = list(dict.fromkeys(d for d, other in zip(data, cells, strict=True) if other.words == cell.words))
        words.append(cell.words if len(same) == 1 else f"{cell.words} #{same.index(own) + 1}")
    return AspectRow(cells[0].name, tuple(words), tuple(cell.data for cell in cells), cells[0].detail)
