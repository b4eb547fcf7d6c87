"""Somebody's own port, with its own names and its own mistakes, held against transformers."""

import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gptkit.cli import app
from gptkit.errors import InvalidInput, UsageError
from gptkit.parity.port import load_port, verify_port

PORT = '''
"""A llama written from scratch: other names, q, k and v in one matrix, no gptkit modules."""

import json, math
from pathlib import Path
import torch
from torch import nn
from safetensors.torch import load_file

FOLDER = Path({folder!r})
C = json.loads((FOLDER / "config.json").read_text())
D, H, KV, HD = C["hidden_size"], C["num_attention_heads"], C["num_key_value_heads"], C["head_dim"]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + {eps})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Norm(), Norm()
        self.wqkv = nn.Linear(D, (H + 2 * KV) * HD, bias=False)
        self.wo = nn.Linear(H * HD, D, bias=False)
        self.w1 = nn.Linear(D, C["intermediate_size"], bias=False)
        self.w3 = nn.Linear(D, C["intermediate_size"], bias=False)
        self.w2 = nn.Linear(C["intermediate_size"], D, bias=False)

    def rope(self, x):
        T = x.shape[-2]
        freq = {base} ** (-torch.arange(0, HD, 2, dtype=x.dtype) / HD)
        angle = torch.arange(T, dtype=x.dtype)[:, None] * freq
        a, b = {pairs}
        turned = torch.stack if {interleaved} else torch.cat
        out = turned((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
        return out.flatten(-2) if {interleaved} else out

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.wqkv(self.n1(x)).split([H * HD, KV * HD, KV * HD], dim=-1)
        q, k, v = (t.view(B, T, -1, HD).transpose(1, 2) for t in (q, k, v))
        q, k = self.rope(q), self.rope(k)
        k, v = (t.repeat_interleave(H // KV, dim=1) for t in (k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(HD)
        s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))
        h = self.n2(x)
        return x + self.w2(nn.functional.{activation}(self.w1(h)) * self.w3(h))


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(C["vocab_size"], D)
        self.layers = nn.ModuleList(Layer() for _ in range(C["num_hidden_layers"]))
        self.norm = Norm()
        self.out = nn.Linear(D, C["vocab_size"], bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def build():
    w = {{k: v.float() for k, v in load_file(FOLDER / "model.safetensors").items()}}
    port = Port()
    with torch.no_grad():
        port.tok.weight.copy_(w["model.embed_tokens.weight"])
        port.norm.g.copy_(w["model.norm.weight"])
        port.out.weight.copy_(w["lm_head.weight"])
        for i, layer in enumerate(port.layers):
            p = f"model.layers.{{i}}."
            layer.n1.g.copy_(w[p + "input_layernorm.weight"])
            layer.n2.g.copy_(w[p + "post_attention_layernorm.weight"])
            layer.wqkv.weight.copy_(torch.cat([w[p + f"self_attn.{{n}}_proj.weight"] for n in "qkv"]))
            layer.wo.weight.copy_(w[p + "self_attn.o_proj.weight"])
            layer.w1.weight.copy_(w[p + "mlp.{gate}_proj.weight"])
            layer.w3.weight.copy_(w[p + "mlp.{up}_proj.weight"])
            layer.w2.weight.copy_(w[p + "mlp.down_proj.weight"])
    return port


def nothing():
    return 7


class Wrong(nn.Module):
    def forward(self, ids):
        return torch.zeros(*ids.shape, 3)


def other_vocabulary():
    return Wrong()
'''

SAMPLE = Path(__file__).parents[2] / "samples" / "llama"
RIGHT = {
    "folder": str(SAMPLE),
    "eps": "C['rms_norm_eps']",
    "base": "C['rope_parameters']['rope_theta']",
    "pairs": "x.chunk(2, dim=-1)",
    "interleaved": "False",
    "activation": "silu",
    "gate": "gate",
    "up": "up",
}
WRONG = {
    "eps": ({"eps": "C['rms_norm_eps'] * 10"}, "attention norm"),
    "rope": ({"pairs": "x[..., 0::2], x[..., 1::2]", "interleaved": "True"}, "attention mix"),
    "base": ({"base": "500000.0"}, "attention mix"),
    "activation": ({"activation": "gelu"}, "feed-forward activation"),
    "gate": ({"gate": "up", "up": "gate"}, "feed-forward activation"),
}


@pytest.fixture
def port(tmp_path, monkeypatch):
    """Write a port as a module of its own name; gives its reference."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, **changes: str) -> str:
        text = textwrap.dedent(PORT).format(**{**RIGHT, **changes})
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return f"{name}:build"

    return write


def test_a_right_port_is_the_same(port):
    result = verify_port("sample:llama", port("right_port"))
    assert result.verdict in ("identical", "equal")
    assert result.passed
    assert result.functions <= result.allowed < 1e-3


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_port_is_told_where(port, mistake):
    changes, place = WRONG[mistake]
    result = verify_port("sample:llama", port(f"port_with_wrong_{mistake}", **changes))
    assert result.verdict == "different"
    assert result.first is not None
    assert result.first.place.layer == 0
    assert result.first.place.label.startswith(place)


def test_the_command(port):
    wrong = port("wrong_port", **WRONG["rope"][0])
    run = CliRunner().invoke(app, ["verify", "sample:llama", "--against", wrong])
    assert run.exit_code == 3, run.output
    assert "no module of yours computes" in run.stdout
    assert max(len(line) for line in run.stdout.splitlines()) <= 80
    assert CliRunner().invoke(app, ["verify", "sample:llama", "--against", port("fine_port")]).exit_code == 0


def test_what_is_no_port_is_refused(port):
    port("odd_port")
    for reference in ("odd_port", "odd_port:", ":build", "no_such_module:build", "odd_port:nobody", "odd_port:nothing"):
        with pytest.raises(UsageError):
            load_port(reference)
    with pytest.raises(InvalidInput, match="logits"):
        verify_port("sample:llama", "odd_port:other_vocabulary")
