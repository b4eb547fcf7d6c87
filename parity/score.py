"""Count the deliberate mistakes that the probe of `verify` detects.

gptkit makes each mistake in the model, and checks whether the logits then differ by more than the verdict allows. Each
mistake takes a forward pass. So for a large model gptkit makes the mistakes in a small copy with random weights. The
copy has every kind of layer, and the same rounding, windows, rotary scaling, eps, head dimension and sharing of keys.
It has fewer layers, heads and tokens and smaller widths (see `Component.small`), so that the probe's lengths and
padding have the same effects.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

import torch
from msgspec.structs import replace
from torch import Tensor

from ..analysis.parameters import SMALL, count
from ..components import Block, Component, Mixer, ModelSpec
from ..converter.checkpoint import Checkpoint
from ..modules import Decoder
from ..modules.load import load_checkpoint
from .compare import largest_gap
from .mutations import Weights, applicable
from .outputs import outputs_of
from .probe import AFFORDABLE, LONG, TABLES, ProbeBatch, device_of_batches, limits, longest


@dataclass(frozen=True)
class MistakeScore:
    """The result of making deliberate mistakes: which of them the test inputs detect, and which they miss."""

    caught: tuple[str, ...]  # detected with the checkpoint's own weights
    caught_random: tuple[str, ...]  # detected only with random weights
    missed: tuple[str, ...]  # not detected, although other inputs show them
    allowed: float  # the difference of logits that rounding explains; a larger one counts as detected
    small_copy: bool = False  # whether they were made in a small copy with random weights
    invisible: tuple[str, ...] = ()  # mistakes that no weights and no input show in this model

    @property
    def tried(self) -> int:
        """Return the number of mistakes that some input shows, detected or not."""
        return len(self.caught) + len(self.caught_random) + len(self.missed)


_CLEAR = 10.0
"""A mistake counts as missed only if other inputs show a difference of this many times the allowed one."""
_SIZES = (1.0, 0.05, 0.002)
"""The factors of the tables' random values, tried in turn until a mistake shows. With a large residual stream (Gemma
scales its embeddings) a wrong eps does not show, and with a small one norms hide the rest.
"""

_WIDTH = 64  # the width of the residual stream, if no attention determines it
_TOKENS = 512
_QUIET = 0.05
"""The factor of the tables' values. As in a trained model, the residual stream starts so small that a wrong eps shows.
"""


def try_mistakes(
    source: Checkpoint, batches: Sequence[ProbeBatch], asked: bool, stream: bool, notes: list[str], up_to: int | None
) -> MistakeScore:
    """Make deliberate mistakes and return which of them the test inputs detect.

    The mistakes are made in the model itself if it is small, or if `asked` is true. Otherwise, and always with
    `stream`, they are made in a small copy.

    Args:
        source: the model.
        batches: the test inputs (the probe), on the device that computes.
        asked: whether the user asked for mistakes in the model itself.
        stream: whether the model runs one layer at a time.
        notes: notes for the user, to which this function adds.
        up_to: the longest sequence that the user cares about, in tokens. Mistakes that show only beyond
            it do not count.
    """
    if not stream and (asked or count(source.spec).total <= SMALL):
        weights = wide_weights(source, device_of_batches(batches))
        return score(source.spec, weights, batches, unprobed(source.spec, batches), up_to)
    hint = "" if stream else "; --mutations makes them in the model itself"
    notes.append(f"the mistakes were made on purpose in a small copy of the model with random weights{hint}")
    copy = miniature(source.spec, max(batch.input_ids.shape[1] for batch in batches))
    batches_of_copy, beyond = narrow_batches(batches, copy), unprobed(source.spec, batches)
    weights = random_weights(copy, device_of_batches(batches))
    return replaced(score(copy, weights, batches_of_copy, beyond, up_to), small_copy=True)


def wide_weights(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return all parameters of a checkpoint in fp64 on a device, by gptkit's parameter names."""
    model = load_checkpoint(checkpoint, torch.float64, device=device)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unprobed(spec: ModelSpec, batches: Sequence[ProbeBatch]) -> list[str]:
    """Return the names of the mistakes that would only show on longer sequences than these batches have."""
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
    """Make every applicable mistake in a model, and check whether the test inputs detect it.

    Mistakes that they do not detect are made again with random weights: first on the same inputs, and then on other
    inputs that suit the model (`_plain_inputs`). A mistake counts as missed if only those other inputs show it.

    Args:
        spec: the model's component tree.
        weights: its weights in fp64.
        batches: the test inputs (the probe), on the device of the weights.
        unprobed: the names of mistakes that are not made.
        up_to: the longest sequence that the user cares about, in tokens. Mistakes that show only beyond
            it do not count.
    """
    caught, unseen, allowed = _caught(spec, weights, batches, lambda name: name not in unprobed)
    by_chance, missed = _by_random(spec, weights, batches, unseen), list[str]()
    if len(by_chance) < len(unseen):
        remaining = [name for name in unseen if name not in by_chance]
        plain = [batch.to(device_of_batches(batches)) for batch in _plain_inputs(spec, up_to)]
        missed = _by_random(spec, weights, plain, remaining, _CLEAR)
    invisible = tuple(name for name in unseen if name not in (*by_chance, *missed))
    return MistakeScore(tuple(caught), tuple(by_chance), tuple(missed), allowed, invisible=invisible)


def _plain_inputs(spec: ModelSpec, up_to: int | None = None) -> list[ProbeBatch]:
    """Return random tokens, with and without padding.

    The sequences are longer than the model's attention windows and the original context of scaled RoPE. Windows and
    contexts of more than `AFFORDABLE` tokens are left out.
    """
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
    """Give the model random weights, and return the names of the mistakes that these batches then detect.

    Several sizes of the embedding's values are tried.

    Args:
        spec: the model's component tree.
        weights: its weights. The random ones have the same names and shapes.
        batches: the test inputs.
        names: the names of the mistakes to make.
        clear: a mistake is detected if it changes the logits by more than this number times the rounding.
    """
    generator, seen = torch.Generator().manual_seed(0), list[str]()
    random = {name: random_parameter(name, tensor, generator) for name, tensor in weights.items()}
    for size in _SIZES:
        remaining = [name for name in names if name not in seen]
        if remaining:
            sized = {name: tensor * size if name in TABLES else tensor for name, tensor in random.items()}
            seen += _caught(spec, sized, batches, remaining.__contains__, clear)[0]
    return [name for name in names if name in seen]


def _caught(
    spec: ModelSpec, weights: Weights, batches: Sequence[ProbeBatch], wanted: Callable[[str], bool], clear: float = 1.0
) -> tuple[list[str], list[str], float]:
    """Make mistakes in a model, and check which of them change its logits by more than `clear` times the rounding.

    `wanted` selects mistakes by name.

    Returns:
        The names of the mistakes that do, the names of those that do not, and the difference of logits that rounding
        explains.
    """
    exact = list(run_tree(spec, weights, batches))
    rounded = run_tree(spec, {name: tensor.float() for name, tensor in weights.items()}, batches)
    # The rule of the verdict allows the noise of both sides, which are the same here.
    allowed = 2 * largest_gap(exact, rounded)
    threshold, caught, unseen = clear * allowed, list[str](), list[str]()
    for mutation, mutant in applicable(spec, weights, wanted):
        gap = largest_gap(exact, run_tree(*mutant, batches), threshold)
        (unseen if gap <= threshold else caught).append(mutation.name)
    return caught, unseen, allowed


def random_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random values for a parameter, about as large as in trained models.

    The usual initial values of norms (1) and biases (0) would hide mistakes.
    """
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if tensor.ndim == 1:
        return 1 + 0.3 * noise if name.endswith(("norm.weight", "scale.weight")) else 0.3 * noise
    return noise if name in TABLES else noise / tensor.shape[1] ** 0.5


def run_tree(spec: ModelSpec, weights: Weights, batches: Sequence[ProbeBatch], masked: bool = True) -> Iterator[Tensor]:
    """Run a model with these weights, and yield its logits at tokens without padding, (N, V) per batch, on the CPU.

    With `masked=False` the model gets no attention mask, so it attends to padding.
    """
    model = assigned(spec, weights)
    for batch in batches:
        with torch.inference_mode():
            input_ = batch if masked else replaced(batch, attention_mask=None)
            logits = batch.valid(outputs_of(model, input_)).cpu()
        yield logits


def assigned(spec: ModelSpec, weights: Weights) -> Decoder:
    """Return the model as a torch module in eval mode. Its parameters are the given tensors, without a copy."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.load_state_dict(dict(weights), assign=True)
    return model.eval()


def miniature(spec: ModelSpec, tokens: int) -> ModelSpec:
    """Return the component tree of a small copy of a model, for sequences of at most `tokens` tokens."""
    blocks = _layers(spec)
    mixers = [mixer for block in blocks if (mixer := block.mixer("attention")) is not None]
    square = not mixers or _written_from(mixers[0]) == spec.hidden_size
    widths = [_written_from(mixer.small(mixer.hidden_size)) for mixer in mixers]
    width = max(widths, default=min(spec.hidden_size, _WIDTH))
    copy = replace(spec, blocks=tuple(blocks)).small(width if square else min(width, 2 * _WIDTH) + 16)
    return _cut(copy, min(spec.vocab_size, _TOKENS), tokens, len(blocks))


def _cut(copy: ModelSpec, vocab: int, tokens: int, layers: int) -> ModelSpec:
    """Return a model with a smaller vocabulary, position table and other tables that depend on the number of layers.

    The encoder is cut too, if the model has one.

    Args:
        copy: the model's component tree.
        vocab: the new vocabulary size.
        tokens: the longest sequence, in tokens.
        layers: the number of layers.
    """
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
    """Return the layers of the small copy: two with the same mixers, and one of every other kind.

    The first two allow the mistake that exchanges tensors between layers. Layers that differ only in scale or eps are
    of one kind, for example those of GPT-2 with a scale that depends on the layer.
    """
    kinds: dict[Block, Block] = {}
    for block in spec.blocks:
        kinds.setdefault(_kind(block), block)
    slots = [tuple(sublayer.mixer.slot for sublayer in block.sublayers) for block in spec.blocks]
    repeated = next((names for names in slots if slots.count(names) > 1), None)
    first = [block for block, names in zip(spec.blocks, slots, strict=True) if repeated in (None, names)][:2]
    kinds_of_first = {_kind(block) for block in first}
    return first + [block for kind, block in kinds.items() if kind not in kinds_of_first]


def _kind(block: Block) -> Block:
    """Return a layer with standard values in the fields that may differ between layers of one kind: scale and eps."""

    def plain(node: Component, _: str) -> Component:
        node = node.slips().get("scores not scaled", node)
        return replace(node, eps=1.0) if hasattr(node, "eps") else node

    kind: Block = block.mapped(plain)
    return kind


def _written_from(mixer: Mixer) -> int:
    """Return the input width of a mixer's output projection."""
    return next((weight.shape[1] for weight in mixer.weights().values() if weight.role == "writes"), mixer.hidden_size)


def random_weights(spec: ModelSpec, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return random parameters in fp64 on a device, about as large as in trained models.

    The values do not depend on the device.
    """
    generator = torch.Generator().manual_seed(0)
    empty = {parameter.name: torch.empty(parameter.shape, dtype=torch.float64) for parameter in spec.parameters()}
    drawn = {name: random_parameter(name, tensor, generator) for name, tensor in empty.items()}
    return {name: (tensor * _QUIET if name in TABLES else tensor).to(device) for name, tensor in drawn.items()}


def narrow_batches(batches: Sequence[ProbeBatch], spec: ModelSpec) -> list[ProbeBatch]:
    """Return the batches with their token ids reduced modulo the vocabulary size of `spec`."""
    return [replaced(batch, input_ids=batch.input_ids % spec.vocab_size) for batch in batches]
