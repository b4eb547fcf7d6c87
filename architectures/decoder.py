"""The tree that most families share, read from a table of config fields and written by the same table.

A field of the table names what it says by a *role*. Plain roles are sizes that the tree is built from (`hidden`,
`heads`, `eps`); a dotted role is a field of one kind of component in every layer or at an end (`attention.cap`,
`feed_forward.up_bias`, `embedding.multiplier`, `head.bias`, `norm.bias`, `branch.multiplier`). What a family has beside
such fields it says as arguments of `Decoder.read`, and adds to what `Decoder.write` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from ..components import (
    Activation,
    Attention,
    Block,
    Embedding,
    GatedFeedForward,
    Head,
    LearnedPositions,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)
from ..errors import CannotExpress
from .config import ConfigReader
from .obstacles import Kinds, of_kind
from .rope import ROTARY, USUAL_ROTARY, RotaryKind, read_rotary, write_rotary

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in get_args(Activation) if name not in ("gelu_tanh", "gelu_bloom")},
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
"""transformers' names in ACT2FN -> ours; the first spelling of a value is the one written. Missing are those that have
parameters of their own: prelu and xielu."""

ACTIVATION_NAMES = {ours: name for name, ours in reversed(ACTIVATIONS.items())}


def name_of(activation: Activation) -> str:
    """transformers' name of an activation. Raises CannotExpress: it has none."""
    if activation not in ACTIVATION_NAMES:
        raise CannotExpress(f"transformers has no name for the activation {activation!r}")
    return ACTIVATION_NAMES[activation]


def activation_named(config: ConfigReader, name: str, default: str) -> Activation:
    """The activation that a field names."""
    found: Activation = config.choice(name, default, ACTIVATIONS)
    return found


def same(value: Any) -> Any:
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
    write: Callable[[Any], Any] = same

    def value(self, config: ConfigReader, name: str) -> Any:
        """What the file says, or the default."""
        read = self.read or READERS.get(self.role)
        if read is None:
            read = next((each for kind, each in BY_DEFAULT if isinstance(self.default, kind)), None)
        if read is None:
            read = ConfigReader.optional_integer if "." not in self.role else ConfigReader.optional_number
        return read(config, name, self.default)


Fields = Mapping[str, Field]

READERS: Mapping[str, Callable[[ConfigReader, str, Any], Any]] = {
    "layers": ConfigReader.layers,
    "eps": ConfigReader.number,
    "activation": activation_named,
}
BY_DEFAULT: tuple[tuple[type, Callable[[ConfigReader, str, Any], Any]], ...] = (
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

PRE = ("attention_norm", "feed_forward_norm")
"""Where a block has its norms: before each sub-layer."""

Layers = Callable[[ConfigReader, int, int], Sequence[Mapping[str, Any]]]
"""Of a config, the number of layers and the width of a head: the fields of each layer's attention that are its own."""
FeedForwards = Callable[[ConfigReader, int, Any], Sequence[Any]]
"""Of a config, the number of layers and the feed-forward that the fields say: what stands in each layer."""


def sliding(every: int, window: int | None = 4096) -> Layers:
    """The windows of families that have `layer_types` and `sliding_window`.

    Args:
        every: one layer of so many sees all tokens, where `layer_types` does not say which.
        window: of the config class.
    """

    def windows(config: ConfigReader, layers: int, _head_dim: int) -> list[Mapping[str, Any]]:
        usual = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
        types = config.layer_types(usual)
        width = config.optional_integer("sliding_window", window)
        if width is None and "sliding_attention" in types:
            raise config.fail("sliding_window", width, "a number, since layer_types has sliding_attention")
        return [{"window": width if kind == "sliding_attention" else None} for kind in types]

    return windows


def write_sliding(spec: ModelSpec) -> dict[str, Any]:
    """The config fields of each layer's window, for what `sliding` reads."""
    windows = [block.attention.window for block in spec.blocks]
    return {
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


@dataclass(frozen=True)
class Decoder:
    """What is the same in all trees of a family.

    fields: what its config.json says. norm, inner: the kinds of its norms and of its feed-forwards. norms: which a
    block has, by their names in it. fixed: values of roles that no field says, or functions of those that the fields
    say. rotary: what is assumed of its positions; None where attention has them from `layers`, or has none. learned:
    whether there is a table of positions, of the kind `table`. The role "final_norm" says whether one stands behind the
    last layer, as it does where nobody says so. head_norms: how queries and keys are normed: every head by the "same"
    norm or by its "own", or all heads at once as a "whole"; where a field has the role of that name, it says whether.
    embedding_norm: whether the embedding has a norm. layers, feed_forwards: what differs by layer. written: the config
    fields beside those of the table.
    whole_heads: whether transformers' config class refuses a hidden size that is no multiple of the heads, needless
    beside head_dim.
    """

    fields: Fields
    norm: type[Any] = RMSNorm
    inner: type[Any] = GatedFeedForward
    norms: tuple[str, ...] = PRE
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotary: RotaryKind | None = USUAL_ROTARY
    learned: bool = False
    table: type[Any] = LearnedPositions
    head_norms: Literal["", "same", "own", "whole"] = ""
    embedding_norm: bool = False
    layers: Layers | None = None
    feed_forwards: FeedForwards | None = None
    written: Callable[[ModelSpec], Mapping[str, Any]] = lambda _: {}
    whole_heads: bool = False

    @property
    def kinds(self) -> Kinds:
        """The components of its trees, for `Architecture.kinds`."""
        positions = {self.table} if self.learned else ROTARY if "attention.position" not in self.fixed else ()
        return frozenset({self.norm, Attention, self.inner, *positions})

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        """The tree of a config.

        Args:
            config: what is read.
            more: values of roles that no field says, with two underscores for a dot.

        Raises:
            ConfigError: a field of another type or range.
        """
        values: dict[str, Any] = {"kv_heads": None, "head_dim": None, "intermediate": None}
        names: dict[str, str] = {}
        for name, each in self.fields.items():
            roles = each.role.split()
            names |= dict.fromkeys(roles, name)
            values |= dict.fromkeys(roles, each.value(config, name))
        hidden, heads, count, context = (values[role] for role in ("hidden", "heads", "layers", "context"))
        head_dim = values["head_dim"]
        if head_dim is None:
            if hidden % heads:
                raise config.fail(names["hidden"], hidden, f"a multiple of {names['heads']} ({heads})")
            head_dim = values["head_dim"] = hidden // heads
        fixed = {**self.fixed, **{role.replace("__", "."): value for role, value in more.items()}}
        values |= {role: value(values) if callable(value) else value for role, value in fixed.items()}
        tied = values["tied"]
        if config.outer is not None:  # of a composite model it is the whole that says so
            tied = config.outer.boolean(names["tied"], tied)

        def of(part: str) -> dict[str, Any]:
            """The dotted roles of a part."""
            return {role.partition(".")[2]: v for role, v in values.items() if role.startswith(f"{part}.")}

        norm = self.norm(size=hidden, eps=values["eps"], **of("norm"))

        def head_norm(count: int) -> Any:
            """Of the queries or keys of so many heads."""
            if not values.get("head_norms", self.head_norms):
                return None
            groups = {"groups": count} if self.head_norms == "own" else {}
            size = head_dim if self.head_norms == "same" else count * head_dim
            return self.norm(size=size, eps=values["eps"], **of("norm"), **groups)

        kv_heads = values["kv_heads"] or heads
        dense = self.inner(
            hidden_size=hidden,
            intermediate_size=values["intermediate"] or 4 * hidden,
            activation=values["activation"],
            **of("feed_forward"),
        )
        shared: dict[str, Any] = {
            "hidden_size": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "position": None if self.rotary is None else read_rotary(config, head_dim, context, self.rotary),
            "q_norm": head_norm(heads),
            "k_norm": head_norm(kv_heads),
            **of("attention"),
        }

        @cache
        def layer(attention: Attention, feed_forward: Any) -> Block:
            sublayers = []
            for mixer in (attention, feed_forward):
                places = [name.removeprefix(f"{mixer.slot}_") for name in self.norms if name.startswith(mixer.slot)]
                sublayers.append(SubLayer(mixer=mixer, **dict.fromkeys(places, norm), **of("branch")))
            return Block(sublayers=tuple(sublayers), **of("block"))

        own = ({},) * count if self.layers is None else self.layers(config, count, head_dim)
        inner = (dense,) * count if self.feed_forwards is None else self.feed_forwards(config, count, dense)
        return ModelSpec(
            embedding=Embedding(
                vocab_size=values["vocab"],
                hidden_size=hidden,
                norm=norm if self.embedding_norm else None,
                **of("embedding"),
            ),
            positions=self.table(length=context, size=hidden, **of("positions")) if self.learned else None,
            blocks=tuple(map(layer, (Attention(**{**shared, **each}) for each in own), inner)),
            final_norm=norm if values.get("final_norm", True) else None,
            head=Head(vocab_size=values["vocab"], hidden_size=hidden, tied=tied, **of("head")),
            context_length=context,
        )

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """The config fields of a tree.

        Raises:
            CannotExpress: it has a component of another kind where the fields are about one, or sizes that
                transformers refuses.
        """
        first = spec.blocks[0]
        attention, inner = of_kind(first.attention, Attention), first.feed_forward
        inner = of_kind(getattr(inner, "expert", inner), self.inner)
        if self.whole_heads and spec.hidden_size % attention.heads:
            raise CannotExpress(f"transformers refuses {spec.hidden_size} wide with {attention.heads} heads")
        norm = next(iter(first.norms().values()), spec.final_norm)
        if norm is None:
            raise CannotExpress("a model without any norm")
        sizes = {
            "vocab": spec.vocab_size,
            "hidden": spec.hidden_size,
            "layers": len(spec.blocks),
            "context": spec.context_length,
            "tied": spec.head.tied,
            "eps": norm.eps,
            "intermediate": inner.intermediate_size,
            "head_norms": attention.q_norm is not None,
        }
        ends = {"embedding": spec.embedding, "positions": spec.positions, "head": spec.head}
        parts = {
            **ends,
            "attention": attention,
            "feed_forward": inner,
            "norm": norm,
            "branch": first.sublayers[0],
            "block": first,
        }
        fields: dict[str, Any] = {}
        for name, each in self.fields.items():
            role = each.role.split()[0]
            part, _, inside = ROLES.get(role, role).partition(".")
            value = getattr(parts[part], inside) if inside else sizes[role]
            if value is not None or each.default is not None or role != "context":
                fields[name] = name_of(value) if role == "activation" else each.write(value)
        if self.rotary is not None:
            fields |= write_rotary(of_kind(attention.position, Rotary), attention.head_dim, self.rotary)
        return {**fields, **self.written(spec)}


ROLES = {
    **{role: f"attention.{role}" for role in ("heads", "kv_heads", "head_dim")},
    "activation": "feed_forward.activation",
}
"""Plain roles that are fields of a part."""
