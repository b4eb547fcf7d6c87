"""A Hugging Face tokenizer as GGUF metadata, by the conventions of llama.cpp.

llama.cpp has three tokenizers that these models use, and asks a file for one by name: "gpt2" is byte-level BPE, driven
by merges; "llama" is SentencePiece's BPE, driven by scores; "t5" is SentencePiece's unigram model. How text is split
before byte-level BPE is compiled into llama.cpp and has a name there, `tokenizer.ggml.pre`, which is told here from
what tokenizer.json says; a way of splitting without a name becomes "default", with a note.

Source: llama.cpp, conversion/base.py, gguf-py/gguf/vocab.py and src/llama-vocab.cpp.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...architectures.config import parse_config_text
from ...errors import CannotExpress, InvalidInput
from ..tokenizer import Tokenizer
from .gguf_tokenizer import (
    BYTE,
    CONTROL,
    ID_KEYS,
    NORMAL,
    PRE_TOKENIZERS,
    PREFIX,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS_FIRST,
    check_lengths,
)
from .sentencepiece import BPE, UNIGRAM, parse_sentencepiece

__all__ = ["BYTE", "CONTROL", "NORMAL", "PREFIX", "SPACE", "UNKNOWN", "Value", "Vocabulary", "vocabulary"]

Value = str | bool | int | float | bytes | list[str] | list[int] | list[float]
"""A metadata value: int is stored as uint32, float as float32, a list of int as int32, bytes as uint8."""

ADDED_SCORE = -1000.0
"""llama.cpp's converter gives it to tokens that were added later, and nothing merges into."""


@dataclass
class Vocabulary:
    """The metadata of a tokenizer, in the order in which llama.cpp's converter writes it, and what it cannot say."""

    metadata: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Tokens:
    """A vocabulary by id, `rows` long once padded."""

    texts: dict[int, str]
    types: dict[int, int]
    scores: dict[int, float]


def vocabulary(files: Mapping[str, bytes], rows: int, config: Mapping[str, Any] | None = None) -> Vocabulary:
    """The metadata for the tokenizer that these files (by name) are, `rows` being the embedding's.

    `config` is a config.json, asked last for the ids of special tokens. Without a tokenizer that llama.cpp has, the
    result says "none", and a note tells so.

    Raises:
        InvalidInput: a file is broken.
        CannotExpress: two tokens are written the same, which llama.cpp refuses.

    """
    settings = _settings(files)
    if "tokenizer.json" in files:
        found = _from_json(_parse(files["tokenizer.json"], "tokenizer.json"), rows)
    elif model := next((name for name in ("tokenizer.model", "spiece.model") if name in files), None):
        found = _from_sentencepiece(files[model], model, rows, settings)
    else:
        return _none("there is no tokenizer beside the weights: text cannot be tokenized by the file alone")
    if found.metadata[PREFIX + "model"] == "none":
        return found
    _special_ids(found, settings, config or {}, rows)
    if template := _chat_template(files, settings):
        found.metadata |= template
    return found


def _none(note: str) -> Vocabulary:
    """What llama.cpp accepts for a model that comes without a tokenizer."""
    return Vocabulary({PREFIX + "model": "none"}, [note])


def _parse(data: bytes, name: str) -> dict[str, Any]:
    """The object in a JSON file; a tokenizer.json may be larger than any config.json."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidInput(f"{name} holds a JSON {type(parsed).__name__}, not an object")
    return parsed


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _from_json(data: dict[str, Any], rows: int) -> Vocabulary:
    model = data.get("model")
    if not isinstance(model, dict):
        raise InvalidInput("tokenizer.json has no model")
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    steps = list(_flat(data.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_flat(data.get("normalizer"), "normalizers"))
    try:
        if kind == "BPE" and any(step.get("type") == "ByteLevel" for step in steps):
            found = _byte_level(data, model, steps, rows)
        elif kind == "BPE" and model.get("byte_fallback"):
            found = _sentencepiece_bpe(data, model, steps, normalizers, rows)
        elif kind == "Unigram":
            found = _unigram(data, model, steps, normalizers, rows)
        else:
            return _none(f"llama.cpp has no tokenizer like this {kind} model: the file is written without one")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"tokenizer.json is not a tokenizer: {type(error).__name__}: {error!s:.80}") from error
    _post_processing(found, data, rows)
    _added_notes(found, data)
    return found


def _flat(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """A pre-tokenizer's or normalizer's steps, sequences within sequences laid out."""
    if isinstance(step, dict):
        if step.get("type") == "Sequence":
            for part in step[inner]:
                yield from _flat(part, inner)
        else:
            yield step


def _byte_level(data: dict[str, Any], model: dict[str, Any], steps: list[dict[str, Any]], rows: int) -> Vocabulary:
    """GPT-2's BPE over bytes written as printable characters."""
    tokens = _Tokens({index: text for text, index in model["vocab"].items()}, {}, {})
    _add_tokens(tokens, data, "")
    found = Vocabulary()
    name = pre_tokenizer(steps, bool(model.get("ignore_merges")))
    found.metadata = {PREFIX + "model": "gpt2", PREFIX + "pre": name or "default"}
    if name is None:
        found.notes.append(
            "llama.cpp has no name for the way in which tokenizer.json splits text: the file says 'default', and "
            "llama.cpp may tokenize otherwise"
        )
    if any(step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel"):
        found.notes.append("tokenizer.json puts a space before a text, llama.cpp's byte-level BPE does not")
    if data.get("normalizer") is not None:
        kinds = ", ".join(step["type"] for step in _flat(data["normalizer"], "normalizers"))
        found.notes.append(f"llama.cpp does not normalize text ({kinds}): what is not normalized tokenizes otherwise")
    _list_tokens(found, tokens, rows, scored=False)
    # Spaces within a merge (from files that were never byte-level) are written as GPT-2 writes them.
    found.metadata[PREFIX + "merges"] = [" ".join(part.replace(" ", "Ġ") for part in m) for m in _merges(model)]
    return found


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs in their order, from either form: "a b" or ["a", "b"]."""
    pairs = []
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        pairs.append((str(left), str(right)))
    return pairs


def _sentencepiece_bpe(
    data: dict[str, Any],
    model: dict[str, Any],
    steps: list[dict[str, Any]],
    normalizers: list[dict[str, Any]],
    rows: int,
) -> Vocabulary:
    """SentencePiece's BPE, by merges. llama.cpp merges by the score of the result, so that ranks become scores."""
    vocab, merges = model["vocab"], _merges(model)
    check_lengths(vocab, "tokenizer.json")
    tokens = _Tokens({index: text for text, index in vocab.items()}, {}, dict.fromkeys(vocab.values(), 0.0))
    ranked: set[str] = set()
    for rank, (left, right) in enumerate(merges):
        text = left + right
        if text in vocab and text not in ranked:
            ranked.add(text)
            tokens.scores[vocab[text]] = -float(rank)
    for text, index in vocab.items():
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            tokens.types[index] = BYTE
    _add_tokens(tokens, data, SPACE)
    if model.get("unk_token") in vocab:
        tokens.types[vocab[model["unk_token"]]] = UNKNOWN
    found = Vocabulary({PREFIX + "model": "llama", PREFIX + "pre": "default"})
    normal = {text for text, index in vocab.items() if tokens.types.get(index, NORMAL) == NORMAL}
    other = len(_unmerged(normal, set(merges)))
    if other:
        found.notes.append(
            f"llama.cpp merges into {other:,} of the tokens from pairs that tokenizer.json does not merge: "
            "it may tokenize otherwise"
        )
    _list_tokens(found, tokens, rows, scored=True)
    _space_prefix(found, steps, normalizers)
    return found


def _unmerged(vocab: set[str], merges: set[tuple[str, str]]) -> list[str]:
    """The tokens that some two others make up without there being a merge for it."""
    return [
        text
        for text in vocab
        if any(
            text[:at] in vocab and text[at:] in vocab and (text[:at], text[at:]) not in merges
            for at in range(1, len(text))
        )
    ]


def _unigram(
    data: dict[str, Any],
    model: dict[str, Any],
    steps: list[dict[str, Any]],
    normalizers: list[dict[str, Any]],
    rows: int,
) -> Vocabulary:
    """SentencePiece's unigram model."""
    pieces = model["vocab"]
    tokens = _Tokens(
        {index: piece for index, (piece, _) in enumerate(pieces)},
        {},
        {index: float(score) for index, (_, score) in enumerate(pieces)},
    )
    _add_tokens(tokens, data, SPACE)
    if model.get("unk_id") is not None:
        tokens.types[model["unk_id"]] = UNKNOWN
    found = Vocabulary({PREFIX + "model": "t5", PREFIX + "pre": "default"})
    if model.get("byte_fallback"):
        found.notes.append("llama.cpp's unigram tokenizer has no byte fallback: unknown characters become <unk> there")
    _list_tokens(found, tokens, rows, scored=True)
    _space_prefix(found, steps, normalizers)
    merged = any(step["type"] == "Replace" and step.get("pattern") == {"Regex": " {2,}"} for step in normalizers)
    found.metadata[PREFIX + "remove_extra_whitespaces"] = merged
    charsmap = next((step["precompiled_charsmap"] for step in normalizers if step["type"] == "Precompiled"), None)
    if charsmap:
        found.metadata[PREFIX + "precompiled_charsmap"] = base64.b64decode(charsmap)
    return found


def _add_tokens(tokens: _Tokens, data: dict[str, Any], space: str) -> None:
    """The tokens added to a vocabulary, at their ids; llama.cpp looks for them in the text as it stands."""
    for added in data.get("added_tokens") or ():
        index, text = int(added["id"]), str(added["content"])
        if added.get("special") or _looks_special(text):
            tokens.types[index] = CONTROL
        else:
            tokens.types[index] = USER_DEFINED
            text = text.replace(space, " ") if space else text
        tokens.texts[index] = text
        tokens.scores[index] = ADDED_SCORE


def _looks_special(text: str) -> bool:
    """Whether llama.cpp's converter takes it for a control token, as some checkpoints forget to say."""
    return (text.startswith("<|") and text.endswith("|>")) or text in ("<pad>", "<mask>")


def _list_tokens(found: Vocabulary, tokens: _Tokens, rows: int, scored: bool) -> None:
    """One token a row of the embedding: spare rows get names, tokens beyond the last one none."""
    beyond = sum(index >= rows for index in tokens.texts)
    if beyond:
        found.notes.append(f"{beyond} tokens beyond the {rows:,} rows of the embedding are left out")
    texts = [tokens.texts.get(index, f"[PAD{index}]") for index in range(rows)]
    if len(set(texts)) != rows:
        twice = Counter(texts).most_common(1)[0][0]
        raise CannotExpress(
            f"two tokens are both written {twice!r:.40}, and llama.cpp tells tokens apart by their text"
        )
    spare = {index: UNUSED for index in range(rows) if index not in tokens.texts}
    found.metadata[PREFIX + "tokens"] = texts
    if scored:
        scores = [tokens.scores.get(index, ADDED_SCORE) for index in range(rows)]
        found.metadata[PREFIX + "scores"] = scores
    types = [spare.get(index) or tokens.types.get(index, NORMAL) for index in range(rows)]
    found.metadata[PREFIX + "token_type"] = types


def _space_prefix(found: Vocabulary, steps: list[dict[str, Any]], normalizers: list[dict[str, Any]]) -> None:
    """Whether a text gets a space in front: by a normalizer, or by the newer Metaspace."""
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if metaspace is None:
        found.metadata[PREFIX + "add_space_prefix"] = any(step["type"] == "Prepend" for step in normalizers)
        return
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    found.metadata[PREFIX + "add_space_prefix"] = scheme != "never"
    if scheme == "first":
        found.notes.append("llama.cpp puts a space behind special tokens too, tokenizer.json only before a whole text")
    if scheme != "never":
        found.notes.append(
            "llama.cpp puts a space before every text, as SentencePiece does; tokenizer.json not before one that "
            "begins with a space"
        )


def _post_processing(found: Vocabulary, data: dict[str, Any], rows: int) -> None:
    """Which special tokens are put around a text, asked of the tokenizer itself."""
    tokenizer = Tokenizer(Path("tokenizer.json"), json.dumps(data).encode())
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    at = next((i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    for name, ids in (("bos", before), ("eos", after)):
        found.metadata[f"{PREFIX}add_{name}_token"] = bool(ids)
        if ids and ids[0] < rows:
            found.metadata[f"{PREFIX}{ID_KEYS[name]}_token_id"] = ids[0]
        if len(ids) > 1:
            found.notes.append(
                f"tokenizer.json puts {len(ids)} tokens {'before' if name == 'bos' else 'behind'} a text"
            )


def _added_notes(found: Vocabulary, data: dict[str, Any]) -> None:
    """Settings of added tokens that a file cannot hold."""
    for setting in ("lstrip", "rstrip", "single_word"):
        names = [added["content"] for added in data.get("added_tokens") or () if added.get(setting)]
        if names:
            found.notes.append(f"{setting} of {', '.join(names[:4])}{', …' * (len(names) > 4)} has no place in a GGUF")


# --- the names of ways to split text ---------------------------------------------------------------------------------


def pre_tokenizer(steps: list[dict[str, Any]], ignore_merges: bool) -> str | None:
    """llama.cpp's name for the steps of a byte-level pre-tokenizer, None where it has none."""
    asked = tuple(_words(steps))
    names = [name for name, known in PRE_TOKENIZERS.items() if tuple(_words(known)) == asked]
    # tekken's vocabulary reaches every word that is a token by merges as well.
    return next((name for name in names if (name in WORDS_FIRST) == ignore_merges or name == "tekken"), None)


def _words(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each step as the pattern whose matches it sets apart."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            if step.get("use_regex", True):
                yield "ByteLevel"
        elif kind == "Digits":
            yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
        elif kind == "Split":
            pattern = step["pattern"]
            regex = pattern["Regex"] if "Regex" in pattern else repr(pattern)
            # Matches kept and the rest dropped is the same as matches set apart: these patterns leave no rest.
            plain = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
            yield regex if plain else f"{step.get('behavior')} {step.get('invert')} {regex}"
        else:
            yield f"{kind} {step.get('behavior')}"


# --- tokenizer.model -------------------------------------------------------------------------------------------------


def _from_sentencepiece(data: bytes, name: str, rows: int, settings: Mapping[str, Any]) -> Vocabulary:
    """A SentencePiece model with no tokenizer.json beside it."""
    model = parse_sentencepiece(data, name)
    kind = {UNIGRAM: "t5", BPE: "llama"}.get(model.kind)
    if kind is None:
        return _none(f"llama.cpp has no tokenizer like {name}: the file is written without one")
    tokens = _Tokens({}, {}, {})
    for index, (text, score, type_) in enumerate(model.pieces):
        tokens.texts[index], tokens.scores[index], tokens.types[index] = text, score, type_
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        added = [{"id": index, **token} for index, token in decoder.items() if isinstance(token, dict)]
        try:
            _add_tokens(tokens, {"added_tokens": added}, SPACE)
        except (KeyError, ValueError) as error:
            raise InvalidInput(f"tokenizer_config.json: added_tokens_decoder is broken: {error!s:.80}") from error
    found = Vocabulary({PREFIX + "model": kind, PREFIX + "pre": "default"})
    _list_tokens(found, tokens, rows, scored=True)
    meta = found.metadata
    meta[PREFIX + "add_space_prefix"] = model.add_dummy_prefix
    if kind == "t5":
        meta[PREFIX + "remove_extra_whitespaces"] = model.remove_extra_whitespaces
        if model.charsmap:
            meta[PREFIX + "precompiled_charsmap"] = model.charsmap
    for typ in ("bos", "eos"):
        stated = settings.get(f"add_{typ}_token")
        meta[f"{PREFIX}add_{typ}_token"] = stated if isinstance(stated, bool) else typ == "bos"
    meta.update({f"{PREFIX}{ID_KEYS[typ]}_token_id": index for typ, index in model.ids.items() if index < rows})
    return found


# --- special tokens and the chat template ----------------------------------------------------------------------------


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            merged |= parse_config_text(files[name], name)
    return merged


def _special_ids(found: Vocabulary, settings: Mapping[str, Any], config: Mapping[str, Any], rows: int) -> None:
    """The ids of special tokens: as the tokenizer's settings name them, else as the model's config numbers them."""
    tokens = found.metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    place = {text: index for index, text in enumerate(tokens)}
    for typ, name in ID_KEYS.items():
        key = f"{PREFIX}{name}_token_id"
        token = settings.get(f"{typ}_token")
        if isinstance(token, dict):
            token = token.get("content")
        stated = config.get(f"{typ}_token_id")
        if isinstance(stated, list):
            stated = stated[0] if stated else None
        if typ == "bos" and key in found.metadata and found.metadata.get(PREFIX + "add_bos_token"):
            continue  # the one that is put before a text
        if isinstance(token, str) and token in place:
            found.metadata[key] = place[token]
        elif key not in found.metadata and type(stated) is int and 0 <= stated < rows:
            found.metadata[key] = stated
    types = cast("list[int]", found.metadata[PREFIX + "token_type"])
    unknown = found.metadata.get(PREFIX + "unknown_token_id")
    if found.metadata[PREFIX + "model"] == "gpt2":  # has no type for it: all bytes are known
        return
    if isinstance(unknown, int):
        found.metadata[PREFIX + "token_type"] = [UNKNOWN if i == unknown else kind for i, kind in enumerate(types)]
    elif UNKNOWN in types:
        found.metadata[PREFIX + "unknown_token_id"] = types.index(UNKNOWN)


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, Value]:
    """The template's text, or several by name, where the checkpoint has any; it is never run."""
    template: Any = settings.get("chat_template")
    try:
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode()
        elif "chat_template.json" in files and template is None:
            template = parse_config_text(files["chat_template.json"], "chat_template.json").get("chat_template")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"chat_template.jinja is not UTF-8: {error}") from error
    key = "tokenizer.chat_template"
    if isinstance(template, str):
        return {key: template}
    if not isinstance(template, list):
        return {}
    named = {
        entry["name"]: entry["template"]
        for entry in template
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    found: dict[str, Value] = {key: named.pop("default")} if "default" in named else {}
    if named:
        found["tokenizer.chat_templates"] = list(named)
        found |= {f"{key}.{name}": text for name, text in named.items()}
    return found
