"""Convert text to token ids and back with a checkpoint's tokenizer, and find the tokenizer's files.

The `tokenizers` library reads tokenizer.json. Whether special tokens are added to a text depends only on the
post-processor in this file, as in transformers 5, and not on `add_bos_token` in tokenizer_config.json.

The ids are the same as with AutoTokenizer, with one exception. In a prompt such as "<s>Once", text directly follows a
special token. For a llama tokenizer, AutoTokenizer puts no "▁" before this text, whatever the file says; gptkit does
what the file says.

AutoTokenizer reads older forms (tokenizer.model, or vocab.json with merges.txt), only from local files and never with a
repository's own code. All of this runs in a separate process (`tokenizer_process`).
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..architectures.config import parse_config_text, read_config_file
from ..errors import InvalidInput, UsageError, shown
from .companions import is_tokenizers
from .confinement import Confined, libraries
from .tokenizer_process import MAX_BYTES

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer that runs in a separate process. The process ends when this object is deleted.

    Every method raises InvalidInput if it fails.
    """

    def __init__(self, path: Path, text: bytes | None = None, folder: Path | None = None) -> None:
        """Load the tokenizer.

        Args:
            path: the path of tokenizer.json. With `folder`, it is only used in messages.
            text: the content of tokenizer.json, if it is already read.
            folder: a folder without tokenizer.json, which AutoTokenizer reads.
        """
        self.path = path
        self.eos_ids: tuple[int, ...] = ()
        files = [path] if folder is None else token_files(folder)
        nbytes = sum(file.stat().st_size for file in files) if text is None else len(text)
        if nbytes > MAX_BYTES:
            raise InvalidInput(f"{path} has {nbytes:,} bytes, too many for a tokenizer")
        self._process = Confined("tokenizer_process")
        question: dict[str, Any] = {"libraries": libraries(), "bytes": nbytes, "file": str(path.absolute())}
        if folder is not None:
            question["older"] = str(folder.absolute())
        elif text is not None:
            try:
                question["text"] = text.decode()
            except UnicodeDecodeError as error:
                raise self._broken(str(error)) from error
        self._exchange(question)

    def _ask(self, what: str, given: Any = None, flag: bool = False) -> Any:
        return self._exchange({"what": what, "given": given, "flag": flag})

    def _exchange(self, question: dict[str, Any]) -> Any:
        answer = self._process.ask(question)
        if answer is None:
            raise self._broken("it needs more time or memory than gptkit allows for a tokenizer")
        if "error" in answer:
            raise self._broken(answer["error"])
        return answer["answer"]

    def _broken(self, why: str) -> InvalidInput:
        # The reason may quote the file, and control characters must not reach the terminal.
        reason = "".join(sign if sign.isprintable() else " " for sign in next(iter(why.strip().splitlines()), ""))
        return InvalidInput(f"{self.path} cannot be read as a tokenizer: {reason:.200}", "Fetch the file again.")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return frozenset(self._ask("special"))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. A model's embedding may have more rows."""
        return int(self._ask("get_vocab_size"))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds unless `special` is False.

        Raises UsageError if the text is not valid Unicode.
        """
        return list(self._ask("encode", _unicode(text), special))

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text without added special tokens, and the end of every token.

        An end is a position in the text, counted in characters.
        """
        ids, ends = self._ask("ends", _unicode(text))
        return ids, ends

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Ids of unused rows of the embedding are left out. The bytes of an incomplete character become U+FFFD.
        """
        return str(self._ask("decode", list(ids), skip_special_tokens))

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._ask("to_str"))

    def token(self, token_id: int) -> str | None:
        """Return the token with this id as it is written in the vocabulary, or None if there is none."""
        token: str | None = self._ask("id_to_token", token_id)
        return token

    def ids(self, tokens: Iterable[str]) -> list[int | None]:
        """Return the ids of tokens that are given as in the vocabulary. The id of an unknown token is None."""
        return list(self._ask("token_to_id", list(tokens)))


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
    return text


class StreamDecoder:
    """Decodes token ids one by one. All returned pieces together are the text of decoding all ids at once.

    Text that later ids could still change is delayed: the bytes of an incomplete character, and byte tokens such as
    <0xE4> until another token follows. (The DecodeStream of the tokenizers library never returns it.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False, prompt: Iterable[int] = ()) -> None:
        """Prepare to decode.

        Args:
            tokenizer: the tokenizer.
            skip_special_tokens: leave special tokens out of the text.
            prompt: ids before the first id that is decoded. Their text is not returned, but with them a space at the
                beginning of the returned text is kept.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        # A decoder may change the beginning of a text (drop its space), so the ids of the last piece are decoded again
        # together with the new ids, and their text, `_given`, is cut off.
        self._ids = [token_id for token_id in prompt if token_id not in self._skipped]
        self._given_ids = len(self._ids)
        self._given = tokenizer.decode(self._ids)

    def push(self, token_id: int) -> str:
        """Add an id, and return the text that no later id can change; it may be empty."""
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._skipped:
            return ""  # decoding leaves it out, so a sequence of byte tokens may continue after it
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = _after(self._given, text)
        last = self._ids[self._given_ids :]
        last_text = self._tokenizer.decode(last)
        # Keep only ids with text: without text before it, the next space would be at the beginning and be dropped.
        if last_text:
            self._ids, text = last, last_text
        self._given_ids, self._given = len(self._ids), text
        return piece

    def finish(self) -> str:
        """Return the text that is still delayed after the last id, and reset the decoder."""
        piece = _after(self._given, self._tokenizer.decode(self._ids))
        self._ids, self._given_ids, self._given = [], 0, ""
        return piece


def _after(given: str, text: str) -> str:
    """Return the part of a text that comes after the text `given`, with which it begins.

    The last character of `given` may be incomplete. Then only the common beginning of the two texts is removed.
    """
    same = next((at for at, (a, b) in enumerate(zip(given, text, strict=False)) if a != b), min(len(given), len(text)))
    return text[same:]


def load_tokenizer(folder: Path, texts: Mapping[str, bytes] | None = None) -> Tokenizer | None:
    """Return the tokenizer of a folder, or None if there is none. Raises InvalidInput.

    `texts` are files that are stored inside the weight file, such as a GGUF, by name. They have precedence.
    """
    path, text, older = folder / "tokenizer.json", None, None
    if texts and path.name in texts:
        text = texts[path.name]
    elif path.is_file():
        texts = None
    else:
        model = next((folder / name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()), None)
        if model is not None:
            # Without sentencepiece, transformers would read the file as another kind, and its error would be
            # misleading.
            if importlib.util.find_spec("sentencepiece") is None:
                raise InvalidInput(
                    f"{model} is a SentencePiece model, and its folder has no tokenizer.json",
                    "Install packages that can read it: pip install sentencepiece protobuf. Or add the tokenizer.json "
                    "that transformers' save_pretrained writes.",
                )
        elif not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
            return None
        path, older, texts = model or folder / "vocab.json", folder, None
    tokenizer = Tokenizer(path, text, older)
    tokenizer.eos_ids = eos_ids(folder, tokenizer, texts)
    return tokenizer


def eos_ids(
    folder: Path, tokenizer: Tokenizer | None = None, texts: Mapping[str, bytes] | None = None
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text. Raises InvalidInput.

    The ids are in generation_config.json, or else in config.json. Otherwise `eos_token` in tokenizer_config.json is
    used. These files are in `texts`, by name, or else in the folder.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name, texts).get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
                raise InvalidInput(
                    f"{folder / name}: eos_token_id is {shown(value)}, expected a token id or a list of them"
                )
            return tuple(values)
    token = _read_json(folder / "tokenizer_config.json", texts).get("eos_token")
    if isinstance(token, dict):  # an AddedToken
        token = token.get("content")
    (index,) = tokenizer.ids([token]) if tokenizer is not None and isinstance(token, str) else [None]
    return () if index is None else (index,)


def start_id(folder: Path, config: Mapping[str, Any] | None, texts: Mapping[str, bytes] | None = None) -> int | None:
    """Return the id of the first token that the decoder of an encoder-decoder gets, or None. Raises InvalidInput.

    It is in generation_config.json (in `texts`, by name, or else in the folder), or else in the model's `config`.
    """
    for settings in (_read_json(folder / "generation_config.json", texts), config or {}):
        value = settings.get("decoder_start_token_id")
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise InvalidInput(f"{folder}: decoder_start_token_id is {shown(value)}, expected a token id")
        if value is not None:
            return value
    return None


def token_files(folder: Path) -> list[Path]:
    """Return the files of `companions.TOKEN_FILES` in a folder, sorted by name. Raises InvalidInput."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}") from error
    return [path for path in entries if is_tokenizers(path.name) and path.is_file()]


def _read_json(path: Path, texts: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file.

    If `texts` (the content of files by name) are given, the file is read from them.
    """
    if texts:
        return parse_config_text(texts[path.name], path.name) if path.name in texts else {}
    return read_config_file(path)[0] if path.is_file() else {}
