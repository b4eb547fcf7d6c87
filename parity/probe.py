"""Inputs that kill bugs: lengths past every window and original context, padding on both sides, repeated tokens, every
region of the vocabulary. A short friendly prompt hides most of what can be wrong (a window ignored shows nothing at 8
tokens, 5.3 logits at 256).
"""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..components import Component, ModelSpec, without_rounding
from ..errors import UsageError, shown
from ..modules.registry import module_of

EMBEDDING, POSITIONS = TABLES = ("embedding.weight", "positions.weight")
"""The tensors of which an input reads some rows alone. A head's rows are all in every logit."""
ENCODER = "encoder."  # what the names of an encoder's tensors begin with
AFFORDABLE = 1024
"""Tokens: a window or context beyond it is only probed when asked for, since attention grows with the square."""
LONG = 200  # tokens of the longest batch at least, where the tree takes as many: far pairs of positions, many keys
_REGIONS = 64
KEPT = 256
"""Positions whose logits are compared in one row: far more tokens than that times the vocabulary is much memory."""
SMALL = 50_000_000
"""Parameters of a model that is run in fp64, or once more for every step, cause or mistake, without being asked to."""
WINDOW = 1024  # tokens of text that a model is given at once
TOGETHER = 2048  # tokens of text that go through a model together, and for which its weights are read once
_NEAR = 1e-9  # relative difference of frequencies that come of one base by another way to compute them

Tokens = tuple[Sequence[int], Sequence[int]]  # the same tokens' ids in two vocabularies


@dataclass(frozen=True)
class ProbeBatch:
    """One probe: token ids (B, T), their mask where there is padding, the rows looked at where those are not all, and
    the types of tokens (B, T) where some are not of the first.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor | None = None
    rows: Tensor | None = None
    token_types: Tensor | None = None

    def valid(self, logits: Tensor) -> Tensor:
        """The logits of real tokens, (N, V): what a model says at padding means nothing. Of a long row every so many,
        the first and the last among them; each has seen all tokens before it.
        """
        steps = logits.shape[1]
        keep = torch.linspace(0, steps - 1, min(steps, KEPT), dtype=torch.float64).round().long()
        kept = logits[:, keep].flatten(0, 1)
        real = kept if self.attention_mask is None else kept[self.attention_mask[:, keep].reshape(-1).bool()]
        return real if self.rows is None else real[self.rows]


RUNNING: ContextVar[ProbeBatch] = ContextVar("RUNNING")
"""The batch whose forward pass this is, in the thread that runs it, for hooks that are told of a module alone."""


@dataclass(frozen=True, order=True)
class _Limit:
    """A length beyond which a tree computes something else: a window, or the context its positions were made for."""

    tokens: int
    name: str

    @property
    def beyond(self) -> int:
        return self.tokens + self.tokens // 4 + 8

    def __str__(self) -> str:
        return f"{self.name} of {self.tokens:,}"


def limits(*specs: ModelSpec) -> list[_Limit]:
    """Every limit of any of the trees, the shortest first."""
    nodes = [node for spec in specs for node in spec.components()]
    names = {"window": "window", "original_context": "original context"}
    sizes = {(getattr(node, field, None), name) for node in nodes for field, name in names.items()}
    return sorted(_Limit(size, name) for size, name in sizes if size is not None)


def longest(*specs: ModelSpec, taken: int | None = None) -> int | None:
    """Return the most tokens that all of the trees and a reference that takes `taken` can take; None for any number."""
    tables = [spec.positions.length for spec in specs if spec.positions is not None]
    return min(tables if taken is None else [*tables, taken], default=None)


def passed(limit: _Limit, most: int | None, long: bool) -> bool:
    """Whether the probe goes past a limit."""
    return (most is None or limit.beyond <= most) and (long or limit.tokens <= AFFORDABLE)


def vocabulary(spec: ModelSpec) -> int:
    """Return the number of token ids that a probe draws from: the larger vocabulary of a model that has two."""
    return max(stack.vocab_size for stack in (spec, spec.encoder) if stack is not None)


def probe(
    spec: ModelSpec,
    *others: ModelSpec,
    long: bool = False,
    up_to: int | None = None,
    taken: int | None = None,
    seed: int = 0,
) -> list[ProbeBatch]:
    """The batches for a tree, or for several over one vocabulary that are compared: past the limits of each, and no
    longer than any can take, nor a reference that takes `taken` tokens. `long` goes past windows and contexts of more
    than 1,024 tokens too; `up_to` has a batch of as many tokens, and none of more.
    """
    generator = torch.Generator().manual_seed(seed)
    most = min(longest(spec, *others, taken=taken) or 10**9, up_to or 10**9)

    def tokens(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary(spec), (batch, min(length, most)), generator=generator)

    batches = [ProbeBatch("one token", tokens(1, 1)), ProbeBatch("random tokens", tokens(1, 64))]
    # Every region of the vocabulary: strides over it, so that a row shifted or a block swapped shows.
    regions = (
        torch.linspace(0, vocabulary(spec) - 1, min(_REGIONS, vocabulary(spec)), dtype=torch.float64).round().long()
    )
    width = min(len(regions), most)
    # Several rows where a short table of positions does not take them in one; the last one is filled up.
    rows = torch.nn.functional.pad(regions, (0, -len(regions) % width), value=vocabulary(spec) - 1)
    batches.append(ProbeBatch("vocabulary regions", rows.reshape(-1, width)))
    batches.append(ProbeBatch("one token repeated", tokens(1, 1).expand(1, min(32, most)).clone()))
    padded = tokens(3, 48)
    for side in ("left", "right"):
        mask = torch.ones_like(padded)
        for row, width in enumerate((0, padded.shape[1] // 4, padded.shape[1] // 2)):
            if width:
                mask[row, slice(0, width) if side == "left" else slice(-width, None)] = 0
        if int(mask.min()) == 0:
            batches.append(ProbeBatch(f"{side} padding", padded, mask))
    if spec.token_types is not None and min(each.token_types.count for each in (spec, *others) if each.token_types) > 1:
        count = min(each.token_types.count for each in (spec, *others) if each.token_types is not None)
        types = torch.arange(count).repeat_interleave(-(-padded.shape[1] // count))[: padded.shape[1]]
        batches.append(ProbeBatch("types of tokens", padded[:1], token_types=types[None]))
    reached = [limit for limit in limits(spec, *others) if passed(limit, most, long)]
    batches += [ProbeBatch(f"past the {limit}", tokens(1, limit.beyond)) for limit in reached]
    if all(limit.beyond < LONG for limit in reached):
        batches.append(ProbeBatch("long", tokens(1, min(LONG, spec.context_length or LONG))))
    if up_to is not None:
        batches.append(ProbeBatch(f"as long as {most:,} tokens", tokens(1, most)))
    return batches


def text_batch(
    name: str, ids: Sequence[int], spec: ModelSpec, *others: ModelSpec, taken: int | None = None
) -> ProbeBatch:
    """A prompt as a batch for some trees; UsageError where it is empty, too long, or beyond the vocabulary."""
    if not ids:
        raise UsageError(f"the prompt {shown(name, 40)} has no tokens")
    if max(ids) >= vocabulary(spec):
        raise UsageError(
            f"the prompt {shown(name, 40)} has token id {max(ids)}, but the vocabulary has {vocabulary(spec)} tokens"
        )
    most = longest(spec, *others, taken=taken)
    if most is not None and len(ids) > most:
        raise UsageError(f"the prompt {shown(name, 40)} has {len(ids)} tokens, but the model supports at most {most}")
    return ProbeBatch(name, torch.tensor([list(ids)]))


# What two trees say of each other before anything is computed: whether their weights have to be the same, and up to
# which length they can be one function at all. Windows, rotary scaling, the base and the length of a table change
# nothing that weights could make up for: what differs in these alone calls for the same bytes. Their effect begins
# behind a length, or grows with it, so that a probe of 200 tokens says nothing of 4,096.


def one_function(a: ModelSpec, b: ModelSpec) -> bool:
    """Whether the trees leave weights no reason to differ: they are one but for how they round, for what acts by the
    length of a sequence alone, and for the last digits of numbers, to which no weights answer.
    """

    def bare(node: Component, _: str) -> Any:
        fields = {name: getattr(node, name) for name in node.__struct_fields__}
        fields |= {name: float(f"{value:.6g}") for name, value in fields.items() if isinstance(value, float)}
        return type(node)(**{**fields, **node.by_length})

    return bool(without_rounding(a).mapped(bare) == without_rounding(b).mapped(bare))


def _parts_behind(a: ModelSpec, b: ModelSpec) -> list[_Limit]:
    """The lengths behind which the trees differ, the shortest first; 0 where they do from the first token on."""
    tables = [None if tree.positions is None else tree.positions.length for tree in (a, b)]
    sizes: set[tuple[str, int | None, int | None]] = {("position tables", tables[0], tables[1])}
    found: set[_Limit] = set()
    for pair in _counterparts(a, b):
        x, y = (getattr(each, "window", None) for each in pair)
        sizes.add(("windows", x, y))
        length = _alike_up_to(*(getattr(each, "position", None) for each in pair))
        if length is not None:
            found.add(_Limit(length, "positions counted otherwise"))
        warm = [getattr(each, "temperature", None) for each in pair]
        if warm[0] != warm[1]:
            grows = min(each.original_context - each.offset for each in warm if each is not None)
            found.add(_Limit(grows, "temperatures of queries"))
    for name, x, y in sizes:
        if x != y:
            words = " and ".join("none" if size is None else f"{size:,}" for size in (x, y))
            found.add(_Limit(min(size for size in (x, y) if size is not None), f"{name} of {words} tokens"))
    return sorted(found)


def whole_context(a: ModelSpec, b: ModelSpec, taken: int | None = None) -> int | None:
    """The longest sequence made for, where the trees count positions otherwise; None where they do not, or unknown."""
    known = [tree.context_length for tree in (a, b) if tree.context_length is not None]
    if len(known) < 2 or all(limit.tokens for limit in _parts_behind(a, b)):
        return None
    return min(max(known), longest(a, b, taken=taken) or max(known))


def limited_to(a: ModelSpec, b: ModelSpec, probed: int, up_to: int | None) -> tuple[int | None, list[str]]:
    """The most tokens that a verdict on the two can speak of, None for any, and in words why it is not more.

    `probed` are the tokens of the longest batch; `up_to` is the length that was asked for, which then is among them.
    """
    if up_to is not None:
        return up_to, []
    whole = whole_context(a, b) or probed + 1
    tables = [tree.positions.length for tree in (a, b) if tree.positions is not None]
    most = max(tables) if len(tables) == 2 else math.inf
    parts = [limit for limit in _parts_behind(a, b) if probed < (limit.beyond if limit.tokens else whole)]
    parts = [limit for limit in parts if limit.tokens < most]
    if not parts:
        return None, []
    reach = min(limit.tokens or probed for limit in parts)
    past = "--long goes past that, " if (longest(a, b) or reach + 1) > reach else ""
    names = ", ".join(dict.fromkeys(limit.name for limit in parts))
    return reach, [f"sequences of more than {reach:,} tokens ({names}): {past}--up-to {reach} asks for no more"]


def _counterparts(a: ModelSpec, b: ModelSpec) -> list[tuple[Any, Any]]:
    """Return pairs of what knows positions or windows: of one tree and of the other at the same place of a layer.

    Where there are not as many layers, every kind that one alone has with every kind of the other.
    """
    if len(a.blocks) == len(b.blocks):
        alike = (zip_longest(*(block.sublayers for block in pair)) for pair in zip(a.blocks, b.blocks, strict=True))
        mixers = (tuple(each and each.mixer for each in pair) for layer in alike for pair in layer)
        return list(dict.fromkeys((x, y) for x, y in mixers if hasattr(x, "position") or hasattr(y, "position")))
    every = ([part.mixer for block in tree.blocks for part in block.sublayers] for tree in (a, b))
    first, second = ([mixer for mixer in mixers if hasattr(mixer, "position")] for mixers in every)
    if set(first) == set(second):
        return []
    kinds = [dict.fromkeys(each) for each in (first, second)]
    own = [[each for each in mine if each not in others] or list(mine) for mine, others in (kinds, kinds[::-1])]
    return [(x, y) for x in own[0] for y in own[1]]


def _alike_up_to(a: Any, b: Any) -> int | None:
    """Tokens up to which positions of attention are the same; None where they are at any length."""
    turns: list[Any] = [None if each is None else getattr(module_of(each), "frequencies", None) for each in (a, b)]
    if None in turns:
        return None if without_rounding(a) == without_rounding(b) else 0
    contexts = {getattr(each.scaling, "original_context", 0) for each in (a, b)} - {0}
    alike = 0
    for length in sorted({1, *contexts, *(context + 1 for context in contexts), 4 * max(contexts, default=1)}):
        # One may have more pairs, which then meet weights that the other has not.
        turned = [turn(each, length, torch.float64) for turn, each in zip(turns, (a, b), strict=True)]
        few, many = sorted(turned, key=len)
        if not bool(((few[:, None] - many).abs().amin(dim=1) <= _NEAR * few).all()):
            return alike
        alike = length
    return None


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

    def probe(self) -> list[ProbeBatch]:
        """The probe over the tokens that both have, in the old vocabulary, cut where it is longer than `most`."""
        spec, kept = self.before, None
        if self.tokens is not None:
            kept = torch.as_tensor(self.tokens[0])
            spec = msgspec.structs.replace(
                spec,
                embedding=msgspec.structs.replace(spec.embedding, vocab_size=len(kept)),
                head=None if spec.head is None else msgspec.structs.replace(spec.head, vocab_size=len(kept)),
            )
        found = []
        for batch in probe(spec, self.after):
            ids = batch.input_ids[:, : self.most]
            mask = None if batch.attention_mask is None else batch.attention_mask[:, : self.most]
            if mask is None or bool(mask.any()):
                types = None if batch.token_types is None else batch.token_types[:, : self.most]
                found.append(ProbeBatch(batch.name, ids if kept is None else kept[ids], mask, token_types=types))
        return found

    def renamed(self, batch: ProbeBatch) -> ProbeBatch:
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


def inputs(windows: Sequence[Sequence[int]]) -> list[ProbeBatch]:
    """What a model is given of each window: all but its last token."""
    return [ProbeBatch("text", torch.tensor([list(window[:-1])])) for window in windows]
