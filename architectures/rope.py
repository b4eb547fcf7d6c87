"""RoPE in config.json: rope_theta with rope_scaling (before transformers 5), or rope_parameters.

transformers infers some values at run time (attention factors, the original context). gptkit infers them when it reads
the config, so that the ModelSpec contains all numbers.

Source: transformers modeling_rope_utils.py, `standardize_rope_params` and the functions in ROPE_INIT_FUNCTIONS.
"""

import math
import sys
from collections.abc import Mapping
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from ..components import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from ..errors import CannotExpress, ConfigError, shown
from .config import ConfigReader
from .draws import Config, sometimes
from .obstacles import Kinds

ROTARY: Kinds = frozenset({Rotary, *get_args(RopeScaling)})
"""The kinds of component of RoPE with any scaling that transformers has, for `Architecture.kinds`."""

_DEFAULT_BASE = 10_000.0


class RotaryKind(NamedTuple):
    """How a family's config class states RoPE: names of config fields, defaults and limitations.

    It describes all layers, or one type of layer ("full_attention").
    """

    base: float = _DEFAULT_BASE
    """The default base of RoPE."""
    theta: str = "rope_theta"
    """The config field of the base in the form before transformers 5, or "" if there is none."""
    scaled: bool = True
    """Whether the config field `rope_scaling` applies to these layers."""
    part: str = ""
    """The config field for the fraction of a head that RoPE rotates. "" if RoPE always rotates whole heads."""
    whole: float = 1.0
    """The default of the fraction of a head that RoPE rotates."""
    inside: bool = False
    """Whether transformers reads this fraction only if it is among the RoPE parameters."""
    dims: str = ""
    """The config field for the number of dimensions that RoPE rotates. "" if there is none."""
    entire: bool = False
    """Whether transformers fails if the config states the fraction of a head that RoPE rotates."""
    pairs: Literal["halves", "adjacent"] = "halves"
    """The value of `Rotary.pairs`: which elements of a head are rotated together."""
    rounding: Literal["input", "result", "keys", "tables", "complex"] = "input"
    """The value of `Rotary.rounding`: what is rounded to the dtype of queries and keys."""
    usual: Mapping[str, Any] | None = None
    """The default RoPE parameters. If they include a base, a config without `rope_parameters` may not state another
    base."""
    alpha: bool = False
    """Whether parameters of type "dynamic" may have an `alpha`, which multiplies the base by alpha ^ (d / (d - 2)) for
    heads of width d."""
    direction: Literal["forward", "backward"] = "forward"
    """The value of `Rotary.direction`: whether later tokens are rotated by larger or smaller angles."""
    joined: bool = False
    """The value of `Rotary.joined`: whether the result is always a concatenation of two parts. If RoPE may rotate only
    a part of a head, it always is."""
    even: bool = False
    """Whether the number of rotated dimensions must be even."""
    original: int | None = None
    """The default of `original_max_position_embeddings`, in tokens. None means the model's context length."""
    renewed: bool = False
    """The value of `LongRopeScaling.renewed`: whether all keys are computed again if a text grows beyond the original
    context."""
    short_only: bool = False
    """Whether LongRoPE uses its short factors for all texts, and the RoPE parameters have the factor of cos and sin, as
    `short_mscale` and `long_mscale`."""
    types: Mapping[str, str] | None = None
    """The config class's names of RoPE types -> transformers' names. Other types are refused. None: the family supports
    all types, under transformers' names."""
    former_base: float | None = None
    """The default base in transformers 4. None: it is `base`."""
    only: tuple[str, ...] = ()
    """The only fields that `rope_scaling` may have in transformers 4. Empty: it may have all fields."""


USUAL_ROTARY = RotaryKind()


def read_rotary(
    config: ConfigReader,
    dim: int,
    context_length: int | None,
    kind: RotaryKind = USUAL_ROTARY,
    tables: int | None = None,
) -> Rotary:
    """Return the RoPE component of a family in which all layers have the same RoPE.

    Args:
        config: the reader of the config.
        dim: the width of a head.
        context_length: the model's context length, or None if the config states none.
        kind: how the family's config class states RoPE.
        tables: the number of dimensions for which transformers makes the tables of cos and sin; by default `dim`.

    Raises:
        ConfigError: the RoPE type is unknown, or a parameter is missing or malformed. It is also raised if only a part
            of a head is rotated, in a family for which transformers then fails.
    """
    readers = [config.inner(name) for name in ("rope_scaling", "rope_parameters")]
    which = "rope_scaling" if readers[0].data else "rope_parameters"
    if kind.usual is not None and not config.inner(which).data:
        base = config.number(kind.theta, kind.usual.get("rope_theta", kind.base))
        if base != kind.usual.get("rope_theta", base):
            raise config.fail(
                kind.theta,
                base,
                f"{kind.usual.get('rope_theta')}, this family's default: write other values in rope_parameters",
            )
        rope = config.inner("rope_parameters", more={"rope_theta": base, **kind.usual})
        return _rotary(rope, dim, rope.number("rope_theta"), context_length, kind, tables)
    if any(isinstance(value, dict) for value in config.inner(which).data.values()):
        raise ConfigError("config.json: gptkit does not support RoPE parameters per layer type for this family")
    rope = config.inner(which, more=_outside_parameters(config, which, kind))
    outside = config.raw(kind.theta) if kind.theta else None  # the base, unless the parameters contain one
    base = rope.number("rope_theta") if rope.raw("rope_theta") is not None else kind.base
    base = config.number(kind.theta) if rope.raw("rope_theta") is None and outside is not None else base
    if which == "rope_scaling":  # the parameters may also be stated in the form of transformers 5
        stated = {"rope_theta": base, "rope_type": rope.raw("type"), **rope.data}
        newer = readers[1]
        newer.used |= {newer.place + name for name, value in newer.data.items() if stated.get(name) == value}
    rotated = config.optional_integer(kind.dims) if kind.dims else None
    if rotated is not None and rotated <= dim:
        kind = kind._replace(whole=rotated / dim)
    return _rotary(rope, dim, base, context_length, kind, tables)


def read_rotaries(
    config: ConfigReader, dim: int, context_length: int, kinds: Mapping[str, RotaryKind]
) -> dict[str, Rotary]:
    """Return the RoPE component for every type of layer ("full_attention", …).

    `rope_parameters` has an object per type, as transformers 5 writes it. Older fields are read too.

    Args:
        config: the reader of the config.
        dim: the width of a head.
        context_length: the model's context length.
        kinds: how the config class states RoPE, for every type of layer.

    Source: transformers models/gemma3/configuration_gemma3.py, convert_rope_params_to_dict.

    Raises:
        ConfigError: `rope_parameters` has no object per type, or `read_rotary` would raise the error.
    """
    by_kind = config.inner("rope_parameters")
    flat = [name for name, value in by_kind.data.items() if value is not None and not isinstance(value, dict)]
    if flat:
        raise by_kind.fail(
            flat[0],
            by_kind.data[flat[0]],
            f"no such field: rope_parameters must have an object for each of {', '.join(kinds)}",
        )
    before = config.inner("rope_scaling") if any(kind.scaled for kind in kinds.values()) else ConfigReader({})
    rotaries = {}
    for name, kind in kinds.items():
        rope = by_kind.inner(name, more=None if by_kind.data else kind.usual)
        if kind.scaled and before.data:
            rope = by_kind.inner(name, more=before.data)
            before.used |= {before.place + field for field in before.data}  # they are read under the kind's name
        if rope.raw("truncate") is False:  # modeling_rope_utils.py looks for it next to the kinds, not inside
            raise rope.fail(
                "truncate",
                False,
                "true: with RoPE parameters per layer type, transformers always rounds YaRN's correction range",
            )
        old = config.number(kind.theta, kind.base) if kind.theta else kind.base
        base = old if rope.raw("rope_theta") is None else rope.number("rope_theta")
        rotaries[name] = _rotary(rope, dim, base, context_length, kind)
    return rotaries


def _outside_parameters(config: ConfigReader, which: str, kind: RotaryKind) -> dict[str, Any]:
    """Return RoPE parameters that a config states at its top level instead of in the object `which`.

    `which` is "rope_scaling" or "rope_parameters".
    """
    part, original = config.raw(kind.part or PART), config.raw(ORIGINAL, kind.original)
    fields = (
        {} if part is None or "partial_rotary_factor" in config.inner(which).data else {"partial_rotary_factor": part}
    )
    return fields | ({} if original is None else {ORIGINAL: original})


def _rotary(
    rope: ConfigReader, dim: int, base: float, context_length: int | None, kind: RotaryKind, tables: int | None = None
) -> Rotary:
    """Return the RoPE component that RoPE parameters of a config describe.

    Args:
        rope: the reader of the parameters.
        dim: the width of a head.
        base: the base of RoPE.
        context_length: the model's context length, or None.
        kind: how the config class states RoPE.
        tables: as in `read_rotary`.
    """
    rope_type = _rope_type(rope, kind)
    part = rope.raw(PART, kind.whole)
    if kind.alpha and rope_type == "dynamic" and rope.raw("alpha"):
        rope_type, base = "default", _grown_base(rope, dim, base)
    rest: dict[str, Any] = {
        "base": base,
        "pairs": kind.pairs,
        "rounding": kind.rounding,
        "direction": kind.direction,
        "joined": kind.joined or bool(kind.part),
    }
    if rope_type == "proportional":
        if tables not in (None, dim):
            raise rope.fail(
                "rope_type",
                rope_type,
                f"default: transformers makes RoPE tables for a head dimension of {tables}, not {dim}",
            )
        return Rotary(dim=dim, scaling=_read_proportional(rope, dim), **rest)
    rotated = dim if tables is None else tables
    if kind.part:
        rotated = _rotated_part(rope, part, dim, kind)
        dim = rotated + rotated % 2
    # Without a scaling, other families rotate whole heads, whatever this field says. With one, gptkit refuses a part.
    elif kind.entire or rope_type != "default":
        rotated = int(rotated * part) if _is_number(part) and 0 < part < 2 else 0
        if rotated + rotated % 2 != dim and rotated != tables:
            raise rope.fail(
                PART, part, f"1: with rope_type {shown(rope_type)} this family always rotates the whole head"
            )
    scaling = _read_scaling(rope_type, rope, rotated, base, context_length, kind)
    if rotated + rotated % 2 != dim:
        rest["base"], rotated = _one_frequency(dim, rotated, rope_type, kind), dim
    return Rotary(dim=dim, scaling=scaling, spread=rotated if rotated % 2 else None, **rest)


def _rope_type(rope: ConfigReader, kind: RotaryKind) -> str:
    """Return transformers' name of the RoPE type in these parameters.

    Raises ConfigError if the family has no such type.
    """
    rope_type = rope.raw("rope_type", rope.raw("type", "default"))
    if not isinstance(rope_type, str):
        raise rope.fail("rope_type", rope_type, "a string")
    if kind.types is None:
        return rope_type
    if rope_type not in kind.types:
        raise rope.fail("rope_type", rope_type, f"one of {', '.join(kind.types)}")
    return kind.types[rope_type]


def _grown_base(rope: ConfigReader, dim: int, base: float) -> float:
    """Return the RoPE base for dynamic scaling with a parameter `alpha`.

    It is base · alpha ^ (d / (d - 2)), where d is `dim`.
    """
    alpha = rope.number("alpha")
    power = dim / (dim - 2) if dim > 2 else math.inf
    if not abs(math.log(base) + power * math.log(alpha)) < 700:
        raise rope.fail(
            "alpha", alpha, f"a number that gives a finite base above 0 (rope_theta {base:g}, head_dim {dim})"
        )
    rope.used |= {rope.place + name for name in rope.data}  # with an alpha, transformers reads no other parameter
    return float(base * alpha**power)


def _rotated_part(rope: ConfigReader, part: Any, dim: int, kind: RotaryKind) -> int:
    """Return the number of dimensions that RoPE rotates.

    Args:
        rope: the reader of the RoPE parameters, for error messages.
        part: the fraction of a head that RoPE rotates.
        dim: the width of a head.
        kind: how the config class states RoPE.
    """
    if not _is_number(part) or not 0 < part <= 1:
        raise rope.fail(PART, part, "a number above 0 and at most 1")
    rotated = int(dim * part)
    if not 0 < rotated + rotated % 2 <= dim or (kind.even and rotated % 2):
        raise rope.fail(
            PART, part, f"a share for which RoPE rotates an even number of the {dim} dimensions, not {rotated}"
        )
    return rotated


def _one_frequency(dim: int, rotated: int, scaling: str, kind: RotaryKind) -> float:
    """Return the RoPE base for a family in which transformers' tables of cos and sin do not have `dim` columns.

    If the tables have a single frequency, transformers uses it for all pairs of dimensions. The result is then 1, the
    base with which all pairs have the same frequency.

    Args:
        dim: the number of dimensions of a head to which RoPE is applied.
        rotated: the number of dimensions for which transformers makes the tables of cos and sin.
        scaling: the RoPE type.
        kind: how the family's config class states RoPE.

    Raises:
        ConfigError: transformers fails with tables of this width.
    """
    alike = scaling in ("default", "linear", "llama3")
    if not (0 < rotated <= 2 and kind.pairs == "adjacent" and alike):
        raise ConfigError(
            f"config.json: the RoPE tables for {rotated} dimensions have {rotated + rotated % 2} columns,"
            f" but RoPE rotates {dim} dimensions of each head: transformers fails"
        )
    return 1.0


PART = "partial_rotary_factor"  # the field of RoPE parameters with the part of a head that is rotated


def _read_proportional(rope: ConfigReader, dim: int) -> ProportionalScaling:
    part = rope.raw(PART, 1.0)
    if not _is_number(part) or not 0 <= part <= 1:
        raise rope.fail("partial_rotary_factor", part, "a number from 0 to 1")
    factor = rope.number("factor") if "factor" in rope.data else 1.0
    return ProportionalScaling(factor=factor, turning=int(part * dim // 2))


def _is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_scaling(
    kind: str, rope: ConfigReader, dim: int, base: float, context_length: int | None, family: RotaryKind
) -> RopeScaling | None:
    if context_length is None:
        if kind != "default":
            raise rope.fail("rope_type", kind, "default: other types need a context length, and config.json has none")
        if rope.raw(ORIGINAL) is not None:
            raise rope.fail(ORIGINAL, rope.raw(ORIGINAL), "no such field, since config.json has no context length")
        return None
    original = rope.integer(ORIGINAL, context_length)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    if kind == "dynamic":
        if dim == 2:
            raise ConfigError("config.json: dynamic RoPE scaling divides by head_dim - 2, which is 0")
        return DynamicScaling(factor=rope.number("factor"), original_context=context_length)
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=original,
        )
    if kind in ("yarn", "longrope") and dim % 2:
        raise rope.fail(
            "rope_type", kind, f"default: transformers fails if RoPE rotates an odd number of dimensions ({dim})"
        )
    if kind == "yarn":
        return _read_yarn(rope, base, original, context_length / original)
    if kind == "longrope":
        return _read_longrope(rope, dim, original, context_length / original, family)
    raise rope.fail("rope_type", kind, "default, linear, dynamic, yarn, longrope, llama3 or proportional")


def _read_yarn(rope: ConfigReader, base: float, original: int, usual_factor: float) -> YarnScaling:
    """Return YaRN's scaling for RoPE parameters.

    Args:
        rope: the reader of the parameters.
        base: the base of RoPE.
        original: the original context length in tokens.
        usual_factor: the scaling factor if the parameters have none.
    """
    if base == 1:
        raise ConfigError(
            "config.json: YaRN divides by the logarithm of rope_theta, which is 0 because rope_theta is 1"
        )
    factor = _number_or(rope, "factor", usual_factor)
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=_rotations(rope, "beta_fast", 32.0),
        beta_slow=_rotations(rope, "beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _read_longrope(
    rope: ConfigReader, dim: int, original: int, usual_factor: float, kind: RotaryKind
) -> LongRopeScaling:
    """Return LongRoPE's scaling for RoPE parameters.

    Args:
        rope: the reader of the parameters.
        dim: the number of dimensions that RoPE rotates.
        original: the original context length in tokens.
        usual_factor: the scaling factor if the parameters have none.
        kind: how the family's config class states RoPE.
    """
    factor = _number_or(rope, "factor", usual_factor)
    if factor > 1.0 and original == 1 and rope.raw("attention_factor") is None:
        raise rope.fail(ORIGINAL, original, "a number above 1 for longrope")
    inferred = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    short, long = (_numbers(rope, name, dim // 2) for name in ("short_factor", "long_factor"))
    attention_factor = _number_or(rope, "attention_factor", inferred)
    if kind.short_only:
        long, (attention_factor, other) = short, (rope.number(name) for name in _MSCALES)
        if attention_factor != other:
            wanted = f"the value of {_MSCALES[0]} ({attention_factor:g}): gptkit supports only equal factors"
            raise rope.fail(_MSCALES[1], other, wanted)
    return LongRopeScaling(
        short_factor=short,
        long_factor=long,
        original_context=original,
        attention_factor=attention_factor,
        renewed=kind.renewed,
    )


_MSCALES = ("short_mscale", "long_mscale")


def _number_or(rope: ConfigReader, name: str, inferred: float) -> float:
    """Return the number in a field, or `inferred` if the field is null, zero or absent.

    transformers' code does the same with `or`.
    """
    return rope.number(name) if rope.raw(name) else inferred


def _rotations(rope: ConfigReader, name: str, default: float) -> float:
    """Return YaRN's parameter beta_fast or beta_slow, a number of rotations. Its logarithm must be finite."""
    value = _number_or(rope, name, default)
    if not 1e-9 <= value <= 1e9:
        raise rope.fail(name, value, "a number of rotations from 1e-9 to 1e9")
    return value


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Return the factor by which YaRN multiplies cos and sin (section 3.4).

    If the parameters have both `mscale` and `mscale_all_dim`, it is DeepSeek's ratio of two factors. `factor` is the
    scaling factor of the context.
    """
    if rope.raw("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        ratio = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
        if not 0 < ratio < math.inf:
            raise rope.fail(
                "mscale", rope.raw("mscale"), "a number whose ratio to mscale_all_dim is finite and above zero"
            )
        return ratio
    return _mscale(factor, 1.0)


def read_mscale(config: ConfigReader) -> float:
    """Return DeepSeek's factor mscale. If RoPE is scaled, attention scores are multiplied by its square.

    Source: transformers models/deepseek_v2/modeling_deepseek_v2.py, yarn_apply_mscale.
    """
    which = "rope_scaling" if config.inner("rope_scaling").data else "rope_parameters"
    rope = config.inner(which)
    weight = rope.raw("mscale_all_dim")
    if not weight or rope.raw("rope_type", rope.raw("type", "default")) == "default":
        return 1.0
    if not _is_number(weight):
        raise rope.fail("mscale_all_dim", weight, "a number")
    factor = _mscale(rope.number("factor"), weight)
    if not 0 < factor < math.inf:
        raise rope.fail("mscale_all_dim", weight, "a number that gives a finite factor above zero")
    return factor


def write_mscale(scaling: dict[str, Any] | None, scale: float, usual: float) -> dict[str, Any] | None:
    """Return `rope_scaling` with parameters that give attention scores the factor `scale`; see `read_mscale`.

    Args:
        scaling: `rope_scaling` without these parameters.
        scale: the factor of the scores.
        usual: the factor of the scores without `mscale_all_dim`.

    Raises:
        CannotExpress: RoPE is not scaled, and then transformers does not scale the scores either.
    """
    if scale == usual:
        return scaling
    if not scaling:
        raise CannotExpress(
            f"this architecture multiplies attention scores by {usual:.4g} if RoPE is not scaled, but the "
            "model does not"
        )
    factor = scaling.get("factor", 0.0)
    factor = factor if factor > 1 else 2.0  # LongRoPE has no factor, so any value works
    if scaling.get("factor", factor) != factor:
        raise CannotExpress(
            f"this architecture multiplies attention scores by {usual:.4g} if RoPE is not linearly scaled, "
            "but the model does not"
        )
    wanted = (math.sqrt(scale / usual) - 1) / (0.1 * math.log(factor))
    weights = (float(f"{wanted:.{digits}g}") for digits in range(1, 18))
    mscales = ((weight, _mscale(factor, weight)) for weight in weights)
    weight = next((weight for weight, mscale in mscales if usual * mscale * mscale == scale), wanted)
    return {**scaling, "factor": factor, "mscale_all_dim": weight}


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _numbers(rope: ConfigReader, name: str, length: int) -> tuple[float, ...]:
    values = rope.raw(name)
    if not isinstance(values, list) or len(values) != length:
        raise rope.fail(name, values, f"a list of {length} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise rope.fail(name, value, "only finite numbers above zero")
    return tuple(float(value) for value in values)


def write_rotary(rotary: Rotary, head_dim: int, kind: RotaryKind = USUAL_ROTARY) -> dict[str, Any]:
    """Return the config fields of a RoPE component, in a form that transformers 4 and 5 both read.

    The RoPE parameters of a family with `RotaryKind.inside` are in the form of transformers 5.

    Args:
        rotary: the component.
        head_dim: the width of a head.
        kind: how the family's config class states RoPE.
    """
    if kind.inside:
        rope = write_rotaries({"": rotary}, head_dim)["rope_parameters"][""]
        return {kind.theta: rotary.base, "rope_scaling": None, "rope_parameters": rope}
    part = {kind.part: _part(rotary.exponent, head_dim)} if kind.part else {}
    scaling = _scaling(rotary) or (None if kind.usual is None else {"rope_type": "default"})
    if kind.short_only and scaling is not None and scaling["rope_type"] == "longrope":
        scaling |= dict.fromkeys(_MSCALES, scaling["attention_factor"])
    # Config classes with their own names of types read the original context next to the parameters.
    outside = {} if kind.types is None else {name: value for name, value in (scaling or {}).items() if name == ORIGINAL}
    return {kind.theta: rotary.base, "rope_scaling": scaling, **part, **outside}


def write_rotaries(by_kind: Mapping[str, Rotary], head_dim: int | None = None) -> dict[str, Any]:
    """Return the config field `rope_parameters` with an object per type of layer, as transformers 5 reads it.

    Args:
        by_kind: the RoPE component of every type of layer.
        head_dim: the width of a head. If it is given, the result includes the fraction of a head that RoPE rotates.
    """
    part = {} if head_dim is None else {kind: _part(rotary.exponent, head_dim) for kind, rotary in by_kind.items()}
    return {
        "rope_parameters": {
            kind: {
                "rope_theta": rotary.base,
                **(_scaling(rotary) or {"rope_type": "default"}),
                **({"partial_rotary_factor": part[kind]} if kind in part else {}),
            }
            for kind, rotary in by_kind.items()
        }
    }


def _part(rotated: int, head_dim: int) -> float:
    """Return a `partial_rotary_factor` from which transformers computes exactly `rotated` dimensions.

    It does not always equal `rotated` / `head_dim`, since transformers rounds down.
    """
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else (rotated + 0.5) / head_dim


ORIGINAL = "original_max_position_embeddings"
_TYPES: Mapping[type[RopeScaling], str] = {
    LinearScaling: "linear",
    DynamicScaling: "dynamic",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    LongRopeScaling: "longrope",
    ProportionalScaling: "proportional",
}
"""The kinds of RoPE scaling -> transformers' names of RoPE types."""


def _scaling(rotary: Rotary) -> dict[str, Any] | None:
    if rotary.scaling is None:
        return None
    kind = _TYPES[type(rotary.scaling)]
    fields: dict[str, Any] = {
        ORIGINAL if name == "original_context" else name: list(value) if isinstance(value, tuple) else value
        for name, value in msgspec.structs.asdict(rotary.scaling).items()
    }
    if kind == "dynamic":  # transformers uses the context length of the model
        del fields[ORIGINAL]
    fields.pop("renewed", None)  # the family has it, not the config
    turning = fields.pop("turning", None)
    if turning is not None:
        part = 2 * turning / rotary.dim
        if int(part * rotary.dim // 2) != turning:  # the quotient in float is slightly too small
            part = (2 * turning + 1) / rotary.dim
        fields["partial_rotary_factor"] = part
    return {"rope_type": kind, **fields}


# --- drawing ----------------------------------------------------------------------------------------------------------

_THETAS = (1e4, 5e5, 37.5)
_PARTS = (0, 0.25, 0.4, 0.75, 1.0)


def draw_scaling(chosen: Random, dim: int) -> Config:
    """Return random RoPE parameters of a random type, without a base, for heads of width `dim`."""
    pick, pairs = chosen.choice, dim // 2
    kinds: dict[str, Config] = {
        "default": sometimes(chosen, {PART: pick(_PARTS)}),
        "linear": {"factor": pick((1.0, 2, 4.5))},
        "dynamic": {"factor": pick((1.0, 2.0, 3.5))},
        "yarn": {"factor": pick((1.0, 4.0)), ORIGINAL: pick((8, 32))}
        | sometimes(chosen, {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": pick((True, False))})
        | pick(({}, {"mscale": 0.7, "mscale_all_dim": 1.3})),
        "longrope": {name: _draw_divisors(chosen, pairs) for name in ("short_factor", "long_factor")}
        | {ORIGINAL: pick((8, 32))}
        | sometimes(chosen, {"factor": pick((1.0, 4.0)), "attention_factor": 1.2}),
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": pick((2.0, 4.0)),
            ORIGINAL: pick((16, 64)),
        },
        "proportional": {PART: pick(_PARTS)} | sometimes(chosen, {"factor": 2.0}),
    }
    kind = pick([kind for kind in kinds if kind != "dynamic" or dim > 2])
    return {"rope_type": kind, **kinds[kind]}


def _draw_divisors(chosen: Random, pairs: int) -> list[float]:
    """Return random LongRoPE factors, which divide the RoPE frequencies.

    `pairs` is the number of pairs of dimensions.
    """
    return [chosen.uniform(0.5, 9) for _ in range(pairs)]


def draw_part(chosen: Random, dim: int) -> float:
    """Return a random fraction of a head of width `dim` for RoPE. It gives an even number of rotated dimensions."""
    return chosen.choice([part for part in (0.25, 0.5, 0.75, 1.0) if int(dim * part) and int(dim * part) % 2 == 0])


def draw_rotary(chosen: Random, dim: int, kind: RotaryKind) -> Config:
    """Return random RoPE config fields of a family in which all layers have the same RoPE.

    They have the form of transformers 4 or 5.
    """
    theta = chosen.choice(_THETAS)
    if kind.part:
        part = draw_part(chosen, dim)
        long = {name: _draw_divisors(chosen, int(dim * part) // 2) for name in ("short_factor", "long_factor")}
        types = [name for name in kind.types or () if name not in ("default", "su")]  # transformers 5 has no "su"
        scaling = {"type": chosen.choice(types or [""]), **long}
        fields = {kind.part: part, **sometimes(chosen, {kind.theta: theta})}
        if kind.inside:
            return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, kind.part: part}}
        if not types or chosen.random() < 0.5:
            return fields
        return {**fields, ORIGINAL: chosen.choice((8, 32)), "rope_scaling": scaling}
    fields = draw_scaling(chosen, dim)
    if kind.types is not None and fields["rope_type"] not in kind.types:
        fields = {"rope_type": "default"}
    if kind.short_only and fields["rope_type"] == "longrope":
        fields |= dict.fromkeys(_MSCALES, chosen.choice((1.0, 1.2)))
    if kind.entire:
        fields.pop(PART, None)
    if kind.usual is not None or kind.types is not None:
        return sometimes(chosen, {"rope_parameters": {**fields, "rope_theta": theta}})
    if chosen.random() < 0.5:
        return {"rope_parameters": {**fields, "rope_theta": theta}}
    plain = fields["rope_type"] == "default" and chosen.random() < 0.5
    return {"rope_theta": theta, "rope_scaling": None if plain else fields}


def draw_rotaries(chosen: Random, dim: int, kinds: Mapping[str, RotaryKind]) -> Config:
    """Return random RoPE config fields for several types of layers, in the form of transformers 5 or an older one."""

    def drawn() -> Config:
        fields = draw_scaling(chosen, dim)
        fields.pop("truncate", None)  # transformers does not see it inside these objects, so gptkit refuses `false`
        return fields

    if chosen.random() < 0.5:
        return {"rope_parameters": {kind: {**drawn(), "rope_theta": chosen.choice(_THETAS)} for kind in kinds}}
    bases = {usual.theta: chosen.choice(_THETAS) for usual in kinds.values() if usual.theta}
    scaled = bases and any(usual.scaled for usual in kinds.values())
    return ({"rope_scaling": drawn()} if scaled else {}) | sometimes(chosen, bases)
