"""Pair the tensors in files with the tensors that a model needs, its leaves.

A leaf is the checkpoint name of a tensor, with its shape and the parameters that the tensor stores. If tensors do not
fit, `open_checkpoint` raises an error, and `audit` reports them. Both use the same `Match`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..architectures import Architecture, BoundLeaf
from ..components import ModelSpec
from .dtypes import F8, FLOATS, INTEGERS, to_float64
from .safetensors import DTYPES
from .weights import Weights


@dataclass
class Match:
    """Which tensor in the files stores which tensor that a model needs (its leaf), and everything that does not fit.

    All tensors are given by name: tensors in the files by their names there, and leaves by the names that the model
    expects.
    """

    declared: dict[str, BoundLeaf]
    """All tensors that the model needs (leaves), by name."""
    matched: dict[str, str] = field(default_factory=dict)
    """A leaf (a tensor that the model needs) -> the tensor in the files that stores it."""
    extra: list[str] = field(default_factory=list)
    """Tensors in the files that the model does not need."""
    twice: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of tensors in the files that store the same tensor of the model under two names."""
    shaped: list[str] = field(default_factory=list)
    """Leaves (tensors that the model needs) that have another shape in the files."""
    typed: list[str] = field(default_factory=list)
    """Paired tensors whose dtype is not allowed, usually because it is not a float dtype."""
    heads: list[str] = field(default_factory=list)
    """Tensors of a head that is stored although config.json ties it to the embedding."""
    stands_in: str = ""
    """The tensor of a tied head, if it is stored instead of the embedding, as safetensors' save_model does."""
    untied: list[str] = field(default_factory=list)
    """Tensors of `heads` whose values differ from the embedding."""
    copies: dict[str, str] = field(default_factory=dict)
    """A tensor of a layer that shares its weights with another layer -> the leaf that stores the shared weights."""
    parted: list[str] = field(default_factory=list)
    """Tensors of `copies` whose values differ from the shared weights."""
    carried: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tensors that gptkit only copies, by group, such as "mtp": usual name of the tensor -> its name in the files."""
    altered: list[str] = field(default_factory=list)
    """Tensors that gptkit does not read, because their values follow from other data, but that have other values."""
    dropped: list[str] = field(default_factory=list)
    """Tensors that are not weights but buffers, such as attention masks."""

    @property
    def missing(self) -> list[str]:
        """Return the names of the tensors that the model needs and that are not in the files."""
        return [name for name in self.declared if name not in self.matched]

    def own_head(self, family: Architecture | None) -> list[str]:
        """Return the extra tensors that may be the head of another class, such as a classifier.

        They are outside of the layers, and their names do not begin with the prefix of the language model.
        """
        prefixes = () if family is None or not family.prefix else (family.prefix,)
        layer_tensors = [name for name in self.extra if any(part.isdecimal() for part in name.split("."))]
        return [name for name in self.extra if name not in layer_tensors and not name.startswith(prefixes)]

    @property
    def sound(self) -> bool:
        """Return whether the paired tensors have no faults. Missing and extra tensors do not count as faults."""
        problems = (self.twice, self.shaped, self.typed, self.untied, self.parted, self.altered)
        return not any(problems)

    @property
    def embedding(self) -> str:
        """Return the name that the model expects for the token embedding, or "" if there is none."""
        return next((name for name, leaf in self.declared.items() if leaf.shared == ("embedding.weight",)), "")


def match(
    spec: ModelSpec,
    leaves: Sequence[BoundLeaf],
    weights: Weights,
    architecture: Architecture | None,
    family: Architecture | None,
    *,
    integers: bool = False,
) -> Match:
    """Pair the tensors in files with the tensors that a model needs (its leaves).

    Tied heads and shared weights may be stored twice. If the weights have been downloaded, the two are compared.

    Args:
        spec: the model's tree of components.
        leaves: the leaves of the tree.
        weights: the tensors in the files.
        architecture: the family whose tensor names the files have; None if the files use another naming.
        family: the family of the model.
        integers: allow weights that are stored as integers.
    """
    pairs, info, layers = Match({leaf.checkpoint: leaf for leaf in leaves}), weights.info, len(spec.blocks)
    borrowed = {} if architecture is None else architecture.borrowed(spec)
    for name in info:
        leaf_name: str | None = name
        if architecture is not None:
            leaf_name = architecture.canonical_name(name, {**pairs.declared, **borrowed}, layers)
        if leaf_name is None:
            pairs.dropped.append(name)
        elif leaf_name in pairs.declared:
            if leaf_name in pairs.matched:
                pairs.twice.append((name, pairs.matched[leaf_name]))
            pairs.matched[leaf_name] = name
        elif architecture is not None and leaf_name == architecture.head and spec.tied:
            pairs.heads.append(name)
        elif leaf_name in borrowed:
            pairs.copies[name] = borrowed[leaf_name]
        elif (
            family is not None and DTYPES[info[name][0]].carrier is not None and (group := family.carries(name, layers))
        ):
            pairs.carried.setdefault(group[0], {})[group[1]] = name
        else:
            pairs.extra.append(name)
    # Only now: the embedding may come after the head, and under an old name.
    if pairs.heads and pairs.embedding not in pairs.matched:
        pairs.stands_in = pairs.matched[pairs.embedding] = pairs.heads.pop(0)
    first = {name: pairs.matched.setdefault(leaf_name, name) for name, leaf_name in pairs.copies.items()}
    allowed = (*FLOATS, *(INTEGERS if integers else ()), *(F8 if "scales" in pairs.carried else ()))
    pairs.shaped = [name for name, tensor in pairs.matched.items() if info[tensor][1] != pairs.declared[name].shape]
    pairs.typed = [tensor for tensor in pairs.matched.values() if info[tensor][0] not in allowed]
    if weights.fetched:
        pairs.parted = [name for name, tensor in first.items() if name != tensor and not _same(weights, tensor, name)]
        pairs.untied = [name for name in pairs.heads if not _is_tied(pairs, spec, weights, name)]
        pairs.altered = _altered(pairs, spec, weights, family)
    return pairs


def _same(weights: Weights, name: str, other: str) -> bool:
    return weights.info[name] == weights.info[other] and weights.same(name, other)


def _is_tied(pairs: Match, spec: ModelSpec, weights: Weights, name: str) -> bool:
    """Return whether the stored head `name`, which config.json ties to the embedding, has the embedding's bytes."""
    stored = pairs.matched[pairs.embedding]
    dtype, shape = weights.info[name]
    if dtype not in FLOATS or shape != (spec.vocab_size, spec.hidden_size):  # reported as a wrong dtype or shape
        return weights.info[stored] == (dtype, shape)
    return weights.same(stored, name)


def _altered(pairs: Match, spec: ModelSpec, weights: Weights, family: Architecture | None) -> list[str]:
    """Return the tensors of the group "unused" that have other values than gptkit assumes.

    A tensor of this group should be a copy of another tensor or follow from the config, so gptkit does not read it. But
    transformers computes with its stored values.
    """
    wrong: list[str] = []
    unused: Mapping[str, str] = {} if family is None else pairs.carried.get("unused", {})
    for leaf_name, name in unused.items():
        assert family is not None
        original, make = family.repeated.get(leaf_name), family.computed.get(leaf_name)
        if original in pairs.matched and not weights.same(name, pairs.matched[original]):
            wrong.append(name)
        if make is not None:
            values, stored = make(spec), to_float64(weights.read(name), weights.info[name][0])
            tolerance = (
                1e-6 if weights.info[name][0] in ("F32", "F64") else 1e-2
            )  # numpy's sine may differ in the last bit
            if stored.shape != values.shape or not np.allclose(stored, values, rtol=0, atol=tolerance):
                wrong.append(name)
    return wrong
