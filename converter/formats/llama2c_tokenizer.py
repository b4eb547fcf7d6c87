"""Convert between llama2.c's tokenizer.bin and the tokenizer files of Hugging Face.

tokenizer.bin has the length of the longest token, followed by the score, the length and the text of every token. Spaces
in tokens are written as spaces, not as SentencePiece's "▁". llama2.c merges by score, as SentencePiece's BPE does. Its
code has fixed ids: 1 for <s>, 2 for </s>, and 3 to 258 for the bytes. It puts a space before every text. Source:
llama2.c, tokenizer.py and run.c.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...architectures.llama2c import Sizes
from ...errors import CannotExpress
from .gguf_header import GgufHeader
from .gguf_tokenizer import BYTE, CONTROL, NORMAL, PREFIX, SPACE, UNKNOWN, Texts
from .gguf_vocab import vocabulary

if TYPE_CHECKING:
    from . import Request

TOKENIZER = "tokenizer.bin"
_MAX_BYTES = 2**28
_BOS, _EOS, BYTES = 1, 2, 3  # fixed ids: of <s>, of </s>, and of the first of the 256 bytes
_NAMED = [f"<0x{value:02X}>" for value in range(256)]

_ENTRY = struct.Struct("<fI")
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def texts_beside(path: Path, sizes: Sizes) -> tuple[Mapping[str, bytes], list[str]]:
    """Return Hugging Face tokenizer files for a llama2.c model, by name, and notes for the user.

    They are made from a tokenizer file of llama2.c in the model's folder (tok512.bin or tokenizer.bin) with the right
    number of tokens. Otherwise Hugging Face's files in the folder are returned.
    """
    folder = path.parent
    names = [f"tok{sizes.vocab_size}.bin", TOKENIZER, *sorted(entry.name for entry in folder.glob("tok*.bin"))]
    unused = []
    for name in dict.fromkeys(names):
        file = folder / name
        if not file.is_file():
            continue
        pieces = _pieces(file, sizes.vocab_size)
        if pieces is not None:
            texts = Texts(_as_header(file, pieces), sizes.vocab_size, sizes.max_seq_len, {"bos": [_BOS], "eos": [_EOS]})
            return texts, [f"its tokenizer is {name} in the same folder"]
        unused.append(name)
    files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    notes = [f"{name} was not used, because it does not have {sizes.vocab_size} tokens" for name in unused]
    if any(name in files for name in _FILES[:2]):
        return files, notes
    return {}, [*notes, f"the folder has no {names[0]} or {TOKENIZER}: give texts as token ids"]


def _pieces(path: Path, count: int) -> list[tuple[str, float]] | None:
    """Return the tokens of a tokenizer.bin and their scores, or None unless it has exactly `count` tokens."""
    if not 0 < path.stat().st_size <= _MAX_BYTES:
        return None
    data = path.read_bytes()
    tokens, at = [], 4
    try:
        for _ in range(count):
            score, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            if length > len(data) - at or not math.isfinite(score):
                return None
            tokens.append((data[at : at + length].decode(), score))
            at += length
    except (struct.error, UnicodeDecodeError):
        return None
    return tokens if at == len(data) else None


def _as_header(path: Path, pieces: list[tuple[str, float]]) -> GgufHeader:
    """Return a GGUF header with these tokens, because gptkit can convert it to Hugging Face's tokenizer files."""
    tokens = [text.replace(" ", SPACE) for text, _ in pieces]
    types = [NORMAL] * len(tokens)
    for index, text, kind in ((0, "<unk>", UNKNOWN), (_BOS, "<s>", CONTROL), (_EOS, "</s>", CONTROL)):
        if index < len(tokens) and tokens[index].strip("\n") == text:
            tokens[index], types[index] = text, kind
    if len(tokens) >= BYTES + 256:
        plain = [chr(value).replace(" ", SPACE) for value in range(256)]  # as the first versions wrote them
        if tokens[BYTES : BYTES + 256] in (_NAMED, plain):
            tokens[BYTES : BYTES + 256] = _NAMED
            types[BYTES : BYTES + 256] = [BYTE] * 256
    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [score for _, score in pieces],
        "token_type": types,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": True,
    }
    return GgufHeader(str(path), {PREFIX + key: value for key, value in metadata.items()}, {}, b"")


def tokenizer_bin(request: Request, sizes: Sizes) -> tuple[bytes | None, list[str]]:
    """Return the content of tokenizer.bin for a checkpoint, and notes for the user.

    The content is None if llama2.c cannot use the tokenizer, or if there is none.
    """
    files = {path.name: path.read_bytes() for path in request.companions if path.name in _FILES}
    files |= {name: request.source.texts[name] for name in request.source.texts if name in _FILES}
    if "tokenizer.model" in files:
        files.pop("tokenizer.json", None)  # tokenizer.model has scores, tokenizer.json only an order
    if "tokenizer.model" not in files and "tokenizer.json" not in files:
        return None, [f"{TOKENIZER} is not written, because the source folder has no tokenizer"]
    try:
        metadata = vocabulary(files, sizes.vocab_size).metadata
        reason = _unlike(metadata, sizes)
    except CannotExpress as error:
        metadata, reason = {}, error.message
    if reason is not None:
        return None, [f"{TOKENIZER} is not written, because llama2.c cannot use this tokenizer: {reason}"]
    tokens, scores = metadata[PREFIX + "tokens"], metadata[PREFIX + "scores"]
    assert isinstance(tokens, list) and isinstance(scores, list)
    texts = [str(token).replace(SPACE, " ") for token in tokens]
    texts[_BOS], texts[_EOS] = f"\n{texts[_BOS]}\n", f"\n{texts[_EOS]}\n"
    parts = [text.encode() for text in texts]
    entries = (_ENTRY.pack(score, len(part)) + part for score, part in zip(scores, parts, strict=True))
    return struct.pack("<I", max(map(len, parts))) + b"".join(entries), []


def _unlike(metadata: Mapping[str, Any], sizes: Sizes) -> str | None:
    """Return why llama2.c cannot use a tokenizer, which is given as GGUF metadata, or None if it can."""
    if metadata[PREFIX + "model"] != "llama":
        return "llama2.c supports only SentencePiece's BPE"
    if (metadata.get(PREFIX + "bos_token_id"), metadata.get(PREFIX + "eos_token_id")) != (_BOS, _EOS):
        return f"llama2.c always uses ids {_BOS} and {_EOS} for the tokens BOS and EOS"
    if sizes.vocab_size < BYTES + 256 or metadata[PREFIX + "tokens"][BYTES : BYTES + 256] != _NAMED:
        return f"llama2.c always uses ids {BYTES} to {BYTES + 255} for the 256 byte tokens"
    if not metadata.get(PREFIX + "add_space_prefix"):
        return "llama2.c always puts a space before a text"
    return None
