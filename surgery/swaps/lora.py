"""LoRA adapters merged into the weights that they were trained beside.

    W' = W + s·B·A                      s = α / r, or α / √r (LoRA 2106.09685; rsLoRA 2312.03732)
    W' = m · (W + s·B·A) / |W + s·B·A|  the norm of each output's row (DoRA 2402.09353)

in fp64. An embedding's rows get (B·A)ᵀ, and its DoRA norm is one for each of its columns. Biases that were trained and
modules that were saved whole take the place of the base model's. Names are those of the family's checkpoints: a fused
q-k-v has one A and one B, whose product goes through the leaf's layout as the weight itself does.

What it is held against is made another way: in the checkpoint's own layout, by the formulas with which peft computes
base and adapter side by side (`_Unmerged`). What both share, the reading of the adapter's files, the tests hold against
peft itself.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...architectures import BoundLeaf
from ...components import ModelSpec
from ...converter.tree import Origin
from ...errors import SwapRefused
from ..base import Computed, Model, Moved, Swapped, Tensor, Wide
from ..options import WEIGHTS, Option
from ..registry import Asked, Swap
from .adapter import Adapter, read_adapter
from .adapter_changes import EMBEDDING, HEAD, Change, changes_of, leaves_of, require_fitting, with_tables

_SAME = 1e-14
"""How far apart, relative to the largest, two matrices are that are one but for the order in which they were summed."""


# --- merged -----------------------------------------------------------------------------------------------------------


def _merged(adapter: Adapter, change: Change, part: int) -> Callable[[Model], Wide]:
    """One shared tensor of the leaf with the adapter merged."""

    def compute(model: Model) -> Wide:
        weight = model.wide(change.sources[part])
        if change.stands_in is not None:
            weight = change.leaf.to_shared(adapter.read(change.stands_in))[part]
        if change.rows is not None:
            weight = np.array(weight)
            weight[adapter.indices(change.rows)] = adapter.read(adapter.rows[change.rows])
        if change.bias is not None:
            weight = weight + change.leaf.to_shared(_bias_of(adapter, change))[part]
        if change.module is None:
            return weight
        lora = adapter.lora[change.module]
        whole: Wide = weight + change.leaf.to_shared(_oriented(change, _delta(adapter, change)))[part]
        if lora.magnitude is None:
            return whole
        magnitude = adapter.read(lora.magnitude)
        if lora.embedding:
            return np.asarray(whole * (magnitude / _norms(whole.T)))
        columns = 1 if change.leaf.layout.is_identity else whole.shape[1]
        spread = np.broadcast_to(magnitude[:, None], (len(magnitude), columns))
        own: Wide = change.leaf.to_shared(_oriented(change, spread))[part][:, :1]
        return np.asarray(whole * (own / _norms(whole)[:, None]))

    return compute


def _delta(adapter: Adapter, change: Change) -> Wide:
    """Return s·B·A, (out, in); of an embedding its transpose, (tokens, hidden); of several experts one for each."""
    module = change.module or ""
    each = range(change.experts) if change.experts and change.expert is None else (change.expert,)
    factors = (adapter.factors(module, expert, change.experts) for expert in each)
    products = [b @ a * adapter.scale(module, change.parameter, change.experts) for a, b in factors]
    product: Wide = products[0] if len(change.leaf.shape) == 2 else np.stack(products)
    return product.T if adapter.lora[module].embedding else product


def _bias_of(adapter: Adapter, change: Change) -> Wide:
    """Return s·b, where B has a bias b."""
    module = change.bias or ""
    return adapter.read(adapter.lora[module].bias or "") * adapter.scale(module)


def _norms(rows: Wide) -> Wide:
    """The length of each row."""
    return np.asarray(np.sqrt((rows**2).sum(axis=1)))


def _oriented(change: Change, matrix: Wide) -> Wide:
    """A matrix (out, in) as the checkpoint has it."""
    return matrix.T if change.inputs_first else matrix


# --- unmerged ---------------------------------------------------------------------------------------------------------


class _Unmerged:
    """Base and adapter as peft computes them side by side: base(x) + s·B(A(x)), with DoRA
    base(x) + (f - 1)·base(x) + f·s·B(A(x)), where f = m / |W + s·B·A|. For all unit vectors x together that is a matrix
    (in, out), which takes the place of the checkpoint's tensor and then goes through its layout.
    """

    def __init__(self, before: Model, spec: ModelSpec, adapter: Adapter, changes: Mapping[str, Change]) -> None:
        self.before, self.spec, self.adapter = before, spec, adapter
        self.reference, self.release = f"{before.reference} with {adapter.reference}", before.release
        self._changes = {name: each for each in changes.values() for name in each.leaf.shared}
        self._last: tuple[str, list[Wide]] = ("", [])

    def dtype(self, name: str) -> str:  # noqa: ARG002
        return "F64"

    def tensor(self, name: str) -> tuple[NDArray[Any], str]:
        return self.wide(name), "F64"

    def wide(self, name: str) -> Wide:
        change = self._changes.get(name)
        if change is None:
            known = any(parameter.name == name for parameter in self.before.spec.parameters())
            return self.before.wide(name if known else EMBEDDING)
        if self._last[0] != change.leaf.checkpoint:
            self._last = (change.leaf.checkpoint, change.leaf.to_shared(self._checkpoint_tensor(change)))
        return self._last[1][change.leaf.shared.index(name)]

    def _checkpoint_tensor(self, change: Change) -> Wide:
        adapter, read = self.adapter, self.adapter.read
        if change.stands_in is not None:
            found = np.array(read(change.stands_in))
        else:
            found = np.array(change.leaf.to_checkpoint([self.before.wide(name) for name in change.sources]))
        if change.rows is not None:
            found[adapter.indices(change.rows)] = read(adapter.rows[change.rows])
        if change.bias is not None:
            found = found + read(adapter.lora[change.bias].bias or "") * adapter.scale(change.bias)
        if change.module is None:
            return found
        lora = adapter.lora[change.module]
        # (in, out): a row is what comes of a unit vector.
        turned = not lora.embedding and not change.inputs_first
        result = found.swapaxes(-1, -2) if turned else found
        added = self._added(change, change.module).reshape(result.shape)
        if lora.magnitude is not None:
            factor = read(lora.magnitude) / np.linalg.norm(result + added, axis=0)
            added = (factor - 1) * result + factor * added
        return (result + added).swapaxes(-1, -2) if turned else result + added

    def _added(self, change: Change, module: str) -> Wide:
        """Return s·B(A(x)) of all unit vectors x, (in, out), of each expert where there are several."""
        scale = self.adapter.scale(module, change.parameter, change.experts)
        experts = range(change.experts) if change.experts and change.expert is None else (change.expert,)
        parts = []
        for expert in experts:
            a, b = self.adapter.factors(module, expert, change.experts)
            parts.append(a.T @ b.T * scale)
        return np.stack(parts)


# --- which tensor is which --------------------------------------------------------------------------------------------


def _merge_lora(spec: ModelSpec, asked: Asked) -> Swapped:
    """The tree with an adapter merged."""
    adapter = read_adapter(asked.value, offline=asked.offline, allow_pickle=asked.allow_pickle)
    architecture, leaves = leaves_of(spec, asked.origin)
    adapter = with_tables(adapter, architecture, leaves, spec)
    changes = changes_of(adapter, architecture, leaves, spec)
    require_fitting(adapter, changes, leaves)
    changes = _without_copies(adapter, changes, asked)
    new, notes = spec, _about_base(adapter, asked.origin)
    if spec.tied:
        changes, untied = _ends(adapter, changes, leaves[architecture.head], asked)
        if untied:
            new = replace(spec, head=replace(spec.has_head(), tied=False))
            notes.append("the head was untied from the embedding, because the adapter changes them differently")
    made: dict[str, Tensor] = {HEAD: Moved(EMBEDDING)} if new is not spec else {}
    for change in changes.values():
        for part, name in enumerate(change.leaf.shared):
            made[name] = Computed(_merged(adapter, change, part))
    summary = {
        "method": adapter.method,
        "modules": len(adapter.lora),
        "saved": len(adapter.saved),
        "base_model": adapter.trained_on,
        "sha256": adapter.sha256,
    }
    against = partial(_Unmerged, spec=new, adapter=adapter, changes=changes)
    return Swapped(new, "exact", made, summary, tuple(notes), against=against)


def _without_copies(adapter: Adapter, changes: Mapping[str, Change], asked: Asked) -> dict[str, Change]:
    """Without the copies of the base model's tensors that peft saves along, where they are what the model has."""

    def same(change: Change, model: Model) -> bool:
        copies = change.leaf.to_shared(adapter.read(change.stands_in or ""))
        return all(np.array_equal(copy, model.wide(own)) for copy, own in zip(copies, change.sources, strict=True))

    found = dict(changes)
    for name, change in changes.items():
        if change.stands_in in adapter.base.values() and asked.weights.ask(partial(same, change), False, True):
            found[name] = dataclasses.replace(change, stands_in=None)
    return {name: each for name, each in found.items() if each.module or each.stands_in or each.bias or each.rows}


def _ends(
    adapter: Adapter, changes: Mapping[str, Change], head: BoundLeaf, asked: Asked
) -> tuple[dict[str, Change], bool]:
    """The changes of a tree whose head is tied, and whether they untie it.

    peft changes the embedding and the head apart, unless it was told to keep them tied: then the adapter has the same
    for both. New rows of tokens are both's. A copy of the base model's table that is another is both's, too.
    """
    if adapter.mlx and all(change.leaf.shared[0] != HEAD for change in changes.values()):
        return dict(changes), False  # mlx-lm's table of tokens is the head too, adapter and all
    found = {change.leaf.shared[0]: change for change in changes.values() if change.leaf.shared[0] in (EMBEDDING, HEAD)}
    others = {name: change for name, change in changes.items() if change.leaf.shared[0] not in found}
    copies = [each.stands_in for each in found.values() if each.stands_in in adapter.base.values()]
    if copies:
        table = dataclasses.replace(head, shared=(EMBEDDING,), checkpoint="the embedding")
        for name, leaf in ((EMBEDDING, table), (HEAD, head)):
            change = found.get(name) or Change(leaf, (EMBEDDING,))
            found[name] = dataclasses.replace(change, stands_in=change.stands_in or copies[0])
    if not found:
        return others, False
    table_change = found.get(EMBEDDING)
    if table_change is not None and table_change.rows is not None:
        head_change = found.get(HEAD)
        if head_change is not None and not _same_rows(adapter, table_change, head_change):
            raise SwapRefused(
                f"{adapter.reference} changes rows of the embedding, which is tied to the head, and also "
                "changes the head"
            )
        return {name: change for name, change in changes.items() if change is not head_change}, False

    def alike(model: Model) -> bool:
        one, other = (_merged(adapter, found[name], 0)(model) for name in (EMBEDDING, HEAD))
        return float(np.abs(one - other).max()) <= _SAME * float(np.abs(one).max())

    one_matrix = len(found) == 2 and asked.weights.ask(alike, False, True)
    if one_matrix:
        del found[HEAD]
    return others | {change.leaf.checkpoint: change for change in found.values()}, not one_matrix


def _same_rows(adapter: Adapter, table: Change, head: Change) -> bool:
    """Return whether an adapter has the same new rows for the head as for the embedding, and nothing else for it."""
    if table.rows is None or head.rows is None or head.module or head.stands_in:
        return False
    return np.array_equal(adapter.read(adapter.rows[table.rows]), adapter.read(adapter.rows[head.rows]))


def _about_base(adapter: Adapter, origin: Origin | None) -> list[str]:
    named_base, here = adapter.trained_on, None if origin is None else origin.reference
    if named_base is None or not here:
        return []
    own, other = (Path(each).name.lower().removesuffix("-local").removesuffix("-hf") for each in (named_base, here))
    if named_base == here or own == other.partition("@")[0].rpartition(":")[2]:
        return []
    return [f"the adapter was trained on {named_base:.80}, according to its config; this model comes from {here:.80}"]


ORDER = 10
OPTIONS = (
    Option(
        "merge_lora",
        WEIGHTS,
        1,
        "Merge the LoRA adapter in this folder, written by PEFT or mlx-lm, into the weights. Repeatable.",
        "DIR",
    ),
)
SWAPS = (
    Swap(
        option="merge_lora",
        apart=True,
        form="DIR",
        takes="model and LoRA adapter",
        gives="one model",
        needs="an adapter of PEFT or mlx-lm trained on this model: LoRA, rsLoRA, DoRA, biases, modules_to_save",
        source="LoRA 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353",
        reshape=_merge_lora,
    ),
)
