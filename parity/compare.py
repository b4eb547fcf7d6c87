"""Two sets of logits side by side: as they are, or (`compare_heads`) made some tokens of the vocabulary at a time: then
no row of them is ever whole.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..converter.weights import Tree
from ..errors import GptkitError
from .passes import trim_heaps
from .probe import Tokens
from .rows import head_rows

_WIDENED = 128  # positions that are widened to fp64 at once: a vocabulary is large
_CHUNK_BYTES = 8 * 2**20  # of a head's widened rows at once, and about of the logits made with them
_ROWS = 2048  # positions whose logits are made at once
_TRIMMED = 2**17  # logits of one side after which freed memory is given back


@dataclass(frozen=True)
class LogitDifference:
    """One prompt's comparison over `positions` real tokens. maximum, mean: absolute difference of logits; kl: mean KL
    divergence in nats per token; top1: the share of positions with the same most likely token. NaN on one side only
    makes all of them NaN.
    """

    name: str
    positions: int
    maximum: float
    mean: float
    kl: float
    top1: float

    @property
    def identical(self) -> bool:
        """Whether not one bit of a logit differs."""
        return self.maximum == 0


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference ‖ candidate) a position, (N,), in fp64, from logits (N, V)."""
    found = []
    for a, b in zip(torch.split(reference, _WIDENED), torch.split(candidate, _WIDENED), strict=True):
        p, q = F.log_softmax(a.double(), -1), F.log_softmax(b.double(), -1)
        found.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp_min(0))
    return torch.cat(found)


def compare(name: str, reference: Tensor, candidate: Tensor) -> LogitDifference:
    """Logits (N, V) of the same positions. Raises GptkitError where there are none, or of other shapes."""
    if reference.shape != candidate.shape:
        raise GptkitError(
            f"{name}: the logits have different shapes, {tuple(reference.shape)} and {tuple(candidate.shape)}"
        )
    if reference.numel() == 0:
        raise GptkitError(f"{name}: there are no logits to compare")
    return LogitDifference(
        name=name,
        positions=reference.shape[0],
        maximum=largest_gap([reference], [candidate]),
        mean=mean_gap([reference], [candidate]),
        kl=kl_divergence(reference, candidate).mean().item(),
        top1=(reference.argmax(-1) == candidate.argmax(-1)).double().mean().item(),
    )


def largest_gap(a: Iterable[Tensor], b: Iterable[Tensor], enough: float = math.inf) -> float:
    """The largest absolute difference over several sets of logits, up to the first further off than `enough`: what is
    wrong mostly shows on a few tokens. NaN where there is one.
    """
    largest = 0.0
    for pair in zip(a, b, strict=True):
        here = torch.stack([part.max() for part in gaps([pair[0]], [pair[1]])]).max().item()
        largest = here if not here <= largest else largest
        if not largest <= enough:
            break
    return largest


def mean_gap(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The mean absolute difference over several sets of logits."""
    return torch.stack([gap.sum() for gap in gaps(a, b)]).sum().item() / sum(each.numel() for each in a)


def gaps(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[Tensor]:
    """Absolute differences in fp64, some rows at a time."""
    for x, y in zip(a, b, strict=True):
        for part, other in zip(torch.split(x, _WIDENED), torch.split(y, _WIDENED), strict=True):
            yield (part.double() - other.double()).abs()


@dataclass(frozen=True)
class PositionComparison:
    """What is known of each of N positions; all (N,), in fp64 (`agree`: bool). gap: the largest absolute difference of
    logits; largest: the largest logit before. kl: KL(before ‖ after) in nats; agree: whether the same token is the
    likeliest. before, after: minus the log-probability of the token that follows, NaN where none is known. Where the
    vocabulary changed, all of it is over the tokens that both have.
    """

    gap: Tensor
    largest: Tensor
    kl: Tensor
    agree: Tensor
    before: Tensor
    after: Tensor


def compare_heads(
    before: Tree,
    after: Tree,
    states: tuple[Tensor, Tensor],
    *,
    tokens: Tokens | None = None,
    targets: Tensor | None = None,
) -> PositionComparison:
    """Each model's head on its own states (N, hidden), which come out of its last norm in the dtype to compute in.
    Raises GptkitError as `require_same_tokens`. `tokens`: the ids that are compared, in the one vocabulary and in the
    other; all where both are one. `targets`: (N,) the token that follows, as a number among those compared; -1 where
    none is known.
    """
    require_same_tokens(before, after, tokens)
    dtype, count = states[0].dtype, len(states[0])
    width = max(each.shape[1] for each in states) * states[0].element_size()
    step = max(1, min(_CHUNK_BYTES // width, _CHUNK_BYTES // (8 * max(1, min(count, _ROWS)))))
    total = before.spec.vocab_size if tokens is None else len(tokens[0])
    if before.spec.head is None:  # hidden states in the place of logits
        total, tokens = states[0].shape[1], None
    parts = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    kept = [None, None] if tokens is None else [torch.as_tensor(ids) for ids in tokens]
    heads = [
        head_rows(tree, dtype, parts if ids is None else [ids[part] for part in parts])
        for tree, ids in zip((before, after), kept, strict=True)
    ]
    blocks = [_RunningSums(min(_ROWS, count - start)) for start in range(0, count, _ROWS)]
    with torch.inference_mode():
        for part, *both in zip(parts, *heads, strict=True):
            for number, sums in enumerate(blocks):
                rows = slice(number * _ROWS, number * _ROWS + _ROWS)
                a, b = (head(each[rows]).double() for head, each in zip(both, states, strict=True))
                sums.add(a, b, part.start, None if targets is None else targets[rows])
                del a, b
            if (part.stop - part.start) * count > _TRIMMED:
                trim_heaps()
        found = [sums.total() for sums in blocks]
    return PositionComparison(*(torch.cat(column) for column in zip(*found, strict=True)))


def require_same_tokens(before: Tree, after: Tree, tokens: Tokens | None) -> None:
    """Raise GptkitError where the vocabularies are of different sizes and nothing says which tokens are the same."""
    sizes = before.spec.vocab_size, after.spec.vocab_size
    if tokens is None and sizes[0] != sizes[1]:
        raise GptkitError(f"the vocabularies differ: {sizes[0]} tokens in the first model, {sizes[1]} in the second")


def perplexity(lost: Tensor) -> float:
    """Of minus log-probabilities in nats, (N,); infinite where a float has no place for it."""
    mean = lost.mean().item()
    return math.exp(mean) if not mean > 700 else math.inf


class _RunningSums:
    """What has to be remembered of the logits so far, of N positions."""

    def __init__(self, count: int) -> None:
        self.gap, self.largest, self.weighed = torch.zeros(3, count, dtype=torch.float64)
        """weighed: the sum of exp(a)·(a - b), over that of exp(a)."""
        self.tops, self.logsums = ([*each] for each in torch.full((2, 2, count), -math.inf, dtype=torch.float64))
        self.at_target = [*torch.full((2, count), math.nan, dtype=torch.float64)]
        self.likeliest = [*torch.zeros(2, count, dtype=torch.long)]

    def add(self, a: Tensor, b: Tensor, start: int, targets: Tensor | None) -> None:
        """The logits (N, tokens) of the tokens from `start` on, of both."""
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
        kl = self.weighed - self.logsums[0] + self.logsums[1]
        lost = [whole - here for whole, here in zip(self.logsums, self.at_target, strict=True)]
        agree = self.likeliest[0] == self.likeliest[1]
        # Where logits are large the three terms cancel to a little less than nothing.
        return self.gap, self.largest, kl.clamp_min(0), agree, lost[0], lost[1]
