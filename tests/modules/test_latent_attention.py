"""Latent attention: what it can express without loss, the cache, padding, both kernels, and its place in a tree."""

import json
from typing import Any

import msgspec
import pytest
import torch
from helpers.covering import few
from helpers.families import CONFIGS, VOCAB, spec_of
from helpers.trees import ATTENTIONS, LATENT, TREES, filled, random_weights, with_blocks
from torch import Tensor

from gptkit.components import Attention, LatentAttention, ModelSpec, RMSNorm, Rotary, from_json, to_json
from gptkit.errors import ConfigError
from gptkit.modules import Cache, Decoder
from gptkit.modules.generate import generate
from gptkit.parity.compare import largest_gap

replace = msgspec.structs.replace
trees = pytest.mark.parametrize("name", [name for name in TREES if name.startswith(("latent", "both", "rotary"))])
kernels = pytest.mark.parametrize("kernel", ["sdpa", "eager"])


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def relative(a: Tensor, b: Tensor) -> float:
    return largest_gap([a], [b]) / a.abs().max().item()


# --- grouped attention as latent attention ----------------------------------------------------------------------------


def latent_of(attention: Attention) -> LatentAttention:
    """The full-rank latent attention of a grouped one: rotated elements have keys of their own, the rest the latent."""
    turned = attention.position.dim if isinstance(attention.position, Rotary) else 0
    rest = attention.head_dim - turned
    return LatentAttention(
        hidden_size=attention.hidden_size,
        heads=attention.heads,
        kv_rank=attention.kv_heads * (rest + attention.head_dim),
        nope_dim=rest,
        value_dim=attention.head_dim,
        scale=attention.scale,
        rope_heads=attention.kv_heads if turned else 0,
        position=attention.position,
        window=attention.window,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
    )


def latent_weights(attention: Attention, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its weights: `own` by projection and suffix."""
    turned = attention.position.dim if isinstance(attention.position, Rotary) else 0
    heads, kv_heads, dim, group = attention.heads, attention.kv_heads, attention.head_dim, attention.group
    rest, new = dim - turned, {name: each for name, each in own.items() if name.startswith("o_proj")}
    rank = kv_heads * (rest + dim)
    for suffix in ("weight", "bias"):
        if f"q_proj.{suffix}" not in own:
            continue
        q = own[f"q_proj.{suffix}"].unflatten(0, (heads, dim))
        k, v = (own[f"{each}.{suffix}"].unflatten(0, (kv_heads, dim)) for each in ("k_proj", "v_proj"))
        parts = [q[:, turned:]]
        for key in range(kv_heads if turned else 0):
            mine = (torch.arange(heads) // group == key).double().view(-1, *[1] * (q.ndim - 1))
            parts.append(q[:, :turned] * mine)
        new[f"q_proj.{suffix}"] = torch.cat(parts, dim=1).flatten(0, 1)
        new[f"kv_down_proj.{suffix}"] = torch.cat([k[:, turned:].flatten(0, 1), v.flatten(0, 1)])
        if turned:
            new[f"k_rope_proj.{suffix}"] = k[:, :turned].flatten(0, 1)
    eye = torch.eye(rank, dtype=torch.float64)
    keys, values = (
        (
            each.unflatten(0, (kv_heads, -1)).repeat_interleave(group, dim=0).flatten(0, 1)
            for each in eye.split([kv_heads * rest, kv_heads * dim])
            if len(each)
        )
        if rest
        else (None, eye.unflatten(0, (kv_heads, -1)).repeat_interleave(group, dim=0).flatten(0, 1))
    )
    if keys is not None:
        new["k_up_proj.weight"] = keys
    assert values is not None
    new["v_up_proj.weight"] = values
    return new


def partial(spec: ModelSpec, pairs: Any = "halves") -> ModelSpec:
    """Rotary positions on eight elements of each head alone."""
    attention = spec.blocks[0].attention
    return with_blocks(spec, attention=replace(attention, position=replace(attention.position, dim=8, pairs=pairs)))


GROUPED = {
    "gpt2": spec_of(CONFIGS["gpt2"]),
    "llama-biases": spec_of(CONFIGS["llama"]),
    "llama-mqa": spec_of(CONFIGS["llama-v5"]),
    "llama-partial": partial(spec_of(CONFIGS["llama"])),
    "llama-partial-adjacent": partial(spec_of(CONFIGS["llama"]), "adjacent"),
    "mistral-window": spec_of(CONFIGS["mistral"]),
    "qwen2-biases": spec_of(CONFIGS["qwen2"]),
    "bloom": spec_of(CONFIGS["bloom"]),
    "falcon-rw": spec_of(CONFIGS["falcon-rw"]),
}


@kernels
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_attention_is_latent_attention_of_full_rank(name, kernel):
    spec = GROUPED[name]
    weights = random_weights(spec)
    latent = replace(spec, blocks=tuple(b.replaced(attention=latent_of(b.attention)) for b in spec.blocks))
    new = {name: each for name, each in weights.items() if ".attention." not in name}
    for layer, block in enumerate(spec.blocks):
        path = f"blocks.{layer}.attention."
        own = {name.removeprefix(path): each for name, each in weights.items() if name.startswith(path)}
        new |= {path + name: each for name, each in latent_weights(block.attention, own).items()}
    with torch.inference_mode():
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            before, after = filled(spec, weights, dtype, kernel), filled(latent, new, dtype, kernel)
            assert relative(before(tokens(2, 60)), after(tokens(2, 60))) <= bound


# --- cache, padding, kernels ------------------------------------------------------------------------------------------


@kernels
@trees
def test_cached_tokens_give_the_logits_of_a_whole_pass(name, kernel):
    decoder = filled(TREES[name], random_weights(TREES[name]), attention=kernel)
    ids, cache, found = tokens(2, 40), Cache(TREES[name]), []
    with torch.inference_mode():
        for start, end in ((0, 7), (7, 8), (8, 9), (9, 22), *((n, n + 1) for n in range(22, 40))):
            found.append(decoder(ids[:, start:end], cache=cache))
        assert relative(decoder(ids), torch.cat(found, dim=1)) <= 1e-12


@trees
def test_the_cache_holds_the_latent_and_the_rotated_keys_alone(name):
    spec = TREES[name]
    attention, cache = spec.blocks[0].attention, Cache(spec)
    if isinstance(attention, Attention):
        return
    with torch.inference_mode():
        filled(spec, random_weights(spec))(tokens(1, 8), cache=cache)
    layer = cache.layers[0]["attention"]
    assert layer.keys.memory is not None
    assert layer.values.memory is not None
    numbers = sum(each.shape[1] * each.shape[3] for each in (layer.keys.memory, layer.values.memory))
    assert numbers == attention.kv_rank + attention.rope_dim


@kernels
@pytest.mark.parametrize("side", ["left", "right"])
@trees
def test_padding_changes_nothing_but_for_absolute_positions(name, side, kernel):
    """Relative positions alone: a padded row's logits are those of the row by itself."""
    decoder = filled(TREES[name], random_weights(TREES[name]), attention=kernel)
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    real = slice(12, None) if side == "left" else slice(None, 18)
    mask[1] = 0
    mask[1, real] = 1
    with torch.inference_mode():
        both = decoder(ids, mask)
        assert relative(decoder(ids[1:, real]), both[1:, real]) <= 1e-12
        assert relative(decoder(ids[:1]), both[:1]) <= 1e-12


@trees
def test_kernels_agree(name):
    weights = random_weights(TREES[name])
    with torch.inference_mode():
        a, b = (filled(TREES[name], weights, attention=kernel)(tokens(2, 50)) for kernel in ("sdpa", "eager"))
    assert relative(a, b) <= 1e-12


@trees
def test_padded_decoding_after_a_cache(name):
    decoder = filled(TREES[name], random_weights(TREES[name]))
    ids, mask, cache = tokens(2, 24), torch.ones(2, 24, dtype=torch.long), Cache(TREES[name])
    mask[1, :5] = 0
    with torch.inference_mode():
        whole = decoder(ids, mask)
        parts = [decoder(ids[:, s:e], mask[:, :e], cache=cache) for s, e in ((0, 10), (10, 11), (11, 24))]
    assert relative(whole[mask.bool()], torch.cat(parts, dim=1)[mask.bool()]) <= 1e-12


@trees
def test_generation_is_greedy_over_whole_passes(name):
    decoder = filled(TREES[name], random_weights(TREES[name]), torch.float64)
    ids = tokens(1, 5)[0].tolist()
    found = list(generate(decoder, ids, 20))
    expected = list(ids)
    with torch.inference_mode():
        for _ in range(20):
            expected.append(int(decoder(torch.tensor([expected]))[0, -1].argmax()))
    assert found == expected[5:]


# --- parameters and JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_the_tree_counts_what_its_modules_have(name):
    spec = TREES[name]
    with torch.device("meta"):
        decoder = Decoder(spec)
    modules = {path: tuple(tensor.shape) for path, tensor in decoder.named_parameters()}
    assert modules == {parameter.name: parameter.shape for parameter in spec.parameters()}


@pytest.mark.parametrize("name", TREES)
def test_json_there_and_back(name):
    text = json.dumps(to_json(TREES[name]), allow_nan=False)
    assert from_json(json.loads(text)) == TREES[name]


@few(7)
@pytest.mark.parametrize("name", TREES)
def test_every_parameter_moves_the_logits(name):
    """None is left out of the forward pass."""
    spec, ids = TREES[name], tokens(2, 40)
    decoder = filled(spec, random_weights(spec))
    blind = []
    with torch.inference_mode():
        right = decoder(ids)
        for path, parameter in decoder.named_parameters():
            parameter.neg_()
            if largest_gap([right], [decoder(ids)]) < 1e-6:
                blind.append(path)
            parameter.neg_()
    # Of a single expert the weight is 1 whatever the router says, and without positions on them keys may move together.
    expected = [path for path in dict(decoder.named_parameters()) if name == "experts-one" and "router" in path]
    assert blind == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_heads": 1}, "rope_heads: 1, but its position encoding is NoneType"),
        ({"position": Rotary(dim=8, base=1e4)}, "rope_heads: 0, but its position encoding is Rotary"),
        ({"nope_dim": 0}, "queries of latent attention have dimension 0"),
        ({"kv_norm": RMSNorm(size=21, eps=1e-6)}, "the norm of a latent has size 21, but the latent has dimension 20"),
    ],
)
def test_latent_attention_that_is_none_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        replace(LATENT, **changes)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_pairs_and_norms_are_function(name):
    """Rotary pairs taken otherwise, or a latent's norm left out, are other functions."""
    spec = with_blocks(TREES["latent-plain"], attention=ATTENTIONS[name])
    weights, others = random_weights(spec), []
    attention = ATTENTIONS[name]
    if isinstance(attention.position, Rotary):
        other = "halves" if attention.position.pairs == "adjacent" else "adjacent"
        others.append(replace(attention, position=replace(attention.position, pairs=other)))
    if attention.kv_norm is not None:
        others.append(replace(attention, kv_norm=None))
    with torch.inference_mode():
        right = filled(spec, weights)(tokens(1, 30))
        for other in others:
            tree = with_blocks(spec, attention=other)
            kept = {parameter.name: weights[parameter.name] for parameter in tree.parameters()}
            assert relative(right, filled(tree, kept)(tokens(1, 30))) > 1e-3
