"""Megatron-LM's checkpoints, written here by the published layout (its producer needs a GPU): tools/checkpoint's schema
and loader say how tensors are called, shared out by ranks and numbered by stages.
"""

import argparse
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from helpers.mutations import mutated
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.errors import CheckpointError, ConfigError, GptkitError, InvalidInput, UntrustedInput

State = dict[str, torch.Tensor]
_ROPE = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 48}
LLAMA = {**CONFIGS["llama"], **_SIZES, **_ROPE, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 16}
LLAMA |= {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
QWEN2 = {**CONFIGS["qwen2"], **_SIZES, **_ROPE, "num_key_value_heads": 2, "intermediate_size": 24}
QWEN2 |= {"tie_word_embeddings": True, "use_sliding_window": False}
QWEN3 = {**CONFIGS["qwen3"], **_SIZES, **_ROPE, "num_key_value_heads": 4, "intermediate_size": 24, "head_dim": 8}
QWEN3 |= {"use_sliding_window": False, "attention_bias": False}
GPT2 = {**CONFIGS["gpt2"], "n_layer": 4, "n_head": 4, "n_embd": 32, "n_inner": 40, "vocab_size": 48}
GPT2 |= {"activation_function": "gelu_fast", "tie_word_embeddings": True}
NEOX = {**CONFIGS["gpt_neox"], **_SIZES, "intermediate_size": 24, "use_parallel_residual": False, "hidden_act": "gelu"}
NEOX |= {"rotary_pct": 0.5, "tie_word_embeddings": False, "attention_bias": True}
MODELS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2, "gpt_neox": NEOX}


def arguments(config: dict[str, Any], tensor: int, pipeline: int) -> dict[str, Any]:
    kind = config["model_type"]
    of_llama = kind in ("llama", "qwen2", "qwen3")
    gpt2 = kind == "gpt2"
    names = ("n_embd", "n_layer", "n_head", "n_inner", "n_positions") if gpt2 else (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"
    )  # fmt: skip
    hidden, layers, heads, inner, context = (config[name] for name in names)
    rotary = config.get("rope_parameters", {"rope_theta": 10000})
    eps = next(value for name, value in config.items() if name.endswith(("norm_eps", "norm_epsilon")))
    given = {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": inner,
        "max_position_embeddings": context, "seq_length": context, "padded_vocab_size": 48,
        "kv_channels": config.get("head_dim", hidden // heads), "params_dtype": torch.bfloat16,
        "group_query_attention": of_llama, "num_query_groups": config.get("num_key_value_heads", 1),
        "normalization": "RMSNorm" if of_llama else "LayerNorm", "swiglu": of_llama, "add_bias_linear": not of_llama,
        "add_qkv_bias": kind == "qwen2", "qk_layernorm": kind == "qwen3", "bias_gelu_fusion": kind != "gpt_neox",
        "position_embedding_type": "learned_absolute" if gpt2 else "rope", "rotary_base": int(rotary["rope_theta"]),
        "rotary_percent": rotary.get("partial_rotary_factor", 1.0),
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "num_experts": None,
        "openai_gelu": False, "norm_epsilon": eps,
    }  # fmt: skip
    return given | {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True)}


def whole(state: State, config: dict[str, Any]) -> State:
    """Hugging Face's tensors as those of one rank of megatron.core with Transformer Engine's layers."""
    kind, made = config["model_type"], {}
    gpt2, neox = kind == "gpt2", kind == "gpt_neox"
    heads = config["n_head" if gpt2 else "num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    names = {
        "gpt2": (
            "transformer.",
            "wte",
            "h",
            "ln_1",
            "ln_2",
            "attn.c_proj",
            "mlp.c_fc",
            "mlp.c_proj",
            "ln_f",
            "lm_head",
        ),
        "gpt_neox": (
            *("gpt_neox.", "embed_in", "layers", "input_layernorm", "post_attention_layernorm", "attention.dense"),
            *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "final_layer_norm", "embed_out"),
        ),
    }.get(kind) or (
        *("model.", "embed_tokens", "layers", "input_layernorm", "post_attention_layernorm", "self_attn.o_proj"),
        *("", "mlp.down_proj", "norm", "lm_head"),
    )
    prefix, embedding, layers, first, second, out, up, down, last, head = names

    def linear(name: str) -> torch.Tensor:
        return state[name].T if gpt2 and state[name].ndim == 2 else state[name]

    made["embedding.word_embeddings.weight"] = state[f"{prefix}{embedding}.weight"]
    if gpt2:
        made["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
    for layer in range(4):
        theirs, ours = f"{prefix}{layers}.{layer}.", f"decoder.layers.{layer}."
        for end in ("weight", "bias"):
            if f"{theirs}{first}.{end}" in state:
                made[f"{ours}self_attention.linear_qkv.layer_norm_{end}"] = state[f"{theirs}{first}.{end}"]
                made[f"{ours}mlp.linear_fc1.layer_norm_{end}"] = state[f"{theirs}{second}.{end}"]
            if f"{theirs}{out}.{end}" in state:
                made[f"{ours}self_attention.linear_proj.{end}"] = linear(f"{theirs}{out}.{end}")
                made[f"{ours}mlp.linear_fc2.{end}"] = linear(f"{theirs}{down}.{end}")
            if neox:
                made[f"{ours}self_attention.linear_qkv.{end}"] = state[f"{theirs}attention.query_key_value.{end}"]
            elif gpt2:
                q, k, v = (each.unflatten(0, (heads, 1, -1)) for each in linear(f"{theirs}attn.c_attn.{end}").chunk(3))
                made[f"{ours}self_attention.linear_qkv.{end}"] = torch.cat([q, k, v], 1).flatten(0, 2)
            elif f"{theirs}self_attn.q_proj.{end}" in state:
                parts = [state[f"{theirs}self_attn.{x}_proj.{end}"].unflatten(0, (groups, -1)) for x in "qkv"]
                made[f"{ours}self_attention.linear_qkv.{end}"] = torch.cat(parts, 1).flatten(0, 1)
            if up and f"{theirs}{up}.{end}" in state:
                made[f"{ours}mlp.linear_fc1.{end}"] = linear(f"{theirs}{up}.{end}")
            if f"{prefix}{last}.{end}" in state:
                made[f"decoder.final_layernorm.{end}"] = state[f"{prefix}{last}.{end}"]
        if not up:
            gate_up = [state[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]
            made[f"{ours}mlp.linear_fc1.weight"] = torch.cat(gate_up)
        for name in ("q", "k"):
            if f"{theirs}self_attn.{name}_norm.weight" in state:
                norm = state[f"{theirs}self_attn.{name}_norm.weight"]
                made[f"{ours}self_attention.{name}_layernorm.weight"] = norm
    if not config.get("tie_word_embeddings", gpt2):
        made["output_layer.weight"] = state[f"{head}.weight"]
    return made


def part(name: str, tensor: torch.Tensor, rank: int, ranks: int, gated: bool) -> torch.Tensor:
    """A rank's part, as Megatron's column- and row-parallel layers hold it."""
    if any(each in name for each in ("layer_norm", "layernorm", "position")):
        return tensor
    if "linear_fc1" in name and gated:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, 1)[rank]
    return tensor if name.endswith(("linear_proj.bias", "linear_fc2.bias")) else tensor.chunk(ranks)[rank]


_OLD = (
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
    ("decoder.", "language_model.encoder."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
    ("linear_qkv", "query_key_value"),
    ("linear_proj", "dense"),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
)


def old(state: State) -> dict[str, Any]:
    """The names from before megatron.core, in dictionaries: those of a stack's layers are in one."""
    made: dict[str, Any] = {}
    for name, tensor in state.items():
        for theirs, ours in _OLD:
            name = name.replace(theirs, ours)
        keys = name.split(".", 2)
        keys = [*keys[:2], *(keys[2].split(".") if keys[1] == "embedding" else [keys[2]])]
        inside = made
        for key in keys[:-1]:
            inside = inside.setdefault(key, {})
        inside[keys[-1]] = tensor
    return made


def save(
    folder: Path, original: Path, tensor: int = 1, pipeline: int = 1, virtual: int = 1, older: bool = False
) -> Path:
    """A checkpoint of so many ranks, of four layers."""
    config = json.loads((original / "config.json").read_text())
    every, given = whole(load_file(original / "model.safetensors"), config), arguments(config, tensor, pipeline)
    each, step = 4 // pipeline // virtual, folder / "iter_0000007"
    for stage in range(pipeline):
        for rank in range(tensor):
            models: dict[str, Any] = {}
            for turn in range(virtual):
                at = (turn * pipeline + stage) * each
                own: dict[str, Any] = {}
                for name, value in every.items():
                    pieces = name.split(".")
                    if pieces[1] == "layers":
                        if not at <= int(pieces[2]) < at + each:
                            continue
                        name = ".".join([*pieces[:2], str(int(pieces[2]) - at), *pieces[3:]])
                    elif (name.startswith("embedding") and at) or (not name.startswith("embedding") and at + each < 4):
                        continue
                    own[name] = part(name, value, rank, tensor, given["swiglu"]).clone()
                if "output_layer.weight" not in every and at + each == 4 and pipeline > 1:  # a copy of the embedding
                    own["output_layer.weight"] = every["embedding.word_embeddings.weight"].chunk(tensor)[rank].clone()
                if not older:
                    own["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                models["model" if virtual == 1 else f"model{turn}"] = old(own) if older else own
            place = step / (f"mp_rank_{rank:02}" if pipeline == 1 else f"mp_rank_{rank:02}_{stage:03}")
            place.mkdir(parents=True)
            content = {"args": argparse.Namespace(**given, rank=rank), "checkpoint_version": 3.0, "iteration": 7}
            torch.save({**content, **models, "optimizer": {"state": {}}}, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("megatron")

    def make(name: str) -> Path:
        if not (root / name).exists():
            save_hf(MODELS[name], root / name, torch.bfloat16)
        return root / name

    return make


def same(folder: Path, original: Path, out: Path) -> None:
    """What is written of a folder has the original's tensors, byte for byte, and a config of the same tree."""
    convert(folder, out, "hf", allow_pickle=True)
    ours, theirs = load_file(out / "model.safetensors"), load_file(original / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)
    assert open_checkpoint(out).spec == open_checkpoint(original).spec


@few(2)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_and_stages_become_the_model(name: str, originals: Any, tmp_path: Path) -> None:
    original = originals(name)
    same(save(tmp_path / "run", original, tensor=2, pipeline=2), original, tmp_path / "out")


@few(1)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual", "older"), [(1, 1, 1, True), (2, 2, 2, False), (2, 4, 1, True)]
)
def test_other_shapes_and_names(
    tensor: int, pipeline: int, virtual: int, older: bool, originals: Any, tmp_path: Path
) -> None:
    for name in ("llama", "gpt2"):
        original = originals(name)
        folder = save(tmp_path / name, original, tensor, pipeline, virtual, older)
        same(folder / "iter_0000007", original, tmp_path / f"{name}-out")


def test_a_config_beside_has_to_be_of_the_same_model(originals: Any, tmp_path: Path) -> None:
    original = originals("llama")
    folder = save(tmp_path / "run", original, tensor=2)
    shutil.copy(original / "config.json", folder / "iter_0000007")
    same(folder / "iter_0000007", original, tmp_path / "out")
    config = json.loads((original / "config.json").read_text())
    (folder / "iter_0000007" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(CheckpointError, match="describe different models"):
        open_checkpoint(folder / "iter_0000007", allow_pickle=True)


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


_QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BAD: dict[str, tuple[str, Callable[[dict[str, Any]], object], type[GptkitError], str]] = {
    "another step": ("01_000", lambda c: c.update(iteration=8), CheckpointError, "has iteration 7, but .* has 8"),
    "other arguments": ("01_000", lambda c: vars(c["args"]).update(num_layers=8), CheckpointError, "different train"),
    "no arguments": ("00_000", lambda c: c.pop("args"), CheckpointError, "does not contain the training arguments"),
    "an old version": ("00_000", lambda c: c.update(checkpoint_version=1.0), CheckpointError, "checkpoint_version 1.0"),
    "a tensor lost": ("01_000", lambda c: c["model"].pop(_QKV), CheckpointError, "missing in some of the 2"),
    "a part of another size": (
        "01_000", lambda c: c["model"].update({_QKV: c["model"][_QKV][1:]}), CheckpointError, "with different sizes",
    ),
    "a part of other dimensions": (
        "01_000", lambda c: c["model"].update({_QKV: c["model"][_QKV][0, 0]}), CheckpointError, "with different sizes",
    ),
    "norms that differ": (
        "01_001", lambda c: c["model"]["decoder.final_layernorm.weight"].add_(1), CheckpointError, "different values",
    ),
    "a layer lost": (
        "00_000", lambda c: [c["model"].pop(n) for n in [*c["model"]] if "s.0." in n], CheckpointError, "from 0",
    ),
    "no model": ("00_000", lambda c: c.pop("model"), CheckpointError, "contains no model"),
    "two models": ("00_000", lambda c: c.update(model0={}), CheckpointError, "contains no model"),
}  # fmt: skip


@few(3)
@pytest.mark.parametrize("case", BAD)
def test_ranks_that_do_not_fit(case: str, originals: Any, tmp_path: Path) -> None:
    rank, edit, kind, message = BAD[case]
    folder = save(tmp_path / "run", originals("llama"), tensor=2, pipeline=2)
    edited(folder / "iter_0000007" / f"mp_rank_{rank}" / "model_optim_rng.pt", edit)
    with pytest.raises(kind, match=message):
        convert(folder, tmp_path / "out", allow_pickle=True)
    assert {each.name for each in tmp_path.iterdir()} == {"run"}


def test_a_rank_that_is_missing_and_pickles_that_are_not_allowed(originals: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", originals("llama"), tensor=2, pipeline=2)
    with pytest.raises(UntrustedInput):
        open_checkpoint(folder)
    shutil.rmtree(folder / "iter_0000007" / "mp_rank_01_001")
    with pytest.raises(
        CheckpointError,
        match=r"lacks the files of .* \(1, 1\), but its training arguments \(args\) say 2 tensor-parallel x 2 pipeline",
    ):
        open_checkpoint(folder, allow_pickle=True)
    for text in ("8", "..", "release", "/etc", ""):
        (folder / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(CheckpointError, match="names a folder that does not exist"):
            open_checkpoint(folder, allow_pickle=True)


@few(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "num_experts=8"),
        ({"multi_latent_attention": True}, "multi_latent_attention=True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"rotary_percent": 0.5}, "gptkit does not support the model"),
        ({"normalization": "LayerNorm"}, "gptkit does not support the model"),
        ({"add_bias_linear": True}, "gptkit does not support the model"),
        ({"hidden_size": -1}, "hidden_size=-1, expected a positive integer"),
        ({"num_layers": 2**40}, "describe 1099511627776 layers"),
    ],
)
def test_arguments_that_are_not_read(change: dict[str, Any], message: str, originals: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", originals("llama"))
    path = folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    edited(path, lambda content: vars(content["args"]).update(change))
    with pytest.raises((ConfigError, InvalidInput), match=message):
        open_checkpoint(folder, allow_pickle=True)


def test_mutations(originals: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", originals("llama"), tensor=2)
    opened, refused = mutated(folder, tmp_path / "mutated", 4)
    assert opened + refused == 4


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True])
def test_thousands_of_mutations(chunks: bool, originals: Any, memory_path: Path) -> None:
    run, original = memory_path / "run", originals("llama")
    folder = save_torch_dist(run, original, 2, True) if chunks else save(run, original, tensor=2)
    opened, refused = mutated(folder, memory_path / "mutated", 20_000)
    assert min(opened, refused) > 500


class Parts(torch.Tensor):
    """A tensor that is saved in chunks, as megatron.core's ShardedTensor is by torch_dist."""

    whole: tuple[int, ...]
    chunks: dict[tuple[int, ...], torch.Tensor]

    @classmethod
    def of(cls, size: tuple[int, ...], chunks: dict[tuple[int, ...], torch.Tensor]) -> "Parts":
        made = torch.empty(0).as_subclass(cls)
        made.whole, made.chunks = size, chunks
        return made

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(at)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(at), each.shape),
                    properties=TensorProperties.create_from_tensor(each),
                    size=torch.Size(self.whole),
                ),
            )
            for at, each in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), each.shape) for at, each in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.chunks[tuple(index.offset or ())]


def save_torch_dist(folder: Path, original: Path, ranks: int, stacked: bool) -> Path:
    """Chunks of two ranks; layers one behind the other, as before megatron.core 0.14, or by their numbers."""
    config = json.loads((original / "config.json").read_text())
    given, state = arguments(config, ranks, 1), {}
    boxes: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for name, tensor in whole(load_file(original / "model.safetensors"), config).items():
        pieces = name.split(".")
        layer = int(pieces[2]) if pieces[1] == "layers" else None
        key = ".".join([*pieces[:2], *pieces[3:]]) if layer is not None and stacked else name
        lead = (layer,) if layer is not None and stacked else ()
        parts = [part(name, tensor, rank, ranks, False) for rank in range(ranks)]
        if parts[0].shape == tensor.shape:
            parts = parts[:1]
        at = 0
        dim = next((d for d in range(tensor.ndim) if parts[0].shape[d] != tensor.shape[d]), 0)
        for each in parts:
            offsets = tuple(at if d == dim else 0 for d in range(tensor.ndim))
            at += each.shape[dim]
            boxes.setdefault(key, {})[(*lead, *offsets)] = each.clone()[(None,) * len(lead)]
        state[key] = (*((4,) * len(lead)), *tensor.shape)
    step = folder / "iter_0000007"
    tensors = {key: Parts.of(size, boxes[key]) for key, size in state.items()}
    tensors["optimizer.state.exp_avg.output_layer.weight"] = Parts.of((2,), {(0,): torch.zeros(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that it is one process
        dcp.save(tensors, checkpoint_id=step, no_dist=True)
    content = {"args": argparse.Namespace(**given), "checkpoint_version": 3.0, "iteration": 7}
    torch.save(content, step / "common.pt")
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@few(1)
@pytest.mark.parametrize(("name", "stacked"), [("llama", True), ("gpt2", False)])
def test_torch_dist(name: str, stacked: bool, originals: Any, tmp_path: Path) -> None:
    original = originals(name)
    folder = save_torch_dist(tmp_path / "run", original, 2, stacked)
    with pytest.raises(UntrustedInput):
        open_checkpoint(folder)
    same(folder, original, tmp_path / "out")
    same(folder / "iter_0000007", original, tmp_path / "out2")
    edited(folder / "iter_0000007" / "common.pt", lambda content: vars(content["args"]).update(num_layers=5))
    with pytest.raises(CheckpointError, match="tensors are missing"):
        open_checkpoint(folder, allow_pickle=True)
    edited(folder / "iter_0000007" / "common.pt", lambda content: content.pop("args"))
    with pytest.raises(CheckpointError, match="does not contain the training arguments"):
        open_checkpoint(folder, allow_pickle=True)
