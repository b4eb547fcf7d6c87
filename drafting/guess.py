"""What a config.json and a checkpoint's names and shapes say of a family that is not known. No torch, no weights.

The nearest registered family gives the arguments; what names, shapes and config fields say otherwise replaces them.
What nobody can see in them stays open (`Draft.doubts`), with the values that other families have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..architectures import Leaf
from ..architectures.base import bind
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED
from ..components import LayerNorm, Shape
from ..errors import CannotExpress, CheckpointError, GptkitError, shown
from .doubts import UNTOLD, doubts_of
from .fields import arguments_of, fields_of
from .record import ABSENT, BIASES, Draft, Known, cut, lacking, shared_names, tree_of
from .vocabulary import Donor, KnownNames, Meaning, Names, fits, names_of

_ACCOUNTS = ("refused.", "tensor ", "names ", "config")  # how the places begin of what `accounted` tells
_NOBODY = "TODO: nothing here reads {}"
_LOOKED_AT = 12  # families whose own tree is made of the config


def guess(config: Mapping[str, Any], shapes: Mapping[str, Shape], known: Known | None, words: KnownNames) -> Draft:
    """The draft of a checkpoint's family.

    Raises:
        CheckpointError: there are no layers, or the tensors are not those of this config.
    """
    names = names_of(shapes)
    if not names.layers:
        raise CheckpointError(
            f"none of the {len(shapes)} tensors has a layer number in its name",
            "gptkit can draft only checkpoints of decoders with numbered layers.",
        )
    donors = _ranked(config, names, words)
    skeleton = donors[0]
    leaves, why = _leaves(names, skeleton, words)
    if "head.weight" not in shared_names(leaves):
        head = skeleton.family.head
        leaves[head] = Leaf(head, "head.weight")
        why[f"leaves.{head}"] = f"the head of a model that is not tied, as {skeleton.family.name} calls it"
    fields, more = fields_of(config, names, leaves, known, skeleton, words, why)
    draft = Draft(
        model_type=config["model_type"],
        known=known,
        skeleton=skeleton,
        arguments=arguments_of(config, names, leaves, fields, known, skeleton, words, why),
        fields=fields,
        leaves=leaves,
        more=more,
        why=why,
    )
    draft = _as_named(draft, config, names)
    draft = replace(
        draft, doubts=tuple(each for each in doubts_of(draft, config, names, donors[1:], words) if each.options)
    )
    return accounted(_fitted(draft, config, names), config, shapes)


def _fitted(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """With those of the open values that names, shapes and the config's fields speak for, taken one after another."""
    best = _strangeness(draft, config, names)
    for doubt in [each for each in draft.doubts if each.what != UNTOLD] * 2:
        for words, patch in doubt.options if best else ():
            tried = draft.patched(patch)
            strange = _strangeness(tried, config, names)
            if strange < best:
                why = f"{words}: more names, shapes and fields agree with it"
                draft, best = replace(tried, why={**tried.why, **dict.fromkeys(patch, why)}), strange
    return draft


def _strangeness(draft: Draft, config: Mapping[str, Any], names: Names) -> float:
    """How much of the names, shapes and config fields the draft leaves unexplained."""
    left = _unread(draft, config)
    spec = None if left is None else tree_of(draft, config)
    if left is None or spec is None or len(spec.blocks) != names.layers:
        return 1000.0
    try:
        ours = {each.checkpoint: each.shape for each in draft.family().bind(cut(spec))}
    except CannotExpress:
        return 200.0 + len(lacking(spec, draft))
    except (AssertionError, ValueError, TypeError, KeyError):
        return 500.0
    theirs = dict(names.cut())
    head = draft.family().head
    if spec.tied:
        theirs.pop(head, None)
    return 100 * (1 - _agreement(ours, theirs)) + len(left)


def _ranked(config: Mapping[str, Any], names: Names, words: KnownNames) -> list[Donor]:
    """The families, those nearest by names, then by config fields, first; of equals the oldest."""
    own = {names.key(each) for each in names.shapes}
    fields = config.keys() - COMMON_IRRELEVANT.keys() - COMMON_REFUSED.keys()

    def nearness(donor: Donor) -> float:
        theirs = {key for key in donor.keys if key in own or not key.endswith("bias")}
        alike = len(own & theirs) / len(own | theirs)
        tables = {key for key, leaf in donor.keys.items() if leaf.names == ("positions.weight",)}
        if tables and not tables & own:  # whose positions are a tensor, which this checkpoint does not have
            alike -= 1.0
        return alike + 0.5 * len(donor.knows(config) & fields) / max(len(fields), 1)

    near = {each.family.name: nearness(each) for each in words.donors}
    first = sorted(words.donors, key=lambda each: near[each.family.name], reverse=True)
    for each in first[:_LOOKED_AT]:
        near[each.family.name] += _fit(each, config, names)
    return sorted(first, key=lambda each: near[each.family.name], reverse=True)


def _fit(donor: Donor, config: Mapping[str, Any], names: Names) -> float:
    """How many of the names and shapes the family would have itself for this config, from 0 to 1."""
    try:
        spec = donor.decoder.read(donor.family.reader(config))
        if len(spec.blocks) != names.layers:
            return 0.0
        theirs = {
            each.checkpoint.removeprefix(donor.family.prefix): each.shape
            for each in bind(donor.family.name, donor.family.leaves, cut(spec))
        }
    except (GptkitError, AssertionError, ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    return _agreement(theirs, {names.key(each): shape for each, shape in names.cut()})


def _agreement(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> float:
    """The part of all names that two have with one shape."""
    return len(ours.items() & theirs.items()) / max(len(ours.keys() | theirs.keys()), 1)


# --- tensors ---------------------------------------------------------------------------------------------------------


def _leaves(names: Names, skeleton: Donor, words: KnownNames) -> tuple[dict[str, Leaf], dict[str, str]]:
    """What each tensor holds, by its template, the skeleton's order first; and why that is believed."""
    found, why, taken = dict[str, Leaf](), dict[str, str](), set[str]()
    meanings = {each: words.of_tensor(names.key(each)) for each in names.shapes}
    for template in sorted(names.shapes, key=lambda each: len(meanings[each]) or 99):
        own = skeleton.keys.get(names.key(template))
        options = [*([Meaning(own, 0, skeleton.family.name)] if own is not None else []), *meanings[template]]
        for each in options:
            leaf = replace(each.value, checkpoint=template)
            placed = ("{layer}" in template) == ("{layer}" in leaf.names[0])
            if placed and taken.isdisjoint(leaf.names) and fits(leaf, names.shape(template)):
                taken.update(leaf.names)
                found[template] = leaf
                shape = names.shape(template)
                others = f"{each.votes} families have the name so" if each.votes else f"as {each.donor} has it"
                why[f"leaves.{template}"] = f"{shape}; {others}"
                break
    for template, leaf in _gate_and_up(names, found):
        found[template] = leaf
        why[f"leaves.{template}"] = f"{names.shape(template)}; one of two such matrices beside down_proj"
    order = {key: number for number, key in enumerate(skeleton.keys)}
    ranked = sorted(found, key=lambda each: (order.get(names.key(each), len(order)), each))
    return {each: found[each] for each in ranked}, why


def _gate_and_up(names: Names, found: Mapping[str, Leaf]) -> Iterator[tuple[str, Leaf]]:
    """Yield two matrices without a name in any family as gate and up projection, in the order of their names, where
    they have the shape of a down projection turned round and nothing else holds either.
    """
    stem = "blocks.{layer}.feed_forward."
    down = next((name for name, leaf in found.items() if leaf.names == (f"{stem}down_proj.weight",)), None)
    held = {name for leaf in found.values() for name in leaf.names}
    if down is None or not held.isdisjoint({f"{stem}gate_proj.weight", f"{stem}up_proj.weight"}):
        return
    wanted = names.shape(down)[::-1]
    unnamed = sorted(each for each in names.shapes if each not in found and "{layer}" in each)
    alike = [each for each in unnamed if names.shape(each) == wanted and "{expert}" not in each]
    if len(alike) == 2:
        for template, part in zip(alike, ("gate", "up"), strict=True):
            yield template, Leaf(template, f"{stem}{part}_proj.weight")


# --- held against the checkpoint -------------------------------------------------------------------------------------


def _as_named(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """With biases and a tied head as names have them, whatever the config's fields are taken to say."""
    shared, todo, why = shared_names(draft.leaves), dict(draft.todo), dict(draft.why)
    spec = tree_of(draft, config)
    if spec is None:
        return draft
    there = {parameter.name for parameter in spec.parameters()}
    patch: dict[str, Any] = {}
    fields = dict(draft.fields)
    for role, name in BIASES.items():
        if name.startswith("blocks.{layer}.attention") and spec.blocks[0].mixer("attention") is None:
            continue
        has = name in shared
        if has == (name.format(layer=0) in there) or (role.startswith("feed_forward") and draft.arguments["mixtures"]):
            continue
        for field_name, each in list(fields.items()):
            if role in each.role.split():
                rest = " ".join(one for one in each.role.split() if one != role)
                value, there_is = shown(config.get(field_name, each.default)), "one" if has else "none"
                usually = "without" if has else "with"
                todo[f"fields.{field_name}"] = (
                    f"{field_name} is {value}, by which other families are {usually} {role}, and there is {there_is}"
                )
                if rest:
                    fields[field_name] = each._replace(role=rest)
                else:
                    del fields[field_name]
        patch[f"fixed.{role}"] = has
        why[f"fixed.{role}"] = f"{'there is' if has else 'there is no'} such tensor, and no field says so"
    norm_bias = any(name.endswith("norm.bias") for name in shared)
    if draft.arguments["norm"] is LayerNorm and not norm_bias:
        patch["fixed.norm.bias"] = False
        why["fixed.norm.bias"] = "no norm has a bias"
    elif draft.arguments["norm"] is LayerNorm:
        patch["fixed.norm.bias"] = ABSENT
    head = draft.family().head in names.shapes
    if head == spec.tied and not any("tied" in each.role.split() for each in fields.values()):
        patch["fixed.tied"] = not head
        why["fixed.tied"] = "the head's tensor is there" if head else "the head has no tensor"
    return replace(replace(draft, fields=fields).patched(patch), todo=todo, why=why)


def _unread(draft: Draft, config: Mapping[str, Any]) -> list[str] | None:
    """The fields of a config that the draft neither reads nor declares; None where it cannot read the config."""
    family = draft.family()
    reader = family.reader(config)
    try:
        family.read(reader)
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return [
        name
        for name in config
        if name not in reader.used and name not in family.ignored and name not in family.refusals
    ]


def accounted(draft: Draft, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Draft:
    """With every field that nothing reads refused at other values, and all that does not fit told, as of now."""
    todo = {place: each for place, each in draft.todo.items() if not place.startswith(_ACCOUNTS)}
    known, names, before = draft.known, names_of(shapes), draft.more["refused"]
    more = {**draft.more, "refused": {name: each for name, each in before.items() if each[1] != _NOBODY.format(name)}}
    draft = replace(draft, more=more)
    stated = {**(known.defaults if known else {}), **config}
    family = draft.family()
    reader = family.reader(stated)
    try:
        family.read(reader)
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError) as error:
        lacking = isinstance(error, KeyError)
        reason = f"no field says the model's {error}" if lacking else str(error).partition("\n")[0]
        todo["config"] = f"config.json is not read: {reason:.200}"
    aliases = {name for names in more.get("config_aliases", {}).values() for name in names}
    left = dict.fromkeys([*stated, *(known.fields if known else ()), *(known.aliases if known else ())])
    refused, irrelevant = dict(more["refused"]), dict(more["irrelevant"])
    for name in left:
        if name in reader.used or name in family.ignored or name in family.refusals or name in aliases:
            continue
        if known is not None and name in known.aliases and known.aliases[name] != name:
            irrelevant[name] = f"another name of {known.aliases[name]}"
            continue
        value = stated.get(name)
        refused[name] = ((value,), _NOBODY.format(name))
        todo[f"refused.{name}"] = (
            f"nothing reads {name}, which is {shown(value)}: say what it does, or why it does nothing"
        )
    irrelevant = {name: reason for name, reason in irrelevant.items() if name not in reader.used}
    refused = {name: each for name, each in refused.items() if name not in reader.used}
    draft = replace(draft, more={**more, "refused": refused, "irrelevant": irrelevant})
    for template in names.shapes:
        if template not in draft.leaves:
            todo[f"tensor {template}"] = f"nothing is known of {template} {names.shape(template)}"
    for name in names.odd:
        todo[f"tensor {shown(name)}"] = "its name cannot stand in a template"
    todo |= {f"names {number}": each for number, each in enumerate(_misfits(draft, config, shapes))}
    return replace(draft, todo=todo)


def _misfits(draft: Draft, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """How the tensors of the tree and those of the checkpoint differ."""
    spec = tree_of(draft, config)
    if spec is None:
        return
    try:
        ours = {leaf.checkpoint: leaf.shape for leaf in draft.family().bind(spec)}
    except (GptkitError, AssertionError, ValueError, TypeError, KeyError) as error:
        yield f"the tree has no place in these names: {str(error).splitlines()[0]:.200}"
        return
    head = draft.family().head
    for name, shape in ours.items():
        if name not in shapes:
            yield f"the tree has {name} {shape}, and the checkpoint has not"
            return
        if shapes[name] != shape:
            yield f"{name} is {shapes[name]}, and the tree has {shape}"
            return
    spare = [
        name
        for name in shapes
        if name not in ours and name != head and draft.family().canonical_name(name, ours, len(spec.blocks)) is not None
    ]
    if spare:
        yield f"{len(spare)} tensors have no place in the tree, {spare[0]:.100} among them"
