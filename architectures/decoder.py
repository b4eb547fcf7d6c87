"""The tree that most families share, read from a table of config fields and written by the same table.

A field of the table names what it says by a *role*. Plain roles are sizes that the tree is built from (`hidden`,
`heads`, `eps`); a dotted role is a field of one kind of component in every layer or at an end (`attention.cap`,
`feed_forward.up_bias`, `embedding.multiplier`, `head.bias`, `norm.bias`, `branch.multiplier`). What a family has beside
such fields it says as arguments of `Decoder.read`, and adds to what `Decoder.write` gives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from msgspec.structs import replace

from ..components import (
    LEARNT,
    MOST_EXPERTS,
    Activation,
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
from .obstacles import Kinds, of_kind
from .rope import ROTARY, USUAL_ROTARY, RotaryKind, read_rotaries, read_rotary, write_rotaries, write_rotary

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in get_args(Activation) if name not in ("gelu_tanh", "gelu_bloom", *LEARNT)},
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
"""transformers' names in ACT2FN -> ours; the first spelling of a value is the one written. Missing are those that have
parameters of their own: prelu, and xielu, which a family names where it has it."""

_ACTIVATION_NAMES = {ours: name for name, ours in reversed(ACTIVATIONS.items())}


def name_of(activation: Activation) -> str:
    """transformers' name of an activation. Raises CannotExpress: it has none."""
    if activation not in _ACTIVATION_NAMES:
        raise CannotExpress(f"transformers has no name for the activation {activation!r}")
    return _ACTIVATION_NAMES[activation]


def activation_named(config: ConfigReader, name: str, default: str) -> Activation:
    """The activation that a field names."""
    found: Activation = config.choice(name, default, ACTIVATIONS)
    return found


def _same(value: Any) -> Any:
    """The value, which is written as it is."""
    return value


class Field(NamedTuple):
    """What a field of config.json says.

    role: see the module's docstring; several are apart by spaces, and all have the one value. default: what the
    family's config class takes where it is absent. read: `read(config, name, default)`, chosen by the role and the
    default where it is None. write: the value in the tree -> the value in the file.
    """

    role: str
    default: Any = None
    read: Callable[[ConfigReader, str, Any], Any] | None = None
    write: Callable[[Any], Any] = _same

    def value(self, config: ConfigReader, name: str) -> Any:
        """What the file says, or the default; of the name "inner.name" what the object in the field `inner` says."""
        outer, _, name = name.rpartition(".")
        config = config.inner(outer) if outer else config
        read = self.read or READERS.get(self.role)
        if read is None:
            read = next((each for kind, each in _BY_DEFAULT if isinstance(self.default, kind)), None)
        if read is None:
            read = ConfigReader.optional_integer if "." not in self.role else ConfigReader.optional_number
        return read(config, name, self.default)


Fields = Mapping[str, Field]


def _number_of_experts(config: ConfigReader, name: str, default: int | None) -> int | None:
    """As many as a tree may have; None where it is null or absent, which is wrong where there is a mixture."""
    return None if config.raw(name, default) is None else config.integer(name, default, most=MOST_EXPERTS)


def none_or_more(config: ConfigReader, name: str, default: int) -> int:
    """A number that may be 0."""
    value = config.raw(name, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise config.fail(name, value, "an integer from 0")
    return value


READERS: Mapping[str, Callable[[ConfigReader, str, Any], Any]] = {
    "layers": ConfigReader.layers,
    "mixture.experts": _number_of_experts,
    "mixture.top_k": ConfigReader.optional_integer,
    "eps": ConfigReader.number,
    "activation": activation_named,
}
_BY_DEFAULT: tuple[tuple[type, Callable[[ConfigReader, str, Any], Any]], ...] = (
    (bool, ConfigReader.boolean),
    (int, ConfigReader.integer),
    (float, ConfigReader.number),
)


def with_defaults(fields: Fields, **defaults: Any) -> dict[str, Field]:
    """The table with other defaults, by the fields' names."""
    return {**fields, **{name: fields[name]._replace(default=value) for name, value in defaults.items()}}


USUAL: Fields = {
    "vocab_size": Field("vocab", 32000),
    "hidden_size": Field("hidden", 4096),
    "intermediate_size": Field("intermediate", 11008),
    "num_hidden_layers": Field("layers", 32),
    "num_attention_heads": Field("heads", 32),
    "num_key_value_heads": Field("kv_heads"),
    "head_dim": Field("head_dim"),
    "hidden_act": Field("activation", "silu"),
    "max_position_embeddings": Field("context", 2048),
    "rms_norm_eps": Field("eps", 1e-6),
    "tie_word_embeddings": Field("tied", False),
}
"""The fields of LlamaConfig, which most config classes have."""

BIASED = dict.fromkeys(
    ("attention.qkv_bias", "attention.output_bias", "feed_forward.up_bias", "feed_forward.down_bias"), True
)
"""`Decoder.fixed` of families whose linears in layers all have biases."""

PRE = ("attention_norm", "feed_forward_norm")  # where a block has its norms: before each sub-layer

Layers = Callable[[ConfigReader, int, int], Sequence[Mapping[str, Any]]]
"""Of a config, the number of layers and the width of a head: the fields of each layer's attention that are its own."""


def sliding(every: int, window: int | None = 4096, pattern: str = "", first: int = -1) -> Layers:
    """The windows of families that have `layer_types` and `sliding_window`.

    Args:
        every: one layer of so many sees all tokens, and with 0 none does, where `layer_types` does not say which.
        window: of the config class.
        pattern: the field that says another `every`.
        first: a layer that sees all tokens.
    """

    def windows(config: ConfigReader, layers: int, _head_dim: int) -> list[Mapping[str, Any]]:
        apart = config.integer(pattern, every) if pattern else every
        whole = set(range(first % apart, layers, apart)) if apart else ()
        usual = ["full_attention" if layer in whole else "sliding_attention" for layer in range(layers)]
        types = config.layer_types(usual)
        width = config.optional_integer("sliding_window", window)
        if width is None and "sliding_attention" in types:
            raise config.fail("sliding_window", width, "a number, since layer_types has sliding_attention")
        return [{"window": width if kind == "sliding_attention" else None} for kind in types]

    return windows


def turned_by_kind(windows: Layers, kinds: Mapping[str, RotaryKind], context: Field) -> Layers:
    """The windows, and for layers with one and without rotary positions of their own, by `rope_parameters` of their
    kinds, "full_attention" and "sliding_attention".
    """

    def layers(config: ConfigReader, count: int, head_dim: int) -> list[Mapping[str, Any]]:
        own = windows(config, count, head_dim)
        length = context.value(config, "max_position_embeddings")
        rotaries = read_rotaries(config, head_dim, length, kinds)
        names = ("full_attention" if each["window"] is None else "sliding_attention" for each in own)
        return [{**each, "position": rotaries[name]} for each, name in zip(own, names, strict=True)]

    return layers


def write_by_kind(kinds: Mapping[str, RotaryKind]) -> Callable[[ModelSpec], dict[str, Any]]:
    """What writes the config fields that `turned_by_kind` reads."""

    def written(spec: ModelSpec) -> dict[str, Any]:
        fields, first = write_sliding(spec), of_kind(spec.blocks[0].attention, Attention)
        rotaries = {kind: Rotary(dim=first.head_dim, base=usual.base) for kind, usual in kinds.items()}
        for block, kind in zip(spec.blocks, fields["layer_types"], strict=True):
            rotaries[kind] = of_kind(of_kind(block.attention, Attention).position, Rotary)
        return {**fields, **write_rotaries(rotaries)}

    return written


def turned_in_windows(windows: Layers) -> Layers:
    """The windows, and no positions in layers that see all tokens (Cohere 2, EXAONE 4)."""

    def layers(config: ConfigReader, count: int, head_dim: int) -> list[Mapping[str, Any]]:
        return [
            each if each["window"] is not None else {**each, "position": None}
            for each in windows(config, count, head_dim)
        ]

    return layers


def write_sliding(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of each layer's window, for what `sliding` reads."""
    windows = [of_kind(block.attention, Attention).window for block in spec.blocks]
    return {
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


_Recurrent = Callable[[ConfigReader, Mapping[str, Any]], Sequence[Any]]
"""Of a config and the values of roles what stands in attention's place in each layer; None where attention does."""


def one_of(config: ConfigReader, layers: int, usual: list[str] | None, other: str) -> Sequence[str]:
    """The kind of each layer by `layer_types`, full attention or the `other`; `usual` where it is null or absent, None
    where it may not be.

    Raises:
        ConfigError: another kind or number of layers, or no attention at all, with which transformers' cache fails.
    """
    known = ("full_attention", other)
    types = config.kinds_of_layers()
    types = usual if types is None else types
    if not isinstance(types, list) or len(types) != layers or any(each not in known for each in types):
        wanted = f"{layers} values of {' or '.join(known)}, as many as num_hidden_layers"
        raise config.fail("layer_types", types, wanted)
    if "full_attention" not in types:
        raise config.fail(
            "layer_types", types, "at least one full_attention layer: without one, transformers' cache fails"
        )
    return types


_Sparse = Callable[[ConfigReader, int], Sequence[bool]]
"""Of a config and the number of layers: which of them have a mixture of experts."""


def _every(_config: ConfigReader, layers: int) -> Sequence[bool]:
    """All layers have one."""
    return (True,) * layers


def after(name: str, default: int) -> dict[str, Any]:
    """`sparse` and `written` where the first layers are dense, as many as a field says."""

    def sparse(config: ConfigReader, layers: int) -> Sequence[bool]:
        first = none_or_more(config, name, default)
        return [layer >= first for layer in range(layers)]

    def written(sparse: Sequence[bool]) -> Mapping[str, Any]:
        return {name: next((layer for layer, each in enumerate(sparse) if each), len(sparse))}

    return {"sparse": sparse, "written": written}


def by_type(first: Callable[[ConfigReader], int]) -> dict[str, Any]:
    """`sparse` and `written` where `mlp_layer_types` says "dense" or "sparse" of each layer.

    Args:
        first: the first layer that has a mixture where it does not say.
    """

    def sparse(config: ConfigReader, layers: int) -> Sequence[bool]:
        start, types = first(config), config.raw("mlp_layer_types")
        if types is None:
            return [layer >= start for layer in range(layers)]
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(each not in ("dense", "sparse") for each in types)
        ):
            raise config.fail("mlp_layer_types", types, f"{layers} values of dense or sparse")
        return [each == "sparse" for each in types]

    def written(sparse: Sequence[bool]) -> Mapping[str, Any]:
        return {"mlp_layer_types": ["sparse" if each else "dense" for each in sparse]}

    return {"sparse": sparse, "written": written}


@dataclass(frozen=True)
class Mixtures:
    """What is the same in all mixtures of a family, beside the fields of its table with the roles of a mixture.

    sparse: which layers have one; written: the config fields that say so. expert, shared: fields of an expert's record,
    and of the shared one's, that differ from those of a dense layer. normed: whether a norm stands behind a mixture,
    where none stands behind what is dense.
    """

    sparse: _Sparse = _every
    written: Callable[[Sequence[bool]], Mapping[str, Any]] = lambda _: {}
    expert: Mapping[str, Any] = field(default_factory=lambda: {"fused": True})
    shared: Mapping[str, Any] = field(default_factory=dict)
    normed: bool = False


@dataclass(frozen=True)
class Decoder:
    """What is the same in all trees of a family.

    fields: what its config.json says. norm, mixer, inner: the kinds of its norms, of its attention (another than
    `Attention` is made by `attentions`) and of its feed-forwards. norms: which a block has, by their names in it, or a
    function of the values of roles; what stands in attention's place has attention's. fixed: values of roles that no
    field says, or functions of those that the fields say. rotary: what is assumed of its positions; None where
    attention has them from `layers`, or has none. learned: whether there is a table of positions, of the kind `table`.
    The role "final_norm" says whether one stands behind the last layer, as it does where nobody says so. head_norms:
    how queries and keys are normed: every head by the "same" norm or by its "own" (with a tensor for each head "apart",
    and without bias), or all heads at once as a "whole";
    where a field has the role of that name, it says whether. embedding_norm: whether the embedding has a norm. layers:
    what differs by layer. recurrent: of a family in which not all layers have attention. mixtures: of a family that has
    mixtures of experts; the plain roles of one are `expert_size` (an expert's width, that of a dense layer where no
    field has it), `shared_size` (the shared expert's) or `shared_experts` (how many experts' widths that is), the
    dotted ones are `mixture.experts`, `mixture.top_k` and so on. written: the config fields beside those of the table.
    whole_heads: whether transformers' config class refuses a hidden size that is no multiple of the heads, needless
    beside head_dim. square: whether all heads together must be as wide as the stream, head_dim or not.
    """

    fields: Fields
    norm: type[Any] = RMSNorm
    mixer: type[Any] = Attention
    inner: type[Any] = GatedFeedForward
    norms: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]] = PRE
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotary: RotaryKind | None = USUAL_ROTARY
    learned: bool = False
    table: type[Any] = LearnedPositions
    head_norms: Literal["", "same", "own", "apart", "whole"] = ""
    embedding_norm: bool = False
    layers: Layers | None = None
    recurrent: _Recurrent | None = None
    mixtures: Mixtures | None = None
    written: Callable[[ModelSpec], Mapping[str, Any]] = lambda _: {}
    whole_heads: bool = False
    square: bool = False

    @property
    def kinds(self) -> Kinds:
        """The components of its trees, for `Architecture.kinds`."""
        positions = {self.table} if self.learned else ROTARY if "attention.position" not in self.fixed else ()
        mixtures = () if self.mixtures is None else (MixtureOfExperts,)
        return frozenset({self.norm, self.mixer, self.inner, *positions, *mixtures})

    def architecture(self, name: str, hf_class: str, leaves: tuple[Leaf, ...], **more: Any) -> Architecture:
        """The family of these trees; `more` are other fields of it, where they are not the usual ones."""
        usual = {
            "model_types": (name,),
            "hf_config": hf_class.replace("ForCausalLM", "Config"),
            "kinds": self.kinds,
            "read": self.read,
            "write": self.write,
            "prefix": "model.",
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
            """The dotted roles of a part; a scale that is null is the usual one."""
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
            sparse = self.mixtures.sparse(config, count)
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
            final_norm=norm if values.get("final_norm", True) else None,
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
            raise config.fail(names["mixture.top_k"], top_k, f"at most {told} ({experts})")
        width = values.get("expert_size") or dense.intermediate_size
        expert = replace(dense, intermediate_size=width, **self.mixtures.expert)
        size = values.get("shared_size") or width * (values.get("shared_experts") or 0)
        if size > 2**31 - 1:
            raise config.fail(
                names["shared_experts"],
                values["shared_experts"],
                "fewer experts: together they must have less than 2^31 units",
            )
        shared = replace(dense, intermediate_size=size, **self.mixtures.shared) if size else None
        return MixtureOfExperts(hidden_size=dense.hidden_size, expert=expert, shared=shared, **own)

    def complete(self, config: ConfigReader, values: dict[str, Any], names: Mapping[str, str]) -> None:
        """Put into the values of roles what follows from the others; `names` are the fields that roles have."""
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
            """Of the queries or keys of so many heads."""
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
        layers = ({},) * count if self.layers is None else self.layers(config, count, head_dim)
        found = [self.mixer(**{**shared, **each}) for each in layers]
        if self.recurrent is None:
            return found
        others = self.recurrent(config, values)
        return [each if other is None else other for each, other in zip(found, others, strict=True)]

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """The config fields of a tree.

        Raises:
            CannotExpress: it has a component of another kind where the fields are about one, or sizes that
                transformers refuses.
        """
        if spec.head is None:
            raise CannotExpress("the model has no head, but this family outputs logits")
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
            raise CannotExpress("the model has no norm, but this family needs one")
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
            value = getattr(parts[part], inside) if inside else sizes[role]
            if self.square and role == "head_dim" and each.default is None:
                continue  # it is no other
            if value is not None or each.default is not None or role != "context":
                outer, _, name = name.rpartition(".")
                into = fields.setdefault(outer, {}) if outer else fields
                into[name] = name_of(value) if role == "activation" and each.write is _same else each.write(value)
        if self.rotary is not None:
            mixers = (block.mixer("attention") for block in spec.blocks)
            positions = (of_kind(mixer, Attention).position for mixer in mixers if mixer is not None)
            none = Rotary(dim=attention.head_dim, base=self.rotary.base)
            rotary = of_kind(next((each for each in positions if each is not None), none), Rotary)
            fields |= write_rotary(rotary, attention.head_dim, self.rotary)
        if self.mixtures is not None:
            fields |= self.mixtures.written([hasattr(each, "expert") for each in inners])
        return {**fields, **self.written(spec)}


_ROLES = {
    **{role: f"attention.{role}" for role in ("heads", "kv_heads", "head_dim")},
    "activation": "feed_forward.activation",
}
"""Plain roles that are fields of a part."""

_MIXTURE = ("expert_size", "shared_size", "shared_experts")  # plain roles that are about mixtures alone
