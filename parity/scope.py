"""What two trees can both be given, and under which names: tokens that both have, as many as both take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from ..components import ModelSpec
from .heads import Tokens
from .probe import Batch, longest, probe

WINDOW = 1024
"""Tokens of text that a model is given at once."""
TOGETHER = 2048
"""Tokens of text that go through a model together, and for which its weights are read once."""


@dataclass(frozen=True)
class Scope:
    """Two trees to be compared.

    tokens: the same tokens' ids before and after, where the vocabulary changed; only these are given and compared.
    most: tokens that a model is given at most.
    """

    before: ModelSpec
    after: ModelSpec
    tokens: Tokens | None = None
    most: int | None = None

    def probe(self) -> list[Batch]:
        """The probe over the tokens that both have, in the old vocabulary, cut where it is longer than `most`."""
        spec, kept = self.before, None
        if self.tokens is not None:
            kept = torch.as_tensor(self.tokens[0])
            spec = msgspec.structs.replace(
                spec,
                embedding=msgspec.structs.replace(spec.embedding, vocab_size=len(kept)),
                head=msgspec.structs.replace(spec.head, vocab_size=len(kept)),
            )
        found = []
        for batch in probe(spec, self.after):
            ids = batch.input_ids[:, : self.most]
            mask = None if batch.attention_mask is None else batch.attention_mask[:, : self.most]
            if mask is None or bool(mask.any()):
                found.append(Batch(batch.name, ids if kept is None else kept[ids], mask))
        return found

    def renamed(self, batch: Batch) -> Batch:
        """A batch of the old vocabulary in the new one."""
        if self.tokens is None:
            return batch
        old, new = (torch.as_tensor(ids) for ids in self.tokens)
        table = torch.zeros(int(old.max()) + 1, dtype=torch.long)
        table[old] = new
        return replace(batch, input_ids=table[batch.input_ids])

    def windows(self, text: Sequence[int]) -> list[list[int]]:
        """Text as pieces of one token more than a model is given at once, which overlap by one: each token but a
        piece's first is predicted from those before it. Pieces end where a token is not kept.
        """
        specs = (self.before, self.after)
        lengths = [longest(*specs), *(spec.context_length for spec in specs), self.most]
        width = min([WINDOW, *(length for length in lengths if length is not None)])
        there = groupby(map(int, text), key=lambda token: self.tokens is None or token in self._numbers)
        runs = [list(run) for kept, run in there if kept]
        pieces = [run[start : start + width + 1] for run in runs for start in range(0, len(run), width)]
        return [piece for piece in pieces if len(piece) > 1]

    def groups(self, text: Sequence[int]) -> list[list[list[int]]]:
        """Windows, those that go through a model together in one list."""
        groups: list[list[list[int]]] = []
        for window in self.windows(text):
            if not groups or sum(map(len, groups[-1])) + len(window) > TOGETHER:
                groups.append([])
            groups[-1].append(window)
        return groups

    def targets(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """The token that follows each token given, as a number among those compared."""
        follow = [token for window in windows for token in window[1:]]
        return torch.tensor(follow if self.tokens is None else [self._numbers[token] for token in follow])

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Old ids -> their number among the tokens that both have."""
        return {} if self.tokens is None else {old: number for number, old in enumerate(self.tokens[0])}


def inputs(windows: Sequence[Sequence[int]]) -> list[Batch]:
    """What a model is given of each window: all but its last token."""
    return [Batch("text", torch.tensor([list(window[:-1])])) for window in windows]
