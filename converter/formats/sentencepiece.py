"""A SentencePiece model file (tokenizer.model), read without its library: pieces, scores, and a few settings.

Source: sentencepiece's sentencepiece_model.proto, of which the numbers below are the fields'.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidInput

UNIGRAM, BPE = 1, 2
"""TrainerSpec.ModelType."""


@dataclass
class SentencePieceModel:
    """What the file says.

    kind: UNIGRAM, BPE, or a number of one that is not read. pieces: (text, score, type), the types being GGUF's too.
    ids: of special tokens by transformers' names, those that there are.
    """

    kind: int = UNIGRAM
    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""


def parse_sentencepiece(data: bytes, where: str) -> SentencePieceModel:
    """The model in a file's bytes. Raises InvalidInput."""
    model = SentencePieceModel()
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(value))
                score, kind = struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, 1)
                if kind not in range(1, 7):
                    raise ValueError(f"a piece of type {kind!r:.20}")
                model.pieces.append((piece[1].decode(), score, kind))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        model.kind = int(trainer.get(3, UNIGRAM))
        for name, number, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1)):
            if 0 <= trainer.get(number, default) < len(model.pieces):  # "none" is -1, which a varint makes huge
                model.ids[name] = trainer.get(number, default)
        model.charsmap = bytes(normalizer.get(2, b""))
        model.add_dummy_prefix = bool(normalizer.get(3, True))
        model.remove_extra_whitespaces = bool(normalizer.get(4, True))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise InvalidInput(f"{where} is not a SentencePiece model: {error!s:.80}") from error
    if not model.pieces:
        raise InvalidInput(f"{where} is not a SentencePiece model: it holds no pieces")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: (number, value), a value being an int, or bytes of what has a length."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"a number without an end at byte {at:,}")

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        size = varint() if wire == 2 else size
        if size is None or at + size > len(data):
            raise ValueError(f"at byte {at:,}")
        yield key >> 3, data[at : at + size]
        at += size
