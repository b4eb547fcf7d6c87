"""Tokenizers of fewer tokens: a text of kept tokens encodes as it did, any other still reads back as itself."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.covering import examples, few
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gptkit.converter import vocabulary as module
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.converter.vocabulary import Vocabulary, ids_in, named_in, passed_through, read_vocabulary, renumber
from gptkit.errors import InvalidInput

TEXT = (SAMPLES_DIR / "play.txt").read_text()[:30_000]
LINES = [line for line in TEXT.split("\n") if line]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(SAMPLES_DIR / "gpt2" / "tokenizer.json"))


def byte_fallback() -> Tokenizer:
    """As llama 2's: characters, and bytes for those that the vocabulary lacks."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*special, *BYTES], show_progress=False)
    made.train_from_iterator(LINES, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = [each for each in data["added_tokens"] if each["content"] in special]
    made = Tokenizer.from_str(json.dumps(data))
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    made.add_tokens(["  ", "KING RICHARD"])
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<pad>", "<unk>", "</s>"], show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 2)])
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(LINES, trainer)
    made.add_special_tokens(["[END]"])
    made.post_processor = processors.BertProcessing(("[END]", made.token_to_id("[END]")), ("[CLS]", 2))
    made.enable_padding(pad_id=0, pad_token="[PAD]")
    return made


def with_suffix() -> Tokenizer:
    """As the first GPT's: characters, the last of a word marked."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each for each in (byte_level, byte_fallback, unigram, wordpiece, with_suffix)
}


@cache
def vocabulary_of(kind: str) -> tuple[Tokenizer, Vocabulary]:
    made = KINDS[kind]()
    data = json.loads(made.to_str())
    made.no_padding()
    return made, Vocabulary(data, {})


def shortened(kind: str, ids: set[int]) -> tuple[Tokenizer, dict[int, int], Tokenizer]:
    """The tokenizer, the table of what is kept, and the tokenizer of that alone."""
    old, vocabulary = vocabulary_of(kind)
    table = {each: new for new, each in enumerate(sorted(vocabulary.closed(ids | set(vocabulary.required()))))}
    text = vocabulary.cut(table)["tokenizer.json"]
    assert text is not None
    new = Tokenizer.from_str(text.decode())
    new.no_padding()
    return old, table, new


@few(1)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_texts_of_kept_tokens_encode_as_they_did(kind: str, data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=8))
    full, _ = vocabulary_of(kind)
    listed = data.draw(st.sets(st.integers(0, full.get_vocab_size() - 1), max_size=40))
    asked = {i for line in lines for i in full.encode(line).ids} | listed
    old, table, new = shortened(kind, asked)
    assert set(table) >= asked
    assert new.get_vocab_size() == len(table) < old.get_vocab_size()
    # Texts whose tokens are kept: those lines, and whatever kept tokens spell, where they are encoded as that.
    spelled = data.draw(st.lists(st.lists(st.sampled_from(sorted(table)), max_size=12), max_size=6))
    texts = [*lines, *(old.decode(ids) for ids in spelled), *(old.decode(ids).strip() for ids in spelled)]
    held = 0
    for text in texts:
        ids = old.encode(text).ids
        if set(ids) <= set(table):
            held += 1
            assert new.encode(text).ids == [table[i] for i in ids]
    assert held >= len(lines)
    assert new.encode(LINES[0], LINES[1]).ids  # the pair's template too


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=examples(40), deadline=None)
@given(text=st.text(), keep=st.sets(st.integers(0, 511), max_size=20))
def test_every_text_still_reads_back(kind: str, text: str, keep: set[int]) -> None:
    old, _, new = shortened(kind, keep)
    assert new.decode(new.encode(text).ids) == old.decode(old.encode(text).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_becomes_unknown(kind: str) -> None:
    old, table, new = shortened(kind, set())
    unknown = next((t for t in ("<unk>", "[UNK]") if old.token_to_id(t) is not None), None)
    for line in LINES[:100]:
        assert new.encode(line).tokens.count(unknown) == old.encode(line).tokens.count(unknown)  # type: ignore[arg-type]
    assert len(table) < old.get_vocab_size()
    for each in json.loads(old.to_str())["added_tokens"]:
        if each["special"]:
            assert new.token_to_id(each["content"]) == table[each["id"]]


def test_the_tokens_that_a_token_is_merged_from_are_kept() -> None:
    old, vocabulary = vocabulary_of("byte_level")
    longest = max(old.get_vocab(), key=lambda token: (len(token), token) if "|" not in token else (0, ""))
    bare = vocabulary.closed({old.token_to_id(longest)})
    assert len(bare) > len(longest) - 1
    ranks = {tuple(merge): i for i, merge in enumerate(json.loads(old.to_str())["model"]["merges"])}
    assert passed_through(longest, ranks) >= set(longest) | {longest}  # type: ignore[arg-type]
    assert passed_through("qqqq", ranks) == set()  # type: ignore[arg-type]
    assert passed_through("abab", {("a", "b"): 1, ("ab", "ab"): 2}) == {"a", "b", "ab", "abab"}
    # The lower rank first, although the other comes first in the text.
    assert passed_through("abc", {("a", "b"): 2, ("b", "c"): 1, ("a", "bc"): 3}) == {"a", "b", "c", "bc", "abc"}


def no_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vocabulary, "closed", lambda self, ids: set(ids))


def no_characters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vocabulary, "_characters", lambda self: iter(()))


def processor_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_pipeline_ids", lambda data: iter(()))


@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (no_parts, "byte_level"),
        (no_characters, "byte_level"),
        (no_characters, "byte_fallback"),
        (processor_forgotten, "wordpiece"),
    ],
)
def test_each_of_these_is_needed(
    mutate: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    line = "What, is the Duke of York so bold?"
    old, table, new = shortened(kind, set(vocabulary_of(kind)[0].encode(line).ids))
    same = new.encode(line).ids == [table.get(i) for i in old.encode(line).ids]
    odd = "Q—é漢\n"
    assert not same or new.decode(new.encode(odd).ids) != old.decode(old.encode(odd).ids)


def test_the_lowest_score_decides_what_unknown_costs() -> None:
    """Why the piece that has it is kept: `?` alone is unknown, and costs 10 more than the worst piece."""
    pieces = [("<unk>", 0.0), ("?b", -20.0), ("c", -20.0), ("d", -20.0), ("bcd", -1.0), ("low", -90.0), ("more", -9.0)]
    data = json.loads(Tokenizer(models.Unigram(pieces, unk_id=0)).to_str())

    def encoded(kept: list[int]) -> list[str]:
        text = Vocabulary(data, {}).cut({old: new for new, old in enumerate(kept)})["tokenizer.json"]
        assert text is not None
        tokens: list[str] = Tokenizer.from_str(text.decode()).encode("?bcd").tokens
        return tokens

    kept = sorted({1, 4} | set(Vocabulary(data, {}).required()))
    assert kept == [0, 1, 2, 3, 4, 5]
    assert encoded(kept) == encoded(list(range(7))) == ["?b", "c", "d"]
    assert encoded([0, 1, 2, 3, 4]) == ["?", "bcd"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_ids_in_configs() -> None:
    config = {
        "eos_token_id": [2, 7],
        "pad_token_id": -1,
        "bos_token_id": True,
        "vocab_size": 7,
        "text_config": {"decoder_start_token_id": 7},
        "suppress_tokens": [2, 3],
        "bad_words_ids": [[7, 2], [3]],
        "eos_token": "</s>",
    }
    assert ids_in(config) == {2, 7, -1, 3}
    assert renumber(config, {2: 0, 7: 1}) == {
        **config,
        "eos_token_id": [0, 1],
        "text_config": {"decoder_start_token_id": 1},
        "suppress_tokens": [0, 3],
        "bad_words_ids": [[1, 0], [3]],
    }
    named = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "unk_token": None, "add_bos_token": True}
    assert named_in(
        {**named, "extra_special_tokens": {"image_token": "<i>"}, "additional_special_tokens": ["<x>"]}
    ) == {"</s>", "<s>", "<i>", "<x>"}


def written(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, data in files.items():
        text = data if isinstance(data, str) else json.dumps(data)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_all_files_speak_of_the_same_tokens(tmp_path: Path) -> None:
    made = byte_fallback()
    vocab = json.loads(made.to_str())["model"]
    settings = {
        "eos_token": "</s>",
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "600": {"content": "  ", "special": False}},
    }
    folder = written(
        made,
        tmp_path / "model",
        tokenizer_config__json=settings,
        generation_config__json={"eos_token_id": [2, 340], "bos_token_id": 1, "top_k": 5},
        vocab__json=vocab["vocab"],
        merges__txt="#version: 0.2\n" + "\n".join(" ".join(merge) for merge in vocab["merges"]) + "\n",
        added_tokens__json={"  ": 600, "KING RICHARD": 601},
        tokenizer__model="spm",
        chat_template__jinja="{{ x }}",
    )
    vocabulary = read_vocabulary(folder, {}, '{"eos_token_id": 2, "model_type": "llama"}')
    assert vocabulary is not None
    assert vocabulary.required()[340] == "generation_config.json names it"
    asked = set(made.encode(" so bold").ids) | {600}
    kept = sorted(vocabulary.closed(asked | set(vocabulary.required())))
    table = {old: new for new, old in enumerate(kept)}
    files = {name: text for name, text in vocabulary.cut(table).items() if text is not None}
    assert set(vocabulary.cut(table)) - set(files) == {"tokenizer.model"}
    assert set(files) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
    }
    new = Tokenizer.from_str(files["tokenizer.json"].decode())
    for name, old_id in vocabulary.tokens.items():
        assert new.token_to_id(name) == table.get(old_id)
    assert json.loads(files["generation_config.json"]) == {
        "eos_token_id": [table[2], table[340]],
        "bos_token_id": 1,
        "top_k": 5,
    }
    assert json.loads(files["tokenizer_config.json"])["added_tokens_decoder"] == {
        "1": {"content": "<s>", "special": True},
        str(table[600]): {"content": "  ", "special": False},
    }
    assert json.loads(files["added_tokens.json"]) == {
        token: table[i] for token, i in (("  ", 600), ("KING RICHARD", 601)) if i in table
    }
    # The older form alone gives the same tokenizer.
    merges = [tuple(line.split(" ")) for line in files["merges.txt"].decode().split("\n")[1:] if line]
    older = models.BPE(json.loads(files["vocab.json"]), merges, unk_token="<unk>", byte_fallback=True)  # type: ignore[arg-type]
    both = Tokenizer(older)
    both.normalizer, new.post_processor = new.normalizer, processors.TemplateProcessing("$A", "$A $B", [])
    assert both.encode(" so bold").ids == new.encode(" so bold").ids


def test_older_forms_are_written_in_the_one_file_form(tmp_path: Path) -> None:
    data = json.loads(byte_level().to_str())["model"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(data["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(each) for each in data["merges"]))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    vocabulary = read_vocabulary(folder, {})
    assert vocabulary is not None and vocabulary.kind == "BPE"
    assert read_vocabulary(tmp_path, {}) is None


def test_a_table_that_the_library_reads_otherwise_is_refused() -> None:
    _, vocabulary = vocabulary_of("byte_fallback")
    table = {old: new for new, old in enumerate(sorted(vocabulary.required()))}
    table[600] = 5000  # added tokens are numbered behind the others, whatever the file says
    with pytest.raises(InvalidInput, match="gptkit cannot remove tokens from this tokenizer"):
        vocabulary.cut(table)
    assert tokenizers.__version__
