"""A checkpoint's tokenizer: text to ids and back, and the files it is made of.

tokenizer.json is read by the `tokenizers` library, without torch or transformers. It says all there is to say: since
version 5 transformers itself ignores `add_bos_token` and `add_eos_token` of a tokenizer_config.json beside it, and the
file's own post-processor decides which special tokens are added. Ids are those of transformers.AutoTokenizer but for
one case: for a llama tokenizer it rebuilds the file's pipeline, and puts no "▁" before text that directly follows a
special token written out in the prompt ("<s>Once"), whatever the file says; here the file is followed.

Older forms (tokenizer.model, vocab.json with merges.txt) are read by AutoTokenizer, from local files alone and never
with a repository's own code.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..architectures.config import parse_config_text, read_config_file
from ..errors import InvalidInput, UsageError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TOKEN_FILES", "StreamDecoder", "Tokenizer", "eos_ids", "load_tokenizer", "token_files", "travels"]

TOKEN_FILES = (
    # the tokenizer: its one-file form with its settings, then the older forms
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.*",  # tokenizer.model.v3, tokenizer.tiktoken, …
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    # ids that stand for something other than text
    "token_mappings.json",
    # how the model is talked to
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    # what the weights may be used for stays true of the converted ones; a README.md describes the original alone
    "LICENSE",
    "LICENSE*",
    "NOTICE*",
)
"""Names of the files that travel with a checkpoint, as shell patterns.

The plain names are all that can be asked of a hub that does not list a repository's files.
"""

_NEVER = ("*.py", "*.pkl", "*.pickle")  # code does not travel, whatever its name
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the `tokenizers` library's tokenizer. Its truncation and padding are switched off: a prompt is neither
            cut nor filled up unasked.
        eos_ids: the ids that end a text.

    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Sequence[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_ids = tuple(eos_ids)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's table may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens (such as "<s>" in front) that the tokenizer itself adds.

        Raises:
            UsageError: half a surrogate pair, which is no text.

        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. What no token has (a model's spare rows) is left out; half a character becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, whatever it was read from."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, or None where there is none of that id."""
        return self._backend.id_to_token(token_id)


class StreamDecoder:
    """Ids to text as they come: the pieces, with `finish`'s, joined are the decoding of all ids at once.

    With a `prompt` they are what follows its text: in one decoding of prompt and ids, so that the continuation keeps
    the space it begins with.

    What later ids could still change is held back: bytes of an unfinished character, and byte tokens like <0xE4> until
    another token follows, for a run of them is decoded as one.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        # A decoder may treat the beginning of a text differently (drop its space), so the ids of the last piece are
        # decoded again in front of what is new, and their text, `_given`, is cut off.
        self._ids = [token_id for token_id in prompt if token_id not in self._skipped]
        self._given_ids = len(self._ids)
        self._given = tokenizer.decode(self._ids)

    def push(self, token_id: int) -> str:
        """The text that is certain now; often that of this id, at times nothing, or more."""
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._skipped:
            return ""  # decoding leaves it out, so a run of byte tokens goes on across it
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_REPLACEMENT):
            return ""
        piece = _after(self._given, text)
        last = self._ids[self._given_ids :]
        last_text = self._tokenizer.decode(last)
        # Only ids with text can stand for the text before: behind nothing, the next space would count as the first.
        if last_text:
            self._ids, text = last, last_text
        self._given_ids, self._given = len(self._ids), text
        return piece

    def finish(self) -> str:
        """What was held back, when no more ids come. The decoder then begins anew."""
        piece = _after(self._given, self._tokenizer.decode(self._ids))
        self._ids, self._given_ids, self._given = [], 0, ""
        return piece


def _after(given: str, text: str) -> str:
    """What is new in a text: all of it behind `given`, but for the end of a prompt that turned into something else.

    Such a prompt ends within a character, whose other bytes came now.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, text, strict=False))
    return text[sum(1 for _ in same) :]


def load_tokenizer(folder: Path, texts: Mapping[str, bytes] | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint's folder, or None where it has none.

    `texts` are files by name that the weight file holds inside (a GGUF does): where there is a tokenizer among them,
    the folder is not looked at.

    Raises:
        InvalidInput: files of a tokenizer that cannot be read; the message names the file.

    """
    if texts and "tokenizer.json" in texts:
        backend = _from_json(folder / "tokenizer.json", texts["tokenizer.json"])
        return Tokenizer(backend, eos_ids(folder, backend, texts))
    if (folder / "tokenizer.json").is_file():
        backend = _from_json(folder / "tokenizer.json")
    elif any((folder / name).is_file() for name in _SENTENCEPIECE) or all(
        (folder / name).is_file() for name in ("vocab.json", "merges.txt")
    ):
        backend = _from_older_files(folder)
    else:
        return None
    return Tokenizer(backend, eos_ids(folder, backend))


def eos_ids(
    folder: Path, backend: tokenizers.Tokenizer | None = None, texts: Mapping[str, bytes] | None = None
) -> tuple[int, ...]:
    """The ids that end a text: from generation_config.json, else config.json, else the tokenizer's `eos_token`.

    `backend` looks up the `eos_token`, which tokenizer_config.json gives as text; without one, ids alone count. The
    files are those of `texts` where there are any, else the folder's.

    Raises:
        InvalidInput: one of these files is not JSON, or its `eos_token_id` is not an id or a list of ids.

    """
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name, texts).get("eos_token_id")
        if value is not None:
            return _ids(value, folder / name)
    token = _read_json(folder / "tokenizer_config.json", texts).get("eos_token")
    if isinstance(token, dict):  # an AddedToken, written out
        token = token.get("content")
    found = backend.token_to_id(token) if backend is not None and isinstance(token, str) else None
    return () if found is None else (found,)


def token_files(folder: Path) -> list[Path]:
    """The files that travel with a checkpoint beside config.json and weights, `TOKEN_FILES`, in the order of names.

    Raises:
        InvalidInput: the folder cannot be read.

    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}") from error
    return [path for path in entries if travels(path.name) and path.is_file()]


def travels(name: str) -> bool:
    """Whether a file of that name is one of `TOKEN_FILES`."""
    return any(fnmatchcase(name, pattern) for pattern in TOKEN_FILES) and not any(
        fnmatchcase(name, pattern) for pattern in _NEVER
    )


def _from_json(path: Path, text: bytes | None = None) -> tokenizers.Tokenizer:
    """The tokenizer in a file, or in its `text`."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path)) if text is None else tokenizers.Tokenizer.from_buffer(text)
    except BaseException as error:
        # The library raises plain Exception for what it refuses; where its Rust code panics (a broken charsmap), that
        # is a BaseException of no importable class. An interrupt by the user is neither.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _broken(path, error) from error


def _from_older_files(folder: Path) -> tokenizers.Tokenizer:
    """What AutoTokenizer makes of tokenizer.model, or of vocab.json and merges.txt."""
    model = next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    path = folder / "vocab.json" if model is None else model
    if model is not None and importlib.util.find_spec("sentencepiece") is None:
        # Asked first: without it transformers takes the file for another kind, and its error names that.
        raise InvalidInput(
            f"{model} is a SentencePiece model, and there is no tokenizer.json beside it",
            "pip install sentencepiece protobuf, or add the tokenizer.json that transformers' save_pretrained writes",
        )
    from transformers import AutoTokenizer  # seconds, and torch

    try:
        loaded: Any = AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # what a tokenizer class raises is of any kind
        raise _broken(path, error) from error
    backend: tokenizers.Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInput(
            f"{path} has no form that the tokenizers library reads ({type(loaded).__name__})",
            "gptkit reads tokenizer.json; the tokens can still be given as ids",
        )
    return backend


def _broken(path: Path, error: BaseException) -> InvalidInput:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    # The reason may quote the file: control characters must not reach the terminal.
    reason = "".join(sign if sign.isprintable() else " " for sign in reason)
    return InvalidInput(f"{path} is not a tokenizer that can be read: {reason:.200}", "Fetch the file again.")


def _read_json(path: Path, texts: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """The file's object, empty where there is no such file; looked for among `texts` where there are any."""
    if texts:
        return parse_config_text(texts[path.name], path.name) if path.name in texts else {}
    return read_config_file(path)[0] if path.is_file() else {}


def _ids(value: object, path: Path) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise InvalidInput(f"{path}: eos_token_id is {value!r:.60}, expected a token id or a list of them")
    return tuple(values)
