"""Inputs that kill bugs: lengths past every window and original context, padding on both sides, repeated tokens, every
region of the vocabulary. A short friendly prompt hides most of what can be wrong (a window ignored shows nothing at 8
tokens, 5.3 logits at 256).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from ..components import ModelSpec
from ..errors import UsageError

EMBEDDING, POSITIONS = TABLES = ("embedding.weight", "positions.weight")
"""The tensors of which an input reads some rows alone. A head's rows are all in every logit."""
AFFORDABLE = 1024
"""Tokens: a window or context beyond it is only probed when asked for, since attention grows with the square."""
LONG = 200
"""Tokens of the longest batch at least, where the tree takes as many: far pairs of positions, many keys."""
REGIONS = 64
KEPT = 256
"""Positions whose logits are compared in one row: far more tokens than that times the vocabulary is much memory."""


@dataclass(frozen=True)
class Batch:
    """One probe: token ids (B, T), their mask where there is padding, the rows looked at where those are not all."""

    name: str
    input_ids: Tensor
    attention_mask: Tensor | None = None
    rows: Tensor | None = None

    def valid(self, logits: Tensor) -> Tensor:
        """The logits of real tokens, (N, V): what a model says at padding means nothing. Of a long row every so many,
        the first and the last among them; each has seen all tokens before it.
        """
        steps = logits.shape[1]
        keep = torch.linspace(0, steps - 1, min(steps, KEPT), dtype=torch.float64).round().long()
        kept = logits[:, keep].flatten(0, 1)
        real = kept if self.attention_mask is None else kept[self.attention_mask[:, keep].reshape(-1).bool()]
        return real if self.rows is None else real[self.rows]


RUNNING: ContextVar[Batch] = ContextVar("RUNNING")
"""The batch whose forward pass this is, in the thread that runs it, for hooks that are told of a module alone."""


@dataclass(frozen=True, order=True)
class Limit:
    """A length beyond which a tree computes something else: a window, or the context its positions were made for."""

    tokens: int
    name: str

    @property
    def beyond(self) -> int:
        return self.tokens + self.tokens // 4 + 8

    def __str__(self) -> str:
        return f"{self.name} of {self.tokens:,}"


def limits(*specs: ModelSpec) -> list[Limit]:
    """Every limit of any of the trees, the shortest first."""
    nodes = [node for spec in specs for node in spec.components()]
    names = {"window": "window", "original_context": "original context"}
    sizes = {(getattr(node, field, None), name) for node in nodes for field, name in names.items()}
    return sorted(Limit(size, name) for size, name in sizes if size is not None)


def longest(*specs: ModelSpec) -> int | None:
    """The most tokens that all of the trees can take; None where there is no such number."""
    return min((spec.positions.length for spec in specs if spec.positions is not None), default=None)


def passed(limit: Limit, most: int | None, long: bool) -> bool:
    """Whether the probe goes past a limit."""
    return (most is None or limit.beyond <= most) and (long or limit.tokens <= AFFORDABLE)


def probe(
    spec: ModelSpec, *others: ModelSpec, long: bool = False, up_to: int | None = None, seed: int = 0
) -> list[Batch]:
    """The batches for a tree, or for several over one vocabulary that are compared: past the limits of each, and no
    longer than any can take. `long` goes past windows and contexts of more than 1,024 tokens too; `up_to` has a batch
    of as many tokens, and none of more.
    """
    generator = torch.Generator().manual_seed(seed)
    most = min(longest(spec, *others) or 10**9, up_to or 10**9)

    def tokens(batch: int, length: int) -> Tensor:
        return torch.randint(spec.vocab_size, (batch, min(length, most)), generator=generator)

    batches = [Batch("one token", tokens(1, 1)), Batch("random tokens", tokens(1, 64))]
    # Every region of the vocabulary: strides over it, so that a row shifted or a block swapped shows.
    regions = torch.linspace(0, spec.vocab_size - 1, min(REGIONS, spec.vocab_size), dtype=torch.float64).round().long()
    width = min(len(regions), most)
    # Several rows where a short table of positions does not take them in one; the last one is filled up.
    rows = torch.nn.functional.pad(regions, (0, -len(regions) % width), value=spec.vocab_size - 1)
    batches.append(Batch("vocabulary regions", rows.reshape(-1, width)))
    batches.append(Batch("one token repeated", tokens(1, 1).expand(1, min(32, most)).clone()))
    padded = tokens(3, 48)
    for side in ("left", "right"):
        mask = torch.ones_like(padded)
        for row, width in enumerate((0, padded.shape[1] // 4, padded.shape[1] // 2)):
            if width:
                mask[row, slice(0, width) if side == "left" else slice(-width, None)] = 0
        if int(mask.min()) == 0:
            batches.append(Batch(f"{side} padding", padded, mask))
    reached = [limit for limit in limits(spec, *others) if passed(limit, most, long)]
    batches += [Batch(f"past the {limit}", tokens(1, limit.beyond)) for limit in reached]
    if all(limit.beyond < LONG for limit in reached):
        batches.append(Batch("long", tokens(1, min(LONG, spec.context_length or LONG))))
    if up_to is not None:
        batches.append(Batch(f"as long as {most:,} tokens", tokens(1, most)))
    return batches


def text_batch(name: str, ids: Sequence[int], spec: ModelSpec, *others: ModelSpec) -> Batch:
    """A prompt as a batch for some trees; UsageError where it is empty, too long, or beyond the vocabulary."""
    if not ids:
        raise UsageError(f"the prompt {name!r:.40} has no tokens: nothing to compare")
    if max(ids) >= spec.vocab_size:
        raise UsageError(f"the prompt {name!r:.40} has token {max(ids)}, the vocabulary {spec.vocab_size}")
    most = longest(spec, *others)
    if most is not None and len(ids) > most:
        raise UsageError(f"the prompt {name!r:.40} has {len(ids)} tokens, the model takes {most}")
    return Batch(name, torch.tensor([list(ids)]))
