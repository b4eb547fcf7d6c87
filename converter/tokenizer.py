"""A checkpoint's tokenizer: text to ids and back, and the files it is made of.

tokenizer.json is read by the `tokenizers` library. Since version 5 transformers itself ignores `add_bos_token` and
`add_eos_token` of a tokenizer_config.json beside it: the file's own post-processor decides. Ids are those of
AutoTokenizer but for one case: for a llama tokenizer it puts no "▁" before text that directly follows a special token
written out in the prompt ("<s>Once"), whatever the file says; here the file is followed. Older forms (tokenizer.model,
vocab.json with merges.txt) are read by AutoTokenizer, from local files alone and never with a repository's own code.
All of this runs in a process of its own (`tokenizer_process`).
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
    """Text to token ids and back, in a process of its own, which ends with this object. It is read from `path`, from
    `text` in its place, or by AutoTokenizer from a `folder`; every method raises InvalidInput where that fails.
    """

    def __init__(self, path: Path, text: bytes | None = None, folder: Path | None = None) -> None:
        self.path = path
        self.eos_ids: tuple[int, ...] = ()
        files = [path] if folder is None else token_files(folder)
        nbytes = sum(file.stat().st_size for file in files) if text is None else len(text)
        if nbytes > MAX_BYTES:
            raise InvalidInput(f"{path} has {nbytes:,} bytes, too many for a tokenizer")
        self._process = Confined("tokenizer_process")
        asked: dict[str, Any] = {"libraries": libraries(), "bytes": nbytes, "file": str(path.absolute())}
        if folder is not None:
            asked["older"] = str(folder.absolute())
        elif text is not None:
            try:
                asked["text"] = text.decode()
            except UnicodeDecodeError as error:
                raise self._broken(str(error)) from error
        self._exchange(asked)

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
        # The reason may quote the file: control characters must not reach the terminal.
        reason = "".join(sign if sign.isprintable() else " " for sign in next(iter(why.strip().splitlines()), ""))
        return InvalidInput(f"{self.path} cannot be read as a tokenizer: {reason:.200}", "Fetch the file again.")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that stand for something other than text."""
        return frozenset(self._ask("special"))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's table may have more rows than that."""
        return int(self._ask("get_vocab_size"))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds; UsageError for half a surrogate pair."""
        return list(self._ask("encode", _unicode(text), special))

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text without special tokens, and where in it, in characters, each one's part ends."""
        ids, ends = self._ask("ends", _unicode(text))
        return ids, ends

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. What no token has (a model's spare rows) is left out; half a character becomes U+FFFD."""
        return str(self._ask("decode", list(ids), skip_special_tokens))

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, whatever it was read from."""
        return str(self._ask("to_str"))

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, or None where there is none of that id."""
        token: str | None = self._ask("id_to_token", token_id)
        return token

    def ids(self, tokens: Iterable[str]) -> list[int | None]:
        """The id of each of these tokens, None where there is none so written."""
        return list(self._ask("token_to_id", list(tokens)))


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
    return text


class StreamDecoder:
    """Ids to text as they come: the pieces, with `finish`'s, joined are the decoding of all ids at once; behind a
    `prompt` what follows its text, with the space it begins with. What later ids could still change is held back: bytes
    of an unfinished character, and byte tokens like <0xE4> until another token follows. (tokenizers' DecodeStream gives
    none.)
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
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
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
    """What is behind `given` in a text; the end of a prompt within a character may turn into something else."""
    same = next((at for at, (a, b) in enumerate(zip(given, text, strict=False)) if a != b), min(len(given), len(text)))
    return text[same:]


def load_tokenizer(folder: Path, texts: Mapping[str, bytes] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder, or of `texts` in its weight file; None without one. Raises InvalidInput."""
    path, text, older = folder / "tokenizer.json", None, None
    if texts and path.name in texts:
        text = texts[path.name]
    elif path.is_file():
        texts = None
    else:
        model = next((folder / name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()), None)
        if model is not None:
            # Asked first: without it transformers takes the file for another kind, and its error names that.
            if importlib.util.find_spec("sentencepiece") is None:
                raise InvalidInput(
                    f"{model} is a SentencePiece model, and its folder has no tokenizer.json",
                    "pip install sentencepiece protobuf, or add the tokenizer.json that transformers' save_pretrained"
                    " writes",
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
    """The ids that end a text: by generation_config.json, else config.json, else the tokenizer's `eos_token`, of the
    `texts` or the folder. Raises InvalidInput.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name, texts).get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
                message = f"{folder / name}: eos_token_id is {shown(value)}, expected a token id or a list of them"
                raise InvalidInput(message)
            return tuple(values)
    token = _read_json(folder / "tokenizer_config.json", texts).get("eos_token")
    if isinstance(token, dict):  # an AddedToken, written out
        token = token.get("content")
    (found,) = tokenizer.ids([token]) if tokenizer is not None and isinstance(token, str) else [None]
    return () if found is None else (found,)


def start_id(folder: Path, config: Mapping[str, Any] | None, texts: Mapping[str, bytes] | None = None) -> int | None:
    """The id before the text that the decoder of an encoder-decoder writes: by generation_config.json, else by the
    `config` that it has or once had. Raises InvalidInput.
    """
    for found in (_read_json(folder / "generation_config.json", texts), config or {}):
        value = found.get("decoder_start_token_id")
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise InvalidInput(f"{folder}: decoder_start_token_id is {shown(value)}, expected a token id")
        if value is not None:
            return value
    return None


def token_files(folder: Path) -> list[Path]:
    """The files of `companions.TOKEN_FILES` in a folder, in the order of their names. Raises InvalidInput."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}") from error
    return [path for path in entries if is_tokenizers(path.name) and path.is_file()]


def _read_json(path: Path, texts: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """The file's object, empty where there is no such file; looked for among `texts` where there are any."""
    if texts:
        return parse_config_text(texts[path.name], path.name) if path.name in texts else {}
    return read_config_file(path)[0] if path.is_file() else {}
