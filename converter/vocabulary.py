"""Reduce the vocabulary of a tokenizer to selected tokens, and rewrite the tokenizer's files.

A text that consists of selected tokens is encoded as before. Other texts are encoded to more and shorter tokens. For
this, some tokens must be kept in addition to the selected ones:

BPE        the tokens that arise while a selected token is merged from characters. A merge is kept if its two parts and
           its result are kept. Merges are applied by rank, so the other merges give the same tokens as before.
Unigram    the piece with the lowest score, from which the cost of an unknown character follows. The best segmentation
           is still the best, because removing pieces only removes other segmentations.
WordPiece  none: the longest matching piece is still the longest.

All single characters are kept (or the byte tokens, if the vocabulary spells unknown characters as bytes). So are
special tokens, and every token that a post-processor, config.json or generation_config.json names.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..architectures.config import parse_config_text
from ..errors import InvalidInput
from .names import CONFIG, json_bytes
from .tokenizer import Tokenizer, load_tokenizer, token_files

TOKENIZER, SETTINGS, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_OTHER_FORMS = ("tokenizer.model*", "spiece.model", "tekken.json", "*.tiktoken", "token_mappings.json")
"""Tokenizer files that gptkit cannot rewrite. They are removed, because they would still have the old vocabulary."""

_ID_FIELD = re.compile(r"\w*_token_ids?|(begin_)?suppress_tokens|bad_words_ids")
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space; as byte tokens it would not be decoded to one

_Table = Mapping[int, int]  # old ids -> new ids, of the kept tokens


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a tokenizer, with the files that name its tokens."""

    data: dict[str, Any]  # tokenizer.json, parsed
    files: Mapping[str, bytes]  # the tokenizer's files, by name
    config: str | None = None  # the text of config.json

    @cached_property
    def _pieces(self) -> dict[str, int]:
        vocab = self.data["model"]["vocab"]
        return {entry[0]: i for i, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)

    @property
    def kind(self) -> str:
        """Return "BPE", "Unigram", "WordPiece" or "WordLevel"."""
        return str(self.data["model"]["type"])

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Return the id of every token, including added tokens, by the token's text in the vocabulary."""
        return self._pieces | {token["content"]: token["id"] for token in self.data["added_tokens"]}

    @cached_property
    def names(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.tokens.items()}

    # --- what has to stay ---

    def required(self) -> dict[int, str]:
        """Return the ids of the tokens that must always be kept, each with the reason in words."""
        reasons = {self.tokens[token]: "a character of its own" for token in self._characters()}
        model = self.data["model"]
        unknown = [self._pieces[model["unk_token"]]] if model.get("unk_token") in self._pieces else []
        if self.kind == "Unigram":
            scores = [score for _, score in model["vocab"]]
            unknown += [scores.index(min(scores)), *([model["unk_id"]] if model.get("unk_id") is not None else [])]
        reasons |= dict.fromkeys(unknown, "what stands for the unknown")
        reasons |= {entry["id"]: "a special token" for entry in self.data["added_tokens"] if entry["special"]}
        reasons |= dict.fromkeys((i for _, ids in _pipeline_ids(self.data) for i in ids), "the tokenizer adds it")
        for name, data in self._settings().items():
            reasons |= {i: f"{name} names it" for i in ids_in(data) if i in self.names}
            if name == SETTINGS:
                reasons |= {self.tokens[t]: f"{name} names it" for t in named_in(data) if t in self.tokens}
        return reasons

    def _characters(self) -> Iterator[str]:
        """Yield the tokens that are single characters, or the byte tokens if characters are spelled as bytes."""
        model = self.data["model"]
        if model.get("byte_fallback") and self._pieces.keys() >= _BYTES:
            yield from _BYTES
            yield from {_SPACE} & self._pieces.keys()
            return
        prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
        for token in self._pieces:
            # A prefix or suffix may itself be the whole token: then it is a character.
            if len(token) == 1 or len(token.removeprefix(prefix).removesuffix(suffix)) == 1:
                yield token

    def _settings(self) -> dict[str, Any]:
        """Return the parsed files with fields that have token ids, by name, such as generation_config.json."""
        names = [name for name in (SETTINGS, _GENERATION) if name in self.files]
        settings = {name: parse_config_text(self.files[name], name) for name in names}
        return settings | ({} if self.config is None else {CONFIG: parse_config_text(self.config, CONFIG)})

    def closed(self, ids: Iterable[int]) -> set[int]:
        """Return these ids and, for BPE, the ids of all tokens from which their tokens are merged.

        The tokens of `required` are not added.
        """
        closure = set(ids)
        if self.kind != "BPE":
            return closure
        added = {entry["id"] for entry in self.data["added_tokens"]}
        todo = [self.names[i] for i in closure - added if i in self.names]
        while todo:
            for part in self._parts(todo.pop()):
                if self._pieces[part] not in closure:
                    closure.add(self._pieces[part])
                    todo.append(part)
        return closure

    @cached_property
    def _parts(self) -> Callable[[str], set[str]]:
        model = self.data["model"]
        merges = [merge for merge, _ in self._merges()]
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            parts_of: dict[str, set[str]] = {}
            for pair, result in self._merges():
                parts_of.setdefault(result, set()).update(pair)
            return lambda token: parts_of.get(token, set())
        ranks = {merge: rank for rank, merge in enumerate(merges)}
        return lambda token: {part for part in passed_through(token, ranks) if part in self._pieces}

    def _merges(self) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield the merges of BPE in the order of their ranks, as ((left part, right part), result)."""
        prefix = self.data["model"].get("continuing_subword_prefix") or ""
        for merge in self.data["model"]["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            yield (left, right), left + right.removeprefix(prefix)

    # --- the files for fewer tokens ---

    def cut(self, table: _Table) -> dict[str, bytes | None]:
        """Return the new content of the tokenizer's files, if only the tokens in `table` are kept.

        `table` maps the old id of every kept token to its new id. Files that do not change are left out. A content of
        None means that the file must be removed.
        """
        text = json_bytes(self._tokenizer(table))
        new_ids = Tokenizer(Path(TOKENIZER), text).ids(self.tokens)
        for (token, old), new in zip(self.tokens.items(), new_ids, strict=True):
            if new != table.get(old):
                raise InvalidInput(
                    f"gptkit cannot remove tokens from this tokenizer: {token!r} would get the id {new} instead of "
                    f"{table.get(old)}",
                    "Please report this as a bug, with the name of the tokenizer.",
                )
        files: dict[str, bytes | None] = {TOKENIZER: text}
        for name, data in self._settings().items():
            renumbered = renumber(data, table)
            if name == SETTINGS and isinstance(data.get("added_tokens_decoder"), dict):
                by_id = {int(key): entry for key, entry in data["added_tokens_decoder"].items() if key.isdecimal()}
                renumbered["added_tokens_decoder"] = {str(table[i]): entry for i, entry in by_id.items() if i in table}
            if renumbered != data:
                files[name] = json_bytes(renumbered)
        for name in ("vocab.json", "added_tokens.json"):
            if name in self.files:
                ids = parse_config_text(self.files[name], name)
                files[name] = json_bytes({token: table[i] for token, i in ids.items() if i in table})
        if "merges.txt" in self.files:

            def stays(line: str) -> bool:
                left, space, right = line.partition(" ")
                return line.startswith("#version") or not space or self._all_kept((left, right, left + right), table)

            files["merges.txt"] = "\n".join(filter(stays, self.files["merges.txt"].decode().split("\n"))).encode()
        for name in self.files:
            if any(fnmatchcase(name, pattern) for pattern in _OTHER_FORMS):
                files[name] = None
        return files

    def _tokenizer(self, table: _Table) -> dict[str, Any]:
        model = dict(self.data["model"])
        if isinstance(model["vocab"], list):
            model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if i in table]
            if model.get("unk_id") is not None:
                model["unk_id"] = table[model["unk_id"]]
        else:
            model["vocab"] = {token: table[i] for token, i in model["vocab"].items() if i in table}
        if "merges" in model:
            model["merges"] = [
                merge
                for merge, (pair, result) in zip(model["merges"], self._merges(), strict=True)
                if self._all_kept((*pair, result), table)
            ]
        added = [{**entry, "id": table[entry["id"]]} for entry in self.data["added_tokens"] if entry["id"] in table]
        changed = json.loads(json.dumps({**self.data, "model": None}))  # the parts that are changed in place
        for place, ids in _pipeline_ids(changed):
            place([table[i] for i in ids])
        return {**changed, "added_tokens": added, "model": model}

    def _all_kept(self, tokens: Iterable[str], table: _Table) -> bool:
        return all(self._pieces.get(token, -1) in table for token in tokens)


def read_vocabulary(folder: Path | None, texts: Mapping[str, bytes], config: str | None = None) -> Vocabulary | None:
    """Read the vocabulary of the tokenizer in a folder. Return None if there is no tokenizer.

    `texts` has the content of files by name, which have precedence over those in the folder. `config` is the text of
    config.json.
    """
    files = {} if folder is None else {path.name: path.read_bytes() for path in token_files(folder)}
    files |= {name: text for name, text in texts.items() if name != CONFIG}
    # The tokenizers library refuses broken files, and writes every field in a single form.
    tokenizer = load_tokenizer(folder or Path(), texts if TOKENIZER in texts else None)
    return None if tokenizer is None else Vocabulary(json.loads(tokenizer.to_json()), files, config)


def passed_through(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Return all tokens that arise while BPE merges the characters of `token`, from the characters to `token` itself.

    `ranks` has the rank of every merge. Return an empty set if the merges do not lead to `token`.
    """
    parts, tokens = list(token), set(token)
    while len(parts) > 1:
        candidates = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not candidates:
            return set()
        at = min(candidates)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        tokens.add(parts[at])
    return tokens


def ids_in(data: Mapping[str, Any]) -> set[int]:
    """Return the token ids in fields such as `eos_token_id` of a config."""
    ids: list[int] = []
    _over_ids(data, lambda token_id: ids.append(token_id) or token_id)  # type: ignore[func-returns-value]
    return set(ids)


def renumber(data: Mapping[str, Any], table: _Table) -> dict[str, Any]:
    """Return a config in which token ids are replaced by those in `table`.

    An id that is not in `table` stays unchanged.
    """
    return _over_ids(data, lambda token_id: table.get(token_id, token_id))


def _over_ids(data: Mapping[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    def changed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _over_ids(value, change)
        if not _ID_FIELD.fullmatch(key):
            return value
        if isinstance(value, list):
            return [changed(key, item) for item in value]
        return change(value) if type(value) is int else value

    return {key: changed(key, value) for key, value in data.items()}


def named_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the tokens (as text) that fields of tokenizer_config.json such as `eos_token` name."""
    tokens: set[str] = set()
    for key, value in settings.items():
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            table = isinstance(value, dict) and "content" not in value
            values = value if isinstance(value, list) else list(value.values()) if table else [value]
            tokens |= {token["content"] if isinstance(token, dict) else token for token in values if token}
    return {token for token in tokens if isinstance(token, str)}


def _pipeline_ids(data: dict[str, Any]) -> Iterator[tuple[Callable[[list[int]], None], list[int]]]:
    """Yield the fields in tokenizer.json, outside of the vocabulary, that refer to tokens by id.

    A field is given as a function and the list of its ids. Call the function with the list of new ids, of the same
    length, to write them into `data`.
    """

    def item(holder: Any, key: Any) -> Callable[[list[int]], None]:
        return lambda ids: holder.__setitem__(key, ids[0])

    if data.get("padding"):
        yield item(data["padding"], "pad_id"), [data["padding"]["pad_id"]]
    waiting = [data["post_processor"]] if data.get("post_processor") else []
    while waiting:
        processor = waiting.pop()
        waiting += processor.get("processors", [])
        for token in processor["special_tokens"].values() if processor["type"] == "TemplateProcessing" else ():
            yield partial(token.__setitem__, "ids"), token["ids"]
        for name in ("sep", "cls"):
            if name in processor:
                yield item(processor[name], 1), [processor[name][1]]
