"""Tokenize texts as llama.cpp does with a GGUF file, to count differences from the original tokenizer.

A text is first cut at special tokens. The rest depends on the kind of tokenizer. "gpt2" splits the text by the regular
expressions that belong to the name in `tokenizer.ggml.pre`, and then merges bytes. "llama" merges characters, always
the pair whose result has the highest score. "t5" normalizes the text and takes the most likely pieces. This module is
not used for reading a GGUF. Source: llama.cpp, src/llama-vocab.cpp
(llm_tokenizer_bpe, llm_tokenizer_spm, llm_tokenizer_ugm) and src/unicode.cpp (unicode_regex_split).
"""

import math
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from .gguf_tokenizer import CONTROL, NORMAL, PREFIX, SPACE, UNUSED, USER_DEFINED, WORDS_FIRST

# --- how "gpt2" splits text -------------------------------------------------------------------------------------------

# llama.cpp matches most expressions on a copy of the text in which each character beyond ASCII is one of these by its
# category, so that no expression tells upper case from lower case there, nor one script from another.
_CATEGORIES = {"N": "\xd1", "L": "\xd2", "P": "\xd3", "M": "\xd4", "S": "\xd5"}
_OTHER, _BLANK = "\xd0", "\x0b"
_N, _L, _M = "\xd10-9", "\xd2A-Za-z", "\xd4"
_P, _S = r"\xd3!-#%-*,-/:-;?-@\[-\]_\{\}", r"\xd5$+<=>^`|"

_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{_L}]+| ?[{_N}]+| ?[^\s{_L}{_N}]+|\s+(?!\S)|\s+"
_LEAD = rf"[^\r\n{_L}{_N}]?"
_UPPER, _LOWER = rf"(?:(?=[{_L}])[^a-z])", rf"(?:(?=[{_L}])[^A-Z])"


def _words(numbers: str) -> str:
    return rf"{_SHORTENED}|{_LEAD}[{_L}]+|{numbers}| ?[^\s{_L}{_N}]+[\r\n]*|{_LINES}"


def _cased(end: str, numbers: str) -> str:
    cases = rf"{_LEAD}{_UPPER}*{_LOWER}+{end}|{_LEAD}{_UPPER}+{_LOWER}*{end}"
    return rf"{cases}|{numbers}| ?[^\s{_L}{_N}]+[\r\n/]*|{_LINES}"


_ONE, _THREE = f"[{_N}]", f"[{_N}]{{1,3}}"
_PUNCTUATED = (
    rf"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+| ?[{_P}{_S}]+[\r\n]*|{_LINES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_MARKED = rf"{_SHORTENED}|{_LEAD}[{_L}{_M}]+|{_ONE}| ?[^\s{_L}{_M}{_N}]+[\r\n]*|{_LINES}"
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (rf"[{_P}$+<=>^~|]+", _GPT2, rf"[{_N}]+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_words(_THREE),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), (_words(_ONE),)),
    "qwen35": (_MARKED,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_ONE, _GPT2)),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), (_BLOOM,)),
    "falcon": (rf"[{_P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "tekken": (_cased("", _ONE),),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_cased(f"{_SHORTENED}?", _THREE),)),
    "deepseek-coder": (r"[\r\n]", rf"\s?[{_L}]+", rf"\s?[{_P}]+", "[一-龥ࠀ-一가-퟿]+", _ONE),
    "deepseek-v3": (_THREE, "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED),
}
"""A name in `tokenizer.ggml.pre` -> its regular expressions.

Every expression splits the parts that the last one left.
"""


def _collapsed(text: str) -> str:
    """Replace every character outside of ASCII by a character that stands for its Unicode category.

    llama.cpp matches its regular expressions against this text.
    """
    return "".join(
        letter
        if ord(letter) < 128
        else _BLANK
        if letter.isspace()
        else _CATEGORIES.get(unicodedata.category(letter)[0], _OTHER)
        for letter in text
    )


def split(text: str, name: str) -> list[str]:
    """Split a text into words as llama.cpp does before byte-level BPE. `name` is the value of `tokenizer.ggml.pre`."""
    seen, cuts = _collapsed(text), [0, len(text)]
    blanks = "".join(_BLANK if ord(letter) > 127 and letter.isspace() else letter for letter in text)
    for expression in SPLITS[name]:
        whole = not expression.isascii() and not any(category in expression for category in _CATEGORIES.values())
        pattern = re.compile(expression, 0 if whole else re.ASCII)
        new_cuts = {0, len(text)}
        for start, end in pairwise(cuts):
            part = (blanks if whole else seen)[start:end]
            new_cuts |= {start, end, *(start + at for match in pattern.finditer(part) for at in match.span())}
        cuts = sorted(new_cuts)
    return [text[start:end] for start, end in pairwise(cuts)]


def _visible_bytes() -> dict[int, str]:
    """Return, for every byte, the printable character with which GPT-2's tokenizer replaces it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(rest)}


_BYTES = _visible_bytes()


class LlamaCpp:
    """The tokenizer that llama.cpp makes from the metadata of a GGUF file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._tokens: list[str] = self._get("tokens", [])
        self._types: list[int] = self._get("token_type", [])
        self._ids = {text: index for index, text in enumerate(self._tokens)}
        self._scores: list[float] = self._get("scores", [])
        self._unknown: int = self._get("unknown_token_id", 0)

    def _get(self, key: str, otherwise: Any) -> Any:
        return self._metadata.get(PREFIX + key, otherwise)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens before and after it."""
        how: Callable[[str, bool], Iterable[int]] = {
            "gpt2": self._merged,
            "llama": self._scored,
            "t5": self._likeliest,
        }[self._get("model", "")]
        ids: list[int] = []
        after_special = True
        for part in self._cut(text):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += how(part, after_special)
            after_special = isinstance(part, int)
        return ids

    def _cut(self, text: str) -> list[str | int]:
        """Split a text at its special tokens. Return the parts in order: texts as they are, special tokens as ids.

        If special tokens overlap, the longest one is used.
        """
        parts: list[str | int] = [text]
        for token in self._special:
            if token in text:
                parts = [
                    piece
                    for part in parts
                    for piece in ([part] if isinstance(part, int) else self._around(part, token))
                ]
        return parts

    def _around(self, text: str, token: str) -> Iterator[str | int]:
        first, *others = text.split(token)
        yield first
        for other in others:
            yield self._ids[token]
            yield other

    @cached_property
    def _special(self) -> list[str]:
        kinds = zip(self._tokens, self._types, strict=True)
        return sorted((text for text, kind in kinds if kind in (CONTROL, USER_DEFINED) and text), key=len, reverse=True)

    # --- "gpt2" ---

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {
            (left, right): rank
            for rank, (left, _, right) in enumerate(m.partition(" ") for m in self._get("merges", []))
        }

    def _merged(self, text: str, _: bool) -> Iterator[int]:
        name = self._get("pre", "default")
        for word in split(text, name):
            symbols = [_BYTES[byte] for byte in word.encode()]
            whole = "".join(symbols)
            if name in WORDS_FIRST and whole in self._ids:
                yield self._ids[whole]
                continue
            merge(symbols, lambda left, right: self._ranks.get((left, right)))
            for symbol in symbols:
                # Bytes without a token are left out.
                yield from (
                    [self._ids[symbol]] if symbol in self._ids else (self._ids[c] for c in symbol if c in self._ids)
                )

    # --- "llama" ---

    def _scored(self, text: str, after_special: bool) -> Iterator[int]:
        prefix = " " if self._get("add_space_prefix", True) and after_special else ""
        return self.joined((prefix + text).replace(" ", SPACE))

    def joined(self, text: str) -> Iterator[int]:
        """Yield the token ids of a text by merging characters ("llama"). The text has "▁" instead of spaces."""
        symbols = [*text]

        def rank(left: str, right: str) -> float | None:
            index = self._ids.get(left + right)
            return None if index is None else -self._scores[index]

        merge(symbols, rank)
        for symbol in symbols:
            yield from [self._ids[symbol]] if symbol in self._ids else self.of_bytes(symbol)

    def of_bytes(self, text: str) -> Iterator[int]:
        """Yield the id of the byte token for every byte of a text, or the unknown token's if there is no byte token."""
        for byte in text.encode():
            yield self._ids.get(f"<0x{byte:02X}>", self._unknown)

    # --- "t5" ---

    def _likeliest(self, text: str, _: bool) -> Iterator[int]:
        last = None
        for _piece, index in self.pieces(self.normalized(text)):
            if index != self._unknown or last != self._unknown:  # unknown characters in a row are one token
                yield index
            last = index

    def pieces(self, given: str) -> list[tuple[str, int]]:
        """Return the most likely segmentation of a normalized text ("t5"), as pairs of a piece and its id."""
        best: list[tuple[float, int, int]] = [(0.0, 0, self._unknown)] + [(-math.inf, 0, self._unknown)] * len(given)
        for start in range(len(given)):
            single = False
            for end in range(start + 1, min(start + self._longest, len(given)) + 1):
                index = self._pieces.get(given[start:end])
                if index is None:
                    continue
                single |= end == start + 1
                score = best[start][0] + (0.0 if self._types[index] == USER_DEFINED else self._scores[index])
                if score > best[end][0]:
                    best[end] = (score, start, index)
            if not single and best[start][0] + self._of_unknown > best[start + 1][0]:
                best[start + 1] = (best[start][0] + self._of_unknown, start, self._unknown)
        pieces, end = [], len(given)
        while end:
            _, start, index = best[end]
            pieces.append((given[start:end], index))
            end = start
        return pieces[::-1]

    @cached_property
    def _pieces(self) -> dict[str, int]:
        kinds = (NORMAL, USER_DEFINED, UNUSED)
        return {text: index for text, index in self._ids.items() if self._types[index] in kinds}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._pieces), default=1)

    @cached_property
    def _of_unknown(self) -> float:
        normal = (score for score, kind in zip(self._scores, self._types, strict=True) if kind == NORMAL)
        return min(normal, default=0.0) - 10.0

    def normalized(self, text: str) -> str:
        """Return a text after the normalization of "t5".

        Characters are replaced, and spaces become "▁". The metadata say whether repeated spaces are merged, and whether
        a space is added before the text.
        """
        merged, result, within = self._get("remove_extra_whitespaces", False), "", False
        prefixed = not self._get("add_space_prefix", True)
        for letter in mapped(text, self._get("precompiled_charsmap", b"")):
            if letter != " ":
                if not within and (merged or not prefixed):
                    result, prefixed = result + SPACE, True
                result, within = result + letter, True
            else:
                result, within = result + ("" if merged else SPACE), False
        return result


def mapped(text: str, blob: bytes) -> str:
    """Replace characters of a text by SentencePiece's map of characters, the bytes `blob` (precompiled_charsmap).

    From left to right, the longest string that the map knows is replaced.
    """
    if not blob:
        return text
    size = struct.unpack_from("<I", blob)[0]
    nodes, values = struct.unpack_from(f"<{size // 4}I", blob, 4), blob[4 + size :]
    data, at, result = text.encode(), 0, bytearray()
    while at < len(data):
        node = _base(nodes[0])
        length, place = 0, 0
        for end in range(at, len(data)):
            node ^= data[end]
            if node >= len(nodes) or nodes[node] & 0x800000FF != data[end]:
                break
            leaf = nodes[node] >> 8 & 1
            node ^= _base(nodes[node])
            if leaf:
                length, place = end - at + 1, nodes[node] & 0x7FFFFFFF
        if length:
            result += values[place : values.index(b"\0", place)]
        else:
            length = next(n for n in range(1, 5) if at + n == len(data) or data[at + n] & 0xC0 != 0x80)
            result += data[at : at + length]
        at += length
    return result.decode("utf-8", "replace")


def sentencepiece(
    metadata: Mapping[str, Any], charsmap: bytes, merged: bool, by_bytes: bool
) -> Callable[[str], list[int]]:
    """Return a function that encodes text as the SentencePiece library does. llama.cpp differs from it in some texts.

    Source: sentencepiece, src/normalizer.cc, src/bpe_model.cc and src/unigram_model.cc.

    Args:
        metadata: the tokenizer as GGUF metadata.
        charsmap: the normalizer's map of characters (precompiled_charsmap).
        merged: whether the normalizer merges repeated spaces.
        by_bytes: whether characters without a piece are encoded as byte tokens.
    """
    model, unknown = LlamaCpp(metadata), metadata.get(PREFIX + "unknown_token_id", 0)
    prefix = SPACE if metadata.get(PREFIX + "add_space_prefix", True) else ""

    def encode(text: str) -> list[int]:
        given = mapped(text, charsmap)
        given = " ".join(filter(None, given.split(" "))) if merged else given
        given = prefix + given.replace(" ", SPACE) if given else ""
        if metadata[PREFIX + "model"] == "llama":
            ids = [*model.joined(given)]
        else:
            parts = (model.of_bytes(piece) if index == unknown else [index] for piece, index in model.pieces(given))
            ids = [index for piece_ids in parts for index in piece_ids]
        if by_bytes:
            return ids
        # Unknown characters in a row are one token.
        return [index for last, index in pairwise([-1, *ids]) if not last == index == unknown]

    return encode


def _base(node: int) -> int:
    return (node >> 10) << ((node & 0x200) >> 6)


def merge(symbols: list[str], rank: Callable[[str, str], float | None]) -> None:
    """Do the merges of BPE in place: join the neighbours whose pair has the lowest rank, until no pair has a rank.

    `rank` returns the rank of a pair, or None. Of pairs with equal ranks, the leftmost is joined first.
    """
    while True:
        ranks = [(r, at) for at, pair in enumerate(pairwise(symbols)) if (r := rank(*pair)) is not None]
        if not ranks:
            return
        _, at = min(ranks)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


# --- hard texts -------------------------------------------------------------------------------------------------------

_SAMPLES = (
    "Hello, world!", "I'm, you're, they'LL, don't, WE'VE, it's", "The quick brown fox",
    "camelCase HTMLParser iPhone", "1", "12", "123", "1234567", "3.14159", "1,000,000.00", "0x1F", "2026-11-26",
    "①②③", "١٢٣٤", "Ⅳ ½ ²", "naïve café", "nai\u0308ve cafe\u0301", "Ångström A\u030angstro\u0308m", "ÀÉÎÕÜ",
    "straße STRASSE", "ﬁne ﬂow ﬃ", "Привет, мир", "ПРИВЕТ", "Γειά σου Κόσμε", "שָׁלוֹם",
    "السَّلَامُ عَلَيْكُمْ", "नमस्ते दुनिया", "বাংলা ভাষা", "ภาษาไทย", "தமிழ்", "東京は日本の首都です",
    "你好，世界！", "안녕하세요 세계", "カタカナ ｶﾀｶﾅ", "Ｆｕｌｌ　ｗｉｄｔｈ", "한글 ㅎㅏㄴ", "𠮷野家", "🙂",
    "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "☺️ ✓ →", "€100 £5 ¥7", "a∧b ∀x∃y", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "two  spaces",
    "three   spaces", "tab\tand\ttabs\t\t", "line\nbreak", "lines\n\n\nbreak", "crlf\r\n\r\n", "  indented",
    "trailing ", "trailing   ", "\n", "\n\n", " \n ", "a \n b", "\u00a0nbsp\u00a0", "\u3000ideographic",
    "a\u200bb\u200d", "def f(x):\n    return x ** 2  # ok", "if (a && b) { c = d[0]; }",
    "https://example.org/a?b=c&d=e#f", "a/b/c.txt", '<div class="x">&amp;</div>', '{"key": [1, 2.5, null]}',
    "$x^2 + y_1$", "***bold*** __x__", "!!! ??? ...", "…—–‘’“”«»", "e\u0301\u0302\u0303", "\u0301", "x\u0301y",
    "ǅ ǈ ǋ", "ʰʲ", "ª º", "İi ıI", "ÿ Ÿ", "\u00adsoft", "A\u0327b\u0327",
)  # fmt: skip


def hard_texts() -> list[str]:
    """Return a few hundred test texts on which tokenizers often differ: scripts, digits, spaces, code and so on."""
    pairs = (f"{left}{between}{right}" for between in ("", " ", "\n") for left, right in pairwise(_SAMPLES))
    return list(dict.fromkeys([*_SAMPLES, *(f" {text}" for text in _SAMPLES), *pairs]))


def differing(metadata: Mapping[str, Any], encode: Callable[[str], Sequence[int]]) -> tuple[list[str], int]:
    """Compare llama.cpp with the tokenizer `encode`.

    Return the test texts with different ids, and the number of test texts.
    """
    theirs, texts = LlamaCpp(metadata), hard_texts()
    return [text for text in texts if theirs.encode(text) != list(encode(text))], len(texts)
