"""Costs: against published figures, against a count of the modules' own products, and what must not change them."""

import msgspec
import pytest
import torch
from families import CONFIGS, spec_of
from torch.utils.flop_counter import FlopCounterMode

from gptkit.analysis.costs import CONTEXT, costs, usual_context
from gptkit.analysis.parameters import count
from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.modules import Cache, Decoder
from gptkit.spec import GatedFeedForward, LatentAttention, MixtureOfExperts, ModelSpec, Rotary

replace = msgspec.structs.replace


def preset(name: str) -> ModelSpec:
    config = presets()[name].config
    return architecture_of(config).spec(config)


def mixture(spec: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    def made(node: GatedFeedForward) -> MixtureOfExperts:
        return MixtureOfExperts(hidden_size=node.hidden_size, experts=experts, top_k=top_k, expert=node)

    blocks = tuple(replace(block, feed_forward=made(block.feed_forward)) for block in spec.blocks)  # type: ignore[arg-type]
    return replace(spec, blocks=blocks)


def latent(spec: ModelSpec, rank: int) -> ModelSpec:
    old = spec.blocks[0].attention
    new = LatentAttention(
        hidden_size=old.hidden_size,
        heads=6,
        kv_rank=rank,
        nope_dim=8,
        value_dim=10,
        scale=0.3,
        rope_heads=1,
        position=Rotary(dim=4, base=1e4),
    )
    return replace(spec, blocks=tuple(replace(block, attention=new) for block in spec.blocks))


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("llama-3-8b", 2 * 32 * 8 * 128 * 2),  # 128 KiB a token, as everywhere told of GQA with 8 of 32 heads
        ("gpt2", 2 * 12 * 768 * 2),
    ],
)
def test_published_cache_sizes(name: str, nbytes: int) -> None:
    found = costs(preset(name))
    assert found.cache_bytes(2) == nbytes
    assert found.held_bytes(2) == nbytes * found.context


def test_palm_appendix_b() -> None:
    """2 N + 4 L H Q T for a forward pass: N without tables, T tokens in sight."""
    spec = preset("llama-3-8b")
    found, blocks = costs(spec, 1000), len(spec.blocks)
    vectors = sum(p.count for p in spec.parameters() if len(p.shape) == 1)
    n = found.parameters - spec.vocab_size * spec.hidden_size - vectors
    assert found.total_flops == 2 * n + 4 * blocks * 32 * 128 * 1000
    assert found.active == found.parameters == count(spec).total


def counted(spec: ModelSpec, tokens: int) -> int:
    """The matrix products of one token more behind `tokens - 1` cached ones, as torch counts them."""
    model = Decoder(spec, attention="eager").eval()
    with torch.no_grad():  # the counter does not know inference mode
        cache = Cache(spec)
        if tokens > 1:
            model(torch.zeros(1, tokens - 1, dtype=torch.long), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    return counter.get_total_flops()


TREES = {
    **{
        name: spec_of(CONFIGS[name])
        for name in ("gpt2", "llama", "mistral", "bloom", "falcon-7b", "falcon-40b", "qwen3")
    },
    "mixture": mixture(spec_of(CONFIGS["llama"]), 4, 2),
}


@pytest.mark.parametrize("name", list(TREES))
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_modules_own_products(name: str, tokens: int) -> None:
    assert counted(TREES[name], tokens) == costs(TREES[name], tokens).total_flops


@pytest.mark.parametrize("name", list(TREES))
def test_the_modules_own_cache(name: str) -> None:
    spec, tokens = TREES[name], 40
    model, cache = Decoder(spec).eval(), Cache(spec)
    with torch.inference_mode():
        model(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
        kept = sum(
            part.append(torch.zeros(1, part.memory.shape[1], 0, part.memory.shape[-1])).numel()
            for layer in cache.layers
            for part in (layer.keys, layer.values)
            if part.memory is not None
        )
    found = costs(spec, tokens)
    assert kept == found.held


def test_a_token_meets_some_experts_alone() -> None:
    spec = spec_of(CONFIGS["llama"])
    dense, sparse, full = costs(spec, 64), costs(mixture(spec, 8, 2), 64), costs(mixture(spec, 8, 8), 64)
    assert full.active == full.parameters == sparse.parameters
    layers = len(spec.blocks)
    expert = sum(p.count for p in spec.parameters() if ".feed_forward." in p.name) // layers
    assert sparse.parameters - sparse.active == layers * 6 * expert
    assert sparse.flops["feed-forward"] == 2 * dense.flops["feed-forward"]
    assert sparse.flops["router"] == layers * 2 * 8 * spec.hidden_size
    assert sparse.cached == dense.cached


def test_a_latent_is_what_is_cached() -> None:
    spec = latent(spec_of(CONFIGS["llama"]), 12)
    found = costs(spec, 50)
    assert found.cached == len(spec.blocks) * (12 + 4)
    assert found.flops["scores"] == len(spec.blocks) * 2 * 50 * 6 * (8 + 4 + 10)
    assert found.parameters == sum(p.count for p in spec.parameters())


def test_windows_and_contexts() -> None:
    spec = spec_of(CONFIGS["mistral"])
    near, far = costs(spec, 8), costs(spec, 1000)
    assert near.held == near.cached * 8
    assert far.held == far.cached * 15 == costs(spec, 15).held
    assert far.flops == costs(spec, 16).flops != near.flops
    assert usual_context(spec) == 256 == costs(spec).context
    assert usual_context(spec_of({**CONFIGS["bloom"]})) == CONTEXT
    table = replace(spec_of(CONFIGS["gpt2"]), context_length=None)
    assert usual_context(table) == 256


def test_json_adds_up() -> None:
    told = costs(spec_of(CONFIGS["falcon-7b"])).as_json()
    flops = told["flops_a_token"]
    assert flops["total"] == sum(value for name, value in flops.items() if name != "total")
    assert told["cache_bytes_a_token"]["float32"] == 2 * told["cache_bytes_a_token"]["bfloat16"]
