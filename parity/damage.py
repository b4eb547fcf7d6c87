"""Report how much a changed model differs from its original: by position, by layer and by component.

- By position: KL divergence and perplexity of the next token.
- By layer: the difference of the residual streams, and of the predictions that both models would make if they ended at
  this layer (the logit lens, nostalgebraist 2020).
- By component: each component of the changed model gets the original's hidden states as input, so that differences of
  earlier layers do not count. This needs the same basis of the hidden states in both models, which gptkit checks by
  comparing the embeddings.

Both models read some rows of a weight at a time (see `rows`), and the hidden states are stored in temporary files.
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

from ..analysis.parameters import SMALL, count
from ..components import Block, ModelSpec
from ..converter.weights import Tree
from ..modules.load import filled, tensor_of
from ..modules.registry import build_module
from .bisect import KeptStates
from .compare import PositionComparison, compare_heads, perplexity, require_same_tokens
from .probe import RUNNING, Scope, Tokens, inputs
from .rows import final_norm, states

_TEXT = 2048  # the largest number of tokens of the text that are used
_STREAM_BYTES = 2**28  # the space for one model's hidden states in the temporary folder
_LENS_WORK = 5 * 10**11
"""The multiplications that a model's heads may use for all layers. Where more would be needed, gptkit uses evenly
spaced positions.
"""
_SAME = 1e-6  # relative difference of embeddings up to which they are the same
_ALIKE = 0.25
"""The relative difference of embeddings up to which models with the same norms have the same basis (for example, if one
embedding was rounded or refitted).
"""
_FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""By dtype, the relative difference that rounding may cause in one component."""

_Pairs = Sequence[tuple[int, int]]  # corresponding layers (before, after)


@dataclass(frozen=True)
class DamageBin:
    """The comparison of both models' predictions at positions `first` to `last`, counted from 0."""

    first: int
    last: int
    positions: int  # the number of compared tokens at these positions, over all sequences
    kl: float  # mean KL(before ‖ after) in nats per token
    top1: float  # the share of positions with the same most likely token
    before: float | None = None  # the original's perplexity; None if the input is not text
    after: float | None = None  # the changed model's perplexity

    @property
    def name(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}–{self.last:,}"


@dataclass(frozen=True)
class LayerDamage:
    """The comparison of one layer of the original with the corresponding layer of the changed model.

    KL, top-1 agreement and perplexity are those of the predictions that the models would make if they ended there.
    """

    before: int  # the original's layer
    after: int  # the changed model's layer
    stream: float | None  # the relative difference (RMS) of the residual streams; None if their widths differ
    kl: float  # mean KL in nats per token
    top1: float  # the share of positions with the same most likely token
    by_bin: tuple[float, ...]  # the KL by range of positions
    perplexity_before: float | None = None  # None if the input is not text
    perplexity_after: float | None = None


@dataclass(frozen=True)
class Place:
    """A component of the changed model, and how much its output differs if its input is the
    original's hidden states.
    """

    label: str
    layer: int | None  # the layer of the changed model; None outside of layers
    relative: float  # the difference relative to the original's output (root mean squares)
    differs: bool  # whether the difference is larger than rounding

    @property
    def name(self) -> str:
        return self.label if self.layer is None else f"layer {self.layer} {self.label}"


@dataclass(frozen=True)
class Damage:
    """The full comparison of a changed model with its original."""

    on: str  # the inputs, in words
    dtype: str  # the dtype in which both models computed
    total: DamageBin  # the comparison over all positions
    bins: tuple[DamageBin, ...]  # the comparison by range of positions
    layers: tuple[LayerDamage, ...]  # one item per pair of corresponding layers
    places: tuple[Place, ...]  # all components in the order of computation; empty if they cannot be compared
    notes: tuple[str, ...]  # the reasons for missing parts and reduced samples

    @property
    def born(self) -> Place | None:
        """Return the component whose own output differs most, or None if no output differs.

        Only mixers and the head are considered, not whole blocks.
        """
        parts = [place for place in self.places if place.differs and place.label != _BLOCK]
        return max(parts, key=lambda place: math.inf if math.isnan(place.relative) else place.relative, default=None)

    @property
    def first(self) -> Place | None:
        """Return the first component whose own output differs (see `Place`), or None."""
        return next((place for place in self.places if place.differs), None)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; NaN and infinity become null, because JSON cannot represent them."""
        born, first = (None if place is None else place.name for place in (self.born, self.first))
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {**values, "first": first, "most": born}


def damage(
    before: Tree,
    after: Tree,
    *,
    text: Sequence[int] | None = None,
    tokens: Tokens | None = None,
    most: int | None = None,
    layers: _Pairs | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Damage:
    """Run the original and the changed model on a text or on test inputs, and compare them.

    Args:
        before: the original.
        after: the changed model.
        text: token ids of the original's vocabulary; None for the test inputs of `verify` (the probe).
        tokens: the tokens that both vocabularies have: their ids in the original's, and in the same order their ids in
            the changed model's. By default all tokens, if both sizes are equal.
        most: the largest number of tokens per sequence.
        layers: pairs of corresponding layers; by default those with equal numbers, if both models have as many.
        device: the device that computes.
        progress: called with the name of each step.

    Raises:
        GptkitError: the vocabularies have different sizes, and `tokens` is not given.
    """
    require_same_tokens(before, after, tokens)
    say = progress or (lambda _: None)
    with closing(KeptStates()) as first, closing(KeptStates()) as second:
        both = _Both((before, after), Scope(before.spec, after.spec, tokens, most), text, (first, second), device)
        notes, positions, targets = both.notes, both.positions, both.targets
        pairs = _pairs(before.spec, after.spec, layers, notes)
        total = both.run(say)
        say("layer by layer")
        if len(both.rows) < len(positions):
            notes.append(f"the damage by layer was measured on {len(both.rows):,} of {len(positions):,} positions")
        by_layer = tuple(both.lens(*pair) for pair in pairs)
        say("component by component")
        tables = _relative(*(both.stream(side, TABLE) for side in range(2)))
        reason = _other_basis(before.spec, after.spec, tables)
        if reason is not None:
            notes.append(f"components were not run on the original's hidden states: {reason}")
        differences = {} if reason is not None or not pairs else {("embedding", None): tables or 0.0, **both.own(pairs)}
    return Damage(
        on=both.on,
        dtype=str(both.dtype).removeprefix("torch."),
        total=_bin(0, int(positions.max()), positions >= 0, total, targets),
        bins=tuple(_bin(*edges, both.within(edges), total, targets) for edges in both.edges),
        layers=by_layer,
        places=tuple(Place(*place, gap, not gap <= _FLOORS[both.dtype]) for place, gap in differences.items()),
        notes=tuple(notes),
    )


def _pairs(before: ModelSpec, after: ModelSpec, layers: _Pairs | None, notes: list[str]) -> _Pairs:
    """Return the pairs of corresponding layers. For layers without a counterpart, append a message to `notes`."""
    counts = len(before.blocks), len(after.blocks)
    if layers is not None:
        for side, (count, owner) in enumerate(zip(counts, ("the original's", "the other's"), strict=True)):
            unpaired = sorted(set(range(count)) - {pair[side] for pair in layers})
            if unpaired:
                notes.append(
                    f"not compared: {owner} layer{'s' if len(unpaired) > 1 else ''} {', '.join(map(str, unpaired))}"
                )
        return layers
    if counts[0] != counts[1]:
        notes.append(f"not compared by layer: {counts[0]} layers before, {counts[1]} after")
        return []
    return [(layer, layer) for layer in range(counts[0])]


def _bin(first: int, last: int, here: Tensor, comparison: PositionComparison, targets: Tensor | None) -> DamageBin:
    """Return the comparison at the positions for which the boolean tensor `here` is true.

    Args:
        first: the first position, for the record.
        last: the last position, for the record.
        here: the compared positions, (N,).
        comparison: the comparison at all N positions.
        targets: the true next tokens; None if the input is not text, so that there is no perplexity.
    """
    perplexities = () if targets is None else (perplexity(comparison.before[here]), perplexity(comparison.after[here]))
    kl, top1 = comparison.kl[here].mean().item(), comparison.agree[here].double().mean().item()
    return DamageBin(first, last, int(here.sum()), kl, top1, *perplexities)


_INTO, TABLE = -1, -2  # the layer numbers for the input of the first block and the output of the embedding
_BLOCK = "whole block"
"""The label of the output that a whole block adds to the residual stream."""


class _Both:
    """The original and the changed model, their input batches, and files with their hidden states after each block.

    The batches have no padding. Each has a version for the original's vocabulary and one for the changed model's.
    """

    def __init__(
        self,
        trees: tuple[Tree, Tree],
        scope: Scope,
        text: Sequence[int] | None,
        stored: tuple[KeptStates, KeptStates],
        device: torch.device | str,
    ) -> None:
        self.trees, self.tokens, self.stored, self.device = trees, scope.tokens, stored, torch.device(device)
        specs, self.notes = [tree.spec for tree in trees], list[str]()
        self.targets: Tensor | None = None
        shapes = ((len(spec.blocks) + 1, spec.hidden_size) for spec in specs)
        deepest, widest = (max(sizes) for sizes in zip(*shapes, strict=True))
        budget = max(2, min(_STREAM_BYTES // (8 * deepest * widest), _TEXT))
        windows = [] if text is None else scope.windows(text[: budget + 1])
        if windows:
            batches, self.targets = inputs(windows), scope.targets(windows)
            self.on = f"{len(self.targets):,} token{'s' if len(self.targets) > 1 else ''} of text"
        else:
            batches, tokens_used = [], 0
            for batch in sorted(scope.probe(), key=lambda batch: batch.input_ids.numel()):
                if batch.attention_mask is None and (not batches or tokens_used + batch.input_ids.numel() <= budget):
                    batches.append(batch)
                    tokens_used += batch.input_ids.numel()
            self.on = f"{tokens_used:,} tokens of the probe"
            self.notes.append("no perplexity, because the probe's tokens are random")
        numbered = [replace(batch, name=str(number)) for number, batch in enumerate(batches)]
        self.batches = [batch.to(self.device) for batch in numbered]
        self.renamed = [scope.renamed(batch).to(self.device) for batch in numbered]
        sizes = [batch.input_ids.shape for batch in batches]
        self.positions = torch.cat([torch.arange(steps).repeat(rows) for rows, steps in sizes])
        last = int(self.positions.max())
        starts = [0] + [2**power for power in range(last.bit_length())]
        self.edges = [(a, b - 1) for a, b in zip(starts, [*starts[1:], last + 1], strict=True)]
        """The bins as (first, last). The width doubles from one bin to the next."""
        self.dtype = torch.float64 if max(count(spec).total for spec in specs) <= SMALL else torch.float32
        self.ends = [_end(tree, self.dtype, self.device) for tree in trees]
        work = max(len(spec.blocks) * spec.vocab_size * spec.hidden_size for spec in specs)
        row_count = min(len(self.positions), max(_LENS_WORK // work, len(self.edges)))
        self.rows = torch.linspace(0, len(self.positions) - 1, row_count, dtype=torch.float64).round().long()
        """The positions that are compared by layer."""

    def within(self, edges: tuple[int, int]) -> Tensor:
        """Return a mask of the positions from the first to the last of `edges` (both included)."""
        return (self.positions >= edges[0]) & (self.positions <= edges[1])

    def run(self, say: Callable[[str], None]) -> PositionComparison:
        """Run both models, store their hidden states after each block, and compare the logits.

        `say` is called with the name of each step.
        """
        final, batches = [], (self.batches, self.renamed)
        for tree, stored, inputs_, name in zip(self.trees, self.stored, batches, ("original", "other"), strict=True):
            say(f"the {name}")

            def see(path: str, input_: Tensor, output: Tensor, stored: KeptStates = stored) -> None:
                layer = TABLE if path == "embedding" else int(path.removeprefix("blocks."))
                if layer == 0:
                    stored[_running(), _INTO] = input_.double()
                stored[_running(), layer] = output.double()

            blocks = [f"blocks.{layer}" for layer in range(len(tree.spec.blocks))]
            ends = states(tree, inputs_, self.dtype, see=see, seen=["embedding", *blocks])
            final.append(torch.cat([x.flatten(0, 1) for x in ends]))
        return compare_heads(*self.trees, (final[0], final[1]), tokens=self.tokens, targets=self.targets)

    def stream(self, side: int, layer: int) -> Tensor:
        """Return the residual stream after a layer of the original (`side` 0) or the changed model (1).

        Its shape is (N, hidden) over all batches, or (N, streams, hidden) for a model with several streams; fp64.
        """
        outputs = (self.stored[side][n, layer] for n in range(len(self.batches)))
        return torch.cat([(output if output.ndim == 3 else output.movedim(0, 2)).flatten(0, 1) for output in outputs])

    def ended(self, first: Tensor, second: Tensor, targets: Tensor | None = None) -> PositionComparison:
        """Compare the logits of both models if their hidden states after the last layer were `first` and `second`.

        Each model applies its own last norm and head. Only the positions in `self.rows` are compared.
        """
        with torch.inference_mode():
            streams = (x[self.rows].to(self.device, self.dtype) for x in (first, second))
            a, b = (end(stream) for end, stream in zip(self.ends, streams, strict=True))
        return compare_heads(*self.trees, (a, b), tokens=self.tokens, targets=targets)

    def lens(self, before: int, after: int) -> LayerDamage:
        """Compare the predictions that both models would make if they ended after these layers (the logit lens).

        `before` is the layer of the original, and `after` the corresponding layer of the changed model.
        """
        streams = self.stream(0, before), self.stream(1, after)
        targets = None if self.targets is None else self.targets[self.rows]
        comparison = self.ended(*streams, targets)
        whole = _bin(0, 0, torch.ones(len(self.rows), dtype=torch.bool), comparison, targets)
        inside = [self.within(edges)[self.rows] for edges in self.edges]
        by_bin = tuple(comparison.kl[here].mean().item() for here in inside)
        return LayerDamage(before, after, _relative(*streams), whole.kl, whole.top1, by_bin, whole.before, whole.after)

    def own(self, pairs: _Pairs) -> dict[tuple[str, int | None], float]:
        """Return how much the output of each component differs by itself, by label and layer.

        The value is the difference relative to the original's output. The changed model gets the original's hidden
        states as the input of each block, so differences of earlier blocks do not count.
        """
        squares: dict[str, tuple[float, float]] = {}
        specs = [tree.spec for tree in self.trees]
        parts = [part for a, b in pairs for part in _parts((specs[0].blocks[a], a), (specs[1].blocks[b], b))]
        paths = [[part.before for part in parts], [part.after for part in parts]]
        partner, original_of = {b: a for a, b in pairs}, dict(zip(paths[1], paths[0], strict=True))
        keys = {path: key for key, path in enumerate(paths[0])}

        def feed(layer: int) -> Tensor | None:
            if layer not in partner:
                return None
            return self.stored[0][_running(), partner[layer] - 1].to(self.device, self.dtype)

        with closing(KeptStates()) as original_outputs:

            def added(path: str, input_: Tensor, output: Tensor) -> Tensor:
                """Return what a module adds to the residual stream. A block's output includes its input, which is
                subtracted.
                """
                return (output - input_ if path.count(".") == 1 else output).double().cpu()

            def store_output(path: str, input_: Tensor, output: Tensor) -> None:
                original_outputs[_running(), keys[path]] = added(path, input_, output)

            def compare_output(path: str, input_: Tensor, output: Tensor) -> None:
                expected = original_outputs[_running(), keys[original_of[path]]]
                size, gap = squares.get(path, (0.0, 0.0))
                difference = added(path, input_, output) - expected
                squares[path] = size + expected.square().sum().item(), gap + difference.square().sum().item()

            states(self.trees[0], self.batches, self.dtype, see=store_output, seen=paths[0])
            states(self.trees[1], self.renamed, self.dtype, see=compare_output, seen=paths[1], feed=feed)
        differences: dict[tuple[str, int | None], float] = {}
        for part in parts:
            size, gap = (math.sqrt(square) for square in squares[part.after])
            differences[part.label, part.layer] = gap / size if size else gap
        final_stream = self.stream(0, len(self.trees[0].spec.blocks) - 1)
        ends = self.ended(final_stream, final_stream)
        return {**differences, ("final norm and head", None): (ends.gap.max() / ends.largest.max()).item()}


@dataclass(frozen=True)
class _Slice:
    """Two corresponding modules, one of each model, whose outputs are compared."""

    label: str
    layer: int  # the layer of the changed model
    before: str  # the module's path in the original
    after: str  # the module's path in the changed model


def _parts(before: tuple[Block, int], after: tuple[Block, int]) -> Iterator[_Slice]:
    """Yield the pairs of mixers of two corresponding blocks in the order of computation, and then the two blocks.

    Mixers of the same name ("attention", "feed_forward") form a pair. The remaining ones are paired in order, because a
    swap may replace an attention by a recurrence. `before` and `after` are blocks with their layer numbers.
    """
    slots, changed_slots = ([sublayer.mixer.slot for sublayer in block.sublayers] for block, _ in (before, after))
    partners = {slot: slot for slot in changed_slots if slot in slots}
    unpaired = [[slot for slot in names if slot not in partners] for names in (changed_slots, slots)]
    partners |= dict(zip(*unpaired, strict=False))
    for slot in changed_slots:
        if slot in partners:
            paths = f"blocks.{before[1]}.{partners[slot]}", f"blocks.{after[1]}.{slot}"
            yield _Slice(slot.replace("_", "-"), after[1], *paths)
    yield _Slice(_BLOCK, after[1], f"blocks.{before[1]}", f"blocks.{after[1]}")


def _end(tree: Tree, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that maps the residual stream after the last layer to the input of the head, (N, hidden).

    It applies the last norm. If the model has several residual streams, it joins them first.
    """
    norm: Callable[[Tensor], Tensor] = final_norm(tree, dtype, device)
    if tree.spec.joined is None:
        return norm
    joined: Any = filled(partial(build_module, tree.spec.joined), partial(tensor_of, tree), dtype, "joined", device)
    return lambda x: norm(joined.join(x.movedim(1, 0)))


def _running() -> int:
    """Return the number of the batch whose forward pass is running."""
    return int(RUNNING.get().name)


def _relative(a: Tensor, b: Tensor) -> float | None:
    """Return the root mean square of b - a, divided by that of a; None if their shapes differ."""
    if a.shape != b.shape:
        return None
    size, gap = (values.square().mean().sqrt().item() for values in (a, b - a))
    return gap / size if size else gap


def _other_basis(before: ModelSpec, after: ModelSpec, tables: float | None) -> str | None:
    """Return the reason why two models' hidden states cannot be compared element by element; None if they can.

    `tables` is the relative difference of their embeddings, or None if the hidden sizes differ.
    """
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
