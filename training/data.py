"""Tokenise texts into a folder, and read the windows of tokens for a step of training. This module needs no torch.

A folder of tokens has

    tokens.bin       the ids of all documents, one document after the other, as little-endian uint16 or uint32
    documents.bin    the end of every document in tokens.bin, counted in tokens, as little-endian int64
    tokens.json      counts, the dtype, and the sha256 of the tokenizer and of every text (`TokenFile`)
    tokenizer.json   and the other files of the tokenizer
    manifest.json    the sha256 of all these files, which is checked whenever the folder is opened

A document starts with the special tokens that its tokenizer puts before a text, and ends with the end-of-text token, if
the tokenizer has such tokens. Texts are read and written in pieces, so that memory does not depend on their size. A
document that is longer than a piece is cut before a line break that follows a letter or digit, or before a space if the
line is too long. Tokenizers that split texts into lines or words never merge characters across such a place.
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
from typing import Any, NamedTuple, Unpack

import msgspec
import numpy as np

from ..converter.checkpoint import open_checkpoint
from ..converter.files import failed, read_small
from ..converter.manifest import check_manifest, manifest_of
from ..converter.names import json_bytes
from ..converter.opening import Opening
from ..converter.publish import Staging
from ..converter.resolve import resolve
from ..converter.tokenizer import Tokenizer, eos_ids, load_tokenizer, token_files
from ..converter.vocabulary import Vocabulary
from ..display import Record
from ..errors import InvalidInput, UsageError
from ..version import __version__

_Ids = np.ndarray[Any, np.dtype[np.int64]]
ProgressCallback = Callable[[int, int], None]

TOKENS, DOCUMENTS, DESCRIPTION = "tokens.bin", "documents.bin", "tokens.json"
_VOCABULARY = 4096
"""The default number of tokens in the vocabulary of a tokenizer that is trained on the texts."""
_END = "<|endoftext|>"  # the end-of-text token of a tokenizer that is trained here; its id is 0
SMALLEST = 257  # the smallest vocabulary: all bytes and `_END`
BYTES = "bytes"
"""The name of the tokenizer with the smallest vocabulary, whose tokens are single bytes."""
_PIECE = 2**20  # bytes of text that are tokenised at once
_SEAMS = tuple(re.compile(rf"(?<=[^\W_])(?={end})") for end in ("\n", " "))
_LETTER = "a"
SAMPLE = "The quick brown fox jumps over 13 lazy dogs, and doesn't care.\n\tÀ la carte: naïve 東京 🙂\n"
"""A text that two tokenizers must encode to the same ids, so that gptkit treats them as the same tokenizer."""
NOWHERE = -100
"""The target of a position that does not count in the loss, because the next token belongs to another document."""


class _Source(msgspec.Struct, frozen=True):
    """A text file as it was when it was tokenised."""

    name: str  # the path of the text file
    bytes: int
    sha256: str


class _Description(msgspec.Struct, frozen=True):
    """The content of tokens.json, with the fields of `TokenFile`."""

    tokens: int
    documents: int
    bytes: int
    dtype: str
    vocabulary: int
    tokenizer: str
    sources: tuple[_Source, ...]


@dataclass(frozen=True)
class TokenFile(Record):
    """An opened folder of tokens, which `tokenize` wrote."""

    JSON = "folder=name tokens documents bytes dtype vocabulary tokenizer sources=texts"

    folder: Path
    tokens: int
    """The number of tokens."""
    documents: int
    """The number of documents."""
    bytes: int
    """The size of the texts in UTF-8, in bytes."""
    dtype: str
    """The dtype of the ids in tokens.bin."""
    vocabulary: int
    """The size of the vocabulary: all ids are below it."""
    tokenizer: str
    """The sha256 of tokenizer.json."""
    sources: tuple[_Source, ...] = field(repr=False)
    """The texts."""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def texts(self) -> list[Any]:
        return [msgspec.to_builtins(source) for source in self.sources]

    @property
    def digest(self) -> str | None:
        """The sha256 of tokens.bin, from the manifest."""
        entry: dict[str, Any] = manifest_of(self.folder).get("files", {}).get(TOKENS, {})
        return entry.get("sha256")

    @cached_property
    def ends(self) -> _Ids:
        """The end of every document as an index into the tokens, (documents,)."""
        return np.fromfile(self.folder / DOCUMENTS, "<i8")

    @cached_property
    def _file(self) -> tuple[int, os.stat_result]:
        fd = os.open(self.folder / TOKENS, os.O_RDONLY | os.O_CLOEXEC)
        return fd, os.fstat(fd)

    def read(self, first: int, count: int) -> _Ids:
        """Return `count` ids from the token `first` on. Raise InvalidInput if the file has become shorter."""
        # The file is not mapped into memory, because the process would be killed if somebody truncated it.
        kind = np.dtype(self.dtype)
        data = os.pread(self._file[0], count * kind.itemsize, first * kind.itemsize)
        if len(data) < count * kind.itemsize:
            raise self._changed("it is shorter")
        return np.frombuffer(data, kind).astype(np.int64)

    def require_unchanged(self) -> None:
        """Raise InvalidInput if tokens.bin has changed since it was opened (its size, modification time or inode)."""
        before = self._file[1]
        try:
            now = (self.folder / TOKENS).stat()
        except OSError as error:
            raise self._changed(str(error.strerror)) from error
        if any(
            getattr(before, attribute) != getattr(now, attribute) for attribute in ("st_size", "st_mtime_ns", "st_ino")
        ):
            raise self._changed("its size, time or inode is different")

    def _changed(self, why: str) -> InvalidInput:
        message = f"{self.folder / TOKENS} changed since it was opened: {why}"
        return InvalidInput(
            message,
            "Tokenise the text again into a new folder: gptkit tokenize FILE FOLDER. gptkit check "
            "FOLDER lists the changed files.",
        )

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of these tokens. Raise InvalidInput if it is damaged."""
        tokenizer = load_tokenizer(self.folder)
        assert tokenizer is not None, "tokenize writes one"
        return tokenizer


def is_tokens(folder: Path) -> bool:
    """Return whether a path is a folder that `tokenize` wrote."""
    return (folder / DESCRIPTION).is_file()


def open_tokens(folder: Path) -> TokenFile:
    """Open a folder of tokens.

    Raise InvalidInput if it is not such a folder, or if a file does not have the hash that its manifest states.
    """
    hint = "Create such a folder with gptkit tokenize."
    if not is_tokens(folder):
        raise InvalidInput(f"{folder} is not a folder written by gptkit tokenize: it has no {DESCRIPTION}", hint)
    if problems := check_manifest(folder):
        raise InvalidInput(f"the files in {folder} do not match its manifest.json: {problems[0]}", hint)
    try:
        description = msgspec.json.decode(read_small(folder / DESCRIPTION, 2**26), type=_Description)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInput(f"{folder / DESCRIPTION} cannot be read: {error}", hint) from error
    return TokenFile(folder, **msgspec.structs.asdict(description))


def paths_of(data: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return one path or several as a list of paths."""
    return [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]


def same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether gptkit treats two tokenizers as the same: they probably encode all texts to the same ids.

    This is certain if their tokenizer.json files are equal. A tokenizer from a GGUF file has another tokenizer.json, so
    it is enough that the vocabularies are equal and that both encode `SAMPLE` to the same ids.
    """
    first, second = one.to_json(), other.to_json()
    if first == second:
        return True
    vocabularies = [Vocabulary(json.loads(content), {}).tokens for content in (first, second)]
    return vocabularies[0] == vocabularies[1] and one.encode(SAMPLE) == other.encode(SAMPLE)


def require_tokenizer(
    tokens: TokenFile, model: str | Path, own: Tokenizer | None = None, **opening: Unpack[Opening]
) -> None:
    """Raise UsageError if tokens were made with another tokenizer than the model's.

    A model without a tokenizer accepts all tokens.

    Args:
        tokens: the tokens.
        model: the model as the user named it, for opening it and for the message.
        own: the tokenizer of the model, if it is already loaded.
        opening: how the model is opened.
    """
    own = own or _tokenizer_of(model, **opening)[0]
    if own is not None and not same_tokenizer(tokens.load_tokenizer(), own):
        raise UsageError(
            f"{tokens.folder} was not tokenised with the tokenizer of {model}",
            "Give the text files instead of the folder, or tokenise them again: gptkit tokenize FILE "
            f"FOLDER --tokenizer {model}.",
        )


# --- texts ------------------------------------------------------------------------------------------------------------


class TextFile:
    """A text file that is read in pieces.

    Attributes:
        path: the path of the file.
        read: the number of bytes read so far.
        digest: a hashlib object with the SHA-256 of these bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.digest = path, 0, hashlib.sha256()

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield pairs of a piece of text and whether this piece is the last one of its document.

        Every line of a .jsonl file is a document. Any other file is one document. Raise InvalidInput if the file is not
        text in UTF-8, or if a line of a .jsonl file is not valid.
        """
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

    def _counted_bytes(self, data: bytes) -> bytes:
        """Return `data` unchanged, and update `read` and `digest` with it."""
        self.read += len(data)
        self.digest.update(data)
        return data

    def _whole(self) -> Iterator[tuple[str, bool]]:
        decode, rest = codecs.getincrementaldecoder("utf-8")().decode, ""
        with self.path.open("rb") as file:
            while data := self._counted_bytes(file.read(_PIECE)):
                if end := _cut(rest, len(rest) > _PIECE):  # cut only when more text follows
                    yield rest[:end], False
                rest = rest[end:] + decode(data)
        yield rest + decode(b"", True), True

    def _lines(self) -> Iterator[tuple[str, bool]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not self._counted_bytes(line).strip():
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
                start = 0
                while len(text) - start > _PIECE:
                    end = start + _cut(text[start : start + _PIECE], True)
                    yield text[start:end], False
                    start = end
                yield text[start:], True


def _cut(text: str, required: bool) -> int:
    """Return the index at which to cut a text into two pieces: before the last line break after a letter or digit.

    Without such a line break, the result is 0, unless a cut is `required`. Then it is the index of the last space after
    a letter or digit, or the length of the text if there is no such space.
    """
    for pattern in _SEAMS if required else _SEAMS[:1]:
        if ends := [match.start() for match in pattern.finditer(text)]:
            return ends[-1]
    return len(text) if required else 0


def encode_piece(coder: Tokenizer, piece: str, first: bool) -> tuple[list[int], list[int]]:
    """Return the token ids of a piece of a document, and for every token the index of the character after it.

    The ids do not include special tokens. Some tokenizers encode the beginning of a text differently, for example with
    ▁ in front. If the piece is not the `first` one of its document, gptkit therefore puts a letter before it, and
    removes the letter's token again.
    """
    if not first:
        letter_ids, (ids, ends) = coder.encode(_LETTER, special=False), coder.encode_with_ends(_LETTER + piece)
        if ids[: len(letter_ids)] == letter_ids:
            return ids[len(letter_ids) :], [end - len(_LETTER) for end in ends[len(letter_ids) :]]
    return coder.encode_with_ends(piece)


def _trained_bpe(texts: Iterable[str], vocabulary: int) -> bytes:
    """Train a byte-level BPE tokenizer (Sennrich et al. 1508.07909, on bytes as GPT-2's). Return its tokenizer.json.

    It has at most `vocabulary` tokens: the end-of-text token, all bytes, and merged pairs, the most frequent first.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # a slow import that few calls need

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": [_END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    return tokenizer.to_str(pretty=True).encode()


def _tokenizer_files(
    texts: Sequence[TextFile], source: str | Path | None, vocabulary: int | None, offline: bool
) -> dict[str, bytes]:
    """Return the files of a given tokenizer, or of a new one that is trained on the texts.

    Args:
        texts: the texts on which a new tokenizer is trained, if `source` is None.
        source: the tokenizer: a model, a tokenizer.json, or `BYTES`.
        vocabulary: the size of a new tokenizer.
        offline: do not use the network.

    Raises:
        UsageError: the arguments contradict each other, the vocabulary is too small, or the model has no tokenizer.
        InvalidInput: the tokenizer or a text is not valid.
    """
    if vocabulary is not None and source is not None:
        raise UsageError(
            "--vocabulary and --tokenizer cannot be combined, because --tokenizer determines the vocabulary",
            "Leave out one of them.",
        )
    if source is None or source == BYTES:
        return _new_tokenizer_files(() if source == BYTES else texts, SMALLEST if source == BYTES else vocabulary)
    file = Path(source)
    if file.is_file() and file.suffix == ".json":
        try:
            Tokenizer(file)
        except InvalidInput as error:
            raise InvalidInput(error.message, "Give a tokenizer.json, or a model that has one.") from error
        companions = token_files(file.parent) if file.name == "tokenizer.json" else []
        return {**_contents(companions), "tokenizer.json": file.read_bytes()}
    coder, folder, texts_inside = _tokenizer_of(source, offline=offline)
    if coder is None:
        raise UsageError(f"{source} has no tokenizer", "Give a tokenizer.json, or leave out --tokenizer to train one.")
    files = {**_contents(token_files(folder) if folder else ()), **texts_inside}
    files.setdefault("generation_config.json", json_bytes({"eos_token_id": list(coder.eos_ids)}))
    return {**files, "tokenizer.json": files.get("tokenizer.json") or coder.to_json().encode()}


def _contents(files: Iterable[Path]) -> dict[str, bytes]:
    """Return the contents of files by name."""
    return {file.name: file.read_bytes() for file in files}


def _new_tokenizer_files(texts: Sequence[TextFile], vocabulary: int | None) -> dict[str, bytes]:
    """Return the files of a tokenizer that is trained on the texts. Raise UsageError if the vocabulary is too small."""
    size = _VOCABULARY if vocabulary is None else vocabulary
    if size < SMALLEST:
        raise UsageError(
            f"--vocabulary {size} is too small for a byte-level tokenizer",
            f"Use at least {SMALLEST} tokens: 256 for the bytes, and one for the end of a text.",
        )
    settings = {"bos_token": _END, "eos_token": _END, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": _trained_bpe((piece for text in texts for piece, _ in text.pieces()), size),
        "tokenizer_config.json": json_bytes({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}),
        "generation_config.json": json_bytes({"bos_token_id": 0, "eos_token_id": 0}),
    }


def _tokenizer_of(
    model: str | Path, **opening: Unpack[Opening]
) -> tuple[Tokenizer | None, Path | None, Mapping[str, bytes]]:
    """Return the tokenizer of a model, and where its files are.

    Returns:
        The tokenizer, or None if the model has none; the folder with the tokenizer's files, or None; and the contents
        of these files by name, if they are stored inside another file such as a GGUF.
    """
    path = resolve(model, weights=False, companions=True, **opening).path
    texts_inside: Mapping[str, bytes] = {}
    if path is not None and path.is_file():
        texts_inside = open_checkpoint(model, headers_only=True, **opening).texts
    folder = None if path is None or path.is_file() else path
    return (load_tokenizer(folder or Path(), texts_inside) if folder or texts_inside else None), folder, texts_inside


def tokenize(
    files: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocabulary: int | None = None,
    force: bool = False,
    offline: bool = False,
    progress: ProgressCallback | None = None,
) -> TokenFile:
    """Tokenise texts into a folder, which appears complete or not at all.

    Args:
        files: one or several text files in UTF-8. A file is one document, but every line of a .jsonl file is a
            document: a JSON object with the field `text`.
        out: the folder to make.
        tokenizer: a model whose tokenizer to use, or a tokenizer.json, or "bytes" for a tokenizer of 257 tokens (all
            bytes and an end-of-text token). By default a byte-level BPE tokenizer is trained on the texts.
        vocabulary: the largest number of tokens of a tokenizer that is trained; by default 4,096.
        force: replace a folder that gptkit wrote.
        offline: use local files and the hub's cache only.
        progress: called after every piece of text, with its number of bytes and the number of bytes of all texts.

    Raises:
        UsageError: `out` exists; the model has no tokenizer; the vocabulary is too small.
        InvalidInput: a file is not text in UTF-8; the tokenizer is not valid; the texts have no tokens.
        GptkitError: the disk is full. Nothing is published.
    """
    texts = [TextFile(path) for path in paths_of(files)]
    if not texts:
        raise UsageError(
            "no text file was given", "Give at least one file, for example: gptkit tokenize play.txt play-tokens"
        )
    with Staging(Path(out), force) as staging:
        try:
            for name, data in _tokenizer_files(texts, tokenizer, vocabulary, offline).items():
                (staging.path / name).write_bytes(data)
            description = _write(texts, staging.path, progress or (lambda done, total: None))
            (staging.path / DESCRIPTION).write_bytes(json_bytes(msgspec.to_builtins(description)))
        except OSError as error:
            raise failed("write", staging.target, error) from error
        staging.commit({"gptkit": __version__, "format": "tokens"})
    return TokenFile(Path(out), **msgspec.structs.asdict(description))


def _write(texts: Sequence[TextFile], folder: Path, progress: ProgressCallback) -> _Description:
    """Tokenise the texts into tokens.bin and documents.bin in a folder, and return the content for tokens.json."""
    coder = load_tokenizer(folder)
    assert coder is not None, "it was written just now"
    dtype, total = np.dtype("<u2" if coder.vocab_size <= 2**16 else "<u4"), sum(_size(text.path) for text in texts)
    before, after = boundary_ids(coder, eos_ids(folder, coder))
    count = documents = largest = 0
    with (folder / TOKENS).open("xb") as tokens, (folder / DOCUMENTS).open("xb") as bounds:
        for text in texts:
            started, reported = False, 0
            for piece, last in text.pieces():
                ids = [*([] if started else before), *encode_piece(coder, piece, not started)[0]] if piece else []
                started = started or bool(piece)
                ids += after if started and last else []
                if ids:
                    largest = max(largest, *ids)
                    if largest > np.iinfo(dtype).max:
                        raise InvalidInput(
                            f"the tokenizer encoded a token as id {largest:,}, but its vocabulary has only "
                            f"{coder.vocab_size:,} tokens"
                        )
                    tokens.write(np.array(ids, dtype).tobytes())
                    count += len(ids)
                if started and last:
                    documents, started = documents + 1, False
                    bounds.write(np.int64(count).astype("<i8").tobytes())
                progress(text.read - reported, total)
                reported = text.read
    if not count:
        raise InvalidInput(f"these files are empty: {', '.join(str(text.path) for text in texts)}")
    sources = tuple(_Source(str(text.path), text.read, text.digest.hexdigest()) for text in texts)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    nbytes, vocabulary = sum(source.bytes for source in sources), max(coder.vocab_size, largest + 1)
    return _Description(count, documents, nbytes, dtype.str, vocabulary, digest, sources)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def boundary_ids(coder: Tokenizer, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens at the beginning of every document, and of those at its end.

    At the beginning are the special tokens that the tokenizer puts before a text. At the end is the first of the
    end-of-text ids in `ends`, if there is one.
    """
    plain, whole = coder.encode("a", special=False), coder.encode("a")
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return whole[: next(starts, 0)], list(ends[:1])


# --- windows ----------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Training or evaluation data: B sequences of T tokens. All arrays have the shape (B, T)."""

    ids: _Ids
    targets: _Ids
    """For every token, the id of the next token. It is `NOWHERE` where the next token does not count in the loss."""
    documents: _Ids | None
    """For every token, the number of its document. None if no sequence has several documents to be separated."""

    def part(self, number: int, of: int) -> Windows:
        """Divide the sequences into `of` parts, and return the part with this number, from 0.

        The sizes of the parts differ by at most one sequence.
        """
        first, end = (len(self.ids) * index // of for index in (number, number + 1))
        return Windows(*(None if array is None else array[first:end] for array in self))  # type: ignore[arg-type]

    @property
    def counted(self) -> int:
        """The number of tokens that have a target."""
        return int((self.targets != NOWHERE).sum())


@dataclass(frozen=True)
class Stretch:
    """A range of the tokens in a file, such as all training tokens. It is divided into windows.

    The windows of a training step depend only on the seed and the number of the step. They do not depend on the number
    of processes or on where a run was resumed. An epoch reads every window once, and every epoch has another order.
    """

    tokens: TokenFile
    first: int  # the index of the first token
    end: int  # the index of the last token, plus 1
    context: int  # tokens per window
    apart: bool = True  # whether documents are separated: no token attends to, or predicts, another document's token

    def __len__(self) -> int:
        return max(0, (self.end - self.first - 1) // self.context)

    def step(self, number: int, count: int, seed: int) -> Windows:
        """Return the `count` windows of the training step with this number."""
        starts = []
        for index in range(number * count, (number + 1) * count):
            epoch, place = divmod(index, len(self))
            starts.append(_starts(self.end - self.first - 1, self.context, seed, epoch)[place])
        return self._at(np.array(starts))

    def spread(self, most: int) -> Windows:
        """Return at most `most` windows, spread evenly over the range. They are the same in every call."""
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
    """Return the token indices at which the windows of an epoch start, in the order in which training reads them.

    Args:
        tokens: the number of tokens in the range that is divided into windows.
        context: the number of tokens per window.
        seed: the seed of the order.
        epoch: the number of the epoch, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    number, rest = divmod(tokens, context)
    return generator.permutation(number) * context + generator.integers(0, rest + 1)
