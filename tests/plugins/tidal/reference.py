"""The model as its authors would write it: torch alone, and nothing of gptkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FIELDS", "Tidal", "build"]

FIELDS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "recurrence_size": 96,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""What config.json may say, and what it means where it does not."""


@dataclass(frozen=True)
class Output:
    logits: Tensor


class ScaleNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps, self.g = eps, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * (x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, base: float) -> None:
        super().__init__()
        self.heads, self.base = heads, base
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        batch, steps, hidden = x.shape
        q, k, v = (each(x).view(batch, steps, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        dim, wide = q.shape[-1], torch.promote_types(x.dtype, torch.float32)
        angles = torch.arange(steps)[:, None].to(wide) * (1.0 / self.base ** (torch.arange(0, dim, 2).to(wide) / dim))
        cos, sin = (torch.cat((each, each), -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
        q, k = (each * cos + torch.cat((-each[..., dim // 2 :], each[..., : dim // 2]), -1) * sin for each in (q, k))
        allowed = torch.ones(steps, steps, dtype=torch.bool).tril()
        if real is not None:
            allowed = allowed & real[:, None, None, :]
        mask = torch.where(allowed, torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min)
        scores = q @ k.contiguous().transpose(-1, -2) * dim**-0.5 + mask
        mixed = F.softmax(scores, dim=-1, dtype=wide).to(x.dtype) @ v.contiguous()
        return self.o(mixed.transpose(1, 2).reshape(batch, steps, hidden))


class Recurrence(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        a, u = torch.sigmoid(self.gate(x)), self.value(x)
        if real is not None:
            a = torch.where(real[..., None], a, torch.ones((), dtype=a.dtype))
        h, states = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + (1 - a[:, t]) * u[:, t]
            states.append(h)
        return self.out(torch.stack(states, 1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["norm_eps"]
        self.mixer_norm, self.mlp_norm = ScaleNorm(eps), ScaleNorm(eps)
        if index % 2:
            self.recurrence = Recurrence(hidden, config["recurrence_size"])
        else:
            self.attention = Attention(hidden, config["num_attention_heads"], config["rope_theta"])
        self.recurrent = bool(index % 2)
        self.mlp = MLP(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        mixer = self.recurrence if self.recurrent else self.attention
        x = x + mixer(self.mixer_norm(x), real)
        return x + self.mlp(self.mlp_norm(x))


class Tidal(nn.Module):
    """Token ids (B, T) and a mask of real ones -> logits (B, T, vocabulary)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        config = {**FIELDS, **config}
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = ScaleNorm(config["norm_eps"])
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, real)
        return Output(self.lm_head(self.norm(x)))


def build(config: Mapping[str, Any], attention: str) -> Tidal:
    """For `Architecture.model`; its attention has one way."""
    if attention != "eager":
        raise ValueError(f"tidal has no {attention} attention")
    return Tidal(config)
