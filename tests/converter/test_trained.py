"""Checkpoints of training programs, each written here by its published layout, and by the programs themselves where
they are installed (slow; GPTKIT_PRODUCERS_PYTHON names the Python of an environment that has them, by default this).
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.covering import examples, few
from helpers.families import CONFIGS, GROUPED_LLAMA, save_hf, spec_of
from helpers.mutations import mutated
from helpers.processes import HANGS
from safetensors.torch import load_file, save_file

from gptkit.analysis.params import params
from gptkit.components import differences, without_rounding
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.errors import CheckpointError, GptkitError, InvalidInput, UntrustedInput
from gptkit.parity.verify import verify

State = dict[str, torch.Tensor]
PLAIN = {**CONFIGS["llama"], "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
PLAIN |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "original"
    save_hf(PLAIN, folder, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def state(original: Path) -> State:
    return load_file(original / "model.safetensors")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """One with the original's config.json."""
    (tmp_path / "trained").mkdir()
    shutil.copy(original / "config.json", tmp_path / "trained")
    return tmp_path / "trained"


def same(folder: Path, original: Path) -> Any:
    """The checkpoint in a folder, which holds the original's tensors, byte for byte and with its dtypes."""
    found, expected = open_checkpoint(folder, allow_pickle=True), open_checkpoint(original)
    assert found.shared_dtypes() == expected.shared_dtypes()
    for name, array, _ in expected.tensors():
        assert np.array_equal(found.tensor(name)[0], array), name
    return found


def refused(folder: Path, message: str, kind: type[GptkitError] = CheckpointError) -> None:
    """Opening and converting fail with one message, and nothing is written."""
    out = folder.parent / "out"
    with pytest.raises(kind, match=message):
        convert(folder, out, allow_pickle=True)
    assert not out.exists()


# --- whose names: litgpt, Meta, nanochat


def litgpt_state(state: State, layers: int) -> State:
    """By convert_hf_checkpoint.py: renamed, and q, k and v one after the other in one."""
    found = {"transformer.wte.weight": state["model.embed_tokens.weight"], "lm_head.weight": state["lm_head.weight"]}
    found["transformer.ln_f.weight"] = state["model.norm.weight"]
    for layer in range(layers):
        ours, theirs = f"transformer.h.{layer}.", f"model.layers.{layer}."
        found[f"{ours}attn.qkv.weight"] = torch.cat([state[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv"])
        for one, two in (
            ("attn.proj", "self_attn.o_proj"),
            ("norm_1", "input_layernorm"),
            ("norm_2", "post_attention_layernorm"),
            ("mlp.fc_1", "mlp.gate_proj"),
            ("mlp.fc_2", "mlp.up_proj"),
            ("mlp.proj", "mlp.down_proj"),
        ):
            found[f"{ours}{one}.weight"] = state[f"{theirs}{two}.weight"]
    return found


def litgpt_config(original: Path, **changes: Any) -> str:
    c = json.loads((original / "config.json").read_text())
    said = {
        "name": "Llama-x",
        "hf_config": {},
        "block_size": c["max_position_embeddings"],
        "bias": False,
        "n_layer": c["num_hidden_layers"],
        "n_embd": c["hidden_size"],
        "n_head": c["num_attention_heads"],
        "head_size": c["head_dim"],
        "n_query_groups": c["num_key_value_heads"],
        "padded_vocab_size": c["vocab_size"],
        "rope_base": 10000,
        "norm_class_name": "RMSNorm",
        "norm_eps": c["rms_norm_eps"],
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": c["intermediate_size"],
        "parallel_residual": False,
        "rotary_percentage": 1.0,
        **changes,
    }
    return str(yaml.dump(said))


BOMB = 'a0: &a0 ["x","x"]\n' + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 21))
MERGES = "a0: &a0\n  x: 1\n" + "".join(f"a{i}: &a{i}\n  <<:\n" + f"  - *a{i - 1}\n" * 10 for i in range(1, 21))
"""A kilobyte of YAML whose aliases, or merge keys, stand for 10^20 values."""


@pytest.fixture
def litgpt(original: Path, state: State, tmp_path: Path) -> Path:
    folder = tmp_path / "litgpt"
    folder.mkdir()
    layers = len(open_checkpoint(original).spec.blocks)
    torch.save({"model": litgpt_state(state, layers)}, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(litgpt_config(original))
    return folder


def test_litgpt(litgpt: Path, original: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedInput, match="is a pickle"):
        open_checkpoint(litgpt)
    assert params(str(litgpt))[0].count.total == params(str(original))[0].count.total, "told without the pickle"
    found = same(litgpt, original)
    assert (found.format, found.origin.family) == ("litgpt", "llama")
    (litgpt / "tokenizer.json").write_text('{"version":"1.0"}')
    convert(litgpt, tmp_path / "hf", "hf", allow_pickle=True)
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == '{"version":"1.0"}'
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(original / "model.safetensors").keys()
    assert verify(original, tmp_path / "hf", mutations=False).passed


def test_an_embedding_that_is_missing(litgpt: Path, original: Path, state: State) -> None:
    made = litgpt_state(state, len(open_checkpoint(original).spec.blocks))
    del made["transformer.wte.weight"]
    torch.save({"model": made}, litgpt / "lit_model.pth")
    refused(litgpt, "missing: transformer.wte.weight")


def test_a_folder_above_the_weights(litgpt: Path) -> None:
    """As `litgpt finetune --out_dir` names one."""
    with pytest.raises(InvalidInput, match=r"no config\.json in it") as caught:
        convert(litgpt.parent, litgpt / "out", allow_pickle=True)
    assert f"There are weights in {litgpt}: name" in str(caught.value.hint)


def test_litgpts_older_rows(tmp_path: Path) -> None:
    """Until the end of 2024 they were those of GPT-NeoX: q, k and v of each head together, under another name."""
    save_hf(CONFIGS["gpt_neox"], tmp_path / "original")
    state, c = load_file(tmp_path / "original" / "model.safetensors"), CONFIGS["gpt_neox"]
    pairs = {"attention.query_key_value": "attn.attn", "attention.dense": "attn.proj", "input_layernorm": "norm_1"}
    pairs |= {"post_attention_layernorm": "norm_2", "mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj"}
    pairs |= {"gpt_neox.embed_in": "transformer.wte", "gpt_neox.final_layer_norm": "transformer.ln_f"}
    pairs |= {"embed_out": "lm_head", "gpt_neox.layers": "transformer.h"}
    found = {}
    for name, tensor in state.items():
        for one, two in pairs.items():
            name = name.replace(one, two)
        found[name] = tensor
    (tmp_path / "old").mkdir()
    torch.save(found, tmp_path / "old" / "lit_model.pth")
    spec = open_checkpoint(tmp_path / "original").spec
    said = {
        "name": "pythia-x",
        "n_layer": len(spec.blocks),
        "n_embd": spec.hidden_size,
        "n_head": c["num_attention_heads"],
        "block_size": c["max_position_embeddings"],
        "intermediate_size": c["intermediate_size"],
        "padded_vocab_size": spec.vocab_size,
        "rotary_percentage": spec.blocks[0].attention.position.dim / spec.blocks[0].attention.head_dim,
        "parallel_residual": spec.blocks[0].parallel,
    }
    (tmp_path / "old" / "model_config.yaml").write_text(yaml.dump(said))
    assert same(tmp_path / "old", tmp_path / "original").origin.family == "gpt_neox"


@few(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_attention": {"q_lora_rank": 3}}, "latent_attention"),
        ({"rope_interleave": True}, "rope_interleave"),
        ({"a_new_field": 1}, "a_new_field"),
        ({"mlp_class_name": "NewMLP"}, "NewMLP"),
        ({"n_head": 0}, "n_head"),
        ({"n_head": [1]}, "n_head"),
        ({"n_layer": 10**12}, "n_layer|num_hidden_layers"),
        ({"intermediate_size": 40}, "tensors do not have the shape that config.json requires"),
        ({"n_layer": 1}, "no place"),
    ],
)
def test_what_litgpt_says_and_is_not_read(change: dict[str, Any], message: str, litgpt: Path, original: Path) -> None:
    (litgpt / "model_config.yaml").write_text(litgpt_config(original, **change))
    refused(litgpt, message, InvalidInput)


@few(4)
@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1",
        "",
        "a: &x [*x]",
        "a: &x {b: *x}",
        BOMB + "mlp_class_name: *a20\n",
        BOMB + "a_new_field: *a20\n",
        BOMB + "*a20 : 1\n",
        MERGES + "a: *a20\n",
        "[" * 30_000,
        "- " * 16_000,
        "? " * 16_000,
        "a: " * 10_000,
        "x" * 300_000,
        "a: !!python/name:os.system",
    ],
)
def test_configs_that_are_none(text: str, litgpt: Path) -> None:
    (litgpt / "model_config.yaml").write_text(text)
    refused(litgpt, "model_config.yaml", InvalidInput)


def test_two_configs_have_to_say_one_model(litgpt: Path, original: Path) -> None:
    shutil.copy(original / "config.json", litgpt)
    same(litgpt, original)
    (litgpt / "model_config.yaml").write_text(litgpt_config(original, rope_base=20000))
    refused(litgpt, "model_config.yaml and config.json describe different models", InvalidInput)
    (litgpt / "model_config.yaml").write_text(litgpt_config(original))
    (litgpt / "params.json").write_text("{}")
    (litgpt / "lit_model.pth").unlink()
    refused(litgpt, "contains no weights|several configs|not a checkpoint|neither", InvalidInput)


def meta_shards(state: State, config: dict[str, Any], ranks: int) -> list[State]:
    """Meta's names and rows (transformers' convert_llama_weights_to_hf.py, backwards), split as fairscale does."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]

    def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
        rows, width = weight.shape
        return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)

    found: dict[str, tuple[int | None, torch.Tensor]] = {
        "tok_embeddings.weight": (1, state["model.embed_tokens.weight"]),
        "output.weight": (0, state["lm_head.weight"]),
    }
    found["norm.weight"] = (None, state["model.norm.weight"])
    found["rope.freqs"] = (None, torch.ones(4))
    for layer in range(config["num_hidden_layers"]):
        own, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        found |= {
            own + "attention.wq.weight": (0, paired(state[attention + "q_proj.weight"], heads)),
            own + "attention.wk.weight": (0, paired(state[attention + "k_proj.weight"], kv)),
            own + "attention.wv.weight": (0, state[attention + "v_proj.weight"]),
            own + "attention.wo.weight": (1, state[attention + "o_proj.weight"]),
            own + "feed_forward.w1.weight": (0, state[mlp + "gate_proj.weight"]),
            own + "feed_forward.w2.weight": (1, state[mlp + "down_proj.weight"]),
            own + "feed_forward.w3.weight": (0, state[mlp + "up_proj.weight"]),
            own + "attention_norm.weight": (None, state[theirs + "input_layernorm.weight"]),
            own + "ffn_norm.weight": (None, state[theirs + "post_attention_layernorm.weight"]),
        }
    return [
        {name: t if dim is None else t.chunk(ranks, dim)[rank].clone() for name, (dim, t) in found.items()}
        for rank in range(ranks)
    ]


@pytest.fixture
def meta(original: Path, state: State, tmp_path: Path) -> Path:
    c = json.loads((original / "config.json").read_text())
    folder = tmp_path / "meta"
    folder.mkdir()
    for rank, shard in enumerate(meta_shards(state, c, 2)):
        torch.save(shard, folder / f"consolidated.{rank:02}.pth")
    said = {"dim": c["hidden_size"], "n_layers": c["num_hidden_layers"], "n_heads": c["num_attention_heads"]}
    said |= {"n_kv_heads": c["num_key_value_heads"], "vocab_size": -1, "norm_eps": c["rms_norm_eps"]}
    said |= {"hidden_dim": c["intermediate_size"], "multiple_of": 32, "head_dim": c["head_dim"]}
    (folder / "params.json").write_text(json.dumps(said))
    return folder


def test_meta(meta: Path, original: Path, tmp_path: Path) -> None:
    assert same(meta, original).format == "Meta's"
    convert(meta, tmp_path / "local", allow_pickle=True)
    assert verify(original, tmp_path / "local", mutations=False).passed


def test_buffers_that_metas_code_registers_need_no_permission(meta: Path, original: Path) -> None:
    for path in meta.glob("*.pth"):
        shard = torch.load(path)
        shard |= {f"layers.{layer}.attention.mask": torch.ones(1, 1, 4, 4) for layer in range(2)}
        torch.save({**shard, "freqs_cis": torch.ones(4), "freqs_cos": torch.ones(4), "freqs_sin": torch.ones(4)}, path)
    same(meta, original)


LLAMA2C = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 97, "multiple_of": 32}
LLAMA2C |= {"max_seq_len": 128, "dropout": 0.1}


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_what_llama2c_trains(prefix: str, tmp_path: Path) -> None:
    """Source: llama2.c, train.py: the head is the embedding, and its attention registers a mask."""
    config = {**GROUPED_LLAMA, "intermediate_size": 128, "max_position_embeddings": 128}
    config |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    save_hf(config, tmp_path / "original")
    state = load_file(tmp_path / "original" / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    (shard,) = meta_shards(state, {**config, "num_key_value_heads": 2}, 1)
    del shard["rope.freqs"]
    shard |= {f"layers.{layer}.attention.mask": torch.ones(1, 1, 4, 4) for layer in range(3)}
    model = {f"{prefix}{name}": each for name, each in shard.items()}
    (tmp_path / "run").mkdir()
    saved = {"model": model, "optimizer": {"state": {}}, "model_args": LLAMA2C, "iter_num": 7, "config": {"lr": 1.0}}
    torch.save(saved, tmp_path / "run" / "ckpt.pt")
    found = same(tmp_path / "run", tmp_path / "original")
    assert found.spec.tied and found.spec.blocks[0].feed_forward.intermediate_size == 128
    assert not differences(without_rounding(found.spec), without_rounding(spec_of(config)))
    torch.save({**saved, "model_args": {**LLAMA2C, "rope": "new"}}, tmp_path / "run" / "ckpt.pt")
    refused(tmp_path / "run", "rope='new' is not supported", InvalidInput)


@pytest.mark.parametrize("window", [None, 64])
def test_mistrals_consolidated_file(window: int | None, original: Path, state: State, tmp_path: Path) -> None:
    """Source: mistral-inference, args.py: hidden_dim and head_dim are stated, and no multiple_of."""
    c = json.loads((original / "config.json").read_text())
    folder = tmp_path / "mistral"
    folder.mkdir()
    (shard,) = meta_shards(state, c, 1)
    del shard["rope.freqs"]
    save_file({name: each.contiguous() for name, each in shard.items()}, folder / "consolidated.safetensors")
    said = {"dim": c["hidden_size"], "n_layers": c["num_hidden_layers"], "n_heads": c["num_attention_heads"]}
    said |= {"n_kv_heads": c["num_key_value_heads"], "vocab_size": c["vocab_size"], "norm_eps": c["rms_norm_eps"]}
    said |= {"hidden_dim": c["intermediate_size"], "head_dim": c["head_dim"]}
    said |= {"rope_theta": 1e6} if window is None else {"sliding_window": window}
    (folder / "params.json").write_text(json.dumps(said))
    found = same(folder, original)
    assert found.origin.family == ("llama" if window is None else "mistral")
    assert found.spec.blocks[0].attention.window == window
    assert found.spec.blocks[0].attention.position.base == (1e6 if window is None else 1e4)
    assert open_checkpoint(folder).spec == found.spec  # it is no pickle
    (folder / "params.json").write_text(json.dumps({**said, "moe": {"num_experts": 8}}))
    refused(folder, "moe=.* is not supported", InvalidInput)
    said = {name: value for name, value in said.items() if name not in ("rope_theta", "sliding_window")}
    (folder / "params.json").write_text(json.dumps(said))
    refused(folder, "params.json has no rope_theta", InvalidInput)
    (folder / "params.json").unlink()
    refused(folder, "does not know the architecture", InvalidInput)


@pytest.mark.parametrize("renamed", [False, True])
def test_torchtitans_distributed_folder(renamed: bool, original: Path, state: State, tmp_path: Path) -> None:
    """Source: torchtitan, models/llama3/state_dict_adapter.py, and its names until 2025, which are Meta's."""
    import torch.distributed.checkpoint as dcp

    c = json.loads((original / "config.json").read_text())
    (shard,) = meta_shards(state, c, 1)
    shard["freqs_cis"] = shard.pop("rope.freqs")
    if renamed:
        shard["lm_head.weight"] = shard.pop("output.weight")
        shard = {re.sub(r"attention\.(w[qkv])", r"attention.qkv_linear.\1", name): each for name, each in shard.items()}
    moments = {f"optimizer.state.{name}.exp_avg": torch.zeros_like(each) for name, each in shard.items()}
    folder = tmp_path / "step-100"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**shard, **moments, "train_state": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    shutil.copy(original / "config.json", folder)
    found = same(folder, original)
    assert any("left out" in note for note in found.notes)


def test_what_meta_does_not_say_of_positions(meta: Path) -> None:
    said = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps({**said, "use_scaled_rope": True}))
    refused(meta, "use_scaled_rope", InvalidInput)
    (meta / "params.json").write_text(json.dumps({**said, "use_scaled_rope": True, "rope_scaling_factor": 32}))
    position = open_checkpoint(meta, allow_pickle=True).spec.blocks[0].attention.position
    assert position.scaling.factor == 32


def test_metas_width_of_the_feed_forward() -> None:
    """That of Llama 2 7B and 70B, by the formula of its model.py."""
    from gptkit.architectures.stacks import STACKS

    config = next(each.config for each in STACKS if each.file == "params.json")
    small = {"dim": 4096, "n_heads": 32, "n_layers": 32, "multiple_of": 256}
    large = {
        "dim": 8192,
        "n_heads": 64,
        "n_kv_heads": 8,
        "n_layers": 80,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.3,
    }
    assert [config(each, 32000)["intermediate_size"] for each in (small, large)] == [11008, 28672]


@pytest.fixture
def nanochat(tmp_path: Path) -> Path:
    """With the model that it holds in a folder beside."""
    save_hf({**CONFIGS["nanochat"], "intermediate_size": 4 * 48}, tmp_path / "original")  # as wide as its model has it
    spec = open_checkpoint(tmp_path / "original").spec
    state = load_file(tmp_path / "original" / "model.safetensors")
    c = json.loads((tmp_path / "original" / "config.json").read_text())
    pairs = {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "o_proj": "c_proj"}
    pairs |= {f"{x}_proj": f"c_{x}" for x in "qkv"} | {"self_attn": "attn", "fc1": "c_fc", "fc2": "c_proj"}
    found = {}
    for name, tensor in state.items():
        for one, two in pairs.items():
            name = name.replace(one, two)
        found["_orig_mod." + name] = tensor
    (tmp_path / "own").mkdir()
    torch.save(found, tmp_path / "own" / "model_000650.pt")
    said = {"n_embd": c["hidden_size"], "n_head": c["num_attention_heads"], "n_kv_head": c["num_key_value_heads"]}
    said |= {"n_layer": len(spec.blocks), "vocab_size": spec.vocab_size, "sequence_len": c["max_position_embeddings"]}
    (tmp_path / "own" / "meta_000650.json").write_text(json.dumps({"step": 650, "model_config": said}))
    return tmp_path / "own"


def test_nanochat(nanochat: Path) -> None:
    assert same(nanochat, nanochat.parent / "original").origin.family == "nanochat"
    said = json.loads((nanochat / "meta_000650.json").read_text())["model_config"]
    (nanochat / "meta_000650.json").write_text(json.dumps({"model_config": {**said, "window_pattern": "SSSL"}}))
    refused(nanochat, "window_pattern", InvalidInput)


# --- wrappers and containers

PREFIXES = ("_orig_mod.", "module.", "model.", "_forward_module.", "base_model.model.", "module._orig_mod.")


@few(3)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_wrappers(prefix: str, folder: Path, state: State, original: Path) -> None:
    torch.save({prefix + name: tensor for name, tensor in state.items()}, folder / "x.pt")
    same(folder, original)


@few(2)
@pytest.mark.parametrize("keys", [["state_dict"], ["model"], ["module"], ["a", "b"]])
def test_containers(keys: list[str], folder: Path, state: State, original: Path) -> None:
    content: Any = {name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."): t for name, t in state.items()}
    for key in keys:
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "lr": 0.1}
    torch.save(content, folder / "last.ckpt")
    assert any("left out" in note for note in same(folder, original).notes)
    same(folder / "last.ckpt", original)


def test_two_models_in_a_file(folder: Path, state: State) -> None:
    torch.save({"model": state, "ema": state}, folder / "x.pt")
    refused(folder, r"contains 2 models: one in \['model'\].*one in \['ema'\]")


def test_two_files_of_two_models(folder: Path, state: State) -> None:
    torch.save(state, folder / "best.pt")
    torch.save(state, folder / "last.pt")
    refused(folder, "best.pt and last.pt have tensors with the same names, but are not ranks of one checkpoint")


def test_files_that_share_out_the_names(folder: Path, state: State, original: Path) -> None:
    names = list(state)
    for number, some in enumerate((names[:9], names[9:]), 1):
        torch.save({name: state[name] for name in some}, folder / f"part-{number}.bin")
    same(folder, original)


def test_arrays_of_numpy(folder: Path, original: Path, state: State, tmp_path: Path) -> None:
    convert(original, tmp_path / "wide", "hf", dtype="float32")
    arrays: dict[str, Any] = {name: tensor.float().numpy() for name, tensor in state.items()}
    arrays["model.embed_tokens.weight"] = np.asfortranarray(arrays["model.embed_tokens.weight"])
    np.savez(folder / "weights.npz", **arrays)
    found, expected = open_checkpoint(folder), open_checkpoint(tmp_path / "wide")
    assert all(np.array_equal(found.tensor(name)[0], array) for name, array, _ in expected.tensors())
    np.savez_compressed(folder / "weights.npz", **arrays)
    refused(folder, "is compressed")
    np.savez(folder / "weights.npz", x=np.array([{}], dtype=object))
    refused(folder, "not a plain array of numbers")


# --- ranks


FORMATS: dict[str, tuple[bytes, str, str]] = {
    "weights.pt": (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras writes them", "save safetensors"),
    "model.ckpt": (b"GGUF\3\0\0\0", "is a GGUF file", "ends in .gguf"),
    "model.pth": (b"\x40\0\0\0\0\0\0\0{", "is a safetensors file by another name", "ends in .safetensors"),
    "last.pt": (b"<!DOCTYPE html>", "is a text in HTML or XML", "Download the file again"),
    "one.npz": (b"\x93NUMPY\1\0", "is a single array of numpy", "numpy.savez"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_other_formats_are_not_called_damaged(name: str, folder: Path) -> None:
    begins, message, hint = FORMATS[name]
    (folder / name).write_bytes(begins + bytes(200))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder, allow_pickle=True)
    assert hint in (caught.value.hint or "") and "damaged" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: np.savez_compressed(path, a=np.zeros(300)), "is compressed: numpy.savez never does that"),
        (lambda path: np.savez(path, a=np.array([{}], dtype=object)), "'a', which is not a plain array of numbers"),
        (lambda path: path.write_bytes(b"hello" * 9), "is not an archive that numpy.savez writes"),
    ],
)
def test_archives_of_numpy_that_are_not_read(write: Callable[[Path], None], message: str, folder: Path) -> None:
    write(folder / "weights.npz")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "torch" not in caught.value.message and "damaged" not in (caught.value.hint or "")


@pytest.fixture
def fsdp(folder: Path, state: State) -> Path:
    """What two ranks save of a model whose tensors are shared out by rows, by columns or not at all (torch's DTensor,
    made in this process by a process group that speaks to nobody).
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,))
            parts = {}
            for i, (name, tensor) in enumerate(state.items()):
                way = (Shard(0), Shard(tensor.ndim - 1), Replicate())[i % 3]
                parts[name] = distribute_tensor(tensor, mesh, [way], src_data_rank=None)
            torch.save(parts, folder / f"model_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    (folder / "huggingface").mkdir()
    (folder / "config.json").rename(folder / "huggingface" / "config.json")
    return folder


def test_parts_of_two_ranks(fsdp: Path, original: Path, state: State) -> None:
    torch.save({"state": {}}, fsdp / "optim_world_size_2_rank_0.pt")
    (fsdp / "huggingface" / "tokenizer.json").write_text("{}")
    assert same(fsdp, original).folder == fsdp / "huggingface"
    rank = fsdp / "model_world_size_2_rank_1.pt"
    rank.rename(fsdp / "kept")
    refused(fsdp, "there should be 2 ranks, but these are missing: 1")
    shutil.copy(fsdp / "model_world_size_2_rank_0.pt", rank)
    refused(fsdp, "are missing or occur twice")
    (fsdp / "kept").rename(rank)
    edited(rank, lambda data: data.replace(b"model.norm.weight", b"model.nurm.weight"))
    refused(fsdp, "'model.norm.weight' is in 1 of 2 files, but missing in .*rank_1.pt")


def edited(path: Path, edit: Callable[[bytes], bytes]) -> None:
    """An archive of torch.save with another pickle, of any length, in it."""
    with zipfile.ZipFile(path) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, edit(data) if name.endswith("data.pkl") else data)


def test_shards_that_do_not_fit(meta: Path) -> None:
    one, two = (torch.load(path, weights_only=True) for path in sorted(meta.glob("*.pth")))
    second = meta / "consolidated.01.pth"
    for change, message in (
        ({"norm.weight": two["norm.weight"] + 1}, "have different values of 'norm.weight'"),
        ({"output.weight": two["output.weight"][:-1]}, "'output.weight' of .* cannot be joined from parts"),
        ({"output.weight": two["output.weight"].float()}, "'output.weight' has different dtypes"),
        ({"more": torch.ones(2)}, "'more' is in 1 of 2 files, but missing in"),
    ):
        torch.save({**two, **change}, second)
        refused(meta, message)
    torch.save({"model": two, "iteration": 5}, second)
    torch.save({"model": one, "iteration": 4}, meta / "consolidated.00.pth")
    refused(meta, "consolidated.00.pth has iteration 4, but consolidated.01.pth has 5")
    second.rename(meta / "consolidated.02.pth")
    refused(meta, "there should be 3 ranks, but these are missing: 1|has iteration 4")
    (meta / "consolidated.02.pth").unlink()
    refused(meta, "do not have the shape")


def zero3(state: State, out: Path, ranks: int = 2) -> None:
    """DeepSpeed's files of ZeRO-3, as zero_to_fp32.py reads them: flat pieces, a padded one a rank, in two groups."""
    names = list(state)
    frozen, kept = names[3], [name for name in names if name != names[3]]
    pieces: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    fragments: list[torch.Tensor] = []
    for name in names:
        flat = state[name].float().flatten()
        width = math.ceil(len(flat) / ranks)
        padded = torch.nn.functional.pad(flat, (0, width * ranks - len(flat)), value=9.0)
        if name == frozen:
            fragments = [padded[rank * width : (rank + 1) * width].clone() for rank in range(ranks)]
        else:
            for rank in range(ranks):
                pieces[rank].append(padded[rank * width : (rank + 1) * width])
    for rank in range(ranks):
        flat = torch.cat(pieces[rank])
        cut = len(flat) // 3
        optimizer = {"fp32_flat_groups": [flat[:cut].clone(), flat[cut:].clone()], "zero_stage": 3}
        optimizer["partition_count"] = ranks
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, out / f"{stem}_optim_states.pt")
        content = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in names},
            "param_shapes": [{name: state[name].shape for name in kept}],
            "frozen_param_shapes": {frozen: state[frozen].shape},
            "frozen_param_fragments": {frozen: fragments[rank]},
            "global_steps": 7,
        }
        torch.save(content, out / f"{stem}_model_states.pt")


@pytest.fixture
def deepspeed(folder: Path, state: State) -> Path:
    (folder / "global_step7").mkdir()
    (folder / "latest").write_text("global_step7")
    zero3(state, folder / "global_step7")
    return folder


def test_zero_3(deepspeed: Path, state: State, original: Path, tmp_path: Path) -> None:
    convert(original, tmp_path / "wide", "hf", dtype="float32")
    same(deepspeed, tmp_path / "wide")
    same(deepspeed / "global_step7", tmp_path / "wide")
    inside = deepspeed / "global_step7"
    module = inside / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    module.rename(inside / "kept")
    torch.save([{"global_steps": 7}], module)
    refused(deepspeed, "one of the ranks has no part of")
    (inside / "kept").rename(module)
    states = [inside / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    content = torch.load(states[1], weights_only=True)
    content["optimizer_state_dict"]["partition_count"] = 3
    torch.save(content, states[1])
    refused(deepspeed, "says that there are 3 partitions, but there are 2 files")
    states[1].unlink()
    refused(deepspeed, "ZeRO-3 stores the weights in it")


@pytest.fixture
def zero2(folder: Path, state: State) -> Path:
    """The module is whole in one file."""
    (folder / "global_step7").mkdir()
    (folder / "latest").write_text("global_step7\n")
    content = {"module": {f"module.{name}": tensor for name, tensor in state.items()}, "global_steps": 7}
    content["param_shapes"] = [{name: tensor.shape for name, tensor in state.items()}]
    torch.save(content, folder / "global_step7" / "mp_rank_00_model_states.pt")
    torch.save({}, folder / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def test_zero_2(zero2: Path, original: Path) -> None:
    same(zero2, original)


@pytest.mark.parametrize("text", ["..", "../x", "/etc", ".", "", "a/b", "gone", "\0"])
def test_latest_leads_nowhere_else(text: str, deepspeed: Path) -> None:
    (deepspeed / "latest").write_text(text)
    refused(deepspeed, "names a folder that does not exist", InvalidInput)


# --- hostile


def test_no_code_is_run(folder: Path, state: State, tmp_path: Path) -> None:
    """Neither of the system's, nor of a package whose objects are let go."""

    class Bad:
        def __init__(self, call: Any, *args: Any) -> None:
            self.made = (call, args)

        def __reduce__(self) -> Any:
            return self.made

    made = tmp_path / "made"
    torch.save({"model": state, "x": Bad(os.system, f"touch {made}")}, folder / "x.pt")
    refused(folder, "posix.system|nt.system")
    torch.save({"model": state, "x": Bad(Path.touch, made), "y": Bad(np.save, str(made), np.ones(1))}, folder / "x.pt")
    with pytest.raises(CheckpointError, match=r"getattr|attribute"):
        open_checkpoint(folder, allow_pickle=True)
    torch.save({"model": state, "y": Bad(np.save, str(made), 1), "z": made}, folder / "x.pt")
    open_checkpoint(folder, allow_pickle=True)
    assert not made.exists() and not made.with_suffix(".npy").exists()


@pytest.fixture
def lightning(folder: Path, state: State) -> Path:
    weights = {f"model._orig_mod.{name}": tensor for name, tensor in state.items()}
    content = {"state_dict": weights, "epoch": 3, "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}]}
    torch.save(content, folder / "last.ckpt")
    return folder


@pytest.fixture
def npz(folder: Path, state: State) -> Path:
    np.savez(folder / "weights.npz", **{name: tensor.float().numpy() for name, tensor in state.items()})
    return folder


@pytest.fixture
def pickled(folder: Path, state: State) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What gptkit writes in a format of others, and reads."""
    config = {"nanogpt": {**CONFIGS["gpt2"], "activation_function": "gelu"}, "llama2c": CONFIGS["llama-2"]}
    save_hf(config.get(request.param, PLAIN), tmp_path / "written", torch.float32)
    convert(tmp_path / "written", tmp_path / request.param, request.param)
    return tmp_path / request.param


KINDS = ("litgpt", "meta", "fsdp", "deepspeed")


@few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_mutations(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(kind)
    opened, refused = mutated(folder, tmp_path / "mutated", max(examples(24), 4))
    assert opened + refused and refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "zero2", "lightning", "npz", "nanochat", "pickled"])
def test_thousands_of_mutations(kind: str, request: pytest.FixtureRequest, memory_path: Path) -> None:
    opened, refused = mutated(request.getfixturevalue(kind), memory_path / "mutated", 20_000)
    assert min(opened, refused) > 800


@pytest.mark.slow
@pytest.mark.parametrize("written", ["dcp", "nanogpt", "llama2c"], indirect=True)
def test_thousands_of_mutations_of_what_is_written(written: Path, memory_path: Path) -> None:
    opened, refused = mutated(written, memory_path / "mutated", 20_000)
    assert min(opened, refused) > 600  # nearly all bytes of llama2.c's file are values, which any bits are


# --- the programs themselves

PRODUCERS = os.environ.get("GPTKIT_PRODUCERS_PYTHON", sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["litgpt", "finetuned", "lightning", "fsdp", "zero1", "zero3", "mlx", "gptq"])
def test_what_the_programs_write(what: str, original: Path, tmp_path: Path) -> None:
    """tests/produced.py writes a folder a model and, beside it, what the model computes. Each becomes one that
    transformers loads, which computes the same.
    """
    script = Path(__file__).parents[1] / "produced.py"
    command = [PRODUCERS, str(script), what, str(original), str(tmp_path)]
    code = subprocess.run(command, check=False, timeout=2 * HANGS, cwd=tmp_path).returncode
    if code == 77:  # ABSENT
        pytest.skip(f"{PRODUCERS} has not what {what} needs (GPTKIT_PRODUCERS_PYTHON names another Python)")
    assert code == 0
    found = sorted(tmp_path.glob("*.logits"))
    assert found
    for path in found:
        convert(path.with_suffix(""), path.with_suffix(".hf"), "hf", dtype="float32", allow_pickle=True)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path.with_suffix(".hf"), dtype=torch.float32).eval()
        expected = torch.load(path, weights_only=True)
        with torch.no_grad():
            logits = model(torch.arange(40).reshape(2, 20) * 2 % 97).logits
        assert float((logits - expected).abs().max()) <= 2e-6 * float(expected.abs().max()), path.stem
        if what == "finetuned":
            assert AutoTokenizer.from_pretrained(path.with_suffix(".hf"))("w5 w7").input_ids == [5, 7]
