"""The tree that most families share, read from a table of config fields and written by the same table.

A field of the table names what it says by a *role*. Plain roles are sizes that the tree is built from (`hidden`,
`heads`, `eps`); a dotted role is a field of one kind of component in every layer or at an end (`attention.cap`,
`feed_forward.up_bias`, `embedding.multiplier`, `head.bias`, `norm.bias`, `branch.multiplier`). What a family has beside
such fields it says as arguments of `DecoderFamily.read`, and adds to what `DecoderFamily.write` gives.
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
from .fields import ACTIVATIONS, PRE, Fields
from .fields import Field as Field  # which definitions of users import from here
from .lenses import ALL_LAYERS, Lens
from .obstacles import Kinds, of_kind
from .rope import ROTARY, USUAL_ROTARY, RotaryKind, draw_rotary, read_rotary, write_rotary
from .usual import ROTARY_BUFFERS, STACKED


@dataclass(frozen=True)
class Mixtures:
    """What all mixtures of experts of a family have in common, besides the fields with the roles of a mixture."""

    sparse: Lens = ALL_LAYERS
    """Which layers are mixtures."""
    expert: Mapping[str, Any] = field(default_factory=lambda: {"fused": True})
    """Fields of an expert's record that differ from those of a dense layer."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the shared expert's record that differ from those of a dense layer."""
    normed: bool = False
    """Whether a mixture has a norm on its output, which dense layers do not have."""


@dataclass(frozen=True)
class DecoderFamily:
    """What all trees of a family have in common."""

    fields: Fields
    """What config.json says. The plain roles of a mixture of experts are `expert_size` (the width of an expert, by
    default that of a dense layer), `shared_size` (the width of the shared expert) or `shared_experts` (the same in
    widths of an expert). Its dotted roles are `mixture.experts`, `mixture.top_k` and so on."""
    norm: type[Any] = RMSNorm
    """The kind of the norms."""
    mixer: type[Any] = Attention
    """The kind of attention. A subclass overrides `attentions` for another kind than `Attention`."""
    inner: type[Any] = GatedFeedForward
    """The kind of the feed-forwards."""
    norms: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]] = PRE
    """The norms of a block, by their names in it, or a function of the values of roles. A recurrence has
    attention's."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of roles that no field says, or functions of the values that the fields say."""
    rotary: RotaryKind | None = USUAL_ROTARY
    """What is assumed of RoPE. None: `layers` makes the positions, or there are none."""
    learned: bool = False
    """Whether there is a table of positions."""
    table: type[Any] = LearnedPositions
    """The kind of that table."""
    head_norms: Literal["", "same", "own", "apart", "whole"] = ""
    """The norms of queries and keys: the "same" for every head, its "own" for each, its own and "apart" (a tensor for
    each head, without bias), or one for all heads as a "whole". A field with this role says whether there are any."""
    embedding_norm: bool = False
    """Whether the embedding has a norm."""
    layers: Lens | None = None
    """What differs by layer in attention."""
    recurrent: Lens | None = None
    """What the layers without attention have."""
    mixtures: Mixtures | None = None
    """The mixtures of experts, if the family has any."""
    written: Callable[[ModelSpec], Mapping[str, Any]] = lambda _: {}
    """Returns further config fields of a tree."""
    sized: Callable[[Random, Config], Config] = lambda _chosen, _sizes: {}
    """Returns drawn sizes, by role, that replace those of `draw_sizes`."""
    together: tuple[str, ...] = ()
    """Config fields of which transformers needs the same value."""
    whole_heads: bool = False
    """Whether transformers' config class refuses a hidden size that the heads do not divide, even with a head_dim."""
    square: bool = False
    """Whether all heads together must be as wide as the hidden states, even with a head_dim."""

    @property
    def kinds(self) -> Kinds:
        """Return the components of the family's trees, for `Architecture.kinds`."""
        positions = {self.table} if self.learned else ROTARY if "attention.position" not in self.fixed else ()
        mixtures = () if self.mixtures is None else (MixtureOfExperts,)
        lenses = [lens for lens in (self.layers, self.recurrent) if lens is not None]
        others = {kind for lens in lenses for kind in lens.kinds}
        return frozenset({self.norm, self.mixer, self.inner, *positions, *mixtures, *others})

    def architecture(self, name: str, hf_class: str, leaves: tuple[Leaf, ...], **more: Any) -> Architecture:
        """Return the family of these trees.

        Unless `more` states them, the stacked parameters and the buffers of old files are those that most families
        have.
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
            "prefix": "model.",
            "dropped": () if more.get("prefix") else ROTARY_BUFFERS,
            "stacked": STACKED if stored.issuperset(name for each in STACKED for name in each.checkpoint) else (),
        }
        return Architecture(name=name, hf_class=hf_class, leaves=leaves, **{**usual, **more})

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        """The tree of a config.

        Args:
            config: what is read.
            more: values of roles that no field says, with two underscores for a dot.

        Raises:
            ConfigError: a field of another type or range.
        """
        values: dict[str, Any] = dict.fromkeys(("kv_heads", "head_dim", "intermediate", "context"))
        names: dict[str, str] = {}
        for outer in dict.fromkeys(name.rpartition(".")[0] for name in self.fields if "." in name):
            config.inner(outer).refuse(COMMON_REFUSED)
        for name, each in self.fields.items():
            roles = each.role.split()
            names |= dict.fromkeys(roles, name)
            values |= dict.fromkeys(roles, each.value(config, name))
        hidden, count, context = (values[role] for role in ("hidden", "layers", "context"))
        self.complete(config, values, names)
        fixed = {**self.fixed, **{role.replace("__", "."): value for role, value in more.items()}}
        values |= {role: value(values) if callable(value) else value for role, value in fixed.items()}
        tied = values["tied"]
        if config.outer is not None:  # of a composite model it is the whole that says so
            tied = config.outer.boolean(names["tied"], tied)

        def of(part: str) -> dict[str, Any]:
            """Return the values of a part's dotted roles. A scale of None is left out: the usual one applies."""
            said = {role: value for role, value in values.items() if role != "attention.scale" or value is not None}
            return {role.partition(".")[2]: value for role, value in said.items() if role.startswith(f"{part}.")}

        norm = self.norm(size=hidden, eps=values["eps"], **of("norm"))

        norms = self.norms(values) if callable(self.norms) else self.norms
        dense = self.inner(
            hidden_size=hidden,
            intermediate_size=values["intermediate"] or 4 * hidden,
            activation=values["activation"],
            **of("feed_forward"),
        )

        @cache
        def layer(attention: Any, feed_forward: Any) -> Block:
            sublayers = []
            for slot, mixer in (("attention", attention), ("feed_forward", feed_forward)):
                places = [name.removeprefix(f"{slot}_") for name in norms if name.startswith(slot)]
                if self.mixtures is not None and self.mixtures.normed and hasattr(mixer, "expert"):
                    places.append("output_norm")
                sublayers.append(SubLayer(mixer=mixer, **dict.fromkeys(places, norm), **of("branch")))
            return Block(sublayers=tuple(sublayers), **of("block"))

        inner = [dense] * count
        if self.mixtures is not None:
            sparse = self.mixtures.sparse.get(config, values)
            mixture = self._mixture(config, values, names, dense, of("mixture")) if any(sparse) else None
            inner = [mixture if each else dense for each in sparse]
        attentions = self.attentions(config, values, of("attention"), of("norm"))
        tables = (getattr(getattr(each, "position", None), "table", None) for each in attentions)
        table = next((each(values["heads"]) for each in tables if each is not None), None)
        return ModelSpec(
            embedding=Embedding(
                vocab_size=values["vocab"],
                hidden_size=hidden,
                norm=norm if self.embedding_norm else None,
                **of("embedding"),
            ),
            positions=self.table(length=context, size=hidden, **of("positions")) if self.learned else None,
            relative_bias=table,
            blocks=tuple(map(layer, attentions, inner)),
            final_norm=replace(norm, **of("final_norm")) if values.get("final_norm", True) else None,
            head=Head(vocab_size=values["vocab"], hidden_size=hidden, tied=tied, **of("head")),
            context_length=context,
        )

    def _mixture(
        self, config: ConfigReader, values: Mapping[str, Any], names: Mapping[str, str], dense: Any, own: dict[str, Any]
    ) -> MixtureOfExperts:
        """The mixture that the values of roles say, beside a dense feed-forward of theirs; `own` are its own fields."""
        assert self.mixtures is not None
        for role in ("experts", "top_k"):
            if own[role] is None:
                raise config.fail(names[f"mixture.{role}"], None, "a positive integer")
        experts, top_k = own["experts"], own["top_k"]
        if top_k > experts:
            told = names["mixture.experts"]
            raise config.fail(names["mixture.top_k"], top_k, f"at most {experts}, the number of experts ({told})")
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
        """Add the values that follow from others. `names` maps roles to config fields, for error messages."""
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
        """The attention of each layer: of the values of roles, and the fields of attention and of norms among them."""
        heads, head_dim, count = values["heads"], values["head_dim"], values["layers"]

        def head_norm(count: int) -> Any:
            """Return the norm of the queries or keys of `count` heads."""
            if not values.get("head_norms", self.head_norms):
                return None
            groups = {"groups": count} if self.head_norms in ("own", "apart") else {}
            apart = {"apart": True, "bias": False} if self.head_norms == "apart" else {}
            size = head_dim if self.head_norms == "same" else count * head_dim
            return self.norm(size=size, eps=values["eps"], **{**norm, **groups, **apart})

        kv_heads = values["kv_heads"] or heads
        shared: dict[str, Any] = {
            "hidden_size": values["hidden"],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "position": None if self.rotary is None else read_rotary(config, head_dim, values["context"], self.rotary),
            "q_norm": head_norm(heads),
            "k_norm": head_norm(kv_heads),
            **own,
        }
        layers = ({},) * count if self.layers is None else self.layers.get(config, values)
        found = [self.mixer(**{**shared, **each}) for each in layers]
        if self.recurrent is None:
            return found
        others = self.recurrent.get(config, values)
        return [each if other is None else other for each, other in zip(found, others, strict=True)]

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """The config fields of a tree.

        Raises:
            CannotExpress: it has a component of another kind where the fields are about one, or sizes that
                transformers refuses.
        """
        if spec.head is None:
            raise CannotExpress("the model has no language model head, but this architecture has one")
        first = next((block for block in spec.blocks if block.mixer("attention") is not None), spec.blocks[0])
        attention = of_kind(first.attention, self.mixer)
        inners: list[Any] = [block.feed_forward for block in spec.blocks]
        mixture = next((each for each in inners if hasattr(each, "expert")), None)
        dense = next((each for each in inners if not hasattr(each, "expert")), None)
        if mixture is not None and dense is None:
            apart = any("expert_size" in each.role.split() for each in self.fields.values())
            dense = mixture.shared if apart and mixture.shared is not None else mixture.expert
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
            "vocab": spec.vocab_size,
            "hidden": spec.hidden_size,
            "layers": len(spec.blocks),
            "context": spec.context_length,
            "tied": spec.tied,
            "eps": norm.eps,
            "intermediate": inner.intermediate_size,
            "head_norms": attention.q_norm is not None,
            "output_norms": first.sublayers[0].output_norm is not None,
        }
        if mixture is not None:
            width, beside = mixture.intermediate_size, mixture.shared_size
            sizes |= {"expert_size": width, "shared_size": beside, "shared_experts": beside // width}
        ends = {"embedding": spec.embedding, "positions": spec.positions, "head": spec.head}
        parts = {
            **ends,
            "attention": attention,
            "position": getattr(attention, "position", None),
            "feed_forward": inner,
            "norm": norm,
            "final_norm": norm if spec.final_norm is None else spec.final_norm,
            "branch": first.sublayers[0],
            "block": first,
            "mixture": mixture,
        }
        fields: dict[str, Any] = {}
        for name, each in self.fields.items():
            role = each.role.split()[0]
            part, _, inside = _ROLES.get(role, role).partition(".")
            if mixture is None and (part == "mixture" or part in _MIXTURE):
                continue  # no layer has what it is about
            value = getattr(parts[part], inside) if inside and each.of is None else sizes.get(role)
            if self.square and role == "head_dim" and each.default is None:
                continue  # it is no other
            if value is not None or each.default is not None or role != "context":
                outer, _, name = name.rpartition(".")
                into = fields.setdefault(outer, {}) if outer else fields
                into[name] = each.written(value) if each.of is None else each.of(spec)
        if self.rotary is not None:
            mixers = (block.mixer("attention") for block in spec.blocks)
            positions = (of_kind(mixer, Attention).position for mixer in mixers if mixer is not None)
            none = Rotary(dim=attention.head_dim, base=self.rotary.base)
            rotary = of_kind(next((each for each in positions if each is not None), none), Rotary)
            fields |= write_rotary(rotary, attention.head_dim, self.rotary)
        if self.mixtures is not None:
            fields |= self.mixtures.sparse.put(spec)
        for lens in (self.layers, self.recurrent):
            fields |= {} if lens is None else lens.put(spec)
        if len({fields[name] for name in self.together}) > 1:
            said = " and ".join(f"{name} = {fields[name]}" for name in self.together)
            raise CannotExpress(
                f"transformers needs the same value for these config fields, but the model needs {said}"
            )
        return {**fields, **self.written(spec)}

    def draw_sizes(self, chosen: Random) -> Config:
        """Draw the sizes of a tree, by role. They fit together."""
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
        """Return a random legal config.

        Args:
            chosen: what chooses.
            stated: the config fields that every file of the family states.
            own: sizes by role that are other than the drawn ones.
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
        lenses = [self.layers, self.recurrent, None if self.mixtures is None else self.mixtures.sparse]
        for lens in lenses:
            config |= {} if lens is None else lens.draw(chosen, sizes)
        config |= {name: config[self.together[0]] for name in self.together if self.together[0] in config}
        return placed(config)


Decoder = DecoderFamily
"""The name that drafts of earlier versions import."""

_ROLES = {
    **{role: f"attention.{role}" for role in ("heads", "kv_heads", "head_dim")},
    "activation": "feed_forward.activation",
}
"""Plain roles that are fields of a part."""

_MIXTURE = ("expert_size", "shared_size", "shared_experts")  # plain roles that are about mixtures alone
