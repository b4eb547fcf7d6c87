"""What the probe is worth: mistakes made on purpose, and whether the verdict's own rule would have seen each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modules import Decoder
from ..spec import ModelSpec
from .compare import largest_gap
from .mutations import Weights, applicable, make_in_code
from .probe import Batch

__all__ = ["Score", "filled", "random_parameter", "run_tree", "score", "tree_gap"]


@dataclass(frozen=True)
class Score:
    """The mistakes that were tried, by name.

    caught: seen with the checkpoint's own weights. caught_random: only with random ones (a mistake in a tensor that the
    checkpoint hardly uses is below rounding there). missed: seen by neither. allowed: the difference in logits that
    rounding explains, above which a mistake counts as seen. small_copy: made on a small copy of the tree with random
    weights, since the model itself is too large.
    """

    caught: tuple[str, ...]
    caught_random: tuple[str, ...]
    missed: tuple[str, ...]
    allowed: float
    small_copy: bool = False

    @property
    def tried(self) -> int:
        return len(self.caught) + len(self.caught_random) + len(self.missed)


def score(spec: ModelSpec, weights: Weights, batches: Sequence[Batch], unprobed: Sequence[str] = ()) -> Score:
    """Make every mutation that applies, and see whether the batches tell it from the original.

    Args:
        spec: the tree.
        weights: its parameters in fp64, by shared name.
        batches: the probe.
        unprobed: mutations that the probe says it does not reach; they are not counted.

    """
    caught, open_, allowed = _tried(spec, weights, batches, set(unprobed))
    by_chance: list[str] = []
    if open_:
        generator = torch.Generator().manual_seed(0)
        random = {name: random_parameter(name, tensor, generator) for name, tensor in weights.items()}
        found, _, _ = _tried(spec, random, batches, set(unprobed))
        by_chance = [name for name in open_ if name in found]
    missed = [name for name in open_ if name not in by_chance]
    return Score(tuple(caught), tuple(by_chance), tuple(missed), allowed)


def _tried(
    spec: ModelSpec, weights: Weights, batches: Sequence[Batch], unprobed: set[str]
) -> tuple[list[str], list[str], float]:
    """(caught, not caught, the difference that rounding explains)."""
    exact = run_tree(spec, weights, batches)
    rounded = run_tree(spec, {name: tensor.float() for name, tensor in weights.items()}, batches)
    # The rule of the verdict: both sides' noise together, which here is twice the same.
    allowed = 2 * largest_gap(exact, rounded)
    caught: list[str] = []
    missed: list[str] = []
    for mutation, (tree, changed) in applicable(spec, weights):
        if mutation.name in unprobed:
            continue
        gap = tree_gap(tree, changed, batches, exact, enough=allowed)
        (missed if gap <= allowed else caught).append(mutation.name)
    return caught, missed, allowed


def random_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A parameter of trained-like size: fresh initialisation hides whole tensors (norms at 1, biases at 0)."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if tensor.ndim == 1:
        return 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
    return noise if name in ("embedding.weight", "positions.weight") else noise / tensor.shape[1] ** 0.5


def run_tree(spec: ModelSpec, weights: Weights, batches: Sequence[Batch]) -> list[Tensor]:
    """The logits of real tokens, (N, V) a batch, of a tree with these weights."""
    model = filled(spec, weights)
    with torch.inference_mode():
        return [batch.valid(model(batch.input_ids, batch.attention_mask)) for batch in batches]


def tree_gap(
    spec: ModelSpec, weights: Weights, batches: Sequence[Batch], expected: Sequence[Tensor], enough: float
) -> float:
    """How far a tree's logits are from those expected: the largest difference, NaN where there is one, of the batches
    up to the first that is further off than `enough`. Most mistakes show on a few tokens, and cost no more.
    """
    model, gap = filled(spec, weights), 0.0
    with torch.inference_mode():
        for batch, logits in zip(batches, expected, strict=True):
            here = largest_gap([logits], [batch.valid(model(batch.input_ids, batch.attention_mask))])
            gap = here if not here <= gap else gap
            if not gap <= enough:
                break
    return gap


def filled(spec: ModelSpec, weights: Weights) -> Decoder:
    """A tree as a module in eval mode, with the mistakes of code made in it that it names."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict(dict(weights), assign=True)
    make_in_code(model)
    return model.eval()
