"""A MiniGPT as tutorials write it (post-norm, ReLU, sinusoidal positions, a scaled embedding): gptkit's tree of it is
trained, held against the plain torch model, converted there and back, and continues a text.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.command import call
from helpers.training import made
from torch import Tensor, nn

import gptkit
from gptkit.components import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LayerNorm,
    ModelSpec,
    SinusoidalPositions,
    SubLayer,
)
from gptkit.converter.tree import write_spec
from gptkit.modules import Decoder
from gptkit.parity.diff import diff

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 4, 2, 300, 64
PORT = "mini_gpt_of_a_tutorial"


def tree() -> ModelSpec:
    norm = LayerNorm(size=HIDDEN, eps=1e-5)
    size = HIDDEN // HEADS
    attention = Attention(
        hidden_size=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=size,
        scale=size**-0.5,
        qkv_bias=True,
        output_bias=True,
    )
    mlp = FeedForward(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, activation="relu", up_bias=True, down_bias=True)
    layer = Block(sublayers=(SubLayer(mixer=attention, sum_norm=norm), SubLayer(mixer=mlp, sum_norm=norm)))
    return ModelSpec(
        embedding=Embedding(vocab_size=VOCABULARY, hidden_size=HIDDEN, multiplier=math.sqrt(HIDDEN)),
        positions=SinusoidalPositions(length=LENGTH, size=HIDDEN),
        blocks=(layer,) * LAYERS,
        head=Head(vocab_size=VOCABULARY, hidden_size=HIDDEN, bias=True),
        context_length=LENGTH,
    )


class MiniGPT(nn.Module):
    """Vaswani et al. 2017, the decoder alone, by torch's own layers: sines and cosines lie by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, activation="relu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        steps = ids.shape[1]
        at = torch.arange(steps)[:, None] * torch.exp(-math.log(10000.0) * torch.arange(0, HIDDEN, 2) / HIDDEN)
        positions = torch.stack([at.sin(), at.cos()], dim=-1).flatten(1).to(self.table.weight.dtype)
        x = self.table(ids) * math.sqrt(HIDDEN) + positions
        unseen = torch.full((steps, steps), float("-inf"), dtype=x.dtype).triu(1)
        out: Tensor = self.head(self.layers(x, mask=unseen))
        return out


def plain(folder: Path) -> MiniGPT:
    """The plain model with the weights of a checkpoint. Where gptkit has all sines and then all cosines, it has them by
    turns: the stream's coordinates change places.
    """
    ours: Decoder = gptkit.load(folder, "float32")
    tensors = {name: each.detach() for name, each in ours.named_parameters()}
    turns = torch.arange(HIDDEN).reshape(2, -1).T.flatten()
    model = MiniGPT()
    found = {"table.weight": tensors["embedding.weight"][:, turns]}
    found |= {"head.weight": tensors["head.weight"][:, turns], "head.bias": tensors["head.bias"]}
    for layer in range(LAYERS):
        own, at = f"layers.layers.{layer}", f"blocks.{layer}"
        qkv = {part: [tensors[f"{at}.attention.{name}_proj.{part}"] for name in "qkv"] for part in ("weight", "bias")}
        found[f"{own}.self_attn.in_proj_weight"] = torch.cat(qkv["weight"])[:, turns]
        found[f"{own}.self_attn.in_proj_bias"] = torch.cat(qkv["bias"])
        for theirs, mine in (("self_attn.out_proj", "attention.o_proj"), ("linear2", "feed_forward.down_proj")):
            found |= {f"{own}.{theirs}.{part}": tensors[f"{at}.{mine}.{part}"][turns] for part in ("weight", "bias")}
        found[f"{own}.linear1.weight"] = tensors[f"{at}.feed_forward.up_proj.weight"][:, turns]
        found[f"{own}.linear1.bias"] = tensors[f"{at}.feed_forward.up_proj.bias"]
        for theirs, mine in (("norm1", "attention_sum_norm"), ("norm2", "feed_forward_sum_norm")):
            found |= {f"{own}.{theirs}.{part}": tensors[f"{at}.{mine}.{part}"][turns] for part in ("weight", "bias")}
    model.load_state_dict(found)
    return model.eval()


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    _, text = made(folder)
    write_spec(tree(), folder / "mini.json")
    words = ["train", folder / "mini.json", folder / "mini", "--data", text, "--tokens", "16k", "--context", "32"]
    told = call(*words, "--batch", "512", "--lr", "5e-3", "--seed", "1")
    assert told.exit_code == 0, told.output
    return folder / "mini"


def test_it_learns(mini: Path) -> None:
    lines = [json.loads(line) for line in (mini.parent / "mini.training" / "metrics.jsonl").read_text().splitlines()]
    losses = [each["held_out"] for each in lines if each["held_out"] is not None]
    assert losses[-1] < 0.6 * math.log(VOCABULARY) and losses[-1] < losses[0]


def test_it_is_the_plain_model(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `verify --against`; and one without the embedding's scale is told from it, and its cause."""
    monkeypatch.chdir(tmp_path)
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_mini_gpt import plain\n"
    build = f"def build():\n    return plain({str(mini)!r})\n\n\n"
    wrong = "def unscaled():\n    model = build()\n    model.table.weight.data /= 32**0.5\n    return model\n"
    (tmp_path / f"{PORT}.py").write_text(f"{here}\n\n{build}{wrong}")
    told = call("verify", mini, "--against", f"{PORT}:build")
    assert told.exit_code == 0, told.output
    assert "against gptkit's own modules" in told.stdout
    told = call("verify", mini, "--against", f"{PORT}:unscaled")
    assert told.exit_code == 3 and "embedding not scaled" in told.stdout, told.output


def test_it_is_converted_and_continues_a_text(mini: Path, tmp_path: Path) -> None:
    for source, out, to in (
        (mini, "local", "local"),
        (tmp_path / "local", "nine", "dcp"),
        (tmp_path / "nine", "b", "local"),
    ):
        told = call("convert", source, tmp_path / out, "--to", to, "--allow-pickle")
        assert told.exit_code == 0, told.output
    assert diff(mini, tmp_path / "b", rank=False).same_bytes
    assert gptkit.open_checkpoint(tmp_path / "b").spec == tree()
    told = call("generate", tmp_path / "b", "a", "-n", "8")
    assert told.exit_code == 0 and told.stdout.startswith("a"), told.output
