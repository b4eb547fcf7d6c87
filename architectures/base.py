"""What an architecture file declares, and the one walk that turns the declaration into a weight map for a tree.

An `Architecture` says how a family's config.json becomes a ModelSpec and back, and lists its `leaves`: every tensor
the family's checkpoints may hold, each with the shared tensors it stands for and the layout between them. A leaf is
in use where its shared tensors exist in the tree, so optional biases and norms need no code. `bind` proves for the
tree at hand that every shared tensor comes from exactly one leaf and that the shapes agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..components import (
    Attention,
    Block,
    Component,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    differences,
)
from ..errors import CannotExpress, ConfigError
from .config import COMMON_IRRELEVANT, COMMON_REFUSED, QUANTISED, ConfigReader, quantisation
from .layout import IDENTITY, Layout, Shape, concatenate

__all__ = ["Architecture", "BoundLeaf", "Leaf", "Stacked", "bind", "qkv"]


@dataclass(frozen=True)
class Leaf:
    """One checkpoint tensor: its name template and the shared names it holds, `{layer}` the block's index, `{expert}`
    an expert's.

    `when` narrows it to the blocks it is for, where a family names one thing differently in its variants.
    """

    checkpoint: str
    shared: tuple[str, ...] | str
    layout: Layout = IDENTITY
    when: Callable[[Block], bool] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shared,) if isinstance(self.shared, str) else self.shared


def qkv(suffix: str) -> tuple[str, str, str]:
    """The shared names of one block's q, k and v `suffix` ("weight" or "bias")."""
    base = "blocks.{layer}.attention."
    return f"{base}q_proj.{suffix}", f"{base}k_proj.{suffix}", f"{base}v_proj.{suffix}"


@dataclass(frozen=True)
class BoundLeaf:
    """A leaf for one tree: names without templates, shapes, and the sizes its layout runs with."""

    checkpoint: str
    shape: Shape
    shared: tuple[str, ...]
    shared_shapes: tuple[Shape, ...]
    layout: Layout
    sizes: Mapping[str, int]

    def to_shared(self, tensor: Any) -> list[Any]:
        """The checkpoint's tensor -> the shared tensors, in the order of `shared`."""
        return self.layout.forward(tensor, self.sizes)

    def to_checkpoint(self, tensors: Sequence[Any]) -> Any:
        """The shared tensors, in the order of `shared` -> the checkpoint's tensor."""
        return self.layout.inverse(tensors, self.sizes)


@dataclass(frozen=True)
class Stacked:
    """A parameter of transformers' own modules that is several tensors in its checkpoints, or has another name there.

    parameter: its name template; checkpoint: the name templates of its parts, one behind the other along the first
    dimension. Where they name an `{expert}`, the experts' are stacked along a new first dimension. Source:
    transformers conversion_mapping.py.
    """

    parameter: str
    checkpoint: tuple[str, ...]

    def bound(self, spec: ModelSpec) -> Iterator[tuple[str, list[list[str]]]]:
        """Of each layer that has experts: the parameter, and the names of its parts, those of an expert together."""
        for layer, block in enumerate(spec.blocks):
            if isinstance(block.feed_forward, MixtureOfExperts):
                experts = range(block.feed_forward.experts if self.of_experts else 1)
                names = [[each.format(layer=layer, expert=expert) for each in self.checkpoint] for expert in experts]
                yield self.parameter.format(layer=layer), names

    @property
    def of_experts(self) -> bool:
        """Whether experts are stacked."""
        return "{expert}" in self.checkpoint[0]

    def gather(self, names: Sequence[Sequence[str]], read: Callable[[str], Any]) -> Any:
        """The parameter, of the checkpoint tensors that `read` gives."""
        parts = [concatenate([read(name) for name in each], 0) for each in names]
        return concatenate([part[None] for part in parts], 0) if self.of_experts else parts[0]


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Config fields that are about the vocabulary, and true of it whatever family the weights are written for."""


@dataclass(frozen=True)
class Architecture:
    """A family of checkpoints.

    name: gptkit's name for it, and the `model_type` that is written.
    model_types: every `model_type` read as this family.
    hf_class: the transformers class written to `architectures`; hf_config its config class, for the proofs.
    read, write: config.json -> tree, and the tree -> the config.json fields that describe it. `write` may assume
        that the tree is of this family: `config_for` reads the result back and refuses where it differs.
    leaves: see Leaf.
    foreign_fields: spellings in `config_aliases` that transformers itself ignores, so that it must not be handed them.
    head: the checkpoint name of the output matrix, which tied models may store a second time.
    prefix: a name prefix that older files lack.
    aliases: (old name template, name template) pairs of older files.
    dropped: name templates of buffers that hold no weights.
    stacked: what transformers' modules hold otherwise than their checkpoints.
    token_ids: what transformers' config class takes for `TOKEN_IDS` that config.json does not state, None where absent.
    reference: transformers' attention paths that compute this family rightly, all unless `reference_quirk` says why.
    irrelevant, refused: config fields beside the common ones; see ConfigReader.
    """

    name: str
    model_types: tuple[str, ...]
    hf_class: str
    hf_config: str
    read: Callable[[ConfigReader], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    leaves: tuple[Leaf, ...]
    config_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    foreign_fields: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    stacked: tuple[Stacked, ...] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    reference: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ("sdpa", "eager")
    reference_quirk: str = ""

    # --- config.json <-> tree ---

    def reader(self, config: Mapping[str, Any]) -> ConfigReader:
        """A reader that knows this family's other spellings."""
        return ConfigReader(config, self.config_aliases)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The tree of a config.json.

        Raises:
            ConfigError: a field of the wrong type or range, or one that is refused.

        """
        return self.spec_and_unknown(config)[0]

    def spec_and_unknown(self, config: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
        """The tree, and the config's fields that neither it nor transformers knows."""
        reader = self.reader(config)
        reader.refuse({**COMMON_REFUSED, **self.refused})
        spec = self.read(reader)
        reader.refuse_other_windows([block.attention.window for block in spec.blocks])
        return spec, reader.unknown({**COMMON_IRRELEVANT, **self.irrelevant})

    def assumed(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Sizes that the config does not state and transformers has a default for; raises as `spec`."""
        reader = self.reader(config)
        self.read(reader)
        return reader.assumed

    def config_for(self, spec: ModelSpec) -> dict[str, Any]:
        """A config.json for the tree.

        Raises:
            CannotExpress: this family has no config for the tree; the components in the way are listed.

        """
        try:
            config = {"model_type": self.name, "architectures": [self.hf_class], **self.write(spec)}
            back = self.spec(config)
        except KeyError as error:
            raise CannotExpress(f"{self.name} cannot express this tree: it has no name for {error}") from error
        except (AttributeError, TypeError, ConfigError) as error:
            # `write` met a component that this family does not have at all (no rotary to ask for its base, say), or
            # wrote a config that the family refuses (heads that do not share out its hidden size).
            raise CannotExpress(f"{self.name} cannot express this tree: {unwritable(error)}") from error
        found = differences(spec, back)
        if found:
            lines = [f"  {path}: {short(a)}; {self.name} has {short(b)}" for path, a, b in collapse(found)]
            raise CannotExpress(
                f"{self.name} cannot express {len(lines)} of the tree's components:\n" + "\n".join(lines[:12]),
                "gptkit's own format holds any tree: convert --to local",
            )
        return config

    def export_config(self, spec: ModelSpec, original: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The config.json to write for a tree that came with `original`; None where `original` says it all as it is.

        Fields of `original` that do not describe the tree (token ids, labels) are kept.

        Raises:
            CannotExpress: as `config_for`.

        """
        config = self.config_for(spec)
        if original is None or original.get("model_type") not in self.model_types:
            return config
        reader = self.reader(original)
        same = not differences(spec, self.read(reader))
        readable = original.get("model_type") == self.name and not any(f in original for f in self.foreign_fields)
        readable = readable and quantisation(original) is None  # what is written never is
        if same and readable:
            return None
        left = {*reader.used, "auto_map", *QUANTISED}
        kept = {key: value for key, value in original.items() if key not in left}
        return {**kept, **config}

    # --- checkpoint names <-> shared names ---

    def parameters(self, spec: ModelSpec) -> dict[str, tuple[Stacked, list[list[str]]]]:
        """The parameters of transformers' modules that are no tensors of their own in a checkpoint: see `Stacked`."""
        return {name: (each, parts) for each in self.stacked for name, parts in each.bound(spec)}

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The weight map of a tree, in the order of its leaves.

        Raises:
            CannotExpress: a shared tensor has no leaf here.

        """
        return bind(self.name, self.leaves, spec)

    def canonical_name(self, name: str, known: Mapping[str, Any], layers: int) -> str | None:
        """The declared name of a tensor found in a file: itself, without the prefix, or under an old name.

        None for a dropped buffer. A name that is not known comes back as it is.
        """
        candidates = [name, self.prefix + name] if self.prefix else [name]
        for candidate in candidates:
            if candidate in known or candidate == self.head:
                return candidate
        # Nine digits at most: int() itself refuses very long ones.
        layer = next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)
        if layer is not None and int(layer) >= layers:
            return name
        for candidate in candidates:
            for old, new in self.aliases:
                if old.format(layer=layer) == candidate:
                    return new.format(layer=layer)
            if any(template.format(layer=layer) == candidate for template in self.dropped):
                return None
        return name


def bind(owner: str, leaves: Sequence[Leaf], spec: ModelSpec) -> list[BoundLeaf]:
    """The weight map of a tree by these declarations, in their order; `owner` names them in errors.

    That is the order of transformers' modules, which decides how it deals tensors out over shards.

    Raises:
        CannotExpress: a shared tensor has no leaf here, or its shape does not fit the leaf's layout.

    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    bound = list(_bound(owner, leaves, spec, shapes))
    covered = [name for leaf in bound for name in leaf.shared]
    missing = [name for name in shapes if name not in set(covered)]
    if missing:
        raise CannotExpress(
            f"{owner} checkpoints have no name for {len(missing)} tensors: {', '.join(missing[:8])}",
            "gptkit's own format holds any tree: convert --to local",
        )
    if len(covered) != len(shapes):
        twice = sorted({name for name in covered if covered.count(name) > 1})
        raise AssertionError(f"{owner}: declared twice: {twice[:8]}")
    return bound


def _bound(owner: str, leaves: Sequence[Leaf], spec: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[BoundLeaf]:
    ends = {"hidden": spec.hidden_size}
    per_block = [leaf for leaf in leaves if "{layer}" in leaf.checkpoint]
    first = leaves.index(per_block[0]) if per_block else len(leaves)
    for leaf in leaves[:first]:
        yield from _bind_one(owner, leaf, {}, shapes, ends)
    for layer, block in enumerate(spec.blocks):
        sizes = {"hidden": spec.hidden_size, **_sizes(block.attention), "two": 2}
        sizes["intermediate"] = block.feed_forward.intermediate_size
        experts = block.feed_forward.experts if isinstance(block.feed_forward, MixtureOfExperts) else 0
        for leaf in per_block:
            if leaf.when is None or leaf.when(block):
                for expert in range(experts if "{expert}" in leaf.checkpoint else 1):
                    yield from _bind_one(owner, leaf, {"layer": layer, "expert": expert}, shapes, sizes)
    for leaf in leaves[first:]:
        if leaf not in per_block:
            yield from _bind_one(owner, leaf, {}, shapes, ends)


def _sizes(attention: Attention | LatentAttention) -> dict[str, int]:
    """The axes of layouts that an attention has."""
    if isinstance(attention, LatentAttention):
        return {"heads": attention.heads}
    return {
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "group": attention.group,
        "head_dim": attention.head_dim,
        "half": attention.head_dim // 2,
    }


def _bind_one(
    owner: str, leaf: Leaf, place: Mapping[str, int], shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> Iterator[BoundLeaf]:
    names = tuple(name.format(**place) for name in leaf.names)
    if not all(name in shapes for name in names):
        return
    own, name = tuple(shapes[name] for name in names), leaf.checkpoint.format(**place)
    try:
        fits = leaf.layout.is_identity or tuple(leaf.layout.shared_shapes(sizes)) == own
    except KeyError:  # an axis that this block's attention does not have
        fits = False
    if not fits:
        raise CannotExpress(
            f"{owner}: {name} cannot hold tensors of shapes {own}",
            "gptkit's own format holds any tree: convert --to local",
        )
    yield BoundLeaf(name, leaf.layout.checkpoint_shape(sizes, own), names, own, leaf.layout, sizes)


def require_kinds(owner: str, spec: ModelSpec, *kinds: type[Component]) -> None:
    """Let every attention and feed-forward be of these kinds.

    Raises:
        CannotExpress: one is another; the components in the way are listed.

    """
    names = ("attention", "feed_forward")
    nodes = [(f"blocks.{layer}.{n}", getattr(b, n), None) for layer, b in enumerate(spec.blocks) for n in names]
    found = collapse([each for each in nodes if not isinstance(each[1], kinds)])
    wrong = [f"  {path}: {short(node)}" for path, node, _ in found]
    if wrong:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise CannotExpress(
            f"{owner} cannot express {len(wrong)} of the tree's components, it has {known}:\n" + "\n".join(wrong[:12]),
            "gptkit's own format holds any tree: convert --to local",
        )


def usual_layer(spec: ModelSpec) -> tuple[Block, Attention, FeedForward | GatedFeedForward]:
    """The first layer, for a `write`: with its attention and feed-forward, of the kinds that most families have.

    Raises:
        TypeError: they are of others, which `config_for` makes a refusal of.

    """
    first = spec.blocks[0]
    if not isinstance(first.attention, Attention):
        raise TypeError(f"it has no {type(first.attention).__name__}")
    if isinstance(first.feed_forward, MixtureOfExperts):
        raise TypeError(f"it has no {type(first.feed_forward).__name__}")
    return first, first.attention, first.feed_forward


def unwritable(error: Exception) -> str:
    """Why a family's `write` failed on a tree: the component that it knows nothing of, or what it said."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Component):
        return f"it has no {type(error.obj).__name__} (asked for its {error.name})"
    return str(error)


def collapse(found: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """The same difference in every layer, told once: blocks.0.x … blocks.11.x -> blocks.*.x."""
    told: dict[tuple[str, str, str], tuple[str, Any, Any]] = {}
    for path, a, b in found:
        parts = path.split(".")
        if parts[0] == "blocks" and len(parts) > 1:
            parts[1] = "*"
        told.setdefault((".".join(parts), repr(a), repr(b)), (".".join(parts), a, b))
    return list(told.values())


def short(value: Any) -> str:
    """A component or field value in a few words."""
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__
    text = json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
