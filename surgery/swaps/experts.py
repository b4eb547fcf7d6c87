"""Dense feed-forward <-> mixture of experts.

- Copies (Sparse Upcycling 2212.05055): each expert is the feed-forward there was, and a router of random weights takes
  K of the E. Their weights are made to sum to 1, so experts that are alike give what one of them gives. Exact, until
  training parts them.
- A split: each expert is one of E parts of the intermediate dimension, all of them taken. A router of zeros weighs each
  with 1/E, which E times the output projection makes up for: exact. (The fine-grained experts of DeepSeekMoE
  2401.06066 start so.)

Back: experts that are alike are one; those that a router of zeros all takes stand side by side again. Otherwise there
is their mean, each expert weighted with how much the router gave it on a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...components import Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec
from ...errors import SwapRefused, UsageError
from ..base import Computed, Filled, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import guarantee_of, in_words, unnormed, with_mixers
from ..registry import Asked, Clears, Step, Swap
from .mlp import Dense, dense_of

MOST = 1024
"""Experts that a mixture may have; see `components.MixtureOfExperts`."""
NORMALISED = True
"""The weights of the experts that are taken are made to sum to 1."""


def is_mixture(block: Block) -> bool:
    """Whether a block's feed-forward is a mixture of experts."""
    return isinstance(block.feed_forward, MixtureOfExperts)


def numbers(asked: Asked) -> tuple[int, int]:
    """E and K of "moe:ExK"."""
    match = re.fullmatch(r"moe:(\d{1,9})x(\d{1,9})(:split)?", asked.value)
    if match is None:
        raise UsageError(f"{asked.value!r}: expected moe:ExK, as moe:8x2: 8 experts, 2 of them for each token")
    count, top = int(match[1]), int(match[2])
    if not 1 <= top <= count or count > MOST:
        raise SwapRefused(
            f"{top} of {count} experts for a token: possible are 1 to {MOST} experts, and 1 to all of them per token",
            "As moe:8x2: 8 experts, 2 of them for each token.",
        )
    return count, top


def _dense_layers(spec: ModelSpec, asked: Asked) -> dict[int, Dense]:
    """The layers asked for that have one feed-forward, and it."""
    none = "the feed-forwards asked for are mixtures of experts already"
    layers = asked.those(spec, lambda block: not is_mixture(block), none, "--mlp dense is the way back, where it is.")
    for layer in layers:
        unnormed(f"blocks.{layer}.feed_forward", dense_of(spec.blocks[layer]))
    return {layer: dense_of(spec.blocks[layer]) for layer in layers}


# --- dense -> experts -------------------------------------------------------------------------------------------------


def _to_copies(spec: ModelSpec, asked: Asked) -> Swapped:
    """Dense -> E copies, K of them for each token."""
    count, top = numbers(asked)
    seed = asked.settings.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UsageError(f"the router's seed is {seed!r}, expected a whole number from 0")
    found = _dense_layers(spec, asked)
    tensors: dict[str, Tensor] = {}
    for layer, dense in found.items():
        path = f"blocks.{layer}.feed_forward"
        first = f"{path}.gate_proj.weight" if isinstance(dense, GatedFeedForward) else f"{path}.up_proj.weight"
        router = partial(drawn, rows=count, columns=spec.hidden_size, seed=(seed, layer))
        tensors |= {f"{path}.router.weight": Moved(first, router)} | copies(path, dense, count)
    return _with_experts(spec, found, tensors, count, top, NORMALISED, {"seed": seed})


def _to_parts(spec: ModelSpec, asked: Asked) -> Swapped:
    """Dense -> E experts that are its parts, all of them taken."""
    count, top = numbers(asked)
    found = _dense_layers(spec, asked)
    if top != count:
        raise SwapRefused(
            f"with {top} of {count} parts a token loses the others: a split takes all its parts",
            f"--mlp moe:{count}x{count}:split, or --mlp moe:{count}x{top}, which makes copies.",
        )
    tensors: dict[str, Tensor] = {}
    for layer, dense in found.items():
        path, width = f"blocks.{layer}.feed_forward", dense.intermediate_size
        if width % count:
            fits = ", ".join(str(n) for n in range(2, min(width, MOST) + 1) if width % n == 0)
            raise SwapRefused(f"a width of {width} has no {count} equal parts", f"Possible: {fits}")
        found[layer] = replace(dense, intermediate_size=width // count)
        tensors[f"{path}.router.weight"] = Filled((count, spec.hidden_size), 0.0, like=f"{path}.down_proj.weight")
        for index in range(count):
            tensors |= part(path, found[layer], index, count)
    note = "all experts are taken and weighted alike: one that takes fewer has to be trained to"
    return _with_experts(spec, found, tensors, count, count, False, {"split": True}, note)


def _with_experts(
    spec: ModelSpec,
    experts: Mapping[int, Dense],
    tensors: Mapping[str, Tensor],
    count: int,
    top: int,
    normalise: bool,
    summary: dict[str, Any],
    *notes: str,
) -> Swapped:
    """The tree with so many experts of a kind in each of these layers."""
    mixture = partial(MixtureOfExperts, hidden_size=spec.hidden_size, experts=count, top_k=top, normalise=normalise)
    new = with_mixers(spec, {layer: mixture(expert=each) for layer, each in experts.items()})
    told = {"from": "dense", "to": "experts", "experts": count, "top_k": top, "layers": list(experts)}
    return Swapped(new, "exact", tensors, told | summary, notes)


def copies(path: str, dense: Dense, count: int) -> dict[str, Tensor]:
    """Every expert's tensors: those of the feed-forward that there was."""
    return {f"{path}.experts.{i}.{name}": Moved(f"{path}.{name}") for i in range(count) for name in dense.shapes()}


def drawn(weight: NDArray[Any], rows: int, columns: int, seed: tuple[int, int]) -> NDArray[Any]:
    """A router (rows, columns) of elements drawn at random from a weight: random as that weight is, in size and in
    dtype. A given seed draws the same ones on every machine.
    """
    chosen = np.random.Generator(np.random.PCG64(seed)).integers(0, weight.size, (rows, columns))
    result: NDArray[Any] = weight.reshape(-1)[chosen]
    return result


def part(path: str, expert: Dense, index: int, count: int) -> dict[str, Tensor]:
    """One expert of a split: its rows of what reads, its columns of what writes, the latter times `count`. The output
    bias is every expert's: weighted with 1/count each, they sum to it.
    """
    cut = slice(index * expert.intermediate_size, (index + 1) * expert.intermediate_size)
    tensors: dict[str, Tensor] = {name: Moved(f"{path}.{name}", lambda array: array[cut]) for name in expert.shapes()}
    tensors["down_proj.weight"] = weighed(f"{path}.down_proj.weight", cut, count)
    if expert.down_bias:
        tensors["down_proj.bias"] = Moved(f"{path}.down_proj.bias")
    return {f"{path}.experts.{index}.{name}": how for name, how in tensors.items()}


def weighed(name: str, cut: slice, factor: float) -> Computed:
    """Columns of a weight, times a number."""
    return Computed(lambda model: model.wide(name)[:, cut] * factor)


# --- back -------------------------------------------------------------------------------------------------------------


def _to_dense(spec: ModelSpec, asked: Asked) -> Swapped:
    """Mixture -> one feed-forward: exact where the experts are alike or all weighted alike, else their mean."""
    hint = "--mlp moe:8x2 makes 8 experts of each."
    found = asked.those(spec, is_mixture, "the feed-forwards asked for are dense already", hint)
    mixtures: dict[int, Any] = {layer: spec.blocks[layer].feed_forward for layer in found}
    one = [layer for layer in found if weights_sum_to_one(mixtures[layer]) and experts_alike(spec, asked, layer)]
    all_of = [layer for layer in found if layer not in one and all_weighed_alike(spec, asked, layer)]
    lossy = [layer for layer in found if layer not in (*one, *all_of)]
    shares = None  # all count alike
    if lossy and not asked.approximate and asked.calibration is not None:
        shares = Scratch.by("feed_forward.shares", asked.calibration(), set(lossy))
    changed, tensors = dict[int, Dense](), dict[str, Tensor]()
    for layer, mixture in mixtures.items():
        path, dense = f"blocks.{layer}.feed_forward", mixture.expert
        if layer in one:
            tensors |= {f"{path}.{name}": Moved(f"{path}.experts.0.{name}") for name in dense.shapes()}
        elif layer in all_of:
            tensors |= side_by_side(path, mixture)
            dense = replace(dense, intermediate_size=dense.intermediate_size * mixture.experts)
        else:
            for name in dense.shapes():
                tensors[f"{path}.{name}"] = mean(path, name, mixture.experts, shares, layer)
        changed[layer] = dense
    summary = {"from": "experts", "to": "dense", "layers": found, "alike": one, "side_by_side": all_of}
    notes = (f"{in_words(lossy)}: the experts differ, and their mean is in their place",) if lossy else ()
    guarantee = guarantee_of(len(lossy), len(spec.blocks))
    return Swapped(with_mixers(spec, changed), guarantee, tensors, summary, notes)


def weights_sum_to_one(mixture: MixtureOfExperts) -> bool:
    """Whether the weights of the experts that a token gets do, whatever the router says."""
    return mixture.normalise or mixture.top_k == mixture.experts


def experts_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether every expert of a layer has the same values."""
    path, mixture = f"blocks.{layer}.feed_forward.experts", spec.blocks[layer].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    pairs = ((name, i) for name in mixture.expert.shapes() for i in range(1, mixture.experts))
    return all(asked.weights.same(f"{path}.0.{name}", f"{path}.{i}.{name}") for name, i in pairs)


def all_weighed_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether a layer's router takes all experts for every token, each with the weight 1/E."""
    mixture = spec.blocks[layer].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    return mixture.top_k == mixture.experts and asked.weights.zero(f"blocks.{layer}.feed_forward.router.weight")


def side_by_side(path: str, mixture: MixtureOfExperts) -> dict[str, Tensor]:
    """One feed-forward of all the experts' units, the output projection over E; the mean of the output biases."""
    tensors: dict[str, Tensor] = {}
    for name in mixture.expert.shapes():
        names = tuple(f"{path}.experts.{i}.{name}" for i in range(mixture.experts))
        how: Tensor = Moved(names, lambda *arrays: np.concatenate(arrays))
        if name == "down_proj.weight":
            how = joined(names, mixture.experts)
        elif name == "down_proj.bias" and len(names) > 1:
            how = Computed(lambda model, names=names: np.mean([model.wide(each) for each in names], axis=0))  # type: ignore[misc]
        tensors[f"{path}.{name}"] = how
    return tensors


def joined(names: tuple[str, ...], divisor: float) -> Computed:
    """The columns of several weights side by side, over a number."""
    return Computed(lambda model: np.concatenate([model.wide(name) for name in names], axis=1) / divisor)


def mean(path: str, name: str, count: int, shares: Scratch | None, layer: int) -> Computed:
    """The mean of one of the experts' tensors, by their shares."""

    def compute(model: Model) -> Wide:
        share = np.full(count, 1 / count) if shares is None else shares.of(model, str(layer))
        result: Wide = sum(share[i] * model.wide(f"{path}.experts.{i}.{name}") for i in range(count))
        return result

    return Computed(compute)


def back(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from copies or parts, where all that was asked for was dense."""
    return None if asked.those(before, is_mixture) else asked.again("mlp", "dense")


def _parts_worth_trying(spec: ModelSpec) -> tuple[str, ...]:
    """Where some layer is dense, and all that are have halves."""
    widths = {block.feed_forward.intermediate_size for block in spec.blocks if not is_mixture(block)}
    return ("moe:2x2:split",) if widths and not any(width % 2 for width in widths) else ()


entry = partial(Swap, option="mlp", by_layer=True)

ORDER = 130
SWAPS = (
    entry(
        form="moe:ExK:split",
        takes="dense feed-forward",
        gives="E experts that are its parts",
        needs="K = E; a width that E divides",
        source="derived for gptkit; fine-grained experts: DeepSeekMoE 2401.06066",
        reshape=_to_parts,
        examples=_parts_worth_trying,
        inverse=back,
    ),
    entry(
        form="moe:ExK",
        takes="dense feed-forward",
        gives="E experts that are copies, K per token",
        needs="E times the feed-forward's parameters",
        source="Sparse Upcycling 2212.05055",
        reshape=_to_copies,
        examples=lambda spec: () if all(map(is_mixture, spec.blocks)) else ("moe:4x2",),
        clears=(Clears("*", "mlp=moe:{theirs.experts}x{theirs.top_k}", theirs=MixtureOfExperts),),
        inverse=back,
    ),
    entry(
        form="dense",
        takes="mixture of experts",
        gives="dense feed-forward",
        needs="experts that are alike, or a router of zeros that takes all; otherwise a text, for their mean",
        source="Sparse Upcycling 2212.05055, backwards",
        reshape=_to_dense,
        clears=tuple(Clears("*", ours=MixtureOfExperts, theirs=dense) for dense in (GatedFeedForward, FeedForward)),
        calibrated=True,
    ),
)
