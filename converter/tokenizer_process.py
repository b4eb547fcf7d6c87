"""A tokenizer that we did not write, loaded and run: a worker of `confinement`, which `tokenizer` asks.

A tokenizer's file is a program of a kind: regular expressions that take ages, normalizers that double a text again and
again, tables that the library's Rust code panics over. Each question comes as eight bytes of length and JSON on stdin,
and is answered in the same form on stdout; {"error": …} says what the library has to say of it. Before each one this
process limits its time and memory by the size of what it is given, and where that does not do, it dies.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from .confinement import limit_memory, limit_time

MAX_BYTES = 2**28
"""Of a tokenizer's files: the largest in use has 33 MB."""
LOADING = (2**28, 32, 4.0, 1 / 2**21)
"""Memory for any tokenizer and for each of its bytes, then seconds the same. One of 28 MB takes 380 MB and a second."""
RUNNING = (2**27, 256, 4.0, 1 / 2**16)
"""The same for a text. One of 5 MB takes 320 MB and 6 seconds with such a tokenizer."""
EXPANDS = 64
"""A text has no more tokens a byte: NFKC makes 11 bytes of one at the most, 18 characters of one."""

LENGTH = struct.Struct("<Q")


def send(pipe: BinaryIO, message: dict[str, Any]) -> None:
    """Write a message. Raises OSError."""
    data = json.dumps(message).encode()
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> dict[str, Any] | None:
    """Read a message; None at the end, or where the other side died within one. Raises OSError."""
    length = pipe.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    data = pipe.read(LENGTH.unpack(length)[0])
    if len(data) < LENGTH.unpack(length)[0]:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def allow(nbytes: int, most: tuple[int, int, float, float]) -> None:
    """Limit this process to what it has and what so many bytes may take."""
    memory, per_byte, seconds, seconds_per_byte = most
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_memory(pages * os.sysconf("SC_PAGE_SIZE") + memory + nbytes * per_byte)
    except (OSError, ValueError):  # where there is no /proc there is no such limit either
        pass
    limit_time(seconds + nbytes * seconds_per_byte)


class Loaded:
    """The library's tokenizer. Its truncation and padding are switched off: a prompt is neither cut nor filled up."""

    def __init__(self, asked: dict[str, Any]) -> None:
        limit_memory(2**30)  # for the libraries
        sys.path += asked["libraries"]
        if "older" in asked:
            self.backend = older(asked["older"], asked["bytes"])
        else:
            import tokenizers

            allow(asked["bytes"], LOADING)
            kind = tokenizers.Tokenizer
            self.backend = kind.from_file(asked["file"]) if "file" in asked else kind.from_str(asked["text"])
        self.backend.no_truncation()
        self.backend.no_padding()

    def answer(self, what: str, given: Any, flag: bool) -> Any:
        """One answer, by the method's name in the library."""
        if what == "encode":
            allow(len(given), RUNNING)
            ids = self.backend.encode(given, add_special_tokens=flag).ids
            if len(ids) > EXPANDS * (len(given.encode()) + EXPANDS):
                raise ValueError(f"{len(ids):,} tokens for {len(given):,} characters")
            return ids
        if what == "decode":
            allow(len(given), RUNNING)
            return self.backend.decode(given, skip_special_tokens=flag)
        if what == "special":
            added = self.backend.get_added_tokens_decoder()
            return [token_id for token_id, token in added.items() if token.special]
        if what == "token_to_id":
            return [self.backend.token_to_id(token) for token in given]
        return getattr(self.backend, what)(*([] if given is None else [given]))  # the other questions


def older(folder: str, nbytes: int) -> Any:
    """What AutoTokenizer makes of tokenizer.model, or of vocab.json and merges.txt."""
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # transformers does without, for a tokenizer
    from transformers import AutoTokenizer

    allow(nbytes, LOADING)
    loaded: Any = AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
        folder, local_files_only=True, trust_remote_code=False
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"it has no form that the tokenizers library reads ({type(loaded).__name__})")
    return backend


def serve() -> None:
    """Answer every question on stdin; the first says what to load."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loaded: Loaded | None = None
    while (asked := receive(sys.stdin.buffer)) is not None:
        try:
            if loaded is None:
                loaded = Loaded(asked)
                send(answers, {})
            else:
                send(answers, {"answer": loaded.answer(asked["what"], asked["given"], asked["flag"])})
        except BaseException as error:  # the library's Rust code panics with a class of its own
            send(answers, {"error": f"{error!s:.1000}" or type(error).__name__})
