"""Make the probe: inputs that reveal differences between two models.

It has long sequences, padding, repeated tokens, and tokens from every region of the vocabulary. Some sequences are
longer than every attention window and than the original context of scaled RoPE. A short prompt would hide most faults:
an ignored window makes no difference at 8 tokens, and a difference of 5.3 in the logits at 256.
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
"""The tensors of which one input reads only some rows. Every logit depends on all rows of a head."""
ENCODER = "encoder."  # the prefix of the names of an encoder's tensors
AFFORDABLE = 1024
"""The longest window or context, in tokens, that is probed by default, because the cost of attention is quadratic."""
LONG = 200  # the minimum length of the longest batch, if the model supports it: distant positions, many keys
_REGIONS = 64
KEPT = 256
"""The number of positions per sequence whose logits are compared. All would need too much memory."""
WINDOW = 1024  # tokens of text in one input
TOGETHER = 2048  # tokens of text that go through a model together, so that each weight is read once for them
_NEAR = 1e-9  # the relative difference of equal frequencies that are computed in two ways

Tokens = tuple[Sequence[int], Sequence[int]]  # the same tokens' ids in two vocabularies


@dataclass(frozen=True)
class ProbeBatch:
    """One batch of test inputs."""

    name: str  # what is special about the input, or the text of a prompt
    input_ids: Tensor  # the token ids, (B, T)
    attention_mask: Tensor | None = None  # (B, T), if there is padding
    rows: Tensor | None = None  # the indices of the compared positions; None for all
    token_types: Tensor | None = None  # the token types, (B, T), unless all are 0

    def to(self, device: torch.device) -> "ProbeBatch":
        """Return the batch on a device. The models then compute on this device."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        types = None if self.token_types is None else self.token_types.to(device)
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=mask, token_types=types)

    def valid(self, logits: Tensor) -> Tensor:
        """Return the rows of `logits` (B, T, V) at tokens without padding, (N, V). Logits at padding have no meaning.

        Of a long sequence, only evenly spaced positions are returned, including the first and the last.
        """
        steps = logits.shape[1]
        indices = torch.linspace(0, steps - 1, min(steps, KEPT), dtype=torch.float64).round().long()
        rows = logits[:, indices].flatten(0, 1)
        real_rows = rows if self.attention_mask is None else rows[self.attention_mask[:, indices].reshape(-1).bool()]
        return real_rows if self.rows is None else real_rows[self.rows]


def device_of_batches(batches: Sequence[ProbeBatch]) -> torch.device:
    """Return the device of some batches, which are all on the same one. Without batches, it is the CPU."""
    return batches[0].input_ids.device if batches else torch.device("cpu")


RUNNING: ContextVar[ProbeBatch] = ContextVar("RUNNING")
"""The batch whose forward pass runs in this thread, for hooks, which only get the module."""


@dataclass(frozen=True, order=True)
class _Limit:
    """A number of tokens beyond which a model computes differently: a window, or the original
    context of scaled RoPE.
    """

    tokens: int  # the number of tokens
    name: str  # the kind of limit in words

    @property
    def beyond(self) -> int:
        """Return the length of a sequence, in tokens, that is long enough to show the effect of this limit."""
        return self.tokens + self.tokens // 4 + 8

    def __str__(self) -> str:
        return f"{self.name} of {self.tokens:,}"


def limits(*specs: ModelSpec) -> list[_Limit]:
    """Return the attention windows and the original contexts (of scaled RoPE) of all given models,
    the shortest first.
    """
    nodes = [node for spec in specs for node in spec.components()]
    names = {"window": "window", "original_context": "original context"}
    sizes = {(getattr(node, field, None), name) for node in nodes for field, name in names.items()}
    return sorted(_Limit(size, name) for size, name in sizes if size is not None)


def longest(*specs: ModelSpec, supported: int | None = None) -> int | None:
    """Return the length in tokens of the longest sequence that all models can process; None if there is no limit.

    `supported` is the limit of transformers' class.
    """
    tables = [spec.positions.length for spec in specs if spec.positions is not None]
    return min(tables if supported is None else [*tables, supported], default=None)


def passed(limit: _Limit, most: int | None, long: bool) -> bool:
    """Return whether the test inputs (the probe) have a sequence that is long enough to show a limit.

    Args:
        limit: a window or an original context.
        most: the largest number of tokens of a sequence; None for any.
        long: whether the probe has sequences beyond limits of more than `AFFORDABLE` tokens.
    """
    return (most is None or limit.beyond <= most) and (long or limit.tokens <= AFFORDABLE)


def vocabulary(spec: ModelSpec) -> int:
    """Return the number of token ids that random test inputs are chosen from.

    For a model whose encoder and decoder have different vocabularies, this is the size of the larger one.
    """
    return max(stack.vocab_size for stack in (spec, spec.encoder) if stack is not None)


def probe(
    spec: ModelSpec,
    *others: ModelSpec,
    long: bool = False,
    up_to: int | None = None,
    supported: int | None = None,
    seed: int = 0,
) -> list[ProbeBatch]:
    """Return the test inputs for one model, or for several models with the same vocabulary.

    Args:
        spec: the model's component tree.
        others: the component trees of further models. There are sequences beyond the windows and contexts of all.
        long: add sequences beyond windows and contexts of more than 1,024 tokens.
        up_to: add a sequence of this number of tokens, and none that is longer.
        supported: the largest number of tokens that transformers' class can process. No sequence is longer than this,
            or longer than the models can process.
        seed: the seed of the random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    most = min(longest(spec, *others, supported=supported) or 10**9, up_to or 10**9)

    def tokens(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary(spec), (batch, min(length, most)), generator=generator)

    batches = [ProbeBatch("one token", tokens(1, 1)), ProbeBatch("random tokens", tokens(1, 64))]
    # Ids are spread over the whole vocabulary, so that a shifted row or a swapped block shows.
    regions = (
        torch.linspace(0, vocabulary(spec) - 1, min(_REGIONS, vocabulary(spec)), dtype=torch.float64).round().long()
    )
    width = min(len(regions), most)
    # A short position table needs several rows; the last row is padded with the last token.
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
    if spec.token_types is not None and min(tree.token_types.count for tree in (spec, *others) if tree.token_types) > 1:
        count = min(tree.token_types.count for tree in (spec, *others) if tree.token_types is not None)
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
    name: str, ids: Sequence[int], spec: ModelSpec, *others: ModelSpec, supported: int | None = None
) -> ProbeBatch:
    """Return a prompt as a batch. Raise UsageError if it is empty, too long, or has an unknown token id."""
    if not ids:
        raise UsageError(f"the prompt {shown(name, 40)} has no tokens")
    if max(ids) >= vocabulary(spec):
        raise UsageError(
            f"the prompt {shown(name, 40)} has token id {max(ids)}, but the vocabulary has {vocabulary(spec)} tokens"
        )
    most = longest(spec, *others, supported=supported)
    if most is not None and len(ids) > most:
        raise UsageError(f"the prompt {shown(name, 40)} has {len(ids)} tokens, but the model supports at most {most}")
    return ProbeBatch(name, torch.tensor([list(ids)]))


# The next functions compare two trees before anything is computed: whether their weights must be the same, and up to
# which length they can be one function. Weights cannot compensate for another window, rotary scaling, rotary base or
# table length, so trees that differ only in these need the same bytes. The effect of these fields begins after some
# length, or grows with it, so that a probe of 200 tokens cannot show it at 4,096 tokens.


def one_function(a: ModelSpec, b: ModelSpec) -> bool:
    """Return whether two models with the same weights would compute the same function, judged by their component trees.

    The trees may differ in rounding, in the last digits of numbers, and in fields that matter only for some sequence
    lengths, such as a window.
    """

    def bare(node: Component, _: str) -> Any:
        fields = {name: getattr(node, name) for name in node.__struct_fields__}
        fields |= {name: float(f"{value:.6g}") for name, value in fields.items() if isinstance(value, float)}
        return type(node)(**{**fields, **node.by_length})

    return bool(without_rounding(a).mapped(bare) == without_rounding(b).mapped(bare))


def _parts_behind(a: ModelSpec, b: ModelSpec) -> list[_Limit]:
    """Return the sequence lengths in tokens beyond which two models differ, with the reasons, the shortest first.

    The length 0 means that the models differ at every length.
    """
    tables = [None if tree.positions is None else tree.positions.length for tree in (a, b)]
    sizes: set[tuple[str, int | None, int | None]] = {("position tables", tables[0], tables[1])}
    differing: set[_Limit] = set()
    for pair in _counterparts(a, b):
        x, y = (getattr(mixer, "window", None) for mixer in pair)
        sizes.add(("windows", x, y))
        length = _alike_up_to(*(getattr(mixer, "position", None) for mixer in pair))
        if length is not None:
            differing.add(_Limit(length, "positions counted otherwise"))
        warm = [getattr(mixer, "temperature", None) for mixer in pair]
        if warm[0] != warm[1]:
            grows = min(mixer.original_context - mixer.offset for mixer in warm if mixer is not None)
            differing.add(_Limit(grows, "temperatures of queries"))
    for name, x, y in sizes:
        if x != y:
            words = " and ".join("none" if size is None else f"{size:,}" for size in (x, y))
            differing.add(_Limit(min(size for size in (x, y) if size is not None), f"{name} of {words} tokens"))
    return sorted(differing)


def whole_context(a: ModelSpec, b: ModelSpec, supported: int | None = None) -> int | None:
    """Return a length in tokens at which two models with different position encodings must be compared.

    It is the longer of their two contexts, or the longest that both support. Return None if the positions are the same,
    or if they differ only beyond a certain length, for which `limited_to` is responsible. Also return None if a context
    length is unknown.
    """
    known = [tree.context_length for tree in (a, b) if tree.context_length is not None]
    if len(known) < 2 or all(limit.tokens for limit in _parts_behind(a, b)):
        return None
    return min(max(known), longest(a, b, supported=supported) or max(known))


def limited_to(a: ModelSpec, b: ModelSpec, probed: int, up_to: int | None) -> tuple[int | None, list[str]]:
    """Return the longest sequence, in tokens, for which the verdict holds, and the reasons for this limit.

    The length is None, without reasons, if the verdict holds for sequences of any length.

    Args:
        a: the first model.
        b: the second model.
        probed: the length of the longest batch.
        up_to: the length that the user asked for.
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
    """Return the pairs of corresponding mixers of two models, as far as they have positions or windows.

    Corresponding mixers are at the same place in the same layer. If the models have different numbers of layers, every
    kind of mixer that only one model has is paired with every kind of the other model.
    """
    if len(a.blocks) == len(b.blocks):
        alike = (zip_longest(*(block.sublayers for block in pair)) for pair in zip(a.blocks, b.blocks, strict=True))
        mixers = (tuple(sublayer and sublayer.mixer for sublayer in pair) for layer in alike for pair in layer)
        return list(dict.fromkeys((x, y) for x, y in mixers if hasattr(x, "position") or hasattr(y, "position")))
    every = ([part.mixer for block in tree.blocks for part in block.sublayers] for tree in (a, b))
    first, second = ([mixer for mixer in mixers if hasattr(mixer, "position")] for mixers in every)
    if set(first) == set(second):
        return []
    kinds = [dict.fromkeys(mixers) for mixers in (first, second)]
    unique = [[kind for kind in a if kind not in b] or list(a) for a, b in (kinds, kinds[::-1])]
    return [(x, y) for x in unique[0] for y in unique[1]]


def _alike_up_to(a: Any, b: Any) -> int | None:
    """Return the number of tokens up to which two position encodings are equal; None if they are
    equal at any length.
    """
    turns: list[Any] = [rotary and getattr(module_of(rotary), "frequencies", None) for rotary in (a, b)]
    if None in turns:
        return None if without_rounding(a) == without_rounding(b) else 0
    contexts = {getattr(rotary.scaling, "original_context", 0) for rotary in (a, b)} - {0}
    alike = 0
    for length in sorted({1, *contexts, *(context + 1 for context in contexts), 4 * max(contexts, default=1)}):
        # One side may have more pairs, for weights that the other side does not have.
        turned = [turn(rotary, length, torch.float64) for turn, rotary in zip(turns, (a, b), strict=True)]
        fewer, more = sorted(turned, key=len)
        if not bool(((fewer[:, None] - more).abs().amin(dim=1) <= _NEAR * fewer).all()):
            return alike
        alike = length
    return None


@dataclass(frozen=True)
class Scope:
    """Two models to compare, the original and a changed one, and the tokens on which they can be compared."""

    before: ModelSpec  # the original's component tree
    after: ModelSpec  # the changed model's component tree
    tokens: Tokens | None = None
    """The tokens of both vocabularies, as ids of the original and of the changed model; None if all are the same."""
    most: int | None = None  # the largest number of tokens of a sequence

    def probe(self) -> list[ProbeBatch]:
        """Return the test inputs (the probe) in ids of the original's vocabulary.

        They have only tokens of both vocabularies. Sequences are cut to `most` tokens.
        """
        spec, common_ids = self.before, None
        if self.tokens is not None:
            common_ids = torch.as_tensor(self.tokens[0])
            spec = msgspec.structs.replace(
                spec,
                embedding=msgspec.structs.replace(spec.embedding, vocab_size=len(common_ids)),
                head=None if spec.head is None else msgspec.structs.replace(spec.head, vocab_size=len(common_ids)),
            )
        batches = []
        for batch in probe(spec, self.after):
            ids = batch.input_ids[:, : self.most]
            mask = None if batch.attention_mask is None else batch.attention_mask[:, : self.most]
            if mask is None or bool(mask.any()):
                types = None if batch.token_types is None else batch.token_types[:, : self.most]
                batches.append(
                    ProbeBatch(batch.name, ids if common_ids is None else common_ids[ids], mask, token_types=types)
                )
        return batches

    def renamed(self, batch: ProbeBatch) -> ProbeBatch:
        """Return a batch with its token ids translated into those of the changed model's vocabulary."""
        if self.tokens is None:
            return batch
        old, new = (torch.as_tensor(ids) for ids in self.tokens)
        table = torch.zeros(int(old.max()) + 1, dtype=torch.long)
        table[old] = new
        return replace(batch, input_ids=table[batch.input_ids])

    def windows(self, text: Sequence[int]) -> list[list[int]]:
        """Split a text into pieces for the models. A piece has at most one token more than a model's input.

        The last token of a piece is also the first of the next one, so every token except a piece's first is predicted.
        A token that one vocabulary lacks is left out, and a new piece begins after it.
        """
        specs = (self.before, self.after)
        lengths = [longest(*specs), *(spec.context_length for spec in specs), self.most]
        width = min([WINDOW, *(length for length in lengths if length is not None)])
        grouped = groupby(map(int, text), key=lambda token: self.tokens is None or token in self._numbers)
        runs = [list(run) for is_common, run in grouped if is_common]
        pieces = [run[start : start + width + 1] for run in runs for start in range(0, len(run), width)]
        return [piece for piece in pieces if len(piece) > 1]

    def groups(self, text: Sequence[int]) -> list[list[list[int]]]:
        """Return the pieces of the text (see `windows`) in groups. The pieces of a group go through
        a model together.
        """
        groups: list[list[list[int]]] = []
        for window in self.windows(text):
            if not groups or sum(map(len, groups[-1])) + len(window) > TOGETHER:
                groups.append([])
            groups[-1].append(window)
        return groups

    def targets(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """Return the token that follows each input token, as an index into the tokens that both vocabularies have."""
        follow = [token for window in windows for token in window[1:]]
        return torch.tensor(follow if self.tokens is None else [self._numbers[token] for token in follow])

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Map token ids of the original's vocabulary to indices into the tokens that both vocabularies have."""
        return {} if self.tokens is None else {old: number for number, old in enumerate(self.tokens[0])}


def inputs(windows: Sequence[Sequence[int]]) -> list[ProbeBatch]:
    """Return a batch for each window of text: all its tokens except the last, which is only predicted."""
    return [ProbeBatch("text", torch.tensor([list(window[:-1])])) for window in windows]
