"""The text that swaps are fitted on, as token ids.

A text has three parts. Swaps are fitted on the first part. The second decides between several fits, or between a fit
and a simpler variant of the swap. The last part measures how much a swap changes the model. This module does not import
torch, so that a dry run works without it.
"""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...converter.tokenizer import load_tokenizer
from ...errors import InvalidInput, UsageError

if TYPE_CHECKING:
    from ...converter.checkpoint import Checkpoint
    from ..base import Promise

TOKENS = 2048  # the default minimum of tokens to fit on
MOST = 32_768  # the default maximum of tokens to fit on
_HELD_OUT = 2048  # the maximum number of tokens, at the end of the text, that measure a swap
_CHOOSING = 4096  # the maximum number of tokens, before those, that choose between fits
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
