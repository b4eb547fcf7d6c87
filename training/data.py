"""Texts as token files, tokenised once, and the windows of them that a step of training reads. No torch.

A folder of tokens has

    tokens.bin       every document's ids, one document behind the other, little-endian, uint16 or uint32
    documents.bin    where each document ends in it, in tokens, as little-endian int64
    tokens.json      counts, the dtype, the tokenizer's and every text's sha256 (`TokenFile`)
    tokenizer.json   and whatever else belongs to the tokenizer
    manifest.json    the sha256 of all of these, held to whenever the folder is opened

A document begins with what its tokenizer puts before a text and ends with the token that ends one, where there is such.
Texts are read and written piece by piece, so that memory does not grow with them; a document that is longer than a
piece is cut between a letter and a line's end (in an endless line, a space), where no tokenizer that works by lines or
words joins anything.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..converter.checkpoint import open_checkpoint
from ..converter.files import failed, read_small
from ..converter.manifest import check_manifest, manifest_of
from ..converter.names import json_bytes
from ..converter.publish import Staging
from ..converter.resolve import resolve
from ..converter.tokenizer import Tokenizer, eos_ids, load_tokenizer, token_files
from ..converter.vocabulary import Vocabulary
from ..display import Record
from ..errors import InvalidInput, UsageError
from ..version import __version__

_Ids = np.ndarray[Any, np.dtype[np.int64]]
Progress = Callable[[int, int], None]

TOKENS, DOCUMENTS, DESCRIPTION = "tokens.bin", "documents.bin", "tokens.json"
_VOCABULARY = 4096
"""Tokens of a tokenizer that is trained where nobody says how many."""
_END = "<|endoftext|>"  # what ends a document for a tokenizer that is trained here; its first token
SMALLEST = 257  # every byte, and `_END`
BYTES = "bytes"
"""Names the tokenizer that has no more than those."""
_PIECE = 2**20  # bytes of text that are tokenised at once
_SEAMS = tuple(re.compile(rf"(?<=[^\W_])(?={end})") for end in ("\n", " "))
_LETTER = "a"
SAMPLE = "The quick brown fox jumps over 13 lazy dogs, and doesn't care.\n\tÀ la carte: naïve 東京 🙂\n"
"""What two tokenizers that are one encode alike."""
NOWHERE = -100
"""The target of a token that has none: the last of a document whose successor is another's first."""


class _Source(msgspec.Struct, frozen=True):
    """A text as it was when it was tokenised."""

    name: str
    bytes: int
    sha256: str


class _Description(msgspec.Struct, frozen=True):
    tokens: int
    documents: int
    bytes: int
    dtype: str
    vocabulary: int
    tokenizer: str
    sources: tuple[_Source, ...]


@dataclass(frozen=True)
class TokenFile(Record):
    """An open folder of tokens.

    Attributes:
        folder: the folder.
        tokens: the number of tokens.
        documents: the number of documents.
        bytes: the number of bytes of the texts in UTF-8.
        dtype: the dtype of a token id in the file.
        vocabulary: the size of the vocabulary.
        tokenizer: the sha256 of tokenizer.json.
        sources: the texts.
    """

    JSON = "folder=name tokens documents bytes dtype vocabulary tokenizer sources=texts"

    folder: Path
    tokens: int
    documents: int
    bytes: int
    dtype: str
    vocabulary: int
    tokenizer: str
    sources: tuple[_Source, ...] = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def texts(self) -> list[Any]:
        return [msgspec.to_builtins(each) for each in self.sources]

    @property
    def digest(self) -> str | None:
        """The sha256 of tokens.bin, as the manifest has it."""
        found: dict[str, Any] = manifest_of(self.folder).get("files", {}).get(TOKENS, {})
        return found.get("sha256")

    @cached_property
    def ends(self) -> _Ids:
        """Where each document ends, in tokens, (documents,)."""
        return np.fromfile(self.folder / DOCUMENTS, "<i8")

    @cached_property
    def _file(self) -> tuple[int, os.stat_result]:
        fd = os.open(self.folder / TOKENS, os.O_RDONLY | os.O_CLOEXEC)
        return fd, os.fstat(fd)

    def read(self, first: int, count: int) -> _Ids:
        """Ids (count,) from the token `first` on. Raises InvalidInput where the file has become shorter."""
        # Not through a map of the file, which would end the process where the file is cut.
        kind = np.dtype(self.dtype)
        data = os.pread(self._file[0], count * kind.itemsize, first * kind.itemsize)
        if len(data) < count * kind.itemsize:
            raise self._changed("it is shorter")
        return np.frombuffer(data, kind).astype(np.int64)

    def require_unchanged(self) -> None:
        """Raise InvalidInput where tokens.bin is no longer the file that was opened, by its size, time and inode."""
        before = self._file[1]
        try:
            now = (self.folder / TOKENS).stat()
        except OSError as error:
            raise self._changed(str(error.strerror)) from error
        if any(getattr(before, each) != getattr(now, each) for each in ("st_size", "st_mtime_ns", "st_ino")):
            raise self._changed("its size, time or inode is different")

    def _changed(self, why: str) -> InvalidInput:
        message = f"{self.folder / TOKENS} changed since it was opened: {why}"
        return InvalidInput(
            message,
            "Tokenise the text again into a new folder: gptkit tokenize FILE FOLDER. gptkit check "
            "FOLDER lists the changed files.",
        )

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of these tokens. Raises InvalidInput."""
        found = load_tokenizer(self.folder)
        assert found is not None, "tokenize writes one"
        return found


def is_tokens(folder: Path) -> bool:
    """Whether a path is a folder that `tokenize` wrote."""
    return (folder / DESCRIPTION).is_file()


def open_tokens(folder: Path) -> TokenFile:
    """Open a folder of tokens, whose files are hashed and held to its manifest. Raises InvalidInput."""
    again = "Create such a folder with gptkit tokenize."
    if not is_tokens(folder):
        raise InvalidInput(f"{folder} is not a folder written by gptkit tokenize: it has no {DESCRIPTION}", again)
    if problems := check_manifest(folder):
        raise InvalidInput(f"the files in {folder} do not match its manifest.json: {problems[0]}", again)
    try:
        found = msgspec.json.decode(read_small(folder / DESCRIPTION, 2**26), type=_Description)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInput(f"{folder / DESCRIPTION} cannot be read: {error}", again) from error
    return TokenFile(folder, **msgspec.structs.asdict(found))


def paths_of(data: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path, or several."""
    return [Path(each) for each in ([data] if isinstance(data, str | Path) else data)]


def alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers make the same ids of a text: where they are written alike, or, as a GGUF says the same in
    other words, where they have the same tokens at the same ids and encode a sample alike.
    """
    first, second = one.to_json(), other.to_json()
    if first == second:
        return True
    tokens = [Vocabulary(json.loads(each), {}).tokens for each in (first, second)]
    return tokens[0] == tokens[1] and one.encode(SAMPLE) == other.encode(SAMPLE)


def require_tokenizer(tokens: TokenFile, model: str | Path, own: Tokenizer | None = None, **opening: bool) -> None:
    """Raise UsageError where tokens are of another tokenizer than a model's, its `own` where somebody has read it; a
    model without any takes theirs.
    """
    own = own or _tokenizer_of(model, **opening)[0]
    if own is not None and not alike(tokens.load_tokenizer(), own):
        raise UsageError(
            f"{tokens.folder} was not tokenised with the tokenizer of {model}",
            "Give the text files instead of the folder, or tokenise them again: gptkit tokenize FILE "
            f"FOLDER --tokenizer {model}.",
        )


# --- texts ------------------------------------------------------------------------------------------------------------


class Text:
    """A file of text, read piece by piece: each is a part of a document, with whether the document ends with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.digest = path, 0, hashlib.sha256()

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(text, last): of a .jsonl each line is a document, of anything else the file. Raises InvalidInput."""
        self.read, self.digest = 0, hashlib.sha256()
        try:
            yield from self._lines() if self.path.suffix == ".jsonl" else self._whole()
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{self.path} is not text in UTF-8: {error.reason} before byte {self.read:,}",
                "Convert the file to UTF-8, for example: iconv -f LATIN1 -t UTF-8 FILE > NEW",
            ) from error

    def _take(self, data: bytes) -> bytes:
        self.read += len(data)
        self.digest.update(data)
        return data

    def _whole(self) -> Iterator[tuple[str, bool]]:
        decode, kept = codecs.getincrementaldecoder("utf-8")().decode, ""
        with self.path.open("rb") as file:
            while data := self._take(file.read(_PIECE)):
                if seam := _seam(kept, len(kept) > _PIECE):  # only now, when more follows
                    yield kept[:seam], False
                kept = kept[seam:] + decode(data)
        yield kept + decode(b"", True), True

    def _lines(self) -> Iterator[tuple[str, bool]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not self._take(line).strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    text = None
                if not isinstance(text, str):
                    raise InvalidInput(
                        f"{self.path}, line {number:,} is not a JSON object with a string in the field text",
                        'Write one document per line: {"text": "…"}',
                    )
                first = 0
                while len(text) - first > _PIECE:
                    end = first + _seam(text[first : first + _PIECE], True)
                    yield text[first:end], False
                    first = end
                yield text[first:], True


def _seam(text: str, must: bool) -> int:
    """Where a text is cut, 0 for nowhere: at its last line's end; where it must be, else at a word's, or at its own."""
    for kind in _SEAMS if must else _SEAMS[:1]:
        if found := [each.start() for each in kind.finditer(text)]:
            return found[-1]
    return len(text) if must else 0


def encode(coder: Tokenizer, piece: str, first: bool) -> tuple[list[int], list[int]]:
    """The ids of a piece of a document, without special tokens, and where in it, in characters, each one's part ends.
    Of one that is not the first they are as they stand behind a letter, without what begins a text (as ▁).
    """
    if not first:
        letter, (ids, ends) = coder.encode(_LETTER, special=False), coder.encode_with_ends(_LETTER + piece)
        if ids[: len(letter)] == letter:
            return ids[len(letter) :], [end - len(_LETTER) for end in ends[len(letter) :]]
    return coder.encode_with_ends(piece)


def _train(texts: Iterable[str], vocabulary: int) -> bytes:
    """The tokenizer.json of a byte-level BPE (Sennrich et al. 1508.07909, on bytes as GPT-2's) of so many tokens at the
    most: every byte, one that ends a text, and pairs in the order of how often they are met.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # here, because few need it

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": [_END], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    return made.to_str(pretty=True).encode()


def _tokenizer_files(
    texts: Sequence[Text], named: str | Path | None, vocabulary: int | None, offline: bool
) -> dict[str, bytes]:
    """The files of a tokenizer that is named, or of one that is trained on the texts.

    `BYTES` names one whose tokens are the 256 bytes and the end of a text.
    """
    if vocabulary is not None and named is not None:
        raise UsageError(
            "--vocabulary and --tokenizer cannot be combined, because --tokenizer determines the vocabulary",
            "Leave out one of them.",
        )
    if named is None or named == BYTES:
        wanted = SMALLEST if named == BYTES else _VOCABULARY if vocabulary is None else vocabulary
        if wanted < SMALLEST:
            raise UsageError(
                f"--vocabulary {wanted} is too small for a byte-level tokenizer",
                f"Use at least {SMALLEST} tokens: 256 for the bytes, and one for the end of a text.",
            )
        read = () if named == BYTES else (piece for text in texts for piece, _ in text.pieces())
        settings = {"bos_token": _END, "eos_token": _END, "clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": _train(read, wanted),
            "tokenizer_config.json": json_bytes({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}),
            "generation_config.json": json_bytes({"bos_token_id": 0, "eos_token_id": 0}),
        }
    path = Path(named)
    if path.is_file() and path.suffix == ".json":
        try:
            Tokenizer(path)
        except InvalidInput as error:
            raise InvalidInput(error.message, "Give a tokenizer.json, or a model that has one.") from error
        beside = token_files(path.parent) if path.name == "tokenizer.json" else []
        return {**{each.name: each.read_bytes() for each in beside}, "tokenizer.json": path.read_bytes()}
    found, folder, inside = _tokenizer_of(named, offline)
    if found is None:
        raise UsageError(f"{named} has no tokenizer", "Give a tokenizer.json, or leave out --tokenizer to train one.")
    files = {**{each.name: each.read_bytes() for each in (token_files(folder) if folder else ())}, **inside}
    files.setdefault("generation_config.json", json_bytes({"eos_token_id": list(found.eos_ids)}))
    return {**files, "tokenizer.json": files.get("tokenizer.json") or found.to_json().encode()}


def _tokenizer_of(
    model: str | Path, offline: bool = False, allow_pickle: bool = False
) -> tuple[Tokenizer | None, Path | None, Mapping[str, bytes]]:
    """A model's tokenizer, where it has one, and what it was read from: a folder, or texts in a file, as a GGUF's."""
    where = resolve(model, weights=False, companions=True, offline=offline).path
    inside: Mapping[str, bytes] = {}
    if where is not None and where.is_file():
        inside = open_checkpoint(model, headers_only=True, allow_pickle=allow_pickle).texts
    folder = None if where is None or where.is_file() else where
    return (load_tokenizer(folder or Path(), inside) if folder or inside else None), folder, inside


def tokenize(
    files: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocabulary: int | None = None,
    force: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
) -> TokenFile:
    """Write texts as a folder of tokens, which appears complete or not at all.

    Args:
        files: one or several files in UTF-8. A file is one document, except that every line of a .jsonl file is a
            document: an object with the key `text`.
        out: the folder to make.
        tokenizer: a model whose tokenizer to use, a tokenizer.json, or "bytes", which has 257 tokens: the bytes, and
            the end of a text. By default a byte-level BPE is trained on the texts.
        vocabulary: the largest number of tokens of a tokenizer that is trained; by default 4,096.
        force: replace a folder that gptkit wrote.
        offline: use local files and the hub's cache only.
        progress: called with the number of bytes read since the last call, and the bytes of all texts.

    Raises:
        UsageError: `out` exists, the model has no tokenizer, or the vocabulary is too small.
        InvalidInput: a file is not a text in UTF-8, the tokenizer is invalid, or the texts have no tokens.
        GptkitError: the disk is full; nothing is published.
    """
    texts = [Text(path) for path in paths_of(files)]
    if not texts:
        raise UsageError(
            "no text file was given", "Give at least one file, for example: gptkit tokenize play.txt play-tokens"
        )
    with Staging(Path(out), force) as staging:
        try:
            for name, data in _tokenizer_files(texts, tokenizer, vocabulary, offline).items():
                (staging.path / name).write_bytes(data)
            found = _write(texts, staging.path, progress or (lambda done, total: None))
            (staging.path / DESCRIPTION).write_bytes(json_bytes(msgspec.to_builtins(found)))
        except OSError as error:
            raise failed("write", staging.target, error) from error
        staging.commit({"gptkit": __version__, "format": "tokens"})
    return TokenFile(Path(out), **msgspec.structs.asdict(found))


def _write(texts: Sequence[Text], folder: Path, progress: Progress) -> _Description:
    """Write every document's tokens and its end."""
    coder = load_tokenizer(folder)
    assert coder is not None, "it was written just now"
    kind, total = np.dtype("<u2" if coder.vocab_size <= 2**16 else "<u4"), sum(_size(text.path) for text in texts)
    before, after = around(coder, eos_ids(folder, coder))
    count = documents = largest = 0
    with (folder / TOKENS).open("xb") as tokens, (folder / DOCUMENTS).open("xb") as bounds:
        for text in texts:
            begun, seen = False, 0
            for piece, last in text.pieces():
                ids = [*([] if begun else before), *encode(coder, piece, not begun)[0]] if piece else []
                begun = begun or bool(piece)
                ids += after if begun and last else []
                if ids:
                    largest = max(largest, *ids)
                    if largest > np.iinfo(kind).max:
                        raise InvalidInput(
                            f"the tokenizer encoded a token as id {largest:,}, but its vocabulary has only "
                            f"{coder.vocab_size:,} tokens"
                        )
                    tokens.write(np.array(ids, kind).tobytes())
                    count += len(ids)
                if begun and last:
                    documents, begun = documents + 1, False
                    bounds.write(np.int64(count).astype("<i8").tobytes())
                progress(text.read - seen, total)
                seen = text.read
    if not count:
        raise InvalidInput(f"these files are empty: {', '.join(str(text.path) for text in texts)}")
    sources = tuple(_Source(str(text.path), text.read, text.digest.hexdigest()) for text in texts)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    nbytes, vocabulary = sum(each.bytes for each in sources), max(coder.vocab_size, largest + 1)
    return _Description(count, documents, nbytes, kind.str, vocabulary, digest, sources)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def around(coder: Tokenizer, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before a text, and the one that ends a text where there is one."""
    plain, whole = coder.encode("a", special=False), coder.encode("a")
    places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(places, 0)], list(ends[:1])


# --- windows ----------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Sequences of tokens: ids and targets, each (B, T), where a target is the token behind, or `NOWHERE`. documents:
    the number of the document that each is of, (B, T); None where no sequence has two that are to be kept apart.
    """

    ids: _Ids
    targets: _Ids
    documents: _Ids | None

    def part(self, number: int, of: int) -> Windows:
        """One of so many shares of the sequences, which differ by one at the most."""
        first, end = (len(self.ids) * each // of for each in (number, number + 1))
        return Windows(*(None if each is None else each[first:end] for each in self))  # type: ignore[arg-type]

    @property
    def counted(self) -> int:
        """How many targets there are."""
        return int((self.targets != NOWHERE).sum())


@dataclass(frozen=True)
class Stretch:
    """Tokens `first` to `end` of a file, as windows of `context` of them, side by side.

    Which windows a step has is a function of the seed and the step alone: whoever takes part, however many they are,
    and wherever it was resumed. Each window is met once an epoch, in an order of its own.

    apart: whether documents in one window are kept apart, and no token has another document's for its target.
    """

    tokens: TokenFile
    first: int
    end: int
    context: int
    apart: bool = True

    def __len__(self) -> int:
        return max(0, (self.end - self.first - 1) // self.context)

    def step(self, number: int, count: int, seed: int) -> Windows:
        """The `count` windows of a step."""
        starts = []
        for each in range(number * count, (number + 1) * count):
            epoch, place = divmod(each, len(self))
            starts.append(_starts(self.end - self.first - 1, self.context, seed, epoch)[place])
        return self._at(np.array(starts))

    def spread(self, most: int) -> Windows:
        """At most so many windows, the same each time, evenly from the first to the last."""
        count = min(most, len(self))
        return self._at(np.linspace(0, len(self) - 1, count).astype(np.int64) * self.context)

    def _at(self, starts: _Ids) -> Windows:
        rows = np.stack([self.tokens.read(self.first + int(start), self.context + 1) for start in starts])
        ids, targets = rows[:, :-1], rows[:, 1:].copy()
        if not self.apart:
            return Windows(ids, targets, None)
        places = self.first + starts[:, None] + np.arange(self.context + 1)
        documents = np.searchsorted(self.tokens.ends, places, side="right")
        targets[documents[:, 1:] != documents[:, :-1]] = NOWHERE
        several = bool((documents[:, 0] != documents[:, -2]).any())
        return Windows(ids, targets, documents[:, :-1] if several else None)


@lru_cache(maxsize=4)
def _starts(tokens: int, context: int, seed: int, epoch: int) -> _Ids:
    """Where the windows of an epoch begin, in the order in which they are met."""
    random = np.random.default_rng([seed, epoch])
    number, spare = divmod(tokens, context)
    return random.permutation(number) * context + random.integers(0, spare + 1)
