"""Convert the tokenizer in a GGUF file to Hugging Face's files: tokenizer.json and others.

The metadata key `tokenizer.ggml.model` names the kind of tokenizer:

    gpt2     byte-level BPE; the key `tokenizer.ggml.pre` names the pre-tokenizer, the way to split text before the BPE
    llama    SentencePiece's BPE with scores, from which gptkit makes merges as transformers does from tokenizer.model
    gemma4   the same, with the merges in the file
    t5       SentencePiece's unigram model

If a name is unknown, gptkit writes no tokenizer. The chat template is copied as text and never run. Source: llama.cpp,
src/llama-vocab.cpp; transformers, convert_slow_tokenizer.py (LlamaConverter) and tokenization_utils_base.py
(generate_merges).
"""

import base64
import math
from collections import UserDict
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from ...errors import CheckpointError, shown
from ..names import json_bytes
from .gguf_header import MAX_STRINGS, Array, GgufHeader

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""The names of special tokens in transformers -> their names in GGUF, which has "seperator" with this spelling."""

_MAX_SQUARES = 2**27
"""The largest sum over all tokens of the square of their length in characters.

gptkit tries every way to split a token into two parts, and this sum is the cost of doing so. A vocabulary of 262,000
tokens has a tenth of it."""
_MAX_TOKENS = 2**19  # the largest vocabularies have half of this
_MAX_CHARSMAP = 2**22  # bytes; the one of SentencePiece has 240,000

# --- how byte-level BPE splits text, by llama.cpp's names ------------------------------------------------------------

_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"

JsonObject = dict[str, Any]


def _split(pattern: str) -> JsonObject:
    """Return a pre-tokenizer step that splits text before and after every match of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> JsonObject:
    """Return a pre-tokenizer step that replaces bytes by printable characters, as GPT-2 does.

    With `use_regex` it first splits the text by GPT-2's regular expression.
    """
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_ONE_DIGIT, DIGITS = ({"type": "Digits", "individual_digits": individual} for individual in (True, False))


def _split_first(pattern: str) -> tuple[JsonObject, ...]:
    return (_split(pattern), _byte_level(False))


def _letters(numbers: str) -> tuple[JsonObject, ...]:
    """Return the steps of the pre-tokenizer of Llama 3 or of Qwen, which differ only in how digits are grouped.

    `numbers` is the regular expression for a group of digits.
    """
    return _split_first(rf"{_SHORTENED}|{_LEAD}\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}")


_LLAMA3 = _letters(r"\p{N}{1,3}")
_QWEN2 = _letters(r"\p{N}")
_GPT4O = _split_first(
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_LEAD}{_UPPER}+{_LOWER}*{_SHORTENED}?|\p{{N}}{{1,3}}{_SLASHED}"
)
_QWEN35 = _split_first(rf"{_SHORTENED}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}")
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
).replace('\\"', '"')
_MOST_TEMPLATES = 100
"""The largest number of chat templates that gptkit reads from a file."""
_DIGITS = (_ONE_DIGIT, _byte_level(True))
_THREE_DIGITS = (_byte_level(True), DIGITS, _split("[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, tuple[JsonObject, ...]] = {
    # What llama.cpp does with a file that names nothing.
    "default": (_split(r"[\p{P}\$\+<=>\^~\|]+"), *_THREE_DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4"), (_byte_level(True),)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _split_first(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
    "falcon": ({"type": "Punctuation", "behavior": "Contiguous"}, *_THREE_DIGITS),
    "tekken": _split_first(rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHED}"),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "deepseek-coder": (
        *map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        _ONE_DIGIT,
        _byte_level(False),
    ),
    "deepseek-v3": (*map(_split, (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED)), _byte_level(False)),
}
"""A name in `tokenizer.ggml.pre` -> the steps of the pre-tokenizer, as in tokenizer.json."""

WORDS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
"""The names in `tokenizer.ggml.pre` for which BPE never splits a word that is itself a token (`ignore_merges`).

With these names, a text also begins with <s> by default.
"""

_NORMALIZED = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35"))
"""The names in `tokenizer.ggml.pre` for which the text is first normalized to NFC (composed characters)."""


def without_tokenizer(header: GgufHeader) -> list[str]:
    """Return a note that says why the file's tokenizer cannot be converted, or an empty list if it can."""
    kind, pre = _get(header, "model", str), _get(header, "pre", str) or "default"
    if kind is None or kind == "none" or PREFIX + "tokens" not in header.metadata:
        return ["the file contains no tokenizer: give texts as token ids"]
    if kind not in ("gpt2", "llama", "gemma4", "t5"):
        return [
            f"gptkit cannot read its tokenizer (tokenizer.ggml.model is {shown(kind, 40)}): give texts as token ids"
        ]
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        return [f"gptkit cannot read its tokenizer (tokenizer.ggml.pre is {shown(pre, 40)}): give texts as token ids"]
    return []


def _get(header: GgufHeader, key: str, kind: type) -> Any:
    """Return the value of the metadata key tokenizer.ggml.KEY, or None if there is no such key.

    Raises CheckpointError if the value is not of the type `kind`.
    """
    value = header.metadata.get(PREFIX + key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"{header.where}: {PREFIX}{key} is {shown(value, 40)}, expected {kind.__name__}")
    return value


def check_lengths(tokens: Collection[str], where: str) -> None:
    """Raise CheckpointError for very long tokens, because trying all their splits would take too long."""
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        longest = max(map(len, tokens))
        raise CheckpointError(f"{where}: its tokens have up to {longest:,} characters, more than gptkit reads")


def splits(token: str) -> list[tuple[str, str]]:
    """Return all ways to split a token into two parts."""
    return [(token[:at], token[at:]) for at in range(1, len(token))]


class Texts(UserDict[str, bytes]):
    """The tokenizer of a GGUF as Hugging Face's files: the content of every file by its name.

    The files are made when one is first read, which may raise CheckpointError.
    """

    def __init__(self, header: GgufHeader, rows: int, context: int | None, special: Mapping[str, list[int]]) -> None:
        """Remember what the files are made from.

        Args:
            header: the header with the tokenizer's metadata.
            rows: the number of rows of the model's embedding.
            context: the model's context length in tokens, if it is known.
            special: the ids of special tokens by their names in transformers ("eos", …).
        """
        self._header, self._rows, self._context, self._special = header, rows, context, special

    @cached_property
    def data(self) -> dict[str, bytes]:  # type: ignore[override]
        files: dict[str, Any] = {}
        if not without_tokenizer(self._header):
            files["tokenizer.json"] = self._tokenizer()
            files["tokenizer_config.json"] = self._settings()
        if "eos" in self._special:
            ids = {f"{name}_token_id": ids[0] if len(ids) == 1 else ids for name, ids in self._special.items()}
            files["generation_config.json"] = dict(sorted(ids.items()))
        return {name: json_bytes(data) for name, data in files.items()}

    # --- the parts of tokenizer.json ---

    def _tokenizer(self) -> dict[str, Any]:
        kind, tokens = self._get("model", str), self._tokens
        if not all(isinstance(token, str) for token in tokens):
            raise self._error(f"not all of its {len(tokens)} tokens are strings")
        check_lengths(tokens, self._header.where)
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": index, "content": token, **plain, "special": self._types[index] != USER_DEFINED}
            for index, token in enumerate(tokens)
            if self._types[index] in (CONTROL, USER_DEFINED) or (self._types[index] == UNKNOWN and kind != "gpt2")
        ]
        head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
        spaced = self._sentencepiece
        makers = {"gpt2": self._byte_level, "llama": spaced, "gemma4": spaced, "t5": self._unigram}
        return {**head, **makers[kind]()}

    def _byte_level(self) -> dict[str, Any]:
        pre, vocab = self._get("pre", str) or "default", self._vocab()
        level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        return {
            "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre])},
            "post_processor": self._post_processor(default_bos=pre in WORDS_FIRST) or {**level, "trim_offsets": False},
            "decoder": level,
            "model": {**_BPE, "ignore_merges": pre in WORDS_FIRST, "vocab": vocab, "merges": self._pairs(vocab)},
        }

    def _pairs(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the BPE merges in the file, after checking that all of their tokens are in the vocabulary."""
        merges = self._header.values(PREFIX + "merges", MAX_STRINGS)
        if merges is None or not all(isinstance(merge, str) for merge in merges):
            raise self._error(f"its tokenizer ({PREFIX}model is {self._get('model', str)}) has no {PREFIX}merges")
        pairs = []
        for merge in merges:
            left, space, right = merge[1:].partition(" ")
            if not space or not right:
                raise self._error(
                    f"{PREFIX}merges contains {shown(merge)}, which is not two tokens with a space between them"
                )
            pairs.append((merge[0] + left, right))
        for left, right in pairs:
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise self._error(
                    f"{PREFIX}merges has {shown(left, 30)} and {shown(right, 30)}, but they or their "
                    "merge are not in the vocabulary"
                )
        return pairs

    def _sentencepiece(self) -> dict[str, Any]:
        vocab, unknown = self._vocab(), self._unknown()
        if self._get("model", str) == "gemma4":
            merges = self._pairs(vocab)
        else:
            normal = {token: index for token, index in vocab.items() if self._types[index] == NORMAL}
            merges = _merges(normal, self._scores())
        prefixed = self._get("add_space_prefix", bool) is not False
        prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        decoders: list[JsonObject] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
        ]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(default_bos=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                **_BPE,
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": BYTE in self._types,
                "vocab": vocab,
                "merges": merges,
            },
        }

    def _unigram(self) -> dict[str, Any]:
        scores = self._scores()
        normalizers: list[JsonObject] = []
        charsmap = self._header.values(PREFIX + "precompiled_charsmap", _MAX_CHARSMAP)
        if charsmap:
            if not all(isinstance(value, int) for value in charsmap):
                raise self._error(f"{PREFIX}precompiled_charsmap is not an array of bytes")
            text = base64.b64encode(bytes(value & 0xFF for value in charsmap)).decode()
            normalizers.append({"type": "Precompiled", "precompiled_charsmap": text})
        if self._get("remove_extra_whitespaces", bool):
            normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
            normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE})
        scheme = "never" if self._get("add_space_prefix", bool) is False else "always"
        space: JsonObject = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
            "pre_tokenizer": space,
            "post_processor": self._post_processor(default_bos=False, default_eos=True),
            "decoder": space,
            "model": {
                "type": "Unigram",
                "unk_id": self._unknown(),
                "vocab": [[token, score] for token, score in zip(self._tokens, scores, strict=True)],
                "byte_fallback": BYTE in self._types,
            },
        }

    def _post_processor(self, *, default_bos: bool, default_eos: bool = False) -> dict[str, Any] | None:
        """Return the post-processor that puts bos and eos around a text, or None if neither is added.

        The defaults are used if the file does not say whether to add the token.
        """
        single: list[JsonObject] = [{"Sequence": {"id": "A", "type_id": 0}}]
        special: dict[str, Any] = {}
        for name, default in (("bos", default_bos), ("eos", default_eos)):
            add, index = self._get(f"add_{name}_token", bool), self._id(name)
            if (default if add is None else add) and index is not None:
                token = self._tokens[index]
                single.insert(0 if name == "bos" else len(single), {"SpecialToken": {"id": token, "type_id": 0}})
                special[token] = {"id": token, "ids": [index], "tokens": [token]}
        if not special:
            return None
        second = [
            {key: {"id": "B" if key == "Sequence" else value["id"], "type_id": 1}}
            for ((key, value),) in map(dict.items, single)
        ]
        return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": special}

    def _settings(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json: the texts of special tokens, and the unchanged chat template."""
        ids = {name: self._id(ID_KEYS[name]) for name in ("bos", "eos", "unk", "pad", "sep", "mask")}
        key = "tokenizer.chat_template"
        template: Any = self._header.metadata.get(key)
        names = self._header.values(f"{key}s", _MOST_TEMPLATES) or []
        named = {name: self._header.metadata.get(f"{key}.{name}") for name in names}
        if named:  # the form in which transformers reads several
            named = {"default": template, **named}
            template = [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]
        return {
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._context,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": self._tokens[index] for name, index in ids.items() if index is not None},
            **({"chat_template": template} if isinstance(template, str | list) else {}),
        }

    # --- reading the metadata ---

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._header.where}: {what}")

    def _get(self, key: str, kind: type) -> Any:
        return _get(self._header, key, kind)

    def _id(self, name: str) -> int | None:
        """Return the id of a special token by its name in GGUF, or None."""
        index: int | None = self._get(f"{name}_token_id", int)
        return index if index is not None and 0 <= index < len(self._tokens) else None

    @cached_property
    def _tokens(self) -> list[Any]:
        array = self._header.metadata.get(PREFIX + "tokens")
        count = array.count if isinstance(array, Array) else len(array) if isinstance(array, list) else 0
        if count > self._rows:
            raise self._error(f"its tokenizer has {count} tokens, but its embedding has only {self._rows} rows")
        return self._header.values(PREFIX + "tokens", _MAX_TOKENS) or []

    @cached_property
    def _types(self) -> list[Any]:
        return self._numbers("token_type") or [NORMAL] * len(self._tokens)

    def _numbers(self, key: str) -> list[Any] | None:
        count = len(self._tokens)
        values = self._header.values(PREFIX + key, count)
        if values is not None and (len(values) < count or not all(isinstance(value, int | float) for value in values)):
            raise self._error(f"{PREFIX}{key} must have one number for each of the {count} tokens")
        return values

    def _scores(self) -> list[float]:
        scores = self._numbers("scores")
        if scores is None:
            raise self._error(f"{PREFIX}scores is missing")
        if not all(math.isfinite(score) for score in scores):
            raise self._error(f"{PREFIX}scores has values that are NaN or infinite")
        return [float(score) for score in scores[: len(self._tokens)]]

    def _vocab(self) -> dict[str, int]:
        """Return the vocabulary, token -> id, without the tokens of type "unused"."""
        vocab: dict[str, int] = {}
        for index, token in enumerate(self._tokens):
            if self._types[index] != UNUSED and vocab.setdefault(token, index) != index:
                raise self._error(f"{PREFIX}tokens has {shown(token)} twice")
        return vocab

    def _unknown(self) -> int | None:
        """Return the id of the unknown token: the id in the metadata, or else the first token of type "unknown"."""
        stated = self._id("unknown")
        if stated is not None and self._types[stated] != UNUSED:
            return stated
        return self._types.index(UNKNOWN) if UNKNOWN in self._types else None


_BPE = {
    "type": "BPE",
    **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
}


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the BPE merges of a SentencePiece vocabulary: all pairs of tokens that together form a token.

    They are ordered by the score of the token that they form, the highest first. Ties are ordered as in transformers'
    generate_merges.
    """
    ranked = []
    for order, (token, index) in enumerate(vocab.items()):
        for left, right in splits(token):
            if left in vocab and right in vocab:
                rank = (-scores[index], -len(left), -len(right), order, vocab[left], vocab[right])
                ranked.append((rank, (left, right)))
    return [pair for _, pair in sorted(ranked)]
