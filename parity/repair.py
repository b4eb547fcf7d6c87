"""Why two models part: what would put it right.

The cause is found by trying: every mutation of `parity.mutations`, the reference's own fields and the reference's own
values. Each is tried first on the one unit where the models part (what stands before the layers, a layer, or what
stands behind them), fed with what the reference fed its own: that takes one unit's memory and time. What helps there
is made in the whole model, in all layers or in that one alone, and what brings the logits back is named.

A repair is made while weights are read, so that the same code repairs a model in memory and one a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ..components import ModelSpec, differences
from ..converter.checkpoint import Checkpoint
from ..converter.dtypes import to_float64
from ..modules.attention import Kernel
from ..modules.context import Context
from ..modules.decoder import BlockModule, EmbeddingModule, Front, HeadModule
from ..modules.load import as_array, filled, tensor_of
from ..modules.registry import build_module
from .bisect import Cause, Part
from .compare import largest_gap
from .mutations import MUTATIONS, Mutant, Weights
from .probe import RUNNING, Batch
from .sides import Sides

__all__ = ["Repair", "Repaired", "find_causes", "unit_of"]

Unit = int | Literal["front", "back"]
"""A layer by its index, what stands before all layers (embedding, its norm, positions), or behind (norm, head)."""

FEW = 4
"""Tensors that a repair may take from each other across layers."""
TRIED = 3
"""Repairs that are made in the whole of a model too large to be run for each."""
SHOWN = 5


@dataclass(frozen=True)
class Repair:
    """One repair in words: a change of tree and weights, or the names of tensors that get the reference's values."""

    words: str
    apply: Callable[[ModelSpec, Weights], Mutant | None] = lambda spec, weights: (spec, dict(weights))
    values: frozenset[str] = frozenset()


class Repaired:
    """A checkpoint's tree and weights in fp64 with a repair made in all of it or in one unit alone, read by name.

    What a repair changes is learnt from running it on the meta device, where every tensor has a shape and no memory.
    """

    def __init__(
        self, target: Checkpoint, source: Checkpoint, repair: Repair | None = None, only: Unit | None = None
    ) -> None:
        self.target, self.source, self.only = target, source, only
        self.repair = repair or Repair("nothing")
        self._shapes = _on_meta(target.spec)
        mutant = self.repair.apply(target.spec, self._shapes)
        tree, changed = (target.spec, self._shapes) if mutant is None else mutant
        self.spec = tree if only is None else _within(target.spec, tree, only)
        names = self.repair.values | {name for name, like in self._shapes.items() if changed.get(name) is not like}
        self._changed = names
        self.touched = {name for name in names if only is None or only in _users(name, self.spec)}
        self._made: tuple[frozenset[str], Weights] = frozenset(), {}

    @property
    def changes(self) -> bool:
        """Whether there is anything to repair, as far as trees and shapes tell."""
        return self.spec != self.target.spec or bool(self.touched)

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """A parameter's values, and that they are in fp64."""
        if name in self.repair.values or name not in self.touched:
            side = self.source if name in self.touched else self.target
            return to_float64(*side.tensor(name)), "F64"
        unit, changed = unit_of(name), self._changed
        # A tensor gets values from others that change with it: of its own layer, or of the few there are.
        group = changed if len(changed) <= FEW else {each for each in changed if unit_of(each) == unit}
        if self._made[0] != group:
            real = {each: torch.from_numpy(to_float64(*self.target.tensor(each))) for each in group}
            mutant = self.repair.apply(self.target.spec, {**self._shapes, **real})
            assert mutant is not None
            self._made = frozenset(group), {each: mutant[1][each] for each in group}
        return as_array(self._made[1][name])

    def release(self) -> None:
        """Let go of pages that were read."""
        self.target.release()
        self.source.release()


def _on_meta(spec: ModelSpec) -> dict[str, Tensor]:
    return {each.name: torch.empty(each.shape, dtype=torch.float64, device="meta") for each in spec.parameters()}


def unit_of(name: str) -> Unit:
    """The unit of a parameter or component by its shared name."""
    if name.startswith("blocks."):
        return int(name.split(".", 2)[1])
    return "back" if name.startswith(("final_norm", "head")) else "front"


def _users(name: str, spec: ModelSpec) -> tuple[Unit, ...]:
    """The units that compute with a parameter: a tied table is the head's too."""
    return ("front", "back") if name == "embedding.weight" and spec.head.tied else (unit_of(name),)


def _within(own: ModelSpec, other: ModelSpec, unit: Unit) -> ModelSpec:
    """A tree with one unit of another."""
    replace = msgspec.structs.replace
    if unit == "front":
        return replace(own, embedding=other.embedding, positions=other.positions)
    if unit == "back":
        return replace(own, final_norm=other.final_norm, head=other.head)
    blocks = list(own.blocks)
    blocks[unit] = other.blocks[unit]
    return replace(own, blocks=tuple(blocks))


# --- one unit at a time ----------------------------------------------------------------------------------------------


Seen = dict[int, Tensor]
"""Hidden states (B, T, hidden) by the identity of the batch."""


def run_unit(tree: Repaired, unit: Unit, inputs: Seen, batches: Sequence[Batch], path: Kernel) -> Iterator[Tensor]:
    """What a unit makes of its inputs, (N, features) a batch in fp64, computed in the inputs' dtype; batch by batch.

    Args:
        tree: the tree that it is a unit of.
        unit: which.
        inputs: by the identity of the batch, hidden states (B, T, hidden); for the front their dtype alone counts.
        batches: what to run.
        path: the attention to compute with.

    """
    dtype, read = next(iter(inputs.values())).dtype, partial(tensor_of, tree)
    if unit == "front":
        module: nn.Module = filled(partial(Front, tree.spec), read, dtype)
    elif unit == "back":
        module = filled(partial(_Back, tree.spec), read, dtype)
    else:
        module = filled(partial(BlockModule, tree.spec.blocks[unit], path), read, dtype, f"blocks.{unit}")
    for batch in batches:
        given = inputs[id(batch)]
        shape = batch.input_ids.shape
        positions = torch.arange(shape[1])[None]
        with torch.inference_mode():
            if unit == "front":
                out = module(batch.input_ids, positions)
            elif unit == "back":
                out = module(given)
            else:
                context = Context(shape[0], shape[1], 0, False, positions, batch.attention_mask, dtype)
                out = module(given, context)
            rows = batch.valid(out).double()
        yield rows


class _Back(nn.Module):
    """What comes out of the last layer -> logits."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.final_norm = build_module(spec.final_norm)
        self.head = HeadModule(spec.head)
        table = msgspec.structs.replace(spec.embedding, norm=None)
        self.embedding = EmbeddingModule(table) if spec.head.tied else None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.final_norm(x)
        logits: Tensor = self.head(normed, normed if self.embedding is None else self.embedding.weight)
        return logits


@contextmanager
def _around(model: nn.Module, name: str, seen: tuple[dict[int, Tensor], dict[int, Tensor]]) -> Iterator[None]:
    """While open, what goes into a module and what comes out of it is left by batch."""

    def going_in(_: nn.Module, args: Any, kwargs: Any) -> None:
        batch = RUNNING.get(None)
        if batch is not None:
            seen[0][id(batch)] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

    def coming_out(_: nn.Module, __: Any, output: Any) -> None:
        batch = RUNNING.get(None)
        if batch is not None:
            seen[1][id(batch)] = (output[0] if isinstance(output, tuple) else output).detach().clone()

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(going_in, with_kwargs=True),
        model.get_submodule(name).register_forward_hook(coming_out),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layer_name(source: Checkpoint, layer: int) -> str:
    """The transformers module that is a layer: the name of its tensors up to its number."""
    assert source.architecture is not None
    bound = source.architecture.bind(source.spec)
    parts = next(leaf.checkpoint for leaf in bound if leaf.shared[0].startswith(f"blocks.{layer}.")).split(".")
    return ".".join(parts[: parts.index(str(layer)) + 1])


# --- trying ----------------------------------------------------------------------------------------------------------


def find_causes(
    both: Sides, batches: Sequence[Batch], path: Kernel, allowed: float, places: Sequence[Part], few: bool
) -> list[Cause]:
    """Repairs that bring the candidate's logits closer, those that restore parity first.

    Args:
        both: the two sides, of one width and one number of layers.
        batches: the inputs.
        path: the attention that both compute with.
        allowed: the difference of logits that rounding explains.
        places: where the models part, from `bisect`.
        few: make few of them in the whole model, since running it takes long.

    """
    first = next((place for place in places if place.parts), None)
    if first is None:
        return []  # one function, computed with less precision: nothing in it to repair
    source, target = both.source, both.target
    ends: Unit = "back" if first.label in ("final norm", "head") else "front"
    unit = ends if first.layer is None else first.layer
    layer = len(source.spec.blocks) - 1 if unit == "back" else 0 if unit == "front" else unit
    seen: tuple[Seen, Seen] = {}, {}
    exact = both.reference(batches, torch.float64, path, partial(_around, name=_layer_name(source, layer), seen=seen))
    finite = [bool(torch.isfinite(logits).all()) for logits in exact]
    batches = [batch for batch, good in zip(batches, finite, strict=True) if good]
    exact = [logits for logits, good in zip(exact, finite, strict=True) if good]
    if unit == "back":
        inputs, outputs = seen[1], exact
    else:
        inputs, outputs = seen[0], [batch.valid(seen[0 if unit == "front" else 1][id(batch)]) for batch in batches]

    def gap_of(tree: Repaired, enough: float) -> float:
        """How far off the unit is, up to the first batch that is further off than `enough`: most repairs are wrong, and
        show it on a few tokens.
        """
        gap = 0.0
        for expected, found in zip(outputs, run_unit(tree, unit, inputs, batches, path), strict=True):
            here = largest_gap([expected], [found])
            gap = here if not here <= gap else gap
            if not gap <= enough:
                break
        return gap

    def left(tree: Repaired) -> float:
        return largest_gap(exact, both.candidate(batches, torch.float64, path, tree=tree))

    as_it_is = Repaired(target, source)
    wide = list(run_unit(as_it_is, unit, inputs, batches, path))
    narrow = list(run_unit(as_it_is, unit, {key: value.float() for key, value in inputs.items()}, batches, path))
    start, rounding = largest_gap(outputs, wide), 2 * largest_gap(wide, narrow)
    if start <= rounding:
        return []  # the unit is right on right inputs: there is nothing in it to repair
    helps: list[tuple[bool, Repair]] = []
    for repair in _repairs(source, target):
        tree = Repaired(target, source, repair, unit)
        if not tree.changes:
            continue
        gap = gap_of(tree, enough=max(rounding, start / 10))
        if gap <= rounding or gap < start / 10:
            helps.append((gap <= rounding, repair))
    helps.sort(key=lambda pair: not pair[0])
    whole = left(as_it_is)
    found = []
    for restores, repair in helps[: TRIED if few else None]:
        found += list(_in_the_whole(left, both, repair, unit, allowed, whole, restores))
    return sorted(found, key=lambda cause: (not cause.restores, cause.left))[:SHOWN]


def _in_the_whole(
    left: Callable[[Repaired], float],
    both: Sides,
    repair: Repair,
    unit: Unit,
    allowed: float,
    start: float,
    restores: bool,
) -> Iterator[Cause]:
    """The repair made everywhere, and, where that does not do, in that unit alone."""
    gap = left(Repaired(both.target, both.source, repair))
    if gap <= allowed or gap < start / 10:
        yield Cause(repair.words, gap <= allowed, gap)
    if not gap <= allowed:
        alone = left(Repaired(both.target, both.source, repair, unit))
        # A repair that puts its unit right is a cause, though there are others behind it.
        if alone <= allowed or alone < start / 10 or restores:
            where = f" in layer {unit}" if isinstance(unit, int) else ""
            yield Cause(repair.words + where, alone <= allowed, alone)


def _repairs(source: Checkpoint, target: Checkpoint) -> Iterator[Repair]:
    """Everything to try, whether or not it changes anything."""
    spec, own = source.spec, target.spec
    for mutation in MUTATIONS:
        if mutation.name != "tied head ignored" and not mutation.in_code:  # a head at random puts nothing right
            yield Repair(mutation.repair, mutation.mend)
    if spec.head.tied and not own.head.tied and not own.head.bias:

        def tie(tree: ModelSpec, weights: Weights) -> Mutant:
            kept = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
            return msgspec.structs.replace(tree, head=spec.head), kept

        yield Repair("tying the head to the embedding", tie)
    if [(p.name, p.shape) for p in spec.parameters()] != [(p.name, p.shape) for p in own.parameters()]:
        return
    if spec != own:
        fields = sorted({path.split(".")[-1] for path, _, _ in differences(spec, own)})
        yield Repair(f"the reference's {', '.join(fields)}", lambda tree, weights: (spec, dict(weights)))
    wrong = list(_unequal(source, target))
    if wrong:
        kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in wrong)
        words = ", ".join(list(kinds)[:4]) + (", …" if len(kinds) > 4 else "")
        yield Repair(f"the reference's values of {words}", values=frozenset(wrong))


def _unequal(source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """Parameters of one tree whose values differ."""
    for parameter in source.spec.parameters():
        a, b = source.tensor(parameter.name), target.tensor(parameter.name)
        if not (np.array_equal(a[0], b[0]) if a[1] == b[1] else np.array_equal(to_float64(*a), to_float64(*b))):
            yield parameter.name
        source.release()
        target.release()
