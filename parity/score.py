"""What the probe is worth: mistakes made on purpose, and whether the verdict's own rule would have seen each.

Of a large tree they are made in a small copy with random weights, since each takes a pass. Everything that a mistake
can be made in stays: each kind of layer, how a component rounds, windows, rotary scaling, eps, the dimension of a head,
and how heads share keys. Only layers, heads, tokens and widths are fewer (each record's `small`), so that the probe's
lengths and padding show on the copy what they show on the tree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

import torch
from msgspec.structs import replace
from torch import Tensor

from ..analysis.parameters import count
from ..components import Block, Component, Mixer, ModelSpec
from ..converter.checkpoint import Checkpoint
from ..modules import Decoder
from ..modules.load import load_checkpoint
from .compare import largest_gap
from .mutations import Weights, applicable
from .outputs import outputs_of
from .probe import AFFORDABLE, LONG, SMALL, TABLES, ProbeBatch, limits, longest


@dataclass(frozen=True)
class MistakeScore:
    """The mistakes that were tried, by name. caught: seen with the checkpoint's own weights. caught_random: only with
    random ones, since they change nothing on this checkpoint that rounding would not (eps behind large activations, q
    and k where one score is all). invisible: with no weights, on no input: they change nothing in this tree (a rotary
    scaling by one). missed: on an input that the probe should have. allowed: the difference in logits that rounding
    explains, above which a mistake counts as seen. small_copy: made on a small copy of the tree with random weights,
    since the model itself is too large.
    """

    caught: tuple[str, ...]
    caught_random: tuple[str, ...]
    missed: tuple[str, ...]
    allowed: float
    small_copy: bool = False
    invisible: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """How many change something."""
        return len(self.caught) + len(self.caught_random) + len(self.missed)


_CLEAR = 10.0
"""Times what rounding explains that a mistake has to make for a probe to be blamed for not having seen it."""
_SIZES = (1.0, 0.05, 0.002)
"""What the tables' random values are multiplied by, one after the other while a mistake is not seen: behind a large
stream (Gemma scales its embeddings up) no eps shows, and a small one is nearly all norms.
"""

_WIDTH = 64  # of the stream, where no attention says how wide it is to be
_TOKENS = 512
_QUIET = 0.05
"""The size of the tables' values: as in a trained model the stream starts so small that a wrong eps shows."""


def try_mistakes(
    source: Checkpoint, batches: Sequence[ProbeBatch], asked: bool, stream: bool, notes: list[str], up_to: int | None
) -> MistakeScore:
    """What the probe would have caught: in the model, or, of a large one unasked, in a small copy (a note says so)."""
    if not stream and (asked or count(source.spec).total <= SMALL):
        return score(source.spec, wide_weights(source), batches, unprobed(source.spec, batches), up_to)
    own = "" if stream else "; --mutations makes them in the model itself"
    notes.append(f"mistakes on purpose were made on a small copy of this tree with random weights{own}")
    copy = miniature(source.spec, max(batch.input_ids.shape[1] for batch in batches))
    narrow, beyond = narrow_batches(batches, copy), unprobed(source.spec, batches)
    return replaced(score(copy, random_weights(copy), narrow, beyond, up_to), small_copy=True)


def wide_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The parameters in fp64 by shared name."""
    model = load_checkpoint(checkpoint, torch.float64)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unprobed(spec: ModelSpec, batches: Sequence[ProbeBatch]) -> list[str]:
    """Mutations that only show beyond a length that the probe does not go to; a note says that it does not."""
    tokens = max(batch.input_ids.shape[1] for batch in batches)
    beyond = {limit.name for limit in limits(spec) if tokens <= limit.tokens}
    shows = {"window": "window ignored", "original context": "rope scaling dropped"}
    return [shows[name] for name in beyond]


def score(
    spec: ModelSpec,
    weights: Weights,
    batches: Sequence[ProbeBatch],
    unprobed: Sequence[str] = (),
    up_to: int | None = None,
) -> MistakeScore:
    """Make every mutation that applies to a tree with weights in fp64, and see whether the batches tell it from the
    original. What they do not is made with random weights too, and then on inputs that were made for this tree
    (`_plain_inputs`), whatever the probe looks like: only what shows there is missed. `unprobed` are mutations that the
    probe says it does not reach, which are not counted; `up_to` is the longest sequence that matters.
    """
    caught, unseen, allowed = _caught(spec, weights, batches, lambda name: name not in unprobed)
    by_chance, missed = _by_random(spec, weights, batches, unseen), list[str]()
    if len(by_chance) < len(unseen):
        rest = [name for name in unseen if name not in by_chance]
        missed = _by_random(spec, weights, _plain_inputs(spec, up_to), rest, _CLEAR)
    invisible = tuple(name for name in unseen if name not in (*by_chance, *missed))
    return MistakeScore(tuple(caught), tuple(by_chance), tuple(missed), allowed, invisible=invisible)


def _plain_inputs(spec: ModelSpec, up_to: int | None = None) -> list[ProbeBatch]:
    """Random tokens, as many as it takes to go past every window and original context that a probe does, and padded."""
    lengths = [LONG, *(limit.beyond for limit in limits(spec) if limit.tokens <= AFFORDABLE)]
    most = [length for length in (longest(spec), up_to) if length is not None]
    size = (2, min([max(lengths), *most]))
    ids = torch.randint(spec.vocab_size, size, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : ids.shape[1] // 2] = 0
    return [ProbeBatch("random tokens", ids), ProbeBatch("left padding", ids, mask)]


def _by_random(
    spec: ModelSpec, weights: Weights, batches: Sequence[ProbeBatch], names: Sequence[str], clear: float = 1.0
) -> list[str]:
    """Which of these mutations show with random weights of some size, by `clear` times what rounding explains."""
    generator, seen = torch.Generator().manual_seed(0), list[str]()
    random = {name: random_parameter(name, tensor, generator) for name, tensor in weights.items()}
    for size in _SIZES:
        unseen = [name for name in names if name not in seen]
        if unseen:
            sized = {name: tensor * size if name in TABLES else tensor for name, tensor in random.items()}
            seen += _caught(spec, sized, batches, unseen.__contains__, clear)[0]
    return [name for name in names if name in seen]


def _caught(
    spec: ModelSpec, weights: Weights, batches: Sequence[ProbeBatch], wanted: Callable[[str], bool], clear: float = 1.0
) -> tuple[list[str], list[str], float]:
    """The mutations that differ by more than rounding explains, `clear` times; the others; and what it explains."""
    exact = list(run_tree(spec, weights, batches))
    rounded = run_tree(spec, {name: tensor.float() for name, tensor in weights.items()}, batches)
    # The rule of the verdict: both sides' noise together, which here is twice the same.
    allowed = 2 * largest_gap(exact, rounded)
    enough, caught, unseen = clear * allowed, list[str](), list[str]()
    for mutation, mutant in applicable(spec, weights, wanted):
        gap = largest_gap(exact, run_tree(*mutant, batches), enough)
        (unseen if gap <= enough else caught).append(mutation.name)
    return caught, unseen, allowed


def random_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A parameter of trained-like size: fresh initialisation hides whole tensors (norms at 1, biases at 0)."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if tensor.ndim == 1:
        return 1 + 0.3 * noise if name.endswith(("norm.weight", "scale.weight")) else 0.3 * noise
    return noise if name in TABLES else noise / tensor.shape[1] ** 0.5


def run_tree(spec: ModelSpec, weights: Weights, batches: Sequence[ProbeBatch], masked: bool = True) -> Iterator[Tensor]:
    """The logits of real tokens, (N, V) a batch, of a tree with these weights; without `masked` padding is a text."""
    model = assigned(spec, weights)
    for batch in batches:
        with torch.inference_mode():
            given = batch if masked else replaced(batch, attention_mask=None)
            logits = batch.valid(outputs_of(model, given))
        yield logits


def assigned(spec: ModelSpec, weights: Weights) -> Decoder:
    """A tree as a module in eval mode, of these very tensors."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict(dict(weights), assign=True)
    return model.eval()


def miniature(spec: ModelSpec, tokens: int) -> ModelSpec:
    """The small copy, for rows of at most `tokens` tokens."""
    blocks = _layers(spec)
    mixers = [mixer for block in blocks if (mixer := block.mixer("attention")) is not None]
    square = not mixers or _written_from(mixers[0]) == spec.hidden_size
    few = [_written_from(mixer.small(mixer.hidden_size)) for mixer in mixers]
    width = max(few, default=min(spec.hidden_size, _WIDTH))
    copy = replace(spec, blocks=tuple(blocks)).small(width if square else min(width, 2 * _WIDTH) + 16)
    return _cut(copy, min(spec.vocab_size, _TOKENS), tokens, len(blocks))


def _cut(copy: ModelSpec, vocab: int, tokens: int, layers: int) -> ModelSpec:
    """The copy with tables of so many rows, and its encoder with them."""
    table, inputs, encoder = copy.positions, copy.layer_inputs, copy.encoder
    return replace(
        copy,
        embedding=replace(copy.embedding, vocab_size=vocab),
        head=None if copy.head is None else replace(copy.head, vocab_size=vocab),
        positions=None if table is None else replace(table, length=min(table.length, tokens + 1)),
        layer_inputs=None if inputs is None else inputs.sized(copy.hidden_size, inputs.width, layers, vocab),
        encoder=None if encoder is None else _cut(encoder, vocab, tokens, len(encoder.blocks)),
    )


def _layers(spec: ModelSpec) -> list[Block]:
    """Return two layers with the same mixers, in which one's tensors can be taken for the other's, and the first layer
    of every other kind. A scale or an eps of its own makes no kind (gpt2's scale by layer, RWKV's halved stream).
    """
    kinds: dict[Block, Block] = {}
    for block in spec.blocks:
        kinds.setdefault(_kind(block), block)
    slots = [tuple(each.mixer.slot for each in block.sublayers) for block in spec.blocks]
    repeated = next((each for each in slots if slots.count(each) > 1), None)
    first = [block for block, each in zip(spec.blocks, slots, strict=True) if repeated in (None, each)][:2]
    there = {_kind(block) for block in first}
    return first + [block for kind, block in kinds.items() if kind not in there]


def _kind(block: Block) -> Block:
    """Return a layer without what may differ between layers of one kind."""

    def plain(node: Component, _: str) -> Component:
        node = node.slips().get("scores not scaled", node)
        return replace(node, eps=1.0) if hasattr(node, "eps") else node

    kind: Block = block.mapped(plain)
    return kind


def _written_from(mixer: Mixer) -> int:
    """How wide that is from which a mixer writes the stream."""
    return next((each.shape[1] for each in mixer.weights().values() if each.role == "writes"), mixer.hidden_size)


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Its parameters in fp64, of the size that trained ones have."""
    generator = torch.Generator().manual_seed(0)
    empty = {each.name: torch.empty(each.shape, dtype=torch.float64) for each in spec.parameters()}
    drawn = {name: random_parameter(name, tensor, generator) for name, tensor in empty.items()}
    return {name: tensor * _QUIET if name in TABLES else tensor for name, tensor in drawn.items()}


def narrow_batches(batches: Sequence[ProbeBatch], spec: ModelSpec) -> list[ProbeBatch]:
    """The same probe over a smaller vocabulary: lengths, padding and repetitions as they are."""
    return [replaced(batch, input_ids=batch.input_ids % spec.vocab_size) for batch in batches]
