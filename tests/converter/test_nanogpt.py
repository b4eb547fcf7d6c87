"""nanoGPT's checkpoints against a model of their own here, made after nanoGPT's model.py, and torch.load."""

import json
import math
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS, GPT2, save_hf
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import gptkit
from gptkit.architectures.nanogpt import LEAVES
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.formats import torch_archive
from gptkit.errors import CannotExpress, CheckpointError, InvalidInput, UntrustedInput, UsageError

EXACT = {**GPT2, "activation_function": "gelu"}
IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [2, 71, 82, 81, 82, 84, 59, 4, 52, 35]])


# --- a model of their own ---


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class Norm(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.heads = config.n_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, tanh: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh" if tanh else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, tanh: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(config.n_embd, config.bias), Attention(config)
        self.ln_2, self.mlp = Norm(config.n_embd, config.bias), MLP(config, tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, tanh: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config, tanh) for _ in range(config.n_layer)]),
                "ln_f": Norm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": 128, "bias": True, "dropout": 0.1}


def trained(tanh: bool = False, **changes: Any) -> tuple[GPT, dict[str, Any]]:
    """A model with all parameters random, and what train.py saves of it."""
    arguments = {**SMALL, **changes}
    model = GPT(GPTConfig(**arguments), tanh)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS[:, :3]).sum().backward()
    optimizer.step()
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": arguments,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare", "learning_rate": 6e-4, "wandb_log": False},
    }
    return model, checkpoint


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


# --- out ---


def load(path: Path, tanh: bool = False, **options: Any) -> GPT:
    """As nanoGPT's sample.py does."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, **options)
    model = GPT(GPTConfig(**checkpoint["model_args"]), tanh)
    model.load_state_dict(checkpoint["model"])
    return model.eval()


@pytest.mark.parametrize(("config", "to"), [(EXACT, "nanogpt"), (GPT2, "nanogpt_tanh")], ids=["exact", "tanh"])
@pytest.mark.parametrize("mmap", [False, True])
def test_nanogpt_loads_what_is_written(config: dict[str, Any], to: str, mmap: bool, tmp_path: Path) -> None:
    model = save_hf(config, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", to)
    ours = load(tmp_path / "out" / "ckpt.pt", "tanh" in to, mmap=mmap)
    with torch.no_grad():
        assert float((ours.double()(IDS) - model.double()(IDS).logits).abs().max()) < 1e-11
    # And back, to the last bit; the file says which GELU.
    convert(tmp_path / "out", tmp_path / "back", "hf", allow_pickle=True)
    back, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", tmp_path / "hf"))
    assert back.keys() == original.keys() and all(torch.equal(back[name], original[name]) for name in original)
    said = json.loads((tmp_path / "back" / "config.json").read_text())["activation_function"]
    assert said == config.get("activation_function", "gelu_new")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float64"])
def test_dtypes_and_the_plan(dtype: str | None, tmp_path: Path) -> None:
    save_hf(EXACT, tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "out", "nanogpt", dtype=dtype)
    state = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model"]
    assert {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()} == {dtype or "float32"}
    assert (tmp_path / "out" / "ckpt.pt").stat().st_size == done.plan.shards[0].size
    original = load_file(tmp_path / "hf" / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(state[name], original[name].T.to(state[name].dtype))
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "out" / "ckpt.pt") as archive:
        assert archive.testzip() is None
    convert(tmp_path / "hf", tmp_path / "again", "nanogpt", dtype=dtype)
    assert (tmp_path / "again" / "ckpt.pt").read_bytes() == (tmp_path / "out" / "ckpt.pt").read_bytes()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["files"]["ckpt.pt"]["tensors"]) == len(state) - 1


def test_large_members_are_laid_out_as_zip_wants_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes and places beyond 32 bits, with that limit lowered."""
    monkeypatch.setattr(torch_archive, "_LIMIT", 3000)
    save_hf(EXACT, tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "out", "nanogpt")
    assert (tmp_path / "out" / "ckpt.pt").stat().st_size == done.plan.shards[0].size
    load(tmp_path / "out" / "ckpt.pt")
    with zipfile.ZipFile(tmp_path / "out" / "ckpt.pt") as archive:
        assert archive.testzip() is None
    convert(tmp_path / "out", tmp_path / "back", "hf", allow_pickle=True)


def test_values_that_are_not_finite_are_told(tmp_path: Path) -> None:
    _, checkpoint = trained()
    checkpoint["model"]["transformer.wpe.weight"][3] = math.inf
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    done = convert(tmp_path, tmp_path / "out", "nanogpt", allow_pickle=True)
    assert done.transferred is not None and done.transferred.not_finite == {"transformer.wpe.weight": 32}
    with pytest.raises(UsageError, match="unknown dtype"):
        convert(tmp_path, tmp_path / "out2", "nanogpt", allow_pickle=True, dtype="int8")


def test_a_value_beyond_the_dtype_leaves_nothing(tmp_path: Path) -> None:
    _, checkpoint = trained()
    checkpoint["model"]["transformer.wpe.weight"][3] = 1e9
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="float16"):
        convert(tmp_path, tmp_path / "out", "nanogpt", allow_pickle=True, dtype="float16")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2, "nanogpt_tanh"),
        ({**EXACT, "n_inner": 100}, "intermediate_size"),
        ({**EXACT, "layer_norm_epsilon": 1e-6}, "eps"),
        ({**EXACT, "scale_attn_weights": False}, "scale"),
        ({**EXACT, "tie_word_embeddings": False}, "tied"),
        ({**EXACT, "activation_function": "relu"}, "activation"),
        (CONFIGS["llama"], "nanoGPT cannot"),
        (CONFIGS["bloom"], "nanoGPT cannot"),
        (CONFIGS["falcon-7b"], "nanoGPT cannot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trees_that_it_cannot_hold(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_hf(config, tmp_path / "hf")
    with pytest.raises(CannotExpress, match=told):
        convert(tmp_path / "hf", tmp_path / "out", "nanogpt")


# --- in ---


@few(2)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_train_py_saves(bias: bool, compiled: bool, tmp_path: Path) -> None:
    model, checkpoint = trained(bias=bias)
    if compiled:
        checkpoint["model"] = {f"_orig_mod.{name}": tensor for name, tensor in checkpoint["model"].items()}
    mask = torch.ones(64, 64).tril().view(1, 1, 64, 64)
    for layer in range(2):
        checkpoint["model"][f"{'_orig_mod.' * compiled}transformer.h.{layer}.attn.bias"] = mask
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    with torch.no_grad():
        theirs = model(IDS)
        assert close(gptkit.load(tmp_path / "ckpt.pt", allow_pickle=True)(IDS), theirs)
        if bias:
            done = convert(tmp_path, tmp_path / "hf", "hf", allow_pickle=True)
            from transformers import AutoModelForCausalLM

            hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
            assert hf.config.activation_function == "gelu" and hf.config.eos_token_id is None
            assert close(hf(IDS).logits, theirs)
        else:
            with pytest.raises(UsageError, match="does not know the family of this model"):
                convert(tmp_path, tmp_path / "hf", "hf", allow_pickle=True)
            convert(tmp_path, tmp_path / "zeros", "hf:gpt2", allow_pickle=True)
            assert close(gptkit.load(tmp_path / "zeros")(IDS), theirs)
            done = convert(tmp_path, tmp_path / "local", allow_pickle=True)
            convert(tmp_path / "local", tmp_path / "back", "nanogpt")
            assert close(load(tmp_path / "back" / "ckpt.pt")(IDS), theirs)
    notes = "\n".join(done.source.notes)
    for part in ("attn.bias", "is a copy of the embedding", "which GELU", "optimizer, iter_num"):
        assert part in notes, part


def test_its_leaves_are_read_and_copied_where_they_lie(tmp_path: Path) -> None:
    _, checkpoint = trained()
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    source = open_checkpoint(tmp_path, allow_pickle=True)
    assert all(source.span(leaf) is not None for leaf in source.leaves)
    assert source.format == "nanogpt" and len(source.leaves) == 2 * 12 + 4
    names = {leaf.checkpoint.format(layer=layer) for leaf in LEAVES for layer in range(2)}
    assert {leaf.checkpoint for leaf in source.leaves} <= names


def test_the_padded_vocabulary_of_gpt2(tmp_path: Path) -> None:
    model, checkpoint = trained(vocab_size=50304, n_layer=1, n_embd=8, n_head=2)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    convert(tmp_path, tmp_path / "hf", "hf", allow_pickle=True)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == 50304 and config["eos_token_id"] == 50256
    assert load_file(tmp_path / "hf" / "model.safetensors")["transformer.wte.weight"].shape == (50304, 8)
    assert sum(p.numel() for p in model.parameters()) == sum(
        math.prod(leaf.shape) for leaf in open_checkpoint(tmp_path, allow_pickle=True).leaves
    )


def test_only_where_pickles_are_allowed(tmp_path: Path) -> None:
    torch.save(trained()[1], tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        with pytest.raises(UntrustedInput, match="--allow-pickle"):
            convert(path, tmp_path / "out")
    shutil.copy(tmp_path / "ckpt.pt", tmp_path / "model.pt")
    assert open_checkpoint(tmp_path / "model.pt", allow_pickle=True).format == "nanogpt"
    save_hf(GPT2, tmp_path / "hf")
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path)
    assert open_checkpoint(tmp_path / "model.pt", allow_pickle=True).format == "nanogpt", "told by what is in it"


def edit(kind: str, content: dict[str, Any]) -> Any:
    state, arguments = content["model"], content["model_args"]
    first = "transformer.h.0.attn.c_attn.weight"
    if kind == "missing":
        del state[first]
    elif kind == "extra":
        state["more"] = torch.ones(1)
    elif kind == "transposed":
        state[first] = state[first].T.contiguous()
    elif kind == "int8":
        state[first] = state[first].to(torch.int8)
    elif kind == "other head":
        state["lm_head.weight"] = torch.ones(128, 32)
    elif kind == "both names":
        state[f"_orig_mod.{first}"] = state[first]
    elif kind == "layers":
        arguments["n_layer"] = 3
    elif kind == "many layers":
        arguments["n_layer"] = 9000
    elif kind == "heads":
        arguments["n_head"] = 5
    elif kind == "bias":
        arguments["bias"] = False
    elif kind == "another model":
        content["model_args"] = {"dim": 64, "n_layers": 5}
    elif kind == "a fork":
        arguments["use_rmsnorm"] = True
    elif kind == "a number":
        state[first] = 3
    elif kind == "state alone":
        return state
    elif kind == "a list":
        return [state]
    return content


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing", "1 of 28 tensors are missing: transformer.h.0.attn.c_attn.weight"),
        ("extra", "no place in the model: more"),
        ("transposed", r"is \[32, 96\], expected \[96, 32\]"),
        ("int8", "is I8"),
        ("other head", "differs from the embedding"),
        ("both names", "with and without"),
        ("layers", "12 of 40 tensors are missing"),
        ("many layers", "its model_args say 9000 layers"),
        ("heads", "n_embd"),
        ("bias", "no place in the model"),
        ("another model", "model_args .dict of 2.*; the tensor names are those of gpt2"),
        ("a fork", "use_rmsnorm"),
        ("a number", r"it also contains transformer.h.0.attn.c_attn.weight \(int\)"),
        (
            "state alone",
            r"contains \d+ tensors: transformer.wte.weight \[128, 32\], .*; the tensor names are those of gpt2",
        ),
        ("a list", "contains a list of 1, not a dictionary of tensors"),
    ],
)
def test_bad_checkpoints(kind: str, told: str, tmp_path: Path) -> None:
    torch.save(edit(kind, trained()[1]), tmp_path / "ckpt.pt")
    with pytest.raises(InvalidInput, match=told) as caught:
        convert(tmp_path, tmp_path / "out", allow_pickle=True)
    assert not (tmp_path / "out").exists() and len(str(caught.value).splitlines()) <= 2


def test_truncated(tmp_path: Path) -> None:
    torch.save(trained()[1], tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for left in (len(data) - 1, len(data) // 2, 10):
        (tmp_path / "ckpt.pt").write_bytes(data[:left])
        with pytest.raises(CheckpointError, match=rf"ckpt.pt is truncated.* {left:,} bytes found"):
            convert(tmp_path / "ckpt.pt", tmp_path / "out", allow_pickle=True)


def test_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    _, checkpoint = trained()
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    convert(tmp_path, tmp_path / "local", allow_pickle=True)
    convert(tmp_path / "local", tmp_path / "out", "nanogpt")
    back = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model"]
    assert back.keys() == checkpoint["model"].keys()
    for name, tensor in checkpoint["model"].items():
        assert np.array_equal(back[name].numpy(), tensor.numpy()), name
