"""Linear attention: its formula, chunks and single tokens, padding, gradients."""

import pytest
import torch
from helpers.trees import LINEAR, TREES, filled, random_weights
from torch import Tensor
from torch.nn import functional as F

from gptkit.components import ALiBi, LinearAttention
from gptkit.errors import ConfigError
from gptkit.modules import Cache, Decoder
from gptkit.modules.linear_attention import LinearAttentionModule
from gptkit.modules.registry import module_of

SPEC = TREES["linear"]


def decoder(dtype: torch.dtype = torch.float64) -> Decoder:
    return filled(SPEC, random_weights(SPEC), dtype)


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, SPEC.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


def by_formula(mixer: LinearAttentionModule, x: Tensor) -> Tensor:
    """Every token's weights for all before it, one head after the other."""
    spec, steps = mixer.spec, x.shape[1]
    q, k, v = (each(x).unflatten(-1, (-1, spec.head_dim)) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    assert mixer.q_norm is not None and mixer.k_norm is not None
    rotary = module_of(spec.position)
    tables = rotary.tables(spec.position, torch.arange(steps)[None], x.dtype)
    q, k = (rotary.turn(each.transpose(1, 2), tables) for each in (mixer.q_norm(q), mixer.k_norm(k)))
    g = F.logsigmoid(-mixer.gate_proj(x))
    heads = []
    for head in range(spec.heads):
        own = head // spec.group
        s = spec.scale * q[:, head] @ k[:, own].transpose(-1, -2)
        total = g[..., own].cumsum(-1)
        weights = ((1 + s + s**2 / 2) * (total[:, :, None] - total[:, None]).exp()).tril()
        heads.append(weights @ v[:, :, own] / weights.sum(-1, keepdim=True))
    out: Tensor = mixer.o_proj(torch.cat(heads, dim=-1))
    return out


def test_chunks_and_single_tokens_are_the_formula() -> None:
    model, seen = decoder(), list[tuple[Tensor, Tensor]]()
    mixer = model.blocks[0].recurrence
    assert isinstance(mixer, LinearAttentionModule)
    mixer.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    with torch.no_grad():
        whole = model(ids(2, 200))  # two chunks, the second of which is not full
        (x, out) = seen[0]
        assert torch.allclose(by_formula(mixer, x), out, rtol=1e-9, atol=1e-12)
        cache, parts = Cache(SPEC), []
        for part in ids(2, 200).split([150, 1, 1, 48], dim=1):
            parts.append(model(part, cache=cache))
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-9)
    state = cache.layers[0]["recurrence"].state
    assert state.shape == (2, LINEAR.kv_heads, LINEAR.key_features, LINEAR.head_dim + 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(side: str) -> None:
    model, real, cache = decoder(), ids(1, 20), Cache(SPEC)
    pad, following = ids(1, 7), ids(1, 3)
    row = torch.cat((pad, real) if side == "left" else (real, pad), dim=1)
    mask = torch.ones_like(row)
    here = slice(7, None) if side == "left" else slice(0, 20)
    mask[:] = 0
    mask[:, here] = 1
    with torch.no_grad():
        found = model(row, attention_mask=mask, cache=cache)
        assert torch.isfinite(found).all()
        alone = Cache(SPEC)
        assert torch.allclose(found[:, here], model(real, cache=alone), rtol=1e-9, atol=1e-9)
        if side == "right":
            kept, wanted = (each.layers[0]["recurrence"].state for each in (cache, alone))
            assert torch.allclose(kept, wanted, rtol=1e-9, atol=1e-12)
        else:  # whose keys have turned further
            more = torch.cat((mask, torch.ones_like(following)), dim=1)
            wanted = model(following, cache=alone)
            assert torch.allclose(model(following, attention_mask=more, cache=cache), wanted, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_formula() -> None:
    mixer = decoder().blocks[0].recurrence
    assert isinstance(mixer, LinearAttentionModule)
    model, x = decoder(), ids(1, 140)
    seen: list[Tensor] = []
    model.blocks[0].recurrence.register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    model(x)
    own = model.blocks[0].recurrence
    assert isinstance(own, LinearAttentionModule)
    given = seen[0].detach()
    weight = torch.randn(seen[1].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (by_formula(mixer, given) * weight).sum().backward()
    (seen[1] * weight).sum().backward()
    for name, parameter in mixer.named_parameters():
        found = own.get_parameter(name).grad
        assert parameter.grad is not None and found is not None and parameter.grad.abs().max() > 0
        assert torch.allclose(parameter.grad, found, rtol=1e-7, atol=1e-9), name


def test_the_state_is_in_fp32_whatever_the_model_computes_in() -> None:
    model, cache = decoder(torch.bfloat16), Cache(SPEC)
    with torch.no_grad():
        assert model(ids(1, 9), cache=cache).dtype == torch.bfloat16
    assert cache.layers[0]["recurrence"].state.dtype == torch.float32


def test_what_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="supports only rotary positions"):
        LinearAttention(hidden_size=8, heads=2, kv_heads=2, head_dim=4, scale=0.5, position=ALiBi())
    with pytest.raises(ConfigError, match="not divisible by"):
        LinearAttention(hidden_size=8, heads=3, kv_heads=2, head_dim=4, scale=0.5)
