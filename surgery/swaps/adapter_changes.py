"""Find the tensors of a checkpoint that an adapter changes, and check that the adapter fits them.

Adapters use the names of modules in transformers. In most families these are the names in checkpoints too, and
`Architecture.bind_all` knows both. Adapters of models of images and text use longer names, which `composite.bare_names`
shortens.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...architectures import Architecture, BoundLeaf, named
from ...architectures.composite import bare_names
from ...architectures.layout import IDENTITY, parse
from ...components import ModelSpec
from ...components.ranges import some_of
from ...converter.tree import Origin
from ...errors import CannotExpress, SwapRefused
from .adapter import Adapter, Lora, without_wrappers, wrappers

EMBEDDING, HEAD = "embedding.weight", "head.weight"
_NAMED = 4  # the number of modules or tensors that a message names
_SWITCH = re.compile(r"(?P<block>.*\.(?P<layer>\d{1,9})\..*)\.switch_mlp\.(?P<name>\w+)")
"""The module with all experts in mlx-lm. For its linears, mlx-lm uses the same names as gptkit in all families."""


@dataclass(frozen=True)
class Change:
    """An adapter's change to one tensor of the checkpoint, or to the matrix of one expert in it."""

    leaf: BoundLeaf
    """The changed tensor of the checkpoint, and how gptkit's parameters are stored in it."""
    sources: tuple[str, ...]
    """The old model's parameters that have the values of this tensor."""
    module: str | None = None
    """The module of the adapter whose A and B change the tensor. None if none does."""
    parameter: str | None = None
    """The name of the changed parameter, if it is not the weight of a linear (peft's `target_parameters`)."""
    expert: int | None = None
    """The number of the expert whose matrix changes, if A and B of all experts are stored together."""
    experts: int = 0
    """The number of experts whose A and B are stored together."""
    stands_in: str | None = None
    """The name of the tensor of the adapter's file that replaces this tensor completely."""
    bias: str | None = None
    """The module whose B has a bias, if that is added to this tensor. The tensor is then a bias too."""
    rows: str | None = None
    """The embedding or head for which the adapter has new rows, if this tensor has its rows."""
    inputs_first: bool = False
    """Whether the matrix is stored as [in, out] (Conv1D), not as [out, in]."""


def leaves_of(spec: ModelSpec, origin: Origin | None) -> tuple[Architecture, dict[str, BoundLeaf]]:
    """Return a model's original Hugging Face family, and its checkpoint tensors by all names that they may have.

    A tied head is included. Raises SwapRefused if the model does not come from a Hugging Face family, or if the family
    can no longer express it after swaps.
    """
    family = None if origin is None else origin.family
    if family is None:
        raise SwapRefused(
            "this model was not read from a transformers architecture, so gptkit cannot match the adapter's "
            "names to its "
            "weights"
        )
    architecture = named(family)
    try:
        leaves = architecture.bind_all(spec)
    except CannotExpress as error:
        raise SwapRefused(
            f"the adapter has the tensor names of {family}, but {error.message}",
            ("Merge the adapter into the original model first, and apply other swaps after that."),
        ) from error
    if spec.tied:
        shape = (spec.vocab_size, spec.hidden_size)
        leaves[architecture.head] = BoundLeaf(architecture.head, shape, (HEAD,), (shape,), IDENTITY, {})
    return architecture, leaves


class _Names:
    """A lookup of the tensors of a model by the names that adapters use."""

    def __init__(self, architecture: Architecture, leaves: Mapping[str, BoundLeaf], spec: ModelSpec) -> None:
        self.architecture, self.leaves, self.layers = architecture, leaves, len(spec.blocks)
        self._matrices = {p.name: p.shape for p in spec.parameters()}
        self.shared_names = architecture.repeats(spec)

    def leaf(self, tensor: str) -> BoundLeaf | None:
        """Return the checkpoint tensor with this name, or None if the model has no such tensor."""
        for name in bare_names(tensor):
            known = self.architecture.canonical_name(name, self.leaves, self.layers)
            if known is not None and known in self.leaves:
                return self.leaves[known]
        return None

    def parameter(self, adapter: Adapter, module: str) -> BoundLeaf | None:
        """Return the parameter that the adapter changes in a module by `target_parameters`, or None if it changes none.

        peft wraps the parameter's module once for every trained parameter of it. So the number of wrappers in the
        module's name says which parameter is meant. The last parameter has the outermost wrapper.
        """
        bare = without_wrappers(module)
        ends = {name: name.rpartition(".")[2] for name in self._children(bare)}
        trained = [name for name, end in ends.items() if adapter.targets(f"{bare}.{end}")]
        place = len(trained) - 1 - wrappers(module)
        return self.leaves[trained[place]] if place >= 0 else None

    def _children(self, module: str) -> list[str]:
        """Return the names of the parameters that belong to a module itself, in the order of transformers' modules."""
        known = {spelled for name in bare_names(module) for spelled in self.architecture.spellings(name)}
        return [name for name in self.leaves if name.rpartition(".")[0] in known]

    def switched(self, module: str) -> list[BoundLeaf]:
        """Return the matrices of all experts, if `module` is a module of mlx-lm that has all of them, else []."""
        match = _SWITCH.fullmatch(module)
        if match is None:
            return []
        begins = f"blocks.{match['layer']}.feed_forward.experts."
        ends = f".{match['name']}.weight"
        names = [name for name in self._matrices if name.startswith(begins) and name.endswith(ends)]
        shapes = {name: self._matrices[name] for name in names}
        return [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, shape in shapes.items()]


def changes_of(
    adapter: Adapter, architecture: Architecture, leaves: Mapping[str, BoundLeaf], spec: ModelSpec
) -> dict[str, Change]:
    """Return the changes that an adapter makes to a checkpoint, by the names of the tensors that change.

    Raises SwapRefused if the model does not have a module of the adapter, or if a weight would be changed twice.
    """
    names = _Names(architecture, leaves, spec)
    fields_by_leaf: dict[tuple[str, ...], dict[str, Any]] = {}
    unknown: list[str] = []

    def note(leaf: BoundLeaf | None, missing: str, **fields: Any) -> None:
        if leaf is None:
            unknown.append(missing)
        else:
            fields_by_leaf.setdefault(leaf.shared, {"leaf": leaf}).update(fields)

    for tensor, source in {**adapter.base, **adapter.saved}.items():
        note(names.leaf(tensor), tensor, stands_in=source)
    for module, lora in adapter.lora.items():
        for leaf, fields in _changed(adapter, names, module):
            note(leaf, module, module=module, **fields)
        if lora.bias is not None:
            note(names.leaf(f"{module}.bias"), f"{module}.bias", bias=module)
    for module in adapter.rows:
        note(names.leaf(f"{module}.weight"), module, rows=module)
    _require_own(adapter, names, unknown)
    if not fields_by_leaf:
        raise SwapRefused(f"{adapter.reference} has no tensors, so it would change nothing")
    shared = [name for key_names in fields_by_leaf for name in key_names]
    if len(shared) != len({*shared}):
        twice = sorted({name for name in shared if shared.count(name) > 1})
        raise SwapRefused(
            f"{adapter.reference} has two changes for the same weight, under different tensor names: "
            f"{some_of(twice, _NAMED)}"
        )
    tied = (HEAD,) if spec.tied else ()
    changes = [Change(sources=(EMBEDDING,) if key == tied else key, **fields) for key, fields in fields_by_leaf.items()]
    return {change.leaf.checkpoint: change for change in changes}


def with_tables(
    adapter: Adapter, architecture: Architecture, leaves: Mapping[str, BoundLeaf], spec: ModelSpec
) -> Adapter:
    """Return an adapter of mlx-lm with A and B of the token embedding swapped. Other adapters are unchanged.

    mlx-lm stores lora_a as (tokens, rank) and lora_b as (rank, hidden). Swapped, they are B and A of a linear whose
    weight is (tokens, hidden).
    """
    names = _Names(architecture, leaves, spec)
    leaf_of = {module: names.leaf(f"{module}.weight") for module in adapter.lora} if adapter.mlx else {}
    tables = {module for module, leaf in leaf_of.items() if leaf is not None and leaf.shared == (EMBEDDING,)}
    turned = {m: replace(adapter.lora[m], a=adapter.lora[m].b, b=adapter.lora[m].a, turned=False) for m in tables}
    return replace(adapter, lora={**adapter.lora, **turned}) if tables else adapter


def _changed(adapter: Adapter, names: _Names, module: str) -> Iterator[tuple[BoundLeaf | None, dict[str, Any]]]:
    """Yield every checkpoint tensor that A and B of a module change, with the arguments that its `Change` needs.

    If the model does not have the module, yield None in place of a tensor.
    """
    experts = names.switched(module) if adapter.mlx else []
    if experts:
        for expert, leaf in enumerate(experts):
            yield leaf, {"expert": expert, "experts": len(experts)}
        return
    parameter = names.parameter(adapter, module)
    if parameter is None:
        weight = names.leaf(f"{module}.weight")
        yield weight, {"inputs_first": weight is not None and _inputs_first(weight)}
        return
    # peft's rank_pattern may name module and parameter, so the name that the adapter uses for the module counts.
    full_name = f"{without_wrappers(module)}.{parameter.checkpoint.rpartition('.')[2]}"
    if len(parameter.shape) != 3:
        yield parameter, {"parameter": full_name}
        return
    count = parameter.shape[0]
    if not parameter.stacked:
        yield parameter, {"parameter": full_name, "experts": count}
        return
    for expert in range(count):
        matrix = parameter.of_expert(expert)
        turned = _turned(adapter, adapter.lora[module], matrix)
        yield matrix, {"parameter": full_name, "expert": expert, "experts": count, "inputs_first": turned}


def _turned(adapter: Adapter, lora: Lora, leaf: BoundLeaf) -> bool:
    """Return whether the checkpoint stores an expert's matrix as [in, out], so that A and B fit it only transposed.

    For a square matrix, the shapes of A and B do not decide this, but the family's layout does.
    """
    inputs, outputs = adapter.shape(lora.a)[-1:], adapter.shape(lora.b)[:1]
    fits = [shape for shape in (leaf.shape, leaf.shape[::-1]) if shape == (*outputs, *inputs)]
    return _inputs_first(leaf) if len(fits) != 1 else fits[0] != leaf.shape


def _inputs_first(leaf: BoundLeaf) -> bool:
    """Return whether the checkpoint stores a matrix as [in, out], as Conv1D does, and not as [out, in]."""
    layout = leaf.layout
    if layout.is_identity or len(leaf.shape) != 2:
        return False
    return parse(layout.checkpoint)[0] == parse(layout.shared or layout.checkpoint)[-1]


def _require_own(adapter: Adapter, names: _Names, unknown: list[str]) -> None:
    """Raise SwapRefused if the adapter has modules that the model does not have (`unknown`, by their names).

    The message differs for a module that shares its weights with another one.
    """
    shared = [name for name in unknown for bare in bare_names(f"{name}.weight") if bare in names.shared_names]
    if shared:
        reason = f"{adapter.reference} changes {some_of(shared, _NAMED)}, whose weights are shared with another module"
        raise SwapRefused(f"{reason}; one merged weight cannot have two values")
    if unknown:
        reason = f"{adapter.reference} changes {len(unknown)} modules that this model does not have: "
        raise SwapRefused(reason + some_of(unknown, _NAMED), _hint(adapter))


# --- whether the adapter fits the model -------------------------------------------------------------------------------


def require_fitting(adapter: Adapter, changes: Mapping[str, Change], leaves: Mapping[str, BoundLeaf]) -> None:
    """Raise SwapRefused if the adapter's shapes do not fit the model, or if it lacks layers of its `target_modules`."""
    wrong = []
    for change in changes.values():
        for tensor, shape in _needed(adapter, change).items():
            if adapter.shape(tensor) != shape:
                actual = list(adapter.shape(tensor))
                wrong.append(f"{tensor} has the shape {actual}, but {change.leaf.checkpoint} needs {list(shape)}")
    wrong = list(dict.fromkeys(wrong))
    if wrong:
        raise SwapRefused(
            f"{adapter.reference} does not fit this model: {'; '.join(wrong[:_NAMED])}"
            + (f"; {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""),
            _hint(adapter, changes),
        )
    for change in changes.values():
        if change.module is not None and change.expert in (None, 0):
            adapter.scale(change.module, change.parameter, change.experts)
    _require_all_layers(adapter, changes, leaves)


def _needed(adapter: Adapter, change: Change) -> dict[str, tuple[int, ...]]:
    """Return the shapes that tensors of the adapter's file must have for a change, by their names in the file."""
    needed: dict[str, tuple[int, ...]] = {}
    if change.stands_in is not None:
        needed[change.stands_in] = change.leaf.shape
    if change.rows is not None:
        table = adapter.rows[change.rows]
        needed[table] = (adapter.shape(table)[0], *change.leaf.shape[1:])
    if change.module is not None:
        lora = adapter.lora[change.module]
        outputs, *inputs = change.leaf.shape[-2:][::-1] if change.inputs_first else change.leaf.shape[-2:]
        if lora.magnitude is not None:
            needed[lora.magnitude] = (inputs[0] if lora.embedding and inputs else outputs,)
        if lora.embedding and inputs:
            outputs, inputs = inputs[0], [outputs]
        needed |= adapter.factor_shapes(change.module, outputs, inputs[0] if inputs else 0, change.experts)
    if change.bias is not None:
        needed[adapter.lora[change.bias].bias or ""] = change.leaf.shape
    return needed


def _require_all_layers(adapter: Adapter, changes: Mapping[str, Change], leaves: Mapping[str, BoundLeaf]) -> None:
    """Raise SwapRefused if the adapter lacks some layers of this model.

    peft trains the modules in `target_modules` in all layers, unless the config restricts the layers. Then nothing is
    checked.
    """
    targets, config = adapter.config.get("target_modules"), adapter.config
    partly = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    if partly or not isinstance(targets, list) or any(re.search(r"\d", str(target)) for target in targets):
        return
    changed_names = {
        change.leaf.checkpoint for change in changes.values() if change.module is not None and change.parameter is None
    }
    kinds = {_kind(name) for name in changed_names if _kind(name) != name}
    lacking = [name for name in leaves if _kind(name) in kinds and name not in changed_names]
    if lacking:
        raise SwapRefused(
            f"{adapter.reference} is incomplete: its target_modules include {some_of(lacking, _NAMED)}, but it has no"
            " weights for them",
            _hint(adapter),
        )


def _kind(name: str) -> str:
    """Replace the layer's number in a tensor's name by N."""
    return re.sub(r"\.\d+\.", ".N.", name, count=1)


def _hint(adapter: Adapter, changes: Mapping[str, Change] | None = None) -> str | None:
    """Return the hint for the error that an adapter does not fit the model, or None.

    If the adapter has another number of tokens, the hint is to change the vocabulary first. Otherwise it names the
    model that the adapter was trained on, if its config says that.
    """
    for change in (changes or {}).values():
        if change.leaf.shared[0] in (EMBEDDING, HEAD) and change.stands_in is not None:
            tokens, now = adapter.shape(change.stands_in)[0], change.leaf.shape[0]
            if tokens != now:
                return f"The adapter has {tokens:,} tokens: first swap --vocab {tokens}, then merge it into the result."
    return (
        f"The adapter was trained on {adapter.trained_on:.80}, according to its config." if adapter.trained_on else None
    )
