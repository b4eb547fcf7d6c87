"""Recurrences that several families share (Mamba, Mamba-2, gated DeltaNet): config fields and checkpoint tensors."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..components import (
    Block,
    Embedding,
    GatedDeltaNet,
    Head,
    Mamba,
    Mamba2,
    ModelSpec,
    RMSNorm,
    ShortConvolution,
    SubLayer,
)
from .base import Leaf, leaves_of
from .config import ConfigReader
from .draws import ODD, Config, Sizes, among, divisor, sometimes
from .fields import ATTENTION_BIAS, Field, Fields, draw_fields, multiple_of, read_fields, size, write_fields
from .layout import Layout
from .lenses import Lens
from .obstacles import of_kind
from .places import Places, by_layer_types, nth
from .rope import PART, RotaryKind
from .usual import ATTENTION, EMBEDDING, ENDS, FEED_FORWARD, NORMS, ROUTED, B, T, shared_expert

LINEAR = "linear_attention"


_INFINITE = {"__float__": "Infinity"}  # transformers writes infinity like this


def limits(config: ConfigReader) -> dict[str, Any]:
    """Read the smallest and the largest step size of Mamba-2 from the config field `time_step_limit`.

    The result has them as the fields `least` and `most` of `Mamba2`.
    """
    given: Any = config.raw("time_step_limit", (0.0, math.inf))
    numbers = (
        [math.inf if number == _INFINITE else number for number in given] if isinstance(given, list | tuple) else []
    )
    fine = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    fine = fine and len(numbers) == 2 and 0 <= numbers[0] <= numbers[1] and numbers[0] <= 1e30 and numbers[1] > 0
    if not fine:
        raise config.fail("time_step_limit", given, "two numbers, [smaller, larger], neither below 0")
    least, most = (float(min(number, sys.float_info.max)) for number in numbers)
    return {"least": least, "most": None if numbers[1] == math.inf else most}


def least_step(config: ConfigReader, name: str, default: float) -> float:
    """Return the smallest step size of a recurrence from the config field `name`."""
    if (least := config.number(name, default)) > 1e30:
        raise config.fail(name, least, "a number up to 1e30")
    return least


def write_limits(mixer: Mamba2) -> dict[str, Any]:
    """Return the config field `time_step_limit` of a mixer. The result is empty if the field would have its default."""
    if (mixer.least, mixer.most) == (0, None):
        return {}
    return {"time_step_limit": [mixer.least, _INFINITE if mixer.most is None else mixer.most]}


_MAMBA2: Fields = {
    "mamba_n_heads": Field("heads", 128),
    "mamba_n_groups": Field("groups", 1),
    "mamba_d_state": size("state_size", 256),
    "mamba_d_conv": size("kernel", 4, 1, 2, 4, 5),
    "mamba_conv_bias": Field("conv_bias", True),
    "mamba_chunk_size": size("chunk", 256, 1, 3, 8, 64),
}


def mamba2_sizes(config: ConfigReader, values: Mapping[str, Any], *, inner: int | None = None) -> dict[str, Any]:
    """Return the sizes of a Mamba-2 mixer as fields of `Mamba2`, from the config fields that begin with `mamba_`.

    Args:
        config: the reader of the config.
        values: the values of the config, by role.
        inner: the width of all heads together. If None, it is `mamba_expand` times the hidden size.
    """
    sizes, expand = read_fields(_MAMBA2, config), config.integer("mamba_expand", 2)
    heads, groups, width = sizes["heads"], sizes["groups"], config.raw("mamba_d_head", "auto")
    inner = values["hidden"] * expand if inner is None else inner
    if inner % heads or inner // heads > 2**31 - 1:
        raise config.fail("mamba_n_heads", heads, f"a divisor of {inner}, the width of all heads together")
    if width not in ("auto", inner // heads) or isinstance(width, bool):
        raise config.fail("mamba_d_head", width, f"{inner // heads}, so that {heads} heads are {inner} wide")
    if heads % groups:
        raise config.fail("mamba_n_groups", groups, f"a divisor of mamba_n_heads ({heads})")
    own = {"hidden_size": values["hidden"], "head_dim": inner // heads, "activation": values["activation"]}
    return {**sizes, **own, **limits(config)}


UNGROUPED = (("5.23", "norms all channels of a Mamba-2 layer together, although the config divides them into groups"),)
"""The fault of the gated norm in earlier releases (`Architecture.mended`)."""


def read_mamba2(config: ConfigReader, values: Mapping[str, Any]) -> Mamba2:
    """Return a Mamba-2 mixer from the config fields that begin with `mamba_`.

    Its norm has as many groups as b and c have.
    """
    sizes, bias = mamba2_sizes(config, values), config.boolean("mamba_proj_bias", False)
    norm = RMSNorm(size=sizes["heads"] * sizes["head_dim"], eps=values["eps"], groups=sizes["groups"])
    return Mamba2(**sizes, norm=norm, bias=bias, output_bias=bias)


def write_mamba2(mixer: Mamba2) -> Config:
    """Return the config fields of a Mamba-2 mixer: those that `read_mamba2` reads."""
    own = {
        "mamba_d_head": mixer.head_dim,
        "mamba_expand": multiple_of(mixer.inner, mixer.hidden_size),
        "mamba_proj_bias": mixer.bias,
    }
    return {**write_fields(_MAMBA2, mixer), **own, **write_limits(mixer)}


def draw_mamba2(chosen: Random, hidden: int) -> Config:
    """Return random legal config fields of a Mamba-2 mixer: those that `read_mamba2` reads.

    `hidden` is the hidden size.
    """
    expand = chosen.choice((1, 2, 3))
    heads = divisor(chosen, hidden * expand)
    own = {"mamba_d_head": hidden * expand // heads, "mamba_proj_bias": True, "time_step_limit": draw_limits(chosen)}
    sizes = {"heads": heads, "groups": divisor(chosen, heads)}
    return {**draw_fields(_MAMBA2, chosen, sizes), "mamba_expand": expand, **sometimes(chosen, own)}


def draw_limits(chosen: Random) -> list[float]:
    """Return a random value for the config field `time_step_limit`."""
    return chosen.choice(([0.0, 2.0], [0.1, 2.5], [0.02, math.inf]))


@dataclass(frozen=True)
class MixerFields:
    """Reads and writes the config fields of a mixer that some layers have in place of attention."""

    kind: type[Any]
    """The mixer's kind of component, such as `Mamba2`."""
    get: Callable[[ConfigReader, Mapping[str, Any]], Any]
    """`get(config, values)` reads the mixer. `values` are the values of the config, by role."""
    put: Callable[[Any], Config]
    """`put(mixer)` returns the config fields of a mixer."""
    draw: Callable[[Random, Sizes], Config]
    """`draw(chosen, sizes)` returns the config fields with random legal values."""
    slot: str = "recurrence"
    """The mixer's slot in a block: "recurrence" or "convolution"."""
    absent: Config = field(default_factory=dict)
    """The config fields for a model in which no layer has such a mixer."""


def without_attention(places: Places, fields: MixerFields) -> Lens:
    """Return a `Lens` for the mixers of layers without attention, for `DecoderFamily.recurrent`.

    Args:
        places: reads and writes which layers have attention.
        fields: reads and writes the mixer of the other layers, which is the same in all of them.
    """

    def get(config: ConfigReader, values: Mapping[str, Any]) -> list[Any]:
        with_attention = places.get(config, values["layers"])
        mixer = fields.get(config, values)
        return [None if has_attention else mixer for has_attention in with_attention]

    def put(spec: ModelSpec) -> Config:
        mixers = [block.mixer(fields.slot) for block in spec.blocks]
        first = next((of_kind(mixer, fields.kind) for mixer in mixers if mixer is not None), None)
        own = fields.absent if first is None else fields.put(first)
        return {**own, **places.put([mixer is None for mixer in mixers])}

    def draw(chosen: Random, sizes: Sizes) -> Config:
        return {**fields.draw(chosen, sizes), **places.draw(chosen, sizes["layers"])}

    return Lens(get, put, draw, frozenset({fields.kind}))


MAMBA2 = MixerFields(
    Mamba2,
    read_mamba2,
    write_mamba2,
    lambda chosen, sizes: draw_mamba2(chosen, sizes["hidden"]),
    # transformers requires that the heads divide the width, even if no layer is Mamba-2.
    absent={"mamba_n_heads": 1, "mamba_n_groups": 1, "mamba_d_head": "auto"},
)


def mamba2_leaves(theirs: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of a Mamba-2 mixer.

    `theirs` is the prefix of the names in checkpoints.
    """
    ours = B + "recurrence."
    read, mixed = ("gate", "x", "b", "c", "dt"), ("x", "b", "c")
    rows: dict[str, Any] = {"split": "part", "parts": ("inner", "inner", "states", "states", "heads")}
    channels: dict[str, Any] = {"split": "part", "parts": ("inner", "states", "states")}
    return (
        *(Leaf(theirs + name, ours + name) for name in ("dt_bias", "A_log", "D")),
        Leaf(
            theirs + "conv1d.weight",
            tuple(f"{ours}{name}_conv.weight" for name in mixed),
            Layout("part one kernel", "part (one kernel)", **channels),
        ),
        Leaf(theirs + "conv1d.bias", tuple(f"{ours}{name}_conv.bias" for name in mixed), Layout("part", **channels)),
        Leaf(theirs + "in_proj.weight", tuple(f"{ours}{n}_proj.weight" for n in read), Layout("part hidden", **rows)),
        Leaf(theirs + "in_proj.bias", tuple(f"{ours}{n}_proj.bias" for n in read), Layout("part", **rows)),
        *leaves_of({theirs + "norm": ours + "norm", theirs + "out_proj": ours + "o_proj"}),
    )


def steps_of_rank(config: ConfigReader, name: str, hidden: int) -> int:
    """Return the rank of the projection to Mamba's step sizes (dt), from the config field `name`.

    "auto" means a sixteenth of the hidden size.
    """
    return math.ceil(hidden / 16) if config.raw(name, "auto") == "auto" else config.integer(name)


def step_rank(hidden: int) -> Field:
    """Return the config field for the rank of the projection to Mamba's step sizes (dt).

    "auto" means a sixteenth of the hidden size. `hidden` is the default of `hidden_size`.
    """

    def read(config: ConfigReader, name: str, _: str) -> int:
        return steps_of_rank(config, name, config.integer("hidden_size", hidden))

    return Field("rank", "auto", read, draw=among("auto", *ODD))


def width_of(config: ConfigReader, name: str, hidden: int) -> int:
    """Return the number of channels of a mixer: the config field `name` times the hidden size."""
    times = config.integer(name, 2)
    if times * hidden >= 2**31:
        raise config.fail(name, times, f"less than 2^31 / hidden_size ({hidden})")
    return times * hidden


def norms_of(rank: int, states: int, **fields: Any) -> dict[str, RMSNorm]:
    """Return Mamba's norms of dt, b and c.

    Args:
        rank: the size of dt.
        states: the size of b and of c.
        fields: further fields of the norms.
    """
    return {f"{name}_norm": RMSNorm(size=n, **fields) for name, n in {"dt": rank, "b": states, "c": states}.items()}


_MAMBA: Fields = {
    "mamba_d_state": size("state_size", 16),
    "mamba_dt_rank": step_rank(4096),
    "mamba_d_conv": size("kernel", 4, 1, 2, 4, 5),
    "mamba_proj_bias": Field("bias", False),
    "mamba_conv_bias": Field("conv_bias", True),
}


def _read_mamba(config: ConfigReader, values: Mapping[str, Any]) -> Mamba:
    own, hidden = read_fields(_MAMBA, config), values["hidden"]
    own |= norms_of(own["rank"], own["state_size"], eps=values["eps"])
    inner = width_of(config, "mamba_expand", hidden)
    return Mamba(hidden_size=hidden, inner=inner, activation=values["activation"], **own)


def _draw_mamba(chosen: Random, _: Sizes) -> Config:
    return {**draw_fields(_MAMBA, chosen, {}), **sometimes(chosen, {"mamba_expand": chosen.choice((1, 3))})}


MAMBA = MixerFields(
    Mamba,
    _read_mamba,
    lambda mixer: {"mamba_expand": multiple_of(mixer.inner, mixer.hidden_size), **write_fields(_MAMBA, mixer)},
    _draw_mamba,
)
"""Reads and writes Mamba with norms of dt, b and c, from the config fields that begin with `mamba_`."""


_CONVOLUTION: Fields = {"conv_L_cache": size("kernel", 3, 1, 2, 4, 7), "conv_bias": Field("bias", False)}


def _read_convolution(config: ConfigReader, values: Mapping[str, Any]) -> ShortConvolution:
    hidden = values["hidden"]
    return ShortConvolution(hidden_size=hidden, channels=hidden, **read_fields(_CONVOLUTION, config))


CONVOLUTION = MixerFields(
    ShortConvolution,
    _read_convolution,
    lambda mixer: write_fields(_CONVOLUTION, mixer),
    lambda chosen, sizes: draw_fields(_CONVOLUTION, chosen, sizes),
    slot="convolution",
)
"""Reads and writes LFM2's gated short convolutions."""


ALONE: Fields = {
    "vocab_size": Field("vocab", 0),
    "hidden_size": Field("hidden", 0, draw=among(*ODD)),
    "num_hidden_layers": Field("layers", 0, draw=among(1, 2, 3)),
    "layer_norm_epsilon": Field("final_norm.eps", 1e-5),
    "residual_in_fp32": Field("block.wide", True),
    "tie_word_embeddings": Field("tied", True),
}
"""The config fields of families whose layers have one mixer and no feed-forward. The fields of the mixer itself are not
included."""


def alone(config: ConfigReader, values: Mapping[str, Any], mixer: Mamba | Mamba2) -> ModelSpec:
    """Return a model whose layers have only a mixer.

    Args:
        config: the reader of the config.
        values: the values of a table like `ALONE`, by role.
        mixer: the mixer of every layer.
    """
    hidden, vocab = values["hidden"], values["vocab"]
    usual = [LINEAR] * values["layers"]
    config.refuse({"layer_types": ((None, usual), f"every layer is {type(mixer).__name__}")})
    norm = RMSNorm(size=hidden, eps=values["final_norm.eps"])
    return ModelSpec(
        embedding=Embedding(vocab_size=vocab, hidden_size=hidden),
        blocks=(Block(sublayers=(SubLayer(mixer=mixer, norm=norm),), wide=values["block.wide"]),) * values["layers"],
        final_norm=norm,
        head=Head(vocab_size=vocab, hidden_size=hidden, tied=values["tied"]),
    )


def mamba_leaves(theirs: str) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of a Mamba mixer.

    `theirs` is the prefix of the names in checkpoints.
    """
    ours = B + "recurrence."
    halves: dict[str, Any] = {"split": "part", "parts": ("inner", "inner")}
    chosen = Layout("part inner", split="part", parts=("rank", "state", "state"))
    return (
        *(Leaf(theirs + name, ours + name) for name in ("A_log", "D")),
        Leaf(theirs + "conv1d.weight", ours + "x_conv.weight", Layout("inner one kernel", "inner (one kernel)")),
        Leaf(theirs + "conv1d.bias", ours + "x_conv.bias"),
        Leaf(
            theirs + "in_proj.weight",
            (ours + "x_proj.weight", ours + "gate_proj.weight"),
            Layout("part hidden", **halves),
        ),
        Leaf(theirs + "in_proj.bias", (ours + "x_proj.bias", ours + "gate_proj.bias"), Layout("part", **halves)),
        Leaf(theirs + "x_proj.weight", tuple(f"{ours}{name}_proj.weight" for name in ("dt_in", "b", "c")), chosen),
        *leaves_of({theirs + "dt_proj": ours + "dt_proj", theirs + "out_proj": ours + "o_proj"}),
    )


_DELTA: Fields = {
    "linear_num_value_heads": Field("heads", 32),
    "linear_num_key_heads": Field("key_heads", 16),
    "linear_key_head_dim": size("key_dim", 128),
    "linear_value_head_dim": size("value_dim", 128),
    "linear_conv_kernel_dim": size("kernel", 4, 1, 2, 4, 5),
}


def delta_nets(fused: str) -> Lens:
    """Return a `Lens` for gated DeltaNets, which are the mixers of layers without attention.

    `fused` is the value of `GatedDeltaNet.fused`.
    """

    def read(config: ConfigReader, values: Mapping[str, Any]) -> GatedDeltaNet:
        sizes = read_fields(_DELTA, config)
        if sizes["heads"] % sizes["key_heads"]:
            wanted = f"a multiple of linear_num_key_heads ({sizes['key_heads']})"
            raise config.fail("linear_num_value_heads", sizes["heads"], wanted)
        norm = RMSNorm(size=sizes["value_dim"], eps=values["eps"])
        options: Any = {"activation": values["activation"], "norm": norm, "fused": fused}
        return GatedDeltaNet(hidden_size=values["hidden"], **sizes, **options)

    def draw(chosen: Random, _: Sizes) -> Config:
        key_heads = chosen.choice((1, 2, 3))
        heads = {"key_heads": key_heads, "heads": key_heads * chosen.choice((1, 2, 3))}
        return draw_fields(_DELTA, chosen, heads)

    fields = MixerFields(GatedDeltaNet, read, lambda mixer: write_fields(_DELTA, mixer), draw)
    return without_attention(by_layer_types(LINEAR, nth("full_attention_interval", 4).get), fields)


_R, _THEIRS = B + "recurrence.", T + "linear_attn."


_Q, _GATE = B + "attention.q_proj.", B + "attention.gate_proj."


_PARTS = tuple(f"{_R}{name}" for name in "qkv")


def _parts(layout: str, *parts: str) -> Layout:
    return Layout(layout, split="part", parts=parts)


DELTA = (
    *(Leaf(_THEIRS + name, _R + name) for name in ("dt_bias", "A_log")),
    Leaf(
        _THEIRS + "conv1d.weight",
        tuple(f"{part}_conv.weight" for part in _PARTS),
        Layout("part one kernel", "part (one kernel)", "part", ("keys", "keys", "values")),
    ),
    *leaves_of({f"{_THEIRS}{name}": f"{_R}{ours}" for name, ours in (("norm", "norm"), ("out_proj", "o_proj"))}),
)
"""The leaves (entries of the tensor table) of a gated DeltaNet, without the projections of its input."""


QUERIES_AND_GATE = (
    *(
        Leaf(
            f"{T}self_attn.q_proj.{suffix}",
            (_Q + suffix, _GATE + suffix),
            _parts(f"(heads part head_dim){of}", "1", "1"),
        )
        for suffix, of in (("weight", " hidden"), ("bias", ""))
    ),
    *leaves_of({name: ours for name, ours in ATTENTION.items() if not name.endswith("q_proj")}),
)
"""The leaves (entries of the tensor table) of gated attention. One tensor has the rows of queries and gates: those of a
head's query, then those of its gate."""


JOINED_PROJECTIONS = (
    Leaf(
        _THEIRS + "in_proj_qkvz.weight",
        (*(f"{part}_proj.weight" for part in _PARTS), _R + "gate_proj.weight"),
        _parts("(key_heads part) hidden", "key_dim", "key_dim", "group_values", "group_values"),
    ),
    Leaf(
        _THEIRS + "in_proj_ba.weight",
        (_R + "beta_proj.weight", _R + "decay_proj.weight"),
        _parts("(key_heads part) hidden", "group", "group"),
    ),
)


SPLIT_PROJECTIONS = (
    Leaf(
        _THEIRS + "in_proj_qkv.weight",
        tuple(f"{part}_proj.weight" for part in _PARTS),
        _parts("part hidden", "keys", "keys", "values"),
    ),
    *leaves_of(
        {
            f"{_THEIRS}in_proj_{name}": f"{_R}{ours}_proj"
            for name, ours in (("z", "gate"), ("b", "beta"), ("a", "decay"))
        }
    ),
)
"""The leaves (entries of the tensor table) of the projections to a gated DeltaNet in Qwen3.5."""


GATED: dict[str, Any] = {
    "norm.cast": "after_weight",
    "norm.gain": "1 + weight",
    "attention.gated": True,
    "attention.gate": "with queries",
}


GATED_BIAS = ATTENTION_BIAS._replace(role=f"{ATTENTION_BIAS.role} attention.gate_bias")


PARTLY = RotaryKind(part=PART, whole=0.25)


DELTA_REST = (*leaves_of({**FEED_FORWARD, T + "input_layernorm": B + "recurrence_norm"}), *leaves_of({**NORMS, **ENDS}))
"""The leaves (entries of the tensor table) of feed-forwards, norms and the head in models with gated DeltaNets."""


DELTA_LEAVES = (*leaves_of(EMBEDDING), *DELTA_REST, *DELTA, *QUERIES_AND_GATE)
"""All leaves (entries of the tensor table) of Qwen3-Next, in the order of its files. Those of mixtures and of the
projections to a gated DeltaNet are missing."""


GATED_MIXTURE = {
    **ROUTED,
    **shared_expert("shared_expert"),
    T + "mlp.shared_expert_gate": B + "feed_forward.shared_gate",
}
