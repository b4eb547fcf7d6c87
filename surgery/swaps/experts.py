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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...components import Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec
from ...errors import SwapRefused, UsageError
from ..base import Computed, Filled, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import blocks_text, chosen_layers, guarantee_of, in_words, replaced, unknown, with_blocks
from ..registry import Asked, Clears, Step, Swap
from .mlp import Dense

__all__ = ["SWAPS"]

replace = msgspec.structs.replace
MOST = 1024
"""Experts that a mixture may have; see `components.MixtureOfExperts`."""


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


def dense_layers(spec: ModelSpec, asked: Asked) -> dict[int, Dense]:
    """The layers asked for that have one feed-forward, and it."""
    found: dict[int, Dense] = {}
    for layer in chosen_layers(spec, asked):
        match spec.blocks[layer].feed_forward:
            case FeedForward() | GatedFeedForward() as dense:
                found[layer] = dense
            case MixtureOfExperts():
                continue
            case other:
                raise unknown(f"layer {layer}", other, "a feed-forward")
    if not found:
        raise SwapRefused(
            "the feed-forwards asked for are mixtures of experts already", "--mlp dense is the way back, where it is."
        )
    return found


def part_names(dense: Dense) -> list[str]:
    """A feed-forward's tensors, by their names within it."""
    return list(dense.shapes())


# --- dense -> experts -------------------------------------------------------------------------------------------------


def to_copies(spec: ModelSpec, asked: Asked) -> Swapped:
    """Dense -> E copies, K of them for each token."""
    count, top = numbers(asked)
    seed = asked.settings.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UsageError(f"the router's seed is {seed!r}, expected a whole number from 0")
    found = dense_layers(spec, asked)
    tensors: dict[str, Tensor] = {}
    for layer, dense in found.items():
        path = f"blocks.{layer}.feed_forward"
        first = "gate_proj.weight" if isinstance(dense, GatedFeedForward) else "up_proj.weight"
        tensors[f"{path}.router.weight"] = Moved(f"{path}.{first}", drawn(count, spec.hidden_size, (seed, layer)))
        tensors |= copies(path, dense, count)
    new = with_experts(spec, found, count, top, normalised())
    return Swapped(new, "exact", tensors, {**to_experts(found, count, top), "seed": seed})


def to_parts(spec: ModelSpec, asked: Asked) -> Swapped:
    """Dense -> E experts that are its parts, all of them taken."""
    count, top = numbers(asked)
    found = dense_layers(spec, asked)
    if top != count:
        raise SwapRefused(
            f"with {top} of {count} parts a token loses the others: a split takes all its parts",
            f"--mlp moe:{count}x{count}:split, or --mlp moe:{count}x{top}, which makes copies.",
        )
    tensors: dict[str, Tensor] = {}
    parts: dict[int, Dense] = {}
    for layer, dense in found.items():
        path, width = f"blocks.{layer}.feed_forward", dense.intermediate_size
        if width % count:
            fits = ", ".join(str(n) for n in range(2, min(width, MOST) + 1) if width % n == 0)
            raise SwapRefused(f"a width of {width} has no {count} equal parts", f"Possible: {fits}")
        parts[layer] = replace(dense, intermediate_size=width // count)
        like = f"{path}.down_proj.weight"
        tensors[f"{path}.router.weight"] = Filled((count, spec.hidden_size), 0.0, like=like)
        for i in range(count):
            tensors |= part(path, parts[layer], i, count)
    note = "all experts are taken and weighted alike: one that takes fewer has to be trained to"
    new = with_experts(spec, parts, count, count, False)
    return Swapped(new, "exact", tensors, {**to_experts(found, count, count), "split": True}, (note,))


def with_experts(spec: ModelSpec, experts: Mapping[int, Dense], count: int, top: int, normalise: bool) -> ModelSpec:
    """The tree with so many experts of a kind in each of these layers."""

    def mixture(expert: Dense) -> MixtureOfExperts:
        return MixtureOfExperts(
            hidden_size=spec.hidden_size, experts=count, top_k=top, expert=expert, normalise=normalise
        )

    blocks = {layer: replaced(spec.blocks[layer], feed_forward=mixture(each)) for layer, each in experts.items()}
    return with_blocks(spec, blocks)


def to_experts(layers: Iterable[int], count: int, top: int) -> dict[str, Any]:
    """What the output's record says of it."""
    return {"from": "dense", "to": "experts", "experts": count, "top_k": top, "layers": list(layers)}


def normalised() -> bool:
    """Whether the weights of the experts that are taken are made to sum to 1."""
    return True


def copies(path: str, dense: Dense, count: int) -> dict[str, Tensor]:
    """Every expert's tensors: those of the feed-forward that there was."""
    names = part_names(dense)
    return {f"{path}.experts.{i}.{name}": Moved(f"{path}.{name}") for i in range(count) for name in names}


def drawn(rows: int, columns: int, seed: tuple[int, int]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """A router (rows, columns) of elements drawn at random from a weight: random as that weight is, in size and in
    dtype. A given seed draws the same ones on every machine.
    """

    def draw(weight: NDArray[Any]) -> NDArray[Any]:
        chosen = np.random.Generator(np.random.PCG64(seed)).integers(0, weight.size, (rows, columns))
        result: NDArray[Any] = weight.reshape(-1)[chosen]
        return result

    return draw


def part(path: str, expert: Dense, index: int, count: int) -> dict[str, Tensor]:
    """One expert of a split: its rows of what reads, its columns of what writes, the latter times `count`. The output
    bias is every expert's: weighted with 1/count each, they sum to it.
    """
    cut = slice(index * expert.intermediate_size, (index + 1) * expert.intermediate_size)
    target = f"{path}.experts.{index}"
    tensors: dict[str, Tensor] = {}
    for name in part_names(expert):
        if name == "down_proj.bias":
            tensors[f"{target}.{name}"] = Moved(f"{path}.{name}")
        elif name == "down_proj.weight":
            tensors[f"{target}.{name}"] = weighed(f"{path}.{name}", cut, count)
        else:
            tensors[f"{target}.{name}"] = Moved(f"{path}.{name}", lambda array: array[cut])
    return tensors


def weighed(name: str, cut: slice, factor: float) -> Computed:
    """Columns of a weight, times a number."""
    return Computed(lambda model: model.wide(name)[:, cut] * factor)


# --- back -------------------------------------------------------------------------------------------------------------


def to_dense(spec: ModelSpec, asked: Asked) -> Swapped:
    """Mixture -> one feed-forward: exact where the experts are alike or all weighted alike, else their mean."""
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    found = [layer for layer in chosen_layers(spec, asked) if is_mixture(spec.blocks[layer])]
    if not found:
        raise SwapRefused("the feed-forwards asked for are dense already", "--mlp moe:8x2 makes 8 experts of each.")
    one = [
        layer for layer in found if weights_sum_to_one(mixture_of(spec, layer)) and experts_alike(spec, asked, layer)
    ]
    all_of = [layer for layer in found if layer not in one and all_weighed_alike(spec, asked, layer)]
    lossy = [layer for layer in found if layer not in (*one, *all_of)]
    shares = router_shares(lossy, asked)
    for layer in found:
        path, mixture = f"blocks.{layer}.feed_forward", mixture_of(spec, layer)
        dense = mixture.expert
        if layer in one:
            tensors |= {f"{path}.{name}": Moved(f"{path}.experts.0.{name}") for name in part_names(dense)}
        elif layer in all_of:
            tensors |= side_by_side(path, mixture)
            dense = replace(dense, intermediate_size=dense.intermediate_size * mixture.experts)
        else:
            for name in part_names(dense):
                tensors[f"{path}.{name}"] = mean(path, name, mixture.experts, shares, layer)
        blocks[layer] = replaced(spec.blocks[layer], feed_forward=dense)
    summary = {"from": "experts", "to": "dense", "layers": found, "alike": one, "side_by_side": all_of}
    note = f"{in_words(lossy)}: the experts differ, and their mean is in their place" if lossy else None
    guarantee = guarantee_of(len(lossy), len(spec.blocks))
    return Swapped(with_blocks(spec, blocks), guarantee, tensors, summary, () if note is None else (note,))


def mixture_of(spec: ModelSpec, layer: int) -> MixtureOfExperts:
    """A layer's mixture of experts."""
    mixture = spec.blocks[layer].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


def weights_sum_to_one(mixture: MixtureOfExperts) -> bool:
    """Whether the weights of the experts that a token gets do, whatever the router says."""
    return mixture.normalise or mixture.top_k == mixture.experts


def experts_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether every expert of a layer has the same values."""
    path, mixture = f"blocks.{layer}.feed_forward.experts", mixture_of(spec, layer)
    names, others = part_names(mixture.expert), range(1, mixture.experts)
    return all(asked.weights.same(f"{path}.0.{name}", f"{path}.{i}.{name}") for name in names for i in others)


def all_weighed_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether a layer's router takes all experts for every token, each with the weight 1/E."""
    mixture = mixture_of(spec, layer)
    return mixture.top_k == mixture.experts and asked.weights.zero(f"blocks.{layer}.feed_forward.router.weight")


def side_by_side(path: str, mixture: MixtureOfExperts) -> dict[str, Tensor]:
    """One feed-forward of all the experts' units, the output projection over E; the mean of the output biases."""
    tensors: dict[str, Tensor] = {}
    for name in part_names(mixture.expert):
        names = [f"{path}.experts.{i}.{name}" for i in range(mixture.experts)]
        if name == "down_proj.bias":
            tensors[f"{path}.{name}"] = average(names)
        elif name == "down_proj.weight":
            tensors[f"{path}.{name}"] = joined(names, mixture.experts)
        else:
            tensors[f"{path}.{name}"] = Moved(tuple(names), lambda *arrays: np.concatenate(arrays))
    return tensors


def joined(names: list[str], divisor: float) -> Computed:
    """The columns of several weights side by side, over a number."""
    return Computed(lambda model: np.concatenate([model.wide(name) for name in names], axis=1) / divisor)


def average(names: list[str]) -> Tensor:
    """The mean of tensors; one of them as it is, where there is only one."""
    if len(names) == 1:
        return Moved(names[0])
    return Computed(lambda model: np.mean([model.wide(name) for name in names], axis=0))


def router_shares(layers: list[int], asked: Asked) -> Scratch | None:
    """What share of its weight each layer's router gives to each expert on a text; None where all count alike."""
    if not layers or asked.approximate or asked.calibration is None:
        return None
    return Scratch.by("routers.shares_of", asked.calibration(), set(layers))


def mean(path: str, name: str, count: int, shares: Scratch | None, layer: int) -> Computed:
    """The mean of one of the experts' tensors, by their shares."""

    def compute(model: Model) -> Wide:
        share = np.full(count, 1 / count) if shares is None else shares.of(model, str(layer))
        result: Wide = sum(share[i] * model.wide(f"{path}.experts.{i}.{name}") for i in range(count))
        return result

    return Computed(compute)


def back(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from copies or parts, where all that was asked for was dense."""
    if any(is_mixture(before.blocks[layer]) for layer in asked.chosen(before)):
        return None
    return Step("mlp", "dense", blocks_text(asked))


def copies_worth_trying(spec: ModelSpec) -> tuple[str, ...]:
    """Where some layer is dense."""
    return () if all(is_mixture(block) for block in spec.blocks) else ("moe:4x2",)


def parts_worth_trying(spec: ModelSpec) -> tuple[str, ...]:
    """Where some layer is dense, and all that are have halves."""
    widths = {block.feed_forward.intermediate_size for block in spec.blocks if not is_mixture(block)}
    return ("moe:2x2:split",) if widths and not any(width % 2 for width in widths) else ()


ORDER = 130
SWAPS = (
    Swap(
        option="mlp",
        form="moe:ExK:split",
        takes="dense feed-forward",
        gives="E experts that are its parts",
        guarantee="exact",
        needs="K = E; a width that E divides",
        source="derived for gptkit; fine-grained experts: DeepSeekMoE 2401.06066",
        reshape=to_parts,
        examples=parts_worth_trying,
        by_layer=True,
        inverse=back,
    ),
    Swap(
        option="mlp",
        form="moe:ExK",
        takes="dense feed-forward",
        gives="E experts that are copies, K per token",
        guarantee="exact",
        needs="E times the feed-forward's parameters",
        source="Sparse Upcycling 2212.05055",
        reshape=to_copies,
        examples=copies_worth_trying,
        clears=(Clears("*", "mlp=moe:{theirs.experts}x{theirs.top_k}", theirs=MixtureOfExperts),),
        by_layer=True,
        inverse=back,
    ),
    Swap(
        option="mlp",
        form="dense",
        takes="mixture of experts",
        gives="dense feed-forward",
        guarantee="exact",
        needs="experts that are alike, or a router of zeros that takes all; otherwise a text, for their mean",
        source="Sparse Upcycling 2212.05055, backwards",
        reshape=to_dense,
        examples=lambda spec: ("dense",) if any(map(is_mixture, spec.blocks)) else (),
        clears=tuple(Clears("*", ours=MixtureOfExperts, theirs=dense) for dense in (GatedFeedForward, FeedForward)),
        by_layer=True,
        calibrated=True,
    ),
)
