"""Replace the activation function of feed-forwards by another one.

act(x) and new(s·x)/s have the same slopes at ±∞ for every s. The factor s, called the slope, is folded into the
projection before the activation, and 1/s into the one after it (in a gated feed-forward, into up_proj). That is

- exact between SiLU and quick_gelu, x·σ(1.702 x) = silu(1.702 x)/1.702;
- as good as exact from ReLU, the limit of all other activations for large s: |new(s·x)/s - relu(x)| is at most 0.28/s,
  and s = 2⁵⁰;
- a good approximation between GELU and SiLU, with the slope 1.702, or with the best slope for a layer's inputs on a
  text.

A unit is one element of the intermediate dimension. Two SiLU units with different slopes, q·silu(b₁x)/b₁ +
(1-q)·silu(b₂x)/b₂, approximate GELU 3.7 times closer than one. The feed-forward becomes twice as wide. Two GELU units
approximate SiLU 18 times closer.

ReLU in place of a smooth activation needs training (ReLUfication, 2310.04564).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from msgspec.structs import replace

from ...components import Activation, GatedFeedForward, MixtureOfExperts, ModelSpec
from ...errors import SwapRefused
from ..base import Computed, Guarantee, Model, Moved, Swapped, Tensor, weakest
from ..fits.scratch import Scratch
from ..layerwise import Dense, in_words, tensors_of, unnormed, with_blocks
from ..options import FEED_FORWARD, Option
from ..registry import Asked, Clears, Step, Swap
from .mlp import dense_of, paths, with_dense

_Slope = Callable[[Model], float]  # a number that may be fitted to the model
_QUICK = 1.702  # quick_gelu's slope (Hendrycks & Gimpel 1606.08415)
_LIMIT = 2.0**50
"""The slope s at which other activations equal ReLU: their error, 0.28/s, is below the fp64 rounding of a number near
1. It is a power of two, so weights keep their digits. Its fourth power, in a gradient of tanh, is finite."""
_NEEDS: dict[Activation, str] = {
    "gelu": "Exact if the old activation is relu, and approximate from the tanh forms of GELU, silu and quick_gelu",
    "gelu_new": "Exact if the old activation is gelu_tanh or relu, and approximate otherwise",
    "gelu_tanh": "Exact if the old activation is gelu_new or relu, and approximate otherwise",
    "gelu_bloom": "Exact if the old activation is relu, equal to 1e-9 from gelu_new and gelu_tanh, else approximate",
    "quick_gelu": "Exact if the old activation is silu or relu, and approximate otherwise",
    "relu": "No other activation is close to ReLU, so the model must be trained",
    "silu": "Exact if the old activation is quick_gelu or relu, and approximate otherwise",
}
TARGETS = tuple(_NEEDS)  # the possible new activations
_FITTED: tuple[Activation, ...] = ("silu", "gelu", "gelu_new", "gelu_tanh", "quick_gelu")
_DOUBLED: tuple[Activation, ...] = _FITTED[:4]
_TANH: tuple[Activation, ...] = ("gelu_new", "gelu_tanh")
"""Two names of one function. gelu_bloom differs in the tenth digit, because it uses 0.79788456 for √(2/π), and
gelu_fast differs in the twelfth."""
_PHI: tuple[Activation, ...] = ("gelu", "gelu_python")  # one function
_GELUS: tuple[Activation, ...] = (*_PHI, *_TANH, "gelu_bloom", "gelu_fast")
NEAR = (*_GELUS, "silu", "quick_gelu", "relu")  # activations that another one can approximate, at some slope
_FROM: dict[str, tuple[Activation, ...]] = {"silu": _GELUS, "gelu": ("silu", "quick_gelu")}
"""For each new activation, the old activations that two units with the new one can approximate."""
TWO_UNITS: dict[str, tuple[float, float, float]] = {
    "silu": (1.22275, 1.44599, -1.0),
    "gelu": (0.4103, 0.72374, 0.34019),
}
"""b₁, b₂ and q for two units with this activation (or its tanh forms) in place of one unit with another activation.
They minimise the largest difference over all x (Nelder-Mead): 0.0054 for SiLU, 0.0019 for GELU. For SiLU, 0.0052 is
possible if b₁ and b₂ become equal and q grows without bounds, but then digits cancel. So q is fixed at -1."""


def slope(old: Activation, new: Activation) -> float:
    """Return the slope s for which old(x) ≈ new(s·x)/s, as far as it is known without a text."""
    if old == "relu":
        return _LIMIT
    if new == "relu":
        return 1.0
    return (_QUICK if new == "silu" else 1.0) / (_QUICK if old == "silu" else 1.0)


def how(old: Activation, new: Activation) -> Guarantee:
    """Return the guarantee for replacing the activation `old` by `new` with the slope from `slope`."""
    alike = any({old, new} <= set(group) for group in (_TANH, _PHI, ("silu", "quick_gelu")))
    if old in (new, "relu") or alike:
        return "exact"
    return "retrained" if new == "relu" else "approximate"


# --- the formulas -----------------------------------------------------------------------------------------------------


def _around(path: str, dense: Dense) -> tuple[list[str], list[str]]:
    """Return the names of the tensors before the activation, and of the tensors that multiply its output.

    For a plain feed-forward, these are up_proj and down_proj. For a gated one, they are gate_proj and up_proj.
    """
    if isinstance(dense, GatedFeedForward):
        return tensors_of(path, dense, "gate_proj"), tensors_of(path, dense, "up_proj")
    return tensors_of(path, dense, "up_proj"), [f"{path}.down_proj.weight"]


def _one_unit(path: str, dense: Dense, s: _Slope) -> dict[str, Tensor]:
    """Return the tensors of a feed-forward that computes new(s·x)/s instead of act(x).

    The projection before the activation is multiplied by s, and the one after it by 1/s.
    """

    def scaled(name: str, power: int) -> Computed:
        return Computed(lambda model: model.wide(name) * s(model) ** power)

    before, after = _around(path, dense)
    return {name: scaled(name, 1 if name in before else -1) for name in (*before, *after)}


def _two_units(path: str, dense: Dense, b: tuple[float, float], a: tuple[float, float]) -> dict[str, Tensor]:
    """Return the tensors of a feed-forward that computes a₁·new(b₁·x) + a₂·new(b₂·x) instead of act(x).

    It is twice as wide. The first half of its intermediate elements has the slope b₁, and the second half b₂.
    """

    def stacked(name: str, factors: tuple[float, float], axis: int) -> Computed:
        return Computed(lambda model: np.concatenate([model.wide(name) * factor for factor in factors], axis=axis))

    (before, after), down = _around(path, dense), f"{path}.down_proj.weight"
    tensors: dict[str, Tensor] = {name: stacked(name, b, axis=0) for name in before}
    tensors |= {name: Moved(name, lambda rows: np.concatenate([rows, rows])) for name in after}
    return tensors | {down: stacked(down, a, axis=1)}


def _pair(old: Activation, kind: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the slopes b and the weights a for `_two_units`. `kind` is the new activation, a key of `TWO_UNITS`."""
    first, second, q = TWO_UNITS[kind]
    once = _QUICK if old == "quick_gelu" else 1.0  # silu(1.702 x)/1.702
    return (first * once, second * once), (q / first / once, (1 - q) / second / once)


# --- the swaps --------------------------------------------------------------------------------------------------------


def _to_other(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the activation function, and scale its input and output so that both functions have a similar slope.

    The factor is a constant of the pair of functions, so no text is needed to fit it. With --approximate, change only
    the activation function and no weights.
    """

    def tensors_of_layer(_: int, path: str, old: Dense) -> dict[str, Tensor]:
        s = slope(old.activation, new)
        return {} if s == 1 or asked.approximate else _one_unit(path, old, lambda _: s)

    return _swapped(spec, _different(spec, asked, new), new, tensors_of_layer, asked.approximate)


def _to_fitted(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the activation with the slope that fits each layer's inputs on a text best."""
    mlps = _different(spec, asked, new)
    known = any(how(dense.activation, new) != "approximate" for dense in mlps.values())
    mixed = any(isinstance(spec.blocks[i].feed_forward, MixtureOfExperts) for i in mlps)
    if known or mixed or asked.calibration is None:
        reason = (
            "gptkit cannot fit it for mixtures of experts"
            if mixed
            else f"the scale from {_one_of(mlps)} to {new} is known already"
        )
        raise SwapRefused(
            f"--activation {asked.value} fits a scale on a text, but {reason}", f"--activation {new} needs no text."
        )
    fits = Scratch.by("feed_forward.slopes", asked.calibration(), mlps, new)

    def tensors_of_layer(layer: int, path: str, old: Dense) -> dict[str, Tensor]:
        return _one_unit(path, old, lambda model: float(fits.of(model, str(layer))[0]))

    return _swapped(spec, mlps, new, tensors_of_layer)


def _to_two_units(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Change the activation, and replace each intermediate element by two with the new activation."""
    mlps = _different(spec, asked, new)
    for layer, dense in mlps.items():
        unnormed(f"blocks.{layer}.feed_forward", dense)
    kind = "silu" if new == "silu" else "gelu"
    known = (old.activation for old in mlps.values())
    exception = next((old for old in known if old not in _FROM[kind] or how(old, new) == "exact"), None)
    if exception or asked.approximate:
        reason = f"{exception} needs only one unit" if exception else "--approximate applies only to one unit"
        hint = f"Use --activation {new}."
        raise SwapRefused(
            f"--activation {asked.value} replaces one {' or '.join(_FROM[kind])} unit by two {new} units, but {reason}",
            hint,
        )
    return _swapped(spec, mlps, new, lambda _, path, old: _two_units(path, old, *_pair(old.activation, kind)), width=2)


def _different(spec: ModelSpec, asked: Asked, new: Activation) -> dict[int, Dense]:
    """Return the feed-forwards to change, by layer: those of the chosen layers with another activation than `new`."""
    possible = f"Possible: {', '.join(name for name in TARGETS if name != new)}"
    refusal = f"these feed-forwards use {new} already"
    layers = asked.those(spec, lambda block: dense_of(block).activation != new, refusal, possible)
    mlps = {i: dense_of(spec.blocks[i]) for i in layers}
    far = [i for i, dense in mlps.items() if dense.activation not in NEAR]
    if far:
        hint = f"Possible from: {', '.join(NEAR)}."
        raise SwapRefused(
            (f"{new} cannot be rescaled to be close to {mlps[far[0]].activation}, the activation of layer {far[0]}"),
            hint,
        )
    return mlps


def _one_of(mlps: Mapping[int, Dense]) -> str:
    """Return the names of the activations of some feed-forwards as a phrase, such as "gelu and silu"."""
    return " and ".join(sorted({dense.activation for dense in mlps.values()}))


def _swapped(
    spec: ModelSpec,
    mlps: Mapping[int, Dense],
    new: Activation,
    make: Callable[[int, str, Dense], dict[str, Tensor]],
    named: bool = False,
    width: int = 1,
) -> Swapped:
    """Return the result of a swap that gives some feed-forwards the activation `new`.

    Args:
        spec: The old model.
        mlps: The feed-forwards to change, by layer.
        new: The new activation.
        make: A function of layer, path and component of a feed-forward, which returns its new tensors.
        named: Whether only the activation function changes, and no weights (--approximate).
        width: The new intermediate size, divided by the old one.
    """
    blocks, kinds, tensors = {}, list[Guarantee](), dict[str, Tensor]()
    for layer, dense in mlps.items():
        for path in paths(spec, layer):
            tensors |= make(layer, path, dense)
        wider = replace(dense, activation=new, intermediate_size=dense.intermediate_size * width)
        blocks[layer] = with_dense(spec.blocks[layer], wider)
        kind = how(dense.activation, new)
        forgotten = named and kind == "exact" and slope(dense.activation, new) != 1
        kinds.append("approximate" if forgotten else kind)
    old, notes = {dense.activation for dense in mlps.values()}, []
    if "relu" in old and not named:
        notes.append(
            f"the inputs of {new} are multiplied by 2⁵⁰, so that it equals ReLU; the function and its gradient stay the"
            " same, but float16 cannot store such weights"
        )
    if new != "relu" and "gelu_bloom" in {*old, new} and len({*old, new} & {"gelu_bloom", *_TANH}) > 1:
        notes.append("gelu_bloom uses 0.79788456 for √(2/π), so it differs in the tenth digit")
    if new == "relu":
        notes.append(
            f"{in_words(list(mlps))}: ReLU gives zeros where {_one_of(mlps)} did not; train the model before you use it"
        )
    summary = {"from": _one_of(mlps), "to": new, "layers": list(mlps), "units": width}
    return Swapped(with_blocks(spec, blocks), weakest(kinds), tensors, summary, tuple(notes))


def _worth(new: Activation, form: str, spec: ModelSpec) -> Iterable[str]:
    """Return the values to try in `gptkit swaps`: "silu:2" or "gelu:2", if this approximates every layer's activation.

    `form` is the value of this swap. For other values, and if an activation can be replaced exactly, return ().
    """
    old = {dense_of(block).activation for block in spec.blocks} - {new}
    two = form.endswith(":2") and new in _FROM and bool(old)
    return (
        (form,)
        if two and all(activation in _FROM[new] and how(activation, new) != "exact" for activation in old)
        else ()
    )


def _known_slope(new: Activation, step: Step) -> list[Step]:
    """Return the simpler variant of a step: `_to_other`, which scales by a constant instead of a fit on a text."""
    return [dataclasses.replace(step, value=new)]


def _entry(new: Activation, form: str, reshape: Callable[..., Swapped], needs: str) -> Swap:
    """Return the swap for one value of the option --activation.

    Args:
        new: The new activation.
        form: The value, such as "silu", "silu:2" or "silu:fit".
        reshape: The function that runs the swap. Its first argument is `new`.
        needs: The preconditions as text (`Swap.needs`).
    """
    plain = form == new
    return Swap(
        option="activation",
        apart=True,
        each_stack=True,
        form=form,
        takes="the activation of the feed-forward",
        gives=new
        + {"2": ", with two units for every old one", "fit": ", with a slope fitted to a text"}.get(
            form.partition(":")[2], ""
        ),
        guarantee=("retrained" if new == "relu" else "exact") if plain else "approximate",
        needs=needs,
        source="Hendrycks & Gimpel 1606.08415 (the slope 1.702); ReLU: 2310.04564; other slopes are derived for gptkit",
        reshape=partial(reshape, new),
        examples=partial(_worth, new, form),
        by_layer=True,
        calibrated=form.endswith(":fit"),
        cheaper=partial(_known_slope, new) if form.endswith(":fit") else None,
        clears=(Clears("*.activation", theirs=new),) if plain else (),
    )


ORDER = 140
OPTIONS = (
    Option(
        "activation",
        FEED_FORWARD,
        2,
        "The new activation function of the feed-forward. gptkit rescales the weights before and after this "
        "function, so that the result is as close as possible to that of the old one.",
        "silu | gelu | relu | …",
        words="gelu_new; quick_gelu = gelu sigmoid; relu; gelu = gelu exact, gelu erf, gelu python; gelu_tanh = "
        "gelu pytorch tanh, gelu approximate; gelu_bloom = bloom gelu; silu = swish",
    ),
)
SWAPS = (
    *(_entry(name, name, _to_other, needs) for name, needs in _NEEDS.items()),
    *(_entry(name, f"{name}:2", _to_two_units, "The feed-forward becomes twice as wide") for name in _DOUBLED),
    *(_entry(name, f"{name}:fit", _to_fitted, "Needs a calibration text") for name in _FITTED),
)
