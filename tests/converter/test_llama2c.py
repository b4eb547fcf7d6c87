"""llama2.c's files against a writer and a model of their own here, made after llama2.c's export.py and model.py."""

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.families import CONFIGS, LLAMA, LLAMA3_ROPE, hf_config, save_hf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gptkit
from gptkit.analysis.params import StoredTensors, params
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert, plan_conversion
from gptkit.converter.resolve import read_spec
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import CannotExpress, CheckpointError, GptkitError, InvalidInput, UsageError

STORIES = Path(__file__).parents[2].parent / "shared" / "checkpoints" / "stories260K-llama"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")

PLAIN = {**LLAMA, "rms_norm_eps": 1e-5, "num_hidden_layers": 3}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 50}
KINDS = {"plain": PLAIN, "grouped": GROUPED}
PROMPT = "Once upon a time, there was a little girl named Lily; it's 2026!\n\n  She said: Привет \U0001f44b"


# --- a writer and a model of their own ---


def stored(reference: str) -> StoredTensors:
    (found,) = params(reference, stored=True)
    assert found.stored is not None
    return found.stored


def sizes_of(config: dict[str, Any]) -> tuple[int, int, int, int, int, int, int]:
    heads = config["num_attention_heads"]
    return (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads") or heads,
        config["vocab_size"],
        config["max_position_embeddings"],
    )


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """transformers' rows, element by element: i and i + d/2 of a head become 2i and 2i + 1."""
    dim = len(weight) // heads
    out = torch.empty_like(weight)
    for head in range(heads):
        for pair in range(dim // 2):
            out[head * dim + 2 * pair] = weight[head * dim + pair]
            out[head * dim + 2 * pair + 1] = weight[head * dim + pair + dim // 2]
    return out


def parts(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The tensors of each kind, by run.c's names."""
    state, (_, _, layers, heads, kv_heads, _, _) = model.state_dict(), sizes_of(config)

    def stacked(name: str) -> list[torch.Tensor]:
        return [state[f"model.layers.{layer}.{name}.weight"] for layer in range(layers)]

    return {
        "embedding": [state["model.embed_tokens.weight"]],
        "rms_att": stacked("input_layernorm"),
        "wq": [interleaved(w, heads) for w in stacked("self_attn.q_proj")],
        "wk": [interleaved(w, kv_heads) for w in stacked("self_attn.k_proj")],
        "wv": stacked("self_attn.v_proj"),
        "wo": stacked("self_attn.o_proj"),
        "rms_ffn": stacked("post_attention_layernorm"),
        "w1": stacked("mlp.gate_proj"),
        "w2": stacked("mlp.down_proj"),
        "w3": stacked("mlp.up_proj"),
        "rms_final": [state["model.norm.weight"]],
        "wcls": [] if config.get("tie_word_embeddings") else [state["lm_head.weight"]],
    }


def tables(dim: int, length: int, base: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / (base ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    angles = torch.outer(torch.arange(length), frequencies).float()
    return torch.cos(angles), torch.sin(angles)


def raw(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(np.ascontiguousarray(t.float().numpy(), "<f4").tobytes() for t in tensors)


MATRICES = ("embedding", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls")


def version_0(model: torch.nn.Module, config: dict[str, Any], base: float = 10000.0) -> bytes:
    found, sizes = parts(model, config), list(sizes_of(config))
    if found["wcls"]:
        sizes[5] = -sizes[5]
    order = ("embedding", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final")
    body = b"".join(raw(found[name]) for name in order)
    rotary = raw(list(tables(sizes[0] // sizes[3], sizes[6], base)))
    return struct.pack("7i", *sizes) + body + rotary + raw(found["wcls"])


def version_1(model: torch.nn.Module, config: dict[str, Any]) -> bytes:
    found = parts(model, config)
    head = struct.pack("Ii7iB", 0x616B3432, 1, *sizes_of(config), not found["wcls"]).ljust(256, b"\0")
    return head + b"".join(raw(found[name]) for name in ("rms_att", "rms_ffn", "rms_final", *MATRICES))


def version_2(model: torch.nn.Module, config: dict[str, Any], group: int) -> tuple[bytes, dict[str, list[np.ndarray]]]:
    """The file, and the matrices as they come back."""
    found = parts(model, config)
    head = struct.pack("Ii7iB", 0x616B3432, 2, *sizes_of(config), not found["wcls"]) + struct.pack("i", group)
    body = b"".join(raw(found[name]) for name in ("rms_att", "rms_ffn", "rms_final"))
    back: dict[str, list[np.ndarray]] = {}
    for name in MATRICES:
        for tensor in found[name]:
            groups = tensor.reshape(-1, group)
            scale = groups.abs().max(dim=1).values / 127.0
            whole = torch.round(groups / scale[:, None]).to(torch.int8)
            body += whole.numpy().tobytes() + raw([scale])
            back.setdefault(name, []).append((whole.float() * scale[:, None]).reshape(tensor.shape).numpy())
    return head.ljust(256, b"\0") + body, back


def forward(data: bytes, tokens: list[int]) -> np.ndarray:
    """The logits that run.c computes of a version 0 file, position after position, in fp64."""
    dim, inner, layers, heads, kv_heads, vocab, length = struct.unpack("7i", data[:28])
    at, size = 28, dim // heads

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(data, "<f4", math.prod(shape), at).reshape(shape).astype(np.float64)
        at += 4 * math.prod(shape)
        return found

    embedding, rms_att = take(abs(vocab), dim), take(layers, dim)
    wq, wk = take(layers, dim, dim), take(layers, kv_heads * size, dim)
    wv, wo = take(layers, kv_heads * size, dim), take(layers, dim, dim)
    rms_ffn, w1, w2 = take(layers, dim), take(layers, inner, dim), take(layers, dim, inner)
    w3, rms_final, real, imaginary = (
        take(layers, inner, dim),
        take(dim),
        take(length, size // 2),
        take(length, size // 2),
    )
    head = embedding if vocab > 0 else take(-vocab, dim)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        pairs = x.reshape(-1, size // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (real[position] + 1j * imaginary[position])
        return np.stack([turned.real, turned.imag], -1).reshape(-1, size)

    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = embedding[token]
        for layer in range(layers):
            normed = norm(x, rms_att[layer])
            q = rotated(wq[layer] @ normed, position)
            keys[layer].append(rotated(wk[layer] @ normed, position))
            values[layer].append((wv[layer] @ normed).reshape(-1, size))
            mixed = []
            for index in range(heads):
                group = index // (heads // kv_heads)
                scores = np.array([q[index] @ key[group] for key in keys[layer]]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(sum(w * v[group] for w, v in zip(weights, values[layer], strict=True)))
            x = x + wo[layer] @ np.concatenate(mixed)
            normed = norm(x, rms_ffn[layer])
            gate = w1[layer] @ normed
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ normed))
        logits.append(head @ norm(x, rms_final))
    return np.stack(logits)


# --- in and out ---


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """A folder with transformers' checkpoint, the model, its config."""
    config = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    return folder, save_hf(config, folder), config


def same_tensors(a: Path, b: Path) -> None:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("to", "write"), [("llama2c", version_0), ("llama2c_v1", version_1)])
def test_both_ways_byte_for_byte(
    saved: tuple[Path, Any, dict[str, Any]], to: str, write: Callable[..., bytes], tmp_path: Path
) -> None:
    folder, model, config = saved
    convert(folder, tmp_path / "out", to)
    written = (tmp_path / "out" / "model.bin").read_bytes()
    assert written == write(model, config)
    convert(tmp_path / "out" / "model.bin", tmp_path / "back", "hf")
    same_tensors(tmp_path / "back", folder)
    # By its folder, and through gptkit's own format.
    convert(tmp_path / "out", tmp_path / "local")
    convert(tmp_path / "local", tmp_path / "again", to)
    assert (tmp_path / "again" / "model.bin").read_bytes() == written
    convert(tmp_path / "out", tmp_path / "direct", to)
    assert (tmp_path / "direct" / "model.bin").read_bytes() == written


def test_run_c_computes_the_model(saved: tuple[Path, Any, dict[str, Any]], tmp_path: Path) -> None:
    folder, model, _ = saved
    convert(folder, tmp_path / "out", "llama2c")
    tokens = [1, 5, 90, 33, 2, 7, 64]
    ours = forward((tmp_path / "out" / "model.bin").read_bytes(), tokens)
    with torch.no_grad():
        theirs = model.double()(torch.tensor([tokens])).logits[0].numpy()
    model.float()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()  # the tables are fp32


def test_loads_and_computes_as_transformers(saved: tuple[Path, Any, dict[str, Any]], tmp_path: Path) -> None:
    folder, _, _ = saved
    convert(folder, tmp_path / "out", "llama2c")
    ids = torch.arange(1, 41).reshape(1, 40)
    with torch.no_grad():
        assert torch.equal(gptkit.load(tmp_path / "out")(ids), gptkit.load(folder)(ids))


@pytest.mark.parametrize("group", [16, 3])
def test_version_2_is_dequantised(saved: tuple[Path, Any, dict[str, Any]], group: int, tmp_path: Path) -> None:
    _, model, config = saved
    data, back = version_2(model, config, group)
    (tmp_path / "q80.bin").write_bytes(data)
    source = open_checkpoint(tmp_path / "q80.bin")
    assert any("dequantised" in note for note in source.notes)
    assert stored(str(tmp_path / "q80.bin")).nbytes == len(data) - 256  # all but the header
    found = parts(model, config)
    read = {leaf.checkpoint: source.read(leaf) for leaf in source.leaves}
    names = {"wq": "attention.wq", "wo": "attention.wo", "w2": "feed_forward.w2"}
    for kind, name in names.items():
        for layer, tensor in enumerate(back[kind]):
            assert np.array_equal(read[f"layers.{layer}.{name}.weight"], tensor)
    assert np.array_equal(read["tok_embeddings.weight"], back["embedding"][0])
    assert np.array_equal(read["norm.weight"], found["rms_final"][0].numpy())
    convert(tmp_path / "q80.bin", tmp_path / "hf", "hf")
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    q = hf["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(interleaved(q, config["num_attention_heads"]).numpy(), back["wq"][1])


# --- the real one ---


@needs_stories
def test_stories_to_hugging_face_and_back(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("stories260K.bin", "tok512.bin"):
        (tmp_path / "in" / name).write_bytes((STORIES / name).read_bytes())
    convert(tmp_path / "in" / "stories260K.bin", tmp_path / "hf", "hf")
    same_tensors(tmp_path / "hf", STORIES)
    ids = torch.tensor([load_tokenizer(STORIES).encode(PROMPT)])  # type: ignore[union-attr]
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (tmp_path / "hf", STORIES))
    assert torch.equal(ours, theirs)
    convert(STORIES, tmp_path / "out", "llama2c")
    for ours_name, name in (("model.bin", "stories260K.bin"), ("tokenizer.bin", "tok512.bin")):
        assert (tmp_path / "out" / ours_name).read_bytes() == (STORIES / name).read_bytes()
    convert(tmp_path / "hf", tmp_path / "again", "llama2c")
    assert (tmp_path / "again" / "model.bin").read_bytes() == (STORIES / "stories260K.bin").read_bytes()


@needs_stories
def test_the_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    for name in ("stories260K.bin", "tok512.bin"):
        (tmp_path / name).write_bytes((STORIES / name).read_bytes())
    convert(tmp_path / "stories260K.bin", tmp_path / "hf", "hf")
    ours, theirs = load_tokenizer(tmp_path / "hf"), load_tokenizer(STORIES)
    assert ours is not None and theirs is not None and ours.eos_ids == theirs.eos_ids == (2,)
    texts = [PROMPT, "a", "Lily's  cat\tsat.", "<s>", "€ ‐ ☃"]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    # From tokenizer.json alone scores are ranks: another file, the same tokens in the same order of merging.
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "hf").iterdir():
        if path.name != "manifest.json":
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    convert(tmp_path / "other", tmp_path / "out", "llama2c")
    convert(tmp_path / "out" / "model.bin", tmp_path / "again", "hf")
    again = load_tokenizer(tmp_path / "again")
    assert again is not None and all(again.encode(text) == theirs.encode(text) for text in texts)


@needs_stories
def test_another_vocabulary_beside_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes((STORIES / "stories260K.bin").read_bytes())
    (tmp_path / "tokenizer.bin").write_bytes((STORIES / "tok512.bin").read_bytes()[:-1])
    source = open_checkpoint(tmp_path / "model.bin")
    assert not source.texts
    assert any("tokenizer.bin was not used, because it does not have 512 tokens" in note for note in source.notes)


def test_a_tokenizer_that_llama2c_has_not_is_not_written(tmp_path: Path) -> None:
    save_hf(PLAIN, tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "out", "llama2c")
    assert not (tmp_path / "out" / "tokenizer.bin").exists()
    assert any("tokenizer.bin is not written" in note for note in done.source.notes)
    byte_level = {
        "version": "1.0",
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(byte_level))
    done = convert(tmp_path / "hf", tmp_path / "out2", "llama2c")
    assert not (tmp_path / "out2" / "tokenizer.bin").exists()
    assert any("SentencePiece" in note for note in done.source.notes)


# --- what it cannot hold ---


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**PLAIN, "rms_norm_eps": 1e-6}, "eps"),
        ({**PLAIN, "rope_theta": 5e5}, "base"),
        ({**PLAIN, "rope_scaling": LLAMA3_ROPE}, "scaling"),
        ({**PLAIN, "attention_bias": True}, "qkv_bias"),
        ({**PLAIN, "mlp_bias": True}, "up_bias"),
        ({**PLAIN, "hidden_act": "gelu"}, "activation"),
        ({**PLAIN, "head_dim": 16}, "head_dim"),
        (CONFIGS["mistral"], "window"),
        (CONFIGS["qwen2-no-window"], "qkv_bias"),
        (CONFIGS["qwen3"], "q_norm"),
        (CONFIGS["gpt2"], "feed_forward: FeedForward"),
        (CONFIGS["bloom"], "feed_forward: FeedForward"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trees_that_it_cannot_hold(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_hf(config, tmp_path / "hf")
    with pytest.raises(CannotExpress, match=told):
        convert(tmp_path / "hf", tmp_path / "out", "llama2c")
    assert not (tmp_path / "out").exists()


def test_dtypes(tmp_path: Path) -> None:
    save_hf(PLAIN, tmp_path / "half", torch.bfloat16)
    save_hf(PLAIN, tmp_path / "double", torch.float64)
    convert(tmp_path / "half", tmp_path / "a", "llama2c")
    with pytest.raises(UsageError, match="float64"):
        convert(tmp_path / "double", tmp_path / "b", "llama2c")
    convert(tmp_path / "double", tmp_path / "b", "llama2c", dtype="float32")
    with pytest.raises(UsageError, match="bfloat16"):
        convert(tmp_path / "half", tmp_path / "c", "llama2c", dtype="bfloat16")
    assert hf_config(PLAIN).num_hidden_layers == 3


# --- bad files ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return version_0(save_hf(GROUPED, tmp_path_factory.mktemp("whole")), GROUPED)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "out")
    assert not (path.parent / "out").exists()
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_a_file_of_another_length(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for left in (len(whole) - 1, len(whole) // 2, 28):
        path.write_bytes(whole[:left])
        assert f"{len(whole)} bytes expected, {left} found" in refused(path)
    path.write_bytes(whole + b"\0")
    assert "trailing" in refused(path)
    with pytest.raises(CheckpointError, match="trailing"):
        read_spec(path)
    path.write_bytes(whole[:20])
    with pytest.raises(InvalidInput, match="not a checkpoint"):
        convert(path, tmp_path / "out")


def test_tables_of_another_base(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    model = save_hf(GROUPED, tmp_path / "hf")
    path.write_bytes(version_0(model, GROUPED, base=500000.0))
    assert "base 10,000" in refused(path)
    data = bytearray(version_0(model, GROUPED))
    data[-4:] = struct.pack("<f", math.nan)
    path.write_bytes(data)
    assert "freqs_sin" in refused(path)


def test_values_that_are_not_finite_are_counted(whole: bytes, tmp_path: Path) -> None:
    data = bytearray(whole)
    data[28 : 28 + 8] = struct.pack("<2f", math.nan, math.inf)
    (tmp_path / "model.bin").write_bytes(data)
    done = convert(tmp_path / "model.bin", tmp_path / "out")
    assert done.transferred is not None
    assert done.transferred.not_finite == {"embedding.weight": 2}


def test_headers_of_other_versions_and_sizes(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    head = struct.pack("Ii7iB", 0x616B3432, 3, 48, 72, 3, 6, 2, 97, 50, 1).ljust(256, b"\0")
    path.write_bytes(head)
    assert "version 3" in refused(path)
    for at, value in ((8, -1), (20, 5), (16, 2**31 - 1), (36, 2)):
        data = bytearray(head)
        struct.pack_into("<i", data, 4, 1)
        struct.pack_into("<i", data, at, value) if at != 36 else struct.pack_into("B", data, at, value)
        path.write_bytes(data)
        refused(path)
    path.write_bytes(head[:100])
    assert "truncated" in refused(path)
    big = struct.pack("7i", 48, 72, 16384, 6, 2, 97, 50)  # as many layers as are believed, and no bytes for them
    path.write_bytes(big + whole[28:])
    assert "truncated" in refused(path)


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    generator = np.random.default_rng(0)
    for _ in range(count):
        changed = bytearray(data)
        for at in generator.integers(0, 45, generator.integers(1, 4)):
            changed[at] = generator.integers(256)
        if generator.random() < 0.3:
            del changed[int(generator.integers(len(changed))) :]
        yield bytes(changed)


def test_mutated_headers_raise_nothing_else(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    model = save_hf(GROUPED, tmp_path / "hf")
    for data in (whole, version_1(model, GROUPED), version_2(model, GROUPED, 16)[0]):
        for changed in mutations(data, 300):
            path.write_bytes(changed)
            with contextlib.suppress(GptkitError):
                plan_conversion(open_checkpoint(path), "local")


def test_a_folder_of_several_is_not_guessed_at(whole: bytes, tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(whole)
    with pytest.raises(InvalidInput, match="no config"):
        open_checkpoint(tmp_path)
    os.truncate(tmp_path / "b.bin", 3)
    assert open_checkpoint(tmp_path).format == "llama2c"
