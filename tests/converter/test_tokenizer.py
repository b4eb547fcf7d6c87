"""Tokenizers: AutoTokenizer's ids without its imports, text that streams as it decodes, and the files that travel."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.covering import examples, few
from helpers.processes import imported
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

import gptkit
from gptkit.converter.tokenizer import StreamDecoder, Tokenizer, eos_ids, load_tokenizer, token_files
from gptkit.errors import InvalidInput, UsageError

SHARED = Path(__file__).parents[2].parent / "shared"
STORIES = SHARED / "checkpoints" / "stories260K-llama"
CAPP = SHARED / "checkpoints" / "capp-gpt2"
SAMPLE = Path(gptkit.__file__).parent / "samples" / "gpt2"

needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")
KINDS = [pytest.param(SAMPLE, id="byte-level"), pytest.param(STORIES, id="byte-fallback", marks=needs_stories)]
TEXTS = [
    "",
    " ",
    "Once upon a time",
    " leading",
    "two  spaces,   three ",
    "a\nb\n\n\tc",
    "naïve café",
    "你好 😀👩‍👩‍👧",
    "▁x",
    "\0\x7f",
    "� already",
]


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the sample's tokenizer.json, and nothing else."""
    shutil.copy(SAMPLE / "tokenizer.json", tmp_path)
    return tmp_path


# --- ids


@pytest.mark.parametrize("path", KINDS)
def test_ids_and_text_are_those_of_autotokenizer(path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = loaded(path), AutoTokenizer.from_pretrained(path, local_files_only=True)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_ids == set(theirs.all_special_ids)


@needs_stories
@pytest.mark.parametrize("flag", [True, False, None])
def test_the_beginning_token_is_the_tokenizer_files_to_say(tmp_path: Path, flag: bool | None) -> None:
    from transformers import AutoTokenizer

    settings = json.loads((STORIES / "tokenizer_config.json").read_text()) | {"add_bos_token": flag}
    write_json(tmp_path / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(STORIES / name, tmp_path)
    assert loaded(tmp_path).encode("Once")[0] == 1
    assert loaded(tmp_path).encode("Once") == AutoTokenizer.from_pretrained(tmp_path).encode("Once")


def test_special_tokens_in_a_text_are_read_as_such() -> None:
    tokenizer = loaded(SAMPLE)
    ids = tokenizer.encode("To be<|endoftext|>")
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "To be<|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "To be"


def test_ids_that_no_token_has_decode_to_nothing() -> None:
    tokenizer = loaded(SAMPLE)
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a"), 10**6]) == "a"


def test_prompts_are_neither_cut_nor_filled_up(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    write_json(folder / "tokenizer.json", content)
    for text in ("a", "To be, or not to be"):
        assert loaded(folder).encode(text) == loaded(SAMPLE).encode(text)


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(UsageError, match="Unicode"):
        loaded(SAMPLE).encode("a\ud800")


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import pathlib\n"
        "from gptkit.converter.tokenizer import load_tokenizer, token_files\n"
        f"folder = pathlib.Path({str(SAMPLE)!r})\n"
        "assert load_tokenizer(folder).encode('To be') and token_files(folder)"
    )
    assert not imported(code, "torch", "transformers")


# --- which files


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    write_json(tmp_path / "vocab.json", {})  # half of a pair
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "missing") is None


@pytest.mark.skipif(not CAPP.is_dir(), reason="needs the project's shared checkpoints")
def test_a_checkpoint_of_ids_alone() -> None:
    assert load_tokenizer(CAPP) is None
    assert eos_ids(CAPP) == (51,)


def older_form(folder: Path) -> None:
    model = json.loads((SAMPLE / "tokenizer.json").read_text())["model"]
    write_json(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    shutil.copy(SAMPLE / "config.json", folder)


def test_vocab_and_merges_are_read_by_autotokenizer(tmp_path: Path) -> None:
    older_form(tmp_path)
    ours, same = loaded(tmp_path), loaded(SAMPLE)
    for text in [*TEXTS, "To be<|endoftext|>"]:
        assert ours.encode(text) == same.encode(text)
        assert ours.decode(ours.encode(text)) == same.decode(same.encode(text))
    assert ours.eos_ids == (0,)


def test_a_repositorys_own_code_is_never_run(tmp_path: Path) -> None:
    older_form(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    auto_map = {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "Mine", "auto_map": auto_map})
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(InvalidInput, match=r"vocab\.json"):
        load_tokenizer(tmp_path)
    assert not ran.exists()


def test_a_sentencepiece_model_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"(?s)tokenizer\.model.*sentencepiece"):
        load_tokenizer(tmp_path)


def as_text(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads((SAMPLE / "tokenizer.json").read_text())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"not \x1b[31m json",
        (SAMPLE / "tokenizer.json").read_bytes()[:9000],
        as_text(lambda content: content["model"]["merges"].append(["no", "such"])),
        as_text(lambda content: content.update(pre_tokenizer={"type": "Unheard of"})),
        # its Rust code panics, which is no Exception
        as_text(lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
    ],
    ids=["empty", "object", "list", "bytes", "text", "cut", "merges", "pre-tokenizer", "panic"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_an_interrupt_is_not_a_broken_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what was asked last taken for the answer to what is asked next."""

    def interrupted(pipe: object) -> None:
        raise KeyboardInterrupt

    tokenizer = loaded(folder)
    with monkeypatch.context() as patch:
        patch.setattr("gptkit.converter.confinement._receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_tokenizer(folder)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("To be")
    with pytest.raises(InvalidInput):
        tokenizer.encode("or not")


# --- where a text ends


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {"eos_token": "b"}, (5,)),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 6}, None, (5, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 6}, None, (6,)),
        ({}, {"eos_token_id": [6]}, None, (6,)),
        (None, {"eos_token_id": None}, {"eos_token": "<|endoftext|>"}, (0,)),
        (None, None, {"eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"}}, (0,)),
        (None, None, {"eos_token": "no such token"}, ()),
        (None, None, {"eos_token": None}, ()),
        (None, None, None, ()),
    ],
)
def test_ids_that_end_a_text(
    folder: Path, generation: object, config: object, tokenizer_config: object, expected: tuple[int, ...]
) -> None:
    written = {"generation_config": generation, "config": config, "tokenizer_config": tokenizer_config}
    for name, content in written.items():
        if content is not None:
            write_json(folder / f"{name}.json", content)
    assert loaded(folder).eos_ids == expected


@pytest.mark.parametrize("content", ['{"eos_token_id": "2"}', '{"eos_token_id": [true]}', "[]", "{"])
def test_ends_that_cannot_be_read(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"generation_config\.json"):
        load_tokenizer(folder)


# --- streaming


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = StreamDecoder(tokenizer, skip)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("path", KINDS)
def test_pieces_of_a_text_are_its_decoding(path: Path, skip: bool) -> None:
    tokenizer = loaded(path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = streamed(tokenizer, ids, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)
        assert "�" in text or not any("�" in piece for piece in pieces)


@few(1)
@settings(max_examples=examples(500), deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("path", KINDS)
def test_pieces_of_any_ids_are_their_decoding(path: Path, data: st.DataObject, skip: bool) -> None:
    tokenizer = loaded_once(path)
    # Bytes of characters, special tokens and ids without a token, beside anything else.
    first = st.sampled_from([*range(3, 270), *tokenizer.special_ids, tokenizer.vocab_size + 3])
    ids = data.draw(st.lists(first | st.integers(0, tokenizer.vocab_size + 10), max_size=30))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@needs_stories
def test_a_run_of_byte_tokens_goes_on_across_what_is_left_out() -> None:
    tokenizer = loaded(STORIES)
    lead, *rest = tokenizer.encode("你")[-3:]
    for left_out in (2, tokenizer.vocab_size + 3):  # the end-of-sequence token; a spare row of the model's table
        ids = [lead, left_out, *rest, left_out, *tokenizer.encode("a")[1:]]
        assert streamed(tokenizer, ids, True)[:5] == [""] * 5
        assert "".join(streamed(tokenizer, ids, True)) == tokenizer.decode(ids, True) == "你 a"


_LOADED: dict[Path, Tokenizer] = {}


def loaded_once(path: Path) -> Tokenizer:
    if path not in _LOADED:
        _LOADED[path] = loaded(path)
    return _LOADED[path]


@pytest.mark.parametrize("path", KINDS)
def test_pieces_come_as_early_as_they_are_certain(path: Path) -> None:
    tokenizer = loaded(path)
    ids = tokenizer.encode("Once upon a time, they said")
    assert sum(1 for piece in streamed(tokenizer, ids, True) if piece) >= len(ids) - 3


def test_a_character_over_several_tokens_comes_whole() -> None:
    tokenizer = loaded(SAMPLE)
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    assert streamed(tokenizer, ids, False) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end() -> None:
    tokenizer = loaded(SAMPLE)
    ids = tokenizer.encode("a😀")[:-1]
    assert streamed(tokenizer, ids, False) == ["a", "", "", "", "�"]


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("text", ["To be, or not to be", "one\n\ntwo", "a 你好 b", "To  be"])
def test_a_continuation_after_its_prompt(path: Path, text: str) -> None:
    tokenizer = loaded(path)
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        stream = StreamDecoder(tokenizer, skip_special_tokens=True, prompt=ids[:cut])
        joined = "".join(stream.push(token_id) for token_id in ids[cut:]) + stream.finish()
        before = tokenizer.decode(ids[:cut], skip_special_tokens=True).rstrip("�")
        assert before + joined == text


@needs_stories
def test_a_prompt_that_ends_within_a_run_of_byte_tokens() -> None:
    tokenizer = loaded(STORIES)
    newline, lead = tokenizer.encode("\n")[-1], tokenizer.encode("你")[-3]
    stream = StreamDecoder(tokenizer, skip_special_tokens=True, prompt=[newline])
    # <0x0A> <0xE4> is one run, and no valid text: the decoder itself makes it two marks.
    pieces = [stream.push(token_id) for token_id in [lead, *tokenizer.encode("Once upon")]]
    assert "".join(pieces) + stream.finish() == "�� Once upon"


def test_a_finished_stream_begins_anew() -> None:
    tokenizer = loaded(SAMPLE)
    stream = StreamDecoder(tokenizer)
    for text in ("To be", " or"):
        assert "".join(stream.push(token_id) for token_id in tokenizer.encode(text)) + stream.finish() == text


def test_the_librarys_own_stream_has_no_end() -> None:
    """Why `StreamDecoder` is ours: what DecodeStream holds back of an unfinished character, it never gives."""
    library = tokenizers.Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    first, _ = library.encode("ä").ids
    stream = DecodeStream(skip_special_tokens=False)
    assert stream.step(library, first) is None
    assert library.decode([first]) == "".join(streamed(loaded(SAMPLE), [first], False)) == "�"


# --- files that travel


def test_the_files_of_a_tokenizer(tmp_path: Path) -> None:
    travel = [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "qwen.tiktoken",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "token_mappings.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "tokenizer_config.json",
        "vocab.json",
    ]
    stay = [
        "LICENSE",
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.py",
        "tokenization_mine.py",
        "training_args.bin",
    ]
    for name in travel + stay:
        (tmp_path / name).touch()
    (tmp_path / "tokenizer.d").mkdir()
    assert token_files(tmp_path) == [tmp_path / name for name in travel]


def test_the_files_of_a_tokenizer_in_a_cache_of_links(tmp_path: Path) -> None:
    # the hub's cache keeps a snapshot as links to blobs
    (tmp_path / "blob").touch()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "tokenizer.json").symlink_to("../blob")
    assert token_files(snapshot) == [snapshot / "tokenizer.json"]


def test_files_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="missing"):
        token_files(tmp_path / "missing")
