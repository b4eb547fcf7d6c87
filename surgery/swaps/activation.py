"""One activation in place of another.

act(x) and new(s·x)/s have the same slopes at ±∞, whatever s is: the slope s goes into the projection before the
activation, 1/s into the one behind it (into `up` of a gated feed-forward). That is

- exact between SiLU and quick_gelu, x·σ(1.702 x) = silu(1.702 x)/1.702;
- as good as exact from ReLU, the limit of all the others: |new(s·x)/s - relu(x)| is at most 0.28/s, and s = 2⁵⁰;
- near between GELU and SiLU with the 1.702 of quick_gelu, or the best slope for what a layer sees on a text.

GELU by two SiLU units of different slopes, q·silu(b₁x)/b₁ + (1-q)·silu(b₂x)/b₂ with a feed-forward twice as wide, is
3.7 times closer than by one; SiLU by two GELUs 18 times.

Only ReLU in place of a smooth activation is another matter: it needs training (ReLUfication, 2310.04564).
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
"""The slope at which the others are ReLU: what is left, 0.28/s, is less than fp64 rounds a number of size 1 by. A
power of two, so that weights keep their digits; and a fourth power, in a gradient of the tanh form, stays finite."""
_NEEDS: dict[Activation, str] = {
    "gelu": "exact from relu; near from the tanh forms, silu and quick_gelu",
    "gelu_new": "exact from gelu_tanh and relu; near from the others",
    "gelu_tanh": "exact from gelu_new and relu; near from the others",
    "gelu_bloom": "exact from relu; to 1e-9 from gelu_new and gelu_tanh; near from the others",
    "quick_gelu": "exact from silu and relu; near from the others",
    "relu": "training: nothing else is near it",
    "silu": "exact from quick_gelu and relu; near from the others",
}
TARGETS = tuple(_NEEDS)  # what may be asked for
_FITTED: tuple[Activation, ...] = ("silu", "gelu", "gelu_new", "gelu_tanh", "quick_gelu")
_DOUBLED: tuple[Activation, ...] = _FITTED[:4]
_TANH: tuple[Activation, ...] = ("gelu_new", "gelu_tanh")
"""One function. gelu_bloom's is another in the tenth digit: it has √(2/π) as 0.79788456; gelu_fast's in the twelfth."""
_PHI: tuple[Activation, ...] = ("gelu", "gelu_python")  # one function
_GELUS: tuple[Activation, ...] = (*_PHI, *_TANH, "gelu_bloom", "gelu_fast")
NEAR = (*_GELUS, "silu", "quick_gelu", "relu")  # what another activation can stand for, at some slope
_FROM: dict[str, tuple[Activation, ...]] = {"silu": _GELUS, "gelu": ("silu", "quick_gelu")}
"""What two units of an activation stand for one of."""
TWO_UNITS: dict[str, tuple[float, float, float]] = {
    "silu": (1.22275, 1.44599, -1.0),
    "gelu": (0.4103, 0.72374, 0.34019),
}
"""b₁, b₂ and q for two units of this activation (of its tanh forms too) in place of one of the other: where the largest
difference over all x, from GELU or its tanh form, is least (Nelder-Mead): 0.0054 for SiLU, 0.0019 for GELU. For SiLU it
would fall on, to 0.0052, as b₁ and b₂ meet and q grows beyond bounds, which cancels digits: q is held at -1."""


def slope(old: Activation, new: Activation) -> float:
    """s with old(x) ≈ new(s·x)/s, where none is fitted."""
    if old == "relu":
        return _LIMIT
    if new == "relu":
        return 1.0
    return (_QUICK if new == "silu" else 1.0) / (_QUICK if old == "silu" else 1.0)


def how(old: Activation, new: Activation) -> Guarantee:
    """What replacing one by the other, at its slope, guarantees."""
    alike = any({old, new} <= set(each) for each in (_TANH, _PHI, ("silu", "quick_gelu")))
    if old in (new, "relu") or alike:
        return "exact"
    return "retrained" if new == "relu" else "approximate"


# --- the formulas -----------------------------------------------------------------------------------------------------


def _around(path: str, dense: Dense) -> tuple[list[str], list[str]]:
    """What makes the activation's input, and what its output is multiplied by: the other factor, or what is behind."""
    if isinstance(dense, GatedFeedForward):
        return tensors_of(path, dense, "gate_proj"), tensors_of(path, dense, "up_proj")
    return tensors_of(path, dense, "up_proj"), [f"{path}.down_proj.weight"]


def _one_unit(path: str, dense: Dense, s: _Slope) -> dict[str, Tensor]:
    """act(x) -> new(s·x)/s: s before the activation, 1/s behind."""

    def scaled(name: str, power: int) -> Computed:
        return Computed(lambda model: model.wide(name) * s(model) ** power)

    before, behind = _around(path, dense)
    return {name: scaled(name, 1 if name in before else -1) for name in (*before, *behind)}


def _two_units(path: str, dense: Dense, b: tuple[float, float], a: tuple[float, float]) -> dict[str, Tensor]:
    """act(x) -> a₁·new(b₁·x) + a₂·new(b₂·x): each unit twice, the first ones before all second ones."""

    def stacked(name: str, factors: tuple[float, float], axis: int) -> Computed:
        return Computed(lambda model: np.concatenate([model.wide(name) * factor for factor in factors], axis=axis))

    (before, behind), down = _around(path, dense), f"{path}.down_proj.weight"
    tensors: dict[str, Tensor] = {name: stacked(name, b, axis=0) for name in before}
    tensors |= {name: Moved(name, lambda rows: np.concatenate([rows, rows])) for name in behind}
    return tensors | {down: stacked(down, a, axis=1)}


def _pair(old: Activation, kind: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The slopes and the weights of two units."""
    first, second, q = TWO_UNITS[kind]
    once = _QUICK if old == "quick_gelu" else 1.0  # silu(1.702 x)/1.702
    return (first * once, second * once), (q / first / once, (1 - q) / second / once)


# --- the swaps --------------------------------------------------------------------------------------------------------


def _to_other(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Another activation, with the slope that goes with it; by name alone with `approximate`."""

    def made(_: int, path: str, old: Dense) -> dict[str, Tensor]:
        s = slope(old.activation, new)
        return {} if s == 1 or asked.approximate else _one_unit(path, old, lambda _: s)

    return _swapped(spec, _different(spec, asked, new), new, made, asked.approximate)


def _to_fitted(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Another activation, each layer with the slope that is best on a text."""
    found = _different(spec, asked, new)
    known = any(how(each.activation, new) != "approximate" for each in found.values())
    mixed = any(isinstance(spec.blocks[i].feed_forward, MixtureOfExperts) for i in found)
    if known or mixed or asked.calibration is None:
        reason = "gptkit cannot fit experts" if mixed else f"the scale from {_one_of(found)} to {new} is known"
        raise SwapRefused(f"nothing to fit: {reason}", f"--activation {new} needs no text.")
    fits = Scratch.by("feed_forward.slopes", asked.calibration(), found, new)

    def made(layer: int, path: str, old: Dense) -> dict[str, Tensor]:
        return _one_unit(path, old, lambda model: float(fits.of(model, str(layer))[0]))

    return _swapped(spec, found, new, made)


def _to_two_units(new: Activation, spec: ModelSpec, asked: Asked) -> Swapped:
    """Another activation, two units of it for each old one."""
    found = _different(spec, asked, new)
    for layer, dense in found.items():
        unnormed(f"blocks.{layer}.feed_forward", dense)
    kind = "silu" if new == "silu" else "gelu"
    known = (old.activation for old in found.values())
    other = next((old for old in known if old not in _FROM[kind] or how(old, new) == "exact"), None)
    if other or asked.approximate:
        reason = f"{other} needs only one unit" if other else "--approximate applies only to one unit"
        hint = f"--activation {new}"
        raise SwapRefused(f"two {new} units replace one of {' or '.join(_FROM[kind])}: {reason}", hint)
    return _swapped(spec, found, new, lambda _, path, old: _two_units(path, old, *_pair(old.activation, kind)), width=2)


def _different(spec: ModelSpec, asked: Asked, new: Activation) -> dict[int, Dense]:
    """The feed-forwards that are asked for and have another activation, by layer."""
    others = f"Possible: {', '.join(name for name in TARGETS if name != new)}"
    none = f"these feed-forwards use {new} already"
    layers = asked.those(spec, lambda block: dense_of(block).activation != new, none, others)
    found = {i: dense_of(spec.blocks[i]) for i in layers}
    far = [i for i, dense in found.items() if dense.activation not in NEAR]
    if far:
        hint = f"Possible from: {', '.join(NEAR)}."
        raise SwapRefused(
            (f"{new} cannot be rescaled to be close to {found[far[0]].activation}, the activation of layer {far[0]}"),
            hint,
        )
    return found


def _one_of(found: Mapping[int, Dense]) -> str:
    """The activations of feed-forwards, in words."""
    return " and ".join(sorted({dense.activation for dense in found.values()}))


def _swapped(
    spec: ModelSpec,
    found: Mapping[int, Dense],
    new: Activation,
    make: Callable[[int, str, Dense], dict[str, Tensor]],
    named: bool = False,
    width: int = 1,
) -> Swapped:
    """The tree with the new activation, `width` times as wide; `make` gives the tensors of a feed-forward, by its
    layer, path and record. `named`: nothing but the name was changed.
    """
    blocks, kinds, tensors = {}, list[Guarantee](), dict[str, Tensor]()
    for layer, dense in found.items():
        for path in paths(spec, layer):
            tensors |= make(layer, path, dense)
        wider = replace(dense, activation=new, intermediate_size=dense.intermediate_size * width)
        blocks[layer] = with_dense(spec.blocks[layer], wider)
        kind = how(dense.activation, new)
        forgotten = named and kind == "exact" and slope(dense.activation, new) != 1
        kinds.append("approximate" if forgotten else kind)
    old, notes = {dense.activation for dense in found.values()}, []
    if "relu" in old and not named:
        notes.append(
            f"{new} is used where it is ReLU, its input 2⁵⁰ times as large: the same function, and the same gradient;"
            " float16 does not hold such weights"
        )
    if new != "relu" and "gelu_bloom" in {*old, new} and len({*old, new} & {"gelu_bloom", *_TANH}) > 1:
        notes.append("gelu_bloom uses 0.79788456 for √(2/π), so it differs in the tenth digit")
    if new == "relu":
        notes.append(
            f"{in_words(list(found))}: ReLU gives zeros where {_one_of(found)} did not; train the model "
            "before you use it"
        )
    summary = {"from": _one_of(found), "to": new, "layers": list(found), "units": width}
    return Swapped(with_blocks(spec, blocks), weakest(kinds), tensors, summary, tuple(notes))


def _worth(new: Activation, form: str, spec: ModelSpec) -> Iterable[str]:
    """Two units, where every layer has an activation that they are for; what needs a text is not worth trying."""
    old = {dense_of(block).activation for block in spec.blocks} - {new}
    two = form.endswith(":2") and new in _FROM and bool(old)
    return (form,) if two and all(each in _FROM[new] and how(each, new) != "exact" for each in old) else ()


def _known_slope(new: Activation, step: Step) -> list[Step]:
    """Return the form with the slope that is known, which needs no text."""
    return [dataclasses.replace(step, value=new)]


def _entry(new: Activation, form: str, reshape: Callable[..., Swapped], needs: str) -> Swap:
    """One form of the option."""
    plain = form == new
    return Swap(
        option="activation",
        apart=True,
        each_stack=True,
        form=form,
        takes="feed-forward's activation",
        gives=new + {"2": ", two units for one", "fit": ", slope fitted"}.get(form.partition(":")[2], ""),
        guarantee=("retrained" if new == "relu" else "exact") if plain else "approximate",
        needs=needs,
        source="Hendrycks & Gimpel 1606.08415 (1.702); derived for gptkit; ReLU: 2310.04564",
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
        "The new activation function of the feed-forward. gptkit rescales the weights before and after it, "
        "so that it is as close to the old one as possible.",
        "silu | gelu | relu | …",
        words="gelu_new; quick_gelu = gelu sigmoid; relu; gelu = gelu exact, gelu erf, gelu python; gelu_tanh = "
        "gelu pytorch tanh, gelu approximate; gelu_bloom = bloom gelu; silu = swish",
    ),
)
SWAPS = (
    *(_entry(name, name, _to_other, needs) for name, needs in _NEEDS.items()),
    *(_entry(name, f"{name}:2", _to_two_units, "a feed-forward of twice the width") for name in _DOUBLED),
    *(_entry(name, f"{name}:fit", _to_fitted, "a calibration text") for name in _FITTED),
)
