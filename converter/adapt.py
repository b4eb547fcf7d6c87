"""A checkpoint as a tree of another family, where that family can hold the same function exactly.

What may differ is what changes no function: how a component rounds, and biases. A bias that the family has and the tree
has not is added as zeros; one that the tree has and the family has not is left out where every value of it is zero,
which is looked up in the weights. Everything else that differs stands in the way.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..architectures import ARCHITECTURES, Architecture, BoundLeaf, named
from ..architectures.base import collapse, short
from ..architectures.layout import IDENTITY
from ..components import (
    Attention,
    Block,
    Component,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    differences,
    without_rounding,
)
from ..errors import CannotExpress, GptkitError
from .dtypes import to_float64, widest
from .safetensors import DTYPES
from .tensors import Checkpoint, Weights

__all__ = ["adapt", "adapt_to_any", "any_family", "between", "is_bias", "nearest_tree", "obstacles", "without_biases"]


def adapt(source: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint with the nearest tree that the family expresses and that computes the same.

    Raises:
        CannotExpress: there is none; the components in the way are listed.

    """
    try:
        architecture.config_for(source.spec)
    except CannotExpress as error:
        reason = error
    else:
        return source
    without = _without_zero_biases(source) if source.fetched else source.spec
    found = nearest_tree(architecture, source.spec, without)
    if found is not None:
        return _as_tree(source, found, architecture)
    raise _in_the_way(architecture, source) or reason


def any_family(origin: str | None) -> list[Architecture]:
    """All families, the one that a checkpoint came from first."""
    first = [] if origin is None else [named(origin)]
    return first + [each for each in ARCHITECTURES.values() if each.name != origin]


def adapt_to_any(source: Checkpoint) -> tuple[Architecture, Checkpoint]:
    """The first family that expresses the checkpoint's tree, its own before others, and the checkpoint so.

    Raises:
        CannotExpress: there is none; what is in the way of the nearest one is listed.

    """
    refused: list[tuple[int, CannotExpress]] = []
    for architecture in any_family(source.origin.family):
        try:
            found = adapt(source, architecture)
            architecture.bind(found.spec)
        except CannotExpress as error:
            told = obstacles(architecture, source.spec)
            refused.append((sys.maxsize if told is None else len(told), error))
            continue
        return architecture, found
    raise min(refused, key=lambda each: each[0])[1]


def nearest_tree(architecture: Architecture, spec: ModelSpec, without: ModelSpec) -> ModelSpec | None:
    """The nearest tree that a family expresses and that computes the same, None where there is none. `without` is the
    tree without the biases that are zero.
    """
    for each in dict.fromkeys((without, spec, without_rounding(without), without_rounding(spec))):
        found = _nearest(architecture, each)
        if found is not None and _lost(spec, found) <= _lost(spec, without):
            return found
    return None


def _nearest(architecture: Architecture, spec: ModelSpec) -> ModelSpec | None:
    """What the family makes of a tree, where it differs in rounding and biases alone."""
    try:
        found = architecture.spec({"model_type": architecture.name, **architecture.write(spec)})
        architecture.config_for(found)
    except REFUSED:
        return None
    apart = differences(without_rounding(spec), without_rounding(found))
    return found if all(is_bias(path, a, b) for path, a, b in apart) else None


REFUSED = (KeyError, AttributeError, TypeError, ValueError, GptkitError)
"""What comes of a tree with a component that a family's `write` does not know, or of a config that it refuses."""


def _in_the_way(architecture: Architecture, source: Checkpoint) -> CannotExpress | None:
    """What the family computes otherwise, without what is only rounded otherwise; None where it cannot be laid out."""
    found = obstacles(architecture, source.spec)
    if found is None:
        return None
    lines = [f"  {path}: {short(a)}; {architecture.name} has {short(b)}" for path, a, b in found]
    hint = "gptkit's own format holds any tree: convert --to local"
    if not source.fetched and any(is_bias(*each) for each in found):
        hint = "Biases that are zero are no obstacle, but no weight was fetched to tell."
    return CannotExpress(
        f"{architecture.name} cannot express {len(lines)} of the tree's components:\n" + "\n".join(lines[:12]), hint
    )


def obstacles(architecture: Architecture, spec: ModelSpec) -> list[tuple[str, Any, Any]] | None:
    """Where a family computes otherwise than a tree, (path, in the tree, in the family), layers that are alike told
    once; None where the family has no config at all for such a tree.
    """
    found = between(architecture, spec)
    return None if found is None else collapse(found)


def between(architecture: Architecture, spec: ModelSpec) -> list[tuple[str, Any, Any]] | None:
    """As `obstacles`, each layer for itself."""
    plain, told = without_rounding(spec), []
    for each in (spec, plain):  # a family may have no word for how a component rounds, and one for the component
        found = _written(architecture, each)
        if found is not None:
            told.append(differences(plain, without_rounding(found)))
    if not told:  # it cannot even be written down: then as much of it as the family has components for
        near = _in_kind(architecture, plain)
        found = None if near is None else _written(architecture, near)
        return None if found is None else differences(plain, without_rounding(found))
    return min(told, key=lambda found: len(collapse(found)))


def _written(architecture: Architecture, spec: ModelSpec) -> ModelSpec | None:
    """What a family reads where it has written a tree, None where it cannot."""
    try:
        return architecture.spec({"model_type": architecture.name, **architecture.write(spec)})
    except REFUSED:
        return None


def _in_kind(architecture: Architecture, spec: ModelSpec) -> ModelSpec | None:
    """A tree of the family's components with this one's sizes, as far as they have such; None where they do not fit.

    The components are those of the family's config without a field.
    """
    try:
        usual = architecture.spec({"model_type": architecture.name})
        whole = msgspec.structs.replace(spec, context_length=spec.context_length or usual.context_length)
        sizes = {"size": spec.hidden_size, "hidden_size": spec.hidden_size, "length": whole.context_length}
        blocks = tuple(_of_kind(block, usual.blocks[0], sizes) for block in spec.blocks)
        found: ModelSpec = _of_kind(whole, usual, {**sizes, "blocks": blocks})
    except REFUSED:
        return None
    return found


def _of_kind(node: Any, usual: Component, sizes: Mapping[str, Any]) -> Any:
    """A component like `usual` with what `node` says of it, or else what `sizes` says."""
    if isinstance(node, MixtureOfExperts) and not isinstance(usual, MixtureOfExperts):
        node = node.expert
    if isinstance(usual, Attention) and isinstance(node, Attention | LatentAttention):
        width = node.head_dim if isinstance(node, Attention) else node.query_dim
        sizes = {**sizes, "size": width, "dim": width, "head_dim": width, "kv_heads": node.heads}
    fields = {}
    own = node.entries() if isinstance(node, Component) else {}
    for name, theirs in usual.entries().items():
        ours = own.get(name, sizes.get(name))
        if name == "blocks":
            fields[name] = sizes[name]
        elif isinstance(theirs, Component):
            inner = node if name == "expert" and not isinstance(node, MixtureOfExperts) else ours
            fields[name] = _of_kind(inner, theirs, sizes)
        elif isinstance(ours, Component):
            fields[name] = None
        else:
            fields[name] = ours if name in own or name in sizes else theirs
    return usual.replaced(**fields) if isinstance(usual, Block) else type(usual)(**fields)


def is_bias(path: str, a: Any, b: Any) -> bool:
    """Whether a difference is a flag for a bias."""
    return path.endswith("bias") and isinstance(a, bool) and isinstance(b, bool)


def _names(spec: ModelSpec) -> set[str]:
    return {parameter.name for parameter in spec.parameters()}


def _lost(spec: ModelSpec, other: ModelSpec) -> frozenset[str]:
    """The tensors of one tree that another has not."""
    return frozenset(_names(spec) - _names(other))


def _without_zero_biases(source: Checkpoint) -> ModelSpec:
    """The tree without the biases whose every value is zero, in every layer that has them."""
    return without_biases(source.spec, {n for n in _names(source.spec) if n.endswith("bias") and _is_zero(source, n)})


def without_biases(spec: ModelSpec, gone: Collection[str]) -> ModelSpec:
    """The tree with every flag for biases off whose tensors are all among `gone` (shared names)."""

    def bare(node: Component, path: str) -> Component:
        for flag in (name for name in node.__struct_fields__ if name.endswith("bias") and getattr(node, name) is True):
            less = msgspec.structs.replace(node, **{flag: False})
            if {f"{path}.{name}" for name in node.shapes().keys() - less.shapes().keys()} <= set(gone):
                node = less
        return node

    found: ModelSpec = spec.mapped(bare)
    return found


def _is_zero(source: Checkpoint, name: str) -> bool:
    array, dtype = source.tensor(name)
    return not np.any(to_float64(array, dtype))


def _as_tree(source: Checkpoint, spec: ModelSpec, architecture: Architecture) -> Checkpoint:
    """The checkpoint under another tree: the tensors that it gains are zero, those that it loses are left."""
    gained = [parameter for parameter in spec.parameters() if parameter.name not in _names(source.spec)]
    lost = sorted(_lost(source.spec, spec))
    dtype = widest([source.dtype_of(leaf) for leaf in source.leaves])
    zeros = {parameter.name: (dtype, parameter.shape) for parameter in gained}
    leaves = [BoundLeaf(name, shape, (name,), (shape,), IDENTITY, {}) for name, (_, shape) in zeros.items()]
    notes = list(source.notes)
    if gained:
        notes.append(
            f"{architecture.name} has {_kinds([p.name for p in gained])}: added as zeros, which change nothing"
        )
    if lost:
        notes.append(f"{architecture.name} has no {_kinds(lost)}: left out, every value of them is zero")
    rounding = differences(spec, without_rounding(spec)) != differences(source.spec, without_rounding(source.spec))
    if rounding:
        notes.append(f"the same function, rounded as {architecture.name} rounds: the last bits of logits may differ")
    return replace(
        source,
        spec=spec,
        leaves=[*source.leaves, *leaves],
        notes=notes,
        _weights=_WithZeros(source._weights, zeros),
        _found={**source._found, **{name: name for name in zeros}},
    )


def _kinds(names: list[str]) -> str:
    """Tensors of all layers told once: attention.q_proj.bias, …"""
    kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names)
    return ", ".join(kinds)


class _WithZeros:
    """Weights, and tensors of zeros that no file holds."""

    def __init__(self, weights: Weights, zeros: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        self._weights, self._zeros = weights, zeros
        self.info = {**weights.info, **zeros}

    def read(self, name: str) -> np.ndarray:
        if name not in self._zeros:
            return self._weights.read(name)
        dtype, shape = self._zeros[name]
        return np.zeros(shape, DTYPES[dtype].carrier)

    def span(self, name: str) -> tuple[Path, int] | None:
        return None if name in self._zeros else self._weights.span(name)

    def release(self) -> None:
        if hasattr(self._weights, "release"):
            self._weights.release()
