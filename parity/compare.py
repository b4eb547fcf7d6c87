"""Compare two sets of logits: `compare` takes them complete, `compare_heads` computes some vocabulary columns at a
time.

So `compare_heads` never has the logits of the whole vocabulary in memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..converter.weights import Tree
from ..errors import GptkitError
from .passes import trim_heaps
from .probe import Tokens
from .rows import head_rows

_WIDENED = 128  # positions that are widened to fp64 at once, because a vocabulary is large
_CHUNK_BYTES = 8 * 2**20  # the size of the head's rows that are converted at once; their logits are about as large
_ROWS = 2048  # positions whose logits are computed at once
_TRIMMED = 2**17  # the number of logits after which freed memory is returned to the operating system


@dataclass(frozen=True)
class LogitDifference:
    """The comparison of two models' logits on one prompt. All figures are NaN if only one model has a NaN."""

    name: str
    positions: int  # the number of compared tokens, without padding
    maximum: float  # the largest absolute difference of logits
    mean: float  # the mean absolute difference of logits
    kl: float  # the mean KL divergence in nats per token
    top1: float  # the share of positions with the same most likely token

    @property
    def identical(self) -> bool:
        """Return whether every bit of every logit is the same."""
        return self.maximum == 0


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return KL(reference ‖ candidate) by position, (N,), in fp64, from logits (N, V)."""
    divergences = []
    for a, b in zip(torch.split(reference, _WIDENED), torch.split(candidate, _WIDENED), strict=True):
        p, q = F.log_softmax(a.double(), -1), F.log_softmax(b.double(), -1)
        divergences.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp_min(0))
    return torch.cat(divergences)


def compare(name: str, reference: Tensor, candidate: Tensor) -> LogitDifference:
    """Compare logits (N, V) of the same positions. Raise GptkitError if there are none, or if their shapes differ."""
    if reference.shape != candidate.shape:
        raise GptkitError(
            f"the two models' logits for the input {name} have different shapes, {tuple(reference.shape)} and "
            f"{tuple(candidate.shape)}"
        )
    if reference.numel() == 0:
        raise GptkitError(f"there are no logits to compare for the input {name}")
    return LogitDifference(
        name=name,
        positions=reference.shape[0],
        maximum=largest_gap([reference], [candidate]),
        mean=mean_gap([reference], [candidate]),
        kl=kl_divergence(reference, candidate).mean().item(),
        top1=(reference.argmax(-1) == candidate.argmax(-1)).double().mean().item(),
    )


def largest_gap(a: Iterable[Tensor], b: Iterable[Tensor], enough: float = math.inf) -> float:
    """Return the largest absolute difference between two lists of logits, one item per batch; NaN if a difference is
    NaN.

    The function returns at the first batch with a difference above `enough`, because most faults show on a few tokens.
    """
    largest = 0.0
    for pair in zip(a, b, strict=True):
        here = torch.stack([part.max() for part in gaps([pair[0]], [pair[1]])]).max().item()
        largest = here if not here <= largest else largest
        if not largest <= enough:
            break
    return largest


def mean_gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the mean absolute difference between two lists of logits, one item per batch."""
    return torch.stack([gap.sum() for gap in gaps(a, b)]).sum().item() / sum(logits.numel() for logits in a)


def gaps(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the absolute differences of two lists of logits in fp64, some rows at a time."""
    for first, second in zip(a, b, strict=True):
        for first_part, second_part in zip(torch.split(first, _WIDENED), torch.split(second, _WIDENED), strict=True):
            yield (first_part.double() - second_part.double()).abs()


@dataclass(frozen=True)
class PositionComparison:
    """The comparison of two models' predictions at N positions. Every field is (N,) in fp64, except `agree` (bool).

    If the models have different vocabularies, only the tokens of both are compared.
    """

    gap: Tensor  # the largest absolute difference of logits
    largest: Tensor  # the largest absolute logit of the first model
    kl: Tensor  # KL(before ‖ after) in nats
    agree: Tensor  # whether both models have the same most likely token
    before: Tensor  # minus the first model's log-probability of the next token; NaN if that token is unknown
    after: Tensor  # the same for the second model


def compare_heads(
    before: Tree,
    after: Tree,
    states: tuple[Tensor, Tensor],
    *,
    tokens: Tokens | None = None,
    targets: Tensor | None = None,
) -> PositionComparison:
    """Compare the logits of two models at N positions, a part of the vocabulary at a time. The result is on the CPU.

    Args:
        before: the first model.
        after: the second model.
        states: the input of each model's head, (N, hidden), both on the device that computes.
        tokens: the ids to compare in the first and in the second vocabulary; by default all.
        targets: the next tokens (N,), as indices into the compared tokens, or -1 for unknown ones.

    Raises:
        GptkitError: the vocabularies have different sizes, and `tokens` is not given.
    """
    require_same_tokens(before, after, tokens)
    dtype, count, device = states[0].dtype, len(states[0]), states[0].device
    targets = None if targets is None else targets.to(device)
    width = max(state.shape[1] for state in states) * states[0].element_size()
    step = max(1, min(_CHUNK_BYTES // width, _CHUNK_BYTES // (8 * max(1, min(count, _ROWS)))))
    total = before.spec.vocab_size if tokens is None else len(tokens[0])
    if before.spec.head is None:  # hidden states are compared instead of logits
        total, tokens = states[0].shape[1], None
    parts = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    tokens_by_side = [None, None] if tokens is None else [torch.as_tensor(ids) for ids in tokens]
    heads = [
        head_rows(tree, dtype, parts if ids is None else [ids[part] for part in parts], device)
        for tree, ids in zip((before, after), tokens_by_side, strict=True)
    ]
    blocks = [_RunningSums(min(_ROWS, count - start), device) for start in range(0, count, _ROWS)]
    with torch.inference_mode():
        for part, *both in zip(parts, *heads, strict=True):
            for number, sums in enumerate(blocks):
                rows = slice(number * _ROWS, number * _ROWS + _ROWS)
                a, b = (head(state[rows]).double() for head, state in zip(both, states, strict=True))
                sums.add(a, b, part.start, None if targets is None else targets[rows])
                del a, b
            if (part.stop - part.start) * count > _TRIMMED:
                trim_heaps()
        totals = [sums.total() for sums in blocks]
    return PositionComparison(*(torch.cat(column).cpu() for column in zip(*totals, strict=True)))


def require_same_tokens(before: Tree, after: Tree, tokens: Tokens | None) -> None:
    """Raise GptkitError if the vocabularies have different sizes and `tokens`, the ids of equal tokens, is None."""
    sizes = before.spec.vocab_size, after.spec.vocab_size
    if tokens is None and sizes[0] != sizes[1]:
        raise GptkitError(f"the vocabularies differ: {sizes[0]} tokens in the first model, {sizes[1]} in the second")


def perplexity(losses: Tensor) -> float:
    """Return the perplexity of a text. `losses` (N,) are the negative log-probabilities of its tokens, in nats.

    Return infinity if a float cannot represent the perplexity.
    """
    mean = losses.mean().item()
    return math.exp(mean) if not mean > 700 else math.inf


class _RunningSums:
    """Compares logits at N positions without having them all in memory: some vocabulary columns are added at a time."""

    def __init__(self, count: int, device: torch.device) -> None:
        wide: Any = {"dtype": torch.float64, "device": device}
        self.gap, self.largest, self.weighed = torch.zeros(3, count, **wide)
        """weighed: the sum of exp(a)·(a - b), divided by the sum of exp(a)."""
        self.tops, self.logsums = ([*values] for values in torch.full((2, 2, count), -math.inf, **wide))
        self.at_target = [*torch.full((2, count), math.nan, **wide)]
        self.likeliest = [*torch.zeros(2, count, dtype=torch.long, device=device)]

    def add(self, a: Tensor, b: Tensor, start: int, targets: Tensor | None) -> None:
        """Add the logits (N, tokens) of both models for the compared tokens from number `start` on.

        `targets` has the index of the true next token at each position, (N,), or is None.
        """
        difference = a - b
        # torch.maximum keeps a NaN.
        self.gap = torch.maximum(self.gap, difference.abs().amax(-1))
        self.largest = torch.maximum(self.largest, a.abs().amax(-1))
        for side, logits in enumerate((a, b)):
            top, where = logits.max(-1)
            self.likeliest[side] = torch.where(top > self.tops[side], where + start, self.likeliest[side])
            self.tops[side] = torch.maximum(self.tops[side], top)
            new = torch.logaddexp(self.logsums[side], logits.logsumexp(-1))
            if side == 0:
                share = torch.exp(logits - new[:, None])
                self.weighed = self.weighed * torch.exp(self.logsums[0] - new) + (share * difference).sum(-1)
            self.logsums[side] = new
            if targets is not None:
                here = (targets >= start) & (targets < start + logits.shape[1])
                self.at_target[side][here] = logits[here, targets[here] - start]

    def total(self) -> tuple[Tensor, ...]:
        """Return the fields of a `PositionComparison`. Call this after the logits of all tokens were added."""
        kl = self.weighed - self.logsums[0] + self.logsums[1]
        losses = [logsum - logit for logsum, logit in zip(self.logsums, self.at_target, strict=True)]
        agree = self.likeliest[0] == self.likeliest[1]
        # The three terms of large logits may cancel to slightly less than zero.
        return self.gap, self.largest, kl.clamp_min(0), agree, losses[0], losses[1]
