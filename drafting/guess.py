"""Guess a first draft of an unknown family's definition from config.json and the checkpoint's tensor names and shapes.

The draft has the arguments of the nearest supported family, except where names, shapes and config fields contradict
them. Properties that these do not determine become doubts (`Draft.doubts`), with the values of other families as
options. This file needs neither torch nor weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..architectures import Leaf
from ..architectures.base import bind
from ..architectures.config import COMMON_IRRELEVANT, COMMON_REFUSED
from ..components import LayerNorm, Shape
from ..errors import CannotExpress, CheckpointError, GptkitError, shown
from .doubts import UNDETERMINED, doubts_of
from .fields import arguments_of, fields_of
from .record import ABSENT, BIASES, Draft, Known, cut, missing_parameters, shared_names, tree_of
from .vocabulary import Donor, KnownNames, Meaning, Names, fits, names_of

_ACCOUNTS = ("refused.", "tensor ", "names ", "config")  # prefixes of the keys of the TODOs that `accounted` adds
_NOBODY = "TODO: nothing here reads {}"
_LOOKED_AT = 12  # the number of nearest families whose tree is compared


def guess(config: Mapping[str, Any], shapes: Mapping[str, Shape], known: Known | None, words: KnownNames) -> Draft:
    """Return a first draft of the definition of a checkpoint's family.

    Args:
        config: The checkpoint's config.json.
        shapes: The shapes of the checkpoint's tensors, by name.
        known: transformers' classes for the model type, if there are any.
        words: The tensor names and config fields of the supported families.

    Raises:
        CheckpointError: there are no layers, or the config does not match the tensors.
    """
    names = names_of(shapes)
    if not names.layers:
        raise CheckpointError(
            f"none of the {len(shapes)} tensors has a layer number in its name",
            "gptkit draft supports only decoders whose layers are numbered in the tensor names.",
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
        draft, doubts=tuple(doubt for doubt in doubts_of(draft, config, names, donors[1:], words) if doubt.options)
    )
    return accounted(_fitted(draft, config, names), config, shapes)


def _fitted(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """Return the draft with those options of its doubts that make it fit the checkpoint better.

    The options are tried one by one. One is kept if the draft then explains more tensor names, shapes and config
    fields.
    """
    best = _strangeness(draft, config, names)
    for doubt in [doubt for doubt in draft.doubts if doubt.what != UNDETERMINED] * 2:
        for words, patch in doubt.options if best else ():
            tried = draft.patched(patch)
            strange = _strangeness(tried, config, names)
            if strange < best:
                why = f"{words}: more names, shapes and fields agree with it"
                draft, best = replace(tried, why={**tried.why, **dict.fromkeys(patch, why)}), strange
    return draft


def _strangeness(draft: Draft, config: Mapping[str, Any], names: Names) -> float:
    """Return how badly a draft fits a checkpoint. It is 0 if it explains all tensor names, shapes and fields."""
    unread = _unread(draft, config)
    spec = None if unread is None else tree_of(draft, config)
    if unread is None or spec is None or len(spec.blocks) != names.layers:
        return 1000.0
    try:
        ours = {leaf.checkpoint: leaf.shape for leaf in draft.family().bind(cut(spec))}
    except CannotExpress:
        return 200.0 + len(missing_parameters(spec, draft))
    except (AssertionError, ValueError, TypeError, KeyError):
        return 500.0
    theirs = dict(names.cut())
    head = draft.family().head
    if spec.tied:
        theirs.pop(head, None)
    return 100 * (1 - _agreement(ours, theirs)) + len(unread)


def _ranked(config: Mapping[str, Any], names: Names, words: KnownNames) -> list[Donor]:
    """Return the supported families on which a draft can be based, the most similar one to the checkpoint first.

    Similar families have many of the same tensor names, shapes and config fields.
    """
    keys = {names.key(template) for template in names.shapes}
    fields = config.keys() - COMMON_IRRELEVANT.keys() - COMMON_REFUSED.keys()

    def nearness(donor: Donor) -> float:
        donor_keys = {key for key in donor.keys if key in keys or not key.endswith("bias")}
        alike = len(keys & donor_keys) / len(keys | donor_keys)
        tables = {key for key, leaf in donor.keys.items() if leaf.names == ("positions.weight",)}
        if tables and not tables & keys:  # the family has a position embedding, and this checkpoint has none
            alike -= 1.0
        return alike + 0.5 * len(donor.knows(config) & fields) / max(len(fields), 1)

    near = {donor.family.name: nearness(donor) for donor in words.donors}
    ranked = sorted(words.donors, key=lambda donor: near[donor.family.name], reverse=True)
    for donor in ranked[:_LOOKED_AT]:
        near[donor.family.name] += _fit(donor, config, names)
    return sorted(ranked, key=lambda donor: near[donor.family.name], reverse=True)


def _fit(donor: Donor, config: Mapping[str, Any], names: Names) -> float:
    """Return how well the definition of a supported family fits a checkpoint, from 0 to 1.

    This is the share of tensor names that the family also has when it reads the checkpoint's config, with equal shapes.
    """
    try:
        spec = donor.decoder.read(donor.family.reader(config))
        if len(spec.blocks) != names.layers:
            return 0.0
        theirs = {
            leaf.checkpoint.removeprefix(donor.family.prefix): leaf.shape
            for leaf in bind(donor.family.name, donor.family.leaves, cut(spec))
        }
    except (GptkitError, AssertionError, ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    return _agreement(theirs, {names.key(name): shape for name, shape in names.cut()})


def _agreement(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> float:
    """Return the share of tensor names that two checkpoints have in common, with equal shapes, from 0 to 1.

    Arguments are the shapes of their tensors by name.
    """
    return len(ours.items() & theirs.items()) / max(len(ours.keys() | theirs.keys()), 1)


# --- the tensors -----------------------------------------------------------------------------------------------------


def _leaves(names: Names, skeleton: Donor, words: KnownNames) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Guess which parameters the checkpoint's tensors store. Return this by tensor name, and the reasons.

    Tensors that `skeleton`, the nearest family, also has come first, in its order. In names, "{layer}" stands for the
    layer number.
    """
    by_template, why, used_names = dict[str, Leaf](), dict[str, str](), set[str]()
    meanings = {template: words.of_tensor(names.key(template)) for template in names.shapes}
    for template in sorted(names.shapes, key=lambda template: len(meanings[template]) or 99):
        leaf = skeleton.keys.get(names.key(template))
        options = [*([Meaning(leaf, 0, skeleton.family.name)] if leaf is not None else []), *meanings[template]]
        for option in options:
            leaf = replace(option.value, checkpoint=template)
            placed = ("{layer}" in template) == ("{layer}" in leaf.names[0])
            if placed and used_names.isdisjoint(leaf.names) and fits(leaf, names.shape(template)):
                used_names.update(leaf.names)
                by_template[template] = leaf
                shape = names.shape(template)
                source = f"{option.votes} families have the name so" if option.votes else f"as {option.donor} has it"
                why[f"leaves.{template}"] = f"{shape}; {source}"
                break
    for template, leaf in _gate_and_up(names, by_template):
        by_template[template] = leaf
        why[f"leaves.{template}"] = f"{names.shape(template)}; one of two such matrices beside down_proj"
    order = {key: number for number, key in enumerate(skeleton.keys)}
    ranked = sorted(by_template, key=lambda template: (order.get(names.key(template), len(order)), template))
    return {template: by_template[template] for template in ranked}, why


def _gate_and_up(names: Names, leaves: Mapping[str, Leaf]) -> Iterator[tuple[str, Leaf]]:
    """Find the gate and up projections by their shape, if no family has their names. Yield them by tensor name.

    Both have the transposed shape of the down projection. There must be exactly two such matrices, and the one whose
    name sorts first becomes the gate projection.
    """
    stem = "blocks.{layer}.feed_forward."
    down = next((name for name, leaf in leaves.items() if leaf.names == (f"{stem}down_proj.weight",)), None)
    if down is None or not shared_names(leaves).isdisjoint({f"{stem}gate_proj.weight", f"{stem}up_proj.weight"}):
        return
    wanted = names.shape(down)[::-1]
    unknown = sorted(template for template in names.shapes if template not in leaves and "{layer}" in template)
    alike = [template for template in unknown if names.shape(template) == wanted and "{expert}" not in template]
    if len(alike) == 2:
        for template, part in zip(alike, ("gate", "up"), strict=True):
            yield template, Leaf(template, f"{stem}{part}_proj.weight")


# --- comparison with the checkpoint ----------------------------------------------------------------------------------


def _as_named(draft: Draft, config: Mapping[str, Any], names: Names) -> Draft:
    """Return the draft with the biases, and the tied or untied head, that the checkpoint's tensor names show.

    Tensor names overrule config fields. If a config field contradicts them, the draft gets a TODO.
    """
    shared, todo, why = shared_names(draft.leaves), dict(draft.todo), dict(draft.why)
    spec = tree_of(draft, config)
    if spec is None:
        return draft
    parameters = {parameter.name for parameter in spec.parameters()}
    patch: dict[str, Any] = {}
    fields = dict(draft.fields)
    for role, name in BIASES.items():
        if name.startswith("blocks.{layer}.attention") and spec.blocks[0].mixer("attention") is None:
            continue
        has = name in shared
        if has == (name.format(layer=0) in parameters) or (
            role.startswith("feed_forward") and draft.arguments["mixtures"]
        ):
            continue
        for field_name, field in list(fields.items()):
            if role in field.role.split():
                rest = " ".join(part for part in field.role.split() if part != role)
                value, there_is = shown(config.get(field_name, field.default)), "one" if has else "none"
                usually = "no" if has else "a"
                todo[f"fields.{field_name}"] = (
                    f"{field_name} is {value}, which in other families means {usually} {role}, but the checkpoint "
                    f"has {there_is}"
                )
                if rest:
                    fields[field_name] = field._replace(role=rest)
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
    if head == spec.tied and not any("tied" in field.role.split() for field in fields.values()):
        patch["fixed.tied"] = not head
        why["fixed.tied"] = "the head's tensor is there" if head else "the head has no tensor"
    return replace(replace(draft, fields=fields).patched(patch), todo=todo, why=why)


def _unread(draft: Draft, config: Mapping[str, Any]) -> list[str] | None:
    """Return the fields of a config that the draft neither reads nor declares irrelevant or refused.

    Return None if the draft cannot read the config.
    """
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
    """Return the draft with a TODO for everything in the checkpoint that it does not explain.

    These are tensors that do not fit, and config fields that nothing reads. For such a field, the draft also refuses
    all values except the checkpoint's.
    """
    todo = {place: question for place, question in draft.todo.items() if not place.startswith(_ACCOUNTS)}
    known, names, before = draft.known, names_of(shapes), draft.more["refused"]
    refused = {name: refusal for name, refusal in before.items() if refusal[1] != _NOBODY.format(name)}
    more = {**draft.more, "refused": refused}
    draft = replace(draft, more=more)
    stated = {**(known.defaults if known else {}), **config}
    family = draft.family()
    reader = family.reader(stated)
    try:
        family.read(reader)
    except (GptkitError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"no field says the model's {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        todo["config"] = f"config.json is not read: {reason:.200}"
    aliases = {name for names in more.get("config_aliases", {}).values() for name in names}
    every_field = dict.fromkeys([*stated, *(known.fields if known else ()), *(known.aliases if known else ())])
    refused, irrelevant = dict(more["refused"]), dict(more["irrelevant"])
    for name in every_field:
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
    refused = {name: refusal for name, refusal in refused.items() if name not in reader.used}
    draft = replace(draft, more={**more, "refused": refused, "irrelevant": irrelevant})
    for template in names.shapes:
        if template not in draft.leaves:
            todo[f"tensor {template}"] = f"nothing is known of {template} {names.shape(template)}"
    for name in names.odd:
        todo[f"tensor {shown(name)}"] = "its name cannot stand in a template"
    todo |= {f"names {number}": misfit for number, misfit in enumerate(_misfits(draft, config, shapes))}
    return replace(draft, todo=todo)


def _misfits(draft: Draft, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yield a description of the first tensor that differs from the draft, or of the tensors that are left over."""
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
