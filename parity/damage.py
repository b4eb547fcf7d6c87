"""The damage report: how far a changed model is from its original, by position, by layer, and where that is born.

By position: KL and perplexity of what follows after so many tokens. By layer: the difference of the residual streams,
and what each model would say if it ended there (the logit lens, nostalgebraist 2020). Where it is born: what each
component of the changed model makes of the *original's* stream, against what the original makes of it, so that what
came from below does not count. That needs streams in one basis, which is decided by what the embeddings give.

Both models are read by rows of their weights (see `rows`), and streams wait in files without a name.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..analysis.parameters import count
from ..components import Block, ModelSpec
from ..converter.weights import Tree
from ..modules.load import filled, tensor_of
from ..modules.registry import build_module
from .bisect import KeptStates
from .compare import PositionComparison, compare_heads, perplexity, require_same_tokens
from .probe import RUNNING, SMALL, Scope, Tokens, inputs
from .rows import final_norm, states

_TEXT = 2048  # tokens of text that are used at most
_STREAM_BYTES = 2**28  # what one model's streams may take in the temporary folder
_LENS_WORK = 5 * 10**11
"""Multiplications that a model's heads may take for all layers; of more positions, so many are taken evenly."""
_SAME = 1e-6  # relative difference of embeddings up to which they are the same
_ALIKE = 0.25
"""And up to which a tree with the same norms still has the same basis (a table that was rounded, or refitted)."""
_FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference that rounding may make in one component, in what is computed in."""

_Pairs = Sequence[tuple[int, int]]  # layers (before, after) that stand for one another


@dataclass(frozen=True)
class DamageBin:
    """Positions `first` to `last`, counted from 0: what is predicted from the token there and those before it. kl: mean
    KL(before ‖ after) in nats per token; top1: the share of positions with the same likeliest token; before and after:
    perplexity, None where what follows is not text.
    """

    first: int
    last: int
    positions: int
    kl: float
    top1: float
    before: float | None = None
    after: float | None = None

    @property
    def name(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}–{self.last:,}"


@dataclass(frozen=True)
class LayerDamage:
    """A layer of each model, and what stands after both. stream: the difference of the residual streams over the
    original's size (root mean squares), None where they are not as wide. kl, top1, perplexity before and after: as in
    `Bin`, if the models ended here; by_bin: that KL in each bin.
    """

    before: int
    after: int
    stream: float | None
    kl: float
    top1: float
    by_bin: tuple[float, ...]
    perplexity_before: float | None = None
    perplexity_after: float | None = None


@dataclass(frozen=True)
class Place:
    """A component, and how far its output is off when it is given the original's stream: the difference over the
    original's output (root mean squares). layer: the changed model's, None outside of layers.
    """

    label: str
    layer: int | None
    relative: float
    differs: bool

    @property
    def name(self) -> str:
        return self.label if self.layer is None else f"layer {self.layer} {self.label}"


@dataclass(frozen=True)
class Damage:
    """All of it. `on` says what the models were given; `total` is over all positions. places: every component in the
    order of computation, empty where streams cannot be compared. notes: why something is not there, and on how much it
    was computed.
    """

    on: str
    dtype: str
    total: DamageBin
    bins: tuple[DamageBin, ...]
    layers: tuple[LayerDamage, ...]
    places: tuple[Place, ...]
    notes: tuple[str, ...]

    @property
    def born(self) -> Place | None:
        """The component that differs most by itself; one of a block, not the block."""
        parts = [place for place in self.places if place.differs and place.label != _BLOCK]
        return max(parts, key=lambda place: math.inf if math.isnan(place.relative) else place.relative, default=None)

    @property
    def first(self) -> Place | None:
        """The first component that differs by itself."""
        return next((place for place in self.places if place.differs), None)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; null for what is no number or infinite, which JSON has no word for."""
        born, first = (None if place is None else place.name for place in (self.born, self.first))
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {**found, "first": first, "most": born}


def damage(
    before: Tree,
    after: Tree,
    *,
    text: Sequence[int] | None = None,
    tokens: Tokens | None = None,
    most: int | None = None,
    layers: _Pairs | None = None,
    progress: Callable[[str], None] | None = None,
) -> Damage:
    """Run both and lay them side by side, on `text` (token ids of the old vocabulary) or the probe. Raises GptkitError
    as `require_same_tokens`. `tokens`: the same tokens' ids before and after, where the vocabulary changed; `most`:
    tokens that a model is given at most; `layers`: those that stand for one another, by default each and its like,
    where there are as many.
    """
    require_same_tokens(before, after, tokens)
    say = progress or (lambda _: None)
    with closing(KeptStates()) as first, closing(KeptStates()) as second:
        both = _Both((before, after), Scope(before.spec, after.spec, tokens, most), text, (first, second))
        notes, positions, targets = both.notes, both.positions, both.targets
        pairs = _pairs(before.spec, after.spec, layers, notes)
        total = both.run(say)
        say("layer by layer")
        if len(both.rows) < len(positions):
            notes.append(f"by layer on {len(both.rows):,} of {len(positions):,} positions")
        by_layer = tuple(both.lens(*pair) for pair in pairs)
        say("component by component")
        tables = _relative(*(both.stream(side, TABLE) for side in range(2)))
        reason = _other_basis(before.spec, after.spec, tables)
        if reason is not None:
            notes.append(f"components were not run on the original's hidden states: {reason}")
        apart = {} if reason is not None or not pairs else {("embedding", None): tables or 0.0, **both.own(pairs)}
    return Damage(
        on=both.on,
        dtype=str(both.dtype).removeprefix("torch."),
        total=_bin(0, int(positions.max()), positions >= 0, total, targets),
        bins=tuple(_bin(*edges, both.within(edges), total, targets) for edges in both.edges),
        layers=by_layer,
        places=tuple(Place(*place, gap, not gap <= _FLOORS[both.dtype]) for place, gap in apart.items()),
        notes=tuple(notes),
    )


def _pairs(before: ModelSpec, after: ModelSpec, layers: _Pairs | None, notes: list[str]) -> _Pairs:
    """The layers that stand for one another."""
    counts = len(before.blocks), len(after.blocks)
    if layers is not None:
        for side, (count, of) in enumerate(zip(counts, ("the original's", "the other's"), strict=True)):
            alone = sorted(set(range(count)) - {pair[side] for pair in layers})
            if alone:
                notes.append(f"not compared: {of} layer{'s' if len(alone) > 1 else ''} {', '.join(map(str, alone))}")
        return layers
    if counts[0] != counts[1]:
        notes.append(f"not compared by layer: {counts[0]} layers before, {counts[1]} after")
        return []
    return [(layer, layer) for layer in range(counts[0])]


def _bin(first: int, last: int, here: Tensor, found: PositionComparison, targets: Tensor | None) -> DamageBin:
    lost = () if targets is None else (perplexity(found.before[here]), perplexity(found.after[here]))
    kl, top1 = found.kl[here].mean().item(), found.agree[here].double().mean().item()
    return DamageBin(first, last, int(here.sum()), kl, top1, *lost)


_INTO, TABLE = -1, -2  # the layers under which what goes into the first block is kept, and what the embedding gives
_BLOCK = "whole block"
"""What is called so is what a block adds to the stream."""


class _Both:
    """The two models; batches without padding, each named by its number, in the old vocabulary and in the new one; of
    each of their tokens (N in all) its position and what follows, where that is known; and the residual stream of each
    batch after each block, in files.
    """

    def __init__(
        self, trees: tuple[Tree, Tree], scope: Scope, text: Sequence[int] | None, kept: tuple[KeptStates, KeptStates]
    ) -> None:
        self.trees, self.tokens, self.kept = trees, scope.tokens, kept
        specs, self.notes = [tree.spec for tree in trees], list[str]()
        self.targets: Tensor | None = None
        deepest, widest = (max(each) for each in zip(*((len(x.blocks) + 1, x.hidden_size) for x in specs), strict=True))
        budget = max(2, min(_STREAM_BYTES // (8 * deepest * widest), _TEXT))
        windows = [] if text is None else scope.windows(text[: budget + 1])
        if windows:
            batches, self.targets = inputs(windows), scope.targets(windows)
            self.on = f"{len(self.targets):,} token{'s' if len(self.targets) > 1 else ''} of text"
        else:
            batches, taken = [], 0
            for batch in sorted(scope.probe(), key=lambda each: each.input_ids.numel()):
                if batch.attention_mask is None and (not batches or taken + batch.input_ids.numel() <= budget):
                    batches.append(batch)
                    taken += batch.input_ids.numel()
            self.on = f"{taken:,} tokens of the probe"
            self.notes.append("no perplexity, because the probe's tokens are random")
        self.batches = [replace(batch, name=str(number)) for number, batch in enumerate(batches)]
        self.renamed = [scope.renamed(batch) for batch in self.batches]
        shapes = [batch.input_ids.shape for batch in batches]
        self.positions = torch.cat([torch.arange(steps).repeat(rows) for rows, steps in shapes])
        last = int(self.positions.max())
        starts = [0] + [2**power for power in range(last.bit_length())]
        self.edges = [(a, b - 1) for a, b in zip(starts, [*starts[1:], last + 1], strict=True)]
        """The bins, each twice as wide as the one before: (first, last)."""
        self.dtype = torch.float64 if max(count(spec).total for spec in specs) <= SMALL else torch.float32
        self.ends = [_end(tree, self.dtype) for tree in trees]
        work = max(len(spec.blocks) * spec.vocab_size * spec.hidden_size for spec in specs)
        taken = min(len(self.positions), max(_LENS_WORK // work, len(self.edges)))
        self.rows = torch.linspace(0, len(self.positions) - 1, taken, dtype=torch.float64).round().long()
        """The positions that are looked at by layer."""

    def within(self, edges: tuple[int, int]) -> Tensor:
        """Which of the positions are in a bin."""
        return (self.positions >= edges[0]) & (self.positions <= edges[1])

    def run(self, say: Callable[[str], None]) -> PositionComparison:
        """Both as they are, their streams kept."""
        final, batches = [], (self.batches, self.renamed)
        for tree, kept, inputs_, name in zip(self.trees, self.kept, batches, ("original", "other"), strict=True):
            say(f"the {name}")

            def see(path: str, given: Tensor, made: Tensor, kept: KeptStates = kept) -> None:
                layer = TABLE if path == "embedding" else int(path.removeprefix("blocks."))
                if layer == 0:
                    kept[_running(), _INTO] = given.double()
                kept[_running(), layer] = made.double()

            blocks = [f"blocks.{layer}" for layer in range(len(tree.spec.blocks))]
            ends = states(tree, inputs_, self.dtype, see=see, seen=["embedding", *blocks])
            final.append(torch.cat([x.flatten(0, 1) for x in ends]))
        return compare_heads(*self.trees, (final[0], final[1]), tokens=self.tokens, targets=self.targets)

    def stream(self, side: int, layer: int) -> Tensor:
        """(N, hidden) of all batches in fp64, after a layer; (N, streams, hidden) of a model with several streams."""
        kept = (self.kept[side][n, layer] for n in range(len(self.batches)))
        return torch.cat([(each if each.ndim == 3 else each.movedim(0, 2)).flatten(0, 1) for each in kept])

    def ended(self, first: Tensor, second: Tensor, targets: Tensor | None = None) -> PositionComparison:
        """Each model's last norm and head on a stream, at `rows`."""
        with torch.inference_mode():
            a, b = (end(x[self.rows].to(self.dtype)) for end, x in zip(self.ends, (first, second), strict=True))
        return compare_heads(*self.trees, (a, b), tokens=self.tokens, targets=targets)

    def lens(self, before: int, after: int) -> LayerDamage:
        """What both models would say if they ended after these layers."""
        streams = self.stream(0, before), self.stream(1, after)
        targets = None if self.targets is None else self.targets[self.rows]
        found = self.ended(*streams, targets)
        whole = _bin(0, 0, torch.ones(len(self.rows), dtype=torch.bool), found, targets)
        inside = [self.within(edges)[self.rows] for edges in self.edges]
        by_bin = tuple(found.kl[here].mean().item() for here in inside)
        return LayerDamage(before, after, _relative(*streams), whole.kl, whole.top1, by_bin, whole.before, whole.after)

    def own(self, pairs: _Pairs) -> dict[tuple[str, int | None], float]:
        """How far each component of the other is off by itself: what it makes of the original's stream against what the
        original's own makes of it. The other runs with the input of each block exchanged for the original's.
        """
        squares: dict[str, tuple[float, float]] = {}
        specs = [tree.spec for tree in self.trees]
        parts = [part for a, b in pairs for part in _parts((specs[0].blocks[a], a), (specs[1].blocks[b], b))]
        paths = [[part.before for part in parts], [part.after for part in parts]]
        partner, named = {b: a for a, b in pairs}, dict(zip(paths[1], paths[0], strict=True))
        keys = {path: key for key, path in enumerate(paths[0])}

        def feed(layer: int) -> Tensor | None:
            return self.kept[0][_running(), partner[layer] - 1].to(self.dtype) if layer in partner else None

        with closing(KeptStates()) as made_before:

            def added(path: str, given: Tensor, made: Tensor) -> Tensor:
                """What a module adds to the stream, in fp64: a block's output has the stream in it."""
                return (made - given).double() if path.count(".") == 1 else made.double()

            def keep(path: str, given: Tensor, made: Tensor) -> None:
                made_before[_running(), keys[path]] = added(path, given, made)

            def hold(path: str, given: Tensor, made: Tensor) -> None:
                right = made_before[_running(), keys[named[path]]]
                size, gap = squares.get(path, (0.0, 0.0))
                difference = added(path, given, made) - right
                squares[path] = size + right.square().sum().item(), gap + difference.square().sum().item()

            states(self.trees[0], self.batches, self.dtype, see=keep, seen=paths[0])
            states(self.trees[1], self.renamed, self.dtype, see=hold, seen=paths[1], feed=feed)
        found: dict[tuple[str, int | None], float] = {}
        for part in parts:
            size, gap = (math.sqrt(each) for each in squares[part.after])
            found[part.label, part.layer] = gap / size if size else gap
        last = self.stream(0, len(self.trees[0].spec.blocks) - 1)
        ends = self.ended(last, last)
        return {**found, ("final norm and head", None): (ends.gap.max() / ends.largest.max()).item()}


@dataclass(frozen=True)
class _Slice:
    """Modules of two models whose outputs are compared, by their paths; `layer` is the changed model's."""

    label: str
    layer: int
    before: str
    after: str


def _parts(before: tuple[Block, int], after: tuple[Block, int]) -> Iterator[_Slice]:
    """The mixers of two blocks that stand for one another, in the order of computation, and then the whole blocks.

    Mixers of one slot are compared, whatever stands before them. Of the others the first is compared with the first,
    and so on: a swap may have put a recurrence in the place of an attention.
    """
    slots, others = ([sublayer.mixer.slot for sublayer in block.sublayers] for block, _ in (before, after))
    partners = {slot: slot for slot in others if slot in slots}
    alone = [[slot for slot in each if slot not in partners] for each in (others, slots)]
    partners |= dict(zip(*alone, strict=False))
    for slot in others:
        if slot in partners:
            paths = f"blocks.{before[1]}.{partners[slot]}", f"blocks.{after[1]}.{slot}"
            yield _Slice(slot.replace("_", "-"), after[1], *paths)
    yield _Slice(_BLOCK, after[1], f"blocks.{before[1]}", f"blocks.{after[1]}")


def _end(tree: Tree, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return what makes states that the head takes, (N, hidden), of the stream or streams behind a layer."""
    norm: Callable[[Tensor], Tensor] = final_norm(tree, dtype)
    if tree.spec.joined is None:
        return norm
    joined: Any = filled(partial(build_module, tree.spec.joined), partial(tensor_of, tree), dtype, "joined")
    return lambda x: norm(joined.join(x.movedim(1, 0)))


def _running() -> int:
    """The number of the batch whose pass this is."""
    return int(RUNNING.get().name)


def _relative(a: Tensor, b: Tensor) -> float | None:
    """The size of b - a over that of a, by root mean squares; None where they are not as wide."""
    if a.shape != b.shape:
        return None
    size, gap = (each.square().mean().sqrt().item() for each in (a, b - a))
    return gap / size if size else gap


def _other_basis(before: ModelSpec, after: ModelSpec, tables: float | None) -> str | None:
    """Why the streams of two trees cannot be compared number by number, by how far their embeddings are apart."""
    if tables is None:
        return f"the hidden sizes differ, {before.hidden_size} and {after.hidden_size}"
    counts = [1 if spec.streams is None else spec.streams.count for spec in (before, after)]
    if counts[0] != counts[1]:
        return f"the numbers of residual streams per token differ, {counts[0]} and {counts[1]}"
    if tables <= _SAME:
        return None
    norms = [{type(block.sublayers[0].norm) for block in spec.blocks} for spec in (before, after)]
    if norms[0] == norms[1] and not tables > _ALIKE:
        return None
    return f"the embeddings differ by {tables:.1e}, so the hidden states may use different bases"
