"""Describe a Hugging Face tokenizer as GGUF metadata, by the conventions of llama.cpp.

llama.cpp has names for the kinds of tokenizer: "gpt2" is byte-level BPE with merges, "llama" is SentencePiece's BPE
with scores, and "t5" is SentencePiece's unigram model. It also has names for pre-tokenizers, the ways to split text
before byte-level BPE (`tokenizer.ggml.pre`). gptkit looks for the name of the pre-tokenizer in tokenizer.json. If
llama.cpp has no name for it, gptkit writes "default" and a note for the user. Source: llama.cpp, conversion/base.py,
gguf-py/gguf/vocab.py and src/llama-vocab.cpp.
"""

import base64
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ...architectures.config import parse_config_text
from ...errors import CannotExpress, InvalidInput, shown
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
    JsonObject,
    check_lengths,
    splits,
)
from .llama_cpp_tokenizer import differing, sentencepiece

Value = str | bool | int | float | bytes | list[str] | list[int] | list[float] | list[bool]
"""A metadata value. int is stored as uint32, float as float32, a list of int as an array of int32, bytes as uint8."""

_NO_FALLBACK = "llama.cpp's unigram tokenizer has no byte fallback: characters without a token become <unk>"
_ADDED_SCORE = -1000.0  # as in llama.cpp's converter, for added tokens, which no merge gives


@dataclass
class _Metadata:
    """The GGUF metadata of a tokenizer, to which several functions add entries."""

    metadata: dict[str, Value] = field(default_factory=dict)
    """The metadata by key, in the order of llama.cpp."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, about properties of the tokenizer that the metadata cannot express."""
    rows: int = 0
    """The number of rows of the model's embedding."""
    texts: dict[int, str] = field(default_factory=dict)
    """The tokens by id."""
    types: dict[int, int] = field(default_factory=dict)
    """The token types of llama.cpp (normal, control, …) by token id."""
    scores: dict[int, float] = field(default_factory=dict)
    """The SentencePiece scores by token id."""

    def say(self, **values: Value) -> None:
        """Add metadata. The keyword arguments are keys without the prefix "tokenizer.ggml."."""
        self.metadata |= {PREFIX + key: value for key, value in values.items()}

    def add_tokens(self, added: Iterable[Mapping[str, Any]], space: str = SPACE) -> None:
        """Add the tokens of the list `added_tokens` in tokenizer.json.

        llama.cpp looks for these tokens in a text before it splits the text. `space` is the character that stands for a
        space in the vocabulary.
        """
        for token in added:
            index, text = int(token["id"]), str(token["content"])
            # Some checkpoints do not mark special tokens as such. llama.cpp's converter guesses them in the same way.
            forgotten = (text.startswith("<|") and text.endswith("|>")) or text in ("<pad>", "<mask>")
            special = token.get("special") or forgotten
            self.types[index] = CONTROL if special else USER_DEFINED
            self.texts[index] = text if special or not space else text.replace(space, " ")
            self.scores[index] = _ADDED_SCORE

    def list_tokens(self, model: str, pre: str = "default") -> None:
        """Add the list of tokens to the metadata, one for every row of the embedding.

        Rows without a token get a made-up token, and tokens beyond the last row are left out. `model` and `pre` are the
        names of the tokenizer and of the pre-tokenizer in llama.cpp.
        """
        self.say(model=model, pre=pre)
        beyond = sum(index >= self.rows for index in self.texts)
        if beyond:
            self.notes.append(f"{beyond} tokens were left out, because the embedding has only {self.rows:,} rows")
        texts = [self.texts.get(index, f"[PAD{index}]") for index in range(self.rows)]
        if len(set(texts)) != self.rows:
            twice = Counter(texts).most_common(1)[0][0]
            raise CannotExpress(
                f"two tokens of the tokenizer have the same text {shown(twice, 40)}, which llama.cpp does not support"
            )
        self.say(tokens=texts)
        if model != "gpt2":
            self.say(scores=[self.scores.get(index, _ADDED_SCORE) for index in range(self.rows)])
        types = self.types | dict.fromkeys(set(range(self.rows)) - self.texts.keys(), UNUSED)
        self.say(token_type=[types.get(index, NORMAL) for index in range(self.rows)])


def vocabulary(files: Mapping[str, bytes], rows: int, config: Mapping[str, Any] | None = None) -> _Metadata:
    """Return the GGUF metadata of a tokenizer.

    If llama.cpp does not support this kind of tokenizer, the metadata say that there is none, and a note says why.

    Args:
        files: the content of the tokenizer's files by name.
        rows: the number of rows of the model's embedding.
        config: the model's config, for ids of special tokens that the files do not have.

    Raises:
        InvalidInput: a file is damaged. CannotExpress: llama.cpp does not support the tokens.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            settings |= parse_config_text(files[name], name)
    if "tokenizer.json" in files:
        vocab = _from_json(files["tokenizer.json"], rows)
    elif model := next((name for name in ("tokenizer.model", "spiece.model") if name in files), None):
        vocab = _from_sentencepiece(files[model], model, rows, settings)
    else:
        return _none(
            "the GGUF file has no tokenizer, because the source folder has none; llama.cpp needs one to read text"
        )
    if vocab.metadata[PREFIX + "model"] != "none":
        _special_ids(vocab, settings, config or {})
        vocab.metadata |= _chat_template(files, settings)
    return vocab


def _compare(vocab: _Metadata, encode: Callable[[str], Sequence[int]]) -> None:
    """Add a note if llama.cpp would tokenize some test texts differently than `encode`, the original tokenizer."""
    try:
        texts, tried = differing(vocab.metadata, encode)
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise InvalidInput(f"the tokenizer's precompiled_charsmap is damaged: {error!s:.80}") from error
    if texts:
        example = shown(min(texts, key=len), 40)
        vocab.notes.append(
            f"of {tried} difficult test texts, llama.cpp gives other token ids than the original tokenizer for"
            f" {len(texts)}, for example {example}"
        )


def _none(note: str) -> _Metadata:
    """Return the metadata for a GGUF without a tokenizer, and a note that says why."""
    return _Metadata({PREFIX + "model": "none"}, [note])


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _from_json(text: bytes, rows: int) -> _Metadata:
    try:
        data = json.loads(text)  # may be larger than any config.json
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"tokenizer.json is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"tokenizer.json contains a JSON {type(data).__name__}, but an object is needed")
    model = data.get("model")
    if not isinstance(model, dict):
        raise InvalidInput("tokenizer.json has no field model")
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    steps = list(_flat(data.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_flat(data.get("normalizer"), "normalizers"))
    vocab, added = _Metadata(rows=rows), data.get("added_tokens") or ()
    try:
        if kind == "BPE" and any(step.get("type") == "ByteLevel" for step in steps):
            _byte_level(vocab, model, added, steps, normalizers)
        elif kind == "BPE" and model.get("byte_fallback"):
            _sentencepiece_bpe(vocab, model, added)
            _space_prefix(vocab, steps, normalizers)
        elif kind == "Unigram":
            _unigram(vocab, model, added)
            _space_prefix(vocab, steps, normalizers)
            merged = any(x["type"] == "Replace" and x.get("pattern") == {"Regex": " {2,}"} for x in normalizers)
            vocab.say(remove_extra_whitespaces=merged)
            charsmap = next((x["precompiled_charsmap"] for x in normalizers if x["type"] == "Precompiled"), None)
            if charsmap:
                vocab.say(precompiled_charsmap=base64.b64decode(charsmap))
        else:
            return _none(
                f"the GGUF file has no tokenizer, because llama.cpp does not support tokenizers of the type {kind}"
            )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"gptkit cannot read tokenizer.json as a tokenizer: {type(error).__name__}: {error!s:.80}"
        ) from error
    tokenizer = Tokenizer(Path("tokenizer.json"), json.dumps(data).encode())
    _post_processing(vocab, tokenizer)
    _compare(vocab, lambda text: tokenizer.encode(text, special=False))
    for setting in ("lstrip", "rstrip", "single_word"):
        names = [token["content"] for token in added if token.get(setting)]
        if names:
            vocab.notes.append(
                f"{setting} of {', '.join(names[:4])}{', …' * (len(names) > 4)} cannot be stored in a "
                "GGUF file, so llama.cpp may tokenize texts with these tokens differently"
            )
    return vocab


def _flat(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a pre-tokenizer or normalizer, without nesting.

    In tokenizer.json, a step of type "Sequence" contains other steps, as a list at the key `inner`.
    """
    if isinstance(step, dict):
        if step.get("type") == "Sequence":
            for part in step[inner]:
                yield from _flat(part, inner)
        else:
            yield step


def _byte_level(
    vocab: _Metadata,
    model: JsonObject,
    added: Sequence[JsonObject],
    steps: list[JsonObject],
    normalizers: list[JsonObject],
) -> None:
    vocab.texts = {index: text for text, index in model["vocab"].items()}
    vocab.add_tokens(added, "")
    name = pre_tokenizer(steps, bool(model.get("ignore_merges")))
    if name is None:
        vocab.notes.append(
            "llama.cpp has no name for the pre-tokenizer of tokenizer.json. The GGUF file says 'default', and "
            "llama.cpp may give other token ids"
        )
    if any(step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel"):
        vocab.notes.append(
            "tokenizer.json puts a space before each text, but llama.cpp's byte-level BPE does not, so "
            "token ids may differ"
        )
    if normalizers:
        kinds = ", ".join(step["type"] for step in normalizers)
        vocab.notes.append(
            f"llama.cpp does not apply the normalizers of tokenizer.json ({kinds}), so token ids may differ"
        )
    vocab.list_tokens("gpt2", name or "default")
    # Spaces within a merge (in files that are not byte-level) are written as GPT-2 writes them.
    vocab.say(merges=[" ".join(part.replace(" ", "Ġ") for part in merge) for merge in _merges(model)])


def _merges(model: JsonObject) -> list[tuple[str, str]]:
    """Return the BPE merges in order. In tokenizer.json, a merge is "a b" or ["a", "b"]."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(str(left), str(right)) for left, right in pairs]


def _sentencepiece_bpe(result: _Metadata, model: JsonObject, added: Sequence[JsonObject]) -> None:
    """Add the metadata of a SentencePiece BPE tokenizer to `result`.

    llama.cpp first merges the pair that forms the token with the highest score. So the score of a token is minus the
    rank of the merge that forms it.

    Args:
        result: the metadata.
        model: the object "model" in tokenizer.json.
        added: the list "added_tokens" in tokenizer.json.
    """
    vocab, merges = model["vocab"], _merges(model)
    check_lengths(vocab, "tokenizer.json")
    result.texts = {index: text for text, index in vocab.items()}
    result.scores = dict.fromkeys(vocab.values(), 0.0)
    for rank, text in reversed([*enumerate(left + right for left, right in merges)]):
        if text in vocab:
            result.scores[vocab[text]] = -float(rank)
    for text, index in vocab.items():
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            result.types[index] = BYTE
    result.add_tokens(added)
    if model.get("unk_token") in vocab:
        result.types[vocab[model["unk_token"]]] = UNKNOWN
    normal, known = {text for text, index in vocab.items() if result.types.get(index, NORMAL) == NORMAL}, set(merges)
    if other := sum(any({*pair} <= normal and pair not in known for pair in splits(text)) for text in normal):
        result.notes.append(
            f"llama.cpp can form {other:,} tokens by merges that tokenizer.json does not have, so token ids may differ"
        )
    result.list_tokens("llama")


def _unigram(vocab: _Metadata, model: JsonObject, added: Sequence[JsonObject]) -> None:
    vocab.texts = {index: piece for index, (piece, _) in enumerate(model["vocab"])}
    vocab.scores = {index: float(score) for index, (_, score) in enumerate(model["vocab"])}
    vocab.add_tokens(added)
    if model.get("unk_id") is not None:
        vocab.types[model["unk_id"]] = UNKNOWN
    if model.get("byte_fallback"):
        vocab.notes.append(_NO_FALLBACK)
    vocab.list_tokens("t5")


def _space_prefix(vocab: _Metadata, steps: list[JsonObject], normalizers: list[JsonObject]) -> None:
    """Add to the metadata whether the tokenizer puts a space before a text.

    The space comes from a normalizer or, in newer files, from the pre-tokenizer step Metaspace.
    """
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if metaspace is None:
        vocab.say(add_space_prefix=any(step["type"] == "Prepend" for step in normalizers))
        return
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    vocab.say(add_space_prefix=scheme != "never")
    if scheme == "first":
        vocab.notes.append(
            "llama.cpp also puts a space after special tokens, but tokenizer.json puts one only before the whole text"
        )
    if scheme != "never":
        vocab.notes.append(
            "llama.cpp puts a space before every text, but tokenizer.json puts none before a text that already "
            "begins with a space"
        )


def _post_processing(vocab: _Metadata, tokenizer: Tokenizer) -> None:
    """Add to the metadata which special tokens the tokenizer puts before and after a text."""
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    at = next((i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain), 0)
    for name, where, ids in (("bos", "before", whole[:at]), ("eos", "after", whole[at + len(plain) :])):
        vocab.say(**{f"add_{name}_token": bool(ids)})
        if ids and ids[0] < vocab.rows:
            vocab.say(**{f"{ID_KEYS[name]}_token_id": ids[0]})
        if len(ids) > 1:
            vocab.notes.append(
                f"tokenizer.json puts {len(ids)} special tokens {where} a text, but llama.cpp puts only one"
            )


# --- the names of ways to split text ---------------------------------------------------------------------------------


def pre_tokenizer(steps: list[JsonObject], ignore_merges: bool) -> str | None:
    """Return llama.cpp's name for a byte-level pre-tokenizer with these steps, or None if llama.cpp has none."""
    asked = tuple(_words(steps))
    names = [name for name, known in PRE_TOKENIZERS.items() if tuple(_words(known)) == asked]
    # In tekken's vocabulary, merges also give every word that is a token.
    return next((name for name in names if (name in WORDS_FIRST) == ignore_merges or name == "tekken"), None)


def _words(steps: Sequence[JsonObject]) -> Iterator[str]:
    """Yield a text for every step that splits, usually its regular expression. Equal texts mean equal splits."""
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
            # Keeping the matches and dropping the rest is the same as splitting here: these patterns leave no rest.
            plain = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
            regex = regex.replace("\r", r"\r").replace("\n", r"\n")  # as themselves or as escapes
            yield regex if plain else f"{step.get('behavior')} {step.get('invert')} {regex}"
        else:
            yield f"{kind} {step.get('behavior')}"


# --- tokenizer.model -------------------------------------------------------------------------------------------------


_SPECIAL = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
"""A special token -> the number of the protobuf field with its id, and the default id (-1 for no such token)."""


# Complex: one branch for each kind of token.
def _from_sentencepiece(data: bytes, name: str, rows: int, settings: Mapping[str, Any]) -> _Metadata:  # noqa: C901
    """Return the metadata of a tokenizer.model, the file of SentencePiece, without using its library.

    The numbers of protobuf fields are those in sentencepiece_model.proto.

    Args:
        data: the content of the file.
        name: the name of the file for messages.
        rows: the number of rows of the model's embedding.
        settings: the content of tokenizer_config.json.
    """
    vocab, trainer, normalizer = _Metadata(rows=rows), dict[int, Any](), dict[int, Any]()
    try:
        for number, value in _fields(data):
            if number == 1:
                piece, index = dict(_fields(value)), len(vocab.texts)
                vocab.types[index] = piece.get(3, NORMAL)
                if vocab.types[index] not in range(1, 7):
                    raise ValueError(f"it has a piece of the unknown type {shown(vocab.types[index], 20)}")
                vocab.texts[index] = piece[1].decode()
                vocab.scores[index] = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        kind = {1: "t5", 2: "llama"}.get(int(trainer.get(3, 1)))  # unigram, BPE
        ids = {name: trainer.get(*field) for name, field in _SPECIAL.items()}
        ids = {name: index for name, index in ids.items() if 0 <= index < len(vocab.texts)}
        charsmap = bytes(normalizer.get(2, b""))
        prefixed, merged = bool(normalizer.get(3, True)), bool(normalizer.get(4, True))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise InvalidInput(f"{name} is not a SentencePiece model: {error!s:.80}") from error
    if not vocab.texts:
        raise InvalidInput(f"{name} is not a SentencePiece model: it has no pieces")
    if kind is None:
        return _none(f"the GGUF file has no tokenizer, because llama.cpp does not support this type of {name}")
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        try:
            vocab.add_tokens({"id": index, **token} for index, token in decoder.items() if isinstance(token, dict))
        except (KeyError, ValueError) as error:
            raise InvalidInput(
                f"tokenizer_config.json: added_tokens_decoder has a wrong form: {error!s:.80}"
            ) from error
    vocab.list_tokens(kind)
    vocab.say(add_space_prefix=prefixed)
    if kind == "t5":
        vocab.say(remove_extra_whitespaces=merged)
        if charsmap:
            vocab.say(precompiled_charsmap=charsmap)
    for end in ("bos", "eos"):
        stated = settings.get(f"add_{end}_token")
        vocab.say(**{f"add_{end}_token": stated if isinstance(stated, bool) else end == "bos"})
    vocab.say(**{f"{ID_KEYS[name]}_token_id": index for name, index in ids.items() if index < rows})
    by_bytes = BYTE in vocab.types.values()
    if kind == "t5" and by_bytes:
        vocab.notes.append(_NO_FALLBACK)
    if kind == "llama" and not by_bytes:
        vocab.notes.append(f"{name} has no byte tokens, and llama.cpp fails on characters that have no token")
    if kind == "llama" and charsmap:
        vocab.notes.append(
            f"{name} normalizes text, but llama.cpp's SentencePiece BPE does not, so token ids may differ"
        )
    _compare(vocab, sentencepiece(vocab.metadata, charsmap, merged, by_bytes))
    return vocab


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message as (number of the field, value). A value is an int or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"a number without an end at byte {at:,}")

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        size = varint() if wire == 2 else size
        if size is None or at + size > len(data):
            raise ValueError(f"at byte {at:,}")
        yield key >> 3, data[at : at + size]
        at += size


# --- special tokens and the chat template ----------------------------------------------------------------------------


def _special_ids(vocab: _Metadata, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Add the ids of special tokens to the metadata, from tokenizer_config.json or else from the model's config."""
    meta = vocab.metadata
    place = {text: index for index, text in enumerate(cast("list[str]", meta[PREFIX + "tokens"]))}
    for name, theirs in ID_KEYS.items():
        key = f"{PREFIX}{theirs}_token_id"
        token, stated = settings.get(f"{name}_token"), config.get(f"{name}_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(stated, list):
            stated = stated[0] if stated else None
        if name == "bos" and key in meta and meta.get(PREFIX + "add_bos_token"):
            continue  # the token that is put before a text has precedence
        if isinstance(token, str) and token in place:
            meta[key] = place[token]
        elif key not in meta and type(stated) is int and 0 <= stated < vocab.rows:
            meta[key] = stated
    types = cast("list[int]", meta[PREFIX + "token_type"])
    unknown = meta.get(PREFIX + "unknown_token_id")
    if meta[PREFIX + "model"] == "gpt2":  # byte-level BPE has no unknown token, because all bytes are known
        return
    if isinstance(unknown, int):
        vocab.say(token_type=[UNKNOWN if i == unknown else kind for i, kind in enumerate(types)])
    elif UNKNOWN in types:
        vocab.say(unknown_token_id=types.index(UNKNOWN))


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return the GGUF metadata with the chat templates; empty if there are none. gptkit never runs a template."""
    template: Any = settings.get("chat_template")
    try:
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode()
        elif "chat_template.json" in files and template is None:
            template = parse_config_text(files["chat_template.json"], "chat_template.json").get("chat_template")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"chat_template.jinja is not UTF-8: {error}") from error
    more = {name: text for name, text in files.items() if "/" in name}
    if more:  # transformers saves several templates as one file each
        default = [{"name": "default", "template": template}] if isinstance(template, str) else template or []
        try:
            others = [{"name": PurePosixPath(name).stem, "template": text.decode()} for name, text in more.items()]
        except UnicodeDecodeError as error:
            raise InvalidInput(f"one of the chat templates {', '.join(more)} is not UTF-8: {error}") from error
        template = [*default, *others]
    key = "tokenizer.chat_template"
    if isinstance(template, str):
        return {key: template}
    entries = [entry for entry in template if isinstance(entry, dict)] if isinstance(template, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    metadata: dict[str, Value] = {key: named.pop("default")} if "default" in named else {}
    if named:
        metadata["tokenizer.chat_templates"] = list(named)
        metadata |= {f"{key}.{name}": text for name, text in named.items()}
    return metadata
