"""The tokenizer in a GGUF file, written out as Hugging Face has it: tokenizer.json and the files beside it.

"gpt2" is byte-level BPE by merges; how it splits text beforehand has only a name in the file, `tokenizer.ggml.pre`,
and is compiled into llama.cpp. "llama" is SentencePiece's BPE, of which the file keeps scores: merges are made of them
as transformers makes them of a tokenizer.model. "t5" is SentencePiece's unigram model. A name that is not known gives
no tokenizer rather than a wrong one. The chat template is text that is passed on, and never run.

Source: llama.cpp, src/llama-vocab.cpp; transformers, convert_slow_tokenizer.py (LlamaConverter) and
tokenization_utils_base.py (generate_merges).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from ...errors import CheckpointError
from .gguf_header import MAX_STRINGS, Array, Header

__all__ = ["PRE_TOKENIZERS", "Texts", "check_lengths", "without_tokenizer"]

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""transformers' names of special tokens -> GGUF's, misspelt as it is."""

MAX_SQUARES = 2**27
"""The sum of the squares of tokens' lengths, which is what it costs to try every part of every token: a vocabulary of
262,000 tokens has a tenth of it, and no token of real ones is longer than a thousand characters."""
MAX_TOKENS = 2**19
"""The largest vocabularies have half of that."""
MAX_CHARSMAP = 2**22
"""Bytes; SentencePiece's own has 240,000."""

# --- how byte-level BPE splits text, by llama.cpp's names ------------------------------------------------------------

_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"

Step = dict[str, Any]


def split(pattern: str) -> Step:
    """Matches set apart, and what lies between them."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> Step:
    """Bytes as printable characters, after GPT-2's own pattern or without it."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def digits(individual: bool) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def _letters(numbers: str) -> tuple[Step, ...]:
    """Llama 3's pattern and Qwen's, which differ in how many digits go together."""
    tail = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
    return (split(rf"{_SHORTENED}|{_LEAD}\p{{L}}+|{numbers}{tail}"), byte_level(False))


_GPT2 = (byte_level(True),)
_LLAMA3 = _letters(r"\p{N}{1,3}")
_QWEN2 = _letters(r"\p{N}")
_DIGITS = (digits(True), byte_level(True))
_BLOOM = (split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), byte_level(False))
_TEKKEN = (
    split(rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHED}"),
    byte_level(False),
)
_GPT4O = (
    split(rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_LEAD}{_UPPER}+{_LOWER}*{_SHORTENED}?|\p{{N}}{{1,3}}{_SLASHED}"),
    byte_level(False),
)
_QWEN35 = (
    split(rf"{_SHORTENED}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"),
    byte_level(False),
)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    byte_level(True),
    digits(False),
    split("[0-9][0-9][0-9]"),
)
_DEEPSEEK_CODER = (
    *map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
    digits(True),
    byte_level(False),
)
# What llama.cpp does with a file that names nothing.
_DEFAULT = (split(r"[\p{P}\$\+<=>\^~\|]+"), byte_level(True), digits(False), split("[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, tuple[Step, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM),
    "falcon": _FALCON,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""llama.cpp's name -> the steps of tokenizer.json, as the checkpoints have them that the name was made for."""

WORDS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
"""With these a word that is a token is taken whole, whatever the merges say; and a text begins with <s> by default."""

NORMALIZED = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35"))
"""Those whose checkpoints compose characters (NFC) first."""


class Texts(Mapping[str, bytes]):
    """The files that a GGUF's tokenizer is in Hugging Face's terms, by name; made when one is asked for.

    rows, context: the size of the token table and the longest text. special: the ids of special tokens, by
    transformers' names.

    Every access raises CheckpointError where the tokenizer is broken.
    """

    def __init__(self, header: Header, rows: int, context: int | None, special: Mapping[str, list[int]]) -> None:
        self._header, self._rows, self._context, self._special = header, rows, context, special

    @cached_property
    def _files(self) -> dict[str, bytes]:
        tokenizer = _tokenizer(self._header, self._rows)
        found: dict[str, Any] = {}
        if tokenizer is not None:
            found["tokenizer.json"] = tokenizer
            found["tokenizer_config.json"] = _settings(self._header, self._rows, self._context)
        if "eos" in self._special:
            ids = {f"{name}_token_id": ids[0] if len(ids) == 1 else ids for name, ids in self._special.items()}
            found["generation_config.json"] = dict(sorted(ids.items()))
        return {name: (json.dumps(data, ensure_ascii=False, indent=2) + "\n").encode() for name, data in found.items()}

    def __getitem__(self, name: str) -> bytes:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def without_tokenizer(header: Header) -> list[str]:
    """Why the file's tokenizer cannot be written, as notes."""
    kind = _get(header, "model", str)
    pre = _get(header, "pre", str) or "default"
    if kind is None or kind == "none" or PREFIX + "tokens" not in header.metadata:
        return ["the file holds no tokenizer"]
    if kind not in KINDS:
        return [f"its tokenizer is of the kind {kind!r:.40}, which is not read: text has to be given as token ids"]
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        return [f"its tokenizer splits text as {pre!r:.40}, which is not known: text has to be given as token ids"]
    return []


# --- the parts of tokenizer.json -------------------------------------------------------------------------------------


def _tokenizer(header: Header, rows: int) -> dict[str, Any] | None:
    """tokenizer.json as an object, None where the file has no tokenizer that can be written so."""
    if without_tokenizer(header):
        return None
    kind = _get(header, "model", str)
    pre = _get(header, "pre", str) or "default"
    tokens = _tokens(header, rows)
    if not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(
            f"{header.where}: the {len(tokens)} tokens for a token table of {rows} rows are not all text"
        )
    check_lengths(tokens, header.where)
    types = _numbers(header, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] != USER_DEFINED,
        }
        for index, token in enumerate(tokens)
        if types[index] in (CONTROL, USER_DEFINED) or (types[index] == UNKNOWN and kind != "gpt2")
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **KINDS[kind](header, tokens, types, pre),
    }


def _byte_level(header: Header, tokens: list[str], types: list[int], pre: str) -> dict[str, Any]:
    merges = header.values(PREFIX + "merges", MAX_STRINGS)
    if merges is None or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError(f"{header.where}: a tokenizer of model gpt2 has no {PREFIX}merges")
    pairs = [_pair(header, merge) for merge in merges]
    vocab = _vocab(header, tokens, types)
    for left, right in pairs:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{header.where}: the merge of {left!r:.30} and {right!r:.30} is not one of tokens")
    return {
        "normalizer": {"type": "NFC"} if pre in NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre])},
        "post_processor": _post_processor(header, tokens, default_bos=pre in WORDS_FIRST)
        or {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**_BPE, "ignore_merges": pre in WORDS_FIRST, "vocab": vocab, "merges": pairs},
    }


_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def check_lengths(tokens: Collection[str], where: str) -> None:
    """Hold a vocabulary's tokens to lengths that tokens have, before anything tries their every part.

    Raises CheckpointError.
    """
    if sum(len(token) ** 2 for token in tokens) > MAX_SQUARES:
        longest = max(map(len, tokens))
        raise CheckpointError(f"{where}: its tokens have up to {longest:,} characters, which is no vocabulary")


def _pair(header: Header, merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")
    if not space or not right:
        raise CheckpointError(f"{header.where}: {merge!r:.60} is no merge of two tokens")
    return merge[0] + left, right


def _sentencepiece(header: Header, tokens: list[str], types: list[int], pre: str) -> dict[str, Any]:  # noqa: ARG001
    scores = _scores(header, len(tokens))
    vocab = _vocab(header, tokens, types)
    normal = {token: index for token, index in vocab.items() if types[index] == NORMAL}
    unknown = _unknown(header, tokens, types)
    prefixed = _get(header, "add_space_prefix", bool) is not False
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    decoders: list[Step] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
    ]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": _post_processor(header, tokens, default_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_BPE,
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": any(kind == BYTE for kind in types),
            "vocab": vocab,
            "merges": _merges(normal, scores),
        },
    }


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that together are one, that with the highest score first.

    Ties as transformers' generate_merges orders them.
    """
    found = []
    for order, (token, index) in enumerate(vocab.items()):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        for left, right in halves:
            if left in vocab and right in vocab:
                rank = (-scores[index], -len(left), -len(right), order, vocab[left], vocab[right])
                found.append((rank, (left, right)))
    return [pair for _, pair in sorted(found)]


def _unigram(header: Header, tokens: list[str], types: list[int], pre: str) -> dict[str, Any]:  # noqa: ARG001
    scores = _scores(header, len(tokens))
    prefixed = _get(header, "add_space_prefix", bool) is not False
    normalizers: list[Step] = []
    charsmap = header.values(PREFIX + "precompiled_charsmap", MAX_CHARSMAP)
    if charsmap:
        if not all(isinstance(value, int) for value in charsmap):
            raise CheckpointError(f"{header.where}: {PREFIX}precompiled_charsmap is not bytes")
        text = base64.b64encode(bytes(value & 0xFF for value in charsmap)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": text})
    if _get(header, "remove_extra_whitespaces", bool):
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE})
    space: Step = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefixed else "never",
        "split": True,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": space,
        "post_processor": _post_processor(header, tokens, default_bos=False, default_eos=True),
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": _unknown(header, tokens, types),
            "vocab": [[token, score] for token, score in zip(tokens, scores, strict=True)],
            "byte_fallback": any(kind == BYTE for kind in types),
        },
    }


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
"""tokenizer.ggml.model -> what makes a tokenizer.json of it."""


def _vocab(header: Header, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Ids by token, without rows that stand for nothing."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if types[index] == UNUSED:
            continue
        if token in vocab:
            raise CheckpointError(f"{header.where}: the token {token!r:.60} is there twice")
        vocab[token] = index
    return vocab


def _unknown(header: Header, tokens: list[str], types: list[int]) -> int | None:
    """The id of the unknown token: as the file says, else the one of that type."""
    stated: int | None = _get(header, "unknown_token_id", int)
    if stated is not None and 0 <= stated < len(tokens) and types[stated] != UNUSED:
        return stated
    return types.index(UNKNOWN) if UNKNOWN in types else None


def _post_processor(
    header: Header, tokens: list[str], *, default_bos: bool, default_eos: bool = False
) -> dict[str, Any] | None:
    """Which special tokens are put around a text."""
    template: list[Step] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for name, default, place in (("bos", default_bos, 0), ("eos", default_eos, 1)):
        add = _get(header, f"add_{name}_token", bool)
        index = _get(header, f"{name}_token_id", int)
        if not (default if add is None else add) or index is None or not 0 <= index < len(tokens):
            continue
        token = tokens[index]
        template.insert(len(template) if place else 0, {"SpecialToken": {"id": token, "type_id": 0}})
        special[token] = {"id": token, "ids": [index], "tokens": [token]}
    if not special:
        return None
    second = [
        {key: {"id": "B" if key == "Sequence" else value["id"], "type_id": 1}}
        for ((key, value),) in map(dict.items, template)
    ]
    return {"type": "TemplateProcessing", "single": template, "pair": [*template, *second], "special_tokens": special}


def _settings(header: Header, rows: int, context: int | None) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by their text, and the chat template as it stands."""
    tokens = _tokens(header, rows)
    special: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad", "sep", "mask"):
        index = _get(header, f"{ID_KEYS[name]}_token_id", int)
        if index is not None and 0 <= index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    template = header.metadata.get("tokenizer.chat_template")
    return {
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        **({"chat_template": template} if isinstance(template, str) else {}),
    }


# --- reading the metadata --------------------------------------------------------------------------------------------


def _get(header: Header, key: str, kind: type) -> Any:
    """A value of that type at a tokenizer's key, None where there is none."""
    value = header.metadata.get(PREFIX + key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"{header.where}: {PREFIX}{key} is {value!r:.40}, expected {kind.__name__}")
    return value


def _tokens(header: Header, rows: int) -> list[Any]:
    found = header.metadata.get(PREFIX + "tokens")
    count = found.count if isinstance(found, Array) else len(found) if isinstance(found, list) else 0
    if count > rows:
        raise CheckpointError(f"{header.where}: {count} tokens for a token table of {rows} rows")
    return header.values(PREFIX + "tokens", MAX_TOKENS) or []


def _numbers(header: Header, key: str, count: int) -> list[Any] | None:
    values = header.values(PREFIX + key, count)
    if values is not None and (len(values) < count or not all(isinstance(value, int | float) for value in values)):
        raise CheckpointError(f"{header.where}: {PREFIX}{key} is not one number a token ({count})")
    return values


def _scores(header: Header, count: int) -> list[float]:
    scores = _numbers(header, "scores", count)
    if scores is None:
        raise CheckpointError(f"{header.where}: there is no {PREFIX}scores")
    if not all(math.isfinite(score) for score in scores):
        raise CheckpointError(f"{header.where}: {PREFIX}scores are not all finite")
    return [float(score) for score in scores[:count]]
