"""Decoders: a table of config fields for most families, by which config.json is converted to a ModelSpec and back.

Every field of the table has a *role*, which says what the value is in the ModelSpec. Plain roles are sizes from which
the model is built (`hidden`, `heads`, `eps`). A dotted role is a field of one kind of component, in every layer or
outside of the layers (`attention.cap`, `feed_forward.up_bias`, `embedding.multiplier`, `head.bias`, `norm.bias`,
`branch.multiplier`, `transform.bias`). If the table is not enough for a family, it passes further values to
`DecoderFamily.read`, and adds fields to the result of `DecoderFamily.write`.

A role may also name a component that `DecoderFamily.read` does not make, such as `layer_inputs.width`. The family adds
this component to the ModelSpec, and the table still writes the field (`fields.write_tree`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Literal

from msgspec.structs import replace

from ..components import (
    Attention,
    Block,
    Embedding,
    GatedFeedForward,
    Head,
    HeadTransform,
    LearnedPositions,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)
from ..errors import CannotExpress
from .base import Architecture, Leaf
from .config import COMMON_REFUSED, ConfigReader
from .draws import CONTEXTS, EVEN, ODD, TABLE, VOCAB, Config, experts, grouped_heads, placed
from .fields import ACTIVATIONS, PRE, Fields, of_part, write_tree
from .fields import Field as Field  # definitions of users import it from here
from .lenses import Lens, sparse_layers
from .obstacles import Kinds, of_kind
from .places import ALL_LAYERS, Places
from .rope import ROTARY, USUAL_ROTARY, RotaryKind, draw_rotary, read_rotary, write_rotary
from .usual import ROTARY_BUFFERS, STACKED


@dataclass(frozen=True)
class Mixtures:
    """The properties of a family's mixtures of experts that are not fields of config.json."""

    sparse: Places = ALL_LAYERS
    """Reads and writes the config fields that say which layers are mixtures of experts."""
    none: int | None = None
    """The number of experts of models without mixtures, if the family has such models."""
    expert: Mapping[str, Any] = field(default_factory=lambda: {"fused": True})
    """Fields of the component of an expert, in which it differs from the feed-forward of a dense layer."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the component of the shared expert, in which it differs from the feed-forward of a dense layer."""
    normed: bool = False
    """Whether a mixture has a norm on its output. Dense layers do not have this norm."""


@dataclass(frozen=True)
class DecoderFamily:
    """The common properties of a decoder family's models: config fields, components and rules of transformers."""

    fields: Fields
    """The table of config fields. For mixtures of experts, it may have these plain roles: `expert_size` is the width of
    an expert (by default that of a dense layer). `shared_size` is the width of the shared expert, and `shared_experts`
    is this width divided by the width of an expert. Dotted roles are `mixture.experts`, `mixture.top_k` and so on."""
    norm: type[Any] = RMSNorm
    """The kind of norm."""
    mixer: type[Any] = Attention
    """The kind of attention. If it is not `Attention`, a subclass overrides the method `attentions`."""
    inner: type[Any] = GatedFeedForward
    """The kind of feed-forward."""
    norms: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]] = PRE
    """The names of a block's norms, or a function that returns them for the values of all roles. The norms of a
    recurrence are those of attention."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Roles that are not in config.json -> their values, or functions that compute them from the values of other
    roles."""
    rotary: RotaryKind | None = USUAL_ROTARY
    """How transformers' config class states RoPE. None: the family has no RoPE, or `layers` reads it."""
    learned: bool = False
    """Whether the model has a table of position embeddings."""
    table: type[Any] = LearnedPositions
    """The kind of component for position embeddings, if the model has them."""
    head_norms: Literal["", "same", "own", "apart", "whole"] = ""
    """The norms of queries and keys. "same": all heads share the weights. "own": every head has its own weights.
    "apart": as "own", but the norm has one tensor per head and no biases. "whole": one norm over all heads. If a config
    field has the role "head_norms", it switches these norms on."""
    embedding_norm: bool = False
    """Whether there is a norm after the embedding."""
    first_bare: bool = False
    """Whether the first attention has no norm before it, because it reads the output of the embedding's norm."""
    layers: Lens | None = None
    """Reads and writes the config fields of attention whose values differ by layer."""
    recurrent: Lens | None = None
    """Reads and writes the mixers of layers that have a recurrence or convolution in place of attention."""
    mixtures: Mixtures | None = None
    """The properties of mixtures of experts, if models of the family may have them."""
    written: Callable[[ModelSpec], Mapping[str, Any]] = lambda _: {}
    """Returns those config fields of a model that are neither in the table `fields` nor written by a `Lens`."""
    sized: Callable[[Random, Config], Config] = lambda _chosen, _sizes: {}
    """Returns sizes for a random config, as role -> size. They replace sizes that `draw_sizes` returned."""
    together: tuple[str, ...] = ()
    """Config fields that must have equal values in transformers."""
    whole_heads: bool = False
    """Whether transformers' config class refuses a hidden size that is not divisible by the number of heads, even if
    the config states a head_dim."""
    square: bool = False
    """Whether the heads of a layer together must be as wide as the hidden states, also if the config states a
    head_dim."""

    @property
    def kinds(self) -> Kinds:
        """The kinds of components that the family's models may have, for `Architecture.kinds`."""
        positions = {self.table} if self.learned else ROTARY if "attention.position" not in self.fixed else ()
        mixtures = () if self.mixtures is None else (MixtureOfExperts,)
        lenses = [lens for lens in (self.layers, self.recurrent) if lens is not None]
        others = {kind for lens in lenses for kind in lens.kinds}
        roles = (*self.fixed, *(declared.role for declared in self.fields.values()))
        others |= {HeadTransform} if any(role.startswith("transform.") for role in roles) else set()
        return frozenset({self.norm, self.mixer, self.inner, *positions, *mixtures, *others})

    @property
    def rotaries(self) -> Mapping[str, RotaryKind]:
        """How the config class states RoPE, for `Architecture.rotaries`."""
        by_type = {} if self.layers is None else self.layers.rotaries
        return by_type or {"": self.rotary or USUAL_ROTARY}

    def architecture(self, name: str, hf_class: str, leaves: tuple[Leaf, ...], **more: Any) -> Architecture:
        """Return the `Architecture` of this family.

        Args:
            name: the name of the family.
            hf_class: the transformers class.
            leaves: the table of the tensors in checkpoints.
            more: further fields of `Architecture`. The fields for stacked parameters and for buffers of old files have
                the values that most families need, unless they are given.
        """
        stored = {leaf.checkpoint for leaf in leaves}
        longest = {"context": TABLE} if more.get("bounded") else {}
        usual = {
            "model_types": (name,),
            "hf_config": re.sub(r"(For[A-Z]\w*|LMHeadModel)$", "Config", hf_class),
            "kinds": self.kinds,
            "read": self.read,
            "write": self.write,
            "draw": lambda chosen: self.draw(chosen, more.get("stated", {}), **longest),
            "rotaries": self.rotaries,
            "prefix": "model.",
            "dropped": () if more.get("prefix") else ROTARY_BUFFERS,
            "stacked": STACKED
            if stored.issuperset(name for parameter in STACKED for name in parameter.checkpoint)
            else (),
        }
        return Architecture(name=name, hf_class=hf_class, leaves=leaves, **{**usual, **more})

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        """Return the ModelSpec that a config.json describes.

        Args:
            config: the reader of the config.json.
            more: values of the model that are not in config.json, by role. A role is the name of a size ("heads"), or
                of a field of a component ("attention.cap"). Keywords have two underscores instead of the dot:
                `attention__cap`.

        Raises:
            ConfigError: a field has the wrong type or is out of range.
        """
        values, names = self._values(config, more)
        tied, hidden = values["tied"], values["hidden"]
        if config.outer is not None:  # in a composite model, the field of the whole model decides
            tied = config.outer.boolean(names["tied"], tied)
        norm = self.norm(size=hidden, eps=values["eps"], **of_part(values, "norm"))
        feed_forwards = self._feed_forwards(config, values, names)
        attentions = self.attentions(config, values, of_part(values, "attention"), of_part(values, "norm"))
        tables = (getattr(getattr(attention, "position", None), "table", None) for attention in attentions)
        table = next((table(values["heads"]) for table in tables if table is not None), None)
        blocks, transform = self._blocks(values, norm, attentions, feed_forwards), of_part(values, "transform")
        if self.first_bare:
            blocks = (blocks[0].replaced(attention_norm=None), *blocks[1:])
        if transform:
            transform = {"transform": HeadTransform(hidden_size=hidden, norm=norm, **transform)}
        return ModelSpec(
            embedding=Embedding(
                vocab_size=values["vocab"],
                hidden_size=hidden,
                norm=norm if self.embedding_norm else None,
                **of_part(values, "embedding"),
            ),
            positions=(
                self.table(length=values["context"], size=hidden, **of_part(values, "positions"))
                if self.learned
                else None
            ),
            relative_bias=table,
            blocks=blocks,
            final_norm=replace(norm, **of_part(values, "final_norm")) if values.get("final_norm", True) else None,
            head=Head(
                vocab_size=values["vocab"], hidden_size=hidden, tied=tied, **of_part(values, "head"), **transform
            ),
            context_length=values["context"],
        )

    def _values(self, config: ConfigReader, more: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the values of all roles, and the config field of every role.

        Args:
            config: the reader of the config.json.
            more: further values by role; see `read`.
        """
        values: dict[str, Any] = dict.fromkeys(("kv_heads", "head_dim", "intermediate", "context"))
        names: dict[str, str] = {}
        for outer in dict.fromkeys(name.partition(".")[0] for name in self.fields if "." in name):
            config.inner(outer).refuse(COMMON_REFUSED)
        for name, declared in self.fields.items():
            roles = declared.role.split()
            names |= dict.fromkeys(roles, name)
            values |= dict.fromkeys(roles, declared.value(config, name))
        self.complete(config, values, names)
        fixed = {**self.fixed, **{role.replace("__", "."): value for role, value in more.items()}}
        values |= {role: value(values) if callable(value) else value for role, value in fixed.items()}
        return values, names

    def _blocks(
        self, values: Mapping[str, Any], norm: Any, attentions: Sequence[Any], feed_forwards: Sequence[Any]
    ) -> tuple[Block, ...]:
        """Return the blocks of a model. Equal blocks are the same object.

        Args:
            values: the values of all roles.
            norm: the norm that is used in all places of a block.
            attentions: the attention of every layer, or the mixer that replaces it.
            feed_forwards: the feed-forward of every layer.
        """
        norms = self.norms(values) if callable(self.norms) else self.norms
        normed = self.mixtures is not None and self.mixtures.normed

        @cache
        def layer(attention: Any, feed_forward: Any) -> Block:
            sublayers = []
            for slot, mixer in (("attention", attention), ("feed_forward", feed_forward)):
                places = [name.removeprefix(f"{slot}_") for name in norms if name.startswith(slot)]
                if normed and hasattr(mixer, "expert"):
                    places.append("output_norm")
                own = {**of_part(values, "branch"), **of_part(values, f"{slot}_branch")}
                sublayers.append(SubLayer(mixer=mixer, **dict.fromkeys(places, norm), **own))
            return Block(sublayers=tuple(sublayers), **of_part(values, "block"))

        return tuple(map(layer, attentions, feed_forwards))

    def _feed_forwards(self, config: ConfigReader, values: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
        """Return the feed-forward of every layer. It may be a mixture of experts.

        Args:
            config: the reader of the config.json.
            values: the values of all roles.
            names: the config field of every role, for error messages.
        """
        dense = self.inner(
            hidden_size=values["hidden"],
            intermediate_size=values["intermediate"] or 4 * values["hidden"],
            activation=values["activation"],
            **of_part(values, "feed_forward"),
        )
        if self.mixtures is None:
            return [dense] * values["layers"]
        sparse = self.mixtures.sparse.get(config, values["layers"])
        if self.mixtures.none is not None and values["mixture.experts"] == self.mixtures.none:
            sparse = [False] * len(sparse)
        mixture = self._mixture(config, values, names, dense) if any(sparse) else None
        return [mixture if is_sparse else dense for is_sparse in sparse]

    def _mixture(
        self, config: ConfigReader, values: Mapping[str, Any], names: Mapping[str, str], dense: Any
    ) -> MixtureOfExperts:
        """Return the mixture of experts that sparse layers have.

        Args:
            config: the reader of the config.json.
            values: the values of all roles.
            names: the config field of every role, for error messages.
            dense: the feed-forward of dense layers. Experts are like it, except for their width.
        """
        assert self.mixtures is not None
        own = of_part(values, "mixture")
        for role in ("experts", "top_k"):
            if not own[role]:
                raise config.fail(names[f"mixture.{role}"], own[role], "a positive integer")
        experts, top_k = own["experts"], own["top_k"]
        if top_k > experts:
            counted = names["mixture.experts"]
            raise config.fail(names["mixture.top_k"], top_k, f"at most {experts}, the number of experts ({counted})")
        width = values.get("expert_size") or dense.intermediate_size
        expert = replace(dense, intermediate_size=width, **self.mixtures.expert)
        size = values.get("shared_size") or width * (values.get("shared_experts") or 0)
        if size > 2**31 - 1:
            raise config.fail(
                names["shared_experts"],
                values["shared_experts"],
                "fewer shared experts: together they must have fewer than 2^31 hidden units",
            )
        shared = replace(dense, intermediate_size=size, **self.mixtures.shared) if size else None
        return MixtureOfExperts(hidden_size=dense.hidden_size, expert=expert, shared=shared, **own)

    def complete(self, config: ConfigReader, values: dict[str, Any], names: Mapping[str, str]) -> None:
        """Add to `values` what follows from other values, such as the width of a head.

        `names` has the config fields by role.
        """
        if values["head_dim"] is None:
            if values["hidden"] % values["heads"]:
                wanted = f"a multiple of {names['heads']} ({values['heads']})"
                raise config.fail(names["hidden"], values["hidden"], wanted)
            values["head_dim"] = values["hidden"] // values["heads"]
        heads, head_dim, hidden = values["heads"], values["head_dim"], values["hidden"]
        if self.square and heads * head_dim != hidden:
            quotient = f"{names['hidden']} / {names['heads']} ({hidden} / {heads})"
            raise config.fail(
                names["head_dim"], head_dim, f"{quotient}: gptkit supports no other value for this family"
            )

    def attentions(
        self, config: ConfigReader, values: Mapping[str, Any], own: Mapping[str, Any], norm: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Return the attention of every layer, or the mixer that replaces it.

        Args:
            config: the reader of the config.json.
            values: the values of all roles.
            own: fields for every attention: the values of the roles `attention.*`, without this prefix.
            norm: fields for every norm: the values of the roles `norm.*`, without this prefix.
        """
        heads, head_dim, count = values["heads"], values["head_dim"], values["layers"]

        def head_norm(count: int) -> Any:
            """Return the norm for queries or keys with this number of heads, or None if the family has no such norm."""
            if not values.get("head_norms", self.head_norms):
                return None
            groups = {"groups": count} if self.head_norms in ("own", "apart") else {}
            apart = {"apart": True, "bias": False} if self.head_norms == "apart" else {}
            size = head_dim if self.head_norms == "same" else count * head_dim
            return self.norm(size=size, eps=values["eps"], **{**norm, **groups, **apart})

        kv_heads = values["kv_heads"] or heads
        rotary = None if self.rotary is None else read_rotary(config, head_dim, values["context"], self.rotary)
        shared: dict[str, Any] = {
            "hidden_size": values["hidden"],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "position": rotary if values.get("rope", True) else None,
            "q_norm": head_norm(heads),
            "k_norm": head_norm(kv_heads),
            **own,
        }
        layers = ({},) * count if self.layers is None else self.layers.get(config, values)
        mixers = [self.mixer(**{**shared, **fields}) for fields in layers]
        if self.recurrent is None:
            return mixers
        others = self.recurrent.get(config, values)
        return [mixer if other is None else other for mixer, other in zip(mixers, others, strict=True)]

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the config fields that describe a model.

        Raises:
            CannotExpress: the model has a component of another kind than a field describes, or sizes that transformers
                refuses.
        """
        if spec.head is None:
            raise CannotExpress("the model has no language model head, but this architecture has one")
        first = next((block for block in spec.blocks if block.mixer("attention") is not None), spec.blocks[0])
        attention = of_kind(first.attention, self.mixer)
        dense, mixture = self._dense_and_mixture(spec)
        inner = of_kind(dense, self.inner)
        if self.whole_heads and spec.hidden_size % attention.heads:
            raise CannotExpress(
                "transformers needs a hidden size that is divisible by the number of heads "
                f"({spec.hidden_size} and {attention.heads})"
            )
        norm: Any = next(iter(first.norms().values()), spec.final_norm)
        if norm is None:
            raise CannotExpress("the model has no norm after the last layer, but this architecture needs one")
        sizes = {
            "heads": attention.heads,
            "kv_heads": getattr(attention, "kv_heads", None),
            "head_dim": getattr(attention, "head_dim", None),
            "intermediate": inner.intermediate_size,
            "activation": inner.activation,
            "eps": norm.eps,
            "rope": getattr(attention, "position", None) is not None,
            "head_norms": attention.q_norm is not None,
            "output_norms": first.sublayers[0].output_norm is not None,
        }
        parts = {
            "attention": attention,
            "feed_forward": inner,
            "mixture": mixture,
            "norm": norm,
            "final_norm": norm if spec.final_norm is None else spec.final_norm,
            "branch": first.sublayers[0],
            "block": first,
        }
        if mixture is not None:
            width, shared_size = mixture.intermediate_size, mixture.shared_size
            sizes |= {"expert_size": width, "shared_size": shared_size, "shared_experts": shared_size // width}
        if self.square and any(f.role == "head_dim" and f.default is None for f in self.fields.values()):
            del sizes["head_dim"]  # it follows from the hidden size
        fields = write_tree(self.fields, spec, parts, **sizes)
        if self.rotary is not None:
            fields |= self._written_rotary(spec, attention.head_dim, self.rotary)
        if self.mixtures is not None:
            fields |= self.mixtures.sparse.put(sparse_layers(spec))
            if mixture is None and self.mixtures.none is not None:
                fields |= dict.fromkeys(self._names("mixture.experts"), self.mixtures.none)
        for lens in (self.layers, self.recurrent):
            fields |= {} if lens is None else lens.put(spec)
        if len({fields[name] for name in self.together}) > 1:
            needed = " and ".join(f"{name} = {fields[name]}" for name in self.together)
            raise CannotExpress(
                f"transformers needs the same value for these config fields, but the model needs {needed}"
            )
        return {**fields, **self.written(spec)}

    def _dense_and_mixture(self, spec: ModelSpec) -> tuple[Any, Any]:
        """Return the feed-forward that the dense config fields describe, and the first mixture of experts or None.

        The first value is the first dense feed-forward in the layers. If all layers are mixtures, it is an expert of
        the first mixture: the shared expert if there is one and the width of the other experts has a config field of
        its own, and otherwise one of the other experts.
        """
        inners: list[Any] = [block.feed_forward for block in spec.blocks]
        mixture = next((inner for inner in inners if hasattr(inner, "expert")), None)
        dense = next((inner for inner in inners if not hasattr(inner, "expert")), None)
        if mixture is not None and dense is None:
            apart = any("expert_size" in declared.role.split() for declared in self.fields.values())
            dense = mixture.shared if apart and mixture.shared is not None else mixture.expert
        return dense, mixture

    def _names(self, *roles: str) -> list[str]:
        """Return the config fields with these roles."""
        return [name for name, declared in self.fields.items() if declared.role in roles]

    def _written_rotary(self, spec: ModelSpec, head_dim: int, kind: RotaryKind) -> dict[str, Any]:
        """Return the RoPE config fields, from the first layer that has RoPE.

        Args:
            spec: the model.
            head_dim: the width of a head.
            kind: the names and defaults of the RoPE fields in the family's config class.
        """
        mixers = (block.mixer("attention") for block in spec.blocks)
        positions = (of_kind(mixer, Attention).position for mixer in mixers if mixer is not None)
        none = Rotary(dim=head_dim, base=kind.base)
        rotary = of_kind(next((position for position in positions if position is not None), none), Rotary)
        return write_rotary(rotary, head_dim, kind)

    def draw_sizes(self, chosen: Random) -> Config:
        """Return random sizes of a model that are legal together, as role -> size.

        `chosen` is the random number generator.
        """
        heads, kv_heads = grouped_heads(chosen)
        free = any(entry.role.split()[0] == "head_dim" for entry in self.fields.values()) and not self.square
        head_dim = chosen.choice(ODD if self.learned else EVEN)
        if self.table is not LearnedPositions:
            head_dim = chosen.choice(EVEN[1:])  # sines and cosines need an even width above 2
        together = not free or self.whole_heads or chosen.random() < 0.5
        sizes: Config = {
            "vocab": VOCAB,
            "hidden": heads * head_dim if together else 3 * chosen.choice(ODD),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "layers": chosen.choice((1, 2, 3)),
            "intermediate": chosen.choice((1, 7, 33, 64)),
            "context": TABLE if self.learned else chosen.choice(CONTEXTS),
            "activation": chosen.choice([*ACTIVATIONS]),
            "eps": chosen.choice((1e-3, 1e-6)),
        }
        if self.mixtures is not None:
            sizes |= experts(chosen)
            if not free or self.whole_heads:
                sizes["head_dim"] = chosen.choice((8, 16, 24))
                sizes["hidden"] = heads * sizes["head_dim"]
        return sizes

    def draw(self, chosen: Random, stated: Mapping[str, Any], **own: Any) -> Config:
        """Return a random legal config for tests.

        Args:
            chosen: the random number generator.
            stated: the config fields that every file of the family states.
            own: sizes by role, which replace random ones.
        """
        sizes = self.draw_sizes(chosen)
        sizes = {**sizes, **self.sized(chosen, sizes), **own}
        config = dict(stated)
        for name, entry in self.fields.items():
            role = entry.role.split()[0]
            needed = name in stated or (role in sizes and role not in ("activation", "eps"))
            drawn = entry.drawn(name, chosen, sizes)
            config |= drawn if needed or chosen.random() < 0.7 else {}
        if self.rotary is not None:
            config |= draw_rotary(chosen, sizes["head_dim"], self.rotary)
        for lens in (self.layers, self.recurrent):
            config |= {} if lens is None else lens.draw(chosen, sizes)
        if self.mixtures is not None:
            config |= self.mixtures.sparse.draw(chosen, sizes["layers"])
            if self.mixtures.none is not None and chosen.random() < 0.5:
                config |= dict.fromkeys(self._names("mixture.experts", "mixture.top_k"), self.mixtures.none)
        values = [config[name] for name in self.together if name in config]
        config |= dict.fromkeys(self.together, values[0]) if values else {}
        return placed(config)


Decoder = DecoderFamily
"""The former name of `DecoderFamily`. Family definitions that older versions of gptkit drafted import it."""
