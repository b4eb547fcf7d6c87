"""Config fields: what their values are in a ModelSpec, and how they are read and written.

A table maps the name of a field in config.json to a `Field`. `USUAL` has the fields of LlamaConfig. The table of a
family is `USUAL` with other defaults and with further fields.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args

from ..components import LEARNT, MOST_EXPERTS, Activation, ModelSpec
from ..errors import CannotExpress
from .config import FLOAT32_MAX, ConfigReader
from .draws import ODD, WINDOWS, Config, Sizes, among
from .releases import since

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in get_args(Activation) if name not in ("gelu_tanh", "gelu_bloom", *LEARNT)},
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
"""transformers' names of activations (ACT2FN) -> gptkit's names. If an activation has several names in transformers,
gptkit writes the first. Activations with parameters are not listed: prelu, and xielu, which its only family adds."""


_ACTIVATION_NAMES = {ours: name for name, ours in reversed(ACTIVATIONS.items())}


def name_of(activation: Activation) -> str:
    """Return transformers' name of an activation. Raises CannotExpress if it has none."""
    if activation not in _ACTIVATION_NAMES:
        raise CannotExpress(f"transformers has no name for the activation {activation!r}")
    return _ACTIVATION_NAMES[activation]


def activation_named(config: ConfigReader, name: str, default: str) -> Activation:
    """Return the activation that the config field `name` names."""
    activation: Activation = config.choice(name, default, ACTIVATIONS)
    return activation


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


class Field(NamedTuple):
    """A field of config.json: what its value is in a ModelSpec, and how it is read and written."""

    role: str
    """What the value is in a ModelSpec: a size such as "hidden", or a component's field such as "attention.cap" (see
    `decoder`). If there are several roles, separated by spaces, all of them have the value."""
    default: Any = None
    """The default of the field in the family's config class."""
    read: Callable[[ConfigReader, str, Any], Any] | None = None
    """`read(config, name, default)` returns the value for the ModelSpec. If None, the role and the default decide how
    the field is read."""
    write: Callable[[Any], Any] = same
    """Converts the value in the ModelSpec to the value in config.json."""
    of: Callable[[ModelSpec], Any] | None = None
    """`of(spec)` returns the value in config.json if the role, such as "own.pre_norm", is not a field of a component.
    `DecoderFamily.fixed` computes the values of other roles from this one. Without `of`, such a field is only read."""
    draw: Callable[[Random, Sizes], Any] | None = None
    """`draw(chosen, sizes)` returns a random value for config.json. If None, the role and the default decide how it is
    drawn."""

    def value(self, config: ConfigReader, name: str) -> Any:
        """Return the value for the ModelSpec, from the config or the default.

        `name` is the name of the config field. "inner.name" is the field `name` of the object `inner`.
        """
        *outer, name = name.split(".")
        for place in outer:
            config = config.inner(place)
        return self._reader(config, name, self.default)

    @property
    def _reader(self) -> Callable[[ConfigReader, str, Any], Any]:
        """The function that reads the field, by its `read`, its role or its default."""
        read = self.read or READERS.get(self.role) or READERS.get(self.role.rpartition(".")[2])
        read = read or next((read for kind, read in _BY_DEFAULT if isinstance(self.default, kind)), None)
        return read or (ConfigReader.optional_number if "." in self.role else ConfigReader.optional_integer)

    def written(self, value: Any) -> Any:
        """Convert the value in the ModelSpec to the value in config.json.

        Raises CannotExpress if the value is None, and the field needs a number.
        """
        if value is None and self._reader in (ConfigReader.integer, ConfigReader.layers, ConfigReader.number):
            role = self.role.split()[0]
            needed = "a context length" if role == "context" else role
            raise CannotExpress(f"this architecture needs {needed}, but the model has none")
        return name_of(value) if self._names_activation and self.write is same else self.write(value)

    @property
    def _names_activation(self) -> bool:
        return self.role.split()[0].endswith("activation")

    def drawn(self, name: str, chosen: Random, sizes: Sizes) -> Config:
        """Return a config with a random legal value of this field, and with no other fields.

        The config is empty if gptkit does not know whether other values than the default are legal.

        Args:
            name: the field's name in config.json.
            chosen: the random number generator.
            sizes: random sizes by role. They are legal together, so the field has to have the size of its role.
        """
        role = self.role.split()[0]
        if self.draw is not None:
            return {name: self.draw(chosen, sizes)}
        if self._names_activation and isinstance(self.default, str):
            return {name: chosen.choice((self.default, sizes.get(role) or chosen.choice([*ACTIVATIONS])))}
        if role in sizes:
            return {name: sizes[role]}
        if isinstance(self.default, bool):
            return {name: chosen.choice((True, False))}
        if isinstance(self.default, float):
            return {name: chosen.choice((self.default, 0.3, 2.5))}
        if role.endswith((".cap", ".clip")):
            return {name: chosen.choice((None, 0.7, 5.0))}
        if role.endswith(".window"):
            return {name: chosen.choice((None, *WINDOWS))}
        return {}


Fields = Mapping[str, Field]
_Value = TypeVar("_Value")


def size(role: str, default: int, *values: int) -> Field:
    """Return a field that is a positive integer.

    Args:
        role: what the value is in a ModelSpec; see `Field.role`.
        default: the default of the field in the family's config class.
        values: the values that the field may have in random configs.
    """
    return Field(role, default, draw=among(*(values or ODD)))


def constant(role: str, value: Any, why: str) -> Field:
    """Return a field for which gptkit accepts only `value`.

    Args:
        role: what the value is in a ModelSpec; see `Field.role`.
        value: the value.
        why: the reason for refusing other values, for the error message.
    """

    def read(config: ConfigReader, name: str, default: Any) -> Any:
        stated = config.raw(name, default)
        if type(stated) is not type(default) or stated != default:
            raise config.fail(name, stated, f"{str(default).lower()}: {why}")
        return stated

    return Field(role, value, read, of=lambda _: value, draw=lambda *_: value)


def multiple(role: str, default: int, of: int) -> Field:
    """Return a field whose value must be a positive multiple of `of`. Writing another value raises CannotExpress."""

    def read(config: ConfigReader, name: str, default: int) -> int:
        value = config.integer(name, default)
        if value % of:
            raise config.fail(name, value, f"a multiple of {of}")
        return value

    def write(value: int) -> int:
        if value % of:
            raise CannotExpress(f"this architecture needs a number of {role} that is a multiple of {of}, not {value}")
        return value

    return Field(role, default, read, write)


def read_fields(table: Fields, config: ConfigReader) -> dict[str, Any]:
    """Return the values that a config has for all fields in a table, by role."""
    values: dict[str, Any] = {}
    for name, field in table.items():
        values |= dict.fromkeys(field.role.split(), field.value(config, name))
    return values


def write_fields(table: Fields, component: Any) -> Config:
    """Return the config fields of a component, from a table whose roles are attributes of the component."""
    return {name: field.written(getattr(component, field.role)) for name, field in table.items()}


def of_part(values: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the values of the roles that begin with `part` and a dot, without this prefix.

    An `attention.scale` of None is left out, so that the default scale applies.
    """
    stated = {role: value for role, value in values.items() if role != "attention.scale" or value is not None}
    return {role.partition(".")[2]: value for role, value in stated.items() if role.startswith(f"{part}.")}


def component(spec: ModelSpec, name: str) -> Any:
    """Return the first component of a tree with this name, or None.

    It is a part of the tree ("layer_inputs"), of a layer ("recurrence", "altup", "attention_low_rank"), of a mixer
    ("position", "temperature") or of the head ("transform"). "block" is the first layer, "attention_branch" the first
    sub-layer with attention, and "mixture" the first mixture of experts.
    """
    if name == "block" or name in spec.__struct_fields__:
        return spec.blocks[0] if name == "block" else getattr(spec, name)
    for block in spec.blocks:
        mixers = [sublayer.mixer for sublayer in block.sublayers]
        named: dict[str, Any] = {f"{sublayer.mixer.slot}_branch": sublayer for sublayer in block.sublayers}
        named["mixture"] = next((mixer for mixer in mixers if hasattr(mixer, "expert")), None)
        for entries in (named, block.entries(), *(mixer.entries() for mixer in mixers)):
            if entries.get(name) is not None:
                return entries[name]
    return getattr(spec.head, name, None)


def write_tree(table: Fields, spec: ModelSpec, parts: Mapping[str, Any] = MappingProxyType({}), **sizes: Any) -> Config:
    """Return the config fields of a tree. Fields of components that the tree does not have are left out.

    Args:
        table: the fields. A dotted role names a `component` and its attribute: "layer_inputs.table.vocab_size".
        spec: the tree.
        parts: components by the first part of dotted roles. They replace the first components with these names.
        sizes: the values of roles without a dot, except `vocab`, `hidden`, `layers`, `tied` and `context`.
    """
    sizes |= {"vocab": spec.vocab_size, "hidden": spec.hidden_size, "layers": len(spec.blocks), "tied": spec.tied}
    sizes["context"] = spec.context_length
    fields: Config = {}
    for name, declared in table.items():
        part, _, inside = declared.role.split()[0].partition(".")
        if declared.of is not None:
            value = declared.of(spec)
        elif inside:
            if (node := parts[part] if part in parts else component(spec, part)) is None:
                continue
            value = declared.written(attrgetter(inside)(node))
        elif part in sizes and (sizes[part] is not None or declared.default is not None):
            value = declared.written(sizes[part])
        else:
            continue
        *outer, name = name.split(".")
        into = fields
        for place in outer:
            into = into.setdefault(place, {})
        into[name] = value
    return fields


def draw_fields(table: Fields, chosen: Random, sizes: Sizes) -> Config:
    """Return random legal values of a table's fields.

    Other fields than sizes are left out with a probability of 0.3.
    """
    config: Config = {}
    for name, field in table.items():
        drawn = field.drawn(name, chosen, sizes)
        needed = type(field.default) is int or (field.role in sizes and field.role not in ("activation", "eps"))
        config |= drawn if needed or chosen.random() < 0.7 else {}
    return config


def _number_of_experts(config: ConfigReader, name: str, default: int | None) -> int | None:
    """Return the number of experts in a config field, or None if the field is null or absent."""
    return None if config.raw(name, default) is None else config.integer(name, default, most=MOST_EXPERTS)


def same_in_all_layers(config: ConfigReader, name: str, default: int) -> int | None:
    """Return the number of experts in a config field.

    The field is a number, or a list with the same number for every layer.
    """
    value = config.raw(name, default)
    layers = config.layers("num_hidden_layers", 32)
    if isinstance(value, list) and len(value) == layers and len({str(number) for number in value}) == 1:
        config = ConfigReader({name: value[0]})
    return _number_of_experts(config, name, default)


def none_or_more(config: ConfigReader, name: str, default: int, *, most: int = 2**31 - 1) -> int:
    """Return the value of a config field that must be an integer from 0 to `most`."""
    value = config.raw(name, default)
    if type(value) is not int or not 0 <= value <= most:
        bound = "" if most == 2**31 - 1 else f" and at most {most:,}"
        raise config.fail(name, value, f"an integer of at least 0{bound}")
    return value


def below(
    role: str, default: int | None, limit: str, usual: int, *values: int | None, least: int = 1, why: str = ""
) -> Field:
    """Return a config field with an integer of at least 0 that is less than another field.

    If its default is None, it may be null.

    Args:
        role: the field's role.
        default: its default.
        limit: the other field.
        usual: the default of the other field.
        values: a random config has one of these values.
        least: the smallest difference to the other field.
        why: the reason why it must not be null, for the error message if the tree has None.
    """

    def read(config: ConfigReader, name: str, default: int | None) -> int | None:
        value, most = config.raw(name, default), config.integer(limit, usual) - least
        if value is None and default is None:
            return None
        if type(value) is not int or not 0 <= value <= most:
            null = "null, or " if default is None else ""
            raise config.fail(name, value, f"{null}an integer from 0 to {most}, which is {limit} - {least}")
        return value

    def write(value: int | None) -> int | None:
        if value is None and why:
            raise CannotExpress(why)
        return value

    return Field(role, default, read, write, draw=among(*values) if values else None)


def times_hidden(role: str, default: int, part: str, hidden: str, usual: int, most: int = 2**31 - 1) -> Field:
    """Return a config field that is multiplied by the hidden size.

    Writing raises CannotExpress for a value that is not a multiple of the hidden size.

    Args:
        role: the field's role.
        default: its default.
        part: the place of the product in the tree, as a dotted role.
        hidden: the config field of the hidden size.
        usual: the default of that field.
        most: the largest legal value.
    """
    name, _, inside = part.partition(".")

    def read(config: ConfigReader, name: str, default: int) -> int:
        width = config.integer(name, default, most=most) * config.integer(hidden, usual)
        if width >= 2**31:
            raise config.fail(name, width // config.integer(hidden, usual), f"less than 2^31 / {hidden}")
        return width

    def times(spec: ModelSpec) -> int:
        return multiple_of(getattr(component(spec, name), inside), spec.hidden_size)

    return Field(role, default, read, of=times, draw=among(1, 2, 3))


def meta_width(width: int, factor: float | None, multiple: int) -> int:
    """Return two thirds of a width, times a factor, rounded up to a multiple.

    This is Meta's rule for the width of gated feed-forwards.
    """
    units = int(2 * width / 3)
    return multiple * -(-(units if factor is None else int(factor * units)) // multiple)


def adjusted_width(name: str, default: int, switch: str, factor: str, multiple: str) -> dict[str, Field]:
    """Return the config fields of a feed-forward's width that `meta_width` changes, unless the config switches it off.

    Args:
        name: the config field of the width.
        default: its default.
        switch: the config field that switches the rule off.
        factor: the config field of the factor, by default 1. If it is null, the width is not rounded up.
        multiple: the config field of the multiple, by default 256.
    """

    def read(config: ConfigReader, name: str, default: int) -> int:
        stated, least = config.integer(name, default), config.integer(multiple, 256)
        times = config.optional_number(factor, 1.0)
        if not config.boolean(switch, True):
            return stated
        units = meta_width(stated, times, 1 if times is None else least)
        if not 1 <= units < 2**31:
            wanted = f"another value: {switch} changes this one to {units}, not a valid width"
            raise config.fail(name, stated, wanted)
        return units

    return {
        name: Field("intermediate", default, read, draw=among(7, 33, 64)),
        switch: Field("own.adjusted", True, of=lambda _: False),
        factor: Field("own.factor", 1.0, ConfigReader.optional_number, draw=among(0.5, 1.3)),
        multiple: Field("own.multiple", 256, draw=among(1, 8, 24)),
    }


def multiple_of(width: int, hidden: int) -> int:
    """Return a width divided by the hidden size. Raises CannotExpress if the result is not an integer."""
    if width % hidden:
        raise CannotExpress(f"transformers needs a width that is a multiple of the hidden size {hidden}, not {width}")
    return width // hidden


def read_nonzero(config: ConfigReader, name: str, default: float | None) -> float | None:
    """Return the number above 0 in a config field, or None if the field is 0, null or absent."""
    return config.optional_number(name, default) if config.raw(name) else None


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


def root_of(hidden: str, usual: int) -> Callable[[ConfigReader, str, bool], float]:
    """Return a function for `Field.read`, for a boolean field that says whether embeddings are scaled.

    The function returns the factor of the embeddings: the square root of their width if the field is true, and
    otherwise 1.

    Args:
        hidden: the config field of the width.
        usual: the default of that field.
    """

    def read(config: ConfigReader, name: str, default: bool) -> float:
        return math.sqrt(config.integer(hidden, usual)) if config.boolean(name, default) else 1.0

    return read


def is_scaled(multiplier: float) -> bool:
    """Return whether embeddings are multiplied by a factor: the value of the boolean field that `root_of` reads."""
    return multiplier != 1


def _inverse(config: ConfigReader, name: str, default: float) -> float:
    """Return the factor of the logits, from a config field by which the logits are divided."""
    divisor = config.number(name, default)
    if 1 / divisor > FLOAT32_MAX:
        raise config.fail(name, divisor, "a number whose inverse is in the range of float32")
    return 1 / divisor


def with_defaults(fields: Fields, **defaults: Any) -> dict[str, Field]:
    """Return the table with other defaults.

    The keywords of `defaults` are names of config fields ("num_hidden_layers"), or their first roles ("layers").
    """
    names = {field.role.split()[0]: name for name, field in fields.items()} | {name: name for name in fields}
    return {**fields, **{names[key]: fields[names[key]]._replace(default=value) for key, value in defaults.items()}}


def without(table: Mapping[str, _Value], *names: str) -> dict[str, _Value]:
    """Return the table without some of its entries."""
    return {name: value for name, value in table.items() if name not in names}


def flag(role: str, default: bool, yes: Any, no: Any) -> Field:
    """Return a boolean config field. It is read as `yes` if it is true, and as `no` if it is false."""

    def read(config: ConfigReader, name: str, default: bool) -> Any:
        return yes if config.boolean(name, default) else no

    write = (lambda value: bool(value != no)) if yes is None else (lambda value: bool(value == yes))
    return Field(role, default, read, write, draw=among(True, False))


def choice(role: str, default: Any, values: Mapping[Any, Any]) -> Field:
    """Return a config field with a string that is read as the value that `values` has for it.

    Instead of strings, `values` may have numbers and None. If several strings have the same value, the first one is
    written. Writing another value raises CannotExpress.
    """
    names: dict[Any, Any] = {value: name for name, value in reversed([*values.items()])}

    def read(config: ConfigReader, name: str, default: Any) -> Any:
        return config.choice(name, default, values)

    def write(value: Any) -> Any:
        if value not in names:
            raise CannotExpress(f"the config class of this family in transformers has no value for {value!r}")
        return names[value]

    return Field(role, default, read, write, draw=lambda chosen, _: chosen.choice([*values]))


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


def llama_fields(names: Mapping[str, str] = MappingProxyType({}), **defaults: Any) -> dict[str, Field]:
    """Return the fields of LlamaConfig under other names and with other defaults.

    Args:
        names: names of fields in LlamaConfig -> names in this family. Other names stay the same.
        defaults: the new defaults; see `with_defaults`.
    """
    return {names.get(name, name): field for name, field in with_defaults(USUAL, **defaults).items()}


LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}
"""The argument `names` of `llama_fields` for families with LayerNorm."""

BIASED = dict.fromkeys(
    ("attention.qkv_bias", "attention.output_bias", "feed_forward.up_bias", "feed_forward.down_bias"), True
)
"""Values of roles for families in which all linears of the layers have biases. They are a part of
`DecoderFamily.fixed`."""


PRE = ("attention_norm", "feed_forward_norm")  # `DecoderFamily.norms` of blocks with a norm before every sub-layer


ATTENTION_BIAS = Field("attention.qkv_bias attention.output_bias", False)
MLP_BIAS = Field("feed_forward.up_bias feed_forward.down_bias", False)
LOGITS_DIVISOR = Field("head.multiplier", 1.0, _inverse, lambda factor: float(f"{1 / factor:.14g}"))
WINDOW = Field("attention.window", 4096, ConfigReader.optional_integer)
"""The config field of a sliding window in all layers. An absent field means the default window, and null means no
window."""
GROUPED_EXPERTS: Fields = {
    "n_group": Field("mixture.groups", 1),
    "topk_group": Field("mixture.top_groups", 1),
    "norm_topk_prob": Field("mixture.normalise", True),
    "routed_scaling_factor": Field("mixture.multiplier", 1.0),
    "num_experts_per_tok": Field("mixture.top_k", 8),
}
"""DeepSeek-V3's config fields for the router's choice of experts."""

# --- values of roles that no field states: `DecoderFamily.fixed` ---

ROUNDED_ROUTER: dict[str, Any] = {"mixture.rounded": True}
SIGMOID_ROUTER: dict[str, Any] = {
    "mixture.scores": "sigmoid",
    "mixture.choice_bias": True,
    "mixture.routed_in": "float32",
    "mixture.in_order": False,
    "mixture.wide_router": since("5.24"),
    "mixture.wide_choice": True,
}
"""Values of roles for routers as in DeepSeek-V3. They are a part of `DecoderFamily.fixed`."""

# --- the norms of a block: `DecoderFamily.norms` ---

OUTPUT_NORMS = ("attention_output_norm", "feed_forward_output_norm")
"""The norms of a block that has one on the output of every sub-layer, before the residual connection (OLMo 2)."""
AROUND = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
"""The norms of a block that has one before every sub-layer and one on its output (Gemma 2)."""
SUM_NORMS = ("attention_sum_norm", "feed_forward_sum_norm")
"""The norms of a post-norm block: there is one after every residual connection (BERT)."""
