"""Load and run an untrusted tokenizer: a worker of `confinement`, which `tokenizer` asks.

A tokenizer's file may have regular expressions that never end, normalizers that double a text many times, and tables
that crash the library. The limits of time and memory depend on the size of the input.
"""

import sys
from typing import Any

from .confinement import allow

MAX_BYTES = 2**28  # bytes of a tokenizer's files; the largest in use has 33 MB
_LIBRARIES = (2**30, 0, 60.0, 0.0)
_LOADING = (2**28, 32, 4.0, 1 / 2**21)  # a tokenizer of 28 MB takes 380 MB and a second
_RUNNING = (2**27, 256, 4.0, 1 / 2**16)  # with it, a text of 5 MB takes 320 MB and 6 seconds
_EXPANDS = 64  # tokens per byte; NFKC makes at most 11 bytes from one, and 18 characters from one

_loaded: list[Any] = []  # the library's tokenizer, after the first question


def answer(question: dict[str, Any]) -> Any:
    """Answer a question about a tokenizer.

    The first question says which tokenizer to load. Every later one names a method to call (`what`) and its arguments.
    """
    if not _loaded:
        _loaded.append(_load(question))
        return None
    (backend,), what, given, flag = _loaded, question["what"], question["given"], question["flag"]
    if what in ("encode", "ends"):
        allow(len(given), _RUNNING)
        encoded = backend.encode(given, add_special_tokens=flag)
        if len(encoded.ids) > _EXPANDS * (len(given.encode()) + _EXPANDS):
            raise ValueError(f"{len(encoded.ids):,} tokens for {len(given):,} characters")
        return encoded.ids if what == "encode" else [encoded.ids, [end for _, end in encoded.offsets]]
    if what == "decode":
        allow(len(given), _RUNNING)
        return backend.decode(given, skip_special_tokens=flag)
    if what == "special":
        added = backend.get_added_tokens_decoder()
        return [token_id for token_id, token in added.items() if token.special]
    if what == "token_to_id":
        return [backend.token_to_id(token) for token in given]
    return getattr(backend, what)(*([] if given is None else [given]))  # the other questions


def reason(error: BaseException) -> str:
    """Return the text of an error that the tokenizer library raised."""
    return f"{error!s:.1000}" or type(error).__name__


def _load(question: dict[str, Any]) -> Any:
    """Load the tokenizer that the first question describes, without truncation and padding."""
    allow(0, _LIBRARIES)
    sys.path += question["libraries"]
    if "older" in question:
        backend = _older(question["older"], question["bytes"])
    else:
        import tokenizers

        allow(question["bytes"], _LOADING)
        kind = tokenizers.Tokenizer
        backend = kind.from_str(question["text"]) if "text" in question else kind.from_file(question["file"])
    backend.no_truncation()
    backend.no_padding()
    return backend


def _older(folder: str, nbytes: int) -> Any:
    """Load a tokenizer without tokenizer.json from its folder, with AutoTokenizer.

    `nbytes` is the size of its files.
    """
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # transformers needs no torch for a tokenizer
    from transformers import AutoTokenizer

    allow(nbytes, _LOADING)
    loaded: Any = AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
        folder, local_files_only=True, trust_remote_code=False
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"it has no form that the tokenizers library reads ({type(loaded).__name__})")
    return backend
