"""Inputs that kill bugs: lengths past every window and original context, padding on both sides, repeated tokens, every
region of the vocabulary. A short friendly prompt hides most of what can be wrong (a window ignored shows nothing at 8
tokens, 5.3 logits at 256).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError
from ..spec import DynamicScaling, Llama3Scaling, LongRopeScaling, ModelSpec, Rotary, YarnScaling

__all__ = ["Batch", "limits", "longest", "probe", "text_batch"]

AFFORDABLE = 1024
"""Tokens: a window or context beyond it is only probed when asked for, since attention grows with the square."""


@dataclass(frozen=True)
class Batch:
    """One probe: token ids (B, T), and the mask (B, T) where there is padding."""

    name: str
    input_ids: Tensor
    attention_mask: Tensor | None = None

    def valid(self, logits: Tensor) -> Tensor:
        """The logits of real tokens, (N, V): what a model says at padding means nothing."""
        flat = logits.reshape(-1, logits.shape[-1])
        return flat if self.attention_mask is None else flat[self.attention_mask.reshape(-1).bool()]


def limits(spec: ModelSpec) -> dict[str, int]:
    """Lengths at which the tree starts to compute something else: its windows and original contexts."""
    found: dict[str, int] = {}
    for block in spec.blocks:
        if block.attention.window is not None:
            found["window"] = max(block.attention.window, found.get("window", 0))
        position = block.attention.position
        scaling = position.scaling if isinstance(position, Rotary) else None
        if isinstance(scaling, DynamicScaling | Llama3Scaling | LongRopeScaling | YarnScaling):
            found["original context"] = scaling.original_context
    return found


def longest(spec: ModelSpec) -> int | None:
    """The most tokens the tree can take at all; None where there is no such number."""
    return None if spec.positions is None else spec.positions.length


def probe(spec: ModelSpec, *, long: bool = False, seed: int = 0) -> list[Batch]:
    """The batches for a tree. `long` goes past windows and contexts of more than 1,024 tokens too."""
    generator = torch.Generator().manual_seed(seed)
    most = longest(spec) or 10**9

    def tokens(batch: int, length: int) -> Tensor:
        return torch.randint(spec.vocab_size, (batch, min(length, most)), generator=generator)

    batches = [Batch("one token", tokens(1, 1)), Batch("random tokens", tokens(1, 64))]
    # Every region of the vocabulary: strides over it, so that a row shifted or a block swapped shows.
    regions = torch.linspace(0, spec.vocab_size - 1, min(64, spec.vocab_size, most)).long()
    batches.append(Batch("vocabulary regions", regions[None]))
    batches.append(Batch("one token repeated", tokens(1, 1).expand(1, min(32, most)).clone()))
    padded = tokens(3, 48)
    for side in ("left", "right"):
        mask = torch.ones_like(padded)
        for row, width in enumerate((0, padded.shape[1] // 4, padded.shape[1] // 2)):
            if width:
                mask[row, slice(0, width) if side == "left" else slice(-width, None)] = 0
        if int(mask.min()) == 0:
            batches.append(Batch(f"{side} padding", padded, mask))
    for name, limit in limits(spec).items():
        length = limit + limit // 4 + 8
        if length <= most and (long or length <= AFFORDABLE):
            batches.append(Batch(f"past the {name} of {limit}", tokens(1, length)))
    if not limits(spec):
        batches.append(Batch("long", tokens(1, min(200, spec.context_length or 200))))
    return batches


def text_batch(name: str, ids: Sequence[int], spec: ModelSpec) -> Batch:
    """A prompt as a batch.

    Raises:
        UsageError: it is empty, too long for the model's position table, or has ids beyond the vocabulary.

    """
    if not ids:
        raise UsageError(f"the prompt {name!r} has no tokens: nothing to compare")
    if max(ids) >= spec.vocab_size:
        raise UsageError(f"the prompt {name!r} has token {max(ids)}, the vocabulary {spec.vocab_size}")
    most = longest(spec)
    if most is not None and len(ids) > most:
        raise UsageError(f"the prompt {name!r:.40} has {len(ids)} tokens, the model takes {most}")
    return Batch(name, torch.tensor([list(ids)]))
