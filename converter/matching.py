"""Pair the tensors in files with those that a tree declares. `open_checkpoint` refuses what does not fit, `audit`
reports it, and both go by the same `Match`.
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
    """How the tensors in files fit the leaves of a tree. Tensors go by their names in the files, leaves by theirs."""

    declared: dict[str, BoundLeaf]
    """The leaves, by name."""
    found: dict[str, str] = field(default_factory=dict)
    """Leaf -> the tensor that holds it."""
    extra: list[str] = field(default_factory=list)
    """Tensors without a place in the model."""
    twice: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of tensors that are one leaf under two names."""
    shaped: list[str] = field(default_factory=list)
    """Leaves whose tensors have another shape."""
    typed: list[str] = field(default_factory=list)
    """Tensors that are not floating point."""
    heads: list[str] = field(default_factory=list)
    """Heads that are stored although config.json ties them to the embedding."""
    stands_in: str = ""
    """A tied head that is stored in the embedding's place, as safetensors' save_model leaves it."""
    untied: list[str] = field(default_factory=list)
    """Those of `heads` that hold other values than the embedding."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors of layers that share weights -> the leaf that stores these."""
    parted: list[str] = field(default_factory=list)
    """Those of `copies` that hold other values."""
    carried: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tensors that are not computed with and travel along, by group: leaf -> tensor."""
    altered: list[str] = field(default_factory=list)
    """Tensors that no layer reads, with other values than the family computes with."""
    dropped: list[str] = field(default_factory=list)
    """Buffers that hold no weights."""

    @property
    def missing(self) -> list[str]:
        """The leaves that no tensor holds."""
        return [name for name in self.declared if name not in self.found]

    def own_head(self, family: Architecture | None) -> list[str]:
        """Return the tensors of a head that the family's trees do not have: those outside of the layers and of what the
        family's names begin with.
        """
        begins = () if family is None or not family.prefix else (family.prefix,)
        inside = [name for name in self.extra if any(part.isdecimal() for part in name.split("."))]
        return [name for name in self.extra if name not in inside and not name.startswith(begins)]

    @property
    def sound(self) -> bool:
        """Whether all that is there fits, be something missing or there without a place."""
        wrong = (self.twice, self.shaped, self.typed, self.untied, self.parted, self.altered)
        return not any(wrong)

    @property
    def embedding(self) -> str:
        """The leaf of the token embedding."""
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
    """Pair tensors and leaves. `architecture`: the family that the files' names are of; `family`: that of the tree.
    `integers` takes weights that are stored so. Values are compared where two names stand for one tensor and the
    weights are here.
    """
    made, info, layers = Match({leaf.checkpoint: leaf for leaf in leaves}), weights.info, len(spec.blocks)
    borrowed = {} if architecture is None else architecture.borrowed(spec)
    for name in info:
        known: str | None = name
        if architecture is not None:
            known = architecture.canonical_name(name, {**made.declared, **borrowed}, layers)
        if known is None:
            made.dropped.append(name)
        elif known in made.declared:
            if known in made.found:
                made.twice.append((name, made.found[known]))
            made.found[known] = name
        elif architecture is not None and known == architecture.head and spec.tied:
            made.heads.append(name)
        elif known in borrowed:
            made.copies[name] = borrowed[known]
        elif (
            family is not None and DTYPES[info[name][0]].carrier is not None and (group := family.carries(name, layers))
        ):
            made.carried.setdefault(group[0], {})[group[1]] = name
        else:
            made.extra.append(name)
    # Only now: the embedding may come after the head, and under an old name.
    if made.heads and made.embedding not in made.found:
        made.stands_in = made.found[made.embedding] = made.heads.pop(0)
    first = {name: made.found.setdefault(known, name) for name, known in made.copies.items()}
    allowed = (*FLOATS, *(INTEGERS if integers else ()), *(F8 if "scales" in made.carried else ()))
    made.shaped = [name for name, own in made.found.items() if info[own][1] != made.declared[name].shape]
    made.typed = [own for own in made.found.values() if info[own][0] not in allowed]
    if weights.fetched:
        made.parted = [name for name, own in first.items() if name != own and not _same(weights, own, name)]
        made.untied = [name for name in made.heads if not _is_tied(made, spec, weights, name)]
        made.altered = _altered(made, spec, weights, family)
    return made


def _same(weights: Weights, name: str, other: str) -> bool:
    return weights.info[name] == weights.info[other] and weights.same(name, other)


def _is_tied(made: Match, spec: ModelSpec, weights: Weights, name: str) -> bool:
    """Return whether a tied head that was stored all the same has the embedding's bytes."""
    stored = made.found[made.embedding]
    dtype, shape = weights.info[name]
    if dtype not in FLOATS or shape != (spec.vocab_size, spec.hidden_size):  # reported as such
        return weights.info[stored] == (dtype, shape)
    return weights.same(stored, name)


def _altered(made: Match, spec: ModelSpec, weights: Weights, family: Architecture | None) -> list[str]:
    """Return the tensors that no layer reads, and that differ from the tensor that they repeat or from what the config
    makes of them: transformers would compute with them.
    """
    wrong: list[str] = []
    unused: Mapping[str, str] = {} if family is None else made.carried.get("unused", {})
    for known, name in unused.items():
        assert family is not None
        first, make = family.repeated.get(known), family.made.get(known)
        if first in made.found and not weights.same(name, made.found[first]):
            wrong.append(name)
        if make is not None:
            values, theirs = make(spec), to_float64(weights.read(name), weights.info[name][0])
            near = 1e-6 if weights.info[name][0] in ("F32", "F64") else 1e-2  # numpy's sine may differ in the last bit
            if theirs.shape != values.shape or not np.allclose(theirs, values, rtol=0, atol=near):
                wrong.append(name)
    return wrong
