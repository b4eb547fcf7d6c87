"""Our model of how llama.cpp tokenizes, and the notes on what it would do otherwise than the original.

The splits below are llama.cpp's own. `pytest -m slow` compares the whole model with llama.cpp where the package
xllamacpp is installed: every way to split text, on every hard text.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import gptkit
from gptkit.converter.formats import gguf_vocab
from gptkit.converter.formats.gguf_header import Array, open_header
from gptkit.converter.formats.gguf_tokenizer import PRE_TOKENIZERS
from gptkit.converter.formats.gguf_vocab import vocabulary
from gptkit.converter.formats.llama_cpp_tokenizer import SPLITS, LlamaCpp, hard_texts, mapped, split
from gptkit.errors import InvalidInput

ALL_BYTES = pre_tokenizers.ByteLevel.alphabet()


def test_every_name_that_is_written_has_its_splits() -> None:
    assert set(SPLITS) == set(PRE_TOKENIZERS)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "I'm 1234  x", ["I", "'m", " 1234", " ", " x"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("llama-bpe", "I'M 1234\n\nx", ["I", "'M", " ", "123", "4", "\n\n", "x"]),
        ("qwen2", "12 cafe\u0301", ["1", "2", " cafe", "\u0301"]),
        ("qwen35", "12 cafe\u0301", ["1", "2", " cafe\u0301"]),
        # The checkpoints' own patterns keep a mark with its letter, and cut before the second capital.
        ("tekken", "cafe\u0301 ÀÉ", ["cafe", "\u0301", " ÀÉ"]),
        ("tekken", "fooBar", ["foo", "Bar"]),
        ("gpt-4o", "cafe\u0301's ΑΒγ", ["cafe", "\u0301'", "s", " ΑΒγ"]),
        ("deepseek-v3", "12345 東京go(x)", ["123", "45", " ", "東京", "go", "(x", ")"]),
        ("bloom", "a, b.c", ["a", ",", " b", ".", "c"]),
    ],
)
def test_splits(name: str, text: str, parts: list[str]) -> None:
    assert split(text, name) == parts


# --- byte-level BPE ---


def trained(steps: Any, normalizer: Any = None, size: int = 1500) -> bytes:
    """A tokenizer.json whose merges reach across every way to split text, with these steps in it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    options: Any = {"special_tokens": ["<|end|>"], "initial_alphabet": ALL_BYTES, "show_progress": False}
    made.train_from_iterator(hard_texts(), trainers.BpeTrainer(vocab_size=size, **options))
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    data = json.loads(made.to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    return json.dumps(data).encode()


def notes_of(name: str, normalizer: Any = None) -> list[str]:
    return vocabulary({"tokenizer.json": trained(PRE_TOKENIZERS[name], normalizer)}, 1500).notes


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "smollm", "bloom", "deepseek-v3"])
def test_what_llama_cpp_does_alike_has_no_note(name: str) -> None:
    found = vocabulary({"tokenizer.json": trained(PRE_TOKENIZERS[name])}, 1500)
    assert found.metadata["tokenizer.ggml.pre"] == name
    assert not [note for note in found.notes if "other token ids" in note], found.notes


@pytest.mark.parametrize("name", ["tekken", "gpt-4o"])
def test_splitters_that_take_marks_apart_are_noted(name: str) -> None:
    (note,) = (note for note in notes_of(name) if "other token ids" in note)
    assert f"of {len(hard_texts())} difficult test texts" in note


def test_a_normalizer_and_an_unknown_way_to_split_are_noted() -> None:
    assert any("other token ids" in note for note in notes_of("gpt-2", normalizers.NFKC()))
    steps = [{"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}]
    notes = vocabulary({"tokenizer.json": trained([*steps, *PRE_TOKENIZERS["gpt-2"]])}, 1500).notes
    assert any("other token ids" in note for note in notes)


def test_the_deepseek_tokenizer_comes_back(tmp_path: Path) -> None:
    """Its file writes line ends as themselves where ours writes escapes."""
    text = trained(PRE_TOKENIZERS["deepseek-v3"], size=512).replace(rb"\\r\\n", rb"\r\n")
    gptkit.convert("sample:llama", tmp_path / "model", "hf")
    (tmp_path / "model" / "tokenizer.json").write_bytes(text)
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    gptkit.convert(tmp_path / "model", tmp_path / "m.gguf", "gguf")
    assert open_header(tmp_path / "m.gguf").metadata["tokenizer.ggml.pre"] == "deepseek-v3"
    gptkit.convert(tmp_path / "m.gguf", tmp_path / "back", "hf")
    back, own = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json")), Tokenizer.from_str(text.decode())
    assert [back.encode(each).ids for each in hard_texts()] == [own.encode(each).ids for each in hard_texts()]


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def message(*fields: tuple[int, int | bytes | float]) -> bytes:
    """A protobuf message of these fields."""

    def varint(value: int) -> bytes:
        found = bytearray()
        while value > 0x7F:
            found.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*found, value])

    parts = []
    for number, value in fields:
        if isinstance(value, bytes):
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        else:
            parts.append(varint(number << 3) + varint(value))
    return b"".join(parts)


def charsmap(key: bytes, value: bytes) -> bytes:
    """SentencePiece's compiled map of one string to another: a double array of 32-bit units, then texts."""
    units, node = [0] * 4096, 0
    units[0] = 256 << 10
    at = 256
    for place, byte in enumerate(key):
        node = at ^ byte
        base = 256 << (place + 1)
        units[node] = base << 10 | byte | (0x100 if place == len(key) - 1 else 0)
        at = node ^ base
    units[at] = 0x80000000
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + value + b"\0"


FULL_WIDTH = charsmap("Ｆ".encode(), b"A")


def test_the_map_of_characters() -> None:
    assert mapped("xＦyＦＢ", FULL_WIDTH) == "xAyAＢ"
    assert mapped("xＦ", b"") == "xＦ"


def sentencepiece(kind: int, by_bytes: bool, blob: bytes = b"", merged: int = 0) -> bytes:
    """A tokenizer.model: unigram (1) or BPE (2) over a few letters and words."""
    pieces = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>".encode(), 0.0, 6) for byte in range(256 if by_bytes else 0)]
    words = ["\u2581", "A", "b", "ab", "Ab", "\u2581A", "\u2581Ab", *"acdefghijklmnopqrstuvwxyz"]
    pieces += [(word.encode(), -float(rank), 1) for rank, word in enumerate(dict.fromkeys(words))]
    listed = [(1, message((1, text), (2, score), (3, of))) for text, score, of in pieces]
    return message(*listed, (2, message((3, kind))), (3, message((2, blob), (3, 1), (4, merged))))


def size_of(data: bytes) -> int:
    return sum(number == 1 for number, _ in gguf_vocab._fields(data))


@pytest.mark.parametrize(
    ("kind", "by_bytes", "blob", "merged", "model", "told"),
    [
        (1, True, b"", 0, "t5", ["unigram tokenizer has no byte fallback", "other token ids"]),
        (1, False, FULL_WIDTH, 1, "t5", []),
        (2, True, b"", 0, "llama", []),
        (2, True, FULL_WIDTH, 0, "llama", ["llama.cpp's SentencePiece BPE does not", "other token ids"]),
        (2, True, b"", 1, "llama", ["other token ids"]),
        (2, False, b"", 0, "llama", ["no byte tokens", "other token ids"]),
    ],
    ids=["unigram by bytes", "unigram", "BPE", "normalized BPE", "BPE that merges spaces", "BPE without bytes"],
)
def test_notes_of_a_sentencepiece_model(
    kind: int, by_bytes: bool, blob: bytes, merged: int, model: str, told: list[str]
) -> None:
    data = sentencepiece(kind, by_bytes, blob, merged)
    found = vocabulary({"tokenizer.model": data}, size_of(data))
    assert found.metadata["tokenizer.ggml.model"] == model
    assert len(found.notes) == len(told), found.notes
    assert all(words in note for words, note in zip(told, found.notes, strict=True)), found.notes


def test_a_damaged_map_is_invalid_input() -> None:
    for blob in (b"\0", b"\xff\xff\xff\x7f", FULL_WIDTH[:-1]):
        data = sentencepiece(1, False, blob)
        with pytest.raises(InvalidInput):
            vocabulary({"tokenizer.model": data}, size_of(data))


# --- llama.cpp itself -------------------------------------------------------------------------------------------------


def llama_cpp(path: Path) -> Callable[[str], list[int]]:
    """llama.cpp's own tokenizer of a file, by its C interface."""
    import xllamacpp  # type: ignore[import-not-found]

    (file,) = Path(xllamacpp.__file__).parent.glob("*.so")
    library = ctypes.CDLL(str(file))

    class Parameters(ctypes.Structure):
        _fields_ = (("raw", ctypes.c_byte * 512),)

    for name, result in (("llama_model_default_params", Parameters), ("llama_model_load_from_file", ctypes.c_void_p)):
        getattr(library, name).restype = result
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_backend_init()
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    vocab = ctypes.c_void_p(library.llama_model_get_vocab(ctypes.c_void_p(model)))

    def encode(text: str) -> list[int]:
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 16))()
        count = library.llama_tokenize(vocab, data, len(data), room, len(room), False, True)
        return list(room[:count])

    return encode


def metadata_of(path: Path) -> dict[str, Any]:
    header = open_header(path)
    given: Iterable[tuple[str, Any]] = header.metadata.items()
    return {key: header.values(key, 10**6) if isinstance(value, Array) else value for key, value in given}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs the package xllamacpp")
@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_gives_the_same_ids(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gptkit.convert("sample:llama", tmp_path / "model", "hf")
    (tmp_path / "model" / "tokenizer.json").write_bytes(trained(PRE_TOKENIZERS["gpt-2"], size=512))
    monkeypatch.setattr(gguf_vocab, "pre_tokenizer", lambda *_: name)
    gptkit.convert(tmp_path / "model", tmp_path / "m.gguf", "gguf")
    ours, theirs = LlamaCpp(metadata_of(tmp_path / "m.gguf")), llama_cpp(tmp_path / "m.gguf")
    assert [ours.encode(text) for text in hard_texts()] == [theirs(text) for text in hard_texts()]
