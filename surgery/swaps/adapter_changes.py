"""The tensors of a checkpoint that an adapter changes, and whether the adapter fits them.

Adapters use the names of transformers' modules. In most families these are the checkpoint's names; `bind_all` knows the
others too. Adapters of models of images and text use longer names, which `composite.bare_names` shortens.
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
"""mlx-lm's module of all experts, whose linears it calls as gptkit does in every family."""


@dataclass(frozen=True)
class Change:
    """An adapter's change to one tensor of the checkpoint, or to the matrix of one expert in it."""

    leaf: BoundLeaf
    sources: tuple[str, ...]
    """The old tensors that hold its values."""
    module: str | None = None
    """The module with A and B, if it has such."""
    parameter: str | None = None
    """The parameter's own name if peft trains one that is no linear's weight (`target_parameters`)."""
    expert: int | None = None
    experts: int = 0
    """Which expert's matrix it is, of how many whose A and B are stored together."""
    stands_in: str | None = None
    """The tensor of the adapter's file that takes its place."""
    bias: str | None = None
    """The module whose B has a bias that adds to it."""
    rows: str | None = None
    """The module of which some rows are new."""
    inputs_first: bool = False
    """Whether the matrix is [in, out] (Conv1D), not [out, in]."""


def leaves_of(spec: ModelSpec, origin: Origin | None) -> tuple[Architecture, dict[str, BoundLeaf]]:
    """Return the family, and its leaves by all their names, including those of a tied head."""
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
    """The tensors of a model by their names in adapters."""

    def __init__(self, architecture: Architecture, leaves: Mapping[str, BoundLeaf], spec: ModelSpec) -> None:
        self.architecture, self.leaves, self.layers = architecture, leaves, len(spec.blocks)
        self._matrices = {p.name: p.shape for p in spec.parameters()}
        self.shared_names = architecture.repeats(spec)

    def leaf(self, tensor: str) -> BoundLeaf | None:
        """Return the leaf of a tensor, or None if the model has no tensor of that name."""
        for name in bare_names(tensor):
            known = self.architecture.canonical_name(name, self.leaves, self.layers)
            if known is not None and known in self.leaves:
                return self.leaves[known]
        return None

    def parameter(self, adapter: Adapter, module: str) -> BoundLeaf | None:
        """Return the leaf of a parameter that peft trains in place.

        Each parameter has a wrapper around its module, the last one the outermost.
        """
        bare = without_wrappers(module)
        ends = {name: name.rpartition(".")[2] for name in self._children(bare)}
        trained = [name for name, end in ends.items() if adapter.targets(f"{bare}.{end}")]
        place = len(trained) - 1 - wrappers(module)
        return self.leaves[trained[place]] if place >= 0 else None

    def _children(self, module: str) -> list[str]:
        """Return the names of a module's own parameters, in the order of transformers' modules."""
        known = {spelled for name in bare_names(module) for spelled in self.architecture.spellings(name)}
        return [name for name in self.leaves if name.rpartition(".")[0] in known]

    def switched(self, module: str) -> list[BoundLeaf]:
        """Return the matrices of all experts for a module of mlx-lm, or none if it is no such module."""
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
    """Return an adapter's changes, by the checkpoint's names. Raises SwapRefused for modules not in the model."""
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
    """Return an adapter of mlx-lm with A and B of the token embedding as those of a linear (tokens, hidden), whose
    lora_a is (tokens, rank) and lora_b (rank, hidden).
    """
    names = _Names(architecture, leaves, spec)
    leaf_of = {module: names.leaf(f"{module}.weight") for module in adapter.lora} if adapter.mlx else {}
    tables = {module for module, leaf in leaf_of.items() if leaf is not None and leaf.shared == (EMBEDDING,)}
    turned = {m: replace(adapter.lora[m], a=adapter.lora[m].b, b=adapter.lora[m].a, turned=False) for m in tables}
    return replace(adapter, lora={**adapter.lora, **turned}) if tables else adapter


def _changed(adapter: Adapter, names: _Names, module: str) -> Iterator[tuple[BoundLeaf | None, dict[str, Any]]]:
    """Yield the leaves that a module's A and B change, with the details of the change."""
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
    # The pattern of a rank may name the module in front of the parameter too, so the adapter's own name of it counts.
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
    """Return whether an expert's matrix is [in, out]: A and B say so, unless the matrix is square."""
    inputs, outputs = adapter.shape(lora.a)[-1:], adapter.shape(lora.b)[:1]
    fits = [shape for shape in (leaf.shape, leaf.shape[::-1]) if shape == (*outputs, *inputs)]
    return _inputs_first(leaf) if len(fits) != 1 else fits[0] != leaf.shape


def _inputs_first(leaf: BoundLeaf) -> bool:
    """Return whether the checkpoint has a matrix as [in, out] (Conv1D), not as [out, in]."""
    layout = leaf.layout
    if layout.is_identity or len(leaf.shape) != 2:
        return False
    return parse(layout.checkpoint)[0] == parse(layout.shared or layout.checkpoint)[-1]


def _require_own(adapter: Adapter, names: _Names, unknown: list[str]) -> None:
    """Raise SwapRefused if an adapter changes modules that the model does not have, or that share their weights."""
    shared = [name for name in unknown for bare in bare_names(f"{name}.weight") if bare in names.shared_names]
    if shared:
        reason = f"{adapter.reference} changes {some_of(shared, _NAMED)}, whose weights are shared with another module"
        raise SwapRefused(f"{reason}; one merged weight cannot have two values")
    if unknown:
        reason = f"{adapter.reference} changes {len(unknown)} modules that this model does not have: "
        raise SwapRefused(reason + some_of(unknown, _NAMED), _hint(adapter))


# --- whether it fits --------------------------------------------------------------------------------------------------


def require_fitting(adapter: Adapter, changes: Mapping[str, Change], leaves: Mapping[str, BoundLeaf]) -> None:
    """Raise SwapRefused if shapes do not fit the model, or if layers in `target_modules` are missing."""
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
    """Return the shapes that the adapter's tensors need, by their names in its file."""
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
    """Raise SwapRefused if peft would have given more layers of this model an adapter."""
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
    """Return a tensor's name with N for the number of its layer."""
    return re.sub(r"\.\d+\.", ".N.", name, count=1)


def _hint(adapter: Adapter, changes: Mapping[str, Change] | None = None) -> str | None:
    """Return a hint: to add rows for the adapter's tokens first, or else the model that the adapter was trained on."""
    for change in (changes or {}).values():
        if change.leaf.shared[0] in (EMBEDDING, HEAD) and change.stands_in is not None:
            tokens, now = adapter.shape(change.stands_in)[0], change.leaf.shape[0]
            if tokens != now:
                return f"The adapter has {tokens:,} tokens: first swap --vocab {tokens}, then merge it into the result."
    return (
        f"The adapter was trained on {adapter.trained_on:.80}, according to its config." if adapter.trained_on else None
    )
