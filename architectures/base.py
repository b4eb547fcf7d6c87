"""What an architecture file declares, and the one walk that turns the declaration into a weight map for a tree.

An `Architecture` says how a family's config.json becomes a ModelSpec and back, and lists its `leaves`: every tensor
the family's checkpoints may hold, each with the shared tensors it stands for and the layout between them. A leaf is
in use where its shared tensors exist in the tree, so optional biases and norms need no code. `bind` proves for the
tree at hand that every shared tensor comes from exactly one leaf and that the shapes agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from random import Random
from typing import Any, Literal

from msgspec import structs

from ..components import Attention, Block, CrossAttention, FeedForward, GatedFeedForward, ModelSpec, differences
from ..errors import CannotExpress
from .config import COMMON_IRRELEVANT, COMMON_REFUSED, QUANTISED, ConfigReader, quantisation
from .draws import VOCAB, Config
from .layout import IDENTITY, Layout, Shape, concatenate
from .obstacles import OWN_FORMAT, Kinds, express, of_kind


@dataclass(frozen=True)
class Leaf:
    """One tensor of a checkpoint, and the shared tensors that it holds. It is used if the tree has those."""

    checkpoint: str
    """The template of its name: `{layer}` is the index of a block, `{expert}` of an expert, `{head}` of a head. A leaf
    with `{use}` belongs to a layer that runs a shared block: `{layer}` is then the layer that stores the block's
    weights, and `{use}` counts the earlier layers that run any."""
    shared: tuple[str, ...] | str
    """The templates of the shared names. If the tensor holds all experts, only these have `{expert}`. `{layer}` is the
    layer that runs the block."""
    layout: Layout = IDENTITY
    """How the shared tensors are arranged in the tensor; `Layout.each` names the axis of experts."""
    when: Callable[[Block], bool] | None = None
    """Returns whether a block has this leaf, if variants of a family name one thing differently. None: every block."""
    buffer: bool = False
    """Whether transformers' module stores the tensor as a buffer, which is not counted as a parameter."""
    beside: str = ""
    """A shared tensor that the tree must have for this leaf."""
    unless: str = ""
    """A shared tensor that the tree must not have for this leaf."""
    value: int = 0
    """Which of the values that transformers' module returns is the component's result."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shared,) if isinstance(self.shared, str) else self.shared


def leaves_of(modules: Mapping[str, str], when: Callable[[Block], bool] | None = None) -> tuple[Leaf, ...]:
    """The leaves of modules that checkpoints have as they are: the module's name there -> the shared module's. Each has
    its weight and its bias, where the tree has them.
    """
    suffixes = ("weight", "bias")
    return tuple(Leaf(f"{a}.{each}", f"{b}.{each}", when=when) for a, b in modules.items() for each in suffixes)


def by_name(leaves: Iterable[Leaf], stacked: Sequence[Stacked] = ()) -> tuple[Leaf, ...]:
    """Leaves in the order in which transformers writes models whose modules hold several tensors in one: by the name of
    the module's parameter, a tensor of all experts before the next.
    """
    held = {name: each.parameter for each in stacked for name in each.checkpoint}
    return tuple(sorted(leaves, key=lambda leaf: held.get(leaf.checkpoint, leaf.checkpoint).replace("{expert}.", "")))


def only_eager(why: str = "transformers has no sdpa path for this family") -> dict[str, Any]:
    """Return the fields of an `Architecture` for which transformers' eager path alone computes as it should."""
    return {"reference": lambda _: ("eager",), "reference_quirk": why}


def qkv(suffix: str) -> tuple[str, str, str]:
    """Return the shared names of the "weight" or "bias" of a block's q, k and v."""
    base = "blocks.{layer}.attention."
    return f"{base}q_proj.{suffix}", f"{base}k_proj.{suffix}", f"{base}v_proj.{suffix}"


@dataclass(frozen=True)
class BoundLeaf:
    """A leaf for one tree: with names instead of templates, shapes, and the sizes of its layout."""

    checkpoint: str
    shape: Shape
    shared: tuple[str, ...]
    shared_shapes: tuple[Shape, ...]
    layout: Layout
    sizes: Mapping[str, int]
    buffer: bool = False
    module: str = ""
    """The name of the parameter of transformers' modules that computes with it, if that is another layer's."""
    value: int = 0

    def to_shared(self, tensor: Any) -> list[Any]:
        """Split the checkpoint's tensor into the shared tensors, in the order of `shared`."""
        return self.layout.forward(tensor, self.sizes)

    def to_checkpoint(self, tensors: Sequence[Any]) -> Any:
        """Join the shared tensors, in the order of `shared`, into the checkpoint's tensor."""
        return self.layout.inverse(tensors, self.sizes)

    @property
    def stacked(self) -> bool:
        """Whether the tensor holds a matrix of each expert, one after the other along its first dimension."""
        return self.layout.each is not None and len(self.shape) == 3

    def of_expert(self, expert: int) -> BoundLeaf:
        """Return the matrix of one expert of a `stacked` tensor as a leaf of its own."""
        own = slice(expert * len(self.layout.parts), (expert + 1) * len(self.layout.parts))
        return replace(
            self,
            checkpoint=f"{self.checkpoint}[{expert}]",
            shape=self.shape[1:],
            shared=self.shared[own],
            shared_shapes=self.shared_shapes[own],
            layout=self.layout.of_one(),
        )


@dataclass(frozen=True)
class Stacked:
    """A parameter of transformers' modules that is several tensors in checkpoints, or has another name there.

    Source: transformers conversion_mapping.py.
    """

    parameter: str
    """The template of its name."""
    checkpoint: tuple[str, ...]
    """The templates of the names of its parts, which follow one another along the first dimension. If they name an
    `{expert}`, the parts of all experts are stacked along a new first dimension."""

    def bound(self, spec: ModelSpec) -> Iterator[tuple[str, list[list[str]]]]:
        """Of each layer that has experts, or of all: the parameter, and its parts' names, an expert's together."""
        for layer, block in enumerate(spec.blocks):
            count = getattr(block.mixer("feed_forward"), "experts", None) if self.of_experts else 1
            if count is not None:
                experts = range(count)
                names = [[each.format(layer=layer, expert=expert) for each in self.checkpoint] for expert in experts]
                yield self.parameter.format(layer=layer), names

    @property
    def of_experts(self) -> bool:
        """Return whether the parameter holds all experts, stacked along its first dimension."""
        return "{expert}" in self.checkpoint[0]

    def leaf(self, name: str, parts: Sequence[Sequence[BoundLeaf]]) -> BoundLeaf:
        """Return the parameter as a leaf. `parts` are the leaves of its parts, grouped as the names in `bound`."""
        if not self.of_experts:
            return replace(parts[0][0], checkpoint=name)
        (rows, columns), count = parts[0][0].shape, len(parts[0])
        layout = Layout("experts (part rows) columns", split="part", parts=("1",) * count, each="experts")
        sizes = {"experts": len(parts), "rows": rows, "columns": columns}
        leaves = [leaf for each in parts for leaf in each]
        shared, shapes = (tuple(x for leaf in leaves for x in getattr(leaf, of)) for of in ("shared", "shared_shapes"))
        return BoundLeaf(name, (len(parts), count * rows, columns), shared, shapes, layout, sizes)

    def gather(self, names: Sequence[Sequence[str]], read: Callable[[str], Any]) -> Any:
        """Return the parameter, made of the checkpoint tensors that `read` returns."""
        parts = [concatenate([read(name) for name in each], 0) for each in names]
        return concatenate([part[None] for part in parts], 0) if self.of_experts else parts[0]


CARRIED = {
    "mtp": "draft tokens (multi-token prediction)",
    "vision": "read images",
    "audio": "read sound",
    "unused": "no layer uses",
    "tasks": "belong to heads for other tasks",
    "scales": "scale quantised weights",
}
"""Groups of tensors that are carried along and not computed, and what they do, in words."""
_SCALES = re.compile(r"\.(weight_scale(_inv)?|input_scale|[kv]_scale)$")
"""Names of what transformers' fp8 quantizers have beside weights that keep their name and shape."""
OUTSIDE = ("vision", "audio")
"""Those that make a model composite: no class of the language model alone has a place for them."""

_OTHER_HEADS = re.compile(
    r"Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|Regression|Reward|Score|ValueHead|DoubleHeads"
)
"""What names of transformers' classes have in them that end in another head than a language model's."""
_NO_HEAD = re.compile(r"\w+(?<!LMHead)(?<!DoubleHeads)Model")
"""What transformers' classes without a head are called."""

BEHIND = {"mtp": ("model.layers.{behind}.",)}
"""How names begin where a layer behind the last drafts tokens: `carried` of most families that have such."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Config fields that are about the vocabulary, and true of it whatever family the weights are written for."""


def _not_drawn(_chosen: Random) -> Config:
    raise NotImplementedError("this family has no draw")


@dataclass(frozen=True)
class Architecture:
    """A family of checkpoints."""

    name: str
    """gptkit's name of the family, and the `model_type` that gptkit writes."""
    model_types: tuple[str, ...]
    """Every `model_type` that is read as this family."""
    hf_class: str
    """The transformers class that gptkit writes to `architectures`."""
    hf_config: str
    """transformers' config class."""
    kinds: Kinds
    """The components that the family's trees may have, besides the embedding, blocks and head that every tree has."""
    read: Callable[[ConfigReader], ModelSpec]
    """Reads the tree of a config.json."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """Returns the config fields of a tree. It may assume that the tree has only components of `kinds`: `config_for`
    reads the result back and refuses another tree. `of_kind` raises for a component of the wrong kind."""
    leaves: tuple[Leaf, ...]
    """Every tensor that the family's checkpoints may have."""
    draw: Callable[[Random], Config] = _not_drawn
    """Returns a random legal config, without `model_type`. See `drawn`. A plugin may do without."""
    released: str = ""
    """The month or year of the first published weights ("2023-02"). Of several families for a tree, the oldest
    counts."""
    base_class: str = ""
    """The transformers class of trees without a head, whose tensor names in files lack `prefix`. Empty: there is
    none."""
    optional: tuple[str, ...] = ()
    """Parts of a tree that config.json does not mention and files may lack."""
    own_head: Callable[[ModelSpec], bool] = lambda spec: False
    """Returns whether files of a tree may hold a head of their own although config.json says that it is tied."""
    config_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other spellings of config fields."""
    foreign_fields: tuple[str, ...] = ()
    """Spellings in `config_aliases` that transformers ignores. gptkit does not pass them on to transformers."""
    head: str = "lm_head.weight"
    """The checkpoint name of the output matrix. Tied models may store it a second time."""
    prefix: str = ""
    """The beginning of tensor names that older files lack."""
    part: str = ""
    """The field of composite configs that holds the language model's config ("text_config"). `irrelevant` and `refused`
    account for the fields next to it."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of beginnings of names: in files of composite models, and here."""
    modules: tuple[str, str] = ("", "")
    """How names begin in files and in transformers' modules, where these differ."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of name templates: in older files, and here."""
    dropped: tuple[str, ...] = ()
    """Name templates of buffers in files that hold no weights."""
    unwritten: Callable[[ModelSpec], int] = lambda spec: 0
    """Returns how many numbers of a tree are parameters of transformers' modules but in no file."""
    repeated: Mapping[str, str] = field(default_factory=dict)
    """Parameters of transformers' modules that are the same as another one, with its checkpoint name. Files that hold
    them must hold equal values, since transformers would otherwise untie them."""
    made: Mapping[str, Callable[[ModelSpec], Any]] = field(default_factory=dict)
    """Tensors that transformers computes from the config, but takes from files that hold them: functions that return
    their values, numpy arrays, for a tree."""
    lent: str = ""
    """How names of shared blocks begin. transformers has a module in each layer that runs such a block, and checkpoints
    have the parameters of the first one."""
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """How names of tensors begin that have no place in a tree and that conversions carry along, by a group of
    `CARRIED`. `{layer}` is the number of a layer, `{behind}` that of the layer after the last one."""
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Model types of language models within composite ones that compute as this family if all tokens are text, with
    the defaults of their config class that differ from this family's."""
    stacked: tuple[Stacked, ...] = ()
    """Parameters that transformers' modules hold in another form than checkpoints."""
    token_ids: Mapping[str, int | list[int]] = field(default_factory=dict)
    """The config class's defaults for `TOKEN_IDS`; a missing one is None."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Config fields without which there is no tree, with their usual values."""
    irrelevant: Mapping[str, str | None] = field(default_factory=dict)
    """Config fields that change nothing, with the reason, besides the common ones. None: this family reads a field that
    is commonly irrelevant."""
    refused: Mapping[str, tuple[tuple[Any, ...], str] | None] = field(default_factory=dict)
    """Config fields whose harmless values are listed, with the reason for refusing others. "inner.name" is the field
    `name` of the object `inner`. None: this family accepts a field that is commonly refused."""
    reference: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ("sdpa", "eager")
    """Returns transformers' attention paths that compute a tree correctly: all, unless `reference_quirk` says why."""
    reference_quirk: str = ""
    """Why `reference` leaves out a path."""
    apart: tuple[Literal["padding", "steps"], ...] = ()
    """What transformers' class computes wrongly for batches, which gptkit then does not compare: "padding" before some
    texts, which it reads as tokens, or "steps" of one token per text."""
    bounded: bool = False
    """Whether transformers' class accepts at most as many tokens as the context, although the tree would accept
    more."""
    rescaled: Callable[[ModelSpec], Mapping[str, float]] = lambda spec: {}
    """Returns the tensors of a tree that transformers' class multiplies before it computes, with the factors."""
    prepare: Callable[[Any], None] = lambda model: None
    """Prepares transformers' model before each comparison: does now what it does to its own weights later, and makes
    its modules forget earlier passes. It may be called again."""
    model: str = ""
    """The function that makes the reference model if transformers has no class for it ("package.module:function"). It
    takes a config.json and an attention path, and returns a torch module. The module's parameters have checkpoint
    names, and each is used only by the module that has it. `forward` takes `input_ids` and `attention_mask`, and its
    result has `logits`."""

    # --- config.json <-> tree ---

    @property
    def refusals(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """Return the config fields that the family refuses, with their harmless values and the reason."""
        return {name: each for name, each in {**COMMON_REFUSED, **self.refused}.items() if each is not None}

    @property
    def ignored(self) -> dict[str, str]:
        """Return the config fields that change nothing in this family, each with the reason."""
        found = {**COMMON_IRRELEVANT, **self.irrelevant}
        return {name: reason for name, reason in found.items() if reason is not None}

    def reader(self, config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the language model's fields that knows this family's other spellings."""
        return ConfigReader(config, self.config_aliases).part(self.part)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The tree of a config.json.

        Raises:
            ConfigError: a field of the wrong type or range, or one that is refused.
        """
        return self.spec_and_unknown(config)[0]

    def spec_and_unknown(self, config: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
        """Return the tree, and the config fields that neither gptkit nor transformers knows."""
        reader = self.reader(config)
        whole = reader.outer or reader
        for each in dict.fromkeys((whole, reader)):
            each.refuse(self.refusals)
        spec = self.read(reader)
        reader.refuse_other_windows([_kind(block.mixer("attention")) for block in spec.blocks])
        return spec, whole.unknown(self.ignored)

    def drawn(self, seed: int) -> Config:
        """Return a small random config that transformers accepts, always the same one for a seed."""
        outside = {
            name: 0 for name, ids in self.token_ids.items() if max([ids] if isinstance(ids, int) else ids) >= VOCAB
        }
        chosen = Random(f"{self.name} {seed}")  # noqa: S311, for tests
        return {"model_type": self.name, "vocab_size": VOCAB, **outside, **self.draw(chosen)}

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
        found = express(self, spec, clear=())
        if found.found is None:
            raise found.refusal()
        return self._config(spec)

    def _config(self, spec: ModelSpec) -> dict[str, Any]:
        # transformers builds no model whose padding, if only by its class' default, is beyond the vocabulary.
        name = "pad_token_id"
        pad = self.token_ids.get(name)
        beyond = {name: None} if isinstance(pad, int) and pad >= spec.vocab_size else {}
        return {"model_type": self.name, "architectures": [self.class_of(spec)], **beyond, **self.write(spec)}

    def class_of(self, spec: ModelSpec) -> str:
        """Return the transformers class that computes a tree."""
        return self.hf_class if spec.head is not None or not self.base_class else self.base_class

    def other_class(self, config: Mapping[str, Any] | None) -> str | None:
        """Return the class that config.json names where it has no head, or another one than a language model's; None
        where it has what every tree of this family has.
        """
        named = (config or {}).get("architectures")
        name = named[0] if isinstance(named, list) and named else None
        if self.base_class or not isinstance(name, str) or not name.isidentifier() or len(name) > 80:
            return None
        return name if name != self.hf_class and (_OTHER_HEADS.search(name) or _NO_HEAD.fullmatch(name)) else None

    def back(self, spec: ModelSpec) -> ModelSpec:
        """The tree that config.json would be read as where this one was written; see `obstacles.Target`."""
        return self._as_far(self.spec(self._config(spec)), spec)

    def _as_far(self, told: ModelSpec, spec: ModelSpec) -> ModelSpec:
        """The tree that a config tells of, without what files may lack and `spec` does."""
        lacking = {name: None for name in self.optional if getattr(spec, name) is None}
        told = structs.replace(told, **lacking) if lacking else told
        return told if spec.tied or not self.own_head(told) else _with_own_head(told)

    def in_files(self, spec: ModelSpec, names: Iterable[str]) -> ModelSpec:
        """The tree that a config tells of, without the `optional` parts of which files with tensors of these names have
        nothing, and with the head that they have (`own_head`).
        """
        there = {each for name in names for each in self.spellings(name)} if self.optional else {*names}
        if self.head in there and self.own_head(spec):
            spec = _with_own_head(spec)
        lacking: dict[str, None] = {}
        for part in self.optional:
            own = [leaf.checkpoint for leaf in self.leaves if leaf.names[0].startswith(f"{part}.")]
            lacking |= {part: None} if there.isdisjoint(own) else {}
        return structs.replace(spec, **lacking) if lacking else spec

    @property
    def owner(self) -> str:
        return self.name

    def takes(self, spec: ModelSpec) -> int | None:
        """Return the most tokens that transformers' class takes of a tree that would take more; None for any number."""
        return spec.context_length if self.bounded else None

    def module(self, name: str) -> str:
        """Return what a module or parameter is called in transformers, by its name in files."""
        in_files, built = self.modules
        return built + name.removeprefix(in_files) if name.startswith(in_files) else name

    @property
    def two_stacks(self) -> bool:
        """Whether its trees have an encoder beside the decoder."""
        return CrossAttention in self.kinds

    @cached_property
    def usual(self) -> ModelSpec:
        """Return the tree of a config.json that has only the fields that every file states."""
        return self.spec({"model_type": self.name, **self.stated})

    def export_config(
        self,
        spec: ModelSpec,
        original: Mapping[str, Any] | None,
        whole: bool = False,
        quantised: bool = False,
        standard: bool = False,
    ) -> dict[str, Any] | None:
        """Return the config.json to write for a tree that came with `original`, or None to keep `original` unchanged.

        Fields of `original` that do not describe the tree (token ids, labels) are kept.

        Args:
            spec: the tree.
            original: the config.json that the tree was read from.
            whole: the tensors of a composite model beside the language model are written too, so that the config has
                to describe both.
            quantised: the weights are written as they were stored, with their scales.
            standard: transformers' class of this family must be able to read the config, so that an original with
                another model_type of the family, or with field names that transformers ignores, is rewritten.

        Raises:
            CannotExpress: as `config_for`.
        """
        config = self.config_for(spec)
        if original is None or original.get("model_type") not in self.model_types:
            return config
        reader = self.reader(original)
        same = not differences(spec, self._as_far(self.read(reader), spec))
        whole = whole and reader.outer is not None
        other = original.get("model_type") != self.name or any(name in original for name in self.foreign_fields)
        composite = reader.outer is not None and not whole
        dequantised = not quantised and quantisation(original) is not None
        if same and not (composite or dequantised or (standard and other and not whole)):
            return None
        left = {*reader.used, *(f"{reader.place}{name}" for name in ("auto_map", *(() if quantised else QUANTISED)))}
        kept = {key: value for key, value in reader.data.items() if reader.place + key not in left}
        if whole:
            config.pop("architectures")
            return {**original, self.part: {**kept, **config}}
        return {**kept, **config, **{key: original[key] for key in TOKEN_IDS if key in original}}

    # --- checkpoint names <-> shared names ---

    def parameters(self, spec: ModelSpec) -> dict[str, tuple[Stacked, list[list[str]]]]:
        """The parameters of transformers' modules that are no tensors of their own in a checkpoint: see `Stacked`."""
        return {name: (each, parts) for each in self.stacked for name, parts in each.bound(spec)}

    def borrowed(self, spec: ModelSpec) -> dict[str, str]:
        """Of a tree's shared blocks the parameters of transformers' modules that are those of the layer that stores
        them, under whose names files have them.
        """
        found: dict[str, str] = {}
        for layer, places in _uses(spec).items() if self.lent else ():
            own = self.lent.format(layer=layer)
            names = [leaf.checkpoint for leaf in self.bind(spec) if leaf.checkpoint.startswith(own)]
            others = [self.lent.format(layer=each["runs"]) for each in places[1:]]
            found |= {name.replace(own, other, 1): name for name in names for other in others}
        return found

    def repeats(self, spec: ModelSpec) -> dict[str, str]:
        """Return all parameters of transformers' modules that are the same as another parameter."""
        own = {leaf.checkpoint for leaf in self.bind(spec)} if self.repeated else set()
        repeated = {name: other for name, other in self.repeated.items() if name not in own}
        return {**repeated, **self.borrowed(spec)}

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The weight map of a tree, in the order of its leaves.

        Raises:
            CannotExpress: a shared tensor has no leaf here.
        """
        bound = bind(self.name, self.leaves, spec)
        if self.base_class and spec.head is None:
            return [replace(leaf, checkpoint=leaf.checkpoint.removeprefix(self.prefix)) for leaf in bound]
        return bound

    def bind_files(self, spec: ModelSpec, names: Iterable[str]) -> list[BoundLeaf]:
        """Return the weight map of files that have tensors of these names."""
        found = {each for name in names for each in self.spellings(name)} if self.stacked else set()
        return self.bind(spec) if found.isdisjoint(self.parameters(spec)) else self.bind_modules(spec)

    def bind_modules(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The weight map where files hold what transformers' modules do (`stacked`), as transformers reads them too."""
        leaves = {leaf.checkpoint: leaf for leaf in self.bind(spec)}
        made = self._of_modules(spec, leaves)
        parts = {part for name in made for group in self.parameters(spec)[name][1] for part in group}
        return [leaf for name, leaf in leaves.items() if name not in parts] + list(made.values())

    def bind_all(self, spec: ModelSpec) -> dict[str, BoundLeaf]:
        """Return the weight map under the names of checkpoints and under those of transformers' modules together."""
        leaves = {leaf.checkpoint: leaf for leaf in self.bind(spec)}
        return {**leaves, **self._of_modules(spec, leaves)}

    def _of_modules(self, spec: ModelSpec, leaves: Mapping[str, BoundLeaf]) -> dict[str, BoundLeaf]:
        """Return as leaves the parameters of transformers' modules that are no tensors of their own in a checkpoint."""
        found: dict[str, BoundLeaf] = {}
        for name, (stacked, groups) in self.parameters(spec).items():
            own = [[leaves[part] for part in parts if part in leaves] for parts in groups]
            if own[0]:
                found[name] = stacked.leaf(name, own)
        return found

    def carries(self, name: str, layers: int) -> tuple[str, str] | None:
        """The group that a tensor is carried along with in a model of so many layers, and its name with its prefix."""
        places = {"layer": _layer(name), "behind": layers}
        for group, templates in self.carried.items():
            begins = tuple(each.format(**places) for each in templates)
            found = next((each for each in self.spellings(name) if each.startswith(begins)), None)
            if found is not None:
                return group, found
        return ("scales", name) if _SCALES.search(name) else None

    def as_composite(self, name: str, headers: Iterable[str]) -> str:
        """A tensor's name as the composite model has it whose files have these headers."""
        text = "".join(headers)
        pairs = ((theirs, ours) for theirs, ours in self.renamed if name.startswith(ours) and f'"{theirs}' in text)
        theirs, ours = next(pairs, ("", ""))
        return theirs + name.removeprefix(ours)

    def spellings(self, name: str) -> list[str]:
        """What a tensor in a file may be called here."""
        found = [name, self.prefix + name] if self.prefix else [name]
        found += [name.removeprefix(self.prefix)] if self.base_class else []
        return found + [ours + name.removeprefix(theirs) for theirs, ours in self.renamed if name.startswith(theirs)]

    def canonical_name(self, name: str, known: Mapping[str, Any], layers: int) -> str | None:
        """The declared name of a tensor found in a file: itself, without the prefix, or under an old name.

        None for a dropped buffer. A name that is not known comes back as it is.
        """
        candidates = self.spellings(name)
        for candidate in candidates:
            if candidate in known or candidate == self.head:
                return candidate
        layer = _layer(name)
        if layer is not None and int(layer) >= layers:
            return name
        for candidate in candidates:
            for old, new in self.aliases:
                if old.format(layer=layer) == candidate:
                    named = new.format(layer=layer)
                    return next((each for each in self.spellings(named) if each in known), named)
            if any(template.format(layer=layer) == candidate for template in self.dropped):
                return None
        return name


def _with_own_head(spec: ModelSpec) -> ModelSpec:
    """Return the tree with a head that is not tied."""
    return structs.replace(spec, head=structs.replace(spec.has_head(), tied=False))


def _layer(name: str) -> str | None:
    """Return the first number in a name. It has nine digits at most, since int() refuses very long ones."""
    return next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)


def _kind(attention: Any) -> str | None:
    """Return transformers' name for a layer with this attention, as in `layer_types`."""
    if attention is None:
        return None
    if getattr(attention, "window", None) is None:
        return "full_attention"
    return "chunked_attention" if getattr(attention, "chunked", False) else "sliding_attention"


def bind(owner: str, leaves: Sequence[Leaf], spec: ModelSpec) -> list[BoundLeaf]:
    """The weight map of a tree by these declarations, in their order; `owner` names them in errors.

    That is the order of transformers' modules, which decides how it deals tensors out over shards.

    Raises:
        CannotExpress: a shared tensor has no leaf here, or its shape does not fit the leaf's layout.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    encoded = [leaf for leaf in leaves if leaf.names[0].startswith("encoder.")]
    first = leaves.index(encoded[0]) if encoded else 0
    bound = list(_bound(owner, leaves[:first], spec, shapes))
    if spec.encoder is not None:
        bound += _bound(owner, encoded, spec.encoder, shapes)
    bound += _bound(owner, [leaf for leaf in leaves[first:] if leaf not in encoded], spec, shapes)
    covered = [name for leaf in bound for name in leaf.shared]
    found = set(covered)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise CannotExpress(
            f"{owner} checkpoints have no name for {len(missing)} tensors: {', '.join(missing[:8])}", OWN_FORMAT
        )
    if len(covered) != len(shapes):
        twice = sorted({name for name in covered if covered.count(name) > 1})
        raise AssertionError(f"{owner}: declared twice: {twice[:8]}")
    return bound


def _bound(owner: str, leaves: Sequence[Leaf], spec: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[BoundLeaf]:
    ends = {"hidden": spec.hidden_size, "vocab": spec.vocab_size}
    stem = next((leaf.checkpoint.partition("{layer}")[0] for leaf in leaves if "{layer}" in leaf.checkpoint), "")
    of_first = f"{stem}0."  # how names begin of what the first block alone has
    per_block = [leaf for leaf in leaves if "{layer}" in leaf.checkpoint or leaf.checkpoint.startswith(of_first)]
    runs = [[*run] for _, run in groupby(per_block, lambda leaf: leaf.checkpoint.partition("{use}")[0])]
    uses = _uses(spec)
    first = leaves.index(per_block[0]) if per_block else len(leaves)
    for leaf in leaves[:first]:
        yield from _bind_one(owner, leaf, {}, shapes, ends)
    for layer, block in enumerate(spec.blocks):
        sizes = _sizes(spec, block)
        for leaf, place in ((leaf, place) for run in runs for place in _places(run, layer, uses) for leaf in run):
            if "{layer}" not in leaf.checkpoint:
                yield from () if layer else _bind_one(owner, leaf, {}, shapes, ends)
            elif leaf.when is None or leaf.when(block):
                for index in range(_repeats(leaf.checkpoint, sizes)):
                    yield from _bind_one(owner, leaf, {**place, "expert": index, "head": index}, shapes, sizes)
    for leaf in leaves[first:]:
        if leaf not in per_block:
            yield from _bind_one(owner, leaf, {}, shapes, ends)


def _repeats(template: str, sizes: Mapping[str, int]) -> int:
    """Return how many tensors a name template may stand for in a layer."""
    return next((sizes.get(f"{each}s", 0) for each in ("expert", "head") if f"{{{each}}}" in template), 1)


def _uses(spec: ModelSpec) -> dict[int, list[dict[str, int]]]:
    """Of each layer that stores the weights of a shared block the places of the layers that run it (see `Leaf`)."""
    found: dict[int, list[dict[str, int]]] = {}
    for use, (layer, stored) in enumerate(spec.lenders.items()):
        found.setdefault(stored, []).append({"layer": stored, "runs": layer, "use": use})
    return found


def _places(run: Sequence[Leaf], layer: int, uses: Mapping[int, list[dict[str, int]]]) -> list[dict[str, int]]:
    """The places of a layer that leaves one behind the other are for."""
    return uses.get(layer, []) if "{use}" in run[0].checkpoint else [{"layer": layer}]


def _sizes(spec: ModelSpec, block: Block) -> dict[str, int]:
    """The axes of layouts in a block: the sizes of its mixers, by the names of their fields and `axes`; `half` is that
    of a head.
    """
    found = {"experts": 0, "one": 1, "two": 2}
    for sublayer in block.sublayers:
        for name in (*sublayer.mixer.__struct_fields__, *sublayer.mixer.axes):
            size = getattr(sublayer.mixer, name, None)
            if type(size) is int:
                found[name.removesuffix("_size")] = size
    found |= {"half": found["head_dim"] // 2} if "head_dim" in found else {}
    return found | {"hidden": spec.hidden_size}


def _bind_one(
    owner: str, leaf: Leaf, place: Mapping[str, int], shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> Iterator[BoundLeaf]:
    several = range(leaf.layout.repeats(sizes)) if leaf.layout.each else ()
    places = [{**place, "expert": index} for index in several] if leaf.layout.each else [place]
    runs = {"layer": place["runs"]} if "runs" in place else {}
    names = tuple(name.format(**{**each, **runs}) for each in places for name in leaf.names)
    if not names or not all(name in shapes for name in names):
        return
    if (leaf.beside and leaf.beside not in shapes) or leaf.unless in shapes:
        return
    own, name = tuple(shapes[name] for name in names), leaf.checkpoint.format(**place)
    try:
        fits = leaf.layout.is_identity or tuple(leaf.layout.shared_shapes(sizes)) == own
    except KeyError:  # an axis that this block's attention does not have
        fits = False
    if not fits:
        raise CannotExpress(f"{owner} checkpoints cannot store {name} with the shapes of this model: {own}", OWN_FORMAT)
    shape, module = (
        leaf.layout.checkpoint_shape(sizes, own),
        leaf.checkpoint.format(**{**place, **runs}) if runs else "",
    )
    yield BoundLeaf(name, shape, names, own, leaf.layout, sizes, leaf.buffer, module, leaf.value)


def usual_layer(spec: ModelSpec) -> tuple[Block, Attention, FeedForward | GatedFeedForward]:
    """The first layer, for a `write`: with its attention and feed-forward, of the kinds that most families have.

    Raises:
        CannotExpress: they are of others.
    """
    first = spec.blocks[0]
    return first, of_kind(first.attention, Attention), of_kind(first.feed_forward, FeedForward, GatedFeedForward)
