"""A text that swaps are fitted on: its token ids, and the activations that they give, a layer at a time.

A calibrated swap sees what its own layers see: `Calibration.walk` runs the text through a tree, one layer's weights in
memory, and hands out every layer with its input. A text has three parts. Swaps are fitted on the first, the second
decides between fits (on how much of the first, or a cheaper form), and on the last it is measured what a swap costs.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...components import ModelSpec
from ...converter.checkpoint import Checkpoint
from ...converter.tokenizer import load_tokenizer
from ...errors import InvalidInput, UsageError
from ...modules.context import Context
from ...modules.decoder import BlockModule, Front
from ...modules.load import filled, tensor_of
from ...parity.passes import hooked
from ..base import Exactly, Model, Promise

_Run = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
TOKENS = 2048  # tokens that are fitted on at least, unless a number is given; a longer text allows MOST
MOST = 32_768  # tokens that are fitted on at most, unless a number is given
_HELD_OUT = 2048  # tokens at the end of the text that a swap is measured on, at most
_CHOOSING = 4096  # tokens before them that decide between fits, at most
_WINDOW = 512  # tokens a row, where the model takes as many
_READ_BYTES = 16 * 2**20  # more of a file is not read: it would not be used
PLAY = Path(__file__).parents[2] / "samples" / "play.txt"
"""A tenth of the text that the samples come from, which they were not trained on."""


@dataclass(frozen=True)
class Text:
    """Token ids of a text: swaps are fitted on `fitted`, `choosing` decides between fits, and `held_out` measures the
    one that was taken.
    """

    fitted: tuple[int, ...]
    held_out: tuple[int, ...]
    name: str
    sha256: str
    choosing: tuple[int, ...] = ()

    def renamed(self, promise: Promise) -> Text:
        """In the vocabulary after a swap that renumbers it; tokens that were dropped are left out."""
        if promise.tokens is None:
            return self
        table = dict(zip(*promise.tokens, strict=True))
        parts = (tuple(table[i] for i in ids if i in table) for ids in (self.fitted, self.held_out, self.choosing))
        fitted, held_out, choosing = parts
        return replace(self, fitted=fitted, held_out=held_out, choosing=choosing)

    def cut(self, tokens: int | None) -> Text:
        """Return the same text with the first `tokens` to be fitted on, or all of them."""
        return replace(self, fitted=self.fitted[:tokens])


class NoText(UsageError):
    """No text was given, and the checkpoint is not a sample, which has one of its own."""


def read_text(
    checkpoint: Checkpoint, file: str | Path | None, tokens: int | None = TOKENS, held_out: int = _HELD_OUT
) -> Text:
    """Read the text for a checkpoint: a file, or the bundled play where the checkpoint comes from a sample.

    Args:
        checkpoint: what has the tokenizer.
        file: plain text in UTF-8.
        tokens: the number of tokens to fit on. None: as many as leave enough for choosing and measuring, from `TOKENS`
            to `MOST`.
        held_out: the number of tokens to measure on, at most.

    Raises:
        NoText: there is no file, and the checkpoint does not come from a sample.
        UsageError: there is no tokenizer, or the text is too short.
        InvalidInput: the file cannot be read as UTF-8 text.
        MissingComponent: the model predicts no next token, by which fits are measured.
    """
    checkpoint.spec.predicts("a fit on a text")
    checkpoint.spec.one_stack("fitting a swap on a text")
    if file is None:
        reference = checkpoint.origin.reference or ""
        if not reference.startswith("sample:"):
            hint = (
                "Give --calibrate FILE, a file with some pages of plain text like the model's input, or use "
                "--approximate."
            )
            raise NoText("this swap needs a text to fit on", hint)
        path, name = PLAY, "the bundled play"
    else:
        path, name = Path(file), str(file)
    try:
        with path.open("rb") as opened:
            data = opened.read(_READ_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    try:
        # A file that is cut may end within a character, which then waits for the rest.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _READ_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not a UTF-8 text: byte {error.start:,} is invalid") from error
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.texts)
    if tokenizer is None:
        raise UsageError(f"{checkpoint.reference} has no tokenizer, which is needed to read {name}")
    ids = [token for token in tokenizer.encode(text) if token < checkpoint.spec.vocab_size]
    if tokens is None:
        tokens = min(max(len(ids) - _CHOOSING - _HELD_OUT, TOKENS), MOST)
    held = max(tokens // 8, 1)
    if len(ids) < tokens + held:
        enough = max(min(len(ids) * 8 // 9, len(ids) - 1), 0)
        raise UsageError(
            (
                f"{name} is too short: {len(ids):,} tokens, {tokens:,} are needed for the fit and {held:,} "
                "for the measurement"
            ),
            "Give a longer text" + (f", or fit on fewer tokens: --calibrate-tokens {enough}" if enough else "."),
        )
    deciding = min(_CHOOSING, (len(ids) - tokens) // 2)
    held = min(held_out, len(ids) - tokens - deciding)
    digest = hashlib.sha256(data).hexdigest()
    choosing = tuple(ids[len(ids) - held - deciding : len(ids) - held])
    return Text(tuple(ids[:tokens]), tuple(ids[-held:]), name, digest, choosing)


class Calibration:
    """What a swap may draw on: token ids (rows, tokens) and the activations that they give in a tree."""

    def __init__(self, text: Text, spec: ModelSpec, most: int = _WINDOW) -> None:
        self.text, self.spec = text, spec
        table = None if spec.positions is None else spec.positions.length
        width = min(each for each in (most, table, spec.context_length, len(text.fitted)) if each is not None)
        rows = len(text.fitted) // width
        self.ids = torch.tensor(text.fitted[: rows * width]).reshape(rows, width)

    def within(self, spec: ModelSpec) -> Calibration:
        """Return the text in rows that another tree takes as well."""
        return Calibration(self.text, self.spec, Calibration(self.text, spec, self.ids.shape[1]).ids.shape[1])

    def deciding(self, tokens: int) -> Calibration:
        """Return up to so many tokens of the part that decides between fits; what is fitted on where there is none."""
        part = self.text.choosing or self.text.fitted
        return Calibration(replace(self.text, fitted=part[:tokens]), self.spec)

    def start(self, model: Model) -> tuple[Tensor, Context]:
        """Return what comes to the first layer of a tree, (rows, tokens, hidden), and the context of the pass."""
        rows, steps = self.ids.shape
        front = filled(partial(Front, model.spec), partial(tensor_of, Exactly(model)), torch.float32)
        with torch.no_grad():
            x, inputs = front(self.ids, torch.arange(steps)[None])
        context = Context(rows, steps, 0, False, torch.arange(steps)[None], None, x.dtype)
        context.inputs, context.shared, context.first = inputs, dict.fromkeys(model.spec.shared), x
        return x, context

    def walk(
        self, model: Model, layers: Collection[int] | None = None, without: Collection[int] = ()
    ) -> Iterator[Layer]:
        """The layers of a tree, or some of them, each with the activations that the text brings to it, in fp32. The
        stream goes past the layers in `without`.

        The weights of one layer are in memory. The next layer gets the output of this one as its module is by then:
        who changes its weights has the layers after it see what the change makes of the stream.
        """
        x, context = self.start(model)
        for index in range(len(model.spec.blocks) if layers is None else max(layers) + 1):
            if index in without:
                continue
            context.layer = index
            layer = Layer(index, block_of(model, index), context, x)
            if layers is None or index in layers:
                yield layer
            x = layer.output
            model.release()


@dataclass
class Layer:
    """One layer while a text runs through it: its number, its block as a module that is filled, the context of the
    pass, and x, what comes to it, (rows, tokens, hidden).
    """

    index: int
    module: BlockModule
    context: Context
    x: Tensor

    @cached_property
    def output(self) -> Tensor:
        """What leaves it."""
        return run_block(self.module, self.x, self.context)[0]

    def run(self, *watched: str) -> _Run:
        """As `run_block`."""
        output, seen = run_block(self.module, self.x, self.context, *watched)
        self.__dict__.setdefault("output", output)
        return output, seen


def run_block(block: BlockModule, x: Tensor, context: Context, *watched: str) -> _Run:
    """A block's output, and the (input, output) of the modules in it that are named ("attention.o_proj")."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # Copies: a gated feed-forward multiplies its gate in place.
        seen[name] = (inputs[0].detach().clone(), output.detach().clone())

    hooks = [block.get_submodule(name).register_forward_hook(partial(watch, name)) for name in watched]
    with hooked(hooks), torch.no_grad():
        output: Tensor = block(x, context)
    return output, seen


def block_of(model: Model, index: int) -> BlockModule:
    """A layer of a tree as a module, filled."""
    read = partial(tensor_of, Exactly(model))
    return filled(partial(BlockModule, model.spec.blocks[index]), read, torch.float32, f"blocks.{index}")
