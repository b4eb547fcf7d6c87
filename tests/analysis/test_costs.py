"""Costs: against published figures, against a count of the modules' own products, against caches that generated, and
what must not change them.
"""

import math
from typing import Any

import msgspec
import pytest
import torch
from helpers.covering import covered, few, functions, others_slow
from helpers.families import CONFIGS, DECODERS, VARIANTS, Variant, decoder_from, randomised_reference, spec_of
from helpers.family_specs import preset_spec as preset
from helpers.processes import imported
from helpers.trees import TREES as OTHERS
from helpers.trees import filled, of_chosen, random_weights
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gptkit.analysis.activations import ways
from gptkit.analysis.costs import (
    CONTEXT,
    cache_bytes,
    costs,
    forward_flops,
    pairs_in_sight,
    training_flops,
    usual_context,
)
from gptkit.analysis.parameters import count
from gptkit.architectures import architecture_of
from gptkit.components import GatedFeedForward, LatentAttention, MixtureOfExperts, ModelSpec, Rotary
from gptkit.errors import UsageError
from gptkit.modules import Cache, Decoder
from gptkit.modules.generate import generate
from gptkit.modules.scan import State
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch

replace = msgspec.structs.replace


def mixture(spec: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    def made(node: GatedFeedForward) -> MixtureOfExperts:
        return MixtureOfExperts(hidden_size=node.hidden_size, experts=experts, top_k=top_k, expert=node)

    blocks = tuple(block.replaced(feed_forward=made(block.feed_forward)) for block in spec.blocks)  # type: ignore[arg-type]
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
    return replace(spec, blocks=tuple(block.replaced(attention=new) for block in spec.blocks))


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
    assert found.cache_bytes_at_context(2) == nbytes * found.context


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
            for kept in layer.values()
            for part in (kept.keys, kept.values)
            if part.memory is not None
        )
    found = costs(spec, tokens)
    assert kept == found.cached_at_context


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
    assert found.flops["scores"] == len(spec.blocks) * 2 * 50 * 6 * (12 + 4 + 12)  # queries meet the latents
    assert found.parameters == sum(p.count for p in spec.parameters())


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_latent_behind_a_cache_as_the_modules_compute_it_or_cheaper(tokens: int) -> None:
    """The modules make keys and values of each cached latent again; what is told is no more, and as much for one."""
    spec = latent(spec_of(CONFIGS["llama"]), 12)
    again = len(spec.blocks) * 2 * (tokens - 1) * 6 * 12 * (8 + 10)
    products = costs(spec, tokens).total_flops - costs(spec, tokens).flops["scores"]
    written_out = len(spec.blocks) * 2 * tokens * 6 * (8 + 4 + 10) + again
    assert counted(spec, tokens) == products + written_out
    assert costs(spec, tokens).total_flops <= counted(spec, tokens)
    assert costs(spec, 1).total_flops == counted(spec, 1) == forward_flops(spec, 1).dense


def test_windows_and_contexts() -> None:
    spec = spec_of(CONFIGS["mistral"])
    near, far = costs(spec, 8), costs(spec, 1000)
    assert near.cached_at_context == near.cached * 8
    assert far.cached_at_context == far.cached * 15 == costs(spec, 15).cached_at_context
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


# --- many tokens at once ---

ALL = {**{variant.name: of_chosen(spec_of(variant.config)) for variant in VARIANTS}, **OTHERS}
"""Every variant of every family, and trees that no family has: latent attention, mixtures of any kind."""


def fused_forward(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return sdpa_flop_count(q, k, v)


def fused_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def solved(system: Any, values: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """As the product with the inverse."""
    return 2 * math.prod(values) * system[-1]


def convolved_backward(grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Of a kernel a channel, of whose groups torch's count knows nothing."""
    return 2 * (2 * math.prod(grad) * weight[-1])


FUSED = {
    torch.ops.aten.linalg_solve_triangular: solved,
    torch.ops.aten.convolution_backward: convolved_backward,
    # Counted as torch counts the same kernels of other devices; the processor's it does not know.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}


def counted_passes(spec: ModelSpec, kernel: str, batch: int, tokens: int) -> tuple[int, int]:
    """torch's count of a forward pass, and of a forward and a backward pass."""
    model = filled(spec, random_weights(spec), torch.float32, kernel)  # type: ignore[arg-type]
    ids = torch.randint(0, spec.vocab_size, (batch, tokens))
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter, torch.no_grad():
        outputs_of(model, ProbeBatch("", ids))
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        outputs_of(model, ProbeBatch("", ids)).logsumexp(-1).sum().backward()
    return forward, counter.get_total_flops()


@covered("name", "kernel", by=lambda name, kernel: {kernel, *functions(ALL[name])})
@pytest.mark.parametrize("name", others_slow(ALL))
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_flops_are_torchs_count_of_the_built_module(name: str, kernel: str) -> None:
    spec, batch, tokens = ALL[name], 2, 24  # past the windows of 16
    found, training = forward_flops(spec, tokens, batch), training_flops(spec, tokens, batch)
    forward, both = counted_passes(spec, kernel, batch, tokens)
    if spec.pooler is not None:  # which is computed once a text, and is no part of what is told of tokens
        pooled = 2 * batch * spec.hidden_size**2
        forward, both = forward - pooled, both - 3 * pooled
    assert forward == found.dense
    assert training.forward == found
    if spec.relative_bias is not None and kernel == "sdpa":
        return  # the biases take a gradient, for which torch's fused kernel has no way: only some scores are made again
    # A fused kernel makes the scores again for the backward pass, which is counted as half of its forward pass.
    fused = [ways(spec.block_operations(block), kernel) == {"fused"} for block in spec.blocks]
    trees = [replace(spec, blocks=spec.blocks[: layer + 1]) for layer in range(len(fused))]
    so_far = [forward_flops(each, tokens, batch).scores for each in trees]
    alone = [scores - before for scores, before in zip(so_far, [0, *so_far], strict=False)]
    again = sum(scores for scores, is_fused in zip(alone, fused, strict=True) if is_fused)
    assert both == training.dense + training.flash_extra * again // max(found.scores, 1)
    assert (again == 0) == (kernel == "eager" or not any(fused))


def test_a_wrong_tree_is_not_counted_alike() -> None:
    """The check above can fail: another width, other heads, one expert more."""
    spec = OTHERS["experts-gated"]
    forward, _ = counted_passes(spec, "eager", 1, 8)
    wrong = [mixture(spec_of(CONFIGS["llama-2"]), 5, 3), spec_of(CONFIGS["llama"])]
    assert all(forward_flops(each, 8).dense != forward for each in wrong)


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_pairs_in_sight(tokens: int, window: int | None) -> None:
    mask = [(q, k) for q in range(tokens) for k in range(q + 1) if window is None or k > q - window]
    assert pairs_in_sight(tokens, window) == len(mask)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "mixtral", "falcon-7b"])
def test_what_the_mask_needs_is_what_tokens_cost_one_after_the_other(name: str) -> None:
    spec, tokens = ALL[name], 40
    found = forward_flops(spec, tokens, 3)
    assert found.causal == 3 * sum(costs(spec, seen).total_flops for seen in range(1, tokens + 1))
    assert found.causal < found.dense
    assert found.head_of_last * tokens == found.products["head"]
    told = found.as_json()
    assert told["total"] == {
        kind: sum(told["components"].values()) + told["scores"][kind] for kind in ("dense", "causal")
    }


def test_six_n() -> None:
    """Kaplan's 6 N D leaves out scores and head; with them it is what products cost."""
    spec = preset("llama-3-8b")
    found, tokens = training_flops(spec, 1024, 4), 4096
    counted = count(spec)
    assert found.six_n == 6 * counted.total * tokens
    assert found.six_n_non_embedding == 6 * counted.non_embedding * tokens
    vectors = sum(p.count for p in spec.parameters() if len(p.shape) == 1)
    head = 3 * found.forward.products["head"]
    assert found.dense - 3 * found.forward.scores - head == found.six_n_non_embedding - 6 * vectors * tokens
    mixed = training_flops(preset("mixtral-8x7b"), 16)
    assert mixed.six_n == 6 * 16 * 12_879_925_248  # "13B active parameters" (Mistral AI, 2401.04088)


# --- caches ---


@few(6)
@pytest.mark.parametrize("variant", DECODERS, ids=str)
def test_cache_bytes_are_those_of_caches_that_generated(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, new = spec_of(variant.config), 6
    architecture = architecture_of(variant.config)
    reference = randomised_reference(variant.config, attention=architecture.reference(spec)[0])
    ids = torch.randint(0, spec.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        use_cache=True,
    )
    parts = [parts_of(layer) for layer in getattr(out.past_key_values, "layers", [])]
    own = [each for module in reference.modules() if hasattr(module, "conv1d_state") for each in states_of(module)]
    own += out.past_key_values if isinstance(out.past_key_values, list) else []  # RWKV's
    if not any(parts) and not own:
        pytest.skip("transformers has no cache for it")
    seen = ids.shape[1] + new - 1  # the last id was predicted, and never read
    found = cache_bytes(spec, seen, "float32", 2)
    theirs = [part for layer in parts for part in layer]
    assert sum(part.nbytes for part in theirs + own) == found.in_transformers
    repeats = variant.name in ("falcon-40b", "falcon-11b", "falcon-RefinedWeb")
    assert (found.in_transformers > found.nbytes) == repeats
    # Their windows are views of what the last step looked at: memory is that of a rolling buffer.
    expanded = found.in_transformers - found.nbytes
    states = sum(part.nbytes for part in own)
    assert sum(part.untyped_storage().nbytes() for part in theirs) + states == found.buffer + expanded

    made: list[Cache] = []

    def cache(of: ModelSpec) -> Cache:
        made.append(Cache(of))
        return made[-1]

    monkeypatch.setattr("gptkit.modules.generate.Cache", cache)
    ours = decoder_from(reference, variant.config)
    assert len(list(generate(ours, ids[0], new))) == new
    assert bytes_in(made[-1]) == cache_bytes(spec, seen, "float32").nbytes


def states_of(module: Any) -> tuple[Tensor, Tensor]:
    """What RecurrentGemma's module keeps itself."""
    return module.conv1d_state, module.rg_lru.recurrent_states


def parts_of(layer: Any) -> list[Tensor]:
    """What transformers' cache holds of a layer; of one that shares an earlier one's nothing."""
    found = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        found += states.values()
    return [each for each in found if each is not None]


def bytes_in(cache: Cache) -> int:
    """Of the tokens that a cache keeps, which makes room for some more ahead of time, and of states."""
    every = [kept for layer in cache.layers for kept in layer.values()]
    parts = [part for kept in every if hasattr(kept, "keys") for part in (kept.keys, kept.values)]
    kept = [part.memory.narrow(-2, part.first, part.end - part.first) for part in parts if part.memory is not None]
    kept += [
        state for each in every if isinstance(each, State) for state in (each.inputs, each.state) if state is not None
    ]
    return sum(each.nbytes for each in kept)


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith(("latent", "both"))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_cache_bytes_of_latents(name: str, dtype: str) -> None:
    spec, cache = OTHERS[name], Cache(OTHERS[name])
    model = filled(spec, random_weights(spec), getattr(torch, dtype))
    with torch.no_grad():
        for tokens in (19, 1, 1):
            model(torch.zeros(3, tokens, dtype=torch.long), cache=cache)
    found = cache_bytes(spec, 21, dtype, 3)
    assert bytes_in(cache) == found.nbytes
    as_deepseek = getattr(spec.blocks[0].attention, "rope_heads", 0) == 1
    assert found.in_transformers == (found.nbytes if as_deepseek else None)


def test_windows_roll() -> None:
    spec = ALL["mistral"]
    sizes = [cache_bytes(spec, tokens, "float16") for tokens in (1, 15, 16, 17, 1000)]
    a_token = sizes[0].nbytes
    assert [size.nbytes // a_token for size in sizes] == [1, 15, 15, 15, 15]
    assert [size.buffer // a_token for size in sizes] == [1, 15, 16, 16, 16]
    assert a_token == sizes[0].bytes_per_token == cache_bytes(spec, 1, "fp8").nbytes * 2
    assert preset("mistral-7b").blocks[0].attention.window == 4096
    # The published figure: windows of 4,096 tokens of 128 KiB.
    assert cache_bytes(preset("mistral-7b"), 32768).buffer == 4096 * 131_072


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda: costs(preset("gpt2"), 0), "the number of tokens must be"),
        (lambda: forward_flops(preset("gpt2"), 0), "the number of tokens must be"),
        (lambda: forward_flops(preset("gpt2"), 8, -1), "the number of sequences must be"),
        (lambda: training_flops(preset("gpt2"), 1025), "table of 1,024 positions"),
        (lambda: cache_bytes(preset("llama-3-8b"), 2**31), "the number of tokens must be from 1 to"),
        (lambda: cache_bytes(preset("llama-3-8b"), 8, "float7"), "unknown dtype 'float7'"),
        (lambda: cache_bytes(preset("llama-3-8b"), 0), "the number of tokens must be"),
    ],
)
def test_what_cannot_be_asked(asked: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked()


def test_names_of_dtypes() -> None:
    spec = preset("gpt2")
    for name in ("BF16", "bf16", "torch.bfloat16", "bfloat16"):
        assert cache_bytes(spec, 8, name).dtype == "bfloat16"
    assert cache_bytes(spec, 8, "F8_E4M3").dtype == "float8_e4m3fn"
    for size, dtype in ((8, "f64"), (4, "fp32"), (2, "f16"), (1, "int8")):
        assert cache_bytes(spec, 8, dtype).nbytes == 8 * 12 * 2 * 768 * size


def test_nothing_heavy_is_imported() -> None:
    assert not imported("import gptkit.analysis.costs, gptkit.analysis.memory")
