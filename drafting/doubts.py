"""The doubts about a draft: properties of a family that tensor names, shapes and config fields do not determine.

A draft is a first definition of an unknown family. A doubt names one of its properties, and has options: the values
that the property has in other families. This file needs no torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..architectures import Leaf
from ..architectures.decoder import DecoderFamily
from ..architectures.rope import USUAL_ROTARY, RotaryKind
from ..components import ModelSpec, Shape, without_rounding
from .fields import has, rotary_of, with_default
from .record import ABSENT, BIASES, Doubt, Draft, Patch, cut, missing_parameters, shared_names, tree_of
from .vocabulary import Donor, KnownNames, Names, fits, id_or_value

_PLAIN = DecoderFamily({})
"""A family definition without arguments, from which the defaults are read."""

BY_LAYER = "what differs by layer"
"""The name of the doubt about how the family reads differences between layers from the config."""

UNDETERMINED = "what no name tells"
"""The name of the doubt about all arguments that neither tensor names nor config fields determine.

One option of this doubt copies all of these arguments from one other family.
"""

_READINGS = 8  # the maximum number of options for a tensor whose name no family has


def doubts_of(
    draft: Draft, config: Mapping[str, Any], names: Names, rivals: Sequence[Donor], words: KnownNames
) -> Iterator[Doubt]:
    """Yield the uncertain properties of a draft, each with other values to try. The likeliest to be wrong come first.

    Args:
        draft: The draft, whose options have not been tried yet.
        config: The checkpoint's config.json.
        names: The checkpoint's tensor names and shapes.
        rivals: The other supported families, the one most similar to the checkpoint first.
        words: The tensor names and config fields of the supported families.
    """
    roles = {role for field in draft.fields.values() for role in field.role.split()}
    spec = tree_of(draft, config)
    missing = set() if spec is None else missing_parameters(spec, draft)
    for template in [template for template in names.shapes if template not in draft.leaves]:
        yield Doubt(
            f"what {template} holds", tuple(_readings(template, names.shape(template), spec, missing, draft, words))
        )
    yield from _gate_or_up(draft, names, words)
    yield _whole_families(draft, roles, rivals)
    yield from _rotary(draft, words)
    yield from _field_meanings(draft, config, roles, words)
    yield _by_layer(draft, config, rivals, words)
    yield from _fixed(draft, roles, words)


def _whole_families(draft: Draft, roles: set[str], rivals: Sequence[Donor]) -> Doubt:
    """Return the doubt about all arguments of the draft that neither tensor names nor config fields determine.

    Each option copies all these arguments from one of the other families (`rivals`) with the same kind of norm. `roles`
    are the properties that config fields determine, such as "heads".
    """
    options = []
    for donor in [rival for rival in rivals if rival.decoder.norm is draft.arguments["norm"]]:
        patch: dict[str, Any] = {f"fixed.{role}": ABSENT for role in draft.arguments["fixed"] if role not in BIASES}
        patch |= {
            f"fixed.{role}": value
            for role, value in donor.decoder.fixed.items()
            if role not in roles
            and role not in BIASES
            and role not in ("norm.bias", "tied")
            and has(draft.arguments, role)
        }
        if donor.decoder.rotary is not None and draft.arguments["rotary"] is not None:
            patch |= {f"rotary.{name}": getattr(donor.decoder.rotary, name) for name in ("pairs", "rounding", "joined")}
        if draft.arguments["mixtures"] is not None and donor.decoder.mixtures is not None:
            patch["arguments.mixtures"] = donor.decoder.mixtures
        options.append((f"all as {donor.family.name}", patch))
    return Doubt(UNDETERMINED, tuple(options))


def _rotary(draft: Draft, words: KnownNames) -> Iterator[Doubt]:
    """Yield the doubts about details of RoPE, such as the order of pairs. Without RoPE in the draft, yield nothing."""
    if draft.arguments["rotary"] is None:
        return
    rotaries = [donor.decoder.rotary for donor in words.donors if donor.decoder.rotary is not None]
    for name in ("pairs", "rounding", "direction"):
        values = dict.fromkeys(getattr(rotary, name) for rotary in rotaries)
        others = [value for value in values if value != getattr(draft.arguments["rotary"], name)]
        yield Doubt(f"rotary {name}", tuple((repr(value), {f"rotary.{name}": value}) for value in others))


def _field_meanings(draft: Draft, config: Mapping[str, Any], roles: set[str], words: KnownNames) -> Iterator[Doubt]:
    """Yield one doubt for each config field of the draft. Its options are the field's meanings in other families.

    `roles` are the properties that config fields give to the draft, such as "heads".
    """
    for name, field in draft.fields.items():
        options = [
            one for one in words.fields.get(name, []) if (one.value.role, one.value.read) != (field.role, field.read)
        ]
        other_roles = roles - set(field.role.split())
        patches = [
            (one.value.role, {f"fields.{name}": with_default(one.value, name, config, draft.known)})
            for one in options
            if other_roles.isdisjoint(one.value.role.split())
        ]
        yield Doubt(f"what {name} says", tuple(patches))


def _by_layer(draft: Draft, config: Mapping[str, Any], rivals: Sequence[Donor], words: KnownNames) -> Doubt:
    """Return the doubt about the differences between layers, such as which layers have a window.

    Each option but one copies from another family the rules by which it reads these differences from the config. The
    remaining option is that all layers are equal.
    """
    donors = [
        donor for donor in (draft.skeleton, *rivals) if donor.decoder.layers not in (None, draft.arguments["layers"])
    ]
    rotary = draft.arguments["rotary"] or rotary_of(USUAL_ROTARY, config, draft.known, words)
    uniform = {"arguments.layers": None, "arguments.written": _PLAIN.written, "arguments.rotary": rotary}
    none = [("nothing differs by layer", uniform)] if draft.arguments["layers"] else []
    differing = [
        (f"as {donor.family.name}", _layers_of(donor, rotary)) for donor in donors if not donor.decoder.recurrent
    ]
    return Doubt(BY_LAYER, (*none, *differing))


def _fixed(draft: Draft, roles: set[str], words: KnownNames) -> Iterator[Doubt]:
    """Yield the doubts about properties that are constant in a family, so that no config field gives them.

    Their options are the constants in other families. The property that is constant in most families comes first.
    `roles` are the properties that config fields give to the draft.
    """
    fixed = draft.arguments["fixed"]
    for role, meanings in sorted(words.fixed().items(), key=lambda item: -sum(one.votes for one in item[1])):
        if role in roles or role in BIASES or role in ("norm.bias", "tied", "eps", "final_norm", "attention.causal"):
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
    """Return a patch: the draft reads differences between layers from the config in the same way as the family `donor`.

    If the donor has RoPE, the patch sets the draft's RoPE to `rotary`. Otherwise it removes RoPE.
    """
    patch: dict[str, Any] = {f"arguments.{name}": getattr(donor.decoder, name) for name in ("layers", "written")}
    return patch | {"arguments.rotary": None if donor.decoder.rotary is None else rotary}


def undecided(draft: Draft, config: Mapping[str, Any]) -> Draft:
    """Return the draft with a TODO for every doubt that matters, for a model type that transformers does not have.

    Without transformers' class, the options of a doubt cannot be compared. A doubt matters if one of its options
    computes another function of the same tensors.
    """
    todo, now = dict(draft.todo), tree_of(draft, config)
    for doubt in draft.doubts:
        if now is None or doubt.what in (UNDETERMINED, BY_LAYER):
            continue
        trees = [(words, tree_of(draft.patched(patch), config)) for words, patch in doubt.options]
        others = [words for words, tree in trees if tree is not None and _differs(tree, now)]
        if others:
            options = " or ".join(words.removeprefix(f"{doubt.what} ") for words in others[:4])
            todo[f"doubt {doubt.what}"] = f"names and shapes do not show {doubt.what}: it may be {options}"
    return replace(draft, todo=todo)


def _differs(tree: ModelSpec, now: ModelSpec) -> bool:
    """Return whether two models have the same tensors, but compute different functions of them."""
    tensors, tensors_now = ({leaf.name: leaf.shape for leaf in cut(spec).parameters()} for spec in (tree, now))
    return tensors == tensors_now and without_rounding(tree) != without_rounding(now)


def _gate_or_up(draft: Draft, names: Names, words: KnownNames) -> Iterator[Doubt]:
    """Yield the doubt which of two matrices of a gated feed-forward is the gate projection.

    If some supported family has the names of these matrices, they are not in doubt.
    """
    parts = [f"blocks.{{layer}}.feed_forward.{part}_proj.weight" for part in ("gate", "up")]
    templates = {leaf.names[0]: template for template, leaf in draft.leaves.items() if len(leaf.names) == 1}
    if not {*parts} <= templates.keys() or any(words.of_tensor(names.key(templates[part])) for part in parts):
        return
    gate, up = (templates[part] for part in parts)
    turned = {f"leaves.{gate}": Leaf(gate, parts[1]), f"leaves.{up}": Leaf(up, parts[0])}
    yield Doubt(f"whether {gate} or {up} is the gate projection", ((f"{up} is the gate projection", turned),))


def _as_many(leaf: Leaf, shape: Shape, counts: Mapping[str, int]) -> bool:
    """Return whether a tensor of this shape has as many elements as all parameters that `leaf` stores in it.

    `counts` has the number of elements of each parameter, by gptkit's name for it. If one is unknown, the answer is
    True.
    """
    sizes = [counts.get(name.format(layer=0, expert=0)) for name in leaf.names]
    known = [count for count in sizes if count is not None]
    return len(known) < len(sizes) or bool(leaf.layout.stack) or sum(known) == math.prod(shape)


def _readings(
    template: str, shape: Shape, spec: ModelSpec | None, missing: set[str], draft: Draft, words: KnownNames
) -> Iterator[tuple[str, Patch]]:
    """Yield the parameters that a tensor with an unknown name may store, as options of a doubt.

    An option is a description, and a patch of the draft. Tensors that fuse several parameters come first, and then the
    parameters that most families have.

    Args:
        template: The tensor's name, with "{layer}" for the layer number.
        shape: The shape of the tensor.
        spec: The component tree that the draft reads from the config, or None if it cannot read the config.
        missing: The parameters of this tree that no other tensor stores.
        draft: The draft, which says what the other tensors store.
        words: The tensor names of the supported families.
    """
    ending, used_names = template.rpartition(".")[2], shared_names(draft.leaves)
    counts = {} if spec is None else {parameter.name: parameter.count for parameter in cut(spec).parameters()}
    by_leaf: dict[Any, tuple[Leaf, int, str]] = {}
    for meanings in words.leaves.values():
        for leaf, votes, donor in meanings:
            same = all(name.rpartition(".")[2] == ending for name in leaf.names)
            free = missing.issuperset(leaf.names) if missing else used_names.isdisjoint(leaf.names)
            placed = ("{layer}" in template) == ("{layer}" in leaf.names[0])
            if same and free and leaf.when is None and placed and fits(leaf, shape) and _as_many(leaf, shape, counts):
                key = (leaf.names, leaf.layout)
                by_leaf[key] = (leaf, votes + by_leaf.get(key, (leaf, 0, donor))[1], donor)
    ranked = sorted(by_leaf.values(), key=lambda option: (len(option[0].names) < 2, -option[1]))
    for leaf, _, donor in ranked[:_READINGS]:
        parameters = ", ".join(name.rpartition("}.")[2] for name in leaf.names)
        yield (
            f"{parameters} lie in {template} as in {donor}",
            {f"leaves.{template}": replace(leaf, checkpoint=template)},
        )
