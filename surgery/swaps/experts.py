"""Reduce the number of experts in mixtures. The experts that stay are unchanged.

A text decides which experts stay, by REAP's criterion (Lasby et al. 2510.13999): the router's weight of an expert times
the norm of its output, averaged over its tokens. The router keeps the rows of these experts, and chooses as many
experts per token as before. Without a text (--approximate), the experts with the smallest parameters are dropped.

This is exact if all experts are equal and the router's weights of a token sum to one. It is also exact if the router
can never choose the dropped experts. That is so if its scores are sigmoids, between 0 and 1, and the choice bias of a
dropped expert is lower by at least 1 than that of enough others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import MixtureOfExperts, ModelSpec
from ...components.model import walk
from ...errors import SwapRefused
from ..base import Guarantee, Index, Model, Moved, Swapped, Tensor, Wide, taken
from ..layerwise import one_or_all, with_mixers
from ..options import FEED_FORWARD, Option
from ..registry import Asked, Clears, Swap
from .mlp import experts_alike, is_mixture, weights_sum_to_one


def _fewer_experts(spec: ModelSpec, asked: Asked) -> Swapped:
    """Reduce the number of experts in the chosen mixtures."""
    new = asked.number("a number of experts")
    layers = asked.those(
        spec, is_mixture, "none of these layers has experts", "--mlp moe:8x2 makes 8 experts from each feed-forward."
    )
    mixtures: dict[int, Any] = {layer: spec.blocks[layer].feed_forward for layer in layers}
    for layer, mixture in mixtures.items():
        _require(layer, mixture, new)
    alike = [i for i in layers if weights_sum_to_one(mixtures[i]) and experts_alike(spec, asked, i)]
    unused = {i: _never_chosen(asked, i, mixtures[i]) for i in layers if i not in alike}
    undecided = {i: mixtures[i] for i, never in unused.items() if mixtures[i].experts - int(never.sum()) > new}
    scores, by = _scores(undecided, asked) if undecided else ({}, "never chosen")
    # If all experts are equal, the first ones stay. Experts that the router never chooses are dropped first.
    scores |= {i: -unused[i].astype(float) for i in unused if i not in undecided}
    scores |= {i: np.zeros(mixtures[i].experts) for i in alike}
    tensors, stay = dict[str, Tensor](), dict[str, list[int]]()
    for layer, mixture in mixtures.items():
        index = _largest_in_groups(scores[layer], mixture.groups, new)
        stay[str(layer)] = index.tolist()
        tensors |= _chosen_experts(f"blocks.{layer}.feed_forward", mixture, index)
    changed = {layer: replace(mixture, experts=new) for layer, mixture in mixtures.items()}
    guarantee: Guarantee = "exact"
    if undecided:
        guarantee = "approximate" if all(2 * new >= old.experts for old in undecided.values()) else "retrained"
    summary: dict[str, Any] = {"from": one_or_all(old.experts for old in mixtures.values()), "to": new, "kept": stay}
    summary |= {"by": by} if undecided else {}
    return Swapped(with_mixers(spec, changed), guarantee, tensors, summary)


def _require(layer: int, mixture: MixtureOfExperts, new: int) -> None:
    """Raise SwapRefused if a mixture cannot be reduced to `new` experts."""
    old, group = mixture.experts, mixture.groups
    least = -(-mixture.top_k * group // min(mixture.top_groups, group))
    least = max(least, group * mixture.group_best if group > 1 else 1)
    fit = [n for n in range(1, old) if n >= least and n % group == 0]
    if new not in fit:
        groups = f" and {group} groups" if group > 1 else ""
        reason = f"layer {layer} has {old} experts, {mixture.top_k} per token{groups}, so it cannot keep {new}"
        raise SwapRefused(reason, f"Possible: {', '.join(map(str, fit[-8:]))}." if fit else None)


def _never_chosen(asked: Asked, layer: int, mixture: MixtureOfExperts) -> np.ndarray:
    """Return for each expert whether the router cannot choose it for any token, because its choice bias is too low."""
    all_experts = np.ones(mixture.experts, dtype=bool)
    ungrouped = mixture.groups == 1 and mixture.scores == "sigmoid" and mixture.biased == "scores"
    if not (ungrouped and mixture.choice_bias):
        return ~all_experts

    def question(model: Model) -> np.ndarray:
        bias = model.wide(f"blocks.{layer}.feed_forward.choice.bias")
        return np.asarray(bias + 1 <= np.sort(bias)[-mixture.top_k])

    return asked.weights.ask(question, ~all_experts, all_experts)


def _scores(mixtures: dict[int, Any], asked: Asked) -> tuple[dict[int, Wide], str]:
    """Return the importance of each expert, (experts,) by layer, and the name of the criterion.

    With --approximate, it is computed from the weights, and otherwise on the text.
    """
    if asked.approximate:
        equal = {layer: np.ones(mixture.experts) for layer, mixture in mixtures.items()}
        return asked.weights.ask(partial(_by_weights, mixtures=mixtures), equal, equal), "norms of weights"
    calibration = asked.text("choosing the experts to remove")

    def question(model: Model) -> dict[int, Wide]:
        from ..fits.pruning import expert_saliency

        return expert_saliency(model, calibration, set(mixtures))

    return asked.weights.run(question), "REAP"


def _by_weights(model: Model, mixtures: dict[int, Any]) -> dict[int, Wide]:
    """Return for each expert the norm of all its parameters together, (experts,), by layer."""
    norms = {}
    for layer, mixture in mixtures.items():
        paths = [f"blocks.{layer}.feed_forward.experts.{number}" for number in range(mixture.experts)]
        squares = [sum((model.wide(f"{path}.{name}") ** 2).sum() for name in mixture.expert.shapes()) for path in paths]
        norms[layer] = np.sqrt(np.array(squares))
        model.release()
    return norms


def _largest_in_groups(score: Wide, groups: int, new: int) -> Index:
    """Return the `new` experts with the largest scores, the same number from every group of experts."""
    order = np.argsort(-score.reshape(groups, -1), axis=1, kind="stable")[:, : new // groups]
    first = np.arange(groups)[:, None] * (len(score) // groups)
    return np.sort((order + first).reshape(-1))


def _chosen_experts(path: str, mixture: MixtureOfExperts, index: Index) -> dict[str, Tensor]:
    """Return the tensors of a mixture with only the experts in `index`."""
    by_expert = (f"{path}.{name}" for name, weight in mixture.weights().items() if weight.shape[0] == mixture.experts)
    tensors: dict[str, Tensor] = {name: taken(name, index) for name in by_expert}
    for new, old in enumerate(index.tolist()):
        for inner, node in walk(mixture.expert, ""):
            names = (f"{inner}.{name}" for name in node.weights())
            tensors |= {f"{path}.experts.{new}{name}": Moved(f"{path}.experts.{old}{name}") for name in names}
    return tensors


def _examples(spec: ModelSpec) -> tuple[str, ...]:
    """Return the value that `gptkit swaps` tries on a model: three quarters of its number of experts."""
    counts = {block.feed_forward.experts for block in spec.blocks if isinstance(block.feed_forward, MixtureOfExperts)}
    return tuple(str(count * 3 // 4) for count in counts if len(counts) == 1 and count >= 4)


ORDER = 125
OPTIONS = (
    Option(
        "experts",
        FEED_FORWARD,
        4,
        "The number of experts that each mixture of experts keeps, such as 48. gptkit keeps the experts that "
        "contribute most on the text of --calibrate.",
        "N",
    ),
)
SWAPS = (
    Swap(
        option="experts",
        form="N",
        takes="a mixture of experts",
        gives="N of its experts",
        needs="Exact only if all experts are equal, or if the router never chooses the dropped ones. Otherwise a"
        " calibration text decides which experts stay",
        source="REAP 2510.13999",
        reshape=_fewer_experts,
        examples=_examples,
        by_layer=True,
        calibrated=True,
        apart=True,
        each_stack=True,
        exact_where="experts are alike, or their bias keeps them from being chosen",
        clears=(Clears("*.experts", "experts={theirs}"),),
    ),
)
