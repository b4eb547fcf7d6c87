"""The text that swaps are fitted on: its token ids, and a model's activations on it, one layer at a time.

A calibrated swap needs the inputs of the layers that it changes. `Calibration.walk` runs the text through a model with
one layer's weights in memory, and yields every layer with its input. A text has three parts. Swaps are fitted on the
first part. The second decides between several fits, or between a fit and a simpler variant of the swap. The last part
measures how much a swap changes the model.
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
TOKENS = 2048  # the default minimum of tokens to fit on
MOST = 32_768  # the default maximum of tokens to fit on
_HELD_OUT = 2048  # the maximum number of tokens, at the end of the text, that measure a swap
_CHOOSING = 4096  # the maximum number of tokens, before those, that choose between fits
_WINDOW = 512  # the number of tokens in a sequence, if the model accepts that many
_READ_BYTES = 16 * 2**20  # the largest size of a text in bytes; the rest of a larger file would not be used
PLAY = Path(__file__).parents[2] / "samples" / "play.txt"
"""The held-out tenth of the text that the sample models were trained on."""


@dataclass(frozen=True)
class CalibrationText:
    """A text as token ids, divided into three parts."""

    fitted: tuple[int, ...]  # the part to fit on
    held_out: tuple[int, ...]  # the part to measure the result on
    name: str
    sha256: str
    choosing: tuple[int, ...] = ()  # the part to choose between fits on

    def renamed(self, promise: Promise) -> CalibrationText:
        """Return the text in the token ids after a swap that renumbers tokens, without tokens that the swap drops."""
        if promise.tokens is None:
            return self
        table = dict(zip(*promise.tokens, strict=True))
        parts = (tuple(table[i] for i in ids if i in table) for ids in (self.fitted, self.held_out, self.choosing))
        fitted, held_out, choosing = parts
        return replace(self, fitted=fitted, held_out=held_out, choosing=choosing)

    def cut(self, tokens: int | None) -> CalibrationText:
        """Return the text with only the first `tokens` tokens of the part to fit on. None keeps all of that part."""
        return replace(self, fitted=self.fitted[:tokens])


class NoText(UsageError):
    """The error that a swap needs a text and the user gave none. Only gptkit's sample models have a default text."""


def read_text(
    checkpoint: Checkpoint, file: str | Path | None, tokens: int | None = TOKENS, held_out: int = _HELD_OUT
) -> CalibrationText:
    """Read the calibration text for a checkpoint, and convert it into tokens.

    Args:
        checkpoint: The checkpoint with the tokenizer.
        file: A file with plain text in UTF-8. With None, gptkit uses the bundled play if the checkpoint comes from a
            sample.
        tokens: The number of tokens to fit on. With None, it is as large as the text allows, from `TOKENS` to `MOST`,
            and leaves enough for the other parts.
        held_out: The largest number of tokens to measure on.

    Raises:
        NoText: There is no file, and the checkpoint does not come from a sample.
        UsageError: There is no tokenizer, or the text is too short.
        InvalidInput: The file cannot be read as UTF-8 text.
        MissingComponent: The model does not predict next tokens, or has an encoder and a decoder.
    """
    checkpoint.spec.predicts("fitting a swap on a text")
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
        # A file that is cut may end within a character; the decoder then ignores its first bytes.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _READ_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not a UTF-8 text: byte {error.start:,} is invalid") from error
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.texts)
    if tokenizer is None:
        raise UsageError(
            f"{checkpoint.reference} has no tokenizer, so gptkit cannot turn the text {name} into tokens",
            "Copy tokenizer.json into the model's folder.",
        )
    ids = [token for token in tokenizer.encode(text) if token < checkpoint.spec.vocab_size]
    if tokens is None:
        tokens = min(max(len(ids) - _CHOOSING - _HELD_OUT, TOKENS), MOST)
    measured = max(tokens // 8, 1)
    if len(ids) < tokens + measured:
        enough = max(min(len(ids) * 8 // 9, len(ids) - 1), 0)
        raise UsageError(
            (
                f"the text {name} is too short: it has {len(ids):,} tokens, but the fit needs {tokens:,} and the "
                f"measurement another {measured:,}"
            ),
            "Give a longer text" + (f", or fit on fewer tokens: --calibrate-tokens {enough}" if enough else "."),
        )
    deciding = min(_CHOOSING, (len(ids) - tokens) // 2)
    measured = min(held_out, len(ids) - tokens - deciding)
    digest = hashlib.sha256(data).hexdigest()
    choosing = tuple(ids[len(ids) - measured - deciding : len(ids) - measured])
    return CalibrationText(tuple(ids[:tokens]), tuple(ids[-measured:]), name, digest, choosing)


class Calibration:
    """The part of a text to fit on, cut into sequences that a model accepts: token ids (rows, tokens)."""

    def __init__(self, text: CalibrationText, spec: ModelSpec, most: int = _WINDOW) -> None:
        self.text, self.spec = text, spec
        table = None if spec.positions is None else spec.positions.length
        width = min(limit for limit in (most, table, spec.context_length, len(text.fitted)) if limit is not None)
        rows = len(text.fitted) // width
        self.ids = torch.tensor(text.fitted[: rows * width]).reshape(rows, width)

    def within(self, spec: ModelSpec) -> Calibration:
        """Return the same text in sequences that are also short enough for a second model, `spec`."""
        return Calibration(self.text, self.spec, Calibration(self.text, spec, self.ids.shape[1]).ids.shape[1])

    def deciding(self, tokens: int) -> Calibration:
        """Return the first `tokens` tokens of the part that chooses between fits, as the text to run through the model.

        If the text has no such part, they are taken from the part to fit on.
        """
        part = self.text.choosing or self.text.fitted
        return Calibration(replace(self.text, fitted=part[:tokens]), self.spec)

    def start(self, model: Model) -> tuple[Tensor, Context]:
        """Embed the text. Return the input of the first layer, (rows, tokens, hidden), and the positions and masks.

        All layers use these positions and masks (`Context`).
        """
        rows, steps = self.ids.shape
        front = filled(partial(Front, model.spec), partial(tensor_of, Exactly(model)), torch.float32)
        with torch.no_grad():
            x, inputs = front(self.ids, torch.arange(steps)[None])
        context = Context(rows, steps, 0, False, torch.arange(steps)[None], None, x.dtype)
        context.inputs, context.shared, context.first = inputs, dict.fromkeys(model.spec.reused_keys), x
        return x, context

    def walk(
        self, model: Model, layers: Collection[int] | None = None, without: Collection[int] = ()
    ) -> Iterator[CalibrationLayer]:
        """Run the text through a model in fp32, one layer at a time. Yield the layers with their inputs.

        If the caller changes the weights of a yielded layer, the later layers get the changed output.

        Args:
            model: The model to run.
            layers: The numbers of the layers to yield. The default is all.
            without: The numbers of layers that are skipped, as if the model did not have them.
        """
        x, context = self.start(model)
        for index in range(len(model.spec.blocks) if layers is None else max(layers) + 1):
            if index in without:
                continue
            context.layer = index
            layer = CalibrationLayer(index, block_of(model, index), context, x)
            if layers is None or index in layers:
                yield layer
            x = layer.output
            model.release()


@dataclass
class CalibrationLayer:
    """A layer of a model with its input, while a text runs through the model."""

    index: int  # the number of the layer
    module: BlockModule  # the layer's block with its weights
    context: Context
    x: Tensor  # the layer's input, (rows, tokens, hidden)

    @cached_property
    def output(self) -> Tensor:
        """Return the output of the layer."""
        return run_block(self.module, self.x, self.context)[0]

    def run(self, *watched: str) -> _Run:
        """Run the block with `run_block`. The attribute `output` then has the block's output."""
        output, activations = run_block(self.module, self.x, self.context, *watched)
        self.__dict__.setdefault("output", output)
        return output, activations


def run_block(block: BlockModule, x: Tensor, context: Context, *watched: str) -> _Run:
    """Run a block. Return its output, and for each module named in `watched` the pair of its input and output.

    A module is named by its path in the block, such as "attention.o_proj". `context` has the positions and masks.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # These are copies, because a gated feed-forward multiplies its gate in place.
        seen[name] = (inputs[0].detach().clone(), output.detach().clone())

    hooks = [block.get_submodule(name).register_forward_hook(partial(watch, name)) for name in watched]
    with hooked(hooks), torch.no_grad():
        output: Tensor = block(x, context)
    return output, seen


def block_of(model: Model, index: int) -> BlockModule:
    """Return the module of one layer of a model, with its weights in fp32."""
    read = partial(tensor_of, Exactly(model))
    return filled(partial(BlockModule, model.spec.blocks[index]), read, torch.float32, f"blocks.{index}")
