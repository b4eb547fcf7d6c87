"""Texts as token files: what is in them, whatever their size, and what is refused; windows as a function of a step."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command import call
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import gptkit
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import InvalidInput, UsageError
from gptkit.training import data
from gptkit.training.data import NOWHERE, Stretch, TextFile, open_tokens, tokenize

SAMPLES = Path(data.__file__).parents[1] / "samples"
PLAY = SAMPLES / "play.txt"


def words(*lines: str) -> str:
    return "".join(f"{json.dumps({'text': line})}\n" for line in lines)


def test_a_text_comes_back_and_ends(tmp_path: Path) -> None:
    done = tokenize([PLAY], tmp_path / "play", vocabulary=300)
    found = open_tokens(tmp_path / "play")
    assert found == done
    ids = found.read(0, found.tokens)
    assert found.load_tokenizer().decode(ids[:-1].tolist()).encode() == PLAY.read_bytes() and ids[-1] == 0
    assert (found.vocabulary, found.dtype, list(found.ends)) == (300, "<u2", [found.tokens])
    assert found.as_json()["sources"][0]["bytes"] == PLAY.stat().st_size


def test_bytes_are_a_tokenizer(tmp_path: Path) -> None:
    """One token for each byte and one for the end, whatever the text."""
    text = tmp_path / "text"
    text.write_text("À la carte: naïve 東京 🙂\n\n  x")
    found = tokenize([text], tmp_path / "out", tokenizer="bytes")
    assert (found.vocabulary, found.tokens) == (257, len(text.read_bytes()) + 1)
    ids = found.read(0, found.tokens)
    assert found.load_tokenizer().decode(ids[:-1].tolist()) == text.read_text()
    other = tokenize([PLAY], tmp_path / "play", tokenizer="bytes")
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((found.folder / name).read_bytes() == (other.folder / name).read_bytes() for name in names)
    with pytest.raises(UsageError, match="--vocabulary and --tokenizer cannot be combined"):
        tokenize([text], tmp_path / "third", tokenizer="bytes", vocabulary=300)


def test_documents_are_lines_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(words("one", "", "two three") + "\n")
    (tmp_path / "b.txt").write_text("four")
    found = tokenize([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", vocabulary=260)
    ids = found.read(0, found.tokens)
    parts = np.split(ids, found.ends[:-1])
    assert [found.load_tokenizer().decode(part[:-1].tolist()) for part in parts] == ["one", "two three", "four"]
    assert [part[-1] for part in parts] == [0, 0, 0] and found.documents == 3


def test_a_named_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenize([PLAY], tmp_path / "named", tokenizer="sample:llama")
    tokenize([PLAY], tmp_path / "file", tokenizer=SAMPLES / "llama" / "tokenizer.json")
    names = {path.name for path in (tmp_path / "named").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    first, second = ((tmp_path / name / "tokens.bin").read_bytes() for name in ("named", "file"))
    own = load_tokenizer(SAMPLES / "llama")
    assert own is not None
    text = PLAY.read_text()
    assert first == second == np.array([*own.encode(text), *own.eos_ids], "<u2").tobytes()


def test_a_file_of_weights_has_its_tokenizer(tmp_path: Path) -> None:
    gptkit.convert("sample:llama", tmp_path / "model.gguf", "gguf")
    text = tmp_path / "text"
    text.write_text(PLAY.read_text()[:20_000])
    for name, model in (("inside", tmp_path / "model.gguf"), ("beside", "sample:llama")):
        tokenize([text], tmp_path / name, tokenizer=model)
    first, second = ((tmp_path / name / "tokens.bin").read_bytes() for name in ("inside", "beside"))
    assert first == second
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((SAMPLES / "llama" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((SAMPLES / "llama" / "config.json").read_bytes())
    with pytest.raises(UsageError, match="has no tokenizer"):
        tokenize([text], tmp_path / "none", tokenizer=alone)


def sentencepiece(folder: Path, scheme: str | None) -> Path:
    """A tokenizer as SentencePiece's: spaces are ▁, and one stands before a text; bytes for what it has not."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if scheme is None:  # as Llama 2's, and Mistral's first
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    letters = sorted({*PLAY.read_text()} - {"\n", " "})
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([word for word in PLAY.read_text().split() if len(word) > 1], trainer)
    made.save(str(folder / "sentencepiece.json"))
    return folder / "sentencepiece.json"


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("tokenizer", ["sample:gpt2", None, "always", "first", "prepended"])
def test_pieces_give_the_tokens_of_the_whole(tmp_path: Path, monkeypatch, tokenizer: str | None, lines: bool) -> None:
    """Of what has lines, and of one endless line; of a .jsonl too."""
    text = tmp_path / "text"
    text.write_text(PLAY.read_text()[:40_000] + "\n\n  Ünï.\r\n\n" * 50)
    if not lines:
        text.write_text(" ".join(text.read_text().split()))
    if tokenizer in ("always", "first", "prepended"):
        tokenizer = str(sentencepiece(tmp_path, None if tokenizer == "prepended" else tokenizer))
    (tmp_path / "text.jsonl").write_text(words(text.read_bytes().decode()))
    options = {"tokenizer": tokenizer, "vocabulary": 400 if tokenizer is None else None}
    assert [*TextFile(text).pieces()] == [(text.read_bytes().decode(), True)]
    tokenize([text], tmp_path / "whole", **options)
    monkeypatch.setattr(data, "_PIECE", 3001)
    for given in (text, tmp_path / "text.jsonl"):
        assert len([*TextFile(given).pieces()]) > 5
        tokenize([given], tmp_path / f"{given.name}-pieces", **options)
        found = (tmp_path / f"{given.name}-pieces/tokens.bin").read_bytes()
        assert found == (tmp_path / "whole/tokens.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "these files are empty"),
        ("a.txt", b"abc\xff", "not text in UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2 is not a JSON object"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=said):
        tokenize([tmp_path / name], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_call_that_is_wrong_is_refused(tmp_path: Path) -> None:
    for options in ({"vocabulary": 256}, {"tokenizer": "sample:gpt2", "vocabulary": 300}):
        with pytest.raises(UsageError):
            tokenize([PLAY], tmp_path / "out", **options)
    assert call("tokenize", PLAY).exit_code == 2
    assert call("tokenize", tmp_path / "none.txt", tmp_path / "out").exit_code == 4
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tree.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        InvalidInput, match=r"/tree\.json cannot be read as a tokenizer.*\nGive a tokenizer\.json, or a model"
    ):
        tokenize([PLAY], tmp_path / "out", tokenizer=tmp_path / "tree.json")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    found = tokenize([PLAY], tmp_path / "out", vocabulary=300)
    found.read(0, 1)
    file = tmp_path / "out/tokens.bin"
    before = file.read_bytes()
    file.write_bytes(before[:-2])
    with pytest.raises(InvalidInput, match="changed since it was opened"):
        found.require_unchanged()
    with pytest.raises(InvalidInput, match="it is shorter"):
        found.read(0, found.tokens)
    with pytest.raises(InvalidInput, match="bytes expected"):
        open_tokens(tmp_path / "out")
    file.write_bytes(before[:-2] + b"\0\1")
    with pytest.raises(InvalidInput, match="its bytes changed"):
        open_tokens(tmp_path / "out")


def test_windows_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    found = tokenize([PLAY], tmp_path / "out", vocabulary=300)
    stretch = Stretch(found, 10, 10 + 64 * 16 + 5, 16)
    assert len(stretch) == 64
    once = [stretch.step(step, 8, seed=3) for step in range(8)]
    again = Stretch(open_tokens(tmp_path / "out"), 10, 10 + 64 * 16 + 5, 16).step(5, 8, seed=3)
    assert (again.ids == once[5].ids).all() and (again.ids != stretch.step(5, 8, seed=4).ids).any()
    # An epoch meets every window once, a step's shares are the step, and targets are the tokens behind.
    rows = np.concatenate([each.ids for each in once])
    text = found.read(0, found.tokens)
    starts = [
        at
        for at in range(10, 16)
        if (np.sort(rows, axis=0)[0] >= 0).all() and (text[at : at + 16] == rows).all(1).any()
    ]
    assert len(starts) == 1 and len({row.tobytes() for row in rows}) == 64
    assert (np.concatenate([once[0].part(each, 3).ids for each in range(3)]) == once[0].ids).all()
    assert (once[0].targets[:, :-1] == once[0].ids[:, 1:]).all()
    assert (stretch.spread(4).ids == stretch.spread(4).ids).all()


def test_targets_stay_within_their_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(words("aaa", "bbbb", "cc", "ddddd"))
    found = tokenize([tmp_path / "a.jsonl"], tmp_path / "out", vocabulary=257)
    windows = Stretch(found, 0, found.tokens, 6).spread(9)
    assert windows.documents is not None
    assert windows.documents.tolist() == [[0, 0, 0, 0, 1, 1], [1, 1, 1, 2, 2, 2]]
    assert [[each == NOWHERE for each in row] for row in windows.targets] == [
        [False, False, False, True, False, False],
        [False, False, True, False, False, True],
    ]
    whole = Stretch(found, 0, found.tokens, 6, apart=False).spread(9)
    assert whole.documents is None and whole.counted == 12 and windows.counted == 9
