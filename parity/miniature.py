"""A small copy of a tree, for what takes a pass a mistake: the same components, few and narrow.

Everything that a mistake can be made in stays: each kind of layer, how a component rounds, windows, rotary scaling,
eps, the dimension of a head, and how heads share keys. Only layers, heads, tokens and widths are fewer (each record's
`small`), so that the probe's lengths and padding show on the copy what they show on the tree. Its weights are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..components import Block, Mixer, ModelSpec
from .probe import TABLES, Batch
from .score import random_parameter

WIDTH = 64
"""Of the stream, where no attention says how wide it is to be."""
TOKENS = 512
QUIET = 0.05
"""The size of the tables' values: as in a trained model the stream starts so small that a wrong eps shows."""

replace = msgspec.structs.replace


def miniature(spec: ModelSpec, tokens: int) -> ModelSpec:
    """The small copy, for rows of at most `tokens` tokens."""
    blocks = _layers(spec)
    mixers = [mixer for block in blocks if (mixer := block.mixer("attention")) is not None]
    square = not mixers or _written_from(mixers[0]) == spec.hidden_size
    few = [_written_from(mixer.small(mixer.hidden_size)) for mixer in mixers]
    width = max(few, default=min(spec.hidden_size, WIDTH))
    copy = replace(spec, blocks=tuple(blocks)).small(width if square else width + 16)
    vocab = min(spec.vocab_size, TOKENS)
    table = copy.positions
    return replace(
        copy,
        embedding=replace(copy.embedding, vocab_size=vocab),
        head=replace(copy.head, vocab_size=vocab),
        positions=None if table is None else replace(table, length=min(table.length, tokens + 1)),
    )


def _layers(spec: ModelSpec) -> list[Block]:
    """The first two layers, and the first of every other kind; a scale of its own makes none (gpt2's by layer)."""
    kinds: dict[Block, Block] = {}
    for block in spec.blocks:
        kinds.setdefault(block.mapped(_unscaled), block)
    first = list(spec.blocks[:2])
    return first + [block for block in kinds.values() if block not in first]


def _unscaled(node: Any, _: str) -> Any:
    return node.slips().get("scores not scaled", node)


def _written_from(mixer: Mixer) -> int:
    """How wide that is from which a mixer writes the stream."""
    return next((each.shape[1] for each in mixer.weights().values() if each.role == "writes"), mixer.hidden_size)


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Its parameters in fp64, of the size that trained ones have."""
    generator = torch.Generator().manual_seed(0)
    empty = {each.name: torch.empty(each.shape, dtype=torch.float64) for each in spec.parameters()}
    drawn = {name: random_parameter(name, tensor, generator) for name, tensor in empty.items()}
    return {name: tensor * QUIET if name in TABLES else tensor for name, tensor in drawn.items()}


def narrow_batches(batches: Sequence[Batch], spec: ModelSpec) -> list[Batch]:
    """The same probe over a smaller vocabulary: lengths, padding and repetitions as they are."""
    return [replaced(batch, input_ids=batch.input_ids % spec.vocab_size) for batch in batches]
