"""What names, shapes and config fields do not tell of a family, and the values that others have there. No torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..architectures import Leaf
from ..architectures.decoder import Decoder
from ..architectures.rope import USUAL_ROTARY, RotaryKind
from ..components import ModelSpec, Shape, without_rounding
from .fields import has, rotary_of, with_default
from .record import ABSENT, BIASES, Doubt, Draft, Patch, cut, lacking, shared_names, tree_of
from .vocabulary import Donor, KnownNames, Names, fits, id_or_value

_PLAIN = Decoder({})
"""Every argument as it is where nobody says otherwise."""

BY_LAYER = "what differs by layer"
"""The doubt of what reads fields that differ by layer."""

UNTOLD = "what no name tells"
"""The doubt of all arguments that neither names nor fields tell, as other families have them together."""

_READINGS = 8  # of a tensor whose name nobody has


def doubts_of(
    draft: Draft, config: Mapping[str, Any], names: Names, rivals: Sequence[Donor], words: KnownNames
) -> Iterator[Doubt]:
    """What names and shapes do not tell, the likeliest first."""
    said = {role for each in draft.fields.values() for role in each.role.split()}
    fixed = draft.arguments["fixed"]
    spec = tree_of(draft, config)
    missing = set() if spec is None else lacking(spec, draft)
    for template in [each for each in names.shapes if each not in draft.leaves]:
        yield Doubt(
            f"what {template} holds", tuple(_readings(template, names.shape(template), spec, missing, draft, words))
        )
    yield from _gate_or_up(draft, names, words)
    fitting = [each for each in rivals if each.decoder.norm is draft.arguments["norm"]]
    whole = []
    for donor in fitting:
        patch: dict[str, Any] = {f"fixed.{role}": ABSENT for role in fixed if role not in BIASES}
        patch |= {
            f"fixed.{role}": value
            for role, value in donor.decoder.fixed.items()
            if role not in said
            and role not in BIASES
            and role not in ("norm.bias", "tied")
            and has(draft.arguments, role)
        }
        if donor.decoder.rotary is not None and draft.arguments["rotary"] is not None:
            patch |= {f"rotary.{name}": getattr(donor.decoder.rotary, name) for name in ("pairs", "rounding", "joined")}
        if draft.arguments["mixtures"] is not None and donor.decoder.mixtures is not None:
            patch["arguments.mixtures"] = donor.decoder.mixtures
        whole.append((f"all as {donor.family.name}", patch))
    yield Doubt(UNTOLD, tuple(whole))
    if draft.arguments["rotary"] is not None:
        rotaries = [each.decoder.rotary for each in words.donors if each.decoder.rotary is not None]
        for name in ("pairs", "rounding", "direction"):
            values = dict.fromkeys(getattr(each, name) for each in rotaries)
            others = [each for each in values if each != getattr(draft.arguments["rotary"], name)]
            yield Doubt(f"rotary {name}", tuple((repr(each), {f"rotary.{name}": each}) for each in others))
    for name, each in draft.fields.items():
        options = [
            one for one in words.fields.get(name, []) if (one.value.role, one.value.read) != (each.role, each.read)
        ]
        free = said - set(each.role.split())
        patches = [
            (one.value.role, {f"fields.{name}": with_default(one.value, name, config, draft.known)})
            for one in options
            if free.isdisjoint(one.value.role.split())
        ]
        yield Doubt(f"what {name} says", tuple(patches))
    others = [
        each for each in (draft.skeleton, *rivals) if each.decoder.layers not in (None, draft.arguments["layers"])
    ]
    same = {
        "arguments.layers": None,
        "arguments.written": _PLAIN.written,
        "arguments.rotary": draft.arguments["rotary"],
    }
    rotary = draft.arguments["rotary"] or rotary_of(USUAL_ROTARY, config, draft.known, words)
    none = [("nothing differs by layer", {**same, "arguments.rotary": rotary})] if draft.arguments["layers"] else []
    differing = [(f"as {each.family.name}", _layers_of(each, rotary)) for each in others if not each.decoder.recurrent]
    yield Doubt(BY_LAYER, (*none, *differing))
    for role, meanings in sorted(words.fixed().items(), key=lambda each: -sum(one.votes for one in each[1])):
        if role in said or role in BIASES or role in ("norm.bias", "tied", "eps", "final_norm", "attention.causal"):
            continue
        if (
            not has(draft.arguments, role)
            or ("position" in role)
            or (role.startswith("mixture") and draft.arguments["mixtures"] is None)
        ):
            continue
        now = id_or_value(fixed[role]) if role in fixed else None
        other: list[tuple[str, Patch]] = [
            (f"{role} as in {one.donor}", {f"fixed.{role}": one.value})
            for one in meanings
            if id_or_value(one.value) != now
        ]
        yield Doubt(role, (*other, (f"no {role}", {f"fixed.{role}": ABSENT})))


def _layers_of(donor: Donor, rotary: RotaryKind) -> dict[str, Any]:
    """The patch that takes what differs by layer from a family."""
    patch: dict[str, Any] = {f"arguments.{name}": getattr(donor.decoder, name) for name in ("layers", "written")}
    return patch | {"arguments.rotary": None if donor.decoder.rotary is None else rotary}


def undecided(draft: Draft, config: Mapping[str, Any]) -> Draft:
    """With a word on each open value that would be another function, for want of anything that decides it."""
    todo, now = dict(draft.todo), tree_of(draft, config)
    for doubt in draft.doubts:
        if now is None or doubt.what in (UNTOLD, BY_LAYER):
            continue
        trees = [(words, tree_of(draft.patched(patch), config)) for words, patch in doubt.options]
        others = [words for words, tree in trees if tree is not None and _another(tree, now)]
        if others:
            said = " or ".join(each.removeprefix(f"{doubt.what} ") for each in others[:4])
            todo[f"doubt {doubt.what}"] = f"neither names nor shapes tell {doubt.what}: it may be {said}"
    return replace(draft, todo=todo)


def _another(tree: ModelSpec, now: ModelSpec) -> bool:
    """Whether a tree is another function of the same tensors."""
    ours, theirs = ({each.name: each.shape for each in cut(one).parameters()} for one in (tree, now))
    return ours == theirs and without_rounding(tree) != without_rounding(now)


def _gate_or_up(draft: Draft, names: Names, words: KnownNames) -> Iterator[Doubt]:
    """Yield the doubt which of two matrices is the gate projection, where no family has their names."""
    parts = [f"blocks.{{layer}}.feed_forward.{part}_proj.weight" for part in ("gate", "up")]
    held = {leaf.names[0]: template for template, leaf in draft.leaves.items() if len(leaf.names) == 1}
    if not {*parts} <= held.keys() or any(words.of_tensor(names.key(held[part])) for part in parts):
        return
    gate, up = (held[part] for part in parts)
    turned = {f"leaves.{gate}": Leaf(gate, parts[1]), f"leaves.{up}": Leaf(up, parts[0])}
    yield Doubt(f"whether {gate} or {up} is the gate projection", ((f"{up} is the gate projection", turned),))


def _as_many(leaf: Leaf, shape: Shape, counts: Mapping[str, int]) -> bool:
    """Return whether a tensor has as many values as what the leaf holds of the tree, where the tree has that."""
    own = [counts.get(name.format(layer=0, expert=0)) for name in leaf.names]
    known = [count for count in own if count is not None]
    return len(known) < len(own) or bool(leaf.layout.each) or sum(known) == math.prod(shape)


def _readings(
    template: str, shape: Shape, spec: ModelSpec | None, missing: set[str], draft: Draft, words: KnownNames
) -> Iterator[tuple[str, Patch]]:
    """Yield what a tensor of an unknown name may hold: several in one first, then what has no name yet."""
    ends, taken = template.rpartition(".")[2], shared_names(draft.leaves)
    counts = {} if spec is None else {parameter.name: parameter.count for parameter in cut(spec).parameters()}
    found: dict[Any, tuple[Leaf, int, str]] = {}
    for meanings in words.leaves.values():
        for each in meanings:
            leaf, votes, donor = each
            same = all(name.rpartition(".")[2] == ends for name in leaf.names)
            free = missing.issuperset(leaf.names) if missing else taken.isdisjoint(leaf.names)
            placed = ("{layer}" in template) == ("{layer}" in leaf.names[0])
            if same and free and leaf.when is None and placed and fits(leaf, shape) and _as_many(leaf, shape, counts):
                key = (leaf.names, leaf.layout)
                found[key] = (leaf, votes + found.get(key, (leaf, 0, donor))[1], donor)
    ranked = sorted(found.values(), key=lambda each: (len(each[0].names) < 2, -each[1]))
    for leaf, _, donor in ranked[:_READINGS]:
        held = ", ".join(name.rpartition("}.")[2] for name in leaf.names)
        yield f"{held} lie in {template} as in {donor}", {f"leaves.{template}": replace(leaf, checkpoint=template)}
