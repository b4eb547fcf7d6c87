"""Find the cause of a difference between two models: the repair that removes it.

gptkit takes the first part of the model that differs: a layer, the part before all layers, or the part after them. (The
code calls such a part a *unit*.) It runs this part alone on the reference's input, with one repair at a time, which
needs the memory and the time of one part. The repairs are the inverses of the mistakes in `parity.mutations`, the
reference's config fields, and the reference's weights.

Repairs that help there are then made in the whole model: in all layers, or in that part alone. Those that restore the
logits are reported. Repairs are applied while weights are read, so they also work for a model that runs one layer at a
time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..analysis.parameters import SMALL, count
from ..components import ModelSpec, differences
from ..components.ranges import some_of
from ..converter.checkpoint import Checkpoint
from ..converter.dtypes import to_float64
from ..modules.context import Context
from ..modules.decoder import BlockModule, Front, PoolerModule
from ..modules.load import as_array, filled, tensor_of
from .bisect import Cause, Divergence, Part, bisect, first_of
from .compare import largest_gap
from .mutations import MUTATIONS, Mutant, Weights
from .outputs import with_pooled
from .passes import hooked
from .probe import RUNNING, TABLES, ProbeBatch
from .rows import final_norm, head_rows
from .sides import Sides

_Unit = int | Literal["front", "back"]
"""A layer by its index, the part before all layers (embedding, its norm, positions), or the part after them (norm,
head).
"""

_TOKENS = 256
"""The tokens on which a model with more than `SMALL` parameters is compared by component, unless one batch has more."""
_ROOM = 2**30  # bytes in the temporary folder for one side's outputs of all components
_FEW = 4  # the largest number of changed tensors that a repair may exchange across layers
_TRIED = 3  # the number of repairs that are tried in the whole of a large model
_SHOWN = 5  # the number of reported causes


@dataclass(frozen=True)
class Repair:
    """A possible repair: a change of the component tree and the weights, or tensors that get the reference's values."""

    words: str  # the repair in words
    apply: Callable[[ModelSpec, Weights], Mutant | None] = lambda spec, weights: (spec, dict(weights))
    values: frozenset[str] = frozenset()  # the names of tensors that get the reference's values
    copies: bool = False  # whether it copies a part of the reference; otherwise it undoes a known mistake


class Repaired:
    """A checkpoint with a repair, in fp64. The repair is applied to the whole model or to one part of it (see `_Unit`).

    Tensors are repaired when they are read. To find out which tensors a repair changes, it is first applied to tensors
    on the meta device, which need no memory.
    """

    def __init__(
        self, target: Checkpoint, source: Checkpoint, repair: Repair | None = None, only: _Unit | None = None
    ) -> None:
        self.target, self.source, self.only = target, source, only
        self.repair = repair or Repair("nothing")
        like = partial(torch.empty, dtype=torch.float64, device="meta")
        self._shapes = {parameter.name: like(parameter.shape) for parameter in target.spec.parameters()}
        mutant = self.repair.apply(target.spec, self._shapes)
        tree, changed = (target.spec, self._shapes) if mutant is None else mutant
        self.spec = tree if only is None else _within(target.spec, tree, only)
        changed_names = {name for name, shape in self._shapes.items() if changed.get(name) is not shape}
        self._changed = self.repair.values | changed_names
        # A tied table is also the head's weight.
        ends = ("embedding.weight",) if only == "back" and self.spec.tied else ()
        self.touched = {name for name in self._changed if only is None or unit_of(name) == only or name in ends}
        self._made: tuple[frozenset[str], Weights] = frozenset(), {}

    @property
    def changes(self) -> bool:
        """Return whether the repair has any effect on the component tree or a tensor."""
        return self.spec != self.target.spec or bool(self.touched)

    def tensor(self, name: str) -> tuple[np.ndarray, str]:
        """Return a parameter's values after the repair, and their dtype, which is always "F64"."""
        if name in self.repair.values or name not in self.touched:
            side = self.source if name in self.touched else self.target
            return to_float64(*side.tensor(name)), "F64"
        unit, changed = unit_of(name), self._changed
        # A tensor may get values of other changed tensors: those of its layer, or all if there are few.
        group = changed if len(changed) <= _FEW else {member for member in changed if unit_of(member) == unit}
        if self._made[0] != group:
            real = {member: torch.from_numpy(to_float64(*self.target.tensor(member))) for member in group}
            mutant = self.repair.apply(self.target.spec, {**self._shapes, **real})
            assert mutant is not None
            self._made = frozenset(group), {member: mutant[1][member] for member in group}
        return as_array(self._made[1][name])

    def release(self) -> None:
        """Release the memory-mapped pages that were read."""
        self.target.release()
        self.source.release()


def unit_of(name: str) -> _Unit:
    """Return the part of the model to which a parameter or component belongs: a layer's index, "front" or "back"."""
    if name.startswith("blocks."):
        return int(name.split(".", 2)[1])
    return "back" if name.startswith(("final_norm", "head", "pooler")) else "front"


def _within(tree: ModelSpec, source: ModelSpec, unit: _Unit) -> ModelSpec:
    """Return the component tree `tree` with one part (a layer, "front" or "back") taken from `source`."""
    change = msgspec.structs.replace
    if unit == "front":
        front = ("embedding", "token_types", "positions", "first_norm")
        return change(tree, **{name: getattr(source, name) for name in front})
    if unit == "back":
        return change(tree, final_norm=source.final_norm, head=source.head, pooler=source.pooler)
    return change(tree, blocks=(*tree.blocks[:unit], source.blocks[unit], *tree.blocks[unit + 1 :]))


_Seen = dict[int, Tensor]  # hidden states (B, T, hidden) by the identity of the batch


def _run_unit(
    tree: Repaired, unit: _Unit, inputs: _Seen, batches: Sequence[ProbeBatch], path: Kernel
) -> Iterator[Tensor]:
    """Run one part of a model and yield its output for each batch, (N, features) in fp64, on the CPU.

    Args:
        tree: the model.
        unit: the part: the index of a layer, "front" or "back".
        inputs: the input of the part for each batch. The part computes in the dtype and on the device of these inputs.
        batches: the batches.
        path: the attention implementation, "sdpa" or "eager".
    """
    first, read = next(iter(inputs.values())), partial(tensor_of, tree)
    dtype, device = first.dtype, first.device
    module: Callable[..., Tensor]
    if unit == "front":
        whole = filled(partial(Front, tree.spec), read, dtype, device=device)
        module = lambda *arguments: whole(*arguments)[0]  # noqa: E731
    elif unit == "back":
        norm, head = final_norm(tree, dtype, device), next(head_rows(tree, dtype, [slice(None)], device))
        pooler = None
        if tree.spec.pooler is not None:
            pooler = filled(partial(PoolerModule, tree.spec.pooler), read, dtype, "pooler", device)

        def module(x: Tensor) -> Tensor:
            states: Tensor = norm(x)
            pooled = None if pooler is None else pooler(states)
            return head(states) if tree.spec.head is not None else with_pooled(states, pooled)

    else:
        module = filled(partial(BlockModule, tree.spec.blocks[unit], path), read, dtype, f"blocks.{unit}", device)
    for batch in batches:
        rows, steps = batch.input_ids.shape
        x, positions = inputs[id(batch)], torch.arange(steps, device=device)[None]
        context = Context(rows, steps, 0, False, positions, batch.attention_mask, dtype)
        front = (batch.input_ids, positions, batch.attention_mask, batch.token_types)
        arguments = front if unit == "front" else (x,) if unit == "back" else (x, context)
        with torch.inference_mode():
            output = batch.valid(module(*arguments)).cpu().double()
        yield output


def _around(model: nn.Module, name: str, seen: tuple[_Seen, _Seen]) -> ExitStack:
    """Record the input and the output of the module `name` for each batch, in the two dictionaries `seen`.

    Returns a context that removes the hooks when it ends.
    """

    def going_in(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen[0][id(RUNNING.get())] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

    def coming_out(_: nn.Module, __: Any, output: Any) -> None:
        seen[1][id(RUNNING.get())] = (first_of(output)).detach().clone()

    module = model.get_submodule(name)
    before = module.register_forward_pre_hook(going_in, with_kwargs=True)
    return hooked([before, module.register_forward_hook(coming_out)])


def diagnose(
    both: Sides,
    batches: Sequence[ProbeBatch],
    path: Kernel,
    allowed: float | None,
    notes: list[str],
    *,
    gaps: Sequence[Tensor] | None = None,
    asked: bool = False,
) -> Divergence | None:
    """Return where the two models of a verification differ first, and the likely causes.

    Return None, and add the reason to `notes`, if the models cannot be compared by component. The same applies to large
    models in memory, unless `asked` is true.

    Args:
        both: the two models.
        batches: the inputs.
        path: the attention implementation of both models, "sdpa" or "eager".
        allowed: the difference of logits that rounding explains. With None no cause is searched for.
        notes: notes for the user, to which this function adds.
        gaps: the difference of the logits at each position, (N,) per batch. Large models are only compared at the
            positions with the largest differences.
        asked: whether the user asked for this comparison.
    """
    source, target = both.source, both.target
    large = max(count(side.spec).total for side in (source, target)) > SMALL
    if large and both.folder is not None and not asked:
        notes.append(
            "the first differing component was not searched for, because the model has more than 50 million parameters"
        )
        return None
    if len(source.spec.blocks) != len(target.spec.blocks):
        notes.append(
            "the first differing component was not searched for, because the models have different numbers of layers"
        )
        return None
    if large:
        # About the bytes of one position in fp64: all outputs, and equally large inputs of projections.
        row = 16 * sum(parameter.shape[0] for parameter in source.spec.parameters() if parameter.name not in TABLES)
        batches = where_they_differ(batches, gaps, row)
    places = bisect(both, batches, path)
    if allowed is None or source.spec.hidden_size != target.spec.hidden_size:
        return Divergence(tuple(places))
    inputs = source.spec.extra_inputs or target.spec.extra_inputs
    if inputs:
        notes.append(f"the cause was not searched for, because layers read more than the residual stream ({inputs})")
        return Divergence(tuple(places))
    causes, tried = _find_causes(both, batches, path, allowed, places, few=large)
    undone, copied = (tuple(repair.words for repair in tried if repair.copies == copies) for copies in (False, True))
    return Divergence(tuple(places), tuple(causes), undone, copied)


def where_they_differ(batches: Sequence[ProbeBatch], gaps: Sequence[Tensor] | None, row: int) -> list[ProbeBatch]:
    """Return the batches, and in them the positions, at which the models differ most.

    Args:
        batches: the batches to choose from. The chosen ones have up to `_TOKENS` tokens together; one is always chosen.
        gaps: the difference at each position, (N,) per batch; None if it is unknown.
        row: the memory in bytes that the comparison of one position needs. All chosen positions fit into `_ROOM` bytes.
    """
    if gaps is None:
        gaps = [torch.zeros(len(batch.valid(batch.input_ids[..., None]))) for batch in batches]
    chosen, tokens = list[int](), 0
    for index in sorted(range(len(batches)), key=lambda index: -gaps[index].max().item()):
        size = batches[index].input_ids.numel()
        if not chosen or tokens + size <= _TOKENS:
            chosen.append(index)
            tokens += size
    chosen.sort()
    all_gaps = torch.cat([gaps[index] for index in chosen])
    is_largest = torch.zeros(len(all_gaps), dtype=torch.bool)
    is_largest[all_gaps.topk(min(max(_ROOM // row, 1), len(all_gaps))).indices] = True
    rows_by_batch = torch.split(is_largest, [len(gaps[index]) for index in chosen])
    return [
        replace(batches[index], rows=rows.nonzero().flatten())
        for index, rows in zip(chosen, rows_by_batch, strict=True)
        if bool(rows.any())
    ]


def _find_causes(
    both: Sides, batches: Sequence[ProbeBatch], path: Kernel, allowed: float, places: Sequence[Part], few: bool
) -> tuple[list[Cause], list[Repair]]:
    """Return the repairs that bring the candidate's logits closer to the reference's, and all repairs that were tried.

    Repairs after which the two models agree come first. The models must have the same hidden size and number of layers.

    Args:
        both: the two models.
        batches: the inputs.
        path: the attention implementation of both models, "sdpa" or "eager".
        allowed: the difference of logits that rounding explains.
        places: the differences at all compared components.
        few: run the whole model with at most `_TRIED` repairs, because it is large. All repairs are first tried in the
            layer, or the part before or after the layers, that has the first difference.
    """
    first = next((place for place in places if place.parts), None)
    if first is None:
        return [], []  # the function is the same, with less precision, so there is nothing to repair
    source, target = both.source, both.target
    ends: _Unit = "back" if first.label.startswith(("final norm", "head", "pooler")) else "front"
    unit = ends if first.layer is None else first.layer
    layer = len(source.spec.blocks) - 1 if unit == "back" else 0 if unit == "front" else unit
    seen: tuple[_Seen, _Seen] = {}, {}
    architecture = source.architecture
    assert architecture is not None
    bound = architecture.bind(source.spec)
    stored = next(leaf.checkpoint for leaf in bound if leaf.shared[0].startswith(f"blocks.{layer}."))
    name = architecture.module(stored.partition(f".{layer}.")[0] + f".{layer}")  # named as its tensors are
    exact = both.reference(batches, torch.float64, path, partial(_around, name=name, seen=seen))
    finite = [bool(torch.isfinite(logits).all()) for logits in exact]
    batches = [batch for batch, is_finite in zip(batches, finite, strict=True) if is_finite]
    exact = [logits for logits, is_finite in zip(exact, finite, strict=True) if is_finite]
    if unit == "back":
        inputs, outputs = seen[1], exact
    else:
        states = seen[0 if unit == "front" else 1]
        inputs, outputs = seen[0], [batch.valid(states[id(batch)]).cpu() for batch in batches]

    def remaining(repair: Repair | None = None, only: _Unit | None = None) -> float:
        """Return the largest difference of the logits that remains after a repair.

        The repair is made in the whole model, or only in the part `only`.
        """
        tree = Repaired(target, source, repair, only)
        return largest_gap(exact, both.candidate(batches, torch.float64, path, tree=tree))

    as_it_is = Repaired(target, source)
    wide = list(_run_unit(as_it_is, unit, inputs, batches, path))
    narrow = list(_run_unit(as_it_is, unit, {key: value.float() for key, value in inputs.items()}, batches, path))
    start, rounding = largest_gap(outputs, wide), 2 * largest_gap(wide, narrow)
    if start <= rounding:
        return [], []  # the unit computes correct inputs correctly, so there is nothing in it to repair
    helps, tried = list[tuple[bool, Repair]](), list[Repair]()
    for repair in _repairs(source, target):
        tree = Repaired(target, source, repair, unit)
        if not tree.changes:
            continue
        tried.append(repair)
        gap = largest_gap(outputs, _run_unit(tree, unit, inputs, batches, path), max(rounding, start / 10))
        if gap <= rounding or gap < start / 10:
            helps.append((gap <= rounding, repair))
    helps.sort(key=lambda pair: not pair[0])
    before, causes = remaining(), list[Cause]()
    where = f" in layer {unit}" if isinstance(unit, int) else ""
    for restores, repair in helps[: _TRIED if few else None]:  # in all layers, and then in this unit
        gap = remaining(repair)
        if gap <= allowed or gap < before / 10:
            causes.append(Cause(repair.words, gap <= allowed, gap))
        if not gap <= allowed:
            in_unit = remaining(repair, unit)
            # A repair that corrects its unit is a cause, although later units may have other faults.
            if in_unit <= allowed or in_unit < before / 10 or restores:
                causes.append(Cause(repair.words + where, in_unit <= allowed, in_unit))
    return sorted(causes, key=lambda cause: (not cause.restores, cause.left))[:_SHOWN], tried


def _repairs(source: Checkpoint, target: Checkpoint) -> Iterator[Repair]:
    """Yield all repairs to try. Some may change nothing in this model."""
    spec, candidate = source.spec, target.spec

    def tie(tree: ModelSpec, weights: Weights) -> Mutant:
        rest = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
        return msgspec.structs.replace(tree, head=spec.head), rest

    for mutation in MUTATIONS:
        if mutation.name != "tied head ignored" and not mutation.in_code:  # a random head repairs nothing
            yield Repair(mutation.repair, mutation.mend)
    if spec.tied and candidate.head is not None and not candidate.head.tied and not candidate.head.bias:
        yield Repair("tying the head to the embedding", tie)
    shapes = {parameter.name: parameter.shape for parameter in candidate.parameters()}
    reshaped = frozenset(tensor.name for tensor in spec.parameters() if shapes.get(tensor.name) != tensor.shape)
    if len(reshaped) > len(shapes) / 2:
        return
    if spec != candidate:  # tensors that the candidate lacks come from the reference
        fields = sorted({path.split(".")[-1] for path, _, _ in differences(spec, candidate)})
        words = f"the reference's {', '.join(fields)}"
        yield Repair(words, lambda tree, weights: (spec, dict(weights)), reshaped, copies=True)
    if reshaped or len(shapes) != sum(1 for _ in spec.parameters()):
        return
    wrong = []
    for name in (parameter.name for parameter in spec.parameters()):
        a, b = source.tensor(name), target.tensor(name)
        if not (np.array_equal(a[0], b[0]) if a[1] == b[1] else np.array_equal(to_float64(*a), to_float64(*b))):
            wrong.append(name)
        source.release()
        target.release()
    if wrong:
        kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in wrong)
        words = f"the reference's values of {some_of(list(kinds), 4, ', …')}"
        yield Repair(words, values=frozenset(wrong), copies=True)
