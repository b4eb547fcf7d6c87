"""What the probe is worth: mistakes made on purpose, and whether the verdict's own rule would have seen each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..components import ModelSpec
from ..modules import Decoder
from .compare import largest_gap
from .mutations import Weights, applicable, make_in_code
from .probe import AFFORDABLE, LONG, Batch, limits, longest
from .stored import TABLES

__all__ = ["Score", "filled", "plain_inputs", "random_parameter", "run_tree", "score", "tree_gap"]


@dataclass(frozen=True)
class Score:
    """The mistakes that were tried, by name.

    caught: seen with the checkpoint's own weights. caught_random: only with random ones, since they change nothing on
    this checkpoint that rounding would not (eps behind large activations, q and k where one score is all). invisible:
    with no weights, on no input: they change nothing in this tree (a rotary scaling by one). missed: on an input that
    the probe should have. allowed: the difference in logits that rounding explains, above which a mistake counts as
    seen. small_copy: made on a small copy of the tree with random weights, since the model itself is too large.
    """

    caught: tuple[str, ...]
    caught_random: tuple[str, ...]
    missed: tuple[str, ...]
    allowed: float
    small_copy: bool = False
    invisible: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """How many change something."""
        return len(self.caught) + len(self.caught_random) + len(self.missed)


CLEAR = 10.0
"""Times what rounding explains that a mistake has to make for a probe to be blamed for not having seen it."""
SIZES = (1.0, 0.05, 0.002)
"""What the tables' random values are multiplied by, one after the other while a mistake is not seen: behind a large
stream (Gemma scales its embeddings up) no eps shows, and a small one is nearly all norms.
"""


def score(
    spec: ModelSpec,
    weights: Weights,
    batches: Sequence[Batch],
    unprobed: Sequence[str] = (),
    up_to: int | None = None,
) -> Score:
    """Make every mutation that applies, and see whether the batches tell it from the original.

    What they do not is made with random weights too, and then on inputs that were made for this tree (`plain_inputs`),
    whatever the probe looks like: only what shows there is missed.

    Args:
        spec: the tree.
        weights: its parameters in fp64, by shared name.
        batches: the probe.
        unprobed: mutations that the probe says it does not reach; they are not counted.
        up_to: tokens of the longest sequence that matters.

    """
    names = [mutation.name for mutation, _ in applicable(spec, weights) if mutation.name not in unprobed]
    caught, allowed = _caught(spec, weights, batches, names)
    open_ = [name for name in names if name not in caught]
    by_chance, missed = _by_random(spec, weights, batches, open_), list[str]()
    if len(by_chance) < len(open_):
        unseen = [name for name in open_ if name not in by_chance]
        missed = _by_random(spec, weights, plain_inputs(spec, up_to), unseen, CLEAR)
    invisible = [name for name in open_ if name not in (*by_chance, *missed)]
    return Score(tuple(caught), tuple(by_chance), tuple(missed), allowed, invisible=tuple(invisible))


def plain_inputs(spec: ModelSpec, up_to: int | None = None) -> list[Batch]:
    """Random tokens, as many as it takes to go past every window and original context that a probe does, and padded."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LONG, *(limit.beyond for limit in limits(spec) if limit.tokens <= AFFORDABLE)]
    most = [length for length in (longest(spec), up_to) if length is not None]
    ids = torch.randint(spec.vocab_size, (2, min([max(lengths), *most])), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : ids.shape[1] // 2] = 0
    return [Batch("random tokens", ids), Batch("left padding", ids, mask)]


def _by_random(
    spec: ModelSpec, weights: Weights, batches: Sequence[Batch], names: Sequence[str], clear: float = 1.0
) -> list[str]:
    """Which of these mutations show with random weights of some size, by `clear` times what rounding explains."""
    generator, found = torch.Generator().manual_seed(0), list[str]()
    random = {name: random_parameter(name, tensor, generator) for name, tensor in weights.items()}
    for size in SIZES:
        open_ = [name for name in names if name not in found]
        if open_:
            sized = {name: tensor * size if name in TABLES else tensor for name, tensor in random.items()}
            found += _caught(spec, sized, batches, open_, clear)[0]
    return [name for name in names if name in found]


def _caught(
    spec: ModelSpec, weights: Weights, batches: Sequence[Batch], names: Sequence[str], clear: float = 1.0
) -> tuple[list[str], float]:
    """Which of these mutations differ by more than rounding explains, `clear` times, and what it explains."""
    exact = run_tree(spec, weights, batches)
    rounded = run_tree(spec, {name: tensor.float() for name, tensor in weights.items()}, batches)
    # The rule of the verdict: both sides' noise together, which here is twice the same.
    allowed = 2 * largest_gap(exact, rounded)
    made = [(mutation.name, mutant) for mutation, mutant in applicable(spec, weights) if mutation.name in names]
    enough = clear * allowed
    return [name for name, mutant in made if not tree_gap(*mutant, batches, exact, enough) <= enough], allowed


def random_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A parameter of trained-like size: fresh initialisation hides whole tensors (norms at 1, biases at 0)."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if tensor.ndim == 1:
        return 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
    return noise if name in TABLES else noise / tensor.shape[1] ** 0.5


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
