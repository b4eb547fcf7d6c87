"""RoPE scaling in GGUF: metadata for linear scaling and YaRN, a tensor of frequency divisors for Llama 3.1 and
LongRoPE.

For Llama 3.1's scaling, a file contains only the divisor of every frequency. `fit_llama3` computes parameters that give
these divisors. It sets low_freq_factor to 1, since multiplying both frequency factors and the original context by the
same number changes nothing.

Source: llama.cpp, llama-model.cpp (load_hparams), llama-context.cpp (YaRN's factor of cos and sin: `attn_factor` times
1 + 0.1 ln(factor)), conversion/llama.py (rope_freqs.weight).
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..components import Llama3Scaling, Rotary
from ..errors import ConfigError
from .gguf_facts import GgufFacts, Value, fp32, shortest
from .rope import PART, write_rotary

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_FREQS, LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_MAX_PAIRS = 2**16
_STILL = 1e30  # the divisor of a pair that RoPE does not rotate


def read_scaling(
    facts: GgufFacts, dim: int, base: float, divisors: Collection[str] = (), *, latent: bool = False
) -> dict[str, Any] | None:
    """Return the field `rope_scaling` of config.json for a GGUF file, or None if RoPE is not scaled.

    Args:
        facts: the header of the file.
        dim: the number of dimensions of a head that RoPE rotates.
        base: the base of RoPE.
        divisors: the kinds of scaling whose frequency divisors llama.cpp reads from a tensor of such files: "llama3",
            "longrope" or "proportional".
        latent: whether the model has latent attention, see `_scaled_scores`.

    Raises:
        ConfigError: the scaling is unknown, or its tensor is missing or malformed.
    """
    kind = facts.string("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if facts.raw("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = 1.0 if facts.raw(key) in (None, 0) else facts.number(key)
    original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise facts.fail("rope.scaling.type", kind, "none, linear, yarn or longrope")
    _refuse_ignored_tensors(facts, divisors)
    if LONG in facts.shapes or _SHORT in facts.shapes:
        return {
            "rope_type": "longrope",
            "long_factor": _values(facts, LONG, dim),
            "short_factor": _values(facts, _SHORT, dim),
            "original_max_position_embeddings": original,
            "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
        }
    if kind == "longrope":
        raise ConfigError(f"GGUF: rope.scaling.type is longrope, but {LONG} is missing")
    if "proportional" in divisors:
        return _read_proportional(_values(facts, _FREQS, dim))
    if _FREQS in facts.shapes:
        factors = _values(facts, _FREQS, dim)
        if kind == "yarn" or (kind == "linear" and factor != 1.0):
            raise ConfigError(f"GGUF: {_FREQS} together with rope.scaling.type {kind} is not supported")
        return _scaling_fields(Rotary(dim=dim, base=base, scaling=fit_llama3(factors, base))) or None
    if kind == "yarn":
        yarn = _read_yarn(facts, factor, original)
        return {**yarn, **_scaled_scores(facts)} if latent else yarn
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": factor}


def _refuse_ignored_tensors(facts: GgufFacts, divisors: Collection[str]) -> None:
    """Raise ConfigError if a file has a tensor of frequency divisors that llama.cpp does not read.

    Args:
        facts: the header of the file.
        divisors: the kinds of scaling whose frequency divisors llama.cpp reads from a tensor of such files.
    """
    for name, *scalings in ((LONG, "longrope"), (_SHORT, "longrope"), (_FREQS, "llama3", "proportional")):
        if name in facts.shapes and not {*scalings} & {*divisors}:
            raise ConfigError(
                f"GGUF: the file has the tensor {name}, which llama.cpp ignores for the architecture {facts.name}"
            )


def _read_proportional(divisors: list[float]) -> dict[str, Any] | None:
    """Return p-RoPE's `rope_scaling` for a tensor of frequency divisors, or None if all divisors are 1.

    p-RoPE does not rotate some pairs of dimensions. The divisors of these pairs are practically infinite.
    """
    turning = [value for value in divisors if value < _STILL / 10]
    if {*turning} - {*turning[:1]} or turning != divisors[: len(turning)]:
        raise ConfigError(
            f"GGUF: the tensor {_FREQS} must have 1 for the dimensions that RoPE rotates and {_STILL:g} for the others"
        )
    if turning == divisors and turning[:1] == [1]:
        return None
    # transformers rounds the number of pairs down, so half a pair is added.
    part = (len(turning) + 0.5) / len(divisors) if len(turning) < len(divisors) else 1.0
    factor = {"factor": turning[0]} if turning else {}
    return {"rope_type": "proportional", PART: part, **factor}


def _scaled_scores(facts: GgufFacts) -> dict[str, float]:
    """Return two fields of DeepSeek's `rope_scaling`: `mscale_all_dim` and `attention_factor`.

    From `mscale_all_dim`, the factor of the attention scores is computed.

    Raises:
        ConfigError: the file has no metadata key for it. llama.cpp would then scale cos and sin instead.

    Source: llama-context.cpp and models/deepseek2.cpp, [TAG_DEEPSEEK2_YARN_LOG_MUL_FIX].
    """
    weight = shortest(fp32(facts.number(_LOG_MULTIPLIER) / 0.1))
    return {"mscale_all_dim": weight, "attention_factor": facts.number("rope.scaling.attn_factor", 1.0)}


def _read_yarn(facts: GgufFacts, factor: float, original: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if facts.raw(_LOG_MULTIPLIER) is not None:  # DeepSeek's mscale_all_dim; gptkit assumes an mscale of 1
        ratio = _yarn_mscale(factor) / (1 + (_yarn_mscale(factor) - 1) * facts.number(_LOG_MULTIPLIER))
        return {**fields, "attention_factor": facts.number("rope.scaling.attn_factor", 1.0) * ratio}
    # convert_hf_to_gguf.py writes the whole attention_factor of transformers under a key that llama.cpp does not read
    # for these architectures. The key that llama.cpp reads is a factor in addition to YaRN's own.
    if facts.raw("rope.scaling.yarn_attn_factor") is not None:
        fields["attention_factor"] = facts.number("rope.scaling.yarn_attn_factor")
    elif facts.raw("rope.scaling.attn_factor") is not None:
        fields["attention_factor"] = facts.number("rope.scaling.attn_factor") * _yarn_mscale(factor)
    return fields


def _values(facts: GgufFacts, name: str, head_dim: int) -> list[float]:
    if head_dim > 2 * _MAX_PAIRS or facts.shapes.get(name) != (head_dim // 2,):
        raise ConfigError(f"GGUF: {name} has shape {facts.shapes.get(name)}, expected {(head_dim // 2,)}")
    values = [shortest(value) for value in facts.floats(name)]
    if not all(0 < value < math.inf for value in values):
        raise ConfigError(f"GGUF: {name} has values that are not finite and positive")
    return values


def write_rope(rotary: Rotary, latent: Mapping[str, Any] | None = None) -> dict[str, Value | None]:
    """Return the metadata for a RoPE component.

    GGUF cannot express every component. To find differences, the caller reads the metadata back.

    Args:
        rotary: the component.
        latent: the field `rope_scaling` of config.json for models with latent attention, otherwise None.
    """
    metadata: dict[str, Value | None] = {"rope.dimension_count": rotary.dim, "rope.freq_base": rotary.base}
    scaling = _scaling_fields(rotary)
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn", "longrope"):
        metadata["rope.scaling.type"] = kind
    if kind in ("linear", "yarn"):
        metadata["rope.scaling.factor"] = scaling["factor"]
    if kind in ("yarn", "longrope"):
        metadata["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        usual = _yarn_mscale(scaling["factor"]) if kind == "yarn" and latent is None else 1.0
        if kind == "longrope" or scaling["attention_factor"] != usual:
            metadata["rope.scaling.attn_factor"] = scaling["attention_factor"] / usual
    if kind == "yarn" and latent is not None and latent.get("mscale_all_dim"):
        metadata[_LOG_MULTIPLIER] = 0.1 * latent["mscale_all_dim"]
    return metadata


def _scaling_fields(position: Any) -> dict[str, Any]:
    """Return the field `rope_scaling` of config.json for a position encoding.

    It is empty if there is no scaled RoPE.
    """
    if getattr(position, "scaling", None) is None:
        return {}
    return write_rotary(position, position.dim)["rope_scaling"] or {}


def rope_tensors(position: Any, divisors: Collection[str] = ("llama3", "longrope")) -> dict[str, tuple[float, ...]]:
    """Return the tensors that a GGUF file needs for a position encoding, in addition to the metadata.

    Args:
        position: the position encoding.
        divisors: the kinds of scaling whose frequency divisors llama.cpp reads from a tensor.

    Returns:
        The names of the tensors -> their values.
    """
    scaling = _scaling_fields(position)
    if "proportional" in divisors and position is not None:
        pairs = position.dim // 2
        turning = position.scaling.turning if scaling.get("rope_type") == "proportional" else pairs
        return {_FREQS: (float(scaling.get("factor", 1.0)),) * turning + (_STILL,) * (pairs - turning)}
    if scaling.get("rope_type") not in divisors:
        return {}
    if scaling["rope_type"] == "llama3":
        return {_FREQS: tuple(llama3_divisors(position.scaling, position.base, position.dim // 2))}
    return {LONG: tuple(scaling["long_factor"]), _SHORT: tuple(scaling["short_factor"])}


def _yarn_mscale(factor: float) -> float:
    """Return the factor by which YaRN multiplies cos and sin by default (2309.00071, section 3.4).

    `factor` is the factor of the context length.
    """
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _wavelengths(base: float, pairs: int) -> list[float]:
    """Return the wavelength in tokens of every pair of dimensions that RoPE rotates.

    `pairs` is the number of pairs.
    """
    return [2 * math.pi * base ** (pair / pairs) for pair in range(pairs)]


def llama3_divisors(scaling: Llama3Scaling, base: float, pairs: int) -> list[float]:
    """Return the numbers by which Llama 3.1's scaling divides the RoPE frequencies, one for every pair of dimensions.

    Args:
        scaling: the parameters of the scaling.
        base: the base of RoPE.
        pairs: the number of pairs of dimensions.
    """
    low, high, factor = scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor
    divisors = []
    for wavelength in _wavelengths(base, pairs):
        turns = scaling.original_context / wavelength
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def fit_llama3(divisors: list[float], base: float) -> Llama3Scaling | None:
    """Return parameters of Llama 3.1's RoPE scaling that give these frequency divisors, or None if all are 1.

    Raises:
        ConfigError: there are no such parameters.
    """
    factor = shortest(max(divisors, default=1.0))
    if all(value == 1 for value in divisors):
        return None
    if min(divisors) < 1:
        raise ConfigError(f"GGUF: {_FREQS} has values below 1, which Llama 3.1's RoPE scaling never has")
    for high, original in _candidates(divisors, base, factor):
        if not (1 < high < math.inf and 1 <= original < 2**31):
            continue
        try:
            scaling = Llama3Scaling(
                factor=factor, low_freq_factor=1.0, high_freq_factor=high, original_context=original
            )
        except ConfigError:
            continue
        again = llama3_divisors(scaling, base, len(divisors))
        if all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(again, divisors, strict=True)):
            return scaling
    raise ConfigError(f"GGUF: no parameters of Llama 3.1's RoPE scaling give the values of {_FREQS}")


def _candidates(divisors: list[float], base: float, factor: float) -> list[tuple[float, int]]:
    """Return pairs (high_freq_factor, original context) that may give these frequency divisors.

    The first are in common use. The others are computed from the divisors.
    """
    usual = [(4.0, 8192), *((4.0, 2**power) for power in range(6, 18))]
    waves = _wavelengths(base, len(divisors))
    ramp = [
        (wave, (1 / v - 1 / factor) / (1 - 1 / factor))
        for wave, v in zip(waves, divisors, strict=True)
        if 1 < v < factor
    ]
    if len(ramp) > 1:
        # smooth = original / ((high - 1) wavelength) - 1 / (high - 1) is a line, and two points determine it.
        (wave, smooth), (other, less) = ramp[0], ramp[-1]
        slope = (smooth - less) / (1 / wave - 1 / other)
        offset = slope / wave - smooth
        if offset > 0 and math.isfinite(slope):
            high = 1 + 1 / offset
            return [*usual, (float(f"{high:.4g}"), _nearest(slope / offset)), (high, _nearest(slope / offset))]
        return usual
    if ramp:
        ((wave, smooth),) = ramp
        return [*usual, *((high, _nearest(wave * (smooth * (high - 1) + 1))) for high in (4.0, 2.0, 8.0, 16.0, 1.5))]
    # No pair is on the ramp: any original context between the two wavelengths fits, with a narrow ramp.
    slow = [wave for wave, value in zip(waves, divisors, strict=True) if value == factor]
    original = max(1, math.ceil(min(slow)) - 1)
    return [*usual, *((high, original) for high in (4.0, 2.0, 1.5, 1.1, 1.01))]


def _nearest(value: float) -> int:
    return round(value) if 0 < value < 2**31 else 0


def refitted(position: Any) -> Any:
    """Return the position encoding that comes back if this one is written to GGUF and read.

    For Llama 3.1's scaling, GGUF has only the divisors of the frequencies. The result has the parameters that
    `fit_llama3` computes from them.
    """
    divisors = [shortest(fp32(value)) for value in rope_tensors(position).get(_FREQS, ())]
    try:
        if divisors:
            return msgspec.structs.replace(position, scaling=fit_llama3(divisors, shortest(fp32(position.base))))
    except ConfigError:
        pass
    return position
