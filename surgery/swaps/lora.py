"""Merge LoRA adapters into the weights of their base model.

    W' = W + s·B·A                      s = α / r, or α / √r (LoRA 2106.09685; rsLoRA 2312.03732)
    W' = m · (W + s·B·A) / |W + s·B·A|  the norm of each output's row (DoRA 2402.09353)

This is computed in fp64. The rows of an embedding get s·(B·A)ᵀ, and its DoRA norm is per column. Trained biases, and
modules that the adapter has completely, replace those of the base model. Adapters use the tensor names of the family's
checkpoints. A fused q-k-v matrix has one A and one B, and their product is divided among q, k and v in the same way as
the matrix itself.

To measure whether the merge is exact, gptkit compares it with the base model and the adapter side by side
(`_Unmerged`). That is computed differently, in the checkpoint's own layout and by peft's formulas. The tests compare
the reading of adapter files with peft itself.
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
"""Two matrices are equal if their relative difference is at most this, which other orders of summation may cause."""


# --- the merged model -------------------------------------------------------------------------------------------------


def _merged(adapter: Adapter, change: Change, part: int) -> Callable[[Model], Wide]:
    """Return a function that computes a parameter of the base model with the adapter merged into it.

    `change` is the adapter's change to a checkpoint tensor, which may store several parameters, such as a fused q-k-v
    matrix. `part` says which of them to return.
    """

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
        factors: Wide = change.leaf.to_shared(_oriented(change, spread))[part][:, :1]
        return np.asarray(whole * (factors / _norms(whole)[:, None]))

    return compute


def _delta(adapter: Adapter, change: Change) -> Wide:
    """Return s·B·A, the adapter's change to a weight (out, in).

    It is transposed to (tokens, hidden) for an embedding. If several experts are stored together, it is (experts, out,
    in).
    """
    module = change.module or ""
    experts = range(change.experts) if change.experts and change.expert is None else (change.expert,)
    factors = (adapter.factors(module, expert, change.experts) for expert in experts)
    products = [b @ a * adapter.scale(module, change.parameter, change.experts) for a, b in factors]
    product: Wide = products[0] if len(change.leaf.shape) == 2 else np.stack(products)
    return product.T if adapter.lora[module].embedding else product


def _bias_of(adapter: Adapter, change: Change) -> Wide:
    """Return the bias of B times s. It is added to the bias of the module that the adapter changes."""
    module = change.bias or ""
    return adapter.read(adapter.lora[module].bias or "") * adapter.scale(module)


def _norms(rows: Wide) -> Wide:
    """Return the Euclidean length of each row."""
    return np.asarray(np.sqrt((rows**2).sum(axis=1)))


def _oriented(change: Change, matrix: Wide) -> Wide:
    """Return a matrix (out, in) in the orientation in which the checkpoint stores the changed tensor."""
    return matrix.T if change.inputs_first else matrix


# --- the model with the adapter not merged ----------------------------------------------------------------------------


class _Unmerged:
    """A base model with an adapter that is not merged, computed as in peft: base(x) + s·B(A(x)).

    With DoRA, the output is base(x) + (f - 1)·base(x) + f·s·B(A(x)), where f = m / |W + s·B·A|. The outputs for all
    unit vectors x form a matrix (in, out), which is the weight of the module with its adapter. `spec` has the
    components of the model after the merge, so that the two can be compared.
    """

    def __init__(self, before: Model, spec: ModelSpec, adapter: Adapter, changes: Mapping[str, Change]) -> None:
        self.before, self.spec, self.adapter = before, spec, adapter
        self.reference, self.release = f"{before.reference} with {adapter.reference}", before.release
        self._changes = {name: change for change in changes.values() for name in change.leaf.shared}
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
            tensor = np.array(read(change.stands_in))
        else:
            tensor = np.array(change.leaf.to_checkpoint([self.before.wide(name) for name in change.sources]))
        if change.rows is not None:
            tensor[adapter.indices(change.rows)] = read(adapter.rows[change.rows])
        if change.bias is not None:
            tensor = tensor + read(adapter.lora[change.bias].bias or "") * adapter.scale(change.bias)
        if change.module is None:
            return tensor
        lora = adapter.lora[change.module]
        # The matrix is made (in, out): a row is the output for a unit vector.
        turned = not lora.embedding and not change.inputs_first
        result = tensor.swapaxes(-1, -2) if turned else tensor
        added = self._added(change, change.module).reshape(result.shape)
        if lora.magnitude is not None:
            factor = read(lora.magnitude) / np.linalg.norm(result + added, axis=0)
            added = (factor - 1) * result + factor * added
        return (result + added).swapaxes(-1, -2) if turned else result + added

    def _added(self, change: Change, module: str) -> Wide:
        """Return s·B(A(x)) for all unit vectors x, (experts, in, out). Without experts, the first dimension is 1."""
        scale = self.adapter.scale(module, change.parameter, change.experts)
        experts = range(change.experts) if change.experts and change.expert is None else (change.expert,)
        parts = []
        for expert in experts:
            a, b = self.adapter.factors(module, expert, change.experts)
            parts.append(a.T @ b.T * scale)
        return np.stack(parts)


# --- the changes of an adapter ----------------------------------------------------------------------------------------


def _merge_lora(spec: ModelSpec, asked: Asked) -> Swapped:
    """Merge the adapter that the value of the option names into the weights of the model."""
    adapter = read_adapter(asked.value, **asked.opening)
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
    tensors: dict[str, Tensor] = {HEAD: Moved(EMBEDDING)} if new is not spec else {}
    for change in changes.values():
        for part, name in enumerate(change.leaf.shared):
            tensors[name] = Computed(_merged(adapter, change, part))
    summary = {
        "method": adapter.method,
        "modules": len(adapter.lora),
        "saved": len(adapter.saved),
        "base_model": adapter.trained_on,
        "sha256": adapter.sha256,
    }
    against = partial(_Unmerged, spec=new, adapter=adapter, changes=changes)
    return Swapped(new, "exact", tensors, summary, tuple(notes), against=against)


def _without_copies(adapter: Adapter, changes: Mapping[str, Change], asked: Asked) -> dict[str, Change]:
    """Leave out changes that only replace a tensor by a copy of itself.

    peft may save unchanged tensors of the base model with an adapter. A copy that differs from the model's tensor
    stays.
    """

    def same(change: Change, model: Model) -> bool:
        copies = change.leaf.to_shared(adapter.read(change.stands_in or ""))
        return all(
            np.array_equal(copy, model.wide(source)) for copy, source in zip(copies, change.sources, strict=True)
        )

    needed = dict(changes)
    for name, change in changes.items():
        if change.stands_in in adapter.base.values() and asked.weights.ask(partial(same, change), False, True):
            needed[name] = dataclasses.replace(change, stands_in=None)
    return {name: c for name, c in needed.items() if c.module or c.stands_in or c.bias or c.rows}


def _ends(
    adapter: Adapter, changes: Mapping[str, Change], head: BoundLeaf, asked: Asked
) -> tuple[dict[str, Change], bool]:
    """Adapt an adapter's changes to a model with a tied head. Return them, and whether the head has to be untied.

    If the adapter changes the embedding or the head, the two usually become different, and the head is untied. It stays
    tied if both become the same matrix, or if the adapter has new rows for some tokens, which then apply to both. A
    copy of the embedding or head that is saved with the adapter, from another base model, replaces both.

    Args:
        adapter: The adapter.
        changes: Its changes, by the names of the tensors that change.
        head: The tied head, as a tensor of the checkpoint.
        asked: The request, which answers questions about weights.
    """
    if adapter.mlx and all(change.leaf.shared[0] != HEAD for change in changes.values()):
        return dict(changes), False  # in mlx-lm the table of tokens is the head too, with its adapter
    ends = {change.leaf.shared[0]: change for change in changes.values() if change.leaf.shared[0] in (EMBEDDING, HEAD)}
    other_changes = {name: change for name, change in changes.items() if change.leaf.shared[0] not in ends}
    copies = [end.stands_in for end in ends.values() if end.stands_in in adapter.base.values()]
    if copies:
        table = dataclasses.replace(head, shared=(EMBEDDING,), checkpoint="the embedding")
        for name, leaf in ((EMBEDDING, table), (HEAD, head)):
            change = ends.get(name) or Change(leaf, (EMBEDDING,))
            ends[name] = dataclasses.replace(change, stands_in=change.stands_in or copies[0])
    if not ends:
        return other_changes, False
    table_change = ends.get(EMBEDDING)
    if table_change is not None and table_change.rows is not None:
        head_change = ends.get(HEAD)
        if head_change is not None and not _same_rows(adapter, table_change, head_change):
            raise SwapRefused(
                f"{adapter.reference} changes rows of the embedding, which is tied to the head, and also "
                "changes the head"
            )
        return {name: change for name, change in changes.items() if change is not head_change}, False

    def alike(model: Model) -> bool:
        first, second = (_merged(adapter, ends[name], 0)(model) for name in (EMBEDDING, HEAD))
        return float(np.abs(first - second).max()) <= _SAME * float(np.abs(first).max())

    one_matrix = len(ends) == 2 and asked.weights.ask(alike, False, True)
    if one_matrix:
        del ends[HEAD]
    return other_changes | {change.leaf.checkpoint: change for change in ends.values()}, not one_matrix


def _same_rows(adapter: Adapter, table: Change, head: Change) -> bool:
    """Return whether an adapter has the same new rows for head and embedding, and no other change of the head.

    `table` and `head` are its changes to the embedding and to the head.
    """
    if table.rows is None or head.rows is None or head.module or head.stands_in:
        return False
    return np.array_equal(adapter.read(adapter.rows[table.rows]), adapter.read(adapter.rows[head.rows]))


def _about_base(adapter: Adapter, origin: Origin | None) -> list[str]:
    named_base, here = adapter.trained_on, None if origin is None else origin.reference
    if named_base is None or not here:
        return []
    base_name, here_name = (
        Path(reference).name.lower().removesuffix("-local").removesuffix("-hf") for reference in (named_base, here)
    )
    if named_base == here or base_name == here_name.partition("@")[0].rpartition(":")[2]:
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
        takes="a model and a LoRA adapter",
        gives="one model, with the adapter merged into its weights",
        needs="Needs a PEFT or mlx-lm adapter that was trained on this model: LoRA, rsLoRA or DoRA, also with biases"
        " and modules_to_save",
        source="LoRA 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353",
        reshape=_merge_lora,
    ),
)
