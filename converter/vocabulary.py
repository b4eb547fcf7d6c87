"""A tokenizer's files for fewer tokens: which tokens the kept ones cannot do without, and the files rewritten for them.

Of a text that encodes to kept tokens alone the tokens stay the same, and any other text still encodes, to more and
smaller ones:

BPE        a kept token stays reachable: the tokens that its own encoding passes through are kept too, and of the merges
           those whose two parts and result are kept. Merging goes by rank, so a text's encoding takes the same ones.
Unigram    the best of fewer segmentations is the one it was, if its pieces are kept. What an unknown character costs
           goes by the lowest score there is, so the piece that has it is kept.
WordPiece  the longest piece that matches is the one it was, if it is kept.

All single characters are kept (where a vocabulary spells unknown characters as byte tokens, those instead), special
tokens, and every token that a post-processor, config.json or generation_config.json names.
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
"""Files that say the same in a form that is not written, or stand for ids: they would contradict the rewritten ones."""

_ID_FIELD = re.compile(r"\w*_token_ids?|(begin_)?suppress_tokens|bad_words_ids")
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space; as byte tokens it would not be decoded to one

_Table = Mapping[int, int]  # old ids -> new ids, of the kept tokens


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's files, by name, and tokenizer.json parsed: `data`. `config` is the text of a config.json."""

    data: dict[str, Any]
    files: Mapping[str, bytes]
    config: str | None = None

    @cached_property
    def _pieces(self) -> dict[str, int]:
        vocab = self.data["model"]["vocab"]
        return {each[0]: i for i, each in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)

    @property
    def kind(self) -> str:
        """BPE, Unigram, WordPiece or WordLevel."""
        return str(self.data["model"]["type"])

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Every token's id, as the vocabulary writes it, added ones too."""
        return self._pieces | {each["content"]: each["id"] for each in self.data["added_tokens"]}

    @cached_property
    def names(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.tokens.items()}

    # --- what has to stay ---

    def required(self) -> dict[int, str]:
        """The ids that must be kept, whatever else is: with the reason for each, in words."""
        found = {self.tokens[token]: "a character of its own" for token in self._characters()}
        model = self.data["model"]
        unknown = [self._pieces[model["unk_token"]]] if model.get("unk_token") in self._pieces else []
        if self.kind == "Unigram":
            scores = [score for _, score in model["vocab"]]
            unknown += [scores.index(min(scores)), *([model["unk_id"]] if model.get("unk_id") is not None else [])]
        found |= dict.fromkeys(unknown, "what stands for the unknown")
        found |= {each["id"]: "a special token" for each in self.data["added_tokens"] if each["special"]}
        found |= dict.fromkeys((i for _, ids in _pipeline_ids(self.data) for i in ids), "the tokenizer adds it")
        for name, data in self._settings().items():
            found |= {i: f"{name} names it" for i in ids_in(data) if i in self.names}
            if name == SETTINGS:
                found |= {self.tokens[t]: f"{name} names it" for t in named_in(data) if t in self.tokens}
        return found

    def _characters(self) -> Iterator[str]:
        """Single characters, or the byte tokens that stand in for them."""
        model = self.data["model"]
        if model.get("byte_fallback") and self._pieces.keys() >= _BYTES:
            yield from _BYTES
            yield from {_SPACE} & self._pieces.keys()
            return
        prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
        for token in self._pieces:
            # A prefix or suffix may itself be all there is: then it is a character.
            if len(token) == 1 or len(token.removeprefix(prefix).removesuffix(suffix)) == 1:
                yield token

    def _settings(self) -> dict[str, Any]:
        """The files whose fields name ids."""
        here = [name for name in (SETTINGS, _GENERATION) if name in self.files]
        found = {name: parse_config_text(self.files[name], name) for name in here}
        return found | ({} if self.config is None else {CONFIG: parse_config_text(self.config, CONFIG)})

    def closed(self, ids: Iterable[int]) -> set[int]:
        """These ids and all that they cannot do without (but for `required`)."""
        found = set(ids)
        if self.kind != "BPE":
            return found
        added = {each["id"] for each in self.data["added_tokens"]}
        todo = [self.names[i] for i in found - added if i in self.names]
        while todo:
            for part in self._parts(todo.pop()):
                if self._pieces[part] not in found:
                    found.add(self._pieces[part])
                    todo.append(part)
        return found

    @cached_property
    def _parts(self) -> Callable[[str], set[str]]:
        model = self.data["model"]
        merges = [merge for merge, _ in self._merges()]
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            made: dict[str, set[str]] = {}
            for pair, result in self._merges():
                made.setdefault(result, set()).update(pair)
            return lambda token: made.get(token, set())
        ranks = {merge: rank for rank, merge in enumerate(merges)}
        return lambda token: {part for part in passed_through(token, ranks) if part in self._pieces}

    def _merges(self) -> Iterator[tuple[tuple[str, str], str]]:
        """BPE's merges by rank: the two parts, and what they make."""
        prefix = self.data["model"].get("continuing_subword_prefix") or ""
        for merge in self.data["model"]["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            yield (left, right), left + right.removeprefix(prefix)

    # --- the files for fewer tokens ---

    def cut(self, table: _Table) -> dict[str, bytes | None]:
        """The files that change when the tokens of `table` alone are kept, by their new ids; None removes one."""
        text = json_bytes(self._tokenizer(table))
        made = Tokenizer(Path(TOKENIZER), text).ids(self.tokens)
        for (token, old), new in zip(self.tokens.items(), made, strict=True):
            if new != table.get(old):
                raise InvalidInput(
                    f"the tokenizer cannot be rewritten: {token!r} would be token {new} instead of {table.get(old)}",
                    "Please report this tokenizer.",
                )
        files: dict[str, bytes | None] = {TOKENIZER: text}
        for name, data in self._settings().items():
            renumbered = renumber(data, table)
            if name == SETTINGS and isinstance(data.get("added_tokens_decoder"), dict):
                by_id = {int(key): each for key, each in data["added_tokens_decoder"].items() if key.isdecimal()}
                renumbered["added_tokens_decoder"] = {str(table[i]): each for i, each in by_id.items() if i in table}
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
            model["vocab"] = [each for i, each in enumerate(model["vocab"]) if i in table]
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
        added = [{**each, "id": table[each["id"]]} for each in self.data["added_tokens"] if each["id"] in table]
        changed = json.loads(json.dumps({**self.data, "model": None}))  # the parts that are changed in place
        for place, ids in _pipeline_ids(changed):
            place([table[i] for i in ids])
        return {**changed, "added_tokens": added, "model": model}

    def _all_kept(self, tokens: Iterable[str], table: _Table) -> bool:
        return all(self._pieces.get(token, -1) in table for token in tokens)


def read_vocabulary(folder: Path | None, texts: Mapping[str, bytes], config: str | None = None) -> Vocabulary | None:
    """The vocabulary of a tokenizer in a folder, files among `texts` taken first; None if there is none."""
    files = {} if folder is None else {path.name: path.read_bytes() for path in token_files(folder)}
    files |= {name: text for name, text in texts.items() if name != CONFIG}
    # Read by the library, which refuses what is broken, and written out by it: one form of each field.
    tokenizer = load_tokenizer(folder or Path(), texts if TOKENIZER in texts else None)
    return None if tokenizer is None else Vocabulary(json.loads(tokenizer.to_json()), files, config)


def passed_through(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """The tokens that merging makes on its way from a token's characters to it; none where it does not get there."""
    parts, made = list(token), set(token)
    while len(parts) > 1:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            return set()
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        made.add(parts[at])
    return made


def ids_in(data: Mapping[str, Any]) -> set[int]:
    """The ids that the fields of a config name, `eos_token_id` and its like."""
    found: list[int] = []
    _over_ids(data, lambda token_id: found.append(token_id) or token_id)  # type: ignore[func-returns-value]
    return set(found)


def renumber(data: Mapping[str, Any], table: _Table) -> dict[str, Any]:
    """A config with its ids renumbered. An id that no token has stays as it is: it means something else, or nothing."""
    return _over_ids(data, lambda token_id: table.get(token_id, token_id))


def _over_ids(data: Mapping[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    def changed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _over_ids(value, change)
        if not _ID_FIELD.fullmatch(key):
            return value
        if isinstance(value, list):
            return [changed(key, each) for each in value]
        return change(value) if type(value) is int else value

    return {key: changed(key, value) for key, value in data.items()}


def named_in(settings: Mapping[str, Any]) -> set[str]:
    """The tokens that a tokenizer_config.json names: eos_token and its like, as text or written out."""
    found: set[str] = set()
    for key, value in settings.items():
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            table = isinstance(value, dict) and "content" not in value
            values = value if isinstance(value, list) else list(value.values()) if table else [value]
            found |= {each["content"] if isinstance(each, dict) else each for each in values if each}
    return {each for each in found if isinstance(each, str)}


def _pipeline_ids(data: dict[str, Any]) -> Iterator[tuple[Callable[[list[int]], None], list[int]]]:
    """Every place outside the vocabulary where a tokenizer.json names ids: how to put others there, and the ids."""

    def item(holder: Any, key: Any) -> Callable[[list[int]], None]:
        return lambda ids: holder.__setitem__(key, ids[0])

    if data.get("padding"):
        yield item(data["padding"], "pad_id"), [data["padding"]["pad_id"]]
    waiting = [data["post_processor"]] if data.get("post_processor") else []
    while waiting:
        each = waiting.pop()
        waiting += each.get("processors", [])
        for token in each["special_tokens"].values() if each["type"] == "TemplateProcessing" else ():
            yield partial(token.__setitem__, "ids"), token["ids"]
        for name in ("sep", "cls"):
            if name in each:
                yield item(each[name], 1), [each[name][1]]
