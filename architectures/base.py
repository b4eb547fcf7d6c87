"""The record with which a file in `families/` declares a family, and the code that assigns tensors to parameters.

An `Architecture` converts a family's config.json to a ModelSpec and back. *Shared tensors* are the parameters of a
ModelSpec, with the same names and shapes for all families. A *leaf* is an entry of the table `leaves`. It says which
shared tensors a checkpoint tensor contains, and which layout converts between them. A leaf is used if the model has
these shared tensors, so optional biases and norms need no code. `bind` checks that every shared tensor of a model comes
from exactly one leaf, and that the shapes agree.
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
from .rope import USUAL_ROTARY, RotaryKind


@dataclass(frozen=True)
class Leaf:
    """An entry of a family's table of checkpoint tensors: a tensor's name, and gptkit's parameters in this tensor.

    The entry is used for models that have these parameters.
    """

    checkpoint: str
    """The template of the tensor's name in checkpoints. `{layer}`, `{expert}` and `{head}` are indices of a layer, an
    expert and a head. If several layers run the same shared block (Zamba2), `{layer}` is the layer that stores the
    block's weights, and `{use}` is the number of earlier layers that run a shared block."""
    shared: tuple[str, ...] | str
    """The templates of the names of the parameters in the tensor. If the tensor contains all experts, only these
    templates have `{expert}`. For a shared block, `{layer}` is the layer that runs it."""
    layout: Layout = IDENTITY
    """How the parameters are arranged in the tensor. If it contains all experts, `Layout.stack` names their axis."""
    when: Callable[[Block], bool] | None = None
    """Returns whether a block has this tensor, for families in which variants give a module different names. None:
    every block has it."""
    buffer: bool = False
    """Whether transformers' module stores the tensor as a buffer, which is not counted as a parameter."""
    requires: str = ""
    """The name of a parameter, or "". The entry is used only for models that have this parameter."""
    unless: str = ""
    """The name of a parameter, or "". The entry is used only for models that do not have this parameter."""
    value: int = 0
    """The index of the component's output, if transformers' module returns a tuple."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shared,) if isinstance(self.shared, str) else self.shared


def leaves_of(modules: Mapping[str, str], when: Callable[[Block], bool] | None = None) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of modules whose weights and biases are stored unchanged.

    Args:
        modules: names of modules in checkpoints -> gptkit's names.
        when: returns whether a block has these modules; see `Leaf.when`.
    """
    suffixes = ("weight", "bias")
    return tuple(Leaf(f"{a}.{suffix}", f"{b}.{suffix}", when=when) for a, b in modules.items() for suffix in suffixes)


def by_name(leaves: Iterable[Leaf], stacked: Sequence[Stacked] = ()) -> tuple[Leaf, ...]:
    """Return the leaves, sorted by the names that their tensors have in transformers' modules.

    If a model has `stacked` parameters, transformers writes its tensors in this order. An expert's index in a name does
    not count for the order.

    Args:
        leaves: the entries of a family's tensor table.
        stacked: the parameters that have other names in transformers' modules than in checkpoints.
    """
    parameters = {name: parameter.parameter for parameter in stacked for name in parameter.checkpoint}
    return tuple(
        sorted(leaves, key=lambda leaf: parameters.get(leaf.checkpoint, leaf.checkpoint).replace("{expert}.", ""))
    )


def only_eager(why: str = "transformers has no sdpa path for this family") -> dict[str, Any]:
    """Return `Architecture` fields for a family whose eager attention in transformers is the only correct one.

    `why` is the reason.
    """
    return {"reference": lambda _: ("eager",), "reference_quirk": why}


def qkv(suffix: str) -> tuple[str, str, str]:
    """Return gptkit's names of the "weight" or "bias" of a layer's query, key and value projections, as templates."""
    base = "blocks.{layer}.attention."
    return f"{base}q_proj.{suffix}", f"{base}k_proj.{suffix}", f"{base}v_proj.{suffix}"


@dataclass(frozen=True)
class BoundLeaf:
    """A `Leaf` for one model: its templates are filled in with the names, shapes and axis sizes of this model."""

    checkpoint: str
    shape: Shape
    shared: tuple[str, ...]
    shared_shapes: tuple[Shape, ...]
    layout: Layout
    sizes: Mapping[str, int]
    buffer: bool = False
    module: str = ""
    """The tensor's name in transformers' modules, if a module in another layer than the one in `checkpoint` uses it.
    Otherwise it is empty."""
    value: int = 0

    def to_shared(self, tensor: Any) -> list[Any]:
        """Split the checkpoint tensor into the parameters that it contains, in the order of `shared`."""
        return self.layout.forward(tensor, self.sizes)

    def to_checkpoint(self, tensors: Sequence[Any]) -> Any:
        """Join parameters, in the order of `shared`, into the checkpoint tensor."""
        return self.layout.inverse(tensors, self.sizes)

    @property
    def stacked(self) -> bool:
        """Whether the tensor contains the matrices of all experts, stacked along its first dimension."""
        return self.layout.stack is not None and len(self.shape) == 3

    def of_expert(self, expert: int) -> BoundLeaf:
        """Return a `BoundLeaf` for the slice of a `stacked` tensor that belongs to one expert."""
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
    """The template of the parameter's name in transformers' modules."""
    checkpoint: tuple[str, ...]
    """The templates of the checkpoint tensors' names. These tensors are concatenated along the first dimension. If the
    templates contain `{expert}`, the results for all experts are stacked along a new first dimension."""

    def bound(self, spec: ModelSpec) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield the parameter's name in every layer, with the names of the checkpoint tensors that it is joined from.

        There is one list of tensor names per expert, or one list if the parameter belongs to no experts.
        """
        for layer, block in enumerate(spec.blocks):
            count = getattr(block.mixer("feed_forward"), "experts", None) if self.of_experts else 1
            if count is not None:
                experts = range(count)
                names = [
                    [template.format(layer=layer, expert=expert) for template in self.checkpoint] for expert in experts
                ]
                yield self.parameter.format(layer=layer), names

    @property
    def of_experts(self) -> bool:
        """Return whether the parameter contains all experts, stacked along its first dimension."""
        return "{expert}" in self.checkpoint[0]

    def leaf(self, name: str, parts: Sequence[Sequence[BoundLeaf]]) -> BoundLeaf:
        """Return the `BoundLeaf` of a parameter of transformers' modules.

        Args:
            name: the parameter's name.
            parts: the leaves of the checkpoint tensors that the parameter is joined from, in one list per expert.
        """
        if not self.of_experts:
            return replace(parts[0][0], checkpoint=name)
        (rows, columns), count = parts[0][0].shape, len(parts[0])
        layout = Layout("experts (part rows) columns", split="part", parts=("1",) * count, stack="experts")
        sizes = {"experts": len(parts), "rows": rows, "columns": columns}
        leaves = [leaf for group in parts for leaf in group]
        shared, shapes = (tuple(x for leaf in leaves for x in getattr(leaf, of)) for of in ("shared", "shared_shapes"))
        return BoundLeaf(name, (len(parts), count * rows, columns), shared, shapes, layout, sizes)

    def gather(self, names: Sequence[Sequence[str]], read: Callable[[str], Any]) -> Any:
        """Join the parameter from its checkpoint tensors.

        Args:
            names: the names of the checkpoint tensors, in one list per expert.
            read: returns the checkpoint tensor of a name.
        """
        parts = [concatenate([read(name) for name in group], 0) for group in names]
        return concatenate([part[None] for part in parts], 0) if self.of_experts else parts[0]


CARRIED = {
    "mtp": "draft tokens (multi-token prediction)",
    "vision": "read images",
    "audio": "read sound",
    "unused": "no layer uses",
    "tasks": "belong to heads for other tasks",
    "scales": "scale quantised weights",
}
"""Groups of carried tensors: no layer reads these tensors, and conversions copy them. Every value completes the phrase
"tensors that …"."""
_SCALES = re.compile(r"\.(weight_scale(_inv)?|input_scale|[kv]_scale)$")
"""Matches the ends of the names of scales, which transformers' fp8 quantizers add to a checkpoint. The quantised
weights keep their names and shapes."""
OUTSIDE = ("vision", "audio")
"""The groups of carried tensors that only composite (multimodal) models have. transformers' class for the language
model alone has no parameters for them."""

_OTHER_HEADS = re.compile(
    r"Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|Regression|Reward|Score|ValueHead|DoubleHeads"
)
"""Parts of the names of transformers classes whose head is not a language model head."""
_NO_HEAD = re.compile(r"\w+(?<!LMHead)(?<!DoubleHeads)Model")
"""The names of transformers classes without a head."""

DRAFT_LAYER = {"mtp": ("model.layers.{next}.",)}
"""The value of `Architecture.carried` for most families in which an extra layer after the last one drafts tokens."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Config fields that describe the vocabulary. They stay the same when the weights are written for another family."""


def _not_drawn(_chosen: Random) -> Config:
    raise NotImplementedError("this family has no draw")


@dataclass(frozen=True)
class Architecture:
    """A model family: how its config.json and its checkpoint tensors are converted to a ModelSpec, and back."""

    name: str
    """gptkit's name of the family. gptkit writes it as the `model_type`."""
    model_types: tuple[str, ...]
    """Every `model_type` that is read as this family."""
    hf_class: str
    """The transformers class that gptkit writes to the config field `architectures`."""
    hf_config: str
    """The name of transformers' config class, such as "LlamaConfig"."""
    kinds: Kinds
    """The kinds of components that models of this family may have. The embedding, the blocks and the head are not
    listed, since every model has them."""
    read: Callable[[ConfigReader], ModelSpec]
    """Returns the ModelSpec that a config.json describes."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """Returns the config fields that describe a ModelSpec. It may assume that the model has only components of `kinds`,
    and it can check a component's kind with `of_kind`. It need not notice that the fields cannot express the model:
    `config_for` reads the fields back and refuses a model that comes back different."""
    leaves: tuple[Leaf, ...]
    """A table of all tensors that the family's checkpoints may have."""
    draw: Callable[[Random], Config] = _not_drawn
    """Returns a random legal config for tests, without `model_type`; see `drawn`. A plugin need not define it."""
    released: str = ""
    """The month or year in which the first weights were published ("2023-02"). If several families can express a model,
    gptkit chooses the oldest family."""
    base_class: str = ""
    """The transformers class for models without a head, or "" if there is none. The tensor names in its files lack
    `prefix`."""
    optional: tuple[str, ...] = ()
    """Parts of a ModelSpec, such as "pooler", that config.json does not mention. The tensors in the files decide
    whether a model has them."""
    own_head: Callable[[ModelSpec], bool] = lambda spec: False
    """Returns whether files may contain a separate head for this ModelSpec, although config.json says that the head is
    tied."""
    config_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Config fields -> their other spellings."""
    foreign_fields: tuple[str, ...] = ()
    """Spellings in `config_aliases` that transformers ignores. gptkit does not pass them on to transformers."""
    head: str = "lm_head.weight"
    """The name of the output matrix in checkpoints. A checkpoint of a model with tied weights may store it too."""
    prefix: str = ""
    """The prefix of tensor names ("transformer."). Older files lack it."""
    part: str = ""
    """The field of composite configs that contains the language model's config ("text_config"), or "". `irrelevant` and
    `refused` also apply to fields outside of it."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of prefixes of tensor names: the prefix in files of composite models, and the one in `leaves`."""
    modules: tuple[str, str] = ("", "")
    """The prefix of tensor names in files, and the one that transformers' modules have instead, if they differ."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of templates of tensor names: the name in older files, and the name in `leaves`."""
    dropped: tuple[str, ...] = ()
    """Templates of the names of buffers that files may contain. gptkit ignores these buffers, since they are not
    weights."""
    unwritten: Callable[[ModelSpec], int] = lambda spec: 0
    """Returns the number of elements of those parameters that transformers' modules have for a ModelSpec and no file
    contains."""
    repeated: Mapping[str, str] = field(default_factory=dict)
    """Parameters of transformers' modules that are always equal to another parameter -> the checkpoint name of the
    other one. If files contain both, the values must be equal, since transformers would otherwise untie them."""
    computed: Mapping[str, Callable[[ModelSpec], Any]] = field(default_factory=dict)
    """Tensors that transformers computes from the config unless files contain them -> functions that return their
    values for a ModelSpec, as numpy arrays."""
    lent: str = ""
    """The prefix of the names of a shared block's parameters. In transformers, every layer that runs a shared block has
    its own module for it. Checkpoints contain only the parameters of the first such layer."""
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of carried tensors (`CARRIED`) -> the prefixes of their names. In a prefix, `{layer}` is the number of a
    layer, and `{next}` is the number of the layer after the last one."""
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Model types of language models inside composite models that compute the same as this family for text tokens ->
    the defaults of their config class that differ from this family's defaults."""
    stacked: tuple[Stacked, ...] = ()
    """Parameters that transformers' modules store in another form than checkpoints, such as the stacked weights of
    experts."""
    token_ids: Mapping[str, int | list[int]] = field(default_factory=dict)
    """The values that the config class has by default for the fields in `TOKEN_IDS`. A field that is not listed is
    None."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """The config fields that every config.json must have, with usual values."""
    irrelevant: Mapping[str, str | None] = field(default_factory=dict)
    """Config fields that do not change what the model computes -> the reason. They are added to `COMMON_IRRELEVANT`.
    None as the reason: this family reads the field, although it is in `COMMON_IRRELEVANT`."""
    rotaries: Mapping[str, RotaryKind] = field(default_factory=lambda: {"": USUAL_ROTARY})
    """How the config class states RoPE, for every type of layer ("full_attention"), or under "" for all layers."""
    former_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Config fields that are lists of names -> names in transformers 5 -> the same names in transformers 4."""
    restated: Callable[[ModelSpec], Mapping[str, Any]] = lambda spec: {}
    """Returns config fields that transformers does not read and other programs need, such as MLX or llama.cpp."""
    refused: Mapping[str, tuple[tuple[Any, ...], str] | None] = field(default_factory=dict)
    """Config fields -> their harmless values, and the reason for refusing all other values. "inner.name" is the field
    `name` of the object `inner`. None: this family accepts the field, although it is in `COMMON_REFUSED`."""
    reference: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ("sdpa", "eager")
    """Returns the attention implementations of transformers that compute a ModelSpec correctly. By default, these are
    "sdpa" and "eager"."""
    reference_quirk: str = ""
    """The reason for leaving out an attention implementation in `reference`."""
    wrong_batches: tuple[Literal["padding", "steps"], ...] = ()
    """The kinds of batch for which transformers' class computes wrong logits. gptkit does not compare these batches.
    "padding": texts with padding before them, which the class reads as tokens. "steps": one new token per text."""
    mended: tuple[tuple[str, str], ...] = ()
    """The faults of transformers' class that later releases correct: (the first correct release, such as "5.23", what
    the class does before it). gptkit computes the correct function, and `verify` names the fault."""
    bounded: bool = False
    """Whether transformers' class refuses texts that are longer than the context length, although the model could
    process them."""
    rescaled: Callable[[ModelSpec], Mapping[str, float]] = lambda spec: {}
    """Returns the tensors that transformers' class multiplies by a factor before it computes -> the factors."""
    prepare: Callable[[Any], None] = lambda model: None
    """Prepares transformers' model before a comparison. If transformers would change weights later, it changes them
    now. It also removes state that modules keep from earlier forward passes. It may be called several times."""
    model: str = ""
    """The function that builds the reference model if transformers has no class for it ("package.module:function"). Its
    arguments are a config.json and an attention implementation, and it returns a torch module. The module's parameters
    have checkpoint names, and no other module uses them. `forward` takes `input_ids` and `attention_mask`, and its
    result has `logits`."""

    # --- config.json <-> tree ---

    @property
    def refusals(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """Return the config fields that the family refuses, with their harmless values and the reason."""
        return {name: refusal for name, refusal in {**COMMON_REFUSED, **self.refused}.items() if refusal is not None}

    @property
    def ignored(self) -> dict[str, str]:
        """Return the config fields that do not change what models of this family compute, with the reason."""
        reasons = {**COMMON_IRRELEVANT, **self.irrelevant}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def reader(self, config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the language model's config fields.

        It also finds fields under the names in `config_aliases`.
        """
        return ConfigReader(config, self.config_aliases).part(self.part)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the ModelSpec that a config.json describes.

        Raises:
            ConfigError: a field has the wrong type or is out of range, or the family refuses it.
        """
        return self.spec_and_unknown(config)[0]

    def spec_and_unknown(self, config: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
        """Return the ModelSpec of a config.json, and the config fields that neither gptkit nor transformers knows."""
        reader = self.reader(config)
        whole = reader.outer or reader
        for part in dict.fromkeys((whole, reader)):
            part.refuse(self.refusals)
        spec = self.read(reader)
        reader.refuse_other_windows([_kind(block.mixer("attention")) for block in spec.blocks])
        return spec, whole.unknown(self.ignored)

    def drawn(self, seed: int) -> Config:
        """Return a small random config that transformers accepts. The same seed always gives the same config."""
        outside = {
            name: 0 for name, ids in self.token_ids.items() if max([ids] if isinstance(ids, int) else ids) >= VOCAB
        }
        chosen = Random(f"{self.name} {seed}")  # noqa: S311, for tests
        return {"model_type": self.name, "vocab_size": VOCAB, **outside, **self.draw(chosen)}

    def assumed(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes that the config does not state, with the defaults of transformers that gptkit uses for them.

        Raises the errors of `spec`.
        """
        reader = self.reader(config)
        self.read(reader)
        return reader.assumed

    def config_for(self, spec: ModelSpec) -> dict[str, Any]:
        """Return a config.json that describes a model.

        Raises:
            CannotExpress: this family has no config for the model. The message lists the components that prevent it.
        """
        expression = express(self, spec, clear=())
        if expression.tree is None:
            raise expression.refusal()
        return self._config(spec)

    def _config(self, spec: ModelSpec) -> dict[str, Any]:
        # transformers cannot build a model whose padding token is outside the vocabulary, even if it is a default.
        name = "pad_token_id"
        pad = self.token_ids.get(name)
        beyond = {name: None} if isinstance(pad, int) and pad >= spec.vocab_size else {}
        return {"model_type": self.name, "architectures": [self.class_of(spec)], **beyond, **self.write(spec)}

    def class_of(self, spec: ModelSpec) -> str:
        """Return the name of the transformers class that computes a model.

        Models without a head may have a class of their own.
        """
        return self.hf_class if spec.head is not None or not self.base_class else self.base_class

    def other_class(self, config: Mapping[str, Any] | None) -> str | None:
        """Return the class that config.json names, if this class has no language model head. Otherwise return None."""
        named = (config or {}).get("architectures")
        name = named[0] if isinstance(named, list) and named else None
        if self.base_class or not isinstance(name, str) or not name.isidentifier() or len(name) > 80:
            return None
        return name if name != self.hf_class and (_OTHER_HEADS.search(name) or _NO_HEAD.fullmatch(name)) else None

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Write a config.json for a model, and return the ModelSpec that gptkit reads from it."""
        return self._completed(self.spec(self._config(spec)), spec)

    def _completed(self, tree: ModelSpec, spec: ModelSpec) -> ModelSpec:
        """Return the ModelSpec `tree` with properties of `spec` that a config.json of this family does not state.

        The result lacks the `optional` parts that `spec` lacks, and has a separate head if `spec` has one.

        Args:
            tree: the ModelSpec that was read from a config.json.
            spec: the ModelSpec that the config.json was written for.
        """
        lacking = {name: None for name in self.optional if getattr(spec, name) is None}
        tree = structs.replace(tree, **lacking) if lacking else tree
        return tree if spec.tied or not self.own_head(tree) else _with_own_head(tree)

    def in_files(self, spec: ModelSpec, names: Iterable[str]) -> ModelSpec:
        """Adapt a ModelSpec to the tensors in files, where config.json does not say what the files contain.

        The result has only those `optional` parts of which the files have tensors. It has a separate head if the files
        have one (`own_head`).

        Args:
            spec: the ModelSpec of the files' config.json.
            names: the names of the tensors in the files.
        """
        stored = {spelling for name in names for spelling in self.spellings(name)} if self.optional else {*names}
        if self.head in stored and self.own_head(spec):
            spec = _with_own_head(spec)
        lacking: dict[str, None] = {}
        for part in self.optional:
            own = [leaf.checkpoint for leaf in self.leaves if leaf.names[0].startswith(f"{part}.")]
            lacking |= {part: None} if stored.isdisjoint(own) else {}
        return structs.replace(spec, **lacking) if lacking else spec

    @property
    def owner(self) -> str:
        return self.name

    def takes(self, spec: ModelSpec) -> int | None:
        """Return the largest number of tokens that transformers' class accepts, or None for no limit."""
        return spec.context_length if self.bounded else None

    def module(self, name: str) -> str:
        """Return transformers' name of a module or parameter, given its name in files."""
        in_files, built = self.modules
        return built + name.removeprefix(in_files) if name.startswith(in_files) else name

    @property
    def two_stacks(self) -> bool:
        """Whether the family's models have both an encoder and a decoder."""
        return CrossAttention in self.kinds

    @cached_property
    def usual(self) -> ModelSpec:
        """Return the ModelSpec of a config.json that has only the fields in `Architecture.stated`.

        All other config fields have their defaults.
        """
        return self.spec({"model_type": self.name, **self.stated})

    def export_config(
        self,
        spec: ModelSpec,
        original: Mapping[str, Any] | None,
        whole: bool = False,
        quantised: bool = False,
        standard: bool = False,
    ) -> dict[str, Any] | None:
        """Return the config.json to write for a model, or None to keep the file `original` unchanged.

        Fields of `original` that do not describe the architecture (token ids, labels) are kept.

        Args:
            spec: the model.
            original: the config.json that the model was read from.
            whole: whether all tensors of a composite model are written, so that the config has to describe the whole
                model.
            quantised: whether the weights are written as they were stored, with their scales.
            standard: whether transformers' class of this family must be able to read the config. An original with
                another model_type of the family, or with field names that transformers ignores, is then rewritten.

        Raises:
            CannotExpress: this family has no config for the model.
        """
        config = self.config_for(spec)
        if original is None or original.get("model_type") not in self.model_types:
            return config
        reader = self.reader(original)
        same = not differences(spec, self._completed(self.read(reader), spec))
        whole = whole and reader.outer is not None
        other = original.get("model_type") != self.name or any(name in original for name in self.foreign_fields)
        composite = reader.outer is not None and not whole
        dequantised = not quantised and quantisation(original) is not None
        if same and not (composite or dequantised or (standard and other and not whole)):
            return None
        replaced = {
            *reader.used,
            *(f"{reader.place}{name}" for name in ("auto_map", *(() if quantised else QUANTISED))),
        }
        others = {key: value for key, value in reader.data.items() if reader.place + key not in replaced}
        if whole:
            config.pop("architectures")
            return {**original, self.part: {**others, **config}}
        return {**others, **config, **{key: original[key] for key in TOKEN_IDS if key in original}}

    # --- checkpoint names <-> shared names ---

    def parameters(self, spec: ModelSpec) -> dict[str, tuple[Stacked, list[list[str]]]]:
        """Return the parameters that transformers' modules store in another form than checkpoints, by name.

        The values are the `Stacked` record and the names of the checkpoint tensors, in the form that `Stacked.bound`
        yields.
        """
        return {name: (parameter, parts) for parameter in self.stacked for name, parts in parameter.bound(spec)}

    def borrowed(self, spec: ModelSpec) -> dict[str, str]:
        """Return names of parameters in transformers' modules -> the names of the same parameters in files.

        In transformers, every layer that runs a shared block has its own module for it. Files contain only the
        parameters of the first such layer. The result has the parameters of the other layers.
        """
        stored_names: dict[str, str] = {}
        for layer, places in _uses(spec).items() if self.lent else ():
            own = self.lent.format(layer=layer)
            names = [leaf.checkpoint for leaf in self.bind(spec) if leaf.checkpoint.startswith(own)]
            others = [self.lent.format(layer=place["runs"]) for place in places[1:]]
            stored_names |= {name.replace(own, other, 1): name for name in names for other in others}
        return stored_names

    def repeats(self, spec: ModelSpec) -> dict[str, str]:
        """Return the parameters of transformers' modules that always equal another one -> the other one's name."""
        own = {leaf.checkpoint for leaf in self.bind(spec)} if self.repeated else set()
        repeated = {name: other for name, other in self.repeated.items() if name not in own}
        return {**repeated, **self.borrowed(spec)}

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return which tensors a checkpoint of this model has, and which parameters every tensor contains.

        The list has the order of `leaves`.

        Raises:
            CannotExpress: a parameter of the model is in no tensor of this family.
        """
        bound = bind(self.name, self.leaves, spec)
        if self.base_class and spec.head is None:
            return [replace(leaf, checkpoint=leaf.checkpoint.removeprefix(self.prefix)) for leaf in bound]
        return bound

    def bind_files(self, spec: ModelSpec, names: Iterable[str]) -> list[BoundLeaf]:
        """Return which tensors the given files have, and which parameters every tensor contains.

        The names of the tensors may be those of checkpoints, as in `bind`, or those of transformers' modules, as in
        `bind_modules`.

        Args:
            spec: the model.
            names: the names of the tensors in the files.
        """
        spellings = {spelling for name in names for spelling in self.spellings(name)} if self.stacked else set()
        return self.bind(spec) if spellings.isdisjoint(self.parameters(spec)) else self.bind_modules(spec)

    def bind_modules(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return which tensors are in files that store parameters as transformers' modules do (see `stacked`).

        The result also says which parameters every tensor contains. `bind` returns the same for the usual form of
        checkpoints. transformers reads files in both forms.
        """
        leaves = {leaf.checkpoint: leaf for leaf in self.bind(spec)}
        of_modules = self._of_modules(spec, leaves)
        parts = {part for name in of_modules for group in self.parameters(spec)[name][1] for part in group}
        return [leaf for name, leaf in leaves.items() if name not in parts] + list(of_modules.values())

    def bind_all(self, spec: ModelSpec) -> dict[str, BoundLeaf]:
        """Return a `BoundLeaf` for every tensor name, both names in checkpoints and names in transformers' modules."""
        leaves = {leaf.checkpoint: leaf for leaf in self.bind(spec)}
        return {**leaves, **self._of_modules(spec, leaves)}

    def _of_modules(self, spec: ModelSpec, leaves: Mapping[str, BoundLeaf]) -> dict[str, BoundLeaf]:
        """Return a `BoundLeaf` for every parameter that transformers' modules store in another form than checkpoints.

        Args:
            spec: the model.
            leaves: the leaves of the checkpoint tensors, by name.
        """
        as_leaves: dict[str, BoundLeaf] = {}
        for name, (stacked, groups) in self.parameters(spec).items():
            own = [[leaves[part] for part in parts if part in leaves] for parts in groups]
            if own[0]:
                as_leaves[name] = stacked.leaf(name, own)
        return as_leaves

    def carries(self, name: str, layers: int) -> tuple[str, str] | None:
        """Return the group of a carried tensor, such as "vision", and the tensor's full name.

        Conversions copy carried tensors, and no layer reads them. The result is None if the tensor is not carried. The
        keys of `CARRIED` are the groups.

        Args:
            name: the tensor's name in a file.
            layers: the number of layers of the model.
        """
        places = {"layer": _layer(name), "next": layers}
        for group, templates in self.carried.items():
            begins = tuple(template.format(**places) for template in templates)
            full_name = next((spelling for spelling in self.spellings(name) if spelling.startswith(begins)), None)
            if full_name is not None:
                return group, full_name
        return ("scales", name) if _SCALES.search(name) else None

    def as_composite(self, name: str, headers: Iterable[str]) -> str:
        """Return the name of a tensor in the composite model that it comes from.

        Args:
            name: the tensor's name in the language model.
            headers: the headers of the composite model's weight files, as text.
        """
        text = "".join(headers)
        pairs = ((theirs, ours) for theirs, ours in self.renamed if name.startswith(ours) and f'"{theirs}' in text)
        theirs, ours = next(pairs, ("", ""))
        return theirs + name.removeprefix(ours)

    def spellings(self, name: str) -> list[str]:
        """Return the names that the tensor `name` of a file may have in `leaves`. Prefixes differ between files."""
        spellings = [name, self.prefix + name] if self.prefix else [name]
        spellings += [name.removeprefix(self.prefix)] if self.base_class else []
        return spellings + [
            ours + name.removeprefix(theirs) for theirs, ours in self.renamed if name.startswith(theirs)
        ]

    def canonical_name(self, name: str, known: Mapping[str, Any], layers: int) -> str | None:
        """Return the name that `leaves` has for a tensor in a file, which may lack the prefix or have an older name.

        The result is None for a buffer in `dropped`. An unknown name is returned unchanged.

        Args:
            name: the tensor's name in the file.
            known: a mapping whose keys are the tensor names of the model.
            layers: the number of layers of the model.
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
                    return next((spelling for spelling in self.spellings(named) if spelling in known), named)
            if any(template.format(layer=layer) == candidate for template in self.dropped):
                return None
        return name


def _with_own_head(spec: ModelSpec) -> ModelSpec:
    """Return the ModelSpec with a head that is not tied."""
    return structs.replace(spec, head=structs.replace(spec.has_head(), tied=False))


def _layer(name: str) -> str | None:
    """Return the first number in a tensor name, as text. Numbers of ten or more digits are ignored."""
    return next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)


def _kind(attention: Any) -> str | None:
    """Return what transformers' `layer_types` calls a layer with this attention. None is a layer without attention."""
    if attention is None:
        return None
    if getattr(attention, "window", None) is None:
        return "full_attention"
    return "chunked_attention" if getattr(attention, "chunked", False) else "sliding_attention"


def bind(owner: str, leaves: Sequence[Leaf], spec: ModelSpec) -> list[BoundLeaf]:
    """Return which tensors a checkpoint of this model has, and which parameters every tensor contains.

    The list has the order of `leaves`. This is the order of transformers' modules, which decides how transformers
    distributes tensors over files.

    Args:
        owner: the name of the family or format in error messages.
        leaves: the tensor table of that family or format.
        spec: the model.

    Raises:
        CannotExpress: a parameter is in no tensor of the table, or its shape does not fit the tensor's layout.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    encoded = [leaf for leaf in leaves if leaf.names[0].startswith("encoder.")]
    first = leaves.index(encoded[0]) if encoded else 0
    bound = list(_bound(owner, leaves[:first], spec, shapes))
    if spec.encoder is not None:
        bound += _bound(owner, encoded, spec.encoder, shapes)
    bound += _bound(owner, [leaf for leaf in leaves[first:] if leaf not in encoded], spec, shapes)
    covered = [name for leaf in bound for name in leaf.shared]
    bound_names = set(covered)
    missing = [name for name in shapes if name not in bound_names]
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
    of_first = f"{stem}0."  # the prefix of tensors that only the first block has
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
    """Return how many tensors a layer has for a template of their names: the number of experts or of heads, or 1."""
    return next((sizes.get(f"{kind}s", 0) for kind in ("expert", "head") if f"{{{kind}}}" in template), 1)


def _uses(spec: ModelSpec) -> dict[int, list[dict[str, int]]]:
    """Return the uses of shared blocks, by the index of the layer that stores the block's weights.

    A use is a mapping from placeholders of name templates to numbers. `layer` is the index of the layer that stores the
    block, `runs` is that of a layer that runs it, and `use` is the number of earlier uses of shared blocks.
    """
    places: dict[int, list[dict[str, int]]] = {}
    for use, (layer, stored) in enumerate(spec.shared_block_sources.items()):
        places.setdefault(stored, []).append({"layer": stored, "runs": layer, "use": use})
    return places


def _places(run: Sequence[Leaf], layer: int, uses: Mapping[int, list[dict[str, int]]]) -> list[dict[str, int]]:
    """Return the values to insert into the name templates of a layer, as mappings from placeholders to numbers.

    Usually there is one mapping, with the layer's index. For a shared block, the layer that stores it has one mapping
    for every use of the block, and other layers have none.

    Args:
        run: consecutive entries of the tensor table, either all of a shared block or none.
        layer: the index of the layer.
        uses: the uses of shared blocks, as `_uses` returns them.
    """
    return uses.get(layer, []) if "{use}" in run[0].checkpoint else [{"layer": layer}]


def _sizes(spec: ModelSpec, block: Block) -> dict[str, int]:
    """Return the sizes of the axes that a layout may name in this block, such as "heads" or "head_dim".

    These are the integer fields of the mixers, and the integer properties that mixers list in `axes`. `half` is half
    the width of a head.
    """
    sizes = {"experts": 0, "one": 1, "two": 2}
    for sublayer in block.sublayers:
        for name in (*sublayer.mixer.__struct_fields__, *sublayer.mixer.axes):
            size = getattr(sublayer.mixer, name, None)
            if type(size) is int:
                sizes[name.removesuffix("_size")] = size
    sizes |= {"half": sizes["head_dim"] // 2} if "head_dim" in sizes else {}
    return sizes | {"hidden": spec.hidden_size}


def _bind_one(
    owner: str, leaf: Leaf, place: Mapping[str, int], shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> Iterator[BoundLeaf]:
    several = range(leaf.layout.repeats(sizes)) if leaf.layout.stack else ()
    places = [{**place, "expert": index} for index in several] if leaf.layout.stack else [place]
    runs = {"layer": place["runs"]} if "runs" in place else {}
    names = tuple(name.format(**{**place, **runs}) for place in places for name in leaf.names)
    if not names or not all(name in shapes for name in names):
        return
    if (leaf.requires and leaf.requires not in shapes) or leaf.unless in shapes:
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
    """Return the first layer, its attention and its feed-forward.

    Raises:
        CannotExpress: the attention is not an `Attention`, or the feed-forward is neither a `FeedForward` nor a
            `GatedFeedForward`.
    """
    first = spec.blocks[0]
    return first, of_kind(first.attention, Attention), of_kind(first.feed_forward, FeedForward, GatedFeedForward)
