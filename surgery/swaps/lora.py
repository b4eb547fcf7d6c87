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
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...architectures import Architecture, BoundLeaf, named
from ...architectures.layout import IDENTITY, parse
from ...components import ModelSpec
from ...components.ranges import some_of
from ...converter.tree import Origin
from ...errors import CannotExpress, SwapRefused
from ..base import Computed, Model, Moved, Swapped, Tensor, Wide
from ..options import WEIGHTS, Option
from ..registry import Asked, Swap
from .adapter import Adapter, read_adapter

EMBEDDING, HEAD = "embedding.weight", "head.weight"
_TOLD = 4  # modules or tensors that a message names
_SAME = 1e-14
"""How far apart, relative to the largest, two matrices are that are one but for the order in which they were summed."""


@dataclass(frozen=True)
class _Change:
    """What an adapter does to one tensor of the checkpoint.

    sources: the old tensors that hold its values. module: the one with A and B, if it has such. stands_in: the tensor
    of the adapter's file that takes its place. bias: the module whose B has a bias that adds to it. rows: the module of
    which some rows are new.
    """

    leaf: BoundLeaf
    sources: tuple[str, ...]
    module: str | None = None
    stands_in: str | None = None
    bias: str | None = None
    rows: str | None = None

    @property
    def inputs_first(self) -> bool:
        """Whether the checkpoint has it as [in, out] (Conv1D), not as [out, in]."""
        layout = self.leaf.layout
        if layout.is_identity or len(self.leaf.shape) != 2:
            return False
        return parse(layout.checkpoint)[0] == parse(layout.shared or layout.checkpoint)[-1]


# --- merged -----------------------------------------------------------------------------------------------------------


def _merged(adapter: Adapter, change: _Change, part: int) -> Callable[[Model], Wide]:
    """One shared tensor of the leaf with the adapter merged."""

    def compute(model: Model) -> Wide:
        weight = model.wide(change.sources[part])
        if change.stands_in is not None:
            weight = change.leaf.to_shared(adapter.read(change.stands_in))[part]
        if change.rows is not None:
            weight = np.array(weight)
            weight[adapter.indices(change.rows)] = adapter.read(adapter.rows[change.rows])
        if change.bias is not None:
            weight = weight + change.leaf.to_shared(_bias_of(adapter, change.bias))[part]
        if change.module is None:
            return weight
        lora = adapter.lora[change.module]
        whole: Wide = weight + change.leaf.to_shared(_oriented(change, _delta(adapter, change.module)))[part]
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


def _delta(adapter: Adapter, module: str) -> Wide:
    """s·B·A, (out, in); of an embedding its transpose, (tokens, hidden)."""
    lora = adapter.lora[module]
    product: Wide = adapter.read(lora.b) @ adapter.read(lora.a) * adapter.scale(module)
    return product.T if lora.embedding else product


def _bias_of(adapter: Adapter, module: str) -> Wide:
    """s·b, where B has a bias b."""
    return adapter.read(adapter.lora[module].bias or "") * adapter.scale(module)


def _norms(rows: Wide) -> Wide:
    """The length of each row."""
    return np.asarray(np.sqrt((rows**2).sum(axis=1)))


def _oriented(change: _Change, matrix: Wide) -> Wide:
    """A matrix (out, in) as the checkpoint has it."""
    return matrix.T if change.inputs_first else matrix


# --- unmerged ---------------------------------------------------------------------------------------------------------


class _Unmerged:
    """Base and adapter as peft computes them side by side: base(x) + s·B(A(x)), with DoRA
    base(x) + (f - 1)·base(x) + f·s·B(A(x)), where f = m / |W + s·B·A|. For all unit vectors x together that is a matrix
    (in, out), which takes the place of the checkpoint's tensor and then goes through its layout.
    """

    def __init__(self, before: Model, spec: ModelSpec, adapter: Adapter, changes: Mapping[str, _Change]) -> None:
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

    def _checkpoint_tensor(self, change: _Change) -> Wide:
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
        result = found.T if turned else found
        added = read(lora.a).T @ read(lora.b).T * adapter.scale(change.module)
        if lora.magnitude is not None:
            factor = read(lora.magnitude) / np.linalg.norm(result + added, axis=0)
            added = (factor - 1) * result + factor * added
        return (result + added).T if turned else result + added


# --- which tensor is which --------------------------------------------------------------------------------------------


def _merge_lora(spec: ModelSpec, asked: Asked) -> Swapped:
    """The tree with an adapter merged."""
    adapter = read_adapter(asked.value, offline=asked.offline)
    architecture, leaves = _leaves(spec, asked.origin)
    changes = _changes(adapter, architecture, leaves, spec)
    _require_fitting(adapter, changes, len(spec.blocks))
    changes = _without_copies(adapter, changes, asked)
    new, notes = spec, _about_base(adapter, asked.origin)
    if spec.tied:
        changes, untied = _ends(adapter, changes, leaves[architecture.head], asked)
        if untied:
            new = replace(spec, head=replace(spec.has_head(), tied=False))
            notes.append("the head was untied from the embedding: the adapter does not change both alike")
    made: dict[str, Tensor] = {HEAD: Moved(EMBEDDING)} if new is not spec else {}
    for change in changes.values():
        for part, name in enumerate(change.leaf.shared):
            made[name] = Computed(_merged(adapter, change, part))
    config = adapter.config
    summary = {
        "method": ("dora" if config.get("use_dora") else "lora") + ("+rslora" if config.get("use_rslora") else ""),
        "modules": len(adapter.lora),
        "saved": len(adapter.saved),
        "base_model": config.get("base_model_name_or_path"),
        "sha256": adapter.sha256,
    }
    against = partial(_Unmerged, spec=new, adapter=adapter, changes=changes)
    return Swapped(new, "exact", made, summary, tuple(notes), against=against)


def _leaves(spec: ModelSpec, origin: Origin | None) -> tuple[Architecture, dict[str, BoundLeaf]]:
    """The family's names for the tree's tensors; of a tied head, too."""
    family = None if origin is None else origin.family
    if family is None:
        raise SwapRefused("this tree never had a family, and an adapter goes by the names of one")
    architecture = named(family)
    try:
        leaves = {leaf.checkpoint: leaf for leaf in architecture.bind(spec)}
    except CannotExpress as error:
        raise SwapRefused(
            f"an adapter goes by {family}'s names, and {error.message}", "Merge it before other swaps."
        ) from error
    if spec.tied:
        shape = (spec.vocab_size, spec.hidden_size)
        leaves[architecture.head] = BoundLeaf(architecture.head, shape, (HEAD,), (shape,), IDENTITY, {})
    return architecture, leaves


def _changes(
    adapter: Adapter, architecture: Architecture, leaves: Mapping[str, BoundLeaf], spec: ModelSpec
) -> dict[str, _Change]:
    """By the checkpoint's name for the tensor. Raises SwapRefused with the modules that the model does not have."""
    found: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []

    def note(tensor: str, told: str, **what: Any) -> None:
        name = architecture.canonical_name(tensor, leaves, len(spec.blocks))
        if name is None or name not in leaves:
            unknown.append(told)
        else:
            found.setdefault(name, {}).update(what)

    for tensor, own in {**adapter.base, **adapter.saved}.items():
        note(tensor, tensor, stands_in=own)
    for module, lora in adapter.lora.items():
        note(f"{module}.weight", module, module=module)
        if lora.bias is not None:
            note(f"{module}.bias", f"{module}.bias", bias=module)
    for module in adapter.rows:
        note(f"{module}.weight", module, rows=module)
    if unknown:
        reason = f"{adapter.reference} changes {len(unknown)} modules that this model does not have: "
        raise SwapRefused(reason + some_of(unknown, _TOLD), _hint(adapter))
    if not found:
        raise SwapRefused(f"{adapter.reference} changes nothing: there is no tensor in it")
    tied = architecture.head if spec.tied else ""
    sources = {name: (EMBEDDING,) if name == tied else leaves[name].shared for name in found}
    return {name: _Change(leaves[name], sources[name], **what) for name, what in found.items()}


def _require_fitting(adapter: Adapter, changes: Mapping[str, _Change], layers: int) -> None:
    """Raise SwapRefused where shapes are another model's, or some layers are left out that should not be."""
    wrong = []
    for name, change in changes.items():
        outputs, *inputs = change.leaf.shape[::-1] if change.inputs_first else change.leaf.shape
        expected: dict[str, tuple[int, ...]] = {}
        if change.stands_in is not None:
            expected[change.stands_in] = change.leaf.shape
        if change.rows is not None:
            expected[adapter.rows[change.rows]] = (adapter.shape(adapter.rows[change.rows])[0], *inputs)
        if change.module is not None:
            lora = adapter.lora[change.module]
            if lora.embedding:
                outputs, inputs = inputs[0], [outputs]
            rank = adapter.shape(lora.a)[0]
            expected |= {lora.a: (rank, *inputs), lora.b: (outputs, rank)}
            if lora.magnitude is not None:
                expected[lora.magnitude] = (outputs,)
            adapter.scale(change.module)
        if change.bias is not None:
            expected[adapter.lora[change.bias].bias or ""] = change.leaf.shape
        for tensor, shape in expected.items():
            if adapter.shape(tensor) != shape:
                wrong.append(f"{tensor} is {list(adapter.shape(tensor))}, {name} needs {list(shape)}")
    if wrong:
        raise SwapRefused(
            f"{adapter.reference} was trained on another model: {'; '.join(wrong[:_TOLD])}"
            + (f"; {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""),
            _hint(adapter, changes),
        )
    targets = adapter.config.get("target_modules")
    partly = adapter.config.get("layers_to_transform") is not None or adapter.config.get("exclude_modules")
    if partly or not isinstance(targets, list) or any(re.search(r"\d", target) for target in targets):
        return
    by_kind: dict[str, set[int]] = {}
    for module in adapter.lora:
        if match := re.search(r"\.(\d+)\.", module):
            by_kind.setdefault(module.replace(match[0], ".N.", 1), set()).add(int(match[1]))
    for kind, own in by_kind.items():
        if own != set(range(layers)):
            raise SwapRefused(
                f"{adapter.reference} was trained on another model: it changes {kind} in {len(own)} layers, here are"
                f" {layers}",
                _hint(adapter),
            )


def _without_copies(adapter: Adapter, changes: Mapping[str, _Change], asked: Asked) -> dict[str, _Change]:
    """Without the copies of the base model's tensors that peft saves along, where they are what the model has."""

    def same(change: _Change, model: Model) -> bool:
        copies = change.leaf.to_shared(adapter.read(change.stands_in or ""))
        return all(np.array_equal(copy, model.wide(own)) for copy, own in zip(copies, change.sources, strict=True))

    found = dict(changes)
    for name, change in changes.items():
        if change.stands_in in adapter.base.values() and asked.weights.ask(partial(same, change), False, True):
            found[name] = dataclasses.replace(change, stands_in=None)
    return {name: each for name, each in found.items() if each.module or each.stands_in or each.bias or each.rows}


def _ends(
    adapter: Adapter, changes: Mapping[str, _Change], head: BoundLeaf, asked: Asked
) -> tuple[dict[str, _Change], bool]:
    """The changes of a tree whose head is tied, and whether they untie it.

    peft changes the embedding and the head apart, unless it was told to keep them tied: then the adapter has the same
    for both. New rows of tokens are both's. A copy of the base model's table that is another is both's, too.
    """
    found = {change.leaf.shared[0]: change for change in changes.values() if change.leaf.shared[0] in (EMBEDDING, HEAD)}
    others = {name: change for name, change in changes.items() if change.leaf.shared[0] not in found}
    copies = [each.stands_in for each in found.values() if each.stands_in in adapter.base.values()]
    if copies:
        table = dataclasses.replace(head, shared=(EMBEDDING,), checkpoint="the embedding")
        for name, leaf in ((EMBEDDING, table), (HEAD, head)):
            change = found.get(name) or _Change(leaf, (EMBEDDING,))
            found[name] = dataclasses.replace(change, stands_in=change.stands_in or copies[0])
    if not found:
        return others, False
    table_change = found.get(EMBEDDING)
    if table_change is not None and table_change.rows is not None:
        if len(found) > 1:
            raise SwapRefused(f"{adapter.reference} has new rows for a tied table and changes the head besides")
        return dict(changes), False

    def alike(model: Model) -> bool:
        one, other = (_merged(adapter, found[name], 0)(model) for name in (EMBEDDING, HEAD))
        return float(np.abs(one - other).max()) <= _SAME * float(np.abs(one).max())

    one_matrix = len(found) == 2 and asked.weights.ask(alike, False, True)
    if one_matrix:
        del found[HEAD]
    return others | {change.leaf.checkpoint: change for change in found.values()}, not one_matrix


def _about_base(adapter: Adapter, origin: Origin | None) -> list[str]:
    named_base, here = adapter.config.get("base_model_name_or_path"), None if origin is None else origin.reference
    if not isinstance(named_base, str) or not named_base or not here:
        return []
    own, other = (Path(each).name.lower().removesuffix("-local").removesuffix("-hf") for each in (named_base, here))
    if named_base == here or own == other.partition("@")[0].rpartition(":")[2]:
        return []
    return [f"the adapter says that it was trained on {named_base:.80}; this model comes from {here:.80}"]


def _hint(adapter: Adapter, changes: Mapping[str, _Change] | None = None) -> str | None:
    """How the model gets rows for the tokens of its own that the adapter came with, or else which model it names."""
    base = adapter.config.get("base_model_name_or_path")
    for change in (changes or {}).values():
        if change.leaf.shared[0] in (EMBEDDING, HEAD) and change.stands_in is not None:
            tokens, now = adapter.shape(change.stands_in)[0], change.leaf.shape[0]
            if tokens != now:
                return f"It has {tokens:,} tokens: swap --vocab {tokens} first, and merge it into the result."
    return f"It says that it was trained on {base:.80}." if isinstance(base, str) and base else None


ORDER = 10
OPTIONS = (Option("merge_lora", WEIGHTS, 1, "Merge a PEFT adapter into the weights.", "DIR"),)
SWAPS = (
    Swap(
        option="merge_lora",
        apart=True,
        form="DIR",
        takes="model and LoRA adapter",
        gives="one model",
        needs="an adapter of PEFT trained on this model: LoRA, rsLoRA, DoRA, biases, modules_to_save",
        source="LoRA 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353",
        reshape=_merge_lora,
    ),
)
